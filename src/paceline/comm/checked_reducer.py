"""Reduces gradient buckets with digests of all that travels, so that a bit that flips on the way is noticed.

Each worker sends each other worker its slice of a bucket, as in a reduce-scatter. A worker that receives slices adds
them up in the order of the workers, and gives its sums to all. Where a codec sums between hosts, the first worker of
each host gets the buckets of its host's workers, and gives them the decoded sums. The digests of all
these messages are compared, so that every worker can name the sender of a message that was changed in transit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.distributed as dist

from paceline.comm.bucket_reducer import BucketReducer, OnReduced, ReduceStep
from paceline.comm.checked_collectives import CONTRIBUTION, FIGURES, MEMORY, SUM, CheckedLeaders, TransferChecks
from paceline.comm.communicator import Group
from paceline.comm.compression import Codec
from paceline.comm.digests import checksum
from paceline.comm.gradient_buckets import Bucket
from paceline.comm.hierarchical import Between, HierarchicalTransport
from paceline.comm.progress_engine import Steps


class CheckedReducer(BucketReducer):
    """Moves the buckets of a step along a route, one after another once all are complete, and records digests in
    `checks`.

    `look` is called with each bucket when it is complete. The last step of the route uses the `codec`, if there is one.
    Transfers that were made `also` within these groups are compared, too. Injected faults set `tamper`: it gets each
    bucket once its digests were taken.
    """

    def __init__(
        self,
        group: Group,
        route: Sequence[ReduceStep],
        look: Callable[[Bucket], None],
        checks: TransferChecks,
        codec: Codec | None = None,
        also: Sequence[Group] = (),
    ) -> None:
        super().__init__(group, route, codec)
        self.look, self.checks, self.also = look, checks, also
        self.tamper: Callable[[Bucket], None] | None = None
        self._complete: list[tuple[Bucket, list[int]]] = []
        self._held: dict[int, list[tuple[torch.Tensor, int]]] = {}  # by bucket: its sums so far, and their digests

    def begin(self, name: str, on_reduced: OnReduced | None = None) -> None:
        """Starts a step, as `BucketReducer.begin` does."""
        super().begin(name, on_reduced)
        self.abandon()

    def abandon(self) -> None:
        """Forgets all buckets."""
        self._complete, self._held = [], {}

    def send(self, bucket: Bucket) -> None:
        """Takes a bucket that is complete on this worker, and its digests."""
        number = self._next(0, bucket)
        # Before `look`: a bit that flips in between is then different in at least one of both.
        sent = self._digests(number, bucket)
        self._held[bucket.index] = [] if sent else [(bucket.local_shard, checksum(bucket.local_shard))]
        self.look(bucket)
        if self.tamper is not None:
            self.tamper(bucket)
        self._complete.append((bucket, sent))

    def hand_on(self) -> None:
        """Does nothing: the buckets move in `start_last`."""

    def start_last(self, small: torch.Tensor) -> dist.Work | None:
        """Sums all buckets, and then a small tensor in place."""
        for bucket, sent in () if self._sum_in_place() else self._complete:
            number = self._next(0, bucket)
            while number < len(self.route):
                self._move(number, bucket, sent)
                number = self._next(number + 1, bucket)
                sent = self._digests(number, bucket)
            self._start(len(self.route), bucket)
        if self.group.size > 1:
            parts = small.view(-1).tensor_split(self.group.size)
            self._sum(self.group, FIGURES, parts, [checksum(part) for part in parts])
        return None

    def finish(self) -> None:
        """Compares the digests with those of the other workers."""
        self.checks.compare([*(step.among for step in self.route), self.group, *self.also])

    def confirm(self) -> None:
        """Compares the sums in memory with the digests that came with them."""
        for bucket, _ in self._complete:
            self._confirm(bucket)

    def _confirm(self, bucket: Bucket) -> None:
        if any(checksum(flat) != digest for flat, digest in self._held[bucket.index]):
            self.checks.note(MEMORY, self.group, self.group.rank, self.checks.describe(bucket.members))

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
        """Returns the part of a bucket that goes to each worker of a step."""
        step = self.route[number]
        if step.kind == "scatter":
            return bucket.flat.view(step.among.size, -1).unbind(0)
        if self._coded(number, bucket):
            flat, leader = bucket.local_shard, _leader(step.among)
            return [flat if rank == leader else flat[:0] for rank in range(step.among.size)]
        return bucket.local_shard.tensor_split(step.among.size)

    def _coded(self, number: int, bucket: Bucket) -> bool:
        """Whether a step sums a bucket between hosts with the codec."""
        codec, among = self.codec, self.route[number].among
        last = number == len(self.route) - 1
        return codec is not None and last and codec.fits(bucket) and len(among.leaders) > 1

    def _digests(self, number: int, bucket: Bucket) -> list[int]:
        return [checksum(part) for part in self._slices(number, bucket)] if number < len(self.route) else []

    def _move(self, number: int, bucket: Bucket, sent: list[int]) -> None:
        """Makes one reduce step of a bucket, of whose parts digests were taken before."""
        step, parts = self.route[number], self._slices(number, bucket)
        self._confirm(bucket)  # after these digests: a bit that flips in between is then different in one of both
        tensors = self.checks.describe(bucket.members)
        if self._coded(number, bucket):
            held = self._sum_coded(step.among, bucket, tensors, parts, sent)
        elif step.kind == "scatter":
            total, digest = self.checks.sum(step.among, tensors, parts, sent)
            held = [(parts[step.among.rank].copy_(total), digest)]
        else:
            held = self._sum(step.among, tensors, parts, sent)
        self._held[bucket.index] = held

    def _sum(
        self, among: Group, tensors: str, parts: Sequence[torch.Tensor], sent: Sequence[int]
    ) -> list[tuple[torch.Tensor, int]]:
        """Sums the slices on all workers, in place. Returns them with their digests."""
        total, digest = self.checks.sum(among, tensors, parts, sent)
        return [*zip(parts, self.checks.gather(among, SUM, tensors, total, digest, parts), strict=True)]

    def _sum_in_place(self) -> bool:
        """Sums all buckets at once where they lie, if there is one step and its workers share the buckets' memory.
        Returns whether it did.

        Each worker reads its slice of all workers' buckets, and writes the sum to its own bucket, where the others read
        it. Nobody else reads that slice before.
        """
        if len(self.route) != 1 or self.route[0].kind != "sum" or self.codec is not None or self.route[0].of_shared:
            return False
        among, rank = self.route[0].among, self.route[0].among.rank
        buckets = [bucket for bucket, _ in self._complete]
        shared = among.in_shared_memory([bucket.local_shard for bucket in buckets])
        if shared is None:
            return False
        checks, size = self.checks, sum(bucket.local_shard.nbytes for bucket in buckets) // among.size
        slices = [[tensor.tensor_split(among.size) for tensor in tensors] for tensors in shared]
        names = [checks.describe(bucket.members) for bucket in buckets]
        transfers = []
        for (_, sent), tensors, parts in zip(self._complete, names, slices, strict=True):
            transfers.append(checks.sends(among, CONTRIBUTION, tensors, parts[rank], sent))
        among.meet_to_read(size * (among.size - 1))
        for number, (tensors, parts) in enumerate(zip(names, slices, strict=True)):
            taken = [each[rank] for each in parts]
            checks.receives(transfers[number], taken)
            total, digest = checks.add(among, tensors, taken)
            parts[rank][rank].copy_(total)
            given = [parts[rank][rank]] * among.size
            transfers[number] = checks.sends(among, SUM, tensors, given, [digest] * among.size)
        among.meet_to_read(size * (among.size - 1))
        for bucket, transfer, parts in zip(buckets, transfers, slices, strict=True):
            for other, part in enumerate(parts[rank]):
                if other != rank:
                    part.copy_(parts[other][other])
            checks.receives(transfer, parts[rank])
            self._held[bucket.index] = [*zip(parts[rank], transfer.received, strict=True)]
            self._start(len(self.route), bucket)
        return True

    def _sum_coded(
        self, among: Group, bucket: Bucket, tensors: str, parts: Sequence[torch.Tensor], sent: Sequence[int]
    ) -> list[tuple[torch.Tensor, int]]:
        """Sums a bucket between hosts with the codec. Returns it with its digest."""
        assert self.codec is not None
        flat, hosts, leader, checks = bucket.local_shard, among.hosts, _leader(among), self.checks
        if checksum(flat) != sent[leader]:
            checks.note(MEMORY, among, among.rank, tensors)
        self.codec.prepare(bucket, among)
        host = [rank for rank in range(among.size) if leader == among.rank and hosts[rank] == hosts[leader]]
        taken = [flat.new_empty(len(flat) if rank in host else 0) for rank in range(among.size)]
        checks.exchange(among, checks.sends(among, CONTRIBUTION, tensors, parts), parts, taken)
        total = checks.add(among, tensors, [taken[rank] for rank in host])[0].cpu() if host else flat[:0]
        steps = partial(self._between, self.codec.between(bucket, among), total, among, tensors)
        among.finish(among.start_steps(flat.nbytes, steps))
        sums = [total.to(flat) if rank in host else flat[:0] for rank in range(among.size)]
        transfer = checks.sends(among, SUM, tensors, sums)
        checks.exchange(among, transfer, sums, parts)
        return [(flat, transfer.received[leader])]

    def _between(
        self,
        between: Between,
        total: torch.Tensor,
        among: Group,
        tensors: str,
        hosts: HierarchicalTransport | None,
        fp: int,
    ) -> Steps:
        """Sums what the leaders have, in place."""
        if hosts is not None and hosts.leaders is not None:
            yield from hosts.leaders.same(fp)
            yield from between(CheckedLeaders(hosts.leaders, self.checks, among, tensors), total)


def _leader(among: Group) -> int:
    """Returns the rank of the first worker of this worker's host."""
    return among.hosts.index(among.hosts[among.rank])
