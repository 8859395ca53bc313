"""The journal: what happened in a run, one JSON object a line, in ``RUN/journal.jsonl``. No torch.

Every line is appended by one ``write`` system call to a file opened with O_APPEND, so the agent and worker 0
may both write, and what was written survives the death of its process. A line has ``at`` (Unix seconds) and
``event``; the other fields belong to the event. The first line names the version of the format.
"""

from __future__ import annotations

import json
import math
import os
import time
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paceline.errors import UsageError

VERSION = 1
NAME = "journal.jsonl"
Event = dict[str, Any]


def plain(value: Any) -> Any:
    """`value` as strict JSON can hold it: tensors and arrays as numbers or lists; NaN, infinity as null."""
    if value is None or isinstance(value, int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, str):  # a file name may hold bytes that are not UTF-8
        return value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, Mapping):
        return {str(plain(key)): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [plain(item) for item in value]
    if hasattr(value, "tolist"):  # torch and numpy, without importing them
        return plain(value.tolist())
    return plain(str(value))


class Journal:
    """Appends events to the journal of a run folder, which is made if missing; without a folder does nothing.

    A journal that cannot be written (a full disk) warns once and does not end the training: the checkpoint,
    which cannot be written either, does.
    """

    def __init__(self, folder: Path | None) -> None:
        self._fd: int | None = None
        self._torn = self._warned = False
        if folder is None:
            return
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._path = folder / NAME
        self._fd = os.open(self._path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o600)
        end = os.lseek(self._fd, 0, os.SEEK_END)
        if end == 0:
            self.write("journal", version=VERSION)
        else:
            self._torn = os.pread(self._fd, 1, end - 1) != b"\n"  # an earlier crash in mid-write

    def write(self, event: str, /, **fields: Any) -> None:
        """Appends one event. Values may be anything `plain` turns into JSON."""
        if self._fd is None:
            return
        text = json.dumps(plain({"at": time.time(), "event": event, **fields}), ensure_ascii=False, allow_nan=False)
        line = b"\n" * self._torn + text.encode() + b"\n"
        try:
            self._torn = os.write(self._fd, line) < len(line)
        except OSError as error:
            if not self._warned:
                self._warned = True
                what = f"{self._path} cannot be written ({error.strerror})"
                then = "the training goes on, its report will have gaps; free space on that disk"
                warnings.warn(f"{what}: {then}", stacklevel=2)

    def last_step(self, trainer: int) -> int:
        """The last step of a trainer that was written here."""
        steps = effective_steps(read_journal(self._path.parent)) if self._fd is not None else []
        return max((event["step"] for event in steps if event.get("trainer") == trainer), default=0)

    def close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


def read_journal(folder: Path) -> list[Event]:
    """All events of a run, oldest first, without the version line; none where there is no journal.

    Lines torn by a crash in mid-write are skipped. UsageError: the journal is of a later version.
    """
    path = folder / NAME
    events: list[Event] = []
    for line in path.read_bytes().split(b"\n") if path.exists() else ():
        try:
            event = json.loads(line)
        except ValueError:
            continue
        if not isinstance(event, dict) or "event" not in event:
            continue
        if event["event"] != "journal":
            events.append(event)
        elif event.get("version", VERSION) > VERSION:
            what = f"{path} is of version {event['version']}, this Paceline reads up to {VERSION}"
            raise UsageError(what, "install a newer Paceline")
    return events


def effective_steps(events: list[Event], kind: str = "step") -> list[Event]:
    """The events of a kind that count: an attempt resumed from step k supersedes what was after k."""
    kept: list[Event] = []
    for event in events:
        if event["event"] == "start":
            resumed = event.get("resumed_from") or 0
            kept = [earlier for earlier in kept if (earlier.get("step") or 0) <= resumed]
        elif event["event"] == kind:
            kept.append(event)
    return kept
