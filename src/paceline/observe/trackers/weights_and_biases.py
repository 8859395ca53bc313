"""Logs to Weights & Biases."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paceline.errors import UsageError
from paceline.observe.trackers.tracker import LoggedRun, Tracker, prefix_of


class WandB(Tracker):
    """A run of Weights & Biases. `target` is ``PROJECT`` or ``ENTITY/PROJECT``.

    The run's ``_step`` is the trainer's step. If several trainers log, rows are added, since rows in W&B must come in
    the order of ``_step``; each value is drawn over the steps of its own trainer.
    """

    _run: Any = None

    def begin(self, run: LoggedRun) -> str | None:
        """Begins a run with the name of the run folder, or continues the run of this identifier."""
        import wandb

        if self._run is not None:
            return str(self._run.id)
        mode = wandb.setup().settings.mode
        if mode in ("online", "shared") and not wandb.login(prompt=False):
            raise UsageError("W&B knows no API key", "run `wandb login`, or set WANDB_API_KEY, or WANDB_MODE=offline")
        entity, _, project = (self.target or "").rpartition("/")
        name = wandb.setup().settings.run_name or run.name  # WANDB_NAME, if it is set
        options: dict[str, Any] = {"entity": entity or None, "project": project or None, "id": run.id, "name": name}
        settings = wandb.Settings(console="off")  # Paceline keeps the output of the workers
        self._run = wandb.init(dir=run.folder, resume="allow", reinit="create_new", settings=settings, **options)
        # A resumed online run has rows up to its first step; W&B drops values of lower ones. Offline this is 0.
        self._row, self._names, self._axes = self._run.starting_step, set[str](), set[str]()
        return str(self._run.id)

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        """Logs numbers and texts."""
        prefix = prefix_of(next(iter(values)))
        axis = f"{prefix}step"
        for name in values.keys() - self._axes:
            self._run.define_metric(name, step_metric=axis)
        self._axes |= values.keys()
        if step > self._row:
            self._row, self._names = step, set()
        elif values.keys() & self._names:
            self._row, self._names = self._row + 1, set()
        self._names |= values.keys()
        self._run.log({**values, axis: step}, step=self._row)

    def media(self, step: int, name: str, event: Mapping[str, Any]) -> None:
        """Logs a picture or a histogram."""
        import wandb

        if event["kind"] == "histogram":
            self.write(step, {name: wandb.Histogram(np_histogram=(event["counts"], event["edges"]))})
        elif Path(event["file"]).exists():
            self.write(step, {name: wandb.Image(event["file"])})

    def config(self, values: Mapping[str, Any]) -> None:
        """Sets the config."""
        self._run.config.update(dict(values), allow_val_change=True)

    def artifact(self, step: int, name: str, path: str, value: float) -> None:
        """Writes the best value and its checkpoint to the summary, and uploads the checkpoint as an artifact."""
        import wandb

        self._run.summary.update({f"best/{name}": value, f"best/{name} step": step, f"best/{name} checkpoint": path})
        if self.upload and Path(path).is_dir():
            title = "".join(letter if letter.isalnum() else "-" for letter in f"best-{name}")
            artifact = wandb.Artifact(f"{title}-{self._run.id}", type="model", metadata={"step": step, name: value})
            artifact.add_dir(path)
            self._run.log_artifact(artifact)

    def close(self) -> None:
        """Finishes the run."""
        if self._run is not None:
            self._run.finish(exit_code=0 if self.has_succeeded else 1)
            self._run = None
