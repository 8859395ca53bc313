"""Reduces gradient buckets with digests of all that travels, so that a bit that flips on the way is noticed.

Each worker sends each other worker its slice of a bucket, as in a reduce-scatter, and digests of the slices that were
taken before. A worker that receives slices adds them up in the order of the workers, digests what it has added, and
gives its sums to all, again with a digest. So every worker knows whose part changed on the way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import torch.distributed as dist

from paceline.comm.bucket_reducer import BucketReducer, OnReduced, ReduceStep
from paceline.comm.communicator import Group
from paceline.comm.digests import checksum
from paceline.comm.gradient_buckets import Bucket

FIGURES = -1  # the index, in a `SumFault`, of the small tensor that follows the buckets


class SumFault(NamedTuple):
    """A difference of digests. `kind` is what has changed: a worker's "contribution" to a sum, or its "sum", on the way
    to another worker, its "addition", or the sums in its "memory". `worker` is its number in the run, and `bucket` the
    index of the bucket.
    """

    kind: str
    worker: int
    bucket: int


@dataclass
class _Moved:
    """The digests of one tensor in one reduce step: of the slices `sent` to each worker and `received` from each, of
    the slice that this worker has `added` up, and of those that it has `gathered`.
    """

    bucket: int
    sent: list[int]
    received: list[int] = field(default_factory=list)
    added: int = 0
    gathered: list[int] = field(default_factory=list)


class CheckedReducer(BucketReducer):
    """Moves the buckets of a step along a route, one after another once all are complete, and checks digests.

    `look` is called with each bucket when it is complete. `faults` has the differences that this worker has seen after
    `finish`. Injected faults set `tamper`: it gets "bucket" once the digests of a bucket were taken, "transit" before
    a slice goes to another worker, with the bucket and the slice.
    """

    def __init__(self, group: Group, route: Sequence[ReduceStep], look: Callable[[Bucket], None]) -> None:
        super().__init__(group, route)
        self.look = look
        self.tamper: Callable[[str, Bucket, torch.Tensor], None] | None = None
        self.faults: list[SumFault] = []
        self._complete: list[tuple[Bucket, list[int]]] = []
        self._moved: list[list[_Moved]] = []
        self._held: dict[int, list[tuple[torch.Tensor, int]]] = {}  # by bucket: its sums so far, and their digests

    def begin(self, name: str, on_reduced: OnReduced | None = None) -> None:
        """Starts a step, as `BucketReducer.begin` does."""
        super().begin(name, on_reduced)
        self.abandon()

    def abandon(self) -> None:
        """Forgets all buckets and digests."""
        self.faults, self._complete, self._held = [], [], {}
        self._moved = [[] for _ in range(len(self.route) + 1)]

    def send(self, bucket: Bucket) -> None:
        """Takes a bucket that is complete on this worker, and its digests."""
        number = self._next(0, bucket)
        # Before `look`: a bit that flips in between is then different in at least one of both.
        sent = self._digests(number, bucket)
        self._held[bucket.index] = [] if sent else [(bucket.local_shard, checksum(bucket.local_shard))]
        self.look(bucket)
        if self.tamper is not None:
            self.tamper("bucket", bucket, bucket.flat)
        self._complete.append((bucket, sent))

    def hand_on(self) -> None:
        """Does nothing: the buckets move in `start_last`."""

    def start_last(self, small: torch.Tensor) -> dist.Work | None:
        """Sums all buckets, and then a small tensor in place."""
        for bucket, sent in self._complete:
            number = self._next(0, bucket)
            while number < len(self.route):
                self._move(number, bucket, sent)
                number = self._next(number + 1, bucket)
                sent = self._digests(number, bucket)
            self._start(len(self.route), bucket)
        if self.group.size > 1:
            parts = small.view(-1).tensor_split(self.group.size)
            moved = _Moved(FIGURES, [checksum(part) for part in parts])
            self._sum(self.group, "sum", parts, moved)
            self._moved[-1].append(moved)
        return None

    def finish(self) -> None:
        """Compares the digests with those of the other workers."""
        for among, moved in zip([*(step.among for step in self.route), self.group], self._moved, strict=True):
            if moved:
                self._compare(among, moved)

    def confirm(self) -> None:
        """Compares the sums in memory with the digests that came with them."""
        for bucket in self._held:
            self._confirm(bucket)

    def _confirm(self, bucket: int) -> None:
        if any(checksum(flat) != digest for flat, digest in self._held[bucket]):
            self.faults.append(SumFault("memory", self.group.names[self.group.rank], bucket))

    def squares(self) -> float | None:
        """Returns None: the sums have to be read again."""
        return None

    def _next(self, number: int, bucket: Bucket) -> int:
        """Returns the number of the next step that moves a bucket; that of the end if there is none."""
        for step in self.route[number:]:
            if step.among.size > 1 and not (step.of_shared and bucket.divided):
                break
            number += 1
        return number

    def _slices(self, number: int, bucket: Bucket) -> Sequence[torch.Tensor]:
        """Returns the slice of a bucket that each worker of a step adds up."""
        step = self.route[number]
        if step.kind == "scatter":
            return bucket.flat.view(step.among.size, -1).unbind(0)
        return bucket.local_shard.tensor_split(step.among.size)

    def _digests(self, number: int, bucket: Bucket) -> list[int]:
        return [checksum(part) for part in self._slices(number, bucket)] if number < len(self.route) else []

    def _move(self, number: int, bucket: Bucket, sent: list[int]) -> None:
        """Makes one reduce step of a bucket, of whose slices digests were taken before."""
        step, parts = self.route[number], self._slices(number, bucket)
        self._confirm(bucket.index)  # after these digests: a bit that flips in between is then different in one of both
        if self.tamper is not None:
            self.tamper("transit", bucket, parts[(step.among.rank + 1) % len(parts)])
        moved = _Moved(bucket.index, sent)
        self._sum(step.among, step.kind, parts, moved)
        self._moved[number].append(moved)
        kept = [parts[step.among.rank]] if step.kind == "scatter" else parts
        digests = [moved.added] if step.kind == "scatter" else moved.gathered
        self._held[bucket.index] = list(zip(kept, digests, strict=True))

    def _sum(self, among: Group, kind: str, parts: Sequence[torch.Tensor], moved: _Moved) -> None:
        """Adds up this worker's slices, and for a sum gathers the slices of all."""
        taken = [torch.empty_like(parts[among.rank]) for _ in parts]
        among.exchange(parts, taken)
        total = _add(taken)
        # A bit that has flipped in a slice while it was added is still different after that.
        moved.received = [checksum(part) for part in taken]
        moved.added = checksum(total)
        if checksum(_add(taken)) != moved.added:
            self.faults.append(SumFault("addition", among.names[among.rank], moved.bucket))
        if kind == "scatter":
            parts[among.rank].copy_(total)
            return
        for part, row in zip(parts, among.gather(total), strict=True):
            part.copy_(row)
            moved.gathered.append(checksum(part))

    def _compare(self, among: Group, moved: Sequence[_Moved]) -> None:
        """Compares digests of slices with those of their senders, and digests of sums with those of who added them."""
        given = [torch.tensor([one.sent[rank] for one in moved], dtype=torch.int64) for rank in range(among.size)]
        taken = [torch.empty_like(one) for one in given]
        among.exchange(given, taken)
        rows = among.gather(torch.tensor([one.added for one in moved], dtype=torch.int64))
        for name, sent, added, rank in zip(among.names, taken, rows, range(among.size), strict=True):
            for one, sent_digest, added_digest in zip(moved, sent.tolist(), added.tolist(), strict=True):
                if one.received[rank] != sent_digest:
                    self.faults.append(SumFault("contribution", name, one.bucket))
                if one.gathered and one.gathered[rank] != added_digest:
                    self.faults.append(SumFault("sum", name, one.bucket))


def _add(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Adds tensors up in their order, as sums in shared memory do."""
    total = parts[0].clone() if len(parts) == 1 else torch.add(parts[0], parts[1])
    for part in parts[2:]:
        total.add_(part)
    return total
