"""Digests of tensors, which show any changed bit, and sketches, which rounding changes little."""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import lru_cache

import torch

_CHUNK = 1 << 18  # elements
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_MULTIPLIER, _MASK = 0x9E3779B97F4A7C15, (1 << 64) - 1
SIGNS = 3  # signed sums of a sketch


@lru_cache(maxsize=8)
def _factors(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Returns odd factors, as good as random, by position."""
    positions = torch.arange(1, _CHUNK + 1, dtype=torch.int64, device=device)
    return (positions * -7046029254386353131 >> 13 | 1).to(dtype)


def checksum(flat: torch.Tensor) -> int:
    """Returns 63 bits of a flat tensor's bits and their positions, the same on every device.

    A change of a single element changes the number, but for one case in 2**63. So do changes of several elements, but
    for one case in 2**32 or fewer (2**16 for numbers of 16 bits).
    """
    if not flat.numel():
        return 0
    flat, total = flat.detach(), 0
    bits = (torch.view_as_real(flat).reshape(-1) if flat.is_complex() else flat).view(_INTEGERS[flat.element_size()])
    factors = _factors(bits.dtype, bits.device)
    for chunk in bits.split(_CHUNK):
        # Two changed signs must not cancel: the upper bits are mixed into the lower ones.
        mixed = (chunk >> 4 * chunk.element_size()).bitwise_xor_(chunk).mul_(factors[: len(chunk)])
        total = (total * 1_000_003 + int(mixed.sum(dtype=torch.int64))) * _MULTIPLIER & _MASK
    return (total ^ total >> 32) >> 1


def combined(numbers: Iterable[int]) -> int:
    """Returns one checksum of several, whose order counts."""
    total = 0
    for number in numbers:
        total = ((total ^ total >> 29) * _MULTIPLIER + number) & _MASK
    return (total ^ total >> 32) >> 1


@lru_cache(maxsize=2)
def _signs(device: torch.device) -> torch.Tensor:
    factors = _factors(torch.int64, device)
    return torch.stack([(factors >> (17 + 5 * row) & 1).double() * 2 - 1 for row in range(SIGNS)])


def sketch(flats: Iterable[torch.Tensor]) -> list[float]:
    """Returns the norm of flat tensors together, and `SIGNS` sums of their elements with signs as good as random.

    A change of the elements by a vector of norm d changes each of these numbers by about d.
    """
    squares, sums = 0.0, [0.0] * SIGNS
    for flat in flats:
        real = torch.view_as_real(flat.detach()).reshape(-1) if flat.is_complex() else flat.detach()
        for chunk in real.split(_CHUNK):
            wide = chunk.double()
            squares += float(wide.square().sum())
            signed = _signs(wide.device)[:, : len(wide)] @ wide
            sums = [total + more for total, more in zip(sums, signed.tolist(), strict=True)]
    return [math.sqrt(squares), *sums]
