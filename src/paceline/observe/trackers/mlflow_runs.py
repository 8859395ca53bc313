"""Logs to MLflow."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from paceline.observe.trackers.tracker import FACTS, LoggedRun, Tracker, split_texts

_REFUSED = re.compile(r"[^\w\-. :/]", re.ASCII)  # characters that MLflow refuses in names
_MOST = 1000  # metrics of a request
_LONGEST = 5000  # characters of a parameter or a tag


class MLflow(Tracker):
    """A run of MLflow. `target` is the URI of the tracking server or store, else MLflow's own settings decide."""

    _client: Any = None

    def begin(self, run: LoggedRun) -> str | None:
        """Begins a run with the name of the run folder, or continues the run of this identifier."""
        from mlflow import MlflowClient
        from mlflow.environment_variables import MLFLOW_EXPERIMENT_NAME
        from mlflow.exceptions import MlflowException

        self._client = client = MlflowClient(tracking_uri=self.target)
        self._metrics: list[Any] = []
        self._id = run.id or ""
        if run.id is not None:
            try:
                client.update_run(run.id, status="RUNNING")
            except MlflowException as error:
                if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                    raise
            else:
                return run.id
        experiment = MLFLOW_EXPERIMENT_NAME.get() or "Default"
        existing = client.get_experiment_by_name(experiment)
        number = existing.experiment_id if existing is not None else client.create_experiment(experiment)
        self._id = str(client.create_run(number, run_name=run.name).info.run_id)
        return self._id

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        """Takes numbers as metrics, which `flush` sends; stores texts as files."""
        from mlflow.entities import Metric

        numbers, texts = split_texts(values)
        at = int(self.at * 1000)
        self._metrics += [Metric(_name(name), value, at, step) for name, value in numbers.items()]
        for name, text in texts.items():
            self._client.log_text(self._id, text, f"texts/{_name(name)}/step-{step}.txt")

    def flush(self) -> None:
        """Sends the metrics."""
        metrics, self._metrics = self._metrics, []
        for start in range(0, len(metrics), _MOST):
            self._client.log_batch(self._id, metrics=metrics[start : start + _MOST])

    def media(self, step: int, name: str, event: Mapping[str, Any]) -> None:
        """Stores a picture as PNG and a histogram as JSON."""
        folder = f"media/{_name(name)}"
        if event["kind"] == "histogram":
            self._client.log_dict(self._id, dict(event), f"{folder}/step-{step}.json")
        elif Path(event["file"]).exists():
            self._client.log_artifact(self._id, event["file"], folder)

    def config(self, values: Mapping[str, Any]) -> None:
        """Logs parameters. MLflow's parameters cannot change: what is different in a resumed run becomes a tag, as do
        the plan and the workers.
        """
        from mlflow.entities import Param

        known = self._client.get_run(self._id).data.params
        shown = {_name(name): str(value)[:_LONGEST] for name, value in values.items()}
        tags = {name for name in shown if name.startswith(FACTS) or known.get(name, shown[name]) != shown[name]}
        params = [Param(name, value) for name, value in shown.items() if name not in tags | known.keys()]
        self._send(params=params)
        self._tag({name: shown[name] for name in tags})

    def artifact(self, step: int, name: str, path: str, value: float) -> None:
        """Tags the run with the best value and its checkpoint, and uploads the checkpoint."""
        best = f"best.{_name(name)}"
        self._tag({best: str(value), f"{best}.step": str(step), f"{best}.checkpoint": path})
        if self.upload and Path(path).is_dir():
            self._client.log_artifacts(self._id, path, f"checkpoints/{best}/step-{step}")

    def close(self) -> None:
        """Ends the run."""
        self._client.set_terminated(self._id, "FINISHED" if self.has_succeeded else "FAILED")

    def _tag(self, tags: Mapping[str, str]) -> None:
        from mlflow.entities import RunTag

        self._send(tags=[RunTag(name, value) for name, value in tags.items()])

    def _send(self, **lists: Sequence[Any]) -> None:
        for kind, items in lists.items():
            for start in range(0, len(items), 100):  # the most parameters or tags of a request
                self._client.log_batch(self._id, **{kind: items[start : start + 100]})


def _name(name: str) -> str:
    return _REFUSED.sub("_", name)
