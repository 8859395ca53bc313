"""A torch function mode that runs the user's code on sharded tensors.

While `ShardedTensorMode` is on, a sharded tensor shows the shape of the full tensor, and torch's functions run on the
shards wherever that gives the shard of the result: shapes are translated, full operands are narrowed to the same shard,
and sums over the divided dimension are added up among the workers. Every other function gets the full tensors, gathered
from all workers. So the result is right for any code, and the rules only make it cheap. A dropout draws the mask of the
full tensor and keeps its shard of it, so the mask does not depend on the number of workers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from itertools import accumulate, product
from string import ascii_lowercase
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from paceline.comm.torch_private import (
    function_modes_taken,
    innermost_function_mode,
    pop_function_mode,
    push_function_mode,
    pytree,
)
from paceline.errors import UsageError
from paceline.parallel.tensor_parallel import redistribute
from paceline.parallel.tensor_parallel.redistribute import Redistributor, ShardPlacement, memory_order
from paceline.parallel.tensor_parallel.uncompiled_code import UncompiledCode, compiled_by_itself, is_flex_operator

Tensor = torch.Tensor
Rule = Callable[["ShardedTensorMode", Any, tuple[Any, ...], dict[str, Any]], Any]
PART, STRETCH = "_paceline_part", "_paceline_stretch"
# The attribute of tensors that `placement_of` and `set_placement` use. A tensor may be sharded in two ways, by tensor=
# and by context=.
_attribute = PART
UNKNOWN = object()  # returned by a rule that does not cover a case
_MOST = 16  # most sections of a fused weight that are tried
_active: list[_Mode] = []  # the modes that are entered, the innermost last
_uncompiled_code = UncompiledCode()

# Functions that run on a shard as on any tensor.
AS_IT_IS = {
    *("dim", "ndimension", "stride", "is_contiguous", "is_floating_point", "is_complex", "get_device", "element_size"),
    *("data_ptr", "register_hook", "retain_grad", "requires_grad_", "storage_offset", "untyped_storage", "backward"),
    *("__repr__", "__hash__", "__set__", "__delete__", "is_inference", "is_neg", "is_conj"),
}
MADE = {"T", "mT", "H", "mH", "data", "real", "imag"}  # properties that are tensors
# Conversions of one element, which must not use the rules of `bool`, `int`, `float`, ... without underscores.
_OF_ONE = ("__bool__", "__int__", "__float__", "__index__", "__contains__")


def placement_of(tensor: Any) -> ShardPlacement | None:
    """Returns the placement of a sharded tensor; None for full tensors and other values."""
    return (tensor.__dict__.get(_attribute) or None) if isinstance(tensor, Tensor) else None


def set_placement(tensor: Tensor, placement: ShardPlacement | None) -> Tensor:
    """Sets the placement of a tensor, or marks it as full with None, and returns the tensor."""
    tensor.__dict__[_attribute] = placement
    return tensor


def marks_of(tensor: Tensor) -> dict[str, ShardPlacement | None]:
    """Returns the placements of a tensor by attribute; there are two if it is sharded in two ways."""
    return {key: value for key, value in tensor.__dict__.items() if key in (PART, STRETCH)}


def shrink(param: torch.nn.Parameter, shape: Sequence[int], placement: ShardPlacement) -> None:
    """Makes a parameter, which has no values yet, a shard of this shape.

    It stays the same object, so other references to it (a list in a module, a closure) see the shard.
    """
    param.data = param.detach()[(0,) * param.dim()].expand(shape)
    set_placement(param, placement)


def full_shape_of(tensor: Tensor) -> tuple[int, ...]:
    """Returns the shape of the full tensor."""
    shape, placement = Tensor.size(tensor), placement_of(tensor)
    return (
        tuple(shape) if placement is None else (*shape[: placement.dim], placement.length, *shape[placement.dim + 1 :])
    )


def tensors_in(values: Any) -> Iterator[Tensor]:
    """Yields the tensors among values and in nested tuples, lists and dicts."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (tuple, list)):
            yield from tensors_in(value)
        elif isinstance(value, dict):
            yield from tensors_in(value.values())


class _Mode(TorchFunctionMode):
    """Base of the modes that intercept torch functions while they are entered and not suspended.

    `on` is the number of times that the mode is entered now. The placement of a tensor is kept in its `attribute`.
    """

    def __init__(self, redistributor: Redistributor, attribute: str = PART) -> None:
        super().__init__()
        self.redistributor, self.on, self.attribute = redistributor, 0, attribute
        self._suspensions = 0
        # For each time this mode was entered: a mode that has to stay the innermost one, or None.
        self._kept_innermost: list[Any] = []
        self.model: Any = None  # the model that this mode is for
        self.outranked_by: _Mode | None = None  # while that mode is on or suspended, this one does nothing

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Runs functions unchanged in its body."""
        self._suspensions += 1
        try:
            yield
        finally:
            self._suspensions -= 1

    @contextmanager
    def using_own_attribute(self) -> Iterator[None]:
        """Lets `placement_of` and `set_placement` use this mode's attribute in its body."""
        global _attribute
        previous, _attribute = _attribute, self.attribute
        try:
            yield
        finally:
            _attribute = previous

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if is_flex_operator(function):
            function = compiled_by_itself(function, _is_seen, modes_off)
        if self.is_off:
            return function(*args, **(kwargs or {}))
        global _attribute
        previous, _attribute = _attribute, self.attribute
        try:
            return self.run_function(function, args, kwargs or {})
        finally:
            _attribute = previous

    @property
    def is_off(self) -> bool:
        """Whether functions run unchanged, though this mode is entered."""
        main = self.outranked_by
        return bool(self._suspensions) or (main is not None and bool(main.on or main._suspensions))

    def run_function(self, function: Any, args: Any, kwargs: Any) -> Any:
        """Runs a torch function that this mode intercepted."""
        raise NotImplementedError

    def full_arguments(self, name: str, args: Any, kwargs: Any) -> Any:
        """Returns the arguments of the user's autograd function with this name, with gathered tensors for shards."""
        if self.is_off:
            return args, kwargs
        with torch._C.DisableTorchFunction(), self.using_own_attribute():
            return self.gather_arguments(name, args, kwargs)

    def gather_arguments(self, name: str, args: Any, kwargs: Any) -> Any:
        """Returns the arguments of a function with full tensors, gathered from all workers."""
        return pytree.tree_map_only(Tensor, self.gather_full, (args, kwargs))

    def __enter__(self) -> Any:
        self.on += 1
        if not _active:
            _intercept(True)
        _active.append(self)
        innermost = innermost_function_mode()
        entered = super().__enter__()  # type: ignore[no-untyped-call]
        # A mode that counts the torch functions of the user's code must see these, not the ones that rules call.
        kept_innermost = innermost if getattr(innermost, "stays_innermost", False) else None
        self._kept_innermost.append(kept_innermost)
        if kept_innermost is not None:
            kept_innermost.__enter__()
        return entered

    def __exit__(self, *error: Any) -> None:
        self.on -= 1
        _active.pop()
        if not _active:
            _intercept(False)
        if (kept_innermost := self._kept_innermost.pop()) is not None:
            kept_innermost.__exit__(*error)
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    def gather_full(self, tensor: Tensor) -> Tensor:
        """Returns the full tensor of a shard, gathered from all workers; full tensors are returned as they are."""
        placement = placement_of(tensor)
        if placement is None:
            return tensor
        full = self.redistributor.join(tensor, placement)
        full.__dict__.update((key, mark) for key, mark in marks_of(tensor).items() if key != self.attribute)
        return full


# Torch calls no function mode for `torch.autograd.Function.apply`, but for what the forward of such a function calls.
# So that would compute with full tensors, and the backward with the shards that the forward saved.
_PLAIN_APPLY = vars(torch.autograd.Function)["apply"]
_OWN_FUNCTIONS = ("torch.", "paceline.")  # these handle shards themselves, or pass them on


def _apply_to_full_tensors(cls: Any, *args: Any, **kwargs: Any) -> Any:
    """Takes the place of `torch.autograd.Function.apply` while a mode is on."""
    if torch.overrides.has_torch_function(args) and not cls.__module__.startswith(_OWN_FUNCTIONS):
        for mode in reversed(_active):
            args, kwargs = mode.full_arguments(cls.__name__, args, kwargs)
    return _PLAIN_APPLY.__func__(cls, *args, **kwargs)


def _intercept(is_on: bool) -> None:
    """Gives all of the user's autograd functions full tensors and runs compiled functions as Python, or no longer."""
    applies: Any = classmethod(_apply_to_full_tensors) if is_on else _PLAIN_APPLY
    torch.autograd.Function.apply = applies  # type: ignore[method-assign]
    if redistribute.trace is None:  # else torch compiles what the modes see
        _uncompiled_code.set(is_on)


@contextmanager
def suspend_other_modes(model: Any) -> Iterator[None]:
    """Suspends the modes of other models, whose forward or loss may call this model."""
    with ExitStack() as stack:
        for mode in _active:
            if mode.model is not None and mode.model is not model:
                stack.enter_context(mode.suspended())
        yield


def _is_seen() -> bool:
    """Whether a mode that is entered sees the next call."""
    mode = innermost_function_mode()
    return isinstance(mode, _Mode) and mode.on > 0


@contextmanager
def modes_off() -> Iterator[None]:
    """Takes the modes off in its body, as if they had not been entered. Other function modes stay."""
    taken, counts, active = function_modes_taken(), [(mode, mode.on) for mode in _active], [*_active]
    kept = [mode for mode in reversed(taken) if not isinstance(mode, _Mode)]
    _intercept(False)
    _active.clear()
    for mode, _ in counts:
        mode.on = 0
    for mode in kept:
        push_function_mode(mode)
    try:
        yield
    finally:
        for _ in kept:
            pop_function_mode()
        for mode in reversed(taken):
            push_function_mode(mode)
        _active[:] = active
        for mode, count in counts:
            mode.on = count
        _intercept(bool(active))


class ShardedTensorMode(_Mode):
    """Runs torch functions on shards, by `rules` for the functions' names.

    `where` returns the name of the running module for messages. `on_adapted` is called for each function that did not
    run unchanged, with its name, the placements that were gathered for it, and the section ends and the number of
    shards with which no gathering would have been needed, if these are known.
    """

    def __init__(
        self,
        redistributor: Redistributor,
        rules: Mapping[str, Rule],
        where: Callable[[], str],
        on_adapted: Callable[..., None] | None = None,
        attribute: str = PART,
    ) -> None:
        super().__init__(redistributor, attribute)
        self._rules, self.where, self.on_adapted = rules, where, on_adapted

    def run_function(self, function: Any, args: Any, kwargs: Any) -> Any:
        """Runs a function on shards by its rule, or on gathered tensors if no rule covers the case."""
        if not any(map(placement_of, tensors_in((*args, *kwargs.values())))):
            return self.run_unsharded(function, args, kwargs)
        name = function.__name__
        if name == "__get__":
            name = function.__self__.__name__
            if name not in self._rules:
                return set_placement(function(*args), placement_of(args[0])) if name == "data" else function(*args)
        elif name in AS_IT_IS:
            return function(*args, **kwargs)
        self._wished_ends: list[int] | None = None
        self._wished_count: int | None = None
        rule = None if name in _OF_ONE else self._rules.get(name) or self._rules.get(name.strip("_"))
        output = UNKNOWN if rule is None else rule(self, function, args, kwargs)
        return output if output is not UNKNOWN else self._with_wholes(function, name, args, kwargs)

    def run_unsharded(self, function: Any, args: Any, kwargs: Any) -> Any:
        """Runs a function that has no sharded arguments."""
        return self.alike(function, args, kwargs)

    def alike(self, function: Any, args: Any, kwargs: Any) -> Any:
        """Runs a function on full tensors, which all workers compute alike."""
        return function(*args, **kwargs)

    def _with_wholes(self, function: Any, name: str, args: Any, kwargs: Any) -> Any:
        if (is_in_place(name) and placement_of(args[0])) or any(map(placement_of, tensors_in([kwargs.get("out")]))):
            return self.write_into_shard(function, name, args, kwargs)
        args, kwargs = self._gather_noted(name, args, kwargs, self._wished_ends, self._wished_count)
        return self.alike(function, args, kwargs)

    def write_into_shard(self, function: Any, name: str, args: Any, kwargs: Any) -> Any:
        """Runs a function that writes into a shard although no rule covers it: raises UsageError."""
        problem = f"{self.where()} writes into the shard of a layer that tensor= splits ({name})"
        raise UsageError(problem, 'create a new tensor instead, or set that layer to "whole" in tensor=')

    def gather_arguments(self, name: str, args: Any, kwargs: Any) -> Any:
        """Returns the arguments of a function with full tensors, and reports it if there were shards among them."""
        return self._gather_noted(name, args, kwargs)

    def _gather_noted(self, name: str, args: Any, kwargs: Any, *wished: Any) -> Any:
        placements = [
            placement for placement in map(placement_of, tensors_in((*args, *kwargs.values()))) if placement is not None
        ]
        if placements:
            self.note(name, placements, *wished)
        return pytree.tree_map_only(Tensor, self.gather_full, (args, kwargs))

    def note(
        self,
        name: str,
        placements: Sequence[ShardPlacement],
        wished_ends: list[int] | None = None,
        wished_count: int | None = None,
    ) -> None:
        """Reports a function that did not run unchanged (see `on_adapted`)."""
        if self.on_adapted is not None:
            self.on_adapted(name, placements, wished_ends, wished_count)

    # -- building blocks of the rules ---------------------------------------------------------------------------------

    def product(
        self,
        call: Callable[..., Tensor],
        tensors: Sequence[Tensor],
        letters: Sequence[str],
        out: str,
        allowed: str = "",
    ) -> Any:
        """Returns the result of `call` on tensors whose dimensions have these letters, as in einsum.

        A letter that is not in `out` is summed over. All tensors must be sharded along the same letter, which must be
        among the `allowed` ones if there are some. UNKNOWN: the tensors cannot be combined without gathering.
        """
        divided = {
            dims[placement.dim]
            for t, dims in zip(tensors, letters, strict=True)
            if (placement := placement_of(t)) is not None
        }
        if len(divided) != 1 or (allowed and not divided <= {*allowed}):
            return UNKNOWN
        (letter,) = divided
        placements = [placement for placement in map(placement_of, tensors) if placement is not None]
        if any(placement.group is not None for placement in placements):  # its sums would be over another unit
            return UNKNOWN
        finest = max(placements, key=lambda placement: placement.count)
        count = finest.count if letter in out else self.redistributor.size
        if any(placement.sections != finest.sections or count % placement.count for placement in placements):
            return UNKNOWN
        target = replace(
            finest, count=count, layers=frozenset[str]().union(*(placement.layers for placement in placements))
        )
        if not target.is_even and any(placement.count != count for placement in placements):
            return UNKNOWN
        operands = [self._local_operand(t, target, dims.find(letter)) for t, dims in zip(tensors, letters, strict=True)]
        if any(t is None for t in operands):
            return UNKNOWN
        output = call(*operands)
        if letter in out:
            return set_placement(output, replace(target, dim=out.index(letter)))
        self.note("sum", ())
        return self.redistributor.sum(output)

    def _local_operand(self, tensor: Tensor, target: ShardPlacement, dim: int) -> Tensor | None:
        """Returns the operand of a sharded result: the tensor's shard along `dim`.

        That is the full tensor if it has no such dimension (-1) or is broadcast along it. None: the lengths differ.
        """
        placement = placement_of(tensor)
        if placement is not None:
            if placement.count != target.count:
                self.note("refine", ())
                return self.redistributor.refine(tensor, placement, target.count)
            return tensor
        if dim < 0 or Tensor.size(tensor, dim) == 1:
            return self.shared(tensor)
        if Tensor.size(tensor, dim) != target.length:
            return None
        self.note("narrow", ())
        return self.redistributor.take(tensor, replace(target, dim=dim))

    def shared(self, tensor: Tensor) -> Tensor:
        """Returns a full tensor for use with shards; its gradient is summed over the workers."""
        if tensor.requires_grad:
            self.note("share", ())
        return self.redistributor.share(tensor)

    def elementwise(self, call: Callable[..., Any], tensors: Sequence[Tensor]) -> Any:
        """Returns the result of an elementwise function of tensors whose shapes are broadcast."""
        most = max(Tensor.dim(t) for t in tensors)
        letters = ascii_lowercase[:most]
        return self.product(call, tensors, [letters[most - Tensor.dim(t) :] for t in tensors], letters)

    def view(self, function: Any, args: Any, kwargs: Any) -> Any:
        """Returns a view that keeps the divided dimension complete; UNKNOWN if it does not.

        A meta tensor of the full shape shows which dimension of the view that is.
        """
        x, placement = args[0], placement_of(args[0])
        if placement is None or any(isinstance(value, Tensor) for value in pytree.tree_leaves((args[1:], kwargs))):
            return UNKNOWN
        probe = torch.empty(full_shape_of(x), dtype=x.dtype, device="meta")
        views = pytree.tree_leaves(function(probe, *args[1:], **kwargs))
        dims = [_dim_with(view, placement.length, probe.stride(placement.dim)) for view in views]
        if None in dims:
            return UNKNOWN
        output = function(x, *args[1:], **kwargs)
        for view, dim in zip(pytree.tree_leaves(output), dims, strict=True):
            set_placement(view, replace(placement, dim=dim or 0))
        return output

    def reshape(self, x: Tensor, placement: ShardPlacement, target: Sequence[int], call: Callable[..., Tensor]) -> Any:
        """Returns a shard in another full shape; UNKNOWN if the reshaped tensor cannot stay sharded."""
        full_shape, elements, requested_shape = full_shape_of(x), math.prod(full_shape_of(x)), target
        known = math.prod(size for size in target if size != -1)
        target = tuple(elements // max(known, 1) if size == -1 else size for size in target)
        if math.prod(target) != elements or not elements:
            return UNKNOWN
        reshaped = reshape_placement(full_shape, placement, target)
        if reshaped is None:
            self._wish_for(full_shape, placement, target)
            return UNKNOWN
        local_shape = self.redistributor.shape(target, reshaped)
        if any(requested not in (-1, local) for requested, local in zip(requested_shape, local_shape, strict=True)):
            self.note("reshape", ())
        return set_placement(call(x, local_shape), reshaped)

    def _wish_for(self, full_shape: Sequence[int], placement: ShardPlacement, target: Sequence[int]) -> None:
        """Looks for sections and a number of shards with which the tensor could be reshaped, for `on_adapted`."""
        counts = [count for count in range(placement.count, 1, -1) if placement.count % count == 0]
        for sections, count in [*product(range(1, _MOST), counts), (1, 1)]:
            candidate = replace(placement, sections=(placement.length // sections,) * sections, count=count)
            if (
                placement.length % sections == 0
                and candidate.is_even
                and reshape_placement(full_shape, candidate, target) is not None
            ):
                self._wished_ends, self._wished_count = [*accumulate(candidate.sections)], count
                return

    def split(self, x: Tensor, placement: ShardPlacement, lengths: Sequence[int]) -> list[Tensor] | None:
        """Splits a shard into tensors of these full lengths along the divided dimension.

        None: some of them would not end where a section ends.
        """
        section_ends, bounds = {0, *accumulate(placement.sections)}, [*accumulate(lengths, initial=0)]
        if not section_ends >= {*bounds}:
            self._wished_ends = sorted({*section_ends, *bounds} - {0, placement.length}) + [placement.length]
            return None
        shards = x.split(self._local_lengths(placement, lengths), placement.dim)
        section_starts = [*accumulate(placement.sections, initial=0)]
        for number, (shard, start) in enumerate(zip(shards, bounds, strict=False)):
            sections = tuple(
                s
                for s, section_start in zip(placement.sections, section_starts, strict=False)
                if start <= section_start < bounds[number + 1]
            )
            set_placement(shard, replace(placement, sections=sections))
        self.note("split", ())
        return list(shards)

    def _local_lengths(self, placement: ShardPlacement, lengths: Sequence[int]) -> list[int]:
        return [
            self.redistributor.shape((length,), ShardPlacement(0, (length,), placement.count))[0] for length in lengths
        ]

    def local_mask(self, x: Tensor, placement: ShardPlacement, draw: Callable[[Tensor], Tensor]) -> Tensor:
        """Returns this worker's shard of a mask that is drawn for the full tensor, in its memory order."""
        self.note("dropout", ())
        shape = (*x.shape[: placement.dim], placement.length, *x.shape[placement.dim + 1 :])
        order, back = memory_order(x)
        ones = torch.ones([shape[dim] for dim in order], dtype=x.dtype, device=x.device)
        return self.redistributor.narrow(draw(ones.permute(back)), placement)


class GatherMode(_Mode):
    """Gathers all sharded arguments of torch functions, so that code with sharded weights computes with full ones."""

    def run_function(self, function: Any, args: Any, kwargs: Any) -> Any:
        """Runs a function on gathered tensors, unless it only reads properties of a shard."""
        is_query = function.__name__ in AS_IT_IS or (
            function.__name__ == "__get__" and function.__self__.__name__ != "shape"
        )
        if not is_query and any(map(placement_of, tensors_in((*args, *kwargs.values())))):
            args, kwargs = self.gather_arguments(function.__name__, args, kwargs)
        return function(*args, **kwargs)


def reshape_placement(
    full_shape: Sequence[int], placement: ShardPlacement, target: Sequence[int]
) -> ShardPlacement | None:
    """Returns the placement of a reshaped tensor; None if it cannot stay sharded.

    Each worker's elements must be the same contiguous runs as before, in the same order.
    """
    inner_size = math.prod(full_shape[placement.dim + 1 :])
    runs, unit = [section * inner_size for section in placement.sections], placement.length * inner_size
    for dim, length in enumerate(target):
        target_inner = math.prod(target[dim + 1 :])
        block = length * target_inner
        if not target_inner or length == 1:
            continue
        if block % unit == 0:
            sections = runs * (block // unit) if block // unit <= max(full_shape) * len(runs) else []
        elif unit % block == 0:
            ends = [*accumulate(runs)]
            sections = runs[: ends.index(block) + 1] if block in ends else []
            sections = sections if sections * (unit // block) == runs else []
        else:
            continue
        # Uneven shards stay as they are if the length of a section does.
        count = 1 if target_inner == inner_size else placement.count
        if sections and all(run % target_inner == 0 and run // target_inner % count == 0 for run in sections):
            return replace(placement, dim=dim, sections=tuple(run // target_inner for run in sections))
    return None


def is_in_place(name: str) -> bool:
    """Whether a function with this name writes into its first argument."""
    return name.endswith("_") and (not name.endswith("__") or name.startswith("__i") or name == "__setitem__")


def _dim_with(view: Tensor, length: int, stride: int) -> int | None:
    """Returns the dimension of a view that has this length and stride; None if there is none."""
    pairs = [*zip(view.shape, view.stride(), strict=True)]
    return pairs.index((length, stride)) if (length, stride) in pairs else None
