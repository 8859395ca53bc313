"""Keeps checkpoints in memory for `--mirror`: the folder, and its server for the other hosts."""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from paceline.base.environment import MIRROR, MIRROR_AT
from paceline.base.handshake import make_key
from paceline.checkpoint.host_memory import MemoryServer
from paceline.launch.options import LaunchOptions

MEMORY = Path("/dev/shm")
PREFIX = "paceline-mirror-"
# Waits for the end of its standard input, which comes however this process ends. Workers may write a moment longer.
_REMOVE = 'read -r _; for _ in 1 2 3 4 5; do rm -rf -- "$1" && exit; sleep 0.2; done'


@contextmanager
def mirror(steps: int | None) -> Iterator[dict[str, str]]:
    """Creates the folder of the mirror in memory, and yields the environment variables that name it to workers (none
    without `steps`). The folder is removed afterwards; if this process is killed, a helper process removes it. If both
    are killed, the next run removes it.
    """
    remove_abandoned()
    if steps is None:
        yield {}
        return
    folder = MEMORY / f"{PREFIX}{os.getpid()}-{secrets.token_hex(8)}"
    made = folder.with_name(f".{folder.name}")  # renamed once it is locked, so that others never see it unlocked
    made.mkdir(mode=0o700)
    lock = _lock(made)
    made.rename(folder)
    command = ["sh", "-c", _REMOVE, "sh", str(folder)]
    none = subprocess.DEVNULL
    remover = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=none, stderr=none, start_new_session=True, cwd="/"
    )
    try:
        yield {MIRROR: f"{steps}:{folder}"}
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        remover.stdin.close()  # type: ignore[union-attr]
        remover.wait()
        if lock is not None:
            os.close(lock)


@contextmanager
def shared(options: LaunchOptions, token: Callable[[], bytes]) -> Iterator[LaunchOptions]:
    """Serves the folder of the mirror to the run's other hosts, and yields the options of workers that use it. Without
    a mirror, or without other hosts, it does nothing.
    """
    _, _, folder = options.environment.get(MIRROR, "").partition(":")
    if not folder or (options.listen is None and options.join is None):
        yield options
        return
    server = MemoryServer(Path(folder), options.address, lambda salt: make_key(token(), salt))
    try:
        yield replace(options, environment={**options.environment, MIRROR_AT: ":".join(map(str, server.at))})
    finally:
        server.close()


def remove_abandoned() -> None:
    """Removes mirrors that no process has locked. The locks hold across all containers that share the memory."""
    for path in MEMORY.glob(f"{PREFIX}*"):
        lock = _lock(path)
        if lock is not None:
            shutil.rmtree(path, ignore_errors=True)
            os.close(lock)


def _lock(folder: Path) -> int | None:
    """Locks a folder; the descriptor holds the lock until it is closed. None: another process or user has it."""
    with suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(descriptor)
            return None
        return descriptor
    return None
