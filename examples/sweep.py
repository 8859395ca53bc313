"""A search for the best learning rate and dropout with Optuna. Each trial is a training with two workers.

python examples/sweep.py                            # `paceline.launch` starts the workers of each trial
"""

import optuna
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset

import paceline

TRIALS, WORKERS = 6, 2


def train(lr, dropout):
    """Trains a small network, on each worker. Returns its accuracy on held-out digits."""
    images, labels = load_digits(return_X_y=True)
    images, labels = torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels)
    trainer = paceline.Trainer(
        model=lambda: nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Dropout(dropout), nn.Linear(64, 10)),
        loss=lambda output, batch: F.cross_entropy(output, batch[1]),
        optimizer=lambda params: torch.optim.AdamW(params, lr=lr),
        global_batch=128,
    )
    for _ in trainer.steps(TensorDataset(images[360:], labels[360:]), epochs=4):
        pass
    held_out = TensorDataset(images[:360], labels[:360])
    return trainer.evaluate(held_out, lambda o, b: {"accuracy": ((o.argmax(1) == b[1]).sum(), len(o))})["accuracy"]


def objective(trial):
    lr = trial.suggest_float("lr", 1e-4, 1e-1, log=True)
    dropout = trial.suggest_float("dropout", 0.0, 0.5)
    accuracy = paceline.launch(train, lr, dropout, workers=WORKERS)
    print(f"trial {trial.number}: lr {lr:.1e}, dropout {dropout:.2f}: accuracy {accuracy:.3f}", flush=True)
    return accuracy


if __name__ == "__main__":
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(direction="maximize", sampler=optuna.samplers.TPESampler(seed=1))
    study.optimize(objective, n_trials=TRIALS)
    print(f"best: accuracy {study.best_value:.3f} with lr {study.best_params['lr']:.1e}")
