"""A contrastive step over the whole global batch, beside a gather written by hand, and beside a loss that is a sum.

    python benchmarks/whole_batch.py [--rows 512] [--micro 32] [--width 192] [--rounds 7] [--record FILE]

Two towers of transformer layers with a temperature, in float32 with AdamW, on two workers of one thread each:

trainer   Trainer(..., loss_over="batch"), in micro-batches
sum       the same towers with a loss of each pair alone: what a step without gathered outputs takes
gather    DistributedDataParallel and an all_gather that has a gradient, over gloo, as people write it: half of the rows
          at once on each worker
plain     one process, all rows at once (turns of its own, before the others)

The first three take turns. The losses of trainer, gather and plain must agree to 1e-4 of their size in every step.
Memory is how much the peak of a worker grew from before the model was made (VmHWM, which counts what workers share on
each of them).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.nn.functional import all_gather
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset
from turns import WARM_UP, WORKERS, Processes, Taken, compare, give, in_order, launch, medians, record, take

import paceline
from paceline.launch.tuning import worker_settings
from paceline.session.process_memory import peak_memory

AGREE, LENGTH, INPUTS, STEPS = 1e-4, 16, 32, 3  # steps of a round
TOGETHER = ("trainer", "sum", "gather")
CPU = torch.device("cpu")


class Tower(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = nn.Linear(INPUTS, width)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 4 * width, 0.0, batch_first=True) for _ in range(3)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return F.normalize(x.mean(1), dim=-1)


class Towers(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one, self.two, self.scale = Tower(width), Tower(width), nn.Parameter(torch.tensor(1.0))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.one(x), self.two(y)


def data(rows: int, steps: int) -> TensorDataset:
    chance = torch.Generator().manual_seed(1)
    return TensorDataset(*(torch.randn(rows * steps, LENGTH, INPUTS, generator=chance) for _ in range(2)))


def contrast(scale: torch.Tensor, one: torch.Tensor, two: torch.Tensor) -> torch.Tensor:
    logits, own = scale.exp() * one @ two.t(), torch.arange(len(one))
    return (F.cross_entropy(logits, own) + F.cross_entropy(logits.t(), own)) / 2


def adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-4, fused=False)


def ours(side: str, rows: int, micro: int, width: int, steps: int) -> Iterator[float]:
    pairs = lambda output, batch: (1 - trainer.model.scale * (output[0] * output[1]).sum(1)).mean()  # noqa: E731
    trainer = paceline.Trainer(
        model=lambda: Towers(width),
        loss=pairs if side == "sum" else lambda output, batch: contrast(trainer.model.scale, *output),
        loss_over=None if side == "sum" else "batch",
        optimizer=adamw,
        global_batch=rows,
        forward=lambda model, batch: model(*batch),
        plan=f"micro={micro}",
    )
    for report in trainer.steps(data(rows, steps), count=steps, order=in_order):
        yield report.loss


def by_hand(rows: int, width: int, steps: int) -> Iterator[float]:
    """Of `gather` and of one process."""
    several = dist.is_initialized()
    net = Towers(width)
    scale, run = net.scale, DistributedDataParallel(net) if several else net
    update, all_rows = adamw(net.parameters()), data(rows, steps)
    for step in range(steps):
        mine = torch.arange(rows * step, rows * (step + 1)).chunk(WORKERS if several else 1)
        x, y = all_rows[mine[dist.get_rank() if several else 0]]
        update.zero_grad()
        outputs = run(x, y)
        one, two = (torch.cat(all_gather(z)) for z in outputs) if several else outputs
        loss = contrast(scale, one, two)
        loss.backward()
        update.step()
        yield loss.item()


def worker(side: str, address: str, folder: str, rows: int, micro: int, width: int, steps: int) -> None:
    rank = int(os.environ.get("RANK", os.environ.get("PACELINE_RANK", "0")))
    if side == "gather":
        dist.init_process_group("gloo")
    before = peak_memory(CPU)
    made = ours(side, rows, micro, width, steps) if side in ("trainer", "sum") else by_hand(rows, width, steps)
    take(address, side, rank, made)
    Path(folder, f"{side}-{rank}.json").write_text(json.dumps(peak_memory(CPU) - before))
    if side == "gather":
        dist.destroy_process_group()


def start(folder: Path, numbers: list[int], side: str, address: str) -> Processes:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    script = [str(Path(__file__).resolve()), "--worker", side, address, str(folder), *map(str, numbers)]
    if side in ("trainer", "sum"):
        command = [
            "-m",
            "paceline",
            "run",
            "--quiet",
            "--workers",
            str(WORKERS),
            "--run-dir",
            str(folder / side),
        ]
        command += ["--save-every", "1000000", "--max-restarts", "0"]
        return [subprocess.Popen([sys.executable, *command, *script], env=environment)]
    variables, pins, _ = worker_settings(WORKERS, environment, sorted(os.sched_getaffinity(0)))
    return launch(script, environment | variables, pins, 1 if side == "plain" else WORKERS)


def measure(rows: int, micro: int, width: int, rounds: int) -> dict[str, object]:
    numbers = [rows, micro, width, WARM_UP + STEPS * rounds + 1]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        alone = give(("plain",), partial(start, folder, numbers), rounds, STEPS, workers=1)
        taken = give(TOGETHER, partial(start, folder, numbers), rounds, STEPS)
        peaks = {side: [json.loads(file.read_text()) for file in folder.glob(f"{side}-*.json")] for side in TOGETHER}
        peaks["plain"] = [json.loads((folder / "plain-0.json").read_text())]
    seconds = taken.seconds | alone.seconds
    memory = {side: max(each) for side, each in peaks.items()}
    medians(f"{rows} rows in micro-batches of {micro}, width {width}", seconds)
    print("  memory: " + ", ".join(f"{side} {size / 1e6:.0f} MB" for side, size in memory.items()))
    found: dict[str, object] = {"seconds": seconds, "memory": memory}
    found |= compare(taken.seconds, "trainer", "sum") | compare(taken.seconds, "trainer", "gather")
    print(f"  memory of trainer/sum: {memory['trainer'] / memory['sum']:.2f}")
    losses = {side: of for side, of in (taken.losses | alone.losses).items() if side != "sum"}
    found["losses apart"] = apart = Taken(losses=losses).apart()
    print(f"  losses {apart:.1e} apart at most")
    assert apart <= AGREE, "all sides must give the same training"
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=512)
    parser.add_argument("--micro", type=int, default=32)
    parser.add_argument("--width", type=int, default=192)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--record", type=Path)
    options = parser.parse_args()
    found = measure(options.rows, options.micro, options.width, options.rounds)
    if options.record:
        record(options.record, workers=WORKERS, threads=1, results=found)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        worker(*sys.argv[2:5], *map(int, sys.argv[5:]))  # type: ignore[arg-type]
    else:
        main()
