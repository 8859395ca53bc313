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
    "in a loop after those with loops in them": (38, 1),
    "in a loop beside two that go in step": (44, 1),
    "between the two that go in step": (46, 2),
    "between two that take turns": (54, 3),
    "in the last loop": (63, 1),
}
QUICK = "in a loop after those with loops in them"


def run(folder: Path, workers: int, *options: str, code: int = 0, **env: str) -> None:
    words = ("--workers", str(workers), "--run-dir", "run", *options)
    paceline("run", *words, SCRIPTS / "nested.py", "out", cwd=folder, code=code, CUDA_VISIBLE_DEVICES="", **env)


def outcome(folder: Path) -> tuple[Any, list[str]]:
    return load_file(folder / "out.safetensors"), json.loads((folder / "out.json").read_text())["log"]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    return outcome(once(tmp_path_factory, "undisturbed by nesting", lambda folder: run(folder, 1)))


@pytest.mark.parametrize(
    "where", [where if where == QUICK else pytest.param(where, marks=pytest.mark.slow) for where in KILLS]
)
def test_kill_in_nested_loops_and_resume_gives_the_undisturbed_weights(where, undisturbed, tmp_path):
    moment, then = KILLS[where]
    run(tmp_path, 2, "--save-every", "1", code=-signal.SIGKILL, KILL_AT=str(moment))
    assert (tmp_path / "killed").exists(), "the fault did not fire"
    run(tmp_path, then)
    check(tmp_path, undisturbed)


@pytest.mark.parametrize(
    "where", ["in a loop in a loop in a loop", pytest.param("between the two that go in step", marks=pytest.mark.slow)]
)
def test_stop_in_nested_loops_waits_for_the_next_step_of_the_outermost_loop(where, undisturbed, tmp_path):
    moment, then = KILLS[where]
    run(tmp_path, 3 - then, code=75, STOP_AT=str(moment))
    run(tmp_path, then)
    check(tmp_path, undisturbed)


def check(folder: Path, undisturbed: tuple[Any, list[str]]) -> None:
    weights, log = outcome(folder)
    assert log == undisturbed[1]
    assert apart(weights, undisturbed[0]) <= 1e-12
