"""Moves shards of activations between the workers of a unit.

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

_SHARED = 4  # tensors that several layers or functions take in, as query, key and value do, one after another


@dataclass(frozen=True)
class ShardPlacement:
    """What a worker has of a tensor: along `dim`, of each section (as the three of a fused attention weight) one of
    `count` pieces. If there are fewer pieces than workers, neighbours have the same one. `of`: the layers that it
    comes from, where that is followed.
    """

    dim: int
    sections: tuple[int, ...]
    count: int
    layers: frozenset[str] = field(default=frozenset(), compare=False)

    @property
    def length(self) -> int:
        """Of the whole, along the dimension."""
        return sum(self.sections)

    @property
    def shard_length(self) -> int:
        """Of a piece, if all are equal."""
        return self.length // self.count

    @property
    def is_even(self) -> bool:
        return all(section % self.count == 0 for section in self.sections)

    def __reduce__(self) -> Any:
        """A parameter that a script pickles, whose values are whole then, is no part."""
        return OrderedDict, ()  # which torch.load takes from a file, and `part_of` for none

    def rows(self, index: int) -> list[range]:
        """Those of a piece, in each section, as counted in it."""
        return [RowShards(self.count).rows(section, index) for section in self.sections]

    def cut(self, shape: tuple[int, ...], size: int) -> ShardingSpec:
        """Of a parameter of this shape, for so many workers."""
        return ShardingSpec.split(shape, self.dim, self.count, self.sections, size // self.count)


class _Split(torch.autograd.Function):
    """What all have, each uses for its own part: the gradients of the parts are added up."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, unit: Group) -> torch.Tensor:
        ctx.unit = unit
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return applied(_Sum, grad, ctx.unit), None


class _Sum(torch.autograd.Function):
    """What each has a part of is added up: all have it, and all have its gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, unit: Group) -> torch.Tensor:
        ctx.unit = unit
        return summed(x, unit)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return applied(_Split, grad, ctx.unit), None


class _Join(torch.autograd.Function):
    """Parts become whole everywhere; of the gradient, which all have, the first holder of each piece takes it."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, moves: Redistributor, part: ShardPlacement) -> torch.Tensor:
        ctx.moves, ctx.part = moves, part
        return moves.gather_shards(x, part)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        moves, part = cast(Redistributor, ctx.moves), cast(ShardPlacement, ctx.part)
        own = moves.narrow(applied(_Split, grad, moves.unit), part)
        return own if moves.is_first_holder(part) else own * 0.0, None, None


class _Exchange(torch.autograd.Function):
    """Pieces along one dimension become pieces along another one; gradients go the other way."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, moves: Redistributor, have: ShardPlacement, want: ShardPlacement
    ) -> torch.Tensor:
        ctx.moves, ctx.have, ctx.want = moves, have, want
        return moves.exchange_shards(x, have, want)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return applied(_Exchange, grad, ctx.moves, ctx.want, ctx.have), None, None, None


def applied(function: Any, x: torch.Tensor, *more: Any) -> torch.Tensor:
    """What one of these makes of a tensor; who follows functions sees a function of this name."""
    if torch.overrides.has_torch_function((x,)):
        return torch.overrides.handle_torch_function(applied, (x,), function, x, *more)
    with torch._C.DisableTorchFunction():
        return cast(torch.Tensor, function.apply(x, *more))


def memory_order(x: torch.Tensor) -> tuple[list[int], list[int]]:
    """The dimensions as they follow in the memory, and the way back: what is drawn for a tensor goes by it."""
    strides = x.stride()
    order = sorted(range(x.dim()), key=lambda dim: -strides[dim])
    return order, [order.index(dim) for dim in range(x.dim())]


def summed(x: torch.Tensor, unit: Group) -> torch.Tensor:
    """Over a unit, in a tensor of its own that lies in the memory as this one does."""
    order, back = memory_order(x)
    made = x.permute(order).clone(memory_format=torch.contiguous_format)
    unit.sum(made.view(-1))
    return made.permute(back)


class Redistributor:
    """What is done with parts by one worker of a `unit`. `sent`: the bytes of sums and gathers, of the forward when
    they are done and of the backward that will follow it.
    """

    def __init__(self, unit: Group) -> None:
        self.unit, self.size, self.sent = unit, unit.size, 0
        self._shared: OrderedDict[int, tuple[weakref.ref[torch.Tensor], torch.Tensor]] = OrderedDict()

    def index(self, part: ShardPlacement) -> int:
        """The number of the piece that this worker has."""
        return self.unit.rank * part.count // self.unit.size

    def is_first_holder(self, part: ShardPlacement) -> bool:
        """Whether nobody before this worker has the same piece."""
        return self.unit.rank * part.count % self.unit.size == 0

    def shape(self, whole: Sequence[int], part: ShardPlacement) -> tuple[int, ...]:
        """Of a part."""
        return (*whole[: part.dim], part.shard_length, *whole[part.dim + 1 :])

    def narrow(self, whole: torch.Tensor, part: ShardPlacement) -> torch.Tensor:
        """The own piece of what all have."""
        return _sections(whole, part, self.index(part))

    def refine(self, x: torch.Tensor, part: ShardPlacement, count: int) -> torch.Tensor:
        """Of the own piece that of a division into `count`, several for each piece of `part`."""
        times = count // part.count
        within = self.unit.rank * count // self.unit.size - self.index(part) * times
        return _sections(
            x, ShardPlacement(part.dim, tuple(section // part.count for section in part.sections), times), within
        )

    def share(self, whole: torch.Tensor) -> torch.Tensor:
        """What all have, to be used with parts. What several take in is added up once in the backward."""
        if not (whole.requires_grad and torch.is_grad_enabled()):
            return whole
        known = self._shared.pop(id(whole), None)
        if known is None or known[0]() is not whole:
            known = weakref.ref(whole), applied(_Split, whole, self.unit)
            self.sent += whole.nbytes
        self._shared[id(whole)] = known
        if len(self._shared) > _SHARED:
            self._shared.popitem(last=False)
        return known[1]

    def take(self, whole: torch.Tensor, part: ShardPlacement) -> torch.Tensor:
        """The own piece of what all have and compute alike."""
        return self.narrow(self.share(whole), part)

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """What each has a summand of."""
        self.sent += x.nbytes
        return applied(_Sum, x, self.unit)

    def join(self, x: torch.Tensor, part: ShardPlacement) -> torch.Tensor:
        """The whole of what each has a piece of."""
        self.sent += x.nbytes
        return applied(_Join, x, self, part)

    def exchange(self, x: torch.Tensor, have: ShardPlacement, want: ShardPlacement) -> torch.Tensor:
        """Of what each has a piece of along one dimension, a piece along another one that all have whole."""
        self.sent += x.nbytes * (2 if x.requires_grad and torch.is_grad_enabled() else 1)
        return applied(_Exchange, x, self, have, want)

    def exchange_shards(self, x: torch.Tensor, have: ShardPlacement, want: ShardPlacement) -> torch.Tensor:
        given = [_sections(x, want, index) for index in range(self.size)]
        shape, mine = list(given[self.unit.rank].shape), []
        for index in range(self.size):
            shape[have.dim] = sum(map(len, have.rows(index)))
            mine.append(x.new_empty(shape))
        self.unit.exchange([one.reshape(-1) for one in given], [one.view(-1) for one in mine])
        return torch.cat(mine, have.dim)

    def gather_shards(self, x: torch.Tensor, part: ShardPlacement) -> torch.Tensor:
        order, back = memory_order(x)
        x, dim, pieces = x.permute(order).contiguous(), back[part.dim], []
        everyone, shape = self.unit.gather(x.view(-1)), list(x.shape)
        for index in range(part.count):
            lengths = [len(rows) for rows in part.rows(index)]
            shape[dim] = sum(lengths)
            pieces.append(everyone[index * self.size // part.count].view(shape).split(lengths, dim))
        whole = torch.cat([piece[n] for n in range(len(part.sections)) for piece in pieces], dim)
        return whole.permute(back)

    def rest(self) -> None:
        """A forward has ended: nothing of it is kept."""
        self._shared.clear()


class DryRunRedistributor(Redistributor):
    """The same in one process that has all: parts stay whole tensors, only that they are parts is followed."""

    def __init__(self, size: int) -> None:
        self.size, self.sent = size, 0

    def shape(self, whole: Sequence[int], part: ShardPlacement) -> tuple[int, ...]:
        return tuple(whole)

    def narrow(self, whole: torch.Tensor, part: ShardPlacement) -> torch.Tensor:
        return whole

    def refine(self, x: torch.Tensor, part: ShardPlacement, count: int) -> torch.Tensor:
        return x

    def share(self, whole: torch.Tensor) -> torch.Tensor:
        return whole

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def join(self, x: torch.Tensor, part: ShardPlacement) -> torch.Tensor:
        return x.view_as(x)

    def exchange(self, x: torch.Tensor, have: ShardPlacement, want: ShardPlacement) -> torch.Tensor:
        return x


def _sections(x: torch.Tensor, part: ShardPlacement, index: int) -> torch.Tensor:
    """A piece of each section."""
    found, start = [], 0
    for length, rows in zip(part.sections, part.rows(index), strict=True):
        found.append(x.narrow(part.dim, start + rows.start, len(rows)))
        start += length
    return found[0] if len(found) == 1 else torch.cat(found, part.dim)
