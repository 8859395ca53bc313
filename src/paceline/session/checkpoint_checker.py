"""What a spare does while it waits: it reads each new checkpoint again, so that the run learns of a damaged one.

A checkpoint is verified when a run resumes from it. If it was damaged, because a disk or a memory module was, the work
since an earlier one is lost. A spare finds that out while the run can still write another one.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from paceline.base.environment import World
from paceline.checkpoint.files import MANIFEST, UNFINISHED, Checkpoint, list_checkpoints, open_checkpoint
from paceline.checkpoint.storage import Folder, Storage
from paceline.errors import CheckpointError

LOOK = 1.0  # seconds between two looks for a new checkpoint


@contextmanager
def checking(storage: Storage | None, world: World) -> Iterator[None]:
    """Reads new checkpoints in a thread, at the lowest priority, and tells the agent of each one that was read.

    Only those in a folder are read: reading from an object store may cost money. Of several spares that see the same
    folder, one reads.
    """
    ends = threading.Event()
    if isinstance(storage, Folder):
        threading.Thread(target=_run, args=(storage, world, ends), name="paceline-checks", daemon=True).start()
    try:
        yield
    finally:
        ends.set()


def _run(storage: Folder, world: World, ends: threading.Event) -> None:
    with suppress(OSError, AttributeError):  # not allowed, or not on this system
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
    newest = -1
    with contextlib.ExitStack() as held:
        is_reader = False
        while not ends.wait(LOOK):
            is_reader = is_reader or becomes_reader(storage, held)
            read = read_newest(storage, newest, ends.is_set) if is_reader else None
            if read is not None:
                newest, damage, seconds = read
                world.tell("checked", step=newest, damage=damage, seconds=seconds)


def becomes_reader(storage: Folder, held: contextlib.ExitStack) -> bool:
    """Whether no other process reads the checkpoints of this folder; then none does until `held` is closed."""
    import fcntl  # not on every system on which a world of one trains

    try:
        folder = os.open(storage.path, os.O_RDONLY)
    except OSError:  # the folder is created with the first checkpoint
        return False
    try:
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(folder)
        return False
    held.callback(os.close, folder)
    return True


def read_newest(storage: Folder, after: int, ends: Callable[[], bool] = lambda: False) -> tuple[int, str, float] | None:
    """Reads the newest finished checkpoint if it is of a later step than `after`, from the disk where the system allows
    it. Returns its step, a description of the damage (empty: intact) and the seconds that reading took. Returns None if
    no such checkpoint exists, if it was removed while it was read, or if `ends()` is true.
    """
    began = time.monotonic()
    try:
        for step, folder in list_checkpoints(storage):
            if step <= after or ends():
                return None
            storage.drop_cached(folder)
            opened = open_checkpoint(storage, step, folder)
            if isinstance(opened, Checkpoint):
                return step, "", time.monotonic() - began
            if opened != UNFINISHED:
                opened = open_checkpoint(storage, step, folder)  # again: it may have been removed, or replaced
                damage = "" if isinstance(opened, Checkpoint) else opened
                return (step, damage, time.monotonic() - began) if MANIFEST in storage.sizes(folder) else None
    except (CheckpointError, OSError):  # cannot be listed, or a newer Paceline wrote it: nothing is known of its state
        return None
    return None
