"""Recognises modules of experts, and the arguments of their forwards.

Transformers keep the experts of a layer in one module. Its weights are stacked: their first dimension counts the
`num_experts` experts. Its forward takes tokens (tokens x width), and for each token the indices of its experts and
their weights (both tokens x experts per token), and returns the weighted sums of the experts' outputs (tokens x width).
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn


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
