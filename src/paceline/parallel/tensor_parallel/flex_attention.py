"""Rules for `torch.nn.attention.flex_attention` on this worker's heads (tensor=, context=).

The functions of the script that change scores or mask pairs get the indices of the full tensors, and a block mask is
that of the full sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from paceline.parallel.tensor_parallel.redistribute import Redistributor, ShardPlacement
from paceline.parallel.tensor_parallel.sharded_mode import (
    UNKNOWN,
    ShardedTensorMode,
    Tensor,
    placement_of,
    set_placement,
)

_HEADS, _TOKENS = 1, 2  # dimensions of queries, keys and values: rows, heads, tokens, width
Mod = Callable[..., Tensor]


def attend_by_heads(mode: ShardedTensorMode, function: Any, args: Any, kwargs: Any) -> Any:
    """Computes attention of heads that are divided among workers."""
    query, key, value, *others = args
    placements = [placement_of(x) for x in (query, key, value)]
    heads = placements[0]
    if heads is None or any(
        one is None or (one.dim, one.count, len(one.sections)) != (_HEADS, heads.count, 1) or not one.is_even
        for one in placements
    ):
        return UNKNOWN
    made = function(query, key, value, *_for_heads(mode.redistributor, heads, others))
    return tuple(set_placement(x, heads) if x.numel() else x for x in made)


def attend_to_sequences(mode: ShardedTensorMode, function: Any, args: Any, kwargs: Any) -> Any:
    """Computes attention of sequence shards: these are exchanged for full sequences of some heads, and back.

    UNKNOWN if the workers cannot divide the heads of the queries.
    """
    query, key, value, *others = args
    part, moves, count = placement_of(query), mode.redistributor, Tensor.size(query, _HEADS)
    if part is None or part.dim != _TOKENS or len(part.sections) > 1 or count % moves.size:
        return UNKNOWN
    heads, back = ShardPlacement(_HEADS, (count,), moves.size), ShardPlacement(_TOKENS, part.sections, moves.size)

    def by_heads(x: Tensor) -> Tensor:
        placement, own = placement_of(x), Tensor.size(x, _HEADS)
        is_divided = placement is not None and (placement.dim, placement.sections) == (_TOKENS, back.sections)
        if is_divided and own % moves.size == 0:
            return moves.exchange(x, back, ShardPlacement(_HEADS, (own,), moves.size))
        return moves.take(mode.gather_full(x).repeat_interleave(count // own, _HEADS), heads)

    operands = by_heads(query), by_heads(key), by_heads(value)
    made = function(*operands, *_for_heads(moves, heads, others))
    return tuple(set_placement(moves.exchange(x, heads, back), back) if x.numel() else x for x in made)


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


def _of_all_heads(mod: Mod, place: int, first: int) -> Mod:
    """Returns a function of the script that gets the number of a head among all heads, its argument at `place`."""

    def shifted(*args: Tensor) -> Tensor:
        return mod(*args[:place], args[place] + first, *args[place + 1 :])

    return shifted
