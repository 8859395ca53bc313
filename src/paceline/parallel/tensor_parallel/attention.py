"""nn.MultiheadAttention with the heads divided among workers."""

from __future__ import annotations

import inspect
import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from paceline.parallel.tensor_parallel.redistribute import ShardPlacement
from paceline.parallel.tensor_parallel.sharded_mode import ShardedTensorMode

_FORWARD = inspect.signature(nn.MultiheadAttention.forward)


def attention(
    module: nn.MultiheadAttention, parts: ShardedTensorMode, *given: Any, **named: Any
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """What its forward gives, with the same arguments: rows of in_proj_weight are those of the own heads in each of its
    three sections, columns of out_proj.weight those of the own heads.
    """
    asked = _FORWARD.bind(module, *given, **named)
    asked.apply_defaults()
    query, key, value = (asked.arguments[name] for name in ("query", "key", "value"))
    masks = asked.arguments["key_padding_mask"], asked.arguments["attn_mask"]
    moves, size, alone = parts.moves, module.head_dim, query.dim() == 2
    heads = ShardPlacement(1, (module.num_heads,), moves.size)
    shared = [moves.share(parts.whole(x)) for x in (query, key, value)]
    if alone:
        shared = [x.unsqueeze(0) for x in shared]
    elif not module.batch_first:
        shared = [x.transpose(0, 1) for x in shared]
    weights = module.in_proj_weight.chunk(3)
    biases = module.in_proj_bias.chunk(3) if module.in_proj_bias is not None else (None,) * 3
    q, k, v = (
        F.linear(x, weight, bias).unflatten(-1, (-1, size)).transpose(1, 2)
        for x, weight, bias in zip(shared, weights, biases, strict=True)
    )
    mask = _mask(module, moves.index(heads), q, k, *masks)
    scores = q @ k.transpose(-2, -1) / math.sqrt(size)
    scores, seen = scores if mask is None else scores + mask, asked.arguments["need_weights"]
    # Of a row that is masked wholly torch's fast kernels, which give no weights, make zeros.
    found = scores.softmax(-1) if seen else torch.ops.aten._safe_softmax.default(scores, -1)
    if module.training and module.dropout > 0:
        found = found * parts.masked(found, heads, lambda whole: F.dropout(whole, module.dropout, True))
    made = (found @ v).permute(2, 0, 1, 3).flatten(2)  # as torch lays it out, by which a dropout draws
    output = moves.sum(F.linear(made, module.out_proj.weight))
    if module.out_proj.bias is not None:
        output = output + module.out_proj.bias
    told: torch.Tensor | None = None
    if seen:
        told = moves.join(found, heads)
        told = told.mean(1) if asked.arguments["average_attn_weights"] else told
    if alone:
        return output.squeeze(1), None if told is None else told.squeeze(0)
    return output.transpose(0, 1) if module.batch_first else output, told


def _mask(
    module: nn.MultiheadAttention,
    index: int,
    q: torch.Tensor,
    k: torch.Tensor,
    padding: torch.Tensor | None,
    mask: torch.Tensor | None,
) -> torch.Tensor | None:
    """What is added to the scores of the own heads."""
    found: torch.Tensor | None = None
    if mask is not None:
        found = _added(mask, q)
        if found.dim() == 3:  # one for each row and head
            found = found.view(len(q), module.num_heads, *found.shape[1:])
            found = found[:, index * q.shape[1] : (index + 1) * q.shape[1]]
    if padding is not None:
        keys = _added(padding, q).view(len(q), 1, 1, k.shape[2])
        found = keys if found is None else found + keys
    return found


def _added(mask: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Minus infinity where a mask of truth values says so."""
    if mask.dtype != torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=like.dtype).masked_fill_(mask, -math.inf)
