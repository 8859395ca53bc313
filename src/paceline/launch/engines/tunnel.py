"""Connects hosts that can only be reached over ssh.

Each host has a loopback address of its own in the run, and its services listen at that address. A process that connects
to another host first asks for a way (`paceline.base.environment.way_to`): the agent of its own host then listens at
that address and port itself. The agent forwards the data over a socket that ssh forwards to the launcher, and the
launcher forwards it over another one to the agent of the other host. That agent connects only to programs that listen
at exactly this address. All these sockets are files that only one user may open; no port is needed.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import tempfile
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from paceline.base.environment import REFUSED, WAY, enter_tunnel
from paceline.errors import UsageError

MOST_HOSTS = 254
PIECE = 1 << 16  # bytes that are forwarded at a time
PATIENCE = 20.0  # seconds in which a way must open, and in which it must be used
MAPPED = "0000000000000000FFFF0000"  # prefix of an IPv4 address in /proc/net/tcp6
LISTENS = "0A"  # the state of a listening socket in /proc/net/tcp

Reader = asyncio.StreamReader
Writer = asyncio.StreamWriter
Ends = tuple[Reader, Writer]


class Tunnel:
    """The launcher's side: connects the tunnels of all hosts with each other. Call `close` at the end."""

    def __init__(self, names: list[str]) -> None:
        if len(names) > MOST_HOSTS:
            what = f"--tunnel supports at most {MOST_HOSTS} hosts"
            raise UsageError(what, "open the ports between the hosts instead")
        net = f"127.{64 + secrets.randbelow(190)}.{secrets.randbelow(256)}"
        self.addresses = {name: f"{net}.{number}" for number, name in enumerate(names, 1)}
        self._folder = tempfile.TemporaryDirectory(prefix="paceline-", dir="/tmp")  # a socket's path must be short
        self._doors: dict[str, Path] = {}  # by address: the socket that ssh forwards to that host
        self._ways: dict[str, dict[str, str]] = {}
        _serve((Path(self._folder.name, "all"), self._pass))

    def options(self, name: str) -> list[str]:
        """The options of ssh that open a host's tunnel. From now on the host is reached by this connection."""
        number = secrets.token_hex(8)
        door = Path(self._folder.name, number)
        goes, comes = f"/tmp/paceline-{number}-go", f"/tmp/paceline-{number}-come"
        self._ways[name] = {"own": self.addresses[name], "goes": goes, "comes": comes}
        self._doors[self.addresses[name]] = door
        return ["-o", "ExitOnForwardFailure=yes", "-R", f"{goes}:{self._folder.name}/all", "-L", f"{door}:{comes}"]

    def arguments(self, name: str) -> dict[str, str]:
        """The arguments for `inside` on that host."""
        return self._ways[name]

    async def _pass(self, reader: Reader, writer: Writer) -> None:
        request = await reader.readline()
        onward = await asyncio.open_unix_connection(self._doors[request.decode().split()[0]])
        onward[1].write(request)
        await _join((reader, writer), onward)

    def close(self) -> None:
        """Removes the folder of sockets."""
        self._folder.cleanup()


@contextmanager
def inside(address: str, goes: str, comes: str) -> Iterator[None]:
    """The host's side, in its agent. Its socket files are removed at the end."""
    ways, asked = _Ways(address, goes), f"{comes}-ask"
    try:
        _serve((Path(comes), ways.arrive), (Path(asked), ways.ask))
        enter_tunnel(address, asked)
        yield
    finally:
        for path in (goes, comes, asked):
            with suppress(OSError):
                os.unlink(path)


class _Ways:
    """Serves the tunnel in a host's agent: outgoing connections to other hosts, and incoming ones from them."""

    def __init__(self, address: str, goes: str) -> None:
        self._address, self._goes = address, goes
        self._opening = asyncio.Lock()
        self._open: dict[tuple[str, int], asyncio.Server] = {}
        self._begun: dict[tuple[str, int], list[Ends]] = {}  # connections that were asked for and are not used yet

    async def ask(self, reader: Reader, writer: Writer) -> None:
        """Prepares a connection of a local process to ``ADDRESS PORT``. The answer says whether a program listens
        there; with ``later`` it need not listen yet.
        """
        host, number, *later = (await reader.readline()).decode().split()
        at, answer = (host, int(number)), REFUSED
        with suppress(OSError):
            if not later:
                ends = await self._far(*at)
                self._begun.setdefault(at, []).append(ends)
                asyncio.get_running_loop().call_later(PATIENCE, self._expire, at, ends)
            async with self._opening:
                if at not in self._open:
                    leave = partial(_guarded, partial(self._leave, at))
                    self._open[at] = await asyncio.start_server(leave, *at, limit=PIECE)
            answer = WAY
        writer.write(answer)
        await writer.drain()

    def _expire(self, at: tuple[str, int], ends: Ends) -> None:
        if ends in self._begun[at]:
            self._begun[at].remove(ends)
            ends[1].close()

    async def _far(self, host: str, port: int) -> Ends:
        """Connects to a listener on another host. ConnectionError: no program listens. OSError: the tunnel broke."""
        reader, writer = await asyncio.open_unix_connection(self._goes)
        writer.write(f"{host} {port}\n".encode())
        if await asyncio.wait_for(reader.read(1), PATIENCE) != WAY:
            writer.close()
            raise ConnectionRefusedError
        return reader, writer

    async def _leave(self, at: tuple[str, int], reader: Reader, writer: Writer) -> None:
        if not _is_ours(writer.get_extra_info("peername"), writer.get_extra_info("sockname")):
            return
        begun = self._begun.get(at)
        await _join((reader, writer), begun.pop() if begun else await self._far(*at))

    async def arrive(self, reader: Reader, writer: Writer) -> None:
        """Connects an incoming connection to the local listener that it names."""
        host, number = (await reader.readline()).decode().split()
        if host == self._address and _listens(host, int(number)):
            listener = await asyncio.open_connection(host, int(number))
            writer.write(WAY)
            await _join((reader, writer), listener)


def _listens(host: str, port: int) -> bool:
    """Whether a socket listens at exactly that address. Sockets on all addresses are not meant for other hosts."""
    at = _in_table(host, port)
    return any(line.split()[1:4:2] == [at, LISTENS] for line in Path("/proc/net/tcp").read_text().splitlines())


def _is_ours(peer: tuple[str, int], local: tuple[str, int]) -> bool:
    """Whether a process of this user made the connection between these local addresses: other users have no access."""
    ends = [_in_table(*peer), _in_table(*local)]
    wanted = [ends, [MAPPED + end for end in ends]]  # the store of torch connects with IPv6 sockets
    lines = (line.split() for name in ("tcp", "tcp6") for line in _table(name))
    return any(words[1:3] in wanted and int(words[7]) == os.getuid() for words in lines)


def _table(name: str) -> list[str]:
    """The lines of a socket table of this host; empty if the kernel does not have the table."""
    path = Path("/proc/net", name)
    return path.read_text().splitlines()[1:] if path.exists() else []


def _in_table(host: str, port: int) -> str:
    """Formats an address as in /proc/net/tcp."""
    return f"{bytes(map(int, reversed(host.split('.')))).hex().upper()}:{port:04X}"


async def _join(one: Ends, other: Ends) -> None:
    """Copies bytes in both directions until both have ended."""
    try:
        await asyncio.gather(_hand_on(one[0], other[1]), _hand_on(other[0], one[1]))
    finally:
        other[1].close()


async def _hand_on(reader: Reader, writer: Writer) -> None:
    while data := await reader.read(PIECE):
        writer.write(data)
        await writer.drain()
    writer.write_eof()


async def _guarded(call: Callable[[Reader, Writer], Awaitable[None]], reader: Reader, writer: Writer) -> None:
    """Closes a connection after its handler, also if the peer asks for a missing listener or sends bad requests."""
    try:
        with suppress(OSError, TimeoutError, ValueError, LookupError):
            await call(reader, writer)
    finally:
        writer.close()


def _serve(*served: tuple[Path, Callable[[Reader, Writer], Coroutine[Any, Any, None]]]) -> None:
    """Serves these Unix sockets, which only this user may open, in a thread of their own."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="paceline-tunnel", daemon=True).start()
    before = os.umask(0o177)
    try:
        for path, call in served:
            serving = asyncio.start_unix_server(partial(_guarded, call), path, limit=PIECE)
            asyncio.run_coroutine_threadsafe(serving, loop).result(PATIENCE)
    finally:
        os.umask(before)
