"""Cross-validation: one trainer per fold, each trained by all workers, and its memory given back afterwards.

python examples/cross_validation.py                 # one worker
paceline run --workers 2 examples/cross_validation.py
"""

import torch
import torch.nn.functional as F
from sklearn.datasets import load_breast_cancer
from torch import nn
from torch.utils.data import Subset, TensorDataset

import paceline

FOLDS = 5

values, labels = load_breast_cancer(return_X_y=True)
values = torch.tensor(values, dtype=torch.float32)
data = TensorDataset((values - values.mean(0)) / values.std(0), torch.tensor(labels))
fold_of = torch.randperm(len(data), generator=torch.Generator().manual_seed(0)) % FOLDS


def accuracy(output, batch):
    return {"accuracy": ((output.argmax(1) == batch[1]).sum(), len(output))}


scores = []
for fold in range(FOLDS):
    training = Subset(data, (fold_of != fold).nonzero().flatten().tolist())
    held_out = Subset(data, (fold_of == fold).nonzero().flatten().tolist())
    trainer = paceline.Trainer(
        model=lambda: nn.Sequential(nn.Linear(30, 32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 2)),
        loss=lambda output, batch: F.cross_entropy(output, batch[1]),
        optimizer=lambda params: torch.optim.AdamW(params, lr=5e-3),
        global_batch=64,
        seed=fold,
    )
    for _ in trainer.steps(training, epochs=20):
        pass
    result = trainer.evaluate(held_out, accuracy)
    scores.append(result["accuracy"])
    print(f"fold {fold}: accuracy {result['accuracy']:.3f} on {result['n']} rows")
    trainer.close()  # a checkpoint then holds the last weights of this fold, and no optimizer

mean = sum(scores) / FOLDS
deviation = (sum((score - mean) ** 2 for score in scores) / (FOLDS - 1)) ** 0.5
print(f"accuracy {mean:.3f} +- {deviation:.3f} over {FOLDS} folds")
