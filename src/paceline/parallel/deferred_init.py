"""Builds a model without memory for large tensors and materialises them one by one.

What is done to large tensors while the function builds the model is recorded, with the state of the random generator
where it draws; for one tensor, what led to it is done again for real. The idea is that of deferred initialisation in
torchdistx (https://pytorch.org/torchdistx).
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

SMALL = 1 << 14  # elements of a tensor that is made at once: scripts look into small ones
# What a model's function may meet where a large tensor has no values, besides errors of its own.
CANNOT = (RuntimeError, NotImplementedError, ValueError, TypeError)


Slot = tuple[dict[str, Any], str, Any]  # tensors of a module, maybe in lists: where they belong


@dataclass(frozen=True)
class _Place:
    """A tensor without memory: which storage, and how it lies in it."""

    storage: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


@dataclass
class _Deed:
    """An operation that made or changed storages, under which default dtype, and if it drew, a generator's state."""

    call: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    makes: list[int | None]  # the storage of each tensor that it returned, None where that was there before
    writes: set[int]
    reads: set[int]
    dtype: torch.dtype
    generator: torch.Generator
    stream: torch.Tensor | None


class _Token:
    """Lives as long as a tensor, which has no weak reference of its own: as double() of a module wants it."""


class DeferredInit(TorchDispatchMode):
    """Records, while it is entered, what is done to large tensors; `value` is one of those for real."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        fake: Any = FakeTensorMode
        self._fake = fake(allow_non_fake_inputs=True)
        self._deeds: list[_Deed] = []
        self._alive: list[torch.UntypedStorage] = []  # whose identity may not be another's later
        self._known: set[int] = set()
        self._made: list[weakref.ref[_Token]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        options = dict(kwargs or {})
        given = [leaf for leaf in pytree.tree_iter((args, options)) if isinstance(leaf, torch.Tensor)]
        large = any(isinstance(tensor, FakeTensor) for tensor in given)
        if not large and (given or not self._makes_large(func, args, options)):
            return func(*args, **options)
        if func is torch.ops.aten._local_scalar_dense.default:  # somebody looks: item(), or a condition
            return self.value(args[0]).item()
        with self._fake:
            found = func(*args, **options)
        self._fake.fake_tensor_converter.tensor_memo.clear()  # which has weak references
        for leaf in pytree.tree_iter(found):
            if isinstance(leaf, torch.Tensor):
                vars(leaf)[DEFERRED] = token = _Token()
                self._made.append(weakref.ref(token))
        self._record(func, args, options, found)
        return found

    def _makes_large(self, func: Any, args: tuple[Any, ...], options: dict[str, Any]) -> bool:
        """Whether an operation without tensors makes a large one on the CPU."""
        if not any(arg.name == "device" for arg in func._schema.arguments):
            return False
        with self._fake:
            found = func(*args, **options)
        return isinstance(found, torch.Tensor) and found.numel() > SMALL and found.device.type == "cpu"

    def _record(self, func: Any, args: tuple[Any, ...], options: dict[str, Any], found: Any) -> None:
        written = _written(func, args, options)
        if any(not isinstance(tensor, FakeTensor) for tensor in written):
            raise NotImplementedError(f"{func} would read a tensor that has no values yet")
        outs = [leaf for leaf in pytree.tree_iter(found) if isinstance(leaf, torch.Tensor)]
        fresh = {self._key(tensor) for tensor in outs} - self._known
        if not (written or fresh):  # a view, or something about its shape
            return
        makes = [key if (key := self._key(tensor)) in fresh else None for tensor in outs]
        self._known |= fresh
        self._alive += [tensor.untyped_storage() for tensor in outs]
        args, options = pytree.tree_map_only(torch.Tensor, self._told, (args, options))
        reads = {leaf.storage for leaf in pytree.tree_iter((args, options)) if isinstance(leaf, _Place)}
        given = [leaf for leaf in pytree.tree_iter((args, options)) if isinstance(leaf, torch.Generator)]
        generator, stream = (given or [torch.default_generator])[0], None
        if torch.Tag.nondeterministic_seeded in func.tags:
            stream = generator.get_state()
            func(
                *pytree.tree_map_only(_Place, _blank, args), **pytree.tree_map_only(_Place, _blank, options)
            )  # it moves on
        writes = {self._key(tensor) for tensor in written} | fresh
        dtype = torch.get_default_dtype()
        self._deeds.append(_Deed(func, args, options, makes, writes, reads, dtype, generator, stream))

    @staticmethod
    def _key(tensor: torch.Tensor) -> int:
        return int(tensor.untyped_storage()._cdata)

    def _told(self, tensor: torch.Tensor) -> Any:
        if not isinstance(tensor, FakeTensor):
            return tensor.clone() if tensor.numel() <= SMALL else tensor
        offset = int(tensor.storage_offset())
        return _Place(self._key(tensor), tensor.dtype, tuple(tensor.shape), tuple(tensor.stride()), offset)

    def value(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor for real, on the CPU; one that has values is itself."""
        if not isinstance(tensor, FakeTensor):
            return tensor.detach()
        place: _Place = self._told(tensor)
        wanted, todo = {place.storage}, []
        for deed in reversed(self._deeds):
            if deed.writes & wanted:
                todo.append(deed)
                wanted |= deed.reads
        there: dict[int, torch.UntypedStorage] = {}

        def real(at: _Place) -> torch.Tensor:
            return torch.empty(0, dtype=at.dtype).set_(there[at.storage], at.offset, at.size, at.stride)

        with torch.no_grad(), _aside(deed.generator for deed in todo):
            for deed in reversed(todo):
                torch.set_default_dtype(deed.dtype)
                if deed.stream is not None:
                    deed.generator.set_state(deed.stream)
                args, kwargs = pytree.tree_map_only(_Place, real, (deed.args, deed.kwargs))
                outs = [leaf for leaf in pytree.tree_iter(deed.call(*args, **kwargs)) if isinstance(leaf, torch.Tensor)]
                there |= {
                    key: out.untyped_storage() for key, out in zip(deed.makes, outs, strict=True) if key is not None
                }
        return real(place)

    def outside(self, model: nn.Module) -> bool:
        """Whether tensors without values are kept where `rest` does not find them."""
        held = [*map(vars, model.modules()), *(module._buffers for module in model.modules())]
        inside = {id(getattr(leaf, DEFERRED, None)) for leaf in pytree.tree_iter(held)}
        return any(token is not None and id(token) not in inside for token in (made() for made in self._made))

    def rest(self, model: nn.Module) -> list[Slot]:
        """Buffers, and large tensors that modules hold besides, for real: where they belong, and which."""
        found: list[Slot] = []
        for module in model.modules():
            buffers = ((name, buffer) for name, buffer in module._buffers.items() if buffer is not None)
            found += [(module._buffers, name, self.value(buffer)) for name, buffer in buffers]
            for name, value in vars(module).items():
                if name not in ("_parameters", "_buffers") and any(map(_is_large, pytree.tree_iter(value))):
                    whole = pytree.tree_map(lambda leaf: self.value(leaf) if _is_large(leaf) else leaf, value)
                    found.append((vars(module), name, whole))
        return found


def strip(model: nn.Module) -> None:
    """Parameters without values become those of the meta device, tied ones the same one."""
    bare: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, param in module._parameters.items():
            if param is not None:
                like = torch.empty_strided(param.shape, param.stride(), dtype=param.dtype, device="meta")
                module._parameters[name] = bare.setdefault(id(param), nn.Parameter(like, param.requires_grad))


def put(slots: Iterable[Slot], device: torch.device) -> None:
    """Puts what `rest` gives where it belongs."""
    for holder, name, build_replica in slots:
        holder[name] = pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.to(device, copy=True), build_replica)


@contextmanager
def _aside(generators: Iterable[torch.Generator]) -> Iterator[None]:
    """Leaves these and the default dtype as they are found."""
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
    """What the function returns, without memory for large tensors. Raises whatever it raises, and one of `CANNOT` where
    it looks into one of those, or keeps one outside of the model's modules.
    """
    with warnings.catch_warnings(), DeferredInit() as blueprint:
        warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")  # by deepcopy, which then clones
        made = function()
    if isinstance(made, nn.Module) and blueprint.outside(made):
        gc.collect()  # what it has left in circles
        if blueprint.outside(made):
            raise NotImplementedError(
                "large tensors are kept outside of its modules: in an object, a cache or a closure"
            )
    return made, blueprint


def _written(func: Any, args: tuple[Any, ...], options: dict[str, Any]) -> list[torch.Tensor]:
    schema = func._schema
    named = {arg.name: value for arg, value in zip(schema.arguments, args, strict=False)} | options
    changed = [arg.name for arg in schema.arguments if arg.alias_info is not None and arg.alias_info.is_write]
    return [leaf for name in changed for leaf in pytree.tree_iter(named.get(name)) if isinstance(leaf, torch.Tensor)]


def _blank(at: _Place) -> torch.Tensor:
    return torch.empty_strided(at.size, at.stride, dtype=at.dtype)
