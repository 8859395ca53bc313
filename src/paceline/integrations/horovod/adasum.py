"""Adasum: an allreduce that adds orthogonal gradients and averages parallel ones.

Maleki et al., "Scaling Distributed Training with Adaptive Summation" (2020), https://arxiv.org/abs/2006.02924.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from paceline.comm.host_staging import carrier
from paceline.comm.shared_memory import raw_bytes
from paceline.comm.transport import Transport

_COMPUTED_IN = {torch.float16: torch.float32, torch.bfloat16: torch.float32}


def combine(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """Adasum of two gradients of one parameter: each loses half of its projection on the other.

    Dot products are computed in float64.
    """
    one, other = first.double(), second.double()
    dot, first_square, second_square = float(one @ other), float(one @ one), float(other @ other)
    of_first = 1.0 - dot / (2.0 * first_square) if first_square else 1.0
    of_second = 1.0 - dot / (2.0 * second_square) if second_square else 1.0
    return (of_first * one + of_second * other).to(first.dtype)


def adasum(channel: Transport | None, flat: torch.Tensor, sizes: Sequence[int]) -> None:
    """Replaces `flat` by the Adasum over all workers of a channel, whose number is a power of two.

    `flat` contains tensors of these `sizes`, each of which is combined by itself. Workers exchange vectors with
    partners at distance 1, 2, 4, ...; both partners compute the same sum, so the bits are equal on all workers.
    """
    if channel is None:
        return
    vector = flat.to(_COMPUTED_IN.get(flat.dtype, flat.dtype), copy=True)
    distance = 1
    while distance < channel.size:
        partner = channel.rank ^ distance
        received = torch.empty_like(vector)
        by = carrier(channel, vector, partner)
        sending = by.send(raw_bytes(vector), partner)
        by.receive(raw_bytes(received), partner).wait()
        sending.wait()
        pair = (vector, received) if channel.rank < partner else (received, vector)
        parts = zip(*(one.split(list(sizes)) for one in pair), strict=True)
        vector = torch.cat([combine(first, second) for first, second in parts])
        distance *= 2
    flat.copy_(vector)
