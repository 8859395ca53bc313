"""Sharding as in ZeRO (Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models",
SC 2020): the workers of a replica hold rows of what each of them would hold whole.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from paceline.comm.buckets import Bucket
from paceline.comm.group import Group
from paceline.comm.places import Places, Rows
from paceline.errors import UsageError
from paceline.step import Agreed
from paceline.strategies.base import Job, Orders, Ready, Single, Strategy, Sums
from paceline.strategies.pieces import MicroBatch


class Shard(Strategy):
    """Level 1: each place holds the optimizer's state of its rows of every parameter, and updates these.

    A bucket's sums are scattered over the replica, then the layer above sums each place's part over the replicas; after
    the update everybody gathers the rows of the others.
    """

    def __init__(self, job: Job, replica: Group) -> None:
        self.job, self.replica = job, replica
        self.places = Places(replica.size, replica.rank)
        self.single = Single(job, replica.allocate, self.places)
        self.inner = self.single
        self._works: list[tuple[dist.Work | None, Bucket]] = []
        self._ready: Ready | None = None

    def build(self, optimizers: list[Optimizer], schedulers: list[LRScheduler]) -> None:
        for one in optimizers:
            if self.job.exact and any(group.get("fused") for group in one.param_groups):
                what = f"{type(one).__name__} runs fused and would round the rows of a shard other than in the whole"
                raise UsageError(what, "leave fused out, or exact")
        self.inner.build(optimizers, schedulers)

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

    def update(self, sums: Sums, agreed: Agreed, orders: Orders, norm: float) -> None:
        self.inner.update(sums, agreed, orders, norm)
        self.replica.enter(f"the weights of step {orders.step + 1}", check=False, kind="weights")
        buckets = self.single.buckets
        assert buckets is not None
        for bucket in buckets.buckets:  # by way of the memory of the gradients, which have been used
            buckets.offer(bucket)
            self.replica.gather_stretches(bucket.flat)
            buckets.take(bucket)

    def state(self) -> dict[str, Any]:
        """As that of one worker; what an optimizer keeps for each element of a parameter is here of the own rows."""
        state = self.inner.state()
        for optimizer, packed in zip(self.job.optimizers, state["optimizers"], strict=True):
            for name, kept in packed["state"].items():
                own, shape = self.job.own[name], tuple(self.job.named[name].shape)
                for key, value in kept.items():
                    if not isinstance(value, torch.Tensor) or (value.numel() == 1 and value.shape != own.shape):
                        continue
                    if value.shape != own.shape:
                        what = f"{type(optimizer).__name__} keeps a tensor of shape {tuple(value.shape)} for {name}"
                        cure = "shard the state of optimizers that keep numbers for each element, as AdamW or SGD"
                        raise UsageError(f"{what}, {tuple(own.shape)} of which are here", cure)
                    kept[key] = Rows(value, self.places, shape)
        return state

    def load(self, state: Mapping[str, Any]) -> None:
        optimizers = [
            {**packed, "state": {name: self._cut(name, kept) for name, kept in packed["state"].items()}}
            for packed in state.get("optimizers", ())
        ]
        self.inner.load({**state, "optimizers": optimizers} if optimizers else state)

    def _cut(self, name: str, kept: Mapping[str, Any]) -> dict[str, Any]:
        """Of whole tensors the own rows."""
        shape = self.job.named[name].shape
        return {
            key: self.places.of(value, self.places.me)
            if isinstance(value, torch.Tensor) and value.shape == shape
            else value
            for key, value in kept.items()
        }

    def abort(self, again: bool = False) -> None:
        self.replica.abandon([work for work, _ in self._works])
        self._works = []
        self.inner.abort(again)
