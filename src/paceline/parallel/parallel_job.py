"""A training job together with how its model is spread over the workers of a replica."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import nn

from paceline.compute.blocks import blocks_of, summarize_blocks
from paceline.compute.job import TrainingJob

if TYPE_CHECKING:
    from paceline.parallel.deferred_init import DeferredInit
    from paceline.parallel.model_values import ModelValues
    from paceline.parallel.pipeline.partition import StagePartition
    from paceline.parallel.tensor_parallel.redistribute import Redistributor

GRADIENT_HOOK = "_paceline_gradient_hook"  # attribute of a parameter: the library's own hook on its gradient


@dataclass
class ParallelJob(TrainingJob):
    """A training job whose model may be built without memory, divided into pipeline stages, or sharded inside layers.

    `requested_split` is what the user wrote: placements of layers by name, and the list of blocks. `redistributors`
    move the shards of tensor-parallel layers between workers; the list has None where the model is in stages.
    """

    blueprint: DeferredInit | None = None  # of a model whose large tensors have no memory yet
    values: ModelValues | None = None  # of a model that is probed without memory for its parameters
    stages: StagePartition | None = None
    requested_split: tuple[Mapping[str, str] | None, str | None] = None, None
    redistributors: list[Redistributor | None] = field(default_factory=list)
    # Whether the stage that runs now leaves out a block, whose parameters need not be gathered then.
    skips_block: Callable[[nn.Module], bool] = lambda block: False
    # Ends a forward that stopped after the stage's last block; takes and returns the values for later stages.
    end_forward: Callable[[tuple[Any, ...]], tuple[Any, ...]] = lambda values: values

    def describe_blocks(self) -> list[str]:
        """Describes the blocks of each stage, or of the full model without stages."""
        if self.stages is None:
            return [summarize_blocks(blocks_of(self.model))]
        return [self.stages.describe(stage) for stage in range(self.stages.count)]
