"""Attention on sequence shards with fewer heads than workers: each worker computes all heads of some tokens.

Keys and values are gathered, as in the context parallelism of Llama 3 (Grattafiori et al., "The Llama 3 Herd of
Models", 2024, section 3.3.2): each worker then computes the rows of its own queries, with torch's own kernels. In a
ring (Liu et al., "Ring Attention with Blockwise Transformers for Near-Infinite Context", 2023) keys and values would
travel in blocks, whose results have to be merged; that needs less memory, which is little with few heads.

With a causal mask, later queries see more keys. The sequence is cut into two chunks per worker, and the worker i
computes the chunks i and 2N-1-i, which together see equally many keys on all N workers (the zigzag of Llama 3; compare
Brandon et al., "Striped Attention", 2023). Queries and results travel to these workers and back.
"""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import torch
from torch.nn.attention.bias import causal_lower_right

from paceline.comm.communicator import Group
from paceline.parallel.tensor_parallel import redistribute
from paceline.parallel.tensor_parallel.redistribute import Redistributor, ShardPlacement, applied
from paceline.parallel.tensor_parallel.sharded_mode import (
    UNKNOWN,
    ShardedTensorMode,
    Tensor,
    full_shape_of,
    placement_of,
    set_placement,
)


class CausalChunks:
    """The chunks of a sequence of `length` tokens, two on each of `size` workers, and who computes which."""

    def __init__(self, length: int, size: int) -> None:
        self.size, shard = size, length // size
        self.lengths = [shard - shard // 2, shard // 2] * size
        self.ends = [*accumulate(self.lengths)]

    def holder(self, chunk: int) -> int:
        """Returns the worker whose sequence shard has the chunk."""
        return chunk // 2

    def computer(self, chunk: int) -> int:
        """Returns the worker that computes the chunk's attention."""
        return min(chunk, 2 * self.size - 1 - chunk)

    def computed_by(self, worker: int) -> list[int]:
        """Returns the chunks that a worker computes, in order."""
        return [worker, 2 * self.size - 1 - worker]

    def move(self, x: Tensor, unit: Group, back: bool) -> Tensor:
        """Moves the chunks of a tensor (..., tokens, width) from their holders to their computers, or `back`."""
        source, target = (self.computer, self.holder) if back else (self.holder, self.computer)
        every = range(2 * self.size)
        held = [chunk for chunk in every if source(chunk) == unit.rank]
        parts = dict(zip(held, x.split([self.lengths[chunk] for chunk in held], -2), strict=True))
        each = x[..., :1, :].numel()  # of one token
        sent, received, order = list[Tensor](), list[Tensor](), list[list[int]]()
        for worker in range(self.size):
            chunks = [parts[chunk].reshape(-1) for chunk in held if target(chunk) == worker]
            sent.append(torch.cat(chunks) if chunks else x.new_empty(0))
            order.append([chunk for chunk in every if source(chunk) == worker and target(chunk) == unit.rank])
            rows = sum(self.lengths[chunk] for chunk in order[-1])
            received.append(x.new_empty(rows * each))
        unit.exchange(sent, received)
        moved = dict[int, Tensor]()
        for flat, chunks_of_worker in zip(received, order, strict=True):
            sizes = [self.lengths[chunk] * each for chunk in chunks_of_worker]
            for chunk, values in zip(chunks_of_worker, flat.split(sizes), strict=True):
                moved[chunk] = values.view(*x.shape[:-2], self.lengths[chunk], x.shape[-1])
        return torch.cat([moved[chunk] for chunk in sorted(moved)], -2)


class _MoveChunks(torch.autograd.Function):
    """Moves chunks of tokens to the workers that compute them, or back; the backward does the reverse."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, chunks: CausalChunks, unit: Group, back: bool) -> Tensor:
        """Returns this worker's chunks, in order."""
        ctx.chunks, ctx.unit, ctx.back = chunks, unit, back
        return chunks.move(x, unit, back)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        """Returns the gradient where the tensor came from."""
        return applied(_MoveChunks, grad, ctx.chunks, ctx.unit, not ctx.back), None, None, None


def attend_by_tokens(on: ShardedTensorMode, function: Any, asked: dict[str, Any]) -> Any:
    """Computes scaled_dot_product_attention of sequence shards; UNKNOWN if it must be computed on full sequences.

    `asked` are the arguments by name. The result is this worker's sequence shard.
    """
    if redistribute.trace is not None:  # compiled graphs have no operator that moves chunks
        return UNKNOWN
    query, key, value = asked["query"], asked["key"], asked["value"]
    part, moves = placement_of(query), on.redistributor
    is_divided = part is not None and part.dim == query.dim() - 2 and part.is_even and len(part.sections) == 1
    if part is None or not is_divided or part.count != moves.size or asked.get("dropout_p"):
        return UNKNOWN
    keys, values = (_all_tokens(on, x) for x in (key, value))
    if keys is None or values is None:
        return UNKNOWN
    names = ("query", "key", "value", "attn_mask", "is_causal", "dropout_p")
    options = {name: given for name, given in asked.items() if name not in names}
    if asked.get("is_causal"):
        if full_shape_of(query)[-2] != keys.shape[-2] or asked.get("attn_mask") is not None:
            return UNKNOWN
        return set_placement(_attend_causally(moves, function, query, keys, values, options), part)
    mask = asked.get("attn_mask")
    if isinstance(mask, Tensor):
        mask = on.gather_full(mask)
        if mask.dim() > 1 and mask.shape[-2] > 1:
            mask = moves.take(mask, ShardPlacement(mask.dim() - 2, part.sections, part.count))
        else:
            mask = moves.share(mask)
    return set_placement(function(query, keys, values, attn_mask=mask, **options), part)


def _all_tokens(on: ShardedTensorMode, x: Tensor) -> Tensor | None:
    """Returns the keys or values of all tokens, whose gradients are summed over the workers; None if they are divided
    in another way.
    """
    part = placement_of(x)
    if part is None:
        return on.shared(x)
    if part.dim != x.dim() - 2 or not part.is_even or len(part.sections) > 1 or part.count != on.redistributor.size:
        return None
    return on.redistributor.gather_to_split(x, part)


def _attend_causally(
    moves: Redistributor, function: Any, query: Tensor, keys: Tensor, values: Tensor, options: dict[str, Any]
) -> Tensor:
    """Computes the attention of the query chunks that are this worker's, each with the keys before its end."""
    unit, chunks = moves.unit, CausalChunks(keys.shape[-2], moves.size)
    computed = chunks.computed_by(unit.rank)
    stays = sum(chunks.lengths[chunk] for chunk in computed if chunks.holder(chunk) == unit.rank)
    times = 2 if query.requires_grad and torch.is_grad_enabled() else 1
    per_token = (query[..., :1, :].numel() + query[..., :1, :1].numel() * values.shape[-1]) * query.element_size()
    moves.bytes_sent += times * (query.shape[-2] - stays) * per_token
    query = applied(_MoveChunks, query, chunks, unit, False)
    results = []
    for chunk, part in zip(computed, query.split([chunks.lengths[chunk] for chunk in computed], -2), strict=True):
        end = chunks.ends[chunk]
        mask = _seen_keys(part, end)
        results.append(function(part, keys[..., :end, :], values[..., :end, :], attn_mask=mask, **options))
    return applied(_MoveChunks, torch.cat(results, -2), chunks, unit, True)


def _seen_keys(query: Tensor, end: int) -> Tensor:
    """Returns the mask of queries that are the last ones before `end`: none sees a later key."""
    rows = query.shape[-2]
    if query.is_cuda:
        return causal_lower_right(rows, end)  # without memory, for fast kernels
    return torch.ones(rows, end, dtype=torch.bool, device=query.device).tril(end - rows)
