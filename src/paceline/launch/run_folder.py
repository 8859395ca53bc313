"""Notices a run folder that disappears during a run, and recreates it."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from paceline.base.journal import Journal, replace_file
from paceline.base.schema import read_file
from paceline.base.tracebacks import short
from paceline.checkpoint.lock import hold_lock
from paceline.checkpoint.storage import is_url
from paceline.errors import LaunchError
from paceline.launch.coordinator_process import ADDRESS
from paceline.launch.output import Output
from paceline.launch.serving import PAGE
from paceline.team.auth import NAME as TOKEN
from paceline.team.auth import keep_token
from paceline.team.reading_key import KEY, TARGETS, reading_key

PAUSE = 1.0  # seconds between two looks
SMALL = (ADDRESS, PAGE, TARGETS, KEY)  # files that are restored with their last content
LOCK = "lock"


class RunFolder:
    """The run folder of an agent. `say` prints a line; `output` writes the logs; `checkpoints`: where else they go.

    The token, the addresses and the journal are in memory or in open files, so they can be written again. Earlier logs
    and checkpoints are not, and the printed line says so.
    """

    def __init__(
        self,
        folder: Path,
        token: bytes,
        journal: Journal,
        output: Output,
        checkpoints: str | None,
        say: Callable[..., None],
    ) -> None:
        self._folder, self._token, self._journal, self._output, self._say = folder, token, journal, output, say
        elsewhere = checkpoints is not None and is_url(checkpoints)
        self._checkpoints = None if elsewhere else Path(checkpoints) if checkpoints else folder / "checkpoints"
        self._held = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)  # kept open, so that its inode number is not reused
        self._contents: dict[str, tuple[int, bytes]] = {}  # of small files: time of the last change, and content
        self._locks = self._is_locked_by_us()
        self._lock: int | None = None  # the lock of a folder that was created again
        self._seen: int | None = None  # a descriptor of the checkpoint folder, once it exists
        self._failed = False
        self._due = 0.0

    def _is_locked_by_us(self) -> bool:
        with suppress(OSError):
            return (self._folder / LOCK).read_text().partition(" ")[0] == str(os.getpid())
        return False

    def look(self, now: float) -> None:
        """Checks the folder if the last check is long enough ago."""
        if now >= self._due:
            self._due = now + PAUSE
            self.restore()

    def restore(self) -> None:
        """Writes missing files of the run folder again, and reports it in one line."""
        try:
            lines = self._restore()
        except (OSError, LaunchError) as error:
            why = getattr(error, "strerror", None) or str(error)
            lines = [] if self._failed else [f"the run folder {short(self._folder)} cannot be written ({why})"]
            lines = [f"{line}; training continues without its journal, logs and report" for line in lines]
            self._failed = True
        for line in lines:
            self._say(line, always=True)

    def _restore(self) -> list[str]:
        lines, where = list[str](), short(self._folder)
        if gone := not _is_same(self._folder, self._held):
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._folder.chmod(0o700)  # whoever has written to it first has created it for everybody
            os.close(self._held)
            self._held = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY)
            then = "training continues, and the journal, token and logs are written there again"
            text = f"the run folder {where} was deleted or moved: {then}; earlier logs and checkpoints are missing"
            lines.append(text)
        if self._locks and not (self._folder / LOCK).exists():
            self._lock = hold_lock(self._folder)
        files = self._restore_token() + self._restore_small()
        if self._journal.put_back():
            files.append("journal.jsonl (complete)")
        if self._output.reopen():
            files.append("logs (without earlier lines)")
        if files and not gone:
            lines.append(f"files of the run folder {where} were deleted or changed; written again: {', '.join(files)}")
        if self._lost_checkpoints() and not gone:
            checkpoint_folder = short(self._checkpoints or self._folder)
            what = f"the folder {checkpoint_folder} was deleted or moved"
            lines.append(f"{what}: training continues, but earlier checkpoints are missing")
        self._failed = False
        return lines

    def _restore_token(self) -> list[str]:
        path = self._folder / TOKEN
        with suppress(OSError):
            if read_file(path).strip() == self._token and not stat.S_IMODE(path.stat().st_mode) & 0o077:
                return []
        keep_token(self._folder, self._token)
        return [TOKEN]

    def _restore_small(self) -> list[str]:
        restored = []
        for name in SMALL:
            path, (written, content) = self._folder / name, self._contents.get(name, (0, b""))
            try:
                now = path.stat().st_mtime_ns
                if now != written:
                    self._contents[name] = now, read_file(path)
            except FileNotFoundError:
                if written:
                    restored.append(name)
                    replace_file(path, content)
        if KEY in self._contents and self._contents[KEY][1].decode(errors="replace").strip() != reading_key(
            self._folder
        ):
            restored.append(KEY)
        return restored

    def _lost_checkpoints(self) -> bool:
        """Whether the folder of checkpoints has been deleted, or replaced by another one."""
        if self._checkpoints is None or (self._seen is not None and _is_same(self._checkpoints, self._seen)):
            return False
        lost = self._seen is not None
        if self._seen is not None:
            os.close(self._seen)
            self._seen = None
        if self._checkpoints.is_dir():
            self._seen = os.open(self._checkpoints, os.O_RDONLY | os.O_DIRECTORY)
        return lost

    def close(self) -> None:
        """Closes the open folders and releases a lock that it took."""
        for descriptor in (self._held, self._seen, self._lock):
            if descriptor is not None:
                os.close(descriptor)


def _is_same(path: Path, descriptor: int) -> bool:
    """Whether a path still leads to an open file or folder."""
    try:
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    except OSError:
        return False
