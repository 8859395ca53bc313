"""Seconds that the loss of a worker costs: from the fault to the next step that the team has done, less that step.

Usage: losses.py [--losses N] [--record FILE]. Six workers with a loader process each train a small model; one of them
is lost every few seconds, killed or stopped, and comes back. Beside it torchrun restarts the same loop, written with
DistributedDataParallel and a checkpoint after every step, whose worker kills itself.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from functools import partial
from itertools import pairwise
from pathlib import Path

from turns import record

WORKERS, APART = 6, 250  # steps between two losses: the one before has come back by then
PAUSE = 0.02  # seconds of a step's body, so that the machine's two cores are not the measure
TORCHRUN_LOSSES = 5


def train(out: Path, steps: int) -> None:
    """The script under `paceline run`."""
    import torch
    from torch.utils.data import TensorDataset

    import paceline

    chance = torch.Generator().manual_seed(0)
    data = TensorDataset(torch.randn(4096, 64, generator=chance), torch.randint(0, 8, (4096,), generator=chance))
    trainer = paceline.Trainer(
        lambda: torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 8)),
        lambda output, batch: torch.nn.functional.cross_entropy(output, batch[1]),
        lambda params: torch.optim.AdamW(params, lr=1e-3),
        global_batch=96,
        plan="micro=8",
    )
    with (out / f"{os.getpid()}.times").open("w", buffering=1) as times:
        for report in trainer.steps(data, count=steps, loader={"num_workers": 1}):
            times.write(f"{report.step} {time.time()}\n")
            time.sleep(PAUSE)


def train_ddp(out: Path, steps: int) -> None:
    """The script under torchrun: restarts everybody from the last checkpoint."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    rank, saved = dist.get_rank(), out / "saved.pt"
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 8))
    done = 0
    if saved.exists():
        state = torch.load(saved)
        model.load_state_dict(state["model"])
        done = state["done"]
    ddp = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-3)
    attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    with (out / f"{os.getpid()}.times").open("w", buffering=1) as times:
        for step in range(done + 1, steps + 1):
            rows = torch.randn(16, 64), torch.randint(0, 8, (16,))
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(ddp(rows[0]), rows[1]).backward()
            if rank == 3 and step == done + 50 and attempt < TORCHRUN_LOSSES:
                (out / "faults").open("a").write(f"{time.time()}\n")
                os.kill(os.getpid(), 9)
            optimizer.step()
            if rank == 0:
                torch.save({"model": model.state_dict(), "done": step}, out / "saving.pt")
                (out / "saving.pt").rename(saved)
            times.write(f"{step} {time.time()}\n")
            time.sleep(PAUSE)
    dist.destroy_process_group()


def gaps(out: Path, faults: list[float]) -> list[float]:
    """For each fault, the seconds to the first step that anybody had done after it, less a usual step. Infinite where
    nobody went on.
    """
    done: dict[int, float] = {}
    for file in out.glob("*.times"):
        for line in file.read_text().splitlines():
            step, at = line.split()
            done[int(step)] = min(float(at), done.get(int(step), float("inf")))
    ends = [done[step] for step in sorted(done)]
    usual = statistics.median(after - before for before, after in pairwise(ends))
    return [min((end for end in ends if end > fault), default=math.inf) - fault - usual for fault in faults]


def lose(kind: str, losses: int) -> list[float]:
    steps = APART * (losses + 1)
    text = ",".join(f"{kind}:{(5 * number) % WORKERS}@{APART * (number + 1)}.backward" for number in range(losses))
    with tempfile.TemporaryDirectory() as folder:
        out, run = Path(folder), Path(folder, "run")
        options = ["--workers", str(WORKERS), "--run-dir", str(run), "--max-restarts", str(losses), "--quiet"]
        command = [
            sys.executable,
            "-m",
            "paceline.cli",
            "run",
            *options,
            __file__,
            "--as",
            "paceline",
            folder,
            str(steps),
        ]
        subprocess.run(command, check=True, timeout=400, env={**os.environ, "PACELINE_CHAOS": text})
        fired = [json.loads(line)["at"] for line in (run / "chaos.jsonl").read_text().splitlines()]
        return gaps(out, fired)


def torchrun() -> list[float]:
    with tempfile.TemporaryDirectory() as folder:
        options = [
            "--nproc-per-node",
            str(WORKERS),
            "--max-restarts",
            str(TORCHRUN_LOSSES),
            "--monitor-interval",
            "0.1",
        ]
        command = [sys.executable, "-m", "torch.distributed.run", *options, __file__, "--as", "ddp", folder]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        try:
            subprocess.run(
                [*command, str(60 * (TORCHRUN_LOSSES + 1))], timeout=200, env=environment, capture_output=True
            )
        except subprocess.TimeoutExpired:
            print("  torchrun hung")
        out = Path(folder)
        return gaps(out, [float(line) for line in (out / "faults").read_text().split()])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--losses", type=int, default=6)
    parser.add_argument("--record", type=Path, metavar="FILE", help="writes the raw figures")
    parser.add_argument("--as", nargs=3, dest="role", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.role:
        role, out, steps = options.role
        (train if role == "paceline" else train_ddp)(Path(out), int(steps))
        return
    results = {}
    sides = {"killed": partial(lose, "kill", options.losses), "stopped": partial(lose, "stop", options.losses)}
    for name, side in (sides | {"torchrun, killed": torchrun}).items():
        found = results[name] = side()
        print(
            f"{name:18} {len(found)} losses: median {statistics.median(found):.3f} s, most {max(found):.3f} s",
            flush=True,
        )
    if options.record:
        record(options.record, workers=WORKERS, threads=1, results=results)


if __name__ == "__main__":
    main()
