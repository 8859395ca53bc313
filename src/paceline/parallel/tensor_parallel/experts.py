"""Computes a module of experts with those of its experts that a worker holds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import nn

from paceline.parallel.tensor_parallel.redistribute import applied


def compute_pairs(
    module: nn.Module, count: int, tokens: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """Returns the weighted output of one of the module's `count` experts for each token (pairs x width).

    `experts` and `weights` are pairs x 1. The module's own forward computes, with whatever implementation it has. The
    gradients of all inputs and parameters are defined, also if there are no pairs.
    """
    if len(tokens) == 0:
        parameters = [param for param in module.parameters(recurse=False) if param.requires_grad]
        return applied(_Independent, torch.zeros_like(tokens), tokens, weights, *parameters)
    total, settings = module.num_experts, cast(Any, module)
    settings.num_experts = count
    try:
        return cast(torch.Tensor, type(module).forward(module, tokens, experts, weights))
    finally:
        settings.num_experts = total


def run_experts(
    module: nn.Module,
    held: range,
    tokens: torch.Tensor,
    indices: torch.Tensor,
    weights: torch.Tensor,
    compute: Callable[..., torch.Tensor] = compute_pairs,
    accepts: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> torch.Tensor:
    """Returns the sums of the outputs of the experts in `held`; zeros for tokens that go to none of them.

    Each pair of a token and one of its experts in `held` becomes a token with one expert, which `compute` computes,
    with the arguments of `compute_pairs`. Of the experts in `held`, `accepts` may choose some.
    """
    flat, choices = tokens.reshape(-1, tokens.shape[-1]), indices.reshape(-1, indices.shape[-1])
    is_held = (choices >= held.start) & (choices < held.stop)
    rows, slots = (is_held if accepts is None else is_held & accepts(choices)).nonzero(as_tuple=True)
    chosen = choices[rows, slots].unsqueeze(1) - held.start
    factors = weights.reshape(-1, weights.shape[-1])[rows, slots].unsqueeze(1)
    computed = compute(module, len(held), flat[rows], chosen, factors)
    return torch.zeros_like(flat).index_add(0, rows, computed.to(flat.dtype)).view_as(tokens)


class _Independent(torch.autograd.Function):
    """A tensor that no input has an effect on: their gradients are zeros, where autograd would leave them out."""

    @staticmethod
    def forward(ctx: Any, output: torch.Tensor, *inputs: torch.Tensor) -> torch.Tensor:
        """Returns the tensor."""
        ctx.inputs = [(one.shape, one.dtype, one.device) for one in inputs]
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Returns zeros for each input."""
        return grad, *(torch.zeros(shape, dtype=dtype, device=device) for shape, dtype, device in ctx.inputs)
