"""Gives a trainer's optimizers the states that another program has saved, by parameter name or by order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from paceline.base.console import in_one_line
from paceline.base.text import first_few, plural
from paceline.compute.job import TrainingJob
from paceline.compute.state_dict import optimizer_state, probe_state
from paceline.errors import CheckpointError

_CURE = "create the same optimizer as the program that saved it, or import again with --no-optimizer"
_OPTIONS = ("lr", "betas", "eps", "momentum", "weight_decay")


def adopted_optimizers(
    job: TrainingJob, names: Mapping[int, str], saved: Sequence[Mapping[str, Any]], trainer: int, source: str
) -> dict[str, Any]:
    """Returns imported states in the form that `OptimizerUpdate.load` takes; all options stay those of the script.

    `names` has the name of each tensor that the optimizers hold. Raises CheckpointError if the states do not fit: other
    parameters, shapes, or kinds of state.
    """
    what = f"the optimizer state imported from {in_one_line(source)} does not fit trainer {trainer}"
    if len(saved) != len(job.optimizers):
        counts = f"it contains {plural(len(saved), 'optimizer')}, and the script creates {len(job.optimizers)}"
        raise CheckpointError(f"{what}: {counts}", _CURE)
    made = []
    for optimizer, one in zip(job.optimizers, saved, strict=True):
        groups = optimizer_state(optimizer, names, {}, 0)["groups"]
        state = _by_name(one, [group["params"] for group in groups], what)
        _check(optimizer, state, job, what)
        made.append({"groups": groups, "state": state})
    return {"optimizers": made, "schedulers": [scheduler.state_dict() for scheduler in job.schedulers]}


def _by_name(saved: Mapping[str, Any], groups: Sequence[Sequence[str]], what: str) -> dict[str, Any]:
    """The states by the script's names, from those by name or by order."""
    labels = [label for group in saved["params"] for label in group]
    names = [name for group in groups for name in group]
    if any(isinstance(label, int) for label in labels):
        sizes, own_sizes = ([len(group) for group in part] for part in (saved["params"], groups))
        if sizes != own_sizes:
            counts = (
                f"its parameters have no names, and its groups have {_list(sizes)} parameters, not {_list(own_sizes)}"
            )
            raise CheckpointError(f"{what}: {counts}", _CURE)
        by_label = dict(zip(map(str, labels), names, strict=True))
    else:
        if others := sorted(saved["state"].keys() - set(names)):
            raise CheckpointError(
                f"{what}: it has states of {_list(others)}, which the optimizer does not train", _CURE
            )
        if missing := sorted(set(names) - {*map(str, labels)} - saved["state"].keys()):
            raise CheckpointError(f"{what}: it has no state of {_list(missing)}", _CURE)
        by_label = {name: name for name in names}
    return {by_label[label]: dict(kept) for label, kept in saved["state"].items()}


def _check(optimizer: Optimizer, state: Mapping[str, Mapping[str, Any]], job: TrainingJob, what: str) -> None:
    """Raises CheckpointError if the states are not what an optimizer of this class keeps for these parameters."""
    probe = probe_state(optimizer)
    if probe is None:  # the class cannot be tried
        return
    full = {key for key, value in probe.items() if value.dim() == 2 and value.shape[0] == value.shape[1]}
    for name, kept in state.items():
        keys = {key for key, value in kept.items() if value is not None}
        if kept and keys != probe.keys():
            kinds = f"{type(optimizer).__name__} keeps {_list(sorted(probe))}, but it has {_list(sorted(keys))}"
            raise CheckpointError(f"{what}: {kinds} of {name}", _CURE)
        for key in full & keys:
            shape = job.shapes.get(name, ())
            if tuple(kept[key].shape) != shape:
                shapes = f"{key} of {name} has the shape {list(kept[key].shape)} instead of {list(shape)}"
                raise CheckpointError(f"{what}: {shapes}", _CURE)


def changed_options(optimizers: Sequence[Optimizer], saved: Sequence[Mapping[str, Any]]) -> str:
    """Which options of the script differ from those of the program that saved the state; empty if none are known to."""
    texts = []
    for optimizer, one in zip(optimizers, saved, strict=True):
        for group, before in zip(optimizer.param_groups, one["options"], strict=False):
            for key in _OPTIONS:
                now, then = (options.get(f"initial_{key}", options.get(key)) for options in (group, before))
                if now is not None and then is not None and _plain(now) != _plain(then):
                    texts.append(f"{key} {_plain(now)} instead of {_plain(then)}")
    return ", ".join(dict.fromkeys(texts))


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.tolist()
    return tuple(value) if isinstance(value, list | tuple) else value


def _list(items: Sequence[Any]) -> str:
    return first_few(items) or "nothing"
