"""Steps that one worker computes twice: nothing of the second computation stays, and a flipped bit is found."""

from __future__ import annotations

import random
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from alone import happened, trainer
from cases import cross_entropy, mlp, rows
from torch import nn

import paceline
from paceline.base.environment import parse_verify_steps
from paceline.errors import UsageError, WorkersDifferError
from paceline.session.run import Run
from paceline.train.bit_flips import BitFlips
from paceline.train.step_verifier import StepCheck
from paceline.train.votes import Vote

DATA = rows(1, 64, 10)


class Counts(nn.Module):
    """Has a declared buffer, BatchNorm, dropout, and a list that each forward makes longer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(10, 16), nn.BatchNorm1d(16), nn.Dropout(0.3), nn.Linear(16, 4)).double()
        self.register_buffer("mean", torch.zeros(10, dtype=torch.float64))
        paceline.buffer(self, "mean", "affine", factor=0.9)
        self.calls: list[int] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.calls.append(len(x))
            self.mean.mul_(0.9).add_(0.1 * x.mean(0))
        return self.layers(x)


def verify(run: Run, every: int = 1) -> None:
    """As --verify-steps does."""
    run.team.world = replace(run.team.world, verify_steps=every)


def weights(made: Any) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in made.model.state_dict().items()}


@pytest.mark.parametrize("model", [mlp, Counts])
@pytest.mark.parametrize("plan", ["micro=4", "exact micro=8"])
def test_second_computation_leaves_no_trace(model: Any, plan: str, run: Run) -> None:
    results = []
    for every in (0, 2):
        verify(run, every)
        made = trainer(model, plan=plan)
        for report in made.steps(DATA, epochs=3):
            made.state["samples"] = made.state.get("samples", 0) + report.samples
        results.append((weights(made), made.state["samples"], report.loss, getattr(made.model, "calls", None)))
    (plain, *rest), (verified, *other) = results
    # Without `exact`, rounding follows how many micro-batches are merged, which depends on measured times.
    bound = 0.0 if "exact" in plan else 1e-5
    for name, value in plain.items():
        torch.testing.assert_close(verified[name], value, rtol=bound, atol=bound)
    (samples, loss, calls), (other_samples, other_loss, other_calls) = rest, other
    assert (samples, calls is None or "exact" not in plan or calls == other_calls) == (other_samples, True)
    assert abs(loss - other_loss) <= bound
    steps = happened(run, "verified")
    assert len(steps) == 6
    assert all(step["attempts"] == 1 for step in steps)
    assert not happened(run, "corrupted")


@pytest.mark.parametrize(
    ("kind", "plan", "text"),
    [
        ("flip-gradient", "micro=4", "computed a wrong value: 0.weight differs from that of its next attempt"),
        ("flip-activation", "micro=4", "computed a wrong value: "),
        ("flip-bucket", "exact micro=4", ""),
    ],
)
def test_flipped_bit_is_found_and_leaves_no_trace(kind: str, plan: str, text: str, run: Run) -> None:
    results, flipped = [], list[dict[str, Any]]()
    for flips in (False, True):
        verify(run)
        made = trainer(mlp, plan=plan)

        def reach(moment: str, made: Any = made) -> None:
            if made.done == 4 and moment == "loading":
                BitFlips(made._replica).arm(kind, random.Random(3), lambda **what: flipped.append(what))

        made._context.transactions.fault_point = reach if flips else None
        list(made.steps(DATA, count=8))
        results.append(weights(made))
    assert len(flipped) == 1
    (wrong,) = happened(run, "corrupted")
    assert (wrong["step"], wrong["workers"], wrong["leaves"]) == (5, [0], False)
    assert text in wrong["text"]
    assert [step["attempts"] for step in happened(run, "verified") if step["trainer"] == 1] == [1] * 4 + [2] + [1] * 3
    assert all(torch.equal(value, results[1][name]) for name, value in results[0].items())


def test_model_that_computes_other_values_each_time_ends_the_run(run: Run) -> None:
    verify(run)
    calls = []

    def loss(output: torch.Tensor, batch: Any) -> torch.Tensor:
        calls.append(1)
        return cross_entropy(output, batch) * (1 + 1e-9 * len(calls))

    made = trainer(mlp, loss, plan="micro=16")
    with pytest.raises(WorkersDifferError) as raised:
        list(made.steps(DATA, count=2))
    host = run.team.world.host
    assert str(raised.value) == (
        f"worker 0 ({host}, cpu) computes other values each time from the same rows in step 1, 3 times in a row; "
        "0.weight is the first that differs; if the model computes other bits each time, as some GPU kernels do, call "
        "torch.use_deterministic_algorithms(True); otherwise test the memory and the processors of these hosts"
    )


def test_dataset_with_unseeded_rows_is_noted_once(run: Run) -> None:
    class Unseeded(torch.utils.data.Dataset[Any]):
        def __len__(self) -> int:
            return 64

        def __getitem__(self, number: int) -> Any:
            x, y = DATA[number]
            return x + random.SystemRandom().random(), y

    verify(run)
    list(trainer(mlp, plan="micro=4").steps(Unseeded(), epochs=1))
    (note,) = [event["text"] for event in happened(run, "note") if "not verified" in event["text"]]
    assert note == (
        "step 1 was not verified completely: the dataset gives worker 0 other rows than worker 0; draw random numbers "
        "from the generators of torch, numpy or random, which are seeded for each row"
    )
    assert len(happened(run, "verified")) == 4
    assert not happened(run, "corrupted")


@pytest.mark.parametrize(
    ("options", "word"), [({"loss_over": "batch"}, "loss_over="), ({"plan": "local=1 every=2"}, "local=1")]
)
def test_steps_that_cannot_be_verified_are_refused(options: dict[str, Any], word: str, run: Run) -> None:
    verify(run)
    with pytest.raises(UsageError) as raised:
        trainer(mlp, **options)
    assert (
        str(raised.value) == f"--verify-steps cannot verify steps with {word} yet; leave --verify-steps or {word} out"
    )


@pytest.mark.parametrize(
    ("text", "every"), [("1%", 100), ("100%", 1), ("2.5%", 40), ("70%", 1), ("0.001%", 100_000), ("1", 1), ("250", 250)]
)
def test_part_of_the_steps_is_read(text: str, every: int) -> None:
    assert parse_verify_steps(text) == every


@pytest.mark.parametrize("text", ["0", "0%", "101%", "1.5", "-1", "1 %", "all", "", "٣"])
def test_other_parts_of_the_steps_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match=r"is not a part of the steps; give a percentage as 1%, or N to verify one"):
        parse_verify_steps(text)


def test_others_go_on_in_the_last_attempt_if_a_worker_leaves() -> None:
    """Worker 1 was wrong in the first and in the last of three attempts; it alone raises an error."""
    check, values = StepCheck.__new__(StepCheck), {0: (1, 1, 1), 1: (2, 1, 4)}
    votes = [Vote(worker, attempt, values[worker][attempt]) for attempt in range(3) for worker in (0, 1)]
    leave: list[bool] = []

    def name(wrong: Any, must_leave: bool) -> None:
        assert {(one.vote.worker, one.vote.attempt) for one in wrong} == {(1, 0), (1, 2)}
        leave.append(must_leave)
        check._votes.clear()

    verifier = SimpleNamespace(same=lambda a, b: a.value == b.value, difference=lambda a, b: "w" * (a.value != b.value))
    vars(check).update(verifier=verifier, attempt=2, _faults=[], _votes={0: votes}, _name=name, _again=lambda: True)
    assert check._differs({0: "w"})
    assert leave == [True]
