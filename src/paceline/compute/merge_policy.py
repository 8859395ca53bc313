"""Decides how many micro-batches are executed together.

It changes only how a worker executes its share, never what the share is.
"""

from __future__ import annotations

import math

import torch

from paceline.base.batching import Agreed
from paceline.compute.job import StepSums

Decision = tuple[str, str]  # what, why
TRIES = 4  # steps measured per size; the best one counts
GAIN = 0.99


class MergePolicy:
    """Chooses the number of micro-batches in a chunk.

    Micro-batches first run one by one. Once all workers agree that they may be merged, the number in a chunk is doubled
    while the measured seconds per row fall, within the device's memory. If a forward draws random numbers later, they
    run one by one for good.
    """

    def __init__(self, device: torch.device, never: bool) -> None:
        self.size = 1
        self.mixes = ""  # the note on a loss that is not a sum over rows, or that keeps state
        self._cuda, self._never = device.type == "cuda", never
        self._verdict = ""
        self.undecided = True
        self._settled = False
        self._seconds: dict[int, list[float]] = {}

    @property
    def may_merge(self) -> bool:
        """Whether micro-batches may be merged, which does not change the result."""
        return self._verdict == "merge" and not self._never

    def learn(self, sums: StepSums, agreed: Agreed, seconds: float, rows: int, share: int) -> Decision | None:
        """Learns from a step: its observations, and its `seconds` for `rows` rows, in `share` local micro-batches.

        Returns a decision with its reason if it makes one.
        """
        self.mixes = self.mixes or sums.news.get("keeps", sums.news.get("mixes", ("",)))[0]
        if agreed.no_merge and self._verdict != "strict":
            self._verdict, self.size, self.undecided = "strict", 1, False
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
            self.size, self._settled = max(1, self.size // 2), True
            return f"worker 0 computes {_counted(self.size)} at a time", "more at a time ran out of memory"
        if self._verdict == "merge" and not self._settled and not self._never and share:
            return self._measure(seconds / max(1, rows), share)
        return None

    def _measure(self, per_row: float, share: int) -> Decision | None:
        tries = self._seconds.setdefault(self.size, [])
        tries.append(per_row)
        if len(tries) < TRIES:
            return None
        best = min(self._seconds, key=lambda size: min(self._seconds[size]))
        smaller = min((min(times) for size, times in self._seconds.items() if size < self.size), default=math.inf)
        if self.size < share and min(tries) < smaller * GAIN and self._fits():
            self.size = min(2 * self.size, share)
            return None
        self.size, self._settled = best, True
        tried = ", ".join(f"{1e6 * min(times):.0f} µs for {size}" for size, times in sorted(self._seconds.items()))
        return f"worker 0 computes {_counted(best)} at a time", f"a row took {tried} at a time"

    def _fits(self) -> bool:
        """Whether twice the activations would still fit the device."""
        if not self._cuda:
            return True
        free, total = torch.cuda.mem_get_info()
        idle = free + torch.cuda.memory_reserved() - torch.cuda.max_memory_allocated()
        return idle > 0.6 * total


def _counted(number: int) -> str:
    return "1 micro-batch" if number == 1 else f"{number} micro-batches"
