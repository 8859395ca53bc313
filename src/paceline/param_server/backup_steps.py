"""Steps with backup workers: the servers update the weights when all workers but a few have pushed their part.

The parts of the late ones are dropped (Chen et al., "Revisiting Distributed Synchronous SGD", ICLR workshop 2016).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from paceline.data.loader import Assignment
from paceline.param_server.server_team import ServerTeam, add_server_state
from paceline.param_server.worker_window import (
    WINDOW,
    announce_window,
    apply_window,
    begin_window,
    compute_ticket,
    end_window,
    exchange_window,
    load_ticket,
    next_ticket,
    sum_log,
    whole_batch,
)
from paceline.train.step import Step
from paceline.train.step_context import Batches, StepContext
from paceline.train.step_verbs import attempts, begin_step, open_attempt, publish, take_over
from paceline.train.turn_reports import BrokenOffError


def backup_window(strategy: BackupWorkers, batches: Batches) -> Step:
    """Makes a window of steps that do not wait for the last workers, and returns it as a step of so many steps.

    Raises BrokenOffError if it is empty because all workers stop.
    """
    context = strategy.context
    step = begin_step(context, batches.title.format(context.done + 1))
    for attempt in attempts(context):  # again after a lost peer
        with attempt:
            open_attempt(context, step)
            strategy.compare_datasets(batches)
            while True:
                with context.streams.preserved():
                    window = begin_window(context)
                    while (ticket := next_ticket(context, window)) is not None:
                        batch = load_ticket(context, window, ticket, batches, whole_batch(context, ticket["share"]))
                        if batch is not None:
                            compute_ticket(context, window, ticket, batch)
                    end_window(context, step, window)
                if exchange_window(context, step, window):  # all workers made the same updates
                    break
            sum_log(step, window.log)
            for member in context.run.trainers.members:
                if member.state:
                    member.state.step_computed()
            step.spent["compute"] = step.computed - step.began - step.spent["data"]
            attempt.commit(None, partial(apply_window, context, step, window))
            if context.transactions.fault_point is not None:
                context.transactions.fault_point("applied")
    if attempt.taken is not None:
        *result, step.steps = attempt.taken[1]
        take_over(context, step, *result)
    publish(context, step)
    return step


class BackupWorkers:
    """Trains in steps that wait for all workers but a few; see train/strategy.py."""

    lockstep = False

    def __init__(self, context: StepContext) -> None:
        self.context, self.servers = context, ServerTeam(context, watch_team=False)
        self._compared = -1  # the generation in which all know that they read the same rows
        updates = context.plan.window or WINDOW
        what = f"steps wait for all workers but {context.plan.backup}: rows of who is later are dropped"
        announce_window(context, f"{what}, and all meet every {updates} updates")

    def compare_datasets(self, batches: Batches) -> None:
        """In a new generation: loads a batch, by which workers compare their datasets. Collective."""
        if self._compared != self.context.transactions.number:
            batches.load(0, whole_batch(self.context))
            self._compared = self.context.transactions.number

    def advance(self, batches: Batches) -> Step | None:
        """Makes a window. Returns None if it was empty because all workers stop."""
        try:
            return backup_window(self, batches)
        except BrokenOffError as end:
            self.context.run.agreed(end.agreed)
            return None

    def assignment(self) -> Assignment:
        """Returns the assignment of a whole global batch to this worker."""
        return whole_batch(self.context)

    def shares(self, batches: int, weights: Sequence[float]) -> list[int]:
        """Returns one share: a worker computes all micro-batches of a global batch."""
        return [batches]

    def memory(self) -> dict[str, int]:
        """Returns the largest number of bytes that this worker holds, by category."""
        return self.context.replica.memory()

    def state(self, done: int | None) -> dict[str, Any]:
        """Returns what further windows depend on, for a checkpoint with the optimizer state of the servers."""
        return add_server_state(self.context, done)

    def load(self, saved: dict[str, Any], newcomer: bool) -> None:
        """Loads what `state` returned, possibly under another plan."""
        self.context.load_state(saved)

    def end_loop(self) -> None:
        """Does nothing: nothing is under way between two windows."""
