"""The coordinator's side of `paceline stacks`: asks agents what their workers are doing, and gathers the answers."""

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

MOST = 1 << 20  # most bytes of a worker's stacks, or collectives
PACKED = 60_000  # most bytes of each in a request, whose size is limited
NAME = re.compile(r"(worker|server)-[0-9]{1,12}(\.[0-9]{1,12})?")  # of a worker's files


class StackRequests:
    """The coordinator's side: the newest request for stacks, the agents that have not answered it, and the answers."""

    def __init__(self, folder: Path) -> None:
        self._folder, self.asked = folder, 0
        self._waits: set[str] = set()
        self._answers: dict[int, dict[str, Any]] = {}

    def ask(self, agents: Iterable[str]) -> None:
        """Asks agents for stacks, under a number that no previous coordinator has used."""
        self.asked, self._waits, self._answers = max(self.asked + 1, time.time_ns() // 1_000_000), {*agents}, {}

    def take(self, agent: str, answer: Mapping[str, Any]) -> None:
        """Takes an agent's answer for one worker, of the type message_types.STAND, or its last message. FormatError."""
        if answer["asked"] != self.asked:
            return
        if answer.get("last"):
            self._waits.discard(agent)
            return
        if not NAME.fullmatch(answer["name"]):
            raise FormatError("a request /stands has a name that is not the name of a worker", SAME_VERSION)
        keep(self._folder, answer["name"], *unpacked(answer["files"]))
        names = ("host", "state", "place", "at", "since", "group", "number", "newest")
        self._answers[answer["worker"]] = plain({name: answer.get(name) for name in names})

    def answer(self) -> dict[str, Any]:
        """The answer to POST /stacks: the stacks' folder, what each worker is doing, and which agents are missing."""
        waits, folder = sorted(self._waits), str((self._folder / FOLDER).absolute())
        return {"asked": self.asked, "waits": waits, "folder": folder, "workers": self._answers}


def packed(*texts: str) -> list[str]:
    """Compresses texts for a request, and shortens those that are too large to their beginning and end."""
    return [base64.b64encode(_pressed(text.encode(errors="backslashreplace")[:MOST])).decode() for text in texts]


def _pressed(data: bytes) -> bytes:
    small = zlib.compress(data, 1)
    while len(small) > PACKED:
        data = data[: len(data) // 3] + b"\n...\n" + data[-len(data) // 3 :]
        small = zlib.compress(data, 1)
    return small


def unpacked(texts: Iterable[str]) -> list[str]:
    """Decompresses texts from `packed`. FormatError: they cannot be decompressed."""
    try:
        return [
            zlib.decompressobj().decompress(base64.b64decode(text), MOST).decode("utf-8", "replace") for text in texts
        ]
    except (zlib.error, ValueError) as error:
        raise FormatError(f"a request /stands has files that cannot be decompressed: {error}", SAME_VERSION) from None


def table(workers: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Lists the answers, one line per state and place of workers: first the workers that do not wait for others."""
    places: dict[tuple[bool, str, str, str], list[int]] = {}
    waited: dict[tuple[bool, str, str, str], float] = {}
    for number, stand in sorted((int(number), stand) for number, stand in workers.items()):
        group, turn = stand["group"], stand["number"]
        behind = [int(n) for n, other in workers.items() if group and turn and other["newest"].get(group, turn) < turn]
        who = f"; {ranks(behind)} {'has' if len(behind) == 1 else 'have'} not reached it" if behind else ""
        key = group is not None, stand["state"], f" at {stand['place']}" if stand["place"] else "", who
        places.setdefault(key, []).append(number)
        if stand["since"] is not None:
            waited[key] = max(waited.get(key, 0.0), stand["at"] - stand["since"])
    rows = [
        (ranks(numbers), key[1] + (f" for {waited[key]:.1f} s" if key in waited else "") + key[2] + key[3])
        for key, numbers in sorted(places.items(), key=lambda item: (item[0][0], item[1]))
    ]
    width = max((len(who) for who, _ in rows), default=0)
    return [f"{who:{width}}  {in_one_line(what)}" for who, what in rows]
