"""Makes the outer optimizer, and sums over islands: what DiLoCo and streaming DiLoCo share."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch.optim import SGD, Optimizer

from paceline.comm.error_feedback import wide
from paceline.compute.state_dict import local
from paceline.local_sgd.island_state import Islands
from paceline.parallel.data_parallel import in_flats

OUTER = "nesterov:0.7:0.9"  # DiLoCo's


def outer_optimizer(word: str, params: list[torch.nn.Parameter]) -> Optimizer:
    """Makes the torch optimizer of a plan's `outer=`, whose gradients are outer gradients."""
    kind, rate, *momentum = word.split(":")
    return SGD(params, lr=float(rate), momentum=float(momentum[0]) if momentum else 0.0, nesterov=kind == "nesterov")


def add_residual(islands: Islands, island: int, names: Sequence[str], deltas: Sequence[torch.Tensor]) -> None:
    """Adds what codes have left out of an island's earlier deltas, its pending residual, to the named deltas."""
    residual = islands.inner_states[island].extra.get("left", {})
    for name, delta in zip(names, deltas, strict=True):
        if name in residual:
            delta.add_(residual[name].view_as(delta).to(delta.device))


@dataclass
class IslandSums:
    """Sums over the merged islands: of count * (anchor - island) for parameters and floating-point buffers.

    Integer buffers, such as counters, have no mean; of them it has the maxima.
    """

    params: list[torch.Tensor]
    buffers: list[torch.Tensor]
    maxima: list[torch.Tensor]


@torch.no_grad()
def sum_islands(
    islands: Islands, name: str, merged: Collection[int], params: Sequence[torch.nn.Parameter] = ()
) -> IslandSums:
    """Sums the `merged` islands over all worker groups at the end of a round. Collective.

    The delta of an island that was late before starts at the weights it began with. `name` is that of the collective.
    """
    floating, integers = _buffers(islands)
    tensors = [*map(local, params), *floating]
    anchor, maxima = islands.anchor_of(tensors), [buffer.clone() for buffer in integers]
    sums = [torch.zeros_like(tensor, dtype=wide(tensor.dtype)) for tensor in tensors]
    for island in (island for island in islands.local_islands if island in merged):
        origin = islands.origin_of(island, tensors) or anchor
        progress = islands.enter(island)
        for largest, buffer in zip(maxima, integers, strict=True):
            torch.maximum(largest, buffer, out=largest)
        if islands.is_first_replica:
            for total, before, tensor in zip(sums, origin, tensors, strict=True):
                total.add_(before.to(total.dtype) - tensor.to(total.dtype), alpha=progress.count)
            add_residual(islands, island, islands.names[: len(params)], sums[: len(params)])
    islands.leave()
    islands.complete()
    islands.twins.declare(name, check=False, kind="merges")
    in_flats(sums, islands.twins.sum)
    for largest in maxima:
        largest.copy_(islands.twins.largest(largest.to(torch.int64)))
    return IslandSums(sums[: len(params)], sums[len(params) :], maxima)


@torch.no_grad()
def merge_buffers(islands: Islands, sums: IslandSums, count: float) -> None:
    """Sets floating-point buffers to their mean over islands, weighted by counts, and integer buffers to the maxima."""
    floating, integers = _buffers(islands)
    for buffer, total in zip(floating, sums.buffers, strict=True):
        buffer.copy_(buffer - total / (count or 1))
    for buffer, largest in zip(integers, sums.maxima, strict=True):
        buffer.copy_(largest)


def _buffers(islands: Islands) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The floating-point buffers of the model, and its integer and boolean ones."""
    buffers = [local(buffer) for buffer in islands.replica.job.model.buffers()]
    floating = [buffer for buffer in buffers if buffer.is_floating_point()]
    return floating, [b for b in buffers if not b.is_floating_point() and not b.is_complex()]
