"""A dataset of the rows of JSON lines files: each line is a JSON object."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from paceline.base.heartbeat import HEARTBEAT
from paceline.data.byte_ranges import LocalFiles, RemoteFiles, find_files, names_of, refuse_compressed
from paceline.data.file_rows import FileRows, IndexedFile
from paceline.data.row_index import row_begins
from paceline.errors import DatasetError

_BLOCK = 16 << 20  # bytes that are searched for line ends at once
_NEWLINE = 10
_SPACES = np.frombuffer(b" \t\r\n", np.uint8)
_MISSING = "pass files of JSON lines, or a pattern like folder/*.jsonl"


class JsonLines:
    """All rows of files of JSON lines, in the order of the files: each a dict from a name to its value.

    `files`: a path or URL that fsspec knows (``s3://...``, which gets `storage_options`), which may be a pattern
    (``folder/*.jsonl``, whose files are sorted by path), or a list of these. `columns`: which values a row has
    (default: all). Values are as Python's json has them, but lists of numbers are numpy arrays, int64 or float64, which
    torch's collate makes tensors of. Empty lines are left out.

    The first time that a file is opened, it is read once, to find where its lines begin: 8 bytes for each row. This
    index is kept beside a local file, else in the user's cache folder, or in the folder or URL `index`. A row then
    reads its own bytes alone, those of a micro-batch with one request. Local files are mapped. May be pickled and
    forked.

    Raises UsageError for compressed files, in which a row cannot be read without those before it; DatasetError for
    files that are missing or have no rows, and, when a row is read, for a line that is not a JSON object or that lacks
    a column, and for a local file that has changed.
    """

    def __init__(
        self,
        files: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
        columns: Sequence[str] | None = None,
        storage_options: Mapping[str, Any] | None = None,
        index: str | os.PathLike[str] | None = None,
    ) -> None:
        self._columns = None if columns is None else list(columns)
        given = find_files(files, storage_options, _MISSING)
        begins = row_begins(given, "lines", _line_begins, None if index is None else os.fspath(index))
        self._rows = FileRows([IndexedFile(*file, one) for file, one in zip(given, begins, strict=True)])
        if not len(self):
            raise DatasetError(f"{names_of(files)} has no rows", _MISSING)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, row: int) -> dict[str, Any]:
        return self.__getitems__([row])[0]

    def __getitems__(self, rows: Sequence[int]) -> list[dict[str, Any]]:
        """Several rows, in the order asked for. Raises IndexError."""
        return [self._row(line.tobytes(), file, number) for file, number, line in self._rows.read(rows)]

    def _row(self, line: bytes, file: IndexedFile, number: int) -> dict[str, Any]:
        """Returns the values of a line. Raises DatasetError."""
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            why = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
            raise _refusal(file, number, f"is not JSON ({why})") from None
        if not isinstance(record, dict):
            raise _refusal(file, number, "is not a JSON object")
        names = record if self._columns is None else self._columns
        if missing := [name for name in names if name not in record]:
            has = f"it has {', '.join(map(repr, record)) or 'nothing'}"
            raise _refusal(file, number, f"has no {missing[0]!r}", has)
        return {name: _value(record[name]) for name in names}


def _refusal(file: IndexedFile, row: int, what: str, cure: str = "repair or remove this line") -> DatasetError:
    """Returns the error for a row of a file, which names its line."""
    return DatasetError(f"line {_line_number(file, row)} of {file.path} {what}", cure)


def _line_number(file: IndexedFile, row: int) -> int:
    """Returns the number of the line, from 1, that a row of a file is in."""
    begin, lines = int(file.begins()[row]), 1
    for start in range(0, begin, _BLOCK):
        (block,) = file.store.ranges([(file.path, start, min(start + _BLOCK, begin))])
        lines += int((block == _NEWLINE).sum())
    return lines


def _line_begins(store: LocalFiles | RemoteFiles, path: str, size: int) -> Any:
    """Returns where the lines that are not empty begin and, last, where the file ends. Raises UsageError."""
    begins = list[Any]()
    for start, lines in _lines(store, path, size):
        ends = np.flatnonzero(lines == _NEWLINE)
        first_bytes = np.concatenate([[0], ends[:-1] + 1])
        is_blank = np.isin(lines[first_bytes], _SPACES)
        for line in np.flatnonzero(is_blank):  # those that begin with a space may have more
            is_blank[line] = not lines[first_bytes[line] : ends[line]].tobytes().strip()
        begins.append(start + first_bytes[~is_blank])
    return np.concatenate([*begins, [size]])


def _lines(store: LocalFiles | RemoteFiles, path: str, size: int) -> Iterator[tuple[int, Any]]:
    """Yields the content of a file in blocks of complete lines: where each block begins, and its bytes."""
    rest, begin = np.empty(0, np.uint8), 0
    for start in range(0, size, _BLOCK):
        (block,) = store.ranges([(path, start, min(start + _BLOCK, size))])
        HEARTBEAT.beat()
        if start == 0:
            refuse_compressed(block[:8].tobytes(), path)
        ends = np.flatnonzero(block == _NEWLINE)
        complete = int(ends[-1]) + 1 if len(ends) else 0
        if complete:
            yield begin, np.concatenate([rest, block[:complete]])
            rest, begin = block[complete:], start + complete
        else:
            rest = np.concatenate([rest, block])
    if len(rest):  # the file ends without a line end
        yield begin, np.append(rest, np.uint8(_NEWLINE))


def _value(value: Any) -> Any:
    """Returns a value of JSON, lists of numbers as arrays."""
    if not isinstance(value, list) or not value or not {*map(type, value)} <= {int, float}:
        return value
    try:
        return np.asarray(value, np.float64 if any(type(number) is float for number in value) else np.int64)
    except OverflowError:  # an integer of more than 64 bits
        return value
