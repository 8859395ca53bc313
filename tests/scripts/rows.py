"""Two towers over tables of which a step touches few rows: rows.py OUT [whole]."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

import paceline

BATCH, MICRO, STEPS, CLIP = 12, 2, 8, 0.05
USERS, ITEMS, WIDTH = 40, 300, 4


class Towers(nn.Module):
    def __init__(self, whole: bool) -> None:
        super().__init__()
        self.whole = whole
        self.users = nn.Embedding(USERS, WIDTH, sparse=True)
        self.tower = nn.Sequential(nn.Linear(WIDTH, 6), nn.Tanh(), nn.Linear(6, WIDTH))
        self.items = nn.EmbeddingBag(ITEMS, WIDTH, mode="sum", sparse=True)
        self.seldom = nn.Embedding(5, WIDTH, sparse=True)
        self.never = nn.Embedding(5, WIDTH, sparse=True)
        self.double()

    def forward(self, users: torch.Tensor, items: torch.Tensor) -> torch.Tensor:
        one = self.tower(self.users(users)) * self.items(items)
        some = (users == 3).nonzero()[:, 0]
        if len(some):  # not every worker has such a row in each step
            found = self.seldom(users[some] % 5)
            one = one.index_add(0, some, found + self.seldom.weight.sum(0) if self.whole else found)
        return one.sum(1)


def drawn() -> TensorDataset:
    chance = torch.Generator().manual_seed(4)
    skewed = torch.rand(60, generator=chance) ** 3
    items = torch.randint(0, ITEMS, (60, 3), generator=chance)
    return TensorDataset((skewed * USERS).long(), items, torch.randn(60, generator=chance, dtype=torch.float64))


def loss(output: torch.Tensor, batch: Any) -> torch.Tensor:
    return (output - batch[2]).square().mean()


def optimizers(params: Any) -> list[torch.optim.Optimizer]:
    tables = [(name, param) for name, param in params if "tower" not in name]
    return [
        torch.optim.SparseAdam([param for _, param in tables[:1]], lr=0.05),
        torch.optim.Adagrad(tables[1:], lr=0.1),
        torch.optim.AdamW([(name, param) for name, param in params if "tower" in name], lr=0.01),
    ]


def main() -> None:
    trainer = paceline.Trainer(
        lambda: Towers("whole" in sys.argv),
        loss,
        optimizers,
        global_batch=BATCH,
        forward=lambda model, batch: model(*batch[:2]),
        schedule=lambda step: 0.9**step,
        clip_norm=CLIP,
        plan=f"micro={MICRO}",
    )
    figures = [(report.loss, report.grad_norm) for report in trainer.steps(drawn(), count=STEPS)]
    if trainer.main:
        Path("figures").write_text(repr(figures))
    trainer.export(sys.argv[1])


if __name__ == "__main__":
    main()
