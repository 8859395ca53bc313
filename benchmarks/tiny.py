"""What a step costs besides its arithmetic: a tiny MLP on one worker, beside the loop that people write.

    python benchmarks/tiny.py [--rounds 7] [--before SRC] [--record FILE]

plain    a loop with a DataLoader, AdamW, one batch of 64 rows at a time
trainer  `python train.py` with a Trainer of the same global batch
before   the Trainer of another checkout, whose `src` is given

Each side is a new process in each round, in an order that rotates, on one thread; it makes 2,500 steps and tells the
CPU time and the wall time of a step of the last 2,000, in microseconds.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from turns import compare, medians, record

import paceline

ROWS, BATCH, WARM, STEPS = 8192, 64, 500, 2000


def data() -> TensorDataset:
    chance = torch.Generator().manual_seed(0)
    x = torch.randn(ROWS, 32, generator=chance)
    return TensorDataset(x, (x.sum(1) > 0).long())


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2))


def plain() -> None:
    model, loss = net(), nn.CrossEntropyLoss()
    update = torch.optim.AdamW(model.parameters(), lr=1e-3)
    done, told = 0, Told()
    while True:
        for x, y in DataLoader(data(), batch_size=BATCH, shuffle=True):
            update.zero_grad()
            loss(model(x), y).backward()
            update.step()
            done += 1
            if told.at(done):
                return


def trained() -> None:
    loss = nn.CrossEntropyLoss()
    trainer = paceline.Trainer(
        net,
        lambda output, batch: loss(output, batch[1]),
        lambda params: torch.optim.AdamW(params, lr=1e-3),
        global_batch=BATCH,
    )
    told = Told()
    for report in trainer.steps(data(), count=WARM + STEPS):
        told.at(report.step)


class Told:
    """Prints what a step has taken, at the last one."""

    def __init__(self) -> None:
        self.began = 0.0, 0.0

    def at(self, step: int) -> bool:
        now = time.process_time(), time.perf_counter()
        if step == WARM:
            self.began = now
        if step == WARM + STEPS:
            print(json.dumps([1e6 * (end - begin) / STEPS for begin, end in zip(self.began, now, strict=True)]))
        return step == WARM + STEPS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--before", type=Path, metavar="SRC")
    parser.add_argument("--record", type=Path)
    options = parser.parse_args()
    sides = ["plain", "trainer", *(["before"] if options.before else [])]
    seconds: dict[str, list[float]] = {side: [] for side in sides}
    walls: dict[str, list[float]] = {side: [] for side in sides}
    for number in range(options.rounds):
        for side in sides[number % len(sides) :] + sides[: number % len(sides)]:
            environment = {**os.environ, "OMP_NUM_THREADS": "1"}
            if side == "before":
                environment["PYTHONPATH"] = str(options.before)
            command = [sys.executable, str(Path(__file__).resolve()), "--side", side]
            with tempfile.TemporaryDirectory() as folder:
                done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, check=True)
            cpu, wall = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("[")))
            seconds[side].append(cpu * 1e-6)
            walls[side].append(wall * 1e-6)
    medians("CPU of a tiny step", seconds)
    medians("wall time of it", walls)
    found: dict[str, object] = {"cpu": seconds, "wall": walls}
    for side in sides[1:]:
        found |= compare(seconds, side, "plain")
    if options.record:
        record(options.record, workers=1, threads=1, results=found)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--side"]:
        torch.set_num_threads(1)
        plain() if sys.argv[2] == "plain" else trained()
    else:
        main()
