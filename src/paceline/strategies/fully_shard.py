"""Levels 2 and 3 of ZeRO over torch's fully_shard (Zhao et al., "PyTorch FSDP: Experiences on Scaling Fully Sharded
Data Parallel", VLDB 2023), which takes half a second to import: only plans that say so do.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Shard as Cut

from paceline.comm.buckets import Buckets
from paceline.comm.group import Group
from paceline.comm.places import Places, Rows
from paceline.comm.staging import Staging
from paceline.errors import UsageError
from paceline.strategies.base import Job, Orders, Ready, Single, Strategy, Sums
from paceline.strategies.blocks import NONE, WHY, blocks_of, told
from paceline.strategies.pieces import MicroBatch


class FullyShard(Strategy):
    """Between two steps each place holds its rows of the parameters alone, and never more of a gradient
    than a few blocks.

    torch's fully_shard gathers the parameters of a block before it is used and frees them after backward, with
    `reshard` also after forward. Gradients do not go its way, which divides them and knows no exact sums: they leave by
    `Staging`, which hears of them from autograd.
    """

    def __init__(self, job: Job, replica: Group, reshard: bool) -> None:
        self.job, self.replica = job, replica
        self.places = Places(replica.size, replica.rank)
        shapes = [param.shape for param in job.named.values()]
        replica.lend_to_torch()
        mesh = init_device_mesh(job.device.type, (replica.size,))
        _refuse(job.model)
        self.blocks = blocks_of(job.model)
        groups = _groups(list(job.named), list(self.blocks))
        rest = ", and the rest" if groups[-1] else ""
        what = f"parameters are gathered in {len(self.blocks) + bool(rest)} blocks: {told(self.blocks)}{rest}"
        job.decisions.append((what, WHY) if self.blocks else ("all parameters are gathered at once", NONE))
        for block in self.blocks.values():
            fully_shard(block, mesh=mesh, reshard_after_forward=reshard)
        fully_shard(job.model, mesh=mesh, reshard_after_forward=None if reshard else False)
        self.mesh = mesh
        job.rest = self._rest
        job.named = {name: param for name, param in job.model.named_parameters() if param.requires_grad}
        job.own = {name: nn.Parameter(_local(param)) for name, param in job.named.items()}
        self._hooked: dict[int, nn.Parameter] = {}
        self.inner = Single(job, None, self.places, partial(self._staged, shapes, groups))
        numbers = {name: number for number, name in enumerate(job.named)}
        for prefix, module in [*self.blocks.items(), ("", job.model)]:
            names = groups[[*self.blocks, ""].index(prefix)]
            module.register_forward_pre_hook(partial(self._look, [(numbers[n], *_owner(job.model, n)) for n in names]))

    def _staged(self, shapes: list[torch.Size], groups: list[list[str]], home: Buckets) -> Staging:
        numbers = {name: number for number, name in enumerate(self.job.named)}
        blocks = [[numbers[name] for name in reversed(names)] for names in [*groups[-2::-1], groups[-1]] if names]
        self.staging = Staging(home, shapes, blocks, self.replica)
        return self.staging

    def _look(self, places: Sequence[tuple[int, nn.Module, str]], module: nn.Module, given: Any) -> None:
        """The whole parameters of a module are there: makes sure that their gradients are heard of."""
        for number, owner, name in places:
            param = owner._parameters[name]
            if param is not None and self._hooked.get(number) is not param:
                self._hooked[number] = param
                param.register_post_accumulate_grad_hook(partial(self.staging.land, number))

    def gradients(self, micro_batches: Sequence[MicroBatch], orders: Orders, ready: Ready | None = None) -> Sums:
        self.replica.enter(f"step {orders.step + 1}", check=False, kind="gradients")
        return self.inner.gradients(micro_batches, orders, ready)

    def _rest(self) -> None:
        for module in (self.job.model, *self.blocks.values()):
            assert isinstance(module, FSDPModule)
            module.reshard()

    def squares(self, orders: Orders, known: float | None = None) -> torch.Tensor:
        return self.replica.sum(self.inner.squares(orders, known))

    def state(self) -> dict[str, Any]:
        state = super().state()
        state["model"] = {
            name: Rows(_local(value), self.places, tuple(value.shape)) if isinstance(value, DTensor) else value
            for name, value in state["model"].items()
        }
        return state

    def load(self, state: Mapping[str, Any]) -> None:
        wanted = self.job.model.state_dict(keep_vars=True)
        model = {
            name: self._piece(value) if isinstance(wanted.get(name), DTensor) and value.dim() else value
            for name, value in state["model"].items()
        }
        super().load({**state, "model": model})

    def _piece(self, whole: torch.Tensor) -> DTensor:
        own = self.places.of(whole, self.places.me).to(self.job.device)
        return DTensor.from_local(own, self.mesh, [Cut(0)], shape=whole.shape, stride=whole.stride(), run_check=False)

    def abort(self, again: bool = False) -> None:
        self.inner.abort(again)
        assert isinstance(self.job.model, FSDPModule)
        self.job.model.reset_iter_state()


def _refuse(model: nn.Module) -> None:
    for name, param in model.named_parameters():
        if param.dim() == 0:
            what = f"parameter {name} has no dimensions and cannot be cut in rows"
            raise UsageError(what, "make its shape (1,), or say zero=1")


def _groups(names: Iterable[str], blocks: Sequence[str]) -> list[list[str]]:
    """Parameters by the block that they are in, and at last those that are in none."""
    groups: list[list[str]] = [[] for _ in [*blocks, ""]]
    for name in names:
        place = next((place for place, block in enumerate(blocks) if name.startswith(f"{block}.")), len(blocks))
        groups[place].append(name)
    return groups


def _owner(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    path, _, leaf = name.rpartition(".")
    return model.get_submodule(path), leaf


def _local(param: torch.Tensor) -> torch.Tensor:
    assert isinstance(param, DTensor)
    return param.to_local().detach()
