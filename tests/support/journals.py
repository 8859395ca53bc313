"""Journals of runs, written by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from paceline.base.journal import Journal

GRID = "global batch 256 = 8 micro-batches of 32 rows; one epoch = 391 steps"


def step(number: int, **fields: Any) -> dict[str, Any]:
    """A record of ten steps."""
    record = {
        "trainer": 0,
        "step": number,
        "epoch": 0,
        "loss": 2.5,
        "samples": 2560,
        "steps": 10,
        "seconds": 0.5,
        "time": {"data": 0.025, "compute": 0.411, "reduce": 0.05, "update": 0.014, "other": 0.0},
        "waited_for": {1: 0.02},
        "bytes": 10_000_000,
    }
    return {**record, **fields}


def write_run(folder: Path, script: str = "train.py") -> None:
    """Two attempts: the first was killed after step 60, the second resumed from step 50 and finished."""
    journal = Journal(folder)
    start = {
        "workers": 2,
        "hosts": 1,
        "plan": "data=2",
        "plan_origin": "--plan",
        "script": script,
        "argv": [script, "--size", "big one"],
        "versions": {"python": "3.11.7", "torch": "2.13.0"},
        "seed": 7,
        "threads": 1,
        "device": "cpu",
    }
    journal.write("compare", workers=1, samples_per_second=2560.0)
    journal.write("start", **start, resumed_from=None)
    journal.write("grid", trainer=0, phase=0, steps=100, shares=[5, 3], text=GRID)
    journal.write("decision", what="micro-batches are merged", why="the forward drew no random numbers")
    for done in range(10, 70, 10):
        journal.write("step", **step(done, loss=10.0 - done / 10))
    journal.write("evaluate", trainer=0, step=60, results={"accuracy": 0.1, "n": 500})
    journal.write("start", **start, resumed_from=50)
    journal.write("grid", trainer=0, phase=0, steps=100, shares=[5, 3], text=GRID)
    journal.write("decision", what="micro-batches are merged", why="the forward drew no random numbers")
    for done in range(60, 110, 10):
        journal.write("step", **step(done, loss=8.0 - done / 20, metrics={"error": 1 / done}))
        journal.write("evaluate", trainer=0, step=done, results={"accuracy": done / 200, "n": 500})
        journal.write("log", step=done, values={"accuracy": done / 200, "sample": f"text of step {done}"})
    journal.write("checkpoint", step=100, path="checkpoints/step-000000000100", seconds=0.25, bytes=1000)
    journal.write("finished", step=100)
    journal.close()
