"""Forward hooks of the script on modules inside of blocks, such as those by which transformers collects router logits.

The stage of a block notes what its hooked modules return, and sends the structure of it with that of the block's
result. Later stages call the same hooks with stand-ins: the script's lists then have the same number of entries on
every stage, and values that later code needs are sent like a block's results.

A hook that reads values, or inputs of its module, fails on stand-ins. It is called on the block's own stage only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from paceline.compute.microbatch_merging import USERS_OWN
from paceline.errors import UsageError

Hook = Callable[..., Any]
# Counts the calls that a hook makes, as those of code outside of blocks are counted. The number is that of the hook's
# call in the block. It is the same on all stages, also where a forward that ended early has left older hooks behind.
Counts = Callable[[int], AbstractContextManager[None]]
_MOST = 64  # hooks of a module


class HookedOutput(NamedTuple):
    """What a module inside of a block has returned, and the number of this call among those of hooked modules."""

    number: int
    module: str
    output: Any


class BlockHooks:
    """The script's forward hooks on modules inside of these `blocks` of a `model`."""

    def __init__(self, model: nn.Module, blocks: Sequence[nn.Module]) -> None:
        self._model, self._blocks = model, blocks
        self._noted: list[HookedOutput] | None = None  # of the block that runs now
        self._counts: Counts | None = None
        self._need_values: dict[nn.Module, set[int]] = {}  # keys of hooks that fail on stand-ins
        self._left: set[int] = set()  # keys of hooks that a forward has registered and, as it was cut off, not removed
        self._temporary: set[Any] = set()  # code of hooks that each forward registers

    @contextmanager
    def noting(self, block: int, counts: Counts) -> Iterator[list[HookedOutput]]:
        """Notes in the list it yields what hooked modules of a block return while the context is active."""
        for path, module in self._blocks[block].named_modules():
            self._remove_outdated(module._forward_hooks)
            if path:  # hooks of the block itself run outside of its forward
                for identity, hook in _hooks_of_script(module):
                    if not _is_wrapped(hook):
                        module._forward_hooks[identity] = partial(self._call_and_note, path, identity, hook)
        noted = list[HookedOutput]()
        self._noted, self._counts = noted, counts
        try:
            yield noted
        finally:
            self._noted = self._counts = None

    def _call_and_note(self, path: str, identity: int, hook: Hook, module: nn.Module, *given: Any) -> Any:
        if torch.compiler.is_dynamo_compiling() or self._noted is None or self._counts is None:
            return hook(module, *given)
        hooks = [one for one, _ in _hooks_of_script(module)]
        if identity not in hooks:  # an earlier hook of this call has removed it
            return hook(module, *given)
        if identity == hooks[0]:
            self._noted.append(HookedOutput(len(self._noted) + 1, path, given[-1]))
        call = next((one.number for one in reversed(self._noted) if one.module == path), 0)
        with self._counts(_MOST * call + len(hooks) - hooks.index(identity)):
            return hook(module, *given)

    def repeat(self, block: int, noted: Sequence[HookedOutput], counts: Counts) -> None:
        """Calls the hooks of a block of another stage with stand-ins of what the modules have returned there."""
        self._remove_outdated(self._blocks[block]._forward_hooks)
        for call, path, output in noted:
            module = self._blocks[block].get_submodule(path)
            self._remove_outdated(module._forward_hooks)
            hooks = _hooks_of_script(module)
            need_values = self._need_values.get(module, set()).intersection(module._forward_hooks)
            self._need_values[module] = need_values
            for position, (identity, hook) in enumerate(hooks):
                if identity in need_values:
                    continue
                named: list[dict[str, Any]] = [{}] if identity in module._forward_hooks_with_kwargs else []
                with counts(_MOST * call + len(hooks) - position):
                    try:
                        changed = hook(module, (), *named, output)
                    except (UsageError, *USERS_OWN):  # it reads values or inputs, or writes to the output
                        need_values.add(identity)
                    else:
                        output = output if changed is None else changed

    @contextmanager
    def removed_if_cut_off(self, cut_off: type[BaseException]) -> Iterator[None]:
        """Removes hooks that a forward has registered if it ends with `cut_off` before it can remove them itself.

        A hook stays if its module had no hook of the same code before: transformers registers its hooks once, in the
        first call. If a later forward registers it again, both are removed.
        """
        first = RemovableHandle.next_id
        try:
            yield
        except cut_off:
            if first != RemovableHandle.next_id:
                left = set[int]()
                for module in self._model.modules():
                    for hooks in (module._forward_hooks, module._forward_pre_hooks):
                        self._remove_outdated(hooks)
                        self._remove_repeated(hooks, first)
                        left.update(one for one in hooks if one >= first or one in self._left)
                self._left = left
            raise

    def _remove_outdated(self, hooks: dict[int, Hook]) -> None:
        """Removes the hooks that a cut-off forward has left, and that a later forward has registered again."""
        left = self._left.intersection(hooks)
        again = {_code_of(hook) for identity, hook in hooks.items() if identity not in left} if left else set()
        for identity in left:
            code = _code_of(hooks[identity])
            if code in again:
                self._temporary.add(code)
                del hooks[identity]

    def _remove_repeated(self, hooks: dict[int, Hook], first: int) -> None:
        """Removes the hooks with keys from `first` on whose code an older hook has or had as well."""
        older = self._temporary | {_code_of(hook) for identity, hook in hooks.items() if identity < first}
        for identity in [one for one in hooks if one >= first and _code_of(hooks[one]) in older]:
            del hooks[identity]


def _code_of(hook: Any) -> Any:
    """Returns what all hooks have in common that the same lines of a script have registered."""
    hook = _unwrapped(hook)
    while isinstance(hook, partial):
        hook = hook.func
    return getattr(hook, "__code__", type(hook))


def _is_wrapped(hook: Hook) -> bool:
    return isinstance(hook, partial) and getattr(hook.func, "__func__", None) is BlockHooks._call_and_note


def _unwrapped(hook: Any) -> Hook:
    return hook.args[2] if _is_wrapped(hook) else hook  # type: ignore[no-any-return]


def _hooks_of_script(module: nn.Module) -> list[tuple[int, Any]]:
    """Returns the forward hooks that Paceline has not registered for itself, each with its key, the oldest first."""
    return [(identity, hook) for identity, hook in module._forward_hooks.items() if not _is_internal(hook)]


def _is_internal(hook: Hook) -> bool:
    while isinstance(hook, partial):
        hook = _unwrapped(hook) if _is_wrapped(hook) else hook.func
    return (getattr(hook, "__module__", "") or "").startswith("paceline.")
