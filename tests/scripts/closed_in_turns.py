"""Three trainers in turn, whose weights the script uses between one's loop and the next one."""

from __future__ import annotations

import gc
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

import paceline

EPOCHS, FOLDS = 2, 3
x = torch.randn(12, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
rows = list(zip(x, x.sum(1, keepdim=True).sin(), strict=True))


def loss(output: torch.Tensor, batch: Any) -> torch.Tensor:
    return (output - batch[1]).square().mean()


def error(output: torch.Tensor, batch: Any) -> dict[str, Any]:
    return {"e": (loss(output, batch) * len(output), len(output))}


def net() -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()


def optimizer(params: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(params, lr=0.05)


def fold(number: int) -> list[Any]:
    return [row for index, row in enumerate(rows) if index % FOLDS != number]


def in_order(position: int, size: int, seed: int, epoch: int) -> int:
    return position


def distance(model: nn.Module) -> float:
    return sum(float(param.detach().double().square().sum()) for param in model.parameters())


def mapped() -> int:
    """How many pieces of memory this process shares with other workers."""
    return sum("memfd:paceline" in line for line in Path("/proc/self/maps").read_text().splitlines())


def main(how: str, out: Path) -> None:
    found: dict[str, Any] = {"distances": [], "errors": [], "mapped": [], "held": []}
    trainer: Any = None
    for number in range(FOLDS):
        model = net()
        trainer = paceline.Trainer(model, loss, optimizer, 4, plan=os.environ.get("PLAN"))
        trainer.state["number"] = torch.tensor(-1.0)
        epochs = EPOCHS + (number == 0 and "MORE" in os.environ)
        for report in trainer.steps(fold(number), epochs=epochs, order=in_order):
            trainer.state["number"] = torch.tensor(float(10 * number + report.step))
        found["distances"].append(distance(model) if "PLAN" not in os.environ else 0.0)
        found["errors"].append(
            trainer.evaluate(rows, lambda out, batch: {"e": (loss(out, batch) * len(out), len(out))})["e"]
        )
        found["errors"].append(float(trainer.state["number"]))
        if how == "close":
            trainer.close()
        trainer = None
        del model
        found["mapped"].append(mapped())
        found["held"].append(sum(isinstance(one, paceline.Trainer) for one in gc.get_objects()))
    if paceline.join().rank == 0:
        out.write_text(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
