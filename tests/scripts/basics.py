"""What most test scripts start from: a small model, a dataset, and a function that makes the Trainer."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import paceline

x = torch.randn(96, 10, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
data = TensorDataset(x, (x.sum(1) > 0).long())


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(10, 16), nn.ReLU(), nn.Linear(16, 2)).double()


def cross_entropy(output: torch.Tensor, batch: Any) -> torch.Tensor:
    return F.cross_entropy(output, batch[1])


def make(loss: Any = cross_entropy, model: Any = net, **options: Any) -> paceline.Trainer:
    return paceline.Trainer(
        model=model,
        loss=loss,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        **{"global_batch": 24, **options},
    )
