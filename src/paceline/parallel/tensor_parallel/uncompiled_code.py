"""Runs compiled functions of the script as Python while modes follow shards.

A function mode sees the functions that Python calls, and not what is inside of compiled code. For the operator behind
`torch.nn.attention.flex_attention`, which needs torch.compile, each call is compiled by itself.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from functools import cache
from typing import Any

import torch

FLEX = "flex_attention"
_MODULE, _FLAG = "torch.nn.attention.flex_attention", "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG"
_GIVEN = 7  # arguments of the operator; torch.compile adds the tensors that functions among them use
_RECOMPILATIONS = 1024  # of the operator: for each function of the script and kind of shape


class UncompiledCode:
    """While it is on, functions made by torch.compile run as Python, and so does flex_attention."""

    def __init__(self) -> None:
        self._stance: Any = None  # of torch.compile
        self._module: Any = None  # torch's module of flex_attention

    def set(self, is_on: bool) -> None:
        """Turns it on or off. It stays off inside of compiled code."""
        if is_on and self._stance is None and "torch._dynamo" in sys.modules:
            with suppress(RuntimeError):  # inside of compiled code
                self._stance = torch.compiler.set_stance("force_eager")
        elif not is_on and self._stance is not None:
            self._stance.__exit__(None, None, None)
            self._stance = None
        if is_on and self._module is None and not getattr(sys.modules.get(_MODULE), _FLAG, True):
            self._module = sys.modules[_MODULE]
            vars(self._module)[_FLAG] = True
        elif not is_on and self._module is not None:
            vars(self._module)[_FLAG] = False
            self._module = None


def is_flex_operator(function: Any) -> bool:
    """Whether this is the operator behind flex_attention."""
    return function.__name__ == FLEX and isinstance(function, torch._ops.HigherOrderOperator)


@cache
def compiled_by_itself(
    operator: Any, is_seen: Callable[[], bool], modes_off: Callable[[], AbstractContextManager[None]]
) -> Callable[..., Any]:
    """Returns a function of the operator's name that calls it compiled with `modes_off`, unless a mode sees the call.

    Only compiled code gives gradients to tensors that the script's functions for scores and masks use.
    """

    def call(*args: Any) -> Any:
        return operator(*args)

    kernels: dict[bool, Any] = {}

    def flex_attention(*args: Any) -> Any:
        if is_seen():
            return operator(*args)
        is_cuda = args[0].is_cuda
        with modes_off(), torch._dynamo.config.patch(recompile_limit=_RECOMPILATIONS):
            if is_cuda not in kernels:  # on a CPU there is no kernel with a backward
                kernels[is_cuda] = torch.compile(call, backend="inductor" if is_cuda else "eager", fullgraph=True)
            return kernels[is_cuda](*args[:_GIVEN])

    return flex_attention
