"""Reduces gradient buckets hop by hop while backward is still running."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from paceline.comm.communicator import Group
from paceline.comm.compression import Codec
from paceline.comm.gradient_buckets import Bucket
from paceline.comm.progress_engine import Operation

OnReduced = Callable[[int, torch.Tensor], None]


class ReduceStep(NamedTuple):
    """One step of a route, among the workers of a group.

    `scatter` leaves each worker the sums of its own shard of a bucket; `sum` leaves all of them the sums of their
    shards. A step `of_shared` parameters leaves `divided` buckets as they are: each worker of the group has others.
    """

    kind: str
    among: Group
    of_shared: bool = False


class BucketReducer:
    """Moves the buckets of a step along one route, in order. Nothing waits before `finish`.

    The last step of the route uses the `codec`, if there is one.
    """

    def __init__(self, group: Group, route: Sequence[ReduceStep], codec: Codec | None = None) -> None:
        self.group, self.route, self.codec = group, route, codec
        self._queues: list[deque[tuple[dist.Work | None, Bucket]]] = [deque() for _ in route]
        self._arrived: list[Bucket] = []
        self._on_reduced: OnReduced | None = None

    def begin(self, name: str, on_reduced: OnReduced | None = None) -> None:
        """Starts a step; `on_reduced` is called with the index and the shard of each bucket that arrives."""
        self._arrived, self._on_reduced = [], on_reduced
        for _, among, _ in self.route:
            if among is not self.group:  # which has been entered
                among.declare(name, check=False, kind="gradients")

    def send(self, bucket: Bucket) -> None:
        """Takes a bucket that is complete on this worker."""
        self._start(0, bucket)
        self._advance(len(self.route), wait=False)

    def hand_on(self) -> None:
        """Waits until all buckets are on the last step, where other small sums may follow them."""
        self._advance(len(self.route) - 1, wait=True)

    def start_last(self, small: torch.Tensor) -> dist.Work | None:
        """Starts summing a small tensor in place over the workers of `group`, behind all buckets."""
        return self.group.start_sum(small)

    def finish(self) -> None:
        """Waits until all buckets have arrived."""
        self._advance(len(self.route), wait=True)

    def abandon(self) -> None:
        """Gives up all buckets that are under way."""
        for queue in self._queues:
            self.group.abandon([work for work, _ in queue])
            queue.clear()

    def squares(self) -> float | None:
        """The sum of squares of all buckets over the last step's workers, if summing has computed it."""
        return self.route[-1].among.squares([bucket.local_shard for bucket in self._arrived])

    def _start(self, number: int, bucket: Bucket) -> None:
        if number == len(self.route):
            self._arrived.append(bucket)
            if self._on_reduced is not None:
                self._on_reduced(bucket.index, bucket.local_shard)
            return
        kind, among, of_shared = self.route[number]
        work: dist.Work | None
        if of_shared and bucket.divided:
            work = None  # it stays in line: all workers make the next step in the same order
        elif kind == "scatter":
            work = among.start_scatter(bucket.flat)
        elif self.codec is not None and number == len(self.route) - 1:
            work = self.codec.start(bucket, among)
        else:
            work = among.start_sum(bucket.local_shard)
        if isinstance(work, Operation):
            work.overtakes = True
        self._queues[number].append((work, bucket))

    def _advance(self, hops: int, wait: bool) -> None:
        """Moves buckets that have finished one of the first `hops` steps on, in order; with `wait`, waits for them."""
        for number, queue in enumerate(self._queues[:hops]):
            while queue:
                work, bucket = queue[0]
                if not wait and work is not None and not work.is_completed():
                    break
                self.group.finish(work)
                queue.popleft()
                self._start(number + 1, bucket)
