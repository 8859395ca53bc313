"""Where a run's time and bytes go: figures of steps added up between two records of the journal. No torch."""

from __future__ import annotations

import time
from typing import Any

EVERY = 0.25  # seconds between records; a step that takes longer is a record of its own
PARTS = ("data", "compute", "reduce", "update", "other")


class Ledger:
    """Adds steps up; `take` gives the sums since the last record, in the journal's fields."""

    def __init__(self) -> None:
        self._sent, self._last = 0, 0.0
        self._clear()

    def _clear(self) -> None:
        self.steps = self.samples = 0
        self.seconds = 0.0
        self.time = dict.fromkeys(PARTS, 0.0)
        self.waited_for: dict[int, float] = {}

    def add(self, samples: int, spent: dict[str, float], workers: tuple[float, ...]) -> None:
        """Adds one step: `spent` seconds by part on this worker; `workers` are everybody's seconds of computing.

        The slowest worker is the one that was waited for, as long as the second slowest had to wait for it.
        """
        self.steps += 1
        self.samples += samples
        self.seconds += sum(spent.values())
        for part, seconds in spent.items():
            self.time[part] += seconds
        if len(workers) > 1:
            first, second = sorted(range(len(workers)), key=lambda worker: -workers[worker])[:2]
            self.waited_for[first] = self.waited_for.get(first, 0.0) + workers[first] - workers[second]

    def due(self) -> bool:
        return time.monotonic() - self._last >= EVERY

    def take(self, sent: int) -> dict[str, Any]:
        """The sums since the last record; `sent` is the total of bytes handed to collectives so far."""
        record = {
            "samples": self.samples,
            "steps": self.steps,
            "seconds": self.seconds,
            "time": self.time,
            "waited_for": self.waited_for,
            "bytes": sent - self._sent,
        }
        self._sent, self._last = sent, time.monotonic()
        self._clear()
        return record
