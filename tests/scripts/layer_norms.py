"""Trains a model, `dense` or with `experts`, and writes the norms of its layers: `layer_norms.py KIND OUT`."""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
import torch.nn.functional as F
from expert_models import WIDTH, Mixture
from torch import nn
from torch.utils.data import TensorDataset

import paceline

ROWS, STEPS, CLIP = 24, 3, 0.05


class Asking(nn.Module):
    """A layer of experts behind a normalisation."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mixture = nn.LayerNorm(WIDTH), Mixture(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.mixture(self.norm(x))[0]
        return x + made


class Net(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.embed = nn.Linear(8, WIDTH)
        self.blocks = nn.ModuleList(
            Asking() if kind == "experts" else nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, 0.0, batch_first=True)
            for _ in range(4)
        )
        self.head, self.unused = nn.Linear(WIDTH, 3), nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        made: torch.Tensor = self.head(x.mean(1))
        return made


def data() -> TensorDataset:
    x = torch.randn(ROWS, 5, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return TensorDataset(x, (x[:, 0, 0] > 0).long() + (x[:, 1, 1] > 0).long())


def optimizer(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-2)


def main(kind: str, out: str) -> None:
    trainer = paceline.Trainer(
        model=lambda: Net(kind).double(),
        loss=lambda output, batch: F.cross_entropy(output, batch[1]),
        optimizer=optimizer,
        global_batch=ROWS,
        clip_norm=CLIP,
    )
    found = []
    for report in trainer.steps(data(), count=STEPS):
        norms = trainer.layer_norms()
        found.append([norms.weights, norms.gradients, report.grad_norm])
    if trainer.main:
        with open(out, "w") as file:
            json.dump(found, file)


if __name__ == "__main__":
    main(*sys.argv[1:])
