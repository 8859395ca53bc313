"""Counts the floating-point operations of a model: those of forward and backward, without recomputation.

They are counted once, on a copy of the full model whose tensors have shapes and no values (the device "meta"), so
nothing is computed, and the number is the same under every plan. An addition and a multiplication are two operations.
Products of matrices and convolutions count, as in torch's FlopCounterMode; attention counts in full, also if it is
causal. A condition on values is taken to hold, such as a mask that is all ones. A model that needs other values cannot
run without them; then the number is estimated as six operations per parameter and token (Kaplan et al., "Scaling Laws
for Neural Language Models", 2020, section 2.1).
"""

from __future__ import annotations

import functools
import types
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from paceline.comm.torch_private import pytree
from paceline.compute.expert_modules import is_experts
from paceline.compute.microbatch_merging import USERS_OWN
from paceline.compute.microbatches import tensors_of

# Operations on matrices or signals whose FLOPs torch does not count, by parts of their names.
_UNCOUNTED = ("fft", "cdist", "embedding_bag", "linalg", "grouped_mm", "lstm", "gru", "rnn")
_ATTENTION = ("bmm", "attention")  # parts of the names of operations on two tensors of activations
_COPIED = (list, tuple, dict, set)


class ModuleFlops(NamedTuple):
    """The floating-point operations of a module's forward, by kind, and how many operations of torch it calls."""

    products: float = 0.0
    attention: float = 0.0  # products of matrices that are both activations
    calls: int = 0


@dataclass(frozen=True)
class ModelFlops:
    """The operations of forward and backward for one row. `uncounted` are the names of operations that are missing.
    `modules` has those of the forward of all rows, by the module's path; "" is the model.
    """

    per_row: float
    is_estimated: bool
    uncounted: tuple[str, ...] = ()
    modules: Mapping[str, ModuleFlops] = field(default_factory=dict)


class ModelSkeleton:
    """A copy of a model without values. It shares with the model what is neither a module nor a tensor."""

    def __init__(self, model: nn.Module) -> None:
        self._model = copied(model, _without_values)

    def count(self, forward: Callable[[nn.Module, Any], Any], batch: Any, rows: int) -> ModelFlops:
        """Counts the operations of a micro-batch of so many rows, with the script's `forward(model, batch)`."""
        try:
            with torch.device("meta"):
                return self._count(forward, pytree.tree_map_only(torch.Tensor, _without_values, batch), rows)
        except USERS_OWN:  # which may do anything with values
            return self._estimate(batch)

    def _count(self, forward: Callable[[nn.Module, Any], Any], batch: Any, rows: int) -> ModelFlops:
        from torch.utils.flop_counter import FlopCounterMode  # takes a while to import

        experts = [module for module in self._model.modules() if is_experts(module)]
        for module in experts:
            vars(module)["forward"] = functools.partial(_run_experts, module)
        counter = FlopCounterMode(display=False)
        calls = _Calls(counter)
        with counter, calls, torch.enable_grad():
            outputs = [x for x in tensors_of(forward(self._model, batch)) if x.requires_grad and x.is_floating_point()]
            modules = _by_module(counter.get_flop_counts(), dict(calls.by_module), type(self._model).__name__)
            sum(x.sum() for x in outputs).backward()  # type: ignore[union-attr]
        if not (total := counter.get_total_flops()):
            return self._estimate(batch)
        return ModelFlops(total / rows, False, calls.uncounted(), modules)

    def _estimate(self, batch: Any) -> ModelFlops:
        """Returns six operations per parameter, without those of embeddings, and per token, or row."""
        embeddings = {id(m.weight) for m in self._model.modules() if isinstance(m, nn.Embedding)}
        sizes = sum(p.numel() for p in self._model.parameters() if id(p) not in embeddings)
        ids = next((x for x in tensors_of(batch) if x.dtype == torch.int64 and x.dim() == 2), None)
        return ModelFlops(6.0 * sizes * (1 if ids is None else ids.shape[1]), True)


def _by_module(flops: Mapping[str, Mapping[Any, int]], calls: Mapping[str, int], root: str) -> dict[str, ModuleFlops]:
    """Returns the operations of each module by its path. In the counts, a name begins with the class of the model."""
    modules = {}
    for name in {*flops, *calls}:
        if name == root or name.startswith(f"{root}."):
            counts = flops.get(name, {})
            attention = sum(count for kind, count in counts.items() if any(part in str(kind) for part in _ATTENTION))
            flops_of_module = ModuleFlops(float(sum(counts.values()) - attention), float(attention), calls.get(name, 0))
            modules[name[len(root) + 1 :]] = flops_of_module
    return modules


class _Calls(TorchDispatchMode):
    """Collects the names of torch's operations, counts them by module, and answers conditions on values with True."""

    def __init__(self, counter: Any) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._seen, self._counter = set[str](), counter
        self.by_module = Counter[str]()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(function.overloadpacket).removeprefix("aten.")
        if name == "_local_scalar_dense" and args[0].dtype == torch.bool and args[0].device.type == "meta":
            return True
        self._seen.add(name)
        if not function.is_view:
            self.by_module.update(self._counter.mod_tracker.parents)
        return function(*args, **(kwargs or {}))

    def uncounted(self) -> tuple[str, ...]:
        """Returns the names of operations that take much time and have no formula."""
        return tuple(sorted(name for name in self._seen if any(part in name for part in _UNCOUNTED)))


def copied(model: nn.Module, make: Callable[[torch.Tensor], torch.Tensor]) -> nn.Module:
    """Returns a copy of a model whose tensors are what `make` returns for the model's."""
    made: nn.Module = _Copy(make).of(model)
    return made


class _Copy:
    """Copies modules, and the containers and methods that refer to them; `make` copies tensors."""

    def __init__(self, make: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self._make, self._made = make, dict[int, Any]()
        self._kept: list[Any] = []  # so that no identity is used again

    def of(self, value: Any) -> Any:
        """Returns the copy of a value, or the value itself if it is of another kind."""
        if id(value) in self._made:
            return self._made[id(value)]
        self._kept.append(value)
        if isinstance(value, torch.Tensor):
            made: Any = self._make(value)
        elif isinstance(value, nn.Module):
            made = self._made[id(value)] = object.__new__(type(value))
            vars(made).update({name: self.of(entry) for name, entry in vars(value).items()})
        elif isinstance(value, _COPIED):
            made = self._container(value)
        elif isinstance(value, types.MethodType):
            made = types.MethodType(value.__func__, self.of(value.__self__))
        elif isinstance(value, functools.partial):
            keywords = {name: self.of(entry) for name, entry in value.keywords.items()}
            made = functools.partial(self.of(value.func), *map(self.of, value.args), **keywords)
        else:
            made = value
        self._made[id(value)] = made
        return made

    def _container(self, value: Any) -> Any:
        if isinstance(value, dict):
            try:
                made = type(value)()
            except TypeError:  # of another signature, such as a configuration
                return value
            self._made[id(value)] = made
            made.update((name, self.of(entry)) for name, entry in value.items())
            return made
        copies: Iterable[Any] = [self.of(entry) for entry in value]
        return type(value)(*copies) if hasattr(value, "_fields") else type(value)(copies)


def _without_values(x: torch.Tensor) -> torch.Tensor:
    made = torch.empty(x.shape, dtype=x.dtype, device="meta")
    return nn.Parameter(made, x.requires_grad) if isinstance(x, nn.Parameter) else made


def _run_experts(module: nn.Module, tokens: torch.Tensor, indices: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Computes with one expert what the tokens' experts compute: which ones depends on values."""
    first, second = (param for param in module.parameters(recurse=False) if param.dim() == 3)
    flat = tokens.reshape(-1, tokens.shape[-1]).repeat_interleave(indices.shape[-1], 0)
    inner = flat @ _taking(first[0], flat.shape[-1])
    width = next(n for n in (inner.shape[-1] // 2, inner.shape[-1]) if n in second.shape[1:])  # gated, or not
    output = inner[:, :width] @ _taking(second[0], width)
    output = output * weights.reshape(-1, 1)
    return output.view(-1, indices.shape[-1], output.shape[-1]).sum(1).view(*tokens.shape[:-1], output.shape[-1])


def _taking(matrix: torch.Tensor, width: int) -> torch.Tensor:
    """Returns the matrix, or its transpose, such that it is multiplied by rows of this width."""
    return matrix if matrix.shape[0] == width and matrix.shape[1] != width else matrix.mT
