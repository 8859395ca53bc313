"""What a sharded worker holds, beside the formula, DistributedDataParallel and fully_shard by hand.

    python benchmarks/memory.py [--workers 4] [--deepspeed] [--sides SIDE ...] [--record FILE]

An MLP of 16 equal layers, 64 M parameters in float32, AdamW, one row for each worker, so that activations are next to
nothing. Each side is a run of its own. Parameters, gradients and optimizer are what the run's journal tells, or by hand
the bytes behind the tensors when the backward has ended; the process is how much its peak grew from before the model
was made to the end of the second step (VmHWM, which counts the memory of the others on the host that it reads). Of
DeepSpeed, which is installed by hand and keeps flat copies of its own, the process alone is told.

P parameters, S workers, B the bytes of a layer; in bytes:

              parameters          gradients       optimizer
data          4 P                 4 P             8 P
zero=1        4 P                 4 P             8 P / S
zero=2        4 P / S + 4 P       4 P / S + 3 B   8 P / S
zero=3        4 P / S + B         4 P / S + 3 B   8 P / S
offload=cpu   4 P / S more, in the host's memory, which here is the same
... tensor=2, pipeline=2: half of the workers divide the rows, the other half a layer, or the layers
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset
from turns import record

import paceline
from paceline.compute.state_dict import held
from paceline.session.process_memory import peak_memory

LAYERS, WIDTH, STEPS = 16, 2000, 2
CPU = torch.device("cpu")
PARTS = ("parameters", "gradients", "optimizer")
BY_HAND = ("ddp", "fully_shard", "deepspeed-1", "deepspeed-2", "deepspeed-3")


def model() -> nn.Module:
    return nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)])


def formula(side: str, workers: int) -> dict[str, float]:
    layer = 4 * WIDTH * (WIDTH + 1)
    whole = LAYERS * layer
    part = whole / workers
    return {
        "data": {"parameters": whole, "gradients": whole, "optimizer": 2 * whole},
        "zero=1": {"parameters": whole, "gradients": whole, "optimizer": 2 * part},
        "zero=2": {"parameters": part + whole, "gradients": part + 3 * layer, "optimizer": 2 * part},
        "zero=3": {"parameters": part + layer, "gradients": part + 3 * layer, "optimizer": 2 * part},
        "zero=3 offload=cpu": {
            "parameters": 2 * part + layer,
            "gradients": part + 3 * layer,
            "optimizer": 2 * part,
        },
        # Half of the workers divide the rows.
        "zero=3 tensor=2": {
            "parameters": part + layer / 2,
            "gradients": part + 3 * layer / 2,
            "optimizer": 2 * part,
        },
        "zero=3 pipeline=2": {"parameters": part + layer, "gradients": part + 3 * layer, "optimizer": 2 * part},
    }[side]


def ours(plan: str, out: Path) -> None:
    workers = paceline.join().size
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(STEPS * workers, WIDTH))

    def train(function: object, rows: TensorDataset) -> None:
        trainer = paceline.Trainer(
            model=function,  # type: ignore[arg-type]
            loss=lambda output, batch: output.square().mean(),
            optimizer=lambda params: torch.optim.AdamW(params, lr=1e-4),
            global_batch=workers,
            plan=f"{plan} micro=1",
        )
        for _ in trainer.steps(rows, count=STEPS):
            pass

    train(
        lambda: nn.Sequential(*[nn.Linear(8, 8) for _ in range(4)]), TensorDataset(torch.randn(workers, 8))
    )  # what libraries take at the first use
    before = peak_memory(CPU)
    train(model, data)
    grown = {"process": peak_memory(CPU) - before}
    (out / f"{paceline.join().rank}.json").write_text(json.dumps(grown))


def by_hand(side: str, out: Path) -> None:
    dist.init_process_group("gloo")
    before = peak_memory(CPU)
    if side == "ddp":
        net: nn.Module = DistributedDataParallel(model())
        layers: list[nn.Module] = []
    else:
        net, mesh = model(), init_device_mesh("cpu", (dist.get_world_size(),))
        layers = list(net.children())
        for layer in layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(net, mesh=mesh)
    update = torch.optim.AdamW(net.parameters(), lr=1e-4)
    found: dict[str, int] = {}
    whole = 0

    def look(module: nn.Module, *given: object) -> None:
        nonlocal whole
        whole = max(whole, held(p for p in net.parameters() if not hasattr(p, "full_tensor")))

    for layer in layers:
        layer.register_forward_hook(look)
        layer.register_full_backward_hook(look)
    for _ in range(STEPS):
        update.zero_grad()
        net(torch.randn(1, WIDTH)).square().mean().backward()
        found["parameters"] = held(net.parameters()) + (whole if layers else 0)
        buckets = held(net.parameters()) if side == "ddp" else 0  # DDP's, beside the gradients
        found["gradients"] = held(p.grad for p in net.parameters()) + buckets
        update.step()
        found["optimizer"] = held(t for kept in update.state.values() for t in kept.values())
    found["process"] = peak_memory(CPU) - before
    (out / f"{dist.get_rank()}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def by_deepspeed(stage: int, out: Path) -> None:
    import deepspeed

    deepspeed.init_distributed("gloo")
    before = peak_memory(CPU)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
    }
    net = model()
    update = torch.optim.AdamW(net.parameters(), lr=1e-4)
    engine, *_ = deepspeed.initialize(model=net, optimizer=update, config=config)
    for _ in range(STEPS):
        engine.backward(engine(torch.randn(1, WIDTH)).square().mean())
        engine.step()
    (out / f"{dist.get_rank()}.json").write_text(json.dumps({"process": peak_memory(CPU) - before}))
    dist.destroy_process_group()


def measure(side: str, workers: int) -> dict[str, float]:
    """The most of all workers."""
    with tempfile.TemporaryDirectory() as folder:
        script = [str(Path(__file__).resolve()), "--worker", side, folder]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        if side in BY_HAND:
            launcher = ["-m", "torch.distributed.run", "--nproc-per-node", str(workers)]
        else:
            launcher = ["-m", "paceline", "run", "--quiet", "--workers", str(workers), "--max-restarts", "0"]
            launcher += ["--run-dir", f"{folder}/run", "--save-every", "1000000"]
        subprocess.run([sys.executable, *launcher, *script], check=True, env=environment)
        told = [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(workers)]
        found = {name: max(one[name] for one in told) for name in told[0]}
        journal = Path(folder) / "run" / "journal.jsonl"
        if journal.exists():
            events = [json.loads(line) for line in journal.read_text().splitlines()]
            last = [event for event in events if event["event"] == "memory"][-1]
            found |= {name: last[name] for name in PARTS}
        return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--deepspeed", action="store_true", help="ZeRO of DeepSpeed too, if it is installed")
    parser.add_argument("--sides", nargs="+", help="only these sides")
    parser.add_argument("--record", type=Path)
    options = parser.parse_args()
    results: dict[str, dict[str, object]] = {}
    print(f"MB a worker, {options.workers} workers (beside the formula)")
    peers = [side for side in BY_HAND if options.deepspeed or not side.startswith("deepspeed")]
    mixtures = ("zero=3 tensor=2", "zero=3 pipeline=2")
    for side in ("data", "zero=1", "zero=2", "zero=3", "zero=3 offload=cpu", *mixtures, *peers):
        if options.sides and side not in options.sides:
            continue
        found = measure(side, options.workers)
        results[side] = dict(found)
        texts = [f"{name} {found[name] / 1e6:.0f}" for name in (*PARTS, "process") if name in found]
        if side not in BY_HAND:
            wanted = formula(side, options.workers)
            ratios = {name: found[name] / wanted[name] for name in PARTS}
            ratios["process"] = found["process"] / sum(wanted.values())
            results[side]["to formula"] = ratios
            texts = [f"{text} ({ratio:.2f})" for text, ratio in zip(texts, ratios.values(), strict=True)]
        print(f"  {side:18} {', '.join(texts)}", flush=True)
    if options.record:
        record(options.record, workers=options.workers, results=results)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        side, folder = sys.argv[2:]
        if side.startswith("deepspeed"):
            by_deepspeed(int(side[-1]), Path(folder))
        elif side in BY_HAND:
            by_hand(side, Path(folder))
        else:
            shards = int(os.environ["PACELINE_WORLD_SIZE"]) // (2 if "=2" in side.removeprefix("zero=2") else 1)
            ours("" if side == "data" else f"shard={shards} {side}", Path(folder))
    else:
        main()
