"""Trains a compiled Keras model: `fit`, `evaluate` and `predict` on any number of workers."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn

from paceline.errors import UsageError
from paceline.integrations.keras.arguments import (
    EVALUATE_DEFAULTS,
    EVALUATE_REFUSED,
    FIT_DEFAULTS,
    FIT_REFUSED,
    PREDICT_DEFAULTS,
    PREDICT_REFUSED,
    check_model,
    options_of,
)
from paceline.integrations.keras.callbacks import Callbacks, best_of
from paceline.integrations.keras.data import RowDataset, rows_from, split_rows
from paceline.integrations.keras.losses import CompiledLoss, CompiledMetrics, EvaluatedStates
from paceline.integrations.keras.network import Network, draws_of_the_micro_batch
from paceline.integrations.keras.optimizer import KerasUpdate, bound_to, first_rate, is_number
from paceline.team.gather_trees import from_main
from paceline.team.team import join
from paceline.trainer import Trainer

_KEY = "keras"  # of trainer.state: the record of the current fit
_ITERATIONS = "keras_iterations"  # of trainer.state: steps of the Keras optimizer before the first step


def trainer(model: Any, global_batch: int, plan: str | None = None, seed: int = 0) -> KerasTrainer:
    """Makes a trainer for a compiled Keras 3 model on the torch backend; its `fit` takes the place of `model.fit`.

    Started by `paceline run`, all workers train one model together, and the same command resumes a run. Started by
    `python`, it trains alone.

    Args:
        model: A `keras.Model` after `compile()`.
        global_batch: RowDataset of one optimizer step, over all workers: Keras' `batch_size`.
        plan: How the work is spread. ``paceline run --plan`` overrides it.
        seed: Seeds the order of the rows and the random numbers of each micro-batch.

    Raises:
        UsageError: What the model was compiled for cannot be honoured; the message names it.

    Example:
        >>> trainer = paceline.keras.trainer(model, global_batch=256)
        >>> history = trainer.fit(x, y, epochs=3, validation_data=(x_test, y_test))
    """
    return KerasTrainer(model, global_batch, plan, seed)


class KerasTrainer:
    """Trains, evaluates and predicts with a Keras model on all workers together. Made by `trainer`.

    The Paceline Trainer is made in the first call that has data, because Keras builds layers, losses and metrics from
    it.

    Args:
        model: A `keras.Model` after `compile()`.
        global_batch: RowDataset of one optimizer step, over all workers.
        plan: How the work is spread.
        seed: Seeds the order of the rows and the random numbers of each micro-batch.
    """

    def __init__(self, model: Any, global_batch: int, plan: str | None = None, seed: int = 0) -> None:
        check_model(model)
        self.model = model
        self._global_batch, self._plan, self._seed = global_batch, plan, seed
        self._trainer: Trainer | None = None
        self._network: Network | None = None
        self._states: CompiledMetrics | None = None
        self._losses: CompiledLoss | None = None
        self._rows: RowDataset | None = None  # whose batches forward and loss get now
        self._fits = 0

    @property
    def paceline(self) -> Trainer:
        """The Paceline Trainer, with `export`, `save` and `keep_best`. It is made by the first call that has data."""
        if self._trainer is None:
            raise UsageError(
                "the trainer is made by the first fit(), evaluate() or predict()", "call one of them first"
            )
        return self._trainer

    @property
    def main(self) -> bool:
        """True on one worker, for example to write a file with `model.save()`."""
        return self.paceline.main

    def fit(self, x: Any = None, y: Any = None, **options: Any) -> Any:
        """Trains; takes the place of `model.fit`, with its arguments. All workers must call it.

        Args:
            x: Arrays or tensors in any nesting, a `keras.utils.PyDataset`, a torch Dataset or DataLoader.
            y: The targets, for arrays and tensors.
            options: `epochs`, `callbacks`, `validation_data`, `validation_split`, `validation_freq`, `shuffle`,
                `class_weight`, `sample_weight`, `initial_epoch` and `steps_per_epoch`, as in Keras.

        Returns:
            A `keras.callbacks.History`, the same on every worker.

        Raises:
            UsageError: An argument, a callback or a dataset cannot be honoured; the message names it.
        """
        given = options_of("fit", {"x": x, "y": y, **options}, FIT_DEFAULTS, FIT_REFUSED)
        x, y, weights, validation = given["x"], given["y"], given["sample_weight"], given["validation_data"]
        if given["validation_split"] and validation is None:
            (x, y, weights), validation = split_rows(x, y, weights, given["validation_split"])
        rows = rows_from(x, y, weights, given["class_weight"])
        tested = None if validation is None else validation_rows(validation)
        self._prepare(rows)
        self._fits += 1
        return Fit(self, rows, tested, given, self._fits - 1).run()

    def evaluate(self, x: Any = None, y: Any = None, **options: Any) -> Any:
        """Computes loss and metrics over all rows, each once; takes the place of `model.evaluate`.

        All workers must call it.

        Args:
            x: As in `fit`.
            y: The targets, for arrays and tensors.
            options: `sample_weight` and `return_dict`, as in Keras.

        Returns:
            The loss, a list of the loss and metrics, or a dict of them, as Keras.
        """
        given = options_of("evaluate", {"x": x, "y": y, **options}, EVALUATE_DEFAULTS, EVALUATE_REFUSED)
        rows = rows_from(given["x"], given["y"], given["sample_weight"])
        self._prepare(rows)
        results = self.evaluated(rows, "")
        return results if given["return_dict"] else self.model._flatten_metrics_in_order(results)

    def predict(self, x: Any, **options: Any) -> Any:
        """Computes the outputs for all rows; takes the place of `model.predict`. All workers must call it.

        Args:
            x: As in `fit`.
            options: None that change the result.

        Returns:
            Arrays in the nesting of the model's output, on every worker.
        """
        import keras

        given = options_of("predict", {"x": x, **options}, PREDICT_DEFAULTS, PREDICT_REFUSED)
        rows = rows_from(given["x"])
        self._prepare(rows)
        with self._using(rows):
            parts = [output for _, output in self.paceline.predict(rows.dataset)]
        joined = (
            keras.tree.map_structure(lambda *one: np.concatenate([p.numpy() for p in one]), *parts) if parts else None
        )
        return from_main(joined)

    def evaluated(self, rows: RowDataset, prefix: str) -> dict[str, Any]:
        """Loss and metrics over all rows by name, on all workers."""
        assert self._losses is not None
        assert self._states is not None
        metric = EvaluatedStates(self._losses, self._states, rows.unpack, prefix)
        with self._using(rows), draws_of_the_micro_batch():
            results = self.paceline.evaluate(rows.dataset, metric)
        return {k: v.numpy() if isinstance(v, torch.Tensor) else v for k, v in results.items() if k != "n"}

    @property
    def states(self) -> CompiledMetrics:
        """The states of the model's metrics."""
        assert self._states is not None
        return self._states

    @contextmanager
    def _using(self, rows: RowDataset) -> Iterator[None]:
        """In the context, forward and loss get batches of these rows."""
        before, self._rows = self._rows, rows
        try:
            yield
        finally:
            self._rows = before

    def _prepare(self, rows: RowDataset) -> None:
        """Builds what Keras builds from the first data, and makes the Paceline Trainer once."""
        has_targets = len(rows.structure) > 1
        parts = [part for part in rows.first() if part is not None]
        model = self.model
        unbuilt = [layer for layer in model._flatten_layers() if not layer.built]
        if self._states is None and (has_targets or unbuilt):
            if has_targets:
                model._symbolic_build(data_batch=tuple(parts))
            else:
                with torch.no_grad():
                    model(parts[0])
        if self._trainer is None:
            self._make()
        if self._states is None and has_targets:
            self._states = CompiledMetrics(model)
            self._losses = CompiledLoss(model, self._states)

    def _make(self) -> None:
        """Makes the Paceline Trainer."""
        optimizer = self.model.optimizer
        self._network = network = Network(self.model)
        kind, rate = bound_to(optimizer, network.variables), first_rate(optimizer)
        self._trainer = Trainer(
            model=network,
            forward=self._forward,
            loss=self._loss,
            optimizer=lambda params: kind(params, lr=rate),
            global_batch=self._global_batch,
            clip_norm=optimizer.global_clipnorm,
            seed=self._seed,
            plan=self._plan,
        )
        check_plan(self._trainer.plan, optimizer)
        self._trainer.state.setdefault(_ITERATIONS, int(optimizer.iterations))
        network.bind()

    def _forward(self, network: nn.Module, batch: Sequence[torch.Tensor]) -> Any:
        assert self._rows is not None
        x, _, _ = self._rows.unpack(batch)
        if self._states is not None:
            self._states.assign(self._states.start)
        with draws_of_the_micro_batch():
            return network(x)

    def _loss(self, output: Any, batch: Sequence[torch.Tensor]) -> Any:
        assert self._rows is not None
        assert self._losses is not None
        x, y, weights = self._rows.unpack(batch)
        with draws_of_the_micro_batch():
            loss, count, rows = self._losses.compute(x, y, weights, output, training=True)
        return loss * count, count, self.states.pairs(rows)

    def steps(self, rows: RowDataset, count: int, shuffle: bool) -> Iterator[Any]:
        """Makes steps on these rows, and yields the report of each."""
        with self._using(rows):
            yield from self.paceline.steps(rows.dataset, count=count, order=rows.order(shuffle), loader=rows.loader)

    def count_steps(self) -> None:
        """Sets the iterations of the model's Keras optimizer, if copies of it made the steps."""
        updates = [one for one in self.paceline._job.optimizers if isinstance(one, KerasUpdate)]
        if not any(one.counts_steps for one in updates):
            before = self.paceline.state[_ITERATIONS]
            self.model.optimizer._iterations.assign(before + self.paceline.steps_done)

    @property
    def global_batch(self) -> int:
        """RowDataset of one optimizer step."""
        return self._global_batch


def check_plan(plan: Any, optimizer: Any) -> None:
    """Raises UsageError for a plan under which a worker does not hold the full model, or under which the optimizer
    would lose what it has.
    """
    for word in ("tensor", "pipeline", "context"):
        if (number := getattr(plan, word) or 1) > 1:
            what = f"the plan word {word}={number} divides layers of torch, and a Keras model has none"
            raise UsageError(what, "use data=, shard=N zero=1, server= or local=")
    if (plan.shard or 1) > 1 and plan.zero != 1:
        what = f"shard={plan.shard} divides the weights, and Keras holds all weights of a model on each worker"
        raise UsageError(what, f"use shard={plan.shard} zero=1, which divides the state of the optimizer")
    elsewhere = [word for word in ("server", "local") if getattr(plan, word)]
    elsewhere += ["shard"] if (plan.shard or 1) > 1 else []
    if elsewhere and optimizer.use_ema:
        what = f"the optimizer has use_ema=True, whose averages are not on each worker under {elsewhere[0]}="
        raise UsageError(what, "use a plan with data= only")
    if elsewhere and optimizer.built and int(optimizer.iterations):
        what = (
            f"the optimizer has made {int(optimizer.iterations)} steps already, and {elsewhere[0]}= makes another one"
        )
        raise UsageError(what, "call model.compile() with a new optimizer, or use a plan with data= only")


def validation_rows(data: Any) -> RowDataset:
    """The rows of `validation_data`: (x, y), (x, y, weights) or a dataset."""
    if isinstance(data, tuple | list) and len(data) in (2, 3):
        return rows_from(data[0], data[1], data[2] if len(data) > 2 else None, what="validation_data")
    return rows_from(data, what="validation_data")


class Fit:
    """One call of `fit`. What must survive a restart is a record in `trainer.state`."""

    def __init__(
        self, owner: KerasTrainer, rows: RowDataset, tested: RowDataset | None, given: dict[str, Any], number: int
    ) -> None:
        self._owner, self._rows, self._tested, self._given, self._number = owner, rows, tested, given, number
        self._model, self._trainer = owner.model, owner.paceline
        self._each = given["steps_per_epoch"] or math.ceil(len(rows) / owner.global_batch)
        self._first, self._epochs = int(given["initial_epoch"]), int(given["epochs"])
        params = {"verbose": 0, "epochs": self._epochs, "steps": self._each}
        self._callbacks = Callbacks(given["callbacks"], self._model, params)

    @property
    def _record(self) -> dict[str, Any]:
        record: dict[str, Any] = self._trainer.state[_KEY]
        return record

    def run(self) -> Any:
        """Trains, and returns Keras' History."""
        owner, model = self._owner, self._model
        count = self._each * max(0, self._epochs - self._first)
        resumed = self._begin_record()
        if self._record["fit"] > self._number:  # a resumed run is in a later fit: this one is complete
            for _ in owner.steps(self._rows, count, self._given["shuffle"]):
                raise UsageError("fit() is called more often than in the run that is resumed", "resume the same script")
            return self._history(self._record["past"][self._number])
        if not resumed and self._trainer.complete and self._record.get("stopped"):
            raise UsageError(
                "an earlier fit() of this trainer was stopped early", "make another trainer for the next fit"
            )
        model.stop_training = False
        self._follow_rate()
        self._callbacks.begin(self._trainer.main, resumed, self._record["callbacks"])
        if (best := best_of(self._callbacks.all)) and self._trainer.run_dir is not None:
            self._trainer.keep_best(*best)
        done = self._record["step"]
        if done < count and not self._record["stopped"] and self._record["begun"] != done:
            self._begin_step(done)
        for report in owner.steps(self._rows, count, self._given["shuffle"]):
            self._follow(report, count)
        for update in self._updates():
            update.finish()
        self._callbacks.call("on_train_end", self._record["logs"])
        return self._history(self._record)

    def _begin_record(self) -> bool:
        """Makes the record of this fit, unless a checkpoint has it. Returns whether it had."""
        record = self._trainer.state.get(_KEY)
        if record is not None and record["fit"] >= self._number:
            return True
        past = [] if record is None else [*record["past"], {k: record[k] for k in ("history", "epochs")}]
        self._trainer.state[_KEY] = {
            "fit": self._number,
            "past": past,
            "start": self._trainer.steps_done,
            "step": 0,
            "begun": -1,  # the step before which the callbacks were called last
            "stopped": bool(record and record["stopped"]),
            "loss": [0.0, 0],
            "changes": torch.zeros(len(self._owner.states.start), dtype=torch.float64),
            "history": {},
            "epochs": [],
            "logs": {},
            "callbacks": {},
        }
        return False

    def _updates(self) -> list[KerasUpdate]:
        return [one for one in self._trainer._job.optimizers if isinstance(one, KerasUpdate)]

    def _follow_rate(self) -> None:
        """Gives the Keras optimizer the learning rate of the run, which a checkpoint may have."""
        optimizer = self._model.optimizer
        if is_number(optimizer):
            for update in self._updates():
                optimizer.learning_rate = update.param_groups[0]["lr"]

    def _take_rate(self) -> None:
        """Takes over a learning rate that a callback has set."""
        optimizer = self._model.optimizer
        if not is_number(optimizer):
            return
        plan, rate = self._trainer.plan, float(optimizer.learning_rate)
        for group in (group for update in self._updates() for group in update.param_groups):
            if not math.isclose(group["lr"], rate, rel_tol=1e-6) and (plan.server or plan.local):
                what = f"a callback set the learning rate to {rate:g}, but the optimizers of {plan} are elsewhere"
                raise UsageError(what, "use a schedule of keras.optimizers.schedules")
            group["lr"] = rate

    def _begin_step(self, done: int) -> None:
        epoch, batch = divmod(done, self._each)
        if batch == 0:
            self._callbacks.call("on_epoch_begin", self._first + epoch, {})
        self._callbacks.call("on_train_batch_begin", batch, {})
        self._take_rate()
        self._record["begun"] = done

    def _follow(self, report: Any, count: int) -> None:
        """Does what follows a step."""
        record, states, rows = self._record, self._owner.states, report.samples
        before, now = record["step"], self._trainer.steps_done - record["start"]
        record["step"] = now
        record["loss"] = [record["loss"][0] + report.loss * rows, record["loss"][1] + rows]
        record["changes"] = record["changes"] + torch.tensor(states.changes(report.metrics, rows), dtype=torch.float64)
        self._callbacks.follow_main(self._trainer.main)
        self._owner.count_steps()
        logs = self._logs() if self._callbacks.sees_batches else {}
        for step in range(before, now):  # several in a turn of local SGD
            self._callbacks.call("on_train_batch_end", step % self._each, logs)
        stops = self._callbacks.sees_batches and join().any(self._model.stop_training, "callbacks: stop_training")
        if now // self._each > before // self._each or stops:
            stops = self._end_epoch((now - 1) // self._each + self._first) or stops
        self._take_rate()
        if stops and now < count:
            record["stopped"] = True
            self._trainer.stop()
        elif now < count:
            self._begin_step(now)
        record["callbacks"] = self._callbacks.saved()
        self._trainer.state[_KEY] = record

    def _logs(self) -> dict[str, Any]:
        total, rows = self._record["loss"]
        return self._owner.states.results(total / rows if rows else math.nan, self._record["changes"])

    def _end_epoch(self, epoch: int) -> bool:
        """Validates, reports and calls the callbacks. Returns whether one of them stops the training."""
        record, logs = self._record, self._logs()
        numbers = {name: value for name, value in logs.items() if isinstance(value, float)}
        if self._tested is not None and self._model._should_eval(epoch, self._given["validation_freq"]):
            self._callbacks.call("on_test_begin", {})
            results = self._owner.evaluated(self._tested, "val_")
            self._callbacks.call("on_test_end", {name.removeprefix("val_"): one for name, one in results.items()})
            logs |= results
        self._trainer.log(**numbers)
        self._callbacks.call("on_epoch_end", epoch, logs)  # which may add to them, as LearningRateScheduler does
        for name, value in logs.items():
            record["history"].setdefault(name, []).append(np.asarray(value).tolist())
        record["epochs"].append(epoch)
        record["logs"] = {name: value for name, value in logs.items() if isinstance(value, float)}
        record["loss"], record["changes"] = [0.0, 0], torch.zeros_like(record["changes"])
        return join().any(self._model.stop_training, "callbacks: stop_training")

    def _history(self, record: dict[str, Any]) -> Any:
        import keras

        history = keras.callbacks.History()
        history.set_params({"verbose": 0, "epochs": self._epochs, "steps": self._each})
        history.set_model(self._model)
        history.history = {name: list(values) for name, values in record["history"].items()}
        history.epoch = list(record["epochs"])
        self._model.history = history
        return history
