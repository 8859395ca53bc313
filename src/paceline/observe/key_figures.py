"""Computes the key figures of a run.

The report, the live page and `paceline watch` show the same figures, each with the time span it covers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING

from paceline.base.journal import Event
from paceline.base.text import duration, number, plural, total

if TYPE_CHECKING:
    from paceline.observe.summary import Summary

SHORT = 60.0  # seconds of a run below which no goodput is shown
WINDOW = 30.0  # seconds of training that recent figures cover
WHOLE_RUN = "mean of the run without its first 10% of steps"  # the span of `Summary.samples_per_second`
BEST = {"max": "highest so far", "min": "lowest so far"}


@dataclass(frozen=True)
class KeyFigure:
    """A figure of the run: its `name` with the unit, its `value`, and the time `span` or the steps it covers."""

    name: str
    value: str
    span: str

    @property
    def text(self) -> str:
        """The value and its span in one line."""
        return f"{self.value} ({self.span})" if self.span else self.value


@dataclass(frozen=True)
class StepCount:
    """How far a run is: steps `done`, steps in `total`, and the estimated `seconds_left`; None if unknown.

    Steps of several trainers are added up, as in the progress line and in checkpoints.
    """

    done: int
    total: int | None
    seconds_left: float | None

    @property
    def fraction(self) -> float | None:
        """The part of all steps that is done."""
        return self.done / self.total if self.total else None

    @property
    def time_left(self) -> str:
        """The estimated time left, for example ``4 min 33 s``; empty if unknown."""
        seconds = self.seconds_left
        return "" if seconds is None else f"{round(seconds)} s" if seconds < 59.5 else duration(seconds)

    @property
    def text(self) -> str:
        """For example ``step 60 of 480, 12.5%, 4 min 33 s left``."""
        of = f" of {self.total:,}" if self.total else ""
        parts = [f"step {self.done:,}{of}", f"{self.fraction:.1%}" if self.fraction is not None else ""]
        parts.append(f"{self.time_left} left" if self.seconds_left is not None else "")
        return ", ".join(filter(None, parts))


def recent(records: Sequence[Event], window: float = WINDOW) -> list[Event]:
    """The last records of steps that add up to at least `window` seconds of training, oldest first."""
    seconds, first = 0.0, len(records)
    while first > 0 and seconds < window:
        first -= 1
        seconds += records[first].get("seconds") or 0.0
    return list(records[first:])


def recent_span(records: Sequence[Event]) -> str:
    """The time span of some last records, for example ``last 30 s``, to within a tenth."""
    seconds = total(records, "seconds")
    seconds = WINDOW if 0.9 * WINDOW < seconds < 1.1 * WINDOW else seconds
    return f"last {round(seconds)} s" if 1 <= seconds < 59.5 else f"last {duration(seconds)}"


def recent_steps(summary: Summary) -> list[Event]:
    """The records of the last `WINDOW` seconds of training of all trainers, in the run's last attempt."""
    ends = [record for name in summary.steps for record in recent_steps_of(summary, name)]
    return recent(sorted(ends, key=lambda record: float(record.get("at") or 0.0)))


def recent_steps_of(summary: Summary, trainer: str) -> list[Event]:
    """The records of the last `WINDOW` seconds of training of one trainer, in the run's last attempt."""
    began = float(summary.start.get("at") or 0.0)
    return [r for r in recent(summary.steps.get(trainer, [])) if float(r.get("at") or 0.0) >= began]


def step_count(summary: Summary) -> StepCount:
    """How far the run is; the time left is estimated from the last `WINDOW` seconds."""
    done = sum(int(records[-1].get("step") or 0) for records in summary.steps.values())
    targets = {grid.get("trainer"): grid.get("steps") for grid in summary.grids}
    known = [target for target in targets.values() if target]
    target = sum(known) if known and len(known) == len(targets) else None
    target = target if target and target >= done else None
    records = recent_steps(summary)
    seconds, steps = total(records, "seconds"), total(records, "steps")
    has_estimate = summary.running and target is not None and steps > 0 and seconds > 0
    return StepCount(done, target, (target - done) * seconds / steps if has_estimate and target is not None else None)


def best_values(summary: Summary) -> list[KeyFigure]:
    """The best value of each trainer that `Trainer.keep_best` follows."""
    marks = {mark["trainer"]: (mark, event) for event in summary.checkpoints for mark in event.get("best") or ()}
    several = len(summary.steps) > 1
    return [
        KeyFigure(
            f"best {mark['name']}" + (f" of trainer {trainer}" if several else ""),
            number(mark["value"]),
            f"step {event.get('step') or 0:,}, {BEST[mark['mode']]}",
        )
        for trainer, (mark, event) in marks.items()
    ]


def recent_speed(summary: Summary, field: str = "samples") -> KeyFigure | None:
    """Samples (or tokens) per second over the last `WINDOW` seconds of training."""
    records = recent_steps(summary)
    seconds, count = total(records, "seconds"), total(records, field)
    if seconds <= 0 or not count:
        return None
    return KeyFigure(f"{field}/s", speed(count / seconds), recent_span(records))


def speed(per_second: float) -> str:
    """A number of samples per second: ``23.7``, ``5,120``."""
    return f"{per_second:,.0f}" if per_second >= 100 else f"{per_second:.3g}"


def flops(per_second: float) -> str:
    """Floating-point operations per second: ``1.23 TFLOP/s``, ``45.6 GFLOP/s``."""
    for unit, size in (("P", 1e15), ("T", 1e12), ("G", 1e9)):
        if per_second >= size:
            return f"{per_second / size:.3g} {unit}FLOP/s"
    return f"{per_second / 1e6:.3g} MFLOP/s"


def key_figures(summary: Summary) -> list[KeyFigure]:
    """The key figures of a run in the order in which they are shown, without those that are unknown."""
    figures: list[KeyFigure | None] = []
    for name, records in summary.steps.items():
        first, last = summary.losses[name]
        about = f"step {records[-1].get('step') or 0:,}"
        about += f"; {number(first)} at step {records[0].get('step') or 0:,}" if len(records) > 1 else ""
        figures.append(KeyFigure(f"loss {name}".strip(), number(last), about))
    figures += best_values(summary)
    figures += [recent_speed(summary), recent_speed(summary, "tokens")]
    if summary.samples_per_second:
        figures.append(KeyFigure("samples/s", speed(summary.samples_per_second), WHOLE_RUN))
    if summary.flops_per_second:
        value, unit = flops(summary.flops_per_second).split()
        about = "estimated" if summary.flops.get("estimated") else "of the model"
        about += "" if summary.utilisation is None else f"; {summary.utilisation:.0%} of the devices' peak"
        figures.append(KeyFigure(unit, value, about))
    if summary.speedup:
        compared = plural(summary.compare.get("workers") or 1, "worker")
        figures.append(KeyFigure("speedup", f"{summary.speedup:.2f}\u00d7", f"compared with {compared}"))
    if summary.goodput is not None and sum(summary.account.values()) >= SHORT:
        figures.append(KeyFigure("goodput", f"{summary.goodput:.0%}", f"of {duration(sum(summary.account.values()))}"))
    if summary.steps:
        span = "since the start" if summary.running else "from start to end"
        span = "up to the last event" if summary.outcome is None and not summary.running else span
        span = f"in {plural(len(summary.attempts), 'attempt')}" if len(summary.attempts) > 1 else span
        figures.append(KeyFigure("elapsed time", duration(summary.wall_seconds), span))
    return [figure for figure in figures if figure is not None]


def started_at(summary: Summary) -> str:
    """The local time of the run's first event."""
    return f"{datetime.fromtimestamp(summary.attempts[0][0]):%Y-%m-%d %H:%M}" if summary.attempts else ""
