"""Digests of tensors, which show any changed bit, and sketches, which rounding changes little."""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import lru_cache

import torch

# Numbers that are summed together. Both are odd: changed signs of all numbers of a line must not cancel.
_LINES, _COLUMNS = 255, 1023
SMALL = 16 * _COLUMNS  # numbers that are digested as they are: that takes less time than sums of them
_CHUNK = _LINES * _COLUMNS
_MULTIPLIER, _MASK = 0x9E3779B97F4A7C15, (1 << 64) - 1
SIGNS = 3  # signed sums of a sketch


@lru_cache(maxsize=8)
def _factors(device: torch.device) -> torch.Tensor:
    """Returns odd factors of 32 bits, as good as random, by position."""
    positions = torch.arange(1, _CHUNK + 1, dtype=torch.int64, device=device)
    return (positions * -7046029254386353131 >> 13 | 1).to(torch.int32)


def checksum(flat: torch.Tensor) -> int:
    """Returns 63 bits of a flat tensor's bits and their positions, the same on every device.

    A change within 32 bits changes the number, but for one case in 2**63, and further changes but for one case in
    2**32. Of large tensors the sums of lines and of columns are digested, which is faster: changes that leave all of
    them as they are, in four corners at least, are not seen.
    """
    words, numbers = _words(flat.detach()), list[int]()
    lines = words[: len(words) // _COLUMNS * _COLUMNS if len(words) > SMALL else 0].view(-1, _COLUMNS)
    if len(lines):
        chunks = lines.split(_LINES)
        sums = words.new_zeros(len(chunks), _LINES + _COLUMNS)
        for chunk, row in zip(chunks, sums, strict=True):  # each is read twice while the cache has it
            torch.sum(chunk, 1, dtype=torch.int32, out=row[: len(chunk)])
            torch.sum(chunk, 0, dtype=torch.int32, out=row[_LINES:])
        numbers += _mix(sums)
    if len(words) > lines.numel():
        numbers += _mix(words[None, lines.numel() :])
    total = 0
    for number in numbers:
        total = (total * 1_000_003 + number) * _MULTIPLIER & _MASK
    return (total ^ total >> 32) >> 1


def _mix(rows: torch.Tensor) -> list[int]:
    """Returns a number of 32 bits for each row of words, in which their positions count."""
    # Two changed signs must not cancel: the upper bits are mixed into the lower ones, before and after the product.
    mixed = (rows >> 16).bitwise_and_(0xFFFF).bitwise_xor_(rows).mul_(_factors(rows.device)[: rows.shape[1]])
    mixed = (mixed >> 15).bitwise_and_(0x1FFFF).bitwise_xor_(mixed)
    numbers: list[int] = mixed.sum(1, dtype=torch.int32).tolist()
    return numbers


def _words(flat: torch.Tensor) -> torch.Tensor:
    """Returns the bits of a flat tensor as numbers of 32 bits, with zeros behind them if they do not fill the last."""
    real = torch.view_as_real(flat).reshape(-1) if flat.is_complex() else flat
    size = real.element_size()
    if size < 4 and real.numel() * size % 4:
        real = torch.cat([real, real.new_zeros(-real.numel() % (4 // size))])
    elif size < 4 and real.storage_offset() * size % 4:
        real = real.clone()
    return real.view(torch.int32)


def combined(numbers: Iterable[int]) -> int:
    """Returns one checksum of several, whose order counts."""
    total = 0
    for number in numbers:
        total = ((total ^ total >> 29) * _MULTIPLIER + number) & _MASK
    return (total ^ total >> 32) >> 1


@lru_cache(maxsize=2)
def _signs(device: torch.device) -> torch.Tensor:
    factors = _factors(device)
    return torch.stack([(factors >> (7 + 5 * row) & 1).double() * 2 - 1 for row in range(SIGNS)])


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
