"""Converts a DeepSpeed configuration: batch sizes, precision, ZeRO, parallelism, optimizer and schedule."""

from __future__ import annotations

from typing import Any

from paceline.integrations.configs.conversion import NO_EFFECT, REFUSED, USED, Conversion, ConvertedField
from paceline.integrations.configs.deepspeed_fields import DEEPSPEED
from paceline.integrations.configs.optimizers import convert_optimizer
from paceline.integrations.configs.schedules import convert_schedule
from paceline.integrations.configs.training_arguments import DEFAULTS, fill_auto

_ZERO = "zero_optimization"
_BATCH, _MICRO, _TIMES = "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"
_TENSOR = (
    "tensor_parallel.autotp_size",
    "tensor_parallel.tp_size",
    "tensor_parallel.tensor_parallel.tp_size",
    "tensor_parallel.tp.tp_size",
)
REPLACED = (
    "Replace deepspeed.initialize(), engine(...), engine.backward() and engine.step() by the Trainer and its loop.",
    "Remove engine.save_checkpoint() and load_checkpoint(): paceline run --run-dir DIR saves, and resumes.",
)
_CHECKPOINTING = ("partition_activations", "contiguous_memory_optimization", "number_checkpoints")


def convert_deepspeed(
    config: dict[str, Any], workers: int = 0, options: dict[str, Any] | None = None, workers_from: str = "--workers"
) -> Conversion:
    """Converts a DeepSpeed configuration.

    Args:
        config: The configuration, as `json.load` returns it.
        workers: Number of workers; 0: as the batch sizes of the file imply, or an example.
        options: Options of TrainingArguments that fill "auto" (`read_settings`).
        workers_from: Where `workers` comes from.
    """
    options = options or dict(DEFAULTS)
    filled, origins = fill_auto(config, options)
    conversion = Conversion(DEEPSPEED, filled, workers, workers_from if workers else "")
    conversion.changes += REPLACED
    if origins or filled.get(_BATCH) == "auto":
        _convert_length(conversion, options)
    _convert_layout(conversion)
    unit = _unit(conversion)
    _find_workers(conversion, unit)
    _convert_batch(conversion, unit, options)
    _convert_zero(conversion, unit)
    _convert_precision(conversion)
    if (norm := conversion.number("gradient_clipping", 0)) is not None:
        if norm:
            conversion.argument("clip_norm", repr(float(norm)), "gradient_clipping")
        conversion.settle("gradient_clipping", NO_EFFECT, "gradients are not clipped")
    lr = convert_optimizer(conversion)
    convert_schedule(conversion, lr)
    _convert_observers(conversion)
    conversion.finish()
    for name, origin in origins.items():
        settled = conversion.settled[name]
        conversion.settled[name] = ConvertedField(name, "auto", settled.verdict, f"{settled.text}; {origin}")
    return conversion


def _convert_length(conversion: Conversion, options: dict[str, Any]) -> None:
    """The length of the training, as transformers' Trainer has it."""
    if options["max_steps"] > 0:
        conversion.loop = f"count={options['max_steps']}"
    elif options["num_train_epochs"] == int(options["num_train_epochs"]):
        conversion.loop = f"epochs={int(options['num_train_epochs'])}"
    else:
        conversion.loop = f"epochs={options['num_train_epochs']!r}"


def _integer(conversion: Conversion, name: str, default: Any = None, least: int = 1) -> Any:
    return conversion.number(name, least, default, integer=True)


def _convert_layout(conversion: Conversion) -> None:
    """Tensor, sequence and pipeline parallelism, recomputation and torch.compile."""
    for name in _TENSOR:
        size = _integer(conversion, name, 0, least=0)
        if size > 1:
            conversion.word(f"tensor={size}", name)
        elif conversion.get(name) is not None:
            conversion.settle(name, NO_EFFECT, "layers stay whole")
    size = _integer(conversion, "sequence_parallel_size", 0)
    if size > 1:
        conversion.word(f"context={size}", "sequence_parallel_size")
        conversion.changes.append("Remove DeepSpeed's UlyssesSPAttention: context= splits sequences by itself.")
    elif size:
        conversion.settle("sequence_parallel_size", NO_EFFECT, "sequences stay whole")
    stages = conversion.get("pipeline.stages")
    if stages == "auto":
        text = "the stages are those of PipelineModule(num_stages=N) in the script: plan word pipeline=N"
        conversion.settle("pipeline.stages", NO_EFFECT, text)
    elif (count := _integer(conversion, "pipeline.stages", 0)) > 1:
        conversion.word(f"pipeline={count}", "pipeline.stages")
    interval = "pipeline.activation_checkpoint_interval"
    if _integer(conversion, interval, 0, least=0) > 0:
        conversion.word("recompute=blocks", interval)
    elif conversion.get(interval) is not None:
        conversion.settle(interval, NO_EFFECT, "activations are kept")
    _convert_checkpointing(conversion)
    for name in ("compile.deepcompile", "compile.enabled"):
        if conversion.is_on(name):
            conversion.word("compile", name)
        elif conversion.get(name) is not None:
            conversion.settle(name, NO_EFFECT, "it is switched off")


def _convert_checkpointing(conversion: Conversion) -> None:
    """The section that configures DeepSpeed's own checkpointing functions, which the script calls."""
    head = "activation_checkpointing"
    for name in _CHECKPOINTING:
        if conversion.get(f"{head}.{name}") not in (None, False, 0):
            conversion.word("recompute=blocks", f"{head}.{name}")
        elif conversion.get(head) and name in conversion.get(head):
            conversion.settle(f"{head}.{name}", NO_EFFECT, "it asks for nothing")
    offload = f"{head}.cpu_checkpointing"
    if conversion.is_on(offload):
        conversion.words.setdefault("recompute", ("recompute=blocks", offload))
        conversion.refuse(offload, "activations are not moved to the CPU", "the plan has recompute=blocks instead")
    elif conversion.get(offload) is not None:
        conversion.settle(offload, NO_EFFECT, "it asks for nothing")
    if "recompute" in conversion.words:
        conversion.changes.append("Remove calls of deepspeed.checkpointing: recompute=blocks finds the blocks.")


def _unit(conversion: Conversion) -> int:
    """How many workers compute one micro-batch together."""
    product = 1
    for name in ("tensor", "context", "pipeline"):
        if name in conversion.words:
            product *= int(conversion.words[name][0].partition("=")[2])
    return product


def _find_workers(conversion: Conversion, unit: int) -> None:
    """The number of workers: given, or implied by the three batch sizes, or an example."""
    if conversion.workers:
        return
    batch, micro = (
        _integer(conversion, _BATCH) if conversion.get(_BATCH) != "auto" else None,
        _integer(conversion, _MICRO),
    )
    times = _integer(conversion, _TIMES)
    if batch and micro and times and batch % (micro * times) == 0:
        conversion.workers = batch // (micro * times) * unit
        conversion.workers_from = f"{_BATCH} / ({_MICRO} x {_TIMES})"
        return
    shards = _integer(conversion, f"{_ZERO}.mics_shard_size", 0, least=-1)
    example = 2 * unit if not (batch and micro) or batch // micro % 2 == 0 else unit
    conversion.assume(max(example, shards))


def _convert_batch(conversion: Conversion, unit: int, options: dict[str, Any]) -> None:
    """The global batch and the micro-batch, from whichever of the three sizes the file has, as DeepSpeed does."""
    replicas = max(1, conversion.workers // unit)
    micro, times = _integer(conversion, _MICRO), _integer(conversion, _TIMES)
    if conversion.get(_BATCH) == "auto":
        batch = replicas * (micro or options["per_device_train_batch_size"]) * (times or 1)
        conversion.argument("global_batch", repr(batch), _BATCH)
        text = f'global_batch={batch}; "auto" is workers x {_MICRO} x {_TIMES}'
        conversion.settled[_BATCH] = ConvertedField(_BATCH, "auto", USED, text)
    else:
        batch = _integer(conversion, _BATCH)
    if batch and micro and times and batch != micro * times * replicas:
        what = f"{_BATCH}={batch} is not {_MICRO}={micro} x {_TIMES}={times} x {replicas} replicas"
        conversion.refuse(_TIMES, what, f"DeepSpeed refuses it, too; the plan keeps {_BATCH}")
    if batch is None and micro:
        batch = micro * (times or 1) * replicas
    if batch is None:
        what = "The file has no batch size: pass global_batch=, the rows of one optimizer step on all workers together."
        conversion.changes.append(what)
    else:
        conversion.argument("global_batch", repr(batch), _BATCH if conversion.get(_BATCH) else _MICRO)
        if micro is None and times and batch % (times * replicas) == 0:
            micro = batch // (times * replicas)
    if micro and batch and micro < batch:
        conversion.words["micro"] = (f"micro={micro}", _MICRO)
    if micro and batch:
        word = f"plan word micro={micro}" if micro < batch else "the only micro-batch"
        conversion.settled.pop(_MICRO, None)
        conversion.settle(_MICRO, USED, f"{word}; global_batch={batch}")
    if times:
        conversion.settle(_TIMES, USED, f"global_batch={batch}" if batch else "global_batch")


def _convert_zero(conversion: Conversion, unit: int) -> None:
    """ZeRO's stage as shards, and what is kept on the CPU."""
    stage = _integer(conversion, f"{_ZERO}.stage", 0, least=0)
    replicas = max(1, conversion.workers // unit)
    if stage > 3:
        conversion.refuse(f"{_ZERO}.stage", f"stage {stage} does not exist", "use a stage from 0 to 3")
        stage = 3
    devices = {
        f"{_ZERO}.offload_optimizer.device": conversion.get(f"{_ZERO}.offload_optimizer.device", "none"),
        f"{_ZERO}.offload_param.device": conversion.get(f"{_ZERO}.offload_param.device", "none"),
        f"{_ZERO}.cpu_offload": "cpu" if conversion.is_on(f"{_ZERO}.cpu_offload") else "none",
        f"{_ZERO}.cpu_offload_param": "cpu" if conversion.is_on(f"{_ZERO}.cpu_offload_param") else "none",
    }
    wanted = [name for name, device in devices.items() if device in ("cpu", "nvme")]
    if stage == 0:
        conversion.settle(f"{_ZERO}.stage", NO_EFFECT, "every worker has the whole model")
    else:
        _shard(conversion, stage, replicas, bool(wanted))
    for name, device in devices.items():
        _offload(conversion, name, device, stage)
    if conversion.is_on(f"{_ZERO}.zero_quantized_gradients"):
        conversion.word("codec=int8", f"{_ZERO}.zero_quantized_gradients")
    elif conversion.get(f"{_ZERO}.zero_quantized_gradients") is not None:
        conversion.settle(f"{_ZERO}.zero_quantized_gradients", NO_EFFECT, "it is switched off")
    _convert_traffic(conversion)


def _shard(conversion: Conversion, stage: int, replicas: int, offloads: bool) -> None:
    """Plan words of a stage; MiCS divides the replicas into groups of shards."""
    mics = _integer(conversion, f"{_ZERO}.mics_shard_size", -1, least=-1)
    shards = replicas
    if mics > 0:
        shards = mics
        conversion.settle(f"{_ZERO}.mics_shard_size", USED, f"plan word shard={mics}")
    elif conversion.get(f"{_ZERO}.mics_shard_size") is not None:
        conversion.settle(f"{_ZERO}.mics_shard_size", NO_EFFECT, "all workers are one group")
    if shards == 1 and not offloads:
        conversion.settle(f"{_ZERO}.stage", NO_EFFECT, "there is one replica: nothing to shard")
        return
    conversion.words["shard"] = (f"shard={shards}", f"{_ZERO}.stage")
    conversion.words["zero"] = (f"zero={stage}", f"{_ZERO}.stage")
    conversion.settle(f"{_ZERO}.stage", USED, f"plan words shard={shards} zero={stage}")


def _offload(conversion: Conversion, name: str, device: Any, stage: int) -> None:
    needs = 3 if "param" in name else 1
    if device == "none":
        if conversion.get(name) is not None:
            conversion.settle(name, NO_EFFECT, "it is switched off")
    elif device not in ("cpu", "nvme"):
        conversion.refuse(name, f"{device!r:.40} is neither cpu nor nvme nor none", "correct the file")
    elif stage < needs:
        what = f"with stage {stage} nothing of it is sharded"
        conversion.refuse(name, what, f"use stage {'3' if needs == 3 else '1, 2 or 3'}")
    elif device == "nvme":
        conversion.refuse(name, "nothing is moved to NVMe", "the plan has offload=cpu instead")
        conversion.words.setdefault("offload", ("offload=cpu", name))
    else:
        conversion.word("offload=cpu", name)


def _convert_traffic(conversion: Conversion) -> None:
    """The type in which gradients travel."""
    kind = conversion.get("communication_data_type")
    if kind in ("fp16", "bf16"):
        conversion.word(f"codec={kind}", "communication_data_type")
    elif kind == "fp32":
        conversion.settle("communication_data_type", NO_EFFECT, "gradients travel as they are")
    elif kind is not None:
        conversion.refuse(
            "communication_data_type", f"{kind!r:.40} is unknown; use fp32, fp16 or bf16", "correct the file"
        )


def _convert_precision(conversion: Conversion) -> None:
    """Half precision of forward and backward."""
    for name, word in {"bf16.enabled": "bf16", "bfloat16.enabled": "bf16", "fp16.enabled": "fp16"}.items():
        if conversion.is_on(name):
            if "precision" in conversion.words and conversion.words["precision"][0] != f"precision={word}":
                conversion.refuse(name, "bf16 and fp16 are both enabled", "keep one; the plan has bf16")
            conversion.word(f"precision={word}", name)
        elif conversion.get(name) is not None:
            conversion.settle(name, NO_EFFECT, "it is switched off")
    name, dtype = "torch_autocast.enabled", "torch_autocast.dtype"
    if not conversion.is_on(name):
        if conversion.get("torch_autocast"):
            conversion.settle(name, NO_EFFECT, "it is switched off")
            conversion.settle(dtype, NO_EFFECT, "torch_autocast is switched off")
        return
    kinds = {"bfloat16": "bf16", "bf16": "bf16", "float16": "fp16", "fp16": "fp16", "half": "fp16"}
    asked = conversion.get(dtype, "bfloat16")
    half = kinds.get(str(asked).removeprefix("torch."))
    if half is None:
        conversion.refuse(dtype, f"{asked!r:.40} is not a type of half precision", "use bfloat16 or float16")
        conversion.settle(name, NO_EFFECT, "its dtype is refused")
    else:
        conversion.word(f"precision={half}", name)
        conversion.settle(dtype, USED, f"plan word precision={half}")


# Sections of monitors: the logger for each, and the fields of its target.
_LOGGERS = {
    "wandb": ("wandb", ("team", "project")),
    "comet": ("comet", ("workspace", "project")),
    "csv_monitor": ("csv", ()),
}


def _convert_observers(conversion: Conversion) -> None:
    """Monitors, and what a run that grows and shrinks needs."""
    name = "tensorboard.enabled"
    if conversion.is_on(name):
        conversion.options.append("--tensorboard")
        conversion.settle(name, USED, "paceline run --tensorboard")
    elif conversion.get(name) is not None:
        conversion.settle(name, NO_EFFECT, "it is switched off")
    for section, (kind, fields) in _LOGGERS.items():
        names = [f"{section}.{field}" for field in fields]
        if conversion.is_on(f"{section}.enabled"):
            target = "/".join(str(value) for value in map(conversion.get, names) if value)
            option = f"--log-to {kind}" + (f":{target}" if target else "")
            conversion.options.append(option)
            for name in [f"{section}.enabled", *names]:
                conversion.settle(name, USED, f"paceline run {option}")
        else:
            for field in conversion.get(section) or ():
                conversion.settle(f"{section}.{field}", NO_EFFECT, f"{section} is switched off")
    if conversion.get("elasticity"):
        if conversion.is_on("elasticity.enabled"):
            least = _integer(conversion, "elasticity.min_gpus", 1)
            if least > 1:
                conversion.options.append(f"--min-workers {least}")
            conversion.settle("elasticity.min_gpus", USED, f"paceline run --min-workers {least}")
            conversion.settle("elasticity.enabled", USED, "any run grows by paceline run --join and survives losses")
        else:
            for name in conversion.get("elasticity"):
                conversion.settle(f"elasticity.{name}", NO_EFFECT, "elasticity is switched off")
    if conversion.get("pipeline"):
        conversion.changes.append("Pass the plain model instead of deepspeed.pipe.PipelineModule.")
    if any(one.verdict == REFUSED for one in conversion.settled.values() if one.name.startswith("moe")):
        conversion.changes.append("DeepSpeed's MoE layers need experts of the model's own.")
