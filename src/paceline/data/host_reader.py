"""One worker of each host reads an iterable dataset, and sends the other workers of the host their rows."""

from __future__ import annotations

import dataclasses
import sys
from typing import Any

import numpy as np

from paceline.checkpoint.tree import pack, unpack
from paceline.comm.communicator import Group
from paceline.data.fingerprint import first_rows
from paceline.data.loader import Assignment, Feed, StreamRows, share_of
from paceline.data.row_stream import Position, Stream
from paceline.errors import DatasetError, ReaderError, UsageError, first_line

_IMAGE, _BYTES = "$image of pillow", "$bytes"
_SHORT = 256  # bytes that are sent as text
_MODES = ("1", "L", "LA", "RGB", "RGBA", "CMYK", "YCbCr", "I", "F")  # of images that are their pixels alone
_TYPES = "yield tensors, arrays, images of pillow, numbers, text, and dicts or lists of these"


class HostReader:
    """Gets the rows of a loop's global batches to this worker: read by itself, or by another worker of its host.

    In each generation the workers choose a reader for each host: the one that has read furthest, so that nobody reads
    again what was read. A worker reads the dataset itself if its rows cannot be sent. `first` are the digests of the
    first rows of the first global batch of an epoch.
    """

    def __init__(self, feed: Feed) -> None:
        self._feed, self._generation = feed, -1
        self._reader, self._others = 0, list[int]()  # the rank of the reader of this host, and those it reads for
        self._reads_itself = False
        self._compared: tuple[int, int] | None = None  # generation and epoch of `first`
        self.first = list[Any]()
        self._positions = list[Position]()  # the last two

    @property
    def position(self) -> Position | None:
        """The place after the last global batch."""
        return self._positions[-1] if self._positions else None

    def _note(self, position: Position) -> None:
        self._positions = [*(one for one in self._positions if one.step < position.step), position][-2:]

    @property
    def reads(self) -> bool:
        """Whether this worker reads the dataset."""
        return self._feed.rows is None

    def read(self, group: Group, generation: int, step: int, assignment: Assignment) -> bool:
        """Reads a global batch; returns whether there is one. Collective in a new generation, and among the workers of
        a host.
        """
        stream = self._feed.stream
        assert stream is not None
        if generation != self._generation:
            self._choose(group, stream.step)
            self._generation = generation
        if self._reader != group.rank:
            return self._receive(group, step, assignment)
        if self._feed.rows is not None:  # another worker was the reader until now
            self._feed.rows = None
            for position in self._positions:
                if position.state is not None and stream.step < position.step - 1 < step:
                    stream.start_at(position)
        try:
            more = stream.reach(step)
        finally:
            error = sys.exception()
            if self._others and isinstance(error, Exception):  # or they would read on until they meet the same error
                self._send(group, step, f"{type(error).__name__}: {first_line(error)}")
        self._note(stream.position)
        if more and (generation, stream.epoch) != self._compared:  # when workers compare their first rows
            self.first, self._compared = first_rows(self._feed), (generation, stream.epoch)
        if self._others:
            self._send(group, step if more else None)
        return more

    def _choose(self, group: Group, step: int) -> None:
        """Chooses the reader of this host. Collective."""
        self._reader, self._others = group.rank, []
        if group.size == 1:
            return
        group.declare("the readers of the dataset", kind="rows compared")
        reports = group.gather_json([step, self._reads_itself])
        hosts = group.hosts
        peers = [rank for rank in range(group.size) if hosts[rank] == hosts[group.rank] and not reports[rank][1]]
        if self._reads_itself or not peers:
            return
        self._reader = max(peers, key=lambda rank: (reports[rank][0], -rank))
        if self._reader == group.rank:
            self._others = [rank for rank in peers if rank != group.rank]

    def _send(self, group: Group, step: int | None, failed: str = "") -> None:
        """Sends the other workers their rows of the global batch that was just read, or why it could not be read."""
        feed, stream = self._feed, self._feed.stream
        assert stream is not None
        group.declare("the rows of a step", check=False, kind="rows")
        asked = {rank: Assignment(*unpack(group.receive_bytes(rank))) for rank in self._others}
        count = 0 if step is None or failed else len(stream.rows)
        head: dict[str, Any] = {"epoch": stream.epoch, "count": count, "failed": failed, "first": self.first}
        head["position"] = list(stream.position)
        cuts, replies, refusal = feed.grid.cut(count), dict[int, Any](), _refusal()
        try:
            for rank, assignment in asked.items():
                share = share_of(_hashable(assignment), feed.grid, count) if count else ()
                numbers = sorted({row for index, _, _ in share for row in cuts[index]})
                replies[rank] = pack({**head, "rows": [(row, _portable(stream.rows[row])) for row in numbers]})
        except (UsageError, DatasetError) as error:
            refusal = error if isinstance(error, DatasetError) else refusal
            replies = dict.fromkeys(asked, pack({**head, "rows": None, "refusal": [refusal.what, refusal.cure]}))
            self._others = []
        for rank, reply in replies.items():
            group.send_bytes(reply, rank)
        if not self._others and isinstance(feed.source.dataset, Stream):
            raise refusal

    def _receive(self, group: Group, step: int, assignment: Assignment) -> bool:
        """Gets this worker's rows from the reader."""
        feed = self._feed
        group.declare("the rows of a step", check=False, kind="rows")
        group.send_bytes(pack([getattr(assignment, one.name) for one in dataclasses.fields(assignment)]), self._reader)
        reply = unpack(group.receive_bytes(self._reader))
        if reply["failed"]:
            what = f"worker {group.names[self._reader]} cannot read the dataset ({reply['failed']})"
            raise ReaderError(what, "see the error of that worker")
        self._note(Position(*reply["position"]))
        self.first = reply["first"]
        if reply["rows"] is None:  # no worker of the host gets rows from another one
            if isinstance(feed.source.dataset, Stream):
                raise DatasetError(*reply["refusal"])
            assert feed.stream is not None
            self._reads_itself, self._reader, feed.rows = True, group.rank, None
            return feed.stream.reach(step)
        rows = {row: _restored(value) for row, value in reply["rows"]}
        feed.rows = StreamRows(reply["epoch"], reply["count"], rows)
        return bool(reply["count"])


def _refusal(values: str = "values of a type", cure: str = _TYPES) -> DatasetError:
    return DatasetError(f"the rows of a Stream have {values} that cannot be sent to other workers", cure)


def _hashable(assignment: Assignment) -> Assignment:
    """Returns an assignment with tuples where it was sent with lists."""
    count, numbers = assignment.islands
    return dataclasses.replace(assignment, weights=tuple(assignment.weights), islands=(count, tuple(numbers)))


def _portable(value: Any) -> Any:
    """Returns a row in which images and long bytes are tuples that begin with a name of theirs.

    Raises DatasetError for an image that is more than its pixels, such as one with a palette.
    """
    if type(value) is dict:
        return {name: _portable(part) for name, part in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_portable(part) for part in value)
    if type(value) is bytes and len(value) > _SHORT:
        return _BYTES, np.frombuffer(value, np.uint8)
    if type(value).__module__.startswith("PIL.") and hasattr(value, "tobytes"):
        if value.mode not in _MODES:
            cure = f'convert them, for example with image.convert("RGB"); these modes can be sent: {", ".join(_MODES)}'
            raise _refusal(f"images of pillow with the mode {value.mode}", cure)
        return _IMAGE, value.mode, list(value.size), np.frombuffer(value.tobytes(), np.uint8)
    return value


def _restored(value: Any) -> Any:
    """Returns the row that `_portable` was given."""
    if isinstance(value, dict):
        return {name: _restored(part) for name, part in value.items()}
    if isinstance(value, list):
        return [_restored(part) for part in value]
    if not isinstance(value, tuple):
        return value
    kind = value[0] if value and type(value[0]) is str else ""
    if kind == _BYTES:
        return value[1].tobytes()
    if kind == _IMAGE:
        from PIL import Image

        return Image.frombytes(value[1], tuple(value[2]), value[3].tobytes())
    return tuple(_restored(part) for part in value)
