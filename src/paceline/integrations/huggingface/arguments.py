"""What becomes of each field of `transformers.TrainingArguments`: it is used, has no effect, or is refused by name."""

from __future__ import annotations

from dataclasses import MISSING, fields
from typing import Any

from paceline.errors import UsageError

_PLAN = "say it in the plan instead: paceline run --plan"
# Fields that do what transformers documents, and what becomes of them.
USED = {
    "per_device_train_batch_size": "times gradient_accumulation_steps: the global batch",
    "gradient_accumulation_steps": "times per_device_train_batch_size: the global batch",
    **dict.fromkeys(("num_train_epochs", "max_steps"), "the number of steps"),
    **dict.fromkeys(("lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps"), "the schedule"),
    **dict.fromkeys(
        (
            "optim",
            "optim_args",
            "optim_target_modules",
            "learning_rate",
            "weight_decay",
            "adam_beta1",
            "adam_beta2",
            "adam_epsilon",
        ),
        "the optimizer",
    ),
    "max_grad_norm": "clip_norm",
    **dict.fromkeys(
        (
            "label_smoothing_factor",
            "use_liger_kernel",
            "liger_kernel_config",
            "neftune_noise_alpha",
            "use_cache",
            "torch_empty_cache_steps",
        ),
        "the loss, by compute_loss()",
    ),
    "bf16": "the plan word precision=bf16",
    "fp16": "the plan word precision=fp16",
    **dict.fromkeys(("activation_checkpointing", "gradient_checkpointing"), "the plan word recompute=blocks"),
    "torch_compile": "the plan word compile",
    **dict.fromkeys(("logging_strategy", "logging_steps", "logging_first_step"), "when logs are written"),
    **dict.fromkeys(
        (
            "log_level",
            "report_to",
            "run_name",
            "project",
            "trackio_space_id",
            "trackio_bucket_id",
            "trackio_static_space_id",
            "tf32",
            "use_cpu",
            "full_determinism",
            "output_dir",
        ),
        "as in transformers",
    ),
    **dict.fromkeys(("eval_strategy", "eval_steps", "eval_delay", "eval_on_start"), "when evaluation runs"),
    **dict.fromkeys(("prediction_loss_only", "include_for_metrics", "label_names"), "what evaluation computes"),
    **dict.fromkeys(("save_strategy", "save_steps"), "when a checkpoint is written, to the run folder"),
    **dict.fromkeys(
        ("load_best_model_at_end", "metric_for_best_model", "greater_is_better"),
        "the best checkpoint is kept, and loaded at the end",
    ),
    "seed": "the seed of weights, rows and dropout",
    "data_seed": "the seed of the order of rows",
    **dict.fromkeys(
        ("train_sampling_strategy", "length_column_name", "dataloader_drop_last"),
        "the order of rows, by transformers' own sampler",
    ),
    **dict.fromkeys(
        (
            "dataloader_num_workers",
            "dataloader_persistent_workers",
            "dataloader_prefetch_factor",
            "dataloader_multiprocessing_context",
        ),
        "options of the loader",
    ),
    "remove_unused_columns": "which columns a row has",
}
# Fields that change nothing, and why.
NO_EFFECT = {
    "average_tokens_across_devices": "the mean is always over the tokens of the whole global batch",
    "per_device_eval_batch_size": "rows are evaluated in the micro-batches of training (plan word micro)",
    "eval_accumulation_steps": "predictions are collected on the CPU, a few micro-batches at a time",
    "eval_do_concat_batches": "predictions of all rows are joined",
    "eval_use_gather_object": "predictions are collected by Paceline",
    "logging_nan_inf_filter": "a loss that is not finite ends the run, and the message names its micro-batch",
    "log_level_replica": "the main worker logs",
    "log_on_each_node": "the main worker logs",
    "disable_tqdm": "Paceline prints its own progress",
    "save_total_limit": "use paceline run --keep",
    "save_only_model": "checkpoints hold all that a resumed run needs",
    "save_on_each_node": "checkpoints are written once, by all workers together",
    "enable_jit_checkpoint": "Paceline writes a checkpoint when the machine is about to be taken away",
    "restore_callback_states_from_checkpoint": "states of callbacks are always restored",
    "dataloader_pin_memory": "Paceline pins memory on its own",
    "dataloader_in_order": "rows arrive in their order",
    "ddp_find_unused_parameters": "parameters without a gradient are found",
    "ddp_bucket_cap_mb": "Paceline chooses the size of its buckets",
    "ddp_broadcast_buffers": "buffers are merged",
    "ddp_static_graph": "nothing needs to be known about the graph",
    "ddp_backend": "Paceline has its own transport",
    "ddp_timeout": "use paceline run --hang-timeout",
    "accelerator_config": "rows are distributed by Paceline, in an order that depends on the seed alone",
    "skip_memory_metrics": "memory is in the report",
    "do_train": "transformers does not read it either",
    "do_eval": "transformers does not read it either",
    "do_predict": "transformers does not read it either",
    "local_rank": "scripts name no rank",
    "hub_token": "only push_to_hub uses it",
    "hub_private_repo": "only push_to_hub uses it",
    "hub_model_id": "only push_to_hub uses it",
    "hub_strategy": "only push_to_hub uses it",
    "hub_always_push": "only push_to_hub uses it",
    "hub_revision": "only push_to_hub uses it",
}
# Fields that are refused unless they have their default, and what to do instead.
REFUSED = {
    "bf16_full_eval": "evaluate with the plan's precision, or convert the model to bfloat16 before training",
    "fp16_full_eval": "evaluate with the plan's precision",
    "activation_checkpointing_kwargs": "leave it out; the plan word recompute=blocks has no options",
    "gradient_checkpointing_kwargs": "leave it out; the plan word recompute=blocks has no options",
    "torch_compile_backend": "leave it out; the plan word compile uses torch's default backend",
    "torch_compile_mode": "leave it out; the plan word compile uses torch's default mode",
    "auto_find_batch_size": "give the global batch; Paceline predicts memory with `paceline explain`",
    "include_num_input_tokens_seen": "leave it out; the report shows tokens per second for token datasets",
    "batch_eval_metrics": "let compute_metrics get all predictions at once",
    "push_to_hub": "call hf_trainer.save_model(folder) after training, and push the folder",
    "ignore_data_skip": "leave it out; Paceline resumes without reading skipped rows",
    "resume_from_checkpoint": "start the same command again with the same --run-dir",
    "parallelism_config": _PLAN + " 'tensor=2' or 'context=2'",
    "fsdp": _PLAN + " 'shard=2 zero=3'",
    "fsdp_config": _PLAN + " 'shard=2 zero=3'",
    "deepspeed": _PLAN + " 'shard=2 zero=3'",
    "debug": "Paceline names the layer of the first value that is not finite; see `paceline doctor`",
}
_SILENT: tuple[Any, ...] = ("", None, False, "no", [], {})  # values that ask for nothing


def default_of(field: Any) -> Any:
    """The default value of a field of a dataclass; None if it has none."""
    if field.default is not MISSING:
        return field.default
    return field.default_factory() if field.default_factory is not MISSING else None


def check_arguments(args: Any) -> None:
    """Raises UsageError for the first field that has another value than its default and that Paceline cannot honour.

    Fields that a subclass adds belong to the trainer that reads them, as those of TRL do.

    Args:
        args: A `transformers.TrainingArguments`, or an object of a subclass.
    """
    from transformers import TrainingArguments

    if args.world_size > 1:
        what = f"transformers has formed a process group of {args.world_size} processes for itself"
        raise UsageError(what, "start the script with `paceline run`, without torchrun or accelerate launch")
    if getattr(args, "predict_with_generate", False):
        what = "Seq2SeqTrainingArguments(predict_with_generate=True) cannot be used with paceline.hf"
        raise UsageError(what, "leave it out, and call model.generate() after training, in a script of one process")
    for field in fields(TrainingArguments):
        if field.name not in REFUSED and (field.name in USED or field.name in NO_EFFECT):
            continue
        value, usual = getattr(args, field.name), default_of(field)
        if value == usual or any(value is one or value == one for one in _SILENT):
            continue
        if field.name == "torch_compile_backend" and value == "inductor":
            continue  # transformers fills it in
        cure = REFUSED.get(field.name, "leave it out, or open an issue: this version of transformers is newer")
        raise UsageError(f"TrainingArguments({field.name}={value!r:.60}) cannot be used with paceline.hf", cure)


def plan_of(args: Any) -> list[str]:
    """The plan words that training arguments ask for."""
    words = {
        "precision=bf16": args.bf16,
        "precision=fp16": args.fp16,
        "recompute=blocks": args.activation_checkpointing or args.gradient_checkpointing,
        "compile": args.torch_compile,
    }
    return [word for word, asked in words.items() if asked]


def merged_plan(args: Any, plan: str | None) -> str:
    """The plan of the training arguments; words of `plan` replace words of the same name."""
    given = (plan or "").split()
    names = {word.partition("=")[0] for word in given}
    return " ".join([*given, *(word for word in plan_of(args) if word.partition("=")[0] not in names)])
