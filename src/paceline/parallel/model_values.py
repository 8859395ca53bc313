"""Moves the values of a model into its sharded form, one parameter at a time.

The values are taken out before the model is sharded, and put into its shards one parameter after another. A worker
needs memory for its own shards and one full parameter.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager

import torch
from torch import nn

from paceline.base.mesh import AXES, Mesh
from paceline.base.sharding import ShardingSpec
from paceline.comm.communicator import Group
from paceline.comm.torch_private import pytree
from paceline.compute.state_dict import marks_of
from paceline.parallel.data_parallel import share
from paceline.parallel.parallel_job import ParallelJob

_LIKELY = 0.02  # replaces all values while blocks run to trace which functions they call


class ModelValues:
    """The values of a job's parameters. The parameters take no memory until the values are materialised."""

    def __init__(self, job: ParallelJob) -> None:
        self.job = job
        self._full_values = dict[str, torch.Tensor](job.model.named_parameters())
        if job.blueprint is None:
            for name, param in job.model.named_parameters():
                self._full_values[name], param.data = param.detach(), _empty(param, job.device)
            return
        from paceline.parallel.deferred_init import assign

        assign(job.blueprint.other_tensors(job.model), job.device)
        replacements: dict[int, nn.Parameter] = {}
        for param in job.model.parameters():
            replacements[id(param)] = replacement = nn.Parameter(_empty(param, job.device), param.requires_grad)
            vars(replacement).update(marks_of(param))
        for attributes in map(vars, job.model.modules()):
            for name, value in attributes.items():
                if any(id(leaf) in replacements for leaf in pytree.tree_iter(value)):
                    attributes[name] = pytree.tree_map(lambda leaf: replacements.get(id(leaf), leaf), value)
        job.named = {name: param for name, param in job.model.named_parameters() if param.requires_grad}

    @contextmanager
    def lent(self, names: Collection[str]) -> Iterator[None]:
        """Gives these parameters their values while the context is active, if the model was built without memory and is
        not sharded.
        """
        job, params = self.job, {name: self.job.model.get_parameter(name) for name in names}
        without = {name: param.data for name, param in params.items()}
        assert job.blueprint is not None
        try:
            for name, param in params.items():
                param.data = job.blueprint.value(self._full_values[name]).to(job.device)
            yield
        finally:
            for name, data in without.items():
                params[name].data = data

    def materialize(self, group: Group, mesh: Mesh, known: bool) -> None:
        """Gives each parameter of the sharded model its shard of the values.

        If the model was built without memory, the first worker of the `group` that has a parameter broadcasts its
        values, unless all workers have the same (`known`). Collective if not `known`.
        """
        job = self.job
        within_stage = group.subgroup(*(axis for axis in AXES if axis != "pipeline"), mesh=mesh)
        for name in [*self._full_values]:
            param, full = job.model.get_parameter(name), self._full_values.pop(name)
            cut = job.cuts.get(name) or ShardingSpec.unsharded(full.shape)
            stages = {mesh.coordinate(index, "pipeline") for index, piece in enumerate(cut.pieces) if piece.blocks}
            if len(stages) == 1 and mesh.coordinate(job.shard_index, "pipeline") not in stages:
                continue
            if job.blueprint is not None:
                full = job.blueprint.value(full).to(job.device)
                if not known:
                    share([full], within_stage if len(stages) == 1 else group)
            shard = cut.at(job.shard_index).of(full)
            param.data = shard if shard.numel() == full.numel() else shard.clone()
        if job.blueprint is not None and not known:
            share(job.model.buffers(), group)
        job.blueprint = None


def _empty(param: nn.Parameter, device: torch.device) -> torch.Tensor:
    """Returns a tensor of a parameter's shape that takes no memory."""
    return torch.tensor(_LIKELY, dtype=param.dtype).to(device).expand(param.shape)
