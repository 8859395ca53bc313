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
from torch.utils.data import Sampler

from paceline.base.environment import World, memory_free
from paceline.base.memory import machine_memory
from paceline.base.sharding import ShardingSpec
from paceline.base.text import plural
from paceline.comm.torch_private import BatchNormBase
from paceline.compute.job import TrainingJob
from paceline.compute.lr_schedules import OverTraining, OverTrainingLR, Plateau, cosine, plateau
from paceline.compute.model_flops import ModelSkeleton
from paceline.compute.rng import RngState
from paceline.compute.sparse_grads import tables
from paceline.compute.state_dict import PROBE_ERRORS, marked, marks_of
from paceline.compute.update_coupling import Coupling, Scope, find_coupling
from paceline.errors import PlanError, UsageError, WorkersDifferError, a, add_hint, first_line
from paceline.plan import Plan
from paceline.session.error_hints import path_of, unfit
from paceline.team.spare_workers import refuse_spares

Schedule = Callable[..., Any]
T = TypeVar("T")
_COUNTED = {
    "global_batch": "the rows of one optimizer step",
    "epochs": "passes over the dataset, or count=, the optimizer steps",
    "count": "the optimizer steps",
    "seed": "the seed of all random streams",
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
_LOOP = "write `for report in trainer.steps(dataset, epochs=N):`"
_START = "choose the number of workers when you start the script: paceline run --workers N train.py"
# The place in Paceline of arguments that other libraries have, or that belong to another call of Paceline.
_BOTH = {
    "max_steps": "pass count={} to steps(), the number of optimizer steps",
    "max_epochs": "pass epochs={} to steps()",
    "num_train_epochs": "pass epochs={} to steps()",
    "num_workers": 'pass loader={{"num_workers": {}}} to steps()',
    "sampler": "pass it as order= to steps()",
    "batch_sampler": "pass it as order= to steps()",
    "callbacks": f"put their code into the body of the loop: {_LOOP}",
    "accelerator": "Paceline uses each worker's GPU, or the CPU on machines without one",
    "devices": _START,
    "num_nodes": _START,
    "strategy": 'workers are replicas by default; pass plan= to Trainer for more, for example plan="shard=2 zero=3"',
    "gradient_clip_val": "pass clip_norm={} to Trainer",
    "max_grad_norm": "pass clip_norm={} to Trainer",
    "accumulate_grad_batches": (
        "pass global_batch= to Trainer, the rows of one optimizer step; "
        "micro=N in the plan sets the rows computed at once"
    ),
    "fp16": (
        'the plan sets the precision, plan="precision=fp16" of Trainer; without it weights compute in their own dtype'
    ),
    "bf16": (
        'the plan sets the precision, plan="precision=bf16" of Trainer; without it weights compute in their own dtype'
    ),
}
_BOTH["gradient_accumulation_steps"] = _BOTH["accumulate_grad_batches"]
_ELSEWHERE = {
    **{(call, name): cure for call in ("Trainer", "steps()") for name, cure in _BOTH.items()},
    ("Trainer", "batch_size"): "did you mean global_batch=?",
    ("Trainer", "lr"): "write optimizer=lambda params: torch.optim.AdamW(params, lr={})",
    **{("Trainer", name): "pass it to steps(dataset, ...)" for name in _OF_STEPS},
    ("steps()", "batch_size"): "pass global_batch={} to Trainer",
    ("steps()", "shuffle"): "every epoch is shuffled; pass order= for another order",
    ("evaluate()", "batch_size"): "set micro={} in the plan, the rows computed at once",
}
_FSDP = ("torch.distributed.fsdp.fully_sharded_data_parallel", "FullyShardedDataParallel")
_WRAPPERS = {  # of a model, by the module and the name of the class
    ("torch.nn.parallel.distributed", "DistributedDataParallel"): "Paceline averages the gradients itself",
    ("torch.nn.parallel.data_parallel", "DataParallel"): "Paceline runs one worker for each GPU",
    _FSDP: 'use plan="shard=N" to shard it over N workers',
}


def missing_method(name: str) -> str:
    """Returns what to write instead of a method that other libraries' trainers have; empty for other names."""
    return f"; {_LOOP}" if name in ("fit", "train") else ""


def refuse_words(call: str, words: Mapping[str, Any], of: Callable[..., Any], plan: str | None = None) -> None:
    """Raises UsageError for keyword arguments that a `call` does not know: the parameters are those `of` a function.
    Words of the plan are named as such.
    """
    known = [name for name in inspect.signature(of).parameters if name not in ("self", "words")]
    plan_words = [name for name in words if call == "Trainer" and name in {row.name for row in fields(Plan)}]
    for name in words.keys() - set(plan_words):
        close = difflib.get_close_matches(name, known, n=1)
        cure = f"did you mean {close[0]}=?" if close else f"its arguments are {', '.join(known)}"
        raise UsageError(f"{call} has no argument {name}=", _ELSEWHERE.get((call, name), cure).format(words[name]))
    if plan_words:
        texts = [name if words[name] is True else f"{name}={words[name]}" for name in plan_words]
        verb = "belongs" if len(plan_words) == 1 else "belong"
        what = f"{' and '.join(f'{name}=' for name in plan_words)} {verb} in the plan, not in the arguments of Trainer"
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
        what = f"{name}= needs an integer, got {value!r}"
        raise UsageError(what, f"write {name}={round(value) if number else 'N'}, {_COUNTED[name]}") from None
    if count < 0 and name in ("epochs", "count"):
        raise UsageError(f"{name} must be at least 0, got {count}", f"write {name}=N, {_COUNTED[name]}")
    return count


# What else is checked by its kind: whether it fits, what is wanted, and what to write.
_KINDS: dict[str, tuple[Callable[[Any], bool], str, str]] = {
    "clip_norm": (
        lambda given: isinstance(given, int | float) and not isinstance(given, bool) and 0 < given < math.inf,
        "a finite number above 0, or None",
        "clip_norm=1.0, the largest norm of the mean gradient",
    ),
    "plan": (lambda given: isinstance(given, str), "a string", 'plan="micro=8 precision=bf16"'),
    "tensor": (
        lambda given: isinstance(given, Mapping),
        "a dict from layer names to cuts",
        'plan="tensor=2", and tensor={"blocks.*.up": "column", "blocks.*.down": "row"} if it cannot be inferred',
    ),
    "pipeline_blocks": (
        lambda given: isinstance(given, str),
        "the path of the list of blocks",
        'pipeline_blocks="model.layers", or "model.layers:5,9" to set the first block of each later stage',
    ),
    "loss_over": (lambda given: given == "batch", '"batch" or None', 'loss_over="batch"'),
    "collate": (callable, "a function of a list of samples", "collate=torch.utils.data.default_collate"),
    "order": (
        lambda given: callable(given) or isinstance(given, Sampler),
        "a function of (position, size, seed, epoch) or a sampler of torch",
        "order=paceline.sample_index",
    ),
    "loader": (lambda given: isinstance(given, Mapping), "a dict", 'loader={"num_workers": 2}'),
}


def check_types(**given: Any) -> None:
    """Raises UsageError for arguments of the wrong type, by their names. None stands for an argument that was
    left out.
    """
    for name, value in given.items():
        fits, wanted, write = _KINDS[name]
        if value is not None and not fits(value):
            raise UsageError(f"{name}= needs {wanted}; got {value!r:.60}", f"write {write}")


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
        what = f"{name}= needs a function of {takes}; got the class {path_of(given)}"
        raise UsageError(what, f"write {name}=lambda {example}")
    why, names = unfit(given.forward if isinstance(given, nn.Module) else given, None, None)[0], ""
    if code := getattr(given, "__code__", None):
        names = ", ".join(code.co_varnames[:2])
    if why or f"({names})" == f"({', '.join(reversed(takes[1:-1].split(', ')))})":
        why = why or f"it takes ({names})"
        raise UsageError(f"{name} cannot be called with {takes}: {why}", f"write {name}=lambda {example}")
    return given


def build_model(
    model: nn.Module | Callable[[], nn.Module],
    device: torch.device,
    streams: RngState,
    seed: int,
    plan: Plan,
    most: float | None = None,
) -> tuple[nn.Module, dict[str, Any]]:
    """Returns the model on its `device`, and further fields of its job. A function is called under a `seed`. A model
    that workers will shard under the `plan`, or whose parameters take more than `most` bytes, is built without memory
    for its large tensors; with `most` it is probed and not trained. With `precision=bf16:pure` its floating-point
    parameters and buffers become bfloat16.
    """
    dtype = torch.bfloat16 if plan.bf16_weights else None
    job_fields: dict[str, Any] = {"trains": most is None}
    if isinstance(model, nn.Module):
        return checked(model).to(device, dtype), job_fields | {"skeleton": ModelSkeleton(model)}
    with streams.preserved():
        streams.seed(seed)
        if plan.apart or most is not None:
            from paceline.parallel.deferred_init import CANNOT, build  # takes a while to import

            try:
                made, blueprint = build(lambda: _converted(_made(model), dtype))
                hooked = (n for n, p in made.named_parameters() if p._backward_hooks or p._post_accumulate_grad_hooks)
                why = next((f"{name} has a gradient hook" for name in hooked), "")
            except CANNOT as error:
                why = first_line(error)
            if not why and (most is None or sum(param.nbytes for param in made.parameters()) > most):
                return checked(made), job_fields | {"blueprint": blueprint, "skeleton": ModelSkeleton(made)}
            if why:
                job_fields["decisions"] = [("the complete model is built on each worker", why)]
            streams.seed(seed)
        made = checked(_made(model))
        return made.to(device, dtype), job_fields | {"skeleton": ModelSkeleton(made)}


def _converted(model: Any, dtype: torch.dtype | None) -> Any:
    return model.to(dtype) if dtype is not None and isinstance(model, nn.Module) else model


def _made(model: Any) -> Any:
    """Calls the user's function that builds the model. Raises UsageError if it is no function, or needs arguments."""
    why, wants = unfit(model)
    if why:
        more = ", ".join(f"{name}=..." for name in wants)
        kind = a(type(model).__name__)
        got = f"a function that requires {' and '.join(map(repr, wants))}" if wants else kind
        cure = f"write model={getattr(model, '__name__', 'Net')}({more})"
        raise UsageError(f"model= needs an nn.Module or a function without arguments that returns one; got {got}", cure)
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
    if plan.server and world.commands_fd is None:
        what = f"server={plan.server} needs additional server processes, which only `paceline run` starts"
        raise PlanError(
            what, "start the script with `paceline run`, without --max-restarts 0, or remove server= from the plan"
        )
    if world.spares:
        refuse_spares(plan, world.size, world.spares)
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
        f"{world.local_size} workers of this host share {plural(torch.cuda.device_count(), 'GPU')} and exchange data "
        "through the host's memory; one worker per GPU would be faster"
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


def room_of_worker(device: torch.device, peers: int) -> float:
    """Returns the bytes that this process may take, if its host's `peers` workers share what is free."""
    if device.type == "cuda":
        return float(torch.cuda.mem_get_info(device)[1])
    return memory_now(device) + min(memory_free(), machine_memory()) / peers


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
        cure = "hide the devices with CUDA_VISIBLE_DEVICES= or remove exact from the plan"
        raise PlanError(f"exact does not support {device.type.upper()} yet", cure)
    torch.set_num_threads(1)
    for rank, capability in enumerate(capabilities):
        if capability != capabilities[0]:
            what = (
                f"worker {rank} computes with {capability}, but worker 0 with {capabilities[0]}, so their results"
                " differ in rounding"
            )
            cure = (
                "use equal machines, or set ATEN_CPU_CAPABILITY and ONEDNN_MAX_CPU_ISA to the same values on all of"
                " them"
            )
            raise WorkersDifferError(what, cure)


def checked(model: Any) -> nn.Module:
    """Returns the model, after checking that it can be trained. Raises UsageError."""
    if not isinstance(model, nn.Module):
        raise UsageError(f"model is {a(type(model).__name__)}", "pass an nn.Module or a function that returns one")
    kind = type(model)
    if cure := _WRAPPERS.get((kind.__module__, kind.__name__)):
        raise UsageError(f"model is wrapped in {kind.__name__}", f"pass the model without the wrapper: {cure}")
    classes = {base for part in model.modules() for base in type(part).__mro__}
    if any(base.__name__ == "FSDPModule" and base.__module__.startswith("torch.distributed.") for base in classes):
        cure = f"pass the model as it was before fully_shard: {_WRAPPERS[_FSDP]}"
        raise UsageError("model is already sharded by torch's fully_shard", cure)
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if is_lazy(tensor):
            raise UsageError(
                f"{name} of the model is not initialised (a lazy module)",
                "pass the sizes to its constructor, or run one forward first",
            )
    return model


def trainable(model: nn.Module, plan: Plan, whole_batch: bool) -> dict[str, Any]:
    """Returns the trainable parameters by name, those with sparse gradients last, and the number of the latter. Raises
    UsageError.
    """
    named = {name: param for name, param in model.named_parameters() if param.requires_grad}
    if not named:
        raise UsageError(
            "the model has no trainable parameters", "call requires_grad_(True) on the parameters to train"
        )
    sparse_names = {id(param): name for name, param in tables(model) if param.requires_grad}
    plan_entries = [(row.name, value, word) for row, value, word in plan.stated_words() if row.name in _NOT_IN_ROWS]
    words = [word for name, value, word in plan_entries if value is True or value > (name != "delayed")]
    words += ['loss_over="batch"'] if whole_batch else []
    if sparse_names and words:
        table = next(iter(sparse_names.values())) or "the model"
        what = f"{table} gives sparse gradients, which {words[0]} does not support yet"
        raise UsageError(what, f"create it with sparse=False, or remove {words[0]}")
    order = sorted(named, key=lambda name: id(named[name]) in sparse_names)
    return {"named": {name: named[name] for name in order}, "sparse": len(sparse_names)}


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
                    what = (
                        f"the script now has {name}={now[name]}, but the run continues with {name}={group[name]} from"
                        " the checkpoint"
                    )
                    cure = "to change it, set it in the optimizer's param_groups after creating the Trainer"
                    say(f"{what}; {cure}", once=True)
        if saved["seed"] != self.seed:
            what = (
                f"the script now has seed={self.seed}, but the run continues with seed={saved['seed']} from the"
                " checkpoint"
            )
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


def refuse_other_places(places: int, before: int) -> None:
    """Raises PlanError for a trainer whose replicas have another size than those of earlier trainers."""
    if places not in (1, before):
        raise PlanError(
            f"this trainer has shard={places} and those before it shard={before}, and a worker that is lost takes a "
            "replica with it",
            "use the same plan for all trainers, or add --max-restarts 0, so that a lost worker ends the run",
        )


def refuse_twins(digests: list[str], when: str) -> None:
    """Raises UsageError if workers bring the same rows: they would count twice."""
    seen: dict[str, int] = {}
    for rank, digest in enumerate(digests):
        if digest and digest in seen:
            cure = (
                "seed the data of each worker differently, for example with paceline.stream_seed(seed, 0,"
                " paceline.join().rank)"
            )
            raise UsageError(f"workers {seen[digest]} and {rank} passed the same rows to {when}", cure)
        seen[digest] = rank


_DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)


def layers_at_rest(model: nn.Module) -> str:
    """Returns a message if dropout layers are in eval mode while the model trains, or BatchNorm layers together with
    the model; else empty.
    """
    kinds: dict[str, tuple[type, ...]] = {"dropout layer": _DROPOUTS}
    if not model.training:
        kinds["BatchNorm layer"] = (BatchNormBase,)
    counts = {
        kind: sum(isinstance(one, types) and not one.training and getattr(one, "p", 1) > 0 for one in model.modules())
        for kind, types in kinds.items()
    }
    layers = " and ".join(plural(count, kind) for kind, count in counts.items() if count)
    what = f"{layers} of the model {'is' if sum(counts.values()) == 1 else 'are'} in eval mode during training"
    cure = "from_pretrained() returns models in eval mode: write model=lambda: Net.from_pretrained(...).train()"
    return f"{what}; {cure}, unless this is intended" if layers else ""
