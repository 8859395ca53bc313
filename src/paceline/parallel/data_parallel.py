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
    """Every worker holds all, and sends its gradients once in a step."""
    whole = facts.bytes()
    dense = facts.bytes(numbers=range(len(facts.shapes) - facts.sparse))
    sent = {"gradients": dense} if replicas > 1 else {}
    return Cost(whole + facts.beside, dense, int(facts.state * whole), sent)


def share(tensors: Iterable[torch.Tensor], group: Group) -> None:
    """Makes worker 0's weights everybody's. Collective."""
    if group.size == 1:
        return
    group.enter("the broadcast of worker 0's weights")
    in_flats((tensor.detach() for tensor in tensors), group.broadcast)


def in_flats(tensors: Iterable[torch.Tensor], collective: Callable[[torch.Tensor], Any]) -> None:
    """Many tensors by few collectives, which work in place."""
    for alike in kinds(tensors, BYTES):  # so much is there twice for a moment
        flat = torch.cat([tensor.reshape(-1) for tensor in alike])
        collective(flat)
        for tensor, part in zip(alike, flat.split([t.numel() for t in alike]), strict=True):
            tensor.copy_(part.view_as(tensor))


def kinds(tensors: Iterable[torch.Tensor], enough: int) -> Iterator[list[torch.Tensor]]:
    """Tensors of one dtype and device together, until they have `enough` bytes, or there are no more."""
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
