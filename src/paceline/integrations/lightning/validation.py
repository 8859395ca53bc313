"""Runs `validation_step` or `test_step` over all rows of the loaders: each row once, on all workers together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paceline.evaluate.metric_objects import merge_states
from paceline.integrations.lightning.metrics import Logged, LogMeta, LogRecorder, MetricStates
from paceline.integrations.lightning.steps import Steps
from paceline.team.gather_trees import gather_trees


class Evaluation:
    """One pass over the loaders of a stage."""

    def __init__(self, trainer: Any, steps: Steps, recorder: LogRecorder, states: MetricStates) -> None:
        self._trainer, self._steps, self._recorder, self.states = trainer, steps, recorder, states
        self._metas: dict[str, LogMeta] = {}
        self._pending: tuple[int, int, dict[str, Any]] = (0, 0, {})
        self._states_by_batch: dict[tuple[int, int], tuple[int, dict[str, Any]]] = {}
        self._loader = 0

    def run(self, stage: str, loaders: list[Any]) -> dict[str, tuple[LogMeta, float]]:
        """Evaluates all loaders, which are datasets with numbered rows.

        Metric objects of the module have the states of all rows afterwards.

        Args:
            stage: ``"validation"`` or ``"test"``.
            loaders: What `paceline.integrations.lightning.rows.numbered` returned.

        Returns:
            The logged values by name.
        """
        self._states_by_batch.clear()
        self._metas.clear()
        values: dict[str, tuple[float, int]] = {}
        for number, dataset in enumerate(loaders):
            self._loader = number
            self._recorder.suffix = f"/dataloader_idx_{number}" if len(loaders) > 1 else ""
            self._steps.evaluating = self, f"{stage}_step", number if len(loaders) > 1 else None
            try:
                results = self._trainer.evaluate(dataset, self._metric, collate=dataset.collate)
            finally:
                self._steps.evaluating, self._recorder.suffix = None, ""
            rows = results.pop("n")
            values |= {name: (value, rows) for name, value in results.items()}
        return self._merge(values)

    def take(
        self, batch_index: int, rows: int, updated: dict[str, Any], logged: Mapping[str, Logged]
    ) -> dict[str, Any]:
        """Keeps the states of a micro-batch, and returns its logged values with their weights."""
        self._pending = batch_index, rows, updated
        for name, one in logged.items():
            self._metas[name] = one.meta
        output = {}
        for name, one in logged.items():
            if one.meta.how != "metric":
                output[name] = one.value, one.weight if one.weight is not None and one.meta.how == "mean" else rows
        return output

    def _metric(self, output: Mapping[str, tuple[Any, float]], batch: Any) -> dict[str, tuple[Any, float]]:
        """The sums and counts of one micro-batch; called on one worker for each."""
        number, rows, updated = self._pending
        self._states_by_batch[self._loader, number] = rows, updated
        return {
            name: (value * (1.0 if self._metas[name].how == "sum" else weight), weight)
            for name, (value, weight) in output.items()
        }

    def _merge(self, values: dict[str, tuple[float, int]]) -> dict[str, tuple[LogMeta, float]]:
        """Merges what workers know of names and metric objects, and loads the objects' states."""
        local = {
            "metas": [list(vars(one).items()) for one in self._metas.values()],
            "states": [[list(key), rows, updated] for key, (rows, updated) in self._states_by_batch.items() if updated],
        }
        parts: dict[tuple[int, int], tuple[int, dict[str, Any]]] = {}
        for tree in gather_trees(local, "states of metrics"):
            for fields in tree["metas"]:
                meta = LogMeta(**dict(fields))
                self._metas.setdefault(meta.name, meta)
            parts |= {tuple(key): (rows, updated) for key, rows, updated in tree["states"]}
        merged: dict[str, dict[str, Any]] = {}
        for path, one in self.states.objects.items():
            parts_of = [(rows, updated[path]) for _, (rows, updated) in sorted(parts.items()) if path in updated]
            if parts_of:
                merged[path] = {
                    state: merge_states([(rows, states[state]) for rows, states in parts_of], one._defaults[state], how)
                    for state, how in one._reductions.items()
                }
        self.states.load(merged)
        result = {}
        for name, (mean, rows) in values.items():
            meta = self._metas[name]
            result[name] = meta, mean * rows if meta.how == "sum" else mean
        for name, meta in self._metas.items():
            if meta.how == "metric":
                result[name] = meta, float(self.states.compute(meta.attribute))
        return result
