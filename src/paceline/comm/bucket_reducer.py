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

StageInputs = Callable[[int, torch.Tensor], None]


class ReduceStep(NamedTuple):
    """Among some workers: `scatter` leaves each the sums of its own stretch of a bucket, and `sum` all of them the sums
    of what they have.
    """

    kind: str
    among: Group


class BucketReducer:
    """Moves the buckets of a step along one route, in order. Nothing waits before `finish`. The last hop is made with
    the `codec`, if there is one.
    """

    def __init__(self, group: Group, route: Sequence[ReduceStep], codec: Codec | None = None) -> None:
        self.group, self.route, self.codec = group, route, codec
        self._queues: list[deque[tuple[dist.Work | None, Bucket]]] = [deque() for _ in route]
        self._arrived: list[Bucket] = []
        self._heard: StageInputs | None = None

    def begin(self, name: str, heard: StageInputs | None = None) -> None:
        """Starts a step: each bucket that arrives is told to `heard`, with its number."""
        self._arrived, self._heard = [], heard
        for _, among in self.route:
            if among is not self.group:  # which has been entered
                among.enter(name, check=False, kind="gradients")

    def send(self, bucket: Bucket) -> None:
        """A bucket is whole here."""
        self._start(0, bucket)
        self._advance(len(self.route), wait=False)

    def hand_on(self) -> None:
        """No more will come: waits until all are on the last hop, where what else is small may follow them."""
        self._advance(len(self.route) - 1, wait=True)

    def finish(self) -> None:
        """Waits until all have arrived."""
        self._advance(len(self.route), wait=True)

    def abandon(self) -> None:
        for queue in self._queues:
            self.group.abandon([work for work, _ in queue])
            queue.clear()

    def squares(self) -> float | None:
        """The squares of what has arrived added up over the last hop's workers, where summing them has told it."""
        return self.route[-1].among.squares([bucket.mine for bucket in self._arrived])

    def _start(self, number: int, bucket: Bucket) -> None:
        if number == len(self.route):
            self._arrived.append(bucket)
            if self._heard is not None:
                self._heard(bucket.index, bucket.mine)
            return
        kind, among = self.route[number]
        if kind == "scatter":
            work = among.start_scatter(bucket.flat)
        elif self.codec is not None and number == len(self.route) - 1:
            work = self.codec.start(bucket, among)
        else:
            work = among.start_sum(bucket.mine)
        if isinstance(work, Operation):
            work.overtakes = True
        self._queues[number].append((work, bucket))

    def _advance(self, hops: int, wait: bool) -> None:
        """What has made one of the first `hops` goes on, in order; or is waited for."""
        for number, queue in enumerate(self._queues[:hops]):
            while queue:
                work, bucket = queue[0]
                if not wait and work is not None and not work.is_completed():
                    break
                self.group.finish(work)
                queue.popleft()
                self._start(number + 1, bucket)
