"""Exports weights as safetensors, a Hugging Face folder or a torch.distributed.checkpoint folder."""

from __future__ import annotations

import contextlib
import glob
import json
import os
import shutil
import warnings
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from paceline.base.console import in_one_line, say
from paceline.base.schema import read_json
from paceline.base.sharding import ShardedTensor
from paceline.base.text import parse_size, plural
from paceline.checkpoint.files import (
    Checkpoint,
    best_of,
    checkpoints_of,
    ended_in,
    find_checkpoint,
    grouped,
    list_checkpoints,
    open_checkpoint,
    trainers_in,
    with_ended,
    write_cure,
)
from paceline.checkpoint.import_weights import fitted
from paceline.checkpoint.lazy import Deferred, deferred, float_named
from paceline.checkpoint.safetensors_file import DTYPES, size_text, tensor_chunks, write_tensors
from paceline.checkpoint.sources.folders import is_source, open_source
from paceline.checkpoint.storage import flush_folder, is_url, write_file
from paceline.checkpoint.tree import unflatten
from paceline.comm.communicator import Group
from paceline.errors import CheckpointError, FormatError, PacelineError, UsageError

_MODE = 0o666  # the user's umask decides who may read an export, as it does for any file of theirs
_MARK = "paceline-export.json"  # lists the files of a folder that an export wrote and the next export may replace
_OTHERS = (".pt", ".pth", ".bin", ".ckpt", ".pkl", ".npz", ".h5", ".onnx", ".gguf")
State = Mapping[str, torch.Tensor]


def write_together(
    state: Mapping[str, torch.Tensor | ShardedTensor], out: Path, main: bool, replica: Group | None, group: Group
) -> None:
    """Writes `state` with `write_model` on the `main` worker of `group`. Collective.

    Sharded tensors are gathered from the workers of `replica` one after another, so that memory holds one full tensor
    at a time. An error of the main worker is raised on every worker of the group.
    """
    full_state: dict[str, torch.Tensor] = {}
    pieces: dict[str, torch.Tensor] = {}  # sharded tensors that are not gathered yet

    def gather(name: str, held: ShardedTensor) -> torch.Tensor:
        assert replica is not None
        pieces.pop(name, None)
        return replica.gather_full(held)

    for name, value in state.items():
        if isinstance(value, ShardedTensor):
            assert replica is not None
            replica.declare("the tensors of an export", check=False, kind="all_gather")
            value = pieces[name] = Deferred(partial(gather, name, value), value.shape, value.tensor.dtype)
        full_state[name] = value
    trouble: list[Any] = []
    try:
        if main:
            write_model(full_state, out)
    except (CheckpointError, UsageError) as error:
        trouble = [isinstance(error, UsageError), error.what, error.cure]
    if pieces:
        deque(tensor_chunks(dict(pieces)), maxlen=0)
    group.declare("the result of an export", check=False, kind="figures")
    for usage, what, cure in filter(None, group.gather_json(trouble)):
        raise (UsageError if usage else CheckpointError)(what, cure)


def write_model(state: State, out: Path) -> int:
    """Writes `state`, a model's state dict, to the .safetensors file `out` atomically; its size in bytes.

    Tied weights are written under each of their keys, so that ``load_state_dict(load_file(out))`` is strict. Raises
    UsageError for another suffix or a value that the format does not hold, CheckpointError if writing fails.
    """
    refuse_other_suffix(out)
    _check(state)
    temporary = out.with_name(f".{out.name}.tmp-{os.getpid()}")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)  # a missing folder must not lose a finished training run
        temporary.unlink(missing_ok=True)
        size, _ = write_tensors(temporary, state, mode=_MODE)
        os.replace(temporary, out)
        flush_folder(out.parent)
    except OSError as error:
        cure = write_cure(error, _bytes(state), "another file")
        raise CheckpointError(f"the model could not be written to {out}: {error.strerror}", cure) from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()
    return size


def refuse_other_suffix(out: Path) -> None:
    """Raises UsageError unless the name of `out` ends in .safetensors."""
    if out.suffix != ".safetensors":
        what = f"the model cannot be exported to {out}: only .safetensors files are written, because they run no code"
        raise UsageError(what, f"use the name {out.with_suffix('.safetensors')}")


def _check(state: State) -> None:
    for name, value in state.items():
        tensor = isinstance(value, torch.Tensor)
        if not tensor or value.dtype not in DTYPES or value.layout != torch.strided or value.is_meta:
            kind = f"{value.dtype} tensor on {value.device}" if tensor else type(value).__name__
            what = f"{name!r} in the model's state_dict() cannot be stored in a safetensors file ({kind})"
            cure = (
                "leave it out of state_dict(), for example with register_buffer(..., persistent=False), or convert it"
            )
            raise UsageError(what, cure)


def _bytes(state: State) -> int:
    return sum(value.nbytes for value in state.values())


def export_model(
    run_dir: str | Path,
    out: Path,
    trainer: int = 0,
    step: int | None = None,
    best: bool = False,
    layout: str | None = None,
    dtype: str | None = None,
    max_file: str = "5GB",
) -> str:
    """Writes the weights of a trainer from the checkpoint of `step`, the `best` or the newest checkpoint, to `out`.

    `trainer` is its number in the script, from 0. `run_dir` is a run folder, or the URL of a run's checkpoints. A name
    `out` that ends in .safetensors becomes one file. Any other name becomes a folder: in the layout of Hugging Face
    with files of at most `max_file`, or in that of torch.distributed.checkpoint if `layout` is "dcp". `dtype` (bf16,
    fp16, fp32) converts floating-point weights. The checkpoint is memory-mapped in parts, so that memory stays within
    the largest tensor and a constant. Returns the lines to print: skipped damaged checkpoints, and what was written.
    Raises CheckpointError if the checkpoint does not exist or writing fails; UsageError if the trainer does not exist,
    if options contradict each other, or if the folder contains files that no export wrote.
    """
    kind, most = float_named(dtype), parse_size(max_file)
    single = layout != "dcp" and out.suffix in (".safetensors", *_OTHERS)
    if layout == "dcp" and out.suffix == ".safetensors":
        raise UsageError(
            f"{out} is the name of a file, but --format dcp writes a folder", "omit the suffix .safetensors"
        )
    lines: list[str] = []
    step, mark = _chosen(run_dir, trainer, step, best)
    checkpoint, source, tree = _weights_in(run_dir, trainer, step, lines.append)
    state = deferred(lambda: unflatten(tree, source.tensors(mapped=True)), kind)
    if single:
        text = size_text(write_model(state, out))
    else:
        _check(state)
        files = _write_folder(out, state, checkpoint, most if layout != "dcp" else None)
        text = f"{size_text(sum(files))} in {plural(len(files), 'file')}"
    text += f", floating-point values as {dtype}" if dtype else ""
    text += f", from step {checkpoint.step} of {in_one_line(run_dir)}"
    text += f", the best {mark['name']}: {mark['value']:.6g}" if mark else ""
    lines.append(f"wrote {out}: {plural(len(state), 'tensor')}, {text}")
    return "\n".join(lines)


def load(
    run: str | Path,
    model: nn.Module | None = None,
    best: bool = False,
    step: int | None = None,
    trainer: int = 0,
) -> Any:
    """Reads the weights of a run's checkpoint, or of another program, on any machine and without workers.

    Args:
        run: The run folder, the URL of its checkpoints, or a file or folder that `paceline import` reads.
        model: A model that gets the weights.
        best: Take the best checkpoint that `Trainer.keep_best` has kept, not the newest one.
        step: Take the checkpoint of this step.
        trainer: The number of the trainer in the script, from 0.

    Returns:
        The model in eval mode if there is one, else its state dict with tensors on the CPU.

    Raises:
        CheckpointError: The run has no such checkpoint, or the weights cannot be read or do not fit the model.
        UsageError: The run has no such trainer, `best` and `step` were both given, or one of them for another program.

    Example:
        >>> model = paceline.load("runs/a", GPT(), best=True)
        >>> trainer = paceline.Trainer(lambda: paceline.load("pretrained.pt", GPT()).train(), ...)
    """
    if not is_url(str(run)) and is_source(Path(run)):
        if best or step is not None or trainer:
            what = "best=, step= and trainer= choose a checkpoint of a run"
            raise UsageError(f"{what}, and {in_one_line(run)} comes from another program", "leave them out")
        return _given(open_source(Path(run))().weights, model, f"the weights of {in_one_line(run)}")
    if best and step is not None:
        raise UsageError("best=True and step= cannot be used together", "use only one of them")
    step, _ = _chosen(run, trainer, step, best)
    checkpoint, source, tree = _weights_in(run, trainer, step, say)
    state = unflatten(tree, source.tensors(mapped=True))
    return _given(state, model, f"the weights of step {checkpoint.step} of {in_one_line(run)}")


def _given(state: State, model: nn.Module | None, what: str) -> Any:
    """Returns a copy of the weights, or the model with them."""
    if model is None:
        return {name: value.clone() for name, value in state.items()}
    what = f"{what} do not fit {type(model).__name__}"
    cure = "build the model as the script that trained it does"
    model.load_state_dict(fitted(model, state, what, cure, converts=True))
    return model.eval()


def _chosen(
    run_dir: str | Path, trainer: int, step: int | None, best: bool
) -> tuple[int | None, dict[str, Any] | None]:
    """Returns the step of the wanted checkpoint, None for the newest one, and the mark of the best one."""
    if not best:
        return step, None
    if step is not None:
        raise UsageError("--best and --step cannot be used together", "use only one of them")
    mark = _best(run_dir, trainer)
    return mark["step"], mark


def _weights_in(
    run_dir: str | Path, trainer: int, step: int | None, say: Callable[[str], None]
) -> tuple[Checkpoint, Checkpoint, Any]:
    """Returns the checkpoint, the one that holds the weights of this trainer, and their tree."""
    checkpoint = find_checkpoint(checkpoints_of(run_dir), say, step)
    if checkpoint is None:
        raise no_checkpoint(run_dir, step)
    ended = ended_in(checkpoint.manifest, checkpoint.storage, say)
    trainers = trainers_in(with_ended(checkpoint.manifest, ended))
    if not 0 <= trainer < len(trainers) or "model" not in trainers[trainer]:
        where = f"step {checkpoint.step} of {in_one_line(run_dir)}"
        what = f"{where} has no weights of trainer {trainer}; it has {plural(len(trainers), 'trainer')}"
        raise UsageError(what, "trainers are numbered from 0, in the order the script creates them")
    return checkpoint, ended.get(trainer, checkpoint), trainers[trainer]["model"]


def _best(run_dir: str | Path, trainer: int) -> dict[str, Any]:
    storage = checkpoints_of(run_dir)
    best = best_of(open_checkpoint(storage, *one, hashes=False) for one in list_checkpoints(storage))
    if trainer not in best:
        what = f"no checkpoint in {in_one_line(run_dir)} is marked as the best of trainer {trainer}"
        raise CheckpointError(what, "call trainer.keep_best(NAME) before the training loop, or omit --best")
    return best[trainer]


def no_checkpoint(run_dir: str | Path, step: int | None) -> CheckpointError:
    """Builds the error for a run that has no checkpoint, or none of `step`."""
    others = ", ".join(str(number) for number, _ in reversed(list_checkpoints(checkpoints_of(run_dir))))
    cure = (
        f"choose one of these steps: {others}" if others else "use the --run-dir of a run that has saved a checkpoint"
    )
    which = "checkpoint" if step is None else f"checkpoint of step {step}"
    return CheckpointError(f"{in_one_line(run_dir)} does not contain a {which}", cure)


# -- folders ---------------------------------------------------------------------------------------------------------


def _write_folder(out: Path, state: State, checkpoint: Checkpoint, most: int | None) -> list[int]:
    """Writes the folder `out` atomically and returns the sizes of its weight files.

    With `most`, the layout is Hugging Face's and no file is larger than `most` bytes; with None, the layout is that of
    torch.distributed.checkpoint. The folder is built under another name and renamed when it is complete.
    """
    final = out.resolve()
    temporary = final.with_name(f".{final.name}.tmp-{os.getpid()}")
    former = final.with_name(f".{final.name}.old-{os.getpid()}")
    try:
        _refuse_others(out)
        _sweep(final)
        temporary.mkdir()
        if most is None:
            _fill_dcp(temporary, state)
        else:
            _fill_split(temporary, state, most)
        sizes = {path.name: path.stat().st_size for path in sorted(temporary.iterdir())}
        mark = {"format": 1, "step": checkpoint.step, "files": list(sizes)}
        write_file(temporary / _MARK, [json.dumps(mark, indent=1).encode()], _MODE)
        flush_folder(temporary)
        if final.is_dir() and any(final.iterdir()):
            os.rename(final, former)  # a folder cannot replace a full one in one move
        os.rename(temporary, final)
        flush_folder(final.parent)
    except OSError as error:
        if former.exists() and not final.exists():
            os.rename(former, final)
        cure = write_cure(error, _bytes(state), "another folder")
        raise CheckpointError(f"the model could not be written to {out}: {error.strerror}", cure) from error
    finally:
        for path in (temporary, former):
            shutil.rmtree(path, ignore_errors=True)
    return [size for name, size in sizes.items() if name.endswith((".safetensors", ".distcp"))]


def _refuse_others(out: Path) -> None:
    """Raises UsageError if `out` holds files that no export wrote."""
    if out.exists() and not out.is_dir():
        raise UsageError(f"{out} is a file, but the export needs a folder", "choose another name")
    names = {path.name for path in out.iterdir()} if out.exists() else set()
    exported: set[str] = set()
    if _MARK in names:
        from paceline.checkpoint.file_types import Mark  # needs msgspec

        with contextlib.suppress(FormatError):
            exported = {_MARK, *read_json(out / _MARK, Mark, _MARK)["files"]}
    if others := sorted(names - exported):
        more = f" and {len(others) - 3} more" if len(others) > 3 else ""
        what = f"{out} contains files that no export wrote: {', '.join(others[:3])}{more}"
        raise UsageError(what, "choose another folder, or move these files away first")


def _sweep(final: Path) -> None:
    """Removes the files of killed exports, and restores a folder that one had moved away but not yet replaced."""
    for path in final.parent.glob(f".{glob.escape(final.name)}.*-*"):
        kind, _, pid = path.name.rpartition(".")[2].partition("-")
        if kind in ("tmp", "old") and pid.isdigit() and (int(pid) == os.getpid() or not os.path.exists(f"/proc/{pid}")):
            if kind == "old" and not final.exists():
                os.rename(path, final)
            else:
                shutil.rmtree(path)


def _fill_split(folder: Path, state: State, most: int) -> None:
    """Hugging Face's layout (https://huggingface.co/docs/safetensors and the save_pretrained of transformers)."""
    groups = grouped(((name, tensor.nbytes) for name, tensor in state.items()), most)
    if len(groups) <= 1:
        write_tensors(folder / "model.safetensors", state, _MODE)
        return
    places: dict[str, str] = {}
    for number, group in enumerate(groups, start=1):
        file = f"model-{number:05d}-of-{len(groups):05d}.safetensors"
        write_tensors(folder / file, {name: state[name] for name in group}, _MODE)
        places.update(dict.fromkeys(group, file))
    index = {"metadata": {"total_size": _bytes(state)}, "weight_map": dict(sorted(places.items()))}
    write_file(folder / "model.safetensors.index.json", [json.dumps(index, indent=2).encode() + b"\n"], _MODE)


def _fill_dcp(folder: Path, state: State) -> None:
    """Written by torch itself, in this process alone."""
    from torch.distributed import checkpoint as dcp
    from torch.distributed.checkpoint.api import CheckpointException

    # One file per tensor: torch's writer keeps all tensors of a file in memory until the last is written.
    writer = dcp.FileSystemWriter(folder, single_file_per_rank=False)
    try:
        with warnings.catch_warnings(
            action="ignore", category=UserWarning
        ):  # torch warns that there is no process group
            dcp.save(dict(state), storage_writer=writer, no_dist=True)
    except CheckpointException as error:
        cause: BaseException = next(iter(error.failures.values()))[0]
        while cause.__context__ and not isinstance(cause, OSError | PacelineError):
            cause = cause.__context__  # torch fails again when it closes the file that could not be written
        raise cause from None
