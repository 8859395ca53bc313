"""Reads the bytes sent to other hosts from the kernel's TCP statistics.

The statistics come over netlink (man 7 sock_diag), which needs no privilege. Workers do not count anything themselves,
and all of their traffic is included.
"""

from __future__ import annotations

import math
import os
import socket
import struct
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

_DIAG, _BY_FAMILY, _DUMP, _DONE = 4, 20, 0x301, 3  # of linux/netlink.h, linux/sock_diag.h
_ESTABLISHED, _INFO = 1 << 1, 2  # of the state's bits, the attribute that is struct tcp_info
_HEAD, _ASKED = struct.Struct("=IHHII"), struct.Struct("=BBBxI48x")
_SOCKET, _INODE = struct.Struct("=BBBB2H16s16s"), struct.Struct("=I")
_ACKED = 120  # where tcp_info has the bytes that the other side has acknowledged
_WAIT = 1.0
EVERY = 1.0  # seconds between two looks


class Traffic:
    """Counts the bytes that processes send to other hosts. Bytes that a connection sends between the last look and its
    end are missing.
    """

    def __init__(self) -> None:
        self._sent, self._local_addresses = Counter[str](), set[str]()
        self._known: dict[int, int] = {}  # bytes by inode
        self._due = 0.0

    def look(self, processes: Iterable[int], now: float = math.inf) -> tuple[dict[str, int], list[str]]:
        """The bytes by the address of the other host, and our addresses on these connections. They are counted again
        if the last count is long enough ago. Without an answer of the kernel, nothing is counted.
        """
        if now >= self._due:
            self._due = now + EVERY
            self._count(processes)
        return dict(self._sent), sorted(self._local_addresses)

    def _count(self, processes: Iterable[int]) -> None:
        inodes, known = {inode for pid in processes for inode in _sockets(pid)}, self._known
        self._known = {}
        with suppress(OSError):
            for inode, local, remote, count in connections() if inodes else ():
                if inode in inodes and local != remote:
                    self._known[inode] = count
                    self._sent[remote] += max(0, count - known.get(inode, 0))
                    self._local_addresses.add(local)


def _sockets(pid: int) -> Iterator[int]:
    with suppress(OSError):
        for file in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):
                if (name := os.readlink(file)).startswith("socket:["):
                    yield int(name[8:-1])


def connections() -> Iterator[tuple[int, str, str, int]]:
    """(inode, local address, remote address, acknowledged bytes) of each TCP connection. Raises OSError."""
    for family in (socket.AF_INET, socket.AF_INET6):
        with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _DIAG) as netlink:
            netlink.settimeout(_WAIT)
            request = _ASKED.pack(family, socket.IPPROTO_TCP, 1 << (_INFO - 1), _ESTABLISHED)
            netlink.send(_HEAD.pack(_HEAD.size + len(request), _BY_FAMILY, _DUMP, 1, 0) + request)
            over = False
            while not over:
                reply, offset = netlink.recv(1 << 18), 0
                while offset < len(reply) and not over:
                    size, kind, *_ = _HEAD.unpack_from(reply, offset)
                    over = kind != _BY_FAMILY
                    if not over:
                        yield from _connection(reply[offset + _HEAD.size : offset + size])
                    offset += (size + 3) & ~3


def _connection(message: bytes) -> Iterator[tuple[int, str, str, int]]:
    """Reads a struct inet_diag_msg and its attributes."""
    family, _, _, _, _, _, local, remote = _SOCKET.unpack_from(message)
    (inode,), offset = _INODE.unpack_from(message, 68), 72
    while offset + 4 <= len(message):
        size, kind = struct.unpack_from("=HH", message, offset)
        if kind == _INFO and size >= 4 + _ACKED + 8:
            (acked,) = struct.unpack_from("=Q", message, offset + 4 + _ACKED)
            yield inode, _address(family, local), _address(family, remote), max(0, acked - 1)  # the greeting counts one
        offset += max(4, (size + 3) & ~3)


def _address(family: int, raw: bytes) -> str:
    """The text of an address; an IPv4 address inside of an IPv6 one counts as IPv4."""
    if family == socket.AF_INET6 and raw.startswith(bytes(10) + b"\xff\xff"):
        family, raw = socket.AF_INET, raw[12:]
    return socket.inet_ntop(family, raw[:4] if family == socket.AF_INET else raw)
