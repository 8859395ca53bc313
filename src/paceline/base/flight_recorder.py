"""Records a worker's last collectives in memory that its agent can read, even if the worker hangs.

Records have a fixed size and lie in the file that both share, see `paceline.base.heartbeat`. Each begins with its turn,
which says where it belongs: the reader leaves out what is older than a whole ring.
"""

from __future__ import annotations

import itertools
import json
import struct
import time
from collections.abc import Mapping, Sequence
from typing import Any

KEPT = 1000  # collectives
# Turn (from 1), number in its group (0: a message), begun and ended (monotonic seconds; 0: under way, negative: it
# failed then), bytes, and texts: group, name, call site.
_RECORD, _ENDED = struct.Struct("qqddq24s88s40s"), struct.Struct("d")
_AT = struct.calcsize("qqd")  # where the end is written
SIZE = KEPT * _RECORD.size  # bytes


class FlightRecorder:
    """The worker's side. From any thread."""

    def __init__(self) -> None:
        self._turns, self._newest = itertools.count(1), 0
        self._ring: Any = bytearray(SIZE)

    def take(self, ring: Any) -> None:
        """From now on others see it. What another program of this worker's left there goes."""
        ring[:] = bytes(SIZE)
        self._ring = ring

    def begin(self, group: str, number: int, name: str, site: str, size: int) -> int:
        """A collective of so many bytes begins; its turn."""
        turn = self._newest = next(self._turns)
        about = turn, number, time.monotonic(), 0.0, size
        # A path that is no UTF-8 has surrogates.
        texts = (text.encode(errors="backslashreplace") for text in (group, name, site))
        _RECORD.pack_into(self._ring, turn % KEPT * _RECORD.size, *about, *texts)
        return turn

    def end(self, turn: int, well: bool) -> None:
        """It has ended. Should a later one have its place by now, nothing is written."""
        if self._newest - turn < KEPT:
            now = time.monotonic()
            _ENDED.pack_into(self._ring, turn % KEPT * _RECORD.size + _AT, now if well else -now)


FLIGHT_RECORDER = FlightRecorder()


def read_flight(ring: bytes) -> list[dict[str, Any]]:
    """The records, oldest first. `begun` and `ended` in Unix seconds of this host's clock; `ended` is null of what is
    under way, and `failed` is there where it ended with an error.
    """
    offset = time.time() - time.monotonic()
    records = [*_RECORD.iter_unpack(ring[:SIZE])]
    newest = max(record[0] for record in records)
    found = []
    for place, (turn, number, begun, ended, size, *texts) in enumerate(records):
        if turn % KEPT != place or not newest - KEPT < turn or turn <= 0:
            continue
        group, name, site = (text.rstrip(b"\0").decode("utf-8", "replace") for text in texts)
        record = {"turn": turn, "group": group, "number": number, "name": name, "site": site, "bytes": size}
        record["begun"], record["ended"] = round(begun + offset, 6), round(abs(ended) + offset, 6) if ended else None
        found.append({**record, "failed": True} if ended < 0 else record)
    found.sort(key=lambda record: record["turn"])
    return found


def flight_lines(about: Mapping[str, Any], records: Sequence[Mapping[str, Any]]) -> str:
    """As they are kept in a run folder: `about` whom, and a line for each."""
    encode = json.JSONEncoder(ensure_ascii=False).encode
    return "".join(f"{encode(line)}\n" for line in (about, *records))
