"""The state of optimizers by the user's own parameter names, whole or in rows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from paceline.comm.places import Places, Rows
from paceline.errors import UsageError

_SIDE = 8  # elements: of the parameter that an optimizer is tried with
# What one raises that was not made to be tried.
_THEIRS = (RuntimeError, ValueError, TypeError, NameError, LookupError, AttributeError, AssertionError, ArithmeticError)


def same_number(what: str, saved: int, now: int) -> None:
    if saved != now:
        raise UsageError(
            f"the checkpoint holds {saved} {what}, the script makes {now}",
            "make the same ones as in the run that is resumed, or start a new run",
        )


def held(values: Iterable[Any]) -> int:
    """Bytes of the memory behind tensors: what several share counts once, and of a tensor in pieces the piece."""
    tensors = (value for value in values if isinstance(value, torch.Tensor))
    storages = (getattr(tensor, "_local_tensor", tensor).untyped_storage() for tensor in tensors)
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def kept_for_each(optimizers: Sequence[Optimizer]) -> float:
    """Bytes that optimizers keep for each byte of their parameters, from what one of the kind keeps for a small one; 2,
    as Adam's, where none can be made.
    """
    kept = total = 0.0
    for one in optimizers:
        bytes_, found = sum(p.nbytes for g in one.param_groups for p in g["params"]), _kept(one)
        each = 2.0 if found is None else sum(value.numel() for value in found.values() if value.dim()) / _SIDE**2
        kept, total = kept + each * bytes_, total + bytes_
    return kept / total if total else 0.0


def _kept(optimizer: Optimizer) -> dict[str, torch.Tensor] | None:
    """The tensors that another optimizer of the kind keeps for a small parameter; None where it cannot be made."""
    probe = nn.Parameter(torch.zeros(_SIDE, _SIDE))
    probe.grad = torch.zeros_like(probe)
    made = _tried(optimizer, [probe])
    if made is None:
        return None
    return {key: value for key, value in made.state[probe].items() if isinstance(value, torch.Tensor)}


def _tried(optimizer: Optimizer, params: list[nn.Parameter]) -> Optimizer | None:
    """Another optimizer of the kind, after a step of these small parameters; None where it cannot be made."""
    try:
        with torch.random.fork_rng(devices=[]):  # it may draw
            made = type(optimizer)(params, **optimizer.defaults)
            made.step()
    except _THEIRS:  # it wants something else besides
        return None
    return made


def refuse_mixing(optimizers: Sequence[Optimizer]) -> None:
    """For parameters in rows: refuses optimizers whose update of a row depends on others, as tried on a small one."""
    whole = torch.linspace(-1.0, 1.0, _SIDE**2, dtype=torch.float64).view(_SIDE, _SIDE)
    for one in optimizers:
        tries = []
        for rows in (_SIDE, _SIDE // 2):
            params = [nn.Parameter(part.clone()) for part in whole.split(rows)]
            for param in params:
                param.grad = param.detach().sin()
            if _tried(one, params) is not None:
                tries.append(torch.cat([param.detach() for param in params]))
        if len(tries) == 2 and not torch.allclose(tries[0], tries[1], rtol=1e-9, atol=0.0):
            what = f"{type(one).__name__} looks at a parameter as a whole, and the plan keeps rows of it on each worker"
            raise UsageError(what, "take one that treats each element by itself, as AdamW, or a plan without shard")


def optimizer_state(optimizer: Optimizer, names: Mapping[int, str]) -> dict[str, Any]:
    """The groups, and what is kept for each parameter; `names` are those of the tensors it holds, by identity."""
    groups = [
        {
            **{k: v for k, v in group.items() if k != "param_names"},
            "params": [names[id(p)] for p in group["params"]],
        }
        for group in optimizer.param_groups
    ]
    return {
        "groups": groups,
        "state": {names[id(param)]: dict(value) for param, value in optimizer.state.items()},
    }


def in_rows(
    packed: dict[str, Any], kind: str, own: Mapping[str, nn.Parameter], whole: Mapping[str, Any], at: Places
) -> None:
    """Marks what an optimizer of some `kind` keeps for each element of the `own` rows of the `whole` parameters."""
    for name, kept in packed["state"].items():
        for key, value in kept.items():
            if not isinstance(value, torch.Tensor) or (value.numel() == 1 and value.shape != own[name].shape):
                continue
            if value.shape != own[name].shape:
                what = f"{kind} keeps a tensor of shape {tuple(value.shape)} for {name}"
                cure = "shard the state of optimizers that keep numbers for each element, as AdamW or SGD"
                raise UsageError(f"{what}, {tuple(own[name].shape)} of which are here", cure)
            kept[key] = Rows(value, at, tuple(whole[name].shape))


def own_rows(packed: Mapping[str, Any], optimizer: Optimizer, whole: Mapping[str, Any], at: Places) -> dict[str, Any]:
    """The same with the own rows of whole tensors."""
    single = any(param.dim() == 0 for param in whole.values())
    found = _kept(optimizer) if single else None
    # For a parameter without dimensions a count of steps looks like what is kept for its element.
    others = {"step"} if found is None else {key for key, value in found.items() if value.dim() == 0}

    def cut(name: str, key: str, value: Any) -> Any:
        is_whole = isinstance(value, torch.Tensor) and value.shape == whole[name].shape
        is_whole &= whole[name].dim() > 0 or key not in others
        return at.of(value, at.me) if is_whole else value

    state = {
        name: {key: cut(name, key, value) for key, value in kept.items()} for name, kept in packed["state"].items()
    }
    return {**packed, "state": state}


def load_optimizer(optimizer: Optimizer, saved: Mapping[str, Any], names: Mapping[int, str]) -> None:
    """Takes over what `optimizer_state` told. Raises UsageError where the groups differ."""
    same_number("parameter groups", len(saved["groups"]), len(optimizer.param_groups))
    current = optimizer.state_dict()
    numbers: dict[str, int] = {}
    groups = []
    for group, packed, old in zip(optimizer.param_groups, current["param_groups"], saved["groups"], strict=True):
        here = [names[id(param)] for param in group["params"]]
        if set(here) != set(old["params"]):
            odd = sorted(set(here) ^ set(old["params"]))
            raise UsageError(
                f"parameter group of the optimizer differs from the checkpoint's in {', '.join(odd[:5])}",
                "make the same groups as in the run that is resumed, or start a new run",
            )
        numbers.update(zip(here, packed["params"], strict=True))
        groups.append({**packed, **{k: v for k, v in old.items() if k != "params"}})
    state = {numbers[name]: {key: _copy(value) for key, value in kept.items()} for name, kept in saved["state"].items()}
    optimizer.load_state_dict({"state": state, "param_groups": groups})


def _copy(value: Any) -> Any:
    """Torch's optimizers keep what they are given."""
    return value.clone() if isinstance(value, torch.Tensor) else value


def hidden_in(optimizer: Optimizer) -> str:
    """For people: tensors that an optimizer keeps and its `state_dict()` does not; empty where there are none."""
    told = [*_tensors(optimizer.state_dict(), "")]
    told += [*_tensors(optimizer.param_groups, ""), *_tensors(dict(optimizer.state), "")]
    known = {id(tensor) for _, tensor in told} | {tensor.data_ptr() for _, tensor in told}
    own = [(f".{name}", value) for name, value in vars(optimizer).items() if name not in ("state", "param_groups")]
    found = [pair for name, value in own for pair in _tensors(value, name)]
    hidden = [name for name, tensor in found if not known & {id(tensor), tensor.data_ptr()}]
    if not hidden:
        return ""
    kind, more = type(optimizer).__name__, f" and {len(hidden) - 1} more tensors" if len(hidden) > 1 else ""
    return f"{kind} keeps {kind}{hidden[0]}{more} outside of its state_dict(): a resume or a worker's return loses them"


def _tensors(value: Any, name: str, depth: int = 4) -> Iterator[tuple[str, torch.Tensor]]:
    """Those in nestings, and in what optimizers hold of others, each with its name."""
    if isinstance(value, torch.Tensor):
        yield name, value
    elif not depth:
        return
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            label = f"[{key!r}]" if isinstance(key, str | int) else "[...]"
            yield from _tensors(inner, f"{name}{label}", depth - 1)
    elif isinstance(value, list | tuple):
        for number, inner in enumerate(value):
            yield from _tensors(inner, f"{name}[{number}]", depth - 1)
    elif isinstance(value, Optimizer):
        for key, inner in vars(value).items():
            yield from _tensors(inner, f"{name}.{key}", depth - 1)
