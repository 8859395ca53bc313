"""Computes a module of experts with the experts that a worker holds.

Transformers keep the experts of a layer in one module. Its weights are stacked: their first dimension counts the
`num_experts` experts. Its forward takes tokens (tokens x width), and for each token the indices of its experts and
their weights (both tokens x experts per token), and returns the weighted sums of the experts' outputs (tokens x width).
"""

from __future__ import annotations

import inspect
from typing import Any, cast

import torch
from torch import nn

from paceline.parallel.tensor_parallel.redistribute import applied


def is_experts(module: nn.Module) -> bool:
    """Whether a module is a layer of experts with stacked weights, judged by its parameters and its forward."""
    stacked = [*module.parameters(recurse=False)]
    count = getattr(module, "num_experts", None)
    if (
        not stacked
        or len(stacked) < len([*module.parameters()])
        or isinstance(count, bool)
        or not isinstance(count, int)
    ):
        return False
    inputs = [one for one in inspect.signature(type(module).forward).parameters.values() if one.name != "self"]
    has_three = len(inputs) == 3 and all(one.kind is one.POSITIONAL_OR_KEYWORD for one in inputs)
    return has_three and all(param.shape[:1] == (count,) for param in stacked) and any(p.dim() == 3 for p in stacked)


def inputs_of(module: nn.Module, args: Any, kwargs: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns the tokens, the experts' indices and their weights from the arguments of a call of the module."""
    bound = inspect.signature(type(module).forward).bind(module, *args, **kwargs)
    tokens, indices, weights = bound.args[1:]
    return tokens, indices, weights


def run_experts(
    module: nn.Module, held: range, tokens: torch.Tensor, indices: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """Returns the sums of the outputs of the experts in `held`, whose weights the module has; zeros for other tokens.

    Each pair of a token and one of its experts in `held` becomes a token with one expert, so the module's own forward
    computes with whatever implementation it has. The gradients of all inputs and parameters are defined, also if no
    token goes to these experts.
    """
    flat, choices = tokens.reshape(-1, tokens.shape[-1]), indices.reshape(-1, indices.shape[-1])
    is_held = (choices >= held.start) & (choices < held.stop)
    rows, places = is_held.nonzero(as_tuple=True)
    output = torch.zeros_like(flat)
    if len(rows) == 0:
        parameters = [param for param in module.parameters(recurse=False) if param.requires_grad]
        return applied(_Independent, output.view_as(tokens), tokens, weights, *parameters)
    chosen = choices[rows, places].unsqueeze(1) - held.start
    factors = weights.reshape(-1, weights.shape[-1])[rows, places].unsqueeze(1)
    count, experts = module.num_experts, cast(Any, module)
    experts.num_experts = len(held)
    try:
        computed = type(module).forward(module, flat[rows], chosen, factors)
    finally:
        experts.num_experts = count
    return output.index_add(0, rows, computed.to(output.dtype)).view_as(tokens)


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
