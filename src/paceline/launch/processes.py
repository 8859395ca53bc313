"""Child processes: end with the parent, adopted orphans, causes of death."""

from __future__ import annotations

import ctypes
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from paceline.base.environment import memory_groups
from paceline.base.memory import machine_memory

_PDEATHSIG, _NAME, _SUBREAPER = 1, 15, 36  # PR_SET_... of linux/prctl.h
_DEAD = "ZX"  # states in proc(5): zombie (not reaped yet), and dead


def _prctl() -> Any:
    prctl = ctypes.CDLL(None).prctl
    prctl.argtypes = [ctypes.c_int] + [ctypes.c_ulong] * 4
    return prctl


def die_with_us() -> Callable[[], None]:
    """Returns a function that a child calls between fork and exec, so that it dies with the thread that forked it."""
    return partial(die_with, os.getpid(), _prctl())  # looked up before the fork: after it, only the call itself is safe


def die_with(parent: int, prctl: Any = None) -> None:
    """Makes the kernel kill this process when its parent ends. Exits at once if `parent` is not the parent any more."""
    (prctl or _prctl())(_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it died before the call
        os._exit(1)


def name_process(name: str, command: Sequence[str]) -> None:
    """Sets the name of this process that ``top`` shows (15 bytes), and the command line that ``ps`` and ``pgrep -f``
    use. The new command line is cut to the length of the original one.
    """
    text = ctypes.create_string_buffer(os.fsencode(name)[:15])
    _prctl()(_NAME, ctypes.addressof(text), 0, 0, 0)
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = int(fields[45]), int(fields[46])  # arg_start and arg_end of proc(5); zero if they are hidden
    words = b"\0".join(map(os.fsencode, command))[: max(0, end - start - 1)]
    if start:
        ctypes.memset(start, 0, end - start)
        ctypes.memmove(start, words, len(words))


def adopt_orphans() -> None:
    """Makes this process the parent of all its descendants whose own parent ends."""
    _prctl()(_SUBREAPER, 1, 0, 0, 0)


class Child:
    """A child process, started (`process`) or adopted. No other process can get its id before it is reaped."""

    def __init__(self, pid: int, process: subprocess.Popen[bytes] | None = None) -> None:
        self.pid, self.pidfd = pid, os.pidfd_open(pid)
        self._process = process  # kept, because Popen would reap the process if it were collected

    def signal(self, number: int) -> None:
        """Sends the process a signal, if it still exists."""
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.pidfd, number)

    def look(self, at: int) -> os.waitid_result | None:
        """News of the process: its end (WEXITED), a stop (WSTOPPED) or its continuation (WCONTINUED); None without."""
        try:
            return os.waitid(os.P_PIDFD, self.pidfd, at | os.WNOHANG | (os.WNOWAIT if at & os.WEXITED else 0))
        except ChildProcessError:  # it has ended, and `at` did not ask for that
            return None

    @property
    def status(self) -> int | None:
        """The exit status of the process, as in subprocess; None while it runs. The process is not reaped."""
        info = self.look(os.WEXITED)
        if info is None:
            return None
        return info.si_status if info.si_code == os.CLD_EXITED else -info.si_status

    def reap(self) -> None:
        """Waits for the end of the process and releases it."""
        if self._process is not None:
            self._process.wait()
        else:
            os.waitid(os.P_PIDFD, self.pidfd, os.WEXITED)
        os.close(self.pidfd)


def reap_strangers(sessions: Collection[int]) -> None:
    """Reaps adopted children that have ended: members of these sessions, but not their leaders."""
    for entry in filter(str.isdigit, os.listdir("/proc")):
        with suppress(OSError):
            pid, (_, (state, parent, _, session)) = int(entry), _stat(int(entry))
            if state == "Z" and int(parent) == os.getpid() and pid != int(session) in sessions:
                os.waitpid(pid, os.WNOHANG)


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
    """Whether a process has ended, even if it is not reaped yet."""
    try:
        return _stat(pid)[1][0] in _DEAD
    except OSError:
        return True


def _stat(pid: int) -> tuple[str, list[str]]:
    """The name of a process, and its state, parent, group and session. OSError: it does not exist."""
    file = os.open(f"/proc/{pid}/stat", os.O_RDONLY)
    try:
        head, _, rest = os.read(file, 4096).decode(errors="replace").rpartition(")")
    finally:
        os.close(file)
    return head.partition("(")[2], rest.split()[:4]


def end_sessions(sessions: Collection[int]) -> dict[int, str]:
    """Ends the processes that are left in sessions whose leaders have ended. Returns those that needed a signal, as
    name by process id.

    First it waits: loader children die with their parent, and multiprocessing's resource tracker, which
    ignores SIGTERM, still removes its dead owner's files from /dev/shm.
    """
    signalled: dict[int, str] = {}
    for number, patience in ((0, 1.0), (signal.SIGTERM, 1.0), (signal.SIGKILL, 5.0)):
        end = time.monotonic() + patience
        members = session_members(sessions)
        for pid in members if number else ():
            signalled[pid] = members[pid]
            with suppress(ProcessLookupError):
                os.kill(pid, number)
        while members and time.monotonic() < end:
            time.sleep(0.02)
            members = session_members(sessions)
        if not members:
            break
    return signalled


class MemoryKills:
    """The kernel's count of out-of-memory kills in a process's memory cgroup, of version 1 or 2."""

    def __init__(self, pid: int) -> None:
        self._folders = memory_groups(pid)
        self._before = self._count()

    def grown(self) -> bool:
        """Whether the kernel has killed a process there since this object was made."""
        return self._count() > self._before

    def room(self, sharing: int) -> int:
        """The bytes of memory for each of `sharing` workers if the process is in the same cgroup as this one; else the
        bytes for it alone.
        """
        is_same_group = memory_groups() == self._folders
        limits = [machine_memory()]
        for folder in {above for group in self._folders for above in (group, *group.parents)}:
            for name in ("memory.limit_in_bytes", "memory.max"):
                with suppress(OSError, ValueError):  # "max"
                    limits.append(int((folder / name).read_text()))
        return min(limits) // (sharing if is_same_group else 1)

    def _count(self) -> int:
        for file in (folder / name for folder in self._folders for name in ("memory.oom_control", "memory.events")):
            with suppress(OSError):
                count_match = re.search(r"^oom_kill (\d+)$", file.read_text(), re.MULTILINE)
                if count_match:
                    return int(count_match[1])
        return 0
