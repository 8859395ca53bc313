"""Assigns micro-batches to workers in proportion to their measured speed.

Everybody decides from the seconds in the steps' vectors, which are the same everywhere, by the same arithmetic: so all
change the shares at the same step, and nobody has to be asked.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heapreplace
from statistics import median
from typing import Any

from paceline.base.batching import Grid, deal
from paceline.base.text import ranks

BLOCK, BLOCKS = 4, 4  # steps between two looks, and how many of these are remembered
WARM = 2  # steps after the start and after a change whose seconds do not count
LEAST = 0.05  # part of a step that a change must save; once more for each other change within so many steps:
CHANGES = 100
SURE = 3.0  # standard errors of the measurement that it must save at least
MOVED = 1.25  # a worker whose seconds changed by this factor between two blocks has another speed now
FIXED = 0.5  # part of a worker's seconds that may not depend on its share
APART = 0.25  # parts by which two shares must differ to tell what depends on them
SETTLED = 30.0  # seconds of steps for which shares must have been kept before people at the console hear of them
AGAIN = 100  # steps after which a worker without a share is tried once more; twice as many each time after
HOPELESS = 3.0  # times as long as all others: one step of it is enough
COARSE, GOOD = 0.9, 0.95  # part of the workers' speed that the grid lets them use: so that it is said; well enough


@dataclass(frozen=True)
class WorkerCost:
    """A worker takes `fixed` + `rate` * f seconds for the part f of a global batch."""

    fixed: float
    rate: float

    def of(self, part: float) -> float:
        """Seconds for this part of a global batch; 0 without a part."""
        return self.fixed + self.rate * part if part else 0.0


def solve(units: int, costs: Sequence[WorkerCost]) -> tuple[int, ...]:
    """Divides `units` equal parts among the workers so that the slowest worker ends as early as possible.

    Each part goes to the worker that would end first with one part more; among equals, to the first. This greedy order
    is optimal, because a worker's seconds only grow with its parts. To be fast with thousands of workers, each one
    first gets at once what it can compute within the lower bound `soonest`.
    """
    level = soonest(costs) if all(cost.rate > 0 for cost in costs) else 0.0
    counts = [max(int((level - cost.fixed) / cost.rate * units) - 1, 0) if level else 0 for cost in costs]
    done = [
        (cost.of((counts[worker] + 1) / units), worker) for worker, cost in enumerate(costs)
    ]  # seconds with one part more
    heapify(done)
    for _ in range(units - sum(counts)):
        _, worker = done[0]
        counts[worker] += 1
        heapreplace(done, (costs[worker].of((counts[worker] + 1) / units), worker))
    return tuple(counts)


def slowest(units: int, counts: Sequence[int], costs: Sequence[WorkerCost]) -> float:
    """Seconds of the slowest worker, where worker i computes `counts[i]` of `units` parts."""
    return max(cost.of(count / units) for cost, count in zip(costs, counts, strict=True))


@dataclass(frozen=True)
class Change:
    """New shares: `parts` of the global batch by rank.

    `before` and `expected` are the slowest worker's seconds, measured and predicted; None after a change of the team.
    `trial` is a worker without a share that is measured again.
    """

    parts: tuple[float, ...]
    before: float | None = None
    expected: float | None = None
    trial: int | None = None


@dataclass
class Balance:
    """Measures the workers and divides global batches among them in proportion to their speed.

    Micro-batches are divided among workers (`fine`) once a test has shown that their rows do not depend on each other,
    unless they must stay `undivided`. If several workers form a `unit`, its first worker represents it, and the unit
    takes as long as its slowest worker.
    """

    grid: Grid
    workers: tuple[int, ...]
    undivided: bool = False
    unit: int = 1
    fine: bool = False
    counts: tuple[int, ...] = ()  # of units, by rank; empty: equal shares
    _costs: dict[int, WorkerCost] = field(default_factory=dict)
    _rows: list[tuple[float, ...]] = field(default_factory=list)  # seconds of the last steps, by rank
    _steps: int = 0
    _changed: list[int] = field(default_factory=list)  # the steps after which shares changed
    _earlier: dict[int, tuple[float, float]] = field(
        default_factory=dict
    )  # by worker: its part before the last change, and its seconds
    news: list[tuple[str, str]] = field(default_factory=list)  # what was decided, and why: texts for people
    _kept: float = 0.0  # seconds of steps since shares changed
    _untold: dict[str, tuple[str, str]] = field(
        default_factory=dict
    )  # the part of `news` that the console has not shown
    _shown_shares: str = ""  # the text of the shares that the console showed last
    _before: float | None = None  # seconds before the last change, while it is not known what it gained
    _hinted: bool = False
    _idle: dict[int, tuple[int, int]] = field(
        default_factory=dict
    )  # {worker without a share: (since which step, steps to wait)}
    _trial: int | None = None

    @property
    def members(self) -> tuple[int, ...]:
        """The first worker of each unit."""
        return self.workers[:: self.unit]

    @property
    def weights(self) -> tuple[float, ...]:
        """The weight of each worker's share, by rank."""
        return tuple(map(float, self.counts)) if self.counts else (1.0,) * len(self.members)

    @property
    def units(self) -> int:
        """The number of equal parts of a global batch that can be assigned."""
        full_micro_batches, rest_rows = divmod(self.grid.global_batch, self.grid.micro)
        if not self.fine:
            return full_micro_batches + (rest_rows > 0)
        grain = self.grid.grain
        return full_micro_batches * -(-self.grid.micro // grain) + -(-rest_rows // grain)

    @property
    def parts(self) -> tuple[float, ...]:
        """The part of the global batch that each worker computes, by rank."""
        units = self.units
        return tuple(len(share) / units for share in deal(units, self.weights))

    # -- a team that changes

    def state(self) -> dict[str, Any]:
        """The state that a new worker needs, as a JSON object."""
        costs = {str(worker): [cost.fixed, cost.rate] for worker, cost in self._costs.items()}
        return {"fine": self.fine, "whole": self.undivided, "costs": costs}

    def reform(self, workers: Sequence[int], state: Mapping[str, Any]) -> Change | None:
        """Takes over the workers and the `state` of a new team; returns its shares if its members have changed."""
        before, self.workers = self.workers, tuple(workers)
        self.fine, self.undivided = state["fine"], state["whole"]
        self._costs = {int(worker): WorkerCost(*cost) for worker, cost in state["costs"].items()}
        self._earlier, self._idle, self._changed, self._steps = {}, {}, [], 0
        self._trial = self._before = None
        self._begin(solve(self.units, self._known()) if self._costs else ())
        return Change(self.parts) if self.workers != before else None

    def _known(self) -> list[WorkerCost]:
        """The cost of each member; one that has not been measured counts as the median of the others."""
        measured = [self._costs[worker] for worker in self.members if worker in self._costs] or [*self._costs.values()]
        usual = WorkerCost(median(cost.fixed for cost in measured), median(cost.rate for cost in measured))
        return [self._costs.get(worker, usual) for worker in self.members]

    # -- whether micro-batches may be divided

    def divide(self, tested: bool, strict: bool) -> None:
        """Applies what the workers agreed on: micro-batches may be divided (`tested`), or must not be (`strict`)."""
        self.undivided |= strict
        if (tested or self.fine) and not self.undivided:
            self.fine = True
        elif self.fine:
            self.fine = False
            self._begin(solve(self.units, self._known()) if self._costs else ())

    # -- measuring

    def learn(self, seconds: Sequence[float]) -> Change | None:
        """Takes all workers' seconds of a step on a full global batch; returns new shares if they save enough."""
        seconds = [max(seconds[at : at + self.unit]) for at in range(0, len(seconds), self.unit)]
        self._steps += 1
        self._kept += max(seconds)
        self._warm -= 1
        if self._hopeless(seconds):
            return self._change(seconds, 0.0)
        if self._warm >= 0 or len(self.members) == 1:
            return None
        self._rows = [*self._rows[1 - BLOCK * BLOCKS :], tuple(seconds)]
        if self._steps % BLOCK or len(self._rows) < BLOCK:
            return None
        self._forget_other_speeds()
        times, noise = self._times()
        change = self._change(times, noise)
        if change is None:
            self._tell(max(times))
        return change

    def _tell(self, seconds: float) -> None:
        """Adds news about shares that were kept: the seconds they saved, and the speed that a coarse grid costs."""
        if self._before is not None:
            why = f"a step takes {seconds:.2g} s, with the shares before {self._before:.2g} s"
            self.news.append((self.text(), why))
            self._before, self._untold["shares"] = None, self.news[-1]
        if not self._hinted and (used := self.coarse()):
            self._hinted = True
            self.news.append((f"micro-batches of {self.grid.micro} rows are too large to balance these workers", used))
            self._untold["grid"] = self.news[-1]

    def settled(self) -> list[tuple[str, str]]:
        """Returns the news for the console, each once, after the shares have been kept for `SETTLED` seconds."""
        if len(self.members) == 1:  # nothing is left to balance
            self._untold.clear()
        if self._kept < SETTLED or not self._untold:
            return []
        news_to_show = [pair for pair in self._untold.values() if pair[0] != self._shown_shares]
        self._shown_shares = self._untold.get("shares", (self._shown_shares, ""))[0]
        self._untold.clear()
        return news_to_show

    def _hopeless(self, seconds: Sequence[float]) -> bool:
        """Whether the worker on trial is so slow that one step is enough to reject it."""
        by_worker = dict(zip(self.members, seconds, strict=True))
        tried = by_worker.pop(self._trial, 0.0) if self._trial is not None else 0.0
        return tried > HOPELESS * max(by_worker.values())

    def _change(self, times: Sequence[float], noise: float) -> Change | None:
        parts, tried = self.parts, self._trial
        self._measure(parts, times)
        units, costs = self.units, self._known()
        counts = solve(units, costs)
        now = max(time for time, part in zip(times, parts, strict=True) if part)
        then = slowest(units, counts, costs)
        self._trial = self._to_try(parts)
        self._changed = [step for step in self._changed if self._steps - step < CHANGES]
        if self._trial is not None:
            counts = self._with_one(counts, self.members.index(self._trial))
        elif 1 - then / now < max(LEAST * (1 + len(self._changed)), SURE * noise):
            return None
        self._earlier = {w: (part, time) for w, part, time in zip(self.members, parts, times, strict=True) if part}
        self._changed.append(self._steps)
        self._begin(counts)
        back = tried is not None and not self.parts[self.members.index(tried)]
        if self._before is None and self._trial is None and not back:
            self._before = now
        return Change(self.parts, now, then, self._trial)

    def _to_try(self, parts: Sequence[float]) -> int | None:
        """Picks a worker without a share whose speed may have changed since it was measured; else None."""
        for worker, part in zip(self.members, parts, strict=True):
            since, wait = self._idle.get(worker, (self._steps, AGAIN))
            if part and worker != self._trial:
                self._idle.pop(worker, None)
            elif not part and self._steps - since >= wait:
                self._idle[worker] = self._steps, 2 * wait
                return worker
            elif not part:
                self._idle[worker] = since, wait
        return None

    @staticmethod
    def _with_one(counts: Sequence[int], tried: int) -> tuple[int, ...]:
        """Moves one unit from the largest share to the worker on trial."""
        largest = counts.index(max(counts))
        return tuple(n + (index == tried) - (index == largest) for index, n in enumerate(counts))

    def _begin(self, counts: Sequence[int]) -> None:
        self.counts, self._rows, self._warm = tuple(counts), [], WARM
        self._kept = 0.0
        self._untold.pop("shares", None)

    def __post_init__(self) -> None:
        self._warm = WARM

    def _forget_other_speeds(self) -> None:
        """Drops the measurements that are older than a change of some worker's speed."""
        before, last = self._rows[:-BLOCK], self._rows[-BLOCK:]
        for index, part in enumerate(self.parts):
            old, new = ([row[index] for row in rows] for rows in (before, last))
            if part and before and not 1 / MOVED < median(new) / max(median(old), 1e-9) < MOVED:
                self._rows = last

    def _times(self) -> tuple[list[float], float]:
        """Each worker's median seconds, and the relative standard error of the medians of those with a share."""
        times, errors = [], []
        for part, column in zip(self.parts, zip(*self._rows, strict=True), strict=True):
            middle = median(column)
            deviation = 1.4826 * median(abs(value - middle) for value in column)  # as if it were normal
            times.append(middle)
            if part:
                errors.append(1.2533 * deviation / math.sqrt(len(column)) / max(middle, 1e-9))
        usual = math.sqrt(sum(error * error for error in errors) / len(errors))
        # Four values may lie close together by chance, so one worker's error is not taken for much less than all have.
        return times, max(*errors, 1.5 * usual)

    def _measure(self, parts: Sequence[float], times: Sequence[float]) -> None:
        """Fits each worker's cost to its seconds with this share and with the one before."""
        for worker, part, time in zip(self.members, parts, times, strict=True):
            if not part:
                continue
            fixed = min(self._costs[worker].fixed if worker in self._costs else 0.0, FIXED * time)
            before, took = self._earlier.get(worker, (part, time))
            if abs(part - before) > APART * max(part, before):
                slope = (time - took) / (part - before)
                fixed = min(max(time - slope * part, 0.0), FIXED * time)
            self._costs[worker] = WorkerCost(fixed, (time - fixed) / part)

    # -- texts for people

    def coarse(self) -> str:
        """Says what part of the workers' speed the grid uses, and which grid is better.

        It is empty if the grid uses enough, or if its micro-batches are single rows.
        """
        if self.fine or not self._costs:
            return ""
        costs, micro = self._known(), self.grid.micro
        used = then = used_by(self.grid, costs)
        if used >= COARSE or micro == 1:
            return ""
        while micro > 1 and then < GOOD:
            micro = micro // 2 if micro > 8 else micro - 1
            then = used_by(Grid(self.grid.global_batch, micro), costs)
        better = f"with the plan micro={micro}, which changes the mathematics, it would be {100 * then:.0f} %"
        return f"{100 * used:.0f} % of their speed is used; {better}"

    def unit_of(self, member: int) -> str:
        """The numbers of a unit's workers, as text."""
        first = self.workers.index(member)
        return ranks(self.workers[first : first + self.unit]).split(" ", 1)[1]

    def text(self) -> str:
        """The shares, as text."""
        percent = [f"{100 * part:.0f}" for part in self.parts]
        one_part, costs = 1 / self.units, self._known() if self._costs else [WorkerCost(0.0, 1.0)] * len(self.members)
        most = slowest(self.units, [round(part * self.units) for part in self.parts], costs)
        idle_indices = [
            index for index, part in enumerate(self.parts) if not part and costs[index].of(one_part) > 1.01 * most
        ]
        idle = [w for index in idle_indices for w in self.workers[index * self.unit :][: self.unit]]
        units = [self.unit_of(member) for member in self.members]
        who, much = (", ".join(texts[:-1]) + f" and {texts[-1]}" for texts in (units, percent))
        whose = "workers" if self.unit == 1 else "the units of workers"
        what = f"{whose} {who} compute {much} % of each global batch"
        alone = f"; the others finish earlier without {ranks(idle)}" if idle else ""
        return what + alone


def used_by(grid: Grid, costs: Sequence[WorkerCost]) -> float:
    """The part of the workers' speed that they can use if micro-batches are not divided."""
    units = len(grid.cut(grid.global_batch))
    return soonest(costs) / slowest(units, solve(units, costs), costs)


def soonest(costs: Sequence[WorkerCost]) -> float:
    """A lower bound of the slowest worker's seconds: a global batch divided into parts of any size."""
    speed, head, done = 0.0, 0.0, math.inf
    for cost in sorted(costs, key=lambda cost: cost.fixed):
        if cost.fixed < done:
            speed, head = speed + 1 / cost.rate, head + cost.fixed / cost.rate
            done = (1 + head) / speed
    return done
