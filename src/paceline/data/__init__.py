"""Which samples, in which order, by whom: sample order, grid, loader; and token files as a dataset."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from paceline.data.tokens import Tokens as Tokens

__all__ = ["Tokens"]


def __getattr__(name: str) -> Any:
    if name != "Tokens":
        raise AttributeError(f"module 'paceline.data' has no attribute {name!r}")
    from paceline.data.tokens import Tokens  # when first used: numpy takes its time

    return Tokens
