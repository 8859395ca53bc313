"""Gradient sums whose bits do not depend on the order of addition.

Each micro-batch's gradient is rounded once to multiples of a power of two, which depends on its tensor alone. Sums of
such multiples are exact in float64 up to 2**53 of them, hence the same in any order, on any number of workers and
whatever their shares. This is pre-rounding as in Demmel and Nguyen, "Fast Reproducible Floating-Point Summation"
(ARITH 2013), with the grid taken from the largest gradient of the step before; a gradient that outgrows its grid is
seen in the step's maxima, and the step is redone on a wider one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch.nn import Parameter

from paceline.base.sharding import Block
from paceline.comm.gradient_memory import Wires, split_by_shard

INTEGER_BITS = 51  # adding and subtracting 1.5 * 2**52 units rounds a number up to 2**51 units to whole units
HEADROOM = 4  # bits by which a gradient may grow from one step to the next
CHUNK = 1 << 16  # elements that stay in the cache from one operation to the next
LEVELS = 3  # numbers that carry a sum of squares: what the first two leave is below a float64's precision


class ExactSums:
    """Rounds gradients to grids so that their float64 sums are exact, and makes gradients of the parameters' own dtype
    from these sums.

    A float64 gradient is carried as two numbers (levels), its multiple and the remainder, each summed exactly.
    """

    def __init__(self, elements: Sequence[int]) -> None:
        self.elements = list(elements)  # of each full parameter
        self.largest = [0.0] * len(self.elements)  # gradient of each parameter in recent steps, which gives its grid
        self.maxima = torch.zeros(len(self.elements), dtype=torch.float64)  # on this worker in the present step
        self._before: list[float] | None = None  # `largest` when the step began
        self._spare = INTEGER_BITS  # bits of one micro-batch's part of a sum
        # The sums of each bucket as [level, elements], and the gradients that are made from them.
        self.memory: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._scratch = torch.empty(CHUNK, dtype=torch.float64)

    def allocate_grads(self, levels: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Allocates the gradients that `make_grads` makes from a bucket's sums, which are [level, elements]."""
        grads = torch.zeros(levels.shape[1], dtype=dtype, device=levels.device)
        self.memory.append((levels, grads))
        return grads

    # -- a step -----------------------------------------------------------------------------------------------------

    def begin(self, micro_batches: int) -> None:
        """Starts a step; its number of micro-batches decides how many bits each gradient may have."""
        self._before = self._before or list(self.largest)
        self._spare = INTEGER_BITS - micro_batches.bit_length() - 1
        self.maxima.zero_()

    def write(self, number: int, grad: torch.Tensor, wires: Wires, first: bool) -> None:
        """Rounds a gradient to its grid and writes it into its wires, or adds it to what they hold."""
        largest = torch.linalg.vector_norm(grad, math.inf) if grad.numel() else 0.0
        self.maxima[number] = max(float(self.maxima[number]), float(largest))
        units = self._units(number)
        for levels, part in zip(wires, split_by_shard(grad, wires), strict=True):
            for start in range(0, len(part), CHUNK):
                rest = part[start : start + CHUNK].double()
                for level, wire in enumerate(levels):
                    rounded = on_grid(rest, units[level], self._scratch)
                    target = wire[start : start + CHUNK]
                    if first:
                        target.copy_(rounded)
                    else:
                        target.add_(rounded)
                    if level + 1 < len(levels):
                        rest = rest - rounded

    def _units(self, number: int) -> list[float]:
        """The grid of a parameter, per level: powers of two."""
        largest = self.largest[number]
        unit = math.frexp(largest)[1] + HEADROOM - self._spare if largest else -900
        return [2.0**unit, 2.0 ** (unit - self._spare - 1)]

    def resolve(self, maxima: torch.Tensor) -> bool:
        """Makes the gradients from the sums, after these have arrived.

        `maxima` has the largest gradient of each parameter over all workers in this step. Returns False if one had
        outgrown its grid: the step has to be redone, on a wider one.
        """
        kept = True
        for number, (largest, now) in enumerate(zip(self.largest, maxima.tolist(), strict=True)):
            if not 0 < now < math.inf:  # it got none, or is not finite, which the norm will show
                continue
            kept &= bool(largest) and now <= math.ldexp(1.0, math.frexp(largest)[1] + HEADROOM)
            self.largest[number] = max(now, largest / 2)  # up at once, down slowly
        if kept:
            self.make_grads()
        return kept

    def make_grads(self) -> None:
        """Makes the gradients from the sums."""
        for levels, grads in self.memory:
            grads.copy_(levels[0] if len(levels) == 1 else levels[0] + levels[1])

    def keep(self) -> None:
        """Keeps the grids of this step, whose sums the optimizer has used."""
        self._before = None

    def undo(self) -> None:
        """Takes back the grids of a step that failed."""
        if self._before is not None:
            self.largest, self._before = self._before, None

    def squares(
        self, params: Sequence[Parameter], micro_batches: int, counted: Sequence[Sequence[Block]] | None = None
    ) -> torch.Tensor:
        """The sums of squares of the parameters' gradients, or of these blocks of each, LEVELS numbers per parameter.

        All numbers are whole multiples of a power of two, so those of all workers can be added without rounding: the
        total does not depend on which worker has which rows.
        """
        sums = torch.zeros(len(params), LEVELS, dtype=torch.float64)
        for number, (param, elements) in enumerate(zip(params, self.elements, strict=True)):
            if param.grad is None:
                continue
            # No element is 2**bits or more, and 2**52 units hold all of them together.
            bits = math.frexp(self.largest[number])[1] + micro_batches.bit_length()
            width = INTEGER_BITS + 1 - elements.bit_length()
            grads = [param.grad] if counted is None else [block.of(param.grad) for block in counted[number]]
            for part in (part for grad in grads for part in grad.reshape(-1).split(CHUNK)):
                rest = part.double().square()
                for level in range(LEVELS):
                    rounded = on_grid(rest, math.ldexp(1.0, 2 * bits - (level + 1) * width), self._scratch)
                    sums[number, level] += rounded.sum()
                    rest.sub_(rounded)
        return sums.view(-1)


def on_grid(values: torch.Tensor, unit: float, scratch: torch.Tensor) -> torch.Tensor:
    """Float64 `values`, below 2**51 units, rounded to whole units; in `scratch`."""
    magic = 1.5 * 2.0**52 * unit
    return torch.add(values, magic, out=scratch[: len(values)]).sub_(magic)
