"""Runs micro-batches forward and backward through the pipeline stages."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
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
from paceline.parallel.pipeline.schedule import BACKWARD, FORWARD, INPUTS, Action
from paceline.parallel.pipeline.split_backward import SplitBackward
from paceline.parallel.pipeline.stage import Pipeline

# Stage times: of the last KEPT steps, looked at after FIRST steps, and again whenever the number of steps has doubled.
KEPT, FIRST = 8, 16
_FULL, _BY_BLOCK = "whole", "by block"  # how one worker computes a micro-batch of the full model
_RESULTS = (
    "return everything that the loss or later layers need from the blocks: values that a block stores in a list or an "
    "attribute stay on that block's worker, and so do those that the loss takes from a hook; and do not sum over "
    "the model's parameters in the forward or loss (use weight_decay= of the optimizer for a penalty); or leave "
    "pipeline= out"
)


@dataclass
class _InFlight:
    """A micro-batch whose backward through a stage has not ended."""

    loss: Loss
    received: list[torch.Tensor]
    is_dummy: bool
    split: SplitBackward | None = None


class PipelineRunner(Runner):
    """Runs micro-batches through this worker's stages in the order of the pipeline schedule."""

    def __init__(self, pipeline: Pipeline, *runner_arguments: Any) -> None:
        super().__init__(*runner_arguments)
        self.pipeline = pipeline
        self.guard.may_idle = False  # draws go from stage to stage
        self._seconds: dict[int, deque[float]] = {stage: deque(maxlen=KEPT) for stage in pipeline.local_stages}
        buckets = self.grad_sink.grad_buffers
        assert isinstance(buckets, Buckets)
        buckets.late, buckets.among = frozenset(pipeline.shared), pipeline.add_up
        self._compared = False

    def restore(self, void: bool = False) -> None:
        """Restores buffers as `Runner.restore` does. With `void`, also forgets what stages have in flight."""
        super().restore(void)
        if void:
            self.pipeline.abandon()

    def run(self, micro_batches: Sequence[MicroBatch], options: StepOptions, ready: Ready) -> StepSums:
        """Runs the micro-batches of a step. The first one is compared with the full model before, once."""
        if not self._compared:
            # Workers that run the model in lockstep all compare, also one that has only dummies.
            candidates = [m for m in micro_batches if self.job.lockstep is not None or not m.is_dummy]
            first = min(candidates, key=lambda m: m.is_dummy, default=None)
            if first is not None:
                self._compare(Chunk([replace(first, is_dummy=False)], first.batch), options)
                self._compared = True
        # Connects the line also where a unit has no micro-batches: it adds up gradients of shared parameters, too.
        self.pipeline.line.declare("the stages of a pipeline", check=False, kind="pipeline")
        self.pipeline.messages.waited = 0.0
        sums = super().run(micro_batches, options, ready)
        sums.waited = self.pipeline.messages.waited
        return sums

    def _forwards(self, chunks: Sequence[Chunk]) -> Iterator[Chunk]:
        pipeline = self.pipeline
        self._survey(chunks)
        for _, stage, number in pipeline.actions(len(chunks), forward_only=True):
            pipeline.set_stage(stage, number)
            yield chunks[number]
            pipeline.take_received(stage)
        pipeline.set_stage(None)
        pipeline.messages.finish()

    def _through(self, chunks: Sequence[Chunk], sums: StepSums, options: StepOptions) -> list[Loss]:
        if options.hooked or self.guard.probe.hooks.where:
            hook = self.guard.probe.hooks.where or "a gradient hook of another worker"
            raise UsageError(
                f"{hook} would see only parts of the gradients, because pipeline= splits each micro-batch's backward",
                "remove the hook, or leave pipeline= out",
            )
        if sums.records is not None:
            what = "pipeline= does not support models with BatchNorm or with buffers declared by paceline.buffer yet"
            raise UsageError(what, "leave pipeline= out")
        self._survey(chunks)
        pipeline, losses, sent_before = self.pipeline, list[Loss](), self.pipeline.messages.sent
        moved_before = self._moved_by_tensor()
        in_flight: dict[tuple[int, int], _InFlight] = {}
        seconds = dict.fromkeys(pipeline.local_stages, 0.0)
        actions = pipeline.actions(len(chunks))
        for position, action in enumerate(actions):
            _, stage, number = action
            chunk = chunks[number]
            pipeline.set_stage(stage, number)
            is_dummy = chunk.micro_batches[0].is_dummy
            with chunk.noted, self._timed(seconds, stage):
                if action.kind == FORWARD:
                    if options.fault_point is not None and not in_flight:
                        options.fault_point("forward")
                    loss = self._dummy_loss(chunk, options) if is_dummy else self._forward(chunk, sums, options)
                    assert loss is not None
                    in_flight[stage, number] = _InFlight(loss, pipeline.take_received(stage), is_dummy)
                    continue
                flight = in_flight[stage, number]
                # Where each backward sends the gradients of all stages of this worker, its last one completes them.
                is_last = number == len(chunks) - 1
                if self.gathered:
                    is_last = position == len(actions) - 1
                if action.kind in (BACKWARD, INPUTS):
                    self._begin_backward(action, flight, options, is_last)
                if action.kind != INPUTS:
                    self._end_backward(flight, is_last)
                    del in_flight[stage, number]
                    losses += [flight.loss.detached()] * (stage == pipeline.last and not is_dummy)
        pipeline.set_stage(None)
        pipeline.messages.finish()
        self._check_balance(seconds, sums, options.step + 1)
        if chunks:
            self.job.inside["pipeline"] = (pipeline.messages.sent - sent_before) // len(chunks)
            if "tensor" in self.job.inside:  # of all stages of this worker, and of the values gathered between them
                self.job.inside["tensor"] = (self._moved_by_tensor() - moved_before) // len(chunks)
        return losses

    def _moved_by_tensor(self) -> int:
        return sum(one.bytes_sent for one in self.pipeline.job.redistributors if one is not None)

    def _begin_backward(self, action: Action, flight: _InFlight, options: StepOptions, last: bool) -> None:
        """Runs a backward, or the part of a split one for the gradients of the inputs, and sends these."""
        pipeline, split = self.pipeline, action.kind == INPUTS
        is_last_stage = action.stage == pipeline.last
        if is_last_stage and not split:
            self._backward(flight.loss, options, last, flight.is_dummy)
        else:
            pairs = [] if is_last_stage else pipeline.receive_gradients(action)
            outputs, grads = [value for value, _ in pairs], [grad for _, grad in pairs]
            if is_last_stage:
                outputs = [flight.loss.total.mul(0.0 if flight.is_dummy else 1.0 / options.expected)]
                grads = [torch.ones_like(outputs[0])]
            if split:
                flight.split = SplitBackward(outputs, grads, flight.received, self.params)
                flight.split.run_inputs()
            else:
                with self._receiving(last, flight.is_dummy):
                    if outputs:
                        torch.autograd.backward(outputs, grads)
        pipeline.send_gradients(action, flight.received)

    def _end_backward(self, flight: _InFlight, last: bool) -> None:
        """Runs the part of a split backward for the gradients of the weights, if there is one."""
        if flight.split is not None:
            with self._receiving(last, flight.is_dummy):
                flight.split.run_weights()

    @contextmanager
    def _receiving(self, last: bool, is_dummy: bool) -> Iterator[None]:
        """Hands the gradients of the weights to the gradient sink while the context is active."""
        begin_backward, end_backward = self.grad_sink.begin_backward, self.grad_sink.end_backward
        assert begin_backward is not None
        assert end_backward is not None
        begin_backward(last, is_dummy, None)
        yield
        end_backward()

    def _survey(self, chunks: Sequence[Chunk]) -> None:
        """Surveys all kinds of forwards before the schedule: during it workers run different chunks.

        Workers that run the model in lockstep make equally many surveys.
        """
        new = [*{kind: chunk for chunk in chunks if (kind := self.pipeline.new_kind(chunk.batch))}.values()]
        if chunks and self.job.lockstep is not None:
            self.job.lockstep.declare("the surveys of a step", check=False, kind="pipeline")
            new += [chunks[0]] * (max(self.job.lockstep.gather_json(len(new))) - len(new))
        for chunk in new:
            with chunk.noted, self.job.autocast():
                self.pipeline.survey(self.job.model, chunk.batch, again=True)

    def _dummy_loss(self, chunk: Chunk, options: StepOptions) -> Loss:
        """Runs the forward of a dummy micro-batch, which counts for nothing and leaves buffers unchanged."""
        self.guard.streams.seed(stream_seed(self.job.seed, options.step, chunk.micro_batches[0].index))
        loss = self._loss(chunk)
        super().restore()
        return loss

    @contextmanager
    def _timed(self, seconds: dict[int, float], stage: int) -> Iterator[None]:
        """Adds the seconds of the context to the stage's, except those spent waiting for other stages."""
        began = time.perf_counter() - self.pipeline.messages.waited
        yield
        seconds[stage] += time.perf_counter() - self.pipeline.messages.waited - began

    def _check_balance(self, seconds: dict[int, float], sums: StepSums, step: int) -> None:
        """Records the seconds of each stage, and after 16, 32, 64, ... steps suggests a better balanced partition."""
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
        self.guard.include_models()  # while no parameters are gathered
        way = self._fits(chunk)
        if not way:
            what = "pipeline= was not verified: the full model does not fit on one worker for a comparison"
            self.job.news["pipeline"] = what, ""
            return
        full_loss, full_gradients = None, dict[str, torch.Tensor]()
        assembled = pipeline.assembled(by_block=way == _BY_BLOCK)
        with assembled, self._without_a_trace(trial_options):
            if has_full_model:
                full_loss, full_gradients = self._run_full_model(chunk, trial_options, backward=way == _FULL)
        with self._without_a_trace(trial_options) as sums:
            try:
                with self._capturing() as captured:
                    losses = self._through([chunk], sums, trial_options)
            except USERS_OWN as error:
                if isinstance(error, torch.OutOfMemoryError | PacelineError):
                    raise
                what = f"{pipeline.model_name} fails when pipeline= splits it into stages"
                raise UsageError(f"{what} ({type(error).__name__}: {error})", _RESULTS) from error
            local_gradients = self._gradients(captured)
        loss = losses[0] if losses else None
        self._check_same(loss, full_loss, local_gradients, full_gradients if way == _FULL else None)

    @contextmanager
    def _capturing(self) -> Iterator[dict[str, torch.Tensor]]:
        """Yields a dictionary that gets the gradients of gathered parameters, which do not stay in the parameters."""
        captured: dict[str, torch.Tensor] = {}
        with nullcontext() if self.job.capture is None else self.job.capture(captured):
            yield captured

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
        pipeline.line.declare("the memory check for the full model", check=False, kind="comparison")
        by_worker = pipeline.line.gather_json([sum(sizes), sum(p.nbytes for p in self.params)])
        activations, parameters = zip(*by_worker, strict=True)
        free, only_line = room(self.job.device), self.job.unit == pipeline.line.size
        way = ""
        if pipeline.missing_bytes(by_block=False) + 3 * sum(activations) + 2 * sum(parameters) <= free:
            way = _FULL
        elif only_line and pipeline.missing_bytes(by_block=True) + 2 * max(activations) <= free:
            way = _BY_BLOCK
        return str(pipeline.line.gather_json(way)[pipeline.last_worker])

    def _gradients(self, captured: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor | None]:
        """Removes the last micro-batch's gradients; returns those of parameters that this worker is first to hold.

        The gradients of gathered parameters were `captured`.
        """
        pipeline, gradients = self.pipeline, dict[str, torch.Tensor | None]()
        pipeline.line.declare("the gradients of tied weights, for the comparison", check=False, kind="comparison")
        for number, (name, param) in enumerate(self.job.named.items()):
            grad, param.grad = captured.get(name, param.grad), None
            if number in pipeline.shared:
                has_grads = pipeline.line.gather_json(grad is not None)
                if any(has_grads):
                    if grad is None:
                        grad = torch.zeros(param.shape, dtype=param.dtype, device=param.device)
                    else:
                        grad = grad.clone()
                    pipeline.add_up(number, [grad])
            if name not in pipeline.absent and pipeline.source_worker(name) == pipeline.line.rank:
                gradients[name] = grad
        pipeline.messages.finish()
        present = {name: grad for name, grad in gradients.items() if grad is not None}
        self.job.add_up(present, self.job.named)
        return gradients | present

    def _run_full_model(
        self, chunk: Chunk, options: StepOptions, backward: bool
    ) -> tuple[Loss, dict[str, torch.Tensor]]:
        """Computes loss and gradients with the full model, with the same random draws as the stages."""
        named = {name: param for name, param in self.job.model.named_parameters() if param.requires_grad}
        self.guard.streams.seed(stream_seed(self.job.seed, options.step, chunk.micro_batches[0].index))
        with chunk.noted, self._capturing() as captured:
            with nullcontext() if backward else torch.no_grad():
                loss = self._loss(chunk)
            if not backward:
                return loss, {}
            for param in named.values():
                param.grad = None
            loss.total.mul(1.0 / options.expected).backward()  # not grad(): reentrant checkpoints refuse it
        gradients = captured | {name: param.grad for name, param in named.items() if param.grad is not None}
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
        pipeline, model = self.pipeline, self.pipeline.model_name
        pipeline.line.declare("the gradients of the stages, for the comparison", check=False, kind="comparison")
        local_names = [name for name, grad in local_gradients.items() if grad is not None]
        gathered = pipeline.line.gather_json([[*expected], local_names])
        names, computed = gathered[pipeline.last_worker][0], {name for _, of_worker in gathered for name in of_worker}
        news, wrong = "", ""
        if loss is not None and full_loss is not None:
            stage_gradients = _StageGradients(pipeline, local_gradients, expected, computed)
            with self.job.autocast():  # in a coarse dtype, summing three numbers in another order changes 1e-2
                name, distance = farthest(stage_gradients, expected, [full_loss.total], most_allowed=3e-2)
            # The arithmetic is the same; only the order of sums that the device chooses may differ.
            rounding = 1e-9 if full_loss.total.dtype == torch.float64 else 1e-5
            one, two, apart = loss_apart(loss, full_loss, rounding, 1e-2)
            compared = () if full_gradients is None else (*expected, *sorted(computed))
            unlike = next((name for name in compared if (name in computed) != (name in expected)), "")
            how = f"when pipeline= splits {model} into stages"
            if one:
                wrong = f"the loss of a micro-batch is {one} {how}, but {two} with the full model"
            elif unlike:
                wrong = f"{unlike} has {'a' if unlike in computed else 'no'} gradient {how}, unlike with the full model"
            elif name:
                wrong = f"the gradient of {name} differs most, by {distance:.1g} of its norm, {how}"
            news = "pipeline= was verified on one micro-batch against the full model: relative difference "
            news += f"{apart:.1g} of the loss and {distance:.1g} of the gradients"
            if full_gradients is None:
                news = (
                    "pipeline= was verified on one micro-batch against the full model, computed block by block as it "
                )
                news += (
                    f"does not fit on one worker: relative difference {apart:.1g} of the loss, gradients not compared"
                )
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
