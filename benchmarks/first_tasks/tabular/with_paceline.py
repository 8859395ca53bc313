"""Classifies tumours by 30 measured values.

paceline run --workers 2 --run-dir runs/tabular with_paceline.py
"""

import torch
import torch.nn.functional as F
from sklearn.datasets import load_breast_cancer
from sklearn.model_selection import train_test_split
from sklearn.preprocessing import StandardScaler
from torch import nn
from torch.utils.data import TensorDataset

import paceline

features, labels = load_breast_cancer(return_X_y=True)
parts = train_test_split(
    StandardScaler().fit_transform(features), labels, random_state=0
)
x, x_test, y, y_test = (torch.tensor(part, dtype=torch.float32) for part in parts)


def accuracy(output, batch):
    right = (output > 0) == (batch[1] > 0)
    return {"accuracy": (right.sum(), len(right))}


trainer = paceline.Trainer(
    model=lambda: nn.Sequential(
        nn.Linear(30, 64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 1), nn.Flatten(0)
    ),
    loss=lambda output, batch: F.binary_cross_entropy_with_logits(output, batch[1]),
    optimizer=lambda params: torch.optim.AdamW(params, lr=3e-3),
    schedule=paceline.cosine(),
    global_batch=32,
)
trainer.keep_best("accuracy")
trainer.early_stop("accuracy", patience=5, mode="max")
for report in trainer.steps(TensorDataset(x, y), epochs=30):
    if report.epoch_end:
        result = trainer.evaluate(TensorDataset(x_test, y_test), accuracy)
        print(f"epoch {report.epoch}: {report.loss:.4f} {result['accuracy']:.4f}")
trainer.load_best()
trainer.export("tumours.safetensors")
