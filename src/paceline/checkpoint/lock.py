"""Locks a run folder for one run."""

from __future__ import annotations

import os
import socket
import sys
import time
from pathlib import Path

from paceline.base.console import in_one_line
from paceline.errors import LaunchError

PATIENCE = 5.0  # seconds for which forked children of a dead holder may keep its lock


def hold_lock(folder: Path, patience: float = 0.0) -> int:
    """Creates `folder` if it is missing (mode 0700) and locks it for this process.

    The lock (flock on ``folder/lock``) lasts until the returned descriptor is closed or the process ends. Raises
    LaunchError if another process still holds it after `patience` seconds; a file server may keep the lock of a lost
    host. On Windows the folder is not locked.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    fd = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o600)  # not inherited across exec
    if sys.platform == "win32":
        return fd
    import fcntl

    end, late = (time.monotonic() + seconds for seconds in (PATIENCE, patience))
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            pid, _, host = os.pread(fd, 200, 0).decode().strip().partition(" ")
            ending = host == socket.gethostname() and not os.path.exists(f"/proc/{pid}")
            if time.monotonic() < (max(end, late) if ending else late):
                time.sleep(0.05)
                continue
            os.close(fd)
            what = f"the run folder {in_one_line(folder)} is in use by process {pid or '?'} on {host or '?'}"
            raise LaunchError(what, "wait for that run to end, stop it, or use another --run-dir") from None
    os.ftruncate(fd, 0)
    os.pwrite(fd, f"{os.getpid()} {socket.gethostname()}\n".encode(), 0)
    return fd
