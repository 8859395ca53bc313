"""Trains a float32 model under each plan, where another dtype is torch's default: `defaults.py DTYPE PLAN ...`, or
without plans under that of the command line.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

import paceline

torch.set_default_dtype(getattr(torch, sys.argv[1]))
x = torch.randn(48, 6, generator=torch.Generator().manual_seed(3), dtype=torch.float32)
data = TensorDataset(x, torch.sin(x.sum(1, keepdim=True)))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(12, 300, dtype=torch.float32), nn.Linear(300, 12, dtype=torch.float32)
        self.norm = nn.BatchNorm1d(12, dtype=torch.float32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.norm(self.down(torch.tanh(self.up(x))))


def model() -> nn.Module:
    """The same values whatever the default is."""
    net = nn.Sequential(nn.Linear(6, 12, dtype=torch.float32), Block(), Block(), nn.Linear(12, 1, dtype=torch.float32))
    with torch.no_grad():
        for number, param in enumerate(net.parameters()):
            chance = torch.Generator().manual_seed(number)
            param.copy_(torch.randn(param.shape, generator=chance, dtype=torch.float32) / 8)
    return net


def loss(output: torch.Tensor, batch: Any) -> torch.Tensor:
    return (output - batch[1]).square().mean()


for number, plan in enumerate(sys.argv[2:] or [None]):
    trainer = paceline.Trainer(
        model, loss, lambda params: torch.optim.AdamW(params, lr=0.01), global_batch=24, clip_norm=1.0, plan=plan
    )
    for _ in trainer.steps(data, count=4):
        pass
    trainer.evaluate(data, lambda output, batch: {"loss": (loss(output, batch), 1)})
    trainer.export(f"{number}.safetensors")
