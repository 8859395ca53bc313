"""What Lightning does between steps: hooks, callbacks, validation, loggers, and schedulers that follow a value."""

from __future__ import annotations

import json
from typing import Any

import torch

from paceline.errors import UsageError
from paceline.integrations.lightning.arguments import has_hook
from paceline.integrations.lightning.metrics import LogMeta, StepLog
from paceline.integrations.lightning.optimizers import ConfiguredOptimizers
from paceline.integrations.lightning.validation import Evaluation
from paceline.integrations.lightning.view import TrainerView
from paceline.team.gather_trees import gather_trees

Values = dict[str, tuple[LogMeta, float]]


def _tensors(values: dict[str, float]) -> dict[str, torch.Tensor]:
    return {name: torch.tensor(value, dtype=torch.float32) for name, value in values.items()}


class Loop:
    """Follows the steps of a `paceline.Trainer`."""

    def __init__(
        self,
        view: TrainerView,
        optimizers: ConfiguredOptimizers,
        log: StepLog,
        evaluation: Evaluation,
        validation: list[Any],
    ) -> None:
        self._view, self._optimizers, self._log, self._evaluation = view, optimizers, log, evaluation
        self._module, self._trainer = view.lightning_module, view.paceline
        self._validation, self._per_epoch = validation, view.num_training_batches or view.max_steps
        self._done = 0
        self._every = self._validation_interval()
        self._has_own = [one for one in view.callbacks if not type(one).__module__.startswith("lightning.")]

    def _validation_interval(self) -> int:
        """After how many steps validation runs, of an epoch or of all of them."""
        view, interval = self._view, self._view.val_check_interval
        if isinstance(interval, float):
            if not 0.0 < interval <= 1.0:
                raise UsageError(f"val_check_interval={interval}", "use a fraction from 0 to 1, or a number of steps")
            return max(1, int(self._per_epoch * interval))
        if not isinstance(interval, int):
            what = f"val_check_interval={interval!r}"
            raise UsageError(what, "use a fraction of the epoch, or a number of steps")
        if interval > self._per_epoch and view.check_val_every_n_epoch is not None:
            what = f"val_check_interval={interval} is more than the {self._per_epoch} steps of an epoch"
            raise UsageError(what, "pass check_val_every_n_epoch=None, so that steps are counted over epochs")
        return interval

    def begin(self) -> None:
        """Calls the hooks at the start. A resumed run, or a worker that joins, gets back what the others know."""
        view = self._view
        self._restore(self._trainer.state.get("lightning"))
        self._done = self._trainer.steps_done
        view._starts_epoch = self._done % self._per_epoch == 0
        self._call("on_fit_start")
        self._call("on_train_start")
        if self._done < view.max_steps and view._starts_epoch:
            self._call("on_train_epoch_start")
        view._starts_epoch = False

    def follow(self, report: Any) -> None:
        """Does what follows a step."""
        view, now = self._view, self._trainer.steps_done
        before, self._done = self._done, now
        view._starts_epoch = False
        values = self._log.add(report)
        self._publish(values, on_step=True)
        ends_epoch = now // self._per_epoch > before // self._per_epoch
        if self._validation and self._is_validation_due(before, now):
            self.evaluate("validation", self._validation)
        schedule = self._optimizers.schedule
        in_epoch = (now - 1) % self._per_epoch + 1
        if schedule is not None:
            schedule.follow("step", in_epoch, view.callback_metrics)
        stops = self._stops(now)
        if ends_epoch or stops or now >= view.max_steps:
            self._end_epoch()
            if schedule is not None and ends_epoch:
                schedule.follow("epoch", now // self._per_epoch, view.callback_metrics)
            stops = self._stops(now)
        self._trainer.state["lightning"] = self._saved()
        if stops:
            if now < view.max_steps:
                self._trainer.stop()
        elif now < view.max_steps and ends_epoch:
            view._starts_epoch = True
            self._call("on_train_epoch_start")
            view._starts_epoch = False

    def finish(self) -> None:
        """Calls the hooks at the end."""
        self._call("on_train_end")
        self._call("on_fit_end")
        for logger in self._loggers():
            logger.finalize("success")

    def _is_validation_due(self, before: int, now: int) -> bool:
        each = self._view.check_val_every_n_epoch
        if each is None:
            return now // self._every > before // self._every
        epoch = (now - 1) // self._per_epoch
        if (epoch + 1) % each:
            return False
        if now // self._per_epoch > before // self._per_epoch and self._every == self._per_epoch:
            return True
        start = epoch * self._per_epoch
        return (now - start) // self._every > max(0, before - start) // self._every

    def _stops(self, now: int) -> bool:
        """Whether training is to stop, asked by a callback or a hook on any worker."""
        view = self._view
        if not view.should_stop:
            return False
        epochs = now // self._per_epoch
        return now >= (view.min_steps or 0) and epochs >= (view.min_epochs or 0)

    def _end_epoch(self) -> None:
        self._publish(self._log.end_epoch(), on_step=False)
        monitoring = [one for one in self._view.callbacks if getattr(one, "monitor", None) is not None]
        others = [one for one in self._view.callbacks if one not in monitoring]
        self._call("on_train_epoch_end", others, monitoring)
        self._log.reset_metrics()

    def evaluate(self, stage: str, rows: list[Any]) -> dict[str, float]:
        """Runs the validation or the test with its hooks, and returns the logged values by name."""
        view, name = self._view, "validation" if stage == "validation" else "test"
        view.training, view.validating, view.testing = False, stage == "validation", stage == "test"
        self._call(f"on_{name}_start")
        self._call(f"on_{name}_epoch_start")
        values = self._evaluation.run(stage, rows)
        self._publish(values, on_step=False)
        logged = self._call(f"on_{name}_epoch_end")
        for meta, _ in values.values():
            if meta.how == "metric":
                self._evaluation.states.objects[meta.attribute].reset()
        self._call(f"on_{name}_end")
        view.training, view.validating, view.testing = True, False, False
        return {known: value for meta, value in [*values.values(), *logged] for known in meta.names(on_step=False)}

    # -- hooks --------------------------------------------------------------------------------------------------

    def _call(
        self, hook: str, callbacks: list[Any] | None = None, afterwards: list[Any] | None = None
    ) -> list[tuple[LogMeta, float]]:
        """Calls a hook of the callbacks and of the module, and publishes what it logs: the main worker's values."""
        view, module = self._view, self._module
        first = view.callbacks if callbacks is None else callbacks
        owners = [*first, module, *(afterwards or [])]
        logged: list[tuple[LogMeta, float]] = []
        for owner in owners:
            if not hasattr(owner, hook) or (owner is module and not has_hook(module, hook)):
                continue
            module._current_fx_name = hook
            try:
                if owner is module:
                    getattr(owner, hook)()
                else:
                    getattr(owner, hook)(view, module)
            finally:
                module._current_fx_name = None
            if owner is module or owner in self._has_own:
                logged += self._agree()
        return logged

    def _agree(self) -> list[tuple[LogMeta, float]]:
        """Publishes what a hook logged, with the main worker's values, and agrees on `should_stop`."""
        view = self._view
        local = []
        for one in view._results.take().values():
            value = one.value.compute() if hasattr(one.value, "compute") else one.value
            local.append([json.dumps(vars(one.meta)), float(value)])
        trees = gather_trees([local, view.should_stop], "values of a hook")
        view.should_stop = any(tree[1] for tree in trees)
        logged = [(LogMeta(**json.loads(meta)), value) for meta, value in trees[0][0]]
        if logged:
            self._publish({meta.name: (meta, value) for meta, value in logged}, on_step=False)
        return logged

    # -- values -------------------------------------------------------------------------------------------------

    def _publish(self, values: Values, on_step: bool) -> None:
        """Makes values known to callbacks, loggers and the report."""
        view = self._view
        logged: dict[str, float] = {}
        for meta, value in values.values():
            if on_step and not meta.on_step:
                continue
            names = meta.names(on_step)
            for name in {meta.name, *names} if on_step or meta.on_epoch else ():
                view.callback_metrics[name] = torch.tensor(value, dtype=torch.float32)
            if meta.prog_bar:
                view.progress_bar_metrics[names[-1]] = value
            if meta.logger:
                logged[names[-1]] = value
        if on_step:
            if logged and view.global_step % view.log_every_n_steps == 0:
                self._feed(logged)
        elif logged:
            self._trainer.log(**logged)
            self._feed(logged)

    def _feed(self, values: dict[str, float]) -> None:
        self._view.logged_metrics.update(_tensors(values))
        for logger in self._loggers():
            logger.log_metrics({**values, "epoch": self._view.current_epoch}, step=self._view.global_step - 1)
            logger.save()

    def _loggers(self) -> list[Any]:
        return self._view.loggers if self._view.is_global_zero else []

    # -- state --------------------------------------------------------------------------------------------------

    def _saved(self) -> dict[str, Any]:
        view = self._view
        return {
            "log": self._log.saved(),
            "metrics": {name: float(value) for name, value in view.callback_metrics.items()},
            "stops": view.should_stop,
            "callbacks": {one.state_key: one.state_dict() for one in view.callbacks},
        }

    def _restore(self, saved: Any) -> None:
        if not saved:
            return
        view = self._view
        self._log.restore(saved["log"])
        view.callback_metrics = {
            name: torch.tensor(value, dtype=torch.float32) for name, value in saved["metrics"].items()
        }
        view.should_stop = saved["stops"]
        for one in view.callbacks:
            if state := saved["callbacks"].get(one.state_key):
                one.load_state_dict(state)
