"""The journal: what happened in a run, one JSON object per line.

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
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from paceline.base.schema import open_file
from paceline.errors import FormatError, UsageError

VERSION = 1
NAME = "journal.jsonl"
BLOCK = 1 << 18  # bytes that are read at a time from the end
THIN = 4 << 20  # bytes of a journal, after each of which the records of its steps become half as many
FIRST, RAREST = 0.25, 60.0  # seconds between two of them that are added up: at first, and at most
TOGETHER = 2048  # steps in one, at most: half of what the other workers remember, should the writer be lost
APART = 1 << 14  # records of steps that a reader keeps apart
_SUMS = ("samples", "tokens", "steps", "seconds", "bytes")
_TABLES = ("time", "waited_for", "computed", "lanes", "account")
HUNG, KILLED_FOR_MEMORY = "hung", "killed for memory"  # the `kind` of failures that are no exceptions
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


class EventListener(Protocol):
    """Something in this process that is called when a journal changes."""

    def hear(self) -> None:
        """Called after each event that was written."""
        ...

    def close(self) -> None:
        """Called when the journal is closed."""
        ...


class Journal:
    """Appends events to the journal of a run folder, which is made if missing; without a folder does nothing.

    A journal that cannot be written (a full disk) warns once and does not end the training: the checkpoint,
    which cannot be written either, does. Who `hears` is told after each line, and of the end.
    """

    def __init__(self, folder: Path | None, hears: EventListener | None = None) -> None:
        self._fd: int | None = None
        self._hears = hears
        self._torn = self._warned = False
        self._path = Path(NAME)
        self._held: dict[Any, tuple[float, Event]] = {}  # records of steps, by trainer, since when
        if folder is None:
            return
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._path = folder / NAME
        self._fd = os.open(self._path, os.O_RDWR | os.O_APPEND | os.O_CREAT | getattr(os, "O_BINARY", 0), 0o600)
        if os.lseek(self._fd, 0, os.SEEK_END) == 0:
            self.write("journal", version=VERSION)
        else:
            os.lseek(self._fd, -1, os.SEEK_END)
            self._torn = os.read(self._fd, 1) != b"\n"  # an earlier crash in mid-write

    def write(self, event: str, /, **fields: Any) -> None:
        """Appends one event. Values may be anything `plain` turns into JSON."""
        if self._fd is None:
            return
        text = json.dumps(plain({"at": time.time(), "event": event, **fields}), ensure_ascii=False, allow_nan=False)
        self.put_back()
        line = b"\n" * self._torn + text.encode(errors="backslashreplace") + b"\n"
        try:
            self._torn = os.write(self._fd, line) < len(line)
        except OSError as error:
            if not self._warned:
                self._warned = True
                what = f"{self._path} cannot be written ({error.strerror})"
                then = "training continues, but its report will have gaps; free space on that disk"
                warnings.warn(f"{what}: {then}", stacklevel=2)
        if self._hears is not None:
            self._hears.hear()

    def put_back(self) -> bool:
        """Where the journal is not at its path any more, deleted or moved with its folder, it is written there again,
        from the file that is still open. Whether it was; what writes beside this process does so with its next event.
        """
        if self._fd is None or self._is_there(self._fd):
            return False
        half = self._path.with_name(f".{NAME}.{os.getpid()}")
        try:
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with open(os.open(half, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as copy:
                at = 0
                while block := os.pread(self._fd, BLOCK, at):
                    at += copy.write(block)
            with suppress(FileExistsError):  # somebody else was quicker
                os.link(half, self._path)
            half.unlink()
            again = os.open(self._path, os.O_RDWR | os.O_APPEND)
        except OSError:  # it is tried again with the next event
            return False
        os.dup2(again, self._fd, inheritable=False)
        os.close(again)
        return True

    def _is_there(self, descriptor: int) -> bool:
        try:
            return os.path.samestat(os.stat(self._path), os.fstat(descriptor))
        except OSError:
            return False

    def steps(self, **fields: Any) -> None:
        """Appends a record of steps. The longer the journal, the more of them become one."""
        if self._fd is None:
            return
        trainer, now = fields.get("trainer"), time.monotonic()
        since, before = self._held.pop(trainer, (now, {}))
        record = added(before, fields) if before else fields
        pause = min(FIRST * (2 ** min(os.fstat(self._fd).st_size // THIN, 16) - 1), RAREST)
        if now - since >= pause or record.get("steps", 0) >= TOGETHER:
            self.write("step", **record)
        else:
            self._held[trainer] = since, record

    def flush(self) -> None:
        """Appends what `steps` still keeps to add up."""
        held, self._held = self._held, {}
        for _, record in held.values():
            self.write("step", **record)

    def last_step(self, trainer: int) -> int:
        """The last step of a trainer that was written here, and not done again from an earlier checkpoint."""
        most = math.inf
        for line in lines_from_end(self._path) if self._fd is not None else ():
            event = event_of(line) if b'"st' in line else {}
            if event.get("event") == "start":
                most = min(most, event.get("resumed_from") or 0)
            step: int = event.get("step") or 0
            if event.get("event") == "step" and event.get("trainer") == trainer and step <= most:
                return step
            if not most:
                break
        return 0

    def close(self) -> None:
        """Appends what `steps` still keeps, and closes the file."""
        self.flush()
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None
            if self._hears is not None:
                self._hears.close()


def added(before: Event, after: Event) -> Event:
    """One record of steps for two that follow one another: sums of what is counted, the rest as it was at last."""
    record = {**before, **after}
    for name in _SUMS:
        if name in record:
            record[name] = (before.get(name) or 0) + (after.get(name) or 0)
    for name in _TABLES:
        if name in record:
            record[name] = dict(before.get(name) or {})
            for part, value in (after.get(name) or {}).items():
                record[name][part] = (record[name].get(part) or 0) + (value or 0)
    return record


def event_of(line: bytes) -> Event:
    """What a line holds; nothing where a crash tore it, or something changed it: a run goes on without."""
    from paceline.base.journal_events import read_event  # needs msgspec

    try:
        return read_event(line)
    except ValueError:
        return {}


def lines_from_end(path: Path, since: int = 0) -> Iterator[bytes]:
    """Yields the lines that begin at byte `since` or later, the last one first.

    The file is read in blocks, so that a search for the last line of a kind does not read all of it. A last line
    without an end is left out: it is being written, or a crash tore it.
    """
    with open_file(path) as file:
        start, rest, has_end = file.seek(0, os.SEEK_END), b"", False
        while start > since:
            end, start = start, max(since, start - BLOCK)
            file.seek(start)
            rest = file.read(end - start) + rest
            rest, *lines = rest.split(b"\n")
            if lines and not has_end:  # what follows the last end of a line
                lines.pop()
                has_end = True
            yield from reversed(lines)
        if has_end:
            yield rest


class Reader:
    """Reads a journal from byte `at` on as it grows. `number` counts the events that were read, without the version
    line: it is the same for everybody who has read as much. `events` are these; where there are very many records of
    steps, neighbours are added up.
    """

    def __init__(self, folder: Path, at: int = 0, damaged: bool = True) -> None:
        """Without `damaged`, lines with wrong fields are skipped: a training does not end for them."""
        self._path, self.at, self.number, self._damage = folder / NAME, at, 0, damaged
        self.events: list[Event] = []
        self._steps, self._most = 0, APART

    def news(self) -> Iterator[tuple[int, Event]]:
        """The events since the last time, each with the byte where its line begins. Lines torn by a crash in mid-write
        are skipped, one without its end is left for later. UsageError: the journal is of a later version; FormatError:
        a field of an event is not what it must be.
        """
        from paceline.base.journal_events import read_event  # needs msgspec

        if not self._path.exists():
            return
        with open_file(self._path) as file:
            file.seek(self.at)
            for line in file:
                if not line.endswith(b"\n"):
                    return
                try:
                    event = read_event(line)
                except ValueError as error:
                    if self._damage:
                        raise self._damaged(str(error)) from error
                    event = {}
                start, self.at = self.at, self.at + len(line)
                if event.get("event", "journal") != "journal":
                    self.number += 1
                    yield start, event
                elif event.get("version", VERSION) > VERSION:
                    what = (
                        f"{self._path} has format version {event['version']}, but this version of Paceline reads only"
                        f" up to {VERSION}"
                    )
                    raise UsageError(what, "install a newer Paceline")

    def _damaged(self, why: str) -> FormatError:
        with open_file(self._path) as file:
            number = 1 + sum(file.read(min(BLOCK, self.at - at)).count(b"\n") for at in range(0, self.at, BLOCK))
        return FormatError(
            f"{self._path} is damaged in line {number}: {why}", "remove that line; the other lines can be read"
        )

    def read(self) -> list[Event]:
        """All events until now, oldest first; none where there is no journal."""
        for _, event in self.news():
            self.events.append(event)
            self._steps += event["event"] == "step"
            if self._steps >= self._most:
                self.events = thinned(self.events)
                self._steps = sum(event["event"] == "step" for event in self.events)
                self._most = max(APART, 2 * self._steps)
        return self.events


def read_journal(folder: Path) -> list[Event]:
    """The events of a run as they are now; see `Reader`."""
    return Reader(folder).read()


def thinned(events: list[Event]) -> list[Event]:
    """With one record of steps for each two of a trainer. The first one of an attempt stays, and none goes over a
    checkpoint, from which a later attempt may go on.
    """
    kept: list[Event | None] = []
    single: dict[Any, int | None] = {}  # where the last record stands that is not added to another; None: stays so
    for event in events:
        if event["event"] == "start":
            single = {}
        elif event["event"] == "checkpoint":
            single = dict.fromkeys(single)
        elif event["event"] == "step":
            trainer = event.get("trainer")
            position = single.get(trainer)
            if position is not None:
                event = added(kept[position] or {}, event)
                kept[position] = None
            single[trainer] = None if position is not None or trainer not in single else len(kept)
        kept.append(event)
    return [event for event in kept if event is not None]


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


def replace_file(path: Path, content: str | bytes) -> None:
    """Writes a small file of the run folder, mode 0600, whole or not at all."""
    half = path.with_name(f".{path.name}")
    with open(os.open(half, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        file.write(content.encode(errors="backslashreplace") if isinstance(content, str) else content)
    half.replace(path)
