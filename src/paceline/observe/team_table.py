"""Lists the team's workers, their speed and what happened to them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from statistics import median

from paceline.base.journal import Event
from paceline.base.text import duration, plural, shares_of
from paceline.observe.summary import Rows, Summary

SHOWN, LATEST, MOST = 16, 6, 2  # workers, things that happened, and parts of a worker's time, at most
HEAD = ("worker", "", "host", "share", "computing", "others waited for it", "where its time went")


@dataclass(frozen=True)
class OneWorker:
    """A row of the table of workers.

    `share` is its part of the global batch. Seconds are those of a step: `computed` by the worker, `waited` by others
    for it, of the `step` itself, and `spent` by part, as far as they are known.
    """

    worker: str
    state: str
    host: str
    share: str
    computed: float | None
    waited: float
    step: float
    spent: dict[str, float]

    @property
    def lane(self) -> dict[str, float]:
        """The worker's seconds by part, or at least those of computing and of the rest."""
        if self.spent or self.computed is None:
            return self.spent
        return {"load and compute": self.computed, "reduce, wait and others": max(0.0, self.step - self.computed)}

    @property
    def slowness(self) -> float:
        return self.waited if self.computed is None else self.computed

    @property
    def row(self) -> tuple[str, ...]:
        """The cells of the row, in the columns of `HEAD`."""
        computed = f"{a_step(self.computed)} a step" if self.computed is not None else ""
        waited = f"{a_step(self.waited)} a step" if self.waited else ""
        parts = ", ".join(f"{part} {share:.0%}" for part, share in shares_of(self.spent)[:MOST])
        return (self.worker, self.state, self.host, self.share, computed, waited, parts)


def members(summary: Summary) -> list[OneWorker]:
    """All workers of a run, by number.

    Their seconds come from the newest record of steps, or, if there are very many workers, from the newest record that
    lists each worker.
    """
    last: Event = next((records[-1] for records in summary.steps.values()), {})
    steps = last.get("steps") or 1
    newest = last if last.get("computed") else summary.each
    computed = {w: seconds / (newest.get("steps") or 1) for w, seconds in (newest.get("computed") or {}).items()}
    waited, lanes, shares = last.get("waited_for") or {}, lanes_of(last), _shares(summary)
    states = {**dict.fromkeys(summary.hosts, False), **summary.up}
    hosts = summary.hosts | {worker: event["host"] for event in summary.loaded for worker in event["workers"]}

    return [
        OneWorker(
            worker,
            "up" if states[worker] else "ended" if summary.outcome else "lost",
            hosts.get(worker, ""),
            shares.get(worker, ""),
            computed.get(worker),
            (waited.get(worker) or 0.0) / steps,
            (last.get("seconds") or 0.0) / steps,
            lanes.get(worker, {}),
        )
        for worker in sorted(states, key=lambda worker: (len(worker), worker))
    ]


def by_host(team: Sequence[OneWorker]) -> list[tuple[str, list[OneWorker]]]:
    """The hosts and their workers; the host with the slowest worker comes first."""
    by_name: dict[str, list[OneWorker]] = {}
    for member in team:
        by_name.setdefault(member.host, []).append(member)
    return sorted(by_name.items(), key=lambda host: -max(member.slowness for member in host[1]))


def describe_team(team: Sequence[OneWorker]) -> str:
    """Sums up some workers in a line: how many are up, how long they compute, how long others waited."""
    up = sum(member.state == "up" for member in team)
    worst = max(team, key=lambda member: member.slowness)
    computed = [member.computed for member in team if member.computed is not None]
    parts = [f"{len(team):,} {plural(len(team), 'worker').split()[1]}", *([f"{up} up"] if up < len(team) else [])]
    if computed and worst.computed is not None:
        most = f", its slowest {a_step(worst.computed)} (worker {worst.worker})" if len(team) > 1 else ""
        parts.append(f"computing {a_step(median(computed))} a step{most}")
    if waited := sum(member.waited for member in team):
        parts.append(f"others waited {a_step(waited)}")
    return ", ".join(parts)


def slowest(team: Sequence[OneWorker]) -> tuple[list[OneWorker], int]:
    """The slowest `SHOWN` workers, by number, and how many more there are."""
    most = sorted(team, key=lambda member: -member.slowness)[:SHOWN]
    return sorted(most, key=lambda member: (len(member.worker), member.worker)), len(team) - len(most)


def lanes_of(record: Event) -> dict[str, dict[str, float]]:
    """The seconds of each worker by part, from the lanes of a record of steps."""
    spent: dict[str, dict[str, float]] = {}
    for name, seconds in (record.get("lanes") or {}).items():
        worker, part = name.split()
        spent.setdefault(worker, {})[part] = seconds
    return spent


def a_step(seconds: float) -> str:
    """The seconds of a step as text, with three digits, so that steps can be compared."""
    return duration(seconds) if seconds >= 10 else f"{seconds:.3g} s" if seconds >= 1 else f"{1000 * seconds:.3g} ms"


def _shares(summary: Summary) -> dict[str, str]:
    """Each worker's part of a global batch; nothing if several workers form a unit."""
    if summary.shares:
        parts, workers = summary.shares[-1].get("parts") or [], summary.shares[-1].get("workers") or []
    else:
        grid: Event = summary.grids[-1] if summary.grids else {}
        parts = grid.get("shares") or [] if grid.get("unit", 1) == 1 else []
        workers = list(range(len(parts)))
    total = sum(parts) if all(isinstance(part, int | float) for part in parts) else 0
    return {str(w): f"{part / total:.0%}" for w, part in zip(workers, parts, strict=False)} if total else {}


def happened(summary: Summary) -> Rows:
    """The latest events of the team and its checkpoints as (time, text) rows, the newest last."""
    entries: list[tuple[float, str]] = []
    for event in summary.lost:
        entries.append((event["at"], f"lost: {', '.join(map(str, event.get('workers') or []))}, {event.get('why')}"))
    for event in summary.formed:
        entries.append((event["at"], f"formed anew with {plural(len(event.get('workers') or []), 'worker')}"))
    for event in summary.failures:
        entries.append((event["at"], f"failed: {event.get('cause')}"))
    for event in summary.checkpoints[-LATEST:]:
        entries.append((event["at"], f"checkpoint of step {event.get('step')}"))
    return [(f"{datetime.fromtimestamp(at):%H:%M:%S}", text) for at, text in sorted(entries)[-LATEST:]]
