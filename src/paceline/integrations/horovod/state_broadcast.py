"""Broadcasts parameters, optimizer states and plain values."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from paceline.checkpoint.tree import flatten, pack, unflatten, unpack
from paceline.errors import UsageError
from paceline.integrations.horovod.context import CONTEXT, ProcessSet, global_process_set
from paceline.integrations.horovod.exceptions import HorovodArgumentError
from paceline.integrations.horovod.operations import allgather, broadcast_, broadcast_async_, synchronize

_SET = "paceline.set"  # the key that stands for a set


def broadcast_parameters(params: Any, root_rank: int) -> None:
    """Overwrites parameters with those of one worker.

    Args:
        params: `model.state_dict()`, `model.named_parameters()`, or a list of tensors.
        root_rank: The worker whose values count.
    """
    if isinstance(params, Mapping):
        named: list[Any] = sorted(params.items())
    elif isinstance(params, Iterable):
        named = [one if isinstance(one, tuple) else (None, one) for one in params]
    else:
        what = f"broadcast_parameters got {type(params).__name__}"
        raise HorovodArgumentError(what, "pass model.state_dict(), model.named_parameters() or a list of tensors")
    tensors = [(name, one) for name, one in named if isinstance(one, torch.Tensor)]
    if len(tensors) < len(named):
        other = next(name for name, one in named if not isinstance(one, torch.Tensor))
        cure = "broadcast other values with hvd.broadcast_object()"
        raise HorovodArgumentError(f"broadcast_parameters: {other!r} is not a tensor", cure)
    for handle in [broadcast_async_(one, root_rank, name) for name, one in tensors]:
        synchronize(handle)


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer, root_rank: int, model: torch.nn.Module | None = None
) -> None:
    """Gives the optimizers of all workers the state and the options of one worker's.

    If this worker's optimizer has no state yet, its parameters without a gradient get a gradient of zeros.

    Args:
        optimizer: The optimizer.
        root_rank: The worker whose optimizer counts.
        model: Has no effect: sparse parameters need no special treatment.
    """
    if not optimizer.state:
        for parameter in [one for group in optimizer.param_groups for one in group["params"]]:
            if parameter.requires_grad and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
    is_root = CONTEXT.current.rank == root_rank
    tensors, skeleton = flatten(optimizer.state_dict(), "") if is_root else ({}, None)
    shapes = {name: [one.dtype, list(one.shape), str(one.device)] for name, one in tensors.items()}
    skeleton, shapes = broadcast_object([skeleton, shapes], root_rank, "optimizer state")
    if not is_root:
        tensors = {
            name: torch.empty(shape, dtype=dtype, device=_local_device(device))
            for name, (dtype, shape, device) in shapes.items()
        }
    handles = [broadcast_async_(one, root_rank, f"optimizer.{name}") for name, one in sorted(tensors.items())]
    for handle in handles:
        synchronize(handle)
    if not is_root:
        optimizer.load_state_dict(unflatten(skeleton, tensors))


def _local_device(device: str) -> torch.device:
    """This worker's device of the type of another worker's."""
    kind = torch.device(device).type
    return torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)


def _without_sets(value: Any) -> Any:
    """Writes sets in a tree as dicts with one key, which `pack` takes."""
    if isinstance(value, set | frozenset):
        return {_SET: [type(value).__name__, sorted(value, key=repr)]}
    if type(value) is dict:
        return {key: _without_sets(item) for key, item in value.items()}
    return type(value)(map(_without_sets, value)) if type(value) in (list, tuple) else value


def _with_sets(value: Any) -> Any:
    """Undoes `_without_sets`."""
    if type(value) is dict and _SET in value:
        kind, items = value[_SET]
        return {"set": set, "frozenset": frozenset}[kind](items)
    if type(value) is dict:
        return {key: _with_sets(item) for key, item in value.items()}
    return type(value)(map(_with_sets, value)) if type(value) in (list, tuple) else value


def _packed(value: Any, what: str) -> torch.Tensor:
    """The value as bytes. HorovodArgumentError: it has a part that is sent by pickle only."""
    try:
        return pack(_without_sets(value))
    except UsageError as error:
        raise HorovodArgumentError(
            f"{what}: {error.what.replace(', which cannot be stored in a checkpoint', '')}",
            "send plain values: dicts, lists, tuples, sets, numbers, text, bytes, tensors and numpy arrays; Paceline "
            "does not unpickle what comes over the network",
        ) from None


def broadcast_object(
    obj: Any, root_rank: int = 0, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """Returns the value of one worker on all workers.

    Args:
        obj: A tree of dicts, lists, tuples, sets, numbers, text, bytes, tensors and arrays. It is not pickled.
        root_rank: The worker whose value counts.
        name: The collective's name.
        process_set: The workers that take part.
    """
    is_root = CONTEXT.current.rank == root_rank
    data = _packed(obj, "broadcast_object") if is_root else torch.empty(0, dtype=torch.uint8)
    length = torch.tensor([len(data)], dtype=torch.int64)
    broadcast_(length, root_rank, f"{name or 'object'}.length", process_set)
    if not is_root:
        data = torch.empty(int(length), dtype=torch.uint8)
    broadcast_(data, root_rank, f"{name or 'object'}.data", process_set)
    return obj if is_root else _with_sets(unpack(data))


def allgather_object(obj: Any, name: str | None = None) -> list[Any]:
    """Returns the values of all workers, in the order of their ranks.

    Args:
        obj: A value as for `broadcast_object`.
        name: The collective's name.
    """
    data = _packed(obj, "allgather_object")
    lengths = torch.tensor([len(data)], dtype=torch.int64)
    sizes = allgather(lengths, f"{name or 'object'}.length").tolist()
    everything = allgather(data, f"{name or 'object'}.data")
    return [_with_sets(unpack(part)) for part in everything.split(sizes)]
