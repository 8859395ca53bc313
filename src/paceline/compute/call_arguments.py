"""Binds the arguments of calls of torch's functions to their names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch


def bind_arguments(args: Sequence[Any], kwargs: Mapping[str, Any], *names: str) -> list[Any]:
    """Returns the arguments with these names, given by position or keyword; None for those that are not given."""
    by_name = {**dict(zip(names, args, strict=False)), **kwargs}
    return [by_name.get(name) for name in names]


def gather_arguments(function: Any, args: Any, kwargs: Any) -> tuple[torch.Tensor, Any, Any]:
    """Returns the tensor, the dimension and the index of a call of gather or take_along_dim."""
    if function.__name__ == "gather":
        x, dim, index = bind_arguments(args, kwargs, "input", "dim", "index")
    else:
        x, index, dim = bind_arguments(args, kwargs, "input", "indices", "dim")
    return x, dim, index


def cross_entropy_arguments(args: Any, kwargs: Any) -> dict[str, Any]:
    """Returns the arguments of a call of cross_entropy or nll_loss by name; None for those that are not given."""
    names = ("input", "target", "weight", "size_average", "ignore_index", "reduce", "reduction", "label_smoothing")
    return dict(zip(names, bind_arguments(args, kwargs, *names), strict=True))
