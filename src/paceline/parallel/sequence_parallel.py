"""Sequence parallelism (context=): sequences divided among workers, with Ulysses attention.

Attention needs all of a sequence: there heads are exchanged for stretches, and back (Jacobs et al., "DeepSpeed Ulysses:
System Optimizations for Enabling Training of Extreme Long Sequence Transformer Models", 2023). All else is what `parts`
makes of any code: positions, masks and labels are narrowed where they meet a stretch, and what is not known to work on
stretches gets the whole. So does a loss: what it adds up over rows and tokens is added up among the workers.

A weight that meets a stretch gets a part of its gradient; where all compute the same with it, the first one keeps it.
Summed over the workers, on the way that gradients go, that is the gradient.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import nn

from paceline.comm.communicator import Group
from paceline.comm.torch_private import pytree
from paceline.compute.batchnorm import without_a_trace
from paceline.compute.blocks import blocks_of
from paceline.compute.forward_backward import Loss
from paceline.compute.job import TrainingJob
from paceline.compute.microbatch_merging import USERS_OWN
from paceline.compute.microbatches import Chunk, MicroBatch, tensors_of
from paceline.compute.rng import RngState
from paceline.compute.verify import (
    allowed,
    differentiate,
    farthest,
    gradients_of,
    loss_apart,
    outputs_apart,
    room,
    weighing,
)
from paceline.errors import PacelineError, UsageError
from paceline.parallel.tensor_parallel.op_rules import RULES, asked_of, rule_of
from paceline.parallel.tensor_parallel.redistribute import Redistributor, ShardPlacement, applied
from paceline.parallel.tensor_parallel.sharded_mode import (
    MADE,
    UNKNOWN,
    Rule,
    ShardedTensorMode,
    Tensor,
    changes,
    logical,
    mark,
    part_of,
    tensors_in,
)

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


class _FromFirst(torch.autograd.Function):
    """Whole outputs of a model whose sequences are divided. The first worker's gradients of them are everybody's."""

    @staticmethod
    def forward(
        ctx: Any, moves: Redistributor, parts: Sequence[ShardPlacement | None], *outputs: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.moves, ctx.parts, ctx.like = moves, parts, [(logical(x), x.dtype, x.device) for x in outputs]
        ctx.set_materialize_grads(False)
        pairs = zip(outputs, parts, strict=True)
        return tuple(x.clone() if part is None else moves.gather_shards(x, part) for x, part in pairs)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        moves, found = cast(Redistributor, ctx.moves), list[Tensor | None]()
        has = moves.unit.broadcast(torch.tensor([grad is not None for grad in grads], dtype=torch.uint8)).tolist()
        for one, grad, part, (shape, dtype, device) in zip(has, grads, ctx.parts, ctx.like, strict=True):
            if not one:
                found.append(None)
                continue
            first = moves.unit.rank == 0 and grad is not None
            whole = grad.contiguous() if first and grad is not None else torch.empty(shape, dtype=dtype, device=device)
            moves.unit.broadcast(whole)
            own = whole if part is None else moves.narrow(whole, part)
            found.append(own if part is None or moves.is_first_holder(part) else own * 0.0)
        return None, None, *found


class _Led(torch.autograd.Function):
    """A loss that all compute of the same whole outputs: in the backward it is the first one's that counts, and all go
    through these outputs, whether the loss uses them or not.
    """

    @staticmethod
    def forward(ctx: Any, total: Tensor, *outputs: Tensor) -> Tensor:
        ctx.count = len(outputs)
        return total.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return grad, *[None] * ctx.count


_FROM_FIRST: Any = _FromFirst.apply
_LED: Any = _Led.apply


class _Moves(Redistributor):
    """Of stretches: what a weight's gradient lacks is added where gradients are."""

    def share(self, whole: Tensor) -> Tensor:
        return whole if isinstance(whole, nn.Parameter) else super().share(whole)


class _Stretches(ShardedTensorMode):
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
        whole, rest = (
            self.gather_full(given[0]).clone(),
            pytree.tree_map_only(Tensor, self.gather_full, (given[1:], named)),
        )
        made = self.alike(function, (whole, *rest[0]), rest[1])
        given[0].copy_(self.moves.take(whole, part))
        return made if made is None else given[0]

    def once(self, weight: nn.Parameter) -> Any:
        return applied(_Once, weight, self.moves.unit.rank == 0) if weight.requires_grad else weight


@dataclass
class _Result:
    """What came of one micro-batch."""

    outputs: list[Tensor]
    loss: Loss | None
    gradients: dict[str, Tensor]


class SequenceParallel:
    """Divides what the blocks of a job's model take among the workers of a `unit`, where its length allows.

    It is made in two steps, between which others may wrap what blocks compute; `narrow` is the second one.
    """

    def __init__(self, job: TrainingJob, unit: Group, staged: bool) -> None:
        self.job, self.unit, self._model = job, unit, type(job.model).__name__
        self._beside, self._compared, self._staged = "", False, staged
        self._gathers = job.over is None  # the loss is computed on whole outputs, unless it is seen to need none
        self._moves = _Moves(unit)
        self._parts = _Stretches(self._moves, RULES | _RULES, lambda: self._model, self._noted, "_paceline_stretch")
        self._gathered, self._odd = set[str](), set[int]()
        self._divides, self._met = False, ""  # whether a block was given a stretch, and what the last one without takes
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
        job.gather_output, job.once, job.add_up = self._whole, self._parts.once, self._add_up

    def __deepcopy__(self, memo: Any) -> SequenceParallel:
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
            # Of a model in stages the whole is there when it is assembled; later it is too late.
            self._compared = not self._staged or self.job.assembled
            if self._compared:
                self._compare(model, batch)
        self.unit.enter("the stretches of sequences", check=False, kind="context")
        self._sent = self._moves.sent
        with self._parts:
            output = self._plain(model, batch)
        self._moves.rest()
        if not self._divides and not self._odd:
            what = f"no block of {self._model} takes a sequence (rows, tokens, width) that context= can divide"
            size, units = self.unit.size, self.job.units.size if self.job.units else 1
            raise UsageError(what + self._met, f"say data={units * size} and leave context={size} out")
        return output

    def _judged(self, output: Any, batch: Any) -> Any:
        result = self._on_whole(output, batch) if self._gathers else self._on_stretches(output, batch)
        if not self._known and torch.is_grad_enabled() and not self.job.assembled:
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

    def _on_stretches(self, output: Any, batch: Any) -> Any:
        """The loss of outputs of which each worker has a stretch: what it adds up is added up among the workers."""
        with self._parts:
            result = self._judge(output, batch)
        result = self._whole(result)
        self._moves.rest()
        return result

    def _on_whole(self, output: Any, batch: Any) -> Any:
        """The loss as plain code computes it, of outputs that are gathered. All compute it alike."""
        self.unit.enter("whole outputs for the loss", check=False, kind="context")
        grad = torch.is_grad_enabled()
        leaves, spec = pytree.tree_flatten(output)
        places = [n for n, x in enumerate(leaves) if isinstance(x, Tensor) and x.requires_grad and grad]
        with self._parts.using_own_attribute():
            parts = [part_of(leaves[n]) for n in places]
            given = [leaves[n] for n in places]
            joined: tuple[Tensor, ...] = _FROM_FIRST(self._moves, parts, *given) if given else ()
            leaves = [
                self._parts.gather_full(x) if isinstance(x, Tensor) and not x.requires_grad else x for x in leaves
            ]
        for n, x, whole in zip(places, given, joined, strict=True):
            leaves[n] = whole.view_as(whole)  # whose hooks are not called where the first one's gradient is taken
            self._moves.sent += x.nbytes + whole.nbytes
        result = self._judge(pytree.tree_unflatten(leaves, spec), batch)
        if not joined:
            return result
        total, *rest = result if isinstance(result, tuple) else (result,)
        if isinstance(total, Tensor):
            own = total if self.unit.rank == 0 else total.detach()
            total = _LED(own, *joined)
        return (total, *rest) if isinstance(result, tuple) else total

    # -- divided sequences beside whole ones --------------------------------------------------------------------------

    def _compare(self, model: nn.Module, batch: Any) -> None:
        """The first micro-batch beside that of whole sequences: outputs, the loss, and its gradients. The loss of
        stretches is taken if it gives the same, else that of whole outputs. Raises UsageError on all workers of the
        unit where neither does.
        """
        self.unit.enter("whole sequences, to compare with", check=False, kind="comparison")
        sizes, unit, divided = list[int](), self.unit, f"when the sequences of {self._model} are divided by context="
        judge = self._on_stretches if self.job.over is None else None
        with weighing(model, sizes):
            mine = self._tried(model, batch, self._parts, judge)
        fits = all(unit.gather_json(3 * unit.size**2 * sum(sizes) <= room(self.job.device)))  # also all on this host
        if fits:
            theirs = self._computed(model, batch, nullcontext(), self._judge if judge else None)
        else:
            theirs = self._computed(model, batch, self._parts, self._on_whole if judge else None)
            self._add_up(theirs.gradients, self.job.named)
        self._gathers, why = False, self._unlike(mine, theirs)
        if why and judge and not (isinstance(mine, _Result) and outputs_apart(mine.outputs, theirs.outputs)[1]):
            # Hooks, autograd functions and what is computed again in the backward meet stretches unseen.
            self._gathers, mine = True, self._tried(model, batch, self._parts, self._on_whole)
            why = self._unlike(mine, theirs)
        if why:
            raise UsageError(f"{why} {divided}", "leave context= out")
        assert isinstance(mine, _Result)
        if not fits:
            self._beside = "; whole ones to compare with would not fit"
        else:
            self._beside = f"; one micro-batch was computed with whole ones, too: {self._distances(mine, theirs)}"
        if self._gathers:
            self._beside = (
                f"; the loss is computed by all of whole outputs, as it is no sum over stretches{self._beside}"
            )

    def _tried(self, model: nn.Module, batch: Any, how: Any, judge: Any) -> _Result | Exception:
        """What a way to compute it gives, or how it fails, the same on all workers."""
        try:
            found = self._computed(model, batch, how, judge)
        except USERS_OWN as error:
            if isinstance(error, torch.OutOfMemoryError | PacelineError):
                raise
            self._moves.rest()
            return error
        self._add_up(found.gradients, self.job.named)
        return found

    def _add_up(self, gradients: dict[str, Tensor], named: Mapping[str, nn.Parameter]) -> None:
        """Each worker has a part of a gradient, or none."""
        self.unit.enter("gradients of stretches, to compare with", check=False, kind="comparison")
        has = [set(names) for names in self.unit.gather_json([*gradients])]
        for name, param in named.items():
            if any(name in names for names in has):
                grad = gradients[name] if name in gradients else torch.zeros_like(param)
                gradients[name] = self.unit.sum(grad.contiguous().clone())

    def _computed(self, model: nn.Module, batch: Any, how: Any, judge: Any) -> _Result:
        """Outputs, the loss, and its gradients; without one, those of numbers made of the outputs."""
        with without_a_trace(model, RngState(self.job.device)):
            with how:
                output = self._plain(model, batch)
            outputs = tensors_of(self._whole(output))
            if judge is None:
                return _Result([x.detach() for x in outputs], None, gradients_of(outputs, self.job.named))
            loss = Loss.of(judge(output, batch), Chunk([MicroBatch(0, 1, None)], None), trainable=False)
            params = {name: param for name, param in self.job.named.items() if param.requires_grad}
            wanted = [*params.values()] if loss.total.requires_grad else []
            grads = differentiate([loss.total], wanted) if wanted else ()
            found = {name: grad for name, grad in zip(params, grads, strict=False) if grad is not None}
            return _Result([x.detach() for x in outputs], loss.detached(), found)

    def _unlike(self, mine: _Result | Exception, theirs: _Result) -> str:
        """What is not the same as with whole sequences, for people; the same on all workers."""
        if isinstance(mine, Exception):
            return f"the loss cannot be computed ({type(mine).__name__}: {mine})"
        if outputs_apart(mine.outputs, theirs.outputs)[1]:
            why = "outputs are another"
        elif (apart := self._loss_apart(mine, theirs))[0]:
            why = f"the loss of a micro-batch is {apart[0]}, and not {apart[1]},"
        elif unlike := next((n for n in self.job.named if (n in mine.gradients) != (n in theirs.gradients)), ""):
            why = f"{unlike} has {'a' if unlike in mine.gradients else 'no'} gradient, unlike with whole ones,"
        else:
            name, _ = farthest(mine.gradients, theirs.gradients, theirs.outputs)
            why = f"the gradient of {name} is another" if name else ""
        return next((one for one in self.unit.gather_json(why) if one), "")

    def _loss_apart(self, mine: _Result, theirs: _Result) -> tuple[str, str, float]:
        if mine.loss is None or theirs.loss is None:
            return "", "", 0.0
        rounding = max(map(allowed, [theirs.loss.total, *theirs.outputs]))
        return loss_apart(mine.loss, theirs.loss, rounding, 1.0)  # which may be near 0, a sum of what is not

    def _distances(self, mine: _Result, theirs: _Result) -> str:
        most, _ = outputs_apart(mine.outputs, theirs.outputs)
        _, distance = farthest(mine.gradients, theirs.gradients, theirs.outputs)
        return f"outputs {most:.1g} and gradients {distance:.1g} apart"

    def _whole(self, values: Any) -> Any:
        with self._parts.using_own_attribute():
            return pytree.tree_map_only(Tensor, self._parts.gather_full, values)

    def narrow(self) -> None:
        """Lets blocks take stretches."""
        for block in self._blocks:
            block.forward = partial(self._narrowed, block.forward)

    def _narrowed(self, forward: Any, *given: Any, **named: Any) -> Any:
        """With the own stretch of the first tensor that a block takes: rows, tokens, width."""
        if self._parts.on:
            with self._parts.using_own_attribute():
                given, named = self._stretch_of(given, named)
        return forward(*given, **named)

    def _stretch_of(self, given: Any, named: Any) -> Any:
        leaves, spec = pytree.tree_flatten((given, named))
        place = next(
            (n for n, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.is_floating_point()), None
        )
        if place is None or leaves[place].dim() != 3 or part_of(leaves[place]):
            if place is not None and part_of(leaves[place]):
                self._divides = True
            elif place is not None:
                self._met = f": one takes a tensor of shape {tuple(leaves[place].shape)}"
            return given, named
        whole = leaves[place]
        length = Tensor.size(whole, 1)
        if length % self.unit.size:
            self._odd.add(length)
            return given, named
        self._divides, part = True, ShardPlacement(1, (length,), self.unit.size)
        leaves[place] = mark(self._moves.take(whole, part), part)
        return pytree.tree_unflatten(leaves, spec)

    def _block(self, forward: Any, *given: Any, **named: Any) -> Any:
        if self._parts.on:
            return forward(*given, **named)
        with self._parts.using_own_attribute():
            follows = any(map(part_of, tensors_of((given, named))))  # it is computed again in a backward
        with self._parts if follows else nullcontext():
            return forward(*given, **named)


# ---- what functions make of stretches, besides what they make of other parts

_RULES: dict[str, Rule] = {}


_rule = partial(rule_of, _RULES)


@_rule(_ATTENTION)
def _attend(on: ShardedTensorMode, function: Any, given: Any, named: Any) -> Any:
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
        asked["attn_mask"] = on.gather_full(asked["attn_mask"])
    made = RULES[_ATTENTION](on, function, (), asked)
    if made is UNKNOWN:
        wholes = pytree.tree_map_only(Tensor, on.gather_full, asked)
        return on.alike(function, (), wholes)
    heads, back = part_of(made), ShardPlacement(made.dim() - 2, part.sections, size)
    return made if heads is None else mark(on.moves.exchange(made, heads, back), back)


def _by_heads(on: ShardedTensorMode, x: Tensor) -> Tensor:
    part, heads = part_of(x), Tensor.size(x, -3)
    if part is None:
        return x
    if part.dim != x.dim() - 2 or len(part.sections) > 1 or heads % on.moves.size:
        return on.gather_full(x)
    ours = ShardPlacement(x.dim() - 3, (heads,), on.moves.size)
    return mark(on.moves.exchange(x, part, ours), ours)


@_rule("cross_entropy", "nll_loss")
def _cross_entropy(on: ShardedTensorMode, function: Any, given: Any, named: Any) -> Any:
    """The classes are whole."""
    names = ("input", "target", "weight", "size_average", "ignore_index", "reduce", "reduction", "label_smoothing")
    said = dict(zip(names, asked_of(given, named, *names), strict=True))
    x, target, reduction = said["input"], said["target"], said["reduction"] or "mean"
    part, dim = part_of(x), 1 if x.dim() > 1 else 0
    others = said["weight"] is not None or said["size_average"] is not None or said["reduce"] is not None
    if part is None or part.dim == dim or others or target.is_floating_point() or not part.is_even:
        return UNKNOWN
    along = part.dim - (part.dim > dim)
    if logical(target)[along] != part.length:
        return UNKNOWN
    theirs = part_of(target)
    if theirs is None:
        target = on.moves.narrow(target, ShardPlacement(along, part.sections, part.count))
    elif (theirs.dim, theirs.sections, theirs.count) != (along, part.sections, part.count):
        return UNKNOWN
    ignored = -100 if said["ignore_index"] is None else said["ignore_index"]
    more = {} if said["label_smoothing"] is None else {"label_smoothing": said["label_smoothing"]}
    kept = {"ignore_index": ignored, **more}
    if reduction == "none":
        made = function(x, target, reduction="none", **kept)
        return mark(made, ShardPlacement(along, part.sections, part.count))
    total = on.moves.sum(function(x, target, reduction="sum", **kept))
    if reduction == "sum":
        return total
    return total / on.moves.sum((target != ignored).sum().to(total.dtype))


@_rule(*_ELEMENTWISE)
def _of_elements(on: ShardedTensorMode, function: Any, given: Any, named: Any) -> Any:
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
def _sum(on: ShardedTensorMode, function: Any, given: Any, named: Any) -> Any:
    """Over all, or along what is divided."""
    x, part = given[0], part_of(given[0])
    found = RULES[function.__name__](on, function, given, named)
    if found is not UNKNOWN or part is None or not part.is_even or named.get("dtype") is not None:
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
