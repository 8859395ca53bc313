"""A training step whose layers are cut over two workers, beside torch's parallelize_module by hand.

    python benchmarks/tensor.py [MODEL ...] [--shard 2] [--width 512] [--rounds 7] [--record FILE]

Both workers compute each micro-batch together. The sides take turns like those of step_time.py, all surrounded by what
`paceline run` surrounds its workers with (cores, allocator, huge pages), one thread each:

trainer   `paceline run --plan "tensor=2"`
paceline  parallelize_module (ColwiseParallel, RowwiseParallel) as people write it, over Paceline's transport
gloo      the same over gloo

With `--shard N` the plan is `shard=N tensor=2 zero=3`, and by hand each block is also given to fully_shard, on a device
mesh of two dimensions. All get the same rows and cut the same layers; their losses must agree to 1e-4 of their size in
every step.
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
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import DataLoader, TensorDataset
from turns import WARM_UP, WORKERS, Processes, beside, give, in_order, launch, medians, record, take

import paceline
from paceline.comm.autoload import register
from paceline.launch.tuning import worker_settings

AGREE, ROWS, LENGTH, STEPS = 1e-4, 8, 64, 10  # rows of a step, their length, steps of a round
CUT = {"blocks.*.up": "column", "blocks.*.down": "row"}
ATTENTION = {"blocks.*.q": "column", "blocks.*.k": "column", "blocks.*.v": "column", "blocks.*.out": "row"}


class Block(nn.Module):
    """Of a transformer, or but its second half."""

    def __init__(self, width: int, attends: bool) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(width, 4 * width), nn.Linear(4 * width, width), nn.LayerNorm(width)
        self.attends, self.size = attends, min(64, width // 4)
        if attends:
            self.q, self.k, self.v = (nn.Linear(width, width, bias=False) for _ in range(3))
            self.before, self.out = nn.LayerNorm(width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.attends:
            inner = self.before(x)
            q, k, v = (part(inner).unflatten(-1, (-1, self.size)).transpose(1, 2) for part in (self.q, self.k, self.v))
            found = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.out(found.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self, width: int, attends: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block(width, attends) for _ in range(4))
        self.head = nn.Linear(width, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(1))


def data(width: int, rows: int) -> TensorDataset:
    chance = torch.Generator().manual_seed(1)
    return TensorDataset(
        torch.randn(rows, LENGTH, width, generator=chance), torch.randint(0, 16, (rows,), generator=chance)
    )


def loss(output: torch.Tensor, batch: list[torch.Tensor]) -> torch.Tensor:
    return F.cross_entropy(output, batch[1])


def by_hand(model: str, shard: int, width: int, steps: int) -> Iterator[float]:
    """The loop as people write it."""
    net, styles = Net(width, model == "gpt"), CUT | (ATTENTION if model == "gpt" else {})
    plan = {name: ColwiseParallel() if how == "column" else RowwiseParallel() for name, how in styles.items()}
    mesh = init_device_mesh("cpu", (shard, WORKERS), mesh_dim_names=("shard", "tensor"))
    parallelize_module(net, mesh["tensor"], plan)
    for part in (*net.blocks, net) if shard > 1 else ():
        fully_shard(part, mesh=mesh["shard"])
    update = torch.optim.AdamW(net.parameters(), lr=1e-4, fused=False)
    first = mesh.get_local_rank("shard") * ROWS
    for batch in DataLoader(data(width, steps * ROWS * shard), batch_size=ROWS * shard):
        rows = [part[first : first + ROWS] for part in batch]
        update.zero_grad()
        found = loss(net(rows[0]), rows)
        found.backward()
        update.step()
        yield found.item()


def ours(model: str, shard: int, width: int, steps: int) -> Iterator[float]:
    trainer = paceline.Trainer(
        model=lambda: Net(width, model == "gpt"),
        loss=loss,
        optimizer=lambda params: torch.optim.AdamW(params, lr=1e-4, fused=False),
        global_batch=ROWS * shard,
        plan=f"{f'shard={shard} zero=3 ' if shard > 1 else ''}tensor={WORKERS} micro={ROWS}",
    )
    for report in trainer.steps(data(width, steps * ROWS * shard), count=steps, order=in_order):
        yield report.loss


def worker(side: str, address: str, model: str, shard: int, width: int, steps: int) -> None:
    rank = int(os.environ.get("RANK", os.environ.get("PACELINE_RANK", "0")))
    if side == "trainer":
        take(address, side, rank, ours(model, shard, width, steps))
        return
    register()
    dist.init_process_group(side)
    take(address, side, rank, by_hand(model, shard, width, steps))
    dist.destroy_process_group()


def start(model: str, shard: int, width: int, steps: int, folder: Path, side: str, address: str) -> Processes:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    script = [str(Path(__file__).resolve()), "--worker", side, address, model, str(shard), str(width), str(steps)]
    workers = WORKERS * shard
    if side == "trainer":
        command = ["-m", "paceline", "run", "--quiet", "--workers", str(workers), "--run-dir", str(folder / side)]
        command += ["--save-every", "1000000", "--max-restarts", "0"]
        return [subprocess.Popen([sys.executable, *command, *script], env=environment)]
    variables, pins, _ = worker_settings(workers, environment, sorted(os.sched_getaffinity(0)))
    return launch(script, environment | variables, pins, workers)


def measure(model: str, shard: int, width: int, rounds: int) -> dict[str, object]:
    sides, steps = ("trainer", "paceline", "gloo"), WARM_UP + STEPS * rounds + 1
    with tempfile.TemporaryDirectory() as folder:
        begin = partial(start, model, shard, width, steps, Path(folder))
        taken = give(sides, begin, rounds, STEPS, WORKERS * shard)
    medians(f"{model}, width {width}, shard={shard}", taken.seconds)
    return beside(taken, AGREE)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=["mlp", "gpt"], metavar="MODEL")
    parser.add_argument("--shard", type=int, default=1, metavar="N")
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--record", type=Path)
    options = parser.parse_args()
    results: dict[str, dict[str, object]] = {}
    for model in options.models:
        results[model] = measure(model, options.shard, options.width, options.rounds)
        if options.record:
            record(options.record, workers=WORKERS * options.shard, threads=1, results=results)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        side, address, model, *numbers = sys.argv[2:]
        worker(side, address, model, *map(int, numbers))
    else:
        main()
