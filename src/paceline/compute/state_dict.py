"""Saves and loads model and optimizer state by parameter name, so that a run resumes under any plan."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from paceline.base.sharding import RowShards, ShardedTensor, ShardingSpec
from paceline.compute.job import TrainingJob
from paceline.errors import UsageError

_SIDE = 8  # the length of each side of the small parameter that an optimizer is tried with
# Errors that user code may raise when it is called with small or fake tensors, for which it was not written.
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
    """Raises UsageError if a checkpoint holds a different number of something than the script creates."""
    if saved != now:
        raise UsageError(
            f"the checkpoint holds {_counted(saved, what)}, but the script creates {now}",
            "create the same ones as the run that you resume, or start a new run",
        )


def _counted(number: int, plural: str) -> str:
    return f"{number} {plural.removesuffix('s') if number == 1 else plural}"


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This worker's part of a DTensor, or the tensor itself; detached."""
    local_tensor: torch.Tensor = getattr(tensor, "_local_tensor", tensor).detach()
    return local_tensor


def marks_of(param: nn.Parameter) -> dict[str, Any]:
    """Returns the attributes that a script set on a parameter, by which it may choose optimizer groups."""
    bare = vars(nn.Parameter(param.detach(), requires_grad=False))  # some kinds of tensors have attributes themselves
    return {name: value for name, value in vars(param).items() if name not in bare and name != DEFERRED}


def marked(tensor: torch.Tensor, marks: Mapping[str, Any]) -> nn.Parameter:
    """A parameter made of a tensor, with the attributes that `marks_of` returned."""
    param = nn.Parameter(tensor)
    vars(param).update(marks)
    return param


def placeholder(like: torch.Tensor, shape: Sequence[int], marks: Mapping[str, Any]) -> nn.Parameter:
    """A parameter with the shape, but with the memory of a single element, which optimizers must not update."""
    return marked(torch.zeros((), dtype=like.dtype, device=like.device).expand(tuple(shape)), marks)


def refuse_state(module: nn.Module, whose: str) -> None:
    """Makes `state_dict()` of a module with sharded weights raise UsageError. The library itself uses `keep_vars`."""

    def refuse(module: nn.Module, prefix: str, keep_vars: bool) -> None:
        if not keep_vars:
            what = f"state_dict() of {whose}, would contain only this worker's shards"
            raise UsageError(what, "write the full weights with export(), or read them from a checkpoint")

    module.register_state_dict_pre_hook(refuse)


def cut_in_rows(
    params: Mapping[str, torch.Tensor], cuts: Mapping[str, ShardingSpec], count: int, unit: int = 1
) -> dict[str, ShardingSpec]:
    """The sharding of parameters when each worker's part under `cuts` is divided by rows among `count` units.

    A parameter without a sharding in `cuts` counts as full on all workers of a `unit`.
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


def optimizer_state_ratio(optimizers: Sequence[Optimizer]) -> float:
    """Bytes of optimizer state for each byte of parameters, measured on a small parameter.

    An optimizer that cannot be made for a small parameter counts as Adam, with 2 bytes.
    """
    kept = total = 0.0
    for one in optimizers:
        bytes_, state = sum(p.nbytes for g in one.param_groups for p in g["params"]), probe_state(one)
        each = 2.0 if state is None else sum(value.numel() for value in state.values() if value.dim()) / _SIDE**2
        kept, total = kept + each * bytes_, total + bytes_
    return kept / total if total else 0.0


def probe_state(optimizer: Optimizer) -> dict[str, torch.Tensor] | None:
    """State tensors after one step of an optimizer of the same class on a small parameter; None if that fails."""
    probe = nn.Parameter(torch.zeros(_SIDE, _SIDE, dtype=torch.float32))
    probe.grad = torch.zeros_like(probe)
    try:
        with torch.random.fork_rng(devices=[]):  # it may draw
            made = optimizer_like(optimizer, [probe])
            made.step()
    except PROBE_ERRORS:  # the class needs other arguments
        return None
    return {key: value for key, value in made.state[probe].items() if isinstance(value, torch.Tensor)}


def optimizer_like(optimizer: Optimizer, params: Sequence[torch.Tensor]) -> Optimizer:
    """Returns an optimizer of the same class and options for other parameters. Raises an error of `PROBE_ERRORS` if the
    class needs other arguments.
    """
    # A class may have defaults of its base that it does not take as arguments, as AdamW has.
    taken = inspect.signature(type(optimizer)).parameters
    takes_any = any(one.kind is one.VAR_KEYWORD for one in taken.values())
    options = {name: value for name, value in optimizer.defaults.items() if takes_any or name in taken}
    return type(optimizer)(params, **options)


def refuse_odd_state(optimizer: Optimizer, names: Mapping[int, str], cuts: Mapping[str, ShardingSpec]) -> None:
    """Raises UsageError if the state of a sharded parameter is neither a number nor has the shape of the shard.

    For other shapes it is unknown which part of the full state a tensor is.
    """
    for param, state in optimizer.state.items():
        name = names.get(id(param), "")
        for key, value in state.items() if name in cuts else ():
            if isinstance(value, torch.Tensor) and value.numel() != 1 and value.shape != param.shape:
                what = (
                    f"{type(optimizer).__name__} keeps {key!r} of shape {tuple(value.shape)} for {name}, but this "
                    f"worker's shard of {name} has shape {tuple(param.shape)}: the state can be neither saved nor moved"
                )
                cure = "use an optimizer whose state has the shape of its parameter (AdamW), or a plan with only data="
                raise UsageError(what, cure)


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
    probe = probe_state(optimizer) if single else None
    # For a parameter without dimensions, a count of steps has the same shape as the state of its element.
    others = {"step"} if probe is None else {key for key, value in probe.items() if value.dim() == 0}

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
    """Returns a model's state dict, with shards as ShardedTensor. Raises UsageError for a parameter that would be saved
    with another shape than the full parameter has.
    """
    state = in_pieces(job.model.state_dict(keep_vars=True), job.cuts, job.shard_index)
    for name in job.shapes.keys() & state.keys() if job.cuts else ():
        if (shape := tuple(state[name].shape)) != job.shapes[name]:
            what = f"{name} has shape {shape}, but had shape {job.shapes[name]} when the Trainer was created"
            raise UsageError(what, "do not change the shapes of parameters after creating the Trainer")
    return state


def with_masters(model: nn.Module, named: Mapping[str, nn.Parameter], saved: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the model's part of a `saved` state, with the master copies of its parameters in the place of bfloat16
    weights.
    """
    masters, names = saved.get("masters") or {}, {id(param): name for name, param in named.items()}
    tensors = model.state_dict(keep_vars=True)
    aliases = {alias: masters[name] for alias, tensor in tensors.items() if (name := names.get(id(tensor))) in masters}
    return {**saved["model"], **aliases}


def frozen(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that are not trained, by each of their names."""
    return {name: p for name, p in model.named_parameters(remove_duplicate=False) if not p.requires_grad}


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
    """Returns a saved script value; its copies of parameters are full where those of the `given` value are."""
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
        put_full(value, tensor, cuts[name] if tuple(value.shape) == cuts[name].shape else None, shard_index)
        state[name] = tensor
    model.load_state_dict(state, strict=True)


def put_full(full: torch.Tensor, tensor: torch.Tensor, cut: ShardingSpec | None, shard_index: int) -> None:
    """Copies a full value into a tensor of the model. With a `cut`, the tensor is this worker's shard."""
    if cut is None:
        local(tensor).copy_(full)
    else:
        cut.at(shard_index).put(full, local(tensor))


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
                f"a parameter group of the optimizer differs from the checkpoint in {', '.join(differing[:5])}",
                "create the same groups as the run that you resume, or start a new run",
            )
        numbers.update(zip(group_names, packed["params"], strict=True))
        groups.append({**packed, **{k: v for k, v in old.items() if k != "params"}})
    state = {numbers[name]: {key: _copy(value) for key, value in kept.items()} for name, kept in saved["state"].items()}
    besides = saved.get("besides") or {}
    optimizer.load_state_dict({"state": {**besides, **state}, "param_groups": groups})


def _copy(value: Any) -> Any:
    """Copies a tensor, because torch's optimizers keep the tensors that they load."""
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
    kind, more = type(optimizer).__name__, len(hidden) - 1
    others = f" and {more} more tensor{'s' if more > 1 else ''}" if more else ""
    lost = "they are" if more else "it is"
    what = f"{kind} keeps {kind}{hidden[0]}{others} outside of its state_dict()"
    return f"{what}: {lost} lost when the run resumes or a worker returns"


def _tensors(value: Any, name: str, depth: int = 4) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields the tensors in nested containers and in nested optimizers, each with its name."""
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
