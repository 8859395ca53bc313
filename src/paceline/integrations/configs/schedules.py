"""Writes `schedule=` of a Trainer for the scheduler that a DeepSpeed configuration names.

DeepSpeed's schedulers set absolute learning rates and are one step behind: they are stepped after the optimizer, and
their first call is number 0. The functions written here return the same rates as a factor of the optimizer's.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from paceline.integrations.configs.conversion import USED, Conversion

_TYPE, _PARAMS = "scheduler.type", "scheduler.params"
# torch's schedulers of the step, and their arguments, which a test compares with torch's own signatures.
TORCH_SCHEDULERS: dict[str, frozenset[str]] = {
    name: frozenset(arguments.split())
    for name, arguments in {
        "StepLR": "step_size gamma",
        "MultiStepLR": "milestones gamma",
        "ConstantLR": "factor total_iters",
        "LinearLR": "start_factor end_factor total_iters",
        "ExponentialLR": "gamma",
        "PolynomialLR": "total_iters power",
        "CosineAnnealingLR": "T_max eta_min",
        "CosineAnnealingWarmRestarts": "T_0 T_mult eta_min",
        "OneCycleLR": "max_lr total_steps epochs steps_per_epoch pct_start anneal_strategy cycle_momentum base_momentum"
        " max_momentum div_factor final_div_factor three_phase",
        "CyclicLR": "base_lr max_lr step_size_up step_size_down mode gamma scale_mode cycle_momentum base_momentum"
        " max_momentum",
    }.items()
}
_WARMUP = {"warmup_num_steps", "warmup_type"}
# DeepSpeed's schedulers and their arguments.
DEEPSPEED_SCHEDULERS: dict[str, frozenset[str]] = {
    "WarmupLR": frozenset(_WARMUP | {"warmup_min_lr", "warmup_max_lr"}),
    "WarmupDecayLR": frozenset(_WARMUP | {"warmup_min_lr", "warmup_max_lr", "total_num_steps"}),
    "WarmupCosineLR": frozenset(_WARMUP | {"warmup_min_ratio", "cos_min_ratio", "total_num_steps"}),
    "OneCycle": frozenset(
        [
            "cycle_min_lr",
            "cycle_max_lr",
            "decay_lr_rate",
            "cycle_first_step_size",
            "cycle_second_step_size",
            "decay_step_size",
        ]
    ),
    "LRRangeTest": frozenset(f"lr_range_test_{name}" for name in ("min_lr", "step_size", "step_rate", "staircase")),
}


def convert_schedule(conversion: Conversion, lr: float | None) -> None:
    """Gives the Trainer its schedule. `lr` is the optimizer's learning rate, if the file names it."""
    kind = conversion.get(_TYPE)
    if kind is None:
        if conversion.get("scheduler"):
            conversion.refuse(_TYPE, "the section names no scheduler", "add its type")
        return
    given = conversion.get(_PARAMS, {})
    given = given if isinstance(given, dict) else {}
    if not isinstance(kind, str):
        conversion.refuse(_TYPE, f"it must be a name, not {kind!r:.40}", "correct the file")
        return
    if kind in TORCH_SCHEDULERS:
        _torch_schedule(conversion, kind, given)
        return
    if kind not in DEEPSPEED_SCHEDULERS:
        known = ", ".join([*DEEPSPEED_SCHEDULERS, *TORCH_SCHEDULERS])
        conversion.refuse(_TYPE, f"{kind!r:.40} is not a scheduler of the step", f"use one of {known}")
        return
    for name in given:
        field = f"{_PARAMS}.{name}"
        if name not in DEEPSPEED_SCHEDULERS[kind] and field in conversion.table.used:
            conversion.refuse(field, f"{kind} has no argument {name}", "leave it out")
    lines = _WRITERS[kind](conversion, lr)
    if lines is None:
        conversion.refuse(_TYPE, f"{kind} lacks an argument that DeepSpeed needs", "complete the file")
        return
    conversion.definitions += [f"def schedule(step):  # DeepSpeed's {kind}", *(f"    {line}" for line in lines)]
    conversion.arguments["schedule"] = "schedule"
    conversion.settle(_TYPE, USED, "schedule=schedule, the function in the script")


def _torch_schedule(conversion: Conversion, kind: str, given: dict[str, Any]) -> None:
    words = []
    for name, value in given.items():
        field = f"{_PARAMS}.{name}"
        if name not in TORCH_SCHEDULERS[kind]:
            if field in conversion.table.used:
                conversion.refuse(field, f"{kind} has no argument {name}", "leave it out")
        elif value == "auto" or not _is_plain(value):
            conversion.refuse(field, f"{value!r:.40} is not a number, a name or a list of numbers", "correct the file")
        else:
            conversion.settle(field, USED, f"{name}={value!r}")
            words.append(f"{name}={value!r}")
    source = ", ".join([f"functools.partial(torch.optim.lr_scheduler.{kind}", *words]) + ")"
    conversion.argument("schedule", source, _TYPE)


def _is_plain(value: Any) -> bool:
    """Whether a value can be written as Python source."""
    if isinstance(value, list):
        return all(_is_plain(one) for one in value)
    return value is None or isinstance(value, str | int) or (isinstance(value, float) and math.isfinite(value))


def _number(conversion: Conversion, name: str, default: Any, least: float = 0, integer: bool = False) -> Any:
    """A number of the scheduler, with its verdict."""
    field = f"{_PARAMS}.{name}"
    value = conversion.number(field, least, default, integer)
    if conversion.get(field) is not None:
        conversion.settle(field, USED, f"{value!r} in the schedule")
    return value


def _base(conversion: Conversion, lr: float | None, highest: float, name: str) -> float:
    """The learning rate that the factor multiplies: the optimizer's, or the highest of the schedule."""
    if lr:
        return lr
    if lr == 0:
        conversion.refuse("optimizer.params.lr", "a factor of 0 cannot reach the schedule's rates", f"use lr={highest}")
    conversion.changes.append(f"Create the optimizer with lr={highest!r}, the highest rate of the schedule ({name}).")
    return highest


def _steps(conversion: Conversion) -> str | None:
    """The total number of steps as Python source; transformers computes it where the file has "auto"."""
    field = f"{_PARAMS}.total_num_steps"
    value = conversion.get(field)
    if value == "auto":
        word, _, length = conversion.loop.partition("=")
        batch = conversion.arguments.get("global_batch", "global_batch")
        source, origin = f"-(-len(dataset) // {batch}) * {length}", f"num_train_epochs={length}"
        if word == "count":
            source, origin = length, f"max_steps={length}"
        elif not length.isdigit():
            source, conversion.loop = f"math.ceil(-(-len(dataset) // {batch}) * {length})", "count=steps"
        conversion.settle(
            field, USED, f'steps = {source}; "auto" is the number of steps of TrainingArguments({origin})'
        )
        conversion.definitions += [f"steps = {source}", ""]
        return "steps"
    value = _number(conversion, "total_num_steps", None, 1, integer=True)
    return None if value is None else repr(value)


def _gamma(conversion: Conversion) -> tuple[int, list[str]]:
    """Steps of the warmup, and the lines that compute its progress from 0 to 1."""
    steps = max(2, _number(conversion, "warmup_num_steps", 1000, 1, integer=True))
    kind = conversion.get(f"{_PARAMS}.warmup_type", "log")
    if kind not in ("log", "linear"):
        conversion.refuse(f"{_PARAMS}.warmup_type", f"{kind!r:.40} is neither log nor linear", "correct the file")
    elif conversion.get(f"{_PARAMS}.warmup_type"):
        conversion.settle(f"{_PARAMS}.warmup_type", USED, f"{kind} in the schedule")
    if kind == "linear":
        return steps, [f"progress = max(step - 1, 0) / {steps}"]
    return steps, [f"progress = math.log(max(step, 1)) / math.log({steps})"]


def _rates(conversion: Conversion, lr: float | None, highest: float | None) -> tuple[float, float, float] | None:
    """Lowest and highest rate of a warmup, and the rate that the factor multiplies."""
    low = _number(conversion, "warmup_min_lr", 0.0)
    high = _number(conversion, "warmup_max_lr", highest if highest is not None else lr)
    if high is None:
        return None
    return low, high, _base(conversion, lr, high, "warmup_max_lr")


def _of(low: Any, high: Any, base: Any, progress: str = "progress") -> str:
    """The factor of a rate between two bounds as Python source."""
    if low == 0 and high == base:
        return f"return {progress}"
    rate = f"{high!r} * {progress}" if low == 0 else f"({low!r} + {high - low!r} * {progress})"
    return f"return {rate} / {base!r}"


def _warmup(conversion: Conversion, lr: float | None) -> list[str] | None:
    rates = _rates(conversion, lr, None)
    steps, progress = _gamma(conversion)
    if rates is None:
        return None
    return [f"if step <= {steps}:", f"    {progress[0]}", "else:", "    progress = 1.0", _of(*rates)]


def _warmup_decay(conversion: Conversion, lr: float | None) -> list[str] | None:
    total, rates = _steps(conversion), _rates(conversion, lr, 0.001)
    steps, progress = _gamma(conversion)
    if total is None or rates is None:
        return None
    decay = f"max(0.0, ({total} - (step - 1)) / max(1.0, {total} - {steps}))"
    return [f"if step <= {steps}:", f"    {progress[0]}", "else:", f"    progress = {decay}", _of(*rates)]


def _warmup_cosine(conversion: Conversion, lr: float | None) -> list[str] | None:
    total = _steps(conversion)
    low = _number(conversion, "warmup_min_ratio", 0.0)
    floor = _number(conversion, "cos_min_ratio", 0.0001)
    steps, progress = _gamma(conversion)
    if total is None:
        return None
    return [
        "if step == 0:",
        "    return 0.0",
        f"if step <= {steps}:",
        f"    {progress[0]}",
        f"    return {low!r} + {1.0 - low!r} * progress",
        f"progress = min(1.0, (step - {steps}) / max(1, {total} - {steps}))",
        f"return max(0.0, {floor!r} + {1.0 - floor!r} * (1 + math.cos(math.pi * progress)) / 2)",
    ]


def _one_cycle(conversion: Conversion, lr: float | None) -> list[str] | None:
    low, high = _number(conversion, "cycle_min_lr", None), _number(conversion, "cycle_max_lr", None)
    first = _number(conversion, "cycle_first_step_size", 2000, 1)
    second = _number(conversion, "cycle_second_step_size", first)
    size, rate = _number(conversion, "decay_step_size", 0), _number(conversion, "decay_lr_rate", 0.0)
    momentum = f"{_PARAMS}.cycle_momentum"
    has_betas = "betas" in conversion.arguments.get("optimizer", "betas")
    if has_betas and conversion.get(momentum) is None:
        refusal = conversion.table.refused[momentum]
        conversion.refuse(momentum, f"it is true by default: {refusal.why}", refusal.cure)
    if low is None or high is None:
        return None
    base, total = _base(conversion, lr, high, "cycle_max_lr"), first + second
    decay = f" / (1 + {rate!r} * (step - {total!r}) / {size!r})" if size and rate else ""
    fall = f"({total!r} - step) / {second!r}" if second else "0.0"
    return [
        f"if step >= {total!r}:",
        f"    return {low!r}{decay} / {base!r}",
        f"progress = step / {first!r} if step <= {first!r} else {fall}",
        _of(low, high, base),
    ]


def _range_test(conversion: Conversion, lr: float | None) -> list[str]:
    prefix = "lr_range_test_"
    low = _number(conversion, f"{prefix}min_lr", 0.001)
    size = _number(conversion, f"{prefix}step_size", 2000, 1, integer=True)
    rate = _number(conversion, f"{prefix}step_rate", 1.0)
    stairs = conversion.is_on(f"{_PARAMS}.{prefix}staircase")
    base = _base(conversion, lr, low, f"{prefix}min_lr")
    interval = f"step // {size}" if stairs else f"step / {size}"
    return [f"return {low!r} * (1 + {rate!r} * ({interval})) / {base!r}"]


_WRITERS: dict[str, Callable[[Conversion, float | None], list[str] | None]] = {
    "WarmupLR": _warmup,
    "WarmupDecayLR": _warmup_decay,
    "WarmupCosineLR": _warmup_cosine,
    "OneCycle": _one_cycle,
    "LRRangeTest": _range_test,
}
