"""The guard around micro-batches is idle for a model that needs none, and notices when it is needed after all."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import paceline
from paceline.compute.batchnorm import put_back
from paceline.compute.microbatch_guard import WATCHED
from paceline.session.run import Run

LATE, STEPS = WATCHED + 4, WATCHED + 8  # the step in which a model begins to draw


@pytest.fixture(autouse=True)
def own_run() -> Iterator[None]:
    yield
    Run._current = None


class Scaled(torch.autograd.Function):
    """Its backward multiplies by a number that a function makes."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, factor: Callable[[], float]) -> torch.Tensor:
        ctx.factor = factor
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        return gradient * ctx.factor(), None


class DrawsLate(nn.Module):
    """Draws nothing at first; from step LATE on it draws from one generator, in its forward or its backward."""

    def __init__(self, generator: str, moment: str) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 1, dtype=torch.float64)
        self.draw = {"torch": lambda: float(torch.rand(())), "python": random.random, "numpy": np.random.rand}[
            generator
        ]
        self.moment, self.step = moment, 0

    def factor(self) -> float:
        return 1 + self.draw() if self.step >= LATE else 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layer(x)
        return y * self.factor() if self.moment == "forward" else Scaled.apply(y, self.factor)


def trained(generator: str, moment: str, may_idle: bool, rows: int) -> tuple[torch.Tensor, list[Any], list[bool]]:
    """The weights and the loss after each step, the script's own draws there, and whether the guard was idle then."""
    Run._current = None
    torch.manual_seed(5)
    model = DrawsLate(generator, moment)
    x = torch.linspace(-1, 1, 24, dtype=torch.float64).reshape(8, 3)
    data = TensorDataset(x, x.sum(1, keepdim=True))
    trainer = paceline.Trainer(
        model,
        lambda output, batch: ((output - batch[1]) ** 2).mean(),
        lambda params: torch.optim.SGD(params, lr=0.05),
        global_batch=8,
        plan=f"micro={rows}",
    )
    guard = trainer._replica.runner.guard
    guard.may_idle = may_idle
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    weights, draws, idle = [], [], []
    for report in trainer.steps(data, count=STEPS):
        model.step = report.step
        weights.append([*model.layer.weight.flatten().tolist(), report.loss])
        draws.append([random.random(), float(np.random.rand()), float(torch.rand(()))])
        idle.append(guard.idle)
    return torch.tensor(weights, dtype=torch.float64), draws, idle


FAST = {("torch", "forward", 8), ("torch", "backward", 2), ("python", "forward", 2), ("python", "backward", 8)}
FAST |= {("numpy", "forward", 8), ("numpy", "backward", 2)}


@pytest.mark.parametrize(
    ("generator", "moment", "rows"),
    [
        pytest.param(*cell, marks=() if cell in FAST else pytest.mark.slow)
        for cell in itertools.product(("torch", "python", "numpy"), ("forward", "backward"), (8, 2))
    ],
)
def test_idle_guard_notices_a_model_that_begins_to_draw_random_numbers(generator: str, moment: str, rows: int) -> None:
    expected, expected_draws, always = trained(generator, moment, may_idle=False, rows=rows)
    weights, draws, idle = trained(generator, moment, may_idle=True, rows=rows)
    assert not any(always)
    assert idle[WATCHED : LATE - 1] == [True] * (LATE - 1 - WATCHED)  # or nothing was tested
    assert not any(idle[LATE:])
    assert draws == expected_draws
    # How many micro-batches run together is decided by the clock, and moves the last digits.
    torch.testing.assert_close(weights, expected, rtol=1e-12, atol=1e-12)


def test_a_buffer_that_is_put_back_is_not_written_to_if_it_is_equal() -> None:
    """The backward of another micro-batch may need it: an embedding's needs the position ids of BERT."""
    table, ids = nn.Embedding(5, 2), torch.arange(4)
    total = table(ids).sum()
    put_back(ids, ids.clone(), ids._version)
    total.backward()
    assert table.weight.grad is not None
    put_back(ids, torch.tensor([3, 1]), ids._version)
    assert ids.tolist() == [3, 1]
