"""Draws of the script's own after it has made a Trainer, under several plans."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

import numpy
import torch
import torch.nn.functional as F
from torch import nn

import paceline


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attend, self.out = nn.LayerNorm(16), nn.Linear(16, 48), nn.Linear(16, 16)
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)
        self.drop = nn.Dropout(0.3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = self.attend(self.norm(x)).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(*parts, is_causal=True)
        x = x + self.drop(self.out(attended.transpose(1, 2).flatten(2)))
        return x + self.drop(self.down(F.gelu(self.up(x))))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.blocks = nn.Embedding(11, 16), nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(16, 11)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.words(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def loss(output: torch.Tensor, batch: Any) -> torch.Tensor:
    return F.cross_entropy(output.flatten(0, 1), batch[1].flatten())


def optimizer(params: Any) -> torch.optim.Optimizer:
    torch.rand(3)  # as a script that draws a learning rate does
    return torch.optim.AdamW([param for _, param in params], lr=1e-3)


def draws(plan: str, kind: str) -> list[float]:
    torch.manual_seed(7)
    random.seed(7)
    numpy.random.seed(7)
    paceline.Trainer(Net if kind == "function" else Net(), loss, optimizer, 8, plan=plan or None)
    return [float(torch.rand(())), float(torch.randn(())), random.random(), float(numpy.random.randn())]


def main() -> None:
    found = {f"{plan}, {kind}": draws(plan, kind) for plan in sys.argv[2:] for kind in ("function", "module")}
    if paceline.join().rank == 0:
        Path(sys.argv[1]).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
