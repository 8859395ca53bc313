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
from paceline.compute.batchnorm import OTHERS, BufferChangeDetector
from paceline.compute.buffers import DECLARED, BufferMerger
from paceline.compute.forbidden_calls import refuse_loop_calls
from paceline.compute.grad_hooks import weighed
from paceline.compute.grad_noise import squares
from paceline.compute.job import ELSEWHERE, LOSS_FORMS, StepOptions, StepSums, TrainingJob
from paceline.compute.loss_counts import CountCheck, is_pair, refuse_metric_counts, refuse_no_count
from paceline.compute.microbatch_merging import HOOKED, USERS_OWN, MergeProbe
from paceline.compute.microbatches import Chunk, MicroBatch, merged
from paceline.compute.rng import RngState
from paceline.errors import ChangingBufferError, LossError, UsageError, a, add_hint

Ready = Callable[[Bucket], None]
_MERGED = "say how it is merged with paceline.buffer"


class Runner:
    """Computes micro-batches of a job in chunks; gradients go to the `grad_sink` as autograd makes them. What forwards
    leave in buffers is `carried` to the end of the step.
    """

    def __init__(self, job: TrainingJob, grad_sink: GradSink, gathered: bool) -> None:
        self.job, self.grad_sink, self.gathered = job, grad_sink, gathered
        self.params = list(job.named.values())
        self.frozen = {name: param for name, param in job.model.named_parameters() if not param.requires_grad}
        self.streams = RngState(job.device)
        self.observer = MergeProbe(job, self.streams, gathered)
        self.counts = CountCheck(self.streams, alone=job.unit == 1 and not gathered)
        self._squares = 0.0  # of gradients that went to other workers
        self._mark: tuple[Any, ...] = ()  # of the streams, before the last forward
        self.look_around()

    def look_around(self) -> None:
        """Takes the other trainers' models into view, as many as there are by now: a loss may run one of them."""
        self.seen = len(self.job.beside), *DECLARED
        self.models = [self.job.model, *(model for model in self.job.beside if model is not self.job.model)]
        self.carried = BufferMerger(self.models, self.job.exact)
        self.watch = BufferChangeDetector(self.models, self.carried.buffers())
        self.observer.hooks.beside(self.models)

    def restore(self, void: bool = False) -> None:
        """What forwards have left in buffers is undone, to where the step, or if it is `void` its first try, began."""
        self.carried.restore(void=void)
        self.watch.restore()

    def run(self, micro_batches: Sequence[MicroBatch], options: StepOptions, ready: Ready) -> StepSums:
        """Forward and backward over this worker's micro-batches, leaving sums; calls `ready` with complete buckets."""
        sent = self._sent = list[Bucket]()

        def send(bucket: Bucket) -> None:
            sent.append(bucket)
            if len(sent) == 1:
                options.fault_point("backward")
            if options.noise_sample == "all":
                self._squares += squares([bucket.flat])
            ready(bucket)

        try:
            return self._in_chunks(micro_batches, options, send)
        except torch.OutOfMemoryError:
            if options.merge == 1 or sent:  # what was sent cannot be taken back
                raise
        self.restore(void=True)  # a backward may have added a part of its gradients: all begins anew, one by one
        self.grad_sink.abandon(again=True)
        sums = self._in_chunks(micro_batches, replace(options, merge=1), send)
        sums.out_of_memory = True
        return sums

    def outputs(self, micro_batches: Sequence[MicroBatch], options: StepOptions) -> list[tuple[MicroBatch, Any]]:
        """Outputs of the forward for each micro-batch, gathered over the unit and without gradients.

        Buffers are restored after each forward. Micro-batches whose output is on another worker are left out.
        """
        self._open(options)
        outputs = []
        for chunk in self._forwards([Chunk([m], m.batch) for m in micro_batches]):
            (one,) = chunk.micro_batches
            self.streams.seed(stream_seed(self.job.seed, options.step, one.index))
            with chunk.noted, _explain_single_row(chunk, options), torch.no_grad(), self.job.autocast(), self.guard():
                output = self.job.forward(self.job.model, chunk.batch)
                if output is not ELSEWHERE:
                    outputs.append((one, self.job.gather_output(output)))
            self.undo()
        return outputs

    def _forwards(self, chunks: Sequence[Chunk]) -> Iterator[Chunk]:
        """Yields the chunks in the order in which they run; a pipeline has another order."""
        yield from chunks

    def undo(self) -> None:
        """Buffers are as when the run began."""
        self.carried.restore()
        if self.watch.changed(values=False) is not None:  # or else all would be copied
            self.watch.restore()

    def _open(self, options: StepOptions) -> StepSums:
        """A run begins: what follows may fail, and is undone to here."""
        if self.seen != (len(self.job.beside), *DECLARED):
            self.look_around()
        sums = StepSums(records=self.carried.begin(options, self.job.device))
        self.watch.mark(values=not self.observer.done)
        return sums

    def _in_chunks(self, micro_batches: Sequence[MicroBatch], options: StepOptions, ready: Ready) -> StepSums:
        sums = self._open(options)
        for param in self.params:
            param.grad = None
        for name, param in self.frozen.items():
            if param.requires_grad:
                what = f"{name} was frozen when the Trainer was made and is to be trained now"
                raise UsageError(what, "make the Trainer while it is trainable, then freeze it until its time comes")
        if (begin := self.grad_sink.begin) is not None:
            begin(ready, options.micro_batches)
        self._squares = 0.0
        order = [m for m in micro_batches if not m.is_dummy]
        sums.why = self.observer.why(self.carried.certain)
        sums.no_merge = bool(sums.why and order)
        order = order[::-1] if options.reverse else order
        dummies = [Chunk([m], m.batch) for m in micro_batches if m.is_dummy]
        parts = self._through([*dummies, *merged(order, 1 if sums.no_merge else options.merge)], sums, options)
        self.observer.observe(partial(self._observed, sums), self.models, order, sums, options)
        sums.unused = self.grad_sink.flush()
        self._add_up(parts, sums)
        if options.noise_sample == "all":
            sums.sq_norms = self._squares, sums.count
        return sums

    def _through(self, chunks: Sequence[Chunk], sums: StepSums, options: StepOptions) -> list[Loss]:
        """Runs forward and backward of all chunks in turn; a merged chunk that fails is run again one by one."""
        queue, parts = deque(chunks), list[Loss]()
        while queue and not sums.failed:
            chunk = queue.popleft()
            if chunk.micro_batches[0].is_dummy:
                self._run_dummy(chunk, options, last=not queue)
                continue
            if not parts:
                options.fault_point("forward")
            part = self._run(chunk, sums, options, last=not queue)
            if part is not None:
                parts.append(part)
                if options.noise_sample == "first" and len(parts) == 1 and queue:
                    squared_norm = squares(param.grad for param in self.params if param.grad is not None)
                    sums.sq_norms = squared_norm, float(part.count)
            elif not sums.failed:  # it is merged and may not be: its micro-batches one by one
                queue.extendleft(Chunk([m], m.batch) for m in reversed(chunk.micro_batches))
        return parts

    def _run(self, chunk: Chunk, sums: StepSums, options: StepOptions, last: bool) -> Loss | None:
        """Forward and backward of one chunk, the `last` of the step or not; None if it may not be computed so."""
        if sums.no_merge and len(chunk.micro_batches) > 1:
            return None
        try:
            with chunk.noted:
                with nullcontext() if self.observer.done else self.observer.hooks.watched():
                    part = self._forward(chunk, sums, options)
                if part is None:
                    return None
                self._backward(part, options, last)
        except (*USERS_OWN, LossError) as error:
            if "backward through the graph a second time" in str(error):
                add_hint(error, "the trainer calls backward(): leave it out of loss and forward")
            if chunk.plain or self._sent or isinstance(error, torch.OutOfMemoryError):
                raise
            self.observer.give_up(chunk, sums, error)
            return None
        if options.test_merging and not sums.no_merge and self.streams.has_changed(self._mark):
            sums.no_merge, sums.why = True, "the backward draws random numbers"
        if sums.records is not None:  # not before: a checkpointed BatchNorm runs again in backward
            self.carried.record(sums.records, chunk)
        mismatches = [m.row_mismatch for m in chunk.micro_batches if m.row_mismatch]
        if mismatches and part.mean is not None:
            sums.news["rows"] = mismatches[0], ""
        return part.detached()

    def _backward(self, part: Loss, options: StepOptions, last: bool, is_dummy: bool = False) -> None:
        """Runs the backward of one chunk. User hooks see the gradient of the mean, which is weighted after them."""
        hooked = options.hooked or self.observer.hooks.where
        weight = float(part.count) / options.expected if hooked else None
        if (begin_backward := self.grad_sink.begin_backward) is not None:
            begin_backward(last, is_dummy, weight)
        if weight is None:
            part.total.mul(1.0 / options.expected).backward()
        else:
            mean = part.total / (part.count or 1) if part.mean is None else part.mean
            with weighed(self.params, weight):
                mean.backward()
        if (end_backward := self.grad_sink.end_backward) is not None:
            end_backward()

    def _run_dummy(self, chunk: Chunk, options: StepOptions, last: bool) -> None:
        """Runs a dummy micro-batch, so that all workers of a replica run equally many; its sums are dropped."""
        self.streams.seed(stream_seed(self.job.seed, options.step, chunk.micro_batches[0].index))
        self._backward(self._loss(chunk), options, last, is_dummy=True)
        self.restore()

    def _forward(self, chunk: Chunk, sums: StepSums, options: StepOptions) -> Loss | None:
        """Forward and loss of one chunk, under the stream of its first micro-batch."""
        self.streams.seed(stream_seed(self.job.seed, options.step, chunk.micro_batches[0].index))
        looks = not sums.no_merge
        if sums.records is not None:
            self.carried.restore()
        self._mark = self.streams.snapshot() if looks else ()  # also for the backward, where the forward draws nothing
        with _explain_single_row(chunk, options):
            part = self._loss(chunk)
        drew = looks and self.streams.has_changed(self._mark)
        moved = self.carried.moved(values=options.test_merging) if looks else ""
        # Values are compared while the model is being observed, versions ever after.
        changed = self.watch.changed(values=options.test_merging)
        if changed is not None and options.record_buffers:
            self.watch.restore()
            cure = "change it in the body of the loop" if changed.startswith("parameter") else _MERGED
            cure += ", put that model in eval mode for the call" if cure is _MERGED and changed.endswith(OTHERS) else ""
            what = f"the forward changes the {changed}, which would come out differently on each worker"
            raise ChangingBufferError(what, f"{cure}, or train with one worker")
        self.observer.change |= changed is not None
        hooked = bool(self.observer.hooks.where) and not sums.no_merge  # it has just been found
        if drew or moved or hooked or changed is not None:
            sums.no_merge = True
            sums.why = moved or (HOOKED if hooked else f"the forward changes the {changed}")
            sums.why = "the forward draws random numbers" if drew else sums.why
            if len(chunk.micro_batches) > 1:
                self.restore()
                return None
        return part

    def _observed(self, sums: StepSums, chunk: Chunk) -> Loss:
        """The loss of one chunk, from the buffers that the step began with where all micro-batches start from them."""
        if sums.records is not None:
            self.carried.restore()
        return self._loss(chunk).detached()

    def _loss(self, chunk: Chunk) -> Loss:
        job = self.job
        with job.autocast(), self.guard():
            output = job.forward(job.model, chunk.batch)
            if output is ELSEWHERE:
                return Loss(torch.zeros((), dtype=torch.float64), 0.0, {}, chunk.sources, chunk.micro_batches[0].index)
            cached_grads = chunk.micro_batches[0].cached_grads
            result = job.loss(output, chunk.batch if cached_grads is None else cached_grads)
            loss = Loss.of(result, chunk, any(param.requires_grad for param in self.params))
            if cached_grads is None and loss.mean is None and not self.counts.done:
                self.counts.check(job.loss, output, chunk.batch, loss.count, chunk.rows, self.models)
        return loss

    def guard(self) -> AbstractContextManager[None]:
        """The context of the user's loss and forward: in the first step it refuses the calls of a loop by hand."""
        if self.observer.done:
            return nullcontext()
        return refuse_loop_calls([*self.params, *self.job.local_params.values()], self.gathered)

    def _add_up(self, parts: Sequence[Loss], sums: StepSums) -> None:
        if not parts:
            return
        losses = torch.stack([part.total for part in parts]).cpu().double().tolist()
        counts = [float(part.count) for part in parts]
        self.counts.refuse_values(counts, losses, [", ".join(part.sources) for part in parts])
        sums.loss, sums.count = exact_sum(losses), math.fsum(counts)
        bad = (part for part, loss in zip(parts, losses, strict=True) if not math.isfinite(loss))
        sums.bad_samples = [source for part in bad for source in part.sources]
        for part in parts:
            add_metrics(sums.metrics, part.metrics)
        refuse_metric_counts(sums.metrics)
        if self.job.exact:
            for part, loss, count in zip(parts, losses, counts, strict=True):
                metrics = {name: (float(pair[0]), float(pair[1])) for name, pair in part.metrics.items()}
                sums.parts.append((part.index, loss, count, metrics))


@contextmanager
def _explain_single_row(chunk: Chunk, options: StepOptions) -> Iterator[None]:
    """Turns BatchNorm's ValueError about a single row into a UsageError that names the row and the cure."""
    try:
        yield
    except ValueError as error:
        if chunk.rows > 1 or "more than 1 value per channel" not in str(error):
            raise
        raise UsageError(f"BatchNorm cannot normalise {chunk.source}, a single row", options.advice) from None


@dataclass
class Loss:
    """The loss of one chunk: its sum (a tensor), its count, its metrics."""

    total: torch.Tensor
    count: Any
    metrics: Mapping[str, tuple[Any, Any]]
    sources: list[str]
    index: int
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
            what = f"a tuple of {len(result)}" if isinstance(result, tuple) else a(type(result).__name__)
            raise LossError(f"the loss returned {what}", LOSS_FORMS)
        if total.numel() != 1:
            raise LossError(f"the loss returned a tensor of shape {tuple(total.shape)}", LOSS_FORMS)
        if trainable and torch.is_grad_enabled() and not total.requires_grad:
            cure = "compute it from the model's output, without detach(), item() or no_grad()"
            raise LossError("the loss does not depend on any trainable parameter", cure)
        if not isinstance(metrics, Mapping) or not all(map(is_pair, metrics.values())):
            raise LossError(f"the loss returned metrics {' '.join(repr(metrics).split()):.80}", LOSS_FORMS)
        return Loss(total.reshape(()), count, metrics, chunk.sources, chunk.micro_batches[0].index, mean)

    def detached(self) -> Loss:
        """A copy without autograd's graph, and without the mean."""
        metrics = {name: (_bare(total), _bare(count)) for name, (total, count) in self.metrics.items()}
        return Loss(self.total.detach(), _bare(self.count), metrics, self.sources, self.index)


def _bare(value: Any) -> Any:
    return value.detach() if isinstance(value, torch.Tensor) else value
