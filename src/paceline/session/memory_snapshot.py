"""Lists what is in memory when it runs out: the largest tensors by name, and the bytes by kind."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from paceline.base.journal import replace_file
from paceline.base.text import size_of
from paceline.compute.job import TrainingJob
from paceline.compute.state_dict import local
from paceline.session.process_memory import memory_now

FOLDER = "memory"  # in the run folder
_NAMED = 5  # tensors in an error
_LISTED = 1000  # tensors in a file


class NamedTensor(NamedTuple):
    """A tensor of a trainer or of the script, and the bytes that it takes on this worker."""

    name: str
    kind: str
    tensor: torch.Tensor
    size: int


def has_run_out(error: BaseException) -> bool:
    """Whether an exception says that memory ran out. On a CPU torch has no exception of its own for that."""
    is_of_kind = isinstance(error, torch.OutOfMemoryError | MemoryError)
    return is_of_kind or (isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error))


def named_tensors(jobs: Sequence[TrainingJob], script: Mapping[str, Any]) -> list[NamedTensor]:
    """Returns the tensors of the trainers' models, gradients and optimizers, and those among the variables of the
    `script`, the largest first. Memory that several names show counts once.
    """
    seen, named = set[tuple[int, int]](), list[NamedTensor]()
    for kind, name, tensor in _tensors(jobs, script):
        value = local(tensor)
        key = value.data_ptr(), value.nbytes
        if value.nbytes and key not in seen:
            seen.add(key)
            named.append(NamedTensor(name, kind, value, value.nbytes))
    return sorted(named, key=lambda one: -one.size)


def _tensors(jobs: Sequence[TrainingJob], script: Mapping[str, Any]) -> Iterator[tuple[str, str, torch.Tensor]]:
    for number, job in enumerate(jobs):
        of = f" of trainer {number}" if len(jobs) > 1 else ""
        full = dict(job.model.named_parameters())
        memory = {local(param).untyped_storage().data_ptr() for param in full.values()}
        params: list[tuple[str, torch.Tensor]] = [*full.items(), *job.local_params.items()]
        for name, param in params:
            if full.get(name) is param:
                yield "parameters", f"{name}{of}", param
            elif local(param).untyped_storage().data_ptr() not in memory:  # else they are rows of the parameter
                yield "parameters", f"the rows of {name}{of}", param
            if param.grad is not None and not param.grad.is_sparse:
                yield "gradients", f"the gradient of {name}{of}", param.grad
        for name, buffer in job.model.named_buffers():
            yield "buffers", f"{name}{of}", buffer
        names = {id(param): name for name, param in job.local_params.items()}
        for optimizer in job.optimizers:
            for param, state in optimizer.state.items():
                for key, value in state.items():
                    if isinstance(value, torch.Tensor):
                        yield "optimizer", f"{key} of {names.get(id(param), 'a parameter')}{of}", value
    for name, value in script.items():
        if isinstance(value, torch.Tensor) and not value.is_sparse:
            yield "script", f"{name} of the script", value


def take_snapshot(
    jobs: Sequence[TrainingJob], device: torch.device, folder: Path | None, rank: int
) -> tuple[str, Path | None]:
    """Returns a text with the largest tensors, and the file in the run folder that lists all and the bytes by kind;
    None if it could not be written. On a GPU torch's snapshot is next to it, for https://pytorch.org/memory_viz.
    """
    named = named_tensors(jobs, vars(sys.modules["__main__"]))
    largest = ", ".join(f"{one.name} {size_of(one.size)}" for one in named[:_NAMED])
    if folder is None:
        return largest, None
    kinds: dict[str, int] = {}
    for one in named:
        kinds[one.kind] = kinds.get(one.kind, 0) + one.size
    kinds["process"] = memory_now(device)
    listed = [
        {"name": one.name, "kind": one.kind, "bytes": one.size, "shape": [*one.tensor.shape]} for one in named[:_LISTED]
    ]
    path = Path(FOLDER, f"worker-{rank}.json")
    try:
        (folder / FOLDER).mkdir(mode=0o700, exist_ok=True)
        replace_file(folder / path, json.dumps({"bytes": kinds, "tensors": listed}, indent=1))
        if device.type == "cuda":
            torch.cuda.memory._dump_snapshot(str(folder / path.with_suffix(".pickle")))
    except OSError:  # the error about memory matters more
        return largest, None
    return largest, path
