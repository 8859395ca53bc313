"""Step time of a Trainer against a hand-written DistributedDataParallel loop, interleaved in the same two processes.

    paceline run --workers 2 benchmarks/step_time.py [--rounds 15] [--record FILE] [MODEL ...]

Each round times the same number of steps of both, one after the other, in alternating order; what counts is the ratio
of each pair. Printed: the median ratio with its 95 % interval (order statistics of the median), and both medians.
Rules: same model, data, optimizer, global batch and threads; DDP gets a DataLoader with its DistributedSampler, and
for BatchNorm the same micro-batches under no_sync; the Trainer is warmed up until it has settled on its piece size.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from datetime import date
from pathlib import Path

import torch
import torch.distributed as dist
from models import JOBS, Job
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

import paceline

WARM_UP = 12


def optimizer(params: object) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-4)  # type: ignore[arg-type]


def hand_written(job: Job, steps: int) -> Iterator[float]:
    """The loop as people write it."""
    size = dist.get_world_size()
    model = DistributedDataParallel(job.model())
    update = optimizer(model.parameters())
    data = job.data(steps * job.global_batch)
    share = job.global_batch // size
    loader = DataLoader(data, batch_size=job.micro or share, sampler=DistributedSampler(data))
    accumulate = share // (job.micro or share)
    batches = iter(loader)
    while True:
        update.zero_grad()
        for number in range(accumulate):
            batch = next(batches)
            if number < accumulate - 1:
                with model.no_sync():
                    (job.loss(model(batch[0]), batch) / accumulate).backward()
            else:
                loss = job.loss(model(batch[0]), batch) / accumulate
                loss.backward()
        update.step()
        yield loss.item()


def ours(job: Job, steps: int) -> Iterator[float]:
    trainer = paceline.Trainer(
        model=job.model,
        loss=job.loss,
        optimizer=optimizer,
        global_batch=job.global_batch,
        plan=f"micro={job.micro}" if job.micro else None,
    )
    for report in trainer.steps(job.data(steps * job.global_batch), count=steps):
        yield report.loss


def timed(take: Callable[[], float], steps: int) -> float:
    dist.barrier()
    began = time.perf_counter()
    for _ in range(steps):
        take()
    dist.barrier()
    return (time.perf_counter() - began) / steps


def interval(ratios: list[float]) -> tuple[float, float]:
    """95 % interval of the median from order statistics: no assumption about the distribution."""
    ranked, count = sorted(ratios), len(ratios)
    reach = int(0.98 * count**0.5 + 0.5)
    return ranked[max(0, count // 2 - reach)], ranked[min(count - 1, count // 2 + reach)]


def measure(job: Job, rounds: int) -> dict[str, list[float]]:
    steps = WARM_UP + job.steps * rounds + 1
    sides = {"ddp": hand_written(job, steps), "paceline": ours(job, steps)}
    for side in sides.values():
        for _ in range(WARM_UP):
            next(side)
    seconds: dict[str, list[float]] = {"ddp": [], "paceline": []}
    for number in range(rounds):
        for name in sorted(sides, reverse=number % 2 == 1):
            seconds[name].append(timed(lambda side=sides[name]: next(side), job.steps))  # type: ignore[misc]
    for side in sides.values():
        side.close()  # type: ignore[attr-defined]
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=list(JOBS))
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--record", type=Path)
    options = parser.parse_args()
    team = paceline.join()
    torch.manual_seed(0)
    results = {}
    for name in options.models:
        seconds = measure(JOBS[name], options.rounds)
        ratios = [mine / theirs for mine, theirs in zip(seconds["paceline"], seconds["ddp"], strict=True)]
        low, high = interval(ratios)
        middle = {side: statistics.median(times) for side, times in seconds.items()}
        results[name] = {"ratio": statistics.median(ratios), "interval": [low, high], "seconds": seconds}
        print(
            f"{name:8}  paceline / DDP {statistics.median(ratios):.3f}  [{low:.3f}, {high:.3f}]"
            f"   paceline {1000 * middle['paceline']:.0f} ms, DDP {1000 * middle['ddp']:.0f} ms a step",
            flush=True,
        )
    if team.rank == 0 and options.record:
        machine = f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores"
        about = {"date": str(date.today()), "machine": machine, "workers": team.size, "torch": torch.__version__}
        about |= {"threads": torch.get_num_threads(), "rounds": options.rounds}
        options.record.write_text(json.dumps(about | {"results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
