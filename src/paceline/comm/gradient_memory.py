"""Lays gradients out in flat memory, by shard and level, and computes their norms."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from itertools import accumulate

import torch
from torch.nn import Parameter

from paceline.base.sharding import Block, RowShards

LARGE = 1 << 22  # bytes: a gradient of this size no longer fits in the cache of a core

Allocate = Callable[[int, torch.dtype, torch.device], torch.Tensor]
Wires = list[list[torch.Tensor]]  # the bucket memory of a gradient, by shard and level


def zeros(numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Allocates a flat tensor of zeros in this process's own memory."""
    return torch.zeros(numel, dtype=dtype, device=device)


def levels_of(dtype: torch.dtype) -> int:
    """How many numbers carry one element of a gradient of this dtype in exact sums."""
    return 2 if dtype == torch.float64 else 1


def lay_out(
    shapes: Sequence[torch.Size], like: torch.Tensor, shards: RowShards, allocate: Allocate, exact: bool
) -> tuple[torch.Tensor, list[Wires]]:
    """Allocates memory for gradients of these shapes as [shard, level, elements]; returns it and each gradient's wires.

    Gradients have the dtype and device of `like`. Exact sums are of float64 and have `levels_of` levels, others one.
    """
    levels, dtype = (levels_of(like.dtype), torch.float64) if exact else (1, like.dtype)
    ends = list(accumulate((shards.width(shape) for shape in shapes), initial=0))
    length = shards.aligned(ends[-1])
    stretches = allocate(shards.count * levels * length, dtype, like.device).view(shards.count, levels, length)
    wires = [
        [
            [level[start : start + shards.size(shape, shard_index)] for level in stretch]
            for shard_index, stretch in enumerate(stretches)
        ]
        for shape, start in zip(shapes, ends, strict=False)
    ]
    return stretches, wires


def split_by_shard(grad: torch.Tensor, wires: Wires) -> Sequence[torch.Tensor]:
    """The elements of a gradient that belong to each shard."""
    parts: Sequence[torch.Tensor] = grad.reshape(-1).split([levels[0].numel() for levels in wires])
    return parts


def copy(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copies `source` to `target`; large CPU tensors with memmove, which writes past the cache: torch's copy first
    reads what it overwrites.
    """
    alike = target.dtype == source.dtype and source.is_contiguous() and target.is_contiguous()
    if alike and target.nbytes >= LARGE and target.device.type == "cpu" == source.device.type:
        ctypes.memmove(target.data_ptr(), source.data_ptr(), target.nbytes)
    else:
        target.copy_(source)


def write_plain(number: int, grad: torch.Tensor, wires: Wires, first: bool) -> None:
    """Writes a gradient into its wires, or adds it to what they hold. `ExactSums.write` rounds it before."""
    for (wire,), part in zip(wires, split_by_shard(grad, wires), strict=True):
        if first:
            copy(wire, part)
        else:
            wire.add_(part)


def counted_grads(params: Sequence[Parameter], counted: Sequence[Sequence[Block]]) -> list[torch.Tensor]:
    """The blocks of the parameters' gradients that this worker counts in a norm."""
    pairs = zip(params, counted, strict=True)
    return [block.of(param.grad) for param, blocks in pairs if param.grad is not None for block in blocks]


def norms_of(gradients: list[torch.Tensor]) -> torch.Tensor:
    """The norm of each gradient, as one tensor, of float32 if some have 16 bits; a zero if there are none."""
    if not gradients:
        return torch.zeros(1, dtype=torch.float64)
    sizes = {grad.element_size() for grad in gradients}
    dtype = (torch.float64 if 8 in sizes else torch.float32) if 2 in sizes else None  # norms of 16 bits are too coarse
    return torch.stack(torch._foreach_norm(gradients, dtype=dtype))
