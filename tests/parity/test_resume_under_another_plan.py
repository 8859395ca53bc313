"""A run is resumed from its checkpoint under any other plan: weights, the optimizer's state, averages in
`trainer.state` and the numbers that a script reads of them are those of one undisturbed worker.

Each test is a chain of plans, each of which resumes what the one before it has saved.
"""

from __future__ import annotations

import itertools
import json
import os
from pathlib import Path

import pytest
from checkpoints import find_checkpoint
from launching import SCRIPTS, paceline
from once import once
from oracle import apart
from safetensors.torch import load_file

KINDS = {  # plans, and how many workers each of them has
    "replicas": {"data=3": 3},
    "zero=1": {"shard=2 zero=1": 2, "shard=2 zero=1 tensor=2": 4, "shard=2 zero=1 pipeline=2": 4},
    "zero=2": {
        "shard=2 zero=2 offload=cpu": 2,
        "shard=2 zero=2 tensor=2": 4,
        "shard=2 zero=2 pipeline=2 virtual=2": 4,
    },
    "zero=3": {
        "shard=3": 3,
        "data=2 shard=2": 4,
        "shard=2 zero=3 tensor=2": 4,
        "shard=2 zero=3 pipeline=2": 4,
        "shard=2 zero=3 context=2": 4,
        "shard=2 zero=3 pipeline=2 tensor=2": 8,
    },
    "tensor": {"tensor=2": 2, "tensor=4": 4, "data=2 tensor=2": 4},
    "pipeline": {"pipeline=3": 3, "pipeline=2 virtual=2": 2, "data=2 pipeline=2": 4},
    "two axes": {"pipeline=2 tensor=2": 4, "pipeline=2 context=2": 4, "context=2 tensor=2": 4},
}
EXPERTS = {
    "expert=2": 2,
    "shard=2 zero=3 expert=2": 4,
    "tensor=2": 2,
    "expert=2 pipeline=2": 4,
    "shard=3": 3,
    "data=2 expert=2": 4,
    "expert=3": 3,
    "expert=2 tensor=2": 4,
    "shard=2 zero=1 expert=2": 4,
}
PLANS = {
    "": 1,
    "pipeline=2": 2,
    **EXPERTS,
    **{plan: workers for plans in KINDS.values() for plan, workers in plans.items()},
}
SHARES = {3: "3,0,2", 4: "1,1,2,2"}


def train(folder: Path, plan: str, steps: int, stop: int | None = None, model: str = "") -> None:
    workers = PLANS[plan]
    options = ["--workers", str(workers), "--run-dir", "out", "--max-restarts", "0", "--plan", f"micro=3 {plan}"]
    options += ["--shares", SHARES[workers]] if workers in SHARES and "shard=2 zero=1" not in plan else []
    options += ["--steps", str(stop)] if stop else []
    paceline("run", *options, SCRIPTS / "resumed.py", str(steps), model, cwd=folder)


def check_chain(
    plans: list[str], steps_each: int, factory: pytest.TempPathFactory, folder: Path, model: str = ""
) -> None:
    steps = steps_each * len(plans)
    name = f"{steps} steps of one worker {model} {os.environ.get('BLOCKS')}"
    one = once(factory, name, lambda folder: train(folder, "", steps, model=model))
    for number, plan in enumerate(plans[:-1], 1):
        train(folder, plan, steps, stop=number * steps_each, model=model)
        assert find_checkpoint(folder / "out", print).step == number * steps_each
    assert PLANS[plans[-1]] == 1
    train(folder, plans[-1], steps, model=model)
    for file in ("out.safetensors", "averages.safetensors"):
        assert apart(load_file(folder / file), load_file(one / file)) <= 1e-12
    numbers = sorted(folder.glob("numbers *.json"))
    assert len(numbers) == sum("pipeline" not in plan for plan in plans) * (1 + steps_each)
    for file in numbers:
        _, when, _, step = file.stem.split()
        expected = one / (file.name if step == "1" else f"numbers after step {int(step) - (when == 'before')}.json")
        assert json.loads(file.read_text()) == pytest.approx(json.loads(expected.read_text()), rel=1e-12), file.name


def test_resume_under_plans_of_every_kind(
    tmp_path_factory: pytest.TempPathFactory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BLOCKS", "2")
    plans = ["tensor=2", "shard=3", "pipeline=2", ""]
    check_chain(plans, 1, tmp_path_factory, tmp_path)


@pytest.mark.parametrize(
    "plans",
    [["expert=2", ""], pytest.param([*EXPERTS, "expert=2", ""], marks=[pytest.mark.slow, pytest.mark.timeout(900)])],
)
def test_resume_of_a_model_with_experts(
    plans: list[str], tmp_path_factory: pytest.TempPathFactory, tmp_path: Path
) -> None:
    check_chain(plans, 1, tmp_path_factory, tmp_path, "experts")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_resume_from_one_mixture_under_another(tmp_path_factory: pytest.TempPathFactory, tmp_path: Path) -> None:
    mixtures = [plan for plan in PLANS if "zero=2" in plan or "zero=3" in plan if "offload" not in plan]
    check_chain([*mixtures, *mixtures[:1], *mixtures[1::2], ""], 1, tmp_path_factory, tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", [*KINDS][:-1])
def test_resume_from_and_under_every_kind_of_plan(
    kind: str, tmp_path_factory: pytest.TempPathFactory, tmp_path: Path
) -> None:
    """The kind and each later one in turn, there and back, with the plans of each kind in turn."""
    plans = {name: itertools.cycle(KINDS[name]) for name in KINDS}
    later = [*KINDS][[*KINDS].index(kind) + 1 :]
    chain = [next(plans[name]) for other in later for name in (kind, other)]
    check_chain([*chain, next(plans[kind]), ""], 1, tmp_path_factory, tmp_path)
