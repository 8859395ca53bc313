"""Trains a small Keras model: by Keras itself (`HOW` is "plain"), or by Paceline.

keras_cases.py KIND HOW OUT [words as JSON]

Writes history, weights, evaluation and predictions to OUT.json.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

os.environ["KERAS_BACKEND"] = "torch"

import keras
import numpy as np

KIND, HOW, OUT = sys.argv[1:4]
WORDS = json.loads(sys.argv[4]) if len(sys.argv) > 4 else {}
BATCH, EPOCHS = int(WORDS.get("batch", 16)), int(WORDS.get("epochs", 3))
keras.config.set_floatx(WORDS.get("floatx", "float32"))
keras.utils.set_random_seed(0)
chance = np.random.default_rng(1)
layers = keras.layers


def arrays(rows: int = 70, width: int = 6) -> tuple[np.ndarray, np.ndarray]:
    x = chance.normal(size=(rows, width)).astype("float32")
    return x, (x[:, 0] + x[:, 1] * x[:, 2] > 0).astype("int32") + (x[:, 3] > 1)


def optimizer() -> keras.optimizers.Optimizer:
    given = WORDS.get("optimizer", {"name": "Adam", "learning_rate": 0.01})
    options = {k: v for k, v in given.items() if k not in ("name", "schedule")}
    if "schedule" in given:
        schedule = getattr(keras.optimizers.schedules, given["schedule"]["name"])
        options["learning_rate"] = schedule(**given["schedule"]["options"])
    return getattr(keras.optimizers, given["name"])(**options)


def dense() -> dict[str, object]:
    """A classifier with a regularizer, an activity regularizer, weights of rows, and metrics of several kinds."""
    model = keras.Sequential(
        [
            layers.Input((6,)),
            layers.Dense(
                8, activation="tanh", kernel_regularizer="l2", kernel_constraint=keras.constraints.MaxNorm(1.5)
            ),
            layers.Dense(8, activation="relu", activity_regularizer=keras.regularizers.L2(1e-2)),
            layers.Dense(3),
        ]
    )
    model.compile(
        optimizer(),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy", keras.metrics.MeanIoU(3, sparse_y_pred=False, name="iou")],
        weighted_metrics=[keras.metrics.SparseCategoricalCrossentropy(from_logits=True, name="entropy")],
    )
    x, y = arrays()
    weights = chance.uniform(0.5, 2.0, size=70).astype("float32")
    return {"model": model, "train": (x[:50], y[:50], weights[:50]), "test": (x[50:], y[50:], weights[50:])}


def norms() -> dict[str, object]:
    """BatchNormalization and Dropout."""
    rate = float(WORDS.get("dropout", 0.3))
    model = keras.Sequential(
        [
            layers.Input((6,)),
            layers.Dense(8, use_bias=False),
            layers.BatchNormalization(momentum=0.8),
            layers.ReLU(),
            layers.Dropout(rate, seed=3),
            layers.GaussianNoise(0.1 if rate else 0.0),
            layers.Dense(3),
        ]
    )
    model.compile(optimizer(), keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
    x, y = arrays()
    return {"model": model, "train": (x[:48], y[:48]), "test": (x[48:], y[48:])}


def outputs() -> dict[str, object]:
    """Two inputs and two outputs with losses, weights and metrics of their own."""
    first, second = layers.Input((6,), name="first"), layers.Input((4,), name="second")
    joined = layers.Concatenate()([layers.Dense(5, activation="tanh")(first), second])
    kind = layers.Dense(3, name="kind")(joined)
    size = layers.Dense(1, name="size")(joined)
    model = keras.Model({"first": first, "second": second}, {"kind": kind, "size": size})
    model.compile(
        optimizer(),
        {"kind": keras.losses.SparseCategoricalCrossentropy(from_logits=True), "size": "mse"},
        loss_weights={"kind": 0.7, "size": 0.3},
        metrics={"kind": ["accuracy"], "size": [keras.metrics.RootMeanSquaredError(), keras.metrics.R2Score()]},
    )
    x, y = arrays()
    more = chance.normal(size=(70, 4)).astype("float32")
    inputs, targets = {"first": x, "second": more}, {"kind": y, "size": more.sum(1, keepdims=True)}
    train = tuple({k: v[:50] for k, v in one.items()} for one in (inputs, targets))
    test = tuple({k: v[50:] for k, v in one.items()} for one in (inputs, targets))
    return {"model": model, "train": train, "test": test}


def masked() -> dict[str, object]:
    """Sequences of other lengths, whose loss is a mean over the entries that are not masked."""
    model = keras.Sequential(
        [
            layers.Input((7,), dtype="int32"),
            layers.Embedding(20, 6, mask_zero=True),
            layers.GRU(5, return_sequences=True),
            layers.Dense(20),
        ]
    )
    model.compile(
        optimizer(), keras.losses.SparseCategoricalCrossentropy(from_logits=True), weighted_metrics=["accuracy"]
    )
    x = chance.integers(1, 20, size=(60, 7)).astype("int32")
    for number, row in enumerate(x):
        row[2 + number % 6 :] = 0
    y = (x * 7 + 3) % 20
    return {"model": model, "train": (x[:48], y[:48]), "test": (x[48:], y[48:])}


class Batches(keras.utils.PyDataset):
    """Batches of another size than the global batch."""

    def __init__(self, x: np.ndarray, y: np.ndarray) -> None:
        super().__init__()
        self.x, self.y = x, y

    def __len__(self) -> int:
        return (len(self.x) + 5) // 6

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        return self.x[index * 6 : index * 6 + 6], self.y[index * 6 : index * 6 + 6]


def callbacks() -> list[keras.callbacks.Callback]:
    made: list[keras.callbacks.Callback] = []
    if "patience" in WORDS:
        made.append(keras.callbacks.EarlyStopping("val_loss", patience=WORDS["patience"], restore_best_weights=True))
    if "files" in WORDS:
        made.append(keras.callbacks.CSVLogger(f"{OUT}.csv"))
        made.append(keras.callbacks.ModelCheckpoint(f"{OUT}.weights.h5", save_best_only=True, save_weights_only=True))
        made.append(keras.callbacks.ModelCheckpoint(f"{OUT}.keras"))
    if "halve" in WORDS:
        made.append(keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.5 if epoch else rate))
        made.append(keras.callbacks.ReduceLROnPlateau("val_loss", factor=0.5, patience=1))
    if "stop_at" in WORDS:
        seen = []

        def count(batch: int, logs: dict[str, float]) -> None:
            seen.append(logs["loss"])
            made[-1].model.stop_training = len(seen) >= WORDS["stop_at"]

        made.append(keras.callbacks.LambdaCallback(on_train_batch_end=count))
    return made


case = {"dense": dense, "norms": norms, "outputs": outputs, "masked": masked}[KIND]()
model, train, test = case["model"], case["train"], case["test"]
options = {"epochs": EPOCHS, "shuffle": bool(WORDS.get("shuffle", False)), "callbacks": callbacks()}
options |= WORDS.get("fit", {})
if "class_weight" in WORDS:
    options["class_weight"] = {int(k): v for k, v in WORDS["class_weight"].items()}
    train, test = train[:2], test[:2]
inputs = dict(zip(("x", "y", "sample_weight"), train, strict=False))
validation = {} if "validation_split" in options else {"validation_data": test}
if HOW == "plain":
    history = model.fit(
        **inputs, batch_size=BATCH, validation_batch_size=len(test[1]), verbose=0, **validation, **options
    )
    evaluated = model.evaluate(*test[:2], batch_size=64, verbose=0, return_dict=True)
    predicted = model.predict(test[0], verbose=0)
    main = True
else:
    import paceline

    if WORDS.get("data") == "batches":
        inputs = {"x": Batches(*train[:2])}
    elif WORDS.get("data") == "torch":
        import torch

        inputs = {"x": torch.utils.data.TensorDataset(*map(torch.as_tensor, train))}
    trainer = paceline.keras.trainer(model, global_batch=BATCH, plan=WORDS.get("plan"))
    history = trainer.fit(**inputs, **validation, **options)
    evaluated = trainer.evaluate(*test[:2], return_dict=True)
    predicted = trainer.predict(test[0])
    main = trainer.main
if main:
    result = {
        "history": {k: np.asarray(v).tolist() for k, v in history.history.items()},
        "epochs": history.epoch,
        "weights": {f"{n} {v.path}": v.numpy().tolist() for n, v in enumerate(model.weights) if "seed" not in v.path},
        "evaluated": {k: np.asarray(v).tolist() for k, v in evaluated.items()},
        "predicted": np.concatenate([one.ravel() for one in keras.tree.flatten(predicted)]).tolist(),
        "iterations": int(model.optimizer.iterations),
        "rate": float(model.optimizer.learning_rate),
    }
    Path(f"{OUT}.json").write_text(json.dumps(result))
