"""Puts the weights of the best checkpoint into a model that is being trained, with all workers of the run."""

from __future__ import annotations

import shutil
import tempfile
from contextlib import ExitStack
from pathlib import Path

import torch
from safetensors import safe_open

from paceline.checkpoint.export import export_model
from paceline.compute.job import TrainingJob
from paceline.compute.state_dict import put_full
from paceline.errors import CheckpointError, PacelineError
from paceline.session.run import Run
from paceline.team.gather_trees import from_main

_BEST = "best.safetensors"


def load_best(run: Run, job: TrainingJob, trainer: int) -> None:
    """Puts the weights of a trainer's best checkpoint into the model of its job. All workers must call it.

    The main worker reads the checkpoint and sends one tensor after another: other hosts need not see its run folder,
    and a worker with shards holds one full tensor at a time. A tensor that the checkpoint leaves out stays as it is.
    Raises CheckpointError if the main worker does not find the checkpoint.
    """
    folder, failure, names = None, None, list[str]()
    if run.reporter.main:
        try:
            if run.folder.path is None:
                raise CheckpointError("the run has no run folder, so no checkpoint was kept", "pass --run-dir")
            folder = Path(tempfile.mkdtemp(prefix=".best-", dir=run.folder.path))
            export_model(run.folder.path, folder / _BEST, trainer, best=True)
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
        _receive(job, names, folder)
    finally:
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)


def _receive(job: TrainingJob, names: list[str], folder: Path | None) -> None:
    """Puts the tensors of these names into the model; the main worker has them in a `folder`."""
    state = job.model.state_dict(keep_vars=True)
    with torch.no_grad(), ExitStack() as stack:
        file = None if folder is None else stack.enter_context(safe_open(folder / _BEST, "pt"))
        for name in names:
            full = from_main(None if file is None else file.get_tensor(name))
            if name in state:  # else another pipeline stage has it
                put_full(full, state[name], job.cuts.get(name), job.shard_index)
