"""A training step of torch's fully_shard over gloo, and over Paceline's transport.

    python benchmarks/sharded.py [--rounds 15] [--record FILE]

Two teams of two workers train the MLP of 64 M parameters with the same loop, each linear layer sharded for itself, and
take turns like the sides of step_time.py. They differ in the backend's name and in nothing else: both are surrounded
by what `paceline run` surrounds its workers with (cores, allocator, huge pages), one thread each. The losses of both
must agree to 1e-5 of their size in every step.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from models import JOBS
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler
from turns import WARM_UP, WORKERS, Processes, compare, give, launch, medians, record, take

from paceline.comm.autoload import register
from paceline.launch.surroundings import surround

SIDES, MODEL, AGREE = ("paceline", "gloo"), "mlp 64M", 1e-5


def training(rank: int, steps: int) -> Iterator[float]:
    """The loop as people write it."""
    job, mesh = JOBS[MODEL], init_device_mesh("cpu", (WORKERS,))
    torch.manual_seed(0)
    model = job.model()
    for layer in model.children():
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    update = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    data = job.data(steps * job.global_batch)
    sampler: DistributedSampler[object] = DistributedSampler(data, WORKERS, rank)
    for batch in DataLoader(data, batch_size=job.global_batch // WORKERS, sampler=sampler):
        update.zero_grad()
        loss = job.loss(model(batch[0]), batch)
        loss.backward()
        update.step()
        yield loss.item()


def worker(backend: str, address: str, steps: int) -> None:
    register()
    dist.init_process_group(backend)
    stepping = training(dist.get_rank(), steps)
    take(address, backend, dist.get_rank(), stepping)
    dist.destroy_process_group()


def start(backend: str, address: str, steps: int) -> Processes:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    variables, pins, _ = surround(WORKERS, environment, sorted(os.sched_getaffinity(0)))
    script = [str(Path(__file__).resolve()), "--worker", backend, address, str(steps)]
    return launch(script, environment | variables, pins)


def apart(losses: dict[str, list[list[float]]]) -> float:
    """The largest relative difference of two losses of the same worker and step."""
    ours, theirs = (torch.tensor(losses[side], dtype=torch.float64) for side in SIDES)
    return float(((ours - theirs).abs() / theirs.abs()).max())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--record", type=Path)
    options = parser.parse_args()
    each = JOBS[MODEL].steps
    steps = WARM_UP + each * options.rounds
    taken = give(SIDES, lambda backend, address: start(backend, address, steps), options.rounds, each)
    medians(f"fully_shard, {MODEL}", taken.seconds)
    found = {"seconds": taken.seconds, **compare(taken.seconds, *SIDES), "losses apart": apart(taken.losses)}
    losses = taken.losses[SIDES[0]][0]
    print(f"  losses: {losses[0]:.4f} at first, {losses[-1]:.4f} at last, {found['losses apart']:.1e} apart at most")
    assert found["losses apart"] <= AGREE, "both backends must give the same training"
    if options.record:
        record(options.record, workers=WORKERS, threads=1, results={MODEL: found})


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        worker(sys.argv[2], sys.argv[3], int(sys.argv[4]))
    else:
        main()
