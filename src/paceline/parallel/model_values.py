"""Moves the values of a model into its sharded form, one parameter at a time.

They are taken out before it is cut, and put into what is left of
it one parameter after another: a worker has memory for its own part and for one whole parameter.
"""

from __future__ import annotations

import torch
from torch import nn

from paceline.base.mesh import AXES, Mesh
from paceline.base.sharding import ShardingSpec
from paceline.comm.communicator import Group
from paceline.comm.torch_private import pytree
from paceline.compute.state_dict import marks_of
from paceline.parallel.data_parallel import share
from paceline.parallel.parallel_job import ParallelJob

_LIKELY = 0.02  # what stands for all values meanwhile: blocks are run to see what they call


class ModelValues:
    """Those of the parameters of a `job`, which take no memory until they are `put`."""

    def __init__(self, job: ParallelJob) -> None:
        self.job = job
        self._wholes = dict[str, torch.Tensor](job.model.named_parameters())
        if job.blueprint is None:
            for name, param in job.model.named_parameters():
                self._wholes[name], param.data = param.detach(), _empty(param, job.device)
            return
        from paceline.parallel.deferred_init import put

        put(job.blueprint.rest(job.model), job.device)
        bare: dict[int, nn.Parameter] = {}
        for param in job.model.parameters():
            bare[id(param)] = own = nn.Parameter(_empty(param, job.device), param.requires_grad)
            vars(own).update(marks_of(param))
        for held in map(vars, job.model.modules()):
            for name, value in held.items():
                if any(id(leaf) in bare for leaf in pytree.tree_iter(value)):
                    held[name] = pytree.tree_map(lambda leaf: bare.get(id(leaf), leaf), value)
        job.named = {name: param for name, param in job.model.named_parameters() if param.requires_grad}

    def put(self, group: Group, mesh: Mesh, known: bool) -> None:
        """Where parameters were not made yet, the first of the `group` that has one gives its values to the others,
        unless these are `known`. Collective if they are not.
        """
        job = self.job
        beside = group.along(*(axis for axis in AXES if axis != "pipeline"), mesh=mesh)
        for name in [*self._wholes]:
            param, whole = job.model.get_parameter(name), self._wholes.pop(name)
            cut = job.cuts.get(name) or ShardingSpec.unsharded(whole.shape)
            homes = {mesh.coordinate(place, "pipeline") for place, piece in enumerate(cut.pieces) if piece.blocks}
            if len(homes) == 1 and mesh.coordinate(job.shard_index, "pipeline") not in homes:
                continue
            if job.blueprint is not None:
                whole = job.blueprint.value(whole).to(job.device)
                if not known:
                    share([whole], beside if len(homes) == 1 else group)
            own = cut.at(job.shard_index).of(whole)
            param.data = own if own.numel() == whole.numel() else own.clone()
        if job.blueprint is not None and not known:
            share(job.model.buffers(), group)
        job.blueprint = None


def _empty(param: nn.Parameter, device: torch.device) -> torch.Tensor:
    """Of its shape, without memory."""
    return torch.tensor(_LIKELY, dtype=param.dtype).to(device).expand(param.shape)
