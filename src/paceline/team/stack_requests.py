"""Collects the stacks of all workers through their agents."""

from __future__ import annotations

import base64
import re
import time
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from paceline.base.console import in_one_line
from paceline.base.journal import plain
from paceline.base.schema import SAME_VERSION
from paceline.base.stacks import FOLDER, keep
from paceline.base.text import ranks
from paceline.errors import FormatError

MOST = 1 << 20  # bytes of a worker's stacks, or collectives, that are taken
PACKED = 60_000  # bytes of each on the way: a request is limited
NAME = re.compile(r"(worker|server)-[0-9]{1,12}(\.[0-9]{1,12})?")  # of a worker's files


class StackRequests:
    """The coordinator's side: the newest question, which agents are to answer it, and what they have said."""

    def __init__(self, folder: Path) -> None:
        self._folder, self.asked = folder, 0
        self._waits: set[str] = set()
        self._said: dict[int, dict[str, Any]] = {}

    def ask(self, agents: Iterable[str]) -> None:
        """The number of a question is that of no coordinator before."""
        self.asked, self._waits, self._said = max(self.asked + 1, time.time_ns() // 1_000_000), {*agents}, {}

    def take(self, agent: str, said: Mapping[str, Any]) -> None:
        """An agent's answer of one worker, of the type forms.STAND, or its last word. FormatError."""
        if said["asked"] != self.asked:
            return
        if said.get("last"):
            self._waits.discard(agent)
            return
        if not NAME.fullmatch(said["name"]):
            raise FormatError("a request /stands has a name of no worker", SAME_VERSION)
        keep(self._folder, said["name"], *unpacked(said["files"]))
        told = ("host", "state", "place", "at", "since", "group", "number", "newest")
        self._said[said["worker"]] = plain({name: said.get(name) for name in told})

    def answer(self) -> dict[str, Any]:
        waits, folder = sorted(self._waits), str((self._folder / FOLDER).absolute())
        return {"asked": self.asked, "waits": waits, "folder": folder, "workers": self._said}


def packed(*texts: str) -> list[str]:
    """Texts as they travel: of one that is too large the beginning and the end."""
    return [base64.b64encode(_pressed(text.encode(errors="backslashreplace")[:MOST])).decode() for text in texts]


def _pressed(data: bytes) -> bytes:
    small = zlib.compress(data, 1)
    while len(small) > PACKED:
        data = data[: len(data) // 3] + b"\n...\n" + data[-len(data) // 3 :]
        small = zlib.compress(data, 1)
    return small


def unpacked(texts: Iterable[str]) -> list[str]:
    """FormatError: they are not what `packed` gives."""
    try:
        return [
            zlib.decompressobj().decompress(base64.b64decode(text), MOST).decode("utf-8", "replace") for text in texts
        ]
    except (zlib.error, ValueError) as error:
        raise FormatError(f"a request /stands has files that are not packed: {error}", SAME_VERSION) from None


def table(workers: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """What `StackRequests` has heard, a line for each place where some stand: first those that wait for nobody."""
    places: dict[tuple[bool, str, str, str], list[int]] = {}
    waited: dict[tuple[bool, str, str, str], float] = {}
    for number, told in sorted((int(number), told) for number, told in workers.items()):
        group, turn = told["group"], told["number"]
        behind = [int(n) for n, other in workers.items() if group and turn and other["newest"].get(group, turn) < turn]
        who = f"; {ranks(behind)} {'has' if len(behind) == 1 else 'have'} not begun it" if behind else ""
        key = group is not None, told["state"], f" at {told['place']}" if told["place"] else "", who
        places.setdefault(key, []).append(number)
        if told["since"] is not None:
            waited[key] = max(waited.get(key, 0.0), told["at"] - told["since"])
    rows = [
        (ranks(numbers), key[1] + (f" for {waited[key]:.1f} s" if key in waited else "") + key[2] + key[3])
        for key, numbers in sorted(places.items(), key=lambda item: (item[0][0], item[1]))
    ]
    width = max((len(who) for who, _ in rows), default=0)
    return [f"{who:{width}}  {in_one_line(what)}" for who, what in rows]
