"""Runs micro-batches forward and backward through the pipeline stages."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from statistics import median
from typing import Any

import torch

from paceline.base.batching import stream_seed
from paceline.comm.gradient_buckets import Buckets
from paceline.compute.batchnorm import without_a_trace
from paceline.compute.forward_backward import Loss, Ready, Runner
from paceline.compute.job import StepOptions, StepSums
from paceline.compute.microbatch_merging import USERS_OWN
from paceline.compute.microbatches import Chunk, MicroBatch
from paceline.compute.verify import farthest, loss_apart, room, weighing
from paceline.errors import PacelineError, UsageError
from paceline.parallel.pipeline.schedule import FORWARD
from paceline.parallel.pipeline.stage import Pipeline

# Stage times: of the last KEPT steps, looked at after FIRST steps, and again whenever the number of steps has doubled.
KEPT, FIRST = 8, 16
_FULL, _BY_BLOCK = "whole", "by block"  # how one worker computes a micro-batch of the full model
_RESULTS = (
    "let blocks return what the loss or the head needs of them: what they put into a list or an attribute, and what "
    "hooks on layers inside of them keep, stays on the worker that has the block; and let neither forward nor loss add "
    "up the model's parameters (weight_decay= of the optimizer is a penalty on them); or leave pipeline= out"
)


class PipelineRunner(Runner):
    """Runs micro-batches through this worker's stages in the order of the pipeline schedule."""

    def __init__(self, pipeline: Pipeline, *runner_arguments: Any) -> None:
        super().__init__(*runner_arguments)
        self.pipeline = pipeline
        self.guard.may_idle = False  # draws go from stage to stage
        self._seconds: dict[int, deque[float]] = {stage: deque(maxlen=KEPT) for stage in pipeline.local_stages}
        assert isinstance(self.grad_sink, Buckets)
        self.grad_sink.late, self.grad_sink.among = frozenset(pipeline.shared), pipeline.add_up
        self._buckets = self.grad_sink
        self._compared = False

    def restore(self, void: bool = False) -> None:
        """Restores buffers as `Runner.restore` does. With `void`, also forgets what is in flight between stages."""
        super().restore(void)
        if void:
            self.pipeline.abandon()

    def run(self, micro_batches: Sequence[MicroBatch], options: StepOptions, ready: Ready) -> StepSums:
        """Runs the micro-batches of a step. The first one is compared with the full model before, once."""
        first = next((m for m in micro_batches if not m.is_dummy), None)
        if first is not None and not self._compared:
            self._compare(Chunk([first], first.batch), options)
            self._compared = True
        self.pipeline.waited = 0.0
        sums = super().run(micro_batches, options, ready)
        sums.waited = self.pipeline.waited
        return sums

    def _forwards(self, chunks: Sequence[Chunk]) -> Iterator[Chunk]:
        pipeline = self.pipeline
        self._survey(chunks)
        for kind, stage, number in pipeline.actions(len(chunks)):
            if kind == FORWARD:
                pipeline.set_stage(stage)
                yield chunks[number]
                pipeline.take_passed(stage)
        pipeline.set_stage(None)
        pipeline.finish()

    def _through(self, chunks: Sequence[Chunk], sums: StepSums, options: StepOptions) -> list[Loss]:
        if options.hooked or self.guard.probe.hooks.where:
            hook = self.guard.probe.hooks.where or "a gradient hook of another worker"
            raise UsageError(
                f"{hook} sees gradients, and pipeline= computes parts of them", "leave it or pipeline= out"
            )
        if sums.records is not None:
            what = "the model has BatchNorm, or a buffer that says how it is merged"
            raise UsageError(f"{what}, and pipeline= is not built for these yet", "leave pipeline= out")
        self._survey(chunks)
        pipeline, losses, sent_before = self.pipeline, list[Loss](), self.pipeline.sent
        passed_forward: dict[tuple[int, int], tuple[Loss, Any]] = {}
        seconds = dict.fromkeys(pipeline.local_stages, 0.0)
        for action in pipeline.actions(len(chunks)):
            _, stage, number = action
            chunk, is_last_stage = chunks[number], stage == pipeline.last
            pipeline.set_stage(stage)
            with chunk.noted, self._timed(seconds, stage):
                if action.kind == FORWARD:
                    if options.fault_point is not None and not passed_forward:
                        options.fault_point("forward")
                    loss = self._forward(chunk, sums, options)
                    assert loss is not None
                    passed_forward[stage, number] = loss, pipeline.take_passed(stage)
                    continue
                loss, tensors = passed_forward.pop((stage, number))
                is_last_chunk = number == len(chunks) - 1
                if is_last_stage:
                    pipeline.run_backward(stage, tensors, partial(self._backward, loss, options, is_last_chunk))
                    losses.append(loss.detached())
                    continue
                self._buckets.begin_backward(is_last_chunk)
                pipeline.run_backward(stage, tensors, None)
                self._buckets.end_backward()
        pipeline.set_stage(None)
        pipeline.finish()
        self._check_balance(seconds, sums, options.step + 1)
        if chunks:
            self.job.inside["pipeline"] = (pipeline.sent - sent_before) // len(chunks)
        return losses

    def _survey(self, chunks: Sequence[Chunk]) -> None:
        """Surveys all kinds of forwards before the schedule: during it workers run different chunks."""
        for chunk in chunks:
            if not self.pipeline.knows(self.job.model, chunk.batch):
                with chunk.noted, self.job.autocast():
                    self.pipeline.survey(self.job.model, chunk.batch)

    @contextmanager
    def _timed(self, seconds: dict[int, float], stage: int) -> Iterator[None]:
        """Adds the seconds of the context to the stage's, except those spent waiting for other stages."""
        began = time.perf_counter() - self.pipeline.waited
        yield
        seconds[stage] += time.perf_counter() - self.pipeline.waited - began

    def _check_balance(self, seconds: dict[int, float], sums: StepSums, step: int) -> None:
        """Notes the seconds of each stage, and reports now and then whether another partition would balance better."""
        for stage, duration in seconds.items():
            self._seconds[stage].append(duration)
        if step < FIRST or step & (step - 1):
            return
        medians = {stage: median(durations) for stage, durations in self._seconds.items()}
        advice = self.pipeline.suggest_partition(medians)
        if advice:
            sums.news["stages"] = advice, ""

    # -- comparison with the full model -------------------------------------------------------------------------------

    def _compare(self, chunk: Chunk, options: StepOptions) -> None:
        """Computes one micro-batch with the stages and with the full model, on the worker of the last stage.

        The loss, its count and metrics, and the gradients must be the same, else this raises UsageError on all workers
        of the line. Without memory for the full model, it is computed block by block or not at all.
        """
        pipeline, has_full_model = self.pipeline, self.pipeline.line.rank == self.pipeline.last_worker
        trial_options = replace(options, fault_point=None, noise_sample="")
        self.guard.probe.why("")
        way = self._fits(chunk)
        if not way:
            what = "the whole model does not fit on one worker: no micro-batch was computed by it to compare with"
            self.job.news["pipeline"] = what, ""
            return
        full_loss, full_gradients = None, dict[str, torch.Tensor]()
        assembled = pipeline.assembled(by_block=way == _BY_BLOCK)
        with assembled, self._without_a_trace(trial_options):
            if has_full_model:
                full_loss, full_gradients = self._run_full_model(chunk, trial_options, backward=way == _FULL)
        with self._without_a_trace(trial_options) as sums:
            try:
                losses = self._through([chunk], sums, trial_options)
            except USERS_OWN as error:
                if isinstance(error, torch.OutOfMemoryError | PacelineError):
                    raise
                what = f"{type(self.job.model).__name__} cannot be computed when it is cut in stages by pipeline="
                raise UsageError(f"{what} ({type(error).__name__}: {error})", _RESULTS) from error
            local_gradients = self._gradients()
        loss = losses[0] if losses else None
        self._check_same(loss, full_loss, local_gradients, full_gradients if way == _FULL else None)

    @contextmanager
    def _without_a_trace(self, options: StepOptions) -> Iterator[StepSums]:
        with without_a_trace(self.job.model, self.guard.streams):
            yield self.guard.begin(options)
            self.guard.undo()

    def _fits(self, chunk: Chunk) -> str:
        """Returns how the worker of the last stage has memory to compute the full model, or an empty text.

        `_FULL`: for the full model, its gradients and its activations (about three times the modules' outputs), even if
        all workers of the line are on one host. `_BY_BLOCK`: for a forward with one block's weights at a time; only
        where a replica has no other workers than the line's.
        """
        pipeline, sizes = self.pipeline, list[int]()
        with weighing(self.job.model, sizes), self.job.autocast():
            pipeline.survey(self.job.model, chunk.batch)
        pipeline.line.declare("memory for the whole model", check=False, kind="comparison")
        by_worker = pipeline.line.gather_json([sum(sizes), sum(p.nbytes for p in self.params)])
        activations, parameters = zip(*by_worker, strict=True)
        free, only_line = room(self.job.device), self.job.unit == pipeline.line.size
        way = ""
        if pipeline.missing_bytes(by_block=False) + 3 * sum(activations) + 2 * sum(parameters) <= free:
            way = _FULL
        elif only_line and pipeline.missing_bytes(by_block=True) + 2 * max(activations) <= free:
            way = _BY_BLOCK
        return str(pipeline.line.gather_json(way)[pipeline.last_worker])

    def _gradients(self) -> dict[str, torch.Tensor | None]:
        """Takes the gradients of the micro-batch that has just run: of parameters whose first holder this worker is."""
        pipeline, gradients = self.pipeline, dict[str, torch.Tensor | None]()
        pipeline.line.declare("gradients of tied weights, to compare with", check=False, kind="comparison")
        for number, (name, param) in enumerate(self.job.named.items()):
            grad, param.grad = param.grad, None
            if number in pipeline.shared:
                has_grads = pipeline.line.gather_json(grad is not None)
                if any(has_grads):
                    grad = torch.zeros_like(param) if grad is None else grad.clone()
                    pipeline.add_up(number, [grad])
            if name not in pipeline.absent and pipeline.source_worker(name) == pipeline.line.rank:
                gradients[name] = grad
        pipeline.finish()
        present = {name: grad for name, grad in gradients.items() if grad is not None}
        self.job.add_up(present, self.job.named)
        return gradients | present

    def _run_full_model(
        self, chunk: Chunk, options: StepOptions, backward: bool
    ) -> tuple[Loss, dict[str, torch.Tensor]]:
        """Computes loss and gradients with the full model, with the same random draws as the stages."""
        named = {name: param for name, param in self.job.model.named_parameters() if param.requires_grad}
        self.guard.streams.seed(stream_seed(self.job.seed, options.step, chunk.micro_batches[0].index))
        with chunk.noted:
            with nullcontext() if backward else torch.no_grad():
                loss = self._loss(chunk)
            if not backward:
                return loss, {}
            for param in named.values():
                param.grad = None
            loss.total.mul(1.0 / options.expected).backward()  # not grad(): reentrant checkpoints refuse it
        gradients = {name: param.grad for name, param in named.items() if param.grad is not None}
        for param in named.values():
            param.grad = None
        self.job.add_up(gradients, named)
        return loss.detached(), gradients

    def _check_same(
        self,
        loss: Loss | None,
        full_loss: Loss | None,
        local_gradients: Mapping[str, torch.Tensor | None],
        full_gradients: Mapping[str, torch.Tensor] | None,
    ) -> None:
        """Compares the results of the stages with those of the full model, on the worker that has the latter.

        The other workers send it their gradients, if the full model has gradients. Raises UsageError on all workers of
        the line where they differ.
        """
        expected = full_gradients or {}
        pipeline, model = self.pipeline, type(self.job.model).__name__
        pipeline.line.declare("gradients of stages, to compare with", check=False, kind="comparison")
        local_names = [name for name, grad in local_gradients.items() if grad is not None]
        gathered = pipeline.line.gather_json([[*expected], local_names])
        names, computed = gathered[pipeline.last_worker][0], {name for _, of_worker in gathered for name in of_worker}
        news, wrong = "", ""
        if loss is not None and full_loss is not None:
            stage_gradients = _StageGradients(pipeline, local_gradients, expected, computed)
            with self.job.autocast():  # in a coarse dtype, sums of three numbers in another order are 1e-2 apart
                name, distance = farthest(stage_gradients, expected, [full_loss.total], most_allowed=3e-2)
            # The arithmetic is the same; only the order of sums that the device chooses may differ.
            rounding = 1e-9 if full_loss.total.dtype == torch.float64 else 1e-5
            one, two, apart = loss_apart(loss, full_loss, rounding, 1e-2)
            compared = () if full_gradients is None else (*expected, *sorted(computed))
            unlike = next((name for name in compared if (name in computed) != (name in expected)), "")
            how = f"when {model} is cut in stages by pipeline="
            if one:
                wrong = f"the loss of a micro-batch is {one} {how}, and {two} of the whole model"
            elif unlike:
                wrong = f"{unlike} has {'a' if unlike in computed else 'no'} gradient {how}, unlike in the whole model"
            elif name:
                wrong = f"the gradient of {name} differs by {distance:.1g} of its norm, more than any other, {how}"
            news = f"one micro-batch was computed by the whole model, too: loss {apart:.1g} and gradients "
            news += f"{distance:.1g} apart"
            if full_gradients is None:
                news = "the whole model does not fit on one worker, to which its blocks came one after another: the "
                news += f"loss of one micro-batch is {apart:.1g} apart, and gradients were not compared"
        else:
            for name in names:
                if name in computed and name in local_gradients:
                    grad = local_gradients[name]
                    assert grad is not None
                    pipeline.line.send(grad.contiguous(), pipeline.last_worker)
        news, wrong = pipeline.line.gather_json([news, wrong])[pipeline.last_worker]
        if wrong:
            raise UsageError(wrong, _RESULTS)
        self.job.news["pipeline"] = news, ""


class _StageGradients(Mapping[str, torch.Tensor]):
    """The gradients of all stages, in the order of the full model's. Each is received when it is read."""

    def __init__(
        self,
        pipeline: Pipeline,
        local: Mapping[str, torch.Tensor | None],
        reference: Mapping[str, torch.Tensor],
        computed: set[str],
    ) -> None:
        self._pipeline, self._local, self._reference, self._computed = pipeline, local, reference, computed

    def __getitem__(self, name: str) -> torch.Tensor:
        local_gradient, reference = self._local.get(name), self._reference[name]
        if local_gradient is not None:
            return local_gradient
        made = torch.zeros_like(reference, memory_format=torch.contiguous_format)
        if name in self._computed:
            self._pipeline.line.receive(made, self._pipeline.source_worker(name))
        return made

    def __iter__(self) -> Iterator[str]:
        return iter(self._reference)

    def __len__(self) -> int:
        return len(self._reference)
