"""Two trainers whose models normalise and run inside of each other's loss. Usage: dcgan.py OUT

The last worker writes OUT.safetensors and OUT.json: what the others end with is the business of other tests.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from cases import rows
from public import fool, judge, noise, real_and_fake, sgd
from safetensors.torch import save_file
from torch import nn

import paceline


class Generator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(3, 8, bias=False),
            nn.BatchNorm1d(8),
            nn.Tanh(),
            nn.Linear(8, 10, bias=False),
            nn.BatchNorm1d(10, momentum=None),
        )

    def forward(self, drawn: torch.Tensor) -> torch.Tensor:
        return self.layers(drawn)


class Counting(nn.Linear):
    def __init__(self, inside: int, outside: int) -> None:
        super().__init__(inside, outside)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += self.training
        return super().forward(x)


class Discriminator(nn.Module):
    """Normalises twice: with a moving and with a cumulative average."""

    def __init__(self, *, counting: bool = False) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(10, 12, bias=False), nn.BatchNorm1d(12, momentum=0.3), nn.LeakyReLU(0.2),
            nn.BatchNorm1d(12, momentum=None),
            (Counting if counting else nn.Linear)(12, 1),
        )  # fmt: skip

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


class Plain(nn.Module):
    """A generator that could be merged, were it not for the discriminator."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 10)

    def forward(self, drawn: torch.Tensor) -> torch.Tensor:
        return self.layer(drawn)


def in_training(discriminator: nn.Module) -> Callable[[Any, Any], torch.Tensor]:
    return lambda output, batch: nn.functional.softplus(-discriminator(output)).mean()


def at_rest(discriminator: nn.Module) -> Callable[[Any, Any], torch.Tensor]:
    """In eval mode for the call only."""

    def loss(output: torch.Tensor, batch: Any) -> torch.Tensor:
        found = fool(discriminator)(output, batch)
        discriminator.train()
        return found

    return loss


LOSSES = {"in training": in_training, "at rest": at_rest}
GENERATORS = {"generator": Generator, "plain": Plain}


def share_of(team: Any) -> slice:
    """Whole micro-batches of noise, so that they are the same ones on any number of workers."""
    return slice(4 * (3 * team.rank // team.size), 4 * (3 * (team.rank + 1) // team.size))


def train(generator: str, loss: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    share = share_of(paceline.join())
    g = paceline.Trainer(
        lambda: GENERATORS[generator]().double(),
        lambda *both: LOSSES[loss](d.model)(*both),
        sgd,
        forward=lambda model, batch: model(batch),
        plan="micro=4",
    )
    forward = real_and_fake(g.model)
    d = paceline.Trainer(lambda: Discriminator().double(), judge, sgd, 16, forward=forward, plan="micro=4")
    losses = []
    for report in d.steps(rows(6, 48, 10), epochs=5):
        losses += [report.loss, g.step(noise(report.step)[share]).loss]
    tensors = {f"d.{name}": value for name, value in d.model.state_dict().items()}
    return losses, tensors | {f"g.{name}": value for name, value in g.model.state_dict().items()}


def other_buffers() -> str | None:
    """A discriminator whose other buffers change wherever it runs in training mode."""
    team = paceline.join()
    d = paceline.Trainer(lambda: Discriminator(counting=True).double(), judge, sgd, 16)
    g = paceline.Trainer(lambda: Generator().double(), in_training(d.model), sgd, forward=lambda m, b: m(b))
    before = {name: value.clone() for name, value in d.model.state_dict().items()}
    try:
        g.step(noise(1)[share_of(team)])
    except paceline.PacelineError as error:
        assert all(torch.equal(value, before[name]) for name, value in d.model.state_dict().items())
        return f"{type(error).__name__}: {error}"
    return None


if __name__ == "__main__":
    values: dict[str, Any] = {}
    tensors = {}
    for generator in GENERATORS:
        for loss in LOSSES:
            values[f"{generator}, {loss}"], state = train(generator, loss)
            tensors |= {f"{generator}, {loss}/{name}": value.clone() for name, value in state.items()}
    values["refused"] = other_buffers()
    if paceline.join().rank == paceline.join().size - 1:
        out = Path(sys.argv[1])
        save_file(tensors, out.with_suffix(".safetensors"))
        out.with_suffix(".json").write_text(json.dumps(values))
