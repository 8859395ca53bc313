"""A Trainer alone in its process, the same training by hand, and how the two are compared."""

from __future__ import annotations

from typing import Any

import torch
from by_hand import Plain
from cases import cross_entropy, mlp
from oracle import apart
from public import sgd
from torch import nn

from paceline import Trainer
from paceline.base.journal import read_journal
from paceline.session.run import Run

TOLERANCE = 1e-12
READS_NOTHING_AHEAD = {"num_workers": 0}
HOOKED = "a gradient hook must see the gradient of one micro-batch"
ONE_BY_ONE = "micro-batches are executed one by one"
MERGED = "micro-batches may be merged and computed together"
OBSERVED = (
    "the forward drew no random numbers and changed no buffers, and the loss of two micro-batches was the sum of "
)
OBSERVED += "their losses"


def trainer(model: Any = mlp, loss: Any = cross_entropy, optimizer: Any = sgd, **more: Any) -> Trainer:
    return Trainer(model, loss, optimizer, **{"global_batch": 16, **more})


def by_hand(model: nn.Module, optimizer: Any = sgd, **more: Any) -> Plain:
    made = optimizer([(name, p) for name, p in model.named_parameters() if p.requires_grad])
    return Plain(model, **{"loss": cross_entropy, **more}, optimizers=made if isinstance(made, list) else [made])


def same(mine: Trainer, plain: Plain) -> None:
    assert apart(mine.model.state_dict(), dict(plain.model.state_dict())) <= TOLERANCE


def happened(run: Run, event: str) -> list[dict[str, Any]]:
    return [entry for entry in read_journal(run.folder.path) if entry["event"] == event]


def decisions(run: Run) -> dict[str, str]:
    return {entry["what"]: entry["why"] for entry in happened(run, "decision")}


class Named(nn.Module):
    """Takes its batch by names."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()

    def forward(self, *, x: torch.Tensor, y: torch.Tensor | None = None) -> torch.Tensor:
        return self.net(x)
