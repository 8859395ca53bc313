"""Prints the progress line."""

from __future__ import annotations

import errno
import io
import os
import sys
import time
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, TextIO, cast

from rich.live import Live
from rich.text import Text

from paceline.base.console import Coloured, printable, say
from paceline.base.journal import Event
from paceline.base.terminal import Terminal
from paceline.base.text import clock, number, shares_of, total, totals, trainer_names
from paceline.observe.notebook import NotebookBar, in_notebook

BAR, WIDEST = 12, 40  # cells of a bar, at least and at most
WINDOW = 10.0  # seconds of events that the rates are averaged over
REFRESH = 0.1  # seconds between two paintings of the live line
IN_NOTEBOOK = 0.5  # the same in a notebook
EIGHTHS = " ▏▎▍▌▋▊▉"


class _Track:
    """The progress of one trainer, which had made `before` steps when the run was started or resumed."""

    def __init__(self, before: int = 0) -> None:
        self.before = before
        self.total: int | None = before
        self.epochs: int | None = None
        self.model = ""
        self.evaluated: Event = {}
        self.events: deque[Event] = deque()
        self.updated_at = 0.0

    @property
    def step(self) -> int:
        return int(self.events[-1].get("step") or 0) if self.events else self.before

    def add(self, event: Event) -> None:
        """Adds a record of steps, and drops those older than `WINDOW` seconds of training."""
        self.updated_at = time.monotonic()
        self.events.append(event)
        while len(self.events) > 1 and total(self.events, "seconds") - (self.events[0].get("seconds") or 0.0) >= WINDOW:
            self.events.popleft()


class Progress(AbstractContextManager["Progress"]):
    """Shows the progress of the run, by default on standard error, so that the script's own output stays clean.

    `kind` is ``rich``, the default on a terminal: one line with a bar is repainted; ``plain``, the default elsewhere:
    lines are printed at the first step, then at most one every `every` seconds, and the last one at `close`; or
    ``none``. The kernel of a notebook shows a bar in the output of the cell instead of repainting a line. If the reader
    goes away (a closed pipe), nothing more is shown and the training goes on. The run stops after `max_steps` steps, if
    it has so many.
    """

    max_steps: int | None = None

    def __init__(self, console: Terminal | None = None, kind: str | None = None, every: float = 10.0) -> None:
        has_notebook = kind in (None, "rich") and console is None and in_notebook()
        self._notebook = NotebookBar(self._show_rest) if has_notebook else None
        forced = True if kind == "rich" and self._notebook is None else None
        self._console = console or Terminal(stderr=True, force_terminal=forced)
        self._console.on_broken_pipe = self._mute  # type: ignore[method-assign]  # rich's own ends the process
        terminal = self._console.is_terminal and not self._console.is_dumb_terminal
        self._live = self._notebook is None and (terminal if kind is None else kind == "rich")
        self._every, self._is_off = every, kind == "none"
        self._fraction: float | None = None  # of the steps to make
        self._painter: Live | None = None
        self._tracks: dict[Any, _Track] = {}
        self._shown = -float("inf")
        self._pending = self._quiet = self._ended = False

    def __exit__(self, *_: object) -> None:
        self.close()

    def phase(self, event: Event) -> None:
        """Begins a loop of a trainer, and prints its grid. `event` has the fields of the journal's ``grid``."""
        for trainer, before in enumerate(event.get("done") or ()):
            self._tracks.setdefault(trainer, _Track(before))
        track = self._tracks.setdefault(event.get("trainer"), _Track())
        track.total, track.epochs, track.model = event.get("steps"), event.get("epochs"), event.get("model") or ""
        if event.get("text"):
            stops = self.max_steps is not None and (track.total is None or self.max_steps < track.total)
            self.line(str(event["text"]) + (f"; this run stops at step {self.max_steps}" if stops else ""))

    def step(self, event: Event) -> None:
        """Adds steps. `event` has the fields of the journal's ``step``; may be called several times a second."""
        self._tracks.setdefault(event.get("trainer"), _Track()).add(event)
        self._pending = True
        pause = IN_NOTEBOOK if self._notebook is not None else REFRESH if self._live else self._every
        if time.monotonic() - self._shown >= pause:
            self._show()

    def evaluate(self, event: Event) -> None:
        """Takes the results of an evaluation. `event` has the fields of the journal's ``evaluate``."""
        self._tracks.setdefault(event.get("trainer"), _Track()).evaluated = event.get("results") or {}

    def line(self, text: str) -> None:
        """Prints a line above the live one."""
        text = text if isinstance(text, Coloured) else Coloured(printable(text))
        if self._live:
            clean = Text("\n").join(Text.from_ansi(part) for part in text.split("\n"))
            self._write(lambda: self._console.print(clean, soft_wrap=True, highlight=False))
        else:
            self._write(lambda: say(text, cast(TextIO, self._console.file)))

    def close(self) -> None:
        """Shows the last line and restores the terminal. Closing twice is harmless."""
        self._ended = True
        if self._pending or self._painter is not None:
            self._show()
        if self._notebook is not None:
            self._notebook.close()
        if self._painter is not None:
            self._write(self._painter.stop, always=True)
            self._painter = None

    def _show_rest(self) -> None:
        if self._pending:
            self._show()

    def _show(self) -> None:
        self._pending, self._shown = False, time.monotonic()
        if self._is_off:
            return
        if self._notebook is not None:
            self._notebook.show([(text, style == "bold") for _, text, style in self._parts()], self._fraction)
        elif self._live:
            self._write(self._paint)
        else:
            self.line("  ".join(text for _, text, _ in self._parts()))

    def _paint(self) -> None:
        if self._painter is None:
            both = sys.stdout.isatty()  # if not a terminal, the script's output must stay in its file or pipe
            self._painter = Live(console=self._console, auto_refresh=False, redirect_stdout=both)
            self._painter.start()
            self._console.show_cursor(True)  # a killed process could not bring it back
        parts = self._parts()
        if self._fraction is not None and self._console.encoding.startswith("utf"):
            parts.insert(1, (6, " " * (BAR + 2), "cyan"))
        space = self._console.width + 2 - sum(len(text) + 2 for _, text, _ in parts)
        while len(parts) > 1 and space < 0:
            least = max(parts)  # in importance
            parts.remove(least)
            space += len(least[1]) + 2
        if len(parts) > 1 and parts[1][0] == 6 and self._fraction is not None:
            cells = BAR + min(space, WIDEST - BAR)
            eighths = int(self._fraction * cells * 8)
            bar = ("█" * (eighths // 8) + EIGHTHS[eighths % 8]).strip().ljust(cells)
            parts[1] = (6, f"▕{bar}▏", "cyan")
        line = Text("  ").join(Text(text, style) for _, text, style in parts)
        line.no_wrap, line.overflow = True, "crop"
        self._painter.update(line, refresh=True)

    def _parts(self) -> list[tuple[int, str, str]]:
        """The parts of the line from left to right: (rank, 0 being the most important; text; style)."""
        started = {name: track for name, track in self._tracks.items() if track.events}
        latest = max(track.updated_at for track in started.values())
        # Several trainers may take turns: their steps are one count, as in checkpoints and for --steps.
        step, totals_ = sum(track.step for track in self._tracks.values()), [t.total for t in self._tracks.values()]
        target_step = sum(total or 0 for total in totals_) if None not in totals_ else None
        if self.max_steps is not None:
            target_step = min(target_step or self.max_steps, self.max_steps)
        target_step = target_step if target_step and target_step >= step else None
        active = {name: track for name, track in started.items() if latest - track.updated_at < WINDOW}
        events = [event for track in active.values() for event in track.events]
        main_track, event = next((track, track.events[-1]) for track in active.values())
        self._fraction = step / target_step if target_step else None
        metrics, has_bar = "", self._live or self._notebook is not None
        newest = max(active.values(), key=lambda track: track.updated_at)
        begun, epochs = int(newest.events[-1].get("epoch") or 0) + 1, newest.epochs or 0
        of_epochs = f"/{epochs}" if epochs >= begun else ""
        has_epoch = (begun > 1 or of_epochs) if has_bar else (of_epochs and epochs > 1)
        epoch = f"epoch {begun}{of_epochs}" if has_epoch else ""
        if has_bar:
            values = {**(event.get("metrics") or {}), **main_track.evaluated}
            shown = {n: value for n, value in values.items() if n != "n" and isinstance(value, int | float)}
            metrics = " ".join(f"{name} {number(value)}" for name, value in shown.items())
        names = trainer_names({name: track.model for name, track in started.items()}) if len(started) > 1 else {}
        known = {name: track.events[-1]["loss"] for name, track in active.items() if "loss" in track.events[-1]}
        losses = ", ".join(f"{names.get(name, '')} {number(loss)}".strip() for name, loss in known.items())
        seconds = total(events, "seconds")
        speed, pace = (total(events, field) / seconds if seconds > 0 else 0.0 for field in ("samples", "steps"))
        shares = [f"{name} {share:.0%}" for name, share in shares_of(totals(events, "time")) if share >= 0.005]
        parts = [
            (0, f"step {step}/{target_step}" if target_step else f"step {step}", "bold"),
            (4, epoch, ""),
            (1, losses and f"loss {losses}", ""),
            (2, metrics, ""),
            (5, f"{speed:,.{0 if speed >= 10 else 1}f} samples/s" if speed else "", ""),
            (3, f"{clock((target_step - step) / pace)} left" if target_step and pace and not self._ended else "", ""),
            (7, " ".join(shares), "dim"),
        ]
        return [part for part in parts if part[1]]

    def _write(self, action: Callable[[], object], always: bool = False) -> None:
        if self._quiet and not always:
            return
        try:
            action()
        except ValueError:  # the stream was closed
            self._mute()
        except OSError as error:  # the reader is gone; but a full disk may have room again for later lines
            if error.errno != errno.ENOSPC:
                self._mute()

    def _mute(self) -> None:
        """Stops writing because nobody reads, and sends the interpreter's last flush to the null device."""
        self._quiet = self._console.quiet = True
        try:
            stream = self._console.file.fileno()
        except (OSError, ValueError, AttributeError, io.UnsupportedOperation):
            return
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream)
        os.close(nowhere)
