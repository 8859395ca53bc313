"""Calls Keras' callbacks between the steps of Paceline's loop."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from paceline.errors import UsageError
from paceline.integrations.keras.arguments import CALLBACKS_NO_EFFECT, CALLBACKS_REFUSED

_BATCH = ("on_train_batch_begin", "on_train_batch_end", "on_batch_begin", "on_batch_end")
# Moments in the middle of an evaluation, where a worker sees its own rows only.
_INSIDE = ("on_test_batch_begin", "on_test_batch_end")
_PLAIN = (bool, int, float, str)


class _WithoutFiles:
    """A model whose `save` and `save_weights` do nothing: on workers that write no files."""

    def __init__(self, model: Any) -> None:
        self._model = model

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def save(self, *given: Any, **named: Any) -> None:
        """Does nothing."""

    def save_weights(self, *given: Any, **named: Any) -> None:
        """Does nothing."""


class Callbacks:
    """The callbacks of one `fit`, on one worker.

    Callbacks run on every worker with the same logs. Files are written by the main worker alone.

    Args:
        callbacks: What was passed to `fit`.
        model: The Keras model.
        params: Keras' `params` of callbacks.

    Raises:
        UsageError: A callback cannot be honoured; the message names it.
    """

    def __init__(self, callbacks: Any, model: Any, params: dict[str, Any]) -> None:
        import keras

        given = callbacks if isinstance(callbacks, list | tuple) else [] if callbacks is None else [callbacks]
        self._model, self._is_main, self._resumed = model, False, False
        self.all = [one for one in given if not _has_no_effect(one)]
        for one in self.all:
            check_callback(one)
            one.set_params(params)
            one.set_model(model)
        base = keras.callbacks.Callback
        self.sees_batches = any(_overrides(one, name, base) for one in self.all for name in _BATCH)

    def begin(self, is_main: bool, resumed: bool, saved: dict[str, Any]) -> None:
        """Calls `on_train_begin`, and gives the callbacks of a resumed run back what they knew."""
        self._is_main, self._resumed = is_main, resumed
        for one in self.all:
            self._prepare(one)
            if is_main or not _only_writes(one):
                one.on_train_begin({})
        for number, values in saved.items():
            _restore(self.all[int(number)], values)

    def _prepare(self, callback: Any) -> None:
        """Tells a callback that writes files whether this worker writes them."""
        import keras

        if isinstance(callback, keras.callbacks.ModelCheckpoint):
            callback.set_model(self._model if self._is_main else _WithoutFiles(self._model))
            callback.verbose = callback.verbose if self._is_main else 0
        if isinstance(callback, keras.callbacks.CSVLogger) and self._resumed:
            callback.append = True

    def follow_main(self, is_main: bool) -> None:
        """Lets this worker write files from now on, if the main worker was lost and this one took over."""
        if is_main and not self._is_main:
            self._is_main = self._resumed = True
            for one in self.all:
                self._prepare(one)
                if _only_writes(one):
                    one.on_train_begin({})

    def call(self, moment: str, *given: Any) -> None:
        """Calls a method of every callback."""
        for one in self.all:
            if self._is_main or not _only_writes(one):
                getattr(one, moment)(*given)

    def saved(self) -> dict[str, Any]:
        """What a checkpoint holds of the callbacks: numbers, texts and flags, and the weights of EarlyStopping."""
        return {str(number): _saved(one) for number, one in enumerate(self.all)}


def check_callback(callback: Any) -> None:
    """Raises UsageError if Paceline cannot call a callback as Keras does."""
    import keras

    base = keras.callbacks.Callback
    if not isinstance(callback, base):
        raise UsageError(f"callbacks= has a {type(callback).__name__}", "pass objects of keras.callbacks.Callback")
    known = type(callback).__module__.startswith("keras.")
    for kind in type(callback).__mro__:
        is_base = kind.__name__ == "MonitorCallback" and known  # of Keras' own callbacks, which are in the tables
        if kind.__module__.startswith("keras.") and kind.__name__ in CALLBACKS_REFUSED and not is_base:
            what = f"the callback {type(callback).__name__} cannot be used with paceline.keras"
            raise UsageError(what, CALLBACKS_REFUSED[kind.__name__])
    for name in _INSIDE:
        if not known and _overrides(callback, name, base):
            what = f"the callback {type(callback).__name__} has {name}(), and Paceline does not call it"
            raise UsageError(what, "use on_test_end() or on_epoch_end(), or remove the callback")


def _has_no_effect(callback: Any) -> bool:
    return type(callback).__module__.startswith("keras.") and type(callback).__name__ in CALLBACKS_NO_EFFECT


def _only_writes(callback: Any) -> bool:
    """Whether a callback does nothing but write a file."""
    import keras

    return isinstance(callback, keras.callbacks.CSVLogger)


def _overrides(callback: Any, name: str, base: type) -> bool:
    method = getattr(callback, name)
    return getattr(method, "__func__", method) is not getattr(base, name)


def _saved(callback: Any) -> dict[str, Any]:
    values = {name: _plain(value) for name, value in vars(callback).items() if not name.startswith("__")}
    kept: dict[str, Any] = {name: value for name, value in values.items() if isinstance(value, _PLAIN)}
    if getattr(callback, "best_weights", None) is not None:
        kept["best_weights"] = [torch.as_tensor(array) for array in callback.best_weights]
    return kept


def _plain(value: Any) -> Any:
    """A number of numpy as a number of Python."""
    return value.item() if hasattr(value, "item") and getattr(value, "shape", None) == () else value


_OF_THE_SCRIPT = ("append", "append_header", "filename", "filepath", "verbose", "sep")  # of file writers


def _restore(callback: Any, values: dict[str, Any]) -> None:
    for name, value in values.items():
        if name == "best_weights":
            callback.best_weights = [tensor.numpy() for tensor in value]
        elif name not in _OF_THE_SCRIPT:
            setattr(callback, name, value)


def best_of(callbacks: Sequence[Any]) -> tuple[str, str] | None:
    """The value and the mode of the first ModelCheckpoint with `save_best_only`; None without one."""
    import keras

    for one in callbacks:
        if isinstance(one, keras.callbacks.ModelCheckpoint) and one.save_best_only:
            one._set_monitor_op()
            return one.monitor, "max" if one.monitor_op is keras.ops.greater else "min"
    return None
