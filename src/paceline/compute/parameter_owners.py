"""Gives each sharded parameter an owner, which alone updates it and keeps its optimizer state.

For optimizers whose update of an element depends on the full parameter, such as Muon. In each update the owner gets the
values and gradients that other workers hold, updates the full parameter, and sends back what they hold. So each
parameter is updated once in a replica. On workers that do not own it the optimizers hold an empty tensor.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch.nn import Parameter

from paceline.base.sharding import Block, LocalShard, ShardingSpec
from paceline.comm.communicator import Group
from paceline.compute.full_parameters import in_batches, zeros_for_optimizer
from paceline.compute.state_dict import marked, marks_of


def choose_owners(shapes: Mapping[str, Sequence[int]], workers: int) -> dict[str, int]:
    """Returns the owner of each parameter, such that all workers have about as much to compute.

    A matrix costs its elements times its shorter side, as methods that orthogonalize it multiply it by itself.
    """
    load, owners = [0] * workers, dict[str, int]()
    for name, shape in sorted(shapes.items(), key=lambda one: (-_cost(one[1]), one[0])):
        owner = load.index(min(load))
        owners[name], load[owner] = owner, load[owner] + _cost(shape)
    return owners


def _cost(shape: Sequence[int]) -> int:
    elements = math.prod(shape)
    return elements * min(shape[0], elements // max(shape[0], 1)) if len(shape) > 1 else elements


def spec_of_owner(shape: Sequence[int], owner: int, workers: int) -> ShardingSpec:
    """Returns the spec of a tensor that one worker of a replica holds in full, and the others not at all."""
    full, first = tuple(shape), (0,) * len(shape)
    holds = LocalShard(full, (Block(first, full, first),))
    lacks = LocalShard((0, *full[1:]), ())
    return ShardingSpec(full, tuple(holds if worker == owner else lacks for worker in range(workers)))


class OwnedParameters:
    """Full parameters on their owners, which optimizers hold.

    `params` are this worker's shards by name, `cuts` their sharding in the `replica`, in which this worker has the
    shard number `shard_index`. `owned_cuts` is the sharding of the optimizers' state. With `hosted` the full parameters
    are in host memory.
    """

    def __init__(
        self,
        params: Mapping[str, Parameter],
        cuts: Mapping[str, ShardingSpec],
        shard_index: int,
        replica: Group,
        hosted: bool,
    ) -> None:
        self._params, self._cuts, self._me, self._replica = params, cuts, shard_index, replica
        self._owners = choose_owners({name: cuts[name].shape for name in params}, replica.size)
        self.owned_cuts = {
            name: spec_of_owner(cuts[name].shape, owner, replica.size) for name, owner in self._owners.items()
        }
        self.held: dict[str, Parameter] = {}
        for name, param in params.items():
            tensor = zeros_for_optimizer(self.owned_cuts[name].at(shard_index).shape, param, hosted)
            # Without the marks of a shard, which say how it is sharded: a script that reads it would gather it.
            marks = {key: value for key, value in marks_of(param).items() if not key.startswith("_paceline_")}
            self.held[name] = marked(tensor, marks)

    @contextmanager
    def update(self) -> Iterator[None]:
        """Sends values and gradients to the owners, and the values that these have updated back. Collective."""
        self._replica.declare("parameters for the workers that update them", check=False, kind="weights")
        elements = {name: math.prod(self._cuts[name].shape) for name in self._params}
        batches = [*in_batches(elements, self._params)]
        for names in batches:
            self._to_owners(names, self._params, self.held)
            used = {name: grad for name in names if (grad := self._params[name].grad) is not None}
            for name in names:
                self.held[name].grad = torch.empty_like(self.held[name]) if name in used else None
            if used:
                self._to_owners([*used], used, {n: grad for n in used if (grad := self.held[n].grad) is not None})
        yield
        for names in batches:
            self._from_owners(names)
            for name in names:
                self.held[name].grad = None

    def _to_owners(
        self, names: Sequence[str], shards: Mapping[str, torch.Tensor], full: Mapping[str, torch.Tensor]
    ) -> None:
        """Fills the full tensors of this worker's parameters with the shards of all workers."""
        workers, owned = range(self._replica.size), self._of(self._me, names)
        sent = [
            [block.of(shards[n].detach()) for n in self._of(worker, names) for block in self._cuts[n].counted(self._me)]
            for worker in workers
        ]
        received = [
            [block.of_whole(full[n].detach()) for n in owned for block in self._cuts[n].counted(worker)]
            for worker in workers
        ]
        self._exchange(shards[names[0]], sent, received)

    def _from_owners(self, names: Sequence[str]) -> None:
        """Fills this worker's shards with the values of the owners."""
        workers, owned = range(self._replica.size), self._of(self._me, names)
        sent = [
            [block.of_whole(self.held[n].detach()) for n in owned for block in self._cuts[n].at(worker).blocks]
            for worker in workers
        ]
        blocks = {name: self._cuts[name].at(self._me).blocks for name in names}
        received = [
            [block.of(self._params[n].detach()) for n in self._of(worker, names) for block in blocks[n]]
            for worker in workers
        ]
        self._exchange(self._params[names[0]], sent, received)

    def _exchange(
        self, like: torch.Tensor, sent: Sequence[Sequence[torch.Tensor]], received: Sequence[Sequence[torch.Tensor]]
    ) -> None:
        """Sends `sent[i]` to worker i, and fills `received[i]` with what it sends, through the device of `like`."""
        given = [
            torch.cat([tensor.reshape(-1).to(like.device) for tensor in tensors]) if tensors else like.new_empty(0)
            for tensors in sent
        ]
        taken = [like.new_empty(sum(tensor.numel() for tensor in tensors)) for tensors in received]
        self._replica.exchange(given, taken)
        for flat, tensors in zip(taken, received, strict=True):
            parts = flat.split([tensor.numel() for tensor in tensors]) if tensors else ()
            for tensor, part in zip(tensors, parts, strict=True):
                tensor.copy_(part.view(tensor.shape))

    def _of(self, worker: int, names: Sequence[str]) -> list[str]:
        """Those of the parameters that a worker owns."""
        return [name for name in names if self._owners[name] == worker]
