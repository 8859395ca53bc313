"""Gradients in rows: what is trained is what one process trains, and only the rows travel that were touched."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest
import torch
from launching import SCRIPTS, paceline
from oracle import apart
from safetensors.torch import load_file

sys.path.insert(0, str(SCRIPTS))
import rows

TOLERANCE = 1e-12


def trained(folder: Path, workers: int, *options: str, chaos: str = "") -> str:
    said = ("--workers", str(workers), "--run-dir", "run", *options)
    done = paceline("run", *said, SCRIPTS / "rows.py", "out.safetensors", cwd=folder, PACELINE_CHAOS=chaos)
    return done.stdout + done.stderr


def as_by_hand(folder: Path) -> None:
    weights, figures = rows.by_hand()
    assert apart(load_file(folder / "out.safetensors"), weights) < TOLERANCE
    found = ast.literal_eval((folder / "figures").read_text())
    assert torch.allclose(torch.tensor(found), torch.tensor(figures), rtol=TOLERANCE, atol=0.0)


@pytest.mark.parametrize(
    "workers", [1, 3, pytest.param(2, marks=pytest.mark.slow), pytest.param(5, marks=pytest.mark.slow)]
)
def test_several_workers_give_what_one_process_gives(workers: int, tmp_path: Path) -> None:
    trained(tmp_path, workers)
    as_by_hand(tmp_path)
