"""Refuses backward(), step() and similar calls inside a loss or forward."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from paceline.compute.grad_hooks import nodes_of
from paceline.errors import UsageError

_CURES = {
    "backward()": "return the loss; compute other gradients with torch.autograd.grad(value, inputs)",
    "optimizer.step()": "remove the call: the trainer updates the weights once per step",
    "zero_grad()": "remove the call: the trainer clears the gradients before each step",
    "GradScaler.scale()": 'return the unscaled loss, and use plan="precision=fp16", which scales it',
}
_WHY = {
    "backward()": "would add to the gradients that the trainer computes",
    "optimizer.step()": "would update the weights in the middle of a step",
    "zero_grad()": "would delete the gradients that the trainer has computed in this step",
    "GradScaler.scale()": "would multiply the loss by its scale",
}


_own_calls: list[bool] = []  # not empty while the trainer itself calls backward() inside of a forward


@contextmanager
def allow_backward() -> Iterator[None]:
    """Allows calls of backward() inside the context: they are the trainer's own, even during a forward."""
    _own_calls.append(True)
    try:
        yield
    finally:
        _own_calls.pop()


@contextmanager
def refuse_loop_calls(params: Sequence[torch.Tensor], gathered: bool) -> Iterator[None]:
    """Raises UsageError if a loss or forward calls backward(), step(), zero_grad() or scale() on the trained `params`.

    If parameters are `gathered` for a forward, they are other tensors then, so any nn.Parameter counts as trained.
    """
    param_ids = {*map(id, params)}

    def touches(tensors: Iterable[torch.Tensor]) -> bool:
        return any(id(tensor) in param_ids or (gathered and isinstance(tensor, nn.Parameter)) for tensor in tensors)

    def backward(tensors: Any, *args: Any, **more: Any) -> Any:
        inputs = more.get("inputs", args[4] if len(args) > 4 else None)
        targets = _several(inputs) if inputs is not None else _leaves(_several(tensors))
        if not _own_calls and touches(targets):
            raise _refusal("backward()")
        return plain_backward(tensors, *args, **more)

    def before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if touches(param for group in optimizer.param_groups for param in group["params"]):
            raise _refusal("optimizer.step()")

    def zero_optimizer(optimizer: Optimizer, *args: Any, **more: Any) -> Any:
        if touches(param for group in optimizer.param_groups for param in group["params"]):
            raise _refusal("zero_grad()")
        return plain_optimizer(optimizer, *args, **more)

    def zero_module(module: nn.Module, *args: Any, **more: Any) -> Any:
        if touches(module.parameters()):
            raise _refusal("zero_grad()")
        return plain_module(module, *args, **more)

    def scale(scaler: Any, outputs: Any) -> Any:
        if scaler.is_enabled():
            raise _refusal("GradScaler.scale()")
        return plain_scale(scaler, outputs)

    plain_backward: Callable[..., Any] = torch.autograd.backward
    plain_optimizer, plain_module = Optimizer.zero_grad, nn.Module.zero_grad
    plain_scale: Callable[..., Any] = torch.amp.GradScaler.scale
    handle = register_optimizer_step_pre_hook(before_step)
    torch.autograd.backward = backward
    Optimizer.zero_grad = zero_optimizer  # type: ignore[method-assign, assignment]
    nn.Module.zero_grad = zero_module  # type: ignore[method-assign, assignment]
    torch.amp.GradScaler.scale = scale  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        handle.remove()
        torch.autograd.backward = plain_backward
        Optimizer.zero_grad = plain_optimizer  # type: ignore[method-assign]
        nn.Module.zero_grad = plain_module  # type: ignore[method-assign]
        torch.amp.GradScaler.scale = plain_scale  # type: ignore[method-assign]


def _several(tensors: Any) -> list[torch.Tensor]:
    return [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)


def _leaves(tensors: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Yields the tensors and the leaf tensors that they depend on."""
    for tensor in tensors:
        yield tensor
        yield from (node.variable for node in nodes_of(tensor) if hasattr(node, "variable"))


def _refusal(call: str) -> UsageError:
    asks: FrameType | None = sys._getframe(2)
    while asks is not None and str(asks.f_globals.get("__name__")).partition(".")[0] in ("torch", "paceline"):
        asks = asks.f_back
    where = "" if asks is None else f" at {Path(asks.f_code.co_filename).name}:{asks.f_lineno}"
    return UsageError(f"the loss or forward calls {call}{where}, which {_WHY[call]}", _CURES[call])
