"""What becomes of each argument of Keras: it is used, has no effect, or is refused by name."""

from __future__ import annotations

from typing import Any

from paceline.errors import UsageError

_MICRO = "rows are evaluated in the micro-batches of training (plan word micro)"
_PRINTS = "Paceline prints its own progress"
_GLOBAL = "the number of rows of a step is global_batch= of paceline.keras.trainer()"

# Arguments of fit(), evaluate() and predict() that do what Keras documents.
FIT_USED = {
    **dict.fromkeys(("x", "y", "sample_weight", "class_weight"), "the rows"),
    **dict.fromkeys(("epochs", "initial_epoch", "steps_per_epoch"), "the number of steps"),
    "shuffle": "the order of the rows, by the seed of paceline.keras.trainer()",
    "callbacks": "see the table of callbacks",
    **dict.fromkeys(("validation_data", "validation_split", "validation_freq"), "validation after an epoch"),
}
FIT_NO_EFFECT = {"verbose": _PRINTS, "validation_batch_size": _MICRO}
FIT_REFUSED = {
    "batch_size": f"leave it out; {_GLOBAL}",
    "validation_steps": "leave it out, and pass only the rows that are to be evaluated",
}
EVALUATE_USED = {
    **dict.fromkeys(("x", "y", "sample_weight"), "the rows"),
    "return_dict": "the form of the result",
}
EVALUATE_NO_EFFECT = {"verbose": _PRINTS, "batch_size": _MICRO}
EVALUATE_REFUSED = {
    "steps": "leave it out, and pass only the rows that are to be evaluated",
    "callbacks": "leave it out; look at the result instead",
    "kwargs": "leave out what Keras does not document",
}
PREDICT_USED = {"x": "the rows"}
PREDICT_NO_EFFECT = {"verbose": _PRINTS, "batch_size": _MICRO}
PREDICT_REFUSED = {
    "steps": "leave it out, and pass only the rows that are to be predicted",
    "callbacks": "leave it out; look at the result instead",
}
COMPILE_USED = {
    "optimizer": "Keras' own update, see the table of its options",
    **dict.fromkeys(("loss", "loss_weights"), "the loss"),
    **dict.fromkeys(("metrics", "weighted_metrics"), "the metrics, whose states are added up over all workers"),
}
COMPILE_NO_EFFECT = {"run_eagerly": "the torch backend runs eagerly"}
COMPILE_REFUSED = {
    "steps_per_execution": "leave it out; the plan word local makes several steps between merges",
    "jit_compile": "leave it out",
    "auto_scale_loss": "use the policy mixed_bfloat16, which needs no scaling, instead of mixed_float16",
}
OPTIMIZER_USED = {
    **dict.fromkeys(("learning_rate", "weight_decay"), "as in Keras"),
    **dict.fromkeys(("clipnorm", "clipvalue"), "applied to the mean gradient over the global batch"),
    "global_clipnorm": "clip_norm of Paceline's Trainer",
    **dict.fromkeys(("use_ema", "ema_momentum", "ema_overwrite_frequency"), "as in Keras"),
}
OPTIMIZER_NO_EFFECT = {
    "name": "it changes nothing in Keras either",
    "kwargs": "Keras itself refuses unknown arguments",
    "loss_scale_factor": "gradients are not scaled, so none has to be scaled back",
}
OPTIMIZER_REFUSED = {"gradient_accumulation_steps": f"multiply the global batch by it; {_GLOBAL}"}

# Callbacks of Keras by the name of their class.
CALLBACKS_USED = {
    "Callback": "moments between steps; its numbers, texts and flags are in checkpoints",
    "EarlyStopping": "as in Keras, best weights included; the run counts as finished",
    "ModelCheckpoint": "one worker writes the file; with save_best_only the run folder keeps that checkpoint, too",
    "CSVLogger": "one worker writes the file; a resumed run appends to it",
    "LambdaCallback": "called on every worker",
    **dict.fromkeys(("LearningRateScheduler", "ReduceLROnPlateau"), "the learning rate, which is in checkpoints"),
}
CALLBACKS_NO_EFFECT = {
    "History": "fit() returns it",
    "ProgbarLogger": _PRINTS,
    "TerminateOnNaN": "a loss that is not finite ends the run, and the message names its rows",
    "BackupAndRestore": "the run folder has checkpoints, and the same command resumes",
    "CallbackList": "pass a list of callbacks",
}
CALLBACKS_REFUSED = {
    "TensorBoard": "use paceline.TensorBoard, or `paceline watch`",
    "RemoteMonitor": "use a LambdaCallback(on_epoch_end=...), which sends where trainer.main is true",
    "SwapEMAWeights": "use use_ema=True of the optimizer; fit() ends with the averaged weights",
    "OrbaxCheckpoint": "checkpoints are in the run folder; for a file of Keras use ModelCheckpoint",
    "MonitorCallback": "use EarlyStopping, ModelCheckpoint or a Callback of your own",
}


def options_of(call: str, given: dict[str, Any], defaults: dict[str, Any], refused: dict[str, str]) -> dict[str, Any]:
    """The options of a call, filled up with their defaults. Raises UsageError for one that is refused or unknown."""
    for name, value in given.items():
        if name in refused:
            if value is not None:
                raise UsageError(f"{call}({name}=...) cannot be used with paceline.keras", refused[name])
        elif name not in defaults:
            known = ", ".join(sorted(defaults))
            raise UsageError(f"{call}() has no argument {name!r}", f"its arguments are {known}")
    return {**defaults, **{name: value for name, value in given.items() if name in defaults}}


FIT_DEFAULTS: dict[str, Any] = {
    "x": None,
    "y": None,
    "epochs": 1,
    "verbose": "auto",
    "callbacks": None,
    "validation_split": 0.0,
    "validation_data": None,
    "shuffle": True,
    "class_weight": None,
    "sample_weight": None,
    "initial_epoch": 0,
    "steps_per_epoch": None,
    "validation_batch_size": None,
    "validation_freq": 1,
}
EVALUATE_DEFAULTS: dict[str, Any] = {
    "x": None,
    "y": None,
    "batch_size": None,
    "verbose": "auto",
    "sample_weight": None,
    "return_dict": False,
}
PREDICT_DEFAULTS: dict[str, Any] = {"x": None, "batch_size": None, "verbose": "auto"}
# Methods of a model that Paceline replaces: a model of the script's own must not have others.
_REPLACED = {
    "train_step": "move the loss to compute_loss()",
    "test_step": "move the loss to compute_loss()",
    "predict_step": "call the model in call()",
    "compute_metrics": "write a keras.metrics.Metric, and pass it to compile(metrics=...)",
    "fit": "use callbacks",
    "evaluate": "use metrics",
    **dict.fromkeys(("make_train_function", "make_test_function", "make_predict_function"), "use callbacks"),
}


def check_model(model: Any) -> None:
    """Raises UsageError if the model is not a compiled Keras model on the torch backend, or if Paceline cannot do what
    it was compiled for.
    """
    import keras

    if keras.backend.backend() != "torch":
        what = f"Keras runs on the {keras.backend.backend()} backend"
        raise UsageError(what, "set KERAS_BACKEND=torch before the first import of keras")
    if not isinstance(model, keras.Model):
        raise UsageError(f"paceline.keras.trainer() needs a keras.Model, got {type(model).__name__}", "pass the model")
    if not model.compiled or model.optimizer is None:
        raise UsageError("the model is not compiled with an optimizer", "call model.compile(optimizer=..., loss=...)")
    for name, cure in _REPLACED.items():
        home = next(one for one in type(model).__mro__ if name in vars(one))
        if not home.__module__.startswith("keras."):
            what = f"{home.__name__}.{name}() replaces a part of Keras' loop that paceline.keras replaces, too"
            raise UsageError(what, cure)
    if model.jit_compile:
        raise UsageError("compile(jit_compile=True) cannot be used with paceline.keras", COMPILE_REFUSED["jit_compile"])
    if model.steps_per_execution != 1:
        what = f"compile(steps_per_execution={model.steps_per_execution}) cannot be used with paceline.keras"
        raise UsageError(what, COMPILE_REFUSED["steps_per_execution"])
    check_optimizer(model.optimizer)


def check_optimizer(optimizer: Any) -> None:
    """Raises UsageError for an optimizer, or an option of it, that Paceline cannot honour."""
    import keras

    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        what = "the optimizer is a LossScaleOptimizer, which Keras puts around it for the policy mixed_float16"
        raise UsageError(what, COMPILE_REFUSED["auto_scale_loss"])
    if type(optimizer).__name__ == "MultiOptimizer":
        raise UsageError("the optimizer is a MultiOptimizer", "use one optimizer, or paceline.Trainer with torch's")
    if optimizer.gradient_accumulation_steps:
        what = f"the optimizer has gradient_accumulation_steps={optimizer.gradient_accumulation_steps}"
        raise UsageError(what, OPTIMIZER_REFUSED["gradient_accumulation_steps"])
