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
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from paceline.errors import LaunchError
from paceline.launch.options import LaunchOptions
from paceline.launch.output import Output
from paceline.launch.processes import MemoryKills, die_with_us
from paceline.launch.surroundings import pin, surround
from paceline.world import worker_environment

CHUNK = 1 << 16
DRAIN = 100  # pieces that are read at most of what an ended worker left: its children may go on writing


@dataclass
class Worker:
    """One worker process as the agent knows it. `status` as in subprocess; None while it runs. `store` is the address
    of its store, should it become the first of a generation. A `newcomer` is not of the team yet, who is `out` not any
    more, and `replaced` if another one was started in its place.
    """

    rank: int
    process: subprocess.Popen[bytes]
    pidfd: int
    memory: MemoryKills
    orders: socket.socket
    store: tuple[str, int]
    pipes: dict[int, Callable[[bytes], None]] = field(default_factory=dict)  # by descriptor: who takes what arrives
    status: int | None = None
    ended: float = math.inf  # monotonic seconds of its end, or of its word that it fails
    stopped: float = math.inf  # monotonic seconds of when it was stopped
    newcomer: bool = False
    out: bool = False
    replaced: bool = False
    killed: bool = False
    events: dict[str, dict[str, Any]] = field(default_factory=dict)  # the last one of each kind
    unread: bytes = b""

    @property
    def alive(self) -> bool:
        return self.status is None

    @property
    def counts(self) -> bool:
        """Whether the run depends on it."""
        return not self.out and not self.newcomer

    def tell(self, order: dict[str, Any]) -> None:
        """An order; one that does not read them, because it is stopped, does not stop us."""
        with suppress(OSError):
            self.orders.send(json.dumps(order).encode() + b"\n", socket.MSG_DONTWAIT)

    def signal(self, number: int) -> None:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.pidfd, number)


class Workers:
    """Starts workers and reads their pipes. `told` hears each event of one, `exited` that one has ended."""

    def __init__(
        self,
        options: LaunchOptions,
        folder: Path,
        output: Output,
        told: Callable[[Worker, dict[str, Any]], None],
        exited: Callable[[Worker], None],
    ) -> None:
        self._options, self._folder, self._output = options, folder, output
        self._told, self._exited = told, exited
        self.selector = selectors.DefaultSelector()
        self.all: list[Worker] = []  # those of before, too
        given = worker_environment() | dict(options.environment)
        self._variables, self._pins, self.done = surround(options.workers, given, sorted(os.sched_getaffinity(0)))

    def start(self, newcomer: bool = False) -> None:
        """Starts all workers. The first serves the store, on a socket that is bound before: no other process can take
        the port.
        """
        sockets = [self._listener() for _ in range(self._options.workers)]
        for rank, listener in enumerate(sockets):
            self._start(rank, listener, sockets[0].getsockname(), newcomer=False)
        for listener in sockets:
            listener.close()

    def again(self, rank: int) -> None:
        """Starts a worker in the place of one that was lost; it waits until it is admitted."""
        listener = self._listener()
        self._start(rank, listener, listener.getsockname(), newcomer=True)
        listener.close()

    @staticmethod
    def _listener() -> socket.socket:
        listener = socket.socket()
        listener.bind(("127.0.0.1", 0))
        listener.listen(128)
        return listener

    def _start(self, rank: int, listener: socket.socket, store: tuple[str, int], newcomer: bool) -> None:
        try:
            self._run(rank, listener, store, newcomer)
        except OSError as error:
            cure = "see `ulimit -a`, or take fewer workers"
            raise LaunchError(f"worker {rank} cannot be started ({error.strerror})", cure) from error

    def _run(self, rank: int, listener: socket.socket, store: tuple[str, int], newcomer: bool) -> None:
        pipes = {name: os.pipe() for name in ("events", "stdout", "stderr")}
        ours, theirs = socket.socketpair()
        handed = (pipes["events"][1], theirs.fileno(), listener.fileno())
        own = self._options.debug == rank  # the terminal's streams
        try:
            process = subprocess.Popen(
                [sys.executable, self._options.script, *self._options.arguments],
                env=self._environment(rank, store, handed, newcomer),
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
        pin(process.pid, self._pins[rank])
        memory = MemoryKills(process.pid)
        worker = Worker(
            rank, process, os.pidfd_open(process.pid), memory, ours, listener.getsockname(), newcomer=newcomer
        )
        self.all.append(worker)
        self.selector.register(worker.pidfd, selectors.EVENT_READ, partial(self._ended, worker))
        for name, (read, _) in pipes.items():
            take = partial(self._output.take, rank, name)
            worker.pipes[read] = partial(self._events, worker) if name == "events" else take
            os.set_blocking(read, False)
            self.selector.register(read, selectors.EVENT_READ, partial(self._read, worker, read))

    def _environment(self, rank: int, store: tuple[str, int], handed: Sequence[int], newcomer: bool) -> dict[str, str]:
        options, size = self._options, str(self._options.workers)
        events, orders, listener = map(str, handed)
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
            PACELINE_STORE=f"127.0.0.1:{store[1]}",
            PACELINE_STORE_FD=listener,
            PACELINE_RUN_DIR=str(self._folder.absolute()),
            PACELINE_EVENTS_FD=events,
            PACELINE_ORDERS_FD=orders if options.max_restarts else None,
            PACELINE_NEWCOMER="1" if newcomer else None,
            PYTHONUNBUFFERED="1",
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
        self._exited(worker)

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
        for worker in self.all:
            if worker.alive:
                worker.killed = True
                worker.signal(signal.SIGKILL)

    def close(self) -> None:
        """Takes the last of what they wrote, reaps them, closes everything."""
        for worker in self.all:
            self.drain(worker)
            worker.process.wait()
            worker.orders.close()
            for fd in [*worker.pipes, worker.pidfd]:
                os.close(fd)
        self.selector.close()
