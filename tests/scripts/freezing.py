"""A model of which parameters are frozen after its Trainer was made, for some steps: `freezing.py PLANS`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import torch
from optimizers import GLOBAL_BATCH, ROWS, data, loss, model
from torch import nn

import paceline

STEPS = 8
# Before a step: parameters, by what their names begin with, and whether they are trained from then on.
CHANGES: dict[int, list[tuple[str, bool]]] = {
    0: [("first.", False), ("layers.0.up", False)],
    3: [("first.", True), ("layers.1", False)],
    6: [("layers.", True), ("last.bias", False)],
}


def change(net: nn.Module, done: int) -> None:
    for begin, trained in CHANGES.get(done, ()):
        for name, param in net.named_parameters():
            if name.startswith(begin):
                param.requires_grad_(trained)


def optimizer(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=0.1)


def batches(steps: int) -> Iterator[list[int]]:
    for epoch in range(steps):
        rows = [paceline.sample_index(place, ROWS, 0, epoch) for place in range(ROWS)]
        yield from (rows[at : at + GLOBAL_BATCH] for at in range(0, ROWS, GLOBAL_BATCH))


def in_plain_torch() -> dict[str, torch.Tensor]:
    torch.manual_seed(paceline.stream_seed(0, 0, -1))
    net = model()
    made = optimizer(net.named_parameters())
    for done, rows in zip(range(STEPS), batches(STEPS), strict=False):
        change(net, done)
        made.zero_grad()
        loss(net(data.tensors[0][rows]), (None, data.tensors[1][rows])).backward()
        made.step()
    return {name: tensor.detach() for name, tensor in net.state_dict().items()}


if __name__ == "__main__":
    for number, plan in enumerate(sys.argv[1:]):
        trainer = paceline.Trainer(model, loss, optimizer, global_batch=GLOBAL_BATCH, plan=plan or None)
        change(trainer.model, 0)
        for report in trainer.steps(data, count=STEPS):
            change(trainer.model, report.step)
        trainer.export(f"{number}.safetensors")
