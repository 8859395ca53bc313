"""The worker processes of a host: starts them, reads their output and events, sends them commands, ends them."""

from __future__ import annotations

import json
import math
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from paceline.base.environment import SERVERS, starts_cold, worker_environment
from paceline.base.exit_codes import STOPPED
from paceline.base.heartbeat import HeartbeatView
from paceline.base.journal import Journal
from paceline.base.schema import find_wrong, read_json
from paceline.base.stacks import Hung
from paceline.base.text import called
from paceline.base.tracebacks import before_the_trace, read_trace
from paceline.errors import FormatError, LaunchError
from paceline.launch.failure import SIGNALS, USAGE, WEIGHTS
from paceline.launch.fork_server import ColdError, ForkServer, WorkerProgram
from paceline.launch.options import GIVEN, LaunchOptions
from paceline.launch.output import Output
from paceline.launch.processes import Child, MemoryKills, die_with_us, ended, reap_strangers
from paceline.launch.raw import hold_port, worker_variables
from paceline.launch.spares import is_one_host
from paceline.launch.tuning import pin, pin_threads, thread_warnings, worker_settings

CHUNK = 1 << 16  # bytes that are read or written at a time
DRAIN = 100  # pieces that are read at most from an ended worker, because its children may continue to write

STILL = 0.3  # seconds that a worker may be stopped before the others continue without it
LOOKED, SHOWN = 100, 5  # last lines of a lost worker's log: lines to search, lines to show
FINAL = (*USAGE, *WEIGHTS, "WorkersDifferError")  # exceptions that a new process would raise again


@dataclass
class Worker:
    """One worker process. `status`: as in subprocess, None while it runs. `store`: the address of its store, in case it
    becomes the first worker of a generation. `newcomer`: it started outside of the team. `out`: it has left the team or
    was lost. `life`: the number of processes that were started for this worker before. `loaders`: the ids of its loader
    processes.
    """

    rank: int
    life: int
    process: Child
    memory: MemoryKills
    commands: socket.socket
    store: tuple[str, int]
    output: Output
    pulse: HeartbeatView
    pipes: dict[int, Callable[[bytes], None]] = field(default_factory=dict)  # by descriptor: takes the data
    status: int | None = None
    ended: float = math.inf  # monotonic seconds of its end, or of its report that it fails
    stopped: float = math.inf  # monotonic seconds of when it was stopped
    is_suspended: bool = False  # stopped for longer than `STILL`, so that the others continue without it
    newcomer: bool = False
    out: bool = False
    killed: bool = False
    hung: Hung | None = None  # set if it made no progress and was killed
    stands: str = ""  # for other consoles than ours: the line at which it makes no progress
    events: dict[str, dict[str, Any]] = field(default_factory=dict)  # the last one of each kind
    loaders: set[int] = field(default_factory=set)
    cores: list[int] = field(default_factory=list)  # to which it is pinned
    unread: bytes = b""

    @property
    def alive(self) -> bool:
        """Whether its process runs."""
        return self.status is None

    @property
    def serves(self) -> bool:
        """Whether it is a parameter server."""
        return self.rank >= SERVERS

    @property
    def is_member(self) -> bool:
        """Whether the run depends on it."""
        return not self.out and (not self.newcomer or "formed" in self.events)

    @property
    def exited_silently(self) -> bool:
        """Whether it exited with 0 without reporting its end, although its script had created a Trainer."""
        return self.status == 0 and "trainer" in self.events.get("join", {}) and "ended" not in self.events

    @property
    def exit_text(self) -> str:
        """How it ended, in words."""
        if self.status is None:
            return ""
        if self.hung is not None:
            return self.hung.why
        if self.status >= 0:
            return f"ended with exit code {self.status}"
        if self.status == -signal.SIGKILL and self.memory.grown():
            return "was killed by the out-of-memory killer"
        how = SIGNALS[-self.status][0].partition(":")[0] if -self.status in SIGNALS else "killed"
        return f"was {how}" if how.startswith(("killed", "ended")) else how

    def report(self) -> dict[str, Any]:
        """The report of this worker to the coordinator, see `team.worker_slots.WorkerReport`."""
        failed_event, checked, events = self.events.get("failed"), self.events.get("checked"), self.events
        return {
            "life": self.life,
            "store": self.store,
            "newcomer": self.newcomer,
            "replica": max(events.get(word, {}).get("replica", 1) for word in ("ready", "waiting")),
            "ready": "ready" in events,
            "waiting": "waiting" in events,
            "at": events.get("serving" if self.serves else "waiting", {}).get("at"),
            "servers": events.get("servers", {}).get("count", 0),
            "copies": events.get("servers", {}).get("copies", 0),
            "holds": "holds" in events,
            "current": "current" in events,
            "formed": events.get("formed", {}).get("number", -1),
            "alone": events.get("alone", {}).get("number", -1),
            "wrong": events.get("corrupted", {}).get("attempts", 0.0),
            "checked": tuple(checked[word] for word in ("step", "damage", "seconds")) if checked else None,
            "leaves": "leaves" in events,
            "round": events.get("round", {}).get("told"),
            "ended": "ended" in events,
            "failed": (failed_event.get("kind", ""), failed_event.get("step") or 0, failed_event.get("text", ""))
            if failed_event
            else None,
            "final": failed_event is not None and failed_event.get("kind") in FINAL,
            "stopped": self.is_suspended,
            "since": STILL if self.is_suspended else 0.0,
            "hung": self.hung.where if self.hung is not None else "",
            "stands": self.stands,
            "status": self.status,
            "why": self.exit_text,
            **(
                self._loss(failed_event)
                if failed_event or self.is_suspended or self.status not in (None, STOPPED)
                else {}
            ),
        }

    def _loss(self, event: dict[str, Any] | None) -> dict[str, list[str]]:
        """The cause and the end of the log, which other consoles print if the team continues without this worker."""
        if self.hung is not None:
            event = {"what": self.hung.doing}
        elif event is None and self.status not in (None, 0):
            what, at = read_trace(self.output.errors(self.rank), crash=self.status < 0)
            event = {"what": what, "at": at}
        event = event or {}
        lines = [
            (event.get("what"), ""),
            (event.get("at"), "at "),
            (event.get("within"), "in "),
            (event.get("hint"), ""),
        ]
        tail = before_the_trace(self.output.tail(self.rank, LOOKED))[-SHOWN:]
        return {"cause": [before + text for text, before in lines if text], "tail": tail}

    def tell(self, command: dict[str, Any]) -> None:
        """Sends a command. It does not wait: a stopped worker does not read commands."""
        with suppress(OSError):
            self.commands.send(json.dumps(command).encode() + b"\n", socket.MSG_DONTWAIT)

    def tidy(self) -> None:
        """Removes files in /dev/shm of loaders that were killed between torch's opening and unlinking them."""
        for pid in self.loaders:
            if ended(pid):
                for path in Path("/dev/shm").glob(f"torch_{pid}_*"):
                    with suppress(OSError):
                        path.unlink()


class Workers:
    """Starts the workers with these `numbers` and reads their pipes. `on_event` is called with each event of a worker,
    `say` prints a line.

    Workers are forked from a warm process, which `prepare` starts. If that is not possible, a line says why, and the
    workers start cold, each with an interpreter of its own.
    """

    def __init__(
        self,
        options: LaunchOptions,
        folder: Path,
        numbers: Sequence[int],
        output: Output,
        journal: Journal,
        on_event: Callable[[Worker, dict[str, Any]], None],
        say: Callable[[str], None],
    ) -> None:
        self._options, self._folder, self.numbers, self._output = options, folder, list(numbers), output
        self._journal, self._on_event, self._say = journal, on_event, say
        self.selector = selectors.DefaultSelector()
        self.all: list[Worker] = []  # including earlier processes
        self._warm: ForkServer | None = None
        self._begin: Callable[[], None] | None = None  # called once the warm process is ready
        self._began = time.time()
        self._port = hold_port(options.address) if options.raw else None  # of worker 0's store, with --raw
        self._cold: set[str] = set()  # the reasons for cold starts that were printed
        given = worker_environment() | dict(options.environment)
        cores = sorted(os.sched_getaffinity(0))
        count = options.workers or options.spares
        # The (choice, reason) pairs in `tuning` are printed and journaled.
        self._variables, self._pins, self.tuning = worker_settings(count, given, cores)
        self.thread_warnings = thread_warnings(count, given, cores)

    @property
    def newest(self) -> dict[int, Worker]:
        """The newest process of each worker, by the worker's number."""
        return {worker.rank: worker for worker in self.all}

    @property
    def preparing(self) -> bool:
        """Whether workers cannot be started yet."""
        return self._begin is not None

    def prepare(self, begin: Callable[[], None]) -> None:
        """Calls `begin` once workers can be started."""
        self._begin = begin
        if not (self._options.cold_start or starts_cold() or self._options.debug is not None):
            self._warm = ForkServer(
                self._options.program,
                self._environment(),
                self.selector,
                self._prepared,
                self._say,
                self._options.warm_holder,
            )
        if self._warm is None or self._warm.ready or self._warm.trouble:
            self._prepared()

    def _prepared(self) -> None:
        begin, self._begin = self._begin, None
        if begin is not None:
            begin()

    def start_team(self, lives: Mapping[int, int], store: tuple[str, int] | None = None) -> None:
        """Starts workers of the first team, each in the given life. `store` is the address of the team's store, which a
        worker of another host serves. None: the first of these workers serves it, on a socket that is bound before the
        worker starts, so that no other process can take the port.
        """
        sockets = [self._listener() for _ in lives]
        for (rank, life), listener in zip(sorted(lives.items()), sockets, strict=True):
            self._clean_up_after(rank, life)
            self._start(rank, life, listener, store or sockets[0].getsockname(), newcomer=False)
        for listener in sockets:
            listener.close()

    def start_newcomer(self, rank: int, life: int) -> None:
        """Starts a worker that waits until it is admitted."""
        self._clean_up_after(rank, life)
        listener = self._listener()
        self._start(rank, life, listener, listener.getsockname(), newcomer=True)
        listener.close()

    def _clean_up_after(self, rank: int, life: int) -> None:
        """Cleans up after the earlier processes of a worker before the next one starts."""
        for worker in self.all:
            if worker.rank == rank:
                worker.tidy()
        if life:
            self._began = time.time()
            self._output.forget_last_lines(rank)

    def _listener(self) -> socket.socket:
        listener = socket.socket()
        listener.bind((self._options.address, 0))
        listener.listen(128)
        return listener

    def _start(self, rank: int, life: int, listener: socket.socket, store: tuple[str, int], newcomer: bool) -> None:
        local_rank = self.numbers.index(rank) if rank in self.numbers else None  # None for a parameter server
        cores = [] if local_rank is None else self._pins[local_rank] if local_rank < len(self._pins) else []
        few = (self._options.size or len(self.numbers)) < max(self._options.min_workers, self._options.begin)
        self._output.open(rank)
        pipes = {name: os.pipe() for name in ("stdout", "stderr", "events")}
        commands, worker_end = socket.socketpair()
        pulse = HeartbeatView()
        descriptors = {"EVENTS": pipes["events"][1], "COMMANDS": worker_end.fileno(), "STORE": listener.fileno()}
        descriptors["PULSE"] = pulse.fd
        if not self._options.max_restarts or self._options.raw:
            del descriptors["COMMANDS"]
        wanted = WorkerProgram(
            f"paceline {called(rank).removeprefix('worker-')}",
            self._options.program,
            self._environment(
                PACELINE_RANK=str(rank),
                PACELINE_LOCAL_RANK=str(local_rank or 0),
                PACELINE_NEWCOMER="1" if newcomer else None,
                PACELINE_HOLD="1" if few and not newcomer else None,
                PACELINE_STORE=f"{store[0]}:{store[1]}",
                PACELINE_BEGAN=str(self._began),
                **({"CUDA_VISIBLE_DEVICES": ""} if local_rank is None else {}),  # only workers use GPUs
                **self._raw_variables(rank),
            ),
            (pipes["stdout"][1], pipes["stderr"][1]),
            {f"PACELINE_{name}_FD": descriptor for name, descriptor in descriptors.items()},
        )
        try:
            process = self._fork(wanted) or self._execute(wanted, has_terminal=self._options.debug == rank)
        except OSError as error:
            cure = "check `ulimit -a`, or use fewer workers"
            raise LaunchError(f"worker {rank} cannot be started ({error.strerror})", cure) from error
        finally:
            worker_end.close()
            for _, write in pipes.values():
                os.close(write)
        pulse.belong(process.pid)
        if local_rank is not None:
            pin(process.pid, cores)
        worker = Worker(
            rank, life, process, MemoryKills(process.pid), commands, listener.getsockname(), self._output, pulse
        )
        worker.newcomer, worker.cores = newcomer, cores
        self._register(worker, {name: read for name, (read, _) in pipes.items()})

    def pin(self, worker: Worker) -> None:
        """Gives a worker that has entered the team the cores of the one that it replaces, unless its own are free."""
        used = [one.cores for one in self.all if one.alive and one.is_member and one is not worker]
        free = [cores for cores in self._pins if cores not in used]
        if worker.cores not in free and free and not worker.serves:
            worker.cores = free[0]
            pin_threads(worker.process.pid, worker.cores)

    def _raw_variables(self, rank: int) -> Mapping[str, str]:
        """The variables that torchrun would set for a worker, with --raw."""
        if self._port is None:
            return {}
        return worker_variables(self._options, self._folder.name, rank, self._port.getsockname())

    def _fork(self, wanted: WorkerProgram) -> Child | None:
        if self._warm is None:
            return None
        try:
            return self._warm.fork(wanted)
        except ColdError as why:
            self._starts_cold(str(why))
            return None

    def _starts_cold(self, why: str) -> None:
        if why not in self._cold:
            self._cold.add(why)
            self._say(f"workers start cold: {why}")
            self._journal.write("decision", what="workers start cold", why=why)

    def _execute(self, wanted: WorkerProgram, has_terminal: bool) -> Child:
        """Starts a worker with an interpreter of its own; with `has_terminal` it has the terminal's streams."""
        process = subprocess.Popen(
            [sys.executable, *wanted.program],
            env={**wanted.environment, **{name: str(number) for name, number in wanted.numbered.items()}},
            stdin=None if has_terminal else subprocess.DEVNULL,
            stdout=None if has_terminal else wanted.streams[0],
            stderr=None if has_terminal else wanted.streams[1],
            pass_fds=tuple(wanted.numbered.values()),
            start_new_session=True,  # the terminal's Ctrl-C reaches only the agent
            preexec_fn=die_with_us(),
        )
        return Child(process.pid, process)

    def _register(self, worker: Worker, pipes: Mapping[str, int]) -> None:
        self.all.append(worker)
        self.selector.register(worker.process.pidfd, selectors.EVENT_READ, partial(self._ended, worker))
        for name, read in pipes.items():
            take = partial(self._output.take, worker.rank, name)
            worker.pipes[read] = partial(self._events, worker) if name == "events" else take
            os.set_blocking(read, False)
            self.selector.register(read, selectors.EVENT_READ, partial(self._read, worker, read))
        self._note(worker, "started")

    def _note(self, worker: Worker, what: str, cause: str = "") -> None:
        """Writes to the journal what happened to a worker's process."""
        more = {"cause": cause} if cause else {}
        fields = {"life": worker.life, "host": socket.gethostname(), "pid": worker.process.pid, "what": what, **more}
        if worker.serves:
            self._journal.write("server", server=worker.rank - SERVERS, **fields)
        else:
            self._journal.write("worker", worker=worker.rank, **fields)

    def lose(self, worker: Worker) -> None:
        """Marks a worker as lost: the others continue without it."""
        if not worker.out:
            worker.out = True
            self._note(worker, "lost", worker.exit_text)

    def _environment(self, **seat: str | None) -> dict[str, str]:
        """The environment of a worker; `seat`: the variables that only this worker has."""
        options = self._options
        given = {f"PACELINE_{name.upper()}": getattr(options, name) for name in GIVEN}
        environment = worker_environment(
            None,
            PACELINE_WORLD_SIZE=str(options.size or options.workers),
            PACELINE_LOCAL_SIZE=str(len(self.numbers)),
            PACELINE_SPARES=str(options.spares) if options.spares and is_one_host(options) else None,
            PACELINE_RUN_DIR=str(self._folder.absolute()),
            PACELINE_AGENT=str(os.getpid()),
            PYTHONUNBUFFERED="1",
            PACELINE_WARM=None,  # belongs to this agent
            **seat,
        )
        environment |= {name: str(value) for name, value in given.items() if value is not None}
        environment |= options.environment
        environment.setdefault("PYTHONFAULTHANDLER", "1")  # a crash in compiled code prints the Python stack
        return environment | self._variables

    # ---- events

    def _read(self, worker: Worker, fd: int) -> bool:
        """Reads one piece from a pipe; False if nothing is there now."""
        if fd not in worker.pipes:  # its worker ended and was drained in the same turn of the loop
            return False
        try:
            data = os.read(fd, CHUNK)
        except BlockingIOError:
            return False
        if data:
            worker.pipes[fd](data)
            return True
        self.selector.unregister(fd)
        del worker.pipes[fd]
        os.close(fd)
        return False

    def drain(self, worker: Worker) -> None:
        """Reads what an ended worker left in its pipes."""
        for fd in list(worker.pipes):
            for _ in range(DRAIN):
                if not self._read(worker, fd):
                    break

    def _events(self, worker: Worker, data: bytes) -> None:
        from paceline.team.message_types import EVENTS  # needs msgspec

        *lines, worker.unread = (worker.unread + data).split(b"\n")
        for line in lines:
            try:
                event = read_json(line, dict[str, Any], "an event")
                kind = event.get("event")
                if not isinstance(kind, str) or find_wrong(event, EVENTS.get(kind, dict[str, Any])):
                    continue
            except FormatError:  # the script has written to a wrong descriptor
                continue
            worker.events[kind] = event
            worker.loaders |= {*(event["pids"] if kind == "loaders" else ())}
            if kind == "cold":
                self._starts_cold(str(event.get("why")))
            self._on_event(worker, event)

    def _ended(self, worker: Worker) -> None:
        # Not reaped yet: as long as it is a zombie, no process can get its id, which is also that of its session.
        status = worker.process.status
        if status is None:
            return
        self.selector.unregister(worker.process.pidfd)
        worker.status = status
        self.drain(worker)
        worker.ended = min(worker.ended, time.monotonic())
        self._note(worker, "ended", worker.exit_text)

    def look_for_stops(self) -> None:
        """Notes which workers were stopped by a signal and which continue."""
        for worker in self.all:
            info = worker.process.look(os.WSTOPPED | os.WCONTINUED) if worker.alive else None
            if info is not None:
                stopped = info.si_code == os.CLD_STOPPED
                worker.stopped = time.monotonic() if stopped else math.inf
                self._note(worker, "stopped" if stopped else "continued")
        sessions = {worker.process.pid for worker in self.all}
        if self._warm is not None:
            self._warm.kill_if_stopped()
            sessions |= self._warm.sessions
        reap_strangers(sessions)

    # ---- ending

    def kill(self) -> None:
        """Closes the warm process and kills all workers that run."""
        if self._warm is not None:
            self._warm.close()
        for worker in self.all:
            if worker.alive:
                worker.killed = True
                worker.process.signal(signal.SIGKILL)

    def close(self) -> None:
        """Reads the last output of all workers, reaps them, and closes all files."""
        for worker in self.all:
            self.drain(worker)
            worker.process.reap()
            worker.tidy()
            worker.commands.close()
            worker.pulse.close()
            for fd in worker.pipes:
                os.close(fd)
        if self._port is not None:
            self._port.close()
        self.selector.close()
