"""Learning-rate schedules: cosine, linear, WSD, plateau, and scaling with the global batch.

Pass one of these to `schedule=` of the Trainer. Each warms up linearly over `warmup` steps, starting at
1 / (warmup + 1), so that no step has a rate of zero; after `steps` steps the last factor stays. Each is the same as
torch's SequentialLR of a LinearLR and torch's scheduler of that kind. Without `steps`, the length is that of the
training: the loop over `trainer.steps()` gives it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, ReduceLROnPlateau

from paceline.errors import UsageError

Factor = Callable[[int], float]


def _checked(name: str, least: int, value: int, most: float) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        limits = f"from {least} to {most}" if math.isfinite(most) else f"of at least {least}"
        raise UsageError(
            f"{name}={value!r} is not a valid number of steps for this schedule", f"use an integer {limits}"
        )


def _warmed(steps: int, warmup: int, then: Factor) -> Factor:
    _checked("steps", 1, steps, math.inf)
    _checked("warmup", 0, warmup, steps - 1)

    def factor(step: int) -> float:
        return (step + 1) / (warmup + 1) if step < warmup else then(min(step, steps) - warmup)

    return factor


@dataclass(frozen=True)
class OverTraining:
    """A schedule without `steps=`: `factor_of(steps)` returns the factor for a training of so many steps."""

    warmup: int
    factor_of: Callable[[int], Factor]

    def __call__(self, step: int) -> float:
        """Raises UsageError: only a Trainer can use the schedule."""
        raise UsageError("the schedule has no steps=, so its value depends on more than the step", "pass steps= to it")


class OverTrainingLR(LambdaLR):
    """The scheduler of a schedule without `steps=`. Its state in checkpoints has the number of steps."""

    training_steps: int | None = None  # on the class: a state that was saved before it was set does not unset it

    def __init__(self, optimizer: Optimizer, schedule: OverTraining) -> None:
        _checked("warmup", 0, schedule.warmup, math.inf)
        first = 1 / (schedule.warmup + 1)  # for step 0, whatever the length

        def factor(step: int) -> float:
            return first if self.training_steps is None else schedule.factor_of(self.training_steps)(step)

        super().__init__(optimizer, factor)


def set_training_steps(schedulers: Sequence[LRScheduler], steps: int | None, loops: int) -> None:
    """Gives the number of steps to schedulers without `steps=`. Raises UsageError if the training has several `loops`,
    or none with a known number of steps.
    """
    for scheduler in (one for one in schedulers if isinstance(one, OverTrainingLR)):
        if steps is None or loops > 1:
            why = "several loops over steps()" if loops > 1 else "no known number of steps"
            raise UsageError(f"schedule= has no steps=, and the training has {why}", "pass steps= to the schedule")
        scheduler.training_steps = steps
        scheduler.lr_lambdas[0](0)  # raises if it is too short for the warmup


def cosine(steps: int | None = None, warmup: int = 0, floor: float = 0.0) -> Factor:
    """Cosine schedule with linear warmup: ``floor + (1 - floor) * (1 + cos(pi * t / T)) / 2``.

    `t` counts steps after the warmup, and T = steps - warmup. It is torch's CosineAnnealingLR with eta_min = floor * lr
    (Loshchilov and Hutter, SGDR, ICLR 2017, without restarts).

    Args:
        steps: Optimizer steps of the whole training. Without it, those of the loop over `trainer.steps()`; the training
            has one loop then.
        warmup: Steps in which the factor rises from 0 to 1.
        floor: The factor at the end, from 0 to 1.

    Raises:
        UsageError: A number is out of range.
    """
    if not 0 <= floor <= 1:
        raise UsageError(f"floor= must be a number from 0 to 1, got {floor!r}", "pass a fraction of the learning rate")
    if steps is None:
        return OverTraining(warmup, lambda length: cosine(length, warmup, floor))
    return _warmed(steps, warmup, lambda t: floor + (1 - floor) * (1 + math.cos(math.pi * t / (steps - warmup))) / 2)


def linear(steps: int | None = None, warmup: int = 0) -> Factor:
    """Linear decay to 0 with linear warmup: ``1 - t / T``, with `t` steps after the warmup and T = steps - warmup.

    Args:
        steps: Optimizer steps of the whole training. Without it, those of the loop over `trainer.steps()`; the training
            has one loop then.
        warmup: Steps in which the factor rises from 0 to 1.

    Raises:
        UsageError: A number is out of range.
    """
    if steps is None:
        return OverTraining(warmup, lambda length: linear(length, warmup))
    return _warmed(steps, warmup, lambda t: 1 - t / (steps - warmup))


def wsd(steps: int | None, warmup: int, decay: int) -> Factor:
    """Warmup, stable, decay: the factor is 1 until the last `decay` steps, in which it falls linearly to 0.

    Hu et al., MiniCPM, 2024 (arXiv:2404.06395), which leaves the form of the decay open.

    Args:
        steps: Optimizer steps of the whole training. Without it, those of the loop over `trainer.steps()`; the training
            has one loop then.
        warmup: Steps in which the factor rises from 0 to 1.
        decay: Steps of the decay, at most steps - warmup.

    Raises:
        UsageError: A number is out of range.
    """
    if steps is None:
        return OverTraining(warmup, lambda length: wsd(length, warmup, decay))
    factor = _warmed(steps, warmup, lambda t: min(1.0, (steps - warmup - t) / decay))
    _checked("decay", 1, decay, steps - warmup)
    return factor


@dataclass(frozen=True)
class Plateau:
    """A schedule that `paceline.plateau` makes: the value it follows, and the options of torch's ReduceLROnPlateau."""

    name: str
    options: Mapping[str, Any]

    def on(self, optimizer: Optimizer) -> ReduceLROnPlateau:
        """Builds torch's scheduler for an optimizer. Raises TypeError or ValueError for wrong options."""
        return ReduceLROnPlateau(optimizer, **self.options)


def plateau(name: str, **options: Any) -> Plateau:
    """Reduces the learning rate when a reported value stops improving, as torch's ReduceLROnPlateau.

    The schedule moves at each report of the value, not with the steps. A value that is evaluated and then logged at the
    same step is one report.

    Args:
        name: A value that `trainer.evaluate` or `trainer.log` reports.
        options: Those of torch's class: `mode` (default "min"), `factor`, `patience`, `threshold`, `threshold_mode`,
            `cooldown`, `min_lr`, `eps`.

    Raises:
        UsageError: The name is not a text, or torch refuses an option.
    """
    if not isinstance(name, str) or not name:
        what = f"plateau() needs the name of a value that evaluate() or log() reports, got {name!r:.60}"
        raise UsageError(what, 'use for example plateau("loss")')
    made = Plateau(name, options)
    try:
        made.on(SGD([nn.Parameter()], lr=1.0))
    except (TypeError, ValueError) as error:
        known = "mode, factor, patience, threshold, threshold_mode, cooldown, min_lr, eps"
        what = f"ReduceLROnPlateau rejects the options of plateau({name!r}): {error}"
        raise UsageError(what, f"use only its options {known}") from None
    return made


_RATES = ("lr", "initial_lr", "max_lr", "min_lr")


def follow_batch(rule: str, before: int, now: int, optimizers: Sequence[Any], schedulers: Sequence[Any]) -> str:
    """Scales the learning rates after a change of the global batch from `before` to `now` rows; returns a message.

    `rule` is "linear", for SGD (Goyal et al., "Accurate, Large Minibatch SGD", 2017), or "sqrt", for Adam and its kin
    (Malladi et al., "On the SDEs and Scaling Rules for Adaptive Gradient Algorithms", NeurIPS 2022).
    """
    factor = now / before if rule == "linear" else math.sqrt(now / before)
    for group in (group for one in optimizers for group in one.param_groups):
        for name in (name for name in _RATES if name in group):
            group[name] = group[name] * factor
    queue = list(schedulers)
    while queue:
        scheduler = queue.pop()
        queue += getattr(scheduler, "_schedulers", [])  # of a scheduler that contains others
        for name in ("base_lrs", "_last_lr", "min_lrs"):
            if hasattr(scheduler, name):
                setattr(scheduler, name, [rate * factor for rate in getattr(scheduler, name)])
    what = f"lr_scaling={rule}: learning rates multiplied by {factor:.6g}"
    return f"{what}, because the global batch changed from {before} to {now} rows"
