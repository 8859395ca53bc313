"""Torch operators for the collectives of compiled code: functional, with shapes that torch.compile can derive.

While `tracing()` is active, `Redistributor` puts these operators into the graph instead of running its collectives.
All workers of a unit must run the operators of a graph in one order, but a compiler may reorder what is independent. So
each operator takes an empty tensor that the operator before it has made.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from paceline.comm.communicator import Group
from paceline.parallel.tensor_parallel import redistribute
from paceline.parallel.tensor_parallel.redistribute import Redistributor, ShardPlacement, memory_order

Tensor = torch.Tensor
_units: list[Group] = []  # the groups that graphs refer to by their index


@torch.library.custom_op("paceline::sum_shards", mutates_args=())
def _sum_shards(x: Tensor, after: Tensor | None, unit: int) -> tuple[Tensor, Tensor]:
    return redistribute.summed(x, _units[unit]), x.new_empty(0)


@_sum_shards.register_fake
def _(x: Tensor, after: Tensor | None, unit: int) -> tuple[Tensor, Tensor]:
    order, back = memory_order(x)
    return x.permute(order).clone(memory_format=torch.contiguous_format).permute(back), x.new_empty(0)


@torch.library.custom_op("paceline::gather_shards", mutates_args=())
def _gather_shards(
    x: Tensor, after: Tensor | None, unit: int, dim: int, sections: Sequence[int], count: int
) -> tuple[Tensor, Tensor]:
    placement = ShardPlacement(dim, tuple(sections), count)
    return Redistributor(_units[unit]).gather_shards(x, placement), x.new_empty(0)


@_gather_shards.register_fake
def _(
    x: Tensor, after: Tensor | None, unit: int, dim: int, sections: Sequence[int], count: int
) -> tuple[Tensor, Tensor]:
    order, back = memory_order(x)
    shape = [sum(sections) if n == dim else x.shape[n] for n in order]
    return x.new_empty(shape).permute(back), x.new_empty(0)


@torch.library.custom_op("paceline::exchange_shards", mutates_args=())
def _exchange_shards(
    x: Tensor, after: Tensor | None, unit: int, source: int, source_length: int, target: int, target_length: int
) -> tuple[Tensor, Tensor]:
    moves = Redistributor(_units[unit])
    placements = [
        ShardPlacement(dim, (length,), moves.size) for dim, length in ((source, source_length), (target, target_length))
    ]
    return moves.exchange_shards(x, *placements), x.new_empty(0)


@_exchange_shards.register_fake
def _(
    x: Tensor, after: Tensor | None, unit: int, source: int, source_length: int, target: int, target_length: int
) -> tuple[Tensor, Tensor]:
    shape = list(x.shape)
    shape[source] = source_length
    shape[target] = target_length // _units[unit].size
    return x.new_empty(shape), x.new_empty(0)


class CollectiveTrace:
    """Puts the collectives of a Redistributor into the graph that is traced."""

    def __init__(self) -> None:
        self._last: dict[bool, Tensor] = {}  # the last operator's empty tensor, of the forward and of the backward

    def start(self) -> None:
        """Begins a trace: its first collective comes after none."""
        self._last.clear()

    def sum(self, x: Tensor, unit: Group) -> Tensor:
        """Returns the sum over a unit."""
        return self._ordered(_sum_shards, x, unit)

    def gather(self, x: Tensor, unit: Group, placement: ShardPlacement) -> Tensor:
        """Returns the full tensor of all workers' shards."""
        return self._ordered(_gather_shards, x, unit, placement.dim, list(placement.sections), placement.count)

    def exchange(self, x: Tensor, unit: Group, source: ShardPlacement, target: ShardPlacement) -> Tensor:
        """Turns shards along one dimension into shards along another one."""
        return self._ordered(_exchange_shards, x, unit, source.dim, source.length, target.dim, target.length)

    def _ordered(self, operator: Any, x: Tensor, unit: Group, *arguments: Any) -> Tensor:
        in_backward = torch._C._current_graph_task_id() != -1
        output: Tensor
        output, self._last[in_backward] = operator(x, self._last.get(in_backward), _index_of(unit), *arguments)
        return output


def _index_of(unit: Group) -> int:
    """Returns the number of a group in graphs."""
    if not any(one is unit for one in _units):
        _units.append(unit)
    return next(number for number, one in enumerate(_units) if one is unit)


@contextmanager
def tracing() -> Iterator[CollectiveTrace]:
    """Makes Redistributors put operators into the graph that is traced in the body."""
    previous, redistribute.trace = redistribute.trace, CollectiveTrace()
    try:
        yield redistribute.trace
    finally:
        redistribute.trace = previous
