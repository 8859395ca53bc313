"""`schedule=paceline.plateau(name)`: at each step the learning rate of torch's ReduceLROnPlateau in a loop by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from alone import trainer
from by_hand import Plain, built, grid
from cases import rows
from launching import train_basics
from oracle import apart
from safetensors.torch import load_file
from torch.optim.lr_scheduler import ReduceLROnPlateau

from paceline import plateau
from paceline.errors import UsageError

OPTIONS = {"factor": 0.5, "patience": 1, "threshold": 0.02, "cooldown": 1, "min_lr": 0.01}
EVERY, STEPS = 2, 24
SCRIPT = f"""
import json
from pathlib import Path
rest = TensorDataset(x[:36], data.tensors[1][:36])
def metric(o, b):
    return {{"loss": (F.cross_entropy(o, b[1], reduction="sum"), len(o))}}
t = make(plan=None, optimizer=lambda params: torch.optim.SGD(params, lr=0.6, momentum=0.9),
    schedule=paceline.plateau("loss", **{OPTIONS}))
t.evaluate(rest, metric)
for report in t.steps(data, count={STEPS}):
    t.state.setdefault("rates", []).append(report.lr)
    if report.step % {EVERY} == 0:
        found = t.evaluate(rest, metric)
        if t.main:
            t.log(**found)
if t.main:
    Path("rates.json").write_text(json.dumps(t.state["rates"]))
t.export("out.safetensors")
"""
SCRIPT = SCRIPT.replace("make(plan=None, optimizer=", "paceline.Trainer(net, cross_entropy, ").replace(
    "schedule=paceline.plateau", "global_batch=24, schedule=paceline.plateau"
)


def by_hand() -> tuple[list[float], dict[str, torch.Tensor]]:
    """Plain PyTorch: the rate of each step, and the weights."""
    import basics

    model = built(basics.net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.6, momentum=0.9)
    scheduler = ReduceLROnPlateau(optimizer, **OPTIONS)
    plain = Plain(model, basics.cross_entropy, [optimizer])

    def look() -> None:
        with torch.no_grad():
            scheduler.step(F.cross_entropy(model(basics.x[:36]), basics.data.tensors[1][:36]).item())

    look()
    for number, micro_batches in enumerate(grid(basics.data, 24, count=STEPS), 1):
        plain.step(micro_batches)
        if number % EVERY == 0:
            look()
    return plain.rates, dict(model.state_dict())


CELLS = [
    (2, "shard=2 zero=2"),
    *(
        pytest.param(*cell, marks=pytest.mark.slow)
        for cell in [
            (1, ""),
            (2, ""),
            (3, ""),
            (2, "server=1"),
            (3, "server=2"),
            (2, "shard=2 zero=1"),
            (2, "shard=2 zero=3"),
        ]
    ),
]


@pytest.mark.parametrize(("workers", "plan"), CELLS)
def test_plateau_schedule_has_the_learning_rates_of_plain_pytorch(workers: int, plan: str, tmp_path: Path) -> None:
    done = train_basics(tmp_path, SCRIPT, workers, *(["--plan", plan] if plan else []))
    same(tmp_path)
    assert "\nlearning rate changed from 0.6 to 0.3 after step " in done.stderr


@pytest.mark.parametrize(
    ("first", "then", "stops"),
    [
        ((2, "server=1"), (1, ""), ["12"]),
        *(
            pytest.param(*pair, ["7", "12"], marks=pytest.mark.slow)
            for pair in [
                ((2, "server=1"), (1, "")),
                ((1, ""), (3, "")),
                ((3, ""), (2, "shard=2 zero=3")),
                ((2, "shard=2 zero=1"), (2, "server=1")),
            ]
        ),
    ],
)
def test_plateau_schedule_resumes_under_another_plan(
    first: tuple[int, str], then: tuple[int, str], stops: list[str], tmp_path: Path
) -> None:
    """Just after the step whose evaluation moved the rates, or before it."""
    for (workers, plan), steps in zip([first, then, then], [*stops, ""], strict=False):
        more = [*(["--plan", plan] if plan else []), *(["--steps", steps] if steps else [])]
        train_basics(tmp_path, SCRIPT, workers, *more)
    same(tmp_path)


@pytest.mark.parametrize("chaos", ["kill:1@10.loading", pytest.param("kill:0@8.applied", marks=pytest.mark.slow)])
def test_plateau_schedule_through_a_kill(chaos: str, tmp_path: Path) -> None:
    """The one that comes back takes the rates over."""
    train_basics(tmp_path, SCRIPT, 3, chaos=chaos)
    same(tmp_path)


def same(folder: Path) -> None:
    rates, weights = by_hand()
    assert json.loads((folder / "rates.json").read_text()) == pytest.approx(rates, rel=1e-12)
    assert len(set(rates)) == 3
    assert apart(load_file(folder / "out.safetensors"), weights) <= 1e-12


# ---- alone in a process

DATA = rows(1, 45, 10)


def values(found: list[float]) -> Any:
    return lambda output, batch: {"loss": (found[0] * len(output), len(output))}


@pytest.mark.usefixtures("run")
def test_plateau_schedule_counts_a_value_evaluated_and_logged_once() -> None:
    mine = trainer(schedule=plateau("loss", patience=0))
    (scheduler,) = mine._job.schedulers
    for report in mine.steps(DATA, count=3):
        found = mine.evaluate(DATA, values([0.5]))
        mine.log(**found)
        assert scheduler.last_epoch == report.step
    mine.log(loss=0.75)
    assert scheduler.last_epoch == 4
    mine._take_over({"loss": 0.75})  # with the state of a worker that has it
    mine.log(other=0.75)
    assert scheduler.last_epoch == 4


@pytest.mark.usefixtures("run")
def test_plateau_schedule_follows_with_each_optimizer() -> None:
    from cases import two_optimizers

    mine = trainer(optimizer=two_optimizers, schedule=plateau("accuracy", mode="max", patience=0, factor=0.1))
    before = [optimizer.param_groups[0]["lr"] for optimizer in mine._job.optimizers]
    for accuracy in (0.5, 0.6, 0.59):
        mine.log(accuracy=accuracy)
    after = [optimizer.param_groups[0]["lr"] for optimizer in mine._job.optimizers]
    assert after == pytest.approx([rate * 0.1 for rate in before])


def test_plateau_schedule_names_a_value_that_is_never_reported(run: Any, capsys: pytest.CaptureFixture[str]) -> None:
    mine = trainer(schedule=plateau("val_loss"))
    list(mine.steps(DATA))
    mine.evaluate(DATA, values([0.5]))
    run.close(failed=False)
    said = capsys.readouterr().err
    follows = "schedule=paceline.plateau('val_loss')"
    assert (
        f"{follows} follows 'val_loss', but evaluate() reported 'loss': until it is reported, the learning rate stays\n"
        in said
    )
    assert (
        f"{follows} never changed the learning rate: no evaluate() or log() reported 'val_loss'; write"
        ' trainer.evaluate(dataset, metric) with a metric that returns {"val_loss": (sum, count)}\n' in said
    )


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (
            lambda: plateau(3),  # type: ignore[arg-type]
            "plateau() needs the name of a value that evaluate() or log() reports, got 3; "
            'use for example plateau("loss")',
        ),
        (
            lambda: plateau("loss", mode="best"),
            "ReduceLROnPlateau rejects the options of plateau('loss'): mode best is unknown!; use only its options "
            "mode, factor, patience, threshold, threshold_mode, cooldown, min_lr, eps",
        ),
        (
            lambda: plateau("loss", factor=2.0),
            "ReduceLROnPlateau rejects the options of plateau('loss'): Factor should be < 1.0.; use only its options "
            "mode, factor, patience, threshold, threshold_mode, cooldown, min_lr, eps",
        ),
    ],
)
def test_plateau_schedule_refuses_wrong_options(make: Any, text: str) -> None:
    with pytest.raises(UsageError) as caught:
        make()
    assert str(caught.value) == text


@pytest.mark.usefixtures("run")
def test_plateau_schedule_refuses_a_value_that_is_no_number() -> None:
    mine = trainer(schedule=plateau("loss"))
    with pytest.raises(UsageError) as caught:
        mine.log(loss="low")
    assert (
        str(caught.value)
        == "schedule=paceline.plateau('loss') follows 'loss', which is 'low', not a number; report a number of that"
        " name with evaluate() or log()"
    )
