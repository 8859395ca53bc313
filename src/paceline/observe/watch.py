"""`paceline watch`: follows a run in the terminal."""

from __future__ import annotations

import re
import secrets
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from getpass import getpass
from pathlib import Path

from rich.console import Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from paceline.base.console import in_one_line
from paceline.base.journal import NAME
from paceline.base.schema import read_file
from paceline.base.terminal import Terminal
from paceline.base.text import duration, number, plural, rate_of, rounded, shares_of, size_of
from paceline.errors import LaunchError, UsageError
from paceline.observe.charts import thin
from paceline.observe.summary import Newest, Rows, Summary, facts
from paceline.observe.team_table import HEAD, a_step, happened, members, slowest
from paceline.team.coordinator_client import NUMBERS, UnsignedError, Wire

EVERY = 0.5  # seconds between two looks
QUIET = 1.0  # seconds without news after which a run with an end is taken to be over
HEIGHTS = "▁▂▃▄▅▆▇█"


def watch(
    folder: Path | None = None, once: bool = False, key_file: Path | None = None, console: Terminal | None = None
) -> int:
    """Shows a run, by default the newest one under runs/, until it has ended; returns the exit code 0.

    With `once`, or if the console is no terminal, prints the current state and returns. A `folder` of the form
    HOST:PORT is the address of a run's live page. Raises UsageError if there is no such run or if the key in `key_file`
    is wrong, LaunchError if nothing answers. Ctrl-C ends only the watching.
    """
    console = console or Terminal()
    if folder is not None and re.fullmatch("[^/]+:[0-9]{1,5}", str(folder)) and not folder.exists():
        with tempfile.TemporaryDirectory(prefix="paceline-watch-") as copy:
            remote_run = Elsewhere(str(folder), _key(key_file, str(folder)), Path(copy))
            remote_run.follow()
            return _follow(remote_run.folder, once, console, remote_run.follow)
    return _follow(folder or _newest(), once, console, lambda: None)


def _key(file: Path | None, where: str) -> str:
    if file is None:
        if not sys.stdin.isatty():
            what = f"the run at {where} wants its reading key"
            raise UsageError(what, "give --key-file FILE, a copy of reading_key in its run folder")
        return getpass(f"the reading key of the run at {where}, from the file reading_key of its folder: ").strip()
    try:
        return read_file(file).decode().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(
            f"--key-file {in_one_line(file)} cannot be read", f"give a copy of the file reading_key: {error}"
        ) from error


class Elsewhere:
    """Copies the journal of a remote run, whose live page is at `where`, to the local `folder`."""

    def __init__(self, where: str, key: str, folder: Path) -> None:
        self.where, self.folder, self._key = where, folder, key
        self._at = self._failed = 0

    def follow(self) -> None:
        """Fetches what is new. Only the first fetch raises UsageError or LaunchError; later ones are tried again."""
        try:
            while piece := self._ask():
                with (self.folder / NAME).open("ab") as file:
                    file.write(piece)
                self._at += len(piece)
        except UnsignedError as error:  # an answer without the right signature is ignored
            if not self._at:
                what = f"what answers at {self.where} does not know this reading key"
                if error.code == 401:
                    what = f"the run at {self.where} has another reading key"
                raise UsageError(what, "take the file reading_key of its folder") from None
        except OSError as error:
            if not self._at:
                what = f"no live page answers at {self.where} ({getattr(error, 'strerror', None) or error})"
                cure = "say where --page of `paceline run` is; through ssh: `ssh -L 8765:127.0.0.1:8765 HOST`"
                raise LaunchError(what, cure) from error

    def _ask(self) -> bytes:
        """Fetches the next piece of the journal. The key signs the request and is not sent."""
        host, _, port = self.where.rpartition(":")
        with Wire((host, int(port)), self._key.encode(), 5.0) as wire:
            path = f"/journal?from={self._at}"
            status, body = wire.fetch("GET", path, secrets.token_hex(16), secrets.randbelow(NUMBERS), b"")
        return body if status == 200 else b""


def _follow(folder: Path, once: bool, console: Terminal, look: Callable[[], None]) -> int:
    newest = Newest(folder, EVERY, lambda summary: summary)
    number, summary = newest.get()
    if once or not console.is_terminal:
        console.print(frame(summary, time.time()))
        return 0
    changed = time.monotonic()
    try:
        with Live(frame(summary, time.time()), console=console, auto_refresh=False) as live:
            while summary.outcome is None or time.monotonic() - changed < QUIET:
                time.sleep(EVERY)
                look()
                before, (number, summary) = number, newest.get()
                if number > before:
                    changed = time.monotonic()
                live.update(frame(summary, time.time()), refresh=True)
    except KeyboardInterrupt:
        pass
    return 0


def _newest() -> Path:
    journals = sorted(Path("runs").glob(f"*/{NAME}"), key=lambda path: path.stat().st_mtime)
    if not journals:
        raise UsageError("there is no run under runs/", "name its folder: paceline watch RUN")
    return journals[-1].parent


def frame(summary: Summary, now: float) -> RenderableType:
    """Renders the whole screen from the journal up to the event named at its end; `now` is in Unix seconds."""
    style = "bold green" if summary.finished else "bold red" if summary.outcome else "bold"
    head = Text(in_one_line(Path(summary.script).name or str(summary.folder)), "bold")
    head.append(f"  {in_one_line(_state(summary, now))}", style)
    rows = [*_figures(summary), *_costs(summary), *facts(summary)["Plan"]]
    parts: list[RenderableType] = [head, _grid(rows), _workers(summary)]
    if rows := happened(summary):
        parts.append(_grid(rows))
    parts.append(Text(f"event {summary.number} of {in_one_line(summary.folder / NAME)}", "dim"))
    return Group(*parts)


def _grid(rows: Rows) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for name, text in rows:
        if text:
            table.add_row(Text(in_one_line(name)), Text(in_one_line(text)))
    return table


def _state(summary: Summary, now: float) -> str:
    if summary.outcome is not None:
        return summary.ending
    total = next((grid.get("steps") for grid in reversed(summary.grids) if grid.get("steps")), None)
    done = f"step {summary.steps_done:,}" + (f" of {total:,}" if total else "")
    still = now - summary.last_event_at
    return f"{done}, {duration(summary.wall_seconds)}" + (f", no news for {duration(still)}" if still > 10 else "")


def _figures(summary: Summary) -> Rows:
    rows: Rows = []
    for trainer, records in summary.steps.items():
        last = records[-1]
        first, newest = summary.losses[trainer]
        curve = [(float(r["step"]), float(r["loss"])) for r in records if r.get("loss") is not None and r.get("step")]
        rows.append((f"loss {trainer}".strip(), f"{number(newest)}, from {number(first)}  {_curve(curve)}"))
        known = {"lr": last.get("lr"), "gradient norm": last.get("grad_norm"), **(last.get("metrics") or {})}
        texts = [f"{name} {number(value)}" for name, value in known.items() if isinstance(value, int | float)]
        rows.append((f"figures {trainer}".strip(), ", ".join(texts)))
        if last.get("seconds") and last.get("samples"):
            speed = f"{number(round(last['samples'] / last['seconds'], 1))} samples/s"
            tokens = f", {number(rounded(last['tokens'] / last['seconds']))} tokens/s" if last.get("tokens") else ""
            parts = " ".join(f"{name} {share:.0%}" for name, share in shares_of(last.get("time") or {}))
            step = f", {a_step(last['seconds'] / last['steps'])} a step ({parts})" if last.get("steps") else ""
            rows.append((f"speed {trainer}".strip(), speed + tokens + step))
    values = ", ".join(f"{name} {number(curve[-1][1])}" for name, curve in summary.series.items())
    return [*rows, ("evaluated", values), ("goodput", f"{summary.goodput:.0%}" if summary.goodput is not None else "")]


def _curve(points: Sequence[tuple[float, float]], cells: int = 32) -> str:
    """A sparkline of a value in `cells` characters."""
    values = [value for _, value in thin(points, 2 * cells)]
    size = -(-len(values) // cells)
    means = [sum(values[at : at + size]) / len(values[at : at + size]) for at in range(0, len(values), size or 1)]
    low, high = min(means, default=0.0), max(means, default=0.0)
    return "".join(HEIGHTS[round((value - low) / (high - low) * 7)] if high > low else HEIGHTS[0] for value in means)


def _costs(summary: Summary) -> Rows:
    costs, records = dict(facts(summary)["Costs"]), next(iter(summary.steps.values()), [])
    sent = ""
    if records and records[-1].get("bytes") and records[-1].get("seconds"):
        step, second = (
            records[-1]["bytes"] / (records[-1].get("steps") or 1),
            records[-1]["bytes"] / records[-1]["seconds"],
        )
        sent = f"{size_of(step)} a step, {rate_of(second)}, handed to collectives by worker 0"
    return [("bytes", sent), ("links", costs.get("links", ""))]


def _workers(summary: Summary) -> Table:
    table = Table(box=None, padding=(0, 2), header_style="dim", pad_edge=False)
    for name in HEAD:
        table.add_column(name, no_wrap=True)
    shown, more = slowest(members(summary))
    for worker, state, *rest in (member.row for member in shown):
        table.add_row(worker, Text(state, "green" if state == "up" else "dim"), *map(in_one_line, rest))
    if more:
        table.add_row("", Text(f"and {plural(more, 'faster one')}", "dim"))
    return table
