"""A step of the team: the step that is being computed, and the `StepReport` that the user gets of it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import partial

from paceline.base.batching import NOTHING, Agreed
from paceline.compute.job import StepOptions, StepSums
from paceline.session.worker_batch import WorkerBatch
from paceline.team.live_migration import Migration


@dataclass(frozen=True)
class StepReport:
    """One optimizer step of all workers together; the same on every worker but for `seconds`.

    Attributes:
        step: Optimizer steps done, from 1.
        epoch: The epoch, from 0.
        loss: Mean over the global batch. NaN if no row counts, as without any label; such a step changes no weight.
        metrics: Means of the loss's own metrics, by name.
        samples: Rows of the global batch.
        seconds: Duration on this worker.
        lr: Learning rate of the first parameter group.
        grad_norm: Norm of the mean gradient before clipping.
        turn: Optimizer steps of this turn of the loop: more than 1 under ``local=`` and in asynchronous windows.
            `loss`, `metrics` and `samples` are then of all of them, the other values of the last one (under ``local=``,
            of island 0).
        epoch_end: Whether an epoch ends with this step. Always False for an iterable dataset: its end is found when the
            next row is read. To evaluate after each epoch, use one loop over ``steps(dataset, epochs=1)`` for each.
    """

    step: int
    epoch: int
    loss: float
    metrics: dict[str, float]
    samples: int
    seconds: float
    lr: float
    grad_norm: float
    turn: int = 1
    epoch_end: bool = False

    def every(self, steps: int) -> bool:
        """Returns True if a multiple of `steps` was reached since the last turn of the loop."""
        return self.step // steps > (self.step - self.turn) // steps


@dataclass
class Step:
    """A step that is being computed, and its result. One turn of the user's loop may have several `steps`."""

    number: int  # of the trainer's steps before it
    lr: float  # of the first parameter group
    name: str = ""  # of its collectives
    scale: float = 1.0  # of the loss
    generation: int = -1  # in which it was computed last
    digest: float | None = None  # of the weights before it, where workers compare them
    ahead: Migration.StateStream | None = None  # sends the step to newcomers that are not admitted yet
    batch: WorkerBatch = field(default_factory=partial(WorkerBatch, [], 0, 0))  # this worker's part of the global batch
    indivisible: bool = False  # a micro-batch whose rows cannot be told apart was to be divided
    options: StepOptions = field(default_factory=partial(StepOptions, 0, 1.0, 0))
    steps: int = 1
    of_island: str = ""  # " of island 2" in messages about a step of one island
    sums: StepSums | None = None  # of this worker; None if it took over another worker's state with the step
    agreed: Agreed = NOTHING  # the values that all workers know of the step
    norm: float = 0.0  # of the mean gradient
    news: dict[str, tuple[str, str]] = field(default_factory=dict)  # all workers' messages to the user, by kind
    spent: dict[str, float] = field(default_factory=dict)  # seconds of this worker, by part of the step
    began: float = 0.0  # when the present attempt began
    computed: float = 0.0  # when this worker's own gradients were complete
    waited: float = 0.0  # seconds of forward and backward for workers of other units

    @property
    def done(self) -> int:
        """The trainer's steps, this one included."""
        return self.number + self.steps

    def report(self) -> StepReport:
        """Returns the report of the step for the user."""
        agreed = self.agreed
        loss = agreed.loss / agreed.count if agreed.count else math.nan
        metrics = {name: total / count if count else math.nan for name, (total, count) in agreed.metrics.items()}
        seconds = sum(self.spent.values()) - self.spent["other"]
        batch = self.batch
        return StepReport(
            self.number + self.steps, batch.epoch, loss, metrics, batch.rows, seconds, self.lr, self.norm, self.steps
        )
