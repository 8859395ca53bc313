"""Calls the callbacks of a `transformers.Trainer` at the steps of Paceline's loop, and does what they ask for."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from paceline.errors import UsageError
from paceline.team.gather_trees import gather_trees
from paceline.team.team import join

# Moments inside of a step: there, a worker sees its own micro-batches and gradients only.
_INSIDE = ("on_substep_end", "on_pre_optimizer_step", "on_optimizer_step", "on_prediction_step", "on_push_begin")
_ASKED = ("should_training_stop", "should_epoch_stop", "should_save", "should_evaluate", "should_log")


def check_callbacks(hf_trainer: Any) -> None:
    """Removes transformers' progress bars, as Paceline has its own. Raises UsageError for a callback that needs a
    moment within a step.
    """
    from transformers import trainer_callback

    bars = (trainer_callback.ProgressCallback, trainer_callback.PrinterCallback)
    for callback in list(hf_trainer.callback_handler.callbacks):
        if isinstance(callback, bars):
            hf_trainer.remove_callback(callback)
            continue
        for name in _INSIDE:
            if getattr(type(callback), name) is not getattr(trainer_callback.TrainerCallback, name):
                what = f"the callback {type(callback).__name__} has {name}(), and Paceline does not call it"
                raise UsageError(what, "use on_step_end(), on_log() or on_evaluate(), or remove the callback")


def merge_metrics(metrics: dict[str, list[float]], unit: int) -> None:
    """Merges what the loss functions of TRL's trainers record of each worker's micro-batches: lists of values by name,
    which are averaged when they are logged, and the growing number of tokens.

    Of each `unit` workers that compute a micro-batch together, the last one has the last stage of a pipeline, and so
    the loss. The trial run of a pipeline records NaN, which is left out.
    """
    with_loss = gather_trees(dict(metrics), "metrics of the loss function")[unit - 1 :: unit]
    for name in dict.fromkeys(name for part in with_loss for name in part):
        values = [part.get(name) or [] for part in with_loss]
        if name == "num_tokens":
            metrics[name] = [sum(one[-1] for one in values if one)]
        else:
            every = [value for one in values for value in one]
            metrics[name] = [value for value in every if not math.isnan(value)] or every


@dataclass(frozen=True)
class Span:
    """How long a training is: `steps` in all, `per_epoch` of them in an epoch of `rows` rows (None: without a length).

    A step has `batch` rows; transformers counts epochs in batches of `each` rows.
    """

    steps: int
    per_epoch: int
    batch: int
    rows: int | None
    each: int

    def epoch_at(self, step: int) -> float:
        """The number of epochs after a step, with its fraction."""
        if self.rows is None:
            return step / self.per_epoch
        epochs, more = divmod(step, self.per_epoch)
        return epochs + more * self.batch / self.each / math.ceil(self.rows / self.each)


class Flow:
    """What transformers does between steps: callbacks, logging, evaluation, checkpoints and early stopping."""

    def __init__(self, trainer: Any, hf_trainer: Any, span: Span) -> None:
        self._trainer, self._hf, self._args = trainer, hf_trainer, hf_trainer.args
        self._span = span
        self._has_own = any(not type(one).__module__.startswith("transformers.") for one in self._callbacks)
        self._losses, self._last = 0.0, 0  # the sum of the losses since the last logged step, and its number
        self._total = 0.0
        self._history: list[dict[str, Any]] = []  # a copy of the log, for checkpoints
        self._started_at = 0
        self._report: Any = None
        self._start_state(span.steps)

    @property
    def _callbacks(self) -> list[Any]:
        callbacks: list[Any] = self._hf.callback_handler.callbacks
        return callbacks

    def _start_state(self, steps: int) -> None:
        from transformers.trainer_callback import ExportableState, TrainerState

        hf, args = self._hf, self._args
        stateful = [one for one in [*self._callbacks, hf.control] if isinstance(one, ExportableState)]
        hf.state = TrainerState(stateful_callbacks=stateful)
        hf.state.train_batch_size = args.per_device_train_batch_size
        hf.state.compute_steps(args, steps)
        hf.state.init_training_references(hf, steps, math.ceil(steps / self._span.per_epoch), None)
        hf._globalstep_last_logged, hf._total_loss_scalar, hf._initial_global_step = 0, 0.0, 0

    def begin(self) -> None:
        """Calls the callbacks at the start; a resumed run, or one that joins, gets back what they knew."""
        hf, trainer = self._hf, self._trainer
        self._restore(trainer.state.get("huggingface"))
        self._started_at = trainer.steps_done
        hf.state.global_step, hf.state.epoch = trainer.steps_done, self._span.epoch_at(trainer.steps_done)
        handler = hf.callback_handler
        handler.model, handler.optimizer, handler.lr_scheduler = hf.model, hf.optimizer, hf.lr_scheduler
        self._call("on_train_begin")
        if self._args.eval_on_start and not trainer.steps_done:
            self._evaluate()
        if trainer.steps_done < hf.state.max_steps:
            self._begin_step()

    def follow(self, report: Any) -> None:
        """Does what follows a step."""
        hf, before, now = self._hf, self._hf.state.global_step, self._trainer.steps_done
        self._report = report
        self._losses += report.loss * (now - before)
        for step in range(before + 1, now + 1):  # several in a turn of local SGD
            hf.state.global_step, hf.state.epoch = step, self._span.epoch_at(step)
            self._call("on_step_end")
        self._do_what_is_asked()
        if now // self._span.per_epoch > before // self._span.per_epoch or hf.control.should_training_stop:
            self._call("on_epoch_end")
            self._do_what_is_asked()
        self._trainer.state["huggingface"] = self._saved()
        if hf.control.should_epoch_stop:
            raise UsageError("a callback set control.should_epoch_stop", "set control.should_training_stop instead")
        if hf.control.should_training_stop:
            if hf.state.global_step < hf.state.max_steps:
                self._trainer.stop()
        else:
            self._begin_step()

    def _begin_step(self) -> None:
        if self._trainer.steps_done % self._span.per_epoch == 0:
            self._call("on_epoch_begin")
        self._call("on_step_begin")

    def _call(self, event: str) -> None:
        hf = self._hf
        hf.control = getattr(hf.callback_handler, event)(self._args, hf.state, hf.control)

    def _do_what_is_asked(self) -> None:
        """Logs, evaluates and saves, if a callback asked for it: the same on all workers."""
        hf, control = self._hf, self._hf.control
        if self._has_own:
            self._agree()
        if control.should_log and hf.state.global_step > self._last:
            self._log()
        if control.should_evaluate:
            metrics = self._evaluate()
            is_best = hf._determine_best_metric(metrics=metrics, trial=None)
            if self._args.save_strategy == "best":
                control.should_save = is_best
        if hf.control.should_save:
            if self._trainer.run_dir is not None:
                self._trainer.save()
            self._call("on_save")

    def _agree(self) -> None:
        """A callback of the script's own may ask for something on one worker only: then all do it."""
        control = self._hf.control
        asked = torch.tensor([int(getattr(control, name)) for name in _ASKED], dtype=torch.int64)
        for name, workers in zip(_ASKED, join().all_reduce(asked, "flags of callbacks").tolist(), strict=True):
            setattr(control, name, workers > 0)

    def _log(self) -> None:
        hf, report = self._hf, self._report
        logs = {"loss": self._losses / (hf.state.global_step - self._last)}
        if report.grad_norm is not None:
            logs["grad_norm"] = report.grad_norm
        logs["learning_rate"] = report.lr
        self._total += self._losses
        self._losses, self._last = 0.0, hf.state.global_step
        if isinstance(getattr(hf, "_metrics", None), dict):
            merge_metrics(hf._metrics.get("train", {}), self._trainer.plan.mesh(join().size).unit)
        hf.log(logs)

    def _evaluate(self) -> dict[str, float]:
        metrics: dict[str, float] = self._hf.evaluate()
        times = ("_runtime", "_per_second", "_time", "epoch")
        values = {k: v for k, v in metrics.items() if isinstance(v, float) and not k.endswith(times)}
        self._trainer.log(**values)
        return metrics

    def finish(self, started: float) -> dict[str, float]:
        """Logs and returns the metrics of the whole training."""
        from transformers.trainer_utils import speed_metrics

        hf = self._hf
        steps = hf.state.global_step
        made = steps - self._started_at
        samples = made * self._span.batch
        metrics: dict[str, float] = speed_metrics("train", started, num_samples=samples, num_steps=made)
        metrics["train_loss"] = (self._total + self._losses) / max(steps, 1)
        hf.log(metrics)
        return metrics

    def _saved(self) -> dict[str, Any]:
        """What a checkpoint holds of callbacks and logs."""
        state = self._hf.state
        if len(self._history) != len(state.log_history):  # a checkpoint may still be written from the former list
            self._history = [dict(entry) for entry in state.log_history]
        return {
            "log_history": self._history,
            "best": [state.best_metric, state.best_global_step],
            "losses": [self._losses, self._last, self._total],
            "callbacks": {type(one).__name__: one.state() for one in self._stateful()},
        }

    def _stateful(self) -> list[Any]:
        from transformers.trainer_callback import ExportableState

        return [one for one in self._callbacks if isinstance(one, ExportableState)]

    def _restore(self, saved: Any) -> None:
        if not saved:
            return
        state = self._hf.state
        state.log_history = [dict(entry) for entry in saved["log_history"]]
        state.best_metric, state.best_global_step = saved["best"]
        self._losses, self._last, self._total = saved["losses"]
        for one in self._stateful():
            for name, value in saved["callbacks"].get(type(one).__name__, {}).get("attributes", {}).items():
                setattr(one, name, value)
