"""What a module logs: kept while a step runs, sent with the step's sums, and summed up over epochs.

In a step, a value travels as (value * rows, rows). The states of torchmetrics objects travel the same way, element by
element: so both count each row once, whoever computes it and whether the step is computed again.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

from paceline.errors import UsageError
from paceline.team.gather_trees import gather_trees

_ELEMENTS = 64  # of the states of a metric that travel with each step


@dataclass(frozen=True)
class LogMeta:
    """How a name was logged.

    Attributes:
        name: The name that the module gave.
        on_step: Whether the value of each step is logged.
        on_epoch: Whether the value of the epoch is logged.
        how: ``"mean"``, ``"sum"`` or ``"metric"``.
        logger: Whether loggers get it.
        prog_bar: Whether it is in `progress_bar_metrics`.
        weighted: Whether its weight is not the number of rows, and travels apart.
        attribute: The path of the metric in the module; empty for a plain value.
    """

    name: str
    on_step: bool
    on_epoch: bool
    how: str
    logger: bool = True
    prog_bar: bool = False
    weighted: bool = False
    attribute: str = ""

    def names(self, on_step: bool) -> list[str]:
        """The names under which the value of a step or of an epoch is known."""
        both = self.on_step and self.on_epoch
        forked = f"{self.name}_{'step' if on_step else 'epoch'}" if both else self.name
        return [forked] if on_step and both else [self.name, forked] if both else [self.name]


@dataclass
class Logged:
    """A value that was logged now."""

    meta: LogMeta
    value: Any
    weight: float | None


class LogRecorder:
    """Takes the place of the results of Lightning's loops, which `LightningModule.log` writes to.

    Attributes:
        suffix: Added to names, where there are several validation loaders.
    """

    def __init__(self) -> None:
        self.suffix = ""
        self._logged: dict[str, Logged] = {}

    def log(self, fx: str, name: str, value: Any, prog_bar: bool = False, logger: bool = True, **options: Any) -> None:
        """Keeps a value; the other arguments are those of Lightning's method."""
        if options.get("enable_graph"):
            raise UsageError(f"log({name!r}, enable_graph=True) in {fx}()", "return the loss from training_step()")
        how, attribute, weight = _reduction(name, options.get("reduce_fx", "mean")), "", options.get("batch_size")
        if isinstance(value, nn.Module):
            how, attribute = "metric", str(options.get("metric_attribute"))
        elif isinstance(value, torch.Tensor):
            value = value.detach()
            if value.numel() != 1:
                what = f"log({name!r}) got a tensor of shape {tuple(value.shape)} in {fx}()"
                raise UsageError(what, "log one number: value.mean(), for example")
            value = value.reshape(())
        name = name + (self.suffix if options.get("add_dataloader_idx", True) else "")
        meta = LogMeta(
            name,
            bool(options.get("on_step")),
            bool(options.get("on_epoch")),
            how,
            bool(logger),
            bool(prog_bar),
            weight is not None and how == "mean",
            attribute,
        )
        if name in self._logged and how != "metric":
            raise UsageError(f"{fx}() logs {name!r} twice", "log each name once in a step")
        self._logged[name] = Logged(meta, value, None if weight is None else float(weight))

    def take(self) -> dict[str, Logged]:
        """Returns what was logged since the last call."""
        logged, self._logged = self._logged, {}
        return logged

    def reset(self, *_: Any, **__: Any) -> None:
        """Does nothing: values are taken after each step."""


def _reduction(name: str, given: Any) -> str:
    if given in ("mean", "avg", torch.mean):
        return "mean"
    if given in ("sum", torch.sum, sum):
        return "sum"
    what = f"log({name!r}, reduce_fx={getattr(given, '__name__', given)!r})"
    cure = 'use "mean" or "sum"; for others log a torchmetrics.Metric, for example MaxMetric, in validation_step()'
    raise UsageError(what, cure)


def weight_name(name: str) -> str:
    """The name under which the weight of a value travels."""
    return f"{name} weight"


class MetricStates:
    """The torchmetrics objects of a module, and the parts of their states that a step adds.

    Attributes:
        objects: The objects by their path in the module.
    """

    def __init__(self, module: nn.Module) -> None:
        self.objects: dict[str, Any] = {
            path: one for path, one in module.named_modules() if hasattr(one, "_reductions") and hasattr(one, "compute")
        }

    @contextmanager
    def apart(self) -> Iterator[dict[str, dict[str, Any]]]:
        """A context in which all objects begin anew. Yields a dict that has, at the end, the states of those that were
        updated; the objects have their former states again.
        """
        before = {path: _state_of(one) for path, one in self.objects.items()}
        for one in self.objects.values():
            one.reset()
        updated: dict[str, dict[str, Any]] = {}
        try:
            yield updated
        finally:
            for path, one in self.objects.items():
                if one._update_count:
                    updated[path] = _state_of(one)[0]
                _set_state(one, *before[path])

    def as_sums(self, updated: Mapping[str, dict[str, Any]]) -> dict[str, torch.Tensor]:
        """Names each element of the states that a step added. Raises UsageError for states that are no sums."""
        sums = {}
        for path, states in updated.items():
            one, elements = self.objects[path], 0
            for state, value in states.items():
                word = getattr(one._reductions[state], "__name__", "")
                elements += value.numel() if isinstance(value, torch.Tensor) else _ELEMENTS + 1
                if word != "dim_zero_sum" or elements > _ELEMENTS:
                    why = f"has more than {_ELEMENTS} values" if word == "dim_zero_sum" else "is not a sum over rows"
                    what = f"training_step() updates {path} ({type(one).__name__}), whose state {state!r} {why}"
                    raise UsageError(what, "update it in validation_step(), or log means in training_step()")
                start = one._defaults[state]
                for number, element in enumerate((value - start.to(value)).reshape(-1)):
                    sums[f"{path} {state} {number}"] = element
        return sums

    def add(self, report_metrics: Mapping[str, float], rows: int) -> dict[str, dict[str, torch.Tensor]]:
        """Adds the states of a step of all workers to the objects; `report_metrics` are means over so many rows.

        Returns the states that the step added, by path.
        """
        added: dict[str, dict[str, torch.Tensor]] = {}
        for path, one in self.objects.items():
            for state in one._defaults:
                if f"{path} {state} 0" not in report_metrics:
                    continue
                current = getattr(one, state)
                count = current.numel()
                sums = [report_metrics[f"{path} {state} {number}"] * rows for number in range(count)]
                values = torch.tensor(sums, dtype=torch.float64).reshape(current.shape)
                values = values if current.is_floating_point() else values.round()
                added.setdefault(path, {})[state] = values.to(current)
        for path, states in added.items():
            one = self.objects[path]
            merged = {state: getattr(one, state) + value for state, value in states.items()}
            _set_state(one, {**_state_of(one)[0], **merged}, one._update_count + 1)
        return added

    def compute(self, path: str, added: Mapping[str, torch.Tensor] | None = None) -> torch.Tensor:
        """The value of an object; with `added`, of the states that one step has added."""
        one = self.objects[path]
        before = _state_of(one)
        if added is not None:
            _set_state(one, {state: one._defaults[state].to(value) + value for state, value in added.items()}, 1)
        one._computed = None
        try:
            value = one.compute()
        finally:
            _set_state(one, *before)
        if not isinstance(value, torch.Tensor) or value.numel() != 1:
            what = f"{path} ({type(one).__name__}) computes more than one number"
            raise UsageError(what, "log its values one by one in on_train_epoch_end() or on_validation_epoch_end()")
        return value.detach().cpu().reshape(())

    def load(self, states: Mapping[str, Mapping[str, Any]]) -> None:
        """Puts states into the objects."""
        for path, values in states.items():
            _set_state(self.objects[path], values, 1)

    def saved(self, paths: Any) -> dict[str, dict[str, Any]]:
        """The states of the objects at these paths."""
        return {path: _state_of(self.objects[path])[0] for path in paths}


def _state_of(one: Any) -> tuple[dict[str, Any], int]:
    states = {name: getattr(one, name) for name in one._defaults}
    copied = {
        name: list(value) if isinstance(value, list) else value.detach().clone() for name, value in states.items()
    }
    return copied, one._update_count


def _set_state(one: Any, states: Mapping[str, Any], count: int) -> None:
    for name, value in states.items():
        setattr(one, name, value)
    one._update_count, one._computed = count, None


class StepLog:
    """The values of steps and epochs, on every worker: made from the reports of steps, which are equal on all.

    Attributes:
        metas: How each name was logged.
    """

    def __init__(self, states: MetricStates) -> None:
        self._states = states
        self.metas: dict[str, LogMeta] = {}
        self.seen: dict[str, LogMeta] = {}  # by this worker's own micro-batches
        self._known: set[str] = set()
        self._sums: dict[str, list[float]] = {}  # of the epoch

    def learn(self, names: Any) -> None:
        """Takes over how names were logged, from whoever computed them, when a report has new names."""
        if not (new := set(names) - self._known):
            return
        self._known |= new
        for part in gather_trees([asdict(one) for one in self.seen.values()], "logged names"):
            for fields in part:
                self.metas.setdefault(fields["name"], LogMeta(**fields))

    def add(self, report: Any) -> dict[str, tuple[LogMeta, float]]:
        """Adds a step to the sums of the epoch. Returns the step's values by name."""
        self.learn(report.metrics)
        added = self._states.add(report.metrics, report.samples)
        values = {}
        for name, meta in self.metas.items():
            if meta.how == "metric":
                if meta.attribute in added:
                    values[name] = meta, float(self._states.compute(meta.attribute, added[meta.attribute]))
                continue
            mean = report.metrics.get(name, math.nan)
            if math.isnan(mean) and name not in report.metrics:
                continue
            value, weight = (mean * report.samples, 1.0) if meta.how == "sum" else (mean, float(report.samples))
            if meta.weighted:
                weight = report.metrics[weight_name(name)] * report.samples
            values[name] = meta, value
            if meta.on_epoch:
                total = self._sums.setdefault(name, [0.0, 0.0])
                total[0] += value * weight
                total[1] += weight
        return values

    def end_epoch(self) -> dict[str, tuple[LogMeta, float]]:
        """Returns the values of the epoch by name, and begins the next one."""
        values = {}
        for name, meta in self.metas.items():
            if not meta.on_epoch:
                continue
            if meta.how == "metric":
                values[name] = meta, float(self._states.compute(meta.attribute))
            elif name in self._sums:
                total, weight = self._sums[name]
                values[name] = meta, total if meta.how == "sum" else total / weight if weight else math.nan
        self._sums = {}
        return values

    def reset_metrics(self) -> None:
        """Starts the logged metric objects anew, after the hooks at the end of an epoch."""
        for path in {meta.attribute for meta in self.metas.values() if meta.how == "metric"}:
            self._states.objects[path].reset()

    def saved(self) -> dict[str, Any]:
        """What a checkpoint holds of the epoch so far."""
        return {
            "metas": [asdict(one) for one in self.metas.values()],
            "known": sorted(self._known),
            "sums": {name: list(pair) for name, pair in self._sums.items()},
            "states": self._states.saved(
                {name.rsplit(" ", 2)[0] for name in self._known} & self._states.objects.keys()
            ),
        }

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Takes what `saved` returned."""
        self.metas = {fields["name"]: LogMeta(**fields) for fields in saved["metas"]}
        self._known, self._sums = set(saved["known"]), {name: list(pair) for name, pair in saved["sums"].items()}
        self._states.load(saved["states"])
