"""Keeps the best checkpoints by a reported value: writes one whenever the value is one of the best so far."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from paceline.errors import UsageError
from paceline.observe.key_figures import BEST
from paceline.session.reported_values import MODES, ValueFollower, check_followed

if TYPE_CHECKING:
    from paceline.session.run import Run


class BestCheckpoint(ValueFollower):
    """The value that `Trainer.keep_best` follows: its name, and the best values so far with their steps of the run.

    `count` checkpoints are kept. A value that is one of the best is `due` until its checkpoint is written.
    """

    def __init__(self) -> None:
        super().__init__("keep_best()", "no value is followed yet")
        self.mode, self.count = "", 1
        self.kept: list[tuple[float, int]] = []  # values and steps, the best first
        self.due: tuple[float, int] | None = None
        self._saved: tuple[list[Any] | None, list[Any]] = None, []

    @property
    def value(self) -> float | None:
        """The best value so far, or None."""
        return self.kept[0][0] if self.kept else None

    @property
    def step(self) -> int | None:
        """The step of the run that had the best value, or None."""
        return self.kept[0][1] if self.kept else None

    def __str__(self) -> str:
        """For example ``best accuracy 0.91 at step 120 (highest so far)``."""
        if not self.name:
            return "no best value: keep_best() was not called"
        best = self.due if self.due is not None and self._ranked([*self.kept, self.due])[0] == self.due else None
        value, step = best or (self.value, self.step)
        if value is None:
            return f"no best {self.name} yet: evaluate() or log() has not reported a finite value"
        return f"best {self.name} {value:.6g} at step {step} ({BEST[self.mode]})"

    def __repr__(self) -> str:
        return f"<BestCheckpoint: {self}>"

    def follow(self, name: str, mode: str, count: int = 1) -> None:
        """Follows the value `name`; `mode` is max or min, and `count` checkpoints are kept. Raises UsageError."""
        check_followed("keep_best()", name, mode)
        if type(count) is not int or count < 1:
            raise UsageError(f"keep_best(k={count!r}) must be a number of checkpoints", "use a whole number from 1")
        if self.name and (self.name, self.mode, self.count) != (name, mode, count):
            raise UsageError(f"keep_best() already follows {self.name!r}", "follow one value per trainer")
        self.name, self.mode, self.count = name, mode, count
        self.restore(*self._saved)

    def saved(self) -> dict[str, Any]:
        """Returns the fields of a checkpoint."""
        if not self.kept:
            return {"best": self._saved[0], "next_best": self._saved[1]}
        return {"best": [self.name, self.mode, *self.kept[0]], "next_best": [[*pair] for pair in self.kept[1:]]}

    def restore(self, best: list[Any] | None, next_best: list[Any]) -> None:
        """Takes the best values of a checkpoint if the script follows the same name and mode."""
        self._saved = best, next_best
        if best and best[:2] == [self.name, self.mode]:
            self.kept = [(value, step) for value, step in [best[2:], *next_best]][: self.count]

    def take(self, value: float, step: int) -> None:
        """Makes a value due if it is one of the best."""
        now = self.kept if self.due is None else self._ranked([*self.kept, self.due])
        is_better = len(now) < self.count or self._rank((value, step)) < self._rank(now[-1])
        if math.isfinite(value) and is_better:
            self.due = value, step

    def settle(self, pair: tuple[float, int]) -> None:
        """Takes a value among the best ones."""
        self.kept = self._ranked([*self.kept, pair])

    def _ranked(self, pairs: Sequence[tuple[float, int]]) -> list[tuple[float, int]]:
        return sorted(pairs, key=self._rank)[: self.count]

    def _rank(self, pair: tuple[float, int]) -> float:
        return -MODES[self.mode] * pair[0]


def keep_best(run: Run) -> None:
    """Between two steps: writes the checkpoint of each value that is one of the best. Collective if any is due.

    Training waits for the checkpoint, since the weights change with the next step. If a worker is lost meanwhile, the
    checkpoint is written again. If it cannot be written, the former best ones stay.
    """
    due = [member.best for member in run.trainers.members if member.best.due is not None]
    if not due:
        return
    step = run.trainers.step
    before = [list(best.kept) for best in due]
    for best in due:
        if best.due is not None and best.due[1] == step:
            best.settle(best.due)
        else:
            run.reporter.say(
                f"{best.name} was best inside a nested loop whose weights are gone, so no checkpoint of it is kept"
            )
        best.due = None
    if run.checkpoints.storage is None or not any(at == step for best in due for _, at in best.kept):
        return
    is_saved, number = False, -1
    while number != run.team.transactions.number:
        number, run.checkpoints.asked = run.team.transactions.number, True
        is_saved = run.save(wait=True)
    for best, kept in zip(due if not is_saved else (), before, strict=False):
        best.kept = kept


def best_now(run: Run) -> list[dict[str, Any]]:
    """Returns the values among the best whose step is the present one, for the manifest of a checkpoint."""
    return [
        {"trainer": number, "name": best.name, "mode": best.mode, "value": value}
        | ({"kept": best.count} if best.count > 1 else {})
        for number, best in enumerate(member.best for member in run.trainers.members)
        for value, step in best.kept
        if step == run.trainers.step
    ]
