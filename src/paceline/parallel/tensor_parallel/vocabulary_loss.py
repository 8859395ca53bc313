"""Rules for softmax, cross-entropy and similar functions along a divided dimension: the vocabulary-parallel loss.

Each worker computes on its own classes. One or two numbers per token travel between the workers, and never the logits:
the logarithm of the sum of exponentials over all classes is made of each worker's, and the logit of a token's class is
added up, as all other workers have zero (Shoeybi et al., "Megatron-LM", 2019, section 3).
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from paceline.compute.call_arguments import bind_arguments, cross_entropy_arguments, gather_arguments
from paceline.parallel.tensor_parallel.op_rules import OP_RULES, rule_of
from paceline.parallel.tensor_parallel.redistribute import ShardPlacement, applied
from paceline.parallel.tensor_parallel.sharded_mode import (
    UNKNOWN,
    Rule,
    ShardedTensorMode,
    Tensor,
    full_shape_of,
    placement_of,
    set_placement,
)

VOCABULARY_RULES: dict[str, Rule] = {}


_rule = partial(rule_of, VOCABULARY_RULES)


class _LogSumExp(torch.autograd.Function):
    """The logsumexp of this worker's classes. The gradient is zero, not NaN, where all of them have the logit -inf."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int) -> Tensor:
        """Returns the logsumexp along a dimension, which stays with length 1."""
        result = torch.logsumexp(x, dim, keepdim=True)
        ctx.save_for_backward(x, result)
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        """Returns the gradient times the softmax of this worker's classes."""
        x, result = ctx.saved_tensors
        logs = x - result.masked_fill(result.isneginf(), 0.0)
        return logs.exp() * grad if torch.is_grad_enabled() else logs.exp_().mul_(grad), None


def _is_divided(on: ShardedTensorMode, x: Any, dim: Any) -> bool:
    """Whether a tensor is divided along this dimension, in one section, among all workers."""
    placement = placement_of(x)
    if placement is None or not isinstance(dim, int):
        return False
    divided = placement.dim == dim % x.dim() and placement.count == on.redistributor.size
    return divided and len(placement.sections) == 1 and placement.group is None


def _classes(on: ShardedTensorMode, x: Tensor) -> range:
    """Returns the classes of which this worker has the logits."""
    placement = placement_of(x)
    assert placement is not None
    (classes,) = placement.rows(on.redistributor.index(placement))
    return classes


def _in_float32(x: Tensor) -> Tensor:
    """Returns a tensor in which exponentials can be added up."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def _in_dtype_of(x: Tensor, result: Tensor) -> Tensor:
    """Returns a result in the dtype that torch gives: that of the logits, or float32 under autocast."""
    return result if torch.is_autocast_enabled(x.device.type) else result.to(x.dtype)


def _of_all(on: ShardedTensorMode, x: Tensor, dim: int) -> Tensor:
    """Returns each worker's tensor, of length 1 along a dimension, one after another."""
    size = on.redistributor.size
    return on.redistributor.join(x, ShardPlacement(dim, (size,), size))


def _log_sum(on: ShardedTensorMode, x: Tensor, dim: int) -> Tensor:
    """Returns the logsumexp over all workers' classes, with length 1 along the dimension."""
    return torch.logsumexp(_of_all(on, applied(_LogSumExp, _in_float32(x), dim), dim), dim, keepdim=True)


def _local_elements(on: ShardedTensorMode, x: Tensor, dim: int, index: Tensor) -> Tensor:
    """Returns the elements at the `index`, which has the shape of the result; zero for classes of other workers."""
    classes = _classes(on, x)
    local = index - classes.start
    elsewhere = (local < 0) | (local >= len(classes))
    if not len(classes):
        return x.new_zeros(index.shape) + x.sum()
    return x.gather(dim, local.masked_fill(elsewhere, 0)).masked_fill(elsewhere, 0.0)


def _log_sum_and_element(on: ShardedTensorMode, x: Tensor, dim: int, index: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the logsumexp over all workers' classes, and the elements at the `index`, from one message."""
    local = torch.cat([applied(_LogSumExp, x, dim), _local_elements(on, x, dim, index)], dim)
    size = on.redistributor.size
    every = on.redistributor.join(local, ShardPlacement(dim, (2 * size,), size)).unflatten(dim, (size, 2))
    return torch.logsumexp(every.select(dim + 1, 0), dim, keepdim=True), every.select(dim + 1, 1).sum(dim, keepdim=True)


@_rule("logsumexp")
def _logsumexp(on: ShardedTensorMode, function: Any, args: Any, kwargs: Any) -> Any:
    x, dim, keepdim = bind_arguments(args, kwargs, "input", "dim", "keepdim")
    if isinstance(dim, (list, tuple)) and len(dim) == 1:
        (dim,) = dim
    if not _is_divided(on, x, dim):
        return OP_RULES[function.__name__](on, function, args, kwargs)
    result = _in_dtype_of(x, _log_sum(on, x, dim % x.dim()))
    return result if keepdim else result.squeeze(dim)


@_rule("softmax", "log_softmax")
def _softmax(on: ShardedTensorMode, function: Any, args: Any, kwargs: Any) -> Any:
    others = {name: value for name, value in kwargs.items() if name in ("input", "dim", "dtype")}
    x, dim, third = bind_arguments(args, others, "input", "dim", "dtype")
    dtype = others.get("dtype", third if isinstance(third, torch.dtype) else None)
    if not _is_divided(on, x, dim):
        return OP_RULES[function.__name__](on, function, args, kwargs)
    placement, given = placement_of(x), x if dtype is None else x.to(dtype)
    logs = _in_float32(given) - on.shared(_log_sum(on, set_placement(given, placement), dim % x.dim()))
    result = logs if function.__name__ == "log_softmax" else logs.exp()
    return set_placement(_in_dtype_of(given, result), placement)


@_rule("gather", "take_along_dim")
def _gather(on: ShardedTensorMode, function: Any, args: Any, kwargs: Any) -> Any:
    x, dim, index = gather_arguments(function, args, kwargs)
    if not isinstance(index, Tensor) or placement_of(index) or not _is_divided(on, x, dim):
        return OP_RULES["gather"](on, function, args, kwargs)
    dim = dim % x.dim()
    if any(index.shape[n] > length for n, length in enumerate(x.shape) if n != dim):
        return UNKNOWN
    index = torch.where(index < 0, index + full_shape_of(x)[dim], index) if function.__name__ != "gather" else index
    _check_classes(index, full_shape_of(x)[dim], "index {} is out of bounds for dimension " + str(dim))
    return on.redistributor.sum(_local_elements(on, x, dim, index))


def _check_classes(index: Tensor, count: int, text: str) -> None:
    """Raises IndexError, as torch does on a CPU, if the index names no class."""
    if index.device.type == "cpu" and index.numel():
        for value in (int(index.min()), int(index.max())):
            if not 0 <= value < count:
                raise IndexError(text.format(value))


@_rule("nll_loss", "cross_entropy")
def _cross_entropy(on: ShardedTensorMode, function: Any, args: Any, kwargs: Any) -> Any:
    """Computes cross_entropy of logits, or nll_loss of logarithms of probabilities."""
    arguments = cross_entropy_arguments(args, kwargs)
    x, target, reduction = arguments["input"], arguments["target"], arguments["reduction"] or "mean"
    dim = 1 if x.dim() > 1 else 0
    old = arguments["size_average"] is not None or arguments["reduce"] is not None
    if old or not _is_divided(on, x, dim):
        return UNKNOWN
    values = set_placement(_in_float32(x), placement_of(x))
    weight, smoothing = arguments["weight"], arguments["label_smoothing"] or 0.0
    in_logarithms = function.__name__ == "nll_loss"
    result: Any
    if target.is_floating_point():
        result = UNKNOWN if in_logarithms else _of_probabilities(on, values, target, weight, smoothing)
        count = None if result is UNKNOWN else torch.full((), result.numel(), dtype=x.dtype, device=x.device)
    elif placement_of(target):
        return UNKNOWN
    else:
        ignored = -100 if arguments["ignore_index"] is None else arguments["ignore_index"]
        result, count = _of_classes(on, values, in_logarithms, target, ignored, weight, smoothing)
    if result is UNKNOWN:
        return UNKNOWN
    if reduction != "none":
        result = result.sum() if reduction == "sum" else result.sum() / count
    return _in_dtype_of(x, result)


def _of_classes(
    on: ShardedTensorMode,
    x: Tensor,
    in_logarithms: bool,
    target: Tensor,
    ignored: int,
    weight: Tensor | None,
    smoothing: float,
) -> tuple[Any, Any]:
    """Returns the loss of each row or token whose class is given, and the sum of their weights. `in_logarithms`: the
    input has logarithms of probabilities.
    """
    dim, length = 1 if x.dim() > 1 else 0, full_shape_of(x)[1 if x.dim() > 1 else 0]
    classes = target.unsqueeze(dim)
    is_ignored = classes == ignored
    classes = classes.masked_fill(is_ignored, 0)
    _check_classes(classes, length, "Target {} is out of bounds.")
    known = (classes >= 0) & (classes < length)  # on a GPU, which cannot raise, a wrong class makes the loss NaN
    if in_logarithms:
        total, result = None, -on.redistributor.sum(_local_elements(on, x, dim, classes))
    else:
        total, element = _log_sum_and_element(on, x, dim, classes)
        result = total - element
    weights = None if weight is None else weight[classes.clamp(0, length - 1)]
    result = (result if weights is None else result * weights).masked_fill(~known, float("nan"))
    if smoothing:
        mean = _weighted_sum(on, x, total, weight, dim) / length
        result = (1.0 - smoothing) * result + smoothing * mean
    counts = (~is_ignored).to(x.dtype) if weights is None else weights.masked_fill(is_ignored, 0.0)
    return result.masked_fill(is_ignored, 0.0).squeeze(dim), counts.sum()


def _weighted_sum(on: ShardedTensorMode, x: Tensor, total: Tensor | None, weight: Tensor | None, dim: int) -> Tensor:
    """Returns the sum of the losses of all classes, times their weights."""
    classes = _classes(on, x)
    if weight is None:
        weights, weight_sum = None, torch.full((), full_shape_of(x)[dim], dtype=x.dtype, device=x.device)
    else:
        weights = weight[classes.start : classes.stop].view(-1, *(1,) * (x.dim() - dim - 1))
        weight_sum = weight.sum()
    sums = on.redistributor.sum((x if weights is None else x * weights).sum(dim, keepdim=True))
    return -sums if total is None else total * weight_sum - sums


def _of_probabilities(
    on: ShardedTensorMode,
    x: Tensor,
    target: Tensor,
    weight: Tensor | None,
    smoothing: float,
) -> Any:
    """Returns the loss of each row or token for which the probability of each class is given."""
    placement, given = placement_of(x), placement_of(target)
    assert placement is not None
    if full_shape_of(target) != full_shape_of(x):
        return UNKNOWN
    if given is not None and (given.dim, given.sections, given.count) != (
        placement.dim,
        placement.sections,
        placement.count,
    ):
        return UNKNOWN
    dim, classes = placement.dim, _classes(on, x)
    local = target if given is not None else on.redistributor.take(target, placement)
    if smoothing:
        local = local * (1.0 - smoothing) + smoothing / placement.length
    if weight is not None:
        local = local * weight[classes.start : classes.stop].view(-1, *(1,) * (x.dim() - dim - 1))
    return on.redistributor.sum((local * (on.shared(_log_sum(on, x, dim)) - x)).sum(dim))


def _largest(on: ShardedTensorMode, x: Tensor, dim: int, sign: float) -> tuple[Tensor, Tensor]:
    """Returns the largest values (with sign -1.0 the smallest) of all classes, and the first classes that have them."""
    classes = _classes(on, x)
    if len(classes):
        values, indices = x.max(dim, keepdim=True) if sign > 0 else x.min(dim, keepdim=True)
    else:
        shape = [1 if n == dim else length for n, length in enumerate(x.shape)]
        values, indices = x.new_full(shape, -sign * float("inf")) + x.sum(), x.new_zeros(shape, dtype=torch.int64)
    values, indices = _of_all(on, values, dim), _of_all(on, indices + classes.start, dim)
    which = (values * sign).argmax(dim, keepdim=True)
    return values.gather(dim, which), indices.gather(dim, which)


@_rule("argmax", "argmin", "max", "min", "amax", "amin")
def _extreme(on: ShardedTensorMode, function: Any, args: Any, kwargs: Any) -> Any:
    x, dim, keepdim = bind_arguments(args, kwargs, "input", "dim", "keepdim")
    name = function.__name__
    if isinstance(dim, (list, tuple)) and len(dim) == 1:
        (dim,) = dim
    if not x.is_floating_point() or not _is_divided(on, x, dim):
        return OP_RULES[name](on, function, args, kwargs)
    values, indices = _largest(on, x, dim % x.dim(), -1.0 if name.endswith("min") else 1.0)
    values, indices = (values, indices) if keepdim else (values.squeeze(dim), indices.squeeze(dim))
    if name.startswith("arg"):
        return indices
    return values if name.startswith("a") else getattr(torch.return_types, name)((values, indices))


@_rule("topk")
def _topk(on: ShardedTensorMode, function: Any, args: Any, kwargs: Any) -> Any:
    x, k, dim, largest, ordered = bind_arguments(args, kwargs, "input", "k", "dim", "largest", "sorted")
    dim, largest, ordered = -1 if dim is None else dim, largest is not False, ordered is not False
    if not _is_divided(on, x, dim) or k > full_shape_of(x)[dim] // on.redistributor.size:
        return OP_RULES["topk"](on, function, args, kwargs)
    dim, size = dim % x.dim(), on.redistributor.size
    values, indices = x.topk(k, dim, largest)
    every = ShardPlacement(dim, (k * size,), size)
    values = on.redistributor.join(values, every)
    indices = on.redistributor.join(indices + _classes(on, x).start, every)
    values, which = values.topk(k, dim, largest, ordered)
    return torch.return_types.topk((values, indices.gather(dim, which)))
