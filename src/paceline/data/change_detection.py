"""Detects changes of the script's dataset, collate function, order, loss or model.

A loader process has a copy of the dataset from the moment it was forked. A snapshot taken at that moment tells later
whether the script has changed the dataset since, so that rows of a stale copy are never trained on. Counters tell what
a loss or a forward changes by itself, each time it is called.
"""

from __future__ import annotations

import datetime
import dis
import enum
import functools
import io
import logging
import random
import re
import sys
import threading
import zlib
from collections import deque
from collections.abc import Callable, Iterable
from itertools import chain
from operator import is_
from pathlib import PurePath
from types import (
    BuiltinFunctionType,
    CodeType,
    FunctionType,
    GetSetDescriptorType,
    MappingProxyType,
    MemberDescriptorType,
    MethodType,
    ModuleType,
    WrapperDescriptorType,
)
from typing import Any

import torch

# So that a comparison takes less than a millisecond:
MANY = 500  # containers that are looked into
ENTRIES = 20_000  # entries of all of them together: plain values count a quarter, and
TENSOR = 50  # a tensor counts as many, or twice as many if its content is compared
BYTES = 1 << 18  # of arrays whose content is compared
SMALL = 1 << 12  # bytes of a tensor whose content is compared, as writing to its `data` leaves its version as it is
_PLAIN = frozenset({type(None), bool, int, float, complex, str, bytes, range, type(...), torch.dtype, torch.device})
_CONSTANT: tuple[type, ...] = (PurePath, enum.Enum, re.Pattern, datetime.date, datetime.time, datetime.timedelta)
_CONSTANT += (datetime.tzinfo, logging.Logger, type(threading.Lock()), type(threading.RLock()), threading.Event)
_CONSTANT += (BuiltinFunctionType, WrapperDescriptorType, GetSetDescriptorType, MemberDescriptorType, torch.Size)
_CONSTANTS = frozenset({"numpy.dtypes", "_multiprocessing"})
_WRAPPERS = MethodType | functools.partial | staticmethod | classmethod | property | type(functools.lru_cache(id))
_UNSEEN = (io.IOBase, threading.Thread)
_IMMUTABLE = frozenset({"pyarrow"})  # packages whose objects cannot be changed
_LIBRARIES = re.compile(r"[/\\](site|dist)-packages[/\\]")
_HEADER = object.__basicsize__
# What inspecting an object may raise.
_INSPECTION_ERRORS = (
    RuntimeError,
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    AssertionError,
    ArithmeticError,
    OSError,
)


class Snapshot:
    """The state of some objects and of everything that they refer to, at the moment it was taken.

    Looked into are attributes, containers, tensors, arrays, closures, and the globals that functions of the script use;
    not the code and the globals of installed packages. `unseen` names something whose changes would not be noticed: an
    object of a C extension, a file, a large array, or more objects than are looked into; it is empty if there is none.
    """

    def __init__(self, *known: Any, **roots: Any) -> None:
        """Takes a snapshot of `roots`, by name; `known` objects are not inspected."""
        self.unseen = ""
        self._probes: list[Callable[[], str]] = []  # each returns the name of a part that has changed, or an empty text
        self._tensors: list[torch.Tensor] = []
        self._names: list[str] = []  # of the tensors
        self._seen: dict[int, Any] = {
            id(one): one for one in known
        }  # inspected objects, kept alive so that no other object gets the same id
        self._entries, self._bytes = ENTRIES, BYTES
        self._waiting = deque(roots.items())
        while self._waiting and not self._is_full():
            name, value = self._waiting.popleft()
            try:
                self._look(name, value)
            except _INSPECTION_ERRORS:  # raised by the object's own code
                self._hide(name)
        self._waiting.clear()
        self._versions = _versions(self._tensors)

    def changed(self) -> str:
        """The name of something that has changed since the snapshot; empty if nothing has."""
        if (now := _versions(self._tensors)) != self._versions:
            return next(name for name, a, b in zip(self._names, now, self._versions, strict=True) if a != b)
        try:
            return next(filter(None, (probe() for probe in self._probes)), "")
        except _INSPECTION_ERRORS:
            return "an object that could be compared before"

    def _is_full(self) -> bool:
        full = len(self._probes) > MANY or self._entries < 0
        if full:
            self._hide(f"{self._waiting[0][0]} and what follows")
        return full

    def _hide(self, name: str) -> None:
        self.unseen = self.unseen or name

    def _look(self, name: str, value: Any) -> None:
        """Adds what tells whether this value has changed, and what it refers to."""
        kind = type(value)
        if kind in _PLAIN or issubclass(kind, _CONSTANT) or kind.__module__ in _CONSTANTS or id(value) in self._seen:
            return
        self._seen[id(value)] = value
        if issubclass(kind, torch.Tensor):
            self._look_at_tensor(name, value)
        elif issubclass(kind, ModuleType):
            if not _is_library(value.__name__):  # which of its names are used, functions tell
                self._hide(name)
        elif issubclass(kind, type):
            if not _is_library(value.__module__):
                self._compare_names(value.__qualname__, lambda: _attributes(value, _OF_CLASSES.__contains__))
                self._refer((base.__qualname__, base) for base in value.__bases__)
        elif issubclass(kind, FunctionType | _WRAPPERS):
            self._look_at_function(name, value)
        elif (state := _state_of_generator(value)) is not None:
            self._probes.append(lambda: "" if _state_of_generator(value) == state else name)
        elif issubclass(kind, _UNSEEN) or kind.__module__ == "paceline.trainer":  # which changes with each step
            self._hide(name)
        elif kind.__module__.partition(".")[0] not in _IMMUTABLE:
            self._look_at_object(name, value)

    # -- kinds of values --------------------------------------------------------------------------------------------

    def _look_at_tensor(self, name: str, tensor: torch.Tensor) -> None:
        self._entries -= TENSOR
        if tensor.is_inference():  # has no version
            self._hide(name)
            return
        self._tensors.append(tensor)
        self._names.append(name)
        plain = tensor.layout is torch.strided and tensor.device.type == "cpu" and not tensor.is_quantized
        if plain and type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.nbytes <= min(SMALL, self._bytes):
            self._bytes -= tensor.nbytes
            self._entries -= TENSOR
            content = _bytes_of(tensor)
            self._probes.append(lambda: "" if _bytes_of(tensor) == content else name)

    def _look_at_function(self, name: str, value: Any) -> None:
        if isinstance(value, MethodType):
            self._refer([(f"{name}.{value.__name__}", value.__func__), (name, value.__self__)])
        elif isinstance(value, functools.partial):
            self._refer([(name, value.func), (name, value.args), (name, value.keywords)])
        elif isinstance(value, staticmethod | classmethod):
            self._refer([(name, value.__func__)])
        elif isinstance(value, property):
            self._refer((name, part) for part in (value.fget, value.fset) if part is not None)
        elif not isinstance(value, FunctionType):  # a functools.lru_cache
            self._refer([(name, value.__wrapped__)])
        else:
            cells = dict(zip(value.__code__.co_freevars, value.__closure__ or (), strict=True))
            if cells:
                self._compare_names("", lambda: {one: _content(cell) for one, cell in cells.items()})
            if value.__defaults__ or value.__kwdefaults__:
                self._refer([(name, value.__defaults__), (name, value.__kwdefaults__)])
            if not _is_library(value.__module__):
                self._compare_globals(value)

    def _compare_globals(self, function: FunctionType) -> None:
        """The globals that a function of the script's uses, also as attributes of the script's own modules."""
        names, attributes = _names_in(function.__code__)
        space = function.__globals__
        for home in [space, *(vars(space[n]) for n in names if _is_own_module(space.get(n)))]:
            used = names if home is space else attributes
            kept = {one for one in used if one in home and not one.startswith("__")}
            if kept:
                self._compare_names("", lambda home=home, kept=kept: {one: home.get(one) for one in kept})  # type: ignore[misc]

    def _look_at_object(self, name: str, value: Any) -> None:
        """A container, an array, or any object with attributes, in a dict or in slots."""
        kind = type(value)
        slots = [slot for base in kind.__mro__ for slot in vars(base).values() if type(slot) is MemberDescriptorType]
        if issubclass(kind, tuple | frozenset):
            self._refer_to_items(name, value)
        elif issubclass(kind, list | set | deque):
            self._compare_items(name, value)
        elif issubclass(kind, dict | MappingProxyType):
            self._compare_names(name, lambda: _entries(value), of="[{!r}]")
        elif (content := _content_of(value)) is not None:
            self._look_at_bytes(name, value, content)
        elif kind.__basicsize__ > _HEADER + 8 * (len(slots) + (kind.__dictoffset__ > 0) + (kind.__weakrefoffset__ > 0)):
            self._hide(f"{name} ({kind.__module__}.{kind.__qualname__})")  # of what it holds nothing is known
        elif slots:
            self._compare_names(name, lambda: {slot.__name__: _slot(slot, value) for slot in slots})
        if kind.__dictoffset__:
            is_paceline = kind.__module__.startswith("paceline.")  # of which the rest are caches
            self._compare_names(name, lambda: _attributes(value, _is_private if is_paceline else None))
        if not _is_library(kind.__module__):
            self._refer([(kind.__qualname__, kind)])

    def _look_at_bytes(self, name: str, value: Any, content: memoryview) -> None:
        """An array, or another object with a buffer."""
        if _never_written(value):
            return
        if content.nbytes > self._bytes or content.format == "O":
            self._hide(name)
            return
        self._bytes -= content.nbytes
        before = _sum_of(content)
        self._probes.append(lambda: "" if _sum_of(_content_of(value)) == before else name)

    # -- parts ------------------------------------------------------------------------------------------------------

    def _refer(self, values: Iterable[tuple[str, Any]]) -> None:
        self._waiting.extend(values)

    def _refer_to_items(self, name: str, items: Any) -> bool:
        """What items refer to; whether nothing of them can change."""
        plain = _are_plain(items)
        self._entries -= len(items) // 4 if plain else len(items)
        if self._entries < 0:
            self._hide(name)
        elif not plain:
            self._refer((f"{name}[{number}]", item) for number, item in enumerate(items))
        return plain

    def _compare_items(self, name: str, items: Any) -> None:
        before = next(base for base in (list, set, deque) if isinstance(items, base)).copy(items)
        if self._refer_to_items(name, before) or isinstance(items, set):
            self._probes.append(lambda: "" if _are_equal(items, before) else name)
        else:
            self._probes.append(lambda: "" if len(items) == len(before) and all(map(is_, items, before)) else name)

    def _compare_names(self, name: str, read: Callable[[], dict[Any, Any]], of: str = ".{}") -> None:
        """Values by name: attributes, entries of a mapping, globals (which have no `name` before theirs)."""
        before = read()
        self._entries -= len(before)
        if self._entries < 0:
            self._hide(name)
            return

        def called(one: Any) -> str:
            return f"{name}{of.format(one)}" if name else str(one)

        def changed() -> str:
            now = read()
            if len(now) != len(before):
                return next(called(one) for one in {**now, **before} if not (one in now and one in before))
            for one, value in before.items():
                if now.get(one, _NOTHING) is not value and not _is_same(now.get(one, _NOTHING), value):
                    return called(one)
            return ""

        self._refer((called(one), value) for one, value in before.items())
        self._probes.append(changed)


class Counters(Snapshot):
    """The numbers, tensors and arrays that a loss, a forward and models keep, at the moment the snapshot was taken.

    Left out are parameters and buffers of the models, lists and mappings that grow, as logs and caches do, and objects
    of installed packages, as metrics of torchmetrics are.
    """

    def __init__(self, models: Iterable[torch.nn.Module], **roots: Any) -> None:
        self._numbers: list[Callable[[], list[str]]] = []  # each gives the names of parts that have changed
        known, modules = list[Any](), dict[str, Any]()
        for model in models:
            known += [*model.parameters(), *model.buffers()]
            modules |= {f"model.{name}" if name else "model": module for name, module in model.named_modules()}
        super().__init__(*known, **roots, **modules)

    def names(self) -> list[str]:
        """The names of what has changed."""
        now = zip(self._names, _versions(self._tensors), self._versions, strict=True)
        moved = [name for name, version, before in now if version != before]
        return list(dict.fromkeys(moved + [name for compare in self._numbers for name in compare()]))

    def _look_at_object(self, name: str, value: Any) -> None:
        kind = type(value)
        container = kind.__module__ in ("builtins", "collections", "types")
        if _is_library(kind.__module__) and not container and _content_of(value) is None:
            return
        if not isinstance(value, torch.nn.Module):
            super()._look_at_object(name, value)
            return
        self._compare_names(name, lambda: _attributes(value, _OF_MODULES.__contains__))
        self._refer([(kind.__qualname__, kind)])

    def _look_at_bytes(self, name: str, value: Any, content: memoryview) -> None:
        probes = len(self._probes)
        super()._look_at_bytes(name, value, content)
        self._numbers += [lambda probe=probe: [probe()] if probe() else [] for probe in self._probes[probes:]]  # type: ignore[misc]

    def _compare_items(self, name: str, items: Any) -> None:
        super()._compare_items(name, items)
        if not isinstance(items, set):
            before = list(items)
            self._compare_numbers(lambda: dict(enumerate(items)) if len(items) == len(before) else {}, name, "[{}]")

    def _compare_names(self, name: str, read: Callable[[], dict[Any, Any]], of: str = ".{}") -> None:
        super()._compare_names(name, read, of)
        self._compare_numbers(read, name, of)

    def _compare_numbers(self, read: Callable[[], dict[Any, Any]], name: str, of: str) -> None:
        before = {one: value for one, value in read().items() if type(value) in (int, float)}

        def changed() -> list[str]:
            now = read()
            moved = [one for one, value in before.items() if type(now.get(one)) in (int, float) and now[one] != value]
            return [f"{name}{of.format(one)}" if name else str(one) for one in moved]

        if before:
            self._numbers.append(changed)


_NOTHING = object()
_OF_MODULES = frozenset(vars(torch.nn.Module()))
_OF_CLASSES = frozenset({"__dict__", "__weakref__", "__doc__", "__module__", "__abstractmethods__", "_abc_impl"})


def _is_same(now: Any, before: Any) -> bool:
    """The same object, or an equal plain value."""
    return now is before or (type(now) is type(before) and type(now) in _PLAIN and repr(now) == repr(before))


def _are_equal(now: Any, before: Any) -> bool:
    """Of items that were all plain: compared in C, where the same objects are equal."""
    try:
        return bool(now == before)
    except (TypeError, ValueError, RuntimeError):  # an array or a tensor is among them now
        return False


def _are_plain(items: Any) -> bool:
    """Whether all items are plain values, or tuples of plain values, as in a list of (path, class)."""
    kinds = set(map(type, items))
    if kinds <= _PLAIN:
        return True
    return kinds == {tuple} and set(map(type, chain.from_iterable(items))) <= _PLAIN


def _versions(tensors: list[torch.Tensor]) -> list[int]:
    return [tensor._version for tensor in tensors]


def _bytes_of(tensor: torch.Tensor) -> bytes:
    return tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # nothing was assigned yet
        return None


def _slot(slot: Any, value: Any) -> Any:
    try:
        return slot.__get__(value)
    except AttributeError:
        return None


def _attributes(value: Any, left_out: Callable[[str], bool] | None) -> dict[str, Any]:
    return {name: one for name, one in vars(value).items() if left_out is None or not left_out(name)}


def _entries(mapping: Any) -> dict[Any, Any]:
    """Of a dict, whatever its class does when it is asked."""
    return dict(dict.items(mapping) if isinstance(mapping, dict) else mapping)


def _is_private(name: str) -> bool:
    return name.startswith("_")


def _content_of(value: Any) -> memoryview | None:
    try:
        return memoryview(value)
    except (TypeError, ValueError, BufferError):
        return None


def _sum_of(content: memoryview | None) -> tuple[Any, ...] | None:
    if content is None:
        return None
    raw = content if content.c_contiguous else content.tobytes()
    return content.format, content.shape, zlib.crc32(raw)


def _never_written(value: Any) -> bool:
    """Whether an array, and what it is a view of, cannot be written to."""
    while value is not None:
        content = _content_of(value)
        if content is None or not content.readonly:
            return False
        value = getattr(value, "base", None)
    return True


def _state_of_generator(value: Any) -> Any:
    """Of a random generator: Python's, torch's or numpy's; None of all else."""
    if isinstance(value, random.Random):
        return value.getstate()
    if isinstance(value, torch.Generator):
        return value.get_state().numpy().tobytes()
    if type(value).__module__.startswith("numpy.random"):
        bits = getattr(value, "bit_generator", getattr(value, "_bit_generator", value))
        return _frozen(getattr(bits, "state", None))
    return None


def _frozen(state: Any) -> Any:
    if isinstance(state, dict):
        return [(name, _frozen(part)) for name, part in state.items()]
    return state.tobytes() if hasattr(state, "tobytes") else state


@functools.lru_cache(maxsize=1024)
def _names_in(code: CodeType) -> tuple[frozenset[str], frozenset[str]]:
    """The globals that code uses, and the attributes."""
    names, attributes = set[str](), set[str]()
    for step in dis.get_instructions(code):
        if step.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            names.add(step.argval)
        elif step.opname in ("LOAD_ATTR", "LOAD_METHOD"):
            attributes.add(step.argval)
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            more, others = _names_in(inner)
            names, attributes = names | more, attributes | others
    return frozenset(names), frozenset(attributes)


def _is_own_module(value: Any) -> bool:
    return isinstance(value, ModuleType) and not _is_library(value.__name__)


@functools.lru_cache(maxsize=4096)
def _is_library(name: str | None) -> bool:
    """Whether a module belongs to Python or to an installed package."""
    root = (name or "").partition(".")[0]
    if root in ("torch", "numpy", "paceline") or (root in sys.stdlib_module_names and root != "__main__"):
        return True
    module = sys.modules.get(name or "") or sys.modules.get(root)
    return bool(_LIBRARIES.search(getattr(module, "__file__", None) or ""))
