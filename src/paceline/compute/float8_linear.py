"""Computes linear layers with 8-bit matrix products (`precision=fp8`), by torchao's float8 training.

Both operands of a product are divided by a scale, the largest absolute value of the tensor, and rounded to 8 bits
(Micikevicius et al., "FP8 Formats for Deep Learning", 2022): weights and activations to e4m3, gradients to e5m2.
Weights, gradients and optimizer state keep their dtype, and so does a checkpoint.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from paceline.base.text import first_few, plural
from paceline.compute.blocks import blocks_of
from paceline.errors import UsageError

MULTIPLE = 16  # a matrix product in 8 bits needs sizes that are multiples of it
CAPABILITY = (8, 9)  # of the first NVIDIA GPUs with such products
_CURE = "use precision=bf16"
_NAMED = 4  # layers in a message


def use_float8(model: nn.Module, device: torch.device) -> tuple[str, str]:
    """Lets linear layers of a model compute in 8 bits. Returns the decision and its reason.

    These are the layers inside of repeated blocks, except for those with sizes that 8-bit products do not take. Where
    layers are blocks themselves, or the model has no blocks, the last layer is its head and stays as it is, too.
    Modules and parameters stay the same objects. Raises UsageError if the device or the installation has no 8-bit
    products, or the model no such layer.
    """
    refuse_device(device)
    linears = {name: module for name, module in model.named_modules() if type(module) is nn.Linear}
    blocks = blocks_of(model, sharing=True)
    reasons = {name: _reason_to_stay(name, linear, blocks) for name, linear in linears.items()}
    reasons |= {name: "the last layer" for name in [*linears][-1:] if not blocks or name in blocks}
    chosen = [linears[name] for name, reason in reasons.items() if not reason]
    if not chosen:
        what = f"{type(model).__name__} has no linear layer that precision=fp8 could compute in 8 bits: in repeated "
        what += f"blocks, with sizes that are multiples of {MULTIPLE}"
        raise UsageError(what, _CURE)
    for linear, twin in zip(chosen, _twins(chosen), strict=True):
        vars(twin)["_parameters"] = linear._parameters  # the same dictionary: other features replace parameters in it
        vars(linear)["forward"] = partial(_forward, linear, twin)
    decision = f"{plural(len(chosen), 'linear layer')} compute{'s' * (len(chosen) == 1)} in 8 bits"
    stays = [f"{name} ({reason})" for name, reason in reasons.items() if reason]
    if stays:
        decision += f"; in bfloat16: {first_few(stays, _NAMED)}"
    return decision, "precision=fp8 was given"


def refuse_device(device: torch.device) -> None:
    """Raises UsageError if a device has no 8-bit matrix products."""
    needs = "precision=fp8 needs a GPU of compute capability 8.9 or newer (Ada, Hopper, Blackwell)"
    if device.type != "cuda":
        raise UsageError(f"{needs}, and this worker computes on {device.type}", _CURE)
    if torch.version.hip is None and (capability := torch.cuda.get_device_capability(device)) < CAPABILITY:
        name = torch.cuda.get_device_name(device)
        raise UsageError(f"{needs}, and {name} has {'.'.join(map(str, capability))}", _CURE)


def _reason_to_stay(name: str, linear: nn.Linear, blocks: Mapping[str, nn.Module]) -> str:
    if blocks and not f"{name}.".startswith(tuple(f"{block}." for block in blocks)):
        return "outside of blocks"
    sizes = linear.in_features, linear.out_features
    return "" if all(size % MULTIPLE == 0 for size in sizes) else f"{sizes[0]} x {sizes[1]}"


def _twins(linears: list[nn.Linear]) -> list[nn.Module]:
    """Returns torchao's layers for these, with the same parameters."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)  # torchao reports parts that it lacks, which these layers do not use
    try:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    except ImportError as error:
        raise UsageError("precision=fp8 needs torchao", "pip install 'paceline[fp8]'") from error
    finally:
        logging.disable(before)
    config = Float8LinearConfig(pad_inner_dim=True)  # a micro-batch may have any number of tokens
    return [*convert_to_float8_training(nn.ModuleList(linears), config=config)]


def _forward(linear: nn.Linear, twin: nn.Module, /, *given: Any, **named: Any) -> Any:
    has_values = any(tensor.numel() for tensor in (*given, *named.values()))
    if not has_values:  # then there is no largest one
        return nn.Linear.forward(linear, *given, **named)
    return twin.forward(*given, **named)
