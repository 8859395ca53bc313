"""Steps with backup workers: the servers update the weights when all workers except the slowest have pushed their part.

The parts of the late ones are dropped (Chen et al., "Revisiting Distributed Synchronous SGD", ICLR workshop 2016).
"""

from __future__ import annotations

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


def backup_window(strategy: WindowStrategy, batches: Batches) -> Step:
    """Makes a window of steps that do not wait for the last workers, and returns it as one Step.

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


def build_backup_windows(context: StepContext) -> WindowStrategy:
    """Returns the strategy whose steps do not wait for the slowest workers."""
    updates, backup = context.plan.window or WINDOW, context.plan.backup
    late = "worker, whose" if backup == 1 else f"{backup} workers, whose"
    what = f"each step drops the slowest {late} rows are not used; workers synchronize every {updates} updates"
    return WindowStrategy(context, backup_window, what)
