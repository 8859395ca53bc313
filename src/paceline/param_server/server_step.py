"""The step with parameter servers: workers push gradients to servers, which update the weights and send them back."""

from __future__ import annotations

from functools import partial

from paceline.param_server.server_team import ServerTeam, add_server_state
from paceline.train.step import Step
from paceline.train.step_context import Batches, StepContext
from paceline.train.step_verbs import (
    attempts,
    begin_step,
    complete,
    end_step,
    examine,
    forward_backward,
    grad_norm,
    load_batch,
    load_whole,
    must_repeat,
    open_attempt,
    reduce,
    update,
)
from paceline.train.strategy import LockstepStrategy


def server_step(context: StepContext, batches: Batches) -> Step | None:
    """Makes one optimizer step with parameter servers, on all workers or on none, and returns it.

    Returns None if an iterable dataset has no more rows.
    """
    step = begin_step(context, batches.title.format(context.done + 1))
    for attempt in attempts(context, admits=batches.admits):  # again after a lost peer
        with attempt:
            open_attempt(context, step)  # in a new generation, the servers get the state
            batch = batches.load(0, context.shares.assignment)
            if batch is None:  # an iterable dataset has ended
                attempt.commit(None)
                continue
            load_batch(context, step, batch)
            while True:
                forward_backward(context, step)  # pushes each bucket to the servers that hold its parameters
                reduce(context, step)  # losses and counts, among workers
                if not must_repeat(context, step):  # the same on all workers
                    break
                load_whole(context, step, batches)
            examine(context, step)
            # The norm comes from the servers, once they have all pushes; the update tells them to apply the sums.
            attempt.commit(partial(grad_norm, context, step), partial(update, context, step))
            complete(context, step)  # reads the new weights
    return end_step(context, step, attempt)


def build_server_steps(context: StepContext) -> LockstepStrategy:
    """Returns what trains in steps with parameter servers, whose optimizer state is in its checkpoints."""
    ServerTeam(context, watch_team=True)  # the context holds it, for new generations
    return LockstepStrategy(context, server_step, add_server_state)
