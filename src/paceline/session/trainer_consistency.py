"""Checks that all workers construct the same Trainer.

Weights, gradients and digests of weights are matched between workers by their order. So names are compared in that
order, once, and the first difference is named.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from paceline.base.batching import parted
from paceline.base.text import ranks
from paceline.comm.communicator import Group
from paceline.compute.buffers import declared
from paceline.errors import WorkersDifferError

Description = Mapping[str, Sequence[Sequence[str]]]  # by topic: (name, the rest) of each entry, in order
_TORCHS = "torch.nn.modules."  # modules whose extra_repr() depends on nothing but how they were made
OF_MODEL = ("parameter", "buffer", "module")
_IN_ORDER = dict.fromkeys(OF_MODEL, "the model")
_ORDER = "register submodules, parameters and buffers in a fixed order, for example over sorted(...) instead of a set"
_CURES = {
    "the model": "create the same model on every worker: without ranks and unseeded random numbers",
    "Trainer()": "pass the same arguments to Trainer on every worker, and create several Trainers in the same order",
    "the optimizer": "create the same groups with the same options in optimizer= on every worker",
}


def describe_model(model: nn.Module, arguments: Mapping[str, Any]) -> Description:
    """The model's parameters and buffers by name, shape and dtype, its modules of torch's own, and the arguments of
    the Trainer, all in the order in which workers are matched.
    """
    merged = {name: f" merged by {how}" for name, how in declared(model)}
    return {
        "Trainer()": [[f"{name}=", repr(value)] for name, value in arguments.items()],
        "parameter": [[name, _describe_tensor(param)] for name, param in model.named_parameters()],
        "buffer": [
            [name, f"{_describe_tensor(buffer)}{merged.get(name, '')}"] for name, buffer in model.named_buffers()
        ],
        "module": [[path, _describe_module(module)] for path, module in model.named_modules() if _is_plain(module)],
    }


def describe_optimizers(
    optimizers: Sequence[Optimizer],
    options: Sequence[Sequence[Mapping[str, Any]]],
    local_params: Mapping[str, nn.Parameter],
) -> Description:
    """The classes and groups of the optimizers: their `options`, and the names of their parameters among the
    `local_params`."""
    names, entries = {id(param): name for name, param in local_params.items()}, list[list[str]]()
    for number, (one, group_options) in enumerate(zip(optimizers, options, strict=True)):
        for index, (group, values) in enumerate(zip(one.param_groups, group_options, strict=True)):
            where = f"group {index} of {type(one).__name__}" + (f" {number}" if len(optimizers) > 1 else "")
            members = sorted(names.get(id(param), "?") for param in group["params"])
            entries += [[f"{where} with ", f"{name}={value!r}"] for name, value in values.items()]
            entries += [[f"{where} with ", name] for name in members]
    return {"the optimizer": entries}


def _describe_tensor(tensor: torch.Tensor) -> str:
    frozen = isinstance(tensor, nn.Parameter) and not tensor.requires_grad
    kind = str(tensor.dtype).removeprefix("torch.")
    return f" {list(tensor.shape)} {kind}{' (frozen)' if frozen else ''}"


def _describe_module(module: nn.Module) -> str:
    return f" {type(module).__name__}({module.extra_repr()})"


def _is_plain(module: nn.Module) -> bool:
    """Whether a module is one of torch's own that has no others inside."""
    return type(module).__module__.startswith(_TORCHS) and next(module.children(), None) is None


def compare(group: Group, description: Description, what: str) -> None:
    """Raises WorkersDifferError on all workers where their descriptions of `what` differ. Collective."""
    if group.size == 1:
        return
    group.declare(what, kind="descriptions compared")
    digest = hashlib.sha256(json.dumps(description).encode()).hexdigest()
    apart = parted(range(group.size), group.gather_json(digest))
    if apart is None:
        return
    everyone = group.gather_json(description)
    (usual, *_), (deviating, *_) = apart
    workers = [ranks(group.names[rank] for rank in members) for members in apart]
    refuse_difference(everyone[usual], everyone[deviating], workers)


def refuse_difference(
    usual: Description, deviating: Description, workers: Sequence[str], kinds: Sequence[str] | None = None
) -> None:
    """Raises WorkersDifferError with the first entry in which two descriptions differ, of some `kinds` if not of all;
    `workers` says whose they are.

    Modules without tensors are only compared where both have one of torch's own: other kinds of workers may have
    another implementation.
    """
    for kind in kinds or usual:
        one, other = ([(name, rest) for name, rest in described.get(kind, ())] for described in (usual, deviating))
        if kind == "module":
            both = dict(one).keys() & dict(other).keys()
            one, other = ([entry for entry in entries if entry[0] in both] for entries in (one, other))
        for number, pair in enumerate(zip_longest(one, other)):
            if pair[0] != pair[1]:
                topic, numbered = _IN_ORDER.get(kind, kind), f"{kind} {number}" if kind in _IN_ORDER else ""
                texts = [f"{_text(entry, numbered)} on {whose}" for entry, whose in zip(pair, workers, strict=True)]
                same_names = sorted(name for name, _ in one) == sorted(name for name, _ in other)
                moved = bool(numbered) and same_names and None not in pair and pair[0][0] != pair[1][0]
                what = f"workers disagree about {topic}: {f'{numbered} is ' * bool(numbered)}{texts[1]} and {texts[0]}"
                raise WorkersDifferError(what, _ORDER if moved else _CURES[topic])


def _text(entry: Sequence[str] | None, numbered: str) -> str:
    return "".join(entry) if entry is not None else "not there" if numbered else "nothing more"
