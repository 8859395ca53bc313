"""What a run's journal amounts to: the one source of report, explanation and comparison. No torch."""

from __future__ import annotations

import shlex
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

from paceline.errors import UsageError
from paceline.observe.figures import duration, number, plural, shares_of, size_of
from paceline.observe.journal import NAME, Event, effective_steps, read_journal

Rows = list[tuple[str, str]]


@dataclass
class Summary:
    """A run, summed up over its attempts. What a later attempt did again counts once, but in `wall_seconds`.

    `start` is the last attempt's record, `outcome` how it ended (None: killed, or still running). `steps` are
    the step records by trainer ("" where there is one); `series` the numbers evaluated or logged, as (step,
    value) by name; `texts` the logged strings, the last of each name, with its step. `samples_per_second` is
    that of the last attempt without the first tenth of its steps. `time` are seconds on worker 0,
    `bytes_moved` what it sent, `waited_for` the seconds a worker kept the others waiting. Of several trainers,
    `steps_done`, `samples`, speed and times are the first one's.
    """

    folder: Path
    start: Event = field(default_factory=dict)
    attempts: list[tuple[float, float]] = field(default_factory=list)  # first and last event, Unix seconds
    outcome: Event | None = None
    grids: list[Event] = field(default_factory=list)
    steps: dict[str, list[Event]] = field(default_factory=dict)
    series: dict[str, list[tuple[float, float]]] = field(default_factory=dict)
    texts: dict[str, tuple[int | None, str]] = field(default_factory=dict)
    evaluations: list[Event] = field(default_factory=list)
    decisions: list[Event] = field(default_factory=list)
    checkpoints: list[Event] = field(default_factory=list)
    failures: list[Event] = field(default_factory=list)
    compare: Event | None = None
    steps_done: int = 0
    samples: int = 0
    samples_per_second: float | None = None
    time: dict[str, float] = field(default_factory=dict)
    waited_for: dict[str, float] = field(default_factory=dict)
    bytes_moved: int = 0
    bytes_per_step: float | None = None

    @property
    def workers(self) -> int:
        return int(self.start.get("workers") or 1)

    @property
    def script(self) -> str:
        return str(self.start.get("script") or "")

    @property
    def wall_seconds(self) -> float:
        """From an attempt's first event to its last, over all attempts."""
        return sum(last - first for first, last in self.attempts)

    @property
    def losses(self) -> dict[str, tuple[float | None, float | None]]:
        """First and last loss by trainer; None is one that was not finite."""
        return {name: (kept[0].get("loss"), kept[-1].get("loss")) for name, kept in self.steps.items()}

    @property
    def speedup(self) -> float | None:
        """Speed relative to the run it was compared with."""
        other = (self.compare or {}).get("samples_per_second")
        return self.samples_per_second / other if other and self.samples_per_second else None

    @property
    def finished(self) -> bool:
        return (self.outcome or {}).get("event") == "finished"

    @property
    def ending(self) -> str:
        """How the run ended, in a few words."""
        event = self.outcome
        if event is None:
            return f"not ended, last seen at step {self.steps_done}: killed, or still running"
        if event["event"] == "failed":
            return f"failed at step {self.steps_done}: worker {event.get('worker')}, {event.get('cause')}"
        return f"{event['event']} at step {event.get('step')}" + (f": {event['why']}" if event.get("why") else "")

    @property
    def command(self) -> str:
        """The command that makes the most of the run as it stands."""
        if self.finished:
            return shlex.join(["paceline", "export", str(self.folder), "model.safetensors"])
        if not self.script:
            return f"the same command again, with --run-dir {shlex.quote(str(self.folder))}"
        plan = ["--plan", str(self.start["plan"])] if self.start.get("plan_origin") == "--plan" else []
        words = ["paceline", "run", "--workers", str(self.workers), *plan, "--run-dir", str(self.folder)]
        return shlex.join([*words, *self.script_line])

    @property
    def script_line(self) -> list[str]:
        """The script and its arguments."""
        args = [str(arg) for arg in self.start.get("argv") or []]
        return [*filter(None, [self.script]), *(args[1:] if args and self.script.endswith(args[0]) else args)]


def summarise(folder: Path) -> Summary:
    """Reads a run's journal. UsageError: there is none, or it is of a later version."""
    if not (folder / NAME).exists():
        raise UsageError(f"{folder} is no run folder: it has no {NAME}", "name one that --run-dir made")
    events = read_journal(folder)
    summary = Summary(folder)
    starts = [place for place, event in enumerate(events) if event["event"] == "start"] or [0]
    while len(starts) > 1 and any(event.get("already") for event in events[starts[-1] :]):
        events = events[: starts.pop()]  # an attempt that found nothing left to do
    for first, after in zip(starts, [*starts[1:], len(events)], strict=True):
        # The agent writes "compare" before its workers start: it would count the pause between two attempts.
        stamps = [float(e["at"]) for e in events[first:after] if e.get("at") and e["event"] != "compare"]
        if stamps:
            summary.attempts.append((stamps[0], stamps[-1]))
    last = events[starts[-1] :]
    if last and last[0]["event"] == "start":
        summary.start = last[0]
    endings = [event for event in last if event["event"] in ("finished", "stopped", "failed")]
    endings.sort(key=lambda event: event["event"] == "failed")  # one failed, so the others were stopped
    summary.outcome = endings[-1] if endings else None
    summary.failures = [event for event in events if event["event"] == "failed"]
    summary.compare = next((event for event in reversed(events) if event["event"] == "compare"), None)
    summary.checkpoints = effective_steps(events, "checkpoint")
    summary.evaluations = effective_steps(events, "evaluate")
    for kept, kind, keys in (
        (summary.grids, "grid", ("trainer", "phase")),
        (summary.decisions, "decision", ("what",)),
    ):  # an attempt that resumes repeats them
        kept += {tuple(str(e.get(key)) for key in keys): e for e in events if e["event"] == kind}.values()
    _add_steps(summary, events, last)
    _add_values(summary, events)
    return summary


def _add_steps(summary: Summary, events: list[Event], last: list[Event]) -> None:
    records = effective_steps(events)
    if not records:
        return
    several = len({str(record.get("trainer")) for record in records}) > 1
    for record in records:
        summary.steps.setdefault(f"trainer {record.get('trainer')}" if several else "", []).append(record)
    own, main = next(iter(summary.steps.values())), records[0].get("trainer")
    summary.steps_done, summary.samples = int(own[-1].get("step") or 0), int(_sum(own, "samples"))
    current = [event for event in last if event["event"] == "step" and event.get("trainer") == main] or own
    begins = [(record.get("step") or 0) - (record.get("steps") or 0) for record in current]
    warm = begins[0] + 0.1 * ((current[-1].get("step") or 0) - begins[0])
    steady = [r for r, begin in zip(current, begins, strict=True) if begin >= warm] or current
    if _sum(steady, "seconds") > 0:
        summary.samples_per_second = _sum(steady, "samples") / _sum(steady, "seconds")
    summary.bytes_moved = int(_sum(records, "bytes"))
    if any(record.get("bytes") is not None for record in records) and _sum(own, "steps") > 0:
        summary.bytes_per_step = summary.bytes_moved / _sum(own, "steps")
    for record in own:
        for total, name in ((summary.time, "time"), (summary.waited_for, "waited_for")):
            for part, seconds in (record.get(name) or {}).items():
                total[part] = total.get(part, 0.0) + (seconds or 0.0)


def _add_values(summary: Summary, events: list[Event]) -> None:
    """What was evaluated and then logged under the same name is one curve."""
    curves: dict[str, dict[float, float]] = {}
    several = len({str(event.get("trainer")) for event in summary.evaluations}) > 1
    for event in summary.evaluations + effective_steps(events, "log"):
        prefix = f"trainer {event.get('trainer')}: " if several and "results" in event else ""
        for name, value in (event.get("results") or event.get("values") or {}).items():
            if isinstance(value, str):
                summary.texts[name] = (event.get("step"), value)
            elif isinstance(value, (int, float)) and name != "n":
                curves.setdefault(prefix + name, {})[float(event.get("step") or 0)] = float(value)
    summary.series = {name: sorted(curve.items()) for name, curve in curves.items()}


def _sum(records: list[Event], name: str) -> float:
    return sum(record.get(name) or 0.0 for record in records)


def facts(summary: Summary) -> dict[str, Rows]:
    """The run in words, as (name, text) rows by title; what the journal does not hold is left out."""
    s, start = summary, summary.start
    results: Rows = []
    for name, (first, last) in s.losses.items():
        results.append((f"loss {name}".strip(), f"{number(first)} at first, {number(last)} at last"))
    evaluation = s.evaluations[-1] if s.evaluations else {}
    values = ", ".join(f"{name} {number(value)}" for name, value in (evaluation.get("results") or {}).items())
    results.append(("evaluation", f"{values} (step {evaluation.get('step')})" if values else ""))
    done = f"{plural(s.steps_done, 'step')}, {plural(s.samples, 'sample')} in {duration(s.wall_seconds)}"
    results.append(("done", done if s.steps_done else ""))
    rate = f"{number(round(s.samples_per_second, 1))} samples/s" if s.samples_per_second else ""
    if s.speedup and s.compare:
        rate += f", {s.speedup:.2f} times as fast as {plural(s.compare.get('workers') or 1, 'worker')}"
    results.append(("speed", rate))

    spent = ", ".join(f"{name} {share:.0%} ({duration(s.time[name])})" for name, share in shares_of(s.time))
    slow = sorted(((wait, name) for name, wait in s.waited_for.items() if wait > 0), reverse=True)
    waited = ", ".join(f"worker {name} {duration(wait)}" for wait, name in slow)
    moved = ""
    if s.bytes_per_step is not None:
        moved = f"{size_of(s.bytes_per_step)} a step, {size_of(s.bytes_moved)} in all, sent by worker 0"
    costs = [
        ("time", spent),
        ("waited for", waited),
        ("bytes", moved),
    ]

    plan = [("plan", f"{start['plan']} (from {start.get('plan_origin')})" if start.get("plan") else "")]
    plan += [("grid", str(grid.get("text") or "")) for grid in s.grids]
    shares = (s.grids[-1].get("shares") or []) if s.grids else []
    plan.append(("shares", ", ".join(f"worker {place}: {share}" for place, share in enumerate(shares))))

    resumed = start.get("resumed_from")
    since = f"the last went on from step {resumed}" if resumed else "the last began anew"
    events = [("begun", f"{datetime.fromtimestamp(s.attempts[0][0]):%Y-%m-%d %H:%M}" if s.attempts else "")]
    events.append(("attempts", f"{len(s.attempts)}, {since}" if len(s.attempts) > 1 else ""))
    if s.checkpoints:
        saving = duration(_sum(s.checkpoints, "seconds"))
        events.append(("checkpoints", f"{len(s.checkpoints)} in {saving}, the last {s.checkpoints[-1].get('path')}"))
    for event in s.failures:
        events.append(("failure", f"worker {event.get('worker')} on {event.get('host')}: {event.get('cause')}"))
    events.append(("ended", s.ending))

    versions = ", ".join(f"{name} {version}" for name, version in (start.get("versions") or {}).items())
    hosts = start.get("hosts") if start.get("hosts") != 1 else None
    place = [("script", shlex.join(s.script_line)), ("workers", str(start.get("workers") or ""))]
    place += [(word, str(start.get(key) or "")) for word, key in (("device", "device"), ("threads each", "threads"))]
    place.append(("hosts", ", ".join(map(str, hosts)) if isinstance(hosts, list) else str(hosts or "")))
    place += [("seed", str(start.get("seed", ""))), ("versions", versions)]
    tables = {"Results": results, "Costs": costs, "Plan": plan, "What happened": events, "Environment": place}
    return {title: [row for row in rows if row[1]] for title, rows in tables.items()}
