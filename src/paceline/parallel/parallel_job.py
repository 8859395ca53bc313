"""A training job together with how its model is spread over the workers of a replica."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from paceline.compute.job import TrainingJob

if TYPE_CHECKING:
    from paceline.parallel.deferred_init import DeferredInit
    from paceline.parallel.pipeline.partition import StagePartition
    from paceline.parallel.tensor_parallel.redistribute import Redistributor


@dataclass
class ParallelJob(TrainingJob):
    """A training job whose model may be built without memory, divided into pipeline stages, or sharded inside layers.

    `requested_split` is what the user wrote: placements of layers by name, and the list of blocks. `redistributors`
    move the shards of tensor-parallel layers between workers; the list has None where the model is in stages.
    """

    blueprint: DeferredInit | None = None  # of a model whose large tensors have no memory yet
    stages: StagePartition | None = None
    requested_split: tuple[Mapping[str, str] | None, str | None] = None, None
    redistributors: list[Redistributor | None] = field(default_factory=list)
