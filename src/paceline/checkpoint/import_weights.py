"""Imports weights and optimizer states of another program as the checkpoint of step 0."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from paceline.base.console import in_one_line, quoted
from paceline.base.sharding import ShardingSpec
from paceline.base.text import first_few, plural
from paceline.checkpoint.files import checkpoints_of, list_checkpoints, write_checkpoint
from paceline.checkpoint.lazy import deferred, float_named
from paceline.checkpoint.lock import hold_lock
from paceline.checkpoint.safetensors_file import size_text
from paceline.checkpoint.sources.contents import Contents, described
from paceline.checkpoint.sources.folders import open_source
from paceline.checkpoint.tree import flatten
from paceline.errors import CheckpointError, UsageError


def import_model(
    source: Path,
    run_dir: Path,
    renames: Sequence[str] = (),
    trainer: int = 0,
    dtype: str | None = None,
    optimizer: bool = True,
) -> str:
    """Writes the weights of `source`, and its `optimizer` states, as the checkpoint of step 0 in `run_dir`.

    `trainer` is the number of their trainer in the script, from 0. `source` is a file of safetensors or of torch.save,
    or a folder of Hugging Face, Accelerate, torch.distributed.checkpoint or DeepSpeed. Nothing in it is executed.
    `renames` are prefixes as ``OLD=NEW``; the first that matches a name is applied. `dtype` (bf16, fp16, fp32) converts
    floating-point weights. Memory stays within the largest tensor and a constant. Returns the text to print: what was
    imported, and what was not, with the reason. Raises UsageError if the source has another format or an option is
    wrong, CheckpointError if reading or writing fails or the run already has a checkpoint, LaunchError while the run is
    active.
    """
    kind = float_named(dtype)
    if trainer < 0:
        raise UsageError(
            f"--trainer must be at least 0, got {trainer}",
            "trainers are numbered from 0, in the order the script creates them",
        )
    read = open_source(source)
    contents = read()
    rename = _renaming(list(contents.weights), renames, source)

    def tree() -> dict[str, Any]:
        held = read()
        saved: dict[str, Any] = {"model": {rename(name): tensor for name, tensor in held.weights.items()}}
        if optimizer and held.optimizers:
            saved["imported_optimizers"] = held.renamed_optimizers(rename)
        return {"trainers": [{}] * trainer + [saved], "results": []}

    prefix = f"trainers.{trainer}.model."
    tensors = deferred(lambda: flatten(tree(), "", live=True)[0], kind, prefix)
    weights = {name: tensor for name, tensor in tensors.items() if name.startswith(prefix)}
    skeleton = flatten(tree(), "", live=True)[1]
    manifest = {"tree": skeleton, "plan": "", "script": "", "workers": 0, "streams": [], "imported": str(source)}
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
        write_checkpoint(storage, 0, tensors, manifest)
    finally:
        os.close(lock)
    size = size_text(sum(tensor.nbytes for tensor in weights.values()))
    text = f"{plural(len(weights), 'tensor')}, {size}" + (f", floating-point values as {dtype}" if dtype else "")
    if optimizer and contents.optimizers:
        text += f", and the optimizer state ({described(contents.optimizers)})"
    done = f"imported {in_one_line(source)} into {in_one_line(run_dir)}: {text}"
    done += f"; `paceline run --run-dir {quoted(str(run_dir))} SCRIPT` starts from these weights"
    return "\n".join([done, *_notes(contents)])


def _notes(contents: Contents) -> list[str]:
    """Lines about what was removed from names, and about what was not taken."""
    removed = ", ".join(sorted(contents.removed))
    notes = [f"removed from the names: {in_one_line(removed)} (--map =PREFIX puts a prefix before them)"] * bool(
        removed
    )
    for reason, names in contents.left_out.items():
        notes.append(f"not taken: {in_one_line(', '.join(names))} ({in_one_line(reason)})")
    return notes


def _renaming(names: Sequence[str], renames: Sequence[str], source: Path) -> Callable[[str], str]:
    """Returns the function that applies `renames` to a name. Raises UsageError if one of them matches no weight, or if
    two weights get the same name.
    """
    pairs = [text.partition("=") for text in renames]
    for text, (old, equals, _) in zip(renames, pairs, strict=True):
        if not equals:
            raise UsageError(
                f"--map {text} does not contain '='", "write --map OLD=NEW, or --map OLD= to remove a prefix"
            )
        if not any(name.startswith(old) for name in names):
            what = f"--map {text} matches no tensor: no name in {in_one_line(source)} begins with {old}"
            raise UsageError(what, f"the names are {first_few(sorted(names))}")

    def rename(name: str) -> str:
        old, new = next(((old, new) for old, _, new in pairs if name.startswith(old)), ("", ""))
        return new + name[len(old) :]

    made: dict[str, str] = {}
    for name in names:
        if made.setdefault(rename(name), name) != name:
            what = f"--map gives {name} and {made[rename(name)]} the same name {rename(name)}"
            raise UsageError(what, "choose other prefixes")
    return rename


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
    what = f"the weights imported from {in_one_line(source)} do not fit the model of trainer {trainer}"
    cure = "import them again into a new run folder: use --map where names differ, --dtype where dtypes differ"
    return fitted(model, weights, what, cure, cuts, bf16_weights)


def fitted(
    model: nn.Module,
    weights: Mapping[str, torch.Tensor],
    what: str,
    cure: str,
    cuts: Mapping[str, ShardingSpec] = MappingProxyType({}),
    converts: bool = False,
) -> dict[str, Any]:
    """Returns `weights` with all names of tied ones, as `adopted` does. If the model `converts` them, floating-point
    dtypes may differ. `what` and `cure` are the text of the error.
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
        converted = converts and weight.is_floating_point()
        if isinstance(parameter, torch.Tensor) and parameter.dtype != weight.dtype and not converted:
            dtypes.append(f"{name} ({weight.dtype} instead of {parameter.dtype})".replace("torch.", ""))
    kinds = _other_names_and_shapes(wanted, completed, cuts)
    kinds |= {"wrong dtype": dtypes, "tied in the model but not equal": untied}
    _refuse(what, kinds, cure)
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
        details = "; ".join(f"{kind}: {first_few(items)}" for kind, items in kinds.items() if items)
        raise CheckpointError(f"{what}: {details}", cure)
