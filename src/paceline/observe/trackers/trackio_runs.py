"""Logs to Trackio."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paceline.observe.trackers.tracker import LoggedRun, Tracker


class Trackio(Tracker):
    """A run of Trackio. `target` is the project, else it has the name of the script."""

    _run: Any = None
    _config: Mapping[str, Any] = {}

    def begin(self, run: LoggedRun) -> str | None:
        """Takes the name of the run folder, or continues the run of this name."""
        self._project, self._name = self.target or run.script, run.id or run.name
        return self._name

    def config(self, values: Mapping[str, Any]) -> None:
        """Keeps the config until the next values: Trackio takes it when its run begins, or is resumed with more."""
        before, self._config = self._config, {**self._config, **values}
        if self._config != before:
            self.close()

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        """Logs numbers and texts."""
        import trackio

        if self._run is None:
            about = {"project": self._project, "name": self._name, "config": self._config}
            self._run = trackio.init(resume="allow", embed=False, **about)
        self._run.log(dict(values), step=step)

    def media(self, step: int, name: str, event: Mapping[str, Any]) -> None:
        """Logs a picture or a histogram."""
        import trackio

        if event["kind"] == "histogram":
            self.write(step, {name: trackio.Histogram(np_histogram=(event["counts"], event["edges"]))})
        elif Path(event["file"]).exists():
            self.write(step, {name: trackio.Image(event["file"])})

    def artifact(self, step: int, name: str, path: str, value: float) -> None:
        """Logs the best value and its checkpoint, and uploads the checkpoint as an artifact."""
        self.write(step, {f"best/{name}": value, f"best/{name} checkpoint": path})
        if self.upload and Path(path).is_dir():
            title = "".join(letter if letter.isalnum() else "-" for letter in f"best-{name}-{self._name}")
            self._run.log_artifact(path, name=title, type="model")

    def close(self) -> None:
        """Finishes the run."""
        if self._run is not None:
            self._run.finish()
            self._run = None
