"""`paceline watch`: a run in the terminal, followed from its folder, or as it ended. No torch."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from paceline.errors import UsageError
from paceline.observe.charts import thin
from paceline.observe.figures import duration, number, plural, rate_of, shares_of, size_of
from paceline.observe.journal import NAME, Event, Reader
from paceline.observe.summary import Rows, Summary, facts

EVERY = 0.5  # seconds between two looks
QUIET = 1.0  # seconds without news after which a run that has ended is over
SHOWN, LATEST = 16, 6  # workers, and things that happened, at most
HEIGHTS = "▁▂▃▄▅▆▇█"


def watch(folder: Path | None = None, once: bool = False, console: Console | None = None) -> int:
    """Shows a run, by default the newest one under runs/, until it has ended; `once`, and where the console is no
    terminal, as it is now. UsageError: there is none. Ctrl-C ends the watching, and nothing else.
    """
    folder, console = folder or _newest(), console or Console()
    reader = Reader(folder)
    summary = Summary(folder, reader)
    if once or not console.is_terminal:
        console.print(frame(summary, time.time()))
        return 0
    changed = time.monotonic()
    try:
        with Live(frame(summary, time.time()), console=console, auto_refresh=False) as live:
            while summary.outcome is None or time.monotonic() - changed < QUIET:
                time.sleep(EVERY)
                before, summary = summary.number, Summary(folder, reader)
                if summary.number > before:
                    changed = time.monotonic()
                live.update(frame(summary, time.time()), refresh=True)
    except KeyboardInterrupt:
        pass
    return 0


def _newest() -> Path:
    found = sorted(Path("runs").glob(f"*/{NAME}"), key=lambda path: path.stat().st_mtime)
    if not found:
        raise UsageError("there is no run under runs/", "name its folder: paceline watch RUN")
    return found[-1].parent


def frame(summary: Summary, now: float) -> RenderableType:
    """All of it, made of the journal up to the event that it names; `now` is in Unix seconds."""
    style = "bold green" if summary.finished else "bold red" if summary.outcome else "bold"
    head = Text(_clean(Path(summary.script).name or str(summary.folder)), "bold")
    head.append(f"  {_clean(_state(summary, now))}", style)
    rows = [*_figures(summary), *_costs(summary), *facts(summary)["Plan"]]
    parts: list[RenderableType] = [head, _grid(rows), _workers(summary)]
    if happened := _happened(summary):
        parts.append(_grid(happened))
    parts.append(Text(f"event {summary.number} of {summary.folder / NAME}", "dim"))
    return Group(*parts)


def _clean(text: str) -> str:
    """Of a script or a user, so that it cannot move the cursor or change colours."""
    return "".join(char if char.isprintable() else "?" for char in text)


def _grid(rows: Rows) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for name, text in rows:
        if text:
            table.add_row(Text(_clean(name)), Text(_clean(text)))
    return table


def _state(summary: Summary, now: float) -> str:
    if summary.outcome is not None:
        return summary.ending
    total = next((grid.get("steps") for grid in reversed(summary.grids) if grid.get("steps")), None)
    done = f"step {summary.steps_done:,}" + (f" of {total:,}" if total else "")
    still = now - summary.heard
    return f"{done}, {duration(summary.wall_seconds)}" + (f", no news for {duration(still)}" if still > 10 else "")


def _figures(summary: Summary) -> Rows:
    rows: Rows = []
    for trainer, records in summary.steps.items():
        last = records[-1]
        first, newest = summary.losses[trainer]
        curve = [(float(r["step"]), float(r["loss"])) for r in records if r.get("loss") is not None and r.get("step")]
        rows.append((f"loss {trainer}".strip(), f"{number(newest)}, from {number(first)}  {_curve(curve)}"))
        known = {"lr": last.get("lr"), "gradient norm": last.get("grad_norm"), **(last.get("metrics") or {})}
        told = [f"{name} {number(value)}" for name, value in known.items() if isinstance(value, int | float)]
        rows.append((f"figures {trainer}".strip(), ", ".join(told)))
        if last.get("seconds") and last.get("samples"):
            speed = f"{number(round(last['samples'] / last['seconds'], 1))} samples/s"
            tokens = f", {number(round(last['tokens'] / last['seconds']))} tokens/s" if last.get("tokens") else ""
            parts = " ".join(f"{name} {share:.0%}" for name, share in shares_of(last.get("time") or {}))
            step = f", {_step(last['seconds'] / last['steps'])} a step ({parts})" if last.get("steps") else ""
            rows.append((f"speed {trainer}".strip(), speed + tokens + step))
    values = ", ".join(f"{name} {number(curve[-1][1])}" for name, curve in summary.series.items())
    return [*rows, ("evaluated", values), ("goodput", f"{summary.goodput:.0%}" if summary.goodput is not None else "")]


def _step(seconds: float) -> str:
    """Of a step, so that two can be told apart."""
    return duration(seconds) if seconds >= 10 else f"{seconds:.3g} s" if seconds >= 1 else f"{1000 * seconds:.3g} ms"


def _curve(points: Sequence[tuple[float, float]], cells: int = 32) -> str:
    """The course of a value in as many characters."""
    values = [value for _, value in thin(points, 2 * cells)]
    size = -(-len(values) // cells)
    means = [sum(values[at : at + size]) / len(values[at : at + size]) for at in range(0, len(values), size or 1)]
    low, high = min(means, default=0.0), max(means, default=0.0)
    return "".join(HEIGHTS[round((value - low) / (high - low) * 7)] if high > low else HEIGHTS[0] for value in means)


def _costs(summary: Summary) -> Rows:
    costs, own = dict(facts(summary)["Costs"]), next(iter(summary.steps.values()), [])
    sent = ""
    if own and own[-1].get("bytes") and own[-1].get("seconds"):
        step, second = own[-1]["bytes"] / (own[-1].get("steps") or 1), own[-1]["bytes"] / own[-1]["seconds"]
        sent = f"{size_of(step)} a step, {rate_of(second)}, handed to collectives by worker 0"
    return [("bytes", sent), ("links", costs.get("links", ""))]


def _workers(summary: Summary) -> Table:
    """A line for each: where it is, its share, and its part of the newest record of steps. Of very many the slowest."""
    table = Table(box=None, padding=(0, 2), header_style="dim", pad_edge=False)
    for name in ("worker", "", "host", "share", "computing", "others waited for it"):
        table.add_column(name, no_wrap=True)
    last: Event = next((records[-1] for records in summary.steps.values()), {})
    steps = last.get("steps") or 1
    computed, waited = last.get("computed") or {}, last.get("waited_for") or {}
    states = {**dict.fromkeys(summary.hosts, False), **summary.up}
    slowest = sorted(states, key=lambda worker: -(computed.get(worker) or waited.get(worker) or 0.0))[:SHOWN]
    shares = _shares(summary)
    for worker in sorted(slowest, key=lambda worker: (len(worker), worker)):
        state = ("up", "green") if states[worker] else ("ended" if summary.outcome else "lost", "dim")
        known = worker in computed
        table.add_row(
            worker,
            Text(*state),
            Text(_clean(summary.hosts.get(worker, ""))),
            shares.get(worker, ""),
            f"{_step(computed[worker] / steps)} a step" if known else "",
            f"{_step(waited[worker] / steps)} a step" if waited.get(worker) else "",
        )
    if len(states) > SHOWN:
        table.add_row("", Text(f"and {plural(len(states) - SHOWN, 'faster one')}", "dim"))
    return table


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


def _happened(summary: Summary) -> Rows:
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
