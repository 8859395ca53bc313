"""The verbs of a step, in order: load, forward and backward, reduce, repeat if need be, norm, update, publish."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch

from paceline.base.batching import Agreed, VectorLayout
from paceline.base.heartbeat import HEARTBEAT
from paceline.compute.grad_noise import noise_fields
from paceline.compute.job import StepSums
from paceline.compute.loss_scale import LossScale
from paceline.compute.microbatches import MicroBatch, cut, in_rows, to_device
from paceline.data.change_detection import Counters
from paceline.data.fingerprint import refuse_lengths
from paceline.errors import MetricError, UsageError
from paceline.session.worker_batch import WorkerBatch
from paceline.team.transactions import Attempt
from paceline.train.nonfinite import Refusal
from paceline.train.step import Step
from paceline.train.step_context import Batches, StepContext
from paceline.train.step_notes import describe_changing_counters

_NOTHING = torch.empty(0, dtype=torch.float64)


def begin_step(context: StepContext, name: str) -> Step:
    """Begins the next step, whose collectives have this name."""
    if not torch.is_grad_enabled():
        what = "the loop over steps() runs under torch.no_grad() or inference_mode(), which disables training"
        raise UsageError(what, "use them only around code inside the loop that needs no gradients")
    if context.reporter.traffic.trainer != context.trainer:
        context.reporter.traffic.turn(context.trainer)
    return Step(context.done, float(context.job.optimizers[0].param_groups[0]["lr"]), name)


def attempts(context: StepContext, undo: Callable[[], None] | None = None, admits: bool = False) -> Attempt:
    """Returns the attempts at a step. If one fails, its effects are undone, and `undo` is called. `admits`: newcomers
    may enter before it is attempted again.
    """

    def undo_all() -> None:
        context.replica.abort()
        if undo is not None:
            undo()
        context.restore_state()

    # Residuals of compression that differ between workers are summed between two steps, before newcomers enter.
    admits &= not context.run.trainers.error_feedback.differ
    return context.transactions.attempts("steps", undo_all, admits)


def open_attempt(context: StepContext, step: Step) -> None:
    """Begins an attempt: takes memory in a new generation, and a digest of the weights where they are compared."""
    step.began, step.generation = time.perf_counter(), context.transactions.number
    if context.bound_generation != step.generation:
        context.rebind(step.name)
    if context.transactions.fault_point is not None:
        context.transactions.fault_point("loading")
    for state in context.run.trainers.states:
        if state:
            state.begin_step()
    context.weights.refused = True  # until the update: the forwards of a refused step may have changed weights
    is_compared = context.run.team.group.size > 1 and context.weights.compares_before(step.number)
    step.digest = context.weights.digest_state() if is_compared else None


def load_batch(context: StepContext, step: Step, batch: WorkerBatch | None) -> None:
    """Takes this worker's micro-batches of a step onto its device, and decides how they are computed."""
    take_batch(context, step, batch)
    step.scale = 1.0 if context.scaling is None else context.scaling.scale
    step.options = context.options(step)
    step.spent["data"] = time.perf_counter() - step.began
    if step.batch.single and step.batch.micro_batches and context.replica.mesh.pipeline == 1:
        _try_single_row(context, step)


def take_batch(context: StepContext, step: Step, batch: WorkerBatch | None) -> None:
    """Takes this worker's micro-batches onto its device."""
    assert batch is not None
    step.batch, step.indivisible = batch, not take_parts(batch.micro_batches, context.job.device)


def take_parts(micro_batches: Iterable[MicroBatch], device: torch.device) -> bool:
    """Takes micro-batches, or this worker's parts of them, onto a device. Returns False if one cannot be divided."""
    divisible = True
    for micro_batch in micro_batches:
        divisible &= micro_batch.take_part()
        if device.type != "cpu":
            micro_batch.batch = to_device(micro_batch.batch, device)
    return divisible


def load_whole(context: StepContext, step: Step, batches: Batches) -> None:
    """Loads whole micro-batches, if the step had parts of them and they must not be divided any more. Collective."""
    if step.batch.fine and not context.shares.assignment.fine:
        take_batch(context, step, batches.load(0, context.shares.assignment))


def forward_backward(context: StepContext, step: Step) -> StepSums:
    """Computes this worker's micro-batches. Their gradients are on their way to the sums of all workers."""
    migration, notes = context.transactions.migration, context.notes
    if context.group.size > 1:
        context.group.declare(step.name, check=False, kind="gradients")
    sends_all_sums = bool(context.plan.exact or context.scaling or context.plan.local or context.job.sparse)
    step.ahead = migration.step(context.trainer, sends_all_sums) if migration.senders and migration.is_sending else None
    on_reduced = None if step.ahead is None else step.ahead.sum
    # Not in the first step, in which many values are set for good.
    counters = _counters(context) if context.figures.made == 1 and "keeps" not in notes.announced else None
    waited = HEARTBEAT.all_waited
    step.sums = sums = context.replica.run(step.batch.micro_batches, step.options, on_reduced)
    step.waited = HEARTBEAT.all_waited - waited if context.replica.mesh.unit == 1 else 0.0
    if counters is not None and (names := counters.names()):
        notes.news["counts"] = describe_changing_counters(names), ""
    step.computed = time.perf_counter()
    step.spent["compute"] = step.computed - step.began - step.spent.get("data", 0.0)
    return sums


def reduce(context: StepContext, step: Step) -> Agreed:
    """Sums the step's vector over all workers, when all gradients have arrived. In the first step they agree on the
    names of the metrics before.

    Of the workers that compute a micro-batch together, one reports its sums: else they would count several times.
    """
    group, batch, sums, notes = context.group, step.batch, step.sums, context.notes
    assert sums is not None
    if sums.news or context.job.news:
        notes.news |= sums.news | context.job.news
    speaks = context.replica.mesh.unit == 1 or context.replica.mesh.speaks(group.rank)
    has_metrics = speaks and sums.computed and not sums.failed
    layout = context.layout
    if layout is None:
        layout = context.layout = _first_layout(context, sorted(sums.metrics) if has_metrics else None)
    if has_metrics and tuple(sorted(sums.metrics)) != layout.metrics:
        what = f"the loss returned metrics {sorted(sums.metrics)}, before that {list(layout.metrics)}"
        raise MetricError(what, "return the same names every time, with count 0 where there is nothing to count")
    if sums.records is not None and not speaks:
        sums.records.zero_()
    fields: dict[str, float] = {
        "count": sums.count if speaks else 0.0,
        "loss": sums.loss if speaks else 0.0,
        "tested": sums.tested,
        "no_merge": sums.no_merge,
        "no_split": sums.no_split or step.indivisible,
        "failed": sums.failed,
        "news": bool(notes.news) and bool(notes.untold()),
        "stop": context.run.notices.stop_signal is not None if context.stops is None else context.stops(),
    }
    if step.options.noise_sample:
        fields |= noise_fields(sums, step.options)
    if batch.read:
        fields |= {"streams": 1.0, "read": batch.read, "read_squares": batch.read**2}
    for contribute in context.contributions:
        fields |= contribute()
    # The update comes later: that of the last step stands for it.
    seconds = context.update_seconds + step.computed - step.began - step.waited
    metrics = sums.metrics if speaks else {}
    if layout.workers == 1 and not context.plan.exact:
        context.replica.agree(_NOTHING, sums, step.options)
        step.agreed = layout.alone(seconds, metrics, sums.unused, fields, step.digest or 0.0)
        return step.agreed
    spent = context.last_spent | step.spent
    packed = layout.pack(group.rank, seconds, metrics, sums.unused, fields, step.digest or 0.0, spent)
    rows = layout.rows(sums.parts if speaks else [], batch.count) if context.plan.exact else []
    vector = context.replica.agree(torch.tensor(packed + rows, dtype=torch.float64), sums, step.options).tolist()
    agreed = layout.unpack(vector[: len(packed)])
    step.agreed = layout.exactly(agreed, vector[len(packed) :]) if rows else agreed
    return step.agreed


def must_repeat(context: StepContext, step: Step) -> bool:
    """Returns whether all workers compute the step's gradients again, and prepares for it."""
    agreed, sums = step.agreed, step.sums
    assert sums is not None
    step.norm = 0.0
    divided = step.batch.fine and (agreed.no_merge + agreed.no_split > 0 or not math.isfinite(agreed.loss))
    if not (
        sums.sums_overflowed
        or divided
        or agreed.failed
        or (context.scaling is not None and _overflows(context, step, context.scaling))
        or (step.digest is not None and heals(context, step))
    ):
        return False
    context.restore_state()
    context.replica.abort(again=True)
    if agreed.failed:  # on some worker, perhaps before the names of its metrics were known
        step.options.merge, context.layout = 1, None
    if divided:  # a part of a micro-batch gives another result, or fails: all workers compute undivided ones
        context.shares.divide(tested=False, strict=True)
    return True


def heals(context: StepContext, step: Step) -> bool:
    """Compares the weights that the step began with. Returns whether some were healed, so that the step is
    repeated.
    """
    undo, step.digest = partial(context.replica.abort, again=True), None
    return context.weights.judge(context.group, step.agreed.digests, undo=undo)


def examine(context: StepContext, step: Step) -> None:
    """Gathers the workers' messages to the user and what else they wish, and refuses a step that cannot be applied."""
    if step.agreed.news:
        for worker_news in context.group.gather_json(context.notes.untold()):
            step.news = {**worker_news, **step.news}
    if step.agreed.tune:
        context.choose_codecs(anew=True)
    if step.agreed.streams and step.agreed.lengths_differ:
        refuse_lengths(context.replica.team, step.batch.read)
    refuse_nonfinite(context, step)
    context.note_computed_state()


def refuse_nonfinite(context: StepContext, step: Step) -> None:
    """Raises NonFiniteLossError if the loss is not finite. A count of zero is valid: the step changes nothing."""
    if not math.isfinite(step.agreed.loss):
        raise _refusal(context, step).of_loss()


def grad_norm(context: StepContext, step: Step) -> float:
    """Returns the norm of the mean gradient. Once all workers know it, all sums have arrived everywhere."""
    if context.transactions.fault_point is not None:
        context.transactions.fault_point("reduced")
    norm = step.norm or context.replica.norm(step.agreed, step.options)
    if not math.isfinite(norm):
        raise _refusal(context, step).of_gradient(step.agreed.loss / step.agreed.count)
    return norm


def update(context: StepContext, step: Step, norm: float) -> list[Any]:
    """Changes the weights. Returns the arguments of `take_over`, for workers that take over this worker's state."""
    sums, agreed, began = step.sums, step.agreed, time.perf_counter()
    assert sums is not None
    step.norm = norm
    if step.ahead is not None:
        buffers, expected = context.replica.grad_buffers.sums, step.options.expected
        step.ahead.end(buffers, dict(vars(agreed)), norm, expected, sums.records)
    context.run.checkpoints.copied()
    context.replica.update(sums, agreed, step.options, norm)
    context.done, context.weights.refused = step.number + 1, False
    context.expected = agreed.count or context.expected
    if context.scaling is not None and (why := context.scaling.took(step.scale)):
        context.reporter.decide(
            context.trainer, f"loss scale {context.scaling.scale:g} from step {context.done + 1}", why
        )
    account_update(context, step, began)
    return [dict(vars(agreed)), norm, step.lr, [step.batch.rows, step.batch.epoch]]


def account_update(context: StepContext, step: Step, began: float) -> None:
    """Accounts for the seconds of an update that `began` then, and for those between the gradients and the update."""
    context.update_seconds = time.perf_counter() - began
    step.spent |= {"reduce": began - step.computed, "update": context.update_seconds}


def complete(context: StepContext, step: Step) -> None:
    """Gathers the weights that other workers have updated. Collective."""
    began = time.perf_counter()
    if context.transactions.fault_point is not None:
        context.transactions.fault_point("applied")
    context.replica.complete()
    step.spent["update"] += time.perf_counter() - began


def take_over(
    context: StepContext, step: Step, agreed: dict[str, Any], norm: float, lr: float, sizes: Sequence[int]
) -> None:
    """Sets a step that counts although this worker lost its part of it: it has taken over another worker's state."""
    context.weights.refused = False
    rows, epoch = sizes
    step.agreed, step.norm, step.lr, step.batch = Agreed(**agreed), norm, lr, WorkerBatch([], 0, rows, epoch)
    step.sums, step.spent = None, {}


def end_step(context: StepContext, step: Step, attempt: Attempt) -> Step | None:
    """Publishes a step after its attempts and returns it; None if there were no rows for it."""
    if attempt.result is None:
        return None
    if attempt.taken is not None:
        take_over(context, step, *attempt.taken[1])
    publish(context, step)
    return step


def publish(context: StepContext, step: Step) -> None:
    """Hands a step that counts to the observers of steps."""
    # The seconds since the end of the last step that belong to no other part, such as those of the script.
    step.spent["other"] = max(0.0, time.perf_counter() - context.waiting_since - sum(step.spent.values()))
    context.last_spent = step.spent
    for observe in context.observers:
        observe(step)
    context.waiting_since = time.perf_counter()
    HEARTBEAT.step()


# -- helpers


def _counters(context: StepContext) -> Counters:
    """Returns the present state of the user's loss, forward and models besides parameters and buffers."""
    loss, forward = (getattr(one, "call", one) for one in (context.job.over or context.job.loss, context.job.forward))
    return Counters(context.job.beside, loss=loss, forward=forward)


def _try_single_row(context: StepContext, step: Step) -> None:
    """Before the first step of a loop with a later micro-batch of a single row: tries whether the model can
    normalise one row. Raises UsageError if not.
    """
    first = step.batch.micro_batches[0]
    if in_rows(first.batch, first.rows):
        row = MicroBatch(first.index, 1, cut(first.batch, range(1)), step.batch.single)
        with context.streams.preserved():
            context.replica.try_forward(row, step.options)


def _overflows(context: StepContext, step: Step, scaling: LossScale) -> bool:
    """Returns whether gradients overflow at the present loss scale. The step is then computed again with half of
    it.
    """
    if not math.isfinite(step.agreed.loss) or step.agreed.count <= 0:
        return False
    step.norm = context.replica.norm(step.agreed, step.options)
    if math.isfinite(step.norm) or (smaller := scaling.halved(step.scale)) is None:
        return False
    step.options.expected *= step.scale / smaller
    step.scale = smaller
    return True


def _refusal(context: StepContext, step: Step) -> Refusal:
    computed = step.batch.micro_batches, step.options, step.sums
    return Refusal(context.replica, context.group, f"step {step.number + 1}{step.of_island}", *computed)


def _first_layout(context: StepContext, metric_names: list[str] | None) -> VectorLayout:
    """Returns the layout of the step's vector. All workers that report metrics must report the same names."""
    all_names = context.group.gather_json(metric_names)
    known = [(rank, name) for rank, name in enumerate(all_names) if name is not None]
    for rank, other in known:
        if other != known[0][1]:
            raise MetricError(
                f"the loss returned metrics {known[0][1]} on worker {known[0][0]} and {other} on worker {rank}",
                "return the same names for all rows, with count 0 where there is nothing to count",
            )
    return VectorLayout(tuple(known[0][1]) if known else (), context.group.size, len(context.job.named))
