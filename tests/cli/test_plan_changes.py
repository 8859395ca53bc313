"""A run whose plan `auto` has chosen goes on under another plan when that pays, and trains as one worker does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from launching import paceline
from safetensors.torch import load_file

from paceline.base.journal import Journal, effective_steps, read_journal
from paceline.plan import Plan
from paceline.planner.descriptions import BlockDescription, MachineDescription, ModelDescription
from paceline.planner.outlook import Outlook

ROW = 3e-4  # seconds that a block takes for a row
TRAIN = f"""
import os, sys, time
from basics import *

class Slow(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        slow = SLOW if os.environ.get("PACELINE_RANK") == "1" else 1
        time.sleep({ROW} * len(x) * slow)
        return self.inner(x)

def model():
    torch.manual_seed(0)
    return nn.Sequential(*(Slow(nn.Linear(10, 10)) for _ in range(4)), nn.Linear(10, 2)).double()

trainer = make(model=model)
for report in trainer.steps(data, count=COUNT):
    if report.step == END:  # a test waits for few of the remaining steps
        trainer.stop()
trainer.export("out.safetensors")
"""


def outlook(plan: str, seconds: float, **changes: Any) -> Outlook:
    """What `auto` knows of the script: a step takes what its blocks take."""
    blocks = [BlockDescription(str(n), 110, passes=80.0, seconds={"3": 3 * ROW, "12": 12 * ROW}) for n in range(4)]
    model = ModelDescription("Sequential", (*blocks, BlockDescription("4", 22)), 24, merges=True)
    machine = MachineDescription("cpu", {"fp32": 1e11}, 1e12, 1e10, measured=True)
    about = {"ratio": 1.0, "busy": (seconds, seconds), **changes}
    return Outlook(plan, 2, seconds, seconds, "data=2", "", model, machine, **about)


def begun(folder: Path, count: int, end: int, slow: float, known: Outlook) -> None:
    """Makes a run folder of a run whose plan was chosen, and that has not trained yet."""
    text = TRAIN.replace("COUNT", str(count)).replace("END", str(end)).replace("SLOW", str(slow))
    (folder / "train.py").write_text(text)
    run_folder = folder / "a"
    journal = Journal(run_folder)
    journal.write("decision", what="", why="", plan=known.plan, asked="auto", workers=2)
    journal.close()
    known.write(run_folder)


def run(folder: Path, *words: str, code: int = 0) -> str:
    command = ("run", *words, "train.py")
    return paceline(*command, cwd=folder, code=code, XDG_CACHE_HOME=str(folder)).stderr


def auto(folder: Path, *words: str) -> str:
    return run(folder, "--workers", "2", "--plan", "auto", "--run-dir", "a", *words)


def decisions(folder: Path) -> list[dict[str, Any]]:
    return [event for event in read_journal(folder / "a") if event["event"] == "decision" and "plan" in event]


def trains_as_one_worker(folder: Path, count: int) -> None:
    """Compares the weights and the loss curve with those of one worker; each step counts once, with all of its rows."""
    several = load_file(folder / "out.safetensors")
    run(folder, "--workers", "1", "--run-dir", "one")
    one = load_file(folder / "out.safetensors")
    for name, weight in one.items():
        torch.testing.assert_close(several[name], weight, rtol=1e-12, atol=1e-12)
    losses, rows = [], []
    for name in ("a", "one"):
        steps = effective_steps(read_journal(folder / name))
        losses.append({event["step"]: event["loss"] for event in steps})
        rows.append(sum(event["samples"] for event in steps))
        assert sum(event["steps"] for event in steps) == count
    assert rows == [24 * count] * 2
    common = losses[0].keys() & losses[1].keys()
    assert count in common
    assert all(losses[0][step] == pytest.approx(losses[1][step], abs=1e-12) for step in common)


def test_a_run_leaves_a_plan_that_waits_for_a_slow_worker(tmp_path):
    """Stages of a pipeline wait for the slow worker; shares of the rows follow its speed."""
    begun(tmp_path, count=20_000, end=70, slow=8, known=outlook("pipeline=2", 24 * 2 * ROW))
    said = auto(tmp_path)
    first, second = decisions(tmp_path)[1:]
    assert first["what"] == "the plan stays 'pipeline=2'"
    assert second["plan"] != "pipeline=2"
    assert second["what"] == f"the plan changes from 'pipeline=2' to {second['plan']!r}"
    assert f"auto: {second['what']}: {second['why']}" in said
    assert second["why"].startswith("worker 1 takes ")
    assert "continue with" not in said
    trains_as_one_worker(tmp_path, 70)
    starts = [event["plan"] for event in read_journal(tmp_path / "a") if event["event"] == "start"]
    assert starts == ["data=1 pipeline=2", str(Plan.parse(second["plan"]).validate(2))]
