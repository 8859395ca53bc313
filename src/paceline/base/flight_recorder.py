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
    """Writes the records of a worker's collectives, from any thread."""

    def __init__(self) -> None:
        self._turns, self._newest = itertools.count(1), 0
        self._ring: Any = bytearray(SIZE)

    def take(self, ring: Any) -> None:
        """Writes into shared memory from now on, and erases what an earlier program of this worker left there."""
        ring[:] = bytes(SIZE)
        self._ring = ring

    def begin(self, group: str, number: int, name: str, site: str, size: int) -> int:
        """Records the beginning of a collective of `size` bytes, and returns its turn."""
        turn = self._newest = next(self._turns)
        about = turn, number, time.monotonic(), 0.0, size
        # A path that is no UTF-8 has surrogates.
        texts = (text.encode(errors="backslashreplace") for text in (group, name, site))
        _RECORD.pack_into(self._ring, turn % KEPT * _RECORD.size, *about, *texts)
        return turn

    def end(self, turn: int, well: bool) -> None:
        """Records the end of a collective. Writes nothing if a later collective has overwritten the record by now."""
        if self._newest - turn < KEPT:
            now = time.monotonic()
            _ENDED.pack_into(self._ring, turn % KEPT * _RECORD.size + _AT, now if well else -now)


FLIGHT_RECORDER = FlightRecorder()


def read_flight(ring: bytes) -> list[dict[str, Any]]:
    """Returns the records, oldest first.

    `begun` and `ended` are in Unix seconds of this host's clock. `ended` is None while a collective is under way.
    `failed` is only present where it ended with an error.
    """
    offset = time.time() - time.monotonic()
    records = [*_RECORD.iter_unpack(ring[:SIZE])]
    newest = max(record[0] for record in records)
    flight = []
    for position, (turn, number, begun, ended, size, *texts) in enumerate(records):
        if turn % KEPT != position or not newest - KEPT < turn or turn <= 0:
            continue
        group, name, site = (text.rstrip(b"\0").decode("utf-8", "replace") for text in texts)
        record = {"turn": turn, "group": group, "number": number, "name": name, "site": site, "bytes": size}
        record["begun"], record["ended"] = round(begun + offset, 6), round(abs(ended) + offset, 6) if ended else None
        flight.append({**record, "failed": True} if ended < 0 else record)
    flight.sort(key=lambda record: record["turn"])
    return flight


def flight_lines(about: Mapping[str, Any], records: Sequence[Mapping[str, Any]]) -> str:
    """Returns the text of a file in the run folder: a line with what the records are `about`, and one per record."""
    encode = json.JSONEncoder(ensure_ascii=False).encode
    return "".join(f"{encode(line)}\n" for line in (about, *records))
