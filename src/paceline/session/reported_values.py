"""Values reported by name, and what follows them (best checkpoint, plateau schedule, early stopping)."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from paceline.compute.lr_schedules import Plateau
from paceline.errors import UsageError

if TYPE_CHECKING:
    from paceline.comm.communicator import Group

MODES = {"max": 1, "min": -1}


def check_followed(whose: str, name: Any, mode: Any) -> None:
    """Raises UsageError unless a call follows a value by its name, with a known mode."""
    if not isinstance(name, str) or not name:
        call = whose.removesuffix(")")
        what = f"{whose} needs the name of a value, got {name!r:.60}"
        raise UsageError(what, f'write {call}"accuracy"), as evaluate() or log() names it')
    if mode not in MODES:
        raise UsageError(f"{whose} does not know mode {mode!r}", "use mode='max' or mode='min'")


class ValueFollower:
    """Something that follows a reported value by its `name`, which is empty if it follows none. `whose` is the call
    that asked for it, and `without` says what does not happen until there is a value.
    """

    def __init__(self, whose: str, without: str) -> None:
        self.whose, self.without = whose, without
        self.name = ""
        self.seen: tuple[int, float] | None = None  # the step of the run and the value that were reported last
        self._noticed = False  # a value by that name, or the user has been told that there was none

    def find_value(self, values: Mapping[str, Any], source: str, say: Callable[..., None]) -> float | None:
        """Returns the followed value among those of a `source`. If the first values have other names, the user is told;
        of log() only if a name is similar, as other values may be logged, too.
        """
        others = [name for name in values if name != "n"]
        near = difflib.get_close_matches(self.name, others, n=1, cutoff=0.5)
        self._noticed |= self.name in values
        if self.name and not self._noticed and (near or (others and source == "evaluate()")):
            self._noticed = True
            gave = " and ".join(map(repr, near or others[:5]))
            say(
                f"{self.whose} follows {self.name!r}, but {source} reported {gave}: until it is reported,"
                f" {self.without}"
            )
        return self.of(values)

    def of(self, values: Mapping[str, Any]) -> float | None:
        """Returns the followed value, or None if it is not there. Raises UsageError if it is no number."""
        try:
            return float(values[self.name]) if self.name in values else None
        except (TypeError, ValueError, RuntimeError):
            what = f"{self.whose} follows {self.name!r}, which is {values[self.name]!r:.60}, not a number"
            raise UsageError(what, "report a number of that name with evaluate() or log()") from None

    def offer(self, values: Mapping[str, Any], step: int) -> None:
        """Takes values of the run's `step`, the same on all workers."""
        if (value := self.of(values)) is not None:
            self.seen = step, value
            self.take(value, step)

    def replay(self, values: Mapping[str, Any], step: int) -> None:
        """Takes values that a resumed run has from its checkpoint, whose state includes their effects."""
        if (value := self.of(values)) is not None:
            self.seen, self._noticed = (step, value), True

    def take(self, value: float, step: int) -> None:
        """Acts on a value."""
        raise NotImplementedError


class PlateauFollower(ValueFollower):
    """Moves the learning rates of `schedule=paceline.plateau(...)` at each report of its value, once."""

    def __init__(self, schedule: Any, schedulers: Sequence[LRScheduler], say: Callable[..., None]) -> None:
        name = schedule.name if isinstance(schedule, Plateau) else ""
        super().__init__(f"schedule=paceline.plateau({name!r})", "the learning rate stays")
        self.name, self._say = name, say
        self._schedulers = [one for one in schedulers if isinstance(one, ReduceLROnPlateau)]

    def take(self, value: float, step: int) -> None:
        """Hands a value to the schedulers, and notes which learning rates they change."""
        before = self._rates()
        for scheduler in self._schedulers:
            scheduler.step(value)
        for old, new in zip(before, self._rates(), strict=True):
            if old != new:
                self._say(
                    f"learning rate changed from {old:.6g} to {new:.6g} after step {step}: {self.name} = {value:.6g}"
                )
                break

    def _rates(self) -> list[float]:
        return [float(group["lr"]) for one in self._schedulers for group in one.optimizer.param_groups]

    @property
    def schedule_warning(self) -> str:
        """A note to the user at the end, if no value was ever reported; else empty."""
        if not self._schedulers or any(scheduler.last_epoch for scheduler in self._schedulers):
            return ""
        return (
            f"{self.whose} never changed the learning rate: no evaluate() or log() reported {self.name!r}; "
            f'write trainer.evaluate(dataset, metric) with a metric that returns {{"{self.name}": (sum, count)}}'
        )


def agree(group: Group, values: dict[str, float], whose: str) -> dict[str, Any]:
    """Returns the logged values of worker 0 on all workers. Collective."""
    names = ", ".join(f"{name}=" for name in values)
    group.declare(f"log({names}), which {whose} follows")
    return dict(group.gather_json(values)[0])
