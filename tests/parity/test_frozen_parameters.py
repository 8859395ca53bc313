"""Parameters that are frozen after the Trainer was made, and trained again, do as in plain PyTorch under each plan."""

from __future__ import annotations

from pathlib import Path

import pytest
from freezing import in_plain_torch
from launching import SCRIPTS, paceline
from oracle import apart
from safetensors.torch import load_file

CELLS = [(2, ["tensor=2", "context=2"]), (2, ["pipeline=2", "data=2", "shard=2 zero=2", "shard=2 offload=cpu"])]
CELLS += [(3, ["shard=3 zero=1", "shard=3"]), (4, ["pipeline=2 tensor=2"]), (1, ["data=1"])]


@pytest.mark.parametrize(
    ("workers", "plans"),
    [pytest.param(*cell, marks=[pytest.mark.slow] if at else []) for at, cell in enumerate(CELLS)],
)
def test_frozen_parameters_train_as_in_plain_pytorch(workers: int, plans: list[str], tmp_path: Path) -> None:
    options = ["--workers", str(workers), "--max-restarts", "0"]
    paceline("run", *options, SCRIPTS / "freezing.py", *plans, cwd=tmp_path)
    compare(tmp_path, plans)


@pytest.mark.slow
def test_frozen_parameters_of_a_parameter_server(tmp_path: Path) -> None:
    paceline("run", "--workers", "2", "--plan", "server=1", SCRIPTS / "freezing.py", "", cwd=tmp_path)
    compare(tmp_path, [""])


def compare(folder: Path, plans: list[str]) -> None:
    for number, plan in enumerate(plans):
        assert apart(load_file(folder / f"{number}.safetensors"), in_plain_torch()) <= 1e-12, plan
