"""Makes a Trainer's optimizers and schedulers from optimizer= and schedule=, and refuses arguments that cannot work."""

from __future__ import annotations

import inspect
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, ReduceLROnPlateau

from paceline.base.sharding import ShardingSpec
from paceline.compute.job import TrainingJob
from paceline.compute.lr_schedules import OverTraining, OverTrainingLR, Plateau, cosine, plateau
from paceline.compute.state_dict import PROBE_ERRORS, marked, marks_of
from paceline.compute.update_coupling import Coupling, Scope, find_coupling
from paceline.errors import UsageError, add_hint
from paceline.plan import Plan
from paceline.session.error_hints import path_of, unfit


def optimizers_of(optimizer: Any, params: list[tuple[str, nn.Parameter]]) -> list[Optimizer]:
    """Calls the user's `optimizer` with the params and returns a list of optimizers. Raises UsageError for other
    results.
    """
    example = "write optimizer=lambda params: torch.optim.AdamW(params, lr=1e-3)"
    if isinstance(optimizer, Optimizer):
        name, lr = path_of(type(optimizer)), optimizer.defaults.get("lr", "...")
        what = f"optimizer= needs a function that makes an optimizer from params; got {name}(...) itself"
        raise UsageError(what, f"write optimizer=lambda params: {name}(params, lr={lr})")
    why, wants = unfit(optimizer, params)
    if why and inspect.isclass(optimizer):
        more = ", ".join(f"{name}=..." for name in wants)
        what = f"optimizer is {path_of(optimizer)} without its {' and '.join(wants)}"
        raise UsageError(what, f"write optimizer=lambda params: {path_of(optimizer)}(params, {more})")
    if why:
        raise UsageError(f"optimizer= cannot be called with the parameters: {why}", example)
    try:
        made = optimizer(params)
    except (AttributeError, TypeError) as error:
        if re.search("'(tuple|list)'|not (tuple|list)", str(error)):
            add_hint(error, "params are (name, parameter) pairs: write [(name, p) for name, p in params if p.ndim > 1]")
        raise
    optimizers = [made] if isinstance(made, Optimizer) or not isinstance(made, Iterable) else list(made)
    if not optimizers or not all(isinstance(one, Optimizer) for one in optimizers):
        cure = "return a torch optimizer, or a list of optimizers, created from params"
        raise UsageError(f"optimizer(params) returned {made!r:.60}", cure)
    for one in optimizers:
        closure = inspect.signature(one.step).parameters.get("closure")
        if closure is not None and closure.default is closure.empty:
            what = f"{type(one).__name__} evaluates the loss several times per step through a closure"
            raise UsageError(what, "use an optimizer without a closure, for example AdamW")
    return optimizers


def coupling_of(optimizer: Any, job: TrainingJob) -> tuple[Coupling, dict[str, tuple[int, int]]]:
    """Returns what the updates of the user's optimizers depend on, and the group of each parameter if the user's
    function sees full shapes without numbers. There are no groups if the function needs the numbers.
    """
    local_params, cuts = job.local_params, job.local_cuts
    shapes = {name: cuts[name].shape if name in cuts else tuple(param.shape) for name, param in local_params.items()}
    params = {
        name: marked(torch.empty(shapes[name], dtype=param.dtype, device="meta"), marks_of(param))
        for name, param in local_params.items()
    }
    groups = {}
    try:
        made = optimizers_of(optimizer, list(params.items()))
        groups = _groups(made, params)
    except PROBE_ERRORS:  # it wants to see numbers
        params = local_params
        made = optimizers_of(optimizer, list(local_params.items()))
    sparse = {name for name, param in job.named.items() if any(param is one for one in job.in_rows)}
    device = next(iter(local_params.values())).device
    make = lambda tiny: optimizers_of(optimizer, list(tiny.items()))  # noqa: E731
    return find_coupling(made, params, shapes, make, device, sparse), groups


def names_to_own(
    optimizer: Any, job: TrainingJob, coupling: Coupling, groups: Mapping[str, tuple[int, int]], plan: Plan
) -> frozenset[str] | None:
    """Returns the parameters that need an owner, which alone updates them in full; None if the optimizers need full
    copies on all workers.

    A parameter that a worker has in full anyway, such as those of a pipeline stage, needs no owner.
    """
    if coupling.scope != Scope.PARAMETER or not coupling.takes_empty or plan.local is not None or not groups:
        return None
    cuts = {name: cut for name, cut in job.local_cuts.items() if name in coupling.names}
    names = frozenset(n for n, cut in cuts.items() if all(piece.shape != cut.shape for piece in cut.pieces))
    shapes = {name: (0, *cuts[name].shape[1:]) for name in names}
    empty = {
        name: marked(torch.empty(shapes.get(name, param.shape), dtype=param.dtype, device="meta"), marks_of(param))
        for name, param in job.local_params.items()
    }
    try:
        is_alike = _groups(optimizers_of(optimizer, list(empty.items())), empty) == groups
    except PROBE_ERRORS:
        return None
    return names if is_alike else None


def refuse_spread(coupling: Coupling, plan: Plan) -> None:
    """Raises UsageError for optimizers whose update of a parameter depends on all others, if no server holds
    them all.
    """
    if coupling.scope == Scope.ALL and plan.divides_servers:
        division = f"server={plan.server} divides the parameters among {plan.server} servers"
        what = f"{coupling.kind} {coupling.why}, and {division}"
        raise UsageError(what, "use server=1, where one server holds all parameters, or an optimizer like AdamW")


def refuse_other_groups(
    optimizers: Sequence[Optimizer],
    groups: Mapping[str, tuple[int, int]],
    local_params: Mapping[str, nn.Parameter],
    cuts: Mapping[str, ShardingSpec],
) -> None:
    """Raises UsageError if a local shard gets into another group than the full parameter would."""
    for name, position in _groups(optimizers, local_params).items():
        if groups.get(name, position) != position:
            local_shape = tuple(local_params[name].shape)
            full_shape = cuts[name].shape if name in cuts else local_shape
            what = f"optimizer puts {name} into one group by its shape {full_shape} but into another group by the shape"
            raise UsageError(f"{what} {local_shape} of its local shard", "choose the groups by parameter name or ndim")


def _groups(optimizers: Sequence[Optimizer], params: Mapping[str, nn.Parameter]) -> dict[str, tuple[int, int]]:
    """Returns the numbers of each parameter's optimizer and group, for the parameters in `params`."""
    names = {id(param): name for name, param in params.items()}
    return {
        names[id(param)]: (number, index)
        for number, one in enumerate(optimizers)
        for index, group in enumerate(one.param_groups)
        for param in group["params"]
        if id(param) in names
    }


def left_out(optimizers: Sequence[Optimizer], params: Sequence[tuple[str, nn.Parameter]]) -> str:
    """Returns a note to the user about trainable parameters without an optimizer; empty if there are none. Raises
    UsageError if two optimizers hold the same parameter.
    """
    held = Counter(id(param) for one in optimizers for group in one.param_groups for param in group["params"])
    for name, param in params:
        if held[id(param)] > 1:
            what = f"{name} is in two optimizers, and both would update it"
            raise UsageError(what, "pass each parameter to only one of them")
    missing = [name for name, param in params if id(param) not in held]
    if not missing:
        return ""
    names = ", ".join(missing[:5]) + (", ..." if len(missing) > 5 else "")
    what = f"{len(missing)} of {len(params)} trainable parameters are in no optimizer and will not be updated: {names}"
    return f"{what}; pass them to an optimizer, or freeze them with requires_grad_(False)"


def refuse_fused(optimizers: Sequence[Optimizer], exact_shards: bool) -> None:
    """Raises UsageError for a user's own `fused` where it gives wrong results: with `exact` in shards (see
    `enable_fused`), and with parameters that are not contiguous.
    """
    for one in optimizers:
        groups = [group for group in one.param_groups if group.get("fused")]
        if exact_shards and groups:
            what = (
                f"{type(one).__name__} runs fused, which rounds the rows of a shard differently than those of the"
                " full tensor"
            )
            raise UsageError(what, "remove fused=True, or exact from the plan")
        if not all(param.is_contiguous() for group in groups for param in group["params"]):
            what = f"{type(one).__name__} runs fused, which needs contiguous parameters, and some are not"
            raise UsageError(what, "remove fused=True, or make the parameters contiguous")


def enable_fused(
    optimizers: list[Optimizer], device: torch.device, exact: bool, sparse: Sequence[nn.Parameter]
) -> list[str]:
    """Makes optimizers run fused if torch can and the user left `fused` open. Returns the names of those
    changed.

    Optimizers with a `sparse` parameter are left alone, and with `exact` all on a CPU: torch's fused kernels for CPUs
    round an element by its position in the tensor, so a shard's rows would differ from the same rows of the full
    tensor.
    """
    if exact and device.type == "cpu":
        return []
    known = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad)
    changed = []
    for one in optimizers:
        groups = one.param_groups
        if type(one) not in known or device.type not in ("cpu", "cuda"):
            continue
        params = [param for group in groups for param in group["params"]]
        even = all(param.is_contiguous() for param in params) and not {*map(id, params)} & {*map(id, sparse)}
        # A fused SGD fails where some parameters have momentum already and others get their first gradient.
        against = ("foreach", "differentiable", "momentum")
        open_ = all(group["fused"] is None and not any(map(group.get, against)) for group in groups)
        if open_ and even and all(map(torch.is_floating_point, params)):
            for group in groups:
                group["fused"] = True
            changed.append(type(one).__name__)
    return changed


def schedulers_of(schedule: Any, optimizers: Sequence[Optimizer], plan: Plan) -> list[LRScheduler]:
    """Returns one of torch's schedulers for each optimizer; none without a schedule. Raises UsageError, also for a
    schedule by reported values if optimizers of workers are at different steps.
    """
    schedulers = [scheduler_of(schedule, one) for one in optimizers] if schedule else []
    if (plan.local or plan.in_windows) and any(isinstance(one, ReduceLROnPlateau) for one in schedulers):
        what = f"schedule=paceline.plateau(...) does not work with {plan.several}, where workers are at different steps"
        raise UsageError(what, f"use a schedule of the step, or remove {plan.several}")
    return schedulers


def scheduler_of(schedule: Any, optimizer: Optimizer) -> LRScheduler:
    """Returns one of torch's schedulers: from its class or partial, from a factor as a function of the step, from a
    function of the optimizer, or from `paceline.plateau`. Raises UsageError.
    """
    if isinstance(schedule, Plateau):
        return schedule.on(optimizer)
    if isinstance(schedule, OverTraining):
        return OverTrainingLR(optimizer, schedule)
    of_torch = (LRScheduler, ReduceLROnPlateau)
    made = schedule.func if isinstance(schedule, partial) else schedule
    is_class = inspect.isclass(made) and issubclass(made, of_torch)
    kind: Any = made if is_class else type(made)
    if issubclass(kind, ReduceLROnPlateau):
        raise _of_each_step(kind, schedule.keywords if isinstance(schedule, partial) else {})
    why, wants = unfit(kind if isinstance(made, of_torch) else schedule, optimizer)
    if isinstance(made, of_torch) or (is_class and why):
        known = {name: value for name, value in vars(made).items() if isinstance(value, int | float)}
        more = ", ".join(f"{name}={known.get(name, '...')}" for name in wants)
        how = f" without its {' and '.join(wants)}" if is_class else "(...) of another optimizer"
        write = f"functools.partial({path_of(kind)}, {more})" if wants else path_of(kind)
        raise UsageError(
            f"schedule is {path_of(kind)}{how}", f"write schedule={write}; it is called once per optimizer step"
        )
    if is_class:
        return _checked_scheduler(schedule(optimizer), optimizer)
    if why:
        raise UsageError(f"schedule= cannot be called with the step: {why}", _FACTOR)
    if getattr(schedule, "__module__", "") == cosine.__module__ and "." not in schedule.__qualname__:
        name = f"paceline.{schedule.__name__}"
        example = f'{name}("loss")' if schedule is plateau else f"{name}(1000), with the total number of steps"
        raise UsageError(f"schedule is the function {name}, which creates a schedule", f"write schedule={example}")
    try:
        return LambdaLR(optimizer, schedule)
    except PROBE_ERRORS as error:  # a function of the optimizer cannot take a step, nor a factor an optimizer
        return _by_the_optimizer(schedule, optimizer, error)


_FACTOR = (
    "write schedule=lambda step: min(1.0, (step + 1) / 100), or "
    "schedule=functools.partial(torch.optim.lr_scheduler.CosineAnnealingLR, T_max=...)"
)


def _by_the_optimizer(schedule: Any, optimizer: Optimizer, of_step: Exception) -> LRScheduler:
    """Returns the scheduler that a function of the optimizer makes. It has failed with step 0; if it fails with the
    optimizer, too, the error is raised that is not about the type of the argument.
    """
    try:
        made = schedule(optimizer)
    except PROBE_ERRORS as error:
        takes = "not an Optimizer|'int' object (has no attribute|is not subscriptable)"
        raise (error if re.search(takes, str(of_step)) else of_step) from None
    if not isinstance(made, LRScheduler) and re.search(r"for \*: 'float'|can't multiply", str(of_step)):
        what = f"schedule does not return a factor of the learning rate for step 0 ({of_step})"
        raise UsageError(what, _FACTOR) from of_step
    return _checked_scheduler(made, optimizer)


def _checked_scheduler(made: Any, optimizer: Optimizer) -> LRScheduler:
    """Returns a scheduler, after checking that it and all schedulers inside of it belong to the optimizer."""
    queue = [made]
    while queue:
        one = queue.pop()
        if isinstance(one, ReduceLROnPlateau):
            raise _of_each_step(type(one), {})
        if not isinstance(one, LRScheduler):
            what = f"schedule(optimizer) returned {one!r:.60}"
            raise UsageError(what, "return a scheduler of torch; or, from a function of the step, a factor")
        if one.optimizer is not optimizer:
            what = f"schedule(optimizer) returned {path_of(type(one))} of another optimizer"
            raise UsageError(what, "create it for the optimizer that schedule= is called with")
        queue += getattr(one, "_schedulers", ())
    scheduler: LRScheduler = made
    return scheduler


def _of_each_step(kind: type, options: Mapping[str, Any]) -> UsageError:
    """Returns the error of a ReduceLROnPlateau without the name of the value that it follows."""
    more = "".join(f", {name}={value!r}" for name, value in options.items())
    what = f"schedule is {path_of(kind)}, which needs a value to follow"
    return UsageError(
        what,
        f'write schedule=paceline.plateau("loss"{more}), with the name of a value that evaluate() or log() reports',
    )
