"""What starting costs: the first step of a run, and a lost worker's way back into its team.

    python benchmarks/start_up.py [--rounds 7] [--before CHECKOUT] [--record FILE]

Interleaved: each round does everything once, in turn. Four workers (and one) train a small model; the clock runs from
the launch to the end of worker 0's first optimizer step, under torchrun too. Then two of four workers are killed, one
after the other, on purpose: from the word that one is lost until the team is whole again, by the run's journal. With
`--before` the same by an earlier version, in that checkout.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from turns import record

from paceline.base.journal import read_journal

SOURCE = Path(__file__).parents[1]
COMMON = """
import os, time, torch, torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
torch.manual_seed(0)
data = TensorDataset(torch.randn(256, 64), torch.arange(256) % 10)
def first(): print(time.time() - float(os.environ["BEGAN"]), flush=True)
"""
DDP = """
import torch.distributed as dist
dist.init_process_group("gloo")
model = nn.parallel.DistributedDataParallel(model)
update = torch.optim.AdamW(model.parameters())
x, y = next(iter(DataLoader(data, batch_size=16, sampler=DistributedSampler(data))))
F.cross_entropy(model(x), y).backward()
update.step()
if dist.get_rank() == 0: first()
dist.barrier()
dist.destroy_process_group()
"""
OURS = """
import paceline
trainer = paceline.Trainer(model, lambda o, b: F.cross_entropy(o, b[1]), torch.optim.AdamW, global_batch=32)
"""
ONCE = """
next(trainer.steps(data))
if trainer.main: first()
trainer.stop()
"""
LOSSES = "kill:1@5.loading,kill:2@200.loading"
LONG = """
for report in trainer.steps(data, count=400): time.sleep(0.05)
"""


def seconds(command: list[str], environment: dict[str, str], inside: bool = True) -> float:
    """Wall seconds of a command, or those that it printed itself."""
    began = time.time()
    done = subprocess.run(command, env={**environment, "BEGAN": str(began)}, capture_output=True, text=True, check=True)
    return float(done.stdout.split()[-1]) if inside else time.time() - began


def ways_back(folder: Path, workers: int) -> Iterator[float]:
    """For each worker that a run lost, the seconds until all were there again."""
    lost = None
    for event in read_journal(folder):
        if event["event"] == "lost":
            lost = event["at"]
        elif event["event"] == "formed" and lost is not None and len(event["workers"]) == workers:
            yield event["at"] - lost
            lost = None


def take(python: list[str], workers: int, name: str, source: Path, taken: dict[str, list[float]]) -> None:
    """One round of a version of ours."""
    environment = {**os.environ, "PYTHONPATH": str(source / "src")}
    run = [*python, "-m", "paceline", "run"]
    for team in (workers, 1):
        found = seconds([*run, "--workers", str(team), "once.py"], environment)
        taken.setdefault(f"{name}, first step of {team}", []).append(found)
    with tempfile.TemporaryDirectory() as folder:
        command = [*run, "--quiet", "--workers", str(workers), "--run-dir", f"{folder}/run", "long.py"]
        seconds(command, {**environment, "PACELINE_CHAOS": LOSSES}, inside=False)
        for which, found in zip(("first", "second"), ways_back(Path(folder, "run"), workers), strict=True):
            taken.setdefault(f"{name}, {which} loss", []).append(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--before", type=Path)
    parser.add_argument("--record", type=Path)
    options = parser.parse_args()
    file = options.record and options.record.resolve()
    sources = {"paceline": SOURCE} | ({"before": options.before.resolve()} if options.before else {})
    taken: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        Path("ddp.py").write_text(COMMON + DDP)
        Path("once.py").write_text(COMMON + OURS + ONCE)
        Path("long.py").write_text(COMMON + OURS + LONG)
        python = [sys.executable]
        torchrun = [*python, "-m", "torch.distributed.run", "--nproc-per-node", str(options.workers), "ddp.py"]
        for _ in range(options.rounds + 1):  # the first round warms the disk's cache and does not count
            bare = dict(os.environ)
            taken.setdefault("import torch", []).append(seconds([*python, "-c", "import torch"], bare, False))
            line = "import torch, paceline; paceline.Trainer"
            taken.setdefault("import torch, paceline", []).append(seconds([*python, "-c", line], bare, False))
            taken.setdefault("torchrun, first step", []).append(seconds(torchrun, bare))
            for name, source in sources.items():
                take(python, options.workers, name, source, taken)
    taken = {name: times[1:] for name, times in taken.items()}
    for name, times in taken.items():
        print(f"{name:30} {statistics.median(times):6.2f} s   [{min(times):.2f}, {max(times):.2f}]")
    ours = [name for name in taken if name.startswith("paceline")]
    pairs = [("import torch, paceline", "import torch"), (ours[0], "torchrun, first step")]
    pairs += [(name, name.replace("paceline", "before")) for name in ours if options.before]
    for mine, other in pairs:
        ratio = statistics.median(a / b for a, b in zip(taken[mine], taken[other], strict=True))
        print(f"{mine} / {other}: {ratio:.2f}")
    if file:
        record(file, workers=options.workers, seconds=taken)


if __name__ == "__main__":
    main()
