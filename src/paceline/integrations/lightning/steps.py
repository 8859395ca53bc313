"""Calls the steps of a LightningModule for micro-batches, as `forward` and `loss` of a `paceline.Trainer`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from paceline.compute.microbatches import rows_of, tensors_of
from paceline.errors import UsageError, a
from paceline.integrations.lightning.arguments import has_hook
from paceline.integrations.lightning.metrics import MetricStates, weight_name

_PLAIN = (bool, int, float, str, type(None))


def count_rows(batch: Any) -> int:
    """The number of rows of a batch: the first dimension of its first tensor that has one, as in Lightning."""
    return next((len(one) for one in tensors_of(batch) if one.dim()), 1)


class Steps:
    """The `forward` and the `loss` of the Trainer.

    Attributes:
        micro: LoaderRows of a micro-batch.
        evaluating: During an evaluation: it, the name of the step, and the number of the loader if there are several.
    """

    def __init__(
        self, view: Any, states: MetricStates, count: Callable[[Any], Any] | None, steps_per_epoch: int
    ) -> None:
        self._view, self._states, self._count = view, states, count
        self._steps_per_epoch = steps_per_epoch
        self.evaluating: tuple[Any, str, int | None] | None = None
        self.micro = 1
        self.log: Any = None  # the StepLog that learns how names are logged
        module, datamodule = view.lightning_module, view.datamodule
        self._takes = {
            name: len(inspect.signature(getattr(module, name)).parameters)
            for name in ("training_step", "validation_step", "test_step")
        }
        self._transfers = [
            getattr(
                next((one for one in (datamodule, module) if one is not None and has_hook(one, name)), module), name
            )
            for name in ("on_before_batch_transfer", "on_after_batch_transfer")
            if any(one is not None and has_hook(one, name) for one in (datamodule, module))
        ]

    def forward(self, module: nn.Module, batch: Any) -> Any:
        """Calls the step of a micro-batch. Returns its loss and what it logged, as tensors by name; in an evaluation
        what it logged.
        """
        if self.evaluating is not None:
            return self._evaluate(module, batch)
        for transfer in self._transfers:
            batch = transfer(batch, 0)
        view = self._view
        index = view.global_step % self._steps_per_epoch if self._steps_per_epoch else view.global_step
        with self._states.apart() as updated:
            returned = self._call(module, "training_step", batch, index)
        loss = returned.get("loss") if isinstance(returned, Mapping) else returned
        if not isinstance(loss, torch.Tensor):
            what = f"training_step() returned {a(type(returned).__name__)}" + (
                " without a tensor 'loss'" if isinstance(returned, Mapping) else ""
            )
            raise UsageError(what, 'return the loss, a tensor, or a dict with the key "loss"')
        sums = self._states.as_sums(updated)
        settings, values = self._logged()
        # One tensor with the loss in it: tensor= compares each output with that of full layers, relative to its norm.
        dtype = torch.promote_types(loss.dtype, torch.float32)
        stacked = torch.stack([one.to(loss.device, dtype) for one in (loss.detach().reshape(()), *values)])
        return {"loss": loss, "names": settings, "values": stacked, "states": sums}

    def loss(self, output: Mapping[str, Any], batch: Any) -> tuple[Any, Any, dict[str, tuple[Any, Any]]]:
        """The sum of the losses, the number of items that they are a mean over, and the logged sums and counts."""
        rows = count_rows(batch)
        count = rows if self._count is None else self._count(batch)
        metrics: dict[str, tuple[Any, Any]] = {}
        values = output["values"][1:].unbind()
        for (name, weight, how), value in zip(output["names"], values, strict=True):
            if how == "sum":
                metrics[name] = value, rows_of(batch)
            elif weight is None:
                metrics[name] = value * rows, rows
            else:
                metrics[name] = value * weight, weight
                metrics[weight_name(name)] = torch.as_tensor(float(weight), dtype=torch.float64), rows
        metrics |= {name: (value, rows) for name, value in output["states"].items()}
        return output["loss"] * count, count, metrics

    def _logged(self) -> tuple[list[tuple[str, float | None, str]], list[torch.Tensor]]:
        """What training_step() logged: name, weight and reduction of each value, and the values."""
        settings, values = [], []
        for name, one in self._view._results.take().items():
            self.log.seen[name] = one.meta
            if one.meta.how != "metric":
                settings.append((name, one.weight, one.meta.how))
                values.append(torch.as_tensor(one.value))
        return settings, values

    def _evaluate(self, module: nn.Module, numbered_batch: Any) -> dict[str, Any]:
        assert self.evaluating is not None
        evaluation, name, loader = self.evaluating
        numbers, batch = numbered_batch
        for transfer in self._transfers:
            batch = transfer(batch, loader or 0)
        index = int(numbers[0]) // self.micro
        with self._states.apart() as updated:
            self._call(module, name, batch, index, loader)
        taken: dict[str, Any] = evaluation.take(index, len(numbers), updated, self._view._results.take())
        return taken

    def _call(self, module: nn.Module, name: str, batch: Any, index: int, loader: int | None = None) -> Any:
        """Calls a step through the module itself, so that its hooks run, which gather sharded parameters."""
        arguments = (batch, index, loader or 0)[: max(1, self._takes[name])]
        own_forward = vars(module).get("forward")

        def redirected(*given: Any) -> Any:
            _restore_forward(module, own_forward)  # the step may call the forward itself
            module._current_fx_name = name  # type: ignore[assignment]  # which log() asks for
            return getattr(module, name)(*given)

        before = _stamp(module)
        self._view._results.take()
        self._view.is_inside = True
        module.forward = redirected
        try:
            returned = module(*arguments)
        finally:
            _restore_forward(module, own_forward)
            module._current_fx_name = None  # type: ignore[assignment]
            self._view.is_inside = False
        self._refuse_change(module, before, name)
        return returned

    def _refuse_change(self, module: nn.Module, before: dict[str, Any], name: str) -> None:
        after = _stamp(module)
        for attribute in sorted(before.keys() | after.keys()):
            if before.get(attribute) != after.get(attribute):
                what = f"{name}() changes self.{attribute}, where each worker would keep its own micro-batches only"
                cure = "log values with self.log(), or update a torchmetrics.Metric; count with self.global_step"
                raise UsageError(what, cure)


def _restore_forward(module: nn.Module, own_forward: Any) -> None:
    if own_forward is None:
        vars(module).pop("forward", None)
    else:
        module.forward = own_forward


def _stamp(module: nn.Module) -> dict[str, Any]:
    """The plain values of a module, and the lengths of its lists, dicts and sets."""
    stamp: dict[str, Any] = {}
    for name, value in vars(module).items():
        if name.startswith("_") or name == "training":
            continue
        if isinstance(value, _PLAIN):
            stamp[name] = value
        elif isinstance(value, list | dict | set):
            stamp[name] = len(value)
    return stamp
