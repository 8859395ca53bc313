"""Reads the documents of text files in pieces: plain or compressed text, JSON lines, and columns of Parquet files."""

from __future__ import annotations

import glob
import gzip
import io
import json
import os
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, NamedTuple

from paceline.base.console import in_one_line
from paceline.base.schema import open_file
from paceline.errors import DatasetError, UsageError, first_line

PIECE = 1 << 20  # bytes of text that a process tokenizes at once
AGAIN = "the same command continues"
_TEXTS = ("string", "large_string", "string_view")  # types of Arrow
_ROWS = 256  # of a Parquet file that become Python texts at once
_KINDS, _PACKINGS = (".txt", ".jsonl"), (".gz", ".zst")
_WRITE_AGAIN = "copy or write it again, and use a new folder as --out"


class Piece(NamedTuple):
    """Consecutive text of an input, at least `PIECE` bytes if there are as many.

    Attributes:
        file: The number of the input.
        path: Its path.
        offset: Where the piece begins: at which byte of the decompressed text, or at which row of a Parquet file.
        data: Complete lines as bytes; or a list of the texts of rows, None for those without one.
        last: Whether the input ends with this piece.
        read: How many bytes of the file are read when the piece begins, for the progress.
    """

    file: int
    path: str
    offset: int
    data: Any
    last: bool
    read: int = 0


def kind_of(path: str) -> tuple[str, str]:
    """Returns what a file has (``.txt``, ``.jsonl``, ``.parquet``, or empty for all else), and ``.gz`` or ``.zst`` if
    it is compressed. A compressed file without another ending is text.
    """
    name, ending = os.path.splitext(path)
    if ending in _PACKINGS:
        inner = os.path.splitext(name)[1] or ".txt"
        return inner if inner in _KINDS else "", ending
    return ending if ending in (*_KINDS, ".parquet") else "", ""


def find_texts(inputs: Sequence[str]) -> dict[str, tuple[int, int]]:
    """Finds the input files; returns {path: (bytes, time of change in ns)} in reading order, each file once.

    `inputs` are files, folders and glob patterns. Raises UsageError.
    """
    paths: dict[str, None] = {}
    for given in inputs:
        matches = [given]
        if os.path.isdir(given):
            matches = sorted(str(path) for path in Path(given).rglob("*") if kind_of(str(path))[0] and path.is_file())
        elif not os.path.exists(given):
            matches = sorted(glob.glob(given, recursive=True))
        if not matches:
            what = f"found no text in {in_one_line(given)}"
            raise UsageError(what, "pass .txt, .jsonl or .parquet files, folders of them, or globs")
        paths |= dict.fromkeys(matches)
    for path in paths:
        if not kind_of(path)[0]:
            what = f"{in_one_line(path)} has an unknown ending"
            raise UsageError(what, "convert it, or rename it if it is plain text")
    return {path: ((known := os.stat(path)).st_size, known.st_mtime_ns) for path in paths}


def pieces_of(paths: Sequence[str], sizes: Sequence[int], field: str, file: int, offset: int) -> Iterator[Piece]:
    """Cuts the inputs into pieces, from the byte or row `offset` of the input number `file` on.

    `sizes` are the bytes of the files; plain text that was appended later is ignored. `field` is the column of Parquet
    files. Raises DatasetError for files that cannot be read, UsageError if pyarrow is needed and missing.
    """
    for which in range(file, len(paths)):
        path, size = paths[which], sizes[which]
        kind, packing = kind_of(path)
        try:
            with open_file(path) as source:
                if kind == ".parquet":
                    cut = _cut_table(source, path, size, field, offset)
                elif packing:
                    cut = _cut_compressed(source, path, packing, offset)
                else:
                    cut = _cut_text(source, path, size, offset)
                for begin, data, last, read in cut:
                    yield Piece(which, path, begin, data, last, read)
        except OSError as error:
            raise DatasetError(f"{path} cannot be read ({first_line(error)})", f"repair that; {AGAIN}") from error
        offset = 0


_Cut = Iterator[tuple[int, Any, bool, int]]  # the fields of pieces: offset, data, last, read


def _cut_text(source: IO[bytes], path: str, size: int, offset: int) -> _Cut:
    """Cuts the first `size` bytes of a file."""
    source.seek(offset)
    while offset < size:
        data = source.read(min(PIECE, size - offset))
        data += source.readline(size - offset - len(data))
        if not data:
            raise DatasetError(f"{path} is shorter than before", f"restore it; {AGAIN}")
        yield offset, data, offset + len(data) == size, offset
        offset += len(data)


def _cut_compressed(raw: IO[bytes], path: str, packing: str, offset: int) -> _Cut:
    """Cuts the content of a compressed file: the same pieces as of the file without compression."""
    with _decompressed(raw, path, packing) as source:
        rest = offset
        while rest:
            skipped = len(source.read(min(PIECE, rest)))
            if not skipped:
                raise DatasetError(f"{path} is shorter than before", f"restore it; {AGAIN}")
            rest -= skipped
        read, data = raw.tell(), source.read(PIECE) + source.readline()
        while data:
            next_read, following = raw.tell(), source.read(PIECE) + source.readline()
            yield offset, data, not following, read
            offset, read, data = offset + len(data), next_read, following


@contextmanager
def _decompressed(raw: IO[bytes], path: str, packing: str) -> Iterator[IO[bytes]]:
    """Opens the content of a compressed file. Raises DatasetError if it is damaged, also while it is read."""
    try:
        if packing == ".gz":
            with gzip.GzipFile(fileobj=raw) as content:
                yield content  # type: ignore[misc]
        else:
            pyarrow = _pyarrow(path, "decompressed")
            with pyarrow.CompressedInputStream(raw, "zstd") as stream:
                yield io.BufferedReader(stream, PIECE)
    except (OSError, EOFError, ValueError, zlib.error) as error:
        raise DatasetError(f"{path} cannot be decompressed ({first_line(error)})", _WRITE_AGAIN) from error


def _pyarrow(path: str, verb: str) -> Any:
    try:
        import pyarrow
    except ModuleNotFoundError as error:
        raise UsageError(f"{path} is {verb} with pyarrow", "pip install 'paceline[parquet]'") from error
    return pyarrow


def _cut_table(source: IO[bytes], path: str, size: int, column: str, offset: int) -> _Cut:
    """Cuts the texts in a column of a Parquet file."""
    pyarrow = _pyarrow(path, "read")
    from pyarrow import parquet

    try:
        table = parquet.ParquetFile(source)
        _check_column(table.schema_arrow, column, path)
        rows = table.metadata.num_rows
        texts, length, begin = list[str | None](), 0, offset
        for number, text in _texts_from(table, column, offset):
            texts.append(text)
            length += len(text or "")
            if length >= PIECE or number == rows - 1:
                yield begin, texts, number == rows - 1, begin * size // rows
                texts, length, begin = [], 0, number + 1
    except (OSError, pyarrow.ArrowException, UnicodeDecodeError) as error:
        raise DatasetError(f"{path} cannot be read as Parquet ({first_line(error)})", _WRITE_AGAIN) from error


def _check_column(schema: Any, column: str, path: str) -> None:
    """Raises DatasetError if a table has no such column, or none of texts."""
    kinds = [(field.name, field.type) for field in schema]
    # A list has a `value_type` as well, but is no text: only a dictionary has an `index_type`, too.
    texts = [name for name, kind in kinds if str(kind.value_type if hasattr(kind, "index_type") else kind) in _TEXTS]
    cure = f"set --field to one of: {', '.join(texts)}" if texts else "write a column of strings"
    if column not in schema.names:
        raise DatasetError(f"{path} has no column {column!r}", cure)
    if column not in texts:
        raise DatasetError(f"the column {column!r} of {path} has values of the type {schema.field(column).type}", cure)


def _texts_from(table: Any, column: str, offset: int) -> Iterator[tuple[int, str | None]]:
    """Yields the number and the text of each row, from the row `offset` on. Row groups before it are not read."""
    number = 0
    for group in range(table.num_row_groups):
        count = table.metadata.row_group(group).num_rows
        if offset >= number + count:
            number += count
            continue
        for batch in table.iter_batches(_ROWS, [group], [column], use_threads=False):
            for text in batch.column(0).to_pylist():
                if number >= offset:
                    yield number, text
                number += 1


def texts_in(piece: Piece, field: str) -> Iterator[str]:
    """Yields the documents in a piece; of a text file, its part of the only one. Raises DatasetError."""
    kind, _ = kind_of(piece.path)
    if kind == ".txt":
        yield _decoded(piece.data, piece)
    elif kind == ".jsonl":
        yield from _texts_in_lines(piece, field)
    else:
        for number, text in enumerate(piece.data, piece.offset):
            if text is None:
                what = f"row {number} of {piece.path} has no text in {field!r}"
                raise DatasetError(what, "leave this row out, or give it an empty text")
            yield text


def _decoded(data: bytes, piece: Piece, offset: int = 0) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        at = piece.offset + offset + error.start
        raise DatasetError(f"{piece.path} is not UTF-8 at byte {at}", "convert it, for example with iconv") from None


def _texts_in_lines(piece: Piece, field: str) -> Iterator[str]:
    """Yields the texts in the lines of a .jsonl file."""
    offset = 0
    for line in piece.data.split(b"\n"):
        if line.strip():
            text, where = _decoded(line, piece, offset), f"the line at byte {piece.offset + offset} of {piece.path}"
            try:
                record = json.loads(text)
            except (ValueError, RecursionError):
                record = None
            if not isinstance(record, dict):
                raise DatasetError(f"{where} is not a JSON object", "repair or remove this line")
            if not isinstance(record.get(field), str):
                raise DatasetError(f"{where} has no text in {field!r}", f"set --field to one of: {', '.join(record)}")
            # Half a surrogate pair, which JSON can write, is no text: it becomes U+FFFD.
            yield record[field].encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        offset += len(line) + 1
