"""Trains on a mix of three sources, and writes which rows each step had: mixed.py OUT.

The rows are distinct numbers, and each step writes the sums of their first three powers, which are exact in float64.
With FORMED=count steps go slowly until the run has formed so many teams, so that a killed worker joins again.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

import paceline

BATCH, EPOCHS, WEIGHTS = 12, 3, {0: {"web": 6, "code": 3, "wiki": 1}, 70: {"web": 1, "code": 1, "wiki": 1}}


def sources() -> dict[str, torch.Tensor]:
    starts = {"web": (0, 30), "code": (1000, 7), "wiki": (2000, 13)}
    return {name: torch.arange(start, start + size).double() for name, (start, size) in starts.items()}


def loss(output: torch.Tensor, batch: Any) -> tuple[torch.Tensor, int, dict[str, Any]]:
    rows, _ = batch
    sums = {f"power {power}": (float((rows**power).sum()), len(rows)) for power in (1, 2, 3)}
    return (output[:, 0] - rows / 1000).square().sum(), len(rows), sums


def wait_for_teams() -> None:
    journal = Path(os.environ["PACELINE_RUN_DIR"]) / "journal.jsonl"
    if journal.read_text().count('"formed"') < int(os.environ.get("FORMED", 0)):
        time.sleep(1.5)


def main() -> None:
    trainer = paceline.Trainer(
        lambda: nn.Linear(1, 1).double(),
        loss=loss,
        forward=lambda model, batch: model(batch[0][:, None] / 1000 + batch[1][:, None]),
        optimizer=lambda params: torch.optim.SGD(params, lr=0.01),
        global_batch=BATCH,
        plan="micro=2",
        seed=3,
    )
    trainer.state.setdefault("steps", [])
    for report in trainer.steps(paceline.data.Mix(sources(), WEIGHTS, with_source=True), epochs=EPOCHS):
        sums = [round(report.metrics[f"power {power}"] * report.samples) for power in (1, 2, 3)]
        trainer.state["steps"].append([report.samples, *sums])
        wait_for_teams()
    if trainer.main:
        Path(sys.argv[1]).write_text(json.dumps(trainer.state["steps"]))


if __name__ == "__main__":
    main()
