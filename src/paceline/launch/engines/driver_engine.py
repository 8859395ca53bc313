"""Base of engines that need a driver process (Ray, Spark).

A driver prints lines of JSON: the resources that it ``waits`` for, and then either the addresses where the hosts were
``placed``, or ``what`` went wrong. It ends with its input. This module is also the command that becomes `sh` on a host:
it passes its standard streams to the driver over a Unix socket (the door), and waits.
"""

from __future__ import annotations

import json
import os
import secrets
import selectors
import socket
import struct
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from typing import IO, Any, Protocol

from paceline.base.console import say
from paceline.base.handshake import HELLO
from paceline.base.schema import read_message
from paceline.errors import LaunchError
from paceline.launch.engines.engine import End, Engine, Host

LOST = 255
LAST_WORD_PREFIX = "engine: "  # begins the driver's last message about a host
REACH = 5.0  # seconds for a cluster to take a connection
CHUNK = 1 << 16  # bytes that are read or written at a time


class DriverEngine(Engine):
    """Hosts that a driver process provides: the given `hosts`, otherwise one per placed host of the driver, named after
    `host_prefix`. The constructor waits until all have a place. `driver_input` and `driver_output` are the driver's
    standard streams; `wait_for_driver` waits for its end. LaunchError: the driver fails, or is not ready in time.
    """

    title: str
    host_prefix: str

    def __init__(
        self,
        hosts: Sequence[Host],
        driver_input: IO[bytes],
        driver_output: IO[bytes],
        wait_for_driver: Callable[[], object],
    ) -> None:
        self._driver_input, self._driver_output, self._wait_for_driver = driver_input, driver_output, wait_for_driver
        with ExitStack() as stack:
            stack.callback(self.close)
            placed = self._placed()
            stack.pop_all()
        super().__init__(hosts or [Host(f"{self.host_prefix}-{number}") for number in range(len(placed))])
        placements = [
            f"{host.name} on {address}"
            for host, address in zip(self.hosts, placed, strict=True)
            if host.name != address
        ]
        if placements:
            say(f"{self.title} has placed {', '.join(placements)}")
        self.listen = placed[0]  # the address at which the other hosts reach the first one

    def _placed(self) -> list[str]:
        for line in self._driver_output:
            message = self._read_message(line)
            if "waits" in message:
                say(f"waiting for {self.title}: {message['waits']}")
            elif "what" in message:
                raise LaunchError(message["what"], message["cure"])
            else:
                self._door = message["door"]
                return list(message["placed"])
        what = f"the {self.title} driver ended with exit code {self._wait_for_driver()}"
        raise LaunchError(what, "see its output above")

    def _read_message(self, line: bytes) -> dict[str, Any]:
        from paceline.launch.engines.message_types import DRIVEN  # needs msgspec

        what = f"the message of the {self.title} driver"
        fields = read_message(line, dict[str, Any], what)
        kind = next((kind for name, kind in DRIVEN.items() if name in fields), DRIVEN["placed"])
        return dict(read_message(line, kind, what))

    def command(self, host: Host) -> list[str]:
        """Hands our standard streams to the driver, which connects them to `sh` on the host."""
        number = [other.name for other in self.hosts].index(host.name)
        return [sys.executable, "-m", "paceline.launch.engines.driver_engine", self._door, str(number)]

    def why_ended(self, host: Host, code: int, last_line: str) -> End | None:
        """The reason that the driver gave in its last line, if it gave one."""
        if code != LOST or not last_line.startswith(LAST_WORD_PREFIX):
            return None
        text = last_line.removeprefix(LAST_WORD_PREFIX)
        return End("preempted" if "preempted" in text else "lost", text)

    def close(self) -> None:
        """Closes the driver's input. The driver then ends and releases everything that it holds."""
        self._driver_input.close()
        self._wait_for_driver()
        self._driver_output.close()


def start_driver(module: str, asked: Mapping[str, Any], env: Mapping[str, str] | None = None) -> tuple[Any, Any, Any]:
    """Starts a driver process. Returns its standard input and output, and a function that waits for its end."""
    command = [sys.executable, "-m", f"paceline.launch.engines.{module}", json.dumps(asked)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True, env=env)
    return process.stdin, process.stdout, process.wait


class Bridge(Protocol):
    """Connects a host to the standard streams of the process that asked for it, which waits for the host's end."""

    def close(self) -> None:
        """Ends the host and closes the connection to the process that asked for it."""


def check_reachable(address: str) -> None:
    """Checks that a program listens at an address; OSError if not. The engine itself would wait for over a minute."""
    host, _, port = address.rpartition(":")
    socket.create_connection((host, int(port)), REACH).close()


class Asker:
    """A process that has asked for a host: `link` is the socket at which it waits for the host's end. Its standard
    `streams` serve as those of the host.
    """

    def __init__(self, link: socket.socket, streams: Sequence[int]) -> None:
        self.link, self.streams = link, streams
        self._error_ends = b"\n"  # the last bytes that the host has written to its standard error

    def write(self, stream: int, data: bytes) -> None:
        """Writes to the standard output (1) or the standard error (2). OSError: the process has ended."""
        if stream == 2 and data:
            self._error_ends = data[-1:]
        while data:
            data = data[os.write(self.streams[stream], data) :]

    def finish(self, code: int, why: str = "") -> None:
        """Sends the host's exit code to the process. `why`: the reason, if the host did not end by itself; it becomes
        the last line of its standard error, also after a line that the host could not write to its end.
        """
        with suppress(OSError):
            if why:
                before = "" if self._error_ends == b"\n" else "\n"
                self.write(2, f"{before}{LAST_WORD_PREFIX}{why}\n".encode())
        for stream in self.streams[1:]:
            os.close(stream)
        with suppress(OSError):
            self.link.send(str(code).encode())
            self.link.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Closes the connection to the process."""
        self.link.close()


def serve_hosts(
    input_fd: int, tell: Callable[..., None], placed: Sequence[str], begin: Callable[[int, Asker], Bridge]
) -> None:
    """Serves the placed hosts until `input_fd` ends. A process asks for a host by its number at a Unix socket (the
    door); ``begin(number, asker)`` then connects the host to that process.
    """
    door = f"paceline-{secrets.token_hex(16)}"
    with socket.socket(socket.AF_UNIX) as listener, selectors.DefaultSelector() as selector:
        listener.bind(f"\0{door}")
        listener.listen(len(placed))
        tell(door=door, placed=placed)
        selector.register(input_fd, selectors.EVENT_READ)
        selector.register(listener, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.fileobj == input_fd:
                    for other in selector.get_map().values():
                        if other.data is not None:
                            other.data.close()
                    return
                if key.fileobj is listener:
                    link, _ = listener.accept()
                    link.settimeout(HELLO)
                    with suppress(OSError, ValueError):
                        number, streams, _, _ = socket.recv_fds(link, 16, 3) if _is_ours(link) else (b"", [], 0, 0)
                    if len(streams) != 3 or not number.isdigit():
                        link.close()
                        continue
                    link.settimeout(None)
                    selector.register(link, selectors.EVENT_READ, begin(int(number), Asker(link, streams)))
                else:  # the process that waited has ended, or has its answer
                    selector.unregister(key.fileobj)
                    key.data.close()


def _is_ours(link: socket.socket) -> bool:
    """Whether a process of this user has the other end of a socket of this host."""
    return bool(struct.unpack("3i", link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[1] == os.getuid())


def _hand_over(door: str, number: str) -> int:
    """Gives our standard streams to the driver. Returns the exit code of the host that used them."""
    with socket.socket(socket.AF_UNIX) as asked, suppress(OSError):
        asked.connect(f"\0{door}")
        if _is_ours(asked):  # otherwise another user has taken the name of a driver that has ended
            socket.send_fds(asked, [number.encode()], [0, 1, 2])
            if code := asked.recv(16):
                return int(code)
    say(f"{LAST_WORD_PREFIX}the driver has ended")
    return LOST


if __name__ == "__main__":
    sys.exit(_hand_over(*sys.argv[1:]))
