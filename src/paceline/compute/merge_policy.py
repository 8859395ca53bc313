"""Decides how many micro-batches are executed together.

It changes only how a worker executes its share, never what the share is.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from paceline.base.batching import Agreed
from paceline.compute.job import StepSums

Decision = tuple[str, str]  # what, why
TRIES = 4  # steps with each of two sizes that are compared; twice as many unless one is clearly faster,
CLEARLY = 1.2  # by this factor
GAIN = 0.98  # a larger size, which needs more memory, must take at most this part of the seconds of a smaller one
RARELY = 50  # steps between two searches, at least, for each step that tried another size: 2 % of all steps
SLOWER, LAST = 1.25, 16  # if the last steps take so many times as long as before, the next search begins early


class MergePolicy:
    """Chooses the number of micro-batches in a chunk.

    Micro-batches first run one by one. Once all workers agree that they may be merged, the number in a chunk is doubled
    while that makes steps faster, within the device's memory. Two sizes are compared in alternating steps, so that what
    disturbs the machine for a while disturbs both. Later searches look for a better size in one direction at a time,
    ever more rarely while they find none. If a forward draws random numbers, micro-batches run one by one for good.
    """

    def __init__(self, device: torch.device, never: bool) -> None:
        self.size = 1  # in the next step
        self.mixes = ""  # the note on a loss that is not a sum over rows, or that keeps state
        self._cuda, self._never = device.type == "cuda", never
        self._verdict = ""
        self.undecided = True
        self.best, self._most = 1, math.inf  # the most: more ran out of memory
        self._rival: int | None = None  # the size with which the best one is compared, during a search
        self._upward = True  # the direction of the search, which turns after one that finds nothing better
        self._before = 0  # the best size before it; 0 before the first search
        self._seconds: dict[int, list[float]] = {}  # of a row, in the last steps with the best size and the rival
        self._levels: dict[int, float] = {}  # the seconds of the sizes that the last search compared
        self._steps = self._pause = self._least = 0  # since the last search, until the next one, and until an early one

    @property
    def may_merge(self) -> bool:
        """Whether micro-batches may be merged, which does not change the result."""
        return self._verdict == "merge" and not self._never

    @property
    def row_seconds(self) -> dict[int, float]:
        """The seconds of a row by the number of micro-batches in a chunk, of the sizes that were compared last."""
        return dict(self._levels)

    def learn(self, sums: StepSums, agreed: Agreed, seconds: float, rows: int, share: int) -> Decision | None:
        """Learns from a step: its observations, and its `seconds` for `rows` rows, in `share` local micro-batches.

        Returns a decision with its reason if it makes one.
        """
        self.mixes = self.mixes or sums.news.get("keeps", sums.news.get("mixes", ("",)))[0]
        if agreed.no_merge and self._verdict != "strict":
            self._verdict, self.undecided = "strict", False
            self._settle(1)
            return (
                "micro-batches are executed one by one",
                sums.why or "another worker found that they must not be merged",
            )
        if agreed.tested and self.undecided:
            self._verdict, self.undecided = "merge", False
            return (
                "micro-batches may be merged and computed together",
                "the forward drew no random numbers and changed no buffers, and the loss of two micro-batches was the "
                "sum of their losses",
            )
        if sums.out_of_memory:
            self._most = max(1, self.size // 2)
            self._settle(self._most)
            return f"worker 0 computes {_counted(self.size)} at a time", "more at a time ran out of memory"
        if self.may_merge and share:
            return self._measure(seconds / max(1, rows), share)
        return None

    def _measure(self, per_row: float, share: int) -> Decision | None:
        times = self._seconds.setdefault(self.size, [])
        times.append(per_row)
        del times[:-LAST]
        if self._rival is None:
            self._steps += 1
            is_slower = len(times) == LAST and _level(times) > SLOWER * self._levels.get(self.best, math.inf)
            if self._steps >= self._pause or (is_slower and self._steps >= self._least):
                self._search(share)
            return None
        best, rival = (self._seconds.get(size, []) for size in (self.best, self._rival))
        fewest = min(len(best), len(rival))
        if fewest < TRIES or (fewest < 2 * TRIES and 1 / CLEARLY < _level(rival) / _level(best) < CLEARLY):
            self.size = self._rival if self.size == self.best else self.best
            return None
        self._levels |= {self.best: _level(best), self._rival: _level(rival)}
        self._least = RARELY * len(rival)
        smaller, larger = sorted((self.best, self._rival))
        is_larger_better = self._levels[larger] < GAIN * self._levels[smaller]
        if is_larger_better == self._upward:
            self.best = self._rival
            if self._compare(self._neighbour(share)):
                return None
        return self._decide()

    def _search(self, share: int) -> None:
        """Begins a search, if there are other sizes."""
        self._before, self._levels = self.best if self._levels else 0, {}
        for _ in range(2):
            if self._compare(self._neighbour(share)):
                return
            self._upward = not self._upward
        self._settle(self.best)

    def _compare(self, rival: int | None) -> bool:
        """Begins to compare the best size with a rival, if there is one."""
        self._rival, self._seconds = rival, {}
        self.size = self.best if rival is None else rival
        return rival is not None

    def _neighbour(self, share: int) -> int | None:
        """Returns the next size in the direction of the search."""
        if not self._upward:
            return 1 << (self.best - 1).bit_length() - 1 if self.best > 1 else None
        larger = int(min(2 * self.best, share, self._most))
        return larger if larger > self.best and self._fits() else None

    def _decide(self) -> Decision | None:
        """Ends a search. Returns its decision if the best size is another one than before."""
        if self.best == self._before:
            self._upward = not self._upward
            self._settle(self.best, max(2 * self._pause, self._least))
            return None
        self._settle(self.best, self._least)
        tried = ", ".join(f"{1e6 * seconds:.0f} µs for {size}" for size, seconds in sorted(self._levels.items()))
        return f"worker 0 computes {_counted(self.best)} at a time", f"a row took {tried} at a time"

    def _settle(self, best: int, pause: int = RARELY) -> None:
        """Uses a size until the next search."""
        self.best, self._steps, self._pause = best, 0, pause
        self._compare(None)

    def _fits(self) -> bool:
        """Whether twice the activations would still fit the device."""
        if not self._cuda:
            return True
        free, total = torch.cuda.mem_get_info()
        idle = free + torch.cuda.memory_reserved() - torch.cuda.max_memory_allocated()
        return idle > 0.6 * total


def _level(seconds: Sequence[float]) -> float:
    """Returns the mean of the two shortest times: others disturb a machine, and nobody speeds it up."""
    return sum(sorted(seconds)[:2]) / min(2, len(seconds))


def _counted(number: int) -> str:
    return "1 micro-batch" if number == 1 else f"{number} micro-batches"
