"""Builds a model without memory for large tensors and materialises them one by one.

While a function builds the model, operations on large tensors are recorded instead of run, with the state of the random
generator where they draw. To materialise one tensor, the operations that led to it are replayed. The idea comes from
deferred initialisation in torchdistx (https://pytorch.org/torchdistx).
"""

from __future__ import annotations

import gc
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from paceline.comm.torch_private import pytree
from paceline.compute.state_dict import DEFERRED

SMALL = 1 << 14  # tensors of at most this many elements are made at once: scripts read the values of small ones
# Errors that a model's function may raise because a large tensor has no values. It may also raise errors of its own.
CANNOT = (RuntimeError, NotImplementedError, ValueError, TypeError)


# A value of a module that has tensors, maybe in lists: the dict that holds it, its key, and the materialised value.
Slot = tuple[dict[str, Any], str, Any]


@dataclass(frozen=True)
class _StorageView:
    """Describes a tensor without memory: its storage, and the view of that storage."""

    storage: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


@dataclass
class _RecordedOperation:
    """An operation that made or changed storages, with the default dtype, and the generator's state if it drew."""

    call: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    makes: list[int | None]  # the storage of each returned tensor, None if it existed before
    writes: set[int]
    reads: set[int]
    dtype: torch.dtype
    generator: torch.Generator
    stream: torch.Tensor | None


class _Token:
    """Lives as long as a tensor. A weak reference to the tensor itself would break a module's double()."""


class DeferredInit(TorchDispatchMode):
    """Records the operations on large tensors while it is active; `value` materialises one of the tensors."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        fake: Any = FakeTensorMode
        self._fake = fake(allow_non_fake_inputs=True)
        self._operations: list[_RecordedOperation] = []
        self._kept_storages: list[torch.UntypedStorage] = []  # so that no later storage gets the same identity
        self._known_storages: set[int] = set()
        self._tokens: list[weakref.ref[_Token]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        options = dict(kwargs or {})
        inputs = [leaf for leaf in pytree.tree_iter((args, options)) if isinstance(leaf, torch.Tensor)]
        large = any(isinstance(tensor, FakeTensor) for tensor in inputs)
        if not large and (inputs or not self._makes_large(func, args, options)):
            return func(*args, **options)
        if func is torch.ops.aten._local_scalar_dense.default:  # item() or a condition reads a value
            return self.value(args[0]).item()
        with self._fake:
            result = func(*args, **options)
        self._fake.fake_tensor_converter.tensor_memo.clear()  # it holds weak references
        for leaf in pytree.tree_iter(result):
            if isinstance(leaf, torch.Tensor):
                vars(leaf)[DEFERRED] = token = _Token()
                self._tokens.append(weakref.ref(token))
        self._record(func, args, options, result)
        return result

    def _makes_large(self, func: Any, args: tuple[Any, ...], options: dict[str, Any]) -> bool:
        """Returns whether an operation without input tensors makes a large one on the CPU."""
        if not any(arg.name == "device" for arg in func._schema.arguments):
            return False
        with self._fake:
            result = func(*args, **options)
        return isinstance(result, torch.Tensor) and result.numel() > SMALL and result.device.type == "cpu"

    def _record(self, func: Any, args: tuple[Any, ...], options: dict[str, Any], result: Any) -> None:
        written = _written_tensors(func, args, options)
        if any(not isinstance(tensor, FakeTensor) for tensor in written):
            raise NotImplementedError(f"{func} reads a tensor whose values do not exist yet")
        outs = [leaf for leaf in pytree.tree_iter(result) if isinstance(leaf, torch.Tensor)]
        fresh = {self._key(tensor) for tensor in outs} - self._known_storages
        if not (written or fresh):  # a view, or something about its shape
            return
        makes = [key if (key := self._key(tensor)) in fresh else None for tensor in outs]
        self._known_storages |= fresh
        self._kept_storages += [tensor.untyped_storage() for tensor in outs]
        args, options = pytree.tree_map_only(torch.Tensor, self._describe, (args, options))
        reads = {leaf.storage for leaf in pytree.tree_iter((args, options)) if isinstance(leaf, _StorageView)}
        generators = [leaf for leaf in pytree.tree_iter((args, options)) if isinstance(leaf, torch.Generator)]
        generator, stream = (generators or [torch.default_generator])[0], None
        if torch.Tag.nondeterministic_seeded in func.tags:
            stream = generator.get_state()
            empty_args, empty_options = pytree.tree_map_only(_StorageView, _empty_view, (args, options))
            func(*empty_args, **empty_options)  # advances the generator
        writes = {self._key(tensor) for tensor in written} | fresh
        dtype = torch.get_default_dtype()
        self._operations.append(_RecordedOperation(func, args, options, makes, writes, reads, dtype, generator, stream))

    @staticmethod
    def _key(tensor: torch.Tensor) -> int:
        return int(tensor.untyped_storage()._cdata)

    def _describe(self, tensor: torch.Tensor) -> Any:
        if not isinstance(tensor, FakeTensor):
            return tensor.clone() if tensor.numel() <= SMALL else tensor
        offset = int(tensor.storage_offset())
        return _StorageView(self._key(tensor), tensor.dtype, tuple(tensor.shape), tuple(tensor.stride()), offset)

    def value(self, tensor: torch.Tensor) -> torch.Tensor:
        """Materialises a tensor on the CPU by replaying what led to it. One that has values is returned detached."""
        if not isinstance(tensor, FakeTensor):
            return tensor.detach()
        view: _StorageView = self._describe(tensor)
        needed, operations = {view.storage}, []
        for operation in reversed(self._operations):
            if operation.writes & needed:
                operations.append(operation)
                needed |= operation.reads
        storages: dict[int, torch.UntypedStorage] = {}

        def real(one: _StorageView) -> torch.Tensor:
            return torch.empty(0, dtype=one.dtype).set_(storages[one.storage], one.offset, one.size, one.stride)

        with torch.no_grad(), _restored(operation.generator for operation in operations):
            for operation in reversed(operations):
                torch.set_default_dtype(operation.dtype)
                if operation.stream is not None:
                    operation.generator.set_state(operation.stream)
                args, kwargs = pytree.tree_map_only(_StorageView, real, (operation.args, operation.kwargs))
                output = operation.call(*args, **kwargs)
                tensors = [leaf for leaf in pytree.tree_iter(output) if isinstance(leaf, torch.Tensor)]
                made = zip(operation.makes, tensors, strict=True)
                storages |= {key: tensor.untyped_storage() for key, tensor in made if key is not None}
        return real(view)

    def keeps_tensors_outside(self, model: nn.Module) -> bool:
        """Returns whether tensors without values are kept where `other_tensors` does not find them."""
        containers = [*map(vars, model.modules()), *(module._buffers for module in model.modules())]
        inside = {id(getattr(leaf, DEFERRED, None)) for leaf in pytree.tree_iter(containers)}
        tokens = [token for token in (reference() for reference in self._tokens) if token is not None]
        return any(id(token) not in inside for token in tokens)

    def other_tensors(self, model: nn.Module) -> list[Slot]:
        """Materialises buffers, and large tensors other than parameters that modules hold."""
        slots: list[Slot] = []
        for module in model.modules():
            buffers = ((name, buffer) for name, buffer in module._buffers.items() if buffer is not None)
            slots += [(module._buffers, name, self.value(buffer)) for name, buffer in buffers]
            for name, value in vars(module).items():
                if name not in ("_parameters", "_buffers") and any(map(_is_large, pytree.tree_iter(value))):
                    materialized = pytree.tree_map(lambda leaf: self.value(leaf) if _is_large(leaf) else leaf, value)
                    slots.append((vars(module), name, materialized))
        return slots


def strip(model: nn.Module) -> None:
    """Replaces all parameters by parameters on the meta device. Tied parameters stay tied."""
    replacements: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, param in module._parameters.items():
            if param is not None:
                like = torch.empty_strided(param.shape, param.stride(), dtype=param.dtype, device="meta")
                module._parameters[name] = replacements.setdefault(id(param), nn.Parameter(like, param.requires_grad))


def assign(slots: Iterable[Slot], device: torch.device) -> None:
    """Copies the tensors that `other_tensors` returned to a device and puts them into their modules."""
    for container, name, value in slots:
        container[name] = pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.to(device, copy=True), value)


@contextmanager
def _restored(generators: Iterable[torch.Generator]) -> Iterator[None]:
    """Restores the states of these generators and the default dtype afterwards."""
    dtype, states = torch.get_default_dtype(), {generator: generator.get_state() for generator in generators}
    try:
        yield
    finally:
        torch.set_default_dtype(dtype)
        for generator, state in states.items():
            generator.set_state(state)


def _is_large(leaf: Any) -> bool:
    return isinstance(leaf, FakeTensor) and not isinstance(leaf, nn.Parameter)


def build(function: Callable[[], Any]) -> tuple[Any, DeferredInit]:
    """Calls the function without memory for large tensors. Returns its result and the recording.

    Raises what the function raises, and an error of `CANNOT` if it reads a large tensor's values or keeps a large
    tensor outside of the model's modules.
    """
    with warnings.catch_warnings(), DeferredInit() as blueprint:
        # deepcopy() warns of this, and then clones.
        warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")
        result = function()
    if isinstance(result, nn.Module) and blueprint.keeps_tensors_outside(result):
        gc.collect()  # frees tensors in reference cycles
        if blueprint.keeps_tensors_outside(result):
            what = "the model keeps large tensors outside of its modules (in an object, a cache or a closure)"
            raise NotImplementedError(what)
    return result, blueprint


def _written_tensors(func: Any, args: tuple[Any, ...], options: dict[str, Any]) -> list[torch.Tensor]:
    schema = func._schema
    named = {arg.name: value for arg, value in zip(schema.arguments, args, strict=False)} | options
    changed = [arg.name for arg in schema.arguments if arg.alias_info is not None and arg.alias_info.is_write]
    return [leaf for name in changed for leaf in pytree.tree_iter(named.get(name)) if isinstance(leaf, torch.Tensor)]


def _empty_view(view: _StorageView) -> torch.Tensor:
    return torch.empty_strided(view.size, view.stride, dtype=view.dtype)
