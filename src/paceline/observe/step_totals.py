"""Adds up time and bytes of steps between two journal records."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.base.batching import LISTED_WORKERS, PARTS

EVERY = 0.25  # seconds between records; a step that takes longer is a record of its own
KEPT = 4096  # steps that are kept while another worker writes the journal
SELDOM, RARER = 10.0, 0.05  # least seconds, and least part of the run, between two lists of very many workers
NOBODY: Mapping[int, Sequence[float]] = {}


class StepTotals:
    """Adds up steps; `take` returns the sums since the last record, in the journal's fields.

    Every worker has one, so that another worker can go on if the one that writes the journal is lost. `tokens` is the
    number of tokens of a row, if it is known.
    """

    def __init__(self) -> None:
        self.tokens: int | None = None
        self._sent, self._last = 0, 0.0
        self._steps: list[_Step] = []
        self._each: dict[int, float] = {}  # seconds computed by each of very many workers since the last `each`
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
        """Adds `steps` steps that were made in one turn.

        `spent` are this worker's seconds by part, `workers` all workers' seconds of computing, and `lanes` all workers'
        seconds by part: data and compute of this step, the other parts of the step before.
        """
        self._steps.append(_Step(step, samples, spent, workers, steps, lanes))

    def due(self) -> bool:
        """Whether it is time for the next record."""
        return time.monotonic() - self._last >= EVERY

    def forget(self) -> None:
        """Drops old steps while another worker writes the journal, which is at most `KEPT` steps behind."""
        self._last = time.monotonic()
        del self._steps[:-KEPT]

    def go_on_after(self, step: int) -> None:
        """Drops the steps up to `step`, which another worker has written."""
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
            many = len(one.workers) > LISTED_WORKERS
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
        """Returns, now and then, the seconds that each of very many workers computed since the last time; else None."""
        now = time.monotonic()
        if not self._each or now - self._last_each < max(SELDOM, RARER * (now - self._began)):
            return None
        computed = {worker: float(f"{seconds:.4g}") for worker, seconds in self._each.items()}
        steps, self._each, self._made, self._last_each = self._made, {}, 0, now
        return {"steps": steps, "computed": computed}


class BytesSent:
    """Counts the bytes that each trainer has handed to collectives, by kind.

    What happens between two turns (an evaluation, a checkpoint) counts for the trainer of the earlier turn. `ledger`
    has the sums over all trainers by kind: calls, bytes, seconds.
    """

    def __init__(self, ledger: Mapping[str, Sequence[float]]) -> None:
        self._ledger = ledger
        self.trainer = -1  # whose turn it is
        self._mark: dict[str, float] = {}  # the bytes in the ledger when the current trainer's turns began
        self._sent: dict[int, dict[str, float]] = {}

    def turn(self, trainer: int) -> None:
        """Begins a turn of this trainer."""
        if trainer != self.trainer:
            self._settle()
            self.trainer = trainer

    def _settle(self) -> None:
        sent = self._sent.setdefault(self.trainer, {})
        for kind, (_, size, *_) in self._ledger.items():
            if more := size - self._mark.get(kind, 0):
                sent[kind] = sent.get(kind, 0) + more
            self._mark[kind] = size

    def of(self, trainer: int) -> dict[str, float]:
        """The bytes that a trainer has sent, by kind."""
        self._settle()
        return dict(self._sent.get(trainer, {}))


@dataclass(frozen=True)
class _Step:
    """The steps of one turn, as `StepTotals.add` gets them."""

    step: int
    samples: int
    spent: dict[str, float]
    workers: Mapping[int, float]
    steps: int
    lanes: Mapping[int, Sequence[float]]
