"""Model and optimizer state by the user's parameter names, whole or sharded: resumes under any plan."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from paceline.base.sharding import RowShards, ShardedTensor, ShardingSpec
from paceline.compute.job import TrainingJob
from paceline.errors import UsageError

_SIDE = 8  # elements: of the parameter that an optimizer is tried with
# What code of the user may raise when it is called with small or fake tensors, for which it was not written.
PROBE_ERRORS = (
    RuntimeError,
    ValueError,
    TypeError,
    NameError,
    LookupError,
    AttributeError,
    AssertionError,
    ArithmeticError,
)

DEFERRED = "_paceline_deferred"  # the attribute of a parameter whose memory is allocated later


def same_number(what: str, saved: int, now: int) -> None:
    """Raises UsageError if a checkpoint holds another number of something than the script makes."""
    if saved != now:
        raise UsageError(
            f"the checkpoint holds {saved} {what}, the script makes {now}",
            "make the same ones as in the run that is resumed, or start a new run",
        )


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This worker's part of a DTensor, or the tensor itself; detached."""
    local_tensor: torch.Tensor = getattr(tensor, "_local_tensor", tensor).detach()
    return local_tensor


def marks_of(param: nn.Parameter) -> dict[str, Any]:
    """The attributes that a script gave a parameter: optimizers' groups are made by such."""
    bare = vars(nn.Parameter(param.detach(), requires_grad=False))  # some kinds of tensors have attributes themselves
    return {name: value for name, value in vars(param).items() if name not in bare and name != DEFERRED}


def marked(tensor: torch.Tensor, marks: Mapping[str, Any]) -> nn.Parameter:
    """A parameter made of a tensor, with the attributes that `marks_of` returned."""
    param = nn.Parameter(tensor)
    vars(param).update(marks)
    return param


def refuse_state(module: nn.Module, whose: str) -> None:
    """Refuses a script the `state_dict()` of a module with parts of weights. Our own parts read it with `keep_vars`."""

    def refuse(module: nn.Module, prefix: str, keep_vars: bool) -> None:
        if not keep_vars:
            what = f"state_dict() of {whose}, would have parts of weights"
            raise UsageError(what, "export() writes it whole, and every checkpoint has it")

    module.register_state_dict_pre_hook(refuse)


def cut_in_rows(
    params: Mapping[str, torch.Tensor], cuts: Mapping[str, ShardingSpec], count: int, unit: int = 1
) -> dict[str, ShardingSpec]:
    """The sharding of parameters when each worker's part under `cuts` is divided by rows among `count` units.

    A parameter without a cut is first taken as whole on all workers of a `unit`.
    """
    rows = cache(ShardingSpec.in_rows)  # they are large where workers are many, and shapes are few
    return {
        name: rows(cuts.get(name) or ShardingSpec.unsharded(param.shape, unit), count) for name, param in params.items()
    }


def own_of(
    named: Mapping[str, nn.Parameter], cuts: Mapping[str, ShardingSpec], shards: RowShards, unit: int = 1
) -> tuple[dict[str, nn.Parameter], dict[str, ShardingSpec]]:
    """This worker's rows of each parameter, and the sharding that the parameters then have.

    With a single shard they are the parameters themselves.
    """
    if shards.count == 1:
        return dict(named), {name: cuts[name] for name in named if name in cuts}
    local_rows = {n: marked(shards.of(param.detach(), shards.me), marks_of(param)) for n, param in named.items()}
    return local_rows, cut_in_rows(named, cuts, shards.count, unit)


def held(values: Iterable[Any]) -> int:
    """Bytes of the storages of all tensors in `values`: a shared storage counts once, a DTensor with its local part."""
    tensors = (value for value in values if isinstance(value, torch.Tensor))
    storages = (local(tensor).untyped_storage() for tensor in tensors)
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def kept_for_each(optimizers: Sequence[Optimizer]) -> float:
    """Bytes of optimizer state for each byte of parameters, measured on a small parameter.

    An optimizer that cannot be made for a small parameter counts as Adam, with 2 bytes.
    """
    kept = total = 0.0
    for one in optimizers:
        bytes_, state = sum(p.nbytes for g in one.param_groups for p in g["params"]), _probe_state(one)
        each = 2.0 if state is None else sum(value.numel() for value in state.values() if value.dim()) / _SIDE**2
        kept, total = kept + each * bytes_, total + bytes_
    return kept / total if total else 0.0


def _probe_state(optimizer: Optimizer) -> dict[str, torch.Tensor] | None:
    """State tensors after one step of an optimizer of the same class on a small parameter; None if that fails."""
    probe = nn.Parameter(torch.zeros(_SIDE, _SIDE, dtype=torch.float32))
    probe.grad = torch.zeros_like(probe)
    try:
        with torch.random.fork_rng(devices=[]):  # it may draw
            made = type(optimizer)([probe], **optimizer.defaults)
            made.step()
    except PROBE_ERRORS:  # the class needs other arguments
        return None
    return {key: value for key, value in made.state[probe].items() if isinstance(value, torch.Tensor)}


def refuse_odd_state(optimizer: Optimizer, names: Mapping[int, str], cuts: Mapping[str, ShardingSpec]) -> None:
    """Raises UsageError if the state of a sharded parameter is neither a number nor has the shape of the shard.

    Nobody could say which part of the full state such a tensor is.
    """
    for param, state in optimizer.state.items():
        name = names.get(id(param), "")
        for key, value in state.items() if name in cuts else ():
            if isinstance(value, torch.Tensor) and value.numel() != 1 and value.shape != param.shape:
                what = (
                    f"{type(optimizer).__name__} keeps {key} of shape {tuple(value.shape)} for {name}, of which this "
                    f"worker holds a piece of shape {tuple(param.shape)}: it can be neither saved nor moved"
                )
                cure = "take an optimizer whose state has the shape of its parameter, such as AdamW, or a plan of data="
                raise UsageError(what, f"{cure} alone")


def optimizer_state(
    optimizer: Optimizer, names: Mapping[int, str], cuts: Mapping[str, ShardingSpec], shard_index: int
) -> dict[str, Any]:
    """An optimizer's groups and its state by parameter name; `names` has the name of each held tensor, by identity.

    State with the shape of a sharded parameter becomes a ShardedTensor. State under a text key is in `besides`.
    """
    groups = [
        {**{k: v for k, v in group.items() if k != "param_names"}, "params": [names[id(p)] for p in group["params"]]}
        for group in optimizer.param_groups
    ]
    besides = {key: value for key, value in optimizer.state.items() if isinstance(key, str)}
    params = [param for param in optimizer.state if not isinstance(param, str)]
    state = {names[id(param)]: dict(optimizer.state[param]) for param in params}
    if cuts:
        refuse_odd_state(optimizer, names, cuts)
    for param in params if cuts else ():
        if (name := names[id(param)]) in cuts:
            _mark(state[name], param, cuts[name], shard_index)
    return {"groups": groups, "state": state, **({"besides": besides} if besides else {})}


def _mark(state: dict[str, Any], piece: torch.Tensor, spec: ShardingSpec, shard_index: int) -> None:
    """Replaces state with the shape of a parameter's shard by a ShardedTensor, in place."""
    for key, value in state.items():
        if isinstance(value, torch.Tensor) and value.shape == piece.shape:
            state[key] = ShardedTensor(value, spec, shard_index)


def _own_pieces(
    packed: Mapping[str, Any], optimizer: Optimizer, cuts: Mapping[str, ShardingSpec], shard_index: int
) -> Mapping[str, Any]:
    """The saved state with this worker's shards in the place of full tensors."""
    if not cuts:
        return packed
    single = any(not cut.shape for cut in cuts.values())
    probe_state = _probe_state(optimizer) if single else None
    # For a parameter without dimensions a count of steps looks like what is kept for its element.
    others = {"step"} if probe_state is None else {key for key, value in probe_state.items() if value.dim() == 0}

    def cut(name: str, key: str, value: Any) -> Any:
        spec = cuts.get(name)
        is_whole = spec is not None and isinstance(value, torch.Tensor) and tuple(value.shape) == spec.shape
        if spec is None or not is_whole or (not spec.shape and key in others):
            return value
        return spec.at(shard_index).of(value)

    state = {
        name: {key: cut(name, key, value) for key, value in kept.items()} for name, kept in packed["state"].items()
    }
    return {**packed, "state": state}


def in_pieces(tensors: Mapping[str, Any], cuts: Mapping[str, ShardingSpec], shard_index: int) -> dict[str, Any]:
    """A model's tensors by name, sharded ones as ShardedTensor of this worker's part."""
    return {n: ShardedTensor(local(t), cuts[n], shard_index) if n in cuts else t for n, t in tensors.items()}


def model_state(job: TrainingJob) -> dict[str, Any]:
    """A model's state dict with its pieces marked as such. Raises UsageError for a parameter that would be saved in
    another shape than the whole one has.
    """
    state = in_pieces(job.model.state_dict(keep_vars=True), job.cuts, job.shard_index)
    for name in job.shapes.keys() & state.keys() if job.cuts else ():
        if (shape := tuple(state[name].shape)) != job.shapes[name]:
            what = f"{name} would be saved with the shape {shape}, and the model was given with {job.shapes[name]}"
            raise UsageError(what, "leave the shapes of parameters as they are once the Trainer is made")
    return state


_Path = tuple[Any, ...]


def copies_in_pieces(tree: Any, job: TrainingJob) -> tuple[Any, list[list[Any]]]:
    """A script's value with copies of sharded parameters (such as averaged weights) as ShardedTensor, and the paths of
    the copies that are full tensors. Copies are found under a parameter's name, or in a list of all parameters.
    """
    full_paths: list[list[Any]] = []
    params = dict(job.model.named_parameters(remove_duplicate=False)) if job.cuts else {}

    def mark(tensor: torch.Tensor, name: str, path: _Path) -> Any:
        cut, local_tensor = job.cuts[name], local(tensor)
        is_piece = local_tensor.shape == cut.at(job.shard_index).shape
        if name in params and hasattr(params[name], "_local_tensor") and local_tensor.shape == cut.shape:
            is_piece = hasattr(tensor, "_local_tensor")  # one shard may have all rows
        if is_piece:
            return ShardedTensor(local_tensor, cut, job.shard_index)
        if tuple(tensor.shape) == cut.shape:
            full_paths.append([*path])
        return tensor

    return change_copies(tree, job, mark), full_paths


def own_copies(tree: Any, job: TrainingJob, full_paths: Sequence[Sequence[Any]] = ()) -> Any:
    """A saved script value with this worker's shards, as DTensors where the parameters are DTensors.

    Copies at `full_paths` stay full tensors.
    """
    params = dict(job.model.named_parameters(remove_duplicate=False))
    paths = {tuple(path) for path in full_paths}

    def narrow(tensor: torch.Tensor, name: str, path: _Path) -> Any:
        cut, like = job.cuts[name], params.get(name)
        if path in paths or tuple(tensor.shape) not in (cut.shape, cut.at(job.shard_index).shape):
            return tensor
        piece = cut.at(job.shard_index).of(tensor).clone() if tensor.shape == cut.shape else tensor
        if like is None or not hasattr(like, "_local_tensor"):
            return piece
        about: Any = like
        more = {"run_check": False, "shape": like.shape, "stride": like.stride()}
        return type(about).from_local(piece.to(like.device), about.device_mesh, about.placements, **more)

    return change_copies(tree, job, narrow)


def copies_like(saved: Any, given: Callable[[], Any], job: TrainingJob) -> Any:
    """A script's value as it was saved, whose copies of parameters are whole where those of the `given` one are."""
    return own_copies(saved, job, copies_in_pieces(given(), job)[1]) if job.cuts else saved


def change_copies(
    tree: Any, job: TrainingJob, change: Callable[[torch.Tensor, str, _Path], Any], path: _Path = ()
) -> Any:
    """A script's value in which `change(tensor, parameter name, path)` replaces each copy of a sharded parameter."""
    if not job.cuts:
        return tree
    if isinstance(tree, Mapping):
        changed = {key: change_copies(value, job, change, (*path, key)) for key, value in tree.items()}
        for key, value in changed.items():
            if isinstance(value, torch.Tensor):
                name = next((name for name in job.cuts if f".{key}".endswith(f".{name}")), None)
                changed[key] = value if name is None else change(value, name, (*path, key))
        return changed
    if type(tree) not in (list, tuple):
        return tree
    inside = [change_copies(value, job, change, (*path, at)) for at, value in enumerate(tree)]
    if len(inside) == len(job.named) and all(isinstance(value, torch.Tensor) for value in inside):
        for at, name in enumerate(job.named):
            inside[at] = change(inside[at], name, (*path, at)) if name in job.cuts else inside[at]
    return type(tree)(inside)


def load_model(model: nn.Module, saved: Mapping[str, Any], cuts: Mapping[str, ShardingSpec], shard_index: int) -> None:
    """Loads a state dict whose sharded tensors may be full or already this worker's shard.

    Sharded tensors are copied one after another. Torch loads the rest and checks that all names are there.
    """
    state = dict(saved)
    for name, tensor in model.state_dict(keep_vars=True).items() if cuts else ():
        value, piece = state.get(name), cuts[name].at(shard_index) if name in cuts else None
        if value is None or piece is None or tuple(value.shape) not in (cuts[name].shape, piece.shape):
            continue
        if tuple(value.shape) == cuts[name].shape:
            piece.put(value, local(tensor))
        else:
            local(tensor).copy_(value)
        state[name] = tensor
    model.load_state_dict(state, strict=True)


def load_optimizer(
    optimizer: Optimizer,
    saved: Mapping[str, Any],
    names: Mapping[int, str],
    cuts: Mapping[str, ShardingSpec],
    shard_index: int,
) -> None:
    """Loads what `optimizer_state` returned, from shards or full tensors. Raises UsageError if the groups differ."""
    saved = _own_pieces(saved, optimizer, cuts, shard_index)
    same_number("parameter groups", len(saved["groups"]), len(optimizer.param_groups))
    current = optimizer.state_dict()
    numbers: dict[str, int] = {}
    groups = []
    for group, packed, old in zip(optimizer.param_groups, current["param_groups"], saved["groups"], strict=True):
        group_names = [names[id(param)] for param in group["params"]]
        if set(group_names) != set(old["params"]):
            differing = sorted(set(group_names) ^ set(old["params"]))
            raise UsageError(
                f"parameter group of the optimizer differs from the checkpoint's in {', '.join(differing[:5])}",
                "make the same groups as in the run that is resumed, or start a new run",
            )
        numbers.update(zip(group_names, packed["params"], strict=True))
        groups.append({**packed, **{k: v for k, v in old.items() if k != "params"}})
    state = {numbers[name]: {key: _copy(value) for key, value in kept.items()} for name, kept in saved["state"].items()}
    besides = saved.get("besides") or {}
    optimizer.load_state_dict({"state": {**besides, **state}, "param_groups": groups})


def _copy(value: Any) -> Any:
    """Torch's optimizers keep what they are given."""
    return value.clone() if isinstance(value, torch.Tensor) else value


def hidden_in(optimizer: Optimizer) -> str:
    """A message about tensors that an optimizer keeps outside of its `state_dict()`; empty if there are none."""
    saved = [*_tensors(optimizer.state_dict(), "")]
    saved += [*_tensors(optimizer.param_groups, ""), *_tensors(dict(optimizer.state), "")]
    known = {id(tensor) for _, tensor in saved} | {tensor.data_ptr() for _, tensor in saved}
    attributes = [
        (f".{name}", value) for name, value in vars(optimizer).items() if name not in ("state", "param_groups")
    ]
    reachable = [pair for name, value in attributes for pair in _tensors(value, name)]
    hidden = [name for name, tensor in reachable if not known & {id(tensor), tensor.data_ptr()}]
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
