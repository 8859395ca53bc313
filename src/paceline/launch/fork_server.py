"""The agent's side of the fork server: keeps a process that has imported torch, and asks it for workers.

That process runs forked_worker.py. A forked worker starts in a tenth of a second, instead of the seconds that the
import of torch and its compiler takes. The agent itself does not import torch.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from io import FileIO
from selectors import EVENT_READ, BaseSelector
from typing import Any

from paceline.base.environment import inherited_warm
from paceline.launch.forked_worker import GO, PID_BYTES, POOL, PROGRAM, fixed, receive, send
from paceline.launch.processes import Child, adopt_orphans, die_with_us

PATIENCE = 10.0  # seconds for an answer, which usually takes a few hundredths
OFTEN = 3  # this many ends of the warm process are too many
LAST = 2000  # bytes of its output that are kept, to show the last line


class ColdError(Exception):
    """A worker cannot be forked and must start with an interpreter of its own. The text says why."""


@dataclass(frozen=True)
class WorkerProgram:
    """A worker to start: the `program` for the interpreter, its environment and folder, and what it inherits: the
    `streams` for its output, and descriptors by the environment variable that holds their number (`numbered`).
    """

    name: str
    program: Sequence[str]
    environment: Mapping[str, str]
    streams: tuple[int, int]
    numbered: Mapping[str, int]
    folder: str = "."


class WarmProcessHolder:
    """Holds the warm process that a run leaves to the next run of the same command, until the `with` block ends."""

    def __init__(self) -> None:
        self._left: tuple[Child, socket.socket, dict[str, str]] | None = None

    def __enter__(self) -> WarmProcessHolder:
        return self

    def __exit__(self, *_: object) -> None:
        self.take({})

    def leave(self, process: Child, agent: socket.socket, environment: dict[str, str]) -> None:
        """Stores a warm process, its socket and the environment with which it was started."""
        self._left = process, agent, environment

    def take(self, environment: dict[str, str]) -> tuple[Child, socket.socket] | None:
        """Returns the stored process if it was started with the same environment; otherwise ends it."""
        left, self._left = self._left, None
        if left is None:
            return None
        process, agent, its = left
        if its == environment and process.status is None:
            return process, agent
        _end(process, agent)
        return None


def _end(process: Child, agent: socket.socket) -> None:
    agent.close()
    process.signal(signal.SIGKILL)
    process.reap()


class ForkServer:
    """Keeps one warm process alive, which forks workers. `words`: the end of its command line. `environment`: the
    environment of the workers. `changed` is called when the process can fork, or when it is known why it never will;
    `say` prints a line. `warm_holder`: provides the process of an earlier run, and receives the process at the end.
    """

    def __init__(
        self,
        words: Sequence[str],
        environment: Mapping[str, str],
        selector: BaseSelector,
        changed: Callable[[], None],
        say: Callable[[str], None],
        warm_holder: WarmProcessHolder | None = None,
    ) -> None:
        self._words, self._given, self._selector, self._warm_holder = list(words), environment, selector, warm_holder
        self.environment = fixed(environment)  # the variables that matter at the start of a process
        self._changed, self._say = changed, say
        self.ready = False
        self.trouble: str | None = None  # why it will never fork
        self.sessions: set[int] = set()  # of all warm processes: we adopt the processes that they leave behind
        self._ends = 0
        self._printed = b""  # the end of its output
        self._process: Child | None = None
        self._output: FileIO | None = None  # its output, if we started it
        adopt_orphans()
        left = warm_holder.take(self.environment) if warm_holder is not None else None
        inherited = inherited_warm()
        if left is not None:
            self._adopt(*left, ready=True)
        elif inherited is not None:
            self._adopt(Child(inherited[0]), socket.socket(fileno=inherited[1]))
        else:
            self._start()

    def fork(self, wanted: WorkerProgram) -> Child:
        """Forks a worker, which begins its program. ColdError: that is not possible now, and no worker was forked.

        The worker waits at a gate until we know its process id, and ends when the gate closes. So if the warm process
        fails meanwhile, either we know the worker, or it never runs a line of the program.
        """
        if not self.ready or self._process is None:
            raise ColdError(self.trouble or "the warm process is not ready at the moment")
        gate, workers_end = socket.socketpair()
        with gate:
            gate.settimeout(PATIENCE)
            with workers_end:
                trouble = self._request(self._process, wanted, workers_end)
            if trouble is not None:
                raise ColdError(trouble)
            if (pid := self._await_worker(gate)) is None:
                raise ColdError("the warm process or the new worker ended during the fork")
            child = Child(pid)  # no other process has this id: an ended process stays until we reap it
            with suppress(OSError):  # it has ended meanwhile, which is noticed like the end of any worker
                gate.send(GO)
            return child

    def _request(self, process: Child, wanted: WorkerProgram, gate: socket.socket) -> str | None:
        """Asks the warm process to fork a worker. Returns why it refused, if it did. Kills it if it is silent."""
        request = {
            "name": wanted.name,
            "program": list(wanted.program),
            "environment": dict(wanted.environment),
            "numbered": list(wanted.numbered),
            "folder": os.path.abspath(wanted.folder),
            "agent": os.getpid(),
        }
        try:
            send(self._socket, request, [gate.fileno(), *wanted.streams, *wanted.numbered.values()])
            answer = receive(self._socket)
        except OSError:
            answer = None
        if answer is None:
            process.signal(signal.SIGKILL)  # a worker that it has forked arrives at the gate, or the gate closes
            return None
        trouble: str | None = answer[0]["trouble"]
        return trouble

    def _await_worker(self, gate: socket.socket) -> int | None:
        """The process id of the worker that waits at the gate; None if there is none, or it is late."""
        try:
            pid_bytes = gate.recv(PID_BYTES)
        except OSError:
            return None
        return int(pid_bytes) if pid_bytes else None

    def kill_if_stopped(self) -> None:
        """Kills a warm process that was stopped by a signal, because it cannot fork."""
        if self._process is not None and self._process.look(os.WSTOPPED) is not None:
            self._process.signal(signal.SIGKILL)

    def close(self) -> None:
        """Ends the warm process, or leaves it to the next run."""
        if self._process is None:
            return
        self._selector.unregister(self._process.pidfd)
        self._forget(self._socket)
        if self._warm_holder is not None and self.ready and self._process.status is None:
            self._warm_holder.leave(self._process, self._socket, self.environment)
        else:
            _end(self._process, self._socket)
        self._process = None
        if self._output is not None:
            self._print()
            self._forget(self._output)
            self._output.close()
        self.ready = False

    # ---- start and end

    def _start(self) -> None:
        agent_end, warm_end = socket.socketpair()
        read, write = os.pipe()
        self._output = FileIO(read)
        os.set_blocking(read, False)
        try:
            process = subprocess.Popen(
                [sys.executable, "-c", PROGRAM, str(warm_end.fileno()), *self._words],
                env={**self._given, POOL: "1"},
                stdin=subprocess.DEVNULL,
                stdout=write,
                stderr=write,
                pass_fds=[warm_end.fileno()],
                start_new_session=True,
                preexec_fn=die_with_us(),
            )
        except OSError as error:
            agent_end.close()
            self._output.close()
            self.trouble = f"the warm process cannot be started ({error.strerror})"
            return
        finally:
            warm_end.close()
            os.close(write)
        self._selector.register(self._output, EVENT_READ, self._print)
        self._adopt(Child(process.pid, process), agent_end)

    def _adopt(self, process: Child, agent: socket.socket, ready: bool = False) -> None:
        self._process, self._socket, self.ready = process, agent, ready
        self.sessions.add(process.pid)
        agent.settimeout(PATIENCE)
        if not ready:
            self._selector.register(agent, EVENT_READ, self._on_first_message)
        self._selector.register(process.pidfd, EVENT_READ, self._on_end)

    def _forget(self, file: Any) -> None:
        with suppress(KeyError):
            self._selector.unregister(file)

    def _print(self) -> None:
        assert self._output is not None
        data = self._output.readall()
        self._printed = (self._printed + (data or b""))[-LAST:]
        if data == b"":
            self._forget(self._output)

    def _on_first_message(self) -> None:
        """Handles the first message of the warm process: its imports are done. Without one, it is about to end."""
        if self._process is None:  # it has ended in the same turn of the loop
            return
        self._selector.unregister(self._socket)
        try:
            message = receive(self._socket)
        except OSError:
            return
        if message is not None and message[0]["environment"] == self.environment:
            self.ready = True
            self._changed()
        elif message is not None:  # it was inherited, and started for other workers
            self.close()
            self._start()

    def _on_end(self) -> None:
        assert self._process is not None
        was_ready, status = self.ready, self._process.status
        if status is None:
            return
        self.close()
        self._ends += 1
        how = f"exit code {status}" if status >= 0 else signal.Signals(-status).name
        if was_ready and self._ends < OFTEN:
            self._say(f"the warm process ended ({how}); a new one is started")
            self._start()
            return
        times = "" if self._ends == 1 else f" {self._ends} times"
        lines = self._printed.decode("utf-8", "replace").split("\n")
        last = next((f": {line}" for line in reversed(lines) if line.strip()), "")
        self.trouble = f"the warm process ended{times} ({how}){last}"
        self._changed()
