"""Flattens nested values into named tensors and JSON, and back, without pickle.

In the skeleton a value stands as itself where JSON has it exactly; any other as an object whose first key
begins with ``$``: ``$tensor`` and ``$array`` name an entry of the flat dict; ``$tuple``, ``$dict`` (keys that
are not all text), ``$int`` (beyond 64 bits), ``$float`` (NaN and infinities: the bits), ``$bytes``,
``$dtype``, ``$device`` and ``$scalar`` (numpy's) hold their value.
"""

from __future__ import annotations

import collections
import json
import math
import struct
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy
import torch

from paceline.base.sharding import ShardedTensor
from paceline.checkpoint.safetensors_file import DTYPES
from paceline.comm.message_reader import damaged, decode_message
from paceline.comm.shared_memory import raw_bytes
from paceline.errors import CheckpointError, UsageError, a, first_line

_CURE = "keep numbers, text, tensors, or an object with state_dict()"
_IN_PIECES = "keep it under the name of its parameter or in a list of all, as averages are, or keep its full_tensor()"
_PLAIN: dict[type, type] = {
    collections.OrderedDict: dict,
    collections.defaultdict: dict,
    collections.Counter: dict,
    collections.deque: list,
    torch.Size: tuple,
    torch.nn.Parameter: torch.Tensor,
}
# What is kept as text: its tag, how it is written, and how it is read.
_TEXTS: dict[type, tuple[str, Callable[[Any], str], Callable[[str], Any]]] = {
    int: ("$int", hex, lambda text: int(text, 16)),
    float: ("$float", lambda x: struct.pack(">d", x).hex(), lambda text: struct.unpack(">d", bytes.fromhex(text))[0]),
    bytes: ("$bytes", bytes.hex, bytes.fromhex),
    torch.dtype: ("$dtype", lambda dtype: str(dtype).removeprefix("torch."), lambda name: _dtype(name)),
    torch.device: ("$device", str, torch.device),
}
_READERS = {tag: read for tag, _, read in _TEXTS.values()}
# What values raise that no `flatten` made.
_MISREAD = (ValueError, TypeError, LookupError, AttributeError, RuntimeError, struct.error)  # RecursionError is one
_KEYS = (str, int, float, bool, type(None))
_DEPTH = 100


def flatten(tree: Any, prefix: str, live: bool = False) -> tuple[dict[str, torch.Tensor], Any]:
    """The tensors of `tree` by readable, unique name (``prefix.path.to.it``); and the rest, a JSON skeleton.

    Takes dicts (keys: text, numbers, bool, None), lists, tuples, None, bool, int, float, str, bytes, dense tensors and
    parameters, numpy arrays and scalars, torch.dtype and torch.device. OrderedDict, defaultdict, Counter, deque and
    torch.Size are kept as dict, list and tuple, a parameter as its tensor, and of `ShardedTensor` the tensor that is
    here. The tensors share memory with those in the tree; one that occurs several times (same memory, shape, strides
    and dtype) is there once. Raises UsageError for anything else, naming the path and the type.

    With `live`, for what stays in this process, tensors of any kind are taken as they are.
    """
    tensors, skeleton = flatten_pieces(tree, prefix, live)
    return {name: t.tensor if isinstance(t, ShardedTensor) else t for name, t in tensors.items()}, skeleton


def flatten_pieces(tree: Any, prefix: str, live: bool = False) -> tuple[dict[str, torch.Tensor | ShardedTensor], Any]:
    """As `flatten`, and the `ShardedTensor` as they are."""
    flattener = _Flattener(live)
    skeleton = flattener.encode(tree, (prefix,) if prefix else ())
    return flattener.tensors, skeleton


def _path_text(path: tuple[Any, ...]) -> str:
    if path[:1] == ("trainers",) and path[2:3] == ("state",):  # as the user wrote it; beside a value stands its kind
        path = ("trainer.state", *path[3:4], *path[5:])
    return f"{path[0]}" + "".join(f"[{key!r}]" for key in path[1:]) if path else "the tree"


def _refusal(path: tuple[Any, ...], what: str, cure: str = _CURE) -> UsageError:
    return UsageError(f"{_path_text(path)} is {a(what)} and cannot be kept in a checkpoint", cure)


class _Flattener:
    """Collects the tensors of a tree by name, and encodes the rest as a JSON skeleton."""

    def __init__(self, live: bool) -> None:
        self.live = live
        self.tensors: dict[str, torch.Tensor | ShardedTensor] = {}
        self.seen: dict[tuple[Any, ...], dict[str, str]] = {}

    def encode(self, value: Any, path: tuple[Any, ...]) -> Any:
        """The JSON skeleton of `value`, which stands at `path` in the tree. Raises UsageError for other types."""
        if len(path) > _DEPTH:
            cure = "keep it flatter in a checkpoint; if it contains itself, remove that reference"
            raise UsageError(f"{_path_text(path[:4])}... is nested deeper than {_DEPTH} levels", cure)
        kind = _PLAIN.get(type(value), type(value))
        small = (kind is int and -(2**63) <= value < 2**63) or (kind is float and math.isfinite(value))
        if value is None or kind in (bool, str) or small:
            return value
        if kind in _TEXTS:
            tag, write, _ = _TEXTS[kind]
            return {tag: write(value)}
        if kind in (list, tuple):
            items = [self.encode(item, (*path, index)) for index, item in enumerate(value)]
            return items if kind is list else {"$tuple": items}
        if kind is dict:
            return self._encode_dict(value, path)
        if kind is torch.Tensor:
            return self._encode_tensor(value, path)
        if kind is ShardedTensor or (self.live and isinstance(value, torch.Tensor)):
            return {"$tensor": self._add(value, path)}
        if isinstance(value, numpy.generic) or kind is numpy.ndarray:
            return self._encode_numpy(value, path)
        raise _refusal(path, kind.__name__, _IN_PIECES if kind.__name__ == "DTensor" else _CURE)

    def _encode_dict(self, value: dict[Any, Any], path: tuple[Any, ...]) -> Any:
        for key in value:
            if type(key) not in _KEYS:
                cure = "use text, numbers, bool or None as the keys of what a checkpoint keeps"
                raise UsageError(f"{_path_text(path)} has a key of type {type(key).__name__}, {key!r}", cure)
        if all(type(key) is str and not key.startswith("$") for key in value):
            return {key: self.encode(item, (*path, key)) for key, item in value.items()}
        pairs = [[self.encode(key, path), self.encode(item, (*path, key))] for key, item in value.items()]
        return {"$dict": pairs}

    def _encode_tensor(self, tensor: torch.Tensor, path: tuple[Any, ...]) -> dict[str, str]:
        if tensor.layout != torch.strided or tensor.device.type == "meta" or tensor.is_quantized:
            what = "meta" if tensor.device.type == "meta" else "sparse or quantized"
            raise _refusal(path, f"{what} tensor", "keep a dense tensor with values, as to_dense() gives")
        identity = id(tensor) if tensor.numel() == 0 else 0  # empty ones have no memory to be told apart by
        tensor = tensor.detach()
        key: tuple[Any, ...] = (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        key += (tensor.is_conj(), tensor.is_neg(), identity)
        if key not in self.seen:
            kind = {}
            if tensor.dtype not in DTYPES:  # complex128 and the rarer kinds of 8 bits
                kind["dtype"] = str(tensor.dtype).removeprefix("torch.")
                if tensor.is_complex():
                    tensor = torch.view_as_real(tensor.resolve_conj().resolve_neg())
                else:
                    tensor = tensor.view(torch.uint8)
            self.seen[key] = {"$tensor": self._add(tensor, path), **kind}
        return self.seen[key]

    def _encode_numpy(self, value: Any, path: tuple[Any, ...]) -> dict[str, Any]:
        if value.dtype.kind not in "biufcSUmM":
            raise _refusal(path, f"numpy {type(value).__name__} of {value.dtype}")
        data = bytearray(value.tobytes())
        if isinstance(value, numpy.generic):
            return {"$scalar": data.hex(), "dtype": value.dtype.str}
        flat = torch.frombuffer(data, dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
        return {"$array": self._add(flat, path), "dtype": value.dtype.str, "shape": list(value.shape)}

    def _add(self, tensor: torch.Tensor | ShardedTensor, path: tuple[Any, ...]) -> str:
        """A new name for `tensor`: readable, valid UTF-8, unique also where keys hold dots."""
        wanted = ".".join(map(str, path)).encode(errors="replace").decode() or "tensor"
        name, count = wanted, 1
        while name in self.tensors or name == "__metadata__":  # the format's own word
            count += 1
            name = f"{wanted}~{count}"
        self.tensors[name] = tensor
        return name


def unflatten(skeleton: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    """The tree that `flatten` took apart: the same values, types (in their plain forms) and bits.

    Tensors are those given, not copies; one that occurred several times is the same object everywhere.
    Raises CheckpointError where the skeleton names a tensor that is not there or is none that `flatten` made.
    """
    with reading():
        return _unflatten(skeleton, tensors)


@contextmanager
def reading() -> Iterator[None]:
    """What a skeleton raises that `flatten` did not make becomes a CheckpointError."""
    try:
        yield
    except _MISREAD as error:
        what = f"the checkpoint holds a value that cannot be read ({type(error).__name__}: {first_line(error)[:80]})"
        raise CheckpointError(what, "take another checkpoint") from error


def _unflatten(skeleton: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    if isinstance(skeleton, list):
        return [_unflatten(item, tensors) for item in skeleton]
    if not isinstance(skeleton, dict):
        return skeleton
    tag = next(iter(skeleton), "")
    if not tag.startswith("$"):
        return {key: _unflatten(item, tensors) for key, item in skeleton.items()}
    value = skeleton[tag]
    if tag in _READERS:
        return _READERS[tag](value)
    match tag:
        case "$tensor" | "$array":
            return _fetch(skeleton, tensors)
        case "$tuple":
            return tuple(_unflatten(item, tensors) for item in value)
        case "$dict":
            return {_unflatten(key, tensors): _unflatten(item, tensors) for key, item in value}
        case "$scalar":
            return numpy.ndarray((), skeleton["dtype"], bytearray.fromhex(value))[()]
    raise CheckpointError(f"the checkpoint holds the unknown form {tag!r}", "read it with a newer Paceline")


def _fetch(node: dict[str, Any], tensors: Mapping[str, torch.Tensor]) -> Any:
    name = node["$tensor"] if "$tensor" in node else node["$array"]
    if name not in tensors:
        raise CheckpointError(f"the checkpoint lacks the tensor {name!r}", "take another checkpoint")
    tensor = tensors[name]
    if "$array" in node:
        return numpy.ndarray(node["shape"], node["dtype"], bytearray(tensor.numpy().tobytes()))
    if "dtype" not in node:
        return tensor
    dtype = _dtype(node["dtype"])
    return torch.view_as_complex(tensor) if dtype.is_complex else tensor.view(dtype)


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name)
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"{name!r} is no dtype")
    return dtype


def pack(tree: Any) -> torch.Tensor:
    """A tree of plain values and tensors as flat bytes: the skeleton as JSON, then the tensors, none of it pickled."""
    return packed(*flatten(tree, ""))


def packed(tensors: Mapping[str, torch.Tensor], skeleton: Any) -> torch.Tensor:
    """The same of what a tree was flattened to."""
    shapes = {name: [str(t.dtype).removeprefix("torch."), list(t.shape)] for name, t in tensors.items()}
    head = json.dumps([skeleton, shapes]).encode()
    head += b" " * (-len(head) % 8)
    parts = [torch.frombuffer(bytearray(struct.pack("<q", len(head)) + head), dtype=torch.uint8)]
    for tensor in tensors.values():
        flat = raw(tensor)
        parts += [flat, torch.zeros(-len(flat) % 8, dtype=torch.uint8)]
    return torch.cat(parts)


def unpack(data: torch.Tensor, copy: bool = True) -> Any:
    """What was packed; without a `copy`, tensors are a part of the bytes. FormatError: it is cut short, or something
    else; CheckpointError: a value in it cannot be read.
    """
    length = int.from_bytes(bytes(data[:8].tolist()), "little")
    if length % 8:
        raise damaged("tree", "another worker", "it begins with a length that no writer gives")
    skeleton, shapes = decode_message(bytes(data[8 : 8 + length].tolist()), "tree", "another worker")
    tensors, at = {}, 8 + length
    for name, (dtype, shape) in shapes.items():
        with reading():
            kind = _dtype(dtype)
        size = math.prod(shape) * kind.itemsize
        if at + size > len(data):
            raise damaged("tree", "another worker", f"it is cut short before the end of {name}")
        part = data[at : at + size].view(kind).view(shape)
        tensors[name] = part.clone() if copy else part
        at += size + (-size % 8)
    return unflatten(skeleton, tensors)


def raw(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor, flat, on the CPU."""
    return raw_bytes(tensor.detach().cpu().contiguous())
