"""Starts the coordinator process and replaces it when it fails."""

from __future__ import annotations

import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from paceline.base.console import in_one_line
from paceline.base.journal import NAME
from paceline.base.schema import read_json
from paceline.errors import LaunchError, UsageError
from paceline.launch.processes import Child, die_with_us
from paceline.team.coordinator_client import AWAY

TAKE_OVER = "take-over"  # a file in the run folder: asks the agent of this host to take over the coordinator
ADDRESS = "coordinator.json"  # in the run folder: where it listens
PATIENCE = 5.0  # seconds for the agent to notice that file
OFTEN, WITHIN = 5, 10.0  # this many ends within this many seconds are too many
WORKED = 4  # an end counts 1/4 if the coordinator had answered before: another program killed it
LONGEST = 10.0  # seconds of silence after which it is replaced; doubled with each start without an answer
OWN_PAUSE = 1.0  # seconds between two looks above which this process itself was suspended


def take_over(folder: Path) -> str:
    """Asks the agent that uses `folder` to take over the coordinator. UsageError: that is not possible."""
    before = _epoch(folder)
    asked = folder / TAKE_OVER
    if not (folder / "lock").exists():
        what = f"{in_one_line(folder)} is not a run folder"
        raise UsageError(what, "pass the run folder of a `paceline run --join` on this host")
    asked.touch(0o600)
    end = time.monotonic() + PATIENCE
    while asked.exists() and time.monotonic() < end:
        time.sleep(0.05)
    if asked.exists():
        asked.unlink()
        what = f"no `paceline run` is using {in_one_line(folder)}"
        raise UsageError(what, "start `paceline run --join` again, or resume the run from its checkpoint")
    if _epoch(folder) == before:
        what = "this host cannot take over the coordinator: it still answers, or etcd decides which host runs it"
        raise UsageError(what, "check it with `curl HOST:PORT/status`")
    return "this host runs the coordinator now; the other hosts connect to it by themselves"


def _epoch(folder: Path) -> int:
    return listening_at(folder).get("epoch", 0) if (folder / ADDRESS).exists() else 0


def listening_at(folder: Path) -> dict[str, Any]:
    """Reads the address of the coordinator from a run folder. OSError: the file is missing. FormatError: damaged."""
    from paceline.base.file_types import Listening  # needs msgspec

    cure = "restore it, or pass HOST:PORT of the coordinator with --token-file"
    return dict(read_json(folder / ADDRESS, Listening, str(folder / ADDRESS), cure))


def write_address(folder: Path, host: str, port: int, epoch: int) -> None:
    """Writes the address of the coordinator into a run folder."""
    address_file = folder / f".{ADDRESS}"
    address_file.write_text(json.dumps({"host": host, "port": port, "epoch": epoch}))
    address_file.chmod(0o600)
    address_file.replace(folder / ADDRESS)


class CoordinatorProcess:
    """Runs a coordinator of an `epoch` on a listening socket, and replaces it when it fails.

    `given`: the facts about the `run`, the last known `generation`, the address of the coordinator `before` that it
    takes over from, if any, and whether there was one (`again`). `say` prints a line; `restore` repairs the run folder.
    A failed coordinator is killed before its replacement starts, so the replacement keeps the epoch. A host that takes
    over at the same time has a higher epoch, and wins.
    """

    def __init__(
        self,
        listener: socket.socket,
        folder: Path,
        token: bytes,
        given: Mapping[str, Any],
        selector: selectors.BaseSelector,
        say: Callable[..., None],
        restore: Callable[[], None],
    ) -> None:
        self._listener, self._folder, self._token = listener, folder, token
        self._selector, self._say, self._restore = selector, say, restore
        restore()
        host, port = listener.getsockname()[:2]
        self._given = {**given, "folder": str(folder), "since": (folder / NAME).stat().st_size, "address": [host, port]}
        self._log = os.open(folder / "logs" / "coordinator.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self._ends: list[tuple[float, float]] = []  # monotonic seconds and weight of each end
        self._gaps: deque[float] = deque(maxlen=40)  # seconds between two of its answers
        self._patience, self._last_reason = LONGEST, ""  # allowed silence of a start; why it was replaced last
        self._trains = bool(given["again"])  # whether a coordinator has answered before, so that workers are training
        write_address(folder, host, port, self._given["epoch"])
        self._start(again=given["again"])

    def _start(self, again: bool) -> None:
        command = [sys.executable, "-m", "paceline.team.coordinator_server", str(self._listener.fileno())]
        self._restore()
        token, write = os.pipe()  # the file in the run folder may be missing, and other users can read arguments
        os.write(write, self._token)
        os.close(write)
        try:
            process = subprocess.Popen(
                [*command, json.dumps({**self._given, "again": again})],
                stdin=token,
                stdout=self._log,
                stderr=self._log,
                pass_fds=[self._listener.fileno()],
                start_new_session=True,
                preexec_fn=die_with_us(),
            )
        except OSError as error:
            cure = "check `ulimit -a`, or use fewer workers"
            raise LaunchError(f"the coordinator cannot be started ({error.strerror})", cure) from error
        finally:
            os.close(token)
        self._process: Child | None = Child(process.pid, process)
        self._began = self._answered = self._looked = self._awake = time.monotonic()
        self._why = ""  # why we killed it
        self._selector.register(self._process.pidfd, selectors.EVENT_READ, lambda: None)  # wakes the loop: `tend`

    def tend(self, answered: float) -> None:
        """Replaces the coordinator if it has ended, is stopped, or does not answer. `answered`: monotonic seconds of
        the last answer. Call it regularly: the coordinator's silence does not count while this process is suspended.
        """
        if self._process is None:
            return
        now, status = time.monotonic(), self._process.status
        self._awake = now if now - self._looked > OWN_PAUSE else self._awake
        self._looked = now
        if answered > self._answered:
            if self._answered > self._began:
                self._gaps.append(answered - max(self._answered, self._awake))
            self._answered, self._patience, self._last_reason, self._trains = answered, LONGEST, "", True
        slow = min(LONGEST, max(AWAY, 4 * max(self._gaps, default=0.0)))
        silent = now - max(self._answered, self._awake)
        if status is not None:
            self._ended(status)
        elif self._process.look(os.WSTOPPED) is not None:
            self._replace(self._process, "was stopped (SIGSTOP)")
        elif silent > (slow if self._answered > self._began else self._patience):
            self._patience *= 1 + (not self._why and self._answered <= self._began)
            self._replace(self._process, "does not answer")

    def _replace(self, process: Child, why: str) -> None:
        """Kills the coordinator; a new one is started when it has ended."""
        self._why = self._why or why
        process.signal(signal.SIGKILL)

    def _ended(self, code: int) -> None:
        self._forget()
        now = time.monotonic()
        weight = 1.0 if self._answered <= self._began else 1.0 / WORKED
        self._ends = [end for end in self._ends if now - end[0] < WITHIN] + [(now, weight)]
        how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        log = self._folder / "logs" / "coordinator.log"
        if sum(weight for _, weight in self._ends) >= OFTEN:
            what = f"the coordinator ended {len(self._ends)} times within {WITHIN:.0f} s ({how})"
            raise LaunchError(what, f"read {log}")
        why, then = self._why or f"ended ({how})", "; training continues" if self._trains else ""
        if why != self._last_reason:
            self._last_reason = why
            self._say(f"the coordinator {why} and is restarted{then}")
        self._start(again=True)

    def _forget(self) -> None:
        """Reaps the process."""
        process, self._process = self._process, None
        if process is not None:
            self._selector.unregister(process.pidfd)
            process.reap()

    def close(self) -> None:
        """Kills the coordinator. Call it before the selector is closed."""
        if self._process is not None:
            self._process.signal(signal.SIGKILL)
        self._forget()
        os.close(self._log)
