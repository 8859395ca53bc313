"""Writes models as Hugging Face folders, with all workers of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn

from paceline.errors import CheckpointError
from paceline.team.gather_trees import from_main

_WEIGHTS = ".paceline-weights.safetensors"


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
