"""Rules for torch operations on sharded tensors.

A rule returns UNKNOWN in a case that it
does not know, and then the whole is gathered.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from string import ascii_lowercase
from typing import Any

import torch
import torch.nn.functional as F

from paceline.comm.torch_private import pytree
from paceline.errors import UsageError
from paceline.parallel.tensor_parallel.redistribute import ShardPlacement
from paceline.parallel.tensor_parallel.sharded_mode import (
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

RULES: dict[str, Rule] = {}


def rule_of(table: dict[str, Rule], *names: str) -> Callable[[Rule], Rule]:
    """Puts a rule into a table, under the names of its functions."""

    def known(rule: Rule) -> Rule:
        table.update(dict.fromkeys(" ".join(names).split(), rule))
        return rule

    return known


_rule = partial(rule_of, RULES)


ELEMENTWISE = set[str]()  # functions of each element by itself


def _each(*names: str) -> Callable[[Rule], Rule]:
    ELEMENTWISE.update(" ".join(names).split())
    return _rule(*names)


@_each(
    "add sub subtract mul multiply div divide true_divide floor_divide remainder fmod pow radd rsub rmul rdiv rpow",
    "rtruediv truediv iadd isub imul itruediv idiv neg negative abs absolute exp expm1 log log1p log2 sqrt rsqrt sin",
    "cos tan tanh sigmoid erf erfc square reciprocal sign relu relu6 gelu silu elu celu selu leaky_relu hardtanh",
    "mish hardswish hardsigmoid softplus softsign logsigmoid tanhshrink clamp clip clamp_min clamp_max maximum",
    "minimum where masked_fill lerp addcmul addcdiv eq ne lt le gt ge logical_and logical_or logical_not logical_xor",
    "bitwise_and bitwise_or bitwise_not and or xor invert isnan isinf isfinite nan_to_num float double half bfloat16",
    "to type clone contiguous detach bool int long zeros_like ones_like empty_like full_like softshrink threshold",
    "round floor ceil trunc atan2 positive type_as zero fill copy",
)
def _elementwise(on: ShardedTensorMode, function: Any, given: Any, named: Any) -> Any:
    name = function.__name__
    leaves, spec = pytree.tree_flatten((given, named))
    places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    if changes(name):
        finest = max(part.count for part in map(part_of, tensors_in(leaves)) if part is not None)
        part = part_of(leaves[places[0]])
        if part is None or part.count < finest:
            return UNKNOWN
    if name in ("to", "type_as"):  # the second one only says of what kind
        places = places[:1]

    def call(*ours: Tensor) -> Any:
        filled = [*leaves]
        for place, tensor in zip(places, ours, strict=True):
            filled[place] = tensor
        given, named = pytree.tree_unflatten(filled, spec)
        return function(*given, **named)

    return on.elementwise(call, [leaves[place] for place in places])


@_rule("applied")
def _moved(on: ShardedTensorMode, function: Any, given: Any, named: Any) -> Any:
    """What others move along another dimension."""
    return mark(function(*given), part_of(given[1]))


@_rule("shape size len")
def _size(on: ShardedTensorMode, function: Any, given: Any, named: Any) -> Any:
    shape = torch.Size(logical(given[0]))
    if function.__name__ == "__len__":
        return shape[0]
    dim = named.get("dim", given[1] if len(given) > 1 else None)
    on.note("shape", ())
    return shape if dim is None else shape[dim]


@_rule("new_zeros new_ones new_full new_empty new_tensor")
def _new(on: ShardedTensorMode, function: Any, given: Any, named: Any) -> Any:
    """Of the shape that is said, which is none of a part."""
    return function(*given, **named)


@_rule("numel nelement")
def _numel(on: ShardedTensorMode, function: Any, given: Any, named: Any) -> Any:
    return math.prod(logical(given[0]))


@_rule(
    "transpose permute movedim moveaxis swapdims swapaxes t unsqueeze squeeze select narrow unbind T mT H mH adjoint",
    "diagonal",
)
def _view(on: ShardedTensorMode, function: Any, given: Any, named: Any) -> Any:
    return on.viewed(function, given, named)


def _sizes(given: Any, named: Any) -> Any:
    """What a tensor is to become: sizes one by one, in a list, or those of another tensor; or a dtype."""
    sizes = named.get("shape", named.get("size", given[1:]))
    if len(sizes) == 1 and not isinstance(sizes[0], int):
        (sizes,) = sizes
    return logical(sizes) if isinstance(sizes, Tensor) else sizes


@_rule("view reshape view_as reshape_as")
def _reshape(on: ShardedTensorMode, function: Any, given: Any, named: Any) -> Any:
    x, part = given[0], part_of(given[0])
    sizes = _sizes(given, named)
    if part is None or isinstance(sizes, torch.dtype):
        return UNKNOWN
    call = Tensor.view if function.__name__.startswith("view") else Tensor.reshape
    return on.reshaped(x, part, sizes, call)


@_rule("flatten unflatten")
def _flatten(on: ShardedTensorMode, function: Any, given: Any, named: Any) -> Any:
    x, part = given[0], part_of(given[0])
    if part is None:
        return UNKNOWN
    sizes = function(torch.empty(logical(x), dtype=x.dtype, device="meta"), *given[1:], **named).shape
    return on.reshaped(x, part, sizes, Tensor.reshape)


@_rule("expand expand_as")
def _expand(on: ShardedTensorMode, function: Any, given: Any, named: Any) -> Any:
    x, part = given[0], part_of(given[0])
    if part is None:
        return UNKNOWN
    sizes = list(_sizes(given, named))
    place = part.dim - x.dim() + len(sizes)
    if sizes[place] not in (-1, part.length):
        return UNKNOWN
    if sizes[place] != -1:
        on.note("expand", ())
    sizes[place] = -1
    return mark(x.expand(sizes), replace(part, dim=place))


@_rule("getitem")
def _index(on: ShardedTensorMode, function: Any, given: Any, named: Any) -> Any:
    """Slices, numbers and None; along what is divided, a slice that begins and ends with sections."""
    x, index = given
    part = part_of(x)
    steps = index if isinstance(index, tuple) else (index,)
    if part is None or not all(step is None or step is ... or type(step) in (int, slice) for step in steps):
        return UNKNOWN
    made = on.viewed(function, given, named)
    if made is not UNKNOWN:
        return made
    taken = sum(step is not None and step is not ... for step in steps)
    filled = next((at for at, step in enumerate(steps) if step is ...), len(steps))
    spread = [*steps[:filled], *[slice(None)] * (x.dim() - taken), *steps[filled + 1 :]]
    place = [at for at, step in enumerate(spread) if step is not None][part.dim]
    if not isinstance(spread[place], slice) or spread[place].step not in (None, 1):
        return UNKNOWN
    start, stop, _ = spread[place].indices(part.length)
    pieces = on.divided(x, part, [start, max(stop - start, 0), part.length - max(stop, start)])
    if pieces is None:
        return UNKNOWN
    spread[place] = slice(None)
    middle = pieces[1]
    return function(middle, tuple(spread)) if not part_of(middle) else on.viewed(function, (middle, tuple(spread)), {})


@_rule("split chunk tensor_split split_with_sizes unsafe_split unsafe_chunk")
def _split(on: ShardedTensorMode, function: Any, given: Any, named: Any) -> Any:
    x, part = given[0], part_of(given[0])
    if part is None:
        return UNKNOWN
    made = on.viewed(function, given, named)
    if made is not UNKNOWN:
        return made
    probe = function(torch.empty(logical(x), dtype=x.dtype, device="meta"), *given[1:], **named)
    pieces = on.divided(x, part, [piece.shape[part.dim] for piece in probe])
    return UNKNOWN if pieces is None else tuple(pieces)


@_rule("cat concat concatenate stack")
def _cat(on: ShardedTensorMode, function: Any, given: Any, named: Any) -> Any:
    # Torch takes an empty one for any shape, as caches begin with.
    tensors, stacks = [t for t in given[0] if logical(t) != (0,)], function.__name__ == "stack"
    dim = named.get("dim", given[1] if len(given) > 1 else 0)
    first = next(t for t in tensors if part_of(t))
    dims = Tensor.dim(first) + stacks
    dim, part = dim % dims, part_of(first)
    assert part is not None
    parts = [part_of(t) for t in tensors]
    if not stacks and dim == part.dim and all(p is not None and (p.dim, p.count) == (dim, part.count) for p in parts):
        made = function(tensors, dim)
        return mark(made, replace(part, sections=tuple(s for p in parts if p is not None for s in p.sections)))
    if (not stacks and dim == part.dim) or any(p is not None and p.dim != part.dim for p in parts):
        return UNKNOWN
    letters = ascii_lowercase[: Tensor.dim(first)]
    out = letters[:dim] + "A" + letters[dim:] if stacks else letters
    return on.product(lambda *ours: function(ours, dim), tensors, [letters] * len(tensors), out)


@_rule("repeat_interleave")
def _repeat(on: ShardedTensorMode, function: Any, given: Any, named: Any) -> Any:
    x, part = given[0], part_of(given[0])
    times = named.get("repeats", given[1] if len(given) > 1 else None)
    dim = named.get("dim", given[2] if len(given) > 2 else None)
    if part is None or dim is None or not isinstance(times, int):
        return UNKNOWN
    made = function(*given, **named)
    longer = tuple(section * times for section in part.sections) if dim % x.dim() == part.dim else part.sections
    return mark(made, replace(part, sections=longer))


# Where in their arguments the dimension stands that they go along.
_ALONG = {
    **dict.fromkeys(("softmax", "log_softmax", "softmin", "cumsum", "cumprod", "logcumsumexp", "logsumexp"), 1),
    **dict.fromkeys(("sum", "nansum", "mean", "var", "std", "prod", "amax", "amin", "max", "min"), 1),
    **dict.fromkeys(("argmax", "argmin", "any", "all", "median", "sort", "argsort", "flip"), 1),
    **dict.fromkeys(("norm", "topk", "normalize", "kthvalue"), 2),
}


@_rule(*_ALONG)
def _along(on: ShardedTensorMode, function: Any, given: Any, named: Any) -> Any:
    """Along other dimensions than the one that is divided."""
    x, part = given[0], part_of(given[0])
    at = _ALONG[function.__name__.strip("_")]
    dim = named.get("dim", given[at] if len(given) > at else None)
    if function.__name__ == "flip":  # which takes them one by one, too
        dim = named.get("dims", given[1] if len(given) == 2 else given[1:])
    dims = [dim] if isinstance(dim, int) else dim
    if part is None or isinstance(dims, (bool, Tensor)) or not isinstance(dims, (list, tuple)) or not dims:
        return UNKNOWN
    dims = {one % x.dim() for one in dims}
    if part.dim in dims or len([*tensors_in(given)]) > 1 or function.__name__.endswith("_"):
        return UNKNOWN
    made = function(*given, **named)
    fewer = sum(one < part.dim for one in dims)
    for one in pytree.tree_leaves(made):
        mark(one, replace(part, dim=part.dim - (fewer if one.dim() < x.dim() else 0)))
    return made


@_rule("layer_norm rms_norm")
def _norm(on: ShardedTensorMode, function: Any, given: Any, named: Any) -> Any:
    """Along other dimensions than the one that is divided; weight and bias meet a part only."""
    x, part, names = given[0], part_of(given[0]), ("weight", "bias")
    shape = given[1] if len(given) > 1 else named["normalized_shape"]
    if part is None or part.dim >= x.dim() - len(shape):
        return UNKNOWN
    given = (*given[:2], *(on.shared(one) if isinstance(one, Tensor) else one for one in given[2:]))
    named = {key: on.shared(one) if key in names and one is not None else one for key, one in named.items()}
    return mark(function(*given, **named), part)


@_rule("matmul bmm mm rmatmul imatmul")
def _matmul(on: ShardedTensorMode, function: Any, given: Any, named: Any) -> Any:
    a, b = given[:2] if function.__name__ != "__rmatmul__" else given[1::-1]
    if min(a.dim(), b.dim()) < 2:
        return UNKNOWN
    batch = ascii_lowercase[: max(a.dim(), b.dim()) - 2]
    letters = [batch[len(batch) - a.dim() + 2 :] + "RK", batch[len(batch) - b.dim() + 2 :] + "KC"]
    return on.product(torch.matmul, (a, b), letters, batch + "RC")


def asked_of(given: Sequence[Any], named: Mapping[str, Any], *names: str) -> list[Any]:
    """Arguments by their order or names; None where there is none."""
    known = {**dict(zip(names, given, strict=False)), **named}
    return [known.get(name) for name in names]


@_rule("linear")
def _linear(on: ShardedTensorMode, function: Any, given: Any, named: Any) -> Any:
    x, weight, bias = asked_of(given, named, "input", "weight", "bias")
    rows = ascii_lowercase[: x.dim() - 1]
    made = on.product(F.linear, (x, weight), [rows + "K", "OK"], rows + "O")
    return made if made is UNKNOWN or bias is None else _sum_of(on, made, bias)


def _sum_of(on: ShardedTensorMode, a: Tensor, b: Tensor) -> Any:
    if part_of(a) or part_of(b):
        return on.elementwise(torch.add, (a, b))
    return on.alike(torch.add, (a, b), {})


@_rule("addmm")
def _addmm(on: ShardedTensorMode, function: Any, given: Any, named: Any) -> Any:
    bias, a, b = asked_of(given, named, "input", "mat1", "mat2")
    if named.keys() & {"beta", "alpha", "out"}:
        return UNKNOWN
    made = on.product(torch.mm, (a, b), ["RK", "KC"], "RC")
    return made if made is UNKNOWN else _sum_of(on, made, bias)


@_rule("einsum")
def _einsum(on: ShardedTensorMode, function: Any, given: Any, named: Any) -> Any:
    equation, *tensors = given
    if len(tensors) == 1 and isinstance(tensors[0], (list, tuple)):
        (tensors,) = tensors
    if not isinstance(equation, str) or "->" not in equation or "." in equation:
        return UNKNOWN
    letters, out = equation.replace(" ", "").split("->")
    return on.product(lambda *ours: function(equation, *ours), tensors, letters.split(","), out)


@_rule("dropout alpha_dropout dropout1d dropout2d dropout3d feature_dropout")
def _drop(on: ShardedTensorMode, function: Any, given: Any, named: Any) -> Any:
    x, part = given[0], part_of(given[0])
    p = named.get("p", given[1] if len(given) > 1 else 0.5)
    train = named.get("training", named.get("train", given[2] if len(given) > 2 else True))
    if part is None or "alpha" in function.__name__:
        return UNKNOWN
    if not train or not p:
        return mark(function(*given, **named), part)
    return mark(x * on.masked(x, part, lambda whole: function(whole, p, True)), part)


@_rule("normal_ uniform_ bernoulli_ exponential_ random_ log_normal_ geometric_ cauchy_")
def _draw(on: ShardedTensorMode, function: Any, given: Any, named: Any) -> Any:
    x, part = given[0], part_of(given[0])
    if part is None or any(True for _ in tensors_in((*given[1:], *named.values()))):
        return UNKNOWN
    with torch.no_grad():
        x.copy_(on.masked(x, part, lambda whole: function(whole, *given[1:], **named)))
    return x


@_rule("scaled_dot_product_attention")
def _attend(on: ShardedTensorMode, function: Any, given: Any, named: Any) -> Any:
    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
    asked: Mapping[str, Any] = {**dict(zip(names, given, strict=False)), **named}
    tensors = [asked["query"], asked["key"], asked["value"]]
    mask, p, more = asked.get("attn_mask"), asked.get("dropout_p", 0.0), dict(asked)
    for name in (*names[:4], "dropout_p"):
        more.pop(name, None)
    heads = ascii_lowercase[: tensors[0].dim() - 2]
    own, letters = [t.dim() - 2 for t in tensors], ["LE", "SE", "SV"]
    letters = [heads[len(heads) - n :] + ending for n, ending in zip(own, letters, strict=True)]
    if isinstance(mask, Tensor):
        tensors.append(mask)
        letters.append((heads + "LS")[len(heads) + 2 - mask.dim() :])
    if more.get("enable_gqa") and len({logical(t)[-3] for t in tensors[:3]}) > 1:
        repeats = logical(tensors[0])[-3] // logical(tensors[1])[-3]
        tensors[1:3] = [_repeated(on, t, repeats) for t in tensors[1:3]]
        more["enable_gqa"] = False
    found = [(part, part.dim - Tensor.dim(t)) for t in tensors if (part := part_of(t)) is not None]
    if not p:
        call = partial(function, **more)
    elif tensors[0].is_cuda:
        what = f"{on.where()} draws in a kernel for a part of its heads (scaled_dot_product_attention with dropout)"
        raise UsageError(what, 'say attn_implementation="eager", or set its dropout to 0')
    else:
        call = partial(_attention, on, max(found, key=lambda pair: pair[0].count), p, more)
    return on.product(call, tensors, letters, heads + "LV", known=heads)


def _repeated(on: ShardedTensorMode, heads: Tensor, times: int) -> Tensor:
    if part_of(heads) is None:
        return heads.repeat_interleave(times, -3)
    return _repeat(on, Tensor.repeat_interleave, (heads, times, -3), {})  # type: ignore[no-any-return]


def _attention(
    on: ShardedTensorMode,
    divided: tuple[ShardPlacement, int],
    p: float,
    more: Mapping[str, Any],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
) -> Tensor:
    """As torch computes it on a CPU where it drops, but for the mask of what is dropped."""
    scores = q @ k.transpose(-2, -1) * (more.get("scale") or q.shape[-1] ** -0.5)
    if more.get("is_causal"):
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask
    weights: Tensor = torch.ops.aten._safe_softmax.default(scores, -1)  # zeros where all is masked
    part, dim = divided
    part = replace(part, dim=weights.dim() + dim)
    mark(weights, part)
    return (weights * on.masked(weights, part, lambda whole: F.dropout(whole, p, True))) @ v
