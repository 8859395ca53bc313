"""The data-parallel step with the option --verify-steps: chosen steps are verified before they are applied."""

from __future__ import annotations

from functools import partial

from paceline.errors import UsageError
from paceline.train.data_parallel_step import data_parallel_step
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
    open_attempt,
    reduce,
    update,
)
from paceline.train.step_verifier import StepCheck, StepVerifier
from paceline.train.strategy import LockstepStrategy


def verified_step(verifier: StepVerifier, context: StepContext, batches: Batches) -> Step | None:
    """Makes one step as `data_parallel_step` does. If the step was drawn, all workers verify it before the update."""
    if not verifier.is_due(context.done):
        return data_parallel_step(context, batches)
    step = begin_step(context, batches.title.format(context.done + 1))
    for attempt in attempts(context, admits=batches.admits):
        check = StepCheck(verifier, step, batches)
        with attempt, check.protected():
            open_attempt(context, step)
            batch = batches.load(0, context.shares.assignment)
            if batch is None:  # an iterable dataset has ended
                attempt.commit(None)
                continue
            load_batch(context, step, batch)
            while True:
                check.compute_other()
                forward_backward(context, step)
                check.close()
                reduce(context, step)
                if not check.must_repeat():
                    break
                load_whole(context, step, batches)
            examine(context, step)
            attempt.commit(partial(grad_norm, context, step), partial(update, context, step))
            complete(context, step)
            check.finish()
    return end_step(context, step, attempt)


def build_steps(context: StepContext) -> LockstepStrategy:
    """Returns the strategy of data-parallel steps, with verification where --verify-steps asks for it."""
    every = context.run.team.world.verify_steps
    if not every:
        return LockstepStrategy(context, data_parallel_step)
    return LockstepStrategy(context, partial(verified_step, StepVerifier(context, every)))


def refuse_unverified(context: StepContext) -> None:
    """Raises UsageError if --verify-steps was given and steps of this plan or loss cannot be computed twice."""
    if not context.run.team.world.verify_steps:
        return
    plan = context.plan
    word = next((f"{name}={getattr(plan, name)}" for name in ("local", "server") if getattr(plan, name)), "")
    word = word or ("loss_over=" if context.job.over is not None else "")
    if word:
        raise UsageError(f"--verify-steps cannot verify steps with {word} yet", f"leave --verify-steps or {word} out")
