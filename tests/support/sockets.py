"""Which sockets the processes of a run listen on, as the kernel tells."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import psutil

LISTENS = "0A"  # the state of a socket in /proc/net/tcp
ACCEPTS = 1 << 16  # the flag of one in /proc/net/unix (__SO_ACCEPTCON)


class Listening(NamedTuple):
    """A socket that somebody may connect to: `family` is tcp, tcp6 or unix, `address` HOST:PORT or a name; `pid` is a
    process that has it, and `command` its command line.
    """

    family: str
    address: str
    pid: int
    command: str


def descriptors(pid: int) -> list[str]:
    """What the open files of a process are."""
    found = []
    with suppress(OSError):
        for link in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):
                found.append(os.readlink(link))
    return found


def listening(pids: Iterable[int]) -> set[Listening]:
    """The listening sockets of these processes, each of the host, or network namespace, that it is in."""
    found = set()
    for pid in pids:
        inodes = {name[8:-1] for name in descriptors(pid) if name.startswith("socket:[")}
        try:
            command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
            tables = {family: Path(f"/proc/{pid}/net/{family}").read_text() for family in ("tcp", "tcp6", "unix")}
        except OSError:
            continue
        for family, table in tables.items():
            for line in table.splitlines()[1:]:
                words = line.split()
                if family == "unix":
                    if int(words[3], 16) & ACCEPTS and words[6] in inodes:
                        found.add(Listening(family, words[7] if len(words) > 7 else "", pid, command))
                elif words[3] == LISTENS and words[9] in inodes:
                    found.add(Listening(family, _address(words[1]), pid, command))
    return found


def _address(text: str) -> str:
    host, port = text.split(":")
    data = b"".join(bytes.fromhex(word)[::-1] for word in re.findall("." * 8, host))
    return f"{socket.inet_ntop(socket.AF_INET if len(data) == 4 else socket.AF_INET6, data)}:{int(port, 16)}"


def family_of(pid: int) -> list[int]:
    """A process and all that it has started."""
    try:
        return [pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))]
    except psutil.NoSuchProcess:
        return []
