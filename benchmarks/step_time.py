"""Step time of a Trainer beside DistributedDataParallel, plain and tuned, and beside no communication at all.

    python benchmarks/step_time.py [MODEL ...] [--rounds 15] [--before SRC] [--record FILE] [--sides NAME ...]

Each side is a team of two workers, in processes of their own, that wait for their turn: a round lets each side take the
same number of steps, one side after the other, in an order that rotates. What counts is the ratio of a Trainer's
seconds to the others' in the same round: the median over the rounds, with its 95 % interval (order statistics).

plain   DDP over gloo as people write it, under torch's own environment
tuned   DDP with gradient_as_bucket_view and a fused optimizer, glibc keeping freed memory, each worker on its cores
bound   the same loop without any communication, in what `paceline run` surrounds its workers with: the limit
barrier the same with a barrier after each backward: the limit of what waits for the slower worker in each step
trainer `paceline run`
exact   `paceline run --plan exact`
before  the Trainer of another checkout, whose `src` is given

On demand:

backend tuned, over Paceline's transport instead of gloo: `init_process_group("paceline")` in a loop of one's own

On demand, each under torch's own environment like plain, and described in peers.py:

accelerate, fabric, deepspeed, ray

Rules: same model, data, optimizer, global batch and threads (one each); DDP gets a DataLoader with its
DistributedSampler, and for BatchNorm the same micro-batches under no_sync; every side is warmed up first, the Trainer
until it has settled on its piece size.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from models import JOBS, Job
from peers import PACKAGES, PEERS, drive_ray, missing
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler
from turns import WARM_UP, WORKERS, Processes, compare, give, launch, medians, record, take

import paceline
from paceline.comm.autoload import register

SIDES = ("plain", "tuned", "bound", "barrier", "trainer", "exact")
TUNED = ("tuned", "backend")
ALONE = ("bound", "barrier")  # they send nothing
OURS = ("trainer", "exact", "before")


def by_hand(job: Job, side: str, rank: int, steps: int) -> Iterator[float]:
    """The loop as people write it."""
    torch.manual_seed(0)
    model: Any = job.model()
    if side not in ALONE:
        model = DistributedDataParallel(model, gradient_as_bucket_view=side in TUNED)
    update = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=None if side == "plain" else True)
    data = job.data(steps * job.global_batch)
    share = job.global_batch // WORKERS
    loader = DataLoader(data, batch_size=job.micro or share, sampler=DistributedSampler(data, WORKERS, rank))
    accumulate = share // (job.micro or share)
    batches = iter(loader)
    while True:
        update.zero_grad()
        for number in range(accumulate):
            batch = next(batches)
            if side not in ALONE and number < accumulate - 1:
                with model.no_sync():
                    (job.loss(model(batch[0]), batch) / accumulate).backward()
            else:
                loss = job.loss(model(batch[0]), batch) / accumulate
                loss.backward()
        if side == "barrier":
            dist.barrier()
        update.step()
        yield loss.item()


def ours(job: Job, side: str, steps: int) -> Iterator[float]:
    trainer = paceline.Trainer(
        model=job.model,
        loss=job.loss,
        optimizer=lambda params: torch.optim.AdamW(params, lr=1e-4),
        global_batch=job.global_batch,
        plan=" ".join([f"micro={job.micro}"] * bool(job.micro) + ["exact"] * (side == "exact")),
    )
    for report in trainer.steps(job.data(steps * job.global_batch), count=steps):
        yield report.loss


def worker(side: str, address: str, model: str, steps: int, folder: str) -> None:
    """Takes its steps whenever it is told to."""
    job, rank = JOBS[model], int(os.environ.get("RANK", os.environ.get("PACELINE_RANK", "0")))
    if side == "ray":
        drive_ray(address, model, steps, folder)
        return
    if side in OURS:
        stepping = ours(job, side, steps)
    elif side in PEERS:
        stepping = PEERS[side](job, steps)
    else:
        if side != "bound":
            register()
            dist.init_process_group("paceline" if side in ("barrier", "backend") else "gloo")
        stepping = by_hand(job, side, rank, steps)
    take(address, side, rank, stepping)
    if side not in OURS and dist.is_initialized():
        del stepping
        dist.destroy_process_group()


def start(side: str, address: str, model: str, steps: int, folder: Path, before: Path | None) -> Processes:
    """The processes of one side."""
    script = [str(Path(__file__).resolve()), "--worker", side, address, model, str(steps), str(folder)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    if side == "ray":
        return [subprocess.Popen([sys.executable, *script], env=environment)]
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
        return [subprocess.Popen([sys.executable, *command, "--save-every", "1000000", *script], env=environment)]
    pins: list[list[int]] = []
    if side in (*TUNED, *ALONE):
        from paceline.launch.tuning import KEEP, worker_settings  # another checkout may have it elsewhere

        variables, pins, _ = worker_settings(WORKERS, environment, sorted(os.sched_getaffinity(0)))
        keep = {"MALLOC_MMAP_THRESHOLD_": KEEP, "MALLOC_TRIM_THRESHOLD_": KEEP}
        environment |= variables if side in ALONE else keep
    return launch(script, environment, pins)


def measure(model: str, rounds: int, sides: list[str], before: Path | None) -> dict[str, list[float]]:
    """Seconds a step of each side, by round: those of its slower worker."""
    each = JOBS[model].steps
    steps = WARM_UP + each * rounds + 1
    with tempfile.TemporaryDirectory() as folder:
        begin = partial(start, model=model, steps=steps, folder=Path(folder), before=before)
        taken = give(sides, begin, rounds, each)
    return taken.seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=list(JOBS), metavar="MODEL", help=f"of {', '.join(JOBS)}")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--before", type=Path, metavar="SRC")
    parser.add_argument("--record", type=Path)
    parser.add_argument("--sides", nargs="+", choices=[*SIDES, "backend", *PEERS], default=list(SIDES))
    options = parser.parse_args()
    if unknown := set(options.models) - set(JOBS):
        parser.error(f"there is no model {', '.join(sorted(unknown))}; choose of {', '.join(JOBS)}")
    peers = [side for side in options.sides if side in PEERS]
    for side in peers:
        if package := missing(side):
            parser.error(f"{side} is not installed here: pip install '{package}' -c constraints.txt")
    results: dict[str, object] = {}
    for name in options.models:
        sides = [*options.sides, *(["before"] if options.before else [])]
        seconds = measure(name, options.rounds, sides, options.before)
        found: dict[str, object] = {"seconds": seconds}
        medians(name, seconds)
        for mine in (side for side in ("trainer", "exact", "backend") if side in seconds):
            for other in (side for side in seconds if side != mine):
                found |= compare(seconds, mine, other)
        results[name] = found
        if options.record:
            versions = {"peers": {side: version(PACKAGES[side].partition("[")[0]) for side in peers}} if peers else {}
            record(options.record, workers=WORKERS, threads=1, **versions, results=results)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        side, address, model, steps, folder = sys.argv[2:]
        worker(side, address, model, int(steps), folder)
    else:
        main()
