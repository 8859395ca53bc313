"""Sharding specs: which block of a tensor a worker holds.

A tensor may be cut along any dimension, in one or several sections, and what that leaves by rows once more. Whatever
saves, hands over, compares or counts it speaks of pieces and blocks, and knows no axis. Torch is not needed: tensors
are only asked for views of themselves.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

Indices = tuple[int, ...]
_LINE = 16  # elements: stretches of different places share no line of a cache


@dataclass(frozen=True)
class RowShards:
    """`count` workers that share the rows of each tensor, as torch.chunk and fully_shard cut them, of whom this one is
    `me`. With one, all rows are its own. A tensor without dimensions is a row of one.
    """

    count: int = 1
    me: int = 0

    def rows(self, length: int, place: int) -> range:
        """Of so many rows those of one place, maybe none."""
        step = -(-length // self.count)
        return range(min(place * step, length), min((place + 1) * step, length))

    def size(self, shape: Sequence[int], place: int) -> int:
        """The elements of a place."""
        length, *rest = [*shape, 1] if shape else (1, 1)
        return len(self.rows(length, place)) * math.prod(rest)

    def width(self, shape: Sequence[int]) -> int:
        """The elements of the place that has most."""
        return self.size(shape, 0)

    def aligned(self, elements: int) -> int:
        return elements if self.count == 1 else -(-elements // _LINE) * _LINE

    def of(self, whole: Tensor, place: int) -> Tensor:
        """The rows of a place, in the memory of the whole."""
        whole = whole if whole.dim() else whole.view(1)
        rows = self.rows(len(whole), place)
        return whole[rows.start : rows.stop]


ALONE = RowShards()


@dataclass(frozen=True)
class Block:
    """A part of a whole tensor: its first indices there, its shape, and its first indices in the tensor that has it."""

    at: Indices
    shape: Indices
    start: Indices

    def rows(self, rows: range) -> Block:
        """Some of its rows, counted from its own first one."""
        if not self.shape:
            return self
        at, start = ((first[0] + rows.start, *first[1:]) for first in (self.at, self.start))
        return Block(at, (len(rows), *self.shape[1:]), start)

    def of(self, local: Tensor) -> Tensor:
        """It, in the memory of the tensor that has it."""
        return _narrowed(local, self.start, self.shape)

    def of_whole(self, whole: Tensor) -> Tensor:
        return _narrowed(whole, self.at, self.shape)


def _narrowed(tensor: Tensor, first: Sequence[int], shape: Sequence[int]) -> Tensor:
    for dim, (start, length) in enumerate(zip(first, shape, strict=True)):
        if length < tensor.shape[dim]:
            tensor = tensor.narrow(dim, start, length)
    return tensor if shape else tensor.view(())


@dataclass(frozen=True)
class LocalShard:
    """What one place holds: a tensor of this `shape`, which the blocks fill."""

    shape: Indices
    blocks: tuple[Block, ...]

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    def rows(self, rows: range) -> LocalShard:
        """Some rows of its tensor."""
        blocks = []
        for block in self.blocks:
            begin, length = (block.start or (0,))[0], (block.shape or (1,))[0]
            first, end = max(rows.start, begin), min(rows.stop, begin + length)
            if first < end:
                part = block.rows(range(first - begin, end - begin))
                blocks.append(replace(part, start=(first - rows.start, *part.start[1:])) if block.shape else block)
        return LocalShard((len(rows), *self.shape[1:]), tuple(blocks))

    def of(self, whole: Tensor) -> Tensor:
        """Its values of a whole tensor; where that is one block, in the memory of the whole."""
        if len(self.blocks) == 1:
            return self.blocks[0].of_whole(whole).view(self.shape)
        made = (whole if whole.dim() else whole.view(1))[:0].new_empty(self.shape)
        self.put(whole, made)
        return made

    def put(self, whole: Tensor, local: Tensor) -> None:
        """Writes the values of a whole tensor into its own."""
        for block in self.blocks:
            block.of(local).copy_(block.of_whole(whole))


@dataclass(frozen=True)
class ShardingSpec:
    """How a tensor of this `shape` is divided in a replica: the piece of each place. Blocks of two places are the same
    part of the whole, or have nothing in common.
    """

    shape: Indices
    pieces: tuple[LocalShard, ...]

    @classmethod
    def unsharded(cls, shape: Sequence[int], places: int = 1) -> ShardingSpec:
        """All of it everywhere."""
        shape, first = tuple(shape), (0,) * len(shape)
        return cls(shape, (LocalShard(shape, (Block(first, shape, first),)),) * places)

    @classmethod
    def split(
        cls, shape: Sequence[int], dim: int, count: int, sections: Sequence[int] | None = None, each: int = 1
    ) -> ShardingSpec:
        """Cut `count` times along a dimension, as torch.chunk cuts, and so in each of `sections` of these lengths, as
        the three of a fused attention weight: a place holds its part of every one. `each` part is held by so many
        places.
        """
        whole = tuple(shape)
        lengths = (whole[dim],) if sections is None else sections

        def first(index: int) -> Indices:
            return tuple(index if number == dim else 0 for number in range(len(whole)))

        pieces: list[LocalShard] = []
        for place in range(count):
            blocks, begins, own = [], 0, 0
            for length in lengths:
                mine = RowShards(count).rows(length, place)
                size = (*whole[:dim], len(mine), *whole[dim + 1 :])
                blocks += [Block(first(begins + mine.start), size, first(own))] if mine else []
                begins, own = begins + length, own + len(mine)
            pieces += [LocalShard((*whole[:dim], own, *whole[dim + 1 :]), tuple(blocks))] * each
        return cls(whole, tuple(pieces))

    def in_rows(self, count: int) -> ShardingSpec:
        """The tensor of each place cut once more by its rows among `count`, which are the outer places now."""
        if count == 1:
            return self
        shards = RowShards(count)
        parts = [
            piece.rows(shards.rows((piece.shape or (1,))[0], outer)) for outer in range(count) for piece in self.pieces
        ]
        return ShardingSpec(self.shape, tuple(parts))

    def place_of(self, rank: int) -> int:
        """A replica begins at each multiple of its workers."""
        return rank % len(self.pieces)

    def at(self, rank: int) -> LocalShard:
        return self.pieces[self.place_of(rank)]

    @cached_property
    def blocks(self) -> Mapping[tuple[Indices, Indices], Mapping[int, Block]]:
        """Every part of the whole, by first indices and shape: who holds it, and as which block of theirs. The first of
        these counts it.
        """
        found: dict[tuple[Indices, Indices], dict[int, Block]] = {}
        for place, piece in enumerate(self.pieces):
            for block in piece.blocks:
                found.setdefault((block.at, block.shape), {})[place] = block
        return found

    def counted(self, place: int) -> list[Block]:
        """The blocks of a place that it is the first to hold: what is counted once, as a norm, counts these."""
        return [held[place] for held in self.blocks.values() if next(iter(held)) == place]


def stacked(cut: ShardingSpec, rows: Sequence[int | None]) -> ShardingSpec:
    """How tensors that are cut so and differ from worker to worker lie one upon another: the worker of each rank has a
    row, or none.
    """
    pieces = []
    for rank, row in enumerate(rows):
        piece = cut.at(rank)
        blocks = () if row is None else tuple(Block((row, *b.at), (1, *b.shape), (0, *b.start)) for b in piece.blocks)
        pieces.append(LocalShard((len(blocks[:1]), *(piece.shape if cut.shape else ())), blocks))
    return ShardingSpec((1 + max(row for row in rows if row is not None), *cut.shape), tuple(pieces))


def counting(cuts: Sequence[ShardingSpec], place: int) -> list[list[Block]] | None:
    """Of each tensor the blocks that count at a place; None where all do, since nobody holds them before."""
    found = [cut.counted(cut.place_of(place)) for cut in cuts]
    pieces = (cut.pieces[cut.place_of(place)] for cut in cuts)
    return None if all(len(some) == len(piece.blocks) for some, piece in zip(found, pieces, strict=True)) else found


@dataclass(frozen=True)
class ShardedTensor:
    """The `tensor` that a place holds of one that is cut."""

    tensor: Tensor
    cut: ShardingSpec
    shard_index: int

    @property
    def shape(self) -> Indices:
        return self.cut.shape


def assemble(whole: Tensor, parts: Iterable[tuple[Sequence[int], Any]], first: int = 0) -> Tensor:
    """Writes parts, each with its first indices in a whole tensor, to where they belong: into rows of it, from the
    `first` on.
    """
    for at, part in parts:
        if not at:
            whole.copy_(part)
            continue
        start = max(first, at[0])
        length = min(first + len(whole), at[0] + len(part)) - start
        if length > 0:
            target = _narrowed(whole, (start - first, *at[1:]), (length, *part.shape[1:]))
            target.copy_(part.narrow(0, start - at[0], length))
    return whole
