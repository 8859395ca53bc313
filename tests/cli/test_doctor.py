"""`paceline doctor`: the right cause and worker first, of real runs with one thing wrong, and of clean ones."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from agents import journal
from clusters import Cluster
from clusters import cluster as cluster
from launching import paceline
from networks import hosts as hosts

from paceline.observe.doctor import verdict
from paceline.observe.summary import Summary
from paceline.observe.usual_step import usual_step

# The clock of steps stands still but for what rows take, 4 ms each on each worker, and each step has a record: seconds
# and shares are the same whatever else this machine does.
SCRIPT = """
from basics import *
import os, time, paceline.observe.step_totals, paceline.trainer
from paceline.train import step_context, step_verbs
rank, CASE = int(os.environ["PACELINE_RANK"]), os.environ["CASE"]
class Clock:
    now = 0.0
    perf_counter = staticmethod(lambda: Clock.now)
step_context.time = step_verbs.time = paceline.trainer.time = Clock
paceline.observe.step_totals.EVERY = 0.0
class Rows:
    def __len__(self): return len(data)
    def __getitem__(self, row):
        if CASE == "loader" and rank == 1: Clock.now += 0.008
        return data[row]
def loss(o, b):
    Clock.now += 0.004 * len(o) * (3 if CASE == "worker" and rank == 2 else 1)
    if CASE == "hang" and rank == 1 and t.steps_done == 5: time.sleep(600)
    return F.cross_entropy(o, b[1]) * (float("nan") if CASE == "not finite" and rank == 2 and t.steps_done == 7 else 1)
t = make(loss)
for report in t.steps(Rows(), count=40, loader={"num_workers": 0}):
    if CASE == "diverged" and rank == 3 and report.step == 5:
        with torch.no_grad(): t.model[0].weight[0, 0] += 2**-20
"""
CASES: dict[str, tuple[int | None, int, str]] = {  # worker, exit code, the first line
    "": (None, 0, "no problem found: finished at step 40"),
    "worker": (2, 0, "worker 2 is slow (on {host})"),
    "loader": (1, 0, "data loading slows training down: worker 1 on {host}"),
    "not finite": (2, 1, "a loss or gradient is NaN or infinite (worker 2)"),
    "diverged": (3, 1, "the workers differ (worker 3)"),
    "hang": (1, 1, "the script hung (worker 1)"),
}
MISMATCH = "CollectiveMismatchError"
QUICK = ("", "worker", "loader")


@pytest.mark.parametrize(
    "kind", [case if case in QUICK else pytest.param(case, marks=pytest.mark.slow) for case in CASES]
)
def test_what_is_wrong_with_a_run(kind: str, tmp_path: Path) -> None:
    worker, code, line = CASES[kind]
    (tmp_path / "train.py").write_text(SCRIPT)
    command = ["run", "--workers", "4", "--run-dir", "out", "--max-restarts", "0", "--hang-timeout", "5", "train.py"]
    paceline(*command, cwd=tmp_path, code=code, CASE=kind, PACELINE_STANDSTILL="2")
    summary = Summary(tmp_path / "out")
    steps = usual_step(summary)
    assert steps is not None
    found = verdict(summary, steps)
    assert (found.kind, found.worker) == (kind, worker), (found, steps)
    said = paceline("doctor", "out", cwd=tmp_path).stdout.splitlines()
    assert said[0] == line.format(host=journal(tmp_path / "out", "worker")[0]["host"])
    if kind in QUICK:
        rows, odd = 24 * 0.004, {"loader": {1: 24 * 0.012}, "worker": {2: 24 * 0.012}}
        assert steps.pace == pytest.approx(dict.fromkeys(range(4), rows) | odd.get(kind, {}))
        assert steps.loading == pytest.approx(
            dict.fromkeys(range(4), 0.0) | ({1: 24 * 0.008} if kind == "loader" else {})
        )
    if kind == "loader":  # in the end it has few rows, of which each costs it a whole micro-batch
        assert "with instant data loading" in said[-2]
        assert steps.parts[1] < 0.1
        assert steps.what_if()["with instant data loading"] == pytest.approx(24 * 0.004 / 4)


WIDE = """
import torch, paceline, sys
from torch import nn
x = torch.randn(64, 512, generator=torch.Generator().manual_seed(0))
t = paceline.Trainer(model=lambda: nn.Linear(512, 2048), loss=lambda o, b: o.square().mean(),
                     optimizer=lambda params: torch.optim.SGD(params, lr=1e-3), global_batch=16)
for report in t.steps(x, count=12):
    pass
"""


@pytest.mark.root
@pytest.mark.slow
def test_a_slow_link(cluster: Callable[[int], Cluster]) -> None:
    made = cluster(2)
    for host in made.network.hosts:
        host.cap(100)
    made.start(0, 1, "--min-workers", "2", code=WIDE)
    made.until(lambda: made.agents[0].events("worker"))
    made.start(1, 1, code=WIDE)
    made.end(0, 0)
    folder = made.agents[0].folder
    said = paceline("doctor", folder, cwd=made.folder).stdout.splitlines()
    assert said[0] == "the link between hosts slows training down"
    steps = usual_step(Summary(folder))
    assert steps is not None
    assert "with a link twice as fast" in said[-2]
    assert steps.what_if()["with a link twice as fast"] < 0.7 * steps.step_seconds
    assert steps.link > 0.25, "4 MB at 100 Mbit/s, each way"
    (one, there), (other, back) = Summary(folder).sent.items()
    assert {one, other} == {"nowhere-1 to nowhere-2", "nowhere-2 to nowhere-1"}
    counted = sum(host.sent() for host in made.network.hosts)  # with headers, and the words of agents
    assert 0.8 * counted < there + back < counted


# ---- of a journal alone


def told(folder: Path, *events: dict[str, Any]) -> Summary:
    folder.mkdir(exist_ok=True)
    start = {"event": "start", "workers": 4}
    lines = ({"at": 100.0 + number, **event} for number, event in enumerate((start, *events)))
    (folder / "journal.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return Summary(folder)


def step(number: int, own: dict[int, float], whole: float, **more: Any) -> dict[str, Any]:
    time = {"data": 0.0, "compute": own[0], "reduce": whole - own[0]}
    record = {"event": "step", "trainer": 0, "step": number, "steps": 1, "samples": 8, "seconds": whole, "time": time}
    return {**record, "computed": {str(worker): seconds for worker, seconds in own.items()}, **more}


def test_the_model_of_a_step(tmp_path: Path) -> None:
    """A worker of a third of the speed, with equal shares, beside 0.1 s that all take."""
    own = {0: 0.2, 1: 0.2, 2: 0.2, 3: 0.6}
    summary = told(tmp_path / "a", *(step(number, own, 0.7) for number in range(1, 21)))
    steps = usual_step(summary)
    assert steps is not None
    assert steps.overhead == pytest.approx(0.1)
    dealt = {
        "without worker 3": 0.1 + 0.8 / 3,
        "with rows assigned by speed": 0.1 + 0.24,
        "with instant data loading": 0.1 + 0.24,
    }
    dealt["with two more workers"] = 0.1 + 1 / (5 / 0.8 + 1 / 2.4)
    assert steps.what_if() == pytest.approx(dealt)
    found = verdict(summary, steps)
    assert (found.kind, found.worker) == ("worker", 3)
    often = "and it was the slowest in 100% of the records"
    assert found.evidence[0] == f"for the same rows it takes 3.00 times as long as the other workers, {often}"
    shares = {
        "event": "shares",
        "trainer": 0,
        "step": 10,
        "workers": [0, 1, 2, 3],
        "parts": [0.3, 0.3, 0.3, 0.1],
    }  # all end together
    before = [step(number, own, 0.7) for number in range(1, 11)]
    after = [step(number, dict.fromkeys(range(4), 0.24), 0.34) for number in range(11, 41)]
    summary = told(tmp_path / "b", *before, shares, *after)
    steps = usual_step(summary)
    assert steps is not None
    assert (steps.step_seconds, steps.what_if()) == (pytest.approx(0.34), pytest.approx(dealt))
    assert verdict(summary, steps).worker == 3, "also where it has few rows"


@pytest.mark.parametrize("merged", [True, False])
def test_what_is_dealt_evenly_is_so_to_the_row_where_micro_batches_are_divided(merged: bool, tmp_path: Path) -> None:
    grid = {"event": "grid", "trainer": 0, "phase": 0, "unit": 1, "shares": [3, 3, 2]}
    decided = {
        "event": "decision",
        "trainer": 0,
        "what": "micro-batches may be merged and computed together",
        "why": "seen",
    }
    own = dict.fromkeys(range(3), 0.2) if merged else {0: 0.225, 1: 0.225, 2: 0.15}
    steps = (step(number, own, 0.3) for number in range(1, 21))
    summary = told(tmp_path, grid, *([decided] if merged else []), *steps)
    found = usual_step(summary)
    assert found is not None
    assert found.pace == pytest.approx(dict.fromkeys(range(3), 0.6))
    assert verdict(summary, found).kind == ""


def test_loading_and_links_in_what_ifs(tmp_path: Path) -> None:
    """Rows are waited for on worker 1, from which the shares went away after step 10."""
    before = [step(number, {0: 0.15, 1: 0.5}, 0.6) for number in range(1, 11)]
    after = [step(number, {0: 0.27, 1: 0.2}, 0.37) for number in range(11, 21)]
    loaded = {"event": "loaded", "host": "b", "workers": {"0": [0.0, 20], "1": [0.7 * 10 * (0.5 + 0.2), 20]}}
    shares = {"event": "shares", "trainer": 0, "step": 10, "workers": [0, 1], "parts": [0.9, 0.1]}
    summary = told(tmp_path / "a", *before, shares, *after, loaded)
    steps = usual_step(summary)
    assert steps is not None
    assert (steps.pace, steps.loading) == (pytest.approx({0: 0.3, 1: 1.0}), pytest.approx({0: 0.0, 1: 0.7}))
    assert steps.parts == pytest.approx({0: 0.9, 1: 0.1})
    expected = {
        "with instant data loading": 0.1 + 0.15,
        "without worker 1": 0.4,
        "with rows assigned by speed": 0.1 + 0.3 / 1.3,
    }
    expected["with two more workers"] = 0.1 + 1 / (3 / 0.3 + 1 / 1.0)  # as fast as worker 0
    assert steps.what_if() == pytest.approx(expected)
    found = verdict(summary, steps)
    assert (found.kind, found.worker, found.what) == ("loader", 1, "data loading slows training down: worker 1 on b")
    links = {"event": "links", "pairs": [[[0], [1], 1e7, 1e-3]], "over": "eth0"}
    summary = told(tmp_path / "b", links, *(step(number, {0: 0.2, 1: 0.3}, 0.9) for number in range(1, 21)))
    steps = usual_step(summary)
    assert steps is not None
    assert steps.link == pytest.approx(0.6), "worker 0 waits 0.1 s of 0.7 for worker 1"
    assert steps.what_if()["with a link twice as fast"] == pytest.approx(0.6)
    assert verdict(summary, steps).kind == "link"


def test_a_loader_is_replayed_from_the_records_that_tell_its_pace(tmp_path: Path) -> None:
    """Worker 1 loads a whole micro-batch for the few rows that it has from step 10 on, and every second one late."""

    def made(number: int) -> dict[str, Any]:
        late = 0.1 * (number % 2)
        loads, computes = (0.4 + late, 0.3) if number <= 10 else (0.2 + late, 0.06)
        lanes = {"0 data": 0.0, "1 data": loads}
        own = {0: 0.3 if number <= 10 else 0.54, 1: loads + computes}
        return step(number, own, max(own.values()) + 0.1, lanes=lanes)

    shares = {"event": "shares", "trainer": 0, "step": 10, "workers": [0, 1], "parts": [0.9, 0.1]}
    before, after = [made(number) for number in range(1, 11)], [made(number) for number in range(11, 31)]
    steps = usual_step(told(tmp_path, *before, shares, *after))
    assert steps is not None
    assert steps.pace == pytest.approx({0: 0.6, 1: 1.4})
    assert steps.loading == pytest.approx({0: 0.0, 1: 0.8})
    assert steps.what_if()["with instant data loading"] == pytest.approx(0.1 + 0.3)


def test_who_hangs_now_and_what_a_run_costs(tmp_path: Path) -> None:
    own = dict.fromkeys(range(4), 0.2)
    hang = {"event": "hang", "worker": 1, "seconds": 31.0, "line": "train.py:3 in loss: x()", "busy": True}
    summary = told(tmp_path / "a", step(1, own, 0.3), hang)
    found = verdict(summary, usual_step(summary))
    assert (found.kind, found.worker, found.what) == ("hang", 1, "worker 1 hangs")
    assert found.evidence == ("no progress for 31 s: busy at train.py:3 in loss: x()",)
    summary = told(tmp_path / "b", hang, step(1, own, 0.3))
    assert verdict(summary, usual_step(summary)).kind == "", "it goes on"
    costs = [step(number, own, 0.3, account={"steps": 1.0, "saving": 2.0}) for number in range(1, 41)]
    found = verdict(summary := told(tmp_path / "c", *costs), usual_step(summary))
    assert found.kind == "", "one that took long is no habit"
    saved = [{"event": "checkpoint", "step": 10 * number, "seconds": 20.0} for number in range(1, 4)]
    found = verdict(summary := told(tmp_path / "e", *costs, *saved), usual_step(summary))
    assert (found.kind, found.what) == ("saving", "checkpoints took 67% of 2 min")
    assert usual_step(told(tmp_path / "d")) is None
    assert paceline("doctor", tmp_path / "d", cwd=tmp_path).stdout.startswith("no problem found: last seen ")


def test_a_loader_of_one_worker_that_is_half_as_slow_again(tmp_path: Path) -> None:
    """In a process of its own, so that a third of that worker's time is waiting for rows; and in the worker's."""
    cases = (("beside", [0.0, 0.0, 0.1, 0.0], 0.2), ("in line", [0.1, 0.1, 0.15, 0.1], 0.2))
    for name, data, own in (*cases, ("beside one that is a little slow", [0.2, 0.24, 0.3, 0.2], 0.05)):
        seconds = {worker: own + waits - min(data) for worker, waits in enumerate(data)}
        lanes = {f"{worker} data": waits for worker, waits in enumerate(data)}
        summary = told(tmp_path / name, *(step(number, seconds, 0.4, lanes=lanes) for number in range(1, 21)))
        found = verdict(summary, usual_step(summary))
        assert (found.kind, found.worker, found.what) == ("loader", 2, "data loading slows training down: worker 2"), (
            found
        )


def test_what_if_is_replayed(tmp_path: Path) -> None:
    """All wait for the slowest of several that vary, and an update takes as long for fewer rows."""
    own = [{worker: 0.31 if number % 4 == worker else 0.21 for worker in range(4)} for number in range(31)]
    lanes = {f"{worker} update": 0.01 for worker in range(4)}
    steps = usual_step(told(tmp_path, *(step(number, own[number], 0.4, lanes=lanes) for number in range(1, 31))))
    assert steps is not None
    assert steps.overhead == pytest.approx(0.09)
    assert steps.fixed == pytest.approx(dict.fromkeys(range(4), 0.01))
    (without,) = (seconds for name, seconds in steps.what_if().items() if name.startswith("without"))
    assert without == pytest.approx(0.09 + 0.01 + 0.3 * 4 / 3)


def test_a_pause_is_not_usual_nor_are_few_steps(tmp_path: Path) -> None:
    """Rows that once came 20 s late, and a first step of 45 s on one worker."""
    usual, late = dict.fromkeys(range(4), 0.2), {0: 0.2, 1: 20.2, 2: 0.2, 3: 0.2}
    lanes = [{f"{worker} data": 20.0 if worker == 1 and paused else 0.01 for worker in range(4)} for paused in (0, 1)]
    steps = [step(number, late if number == 9 else usual, 0.3, lanes=lanes[number == 9]) for number in range(1, 31)]
    loaded = {"event": "loaded", "host": "b", "workers": {"1": [20.3, 30]}}
    summary = told(tmp_path / "a", *steps, loaded)
    assert verdict(summary, usual_step(summary)).kind == ""
    first, then = {**usual, 2: 45.0}, {"steps": 9, "step": 10, "samples": 72}
    nine = dict.fromkeys(range(4), 0.02)
    summary = told(tmp_path / "b", step(1, first, 45.1), step(10, nine, 0.25) | then)
    assert verdict(summary, usual_step(summary)).kind == ""


@pytest.mark.parametrize(
    ("odd", "kind"),
    [
        (["step 8", "any 'b'"], "skipped"),  # of a, b, step
        (["step 8", "all_reduce 'a'", "any 'b'", "step 9"], "skipped"),  # where all others save for the first time
        (["step 8", "all_reduce 'c'"], "mismatch"),
        (["step 8", "save()"], "mismatch"),
    ],
)
def test_who_called_another_collective_and_who_left_one_out(odd: list[str], kind: str, tmp_path: Path) -> None:
    before = ["step 6", "all_reduce 'a'", "any 'b'", "step 7", "all_reduce 'a'", "any 'b'"]
    most = ["step 8", "all_reduce 'a'", *(["any 'b'", "save()"] if len(odd) > 2 else [])]
    where = [f"worker 2 is in {odd[-1]} at train.py:7", f"workers 0, 1, 3 are in {most[-1]} at train.py:6"]
    cause = f"CollectiveMismatchError: workers called different collectives: {', '.join(where)}; all workers must call"
    summary = told(tmp_path, {"event": "failed", "worker": 0, "kind": MISMATCH, "cause": cause, "text": ""})
    assert verdict(summary, None).kind == "mismatch", "without what the flight recorder has"
    (tmp_path / "stacks").mkdir()
    for worker in range(4):
        names = [name for name in (*before, *(odd if worker == 2 else most)) for _ in range(2)]
        lines = [{"worker": worker, "host": "a"}, *({"group": "team", "name": name} for name in names)]
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (tmp_path / "stacks" / f"worker-{worker}.jsonl").write_text(text)
    found = verdict(summary, None)
    assert (found.kind, found.worker) == (kind, 2)


def test_who_of_two_left_a_collective_out_and_who_ended(tmp_path: Path) -> None:
    start = (
        "CollectiveMismatchError: workers called different collectives: worker 0 is in step 4 at train.py:3, worker 1 "
    )
    cause = start + "ended after step 3 at train.py:3; every worker"
    summary = told(tmp_path / "a", {"event": "failed", "worker": 0, "kind": MISMATCH, "cause": cause, "text": ""})
    found = verdict(summary, None)
    assert (found.kind, found.worker, found.what) == ("skipped", 1, "a worker skipped a collective (worker 1)")
    cause = start + "is in save() at b:2;"
    summary = told(tmp_path / "b", {"event": "failed", "worker": 0, "kind": MISMATCH, "cause": cause, "text": ""})
    assert (verdict(summary, None).kind, verdict(summary, None).worker) == ("mismatch", None)
