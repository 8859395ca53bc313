"""Loops of several trainers within and beside one another: killed anywhere, the run goes on where it was."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest
from launching import SCRIPTS, paceline
from once import once
from oracle import apart
from safetensors.torch import load_file

# A moment of scripts/nested.py, and the workers that go on.
KILLS = {
    "in a loop in a loop in a loop": (14, 2),
    "in the second loop in a body": (33, 1),
    "in a loop after those with loops in them": (38, 3),
    "in a loop beside two that go in step": (44, 1),
    "between the two that go in step": (46, 2),
    "between two that take turns": (54, 3),
    "in the last loop": (63, 1),
}
QUICK = "in a loop after those with loops in them"


def run(folder: Path, workers: int, code: int = 0, **env: str) -> None:
    options = ("--workers", str(workers), "--run-dir", "run", "--save-every", "1")
    paceline("run", *options, SCRIPTS / "nested.py", "out", cwd=folder, code=code, CUDA_VISIBLE_DEVICES="", **env)


def outcome(folder: Path) -> tuple[Any, list[str]]:
    return load_file(folder / "out.safetensors"), json.loads((folder / "out.json").read_text())["log"]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    return outcome(once(tmp_path_factory, "undisturbed by nesting", lambda folder: run(folder, 2)))


@pytest.mark.parametrize(
    "where", [where if where == QUICK else pytest.param(where, marks=pytest.mark.slow) for where in KILLS]
)
def test_killed_and_resumed(where, undisturbed, tmp_path):
    moment, then = KILLS[where]
    run(tmp_path, 2, code=-signal.SIGKILL, KILL_AT=str(moment))
    assert (tmp_path / "killed").exists(), "the fault did not fire"
    run(tmp_path, then)
    weights, log = outcome(tmp_path)
    assert log == undisturbed[1]
    assert apart(weights, undisturbed[0]) <= 1e-12


@pytest.mark.parametrize(
    "where", ["in a loop in a loop in a loop", pytest.param("between the two that go in step", marks=pytest.mark.slow)]
)
def test_asked_to_stop_it_stops_where_the_outermost_loop_asks_for_its_next_step(where, undisturbed, tmp_path):
    run(tmp_path, 2, code=75, STOP_AT=str(KILLS[where][0]))
    run(tmp_path, KILLS[where][1])
    weights, log = outcome(tmp_path)
    assert log == undisturbed[1]
    assert apart(weights, undisturbed[0]) <= 1e-12
