"""ZeRO 1: optimizer state sharded over the workers of a replica."""

from __future__ import annotations

from paceline.base.sharding import RowShards
from paceline.base.text import ranks
from paceline.comm.bucket_reducer import ReduceStep
from paceline.comm.checked_collectives import ATTEMPTS, WEIGHTS
from paceline.comm.communicator import Group
from paceline.comm.fsdp_reduce_scatter import FsdpReduceScatter
from paceline.comm.gradient_buckets import Buckets
from paceline.comm.gradient_memory import copy
from paceline.errors import WorkersDifferError
from paceline.parallel.cost_model import Cost, Facts
from paceline.parallel.layout import Layout
from paceline.parallel.parallel_job import ParallelJob


def cost(facts: Facts, zero: int, places: int, replicas: int, forwards: int, offload: bool = False) -> Cost:
    """Returns the cost of ZeRO level `zero` for a worker, in a replica of `places` workers.

    Each worker runs `forwards` micro-batches in a step. With `offload` the copies in the host's memory count as well.
    """
    all_bytes, shard_bytes = facts.bytes(), facts.bytes(places)
    other_bytes = facts.other_bytes + (facts.master_bytes(shard_bytes) or (shard_bytes if offload else 0))
    outer_bytes = shard_bytes if replicas > 1 else 0
    optimizer = facts.optimizer_bytes(shard_bytes)
    if zero == 1:
        traffic = {"gradients": shard_bytes + outer_bytes, "weights": shard_bytes}
        return Cost(all_bytes + other_bytes, all_bytes, optimizer, traffic)
    staged_bytes = FsdpReduceScatter.bytes(facts.shapes, facts.element_sizes, [*facts.blocks, facts.rest], places)
    rest, blocks = facts.bytes(places, facts.rest), facts.bytes(places) - facts.bytes(places, facts.rest)
    if zero == 2:
        gathered, sent = all_bytes, shard_bytes
    else:
        largest = max((facts.bytes(numbers=block) for block in facts.blocks), default=0)
        gathered, sent = facts.bytes(numbers=facts.rest) + largest, 2 * blocks + rest
    gathers = sent if zero == 2 else forwards * sent
    traffic = {"gradients": forwards * shard_bytes + outer_bytes, "all_gather": gathers}
    return Cost(shard_bytes + gathered + other_bytes, shard_bytes + staged_bytes, optimizer, traffic)


class Zero1(Layout):
    """ZeRO level 1: each worker of a replica has the optimizer state for its rows of every parameter and updates these.

    The gradients of a bucket are reduce-scattered over the replica, then each worker's shard is summed over the
    replicas. After the update all workers gather each other's rows.
    """

    overwrites_gradients = True

    def __init__(self, job: ParallelJob, replica: Group) -> None:
        super().__init__(job, replica.allocate)
        self.replica, self.shards = replica, RowShards(replica.size, replica.rank)
        self.route = (ReduceStep("scatter", replica),)

    def make_grad_sink(self) -> Buckets:
        """Builds the buckets that gradients are collected in."""
        self._buckets = self.buckets()
        return self._buckets

    def complete(self) -> None:
        """Gathers the updated rows of the other workers of the replica. Collective."""
        self.replica.declare("the updated weights", check=False, kind="weights")
        for _ in range(ATTEMPTS):
            self._gather()
            if self.checks is None or not self.checks.agree(self.replica):
                return
        what = f"the updated weights changed on their way between {ranks(self.replica.names)} {ATTEMPTS} times in a row"
        raise WorkersDifferError(what, "test the memory and the network of these hosts before you use them again")

    def _gather(self) -> None:
        """Gathers the rows of the other workers. Those of this worker stay as they are."""
        replica, shards, buckets, checks = self.replica, self.shards, self._buckets, self.checks
        for bucket in buckets.buckets:  # through the memory of the gradients, which are not needed any more
            for number, rows in bucket.split(bucket.local_shard):
                copy(rows, buckets.local_params[number].detach())
        transfers = []
        if checks is not None:
            for bucket in buckets.buckets:
                parts = [bucket.local_shard] * replica.size
                transfers.append(checks.sends(replica, WEIGHTS, checks.describe(bucket.members), parts))
        gathered = replica.gather_stretches([bucket.flat for bucket in buckets.buckets])
        for number, (bucket, stretches) in enumerate(zip(buckets.buckets, gathered, strict=True)):
            if checks is not None:
                checks.receives(transfers[number], stretches)
            for number, start in zip(bucket.members, bucket.starts, strict=True):
                full = buckets.params[number].detach()
                for shard_index in range(shards.count):
                    if shard_index != shards.me:
                        target = shards.of(full, shard_index)
                        copy(target, stretches[shard_index][start : start + target.numel()].view(target.shape))
