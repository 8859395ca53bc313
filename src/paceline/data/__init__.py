"""Which samples in which order, and who loads them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from paceline.data.parquet import ParquetRows as ParquetRows
    from paceline.data.tokens import Tokens as Tokens

__all__ = ["ParquetRows", "Tokens"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'paceline.data' has no attribute {name!r}")
    if name == "ParquetRows":
        from paceline.data.parquet import ParquetRows

        return ParquetRows
    from paceline.data.tokens import Tokens  # when first used: numpy takes its time

    return Tokens
