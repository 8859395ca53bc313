"""Validates and prepares the arguments of Trainer."""

from __future__ import annotations

import ast
import difflib
import inspect
import math
import operator
import os
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, ReduceLROnPlateau

from paceline.base.environment import World
from paceline.base.sharding import ShardingSpec
from paceline.compute.job import TrainingJob
from paceline.compute.lr_schedules import Plateau, cosine, plateau
from paceline.compute.rng import RngState
from paceline.compute.sparse_grads import tables
from paceline.compute.state_dict import PROBE_ERRORS, marked, marks_of
from paceline.compute.update_coupling import Coupling, Scope, find_coupling
from paceline.errors import PlanError, UsageError, WorkersDifferError, a, add_hint, first_line
from paceline.plan import Plan
from paceline.session.error_hints import path_of, unfit

Schedule = Callable[..., Any]
T = TypeVar("T")
_COUNTED = {
    "global_batch": "the rows of one optimizer step",
    "epochs": "passes over the dataset, or count=, the optimizer steps",
    "count": "the optimizer steps",
    "seed": "from which all random streams follow",
}
_OPTIONS = (int, float, tuple, str, type(None))  # of an optimizer's group: what a script says in a line of text
_TORCHS = ("params", "param_names", "initial_lr", "foreach", "fused", "capturable", "differentiable")
_CALLED = {
    "loss": ("(output, batch)", "output, batch: torch.nn.functional.cross_entropy(output, batch[1])"),
    "forward": ("(model, batch)", "model, batch: model(batch[0])"),
}
_NOT_IN_ROWS = (
    "local",
    "delayed",
    "shard",
    "tensor",
    "pipeline",
    "context",
    "exact",
)  # words that do not know such gradients
_OF_STEPS = ("dataset", "epochs", "count", "collate", "order", "loader")
# What other libraries call an argument, or where it is said here.
_ELSEWHERE = {
    ("Trainer", "batch_size"): "did you mean global_batch=?",
    ("Trainer", "lr"): "write optimizer=lambda params: torch.optim.AdamW(params, lr={})",
    **{("Trainer", name): "say it in steps(dataset, ...)" for name in _OF_STEPS},
    ("steps()", "batch_size"): "say global_batch={} of the Trainer",
    ("steps()", "shuffle"): "each epoch has an order of its own, and order= says another",
    ("evaluate()", "batch_size"): "say micro={} in the plan, the rows that are computed at once",
}


def refuse_words(call: str, words: Mapping[str, Any], of: Callable[..., Any], plan: str | None = None) -> None:
    """Raises UsageError for keyword arguments that a `call` does not know: the parameters are those `of` a function.
    Words of the plan are named as such.
    """
    known = [name for name in inspect.signature(of).parameters if name not in ("self", "words")]
    plan_words = [name for name in words if call == "Trainer" and name in {row.name for row in fields(Plan)}]
    for name in words.keys() - set(plan_words):
        close = difflib.get_close_matches(name, known, n=1)
        cure = f"did you mean {close[0]}=?" if close else f"there are {', '.join(known)}"
        raise UsageError(f"{call} has no argument {name}=", _ELSEWHERE.get((call, name), cure).format(words[name]))
    if plan_words:
        texts = [name if words[name] is True else f"{name}={words[name]}" for name in plan_words]
        verb = "is a word" if len(plan_words) == 1 else "are words"
        what = f"{' and '.join(f'{name}=' for name in plan_words)} {verb} of the plan, and no argument of Trainer"
        raise UsageError(what, f'write plan="{" ".join([*(plan or "").split(), *texts])}"')


def whole_number(name: str, value: Any) -> int | None:
    """Returns an argument that counts something, or None. Raises UsageError for anything but a whole number
    from 0 on.
    """
    if value is None and name != "seed":
        return None
    try:
        if isinstance(value, bool):
            raise TypeError
        count = operator.index(value)
    except TypeError:
        number = isinstance(value, float) and 1 <= value < math.inf
        what = f"{name}={value!r} is {a(type(value).__name__)}, and a whole number is wanted"
        raise UsageError(what, f"write {name}={round(value) if number else 'N'}, {_COUNTED[name]}") from None
    if count < 0 and name in ("epochs", "count"):
        raise UsageError(f"{name}={count} is less than none", f"write {name}=N, {_COUNTED[name]}")
    return count


# What else is checked by its kind: whether it fits, what is wanted, and what to write.
_KINDS: dict[str, tuple[Callable[[Any], bool], str, str]] = {
    "clip_norm": (
        lambda given: isinstance(given, int | float) and not isinstance(given, bool) and 0 < given < math.inf,
        "a finite number above 0 is wanted, or None",
        "clip_norm=1.0, the largest norm of the mean gradient",
    ),
    "plan": (lambda given: isinstance(given, str), "one line of text is wanted", 'plan="micro=8 precision=bf16"'),
    "tensor": (
        lambda given: isinstance(given, Mapping),
        "a dict of names of layers is wanted",
        'plan="tensor=2", and tensor={"blocks.*.up": "column", "blocks.*.down": "row"} where it is not seen which',
    ),
    "pipeline_blocks": (
        lambda given: isinstance(given, str),
        "the path of a list of blocks is wanted",
        'pipeline_blocks="model.layers", or "model.layers:5,9" to say the first blocks of the later stages',
    ),
    "loss_over": (lambda given: given == "batch", '"batch" is wanted, or None', 'loss_over="batch"'),
    "collate": (callable, "a function of a list of rows is wanted", "collate=torch.utils.data.default_collate"),
    "order": (callable, "a function of (position, size, seed, epoch) is wanted", "order=paceline.sample_index"),
    "loader": (lambda given: isinstance(given, Mapping), "a dict is wanted", 'loader={"num_workers": 2}'),
}


def check_types(**given: Any) -> None:
    """Raises UsageError for arguments of the wrong type, by their names. None stands for an argument that was
    left out.
    """
    for name, value in given.items():
        fits, wanted, write = _KINDS[name]
        if value is not None and not fits(value):
            raise UsageError(f"{name}={value!r:.60} is {a(type(value).__name__)}, and {wanted}", f"write {write}")


class Fixed(Generic[T]):
    """An attribute that can be set once. Setting it again raises an AttributeError that says what to do instead."""

    def __init__(self, what: str) -> None:
        self.what = what

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, one: Any, owner: type) -> T:
        if one is not None and self.name not in one.__dict__:
            raise AttributeError(self.name)  # the owner's __getattr__ says why
        return self if one is None else one.__dict__[self.name]  # type: ignore[return-value]

    def __set__(self, one: Any, value: T) -> None:
        if self.name in one.__dict__:
            raise AttributeError(f"{type(one).__name__.lower()}.{self.name} cannot be replaced: {self.what}")
        one.__dict__[self.name] = value


def check_callable(name: str, given: Any) -> Any:
    """Returns a loss or a forward, after checking that it can be called with its arguments. Raises UsageError."""
    takes, example = _CALLED[name]
    if inspect.isclass(given):
        what = f"{name} is the class {path_of(given)}, and a function of {takes} is wanted"
        raise UsageError(what, f"write {name}=lambda {example}")
    why, names = unfit(given.forward if isinstance(given, nn.Module) else given, None, None)[0], ""
    if code := getattr(given, "__code__", None):
        names = ", ".join(code.co_varnames[:2])
    if why or f"({names})" == f"({', '.join(reversed(takes[1:-1].split(', ')))})":
        why = why or f"it takes ({names})"
        raise UsageError(f"{name} cannot be called with {takes}: {why}", f"write {name}=lambda {example}")
    return given


def build_model(
    model: nn.Module | Callable[[], nn.Module], device: torch.device, streams: RngState, seed: int, apart: bool
) -> tuple[nn.Module, dict[str, Any]]:
    """Returns the model on its `device` and further fields of its job. A function is called under a `seed`. With
    `apart` a model that workers will shard is built without memory for its large tensors.
    """
    job_fields: dict[str, Any] = {}
    if isinstance(model, nn.Module):
        return checked(model).to(device), job_fields
    with streams.preserved():
        streams.seed(seed)
        if apart:
            from paceline.parallel.deferred_init import CANNOT, build  # takes a while to import

            try:
                made, job_fields["blueprint"] = build(model)
                return checked(made), job_fields
            except CANNOT as error:
                job_fields["decisions"] = [("the model is built whole on each worker", first_line(error))]
            streams.seed(seed)
        return checked(_made(model)).to(device), job_fields


def _made(model: Any) -> Any:
    """Calls the user's function that builds the model. Raises UsageError if it is no function, or needs arguments."""
    why, wants = unfit(model)
    if why:
        more = ", ".join(f"{name}=..." for name in wants)
        what = f"wants {' and '.join(wants)}" if wants else f"is {a(type(model).__name__)}"
        cure = f"write model={getattr(model, '__name__', 'Net')}({more})"
        raise UsageError(f"model {what}, and an nn.Module or a function of nothing that makes one is wanted", cure)
    return model()


def refused_exports(script: str) -> Iterator[str]:
    """Yields notes to the user: calls of a Trainer's `export` in a script that will be refused, because of the file's
    suffix.
    """
    try:
        nodes = list(ast.walk(ast.parse(script)))
    except (SyntaxError, ValueError):  # it is no script, or but the beginning of one
        return
    names = {
        ast.unparse(target)
        for node in nodes
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call)
        for target in node.targets
        if ast.unparse(node.value.func).split(".")[-1] == "Trainer"
    }
    for call in nodes:
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr == "export":
            path = next((arg.value for arg in call.args[:1] if isinstance(arg, ast.Constant)), None)
            is_export = ast.unparse(call.func.value) in names and path != ""
            if is_export and isinstance(path, str) and Path(path).suffix != ".safetensors":
                what = f"note: {ast.unparse(call)} in line {call.lineno} will be refused"
                better = Path(path).with_suffix(".safetensors")
                yield f"{what}: only .safetensors files are written; name it {better}"


def choose_plan(world: World, script: str | None) -> tuple[Plan, Plan, str]:
    """Returns the plan, the plan of a trainer that may hold a full model on each worker, and where the plan came from.
    A plan from outside of the script wins. Raises PlanError.
    """
    text, origin = script or "", "script" if script else "default"
    if world.plan is not None:
        over = f" (over the script's {script!r})" if script and script != world.plan else ""
        text, origin = world.plan, world.plan_origin + over
    plan = Plan.parse(text).validate(world.size)
    if plan.server and world.orders_fd is None:
        what = f"server={plan.server} needs processes beside the workers, which `paceline run` alone starts"
        raise PlanError(what, "start the script with `paceline run`, without --max-restarts 0, or leave server out")
    return plan, plan.without(script or "", world.size), origin


def device_of(local_rank: int) -> torch.device:
    """Returns the device of the worker with this rank on its host, and makes it torch's current one."""
    if not torch.cuda.is_available():
        return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
    count = torch.cuda.device_count()
    torch.cuda.set_device(local_rank % count)
    return torch.device("cuda", local_rank % count)


def sharing(world: World, device: torch.device) -> str:
    """Returns a note to the user if workers of this host share a GPU; else an empty text."""
    if device.type != "cuda" or world.local_size <= torch.cuda.device_count():
        return ""
    return (
        f"workers of this host share a GPU: it has {torch.cuda.device_count()} for {world.local_size}; what they "
        "exchange goes through its memory, and one worker for each would be faster"
    )


def peak_memory(device: torch.device) -> int:
    """Returns the largest number of bytes that this process has used: on the device, or on a CPU in all."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if sys.platform == "win32":
        return 0
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << (10 if sys.platform.startswith("linux") else 0)


def memory_now(device: torch.device) -> int:
    """Returns the bytes that this process uses at present: on the device, or on a CPU in all."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    if not sys.platform.startswith("linux"):
        return peak_memory(device)
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def private_memory() -> int:
    """Returns the bytes of main memory that belong to this process alone."""
    if not sys.platform.startswith("linux"):
        return 0
    match = re.search(r"^RssAnon:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
    return int(match[1]) << 10 if match else 0


def settle_arithmetic(capabilities: Sequence[str], device: torch.device) -> None:
    """Prepares the process for `exact`: all workers must use the same instructions and one thread, or equal sums would
    differ. Raises PlanError and WorkersDifferError.
    """
    if device.type != "cpu":
        cure = "hide the devices with CUDA_VISIBLE_DEVICES= or leave exact out"
        raise PlanError(f"exact is not built for {device.type.upper()} yet", cure)
    torch.set_num_threads(1)
    for rank, capability in enumerate(capabilities):
        if capability != capabilities[0]:
            what = f"worker {rank} computes with {capability} and worker 0 with {capabilities[0]}: their bits differ"
            cure = "take equal machines, or set ATEN_CPU_CAPABILITY and ONEDNN_MAX_CPU_ISA alike on all of them"
            raise WorkersDifferError(what, cure)


def checked(model: Any) -> nn.Module:
    """Returns the model, after checking that it can be trained. Raises UsageError."""
    if not isinstance(model, nn.Module):
        raise UsageError(f"model is {a(type(model).__name__)}", "give an nn.Module or a function that returns one")
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if is_lazy(tensor):
            raise UsageError(f"{name} of the model has no size yet", "give the sizes, or run one forward first")
    return model


def trainable(model: nn.Module, plan: Plan, whole_batch: bool) -> dict[str, Any]:
    """Returns the trainable parameters by name, those with sparse gradients last, and the number of the latter. Raises
    UsageError.
    """
    named = {name: param for name, param in model.named_parameters() if param.requires_grad}
    if not named:
        raise UsageError("the model has no trainable parameters", "set requires_grad on those to be trained")
    sparse_names = {id(param): name for name, param in tables(model) if param.requires_grad}
    plan_entries = [(row.name, value, word) for row, value, word in plan.stated_words() if row.name in _NOT_IN_ROWS]
    words = [word for name, value, word in plan_entries if value is True or value > (name != "delayed")]
    words += ['loss_over="batch"'] if whole_batch else []
    if sparse_names and words:
        table = next(iter(sparse_names.values())) or "the model"
        what = f"{table} gives sparse gradients, which {words[0]} does not know yet"
        raise UsageError(what, f"make it with sparse=False, or leave {words[0]} out")
    order = sorted(named, key=lambda name: id(named[name]) in sparse_names)
    return {"named": {name: named[name] for name in order}, "sparse": len(sparse_names)}


def optimizers_of(optimizer: Any, params: list[tuple[str, nn.Parameter]]) -> list[Optimizer]:
    """Calls the user's `optimizer` with the params and returns a list of optimizers. Raises UsageError for other
    results.
    """
    example = "write optimizer=lambda params: torch.optim.AdamW(params, lr=1e-3)"
    if isinstance(optimizer, Optimizer):
        name, lr = path_of(type(optimizer)), optimizer.defaults.get("lr", "...")
        what = f"optimizer is {name}(...) itself, and a function that makes it of the params is wanted"
        raise UsageError(what, f"write optimizer=lambda params: {name}(params, lr={lr})")
    why, wants = unfit(optimizer, params)
    if why and inspect.isclass(optimizer):
        more = ", ".join(f"{name}=..." for name in wants)
        what = f"optimizer is {path_of(optimizer)} without its {' and '.join(wants)}"
        raise UsageError(what, f"write optimizer=lambda params: {path_of(optimizer)}(params, {more})")
    if why:
        raise UsageError(f"optimizer cannot be called with the params: {why}", example)
    try:
        made = optimizer(params)
    except (AttributeError, TypeError) as error:
        if re.search("'(tuple|list)'|not (tuple|list)", str(error)):
            add_hint(error, "params are (name, parameter) pairs: write [(name, p) for name, p in params if p.ndim > 1]")
        raise
    optimizers = [made] if isinstance(made, Optimizer) or not isinstance(made, Iterable) else list(made)
    if not optimizers or not all(isinstance(one, Optimizer) for one in optimizers):
        cure = "return a torch optimizer, or a list of them, made from params"
        raise UsageError(f"optimizer(params) returned {made!r:.60}", cure)
    for one in optimizers:
        closure = inspect.signature(one.step).parameters.get("closure")
        if closure is not None and closure.default is closure.empty:
            what = f"{type(one).__name__} computes the loss several times a step, by a closure"
            raise UsageError(what, "take an optimizer whose step() needs none, such as AdamW")
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


def refuse_spread(coupling: Coupling, plan: Plan) -> None:
    """Raises UsageError for optimizers whose update of a parameter depends on all others, if no server holds
    them all.
    """
    if coupling.scope == Scope.ALL and plan.divides_servers:
        division = f"server={plan.server} divides the parameters among {plan.server} servers"
        what = f"{coupling.kind} {coupling.why}, and {division}"
        raise UsageError(what, "say server=1, which has all parameters, or take an optimizer such as AdamW")


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
            what = f"optimizer puts {name} into one group by its shape {full_shape}, and into another by the part"
            raise UsageError(f"{what} {local_shape} that is here", "make the groups by names, or by ndim")


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
            what = f"{name} is in two optimizers, which would both update it"
            raise UsageError(what, "give each parameter to one of them")
    missing = [name for name, param in params if id(param) not in held]
    if not missing:
        return ""
    names = ", ".join(missing[:5]) + (", ..." if len(missing) > 5 else "")
    what = f"{len(missing)} of {len(params)} trainable parameters are in no optimizer and stay as they are: {names}"
    return f"{what}; give them to one, or freeze them with requires_grad_(False)"


@dataclass
class FromScript:
    """The settings of a script that its checkpoints keep: the seed, and the options of the optimizers' groups.
    `version` counts how often the weights had been written to when the trainer was made.
    """

    seed: int
    options: list[list[dict[str, Any]]]
    version: int

    @staticmethod
    def of(seed: int, optimizers: Sequence[Optimizer], model: nn.Module) -> FromScript:
        """Returns the settings of a new trainer."""
        options = [
            [{k: v for k, v in g.items() if k not in _TORCHS and isinstance(v, _OPTIONS)} for g in one.param_groups]
            for one in optimizers
        ]
        return FromScript(seed, options, _version(model))

    def saved(self) -> dict[str, Any]:
        """Returns the settings for a checkpoint."""
        return {"seed": self.seed, "options": self.options}

    def untrained(self, model: nn.Module) -> bool:
        """Returns whether nothing has written to the weights: no step, and no load."""
        return self.version == _version(model)

    def go_on(self, saved: Mapping[str, Any] | None, say: Callable[..., None]) -> int:
        """Takes the settings of a checkpoint, whatever the script says now, and tells the user of differences. Returns
        the seed.
        """
        saved = saved or self.saved()  # an older version's
        for old, new in zip(saved["options"], self.options, strict=False):
            for group, now in zip(old, new, strict=False):
                for name in (name for name in now if name in group and _plain(group[name]) != _plain(now[name])):
                    what = f"the script says {name}={now[name]} now, and {name}={group[name]} of the checkpoint goes on"
                    cure = "to change it, set it in the optimizer's param_groups after the Trainer is made"
                    say(f"{what}; {cure}", once=True)
        if saved["seed"] != self.seed:
            what = f"the script says seed={self.seed} now, and seed={saved['seed']} of the checkpoint goes on"
            say(f"{what}; to change it, start a new run in another --run-dir", once=True)
        self.seed, self.options = saved["seed"], saved["options"]
        return self.seed


def _plain(option: Any) -> Any:
    return list(option) if isinstance(option, tuple) else option


def _version(model: nn.Module) -> int:
    return sum(param._version for param in model.parameters())


def refuse_fused(optimizers: Sequence[Optimizer], exact_shards: bool) -> None:
    """Raises UsageError for a user's own `fused` where it gives wrong results: with `exact` in shards (see
    `enable_fused`), and with parameters that are not contiguous.
    """
    for one in optimizers:
        groups = [group for group in one.param_groups if group.get("fused")]
        if exact_shards and groups:
            what = f"{type(one).__name__} runs fused and would round the rows of a shard other than in the whole"
            raise UsageError(what, "leave fused out, or exact")
        if not all(param.is_contiguous() for group in groups for param in group["params"]):
            what = f"{type(one).__name__} runs fused, and would take parameters for contiguous that are not"
            raise UsageError(what, "leave fused out, or give the model contiguous parameters")


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
        what = (
            f"schedule=paceline.plateau(...) does not work with {plan.several}, where optimizers are at several steps"
        )
        raise UsageError(what, f"take a schedule of steps, or leave {plan.several} out")
    return schedulers


def scheduler_of(schedule: Any, optimizer: Optimizer) -> LRScheduler:
    """Returns one of torch's schedulers: from its class or partial, from a factor as a function of the step, from a
    function of the optimizer, or from `paceline.plateau`. Raises UsageError.
    """
    if isinstance(schedule, Plateau):
        return schedule.on(optimizer)
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
        how = f" without its {' and '.join(wants)}" if is_class else "(...) itself, made for another optimizer"
        write = f"functools.partial({path_of(kind)}, {more})" if wants else path_of(kind)
        raise UsageError(f"schedule is {path_of(kind)}{how}", f"write schedule={write}; it counts optimizer steps")
    if is_class:
        return _checked_scheduler(schedule(optimizer), optimizer)
    if why:
        raise UsageError(f"schedule cannot be called with the step: {why}", _FACTOR)
    if getattr(schedule, "__module__", "") == cosine.__module__ and "." not in schedule.__qualname__:
        name = f"paceline.{schedule.__name__}"
        example = f'{name}("loss")' if schedule is plateau else f"{name}(1000), with the steps in all"
        raise UsageError(f"schedule is {name}, which makes one", f"write schedule={example}")
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
        what = f"schedule gives no factor of the learning rate for step 0 ({of_step})"
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
            raise UsageError(what, "return one of torch's schedulers, or of a function of the step a factor")
        if one.optimizer is not optimizer:
            what = f"schedule(optimizer) returned {path_of(type(one))} of another optimizer"
            raise UsageError(what, "make it of the optimizer that it is called with")
        queue += getattr(one, "_schedulers", ())
    scheduler: LRScheduler = made
    return scheduler


def _of_each_step(kind: type, options: Mapping[str, Any]) -> UsageError:
    """Returns the error of a ReduceLROnPlateau without the name of the value that it follows."""
    more = "".join(f", {name}={value!r}" for name, value in options.items())
    what = f"schedule is {path_of(kind)}, which needs a value to follow, and a step has none but the loss of its rows"
    return UsageError(what, f'write schedule=paceline.plateau("loss"{more}), as evaluate() or log() names the value')


def refuse_other_places(places: int, before: int) -> None:
    """Raises PlanError for a trainer whose replicas have another size than those of earlier trainers."""
    if places not in (1, before):
        raise PlanError(
            f"this trainer has shard={places} and those before it shard={before}, and a worker that is lost takes a "
            "replica with it",
            "say the same for all trainers, or add --max-restarts 0: a loss then ends the run",
        )


def refuse_twins(digests: list[str], when: str) -> None:
    """Raises UsageError if workers bring the same rows: they would count twice."""
    seen: dict[str, int] = {}
    for rank, digest in enumerate(digests):
        if digest and digest in seen:
            cure = "seed each worker's own data apart, e.g. with paceline.stream_seed(seed, 0, paceline.join().rank)"
            raise UsageError(f"workers {seen[digest]} and {rank} brought the same rows to {when}", cure)
        seen[digest] = rank
