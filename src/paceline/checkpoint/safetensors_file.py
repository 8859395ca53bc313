"""Writes and hashes one safetensors file in one pass.

The format (https://github.com/huggingface/safetensors#format): 8 bytes with the header's length, a JSON
header of dtype, shape and byte range by name, then the tensors' bytes, little-endian, without gaps. Writing
it here instead of through the library costs thirty lines and gives one pass over the bytes, memory for one
tensor, and the original errors of the operating system. Files are read by the library.
"""

from __future__ import annotations

import errno
import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Protocol

import torch
from safetensors import safe_open

from paceline.base.schema import refuse_pipe
from paceline.checkpoint.storage import write_file

DTYPES = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.int16: "I16",
    torch.uint16: "U16",
    torch.int32: "I32",
    torch.uint32: "U32",
    torch.int64: "I64",
    torch.uint64: "U64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.float64: "F64",
    torch.complex64: "C64",
}


def size_text(count: int) -> str:
    """Formats a number of bytes: ``312 bytes``, ``40.2 MB``."""
    if count < 1000:
        return f"{count} byte{'' if count == 1 else 's'}"
    for power, unit in enumerate(("kB", "MB", "GB", "TB"), start=1):
        if count < 999.95 * 1000**power or unit == "TB":
            break
    return f"{count / 1000**power:.1f} {unit}"


class Shaped(Protocol):
    """Anything with the dtype and the shape of a tensor."""

    @property
    def dtype(self) -> torch.dtype:
        """The type of an element."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The sizes."""


def ordered(tensors: Mapping[str, Shaped]) -> list[str]:
    """The names of the tensors, widest dtype first, so that every tensor of a mapped file is aligned."""
    return sorted(tensors, key=lambda name: -tensors[name].dtype.itemsize)


def head(tensors: Mapping[str, Shaped]) -> tuple[bytes, int]:
    """The header of a file with these tensors, and the bytes of the tensors."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in ordered(tensors):
        tensor = tensors[name]
        start, end = end, end + math.prod(tensor.shape) * tensor.dtype.itemsize
        header[name] = {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, end


def file_bytes(tensors: Mapping[str, Shaped]) -> int:
    """The size of the file of these tensors, in bytes."""
    first, rest = head(tensors)
    return len(first) + rest


def tensor_chunks(tensors: Mapping[str, torch.Tensor]) -> Iterator[bytes | memoryview]:
    """The bytes of a safetensors file."""
    yield head(tensors)[0]
    for name in ordered(tensors):
        plain = tensors[name].detach().resolve_conj().resolve_neg().cpu().contiguous()
        yield plain.reshape(-1).view(torch.uint8).numpy().data


def write_tensors(path: Path, tensors: Mapping[str, torch.Tensor], mode: int = 0o600) -> tuple[int, str]:
    """Writes `tensors` (dtypes of `DTYPES`, any device and strides) to the new safetensors file `path`.

    Returns size in bytes and SHA-256. Tensors that share memory are written once each. Raises OSError.
    """
    return write_file(path, tensor_chunks(tensors), mode)


def open_tensors(path: Path) -> safe_open:
    """Opens a safetensors file, also under a path that is not UTF-8, which the library itself cannot open.

    Raises OSError, SafetensorError.
    """
    refuse_pipe(path)
    try:
        str(path).encode()
        return safe_open(path, framework="pt")
    except UnicodeEncodeError:
        pass
    try:
        fd = os.open(path, os.O_RDONLY)
    except UnicodeEncodeError:
        raise FileNotFoundError(errno.ENOENT, "the name cannot be encoded as a file name") from None
    try:
        return safe_open(f"/proc/self/fd/{fd}", framework="pt")
    finally:
        os.close(fd)
