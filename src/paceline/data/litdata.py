"""A dataset of the rows of an optimized dataset of litdata: a folder of chunks."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from operator import index
from typing import Any

import numpy as np

from paceline.data.binary_shards import Shard, ShardFolder, decompress, split_sizes, table_of
from paceline.data.byte_ranges import LocalFiles, RemoteFiles
from paceline.data.decoding import Images, open_image, raw_image
from paceline.data.file_rows import FileRows
from paceline.data.row_groups import CACHE, GroupedRows, RowGroups
from paceline.errors import DatasetError, UsageError, first_line

_MISSING = "pass the folder that litdata.optimize wrote, with its index.json"
_ARROW = b"LDARW01\0"  # ends a chunk whose rows are in an Arrow file behind the table of offsets
_FRAMED = b"LDFZ01\0\0"  # begins a chunk of compressed frames of rows
# The types that litdata numbers, in its order.
_NUMPY = (
    *("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "float32", "float64"),
    *("complex64", "complex128", "bool"),
)
_TORCH = (
    *("float32", "float32", "float64", "float64", "complex64", "complex64", "complex128", "complex128"),
    *("float16", "float16", "bfloat16", "uint8", "int8", "int16", "int16", "int32", "int32", "int64", "int64"),
    *("bool", "uint16"),
)
Decode = Callable[[bytes], Any]


class LitDataRows(GroupedRows):
    """All rows of an optimized dataset of litdata, in the order of its index, each as it was given to ``optimize``.

    `url` is the folder with ``index.json``, or a URL that fsspec knows (``s3://...``, which gets `storage_options`).
    Values are what litdata returns: nestings of numbers, texts, bytes, arrays, tensors, images of pillow, and JPEG and
    other image files as uint8 tensors (3 x height x width, decoded by pillow). For datasets of ``TokensLoader``, a row
    is a tensor or array of `block_size` tokens of one chunk.

    A row of an uncompressed chunk reads its own bytes, those of a micro-batch with one request. Compressed chunks, and
    chunks of plain values, which are Arrow files, are read completely, and as many stay in memory as `cache` bytes
    hold; both need pyarrow. May be pickled and forked.

    Raises UsageError for encrypted data, pickles and other values that are not read, and for a wrong `block_size`;
    DatasetError where there is no such folder, file or row, and for chunks that do not fit their index.
    """

    def __init__(
        self,
        url: str | os.PathLike[str],
        block_size: int | None = None,
        cache: int = CACHE,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        folder = ShardFolder(url, storage_options, _MISSING)
        self._url = folder.url
        try:
            config = folder.index["config"]
            chunks = [one for one in folder.index["chunks"] if one["chunk_size"]]
            paths = [f"{folder.root}/{one['filename']}" for one in chunks]
            self._bytes = [int(one["chunk_bytes"]) for one in chunks]
            self._level = config.get("compression_level") or "chunk"
            kinds = [(config["compression"] or "").partition(":")[0]] * len(chunks)
            if kinds and kinds[0] and isinstance(folder.store, LocalFiles):
                # litdata replaces local compressed files by decompressed ones when it reads them.
                bare = [path.replace(f".{config['compression']}", "") for path in paths]
                is_bare = [
                    not os.path.exists(path) and os.path.exists(one) for path, one in zip(paths, bare, strict=True)
                ]
                paths = [one if is_one else path for path, one, is_one in zip(paths, bare, is_bare, strict=True)]
                kinds = ["" if is_one else kinds[0] for is_one in is_bare]
            loader = config.get("item_loader") or "PyTreeLoader"
            formats = config["data_format"]
            if config.get("encryption") or loader not in ("PyTreeLoader", "TokensLoader"):
                what = "encrypted" if config.get("encryption") else f"for {loader}"
                raise UsageError(f"the chunks of {self._url} are {what}", "write them with litdata's PyTreeLoader")
            self._decoders = [self._decoder(one) for one in formats]
            rows = [index(one["chunk_size"]) for one in chunks]
            shards = [Shard(folder.store, path, count) for path, count in zip(paths, rows, strict=True)]
            files: Sequence[Shard | _TokenBlocks] = shards
            self._is_tokens = loader == "TokensLoader"
            if self._is_tokens:
                size, width = self._checked_block(block_size), np.dtype(_numbers(formats[0])[1]).itemsize
                dims = [one["dim"] // size for one in chunks]
                files = [_TokenBlocks(shard, rows, size * width) for shard, rows in zip(shards, dims, strict=True)]
            elif block_size is not None:
                raise UsageError(f"{self._url} has no tokens, and block_size= was given", "remove block_size=")
            self._tree: Any = None if self._is_tokens else json.loads(config["data_spec"])[1]
        except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
            raise folder.refusal(f"is not an index of litdata ({type(error).__name__}: {first_line(error)})") from error
        used = [number for number, file in enumerate(files) if len(file)]
        if not used:
            raise folder.refusal("lists no rows")
        self._bytes, self._kinds = [self._bytes[number] for number in used], [kinds[number] for number in used]
        self._files = FileRows([files[number] for number in used])
        self._rows = RowGroups([len(file) for file in self._files.files], cache, "LitDataRows")
        self._has_arrow: dict[int, bool] = {}  # by chunk, once it is known

    def __getitem__(self, row: int) -> Any:
        return self.__getitems__([row])[0]

    def __getitems__(self, rows: Sequence[int]) -> list[Any]:
        """Several rows, in the order asked for. Raises IndexError."""
        located = [self._rows.locate(row) for row in rows]
        taken: list[Any] = [None] * len(rows)
        by_range = [number for number, (chunk, _) in enumerate(located) if not self._is_read_at_once(chunk)]
        read = self._files.read([rows[number] for number in by_range])
        for number, (file, _, data) in zip(by_range, read, strict=True):
            content, kind = data.tobytes(), self._kinds[located[number][0]]
            content = decompress(content, kind, file.path) if kind else content
            taken[number] = self._row(content, file.path)
        for number in {*range(len(rows))} - {*by_range}:
            chunk, at = located[number]
            self._files.refuse_change(chunk)  # also of what is in memory, which may view the file
            path, unpacked = self._files.files[chunk].path, self._rows.take(chunk, self._unpack)
            if isinstance(unpacked, _Batches):
                taken[number] = unpacked.row(at)
            else:
                data, begins = unpacked
                taken[number] = self._row(data[begins[at] : begins[at + 1]], path)
        return taken

    def _is_read_at_once(self, chunk: int) -> bool:
        """Whether a chunk cannot be read row by row."""
        if self._kinds[chunk]:
            return self._level != "sample"
        if chunk not in self._has_arrow:
            file, size = self._files.files[chunk], self._bytes[chunk]
            span = file.path, max(0, size - len(_ARROW)), size
            (end,) = file.store.ranges([span])
            self._has_arrow[chunk] = end.tobytes() == _ARROW
        return self._has_arrow[chunk]

    def _unpack(self, chunk: int) -> tuple[int, Any]:
        """Returns the bytes that a chunk takes in memory, and its rows: in Arrow batches, or as bytes and offsets."""
        file = self._files.files[chunk]
        kind = self._kinds[chunk]
        if not kind:
            (data,) = file.store.ranges([(file.path, 0, self._bytes[chunk])])
            return len(data), _Batches(data, len(file), file.path)
        content = file.store.read_all(file.path, file.path)
        if self._level == "batch":
            return _unframed(content, kind, len(file), file.path)
        content = decompress(content, kind, file.path)
        begins = file.begins() if self._is_tokens else table_of(content, len(file), file.path)
        return len(content), (content, begins)

    def _row(self, data: bytes, path: str) -> Any:
        try:
            if self._is_tokens:
                return self._decoders[0](data)
            values = split_sizes(data, [None] * len(self._decoders))
            leaves = iter([decode(value) for decode, value in zip(self._decoders, values, strict=True)])
            return _unflattened(self._tree, leaves)
        except (ValueError, KeyError, IndexError, RuntimeError, StopIteration, struct.error, OSError) as error:
            what = f"a row of {path} cannot be decoded ({first_line(error)})"
            raise DatasetError(what, "copy the chunk again, or write it again") from error

    def _decoder(self, form: str) -> Decode:
        """Returns the function that decodes values of one of litdata's formats. Raises UsageError."""
        name = form.partition(":")[0]
        if name in ("no_header_numpy", "no_header_tensor"):
            with suppress(IndexError, ValueError):  # a number that later versions of litdata may have
                return _Flat(*_numbers(form))
        if name in _BY_FORMAT:
            return _BY_FORMAT[name]
        why = ", which can run code" if name == "pickle" else ""
        raise UsageError(f"{self._url} has values of the type {form}{why}", "write them with another type")

    def _checked_block(self, block_size: int | None) -> int:
        if block_size is None:
            raise UsageError(f"{self._url} has tokens", "pass block_size=, the number of tokens of a row")
        if index(block_size) < 1:
            raise UsageError(f"block_size={block_size} is too small", "use at least 1")
        return index(block_size)


class _TokenBlocks:
    """A chunk of tokens behind its table of offsets, of which each row is a block of so many bytes."""

    def __init__(self, shard: Shard, rows: int, width: int) -> None:
        self.store: LocalFiles | RemoteFiles = shard.store
        self.path, self._rows, self._width, self._first = shard.path, rows, width, 4 * (len(shard) + 2)

    def __len__(self) -> int:
        return self._rows

    def begins(self) -> range:
        """Returns where each row begins and, last, where the last one ends."""
        return range(self._first, self._first + self._rows * self._width + 1, self._width)


class _Batches:
    """The rows of an Arrow file at the end of a chunk. Raises DatasetError and UsageError."""

    def __init__(self, chunk: Any, rows: int, path: str) -> None:
        try:
            import pyarrow
        except ModuleNotFoundError as error:
            raise UsageError(f"{path} is read with pyarrow", "pip install 'paceline[parquet]'") from error
        try:
            (size,) = struct.unpack("<I", chunk[-12:-8].tobytes())
            source = pyarrow.BufferReader(pyarrow.py_buffer(chunk[len(chunk) - 12 - size : -12]))
            if chunk[len(chunk) - 12 - size :][:6].tobytes() == b"ARROW1":
                reader = pyarrow.ipc.open_file(source)
                self._batches = [reader.get_batch(number) for number in range(reader.num_record_batches)]
            else:
                self._batches = list(pyarrow.ipc.open_stream(source))
        except (OSError, ValueError, struct.error, pyarrow.ArrowException) as error:
            raise DatasetError(f"{path} cannot be read ({first_line(error)})", "copy it again") from error
        self._starts = np.cumsum([0, *(batch.num_rows for batch in self._batches)])
        if self._starts[-1] != rows:
            raise DatasetError(f"{path} does not have the {rows} rows of its index", "copy it again")

    def row(self, at: int) -> Any:
        """Returns a row."""
        batch = int(np.searchsorted(self._starts, at, side="right")) - 1
        return self._batches[batch].slice(at - int(self._starts[batch]), 1).to_pylist()[0]


def _unframed(data: bytes, kind: str, rows: int, path: str) -> tuple[int, tuple[bytes, Any]]:
    """Returns the size, the rows and the offsets of a chunk of frames, each of which has several compressed rows."""
    if data[:8] != _FRAMED or len(data) < 24:
        raise DatasetError(f"{path} has no compressed frames", "copy it again, with its index.json")
    _, _, count, _, frames = struct.unpack_from("<HHIII", data, 8)
    begin = 24 + 4 * (count + 1)
    if count != rows or len(data) < begin + 24 * frames:
        raise DatasetError(f"{path} does not have the {rows} rows of its index", "copy it again, with its index.json")
    parts = [struct.unpack_from("<IIQII", data, begin + 24 * number) for number in range(frames)]
    content = b"".join(decompress(data[at : at + packed], kind, path, size) for _, _, at, packed, size in parts)
    return len(content), (content, np.frombuffer(data, "<u4", count + 1, 24).astype(np.int64))


def _numbers(form: str) -> tuple[str, str]:
    """Returns "numpy" or "tensor", and the type of the numbers of a format like ``no_header_tensor:18``.

    Raises ValueError and IndexError for an unknown number of a type.
    """
    name, _, number = form.partition(":")
    library = name.rpartition("_")[2]
    types = _NUMPY if library == "numpy" else _TORCH
    if not number.isdigit():  # nor a negative one
        raise ValueError(f"{form} has no type")
    return library, types[int(number)]


def _unflattened(tree: Mapping[str, Any], leaves: Any) -> Any:
    """Returns a nesting in the form that litdata describes, filled with the `leaves` in their order."""
    kind, children = tree["type"], tree["children_spec"]
    if kind is None:
        return next(leaves)
    values = [_unflattened(child, leaves) for child in children]
    if kind in ("builtins.dict", "collections.OrderedDict"):
        return dict(zip(json.loads(tree["context"]), values, strict=True))
    if kind in ("builtins.list", "builtins.tuple"):
        return values if kind == "builtins.list" else tuple(values)
    raise ValueError(f"it has a {kind}")


class _Flat:
    """Decodes arrays and tensors of one dimension without a header."""

    def __init__(self, library: str, kind: str) -> None:
        self._library, self._kind = library, kind

    def __call__(self, data: bytes) -> Any:
        return np.frombuffer(data, self._kind).copy() if self._library == "numpy" else _tensor(data, self._kind)


def _tensor(data: bytes, kind: str) -> Any:
    import torch

    dtype = getattr(torch, kind)
    return torch.frombuffer(bytearray(data), dtype=dtype) if data else torch.empty(0, dtype=dtype)


def _tensor_of_shape(data: bytes) -> Any:
    kind, rank = struct.unpack_from(">II", data)
    return _tensor(data[8 + 4 * rank :], _TORCH[kind]).reshape(struct.unpack_from(f">{rank}I", data, 8))


def _array_of_shape(data: bytes) -> Any:
    kind, rank = np.frombuffer(data, "<u4", 2).tolist()
    shape = np.frombuffer(data, "<u4", rank, 8).tolist()
    return np.frombuffer(data, _NUMPY[kind], offset=8 + 4 * rank).reshape(shape).copy()


def _image_tensor(data: bytes) -> Any:
    import torch
    from PIL import ImageOps

    upright = ImageOps.exif_transpose(open_image(data)).convert("RGB")
    return torch.from_numpy(np.asarray(upright).transpose(2, 0, 1).copy())


_LISTS = {2: "<i8", 3: "<f8", 4: "?"}  # types of numbers, by the code of a list of them,
_SINGLE = {8: "<q", 9: "<d", 10: "<?"}  # and of one
_IN_RECORDS = {0x10: 11, 0x11: 7, 0x12: 8, 0x13: 9, 0x14: 10}  # the same codes within records


class _Nested:
    """Reads litdata's binary form of nested lists and mappings."""

    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 0

    @classmethod
    def load(cls, data: bytes) -> Any:
        """Returns the value; also of the JSON that older versions wrote."""
        return json.loads(data) if not data or data[0] > 0x20 else cls(data)._value(cls._take_kind)

    def _numbers(self, form: str) -> Any:
        values = struct.unpack_from(form, self._data, self._at)
        self._at += struct.calcsize(form)
        return values[0] if len(values) == 1 else values

    def _bytes(self, size: int) -> bytes:
        self._at += size
        return self._data[self._at - size : self._at]

    def _text(self) -> str:
        return self._bytes(self._numbers("<I")).decode()

    def _take_kind(self) -> int:
        return int(self._numbers("<B"))

    def _kind_in_record(self) -> int:
        return _IN_RECORDS[self._take_kind()]

    def _value(self, take_kind: Callable[[_Nested], int]) -> Any:
        kind = take_kind(self)
        if kind in _SINGLE:
            return self._numbers(_SINGLE[kind])
        if kind == 11:
            return None
        if kind == 7:
            return self._text()
        count = self._numbers("<I")
        if kind == 0:
            return json.loads(self._bytes(count))
        if kind == 1:
            return [self._text() for _ in range(count)]
        if kind in _LISTS:
            return np.frombuffer(self._bytes(count * np.dtype(_LISTS[kind]).itemsize), _LISTS[kind]).tolist()
        if kind == 5:
            return {self._text(): self._value(_Nested._take_kind) for _ in range(count)}
        if kind == 6:
            names = [self._text() for _ in range(self._numbers("<I"))]
            return [{name: self._value(_Nested._kind_in_record) for name in names} for _ in range(count)]
        raise ValueError(f"a nested value of the unknown type {kind}")


def _text(data: bytes) -> str:
    return data.decode()


def _bool(data: bytes) -> bool:
    return data[0] != 0


def _int(data: bytes) -> Any:
    return struct.unpack("<q", data)[0]


def _float(data: bytes) -> Any:
    return struct.unpack("<d", data)[0]


_BY_FORMAT: dict[str, Decode] = {
    **dict.fromkeys(("str", "text"), _text),
    **dict.fromkeys(("bytes", "file"), bytes),
    **dict.fromkeys(("jpeg", "image"), _image_tensor),
    "bool": _bool,
    "int": _int,
    "float": _float,
    "numpy": _array_of_shape,
    "tensor": _tensor_of_shape,
    "pil": raw_image,
    "jpeg_array": Images(0, _image_tensor),
    "json": _Nested.load,
}
