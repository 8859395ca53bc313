"""With `quorum=` a merge does not wait for the last island: who is late is left out, named, and counts later."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from subprocess import PIPE
from typing import Any

import pytest
from agents import journal, until
from clusters import Cluster
from clusters import cluster as cluster
from covering import each_value
from island_runs import TOLERANCE
from islands import BATCH, CASES, DATA, MICRO, SEED, STEPS, loss
from launching import SCRIPTS, paceline, train_basics
from networks import hosts as hosts
from oracle import LateIslands, apart, grid, in_order
from safetensors.torch import load_file
from warm import Process, environment

from paceline import sample_index
from paceline.base.exit_codes import STOPPED
from paceline.observe.summary import Summary, facts
from paceline.parallel.cost_model import Facts
from paceline.parallel.plan_cost import cost
from paceline.plan import Plan
from paceline.team.fault_injection import read_log
from paceline.team.merge_quorum import LEAST, MOST, USUAL, MergeDecider, RoundReport

ROW_NUMBERS = {float(x[0]): number for number, (x, _, _) in enumerate(DATA)}


def train_late(folder: Path, workers: int, plan: str, *options: str, code: int = 0, **env: str) -> str:
    start = ("--workers", str(workers), "--run-dir", "run", *options)
    done = paceline("run", *start, SCRIPTS / "late.py", folder, plan, cwd=folder, code=code, **env)
    return done.stdout + done.stderr


def rows_of(batch: Any) -> list[int]:
    return [ROW_NUMBERS[float(row[0])] for row in batch[0]]


def check_merges(
    folder: Path,
    count: int,
    every: int,
    run: str = "run",
    order: Callable[..., int] = sample_index,
    lost: bool = False,
    steps: int = STEPS,
) -> None:
    """Weights are those of one process that merges as the journal says; the same bytes on all workers after each merge;
    all rows counted once, or named. Unless work was lost and done again, the loss has seen just these.
    """
    late = {event["step"]: event for event in journal(folder / run, "late")}
    uncounted = {(one["step"], one["island"]): one["rows"] for one in journal(folder / run, "uncounted")}
    batches = grid(DATA, BATCH, MICRO, count=steps, seed=SEED, order=order)
    islands = LateIslands(CASES["adamw"], loss, batches, count, seed=SEED)
    weights = islands.train(every, late, uncounted, rows_of)
    assert apart(load_file(folder / "weights.safetensors"), weights) <= TOLERANCE
    figures = json.loads((folder / "told.json").read_text())
    named = sum(where[2] for event in late.values() for where in event["missed"].values()) + sum(uncounted.values())
    whole = sum(len(batch[0]) for step in batches for batch in step)
    assert named == islands.missed
    assert sum(one["samples"] for one in figures) == islands.counted == whole - named
    seen: dict[int, set[int]] = {}
    for path in folder.glob("seen-*.json"):
        for step, rows in json.loads(path.read_text()).items():
            seen.setdefault(int(step), set()).update(rows)
    assert lost or seen == islands.taken
    digests: dict[str, set[str]] = {}
    for path in folder.glob("digests-*.json"):
        for step, digest in json.loads(path.read_text()).items():
            digests.setdefault(step, set()).add(digest)
    assert all(len(some) == 1 for some in digests.values()), digests


def test_late_island_counts_in_a_later_merge(tmp_path: Path) -> None:
    """Island 2 waits in its first step of the first two rounds until the merge is decided; in the third it is ready."""
    output = train_late(tmp_path, 3, "local=3 every=2 quorum=2", LATE="2:0:0:4")
    merges = journal(tmp_path / "run", "merge")
    assert [merge["islands"] for merge in merges] == [[0, 1], [0, 1], [0, 1, 2], [0, 1, 2]]
    late = journal(tmp_path / "run", "late")
    assert [event["late"] for event in late[:2]] == [[2], [2]]
    check_merges(tmp_path, 3, 2)
    assert "the merge after step 2 excludes island 2, which missed 4 rows of step 2" in output, output
    happened = dict(facts(Summary(tmp_path / "run"))["What happened"])
    assert re.fullmatch(r"island 2: 2 merges missed, \d+ rows not trained on", happened["too late"])


def report(
    turn: int, made: str = "", ready: str = "", number: int = 0, quorum: int = 2, void: bool = False
) -> RoundReport:
    """What a team of three islands reports, which are named by their digits."""
    return RoundReport(turn, number, 0, 10 * turn, tuple(map(int, made)), tuple(map(int, ready)), 3, quorum, void)


def test_merge_quorum_decides_once_who_is_in_a_merge() -> None:
    merges = MergeDecider()
    assert merges.decide([None, report(0, "0")], 0, 1.0) is None
    assert merges.due == float("inf"), "it waits for what is output, not for a time"
    assert merges.decide([report(0, "0"), report(0, "1")], 0, 1.1) is None
    assert merges.due == 1.1 + LEAST, "the usual spread is smaller"
    decided = merges.decide([report(0, "0"), report(0, "1")], 0, merges.due)
    assert decided == {"turn": 0, "number": 0, "trainer": 0, "step": 0, "islands": [0, 1], "late": [2], "void": False}
    assert merges.decide([report(0, "0"), report(0, "1"), report(0, "2")], 0, 9.0) is None, "it has been decided"
    assert merges.last == decided
    # All are there: nobody waits any longer.
    assert merges.decide([report(1, "0"), report(1, "1"), report(0, "2")], 0, 10.0) is None
    found = merges.decide([report(1, "0"), report(1, "1"), report(1, "2")], 0, 10.1)
    assert found is not None
    assert found["islands"] == [0, 1, 2]


def test_merge_quorum_waits_as_long_as_is_usual() -> None:
    """Ten seconds from merge to merge, of which one from the first island to the one that makes two."""
    merges, now = MergeDecider(), 0.0
    for turn in range(12):
        assert merges.decide([report(turn, "0")], 0, now + 9) is None
        assert merges.decide([report(turn, "01")], 0, now + 10) is None
        window = merges.due - now - 10
        merges.decide([report(turn, "01")], 0, merges.due)
        now = now + 10 + window
    assert window == pytest.approx(1.0)
    assert USUAL * 10 < window < MOST * 10
    slow, now = MergeDecider(), 0.0
    for turn in range(12):  # all at once, so that the part of a round decides
        assert slow.decide([report(turn, "01")], 0, now + 100) is None
        window = slow.due - now - 100
        slow.decide([report(turn, "01")], 0, slow.due)
        now = now + 100 + window
    assert window == pytest.approx(USUAL * 100)


def test_late_island_that_caught_up_is_merged_and_makes_no_quorum() -> None:
    merges = MergeDecider()
    assert merges.decide([report(0, "0"), report(0, ready="12")], 0, 1.0) is None
    assert merges.due == float("inf")
    merges.decide([report(0, "0"), report(0, "1"), report(0, ready="2")], 0, 1.0)
    assert merges.decide([report(0, "0"), report(0, "1"), report(0, ready="2")], 0, 2.0)["islands"] == [0, 1, 2]  # type: ignore[index]


def test_merge_quorum_after_a_loss_is_the_same_if_all_are_there() -> None:
    merges = MergeDecider()
    merges.decide([report(0, "01")], 0, 1.0)
    assert merges.decide([report(0, "01")], 0, 2.0) is not None
    assert merges.decide([report(0, "01")], 1, 3.0) is None, "nobody is in that generation any more"
    again = merges.decide([report(0, "0", number=1), report(0, "12", number=1)], 1, 4.0)
    assert again is not None
    assert (again["islands"], again["number"]) == ([0, 1], 1)
    # One of them is lost: then whoever is there.
    assert merges.decide([report(0, "0", number=2)], 2, 5.0) is None
    assert merges.decide([report(0, "0", number=2), report(0, "2", number=2)], 2, 5.0) is None
    other = merges.decide([report(0, "0", number=2), report(0, "2", number=2)], 2, merges.due)
    assert other is not None
    assert other["islands"] == [0, 2]
    # As a coordinator that was started again finds it in the journal.
    assert MergeDecider(last=other).decide([report(0, "0", number=2), report(0, "2", number=2)], 2, 9.0) is None


def test_last_merge_waits_for_all_and_a_void_one_for_nobody() -> None:
    merges = MergeDecider()
    assert merges.decide([report(0, "0", quorum=3), report(0, "1", quorum=3)], 0, 1.0) is None
    assert merges.due == float("inf")
    void = merges.decide([report(0, "0", quorum=3), report(0, void=True)], 0, 1.0)
    assert void is not None
    assert (void["islands"], void["late"], void["void"]) == ([], [0, 1, 2], True)


def test_quorum_changes_nothing_where_nobody_is_late(tmp_path: Path) -> None:
    """Each of two teams has two islands, and three make a quorum: both are waited for."""
    for name, options in (("quorum", ()), ("no coordinator", ("--max-restarts", "0"))):
        (folder := tmp_path / name).mkdir()
        output = train_late(folder, 2, "local=4 every=3 quorum=3", *options)
        assert journal(folder / "run", "late") == []
        check_merges(folder, 4, 3)
        merges = [merge["islands"] for merge in journal(folder / "run", "merge")]
        assert merges == ([] if options else [[0, 1, 2, 3]] * 3)
    assert "quorum=3 has no effect without a coordinator: merges wait for all islands\n" in output


def test_plan_cost_counts_the_weights_a_late_island_began_at() -> None:
    facts = Facts([[3, 4]], [8])
    some, more = (
        cost(Plan.parse(text).validate(2), facts, 2) for text in ("local=4 every=3", "local=4 every=3 quorum=3")
    )
    assert more.parameters - some.parameters == 2 * 3 * 4 * 8


def test_kill_of_a_late_island_loses_what_it_had_begun(tmp_path: Path) -> None:
    """The worker of island 2 is killed in its second round, when that merge has been decided: so it is decided again.
    In its place comes another one.
    """
    output = train_late(tmp_path, 3, "local=3 every=2 quorum=2", LATE="2:0:0:4", END="2:2:0", JOIN="4")
    assert (tmp_path / "killed").exists()
    decided = [(merge["step"], merge["number"], merge["islands"]) for merge in journal(tmp_path / "run", "merge")]
    assert decided[:3] == [(0, 0, [0, 1]), (2, 0, [0, 1]), (2, 1, [0, 1])]
    assert len(journal(tmp_path / "run", "generation")) == 2
    check_merges(tmp_path, 3, 2, lost=True)
    assert "the unmerged work of island 2 was lost, 4 rows of 1 step: it continues from the merged weights" in output, (
        output
    )


SLOW = """
import time
def slow(output, batch):
    if paceline.join().rank == 1 and trainer.model.training:
        time.sleep(0.25)  # four times in a round: longer than the least grace window
    return cross_entropy(output, batch)
trainer = make(slow, plan="{} micro=6")
list(trainer.steps(data, count=6))
trainer.export("out.safetensors")
"""


@pytest.mark.parametrize(
    "plan", ["local=2 every=2", pytest.param("local=4 every=2 fragments=2 delay=0", marks=pytest.mark.slow)]
)
def test_merge_without_a_quorum_waits_for_the_slowest_island(plan: str, tmp_path: Path) -> None:
    """The weights are those of one worker, which makes all islands by itself."""
    for workers in (1, 2):
        (tmp_path / str(workers)).mkdir()
        train_basics(tmp_path / str(workers), SLOW.format(plan), workers, "--shares", ",".join("1" * workers))
        assert journal(tmp_path / str(workers) / "out", "late") == []
    alone, both = (load_file(tmp_path / workers / "out.safetensors") for workers in "12")
    assert apart(both, alone) < TOLERANCE


@pytest.mark.parametrize("plan", ["local=3 every=2", pytest.param("local=3 every=2 quorum=2", marks=pytest.mark.slow)])
def test_loss_that_is_not_finite_ends_all_with_one_error(plan: str, tmp_path: Path) -> None:
    """In the second round worker 1 cannot go on, while another one waits: all say what it was."""
    train_late(tmp_path, 3, plan, code=1, BAD="1:2", LATE="2:1:2:4")
    logs = [(tmp_path / "run" / "logs" / f"worker-{worker}.log").read_text() for worker in range(3)]
    told = [re.findall(r"^paceline\.errors\.NonFiniteLossError: (.*)$", log, re.M) for log in logs]
    assert told[0] == told[1] == told[2]
    assert re.fullmatch(
        r"the loss of step 3 of island 1 is not finite \(worker 1: micro-batch 2 \(rows 28-29 of epoch 0\).*\): the"
        r" loss function produces the first nan; the round was not applied; check it for a logarithm or division at"
        r" 0, and compute losses from logits, as cross_entropy does",
        told[0][0],
    ), told


@pytest.mark.slow
def test_kill_of_an_island_that_was_to_be_merged(tmp_path: Path) -> None:
    """Then it is decided anew: of the islands that were in the merge one has to be made again."""
    output = train_late(tmp_path, 3, "local=3 every=2 quorum=2", LATE="2:0:0:4", AFTER="0:2")
    assert (tmp_path / "killed").exists()
    assert "worker 0 was killed by SIGKILL: 2 workers go on" in output
    decided = [(merge["step"], merge["number"]) for merge in journal(tmp_path / "run", "merge")]
    assert decided[:3] == [(0, 0), (2, 0), (2, 1)]
    check_merges(tmp_path, 3, 2, lost=True)


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["local=3 every=3", "local=3 every=3 quorum=2"])
def test_kill_with_an_iterable_dataset_reads_the_round_again(plan: str, tmp_path: Path) -> None:
    late = {"LATE": "2:0:0:3"} if "quorum" in plan else {}
    train_late(tmp_path, 3, plan, ROWS="iter", END="1:3:1", **late)
    assert (tmp_path / "killed").exists()
    assert bool(journal(tmp_path / "run", "late")) == ("quorum" in plan)
    check_merges(tmp_path, 3, 3, order=in_order, lost=True)


@pytest.mark.slow
@pytest.mark.parametrize("cut", ["", "shard=2 zero=1", "shard=2 zero=3", "tensor=2"])
def test_island_of_several_workers_is_late_together(cut: str, tmp_path: Path) -> None:
    train_late(tmp_path, 4, f"{cut} local=2 every=2 quorum=1", LATE="2:0:0:4")
    assert [merge["islands"] for merge in journal(tmp_path / "run", "merge")][:2] == [[0], [0]]
    check_merges(tmp_path, 2, 2)


@pytest.mark.slow
def test_trainer_stop_names_what_late_islands_had_begun(tmp_path: Path) -> None:
    output = train_late(tmp_path, 3, "local=3 every=2 quorum=2", LATE="2:0:0:4", STOP="4")
    assert ("island 2 was late when training was stopped: its unmerged work is dropped, 8 rows of 2 steps") in output
    assert "so nothing was trained" in train_late(tmp_path, 1, "local=3 every=2 quorum=2")
    happened = dict(facts(Summary(tmp_path / "run"))["What happened"])
    assert happened["too late"] == "island 2: 2 merges missed, 12 rows not trained on"


@pytest.mark.slow
def test_quorum_with_one_worker_at_a_quarter_of_the_speed(tmp_path: Path) -> None:
    train_late(tmp_path, 3, "local=3 every=2 quorum=2", SLEEP="1:300")
    assert journal(tmp_path / "run", "late")
    check_merges(tmp_path, 3, 2)


def test_stop_drops_what_a_late_island_had_begun(tmp_path: Path) -> None:
    """In the third round island 2 stands in its step, and the others wait for the merge."""
    command = [sys.executable, "-m", "paceline", "run", "--workers", "3", "--run-dir", "run", SCRIPTS / "late.py"]
    late = environment(LATE="2:0:0:4", HOLD="2:4")
    command += [tmp_path, "local=3 every=2 quorum=2"]
    with Process(command, late, cwd=tmp_path, stdout=PIPE, stderr=PIPE) as process:
        until((tmp_path / "holds").exists)
        process.send_signal(signal.SIGTERM)
        until((tmp_path / "held").exists)
        stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == STOPPED, stdout + stderr
    assert "stopped after step 4; saved" in stdout + stderr, stdout + stderr
    output = train_late(tmp_path, 1, "local=3 every=2 quorum=2")
    assert (
        "island 2 was late when the checkpoint was taken: its unmerged work is dropped, 8 rows of 2 steps, "
        "and it continues from the merged weights"
    ) in output
    check_merges(tmp_path, 3, 2, lost=True)


JOINED = """
import os, sys
os.environ.update({env!r})
sys.argv[1:] = [{folder!r}, {plan!r}]
exec(compile(open({script!r}).read(), {script!r}, "exec"))
"""


@pytest.mark.root
@pytest.mark.parametrize(
    ("plan", "late", "leaves"),
    [
        pytest.param("local=3 every=2 quorum=2", "2:0:0:34", False, marks=pytest.mark.slow),
        pytest.param("local=3 every=2", "", False, marks=pytest.mark.slow),
        pytest.param("local=3 every=2 quorum=2", "2:0:0:34", True, marks=pytest.mark.slow),
        pytest.param("local=3 every=3 quorum=1", "0:2:0:34", False, marks=pytest.mark.slow),
    ],
)
def test_quorum_between_two_hosts(
    plan: str,
    late: str,
    leaves: bool,
    cluster: Callable[[int], Cluster],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two workers have three islands, until a third one comes, and maybe goes again: what a late island has begun goes
    where it goes.
    """
    monkeypatch.setenv("PYTHONPATH", str(SCRIPTS))
    env = {"RUN": "run-0", "COMES": "40"} | ({"LATE": late} if late else {})
    code = JOINED.format(env=env, folder=str(tmp_path), plan=plan, script=str(SCRIPTS / "late.py"))
    here = cluster(2)
    here.start(0, 2, code=code)
    here.until(lambda: list(tmp_path.glob("digests-*.json")))
    here.start(1, 1, code=code)
    if leaves:
        here.until(lambda: journal(tmp_path / "run-0", "late"))
        here.stop(1)
    here.end(0, 75 if leaves else 0)
    formed = [event["workers"] for event in journal(tmp_path / "run-0", "formed")]
    assert formed == [[0, 1, 2], *([[0, 1]] if leaves else [])]
    assert bool(journal(tmp_path / "run-0", "late")) == bool(late)
    assert journal(tmp_path / "run-0", "uncounted") == []
    check_merges(tmp_path, 3, int(plan.split("every=")[1][0]), run="run-0", steps=40)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("worker", "moment"), each_value(range(3), ["loading", "backward", "summed", "reduced", "applied"])
)
def test_kill_of_any_worker_in_the_round_after_a_late_merge(worker: int, moment: str, tmp_path: Path) -> None:
    fault = f"kill:{worker}@2.{moment}"
    train_late(tmp_path, 3, "local=3 every=2 quorum=2", LATE="2:0:0:2", PACELINE_CHAOS=fault)
    assert [entry["fault"] for entry in read_log(tmp_path / "run")] == [fault]
    assert journal(tmp_path / "run", "late")
    check_merges(tmp_path, 3, 2, lost=True)


@pytest.mark.slow
@pytest.mark.parametrize("merges", [1, 2])
def test_coordinator_that_is_started_again_keeps_its_merge_decisions(merges: int, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "paceline", "run", "--workers", "3", "--run-dir", "run", SCRIPTS / "late.py"]
    command += [tmp_path, "local=3 every=2 quorum=2"]
    with Process(command, environment(LATE="2:0:0:6"), cwd=tmp_path, stdout=PIPE, stderr=PIPE) as process:
        until(
            lambda: (
                (path := tmp_path / "run" / "journal.jsonl").exists() and path.read_text().count('"merge"') >= merges
            )
        )
        (pid,) = Cluster(None, tmp_path).coordinators()  # type: ignore[arg-type]
        os.kill(pid, signal.SIGKILL)
        stdout, stderr = process.communicate(timeout=120)
    assert process.returncode == 0, stdout + stderr
    keys = [(event["turn"], event["number"]) for event in journal(tmp_path / "run", "merge")]
    assert keys == sorted({*keys}), "something was decided twice"
    check_merges(tmp_path, 3, 2)
