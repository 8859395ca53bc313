"""Starts the process that serves a run's figures, beside the coordinator. No torch."""

from __future__ import annotations

import errno
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from importlib.util import find_spec
from pathlib import Path

from paceline.errors import UsageError
from paceline.launch.joining import address_of
from paceline.launch.processes import Child

BUSY = 20.0  # seconds to wait for a port where an ended run may still serve its last figures
ALL = ("0.0.0.0", "::", "*")


def check_metrics(address: str) -> None:
    """UsageError: figures cannot be served there."""
    host, port = address_of(address)
    if not port and ":" not in address:
        raise UsageError(f"--metrics {address} has no port", f"give --metrics {host}:PORT, as {host}:9464")
    if find_spec("prometheus_client") is None:
        what = "--metrics cannot be served: the package prometheus_client is not installed"
        raise UsageError(what, "pip install 'paceline[prometheus]'")


class Serving(AbstractContextManager["Serving"]):
    """The process that serves /metrics at an address, from `start` on; it goes by itself after the end. Without an
    address there is none. `say` prints a line.
    """

    def __init__(self, address: str | None, say: Callable[[str], None]) -> None:
        self._address, self._say = address, say
        self._process: subprocess.Popen[bytes] | None = None
        self._child: Child | None = None

    def start(self, folder: Path) -> Child | None:
        """Once, for all attempts of a run in this folder, that nobody else uses. UsageError: it cannot be."""
        if self._address is None or self._child is not None:
            return self._child
        from paceline.observe.serving import KEY, reading_key, write_targets  # needs the client of Prometheus

        listener = _listener(self._address, self._say)
        host, port = address_of(self._address)[0], listener.getsockname()[1]
        host = socket.gethostname() if host in ALL else host
        reading_key(folder)
        write_targets(folder, [f"{host}:{port}"])
        logs = folder / "logs"
        logs.mkdir(mode=0o700, exist_ok=True)
        log = os.open(logs / "metrics.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "paceline.observe.serving", str(listener.fileno()), str(folder.absolute())],
            stdin=subprocess.PIPE,  # whose end is the run's
            stdout=log,
            stderr=log,
            pass_fds=[listener.fileno()],
            start_new_session=True,
        )
        os.close(log)
        listener.close()
        self._child = Child(self._process.pid, self._process)
        self._say(f"figures for Prometheus: http://{host}:{port}/metrics, with the key in {folder / KEY}")
        return self._child

    def __exit__(self, *_: object) -> None:
        if self._process is not None and self._child is not None:
            assert self._process.stdin is not None
            self._process.stdin.close()
            os.close(self._child.pidfd)
            self._process.returncode = 0  # it is not waited for


def _listener(address: str, say: Callable[[str], None]) -> socket.socket:
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
                raise UsageError(f"--metrics {address}: {error.strerror}", cure) from error
        if not told:
            say(f"{address} is in use: an ended run may serve its last figures there for 15 seconds, waiting for it")
        told = True
        time.sleep(0.1)
