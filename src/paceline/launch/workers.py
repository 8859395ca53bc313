"""The worker processes of this machine: how they are started, what comes from them, and how they are told. No torch."""

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

from paceline.errors import LaunchError
from paceline.launch.failure import SIGNALS, USAGE, WEIGHTS
from paceline.launch.options import GIVEN, LaunchOptions
from paceline.launch.output import Output
from paceline.launch.processes import MemoryKills, die_with_us, ended
from paceline.launch.surroundings import pin, surround
from paceline.world import worker_environment

CHUNK = 1 << 16
DRAIN = 100  # pieces that are read at most of what an ended worker left: its children may go on writing

RESERVE = "from paceline.launch.spare import main; main()"  # the script's own names are to be __main__'s
STILL = 0.3  # seconds that a worker may be stopped before the others go on without it
FINAL = (*USAGE, *WEIGHTS, "WorkersDifferError")  # exceptions that another worker would raise as well


@dataclass
class Worker:
    """One worker process as the agent knows it. `status` as in subprocess; None while it runs. `store` is the address
    of its store, should it become the first of a generation. A `newcomer` began outside of the team; who is `out` is
    not of it any more. `life` counts the processes that were started for it; `loaders` are those that load for it.
    """

    rank: int
    life: int
    process: subprocess.Popen[bytes]
    pidfd: int
    memory: MemoryKills
    orders: socket.socket
    store: tuple[str, int]
    pipes: dict[int, Callable[[bytes], None]] = field(default_factory=dict)  # by descriptor: who takes what arrives
    status: int | None = None
    ended: float = math.inf  # monotonic seconds of its end, or of its word that it fails
    stopped: float = math.inf  # monotonic seconds of when it was stopped
    still: bool = False  # stopped for so long that the others should go on
    newcomer: bool = False
    out: bool = False
    killed: bool = False
    events: dict[str, dict[str, Any]] = field(default_factory=dict)  # the last one of each kind
    loaders: set[int] = field(default_factory=set)
    unread: bytes = b""

    @property
    def alive(self) -> bool:
        return self.status is None

    @property
    def counts(self) -> bool:
        """Whether the run depends on it."""
        return not self.out and (not self.newcomer or "formed" in self.events)

    @property
    def how(self) -> str:
        """How it ended, in words."""
        if self.status is None:
            return ""
        if self.status >= 0:
            return f"ended with exit code {self.status}"
        if self.status == -signal.SIGKILL and self.memory.grown():
            return "was killed for want of memory"
        return f"was {SIGNALS[-self.status][0].partition(':')[0]}" if -self.status in SIGNALS else "was killed"

    def said(self) -> dict[str, Any]:
        """What the coordinator is told, see `team.coordinator.Said`."""
        told, events = self.events.get("failed"), self.events
        return {
            "life": self.life,
            "store": self.store,
            "newcomer": self.newcomer,
            "replica": max(events.get(word, {}).get("replica", 1) for word in ("ready", "waiting")),
            "ready": "ready" in events,
            "waiting": "waiting" in events,
            "at": events.get("waiting", {}).get("at"),
            "current": "current" in events,
            "formed": events.get("formed", {}).get("number", -1),
            "alone": events.get("alone", {}).get("number", -1),
            "leaves": "leaves" in events,
            "ended": "ended" in events,
            "failed": (told.get("kind", ""), told.get("step") or 0, told.get("text", "")) if told else None,
            "final": told is not None and told.get("kind") in FINAL,
            "stopped": self.still,
            "since": STILL if self.still else 0.0,
            "status": self.status,
            "why": self.how,
        }

    def tell(self, order: dict[str, Any]) -> None:
        """An order; one that does not read them, because it is stopped, does not stop us."""
        with suppress(OSError):
            self.orders.send(json.dumps(order).encode() + b"\n", socket.MSG_DONTWAIT)

    def tidy(self) -> None:
        """Removes what a loader left in /dev/shm that was killed between torch's opening and unlinking it."""
        for pid in self.loaders:
            if ended(pid):
                for path in Path("/dev/shm").glob(f"torch_{pid}_*"):
                    with suppress(OSError):
                        path.unlink()

    def signal(self, number: int) -> None:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.pidfd, number)


@dataclass
class _Started:
    """A process that has been started, and our ends of what connects us."""

    process: subprocess.Popen[bytes]
    orders: socket.socket
    store: tuple[str, int]
    pipes: dict[str, int]

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        self.orders.close()
        for fd in self.pipes.values():
            os.close(fd)


class Workers:
    """Starts the workers with these `numbers` and reads their pipes. `told` hears each event of one."""

    def __init__(
        self,
        options: LaunchOptions,
        folder: Path,
        numbers: Sequence[int],
        output: Output,
        told: Callable[[Worker, dict[str, Any]], None],
    ) -> None:
        self._options, self._folder, self.numbers, self._output = options, folder, list(numbers), output
        self._told = told
        self.selector = selectors.DefaultSelector()
        self.all: list[Worker] = []  # those of before, too
        self._spare: _Started | None = None
        given = worker_environment() | dict(options.environment)
        self._variables, self._pins, self.done = surround(options.workers, given, sorted(os.sched_getaffinity(0)))

    @property
    def now(self) -> dict[int, Worker]:
        """Each worker in its last life, by number."""
        return {worker.rank: worker for worker in self.all}

    def start(self) -> None:
        """Starts all workers. The first serves the store, on a socket that is bound before: no other process can take
        the port.
        """
        sockets = [self._listener() for _ in self.numbers]
        for rank, listener in zip(self.numbers, sockets, strict=True):
            self._start(rank, listener, sockets[0].getsockname(), None)
        for listener in sockets:
            listener.close()

    def again(self, rank: int, life: int) -> None:
        """Starts a worker that waits until it is admitted."""
        for worker in self.all:
            if worker.rank == rank:
                worker.tidy()
        if self._become(rank, life):
            return
        listener = self._listener()
        self._start(rank, listener, listener.getsockname(), life)
        listener.close()

    def _listener(self) -> socket.socket:
        listener = socket.socket()
        listener.bind((self._options.address, 0))
        listener.listen(128)
        return listener

    def _start(self, rank: int, listener: socket.socket, store: tuple[str, int], life: int | None) -> None:
        try:
            self._run(rank, listener, store, life)
        except OSError as error:
            cure = "see `ulimit -a`, or take fewer workers"
            raise LaunchError(f"worker {rank} cannot be started ({error.strerror})", cure) from error

    def _run(self, rank: int, listener: socket.socket, store: tuple[str, int], life: int | None) -> None:
        command = [sys.executable, self._options.script, *self._options.arguments]
        seat = self._seat(rank) | {"PACELINE_NEWCOMER": "1" if life is not None else None}
        started = self._spawn(command, listener, store, seat, own=self._options.debug == rank)
        self._take_in(rank, life, started)

    def prepare(self) -> None:
        """Keeps a process in reserve that has imported torch already, for the place of the next one that is lost."""
        if self._spare is not None or not self._options.max_restarts:
            return
        listener = self._listener()
        command = [sys.executable, "-c", RESERVE, self._options.script, *self._options.arguments]
        seat = dict.fromkeys(self._seat(self.numbers[0])) | {"PACELINE_NEWCOMER": "1"}
        with suppress(OSError):  # then there is none
            self._spare = self._spawn(command, listener, listener.getsockname(), seat)
        listener.close()

    def _become(self, rank: int, life: int) -> bool:
        """Lets the spare become this worker, if there is one that lives."""
        spare, self._spare = self._spare, None
        if spare is None or self._options.debug == rank:
            return False
        said = json.dumps(self._seat(rank)).encode() + b"\n"
        try:
            spare.orders.send(said, socket.MSG_DONTWAIT)
        except OSError:  # it has ended
            spare.end()
            return False
        self._take_in(rank, life, spare)
        return True

    def _spawn(
        self,
        command: Sequence[str],
        listener: socket.socket,
        store: tuple[str, int],
        seat: Mapping[str, str | None],
        own: bool = False,
    ) -> _Started:
        """Starts a process; one on its `own` has the terminal's streams."""
        pipes = {name: os.pipe() for name in ("events", "stdout", "stderr")}
        ours, theirs = socket.socketpair()
        handed = (pipes["events"][1], theirs.fileno(), listener.fileno())
        try:
            process = subprocess.Popen(
                command,
                env=self._environment(store, handed, seat),
                stdin=None if own else subprocess.DEVNULL,
                stdout=None if own else pipes["stdout"][1],
                stderr=None if own else pipes["stderr"][1],
                pass_fds=handed,
                start_new_session=True,  # the terminal's Ctrl-C reaches only the agent
                preexec_fn=die_with_us(),
            )
        finally:
            theirs.close()
            for _, write in pipes.values():
                os.close(write)
        return _Started(process, ours, listener.getsockname(), {name: read for name, (read, _) in pipes.items()})

    def _take_in(self, rank: int, life: int | None, started: _Started) -> None:
        process = started.process
        pin(process.pid, self._pins[self.numbers.index(rank)])
        memory = MemoryKills(process.pid)
        worker = Worker(rank, life or 0, process, os.pidfd_open(process.pid), memory, started.orders, started.store)
        worker.newcomer = life is not None
        self.all.append(worker)
        self.selector.register(worker.pidfd, selectors.EVENT_READ, partial(self._ended, worker))
        for name, read in started.pipes.items():
            take = partial(self._output.take, rank, name)
            worker.pipes[read] = partial(self._events, worker) if name == "events" else take
            os.set_blocking(read, False)
            self.selector.register(read, selectors.EVENT_READ, partial(self._read, worker, read))

    def _seat(self, rank: int) -> dict[str, str | None]:
        """The variables that are this worker's own."""
        return {"PACELINE_RANK": str(rank), "PACELINE_LOCAL_RANK": str(self.numbers.index(rank))}

    def _environment(
        self, store: tuple[str, int], handed: Sequence[int], seat: Mapping[str, str | None]
    ) -> dict[str, str]:
        options = self._options
        events, orders, listener = map(str, handed)
        given = {f"PACELINE_{name.upper()}": getattr(options, name) for name in GIVEN}
        environment = worker_environment(
            None,
            PACELINE_WORLD_SIZE=str(options.size or options.workers),
            PACELINE_LOCAL_SIZE=str(len(self.numbers)),
            PACELINE_STORE=f"{store[0]}:{store[1]}",
            PACELINE_STORE_FD=listener,
            PACELINE_RUN_DIR=str(self._folder.absolute()),
            PACELINE_EVENTS_FD=events,
            PACELINE_ORDERS_FD=orders if options.max_restarts else None,
            PYTHONUNBUFFERED="1",
            **seat,
        )
        environment |= {name: str(value) for name, value in given.items() if value is not None}
        environment |= options.environment
        environment.setdefault("PYTHONFAULTHANDLER", "1")  # a crash in compiled code leaves its Python stack
        return environment | self._variables

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
        *lines, worker.unread = (worker.unread + data).split(b"\n")
        for line in lines:
            try:
                event = json.loads(line)
                kind = event["event"]
            except (ValueError, TypeError, KeyError):  # the script's own writing to a wrong descriptor
                continue
            worker.events[kind] = event
            worker.loaders |= set(event["pids"]) if kind == "loaders" else set()
            self._told(worker, event)

    def _ended(self, worker: Worker) -> None:
        # Not reaped yet: as long as it is a zombie, nobody else can get its number, which names its session.
        info = os.waitid(os.P_PIDFD, worker.pidfd, os.WEXITED | os.WNOWAIT | os.WNOHANG)
        if info is None:
            return
        self.selector.unregister(worker.pidfd)
        worker.status = info.si_status if info.si_code == os.CLD_EXITED else -info.si_status
        self.drain(worker)
        worker.ended = min(worker.ended, time.monotonic())

    def look_for_stops(self) -> None:
        """Takes note of who was stopped, and who goes on."""
        for worker in self.all:
            if worker.alive:
                with suppress(ChildProcessError):
                    info = os.waitid(os.P_PIDFD, worker.pidfd, os.WSTOPPED | os.WCONTINUED | os.WNOHANG)
                    if info is not None:
                        worker.stopped = time.monotonic() if info.si_code == os.CLD_STOPPED else math.inf

    # ---- ending

    def kill(self) -> None:
        if self._spare is not None:
            self._spare.end()
            self._spare = None
        for worker in self.all:
            if worker.alive:
                worker.killed = True
                worker.signal(signal.SIGKILL)

    def close(self) -> None:
        """Takes the last of what they wrote, reaps them, closes everything."""
        for worker in self.all:
            self.drain(worker)
            worker.process.wait()
            worker.tidy()
            worker.orders.close()
            for fd in [*worker.pipes, worker.pidfd]:
                os.close(fd)
        self.selector.close()
