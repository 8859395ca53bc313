"""A small CNN on scikit-learn's handwritten digits: BatchNorm, dropout, over 97 % on held-out ones in ten seconds.

python examples/digits.py                           # one worker
paceline run --workers 2 examples/digits.py         # two, and the same training
"""

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset

import paceline

EPOCHS, BATCH = 15, 128


def digits():
    """1797 images of 8x8 pixels; every fifth is held out."""
    images, labels = load_digits(return_X_y=True)
    images = torch.tensor(images, dtype=torch.float32).reshape(-1, 1, 8, 8) / 16
    labels = torch.tensor(labels)
    held_out = torch.arange(len(labels)) % 5 == 0
    return TensorDataset(images[~held_out], labels[~held_out]), TensorDataset(images[held_out], labels[held_out])


def block(inputs, outputs):
    return nn.Sequential(nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU())


def net():
    return nn.Sequential(
        block(1, 32),
        block(32, 32),
        nn.MaxPool2d(2),
        block(32, 64),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Dropout(0.3),
        nn.Linear(64 * 2 * 2, 10),
    )


def accuracy(output, batch):
    return {"accuracy": ((output.argmax(1) == batch[1]).sum(), len(output))}


training, held_out = digits()
trainer = paceline.Trainer(
    model=net,
    loss=lambda output, batch: F.cross_entropy(output, batch[1]),
    optimizer=lambda params: torch.optim.AdamW(params, lr=3e-3, weight_decay=0.01),
    global_batch=BATCH,
    schedule=paceline.linear(),
)
for report in trainer.steps(training, epochs=EPOCHS):
    if report.epoch_end:
        trainer.log(**trainer.evaluate(held_out, accuracy))

result = trainer.evaluate(held_out, accuracy)
print(f"accuracy on {result['n']} held-out digits: {result['accuracy']:.2%}")
trainer.export("digits.safetensors")
