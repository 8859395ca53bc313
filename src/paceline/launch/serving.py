"""Starts the process that serves metrics and the live page."""

from __future__ import annotations

import errno
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from paceline.base.journal import replace_file
from paceline.base.polling import can_read
from paceline.base.schema import read_file
from paceline.base.tracebacks import named
from paceline.errors import UsageError
from paceline.launch.joining import address_of
from paceline.launch.processes import Child
from paceline.team.reading_key import KEY, reading_key, write_targets

FAREWELL = 12.0  # seconds for the process to report the end: in a pod, all processes end with us
BUSY = 20.0  # seconds to wait for a port at which a run that has ended may still serve its last metrics
PAGE = "page"  # in the run folder: the address of the live page, with its key
ALL = ("0.0.0.0", "::", "*")


def check_serving(metrics: str | None, page: str | None) -> None:
    """Checks the addresses of --metrics and --page. UsageError: metrics or the page cannot be served there."""
    for option, address in (("--metrics", metrics), ("--page", page)):
        if address is not None and ":" not in address:
            host, _ = address_of(address)
            raise UsageError(f"{option} {address} has no port", f"use {option} {host}:PORT, for example {host}:9464")
        if address is not None:
            address_of(address)
    if metrics is not None and find_spec("prometheus_client") is None:
        what = "--metrics needs the package prometheus_client, which is not installed"
        raise UsageError(what, "pip install 'paceline[prometheus]'")


class Serving(AbstractContextManager["Serving"]):
    """The process that serves `metrics` and the live `page` at their addresses and reports to the server `trainjob`. It
    begins with `start`, unless none of the three is given, and ends by itself after the run. `say` prints a line.
    `begun`: the run folder on another host, if the run began there.
    """

    def __init__(
        self,
        metrics: str | None,
        page: str | None,
        trainjob: Mapping[str, str] | None,
        say: Callable[[str], None],
        begun: Path | None = None,
    ) -> None:
        self._metrics, self._page, self._trainjob, self._say, self._begun = metrics, page, trainjob, say, begun
        self._process: subprocess.Popen[bytes] | None = None
        self.output_fd = -1  # the descriptor of the process's messages
        self._child: Child | None = None

    def start(self, folder: Path, host_address: str) -> Child | None:
        """Starts the process, once for all attempts of a run in this folder, which no other run uses. `host_address`:
        the address of this host. UsageError: an address cannot be served.
        """
        if self._child is not None or (self._metrics is None and self._page is None and self._trainjob is None):
            return self._child
        if self._begun is not None:
            check_serving(self._metrics, self._page)  # checks what is installed on this host
        key, begun = reading_key(folder), self._begun or folder
        shared = begun != folder and _has(begun, key)
        given: dict[str, Any] = {"folder": str(folder.absolute()), "run": begun.absolute().name, "targets": []}
        given["trainjob"] = self._trainjob
        given["announced"] = [str(path.absolute()) for path in (folder, *([begun] if shared else []))]
        with ExitStack() as stack:
            for name, address in (("metrics", self._metrics), ("page", self._page)):
                if address is not None:
                    address = address if self._begun is None else _local_address(address, host_address)
                    patience = BUSY if self._begun is None else 0.0
                    listener = stack.enter_context(_listener(f"--{name}", address, self._say, patience))
                    given[name] = listener.fileno()
                    self._tell(given, name, key, address_of(address)[0], listener.getsockname()[1])
            logs = folder / "logs"
            logs.mkdir(mode=0o700, exist_ok=True)
            log = os.open(logs / "serving.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            self._process = subprocess.Popen(
                [sys.executable, "-m", "paceline.observe.server", json.dumps(given)],
                stdin=subprocess.PIPE,  # its end tells the process that the run has ended
                stdout=subprocess.PIPE,
                stderr=log,
                pass_fds=[given[name] for name in ("metrics", "page") if name in given],
                start_new_session=True,
            )
            os.close(log)
        assert self._process.stdout is not None
        self.output_fd = os.dup(self._process.stdout.fileno())
        self._process.stdout.close()
        self._child = Child(self._process.pid, self._process)
        return self._child

    def _tell(self, given: dict[str, Any], name: str, key: str, host: str, port: int) -> None:
        """Publishes the address for users and programs; adds the host names that the process accepts to `given`."""
        every, host_name = host in ALL, socket.gethostname()
        given["hosts"] = ["127.0.0.1", "localhost", "::1", host.lower(), *([host_name.lower()] if every else [])]
        folders, host = [Path(path) for path in given["announced"]], host_name if every else host
        if name == "metrics":
            given["targets"] = [f"{host}:{port}"]
            for folder in folders:
                write_targets(folder, given["targets"])
            where = named(folders[0] / KEY)
            self._say(f"metrics for Prometheus: http://{host}:{port}/metrics; the key is in {where}")
            return
        for folder in folders:
            replace_file(folder / PAGE, f"http://{host}:{port}/#{key}\n")
        self._say(f"live page: http://{host}:{port}/#{key}")

    def stop(self, patience: float = 0.0) -> None:
        """Stops serving on this host. Prints the messages of the process that arrive within `patience` seconds."""
        if self._process is not None and self._child is not None:
            assert self._process.stdin is not None
            self._process.stdin.close()
            end = time.monotonic() + patience
            while can_read(self.output_fd, end - time.monotonic()):
                if not (text := os.read(self.output_fd, 1 << 12)):
                    break
                self._say(text.decode().strip())
            os.close(self.output_fd)
            os.close(self._child.pidfd)
            self._process.returncode = 0  # keeps Popen from waiting for it
        self._process, self._child, self.output_fd = None, None, -1

    def __exit__(self, *_: object) -> None:
        self.stop(FAREWELL if self._trainjob is not None else 0.0)


def _has(folder: Path, key: str) -> bool:
    """Whether this host also sees the run folder of another host: the folder has the same key."""
    try:
        return read_file(folder / KEY).decode(errors="replace").strip() == key
    except OSError:
        return False


def _local_address(address: str, host_address: str) -> str:
    """Translates an address of another host to this one: the same port at this host's address. The loopback and all
    addresses stay as they are.
    """
    host, port = address_of(address)
    return address if host in (*ALL, "localhost", "::1") or host.startswith("127.") else f"{host_address}:{port}"


def _listener(option: str, address: str, say: Callable[[str], None], patience: float) -> socket.socket:
    """Binds a socket before anything starts. UsageError: the port is still in use after `patience` seconds."""
    host, port = address_of(address)
    end, has_warned = time.monotonic() + patience, False
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
                cure = "use an address of this host and a free port"
                raise UsageError(f"{option} {address}: {error.strerror}", cure) from error
        if not has_warned:
            say(f"{address} is in use; waiting, because a run that has ended serves its last metrics for 15 seconds")
        has_warned = True
        time.sleep(0.1)
