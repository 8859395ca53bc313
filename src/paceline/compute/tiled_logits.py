"""Computes large logits and their loss in tiles of tokens, so that only the logits of one tile exist at a time.

The head of a language model returns `TiledLogits`: a tensor with the shape of the logits that keeps the head's input.
Functions that treat each token by itself, such as cross_entropy, run tile by tile; their backward computes the logits
of a tile again. Every other function gets the full logits, so the result is right for any code. The idea is that of
tiled logits in Arctic Long Sequence Training (Bekman et al., 2025) and of "Cut Your Losses in Large-Vocabulary Language
Models" (Wijmans et al., 2024).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.comm.torch_private import pytree
from paceline.compute.batchnorm import without_a_trace
from paceline.compute.blocks import blocks_of
from paceline.compute.call_arguments import bind_arguments, cross_entropy_arguments, gather_arguments
from paceline.compute.forward_backward import Loss
from paceline.compute.job import ELSEWHERE, TrainingJob
from paceline.compute.microbatches import Chunk, MicroBatch
from paceline.compute.rng import RngState
from paceline.compute.verify import allowed, differentiate, farthest, loss_apart, room
from paceline.errors import UsageError

_COPIES = 4  # of the full logits, while the loss of full logits is computed for comparison
_MARKS = "_paceline_"  # begins the names of attributes that say how a tensor is sharded

# Functions that read what a tensor without values knows as well.
_ASKS = {
    *("size", "dim", "ndimension", "numel", "nelement", "stride", "is_contiguous", "is_floating_point", "is_complex"),
    *("get_device", "element_size", "__hash__", "is_same_size", "__set__", "__delete__", "is_inference", "__len__"),
}
_VIEWS_THAT_ARE_TENSORS = {"T", "mT", "H", "mH", "data", "real", "imag"}  # properties


class Tiles:
    """How the logits of a job are tiled: in how many tiles, and what was noticed about their use.

    While `is_on`, heads return tiled logits. `forwards` counts those of training. `full_for` are the names of functions
    that got full logits, and `bytes` is the size of the largest ones that a head made.
    """

    def __init__(self, count: int) -> None:
        self.count, self.is_on, self.forwards, self.bytes = count, False, 0, 0
        self.full_for = set[str]()

    def __deepcopy__(self, memo: Any) -> Tiles:
        return self

    def parts(self, tokens: int) -> Iterator[slice]:
        """Yields the tokens of each tile."""
        step = max(-(-tokens // self.count), 1)
        for start in range(0, max(tokens, 1), step):
            yield slice(start, start + step)


@dataclass(frozen=True)
class _LogitsRecipe:
    """How logits are made of the head's input: a product in `dtype` with the head's weight, then the `steps`, functions
    of logits (tokens, classes) that treat each token by itself.
    """

    tiles: Tiles
    dtype: torch.dtype
    steps: tuple[Callable[[Tensor], Tensor], ...] = ()

    def product(self, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Returns the head's output for a part of its input."""
        with _autocast_as(hidden.device, None):
            return F.linear(hidden.to(self.dtype), weight, bias)

    def cast(self, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Returns weight and bias in the dtype of the product."""
        return weight.to(self.dtype), None if bias is None else bias.to(self.dtype)

    def finish(self, logits: Tensor) -> Tensor:
        """Applies the steps to the head's output."""
        for step in self.steps:
            logits = step(logits)
        return logits


class _Tiled(torch.autograd.Function):
    """Applies a function of each token's logits tile by tile; the backward computes each tile's logits again.

    Recomputing costs a third more products with the head's weight. In return any function of the logits has a gradient,
    whatever happens to its result later.
    """

    @staticmethod
    def forward(
        ctx: Any, recipe: _LogitsRecipe, call: Any, hidden: Tensor, weight: Any, bias: Any, *operands: Any
    ) -> Tensor:
        """Returns `call(logits, *operands)`, where `call` gets the logits (tokens, classes) of some tokens, and the
        operands of the same tokens. `hidden` is (..., width); operands and result begin with its other dimensions.
        """
        ctx.recipe, ctx.call = recipe, call
        ctx.save_for_backward(hidden, weight, bias, *operands)
        flat, flat_operands = _flat(hidden, operands)
        cast = recipe.cast(weight, bias)
        results = [
            call(recipe.finish(recipe.product(flat[part], *cast)), *(operand[part] for operand in flat_operands))
            for part in recipe.tiles.parts(len(flat))
        ]
        result = torch.cat(results)
        if not result.is_floating_point():
            ctx.mark_non_differentiable(result)
        return result.view(*hidden.shape[:-1], *result.shape[1:])

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        """Returns the gradients of the head's input, weight and bias."""
        hidden, weight, bias, *operands = ctx.saved_tensors
        recipe, (flat, flat_operands) = ctx.recipe, _flat(hidden, operands)
        grad = grad.reshape(len(flat), *grad.shape[hidden.dim() - 1 :])
        cast_weight, cast_bias = recipe.cast(weight, bias)
        needs = ctx.needs_input_grad[2:5]
        made = [
            None if x is None or not is_needed else torch.zeros_like(x, memory_format=torch.contiguous_format)
            for x, is_needed in zip((flat, weight, bias), needs, strict=True)
        ]
        for part in recipe.tiles.parts(len(flat)):
            with torch.enable_grad():
                logits = recipe.product(flat[part].detach().requires_grad_(), cast_weight, cast_bias)
                edge = torch.autograd.graph.get_gradient_edge(logits)  # which lets go of the logits after `call`
                result = ctx.call(recipe.finish(logits), *(operand[part] for operand in flat_operands))
            del logits
            (of_logits,) = torch.autograd.grad(result, edge, grad[part])
            del result
            _add_gradients(made, part, of_logits, flat, cast_weight)
            del of_logits
        of_hidden = None if made[0] is None else made[0].view(hidden.shape)
        return None, None, of_hidden, made[1], made[2], *[None] * len(operands)


def _add_gradients(made: list[Tensor | None], part: slice, of_logits: Tensor, flat: Tensor, weight: Tensor) -> None:
    """Adds one tile's gradients to those of hidden values, weight and bias, where they are needed."""
    of_hidden, of_weight, of_bias = made
    with _autocast_as(flat.device, None):
        if of_hidden is not None:
            of_hidden[part] = of_logits @ weight
        if of_weight is not None and of_weight.dtype == of_logits.dtype:
            of_weight.addmm_(of_logits.mT, flat[part].to(of_logits.dtype))  # without memory for the product
        elif of_weight is not None:
            of_weight.add_(of_logits.mT @ flat[part].to(of_logits.dtype))
        if of_bias is not None:
            of_bias.add_(of_logits.sum(0))


class _Deferred(_Tiled):
    """Makes `TiledLogits`. The gradient of full logits, where a function needed these, goes to the head."""

    @staticmethod
    def forward(
        ctx: Any, recipe: _LogitsRecipe, dim: Any, hidden: Tensor, weight: Any, bias: Any, *operands: Any
    ) -> Tensor:
        """Returns logits without values, with the classes in the dimension `dim`."""
        ctx.recipe, ctx.call, ctx.dim = recipe, _unchanged, dim
        ctx.save_for_backward(hidden, weight, bias)
        shape = (*hidden.shape[:-1], weight.shape[0])
        like = torch.empty(shape, dtype=torch.int8, device="meta").movedim(-1, dim)
        dtype = recipe.finish(torch.empty(0, weight.shape[0], dtype=recipe.dtype, device=hidden.device)).dtype
        made: Tensor = torch.Tensor._make_wrapper_subclass(
            TiledLogits, like.shape, strides=like.stride(), dtype=dtype, device=hidden.device
        )
        recipe.tiles.bytes = max(recipe.tiles.bytes, made.numel() * made.element_size())
        return made

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        """Returns the gradients of the head's input, weight and bias."""
        gradients: tuple[Any, ...] = _Tiled.backward(ctx, grad.movedim(ctx.dim, -1))
        return gradients


def _unchanged(logits: Tensor) -> Tensor:
    return logits


def _flat(hidden: Tensor, operands: Any) -> tuple[Tensor, list[Tensor]]:
    """Returns hidden values (tokens, width), and operands whose first dimension is that of the tokens."""
    flat, dims = hidden.reshape(-1, hidden.shape[-1]), hidden.dim() - 1
    return flat, [operand.reshape(len(flat), *operand.shape[dims:]) for operand in operands]


class TiledLogits(torch.Tensor):
    """Logits that have no values yet: a tensor that computes what is asked of it in tiles of tokens.

    `hidden` (tokens ..., width), `weight` and `bias` are the head's. The classes are in the dimension `class_dim`.
    """

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    recipe: _LogitsRecipe
    class_dim: int
    forwards: int  # of training, when these logits were made
    node: Any  # of autograd's graph, which made these logits
    full: Tensor | None  # once a function has needed the full logits

    @staticmethod
    def of(hidden: Tensor, weight: Tensor, bias: Tensor | None, recipe: _LogitsRecipe, class_dim: int) -> TiledLogits:
        """Returns logits without values."""
        if not torch.is_grad_enabled():  # such as in the forward of an autograd function
            hidden, weight, bias = hidden.detach(), weight.detach(), None if bias is None else bias.detach()
        made: TiledLogits = _Deferred.apply(recipe, class_dim, hidden, weight, bias)  # type: ignore[no-untyped-call]
        made.hidden, made.weight, made.bias, made.recipe, made.class_dim = hidden, weight, bias, recipe, class_dim
        made.forwards, made.node, made.full = recipe.tiles.forwards, made.grad_fn, None
        return made

    def changed(self, hidden: Tensor, class_dim: int | None = None) -> TiledLogits:
        """Returns these logits with other tokens."""
        class_dim = self.class_dim if class_dim is None else class_dim
        return TiledLogits.of(hidden, self.weight, self.bias, self.recipe, class_dim)

    def values(self) -> Tensor:
        """Returns the full logits."""
        if self.full is not None:
            return self.full
        if not self.is_of_head:
            values: Tensor = _Values.apply(self)  # type: ignore[no-untyped-call]
            return values
        made = self.of_head()
        if torch.is_grad_enabled() or not self.requires_grad:
            self.full = made
        return made

    def of_head(self) -> Tensor:
        """Returns the full logits with the head's gradient."""
        self._refuse_earlier()
        made = self.recipe.product(self.hidden, *self.recipe.cast(self.weight, self.bias))
        shape = made.shape
        return self.recipe.finish(made.flatten(0, -2)).view(shape).movedim(-1, self.class_dim)

    def apply(self, call: Callable[..., Tensor], *operands: Tensor) -> Tensor:
        """Returns `call(logits, *operands)` of each tile's tokens, as `_Tiled.forward` does."""
        self._refuse_earlier()
        call = partial(_under_autocast, _autocast_of(self.device), call)
        arguments = self.recipe, call, self.hidden, self.weight, self.bias, *operands
        result: Tensor = _Tiled.apply(*arguments)  # type: ignore[no-untyped-call]
        return result

    @property
    def is_of_head(self) -> bool:
        """Whether the gradient of these logits goes to the head as it is. An autograd function that returns tiled
        logits has a backward of its own.
        """
        return self.grad_fn is self.node

    def _refuse_earlier(self) -> None:
        """Raises UsageError if the head's weight may have changed since these logits were made."""
        if self.recipe.tiles.forwards != self.forwards:
            what = "the script uses logits of an earlier micro-batch, which have no values under tiles="
            raise UsageError(what, "copy the values that are used later: logits[...].cpu(), or leave tiles= out")

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, function.__name__
        if name in _ASKS or (name == "__get__" and function.__self__.__name__ not in _VIEWS_THAT_ARE_TENSORS):
            with torch._C.DisableTorchFunctionSubclass():
                return function(*args, **kwargs)
        leaves = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, TiledLogits)]
        rule = _RULES.get(name.strip("_") if not _is_in_place(name) else "")
        is_first = len(leaves) == 1 and leaves[0] is _first(args, kwargs)
        if rule is not None and is_first and leaves[0].full is None and leaves[0].is_of_head:
            made = rule(leaves[0], function, args, kwargs)
            if made is not NotImplemented:
                return made
        for leaf in leaves:
            leaf.recipe.tiles.full_for.add(name.strip("_") if name != "__get__" else function.__self__.__name__)
        args, kwargs = pytree.tree_map_only(TiledLogits, TiledLogits.values, (args, kwargs))
        return function(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Runs what torch itself calls without asking `__torch_function__`, such as an autograd function's forward."""
        args, kwargs = pytree.tree_map_only(TiledLogits, TiledLogits.values, (args, kwargs or {}))
        return function(*args, **kwargs)


class _Values(torch.autograd.Function):
    """Gives tiled logits values; the gradient goes to the autograd function that returned them."""

    @staticmethod
    def forward(ctx: Any, logits: TiledLogits) -> Tensor:
        """Returns the full logits."""
        return logits.of_head()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        """Returns the gradient as it is."""
        return grad


def without_values(outputs: Any) -> Any:
    """Returns outputs with an empty tensor of the same dtype for tiled logits, which have no values to compare."""
    empty = partial(torch.empty, 0)
    return pytree.tree_map_only(TiledLogits, lambda x: empty(dtype=x.dtype, device=x.device), outputs)


def _first(args: Any, kwargs: Any) -> Any:
    return args[0] if args else kwargs.get("input")


def _is_in_place(name: str) -> bool:
    return name.endswith("_") and (not name.endswith("__") or name.startswith("__i") or name == "__setitem__")


# ---- rules: what a function does with logits in tiles; NotImplemented if it needs the full logits

_Rule = Callable[[TiledLogits, Any, Any, Any], Any]
_RULES: dict[str, _Rule] = {}


def _rule(names: str) -> Callable[[_Rule], _Rule]:
    def register(rule: _Rule) -> _Rule:
        _RULES.update(dict.fromkeys(names.split(), rule))
        return rule

    return register


@_rule("float double half bfloat16 to type add sub mul div truediv neg tanh rsub rmul radd")
def _each_number(x: TiledLogits, function: Any, args: Any, kwargs: Any) -> Any:
    """A function of each logit, such as a conversion, a temperature, or the parts of a soft cap."""
    others = pytree.tree_leaves((args[1:], kwargs))
    if any(not isinstance(other, (int, float, bool, torch.dtype)) for other in others) or kwargs.keys() & {"out"}:
        return NotImplemented
    return _with_step(x, lambda logits: function(logits, *args[1:], **kwargs))


@_rule("softmax log_softmax")
def _normalised(x: TiledLogits, function: Any, args: Any, kwargs: Any) -> Any:
    dim, dtype = bind_arguments(args, kwargs, "input", "dim")[1], kwargs.get("dtype")
    if dim is None or len(args) > 2 or dim % x.dim() != x.class_dim:
        return NotImplemented
    return _with_step(x, lambda logits: getattr(torch, function.__name__)(logits, -1, dtype=dtype))


def _with_step(x: TiledLogits, step: Callable[[Tensor], Tensor]) -> TiledLogits:
    step = partial(_under_autocast, _autocast_of(x.device), step)
    recipe = replace(x.recipe, steps=(*x.recipe.steps, step))
    return TiledLogits.of(x.hidden, x.weight, x.bias, recipe, x.class_dim)


@_rule("detach")
def _detach(x: TiledLogits, function: Any, args: Any, kwargs: Any) -> Any:
    bias = None if x.bias is None else x.bias.detach()
    return TiledLogits.of(x.hidden.detach(), x.weight.detach(), bias, x.recipe, x.class_dim)


@_rule("view reshape flatten unflatten view_as reshape_as contiguous clone")
def _reshape(x: TiledLogits, function: Any, args: Any, kwargs: Any) -> Any:
    """A view that keeps the classes together. A probe without values shows where they are in the view."""
    if function.__name__ in ("contiguous", "clone"):
        return x
    made = function(_probe(x), *args[1:], **kwargs)
    dim = _dim_of_classes(x, made)
    if dim is None:
        return NotImplemented
    tokens = [length for n, length in enumerate(made.shape) if n != dim]
    return x.changed(x.hidden.reshape(*tokens, x.hidden.shape[-1]), dim)


@_rule(
    "getitem transpose permute movedim moveaxis swapaxes swapdims unsqueeze squeeze select narrow split chunk unbind"
)
def _index(x: TiledLogits, function: Any, args: Any, kwargs: Any) -> Any:
    """A view that takes some of the tokens, or rearranges dimensions."""
    index = args[1] if len(args) > 1 else None
    if isinstance(index, Tensor):
        if x.class_dim < x.dim() - 1 or (index.dtype == torch.bool and index.dim() == x.dim()):
            return NotImplemented
        tokens = x.hidden[index]
        return x.changed(tokens, tokens.dim() - 1)
    if function.__name__ == "narrow" and bind_arguments(args, kwargs, "input", "dim")[1] % x.dim() == x.class_dim:
        return NotImplemented
    views = pytree.tree_leaves(function(_probe(x), *args[1:], **kwargs))
    dims = [_dim_of_classes(x, view) for view in views]
    if None in dims:
        return NotImplemented
    parts, structure = pytree.tree_flatten(function(x.hidden.movedim(-1, x.class_dim), *args[1:], **kwargs))
    pairs = [(part, dim) for part, dim in zip(parts, dims, strict=False) if dim is not None]
    if len(parts) != len(views) or any(part.shape[dim] != x.hidden.shape[-1] for part, dim in pairs):
        return NotImplemented
    return pytree.tree_unflatten([x.changed(part.movedim(dim, -1), dim) for part, dim in pairs], structure)


def _probe(x: TiledLogits) -> Tensor:
    """Returns a tensor without memory whose shape and strides are those of the logits."""
    shape = (*x.hidden.shape[:-1], x.shape[x.class_dim])
    return torch.empty(shape, dtype=x.dtype, device="meta").movedim(-1, x.class_dim)


def _dim_of_classes(x: TiledLogits, view: Any) -> int | None:
    """Returns the dimension of a probe's view that has all classes; None if there is none."""
    if not isinstance(view, Tensor) or not view._is_view() or view.dtype != x.dtype:
        return None
    pairs = [*zip(view.shape, view.stride(), strict=True)]
    return pairs.index((x.shape[x.class_dim], 1)) if (x.shape[x.class_dim], 1) in pairs else None


@_rule("logsumexp sum mean amax amin argmax argmin")
def _along_classes(x: TiledLogits, function: Any, args: Any, kwargs: Any) -> Any:
    """Functions that make one number of a token's logits."""
    dim, keepdim = bind_arguments(args, kwargs, "input", "dim", "keepdim")[1:]
    if isinstance(dim, (list, tuple)) and len(dim) == 1:
        (dim,) = dim
    if not isinstance(dim, int) or dim % x.dim() != x.class_dim or kwargs.keys() - {"input", "dim", "keepdim"}:
        return NotImplemented
    result = x.apply(lambda logits: getattr(torch, function.__name__)(logits, -1))
    return result.unsqueeze(dim) if keepdim else result


@_rule("max min topk")
def _largest(x: TiledLogits, function: Any, args: Any, kwargs: Any) -> Any:
    """The largest or smallest logits of each token, and their classes, which are computed one after the other."""
    name = function.__name__
    names = ("input", "k", "dim", "largest", "sorted") if name == "topk" else ("input", "dim", "keepdim")
    dim = dict(zip(names, bind_arguments(args, kwargs, *names), strict=True))["dim"]
    dim = -1 if dim is None and name == "topk" else dim
    if not isinstance(dim, int) or x.class_dim != x.dim() - 1 or dim % x.dim() != x.class_dim or "out" in kwargs:
        return NotImplemented
    options = {**dict(zip(names, args, strict=False)), **kwargs, "dim": -1}
    del options["input"]
    values, indices = (x.apply(partial(_part_of, function, number, options)) for number in (0, 1))
    return getattr(torch.return_types, name)((values, indices))


def _part_of(function: Any, number: int, options: Mapping[str, Any], logits: Tensor) -> Tensor:
    part: Tensor = function(logits, **options)[number]
    return part


@_rule("gather take_along_dim")
def _gather(x: TiledLogits, function: Any, args: Any, kwargs: Any) -> Any:
    _, dim, index = gather_arguments(function, args, kwargs)
    if not isinstance(dim, int) or not isinstance(index, Tensor) or dim % x.dim() != x.class_dim:
        return NotImplemented
    index = index.movedim(dim, -1)
    if index.shape[:-1] != x.hidden.shape[:-1] or kwargs.keys() & {"out", "sparse_grad"}:
        return NotImplemented
    return x.apply(lambda logits, at: logits.gather(-1, at), index).movedim(-1, dim)


@_rule("cross_entropy nll_loss")
def _cross_entropy(x: TiledLogits, function: Any, args: Any, kwargs: Any) -> Any:
    """The loss of classes that are given by number. Sums and means are made of the losses of all tokens."""
    arguments = cross_entropy_arguments(args, kwargs)
    target, weight, reduction = arguments["target"], arguments["weight"], arguments["reduction"] or "mean"
    is_old = arguments["size_average"] is not None or arguments["reduce"] is not None
    if (
        is_old
        or target.is_floating_point()
        or target.shape != x.hidden.shape[:-1]
        or x.class_dim != min(x.dim() - 1, 1)
    ):
        return NotImplemented
    if isinstance(weight, Tensor) and weight.requires_grad:
        return NotImplemented
    ignored = -100 if arguments["ignore_index"] is None else arguments["ignore_index"]
    options = {"weight": weight, "ignore_index": ignored}
    if arguments["label_smoothing"] is not None:
        options["label_smoothing"] = arguments["label_smoothing"]
    losses = x.apply(lambda logits, at: function(logits, at, reduction="none", **options), target)
    if reduction == "none":
        return losses
    return losses.sum() if reduction == "sum" else losses.sum() / loss_weights(target, ignored, weight, losses.dtype)


def loss_weights(target: Tensor, ignored: int, weight: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Returns the number by which cross_entropy divides a mean: that of the tokens, or the sum of their weights."""
    counts = target != ignored
    weights = counts.to(dtype) if weight is None else weight[target.masked_fill(~counts, 0)] * counts
    return weights.sum()


# ---- autocast: a tile may be computed elsewhere than the user's code asked for it

_Autocast = tuple[bool, torch.dtype | None]


def _autocast_of(device: torch.device) -> _Autocast:
    """Returns whether autocast is on, and its dtype."""
    if not torch.amp.is_autocast_available(device.type):
        return False, None
    return torch.is_autocast_enabled(device.type), torch.get_autocast_dtype(device.type)


@contextmanager
def _autocast_as(device: torch.device, state: _Autocast | None) -> Iterator[None]:
    """Sets autocast to a state, or turns it off (None)."""
    is_on, dtype = state or (False, None)
    if is_on or _autocast_of(device)[0]:
        with torch.autocast(device.type, dtype, is_on):
            yield
    else:
        yield


def _under_autocast(state: _Autocast, call: Callable[..., Tensor], logits: Tensor, *operands: Tensor) -> Tensor:
    """Calls a function of logits as where the user's code called it."""
    with _autocast_as(logits.device, state):
        return call(logits, *operands)


# ---- heads, and the comparison with full logits


def tiled_linear(hidden: Tensor, weight: Tensor, bias: Tensor | None, tiles: Tiles) -> Tensor:
    """Returns the output of a linear layer as tiled logits. Torch function modes see it as a function of this name."""
    if torch.overrides.has_torch_function((hidden, weight)):
        made: Tensor = torch.overrides.handle_torch_function(tiled_linear, (hidden,), hidden, weight, bias, tiles)
        return made
    dtype = F.linear(hidden.new_empty(0, hidden.shape[-1]), weight.detach()[:0]).dtype  # as autocast chooses it
    return TiledLogits.of(hidden, weight, bias, _LogitsRecipe(tiles, dtype), hidden.dim() - 1)


def _run_head(head: nn.Linear, forward: Callable[[Tensor], Tensor], tiles: Tiles, hidden: Tensor) -> Tensor:
    if not tiles.is_on or hidden.dim() < 2 or hidden.device.type == "meta":
        return forward(hidden)
    return tiled_linear(hidden, head.weight, head.bias, tiles)


def heads_of(model: nn.Module) -> dict[str, nn.Linear]:
    """The linear layers outside of a model's blocks that have more outputs than inputs, by name."""
    inside = {id(module) for block in blocks_of(model, sharing=True).values() for module in block.modules()}
    return {
        name: module
        for name, module in model.named_modules()
        if type(module) is nn.Linear and id(module) not in inside and module.out_features > module.in_features
    }


class LogitsTiling:
    """Makes the heads of a job's model return tiled logits while the job runs a forward.

    In the first training step, the loss and its gradients are also computed from full logits. Raises UsageError if they
    differ, or if the model has no head. `staged`: the model is in pipeline stages, so it can be compared only while it
    is assembled.
    """

    def __init__(self, job: TrainingJob, count: int, staged: bool) -> None:
        if job.over is not None:
            raise UsageError('loss_over="batch" needs full logits, which tiles= avoids', "leave tiles= out")
        self._job, self._staged, self._is_compared = job, staged, False
        self._tiles, self._heads = Tiles(count), heads_of(job.model)
        if not self._heads:
            what = f"{type(job.model).__name__} has no nn.Linear after its blocks whose logits tiles= could divide"
            raise UsageError(what, "compute the logits by an nn.Linear (it may share its weight), or leave tiles= out")
        for head in self._heads.values():
            vars(head)["forward"] = partial(_run_head, head, head.forward, self._tiles)
        self._plain_forward, job.forward = job.forward, self._forward

    @property
    def decision(self) -> tuple[str, str]:
        """What is done with the model, and why, for the explanation of the plan."""
        return f"the logits of {', '.join(self._heads)} are computed in {self._tiles.count} tiles", "tiles= was given"

    def _forward(self, model: nn.Module, batch: Any) -> Any:
        is_training = model is self._job.model and model.training and torch.is_grad_enabled()
        if is_training and self._job.trains and not self._is_compared and (self._job.assembled or not self._staged):
            self._is_compared = True
            self._compare(model, batch)
        return self._run(model, batch)

    def _run(self, model: nn.Module, batch: Any) -> Any:
        self._tiles.is_on = True
        self._tiles.forwards += model.training and torch.is_grad_enabled()
        try:
            return self._plain_forward(model, batch)
        finally:
            self._tiles.is_on = False

    def _compare(self, model: nn.Module, batch: Any) -> None:
        """Computes the first micro-batch with tiled and with full logits, and compares losses and gradients."""
        with without_a_trace(model, RngState(self._job.device)):
            tiled = self._differentiate(self._run, model, batch)
        functions = sorted(self._tiles.full_for)
        report = f"the loss gets full logits for {', '.join(functions[:3])}{', ...' if functions[3:] else ''}; "
        report = report if functions else ""
        if _COPIES * self._tiles.bytes > room(self._job.device):
            self._job.news["tiles"] = f"tiles=: {report}not verified, because full logits do not fit in memory", ""
            return
        with without_a_trace(model, RngState(self._job.device)):
            full = self._differentiate(self._plain_forward, model, batch)
        if tiled is None or full is None:
            return
        like = [full[0].total, *full[1].values()]
        one, other, distance = loss_apart(tiled[0], full[0], max(map(allowed, like)), 1.0)
        name, of_gradients = farthest(tiled[1], full[1], like)
        if one or name or tiled[1].keys() != full[1].keys():
            why = f"the loss of a micro-batch is {one} instead of {other}" if one else f"the gradient of {name} differs"
            what = f"{why} when tiles= divides the logits of {type(model).__name__}"
            raise UsageError(what, "leave tiles= out")
        distances = f"relative difference {distance:.1g} of the loss and {of_gradients:.1g} of the gradients"
        self._job.news["tiles"] = f"tiles=: {report}verified on one micro-batch against full logits: {distances}", ""

    def _differentiate(
        self, forward: Callable[[nn.Module, Any], Any], model: nn.Module, batch: Any
    ) -> tuple[Loss, Mapping[str, Tensor]] | None:
        """Returns the loss of a micro-batch and its gradients by name; None if the output is on another worker."""
        output = forward(model, batch)
        if output is ELSEWHERE:
            return None
        loss = Loss.of(self._job.loss(output, batch), Chunk([MicroBatch(0, 1, None)], None), trainable=False)
        named = {name: param for name, param in self._job.used_params.items() if param.requires_grad}
        gradients = differentiate([loss.total], [*named.values()]) if loss.total.requires_grad else ()
        pairs = zip(named, gradients, strict=False)
        return loss.detached(), {name: gradient for name, gradient in pairs if gradient is not None}
