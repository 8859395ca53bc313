"""Hooks that forwards register and, as a stage cuts them off, do not remove: which ones stay."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

from torch import nn

from paceline.parallel.pipeline.block_hooks import BlockHooks


class CutOffError(BaseException):
    """Ends a forward, as a stage does."""


def collecting(found: list[Any]) -> Callable[..., None]:
    return lambda _module, _given, made: found.append(made)


def cut_off(hooks: BlockHooks, module: nn.Module, *registered: Callable[..., None]) -> None:
    """Runs a forward that registers hooks and is cut off."""
    with suppress(CutOffError), hooks.removed_if_cut_off(CutOffError):
        for hook in registered:
            module.register_forward_hook(hook)
        raise CutOffError


def test_hooks_that_each_forward_registers_do_not_pile_up() -> None:
    model = nn.Linear(1, 1)
    hooks, counts = BlockHooks(model, [model]), []
    for _ in range(4):
        cut_off(hooks, model, collecting([]))
        counts.append(len(model._forward_hooks))
    assert counts == [1, 0, 0, 0]


def test_hooks_that_one_forward_registers_stay() -> None:
    model, first, second = nn.Linear(1, 1), collecting([]), collecting([])
    hooks = BlockHooks(model, [model])
    cut_off(hooks, model, first, second)
    cut_off(hooks, model)
    cut_off(hooks, model, partial(print))
    assert [*model._forward_hooks.values()][:2] == [first, second]
    assert len(model._forward_hooks) == 3


def test_a_hook_of_the_script_outlives_those_of_forwards() -> None:
    model, of_script = nn.Linear(1, 1), partial(collecting([]))
    model.register_forward_hook(of_script)
    hooks = BlockHooks(model, [model])
    for _ in range(2):
        cut_off(hooks, model, collecting([]))
    assert [*model._forward_hooks.values()] == [of_script]
