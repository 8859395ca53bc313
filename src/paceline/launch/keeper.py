"""Keeps the coordinator alive: a process of its own, started again when it dies, on the same port. No torch."""

from __future__ import annotations

import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from paceline.errors import LaunchError
from paceline.launch.processes import die_with_us
from paceline.observe.journal import NAME

ADDRESS = "coordinator.json"  # in the run folder: where it listens
OFTEN, WITHIN = 5, 10.0  # so many ends within so many seconds are too many


class Keeper:
    """`given` is what the coordinator is told of the run. `say` prints a line."""

    def __init__(
        self,
        listener: socket.socket,
        folder: Path,
        given: Mapping[str, Any],
        selector: selectors.BaseSelector,
        say: Callable[..., None],
    ) -> None:
        self._listener, self._folder, self._selector, self._say = listener, folder, selector, say
        self._given = {**given, "folder": str(folder), "since": (folder / NAME).stat().st_size, "epoch": 1}
        self._log = os.open(folder / "logs" / "coordinator.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self._ends: list[float] = []
        host, port = listener.getsockname()[:2]
        said = folder / f".{ADDRESS}"
        said.write_text(json.dumps({"host": host, "port": port, "epoch": self._given["epoch"]}))
        said.chmod(0o600)
        said.replace(folder / ADDRESS)
        self._start(again=False)

    def _start(self, again: bool) -> None:
        command = [sys.executable, "-m", "paceline.team.server", str(self._listener.fileno())]
        try:
            self._process = subprocess.Popen(
                [*command, json.dumps({**self._given, "again": again})],
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=self._log,
                pass_fds=[self._listener.fileno()],
                start_new_session=True,
                preexec_fn=die_with_us(),
            )
        except OSError as error:
            cure = "see `ulimit -a`, or take fewer workers"
            raise LaunchError(f"the coordinator cannot be started ({error.strerror})", cure) from error
        self._pidfd = os.pidfd_open(self._process.pid)
        self._selector.register(self._pidfd, selectors.EVENT_READ, partial(self._ended))

    def _ended(self) -> None:
        self._selector.unregister(self._pidfd)
        os.close(self._pidfd)
        code = self._process.wait()
        now = time.monotonic()
        self._ends = [end for end in self._ends if now - end < WITHIN] + [now]
        how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        log = self._folder / "logs" / "coordinator.log"
        if len(self._ends) >= OFTEN:
            raise LaunchError(f"the coordinator ended {OFTEN} times within {WITHIN:.0f} s ({how})", f"read {log}")
        self._say(f"the coordinator ended ({how}) and is started again; training goes on")
        self._start(again=True)

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._pidfd)
        os.close(self._log)
        self._listener.close()
