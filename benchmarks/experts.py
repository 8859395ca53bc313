"""A training step whose experts are divided over the workers, beside the same exchange of tokens by hand.

    python benchmarks/experts.py [--workers 2 4] [--width 256] [--rounds 7] [--record FILE]

A stack of mixture-of-experts layers. Each sends every token to two of its eight experts, and adds an auxiliary loss.
The sides take turns like those of step_time.py, all surrounded by what `paceline run` surrounds its workers with
(cores, allocator, huge pages), one thread each:

trainer   `paceline run --plan "expert=N"`
paceline  all_to_all_single in plain PyTorch as people write it, the counts first, over Paceline's transport
gloo      the same over gloo

All get the same rows; their losses must agree to 1e-4 of their size in every step.
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
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from turns import WARM_UP, Processes, beside, give, in_order, launch, medians, record, take

import paceline
from paceline.comm.autoload import register
from paceline.launch.tuning import worker_settings

AGREE, ROWS, LENGTH, STEPS = 1e-4, 8, 64, 10  # rows of a worker in a step, their length, steps of a round
EXPERTS, CHOSEN, LAYERS = 8, 2, 4


class Experts(nn.Module):
    """Stacked weights, and a forward of tokens, the indices of their experts, and weights."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.num_experts = EXPERTS
        self.up = nn.Parameter(torch.randn(EXPERTS, 2 * width, width) * width**-0.5)
        self.down = nn.Parameter(torch.randn(EXPERTS, width, 2 * width) * (2 * width) ** -0.5)

    def forward(self, tokens: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        output = torch.zeros_like(tokens)
        for number in range(self.num_experts):
            rows, slots = (index == number).nonzero(as_tuple=True)
            made = F.gelu(tokens[rows] @ self.up[number].T) @ self.down[number].T
            output = output.index_add(0, rows, made * weights[rows, slots, None])
        return output


class _Exchange(torch.autograd.Function):
    """Sends `given[i]` rows to worker i; the backward sends gradients the other way."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, given: list[int], taken: list[int]) -> torch.Tensor:
        ctx.given, ctx.taken = given, taken
        received = rows.new_empty(sum(taken), rows.shape[1])
        dist.all_to_all_single(received, rows.contiguous(), taken, given)
        return received

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return _Exchange.apply(grad, ctx.taken, ctx.given), None, None


class ExpertsByHand(nn.Module):
    """This worker's experts. The others' tokens come, and the results go back."""

    def __init__(self, full: Experts) -> None:
        super().__init__()
        self.size, each = dist.get_world_size(), EXPERTS // dist.get_world_size()
        mine = slice(dist.get_rank() * each, (dist.get_rank() + 1) * each)
        self.local = full
        full.num_experts = each
        full.up, full.down = (nn.Parameter(param.detach()[mine].clone()) for param in (full.up, full.down))

    def forward(self, tokens: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        order = index.flatten().argsort()
        rows, each = order // CHOSEN, self.local.num_experts
        counts = index.flatten().bincount(minlength=EXPERTS).view(self.size, each)
        arriving = torch.empty_like(counts)
        dist.all_to_all_single(arriving, counts)
        given, taken = counts.sum(1).tolist(), arriving.sum(1).tolist()
        received = _Exchange.apply(tokens[rows], given, taken)
        numbers = torch.arange(each, dtype=torch.int64).repeat(self.size).repeat_interleave(arriving.flatten())
        computed = self.local(received, numbers.unsqueeze(1), torch.ones(len(numbers), 1))
        returned = _Exchange.apply(computed, taken, given)
        return torch.zeros_like(tokens).index_add(0, rows, returned * weights.flatten()[order].unsqueeze(1))


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.router, self.experts = nn.LayerNorm(width), nn.Linear(width, EXPERTS), Experts(width)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The outputs, and the auxiliary loss (Fedus et al., "Switch Transformers", 2021)."""
        flat = self.norm(x).flatten(0, 1)
        chances = self.router(flat).softmax(-1)
        weights, index = chances.topk(CHOSEN)
        part = F.one_hot(index, EXPERTS).sum(1).to(chances.dtype).mean(0)
        return x + self.experts(flat, index, weights).view_as(x), EXPERTS * (part * chances.mean(0)).sum()


class Net(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block(width) for _ in range(LAYERS))
        self.head = nn.Linear(width, 16)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        total = x.new_zeros(())
        for block in self.blocks:
            x, auxiliary = block(x)
            total = total + auxiliary
        return self.head(x.mean(1)), total


def data(width: int, rows: int) -> TensorDataset:
    chance = torch.Generator().manual_seed(1)
    return TensorDataset(
        torch.randn(rows, LENGTH, width, generator=chance), torch.randint(0, 16, (rows,), generator=chance)
    )


def loss(output: tuple[torch.Tensor, torch.Tensor], batch: list[torch.Tensor]) -> torch.Tensor:
    return F.cross_entropy(output[0], batch[1]) + 0.01 * output[1]


def by_hand(workers: int, width: int, steps: int) -> Iterator[float]:
    """The loop as people write it: gradients of experts are sums already, the others are averaged."""
    net = Net(width)
    for block in net.blocks:
        block.experts = ExpertsByHand(block.experts)
    shared = [param for name, param in net.named_parameters() if ".experts." not in name]
    update = torch.optim.AdamW(net.parameters(), lr=1e-4, fused=False)
    first = dist.get_rank() * ROWS
    for batch in DataLoader(data(width, steps * ROWS * workers), batch_size=ROWS * workers):
        rows = [part[first : first + ROWS] for part in batch]
        update.zero_grad()
        found = loss(net(rows[0]), rows)
        (found / workers).backward()
        flat = torch.cat([param.grad.flatten() for param in shared])
        dist.all_reduce(flat)
        for param, grad in zip(shared, flat.split([param.numel() for param in shared]), strict=True):
            param.grad.copy_(grad.view_as(param))
        update.step()
        yield found.item()


def ours(workers: int, width: int, steps: int) -> Iterator[float]:
    trainer = paceline.Trainer(
        model=lambda: Net(width),
        loss=loss,
        optimizer=lambda params: torch.optim.AdamW(params, lr=1e-4, fused=False),
        global_batch=ROWS * workers,
        plan=f"expert={workers} micro={ROWS}",
    )
    for report in trainer.steps(data(width, steps * ROWS * workers), count=steps, order=in_order):
        yield report.loss


def worker(side: str, address: str, workers: int, width: int, steps: int) -> None:
    rank = int(os.environ.get("RANK", os.environ.get("PACELINE_RANK", "0")))
    if side == "trainer":
        take(address, side, rank, ours(workers, width, steps))
        return
    register()
    dist.init_process_group(side)
    take(address, side, rank, by_hand(workers, width, steps))
    dist.destroy_process_group()


def start(workers: int, width: int, steps: int, folder: Path, side: str, address: str) -> Processes:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    script = [str(Path(__file__).resolve()), "--worker", side, address, str(workers), str(width), str(steps)]
    if side == "trainer":
        command = ["-m", "paceline", "run", "--quiet", "--workers", str(workers), "--run-dir", str(folder / side)]
        command += ["--save-every", "1000000", "--max-restarts", "0"]
        return [subprocess.Popen([sys.executable, *command, *script], env=environment)]
    variables, pins, _ = worker_settings(workers, environment, sorted(os.sched_getaffinity(0)))
    return launch(script, environment | variables, pins, workers)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, nargs="+", default=[2], metavar="N")
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--record", type=Path)
    options = parser.parse_args()
    sides, steps = ("trainer", "paceline", "gloo"), WARM_UP + STEPS * options.rounds + 1
    results: dict[str, dict[str, object]] = {}
    for workers in options.workers:
        with tempfile.TemporaryDirectory() as folder:
            begin = partial(start, workers, options.width, steps, Path(folder))
            taken = give(sides, begin, options.rounds, STEPS, workers)
        medians(f"expert={workers}, width {options.width}", taken.seconds)
        results[f"expert={workers}"] = beside(taken, AGREE)
        if options.record:
            record(options.record, threads=1, width=options.width, results=results)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        side, address, *numbers = sys.argv[2:]
        worker(side, address, *map(int, numbers))
    else:
        main()
