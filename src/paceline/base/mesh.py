"""The mesh: maps ranks to coordinates along the data, shard, pipeline, context and tensor axes."""

from __future__ import annotations

import math
from dataclasses import astuple, dataclass, replace
from functools import cached_property
from itertools import product

from paceline.base.batching import deal

AXES = ("data", "shard", "pipeline", "context", "tensor")  # outer to inner: neighbours along the last have it closest


def run_of(rank: int, count: int) -> range:
    """Of the runs of `count` ranks, one after another from 0 on, the one that has this rank."""
    return range(rank - rank % count, rank - rank % count + count)


@dataclass(frozen=True)
class Mesh:
    """The sizes of the axes. `data` and `shard` divide the rows of a batch, the others the model.

    A *unit* computes a micro-batch together; a *replica* is the units that together hold one copy of the state, and
    `data` is the number of replicas. The *place* of a worker is where it is in its replica; its *twins* have the same
    place, and therefore hold the same.
    """

    data: int = 1
    shard: int = 1
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
        return self.shard * self.unit

    @property
    def units(self) -> int:
        return self.data * self.shard

    @property
    def size(self) -> int:
        return self.data * self.replica

    def over(self, workers: int) -> Mesh:
        """As many replicas like these as so many workers make; none, where they are too few for one."""
        return replace(self, data=workers // self.replica)

    def _step(self, axis: str) -> int:
        """From a rank to the next one along an axis."""
        return math.prod(astuple(self)[AXES.index(axis) + 1 :])

    def coordinate(self, rank: int, axis: str) -> int:
        size: int = getattr(self, axis)
        return rank // self._step(axis) % size

    def peers(self, rank: int, *axes: str) -> tuple[int, ...]:
        """The ranks, in order, that differ from this one along these axes alone; itself is one of them."""
        steps = [(axis, self._step(axis)) for axis in AXES if axis in axes]
        first = rank - sum(self.coordinate(rank, axis) * step for axis, step in steps)
        return tuple(first + sum(at) for at in product(*(range(0, getattr(self, a) * step, step) for a, step in steps)))

    def twins(self, rank: int) -> tuple[int, ...]:
        return self.peers(rank, "data")

    def teams(self, count: int) -> list[range]:
        """The ranks of so many teams, the first ones larger by one replica where that does not divide them; of no more
        than there are replicas.
        """
        runs = deal(self.data, [1.0] * min(count, self.data))
        return [range(run.start * self.replica, run.stop * self.replica) for run in runs]

    def shard_index_of(self, rank: int) -> int:
        return rank % self.replica

    def unit_of(self, rank: int) -> int:
        """Which unit it is of, counted through all replicas."""
        return rank // self.unit

    def speaks(self, rank: int) -> bool:
        """Whether it is the one of its unit that tells loss, counts and outputs: the first that has the last stage."""
        return rank % self.unit == (self.pipeline - 1) * self.context * self.tensor

    def replica_of(self, rank: int) -> int:
        return rank // self.replica

    @property
    def replicas(self) -> list[range]:
        """The ranks of each."""
        return [run_of(first, self.replica) for first in range(0, self.size, self.replica)]


def holders(part: int, servers: int, copies: int) -> list[int]:
    """The parameter servers that hold the part of one: itself first, and whoever has copies. The first of them that
    lives counts for it.
    """
    return [(part + further) % servers for further in range(copies + 1)]
