"""Rules for the functions of `torch.nn.attention` (flex_attention, varlen_attn) on this worker's heads.

Where tensor= divides the heads, workers compute with these. Where context= divides sequences, shards of them are
exchanged for full sequences of some heads, and back. The functions of the script that change the scores of
flex_attention, or mask pairs, get the numbers of heads in the full tensors; block masks, and the bounds of documents,
are those of full sequences.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from paceline.parallel.tensor_parallel.redistribute import Redistributor, ShardPlacement
from paceline.parallel.tensor_parallel.sharded_mode import (
    UNKNOWN,
    Rule,
    ShardedTensorMode,
    Tensor,
    placement_of,
    set_placement,
)
from paceline.parallel.tensor_parallel.uncompiled_code import FLEX

_HEADS = 1  # the dimension of heads in queries, keys and values
Mod = Callable[..., Tensor]


def _flex_by_heads(mode: ShardedTensorMode, function: Any, args: Any, kwargs: Any) -> Any:
    """Computes flex_attention of heads that are divided among workers."""
    query, key, value, *others = args
    heads = _shared_heads(query, key, value)
    if heads is None:
        return UNKNOWN
    made = function(query, key, value, *_for_heads(mode.redistributor, heads, others))
    return tuple(set_placement(x, heads) if x.numel() else x for x in made)


def _varlen_by_heads(mode: ShardedTensorMode, function: Any, args: Any, kwargs: Any) -> Any:
    """Computes varlen_attn of heads that are divided among workers."""
    heads = _shared_heads(*args[:3])
    if heads is None:
        return UNKNOWN
    output, log_sums, *more = function(*args, **kwargs)
    return set_placement(output, heads), set_placement(log_sums, replace(heads, dim=0)), *more


def _flex_of_sequences(mode: ShardedTensorMode, function: Any, args: Any, kwargs: Any) -> Any:
    """Computes flex_attention of sequence shards (rows, heads, tokens, width).

    UNKNOWN if the workers cannot divide the heads of the queries.
    """
    exchange = _HeadExchange.of(mode, args[0], 2)
    if exchange is None:
        return UNKNOWN
    made = function(*map(exchange.to_heads, args[:3]), *_for_heads(mode.redistributor, exchange.heads, args[3:]))
    return tuple(exchange.to_tokens(x, 2, _HEADS) if x.numel() else x for x in made)


def _varlen_of_sequences(mode: ShardedTensorMode, function: Any, args: Any, kwargs: Any) -> Any:
    """Computes varlen_attn of sequence shards (tokens of all rows, heads, width).

    UNKNOWN if the workers cannot divide the heads of the queries.
    """
    exchange = _HeadExchange.of(mode, args[0], 0)
    if exchange is None:
        return UNKNOWN
    output, log_sums, *more = function(*map(exchange.to_heads, args[:3]), *args[3:], **kwargs)
    return exchange.to_tokens(output, 0, _HEADS), exchange.to_tokens(log_sums, 1, 0), *more


BY_HEADS: dict[str, Rule] = {FLEX: _flex_by_heads, "_varlen_attn": _varlen_by_heads}
OF_SEQUENCES: dict[str, Rule] = {FLEX: _flex_of_sequences, "_varlen_attn": _varlen_of_sequences}


def _shared_heads(query: Tensor, key: Tensor, value: Tensor) -> ShardPlacement | None:
    """Returns how the heads of all three are divided; None if they are not, or in different ways."""
    placements = [placement_of(x) for x in (query, key, value)]
    heads = placements[0]
    if heads is None or any(
        one is None or (one.dim, one.count, len(one.sections)) != (_HEADS, heads.count, 1) or not one.is_even
        for one in placements
    ):
        return None
    return heads


class _HeadExchange:
    """Exchanges shards of sequences, the dimension `tokens`, for `heads`, and back. The `part` is that of a shard; it
    has as many sections as there are rows in that dimension.
    """

    def __init__(self, mode: ShardedTensorMode, tokens: int, part: ShardPlacement, heads: ShardPlacement) -> None:
        self._mode, self._moves, self._tokens, self._part, self.heads = mode, mode.redistributor, tokens, part, heads

    @classmethod
    def of(cls, mode: ShardedTensorMode, query: Tensor, tokens: int) -> _HeadExchange | None:
        """Returns the exchange for such queries; None if these are no shards, or their heads cannot be divided."""
        part, size, count = placement_of(query), mode.redistributor.size, Tensor.size(query, _HEADS)
        if part is None or (part.dim, part.count) != (tokens, size) or not part.is_even:
            return None
        if len({*part.sections}) > 1 or count % size:
            return None
        return cls(mode, tokens, part, ShardPlacement(_HEADS, (count,), size))

    def to_heads(self, x: Tensor) -> Tensor:
        """Returns this worker's heads of full sequences. Keys and values may have fewer heads than there are workers;
        then those that this worker's queries use are repeated.
        """
        placement, count, size = placement_of(x), Tensor.size(x, _HEADS), self._moves.size
        if placement is None or placement.sections != self._part.sections or count % size:
            full = self._mode.gather_full(x).repeat_interleave(self.heads.length // count, _HEADS)
            return self._moves.take(full, self.heads)
        target = ShardPlacement(_HEADS, (count,), size)
        return self._in_order(self._moves.exchange(x, self._in_one(self._tokens), target), self._tokens, size)

    def to_tokens(self, x: Tensor, tokens: int, heads: int) -> Tensor:
        """Returns the sequence shard of a result, whose tokens and heads are these dimensions."""
        source, part = replace(self.heads, dim=heads), replace(self._part, dim=tokens)
        x = self._in_order(x, tokens, len(part.sections))
        return set_placement(self._moves.exchange(x, source, self._in_one(tokens)), part)

    def _in_one(self, dim: int) -> ShardPlacement:
        """The placement of shards as one section: tokens of all rows that a worker has, worker by worker."""
        return ShardPlacement(dim, (self._part.length,), self._part.count)

    def _in_order(self, x: Tensor, dim: int, outer: int) -> Tensor:
        """Orders tokens by row instead of by worker, of which there are `outer`, or the other way round."""
        if len(self._part.sections) == 1:
            return x
        inner = self._part.count * len(self._part.sections) // outer
        apart: Tensor = x.unflatten(dim, (outer, inner, -1))
        return apart.transpose(dim, dim + 1).flatten(dim, dim + 2)


def _for_heads(moves: Redistributor, heads: ShardPlacement, others: Sequence[Any]) -> Sequence[Any]:
    """Returns the other arguments for this worker's heads: the function for scores, the block mask (a tuple that ends
    with the function for pairs), and more.
    """
    score_mod, (*parts, mask_mod), *options = others
    numbers = torch.arange(heads.length, dtype=torch.int64)
    first = int(moves.narrow(numbers, replace(heads, dim=0))[0])

    def narrowed(part: Any) -> Any:
        has_heads = isinstance(part, Tensor) and part.dim() > _HEADS + 1 and part.shape[_HEADS] == heads.length > 1
        return moves.narrow(part, heads).contiguous() if has_heads else part

    mask = (*map(narrowed, parts), _of_all_heads(mask_mod, 1, first))
    return _of_all_heads(score_mod, 2, first), mask, *options


def _of_all_heads(mod: Mod, position: int, first: int) -> Mod:
    """Returns a function of the script that gets the number of a head among all heads, its argument at `position`."""

    def shifted(*args: Tensor) -> Tensor:
        return mod(*args[:position], args[position] + first, *args[position + 1 :])

    return shifted
