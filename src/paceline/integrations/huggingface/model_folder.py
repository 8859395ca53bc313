"""Writes and reads models as Hugging Face folders, with all workers of a run."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn

from paceline.checkpoint.export import export_model
from paceline.compute.state_dict import put_full
from paceline.errors import CheckpointError, PacelineError
from paceline.integrations.gather_trees import from_main
from paceline.parallel.tensor_parallel.script_view import without_script_view

_WEIGHTS, _BEST = ".paceline-weights.safetensors", "best.safetensors"


def save_model(trainer: Any, hf_trainer: Any, output_dir: str | None = None) -> None:
    """Writes the model as a folder that `from_pretrained` reads. All workers must call it; one writes.

    The folder has the weights in safetensors files of at most the size that transformers chooses, with an index if
    there are several, the configuration, the generation configuration and the tokenizer. Of a peft model it has the
    adapter alone.

    Args:
        trainer: The Paceline Trainer.
        hf_trainer: The `transformers.Trainer`.
        output_dir: The folder; by default that of the training arguments.
    """
    folder = Path(output_dir or hf_trainer.args.output_dir)
    weights, failure = folder / _WEIGHTS, ""
    if trainer.main:
        folder.mkdir(parents=True, exist_ok=True)
    trainer.export(weights)
    if trainer.main:
        try:
            with safe_open(weights, "pt") as file:
                state = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  it is no mapping
            hf_trainer._save(str(folder), state_dict=_tied(hf_trainer.model, state))
        except OSError as error:
            failure = f"{type(error).__name__}: {error}"
        finally:
            weights.unlink(missing_ok=True)
    if failure := from_main(failure):
        raise CheckpointError(f"the model could not be written to {folder}: {failure}", "free space, or check the path")


def _tied(model: nn.Module, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Gives the names of a tied weight one tensor, so that it is written once, as transformers does."""
    first: dict[int, str] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        if name in state:
            state[name] = state[first.setdefault(id(param), name)]
    return state


@without_script_view
def load_best(trainer: Any) -> None:
    """Puts the weights of the best checkpoint into the model. All workers must call it.

    The main worker reads the checkpoint and sends one tensor after another: other hosts need not see its run folder,
    and a worker with shards holds one full tensor at a time. A tensor that the checkpoint leaves out stays as it is.

    Raises:
        CheckpointError: The main worker does not find the checkpoint in the run folder of its host.
    """
    folder, failure, names = None, None, list[str]()
    if trainer.main:
        try:
            folder = Path(tempfile.mkdtemp(prefix=".best-", dir=trainer.run_dir))
            export_model(trainer.run_dir, folder / _BEST, best=True)
            with safe_open(folder / _BEST, "pt") as file:
                names = list(file.keys())
        except PacelineError as error:
            failure = [error.what, error.cure]
        except OSError as error:
            failure = [f"the best checkpoint could not be read: {error}", "free space, or check the run folder"]
    try:
        failure, names = from_main([failure, names])
        if failure:
            raise CheckpointError(*failure)
        _receive(trainer, names, folder)
    finally:
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)


def _receive(trainer: Any, names: list[str], folder: Path | None) -> None:
    """Puts the tensors of these names into the model; the main worker has them in a `folder`."""
    job, state = trainer._job, trainer.model.state_dict(keep_vars=True)
    with contextlib.ExitStack() as stack:
        file = None if folder is None else stack.enter_context(safe_open(folder / _BEST, "pt"))
        for name in names:
            full = from_main(None if file is None else file.get_tensor(name))
            if name in state:  # else another pipeline stage has it
                put_full(full, state[name], job.cuts.get(name), job.shard_index)
