"""Sample orders that give some rows more often: by the weight of each row, or equally many rows of each class."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from paceline.base.batching import stream_seed
from paceline.data.order import sample_index
from paceline.errors import UsageError

_DRAWS = 1 << 45  # keeps these streams apart from those of the model, the loader and evaluation
_EACH_ROW = "give one number for each row of the dataset"


class WeightedOrder:
    """A sample order that draws rows with replacement, each with a probability in proportion to its weight.

    ``steps(data, order=WeightedOrder(weights))`` replaces torch's ``WeightedRandomSampler(weights, len(data))``. The
    draw at a position depends on the position, the seed and the epoch alone: it is the same on any team, and takes
    O(log n), by bisection in the cumulative weights.

    `weights` has one number of at least 0 for each row: a sequence, an array or a tensor. Raises UsageError.
    """

    def __init__(self, weights: Any) -> None:
        try:
            array = np.asarray(weights, dtype=np.float64)
        except (TypeError, ValueError) as error:
            raise UsageError(f"weights= is not a sequence of numbers ({error})", _EACH_ROW) from None
        if array.ndim != 1:
            raise UsageError(f"weights= has the shape {array.shape}", _EACH_ROW)
        wrong = np.flatnonzero(~((array >= 0) & (array < np.inf)))
        if len(wrong):
            raise UsageError(f"the weight of row {wrong[0]} is {array[wrong[0]]}", "use finite numbers of at least 0")
        sums = np.cumsum(array)
        if not len(sums) or not 0 < sums[-1] < np.inf:
            what = f"the weights sum to {sums[-1] if len(sums) else 0.0}"
            raise UsageError(what, "give at least one row a positive weight, and none a huge one")
        self._sums = _read_only(sums / sums[-1])

    def __call__(self, position: int, size: int, seed: int = 0, epoch: int = 0) -> int:
        """Returns the row at this position of an epoch. Raises UsageError if `size` is not the number of weights."""
        _compare_size(len(self._sums), "weights", size)
        draw = (stream_seed(seed, _DRAWS + epoch, position) >> 10) / (1 << 53)  # 53 random bits: in [0, 1)
        return int(np.searchsorted(self._sums, draw, side="right"))


class ClassBalancedOrder:
    """A sample order that gives equally many rows of each class, also if the classes of the dataset have unequal sizes.

    Of k classes, each k consecutive rows have one of each, in random order. Each class goes through all of its rows in
    random order before one of them comes again, and an end of an epoch does not interrupt that. An epoch has as many
    rows as the dataset, so rows of small classes come several times in it. The row at a position depends on the
    position, the seed and the epoch alone: it is the same on any team, and takes O(1).

    `labels` has the class of each row, any hashable value: a sequence, an array or a tensor. Raises UsageError.
    """

    def __init__(self, labels: Any) -> None:
        values: Sequence[Any] = labels.tolist() if hasattr(labels, "tolist") else list(labels)
        numbers: dict[Any, int] = {}  # {class: its number}
        try:
            of_row = np.asarray([numbers.setdefault(value, len(numbers)) for value in values], dtype=np.int64)
        except TypeError:
            raise UsageError(
                "labels= has values that are not hashable", "give one number or text for each row"
            ) from None
        if not numbers:
            raise UsageError("labels= is empty", "give the class of each row")
        self._rows = _read_only(np.argsort(of_row, kind="stable"))  # the rows of the first class, of the second, ...
        self._starts: list[int] = [0, *np.cumsum(np.bincount(of_row)).tolist()]

    def __call__(self, position: int, size: int, seed: int = 0, epoch: int = 0) -> int:
        """Returns the row at this position of an epoch. Raises UsageError if `size` is not the number of labels."""
        _compare_size(len(self._rows), "labels", size)
        classes = len(self._starts) - 1
        cycle, turn = divmod(epoch * size + position, classes)
        number = sample_index(turn, classes, seed, cycle)
        begin, end = self._starts[number], self._starts[number + 1]
        again, at = divmod(cycle, end - begin)
        return int(self._rows[begin + sample_index(at, end - begin, stream_seed(seed, number, 0), again)])


def _read_only(array: Any) -> Any:
    """Returns a copy that cannot be written to, so that nobody has to look for changes."""
    return np.frombuffer(array.tobytes(), array.dtype)


def _compare_size(given: int, what: str, size: int) -> None:
    if size != given:
        raise UsageError(f"this order has {given} {what}, but the dataset has {size} rows", f"give {what} for all rows")
