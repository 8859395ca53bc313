"""The asynchronous window: workers push gradients whenever they have them, and the servers update the weights at once.

Each worker computes whole global batches, with weights that are at most as old as the plan's bound allows (stale
synchronous parallel, Ho et al., "More Effective Distributed ML via a Stale Synchronous Parallel Parameter Server", NIPS
2013).
"""

from __future__ import annotations

import math
from functools import partial

from paceline.param_server.worker_window import (
    WINDOW,
    WindowStrategy,
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


def async_window(strategy: WindowStrategy, batches: Batches) -> Step:
    """Makes a window of asynchronous updates, and returns it as one Step that counts all its updates.

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
                        batch = load_ticket(context, window, ticket, batches, whole_batch(context))
                        if batch is not None:
                            compute_ticket(context, window, ticket, batch)
                    end_window(context, step, window)
                if exchange_window(context, step, window):  # all workers made the same updates
                    break
            sum_log(step, window.log)
            context.note_computed_state()
            step.spent["compute"] = step.computed - step.began - step.spent["data"]
            attempt.commit(None, partial(apply_window, context, step, window))
            if context.transactions.fault_point is not None:
                context.transactions.fault_point("applied")
    if attempt.taken is not None:
        *result, step.steps = attempt.taken[1]
        take_over(context, step, *result)
    publish(context, step)
    return step


def build_async_windows(context: StepContext) -> WindowStrategy:
    """Returns the strategy that trains in windows of asynchronous updates."""
    updates, staleness = context.plan.window or WINDOW, context.plan.staleness
    limit = "no limit" if staleness == math.inf else f"at most {staleness or 0:g}"
    what = f"updates are asynchronous: workers synchronize every {updates} updates"
    what += f"; batches that a worker may be ahead of the slowest: {limit}"
    return WindowStrategy(context, async_window, what)
