"""A torch function mode that runs the user's code on sharded tensors.

While `ShardedTensorMode` is on, a tensor that is a part says the shape of the whole, and torch's functions are carried
out on parts where that gives the part of the result: shapes are translated, what all have is narrowed to the same part,
sums over what is divided are added up among the workers. Whatever is not known to be of that kind gets the whole,
gathered from all: so the result is right for any code, and what is known here only makes it cheap. A dropout draws for
the whole and keeps its part of the mask: what is dropped does not depend on the workers.
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

from paceline.comm.torch_private import innermost_function_mode, pytree
from paceline.errors import UsageError
from paceline.parallel.tensor_parallel.redistribute import Redistributor, ShardPlacement, memory_order

Tensor = torch.Tensor
Rule = Callable[["ShardedTensorMode", Any, tuple[Any, ...], dict[str, Any]], Any]
PART = "_paceline_part"
_attribute = PART  # under which the part is kept that is asked for: a tensor may be one in two ways
UNKNOWN = object()  # what a rule returns that does not know a case
_MOST = 16  # sections of a fused weight that are looked for
_active: list[_Mode] = []  # modes that are entered, the innermost last

# Asked of a part as of any tensor, or done to it as it is.
AS_IT_IS = {
    *("dim", "ndimension", "stride", "is_contiguous", "is_floating_point", "is_complex", "get_device", "element_size"),
    *("data_ptr", "register_hook", "retain_grad", "requires_grad_", "storage_offset", "untyped_storage", "backward"),
    *("__repr__", "__hash__", "__set__", "__delete__", "is_inference", "is_neg", "is_conj"),
}
MADE = {"T", "mT", "H", "mH", "data", "real", "imag"}  # properties that are tensors
_OF_ONE = ("__bool__", "__int__", "__float__", "__index__", "__contains__")  # not to be taken for those without dashes


def part_of(tensor: Any) -> ShardPlacement | None:
    """Which part a tensor is, if it is one."""
    return (tensor.__dict__.get(_attribute) or None) if isinstance(tensor, Tensor) else None


def mark(tensor: Tensor, part: ShardPlacement | None) -> Tensor:
    tensor.__dict__[_attribute] = part
    return tensor


def logical(tensor: Tensor) -> tuple[int, ...]:
    """The shape of the whole."""
    shape, part = Tensor.size(tensor), part_of(tensor)
    return tuple(shape) if part is None else (*shape[: part.dim], part.length, *shape[part.dim + 1 :])


def tensors_in(values: Any) -> Iterator[Tensor]:
    """The tensors among arguments, and in nestings of them."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (tuple, list)):
            yield from tensors_in(value)
        elif isinstance(value, dict):
            yield from tensors_in(value.values())


class _Mode(TorchFunctionMode):
    """Sees every function of torch's while it is `on` (so often it has been entered) and not asleep. What is a part is
    kept as an `attribute` of tensors.
    """

    def __init__(self, moves: Redistributor, attribute: str = PART) -> None:
        super().__init__()
        self.moves, self.on, self.attribute = moves, 0, attribute
        self._asleep = 0
        self._above: list[Any] = []  # for each time it has been entered: a mode that stays the innermost one, or None
        self.model: Any = None  # that it was made for
        self.outranked_by: _Mode | None = None  # where this one is on or asleep, it is no business of ours

    @contextmanager
    def sleeping(self) -> Iterator[None]:
        """Functions in here are carried out as they stand."""
        self._asleep += 1
        try:
            yield
        finally:
            self._asleep -= 1

    @contextmanager
    def asked(self) -> Iterator[None]:
        """Parts in here are those of this one."""
        global _attribute
        before, _attribute = _attribute, self.attribute
        try:
            yield
        finally:
            _attribute = before

    def __torch_function__(self, function: Any, types: Any, given: Any = (), named: Any = None) -> Any:
        main = self.outranked_by
        if self._asleep or (main is not None and (main.on or main._asleep)):
            return function(*given, **(named or {}))
        global _attribute
        before, _attribute = _attribute, self.attribute
        try:
            return self.follow(function, given, named or {})
        finally:
            _attribute = before

    def follow(self, function: Any, given: Any, named: Any) -> Any:
        raise NotImplementedError

    def __enter__(self) -> Any:
        self.on += 1
        _active.append(self)
        outer = innermost_function_mode()
        made = super().__enter__()  # type: ignore[no-untyped-call]
        # One that counts the calls of the user's code must see these, and not what rules make of them.
        above = outer if getattr(outer, "stays_innermost", False) else None
        self._above.append(above)
        if above is not None:
            above.__enter__()
        return made

    def __exit__(self, *error: Any) -> None:
        self.on -= 1
        _active.pop()
        if (above := self._above.pop()) is not None:
            above.__exit__(*error)
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    def gather_full(self, tensor: Tensor) -> Tensor:
        part = part_of(tensor)
        return tensor if part is None else self.moves.join(tensor, part)


@contextmanager
def others_sleeping(model: Any) -> Iterator[None]:
    """The modes of other models do not see what this one does, which a forward or a loss of theirs calls."""
    with ExitStack() as stack:
        for mode in _active:
            if mode.model is not None and mode.model is not model:
                stack.enter_context(mode.sleeping())
        yield


class ShardedTensorMode(_Mode):
    """Follows parts through what is run under it, by `rules` of functions' names. `where` says in which module that is,
    `noted` is told of each function that was not carried out as it stands: its name, the parts that were gathered for
    it if any were, and where sections of them would have to end for it to do without.
    """

    def __init__(
        self,
        moves: Redistributor,
        rules: Mapping[str, Rule],
        where: Callable[[], str],
        noted: Callable[..., None] | None = None,
        attribute: str = PART,
    ) -> None:
        super().__init__(moves, attribute)
        self._rules, self.where, self._on_adapted = rules, where, noted

    def follow(self, function: Any, given: Any, named: Any) -> Any:
        if not any(map(part_of, tensors_in((*given, *named.values())))):
            return self.run_unsharded(function, given, named)
        name = function.__name__
        if name == "__get__":
            name = function.__self__.__name__
            if name not in self._rules:
                return mark(function(*given), part_of(given[0])) if name == "data" else function(*given)
        elif name in AS_IT_IS:
            return function(*given, **named)
        self._cuts: list[int] | None = None
        self._count: int | None = None
        rule = None if name in _OF_ONE else self._rules.get(name) or self._rules.get(name.strip("_"))
        found = UNKNOWN if rule is None else rule(self, function, given, named)
        return found if found is not UNKNOWN else self._with_wholes(function, name, given, named)

    def run_unsharded(self, function: Any, given: Any, named: Any) -> Any:
        """A function without parts among its arguments."""
        return self.alike(function, given, named)

    def alike(self, function: Any, given: Any, named: Any) -> Any:
        """What all workers compute alike."""
        return function(*given, **named)

    def _with_wholes(self, function: Any, name: str, given: Any, named: Any) -> Any:
        if (changes(name) and part_of(given[0])) or any(map(part_of, tensors_in([named.get("out")]))):
            what = f"{self.where()} writes into a part of a layer ({name})"
            raise UsageError(what, 'let it make another tensor, or say "whole" of that layer in tensor=')
        parts = [part for part in map(part_of, tensors_in((*given, *named.values()))) if part is not None]
        self.note(name, parts, self._cuts, self._count)
        given, named = pytree.tree_map_only(Tensor, self.gather_full, (given, named))
        return self.alike(function, given, named)

    def note(
        self, name: str, parts: Sequence[ShardPlacement], cuts: list[int] | None = None, count: int | None = None
    ) -> None:
        if self._on_adapted is not None:
            self._on_adapted(name, parts, cuts, count)

    # -- what rules are made of ---------------------------------------------------------------------------------------

    def product(
        self, call: Callable[..., Tensor], tensors: Sequence[Tensor], letters: Sequence[str], out: str, known: str = ""
    ) -> Any:
        """What `call` makes of tensors whose dimensions have these letters, as in einsum: a letter that is not in `out`
        is summed over. All parts must be along one letter, one of the `known` ones if there are some.
        """
        found = {own[part.dim] for t, own in zip(tensors, letters, strict=True) if (part := part_of(t)) is not None}
        if len(found) != 1 or (known and not found <= {*known}):
            return UNKNOWN
        (letter,) = found
        parts = [part for part in map(part_of, tensors) if part is not None]
        finest = max(parts, key=lambda part: part.count)
        count = finest.count if letter in out else self.moves.size
        if any(part.sections != finest.sections or count % part.count for part in parts) or finest.length % count:
            return UNKNOWN
        target = replace(finest, count=count, layers=frozenset[str]().union(*(part.layers for part in parts)))
        if not target.is_even:
            return UNKNOWN
        ours = [self._as(t, target, own.find(letter)) for t, own in zip(tensors, letters, strict=True)]
        if any(t is None for t in ours):
            return UNKNOWN
        made = call(*ours)
        if letter in out:
            return mark(made, replace(target, dim=out.index(letter)))
        self.note("sum", ())
        return self.moves.sum(made)

    def _as(self, tensor: Tensor, target: ShardPlacement, dim: int) -> Tensor | None:
        """What a tensor contributes to a result that is a part: its own piece along a dimension, or all of it where it
        has none (-1) or one that is repeated. None: that can't be.
        """
        part = part_of(tensor)
        if part is not None:
            if part.count != target.count:
                self.note("refine", ())
                return self.moves.refine(tensor, part, target.count)
            return tensor
        if dim < 0 or Tensor.size(tensor, dim) == 1:
            return self.shared(tensor)
        if Tensor.size(tensor, dim) != target.length:
            return None
        self.note("narrow", ())
        return self.moves.take(tensor, replace(target, dim=dim))

    def shared(self, tensor: Tensor) -> Tensor:
        """What all have, met with a part."""
        if tensor.requires_grad:
            self.note("share", ())
        return self.moves.share(tensor)

    def elementwise(self, call: Callable[..., Any], tensors: Sequence[Tensor]) -> Any:
        """Tensors whose shapes are broadcast to a common one."""
        most = max(Tensor.dim(t) for t in tensors)
        letters = ascii_lowercase[:most]
        return self.product(call, tensors, [letters[most - Tensor.dim(t) :] for t in tensors], letters)

    def viewed(self, function: Any, given: Any, named: Any) -> Any:
        """A view that leaves the divided dimension as it is: where to, a tensor without memory tells."""
        x, part = given[0], part_of(given[0])
        if part is None or any(isinstance(value, Tensor) for value in pytree.tree_leaves((given[1:], named))):
            return UNKNOWN
        probe = torch.empty(logical(x), dtype=x.dtype, device="meta")
        seen = pytree.tree_leaves(function(probe, *given[1:], **named))
        places = [_place(one, part.length, probe.stride(part.dim)) for one in seen]
        if None in places:
            return UNKNOWN
        made = function(x, *given[1:], **named)
        for one, place in zip(pytree.tree_leaves(made), places, strict=True):
            mark(one, replace(part, dim=place or 0))
        return made

    def reshaped(self, x: Tensor, part: ShardPlacement, shape: Sequence[int], call: Callable[..., Tensor]) -> Any:
        before, missing, given = logical(x), math.prod(logical(x)), shape
        rest = math.prod(size for size in shape if size != -1)
        shape = tuple(missing // max(rest, 1) if size == -1 else size for size in shape)
        if math.prod(shape) != missing or not missing:
            return UNKNOWN
        found = regrouped(before, part, shape)
        if found is None:
            self._wish_for(before, part, shape)
            return UNKNOWN
        local = self.moves.shape(shape, found)
        if any(asked not in (-1, own) for asked, own in zip(given, local, strict=True)):
            self.note("reshape", ())
        return mark(call(x, local), found)

    def _wish_for(self, before: Sequence[int], part: ShardPlacement, shape: Sequence[int]) -> None:
        """Looks for a division of what was cut with which it could be reshaped."""
        counts = [count for count in range(part.count, 1, -1) if part.count % count == 0]
        for sections, count in [*product(range(1, _MOST), counts), (1, 1)]:
            cut = replace(part, sections=(part.length // sections,) * sections, count=count)
            if part.length % sections == 0 and cut.is_even and regrouped(before, cut, shape) is not None:
                self._cuts, self._count = [*accumulate(cut.sections)], count
                return

    def divided(self, x: Tensor, part: ShardPlacement, lengths: Sequence[int]) -> list[Tensor] | None:
        """Pieces of these lengths along the dimension that is divided; None: some would not end where a section
        does.
        """
        ends, own = {0, *accumulate(part.sections)}, [*accumulate(lengths, initial=0)]
        if not ends >= {*own}:
            self._cuts = sorted({*ends, *own} - {0, part.length}) + [part.length]
            return None
        made = x.split(self._local(part, lengths), part.dim)
        starts = [*accumulate(part.sections, initial=0)]
        for number, (piece, first) in enumerate(zip(made, own, strict=False)):
            inside = tuple(s for s, at in zip(part.sections, starts, strict=False) if first <= at < own[number + 1])
            mark(piece, replace(part, sections=inside))
        self.note("split", ())
        return list(made)

    def _local(self, part: ShardPlacement, lengths: Sequence[int]) -> list[int]:
        return [self.moves.shape((length,), ShardPlacement(0, (length,), part.count))[0] for length in lengths]

    def masked(self, x: Tensor, part: ShardPlacement, draw: Callable[[Tensor], Tensor]) -> Tensor:
        """A mask that is drawn for the whole, of which we have our piece. As everywhere, in the order of the memory."""
        self.note("dropout", ())
        shape = (*x.shape[: part.dim], part.length, *x.shape[part.dim + 1 :])
        order, back = memory_order(x)
        whole = torch.ones([shape[dim] for dim in order], dtype=x.dtype, device=x.device)
        return self.moves.narrow(draw(whole.permute(back)), part)


class GatherMode(_Mode):
    """Whatever meets a part gets the whole: with weights that are parts, code computes what it does with whole ones."""

    def follow(self, function: Any, given: Any, named: Any) -> Any:
        asks = function.__name__ in AS_IT_IS or (
            function.__name__ == "__get__" and function.__self__.__name__ != "shape"
        )
        if not asks and any(map(part_of, tensors_in((*given, *named.values())))):
            given, named = pytree.tree_map_only(Tensor, self.gather_full, (given, named))
        return function(*given, **named)


def regrouped(before: Sequence[int], part: ShardPlacement, shape: Sequence[int]) -> ShardPlacement | None:
    """The part that a reshaped one is, if it is one: each worker's elements stay, in the same order, the same runs."""
    after = math.prod(before[part.dim + 1 :])
    runs, unit = [section * after for section in part.sections], part.length * after
    for dim, length in enumerate(shape):
        inner = math.prod(shape[dim + 1 :])
        block = length * inner
        if not inner or length == 1:
            continue
        if block % unit == 0:
            sections = runs * (block // unit) if block // unit <= max(before) * len(runs) else []
        elif unit % block == 0:
            ends = [*accumulate(runs)]
            sections = runs[: ends.index(block) + 1] if block in ends else []
            sections = sections if sections * (unit // block) == runs else []
        else:
            continue
        if sections and all(run % inner == 0 and run // inner % part.count == 0 for run in sections):
            return replace(part, dim=dim, sections=tuple(run // inner for run in sections))
    return None


def changes(name: str) -> bool:
    """Whether a function with this name writes into its first argument."""
    return name.endswith("_") and (not name.endswith("__") or name.startswith("__i") or name == "__setitem__")


def _place(view: Tensor, length: int, stride: int) -> int | None:
    pairs = [*zip(view.shape, view.stride(), strict=True)]
    return pairs.index((length, stride)) if (length, stride) in pairs else None
