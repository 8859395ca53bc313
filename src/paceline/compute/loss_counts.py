"""Checks that a loss or metric returns a valid count with its sum."""

from __future__ import annotations

import copy
import math
import numbers
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from paceline.compute.job import LOSS_FORMS
from paceline.compute.microbatch_merging import USERS_OWN
from paceline.compute.rng import RngState
from paceline.errors import LossError, PacelineError, a

_CURE = (
    f"{LOSS_FORMS}; count is the number of summed rows or tokens, or the sum of their weights; "
    "return an accuracy as a metric"
)
# The means of two parts of a micro-batch add up to about twice its mean: rounding is far smaller.
_ROUNDING = 0.05


def number_kind(value: Any) -> str:
    """Describes a value that is not a single real number (``a dict``); empty for a single real number."""
    if isinstance(value, torch.Tensor):
        if value.numel() != 1:
            return f"a tensor of shape {tuple(value.shape)}"
        return "a complex number" if value.is_complex() else ""
    if isinstance(value, numbers.Real):
        return ""
    single = hasattr(value, "__float__") and getattr(value, "size", 1) == 1
    return "" if single else a(type(value).__name__)


def is_pair(value: Any) -> bool:
    """Whether a metric is a sum and a count, both of them single numbers."""
    return isinstance(value, (tuple, list)) and len(value) == 2 and not any(map(number_kind, value))


def refuse_no_count(count: Any) -> None:
    """Raises LossError if a loss returned something other than a number as count. Reads no value from a device."""
    boolean = count.dtype == torch.bool if isinstance(count, torch.Tensor) else type(count).__name__ in _BOOLEANS
    if kind := "a bool" if boolean else number_kind(count):
        raise LossError(f"the loss returned {kind} as the count", _CURE)
    if isinstance(count, torch.Tensor) and count.requires_grad:
        raise LossError("the loss returned a count that depends on trainable parameters", _CURE)


_BOOLEANS = ("bool", "bool_")


def refuse_metric_counts(metrics: Mapping[str, tuple[float, float]]) -> None:
    """Raises LossError for a metric whose count is negative or NaN."""
    for name, (_, count) in metrics.items():
        if not count >= 0.0:
            raise LossError(f"the loss returned {count:g} as the count of its metric {name!r}", _CURE)


class CountCheck:
    """Checks the first count that is a float: the counts of two parts of the rows must add up to it.

    They do for a count of rows or tokens and for a sum of weights, but not for an accuracy. Later counts are not
    checked.
    """

    def __init__(self, streams: RngState, alone: bool) -> None:
        self.streams = streams
        self.alone = alone  # no other worker takes part in a forward
        self.done = self.is_unknown = False  # `is_unknown`: the loss fails for a part of the rows

    def check(
        self,
        loss: Callable[[Any, Any], Any],
        full_output: Callable[[], Any],
        batch: Any,
        count: Any,
        rows: int,
        models: Sequence[nn.Module],
    ) -> None:
        """Raises LossError if `count` is not a count. `full_output` gathers the output if it is divided among workers;
        `models` are the models that the loss may call.
        """
        floating = count.is_floating_point() if isinstance(count, torch.Tensor) else not _is_whole_kind(count)
        if not floating or (value := float(count)) == 0.0 or not math.isfinite(value):
            return
        what = f"the loss returned {value:.6g} as the count of {rows} row{'s' if rows > 1 else ''}"
        counts = self._count_parts(loss, full_output(), batch, rows, models)
        if counts is None:
            self.done = self.is_unknown = True
            return
        # For a single row, the second count is that of two copies of the row.
        expected, actual = (value, sum(counts)) if rows > 1 else (2 * counts[0], counts[1])
        if abs(actual - expected) > _ROUNDING * abs(expected):
            details = (
                f"{counts[0]:.6g} and {counts[1]:.6g} for their halves, which do not add up to it"
                if rows > 1
                else f"{actual:.6g} for two copies of it"
            )
            raise LossError(f"{what}, but {details}", _CURE)
        self.done = True

    def refuse_values(self, counts: Sequence[float], losses: Sequence[float], sources: Sequence[object]) -> None:
        """Raises LossError for a negative count, for a count that is not finite although the loss is, and for a
        fraction if it is unknown whether counts add up. `sources` name the rows.
        """
        for count, loss, source in zip(counts, losses, sources, strict=True):
            wrong = count < 0.0 or (not math.isfinite(count) and math.isfinite(loss))
            if wrong or (self.is_unknown and not count.is_integer()):
                raise LossError(f"the loss returned {count:.6g} as the count of {source}", _CURE)

    def _count_parts(
        self, loss: Callable[[Any, Any], Any], output: Any, batch: Any, rows: int, models: Sequence[nn.Module]
    ) -> list[float] | None:
        """Returns the counts of two halves of the rows, or of a single row and of two copies of it; None if a part
        fails.
        """
        halves: list[range | None] = [range(rows // 2), range(rows // 2, rows)] if rows > 1 else [range(1), None]
        mark = self.streams.snapshot()
        try:
            with _at_rest(models, self.alone), torch.enable_grad():
                counts = [loss(_rows(output, rows, part), _rows(batch, rows, part))[1] for part in halves]
            values = [float(count) for count in counts]
            return None if self.streams.has_changed(mark) else values
        except (*USERS_OWN, PacelineError):
            return None
        finally:
            self.streams.restore(mark)


def _is_whole_kind(count: Any) -> bool:
    return isinstance(count, numbers.Integral) or getattr(getattr(count, "dtype", None), "kind", "") in ("i", "u")


@contextmanager
def _at_rest(models: Sequence[nn.Module], alone: bool) -> Iterator[None]:
    """Puts modules into eval mode, or refuses their calls if other workers would have to take part in the forward."""
    training = [module for model in models for module in model.modules() if module.training]
    handles = [] if alone else [model.register_forward_pre_hook(_refuse_call) for model in models]
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True
        for handle in handles:
            handle.remove()


def _refuse_call(module: nn.Module, args: Any) -> None:
    raise RuntimeError("the loss runs a model that is sharded over workers")


def _rows(value: Any, rows: int, part: range | None) -> Any:
    """Returns the same nesting with a part of the rows of each tensor that has `rows` rows, or all of them twice
    (None).
    """

    def take(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            if hasattr(leaf, "__dict__") and not callable(leaf):  # an output of a class of the user's own
                leaf = copy.copy(leaf)
                for name, inner in vars(leaf).items():
                    setattr(leaf, name, _rows(inner, rows, part))
            return leaf
        if not leaf.dim() or leaf.shape[0] % rows:
            return leaf
        each = leaf.shape[0] // rows  # tokens of a row, where these were flattened
        taken = torch.cat([leaf, leaf]) if part is None else leaf[part.start * each : part.stop * each]
        return taken.detach().requires_grad_(leaf.requires_grad)

    return pytree.tree_map(take, value)
