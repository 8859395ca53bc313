"""What a plan makes each worker compute and hold: its micro-batches, its stages, and its part of their parameters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise

from paceline.base.batching import Grid
from paceline.base.mesh import AXES, Mesh
from paceline.errors import UsageError
from paceline.parallel.pipeline.schedule import stages_of, worker_of
from paceline.plan import Plan
from paceline.planner.descriptions import BlockDescription, ModelDescription
from paceline.planner.links import Peers

Stage = tuple[tuple[BlockDescription, int], ...]  # blocks, and how many alike follow one another

HALVES = ("bf16", "fp16", "fp8")


@dataclass(frozen=True)
class Workload:
    """The work of a plan for a model. The plan must be valid for the number of workers (`Plan.validate`)."""

    plan: Plan
    model: ModelDescription
    workers: int
    axes: Sequence[str] = AXES  # outer to inner: neighbours along the last have it closest

    @cached_property
    def mesh(self) -> Mesh:
        """Where each worker is."""
        return self.plan.mesh(self.workers)

    @cached_property
    def micro(self) -> int:
        """The rows of a micro-batch."""
        return Grid.of(self.model.global_batch, self.plan.micro).micro

    @cached_property
    def forwards(self) -> int:
        """The micro-batches of the worker that has most of them."""
        micro_batches = -(-self.model.global_batch // self.micro)
        return -(-micro_batches // self.mesh.units)

    @cached_property
    def precision(self) -> str:
        """The precision of matrix products."""
        stated = "fp8" if self.model.precision == "fp8" else self.plan.precision or self.model.precision
        return stated or ("bf16" if self.model.element_size <= 2 else "fp32")

    @cached_property
    def gradient_size(self) -> float:
        """The bytes of an element of a gradient."""
        return self.model.gradient_size or self.model.element_size

    @cached_property
    def activation_scale(self) -> float:
        """The bytes of an activation under this plan, relative to those in the description of the model."""
        return min(1.0, 2.0 / self.model.element_size) if self.plan.precision in HALVES else 1.0

    @cached_property
    def virtual(self) -> int:
        """The stages of a worker."""
        return self.plan.virtual or (2 if self.plan.schedule == "zbv" else 1)

    @cached_property
    def stages(self) -> tuple[Stage, ...]:
        """The blocks of each stage. As a pipeline does, blocks that are repeated are divided evenly; what comes before
        them belongs to the first stage, and what comes after them to the last one. Raises UsageError if they are too
        few.
        """
        count = self.mesh.pipeline * self.virtual
        blocks = self.model.blocks
        repeated = [number for number, block in enumerate(blocks) if block.count > 1] or [*range(len(blocks))]
        first, end = repeated[0], repeated[-1] + 1
        middle = blocks[first:end]
        total = sum(block.count for block in middle)
        if total < count:
            what = f"{self.model.name} has {total} block{'' if total == 1 else 's'}, too few for {count} stages"
            raise UsageError(what, f"use at most {total} stages: the product of pipeline= and virtual=")
        ends = [0, *accumulate(total // count + (stage >= count - total % count) for stage in range(count))]
        stages = [_between(middle, start, stop) for start, stop in pairwise(ends)]
        stages[0] = (*((block, block.count) for block in blocks[:first]), *stages[0])
        stages[-1] = (*stages[-1], *((block, block.count) for block in blocks[end:]))
        return tuple(stages)

    def stages_of(self, worker: int) -> list[int]:
        """Returns the stages of the worker at this position of the pipeline."""
        return stages_of(self.plan.stage_order, self.mesh.pipeline, self.virtual, worker)

    def blocks_of(self, worker: int) -> Stage:
        """Returns the blocks of all stages of the worker at this position of the pipeline."""
        return tuple(pair for stage in self.stages_of(worker) for pair in self.stages[stage])

    def parameters(self, blocks: Stage) -> float:
        """Returns the elements of these blocks' parameters that a worker has before they are sharded (ZeRO)."""
        return sum(count * self.parameters_of(block) for block, count in blocks)

    def parameters_of(self, block: BlockDescription) -> float:
        """Returns the elements of a block's parameters that a worker has before they are sharded (ZeRO)."""
        experts = block.expert_parameters
        return (block.parameters - experts + experts / self.mesh.expert) / self.mesh.tensor

    def worker_of(self, stage: int) -> int:
        """Returns the position in the pipeline of the worker that has a stage."""
        return worker_of(self.plan.stage_order, self.mesh.pipeline, stage)

    def distance(self, axis: str) -> int:
        """Returns the distance from a rank to the next one along an axis."""
        inner = self.axes[self.axes.index(axis) + 1 :]
        distance = 1
        for name in inner:
            distance *= getattr(self.mesh, name)
        return distance

    def peers(self, *axes: str) -> Peers:
        """Returns the workers that communicate along these axes."""
        sizes = ((getattr(self.mesh, axis), self.distance(axis)) for axis in axes)
        return Peers(tuple((size, distance) for size, distance in sizes if size > 1))


def _between(blocks: Sequence[BlockDescription], start: int, stop: int) -> Stage:
    """Returns the blocks from number `start` to before `stop`, if each is counted as often as it is repeated."""
    between, begin = list[tuple[BlockDescription, int]](), 0
    for block in blocks:
        count = min(stop, begin + block.count) - max(start, begin)
        if count > 0:
            between.append((block, count))
        begin += block.count
    return tuple(between)
