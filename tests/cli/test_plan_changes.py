"""A run whose plan `auto` has chosen goes on under another plan when that pays, and trains as one worker does."""

from __future__ import annotations

import os
import re
import signal
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from clusters import Cluster
from clusters import cluster as cluster
from launching import SCRIPTS, paceline, piped
from networks import hosts as hosts
from safetensors.torch import load_file

from paceline.base.journal import Journal, effective_steps, read_journal
from paceline.plan import Plan
from paceline.planner.descriptions import BlockDescription, MachineDescription, ModelDescription
from paceline.planner.outlook import Outlook

ROW = 3e-4  # seconds that a block takes for a row
AUTO = "--workers", "2", "--plan", "auto", "--run-dir", "a"
TRAIN = f"""
import os, signal, sys, time
from basics import *

RANK, WORKERS = os.environ["PACELINE_RANK"], os.environ["PACELINE_WORLD_SIZE"]

class Slow(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        time.sleep({ROW} * len(x) * (SLOW if RANK == "1" else 1))
        return self.inner(x)

def model():
    torch.manual_seed(0)
    return nn.Sequential(*(Slow(nn.Linear(10, 10)) for _ in range(4)), nn.Linear(10, 2)).double()

trainer = make(model=model)
if str(trainer.plan) == "REFUSED":
    sys.exit("this model cannot be trained so")
for report in trainer.steps(data, count=COUNT):
    if report.step >= 10 and RANK == os.environ.get("DIES"):
        os.kill(os.getpid(), signal.SIGKILL)
    if END:
        trainer.stop()
trainer.export("out.safetensors")
"""


def outlook(plan: str, seconds: float, **changes: Any) -> Outlook:
    """What `auto` knows of the script: a step takes what its blocks take."""
    blocks = [BlockDescription(str(n), 110, passes=80.0, seconds={"3": 3 * ROW, "12": 12 * ROW}) for n in range(4)]
    model = ModelDescription("Sequential", (*blocks, BlockDescription("4", 22)), 24, merges=True)
    machine = MachineDescription("cpu", {"fp32": 1e11}, 1e12, 1e10, measured=True)
    about = {"busy": (seconds, seconds), **changes}
    return Outlook(plan, len(about["busy"]), seconds, seconds, "data=2", "", model, machine, **about)


PIPELINE = outlook("pipeline=2", 24 * 2 * ROW)


def begun(
    folder: Path, known: Outlook, slow: float, end: str, count: int = 20_000, refused: str = "", name: str = "a"
) -> None:
    """Makes a run folder, with this name, of a run whose plan was chosen, and that has not trained yet.

    It would make `count` steps, but a test waits for few of them: until the expression `end` is true. Worker 1 takes
    `slow` times as long as in the trial. The script cannot be run under the plan `refused`.
    """
    words = {"COUNT": str(count), "SLOW": str(slow), "END": end, "REFUSED": refused}
    (folder / "train.py").write_text(re.sub("|".join(words), lambda word: words[word[0]], TRAIN))
    journal = Journal(folder / name)
    journal.write("decision", what="", why="", plan=known.plan, asked="auto", workers=known.workers)
    journal.close()
    known.write(folder / name)


def run(folder: Path, *words: str, **variables: str) -> str:
    command = ("run", *words, "train.py")
    return paceline(*command, cwd=folder, XDG_CACHE_HOME=str(folder), **variables).stderr


def decisions(folder: Path, name: str = "a") -> list[dict[str, Any]]:
    """The decisions about plans, after the first one."""
    return [event for event in read_journal(folder / name) if event["event"] == "decision" and "plan" in event][1:]


def starts(folder: Path, name: str = "a") -> list[str]:
    return [event["plan"] for event in read_journal(folder / name) if event["event"] == "start"]


def trains_as_one_worker(folder: Path, name: str = "a") -> None:
    """Compares the weights and the loss curve with those of one worker; each step counts once, with all of its rows."""
    several = load_file(folder / "out.safetensors")
    count = effective_steps(read_journal(folder / name))[-1]["step"]
    text = (folder / "train.py").read_text()
    (folder / "train.py").write_text(re.sub(r"if .*:(?=\n        trainer.stop)", f"if report.step == {count}:", text))
    run(folder, "--workers", "1", "--run-dir", "one")
    one = load_file(folder / "out.safetensors")
    for parameter, weight in one.items():
        torch.testing.assert_close(several[parameter], weight, rtol=1e-12, atol=1e-12)
    losses = []
    for run_name in (name, "one"):
        steps = effective_steps(read_journal(folder / run_name))
        losses.append({event["step"]: event["loss"] for event in steps})
        assert sum(event["steps"] for event in steps) == count
        assert sum(event["samples"] for event in steps) == 24 * count
    common = losses[0].keys() & losses[1].keys()
    assert count in common
    assert all(losses[0][step] == pytest.approx(losses[1][step], abs=1e-12) for step in common)


def test_a_run_leaves_a_plan_that_waits_for_a_slow_worker(tmp_path):
    """Stages of a pipeline wait for the slow worker; shares of the rows follow its speed."""
    begun(tmp_path, PIPELINE, 8, "report.step == 70")
    said = run(tmp_path, *AUTO)
    first, second = decisions(tmp_path)
    assert first["what"] == "the plan stays 'pipeline=2'"
    assert second["plan"] != "pipeline=2"
    assert second["what"] == f"the plan changes from 'pipeline=2' to {second['plan']!r}"
    assert f"auto: {second['what']}: {second['why']}" in said
    assert second["why"].startswith("worker 1 takes ")
    assert "continue with" not in said
    assert starts(tmp_path) == ["data=1 pipeline=2", str(Plan.parse(second["plan"]).validate(2))]
    trains_as_one_worker(tmp_path)


@pytest.mark.slow
def test_a_run_that_is_about_to_end_keeps_its_plan(tmp_path):
    begun(tmp_path, PIPELINE, 8, "False", count=50)
    assert "changes" not in run(tmp_path, *AUTO)
    steps = [event for event in read_journal(tmp_path / "a") if event["event"] == "step"]
    assert sum(event["seconds"] for event in steps) > 3 * 50 * PIPELINE.seconds  # a worker was slow
    assert starts(tmp_path) == ["data=1 pipeline=2"]


@pytest.mark.slow
def test_a_plan_under_which_the_script_does_not_start_is_left_again(tmp_path):
    """The run goes on with the plan before, and that plan is not chosen again."""
    about = {"ratios": {"data=1 pipeline=2": 1e-3}, "busy": (10.0, 10.0)}
    plans = outlook("data=2", 1e-3, **about)._plans(2, Plan.parse("data=2").validate(2))
    others = tuple(str(plan) for plan in plans if str(plan) != "data=1 pipeline=2")
    known = outlook("data=2", 1e-3, **about, refused=others)
    begun(tmp_path, known, 1, "report.step == 500", refused="data=1 pipeline=2")
    said = run(tmp_path, *AUTO)
    assert "auto: the plan changes from 'data=2' to 'pipeline=2': " in said
    assert "auto: the plan stays 'data=2': the run did not start under 'pipeline=2'" in said
    assert starts(tmp_path)[:3] == ["data=2", "data=1 pipeline=2", "data=2"]
    kept = Outlook.read(tmp_path / "a")
    assert kept is not None
    assert kept.refused == (*others, "data=1 pipeline=2")
    trains_as_one_worker(tmp_path)


@pytest.mark.slow
def test_workers_that_are_lost_for_good_are_not_waited_for(tmp_path):
    """Of two pipelines of two workers one is left; all workers that are left train together under another plan."""
    seconds = 12 * 2 * ROW
    known = outlook("pipeline=2", seconds, busy=(seconds,) * 4)
    begun(tmp_path, known, 1, 'WORKERS == "3" and report.step % 100 == 0')
    said = run(tmp_path, *AUTO, "--workers", "4", "--max-restarts", "1", DIES="3")
    assert "it is not restarted" in said
    *_, changed = decisions(tmp_path)  # three workers cannot divide layers of ten rows, which only a start shows
    assert changed["workers"] == 3
    assert "3 of 4 workers can be used; " in changed["why"]
    first, *others = starts(tmp_path)
    assert first == "data=2 pipeline=2"
    assert others[-1] == str(Plan.parse(changed["plan"]).validate(3))
    assert first not in others
    trains_as_one_worker(tmp_path)


@pytest.mark.slow
@pytest.mark.root
@pytest.mark.parametrize("spans", [False, True])
def test_workers_that_join_are_used_under_another_plan(spans, cluster, tmp_path):
    """A pipeline of two workers cannot use a third one, which another host brings. That host follows the run to the new
    plan, and the run ends on both. If the hosts share the checkpoints, the only replica of a plan may span them.
    """
    here: Cluster = cluster(2)
    present, known = Plan.parse("pipeline=2").validate(2), msgspec.structs.replace(PIPELINE, spans=spans)
    others = known._plans(2, present)
    others += [plan for plan in known._plans(3, present, (2, 1)) if spans and (plan.shard, plan.zero) != (3, 1)]
    known = msgspec.structs.replace(known, refused=tuple(map(str, others)))
    begun(tmp_path, known, 1, 'os.path.exists("go") and report.step % 100 == 0', name="run-0")
    code, path = (tmp_path / "train.py").read_text(), f"{SCRIPTS}:{os.environ.get('PYTHONPATH', '')}"
    here.variables = {"PYTHONPATH": path, "XDG_CACHE_HOME": str(tmp_path), "OMP_NUM_THREADS": "1"}
    saved = ("--checkpoints", str(tmp_path / "saved")) if spans else ()
    here.start(0, 2, "--plan", "auto", *saved, code=code)
    here.until(lambda: here.status().get("step", 0) > 20)
    joined = here.start(1, 1, code=code)
    here.until(lambda: decisions(tmp_path, "run-0")[1:] and here.has(3, step=1), 120)
    (tmp_path / "go").touch()
    here.end(0, 0)
    changed = decisions(tmp_path, "run-0")[-1]
    assert changed["workers"] == 3
    assert Plan.parse(changed["plan"]).validate(3).mesh(3).data == (1 if spans else 3)
    assert changed["why"].startswith("3 instead of 2 workers can be used; ")
    assert len(starts(tmp_path, "run-0")) == 2
    assert joined.text.count("the plan of the run changes; the workers of this host join it again\n") == 1
    trains_as_one_worker(tmp_path, "run-0")


@pytest.mark.slow
@pytest.mark.root
@pytest.mark.parametrize(("words", "replicas"), [("auto", 3), ("auto pipeline=3", 1)])
def test_plans_are_tried_on_all_hosts_of_a_run_that_begins(words, replicas, cluster, tmp_path):
    """The host that joins takes part in each trial, over a link that is measured, and then in the run, also with a part
    of a replica.
    """
    here: Cluster = cluster(2)
    for host in here.network.hosts:
        host.cap(200)
    begun(tmp_path, PIPELINE, 1, 'os.path.exists("go") and report.step % 100 == 0', name="unused")
    code, path = (tmp_path / "train.py").read_text(), f"{SCRIPTS}:{os.environ.get('PYTHONPATH', '')}"
    here.variables = {"PYTHONPATH": path, "XDG_CACHE_HOME": str(tmp_path), "OMP_NUM_THREADS": "1"}
    saved = () if replicas > 1 else ("--checkpoints", str(tmp_path / "saved"))
    first = here.start(0, 2, "--plan", words, "--min-workers", "3", *saved, code=code)
    here.until(lambda: (first.folder / "token").exists())
    joined = here.start(1, 1, "--plan", words, code=code)
    here.until(lambda: first.events("start") and here.has(3, step=1), 240)
    (tmp_path / "go").touch()
    here.end(0, 0)
    chosen, *changes = (event for event in first.events("decision") if "plan" in event)
    assert chosen["workers"] == 3
    assert re.match(r"a step of .* was measured; others took .*; trials took ", chosen["why"])
    assert Plan.parse(chosen["plan"]).validate(3).mesh(3).data == replicas
    assert first.text.count("waiting for 1 worker of other hosts ...") == 1
    known = Outlook.read(first.folder)
    assert known is not None
    assert known.machine.links[-1].name == "between hosts"
    assert 1e7 < known.machine.links[-1].bandwidth < 3e7
    processes = [event for event in joined.events("worker") if event["what"] == "started"]
    assert len(processes) == 1 + len(changes), "trials leave no trace"
    trains_as_one_worker(tmp_path, "run-0")


@pytest.mark.slow
@pytest.mark.root
def test_a_host_that_is_lost_while_plans_are_tried_ends_the_run(cluster, tmp_path):
    """It does not wait for that host, nor choose a plan for fewer workers."""
    here: Cluster = cluster(2)
    begun(tmp_path, PIPELINE, 30, "False", name="unused")  # slow enough to be disturbed
    code, path = (tmp_path / "train.py").read_text(), f"{SCRIPTS}:{os.environ.get('PYTHONPATH', '')}"
    here.variables = {"PYTHONPATH": path, "XDG_CACHE_HOME": str(tmp_path), "OMP_NUM_THREADS": "1"}
    first = here.start(0, 2, "--plan", "auto", "--min-workers", "3", code=code)
    here.until(lambda: (first.folder / "token").exists())
    joined = here.start(1, 1, "--plan", "auto", code=code)
    here.until(lambda: here.has(3), 120)
    joined.kill()
    assert first.process.wait(90) == 2
    what = "paceline: a host was lost while plans were tried; start the same commands again\n"
    assert first.text.endswith(what)
    assert not first.events("start")


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGINT])
def test_a_run_that_is_stopped_while_its_plan_changes_stops(how, tmp_path):
    """It has a checkpoint, from which the same command continues under the plan that it has by then."""
    begun(tmp_path, PIPELINE, 8, "report.step == 70")
    command = sys.executable, "-m", "paceline", "run", *AUTO, "train.py"
    with piped(command, tmp_path, XDG_CACHE_HOME=str(tmp_path)) as process:
        assert process.stderr is not None
        lines = iter(process.stderr.readline, "")
        assert next((line for line in lines if line.startswith("auto: the plan changes")), None)
        process.send_signal(how)
        rest = "".join(lines)
        assert process.wait(60) == (75 if how == signal.SIGTERM else 130)
    assert "stopped after step " in rest
    assert "continue with: paceline run --workers 2 --run-dir a --plan auto train.py" in rest
    run(tmp_path, *AUTO)
    trains_as_one_worker(tmp_path)
