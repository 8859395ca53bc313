"""Runs of scripts/islands.py, and how they are compared with the oracle."""

from __future__ import annotations

import json
import signal
import sys
from functools import cache
from pathlib import Path
from subprocess import PIPE
from typing import Any

import islands
import pytest
from agents import until
from islands import BATCH, CASES, DATA, MICRO, ROWS, SEED, STEPS
from launching import SCRIPTS, paceline
from oracle import DILOCO, Islands, Outer, apart, diloco, grid
from safetensors.torch import load_file
from warm import Process, environment

from paceline.base.exit_codes import STOPPED

TOLERANCE = 1e-12
SGD: Outer = (0.9, 0.0, False)  # outer=sgd:0.9
KILL_MOMENTS = ("loading", "backward", "summed", "reduced", "applied")
# The first parameters of the fragments of a model with these many blocks, which are as even as can be.
FRAGMENTS = {("net", 2): [("0.",), ("1.", "2.", "3.")], ("blocks", 2): [("0.", "1.", "2."), ("3.", "4.", "6.")]}
FRAGMENTS["blocks", 3] = [("0.", "1."), ("2.", "3."), ("4.", "6.")]


@cache
def islands_by_hand(
    name: str,
    count: int,
    every: int,
    outer: Outer = DILOCO,
    fragments: int = 1,
    delay: int = 0,
    largest_code: int | None = None,
) -> tuple[Any, list[dict[str, Any]]]:
    """A case of scripts/islands.py in `count` islands."""
    steps = grid(DATA, BATCH, MICRO, count=STEPS, seed=SEED)
    made = Islands(CASES[name], islands.loss, steps, count, outer, SEED)
    starts = FRAGMENTS["blocks" if name == "blocks" else "net", fragments] if fragments > 1 else [("",)]
    names = [name for name, _ in made.model.named_parameters()]
    parts = [[one for one in names if one.startswith(start)] for start in starts]
    return diloco(made, every, parts, delay, largest_code)


def train_islands(
    folder: Path, workers: int, plan: str, *cases: str, options: tuple[str, ...] = (), code: int = 0, **env: str
) -> str:
    """Trains with `paceline run`; its output."""
    start = ("--workers", str(workers), "--run-dir", "run", *options)
    done = paceline("run", *start, SCRIPTS / "islands.py", folder, plan, *cases, cwd=folder, code=code, **env)
    return done.stdout + done.stderr


def check_islands(folder: Path, count: int, every: int, *more: Any, **how: Any) -> None:
    """Weights, and the figures of all rounds that were reported, are those of `islands_by_hand`."""
    for name, reported in json.loads((folder / "told.json").read_text()).items():
        weights, figures = islands_by_hand(name, count, every, *more, **how)
        assert apart(load_file(folder / f"{name}.safetensors"), weights) <= TOLERANCE, name
        by_step = {expected["step"]: expected for expected in figures}
        for figure in reported["figures"]:
            figure |= figure.pop("metrics")
            expected = by_step[figure["step"]]
            assert {key: figure[key] for key in expected} == pytest.approx(expected, rel=1e-9)
        assert reported["evaluated"]["n"] == ROWS


def stop_in_a_round(folder: Path, plan: str) -> None:
    """Two workers are told to stop in their second round of 4 steps, in which each calls the loss about twelve times;
    then one goes on.
    """
    command = ("run", "--workers", "2", "--run-dir", "run", str(SCRIPTS / "islands.py"), str(folder))
    command = (sys.executable, "-m", "paceline", *command, plan, "adamw")
    with Process(command, environment(SLOW="20"), cwd=folder, stdout=PIPE, stderr=PIPE) as process:
        until((folder / "reached").exists)
        process.send_signal(signal.SIGTERM)
        stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == STOPPED, stdout + stderr
    assert "stopped after step 4; saved" in stdout + stderr
    train_islands(folder, 1, plan, "adamw")
