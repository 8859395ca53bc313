"""Forward and backward of one worker's micro-batches: seeds, autocast, loss, gradients divided by a count."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from paceline.base.batching import add_metrics, exact_sum, stream_seed
from paceline.comm.gradient_buckets import Bucket
from paceline.comm.gradient_sinks import GradSink
from paceline.compute.forbidden_calls import refuse_loop_calls
from paceline.compute.grad_hooks import weighed
from paceline.compute.grad_noise import squares
from paceline.compute.job import ELSEWHERE, LOSS_FORMS, StepOptions, StepSums, TrainingJob
from paceline.compute.loss_counts import CountCheck, is_pair, refuse_metric_counts, refuse_no_count
from paceline.compute.microbatch_guard import MicroBatchGuard
from paceline.compute.microbatch_merging import USERS_OWN
from paceline.compute.microbatches import Chunk, MicroBatch, merged
from paceline.errors import LossError, UsageError, a, add_hint

Ready = Callable[[Bucket], None]


class Runner:
    """Computes micro-batches of a job in chunks, each under the `guard`; gradients go to the `grad_sink` as autograd
    makes them.
    """

    def __init__(self, job: TrainingJob, grad_sink: GradSink, gathered: bool) -> None:
        self.job, self.grad_sink, self.gathered = job, grad_sink, gathered
        self.params = list(job.named.values())
        self.frozen = {name: param for name, param in job.model.named_parameters() if not param.requires_grad}
        self.guard = MicroBatchGuard(job, gathered)
        self.counts = CountCheck(self.guard.streams, alone=job.unit == 1 and job.lockstep is None)
        self.on_loss: Callable[[Any, Loss], None] | None = None  # gets each output with its loss, before the backward
        self._squares = 0.0  # of gradients that went to other workers
        self._sent: list[Bucket] = []

    def restore(self, void: bool = False) -> None:
        """Restores buffers to the step's initial values. With `void`, the step is abandoned."""
        self.guard.restore(void)

    def run(self, micro_batches: Sequence[MicroBatch], options: StepOptions, ready: Ready) -> StepSums:
        """Forward and backward over this worker's micro-batches, leaving sums; calls `ready` with complete buckets."""
        sent = self._sent = list[Bucket]()

        def send(bucket: Bucket) -> None:
            sent.append(bucket)
            if len(sent) == 1 and options.fault_point is not None:
                options.fault_point("backward")
            if options.noise_sample == "all":
                self._squares += squares([bucket.flat])
            ready(bucket)

        guard = self.guard
        sums = guard.begin(options)
        for param in self.params:
            param.grad = None
        for name, param in self.frozen.items():
            if param.requires_grad:
                what = f"{name} requires gradients now, but was frozen when the Trainer was created"
                raise UsageError(what, "create the Trainer while the parameter is trainable, and freeze it afterwards")
        if (begin := self.grad_sink.begin) is not None:
            begin(send, options.micro_batches)
        self._squares = 0.0
        order = [m for m in micro_batches if not m.is_dummy]
        guard.may_merge(order, sums)
        order = order[::-1] if options.reverse else order
        sums.computed = bool(order)
        dummies = [Chunk([m], m.batch) for m in micro_batches if m.is_dummy]
        if sums.no_merge or options.merge == 1:
            chunks = [Chunk([m], m.batch) for m in order]
        else:
            chunks = merged(order, options.merge)
        try:
            parts = self._through([*dummies, *chunks], sums, options)
        except torch.OutOfMemoryError:
            if options.merge == 1 or sent:  # sent gradients cannot be taken back
                raise
            self.restore(void=True)  # a backward may have added some gradients: start again, one micro-batch at a time
            self.grad_sink.abandon(again=True)
            sums = Runner.run(self, micro_batches, replace(options, merge=1), ready)
            sums.out_of_memory = True
            return sums
        if not guard.idle or (options.test_merging and len(order) > 1):
            guard.probe.observe(partial(self._observed, sums), guard.models, order, sums, options)
        guard.end(sums, options)
        sums.unused = self.grad_sink.flush()
        self._add_up(parts, sums)
        if options.noise_sample == "all":
            sums.sq_norms = self._squares, sums.count
        return sums

    def outputs(self, micro_batches: Sequence[MicroBatch], options: StepOptions) -> list[tuple[MicroBatch, Any]]:
        """Outputs of the forward for each micro-batch, gathered over the unit and without gradients.

        Buffers are restored after each forward. Micro-batches whose output is on another worker are left out.
        """
        guard, outputs = self.guard, []
        guard.begin(options)
        for chunk in self._forwards([Chunk([m], m.batch) for m in micro_batches]):
            (one,) = chunk.micro_batches
            guard.streams.seed(stream_seed(self.job.seed, options.step, one.index))
            context = self.job.autocast(), self.user_code()
            with chunk.noted, _explain_single_row(chunk, options), torch.no_grad(), context[0], context[1]:
                output = self.job.forward(self.job.model, chunk.batch)
                if output is not ELSEWHERE:
                    outputs.append((one, self.job.gather_output(output)))
            guard.undo()
        return outputs

    def _forwards(self, chunks: Sequence[Chunk]) -> Iterator[Chunk]:
        """Yields the chunks in the order in which they run; a pipeline has another order."""
        yield from chunks

    def _through(self, chunks: Sequence[Chunk], sums: StepSums, options: StepOptions) -> list[Loss]:
        """Runs forward and backward of all chunks in turn; a merged chunk that fails is run again one by one."""
        queue, parts = deque(chunks), list[Loss]()
        while queue and not sums.failed:
            chunk = queue.popleft()
            if chunk.micro_batches[0].is_dummy:
                self._run_dummy(chunk, options, last=not queue)
                continue
            if not parts and options.fault_point is not None:
                options.fault_point("forward")
            part = self._run(chunk, sums, options, last=not queue)
            if part is not None:
                parts.append(part)
                if options.noise_sample == "first" and len(parts) == 1 and queue:
                    squared_norm = squares(param.grad for param in self.params if param.grad is not None)
                    sums.sq_norms = squared_norm, float(part.count)
            elif not sums.failed:  # a merged chunk must not be merged: run its micro-batches one by one
                queue.extendleft(Chunk([m], m.batch) for m in reversed(chunk.micro_batches))
        return parts

    def _run(self, chunk: Chunk, sums: StepSums, options: StepOptions, last: bool) -> Loss | None:
        """Runs forward and backward of one chunk; None if its micro-batches must run one by one."""
        guard = self.guard
        if sums.no_merge and len(chunk.micro_batches) > 1:
            return None
        try:
            with chunk.noted:
                if not guard.idle:
                    part = self._forward(chunk, sums, options)
                else:
                    part = self._loss(chunk) if self.job.precision else self._call_loss(chunk)
                if part is None:
                    return None
                self._backward(part, options, last)
        except (*USERS_OWN, LossError) as error:
            if "backward through the graph a second time" in str(error):
                add_hint(error, "the trainer calls backward(): do not call it in the loss or forward")
            if chunk.plain or self._sent or isinstance(error, torch.OutOfMemoryError):
                raise
            guard.probe.give_up(chunk, sums, error)
            return None
        if not guard.idle:
            guard.after_backward(chunk, sums, options)
        mismatches = [m.row_mismatch for m in chunk.micro_batches if m.row_mismatch]
        if mismatches and part.mean is not None:
            sums.news["rows"] = mismatches[0], ""
        return part.detached()

    def _backward(self, part: Loss, options: StepOptions, last: bool, is_dummy: bool = False) -> None:
        """Runs the backward of one chunk. User hooks see the gradient of the mean, which is weighted after them."""
        hooked = options.hooked or self.guard.probe.hooks.where
        weight = float(part.count) / options.expected if hooked else None
        if (begin_backward := self.grad_sink.begin_backward) is not None:
            begin_backward(last, is_dummy, weight)
        if weight is None:
            # A dummy's gradients are zeros: experts add them to those of other workers' micro-batches.
            part.total.mul(0.0 if is_dummy else 1.0 / options.expected).backward()
        else:
            mean = part.total / (part.count or 1) if part.mean is None else part.mean
            with weighed(self.params, weight):
                mean.backward()
        if (end_backward := self.grad_sink.end_backward) is not None:
            end_backward()

    def _run_dummy(self, chunk: Chunk, options: StepOptions, last: bool) -> None:
        """Runs a dummy micro-batch, so that all workers of a replica run equally many; its sums are dropped."""
        if not self.guard.idle:
            self.guard.streams.seed(stream_seed(self.job.seed, options.step, chunk.micro_batches[0].index))
        self._backward(self._loss(chunk), options, last, is_dummy=True)
        self.restore()

    def _forward(self, chunk: Chunk, sums: StepSums, options: StepOptions) -> Loss | None:
        """Runs forward and loss of one chunk under the guard; None if its micro-batches must run one by one."""
        guard = self.guard
        guard.before_forward(chunk, sums, options)
        with _explain_single_row(chunk, options), nullcontext() if guard.probe.done else guard.probe.hooks.watched():
            part = self._loss(chunk)
        return part if guard.after_forward(chunk, sums, options) else None

    def _observed(self, sums: StepSums, chunk: Chunk) -> Loss:
        """Computes the loss of one chunk, from the step's initial buffers if all micro-batches start from them."""
        if sums.records is not None:
            self.guard.carried.restore()
        return self._loss(chunk).detached()

    def _loss(self, chunk: Chunk) -> Loss:
        with self.job.autocast(), self.user_code():
            return self._call_loss(chunk)

    def _call_loss(self, chunk: Chunk) -> Loss:
        """Calls the user's forward and loss."""
        job = self.job
        output = job.forward(job.model, chunk.batch)
        if output is ELSEWHERE:
            return Loss(torch.zeros((), dtype=torch.float64), 0.0, {}, chunk)
        cached_grads = chunk.micro_batches[0].cached_grads
        result = job.loss(output, chunk.batch if cached_grads is None else cached_grads)
        loss = Loss.of(result, chunk, any(param.requires_grad for param in self.params))
        if cached_grads is None and loss.mean is None and not self.counts.done:
            full = partial(job.gather_output, output)
            self.counts.check(job.loss, full, chunk.batch, loss.count, chunk.rows, self.guard.models)
        if self.on_loss is not None:
            self.on_loss(output, loss)
        return loss

    def user_code(self) -> AbstractContextManager[None]:
        """Returns the context for the user's loss and forward; in the first step it refuses calls such as step()."""
        if self.guard.probe.done:
            return nullcontext()
        return refuse_loop_calls([*self.params, *self.job.local_params.values()], self.gathered)

    def _add_up(self, parts: Sequence[Loss], sums: StepSums) -> None:
        if not parts:
            return
        losses = torch.stack([part.total for part in parts]).cpu().double().tolist()
        counts = [float(part.count) for part in parts]
        self.counts.refuse_values(counts, losses, [part.chunk for part in parts])
        sums.loss, sums.count = exact_sum(losses), math.fsum(counts)
        bad = (part for part, loss in zip(parts, losses, strict=True) if not math.isfinite(loss))
        sums.bad_samples = [source for part in bad for source in part.chunk.sources]
        for part in parts:
            if part.metrics:
                add_metrics(sums.metrics, part.metrics)
        if sums.metrics:
            refuse_metric_counts(sums.metrics)
        if self.job.exact:
            for part, loss, count in zip(parts, losses, counts, strict=True):
                metrics = {name: (float(pair[0]), float(pair[1])) for name, pair in part.metrics.items()}
                sums.parts.append((part.chunk.micro_batches[0].index, loss, count, metrics))


@contextmanager
def _explain_single_row(chunk: Chunk, options: StepOptions) -> Iterator[None]:
    """Turns BatchNorm's ValueError about a single row into a UsageError that names the row and the cure."""
    try:
        yield
    except ValueError as error:
        if chunk.rows > 1 or "more than 1 value per channel" not in str(error):
            raise
        raise UsageError(f"BatchNorm cannot normalise a single row: {chunk.source}", options.advice) from None


@dataclass
class Loss:
    """The loss of one chunk: its sum (a tensor), its count, its metrics."""

    total: torch.Tensor
    count: Any
    metrics: Mapping[str, tuple[Any, Any]]
    chunk: Chunk
    mean: torch.Tensor | None = None  # if that is what the loss returned

    @staticmethod
    def of(result: Any, chunk: Chunk, trainable: bool) -> Loss:
        """Reads what the user's loss function returned for a chunk: a mean, (sum, count) or (sum, count, metrics).

        Raises LossError for any other form, and if a `trainable` model's loss has no gradient.
        """
        metrics: Mapping[str, tuple[Any, Any]] = {}
        mean = result if isinstance(result, torch.Tensor) else None
        if isinstance(result, torch.Tensor):
            count: Any = chunk.rows
            total = result * count if result.numel() == 1 else result
        elif isinstance(result, tuple) and len(result) in (2, 3) and isinstance(result[0], torch.Tensor):
            total, count = result[0], result[1]
            metrics = result[2] if len(result) == 3 else {}
            refuse_no_count(count)
        else:
            what = f"a tuple of length {len(result)}" if isinstance(result, tuple) else a(type(result).__name__)
            raise LossError(f"the loss returned {what}", LOSS_FORMS)
        if total.numel() != 1:
            raise LossError(f"the loss returned a tensor of shape {tuple(total.shape)}", LOSS_FORMS)
        if trainable and torch.is_grad_enabled() and not total.requires_grad:
            cure = "compute the loss from the model's output, without detach(), item() or no_grad()"
            raise LossError("the loss does not depend on any trainable parameter", cure)
        if not isinstance(metrics, Mapping) or not all(map(is_pair, metrics.values())):
            raise LossError(f"the loss returned metrics {' '.join(repr(metrics).split()):.80}", LOSS_FORMS)
        return Loss(total.reshape(()), count, metrics, chunk, mean)

    def detached(self) -> Loss:
        """A copy without autograd's graph, and without the mean."""
        metrics = {name: (_bare(total), _bare(count)) for name, (total, count) in self.metrics.items()}
        count = self.count.detach() if isinstance(self.count, torch.Tensor) else self.count
        return Loss(self.total.detach(), count, metrics, self.chunk)


def _bare(value: Any) -> Any:
    return value.detach() if isinstance(value, torch.Tensor) else value
