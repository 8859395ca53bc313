"""What starting costs: importing paceline beside torch, and the first step under `paceline run` and under torchrun.

    python benchmarks/start_up.py [--rounds 7] [--record FILE]

Interleaved: each round starts every command once, in turn. Both launchers start two workers that train the same small
model; the clock runs from the launch to the end of worker 0's first optimizer step.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from turns import record

COMMON = """
import os, time, torch, torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
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
next(trainer.steps(data))
if trainer.main: first()
trainer.stop()
"""


def seconds(command: list[str], inside: bool) -> float:
    """Wall seconds of a command, or those that it printed itself."""
    began = time.time()
    done = subprocess.run(command, env={**os.environ, "BEGAN": str(began)}, capture_output=True, text=True, check=True)
    return float(done.stdout.split()[-1]) if inside else time.time() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--record", type=Path)
    options = parser.parse_args()
    file = options.record and options.record.resolve()
    taken: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        Path("ddp.py").write_text(COMMON + DDP)
        Path("ours.py").write_text(COMMON + OURS)
        python = [sys.executable]
        commands = {
            "import torch": [*python, "-c", "import torch"],
            "import torch, paceline": [*python, "-c", "import torch, paceline; paceline.Trainer"],
            "torchrun, first step": [*python, "-m", "torch.distributed.run", "--nproc-per-node", "2", "ddp.py"],
            "paceline run, first step": [*python, "-m", "paceline.cli", "run", "--workers", "2", "ours.py"],
        }
        for _ in range(options.rounds + 1):  # the first round warms the disk's cache and does not count
            for name, command in commands.items():
                taken.setdefault(name, []).append(seconds(command, inside="first step" in name))
    for name, times in taken.items():
        taken[name] = times[1:]
        print(f"{name:26} {statistics.median(times[1:]):.2f} s   [{min(times[1:]):.2f}, {max(times[1:]):.2f}]")
    pairs = zip(taken["import torch, paceline"], taken["import torch"], strict=True)
    print(f"import paceline adds       {statistics.median(a - b for a, b in pairs):.2f} s")
    pairs = zip(taken["paceline run, first step"], taken["torchrun, first step"], strict=True)
    print(f"first step, ratio          {statistics.median(a / b for a, b in pairs):.2f}")
    if file:
        record(file, workers=2, seconds=taken)


if __name__ == "__main__":
    main()
