"""Shows the script whole weights while workers hold shards.

In the script's own code, from the first Trainer on, a mode of torch's is on: in the body of a loop that of this turn,
elsewhere one for all. Code of ours takes it off (`by_pieces`), and puts it back for metrics (`in_metric`).

What reads a part gets the value of the whole, gathered where it has to be; what writes into a part, or into a view of
what was gathered, writes into the pieces; a change of each element by itself stays on the piece, and costs nothing
more. Of a weight that is on another stage of a pipeline nothing is here: such changes do nothing, and whatever needs a
value raises UsageError.
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

from paceline.comm.torch_private import (
    default_device_mode,
    function_modes_taken,
    keep_out_of_compile,
    push_function_mode,
    pytree,
)
from paceline.compute.job import TrainingJob
from paceline.compute.state_dict import change_copies, copies_like
from paceline.errors import UsageError
from paceline.parallel.tensor_parallel.op_rules import ELEMENTWISE, RULES
from paceline.parallel.tensor_parallel.redistribute import Redistributor, ShardPlacement
from paceline.parallel.tensor_parallel.sharded_mode import (
    AS_IT_IS,
    PART,
    ShardedTensorMode,
    Tensor,
    changes,
    logical,
    mark,
    part_of,
    tensors_in,
)

P = ParamSpec("P")
T = TypeVar("T")
ABSENT = "_paceline_absent"  # of a parameter that another stage has: its name and whole shape
_MIRROR = "_paceline_mirror"  # of a view of a gathered whole: which
_NOT_SHARDED = "_paceline_whole"  # of what was made of parts and is none
_turns = count()
_FIRST = ("tensor", "input", "self")  # what functions call their first argument
_READS = ("__iter__", "__int__", "__index__")  # their names are those of changes in place


class _Thread(threading.local):
    """What a thread has, as it has modes: the script's body and those of loops that it is in, of which the last one is
    on; how deep it is in code of ours, and how often it was.
    """

    def __init__(self) -> None:
        self.bodies: list[ScriptView] = []
        self.script: ScriptView | None = None
        self.metric = False  # of code that not all workers of a unit run
        self.quiet = self.calls = 0


@dataclass(eq=False)
class _Mirror:
    """A whole that was gathered, of which there are views; what is here of it, and what that was gathered after."""

    shard: torch.Tensor
    placement: ShardPlacement
    full: torch.Tensor
    stamp: Any


class HasParts(Protocol):
    """A trainer, as far as this matters here: see `ParallelJob.redistributors` and `mark_copies`."""

    @property
    def parts(self) -> list[Redistributor | None]: ...
    def mark_copies(self) -> None: ...


def mark_copies(tree: Any, job: TrainingJob) -> None:
    """Marks what a script keeps as what it was made of: copies of parameters that are cut, made before the loop."""
    params = dict(job.model.named_parameters(remove_duplicate=False))

    def change(copy: Tensor, name: str, path: Any) -> Tensor:
        like = params.get(name)
        if like is not None and copy.shape == like.shape and tuple(copy.shape) != job.cuts[name].shape:
            copy.__dict__.update({key: value for key, value in vars(like).items() if key in (PART, ABSENT)})
        return copy

    change_copies(tree, job, change)


def restored_copies(saved: Any, given: Callable[[], Any], job: TrainingJob) -> Any:
    """A script's value as it was saved, whose copies of weights are what those of the `given` one are."""
    mark_copies(found := copies_like(saved, given, job), job)
    return found


_state = _Thread()


def _arrange() -> None:
    """Puts the mode of the last body on, or takes it off in code of ours.

    It lies under modes of the script's, which may end first and then take the innermost one off. Torch's own one of the
    default device has to be the outermost.
    """
    here = _state
    here.bodies = [body for body in here.bodies if not body.is_over]
    others = [mode for mode in function_modes_taken() if not isinstance(mode, ScriptView)]
    under = [others.pop()] if others and others[-1] is default_device_mode() else []
    for mode in (*under, *(here.bodies[-1:] if not here.quiet else ()), *reversed(others)):
        push_function_mode(mode)


@contextmanager
def unfollowed() -> Iterator[None]:
    """Code of ours that the script calls: it sees pieces."""
    here = _state
    here.quiet, here.calls = here.quiet + 1, here.calls + 1
    if here.quiet == 1:
        _arrange()
    try:
        yield
    finally:
        here.quiet -= 1
        if not here.quiet:
            _arrange()


@contextmanager
def in_metric() -> Iterator[None]:
    """A metric of the script's, which one worker of a unit computes: it sees wholes, and cannot gather any."""
    here = _state
    before = here.quiet, here.metric
    here.quiet, here.metric = 0, True
    _arrange()
    try:
        yield
    finally:
        here.quiet, here.metric = before
        _arrange()


def refuse_in_metric(why: str) -> None:
    """Where values of a weight would be gathered. UsageError: in a metric, which not all workers of a unit compute."""
    if _state.metric:
        what = f"a metric needs values of a weight, of which {why}"
        raise UsageError(what, "compute it before evaluate(), where the script sees whole weights")


def _where() -> str:
    return "a metric" if _state.metric else "the script"


def by_pieces(function: Callable[P, T]) -> Callable[P, T]:
    """A function of ours that a body may call, which sees pieces."""

    @wraps(function)
    def called(*given: P.args, **named: P.kwargs) -> T:
        return call_by_pieces(function, *given, **named)

    return called


def call_by_pieces(function: Callable[P, T], *given: P.args, **named: P.kwargs) -> T:
    """Calls it as such a function. In a `partial`, a copy of that is one of what the function belongs to, too."""
    if not _state.bodies:
        return function(*given, **named)
    with unfollowed():
        return function(*given, **named)


def each_by_pieces(made: Iterator[T]) -> Iterator[T]:
    """The same for an iterator of ours."""
    turn = by_pieces(lambda: next(made, _END))
    try:
        while (one := turn()) is not _END:
            yield one
    finally:
        if isinstance(made, Generator):
            made.close()


_END: Any = object()


def with_bodies(loop: Iterator[T], trainers: Callable[[], Iterable[HasParts]]) -> Iterator[T]:
    """A loop of ours whose body sees whole weights of the trainers that there are in it."""
    inner, marked = each_by_pieces(loop), False
    try:
        for one in inner:
            parts = [moves for trainer in trainers() for moves in trainer.parts]
            if not parts:
                yield one
                continue
            if not marked:
                with unfollowed():
                    for trainer in trainers():
                        trainer.mark_copies()
            marked = True
            body = ScriptView(parts)
            body.begin()
            try:
                yield one
            finally:
                body.end()
    finally:
        cast(Generator[T], inner).close()


def see_whole_weights(trainers: Iterable[HasParts]) -> None:
    """The script, outside of loops as well, sees whole weights of these trainers from here on.

    A unit that comes to its team in the middle of the training goes through the script together, up to where the others
    are: its workers gather among themselves.
    """
    here = _state
    if here.script is not None:
        here.script.end()
    parts = [moves for trainer in trainers for moves in trainer.parts]
    here.script = ScriptView(parts) if parts else None
    if here.script is not None:
        here.script.begin()


class _Checked(Redistributor):
    """All workers of the unit do it at the same line of the script."""

    def _enter(self) -> None:
        refuse_in_metric("each worker has a part under tensor=")
        self.unit.enter("a weight that the script uses, of which each worker has a part", kind="tensor")

    def sum(self, x: Tensor) -> Tensor:
        self._enter()
        return super().sum(x)

    def join(self, x: Tensor, part: ShardPlacement) -> Tensor:
        self._enter()
        return super().join(x, part)

    def exchange(self, x: Tensor, have: ShardPlacement, want: ShardPlacement) -> Tensor:
        self._enter()
        return super().exchange(x, have, want)


class ScriptView(ShardedTensorMode):
    """The mode of one turn of a loop, or of the script outside of loops."""

    moves: Redistributor

    def __init__(self, cuts: Iterable[Redistributor | None]) -> None:
        found = [moves for moves in cuts if moves is not None]
        # With stages alone there are no parts to move.
        super().__init__(_Checked(found[0].unit) if found else None, RULES, _where)  # type: ignore[arg-type]
        self._turn = next(_turns)
        self.is_over, self._written = False, Counter[int]()  # by the memory of a piece
        self._several = len({moves.unit.size for moves in found}) > 1

    def begin(self) -> None:
        _state.bodies.append(self)
        _arrange()

    def end(self) -> None:
        """Also by the garbage collector, wherever that runs: the mode may stay on in the thread of the loop."""
        self.is_over = True
        _arrange()

    def __torch_function__(self, function: Any, types: Any, given: Any = (), named: Any = None) -> Any:
        here, named = _state, named or {}
        body = next((body for body in reversed(here.bodies) if not body.is_over), None)
        if here.quiet or body is None:
            return function(*given, **named)
        key = next((key for key in _FIRST if key in named), "") if not given else ""
        if key and "condition" not in named:
            given, named = (named[key],), {other: value for other, value in named.items() if other != key}
        return body.run_function(function, given, named)

    # -- which way a function goes --------------------------------------------------------------------------------

    def run_function(self, function: Any, given: Any, named: Any) -> Any:
        tensors = [*tensors_in((*given, *named.values()))]
        if not any(ABSENT in t.__dict__ or _MIRROR in t.__dict__ or part_of(t) for t in tensors):
            return function(*given, **named)
        name = function.__name__
        if name.startswith("_foreach_"):
            return self._one_by_one(name, given, named)
        if name == "__iter__":
            return iter(self.run_function(Tensor.unbind, given, named))
        absent = next((t for t in tensors if ABSENT in t.__dict__), None)
        if absent is not None:
            return self._without(absent, function, given, named)
        mirrors = [t for t in tensors if _MIRROR in t.__dict__]
        if mirrors and not any(map(part_of, tensors)):
            return self._mirrored(mirrors, function, given, named)
        for t in mirrors:
            self._refresh(t)
        if self._several and not (name in AS_IT_IS or name == "__get__"):
            what = f"{_where()} uses weights under tensor= of different sizes ({name.strip('_')})"
            raise UsageError(what, "give all trainers of the script the same tensor=, or compute it in the loss")
        return self._with_parts(function, name, given, named, tensors)

    def _with_parts(self, function: Any, name: str, given: Any, named: Any, tensors: list[Tensor]) -> Any:
        x: Any = given[0] if given else None
        part = part_of(x)
        if part is not None and _writes(name):
            self._written[x.untyped_storage().data_ptr()] += 1
        if name in ("__get__", "__set__") and part is not None:
            found = self._property(function, function.__self__.__name__, x, part, given[1:])
            if found is not NotImplemented:
                return found
        elif name not in AS_IT_IS and len(tensors) > 1:
            self._adopt(name, tensors)
        if name in ("__repr__", "__format__"):
            return function(self._gathered(x).requires_grad_(x.requires_grad), *given[1:], **named)
        if named.get("out") is not None:
            return self._with_wholes(function, name, given, named)
        made = self._each(function, name, given, named, tensors)
        if made is NotImplemented:
            made = super().run_function(function, given, named)
        if name in ("numpy", "__array__"):
            made.setflags(write=False)  # it is a copy
        for one in tensors_in([made]):
            if part_of(one) is None:
                one.__dict__[_NOT_SHARDED] = True
        return made

    def _property(self, function: Any, key: str, x: Tensor, part: ShardPlacement, given: Any) -> Any:
        if key == "nbytes":
            return math.prod(logical(x)) * x.element_size()
        if function.__name__ == "__get__":
            if key == "grad" and (found := function(x)) is not None:
                return mark(found, part) if Tensor.size(found) == Tensor.size(x) else found
            return NotImplemented
        value = given[0]
        whole = isinstance(value, Tensor) and part_of(value) is None and tuple(value.shape) == logical(x)
        if whole and key in ("data", "grad"):
            return function(x, mark(self.moves.narrow(value.detach(), part).clone(), part))
        return NotImplemented

    def _adopt(self, name: str, tensors: list[Tensor]) -> None:
        """What was made of a piece before the loop, as an average, is a piece as well."""
        like = next(t for t in tensors if part_of(t) is not None)
        part, shape, whole = part_of(like), Tensor.size(like), logical(like)
        assert part is not None
        if tuple(shape) == whole or name.strip("_") not in ELEMENTWISE:
            return
        for number, t in enumerate(tensors):
            if part_of(t) is not None or Tensor.size(t) != shape or _NOT_SHARDED in t.__dict__ or _MIRROR in t.__dict__:
                continue
            if shape[part.dim] == 1 and not (number == 0 and _writes(name)):  # it may be meant for each row of all
                what = f"nobody knows whether a tensor of shape {tuple(shape)} that {_where()} uses with a weight of"
                what = f"{what} shape {whole} is this worker's part of it"
                raise UsageError(what, "make it of the weight after its Trainer was made")
            mark(t, part)

    def _each(self, function: Any, name: str, given: Any, named: Any, tensors: list[Tensor]) -> Any:
        """A function of each element by itself, on pieces of one kind and what meets them."""
        if name.strip("_") not in ELEMENTWISE or name == "__bool__" or (_writes(name) and part_of(given[0]) is None):
            return NotImplemented
        kinds = {(part, Tensor.dim(t)) for t in tensors if (part := part_of(t)) is not None}
        if len(kinds) > 1 or any(Tensor.dim(t) > dims for t in tensors for _, dims in kinds):
            return NotImplemented
        ((part, dims),) = kinds

        def ours(t: Tensor) -> Tensor:
            dim = part.dim - dims + Tensor.dim(t)
            if part_of(t) is not None:
                return t
            return self.moves.share(t) if dim < 0 or t.size(dim) == 1 else self.moves.take(t, replace(part, dim=dim))

        if any(part_of(t) is None for t in tensors):
            given, named = pytree.tree_map_only(Tensor, ours, (given, named))
        made = function(*given, **named)
        return mark(made, part) if isinstance(made, Tensor) else made

    # -- wholes, and writing into them ------------------------------------------------------------------------------

    def _gathered(self, x: Tensor) -> Tensor:
        part = part_of(x)
        if part is None:
            return x
        with torch.no_grad():
            return self.moves.join(x.detach(), part)

    def _with_wholes(self, function: Any, name: str, given: Any, named: Any) -> Any:
        pairs: list[tuple[Tensor, ShardPlacement, Tensor, int]] = []
        first = given[0] if given and _writes(name) and part_of(given[0]) is not None else None

        def whole(x: Tensor) -> Tensor:
            part = part_of(x)
            if part is None:
                return x
            made = self._gathered(x) if x is first else self.moves.join(x, part)
            pairs.append((x, part, made, made._version))
            return made

        ours, more = pytree.tree_map_only(Tensor, whole, (given, named))
        made = function(*ours, **more)
        for x, part, full, version in pairs:
            if full._version != version:  # by a change in place, an `out` or an `inplace`
                if x.requires_grad and x.is_leaf and torch.is_grad_enabled():
                    x.add_(0)  # raises what torch says of it
                with torch.no_grad():
                    x.copy_(self.moves.narrow(full.detach(), part))
                self._written[x.untyped_storage().data_ptr()] += 1
                if made is full:
                    return x
        for x, part, full, _ in pairs:
            self._see_views(made, _Mirror(x.detach(), part, full, self._stamp(x)))
        return made

    def _refresh(self, view: Tensor) -> None:
        """The piece may have changed since."""
        mirror: _Mirror = view.__dict__[_MIRROR]
        if mirror.stamp != (stamp := self._stamp(mirror.shard)):
            with torch.no_grad():
                mirror.full.detach().copy_(self.moves.join(mirror.shard, mirror.placement))
            mirror.stamp = stamp

    def _stamp(self, piece: Tensor) -> Any:
        """Differs where a piece was written."""
        return self._turn, _state.calls, self._written[piece.untyped_storage().data_ptr()]

    def _mirrored(self, views: list[Tensor], function: Any, given: Any, named: Any) -> Any:
        """What uses or changes a view of a whole that was gathered."""
        if function.__name__ in AS_IT_IS or function.__name__ in ("__get__", "size", "dim"):
            made = function(*given, **named)
        else:
            for view in views:
                self._refresh(view)
            made = function(*given, **named)
            if _writes(function.__name__) and given and isinstance(given[0], Tensor) and _MIRROR in given[0].__dict__:
                mirror: _Mirror = given[0].__dict__[_MIRROR]
                with torch.no_grad():
                    mirror.shard.copy_(self.moves.narrow(mirror.full.detach(), mirror.placement))
                self._written[mirror.shard.untyped_storage().data_ptr()] += 1
                mirror.stamp = self._stamp(mirror.shard)
        for view in views:
            self._see_views(made, view.__dict__[_MIRROR])
        return made

    def _see_views(self, made: Any, mirror: _Mirror) -> None:
        """Marks what lies in the memory of a whole that was gathered."""
        memory = mirror.full.untyped_storage().data_ptr()
        for one in tensors_in(made if isinstance(made, (list, tuple)) else [made]):
            if one.untyped_storage().data_ptr() == memory:
                one.__dict__[_MIRROR] = mirror

    # -- lists of tensors, and what is not here ---------------------------------------------------------------------

    def _one_by_one(self, name: str, given: Any, named: Any) -> Any:
        """A function of lists of tensors, for each place in them."""
        call, length = getattr(Tensor, name.removeprefix("_foreach_")), len(given[0])
        made = []
        for place in range(length):
            own = [one[place] if isinstance(one, (list, tuple)) and len(one) == length else one for one in given]
            more = {key: one[place] if isinstance(one, (list, tuple)) else one for key, one in named.items()}
            if "addc" in name and len(own) > 3:
                more["value"] = own.pop()
            made.append(self.run_function(call, tuple(own), more))
        return None if name.endswith("_") else tuple(made)

    def _without(self, absent: Tensor, function: Any, given: Any, named: Any) -> Any:
        """A function of a weight that another stage has."""
        name, (whose, shape) = function.__name__, absent.__dict__[ABSENT]
        key = function.__self__.__name__ if name in ("__get__", "__set__") else name
        if key in ("shape", "size"):
            dim = named.get("dim", given[1] if len(given) > 1 and name != "__get__" else None)
            return torch.Size(shape) if dim is None else shape[dim]
        if key in ("numel", "nelement"):
            return math.prod(shape)
        if key == "__len__":
            return shape[0]
        others = [t for t in tensors_in((*given, *named.values())) if t is not absent]
        fits = all(ABSENT in t.__dict__ or t.dim() == 0 or t.shape == Tensor.size(absent) for t in others)
        if key == "data" or (key.strip("_") in ELEMENTWISE and fits):
            made = function(*given, **named)
            for one in tensors_in([made]):
                one.__dict__[ABSENT] = whose, shape
            return made
        if key in AS_IT_IS - {"__repr__"} or (name == "__get__" and key not in ("T", "mT", "H", "mH", "nbytes")):
            return function(*given, **named)
        what = f"{_where()} uses {whose} ({key.strip('_')}), and pipeline= leaves it to another worker"
        cure = "change each element by itself (clamp_, an average), write weights with export() and compute with those"
        raise UsageError(what, f"{cure}, or leave pipeline= out")


def _writes(name: str) -> bool:
    """Whether a function with this name writes into its first argument."""
    return changes(name) and name not in _READS


keep_out_of_compile(ScriptView)
