"""Computes the norms of each layer's weights and gradients, the same under every plan."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from paceline.base.sharding import Block
from paceline.comm.communicator import Group
from paceline.comm.gradient_memory import norms_of

if TYPE_CHECKING:
    from paceline.train.replica import Replica

Norms = Mapping[str, Sequence[torch.Tensor]]  # by the name of a parameter, of each part that this worker counts
Squares = Mapping[str, Sequence[float | None]]  # by the name of a parameter: of its weight and of its gradient


class LayerNorms(NamedTuple):
    """What `Trainer.layer_norms` returns: norms by the name of a parameter."""

    weights: dict[str, float]
    """Of the weights as they are now."""
    gradients: dict[str, float]
    """Of the mean gradients of the last step, before clipping, of the parameters that had one."""


def layer_norms(replica: Replica, group: Group) -> list[dict[str, float]]:
    """Returns the fields of `LayerNorms`, the same on all workers of the `group`. Collective.

    Each element of a parameter is counted by one worker of a replica, and the squares of parts are added in float64. A
    worker that took over another one's state has no gradients: those of another replica are used, or none if all have
    such workers.
    """
    group.declare("layer_norms()", kind="layer_norms()")
    parts: list[tuple[bool, Squares]] = group.gather_json([replica.updater.has_gradients, _local_squares(replica)])
    size = replica.mesh.replica
    replicas = [parts[first : first + size] for first in range(0, len(parts), size)]
    chosen = next((of for of in replicas if all(has_gradients for has_gradients, _ in of)), None)
    weights = _norms([squares for _, squares in replicas[0]], 0)
    return [weights, {} if chosen is None else _norms([squares for _, squares in chosen], 1)]


def _norms(parts: Sequence[Squares], kind: int) -> dict[str, float]:
    squares: dict[str, list[float]] = {}
    for part in parts:
        for name, pair in part.items():
            if (square := pair[kind]) is not None:
                squares.setdefault(name, []).append(square)
    return {name: math.sqrt(math.fsum(of)) for name, of in squares.items()}


def gradient_norms(replica: Replica) -> Norms:
    """Returns the norms of this worker's parts of the summed gradients, as tensors: nothing is waited for."""
    grads = {name: row.grad for name, row in _rows(replica).items()}
    return _norms_of(replica, {name: grad for name, grad in grads.items() if grad is not None})


def _rows(replica: Replica) -> dict[str, torch.nn.Parameter]:
    return dict(zip(replica.job.local_params, replica.updater.rows, strict=True))


def _norms_of(replica: Replica, tensors: Mapping[str, torch.Tensor]) -> Norms:
    """The norms of the parts of tensors that this worker counts, as float64; `tensors` are like its rows."""
    counted: dict[str, Sequence[Block]] = {}
    if replica.counted is not None:  # of the dense parameters, which come first
        counted = dict(zip(replica.job.local_params, replica.counted, strict=False))
    parts = [(name, part) for name, tensor in tensors.items() for part in _parts(tensor, counted.get(name))]
    norms = norms_of([part for _, part in parts]).double().unbind() if parts else ()
    made: dict[str, list[torch.Tensor]] = {name: [] for name in tensors}
    for (name, _), norm in zip(parts, norms, strict=True):
        made[name].append(norm)
    return made


def _parts(tensor: torch.Tensor, blocks: Sequence[Block] | None) -> list[torch.Tensor]:
    dense = tensor.detach().coalesce().values() if tensor.is_sparse else tensor.detach()
    return [dense] if blocks is None else [block.of(dense) for block in blocks]


def _local_squares(replica: Replica) -> Squares:
    """The squares of the elements that this worker counts; None for a gradient that does not exist."""
    updater = replica.updater
    weights, gradients = _norms_of(replica, _rows(replica)), dict[str, Sequence[torch.Tensor]]()
    if updater.has_gradients:
        gradients |= gradient_norms(replica) if replica.grad_norms is None else replica.grad_norms
    return {
        name: [
            math.fsum(float(norm) ** 2 for norm in norms),
            math.fsum((float(norm) * updater.to_mean) ** 2 for norm in gradients[name]) if name in gradients else None,
        ]
        for name, norms in weights.items()
    }
