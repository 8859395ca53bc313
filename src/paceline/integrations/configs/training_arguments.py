"""Fills "auto" in a DeepSpeed configuration as transformers does, from TrainingArguments."""

from __future__ import annotations

import copy
from typing import Any

from paceline.errors import UsageError

# The options of transformers.TrainingArguments that fill "auto", and their defaults, which a test compares.
DEFAULTS: dict[str, Any] = {
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 1,
    "max_grad_norm": 1.0,
    "learning_rate": 5e-05,
    "adam_beta1": 0.9,
    "adam_beta2": 0.999,
    "adam_epsilon": 1e-08,
    "weight_decay": 0.0,
    "warmup_steps": 0,
    "num_train_epochs": 3.0,
    "max_steps": -1,
    "fp16": False,
    "bf16": False,
}
# Fields that transformers fills, and the options that it takes. "zero_optimization" sizes are filled from the model.
AUTO_FIELDS: dict[str, tuple[str, ...]] = {
    "train_micro_batch_size_per_gpu": ("per_device_train_batch_size",),
    "gradient_accumulation_steps": ("gradient_accumulation_steps",),
    "gradient_clipping": ("max_grad_norm",),
    "optimizer.params.lr": ("learning_rate",),
    "optimizer.params.betas": ("adam_beta1", "adam_beta2"),
    "optimizer.params.eps": ("adam_epsilon",),
    "optimizer.params.weight_decay": ("weight_decay",),
    "scheduler.params.warmup_min_lr": (),
    "scheduler.params.warmup_max_lr": ("learning_rate",),
    "scheduler.params.warmup_num_steps": ("warmup_steps",),
    "fp16.enabled": ("fp16",),
    "bf16.enabled": ("bf16",),
}


def read_settings(settings: list[str]) -> dict[str, Any]:
    """Reads NAME=VALUE of TrainingArguments. Returns all options that fill "auto", with defaults for the others."""
    values = dict(DEFAULTS)
    for text in settings:
        name, equals, value = text.partition("=")
        if not equals or name not in DEFAULTS:
            what = f'--set {text!r:.60} is not NAME=VALUE of an option that fills "auto"'
            raise UsageError(what, f"use one of {', '.join(DEFAULTS)}")
        kind = type(DEFAULTS[name])
        try:
            if kind is bool:
                values[name] = {"true": True, "false": False}[value.lower()]
            else:
                values[name] = kind(value)
        except (ValueError, KeyError):
            needs = {bool: "true or false", int: "a whole number", float: "a number"}[kind]
            raise UsageError(f"--set {text!r:.60}: {name} needs {needs}", "correct the value") from None
    return values


def fill_auto(config: dict[str, Any], options: dict[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """A copy of the configuration with "auto" filled, and for each filled field the option that it comes from."""
    filled, origins = copy.deepcopy(config), dict[str, str]()
    for name, sources in AUTO_FIELDS.items():
        *heads, last = name.split(".")
        section: Any = filled
        for head in heads:
            section = section.get(head) if isinstance(section, dict) else None
        if not isinstance(section, dict) or section.get(last) != "auto":
            continue
        values = [options[source] for source in sources]
        section[last] = _value(name, values)
        given = ", ".join(f"{source}={value!r}" for source, value in zip(sources, values, strict=True))
        origins[name] = f'"auto" is TrainingArguments({given})' if sources else '"auto" is 0 in transformers'
    return filled, origins


def _value(name: str, values: list[Any]) -> Any:
    if name == "scheduler.params.warmup_num_steps":
        return max(1, values[0])  # DeepSpeed takes no 0
    return values if len(values) > 1 else values[0] if values else 0
