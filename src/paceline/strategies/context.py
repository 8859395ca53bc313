"""A sequence divided among workers, who compute a micro-batch together: each has its stretch of what blocks take and
give, and whole weights.

Attention needs all of a sequence: there heads are exchanged for stretches, and back (Jacobs et al., "DeepSpeed Ulysses:
System Optimizations for Enabling Training of Extreme Long Sequence Transformer Models", 2023). All else is what `parts`
makes of any code: positions, masks and labels are narrowed where they meet a stretch, and what is not known to work on
stretches gets the whole. So does a loss: what it adds up over rows and tokens is added up among the workers.

A weight that meets a stretch gets a part of its gradient; where all compute the same with it, the first one keeps it.
Summed over the workers, on the way that gradients go, that is the gradient.
"""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn

from paceline.comm.group import Group
from paceline.comm.torch_private import pytree
from paceline.errors import UsageError
from paceline.strategies.blocks import blocks_of
from paceline.strategies.chunks import tensors_of
from paceline.strategies.compared import farthest, gradients_of, outputs_apart, room, weighing
from paceline.strategies.job import Job
from paceline.strategies.moves import Division, Moves, applied
from paceline.strategies.parts import MADE, UNKNOWN, Parts, Rule, Tensor, changes, logical, mark, part_of, tensors_in
from paceline.strategies.rules import RULES, asked_of, rule_of
from paceline.strategies.side_effects import without_a_trace
from paceline.strategies.streams import Streams

_ORIGIN = "_paceline_origin"
_ATTENTION = "scaled_dot_product_attention"
_ELEMENTWISE = ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy_with_logits")


class _Once(torch.autograd.Function):
    """A weight that all use alike: only the first one's gradient counts."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, counts: bool) -> Tensor:
        ctx.counts = counts
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad if ctx.counts else torch.zeros_like(grad), None


class _Moves(Moves):
    """Of stretches: what a weight's gradient lacks is added where gradients are."""

    def share(self, whole: Tensor) -> Tensor:
        return whole if isinstance(whole, nn.Parameter) else super().share(whole)


class _Stretches(Parts):
    """Follows stretches."""

    def alike(self, function: Any, given: Any, named: Any) -> Any:
        origin = given[0].__dict__.get(_ORIGIN) if given and isinstance(given[0], Tensor) else None
        if origin is not None and changes(function.__name__):
            made = function(*given, **named)
            x, view, *how = origin
            self._written(lambda whole, value: view(whole, *how[0], **how[1]).copy_(value), "copy", (x, given[0]), {})
            return made
        asks = function.__name__ == "__get__" and function.__self__.__name__ not in MADE
        if asks or not torch.is_grad_enabled():
            return function(*given, **named)
        if any(isinstance(t, nn.Parameter) and t.requires_grad for t in tensors_in((*given, *named.values()))):
            given, named = pytree.tree_map_only(nn.Parameter, self.once, (given, named))
        return function(*given, **named)

    def _with_wholes(self, function: Any, name: str, given: Any, named: Any) -> Any:
        if changes(name) and part_of(given[0]):
            return self._written(function, name, given, named)
        made = super()._with_wholes(function, name, given, named)
        if isinstance(made, Tensor) and made._is_view() and part_of(given[0]):
            made = made.clone()  # what is written into it is written into what it is a view of
            made.__dict__[_ORIGIN] = given[0], function, given[1:], named
        return made

    def _written(self, function: Any, name: str, given: Any, named: Any) -> Any:
        """Writes into the own stretch what is written into the whole."""
        part = part_of(given[0])
        assert part is not None
        self.note(name, [part])
        whole, rest = self.whole(given[0]).clone(), pytree.tree_map_only(Tensor, self.whole, (given[1:], named))
        made = self.alike(function, (whole, *rest[0]), rest[1])
        given[0].copy_(self.moves.take(whole, part))
        return made if made is None else given[0]

    def once(self, weight: nn.Parameter) -> Any:
        return applied(_Once, weight, self.moves.unit.rank == 0) if weight.requires_grad else weight


class Sequences:
    """Divides what the blocks of a job's model take among the workers of a `unit`, where its length allows.

    It is made in two steps, between which others may wrap what blocks compute; `narrow` is the second one.
    """

    def __init__(self, job: Job, unit: Group, staged: bool) -> None:
        self.job, self.unit, self._model = job, unit, type(job.model).__name__
        self._beside, self._compared = "", staged  # of a model in stages nobody has the whole
        self._moves = _Moves(unit)
        self._parts = _Stretches(self._moves, RULES | _RULES, lambda: self._model, self._noted, "_paceline_stretch")
        self._gathered, self._odd = set[str](), set[int]()
        self._known = False  # what is exchanged in a micro-batch
        blocks = blocks_of(job.model)
        if not blocks:
            what = f"no part of {self._model} repeats, and context= divides what such parts take"
            raise UsageError(what, "leave context= out")
        self._blocks = list(blocks.values())
        for block in self._blocks:
            block.forward = partial(self._block, block.forward)
        self._plain, job.forward = job.forward, self._forward
        self._judge, job.loss = job.loss, self._judged
        job.whole, job.once = self._whole, self._parts.once

    def __deepcopy__(self, memo: Any) -> Sequences:
        return self  # a copy of the model, as an average is, is computed whole

    @property
    def told(self) -> tuple[str, str]:
        return f"sequences are divided among {self.unit.size} workers, weights are whole on each", "context= says so"

    def _noted(self, name: str, parts: Any, *_: Any) -> None:
        if parts:
            self._gathered.add(name.strip("_"))

    def _forward(self, model: nn.Module, batch: Any) -> Any:
        if model is not self.job.model:
            return self._plain(model, batch)
        if not self._compared and model.training and torch.is_grad_enabled():
            self._compared = True
            self._compare(model, batch)
        self.unit.enter("the stretches of sequences", check=False, kind="context")
        self._sent = self._moves.sent
        with self._parts:
            output = self._plain(model, batch)
        self._moves.rest()
        return output

    def _judged(self, output: Any, batch: Any) -> Any:
        with self._parts:
            result = self._judge(output, batch)
        result = self._whole(result)
        self._moves.rest()
        if not self._known and torch.is_grad_enabled():
            self._known, self.job.inside["context"] = True, self._moves.sent - self._sent
            some = sorted(self._gathered)
            where = (
                f"; all of them compute {', '.join(some[:3])}{', ...' if len(some) > 3 else ''} whole" if some else ""
            )
            odd = ", ".join(map(str, sorted(self._odd)[:3]))
            whole = f"; {self.unit.size} does not divide {odd}, which is computed whole by all" if odd else ""
            if told := where + whole + self._beside:
                self.job.news["context"] = f"sequences are divided among {self.unit.size} workers{told}", ""
        return result

    def _compare(self, model: nn.Module, batch: Any) -> None:
        """The first forward and backward beside those of whole sequences."""
        self.unit.enter("whole sequences, to compare with", check=False, kind="comparison")
        given, unit = list[int](), self.unit
        with weighing(model, given):
            outputs, gradients = self._computed(model, batch, self._parts)
        need = 3 * unit.size**2 * sum(given)  # of all who may be on this host
        if not all(unit.gather_json(need <= room(self.job.device))):
            self._beside = "; whole ones to compare with would not fit"
            return
        whole, expected = self._computed(model, batch, nullcontext())
        most, others = outputs_apart(outputs, whole)
        mine = {name: gradients.get(name, torch.zeros_like(grad)).contiguous() for name, grad in expected.items()}
        for grad in mine.values():
            unit.sum(grad)
        name, distance = farthest(mine, expected, whole)
        if name or others:
            what = f"the gradient of {name} is" if name else "outputs are"
            what = f"{what} another when the sequences of {self._model} are divided by context="
            raise UsageError(what, "leave context= out")
        figures = f"outputs {most:.1g} and gradients {distance:.1g} apart"
        self._beside = f"; one micro-batch was computed with whole ones, too: {figures}"

    def _computed(self, model: nn.Module, batch: Any, how: Any) -> tuple[list[Tensor], dict[str, Tensor]]:
        """Outputs, and the gradients of numbers made of them."""
        with without_a_trace(model, Streams(self.job.device)):
            with how:
                output = self._plain(model, batch)
            outputs = tensors_of(self._whole(output))
            return [x.detach() for x in outputs], gradients_of(outputs, self.job.named)

    def _whole(self, values: Any) -> Any:
        with self._parts.asked():
            return pytree.tree_map_only(Tensor, self._parts.whole, values)

    def narrow(self) -> None:
        """Lets blocks take stretches."""
        for block in self._blocks:
            block.forward = partial(self._narrowed, block.forward)

    def _narrowed(self, forward: Any, *given: Any, **named: Any) -> Any:
        """With the own stretch of the first tensor that a block takes: rows, tokens, width."""
        if self._parts.on:
            with self._parts.asked():
                given, named = self._stretch_of(given, named)
        return forward(*given, **named)

    def _stretch_of(self, given: Any, named: Any) -> Any:
        leaves, spec = pytree.tree_flatten((given, named))
        place = next(
            (n for n, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.is_floating_point()), None
        )
        if place is None or leaves[place].dim() != 3 or part_of(leaves[place]):
            return given, named
        whole = leaves[place]
        length = Tensor.size(whole, 1)
        if length % self.unit.size:
            self._odd.add(length)
            return given, named
        part = Division(1, (length,), self.unit.size)
        leaves[place] = mark(self._moves.take(whole, part), part)
        return pytree.tree_unflatten(leaves, spec)

    def _block(self, forward: Any, *given: Any, **named: Any) -> Any:
        if self._parts.on:
            return forward(*given, **named)
        with self._parts.asked():
            follows = any(map(part_of, tensors_of((given, named))))  # it is computed again in a backward
        with self._parts if follows else nullcontext():
            return forward(*given, **named)


# ---- what functions make of stretches, besides what they make of other parts

_RULES: dict[str, Rule] = {}


_rule = partial(rule_of, _RULES)


@_rule(_ATTENTION)
def _attend(on: Parts, function: Any, given: Any, named: Any) -> Any:
    """Stretches of all heads become all of some heads."""
    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
    asked: dict[str, Any] = {**dict(zip(names, given, strict=False)), **named}
    query, size = asked["query"], on.moves.size
    part = part_of(query)
    if part is None or part.dim != query.dim() - 2 or query.dim() < 3 or len(part.sections) > 1:
        return RULES[_ATTENTION](on, function, given, named)
    if Tensor.size(query, -3) % size:
        return UNKNOWN
    for name in names[:3]:
        asked[name] = _by_heads(on, asked[name])
    if isinstance(asked.get("attn_mask"), Tensor):
        asked["attn_mask"] = on.whole(asked["attn_mask"])
    made = RULES[_ATTENTION](on, function, (), asked)
    if made is UNKNOWN:
        wholes = pytree.tree_map_only(Tensor, on.whole, asked)
        return on.alike(function, (), wholes)
    heads, back = part_of(made), Division(made.dim() - 2, part.sections, size)
    return made if heads is None else mark(on.moves.exchange(made, heads, back), back)


def _by_heads(on: Parts, x: Tensor) -> Tensor:
    part, heads = part_of(x), Tensor.size(x, -3)
    if part is None:
        return x
    if part.dim != x.dim() - 2 or len(part.sections) > 1 or heads % on.moves.size:
        return on.whole(x)
    ours = Division(x.dim() - 3, (heads,), on.moves.size)
    return mark(on.moves.exchange(x, part, ours), ours)


@_rule("cross_entropy", "nll_loss")
def _cross_entropy(on: Parts, function: Any, given: Any, named: Any) -> Any:
    """The classes are whole."""
    names = ("input", "target", "weight", "size_average", "ignore_index", "reduce", "reduction", "label_smoothing")
    said = dict(zip(names, asked_of(given, named, *names), strict=True))
    x, target, reduction = said["input"], said["target"], said["reduction"] or "mean"
    part, dim = part_of(x), 1 if x.dim() > 1 else 0
    others = said["weight"] is not None or said["size_average"] is not None or said["reduce"] is not None
    if part is None or part.dim == dim or others or target.is_floating_point() or not part.even:
        return UNKNOWN
    along = part.dim - (part.dim > dim)
    if logical(target)[along] != part.length:
        return UNKNOWN
    theirs = part_of(target)
    if theirs is None:
        target = on.moves.narrow(target, Division(along, part.sections, part.count))
    elif (theirs.dim, theirs.sections, theirs.count) != (along, part.sections, part.count):
        return UNKNOWN
    ignored = -100 if said["ignore_index"] is None else said["ignore_index"]
    more = {} if said["label_smoothing"] is None else {"label_smoothing": said["label_smoothing"]}
    kept = {"ignore_index": ignored, **more}
    if reduction == "none":
        made = function(x, target, reduction="none", **kept)
        return mark(made, Division(along, part.sections, part.count))
    total = on.moves.sum(function(x, target, reduction="sum", **kept))
    if reduction == "sum":
        return total
    return total / on.moves.sum((target != ignored).sum().to(total.dtype))


@_rule(*_ELEMENTWISE)
def _of_elements(on: Parts, function: Any, given: Any, named: Any) -> Any:
    x, target = given[:2] if len(given) > 1 else (given[0], named.get("target"))
    rest = {key: value for key, value in named.items() if key not in ("target", "reduction")}
    plain = len(given) <= 2 and not rest.keys() & {"weight", "pos_weight", "size_average", "reduce"}
    if not plain or not isinstance(target, Tensor) or logical(x) != logical(target):
        return UNKNOWN
    call = partial(function, reduction="none", **rest)
    made = on.elementwise(call, [x, target])
    reduction = named.get("reduction", "mean")
    if made is UNKNOWN or reduction == "none":
        return made
    total = on.moves.sum(made.sum())
    return total if reduction == "sum" else total / torch.Size(logical(x)).numel()


@_rule("sum", "mean")
def _sum(on: Parts, function: Any, given: Any, named: Any) -> Any:
    """Over all, or along what is divided."""
    x, part = given[0], part_of(given[0])
    found = RULES[function.__name__](on, function, given, named)
    if found is not UNKNOWN or part is None or not part.even or named.get("dtype") is not None:
        return found
    dim = named.get("dim", given[1] if len(given) > 1 else None)
    dims = range(x.dim()) if dim is None else [dim] if isinstance(dim, int) else dim
    if not isinstance(dims, (list, tuple, range)) or not all(isinstance(one, int) for one in dims):
        return UNKNOWN
    if part.dim not in {one % x.dim() for one in dims} or len(given) > 2:
        return UNKNOWN
    keep = bool(named.get("keepdim"))
    made = on.moves.sum(Tensor.sum(x, [*dims], keepdim=keep) if x.dim() else x)
    if function.__name__ == "mean":
        shape = logical(x)
        made = made / torch.Size([shape[one] for one in dims]).numel()
    return made
