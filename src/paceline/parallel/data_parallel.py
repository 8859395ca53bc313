"""Data parallelism: shares weights at the start and gives its cost."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from paceline.comm.communicator import Group
from paceline.comm.gradient_buckets import BYTES
from paceline.parallel.cost_model import Cost, Facts


def cost(facts: Facts, replicas: int) -> Cost:
    """Returns the cost of data parallelism: each worker holds the full model and sends its gradients once a step."""
    all_bytes = facts.bytes()
    dense_bytes = facts.bytes(numbers=range(len(facts.shapes) - facts.sparse))
    sent = {"gradients": dense_bytes} if replicas > 1 else {}
    held_bytes = all_bytes + facts.master_bytes(all_bytes) + facts.other_bytes
    return Cost(held_bytes, dense_bytes, facts.optimizer_bytes(all_bytes), sent)


def share(tensors: Iterable[torch.Tensor], group: Group) -> None:
    """Broadcasts worker 0's tensors to the group, in place. Collective."""
    if group.size == 1:
        return
    group.declare("the broadcast of worker 0's weights")
    in_flats((tensor.detach() for tensor in tensors), group.broadcast, keep_equal=True)


def in_flats(
    tensors: Iterable[torch.Tensor], collective: Callable[[torch.Tensor], Any], keep_equal: bool = False
) -> None:
    """Runs an in-place collective on many tensors, joined into few flat tensors.

    With `keep_equal`, a CPU tensor that already has the resulting bytes is not written: if it is a part of a
    memory-mapped file, it goes on taking no memory.
    """
    for alike in kinds(tensors, BYTES):  # BYTES of memory are needed twice for a moment
        flat = torch.cat([tensor.reshape(-1) for tensor in alike])
        collective(flat)
        for tensor, part in zip(alike, flat.split([t.numel() for t in alike]), strict=True):
            if not (keep_equal and _has_bytes(tensor, part)):
                tensor.copy_(part.view_as(tensor))


def _has_bytes(tensor: torch.Tensor, flat: torch.Tensor) -> bool:
    """Whether a contiguous tensor on the CPU has the bytes of a flat one; False for all other tensors."""
    if tensor.device.type != "cpu" or not tensor.is_contiguous():
        return False
    return torch.equal(tensor.view(-1).view(torch.uint8), flat.view(torch.uint8))


def kinds(tensors: Iterable[torch.Tensor], enough: int) -> Iterator[list[torch.Tensor]]:
    """Yields groups of tensors of one dtype and device. A group ends when it has `enough` bytes."""
    open_: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    sizes: Counter[tuple[torch.dtype, torch.device]] = Counter()
    for tensor in tensors:
        kind = tensor.dtype, tensor.device
        open_.setdefault(kind, []).append(tensor)
        sizes[kind] += tensor.nbytes
        if sizes[kind] >= enough:
            yield open_.pop(kind)
            del sizes[kind]
    yield from open_.values()
