"""Flattens nested values into named tensors and JSON, and back, without pickle.

The JSON skeleton contains a value directly if JSON can represent it exactly. Any other value is an object whose first
key begins with ``$``: ``$tensor`` and ``$array`` name an entry of the flat dict; ``$tuple``, ``$dict`` (keys that are
not all text), ``$int`` (beyond 64 bits), ``$float`` (the bits of NaN and infinities), ``$bytes``, ``$dtype``,
``$device`` and ``$scalar`` (of numpy) contain their value.
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

_CURE = "store numbers, text, tensors, or an object with state_dict()"
_IN_PIECES = "store a dict by parameter name, a list with one tensor for each parameter, or its full_tensor()"
_PLAIN: dict[type, type] = {
    collections.OrderedDict: dict,
    collections.defaultdict: dict,
    collections.Counter: dict,
    collections.deque: list,
    torch.Size: tuple,
    torch.nn.Parameter: torch.Tensor,
}
# Values that are stored as text: tag, writer and reader.
_TEXTS: dict[type, tuple[str, Callable[[Any], str], Callable[[str], Any]]] = {
    int: ("$int", hex, lambda text: int(text, 16)),
    float: ("$float", lambda x: struct.pack(">d", x).hex(), lambda text: struct.unpack(">d", bytes.fromhex(text))[0]),
    bytes: ("$bytes", bytes.hex, bytes.fromhex),
    torch.dtype: ("$dtype", lambda dtype: str(dtype).removeprefix("torch."), lambda name: _dtype(name)),
    torch.device: ("$device", str, torch.device),
}
_READERS = {tag: read for tag, _, read in _TEXTS.values()}
# Errors from reading a skeleton that `flatten` did not write.
_MISREAD = (ValueError, TypeError, LookupError, AttributeError, RuntimeError, struct.error)  # RecursionError is one
_KEYS = (str, int, float, bool, type(None))
_DEPTH = 100


def flatten(tree: Any, prefix: str, live: bool = False) -> tuple[dict[str, torch.Tensor], Any]:
    """Splits `tree` into tensors by readable, unique name (``prefix.path.to.it``) and a JSON skeleton of the rest.

    Takes dicts (keys: text, numbers, bool, None), lists, tuples, None, bool, int, float, str, bytes, dense tensors and
    parameters, numpy arrays and scalars, torch.dtype and torch.device. OrderedDict, defaultdict, Counter, deque and
    torch.Size become dict, list and tuple; a parameter becomes its tensor, and a `ShardedTensor` its local tensor. The
    tensors share memory with those in the tree; one that occurs several times (same memory, shape, strides and dtype)
    is returned once. Raises UsageError for any other value, naming its path and type.

    With `live`, for values that stay in this process, tensors of any kind are accepted and not converted.
    """
    tensors, skeleton = flatten_pieces(tree, prefix, live)
    return {name: t.tensor if isinstance(t, ShardedTensor) else t for name, t in tensors.items()}, skeleton


def flatten_pieces(tree: Any, prefix: str, live: bool = False) -> tuple[dict[str, torch.Tensor | ShardedTensor], Any]:
    """Like `flatten`, but keeps `ShardedTensor` values instead of their local tensors."""
    flattener = _Flattener(live)
    skeleton = flattener.encode(tree, (prefix,) if prefix else ())
    return flattener.tensors, skeleton


def _path_text(path: tuple[Any, ...]) -> str:
    if path[:1] == ("trainers",) and path[2:3] == (
        "state",
    ):  # as the user wrote it, without the index of the value in (kind, value)
        path = ("trainer.state", *path[3:4], *path[5:])
    return f"{path[0]}" + "".join(f"[{key!r}]" for key in path[1:]) if path else "the tree"


def _refusal(path: tuple[Any, ...], what: str, cure: str = _CURE) -> UsageError:
    return UsageError(f"{_path_text(path)} is {a(what)}, which cannot be stored in a checkpoint", cure)


class _Flattener:
    """Collects the tensors of a tree by name, and encodes the rest as a JSON skeleton."""

    def __init__(self, live: bool) -> None:
        self.live = live
        self.tensors: dict[str, torch.Tensor | ShardedTensor] = {}
        self.seen: dict[tuple[Any, ...], dict[str, str]] = {}

    def encode(self, value: Any, path: tuple[Any, ...]) -> Any:
        """The JSON skeleton of `value`, which is at `path` in the tree. Raises UsageError for other types."""
        if len(path) > _DEPTH:
            cure = "store a flatter structure; if it contains itself, remove that reference"
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
                cure = "use text, numbers, bool or None as keys of dicts in a checkpoint"
                raise UsageError(f"{_path_text(path)} has a key of type {type(key).__name__}: {key!r}", cure)
        if all(type(key) is str and not key.startswith("$") for key in value):
            return {key: self.encode(item, (*path, key)) for key, item in value.items()}
        pairs = [[self.encode(key, path), self.encode(item, (*path, key))] for key, item in value.items()]
        return {"$dict": pairs}

    def _encode_tensor(self, tensor: torch.Tensor, path: tuple[Any, ...]) -> dict[str, str]:
        if tensor.layout != torch.strided or tensor.device.type == "meta" or tensor.is_quantized:
            what = "meta" if tensor.device.type == "meta" else "sparse or quantized"
            raise _refusal(path, f"{what} tensor", "store a dense tensor with values, for example from to_dense()")
        identity = id(tensor) if tensor.numel() == 0 else 0  # empty tensors have no memory address to distinguish them
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
            raise _refusal(path, f"numpy {type(value).__name__} with dtype {value.dtype}")
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
    """Rebuilds the tree that `flatten` split: the same values, types (in their plain forms) and bits.

    The tensors are not copied; one that occurred several times is the same object everywhere. Raises CheckpointError if
    the skeleton names a missing tensor, or if `flatten` did not write it.
    """
    with reading():
        return _unflatten(skeleton, tensors)


@contextmanager
def reading() -> Iterator[None]:
    """Converts the errors of reading a skeleton that `flatten` did not write to CheckpointError."""
    try:
        yield
    except _MISREAD as error:
        what = f"the checkpoint contains a value that cannot be read ({type(error).__name__}: {first_line(error)[:80]})"
        raise CheckpointError(what, "use another checkpoint") from error


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
    raise CheckpointError(
        f"the checkpoint contains a value in the unknown format {tag!r}", "read it with a newer version of Paceline"
    )


def _fetch(node: dict[str, Any], tensors: Mapping[str, torch.Tensor]) -> Any:
    name = node["$tensor"] if "$tensor" in node else node["$array"]
    if name not in tensors:
        raise CheckpointError(f"the tensor {name!r} is missing from the checkpoint", "use another checkpoint")
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
        raise TypeError(f"{name!r} is not a dtype")
    return dtype


def pack(tree: Any) -> torch.Tensor:
    """A tree of plain values and tensors as flat bytes: the skeleton as JSON, then the tensors, none of it pickled."""
    return packed(*flatten(tree, ""))


def packed(tensors: Mapping[str, torch.Tensor], skeleton: Any) -> torch.Tensor:
    """Like `pack`, for the result of `flatten`."""
    shapes = {name: [str(t.dtype).removeprefix("torch."), list(t.shape)] for name, t in tensors.items()}
    head = json.dumps([skeleton, shapes]).encode()
    head += b" " * (-len(head) % 8)
    parts = [torch.frombuffer(bytearray(struct.pack("<q", len(head)) + head), dtype=torch.uint8)]
    for tensor in tensors.values():
        flat = raw(tensor)
        parts += [flat, torch.zeros(-len(flat) % 8, dtype=torch.uint8)]
    return torch.cat(parts)


def unpack(data: torch.Tensor, copy: bool = True) -> Any:
    """Reads a tree from the bytes of `pack`. Without `copy`, its tensors are views of `data`.

    Raises FormatError if the bytes are incomplete or have another format, CheckpointError if a value cannot be read.
    """
    length = int.from_bytes(data[:8].numpy().tobytes(), "little")
    if length % 8:
        raise damaged("tree", "another worker", "it begins with an invalid length")
    skeleton, shapes = decode_message(data[8 : 8 + length].numpy().tobytes(), "tree", "another worker")
    tensors, at = {}, 8 + length
    for name, (dtype, shape) in shapes.items():
        with reading():
            kind = _dtype(dtype)
        size = math.prod(shape) * kind.itemsize
        if at + size > len(data):
            raise damaged("tree", "another worker", f"it ends before the end of {name}")
        part = data[at : at + size].view(kind).view(shape)
        tensors[name] = part.clone() if copy else part
        at += size + (-size % 8)
    return unflatten(skeleton, tensors)


def raw(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor, flat, on the CPU."""
    return raw_bytes(tensor.detach().cpu().contiguous())
