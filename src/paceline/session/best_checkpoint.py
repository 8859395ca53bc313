"""Keeps the best checkpoint by a reported value: writes one whenever the value is the best so far."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from paceline.errors import UsageError
from paceline.session.reported_values import Followed

if TYPE_CHECKING:
    from paceline.session.run import Run

_MODES = {"max": 1, "min": -1}


class BestCheckpoint(Followed):
    """The value that `Trainer.keep_best` follows: its name, the best value so far, and the `step` of the run that had
    it. A better value is `due` until its checkpoint is written.
    """

    def __init__(self) -> None:
        super().__init__("keep_best()", "no best is kept")
        self.mode = ""
        self.value: float | None = None
        self.step: int | None = None
        self.due: tuple[float, int] | None = None
        self._saved: list[Any] | None = None

    def follow(self, name: str, mode: str) -> None:
        """Follows the value `name`; `mode` is max or min. Raises UsageError."""
        if not isinstance(name, str) or not name:
            what = f"keep_best() is given {name!r:.60}, and the name of a value is wanted"
            raise UsageError(what, 'write keep_best("accuracy"), as evaluate() or log() names it')
        if mode not in _MODES:
            raise UsageError(f"keep_best() has no mode {mode!r}", "say mode='max' or mode='min'")
        if self.name and (self.name, self.mode) != (name, mode):
            raise UsageError(f"keep_best() follows {self.name!r} already", "follow one value of each trainer")
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
            run.reporter.say(f"{best.name} was best in a loop inside of another, whose weights are gone: not kept")
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
