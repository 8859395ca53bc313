"""A model in stages: how long workers wait at both ends of a step, and a step beside torch's Schedule1F1B by hand.

    python benchmarks/pipeline.py --bubble [--sleep 0.05] [--steps 8] [--record FILE]
    python benchmarks/pipeline.py --against torch [--workers 2] [--width 384] [--layers 8] [--rounds 7] [--record FILE]

--bubble    blocks that sleep as long in the forward as for the gradients of their inputs, and of their weights, so that
            nothing but the order of micro-batches counts. Prints the part of a step in which a worker does not sleep,
            and what the schedule predicts. Without split backwards that is (p-1)/(Vm+p-1) for p workers with V stages
            each and m micro-batches (Narayanan et al., 2021)
--against   a GPT with a head of its own. The sides take turns like those of step_time.py, all surrounded by what
            `paceline run` surrounds its workers with (cores, allocator, huge pages), one thread each:

            trainer   `paceline run --plan "pipeline=N"`
            paceline  Schedule1F1B of torch.distributed.pipelining as people write it, over Paceline's transport
            gloo      the same over gloo

            All get the same rows, micro-batches, stages and optimizer; their losses must agree to 1e-4 of their size in
            every step. With more workers than cores it is CPU seconds that are compared, of the busiest worker.
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
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from models import Block
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from turns import WARM_UP, Processes, beside, give, in_order, launch, medians, record, take

import paceline
from paceline.comm.autoload import register
from paceline.launch.tuning import worker_settings
from paceline.parallel.pipeline.schedule import simulate, table

AGREE, ROWS, MICRO, LENGTH, WORDS, STEPS = 1e-4, 16, 2, 64, 512, 5  # rows of a step and of a micro-batch; STEPS a round
BUBBLES = [
    (2, 1, "1f1b"),
    (2, 1, "gpipe"),
    (2, 2, "1f1b"),
    (4, 1, "1f1b"),
    (4, 2, "1f1b"),
    (4, 1, "zb"),
    (4, 2, "zb"),
    (4, 2, "zbv"),
]  # workers, virtual, schedule
COUNT = 8  # micro-batches of a step of sleepers


# ---- a step beside torch's


class Net(nn.Module):
    """Of a GPT the blocks `own`, with what comes before the first and after the last one."""

    def __init__(self, width: int, layers: int, own: range | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        own = own or range(layers)
        self.tokens, self.places = nn.Embedding(WORDS, width), nn.Embedding(LENGTH, width)
        blocks = [Block(width, max(1, width // 64)) for _ in range(layers)]
        self.blocks = nn.ModuleList(blocks[own.start : own.stop])
        self.last, self.head = nn.LayerNorm(width), nn.Linear(width, WORDS)
        self.tokens, self.places = (self.tokens, self.places) if own.start == 0 else (None, None)
        self.last, self.head = (self.last, self.head) if own.stop == layers else (None, None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.tokens is not None:
            x = self.tokens(x) + self.places.weight[: x.shape[1]]
        for block in self.blocks:
            x = block(x)
        return x if self.head is None else self.head(self.last(x))


def data(rows: int) -> TensorDataset:
    return TensorDataset(torch.randint(0, WORDS, (rows, LENGTH), generator=torch.Generator().manual_seed(1)))


def loss(output: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def starts(layers: int, workers: int) -> list[int]:
    """The first block of each stage."""
    return [layers * rank // workers for rank in range(workers + 1)]


def by_hand(rank: int, workers: int, width: int, layers: int, steps: int) -> Iterator[float]:
    """The loop as people write it."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    first = starts(layers, workers)
    net = Net(width, layers, range(first[rank], first[rank + 1]))
    stage = PipelineStage(net, rank, workers, torch.device("cpu"))
    schedule = Schedule1F1B(stage, ROWS // MICRO, loss_fn=loss)
    update = torch.optim.AdamW(net.parameters(), lr=1e-4, fused=False)
    for (ids,) in DataLoader(data(steps * ROWS), batch_size=ROWS):
        update.zero_grad()
        losses: list[torch.Tensor] = []
        given, told = ((ids,) if rank == 0 else ()), ({"target": ids, "losses": losses} if rank == workers - 1 else {})
        schedule.step(*given, **told)
        update.step()
        yield statistics.fmean(found.item() for found in losses) if losses else 0.0


def ours(rank: int, workers: int, width: int, layers: int, steps: int) -> Iterator[float]:
    trainer = paceline.Trainer(
        model=lambda: Net(width, layers),
        loss=lambda output, batch: loss(output, batch[0]),
        optimizer=lambda params: torch.optim.AdamW(params, lr=1e-4, fused=False),
        global_batch=ROWS,
        plan=f"pipeline={workers} micro={MICRO}",
        pipeline_blocks=f"blocks:{','.join(map(str, starts(layers, workers)[1:-1]))}",
    )
    for report in trainer.steps(data(steps * ROWS), count=steps, order=in_order):
        yield report.loss if rank == workers - 1 else 0.0


def worker(side: str, address: str, workers: int, *sizes: int) -> None:
    rank = int(os.environ.get("RANK", os.environ.get("PACELINE_RANK", "0")))
    clock = time.perf_counter if workers <= (os.cpu_count() or 1) else time.process_time
    if side == "trainer":
        take(address, side, rank, ours(rank, workers, *sizes), clock)
        return
    register()
    dist.init_process_group(side)
    take(address, side, rank, by_hand(rank, workers, *sizes), clock)
    dist.destroy_process_group()


def run(workers: int, folder: Path, *options: str) -> list[str]:
    command = ["-m", "paceline", "run", "--quiet", "--workers", str(workers), "--run-dir", str(folder)]
    return [sys.executable, *command, "--save-every", "1000000", "--max-restarts", "0", *options]


def start(workers: int, sizes: list[int], folder: Path, side: str, address: str) -> Processes:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    script = [str(Path(__file__).resolve()), "--worker", side, address, str(workers), *map(str, sizes)]
    if side == "trainer":
        return [subprocess.Popen([*run(workers, folder / side), *script], env=environment)]
    variables, pins, _ = worker_settings(workers, environment, sorted(os.sched_getaffinity(0)))
    return launch(script, environment | variables, pins, workers)


def against(options: argparse.Namespace) -> dict[str, Any]:
    sides, workers = ("trainer", "paceline", "gloo"), options.workers
    sizes = [options.width, options.layers, WARM_UP + STEPS * options.rounds + 1]
    with tempfile.TemporaryDirectory() as folder:
        begin = partial(start, workers, sizes, Path(folder))
        taken = give(sides, begin, options.rounds, STEPS, workers)
    unit = "seconds" if workers <= (os.cpu_count() or 1) else "CPU seconds"
    medians(f"pipeline={workers}, width {options.width}, {options.layers} layers ({unit})", taken.seconds)
    return {"unit": unit, **beside(taken, AGREE)}


# ---- how long workers wait


class Sleep(torch.autograd.Function):
    """Sleeps for so many seconds in the forward, and for others in the backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, forward: float, backward: float) -> torch.Tensor:
        ctx.seconds = backward
        time.sleep(forward)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        time.sleep(ctx.seconds)
        return grad.clone(), None, None


class Sleeper(nn.Module):
    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds, self.layer = seconds, nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = Sleep.apply(x, self.seconds, self.seconds)  # type: ignore[no-untyped-call]
        weight = Sleep.apply(self.layer.weight, 0.0, self.seconds)  # type: ignore[no-untyped-call]
        return nn.functional.linear(x, weight, self.layer.bias)


def sleeper(out: str, stages: int, seconds: float, steps: int) -> None:
    """Writes the seconds of each step but the first two, which look around."""
    trainer = paceline.Trainer(
        model=lambda: nn.Sequential(*[Sleeper(seconds) for _ in range(stages)]),
        loss=lambda output, batch: output.square().mean(),
        optimizer=lambda params: torch.optim.SGD(params, lr=0.01),
        global_batch=COUNT,
    )
    ends = [time.perf_counter() for _ in trainer.steps(TensorDataset(torch.ones(COUNT, 8)), count=steps + 2)]
    if trainer.main:
        Path(out).write_text(" ".join(str(end - begin) for begin, end in pairwise(ends[1:])))


def bubbles(options: argparse.Namespace) -> dict[str, Any]:
    results = {}
    for workers, virtual, schedule in BUBBLES:
        words = f"pipeline={workers}{f' virtual={virtual}' if virtual > 1 else ''} schedule={schedule}"
        seconds = options.sleep / virtual
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "seconds"
            script = [str(Path(__file__).resolve()), "--sleeper", str(out), str(workers * virtual), str(seconds)]
            command = run(workers, Path(folder) / "run", "--plan", f"{words} micro=1")
            environment = {**os.environ, "OMP_NUM_THREADS": "1"}
            subprocess.run([*command, *script, str(options.steps)], env=environment, check=True)
            taken = [float(text) for text in out.read_text().split()]
        asleep = 3 * options.sleep * COUNT
        found = 1 - asleep / statistics.median(taken)
        equal = [1.0] * workers * virtual
        expected = simulate(table(schedule, workers, virtual, COUNT), equal, [2 * one for one in equal]).bubble
        print(f"{words}: {found:.4f} of a step is waited, {expected:.4f} expected: {found / expected:.3f}", flush=True)
        results[words] = {"seconds": taken, "asleep": asleep, "bubble": found, "expected": expected}
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--bubble", action="store_true")
    what.add_argument("--against", choices=["torch"])
    parser.add_argument("--sleep", type=float, default=0.05, help="seconds of a worker's forward of a micro-batch")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--record", type=Path)
    options = parser.parse_args()
    results = bubbles(options) if options.bubble else against(options)
    if options.record:
        record(options.record, workers=options.workers, threads=1, results=results)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        side, address, *numbers = sys.argv[2:]
        worker(side, address, *map(int, numbers))
    elif sys.argv[1:2] == ["--sleeper"]:
        out, stages, seconds, steps = sys.argv[2:]
        sleeper(out, int(stages), float(seconds), int(steps))
    else:
        main()
