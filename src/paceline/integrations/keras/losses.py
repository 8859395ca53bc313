"""The loss of a compiled Keras model as a sum with a count, and the states of its metrics as sums."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from paceline.errors import UsageError

_MEANS = ("sum_over_batch_size", "mean", "mean_with_sample_weight")
_MASKED_CURE = "train each of these outputs in a model of its own, or leave the mask or the weighted mean out"


class Counts:
    """What the losses of one micro-batch were divided by: rows, unmasked entries, or the sum of the weights."""

    def __init__(self) -> None:
        self._counts: list[torch.Tensor | None] = []  # None: a mean over rows

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Observes the reductions of Keras' losses in the context."""
        from keras.src.losses import loss as module

        self._counts.clear()
        before = module.reduce_weighted_values

        def reduce(values: Any, sample_weight: Any = None, mask: Any = None, **options: Any) -> Any:
            self._counts.append(count_of(values, sample_weight, mask, options.get("reduction", _MEANS[0])))
            return before(values, sample_weight=sample_weight, mask=mask, **options)

        module.reduce_weighted_values = reduce
        try:
            yield
        finally:
            module.reduce_weighted_values = before

    def total(self, rows: int) -> int | torch.Tensor:
        """The count of the whole loss. Raises UsageError if its parts are means over different things."""
        special = [count for count in self._counts if count is not None]
        if not special:
            return rows
        if len(self._counts) > 1:
            what = f"the loss adds {len(self._counts)} losses, and {len(special)} of them are not means over all rows"
            raise UsageError(f"{what} (a mask, or reduction='mean_with_sample_weight')", _MASKED_CURE)
        return special[0]


def count_of(values: torch.Tensor, weights: Any, mask: Any, reduction: str | None) -> torch.Tensor | None:
    """What Keras divides the sum of these losses by, up to a constant factor; None if by the number of rows.

    Raises UsageError for a reduction that is no mean, and for a mask beside a mean over weights.
    """
    if reduction not in _MEANS:
        what = f"a loss has reduction={reduction!r}, which is not a mean over rows"
        raise UsageError(what, "use reduction='sum_over_batch_size', and scale the learning rate instead")
    weighted = reduction == "mean_with_sample_weight" and weights is not None
    if weighted and mask is not None:
        what = "the loss has a mask and reduction='mean_with_sample_weight'"
        raise UsageError(what, "multiply the sample weights by the mask yourself, or use reduction='mean'")
    if weighted:
        each = weights.detach().reshape(*weights.shape, *[1] * (values.dim() - weights.dim()))
        return torch.broadcast_to(each, values.shape).sum() if values.dim() >= weights.dim() else weights.sum()
    if mask is None:
        return None
    valid = mask.detach() != 0
    each = valid.reshape(*valid.shape, *[1] * max(0, values.dim() - valid.dim()))
    return torch.broadcast_to(each, values.shape).sum() if values.dim() >= valid.dim() else valid.sum()


class CompiledMetrics:
    """The variables of a model's metrics, whose changes add up over micro-batches.

    A metric of Keras sums over rows: `Mean` sums values and weights, `AUC` and `MeanIoU` count. So the change that each
    micro-batch makes is added over all of them, and the result is computed once from the sums.

    Args:
        model: The Keras model, whose metrics must be built.
    """

    def __init__(self, model: Any) -> None:
        import keras

        self._model = model
        self.metrics = list(flat_metrics(model))
        self._names: list[str] = []
        for metric in self.metrics:
            name = metric.name
            self._names.append(f"{name}_{self._names.count(name)}" if name in self._names else name)
        self._is_mean = [
            isinstance(one, keras.metrics.Mean) and [v.name for v in one.variables] == ["total", "count"]
            for one in self.metrics
        ]
        model.reset_metrics()
        self.start = self.values()
        self._must_check = [one for one in self.metrics if not type(one).__module__.startswith("keras.")]

    def variables(self) -> list[Any]:
        """The variables of all metrics."""
        return [variable for metric in self.metrics for variable in metric.variables]

    def values(self) -> torch.Tensor:
        """The values of all variables as one tensor."""
        parts = [variable._value.detach().reshape(-1).double() for variable in self.variables()]
        return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.float64)

    def assign(self, values: torch.Tensor) -> None:
        """Sets all variables."""
        variables = self.variables()
        parts = values.split([variable._value.numel() for variable in variables])
        for variable, part in zip(variables, parts, strict=True):
            variable.assign(part.reshape(tuple(variable.shape)).to(variable._value))

    def update(self, y: Any, y_pred: Any, weights: Any) -> None:
        """Updates the metrics of `compile()` with one micro-batch."""
        compiled = self._model._compile_metrics
        if compiled is None:
            return
        before = self.values() if self._must_check else None
        with torch.no_grad():
            compiled.update_state(y, y_pred, weights)
            if before is not None:
                self._check(before, lambda: compiled.update_state(y, y_pred, weights))

    def _check(self, before: torch.Tensor, update: Any) -> None:
        """Raises UsageError if a second update changes a metric of the script's own otherwise than the first one."""
        first = self.values()
        update()
        second, at = self.values(), 0
        for metric in self.metrics:
            size = sum(variable._value.numel() for variable in metric.variables)
            one, two = (first - before)[at : at + size], (second - first)[at : at + size]
            at += size
            if metric in self._must_check and not torch.allclose(one, two, rtol=1e-4, atol=1e-6):
                what = f"the state of the metric {metric.name} ({type(metric).__name__}) is not a sum over rows"
                raise UsageError(what, "write update_state() so that it adds to its variables (assign_add)")
        self.assign(first)
        self._must_check = []

    def pairs(self, rows: int) -> dict[str, tuple[float, float]]:
        """The changes since the start values as sums with counts by name, for the loss that Paceline calls."""
        changes, at, pairs = (self.values() - self.start).tolist(), 0, dict[str, tuple[float, float]]()
        for name, metric, is_mean in zip(self._names, self.metrics, self._is_mean, strict=True):
            if is_mean:
                pairs[name] = changes[at], changes[at + 1]
                pairs[f"{name}.count"] = changes[at + 1], rows
                at += 2
                continue
            for variable in metric.variables:
                for number in range(variable._value.numel()):
                    pairs[f"{name}.{variable.name}.{number}"] = changes[at], rows
                    at += 1
        return pairs

    def changes(self, means: dict[str, float], rows: int) -> list[float]:
        """The changes of all variables, from the means of `pairs` over a step of this many rows."""
        changes = list[float]()
        for name, metric, is_mean in zip(self._names, self.metrics, self._is_mean, strict=True):
            if is_mean:
                count = means[f"{name}.count"] * rows
                changes += [means[name] * count if count else 0.0, count]
                continue
            for variable in metric.variables:
                changes += [
                    means[f"{name}.{variable.name}.{number}"] * rows for number in range(variable._value.numel())
                ]
        return changes

    def results(self, loss: float, changes: torch.Tensor) -> dict[str, Any]:
        """The results by name, as Keras reports them, from the mean loss and the sums of changes."""
        tracker = self._model._loss_tracker
        self.assign(self.start + changes.to(self.start))
        tracker.reset_state()
        tracker.update_state(loss)
        return {name: plain(value) for name, value in self._model.get_metrics_result().items()}


def flat_metrics(model: Any) -> Iterator[Any]:
    """Yields the metric objects of a model, those of `compile()` one by one, without the mean of the loss."""
    for metric in model.metrics:
        if metric is model._compile_metrics:
            yield from metric.metrics
        elif metric is not model._loss_tracker:
            yield metric


def plain(value: Any) -> Any:
    """A result as a number, or as a list of numbers."""
    if isinstance(value, torch.Tensor):
        return float(value) if value.numel() == 1 else value.detach().cpu().numpy()
    return float(value)


class CompiledLoss:
    """The loss of a micro-batch, and in evaluation the states that add up to loss and metrics."""

    def __init__(self, model: Any, states: CompiledMetrics) -> None:
        self._model, self._states, self._counts = model, states, Counts()

    def compute(self, x: Any, y: Any, weights: Any, y_pred: Any, training: bool) -> tuple[torch.Tensor, Any, int]:
        """Returns the mean loss of a micro-batch, its count, and the number of rows."""
        rows = rows_of(x)
        with self._counts.watched():
            loss = self._model._compute_loss(x=x, y=y, y_pred=y_pred, sample_weight=weights, training=training)
        self._states.update(y, y_pred, weights)
        return loss, self._counts.total(rows), rows


def rows_of(x: Any) -> int:
    """The number of rows of nested tensors."""
    import keras

    return int(next(one for one in keras.tree.flatten(x) if one is not None).shape[0])


class EvaluatedStates:
    """A metric object, in the style of torchmetrics, of all losses and metrics of a Keras model.

    Args:
        losses: Computes the loss and updates the metrics.
        states: The states of the metrics.
        unpack: Returns (x, y, weights) of a batch.
        prefix: Put before the name of each result.
    """

    def __init__(self, losses: CompiledLoss, states: CompiledMetrics, unpack: Any, prefix: str) -> None:
        self._losses, self._metric_states, self._unpack, self._prefix = losses, states, unpack, prefix
        self._defaults = {
            "loss": torch.zeros(2, dtype=torch.float64),
            "changes": torch.zeros_like(states.start),
        }
        self._reductions = dict.fromkeys(self._defaults, "sum")
        self.reset()

    def reset(self) -> None:
        """Sets the states to zero."""
        self.loss, self.changes = (one.clone() for one in self._defaults.values())
        self._metric_states.assign(self._metric_states.start)

    def update(self, output: Any, batch: Any) -> None:
        """Adds one micro-batch."""
        x, y, weights = self._unpack(batch)
        loss, count, _ = self._losses.compute(x, y, weights, output, training=False)
        size = float(count)
        self.loss = self.loss + torch.tensor([float(loss) * size, size], dtype=torch.float64)
        self.changes = self.changes + (self._metric_states.values() - self._metric_states.start).cpu()

    def compute(self) -> dict[str, Any]:
        """The results by name."""
        total, count = self.loss.tolist()
        results = self._metric_states.results(total / count if count else float("nan"), self.changes)
        return {
            f"{self._prefix}{name}": value if isinstance(value, float) else torch.as_tensor(value)
            for name, value in results.items()
        }
