"""Averages of weights in `trainer.state`, by name, as a list, in an object and whole: `averages.py`. With KILL=WORKER
that worker is killed in the body of the fourth step.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import torch
from optimizers import GLOBAL_BATCH, data, loss, model
from safetensors.torch import save_file
from torch import nn

import paceline

STEPS = 9


class Average:
    """An average of its own with a state, as libraries have them."""

    def __init__(self, net: nn.Module) -> None:
        self.shadow, self.updates = {name: param.detach().clone() for name, param in net.named_parameters()}, 0

    def update(self, net: nn.Module) -> None:
        self.updates += 1
        for name, param in net.named_parameters():
            self.shadow[name].lerp_(param.detach(), 0.1)

    def state_dict(self) -> dict[str, Any]:
        return {"shadow": self.shadow, "updates": self.updates}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        self.shadow, self.updates = dict(saved["shadow"]), saved["updates"]


def full(tensor: torch.Tensor) -> torch.Tensor:
    """All of it, which all workers ask for together where it is in pieces."""
    tensor = tensor.detach()
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).clone()


def kill(worker: str) -> None:
    if worker == os.environ.get("PACELINE_RANK") and not Path("killed").exists():
        Path("killed").touch()
        os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    trainer = paceline.Trainer(model, loss, lambda params: torch.optim.AdamW(params, lr=0.01), GLOBAL_BATCH)
    net = trainer.model
    trainer.state["named"] = {name: param.detach().clone() for name, param in net.named_parameters()}
    trainer.state["listed"] = [param.detach().clone() for param in net.parameters()]
    trainer.state["object"] = Average(net)
    trainer.state["whole"] = {name: full(param) for name, param in net.named_parameters()}
    for report in trainer.steps(data, count=STEPS):
        if report.step == 4:
            kill(os.environ.get("KILL", ""))
        for (name, param), other in zip(net.named_parameters(), trainer.state["listed"], strict=True):
            for kept in (trainer.state["named"][name], other):
                kept.mul_(0.9).add_(param.detach(), alpha=0.1)
            trainer.state["whole"][name].lerp_(full(param), 0.1)
        trainer.state["object"].update(net)
    found = {f"named.{name}": full(tensor) for name, tensor in trainer.state["named"].items()}
    names = [*trainer.state["named"]]
    found |= {f"listed.{name}": full(one) for name, one in zip(names, trainer.state["listed"], strict=True)}
    found |= {f"object.{name}": full(tensor) for name, tensor in trainer.state["object"].shadow.items()}
    found |= {f"whole.{name}": tensor for name, tensor in trainer.state["whole"].items()}
    if trainer.main:
        save_file(found, "averages.safetensors")
