"""Metric objects in the style of torchmetrics, whose states are merged across workers.

Each micro-batch is an update from the start values. So what merges is the same on any number of workers, and merges in
the order of the grid.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch

from paceline.checkpoint.tree import pack, unpack
from paceline.comm.communicator import Group
from paceline.comm.torch_private import pytree
from paceline.errors import MetricError
from paceline.session.error_hints import unfit

_LARGE = 1024  # values of a state whose sums are not kept for each micro-batch
_WORDS = ("sum", "mean", "max", "min", "cat")
_METHODS = ("update", "compute", "reset")
_States = dict[str, Any]


def to_main(group: Group, tree: Any) -> list[Any]:
    """Returns every worker's tree, by rank, on the main worker, and an empty list elsewhere. Part of the entered
    collective.
    """
    if group.rank:
        group.send_bytes(pack(tree), 0)
        return []
    return [tree, *(unpack(group.receive_bytes(rank)) for rank in range(1, group.size))]


class MetricObjects:
    """Metric objects by name. In their context they start no collectives of their own, and after it they are reset.
    `parts` are all objects with states, those inside of a wrapper included.
    """

    @staticmethod
    def of(metric: Any, device: torch.device) -> MetricObjects | None:
        """Returns the metric objects of an object, of a mapping (a MetricCollection), or of a pair of either with a
        function that returns the arguments of `update`. Returns None for a plain function. Raises MetricError.
        """
        given, arguments = metric if isinstance(metric, tuple) and len(metric) == 2 else (metric, None)
        named = {type(given).__name__: given} if not hasattr(given, "items") else dict(given.items())
        objects = all(hasattr(one, name) for one in named.values() for name in _METHODS)
        good = bool(named) and objects and not any(isinstance(one, type) for one in named.values())
        if not good and callable(metric) and not isinstance(metric, type):
            return None
        if not good:
            cure = "pass a function that returns {name: (sum, count)}, or an object with update, compute and reset"
            if isinstance(metric, type):
                cure = f"write {metric.__name__}(), which creates an object of the class"
            elif arguments is not None:
                cure = "write (metric, lambda output, batch: (output, batch[1])): the object comes first"
            raise MetricError(f"{metric!r:.60} is not a metric", cure)
        return MetricObjects(named, arguments, device)

    def __init__(
        self, named: dict[str, Any], arguments: Callable[[Any, Any], Any] | None, device: torch.device
    ) -> None:
        self._named, self._arguments, self._device = named, arguments, device
        self.parts: dict[str, Any] = {}
        self._fitting = set[str]()  # objects whose `update` can be called with what it gets
        for name, one in named.items():
            takes = list(inspect.signature(one.update).parameters)
            if arguments is None and takes[:2] != ["output", "batch"]:
                what = f"{name}.update({', '.join(takes)}) does not tell which of output and batch it needs"
                raise MetricError(what, "write evaluate(dataset, (metric, lambda output, batch: (output, batch[1])))")
            one = one.to(device) if hasattr(one, "to") else one
            inner = one.named_modules() if hasattr(one, "named_modules") else [("", one)]
            stateful = {f"{name} {path}": part for path, part in inner if hasattr(part, "_reductions")}
            if not any(part._reductions for part in stateful.values()):
                what = f"{name} does not declare how its states are merged"
                raise MetricError(what, "give it _defaults and _reductions, as torchmetrics.Metric.add_state does")
            self.parts |= stateful
        self._states: dict[int, tuple[int, _States]] = {}  # rows and states of each micro-batch
        self._sums: _States = {}  # of what is large, or a whole number

    def __enter__(self) -> MetricObjects:
        flags = [(part, name) for part in self.parts.values() for name in ("sync_on_compute", "_to_sync")]
        self._flags = [(part, name, getattr(part, name)) for part, name in flags if hasattr(part, name)]
        for part, name, _ in self._flags:
            setattr(part, name, False)
        return self

    def __exit__(self, *error: object) -> None:
        for part, name, value in self._flags:
            setattr(part, name, value)
        self._reset()

    def _reset(self) -> None:
        for one in self._named.values():
            one.reset()

    def _fit(self, name: str, one: Any, args: tuple[Any, ...], words: Mapping[str, Any]) -> None:
        """Raises MetricError if `update` does not take these arguments."""
        self._fitting.add(name)
        if not (why := unfit(one.update, *args, **words)[0]):
            return
        takes = ", ".join(inspect.signature(one.update).parameters)
        whence = "output and batch" if self._arguments is None else "the result of the function passed with it"
        what = f"{name}.update({takes}) cannot be called with {whence}: {why}"
        cure = "let the function return a tuple in this order, or a dict with these names"
        example = f"write (metric, lambda output, batch: (...)) with a function that returns ({takes})"
        raise MetricError(what, example if self._arguments is None else cure)

    def add(self, number: int, rows: int, output: Any, batch: Any) -> None:
        """Updates the metrics with one micro-batch, from their start values, and keeps the resulting states."""
        self._reset()
        given = (output, batch) if self._arguments is None else self._arguments(output, batch)
        for name, one in self._named.items():
            if isinstance(given, Mapping):
                args, words = (), one._filter_kwargs(**given) if hasattr(one, "_filter_kwargs") else given
            else:
                args, words = given if isinstance(given, tuple) else (given,), {}
            if name not in self._fitting:
                self._fit(name, one, args, words)
            one.update(*args, **words)
        states: _States = {}
        for path, part in self.parts.items():
            for state, how in part._reductions.items():
                key, value = f"{path}.{state}", _cpu_copy(getattr(part, state))
                sums = _word(how) == "sum" and isinstance(value, torch.Tensor)
                if sums and (not value.is_floating_point() or value.numel() > _LARGE):
                    value -= _cpu_copy(part._defaults[state])
                    self._sums[key] = value + self._sums[key] if key in self._sums else value
                else:
                    states[key] = value
        self._states[number] = rows, states

    def together(self, group: Group, micro_batches: int) -> dict[str, Any]:
        """Merges the states of all workers. Returns the results by name, on all workers: numbers as float, others as
        tensors. Collective.
        """
        gathered = to_main(group, [[[number, *kept] for number, kept in self._states.items()], self._sums])
        results: dict[str, Any] = {}
        if gathered:
            states = sorted((row for rows, _ in gathered for row in rows), key=lambda row: row[0])
            for path, part in self.parts.items():
                for state, how in part._reductions.items():
                    key, start = f"{path}.{state}", _cpu_copy(part._defaults[state])
                    row_states = [(0, sums[key] + start) for _, sums in gathered if key in sums]
                    row_states = row_states or [(rows, held[key]) for _, rows, held in states]
                    merged = pytree.tree_map_only(
                        torch.Tensor, lambda t: t.to(self._device), merge_states(row_states, start, how)
                    )
                    setattr(part, state, merged)
                if hasattr(part, "_update_count"):
                    part._update_count, part._computed = len(states), None
            for name, one in self._named.items():
                computed = one.compute()
                results |= computed if isinstance(computed, Mapping) else {name: computed}
            results = {str(name): _plain(value) for name, value in results.items()}
        agreed: dict[str, Any] = unpack(group.broadcast_bytes(pack(results) if gathered else None, 0))
        return agreed


def _cpu_copy(state: Any) -> Any:
    """Returns a copy on the CPU of a tensor, or of all tensors in a list."""
    return pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.detach().cpu().clone(), state)


def _word(how: Any) -> str:
    """Returns torchmetrics' name of a reduction, or an empty text for another one."""
    word = how if isinstance(how, str) else getattr(how, "__name__", "").removeprefix("dim_zero_")
    return word if word in _WORDS else ""


def merge_states(row_states: list[tuple[int, Any]], start: Any, how: Any) -> Any:
    """Merges one state of all micro-batches, each with its number of rows, in grid order."""
    if isinstance(start, list):
        return [item for _, items in row_states for item in items]
    word, states = _word(how), [state for _, state in row_states]
    if word == "cat":
        return torch.cat([torch.atleast_1d(state) for state in states])
    if word == "sum":
        total = start.to(states[0], copy=True)
        for state in states:
            total += state - start
        return total
    if word == "mean":
        weighted = sum(rows * state.double() for rows, state in row_states) / sum(rows for rows, _ in row_states)
        return weighted.to(states[0])
    if len(states) == 1 and how is None:
        return states[0]
    stacked = torch.stack(states)
    if word:
        return stacked.amax(0) if word == "max" else stacked.amin(0)
    return stacked if how is None else how(stacked)


def _plain(result: Any) -> Any:
    if isinstance(result, Mapping):
        return {str(name): _plain(value) for name, value in result.items()}
    if isinstance(result, (list, tuple)):
        return [_plain(value) for value in result]
    if isinstance(result, torch.Tensor):
        return float(result) if result.numel() == 1 else result.detach().cpu()
    return float(result)
