"""Who is in a run's team and how fast, and what happened to it: rows for the terminal and the page. No torch."""

from __future__ import annotations

from datetime import datetime

from paceline.observe.figures import duration, plural, shares_of
from paceline.observe.journal import Event
from paceline.observe.summary import Rows, Summary

SHOWN, LATEST, MOST = 16, 6, 2  # workers, things that happened, and parts of a worker's time, at most
HEAD = ("worker", "", "host", "share", "computing", "others waited for it", "where its time went")


def team(summary: Summary) -> tuple[list[tuple[str, ...]], int]:
    """A row for each worker, under `HEAD`: where it is, its share, and its part of the newest record of steps. Of very
    many the slowest, and how many more there are.
    """
    last: Event = next((records[-1] for records in summary.steps.values()), {})
    steps = last.get("steps") or 1
    computed, waited = last.get("computed") or {}, last.get("waited_for") or {}
    lanes = lanes_of(last)
    states = {**dict.fromkeys(summary.hosts, False), **summary.up}
    slowest = sorted(states, key=lambda worker: -(computed.get(worker) or waited.get(worker) or 0.0))[:SHOWN]
    shares = _shares(summary)
    rows: list[tuple[str, ...]] = [
        (
            worker,
            "up" if states[worker] else "ended" if summary.outcome else "lost",
            summary.hosts.get(worker, ""),
            shares.get(worker, ""),
            f"{a_step(computed[worker] / steps)} a step" if worker in computed else "",
            f"{a_step(waited[worker] / steps)} a step" if waited.get(worker) else "",
            ", ".join(f"{part} {share:.0%}" for part, share in shares_of(lanes.get(worker, {}))[:MOST]),
        )
        for worker in sorted(slowest, key=lambda worker: (len(worker), worker))
    ]
    return rows, len(states) - len(rows)


def lanes_of(record: Event) -> dict[str, dict[str, float]]:
    """Of each worker the seconds of its steps by part, in the order of parts, by a record of these."""
    spent: dict[str, dict[str, float]] = {}
    for name, seconds in (record.get("lanes") or {}).items():
        worker, part = name.split()
        spent.setdefault(worker, {})[part] = seconds
    return spent


def a_step(seconds: float) -> str:
    """Of a step, so that two can be told apart."""
    return duration(seconds) if seconds >= 10 else f"{seconds:.3g} s" if seconds >= 1 else f"{1000 * seconds:.3g} ms"


def _shares(summary: Summary) -> dict[str, str]:
    """The part of a global batch that each worker has; of those in units, nothing."""
    if summary.shares:
        parts, workers = summary.shares[-1].get("parts") or [], summary.shares[-1].get("workers") or []
    else:
        grid: Event = summary.grids[-1] if summary.grids else {}
        parts = grid.get("shares") or [] if grid.get("unit", 1) == 1 else []
        workers = list(range(len(parts)))
    whole = sum(parts) if all(isinstance(part, int | float) for part in parts) else 0
    return {str(w): f"{part / whole:.0%}" for w, part in zip(workers, parts, strict=False)} if whole else {}


def happened(summary: Summary) -> Rows:
    """What happened last to the team and its checkpoints, the newest at the end."""
    told: list[tuple[float, str]] = []
    for event in summary.lost:
        told.append((event["at"], f"lost: {', '.join(map(str, event.get('workers') or []))}, {event.get('why')}"))
    for event in summary.formed:
        told.append((event["at"], f"formed anew with {plural(len(event.get('workers') or []), 'worker')}"))
    for event in summary.failures:
        told.append((event["at"], f"failed: {event.get('cause')}"))
    for event in summary.checkpoints[-LATEST:]:
        told.append((event["at"], f"checkpoint of step {event.get('step')}"))
    return [(f"{datetime.fromtimestamp(at):%H:%M:%S}", text) for at, text in sorted(told)[-LATEST:]]
