"""Writes workers' output to logs and once to the console."""

from __future__ import annotations

import os
import re
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from paceline.base.console import coloured, last_painted, without_colours
from paceline.base.polling import wait_for
from paceline.base.text import called, ranks
from paceline.base.tracebacks import TRACEBACK

WARNING = re.compile(r"^(?P<where>.+?:\d+): (?P<category>\w*Warning): (?P<text>.*)$")
COLLECT = 2.0  # seconds to wait for the next worker with the same warning
HOLD = 3.0  # seconds to wait whether a worker that printed a traceback ends
LONGEST = 1 << 16  # bytes of a line without an end


@dataclass
class _Feed:
    """The log file of a worker, the incomplete lines of its streams, and its last lines."""

    log: int
    rest: dict[str, bytes] = field(default_factory=lambda: {"stdout": b"", "stderr": b""})
    tail: deque[str] = field(default_factory=lambda: deque(maxlen=100))
    errors: deque[str] = field(default_factory=lambda: deque(maxlen=2000))
    source_follows: bool = False


class Output:
    """Distributes the output of the workers. All of it goes to ``worker-K.log`` as it arrives.

    The console shows the lines of worker 0, or of the worker that leads the team after it, and each distinct warning
    of any worker once, with the workers that raised it. From a traceback on, standard error of the shown worker is
    held back: if the worker ends, the failure text contains the error; otherwise the lines are shown later.

    `show` prints one line on the console. `raw`: a file descriptor to which standard output of the shown worker is
    copied byte by byte instead (if it is a file or a pipe and not the terminal).
    """

    def __init__(self, logs: Path, workers: Sequence[int], show: Callable[[str], None], raw: int | None) -> None:
        self._show, self._raw = show, raw
        self._logs, self._feeds = logs, dict[int, _Feed]()
        for rank in workers:
            self.open(rank)
        self._warnings: dict[str, set[int]] = {}  # workers by text; kept, so that it is shown only once
        self._due: dict[str, float] = {}  # when to show a warning
        self._held: list[str] | None = None
        self._release = 0.0
        self._failing = self._log_lost = False
        self.shown = min(workers)  # the worker whose lines are shown

    def open(self, rank: int) -> None:
        """Opens the log of another worker."""
        if rank not in self._feeds:
            self._feeds[rank] = _Feed(_open_log(self._logs / f"{called(rank)}.log"))

    def reopen(self) -> bool:
        """Creates missing log files again. Returns whether any were missing. OSError: they cannot be written."""
        has_reopened = False
        for rank, feed in self._feeds.items():
            path = self._logs / f"{called(rank)}.log"
            if not path.exists():
                has_reopened = True
                os.close(feed.log)
                feed.log = _open_log(path)
        return has_reopened

    def show_lines_of(self, rank: int) -> None:
        """Shows the lines of this worker from now on."""
        self.shown = rank

    def take(self, rank: int, stream: str, data: bytes) -> None:
        """`data` arrived on ``stdout`` or ``stderr`` of a worker; lines may be cut anywhere."""
        feed = self._feeds[rank]
        try:
            _write_all(feed.log, data)
        except OSError as error:
            if not self._log_lost:
                self._log_lost = True
                self._show(f"the logs of the workers are incomplete ({error.strerror}); free some space on that disk")
        if rank == self.shown and stream == "stdout" and self._raw is not None and self._raw >= 0:
            try:
                _write_all(self._raw, data)
            except OSError:  # the reader has ended, which must not end the training
                self._raw = -1
        *lines, rest = (feed.rest[stream] + data).split(b"\n")
        if len(rest) > LONGEST:
            lines, rest = [*lines, rest], b""
        feed.rest[stream] = rest
        for line in lines:
            self._line(rank, stream, line)

    def _line(self, rank: int, stream: str, line: bytes) -> None:
        feed = self._feeds[rank]
        text = last_painted(line)
        feed.tail.append(text)
        if stream == "stdout":
            if rank == self.shown and self._raw is None:
                self._show(coloured(text))
            return
        feed.errors.append(text)
        if rank == self.shown and self._held is not None:
            self._held.append(text)
            return
        source, feed.source_follows = feed.source_follows and text.startswith("  "), False
        if source:
            return
        if warning := WARNING.match(text):
            feed.source_follows = True
            self._warn(rank, f"{warning['category']}: {warning['text']} ({warning['where']})")
        elif rank == self.shown and text.endswith(TRACEBACK):
            self._held, self._release = [text], time.monotonic() + HOLD
        elif rank == self.shown:
            self._show(coloured(text))

    def _warn(self, rank: int, text: str) -> None:
        workers = self._warnings.setdefault(text, set())
        if workers and text not in self._due:
            return
        workers.add(rank)
        self._due[text] = time.monotonic() + (COLLECT if len(workers) < len(self._feeds) else 0.0)

    def deadline(self) -> float:
        """The monotonic time at which `tick` must be called next."""
        release = [self._release] if self._held is not None and not self._failing else []
        return min([*self._due.values(), *release], default=float("inf"))

    def tick(self, now: float) -> None:
        """Shows what has waited long enough."""
        for text in [text for text, due in self._due.items() if due <= now]:
            del self._due[text]
            self._show(f"[{ranks(self._warnings[text])}] {text}")
        if self._held is not None and not self._failing and self._release <= now:
            held, self._held = self._held, None
            for text in held:
                self._show(coloured(text))

    def forget_last_lines(self, rank: int) -> None:
        """Forgets the last lines of a worker, because a new process takes its place."""
        if rank in self._feeds:  # otherwise its previous process was on another host
            self._feeds[rank].tail.clear()
            self._feeds[rank].errors.clear()

    def note(self, rank: int, text: str) -> None:
        """Writes a text to a worker's log only. The worker's own output begins on a new line."""
        with suppress(OSError):
            _write_all(self._feeds[rank].log, f"\n{text}".encode(errors="backslashreplace"))

    def failing(self, rank: int) -> None:
        """Notes that a worker is ending or has ended by an exception, so that its traceback is not shown."""
        self._failing |= rank == self.shown

    def tail(self, rank: int, most: int = 15) -> list[str]:
        """The last lines of a worker's log, of this start."""
        lines = [without_colours(line) for line in self._feeds[rank].tail]
        while lines and not lines[-1].strip():
            lines.pop()
        return [line if len(line) <= 400 else line[:400] + " ..." for line in lines[-most:]]

    def errors(self, rank: int) -> list[str]:
        """The last lines of a worker's standard error."""
        return list(self._feeds[rank].errors)

    def close(self) -> None:
        """Shows the rest of the output after the workers' end, and closes the logs."""
        for rank, feed in self._feeds.items():
            for stream, rest in feed.rest.items():
                if rest:
                    self._line(rank, stream, rest)
            os.close(feed.log)
        self.tick(float("inf"))


def _open_log(path: Path) -> int:
    """Opens a log to append to it; after the lines of an earlier start, a line marks the beginning of this one."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    # Non-blocking, in case the path is a pipe that no process reads.
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NONBLOCK, 0o600)
    os.set_blocking(log, True)
    if os.fstat(log).st_size:
        _write_all(log, f"\n---- started again at {time.strftime('%Y-%m-%d %H:%M:%S')} ----\n".encode())
    return log


def _write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        try:
            view = view[os.write(fd, view) :]
        except BlockingIOError:  # a pipe or terminal that another process made non-blocking
            wait_for((), [fd])
