"""A training whose every random part must survive a crash. Usage: resuming.py OUT; KILL_AT=step,moment kills the run.

Two phases, an evaluation before and between them, dropout, augmentation in loader processes, the user's own state.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import nn
from torch.utils.data import Dataset

import paceline

KILL_STEP, _, KILL_MOMENT = os.environ.get("KILL_AT", "0,").partition(",")
masks: list[float] = []


def die(step: int, moment: str) -> None:
    """The whole run at once: the agent is killed, and its workers with it."""
    if (step, moment) == (int(KILL_STEP), KILL_MOMENT) and paceline.join().rank == paceline.join().size - 1:
        Path("killed").touch()
        os.kill(os.getppid(), signal.SIGKILL)
        signal.pause()


class Augmented(Dataset[Any]):
    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(1)
        self.x = torch.randn(90, 10, generator=generator, dtype=torch.float64)
        self.y = (self.x.sum(1) > 0).long()

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.x[index] * random.uniform(0.8, 1.2) + 0.1 * torch.randn(10, dtype=torch.float64), self.y[index]


class Average:
    """Something of the user's own with a state_dict: a moving average of the weights."""

    def __init__(self, model: nn.Module) -> None:
        self.mean = {name: p.detach().clone() for name, p in model.named_parameters()}

    def update(self, model: nn.Module) -> None:
        for name, p in model.named_parameters():
            self.mean[name].lerp_(p.detach(), 0.1)

    def state_dict(self) -> dict[str, torch.Tensor]:
        return self.mean

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        for name, value in state.items():
            self.mean[name].copy_(value)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(10, 16, bias=False), nn.BatchNorm1d(16), nn.ReLU())
        self.head = nn.Linear(16, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        die(trainer.steps_done + 1, "forward")
        hidden = F.dropout(self.body(x), 0.3, self.training)
        hidden.register_hook(lambda _: die(trainer.steps_done + 1, "backward")) if hidden.requires_grad else None
        return self.head(hidden)


def schedule(step: int) -> float:
    die(step, "update")
    return 1 / (1 + 0.1 * step)


def metric(output: torch.Tensor, batch: Any) -> dict[str, tuple[Any, int]]:
    return {"loss": (F.cross_entropy(output, batch[1], reduction="sum"), len(output))}


torch.manual_seed(5)
trainer = paceline.Trainer(
    model=lambda: Net().double(),
    loss=lambda output, batch: F.cross_entropy(output, batch[1]),
    optimizer=lambda params: torch.optim.AdamW(params, lr=0.01),
    global_batch=20,
    schedule=schedule,
    clip_norm=1.0,
    plan="micro=4",
)
average = trainer.state["average"] = Average(trainer.model)
trainer.state.setdefault("draws", [])
trainer.state["best"] = 1e9
evaluations = [trainer.evaluate(Augmented(), metric)]
for epochs in (2, 2):
    for report in trainer.steps(Augmented(), epochs=epochs, loader={"num_workers": 1}):
        average.update(trainer.model)
        trainer.state["best"] = min(trainer.state["best"], report.loss)
        trainer.state["draws"].append(float(torch.rand(())))
        die(report.step, "body")
    evaluations.append(trainer.evaluate(Augmented(), metric))
if trainer.main:
    out = Path(sys.argv[1])
    tensors = {f"model/{k}": v for k, v in trainer.model.state_dict().items()}
    save_file(tensors | {f"mean/{k}": v for k, v in average.mean.items()}, out.with_suffix(".safetensors"))
    figures = {"best": trainer.state["best"], "draws": trainer.state["draws"], "steps": trainer.steps_done}
    out.with_suffix(".json").write_text(json.dumps(figures | {"evaluations": evaluations}))
