"""The step with parameter servers: workers push gradients to servers, which update the weights and send them back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from paceline.base.batching import deal
from paceline.data.loader import Assignment
from paceline.param_server.server_team import ServerTeam, add_server_state
from paceline.train.step import Step
from paceline.train.step_context import Batches, StepContext
from paceline.train.step_verbs import (
    attempts,
    begin_step,
    complete,
    examine,
    forward_backward,
    grad_norm,
    load_batch,
    must_repeat,
    open_attempt,
    publish,
    reduce,
    take_batch,
    take_over,
    update,
)


def server_step(context: StepContext, batches: Batches) -> Step:
    """Makes one optimizer step with parameter servers, on all workers or on none, and returns it."""
    step = begin_step(context, batches.title.format(context.done + 1))
    for attempt in attempts(context):  # again after a lost peer
        with attempt:
            open_attempt(context, step)  # in a new generation, the servers get the state
            load_batch(context, step, batches.load(0, context.shares.assignment))
            while True:
                forward_backward(context, step)  # pushes each bucket to the servers that hold its parameters
                reduce(context, step)  # losses and counts, among workers
                if not must_repeat(context, step):  # the same on all workers
                    break
                if step.batch.fine and not context.shares.assignment.fine:
                    take_batch(context, step, batches.load(0, context.shares.assignment))
            examine(context, step)
            # The norm comes from the servers, once they have all pushes; the update tells them to apply the sums.
            attempt.commit(partial(grad_norm, context, step), partial(update, context, step))
            complete(context, step)  # reads the new weights
    if attempt.taken is not None:
        take_over(context, step, *attempt.taken[1])
    publish(context, step)
    return step


class SyncServers:
    """Trains in steps with parameter servers; see train/strategy.py."""

    lockstep = True

    def __init__(self, context: StepContext) -> None:
        self.context, self.servers = context, ServerTeam(context, watch_team=True)
        self.advance: Callable[[Batches], Step | None] = partial(server_step, context)

    def assignment(self) -> Assignment:
        """Returns how the micro-batches of a global batch are assigned to workers at present."""
        return self.context.current_assignment()

    def shares(self, batches: int, weights: Sequence[float]) -> list[int]:
        """Returns how many micro-batches of a global batch each unit gets, by the units' weights."""
        return [len(part) for part in deal(batches, weights)]

    def memory(self) -> dict[str, int]:
        """Returns the largest number of bytes that this worker holds, by category."""
        return self.context.replica.memory()

    def state(self, done: int | None) -> dict[str, Any]:
        """Returns what further steps depend on, for a checkpoint with the optimizer state of the servers."""
        return add_server_state(self.context, done)

    def load(self, saved: dict[str, Any], newcomer: bool) -> None:
        """Loads what `state` returned, possibly under another plan."""
        self.context.load_state(saved)

    def end_loop(self) -> None:
        """Does nothing: nothing is under way between two steps."""
