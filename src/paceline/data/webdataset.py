"""A dataset of the samples of WebDataset shards: tar files in which a sample is a few files with the same name."""

from __future__ import annotations

import io
import os
import re
import tarfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from paceline.base.heartbeat import HEARTBEAT
from paceline.data.byte_ranges import LocalFiles, RemoteFiles, find_files, names_of, refuse_compressed
from paceline.data.decoding import Decoder
from paceline.data.file_rows import FileRows, IndexedFile
from paceline.data.row_index import row_begins
from paceline.errors import DatasetError

_BLOCK = 4 << 20  # bytes that are read at once while a shard is indexed
_RECORD = 512  # a tar file consists of such records
_MISSING = "pass tar files, or a pattern like folder/*.tar or folder/shard-{000..146}.tar"
# As in webdataset's tariterators: a name without extensions, and the extensions; names that are no samples.
_NAME = re.compile(r"((?:.*/|)[^.]+)[.]([^/]*)")
_META = re.compile(r"__[^/]*__($|/)")
_PAX = re.compile(rb"\d+ (path|size|hdrcharset|GNU\.)")  # in an extended header: what makes the next one different
Raw = dict[str, Any]  # "__key__": the name without extensions; {extension: bytes}


class WebDatasetRows:
    """All samples of WebDataset shards, in the order of the files: each a dict from an extension to a value.

    A sample is consecutive files of a tar file with the same name up to its first dot, such as ``7.jpg`` and ``7.cls``;
    ``__key__`` is that name, here ``7``. `files`: a path or URL that fsspec knows (``s3://...``, which gets
    `storage_options`), which may be a pattern (``folder/*.tar``, ``shard-{000..146}.tar``), or a list of these.

    `decode` is True for values by extension: text (txt), int (cls, id, index), json, numpy arrays (npy, npz), msgpack
    (mp), and tensors (pth, read by torch's weights-only loader); also of gzipped files (json.gz). All else, also
    pickles, stays bytes. With False everything stays bytes. A function gets a dict of bytes and returns the row.
    `images` says what jpg, png and other images become, by webdataset's names: "pil", "rgb8" (numpy, height x width x
    3, uint8), "torchrgb8" (a tensor, 3 x height x width), "torchrgb" (the same as float32 from 0 to 1), and the same
    with l and rgba in place of rgb; None leaves them bytes. This needs pillow.

    The first time that a shard is opened, its index is made: where each sample begins. That reads the headers of a
    local file, and nearly everything of a file at a URL. The index of a local file is kept beside it, else in the
    user's cache folder, or in the folder or URL `index`. A row then reads its own bytes alone, those of a micro-batch
    with one request. May be pickled and forked.

    Raises UsageError for compressed shards and arguments that cannot work; DatasetError for files that are missing,
    damaged or without samples, and, when a row is read, for values that cannot be decoded and local files that have
    changed.
    """

    def __init__(
        self,
        files: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
        decode: bool | Callable[[Raw], Any] = True,
        images: str | None = "pil",
        index: str | os.PathLike[str] | None = None,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        self._function = decode if callable(decode) else None
        self._decoder = Decoder(images) if decode is True else None
        shards = find_files(files, storage_options, _MISSING)
        begins = row_begins(shards, "webdataset", _sample_begins, None if index is None else os.fspath(index))
        self._rows = FileRows([IndexedFile(*shard, one) for shard, one in zip(shards, begins, strict=True)])
        if not len(self):
            raise DatasetError(f"{names_of(files)} has no samples", _MISSING)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, row: int) -> Any:
        return self.__getitems__([row])[0]

    def __getitems__(self, rows: Sequence[int]) -> list[Any]:
        """Several rows, in the order asked for. Raises IndexError."""
        return [self._row(shard.path, data.tobytes()) for shard, _, data in self._rows.read(rows)]

    def _row(self, path: str, data: bytes) -> Any:
        raw: Raw = {}
        for file in _walk(io.BytesIO(data)):
            key, extension = _split(file.name)
            if key:
                raw.setdefault("__key__", key)
                raw[extension] = data[file.begin : file.begin + file.size]
        if self._function is not None:
            return self._function(raw)
        if self._decoder is None:
            return raw
        key = raw.pop("__key__")
        where = f"the sample {key} of {path}"
        return {"__key__": key} | {
            name: self._decoder(name, value, f"{name} of {where}") for name, value in raw.items()
        }


def _split(name: str) -> tuple[str, str]:
    """Returns the key and the extension of a file; empty texts if it belongs to no sample."""
    match = _NAME.fullmatch(name)
    if match is None or _META.match(name):
        return "", ""
    return match[1], match[2].lower()


class _TarFile(NamedTuple):
    """A file in a tar file: where its header begins, its name, and which bytes it has."""

    header: int
    name: str
    begin: int
    size: int


def _walk(file: Any, checks: bool = False) -> Iterator[_TarFile]:
    """Yields the ordinary files in a tar file. Raises tarfile.TarError; with `checks` also for a damaged header."""
    offset, first = 0, 0  # of a header, and of the first header of the same file
    while True:
        file.seek(offset)
        head = file.read(_RECORD)
        if len(head) < _RECORD or not any(head):
            if 0 < len(head) < _RECORD:
                raise tarfile.ReadError("truncated header")
            return
        is_known = head[257:263] in (b"ustar\0", b"ustar ") and head[124] < 128
        if is_known and checks and _number(head[148:156]) not in _checksums(head):
            raise tarfile.ReadError("bad checksum")
        size, begin = _number(head[124:136]) if is_known else 0, offset + _RECORD
        after = begin + -(-size // _RECORD) * _RECORD
        if is_known and head[156:157] in b"0\0":
            name, prefix = head[:100].rstrip(b"\0"), head[345:500].rstrip(b"\0")
            name = prefix + b"/" + name if prefix else name
            yield _TarFile(first, name.decode("utf-8", "surrogateescape"), begin, size)
        elif is_known and head[156:157] == b"x" and _PAX.search(file.read(size)) is None:
            offset = after  # times and owners of the next file
            continue
        else:  # a long name, a folder, a link, or an old format: for the library
            file.seek(first)
            with tarfile.open(fileobj=file, mode="r:") as tar:
                info, after = tar.next(), tar.offset
            if info is None:
                return
            if info.isreg():
                if info.issparse():
                    raise tarfile.ReadError(f"{info.name} is a sparse file")
                yield _TarFile(first, info.name, info.offset_data, info.size)
        offset = first = after


def _number(field: bytes) -> int:
    """Returns an octal number of a header. Raises ValueError."""
    return int(field.strip(b" \0") or b"0", 8)


def _checksums(head: bytes) -> tuple[int, int]:
    """Returns the checksums of a header: of unsigned and, as some programs have it, of signed bytes."""
    values = np.frombuffer(head, np.uint8)
    stored = values[148:156].sum(dtype=np.int64)  # counts as eight spaces
    unsigned = int(values.sum(dtype=np.int64) - stored) + 256
    return unsigned, unsigned - 256 * int((values[:148] > 127).sum() + (values[156:] > 127).sum())


def _sample_begins(store: LocalFiles | RemoteFiles, path: str, size: int) -> list[int]:
    """Returns where the samples of a shard begin and, last, where the last one ends. Raises DatasetError."""
    blocks = _Blocks(store, path, size)
    refuse_compressed(blocks.read(8), path)
    begins, end, current, extensions = list[int](), 0, "", set[str]()
    try:
        for file in _walk(blocks, checks=True):
            end = file.begin + -(-file.size // _RECORD) * _RECORD
            if file.begin + file.size > size:
                raise tarfile.ReadError("unexpected end of data")
            key, extension = _split(file.name)
            if key and key != current:
                begins.append(file.header)
                current, extensions = key, set()
            if key and extension in extensions:
                what = f"the sample {key} of {path} has two files of the type {extension}"
                raise DatasetError(what, "give them different extensions, and write the shard again")
            extensions.add(extension)
    except (tarfile.TarError, ValueError) as error:
        raise DatasetError(f"{path} is not a complete tar file ({error})", "copy or write it again") from None
    return [*begins, min(end, size)]


class _Blocks:
    """A file of a store as tarfile reads it: in blocks, so that small members cost few requests, and large ones are
    left out.
    """

    def __init__(self, store: LocalFiles | RemoteFiles, path: str, size: int) -> None:
        self._store, self._path, self._size = store, path, size
        self._at, self._start, self._block = 0, 0, b""

    def tell(self) -> int:
        """Returns the position of the next byte."""
        return self._at

    def seek(self, position: int) -> int:
        """Goes to a position."""
        self._at = position
        return position

    def read(self, count: int) -> bytes:
        """Returns the next bytes, fewer of them at the end."""
        stop = min(self._at + count, self._size)
        if not self._start <= self._at <= stop <= self._start + len(self._block):
            span = self._path, self._at, min(max(stop, self._at + _BLOCK), self._size)
            HEARTBEAT.beat()
            (block,) = self._store.ranges([span]) if span[1] < span[2] else (b"",)
            self._start, self._block = self._at, memoryview(block)  # type: ignore[assignment]
        data = bytes(self._block[self._at - self._start : stop - self._start])
        self._at = max(self._at, stop)
        return data
