"""Rows in groups that are read together: which group a row is in, which groups stay in memory, an order by groups."""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from operator import index
from typing import Any

import numpy as np

from paceline.data.order import indices_of_epochs, sample_index
from paceline.errors import UsageError

CACHE = 256 << 20  # bytes of groups that a dataset keeps unless it is given another number


def row_number(row: int, rows: int) -> int:
    """Returns the number of one of so many rows, counted from the first one. Raises IndexError."""
    number = index(row) + (rows if row < 0 else 0)
    if not 0 <= number < rows:
        raise IndexError(f"row {row} of {rows}")
    return number


def locate(row: int, starts: Sequence[int]) -> tuple[int, int]:
    """Returns which part has a row, and the number of the row in it. `starts` has the first row of each part and, last,
    the number of all rows. Raises IndexError.
    """
    number = row_number(row, starts[-1])
    part = bisect_right(starts, number) - 1
    return part, number - starts[part]


class RowGroups:
    """Groups of these numbers of rows, none of them 0, of which as many stay in memory as `cache` bytes hold.

    `dataset` names the class of the dataset for errors. May be pickled and forked; what is in memory stays behind.
    """

    def __init__(self, sizes: Sequence[int], cache: int, dataset: str) -> None:
        self._starts: list[int] = [0, *accumulate(sizes)]
        self._edges = np.array(self._starts, np.int64)
        self._cache, self._dataset = cache, dataset
        self._kept: OrderedDict[int, tuple[int, Any]] = OrderedDict()  # {group: (bytes, what was read)}
        self._shuffled: tuple[Any, list[int], list[int]] = (None, [], [])

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_kept": OrderedDict()}

    def __len__(self) -> int:
        return self._starts[-1]

    def locate(self, row: int) -> tuple[int, int]:
        """Returns the group of a row, and the number of the row in it. Raises IndexError."""
        return locate(row, self._starts)

    def divided(self, rows: Any) -> Iterator[tuple[int, Any, Any]]:
        """Yields each group of some rows, their numbers in it, and their numbers in `rows`; all as arrays of int64.

        Groups come in the order of their first rows in `rows`, which are numbered from 0.
        """
        if not len(rows):
            return
        group = bisect_right(self._starts, int(rows.min())) - 1
        if rows.max() < self._starts[group + 1]:  # as with the order by groups
            yield group, rows - self._starts[group], np.arange(len(rows))
            return
        groups = self._edges.searchsorted(rows, "right") - 1
        for group in dict.fromkeys(groups.tolist()):
            numbers = np.flatnonzero(groups == group)
            yield group, rows[numbers] - self._starts[group], numbers

    def keeps(self, group: int) -> bool:
        """Whether a group is in memory."""
        return group in self._kept

    def take(self, group: int, read: Callable[[int], tuple[int, Any]]) -> Any:
        """Returns a group from memory, or what ``read(group)`` returns after the number of its bytes."""
        if group in self._kept:
            self._kept.move_to_end(group)
            return self._kept[group][1]
        self._kept[group] = read(group)
        while len(self._kept) > 1 and sum(size for size, _ in self._kept.values()) > self._cache:
            self._kept.popitem(last=False)
        return self._kept[group][1]

    def order(self, position: Any, size: int, seed: int, epoch: int) -> Any:
        """A sample order that shuffles the groups, and the rows within each group. Raises UsageError.

        `position` and the result are an int, or tensors of int64 of any shape.
        """
        if size != len(self):
            raise UsageError(
                f"this order is for {len(self)} rows, but the dataset has {size}",
                f"pass the {self._dataset} object itself to steps()",
            )
        if self._shuffled[0] != (seed, epoch):
            count = len(self._starts) - 1
            groups = [int(sample_index(turn, count, seed, epoch)) for turn in range(count)]
            sizes = (self._starts[group + 1] - self._starts[group] for group in groups)
            self._shuffled = ((seed, epoch), groups, [0, *accumulate(sizes)])
        _, groups, starts = self._shuffled

        if not hasattr(position, "numpy"):
            turn = bisect_right(starts, position) - 1
            group, count = groups[turn], starts[turn + 1] - starts[turn]
            return self._starts[group] + int(sample_index(position - starts[turn], count, seed, epoch + group))
        from torch import from_numpy

        positions = position.numpy()  # numpy's masks need no threads
        turns, rows = np.searchsorted(starts, positions, "right") - 1, np.empty_like(positions)
        of_turn, begins = np.array(groups)[turns], np.array(starts)
        counts = (begins[1:] - begins[:-1])[turns]
        for count in np.unique(counts).tolist():  # most groups have the same number of rows
            is_so = counts == count
            in_group = positions[is_so] - begins[turns[is_so]]
            first = self._edges[of_turn[is_so]]
            rows[is_so] = first + indices_of_epochs(in_group, count, seed, epoch + of_turn[is_so])
        return from_numpy(rows)


class GroupedRows:
    """A dataset whose rows are in groups, `_rows`."""

    _rows: RowGroups

    def __len__(self) -> int:
        return len(self._rows)

    def order(self, position: Any, size: int, seed: int = 0, epoch: int = 0) -> Any:
        """A sample order for ``steps(order=rows.order)``: shuffles the groups, and the rows within each group.

        A worker so reads a group once per epoch; an order over all rows would read it again and again.
        `position` is an int or a tensor of int64, and so is the result. Raises UsageError if `size` is not the number
        of rows.
        """
        return self._rows.order(position, size, seed, epoch)


def takes_tensors(order: Any) -> bool:
    """Whether a sample order is `sample_index` or that of grouped rows, which give many rows with one call."""
    return order is sample_index or getattr(order, "__func__", None) is GroupedRows.order
