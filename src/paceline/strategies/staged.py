"""Forwards and backwards of micro-batches through the stages of a pipeline, as this worker has them."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from statistics import median
from typing import Any

from paceline.errors import UsageError
from paceline.strategies.chunks import Chunk, MicroBatch
from paceline.strategies.job import Options, Sums
from paceline.strategies.pipeline import Pipeline
from paceline.strategies.runner import Loss, Ready, Runner
from paceline.strategies.schedule import FORWARD

KEPT, FIRST = 8, 16  # steps whose seconds are looked at; the first look is after so many, then after twice as many


class StagedRunner(Runner):
    """A runner whose micro-batches are gone through in the order of a schedule."""

    def __init__(self, pipeline: Pipeline, *of_all: Any) -> None:
        super().__init__(*of_all)
        self.pipeline = pipeline
        self._seconds: dict[int, deque[float]] = {stage: deque(maxlen=KEPT) for stage in pipeline.own}
        self.landing.late, self.landing.among = frozenset(pipeline.shared), pipeline.add_up

    def restore(self, void: bool = False) -> None:
        super().restore(void)
        if void:
            self.pipeline.abandon()

    def run(self, micro_batches: Sequence[MicroBatch], options: Options, ready: Ready) -> Sums:
        self.pipeline.waited = 0.0
        sums = super().run(micro_batches, options, ready)
        sums.waited = self.pipeline.waited
        return sums

    def _forwards(self, chunks: Sequence[Chunk]) -> Iterator[Chunk]:
        line = self.pipeline
        for kind, stage, number in line.actions(len(chunks)):
            if kind == FORWARD:
                line.at(stage)
                yield chunks[number]
                line.under(stage)
        line.at(None)
        line.finish()

    def _through(self, chunks: Sequence[Chunk], sums: Sums, options: Options) -> list[Loss]:
        if options.hooked or self.observer.hooks.where:
            hook = self.observer.hooks.where or "a gradient hook of another worker"
            raise UsageError(
                f"{hook} sees gradients, and pipeline= computes parts of them", "leave it or pipeline= out"
            )
        if sums.records is not None:
            what = "the model has BatchNorm, or a buffer that says how it is merged"
            raise UsageError(f"{what}, and pipeline= is not built for these yet", "leave pipeline= out")
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

    @contextmanager
    def _timed(self, seconds: dict[int, float], stage: int) -> Iterator[None]:
        """Without what the stage waits for others."""
        began = time.perf_counter() - self.pipeline.waited
        yield
        seconds[stage] += time.perf_counter() - self.pipeline.waited - began

    def _look(self, seconds: dict[int, float], sums: Sums, step: int) -> None:
        """Now and then: whether other stages would be better."""
        for stage, some in seconds.items():
            self._seconds[stage].append(some)
        if step < FIRST or step & (step - 1):
            return
        better = self.pipeline.better({stage: median(some) for stage, some in self._seconds.items()})
        if better:
            sums.news["stages"] = better, ""
