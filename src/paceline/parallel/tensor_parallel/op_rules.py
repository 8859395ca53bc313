"""Rules for torch operations on sharded tensors.

A rule returns UNKNOWN for a case that it does not cover; then `ShardedTensorMode` gathers the full tensors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from string import ascii_lowercase
from typing import Any

import torch
import torch.nn.functional as F

from paceline.comm.torch_private import pytree
from paceline.compute.call_arguments import bind_arguments, gather_arguments
from paceline.errors import UsageError
from paceline.parallel.tensor_parallel.attention_functions import BY_HEADS
from paceline.parallel.tensor_parallel.redistribute import ShardPlacement
from paceline.parallel.tensor_parallel.sharded_mode import (
    UNKNOWN,
    Rule,
    ShardedTensorMode,
    Tensor,
    full_shape_of,
    is_in_place,
    placement_of,
    set_placement,
    tensors_in,
)

OP_RULES: dict[str, Rule] = {**BY_HEADS}


def rule_of(table: dict[str, Rule], *names: str) -> Callable[[Rule], Rule]:
    """Returns a decorator that puts a rule into a table, under the names of the torch functions that it covers."""

    def register(rule: Rule) -> Rule:
        table.update(dict.fromkeys(" ".join(names).split(), rule))
        return rule

    return register


_rule = partial(rule_of, OP_RULES)


ELEMENTWISE = set[str]()  # names of functions that compute each element by itself


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
def _elementwise(mode: ShardedTensorMode, function: Any, args: Any, kwargs: Any) -> Any:
    name = function.__name__
    leaves, spec = pytree.tree_flatten((args, kwargs))
    positions = [position for position, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    if is_in_place(name):
        finest = max(placement.count for placement in map(placement_of, tensors_in(leaves)) if placement is not None)
        placement = placement_of(leaves[positions[0]])
        if placement is None or placement.count < finest:
            return UNKNOWN
    if name in ("to", "type_as"):  # the second tensor only gives the dtype and device
        positions = positions[:1]

    def call_with(*tensors: Tensor) -> Any:
        rebuilt = [*leaves]
        for position, tensor in zip(positions, tensors, strict=True):
            rebuilt[position] = tensor
        args, kwargs = pytree.tree_unflatten(rebuilt, spec)
        return function(*args, **kwargs)

    return mode.elementwise(call_with, [leaves[position] for position in positions])


@_rule("applied")
def _applied(mode: ShardedTensorMode, function: Any, args: Any, kwargs: Any) -> Any:
    """One of our own autograd functions, called on a tensor that is also sharded along another dimension."""
    return set_placement(function(*args), placement_of(args[1]))


@_rule("shape size len")
def _size(mode: ShardedTensorMode, function: Any, args: Any, kwargs: Any) -> Any:
    shape = torch.Size(full_shape_of(args[0]))
    if function.__name__ == "__len__":
        return shape[0]
    dim = kwargs.get("dim", args[1] if len(args) > 1 else None)
    mode.note("shape", ())
    return shape if dim is None else shape[dim]


@_rule("new_zeros new_ones new_full new_empty new_tensor")
def _new(mode: ShardedTensorMode, function: Any, args: Any, kwargs: Any) -> Any:
    """Makes a tensor of the given shape, which is never a shard."""
    return function(*args, **kwargs)


@_rule("numel nelement")
def _numel(mode: ShardedTensorMode, function: Any, args: Any, kwargs: Any) -> Any:
    return math.prod(full_shape_of(args[0]))


@_rule(
    "transpose permute movedim moveaxis swapdims swapaxes t unsqueeze squeeze select narrow unbind T mT H mH adjoint",
    "diagonal",
)
def _view(mode: ShardedTensorMode, function: Any, args: Any, kwargs: Any) -> Any:
    return mode.view(function, args, kwargs)


def _sizes(args: Any, kwargs: Any) -> Any:
    """Returns the target of a view: sizes, given one by one, in a list, or as those of another tensor; or a dtype."""
    sizes = kwargs.get("shape", kwargs.get("size", args[1:]))
    if len(sizes) == 1 and not isinstance(sizes[0], int):
        (sizes,) = sizes
    return full_shape_of(sizes) if isinstance(sizes, Tensor) else sizes


@_rule("view reshape view_as reshape_as")
def _reshape(mode: ShardedTensorMode, function: Any, args: Any, kwargs: Any) -> Any:
    x, placement = args[0], placement_of(args[0])
    sizes = _sizes(args, kwargs)
    if placement is None or isinstance(sizes, torch.dtype):
        return UNKNOWN
    call = Tensor.view if function.__name__.startswith("view") else Tensor.reshape
    return mode.reshape(x, placement, sizes, call)


@_rule("flatten unflatten")
def _flatten(mode: ShardedTensorMode, function: Any, args: Any, kwargs: Any) -> Any:
    x, placement = args[0], placement_of(args[0])
    if placement is None:
        return UNKNOWN
    sizes = function(torch.empty(full_shape_of(x), dtype=x.dtype, device="meta"), *args[1:], **kwargs).shape
    return mode.reshape(x, placement, sizes, Tensor.reshape)


@_rule("expand expand_as")
def _expand(mode: ShardedTensorMode, function: Any, args: Any, kwargs: Any) -> Any:
    x, placement = args[0], placement_of(args[0])
    if placement is None:
        return UNKNOWN
    sizes = list(_sizes(args, kwargs))
    dim = placement.dim - x.dim() + len(sizes)
    if sizes[dim] not in (-1, placement.length):
        return UNKNOWN
    if sizes[dim] != -1:
        mode.note("expand", ())
    sizes[dim] = -1
    return set_placement(x.expand(sizes), replace(placement, dim=dim))


@_rule("getitem")
def _index(mode: ShardedTensorMode, function: Any, args: Any, kwargs: Any) -> Any:
    """Handles slices, numbers and None; along the divided dimension, a slice that begins and ends with sections."""
    x, index = args
    placement = placement_of(x)
    entries = index if isinstance(index, tuple) else (index,)
    if placement is None or not all(step is None or step is ... or type(step) in (int, slice) for step in entries):
        return UNKNOWN
    output = mode.view(function, args, kwargs)
    if output is not UNKNOWN:
        return output
    given_dims = sum(step is not None and step is not ... for step in entries)
    ellipsis = next((position for position, step in enumerate(entries) if step is ...), len(entries))
    steps = [*entries[:ellipsis], *[slice(None)] * (x.dim() - given_dims), *entries[ellipsis + 1 :]]
    position = [position for position, step in enumerate(steps) if step is not None][placement.dim]
    if not isinstance(steps[position], slice) or steps[position].step not in (None, 1):
        return UNKNOWN
    start, stop, _ = steps[position].indices(placement.length)
    if start == 0 and (shorter := _shortened(mode, x, placement, stop)) is not None:
        steps[position] = slice(None)
        return mode.view(function, (shorter, tuple(steps)), {})
    slices = mode.split(x, placement, [start, max(stop - start, 0), placement.length - max(stop, start)])
    if slices is None:
        return UNKNOWN
    steps[position] = slice(None)
    middle = slices[1]
    return (
        function(middle, tuple(steps)) if not placement_of(middle) else mode.view(function, (middle, tuple(steps)), {})
    )


def _shortened(mode: ShardedTensorMode, x: Tensor, placement: ShardPlacement, length: int) -> Tensor | None:
    """Returns the shard of a tensor without its last elements, as in ``logits[:, :-1]``; None if that moves the borders
    between the workers' shards.
    """
    shorter = replace(placement, sections=(length,))
    same_borders = -(-length // placement.count) == -(-placement.length // placement.count)
    if len(placement.sections) > 1 or not same_borders or not _is_among_all(mode, placement):
        return None
    (held,) = shorter.rows(mode.redistributor.index(placement))
    return set_placement(x.narrow(placement.dim, 0, len(held)), shorter)


@_rule("split chunk tensor_split split_with_sizes unsafe_split unsafe_chunk")
def _split(mode: ShardedTensorMode, function: Any, args: Any, kwargs: Any) -> Any:
    x, placement = args[0], placement_of(args[0])
    if placement is None:
        return UNKNOWN
    output = mode.view(function, args, kwargs)
    if output is not UNKNOWN:
        return output
    probe = function(torch.empty(full_shape_of(x), dtype=x.dtype, device="meta"), *args[1:], **kwargs)
    slices = mode.split(x, placement, [piece.shape[placement.dim] for piece in probe])
    return UNKNOWN if slices is None else tuple(slices)


@_rule("cat concat concatenate stack")
def _cat(mode: ShardedTensorMode, function: Any, args: Any, kwargs: Any) -> Any:
    # Torch ignores a tensor of shape (0,), which caches start with.
    tensors, is_stack = [t for t in args[0] if full_shape_of(t) != (0,)], function.__name__ == "stack"
    dim = kwargs.get("dim", args[1] if len(args) > 1 else 0)
    first_shard = next(t for t in tensors if placement_of(t))
    dims = Tensor.dim(first_shard) + is_stack
    dim, placement = dim % dims, placement_of(first_shard)
    assert placement is not None
    placements = [placement_of(t) for t in tensors]
    if (
        not is_stack
        and dim == placement.dim
        and all(other is not None and (other.dim, other.count) == (dim, placement.count) for other in placements)
    ):
        output = function(tensors, dim)
        return set_placement(
            output,
            replace(placement, sections=tuple(s for other in placements if other is not None for s in other.sections)),
        )
    if (not is_stack and dim == placement.dim) or any(
        other is not None and other.dim != placement.dim for other in placements
    ):
        return UNKNOWN
    letters = ascii_lowercase[: Tensor.dim(first_shard)]
    out = letters[:dim] + "A" + letters[dim:] if is_stack else letters
    return mode.product(lambda *operands: function(operands, dim), tensors, [letters] * len(tensors), out)


@_rule("repeat_interleave")
def _repeat(mode: ShardedTensorMode, function: Any, args: Any, kwargs: Any) -> Any:
    x, placement = args[0], placement_of(args[0])
    times = kwargs.get("repeats", args[1] if len(args) > 1 else None)
    dim = kwargs.get("dim", args[2] if len(args) > 2 else None)
    if placement is None or dim is None or not isinstance(times, int):
        return UNKNOWN
    output = function(*args, **kwargs)
    sections = (
        tuple(section * times for section in placement.sections)
        if dim % x.dim() == placement.dim
        else placement.sections
    )
    return set_placement(output, replace(placement, sections=sections))


# Functions that work along a dimension, and the position of that dimension among their arguments.
_ALONG = {
    **dict.fromkeys(("softmax", "log_softmax", "softmin", "cumsum", "cumprod", "logcumsumexp", "logsumexp"), 1),
    **dict.fromkeys(("sum", "nansum", "mean", "var", "std", "prod", "amax", "amin", "max", "min"), 1),
    **dict.fromkeys(("argmax", "argmin", "any", "all", "median", "sort", "argsort", "flip"), 1),
    **dict.fromkeys(("norm", "topk", "normalize", "kthvalue"), 2),
}


@_rule(*_ALONG)
def _along(mode: ShardedTensorMode, function: Any, args: Any, kwargs: Any) -> Any:
    """Handles functions along dimensions other than the divided one."""
    x, placement = args[0], placement_of(args[0])
    position = _ALONG[function.__name__.strip("_")]
    default = -1 if function.__name__ in ("topk", "sort", "argsort", "kthvalue") else None
    dim = kwargs.get("dim", args[position] if len(args) > position else default)
    if function.__name__ == "flip":  # which also accepts dimensions one by one
        dim = kwargs.get("dims", args[1] if len(args) == 2 else args[1:])
    dims = [dim] if isinstance(dim, int) else dim
    if placement is None or isinstance(dims, (bool, Tensor)) or not isinstance(dims, (list, tuple)) or not dims:
        return UNKNOWN
    dims = {one % x.dim() for one in dims}
    if placement.dim in dims or len([*tensors_in(args)]) > 1 or function.__name__.endswith("_"):
        return UNKNOWN
    output = function(*args, **kwargs)
    removed = sum(one < placement.dim for one in dims)
    for one in pytree.tree_leaves(output):
        set_placement(one, replace(placement, dim=placement.dim - (removed if one.dim() < x.dim() else 0)))
    return output


@_rule("gather take_along_dim")
def _gather(mode: ShardedTensorMode, function: Any, args: Any, kwargs: Any) -> Any:
    """Handles an index along a dimension other than the divided one."""
    x, dim, index = gather_arguments(function, args, kwargs)
    if not isinstance(dim, int) or not isinstance(index, Tensor) or kwargs.get("sparse_grad") or "out" in kwargs:
        return UNKNOWN
    shape, index_shape, dim = full_shape_of(x), full_shape_of(index), dim % Tensor.dim(x)
    if len(shape) != len(index_shape) or any(shape[n] != index_shape[n] for n in range(len(shape)) if n != dim):
        return UNKNOWN
    letters = ascii_lowercase[: len(shape)]
    of_index = letters[:dim] + "J" + letters[dim + 1 :]
    others = letters[:dim] + letters[dim + 1 :]
    return mode.product(lambda one, at: one.gather(dim, at), (x, index), [letters, of_index], of_index, others)


@_rule("layer_norm rms_norm")
def _norm(mode: ShardedTensorMode, function: Any, args: Any, kwargs: Any) -> Any:
    """Handles norms over dimensions other than the divided one; the gradients of weight and bias are summed."""
    x, placement, names = args[0], placement_of(args[0]), ("weight", "bias")
    shape = args[1] if len(args) > 1 else kwargs["normalized_shape"]
    if placement is None or placement.dim >= x.dim() - len(shape):
        return UNKNOWN
    args = (*args[:2], *(mode.shared(one) if isinstance(one, Tensor) else one for one in args[2:]))
    kwargs = {key: mode.shared(one) if key in names and one is not None else one for key, one in kwargs.items()}
    return set_placement(function(*args, **kwargs), placement)


@_rule("matmul bmm mm rmatmul imatmul")
def _matmul(mode: ShardedTensorMode, function: Any, args: Any, kwargs: Any) -> Any:
    a, b = args[:2] if function.__name__ != "__rmatmul__" else args[1::-1]
    if min(a.dim(), b.dim()) < 2:
        return UNKNOWN
    batch = ascii_lowercase[: max(a.dim(), b.dim()) - 2]
    letters = [batch[len(batch) - a.dim() + 2 :] + "RK", batch[len(batch) - b.dim() + 2 :] + "KC"]
    return mode.product(torch.matmul, (a, b), letters, batch + "RC")


@_rule("linear")
def _linear(mode: ShardedTensorMode, function: Any, args: Any, kwargs: Any) -> Any:
    x, weight, bias = bind_arguments(args, kwargs, "input", "weight", "bias")
    rows = ascii_lowercase[: x.dim() - 1]
    output = mode.product(F.linear, (x, weight), [rows + "K", "OK"], rows + "O")
    return output if output is UNKNOWN or bias is None else _sum_of(mode, output, bias)


def _sum_of(mode: ShardedTensorMode, a: Tensor, b: Tensor) -> Any:
    if placement_of(a) or placement_of(b):
        return mode.elementwise(torch.add, (a, b))
    return mode.alike(torch.add, (a, b), {})


@_rule("addmm")
def _addmm(mode: ShardedTensorMode, function: Any, args: Any, kwargs: Any) -> Any:
    bias, a, b = bind_arguments(args, kwargs, "input", "mat1", "mat2")
    if kwargs.keys() & {"beta", "alpha", "out"}:
        return UNKNOWN
    output = mode.product(torch.mm, (a, b), ["RK", "KC"], "RC")
    return output if output is UNKNOWN else _sum_of(mode, output, bias)


@_rule("einsum")
def _einsum(mode: ShardedTensorMode, function: Any, args: Any, kwargs: Any) -> Any:
    equation, *tensors = args
    if len(tensors) == 1 and isinstance(tensors[0], (list, tuple)):
        (tensors,) = tensors
    if not isinstance(equation, str) or "->" not in equation or "." in equation:
        return UNKNOWN
    letters, out = equation.replace(" ", "").split("->")
    return mode.product(lambda *operands: function(equation, *operands), tensors, letters.split(","), out)


@_rule("dropout alpha_dropout dropout1d dropout2d dropout3d feature_dropout")
def _drop(mode: ShardedTensorMode, function: Any, args: Any, kwargs: Any) -> Any:
    x, placement = args[0], placement_of(args[0])
    p = kwargs.get("p", args[1] if len(args) > 1 else 0.5)
    train = kwargs.get("training", kwargs.get("train", args[2] if len(args) > 2 else True))
    if placement is None or "alpha" in function.__name__:
        return UNKNOWN
    if not train or not p:
        return set_placement(function(*args, **kwargs), placement)
    return set_placement(x * mode.local_mask(x, placement, lambda ones: function(ones, p, True)), placement)


@_rule("normal_ uniform_ bernoulli_ exponential_ random_ log_normal_ geometric_ cauchy_")
def _draw(mode: ShardedTensorMode, function: Any, args: Any, kwargs: Any) -> Any:
    x, placement = args[0], placement_of(args[0])
    if placement is None or any(True for _ in tensors_in((*args[1:], *kwargs.values()))):
        return UNKNOWN
    with torch.no_grad():
        x.copy_(mode.local_mask(x, placement, lambda full: function(full, *args[1:], **kwargs)))
    return x


@_rule("scaled_dot_product_attention")
def _attend(mode: ShardedTensorMode, function: Any, args: Any, kwargs: Any) -> Any:
    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
    arguments: Mapping[str, Any] = {**dict(zip(names, args, strict=False)), **kwargs}
    tensors = [arguments["query"], arguments["key"], arguments["value"]]
    mask, p, options = arguments.get("attn_mask"), arguments.get("dropout_p", 0.0), dict(arguments)
    for name in (*names[:4], "dropout_p"):
        options.pop(name, None)
    heads = ascii_lowercase[: tensors[0].dim() - 2]
    dims, letters = [t.dim() - 2 for t in tensors], ["LE", "SE", "SV"]
    letters = [heads[len(heads) - n :] + ending for n, ending in zip(dims, letters, strict=True)]
    if isinstance(mask, Tensor):
        tensors.append(mask)
        letters.append((heads + "LS")[len(heads) + 2 - mask.dim() :])
    if options.get("enable_gqa") and len({full_shape_of(t)[-3] for t in tensors[:3]}) > 1:
        repeats = full_shape_of(tensors[0])[-3] // full_shape_of(tensors[1])[-3]
        tensors[1:3] = [_repeated(mode, t, repeats) for t in tensors[1:3]]
        options["enable_gqa"] = False
    divided = [
        (placement, placement.dim - Tensor.dim(t)) for t in tensors if (placement := placement_of(t)) is not None
    ]
    if not p:
        attend = partial(function, **options)
    elif tensors[0].is_cuda:
        problem = (
            f"{mode.where()} uses scaled_dot_product_attention with dropout, whose GPU kernel cannot draw the mask of "
            "only some heads"
        )
        raise UsageError(problem, 'set attn_implementation="eager", or set its dropout to 0')
    else:
        attend = partial(_attention, mode, max(divided, key=lambda pair: pair[0].count), p, options)
    return mode.product(attend, tensors, letters, heads + "LV", allowed=heads)


def _repeated(mode: ShardedTensorMode, heads: Tensor, times: int) -> Tensor:
    if placement_of(heads) is None:
        return heads.repeat_interleave(times, -3)
    return _repeat(mode, Tensor.repeat_interleave, (heads, times, -3), {})  # type: ignore[no-any-return]


def _attention(
    mode: ShardedTensorMode,
    divided: tuple[ShardPlacement, int],
    p: float,
    options: Mapping[str, Any],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
) -> Tensor:
    """Computes attention with dropout as torch does on a CPU, except that the dropout mask is this worker's shard."""
    scores = q @ k.transpose(-2, -1) * (options.get("scale") or q.shape[-1] ** -0.5)
    if options.get("is_causal"):
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask
    weights: Tensor = torch.ops.aten._safe_softmax.default(scores, -1)  # zeros in rows whose keys are all masked
    placement, dim = divided
    placement = replace(placement, dim=weights.dim() + dim)
    set_placement(weights, placement)
    return (weights * mode.local_mask(weights, placement, lambda ones: F.dropout(ones, p, True))) @ v


# ---- sums over the divided dimension, which are added up among the workers; not for the trial run of a block, whose
# layers are divided between two such sums

SUM_RULES: dict[str, Rule] = {}

_ELEMENTWISE_LOSSES = (
    "mse_loss l1_loss smooth_l1_loss huber_loss binary_cross_entropy binary_cross_entropy_with_logits kl_div"
)


@rule_of(SUM_RULES, "sum mean")
def _sum(mode: ShardedTensorMode, function: Any, args: Any, kwargs: Any) -> Any:
    """Sums over the divided dimension, or over all dimensions."""
    x, placement = args[0], placement_of(args[0])
    result = OP_RULES[function.__name__](mode, function, args, kwargs)
    if result is not UNKNOWN or placement is None or not _is_among_all(mode, placement) or "out" in kwargs:
        return result
    dim, dtype = kwargs.get("dim", args[1] if len(args) > 1 else None), kwargs.get("dtype")
    dims = range(x.dim()) if dim is None else [dim] if isinstance(dim, int) else dim
    if not isinstance(dims, (list, tuple, range)) or not all(type(one) is int for one in dims) or len(args) > 3:
        return UNKNOWN
    dims = [one % x.dim() for one in dims] or [*range(x.dim())]
    if placement.dim not in dims:
        return UNKNOWN
    keepdim = bool(kwargs.get("keepdim", args[2] if len(args) > 2 else False))
    output = mode.redistributor.sum(Tensor.sum(x, dims, keepdim=keepdim, dtype=dtype) if x.dim() else x)
    if function.__name__ == "mean":
        shape = full_shape_of(x)
        output = output / math.prod(shape[one] for one in dims)
    return output


def _is_among_all(mode: ShardedTensorMode, placement: ShardPlacement) -> bool:
    """Whether each worker has another shard, so that sums over shards can be added up."""
    return placement.count == mode.redistributor.size and placement.group is None


@rule_of(SUM_RULES, _ELEMENTWISE_LOSSES)
def _elementwise_loss(mode: ShardedTensorMode, function: Any, args: Any, kwargs: Any) -> Any:
    """Computes a loss that is a sum or mean over all elements of two tensors of one shape."""
    x, target = bind_arguments(args[:2], kwargs, "input", "target")
    given = {name: value for name, value in kwargs.items() if value is not None}
    options = {name: value for name, value in given.items() if name not in ("input", "target", "reduction")}
    if (
        len(args) > 2
        or not isinstance(target, Tensor)
        or options.keys() & {"weight", "pos_weight", "size_average", "reduce"}
    ):
        return UNKNOWN
    shape, placement = full_shape_of(x), placement_of(x) or placement_of(target)
    if shape != full_shape_of(target) or placement is None or not _is_among_all(mode, placement):
        return UNKNOWN
    output = mode.elementwise(partial(function, reduction="none", **options), [x, target])
    reduction = given.get("reduction", "mean")
    if output is UNKNOWN or reduction == "none":
        return output
    total = mode.redistributor.sum(output.sum())
    return total if reduction == "sum" else total / (shape[0] if reduction == "batchmean" else math.prod(shape))
