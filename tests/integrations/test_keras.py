"""`paceline.keras` trains as Keras itself does, on one worker and on several."""

from __future__ import annotations

import inspect
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from launching import SCRIPTS, environment, paceline
from lazily import Lazily
from paths import DOCS
from torch.utils.data import BatchSampler, SequentialSampler

os.environ.setdefault("KERAS_BACKEND", "torch")
keras = Lazily("keras")

from paceline import keras as paceline_keras  # noqa: E402
from paceline.errors import UsageError  # noqa: E402
from paceline.integrations.keras import arguments  # noqa: E402

SCRIPT = SCRIPTS / "keras_cases.py"
SGD = {"name": "SGD", "learning_rate": 0.1, "momentum": 0.9}
chance = np.random.default_rng(1)
X = chance.normal(size=(50, 6)).astype("float32")
Y = (X[:, 0] > 0).astype("int32") + (X[:, 3] > 1)
made: list[Any] = []


@pytest.fixture(autouse=True)
def closed() -> Iterator[None]:
    if keras.backend.backend() != "torch":
        pytest.skip("Keras runs on another backend here")
    yield
    while made:
        made.pop().paceline.close()


def model(optimizer: Any = None, **options: Any) -> Any:
    keras.utils.set_random_seed(0)
    built = keras.Sequential(
        [
            keras.layers.Input((6,)),
            keras.layers.Dense(8, activation="tanh", kernel_constraint=keras.constraints.MaxNorm(1.5)),
            keras.layers.Dense(3),
        ]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    built.compile(optimizer or keras.optimizers.Adam(0.01), loss, **{"metrics": ["accuracy"], **options})
    return built


def trained(built: Any, **options: Any) -> Any:
    """The history of a fit by Paceline."""
    trainer = paceline_keras.trainer(built, global_batch=16)
    made.append(trainer)
    return trainer.fit(**{"epochs": 2, "shuffle": False, **options})


def apart(one: Any, other: Any) -> float:
    """The largest difference between the weights of two models."""
    pairs = zip(one.weights, other.weights, strict=True)
    return max(float(np.abs(a.numpy() - b.numpy()).max()) for a, b in pairs)


def same(history: Any, plain: Any) -> None:
    assert history.epoch == plain.epoch
    assert history.history.keys() == plain.history.keys()
    for name, values in plain.history.items():
        assert history.history[name] == pytest.approx([float(value) for value in values], abs=1e-5), name


OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "nesterov": lambda: keras.optimizers.SGD(0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "adam": lambda: keras.optimizers.Adam(0.01, amsgrad=True, clipvalue=0.01),
    "adamw": lambda: keras.optimizers.AdamW(0.01, weight_decay=0.1, use_ema=True, ema_momentum=0.8),
    "rmsprop": lambda: keras.optimizers.RMSprop(0.01, centered=True, momentum=0.5, clipnorm=0.1),
    "adagrad": lambda: keras.optimizers.Adagrad(0.05),
    "nadam": lambda: keras.optimizers.Nadam(0.01),
    "adafactor": lambda: keras.optimizers.Adafactor(0.05),
    "muon": lambda: keras.optimizers.Muon(0.01),
    "global_clipnorm": lambda: keras.optimizers.SGD(0.5, global_clipnorm=0.2),
    "schedule": lambda: keras.optimizers.SGD(
        keras.optimizers.schedules.CosineDecay(0.1, 6, warmup_target=0.5, warmup_steps=3)
    ),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_make_the_weights_that_keras_makes(name: str) -> None:
    plain, ours = model(OPTIMIZERS[name]()), model(OPTIMIZERS[name]())
    expected = plain.fit(X, Y, batch_size=16, epochs=2, shuffle=False, verbose=0)
    same(trained(ours, x=X, y=Y), expected)
    assert apart(plain, ours) < 1e-5
    pairs = zip(plain.optimizer.variables, ours.optimizer.variables, strict=True)
    assert max(float(np.abs(a.numpy() - b.numpy()).max()) for a, b in pairs) < 1e-5


def batches_of_six() -> Any:
    class Batches(keras.utils.PyDataset):
        def __len__(self) -> int:
            return 9  # the last one has fewer rows

        def __getitem__(self, index: int) -> Any:
            return X[index * 6 : index * 6 + 6], Y[index * 6 : index * 6 + 6]

    return Batches()


class Halves(torch.utils.data.Sampler[list[int]]):
    def __iter__(self) -> Iterator[list[int]]:
        return iter([[*range(len(X) // 2)], [*range(len(X) // 2, len(X))]])


def loader_with(**options: Any) -> Any:
    return torch.utils.data.DataLoader(TENSORS, **options)


TENSORS = torch.utils.data.TensorDataset(torch.as_tensor(X), torch.as_tensor(Y))
ROWS = SequentialSampler(TENSORS)
INPUTS: dict[str, Callable[[], dict[str, Any]]] = {
    "tensors": lambda: {"x": torch.as_tensor(X), "y": torch.as_tensor(Y)},
    "py_dataset": lambda: {"x": batches_of_six()},
    "dataset": lambda: {"x": TENSORS},
    "loader": lambda: {"x": torch.utils.data.DataLoader(TENSORS, batch_size=4)},
    "batch sampler": lambda: {"x": torch.utils.data.DataLoader(TENSORS, batch_sampler=BatchSampler(ROWS, 4, False))},
}


@pytest.mark.parametrize("name", INPUTS)
def test_every_kind_of_input_has_the_same_rows(name: str) -> None:
    plain, ours = model(), model()
    expected = plain.fit(X, Y, batch_size=16, epochs=2, shuffle=False, verbose=0)
    same(trained(ours, **INPUTS[name]()), expected)
    assert apart(plain, ours) < 1e-5


FITS: dict[str, dict[str, Any]] = {
    "class_weight": {"class_weight": {0: 1.0, 1: 2.5, 2: 0.5}},
    "validation_split": {"validation_split": 0.2},
    "later epochs": {"initial_epoch": 1, "epochs": 3, "validation_data": (X[:9], Y[:9]), "validation_freq": 2},
    "steps_per_epoch": {"steps_per_epoch": 2, "epochs": 4},
}


@pytest.mark.parametrize("name", FITS)
def test_arguments_of_fit_do_what_they_do_in_keras(name: str) -> None:
    options = {"epochs": 2, "shuffle": False, **FITS[name]}
    plain, ours = model(), model()
    expected = plain.fit(X, Y, batch_size=16, verbose=0, **options)
    same(trained(ours, x=X, y=Y, **options), expected)
    assert apart(plain, ours) < 1e-5


def test_a_second_fit_goes_on_and_evaluate_and_predict_agree() -> None:
    plain, ours = model(), model()
    for epochs in (1, 2):
        expected = plain.fit(X, Y, batch_size=16, epochs=epochs, shuffle=False, verbose=0)
    trainer = paceline_keras.trainer(ours, global_batch=16)
    made.append(trainer)
    for epochs in (1, 2):
        history = trainer.fit(X, Y, epochs=epochs, shuffle=False)
    same(history, expected)
    assert trainer.evaluate(X, Y) == pytest.approx(plain.evaluate(X, Y, verbose=0), abs=1e-5)
    assert np.abs(trainer.predict(X) - plain.predict(X, verbose=0)).max() < 1e-5


def test_callbacks_see_the_logs_that_keras_gives_them() -> None:
    seen: list[list[Any]] = []

    class Notes(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            seen[-1].append(("epoch", epoch))

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            seen[-1].append((batch, round(float(logs["loss"]), 4), round(float(logs["accuracy"]), 4)))
            self.model.stop_training = len(seen[-1]) == 9

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            seen[-1].append(sorted(logs))

    plain, ours = model(), model()
    options: dict[str, Any] = {"epochs": 4, "shuffle": False, "validation_data": (X[:9], Y[:9])}
    seen.append([])
    plain.fit(X, Y, batch_size=16, verbose=0, callbacks=[Notes()], **options)
    seen.append([])
    trained(ours, x=X, y=Y, callbacks=[Notes()], **options)
    assert len(seen[0]) > 8
    assert seen[0] == seen[1]
    assert apart(plain, ours) < 1e-5


REFUSED: dict[str, tuple[str, Callable[[], Any]]] = {
    "batch_size": ("fit(batch_size=...)", lambda: trained(model(), x=X, y=Y, batch_size=8)),
    "validation_steps": ("fit(validation_steps=...)", lambda: trained(model(), x=X, y=Y, validation_steps=1)),
    "unknown": ("no argument 'epoch'", lambda: trained(model(), x=X, y=Y, epoch=1)),
    "tensorboard": ("TensorBoard", lambda: trained(model(), x=X, y=Y, callbacks=[keras.callbacks.TensorBoard()])),
    "generator": ("no rows by number", lambda: trained(model(), x=iter([(X, Y)]))),
    "batch_sampler": ("the sampler Halves", lambda: trained(model(), x=loader_with(batch_sampler=Halves()))),
    "shuffled batches": (
        "the sampler SubsetRandomSampler",
        lambda: trained(
            model(), x=loader_with(batch_sampler=BatchSampler(torch.utils.data.SubsetRandomSampler([0, 1]), 2, False))
        ),
    ),
    "num_samples": (
        "the sampler RandomSampler",
        lambda: trained(model(), x=loader_with(sampler=torch.utils.data.RandomSampler(TENSORS, num_samples=8))),
    ),
    "jit": ("jit_compile=True", lambda: trained(model(jit_compile=True), x=X, y=Y)),
    "accumulation": (
        "gradient_accumulation_steps=2",
        lambda: trained(model(keras.optimizers.SGD(0.1, gradient_accumulation_steps=2)), x=X, y=Y),
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_paceline_cannot_honour_is_refused_by_name(name: str) -> None:
    text, call = REFUSED[name]
    try:
        with pytest.raises(UsageError) as caught:
            call()
    finally:
        made.clear()  # no Trainer was made
    assert text in str(caught.value)


def test_overridden_methods_and_sums_are_refused_by_name() -> None:
    class Stepper(keras.Sequential):
        def train_step(self, data: Any) -> Any:
            return super().train_step(data)

    stepper = Stepper([keras.layers.Input((6,)), keras.layers.Dense(1)])
    stepper.compile("sgd", "mse")
    with pytest.raises(UsageError, match=r"Stepper\.train_step\(\)"):
        paceline_keras.trainer(stepper, global_batch=16)
    summed = model()
    summed.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="sum"))
    with pytest.raises(UsageError, match="reduction='sum'"):
        trained(summed, x=X, y=Y)


def test_every_argument_of_keras_is_in_exactly_one_table() -> None:
    base = inspect.signature(keras.optimizers.Optimizer.__init__).parameters
    named = {name: one for name, one in vars(keras.callbacks).items() if isinstance(one, type)}
    calls = {
        "FIT": inspect.signature(keras.Model.fit).parameters,
        "EVALUATE": inspect.signature(keras.Model.evaluate).parameters,
        "PREDICT": inspect.signature(keras.Model.predict).parameters,
        "COMPILE": inspect.signature(keras.Model.compile).parameters,
        "OPTIMIZER": base,
        "CALLBACKS": named,
    }
    for name, known in calls.items():
        tables = [getattr(arguments, f"{name}_{kind}") for kind in ("USED", "NO_EFFECT", "REFUSED")]
        listed = sorted(argument for table in tables for argument in table)
        extra = {"MonitorCallback"} if name == "CALLBACKS" else set()  # which Keras does not export
        assert sorted({*(set(known) - {"self"}), *extra}) == listed, name


# -- runs of several workers --------------------------------------------------------------------------------------


def plain_result(folder: Path, kind: str, words: dict[str, Any]) -> dict[str, Any]:
    command = [sys.executable, str(SCRIPT), kind, "plain", "plain", json.dumps(words)]
    subprocess.run(command, cwd=folder, check=True, capture_output=True, env=environment())
    return read(folder / "plain.json")


def our_result(folder: Path, kind: str, words: dict[str, Any], workers: int, **env: str) -> dict[str, Any]:
    out, run = f"ours{workers}", f"run{workers}"
    options = ("--workers", str(workers), "--run-dir", run)
    paceline("run", *options, SCRIPT, kind, "paceline", out, json.dumps(words), cwd=folder, **env)
    return read(folder / f"{out}.json")


def read(path: Path) -> dict[str, Any]:
    result: dict[str, Any] = json.loads(path.read_text())
    return result


def furthest(one: Any, other: Any) -> float:
    """The largest difference between two results of the same form."""
    if isinstance(one, dict):
        assert one.keys() == other.keys()
        return max((furthest(one[name], other[name]) for name in one), default=0.0)
    first, second = np.asarray(one, dtype=float), np.asarray(other, dtype=float)
    assert first.shape == second.shape
    return float(np.abs(first - second).max()) if first.size else 0.0


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["dense", "outputs", "masked"])
def test_two_workers_train_as_keras_alone(kind: str, tmp_path: Path) -> None:
    words = {"optimizer": SGD}
    assert furthest(plain_result(tmp_path, kind, words), our_result(tmp_path, kind, words, 2)) < 1e-5


@pytest.mark.slow
def test_batch_normalization_of_full_batches_is_that_of_keras(tmp_path: Path) -> None:
    words = {"dropout": 0, "plan": "micro=16"}
    assert furthest(plain_result(tmp_path, "norms", words), our_result(tmp_path, "norms", words, 1)) < 1e-5


@pytest.mark.slow
def test_batch_normalization_and_dropout_are_equal_on_one_and_two_workers_even_if_one_dies(tmp_path: Path) -> None:
    words = {"floatx": "float64"}  # so that differences are no rounding
    alone = our_result(tmp_path, "norms", words, 1)
    assert furthest(alone, our_result(tmp_path, "norms", words, 2, PACELINE_CHAOS="kill:1@5.backward")) < 1e-10


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["shard=2 zero=1", "server=1"])
def test_plans_that_keep_the_weights_on_each_worker(plan: str, tmp_path: Path) -> None:
    words = {"optimizer": SGD}
    assert (
        furthest(plain_result(tmp_path, "dense", words), our_result(tmp_path, "dense", words | {"plan": plan}, 2))
        < 1e-5
    )


@pytest.mark.slow
def test_callbacks_of_keras_and_a_resumed_run(tmp_path: Path) -> None:
    """Early stopping with the best weights, a schedule by callbacks, and files, after a kill in the second epoch."""
    words = {"patience": 1, "epochs": 8, "files": 1, "halve": 1, "optimizer": SGD | {"learning_rate": 1.0}}
    plain = plain_result(tmp_path, "dense", words)
    assert len(plain["epochs"]) < 8
    run = ("run", "--workers", "1", "--run-dir", "run1", SCRIPT, "dense", "paceline", "ours1", json.dumps(words))
    paceline(*run, cwd=tmp_path, code=None, PACELINE_CHAOS="kill:0@6.forward")
    assert not (tmp_path / "ours1.json").exists()
    assert furthest(plain, our_result(tmp_path, "dense", words, 1)) < 1e-5
    ours, theirs = ((tmp_path / f"{name}.csv").read_text().splitlines() for name in ("ours1", "plain"))
    assert len(ours) == len(theirs)
    assert (tmp_path / "ours1.weights.h5").exists()
    assert (tmp_path / "ours1.keras").exists()


PAGE = DOCS / "coming-from" / "keras-and-tf-distribute.md"


def test_the_page_has_every_argument() -> None:
    text = PAGE.read_text()
    for name in ("FIT", "EVALUATE", "PREDICT", "COMPILE", "OPTIMIZER", "CALLBACKS"):
        for kind in ("USED", "NO_EFFECT", "REFUSED"):
            for argument, why in getattr(arguments, f"{name}_{kind}").items():
                rows = [line for line in text.splitlines() if f"`{argument}`" in line and why in line]
                assert rows, f"{argument}: {why}"


@pytest.mark.slow
def test_the_script_of_the_page_trains_on_two_workers(tmp_path: Path) -> None:
    before, after = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    *kept, _, _ = before.splitlines()
    (tmp_path / "train.py").write_text("\n".join([*kept, after]))
    paceline("run", "--workers", "2", "--run-dir", "run", "train.py", cwd=tmp_path)
    assert keras.models.load_model(tmp_path / "model.keras").predict(X[:, [0] * 8], verbose=0).shape == (50, 2)


def test_torch_modules_in_a_keras_model_train_with_their_buffers() -> None:
    """A wrapped torch BatchNorm keeps its running statistics, of one micro-batch as large as the global batch."""

    def wrapped() -> Any:
        torch.manual_seed(0)
        keras.utils.set_random_seed(0)
        inner = torch.nn.Sequential(torch.nn.Linear(6, 5, bias=False), torch.nn.BatchNorm1d(5), torch.nn.Tanh())
        layer = keras.layers.TorchModuleWrapper(inner)
        built = keras.Sequential([keras.layers.Input((6,)), layer, keras.layers.Dense(3)])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        built.compile(keras.optimizers.SGD(0.1), loss)
        return built, inner

    (plain, theirs), (ours, mine) = wrapped(), wrapped()
    expected = plain.fit(X[:48], Y[:48], batch_size=16, epochs=2, shuffle=False, verbose=0)
    trainer = paceline_keras.trainer(ours, global_batch=16, plan="micro=16")
    made.append(trainer)
    same(trainer.fit(X[:48], Y[:48], epochs=2, shuffle=False), expected)
    assert apart(plain, ours) < 1e-5
    assert torch.allclose(theirs[1].running_mean, mine[1].running_mean, atol=1e-5)
    assert int(mine[1].num_batches_tracked) == 6


def test_metrics_of_the_script_must_add_up() -> None:
    class Sum(keras.metrics.Metric):
        def __init__(self, adds: bool) -> None:
            super().__init__(name="seen")
            self.adds, self.seen = adds, self.add_weight(name="seen", initializer="zeros")

        def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
            self.seen.assign(self.seen + len(y_pred) if self.adds else 2 * self.seen + len(y_pred))

        def result(self) -> Any:
            return self.seen.value

    assert trained(model(metrics=[Sum(True)]), x=X, y=Y).history["seen"] == [50.0, 50.0]
    with pytest.raises(UsageError, match=r"the metric seen \(Sum\) is not a sum over rows"):
        trained(model(metrics=[Sum(False)]), x=X, y=Y)


def test_plans_that_divide_the_weights_are_refused() -> None:
    from paceline.integrations.keras.training import check_plan
    from paceline.plan import Plan

    optimizer = keras.optimizers.SGD(0.1)
    for text in ("shard=2", "shard=2 zero=2", "tensor=2", "pipeline=2"):
        with pytest.raises(UsageError, match=text.partition(" ")[0]):
            check_plan(Plan.parse(text), optimizer)
    for text in ("data=2", "shard=2 zero=1", "server=1", "local=2 every=2"):
        check_plan(Plan.parse(text), optimizer)
        with_averages = keras.optimizers.SGD(0.1, use_ema=True)
        if text != "data=2":
            with pytest.raises(UsageError, match="use_ema=True"):
                check_plan(Plan.parse(text), with_averages)
