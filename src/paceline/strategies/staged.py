"""Forwards and backwards of micro-batches through the stages of a pipeline, as this worker has them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from paceline.errors import UsageError
from paceline.strategies.chunks import Chunk
from paceline.strategies.job import Options, Sums
from paceline.strategies.pipeline import Pipeline
from paceline.strategies.runner import Loss, Runner
from paceline.strategies.schedule import FORWARD


class StagedRunner(Runner):
    """A runner whose micro-batches are gone through in the order of a schedule."""

    def __init__(self, pipeline: Pipeline, *of_all: Any) -> None:
        super().__init__(*of_all)
        self.pipeline = pipeline
        self.landing.late, self.landing.among = frozenset(pipeline.shared), pipeline.add_up

    def restore(self, void: bool = False) -> None:
        super().restore(void)
        if void:
            self.pipeline.abandon()

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
        line, parts = self.pipeline, list[Loss]()
        under: dict[tuple[int, int], tuple[Loss, Any]] = {}
        for action in line.actions(len(chunks)):
            _, stage, number = action
            chunk, ends = chunks[number], stage == line.last
            line.at(stage)
            with chunk.noted:
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
        return parts
