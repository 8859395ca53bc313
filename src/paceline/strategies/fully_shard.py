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
        self.blocks = blocks_of(job.model)
        _refuse(job.model)
        for block in self.blocks.values():
            fully_shard(block, mesh=mesh, reshard_after_forward=reshard)
        fully_shard(job.model, mesh=mesh, reshard_after_forward=None if reshard else False)
        self.mesh = mesh
        job.rest = self._rest
        job.named = {name: param for name, param in job.model.named_parameters() if param.requires_grad}
        job.own = {name: nn.Parameter(_local(param)) for name, param in job.named.items()}
        groups = _groups(list(job.named), list(self.blocks))
        job.decisions.append(_told(self.blocks, rest=bool(groups[-1])))
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


def blocks_of(model: nn.Module) -> dict[str, nn.Module]:
    """The parts of a model that repeat, by name: children of one kind in a list or a sequence, as a transformer's
    layers are. One whose parameters are also used elsewhere is none.
    """
    found: dict[str, nn.Module] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        if any(prefix.startswith(f"{name}.") or prefix == name for name in found):
            continue
        if isinstance(module, nn.ModuleList | nn.Sequential | nn.ModuleDict):
            children = {n: c for n, c in module.named_children() if next(c.parameters(), None) is not None}
            kinds = [type(child) for child in children.values()]
            dot = f"{prefix}." if prefix else ""
            found |= {f"{dot}{n}": child for n, child in children.items() if kinds.count(type(child)) > 1}
    return {name: block for name, block in found.items() if not _shares(model, name, block)}


def _told(blocks: Mapping[str, nn.Module], rest: bool) -> tuple[str, str]:
    if not blocks:
        return "all parameters are gathered at once", "no part of the model repeats"
    lists: dict[tuple[str, str], list[str]] = {}
    for name, block in blocks.items():
        path, _, last = name.rpartition(".")
        lists.setdefault((path, type(block).__name__), []).append(last)
    told = [f"{path + '.' if path else ''}{names[0]} to {names[-1]} ({kind})" for (path, kind), names in lists.items()]
    what = f"parameters are gathered in {len(blocks) + rest} blocks: {', '.join(told)}{', and the rest' * rest}"
    return what, "children of one kind in a list or a sequence are blocks"


def _shares(model: nn.Module, name: str, block: nn.Module) -> bool:
    own = {id(param) for param in block.parameters()}
    named = model.named_parameters(remove_duplicate=False)
    return any(id(param) in own and not other.startswith(f"{name}.") for other, param in named)


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
