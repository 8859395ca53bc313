"""Rows of tables: each a dict of Python objects, or those of a micro-batch together, as tensors of columns."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import repeat
from typing import Any

import numpy as np

from paceline.data.row_groups import GroupedRows, row_number
from paceline.errors import DatasetError

Columns = dict[str, Any]  # by name; ``column[row]`` is the value of a row, ``column.take(rows)`` are those of several


class TableRows(GroupedRows):
    """A dataset of the rows of a table, which are read in groups: each row is a dict from a column to its value.

    ``_read(group)`` returns the bytes of a group and its columns.
    """

    _read: Callable[[int], tuple[int, Columns]]

    def __getitem__(self, row: int) -> dict[str, Any]:
        columns, at = self._located(row)
        return {name: column[at] for name, column in columns.items()}

    def __getitems__(self, rows: Sequence[int]) -> list[dict[str, Any]]:
        """Several rows, in the order asked for. Raises IndexError."""
        return self._dicts(rows) if self.is_unchanged else [self[row] for row in rows]

    @property
    def is_unchanged(self) -> bool:
        """Whether rows are those of the table, and not of a subclass that returns others."""
        kind = type(self)
        return kind.__getitem__ is TableRows.__getitem__ and kind.__getitems__ is TableRows.__getitems__

    def batch(self, rows: Sequence[int]) -> dict[str, Any]:
        """Returns what torch's `default_collate` makes of some rows: tensors of columns of numbers.

        Raises IndexError, and what `default_collate` raises.
        """
        parts = self._taken(rows)
        return {name: _collated([(values[name], at) for values, at in parts]) for name in parts[0][0]}

    def _dicts(self, rows: Sequence[int]) -> list[dict[str, Any]]:
        dicts: list[Any] = [None] * len(rows)
        for values, numbers in self._taken(rows):
            by_row = zip(*values.values(), strict=True) if values else repeat((), len(numbers))
            part = list(map(dict, map(zip, repeat(tuple(values)), by_row)))  # without a step of Python for each value
            if len(part) == len(rows):
                return part
            for number, row in zip(numbers.tolist(), part, strict=True):
                dicts[number] = row
        return dicts

    def _located(self, row: int) -> tuple[Columns, int]:
        """Returns columns that have a row, and its number there. Raises IndexError."""
        group, at = self._rows.locate(row)
        return self._columns_of(group), at

    def _columns_of(self, group: int) -> Columns:
        """Returns the columns of a group, which is read unless it is in memory."""
        columns: Columns = self._rows.take(group, self._read)
        return columns

    def _taken(self, rows: Sequence[int]) -> list[tuple[dict[str, Any], Any]]:
        """Returns (values by column, numbers in `rows`) of each part. The values of a part are copied before the next
        part is read, so that only one has to be in memory.
        """
        parts = self._parts(_from_zero(rows, len(self)))
        return [({name: column.take(at) for name, column in columns.items()}, to) for columns, at, to in parts]

    def _parts(self, rows: Any) -> Iterator[tuple[Columns, Any, Any]]:
        """Yields (columns, numbers there, numbers in `rows`), all int64 arrays; the first part has the first row.

        Each part is a group. `rows` are counted from 0.
        """
        for group, at, to in self._rows.divided(rows):
            yield self._columns_of(group), at, to


def refuse_missing(columns: Collection[str] | None, names: Collection[str], where: str) -> None:
    """Raises DatasetError if one of the `columns` is not among the existing `names`."""
    if missing := [name for name in columns or () if name not in names]:
        raise DatasetError(f"{where} has no column {missing[0]}", f"it has {', '.join(sorted(names))}")


def _from_zero(rows: Sequence[int], count: int) -> Any:
    """Returns rows of a table of `count` as an array of int64, without negative numbers. Raises IndexError."""
    try:
        numbers = np.asarray(array("q", rows))  # in a third of the time that numpy takes for a tuple
        if (numbers.view(np.uint64) < count).all():  # negative ones are large then
            return numbers
    except (TypeError, OverflowError):  # which the next line explains
        pass
    return np.array([row_number(row, count) for row in rows], np.int64)


def _collated(parts: Sequence[tuple[Any, Any]]) -> Any:
    """Collates the values of a column, which come in parts: (values, their numbers in the batch)."""
    import torch

    (first, _), *others = parts
    # Of numpy's scalars torch makes no tensor if they are uint64, and of mixed types another one.
    is_array = isinstance(first, np.ndarray) and (first.ndim > 1 or first.dtype != np.uint64)
    if is_array and not others:
        return torch.from_numpy(first)
    if is_array and all(_is_like(values, first) for values, _ in others):
        batch = np.empty((sum(len(values) for values, _ in parts), *first.shape[1:]), first.dtype)
        for values, numbers in parts:
            batch[numbers] = values
        return torch.from_numpy(batch)
    from torch.utils.data import default_collate

    one_by_one: list[Any] = [None] * sum(len(values) for values, _ in parts)
    for values, numbers in parts:
        for number, value in zip(numbers.tolist(), values, strict=True):
            one_by_one[number] = value
    return default_collate(one_by_one)


def _is_like(values: Any, first: Any) -> bool:
    """Whether values are an array of the same type and width as the first ones."""
    return isinstance(values, np.ndarray) and values.dtype == first.dtype and values.shape[1:] == first.shape[1:]


# -- columns of pyarrow ----------------------------------------------------------------------------------------------


class _Numbers:
    """A column of numbers, or of lists of equally many numbers: an array with a row for each."""

    def __init__(self, array: Any) -> None:
        self._array = array

    def __getitem__(self, row: int) -> Any:
        return self._array[row].copy()

    def take(self, rows: Any) -> Any:
        """Returns the values of some rows, as an array of its own."""
        return self._array.take(rows, axis=0)


class _Lists:
    """A column whose values are lists of numbers, of several lengths."""

    def __init__(self, numbers: Any, lengths: Any) -> None:
        self._numbers = numbers
        self._starts = np.concatenate([[0], np.cumsum(lengths)])

    def __getitem__(self, row: int) -> Any:
        return self._numbers[self._starts[row] : self._starts[row + 1]].copy()

    def take(self, rows: Any) -> list[Any]:
        """Returns the values of some rows, each an array of its own."""
        starts, ends = self._starts[rows].tolist(), self._starts[rows + 1].tolist()
        return [self._numbers[start:end].copy() for start, end in zip(starts, ends, strict=True)]


class _Objects:
    """A column of any other values."""

    def __init__(self, values: list[Any]) -> None:
        self._values = values

    def __getitem__(self, row: int) -> Any:
        return self._values[row]

    def take(self, rows: Any) -> list[Any]:
        """Returns the values of some rows."""
        return [self._values[row] for row in rows.tolist()]


class _ByRows:
    """A column with nulls, whose values have the type that they have if only the rows asked for are read."""

    def __init__(self, array: Any) -> None:
        self._array = array

    def __getitem__(self, row: int) -> Any:
        return self.take(np.array([row]))[0]

    def take(self, rows: Any) -> Any:
        """Returns the values of some rows."""
        return _column(self._array.take(rows), False).take(np.arange(len(rows)))


def columns_of(table: Any, by_rows: bool = False) -> Columns:
    """Returns the columns of a table of pyarrow, whose chunks are combined.

    If a column of numbers has nulls, all of its values are Python objects; with `by_rows` only if there is a null in
    the rows that are taken together.
    """
    return {name: _column(table[name].chunk(0), by_rows) for name in table.column_names}


def _column(array: Any, by_rows: bool) -> Any:
    from pyarrow import types

    numbers = (types.is_integer, types.is_floating, types.is_boolean)
    lists = (types.is_list, types.is_large_list, types.is_fixed_size_list)
    is_list = any(is_so(array.type) for is_so in lists)
    kind = array.type.value_type if is_list else array.type
    if not any(is_so(kind) for is_so in numbers):
        return _Objects(array.to_pylist())
    values = array.flatten() if is_list else array
    if array.null_count or values.null_count:
        return _ByRows(array) if by_rows else _Objects(array.to_pylist())
    if not is_list:
        return _Numbers(values.to_numpy(zero_copy_only=False))
    lengths = array.value_lengths().to_numpy()
    if (lengths == lengths[0]).all():
        return _Numbers(values.to_numpy(zero_copy_only=False).reshape(len(lengths), lengths[0]))
    return _Lists(values.to_numpy(zero_copy_only=False), lengths)
