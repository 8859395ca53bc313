"""Gradients of which a backward makes only some rows, as those of embeddings with ``sparse=True``: only these travel.

Each worker brings its own rows together and hands them to the others; what has come is added up in the order of ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import nn
from torch.nn import Parameter

from paceline.comm.group import Group

_WHOLE = -1  # instead of rows: the gradient is a whole one, since the script uses the parameter in another way as well


def tables(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """The parameters, by the names of their modules, whose gradients are rows."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
            yield name, module.weight


def rows_of(params: Iterable[Parameter]) -> list[torch.Tensor]:
    """Of gradients that are summed the rows that there are, or all."""
    grads = [param.grad for param in params if param.grad is not None]
    return [grad._values() if grad.is_sparse else grad for grad in grads]


def add_up(params: Iterable[Parameter], group: Group) -> None:
    """Makes their gradients the sums over all workers. Part of the entered collective."""
    for param in params:
        param.grad = _summed(param, group)


def _summed(param: Parameter, group: Group) -> torch.Tensor | None:
    grad, shape = param.grad, param.shape[1:]
    if grad is not None and grad.is_sparse:
        grad = grad.coalesce()
    own = param.new_empty(0, dtype=torch.int64)
    if grad is not None:
        own = grad.indices()[0] if grad.is_sparse else own.new_full((1,), _WHOLE)
    rows = group.gather(own)
    if any(len(one) and one[0] == _WHOLE for one in rows):
        return group.sum(torch.zeros_like(param) if grad is None else grad.to_dense())
    if group.size == 1 or not any(map(len, rows)):
        return grad
    parts = group.gather(param.new_empty(0) if grad is None else grad.values().flatten())
    union, at = torch.cat(rows).unique(return_inverse=True)
    total = param.new_zeros(len(union), *shape)
    for where, part in zip(
        at.split([len(one) for one in rows]), parts, strict=True
    ):  # in each of them a row comes once
        total.index_add_(0, where, part.view(-1, *shape))
    return torch.sparse_coo_tensor(union[None], total, param.shape, is_coalesced=True, check_invariants=False)
