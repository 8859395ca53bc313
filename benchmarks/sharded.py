"""A training step of a sharded Trainer beside torch's fully_shard by hand, over Paceline's transport and over gloo.

    python benchmarks/sharded.py [MODEL ...] [--levels 1 2 3] [--rounds 15] [--before SRC] [--record FILE]

Teams of two workers take turns like the sides of step_time.py, all surrounded by what `paceline run` surrounds its
workers with (cores, allocator, huge pages), one thread each. For the levels 2 and 3:

trainer   `paceline run --plan "shard=2 zero=LEVEL"`
paceline  fully_shard as people write it, the same blocks, over Paceline's transport
gloo      the same over gloo

For level 1 the sides are `shard=2 zero=1` and `data=2` of a Trainer. `before` is the Trainer of another checkout, whose
`src` is given. All get the same rows, in one micro-batch for each
worker; their losses must agree to 1e-4 of their size in every step.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from models import JOBS
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler
from turns import WARM_UP, WORKERS, Processes, compare, give, launch, medians, record, take

import paceline
from paceline.comm.autoload import register

AGREE = 1e-4
OURS = ("trainer", "data", "before")
BLOCKS = (nn.Linear, nn.TransformerEncoderLayer)


def by_hand(model: str, level: int, steps: int) -> Iterator[float]:
    """The loop as people write it."""
    job, mesh, rank = JOBS[model], init_device_mesh("cpu", (WORKERS,)), dist.get_rank()
    torch.manual_seed(0)
    net = job.model()
    lists = (part for part in net.modules() if isinstance(part, nn.ModuleList | nn.Sequential))
    for block in (block for parts in list(lists) for block in parts if isinstance(block, BLOCKS)):
        fully_shard(block, mesh=mesh, reshard_after_forward=level == 3)
    fully_shard(net, mesh=mesh, reshard_after_forward=None if level == 3 else False)
    update = torch.optim.AdamW(net.parameters(), lr=1e-4, fused=True)
    data = job.data(steps * job.global_batch)
    sampler: DistributedSampler[object] = DistributedSampler(data, WORKERS, rank, shuffle=False)
    for batch in DataLoader(data, batch_size=job.global_batch // WORKERS, sampler=sampler):
        update.zero_grad()
        loss = job.loss(net(batch[0]), batch)
        loss.backward()
        update.step()
        yield loss.item()


def ours(model: str, plan: str, steps: int) -> Iterator[float]:
    job = JOBS[model]

    def seeded() -> nn.Module:
        torch.manual_seed(0)
        return job.model()

    def order(position: int, size: int, seed: int, epoch: int) -> int:
        """The rows that DistributedSampler deals."""
        batch, place = divmod(position, job.global_batch)
        worker, row = divmod(place, job.global_batch // WORKERS)
        return batch * job.global_batch + row * WORKERS + worker

    trainer = paceline.Trainer(
        model=seeded,
        loss=job.loss,
        optimizer=lambda params: torch.optim.AdamW(params, lr=1e-4),
        global_batch=job.global_batch,
        plan=f"{plan} micro={job.global_batch // WORKERS}",
    )
    for report in trainer.steps(job.data(steps * job.global_batch), count=steps, order=order):
        yield report.loss


def worker(side: str, address: str, model: str, level: int, steps: int) -> None:
    rank = int(os.environ.get("RANK", os.environ.get("PACELINE_RANK", "0")))
    if side in OURS:
        stepping = ours(model, "data=2" if side == "data" else f"shard={WORKERS} zero={level}", steps)
    else:
        register()
        dist.init_process_group(side)
        stepping = by_hand(model, level, steps)
    take(address, side, rank, stepping)
    if side not in OURS:
        dist.destroy_process_group()


def start(model: str, level: int, steps: int, folder: Path, before: Path | None, side: str, address: str) -> Processes:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    script = [str(Path(__file__).resolve()), "--worker", side, address, model, str(level), str(steps)]
    if side in OURS:
        environment |= {"PYTHONPATH": str(before)} if side == "before" else {}
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
    from paceline.launch.tuning import worker_settings  # another checkout may have it elsewhere

    variables, pins, _ = worker_settings(WORKERS, environment, sorted(os.sched_getaffinity(0)))
    return launch(script, environment | variables, pins)


def measure(model: str, level: int, rounds: int, before: Path | None) -> dict[str, object]:
    sides = ["trainer", *(["data"] if level == 1 else ["paceline", "gloo"]), *(["before"] if before else [])]
    each = JOBS[model].steps
    steps = WARM_UP + each * rounds + 1
    with tempfile.TemporaryDirectory() as folder:
        taken = give(sides, partial(start, model, level, steps, Path(folder), before), rounds, each)
    medians(f"{model}, zero={level}", taken.seconds)
    found: dict[str, object] = {"seconds": taken.seconds}
    for other in sides[1:]:
        found |= compare(taken.seconds, "trainer", other)
    if level > 1:
        found |= compare(taken.seconds, "paceline", "gloo")
    found["losses apart"] = apart = taken.apart()
    print(f"  losses {apart:.1e} apart at most")
    assert apart <= AGREE, "all sides must give the same training"
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=["mlp 64M", "gpt 10M"], metavar="MODEL")
    parser.add_argument("--levels", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--before", type=Path, metavar="SRC")
    parser.add_argument("--record", type=Path)
    options = parser.parse_args()
    results: dict[str, dict[str, object]] = {}
    for model in options.models:
        for level in options.levels:
            results.setdefault(model, {})[f"zero={level}"] = measure(model, level, options.rounds, options.before)
            if options.record:
                record(options.record, workers=WORKERS, threads=1, results=results)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        side, address, model, level, steps = sys.argv[2:]
        worker(side, address, model, int(level), int(steps))
    else:
        main()
