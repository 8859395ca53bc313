"""Data parallelism: every replica computes its share of the micro-batches, gradients are summed over all of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

import torch
import torch.distributed as dist

from paceline.comm.buckets import BYTES, Bucket
from paceline.comm.group import Group
from paceline.strategies.base import Job, Orders, Ready, Strategy, Sums
from paceline.strategies.chunks import MicroBatch
from paceline.strategies.cost import Cost, Facts


class Data(Strategy):
    """Sums gradients over `group` in buckets, as soon as backward completes them; shares may be unequal or empty. Where
    a replica is of several workers, each sums what it has with its twins `across` them.

    Nothing is divided here: sums and counts travel, and `Single.update` divides once by the global count.
    """

    def __init__(self, inner: Strategy, group: Group, job: Job, across: Group) -> None:
        self.inner = inner
        self.group = group
        self.job = job
        self.across = across
        self.works: list[dist.Work | None] = []
        self.summed: list[torch.Tensor] = []
        self.orders: Orders | None = None
        self.told = 0

    def gradients(self, micro_batches: Sequence[MicroBatch], orders: Orders, ready: Ready | None = None) -> Sums:
        self.works, self.summed, self.orders, self.told = [], [], orders, 0
        if self.across is not self.group:
            self.across.enter(f"step {orders.step + 1}", check=False, kind="gradients")
        return self.inner.gradients(micro_batches, orders, self.reduce)

    def reduce(self, bucket: Bucket) -> None:
        self.summed.append(bucket.mine)
        self.works.append(self.across.start_sum(bucket.mine))
        self._tell()

    def _tell(self) -> None:
        """Whoever wants to know of them is told of the sums that have arrived, in order."""
        assert self.orders is not None
        while self.orders.summed is not None and self.told < len(self.summed):
            work = self.works[self.told]
            if work is not None and not work.is_completed():
                return
            self.told += 1
            self.orders.summed(self.summed[self.told - 1])

    def agree(self, vector: torch.Tensor, sums: Sums) -> torch.Tensor:
        small = vector if sums.records is None else torch.cat([vector.to(sums.records), sums.records])
        self.works.append(self.group.start_sum(small))
        for work in self.works[:-1]:
            self.group.finish(work)
            self._tell()
        if self.orders is not None:
            self.orders.reached("summed")
        self.group.finish(self.works[-1])
        self.works = []
        if sums.records is not None:
            vector, sums.records = small[: len(vector)], small[len(vector) :]
        if sums.maxima is not None:
            self.group.largest(sums.maxima)
        return self.inner.agree(vector, sums)

    def squares(self, orders: Orders, known: float | None = None) -> torch.Tensor:
        return self.inner.squares(orders, None if self.job.exact else self.across.squares(self.summed))

    def abort(self, again: bool = False) -> None:
        self.across.abandon(self.works)
        self.works = []
        self.inner.abort(again)


def cost(facts: Facts, replicas: int) -> Cost:
    """Every worker holds all, and sends its gradients once in a step."""
    whole = facts.bytes()
    sent = {"gradients": whole} if replicas > 1 else {}
    return Cost(whole + facts.beside, whole, int(facts.state * whole), sent)


def share(tensors: Iterable[torch.Tensor], group: Group) -> None:
    """Makes worker 0's weights everybody's. Collective."""
    if group.size == 1:
        return
    group.enter("the broadcast of worker 0's weights")
    for alike in kinds(tensors, BYTES):  # so much is there twice for a moment
        alike = [tensor.detach() for tensor in alike]
        flat = torch.cat([tensor.reshape(-1) for tensor in alike])
        group.broadcast(flat)
        for tensor, part in zip(alike, flat.split([t.numel() for t in alike]), strict=True):
            tensor.copy_(part.view_as(tensor))


def kinds(tensors: Iterable[torch.Tensor], enough: int) -> Iterator[list[torch.Tensor]]:
    """Tensors of one dtype and device together, until they have `enough` bytes, or there are no more."""
    open_: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    sizes: Counter[tuple[torch.dtype, torch.device]] = Counter()
    for tensor in tensors:
        kind = tensor.dtype, tensor.device
        open_.setdefault(kind, []).append(tensor)
        sizes[kind] += tensor.nbytes
        if sizes[kind] >= enough:
            yield open_.pop(kind)
            del sizes[kind]
    yield from open_.values()
