"""Which samples in which order, and who loads them."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from paceline.data.arrow import ArrowRows as ArrowRows
    from paceline.data.arrow import LanceRows as LanceRows
    from paceline.data.image_folder import ImageFolder as ImageFolder
    from paceline.data.json_lines import JsonLines as JsonLines
    from paceline.data.litdata import LitDataRows as LitDataRows
    from paceline.data.mds import MDSRows as MDSRows
    from paceline.data.mixing import Mix as Mix
    from paceline.data.mixing import mix as mix
    from paceline.data.packing import PackedDocuments as PackedDocuments
    from paceline.data.packing import document_ids as document_ids
    from paceline.data.packing import document_mask as document_mask
    from paceline.data.packing import document_offsets as document_offsets
    from paceline.data.packing import pack as pack
    from paceline.data.parquet import ParquetRows as ParquetRows
    from paceline.data.row_stream import Stream as Stream
    from paceline.data.sampling import ClassBalancedOrder as ClassBalancedOrder
    from paceline.data.sampling import WeightedOrder as WeightedOrder
    from paceline.data.tokens import Tokens as Tokens
    from paceline.data.webdataset import WebDatasetRows as WebDatasetRows

# Where they are: they are imported when first used, as numpy takes its time.
_MODULES = {
    "ArrowRows": "arrow",
    "ClassBalancedOrder": "sampling",
    "ImageFolder": "image_folder",
    "JsonLines": "json_lines",
    "LanceRows": "arrow",
    "LitDataRows": "litdata",
    "MDSRows": "mds",
    "Mix": "mixing",
    "PackedDocuments": "packing",
    "ParquetRows": "parquet",
    "Stream": "row_stream",
    "Tokens": "tokens",
    "WebDatasetRows": "webdataset",
    "WeightedOrder": "sampling",
    "document_ids": "packing",
    "document_mask": "packing",
    "document_offsets": "packing",
    "mix": "mixing",
    "pack": "packing",
}
__all__ = [
    "ArrowRows",
    "ClassBalancedOrder",
    "ImageFolder",
    "JsonLines",
    "LanceRows",
    "LitDataRows",
    "MDSRows",
    "Mix",
    "PackedDocuments",
    "ParquetRows",
    "Stream",
    "Tokens",
    "WebDatasetRows",
    "WeightedOrder",
    "document_ids",
    "document_mask",
    "document_offsets",
    "mix",
    "pack",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'paceline.data' has no attribute {name!r}")
    return getattr(import_module(f"paceline.data.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
