"""The forward of nn.MultiheadAttention on this worker's heads."""

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
    module: nn.MultiheadAttention, mode: ShardedTensorMode, *args: Any, **kwargs: Any
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Computes nn.MultiheadAttention.forward, with the same arguments and results, on this worker's heads.

    The rows of in_proj_weight are those of this worker's heads in each of the three sections; so are the columns of
    out_proj.weight.
    """
    bound = _FORWARD.bind(module, *args, **kwargs)
    bound.apply_defaults()
    query, key, value = (bound.arguments[name] for name in ("query", "key", "value"))
    masks = bound.arguments["key_padding_mask"], bound.arguments["attn_mask"]
    redistributor, size, is_unbatched = mode.redistributor, module.head_dim, query.dim() == 2
    heads = ShardPlacement(1, (module.num_heads,), redistributor.size)
    shared = [redistributor.share(mode.gather_full(x)) for x in (query, key, value)]
    if is_unbatched:
        shared = [x.unsqueeze(0) for x in shared]
    elif not module.batch_first:
        shared = [x.transpose(0, 1) for x in shared]
    weights = module.in_proj_weight.chunk(3)
    biases = module.in_proj_bias.chunk(3) if module.in_proj_bias is not None else (None,) * 3
    q, k, v = (
        F.linear(x, weight, bias).unflatten(-1, (-1, size)).transpose(1, 2)
        for x, weight, bias in zip(shared, weights, biases, strict=True)
    )
    mask = _mask(module, redistributor.index(heads), q, k, *masks)
    scores = q @ k.transpose(-2, -1) / math.sqrt(size)
    scores, needs_weights = scores if mask is None else scores + mask, bound.arguments["need_weights"]
    # Torch's fast kernels, which return no weights, give zeros for a row whose keys are all masked.
    attention_weights = scores.softmax(-1) if needs_weights else torch.ops.aten._safe_softmax.default(scores, -1)
    if module.training and module.dropout > 0:
        kept = mode.local_mask(attention_weights, heads, lambda ones: F.dropout(ones, module.dropout, True))
        attention_weights = attention_weights * kept
    # The memory layout of torch's own forward: a later dropout draws its mask in this order.
    context = (attention_weights @ v).permute(2, 0, 1, 3).flatten(2)
    output = redistributor.sum(F.linear(context, module.out_proj.weight))
    if module.out_proj.bias is not None:
        output = output + module.out_proj.bias
    returned_weights: torch.Tensor | None = None
    if needs_weights:
        returned_weights = redistributor.join(attention_weights, heads)
        returned_weights = returned_weights.mean(1) if bound.arguments["average_attn_weights"] else returned_weights
    if is_unbatched:
        return output.squeeze(1), None if returned_weights is None else returned_weights.squeeze(0)
    return output.transpose(0, 1) if module.batch_first else output, returned_weights


def _mask(
    module: nn.MultiheadAttention,
    shard_index: int,
    q: torch.Tensor,
    k: torch.Tensor,
    padding: torch.Tensor | None,
    mask: torch.Tensor | None,
) -> torch.Tensor | None:
    """Returns the mask to add to the scores of this worker's heads; None if there is none."""
    added: torch.Tensor | None = None
    if mask is not None:
        added = _added(mask, q)
        if added.dim() == 3:  # one for each row and head
            added = added.view(len(q), module.num_heads, *added.shape[1:])
            added = added[:, shard_index * q.shape[1] : (shard_index + 1) * q.shape[1]]
    if padding is not None:
        keys = _added(padding, q).view(len(q), 1, 1, k.shape[2])
        added = keys if added is None else added + keys
    return added


def _added(mask: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Turns a boolean mask into one to add: minus infinity where it is True. Other masks are returned as they are."""
    if mask.dtype != torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=like.dtype).masked_fill_(mask, -math.inf)
