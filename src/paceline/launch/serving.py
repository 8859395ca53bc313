"""Starts the process that serves a run's figures, beside the coordinator. No torch."""

from __future__ import annotations

import errno
import json
import os
import select
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from paceline.errors import UsageError
from paceline.launch.joining import address_of
from paceline.launch.processes import Child
from paceline.observe.reading import KEY, reading_key, write_targets

FAREWELL = 12.0  # seconds to tell of the end: in a pod all ends with us
BUSY = 20.0  # seconds to wait for a port where an ended run may still serve its last figures
PAGE = "page"  # in the run folder: the address of the live page, with its key
ALL = ("0.0.0.0", "::", "*")


def check_serving(metrics: str | None, page: str | None) -> None:
    """UsageError: figures or the page cannot be served there."""
    for option, address in (("--metrics", metrics), ("--page", page)):
        if address is not None and ":" not in address:
            host, _ = address_of(address)
            raise UsageError(f"{option} {address} has no port", f"give {option} {host}:PORT, as {host}:9464")
        if address is not None:
            address_of(address)
    if metrics is not None and find_spec("prometheus_client") is None:
        what = "--metrics cannot be served: the package prometheus_client is not installed"
        raise UsageError(what, "pip install 'paceline[prometheus]'")


class Serving(AbstractContextManager["Serving"]):
    """The process that serves `metrics` and the live `page` at their addresses and tells the server `trainjob`, from
    `start` on; it goes by itself after the end. Where nobody wants to know there is none. `say` prints a line.
    """

    def __init__(
        self, metrics: str | None, page: str | None, trainjob: Mapping[str, str] | None, say: Callable[[str], None]
    ) -> None:
        self._metrics, self._page, self._trainjob, self._say = metrics, page, trainjob, say
        self._process: subprocess.Popen[bytes] | None = None
        self.said = -1  # the descriptor of what it says
        self._child: Child | None = None

    def start(self, folder: Path) -> Child | None:
        """Once, for all attempts of a run in this folder, that nobody else uses. UsageError: it cannot be."""
        if self._child is not None or (self._metrics is None and self._page is None and self._trainjob is None):
            return self._child
        given: dict[str, Any] = {"folder": str(folder.absolute()), "trainjob": self._trainjob}
        with ExitStack() as stack:
            for name, address in (("metrics", self._metrics), ("page", self._page)):
                if address is not None:
                    listener = stack.enter_context(_listener(f"--{name}", address, self._say))
                    given[name] = listener.fileno()
                    given["hosts"] = self._tell(name, folder, address_of(address)[0], listener.getsockname()[1])
            logs = folder / "logs"
            logs.mkdir(mode=0o700, exist_ok=True)
            log = os.open(logs / "serving.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            self._process = subprocess.Popen(
                [sys.executable, "-m", "paceline.observe.serving", json.dumps(given)],
                stdin=subprocess.PIPE,  # whose end is the run's
                stdout=subprocess.PIPE,
                stderr=log,
                pass_fds=[given[name] for name in ("metrics", "page") if name in given],
                start_new_session=True,
            )
            os.close(log)
        assert self._process.stdout is not None
        self.said = os.dup(self._process.stdout.fileno())
        self._process.stdout.close()
        self._child = Child(self._process.pid, self._process)
        return self._child

    def _tell(self, name: str, folder: Path, host: str, port: int) -> list[str]:
        """People and programs where it is; the names by which it may be asked for."""
        names = [
            "127.0.0.1",
            "localhost",
            "::1",
            host.lower(),
            *([socket.gethostname().lower()] if host in ALL else []),
        ]
        host = socket.gethostname() if host in ALL else host
        key = reading_key(folder)
        if name == "metrics":
            write_targets(folder, [f"{host}:{port}"])
            self._say(f"figures for Prometheus: http://{host}:{port}/metrics, with the key in {folder / KEY}")
        else:
            path = folder / PAGE
            with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
                file.write(f"http://{host}:{port}/#{key}\n")
            self._say(f"live page: http://{host}:{port}/, whose address with its key is in {path}")
        return names

    def __exit__(self, *_: object) -> None:
        if self._process is not None and self._child is not None:
            assert self._process.stdin is not None
            self._process.stdin.close()
            end = time.monotonic() + (FAREWELL if self._trainjob is not None else 0.0)
            while select.select([self.said], [], [], max(end - time.monotonic(), 0.0))[0]:
                if not (text := os.read(self.said, 1 << 12)):
                    break
                self._say(text.decode().strip())
            os.close(self.said)
            os.close(self._child.pidfd)
            self._process.returncode = 0  # it is not waited for


def _listener(option: str, address: str, say: Callable[[str], None]) -> socket.socket:
    """Bound before anything starts, so that a port that is taken is an error."""
    host, port = address_of(address)
    end, told = time.monotonic() + BUSY, False
    while True:
        listener = socket.socket()
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("" if host in ALL else host, port))
            listener.listen(64)
            return listener
        except OSError as error:
            listener.close()
            if error.errno != errno.EADDRINUSE or time.monotonic() > end:
                cure = "give an address of this host, and a port that is free"
                raise UsageError(f"{option} {address}: {error.strerror}", cure) from error
        if not told:
            say(f"{address} is in use: an ended run may serve its last figures there for 15 seconds, waiting for it")
        told = True
        time.sleep(0.1)
