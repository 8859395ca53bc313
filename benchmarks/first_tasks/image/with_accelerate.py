"""Classifies handwritten digits with a small CNN.

accelerate launch --num_processes 2 with_accelerate.py
"""

import os

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, set_seed
from sklearn.datasets import load_digits
from torch import nn
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader, TensorDataset

images, labels = load_digits(return_X_y=True)
images = torch.tensor(images, dtype=torch.float32).reshape(-1, 1, 8, 8) / 16
labels = torch.tensor(labels)
train = TensorDataset(images[360:], labels[360:])
test = TensorDataset(images[:360], labels[:360])
train_loader = DataLoader(train, batch_size=64, shuffle=True)
test_loader = DataLoader(test, batch_size=64)

set_seed(0)
loading = DataLoaderConfiguration(split_batches=True)
accelerator = Accelerator(dataloader_config=loading)
model = nn.Sequential(
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
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
scheduler = OneCycleLR(optimizer, 3e-3, epochs=20, steps_per_epoch=len(train_loader))
model, optimizer, scheduler, train_loader, test_loader = accelerator.prepare(
    model, optimizer, scheduler, train_loader, test_loader
)

first, best, waited = 0, 0.0, 0
if os.path.isdir("runs/image"):
    first = 1 + max(int(name) for name in os.listdir("runs/image"))
    accelerator.load_state(f"runs/image/{first - 1}")
for epoch in range(first, 20):
    model.train()
    for x, y in train_loader:
        loss = F.cross_entropy(model(x), y)
        accelerator.backward(loss)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    model.eval()
    right = 0
    for x, y in test_loader:
        with torch.no_grad():
            guess = model(x).argmax(1)
        guess, y = accelerator.gather_for_metrics((guess, y))
        right += (guess == y).sum().item()
    accuracy = right / len(test)
    accelerator.print(f"epoch {epoch}: {loss.item():.4f} {accuracy:.4f}")
    accelerator.save_state(f"runs/image/{epoch}")
    waited += 1
    if accuracy > best:
        best, waited = accuracy, 0
        accelerator.save_model(model, "digits")
    if waited == 4:
        break
accelerator.end_training()
