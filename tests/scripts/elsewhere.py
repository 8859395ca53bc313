"""Runs a script, or the command ``paceline``, without what a system other than Linux lacks: `elsewhere.py SYSTEM SCRIPT
ARGUMENTS`. What Python and torch themselves do there is not played: they are imported before.
"""

from __future__ import annotations

import asyncio
import ctypes
import faulthandler
import multiprocessing
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import rich.console
import safetensors.torch
import torch
import torch._dynamo

IMPORTED = (asyncio, multiprocessing, subprocess, rich.console, safetensors.torch, torch._dynamo)
MODULES = {"darwin": set[str](), "win32": {"resource", "fcntl", "termios", "pwd", "grp", "tty", "pty"}}
NAMES: dict[str, dict[ModuleType | type, str]] = {
    "darwin": {
        os: "pidfd_open memfd_create MFD_CLOEXEC sched_getaffinity sched_setaffinity posix_fallocate pipe2",
        signal: "SIGRTMIN SIGRTMAX pidfd_send_signal",
        select: "epoll",
        socket: "SOCK_CLOEXEC",
    },
    "win32": {
        os: "fork register_at_fork sysconf getuid getpgid setsid killpg pread pwrite setpriority PRIO_PROCESS fchmod "
        "mkfifo statvfs O_DIRECTORY O_CLOEXEC O_NOFOLLOW",
        signal: "SIGUSR1 SIGUSR2 SIGHUP SIGKILL SIGCONT SIGSTOP SIGCHLD pthread_kill",
        select: "poll",
        socket: "AF_UNIX",
        faulthandler: "register",
    },
}
HIDDEN = ("/proc", "/dev/shm", "/sys")


class Hider:
    """Finds no module of another system."""

    def __init__(self, names: set[str]) -> None:
        self.names = names

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name in self.names:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return None


def hiding(call: Callable[..., Any]) -> Callable[..., Any]:
    def hidden(path: Any, *more: Any, **named: Any) -> Any:
        if str(path).startswith(HIDDEN):
            raise FileNotFoundError(2, "No such file or directory", path)
        return call(path, *more, **named)

    return hidden


def no_library(name: str | None, *more: Any, **named: Any) -> Any:
    """As in Windows, which takes no None; elsewhere libraries are called otherwise."""
    raise TypeError("LoadLibrary() argument 1 must be str, not None") if name is None else OSError(name)


def hide(system: str) -> None:
    for kind in ("darwin", "win32") if system == "win32" else ("darwin",):
        for owner, names in NAMES[kind].items():
            for name in names.split():
                delattr(owner, name)
    for name in MODULES[system]:
        sys.modules.pop(name, None)
    sys.meta_path.insert(0, Hider(MODULES[system]))  # type: ignore[arg-type]
    for call in ("stat", "lstat", "listdir", "readlink", "scandir", "open"):
        setattr(os, call, hiding(getattr(os, call)))
    sys.addaudithook(lambda event, given: event == "open" and isinstance(given[0], str) and hiding(str)(given[0]))
    ctypes.CDLL = no_library  # type: ignore[assignment, misc]
    sys.platform = system


if __name__ == "__main__":
    system, program, *sys.argv[1:] = sys.argv[1:]
    hide(system)
    for name in [name for name in sys.modules if name.partition(".")[0] == "paceline"]:  # torch imports a part
        del sys.modules[name]
    sys.argv[0] = program
    sys.path.insert(0, os.getcwd())
    if program == "paceline":
        runpy.run_module("paceline", run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(program, run_name="__main__")
