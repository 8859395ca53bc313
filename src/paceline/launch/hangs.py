"""Finds workers that make no progress and wait for nobody, and ends them."""

from __future__ import annotations

import math
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from paceline.base.environment import standstill
from paceline.base.heartbeat import BEATS, DONE, FREE, USUAL, WAITS, HeartbeatView
from paceline.base.journal import Journal
from paceline.base.stacks import Hung, computed, is_traced
from paceline.base.text import called
from paceline.base.tracebacks import named
from paceline.launch.diagnostics import ANSWER, family_of, look_at, standing, take_stacks
from paceline.launch.options import LaunchOptions
from paceline.launch.output import Output
from paceline.launch.workers import Worker, Workers

LOOK = 0.5  # seconds between two looks
MOST = 1.0  # seconds that count between two looks at most: if more have passed, this process was suspended
SLOW = 10  # a step may take this many times its usual time
UNATTENDED = 1800.0  # seconds after which a worker is killed if the console is not a terminal
BUSY = 0.5  # share of the time: a process that computes, or waits for a core, for more than that is busy


@dataclass
class _Watch:
    """The progress of a process: its heartbeats when it last made progress, and the seconds since then (`stood`).
    `reports`: the number of reports about it. `asked`: the value of `stood` when the process was asked to stop.
    `computed`: the CPU seconds of its processes when `stood` was `halfway`, between two reports.
    """

    beats: float = -1.0
    stood: float = 0.0
    reports: int = 0
    asked: float | None = None
    halfway: float = 0.0
    computed: Mapping[int, float] = field(default_factory=dict)


class Hangs:
    """Finds workers of an agent that make no progress, reports them and ends them. `say` prints a line.

    Excluded are workers that wait for others, because the worker that all wait for does not wait itself; workers under
    a debugger, in `main_first` or stopped by a signal; and time in which this process was suspended.
    """

    def __init__(
        self,
        workers: Workers,
        options: LaunchOptions,
        folder: Path,
        journal: Journal,
        output: Output,
        say: Callable[..., None],
    ) -> None:
        self._workers, self._folder, self._journal, self._output, self._say = workers, folder, journal, output, say
        given = options.hang_timeout
        self._patience = standstill()
        # With --raw only collectives show progress: a long evaluation of worker 0 alone must not be ended unasked.
        unattended = 0.0 if sys.stderr.isatty() or options.raw else UNATTENDED
        self._timeout = float(given) if given is not None else unattended
        self._off = options.debug is not None  # a user is debugging, and all other workers wait
        self._alone_here = options.join is None  # otherwise the coordinator prints the reports elsewhere
        self._watches: dict[int, _Watch] = {}  # by process
        self._looked = time.monotonic()

    @property
    def due(self) -> float:
        """When to look again."""
        return math.inf if self._off else self._looked + LOOK

    def look(self, now: float, stopping: bool) -> None:
        """Checks the progress of all workers; reports workers without progress, and finally kills them. `stopping`: the
        run was asked to stop.
        """
        if now < self.due:
            return
        passed, self._looked = min(now - self._looked, MOST), now
        for worker in self._workers.all:
            if worker.alive and not worker.out and worker.hung is None:
                self._look_at(worker, passed, stopping)

    def _look_at(self, worker: Worker, passed: float, stopping: bool) -> None:
        pulse, pid = worker.pulse, worker.process.pid
        watch = self._watches.setdefault(pid, _Watch())
        excused = pulse[WAITS] or (pulse[FREE] and not stopping) or worker.stopped < math.inf
        if excused or pulse[BEATS] != watch.beats:
            self._watches[pid] = _Watch(pulse[BEATS])
            return
        watch.stood += passed
        if stopping and watch.asked is None:
            watch.asked = watch.stood
        tell, end = self._limits(pulse, watch)
        if watch.stood < min(tell, end) / 2:
            return
        if is_traced(pid):
            self._watches[pid] = _Watch(pulse[BEATS])
            return
        if watch.halfway == 0.0:
            watch.halfway, watch.computed = watch.stood, computed(family_of(worker))
        if watch.stood < min(tell, end):
            return
        ended = watch.stood >= end
        hung = self._examine(worker, watch, watch.stood if watch.asked is not None else end if ended else tell)
        watch.reports, watch.halfway = watch.reports + 1, 0.0
        self._tell(worker, hung, ended)

    def _limits(self, pulse: HeartbeatView, watch: _Watch) -> tuple[float, float]:
        """Seconds without progress until the next report, and until the worker is ended."""
        slow, first = SLOW * pulse[USUAL], 1 if pulse[DONE] else 2  # a first step also compiles, reads and warms up
        tell = max(self._patience, slow) * first * 2.0**watch.reports
        end = max(self._timeout, slow) * first if self._timeout else math.inf
        if watch.asked is not None:
            end = min(end, watch.asked + max(self._patience / 3, 2 * pulse[USUAL]))
        return tell, end

    def _examine(self, worker: Worker, watch: _Watch, seconds: float) -> Hung:
        """Determines at which line a worker is, and whether it computes. All its stacks go to its log; the stacks and
        collectives of all workers go into the run folder.
        """
        until, now, pid = time.monotonic() + ANSWER, computed(family_of(worker)), worker.process.pid
        examined = standing(worker, take_stacks([(worker.pulse, pid)], until)[0], until)
        who = examined.loader or pid
        share = (now.get(who, 0.0) - watch.computed.get(who, 0.0)) / max(watch.stood - watch.halfway, LOOK)
        at = time.strftime("%Y-%m-%d %H:%M:%S")
        title = f"---- all stacks at {at}, after {seconds:.0f} s without progress ----"
        self._output.note(worker.rank, "\n".join([title, examined.text, "----", ""]))
        others = [other for other in self._workers.all if other.alive and other is not worker]
        for stand in (examined, *look_at(others)):
            stand.keep(self._folder)
        return Hung(seconds, share > BUSY, examined.code_line, examined.loader)

    def _tell(self, worker: Worker, hung: Hung, ended: bool) -> None:
        line = str(hung.code_line) if hung.code_line is not None else None
        about = {"worker": worker.rank, "life": worker.life, "host": socket.gethostname(), "pid": worker.process.pid}
        self._journal.write("hang", **about, seconds=hung.seconds, line=line, busy=hung.busy, ended=ended)
        if ended:  # it is then reported like any lost worker
            worker.hung = hung
            worker.process.signal(signal.SIGKILL)
            return
        log = named(self._folder / "logs" / f"{called(worker.rank)}.log")
        where = "" if self._alone_here else f" on {socket.gethostname()}"
        stands = f"worker {worker.rank} has made no progress for {hung.seconds:.0f} s: {hung.state}"
        text = f"{stands} at {hung.code_line or hung.where}\n  all its stacks: {log}{where}"
        if self._alone_here:
            self._say(text)
        else:
            worker.stands = text
