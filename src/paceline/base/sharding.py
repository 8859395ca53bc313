"""Sharding specs: which block of a tensor a worker holds.

A tensor may be cut along any dimension, in one or several sections, and what that leaves by rows once more. Whatever
saves, hands over, compares or counts it speaks of pieces and blocks, and knows no axis. This module does not import
torch: it only takes views of the tensors that it gets.
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
_LINE = 16  # elements: the shards of two workers share no cache line


@dataclass(frozen=True)
class RowShards:
    """Divides the rows of each tensor among `count` workers, as torch.chunk and fully_shard do.

    `me` is the shard index of this worker. With one worker, it has all rows. A tensor without dimensions counts as one
    row.
    """

    count: int = 1
    me: int = 0

    def rows(self, length: int, shard_index: int) -> range:
        """Returns the rows of one shard, which may be none, of a tensor with `length` rows."""
        step = -(-length // self.count)
        return range(min(shard_index * step, length), min((shard_index + 1) * step, length))

    def size(self, shape: Sequence[int], shard_index: int) -> int:
        """Returns how many elements one shard of a tensor of this shape has."""
        length, *rest = [*shape, 1] if shape else (1, 1)
        return len(self.rows(length, shard_index)) * math.prod(rest)

    def width(self, shape: Sequence[int]) -> int:
        """Returns how many elements the largest shard has."""
        return self.size(shape, 0)

    def aligned(self, elements: int) -> int:
        """Rounds a number of elements up to whole cache lines, unless one worker has all rows."""
        return elements if self.count == 1 else -(-elements // _LINE) * _LINE

    def of(self, full: Tensor, shard_index: int) -> Tensor:
        """Returns the rows of one shard as a view of the full tensor."""
        full = full if full.dim() else full.view(1)
        rows = self.rows(len(full), shard_index)
        return full[rows.start : rows.stop]


ALONE = RowShards()


@dataclass(frozen=True)
class Block:
    """A block of a full tensor that a local tensor holds.

    `at` are the block's first indices in the full tensor, `start` those in the local tensor.
    """

    at: Indices
    shape: Indices
    start: Indices

    def rows(self, rows: range) -> Block:
        """Returns the block of some of its rows, which are counted from the first row of this block."""
        if not self.shape:
            return self
        at, start = ((first[0] + rows.start, *first[1:]) for first in (self.at, self.start))
        return Block(at, (len(rows), *self.shape[1:]), start)

    def of(self, local: Tensor) -> Tensor:
        """Returns this block as a view of the local tensor that holds it."""
        return _narrowed(local, self.start, self.shape)

    def of_whole(self, full: Tensor) -> Tensor:
        """Returns this block as a view of the full tensor."""
        return _narrowed(full, self.at, self.shape)


def _narrowed(tensor: Tensor, first: Sequence[int], shape: Sequence[int]) -> Tensor:
    for dim, (start, length) in enumerate(zip(first, shape, strict=True)):
        if length < tensor.shape[dim]:
            tensor = tensor.narrow(dim, start, length)
    return tensor if shape else tensor.view(())


@dataclass(frozen=True)
class LocalShard:
    """What one worker of a replica holds: a local tensor of this `shape`, which the blocks fill."""

    shape: Indices
    blocks: tuple[Block, ...]

    @property
    def elements(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    def rows(self, rows: range) -> LocalShard:
        """Returns the shard that consists of some rows of this one."""
        blocks = []
        for block in self.blocks:
            begin, length = (block.start or (0,))[0], (block.shape or (1,))[0]
            first, end = max(rows.start, begin), min(rows.stop, begin + length)
            if first < end:
                part = block.rows(range(first - begin, end - begin))
                blocks.append(replace(part, start=(first - rows.start, *part.start[1:])) if block.shape else block)
        return LocalShard((len(rows), *self.shape[1:]), tuple(blocks))

    def of(self, full: Tensor) -> Tensor:
        """Returns this shard of a full tensor: a view if the shard is one block, else a copy."""
        if len(self.blocks) == 1:
            return self.blocks[0].of_whole(full).view(self.shape)
        local = (full if full.dim() else full.view(1))[:0].new_empty(self.shape)
        self.put(full, local)
        return local

    def put(self, full: Tensor, local: Tensor) -> None:
        """Copies this shard of a full tensor into a local tensor."""
        for block in self.blocks:
            block.of(local).copy_(block.of_whole(full))


@dataclass(frozen=True)
class ShardingSpec:
    """Says how a tensor of this `shape` is divided in a replica: `pieces` has the shard of each worker of the replica.

    Two blocks are the same part of the full tensor, or do not overlap.
    """

    shape: Indices
    pieces: tuple[LocalShard, ...]

    @classmethod
    def unsharded(cls, shape: Sequence[int], shards: int = 1) -> ShardingSpec:
        """Returns the spec of a tensor that each of the `shards` workers of a replica has in full."""
        shape, first = tuple(shape), (0,) * len(shape)
        return cls(shape, (LocalShard(shape, (Block(first, shape, first),)),) * shards)

    @classmethod
    def split(
        cls, shape: Sequence[int], dim: int, count: int, sections: Sequence[int] | None = None, each: int = 1
    ) -> ShardingSpec:
        """Returns the spec of a tensor that is cut into `count` shards along a dimension, as torch.chunk cuts.

        With `sections`, the dimension consists of sections of these lengths, such as the three of a fused attention
        weight: each is cut so, and a shard has its part of every section. Each shard is held by `each` consecutive
        workers.
        """
        full_shape = tuple(shape)
        lengths = (full_shape[dim],) if sections is None else sections

        def first(index: int) -> Indices:
            return tuple(index if number == dim else 0 for number in range(len(full_shape)))

        pieces: list[LocalShard] = []
        for shard_index in range(count):
            blocks, section_start, local_length = [], 0, 0
            for length in lengths:
                cut = RowShards(count).rows(length, shard_index)
                size = (*full_shape[:dim], len(cut), *full_shape[dim + 1 :])
                blocks += [Block(first(section_start + cut.start), size, first(local_length))] if cut else []
                section_start, local_length = section_start + length, local_length + len(cut)
            local_shape = (*full_shape[:dim], local_length, *full_shape[dim + 1 :])
            pieces += [LocalShard(local_shape, tuple(blocks))] * each
        return cls(full_shape, tuple(pieces))

    def in_rows(self, count: int) -> ShardingSpec:
        """Returns the spec whose shards are those of this one, each cut once more by rows among `count` workers.

        The workers that share the rows of a shard are a whole period of this spec apart.
        """
        if count == 1:
            return self
        shards = RowShards(count)
        parts = [
            piece.rows(shards.rows((piece.shape or (1,))[0], outer)) for outer in range(count) for piece in self.pieces
        ]
        return ShardingSpec(self.shape, tuple(parts))

    def shard_index_of(self, rank: int) -> int:
        """Returns the position of a worker in its replica; a replica begins at each multiple of its workers."""
        return rank % len(self.pieces)

    def at(self, rank: int) -> LocalShard:
        """Returns the shard that a worker holds."""
        return self.pieces[self.shard_index_of(rank)]

    @cached_property
    def blocks(self) -> Mapping[tuple[Indices, Indices], Mapping[int, Block]]:
        """The blocks of the full tensor, by first indices and shape: {shard index: that worker's block}.

        The first worker of a block counts it, see `counted`.
        """
        holders: dict[tuple[Indices, Indices], dict[int, Block]] = {}
        for shard_index, piece in enumerate(self.pieces):
            for block in piece.blocks:
                holders.setdefault((block.at, block.shape), {})[shard_index] = block
        return holders

    def counted(self, shard_index: int) -> list[Block]:
        """Returns the blocks that this worker of a replica is the first to hold.

        Whatever must count each element once, such as a norm, sums over these.
        """
        return [held[shard_index] for held in self.blocks.values() if next(iter(held)) == shard_index]


def stacked(cut: ShardingSpec, rows: Sequence[int | None]) -> ShardingSpec:
    """Returns the spec of a stack of tensors that differ from worker to worker, each sharded by `cut`.

    `rows` has the row of the stack that each rank's tensor is, or None where the rank has none.
    """
    pieces = []
    for rank, row in enumerate(rows):
        piece = cut.at(rank)
        blocks = () if row is None else tuple(Block((row, *b.at), (1, *b.shape), (0, *b.start)) for b in piece.blocks)
        pieces.append(LocalShard((len(blocks[:1]), *(piece.shape if cut.shape else ())), blocks))
    return ShardingSpec((1 + max(row for row in rows if row is not None), *cut.shape), tuple(pieces))


def counting(cuts: Sequence[ShardingSpec], rank: int) -> list[list[Block]] | None:
    """Returns, for each tensor, the blocks that a worker counts; None if it counts all blocks that it holds."""
    counted = [cut.counted(cut.shard_index_of(rank)) for cut in cuts]
    pieces = (cut.pieces[cut.shard_index_of(rank)] for cut in cuts)
    is_complete = all(len(blocks) == len(piece.blocks) for blocks, piece in zip(counted, pieces, strict=True))
    return None if is_complete else counted


@dataclass(frozen=True)
class ShardedTensor:
    """A sharded tensor: `tensor` is the local shard of the worker with this `shard_index`."""

    tensor: Tensor
    cut: ShardingSpec
    shard_index: int

    @property
    def shape(self) -> Indices:
        """The shape of the full tensor."""
        return self.cut.shape


def assemble(target: Tensor, parts: Iterable[tuple[Sequence[int], Any]], first: int = 0) -> Tensor:
    """Copies parts, each given with its first indices in the full tensor, into `target`, and returns it.

    `target` has the rows of the full tensor from `first` on; what lies outside of them is left out.
    """
    for at, part in parts:
        if not at:
            target.copy_(part)
            continue
        start = max(first, at[0])
        length = min(first + len(target), at[0] + len(part)) - start
        if length > 0:
            block = _narrowed(target, (start - first, *at[1:]), (length, *part.shape[1:]))
            block.copy_(part.narrow(0, start - at[0], length))
    return target
