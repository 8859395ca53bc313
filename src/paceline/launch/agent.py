"""The agent: starts the workers on this machine, decides who is of the team, and ends with them. No torch."""

from __future__ import annotations

import math
import selectors
import signal
import socket
import sys
import time
from collections import Counter
from collections.abc import Collection, Iterable
from functools import partial
from pathlib import Path
from typing import Any

from paceline.errors import LaunchError
from paceline.launch.ending import STOPPED, Ending, exception_of
from paceline.launch.failure import SIGNALS, USAGE, WEIGHTS, short
from paceline.launch.options import LaunchOptions
from paceline.launch.output import Output, ranks
from paceline.launch.processes import end_sessions
from paceline.launch.workers import CHUNK, Worker, Workers
from paceline.observe.figures import plural
from paceline.observe.journal import Journal
from paceline.observe.progress import Progress
from paceline.team.roster import Announcement, Roster

# Seconds a failure waits for other failures, for the cause of a lost peer, for the end of what says it fails.
OTHERS, CAUSE, EXIT = 1.0, 3.0, 10.0
ALIKE = 0.1  # seconds within which an exception of all workers comes from all
TOGETHER = 0.3  # seconds within which notices to all workers arrive, where the whole run is meant
STILL = 0.3  # seconds that a worker may be stopped before the others go on without it
FINAL = (*USAGE, *WEIGHTS, "WorkersDifferError")  # exceptions that another worker would raise as well


class Agent:
    """Hears of everything in one loop: what workers say and print, their ends and stops, and our own signals."""

    def __init__(self, options: LaunchOptions, folder: Path, journal: Journal, progress: Progress) -> None:
        self._options, self._folder, self._journal, self._progress = options, folder, journal, progress
        self._stop: int | None = None  # the signal that asked for a polite stop
        self._at_once = False
        self._deadline = math.inf  # of the wait after a failure
        self._asked = math.inf  # when to act on workers' notices to leave
        self._left: set[int] = set()  # workers that are to leave with the generation that was announced
        logs = folder / "logs"
        logs.mkdir(mode=0o700, exist_ok=True)
        coloured = sys.stderr.isatty()
        # Where both are the terminal, output must not tear the progress line; else bytes stay bytes.
        raw = None if options.quiet or (coloured and sys.stdout.isatty()) else 1
        self._output = Output(logs, options.workers, self._say, raw)
        self._workers = Workers(options, folder, self._output, self._told, self._exited)
        self._script = _Script(Path(options.script))
        self._roster = Roster(tuple(range(options.workers)))
        self._raised_now: list[Worker] = []  # to be judged together at this time
        self._judged = math.inf
        self._raised: set[Any] = set()  # the exceptions that were survived
        self._causes: Counter[str] = Counter()
        self._ending = Ending(options, folder, journal, self._output, self._say, coloured)

    def run(self, wakeup: socket.socket) -> int:
        """From the workers' start to the exit code; no process is left. `wakeup` brings the numbers of signals."""
        select = self._workers.selector
        select.register(wakeup, selectors.EVENT_READ, partial(self._signalled, wakeup))
        try:
            self._start()
            while any(worker.alive and worker.counts for worker in self._workers.all) and not self._at_once:
                now = time.monotonic()
                if now >= self._deadline:
                    break
                due = min(self._deadline, self._asked, self._judged, self._output.deadline(), self._still()) - now
                for key, _ in select.select(None if due == math.inf else max(due, 0.0)):
                    key.data()
                self._output.tick(time.monotonic())
                self._give_up_stopped()
                self._let_go()
                self._judge()
        finally:
            self._end()
        self._progress.close()
        return self._ending.verdict(self._workers.all, self._stop, self._at_once)

    def _start(self) -> None:
        done = self._workers.done
        what = f" ({', '.join(text for text, _ in done)})" if done else ""
        self._say(f"{plural(self._options.workers, 'worker')}{what}, run folder {short(self._folder)}")
        for text, why in done:
            self._journal.write("decision", what=f"workers: {text}", why=why)
        self._workers.start()

    def _say(self, text: str, always: bool = False) -> None:
        if always or not self._options.quiet:
            self._progress.line(text)

    # ---- hearing

    def _told(self, worker: Worker, event: dict[str, Any]) -> None:
        kind = event["event"]
        main = self._output.shown == worker.rank and not worker.out
        if kind == "failed":
            worker.ended = time.monotonic()
            self._failed(worker)
        elif kind == "ready":
            self._roster.ready(worker.rank)
        elif kind == "waiting":
            self._roster.waits(worker.rank)
            self._announce(self._roster.plan())
        elif kind == "formed":
            self._formed(worker, event)
        elif kind == "ended":
            self._roster.end(worker.rank)
        elif kind == "leaves":
            self._leaves(worker)
        elif main and kind == "line":
            self._say(str(event.get("text", "")))
        elif main and kind in ("phase", "step") and not self._options.quiet:
            (self._progress.phase if kind == "phase" else self._progress.step)(event)

    def _exited(self, worker: Worker) -> None:
        if worker.out and worker.stopped < math.inf:
            self._replace(worker)
        elif worker.status == STOPPED and worker.rank in self._left:
            self._left.remove(worker.rank)
            worker.out = True
            self._roster.end(worker.rank)
            self._say(f"{ranks([worker.rank])} left, as it was told: {_go_on(self._roster.members)}")
        elif worker.status in (0, STOPPED) and (worker.status or not self._vanished(worker)):
            self._roster.end(worker.rank)
        elif not worker.out:
            self._failed(worker)

    def _vanished(self, worker: Worker) -> bool:
        """Whether it ended without a word, in the midst of training."""
        return self._roster.begun and "ended" not in worker.events

    def _failed(self, worker: Worker) -> None:
        """A worker failed, or says that it does. The others go on without it, or this ends the run."""
        if worker in self._raised_now:
            return
        if "failed" in worker.events and worker.counts and self._roster.begun:
            self._raised_now.append(worker)
            self._judged = min(self._judged, time.monotonic() + ALIKE)
        elif not self._spared(worker):
            self._fail(worker)

    def _judge(self) -> None:
        """Goes on without whoever raised an exception, unless all the others did as well."""
        if time.monotonic() < self._judged:
            return
        raised, self._raised_now, self._judged = self._raised_now, [], math.inf
        everybody = not self._roster.survivors([worker.rank for worker in raised])
        for worker in raised:
            if everybody or not self._spared(worker):
                self._fail(worker)

    def _fail(self, worker: Worker) -> None:
        """This failure ends the run: sets how long we wait for what else there is to know."""
        self._output.failing(worker.rank)
        lost = worker.events.get("failed", {}).get("kind") == "PeerLostError"
        wait = EXIT if worker.alive else CAUSE if lost else OTHERS
        self._deadline = min(self._deadline, time.monotonic() + wait)

    def _signalled(self, wakeup: socket.socket) -> None:
        for number in wakeup.recv(CHUNK):
            if number == signal.SIGCHLD:
                self._workers.look_for_stops()
            elif self._stop is not None:
                self._at_once |= number == signal.SIGINT
            else:
                self._stop_all(number)

    def _stop_all(self, number: int) -> None:
        self._stop = number
        self._say("stopping after this step and saving; press Ctrl-C again to stop at once", always=True)
        for worker in self._workers.all:
            if worker.alive:  # one that has not come to its trainer yet just ends
                worker.signal(signal.SIGUSR2)

    # ---- who is of the team

    def _leaves(self, worker: Worker) -> None:
        """A worker was told to leave; where all of them are, somebody wants the whole run to stop."""
        self._roster.leaves(worker.rank)
        all_of_them = self._roster.leaving >= self._roster.established
        self._asked = min(self._asked, time.monotonic() + (0.0 if all_of_them else TOGETHER))

    def _let_go(self) -> None:
        if time.monotonic() < self._asked:
            return
        self._asked = math.inf
        if any("ended" in worker.events for worker in self._workers.all):
            return  # all of them are about to
        if self._roster.leaving >= self._roster.established:
            if self._stop is None:
                self._stop_all(signal.SIGTERM)
        else:
            self._announce(self._roster.plan())

    def _spared(self, worker: Worker) -> bool:
        """Whether the others can go on without a worker that failed; then they do."""
        if worker.out:
            return True
        if self._deadline != math.inf or not self._options.max_restarts or not self._roster.begun:
            return False
        told = worker.events.get("failed", {})
        what = self._what(worker, told)
        known = bool(told) and (told.get("kind") in FINAL or exception_of(worker) in self._raised)
        if told:
            self._raised.add(exception_of(worker))
        left = [rank for rank in self._roster.survivors([worker.rank]) if rank in self._living()]
        self._causes[what] += 1
        restarts = not known and self._causes[what] <= self._options.max_restarts
        if worker.counts and (known or len(left) < self._options.min_workers or (told and not restarts)):
            return False
        self._lose([worker], what, "" if restarts else "; it is not started again")
        if restarts:
            self._replace(worker)
        return True

    def _replace(self, worker: Worker) -> None:
        if not worker.replaced:
            worker.replaced = True
            if self._script.changed():
                what = f"{self._options.script} has changed since the run began: start the same command again to use it"
                self._say(f"{ranks([worker.rank])} is not started again: {what}", always=True)
                return
            try:
                self._workers.again(worker.rank)
            except LaunchError as error:
                self._say(str(error), always=True)

    @staticmethod
    def _what(worker: Worker, told: dict[str, Any]) -> str:
        if told:
            return f"raised {told.get('kind')}"
        if worker.status is not None and worker.status < 0:
            if worker.status == -signal.SIGKILL and worker.memory.grown():
                return "was killed for want of memory"
            return f"was {SIGNALS[-worker.status][0].partition(':')[0]}" if -worker.status in SIGNALS else "was killed"
        return f"ended with exit code {worker.status}"

    def _living(self) -> set[int]:
        return {worker.rank for worker in self._workers.all if worker.alive and not worker.out}

    def _lose(self, workers: Iterable[Worker], what: str, then: str = "") -> None:
        lost = [worker.rank for worker in workers]
        for worker in workers:
            worker.out = True
        order = self._roster.lose(lost)
        step = max((w.events.get("step", {}).get("step") or 0 for w in self._workers.all), default=0)
        self._journal.write("lost", workers=lost, why=what, step=step)
        if order is not None:
            self._say(f"{ranks(lost)} {what}: {_go_on(order.members)}{then}")
        elif all(worker.newcomer for worker in workers):
            self._say(f"{ranks(lost)} {what} before it was back{then}; see {short(self._folder / 'logs')}")
        self._announce(order, also=workers)

    def _announce(self, order: Announcement | None, also: Iterable[Worker] = ()) -> None:
        """A generation: it is in the journal before anybody hears of it."""
        if order is None:
            return
        self._left |= self._roster.leaving - set(order.members)
        self._journal.write("generation", number=order.number, workers=list(order.members), planned=order.planned)
        current = {worker.rank: worker for worker in self._workers.all if worker.alive and not worker.out}
        said = {
            "number": order.number,
            "members": list(order.members),
            "store": list(current[order.members[0]].store),
            "planned": order.planned,
        }
        for worker in [*current.values(), *also]:
            worker.tell(said)

    def _formed(self, worker: Worker, event: dict[str, Any]) -> None:
        new = worker.rank not in self._roster.established
        self._roster.formed(worker.rank, event.get("number", -1))
        if new and worker.rank in self._roster.established:
            worker.newcomer = False
            self._say(f"{ranks([worker.rank])} has joined: {plural(len(self._roster.members), 'worker')}")
        self._output.lead(self._roster.members[0])
        self._announce(self._roster.plan())

    def _still(self) -> float:
        """When the next stopped worker is given up."""
        return min((w.stopped + STILL for w in self._workers.all if w.alive and not w.out), default=math.inf)

    def _give_up_stopped(self) -> None:
        now = time.monotonic()
        stopped = [w for w in self._workers.all if w.alive and not w.out and w.stopped + STILL <= now]
        if not stopped:
            return
        ranks_ = [worker.rank for worker in stopped]
        can = self._options.max_restarts and self._roster.begun
        if can and len(self._roster.survivors(ranks_)) >= self._options.min_workers:
            for worker in stopped:  # or it would wake up in a team that is gone, and end its step there
                worker.signal(signal.SIGKILL)
            self._lose(stopped, "was stopped" if len(stopped) == 1 else "were stopped")
        else:
            for worker in stopped:
                worker.stopped = math.inf  # whoever stopped it may let it go on

    # ---- ending

    def _end(self) -> None:
        """Ends all processes and takes the last of what they wrote."""
        self._workers.kill()
        left = end_sessions({worker.process.pid for worker in self._workers.all})
        self._workers.close()
        if self._ending.failures(self._workers.all, self._stop):
            self._output.failing(self._output.shown)  # what it still holds back came of the failure
        self._output.close()
        if left and not any(worker.killed for worker in self._workers.all):
            names = ", ".join(f"{name} ({pid})" for pid, name in left.items())
            self._say(f"ended what the workers left running: {names}")


class _Script:
    """A file that all workers must run alike."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._text = path.read_bytes()

    def changed(self) -> bool:
        return not self._path.exists() or self._path.read_bytes() != self._text


def _go_on(members: Collection[int]) -> str:
    return f"{plural(len(members), 'worker')} go{'es' if len(members) == 1 else ''} on"
