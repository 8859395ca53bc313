"""Shows the script full weights while workers hold shards.

A torch function mode is on in the script's own code, from the first Trainer on: one mode for each iteration of a loop,
and one for the code outside of loops. The library's code takes it off (`without_script_view`), and puts it back for
metrics (`metric_view`).

Code that reads a shard gets the full value, gathered where necessary. Code that writes into a shard, or into a view of
a gathered tensor, writes into the shards of all workers. Elementwise changes run on the shard alone and cost nothing
more. A weight of another pipeline stage has no values on this worker: elementwise changes do nothing, and a function
that needs its values raises UsageError.
"""

from __future__ import annotations

import math
import threading
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import wraps
from itertools import count
from typing import Any, ParamSpec, Protocol, TypeVar, cast

import torch

from paceline.base.sharding import RowShards
from paceline.comm.communicator import Group
from paceline.comm.torch_private import (
    default_device_mode,
    function_modes_taken,
    keep_out_of_compile,
    push_function_mode,
    pytree,
)
from paceline.compute.job import TrainingJob
from paceline.compute.state_dict import change_copies, copies_like, local
from paceline.errors import UsageError
from paceline.parallel.tensor_parallel.op_rules import ELEMENTWISE, OP_RULES
from paceline.parallel.tensor_parallel.redistribute import Redistributor, ShardPlacement
from paceline.parallel.tensor_parallel.sharded_mode import (
    AS_IT_IS,
    MADE,
    PART,
    ShardedTensorMode,
    Tensor,
    full_shape_of,
    is_in_place,
    placement_of,
    set_placement,
    tensors_in,
)

P = ParamSpec("P")
T = TypeVar("T")
# Attributes of tensors.
ABSENT = "_paceline_absent"  # on a parameter of another pipeline stage: its name and full shape
_MIRROR = "_paceline_mirror"  # on a view of a gathered tensor: its _Mirror
_NOT_SHARDED = "_paceline_whole"  # on a full tensor that was computed from shards
_GATHERED_ROWS = "_paceline_gathered_rows"  # on a view of a shard whose rows were gathered: a write would be lost
ROWS_GROUP = "_paceline_unit"  # attribute of a DeviceMesh: the group of the workers on it
_view_numbers = count()
_FIRST = ("tensor", "input", "self")  # the names of functions' first arguments
_READS = ("__iter__", "__int__", "__index__")  # look like names of in-place functions


class _Thread(threading.local):
    """The state of one thread, as modes belong to threads."""

    def __init__(self) -> None:
        self.views: list[ScriptView] = []  # those of the script and of the loops it is in; the last one is on
        self.script_view: ScriptView | None = None  # the one for code outside of loops
        self.in_metric = False  # whether code runs that not all workers of a unit run
        self.off_depth = 0  # how many calls of the library's code are nested now
        self.off_count = 0  # how often the library's code was called


@dataclass(eq=False)
class _Mirror:
    """A gathered tensor that has views, this worker's shard of it, and the shard's version when it was gathered."""

    shard: torch.Tensor
    placement: ShardPlacement
    full: torch.Tensor
    version: Any


class HasParts(Protocol):
    """A trainer with sharded weights: see `ParallelJob.redistributors` and `mark_copies`."""

    @property
    def parts(self) -> list[Redistributor | None]:
        """What divides the layers of each model, in the order of the models."""

    def mark_copies(self) -> None:
        """Marks copies of parameters that the script made before the loop, as `mark_copies` below does."""


def mark_copies(tree: Any, job: TrainingJob) -> None:
    """Marks tensors that the script copied from split parameters before the loop as shards, like their parameters."""
    params = dict(job.model.named_parameters(remove_duplicate=False))

    def change(copy: Tensor, name: str, path: Any) -> Tensor:
        param = params.get(name)
        if param is not None and copy.shape == param.shape and tuple(copy.shape) != job.cuts[name].shape:
            copy.__dict__.update({key: value for key, value in vars(param).items() if key in (PART, ABSENT)})
        return copy

    change_copies(tree, job, change)


def restore_copies(saved_value: Any, original: Callable[[], Any], job: TrainingJob) -> Any:
    """Restores a script's saved value; its copies of weights become shards like those of the `original` value."""
    mark_copies(copies := copies_like(saved_value, original, job), job)
    return copies


_state = _Thread()


def _arrange() -> None:
    """Puts the innermost view of this thread on, or takes it off in the library's code.

    The view lies under the script's own modes: these may end first, and torch then takes off the innermost mode.
    Torch's mode for the default device has to be the outermost.
    """
    state = _state
    state.views = [view for view in state.views if not view.is_over]
    other_modes = [mode for mode in function_modes_taken() if not isinstance(mode, ScriptView)]
    lowest = [other_modes.pop()] if other_modes and other_modes[-1] is default_device_mode() else []
    for mode in (*lowest, *(state.views[-1:] if not state.off_depth else ()), *reversed(other_modes)):
        push_function_mode(mode)


@contextmanager
def script_view_off() -> Iterator[None]:
    """Takes the script's view off: the library's code in its body sees shards."""
    state = _state
    state.off_depth, state.off_count = state.off_depth + 1, state.off_count + 1
    if state.off_depth == 1:
        _arrange()
    try:
        yield
    finally:
        state.off_depth -= 1
        if not state.off_depth:
            _arrange()


@contextmanager
def metric_view() -> Iterator[None]:
    """Puts the script's view on for a metric, which one worker of a unit computes and which cannot gather weights."""
    state = _state
    previous = state.off_depth, state.in_metric
    state.off_depth, state.in_metric = 0, True
    _arrange()
    try:
        yield
    finally:
        state.off_depth, state.in_metric = previous
        _arrange()


def refuse_in_metric(reason: str) -> None:
    """Raises UsageError in a metric: weights cannot be gathered there, as not all workers of the unit compute it.

    `reason` names the plan word that shards the weight."""
    if _state.in_metric:
        problem = f"a metric uses a weight that {reason} shards over the workers"
        raise UsageError(problem, "compute the value before evaluate(), where the script sees full weights")


def _where() -> str:
    """Returns whose code is running, for messages."""
    return "a metric" if _state.in_metric else "the script"


def without_script_view(function: Callable[P, T]) -> Callable[P, T]:
    """Decorates a function of the library that the script may call, so that it sees shards."""

    @wraps(function)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> T:
        return call_without_script_view(function, *args, **kwargs)

    return wrapper


def call_without_script_view(function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
    """Calls a function so that it sees shards.

    Use `partial(call_without_script_view, bound_method)` where the result is deep-copied: then the copy is bound to the
    copied object.
    """
    if torch.compiler.is_dynamo_compiling() or not _state.views:
        return function(*args, **kwargs)
    with script_view_off():
        return function(*args, **kwargs)


def iterate_without_script_view(iterator: Iterator[T]) -> Iterator[T]:
    """Iterates an iterator of the library, which sees shards while it makes the next item."""
    next_item = without_script_view(lambda: next(iterator, _END))
    try:
        while (item := next_item()) is not _END:
            yield item
    finally:
        if isinstance(iterator, Generator):
            call_without_script_view(iterator.close)


_END: Any = object()


def with_script_views(loop: Iterator[T], trainers: Callable[[], Iterable[HasParts]]) -> Iterator[T]:
    """Iterates a loop of the library; the loop's body sees full weights of all `trainers`."""
    state, has_marked = _state, False
    try:
        while True:
            if state.views:
                with script_view_off():
                    item = next(loop, _END)
            else:
                item = next(loop, _END)
            if item is _END:
                return
            if state.script_view is None:  # no trainer has a part of a weight
                yield item
                continue
            if not has_marked:
                with script_view_off():
                    for trainer in trainers():
                        trainer.mark_copies()
            has_marked = True
            view = ScriptView([redistributor for trainer in trainers() for redistributor in trainer.parts])
            view.begin()
            try:
                yield item
            finally:
                view.end()
    finally:
        call_without_script_view(cast(Generator[T], loop).close)  # the script may leave the loop by a break


def start_script_view(trainers: Iterable[HasParts]) -> None:
    """Lets the script see full weights of these trainers from here on, also outside of loops.

    A unit that joins its team in the middle of training runs the script up to the others' position; its workers do this
    together, so they gather among themselves.
    """
    state = _state
    if state.script_view is not None:
        state.script_view.end()
    redistributors = [redistributor for trainer in trainers for redistributor in trainer.parts]
    state.script_view = ScriptView(redistributors) if redistributors else None
    if state.script_view is not None:
        state.script_view.begin()


class _Checked(Redistributor):
    """Checks before each exchange that all workers of the unit make it at the same line of the script."""

    def _declare(self, unit: Group | None = None) -> None:
        refuse_in_metric("tensor=" if unit is None else "expert=")
        (unit or self.unit).declare(
            "a sharded weight that the script uses", kind="tensor" if unit is None else "expert"
        )

    def sum(self, x: Tensor) -> Tensor:
        """Checks the call, then sums the tensors of all workers."""
        self._declare()
        return super().sum(x)

    def join(self, shard: Tensor, placement: ShardPlacement) -> Tensor:
        """Checks the call, then gathers the full tensor."""
        self._declare(placement.group)
        return super().join(shard, placement)

    def exchange(self, shard: Tensor, source: ShardPlacement, target: ShardPlacement) -> Tensor:
        """Checks the call, then turns the shard into one along another dimension."""
        self._declare()
        return super().exchange(shard, source, target)


class ScriptView(ShardedTensorMode):
    """The mode that shows full weights in one iteration of a loop, or in the script outside of loops."""

    redistributor: Redistributor

    def __init__(self, redistributors: Iterable[Redistributor | None]) -> None:
        active = [redistributor for redistributor in redistributors if redistributor is not None]
        # With only pipeline stages there are no shards to move.
        super().__init__(_Checked(active[0].unit) if active else None, OP_RULES, _where)  # type: ignore[arg-type]
        self._number = next(_view_numbers)
        self.is_over, self._write_counts = False, Counter[int]()  # by the address of a shard
        self._has_several_sizes = len({redistributor.unit.size for redistributor in active}) > 1

    def begin(self) -> None:
        """Puts the view on in this thread."""
        _state.views.append(self)
        _arrange()

    def end(self) -> None:
        """Takes the view off.

        The garbage collector may call this in another thread; then the mode stays on in its own thread until the next
        change there, but does nothing.
        """
        self.is_over = True
        _arrange()

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        state, kwargs = _state, kwargs or {}
        view = next((view for view in reversed(state.views) if not view.is_over), None)
        if state.off_depth or view is None:
            return function(*args, **kwargs)
        key = next((key for key in _FIRST if key in kwargs), "") if not args else ""
        if key and "condition" not in kwargs:
            args, kwargs = (kwargs[key],), {other: value for other, value in kwargs.items() if other != key}
        return view.run_function(function, args, kwargs)

    # -- which way a function goes --------------------------------------------------------------------------------

    def run_function(self, function: Any, args: Any, kwargs: Any) -> Any:
        """Runs a function of the script on shards, gathered tensors, views of these, or absent weights."""
        tensors = [*tensors_in((*args, *kwargs.values()))]
        if not any(ABSENT in t.__dict__ or _MIRROR in t.__dict__ or placement_of(t) for t in tensors):
            return function(*args, **kwargs)
        name = function.__name__
        if name.startswith("_foreach_"):
            return self._run_foreach(name, args, kwargs)
        if name == "__iter__":
            return iter(self.run_function(Tensor.unbind, args, kwargs))
        absent = next((t for t in tensors if ABSENT in t.__dict__), None)
        if absent is not None:
            return self._run_absent(absent, function, args, kwargs)
        if args and isinstance(args[0], Tensor) and _GATHERED_ROWS in args[0].__dict__ and _writes(name):
            problem = f"{_where()} writes into a view of a weight that zero=2 or zero=3 shards ({name.strip('_')})"
            raise UsageError(
                problem, "write into the weight itself (weight[...] = value, weight.copy_(...)), or use zero=1"
            )
        mirrors = [t for t in tensors if _MIRROR in t.__dict__]
        if mirrors and not any(map(placement_of, tensors)):
            return self._run_on_views(mirrors, function, args, kwargs)
        for t in mirrors:
            self._refresh(t)
        if self._has_several_sizes and not (name in AS_IT_IS or name == "__get__"):
            problem = f"{_where()} combines weights of trainers with different tensor= sizes ({name.strip('_')})"
            raise UsageError(problem, "give all trainers the same tensor=, or compute this in the loss")
        return self._run_on_shards(function, name, args, kwargs, tensors)

    # -- shards of which this worker has some rows ---------------------------------------------------------------------

    def _run_on_rows(self, function: Any, name: str, args: Any, kwargs: Any, tensors: list[Tensor]) -> Any:
        """Runs a function of shards that zero=2 or zero=3 divides once more by rows (DTensors).

        An elementwise function of such shards alone runs on the rows. Any other one runs on all rows of this worker's
        shards, which are gathered; what it has written into them is copied back.
        """
        kinds = {(placement_of(t), Tensor.size(t)) if _has_rows(t) else None for t in tensors}
        if name.strip("_") in ELEMENTWISE and name != "__bool__" and len(kinds) == 1 and kwargs.get("out") is None:
            result, placement = function(*args, **kwargs), placement_of(tensors[0])
            return set_placement(result, placement) if isinstance(result, Tensor) else result
        copies: list[tuple[Tensor, Tensor, int]] = []

        def gather(t: Tensor) -> Tensor:
            if not _has_rows(t):
                return t
            copy = set_placement(_copy_all_rows(t), placement_of(t))
            copies.append((t, copy, copy._version))
            return copy

        full_args, full_kwargs = pytree.tree_map_only(Tensor, gather, (args, kwargs))
        result = self.run_function(function, full_args, full_kwargs)
        for t, copy, version in copies:
            if copy._version != version:
                _write_rows(t, copy)
            if result is copy:
                return t
        storages = {copy.untyped_storage().data_ptr() for _, copy, _ in copies}
        for tensor in tensors_in(result if isinstance(result, (list, tuple)) else [result]):
            if _MIRROR in tensor.__dict__ or tensor.untyped_storage().data_ptr() in storages:
                tensor.__dict__[_GATHERED_ROWS] = True
        return result

    def _run_on_shards(self, function: Any, name: str, args: Any, kwargs: Any, tensors: list[Tensor]) -> Any:
        """Runs a function with some arguments that are shards."""
        x: Any = args[0] if args else None
        is_query = name in AS_IT_IS - {"__repr__"} or name in ("__get__", "size", "dim", "numel", "nelement")
        is_view = name == "__get__" and function.__self__.__name__ in MADE - {"data"}
        if any(map(_has_rows, tensors)) and (is_view or not is_query):
            return self._run_on_rows(function, name, args, kwargs, tensors)
        placement = placement_of(x)
        if placement is not None and _writes(name):
            self._write_counts[x.untyped_storage().data_ptr()] += 1
        if name in ("__get__", "__set__") and placement is not None:
            result = self._property(function, function.__self__.__name__, x, placement, args[1:])
            if result is not NotImplemented:
                return result
        elif name not in AS_IT_IS and len(tensors) > 1:
            self._mark_copies_of_shards(name, tensors)
        if name in ("__repr__", "__format__"):
            return function(self._gather_detached(x).requires_grad_(x.requires_grad), *args[1:], **kwargs)
        if kwargs.get("out") is not None:
            return self._with_wholes(function, name, args, kwargs)
        result = self._run_elementwise(function, name, args, kwargs, tensors)
        if result is NotImplemented:
            result = super().run_function(function, args, kwargs)
        if name in ("numpy", "__array__"):
            result.setflags(write=False)  # it is a copy
        for tensor in tensors_in([result]):
            if placement_of(tensor) is None:
                tensor.__dict__[_NOT_SHARDED] = True
        return result

    def _property(self, function: Any, key: str, x: Tensor, placement: ShardPlacement, args: Any) -> Any:
        if key == "nbytes":
            return math.prod(full_shape_of(x)) * x.element_size()
        if function.__name__ == "__get__":
            if key == "grad" and (gradient := function(x)) is not None:
                return set_placement(gradient, placement) if Tensor.size(gradient) == Tensor.size(x) else gradient
            return NotImplemented
        value = args[0]
        is_full = isinstance(value, Tensor) and placement_of(value) is None and tuple(value.shape) == full_shape_of(x)
        if is_full and key in ("data", "grad"):
            return function(x, set_placement(self.redistributor.narrow(value.detach(), placement).clone(), placement))
        return NotImplemented

    def _mark_copies_of_shards(self, name: str, tensors: list[Tensor]) -> None:
        """Marks tensors that were copied from a shard before the loop, such as an average, as shards."""
        shard = next(tensor for tensor in tensors if placement_of(tensor) is not None)
        placement, shard_shape, full_shape = placement_of(shard), Tensor.size(shard), full_shape_of(shard)
        assert placement is not None
        if tuple(shard_shape) == full_shape or name.strip("_") not in ELEMENTWISE:
            return
        for position, tensor in enumerate(tensors):
            if (
                placement_of(tensor) is not None
                or Tensor.size(tensor) != shard_shape
                or _NOT_SHARDED in tensor.__dict__
                or _MIRROR in tensor.__dict__
            ):
                continue
            # A tensor of length 1 may be meant to broadcast.
            if shard_shape[placement.dim] == 1 and not (position == 0 and _writes(name)):
                problem = (
                    f"{_where()} combines a weight of shape {full_shape} with a tensor of shape {tuple(shard_shape)}"
                )
                problem += ", which may or may not be a copy of this worker's shard"
                raise UsageError(problem, "create the tensor from the weight after creating the Trainer")
            set_placement(tensor, placement)

    def _run_elementwise(self, function: Any, name: str, args: Any, kwargs: Any, tensors: list[Tensor]) -> Any:
        """Runs an elementwise function on shards with the same placement and full tensors that are narrowed to it."""
        if (
            name.strip("_") not in ELEMENTWISE
            or name == "__bool__"
            or (_writes(name) and placement_of(args[0]) is None)
        ):
            return NotImplemented
        kinds = {(placement, Tensor.dim(t)) for t in tensors if (placement := placement_of(t)) is not None}
        if len(kinds) > 1 or any(Tensor.dim(t) > dims for t in tensors for _, dims in kinds):
            return NotImplemented
        ((placement, dims),) = kinds

        def as_shard(t: Tensor) -> Tensor:
            dim = placement.dim - dims + Tensor.dim(t)
            if placement_of(t) is not None:
                return t
            return (
                self.redistributor.share(t)
                if dim < 0 or t.size(dim) == 1
                else self.redistributor.take(t, replace(placement, dim=dim))
            )

        if any(placement_of(t) is None for t in tensors):
            args, kwargs = pytree.tree_map_only(Tensor, as_shard, (args, kwargs))
        result = function(*args, **kwargs)
        return set_placement(result, placement) if isinstance(result, Tensor) else result

    # -- gathered tensors, and writing into them --------------------------------------------------------------------

    def _gather_detached(self, x: Tensor) -> Tensor:
        placement = placement_of(x)
        if placement is None:
            return x
        with torch.no_grad():
            return self.redistributor.join(x.detach(), placement)

    def _with_wholes(self, function: Any, name: str, args: Any, kwargs: Any) -> Any:
        gathered: list[tuple[Tensor, ShardPlacement, Tensor, int]] = []
        first = args[0] if args and _writes(name) and placement_of(args[0]) is not None else None

        def gather(x: Tensor) -> Tensor:
            placement = placement_of(x)
            if placement is None:
                return x
            result = self._gather_detached(x) if x is first else self.redistributor.join(x, placement)
            gathered.append((x, placement, result, result._version))
            return result

        full_args, full_kwargs = pytree.tree_map_only(Tensor, gather, (args, kwargs))
        result = function(*full_args, **full_kwargs)
        for x, placement, full, version in gathered:
            if full._version != version:  # by a change in place, an `out` or an `inplace`
                if x.requires_grad and x.is_leaf and torch.is_grad_enabled():
                    x.add_(0)  # raises torch's own error for an in-place change of a leaf
                with torch.no_grad():
                    x.copy_(self.redistributor.narrow(full.detach(), placement))
                self._write_counts[x.untyped_storage().data_ptr()] += 1
                if result is full:
                    return x
        for x, placement, full, _ in gathered:
            self._mark_views(result, _Mirror(x.detach(), placement, full, self._write_version(x)))
        return result

    def _refresh(self, view: Tensor) -> None:
        """Gathers the tensor of a view again if its shard may have changed."""
        mirror: _Mirror = view.__dict__[_MIRROR]
        if mirror.version != (version := self._write_version(mirror.shard)):
            with torch.no_grad():
                mirror.full.detach().copy_(self.redistributor.join(mirror.shard, mirror.placement))
            mirror.version = version

    def _write_version(self, shard: Tensor) -> Any:
        """Returns a value that changes whenever the shard may have been written."""
        return self._number, _state.off_count, self._write_counts[shard.untyped_storage().data_ptr()]

    def _run_on_views(self, views: list[Tensor], function: Any, args: Any, kwargs: Any) -> Any:
        """Runs a function on views of gathered tensors; a change of a view is written into the shard."""
        if function.__name__ in AS_IT_IS or function.__name__ in ("__get__", "size", "dim"):
            result = function(*args, **kwargs)
        else:
            for view in views:
                self._refresh(view)
            result = function(*args, **kwargs)
            if _writes(function.__name__) and args and isinstance(args[0], Tensor) and _MIRROR in args[0].__dict__:
                mirror: _Mirror = args[0].__dict__[_MIRROR]
                with torch.no_grad():
                    mirror.shard.copy_(self.redistributor.narrow(mirror.full.detach(), mirror.placement))
                self._write_counts[mirror.shard.untyped_storage().data_ptr()] += 1
                mirror.version = self._write_version(mirror.shard)
        for view in views:
            self._mark_views(result, view.__dict__[_MIRROR])
        return result

    def _mark_views(self, result: Any, mirror: _Mirror) -> None:
        """Marks tensors that share the memory of a gathered tensor as its views."""
        storage = mirror.full.untyped_storage().data_ptr()
        for tensor in tensors_in(result if isinstance(result, (list, tuple)) else [result]):
            if tensor.untyped_storage().data_ptr() == storage:
                tensor.__dict__[_MIRROR] = mirror

    # -- lists of tensors, and weights of other stages --------------------------------------------------------------

    def _run_foreach(self, name: str, args: Any, kwargs: Any) -> Any:
        """Runs a `_foreach_` function of lists of tensors, one position after another."""
        call, length = getattr(Tensor, name.removeprefix("_foreach_")), len(args[0])
        results = []
        for position in range(length):
            item_args = [
                value[position] if isinstance(value, (list, tuple)) and len(value) == length else value
                for value in args
            ]
            item_kwargs = {
                key: value[position] if isinstance(value, (list, tuple)) else value for key, value in kwargs.items()
            }
            if "addc" in name and len(item_args) > 3:
                item_kwargs["value"] = item_args.pop()
            results.append(self.run_function(call, tuple(item_args), item_kwargs))
        return None if name.endswith("_") else tuple(results)

    def _run_absent(self, absent: Tensor, function: Any, args: Any, kwargs: Any) -> Any:
        """Runs a function of a weight of another pipeline stage; UsageError if it needs the weight's values."""
        name, (param_name, shape) = function.__name__, absent.__dict__[ABSENT]
        key = function.__self__.__name__ if name in ("__get__", "__set__") else name
        if key in ("shape", "size"):
            dim = kwargs.get("dim", args[1] if len(args) > 1 and name != "__get__" else None)
            return torch.Size(shape) if dim is None else shape[dim]
        if key in ("numel", "nelement"):
            return math.prod(shape)
        if key == "__len__":
            return shape[0]
        other_tensors = [t for t in tensors_in((*args, *kwargs.values())) if t is not absent]
        has_matching_shapes = all(
            ABSENT in t.__dict__ or t.dim() == 0 or t.shape == Tensor.size(absent) for t in other_tensors
        )
        if key == "data" or (key.strip("_") in ELEMENTWISE and has_matching_shapes):
            result = function(*args, **kwargs)
            for tensor in tensors_in([result]):
                tensor.__dict__[ABSENT] = param_name, shape
            return result
        if key in AS_IT_IS - {"__repr__"} or (name == "__get__" and key not in ("T", "mT", "H", "mH", "nbytes")):
            return function(*args, **kwargs)
        problem = f"{_where()} uses {param_name} ({key.strip('_')}), which pipeline= assigns to another worker"
        advice = "use only elementwise changes (clamp_, averages), or compute with weights written by export()"
        raise UsageError(problem, f"{advice}, or leave pipeline= out")


def _has_rows(t: Tensor) -> bool:
    """Whether a tensor is a DTensor: of its rows, this worker has some."""
    return hasattr(t, "_local_tensor")


def gather_rows(tensor: Any, what: str) -> Tensor:
    """Returns all rows of a DTensor. Collective; `what` describes it in error messages."""
    with vars(tensor.device_mesh)[ROWS_GROUP].declared_torch_group(what, "shard"):
        full: Tensor = tensor.detach().full_tensor()
    return full


def _copy_all_rows(tensor: Any) -> Tensor:
    refuse_in_metric("zero=2 or zero=3")
    full = gather_rows(tensor, "a sharded weight that the script uses")
    return full.clone() if full.data_ptr() == local(tensor).data_ptr() else full


def _write_rows(tensor: Any, full: Tensor) -> None:
    """Copies this worker's rows of a full tensor into a DTensor."""
    group = vars(tensor.device_mesh)[ROWS_GROUP]
    with torch.no_grad():
        local(tensor).copy_(RowShards(group.size, group.rank).of(full.detach(), group.rank))


def _writes(name: str) -> bool:
    """Whether a function with this name writes into its first argument."""
    return is_in_place(name) and name not in _READS


keep_out_of_compile(ScriptView)
