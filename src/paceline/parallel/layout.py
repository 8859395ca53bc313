"""Base class of layouts, which decide which part of a model a worker holds (in this class, all of it).

In the plain layout each worker holds the full model and runs it by itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

from paceline.base.sharding import ALONE, RowShards
from paceline.comm.bucket_reducer import ReduceStep
from paceline.comm.checked_collectives import TransferChecks
from paceline.comm.communicator import Group
from paceline.comm.gradient_buckets import Buckets
from paceline.comm.gradient_memory import Allocate
from paceline.comm.gradient_sinks import GradSink, GradsInPlace
from paceline.compute.state_dict import own_of
from paceline.parallel.parallel_job import ParallelJob


class Layout:
    """The base layout: each worker holds the full model.

    With `allocate`, gradients are collected in buckets of memory that it allocates, to be summed; without it they stay
    in the parameters. `shards` says which rows of the parameters each worker's optimizer updates. `route` are the
    reduce steps of a bucket within the replica, before it is summed over the replicas.
    """

    shards: RowShards = ALONE
    route: tuple[ReduceStep, ...] = ()
    overwrites_gradients = False  # whether `complete` uses their memory
    gathers = False  # whether parameters are gathered from others before they are used
    groups: Sequence[Group] = ()  # within which it sends something during forwards and backwards
    checks: TransferChecks | None = None  # in a verified step

    def __init__(self, job: ParallelJob, allocate: Allocate | None = None) -> None:
        self.job, self.allocate = job, allocate

    def select_local_params(self) -> None:
        """Sets the job's `local_params`: the rows of the parameters that this worker's optimizers get."""
        job = self.job
        job.local_params, job.local_cuts = own_of(job.named, job.cuts, self.shards, job.each_shard)

    def check(self, checks: TransferChecks | None) -> None:
        """Begins to record the digests of what travels within the replica, or with None ends it."""
        self.checks = checks

    def make_grad_sink(self) -> GradSink:
        """Returns the object that collects the gradients of the parameters."""
        return GradsInPlace(self.job.dense) if self.allocate is None else self.buckets()

    def buckets(self) -> Buckets:
        """Builds buckets for the gradients of the dense parameters."""
        dense = self.job.dense
        local_params = [*self.job.local_params.values()][: len(dense)]
        exact, divided = self.job.exact, self.job.divided_numbers
        return Buckets(dense, shards=self.shards, local_params=local_params, exact=exact, divided=divided)

    def running(self, name: str) -> AbstractContextManager[None]:
        """Returns a context for the forwards and backwards of a step; `name` describes the step."""
        return nullcontext()

    def complete(self) -> None:
        """Fetches the weights that other workers have updated, after an update or in a new generation. Collective."""

    def rest(self) -> None:
        """Frees what a forward or backward has left, also one that was cut off."""

    def gathered(self) -> int:
        """Returns the most bytes of gathered parameters held at a time, beyond those that are always held."""
        return 0
