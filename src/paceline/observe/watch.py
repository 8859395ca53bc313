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
from paceline.base.text import duration, number, plural, rate_of, shares_of, size_of, total, totals
from paceline.errors import LaunchError, UsageError
from paceline.observe.charts import thin
from paceline.observe.key_figures import key_figures, recent_span, recent_steps_of, step_count
from paceline.observe.summary import Newest, Rows, Summary, facts
from paceline.observe.team_table import HEAD, NUMERIC, a_step, happened, members, slowest, span_of
from paceline.team.coordinator_client import NUMBERS, UnsignedError, Wire

EVERY = 0.5  # seconds between two updates
QUIET = 1.0  # seconds without events after which an ended run is no longer followed
HEIGHTS = "▁▂▃▄▅▆▇█"


def watch(
    folder: Path | None = None, once: bool = False, key_file: Path | None = None, console: Terminal | None = None
) -> int:
    """Shows a run, by default the newest one under runs/, until it has ended; returns the exit code 0.

    With `once`, or if the console is not a terminal, prints the current state and returns. A `folder` of the form
    HOST:PORT is the address of a run's live page. Raises UsageError if the run does not exist or if the key in
    `key_file` is wrong, LaunchError if nothing answers. Ctrl-C ends only the watching.
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
            what = f"the run at {where} requires its reading key"
            raise UsageError(what, "pass --key-file FILE, a copy of the file reading_key in its run folder")
        return getpass(f"reading key of the run at {where} (file reading_key in its run folder): ").strip()
    try:
        return read_file(file).decode().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(
            f"--key-file {in_one_line(file)} cannot be read ({error})", "pass a copy of the file reading_key"
        ) from error


class Elsewhere:
    """Copies the journal of a remote run, whose live page is at `where`, to the local `folder`."""

    def __init__(self, where: str, key: str, folder: Path) -> None:
        self.where, self.folder, self._key = where, folder, key
        self._at = self._failed = 0

    def follow(self) -> None:
        """Fetches new events. Only the first fetch raises UsageError or LaunchError; failed later ones are repeated."""
        try:
            while piece := self._ask():
                with (self.folder / NAME).open("ab") as file:
                    file.write(piece)
                self._at += len(piece)
        except UnsignedError as error:  # an answer without the right signature is ignored
            if not self._at:
                what = f"the server at {self.where} does not know this reading key"
                if error.code == 401:
                    what = f"the run at {self.where} has a different reading key"
                raise UsageError(what, "use the file reading_key from its run folder") from None
        except OSError as error:
            if not self._at:
                what = f"no live page answers at {self.where} ({getattr(error, 'strerror', None) or error})"
                cure = "pass the address of `paceline run --page`; through ssh: `ssh -L 8765:127.0.0.1:8765 HOST`"
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
        raise UsageError("runs/ contains no run", "pass a run folder: paceline watch RUN")
    return journals[-1].parent


def frame(summary: Summary, now: float) -> RenderableType:
    """Renders the whole screen from the journal up to the event named at its end; `now` is in Unix seconds."""
    style = "bold green" if summary.finished else "bold red" if summary.outcome else "bold"
    head = Text(summary.name or in_one_line(summary.folder), "bold")
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
    still = now - summary.last_event_at
    silence = f", no new event for {duration(still)}" if still > 10 else ""
    return f"{step_count(summary).text}, {duration(summary.wall_seconds)} elapsed{silence}"


def _figures(summary: Summary) -> Rows:
    """The key figures, the loss with a sparkline, and details of the last records of steps."""
    rows: Rows = [(figure.name, figure.text) for figure in key_figures(summary)]
    for index, (trainer, records) in enumerate(summary.steps.items()):
        losses = [(float(r["step"]), float(r["loss"])) for r in records if r.get("loss") is not None and r.get("step")]
        rows[index] = (rows[index][0], f"{rows[index][1]}  {_curve(losses)}")  # losses come first
        last, window = records[-1], recent_steps_of(summary, trainer)
        known = {"lr": last.get("lr"), "gradient norm": last.get("grad_norm"), **(last.get("metrics") or {})}
        texts = [f"{name} {number(value)}" for name, value in known.items() if isinstance(value, int | float)]
        rows.append((f"metrics {trainer}".strip(), ", ".join(texts)))
        if steps := total(window, "steps"):
            parts = " ".join(f"{name} {share:.0%}" for name, share in shares_of(totals(window, "time")))
            text = f"{a_step(total(window, 'seconds') / steps)} ({recent_span(window)}): {parts}"
            rows.append((f"step time {trainer}".strip(), text))
    values = ", ".join(f"{name} {number(curve[-1][1])}" for name, curve in summary.series.items())
    return [*rows, ("evaluated", values)]


def _curve(points: Sequence[tuple[float, float]], cells: int = 32) -> str:
    """A sparkline of a value in `cells` characters."""
    values = [value for _, value in thin(points, 2 * cells)]
    size = -(-len(values) // cells)
    means = [sum(values[at : at + size]) / len(values[at : at + size]) for at in range(0, len(values), size or 1)]
    low, high = min(means, default=0.0), max(means, default=0.0)
    return "".join(HEIGHTS[round((value - low) / (high - low) * 7)] if high > low else HEIGHTS[0] for value in means)


def _costs(summary: Summary) -> Rows:
    costs, window = dict(facts(summary)["Costs"]), recent_steps_of(summary, next(iter(summary.steps), ""))
    size, steps, seconds = total(window, "bytes"), total(window, "steps"), total(window, "seconds")
    sent = ""
    if size and steps and seconds > 0:
        sent = f"{size_of(size / steps)} per step, {rate_of(size / seconds)} sent by worker 0 ({recent_span(window)})"
    return [("bytes", sent), ("links", costs.get("links", ""))]


def _workers(summary: Summary) -> Table:
    span = span_of(summary)
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", pad_edge=False)
    table.title, table.title_justify, table.title_style = (
        (f"workers ({span}; compute and waited for: per step)" if span else None),
        "left",
        "dim",
    )
    shown, more = slowest(members(summary))
    rows = [member.row for member in shown]
    columns = [index for index in range(len(HEAD)) if index < 2 or any(row[index] for row in rows)]
    for index in columns:
        is_last, is_number = index == len(HEAD) - 1, HEAD[index] in NUMERIC
        width = None if is_last else max([len(HEAD[index]), *(len(row[index]) for row in rows)])
        table.add_column(HEAD[index], no_wrap=True, min_width=width, justify="right" if is_number else "left")
    for row in rows:
        cells = [Text(in_one_line(cell)) for cell in row]
        cells[1].stylize("green" if row[1] == "up" else "dim")
        table.add_row(*(cells[index] for index in columns))
    if more:
        table.add_row("", Text(f"and {plural(more, 'faster worker')}", "dim"))
    return table
