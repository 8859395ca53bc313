"""Losses over a whole global batch, each case trained by a Trainer of its own: `over_batch.py OUT CASE ... [WORD ...]`.
The words are those of every case's plan. By itself each case is plain PyTorch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

CLIP = 0.5
chance = torch.Generator().manual_seed(3)
ROWS, BATCH, WIDTH = 71, 24, 16  # the last batch of an epoch has 23 rows
x = torch.randn(ROWS, 10, generator=chance, dtype=torch.float64)
y = x[:, :6] * 0.5 + 0.3 * torch.randn(ROWS, 6, generator=chance, dtype=torch.float64)
labels = torch.randint(0, 5, (ROWS,), generator=chance)
words = torch.randn(ROWS, 8, WIDTH, generator=chance, dtype=torch.float64)


def tower(inputs: int, *more: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(inputs, WIDTH), nn.Tanh(), *more, nn.Linear(WIDTH, 8))


class Towers(nn.Module):
    """Two of them, and a temperature that only the loss uses."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = tower(10), tower(6)
        self.scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"one": F.normalize(self.one(x)), "two": F.normalize(self.two(y))}


def clip(model: Any, output: Any) -> Any:
    """Also with a metric, and a count of its own."""
    logits = model.scale.exp() * output["one"] @ output["two"].t()
    own = torch.arange(len(logits))
    total = F.cross_entropy(logits, own, reduction="sum") + F.cross_entropy(logits.t(), own, reduction="sum")
    return total, 2 * len(own), {"right": ((logits.argmax(1) == own).sum(), len(own))}


class Views(nn.Module):
    """Two views of each row, noise on both, through one network."""

    def __init__(self, *more: nn.Module) -> None:
        super().__init__()
        self.net = tower(10, *more)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.net(x + 0.1 * torch.randn_like(x)), self.net(x + 0.1 * torch.randn_like(x))


def simclr(model: Any, output: Any) -> Any:
    """Chen et al., "A Simple Framework for Contrastive Learning of Visual Representations", 2020."""
    z = F.normalize(torch.cat(output))
    logits = (z @ z.t() / 0.3).fill_diagonal_(-1e9)
    return F.cross_entropy(logits, torch.arange(len(z)).roll(len(z) // 2))


def vicreg(model: Any, output: Any) -> Any:
    """Bardes et al., "VICReg", 2022."""
    total = 25 * F.mse_loss(*output)
    for z in output:
        z = z - z.mean(0)
        covariance = z.t() @ z / (len(z) - 1)
        total = total + 25 * F.relu(1 - (z.var(0) + 1e-4).sqrt()).mean()
        total = total + (covariance.square().sum() - covariance.diagonal().square().sum()) / z.shape[1]
    return total


def triplet(model: Any, output: Any) -> Any:
    """Batch-hard (Hermans et al., 2017), with labels that the forward hands on."""
    z, label = output
    apart = (z[:, None] - z[None]).square().sum(-1).add(1e-9).sqrt()
    same = label[:, None] == label[None]
    farthest, nearest = apart.where(same, 0.0).amax(1), apart.where(~same, 1e9).amin(1)
    return F.softplus(farthest - nearest).mean()


class Blocks(nn.Module):
    """What can be cut in every way; the temperature is where the last stage has it."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 4, 32, 0.1, batch_first=True, bias=False) for _ in range(4)
        )
        self.last, self.scale = nn.Linear(WIDTH, 8), nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        found = self.last(x)
        return found[:, 0], found.mean(1)


def pairs(model: Any, output: Any) -> Any:
    one, two = (F.normalize(part) for part in output)
    logits, own = model.scale * one @ two.t() / 0.2, torch.arange(len(one))
    return (
        F.cross_entropy(logits, own, reduction="sum"),
        len(own),
        {"right": ((logits.argmax(1) == own).sum(), len(own))},
    )


@dataclass(frozen=True)
class Case:
    model: Callable[[], nn.Module]
    data: TensorDataset
    forward: Callable[[Any, Any], Any]
    loss: Callable[[Any, Any], Any]


first = lambda model, batch: model(batch[0])
CASES = {
    "towers": Case(Towers, TensorDataset(x, y), lambda model, batch: model(*batch), clip),
    "simclr": Case(lambda: Views(nn.Dropout(0.2)), TensorDataset(x), first, simclr),
    "batchnorm": Case(lambda: Views(nn.BatchNorm1d(WIDTH)), TensorDataset(x), first, simclr),
    "vicreg": Case(Views, TensorDataset(x), first, vicreg),
    "triplet": Case(
        lambda: tower(10), TensorDataset(x, labels), lambda model, batch: (model(batch[0]), batch[1]), triplet
    ),
    "blocks": Case(Blocks, TensorDataset(words), first, pairs),
}


def adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-2, eps=1e-4, weight_decay=0.1)
