"""Lists the workers of a run, their speed and the latest events of the team."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from statistics import median

from paceline.base.journal import Event
from paceline.base.text import duration, plural, ranks, shares_of, total, totals
from paceline.observe.key_figures import recent_span, recent_steps_of, speed
from paceline.observe.summary import Rows, Summary

SHOWN, LATEST, MOST = 16, 6, 2  # workers, things that happened, and parts of a worker's time, at most
HEAD = ("worker", "status", "host", "device", "share", "samples/s", "compute", "waited for", "time by part")
NUMERIC = HEAD[4:8]  # columns of numbers


@dataclass(frozen=True)
class OneWorker:
    """A row of the table of workers.

    `share` is the worker's fraction of the global batch, and `samples` the samples per second that it processes.
    Seconds are per step: `computed` by the worker, `waited` by other workers for this one, of the `step` itself, and
    `spent` by part. Figures that are unknown are None, zero or empty.
    """

    worker: str
    state: str
    host: str
    device: str
    share: float | None
    samples: float | None
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
        """Seconds by which workers are compared: of computing, or of being waited for where that is not known."""
        return self.waited if self.computed is None else self.computed

    @property
    def row(self) -> tuple[str, ...]:
        """The cells of the row, in the columns of `HEAD`."""
        parts = ", ".join(f"{part} {share:.0%}" for part, share in shares_of(self.spent)[:MOST])
        return (
            *(self.worker, self.state, self.host, self.device),
            f"{self.share:.0%}" if self.share is not None else "",
            speed(self.samples) if self.samples is not None else "",
            a_step(self.computed) if self.computed is not None else "",
            a_step(self.waited) if self.waited else "",
            parts,
        )


def _window(summary: Summary) -> list[Event]:
    """The records of steps of the first trainer that the table of workers is about."""
    return recent_steps_of(summary, next(iter(summary.steps), ""))


def span_of(summary: Summary) -> str:
    """The time span that the table of workers covers, for example ``last 30 s``; empty before the first step."""
    records = _window(summary)
    return f"mean of the {recent_span(records)}" if records else ""


def members(summary: Summary) -> list[OneWorker]:
    """All workers of a run, by number.

    Their seconds are means of the last 30 s of training. In a very large team, the seconds of computing come from the
    newest event that lists each worker.
    """
    records = _window(summary)
    steps = total(records, "steps") or 1
    seconds = total(records, "seconds")
    listing = [record for record in records if record.get("computed")] or [summary.each]
    computed: dict[str, tuple[float, float]] = {}  # seconds and steps by worker
    for record in listing:
        for worker, value in (record.get("computed") or {}).items():
            spent, counted = computed.get(worker, (0.0, 0.0))
            computed[worker] = spent + value, counted + (record.get("steps") or 1)
    waited, lanes, shares = totals(records, "waited_for"), lanes_of(records), _shares(summary)
    per_second = total(records, "samples") / seconds if seconds > 0 else None
    states = {**dict.fromkeys(summary.hosts, False), **summary.up}
    hosts = summary.hosts | {worker: event["host"] for event in summary.loaded for worker in event["workers"]}

    def row(worker: str) -> OneWorker:
        is_spare = worker in summary.ready_spares
        state = "up" if states[worker] else "ended" if summary.outcome else "spare" if is_spare else "lost"
        share = shares.get(worker) if state not in ("lost", "spare") else None
        own_seconds, own_steps = computed.get(worker, (0.0, 0.0))
        return OneWorker(
            worker,
            state,
            hosts.get(worker, ""),
            str(summary.start.get("device") or ""),
            share,
            share * per_second if share is not None and per_second is not None else None,
            own_seconds / own_steps if own_steps else None,
            waited.get(worker, 0.0) / steps,
            seconds / steps,
            lanes.get(worker, {}),
        )

    return [row(worker) for worker in sorted(states, key=lambda worker: (len(worker), worker))]


def by_host(team: Sequence[OneWorker]) -> list[tuple[str, list[OneWorker]]]:
    """The hosts and their workers; the host with the slowest worker comes first."""
    by_name: dict[str, list[OneWorker]] = {}
    for member in team:
        by_name.setdefault(member.host, []).append(member)
    return sorted(by_name.items(), key=lambda host: -max(member.slowness for member in host[1]))


def describe_team(team: Sequence[OneWorker]) -> str:
    """Sums up some workers in a line: how many are up, how long they compute, how long others waited for them."""
    up, spares = (sum(member.state == state for member in team) for state in ("up", "spare"))
    worst = max(team, key=lambda member: member.slowness)
    computed = [member.computed for member in team if member.computed is not None]
    parts = [f"{len(team):,} {plural(len(team), 'worker').split()[1]}" + (f", {up:,} up" if up < len(team) else "")]
    parts[0] += f", {plural(spares, 'spare')}" if spares else ""
    if computed and worst.computed is not None:
        most = f", slowest {a_step(worst.computed)} (worker {worst.worker})" if len(team) > 1 else ""
        parts.append(f"median compute time {a_step(median(computed))} per step{most}")
    if waited := sum(member.waited for member in team):
        parts.append(f"others waited {a_step(waited)} per step")
    return "; ".join(parts)


def slowest(team: Sequence[OneWorker]) -> tuple[list[OneWorker], int]:
    """The slowest `SHOWN` workers, by number, and how many more there are."""
    most = sorted(team, key=lambda member: -member.slowness)[:SHOWN]
    return sorted(most, key=lambda member: (len(member.worker), member.worker)), len(team) - len(most)


def lanes_of(records: Sequence[Event]) -> dict[str, dict[str, float]]:
    """The seconds of each worker by part, from the lanes of records of steps."""
    spent: dict[str, dict[str, float]] = {}
    for name, seconds in totals(records, "lanes").items():
        worker, part = name.split()
        spent.setdefault(worker, {})[part] = seconds
    return spent


def a_step(seconds: float) -> str:
    """Seconds per step as text, with three digits so that steps can be compared."""
    return duration(seconds) if seconds >= 10 else f"{seconds:.3g} s" if seconds >= 1 else f"{1000 * seconds:.3g} ms"


def _shares(summary: Summary) -> dict[str, float]:
    """Each worker's fraction of a global batch; empty if several workers form a unit."""
    if summary.shares:
        parts, workers = summary.shares[-1].get("parts") or [], summary.shares[-1].get("workers") or []
    else:
        grid: Event = summary.grids[-1] if summary.grids else {}
        parts = grid.get("shares") or [] if grid.get("unit", 1) == 1 else []
        workers = list(range(len(parts)))
    batch = sum(parts) if all(isinstance(part, int | float) for part in parts) else 0
    return {str(w): part / batch for w, part in zip(workers, parts, strict=False)} if batch else {}


def happened(summary: Summary) -> Rows:
    """The latest events of the team and its checkpoints as (time, text) rows, the newest last."""
    entries: list[tuple[float, str]] = []
    for event in summary.lost:
        entries.append(
            (event["at"], f"lost worker {', '.join(map(str, event.get('workers') or []))}: {event.get('why')}")
        )
    for event in summary.formed:
        entries.append((event["at"], f"new team of {plural(len(event.get('workers') or []), 'worker')}"))
    for event in summary.host_events:
        what = "left out after " if event["event"] == "excluded" else f"{event['kind']}: "
        entries.append((event["at"], f"host {event['host']}: {what}{event['text']}"))
    for event in summary.spares:
        if event.get("enter"):
            entries.append((event["at"], f"spare {ranks(event['enter'])} enters the team"))
    for event in summary.failures:
        entries.append((event["at"], f"failed: {event.get('cause')}"))
    for event in summary.checkpoints[-LATEST:]:
        entries.append((event["at"], f"checkpoint of step {event.get('step')}"))
    return [(f"{datetime.fromtimestamp(at):%H:%M:%S}", text) for at, text in sorted(entries)[-LATEST:]]
