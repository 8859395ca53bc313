"""Writes `optimizer=` of a Trainer for the optimizer that a DeepSpeed configuration names."""

from __future__ import annotations

from typing import Any

from paceline.integrations.configs.conversion import USED, Conversion

_COMMON = "foreach maximize differentiable capturable fused"
# The arguments of torch's optimizers, which a test compares with torch's own signatures.
TORCH_OPTIMIZERS: dict[str, frozenset[str]] = {
    name: frozenset(f"lr {arguments}".split())
    for name, arguments in {
        "SGD": "momentum dampening weight_decay nesterov maximize foreach differentiable fused",
        "Adam": f"betas eps weight_decay amsgrad decoupled_weight_decay {_COMMON}",
        "AdamW": f"betas eps weight_decay amsgrad {_COMMON}",
        "NAdam": "betas eps weight_decay momentum_decay decoupled_weight_decay foreach maximize capturable"
        " differentiable",
        "RAdam": "betas eps weight_decay decoupled_weight_decay foreach maximize capturable differentiable",
        "Adamax": "betas eps weight_decay foreach maximize differentiable capturable",
        "Adagrad": "lr_decay weight_decay initial_accumulator_value eps foreach maximize differentiable fused",
        "Adadelta": "rho eps weight_decay foreach capturable maximize differentiable",
        "RMSprop": "alpha eps weight_decay momentum centered capturable foreach maximize differentiable",
        "Rprop": "etas step_sizes capturable foreach maximize differentiable",
        "ASGD": "lambd alpha t0 weight_decay foreach maximize differentiable capturable",
    }.items()
}
# Arguments of DeepSpeed's own optimizers that are none of torch's.
_DEEPSPEED_ARGUMENTS = frozenset(["adam_w_mode", "torch_adam", "bias_correction", "comm_backend_name", "cuda_aware"])
# Optimizers of DeepSpeed that have no counterpart, by lower-case name: why, what to do, and the nearest one.
_COMPRESSED = (
    "an optimizer that compresses its own traffic is not built",
    "the nearest is AdamW; the plan word codec=sign compresses gradients between hosts",
    "AdamW",
)
_MUP = ("the package mup is not used by Paceline", "write optimizer= with its class yourself", "")
FOREIGN_OPTIMIZERS = {
    "onebitadam": _COMPRESSED,
    "zerooneadam": _COMPRESSED,
    "onebitlamb": (_COMPRESSED[0], "the nearest is paceline.optim.LAMB", "LAMB"),
    **dict.fromkeys(("muadam", "muadamw", "musgd"), _MUP),
    "lion": ("torch has no Lion", "write optimizer= with a Lion of another package", ""),
    "muon": (
        "Muon needs the parameters in two groups, which the file cannot name",
        "write optimizer= with torch.optim.Muon and torch.optim.AdamW yourself",
        "",
    ),
    "lbfgs": ("torch's LBFGS calls the loss several times per step", "use another optimizer", ""),
}
_TYPE = "optimizer.type"
_PARAMS = "optimizer.params"


def convert_optimizer(conversion: Conversion) -> float | None:
    """Gives the Trainer its optimizer. Returns the learning rate; None if the file names no optimizer."""
    kind = conversion.get(_TYPE)
    if kind is None:
        if conversion.get("optimizer"):
            conversion.refuse(_TYPE, "the section names no optimizer", "add its type")
        conversion.changes.append("The file names no optimizer: pass the script's own as optimizer=.")
        return None
    if not isinstance(kind, str):
        conversion.refuse(_TYPE, f"it must be a name, not {kind!r:.40}", "correct the file")
        return None
    name = _named(kind)
    if name == "" and kind.lower() not in FOREIGN_OPTIMIZERS:
        known = ", ".join([*TORCH_OPTIMIZERS, "Lamb"])
        conversion.refuse(_TYPE, f"neither DeepSpeed nor torch has an optimizer {kind!r:.40}", f"use one of {known}")
        return None
    if kind.lower() in FOREIGN_OPTIMIZERS:
        why, cure, name = FOREIGN_OPTIMIZERS[kind.lower()]
        conversion.refuse(_TYPE, why, cure)
        if not name:
            conversion.changes.append(f"Write optimizer= yourself: {cure}.")
            return None
    return _write(conversion, kind, name)


def _named(kind: str) -> str:
    """The class in torch, or LAMB, that a name of the file means; empty if none."""
    classes = {"adam": "Adam", "adamw": "AdamW", "adagrad": "Adagrad", "lamb": "LAMB"}
    return classes.get(kind.lower(), kind if kind in TORCH_OPTIMIZERS else "")


def _write(conversion: Conversion, kind: str, name: str) -> float:
    """Writes the call of an optimizer from the parameters of the file."""
    given = conversion.get(_PARAMS, {})
    given = given if isinstance(given, dict) else {}
    accepted = TORCH_OPTIMIZERS.get(name, frozenset(["lr", "betas", "eps", "weight_decay"]))
    is_adam, values = kind.lower() in ("adam", "adamw"), dict[str, Any]()
    if is_adam:
        name = _adam(conversion, kind)
    if name in ("Adam", "AdamW") and not (is_adam and conversion.get(f"{_PARAMS}.torch_adam")):
        values = {"lr": 0.001, "betas": [0.9, 0.999], "eps": 1e-08, "weight_decay": 0.0}  # DeepSpeed's defaults
    elif name == "LAMB":
        values = {"lr": 0.001, "betas": [0.9, 0.999], "eps": 1e-08, "weight_decay": 0.0}
    for argument in given:
        field = f"{_PARAMS}.{argument}"
        if argument in accepted:
            if (value := _value(conversion, field, argument)) is not None:
                values[argument] = value
        elif argument not in _DEEPSPEED_ARGUMENTS and field in conversion.table.used:
            conversion.refuse(field, f"{name} has no argument {argument}", "leave it out")
    home = "paceline.optim" if name == "LAMB" else "torch.optim"
    words = [f"{key}={tuple(value) if isinstance(value, list) else value!r}" for key, value in values.items()]
    source = f"lambda params: {home}.{name}({', '.join(['params', *words])})"
    conversion.arguments["optimizer"] = source
    conversion.settle(_TYPE, USED, _explain(kind, name))
    return float(values.get("lr", _default_lr(name)))


def _default_lr(name: str) -> float:
    defaults = {"NAdam": 0.002, "Adamax": 0.002, "Adadelta": 1.0}
    return defaults.get(name, 0.01 if name in ("Adagrad", "RMSprop", "Rprop", "ASGD") else 0.001)


def _adam(conversion: Conversion, kind: str) -> str:
    """The class that DeepSpeed's Adam is: with decoupled weight decay unless the file says otherwise."""
    decoupled = conversion.get(f"{_PARAMS}.adam_w_mode") is None or conversion.is_on(f"{_PARAMS}.adam_w_mode")
    name = "AdamW" if decoupled or kind.lower() == "adamw" else "Adam"
    for option, text in {
        "adam_w_mode": f"torch.optim.{name}",
        "torch_adam": "torch's own class in any case",
    }.items():
        if conversion.get(f"{_PARAMS}.{option}") is not None:
            conversion.settle(f"{_PARAMS}.{option}", USED, text)
    return name


def _explain(kind: str, name: str) -> str:
    if kind.lower() == "adam" and name == "AdamW":
        return "torch.optim.AdamW: DeepSpeed's Adam decouples weight decay unless adam_w_mode is false"
    if name == "LAMB":
        return "paceline.optim.LAMB: its ratio has no bounds, and tensors of one dimension have none"
    return f"torch.optim.{name}"


def _value(conversion: Conversion, field: str, argument: str) -> Any:
    """The value of an argument, with its verdict; None if it is not of the argument's kind."""
    raw = conversion.get(field)
    if argument in ("betas", "etas", "step_sizes"):
        value = conversion.numbers(field, 2)
    elif isinstance(raw, bool) or raw is None:
        value = raw
    else:
        value = conversion.number(field, 0)
    if value is not None:
        conversion.settle(field, USED, f"{argument}={tuple(value) if isinstance(value, list) else value!r}")
    return value
