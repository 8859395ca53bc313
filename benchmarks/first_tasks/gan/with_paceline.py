"""Trains a GAN that draws handwritten digits.

paceline run --workers 2 --run-dir runs/gan with_paceline.py
"""

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn

import paceline

images = torch.tensor(load_digits().data, dtype=torch.float32) / 8 - 1


def draw(model, batch):
    return model(torch.randn(len(batch), 16, device=batch.device))


def judge(model, batch):
    with torch.no_grad():
        drawn = draw(generator.model, batch)
    return F.softplus(-model(batch)) + F.softplus(model(drawn))


generator = paceline.Trainer(
    model=lambda: nn.Sequential(nn.Linear(16, 128), nn.ReLU(), nn.Linear(128, 64)),
    forward=draw,
    loss=lambda drawn, batch: F.softplus(-discriminator.model(drawn)).mean(),
    optimizer=lambda params: torch.optim.Adam(params, lr=1e-3, betas=(0.5, 0.999)),
    global_batch=64,
)
discriminator = paceline.Trainer(
    model=lambda: nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 1)),
    forward=judge,
    loss=lambda losses, batch: losses.mean(),
    optimizer=lambda params: torch.optim.Adam(params, lr=1e-3, betas=(0.5, 0.999)),
    global_batch=64,
)
train, test = images[360:], images[:360]
steps = zip(discriminator.steps(train, epochs=20), generator.steps(train, epochs=20))
for _, drawn in steps:
    if drawn.epoch_end:
        result = discriminator.evaluate(test)
        print(f"epoch {drawn.epoch}: {drawn.loss:.4f} {result['loss']:.4f}")
generator.export("generator.safetensors")
