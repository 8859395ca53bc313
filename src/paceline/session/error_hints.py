"""Adds hints to exceptions of the user's functions."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from paceline.errors import UsageError, a, add_hint

_ABOUT = (TypeError, AttributeError, LookupError)  # what is raised where a batch is not what it was taken for
_SHOWN = 6  # entries of a batch


def path_of(kind: Any) -> str:
    """Returns the name by which a user writes a class or function, of torch or their own."""
    homes = ("torch.optim.lr_scheduler", "torch.optim", "torch.nn.functional", "torch.nn")
    home = next((home for home in homes if str(kind.__module__).startswith(home)), "")
    return f"{home}.{kind.__name__}" if home else str(kind.__name__)


def unfit(given: Callable[..., Any], /, *args: Any, **named: Any) -> tuple[str, list[str]]:
    """Returns why something cannot be called with these arguments, in Python's words, and the names of the arguments
    that it needs besides. The reason is empty if the call is possible, or unknown.
    """
    if not callable(given):
        return f"it is {a(type(given).__name__)}", []
    try:
        signature = inspect.signature(given)
    except ValueError:  # of compiled code
        return "", []
    try:
        signature.bind(*args, **named)
    except TypeError as error:
        wanted = (p for p in signature.parameters.values() if p.default is p.empty and p.kind not in (2, 4))
        return str(error), [p.name for p in wanted][len(args) :]
    return "", []


def shape_of(batch: Any) -> str:
    """Describes a batch in a few words: ``[3x10 float64, 3 int64]``."""
    if isinstance(batch, torch.Tensor):
        return f"{'x'.join(map(str, batch.shape)) or 'a single'} {str(batch.dtype).removeprefix('torch.')}"
    if isinstance(batch, Mapping):
        return f"{{{_listed([f'{key!r}: {_short(value)}' for key, value in batch.items()])}}}"
    if isinstance(batch, tuple | list):
        text = _listed([_short(value) for value in batch])
        return f"[{text}]" if isinstance(batch, list) else f"({text})"
    return a(type(batch).__name__)


def _short(value: Any) -> str:
    return shape_of(value) if isinstance(value, torch.Tensor) else type(value).__name__


def _listed(items: list[str]) -> str:
    return ", ".join(items[:_SHOWN]) + (", ..." if len(items) > _SHOWN else "")


def _parts(name: str, value: Any) -> list[str]:
    """Returns the expressions for the parts of a batch."""
    if isinstance(value, Mapping):
        return [f"{name}[{key!r}]" for key in value]
    if hasattr(value, "_fields"):
        return [f"{name}.{field}" for field in value._fields]
    return [f"{name}[{index}]" for index in range(len(value))] if isinstance(value, tuple | list) else [name]


def _mistaken(error: BaseException, name: str, value: Any, first: int = 0) -> str:
    """Returns a hint if the error comes from taking `value` for something else: what it is, and the expressions for its
    parts from the `first` on.
    """
    kind, sought = type(value).__name__, getattr(error, "name", None) or next(iter(error.args), None)
    about = re.search(rf"not {kind}\b|'{kind}'|\b{kind} ind", str(error)) is not None
    about |= isinstance(error, KeyError) and isinstance(value, Mapping) and sought not in value
    about |= isinstance(value, torch.Tensor) and "indices" in str(error)
    if not about:
        return ""
    if value is None and name == "output":
        return "output is None: the forward returns nothing; end it with a return statement"
    if value is None:
        return 'batch is None with loss_over="batch": return the needed parts of the batch from the forward'
    parts, meant = _parts(name, value), f"{name}[{sought!r}]"
    parts = [meant] if meant in parts else parts if isinstance(value, Mapping) else parts[first:] or parts
    return f"{name} is {shape_of(value)}: write {' or '.join(parts[:_SHOWN])}"


def _default(error: BaseException, model: Any, batch: Any) -> str:
    """Returns a hint what to write in place of the default forward, if the model does not take its arguments."""
    mapping = isinstance(batch, Mapping)
    why, _ = unfit(model.forward, **batch) if mapping else unfit(model.forward, batch)
    if not why or not isinstance(error, TypeError):
        return ""
    known, call = _parts("batch", batch), "model(**batch)" if mapping else "model(batch[0])"
    needs = [p.name for p in inspect.signature(model.forward).parameters.values() if p.default is p.empty]
    pairs = zip(needs, known, strict=False)
    parts = [f"batch[{name!r}]" if mapping and name in batch else part for name, part in pairs]
    write = f"write forward=lambda model, batch: model({', '.join(parts)})"
    return f"batch is {shape_of(batch)} and goes to {call}, {type(model).__name__} takes {', '.join(needs)}: {write}"


@dataclass
class AnnotatedCallable:
    """A user's forward(model, batch), loss(output, batch) or metric(output, batch), by `name`. Errors about the types
    of the arguments get a hint. `default`: it is Paceline's own forward.
    """

    call: Callable[[Any, Any], Any]
    name: str
    default: bool = False

    def __call__(self, first: Any, batch: Any) -> Any:
        """Calls the loss; an error in it is explained where its cause is known."""
        given = self.call
        home = getattr(given, "__module__", None) or ""  # None of what exec() made
        torchs = home.startswith(("torch.nn.modules.loss", "torch.nn.functional"))
        if torchs and not isinstance(batch, torch.Tensor):
            path = path_of(given if inspect.isfunction(given) else type(given))
            what = f"{self.name} is {path}, which gets (output, batch), and batch is {shape_of(batch)}"
            call = f"{path if inspect.isfunction(given) else f'{path}()'}(output, {_parts('batch', batch)[-1]})"
            raise UsageError(what, f"write {self.name}=lambda output, batch: {call}")
        try:
            return given(first, batch)
        except _ABOUT as error:
            if self.default:
                hint = _default(error, first, batch)
            elif self.name == "forward":
                hint = _mistaken(error, "batch", batch)
            else:  # the inputs come first, as a rule
                hint = _mistaken(error, "batch", batch, first=1) or _mistaken(error, "output", first)
            add_hint(error, hint)
            raise
