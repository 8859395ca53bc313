"""Epochs, early stopping, the best checkpoints and their weights: the same on any team, and after a resume."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from alone import trainer
from basics import net
from launching import SCRIPTS, paceline, train_basics
from safetensors.torch import load_file

import paceline as library
from paceline.checkpoint.inspect import inspect_run
from paceline.errors import CheckpointError, UsageError
from paceline.team.fault_injection import read_log

VALUES = "0.5", "0.4", "0.6", "0.45", "0.7", "0.3"  # the best before it stops is of epoch 1, the next best of epoch 3


def train(folder: Path, workers: int, *words: str, plan: str = "exact") -> None:
    options = ["--workers", str(workers), "--plan", plan, "--run-dir", "run", "--keep", "1", *words]
    paceline("run", *options, SCRIPTS / "epochs.py", "out", "3", *VALUES, cwd=folder)


def check_result(folder: Path, first: int = 1) -> None:
    """It stopped after epoch 4; the weights are those of epoch 1; the checkpoints of epochs 1 and 3 are kept."""
    seen = json.loads((folder / "out.json").read_text())
    assert seen == [[step, (step - 1) // 4, step % 4 == 0, 4] for step in range(first, 21)]
    best, expected = load_file(folder / "out.best.safetensors"), load_file(folder / "out.8.safetensors")
    assert all(torch.equal(best[name], expected[name]) for name in expected)
    contents = json.loads(inspect_run(folder / "run", as_json=True))
    assert {row["step"] for row in contents["checkpoints"]} == {8, 16, 20}
    assert [(mark["step"], mark["value"]) for mark in contents["best"]] == [(8, pytest.approx(0.4))]


def test_a_training_stops_early_and_keeps_its_best_weights(tmp_path):
    train(tmp_path, 2)
    check_result(tmp_path)
    model = library.load(tmp_path / "run", net(), best=True)
    assert not model.training
    expected = load_file(tmp_path / "out.8.safetensors")
    assert all(torch.equal(value, expected[name]) for name, value in model.state_dict().items())
    newest = library.load(tmp_path / "run")
    last = load_file(tmp_path / "out.20.safetensors")
    assert all(torch.equal(newest[name], last[name]) for name in last)
    with pytest.raises(
        CheckpointError, match=r"(?s)do not fit Linear: .*build the model as the script that trained it"
    ):
        library.load(tmp_path / "run", torch.nn.Linear(3, 3))


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["shard=2 zero=3", "tensor=2", "shard=2 zero=1 micro=4"])
def test_the_best_weights_are_loaded_under_each_plan(plan, tmp_path):
    train(tmp_path, 2, plan=plan)
    check_result(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(("before", "after"), [(1, 3), (3, 2)])
def test_a_resumed_run_goes_on_counting(before, after, tmp_path):
    train(tmp_path, before, "--steps", "14")
    train(tmp_path, after)
    check_result(tmp_path, first=15)


@pytest.mark.slow
def test_a_run_stops_with_a_checkpoint_when_its_time_is_over(tmp_path):
    values = ["0.5"] * 5000
    words = ["--workers", "2", "--run-dir", "run", "--max-time", "4s", SCRIPTS / "epochs.py", "out", "9999", *values]
    done = paceline("run", *words, cwd=tmp_path, code=75)
    assert "--max-time 4s is over: the run stops with a checkpoint" in done.stderr
    assert "continue with: paceline run --workers 2 --run-dir run --max-time 4s" in done.stderr
    assert library.load(tmp_path / "run")


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["data=3", "server=1", "local=3 every=2", "shard=3 zero=3"])
def test_a_schedule_without_steps_survives_a_kill_and_a_resume(plan, tmp_path):
    """The learning rates of each step are those of the schedule with the number of steps."""
    body = """
trainer = paceline.Trainer(
    net, lambda o, b: torch.nn.functional.cross_entropy(o, b[1]), lambda p: torch.optim.SGD(p, lr=0.1), global_batch=24,
    schedule=paceline.cosine(warmup=3),
)
rates = trainer.state.setdefault("rates", {})
for report in trainer.steps(data, epochs=4):
    rates[str(report.step)] = report.lr
if trainer.main:
    __import__("json").dump(rates, open("rates.json", "w"))
"""
    train_basics(tmp_path, body, 3, "--plan", plan, "--steps", "6", chaos="kill:1@4.backward")
    assert [entry["fault"] for entry in read_log(tmp_path / "out")] == ["kill:1@4.backward"]
    train_basics(tmp_path, body, 3, "--plan", plan)
    rates = {int(step): rate for step, rate in json.loads((tmp_path / "rates.json").read_text()).items()}
    assert max(rates) == 16
    factor = library.cosine(16, warmup=3)
    assert rates == {step: pytest.approx(0.1 * factor(step - 1), rel=1e-6) for step in rates}


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: trainer().early_stop("loss", patience=0),
            "early_stop(patience=0) must be a number of reports; use a whole number from 1",
        ),
        (
            lambda: trainer().early_stop("loss", patience=2, mode="low"),
            "early_stop() does not know mode 'low'; use mode='max' or mode='min'",
        ),
        (
            lambda: trainer().keep_best("loss", k=0),
            "keep_best(k=0) must be a number of checkpoints; use a whole number from 1",
        ),
        (
            lambda: library.load("runs/none", best=True, step=3),
            "best=True and step= cannot be used together; use only one of them",
        ),
    ],
)
def test_wrong_arguments(call, message):
    with pytest.raises(UsageError) as error:
        call()
    assert str(error.value) == message
