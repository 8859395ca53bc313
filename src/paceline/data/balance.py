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
        return self.fixed + self.rate * part if part else 0.0


def solve(units: int, costs: Sequence[WorkerCost]) -> tuple[int, ...]:
    """How many of `units` equal parts each worker gets so that the last one is done as early as can be.

    One after another goes to whoever would be done first with it, which no other dealing beats: what a worker has only
    grows. Of equals the first one gets it. What all have done by the time that no dealing beats they get at once: of a
    thousand workers it is nearly all.
    """
    level = soonest(costs) if all(cost.rate > 0 for cost in costs) else 0.0
    counts = [max(int((level - cost.fixed) / cost.rate * units) - 1, 0) if level else 0 for cost in costs]
    done = [(cost.of((counts[worker] + 1) / units), worker) for worker, cost in enumerate(costs)]  # with one more
    heapify(done)
    for _ in range(units - sum(counts)):
        _, worker = done[0]
        counts[worker] += 1
        heapreplace(done, (costs[worker].of((counts[worker] + 1) / units), worker))
    return tuple(counts)


def slowest(units: int, counts: Sequence[int], costs: Sequence[WorkerCost]) -> float:
    """Seconds until all are done."""
    return max(cost.of(count / units) for cost, count in zip(costs, counts, strict=True))


@dataclass(frozen=True)
class Change:
    """New shares, as parts of the global batch by rank, and the seconds of the slowest worker: seen, then expected; not
    where the team has changed. Or a worker that had none is tried once more.
    """

    parts: tuple[float, ...]
    before: float | None = None
    expected: float | None = None
    trial: int | None = None


@dataclass
class Balance:
    """The shares of the workers with these numbers, by rank. Micro-batches are `fine`, divided among workers, once they
    were seen to be no more than their rows, unless they must stay `undivided`. Where so many workers are a `unit`, the
    first one stands for it here, and it takes as long as its slowest.
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
    _earlier: dict[int, tuple[float, float]] = field(default_factory=dict)  # by worker: its part before, its seconds
    news: list[tuple[str, str]] = field(default_factory=list)  # for people: what was decided, and why
    _kept: float = 0.0  # seconds of steps since shares changed
    _untold: dict[str, tuple[str, str]] = field(default_factory=dict)  # of the news, what the console has not shown
    _shown_shares: str = ""  # the shares that it showed last
    _before: float | None = None  # seconds before the last change, while it is not known what it gained
    _hinted: bool = False
    _idle: dict[int, tuple[int, int]] = field(default_factory=dict)  # without a share: since when, to wait how long
    _trial: int | None = None

    @property
    def members(self) -> tuple[int, ...]:
        return self.workers[:: self.unit]

    @property
    def weights(self) -> tuple[float, ...]:
        """For dealing, by rank."""
        return tuple(map(float, self.counts)) if self.counts else (1.0,) * len(self.members)

    @property
    def units(self) -> int:
        """Equal parts of a global batch that can be dealt."""
        full_micro_batches, rest_rows = divmod(self.grid.global_batch, self.grid.micro)
        if not self.fine:
            return full_micro_batches + (rest_rows > 0)
        grain = self.grid.grain
        return full_micro_batches * -(-self.grid.micro // grain) + -(-rest_rows // grain)

    @property
    def parts(self) -> tuple[float, ...]:
        """Of the global batch, by rank."""
        units = self.units
        return tuple(len(share) / units for share in deal(units, self.weights))

    # -- a team that changes

    def state(self) -> dict[str, Any]:
        """What newcomers must know, as JSON keeps it."""
        costs = {str(worker): [cost.fixed, cost.rate] for worker, cost in self._costs.items()}
        return {"fine": self.fine, "whole": self.undivided, "costs": costs}

    def reform(self, workers: Sequence[int], state: Mapping[str, Any]) -> Change | None:
        """Another team, of whose workers this much is known: its shares, where others are of it than before."""
        before, self.workers = self.workers, tuple(workers)
        self.fine, self.undivided = state["fine"], state["whole"]
        self._costs = {int(worker): WorkerCost(*cost) for worker, cost in state["costs"].items()}
        self._earlier, self._idle, self._changed, self._steps = {}, {}, [], 0
        self._trial = self._before = None
        self._begin(solve(self.units, self._known()) if self._costs else ())
        return Change(self.parts) if self.workers != before else None

    def _known(self) -> list[WorkerCost]:
        """What the members cost; of one that has not been measured the same as of others."""
        measured = [self._costs[worker] for worker in self.members if worker in self._costs] or [*self._costs.values()]
        usual = WorkerCost(median(cost.fixed for cost in measured), median(cost.rate for cost in measured))
        return [self._costs.get(worker, usual) for worker in self.members]

    # -- whether micro-batches may be divided

    def divide(self, tested: bool, strict: bool) -> None:
        """What the workers agreed on: a whole may be computed in pieces; or it was seen that it may not."""
        self.undivided |= strict
        if (tested or self.fine) and not self.undivided:
            self.fine = True
        elif self.fine:
            self.fine = False
            self._begin(solve(self.units, self._known()) if self._costs else ())

    # -- measuring

    def learn(self, seconds: Sequence[float]) -> Change | None:
        """Takes everybody's seconds of a step on a full global batch; new shares if they are worth it."""
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
        """Shares that were kept: what they gained, and what the grid costs."""
        if self._before is not None:
            self.news.append((self.text(), f"a step takes them {seconds:.2g} s instead of {self._before:.2g}"))
            self._before, self._untold["shares"] = None, self.news[-1]
        if not self._hinted and (used := self.coarse()):
            self._hinted = True
            self.news.append((f"micro-batches of {self.grid.micro} rows are too coarse for these workers", used))
            self._untold["grid"] = self.news[-1]

    def settled(self) -> list[tuple[str, str]]:
        """The news that people at the console are told by now: of shares that have been kept for a while, each once."""
        if self._kept < SETTLED or not self._untold:
            return []
        news_to_show = [pair for pair in self._untold.values() if pair[0] != self._shown_shares]
        self._shown_shares = self._untold.get("shares", (self._shown_shares, ""))[0]
        self._untold.clear()
        return news_to_show

    def _hopeless(self, seconds: Sequence[float]) -> bool:
        """Whether the worker that is tried takes so long that one step tells."""
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
        """A worker that has had no share for so long that it may be another one by now."""
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
        """The shares, but that who is tried has a unit of the largest one."""
        largest = counts.index(max(counts))
        return tuple(n + (index == tried) - (index == largest) for index, n in enumerate(counts))

    def _begin(self, counts: Sequence[int]) -> None:
        self.counts, self._rows, self._warm = tuple(counts), [], WARM
        self._kept = 0.0
        self._untold.pop("shares", None)

    def __post_init__(self) -> None:
        self._warm = WARM

    def _forget_other_speeds(self) -> None:
        """What was measured before somebody's speed changed."""
        before, last = self._rows[:-BLOCK], self._rows[-BLOCK:]
        for index, part in enumerate(self.parts):
            old, new = ([row[index] for row in rows] for rows in (before, last))
            if part and before and not 1 / MOVED < median(new) / max(median(old), 1e-9) < MOVED:
                self._rows = last

    def _times(self) -> tuple[list[float], float]:
        """Each worker's seconds, and the relative standard error of what is known of those who compute."""
        times, errors = [], []
        for part, column in zip(self.parts, zip(*self._rows, strict=True), strict=True):
            middle = median(column)
            deviation = 1.4826 * median(abs(value - middle) for value in column)  # as if it were normal
            times.append(middle)
            if part:
                errors.append(1.2533 * deviation / math.sqrt(len(column)) / max(middle, 1e-9))
        usual = math.sqrt(sum(error * error for error in errors) / len(errors))
        # Four values may lie close together by chance: nobody is much surer than all are.
        return times, max(*errors, 1.5 * usual)

    def _measure(self, parts: Sequence[float], times: Sequence[float]) -> None:
        """What each worker costs, from what it took with its share, and with the one before."""
        for worker, part, time in zip(self.members, parts, times, strict=True):
            if not part:
                continue
            fixed = min(self._costs[worker].fixed if worker in self._costs else 0.0, FIXED * time)
            before, took = self._earlier.get(worker, (part, time))
            if abs(part - before) > APART * max(part, before):
                slope = (time - took) / (part - before)
                fixed = min(max(time - slope * part, 0.0), FIXED * time)
            self._costs[worker] = WorkerCost(fixed, (time - fixed) / part)

    # -- what people are told

    def coarse(self) -> str:
        """How much of the workers' speed the grid lets them use, and a better one; empty where that is enough."""
        if self.fine or not self._costs:
            return ""
        costs, micro = self._known(), self.grid.micro
        used = then = used_by(self.grid, costs)
        if used >= COARSE:
            return ""
        while micro > 1 and then < GOOD:
            micro = micro // 2 if micro > 8 else micro - 1
            then = used_by(Grid(self.grid.global_batch, micro), costs)
        better = f"with the plan micro={micro}, which changes the mathematics, it would be {100 * then:.0f} %"
        return f"{100 * used:.0f} % of their speed is used, {better}"

    def unit_of(self, member: int) -> str:
        """Which workers, for people."""
        first = self.workers.index(member)
        return ranks(self.workers[first : first + self.unit]).split(" ", 1)[1]

    def text(self) -> str:
        """The shares, for people."""
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
        alone = f"; without {ranks(idle)} the others are done earlier" if idle else ""
        return what + alone


def used_by(grid: Grid, costs: Sequence[WorkerCost]) -> float:
    """Part of the workers' speed that a grid of whole micro-batches lets them use."""
    units = len(grid.cut(grid.global_batch))
    return soonest(costs) / slowest(units, solve(units, costs), costs)


def soonest(costs: Sequence[WorkerCost]) -> float:
    """Seconds until all are done where a global batch can be divided at will."""
    speed, head, done = 0.0, 0.0, math.inf
    for cost in sorted(costs, key=lambda cost: cost.fixed):
        if cost.fixed < done:
            speed, head = speed + 1 / cost.rate, head + cost.fixed / cost.rate
            done = (1 + head) / speed
    return done
