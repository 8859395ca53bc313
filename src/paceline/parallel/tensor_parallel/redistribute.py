"""Sums, joins and exchanges activations between workers that share a micro-batch (tensor=, context=), with gradients.

Each autograd function's backward is made of the others, so that a gradient may have a gradient (Shoeybi et al.,
"Megatron-LM", 2019, calls the first two f and g).
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch

from paceline.base.sharding import RowShards, ShardingSpec
from paceline.comm.communicator import Group

# How many recently shared tensors are remembered: query, key and value take the same input, one after another.
_SHARED = 4
trace: Any = None  # the CollectiveTrace into whose graph collectives go, while torch.compile traces


@dataclass(frozen=True)
class ShardPlacement:
    """Describes which shard of a tensor each worker has.

    The tensor is divided along `dim`: each of its `sections` (such as the three of a fused attention weight) into
    `count` shards. If there are fewer shards than workers, neighbours have the same one. `group` are these workers;
    None stands for the unit of the Redistributor that moves the tensor. `layers` are the names of the layers that the
    tensor comes from, where placements are inferred.
    """

    dim: int
    sections: tuple[int, ...]
    count: int
    group: Group | None = None
    layers: frozenset[str] = field(default=frozenset(), compare=False)

    @property
    def length(self) -> int:
        """The length of the full tensor along the dimension."""
        return sum(self.sections)

    @property
    def shard_length(self) -> int:
        """The length of a shard along the dimension, if all shards are equal."""
        return self.length // self.count

    @property
    def is_even(self) -> bool:
        """Whether all workers' shards have the same size."""
        return all(section % self.count == 0 for section in self.sections)

    def __reduce__(self) -> Any:
        """Pickles as an empty value: a parameter that a script pickles has full values, so it is not sharded."""
        return OrderedDict, ()  # torch.load accepts it from a file, and `placement_of` treats it as None

    def rows(self, index: int) -> list[range]:
        """Returns the ranges of the shard `index` in each section, counted from the section's start."""
        return [RowShards(self.count).rows(section, index) for section in self.sections]

    def sharding_spec(self, shape: tuple[int, ...], size: int) -> ShardingSpec:
        """Returns the sharding spec of a parameter of this full shape, for `size` workers."""
        return ShardingSpec.split(shape, self.dim, self.count, self.sections, size // self.count)


class _Split(torch.autograd.Function):
    """Passes a tensor that all workers have to their sharded computations; the backward sums their gradients."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, unit: Group) -> torch.Tensor:
        """Returns the tensor as it is."""
        ctx.unit = unit
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Sums the gradient over the unit."""
        return applied(_Sum, grad, ctx.unit), None


class _Sum(torch.autograd.Function):
    """Sums the tensors of all workers; all have the sum, and each passes its gradient back as it is."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, unit: Group) -> torch.Tensor:
        """Sums the tensor over the unit."""
        ctx.unit = unit
        return summed(x, unit)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Returns the gradient as it is."""
        return applied(_Split, grad, ctx.unit), None


class _Join(torch.autograd.Function):
    """Gathers the shards of all workers; in the backward the first holder of each shard takes its gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, redistributor: Redistributor, placement: ShardPlacement) -> torch.Tensor:
        """Returns the full tensor."""
        ctx.redistributor, ctx.placement = redistributor, placement
        return redistributor.gather_shards(x, placement)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        """Returns this worker's shard of the gradient, or zeros if an earlier worker has the same shard."""
        redistributor, placement = cast(Redistributor, ctx.redistributor), cast(ShardPlacement, ctx.placement)
        shard = redistributor.narrow(applied(_Split, grad, redistributor.unit), placement)
        return shard if redistributor.is_first_holder(placement) else shard * 0.0, None, None


class _ScatterSum(torch.autograd.Function):
    """Sums the tensors of all workers, each of which keeps its shard of the sum; the backward gathers the gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, redistributor: Redistributor, placement: ShardPlacement) -> torch.Tensor:
        """Returns this worker's shard of the sum."""
        ctx.redistributor, ctx.placement = redistributor, placement
        return _scatter_shards(redistributor, x, placement)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        """Returns the full gradient."""
        return applied(_GatherToSplit, grad, ctx.redistributor, ctx.placement), None, None


class _GatherToSplit(_Join):
    """Gathers the shards of all workers for their sharded computations; each gets its shard of the gradients' sum."""

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        """Returns this worker's shard of the sum of the gradients."""
        return applied(_ScatterSum, grad, ctx.redistributor, ctx.placement), None, None


class _Exchange(torch.autograd.Function):
    """Turns shards along one dimension into shards along another one; the backward does the reverse."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, redistributor: Redistributor, source: ShardPlacement, target: ShardPlacement
    ) -> torch.Tensor:
        """Returns this worker's shard along the target's dimension."""
        ctx.redistributor, ctx.source, ctx.target = redistributor, source, target
        return redistributor.exchange_shards(x, source, target)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        """Returns this worker's shard of the gradient along the source's dimension."""
        return applied(_Exchange, grad, ctx.redistributor, ctx.target, ctx.source), None, None, None


def applied(function: Any, x: torch.Tensor, *more: Any) -> torch.Tensor:
    """Applies one of these autograd functions. Torch function modes see it as one function with this name."""
    if torch.overrides.has_torch_function((x,)):
        return torch.overrides.handle_torch_function(applied, (x,), function, x, *more)
    with torch._C.DisableTorchFunction():
        return cast(torch.Tensor, function.apply(x, *more))


def memory_order(x: torch.Tensor) -> tuple[list[int], list[int]]:
    """Returns the dimensions in memory order, and the inverse permutation. Random numbers are drawn in this order."""
    strides = x.stride()
    order = sorted(range(x.dim()), key=lambda dim: -strides[dim])
    return order, [order.index(dim) for dim in range(x.dim())]


def summed(x: torch.Tensor, unit: Group) -> torch.Tensor:
    """Returns the sum over a unit in a new tensor with the same memory order."""
    if trace is not None:
        return cast(torch.Tensor, trace.sum(x, unit))
    order, back = memory_order(x)
    in_memory_order = x.permute(order).clone(memory_format=torch.contiguous_format)
    unit.sum(in_memory_order.view(-1))
    return in_memory_order.permute(back)


def _full_without_values(shard: torch.Tensor, placement: ShardPlacement) -> torch.Tensor:
    shape = [*shard.shape]
    shape[placement.dim] = placement.length
    return shard.new_zeros(()).expand(shape)


class Redistributor:
    """Moves shards between the workers of a `unit`.

    `bytes_sent` counts the bytes of sums and gathers: those of the forward, and those that its backward will move.
    With `sends` False, all workers compute without values, and sums and full tensors have only a shape.
    """

    def __init__(self, unit: Group) -> None:
        self.unit, self.size, self.bytes_sent, self.sends = unit, unit.size, 0, True
        self._shared: OrderedDict[int, tuple[weakref.ref[torch.Tensor], torch.Tensor]] = OrderedDict()

    def index(self, placement: ShardPlacement) -> int:
        """Returns the index of this worker's shard."""
        unit = placement.group or self.unit
        return unit.rank * placement.count // unit.size

    def is_first_holder(self, placement: ShardPlacement) -> bool:
        """Whether no earlier worker has the same shard."""
        unit = placement.group or self.unit
        return unit.rank * placement.count % unit.size == 0

    def shape(self, full_shape: Sequence[int], placement: ShardPlacement) -> tuple[int, ...]:
        """Returns the shape of a shard of a tensor with this full shape."""
        length = sum(map(len, placement.rows(self.index(placement))))
        return (*full_shape[: placement.dim], length, *full_shape[placement.dim + 1 :])

    def narrow(self, full: torch.Tensor, placement: ShardPlacement) -> torch.Tensor:
        """Returns this worker's shard of a full tensor."""
        return _sections(full, placement, self.index(placement))

    def refine(self, shard: torch.Tensor, placement: ShardPlacement, count: int) -> torch.Tensor:
        """Returns this worker's shard of a finer division into `count` shards, taken from its present shard.

        `count` is a multiple of the present number of shards.
        """
        ratio = count // placement.count
        within = self.unit.rank * count // self.unit.size - self.index(placement) * ratio
        return _sections(
            shard,
            ShardPlacement(placement.dim, tuple(section // placement.count for section in placement.sections), ratio),
            within,
        )

    def share(self, full: torch.Tensor) -> torch.Tensor:
        """Returns a full tensor for use with shards: the backward sums its gradient over the unit.

        If several functions share the same tensor, its gradient is summed only once.
        """
        if not (full.requires_grad and torch.is_grad_enabled()):
            return full
        entry = self._shared.pop(id(full), None)
        if entry is None or entry[0]() is not full:
            entry = weakref.ref(full), applied(_Split, full, self.unit)
            self._count(full)
        self._shared[id(full)] = entry
        if len(self._shared) > _SHARED:
            self._shared.popitem(last=False)
        return entry[1]

    def _count(self, x: torch.Tensor, times: int = 1, divisor: int = 1) -> None:
        if trace is None:  # in a trace, sizes may be symbols
            self.bytes_sent += times * x.nbytes // divisor

    def take(self, full: torch.Tensor, placement: ShardPlacement) -> torch.Tensor:
        """Returns this worker's shard of a tensor that all workers compute alike; differentiable."""
        return self.narrow(self.share(full), placement)

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the sum of all workers' tensors; differentiable."""
        if not self.sends:
            return x
        self._count(x)
        return applied(_Sum, x, self.unit)

    def scatter_sum(self, x: torch.Tensor, placement: ShardPlacement) -> torch.Tensor:
        """Returns this worker's shard of the sum of all workers' tensors; differentiable. All shards are equal."""
        self._count(x)
        return applied(_ScatterSum, x, self, placement)

    def gather_to_split(self, shard: torch.Tensor, placement: ShardPlacement) -> torch.Tensor:
        """Returns the full tensor of all workers' shards for use with other shards: the backward sums its gradient over
        the unit, of which each worker gets its shard. If several functions use the tensor, it is gathered once.
        """
        if not self.sends:
            return _full_without_values(shard, placement)
        entry = self._shared.pop(id(shard), None)
        if entry is None or entry[0]() is not shard:
            self._count(shard, placement.count)
            entry = weakref.ref(shard), applied(_GatherToSplit, shard, self, placement)
        self._shared[id(shard)] = entry
        if len(self._shared) > _SHARED:
            self._shared.popitem(last=False)
        return entry[1]

    def join(self, shard: torch.Tensor, placement: ShardPlacement) -> torch.Tensor:
        """Returns the full tensor of all workers' shards; differentiable."""
        if not self.sends:
            return _full_without_values(shard, placement)
        self._count(shard)
        return applied(_Join, shard, self, placement)

    def exchange(self, shard: torch.Tensor, source: ShardPlacement, target: ShardPlacement) -> torch.Tensor:
        """Turns this worker's shard along one dimension into its shard along another one; differentiable."""
        times = 2 if shard.requires_grad and torch.is_grad_enabled() else 1
        self._count(shard, times * (self.size - 1), self.size)  # a worker's own part is not sent
        return applied(_Exchange, shard, self, source, target)

    def exchange_shards(self, shard: torch.Tensor, source: ShardPlacement, target: ShardPlacement) -> torch.Tensor:
        """Turns shards along one dimension into shards along another one, without a gradient."""
        if trace is not None:
            return cast(torch.Tensor, trace.exchange(shard, self.unit, source, target))
        outgoing = [_sections(shard, target, index) for index in range(self.size)]
        shape, incoming = list(outgoing[self.unit.rank].shape), []
        for index in range(self.size):
            shape[source.dim] = sum(map(len, source.rows(index)))
            incoming.append(shard.new_empty(shape))
        self.unit.exchange([tensor.reshape(-1) for tensor in outgoing], [tensor.view(-1) for tensor in incoming])
        return torch.cat(incoming, source.dim)

    def gather_shards(self, shard: torch.Tensor, placement: ShardPlacement) -> torch.Tensor:
        """Returns the full tensor of all workers' shards, without a gradient."""
        if trace is not None:
            return cast(torch.Tensor, trace.gather(shard, placement.group or self.unit, placement))
        order, back = memory_order(shard)
        shard, dim, shards = shard.permute(order).contiguous(), back[placement.dim], []
        unit = placement.group or self.unit
        gathered, shape = unit.gather(shard.view(-1)), list(shard.shape)
        for index in range(placement.count):
            lengths = [len(rows) for rows in placement.rows(index)]
            shape[dim] = sum(lengths)
            shards.append(gathered[index * unit.size // placement.count].view(shape).split(lengths, dim))
        full = torch.cat([piece[n] for n in range(len(placement.sections)) for piece in shards], dim)
        return full.permute(back)

    def forget_shared(self) -> None:
        """Forgets the shared tensors of a forward that has ended."""
        self._shared.clear()


def saving_shards(
    moves: Redistributor, full: torch.Tensor, shard: torch.Tensor, placement: ShardPlacement
) -> torch.autograd.graph.saved_tensors_hooks:
    """Returns a context in which autograd saves this worker's shard instead of the full tensor, which the backward
    gathers again.
    """
    address, size, kept, version = full.data_ptr(), full.numel(), shard.detach(), shard._version

    def pack(saved: torch.Tensor) -> torch.Tensor | torch.Size:
        return saved.shape if saved.data_ptr() == address and saved.numel() == size else saved

    def unpack(saved: torch.Tensor | torch.Size) -> torch.Tensor:
        if isinstance(saved, torch.Tensor):
            return saved
        if kept._version != version:
            raise RuntimeError("an input of a layer that tensor= splits was changed in place before the backward")
        return moves.gather_shards(kept, placement).reshape(saved)

    if full.requires_grad and torch.is_grad_enabled():
        moves.bytes_sent += full.nbytes // 2
    return torch.autograd.graph.saved_tensors_hooks(pack, unpack)


def _scatter_shards(moves: Redistributor, x: torch.Tensor, placement: ShardPlacement) -> torch.Tensor:
    """Returns this worker's shard of the sum of all workers' tensors, without a gradient."""
    in_order = x.movedim(placement.dim, 0).clone(memory_format=torch.contiguous_format)
    moves.unit.finish(moves.unit.start_scatter(in_order.view(-1)))
    return in_order.chunk(moves.size)[moves.unit.rank].clone().movedim(0, placement.dim)


class DryRunRedistributor(Redistributor):
    """Tracks placements in one process without moving data: tensors marked as sharded stay full."""

    def __init__(self, size: int) -> None:
        self.size, self.bytes_sent, self.sends = size, 0, True

    def shape(self, full_shape: Sequence[int], placement: ShardPlacement) -> tuple[int, ...]:
        """The full shape: nothing is divided."""
        return tuple(full_shape)

    def narrow(self, full: torch.Tensor, placement: ShardPlacement) -> torch.Tensor:
        """The full tensor."""
        return full

    def refine(self, shard: torch.Tensor, placement: ShardPlacement, count: int) -> torch.Tensor:
        """The tensor as it is."""
        return shard

    def share(self, full: torch.Tensor) -> torch.Tensor:
        """The tensor as it is."""
        return full

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """The tensor as it is: this is the only worker."""
        return x

    def join(self, shard: torch.Tensor, placement: ShardPlacement) -> torch.Tensor:
        """A view, as a joined tensor is another object than its shard."""
        return shard.view_as(shard)

    def exchange(self, shard: torch.Tensor, source: ShardPlacement, target: ShardPlacement) -> torch.Tensor:
        """The tensor as it is."""
        return shard


def _sections(tensor: torch.Tensor, placement: ShardPlacement, index: int) -> torch.Tensor:
    """Returns the shard `index` of a tensor: its part of each section, joined."""
    slices, start = [], 0
    for length, rows in zip(placement.sections, placement.rows(index), strict=True):
        slices.append(tensor.narrow(placement.dim, start + rows.start, len(rows)))
        start += length
    return slices[0] if len(slices) == 1 else torch.cat(slices, placement.dim)
