"""The contract of every strategy: what one process in plain PyTorch computes, bit by bit to rounding.

A strategy that is built joins `TEAMS`; nothing else changes.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import CASES, CUT, Case
from launching import SCRIPTS, SHARDED, TRANSFORMERS, paceline
from once import once
from oracle import Result, apart, train
from safetensors.torch import load_file

TOLERANCE = 1e-12
TEAMS = {
    "1 worker": ["--workers", "1"],
    "2 workers": ["--workers", "2"],
    "3 workers": ["--workers", "3"],
    "5 workers": ["--workers", "5"],
    "2 unequal": ["--workers", "2", "--shares", "3,1"],
    "3 unequal, one idle": ["--workers", "3", "--shares", "1,0,2"],
    "1 worker, exact": ["--workers", "1"],
    "3 workers, exact": ["--workers", "3"],
    "3 unequal, shard=3 zero=1": ["--workers", "3", "--shares", "3,1,2"],
    "3 unequal, shard=3 zero=2": ["--workers", "3", "--shares", "3,1,2"],
    "3 unequal, shard=3 zero=3": ["--workers", "3", "--shares", "3,0,2"],
    "4 unequal, shard=2 zero=1 exact": ["--workers", "4", "--shares", "1,0,2,1"],
    "4 unequal, shard=2 zero=3 exact": ["--workers", "4", "--shares", "1,0,2,1"],
    "2 workers, shard=2 zero=1 offload=cpu": ["--workers", "2"],
    "4 workers, shard=2 zero=3 offload=cpu": ["--workers", "4"],
    "2 workers, tensor=2": ["--workers", "2"],
    "4 unequal, tensor=2": ["--workers", "4", "--shares", "1,0,2,1"],
    "6 unequal, one idle tensor=2": ["--workers", "6", "--shares", "1,1,0,0,2,1"],
    "4 workers, tensor=4": ["--workers", "4"],
    "4 workers, shard=2 zero=1 tensor=2": ["--workers", "4"],
    **{f"{workers} together, {words}": ["--workers", str(workers)] for workers, words in SHARDED},
}


def cases(team: str) -> dict[str, Case]:
    """What a team trains. Four workers cannot hold two key-value heads, and what is fast leaves models that take
    seconds to be imported to test_tensor_models.
    """
    if "tensor" in team and team in QUICK:
        return {name: case for name, case in CUT.items() if not name.startswith("llama")}
    if "tensor=4" in team:
        return {name: case for name, case in CUT.items() if name != "llama"}
    return CUT if "tensor" in team else CASES


@cache
def oracle(name: str) -> Result:
    torch.set_num_threads(1)
    return train((CASES | CUT)[name])


QUICK = {"1 worker", "3 unequal, one idle", "3 unequal, shard=3 zero=3", "2 workers, tensor=2"}
PARAMS = [
    pytest.param((team, name), id=f"{team}-{name}", marks=[] if team in QUICK else [pytest.mark.slow])
    for team in TEAMS
    for name in cases(team)
]
Outcome = tuple[str, dict[str, torch.Tensor], dict[str, Any]]


def trained(team: str, factory: pytest.TempPathFactory) -> Path:
    """The folder of what a team made of its cases."""
    words = team.partition(", ")[2].removeprefix("one idle").split()
    fixed = ["--max-restarts", "0"] if "shard" in team or "tensor" in team else []
    command = ("run", *TEAMS[team], *fixed, SCRIPTS / "contract.py", "out", *cases(team), *words)
    env = TRANSFORMERS if "llama" in cases(team) else {}
    return once(factory, f"contract of {team}", lambda folder: paceline(*command, cwd=folder, **env))


@pytest.fixture(params=PARAMS)
def outcome(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """A case, and what a team made of it: its tensors and figures."""
    team, name = request.param
    folder = trained(team, tmp_path_factory)
    tensors = load_file(folder / "out.safetensors")
    mine = {key.removeprefix(f"{name}/"): value for key, value in tensors.items() if key.startswith(f"{name}/")}
    return name, mine, json.loads((folder / "out.json").read_text())[name]


def weights(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {key: value for key, value in state.items() if "running" not in key and "tracked" not in key}


def test_weights_are_those_of_one_process(outcome: Outcome) -> None:
    name, mine, _ = outcome
    assert apart(weights(mine), weights(oracle(name).weights)) <= TOLERANCE


def test_reports_are_those_of_one_process(outcome: Outcome) -> None:
    name, _, mine = outcome
    theirs = oracle(name).figures
    assert mine["samples"] == theirs["samples"]
    assert mine["loss"] == pytest.approx(theirs["loss"], rel=1e-10)
    assert mine["norm"] == pytest.approx(theirs["norm"], rel=1e-9)
    for one, other in zip(mine["metrics"], theirs["metrics"], strict=True):
        assert one == pytest.approx(other, rel=1e-12)


def test_evaluation_counts_every_row_once(outcome: Outcome) -> None:
    name, _, mine = outcome
    assert mine["evaluation"] == pytest.approx(oracle(name).evaluation, rel=1e-10)
    assert mine["evaluation"]["n"] == len((CASES | CUT)[name].data())


@pytest.mark.parametrize("outcome", [param for param in PARAMS if param.values[0][1] == "batchnorm"], indirect=True)
def test_batchnorm_statistics_are_those_of_one_process(outcome: Outcome) -> None:
    _, mine, _ = outcome
    for key, value in oracle("batchnorm").weights.items():
        if "running" in key or "tracked" in key:
            assert torch.allclose(mine[key], value, rtol=1e-12, atol=1e-14), key


def test_evaluation_is_equal_bit_by_bit_on_any_number_of_workers(tmp_path: Path):
    """The same weights, evaluated by one and by three workers with one thread each."""
    script = tmp_path / "evaluate.py"
    script.write_text(
        "import json, sys, paceline\nfrom cases import CASES, right\ncase = CASES['tokens']\n"
        "t = paceline.Trainer(case.model, case.loss, case.optimizer, global_batch=14)\n"
        "found = t.evaluate(case.data(), right)\n"
        "if t.main: open(sys.argv[1], 'w').write(json.dumps(found))\n"
    )
    found = []
    for workers in ("1", "3"):
        paceline("run", "--workers", workers, script, tmp_path / workers, cwd=tmp_path, PYTHONPATH=str(SCRIPTS))
        found.append(json.loads((tmp_path / workers).read_text()))
    assert found[0] == found[1]
