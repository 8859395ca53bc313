"""Imports weights from a safetensors file or a Hugging Face folder as the checkpoint of step 0."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn

from paceline.base.console import in_one_line, quoted
from paceline.base.schema import read_json
from paceline.base.sharding import ShardingSpec
from paceline.base.text import plural
from paceline.checkpoint.files import checkpoints_of, list_checkpoints, write_checkpoint
from paceline.checkpoint.lazy import deferred, float_named
from paceline.checkpoint.lock import hold_lock
from paceline.checkpoint.safetensors_file import open_tensors, size_text
from paceline.checkpoint.tree import flatten
from paceline.errors import CheckpointError, FormatError, UsageError

_INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"
_GIVE = "pass a .safetensors file, or a folder that contains model.safetensors or its index"
_CONVERT = "load it with the library that wrote it, and save it again as safetensors"
_AGAIN = "check that you can read it, or copy it again from its source"
_NAMED = 5


def import_model(
    source: Path, run_dir: Path, renames: Sequence[str] = (), trainer: int = 0, dtype: str | None = None
) -> str:
    """Writes the weights of `source` as the checkpoint of step 0 in `run_dir`.

    `trainer` is the number of their trainer in the script, from 0. `source` is a .safetensors file, or a folder with
    one such file or with several and their index. `renames` are prefixes as ``OLD=NEW``; the first that matches a name
    is applied. `dtype` (bf16, fp16, fp32) converts floating-point weights. Memory stays within the largest tensor and
    a constant. Returns the text to print. Raises UsageError if the source has another format or an option is wrong,
    CheckpointError if reading or writing fails or the run already has a checkpoint, LaunchError while the run is
    active.
    """
    kind = float_named(dtype)
    if trainer < 0:
        raise UsageError(
            f"--trainer must be at least 0, got {trainer}",
            "trainers are numbered from 0, in the order the script creates them",
        )
    files = list(_files(source))
    names = _renamed(list(_read(files)), renames, source)

    def tree() -> dict[str, Any]:
        model = {names[name]: tensor for name, tensor in _read(files).items()}
        return {"trainers": [{}] * trainer + [{"model": model}], "results": []}

    tensors = deferred(lambda: flatten(tree(), "")[0], kind)
    manifest = {"tree": flatten(tree(), "")[1], "plan": "", "script": "", "workers": 0, "streams": []}
    storage = checkpoints_of(run_dir)
    if list_checkpoints(storage):
        raise CheckpointError(f"{in_one_line(run_dir)} already contains a checkpoint", "import into a new run folder")
    try:
        lock = hold_lock(run_dir)
    except OSError as error:
        cure = "check that it is a folder that you can write to, or choose another run folder"
        raise CheckpointError(
            f"the run folder {in_one_line(run_dir)} could not be created: {error.strerror}", cure
        ) from error
    try:
        write_checkpoint(storage, 0, tensors, {**manifest, "imported": str(source)})
    finally:
        os.close(lock)
    size = size_text(sum(tensor.nbytes for tensor in tensors.values()))
    text = f"{plural(len(tensors), 'tensor')}, {size}" + (f", floating-point values as {dtype}" if dtype else "")
    done = f"imported {in_one_line(source)} into {in_one_line(run_dir)}: {text}"
    return f"{done}; `paceline run --run-dir {quoted(str(run_dir))} SCRIPT` starts from these weights"


def _files(source: Path) -> Iterator[tuple[Path, list[str] | None]]:
    """Each safetensors file of the source, and the names of the tensors to read from it (None: all)."""
    if not source.exists():
        raise UsageError(f"{in_one_line(source)} does not exist", _GIVE)
    if source.is_file():
        if source.suffix != ".safetensors":
            raise UsageError(
                f"{in_one_line(source)} is not a .safetensors file; other formats are not read: they may run code",
                _CONVERT,
            )
        yield source, None
    elif (source / _INDEX).exists():
        from paceline.checkpoint.file_types import Index  # needs msgspec

        by_file: dict[str, list[str]] = {}
        try:
            for name, file in read_json(source / _INDEX, Index, str(source / _INDEX), _AGAIN)["weight_map"].items():
                by_file.setdefault(file, []).append(name)
        except FormatError as error:
            raise CheckpointError(error.what, error.cure) from error
        except OSError as error:
            raise CheckpointError(f"{source / _INDEX} could not be read: {error.strerror}", _AGAIN) from error
        yield from ((source / file, names) for file, names in by_file.items())
    elif (source / _SINGLE).exists():
        yield source / _SINGLE, None
    elif others := sorted(path.name for path in source.glob("*.bin*")):
        raise UsageError(
            f"{in_one_line(source)} stores its weights in {others[0]}, which may run code when it is loaded", _CONVERT
        )
    else:
        raise UsageError(f"{in_one_line(source)} contains neither {_SINGLE} nor {_INDEX}", _GIVE)


def _read(files: Sequence[tuple[Path, list[str] | None]]) -> dict[str, torch.Tensor]:
    """Memory-maps every tensor of the source, by its name there."""
    tensors: dict[str, torch.Tensor] = {}
    for path, names in files:
        try:
            with open_tensors(path) as file:
                tensors |= {name: file.get_tensor(name) for name in (file.keys() if names is None else names)}
        except (OSError, SafetensorError, UnicodeEncodeError) as error:  # the last: no tensor can have such a name
            raise CheckpointError(f"{path} could not be read: {error}", _AGAIN) from error
    return tensors


def _renamed(names: Sequence[str], renames: Sequence[str], source: Path) -> dict[str, str]:
    """Applies `renames` to the names in the source; returns {name in the source: name in the run}."""
    pairs = [text.partition("=") for text in renames]
    for text, (old, equals, _) in zip(renames, pairs, strict=True):
        if not equals:
            raise UsageError(
                f"--map {text} does not contain '='", "write --map OLD=NEW, or --map OLD= to remove a prefix"
            )
        if not any(name.startswith(old) for name in names):
            what = f"--map {text} matches no tensor: no name in {in_one_line(source)} begins with {old}"
            raise UsageError(what, f"the names are {_shorten_list(sorted(names))}")
    made: dict[str, str] = {}
    for name in names:
        old, new = next(((old, new) for old, _, new in pairs if name.startswith(old)), ("", ""))
        made[name] = new + name[len(old) :]
    origin = {new: name for name, new in made.items()}
    for name, new in made.items():
        if origin[new] != name:
            raise UsageError(f"--map gives {name} and {origin[new]} the same name {new}", "choose other prefixes")
    return made


def _shorten_list(items: Sequence[str]) -> str:
    """The first few items as text, and the number of the others."""
    return ", ".join(items[:_NAMED]) + (f" and {len(items) - _NAMED} more" if len(items) > _NAMED else "")


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(one, other)


def adopted(
    model: nn.Module,
    weights: Mapping[str, torch.Tensor],
    trainer: int,
    source: str,
    cuts: Mapping[str, ShardingSpec] = MappingProxyType({}),
    bf16_weights: bool = False,
) -> dict[str, Any]:
    """Turns imported `weights` into the state that ``model.load_state_dict`` accepts with strict=True.

    `cuts` has the full shapes of the parameters that the model holds as shards. With `bf16_weights` the plan has
    converted the model, and weights of all floating-point dtypes are accepted. Tied weights may be given once or
    under each name. Raises CheckpointError if names, shapes or dtypes differ from the model's, and lists up to five of
    each kind.
    """
    wanted: dict[str, Any] = model.state_dict(keep_vars=True)
    ties: dict[int, list[str]] = {}
    for name, value in wanted.items():
        ties.setdefault(id(value), []).append(name)
    given_names, completed = set(weights), dict(weights)
    untied, dtypes = [], []
    for names in ties.values():
        given = [name for name in names if name in given_names]
        completed |= {name: weights[given[0]] for name in names if given and name not in given_names}
        untied += [f"{name} and {given[0]}" for name in given[1:] if not _equal(weights[name], weights[given[0]])]
    for name in sorted(completed.keys() & wanted.keys()):
        parameter, weight = wanted[name], completed[name]
        converted = bf16_weights and weight.is_floating_point()
        if isinstance(parameter, torch.Tensor) and parameter.dtype != weight.dtype and not converted:
            dtypes.append(f"{name} ({weight.dtype} instead of {parameter.dtype})".replace("torch.", ""))
    kinds = _other_names_and_shapes(wanted, completed, cuts)
    kinds |= {"wrong dtype": dtypes, "tied in the model but not equal": untied}
    cure = "import them again into a new run folder: use --map where names differ, --dtype where dtypes differ"
    _refuse(f"the weights imported from {in_one_line(source)} do not fit the model of trainer {trainer}", kinds, cure)
    return completed


def refuse_another_model(
    model: nn.Module, saved: Mapping[str, Any], trainer: int, checkpoint: str, cuts: Mapping[str, ShardingSpec]
) -> None:
    """Raises CheckpointError if the model of a resumed run has other names or shapes than the checkpoint."""
    kinds = _other_names_and_shapes(model.state_dict(keep_vars=True), saved, cuts)
    cure = "restore the original model, or train the new one from the start in another --run-dir"
    _refuse(f"the {checkpoint} does not fit the model of trainer {trainer}", kinds, cure)


def _other_names_and_shapes(
    wanted: Mapping[str, Any], saved: Mapping[str, Any], cuts: Mapping[str, ShardingSpec]
) -> dict[str, list[str]]:
    shapes = []
    for name in sorted(wanted.keys() & saved.keys()):
        expected, actual = cuts.get(name, wanted[name]), saved[name]
        if hasattr(expected, "shape") and tuple(expected.shape) != tuple(actual.shape):
            shapes.append(f"{name} ({list(actual.shape)} instead of {list(expected.shape)})")
    missing, unexpected = sorted(wanted.keys() - saved.keys()), sorted(saved.keys() - wanted.keys())
    return {"missing": missing, "unexpected": unexpected, "wrong shape": shapes}


def _refuse(what: str, kinds: Mapping[str, list[str]], cure: str) -> None:
    if any(kinds.values()):
        details = "; ".join(f"{kind}: {_shorten_list(items)}" for kind, items in kinds.items() if items)
        raise CheckpointError(f"{what}: {details}", cure)
