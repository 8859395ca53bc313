"""Adds up time and bytes of steps between two journal records."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.base.batching import PARTS, TOLD

EVERY = 0.25  # seconds between records; a step that takes longer is a record of its own
KEPT = 4096  # steps
SELDOM, RARER = 10.0, 0.05  # seconds at least, and part of a run, between two looks at each of very many workers
NOBODY: Mapping[int, Sequence[float]] = {}


class StepTotals:
    """Adds steps up; `take` gives the sums since the last record, in the journal's fields.

    Every worker keeps one: whoever writes the journal may be lost, and the next one goes on where it ended. `tokens`
    are those of a row, where they are known.
    """

    def __init__(self) -> None:
        self.tokens: int | None = None
        self._sent, self._last = 0, 0.0
        self._steps: list[_Step] = []
        self._each: dict[int, float] = {}  # of very many workers, since `each` told of them, in so many steps
        self._made, self._began, self._last_each = 0, time.monotonic(), time.monotonic()

    def __len__(self) -> int:
        return len(self._steps)

    def add(
        self,
        step: int,
        samples: int,
        spent: dict[str, float],
        workers: Mapping[int, float],
        steps: int = 1,
        lanes: Mapping[int, Sequence[float]] = NOBODY,
    ) -> None:
        """Adds a turn of so many `steps`: `spent` seconds by part on this worker; `workers` are everybody's seconds of
        computing, and `lanes` those by part: data and compute of this step, the rest of the one before.
        """
        self._steps.append(_Step(step, samples, spent, workers, steps, lanes))

    def due(self) -> bool:
        return time.monotonic() - self._last >= EVERY

    def forget(self) -> None:
        """Somebody else writes the journal, and is at most so many steps behind."""
        self._last = time.monotonic()
        del self._steps[:-KEPT]

    def go_on_after(self, step: int) -> None:
        """What others have written is not written again."""
        self._steps = [one for one in self._steps if one.step > step]

    def take(self, sent: int) -> dict[str, Any]:
        """The sums since the last record; `sent` is the total of bytes handed to collectives so far.

        The slowest worker is the one that was waited for, as long as the second slowest had to wait for it.
        """
        spent = {part: sum(one.spent.get(part, 0.0) for one in self._steps) for part in PARTS}
        waited_for: dict[int, float] = {}
        for one in self._steps:
            if len(one.workers) > 1:
                first, second = sorted(one.workers, key=lambda worker: -one.workers[worker])[:2]
                waited_for[first] = waited_for.get(first, 0.0) + one.workers[first] - one.workers[second]
        computed: dict[int, float] = {}
        for one in self._steps:
            many = len(one.workers) > TOLD
            self._made += one.steps * many
            sums = self._each if many else computed
            for worker, seconds in one.workers.items():
                sums[worker] = sums.get(worker, 0.0) + seconds
        lanes: dict[str, float] = {}
        for one in self._steps:
            for worker, lane in one.lanes.items():
                for part, seconds in zip(PARTS, lane, strict=True):
                    lanes[f"{worker} {part}"] = lanes.get(f"{worker} {part}", 0.0) + seconds
        record: dict[str, Any] = {
            "samples": sum(one.samples for one in self._steps),
            "steps": sum(one.steps for one in self._steps),
            "seconds": sum(spent.values()),
            "time": spent,
            "waited_for": waited_for,
            "computed": computed,
            "lanes": {name: float(f"{seconds:.4g}") for name, seconds in lanes.items()},
            "bytes": sent - self._sent,
        }
        if self.tokens is not None:
            record["tokens"] = self.tokens * sum(one.samples for one in self._steps)
        self._sent, self._last = sent, time.monotonic()
        self._steps.clear()
        return record

    def each(self) -> dict[str, Any] | None:
        """What each of more workers than records tell of has computed since the last time, now and then."""
        now = time.monotonic()
        if not self._each or now - self._last_each < max(SELDOM, RARER * (now - self._began)):
            return None
        computed = {worker: float(f"{seconds:.4g}") for worker, seconds in self._each.items()}
        steps, self._each, self._made, self._last_each = self._made, {}, 0, now
        return {"steps": steps, "computed": computed}


class BytesSent:
    """The bytes that each trainer's turns have handed to collectives, by kind. What lies between two turns (an
    evaluation, a checkpoint) belongs to the trainer of the former. `ledger` has the sums of all: times, bytes, seconds.
    """

    def __init__(self, ledger: Mapping[str, Sequence[float]]) -> None:
        self._ledger = ledger
        self._trainer = -1
        self._mark: dict[str, float] = {}  # when its turns began
        self._sent: dict[int, dict[str, float]] = {}

    def turn(self, trainer: int) -> None:
        """A turn of this trainer begins."""
        if trainer != self._trainer:
            self._settle()
            self._trainer = trainer

    def _settle(self) -> None:
        sent = self._sent.setdefault(self._trainer, {})
        for kind, (_, size, *_) in self._ledger.items():
            if more := size - self._mark.get(kind, 0):
                sent[kind] = sent.get(kind, 0) + more
            self._mark[kind] = size

    def of(self, trainer: int) -> dict[str, float]:
        """All that it has sent, by kind."""
        self._settle()
        return dict(self._sent.get(trainer, {}))


@dataclass(frozen=True)
class _Step:
    step: int
    samples: int
    spent: dict[str, float]
    workers: Mapping[int, float]
    steps: int
    lanes: Mapping[int, Sequence[float]]
