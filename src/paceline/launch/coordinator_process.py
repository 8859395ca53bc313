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

TAKE_OVER = "take-over"  # in the run folder: a wish that this host's agent keeps the coordinator from now on
ADDRESS = "coordinator.json"  # in the run folder: where it listens
PATIENCE = 5.0  # seconds for the agent to see that it is to take over
OFTEN, WITHIN = 5, 10.0  # so many ends within so many seconds are too many
WORKED = 4  # and so many times as many of coordinators that have answered before: somebody else ended them
LONGEST = 10.0  # seconds that it may be silent at most; while it starts twice as many each time
OWN_PAUSE = 1.0  # seconds between two looks, after which it is we who stood still


def take_over(folder: Path) -> str:
    """Asks the agent that uses `folder` to keep the coordinator from now on. UsageError: there is none to take over."""
    before = _epoch(folder)
    asked = folder / TAKE_OVER
    if not (folder / "lock").exists():
        raise UsageError(f"{in_one_line(folder)} is no run folder", "give that of a `paceline run --join` on this host")
    asked.touch(0o600)
    end = time.monotonic() + PATIENCE
    while asked.exists() and time.monotonic() < end:
        time.sleep(0.05)
    if asked.exists():
        asked.unlink()
        raise UsageError(
            f"nobody uses {in_one_line(folder)}",
            "start `paceline run --join` again, or resume from its checkpoint",
        )
    if _epoch(folder) == before:
        what = "there is nothing to take over: the coordinator answers, or an etcd decides who keeps it"
        raise UsageError(what, "see `curl HOST:PORT/status`")
    return "this host keeps the coordinator now; the others come to it by themselves"


def _epoch(folder: Path) -> int:
    return listening_at(folder).get("epoch", 0) if (folder / ADDRESS).exists() else 0


def listening_at(folder: Path) -> dict[str, Any]:
    """Where the coordinator of a run listens, by its folder. OSError: it is not there; FormatError."""
    from paceline.base.file_types import Listening  # needs msgspec

    cure = "restore it, or give HOST:PORT of the coordinator with --token-file"
    return dict(read_json(folder / ADDRESS, Listening, str(folder / ADDRESS), cure))


class CoordinatorProcess:
    """Starts a coordinator of an `epoch` on a listening socket. `given` is what it is told: of the `run`, the last
    `generation` that is known here, the address of the coordinator `before`, if one is taken over from, and whether
    there was one (`again`). `say` prints a line, `restore` puts back what is missing in the run folder.

    One that is stopped or silent is ended before another takes its place, so it needs no higher epoch: that of a host
    which takes over at the same time counts.
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
        self._ends: list[tuple[float, float]] = []  # when, and how much of an end it is
        self._gaps: deque[float] = deque(maxlen=40)  # seconds between two of its answers
        self._patience, self._last_reason = LONGEST, ""  # while it starts; why it was replaced the last time
        self._trains = bool(given["again"])  # whether there was one that answered, and so workers that go on
        address_file = folder / f".{ADDRESS}"
        address_file.write_text(json.dumps({"host": host, "port": port, "epoch": self._given["epoch"]}))
        address_file.chmod(0o600)
        address_file.replace(folder / ADDRESS)
        self._start(again=given["again"])

    def _start(self, again: bool) -> None:
        command = [sys.executable, "-m", "paceline.team.coordinator_server", str(self._listener.fileno())]
        self._restore()
        token, write = os.pipe()  # the file in the run folder may be gone, and arguments can be read by others
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
            cure = "see `ulimit -a`, or take fewer workers"
            raise LaunchError(f"the coordinator cannot be started ({error.strerror})", cure) from error
        finally:
            os.close(token)
        self._process: Child | None = Child(process.pid, process)
        self._began = self._answered = self._looked = self._awake = time.monotonic()
        self._why = ""  # why we ended it
        self._selector.register(self._process.pidfd, selectors.EVENT_READ, lambda: None)  # wakes who then tends it

    def tend(self, answered: float) -> None:
        """Replaces it where it has ended, is stopped, or does not answer. `answered`: when it did last, in monotonic
        seconds. To be called again and again: while we stand still ourselves its silence means nothing.
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
        """Ends it; another one is started when it has ended."""
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
        why, then = self._why or f"ended ({how})", "; training goes on" if self._trains else ""
        if why != self._last_reason:
            self._last_reason = why
            self._say(f"the coordinator {why} and is started again{then}")
        self._start(again=True)

    def _forget(self) -> None:
        """Reaps the process."""
        process, self._process = self._process, None
        if process is not None:
            self._selector.unregister(process.pidfd)
            process.reap()

    def close(self) -> None:
        """Ends the coordinator. Before the selector is closed."""
        if self._process is not None:
            self._process.signal(signal.SIGKILL)
        self._forget()
        os.close(self._log)
