"""Answers what `paceline check`, `paceline explain` and `paceline plan` ask of a run that they start."""

from __future__ import annotations

from typing import Any

from paceline.errors import UsageError
from paceline.parallel.estimate import forecast
from paceline.planner.trial import Trial
from paceline.train.step import Step
from paceline.train.step_context import Batches, StepContext
from paceline.train.step_verbs import load_batch


class RequestedAnswer:
    """Answers the request of a run for one of its trainers, and ends the script then."""

    def __init__(self, context: StepContext) -> None:
        self._context, self._asked = context, context.run.check
        self._trial: Trial | None = None
        if self._asked.trial is not None and context.trainer == 0:
            self._trial = Trial(context, *self._asked.trial)

    def before_step(self, batches: Batches) -> None:
        """Predicts a step under a plan, if that is asked for, from the first rows."""
        if self._asked.explain is None:
            return
        context = self._context
        batch = batches.load(0, context.current_assignment())
        assert batch is not None
        load_batch(context, step := Step(context.done, 0.0), batch)
        try:
            answer: Any = forecast(context.job, step.batch.share[0], step.batch.count, *self._asked.explain)
        except UsageError as error:
            answer = {"refused": [error.what, error.cure]}
        self._asked.answer(answer)

    def after_step(self, step: Step) -> None:
        """Measures a step of a trial, or writes the weights after the last step of a check."""
        context = self._context
        if self._trial is not None:
            self._trial.observe(step)
        if self._asked.steps is not None and context.run.team.step >= self._asked.steps:
            context.run.trainers.flush()
            self._asked.write_weights(context.job, context.run.team.group, context.merging.mixes, context.run.team.step)

    def after_loop(self) -> None:
        """Ends a trial with the loop that it measures, if that has fewer steps."""
        if self._trial is not None:
            self._trial.end()
