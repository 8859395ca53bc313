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
from paceline.compute.batchnorm import without_a_trace
from paceline.compute.forward_backward import Loss, Ready, Runner
from paceline.compute.job import StepOptions, StepSums
from paceline.compute.microbatch_merging import USERS_OWN
from paceline.compute.microbatches import Chunk, MicroBatch
from paceline.compute.verify import farthest, loss_apart, room, weighing
from paceline.errors import PacelineError, UsageError
from paceline.parallel.pipeline.schedule import FORWARD
from paceline.parallel.pipeline.stage import Pipeline

KEPT, FIRST = 8, 16  # steps whose seconds are looked at; the first look is after so many, then after twice as many
_WHOLE, _BY_BLOCK = "whole", "by block"  # how one worker computes a micro-batch of the whole model
_RESULTS = (
    "let blocks return what the loss or the head needs of them: what they put into a list or an attribute, and what "
    "hooks on layers inside of them keep, stays on the worker that has the block; and let neither forward nor loss add "
    "up the model's parameters (weight_decay= of the optimizer is a penalty on them); or leave pipeline= out"
)


class PipelineRunner(Runner):
    """A runner whose micro-batches are gone through in the order of a schedule."""

    def __init__(self, pipeline: Pipeline, *of_all: Any) -> None:
        super().__init__(*of_all)
        self.pipeline = pipeline
        self._seconds: dict[int, deque[float]] = {stage: deque(maxlen=KEPT) for stage in pipeline.own}
        self.landing.late, self.landing.among = frozenset(pipeline.shared), pipeline.add_up
        self._compared = False

    def restore(self, void: bool = False) -> None:
        super().restore(void)
        if void:
            self.pipeline.abandon()

    def run(self, micro_batches: Sequence[MicroBatch], options: StepOptions, ready: Ready) -> StepSums:
        first = next((m for m in micro_batches if not m.is_dummy), None)
        if first is not None and not self._compared:
            self._compare(Chunk([first], first.batch), options)
            self._compared = True
        self.pipeline.waited = 0.0
        sums = super().run(micro_batches, options, ready)
        sums.waited = self.pipeline.waited
        return sums

    def _forwards(self, chunks: Sequence[Chunk]) -> Iterator[Chunk]:
        line = self.pipeline
        self._survey(chunks)
        for kind, stage, number in line.actions(len(chunks)):
            if kind == FORWARD:
                line.at(stage)
                yield chunks[number]
                line.under(stage)
        line.at(None)
        line.finish()

    def _through(self, chunks: Sequence[Chunk], sums: StepSums, options: StepOptions) -> list[Loss]:
        if options.hooked or self.observer.hooks.where:
            hook = self.observer.hooks.where or "a gradient hook of another worker"
            raise UsageError(
                f"{hook} sees gradients, and pipeline= computes parts of them", "leave it or pipeline= out"
            )
        if sums.records is not None:
            what = "the model has BatchNorm, or a buffer that says how it is merged"
            raise UsageError(f"{what}, and pipeline= is not built for these yet", "leave pipeline= out")
        self._survey(chunks)
        line, parts, sent = self.pipeline, list[Loss](), self.pipeline.sent
        under: dict[tuple[int, int], tuple[Loss, Any]] = {}
        seconds = dict.fromkeys(line.own, 0.0)
        for action in line.actions(len(chunks)):
            _, stage, number = action
            chunk, ends = chunks[number], stage == line.last
            line.at(stage)
            with chunk.noted, self._timed(seconds, stage):
                if action.kind == FORWARD:
                    if not under:
                        options.reached("forward")
                    part = self._forward(chunk, sums, options)
                    assert part is not None
                    under[stage, number] = part, line.under(stage)
                    continue
                part, passed = under.pop((stage, number))
                last = number == len(chunks) - 1
                if ends:
                    line.back(stage, passed, partial(self._backward, part, options, last))
                    parts.append(part.detached())
                    continue
                self.landing.open(last)
                line.back(stage, passed, None)
                self.landing.close()
        line.at(None)
        line.finish()
        self._look(seconds, sums, options.step + 1)
        if chunks:
            self.job.inside["pipeline"] = (line.sent - sent) // len(chunks)
        return parts

    def _survey(self, chunks: Sequence[Chunk]) -> None:
        """All kinds of forwards are known before the schedule begins, in which workers are at different chunks."""
        for chunk in chunks:
            if not self.pipeline.knows(self.job.model, chunk.batch):
                with chunk.noted, self.job.arithmetic():
                    self.pipeline.survey(self.job.model, chunk.batch)

    @contextmanager
    def _timed(self, seconds: dict[int, float], stage: int) -> Iterator[None]:
        """Without what the stage waits for others."""
        began = time.perf_counter() - self.pipeline.waited
        yield
        seconds[stage] += time.perf_counter() - self.pipeline.waited - began

    def _look(self, seconds: dict[int, float], sums: StepSums, step: int) -> None:
        """Now and then: whether other stages would be better."""
        for stage, some in seconds.items():
            self._seconds[stage].append(some)
        if step < FIRST or step & (step - 1):
            return
        better = self.pipeline.better({stage: median(some) for stage, some in self._seconds.items()})
        if better:
            sums.news["stages"] = better, ""

    # -- the model in stages beside the whole one ---------------------------------------------------------------------

    def _compare(self, chunk: Chunk, options: StepOptions) -> None:
        """One micro-batch through the stages and through the whole model, on the worker of the last stage: the loss,
        its count and metrics, and the gradients must be the same. Raises UsageError on all workers of the line.
        """
        line, at = self.pipeline, self.pipeline.line.rank == self.pipeline.judge
        quiet = replace(options, reached=_nothing, noise_sample="")
        self.observer.why("")
        fits = self._fits(chunk)
        if not fits:
            what = "the whole model does not fit on one worker: no micro-batch was computed by it to compare with"
            self.job.news["pipeline"] = what, ""
            return
        whole, found = None, dict[str, torch.Tensor]()
        with line.assembled() if fits == _WHOLE else line.assembled_by_block(), self._without_a_trace(quiet):
            if at:
                whole, found = self._whole(chunk, quiet, backward=fits == _WHOLE)
        with self._without_a_trace(quiet) as sums:
            try:
                parts = self._through([chunk], sums, quiet)
            except USERS_OWN as error:
                if isinstance(error, torch.OutOfMemoryError | PacelineError):
                    raise
                what = f"{type(self.job.model).__name__} cannot be computed when it is cut in stages by pipeline="
                raise UsageError(f"{what} ({type(error).__name__}: {error})", _RESULTS) from error
            mine = self._gradients()
        self._decide(parts[0] if parts else None, whole, mine, found if fits == _WHOLE else None)

    @contextmanager
    def _without_a_trace(self, options: StepOptions) -> Iterator[StepSums]:
        with without_a_trace(self.job.model, self.streams):
            yield self._open(options)
            self.undo()

    def _fits(self, chunk: Chunk) -> str:
        """Whether the worker of the last stage has room for the whole model, its gradients, and what its forward keeps
        (about three times what modules give), also if all of the line are on its host; or else for a forward to which
        blocks come one after another, where no other workers take part in it. Empty: for neither.
        """
        line, sizes = self.pipeline, list[int]()
        with weighing(self.job.model, sizes), self.job.arithmetic():
            line.survey(self.job.model, chunk.batch)
        line.line.enter("memory for the whole model", check=False, kind="comparison")
        kept, own = zip(*line.line.gather_json([sum(sizes), sum(p.nbytes for p in self.params)]), strict=True)
        free = room(self.job.device)
        fits = ""
        if line.lacking() + 3 * sum(kept) + 2 * sum(own) <= free:
            fits = _WHOLE
        elif self.job.unit == line.line.size and line.lacking_by_block() + 2 * max(kept) <= free:
            fits = _BY_BLOCK
        return str(line.line.gather_json(fits)[line.judge])

    def _gradients(self) -> dict[str, torch.Tensor | None]:
        """Those of a micro-batch that has just passed, of the parameters that this worker is the first to have."""
        line, found = self.pipeline, dict[str, torch.Tensor | None]()
        line.line.enter("gradients of tied weights, to compare with", check=False, kind="comparison")
        for number, (name, param) in enumerate(self.job.named.items()):
            grad, param.grad = param.grad, None
            if number in line.shared:
                has = line.line.gather_json(grad is not None)
                if any(has):
                    grad = torch.zeros_like(param) if grad is None else grad.clone()
                    line.add_up(number, [grad])
            if name not in line.absent and line.source(name) == line.line.rank:
                found[name] = grad
        line.finish()
        parts = {name: grad for name, grad in found.items() if grad is not None}
        self.job.add_up(parts, self.job.named)
        return found | parts

    def _whole(self, chunk: Chunk, options: StepOptions, backward: bool) -> tuple[Loss, dict[str, torch.Tensor]]:
        """What the whole model gives, with the same draws."""
        named = self.pipeline.trained()
        self.streams.seed(stream_seed(self.job.seed, options.step, chunk.micro_batches[0].index))
        with chunk.noted:
            with nullcontext() if backward else torch.no_grad():
                part = self._loss(chunk)
            if not backward:
                return part, {}
            for param in named.values():
                param.grad = None
            part.total.mul(1.0 / options.expected).backward()  # not grad(): reentrant checkpoints refuse it
        found = {name: param.grad for name, param in named.items() if param.grad is not None}
        for param in named.values():
            param.grad = None
        self.job.add_up(found, named)
        return part.detached(), found

    def _decide(
        self,
        part: Loss | None,
        whole: Loss | None,
        mine: Mapping[str, torch.Tensor | None],
        gradients_too: Mapping[str, torch.Tensor] | None,
    ) -> None:
        """On the worker that has the whole: is it the same? The others send it their gradients, if it has some."""
        found = gradients_too or {}
        line, model = self.pipeline, type(self.job.model).__name__
        line.line.enter("gradients of stages, to compare with", check=False, kind="comparison")
        said = line.line.gather_json([[*found], [name for name, grad in mine.items() if grad is not None]])
        names, here = said[line.judge][0], {name for _, some in said for name in some}
        news, wrong = "", ""
        if part is not None and whole is not None:
            gradients = _Arriving(line, mine, found, here)
            with self.job.arithmetic():  # where numbers are coarse, sums of three in another order are 1e-2 apart
                name, distance = farthest(gradients, found, [whole.total], most_allowed=3e-2)
            # The arithmetic is the same: rounding is that of sums whose order a device chooses.
            rounding = 1e-9 if whole.total.dtype == torch.float64 else 1e-5
            one, two, apart = loss_apart(part, whole, rounding, 1e-2)
            both = () if gradients_too is None else (*found, *sorted(here))
            unlike = next((name for name in both if (name in here) != (name in found)), "")
            how = f"when {model} is cut in stages by pipeline="
            if one:
                wrong = f"the loss of a micro-batch is {one} {how}, and {two} of the whole model"
            elif unlike:
                wrong = f"{unlike} has {'a' if unlike in here else 'no'} gradient {how}, unlike in the whole model"
            elif name:
                wrong = f"the gradient of {name} differs by {distance:.1g} of its norm, more than any other, {how}"
            news = f"one micro-batch was computed by the whole model, too: loss {apart:.1g} and gradients "
            news += f"{distance:.1g} apart"
            if gradients_too is None:
                news = "the whole model does not fit on one worker, to which its blocks came one after another: the "
                news += f"loss of one micro-batch is {apart:.1g} apart, and gradients were not compared"
        else:
            for name in names:
                if name in here and name in mine:
                    grad = mine[name]
                    assert grad is not None
                    line.line.send(grad.contiguous(), line.judge)
        news, wrong = line.line.gather_json([news, wrong])[line.judge]
        if wrong:
            raise UsageError(wrong, _RESULTS)
        self.job.news["pipeline"] = news, ""


class _Arriving(Mapping[str, torch.Tensor]):
    """The gradients of all stages, one after another as they are asked for, in the order of the whole model's."""

    def __init__(
        self,
        line: Pipeline,
        mine: Mapping[str, torch.Tensor | None],
        like: Mapping[str, torch.Tensor],
        here: set[str],
    ) -> None:
        self._line, self._mine, self._like, self._here = line, mine, like, here

    def __getitem__(self, name: str) -> torch.Tensor:
        own, like = self._mine.get(name), self._like[name]
        if own is not None:
            return own
        made = torch.zeros_like(like, memory_format=torch.contiguous_format)
        if name in self._here:
            self._line.line.receive(made, self._line.source(name))
        return made

    def __iter__(self) -> Iterator[str]:
        return iter(self._like)

    def __len__(self) -> int:
        return len(self._like)


def _nothing(moment: str) -> None:
    """Nobody is told of moments of a comparison."""
