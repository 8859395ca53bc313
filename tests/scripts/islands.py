"""Trains each case in islands and writes weights and figures: islands.py FOLDER PLAN [CASE ...]

With KILL=WORKER:CALLS that worker is killed, or gets SIGNAL, once, when its loss is called so often. With
SLOW=CALLS the first worker makes the file `reached` when its loss is called so often, and is slow from then on.
LOOPS=STEPS,STEPS: in so many loops.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

import paceline

SEED, BATCH, MICRO, ROWS, WIDTH, STEPS = 5, 12, 2, 40, 6, 8
CLIP = 0.3


def _data() -> TensorDataset:
    draw = torch.Generator().manual_seed(SEED)
    x, y = torch.randn(ROWS, WIDTH, generator=draw).double(), torch.randn(ROWS, 2, generator=draw).double()
    tokens = torch.where(torch.arange(ROWS) % 2 == 0, 1, 9)
    return TensorDataset(x, y, tokens)


DATA = _data()


CALLS = [0]


def _act() -> None:
    CALLS[0] += 1
    worker, _, calls = os.environ.get("KILL", ":").partition(":")
    if worker and worker == os.environ.get("PACELINE_RANK") and CALLS[0] == int(calls):
        if (done := Path(sys.argv[1]) / "killed").exists():
            return
        done.touch()
        os.kill(os.getpid(), signal.Signals[os.environ.get("SIGNAL", "SIGKILL")])
    if "SLOW" in os.environ and CALLS[0] >= int(os.environ["SLOW"]):
        (Path(sys.argv[1]) / "reached").touch()
        time.sleep(0.3)


def net(*between: Callable[[], nn.Module]) -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 8), *(make() for make in between), nn.Tanh(), nn.Linear(8, 2)).double()


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


def loss(output: torch.Tensor, batch: Any) -> Any:
    """A mean over tokens, of which rows have one or nine."""
    _act()
    each = (output - batch[1]).square().sum(1)
    weight = batch[2].double()
    return (each * weight).sum(), weight.sum().item(), {"far": ((each > 1).sum(), len(each))}


@dataclass
class Case:
    optimizer: Callable[[Any], torch.optim.Optimizer]
    model: Callable[[], nn.Module] = net
    schedule: Callable[[int], float] | None = None
    clip_norm: float | None = None


CASES = {
    "sgd": Case(lambda params: torch.optim.SGD(params, lr=0.1)),
    "momentum": Case(lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9), clip_norm=CLIP),
    "adamw": Case(
        lambda params: torch.optim.AdamW(params, lr=0.02, eps=1e-3),
        lambda: net(lambda: nn.Dropout(0.2)),
        lambda step: 1 / (1 + step),
        CLIP,
    ),
    "blocks": Case(lambda params: torch.optim.AdamW(params, lr=0.02, eps=1e-3), lambda: net(*[Block] * 4)),
    "norm": Case(lambda params: torch.optim.AdamW(params, lr=0.02, eps=1e-3), lambda: net(lambda: nn.BatchNorm1d(8))),
}


def trainer_of(case: Case, loss: Callable[..., Any], plan: str) -> paceline.Trainer:
    return paceline.Trainer(
        case.model,
        loss,
        case.optimizer,
        global_batch=BATCH,
        schedule=case.schedule,
        clip_norm=case.clip_norm,
        seed=SEED,
        plan=f"micro={MICRO} {plan}",
    )


def main() -> None:
    folder, plan, *names = sys.argv[1:]
    told: dict[str, Any] = {}
    for name in names or CASES:
        figures = []
        trainer = trainer_of(CASES[name], loss, plan)
        *before, count = map(int, os.environ.get("LOOPS", str(STEPS)).split(","))
        for steps in before:
            for _ in trainer.steps(DATA, count=steps):
                pass
        for report in trainer.steps(DATA, count=count):
            if report.every(2 * STEPS) or report.every(1) is False:
                raise AssertionError(report)
            kept = ("step", "epoch", "loss", "metrics", "samples", "lr", "grad_norm", "turn")
            figures.append({key: getattr(report, key) for key in kept})
        trainer.export(Path(folder) / f"{name}.safetensors")
        found = trainer.evaluate(DATA, lambda output, batch: {"loss": loss(output, batch)[:2]})
        told[name] = {"figures": figures, "evaluated": found}
    if trainer.main:
        (Path(folder) / "told.json").write_text(json.dumps(told))


if __name__ == "__main__":
    main()
