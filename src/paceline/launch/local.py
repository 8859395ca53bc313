"""The agent: starts the workers on this machine, hears of all that they do, and ends with them. No torch."""

from __future__ import annotations

import json
import math
import os
import selectors
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections import ChainMap
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

from rich.console import Console

from paceline.checkpoint.lock import hold_lock
from paceline.errors import LaunchError, UsageError
from paceline.launch.failure import Failure, culprit, failure_block, short
from paceline.launch.output import Output
from paceline.launch.processes import MemoryKills, die_with_us, end_sessions
from paceline.launch.surroundings import pin, surround
from paceline.observe.figures import plural
from paceline.observe.journal import Journal
from paceline.observe.progress import Progress
from paceline.observe.report import write_report
from paceline.observe.summary import Summary
from paceline.plan import Plan
from paceline.world import parse_save_every, parse_shares, worker_environment

STOPPED = 75  # EX_TEMPFAIL: stopped politely, the same command goes on
INTERRUPTED = 130
# Seconds a failure waits for other failures, for the cause of a lost peer, for the end of what says it fails.
OTHERS, CAUSE, EXIT = 1.0, 3.0, 10.0
CHUNK = 1 << 16


@dataclass(frozen=True)
class LaunchOptions:
    """What `paceline run` was asked for.

    `against`: the folder of a run to compare the speed with. `debug`: the rank whose standard streams are the
    terminal's own, for pdb (its log stays empty). `quiet`: the console shows only how the run ended, and that
    only where it did not finish. `environment`: further variables for the workers.
    """

    script: str
    arguments: list[str] = field(default_factory=list)
    workers: int = 1
    run_dir: str | None = None
    plan: str | None = None
    shares: str | None = None
    save_every: str | None = None
    max_steps: int | None = None
    against: str | None = None
    debug: int | None = None
    quiet: bool = False
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass
class Worker:
    """One worker process as the agent knows it. `status` as in subprocess; None while it runs."""

    rank: int
    process: subprocess.Popen[bytes]
    pidfd: int
    memory: MemoryKills
    pipes: dict[int, Callable[[bytes], None]] = field(default_factory=dict)  # by descriptor: who takes what arrives
    status: int | None = None
    ended: float = math.inf  # monotonic seconds of its end, or of its word that it fails
    killed: bool = False
    events: dict[str, dict[str, Any]] = field(default_factory=dict)  # the last one of each kind
    unread: bytes = b""


def launch(options: LaunchOptions) -> int:
    """Runs the script with its workers on this machine until all have ended; returns the exit code.

    0 finished, 2 usage or plan, 75 stopped politely, 130 Ctrl-C, 128 + signal where a worker was killed by
    one, else the failing worker's own. To be called from the main thread. UsageError: the options cannot
    work. LaunchError: the run folder is in use, or the workers cannot be started.
    """
    _check(options)
    compared = Summary(Path(options.against)) if options.against else None
    try:
        folder = Path(options.run_dir) if options.run_dir else _new_folder(Path(options.script).stem)
        lock = hold_lock(folder)
        journal = Journal(folder)
    except OSError as error:
        raise LaunchError(f"the run folder cannot be made ({error})", "give another --run-dir") from error
    try:
        if compared:
            journal.write("compare", workers=compared.workers, samples_per_second=compared.samples_per_second)
        with Progress(Console(stderr=True), live=None if options.debug is None else False) as progress:
            agent = Agent(options, folder, journal, progress)
            with _signals() as wakeup:
                return agent.run(wakeup)
    finally:
        journal.close()
        os.close(lock)


def _check(options: LaunchOptions) -> None:
    """Refuses what can be refused before any worker starts."""
    if sys.platform != "linux":
        raise LaunchError("paceline run needs Linux", "run `python train.py` here: a world of one")
    if not Path(options.script).is_file():
        how = "is not a file" if Path(options.script).exists() else "does not exist"
        raise UsageError(f"the script {options.script} {how}", "give the path of the Python file that trains")
    if options.workers < 1:
        raise UsageError(f"{options.workers} workers cannot train", "give --workers 1 or more")
    if options.debug is not None and not 0 <= options.debug < options.workers:
        raise UsageError(f"there is no worker {options.debug} to debug", f"give 0 to {options.workers - 1}")
    if options.plan is not None:
        Plan.parse(options.plan).validate(options.workers)
    if options.shares is not None:
        parse_shares(options.shares, options.workers)
    if options.save_every is not None:
        parse_save_every(options.save_every)


def _new_folder(stem: str) -> Path:
    Path("runs").mkdir(exist_ok=True)
    first = Path("runs", f"{stem}-{time.strftime('%Y%m%d-%H%M%S')}")
    for number in count(1):
        folder = first if number == 1 else first.with_name(f"{first.name}-{number}")
        with suppress(FileExistsError):
            folder.mkdir(mode=0o700)
            break
    return folder


@contextmanager
def _signals() -> Iterator[socket.socket]:
    """SIGINT, SIGTERM and SIGHUP (unless ignored, as under nohup) are only written, as numbers, to this socket."""
    wanted = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]
    wanted = [number for number in wanted if signal.getsignal(number) is not signal.SIG_IGN]
    read, write = socket.socketpair()
    with read, write:
        read.setblocking(False)
        write.setblocking(False)
        former = signal.set_wakeup_fd(write.fileno(), warn_on_full_buffer=False)
        handlers = {number: signal.signal(number, lambda *_: None) for number in wanted}
        try:
            yield read
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)
            signal.set_wakeup_fd(former)


class Agent:
    """Starts the workers, reads their pipes in one loop, and says how it ended."""

    def __init__(self, options: LaunchOptions, folder: Path, journal: Journal, progress: Progress) -> None:
        self._options, self._folder, self._journal, self._progress = options, folder, journal, progress
        self._selector = selectors.DefaultSelector()
        self._workers: list[Worker] = []
        self._stop: int | None = None  # the signal that asked for a polite stop
        self._at_once = False
        self._deadline = math.inf  # of the wait after a failure
        self._logs = folder / "logs"
        self._logs.mkdir(mode=0o700, exist_ok=True)
        self._coloured = sys.stderr.isatty()
        # Where both are the terminal, output must not tear the progress line; else bytes stay bytes.
        raw = None if options.quiet or (self._coloured and sys.stdout.isatty()) else 1
        self._output = Output(self._logs, options.workers, self._say, raw)

    def run(self, wakeup: socket.socket) -> int:
        """From the workers' start to the exit code; no process is left. `wakeup` brings the numbers of signals."""
        self._selector.register(wakeup, selectors.EVENT_READ, partial(self._signalled, wakeup))
        try:
            self._start()
            while any(worker.status is None for worker in self._workers) and not self._at_once:
                now = time.monotonic()
                if now >= self._deadline:
                    break
                due = min(self._deadline, self._output.deadline()) - now
                for key, _ in self._selector.select(None if due == math.inf else max(due, 0.0)):
                    key.data()
                self._output.tick(time.monotonic())
        finally:
            self._end()
        return self._verdict()

    # ---- starting

    def _start(self) -> None:
        workers = self._options.workers
        given = worker_environment() | dict(self._options.environment)
        self._variables, self._pins, done = surround(workers, given, sorted(os.sched_getaffinity(0)))
        what = f" ({', '.join(text for text, _ in done)})" if done else ""
        self._say(f"{plural(workers, 'worker')}{what}, run folder {short(self._folder)}")
        for text, why in done:
            self._journal.write("decision", what=f"workers: {text}", why=why)
        # Worker 0 serves the store on a socket that is bound already: no other process can take the port.
        with socket.socket() as store:
            store.bind(("127.0.0.1", 0))
            store.listen(128)
            try:
                for rank in range(workers):
                    self._start_worker(rank, store)
            except OSError as error:
                cure = "see `ulimit -a`, or take fewer workers"
                raise LaunchError(f"worker {rank} cannot be started ({error.strerror})", cure) from error

    def _environment(self, rank: int, store: socket.socket, events: int) -> dict[str, str]:
        options, size = self._options, str(self._options.workers)
        given = {
            "PACELINE_PLAN": options.plan,
            "PACELINE_SHARES": options.shares,
            "PACELINE_SAVE_EVERY": options.save_every,
            "PACELINE_MAX_STEPS": options.max_steps,
        }
        environment = worker_environment(
            PACELINE_RANK=str(rank),
            PACELINE_WORLD_SIZE=size,
            PACELINE_LOCAL_RANK=str(rank),
            PACELINE_LOCAL_SIZE=size,
            PACELINE_STORE=f"127.0.0.1:{store.getsockname()[1]}",
            PACELINE_STORE_FD=str(store.fileno()) if rank == 0 else None,
            PACELINE_RUN_DIR=str(self._folder.absolute()),
            PACELINE_EVENTS_FD=str(events),
            PYTHONUNBUFFERED="1",
        )
        environment |= {name: str(value) for name, value in given.items() if value is not None}
        environment |= options.environment
        environment.setdefault("PYTHONFAULTHANDLER", "1")  # a crash in compiled code leaves its Python stack
        return environment | self._variables

    def _start_worker(self, rank: int, store: socket.socket) -> None:
        pipes = {name: os.pipe() for name in ("events", "stdout", "stderr")}
        events = pipes["events"][1]
        own = self._options.debug == rank  # the terminal's streams
        try:
            process = subprocess.Popen(
                [sys.executable, self._options.script, *self._options.arguments],
                env=self._environment(rank, store, events),
                stdin=None if own else subprocess.DEVNULL,
                stdout=None if own else pipes["stdout"][1],
                stderr=None if own else pipes["stderr"][1],
                pass_fds=(events, store.fileno()) if rank == 0 else (events,),
                start_new_session=True,  # the terminal's Ctrl-C reaches only the agent
                preexec_fn=die_with_us(),
            )
        finally:
            for _, write in pipes.values():
                os.close(write)
        pin(process.pid, self._pins[rank])
        worker = Worker(rank, process, os.pidfd_open(process.pid), MemoryKills(process.pid))
        self._workers.append(worker)
        self._selector.register(worker.pidfd, selectors.EVENT_READ, partial(self._exited, worker))
        for name, (read, _) in pipes.items():
            take = partial(self._output.take, rank, name)
            worker.pipes[read] = partial(self._told, worker) if name == "events" else take
            os.set_blocking(read, False)
            self._selector.register(read, selectors.EVENT_READ, partial(self._read, worker, read))

    # ---- hearing

    def _read(self, worker: Worker, fd: int) -> bool:
        """Takes one piece from a pipe; False where nothing is there now."""
        if fd not in worker.pipes:  # its worker ended, and was drained, in the same turn of the loop
            return False
        try:
            data = os.read(fd, CHUNK)
        except BlockingIOError:
            return False
        if data:
            worker.pipes[fd](data)
            return True
        self._selector.unregister(fd)
        del worker.pipes[fd]
        os.close(fd)
        return False

    def _drain(self, worker: Worker) -> None:
        """Reads what an ended worker left in its pipes, but not for ever: its children may go on writing."""
        for fd in list(worker.pipes):
            for _ in range(100):
                if not self._read(worker, fd):
                    break

    def _told(self, worker: Worker, data: bytes) -> None:
        *lines, worker.unread = (worker.unread + data).split(b"\n")
        for line in lines:
            try:
                event = json.loads(line)
                kind = event["event"]
            except (ValueError, TypeError, KeyError):  # the script's own writing to a wrong descriptor
                continue
            worker.events[kind] = event
            if kind == "failed":
                worker.ended = time.monotonic()
                self._judge(worker)
            elif worker.rank == 0 and kind == "line":
                self._say(str(event.get("text", "")))
            elif worker.rank == 0 and kind in ("phase", "step") and not self._options.quiet:
                (self._progress.phase if kind == "phase" else self._progress.step)(event)

    def _exited(self, worker: Worker) -> None:
        # Not reaped yet: as long as it is a zombie, nobody else can get its number, which names its session.
        info = os.waitid(os.P_PIDFD, worker.pidfd, os.WEXITED | os.WNOWAIT | os.WNOHANG)
        if info is None:
            return
        self._selector.unregister(worker.pidfd)
        worker.status = info.si_status if info.si_code == os.CLD_EXITED else -info.si_status
        self._drain(worker)
        worker.ended = min(worker.ended, time.monotonic())
        if worker.status not in (0, STOPPED):
            self._judge(worker)

    def _judge(self, worker: Worker) -> None:
        """A worker failed, or says that it does: sets how long we wait for what else there is to know."""
        self._output.failing(worker.rank)
        lost = worker.events.get("failed", {}).get("kind") == "PeerLostError"
        wait = EXIT if worker.status is None else CAUSE if lost else OTHERS
        self._deadline = min(self._deadline, time.monotonic() + wait)

    def _signalled(self, wakeup: socket.socket) -> None:
        for number in wakeup.recv(CHUNK):
            if self._stop is not None:
                self._at_once |= number == signal.SIGINT
                continue
            self._stop = number
            self._say("stopping after this step and saving; press Ctrl-C again to stop at once", always=True)
            for worker in self._workers:
                if worker.status is None:  # one that has not come to its trainer yet just ends
                    with suppress(ProcessLookupError):
                        signal.pidfd_send_signal(worker.pidfd, signal.SIGUSR1)

    def _say(self, text: str, always: bool = False) -> None:
        if always or not self._options.quiet:
            self._progress.line(text)

    # ---- ending

    def _end(self) -> None:
        """Ends all processes, takes the last of what they wrote, reaps them, closes everything."""
        for worker in self._workers:
            if worker.status is None:
                worker.killed = True
                with suppress(ProcessLookupError):
                    signal.pidfd_send_signal(worker.pidfd, signal.SIGKILL)
        left = end_sessions({worker.process.pid for worker in self._workers})
        for worker in self._workers:
            self._drain(worker)
            worker.process.wait()
            for fd in [*worker.pipes, worker.pidfd]:
                os.close(fd)
        self._selector.close()
        if self._failures():
            self._output.failing(0)  # what it still holds back came of the failure
        self._output.close()
        if left and not any(worker.killed for worker in self._workers):
            names = ", ".join(f"{name} ({pid})" for pid, name in left.items())
            self._say(f"ended what the workers left running: {names}")

    def _failures(self) -> list[Worker]:
        """Those that failed. None where a stop came before some worker could hear it: it just ended."""
        if any(self._stop is not None and worker.status == -signal.SIGUSR1 for worker in self._workers):
            return []
        fine = (0, STOPPED, None)
        return [w for w in self._workers if (w.killed and "failed" in w.events) or w.status not in fine]

    def _verdict(self) -> int:
        """Says how the run ended; the exit code."""
        self._progress.close()
        failures = self._failures()
        if self._at_once:
            self._say(self._how_stopped("stopped at once"), always=True)
            return INTERRUPTED
        if failures:
            return self._failed(failures)
        if any(worker.status != 0 for worker in self._workers):
            self._say(self._how_stopped("stopped"), always=True)
            return INTERRUPTED if self._stop == signal.SIGINT else STOPPED
        return self._finished()

    def _finished(self) -> int:
        name, size = Path(self._options.script).name, len(self._workers)
        events = ChainMap(*(worker.events for worker in self._workers))
        if "join" not in events and size > 1:
            what = f"{name} ended without using paceline: no Trainer was made and paceline.join() was not called"
            cure = "make a paceline.Trainer, or run it with plain python"
            self._say(f"{what}, so {size} workers did the same work {size} times; {cure}", always=True)
            return 1
        if "join" not in events:
            self._say(f"note: {name} ended without using paceline, which trained and saved nothing")
        elif events["join"].get("trainer") and "phase" not in events:
            self._say(f"note: {name} made a Trainer and never asked it for steps")
        if "phase" in events and not events.get("finished", {}).get("already") and not self._options.quiet:
            self._say(write_report(self._folder, colour=self._coloured))
        if "stopped" in events:
            self._say(self._how_stopped("stopped"), always=True)
        return 0

    def _how_stopped(self, how: str) -> str:
        told = ChainMap(*(worker.events for worker in self._workers)).get("stopped", {})
        newest = self._newest_checkpoint()
        again = "continue with"
        if told.get("checkpoint"):
            saved = f" after step {told['step']}; saved {short(self._folder / told['checkpoint'])}"
        elif newest is not None:
            saved = f"; the last checkpoint is of step {newest}"
        else:
            saved, again = "; no checkpoint was written", "start again with"
        return f"{how}{saved}\n{again}: {self._command()}"

    def _failed(self, workers: list[Worker]) -> int:
        failures = []
        for worker in workers:
            status = 1 if worker.status is None else worker.status  # it said so, and did not end
            told, grown = worker.events.get("failed", {}), worker.memory.grown()
            failures.append(Failure(worker.rank, worker.process.pid, worker.ended, status, told, self._output, grown))
        newest = self._newest_checkpoint()
        goes_on = "starts anew: no checkpoint was written" if newest is None else f"continues from step {newest}"
        then = f"then run `{self._command()}`: it {goes_on}"
        stopped = [worker.rank for worker in self._workers if worker.killed and worker not in workers]
        cause, host = culprit(failures), socket.gethostname()
        if cause.step is None:  # it did not say
            cause.step = self._workers[0].events.get("step", {}).get("step")
        text = failure_block(cause, failures, stopped, host, Path(short(self._logs)), then)
        title, _, rest = text.partition("\n")
        self._say(f"\n\x1b[1;31m{title}\x1b[0m\n{rest}" if self._coloured else f"\n{text}", always=True)
        self._journal.write("failed", worker=cause.rank, host=host, cause=cause.what, code=cause.code, text=text)
        return cause.code

    def _newest_checkpoint(self) -> int | None:
        found = (self._folder / "checkpoints").glob("step-" + 12 * "[0-9]")
        return max((int(path.name.removeprefix("step-")) for path in found), default=None)

    def _command(self) -> str:
        """The command that goes on with this run."""
        options, done = self._options, self._newest_checkpoint() or 0
        given = {
            "--workers": options.workers,
            "--run-dir": short(self._folder),
            "--plan": options.plan,
            "--shares": options.shares,
            "--save-every": options.save_every,
            "--steps": options.max_steps if done < (options.max_steps or 0) else None,
        }
        flags = [part for name, value in given.items() if value is not None for part in (name, str(value))]
        return shlex.join(["paceline", "run", *flags, options.script, *options.arguments])
