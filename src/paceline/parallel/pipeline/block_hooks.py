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
        self._reads_values: list[Hook] = []  # hooks that fail on stand-ins

    @contextmanager
    def noting(self, block: int, counts: Counts) -> Iterator[list[HookedOutput]]:
        """Notes in the list it yields what hooked modules of a block return while the context is active."""
        for path, module in self._blocks[block].named_modules():
            if path:  # hooks of the block itself run outside of its forward
                for identity, hook in _hooks_of_script(module):
                    if not _is_wrapped(hook):
                        module._forward_hooks[identity] = partial(self._call_and_note, path, hook)
        noted = list[HookedOutput]()
        self._noted, self._counts = noted, counts
        try:
            yield noted
        finally:
            self._noted = self._counts = None

    def _call_and_note(self, path: str, hook: Hook, module: nn.Module, *given: Any) -> Any:
        if torch.compiler.is_dynamo_compiling() or self._noted is None or self._counts is None:
            return hook(module, *given)
        hooks = [_unwrapped(one) for _, one in _hooks_of_script(module)]
        if hook is hooks[0]:
            self._noted.append(HookedOutput(len(self._noted) + 1, path, given[-1]))
        call = next((one.number for one in reversed(self._noted) if one.module == path), 0)
        with self._counts(_MOST * call + len(hooks) - hooks.index(hook)):
            return hook(module, *given)

    def repeat(self, block: int, noted: Sequence[HookedOutput], counts: Counts) -> None:
        """Calls the hooks of a block of another stage with stand-ins of what the modules have returned there."""
        for call, path, output in noted:
            module = self._blocks[block].get_submodule(path)
            hooks = _hooks_of_script(module)
            for position, (identity, hook) in enumerate(hooks):
                if hook in self._reads_values:
                    continue
                named: list[dict[str, Any]] = [{}] if identity in module._forward_hooks_with_kwargs else []
                with counts(_MOST * call + len(hooks) - position):
                    try:
                        hook(module, (), *named, output)
                    except (UsageError, IndexError, RuntimeError):  # it reads values or inputs, or writes to the output
                        self._reads_values.append(hook)

    @contextmanager
    def removed_if_cut_off(self, cut_off: type[BaseException]) -> Iterator[None]:
        """Removes hooks that a forward has registered if it ends with `cut_off` before it can remove them itself.

        A hook stays if its module had no hook of the same code before: transformers registers its hooks once, in the
        first call.
        """
        first = RemovableHandle.next_id
        try:
            yield
        except cut_off:
            if first != RemovableHandle.next_id:
                for module in self._model.modules():
                    _remove_repeated(module._forward_hooks, first)
                    _remove_repeated(module._forward_pre_hooks, first)
            raise


def _remove_repeated(hooks: dict[int, Hook], first: int) -> None:
    """Removes the hooks with keys from `first` on whose code an older hook has as well."""
    code = {identity: getattr(_unwrapped(hook), "__code__", None) for identity, hook in hooks.items()}
    older = {code[identity] for identity in hooks if identity < first}
    for identity in [one for one in hooks if one >= first and code[one] in older]:
        del hooks[identity]


def _is_wrapped(hook: Hook) -> bool:
    return isinstance(hook, partial) and getattr(hook.func, "__func__", None) is BlockHooks._call_and_note


def _unwrapped(hook: Any) -> Hook:
    return hook.args[1] if _is_wrapped(hook) else hook  # type: ignore[no-any-return]


def _hooks_of_script(module: nn.Module) -> list[tuple[int, Any]]:
    """Returns the forward hooks that Paceline has not registered for itself, each with its key, the oldest first."""
    return [(identity, hook) for identity, hook in module._forward_hooks.items() if not _is_internal(hook)]


def _is_internal(hook: Hook) -> bool:
    while isinstance(hook, partial):
        hook = _unwrapped(hook) if _is_wrapped(hook) else hook.func
    return (getattr(hook, "__module__", "") or "").startswith("paceline.")
