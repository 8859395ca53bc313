"""A dataset of the rows of JSON lines files: each line is a JSON object."""

from __future__ import annotations

import json
import os
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from operator import index
from typing import Any

import numpy as np

from paceline.data.byte_ranges import LocalFiles, RemoteFiles, Span, open_files
from paceline.errors import DatasetError, UsageError

_BLOCK = 16 << 20  # bytes that are searched for line ends at once
_NEWLINE = 10
_SPACES = np.frombuffer(b" \t\r\n", np.uint8)
_MISSING = "pass files of JSON lines, or a pattern like folder/*.jsonl"
_COMPRESSED = {b"\x1f\x8b": "gunzip -k", b"\x28\xb5\x2f\xfd": "unzstd", b"BZh": "bunzip2 -k", b"\xfd7zXZ": "unxz -k"}


class JsonLines:
    """All rows of files of JSON lines, in the order of the files: each a dict from a name to its value.

    `files`: a path or URL that fsspec knows (``s3://...``, which gets `storage_options`), which may be a pattern
    (``folder/*.jsonl``, whose files are sorted by path), or a list of these. `columns`: which values a row has
    (default: all). Values are as Python's json has them, but lists of numbers are numpy arrays, int64 or float64, which
    torch's collate makes tensors of. Empty lines are left out.

    Opening reads every file once, to find where its lines begin: 8 bytes of memory for each row. A row then reads its
    own bytes alone, those of a micro-batch with one request. Local files are mapped. May be pickled and forked.

    Raises UsageError for compressed files, in which a row cannot be read without those before it; DatasetError for
    files that are missing or have no rows, and, when a row is read, for a line that is not a JSON object or that lacks
    a column, and for a local file that has changed.
    """

    def __init__(
        self,
        files: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
        columns: Sequence[str] | None = None,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        patterns = [os.fspath(one) for one in ([files] if isinstance(files, str | os.PathLike) else files)]
        self._columns = None if columns is None else list(columns)
        self._files: list[_IndexedFile] = []
        for pattern in patterns:
            store = open_files(pattern, storage_options, _MISSING)
            self._files += [_IndexedFile(store, path) for path in store.find(pattern)]
        self._starts: list[int] = [0, *accumulate(len(file) for file in self._files)]
        if not len(self):
            raise DatasetError(f"{', '.join(patterns) or 'an empty list'} has no rows", _MISSING)

    def __len__(self) -> int:
        return self._starts[-1]

    def __getitem__(self, row: int) -> dict[str, Any]:
        return self.__getitems__([row])[0]

    def __getitems__(self, rows: Sequence[int]) -> list[dict[str, Any]]:
        """Several rows, in the order asked for. Raises IndexError."""
        wanted = [self._locate(row) for row in rows]
        by_store: dict[int, list[int]] = {}  # {id of a store: numbers in `rows`}
        for number, (file, _) in enumerate(wanted):
            by_store.setdefault(id(file.store), []).append(number)
        taken: list[Any] = [None] * len(wanted)
        for file in {file.path: file for file, _ in wanted}.values():
            file.refuse_change()
        for numbers in by_store.values():
            spans = [wanted[number][0].span(wanted[number][1]) for number in numbers]
            lines = wanted[numbers[0]][0].store.ranges(spans)
            for number, line in zip(numbers, lines, strict=True):
                taken[number] = self._row(line.tobytes(), *wanted[number])
        return taken

    def _locate(self, row: int) -> tuple[_IndexedFile, int]:
        """Returns the file of a row, and the number of the row in it."""
        row_index = index(row) + (len(self) if row < 0 else 0)
        if not 0 <= row_index < len(self):
            raise IndexError(f"row {row} of {len(self)}")
        file = bisect_right(self._starts, row_index) - 1
        return self._files[file], row_index - self._starts[file]

    def _row(self, line: bytes, file: _IndexedFile, number: int) -> dict[str, Any]:
        """Returns the values of a line. Raises DatasetError."""
        where = f"line {file.line_number(number)} of {file.path}"
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            why = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
            raise DatasetError(f"{where} is not JSON ({why})", "repair or remove this line") from None
        if not isinstance(record, dict):
            raise DatasetError(f"{where} is not a JSON object", "repair or remove this line")
        names = record if self._columns is None else self._columns
        if missing := [name for name in names if name not in record]:
            raise DatasetError(f"{where} has no {missing[0]!r}", f"it has {', '.join(map(repr, record)) or 'nothing'}")
        return {name: _value(record[name]) for name in names}


class _IndexedFile:
    """A file and where its rows begin. Raises UsageError if it is compressed."""

    def __init__(self, store: LocalFiles | RemoteFiles, path: str) -> None:
        self.store, self.path, self._version = store, path, store.version(path)
        begins, self._blanks = list[Any](), list[int]()  # (the number of rows before each empty line)
        rows, (size,) = 0, store.sizes([path], path)
        for start, lines in _lines(store, path, size):
            ends = np.flatnonzero(lines == _NEWLINE)
            first_bytes = np.concatenate([[0], ends[:-1] + 1])
            is_blank = np.isin(lines[first_bytes], _SPACES)
            for line in np.flatnonzero(is_blank):  # those that begin with a space may have more
                is_blank[line] = not lines[first_bytes[line] : ends[line]].tobytes().strip()
            self._blanks += (rows + np.cumsum(~is_blank)[is_blank]).tolist()
            begins.append(start + first_bytes[~is_blank])
            rows += len(begins[-1])
        data = np.concatenate([*begins, [size]]).astype(np.int64).tobytes()
        self._begins = np.frombuffer(data, np.int64)  # read-only, so that nobody has to look for changes

    def __len__(self) -> int:
        return len(self._begins) - 1

    def span(self, row: int) -> Span:
        """Returns the bytes of a row, perhaps with empty lines after it."""
        return self.path, int(self._begins[row]), int(self._begins[row + 1])

    def refuse_change(self) -> None:
        """Raises DatasetError if a local file has changed: what is mapped of a file that is cut off cannot be read."""
        if self.store.version(self.path) != self._version:
            what = f"{self.path} has changed since it was opened"
            raise DatasetError(what, "start again, and do not write to a file that a training reads")

    def line_number(self, row: int) -> int:
        """Returns the number of the line, from 1, that a row is in."""
        return row + bisect_right(self._blanks, row) + 1


def _lines(store: LocalFiles | RemoteFiles, path: str, size: int) -> Iterator[tuple[int, Any]]:
    """Yields the content of a file in blocks of complete lines: where each block begins, and its bytes."""
    rest, begin = np.empty(0, np.uint8), 0
    for start in range(0, size, _BLOCK):
        (block,) = store.ranges([(path, start, min(start + _BLOCK, size))])
        if start == 0:
            _refuse_compressed(block[:8].tobytes(), path)
        ends = np.flatnonzero(block == _NEWLINE)
        complete = int(ends[-1]) + 1 if len(ends) else 0
        if complete:
            yield begin, np.concatenate([rest, block[:complete]])
            rest, begin = block[complete:], start + complete
        else:
            rest = np.concatenate([rest, block])
    if len(rest):  # the file ends without a line end
        yield begin, np.append(rest, np.uint8(_NEWLINE))


def _refuse_compressed(head: bytes, path: str) -> None:
    for magic, command in _COMPRESSED.items():
        if head.startswith(magic):
            what = f"{path} is compressed, so its rows cannot be read one by one"
            raise UsageError(what, f"decompress it first: {command} {os.path.basename(path)}")


def _value(value: Any) -> Any:
    """Returns a value of JSON, lists of numbers as arrays."""
    if not isinstance(value, list) or not value or not {*map(type, value)} <= {int, float}:
        return value
    try:
        return np.asarray(value, np.float64 if any(type(number) is float for number in value) else np.int64)
    except OverflowError:  # an integer of more than 64 bits
        return value
