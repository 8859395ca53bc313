"""Ranks the plans for a model: predicts each, and says which of them fit, how long a step takes and what limits it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from paceline.base.batching import Grid
from paceline.base.console import in_one_line
from paceline.base.text import duration, first_few, plural, size_of
from paceline.plan import Plan
from paceline.planner.candidates import words_of
from paceline.planner.compute_time import calibrated
from paceline.planner.corrections import Corrections, traits_of
from paceline.planner.descriptions import (
    MachineDescription,
    ModelDescription,
    ProbeResult,
    TrialResult,
    WorkerBytes,
    relative_loads,
)
from paceline.planner.history import History
from paceline.planner.memory import checkpoint_copy, coding_memory, worker_memory
from paceline.planner.step_time import StepTime, step_time

MARGIN = 0.05  # part of a worker's memory that stays free
STARTED = 64e6  # bytes that a process takes in its first steps besides tensors, before a trial has shown how many
FLAT = 25 << 20  # bytes of the tensors in which parameters are sent and compared
COMPARED = 3.0  # times the activations of a micro-batch that the comparison with the complete model takes


@dataclass(frozen=True)
class Prospect:
    """A plan with what is predicted for a step of a worker, and what was measured if it was tried."""

    plan: Plan
    workers: int
    seconds: float  # of a step, with corrections
    uncorrected: float = 0.0  # seconds as they follow from descriptions alone
    parts: Mapping[str, float] = field(default_factory=dict)  # of the seconds
    memory: float = 0.0  # bytes of the process
    comparison: float = 0.0  # those of them for a comparison that is left out where memory is too small
    further: float = 0.0  # bytes that a run needs besides: a copy to write checkpoints from, and parameter servers
    room: float = 0.0  # bytes that it may take
    sent: Mapping[str, int] = field(default_factory=dict)  # bytes that worker 0 sends in a step, by kind
    trial: TrialResult | None = None
    turn: int = 0  # the number of its first trial, of those of all plans
    correction: float = 1.0  # of the seconds, by trials of other plans

    @property
    def predicted_need(self) -> float:
        """Bytes that a run needs for each worker, as predicted."""
        return self.memory + self.further

    @property
    def needs(self) -> float:
        """The same as measured if the plan was tried, but for the comparison of a divided model."""
        if self.trial is None or not self.trial.peaks:
            return self.predicted_need
        measured = max(self.trial.peaks) + self.further
        return min(measured, max(self.predicted_need, measured - self.comparison))

    @property
    def fits(self) -> bool:
        """Whether the process fits into the memory of a worker."""
        return self.needs <= self.room * (1 - MARGIN)

    @property
    def is_refused(self) -> bool:
        """Whether a trial has shown that the plan cannot be used for this model."""
        return self.trial is not None and bool(self.trial.refused)

    @property
    def is_measured(self) -> bool:
        """Whether steps of the plan were measured."""
        return self.trial is not None and bool(self.trial.seconds)

    @property
    def step_seconds(self) -> float:
        """Seconds of a step, as measured if it was tried."""
        return self.trial.step_seconds if self.trial is not None and self.is_measured else self.seconds

    @property
    def too_much(self) -> str:
        """The bytes that the process needs beyond what it may take."""
        return size_of(self.needs - self.room * (1 - MARGIN))

    @property
    def limits(self) -> str:
        """What a step's time is spent on, the largest parts first; or why the plan does not fit."""
        if not self.fits:
            return f"does not fit: {self.too_much} too much"
        total = sum(self.parts.values()) or 1.0
        shares = sorted(((seconds / total, name) for name, seconds in self.parts.items()), reverse=True)
        return ", ".join(f"{name} {share:.0%}" for share, name in shares[:3] if share >= 0.02)

    def with_trial(self, result: TrialResult, turn: int = 0) -> Prospect:
        """Returns this prospect with a trial, or with the steps of one more."""
        return replace(self, trial=result if self.trial is None else self.trial.beside(result), turn=self.turn or turn)

    def corrected(self, correction: float) -> Prospect:
        """Returns this prospect with seconds that are so many times those that were predicted before all trials."""
        times = correction / self.correction
        parts = {name: seconds * times for name, seconds in self.parts.items()}
        return replace(self, seconds=self.seconds * times, parts=parts, correction=correction)

    @property
    def name(self) -> str:
        """The words of the plan, for people."""
        return words_of(self.plan) if self.workers > 1 else "one worker"

    def row(self) -> tuple[str, ...]:
        """Returns this prospect's cells of the table."""
        tried = milliseconds(self.step_seconds) if self.trial is not None else ""
        memory = f"{size_of(self.needs)} of {size_of(self.room)}"
        sent = size_of(sum(self.sent.values())) if self.workers > 1 and self.sent else ""
        return self.name, milliseconds(self.seconds), tried, memory, sent, self.limits

    def as_data(self) -> dict[str, Any]:
        """Returns this prospect as JSON data: seconds and bytes."""
        return {
            "plan": words_of(self.plan),
            "workers": self.workers,
            "seconds": self.seconds,
            "parts": dict(self.parts),
            "memory": self.memory,
            "further": self.further,
            "fits": self.fits,
            "tried": None if self.trial is None else self.trial.step_seconds,
            "turn": self.turn or None,
            "sends": dict(self.sent),
            "sent": None if self.trial is None else self.trial.sent,
            "peak": None if self.trial is None else max(self.trial.peaks),
        }


class Predictor:
    """Predicts plans for a model on machines, from the result of a probe, `probed`.

    Predictions are corrected by the trial of a first plan (`base`), and by those of earlier plans (`history`). A worker
    may take `room` bytes, by default what is free.
    """

    def __init__(
        self,
        model: ModelDescription,
        machine: MachineDescription,
        probed: ProbeResult,
        history: History | None = None,
        room: float | None = None,
        base: TrialResult | None = None,
    ) -> None:
        self.model, self.machine, self._probed, self._history = model, machine, probed, history
        self._room = room or machine.memory
        self._slow = () if base is None else relative_loads(base.each_row)
        self._correction, self._floor = 1.0, float(probed.process) + STARTED
        if base is not None and base.seconds:
            plan = Plan.parse(base.plan).validate(base.workers)
            self._correction = base.step_seconds / self._time(plan, base.workers).total
            most, compared = self._most(plan, base.workers, base.together)
            self._floor = max(base.peaks) - most - self._spare(most, compared)

    def corrected(self, base: TrialResult) -> Predictor:
        """Returns a predictor that is corrected by a trial, which also shows whether micro-batches may be merged, and
        how fast links between hosts are.
        """
        model = calibrated(msgspec.structs.replace(self.model, merges=base.merges), base.row_seconds)
        machine = self.machine if base.link is None else self.machine.between_hosts(*base.link)
        return Predictor(model, machine, self._probed, self._history, self._room, base)

    def predict(self, plan: Plan, workers: int) -> Prospect:
        """Predicts a step of this plan."""
        taken = self._time(plan, workers)
        uncorrected = self._correction * taken.total
        correction = 1.0 if self._history is None else self._history.correction(plan, self.model, workers)
        parts = {name: seconds * self._correction * correction for name, seconds in taken.parts().items()}
        most, compared = self._most(plan, workers)
        memory = self._floor + most + self._spare(most, compared)
        sent = self._bytes(plan)[0].sent if self._bytes(plan) else {}
        further = checkpoint_copy(plan, self.model, self.machine, workers) + self._servers(plan, workers)
        seconds = sum(parts.values()), uncorrected, parts
        return Prospect(plan, workers, *seconds, memory, compared, further, self._room, sent=sent)

    def _time(self, plan: Plan, workers: int) -> StepTime:
        slow = self._slow if len(self._slow) == workers else ()
        return step_time(plan, self.model, self.machine, workers, slow=slow)

    def _bytes(self, plan: Plan) -> tuple[WorkerBytes, ...]:
        return self._probed.plans.get(str(plan), ())

    def _most(self, plan: Plan, workers: int, together: int = 0) -> tuple[float, float]:
        """Returns the bytes of all tensors, when there are most of them, of the worker that needs most, and those that
        are added by the comparison of a divided model with the complete one, before the first update. That is left out
        if memory is too small. `together` are the rows that the worker computed together at most, if that is known.
        """
        memory = worker_memory(plan, self.model, self.machine, workers, held=self._bytes(plan), together=together)
        kept = memory.parameters + memory.gradients + memory.optimizer
        # Weights and states are copied into flat tensors, to be compared between workers.
        flats = 2 * min(FLAT, max(memory.parameters, memory.optimizer)) if workers > 1 else 0.0
        sums = any(worker.sent.get("gradients") for worker in self._bytes(plan))
        coded = coding_memory(plan, self.model, memory.gradients) if sums else 0.0
        most = max(memory.total, kept + flats) + coded  # which a codec keeps between steps
        compared = memory.total + coded + self._comparison(plan, workers) - memory.optimizer
        return most, max(0.0, compared - most)

    def _spare(self, most: float, compared: float) -> float:
        """Returns how many of the bytes of a comparison are taken, besides `most` of other tensors."""
        return max(0.0, min(compared, self._room * (1 - MARGIN) - self._floor - most))

    def _servers(self, plan: Plan, workers: int) -> float:
        """Returns the bytes of parameter servers, which share the memory of their workers' hosts: for each worker."""
        if not plan.server:
            return 0.0
        state = self.model.parameters * self.model.element_size * (2 + self.model.state)  # with gradients
        return (plan.server * self._floor + (1 + (plan.copies or 0)) * state) / workers

    def _comparison(self, plan: Plan, workers: int) -> float:
        """Returns the bytes that the first step takes besides, which compares a divided model with the complete one."""
        if plan.mesh(workers).unit == 1:
            return 0.0
        rows = Grid.of(self.model.global_batch, plan.micro).micro
        saved = rows * sum(block.count * block.saved for block in self.model.blocks)
        return 2 * self.model.parameters * self.model.element_size + COMPARED * saved


@dataclass
class Answer:
    """All plans with what is known of them, the best one first; the refused ones with the reason."""

    model: ModelDescription
    machine: MachineDescription
    prospects: list[Prospect]
    refused: dict[str, str]
    took: float  # seconds of all trials
    base: TrialResult | None  # the trial by which predictions are corrected
    short: float | None = None  # the seconds of the run, if it is too short for trials of other plans
    error: tuple[int, float] | None = None  # of the newest predictions: how many, and their median relative error

    @property
    def best(self) -> Prospect | None:
        """The fastest plan that fits: of the tried ones, if any were tried."""
        fitting = [one for one in self.prospects if one.fits]
        tried = [one for one in fitting if one.trial is not None]
        return min(tried or fitting, key=lambda one: one.step_seconds, default=None)

    def text(self, shown: int) -> str:
        """Returns the table of plans, and what became of the others."""
        fitting = sum(one.fits for one in self.prospects)
        others = len(self.prospects) - fitting
        counts = [f"{plural(fitting, 'plan')} {'fits' if fitting == 1 else 'fit'}"]
        counts += [f"{others} {'does' if others == 1 else 'do'} not"] if others else []
        counts += [f"{len(self.refused)} cannot be used for this model"] if self.refused else []
        how = "Measuring the model" if self.base is None else "Trials"
        lines = [self.table(shown), "", f"{', '.join(counts)}. {how} took {duration(self.took)}."]
        if others:
            nearest = self.prospects[fitting]
            lines.append(
                f"Of those that do not fit, {words_of(nearest.plan)!r} needs least: {nearest.too_much} too much."
            )
        if not self.machine.measured:
            lines.append(
                f"{self.machine.name} is described by its data sheet, not measured: expect errors of 10 to 40 %."
            )
        elif self.error is not None:
            count, error = self.error
            lines.append(f"The last {plural(count, 'prediction')} on this machine: median error {error:.0%}.")
        reasons: dict[str, list[str]] = {}
        for plan, reason in self.refused.items():
            reasons.setdefault(reason, []).append(plan)
        lines += [f"  {in_one_line(reason)}: {_listed(plans)}" for reason, plans in reasons.items()]
        return "\n".join(lines)

    def explain(self, text: str, workers: int) -> str:
        """Explains the place of one plan for so many workers among the others: its figures and the parts of its step.
        Raises PlanError if the text is not a plan for these workers.
        """
        plan = Plan.parse(text).validate(workers)
        if reason := self.refused.get(str(plan)):
            return f"{text} cannot be used for this model: {in_one_line(reason)}"
        position = next((n for n, one in enumerate(self.prospects, start=1) if one.plan == plan), None)
        if position is None:
            return f"{text!r} is not among the plans to choose from: see --keep and --allow, or leave words out"
        one, count = self.prospects[position - 1], len(self.prospects)
        lines = [f"{words_of(plan)}: number {position} of {count}, predicted {milliseconds(one.seconds)} for a step"]
        if one.trial is not None:
            lines[0] += f", measured {milliseconds(one.step_seconds)}"
        lines += [f"  {name:12} {milliseconds(taken)}" for name, taken in one.parts.items() if taken > 0]
        lines.append(f"  {'memory':12} {size_of(one.predicted_need)} of {size_of(one.room)}")
        return "\n".join(lines if one.fits else [*lines, f"  {one.limits}"])

    def as_data(self) -> dict[str, Any]:
        """Returns all plans as JSON data, the best one first."""
        best, first = self.best, None if self.base is None else Plan.parse(self.base.plan)
        return {
            "best": None if best is None else best.as_data(),
            "first": None if first is None else words_of(first),
            "plans": [one.as_data() for one in self.prospects],
            "refused": self.refused,
        }

    def table(self, shown: int) -> str:
        """Returns the plans as a table, with at most `shown` of those that were not tried."""
        untried = [one for one in self.prospects if one.trial is None]
        listed = [one for one in self.prospects if one.trial is not None or one in untried[:shown]]
        rows = [("plan", "step", "tried", "memory", "sends", "what limits it"), *(one.row() for one in listed)]
        widths = [max(len(row[column]) for row in rows) for column in range(5)] + [0]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
        if len(untried) > shown:
            lines.append(f"and {plural(len(untried) - shown, 'other plan')}")
        return "\n".join(line.rstrip() for line in lines)


def ranked(prospects: Iterable[Prospect]) -> list[Prospect]:
    """Returns the plans that fit, the fastest first, and then the others, those that need least memory first."""
    return sorted(prospects, key=lambda one: (not one.fits, one.step_seconds if one.fits else one.needs))


def corrected_by_trials(prospects: Mapping[str, Prospect], workers: int) -> dict[str, Prospect]:
    """Returns all prospects; those of plans for so many workers that were not tried are corrected by the trials of
    others.
    """
    traits = {key: traits_of(one.plan, workers) for key, one in prospects.items() if one.workers == workers}
    measured = [(key, prospects[key]) for key in traits if prospects[key].is_measured]
    # The factors of trials refer to what was predicted before all of them.
    corrections = Corrections((traits[key], one.step_seconds * one.correction / one.seconds) for key, one in measured)
    return {
        key: one.corrected(corrections.factor(traits[key])) if key in traits and one.trial is None else one
        for key, one in prospects.items()
    }


def milliseconds(seconds: float) -> str:
    """Returns a duration of a step as a text."""
    return f"{1e3 * seconds:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"


def _listed(plans: Sequence[str]) -> str:
    return first_few([*map(repr, plans)], 3)
