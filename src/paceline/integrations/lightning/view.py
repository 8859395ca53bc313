"""`self.trainer` of a LightningModule that Paceline trains: what a Lightning Trainer has and Paceline can tell."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import torch

from paceline.errors import UsageError
from paceline.integrations.lightning.metrics import LogRecorder
from paceline.team.team import join

_MAIN = "use trainer.is_global_zero, or paceline.join().rank outside of steps"
_REFUSED = {
    "world_size": "remove it: values are means over all workers, and the module names no worker",
    "num_devices": "remove it: the module names no worker",
    "num_nodes": "remove it: the module names no worker",
    "global_rank": _MAIN,
    "local_rank": _MAIN,
    "node_rank": _MAIN,
    "device_ids": "use self.device",
    "save_checkpoint": "use trainer.paceline.save(), or trainer.paceline.export(path) for the weights",
    "checkpoint_callback": "checkpoints are written to the run folder: paceline run --run-dir",
    "ckpt_path": "checkpoints are written to the run folder: paceline run --run-dir",
    "fit": "call paceline.lightning.trainer()",
    "predict": "use trainer.paceline.predict(dataset)",
    "fit_loop": "Paceline has a loop of its own",
    "profiler": "use `paceline profile RUN`",
    "scaler": "fp16 gradients are scaled by Paceline",
}


class UnsupportedAttributeError(UsageError, AttributeError):
    """A module asks its trainer for something that Paceline cannot tell."""


class StrategyView:
    """`self.trainer.strategy`: collectives between steps.

    Attributes:
        root_device: The device of this worker.
    """

    def __init__(self, view: TrainerView) -> None:
        self._view = view
        self.root_device = torch.device("cpu")

    @property
    def _lightning_optimizers(self) -> list[Any]:
        """What `self.optimizers()` returns."""
        return self._view.optimizers

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:  # noqa: A002  Lightning's name
        """Whether all workers decide so, or with ``all=False`` any of them. All workers must call it between steps."""
        self._need_between("reduce_boolean_decision")
        team = join()
        return not team.any(not decision, "decision") if all else team.any(bool(decision), "decision")

    def barrier(self, name: str | None = None) -> None:
        """Waits for all workers. All workers must call it between steps."""
        self._need_between("barrier")
        join().any(False, name or "barrier")

    def reduce(self, tensor: Any, *_: Any, **__: Any) -> Any:
        """Returns a value as it is: values that a module logs are of all workers."""
        return tensor

    def all_gather(self, tensor: torch.Tensor, *_: Any, **__: Any) -> Any:
        """Raises UsageError: a step has no collectives."""
        what = "the module calls self.all_gather()"
        raise UsageError(
            what, 'log sums and means; for contrastive losses use a paceline.Trainer with loss_over="batch"'
        )

    def _need_between(self, name: str) -> None:
        if self._view.is_inside:
            what = f"the module calls trainer.strategy.{name}() within a step"
            raise UsageError(what, "call it in a hook between steps, for example on_train_epoch_end()")


class TrainerView:
    """What stands for Lightning's Trainer in the hooks of a module and of callbacks.

    Attributes:
        paceline: The `paceline.Trainer` that trains.
        lightning_module: The module.
        datamodule: The data module; None without one.
        callbacks: The callbacks that are called.
        loggers: The loggers that get values on the main worker.
        max_epochs: The epochs of the training; None if it has a number of steps.
        max_steps: The optimizer steps of the training.
        num_training_batches: Steps of an epoch.
        callback_metrics: The last value of each logged name.
        logged_metrics: The values that loggers got last.
        progress_bar_metrics: The last value of each name that was logged with ``prog_bar=True``.
        is_inside: Whether a step is being computed.
    """

    # What Lightning's own code and callbacks ask for.
    barebones = fast_dev_run = sanity_checking = received_sigterm = interrupted = False
    progress_bar_callback = checkpoint_callbacks = None
    accumulate_grad_batches = 1
    training, validating, testing, predicting, evaluating = True, False, False, False, False

    def __init__(self, package: Any, module: Any, datamodule: Any, words: Mapping[str, Any]) -> None:
        from importlib import import_module

        states = import_module(f"{package.__name__}.trainer.states")
        self.paceline: Any = None
        self.lightning_module = self.model = module
        self.datamodule = datamodule
        self.callbacks: list[Any] = []
        self.loggers: list[Any] = []
        self.optimizers: list[Any] = []
        self.lr_scheduler_configs: list[Any] = []
        self.max_epochs: int | None = None
        self.max_steps = self.num_training_batches = 0
        self.callback_metrics: dict[str, torch.Tensor] = {}
        self.logged_metrics: dict[str, torch.Tensor] = {}
        self.progress_bar_metrics: dict[str, float] = {}
        self.is_inside = self._should_stop = False
        self.state = SimpleNamespace(fn=states.TrainerFn.FITTING, status=states.TrainerStatus.RUNNING, stage=None)
        self.strategy = StrategyView(self)
        self.val_check_interval = words.get("val_check_interval") or 1.0
        self.check_val_every_n_epoch = words.get("check_val_every_n_epoch", 1)
        self.log_every_n_steps = words.get("log_every_n_steps") or 50
        self.min_epochs, self.min_steps = words.get("min_epochs"), words.get("min_steps")
        self.gradient_clip_val, self.gradient_clip_algorithm = words.get("gradient_clip_val"), "norm"
        self.precision = words.get("precision") or "32-true"
        self._evaluate: Any = None
        self.train_dataloader: Any = None
        self.val_dataloaders: Any = None
        self._results = LogRecorder()
        self._logger_connector = SimpleNamespace(should_reset_tensors=lambda fx: False, _current_fx=None)
        self._accelerator_connector = SimpleNamespace(is_distributed=False)

    @property
    def global_step(self) -> int:
        """Optimizer steps done."""
        return 0 if self.paceline is None else int(self.paceline.steps_done)

    @property
    def current_epoch(self) -> int:
        """The epoch, from 0; after the last step of an epoch it is still that epoch, as in Lightning's hooks."""
        done = self.global_step if self.is_inside or self._starts_epoch else max(0, self.global_step - 1)
        return done // self.num_training_batches if self.num_training_batches else 0

    _starts_epoch = True  # whether the hooks of now belong to the next step

    @property
    def is_global_zero(self) -> bool:
        """True on one worker."""
        return join().rank == 0 if self.paceline is None else bool(self.paceline.main)

    @property
    def should_stop(self) -> bool:
        """Whether training is to end after this step. A hook between steps may set it."""
        return self._should_stop

    @should_stop.setter
    def should_stop(self, value: bool) -> None:
        if self.is_inside and value:
            what = "the module sets trainer.should_stop within a step"
            raise UsageError(what, "set it in a hook between steps, for example on_train_epoch_end()")
        self._should_stop = bool(value)

    @property
    def estimated_stepping_batches(self) -> int:
        """The optimizer steps of the whole training."""
        return self.max_steps

    @property
    def logger(self) -> Any:
        """The first logger, or None."""
        return self.loggers[0] if self.loggers else None

    @property
    def early_stopping_callback(self) -> Any:
        """The first callback of Lightning's class EarlyStopping, or None."""
        kind = (one for one in self.callbacks if type(one).__name__ == "EarlyStopping")
        return next(kind, None)

    @property
    def default_root_dir(self) -> str:
        """The run folder; the current folder without one."""
        folder = None if self.paceline is None else self.paceline.run_dir
        return str(folder or ".")

    @property
    def log_dir(self) -> str:
        """The run folder; the current folder without one."""
        return self.default_root_dir

    def validate(self, val_dataloaders: Any = None) -> dict[str, float]:
        """Runs `validation_step` over all rows; all workers must call it.

        Args:
            val_dataloaders: A DataLoader or several; by default those of the data module or module.

        Returns:
            The logged values by name.
        """
        values: dict[str, float] = self._evaluate("validation", val_dataloaders)
        return values

    def test(self, test_dataloaders: Any = None) -> dict[str, float]:
        """Runs `test_step` over all rows; all workers must call it.

        Args:
            test_dataloaders: A DataLoader or several; by default those of the data module or module.

        Returns:
            The logged values by name.
        """
        values: dict[str, float] = self._evaluate("test", test_dataloaders)
        return values

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Prints on the main worker."""
        if self.is_global_zero:
            print(*args, **kwargs)  # noqa: T201

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        cure = _REFUSED.get(name, "remove it, or train with strategy=paceline.lightning.PacelineStrategy()")
        if name in ("world_size", "global_rank", "local_rank", "node_rank"):
            raise UsageError(f"the module asks for trainer.{name}", cure)  # which nn.Module must not take for a miss
        raise UnsupportedAttributeError(f"the module asks for trainer.{name}, which paceline.lightning has not", cure)
