"""Finds a model's repeated blocks, and recomputes or compiles them."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from paceline.comm.torch_private import pytree
from paceline.errors import UsageError

_WHY, _NONE = "children of one class in a list or sequence are blocks", "the model has no list of repeated blocks"
_SHARED = "the blocks share parameters with each other or with the rest of the model"


def blocks_of(model: nn.Module, sharing: bool = False) -> dict[str, nn.Module]:
    """The repeated blocks of a model by name: children of one class in a list or sequence, such as transformer layers.

    Lists may be nested. A module that is in lists twice is not a block, since it is called twice. A module that shares
    parameters with the rest of the model is a block only with `sharing`.
    """
    blocks: dict[str, nn.Module] = {}
    lists: dict[int, nn.ModuleList | nn.Sequential | nn.ModuleDict] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, nn.ModuleList | nn.Sequential | nn.ModuleDict):
            lists[id(module)] = module
            if any(prefix.startswith(f"{name}.") or prefix == name for name in blocks):
                continue
            children = {n: c for n, c in _children(module) if next(c.parameters(), None) is not None}
            kinds = [type(child) for child in children.values()]
            dot = f"{prefix}." if prefix else ""
            blocks |= {f"{dot}{n}": child for n, child in children.items() if kinds.count(type(child)) > 1}
    if not sharing:
        return {name: block for name, block in blocks.items() if not _shares(model, name, block)}
    times = Counter(id(child) for one in lists.values() for child in _listed(one))
    inside = {id(inner) for block in blocks.values() for inner in block.modules() if inner is not block}
    once = {id(block): name for name, block in reversed(blocks.items())}
    return {
        name: block
        for name, block in blocks.items()
        if times[id(block)] == 1 and id(block) not in inside and once[id(block)] == name
    }


def called_again(model: nn.Module) -> str:
    """Returns the name of a list that contains a module several times; empty if no list does."""
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList | nn.Sequential | nn.ModuleDict):
            children = [id(child) for child in _listed(module) if next(child.parameters(), None) is not None]
            if len(children) != len({*children}):
                return name or type(model).__name__
    return ""


def _listed(module: nn.ModuleList | nn.Sequential | nn.ModuleDict) -> list[nn.Module]:
    """The modules of a list, with repetitions."""
    return list(module.values() if isinstance(module, nn.ModuleDict) else module)


def _children(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The named children of a module; lists among them, which are never called, are replaced by their own children."""
    for name, child in module.named_children():
        if isinstance(child, nn.ModuleList | nn.ModuleDict):
            yield from ((f"{name}.{inner}", module) for inner, module in _children(child))
        else:
            yield name, child


def by_block(names: Iterable[str], blocks: Sequence[str]) -> list[list[str]]:
    """Groups parameter names by block; the last group has those outside of all blocks."""
    groups: list[list[str]] = [[] for _ in [*blocks, ""]]
    for name in names:
        index = next((index for index, block in enumerate(blocks) if name.startswith(f"{block}.")), len(blocks))
        groups[index].append(name)
    return groups


def summarize_blocks(blocks: Mapping[str, nn.Module]) -> str:
    """The names of blocks as a text, one range per list: ``layers.0 to 11 (Layer)``."""
    lists: dict[tuple[str, str], list[str]] = {}
    for name, block in blocks.items():
        path, _, last = name.rpartition(".")
        lists.setdefault((path, type(block).__name__), []).append(last)
    return ", ".join(
        f"{path + '.' if path else ''}{names[0]} to {names[-1]} ({kind})" for (path, kind), names in lists.items()
    )


def explain_gathering(model: nn.Module, blocks: Mapping[str, nn.Module], rest: bool) -> tuple[str, str]:
    """Returns the decision how parameters are gathered, block by block or all at once, and its reason."""
    if not blocks:
        return "all parameters are gathered at once", _SHARED if blocks_of(model, sharing=True) else _NONE
    others = ", and the rest" if rest else ""
    return f"parameters are gathered in {len(blocks) + rest} blocks: {summarize_blocks(blocks)}{others}", _WHY


def set_apart(model: nn.Module) -> None:
    """Sums the gradient of an input of a block, or of the model, over its uses inside before those outside are added.

    This is the order of summation in which fully_shard, which gathers each block's parameters, computes it.
    """
    for module in [*blocks_of(model).values(), model]:
        module.register_forward_pre_hook(_set_apart, with_kwargs=True)


def _set_apart(module: nn.Module, args: Any, kwargs: Any) -> Any:
    if not torch.is_grad_enabled():
        return None
    leaves, structure = pytree.tree_flatten((args, kwargs))
    for index in reversed(range(len(leaves))):  # what is made last comes first in the backward
        if isinstance(leaves[index], torch.Tensor) and leaves[index].requires_grad:
            leaves[index] = leaves[index].view_as(leaves[index])
    return pytree.tree_unflatten(leaves, structure)


def recompute(model: nn.Module) -> tuple[str, str]:
    """Recomputes the activations of each block in its backward (Chen et al., "Training Deep Nets with
    Sublinear Memory Cost", 2016), with the same random draws and buffers. Returns the decision and its reason. Raises
    UsageError without blocks.
    """
    blocks = blocks_of(model, sharing=True)
    if not blocks:
        raise UsageError(
            "recompute=blocks needs a list of repeated blocks, which the model does not have", "leave recompute= out"
        )
    for block in blocks.values():
        block.forward = partial(_recomputed, block, block.forward)
    return f"activations are recomputed in {len(blocks)} blocks: {summarize_blocks(blocks)}", _WHY


def _recomputed(block: nn.Module, forward: Any, /, *args: Any, **kwargs: Any) -> Any:
    """Runs a block's forward with activation checkpointing.

    A recomputation starts from the buffers of the first forward and changes copies of them, so that BatchNorm's
    statistics move once; this holds for several recomputations, too (the gradient of a gradient). A compiled forward
    is recomputed by its graph, which has no side effects.
    """
    saved_buffers: list[tuple[nn.Module, str, torch.Tensor]] | None = None

    def run(*args: Any, **kwargs: Any) -> Any:
        nonlocal saved_buffers
        current = [(module, name, buffer) for module in block.modules() for name, buffer in module._buffers.items()]
        if saved_buffers is None:
            saved_buffers = [(module, name, buffer.clone()) for module, name, buffer in current if buffer is not None]
            return forward(*args, **kwargs)
        for module, name, buffer in saved_buffers:
            module._buffers[name] = buffer.clone()
        try:
            return forward(*args, **kwargs)
        finally:  # torch leaves a recomputation by an exception as soon as it has what it needs
            for module, name, original in current:
                module._buffers[name] = original

    function = partial(forward if torch.compiler.is_compiling() else run, **kwargs)  # torch has keywords of its own
    return checkpoint(function, *args, use_reentrant=False)


class _Compiled:
    """A forward compiled by torch.compile; a copy of its module gets its own kernels."""

    def __init__(self, plain: Callable[..., Any], dynamic: bool | None) -> None:
        self.plain, self.dynamic = plain, dynamic
        self.kernels = torch.compile(plain, dynamic=dynamic)

    def __call__(self, *given: Any, **named: Any) -> Any:
        return self.kernels(*given, **named)

    def __deepcopy__(self, memo: dict[int, Any]) -> _Compiled:
        return _Compiled(copy.deepcopy(self.plain, memo), self.dynamic)


def compiled(model: nn.Module, by_block: bool, exact: bool) -> tuple[str, str]:
    """Compiles the model with torch.compile, or with `by_block` each block; names of parameters stay the same. With
    `exact`, each shape gets its own kernels: otherwise the shapes seen before would decide which kernel runs.
    """
    blocks = blocks_of(model) if by_block else {}
    for module in blocks.values() or [model]:  # only the forward inside the hooks that gather parameters
        module.forward = _Compiled(module.forward, dynamic=False if exact else None)
    if not blocks:
        reason = _SHARED if blocks_of(model, sharing=True) else _NONE
        return "the model is compiled as one unit", reason if by_block else "its parameters need no gathering"
    what = f"{len(blocks)} blocks are compiled separately: {summarize_blocks(blocks)}"
    return what, "parameters are gathered between blocks"


def _shares(model: nn.Module, name: str, block: nn.Module) -> bool:
    param_ids = {id(param) for param in block.parameters()}
    named = model.named_parameters(remove_duplicate=False)
    return any(id(param) in param_ids and not other.startswith(f"{name}.") for other, param in named)
