"""Validates the arguments of Trainer, chooses its plan and builds its model."""

from __future__ import annotations

import ast
import difflib
import inspect
import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.utils.data import Sampler

from paceline.base.environment import World
from paceline.base.text import plural
from paceline.comm.torch_private import BatchNormBase
from paceline.compute.model_flops import ModelSkeleton
from paceline.compute.rng import RngState
from paceline.compute.sparse_grads import tables
from paceline.errors import PlanError, UsageError, WorkersDifferError, a, first_line
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
}  # what each of these arguments counts
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


# Arguments that are checked by their kind: whether a value fits, what is needed, and what to write.
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


class SetOnce(Generic[T]):
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
    except (SyntaxError, ValueError):  # not Python, or cut off, since only the beginning of a script is kept
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


def settle_arithmetic(capabilities: Sequence[str], device: torch.device) -> None:
    """Prepares the process for `exact`: all workers must use the same instructions and one thread, or equal sums would
    differ. Raises PlanError and WorkersDifferError.
    """
    if device.type != "cpu":
        cure = "hide the devices with CUDA_VISIBLE_DEVICES= or remove exact from the plan"
        raise PlanError(f"exact does not support {device.type.upper()} yet", cure)
    torch.set_num_threads(1)
    for rank, capability in enumerate(capabilities):
        refuse_other_instructions(rank, capability, "worker 0", capabilities[0])


def refuse_other_instructions(worker: int, capability: str, others: str, usual: str) -> None:
    """Raises WorkersDifferError if a worker computes with other instructions of its processor than the `others`."""
    if capability != usual:
        what = f"worker {worker} computes with {capability}, but {others} with {usual}"
        cure = "use equal machines, or set ATEN_CPU_CAPABILITY and ONEDNN_MAX_CPU_ISA to the same values on all of them"
        raise WorkersDifferError(f"{what}, so their results differ in rounding", cure)


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
