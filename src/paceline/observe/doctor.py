"""`paceline doctor RUN`: finds out why a run is slow or has failed.

The model of a step, which answers what-ifs: worker w needs F seconds for its update, and its *pace* T is the seconds it
would need to compute all rows of a global batch alone: D seconds of T are waiting for rows, the rest is forward and
backward. All workers wait for the slowest, and C seconds (the overhead) are added. A prediction replays the records
with each worker's T and C in that record: rows are assigned so that all workers would end together at their median T,
and the step takes max(F + T * part) + C of the slowest worker. The median over the records is the result.

With instant data loading, D of the same record is subtracted from T: a worker that computes a part of a micro-batch
loads all of it, so with few rows both grow. An added worker behaves as the median worker did in other records. A link
twice as fast halves the seconds of reductions between hosts: those that worker 0 spends on reductions without waiting
for the slowest worker. Only records of the current team count, without the first tenth and always without the first
one. No torch.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby, pairwise
from pathlib import Path
from statistics import median
from typing import Any

from paceline.base.console import in_one_line
from paceline.base.journal import HUNG, KILLED_FOR_MEMORY, Event
from paceline.base.text import duration, ranks
from paceline.observe.summary import Summary
from paceline.observe.team_table import a_step
from paceline.observe.timeline import flights

SLOW = 1.35  # a worker is slow from this multiple of the others' median pace on
OFTEN = 0.7  # and if it was the slowest in this part of the records
ENOUGH = 3, 8  # records, and steps in these, that a verdict needs
LOADER, LINK = 0.4, 1 / 3  # part of a worker's seconds, and of a step, from which on these are a cause
APART = 0.1  # part of a worker's seconds: if some workers wait for rows this much longer, only these are named
LEAST = 0.002  # seconds of a step below which a cause is ignored
FEW = 0.02  # part of a global batch below which a record is ignored for a worker
LESS = 0.9  # of a step: what-ifs that save less are shown only for the verdict
SEVERAL = 3  # checkpoints: fewer do not count as a cost, even if one took long
COSTLY, LONG = 0.1, 60.0  # part of the wall clock from which on a cost is reported, and the least seconds of a run
COSTS = {
    "saving": ("checkpoints", "save less often (--save-every), or to a faster disk"),
    "redone": ("repeated steps", "find out why workers were lost, or save more often (--save-every)"),
    "hand-over": ("sending the state to new workers", "find out why workers were lost"),
    "forming": ("forming new teams", "find out why workers were lost"),
}
_MEMORY = "memory", "a worker ran out of memory"
# By the `kind` of the journal's event "failed", which is mostly the class of an exception.
KINDS = {
    "NonFiniteLossError": ("not finite", "a loss or gradient is NaN or infinite"),
    "WorkersDifferError": ("diverged", "the workers differ"),
    "CollectiveMismatchError": ("mismatch", "workers called different collectives"),
    HUNG: ("hang", "the script hung"),
    KILLED_FOR_MEMORY: _MEMORY,
    "OutOfMemoryError": _MEMORY,
    "MemoryError": _MEMORY,
}

_WHERE = r"\bworkers? (\d+(?:, \d+)*) (?:is in|are in|(ended after)) "
NOBODY: Mapping[int, int] = {}
NONE: Mapping[int, float] = {}
_Change = tuple[int, Mapping[int, float]]


@dataclass(frozen=True)
class Verdict:
    """What is wrong with a run: a `kind` (empty: nothing is wrong), the `worker` at fault, evidence and cure."""

    kind: str
    what: str
    worker: int | None = None
    evidence: tuple[str, ...] = ()
    cure: str = ""


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

    def what_if(self) -> dict[str, float]:
        """Predicts the seconds of a step for each hypothetical change, by its name."""
        predictions = {
            "with instant data loading": (fast_loading := self.with_fast_loading()).predict_step_seconds(
                fast_loading.pace
            )
        }
        if len(self.pace) > 1:
            worst = max(self.pace, key=lambda worker: self.pace[worker])
            predictions["with rows assigned by speed"] = self.predict_step_seconds(self.pace)
            without = {worker: seconds for worker, seconds in self.pace.items() if worker != worst}
            predictions[f"without worker {worst}"] = self.predict_step_seconds(without)
            usual = sorted(self.pace, key=lambda worker: self.pace[worker])[(len(self.pace) - 1) // 2]
            pace = {**self.pace, -1: self.pace[usual], -2: self.pace[usual]}
            predictions["with two more workers"] = self.predict_step_seconds(pace, {-1: usual, -2: usual})
        if self.link > 0:
            predictions["with a link twice as fast"] = self.step_seconds - self.link / 2
        return predictions


def doctor(folder: Path) -> str:
    """The verdict on a run as text for the terminal. Raises UsageError if `folder` is not a run folder."""
    summary = Summary(folder)
    steps = usual_step(summary)
    diagnosis = verdict(summary, steps)
    lines = [diagnosis.what, *(f"  {line}" for line in diagnosis.evidence)]
    if steps is not None and diagnosis.kind in ("", "worker", "loader", "link"):
        prediction_of_kind = {
            "worker": f"without worker {diagnosis.worker}",
            "loader": "with instant data loading",
            "link": "with a link twice as fast",
        }
        faster = {
            what: s
            for what, s in steps.what_if().items()
            if s < LESS * steps.step_seconds or what == prediction_of_kind.get(diagnosis.kind)
        }
        faster_text = "".join(f"; {a_step(s)} {what}" for what, s in sorted(faster.items(), key=lambda item: item[1]))
        lines.append(f"a step takes {a_step(steps.step_seconds)}{faster_text}")
    return "\n".join(in_one_line(line) for line in [*lines, *([f"next: {diagnosis.cure}"] if diagnosis.cure else [])])


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


def verdict(summary: Summary, steps: UsualStep | None) -> Verdict:
    """Finds the first problem, in this order: a failure, a hang, a cause of slow steps, other costs of time."""
    if summary.outcome is not None and summary.outcome["event"] == "failed":
        return _failed(summary)
    if summary.hang is not None and summary.outcome is None:
        return _hangs(summary.hang)
    diagnosis = _slow(summary, steps) if steps is not None and steps.known else None
    if diagnosis is None and sum(summary.account.values()) > LONG:
        wall_seconds = sum(summary.account.values())
        rare = ["saving"] * (len(summary.checkpoints) < SEVERAL)
        costs = {name: summary.account.get(name, 0.0) for name in COSTS if name not in rare}
        name = max(costs, key=lambda name: costs[name])
        if costs[name] > COSTLY * wall_seconds:
            what, cure = COSTS[name]
            lost = tuple(f"{ranks(e.get('workers') or [])} {e.get('why')}" for e in summary.lost[-3:])
            diagnosis = Verdict(
                name, f"{what} took {costs[name] / wall_seconds:.0%} of {duration(wall_seconds)}", None, lost, cure
            )
    return diagnosis or Verdict("", f"no problem found: {summary.ending}")


def _failed(summary: Summary) -> Verdict:
    event: Event = summary.outcome or {}
    cause = str(event.get("cause"))
    kind, what = KINDS.get(str(event.get("kind")), ("failed", "the run failed"))
    named = re.search(r"\bworkers? (\d+)", cause)
    worker = int(named[1]) if named and kind in ("not finite", "diverged") else event.get("worker")
    if kind == "mismatch":
        worker, left_out = _find_deviating_worker(summary.folder, cause)
        kind, what = ("skipped", "a worker skipped a collective") if left_out else (kind, what)
    who = "" if worker is None else f" ({ranks([worker])})"
    cure = re.findall(r"^next: (.*)$", str(event.get("text")), re.M)
    return Verdict(kind, f"{what}{who}", worker, (cause,), cure[-1] if cure else "read the worker's log")


def _find_deviating_worker(folder: Path, cause: str) -> tuple[int | None, bool]:
    """The worker that is in a different collective than most, and whether it has skipped the collective of the others.

    A worker that has ended has skipped it. So has a worker whose flight recorder shows that it went on to a collective
    that at an earlier time followed theirs, or followed the previous one.
    """
    positions = [([*map(int, members.split(", "))], ended) for members, ended in re.findall(_WHERE, cause)]
    fewest = min((len(members) for members, _ in positions), default=0)
    calls_of = {about["worker"]: list(_called(records)) for about, records in flights(folder)}
    deviating = [(members[0], ended) for members, ended in positions if len(members) == 1 == fewest]
    for worker, ended in deviating:
        others_last = next(
            (
                calls_of[other][-1:]
                for members, _ in positions
                for other in members
                if other != worker and other in calls_of
            ),
            [],
        )
        *before, current = calls_of.get(worker) or [""]
        transitions = {*pairwise(before)} & {(one, current) for one in (*others_last, *before[-1:])}
        if ended or (transitions and others_last != [current]):
            return worker, True
    return (deviating[0][0], False) if len(deviating) == 1 else (None, False)


def _called(records: Sequence[Event]) -> Iterator[str]:
    """The names of the team's collectives in order, without step numbers; neighbours of one name count once."""
    names = (re.sub(r"^step \d+", "step", record["name"]) for record in records if record["group"] == "team")
    return (name for name, _ in groupby(names))


def _hangs(event: Event) -> Verdict:
    """The verdict on a run whose worker makes no progress now."""
    worker, busy = event["worker"], "busy" if event.get("busy") else "waiting"
    line = f"no progress for {event['seconds']:.0f} s: {busy} at {event.get('line') or 'an unknown line'}"
    return Verdict(
        "hang", f"worker {worker} hangs", worker, (line,), f"read its stack in RUN/stacks/worker-{worker}.txt"
    )


def _of_others(seconds: Mapping[int, float], worker: int) -> float:
    """The median over the other workers."""
    return median([value for other, value in seconds.items() if other != worker] or [0.0])


def _waits_for_rows(steps: UsualStep, worker: int) -> bool:
    """Whether waiting for rows is much of a worker's time, or most of what it takes longer than the others."""
    pace, loading = steps.pace[worker], steps.loading[worker]
    usual, excess = _of_others(steps.pace, worker), loading - _of_others(steps.loading, worker)
    return loading > LOADER * pace or (pace > SLOW * usual > 0 and excess > (pace - usual) / 2)


def _slow(summary: Summary, steps: UsualStep) -> Verdict | None:
    """The costliest cause of slow steps: loading, a slow worker or the link between hosts; None if there is none."""
    candidates, count, hosts = list[tuple[float, Verdict]](), len(steps.pace), summary.host_of
    loaders = [w for w, seconds in steps.loading.items() if seconds > LEAST * count and _waits_for_rows(steps, w)]
    more = {w: steps.loading[w] - _of_others(steps.loading, w) for w in loaders}
    apart = [w for w in loaders if more[w] > max(APART * steps.pace[w], max(more.values()) / 2)]
    if loaders := apart or loaders:
        evidence = tuple(
            f"worker {w} needs {a_step(steps.pace[w] / count)} for an equal share of the rows,"
            f" including {a_step(steps.loading[w] / count)} waiting for data"
            for w in sorted(loaders, key=lambda worker: -steps.loading[worker])[:8]
        )
        where = ", ".join(sorted({hosts(worker) for worker in loaders} - {""}))
        what = f"data loading slows training down: {ranks(loaders)}" + (f" on {where}" if where else "")
        cure = "use more loader workers (loader={'num_workers': N}), a faster disk, or less work per row"
        worst = max(loaders, key=lambda worker: steps.loading[worker])
        candidates.append(
            (
                steps.step_seconds - steps.what_if()["with instant data loading"],
                Verdict("loader", what, worst, evidence, cure),
            )
        )
    if count > 1:
        worst = max(steps.pace, key=steps.compute_seconds)
        usual = _of_others({worker: steps.compute_seconds(worker) for worker in steps.pace}, worst)
        ratio, often = steps.compute_seconds(worst) / usual, steps.slowest[worst]
        if ratio > SLOW and often >= OFTEN and steps.compute_seconds(worst) > LEAST * count:
            evidence = (
                f"for the same rows it takes {ratio:.2f} times as long as the other workers, and it was the slowest in"
                f" {often:.0%} of the records",
                f"it computes {steps.parts[worst]:.0%} of the rows",
            )
            what = f"worker {worst} is slow" + (f" (on {hosts(worst)})" if hosts(worst) else "")
            cure = f"check {hosts(worst) or 'its host'} for other programs (`top`), a low clock rate and poor cooling"
            as_others = steps.predict_step_seconds({**steps.pace, worst: usual + steps.loading[worst]})
            candidates.append((steps.step_seconds - as_others, Verdict("worker", what, worst, evidence, cure)))
    if steps.link > max(LEAST, LINK * steps.step_seconds):
        evidence = (f"reductions between hosts take {a_step(steps.link)} of a step of {a_step(steps.step_seconds)}",)
        cure = (
            "use a codec (codec=bf16, int8), local steps (local=N every=H), a larger global batch or a faster network"
        )
        candidates.append(
            (steps.link, Verdict("link", "the link between hosts slows training down", None, evidence, cure))
        )
    return max(candidates, key=lambda candidate: candidate[0])[1] if candidates else None
