"""Measures the memory, time and traffic of a trainer's steps on this worker, to be compared with the prediction."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from paceline.parallel.parallel_job import ParallelJob
from paceline.parallel.plan_cost import cost, facts_of
from paceline.plan import Plan
from paceline.session.process_memory import memory_now, peak_memory
from paceline.session.run import Run
from paceline.train.step import Step


class StepFigures:
    """What one trainer's steps have taken on this worker so far.

    `made` counts the steps. `busy` are their seconds of forward and backward, without the first step, in which much is
    examined once; in `waited` of these seconds, this worker waited for others.
    """

    def __init__(self, run: Run, trainer: int, job: ParallelJob, plan: Plan) -> None:
        self._run, self._trainer, self._job, self._plan = run, trainer, job, plan
        self.made = 0
        self.busy = self.waited = 0.0
        self._before: dict[str, float] = {}  # bytes sent, by kind, before the second step
        self._peak = 0  # bytes that the process had at most before its first step
        self._micro_batches = 0  # of a global batch, the largest so far

    def observe(self, step: Step) -> None:
        """Adds a step that this worker has computed."""
        assert step.sums is not None
        waited = step.sums.waited
        if self.made:
            self.busy, self.waited = self.busy + step.spent["compute"] - waited, self.waited + waited
        else:
            self._before = self._sent()
            self._peak = peak_memory(self._job.device) if len(self._run.trainers.members) > 1 else 0
        self.made += 1
        if step.batch.count > self._micro_batches:
            self._micro_batches = step.batch.count

    def measure(self, held: dict[str, int], besides: int) -> list[dict[str, Any]]:
        """Returns the predicted and the measured memory and traffic of a step on this worker. `held` are the bytes that
        the trainer holds, by category, and `besides` the bytes of the process that belong to other trainers.
        """
        plan, run = self._plan, self._run
        mesh, peak = plan.mesh(run.team.size), peak_memory(self._job.device)
        # The peak may be that of an earlier trainer, which was larger.
        process_bytes = peak if peak > self._peak or len(run.trainers.members) <= 1 else memory_now(self._job.device)
        held["process"] = max(process_bytes - besides, sum(held.values()))
        run.reporter.journal.write("memory", trainer=self._trainer, **held)
        steps, sent = max(self.made - 1, 1), {k: n - self._before.get(k, 0) for k, n in self._sent().items()}
        observed: dict[str, Any] = {"seconds": self.busy / steps, "waited": self.waited / steps}
        observed["sent"] = {kind: round(count / steps) for kind, count in sent.items() if count}
        forwards, mirror = -(-self._micro_batches // mesh.units), run.checkpoints.copies_every
        prediction = cost(plan, facts_of(self._job), mesh.size, forwards, mirror)
        return [dataclasses.asdict(prediction), held | observed]

    def write(self, reports: Sequence[list[dict[str, Any]]]) -> None:
        """Journals the measurements of all workers for the report."""
        predicted, measured = zip(*reports[: self._plan.mesh(len(reports)).replica], strict=True)
        details = {"stages": [{"blocks": blocks} for blocks in self._job.describe_blocks()], "workers": len(reports)}
        details |= {"micro_batches": self._micro_batches, "predicted": predicted, "measured": measured}
        self._run.reporter.journal.write("figures", trainer=self._trainer, plan=str(self._plan), **details)

    def _sent(self) -> dict[str, float]:
        return self._run.reporter.traffic.of(self._trainer)
