"""Classifies handwritten digits with a small CNN.

paceline run --workers 2 --run-dir runs/image with_paceline.py
"""

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset

import paceline

images, labels = load_digits(return_X_y=True)
images = torch.tensor(images, dtype=torch.float32).reshape(-1, 1, 8, 8) / 16
labels = torch.tensor(labels)
train = TensorDataset(images[360:], labels[360:])
test = TensorDataset(images[:360], labels[:360])


def net():
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.BatchNorm2d(64),
        nn.ReLU(),
        nn.Flatten(),
        nn.Dropout(0.3),
        nn.Linear(1024, 10),
    )


def accuracy(output, batch):
    return {"accuracy": ((output.argmax(1) == batch[1]).sum(), len(output))}


trainer = paceline.Trainer(
    model=net,
    loss=lambda output, batch: F.cross_entropy(output, batch[1]),
    optimizer=lambda params: torch.optim.AdamW(params, lr=3e-3),
    schedule=paceline.cosine(warmup=20),
    global_batch=64,
)
trainer.keep_best("accuracy")
trainer.early_stop("accuracy", patience=4, mode="max")
for report in trainer.steps(train, epochs=20):
    if report.epoch_end:
        result = trainer.evaluate(test, accuracy)
        print(f"epoch {report.epoch}: {report.loss:.4f} {result['accuracy']:.4f}")
trainer.load_best()
trainer.export("digits.safetensors")
