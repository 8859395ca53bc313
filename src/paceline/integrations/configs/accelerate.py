"""Converts an Accelerate configuration: processes, precision, and its sections for FSDP, DeepSpeed and others."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paceline.base.config_file import read_config
from paceline.errors import FormatError
from paceline.integrations.configs.accelerate_fields import ACCELERATE
from paceline.integrations.configs.conversion import (
    NO_EFFECT,
    USED,
    Conversion,
    ConvertedField,
    leaves,
)
from paceline.integrations.configs.deepspeed import REPLACED, convert_deepspeed
from paceline.integrations.configs.training_arguments import DEFAULTS

# Sections, the prefix of their fields, and the kinds of distribution that read them.
PREFIXES = {
    "fsdp_config": "fsdp_",
    "dynamo_config": "dynamo_",
    "parallelism_config": "parallelism_config_",
    "megatron_lm_config": "megatron_lm_",
}
_READERS = {"fsdp_config": ("FSDP",), "deepspeed_config": ("DEEPSPEED",), "megatron_lm_config": ("MEGATRON_LM",)}
_PLAIN = ("NO", "MULTI_CPU", "MULTI_GPU", "FSDP", "DEEPSPEED", "MEGATRON_LM", "TP")
_DEVICES = (
    "MULTI_NPU",
    "MULTI_XPU",
    "MULTI_MLU",
    "MULTI_SDAA",
    "MULTI_MUSA",
    "MULTI_HPU",
    "MULTI_NEURON",
    "XLA",
    "TPU",
)
_STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2")
_FSDP = "fsdp_config.fsdp_"
_AXES = "parallelism_config.parallelism_config_"
_MEGATRON = "megatron_lm_config.megatron_lm_"
_REPLACED = (
    "Replace accelerator.prepare(), accumulate(), backward() and the loop over the DataLoader by the Trainer's loop.",
    "A script with transformers.Trainer or TRL stays as it is: paceline.hf.train(trainer) in place of trainer.train().",
)
# Fields of `deepspeed_config` and the fields of DeepSpeed's own file that Accelerate makes of them.
DEEPSPEED_FIELDS = {
    "zero_stage": "zero_optimization.stage",
    "offload_optimizer_device": "zero_optimization.offload_optimizer.device",
    "offload_param_device": "zero_optimization.offload_param.device",
    "gradient_clipping": "gradient_clipping",
}


def convert_accelerate(
    config: dict[str, Any], workers: int = 0, options: dict[str, Any] | None = None, folder: Path | None = None
) -> Conversion:
    """Converts an Accelerate configuration.

    Args:
        config: The configuration, as PyYAML reads it.
        workers: Number of workers instead of num_processes; 0: that of the file.
        options: Options of TrainingArguments that fill "auto" in a DeepSpeed file (`read_settings`).
        folder: Where a DeepSpeed file named by the configuration may be, beside the current folder.
    """
    named, renames = _with_prefixes(config)
    conversion = Conversion(ACCELERATE, named, workers, "--workers" if workers else "")
    conversion.changes += _REPLACED
    kind = _kind(conversion)
    _find_workers(conversion, kind)
    for section, readers in _READERS.items():
        for name, _ in leaves(named.get(section) or {}, section) if kind not in readers else ():
            conversion.settle(name, NO_EFFECT, f"distributed_type is {kind}, which does not read {section}")
    unit = _convert_axes(conversion, kind)
    if kind == "FSDP":
        _convert_fsdp(conversion, unit)
    elif kind == "DEEPSPEED":
        _convert_deepspeed_section(conversion, unit, options or dict(DEFAULTS), folder or Path())
    elif kind == "MEGATRON_LM":
        _convert_megatron(conversion, unit)
    _convert_precision(conversion)
    _convert_dynamo(conversion)
    _convert_machines(conversion)
    if "global_batch" not in conversion.arguments:
        processes = max(1, conversion.workers // unit)
        conversion.changes.append(
            f"Pass global_batch=: the batch size of the script's DataLoader x {processes} processes"
            " x gradient_accumulation_steps."
        )
    if "optimizer" not in conversion.arguments:
        conversion.changes.append("Pass the script's own optimizer as optimizer=, a function of the named parameters.")
    conversion.finish()
    for name, original in renames.items():
        if settled := conversion.settled.pop(name, None):
            conversion.settled[original] = ConvertedField(original, settled.value, settled.verdict, settled.text)
    return conversion


def fsdp_section(config: dict[str, Any]) -> dict[str, Any]:
    """An Accelerate configuration for a file that holds the FSDP section alone, as `TrainingArguments.fsdp_config`."""
    if "distributed_type" in config or isinstance(config.get("fsdp_config"), Mapping):
        return {"distributed_type": "FSDP", **config}
    return {
        "distributed_type": "FSDP",
        "fsdp_config": {"fsdp_version": 2, **config} if _lacks_version(config) else {**config},
    }


def _lacks_version(config: Mapping[str, Any]) -> bool:
    return not {"version", "fsdp_version"} & set(config)


def _with_prefixes(config: dict[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """The configuration with the prefixes that Accelerate adds to the fields of sections; {dotted name: as given}."""
    named, renames = dict(config), dict[str, str]()
    for section, prefix in PREFIXES.items():
        if not isinstance(config.get(section), Mapping):
            continue
        named[section] = {}
        for key, value in config[section].items():
            full = str(key)
            if not full.startswith(prefix) and f"{section}.{prefix}{full}" in ACCELERATE.names():
                full = f"{prefix}{key}"
                renames[f"{section}.{full}"] = f"{section}.{key}"
            named[section][full] = value
    return named, renames


def _kind(conversion: Conversion) -> str:
    """The kind of distribution; what is not built is refused."""
    kind = conversion.get("distributed_type", "NO")
    kind = "NO" if kind is False else str(kind).upper()  # YAML reads a bare NO as false
    if str(conversion.get("compute_environment")).upper() == "AMAZON_SAGEMAKER":
        cure = "start paceline run or paceline launch on its machines"
        conversion.refuse("compute_environment", "SageMaker starts no runs of Paceline", cure)
    if kind in _PLAIN:
        text = "one worker" if kind == "NO" else "one worker per process"
        conversion.settle("distributed_type", USED, text)
    elif kind in _DEVICES:
        conversion.refuse("distributed_type", f"{kind}: Paceline runs on CPUs and NVIDIA GPUs", "use MULTI_GPU")
    else:
        conversion.refuse("distributed_type", f"Accelerate has no kind {kind:.40}", f"use one of {', '.join(_PLAIN)}")
    return kind


def _find_workers(conversion: Conversion, kind: str) -> None:
    """Number of workers and machines."""
    number = conversion.get("num_processes")
    conversion.machines = conversion.number("num_machines", 1, 1, integer=True)
    if conversion.workers:
        conversion.settle("num_processes", USED, f"--workers {conversion.workers} was given instead")
    elif number == -1 or number is None:
        conversion.assume(1 if kind == "NO" else 2 * conversion.machines)
        conversion.settle("num_processes", USED, "pass --workers N")
    else:
        conversion.workers = conversion.number("num_processes", 1, 1, integer=True)
        conversion.workers_from = "num_processes"
        conversion.settle("num_processes", USED, f"{conversion.workers} workers")
    if conversion.workers % conversion.machines:
        what = f"{conversion.workers} workers are not a multiple of {conversion.machines} machines"
        conversion.refuse("num_machines", what, "start the workers that each machine has room for")
        conversion.machines = 1
    conversion.settle("num_machines", USED, f"{conversion.workers // conversion.machines} workers on each")


def _convert_axes(conversion: Conversion, kind: str) -> int:
    """Plan words of `parallelism_config`. Returns how many workers compute one micro-batch together."""
    if kind == "MEGATRON_LM":
        names = {"tp_degree": "tensor", "pp_degree": "pipeline", "context_parallel_size": "context"}
        names["expert_model_parallel_size"] = "expert"
        axes = {f"{_MEGATRON}{name}": word for name, word in names.items()}
    else:
        axes = {
            f"{_AXES}{name}_size": word for name, word in {"tp": "tensor", "cp": "context", "sp": "context"}.items()
        }
    unit = 1
    for name, word in axes.items():
        size = conversion.number(name, 0, 1, integer=True)
        if size <= 1:
            if conversion.get(name) is not None:
                conversion.settle(name, NO_EFFECT, "nothing is split")
        elif word in conversion.words:
            conversion.refuse(name, f"{conversion.words[word][0]} is in the plan already", "keep one of the two")
        else:
            conversion.word(f"{word}={size}", name)
            unit *= 1 if word == "expert" else size
    return unit


def _shard(conversion: Conversion, count: int, zero: int, name: str, offloads: bool = False) -> None:
    """Plan words shard and zero, unless there is nothing to shard."""
    if count <= 1 and not offloads:
        conversion.settle(name, NO_EFFECT, "there is one replica: nothing to shard")
        return
    conversion.words["shard"] = (f"shard={max(1, count)}", name)
    conversion.words["zero"] = (f"zero={zero}", name)
    conversion.settle(name, USED, f"plan words shard={max(1, count)} zero={zero}")


def _convert_fsdp(conversion: Conversion, unit: int) -> None:
    """FSDP's strategy as shards, offloading and recomputation."""
    version = conversion.number(f"{_FSDP}version", 1, 1, integer=True)
    conversion.settle(f"{_FSDP}version", USED, f"FSDP{version}'s names")
    name, strategy = _strategy(conversion, version)
    replicas = max(1, conversion.workers // unit)
    groups = conversion.machines if strategy.startswith("HYBRID") else 1
    size = conversion.number(f"{_AXES}dp_shard_size", 1, None, integer=True)
    copies = conversion.number(f"{_AXES}dp_replicate_size", 1, None, integer=True)
    count = size or replicas // (copies or groups)
    offload = next((one for one in ("offload_params", "cpu_offload") if conversion.is_on(f"{_FSDP}{one}")), "")
    if size is not None:
        conversion.settle(
            f"{_AXES}dp_shard_size", USED, f"plan word shard={size}" if size > 1 else "nothing is sharded"
        )
    if copies is not None:
        conversion.settle(f"{_AXES}dp_replicate_size", USED, f"data={copies} follows from the number of workers")
    if strategy == "NO_SHARD":
        conversion.settle(name, NO_EFFECT, "every worker has the whole model")
    else:
        _shard(conversion, count, 2 if strategy in ("SHARD_GRAD_OP", "HYBRID_SHARD_ZERO2") else 3, name, bool(offload))
    if strategy.startswith("HYBRID") and groups == 1 and size is None:
        conversion.changes.append(
            f"{strategy} shards within each machine; the file has one machine, so all are one group."
        )
    for one in ("offload_params", "cpu_offload"):
        if one == offload:
            conversion.word("offload=cpu", f"{_FSDP}{one}")
        elif conversion.get(f"{_FSDP}{one}") is not None:
            conversion.settle(f"{_FSDP}{one}", NO_EFFECT, "it is switched off")
    field = f"{_FSDP}activation_checkpointing"
    if conversion.is_on(field):
        conversion.word("recompute=blocks", field)
    elif conversion.get(field) is not None:
        conversion.settle(field, NO_EFFECT, "it is switched off")


def _strategy(conversion: Conversion, version: int) -> tuple[str, str]:
    """The field that names the strategy of sharding, and the strategy in the words of FSDP1."""
    old, new = f"{_FSDP}sharding_strategy", f"{_FSDP}reshard_after_forward"
    name = new if version >= 2 or (conversion.get(old) is None and conversion.get(new) is not None) else old
    other = old if name == new else new
    if conversion.get(other) is not None:
        conversion.settle(other, NO_EFFECT, f"with fsdp_version {version} {name.rpartition('.')[2]} decides")
    value = conversion.get(name, True if version >= 2 else "FULL_SHARD")
    if isinstance(value, bool) or str(value).lower() in ("true", "false"):
        return name, "FULL_SHARD" if str(value).lower() == "true" else "SHARD_GRAD_OP"
    if isinstance(value, int) and 1 <= value <= len(_STRATEGIES):
        return name, _STRATEGIES[value - 1]
    if isinstance(value, str) and value.isdigit() and 1 <= int(value) <= len(_STRATEGIES):
        return name, _STRATEGIES[int(value) - 1]
    if str(value).upper() in _STRATEGIES:
        return name, str(value).upper()
    cure = f"use one of {', '.join(_STRATEGIES)}; the plan has FULL_SHARD"
    conversion.refuse(name, f"{value!r:.40} is not a strategy of FSDP", cure)
    return name, "FULL_SHARD"


def _convert_deepspeed_section(conversion: Conversion, unit: int, options: dict[str, Any], folder: Path) -> None:
    """The section for DeepSpeed, with the file that it may name."""
    head = "deepspeed_config"
    path = conversion.get(f"{head}.deepspeed_config_file")
    if isinstance(path, str) and path not in ("", "none"):
        inner = _from_file(conversion, path, options, folder)
    else:
        inner = _from_fields(conversion, unit, options)
    for name, (word, origin) in inner.words.items():
        conversion.words.setdefault(name, (word, origin))
    conversion.arguments |= inner.arguments
    conversion.definitions += inner.definitions
    conversion.options += inner.options
    conversion.changes += [
        line for line in inner.changes if not line.startswith(("The file has no", "The file names no", *REPLACED))
    ]
    conversion.loop = inner.loop
    for name, settled in inner.settled.items():
        conversion.settled.setdefault(name, settled)
    conversion.adopted |= {name for name in inner.settled if name not in ACCELERATE.names()}
    if conversion.is_on(f"{head}.zero3_init_flag"):
        conversion.settle(f"{head}.zero3_init_flag", USED, "model=Net, a function that builds the model")
    elif conversion.get(f"{head}.zero3_init_flag") is not None:
        conversion.settle(f"{head}.zero3_init_flag", NO_EFFECT, "it is switched off")
    for name in ("dp_shard_size", "dp_replicate_size"):
        if conversion.get(f"{_AXES}{name}") is not None:
            conversion.settle(f"{_AXES}{name}", NO_EFFECT, "ZeRO's stage and the number of workers decide")


def _renamed(inner: Conversion, name_of: Mapping[str, str] | None, prefix: str) -> Conversion:
    """An inner conversion with the names of the outer file."""

    def rename(name: str) -> str:
        return (name_of or {}).get(name, f"{prefix}{name}")

    inner.words = {key: (word, rename(origin)) for key, (word, origin) in inner.words.items()}
    kept = {rename(name): one for name, one in inner.settled.items() if name_of is None or name in name_of}
    inner.settled = {name: ConvertedField(name, one.value, one.verdict, one.text) for name, one in kept.items()}
    return inner


def _from_file(conversion: Conversion, path: str, options: dict[str, Any], folder: Path) -> Conversion:
    field = "deepspeed_config.deepspeed_config_file"
    candidates = [one for one in (Path(path), folder / path, folder / Path(path).name) if one.is_file()]
    if not candidates:
        conversion.refuse(
            field, f"the file {path!r:.80} is not there", "copy it to the folder of this file, or convert it by itself"
        )
        return Conversion(ACCELERATE, {}, conversion.workers)
    try:
        held = read_config(candidates[0])
    except FormatError as error:
        conversion.refuse(field, error.what, error.cure)
        return Conversion(ACCELERATE, {}, conversion.workers)
    conversion.settle(field, USED, "its fields follow below")
    for name in DEEPSPEED_FIELDS:
        if conversion.get(f"deepspeed_config.{name}") is not None:
            text = f"{path} decides, and Accelerate refuses both"
            conversion.settle(f"deepspeed_config.{name}", NO_EFFECT, text)
    times = "deepspeed_config.gradient_accumulation_steps"
    if conversion.get(times) is not None:
        conversion.settle(times, NO_EFFECT, f"{path} decides, and Accelerate refuses both")
    axes = {name: conversion.words[name][0] for name in ("tensor", "context") if name in conversion.words}
    if "context" in axes and "sequence_parallel_size" not in held:
        held = {**held, "sequence_parallel_size": int(axes["context"].partition("=")[2])}
    inner = convert_deepspeed(held, conversion.workers, options, conversion.workers_from)
    inner.settled.pop("sequence_parallel_size", None) if axes else None
    return _renamed(inner, None, f"{candidates[0].name}: ")


def _from_fields(conversion: Conversion, unit: int, options: dict[str, Any]) -> Conversion:
    """Converts the DeepSpeed configuration that Accelerate makes of its own fields."""
    held: dict[str, Any] = {}
    for field, name in DEEPSPEED_FIELDS.items():
        value = conversion.get(f"deepspeed_config.{field}")
        if field == "zero_stage" and value is None:
            value = 2  # Accelerate's default
        if isinstance(value, str) and value.replace(".", "", 1).isdigit():
            value = float(value) if "." in value else int(value)  # as quoted in YAML
        *heads, last = name.split(".")
        section = held
        for part in heads:
            section = section.setdefault(part, {})
        if value is not None:
            section[last] = value
    inner = convert_deepspeed(held, max(1, conversion.workers // unit), options, conversion.workers_from)
    times = conversion.get("deepspeed_config.gradient_accumulation_steps")
    if times is not None:
        text = "global_batch is this x the batch size of the DataLoader x processes"
        conversion.settle("deepspeed_config.gradient_accumulation_steps", USED, text)
    return _renamed(inner, {name: f"deepspeed_config.{field}" for field, name in DEEPSPEED_FIELDS.items()}, "")


def _convert_megatron(conversion: Conversion, unit: int) -> None:
    """Megatron-LM's optimizer shards, clipping, recomputation and micro-batches."""
    replicas = max(1, conversion.workers // unit)
    if conversion.is_on(f"{_MEGATRON}use_distributed_optimizer"):
        _shard(conversion, replicas, 1, f"{_MEGATRON}use_distributed_optimizer")
    elif conversion.get(f"{_MEGATRON}use_distributed_optimizer") is not None:
        conversion.settle(f"{_MEGATRON}use_distributed_optimizer", NO_EFFECT, "it is switched off")
    norm = conversion.number(f"{_MEGATRON}gradient_clipping", 0)
    if norm:
        conversion.argument("clip_norm", repr(float(norm)), f"{_MEGATRON}gradient_clipping")
    elif norm is not None:
        conversion.settle(f"{_MEGATRON}gradient_clipping", NO_EFFECT, "gradients are not clipped")
    if conversion.is_on(f"{_MEGATRON}recompute_activations"):
        conversion.word("recompute=blocks", f"{_MEGATRON}recompute_activations")
    elif conversion.get(f"{_MEGATRON}recompute_activations") is not None:
        conversion.settle(f"{_MEGATRON}recompute_activations", NO_EFFECT, "it is switched off")
    if conversion.get(f"{_MEGATRON}recompute_granularity") in ("full", "selective"):
        conversion.word("recompute=blocks", f"{_MEGATRON}recompute_granularity")
    elif conversion.get(f"{_MEGATRON}recompute_granularity") is not None:
        value = conversion.get(f"{_MEGATRON}recompute_granularity")
        conversion.refuse(
            f"{_MEGATRON}recompute_granularity", f"{value!r:.40} is neither full nor selective", "correct it"
        )
    count = conversion.number(f"{_MEGATRON}num_micro_batches", 1, None, integer=True)
    if count is not None:
        text = f"micro is global_batch / {replicas * count}: {count} micro-batches on each of {replicas} replicas"
        conversion.settle(f"{_MEGATRON}num_micro_batches", USED, text)
        conversion.changes.append(f"Add to the plan micro=N, with N = global_batch // {replicas * count}.")


def _convert_precision(conversion: Conversion) -> None:
    """Half precision of forward and backward."""
    value = conversion.get("mixed_precision", "no")
    word = "no" if value is False else str(value).lower()
    if word in ("bf16", "fp16", "fp8"):
        if "precision" in conversion.words and conversion.words["precision"][0] != f"precision={word}":
            conversion.settle("mixed_precision", NO_EFFECT, "the DeepSpeed file decides")
        conversion.word(f"precision={word}", "mixed_precision")
        backend = str(conversion.get("fp8_config.backend", "AO")).upper()
        if word == "fp8" and backend != "AO":
            conversion.changes.append(f"torchao computes in 8 bits in place of {backend}: losses differ slightly.")
    elif word in ("no", "fp32"):
        conversion.settle("mixed_precision", NO_EFFECT, "forward and backward run in the model's dtype")
    else:
        conversion.refuse("mixed_precision", f"{value!r:.40} is unknown", "use no, fp16, bf16 or fp8")
    if conversion.is_on("fp16"):
        if conversion.get("mixed_precision") is None:
            conversion.word("precision=fp16", "fp16")
        conversion.settle("fp16", NO_EFFECT, "mixed_precision decides")
    elif conversion.get("fp16") is not None:
        conversion.settle("fp16", NO_EFFECT, "it is switched off")
    if conversion.is_on("downcast_bf16"):
        conversion.refuse("downcast_bf16", "Paceline does not run on TPUs", "leave it out")
    conversion.settle("downcast_bf16", NO_EFFECT, "only TPUs use it")


def _convert_dynamo(conversion: Conversion) -> None:
    """torch.compile."""
    for name in ("dynamo_config.dynamo_backend", "dynamo_backend"):
        value = conversion.get(name)
        if value is None:
            continue
        word = "NO" if value is False else str(value).upper()
        if word == "INDUCTOR":
            conversion.word("compile", name)
        elif word == "NO":
            conversion.settle(name, NO_EFFECT, "the model is not compiled")
        else:
            cure = "the plan has compile instead, with torch's default backend"
            conversion.refuse(name, f"the plan word compile has no other backend than inductor, not {word:.40}", cure)
            conversion.words.setdefault("compile", ("compile", name))


def _convert_machines(conversion: Conversion) -> None:
    """How workers on other machines join, and which devices are used."""
    address, port = conversion.get("main_process_ip"), conversion.get("main_process_port")
    each, count = conversion.workers // conversion.machines, conversion.machines
    if count > 1:
        where = f"{address or 'ADDR'}:{port or 29400}"
        conversion.options.append(f"--listen {where}")
        conversion.changes.append(
            f"The command is for the first machine. On each of the other {count - 1}: paceline run --workers {each}"
            f" --join {where} --token-file TOKEN train.py, with a copy of the file token of the run folder; or start"
            f" all from one machine: paceline launch ssh --hosts A,B,.. --workers-per-host {each} train.py"
        )
        text = f"paceline run --listen {where}"
        verdict = USED
    else:
        text, verdict = "there is one machine", NO_EFFECT
    conversion.settle("main_process_ip", verdict, text)
    conversion.settle("main_process_port", verdict, text)
    hostfile = conversion.get("mpirun_config.mpirun_hostfile")
    if hostfile is not None:
        text = f"paceline launch mpi --hostfile {hostfile} --workers-per-host {each}"
        conversion.settle("mpirun_config.mpirun_hostfile", USED, text)
        conversion.changes.append(f"With MPI: {text} train.py")
    devices = conversion.get("gpu_ids")
    if devices is not None and str(devices) != "all":
        conversion.settle("gpu_ids", USED, f"CUDA_VISIBLE_DEVICES={devices}")
        conversion.changes.append(f"Set the environment variable CUDA_VISIBLE_DEVICES={devices}.")
    elif devices is not None:
        conversion.settle("gpu_ids", NO_EFFECT, "all: workers use all GPUs")
    if conversion.is_on("use_cpu"):
        conversion.settle("use_cpu", USED, "CUDA_VISIBLE_DEVICES= (empty)")
        conversion.changes.append(
            "Set the environment variable CUDA_VISIBLE_DEVICES to an empty text, to train on CPUs."
        )
    elif conversion.get("use_cpu") is not None:
        conversion.settle("use_cpu", NO_EFFECT, "GPUs are used where there are some")
