"""A model's weights as one safetensors file with the user's own keys, without the model's code."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path

import torch

from paceline.checkpoint.files import find_checkpoint, list_checkpoints, write_cure
from paceline.checkpoint.tensorfile import DTYPES, flush_folder, size_text, write_tensors
from paceline.checkpoint.tree import unflatten
from paceline.errors import CheckpointError, UsageError


def write_model(state: Mapping[str, torch.Tensor], out: Path) -> int:
    """Writes `state`, a model's state dict, to the .safetensors file `out` atomically; its size in bytes.

    Tied weights are written under each of their keys, so that ``load_state_dict(load_file(out))`` is strict. Raises
    UsageError for another suffix or a value that the format does not hold, CheckpointError if writing fails.
    """
    if out.suffix != ".safetensors":
        what = f"the model cannot be exported to {out}: only .safetensors files, which run no code, are written"
        raise UsageError(what, f"name it {out.with_suffix('.safetensors')}")
    for name, value in state.items():
        tensor = isinstance(value, torch.Tensor)
        if not tensor or value.dtype not in DTYPES or value.layout != torch.strided or value.is_meta:
            kind = f"{value.dtype} tensor on {value.device}" if tensor else type(value).__name__
            what = f"{name!r} of the model's state is of a kind that safetensors files do not hold ({kind})"
            cure = "keep it out of state_dict(), as register_buffer(..., persistent=False) does, or convert it"
            raise UsageError(what, cure)
    temporary = out.with_name(f".{out.name}.tmp-{os.getpid()}")
    try:
        temporary.unlink(missing_ok=True)
        # The user's umask decides who may read an export, as it does for any file of theirs.
        size, _ = write_tensors(temporary, state, mode=0o666)
        os.replace(temporary, out)
        flush_folder(out.parent)
    except OSError as error:
        cure = write_cure(error, sum(value.nbytes for value in state.values()), "another file")
        raise CheckpointError(f"the model could not be written to {out}: {error.strerror}", cure) from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()
    return size


def export_model(run_dir: Path, out: Path, trainer: int = 0, step: int | None = None) -> str:
    """Writes the weights of the script's `trainer`, counted from 0, to `out`: of `step`, or the newest.

    The checkpoint is mapped, not loaded, so that memory stays within one tensor. Returns what to print:
    damaged checkpoints that were passed over, and what was written. Raises CheckpointError for a run folder
    without such a checkpoint, UsageError for a trainer that is not there.
    """
    lines: list[str] = []
    found = find_checkpoint(run_dir, lines.append, step)
    if found is None:
        others = ", ".join(str(number) for number, _ in reversed(list_checkpoints(run_dir)))
        cure = f"choose one of the steps {others}" if others else "give the --run-dir of a run that saved one"
        which = "checkpoint" if step is None else f"checkpoint of step {step}"
        raise CheckpointError(f"there is no {which} in {run_dir}", cure)
    trainers = unflatten(found.manifest["tree"], found.tensors(mapped=True))["trainers"]
    if not 0 <= trainer < len(trainers):
        what = f"there is no trainer {trainer} in step {found.step} of {run_dir}, which has {len(trainers)}"
        raise UsageError(what, "count trainers from 0, in the order in which the script makes them")
    state = trainers[trainer]["model"]
    size = write_model(state, out)
    lines.append(f"wrote {out}: {len(state)} tensors, {size_text(size)}, from step {found.step} of {run_dir}")
    return "\n".join(lines)
