"""Trains an image classifier with augmentation, keeps the best checkpoint, and stops when accuracy no longer improves.

paceline run --workers 2 --run-dir runs/classifier examples/image_classifier.py
paceline export runs/classifier best.safetensors --best     # the weights with the best accuracy
python examples/image_classifier.py best.safetensors        # load them and classify
"""

import sys

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import Dataset

import paceline

EPOCHS, PATIENCE = 60, 8


class Digits(Dataset):
    """8x8 pixel images of handwritten digits. Augmented images are shifted by up to one pixel, and noisy."""

    def __init__(self, held_out, augment=False):
        images, labels = load_digits(return_X_y=True)
        rows = (torch.arange(len(labels)) % 5 == 0) == held_out  # every fifth image is held out
        self.images = torch.tensor(images, dtype=torch.float32).reshape(-1, 1, 8, 8)[rows] / 16
        self.labels = torch.tensor(labels)[rows]
        self.augment = augment

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, row):
        image = self.images[row]
        if self.augment:  # torch's generator is seeded by the epoch and the row: any number of workers draws the same
            down, right = torch.randint(0, 3, (2,)).tolist()
            image = F.pad(image, (1, 1, 1, 1))[:, down : down + 8, right : right + 8]
            image = image + 0.05 * torch.randn_like(image)
        return image, self.labels[row]


def net():
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1, bias=False),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3, padding=1, bias=False),
        nn.BatchNorm2d(64),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Dropout(0.3),
        nn.Linear(64 * 2 * 2, 10),
    )


def accuracy(output, batch):
    return {"accuracy": ((output.argmax(1) == batch[1]).sum(), len(output))}


def train():
    training, held_out = Digits(held_out=False, augment=True), Digits(held_out=True)
    trainer = paceline.Trainer(
        model=net,
        loss=lambda output, batch: F.cross_entropy(output, batch[1], label_smoothing=0.05),
        optimizer=lambda params: torch.optim.AdamW(params, lr=3e-3, weight_decay=0.01),
        global_batch=96,
    )
    trainer.keep_best("accuracy")
    trainer.early_stop("accuracy", patience=PATIENCE, mode="max")
    for report in trainer.steps(training, epochs=EPOCHS):
        if report.epoch_end:
            trainer.evaluate(held_out, accuracy)
    print(f"best accuracy {trainer.best.value:.2%}, last epoch {trainer.epoch + 1} of {EPOCHS}")


def classify(file):
    model = net()
    model.load_state_dict(load_file(file))
    model.eval()
    held_out = Digits(held_out=True)
    with torch.no_grad():
        right = (model(held_out.images).argmax(1) == held_out.labels).sum().item()
    print(f"{right} of {len(held_out)} held-out digits are classified correctly")


if __name__ == "__main__":
    classify(sys.argv[1]) if len(sys.argv) > 1 else train()
