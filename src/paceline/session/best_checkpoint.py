"""Keeps the best checkpoint by a reported value: writes one whenever the value is the best so far."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from paceline.errors import UsageError
from paceline.observe.key_figures import BEST
from paceline.session.reported_values import Followed

if TYPE_CHECKING:
    from paceline.session.run import Run

_MODES = {"max": 1, "min": -1}


class BestCheckpoint(Followed):
    """The value that `Trainer.keep_best` follows: its name, the best value so far, and the `step` of the run that had
    it. A better value is `due` until its checkpoint is written.
    """

    def __init__(self) -> None:
        super().__init__("keep_best()", "no value is followed yet")
        self.mode = ""
        self.value: float | None = None
        self.step: int | None = None
        self.due: tuple[float, int] | None = None
        self._saved: list[Any] | None = None

    def __str__(self) -> str:
        """For example ``best accuracy 0.91 at step 120 (highest so far)``."""
        if not self.name:
            return "no best value: keep_best() was not called"
        value, step = self.due or (self.value, self.step)
        if value is None:
            return f"no best {self.name} yet: evaluate() or log() has not reported a finite value"
        return f"best {self.name} {value:.6g} at step {step} ({BEST[self.mode]})"

    def __repr__(self) -> str:
        return f"<BestCheckpoint: {self}>"

    def follow(self, name: str, mode: str) -> None:
        """Follows the value `name`; `mode` is max or min. Raises UsageError."""
        if not isinstance(name, str) or not name:
            what = f"keep_best() needs the name of a value, got {name!r:.60}"
            raise UsageError(what, 'write keep_best("accuracy"), as evaluate() or log() names it')
        if mode not in _MODES:
            raise UsageError(f"keep_best() does not know mode {mode!r}", "use mode='max' or mode='min'")
        if self.name and (self.name, self.mode) != (name, mode):
            raise UsageError(f"keep_best() already follows {self.name!r}", "follow one value per trainer")
        self.name, self.mode = name, mode
        self.restore(self._saved)

    def saved(self) -> list[Any] | None:
        """Returns name, mode, value and step for a checkpoint."""
        return self._saved if self.value is None else [self.name, self.mode, self.value, self.step]

    def restore(self, saved: list[Any] | None) -> None:
        """Takes the best value of a checkpoint if the script follows the same name and mode."""
        self._saved = saved
        if saved and saved[:2] == [self.name, self.mode]:
            self.value, self.step = saved[2:]

    def take(self, value: float, step: int) -> None:
        """Makes a value due if it is better than the best one."""
        best = self.value if self.due is None else self.due[0]
        if math.isfinite(value) and (best is None or (value - best) * _MODES[self.mode] > 0):
            self.due = value, step


def keep_best(run: Run) -> None:
    """Between two steps: writes the checkpoint of each value that is better than all before. Collective if any is due.

    Training waits for the checkpoint, since the weights change with the next step. If a worker is lost meanwhile, the
    checkpoint is written again. If it cannot be written, the former best one stays.
    """
    due = [member.best for member in run.trainers.members if member.best.due is not None]
    if not due:
        return
    step = run.trainers.step
    before = [(best.value, best.step) for best in due]
    for best in due:
        if best.due is not None and best.due[1] == step:
            best.value, best.step = best.due
        else:
            run.reporter.say(
                f"{best.name} was best inside a nested loop whose weights are gone, so no checkpoint of it is kept"
            )
        best.due = None
    if run.checkpoints.storage is None or not any(best.step == step for best in due):
        return
    is_saved, number = False, -1
    while number != run.team.transactions.number:
        number, run.checkpoints.asked = run.team.transactions.number, True
        is_saved = run.save(wait=True)
    for best, (value, at) in zip(due if not is_saved else (), before, strict=False):
        best.value, best.step = value, at


def best_now(run: Run) -> list[dict[str, Any]]:
    """Returns the values whose best step is the present one, for the manifest of a checkpoint."""
    now = [(number, m.best) for number, m in enumerate(run.trainers.members) if m.best.step == run.trainers.step]
    return [{"trainer": number, "name": best.name, "mode": best.mode, "value": best.value} for number, best in now]
