"""Processes that die with us: parent death signals, sessions, out-of-memory kills. No torch."""

from __future__ import annotations

import ctypes
import os
import re
import signal
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from pathlib import Path

from paceline.observe.memory import whole_memory

PR_SET_PDEATHSIG = 1  # linux/prctl.h
_DEAD = "ZX"  # states in proc(5): ended and not yet reaped, and gone


def die_with_us() -> Callable[[], None]:
    """What a child calls between fork and exec so that it is killed when the thread that forked it ends."""
    parent = os.getpid()
    prctl = ctypes.CDLL(None).prctl  # looked up here: after the fork only the bare call is safe
    prctl.argtypes = [ctypes.c_int] + [ctypes.c_ulong] * 4

    def prepare() -> None:
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:  # it died before the call
            os._exit(1)

    return prepare


def session_members(sessions: Collection[int]) -> dict[int, str]:
    """The living processes of the sessions: name by process id."""
    members = {}
    for entry in filter(str.isdigit, os.listdir("/proc")):
        with suppress(OSError):
            name, (state, _, _, session) = _stat(int(entry))
            if state not in _DEAD and int(session) in sessions:
                members[int(entry)] = name
    return members


def ended(pid: int) -> bool:
    """Whether a process has, also where nobody has reaped it yet."""
    try:
        return _stat(pid)[1][0] in _DEAD
    except OSError:
        return True


def _stat(pid: int) -> tuple[str, list[str]]:
    """A process's name; and its state, parent, group and session. OSError: there is none."""
    head, _, rest = Path("/proc", str(pid), "stat").read_text(errors="replace").rpartition(")")
    return head.partition("(")[2], rest.split()[:4]


def end_sessions(sessions: Collection[int]) -> dict[int, str]:
    """Ends what is left in sessions whose leaders ended or were killed; returns what had to be told to end.

    First it waits: loader children die with their parent, and multiprocessing's resource tracker, which
    ignores SIGTERM, still removes its dead owner's files from /dev/shm.
    """
    told: dict[int, str] = {}
    for number, patience in ((0, 1.0), (signal.SIGTERM, 1.0), (signal.SIGKILL, 5.0)):
        end = time.monotonic() + patience
        members = session_members(sessions)
        for pid in members if number else ():
            told[pid] = members[pid]
            with suppress(ProcessLookupError):
                os.kill(pid, number)
        while members and time.monotonic() < end:
            time.sleep(0.02)
            members = session_members(sessions)
        if not members:
            break
    return told


class MemoryKills:
    """The kernel's count of out-of-memory kills in a process's memory cgroup, of version 1 or 2."""

    def __init__(self, pid: int) -> None:
        self._files: list[Path] = []
        for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers and "memory" not in controllers.split(","):
                continue
            mount, name = ("memory", "memory.oom_control") if controllers else ("", "memory.events")
            # A container may see its own part only, at the mount itself.
            for inside in (path.lstrip("/"), ""):
                self._files.append(Path("/sys/fs/cgroup", mount, inside, name))
        self._before = self._count()

    def grown(self) -> bool:
        """Was anything killed there since this object was made?"""
        return self._count() > self._before

    def room(self, sharing: int) -> int:
        """Bytes for each of so many workers of this process that are in the same cgroup; for this one alone, if it is
        in another.
        """
        mine = MemoryKills(os.getpid())._files == self._files
        limits = [whole_memory()]
        for folder in {above for file in self._files for above in file.parents if "cgroup" in above.parts}:
            for name in ("memory.limit_in_bytes", "memory.max"):
                with suppress(OSError, ValueError):  # "max"
                    limits.append(int((folder / name).read_text()))
        return min(limits) // (sharing if mine else 1)

    def _count(self) -> int:
        for file in self._files:
            with suppress(OSError):
                found = re.search(r"^oom_kill (\d+)$", file.read_text(), re.MULTILINE)
                if found:
                    return int(found[1])
        return 0
