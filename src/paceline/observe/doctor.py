"""`paceline doctor RUN`: finds out why a run is slow or has failed."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from pathlib import Path
from statistics import median

from paceline.base.console import in_one_line
from paceline.base.journal import HUNG, KILLED_FOR_MEMORY, Event
from paceline.base.text import duration, ranks
from paceline.observe.summary import Summary, describe_hosts
from paceline.observe.team_table import a_step
from paceline.observe.timeline import flights
from paceline.observe.usual_step import UsualStep, usual_step

SLOW = 1.35  # a worker is slow from this multiple of the others' median pace on
OFTEN = 0.7  # and if it was the slowest in this part of the records
LOADER, LINK = 0.4, 1 / 3  # part of a worker's seconds, and of a step, from which on these are a cause
APART = 0.1  # part of a worker's seconds: if some workers wait for rows this much longer, only these are named
LEAST = 0.002  # seconds of a step below which a cause is ignored
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


@dataclass(frozen=True)
class Verdict:
    """What is wrong with a run: a `kind` (empty: nothing is wrong), the `worker` at fault, evidence and cure."""

    kind: str
    what: str
    worker: int | None = None
    evidence: tuple[str, ...] = ()
    cure: str = ""


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
    lines += [f"{name}: {text}" for name, text in describe_hosts(summary)]
    return "\n".join(in_one_line(line) for line in [*lines, *([f"next: {diagnosis.cure}"] if diagnosis.cure else [])])


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
