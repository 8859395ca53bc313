"""Models of which a module or a parameter has several names, each trained a little: `sharing.py NAME COUNT`."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import nn
from torch.nn.utils import prune
from torch.utils.data import TensorDataset

import paceline

WIDTH, CLASSES, ROWS, BATCH, SEED = 12, 4, 48, 24, 3
numbers = torch.Generator().manual_seed(1)
x = torch.randn(ROWS, WIDTH, generator=numbers, dtype=torch.float64)
y = torch.randn(ROWS, CLASSES, generator=numbers, dtype=torch.float64)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 24), nn.Linear(24, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Net(nn.Module):
    layers: Any

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(6))
        self.head = nn.Linear(WIDTH, CLASSES)
        self.share()

    def share(self) -> None:
        pass

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Module(Net):
    """A module that two layers have."""

    def share(self) -> None:
        self.layers[3].up = self.layers[0].up


class Parameter(Net):
    def share(self) -> None:
        self.layers[3].up.weight = self.layers[0].up.weight


class All(Net):
    """A module that all layers have."""

    def share(self) -> None:
        for layer in self.layers:
            layer.up = self.layers[0].up


class Twice(Net):
    """A layer that is in the list twice."""

    def share(self) -> None:
        self.layers[4] = self.layers[0]


class Alias(Net):
    """Second names for a layer, for all of one kind, and for a buffer."""

    def share(self) -> None:
        self.first = self.layers[0]
        self.ups = nn.ModuleList(layer.up for layer in self.layers)
        self.downs = nn.ParameterList(layer.down.weight for layer in self.layers)
        self.register_buffer("scale", torch.ones(WIDTH))
        self.layers[2].register_buffer("scale", self.scale)


class Held(Net):
    """Parameters that a list holds, of which the forward makes a penalty."""

    def share(self) -> None:
        self.kept = [layer.up.weight for layer in self.layers]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + 0.01 * sum(weight.square().sum() for weight in self.kept)


class Computed(Net):
    """Weights that are computed from others: by a parametrization, and by hooks before each forward."""

    def share(self) -> None:
        nn.utils.parametrizations.weight_norm(self.layers[0].up)
        prune.l1_unstructured(self.layers[1].up, "weight", 0.5)


MODELS = {kind.__name__: kind for kind in (Module, Parameter, All, Twice, Alias, Held, Computed)}


def loss(output: torch.Tensor, batch: Any) -> torch.Tensor:
    return (output - batch[1]).square().mean()


def optimizer(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW([param for _, param in params], lr=0.01)


def main(name: str, count: int) -> None:
    made = lambda: MODELS[name]().double()
    trainer = paceline.Trainer(made, loss, optimizer, global_batch=BATCH, seed=SEED)
    for _ in trainer.steps(TensorDataset(x, y), count=count):
        pass
    trainer.export("out.safetensors")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
