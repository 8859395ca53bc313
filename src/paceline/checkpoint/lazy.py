"""Tensors that are read from disk when they are used."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from paceline.checkpoint.safetensors_file import DTYPES
from paceline.comm.torch_private import pytree
from paceline.errors import CheckpointError, UsageError

FLOATS = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
_DTYPES = {text: dtype for dtype, text in DTYPES.items()}
_WINDOW = 64 << 20  # pages of a mapped file count as memory of the process until the mapping goes


class Deferred(torch.Tensor):
    """A CPU tensor of known shape and dtype whose values `load` reads again for each operation that needs them.

    If `rows` is given, slices along the first dimension read only their rows, with ``rows(first, end)``.
    """

    load: Callable[[], torch.Tensor]
    rows: Callable[[int, int], torch.Tensor] | None

    @staticmethod
    def __new__(
        cls,
        load: Callable[[], torch.Tensor],
        shape: Sequence[int],
        dtype: torch.dtype,
        rows: Callable[[int, int], torch.Tensor] | None = None,
    ) -> Deferred:
        """Makes a tensor of this shape and dtype, without data."""
        made: Deferred = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype)
        made.load, made.rows = load, rows
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's stub does not declare a classmethod
        cls, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.aten.is_pinned.default:
            return False
        if func is torch.ops.aten.slice.Tensor and len(args) == 4 and args[1] == 0 and args[0].rows is not None:
            length = args[0].shape[0]
            first, end, _ = slice(args[2], args[3]).indices(length)
            return args[0].rows(first, max(first, end))
        args, kwargs = pytree.tree_map_only(Deferred, lambda tensor: tensor.load(), (args, kwargs or {}))
        return func(*args, **kwargs)


def float_named(name: str | None) -> torch.dtype | None:
    """The dtype of `--dtype`: bf16, fp16 or fp32. Raises UsageError for other names."""
    if name is not None and name not in FLOATS:
        raise UsageError(f"weights cannot be converted to the dtype {name!r}", f"use one of {', '.join(FLOATS)}")
    return FLOATS[name] if name else None


def deferred(
    read: Callable[[], Mapping[str, Any]], dtype: torch.dtype | None = None, below: str = ""
) -> dict[str, Any]:
    """Returns the mapping of `read` with every tensor deferred; floating-point tensors are converted to `dtype` if
    their names begin with `below`.

    `read` maps files. It is called again from time to time, because touched pages count as memory until their mapping
    is dropped. Using a tensor raises CheckpointError if it holds finite values that are too large for `dtype`.
    """
    held, used = read(), 0

    def kind_of(name: str, tensor: torch.Tensor) -> torch.dtype:
        return dtype if dtype and tensor.is_floating_point() and name.startswith(below) else tensor.dtype

    def fetch(name: str) -> torch.Tensor:
        nonlocal held, used
        if used + held[name].nbytes > _WINDOW and used:
            held, used = {}, 0
            held = read()
        used += held[name].nbytes
        tensor: torch.Tensor = held[name]
        kind = kind_of(name, tensor)
        return tensor if tensor.dtype == kind else _converted(name, tensor, kind)

    def defer(name: str, tensor: torch.Tensor) -> Deferred:
        return Deferred(lambda: fetch(name), tensor.shape, kind_of(name, tensor))

    return {name: defer(name, value) if isinstance(value, torch.Tensor) else value for name, value in held.items()}


def tensors_elsewhere(read: Callable[[int, int], bytes], where: str) -> dict[str, torch.Tensor]:
    """The tensors of a safetensors file that is on another host, each of which reads the rows that are used.

    `read` returns the bytes from one position of the file to another. Raises CheckpointError later if that fails, with
    `where` in its text, and OSError at once if the header cannot be read.
    """
    (length,) = struct.unpack("<Q", read(0, 8))
    header = json.loads(read(8, 8 + length))
    return {
        name: _elsewhere(entry, partial(_read_at, read, where, 8 + length + entry["data_offsets"][0]))
        for name, entry in header.items()
        if name != "__metadata__"
    }


def _elsewhere(entry: Mapping[str, Any], read: Callable[[int, int], bytes]) -> torch.Tensor:
    dtype, shape, (begin, end) = _DTYPES[entry["dtype"]], entry["shape"], entry["data_offsets"]
    width = (end - begin) // shape[0] if shape and shape[0] else 0

    def rows(first: int, last: int) -> torch.Tensor:
        data = bytearray(read(first * width, last * width))
        values = torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, dtype=dtype)
        return values.reshape(last - first, *shape[1:])

    def load() -> torch.Tensor:
        if not shape or not width:
            data = bytearray(read(0, end - begin))
            return (torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, dtype=dtype)).reshape(shape)
        return rows(0, shape[0])

    return Deferred(load, shape, dtype, rows if width else None)


def _read_at(read: Callable[[int, int], bytes], where: str, at: int, first: int, end: int) -> bytes:
    try:
        return read(at + first, at + end)
    except OSError as error:
        what = f"a part of the checkpoint in {where} could not be read: {error.strerror}"
        raise CheckpointError(what, "start again from the last checkpoint") from error


def _converted(name: str, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    made = tensor.to(dtype)
    if _infinite(made) and not _infinite(tensor):
        short = next(text for text, kind in FLOATS.items() if kind is dtype)
        raise CheckpointError(f"{name!r} contains values that are too large for {short}", "use --dtype bf16 or fp32")
    return made


def _infinite(tensor: torch.Tensor) -> bool:
    return tensor.numel() > 0 and any(bool(end.isinf()) for end in torch.aminmax(tensor))
