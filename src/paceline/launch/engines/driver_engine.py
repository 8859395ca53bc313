"""Base of engines that need a driver process (Ray, Spark).

A driver says lines of JSON: what it ``waits`` for, and either where all is ``placed`` or ``what`` went wrong; it ends
with its input. The command that becomes `sh` on a host is this module: it hands its standard streams over at the
driver's door, and waits.
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
SAID = "engine: "  # begins the driver's own last word on a host
REACH = 5.0  # seconds for a cluster to take a connection
CHUNK = 1 << 16


class DriverEngine(Engine):
    """`hosts` that a driver brings about, or as many as it has placed, each a `place`; waits until it has. `heard` and
    `said` are its standard streams, `over` waits for its end. LaunchError: it cannot, or not in time.
    """

    title: str
    place: str

    def __init__(self, hosts: Sequence[Host], heard: IO[bytes], said: IO[bytes], over: Callable[[], object]) -> None:
        self._heard, self._said, self._over = heard, said, over
        with ExitStack() as stack:
            stack.callback(self.close)
            placed = self._placed()
            stack.pop_all()
        super().__init__(hosts or [Host(f"{self.place}-{number}") for number in range(len(placed))])
        where = [f"{host.name} on {at}" for host, at in zip(self.places, placed, strict=True) if host.name != at]
        if where:
            say(f"{self.title} has placed {', '.join(where)}")
        self.listen = placed[0]  # where the others reach the first one

    def _placed(self) -> list[str]:
        for line in self._said:
            said = self._told(line)
            if "waits" in said:
                say(f"waiting for {self.title}: {said['waits']}")
            elif "what" in said:
                raise LaunchError(said["what"], said["cure"])
            else:
                self._door = said["door"]
                return list(said["placed"])
        raise LaunchError(f"{self.title}'s driver ended with exit code {self._over()}", "see what it says above")

    def _told(self, line: bytes) -> dict[str, Any]:
        from paceline.launch.engines.message_types import DRIVEN  # needs msgspec

        what = f"what {self.title}'s driver says"
        fields = read_message(line, dict[str, Any], what)
        kind = next((kind for name, kind in DRIVEN.items() if name in fields), DRIVEN["placed"])
        return dict(read_message(line, kind, what))

    def command(self, place: Host) -> list[str]:
        number = [other.name for other in self.places].index(place.name)
        return [sys.executable, "-m", "paceline.launch.engines.driver_engine", self._door, str(number)]

    def end(self, place: Host, code: int, said: str) -> End | None:
        if code != LOST or not said.startswith(SAID):
            return None
        text = said.removeprefix(SAID)
        return End("preempted" if "preempted" in text else "lost", text)

    def close(self) -> None:
        """The driver hears that nobody is here any more, and with it goes all that it holds."""
        self._heard.close()
        self._over()
        self._said.close()


def driver(module: str, asked: Mapping[str, Any], env: Mapping[str, str] | None = None) -> tuple[Any, Any, Any]:
    """A driver as a process of its own: what it hears and says, and what waits for its end."""
    command = [sys.executable, "-m", f"paceline.launch.engines.{module}", json.dumps(asked)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True, env=env)
    return process.stdin, process.stdout, process.wait


class Bridge(Protocol):
    """A host, between the standard streams of somebody who waits for its end."""

    def close(self) -> None: ...


def reach(address: str) -> None:
    """OSError: nothing listens there. The engine itself would wait for more than a minute."""
    host, _, port = address.rpartition(":")
    socket.create_connection((host, int(port)), REACH).close()


def keep(heard: int, tell: Callable[..., None], placed: Sequence[str], begin: Callable[..., Bridge]) -> None:
    """What a driver does once all is placed, until what it hears ends: ``begin(number, asker, streams)`` brings a host
    to whoever asks for it at our door.
    """
    door = f"paceline-{secrets.token_hex(16)}"
    with socket.socket(socket.AF_UNIX) as listener, selectors.DefaultSelector() as selector:
        listener.bind(f"\0{door}")
        listener.listen(len(placed))
        tell(door=door, placed=placed)
        selector.register(heard, selectors.EVENT_READ)
        selector.register(listener, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.fileobj == heard:
                    for other in selector.get_map().values():
                        if other.data is not None:
                            other.data.close()
                    return
                if key.fileobj is listener:
                    asker, _ = listener.accept()
                    asker.settimeout(HELLO)
                    with suppress(OSError, ValueError):
                        number, streams, _, _ = socket.recv_fds(asker, 16, 3) if _is_ours(asker) else (b"", [], 0, 0)
                    if len(streams) != 3 or not number.isdigit():
                        asker.close()
                        continue
                    asker.settimeout(None)
                    selector.register(asker, selectors.EVENT_READ, begin(int(number), asker, streams))
                else:  # whoever waited there has gone, or we have told it of the end
                    selector.unregister(key.fileobj)
                    key.data.close()


def _is_ours(link: socket.socket) -> bool:
    """Whether a process of this user has the other end of a socket of this host."""
    return bool(struct.unpack("3i", link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[1] == os.getuid())


def finish(asker: socket.socket, streams: Sequence[int], code: int, why: str = "") -> None:
    """Tells who asked for a host of its end, which had its last word before; `why` it was not its own."""
    with suppress(OSError):
        if why:
            os.write(streams[2], f"{SAID}{why}\n".encode())
    for stream in streams[1:]:
        os.close(stream)
    with suppress(OSError):
        asker.send(str(code).encode())
        asker.shutdown(socket.SHUT_RDWR)


def _hand_over(door: str, number: str) -> int:
    """Gives our standard streams to the driver; the exit code of what had them."""
    with socket.socket(socket.AF_UNIX) as asked, suppress(OSError):
        asked.connect(f"\0{door}")
        if _is_ours(asked):  # else another user has taken the name of a driver that has ended
            socket.send_fds(asked, [number.encode()], [0, 1, 2])
            if code := asked.recv(16):
                return int(code)
    say(f"{SAID}its driver has ended")
    return LOST


if __name__ == "__main__":
    sys.exit(_hand_over(*sys.argv[1:]))
