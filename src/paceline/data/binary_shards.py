"""Files of rows behind a table of their offsets, as MosaicML's MDS and litdata write them; also compressed as a whole.

Such a file begins with the number n of its rows and n + 1 offsets, all uint32: row i is the bytes from offset i to
offset i + 1.
"""

from __future__ import annotations

import bz2
import gzip
import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from paceline.base.schema import parse
from paceline.data.byte_ranges import LocalFiles, RemoteFiles, location_of, open_files
from paceline.errors import DatasetError, FormatError, UsageError, first_line

_PYARROW = ("zstd", "brotli", "lz4", "snappy")
_WIDTH = 4  # bytes of a number in the table


class ShardFolder:
    """A folder with an ``index.json`` and shards. `url` is a path or a URL that fsspec knows, which gets `options`.

    Raises DatasetError if the index is missing or is no JSON object; `cure` is the advice.
    """

    def __init__(self, url: str | os.PathLike[str], options: Mapping[str, Any] | None, cure: str) -> None:
        self.url, self._cure = location_of(url, cure), cure
        self.store = open_files(self.url, options, cure)
        self.root = self.store.root(self.url).rstrip("/")
        where = f"{self.url.rstrip('/')}/index.json"
        try:
            self.index = parse(self.store.read_all(f"{self.root}/index.json", where), where)
        except FormatError:
            self.index = None
        if not isinstance(self.index, dict):
            raise self.refusal("is not an index of shards")

    def refusal(self, what: str, cure: str = "") -> DatasetError:
        """Returns the error for what is wrong with the index."""
        return DatasetError(f"{self.url.rstrip('/')}/index.json {what}", cure or self._cure)


class Shard:
    """A file with a table of offsets, read when it is first needed. `rows` is the number that the index gives."""

    def __init__(self, store: LocalFiles | RemoteFiles, path: str, rows: int) -> None:
        self.store, self.path, self._rows = store, path, rows
        self._offsets: Any = None

    def __len__(self) -> int:
        return self._rows

    def begins(self) -> Any:
        """Returns where each row begins and, last, where the last one ends. Raises DatasetError."""
        if self._offsets is None:
            (head,) = self.store.ranges([(self.path, 0, _WIDTH * (self._rows + 2))])
            self._offsets = table_of(head, self._rows, self.path)
        return self._offsets


def table_of(data: Any, rows: int, path: str) -> Any:
    """Returns the offsets of a shard's rows. Raises DatasetError for another number of rows, and if one ends before it
    begins.
    """
    is_whole = len(data) >= _WIDTH * (rows + 2) and int(np.frombuffer(data, "<u4", 1)[0]) == rows
    offsets = np.frombuffer(data, "<u4", rows + 1, _WIDTH).astype(np.int64) if is_whole else np.empty(0, np.int64)
    if not is_whole or (np.diff(offsets) < 0).any():
        raise DatasetError(f"{path} does not have the {rows} rows of its index", "copy it again, with its index.json")
    return np.frombuffer(offsets.tobytes(), np.int64)  # read-only, so that nobody has to look for changes


def decompress(data: bytes, kind: str, path: str, size: int | None = None) -> bytes:
    """Returns the content of a compressed file of `size` bytes (None: unknown). Raises DatasetError and UsageError."""
    try:
        if kind in ("gz", "bz2"):
            return gzip.decompress(data) if kind == "gz" else bz2.decompress(data)
        name = {"br": "brotli", "zst": "zstd"}.get(kind, kind)
        if name not in _PYARROW:
            raise UsageError(f"{path} is compressed with {kind}", f"use {', '.join(_PYARROW)}, gz or bz2, or none")
        try:
            import pyarrow
        except ModuleNotFoundError as error:
            raise UsageError(f"{path} is decompressed with pyarrow", "pip install 'paceline[parquet]'") from error
        if size is not None:
            return pyarrow.decompress(data, size, name, asbytes=True)  # type: ignore[no-any-return]
        with pyarrow.CompressedInputStream(pyarrow.BufferReader(data), name) as stream:
            return stream.read()  # type: ignore[no-any-return]
    except (OSError, EOFError, ValueError) as error:
        raise DatasetError(f"{path} cannot be decompressed ({first_line(error)})", "copy it again") from error


def split_sizes(data: bytes, sizes: Sequence[int | None]) -> list[bytes]:
    """Returns the values of a row: each of a fixed size or, if that is None, of a size at the beginning of the row.

    Raises ValueError if the row is shorter or longer than its values.
    """
    at = _WIDTH * sum(size is None for size in sizes)
    given = iter(np.frombuffer(data, "<u4", at // _WIDTH).tolist())
    values = list[bytes]()
    for size in sizes:
        end = at + (next(given) if size is None else size)
        values.append(data[at:end])
        at = end
    if at != len(data):
        raise ValueError(f"it has {len(data)} bytes, and its values {at}")
    return values
