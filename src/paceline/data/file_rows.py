"""Rows that are ranges of bytes of files, numbered through all files."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, Generic, Protocol, TypeVar

from paceline.data.byte_ranges import LocalFiles, RemoteFiles, Span, refuse_change
from paceline.data.row_groups import locate


class RowFile(Protocol):
    """A file of rows: the store that reads it, its path there, and the number of its rows."""

    store: LocalFiles | RemoteFiles
    path: str

    def __len__(self) -> int: ...

    def begins(self) -> Any:
        """Returns where each row begins and, last, where the last row ends: an array of one number more than rows."""


class IndexedFile:
    """A file of which it is known where each row begins."""

    def __init__(self, store: LocalFiles | RemoteFiles, path: str, begins: Any) -> None:
        self.store, self.path, self._begins = store, path, begins

    def __len__(self) -> int:
        return len(self._begins) - 1

    def begins(self) -> Any:
        """Returns where each row begins and, last, where the last row ends."""
        return self._begins


File = TypeVar("File", bound=RowFile)


class FileRows(Generic[File]):
    """The rows of `files`, one file after another. May be pickled and forked."""

    def __init__(self, files: Sequence[File]) -> None:
        self.files = list(files)
        self._starts: list[int] = [0, *accumulate(map(len, self.files))]
        self._versions = [file.store.version(file.path) for file in self.files]

    def __len__(self) -> int:
        return self._starts[-1]

    def locate(self, row: int) -> tuple[int, int]:
        """Returns the number of a row's file, and the number of the row in that file. Raises IndexError."""
        return locate(row, self._starts)

    def read(self, rows: Sequence[int]) -> list[tuple[File, int, Any]]:
        """Returns each row's file, its number there, and its bytes as an uint8 array; all with one request per store.

        Raises IndexError, and DatasetError for a local file that has changed since it was opened.
        """
        wanted = [self.locate(row) for row in rows]
        by_store: dict[int, list[int]] = {}  # {id of a store: numbers in `rows`}
        spans = list[Span]()
        for file_number in {number for number, _ in wanted}:
            self.refuse_change(file_number)
        for number, (file_number, file_row) in enumerate(wanted):
            file = self.files[file_number]
            begins = file.begins()
            spans.append((file.path, int(begins[file_row]), int(begins[file_row + 1])))
            by_store.setdefault(id(file.store), []).append(number)
        taken: list[Any] = [None] * len(wanted)
        for numbers in by_store.values():
            store = self.files[wanted[numbers[0]][0]].store
            for number, data in zip(numbers, store.ranges([spans[number] for number in numbers]), strict=True):
                file_number, file_row = wanted[number]
                taken[number] = self.files[file_number], file_row, data
        return taken

    def refuse_change(self, number: int) -> None:
        """Raises DatasetError if a file, which has this number, is local and has changed since it was opened."""
        file = self.files[number]
        refuse_change(file.path, self._versions[number], file.store.version(file.path))
