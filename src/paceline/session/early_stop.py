"""Stops a training when a reported value has not improved for some reports."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from paceline.errors import UsageError
from paceline.session.reported_values import MODES, ValueFollower, check_followed


class EarlyStop(ValueFollower):
    """The value that `Trainer.early_stop` follows: the best one so far, and how many reports since then were not
    better. All workers get the same values, so they stop after the same step.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        super().__init__("early_stop()", "training is not stopped early")
        self.mode, self.patience, self.least_gain = "", 0, 0.0
        self.best: float | None = None
        self.since = 0  # reports since the best one
        self.is_due = False  # the training must stop
        self._say = say
        self._saved: list[Any] | None = None

    def follow(self, name: str, patience: int, mode: str, least_gain: float) -> None:
        """Follows the value `name`, see `Trainer.early_stop`. Raises UsageError."""
        check_followed(self.whose, name, mode)
        if type(patience) is not int or patience < 1:
            raise UsageError(
                f"early_stop(patience={patience!r}) must be a number of reports", "use a whole number from 1"
            )
        if self.name and (self.name, self.mode) != (name, mode):
            raise UsageError(f"early_stop() already follows {self.name!r}", "follow one value per trainer")
        self.name, self.mode, self.patience, self.least_gain = name, mode, patience, float(least_gain)
        self.restore(self._saved)

    def take(self, value: float, step: int) -> None:
        """Stops the training if the value has not improved often enough. NaN is never better."""
        gain = math.inf if self.best is None else MODES[self.mode] * (value - self.best)
        if math.isfinite(value) and gain > self.least_gain:
            self.best, self.since = value, 0
            return
        self.since += 1
        if self.since >= self.patience:
            best = "it was never finite" if self.best is None else f"the best is {self.best:.6g}"
            self.is_due = True
            self._say(f"stopping early after step {step}: {self.since} reports of {self.name} brought no gain; {best}")

    def saved(self) -> list[Any] | None:
        """Returns name, mode, best value and reports since then, for a checkpoint."""
        return [self.name, self.mode, self.best, self.since] if self.name else self._saved

    def restore(self, saved: list[Any] | None) -> None:
        """Takes the values of a checkpoint if the script follows the same name and mode."""
        self._saved = saved
        if saved and saved[:2] == [self.name, self.mode]:
            self.best, self.since = saved[2:]
