"""Mixes datasets: rows of several sources, interleaved in given proportions that hold at every moment.

Which source gives a row is decided by a periodic schedule, so the row at any position costs O(1). In a period of W rows
a source of weight w gives w rows. Its row j (from 0) may be given from slot floor(j * W / w) on, and must be given
before slot ceil((j + 1) * W / w). Among the rows that may be given, each slot takes the one with the earliest deadline.
Each source has then given floor(n * w / W) or ceil(n * w / W) of the first n rows, for any number of sources (Steiner
and Yeomans, "Level Schedules for Mixed-Model, Just-in-Time Processes", 1993; Baruah et al., "Proportionate Progress",
1996, calls these schedules P-fair).
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from functools import lru_cache
from heapq import heapify, heappop, heappush
from itertools import accumulate
from numbers import Real
from typing import Any

import numpy as np

from paceline.base.batching import stream_seed
from paceline.data.order import LARGEST, sample_index
from paceline.data.row_groups import GroupedRows, locate
from paceline.errors import DatasetError, UsageError, a

PERIOD = 1 << 16  # the largest denominator of a share, so that schedules stay small
Order = Callable[..., int]


class Mix:
    """The rows of several datasets, interleaved in proportion to their weights: a dataset with random access.

    As a dataset, it is its `sources` ({name: dataset with a length and rows by number}), one after another. The weights
    count in its sample order, `order`, which ``trainer.steps(mix)`` uses by itself. That is an endless sequence:

    - After any n rows, each source has given its share of n, rounded down or up (with several sets of weights: n rows
      from the first row of the current set on). It is one sequence on any team.
    - Each source is shuffled by a permutation of its own. When all of its rows have been given, it begins again with
      another permutation.
    - An epoch is as many rows as all sources have together. The next epoch continues the sequence, so no row of a
      source is lost or repeated because an epoch ends.

    `weights` are {name: weight}, of which only the proportions matter, or {row: {name: weight}}: weights from that row
    of the sequence on, where the first is 0 and rows are counted over all epochs. Shares are exact if they are
    fractions with a common denominator of at most 65,536, otherwise they are rounded to multiples of 1/65,536 (at least
    one).

    With `with_source` each row is a pair: the row, and the number of its source (from 0, in the order of `sources`).

    May be pickled and forked if the sources may. Raises UsageError for arguments that cannot work, DatasetError for a
    source without rows by number.
    """

    def __init__(
        self,
        sources: Mapping[str, Any],
        weights: Mapping[str, float] | Mapping[int, Mapping[str, float]],
        with_source: bool = False,
    ) -> None:
        self.sources, self._with_source = dict(sources), with_source
        if not self.sources:
            raise UsageError("a mix needs at least one source", "pass {name: dataset}")
        self._datasets = [*self.sources.values()]
        self._sizes = [_size(name, source) for name, source in self.sources.items()]
        self._starts: list[int] = [0, *accumulate(self._sizes)]
        if len(self) > LARGEST:
            raise DatasetError(f"the sources have {len(self)} rows in all", "use at most 2**40")
        orders = [source.order if isinstance(source, GroupedRows | Mix) else sample_index for source in self._datasets]
        self._orders: list[Order] = orders
        self._segments = _segments(weights, [*self.sources])

    def __len__(self) -> int:
        return self._starts[-1]

    def __getitem__(self, row: int) -> Any:
        return self.__getitems__([row])[0]

    def __getitems__(self, rows: Sequence[int]) -> list[Any]:
        """Several rows, in the order asked for; those of a source are read with one call. Raises IndexError."""
        wanted: dict[int, list[tuple[int, int]]] = {}  # {source: [(number in `rows`, number in the source)]}
        for number, row in enumerate(rows):
            source, source_row = self._locate(row)
            wanted.setdefault(source, []).append((number, source_row))
        taken: list[Any] = [None] * len(rows)
        for source, pairs in wanted.items():
            dataset = self._datasets[source]
            many = getattr(dataset, "__getitems__", None)
            numbers = [source_row for _, source_row in pairs]
            values = many(numbers) if many else [dataset[source_row] for source_row in numbers]
            for (number, _), value in zip(pairs, values, strict=True):
                taken[number] = (value, source) if self._with_source else value
        return taken

    def source_of(self, row: int) -> tuple[str, int]:
        """Returns which source has a row of this dataset, and the number of the row in the source."""
        source, source_row = self._locate(row)
        return [*self.sources][source], source_row

    def _locate(self, row: int) -> tuple[int, int]:
        return locate(row, self._starts)

    def order(self, position: int, size: int, seed: int = 0, epoch: int = 0) -> int:
        """Returns the row at a position of an epoch, in the order that follows the weights: in O(1), for any position.

        ``trainer.steps(mix)`` uses this order by itself. Position p of epoch e is row ``e * size + p`` of the sequence.
        `seed` selects the permutations of the sources. Raises UsageError if `size` is not the number of rows.
        """
        if size != len(self):
            raise UsageError(
                f"the sources of the mix have {len(self)} rows in all, but the dataset of this run has {size}",
                "pass the Mix itself to steps(), with the sources that it had when the run began",
            )
        number = epoch * size + position
        segment = self._segments[bisect_right(self._segments, number, key=lambda segment: segment.start) - 1]
        source, given = segment.at(number)
        turn, source_position = divmod(given, self._sizes[source])
        source_seed = stream_seed(seed, source, 0)
        row = self._orders[source](source_position, self._sizes[source], source_seed, turn)
        return self._starts[source] + row

    def counts(self, rows: int) -> dict[str, int]:
        """Returns how many of the first `rows` rows of the sequence each source gives."""
        if rows < 0:
            raise UsageError(f"rows={rows} is negative", "pass a number of rows, for example steps * global_batch")
        segment = self._segments[bisect_right(self._segments, rows, key=lambda segment: segment.start) - 1]
        return dict(zip(self.sources, segment.given(rows), strict=True))


def mix(weights: Mapping[Any, float], with_source: bool = False) -> Mix:
    """Returns the `Mix` of datasets in proportion to `weights`, {dataset: weight}; sources are named by number.

    With `with_source` each row is a pair, as in `Mix`.

    Example:
        >>> rows = paceline.data.mix({web: 0.7, code: 0.2, wiki: 0.1})
        >>> for report in trainer.steps(rows, count=10_000):
        ...     pass
    """
    names = [str(number) for number in range(len(weights))]
    return Mix(dict(zip(names, weights, strict=True)), dict(zip(names, weights.values(), strict=True)), with_source)


class _Segment:
    """The part of the sequence from row `start` on, with its weights; before it the sources gave `before` rows."""

    def __init__(self, start: int, weights: tuple[int, ...], before: Sequence[int]) -> None:
        self.start, self._weights, self._before = start, weights, before
        self._sources, self._numbers = _schedule(weights)

    def at(self, row: int) -> tuple[int, int]:
        """Returns the source that gives a row of the sequence, and how many rows the source gave before."""
        cycle, slot = divmod(row - self.start, len(self._sources))
        source = int(self._sources[slot])
        return source, self._before[source] + cycle * self._weights[source] + int(self._numbers[slot])

    def given(self, row: int) -> list[int]:
        """Returns how many rows each source gives before this row of the sequence."""
        cycle, slot = divmod(row - self.start, len(self._sources))
        in_cycle = np.bincount(self._sources[:slot], minlength=len(self._weights)).tolist()
        parts = zip(self._before, self._weights, in_cycle, strict=True)
        return [before + cycle * weight + count for before, weight, count in parts]


@lru_cache(maxsize=64)
def _schedule(weights: tuple[int, ...]) -> tuple[Any, Any]:
    """Returns, for each slot of a period, the source and how many rows the source gave before in this period."""
    period, given = sum(weights), [0] * len(weights)
    sources, numbers = np.empty((2, period), dtype=np.int32)
    waiting = [(0, source) for source, weight in enumerate(weights) if weight]  # (first slot, source)
    ready: list[tuple[int, int]] = []  # (deadline, source)
    heapify(waiting)
    for slot in range(period):
        while waiting and waiting[0][0] <= slot:
            source = heappop(waiting)[1]
            heappush(ready, (-(-(given[source] + 1) * period // weights[source]), source))
        source = heappop(ready)[1]
        sources[slot], numbers[slot] = source, given[source]
        given[source] += 1
        if given[source] < weights[source]:
            heappush(waiting, (given[source] * period // weights[source], source))
    # From bytes, so that nobody can write to them: a change would go unnoticed in the cache.
    return np.frombuffer(sources.tobytes(), np.int32), np.frombuffer(numbers.tobytes(), np.int32)


def _segments(weights: Mapping[Any, Any], names: Sequence[str]) -> list[_Segment]:
    """Returns the segments of the sequence by their first rows. Raises UsageError."""
    by_row: dict[Any, Any] = {0: weights}
    if isinstance(weights, Mapping) and any(isinstance(value, Mapping) for value in weights.values()):
        by_row = dict(weights)
    wrong = [row for row in by_row if not isinstance(row, int) or row < 0]
    if wrong or 0 not in by_row:
        what = f"weights= has {wrong[0]!r} as a row" if wrong else "weights= has no weights for row 0"
        raise UsageError(what, "pass {name: weight}, or {0: {name: weight}, row: {name: weight}, ...}")
    segments, before = list[_Segment](), [0] * len(names)
    for row in sorted(by_row):
        before = segments[-1].given(row) if segments else before
        segments.append(_Segment(row, _whole_weights(by_row[row], names), before))
    return segments


def _whole_weights(weights: Any, names: Sequence[str]) -> tuple[int, ...]:
    """Returns the weights as integers without a common divisor, rounded as `Mix` documents. Raises UsageError."""
    if not isinstance(weights, Mapping) or {*weights} != {*names}:
        given = ", ".join(map(repr, weights)) if isinstance(weights, Mapping) else a(type(weights).__name__)
        what = f"the sources are {', '.join(map(repr, names))}, and weights= has {given}"
        raise UsageError(what, "give each source a weight; 0 leaves it out")
    for name in names:
        if not isinstance(weights[name], Real) or not 0 <= weights[name] < math.inf:
            raise UsageError(f"the weight of {name!r} is {weights[name]!r}", "use a finite number of at least 0")
    fractions = [Fraction(float(weights[name])) for name in names]
    if not any(fractions):
        raise UsageError("the weights of all sources are 0", "give at least one source a positive weight")
    least, total = Fraction(1, PERIOD), sum(fractions)
    shares = [max(least, (one / total).limit_denominator(PERIOD)) if one else Fraction(0) for one in fractions]
    period = min(PERIOD, math.lcm(*(share.denominator for share in shares)))
    return tuple(round(share * period) for share in shares)


def _size(name: str, source: Any) -> int:
    """Returns the number of rows of a source. Raises DatasetError."""
    if not (hasattr(source, "__len__") and hasattr(source, "__getitem__")) or isinstance(source, Mapping | str | bytes):
        what = f"the source {name!r} is {a(type(source).__name__)}, which has no rows by number"
        raise DatasetError(what, "pass a dataset with __len__ and __getitem__")
    if not len(source):
        raise DatasetError(f"the source {name!r} has no rows", "leave it out, or check how it was created")
    return len(source)
