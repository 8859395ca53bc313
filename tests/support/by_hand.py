"""Training written by hand in plain PyTorch: what the tests of the public interface compare with."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils._pytree import tree_leaves
from torch.utils.data import default_collate

from paceline import sample_index, stream_seed

Steps = list[list[Any]]  # optimizer steps of micro-batches


def seed_all(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)


def built(make: Callable[[], nn.Module], seed: int = 0) -> nn.Module:
    """A model as the Trainer builds one from a function."""
    seed_all(stream_seed(seed, 0, -1))
    return make()


def in_order(position: int, size: int, seed: int, epoch: int) -> int:
    return position


def grid(
    data: Any,
    global_batch: int,
    micro: int | None = None,
    epochs: int = 1,
    count: int | None = None,
    seed: int = 0,
    order: Callable[..., int] = sample_index,
    collate: Callable[[list[Any]], Any] = default_collate,
    first_epoch: int = 0,
) -> Steps:
    """A dataset cut in global batches and those in collated micro-batches, for `epochs` or `count` steps."""
    micro = micro or -(-global_batch // 8)
    steps: Steps = []
    for epoch in itertools.count(first_epoch):
        if count is None and epoch == first_epoch + epochs:
            return steps
        rows = [order(position, len(data), seed, epoch) for position in range(len(data))]
        for batch in _cut(rows, global_batch):
            if len(steps) == count:
                return steps
            steps.append([collate([data[row] for row in part]) for part in _cut(batch, micro)])
    raise AssertionError


def _cut(rows: list[int], size: int) -> list[list[int]]:
    return [rows[start : start + size] for start in range(0, len(rows), size)]


def forward(model: nn.Module, batch: Any) -> Any:
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(batch[0] if isinstance(batch, tuple | list) else batch)


@dataclass
class Plain:
    """A hand-written loop: gradients of micro-batches add up and are divided once by the count."""

    model: nn.Module
    loss: Callable[[Any, Any], Any]
    optimizers: list[torch.optim.Optimizer]
    forward: Callable[[nn.Module, Any], Any] = forward
    schedulers: list[Any] = field(default_factory=list)
    seed: int = 0
    losses: list[float] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)

    def step(self, micro_batches: Iterable[Any]) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)
        total = weight = 0.0
        for number, batch in enumerate(micro_batches):
            seed_all(stream_seed(self.seed, len(self.losses), number))
            found = self.loss(self.forward(self.model, batch), batch)
            rows = len(tree_leaves(batch)[0])
            part, count = (found[0], float(found[1])) if isinstance(found, tuple) else (found * rows, rows)
            part.backward()
            total, weight = total + part.item(), weight + count
        for param in {p: None for o in self.optimizers for g in o.param_groups for p in g["params"]}:
            if param.grad is not None:
                param.grad /= weight
        self.rates.append(float(self.optimizers[0].param_groups[0]["lr"]))
        self.losses.append(total / weight)
        for optimizer in self.optimizers:
            optimizer.step()
        for scheduler in self.schedulers:
            if not isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):  # the loop steps it
                scheduler.step()

    def train(self, steps: Steps) -> Plain:
        for micro_batches in steps:
            self.step(micro_batches)
        return self
