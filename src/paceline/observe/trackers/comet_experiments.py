"""Logs to Comet."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paceline.errors import UsageError
from paceline.observe.trackers.tracker import LoggedRun, Tracker, split_texts


class Comet(Tracker):
    """An experiment of Comet. `target` is ``PROJECT`` or ``WORKSPACE/PROJECT``; Comet's own settings say whether it is
    online or offline.
    """

    _experiment: Any = None

    def begin(self, run: LoggedRun) -> str | None:
        """Begins an experiment with the name of the run folder, or continues the one of this key."""
        import comet_ml

        if self._experiment is not None:
            return str(self._experiment.get_key())
        settings = comet_ml.get_config()
        if settings["comet.start.online"] is not False and not settings["comet.api_key"]:
            raise UsageError(
                "Comet knows no API key", "run `comet login`, or set COMET_API_KEY, or COMET_START_ONLINE=false"
            )
        workspace, _, project = (self.target or "").rpartition("/")
        options: dict[str, Any] = {"experiment_key": run.id or comet_ml.generate_guid(), "mode": "get_or_create"}
        quiet = {
            "log_code": False,
            "log_graph": False,
            "parse_args": False,
            "log_git_metadata": False,
            "log_git_patch": False,
            "log_env_details": False,
            "auto_output_logging": False,
            "auto_param_logging": False,
            "auto_metric_logging": False,
            "auto_log_co2": False,
            "display_summary_level": 0,
        }
        about = comet_ml.ExperimentConfig(name=run.name, **quiet)
        options |= {"workspace": workspace or None, "project_name": project or None, "experiment_config": about}
        self._experiment = comet_ml.start(**options)
        return str(self._experiment.get_key())

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        """Logs numbers as metrics, and texts."""
        numbers, texts = split_texts(values)
        self._experiment.log_metrics(numbers, step=step)
        for name, text in texts.items():
            self._experiment.log_text(text, step=step, metadata={"name": name})

    def media(self, step: int, name: str, event: Mapping[str, Any]) -> None:
        """Logs a picture; of a histogram its counts."""
        if event["kind"] == "histogram":
            self._experiment.log_asset_data(dict(event), name=f"{name}.json", step=step)
        elif Path(event["file"]).exists():
            self._experiment.log_image(event["file"], name=name, step=step)

    def config(self, values: Mapping[str, Any]) -> None:
        """Logs parameters."""
        self._experiment.log_parameters(dict(values))

    def artifact(self, step: int, name: str, path: str, value: float) -> None:
        """Logs the best value and its checkpoint, and uploads the checkpoint as a model."""
        best = {f"best/{name}": value, f"best/{name} step": step, f"best/{name} checkpoint": path}
        self._experiment.log_others(best)
        if self.upload and Path(path).is_dir():
            self._experiment.log_model(f"best-{name}", path)

    def close(self) -> None:
        """Ends the experiment."""
        if self._experiment is not None:
            self._experiment.end()
            self._experiment = None
