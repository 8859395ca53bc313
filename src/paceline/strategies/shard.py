"""Sharding as in ZeRO (Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models",
SC 2020): the workers of a replica hold rows of what each of them would hold whole.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from paceline.comm.buckets import Bucket
from paceline.comm.group import Group
from paceline.comm.staging import Staging
from paceline.pieces import Shards
from paceline.strategies.base import Job, Orders, Ready, Single, Strategy, Sums
from paceline.strategies.chunks import MicroBatch
from paceline.strategies.cost import Cost, Facts


def cost(facts: Facts, zero: int, places: int, replicas: int, forwards: int, offload: bool = False) -> Cost:
    """Of a replica of so many places, whose workers make so many forwards in a step each. With `offload` the copies in
    the host's memory count as well.
    """
    whole, own = facts.bytes(), facts.bytes(places)
    beside = facts.beside + (own if offload else 0)
    outer = own if replicas > 1 else 0
    optimizer = int(facts.state * own)
    if zero == 1:
        return Cost(whole + beside, whole, optimizer, {"gradients": own + outer, "weights": own})
    staged = Staging.bytes(facts.shapes, facts.each, [*facts.blocks, facts.rest], places)
    rest, blocks = facts.bytes(places, facts.rest), facts.bytes(places) - facts.bytes(places, facts.rest)
    if zero == 2:
        gathered, sent = whole, own
    else:
        largest = max((facts.bytes(numbers=block) for block in facts.blocks), default=0)
        gathered, sent = facts.bytes(numbers=facts.rest) + largest, 2 * blocks + rest
    gathers = sent if zero == 2 else forwards * sent
    sums = {"gradients": forwards * own + outer, "all_gather": gathers}
    return Cost(own + gathered + beside, own + staged, optimizer, sums)


class Shard(Strategy):
    """Level 1: each place holds the optimizer's state of its rows of every parameter, and updates these.

    A bucket's sums are scattered over the replica, then the layer above sums each place's part over the replicas; after
    the update everybody gathers the rows of the others.
    """

    def __init__(self, job: Job, replica: Group) -> None:
        self.job, self.replica = job, replica
        self.single = Single(job, replica.allocate, Shards(replica.size, replica.rank))
        self.inner = self.single
        self._works: list[tuple[dist.Work | None, Bucket]] = []
        self._ready: Ready | None = None

    def gradients(self, micro_batches: Sequence[MicroBatch], orders: Orders, ready: Ready | None = None) -> Sums:
        self._works, self._ready = [], ready
        self.replica.enter(f"step {orders.step + 1}", check=False, kind="gradients")
        sums = self.inner.gradients(micro_batches, orders, self.reduce)
        self._hand_on(wait=True)
        return sums

    def reduce(self, bucket: Bucket) -> None:
        self._works.append((self.replica.start_scatter(bucket.flat), bucket))
        self._hand_on(wait=False)

    def _hand_on(self, wait: bool) -> None:
        """Buckets whose part has arrived go to the layer above, in order."""
        while self._works:
            work, bucket = self._works[0]
            if not wait and work is not None and not work.is_completed():
                return
            self.replica.finish(work)
            self._works.pop(0)
            if self._ready is not None:
                self._ready(bucket)

    def squares(self, orders: Orders, known: float | None = None) -> torch.Tensor:
        return self.replica.sum(self.inner.squares(orders, known))

    def gather_weights(self) -> None:
        self.replica.enter("the weights after an update", check=False, kind="weights")
        buckets = self.single.buckets
        assert buckets is not None
        for bucket in buckets.buckets:  # by way of the memory of the gradients, which have been used
            buckets.offer(bucket)
        gathered = self.replica.gather_stretches([bucket.flat for bucket in buckets.buckets])
        for bucket, stretches in zip(buckets.buckets, gathered, strict=True):
            buckets.take(bucket, stretches)

    def abort(self, again: bool = False) -> None:
        self.replica.abandon([work for work, _ in self._works])
        self._works = []
        self.inner.abort(again)
