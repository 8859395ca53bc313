"""Memory that the workers of one host share, and which of their processes have ended.

The memory is a file without a name (memfd), which the others open through the maker's /proc entry. So nothing is left
behind by any kind of end, the size of /dev/shm does not matter, and only processes of the same user can open it.
Arrivals are numbers in the mapping, written after the data that they announce: x86 keeps that order for every reader.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
import select
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from paceline.comm.peer_status import Ask, agree, workers
from paceline.errors import UsageError

Condition = Callable[[], bool]
BLOCK = 1 << 20  # bytes of a staging block; each worker has two
LANE = 1 << 17  # bytes of a slot in a lane; each ordered pair has two
LINE = 8  # int64 of a cache line: no two workers write into the same one
EXTENT = 1 << 26  # bytes of the first exported extent; it takes memory as slots need it
_PRINT = 30  # bits of a fingerprint, which is stored below the number of an arrival


class MismatchError(Exception):
    """Raised when a peer arrived at another collective than this worker."""


def host_key() -> str:
    """A key that is equal for two processes that can share memory, reach each other's /proc, and are on one network.

    It is empty where memory cannot be shared: a processor other than x86-64 would need fences that Python cannot
    express.
    """
    if not sys.platform.startswith("linux") or platform.machine() not in ("x86_64", "AMD64"):
        return ""
    parts = [Path("/proc/sys/kernel/random/boot_id").read_text().strip(), str(os.getuid())]
    return " ".join(parts + [os.readlink(f"/proc/self/ns/{kind}") for kind in ("net", "pid", "user")])


def map_together(
    ask: Ask,
    store: dist.Store,
    name: str,
    ranks: Sequence[int],
    rank: int,
    size: int,
    otherwise: str,
    reserved: int | None = None,
) -> tuple[mmap.mmap, int] | None:
    """Maps `size` new bytes, zeros, in all processes of `ranks`; returns the mapping and its open file.

    Returns None on all of them if one cannot: the first of `ranks` warns why, and what happens `otherwise`. Of the
    bytes `reserved` are allocated, all if it is None; the others have to be allocated in the file before use.

    The first of `ranks` makes the file, and each rank allocates a part: memory counts for the process that
    allocates it, and is near its cores. `name` is fresh in `store`; `ask` waits for keys that others set in `store`.
    """
    leader = rank == ranks[0]
    fd, path, mapped = -1, "", None
    reserved = size if reserved is None else reserved
    try:
        if leader:
            fd = os.memfd_create("paceline", os.MFD_CLOEXEC)
            os.ftruncate(fd, size)
            path = f"/proc/{os.getpid()}/fd/{fd}"
    except OSError as error:
        path = f"!{error.strerror}"
    try:
        if leader:
            store.set(f"{name}/file", path)
        (path,) = ask(f"{name}/file")
        if not path.startswith("!"):
            try:
                fd = fd if leader else os.open(path, os.O_RDWR | os.O_CLOEXEC)
                position, part = ranks.index(rank), reserved // len(ranks) // mmap.PAGESIZE * mmap.PAGESIZE
                own_size = part if position + 1 < len(ranks) else reserved - position * part
                if own_size:  # memory that is missing raises an error now, not a bus error later
                    os.posix_fallocate(fd, position * part, own_size)
                mapped = mmap.mmap(fd, size)
            except OSError as error:
                path = f"!{error.strerror}"
        # After this, all have opened the file.
        if reason := agree(ask, store, name, rank, ranks, path, lambda all_: next(filter(_failed, all_), "")[1:]):
            if leader:
                megabytes = f"{reserved / (1 << 20):.0f} MB"
                warnings.warn(
                    f"{workers(ranks)} cannot share {megabytes} of memory ({reason}): {otherwise}", stacklevel=2
                )
            mapped = None
        return None if mapped is None else (mapped, os.dup(fd))
    finally:
        if fd >= 0:
            os.close(fd)


def _failed(path: str) -> bool:
    return path.startswith("!")


def give_back() -> None:
    """Returns memory that this process has freed to the system, if its allocator is glibc's."""
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).malloc_trim(0)


def raw_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor's memory as bytes: gloo and NCCL have no name for some dtypes, which they can still move."""
    # A tensor of one element is contiguous with any stride, and not every stride can be viewed as bytes.
    return tensor.view(-1).as_strided((tensor.numel(),), (1,)).view(torch.uint8)


@dataclass
class SymmetricBuffer:
    """Tensors of one length in shared memory, one for each worker of a host.

    If `measure` is set, a sum in place leaves in `squares` the sum of squares of the part that this worker summed,
    which it computes while that part is in the cache.
    """

    parts: list[torch.Tensor]
    measure: bool = False
    squares: float | None = None


class Shared:
    """The shared memory of `ranks`, workers of one host in one group; `me` is this worker's index among them.

    Its workers may use `cores` cores altogether. Arrivals are counted from 1. Each worker may be at most one arrival
    ahead of another, because it waits for all before it goes on: two staging blocks each are enough, used alternately.
    There is one lane for each ordered pair, which takes memory from its first message on; few pairs ever use theirs.
    `file` is what `memory` maps; `close` closes it.
    """

    def __init__(
        self, memory: mmap.mmap, file: int, ranks: Sequence[int], rank: int, pids: Sequence[int], cores: int
    ) -> None:
        count = len(ranks)
        self.ranks, self.me, self.count = list(ranks), list(ranks).index(rank), count
        self.others = [peer for peer in range(count) if peer != self.me]
        self.crowded = count > cores
        self._memory, self._file = memory, file
        head = _head(count)
        self._flags = memoryview(memory)[:head].cast("q")
        bytes_ = torch.frombuffer(memory, dtype=torch.uint8)
        blocks = bytes_[head : head + 2 * count * BLOCK].view(2, count, BLOCK)
        self._blocks = [list(half.unbind(0)) for half in blocks.unbind(0)]
        self._slots = bytes_[self.reserved(count) :].view(count, count, 2, LANE)
        self._turn = 0
        self._arrived = 0
        self._pidfds = {peer: os.pidfd_open(pids[peer]) for peer in self.others}

    @staticmethod
    def size(count: int) -> int:
        """Bytes of the mapping for this number of workers."""
        return Shared.reserved(count) + 2 * count * count * LANE

    @staticmethod
    def reserved(count: int) -> int:
        """Bytes that are needed from the start; the lanes lie behind them."""
        return _head(count) + 2 * count * BLOCK

    # -- arrivals -----------------------------------------------------------------------------------------------

    def arrive(self, fingerprint: int) -> Condition:
        """Announces that this worker's part is in place; returns a condition that is true once all parts are.

        The condition raises MismatchError if a worker arrived with another fingerprint.
        """
        self._arrived += 1
        value = self._arrived << _PRINT | fingerprint & (1 << _PRINT) - 1
        flags, least = self._flags, self._arrived << _PRINT
        flags[self.me * LINE] = value
        missing = list(self.others)

        def all_here() -> bool:
            while missing:
                flag = flags[missing[-1] * LINE]
                if flag < least:
                    return False
                if flag != value and flag >> _PRINT == value >> _PRINT:
                    raise MismatchError
                missing.pop()
            return True

        return all_here

    def missing(self) -> list[int]:
        """The ranks that have not come to this worker's last arrival."""
        return [self.ranks[p] for p in self.others if self._flags[p * LINE] >> _PRINT < self._arrived]

    def dead(self) -> list[int]:
        """The ranks whose processes have ended."""
        poll = select.poll()
        for fd in self._pidfds.values():
            poll.register(fd, select.POLLIN)
        ended = {fd for fd, _ in poll.poll(0)}
        return [self.ranks[peer] for peer, fd in self._pidfds.items() if fd in ended]

    def blocks(self) -> list[torch.Tensor]:
        """The staging blocks to use next, one per worker, as bytes."""
        self._turn ^= 1
        return self._blocks[self._turn]

    # -- lanes --------------------------------------------------------------------------------------------------

    def lane(self, source: int, target: int) -> RingSlot:
        """The one-way channel between two workers of the host."""
        pair = source * self.count + target
        at = (self.count + pair) * LINE
        return RingSlot(self._flags, at, list(self._slots[source, target].unbind(0)), partial(self._reserve, pair))

    def _reserve(self, pair: int) -> None:
        try:
            os.posix_fallocate(self._file, self.reserved(self.count) + 2 * pair * LANE, 2 * LANE)
        except OSError as error:
            source, target = (self.ranks[position] for position in divmod(pair, self.count))
            raise UsageError(
                f"worker {source} cannot share {2 * LANE / (1 << 20):.2g} MB of memory with worker {target} for their "
                f"messages ({error.strerror})",
                "free memory on this host, give the container more memory, or start fewer workers on this host",
            ) from None

    def close(self) -> None:
        """Lets go of the mapping. Tensors that lie in it keep it alive."""
        for fd in (*self._pidfds.values(), self._file):
            os.close(fd)
        self._pidfds.clear()


def _head(count: int) -> int:
    """Bytes of the flags: one line per worker, one per ordered pair, in full pages."""
    return -(-(count + count * count) * LINE * 8 // mmap.PAGESIZE) * mmap.PAGESIZE


class RingSlot:
    """A one-way channel of messages with two slots, which are used alternately.

    Its flags are: pieces sent, pieces taken, the message's size and its tag. `reserve` is called before the first
    message.
    """

    def __init__(self, flags: Any, at: int, slots: list[torch.Tensor], reserve: Callable[[], object]) -> None:
        self._flags, self._at, self._slots, self._reserve = flags, at, slots, reserve
        self._reserved = False

    def send(self, data: torch.Tensor, tag: int) -> Iterator[Condition]:
        """Puts a message of flat bytes in, piece by piece, as slots become free."""
        flags, at = self._flags, self._at
        if not self._reserved:
            self._reserve()
            self._reserved = True
        yield lambda: bool(flags[at] == flags[at + 1])  # the message before was taken: its size and tag stand here
        flags[at + 2], flags[at + 3] = data.numel(), tag
        for start in range(0, max(len(data), 1), LANE):
            sent = flags[at]
            if start:
                yield partial(_within, flags, at + 1, sent - 1)
            piece = data[start : start + LANE]
            self._slots[sent & 1][: len(piece)].copy_(piece)
            flags[at] = sent + 1

    def waiting(self) -> tuple[int, int] | None:
        """The size and the tag of the incoming message, if there is one whose first piece has not been taken."""
        flags, at = self._flags, self._at
        return (flags[at + 2], flags[at + 3]) if flags[at] > flags[at + 1] else None

    def take(self, data: torch.Tensor) -> Iterator[Condition]:
        """Takes the incoming message out, into flat bytes of its size."""
        flags, at = self._flags, self._at
        for start in range(0, max(len(data), 1), LANE):
            taken = flags[at + 1]
            yield partial(_within, flags, at, taken + 1)
            piece = data[start : start + LANE]
            piece.copy_(self._slots[taken & 1][: len(piece)])
            flags[at + 1] = taken + 1


def _within(flags: Any, at: int, least: int) -> bool:
    return bool(flags[at] >= least)


class File(NamedTuple):
    """A file without a name, as another process finds it."""

    process: int
    number: int
    inode: int


class Where(NamedTuple):
    """The location of a slot, in an extent of the file."""

    extent: int
    extent_size: int
    start: int
    size: int


class Segment(NamedTuple):
    """A slot in memory. `stamp` is three numbers that describe the bytes in `data`: written before these, and read
    after them.
    """

    where: Where
    stamp: memoryview
    data: torch.Tensor


class ExportedSegment:
    """Memory of this process that another process of its host reads, as slots by key. Raises OSError."""

    def __init__(self) -> None:
        self._file = os.memfd_create("paceline", os.MFD_CLOEXEC)
        self.file = File(os.getpid(), self._file, os.fstat(self._file).st_ino)
        self._slots: dict[Any, Segment | None] = {}
        self._extents: list[tuple[int, int, mmap.mmap]] = []
        self._next = self._end = 0

    def slot(self, key: Any, size: int) -> Segment | None:
        """The slot of a key, allocated at first use; None if memory does not suffice."""
        if key not in self._slots:
            try:
                self._slots[key] = self._make(size)
            except OSError:
                self._slots[key] = None
        return self._slots[key]

    def _make(self, size: int) -> Segment:
        size = -(-(size + LINE * 8) // mmap.PAGESIZE) * mmap.PAGESIZE
        if self._next + size > self._end:  # few mappings, however many slots
            more = max(size, self._end, EXTENT)
            os.ftruncate(self._file, self._end + more)
            self._extents.append((self._end, more, mmap.mmap(self._file, more, offset=self._end)))
            self._next, self._end = self._end, self._end + more
        os.posix_fallocate(self._file, self._next, size)  # missing now, and not as a bus error later
        extent, extent_size, memory = self._extents[-1]
        where = Where(extent, extent_size, self._next - extent, size)
        self._next += size
        return _slot(memory, where)

    def close(self) -> None:
        """Closes the file. Mappings stay valid."""
        if self._file >= 0:
            os.close(self._file)
        self._file = -1


class ImportedSegment:
    """Memory in `file` that another process exports. Raises OSError if it cannot be opened."""

    def __init__(self, file: File) -> None:
        self._file = os.open(f"/proc/{file.process}/fd/{file.number}", os.O_RDWR | os.O_CLOEXEC)
        if os.fstat(self._file).st_ino != file.inode:
            self.close()
            raise FileNotFoundError
        self._extents: dict[int, mmap.mmap] = {}

    def slot(self, where: Where) -> Segment:
        """The slot at this location."""
        if where.extent not in self._extents:
            self._extents[where.extent] = mmap.mmap(self._file, where.extent_size, offset=where.extent)
        return _slot(self._extents[where.extent], where)

    def close(self) -> None:
        """Closes the file. Mappings stay valid."""
        if self._file >= 0:
            os.close(self._file)
        self._file = -1


def _slot(memory: mmap.mmap, where: Where) -> Segment:
    head, view = LINE * 8, memoryview(memory)[where.start : where.start + where.size]
    return Segment(where, view[:head].cast("q"), torch.frombuffer(view[head:], dtype=torch.uint8))


def laid_out(slot: Segment, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Flat tensors like these, one after another in a slot's data."""
    tensors_in_slot, start = [], 0
    for tensor in tensors:
        tensors_in_slot.append(slot.data[start : start + tensor.nbytes].view(tensor.dtype))
        start += room_of(tensor)
    return tensors_in_slot


def room_of(tensor: torch.Tensor) -> int:
    """Bytes that a tensor takes in a slot: the next one begins at a cache line."""
    return -(-tensor.nbytes // (LINE * 8)) * LINE * 8
