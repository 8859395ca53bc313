"""A dataset of the rows of MDS shards, which MosaicML's streaming library writes."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from decimal import Decimal
from operator import index
from typing import Any

import numpy as np

from paceline.data.binary_shards import Shard, ShardFolder, decompress, split_sizes, table_of
from paceline.data.byte_ranges import LocalFiles
from paceline.data.decoding import Images, open_image, raw_image
from paceline.data.file_rows import FileRows
from paceline.data.row_groups import CACHE, GroupedRows, RowGroups
from paceline.data.table_rows import refuse_missing
from paceline.errors import DatasetError, UsageError, first_line

_MISSING = "pass the folder that MDSWriter wrote, with its index.json"
_NUMBERS = "uint8 uint16 uint32 uint64 int8 int16 int32 int64 float16 float32 float64"
# The codes of an array's type and of the type of its shape, in arrays that have both before their values.
_TYPES = {8: "u1", 9: "i1", 16: "u2", 17: "i2", 18: "f2", 32: "u4", 33: "i4", 34: "f4", 64: "u8", 65: "i8", 66: "f8"}
_SHAPES = ("u1", "u2", "u4", "u8")
Decode = Callable[[bytes], Any]


class MDSRows(GroupedRows):
    """All rows of a folder of MDS shards, in the order of its index: each a dict from a column to its value.

    `url` is the folder with ``index.json``, or a URL that fsspec knows (``s3://...``, which gets `storage_options`).
    `columns`: which to read (default: all). Values are what the streaming library returns: numbers, texts, bytes,
    arrays, JSON, images of pillow. Columns of pickles are refused.

    Opening reads the index alone. A row of an uncompressed shard reads its own bytes, those of a micro-batch with one
    request, after the table of offsets at the beginning of the shard. A row of a compressed shard reads the shard, of
    which as many stay in memory, decompressed, as `cache` bytes hold; zstd, br and snappy need pyarrow. May be pickled
    and forked.

    Raises UsageError for columns that cannot be read, DatasetError where there is no such folder, file, column or row,
    and for shards that do not fit their index.
    """

    def __init__(
        self,
        url: str | os.PathLike[str],
        columns: Sequence[str] | None = None,
        cache: int = CACHE,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        folder = ShardFolder(url, storage_options, _MISSING)
        described = folder.index.get("shards")
        if folder.index.get("version") != 2 or not isinstance(described, list):
            raise folder.refusal("is not an MDS index of version 2")
        try:
            described = [one for one in described if one["samples"]]
            if other := [one["format"] for one in described if one["format"] != "mds"]:
                raise folder.refusal(f"has shards of the format {other[0]}", "write them with MDSWriter")
            self._layouts = [
                (*zip(map(str, one["column_names"]), map(str, one["column_encodings"]), _sizes(one), strict=True),)
                for one in described
            ]
            raw = [f"{folder.root}/{one['raw_data']['basename']}" for one in described]
            packed = [f"{folder.root}/{one['zip_data']['basename']}" if one["zip_data"] else "" for one in described]
            self._kinds = [str(one["compression"] or "").partition(":")[0] for one in described]
            self._sizes = [index(one["raw_data"]["bytes"]) for one in described]
            samples = [index(one["samples"]) for one in described]
        except (KeyError, TypeError, ValueError) as error:
            raise folder.refusal(f"is not an MDS index ({type(error).__name__}: {first_line(error)})") from error
        if not described:
            raise folder.refusal("lists no rows")
        self._columns = self._checked(columns, raw, folder.url)
        # The library leaves decompressed shards where it has read them.
        unpacked = isinstance(folder.store, LocalFiles) and all(map(os.path.exists, raw))
        self._packed = any(packed) and not unpacked
        paths = [one or other for one, other in zip(packed, raw, strict=True)] if self._packed else raw
        self._files = FileRows([Shard(folder.store, path, rows) for path, rows in zip(paths, samples, strict=True)])
        self._rows = RowGroups(samples, cache, "MDSRows")

    def __getitem__(self, row: int) -> dict[str, Any]:
        return self.__getitems__([row])[0]

    def __getitems__(self, rows: Sequence[int]) -> list[dict[str, Any]]:
        """Several rows, in the order asked for. Raises IndexError."""
        located = [self._rows.locate(row) for row in rows]
        if not self._packed:
            read = [(file.path, data.tobytes()) for file, _, data in self._files.read(rows)]
        else:
            read = [self._unpacked_row(shard, at) for shard, at in located]
        return [self._row(shard, *one) for (shard, _), one in zip(located, read, strict=True)]

    def _checked(self, columns: Sequence[str] | None, paths: Sequence[str], url: str) -> list[dict[str, Decode]]:
        """Returns how each shard's values of each wanted column are decoded. Raises UsageError and DatasetError."""
        refuse_missing(columns, {name for layout in self._layouts for name, _, _ in layout}, url)
        known = dict[Any, dict[str, Decode]]()  # by layout: most shards have the same one
        for layout, path in zip(self._layouts, paths, strict=True):
            if layout not in known:
                encodings = {name: encoding for name, encoding, _ in layout}
                names = encodings if columns is None else columns
                refuse_missing(names, encodings, path)
                known[layout] = {name: _decoder(encodings[name], f"the column {name} of {url}") for name in names}
        return [known[layout] for layout in self._layouts]

    def _unpacked_row(self, shard: int, at: int) -> tuple[str, bytes]:
        self._files.refuse_change(shard)
        data, offsets = self._rows.take(shard, self._unpack)
        return self._files.files[shard].path, data[offsets[at] : offsets[at + 1]]

    def _unpack(self, shard: int) -> tuple[int, tuple[bytes, Any]]:
        file = self._files.files[shard]
        data = file.store.read_all(file.path, file.path)
        if self._kinds[shard]:
            data = decompress(data, self._kinds[shard], file.path, self._sizes[shard])
        return len(data), (data, table_of(data, len(file), file.path))

    def _row(self, shard: int, path: str, data: bytes) -> dict[str, Any]:
        layout, row, where = self._layouts[shard], dict[str, Any](), "a row"
        try:
            values = split_sizes(data, [size for _, _, size in layout])
            by_name = {name: value for (name, _, _), value in zip(layout, values, strict=True)}
            for name, decode in self._columns[shard].items():
                where = f"the column {name} of a row"
                row[name] = decode(by_name[name])
        except (KeyError, ValueError, IndexError, ArithmeticError, OSError) as error:
            what = f"{where} of {path} cannot be decoded ({first_line(error)})"
            raise DatasetError(what, "copy the shard again, or write it again") from error
        return row


def _sizes(shard: Mapping[str, Any]) -> list[int | None]:
    """Returns the bytes of a value of each column, None where they differ. Raises TypeError and KeyError."""
    return [index(size) if size else None for size in shard["column_sizes"]]


def _decoder(encoding: str, what: str) -> Decode:
    """Returns the function that decodes values of an encoding. `what` has it, for errors. Raises UsageError."""
    name, _, options = encoding.partition(":")
    decoder = _BY_ENCODING.get(encoding)
    if name == "ndarray":
        with suppress(TypeError, ValueError):  # an unknown type, or a malformed shape
            decoder = _Array(options)
    if decoder is None:
        why = ", which can run code" if encoding == "pkl" else ""
        cure = "leave it out with columns=, or write it with another encoding"
        raise UsageError(f"{what} has the encoding {encoding}{why}", cure)
    return decoder


class _Array:
    """Decodes arrays ``ndarray[:type[:shape]]``; what is not given comes before the values of each array."""

    def __init__(self, options: str) -> None:
        kind, _, shape = options.partition(":")
        self._type = np.dtype(kind) if kind else None
        self._shape = tuple(map(int, shape.split(","))) if shape else None

    def __call__(self, data: bytes) -> Any:
        kind, shape, at = self._type, self._shape, 0
        if kind is None:
            kind, at = np.dtype(_TYPES[data[0]]), 1
        if shape is None:
            rank, width = data[at] >> 2, np.dtype(_SHAPES[data[at] % 4])
            shape = tuple(np.frombuffer(data, width, rank, at + 1).tolist())
            at += 1 + rank * width.itemsize
        return np.frombuffer(data, kind, offset=at).reshape(shape).copy()


class _Number:
    """Decodes numpy's scalars of a type."""

    def __init__(self, name: str) -> None:
        self._type = np.dtype(name)

    def __call__(self, data: bytes) -> Any:
        return np.frombuffer(data, self._type)[0]


def _text(data: bytes) -> str:
    return data.decode()


def _int(data: bytes) -> int:
    return int(np.frombuffer(data, "<i8")[0])


def _text_int(data: bytes) -> int:
    return int(data.decode())


def _text_float(data: bytes) -> float:
    return float(data.decode())


def _text_decimal(data: bytes) -> Decimal:
    return Decimal(data.decode())


_BY_ENCODING: dict[str, Decode] = {
    "bytes": bytes,
    "str": _text,
    "int": _int,
    "json": json.loads,
    "str_int": _text_int,
    "str_float": _text_float,
    "str_decimal": _text_decimal,
    "pil": raw_image,
    **dict.fromkeys(("jpeg", "png"), open_image),
    "list[pil]": Images(4, raw_image),
    **dict.fromkeys(("list[jpeg]", "list[png]"), Images(4, open_image)),
    **dict.fromkeys(("jpeg_array", "jpegarray"), Images(0, open_image)),
    **{name: _Number(name) for name in _NUMBERS.split()},
}
