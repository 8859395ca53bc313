"""Keeps the states of Adam and AdamW in 8 bits (`optimizer_states=int8`), quantized block by block.

Dettmers, Lewis, Shleifer and Zettlemoyer, "8-bit Optimizers via Block-wise Quantization", ICLR 2022. Two things differ
from the paper. A block lies within one row of a parameter, so that a shard of some rows has the blocks of the full
parameter, and the rows of an embedding have scales of their own. And codes are roots in place of a table of values:
they need no search, and are as fine near zero.
"""

from __future__ import annotations

import copy
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn import Parameter
from torch.nn.functional import pad
from torch.optim import Adam, AdamW, Optimizer

from paceline.compute.job import TrainingJob
from paceline.compute.state_dict import optimizer_state_ratio
from paceline.errors import UsageError

BLOCK = 256  # elements of a block at most
SMALL = 4096  # parameters with fewer elements keep float32 states
_AT_ONCE = 1 << 18  # elements whose states are in float32 at a time
_SIGNED = {"exp_avg": True, "exp_avg_sq": False}  # the quantized states, and whether they have a sign


def is_quantized(shape: Sequence[int]) -> bool:
    """Returns whether the states of a parameter with this full shape are quantized: of large ones with several rows."""
    return len(shape) > 1 and math.prod(shape) >= SMALL


def refuse_others(optimizers: Iterable[Optimizer]) -> None:
    """Raises UsageError if an optimizer is not Adam or AdamW, or has amsgrad=True."""
    for optimizer in optimizers:
        known = type(optimizer) in (Adam, AdamW)
        if not known or any(group["amsgrad"] for group in optimizer.param_groups):
            kind = f"{type(optimizer).__name__}{' with amsgrad=True' * known}"
            what = f"optimizer_states=int8 needs torch.optim.AdamW or torch.optim.Adam, but the optimizer is {kind}"
            cure = "leave amsgrad out" if known else "use AdamW"
            raise UsageError(what, f"{cure}, or leave optimizer_states out of the plan")


class Int8States:
    """Keeps the states of one Adam or AdamW in 8 bits. `shapes` has the full shape of each parameter that it holds.

    `optimizer.state` has codes and scales. When the optimizer steps, torch's own update runs for some rows of a
    parameter at a time, whose states are in float32 meanwhile. The other parameters are then updated as ever.
    """

    def __init__(self, optimizer: Optimizer, shapes: Mapping[Parameter, Sequence[int]]) -> None:
        self._quantized = {param for param, shape in shapes.items() if is_quantized(shape)}
        self._of_rows = copy.copy(optimizer)  # makes the update of some rows
        self._of_rows.state, self._of_rows.param_groups = defaultdict(dict), []
        self._gradients: dict[Parameter, torch.Tensor] = {}
        optimizer.register_step_pre_hook(self._update)
        optimizer.register_step_post_hook(self._give_gradients_back)

    def _update(self, optimizer: Optimizer, *_: Any) -> None:
        """Updates the parameters with quantized states. Their gradients are hidden from the step that follows."""
        for group in optimizer.param_groups:
            for param in group["params"]:
                if param in self._quantized and param.grad is not None:
                    optimizer.state[param] = self._updated_in_rows(param, optimizer.state[param], group)
                    self._gradients[param], param.grad = param.grad, None

    def _give_gradients_back(self, *_: Any) -> None:
        for param, gradient in self._gradients.items():
            param.grad = gradient
        self._gradients = {}

    def _updated_in_rows(
        self, param: Parameter, state: Mapping[str, torch.Tensor], group: Mapping[str, Any]
    ) -> dict[str, torch.Tensor]:
        """Updates a parameter, some rows at a time. Returns its new state."""
        parts, length = list[dict[str, torch.Tensor]](), max(1, _AT_ONCE * len(param) // max(1, param.numel()))
        for first in range(0, max(1, len(param)), length):
            rows = slice(first, first + length)
            part = Parameter(param.detach()[rows])
            part.grad = None if param.grad is None else param.grad[rows]
            of_part = {key: value[rows] if value.dim() else value for key, value in state.items()}
            self._of_rows.state[part] = widened(of_part, part)
            self._of_rows.param_groups = [{**group, "params": [part]}]
            self._of_rows.step()
            parts.append(quantized(self._of_rows.state.pop(part)))
        self._of_rows.param_groups = []  # else the last part and its gradient stay in memory
        joined = {key: torch.cat([part[key] for part in parts]) for key, value in parts[0].items() if value.dim()}
        return {"step": parts[0]["step"], **joined}

    @contextmanager
    def in_float32(self, optimizer: Optimizer) -> Iterator[None]:
        """A context in which `optimizer.state` has torch's own states, for checkpoints."""
        kept = {param: optimizer.state[param] for param in optimizer.state.keys() & self._quantized}
        optimizer.state.update({param: widened(state, param) for param, state in kept.items()})
        try:
            yield
        finally:
            optimizer.state.update(kept)

    def quantize(self, optimizer: Optimizer) -> None:
        """Quantizes the states that the optimizer has loaded from a checkpoint."""
        for param in optimizer.state.keys() & self._quantized:
            optimizer.state[param] = quantized(optimizer.state[param])


def quantized(state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Returns the state of a parameter with codes and scales in place of `exp_avg` and `exp_avg_sq`."""
    made = {"step": state["step"]}
    for name, signed in _SIGNED.items():
        made[f"{name} codes"], made[f"{name} scales"] = encode(state[name].float(), signed)
    return made


def widened(state: Mapping[str, torch.Tensor], param: torch.Tensor) -> dict[str, torch.Tensor]:
    """Returns the state that `quantized` was given, rounded to what its codes hold, in the dtype of the parameter."""
    if not state:
        return {}
    made = {"step": state["step"].clone()}
    for name, signed in _SIGNED.items():
        made[name] = decode(state[f"{name} codes"], state[f"{name} scales"], signed).to(param.dtype)
    return made


# -- quantization ---------------------------------------------------------------------------------------------------


def blocks_of_row(width: int) -> tuple[int, int]:
    """Returns how many blocks a row of so many elements has, and the elements of a block; the last may have fewer."""
    count = max(1, -(-width // BLOCK))
    return count, -(-width // count)


def state_bytes(shape: Sequence[int]) -> int:
    """Returns the bytes of the quantized states of a parameter with this shape."""
    rows, width = shape[0], math.prod(shape[1:])
    return 2 * rows * (width + 4 * blocks_of_row(width)[0])


def encode(values: torch.Tensor, signed: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantizes float32 values to 8 bits. Returns codes of the shape of the values, and scales of [rows, blocks].

    The scale of a block is its largest absolute value. The code of a value divided by the scale is its square root in
    steps of 1/127, with its sign; without `signed`, for values from 0, its fourth root in steps of 1/255. So steps are
    finer near zero, and a second moment that is 10^10 times smaller than another one is not rounded to 0.
    """
    width = math.prod(values.shape[1:])
    blocks = _in_blocks(values)
    scales = blocks.abs().amax(2)
    roots = blocks.div(scales.clamp(min=torch.finfo(torch.float32).tiny).unsqueeze(2)).abs_().sqrt_()
    if signed:
        codes = roots.mul_(127).round_().copysign_(blocks).to(torch.int8)
    else:
        codes = roots.sqrt_().mul_(255).round_().to(torch.uint8)
    return codes.flatten(1)[:, :width].reshape(values.shape), scales


def decode(codes: torch.Tensor, scales: torch.Tensor, signed: bool) -> torch.Tensor:
    """Returns the float32 values that `encode` rounded to. Encoded again, they have the same codes and scales."""
    width = math.prod(codes.shape[1:])
    roots = _in_blocks(codes).float().div_(127 if signed else 255)
    values = roots.mul(roots.abs()) if signed else roots.square_().square_()
    return values.mul_(scales.unsqueeze(2)).flatten(1)[:, :width].reshape(codes.shape)


def _in_blocks(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a tensor as [rows, blocks, elements], with zeros at the end of rows that the blocks do not divide."""
    width = math.prod(tensor.shape[1:])
    count, size = blocks_of_row(width)
    return pad(tensor.reshape(len(tensor), width), (0, count * size - width)).view(len(tensor), count, size)


def state_per_byte(job: TrainingJob) -> float:
    """Returns the bytes of optimizer state for each byte that the optimizers of a job hold."""
    if not job.optimizer_states:
        return optimizer_state_ratio(job.optimizers)
    kept = total = 0
    for name, param in job.named.items():
        held = param.numel() * param.element_size() * (2 if job.bf16_weights else 1)
        full = job.cuts[name].shape if name in job.cuts else param.shape
        kept, total = kept + (state_bytes(param.shape) if is_quantized(full) else 2 * held), total + held
    return kept / total if total else 0.0


def states_of(job: TrainingJob) -> list[Int8States]:
    """Quantizes the states of the optimizers of a job where its plan says so."""
    if not job.optimizer_states:
        return []
    cuts = job.local_cuts
    shapes = {param: cuts[name].shape if name in cuts else param.shape for name, param in job.local_params.items()}
    return [Int8States(one, shapes) for one in job.optimizers]
