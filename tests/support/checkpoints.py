"""Checkpoints of a run folder, as tests write and read them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from paceline.checkpoint import files
from paceline.checkpoint.files import Checkpoint, checkpoints_of


def write_checkpoint(folder: Path, step: int, *arguments: Any, **options: Any) -> Path:
    """The folder of the checkpoint that was written."""
    return Path(str(files.write_checkpoint(checkpoints_of(folder), step, *arguments, **options)))


def find_checkpoint(folder: Path, say: Any, only: int | None = None) -> Checkpoint | None:
    return files.find_checkpoint(checkpoints_of(folder), say, only)


def list_checkpoints(folder: Path) -> list[tuple[int, str]]:
    return files.list_checkpoints(checkpoints_of(folder))


def weights_of(path: Path) -> Path:
    """The one file of a checkpoint that holds tensors."""
    (found,) = path.glob("*.safetensors")
    return found
