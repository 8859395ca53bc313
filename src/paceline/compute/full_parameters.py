"""Gives optimizers full copies of sharded parameters.

Every worker of the replica makes the same update of the copies.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch.nn import Parameter

from paceline.base.sharding import ShardingSpec, assemble
from paceline.comm.communicator import Group
from paceline.compute.state_dict import marked, marks_of

_AT_ONCE = 1 << 24  # elements that travel together, unless one parameter has more


def in_batches(elements: Mapping[str, int], params: Mapping[str, torch.Tensor]) -> Iterator[list[str]]:
    """Yields the names of parameters that travel together: those of one dtype, with so many `elements`, up to
    `_AT_ONCE`.
    """
    batch, size = list[str](), 0
    for name in sorted(elements, key=lambda name: str(params[name].dtype)):
        if batch and (params[batch[0]].dtype != params[name].dtype or size + elements[name] > _AT_ONCE):
            yield batch
            batch, size = [], 0
        batch.append(name)
        size += elements[name]
    if batch:
        yield batch


class FullParameterCopies:
    """Full copies of sharded parameters, which optimizers hold.

    `params` are this worker's shards by name, `cuts` their sharding in the `replica`, in which this worker has the
    shard number `shard_index`. Each update gathers the copies anew. With `hosted` they are in host memory.
    """

    def __init__(
        self,
        params: Mapping[str, Parameter],
        cuts: Mapping[str, ShardingSpec],
        shard_index: int,
        replica: Group,
        hosted: bool,
    ) -> None:
        self._params, self._cuts, self._shard_index, self._replica = params, cuts, shard_index, replica
        self.copies = {
            name: marked(zeros_for_optimizer(cuts[name].shape, param, hosted), marks_of(param))
            if name in cuts
            else param
            for name, param in params.items()
        }

    def _gather(self, names: Sequence[str], pieces: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> None:
        """Fills full tensors with the shards of all workers."""
        everyone = self._replica.gather(torch.cat([piece.detach().reshape(-1) for piece in pieces]))
        ends = [0] * len(everyone)
        for name, target in zip(names, targets, strict=True):
            cut, shards = self._cuts[name], list[torch.Tensor]()
            for rank, flat in enumerate(everyone):
                piece = cut.at(rank)
                shards.append(flat[ends[rank] : ends[rank] + piece.elements].view(piece.shape))
                ends[rank] += piece.elements
            first = (next(iter(holders.items())) for holders in cut.blocks.values())
            assemble(target, ((block.at, block.of(shards[rank])) for rank, block in first))

    @contextmanager
    def update(self) -> Iterator[None]:
        """Gathers values and gradients into the copies, then writes the updated copies back to shards. Collective."""
        self._replica.declare("full copies of parameters for the optimizer", check=False, kind="weights")
        elements = {name: max(piece.elements for piece in cut.pieces) for name, cut in self._cuts.items()}
        for names in in_batches(elements, self._params):
            self._gather(names, [self._params[n] for n in names], [self.copies[n].detach() for n in names])
            used = [(n, grad) for n in names if (grad := self._params[n].grad) is not None]
            for name in names:
                self.copies[name].grad = None
            for name, _ in used:
                self.copies[name].grad = torch.empty_like(self.copies[name])
            if used:
                grads = [copy for name, _ in used if (copy := self.copies[name].grad) is not None]
                self._gather([name for name, _ in used], [grad for _, grad in used], grads)
        yield
        for name, cut in self._cuts.items():
            self._params[name].detach().copy_(cut.at(self._shard_index).of(self.copies[name].detach()))
            self.copies[name].grad = None


def zeros_for_optimizer(shape: Sequence[int], like: torch.Tensor, hosted: bool) -> torch.Tensor:
    """A tensor for an optimizer to hold: on the device of `like`, or, if `hosted`, in host memory."""
    return torch.zeros(shape, dtype=like.dtype, device="cpu" if hosted else like.device)
