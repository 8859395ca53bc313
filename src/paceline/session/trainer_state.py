"""`trainer.state`: the script's own values, which checkpoints keep and repeated steps restore."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from paceline.checkpoint.tree import flatten, unflatten
from paceline.compute.state_dict import local
from paceline.errors import UsageError
from paceline.parallel.tensor_parallel.script_view import without_script_view


class TrainerState(dict[str, Any]):
    """`trainer.state`: the user's own values. In a resumed run the checkpoint's value wins over the script's first one.

    Numbers, text, tensors and nestings of them are kept as they are; an object with `state_dict()` and
    `load_state_dict()` is filled once: where it is, or else when the script puts it here.
    """

    def __init__(self, fit: Callable[[Any, Callable[[], Any]], Any] = lambda saved, given: saved) -> None:
        """`fit(saved, current)` converts a saved value to the form of the script's own value, which `current()`
        returns: with full tensors or with local shards.
        """
        super().__init__()
        self._fit = fit
        self._waiting: dict[str, Any] = {}
        self._steps = 0
        self._moved: set[str] = set()  # what the code of a step changes by itself: a loss, a forward, a dataset
        self._before: dict[str, Any] = {}
        self._stamps: dict[str, Any] | None = None

    def restore(self, saved: Mapping[str, Any], local_entries: Mapping[str, Any] | None = None) -> None:
        """Takes the `saved` entries. `local_entries` are the same entries in the form in which this worker stores
        tensors.
        """
        self._waiting = dict(saved)
        for key, (kind, value) in (saved if local_entries is None else local_entries).items():
            if kind == "plain":
                super().__setitem__(key, value)
            elif key in self:  # the script of a newcomer put it here before it was given anything
                self[key].load_state_dict(self._fit(saved[key][1], self[key].state_dict))
                del self._waiting[key]

    def end_replay(self) -> None:
        """Ends the replay: from here on an assignment of the script wins over the checkpoint's value."""
        self._waiting = {key: entry for key, entry in self._waiting.items() if entry[0] == "object"}

    def begin_step(self) -> None:
        """Copies the values that the code of a step itself changes, so that the step can be computed again. Steps 1, 2,
        4, 8, ... find out which values these are.
        """
        self._steps += 1
        self._before = {key: _copy(self[key]) for key in self._moved & self.keys()}
        looks = self._steps & (self._steps - 1) == 0
        self._stamps = {key: _stamp(value) for key, value in self.items()} if looks else None

    def note_changes(self) -> None:
        """Finds the values that the code of the step has changed."""
        if self._stamps is not None:
            self._moved |= {key for key, value in self.items() if _stamp(value) != self._stamps.get(key)}

    def undo_step(self) -> None:
        """Restores the values from before the step. Containers and tensors stay the same objects."""
        for key, (kind, saved) in self._before.items():
            live = self.get(key)
            if kind == "object":
                self[key].load_state_dict(_copied(saved))
            elif isinstance(live, torch.Tensor) and live.shape == saved.shape:
                live.detach().copy_(saved)
            elif isinstance(live, list | dict):
                live.clear()
                (live.extend if isinstance(live, list) else live.update)(_copied(saved))
            else:
                super().__setitem__(key, saved)

    @without_script_view
    def __setitem__(self, key: str, value: Any) -> None:
        if key in self._waiting:
            kind, saved = self._waiting.pop(key)
            if kind == "object":
                value.load_state_dict(self._fit(saved, value.state_dict))
            else:
                given = value
                value = self._fit(saved, lambda: given)
        super().__setitem__(key, value)

    def update(self, *others: Any, **values: Any) -> None:  # dict's own would pass by __setitem__
        """Sets several values, as dict.update does."""
        for key, value in dict(*others, **values).items():
            self[key] = value

    def __ior__(self, other: Any) -> TrainerState:  # type: ignore[override, misc]
        self.update(other)
        return self

    def setdefault(self, key: str, default: Any = None) -> Any:
        """Sets a value unless the key has one; the checkpoint's value wins over `default`."""
        if key not in self or key in self._waiting:
            self[key] = default
        return self[key]

    def saved(self) -> dict[str, Any]:
        """Returns the entries of a checkpoint by key: ("plain", value), or ("object", its state_dict)."""
        kept: dict[str, Any] = {key: value for key, value in self._waiting.items() if key not in self}
        return kept | {key: _entry(value) for key, value in self.items()}


def _entry(value: Any) -> tuple[str, Any]:
    filled = hasattr(value, "state_dict") and not isinstance(value, torch.Tensor)
    return ("object", value.state_dict()) if filled else ("plain", value)


def _copied(tree: Any) -> Any:
    tensors, skeleton = flatten(tree, "", live=True)
    return unflatten(skeleton, {name: tensor.detach().clone() for name, tensor in tensors.items()})


def _copy(value: Any) -> tuple[str, Any]:
    kind, plain = _entry(value)
    return kind, _copied(plain)


def _stamp(value: Any) -> Any:
    """Returns a value that differs after the given value was changed."""
    try:
        tensors, skeleton = flatten(_entry(value)[1], "", live=True)
    except UsageError:  # what cannot be kept is refused by the next checkpoint
        return None
    return skeleton, [
        (name, (local_part := local(tensor)).data_ptr(), local_part._version) for name, tensor in tensors.items()
    ]
