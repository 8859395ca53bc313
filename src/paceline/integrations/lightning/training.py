"""`paceline.lightning.trainer(module, data)`: trains a LightningModule by a Paceline Trainer.

The flow: arguments and hooks are checked; loaders, optimizer and schedulers come from the module's own methods; a
`paceline.Trainer` is made whose forward and loss call `training_step`; between its steps run validation and hooks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from paceline.base.batching import Grid
from paceline.data.sampler_order import parts_of
from paceline.errors import UsageError
from paceline.integrations.lightning.arguments import (
    check_callbacks,
    check_hooks,
    check_words,
    has_hook,
    merged_plan,
    package_of,
)
from paceline.integrations.lightning.loop import Loop
from paceline.integrations.lightning.metrics import MetricStates, StepLog
from paceline.integrations.lightning.optimizers import ConfiguredOptimizers
from paceline.integrations.lightning.rows import check_loader, numbered
from paceline.integrations.lightning.steps import Steps
from paceline.integrations.lightning.validation import Evaluation
from paceline.integrations.lightning.view import TrainerView
from paceline.plan import Plan
from paceline.team.team import join
from paceline.trainer import Trainer


def trainer(
    module: Any,
    data: Any = None,
    *,
    global_batch: int | None = None,
    epochs: int | None = None,
    steps: int | None = None,
    plan: str | None = None,
    seed: int = 0,
    count: Callable[[Any], Any] | None = None,
    **words: Any,
) -> TrainerView:
    """Trains a LightningModule, as ``lightning.Trainer(...).fit(module, data)`` does.

    Started by `paceline run`, all workers train one module together, and the same command resumes a run. Started by
    `python`, it trains alone.

    Args:
        module: The LightningModule.
        data: A LightningDataModule, or the DataLoader of the training rows; None if the module has
            `train_dataloader`. Its batch size is only used where `global_batch` is not given.
        global_batch: LoaderRows of one optimizer step, over all workers.
        epochs: How often to go through the rows.
        steps: Instead of `epochs`: the number of optimizer steps.
        plan: How the work is spread, for example ``"shard=2"``; ``paceline run --plan`` overrides it.
        seed: Seeds the order of the rows and the random numbers of each micro-batch.
        count: ``count(batch)`` returns the number of items, such as tokens, that the loss of `training_step` is a mean
            over; by default its rows.
        words: ``val_dataloaders=``, ``keep_best=(name, mode)``, and arguments of Lightning's Trainer, such as
            ``gradient_clip_val``, ``callbacks`` and ``check_val_every_n_epoch``; see docs/coming-from/lightning.md.

    Returns:
        What the module saw as ``self.trainer``, with `callback_metrics`, `validate`, `test`, and the `paceline.Trainer`
        as `paceline`.

    Raises:
        UsageError: An argument, a hook or a callback cannot be honoured; the message names it.

    Example:
        >>> trainer = paceline.lightning.trainer(LitClassifier(), MNISTDataModule(), global_batch=256, epochs=3)
        >>> trainer.callback_metrics["val_loss"]
    """
    words = {"epochs": epochs, "steps": steps, "seed": seed, **words}
    training = ModuleTraining(module, data, words)
    training.prepare(global_batch)
    training.build(plan, count)
    return training.run()


class ModuleTraining:
    """One call of `trainer`: collects what the module has, makes the Paceline Trainer and runs its loop."""

    def __init__(self, module: Any, data: Any, words: dict[str, Any]) -> None:
        self._package = package_of(module)
        names = ("epochs", "steps", "seed", "val_dataloaders", "keep_best")
        self._settings = {name: words.pop(name, None) for name in names}
        self._settings["seed"] = self._settings["seed"] or 0
        check_words(words, self._package)
        self._words = words
        is_datamodule = isinstance(data, self._package.LightningDataModule)
        self.datamodule = data if is_datamodule else None
        self._given_loader = None if is_datamodule else data
        check_hooks(module, self.datamodule)
        self.module = module
        self.view = TrainerView(self._package, module, self.datamodule, words)
        self.view.callbacks = check_callbacks(words.get("callbacks"))
        logger = words.get("logger")
        given = logger if isinstance(logger, list | tuple) else [logger]
        self.view.loggers = [one for one in given if one is not None and not isinstance(one, bool)]

    def prepare(self, global_batch: int | None) -> None:
        """Calls the hooks that prepare data and model, and reads the loaders."""
        view, module, words = self.view, self.module, self._words
        team = join()
        self._set_main_worker(team.rank == 0)
        module.trainer = view
        owners = [one for one in (self.datamodule, module) if one is not None]
        if self.datamodule is not None:
            self.datamodule.trainer = view
        if any(has_hook(one, "prepare_data") for one in owners):
            if team.rank == 0:
                for one in owners:
                    one.prepare_data()
            team.any(False, "prepare_data()")
        for one in owners:
            one.setup("fit")
        for callback in view.callbacks:
            callback.setup(view, module, "fit")
        if has_hook(module, "configure_model"):
            module.configure_model()
        if words.get("deterministic") is not None:
            warn = words["deterministic"] == "warn"
            torch.use_deterministic_algorithms(bool(words["deterministic"]), warn_only=warn)
        if words.get("benchmark") is not None:
            torch.backends.cudnn.benchmark = bool(words["benchmark"])
        loader = self._loader_of("train_dataloader", self._given_loader)
        check_loader(loader, "train_dataloader()")
        view.train_dataloader = loader
        self.batch = self._global_batch(global_batch, loader)
        self.rows = parts_of(loader, self.batch)
        self._count_steps()
        given = self._settings["val_dataloaders"]
        self.validation = self._evaluation_rows("val_dataloader", given, words.get("limit_val_batches"))

    def _set_main_worker(self, main: bool) -> None:
        """Lightning's own messages and loggers are of the main worker."""
        from lightning_utilities.core.rank_zero import rank_zero_only

        rank_zero_only.rank = 0 if main else 1

    def _loader_of(self, name: str, given: Any) -> Any:
        if given is not None:
            return given
        owners = [one for one in (self.datamodule, self.module) if one is not None]
        owner = next((one for one in owners if has_hook(one, name) or name in vars(one)), None)
        if owner is None:
            if name == "train_dataloader":
                what = "trainer() got no training rows"
                raise UsageError(what, "pass a LightningDataModule or a DataLoader as the second argument")
            return None
        return getattr(owner, name)()

    def _global_batch(self, given: int | None, loader: Any) -> int:
        accumulate = self._words.get("accumulate_grad_batches") or 1
        if given is None:
            if loader.batch_size is None:
                raise UsageError("the loader's batch sampler has no batch size", "pass global_batch=")
            return int(loader.batch_size * accumulate)
        if accumulate != 1:
            what = "global_batch= and accumulate_grad_batches= were both given"
            raise UsageError(what, "leave out accumulate_grad_batches: global_batch counts all rows of a step")
        return given

    def _count_steps(self) -> None:
        """Finds the number of steps of an epoch and of the training."""
        settings, words, view, rows = self._settings, self._words, self.view, self.rows.count
        lengths = {name: settings[name] for name in ("epochs", "steps") if settings[name] is not None}
        lengths |= {name: words[name] for name in ("max_epochs", "max_steps") if words.get(name) not in (None, -1)}
        if len(lengths) != 1:
            what = f"trainer() got {' and '.join(f'{name}=' for name in lengths) or 'neither epochs= nor steps='}"
            raise UsageError(what, "give one of epochs= and steps=")
        ((name, length),) = lengths.items()
        view.num_training_batches = 0 if rows is None else max(1, -(-rows // self.batch))
        if name.endswith("epochs"):
            if rows is None:
                raise UsageError(f"{name}= with rows whose number is unknown", "pass steps=")
            view.max_epochs, view.max_steps = length, length * view.num_training_batches
        else:
            view.max_steps = length

    def _evaluation_rows(self, name: str, given: Any, limit: Any) -> list[Any]:
        step = f"{name.partition('_')[0].replace('val', 'validation')}_step"
        if not has_hook(self.module, step) or (limit is not None and limit == 0):
            return []
        loaders = self._loader_of(name, given)
        loaders = [] if loaders is None else list(loaders) if isinstance(loaders, list | tuple) else [loaders]
        if name == "val_dataloader":
            self.view.val_dataloaders = loaders[0] if len(loaders) == 1 else loaders
        for loader in loaders:
            check_loader(loader, f"{name}()")
        return [rows for loader in loaders if (rows := numbered(loader, limit, f"{name}()")) is not None]

    def build(self, plan: str | None, count: Callable[[Any], Any] | None) -> None:
        """Makes the optimizer, the schedulers and the Trainer."""
        view, module, words = self.view, self.module, self._words
        returned = module.configure_optimizers()
        optimizers = self.optimizers = ConfiguredOptimizers(
            module, returned, view.num_training_batches or view.max_steps
        )
        text = merged_plan(words.get("precision"), plan)
        states = MetricStates(module)
        self.log = StepLog(states)
        steps = Steps(view, states, count, view.num_training_batches)
        steps.log = self.log
        made = Trainer(
            model=module,
            forward=steps.forward,
            loss=steps.loss,
            optimizer=optimizers.make,
            schedule=optimizers.scheduler_factory,
            global_batch=self.batch,
            clip_norm=words.get("gradient_clip_val") or None,
            seed=self._settings["seed"],
            plan=text,
        )
        self._refuse_plan(made.plan)
        view.paceline = made
        view.optimizers, view.lr_scheduler_configs = [optimizers.optimizer], optimizers.configs
        view.strategy.root_device = made.device
        steps.micro = Grid.of(self.batch, made.plan.micro).micro
        evaluation = Evaluation(made, steps, view._results, states)
        self.loop = Loop(view, optimizers, self.log, evaluation, self.validation)
        view._evaluate = self._evaluate

    def _refuse_plan(self, plan: Plan) -> None:
        follows = any(one.reduce_on_plateau for one in self.optimizers.configs)
        if (plan.local or plan.in_windows) and follows:
            what = f"ReduceLROnPlateau does not work with {plan.several}, where workers are at different steps"
            raise UsageError(what, f"use a schedule of the step, or remove {plan.several}")

    def _evaluate(self, stage: str, loaders: Any) -> dict[str, float]:
        """Runs validation or test for the script, after training."""
        name = "val_dataloader" if stage == "validation" else "test_dataloader"
        owners = [one for one in (self.datamodule, self.module) if one is not None]
        for one in owners:
            one.setup("validate" if stage == "validation" else "test")
        rows = self._evaluation_rows(name, loaders, None)
        if not rows:
            raise UsageError(f"{stage}_step() or {name}() is missing", f"write both, or pass {name}s=")
        return self.loop.evaluate(stage, rows)

    def run(self) -> TrainerView:
        """Runs the loop, and returns the module's trainer."""
        view, made, loop = self.view, self.view.paceline, self.loop
        if best := self._settings["keep_best"]:
            made.keep_best(*best)
        self._log_hyperparameters()
        loop.begin()
        for report in made.steps(
            self.rows.dataset,
            count=view.max_steps,
            collate=self.rows.collate,
            order=self.rows.order,
            loader=self.rows.options,
        ):
            loop.follow(report)
        loop.finish()
        for one in (self.datamodule, self.module):
            if one is not None:
                one.teardown("fit")
        for callback in view.callbacks:
            callback.teardown(view, self.module, "fit")
        return view

    def _log_hyperparameters(self) -> None:
        """Keeps the hyperparameters of `save_hyperparameters()` with the run, and hands them to loggers."""
        values: dict[str, Any] = {}
        for one in (self.datamodule, self.module):
            if one is not None and getattr(one, "_log_hyperparams", False):
                values |= dict(one.hparams_initial)
        plain = {name: value for name, value in values.items() if isinstance(value, bool | int | float | str)}
        if plain:
            self.view.paceline.config(**plain)
        if values and self.view.is_global_zero:
            for logger in self.view.loggers:
                logger.log_hyperparams(values)
