"""A dataset of fixed-length token sequences, cut from token files, by memory map or by byte ranges.

The format (docs/data.md): a folder with raw little-endian shards and ``tokens.json``, which is written last. A single
``.npy`` or raw file will do as well. Nothing is read but the index and the rows that are asked for.
"""

from __future__ import annotations

import hashlib
import io
import os
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from operator import index
from typing import TYPE_CHECKING, Any

import numpy as np

from paceline.base.schema import find_wrong, parse
from paceline.data.byte_ranges import RemoteFiles, Span, location_of, open_files
from paceline.data.row_groups import row_number
from paceline.errors import DatasetError, FormatError, UsageError

if TYPE_CHECKING:
    from torch import Tensor

FORMAT, INDEX = 1, "tokens.json"
DTYPES = ("uint8", "uint16", "uint32", "int32", "int64")
_BLOCK = 16 << 20  # bytes that `verify` holds at once
IGNORED = -100  # the label of a token that counts in no loss, as cross_entropy of torch has it
_MISSING = "pass a token file, or a folder that `paceline tokenize` has finished"


class Tokens:
    """Rows of consecutive tokens, as the training of a language model reads them: a dataset with random access.

    Row i is ``tokens[i * length : i * length + length + 1]``, an int64 tensor of shape (length + 1,) of its own:
    ``row[:-1]`` are the inputs and ``row[1:]`` the targets. So neighbouring rows share one token, and each token but
    the first is a target once. There are (tokens - 1) // length rows; what is left at the end is dropped. Rows cross
    the borders of documents and of shards.

    With `documents` each row is a dict of the first `length` of these tokens (``input_ids``), their ``position_ids``,
    which begin with 0 after each end token and in each row, and their ``labels``, as in `PackedDocuments`.

    `url` is a folder that ``paceline tokenize`` made, a ``.npy`` file with one dimension, or a raw little-endian file
    with its `dtype` (one of `DTYPES`); in the local file system, or as a URL that fsspec knows (``s3://...``), which
    gets `storage_options`. Local files are mapped, others read by ranges of bytes, one request for neighbouring rows
    and those of a micro-batch at once. Opening takes one request for the index and one for each shard's size; a row
    costs the same at any position. May be pickled and forked.

    `tokens` (their number), `dtype`, `vocabulary` (its size) and `end` (the token after each document) are yours to
    read; the last two are None where the file does not say. Tokens are not compared with the vocabulary, nor shards
    with their SHA-256, when rows are read: `verify` does both.

    Raises UsageError for arguments that cannot work, DatasetError for files that are missing, of another size than
    their index says, of an unknown format, or shorter than a row.
    """

    def __init__(
        self,
        url: str | os.PathLike[str],
        length: int,
        dtype: str | None = None,
        storage_options: Mapping[str, Any] | None = None,
        documents: bool = False,
    ) -> None:
        url, self.length, self._documents = location_of(url, _MISSING), index(length), documents
        if self.length < 1:
            raise UsageError(f"length={length} is too small", "use a length of at least 1")
        if dtype is not None and dtype not in DTYPES:
            raise UsageError(f"dtype={dtype!r} is not a token type", f"use one of {', '.join(DTYPES)}")
        self._store = open_files(url, storage_options, _MISSING)
        if isinstance(self._store, RemoteFiles):
            folder = dtype is None and not url.endswith((".bin", ".npy"))
        else:
            url = self._store.root(url)
            folder = os.path.isdir(url)
        self.vocabulary: int | None = None
        self.end: int | None = None
        self._offset = 0  # bytes before the first token of a file
        if folder:
            self._open_folder(url, dtype)
        else:
            self._open_file(url, dtype)
        if documents and self.end is None:
            what = f"{url} does not say which token ends a document, and documents=True was given"
            raise UsageError(what, "use a folder that `paceline tokenize` made, or leave documents= out")
        self.dtype, self.tokens = self._dtype.name, int(self._starts[-1])
        if self.tokens <= self.length:
            what = f"{url} holds {self.tokens} tokens, and a row of length {self.length} needs {self.length + 1}"
            raise DatasetError(what, "use a smaller length, or more text")

    def _open_folder(self, url: str, dtype: str | None) -> None:
        root = self._store.root(url)
        where = f"{url.rstrip('/')}/{INDEX}"
        self._index = read_index(self._store.read_all(f"{root}/{INDEX}", where), where)
        name = self._index["dtype"]
        if dtype not in (None, name):
            raise UsageError(f"the tokens of {url} are {name}, not {dtype}", "remove dtype=")
        self._dtype = np.dtype(name).newbyteorder("<")
        self.vocabulary, self.end = self._index["vocabulary"], self._index["end"]
        shards = self._index["shards"]
        self._paths = [f"{root}/{shard['file']}" for shard in shards]
        self._starts = [0, *accumulate(shard["tokens"] for shard in shards)]
        for shard, size in zip(shards, self._store.sizes(self._paths, "shard of " + url), strict=True):
            if size != shard["bytes"]:
                what = f"{shard['file']} of {url} has {size} bytes instead of {shard['bytes']}"
                raise DatasetError(what, "copy it again, or create the folder again with `paceline tokenize`")

    def _open_file(self, url: str, dtype: str | None) -> None:
        path = self._store.root(url)
        (size,) = self._store.sizes([path], url)
        self._index, self._paths = {}, [path]
        if not size:
            raise DatasetError(f"{url} is empty", "write or copy the file again")
        if url.endswith(".npy"):
            (head,) = self._store.ranges([(path, 0, min(size, 4096))])
            self._dtype, self._offset, count = _npy_header(head.tobytes(), url)
            if self._offset + count * self._dtype.itemsize != size:
                what = f"{url} has {size} bytes, and its header gives {count} tokens of {self._dtype.name}"
                raise DatasetError(what, "write or copy the file again")
            if dtype not in (None, self._dtype.name):
                raise UsageError(f"the tokens of {url} are {self._dtype.name}, not {dtype}", "remove dtype=")
        elif dtype is None:
            raise UsageError(
                f"{url} does not declare the type of its tokens",
                'pass dtype=, for example "uint16" for nanoGPT\'s files',
            )
        else:
            self._dtype = np.dtype(dtype).newbyteorder("<")
            count, rest = divmod(size, self._dtype.itemsize)
            if rest:
                what = f"{url} has {size} bytes, not a multiple of the {self._dtype.itemsize} of {dtype}"
                raise DatasetError(what, "pass the dtype that it was written with, or copy it again")
        self._starts = [0, count]

    def __len__(self) -> int:
        return (self.tokens - 1) // self.length

    def __getitem__(self, row: int) -> Any:
        return self.__getitems__([row])[0]

    def __getitems__(self, rows: Sequence[int]) -> list[Any]:
        """Several rows, in the order asked for. Neighbours are read at once. Raises IndexError."""
        import torch  # here, because `paceline tokenize` needs none

        wanted, length, runs = [row_number(row, len(self)) for row in rows], self.length, list[range]()
        for row in sorted(set(wanted)):
            if runs and runs[-1].stop == row:
                runs[-1] = range(runs[-1].start, row + 1)
            else:
                runs.append(range(row, row + 1))
        token_rows: dict[int, Any] = {}
        read = self._read([(run.start * length, run.stop * length + 1) for run in runs])
        for run, tokens in zip(runs, read, strict=True):
            for row, start in zip(run, range(0, len(tokens), length), strict=False):
                token_rows[row] = tokens[start : start + length + 1]
        wanted_rows = [torch.from_numpy(token_rows[row].astype(np.int64)) for row in wanted]
        return [self._by_document(row[:-1]) for row in wanted_rows] if self._documents else wanted_rows

    def _by_document(self, ids: Tensor) -> dict[str, Tensor]:
        """Returns a row of tokens with their positions and labels."""
        import torch

        numbers = torch.arange(len(ids), dtype=torch.int64)
        begins = numbers == 0
        begins[1:] = ids[:-1] == self.end
        positions = numbers - (numbers * begins).cummax(0).values
        return {"input_ids": ids, "labels": ids.masked_fill(begins, IGNORED), "position_ids": positions}

    def verify(self) -> None:
        """Reads everything: raises DatasetError where a shard's SHA-256 is not that of the index, or a token is not of
        the vocabulary. UsageError: a single file has nothing to be compared with.
        """
        if not self._index:
            raise UsageError(
                f"{self._paths[0]} has no index to verify it against", "verify() needs a folder with tokens.json"
            )
        for path, shard in zip(self._paths, self._index["shards"], strict=True):
            digest, most = hashlib.sha256(), 0
            for start in range(0, shard["bytes"], _BLOCK):
                (block,) = self._store.ranges([(path, start, min(start + _BLOCK, shard["bytes"]))])
                digest.update(block)
                most = max(most, int(block.view(self._dtype).max()))
            if digest.hexdigest() != shard["sha256"]:
                raise DatasetError(f"{path} does not have the SHA-256 of its index", "copy it again")
            if most >= self._index["vocabulary"]:
                what = f"{path} holds the token {most}, and the vocabulary has {self._index['vocabulary']}"
                raise DatasetError(what, "create the folder again with `paceline tokenize`")

    def _read(self, spans: Sequence[tuple[int, int]]) -> Iterator[Any]:
        """Reads the tokens of each (begin, end) span; a span may lie in several shards."""
        width, owners, pieces = self._dtype.itemsize, list[int](), list[Span]()
        for owner, (begin, end) in enumerate(spans):
            shard = bisect_right(self._starts, begin) - 1
            while begin < end:
                first, stop = self._starts[shard], min(end, self._starts[shard + 1])
                start = self._offset + (begin - first) * width
                pieces.append((self._paths[shard], start, start + (stop - begin) * width))
                owners.append(owner)
                begin, shard = stop, shard + 1
        parts: list[list[Any]] = [[] for _ in spans]
        for owner, data in zip(owners, self._store.ranges(pieces), strict=True):
            parts[owner].append(data.view(self._dtype))
        return (part[0] if len(part) == 1 else np.concatenate(part) for part in parts)


def read_index(text: bytes, where: str) -> dict[str, Any]:
    """Parses and checks ``tokens.json``. Raises DatasetError."""
    from paceline.base.file_types import TokenIndex  # needs msgspec

    try:
        token_index = parse(text, where)
        version = token_index["format"]
    except (FormatError, KeyError, TypeError, IndexError):
        raise DatasetError(f"{where} is not a token index", "create it with `paceline tokenize`") from None
    if version != FORMAT:
        what = f"{where} has format version {version}, but this version of Paceline reads version {FORMAT}"
        raise DatasetError(what, "upgrade Paceline, or create the folder again with `paceline tokenize`")
    wrong = find_wrong(token_index, TokenIndex)
    if wrong or any(s["bytes"] != s["tokens"] * np.dtype(token_index["dtype"]).itemsize for s in token_index["shards"]):
        why = f" ({wrong})" if wrong else ""
        raise DatasetError(
            f"{where} is incomplete or contradicts itself{why}", "create it again with `paceline tokenize`"
        )
    return dict(token_index)


def _npy_header(head: bytes, where: str) -> tuple[np.dtype[Any], int, int]:
    """The dtype, the offset of the data in bytes, and the number of tokens. Raises DatasetError."""
    file = io.BytesIO(head)
    try:
        version = np.lib.format.read_magic(file)
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, _, dtype = read(file)
    except ValueError:
        raise DatasetError(f"{where} is not a .npy file", "create it with numpy.save") from None
    if len(shape) != 1 or dtype.name not in DTYPES:
        what = f"{where} holds {dtype.name} of shape {shape}, not a row of tokens"
        raise DatasetError(what, f"save one dimension of type {', '.join(DTYPES)}")
    return dtype, file.tell(), shape[0]
