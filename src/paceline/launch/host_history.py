"""What a host remembers of its failures and troubles: one JSON object per line, in the user's folder of caches."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from paceline.base.console import in_one_line
from paceline.base.environment import cache_folder, host_name
from paceline.base.schema import read_file
from paceline.base.text import duration, plural
from paceline.team.host_failures import LONGEST, Failure, describe

FOLDER = "hosts"  # in the folder of caches, with a file for each host, because hosts may share a home
LAST = 1000  # lines that are read, the newest ones
REMEMBERED = 7 * 86_400.0  # seconds for which failures count
SENT = 300  # newest failures that a joining host sends to the coordinator
SHOWN = 5  # newest entries that `paceline doctor` shows
FAILURE = "failure"  # the kind of an entry that counts for --exclude-after; other kinds are troubles


class HostEntry(NamedTuple):
    """What happened: when (Unix seconds), its kind, a text, and the run folder."""

    at: float
    kind: str
    text: str
    run: str = ""


class HostHistory:
    """The entries in the file of this host. Lines that are damaged are left out."""

    def __init__(self, path: Path | None = None) -> None:
        name = "".join(letter if letter.isalnum() or letter in ".-" else "_" for letter in host_name())
        self.path = path or cache_folder() / FOLDER / f"{name}.jsonl"
        self._entries: dict[tuple[float, str, str], HostEntry] = {}
        try:
            lines = read_file(self.path).splitlines()[-LAST:]
        except OSError:
            return
        for entry in filter(None, map(_entry_of, lines)):
            self._entries[entry[:3]] = entry

    def add(self, entry: HostEntry) -> None:
        """Adds an entry that is not there yet. Nothing is written if the file cannot be."""
        entry = entry._replace(text=in_one_line(entry.text)[:LONGEST])
        if entry[:3] in self._entries:
            return
        self._entries[entry[:3]] = entry
        line = json.dumps(dict(zip(HostEntry.__annotations__, entry, strict=True))) + "\n"
        try:
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with self.path.open("a") as file:
                file.write(line)
        except OSError:  # for example a home that is read-only
            return

    def recent(self) -> list[HostEntry]:
        """The entries of the last seven days, the oldest first."""
        now = time.time()
        return sorted(entry for entry in self._entries.values() if 0 <= now - entry.at <= REMEMBERED)

    @property
    def failures(self) -> list[Failure]:
        """The failures of the last seven days."""
        return [(entry.at, entry.text) for entry in self.recent() if entry.kind == FAILURE]

    def lines(self) -> Iterator[str]:
        """What is remembered, in words: the number of failures, and the newest entries."""
        recent, now = self.recent(), time.time()
        if self.failures:
            yield f"{describe(self.failures)} in the last seven days"
        elif recent:
            yield f"{plural(len(recent), 'trouble')}, and no failure, in the last seven days"
        for entry in reversed(recent[-SHOWN:]):
            run = f" (run {entry.run})" if entry.run else ""
            yield f"  {duration(now - entry.at)} ago: {entry.kind}: {entry.text}{run}"


def _entry_of(line: bytes) -> HostEntry | None:
    try:
        given: Any = json.loads(line)
        return HostEntry(float(given["at"]), str(given["kind"]), str(given["text"]), str(given.get("run", "")))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
