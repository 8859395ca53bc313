"""A team that survives: whoever is lost at whatever moment, the training ends with the bytes of the undisturbed one."""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest
from launching import SCRIPTS, paceline

from paceline.observe.journal import effective_steps, read_journal
from paceline.team.chaos import read_log

WORKERS, STEPS, LONG = 6, 24, 90


@dataclass
class Ended:
    weights: bytes
    told: dict[str, object]
    samples: list[int]
    folder: Path
    text: str

    def events(self, kind: str) -> list[dict[str, object]]:
        return [event for event in read_journal(self.folder) if event["event"] == kind]


def train(folder: Path, workers: int, steps: int, faults: str = "", *options: str, loaders: int = 0) -> Ended:
    """Runs the script to its end, with faults."""
    out, run = folder / "out", folder / "run"
    env = {"PACELINE_CHAOS": faults, "PAUSE": "0.05" if steps == LONG else "0"}
    options = ("--workers", str(workers), "--run-dir", str(run), *options)
    done = paceline("run", *options, SCRIPTS / "survivor.py", out, str(steps), str(loaders), cwd=folder, **env)
    steps_written = effective_steps(read_journal(run))
    samples = [event["samples"] for event in steps_written]
    assert [event["step"] for event in steps_written] == sorted({event["step"] for event in steps_written})
    assert sum(event["steps"] for event in steps_written) == steps, "a step is missing in the journal, or there twice"
    weights = Path(f"{out}.safetensors").read_bytes()
    return Ended(weights, json.loads(Path(f"{out}.json").read_text()), samples, run, done.stderr)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """By the number of steps: what one worker gives."""
    return {steps: train(tmp_path_factory.mktemp("undisturbed"), 1, steps) for steps in (STEPS, LONG)}


def same(ended: Ended, undisturbed: Ended) -> None:
    assert ended.weights == undisturbed.weights
    assert ended.told == undisturbed.told
    assert sum(ended.samples) == sum(undisturbed.samples)
    left = subprocess.run(["pgrep", "-f", str(ended.folder.parent)], capture_output=True, text=True).stdout.split()
    assert [pid for pid in left if int(pid) != os.getpid()] == []


# ---- the fault matrix

KINDS = ("kill", "stop", "raise", "exit")
MOMENTS = ("loading", "forward", "backward", "reduced", "saving")
WHO = {"worker 0": [0], "its neighbour": [1], "another": [3], "two at once": [1, 4]}
QUICK = {("kill", "reduced", "worker 0"), ("stop", "backward", "another"), ("raise", "forward", "two at once")}
QUICK |= {("exit", "saving", "its neighbour")}


def cells(kinds, moments, who, quick):
    for kind in kinds:
        for moment in moments:
            for name in who:
                marks = [] if (kind, moment, name) in quick else [pytest.mark.slow]
                yield pytest.param(kind, moment, name, marks=marks, id=f"{kind}-{moment}-{name}".replace(" ", "_"))


@pytest.mark.parametrize(("kind", "moment", "who"), cells(KINDS, MOMENTS, WHO, QUICK))
def test_whoever_is_lost_nothing_else_is(kind, moment, who, undisturbed, tmp_path):
    at = 9 if moment == "saving" else 11
    faults = [f"{kind}:{worker}@{at}.{moment}" for worker in WHO[who]]
    ended = train(tmp_path, WORKERS, STEPS, ",".join(faults))
    assert {entry["fault"] for entry in read_log(ended.folder)} == set(faults), "a fault did not fire"
    same(ended, undisturbed[STEPS])
    lost = [worker for event in ended.events("lost") for worker in event["workers"]]
    assert set(WHO[who]) <= set(lost)
