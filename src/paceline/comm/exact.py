"""Sums whose bits do not depend on the order: gradients on a fixed grid of whole multiples, carried in float64.

Each micro-batch's gradient is rounded once to multiples of a power of two, which depends on its tensor alone. Sums of
such multiples are exact in float64 up to 2**53 of them, hence the same in any order, on any number of workers and
whatever their shares. This is pre-rounding as in Demmel and Nguyen, "Fast Reproducible Floating-Point Summation"
(ARITH 2013), with the grid taken from the largest gradient of the step before; a gradient that outgrows its grid is
seen in the step's maxima, and the step is redone on a wider one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch.nn import Parameter

from paceline.comm.buckets import Allocate, Bucket, Buckets, zeros

WHOLE = 51  # bits: a number up to 2**51 units is rounded to whole ones by adding and subtracting 1.5 * 2**52 units
HEADROOM = 4  # bits by which a gradient may grow from one step to the next
CHUNK = 1 << 16  # elements that stay in the cache from one operation to the next


class ExactBuckets(Buckets):
    """Buckets of float64 that travel, and beside them the gradients, of the parameters' own dtype, that come of them.

    A float64 gradient is carried as two numbers, its multiple and what that leaves, each summed exactly.
    """

    maxima: torch.Tensor

    def __init__(self, params: Sequence[Parameter], allocate: Allocate = zeros) -> None:
        self._spare = WHOLE  # bits of one micro-batch's part of a sum
        self._sums: list[torch.Tensor] = []
        self._wires: list[list[torch.Tensor]] = [[]] * len(params)
        self._scratch = torch.empty(CHUNK, dtype=torch.float64)
        self.maxima = torch.zeros(len(params), dtype=torch.float64)
        super().__init__(params, allocate=allocate)
        self.largest = [0.0] * len(params)
        self._before: list[float] | None = None  # `largest` when the step began

    def _make(self, members: list[int]) -> None:
        first = self.params[members[0]]
        sizes = [self.params[number].numel() for number in members]
        levels = 2 if first.dtype == torch.float64 else 1
        wire = self._allocate(levels * sum(sizes), torch.float64, first.device)
        own = torch.zeros(sum(sizes), dtype=first.dtype, device=first.device)
        bucket = Bucket(len(self.buckets), wire, members)
        rows = [part.split(sizes) for part in wire.view(levels, -1).unbind(0)]
        for place, (number, view) in enumerate(zip(members, own.split(sizes), strict=True)):
            self._views[number] = view.view(self.params[number].shape)
            self._wires[number] = [row[place] for row in rows]
            self._home[number] = bucket
        self._sums.append(own)
        self.buckets.append(bucket)

    @property
    def sums(self) -> list[torch.Tensor]:
        return self._sums

    def begin(self, ready: Callable[[Bucket], None], micro_batches: int = 1) -> None:
        super().begin(ready, micro_batches)
        self._before = self._before or list(self.largest)
        self._spare = WHOLE - micro_batches.bit_length() - 1
        self.maxima.zero_()

    def _units(self, number: int) -> list[float]:
        """The grid of a parameter, per level: powers of two."""
        largest = self.largest[number]
        unit = math.frexp(largest)[1] + HEADROOM - self._spare if largest else -900
        return [2.0**unit, 2.0 ** (unit - self._spare - 1)]

    def _land(self, number: int, param: torch.Tensor, first: bool) -> None:
        assert param.grad is not None
        grad, param.grad = param.grad.detach().reshape(-1), None
        self.maxima[number] = max(float(self.maxima[number]), float(torch.linalg.vector_norm(grad, math.inf)))
        wires, units = self._wires[number], self._units(number)
        for start in range(0, len(grad), CHUNK):
            rest = grad[start : start + CHUNK].double()
            for level, wire in enumerate(wires):
                magic = 1.5 * 2.0**52 * units[level]
                whole = self._scratch[: len(rest)]
                torch.add(rest, magic, out=whole).sub_(magic)
                target = wire[start : start + CHUNK]
                if first:
                    target.copy_(whole)
                else:
                    target.add_(whole)
                if level + 1 < len(wires):
                    rest = rest - whole

    def flush(self) -> set[int]:
        for number in set(range(len(self.params))) - self._touched:
            for wire in self._wires[number]:
                wire.zero_()
        return super().flush()

    def rehouse(self, allocate: Allocate) -> None:
        self._sums.clear()
        super().rehouse(allocate)

    def abandon(self, again: bool = False) -> None:
        super().abandon(again)
        if self._before is not None and not again:
            self.largest, self._before = self._before, None

    def applied(self) -> None:
        self._before = None

    def settle(self, maxima: torch.Tensor) -> bool:
        """After the sums have arrived: `maxima` are everybody's, the largest gradient of each parameter in this step.

        Makes the gradients of the sums; False if one had outgrown its grid: the step is to be redone, on a wider one.
        """
        kept = True
        for number, (largest, now) in enumerate(zip(self.largest, maxima.tolist(), strict=True)):
            if not 0 < now < math.inf:  # it got none, or is not finite, which the norm will show
                continue
            kept &= bool(largest) and now <= math.ldexp(1.0, math.frexp(largest)[1] + HEADROOM)
            self.largest[number] = max(now, largest / 2)  # up at once, down slowly
        if kept:
            for own, bucket in zip(self._sums, self.buckets, strict=True):
                levels = bucket.flat.view(-1, len(own))
                own.copy_(levels[0] if len(levels) == 1 else levels[0] + levels[1])
            self.adopt()
        return kept
