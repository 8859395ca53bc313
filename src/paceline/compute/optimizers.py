"""Optimizers that torch lacks: LARS, LAMB and delayed Nesterov momentum.

`LARS` and `LAMB` are for large global batches: each tensor's step is scaled by the norm of its weights.

Both take parameters or parameter groups, as torch's optimizers do. Tensors of one dimension (biases, gains of norms)
are updated without the ratio, as in both papers' experiments. The norm is that of the full parameter, so with `shard=`
one worker updates each full parameter (see parameter_owners.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.optim import Optimizer

from paceline.errors import UsageError


def _ratio(above: torch.Tensor, below: torch.Tensor) -> torch.Tensor:
    """Returns the ratio of two norms; 1 if one of them is 0."""
    return torch.where((above > 0) & (below > 0), above / below, torch.ones_like(above))


def _checked(**options: float) -> dict[str, Any]:
    for name, value in options.items():
        below_1 = name in ("momentum", "beta1", "beta2")
        if not 0 <= value < (1 if below_1 else float("inf")):
            raise UsageError(
                f"{name} must be at least 0{' and less than 1' if below_1 else ''}, got {value!r}",
                "change the argument of the optimizer",
            )
    return dict(options)


class LARS(Optimizer):
    """``g' = g + weight_decay * w``, ``v = momentum * v + lr * trust * |w| / (|g| + weight_decay * |w|) * g'``,
    ``w = w - v``; for tensors of one dimension ``v = momentum * v + lr * g'``.

    You, Gitman and Ginsburg, "Large Batch Training of Convolutional Networks", 2017. `trust` is the paper's eta. Raises
    UsageError.
    """

    def __init__(
        self, params: Any, lr: float, momentum: float = 0.9, weight_decay: float = 0.0, trust: float = 0.001
    ) -> None:
        super().__init__(params, _checked(lr=lr, momentum=momentum, weight_decay=weight_decay, trust=trust))

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """Changes the weights."""
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group, param, state in _with_gradients(self):
            decay, moves = group["weight_decay"], param.grad + group["weight_decay"] * param
            rate = torch.as_tensor(group["lr"], dtype=param.dtype, device=param.device)
            if param.dim() > 1:
                weight = torch.linalg.vector_norm(param)
                below = torch.linalg.vector_norm(param.grad) + decay * weight
                rate = rate * torch.where(weight > 0, group["trust"] * _ratio(weight, below), 1.0)
            if "momentum_buffer" not in state:
                state["momentum_buffer"] = torch.zeros_like(param)
            state["momentum_buffer"].mul_(group["momentum"]).add_(rate * moves)
            param.sub_(state["momentum_buffer"])
        return loss


class LAMB(Optimizer):
    """Adam's bias-corrected ``u = m / (sqrt(v) + eps) + weight_decay * w``, then ``w = w - lr * |w| / |u| * u``; for
    tensors of one dimension ``w = w - lr * u``.

    You et al., "Large Batch Optimization for Deep Learning: Training BERT in 76 Minutes", ICLR 2020, with the identity
    as phi. Raises UsageError.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
    ) -> None:
        _checked(lr=lr, beta1=betas[0], beta2=betas[1], eps=eps, weight_decay=weight_decay)
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """Changes the weights."""
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group, param, state in _with_gradients(self):
            if "step" not in state:
                state |= {"step": 0, "exp_avg": torch.zeros_like(param), "exp_avg_sq": torch.zeros_like(param)}
            state["step"] += 1
            (first, second), done = group["betas"], state["step"]
            state["exp_avg"].lerp_(param.grad, 1 - first)
            state["exp_avg_sq"].mul_(second).addcmul_(param.grad, param.grad, value=1 - second)
            size = (state["exp_avg_sq"] / (1 - second**done)).sqrt_().add_(group["eps"])
            moves = (state["exp_avg"] / (1 - first**done)).div_(size).add_(param, alpha=group["weight_decay"])
            if param.dim() > 1:
                moves *= _ratio(torch.linalg.vector_norm(param), torch.linalg.vector_norm(moves))
            param.sub_(group["lr"] * moves)
        return loss


class DelayedNesterov(Optimizer):
    """The update of a parameter server with the plan word `delayed=D`, for a torch.optim.SGD with nesterov=True.

    It uses the groups and the state of `optimizer`. With ``g' = g + weight_decay * w``, each update applies 1/D of the
    gradient, and every D-th update also refreshes the momentum v with the mean of the last D gradients and applies it::

        w = w - lr * g' / D
        v = momentum * v + (sum of the last D g') / D,    w = w - lr * momentum * v    in every D-th

    So D updates from the same weights equal one update of SGD with their mean. Liu et al., "Asynchronous Local-SGD
    Training for Language Modeling", 2024, the delayed Nesterov update, with c = 0: no momentum between.
    """

    def __init__(self, optimizer: Optimizer, delayed: int) -> None:
        super().__init__(optimizer.param_groups, {})
        self.state, self.delayed = optimizer.state, delayed
        optimizer._opt_called = True  # type: ignore[attr-defined]  # or its schedulers warn

    @staticmethod
    def refuse_others(optimizers: Iterable[Optimizer], delayed: int) -> None:
        """Raises UsageError if an optimizer is not SGD with nesterov=True."""
        for optimizer in optimizers:
            sgd = type(optimizer) is torch.optim.SGD
            if not sgd or not all(group["nesterov"] for group in optimizer.param_groups):
                kind = f"{type(optimizer).__name__}{' without nesterov=True' * sgd}"
                what = f"delayed={delayed} needs torch.optim.SGD with nesterov=True, but the optimizer is {kind}"
                raise UsageError(what, "use SGD with momentum= and nesterov=True, or leave delayed= out")

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """Changes the weights."""
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group, param, state in _with_gradients(self):
            assert param.grad is not None
            gradient = (-param.grad if group["maximize"] else param.grad) + group["weight_decay"] * param
            if state.get("momentum_buffer") is None:
                state["momentum_buffer"] = torch.zeros_like(param)
            if "delayed" not in state:
                state |= {"delayed": torch.zeros_like(param), "waited": 0}
            state["delayed"].add_(gradient)
            state["waited"] += 1
            moves = gradient.div_(self.delayed)
            if state["waited"] >= self.delayed:
                state["momentum_buffer"].mul_(group["momentum"]).add_(state["delayed"] / state["waited"])
                moves.add_(state["momentum_buffer"], alpha=group["momentum"])
                state["delayed"].zero_()
                state["waited"] = 0
            param.sub_(group["lr"] * moves)
        return loss


def _with_gradients(optimizer: Optimizer) -> Iterable[tuple[dict[str, Any], torch.Tensor, dict[str, Any]]]:
    for group in optimizer.param_groups:
        for param in group["params"]:
            if param.grad is not None:
                yield group, param, optimizer.state[param]
