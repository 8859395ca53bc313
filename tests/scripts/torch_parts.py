"""Torch's own parts over a backend, one worker of it. Usage: torch_parts.py RANK SIZE FOLDER

Trains with DDP, fully_shard, tensor parallelism and a pipeline, and calls what else a script may: over `paceline`, over
gloo, and over `paceline` once more, groups made and destroyed in the same process. What came out of it goes to
FOLDER/RANK.safetensors as ROUND/PART/NAME.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import paceline  # noqa: F401 (makes the backend known)

Tensors = dict[str, torch.Tensor]
ROUNDS = {"first": "paceline", "gloo": "gloo", "again": "paceline"}
STEPS, ROWS, WIDTH, OUT = 4, 12, 8, 6


def mlp() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(WIDTH, 24), nn.Tanh(), nn.Linear(24, OUT)).double()


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(100 + step)
    shapes = (ROWS, WIDTH), (ROWS, OUT)
    inputs, targets = (torch.randn(*shape, dtype=torch.float64, generator=draw) for shape in shapes)
    return inputs, targets


def own(rows: torch.Tensor) -> torch.Tensor:
    return rows.chunk(dist.get_world_size())[dist.get_rank()]


def train(model: nn.Module, cut: Callable[[torch.Tensor], torch.Tensor]) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(STEPS):
        optimizer.zero_grad()
        inputs, targets = map(cut, batch(step))
        F.mse_loss(model(inputs), targets).backward()
        optimizer.step()


def whole(model: nn.Module) -> Tensors:
    """The parameters, put together again where they are sharded."""
    named = {name: parameter.detach() for name, parameter in model.named_parameters()}
    full = {name: value.full_tensor() if hasattr(value, "full_tensor") else value for name, value in named.items()}
    return {name: value.clone().contiguous() for name, value in full.items()}


def everybody() -> DeviceMesh:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    assert dist.get_backend(mesh.get_group()) == dist.get_backend()
    return mesh


def data_parallel() -> Tensors:
    model = mlp()
    train(DistributedDataParallel(model, bucket_cap_mb=0.001), own)
    return whole(model)


def fully_sharded() -> Tensors:
    model, mesh = mlp(), everybody()
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=mesh)
    train(model, own)
    return whole(model)


def tensor_parallel() -> Tensors:
    model, mesh = mlp(), everybody()
    parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    train(model, lambda rows: rows)
    return whole(model)


def pipeline() -> Tensors:
    """Two stages, four micro-batches: one forward and one backward in turn."""
    layers, rank = mlp(), dist.get_rank()
    half = layers[:2] if rank == 0 else layers[2:]
    stage = PipelineStage(half, rank, 2, torch.device("cpu"))
    schedule = Schedule1F1B(stage, 4, loss_fn=F.mse_loss)
    optimizer = torch.optim.SGD(half.parameters(), lr=0.1, momentum=0.9)
    for step in range(STEPS):
        optimizer.zero_grad()
        inputs, targets = batch(step)
        if rank == 0:
            schedule.step(inputs)
        else:
            schedule.step(target=targets, losses=[])
        optimizer.step()
    return whole(half)


def objects() -> Tensors:
    """Each worker's object is of another length."""
    size, rank = dist.get_world_size(), dist.get_rank()
    gathered = [None] * size
    dist.all_gather_object(gathered, {"rank": rank, "rows": "x" * 1000 * rank})
    assert gathered == [{"rank": other, "rows": "x" * 1000 * other} for other in range(size)]
    told = [f"from {rank}"]
    dist.broadcast_object_list(told, src=size - 1)
    assert told == [f"from {size - 1}"]
    return {}


def subgroups() -> Tensors:
    """The last two workers, and each alone; what goes on in one does not meet what goes on in another."""
    size, rank = dist.get_world_size(), dist.get_rank()
    pair = dist.new_group([size - 2, size - 1])
    alone = [dist.new_group([other]) for other in range(size)]
    value = torch.arange(5, dtype=torch.float64) * (rank + 1)
    total, mine = value.clone(), value.clone()
    for _ in range(rank):  # as often as nobody else
        dist.all_reduce(mine, group=alone[rank])
    if rank >= size - 2:
        dist.all_reduce(total, group=pair)
        assert torch.equal(total, torch.arange(5, dtype=torch.float64) * (2 * size - 1))
        assert dist.get_rank(pair) == rank - (size - 2)
        dist.broadcast(total, src=size - 1, group=pair)
    assert torch.equal(mine, value)
    whole_sum = value.clone()
    dist.all_reduce(whole_sum)
    dist.destroy_process_group(pair)
    return {"pair": total, "everybody": whole_sum}


PARTS: list[Callable[[], Tensors]] = [data_parallel, fully_sharded, objects, subgroups]
OF_TWO: list[Callable[[], Tensors]] = [tensor_parallel, pipeline]


def main() -> None:
    rank, size, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    torch.set_num_threads(1)
    found: Tensors = {}
    for name, backend in ROUNDS.items():
        store = dist.FileStore(str(folder / f"store-{name}"), size)
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timedelta(seconds=60))
        assert dist.get_backend() == backend
        for part in PARTS + (OF_TWO if size == 2 else []):
            found |= {f"{name}/{part.__name__}/{key}": value for key, value in part().items()}
        dist.barrier()
        dist.destroy_process_group()
    save_file(found, folder / f"{rank}.safetensors")


if __name__ == "__main__":
    main()
