"""Killed at any moment with SIGKILL, the same command continues, on another number of workers too, and ends with the
weights, the random draws and the figures of an undisturbed run."""

from __future__ import annotations

import json
import random
import re
import signal
import sys
from itertools import pairwise
from pathlib import Path
from subprocess import PIPE

import pytest
from launching import SCRIPTS, paceline, train_basics
from once import once
from oracle import apart
from safetensors.torch import load_file
from warm import Process, environment

from paceline.base.journal import read_journal

SCRIPT = SCRIPTS / "resuming.py"
MOMENTS = ("forward", "backward", "update", "body")
SEEDED = random.Random(812)
KILLS = [(SEEDED.randint(2, 20), MOMENTS[number % 4], SEEDED.choice((1, 2, 3))) for number in range(10)]


def outcome(folder: Path):
    return load_file(folder / "out.safetensors"), json.loads((folder / "out.json").read_text())


def run(folder: Path, workers: int, code: int | None = 0, **env: str):
    options = ("--workers", str(workers), "--run-dir", "run", "--save-every", "3")
    return paceline("run", *options, SCRIPT, "out", cwd=folder, code=code, **env)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    return outcome(once(tmp_path_factory, "undisturbed by resuming", lambda folder: run(folder, 1)))


@pytest.mark.parametrize(
    ("step", "moment", "then"),
    [kill if number == 3 else pytest.param(*kill, marks=pytest.mark.slow) for number, kill in enumerate(KILLS)],
)
def test_killed_run_resumes_with_another_number_of_workers(step, moment, then, undisturbed, tmp_path):
    run(tmp_path, 2, code=-signal.SIGKILL, KILL_AT=f"{step},{moment}")
    assert (tmp_path / "killed").exists(), "the fault did not fire"
    resumed = run(tmp_path, then)
    assert "resuming from step" in resumed.stderr or step <= 8  # the first checkpoint is that of step 3
    (weights, figures), (their_weights, theirs) = outcome(tmp_path), undisturbed
    assert apart(weights, their_weights) <= 1e-12
    assert figures["steps"] == theirs["steps"] == 20
    assert figures["draws"] == theirs["draws"]
    assert figures["best"] == pytest.approx(theirs["best"], rel=1e-10)
    for one, other in zip(figures["evaluations"], theirs["evaluations"], strict=True):
        assert one == pytest.approx(other, rel=1e-10)


@pytest.fixture
def short(tmp_path):
    (tmp_path / "train.py").write_text(
        "import sys\nfrom basics import *\nt = make()\nlist(t.steps(data, count=int(sys.argv[1])))\n"
        "if t.main: print('weights', sum(p.sum().item() for p in t.model.parameters()))\n"
    )

    def go(*arguments: str, count: int = 8, code: int = 0):
        return paceline("run", *arguments, "train.py", str(count), cwd=tmp_path, code=code)

    return go


def trained(done):
    """What the script printed. To rounding: how many micro-batches are merged is a matter of measured time."""
    return float(done.stdout.removeprefix("weights "))


def test_resume_of_a_finished_run_needs_a_larger_count_and_without_run_dir_never_happens(short, golden, tmp_path):
    whole, other = short(count=12), short(count=2)
    assert "resuming" not in other.stderr
    assert len(list((tmp_path / "runs").iterdir())) == 2
    first = short("--run-dir", "out")
    again = short("--run-dir", "out")
    (line,) = re.findall(r"^this run had already finished .*$", again.stderr, re.M)
    golden("resume of a finished run", line)
    assert again.stdout == first.stdout != whole.stdout
    more = short("--run-dir", "out", count=12)
    assert "resuming from step 8 of " in more.stderr
    assert trained(more) == pytest.approx(trained(whole), rel=1e-12)


def test_resume_names_a_changed_script_and_number_of_workers(short, tmp_path):
    short("--run-dir", "out", "--steps", "4", "--save-every", "2")
    script = tmp_path / "train.py"
    script.write_text(script.read_text() + "# a new line\n")
    changed = short("--run-dir", "out", "--workers", "2")
    assert "resuming from step 4 of " in changed.stderr
    assert ": written by 1 worker (data=1), now 2 workers (data=2)\n" in changed.stderr
    assert "the script has changed since the checkpoint; continuing with the new version:" in changed.stderr
    assert "+# a new line\n" in changed.stderr


@pytest.mark.slow
def test_resume_with_other_micro_batches_names_changed_mathematics(short, tmp_path):
    short("--run-dir", "out", "--steps", "4")
    plain = short("--run-dir", "out", "--steps", "5")
    assert "changed mathematics" not in plain.stderr
    other = short("--run-dir", "out", "--plan", "micro=4")
    assert (
        "the mathematics changes: global batch 24 in micro-batches of 3 rows until step 5, from now on 24 in"
        " micro-batches of 4\n" in other.stderr
    )


@pytest.mark.slow
def test_resume_with_a_grown_dataset_uses_the_rows_of_before(short, tmp_path):
    whole = short("--run-dir", "whole")
    short("--run-dir", "out", "--steps", "4")
    script = tmp_path / "train.py"
    script.write_text(script.read_text().replace("t.steps(data", "t.steps(TensorDataset(*map(twice, data.tensors))"))
    script.write_text("twice = lambda t: __import__('torch').cat([t, t])\n" + script.read_text())
    grown = short("--run-dir", "out")
    assert "the dataset has grown from 96 to 192 rows; this run continues with the first 96\n" in grown.stderr
    assert trained(grown) == pytest.approx(trained(whole), rel=1e-12)


def test_save_every_sets_the_steps_between_checkpoints(tmp_path):
    body = "import time\nfor report in make().steps(data, count=8):\n    time.sleep(0.3)  # one is written meanwhile\n"
    train_basics(tmp_path, body, 1, "--save-every", "3")
    steps = [int(step) for step in re.findall(r'"event":\s*"checkpoint",\s*"step":\s*(\d+)', journal(tmp_path / "out"))]
    # One begins when the one before it is there, which on a busy machine takes some steps.
    assert (steps[0], steps[-1]) == (3, 8)
    assert all(later - earlier >= 3 for earlier, later in pairwise(steps[:-1])), steps


def journal(folder: Path) -> str:
    return (folder / "journal.jsonl").read_text()


def test_save_every_refuses_a_wrong_interval(short, golden):
    golden("a wrong interval", short("--save-every", "soon", code=2).stderr)


def test_script_started_by_python_resumes(tmp_path):
    """`python train.py` with PACELINE_RUN_DIR: the same folder, the same end."""
    script = "from basics import *\nt = make()\nlist(t.steps(data, count=6))\nt.export('m.safetensors')\n"
    (tmp_path / "train.py").write_text(script)

    def alone(**more: str) -> str:
        with Process([sys.executable, "train.py"], environment(**more), cwd=tmp_path, stderr=PIPE) as process:
            stderr = process.communicate()[1]
        assert process.returncode == 0, stderr
        return stderr

    alone()
    whole = load_file(tmp_path / "m.safetensors")
    alone(PACELINE_RUN_DIR="out", PACELINE_MAX_STEPS="3")
    assert "resuming from step 3 of out" in alone(PACELINE_RUN_DIR="out")
    assert apart(load_file(tmp_path / "m.safetensors"), whole) <= 1e-12


LOOPS = """
import sys
from basics import *
class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter(data)
t = make()
t.state["start"] = 5
for epochs in map(int, sys.argv[1].split(",")):
    for report in t.steps(data, epochs=epochs):
        t.state["n"] = t.state.get("n", 0) + 1
        t.state["start"] += 1
print(t.state["n"], t.state["start"])
other = make()
list(other.steps(Stream(), epochs=2))
t.export("loops.safetensors")
other.export("stream.safetensors")
"""


def test_resume_goes_on_with_state_epochs_and_an_iterable_dataset(tmp_path):
    """Three loops of one epoch, stopped in the second one, train as one loop of three does. The trainer of an iterable
    dataset is stopped after five steps.
    """
    (tmp_path / "train.py").write_text(LOOPS)
    weights = []
    for folder, epochs, steps in (
        ("whole", "3", ()),
        ("out", "1,1,1", ("6",)),
        ("out", "1,1,1", ("17",)),
        ("out", "1,1,1", ()),
    ):
        options = ("--run-dir", folder, *(("--steps", *steps) if steps else ()))
        done = paceline("run", *options, "train.py", epochs, cwd=tmp_path)
        if not steps:
            weights.append([load_file(tmp_path / f"{name}.safetensors") for name in ("loops", "stream")])
    assert done.stdout == "12 17\n"
    assert "skipping the first 5 global batches: an iterable dataset must be read from its start\n" in done.stderr
    assert [apart(one, other) <= 1e-12 for one, other in zip(*weights, strict=True)] == [True, True]


@pytest.mark.slow
def test_resume_does_not_go_on_with_a_loop_that_was_left_before_another(tmp_path):
    """Where nothing followed it, the same command goes on with it."""
    (tmp_path / "train.py").write_text(
        "import sys\nfrom basics import *\nt = make(plan='exact')\n"
        "for report in t.steps(data, epochs=9):\n    if report.step == int(sys.argv[1]):\n        break\n"
        "if sys.argv[1] == '3':\n    list(t.steps(data, count=5))\n"
        "t.export('weights.safetensors')\nprint(t.steps_done)\n"
    )
    found = []
    for name, steps, leave in (("a", (), 3), ("b", ("--steps", "5"), 3), ("b", (), 3), ("c", (), 2), ("c", (), 3)):
        arguments = ("run", "--run-dir", name, *steps, "train.py", str(leave))
        done = paceline(*arguments, cwd=tmp_path)
        found.append((done.stdout, (tmp_path / "weights.safetensors").read_bytes()))
    assert [said for said, _ in found] == ["8\n", "", "8\n", "2\n", "8\n"]
    assert found[0][1] == found[2][1] == found[4][1]
    (end,) = [event["event"] for event in read_journal(tmp_path / "a") if event["event"] in ("stopped", "finished")]
    assert end == "finished"
