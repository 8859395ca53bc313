"""Registers what observes the steps of a trainer, and what adds fields to their vectors. A step names none of it.

Only what is on is registered: a feature that the plan, the team or the run folder leaves out costs a step no call.
"""

from __future__ import annotations

import time
from functools import partial

from paceline.comm.communicator import refusing_collectives
from paceline.compute.grad_noise import EVERY, looked_at
from paceline.compute.job import StepSums
from paceline.compute.microbatches import name_of
from paceline.train.step import Step
from paceline.train.step_context import StepContext


def register_observers(context: StepContext) -> None:
    """Registers what adds fields to the vectors of a trainer's steps, and what observes the steps once they count."""
    run, replica, plan, add = context.run, context.replica, context.plan, context.contributions.append
    is_alone = run.team.size == 1 and not context.transactions.elastic
    if run.checkpoints.storage is not None:
        add(lambda: {"save": run.wants_save(), **run.checkpoints.fields})
    if context.transactions.elastic:
        add(lambda: {"enter": context.transactions.newcomers})
    if replica.codec is not None:
        add(lambda: {"tune": replica.error_feedback.wishes})
    if not is_alone:
        add(lambda: {"look": context.group.rank == 0 and context.group.size > 1 and context.weights.has_time})
    observe = context.observers.append
    if replica.codec is not None or not is_alone:
        observe(partial(observe_links, context))
    observe(partial(observe_computing, context))
    observe(context.notes.observe)
    if looked_at(EVERY - 1, plan, replica.mesh.unit, context.group.size, context.job):
        observe(partial(observe_noise, context))
    if context.shares.balance is not None and not is_alone:
        observe(context.shares.observe)
    if not is_alone:
        observe(context.weights.observe)
    if context.job.skeleton is not None and not run.check.asks:
        observe(FlopsObserver(context))
    observe(lambda step: run.record_agreed(step.agreed))


class FlopsObserver:
    """Counts the model's operations once, on the first worker, if training takes longer than `AFTER` seconds."""

    AFTER = 5.0

    def __init__(self, context: StepContext) -> None:
        self._context, self._begun = context, time.monotonic()

    def __call__(self, step: Step) -> None:
        """Counts with the shapes of a micro-batch of this step. It is not called again after that."""
        context = self._context
        if time.monotonic() - self._begun < self.AFTER:
            return
        # A new list, because `publish` iterates the present one.
        context.observers = [one for one in context.observers if one != self]
        skeleton, context.job.skeleton = context.job.skeleton, None
        if context.run.team.group.rank or skeleton is None or not step.batch.share:
            return
        micro_batch, device = step.batch.share[0], context.job.device
        for state in context.run.trainers.states:  # the forward may change it
            state.begin_step()
        with context.streams.preserved(), refusing_collectives():
            flops = skeleton.count(context.job.script_forward, micro_batch.batch, micro_batch.rows)
        context.restore_state()
        name = name_of(device)
        fields = {"per_row": flops.per_row, "estimated": flops.is_estimated, "uncounted": [*flops.uncounted]}
        context.reporter.journal.write("flops", trainer=context.trainer, device=name, **fields)


def observe_links(context: StepContext, step: Step) -> None:
    """Updates what is known of the links between hosts."""
    spent = [seconds for part, seconds in step.spent.items() if part not in ("data", "other")]
    context.replica.error_feedback.step(sum(spent))


def observe_computing(context: StepContext, step: Step) -> None:
    """Updates the figures of this worker's steps, and the merging of micro-batches."""
    sums, figures = step.sums, context.figures
    if sums is None:
        return
    figures.observe(step)
    if figures.made == 3 and context.run.team.group.rank == 0:
        codecs = context.job.device.type == "cpu" and not context.plan.exact
        if suggestion := context.replica.error_feedback.advice(figures.busy / 2, codecs):
            context.notes.note(suggestion, context.done)
    votes = step.agreed.no_merge or step.agreed.tested or sums.out_of_memory or sums.news
    if (votes or len(step.batch.micro_batches) > 1) and step.options.merge == context.merging.size:
        learn_merging(context, step, sums, step.spent["compute"] - step.waited)


def learn_merging(context: StepContext, step: Step, sums: StepSums, seconds: float) -> None:
    """Updates the merging of micro-batches from the `seconds` of forward and backward."""
    merging, share = context.merging, step.batch.share
    decision = merging.learn(sums, step.agreed, seconds, sum(m.rows for m in share), len(share))
    if decision is not None:
        context.reporter.decide(context.trainer, *decision)


def observe_noise(context: StepContext, step: Step) -> None:
    """Updates the gradient noise scale from the steps that looked at it."""
    if step.agreed.sq_norm_rows and step.sums is not None:
        for news in context.noise.learn(step.agreed, step.norm, step.batch.rows):
            context.reporter.journal.write("noise", trainer=context.trainer, step=context.done, **news)
