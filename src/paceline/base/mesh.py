"""The mesh: maps ranks to coordinates along the data, shard, expert, pipeline, context and tensor axes."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import astuple, dataclass, replace
from functools import cached_property
from itertools import product

from paceline.base.batching import deal

# Outer to inner: neighbours along the last have it closest.
AXES = ("data", "shard", "expert", "pipeline", "context", "tensor")
UNIT_AXES = AXES[3:]  # those along which workers compute a micro-batch together


def run_of(rank: int, count: int) -> range:
    """Divides the ranks into runs of `count`, from 0 on, and returns the run that contains this rank."""
    return range(rank - rank % count, rank - rank % count + count)


@dataclass(frozen=True)
class Mesh:
    """The sizes of the axes. `data`, `shard` and `expert` divide the rows of a batch; all but `data` divide the model.

    A *unit* computes a micro-batch together; a *replica* is the units that together hold one copy of the state, and
    `data` is the number of replicas. The *shard index* of a worker is its position in its replica; its *twins* have the
    same shard index, and therefore hold the same.
    """

    data: int = 1
    shard: int = 1
    expert: int = 1
    pipeline: int = 1
    context: int = 1
    tensor: int = 1

    @cached_property
    def unit(self) -> int:
        """The workers of a unit."""
        return self.pipeline * self.context * self.tensor

    @cached_property
    def replica(self) -> int:
        """The workers of a replica."""
        return self.shard * self.each_shard

    @property
    def each_shard(self) -> int:
        """The workers that together hold one of the shards along `shard`."""
        return self.expert * self.unit

    @property
    def group_sizes(self) -> tuple[int, ...]:
        """The sizes of the groups of neighbouring ranks that exchange the more, the smaller they are: from 1 on, those
        along `tensor` alone, along `context`, too, and so on, to a replica.
        """
        sizes = (1, self.tensor, self.context * self.tensor, self.unit, self.each_shard, self.replica)
        return tuple(sorted({*sizes}))

    @property
    def units(self) -> int:
        """The number of units, each of which computes whole micro-batches."""
        return self.data * self.shard * self.expert

    @property
    def size(self) -> int:
        """The number of workers."""
        return self.data * self.replica

    def over(self, workers: int) -> Mesh:
        """Returns a mesh of as many such replicas as these workers make; `data` is 0 if they are too few for one."""
        return replace(self, data=workers // self.replica)

    def _step(self, axis: str) -> int:
        """Returns the distance from a rank to the next one along an axis."""
        return math.prod(astuple(self)[AXES.index(axis) + 1 :])

    def coordinate(self, rank: int, axis: str) -> int:
        """Returns the coordinate of a rank along an axis."""
        size: int = getattr(self, axis)
        return rank // self._step(axis) % size

    def peers(self, rank: int, *axes: str) -> tuple[int, ...]:
        """Returns the ranks, in order, that differ from this one along these axes only, `rank` among them."""
        steps = [(axis, self._step(axis)) for axis in AXES if axis in axes]
        first = rank - sum(self.coordinate(rank, axis) * step for axis, step in steps)
        return tuple(first + sum(at) for at in product(*(range(0, getattr(self, a) * step, step) for a, step in steps)))

    def twins(self, rank: int) -> tuple[int, ...]:
        """Returns the ranks with the same shard index in all replicas, `rank` among them."""
        return self.peers(rank, "data")

    def teams(self, count: int) -> list[range]:
        """Divides the ranks into `count` teams of whole replicas, or into one team per replica if there are fewer.

        The first teams have one replica more if `count` does not divide the replicas.
        """
        runs = deal(self.data, [1.0] * min(count, self.data))
        return [range(run.start * self.replica, run.stop * self.replica) for run in runs]

    def shard_index_of(self, rank: int) -> int:
        """Returns the position of a rank in its replica."""
        return rank % self.replica

    def unit_of(self, rank: int) -> int:
        """Returns the number of the unit that a rank belongs to, counted over all replicas."""
        return rank // self.unit

    def speaks(self, rank: int) -> bool:
        """Whether a rank reports loss, counts and outputs of its unit: the first rank that has the last stage."""
        return rank % self.unit == (self.pipeline - 1) * self.context * self.tensor

    def replica_of(self, rank: int) -> int:
        """Returns the number of the replica that a rank belongs to."""
        return rank // self.replica

    @property
    def replicas(self) -> list[range]:
        """The ranks of each."""
        return [run_of(first, self.replica) for first in range(0, self.size, self.replica)]


def holders(part: int, servers: int, copies: int) -> list[int]:
    """Returns the parameter servers that hold a part: its own server, then those with copies.

    The first of them that is alive is responsible for the part.
    """
    return [(part + further) % servers for further in range(copies + 1)]


def pick_ranks(free: Collection[int], count: int, sizes: Sequence[int]) -> list[int]:
    """Picks `count` of the `free` ranks for the workers of one host, or all if there are fewer.

    Whole groups of the `sizes` of `Mesh.group_sizes` stay on a host where they fit: the host takes the largest groups
    that it can, from the first on; its remaining workers take ranks from the last on, where they break no group that
    another host can take.
    """
    left, picked = sorted(free), list[int]()
    for size in reversed(sizes):
        groups = [run_of(rank, size) for rank in left if rank % size == 0]
        groups = [group for group in groups if {*group} <= {*left}]
        wanted = (count - len(picked)) // size
        for group in groups[-wanted:] if picked and wanted else groups[:wanted]:
            picked += group
        left = [rank for rank in left if rank not in picked]
    return sorted(picked)
