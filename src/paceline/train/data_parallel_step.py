"""The data-parallel step: every worker computes its micro-batches, and the sums of all update every copy of the model.

It is the same step with shards of the optimizer's state, of gradients or of parameters, and with a model that is cut in
stages, by sequences or by layers: these are in the layout of the replica.
"""

from __future__ import annotations

from functools import partial

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


def data_parallel_step(context: StepContext, batches: Batches) -> Step | None:
    """Makes one optimizer step of the team, on all of its workers or on none, and returns it.

    Returns None if an iterable dataset has no more rows.
    """
    step = begin_step(context, batches.title.format(context.done + 1))
    for attempt in attempts(context, admits=batches.admits):  # again after a lost peer
        with attempt:
            open_attempt(context, step)
            batch = batches.load(0, context.shares.assignment)
            if batch is None:  # an iterable dataset has ended
                attempt.commit(None)
                continue
            load_batch(context, step, batch)
            while True:
                forward_backward(context, step)
                reduce(context, step)  # all gradients have arrived
                if not must_repeat(context, step):  # the same on all workers
                    break
                load_whole(context, step, batches)
            examine(context, step)
            attempt.commit(partial(grad_norm, context, step), partial(update, context, step))
            complete(context, step)
    return end_step(context, step, attempt)
