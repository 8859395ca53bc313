"""The usual step of a run, from its journal, and what it would take if one thing were different.

Worker w needs F seconds for its update, and its *pace* T is the seconds it would need to compute all rows of a global
batch alone: D seconds of T are waiting for rows, the rest is forward and backward. All workers wait for the slowest,
and C seconds (the overhead) are added. A prediction replays the records with each worker's T and C in that record: rows
are assigned so that all workers would end together at their median T, and the step takes max(F + T * part) + C of the
slowest worker. The median over the records is the result.

With instant data loading, D of the same record is subtracted from T: a worker that computes a part of a micro-batch
loads all of it, so with few rows both grow. An added worker behaves as the median worker did in other records. A link
twice as fast halves the seconds of reductions between hosts: those that worker 0 spends on reductions without waiting
for the slowest worker. Only records of the current team count, without the first tenth and always without the first
one. No torch.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any

from paceline.base.journal import Event
from paceline.observe.summary import Summary

ENOUGH = 3, 8  # records, and steps in these, that a verdict needs
FEW = 0.02  # part of a global batch below which a record is ignored for a worker
NOBODY: Mapping[int, int] = {}
NONE: Mapping[int, float] = {}
_Change = tuple[int, Mapping[int, float]]


@dataclass(frozen=True)
class UsualStep:
    """Median seconds of a step, and of what it consists of, in the model that the module describes.

    `overhead` is C, `link` the seconds of reductions between hosts; by worker, `pace` is T, `loading` D and `fixed` F,
    `slowest` the part of the records in which it was the slowest, and `parts` its current part of the rows. `records`
    hold (C, T by worker, D by worker). `known` says whether there are enough records for a verdict.
    """

    step_seconds: float
    overhead: float
    link: float
    pace: Mapping[int, float]
    loading: Mapping[int, float]
    slowest: Mapping[int, float]
    parts: Mapping[int, float]
    fixed: Mapping[int, float]
    records: Sequence[tuple[float, Mapping[int, float], Mapping[int, float]]] = field(repr=False)
    known: bool = True

    def predict_step_seconds(self, pace: Mapping[int, float], like: Mapping[int, int] = NOBODY) -> float:
        """Predicts the seconds of a step of workers with this `pace`, which vary over the records as they did.

        Workers in `like`, {new worker: old worker}, vary as the old worker did in another record.
        """
        total_speed, predictions = sum(1 / max(seconds, 1e-6) for seconds in pace.values()), list[float]()
        for record_index, (overhead, *_) in enumerate(self.records):
            worker_seconds = []
            for w in pace:
                measured_worker = like.get(w, w)
                pace_then = self.records[(record_index + min(w, 0)) % len(self.records)][1].get(
                    measured_worker, self.pace[measured_worker]
                )
                worker_seconds.append(
                    self.fixed.get(measured_worker, 0.0)
                    + pace_then / max(self.pace[measured_worker], 1e-6) / total_speed
                )
            predictions.append(max(worker_seconds) + overhead)
        return median(predictions)

    def compute_seconds(self, worker: int) -> float:
        """The part T - D of a worker's pace that is not loading."""
        return max(1e-6, self.pace[worker] - self.loading.get(worker, 0.0))

    def with_fast_loading(self) -> UsualStep:
        """The same step if no worker waits for rows."""
        without = [
            (overhead, {w: paces[w] - loading[w] for w in paces}, NONE) for overhead, paces, loading in self.records
        ]
        return replace(self, pace={w: self.compute_seconds(w) for w in self.pace}, loading=NONE, records=without)

    def with_more_workers(self, count: int) -> float:
        """Predicts the seconds of a step with so many more workers, each like the median worker."""
        usual = sorted(self.pace, key=lambda worker: self.pace[worker])[(len(self.pace) - 1) // 2]
        added = [-1 - number for number in range(count)]
        return self.predict_step_seconds(
            {**self.pace, **dict.fromkeys(added, self.pace[usual])}, dict.fromkeys(added, usual)
        )

    def without(self, workers: Collection[int]) -> float:
        """Predicts the seconds of a step without these workers, of which some must be left."""
        return self.predict_step_seconds({w: seconds for w, seconds in self.pace.items() if w not in workers})

    def with_link(self, times: float) -> float:
        """Predicts the seconds of a step if the link between hosts were so many times as fast."""
        return self.step_seconds - self.link * (1 - 1 / times)

    def what_if(self) -> dict[str, float]:
        """Predicts the seconds of a step for each hypothetical change, by its name."""
        fast_loading = self.with_fast_loading()
        predictions = {"with instant data loading": fast_loading.predict_step_seconds(fast_loading.pace)}
        if len(self.pace) > 1:
            worst = max(self.pace, key=lambda worker: self.pace[worker])
            predictions["with rows assigned by speed"] = self.predict_step_seconds(self.pace)
            predictions[f"without worker {worst}"] = self.without([worst])
            predictions["with two more workers"] = self.with_more_workers(2)
        if self.link > 0:
            predictions["with a link twice as fast"] = self.with_link(2)
        return predictions


def usual_step(summary: Summary) -> UsualStep | None:
    """The usual step of the first trainer; None if there are no records, or if these leave the workers out."""
    records = [
        r for r in next(iter(summary.steps.values()), []) if r.get("steps") and r.get("computed") and r.get("seconds")
    ]
    team = [record for record in records if record["computed"].keys() == records[-1]["computed"].keys()]
    if not team:
        return None
    team = team[max(len(team) // 10, len(team) > 1) :]  # the first step is never usual
    workers = [int(worker) for worker in team[-1]["computed"]]
    changes = _changes(summary, team[-1].get("trainer"))
    batches_of_workers = [_computed_batches(workers, changes, record) for record in team]
    fixed = {w: median((r.get("lanes") or {}).get(f"{w} update", 0.0) / r["steps"] for r in team) for w in workers}
    waiting = {w: _waiting(summary, w, team, records) for w in workers}

    def paces(least: float) -> list[tuple[dict[int, float], dict[int, float]]]:
        """T and D in each record, of the workers with more than the part `least` of the rows."""
        pace_records = list[tuple[dict[int, float], dict[int, float]]]()
        for record_index, (record, parts) in enumerate(zip(team, batches_of_workers, strict=True)):
            eligible = [w for w in workers if parts[w] > least * record["steps"]]
            compute_seconds = {w: max(0.0, record["computed"][str(w)] - fixed[w] * record["steps"]) for w in eligible}
            waits = {w: min(compute_seconds[w], waiting[w][record_index]) / parts[w] for w in eligible}
            pace_records.append(({w: compute_seconds[w] / parts[w] for w in eligible}, waits))
        return pace_records

    strict_paces, lenient_paces = paces(1 / (2 * len(workers))), paces(FEW)  # with very few rows each row takes longer
    measured = {
        w: [pair for pair in strict_paces if w in pair[0]] or [pair for pair in lenient_paces if w in pair[0]]
        for w in workers
    }
    pace, loading = (
        {w: median(pair[which][w] for pair in pairs) for w, pairs in measured.items() if pairs} for which in (0, 1)
    )
    slowest = [
        max(worker_seconds, key=lambda worker: worker_seconds[worker])
        for worker_seconds, _ in strict_paces
        if worker_seconds
    ]
    sums, waits, rest = [], [], []
    for record in team:
        worker_seconds = [record["computed"][str(worker)] for worker in workers]
        sums.append((record.get("time") or {}).get("reduce", 0.0) / record["steps"])
        waits.append((max(worker_seconds) - worker_seconds[0]) / record["steps"])
        rest.append(max(0.0, record["seconds"] - max(worker_seconds)) / record["steps"])
    hosts = {summary.host_of(worker) for worker in workers} - {""}
    recent = team[-max(3, len(team) // 3) :]  # shares follow the speed of workers, so old records differ
    return UsualStep(
        median(record["seconds"] / record["steps"] for record in recent),
        median(rest),
        max(0.0, median(s - w for s, w in zip(sums, waits, strict=True))) if len(hosts) > 1 or summary.links else 0.0,
        pace,
        loading,
        {worker: slowest.count(worker) / len(measured[worker]) for worker in pace},
        {worker: batches_of_workers[-1][worker] / team[-1]["steps"] for worker in workers},
        fixed,
        [(overhead, *pair) for overhead, pair in zip(rest, strict_paces, strict=True)],
        len(team) >= ENOUGH[0] and sum(record["steps"] for record in team) >= ENOUGH[1],
    )


def _computed_batches(workers: Sequence[int], changes: Sequence[_Change], record: Event) -> dict[int, float]:
    """How many global batches, as a sum of parts, each worker has computed in a record.

    The parts are those of `changes`, each from its step on; equal parts where these do not fit the workers.
    """
    last, parts = int(record.get("step") or 0), dict.fromkeys(workers, 0.0)
    first = last - record["steps"]
    for change_index in range(max(0, bisect_right(changes, first, key=lambda change: change[0]) - 1), len(changes)):
        change_step, share_of_worker = changes[change_index]
        until = changes[change_index + 1][0] if change_index + 1 < len(changes) else last
        steps, share_total = min(until, last) - max(change_step, first), sum(share_of_worker.values())
        if change_step >= last and change_index:
            break
        fits = {*share_of_worker} == {*workers} and share_total > 0
        for worker in workers if steps > 0 else ():
            parts[worker] += steps * (share_of_worker[worker] / share_total if fits else 1 / len(workers))
    return parts


def _changes(summary: Summary, trainer: Any) -> list[_Change]:
    """The parts of the rows by worker, each with the step after which they applied; the grid's parts come first."""
    grid = next((grid for grid in reversed(summary.grids) if grid.get("trainer") == trainer), {})
    shares = grid.get("shares") or []
    # Micro-batches that may be merged may also be divided: if all shares are even then, the rows are, too.
    even = any("may be merged" in str(event.get("what")) for event in summary.decisions)
    even &= max(shares, default=0) - min(shares, default=0) <= 1
    begin: Mapping[int, float] = {} if even or (grid.get("unit") or 1) > 1 else dict(enumerate(shares))
    later = [event for event in summary.shares if event.get("trainer") == trainer]
    parts = [
        (int(event.get("step") or 0), dict(zip(event["workers"], event["parts"], strict=False))) for event in later
    ]
    return [(0, begin), *sorted(parts, key=lambda change: change[0])]


def _waiting(summary: Summary, worker: int, team: Sequence[Event], records: Sequence[Event]) -> list[float]:
    """Seconds that a worker waited for rows in each record of the team.

    They are in the record's lanes. Without lanes, they are estimated from what the worker's current process reported
    of all its steps; without a report they are 0.
    """
    data_lane, worker_key = f"{worker} data", str(worker)
    if any(data_lane in (record.get("lanes") or {}) for record in team):
        return [(record.get("lanes") or {}).get(data_lane, 0.0) for record in team]
    reports = [event["workers"][worker_key] for event in summary.loaded if worker_key in event["workers"]]
    waited, steps = reports[-1] if reports else (0.0, 0)
    computed_seconds = 0.0
    for record in reversed(records):
        if steps > 0:
            computed_seconds += (record["computed"].get(worker_key) or 0.0) * min(1.0, steps / record["steps"])
        steps -= record["steps"]
    return [
        record["computed"][worker_key] * (waited / computed_seconds if computed_seconds > 0 else 0.0) for record in team
    ]
