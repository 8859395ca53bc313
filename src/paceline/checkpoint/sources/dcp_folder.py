"""Reads folders of torch.distributed.checkpoint, which FSDP2, torchtitan and Accelerate write.

Torch's own reader assembles the tensors from the files of any number of workers. It would unpickle the folder's
`.metadata`, and values other than tensors; both go through torch's weights-only loader instead, which is given the
classes of the metadata by name. The loader knows the second protocol of pickle alone, and `.metadata` is written in a
later one, so that its instructions are rewritten first (`to_protocol_2`).
"""

from __future__ import annotations

import pickletools
import struct
import warnings
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
from torch._weights_only_unpickler import load as load_weights_only
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint import metadata
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import _StorageInfo as FileLocation

from paceline.base.schema import read_file
from paceline.checkpoint.lazy import Deferred
from paceline.checkpoint.sources.torch_file import AGAIN, UNREADABLE, load_torch, stand_in, unreadable
from paceline.errors import CheckpointError

METADATA = ".metadata"
_CLASSES = (
    metadata.Metadata,
    metadata.TensorStorageMetadata,
    metadata.BytesStorageMetadata,
    metadata.ChunkStorageMetadata,
    metadata.TensorProperties,
    metadata.MetadataIndex,
    metadata.StorageMeta,
    metadata._MEM_FORMAT_ENCODING,
    FileLocation,
)
_PATHS = ("pathlib.PosixPath", "pathlib.WindowsPath", "pathlib.PurePosixPath", "pathlib._local.PosixPath")
_TEXTS = {"SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8"}
_GETS = {"BINGET", "LONG_BINGET"}
_PUTS = {"BINPUT", "LONG_BINPUT", "MEMOIZE"}


class SafeReader(dcp.FileSystemReader):
    """Torch's reader of a folder, with metadata that was read beforehand."""

    def __init__(self, path: Path, known: metadata.Metadata) -> None:
        super().__init__(path)
        self._known = known

    def read_metadata(self, *args: Any, **kwargs: Any) -> metadata.Metadata:
        """Returns the known metadata."""
        return self._known


class SafePlanner(DefaultLoadPlanner):
    """Torch's planner, with the weights-only loader for values other than tensors."""

    def load_bytes(self, read_item: Any, value: BytesIO) -> None:
        """Reads such a value into the state dict, which is flat."""
        name = read_item.dest_index.fqn
        self.original_state_dict[name] = load_torch(value, name)


def read_folder(path: Path) -> dict[str, Any]:
    """The nested dict that was saved in a folder; its tensors are read when they are used. Raises CheckpointError."""
    known = _metadata(path / METADATA)
    tree: dict[str, Any] = {}
    try:
        for key, entry in known.state_dict_metadata.items():
            value: Any
            if isinstance(entry, metadata.TensorStorageMetadata):
                value = Deferred(partial(_load, path, known, key), tuple(entry.size), entry.properties.dtype)
            else:
                value = _load(path, known, key)
            _put(tree, (known.planner_data or {}).get(key, (key,)), value)
    except UNREADABLE as error:
        raise unreadable(str(path / METADATA), error) from error
    return tree


def _put(tree: dict[Any, Any], path: tuple[Any, ...], value: Any) -> None:
    for step in path[:-1]:
        tree = tree.setdefault(step, {})
    tree[path[-1]] = value


def _load(path: Path, known: metadata.Metadata, key: str) -> Any:
    """Reads one value of the folder."""
    entry = known.state_dict_metadata[key]
    is_tensor = isinstance(entry, metadata.TensorStorageMetadata)
    state: dict[str, Any] = {
        key: torch.empty(entry.size, dtype=entry.properties.dtype) if is_tensor else b""  # type: ignore[union-attr]
    }
    try:
        with warnings.catch_warnings(action="ignore"):
            planner = SafePlanner()
            dcp.load(state, storage_reader=SafeReader(path, known), planner=planner, no_dist=True)
            planner.state_dict = planner.original_state_dict = {}  # torch keeps the planner in a reference cycle
    except CheckpointException as error:
        cause: BaseException = next(iter(error.failures.values()))[0]
        if isinstance(cause, CheckpointError):
            raise cause from error
        raise unreadable(f"{key!r} in {path}", cause) from error
    except (OSError, *UNREADABLE) as error:
        raise unreadable(f"{key!r} in {path}", error) from error
    return state[key]


def _metadata(path: Path) -> metadata.Metadata:
    """The metadata of a folder: names, shapes and files of the tensors."""
    allowed: list[Any] = [*_CLASSES, *map(stand_in, _PATHS)]
    try:
        data = to_protocol_2(read_file(path))
        with torch.serialization.safe_globals(allowed), warnings.catch_warnings(action="ignore"):
            known = load_weights_only(BytesIO(data))
    except OSError as error:
        raise CheckpointError(f"{path} could not be read: {error.strerror or error}", AGAIN) from error
    except UNREADABLE as error:
        raise unreadable(str(path), error) from error
    if not isinstance(known, metadata.Metadata) or not isinstance(known.state_dict_metadata, dict):
        raise CheckpointError(f"{path} could not be read: it is not the metadata of a checkpoint", AGAIN)
    for location in (known.storage_data or {}).values():
        file = Path(getattr(location, "relative_path", ".."))
        if file.is_absolute() or ".." in file.parts:
            raise CheckpointError(f"{path} could not be read: it names files outside of its folder", AGAIN)
    return known


def to_protocol_2(data: bytes) -> bytes:
    """Rewrites a pickle of any protocol with the instructions of protocol 2. Nothing of it is executed.

    Texts that are memorized are written out wherever they are used: in later protocols the name of a class is two texts
    on the stack, in protocol 2 it is part of the instruction. Raises ValueError for bytes that are no pickle.
    """
    out, texts, pending = [b"\x80\x02"], dict[int, str](), list[str]()
    instructions: list[tuple[Any, Any, Any]] = [*pickletools.genops(data)]
    ends = [at for _, _, at in instructions[1:]] + [len(data)]
    memorized = 0
    for (opcode, value, at), end in zip(instructions, ends, strict=True):
        name = opcode.name
        if name in _TEXTS or (name in _GETS and value in texts):
            pending.append(texts[value] if name in _GETS else value)
        elif name in _PUTS:
            number = memorized if name == "MEMOIZE" else value
            memorized += 1
            if pending:
                texts[number] = pending[-1]
            else:
                out.append(b"r" + struct.pack("<I", number))
        elif name not in ("PROTO", "FRAME"):
            names = [pending.pop(), pending.pop()] if name == "STACK_GLOBAL" else []
            out += [_text(one) for one in pending]
            pending.clear()
            if any("\n" in one for one in names):
                raise ValueError("the name of a class contains a line end")
            out.append(f"c{names[1]}\n{names[0]}\n".encode() if names else data[at:end])
    return b"".join(out)


def _text(text: str) -> bytes:
    encoded = text.encode("utf-8", "surrogatepass")
    return b"X" + struct.pack("<I", len(encoded)) + encoded
