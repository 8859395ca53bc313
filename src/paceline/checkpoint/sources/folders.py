"""Finds out what a source is, and reads it: a file of safetensors or of torch, or a folder of another program."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from paceline.base.console import in_one_line
from paceline.base.schema import read_json
from paceline.checkpoint.safetensors_file import open_tensors
from paceline.checkpoint.sources.contents import Contents, contents_of
from paceline.checkpoint.sources.torch_file import AGAIN, load_torch
from paceline.errors import CheckpointError, FormatError, UsageError

SINGLE = "model.safetensors"
_TORCH_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt", ".tar")
_INDEXES = (f"{SINGLE}.index.json", "pytorch_model.bin.index.json")
_TORCH_FILES = ("pytorch_model.bin", "pytorch_model_fsdp.bin")
_DCP, _FSDP = ".metadata", "pytorch_model_fsdp_0"
_OPTIMIZER = re.compile(r"optimizer(?:_(\d+))?(\.bin|\.pt)?")
# Files of Accelerate and of transformers' Trainer beside the weights, and why they are not taken.
_BESIDE = (
    (r"scheduler(_\d+)?\.(bin|pt)", "the script makes its own learning-rate schedule"),
    (r"sampler(_\d+)?\.bin|(dl|dataloader)_state.*", "a run begins with the first row"),
    (r"scaler\.pt", "the loss scale begins anew"),
    (r"(random_states|rng_state).*", "a run has its own random streams"),
    (r"custom_checkpoint_\d+\.pkl|training_args\.bin", "files of Python's pickle are not executed"),
    (r"(model|pytorch_model|pytorch_model_fsdp)_[1-9]\d*(\.safetensors|\.bin)?", "it is another model"),
)
GIVE = (
    "pass a .safetensors, .pt, .pth, .bin or .ckpt file, or a folder of Hugging Face, Accelerate, "
    "torch.distributed.checkpoint or DeepSpeed"
)


def is_source(path: Path) -> bool:
    """Whether a path is a file, or a folder with weights of another program."""
    return path.is_file() or (path.is_dir() and _kind(path) is not None)


def open_source(source: Path) -> Callable[[], Contents]:
    """Returns a function that reads the contents of a source: each call maps its files anew. Raises UsageError if the
    source has no known format, CheckpointError if it cannot be read.
    """
    if not source.exists():
        raise UsageError(f"{in_one_line(source)} does not exist", GIVE)
    if source.is_file():
        return lambda: _read_file(source).clean()
    kind = _kind(source)
    if kind is None:
        raise UsageError(f"{in_one_line(source)} contains no weights in a known format", GIVE)
    if kind in (_DCP, _FSDP):  # it keeps no files open
        contents = _with_others(source, _read_dcp(source if kind == _DCP else source / _FSDP)).clean()
        return lambda: contents
    return lambda: _with_others(source, _read_weights(source, kind)).clean()


def _kind(folder: Path) -> str | None:
    """The file, or the folder, by which a folder of weights is known; None for any other folder."""
    from paceline.checkpoint.sources.deepspeed_folder import is_deepspeed

    names = {path.name for path in folder.iterdir()}
    for name in (*_INDEXES, SINGLE, _DCP):
        if name in names:
            return name
    if is_deepspeed(folder):
        return "deepspeed"
    return next((name for name in (*_TORCH_FILES, _FSDP) if name in names), None)


def _read_weights(folder: Path, kind: str) -> Contents:
    if kind == "deepspeed":
        from paceline.checkpoint.sources.deepspeed_folder import read_folder

        return read_folder(folder)
    if kind not in _INDEXES:
        return _read_file(folder / kind)
    tree: dict[str, Any] = {}
    for file, names in _indexed(folder / kind):
        held = _tensors(file, names) if file.suffix == ".safetensors" else load_torch(file)
        if missing := [name for name in names if name not in held]:
            raise CheckpointError(f"{file} could not be read: it does not contain tensor {missing[0]}", AGAIN)
        tree |= {name: held[name] for name in names}
    return contents_of(tree, in_one_line(folder))


def _indexed(path: Path) -> Iterator[tuple[Path, list[str]]]:
    """The files that an index names, and the tensors of each."""
    from paceline.checkpoint.file_types import Index, TorchIndex  # needs msgspec

    by_file: dict[str, list[str]] = {}
    kind: Any = Index if path.name == _INDEXES[0] else TorchIndex
    try:
        for name, file in read_json(path, kind, str(path), AGAIN)["weight_map"].items():
            by_file.setdefault(file, []).append(name)
    except FormatError as error:
        raise CheckpointError(error.what, error.cure) from error
    except OSError as error:
        raise CheckpointError(f"{path} could not be read: {error.strerror}", AGAIN) from error
    yield from ((path.with_name(file), names) for file, names in by_file.items())


def _read_file(path: Path) -> Contents:
    if path.suffix == ".safetensors":
        return contents_of(_tensors(path), in_one_line(path))
    if path.suffix not in _TORCH_SUFFIXES:
        raise UsageError(f"{in_one_line(path)} is a file of an unknown format", GIVE)
    tree = load_torch(path)
    if isinstance(tree, Mapping) and "ds_version" in tree:
        cure = f"pass its folder, {in_one_line(path.parent)}"
        raise UsageError(f"{in_one_line(path)} is one of several files of a DeepSpeed checkpoint", cure)
    return contents_of(tree, in_one_line(path))


def _tensors(path: Path, names: list[str] | None = None) -> dict[str, torch.Tensor]:
    """Memory-maps the tensors of a safetensors file, all of them or those with these names."""
    try:
        with open_tensors(path) as file:
            return {name: file.get_tensor(name) for name in (file.keys() if names is None else names)}
    except (OSError, SafetensorError, UnicodeEncodeError) as error:  # the last: no tensor can have such a name
        raise CheckpointError(f"{path} could not be read: {error}", AGAIN) from error


def _read_dcp(folder: Path) -> Contents:
    from paceline.checkpoint.sources.dcp_folder import read_folder  # takes a while to import

    return contents_of(read_folder(folder), in_one_line(folder))


def _with_others(folder: Path, contents: Contents) -> Contents:
    """Adds the optimizer states that lie in files of their own, and notes the files that are not taken."""
    names = sorted(path.name for path in folder.iterdir())
    notes = {name: why for name in names for pattern, why in _BESIDE if re.fullmatch(pattern, name)}
    for name, why in notes.items():
        contents.leave_out(name, why)
    numbered = {name: match for name in names if (match := _OPTIMIZER.fullmatch(name)) and not contents.optimizers}
    for name in sorted(numbered, key=lambda name: int(numbered[name][1] or 0)):
        if "it is another model" in notes.values() and int(numbered[name][1] or 0):
            contents.leave_out(name, "it belongs to another model")
        elif (folder / name).is_dir():
            from paceline.checkpoint.sources.dcp_folder import read_folder

            tree = read_folder(folder / name)
            contents.take_optimizer(tree.get("optimizer", tree), name)
        else:
            contents.take_optimizer(load_torch(folder / name), name)
    return contents
