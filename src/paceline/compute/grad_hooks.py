"""Finds the user's gradient hooks, and weighs each micro-batch's mean gradient after they have seen it.

A hook may apply a nonlinear function to a gradient, such as clipping. Then it must see the mean gradient of one
micro-batch: a sum over several micro-batches or another scale would change the result.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as every

from paceline.errors import UsageError


class Hooks:
    """Finds the user's gradient hooks: on parameters, on modules, and on tensors of the first forward.

    `where` names the first hook. Hooks are refused if gradients are `scaled` (fp16), or `mixed` with those of other
    workers' micro-batches, as in experts. Hooks on parameters are refused if parameters are `gathered`, or if `shards`
    names the parameter: then this worker holds only a part of it.
    """

    def __init__(
        self,
        params: Mapping[str, nn.Parameter],
        scaled: bool,
        gathered: bool,
        mixed: bool = False,
        shards: Collection[str] = (),
    ) -> None:
        self.where = ""
        self._params, self._scaled, self._gathered, self._mixed, self._shards = params, scaled, gathered, mixed, shards
        self._modules: list[tuple[str, Mapping[int, Any]]] = []
        self._known = -1

    def beside(self, models: Sequence[nn.Module]) -> None:
        """Sets the models whose modules a loss may run."""
        named = [(name or "the model", module) for model in models for name, module in model.named_modules()]
        self._modules = [(n, hooks) for n, m in named for hooks in (m._backward_hooks, m._backward_pre_hooks)]
        self._modules += [("all modules", h) for h in (every._global_backward_hooks, every._global_backward_pre_hooks)]
        self._known = -1

    def look(self) -> None:
        """Looks for hooks on parameters and modules before a step, if their number changed since the last one."""
        params = [hooks for p in self._params.values() for hooks in (p._backward_hooks, p._post_accumulate_grad_hooks)]
        count = sum([len(hooks) for hooks in params if hooks]) + sum([len(hooks) for _, hooks in self._modules])
        if count == self._known:
            return
        self._known = count
        for name, hooks in zip([name for name in self._params for _ in range(2)], params, strict=True):
            if hooks and not all(map(_is_internal, hooks.values())):
                if self._gathered:
                    raise UsageError(
                        f"the parameter {name} has a hook, which would not be called on a shard", "use zero=1"
                    )
                if name in self._shards:
                    what = f"a gradient hook on {name} would see only this worker's shard of the gradient"
                    raise UsageError(what, "remove the hook, or leave the layer out of tensor=")
                self._record_hook(f"a gradient hook on {name}")
        for name, those in self._modules:
            if those:
                self._record_hook(f"a backward hook on {name}")

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Notices hooks that the first forward registers on tensors."""
        plain: Any = torch.Tensor.register_hook

        def register_hook(tensor: torch.Tensor, hook: Callable[[torch.Tensor], Any]) -> Any:
            asks: FrameType | None = sys._getframe(1)
            while asks is not None and asks.f_globals.get("__name__") == "torch.autograd.graph":
                asks = asks.f_back
            if asks is not None and not str(asks.f_globals.get("__name__")).startswith(("torch.", "paceline.")):
                self._record_hook(f"a gradient hook in {Path(asks.f_code.co_filename).name}:{asks.f_lineno}")
            return plain(tensor, hook)

        torch.Tensor.register_hook = register_hook  # type: ignore[method-assign]
        try:
            yield
        finally:
            torch.Tensor.register_hook = plain  # type: ignore[method-assign]

    def _record_hook(self, where: str) -> None:
        if self._scaled:
            raise UsageError(f"{where} would see gradients multiplied by the fp16 loss scale", "use precision=bf16")
        if self._mixed:
            what = f"{where} could see gradients of other workers' micro-batches, whose tokens come to experts here"
            raise UsageError(what, "remove the hook, or leave expert= out")
        self.where = self.where or where


def _is_internal(hook: Any) -> bool:
    made = getattr(hook, "func", hook)  # of a partial
    return str(getattr(made, "__module__", "")).startswith("paceline.")


@contextmanager
def weighed(params: Sequence[nn.Parameter], weight: float) -> Iterator[None]:
    """Multiplies the gradients of a backward in the context by `weight`, after all hooks, and adds them to earlier
    ones.
    """
    before = [param.grad for param in params]
    for param in params:
        param.grad = None
    yield
    for param, added in zip(params, before, strict=True):
        if param.grad is not None:
            more = param.grad * weight
            added = more if added is None else added.add_(more)
        param.grad = added


def nodes_of(total: torch.Tensor) -> Iterator[Any]:
    """Yields each node of autograd's graph above a tensor once."""
    seen, left = set[Any](), [total.grad_fn]
    while left:
        node = left.pop()
        if node is not None and node not in seen:
            seen.add(node)
            left += [inner for inner, _ in node.next_functions]
            yield node
