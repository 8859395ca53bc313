"""Schedules with a name beside torch's own, and what they refuse."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from alone import trainer
from cases import rows
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR

import paceline
from paceline.errors import UsageError


def of_torch(after: Any, warmup: int, count: int) -> list[float]:
    """The learning rates of torch's warmup and what comes after it, from 1.0."""
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    scheduler = after(optimizer)
    if warmup:
        warm = LinearLR(optimizer, start_factor=1 / (warmup + 1), total_iters=warmup)
        scheduler = SequentialLR(optimizer, [warm, scheduler], [warmup])
    found = []
    for _ in range(count):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return found


@pytest.mark.parametrize(("steps", "warmup"), [(20, 0), (20, 6), (7, 6), (1, 0)])
def test_named_schedules_are_those_of_torch(steps: int, warmup: int) -> None:
    cosine = of_torch(lambda o: CosineAnnealingLR(o, steps - warmup, eta_min=0.1), warmup, steps + 1)
    linear = of_torch(lambda o: LinearLR(o, 1.0, 0.0, steps - warmup), warmup, steps + 1)
    np.testing.assert_allclose([paceline.cosine(steps, warmup, 0.1)(s) for s in range(steps + 1)], cosine, atol=1e-12)
    np.testing.assert_allclose([paceline.linear(steps, warmup)(s) for s in range(steps + 1)], linear, atol=1e-12)
    for factor in (paceline.cosine(steps, warmup, 0.1), paceline.linear(steps, warmup)):
        assert factor(steps + 5) == factor(steps)


def test_warmup_stable_decay_has_three_linear_parts() -> None:
    found = [paceline.wsd(steps=20, warmup=4, decay=5)(step) for step in range(25)]
    np.testing.assert_allclose(found, np.interp(range(25), [0, 4, 15, 20], [0.2, 1, 1, 0]), atol=1e-12)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (
            lambda: paceline.cosine(0),
            "steps=0 is not a valid number of steps for this schedule; use an integer of at least 1",
        ),
        (
            lambda: paceline.linear(10.0),
            "steps=10.0 is not a valid number of steps for this schedule; use an integer of at least 1",
        ),
        (
            lambda: paceline.linear(10, warmup=10),
            "warmup=10 is not a valid number of steps for this schedule; use an integer from 0 to 9",
        ),
        (
            lambda: paceline.wsd(10, warmup=4, decay=7),
            "decay=7 is not a valid number of steps for this schedule; use an integer from 1 to 6",
        ),
        (
            lambda: paceline.cosine(10, floor=1.5),
            "floor= must be a number from 0 to 1, got 1.5; pass a fraction of the learning rate",
        ),
    ],
)
def test_wrong_schedule_is_refused(make: Any, text: str) -> None:
    with pytest.raises(UsageError) as caught:
        make()
    assert str(caught.value) == text


@pytest.mark.usefixtures("run")
def test_trainer_follows_the_schedule_step_by_step() -> None:
    factor = paceline.wsd(6, warmup=2, decay=2)
    found = [report.lr for report in trainer(schedule=factor).steps(rows(1, 45, 10), count=6)]
    base = found[0] / factor(0)
    np.testing.assert_allclose(found, [base * factor(step) for step in range(6)], rtol=1e-12)


@pytest.mark.usefixtures("run")
@pytest.mark.parametrize(
    "make", [paceline.cosine, paceline.linear, lambda steps, warmup: paceline.wsd(steps, warmup, 3)]
)
def test_schedule_without_steps_spans_the_loop(make: Any) -> None:
    """Two epochs of three steps."""
    rates = [
        [report.lr for report in trainer(schedule=make(steps, warmup=2)).steps(rows(1, 45, 10), epochs=2)]
        for steps in (6, None)
    ]
    assert rates[0] == rates[1]
    assert len(rates[0]) == 6


ASKS = "pass steps= to the schedule"


@pytest.mark.usefixtures("run")
@pytest.mark.parametrize(
    ("train", "text"),
    [
        (
            lambda t: [[*t.steps(rows(1, 45, 10), epochs=1)] for _ in range(2)],
            f"schedule= has no steps=, and the training has several loops over steps(); {ASKS}",
        ),
        (
            lambda t: [*t.steps(iter(rows(1, 45, 10)), epochs=1)],
            f"schedule= has no steps=, and the training has no known number of steps; {ASKS}",
        ),
        (
            lambda t: t.step(rows(1, 4, 10)[:]),
            f"schedule= has no steps=, and the training has no known number of steps; {ASKS}",
        ),
        (
            lambda t: [*t.steps(rows(1, 45, 10), count=2)],
            "warmup=2 is not a valid number of steps for this schedule; use an integer from 0 to 1",
        ),
    ],
)
def test_schedule_without_steps_needs_the_length_of_one_loop(train: Any, text: str) -> None:
    with pytest.raises(UsageError) as caught:
        train(trainer(schedule=paceline.cosine(warmup=2)))
    assert str(caught.value) == text


def test_schedule_without_steps_is_no_function_of_the_step() -> None:
    with pytest.raises(UsageError) as caught:
        paceline.linear()(3)
    assert (
        str(caught.value) == "the schedule has no steps=, so its value depends on more than the step; pass steps= to it"
    )
