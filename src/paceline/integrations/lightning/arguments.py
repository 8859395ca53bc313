"""What becomes of arguments of Lightning's Trainer, of arguments of `self.log`, and of hooks.

Each is used, has no effect, or is refused by name.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from paceline.errors import UsageError

_PLAN = "say it in the plan instead: paceline run --plan"
_STRATEGY = "or train with Lightning's own loop and strategy=paceline.lightning.PacelineStrategy()"
# Arguments of Lightning's Trainer that `paceline.lightning.trainer` takes, too.
USED = {
    "max_epochs": "the same as epochs=",
    "max_steps": "the same as steps=",
    **dict.fromkeys(("min_epochs", "min_steps"), "training does not stop early before them"),
    "limit_val_batches": "how many of the validation loader's batches are evaluated",
    **dict.fromkeys(("val_check_interval", "check_val_every_n_epoch"), "when validation runs"),
    "log_every_n_steps": "how often loggers get the values of a step",
    "accumulate_grad_batches": "times the batch size of the loader: the global batch, if global_batch= is not given",
    "gradient_clip_val": "clip_norm",
    "gradient_clip_algorithm": '"norm"',
    "precision": "the plan words precision=bf16 and precision=fp16",
    "callbacks": "their hooks between steps",
    "logger": "gets the logged values on the main worker",
    "deterministic": "torch.use_deterministic_algorithms",
    "benchmark": "torch.backends.cudnn.benchmark",
}
# Arguments that change nothing, and why.
NO_EFFECT = {
    "num_sanity_val_steps": "Lightning's dry run of the validation changes no result",
    "enable_checkpointing": "checkpoints are written to the run folder: paceline run --run-dir",
    "enable_progress_bar": "Paceline prints its own progress",
    "enable_model_summary": "the report describes the model",
    "inference_mode": "validation always runs without gradients",
    "use_distributed_sampler": "rows are distributed by Paceline",
    "default_root_dir": "use paceline run --run-dir",
    "enable_autolog_hparams": "hyperparameters are always logged",
    "model_registry": "it names a place for checkpoints of Lightning's cloud",
}
# Arguments that are refused unless they have their default, and what to do instead.
REFUSED = {
    "accelerator": "leave it out; paceline run chooses the devices, and CUDA_VISIBLE_DEVICES= hides them",
    "strategy": _PLAN + " 'shard=2 zero=3'",
    "devices": "leave it out and use paceline run --workers",
    "num_nodes": "leave it out and use paceline launch",
    "fast_dev_run": "use steps=1",
    "max_time": "leave it out; use paceline run --max-time",
    "limit_train_batches": "pass a torch.utils.data.Subset of the rows, or steps=",
    "limit_test_batches": "pass a torch.utils.data.Subset of the rows",
    "limit_predict_batches": "pass a torch.utils.data.Subset of the rows",
    "overfit_batches": "pass a torch.utils.data.Subset of the rows",
    "profiler": "leave it out; use `paceline profile RUN`",
    "detect_anomaly": "leave it out; Paceline names the layer of the first value that is not finite",
    "barebones": "leave it out and log nothing",
    "plugins": _PLAN + " 'precision=bf16'; other plugins belong to Lightning's loop",
    "sync_batchnorm": "leave it out: BatchNorm normalises each micro-batch, on any number of workers",
    "reload_dataloaders_every_n_epochs": "change the dataset in on_train_epoch_start()",
}
# Arguments of `self.log` and `self.log_dict`.
LOG_USED = {
    **dict.fromkeys(("name", "dictionary"), "the name of the value"),
    "value": "a number, a tensor with one element, or a torchmetrics.Metric that is an attribute of the module",
    **dict.fromkeys(("on_step", "on_epoch"), "whether the value of the step, of the epoch or both are logged"),
    "logger": "whether loggers get it",
    "prog_bar": "whether it is in trainer.progress_bar_metrics",
    "reduce_fx": '"mean" over the rows, or "sum"',
    "add_dataloader_idx": "whether names of several validation loaders get the loader's number",
    "batch_size": "the weight of the value in the mean; by default the number of rows",
    "metric_attribute": "the attribute that holds the metric",
}
LOG_NO_EFFECT = {
    "sync_dist": "values always cover all rows of the global batch, on any worker",
    "sync_dist_group": "values are always of all rows of the global batch",
    "rank_zero_only": "the value is the same on all workers",
}
LOG_REFUSED = {"enable_graph": "leave it out; return the loss from training_step()"}
# Hooks of a LightningModule or LightningDataModule that are called, and when.
HOOKS = {
    "prepare_data": "on the main worker, before the others go on",
    **dict.fromkeys(("setup", "teardown"), 'at the start and the end, with stage "fit"'),
    "configure_model": "before the optimizers are made",
    "configure_optimizers": "once, before the first step",
    **dict.fromkeys(("train_dataloader", "val_dataloader"), "once, before the first step"),
    "test_dataloader": "by trainer.test()",
    **dict.fromkeys(("forward", "training_step"), "for each micro-batch"),
    "validation_step": "for each micro-batch of the validation rows",
    "test_step": "for each micro-batch of the rows of trainer.test()",
    **dict.fromkeys(
        ("on_fit_start", "on_train_start", "on_train_end", "on_fit_end"), "at the start and the end of the training"
    ),
    **dict.fromkeys(("on_train_epoch_start", "on_train_epoch_end"), "between steps"),
    **dict.fromkeys(
        ("on_validation_start", "on_validation_epoch_start", "on_validation_epoch_end", "on_validation_end"),
        "around each validation",
    ),
    **dict.fromkeys(("on_test_start", "on_test_epoch_start", "on_test_epoch_end", "on_test_end"), "by trainer.test()"),
    **dict.fromkeys(("on_before_batch_transfer", "on_after_batch_transfer"), "for each micro-batch, on the device"),
}
_NO_STEP_HOOK = "within a step, a worker sees its own micro-batches only; move the code to training_step() or to "
_GRADIENTS = "gradients of a step are complete only after all workers have added theirs; remove it, " + _STRATEGY
_LOOP = "Paceline's loop does this itself; remove the method, " + _STRATEGY
# Hooks that are refused if a class has them, and what to do instead.
HOOKS_REFUSED = {
    **dict.fromkeys(
        ("on_train_batch_start", "on_train_batch_end"), _NO_STEP_HOOK + "on_train_epoch_end(), " + _STRATEGY
    ),
    **dict.fromkeys(
        (
            *("on_validation_batch_start", "on_validation_batch_end", "on_test_batch_start", "on_test_batch_end"),
            *("on_predict_batch_start", "on_predict_batch_end"),
        ),
        "a worker sees its own micro-batches only; move the code to validation_step() or on_validation_epoch_end()",
    ),
    **dict.fromkeys(
        (
            *("backward", "on_before_backward", "on_after_backward", "on_before_optimizer_step"),
            *("on_before_zero_grad", "optimizer_zero_grad"),
        ),
        _GRADIENTS,
    ),
    "optimizer_step": _LOOP,
    "configure_gradient_clipping": "pass gradient_clip_val= to paceline.lightning.trainer()",
    "clip_gradients": "pass gradient_clip_val= to paceline.lightning.trainer()",
    "lr_scheduler_step": "return a scheduler of torch from configure_optimizers(), " + _STRATEGY,
    "manual_backward": _LOOP,
    "training_step_end": "Lightning 2 calls it no more; move its code to training_step()",
    "training_epoch_end": "Lightning 2 calls it no more; move its code to on_train_epoch_end()",
    "validation_step_end": "Lightning 2 calls it no more; move its code to validation_step()",
    "validation_epoch_end": "Lightning 2 calls it no more; move its code to on_validation_epoch_end()",
    "configure_sharded_model": "rename it to configure_model()",
    "configure_callbacks": "pass callbacks= to paceline.lightning.trainer()",
    "transfer_batch_to_device": "return nestings of tensors from collate; Paceline moves these to the device",
    **dict.fromkeys(
        (
            *("on_validation_model_zero_grad", "on_validation_model_eval", "on_validation_model_train"),
            *("on_test_model_eval", "on_test_model_train", "on_predict_model_eval", "on_predict_model_train"),
        ),
        "Paceline puts the model into eval mode and back; remove the method",
    ),
    **dict.fromkeys(
        ("on_save_checkpoint", "on_load_checkpoint"), "keep what a resumed run needs in buffers of the module"
    ),
    **dict.fromkeys(
        ("state_dict", "load_state_dict"),
        "of a data module: Paceline keeps the position in the rows; remove the method",
    ),
    "on_exception": "catch the exception around paceline.lightning.trainer()",
}
# Hooks of predict(), which `paceline.lightning` has no call for.
HOOKS_NO_EFFECT = {
    **dict.fromkeys(
        (
            *("predict_step", "predict_dataloader", "on_predict_start", "on_predict_end"),
            *("on_predict_epoch_start", "on_predict_epoch_end"),
        ),
        "training does not call it",
    ),
}
# Hooks of a Callback that are called; all others are refused if a callback has them.
CALLBACK_HOOKS = {
    *("setup", "teardown", "on_fit_start", "on_fit_end", "on_train_start", "on_train_end"),
    *("on_train_epoch_start", "on_train_epoch_end", "on_sanity_check_start", "on_sanity_check_end"),
    *("on_validation_start", "on_validation_end", "on_validation_epoch_start", "on_validation_epoch_end"),
    *("on_test_start", "on_test_end", "on_test_epoch_start", "on_test_epoch_end"),
    *("on_predict_start", "on_predict_end", "on_predict_epoch_start", "on_predict_epoch_end"),
    *("state_dict", "load_state_dict", "state_key"),
}
# Lightning's own callbacks that are left out, as Paceline does the same, and those that are refused.
CALLBACKS_LEFT_OUT = {
    *("ProgressBar", "TQDMProgressBar", "RichProgressBar", "ModelSummary", "RichModelSummary"),
    *("LearningRateMonitor", "DeviceStatsMonitor", "Timer"),
}
CALLBACKS_REFUSED = {
    "ModelCheckpoint": "use paceline run --run-dir; the argument keep_best=('val_loss', 'min') keeps the best one",
    "GradientAccumulationScheduler": "the global batch stays the same; use global_batch=",
    "StochasticWeightAveraging": "use paceline.optim's averaged weights, " + _STRATEGY,
    "WeightAveraging": "use paceline.optim's averaged weights, " + _STRATEGY,
    "EMAWeightAveraging": "use paceline.optim's averaged weights, " + _STRATEGY,
    "BatchSizeFinder": "Paceline predicts memory with `paceline explain`",
    "LearningRateFinder": "find the rate on one worker with Lightning's Tuner first",
}
_PRECISIONS: dict[Any, str] = {
    None: "",
    32: "",
    "32": "",
    "32-true": "",
    "bf16-mixed": "precision=bf16",
    "bf16": "precision=bf16",
    "16-mixed": "precision=fp16",
    16: "precision=fp16",
    "16": "precision=fp16",
}


def package_of(module: Any) -> Any:
    """The package that a LightningModule comes from: `lightning.pytorch`, or `pytorch_lightning`. Raises UsageError for
    anything else.
    """
    import importlib

    for home in type(module).__mro__:
        if home.__name__ == "LightningModule" and home.__module__.startswith(("lightning.", "pytorch_lightning.")):
            return importlib.import_module(home.__module__.partition(".core")[0])
    what = f"trainer() needs a LightningModule, got {type(module).__name__}"
    raise UsageError(what, "pass an object of a class of lightning.LightningModule, or use paceline.Trainer")


def check_words(words: Mapping[str, Any], package: Any) -> None:
    """Raises UsageError for the first argument that Paceline cannot honour.

    Args:
        words: Arguments of Lightning's Trainer.
        package: What `package_of` returned.
    """
    known = inspect.signature(package.Trainer.__init__).parameters
    for name, value in words.items():
        if name in USED or name in NO_EFFECT:
            continue
        if name not in known:
            raise UsageError(f"trainer() has no argument {name}=", "see docs/coming-from/lightning.md for those it has")
        default = known[name].default
        if value is None or value is False or value == default or (name == "plugins" and value == []):
            continue
        cure = REFUSED.get(name, "leave it out, or open an issue: this version of Lightning is newer")
        raise UsageError(f"{name}={value!r:.60} cannot be used with paceline.lightning", cure)
    if words.get("gradient_clip_algorithm") not in (None, "norm"):
        what = f"gradient_clip_algorithm={words['gradient_clip_algorithm']!r} cannot be used with paceline.lightning"
        raise UsageError(what, 'use "norm": the norm of the mean gradient over all workers is limited')


def _is_overridden(kind: type, name: str, bases: tuple[str, ...]) -> type | None:
    """The class of the user's that defines a method, None if only Lightning's own classes do."""
    for home in kind.__mro__:
        if name in vars(home):
            is_base = home.__module__.startswith(bases) and not home.__module__.startswith(_DEMOS)
            return None if is_base or home.__module__ == "torch.nn.modules.module" else home
    return None


_LIGHTNINGS = ("lightning.", "pytorch_lightning.")
_DEMOS = ("lightning.pytorch.demos.", "pytorch_lightning.demos.")  # modules such as BoringModel, like a user's


def has_hook(owner: Any, name: str) -> bool:
    """Whether the class of a module, data module or callback has a hook of its own."""
    return _is_overridden(type(owner), name, _LIGHTNINGS) is not None


def check_hooks(module: Any, datamodule: Any) -> None:
    """Raises UsageError for a hook that Paceline cannot call, for manual optimization and for a missing step."""
    if not module.automatic_optimization:
        what = f"{type(module).__name__} sets automatic_optimization = False"
        cure = "return the loss from training_step() and let one optimizer follow it, " + _STRATEGY
        raise UsageError(what, cure)
    for owner in (module, datamodule):
        for name, cure in HOOKS_REFUSED.items():
            if owner is None or (owner is module and name in ("state_dict", "load_state_dict")):
                continue
            if (home := _is_overridden(type(owner), name, _LIGHTNINGS)) is not None:
                raise UsageError(f"{home.__name__}.{name}() cannot be used with paceline.lightning", cure)
    for name in ("training_step", "configure_optimizers"):
        if not has_hook(module, name):
            raise UsageError(f"{type(module).__name__} has no {name}()", f"write {name}(), as Lightning needs it, too")
    if "dataloader_iter" in inspect.signature(module.training_step).parameters:
        what = f"{type(module).__name__}.training_step() takes dataloader_iter"
        raise UsageError(what, "take batch and batch_idx: Paceline reads the rows")


def check_callbacks(callbacks: Any) -> list[Any]:
    """Returns the callbacks that are called. Raises UsageError for one that needs a moment within a step."""
    given = callbacks if isinstance(callbacks, list | tuple) else [] if callbacks is None else [callbacks]
    kept = []
    for one in given:
        names = {home.__name__ for home in type(one).__mro__ if home.__module__.startswith(_LIGHTNINGS)}
        if names & CALLBACKS_LEFT_OUT:
            continue
        for name in sorted(names & CALLBACKS_REFUSED.keys()):
            raise UsageError(f"the callback {name} cannot be used with paceline.lightning", CALLBACKS_REFUSED[name])
        hooks = [name for home in type(one).__mro__ for name in vars(home) if name.startswith("on_")]
        for name in sorted({*hooks} - CALLBACK_HOOKS):
            if has_hook(one, name):
                what = f"the callback {type(one).__name__} has {name}(), and Paceline does not call it"
                raise UsageError(what, "use on_train_epoch_end() or on_validation_end(), or remove the callback")
        kept.append(one)
    return kept


def merged_plan(precision: Any, plan: str | None) -> str | None:
    """The plan with the word for Lightning's `precision`. Raises UsageError for a precision that has no word."""
    if precision not in _PRECISIONS:
        cure = "convert the module before: module.double() or module.bfloat16(), and its rows in collate"
        raise UsageError(f"precision={precision!r} cannot be used with paceline.lightning", cure)
    words, asked = (plan or "").split(), _PRECISIONS[precision]
    if asked and not any(word.startswith("precision=") for word in words):
        words.append(asked)
    return " ".join(words) or None
