"""A global batch in which the loss counts nothing, as where no row has a label: a step that changes no weight."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
import torch
from alone import trainer
from cases import cross_entropy, rows
from launching import train_basics
from oracle import apart
from safetensors.torch import load_file

from paceline import sample_index, stream_seed
from paceline.base.journal import read_journal
from paceline.errors import LossError

SCRIPT = """
import math

labels = torch.ones(96)
for position in range(24, 48):  # the second of four steps in an epoch
    labels[paceline.sample_index(position, 96, 0, 0)] = 0.0
labels[[paceline.sample_index(position, 96, 0, 0) for position in range(72, 80)]] = 0.0  # and a part of the fourth


def loss(output, batch):
    return (F.cross_entropy(output, batch[1], reduction="none") * batch[2]).sum(), batch[2].sum()


for number, plan in enumerate(PLANS):
    trainer = paceline.Trainer(
        net, loss, lambda params: torch.optim.AdamW(params, lr=0.02), 24, schedule=lambda step: 1 / (1 + step),
        clip_norm=0.5, plan=plan or None,
    )
    for report in trainer.steps(TensorDataset(*data.tensors, labels), epochs=1):
        nothing = report.step == 2 and report.turn == 1
        assert math.isnan(report.loss) == nothing, report
        assert (report.grad_norm == 0) == nothing, report
    trainer.export(f"{number}.safetensors")
"""
LINE = "the loss of step 2 has a count of 0 over the whole global batch, so no weight was changed\n"


@functools.cache
def by_hand() -> dict[str, torch.Tensor]:
    import basics

    torch.manual_seed(stream_seed(0, 0, -1))
    model = basics.net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    x, y = basics.data.tensors
    for step in range(4):
        picked = [sample_index(position, 96, 0, 0) for position in range(24 * step, 24 * step + 24)]
        picked = picked[8:] if step == 3 else picked
        if step == 1:
            continue  # the schedule goes on
        optimizer.param_groups[0]["lr"] = 0.02 / (1 + step)
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x[picked]), y[picked]).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
    return dict(model.state_dict())


@pytest.mark.parametrize(
    ("workers", "plans"),
    [
        (2, ["data=2", "shard=2 zero=1"]),
        pytest.param(1, ["data=1"], marks=pytest.mark.slow),
        pytest.param(3, ["data=3"], marks=pytest.mark.slow),
        pytest.param(
            2,
            ["shard=2 zero=2", "shard=2 zero=3", "exact", "shard=2 zero=1 offload=cpu", "tensor=2"],
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_step_without_counted_rows_changes_no_weight(workers: int, plans: list[str], tmp_path: Path) -> None:
    """The optimizer rests, the schedule goes on, and a line says so."""
    done = train_basics(tmp_path, f"PLANS = {plans}\n{SCRIPT}", workers, "--max-restarts", "0")
    for number in range(len(plans)):
        assert apart(load_file(tmp_path / f"{number}.safetensors"), by_hand()) < 1e-12, plans[number]
    assert_told(tmp_path, done.stdout + done.stderr, len(plans))


SERVERS = [(2, "server=1"), (3, "server=2"), (2, "server=1 exact"), (2, "server=1 backup=1 window=1")]
SERVERS += [(1, "server=1 staleness=1 window=1"), (1, "local=1 every=1 outer=sgd:1")]


@pytest.mark.parametrize(
    ("workers", "plan"),
    [pytest.param(*cell, marks=[pytest.mark.slow] if at else []) for at, cell in enumerate(SERVERS)],
)
def test_a_step_without_counted_rows_changes_no_weight_of_a_parameter_server(
    workers: int, plan: str, tmp_path: Path
) -> None:
    done = train_basics(tmp_path, f"PLANS = ['']\n{SCRIPT}", workers, "--plan", plan)
    if "backup" not in plan:  # which drops rows
        assert apart(load_file(tmp_path / "0.safetensors"), by_hand()) < 1e-12
    assert_told(tmp_path, done.stdout + done.stderr, 1)


def assert_told(folder: Path, console: str, times: int) -> None:
    """The console and the journal have the line so many times."""
    assert console.count(LINE) == times
    notes = [entry["text"] for entry in read_journal(folder / "out") if entry["event"] == "note"]
    assert notes.count(LINE.strip()) == times


@pytest.mark.slow
@pytest.mark.parametrize(
    "plan", ["precision=fp16", "local=2 every=2", "local=2 every=2 fragments=2", "server=1 staleness=2 window=2"]
)
def test_a_step_without_counted_rows_does_not_end_the_run_under_any_plan(plan: str, tmp_path: Path) -> None:
    body = SCRIPT.replace("assert", "# assert")
    train_basics(tmp_path, f"PLANS = ['']\n{body}", 2, "--plan", plan)
    weights = load_file(tmp_path / "0.safetensors")
    assert all(tensor.isfinite().all() for tensor in weights.values())


@pytest.mark.slow
def test_a_resumed_run_passes_a_step_without_counted_rows(tmp_path: Path) -> None:
    """Stopped by its second step, in which nothing counts, and after it."""
    train_basics(tmp_path, f"PLANS = ['']\n{SCRIPT}", 2, "--steps", "1")
    train_basics(tmp_path, None, 2, "--steps", "1")
    train_basics(tmp_path, None, 1)
    assert apart(load_file(tmp_path / "0.safetensors"), by_hand()) < 1e-12


@pytest.mark.usefixtures("run")
def test_a_loss_count_below_zero_is_refused() -> None:
    mine = trainer(loss=lambda output, batch: (cross_entropy(output, batch), -1))
    with pytest.raises(LossError) as caught:
        list(mine.steps(rows(1, 45, 10)))
    said = "the loss returned -1 as the count of micro-batch 0 (rows 0-1 of epoch 0); return "
    assert str(caught.value).startswith(said)
