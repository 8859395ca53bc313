"""What a source contains: weights by name, the states of optimizers, and what is not taken of it, with the reason.

Programs wrap a model's state dict in dicts of their own and put prefixes before its names. `contents_of` unwraps
those of Lightning, DeepSpeed, Accelerate, torchtitan, of torch's tutorials, and similar ones.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from paceline.base.text import plural
from paceline.checkpoint.lazy import Deferred
from paceline.checkpoint.safetensors_file import DTYPES
from paceline.errors import UsageError

_MODELS = ("state_dict", "model_state_dict", "model_state", "model", "module", "net", "network", "weights", "params")
_OPTIMIZERS = re.compile(r"(optimizer|optim|opt)(_?\d+)?|(optimizer|optim)_state(s|_dict|_dicts)?")
# Modules that wrappers put between the user's own: torch.compile, FSDP, activation checkpointing.
_WRAPPERS = re.compile(r"(?<![^.])(?:_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.")
_REASONS = (
    (r"(lr_?)?sched(uler)?s?(_states?)?(_dict)?|lr_schedulers?", "the script makes its own learning-rate schedule"),
    (r"(global_?)?(epoch|step|iter(ation)?)s?", "a run counts its own steps"),
    (r".*(rng|random).*", "a run has its own random streams"),
    (r"(grad_?)?scaler(_state(_dict)?)?|loss_scaler", "the loss scale begins anew"),
)
_OTHERWISE = "only weights and optimizer states are taken"


@dataclass
class Contents:
    """Weights by name, and states of optimizers.

    - `optimizers`: for each optimizer `params`, the names of its parameters by group, or their numbers where the source
      has no names; `state`, its values by parameter and key; `options`, those of each group.
    - `left_out`: what is not taken, by reason; `removed`: what was removed from names.
    """

    weights: dict[str, torch.Tensor]
    optimizers: list[dict[str, Any]] = field(default_factory=list)
    left_out: dict[str, list[str]] = field(default_factory=dict)
    removed: set[str] = field(default_factory=set)

    def leave_out(self, name: str, reason: str = "") -> None:
        """Notes that something with this name is not taken."""
        usual = next((why for pattern, why in _REASONS if re.fullmatch(pattern, name.lower())), _OTHERWISE)
        self.left_out.setdefault(reason or usual, []).append(name)

    def take_optimizer(self, saved: Any, name: str) -> None:
        """Takes the states of one optimizer, or of a list of them."""
        if isinstance(saved, list):
            for number, one in enumerate(saved):
                self.take_optimizer(one, f"{name}[{number}]")
            return
        if saved is None or saved == {}:
            return
        try:
            self.optimizers.append(_optimizer(saved))
        except (TypeError, KeyError, ValueError, AttributeError, IndexError):
            self.leave_out(name, "it does not have the layout of a torch optimizer's state_dict()")

    def clean(self) -> Contents:
        """Removes from names what DDP, FSDP and torch.compile have put into them."""
        changed = {name: _WRAPPERS.sub("", name) for name in self.weights}
        prefix = ""
        while changed and all(name.startswith(f"{prefix}module.") for name in changed.values()):
            prefix += "module."
        names = {name: new.removeprefix(prefix) for name, new in changed.items()}
        if len({*names.values()}) == len(names):
            self.removed |= {prefix} - {""}
            self.removed |= {part for name in self.weights for part in _WRAPPERS.findall(name)}
            self.weights = {names[name]: value for name, value in self.weights.items()}
            self.optimizers = self.renamed_optimizers(lambda name: _WRAPPERS.sub("", name).removeprefix(prefix))
        return self

    def renamed_optimizers(self, change: Callable[[str], str]) -> list[dict[str, Any]]:
        """Returns the states of optimizers, with other names of their parameters where they have names."""
        renamed = []
        for one in self.optimizers:
            named = all(isinstance(label, str) for group in one["params"] for label in group)
            params = [[change(label) for label in group] for group in one["params"]] if named else one["params"]
            state = {change(label): kept for label, kept in one["state"].items()} if named else one["state"]
            renamed.append({**one, "params": params, "state": state})
        return renamed


def contents_of(tree: Any, what: str) -> Contents:
    """Unwraps a value that a program has saved. Raises UsageError if it has no weights in it."""
    tree, more = _inner(tree)
    key = next((key for key in _MODELS if _has_tensors(tree.get(key))), None)
    if key is None and not _has_tensors(tree):
        keys = ", ".join(sorted(map(str, tree))[:5]) or "none"
        cure = "pass a file that contains a model's state dict, or a dict with one under 'state_dict' or 'model'"
        raise UsageError(f"{what} does not contain weights by name; its keys are: {keys}", cure)
    contents = Contents({})
    for name, value in (tree if key is None else tree[key]).items():
        contents.weights |= _weight(contents, str(name), value) if key or isinstance(value, torch.Tensor) else {}
    used = {key} if key is not None else {name for name, value in tree.items() if isinstance(value, torch.Tensor)}
    for name, value in tree.items():
        if name not in used and _OPTIMIZERS.fullmatch(str(name)):
            contents.take_optimizer(value, str(name))
        elif name not in used and value is not None:
            contents.leave_out(str(name))
    for name in more:
        contents.leave_out(name)
    return contents


def _inner(tree: Any) -> tuple[Mapping[Any, Any], list[str]]:
    """The dict with the weights, where only a dict in a dict has them, and the names beside it."""
    more: list[str] = []
    while isinstance(tree, Mapping) and not _has_tensors(tree) and not any(_has_tensors(tree.get(k)) for k in _MODELS):
        inner = [key for key, value in tree.items() if isinstance(value, Mapping)]
        if len(inner) != 1:
            break
        more += [str(key) for key in tree if key != inner[0]]
        tree = tree[inner[0]]
    return (tree if isinstance(tree, Mapping) else {}), more


def _has_tensors(value: Any) -> bool:
    return isinstance(value, Mapping) and any(isinstance(one, torch.Tensor) for one in value.values())


def _weight(contents: Contents, name: str, value: Any) -> dict[str, torch.Tensor]:
    """A weight by its name, or nothing if it cannot be stored."""
    reason = _refusal(value)
    if reason:
        contents.leave_out(name, reason)
        return {}
    return {name: _detached(value)}


def _detached(value: torch.Tensor) -> torch.Tensor:
    """A parameter as a plain tensor; a deferred tensor as it is, because each operation on it reads its values."""
    return value if isinstance(value, Deferred) else value.detach()


def _refusal(value: Any) -> str:
    """Why a value cannot be stored as a tensor; empty if it can."""
    if not isinstance(value, torch.Tensor):
        return f"it is not a tensor ({type(value).__name__})"
    if value.layout != torch.strided or value.is_quantized or value.is_meta:
        return "it is a sparse, quantized or empty (meta) tensor"
    if value.dtype not in DTYPES:
        return f"tensors of {str(value.dtype).removeprefix('torch.')} cannot be stored"
    return ""


# -- optimizers ------------------------------------------------------------------------------------------------------


def _optimizer(saved: Mapping[str, Any]) -> dict[str, Any]:
    """The states of an optimizer from its state dict, from torch's dict by parameter name, or from its flat form."""
    if "state" not in saved:
        saved = _nested(saved)
    groups, state = saved["param_groups"], saved["state"]
    groups = [groups[key] for key in sorted(groups)] if isinstance(groups, Mapping) else groups
    labels: dict[Any, str | int] = {}
    params: list[list[str | int]] = []
    for group in groups:
        keys, names = _listed(group["params"]), _listed(group.get("param_names") or group["params"])
        made = [name if isinstance(name, str) else len(labels) + at for at, name in enumerate(names)]
        labels |= dict(zip(keys, made, strict=True))
        params.append(made)
    kept = {str(labels.get(key, key)): _plain_state(values) for key, values in state.items()}
    return {"params": params, "state": kept, "options": [_plain_options(group) for group in groups]}


def _listed(value: Any) -> list[Any]:
    return [value[key] for key in sorted(value)] if isinstance(value, Mapping) else list(value)


def _nested(flat: Mapping[str, Any]) -> dict[str, Any]:
    """The dict by parameter name from keys such as ``state.0.weight.exp_avg`` and ``param_groups.0.weight.lr``."""
    state: dict[str, dict[str, Any]] = {}
    options: dict[str, dict[str, Any]] = {}
    for key, value in flat.items():
        kind, _, rest = key.partition(".")
        name, _, last = rest.rpartition(".")
        {"state": state, "param_groups": options}[kind].setdefault(name, {})[last] = value
    if not state:
        raise ValueError("no state")
    first = next(iter(options.values()), {})
    return {"state": state, "param_groups": [{**first, "params": [*(options or state)]}]}


def _plain_state(values: Mapping[str, Any]) -> dict[str, Any]:
    """The tensors and numbers of a parameter's state. Raises ValueError for anything else."""
    made: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, torch.Tensor):
            if reason := _refusal(value):
                raise ValueError(reason)
            made[str(key)] = _detached(value)
        elif value is None or isinstance(value, int | float):
            made[str(key)] = value
        else:
            raise ValueError(f"{key} is not a number")
    return made


def _plain_options(group: Mapping[str, Any]) -> dict[str, Any]:
    def is_plain(value: Any) -> bool:
        return (
            value is None or isinstance(value, int | float | str) or (_is_sequence(value) and all(map(is_plain, value)))
        )

    return {str(key): value for key, value in group.items() if key not in ("params", "param_names") and is_plain(value)}


def _is_sequence(value: Any) -> bool:
    return isinstance(value, list | tuple)


def described(groups: Iterable[Mapping[str, Any]]) -> str:
    """The keys of the states of optimizers, and of how many parameters, as text."""
    states = [kept for one in groups for kept in one["state"].values()]
    keys = sorted({key for kept in states for key in kept})
    return f"{', '.join(keys)} of {plural(len(states), 'parameter')}"
