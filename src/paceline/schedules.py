"""Learning rates that have a name: factors by the optimizer step of the whole training, counted from 0.

For `schedule=` of the Trainer. Each warms up linearly over `warmup` steps, from 1 / (warmup + 1) on, so that no step is
made with a rate of zero; after `steps` steps the last factor stays. The same as torch's SequentialLR of a LinearLR and
the scheduler that is named.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from paceline.errors import UsageError

Factor = Callable[[int], float]


def _checked(name: str, least: int, value: int, most: float) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        room = f"from {least} to {most}" if math.isfinite(most) else f"of {least} or more"
        raise UsageError(f"{name}={value!r} is no number of steps of this schedule", f"give a whole number {room}")


def _warmed(steps: int, warmup: int, then: Factor) -> Factor:
    _checked("steps", 1, steps, math.inf)
    _checked("warmup", 0, warmup, steps - 1)

    def factor(step: int) -> float:
        return (step + 1) / (warmup + 1) if step < warmup else then(min(step, steps) - warmup)

    return factor


def cosine(steps: int, warmup: int = 0, floor: float = 0.0) -> Factor:
    """``floor + (1 - floor) * (1 + cos(pi * t / T)) / 2`` with t steps after the warmup and T = steps - warmup.

    Loshchilov and Hutter, SGDR, ICLR 2017, without restarts; torch's CosineAnnealingLR with eta_min = floor * lr.
    `floor` is a factor from 0 to 1. Raises UsageError.
    """
    if not 0 <= floor <= 1:
        raise UsageError(f"floor={floor!r} is no factor of the learning rate", "give a number from 0 to 1")
    return _warmed(steps, warmup, lambda t: floor + (1 - floor) * (1 + math.cos(math.pi * t / (steps - warmup))) / 2)


def linear(steps: int, warmup: int = 0) -> Factor:
    """``1 - t / T`` with t steps after the warmup and T = steps - warmup: torch's LinearLR to 0. Raises UsageError."""
    return _warmed(steps, warmup, lambda t: 1 - t / (steps - warmup))


def wsd(steps: int, warmup: int, decay: int) -> Factor:
    """Warmup, stable, decay: 1 until the last `decay` steps, then ``1 - t / decay`` with t steps of these done.

    Hu et al., MiniCPM, 2024 (arXiv:2404.06395), which leaves the form of the decay open. Raises UsageError.
    """
    factor = _warmed(steps, warmup, lambda t: min(1.0, (steps - warmup - t) / decay))
    _checked("decay", 1, decay, steps - warmup)
    return factor
