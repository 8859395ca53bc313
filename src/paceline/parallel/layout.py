"""Base class of layouts: which part of a model a worker holds (here all of it).

The plain layout: all of it, and each worker runs it by itself.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from paceline.base.sharding import ALONE, RowShards
from paceline.comm.bucket_reducer import ReduceStep
from paceline.comm.exact_sums import ExactBuckets
from paceline.comm.gradient_buckets import Allocate, Buckets, GradSink
from paceline.compute.state_dict import own_of
from paceline.parallel.parallel_job import ParallelJob


class Layout:
    """Gradients land in buckets of memory from `allocate`, to be summed, or stay where they are.

    `shards` share the rows that optimizers hold. A bucket's way to them is `route`, before it is summed over replicas.
    """

    shards: RowShards = ALONE
    route: tuple[ReduceStep, ...] = ()
    gathers = False  # whether parameters are gathered from others before they are used

    def __init__(self, job: ParallelJob, allocate: Allocate | None = None) -> None:
        self.job, self.allocate = job, allocate

    def select_local_params(self) -> None:
        """The job's `own` parameters: those that optimizers are to hold here."""
        self.job.local_params, self.job.local_cuts = own_of(self.job.named, self.job.cuts, self.shards, self.job.unit)

    def land(self) -> GradSink:
        """Where gradients of the parameters land."""
        return GradSink(self.job.dense) if self.allocate is None else self.buckets()

    def buckets(self) -> Buckets:
        kind = ExactBuckets if self.job.exact else Buckets
        return kind(
            self.job.dense, shards=self.shards, local_params=[*self.job.local_params.values()][: len(self.job.dense)]
        )

    def running(self, name: str) -> AbstractContextManager[None]:
        """Around the forwards and backwards of a step of this name."""
        return nullcontext()

    def complete(self) -> None:
        """After an update, and in a new generation: brings what of the weights others have updated. Collective."""

    def rest(self) -> None:
        """What a forward or backward has left, or where it was cut off, is gone."""

    def gathered(self) -> int:
        """Bytes of parameters that are here for a while, at most, beside those that always are."""
        return 0
