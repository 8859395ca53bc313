"""Compares a sharded computation with the unsharded one before the first step."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from paceline.base.environment import memory_free
from paceline.compute.forbidden_calls import allow_backward
from paceline.compute.grad_hooks import nodes_of
from paceline.compute.microbatches import tensors_of

_ROUNDING = {torch.float64: 1e-9, torch.float32: 1e-5}
_COARSE = 5e-2  # for other dtypes
_OF_ALL = 1e-2  # smaller gradients are compared with this fraction of the norm of all gradients


def allowed(tensor: torch.Tensor) -> float:
    """The relative distance that rounding explains: by the tensor's dtype, and a coarse one under autocast."""
    mixed = torch.is_autocast_enabled(tensor.device.type)  # a float32 may be computed from coarser numbers
    return _COARSE if mixed else _ROUNDING.get(tensor.dtype, _COARSE)


def apart(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Norm of the difference relative to the norm of `expected`; 0 or 1 for integers and different shapes."""
    if actual.shape != expected.shape or not expected.is_floating_point():
        return float(not torch.equal(actual, expected))
    return float((actual.double() - expected.double()).norm() / expected.double().norm().clamp(min=1e-300))


def outputs_apart(actual: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> tuple[float, bool]:
    """The largest relative distance of outputs, and whether any output differs by more than rounding."""
    distances = [apart(a, b) for a, b in zip(actual, expected, strict=True)]
    return max(distances, default=0.0), any(d > allowed(b) for d, b in zip(distances, expected, strict=True))


def farthest(
    actual: Mapping[str, torch.Tensor],
    expected: Mapping[str, torch.Tensor],
    outputs: Sequence[torch.Tensor],
    most_allowed: float = math.inf,
) -> tuple[str, float]:
    """The parameter whose gradient differs most, if by more than rounding, and the largest relative distance.

    The dtypes of `outputs`, from which the gradients come, decide what counts as rounding.
    """
    norms = {name: float(one.double().norm()) for name, one in expected.items()}
    least, name, most = max(math.hypot(*norms.values()) * _OF_ALL, 1e-300), "", 0.0
    for whose, one in expected.items():
        distance = float((actual[whose].double() - one.double()).norm()) / max(norms[whose], least)
        if distance > max(most, min(most_allowed, 10 * max(map(allowed, [one, *outputs])))):
            name = whose
        most = max(most, distance)
    return name, most


def loss_apart(actual: Any, expected: Any, rounding: float, least: float) -> tuple[str, str, float]:
    """Texts of two losses (sum, count, metrics) that differ by more than `rounding`, or empty ones; and the distance.

    The distance is relative to the expected value, or to `least` where that value is smaller.
    """
    coarse = max(rounding, 1e-3) if rounding > 1e-9 else rounding  # of metrics: one that counts has steps
    figures = [("", actual.total, expected.total, rounding), ("a count of ", actual.count, expected.count, rounding)]
    for name in dict.fromkeys([*actual.metrics, *expected.metrics]):
        (one, number), (two, other) = (loss.metrics.get(name, (math.nan, 0.0)) for loss in (actual, expected))
        figures += [(f"{name} = ", one, two, coarse), (f"a count of {name} of ", number, other, coarse)]
    most = 0.0
    for what, first, second, allows in figures:
        a, b = float(first), float(second)
        if a == b or (math.isnan(a) and math.isnan(b)):
            continue
        distance = abs(a - b) / max(abs(b), least)
        if not distance <= allows:
            return f"{what}{a:.8g}", f"{what}{b:.8g}", distance
        most = max(most, distance)
    return "", "", most


def gradients_of(outputs: Sequence[torch.Tensor], named: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Gradients of a sum of the outputs with random weights that are the same in each call, by the names of parameters
    or inputs.

    Parameters that the script froze after the Trainer was made have none.
    """
    named = {name: param for name, param in named.items() if param.requires_grad}
    made = [x for x in outputs if x.requires_grad]
    generator = torch.Generator(made[0].device).manual_seed(0) if made else None
    sums = [(x * torch.randn(x.shape, dtype=x.dtype, device=x.device, generator=generator)).sum() for x in made]
    grads = differentiate(sums, [*named.values()])
    return {name: grad for name, grad in zip(named, grads, strict=True) if grad is not None}


def differentiate(sums: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> Sequence[torch.Tensor | None]:
    """The gradients of sums with respect to `inputs`, None where a sum does not depend on one. The `grad` of tensors
    stays as it is.
    """
    if not sums or not inputs:
        return [None] * len(inputs)
    nodes = [node for total in sums for node in nodes_of(total)]
    if not any(map(is_reentrant, nodes)):
        return torch.autograd.grad(sums, inputs, allow_unused=True)
    # checkpoint(use_reentrant=True) runs a backward() of its own inside, and refuses torch.autograd.grad.
    leaves = [*inputs, *(node.variable for node in nodes if hasattr(node, "variable"))]
    kept = [(leaf, leaf.grad) for leaf in {id(leaf): leaf for leaf in leaves}.values()]
    # Hooks that are registered would take these gradients.
    hooks = [registered for leaf, _ in kept if (registered := leaf._post_accumulate_grad_hooks)]
    before = [registered.copy() for registered in hooks]
    try:
        for registered in hooks:
            registered.clear()
        for leaf, _ in kept:
            leaf.grad = None
        with allow_backward():
            torch.autograd.backward(sums)
        return [one.grad for one in inputs]
    finally:
        for leaf, grad in kept:
            leaf.grad = grad
        for registered, content in zip(hooks, before, strict=True):
            registered.update(content)


def is_reentrant(node: Any) -> bool:
    """Whether a node of autograd's graph is a recomputation by checkpoint(use_reentrant=True)."""
    return "CheckpointFunction" in node.name()


def room(device: torch.device) -> float:
    """Bytes of free memory on the device."""
    return float(torch.cuda.mem_get_info(device)[0]) if device.type == "cuda" else memory_free()


@contextmanager
def weighing(model: nn.Module, sizes: list[int]) -> Iterator[None]:
    """Appends to `sizes` the bytes of all outputs of the model's innermost modules while the context is open.

    This is about a third of what a backward keeps. Hooks on autograd's saved tensors would drop tensor attributes.
    """

    def weigh(module: nn.Module, given: Any, output: Any) -> None:
        with torch._C.DisableTorchFunction():  # modes that track the forward must not see these calls
            sizes.extend(int(tensor.untyped_storage().nbytes()) for tensor in tensors_of(output))

    innermost = [module for module in model.modules() if next(module.children(), None) is None]
    handles = [module.register_forward_hook(weigh) for module in innermost]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
