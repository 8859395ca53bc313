"""ZeRO 1: optimizer state sharded over the workers of a replica."""

from __future__ import annotations

from paceline.base.sharding import RowShards
from paceline.comm.bucket_reducer import ReduceStep
from paceline.comm.communicator import Group
from paceline.comm.fsdp_reduce_scatter import FsdpReduceScatter
from paceline.comm.gradient_buckets import Buckets
from paceline.parallel.cost_model import Cost, Facts
from paceline.parallel.layout import Layout
from paceline.parallel.parallel_job import ParallelJob


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
    staged = FsdpReduceScatter.bytes(facts.shapes, facts.each, [*facts.blocks, facts.rest], places)
    rest, blocks = facts.bytes(places, facts.rest), facts.bytes(places) - facts.bytes(places, facts.rest)
    if zero == 2:
        gathered, sent = whole, own
    else:
        largest = max((facts.bytes(numbers=block) for block in facts.blocks), default=0)
        gathered, sent = facts.bytes(numbers=facts.rest) + largest, 2 * blocks + rest
    gathers = sent if zero == 2 else forwards * sent
    sums = {"gradients": forwards * own + outer, "all_gather": gathers}
    return Cost(own + gathered + beside, own + staged, optimizer, sums)


class Zero1(Layout):
    """Level 1: each place holds the optimizer's state of its rows of every parameter, and updates these.

    A bucket's sums are scattered over the replica, then each place's part is summed over the replicas; after the update
    everybody gathers the rows of the others.
    """

    def __init__(self, job: ParallelJob, replica: Group) -> None:
        super().__init__(job, replica.allocate)
        self.replica, self.shards = replica, RowShards(replica.size, replica.rank)
        self.route = (ReduceStep("scatter", replica),)

    def land(self) -> Buckets:
        self._buckets = self.buckets()
        return self._buckets

    def complete(self) -> None:
        replica, buckets = self.replica, self._buckets
        replica.enter("the weights after an update", check=False, kind="weights")
        for bucket in buckets.buckets:  # by way of the memory of the gradients, which have been used
            buckets.offer(bucket)
        gathered = replica.gather_stretches([bucket.flat for bucket in buckets.buckets])
        for bucket, stretches in zip(buckets.buckets, gathered, strict=True):
            buckets.take(bucket, stretches)
