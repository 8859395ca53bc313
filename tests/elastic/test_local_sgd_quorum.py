"""With `quorum=` a merge does not wait for the last island: who is late is left out, named, and counts later."""

from __future__ import annotations

import copy
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
import torch
from agents import journal, until
from by_hand import built, grid, in_order
from clusters import Cluster
from clusters import cluster as cluster
from islands import BATCH, CASES, DATA, MICRO, SEED, STEPS, loss
from launching import SCRIPTS, paceline
from networks import hosts as hosts
from oracle import apart
from safetensors.torch import load_file
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from warm import Process, environment

from paceline import sample_index, stream_seed
from paceline.base.batching import deal
from paceline.observe.summary import Summary, facts
from paceline.parallel.cost_model import Facts
from paceline.parallel.plan_cost import cost
from paceline.plan import Plan
from paceline.team.coordinator import STOPPED
from paceline.team.fault_injection import read_log
from paceline.team.merge_quorum import LEAST, MOST, USUAL, MergeDecider, RoundReport

TOLERANCE = 1e-12
PLACES = {float(x[0]): number for number, (x, _, _) in enumerate(DATA)}


def trained(
    folder: Path,
    workers: int,
    plan: str,
    options: tuple[str, ...] = (),
    code: int = 0,
    script: str = "late.py",
    **env: str,
) -> str:
    said = ("--workers", str(workers), "--run-dir", "run", *options)
    done = paceline("run", *said, SCRIPTS / script, folder, plan, cwd=folder, code=code, **env)
    return done.stdout + done.stderr


class ByHand:
    """One process: copies of a model in float64, each with an optimizer of its own, merged as a journal says."""

    def __init__(self, run: Path, count: int, every: int, order: Callable[..., int], steps: int) -> None:
        self.count, self.every, self.steps = count, every, steps
        self.late: dict[Any, Any] = {event["step"]: event for event in journal(run, "late")}
        self.lost: dict[Any, Any] = {(e["step"], e["island"]): e["rows"] for e in journal(run, "uncounted")}
        self.batches = grid(DATA, BATCH, MICRO, count=steps, seed=SEED, order=order)
        self.took: dict[int, set[int]] = {}  # rows, by the step that a round begins at
        self.rows, self.missed = 0, 0  # that were counted, and not taken

    def train(self) -> dict[str, torch.Tensor]:
        torch.set_num_threads(1)
        case = CASES["adamw"]
        model = built(case.model, SEED)
        merges = torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True)
        self.copies = [copy.deepcopy(model) for _ in range(self.count)]
        self.optimizers = [case.optimizer(one.parameters()) for one in self.copies]
        self.schedules = [LambdaLR(one, case.schedule) for one in self.optimizers]
        kept = [copy.deepcopy(one.state_dict()) for one in self.optimizers]
        counts, taken, origin = [0.0] * self.count, [0] * self.count, [copy.deepcopy(model)] * self.count
        for first in range(0, self.steps, self.every):
            steps = range(first, min(first + self.every, self.steps))
            told = self.late.get(steps.stop, {"merged": range(self.count), "took": {}})
            for island in range(self.count):
                if (rows := self.lost.get((first, island))) is not None:
                    assert rows == taken[island]
                    self.missed += rows
                    origin[island], counts[island], taken[island] = copy.deepcopy(model), 0.0, 0
                    self.copies[island].load_state_dict(model.state_dict())
                    self.optimizers[island].load_state_dict(copy.deepcopy(kept[island]))
                    self.optimizers[island].param_groups[0]["lr"] = self.schedules[island].get_last_lr()[0]
                for number in steps:
                    run = deal(len(self.batches[number]), [1.0] * self.count)[island]
                    if number - first < told["took"].get(str(island), len(steps)):
                        counts[island] += self._step(island, number, run)
                        some = [row for index in run for row in self.batches[number][index][0]]
                        taken[island] += len(some)
                        self.took.setdefault(first, set()).update(PLACES[float(row[0])] for row in some)
                    else:
                        self.missed += sum(len(self.batches[number][index][0]) for index in run)
                    self.schedules[island].step()
            merged = told["merged"]
            share = {island: counts[island] / sum(counts[i] for i in merged) for island in merged}
            for name, param in model.named_parameters():
                ends = [
                    part
                    * (
                        dict(origin[island].named_parameters())[name]
                        - dict(self.copies[island].named_parameters())[name]
                    )
                    for island, part in share.items()
                ]
                param.grad = sum(ends).detach()
            merges.step()
            for island in range(self.count):
                if island in merged or not counts[island]:
                    self.rows += taken[island]
                    origin[island] = copy.deepcopy(model)
                    self.copies[island].load_state_dict(model.state_dict())
                    counts[island], taken[island] = 0.0, 0
                    kept[island] = copy.deepcopy(self.optimizers[island].state_dict())
        return model.state_dict()

    def _step(self, island: int, number: int, run: range) -> float:
        one, counted = self.copies[island], 0.0
        one.zero_grad()
        for index in run:
            torch.manual_seed(stream_seed(SEED, number, index))
            batch = self.batches[number][index]
            found, part, _ = loss(one(batch[0]), batch)
            found.backward()
            counted += part
        if run:
            for param in one.parameters():
                param.grad /= counted
            nn.utils.clip_grad_norm_(one.parameters(), CASES["adamw"].clip_norm or 1e9)
            self.optimizers[island].step()
        return counted


def right(
    folder: Path,
    count: int,
    every: int,
    run: str = "run",
    order: Callable[..., int] = sample_index,
    lost: bool = False,
    steps: int = STEPS,
) -> None:
    """Weights as by hand; the same bytes on all workers after each merge; all rows counted once, or named. Unless work
    was lost and done again, the loss has seen just these.
    """
    hand = ByHand(folder / run, count, every, order, steps)
    weights = hand.train()
    assert apart(load_file(folder / "weights.safetensors"), weights) <= TOLERANCE
    figures = json.loads((folder / "told.json").read_text())
    named = sum(where[2] for event in hand.late.values() for where in event["missed"].values())
    named += sum(hand.lost.values())
    whole = sum(len(batch[0]) for step in hand.batches for batch in step)
    assert named == hand.missed
    assert sum(one["samples"] for one in figures) == hand.rows == whole - named
    seen: dict[int, set[int]] = {}
    for path in folder.glob("seen-*.json"):
        for step, rows in json.loads(path.read_text()).items():
            seen.setdefault(int(step), set()).update(rows)
    assert lost or seen == hand.took
    digests: dict[str, set[str]] = {}
    for path in folder.glob("digests-*.json"):
        for step, digest in json.loads(path.read_text()).items():
            digests.setdefault(step, set()).add(digest)
    assert all(len(some) == 1 for some in digests.values()), digests


def test_who_is_late_counts_in_a_later_merge(tmp_path: Path) -> None:
    """Island 2 waits in its first step of the first two rounds until the merge is decided; in the third it is ready."""
    said = trained(tmp_path, 3, "local=3 every=2 quorum=2", LATE="2:0:0:4")
    merges = journal(tmp_path / "run", "merge")
    assert [merge["islands"] for merge in merges] == [[0, 1], [0, 1], [0, 1, 2], [0, 1, 2]]
    late = journal(tmp_path / "run", "late")
    assert [event["late"] for event in late[:2]] == [[2], [2]]
    right(tmp_path, 3, 2)
    assert "the merge after step 2 is without island 2, which came too late for 4 rows of step 2" in said, said
    happened = dict(facts(Summary(tmp_path / "run"))["What happened"])
    assert re.fullmatch(r"island 2 for 2 merges, \d+ rows not trained on", happened["too late"])


def told(
    turn: int, made: str = "", ready: str = "", number: int = 0, quorum: int = 2, void: bool = False
) -> RoundReport:
    """What a team of three islands says, which are named by their digits."""
    return RoundReport(turn, number, 0, 10 * turn, tuple(map(int, made)), tuple(map(int, ready)), 3, quorum, void)


def test_who_is_in_a_merge_is_decided_once() -> None:
    merges = MergeDecider()
    assert merges.decide([None, told(0, "0")], 0, 1.0) is None
    assert merges.due == float("inf"), "it waits for what is said, not for a time"
    assert merges.decide([told(0, "0"), told(0, "1")], 0, 1.1) is None
    assert merges.due == 1.1 + LEAST, "the usual spread is smaller"
    decided = merges.decide([told(0, "0"), told(0, "1")], 0, merges.due)
    assert decided == {"turn": 0, "number": 0, "trainer": 0, "step": 0, "islands": [0, 1], "late": [2], "void": False}
    assert merges.decide([told(0, "0"), told(0, "1"), told(0, "2")], 0, 9.0) is None, "it has been decided"
    assert merges.last == decided
    # All are there: nobody waits any longer.
    assert merges.decide([told(1, "0"), told(1, "1"), told(0, "2")], 0, 10.0) is None
    found = merges.decide([told(1, "0"), told(1, "1"), told(1, "2")], 0, 10.1)
    assert found is not None
    assert found["islands"] == [0, 1, 2]


def test_the_window_is_what_is_usual() -> None:
    """Ten seconds from merge to merge, of which one from the first island to the one that makes two."""
    merges, now = MergeDecider(), 0.0
    for turn in range(12):
        assert merges.decide([told(turn, "0")], 0, now + 9) is None
        assert merges.decide([told(turn, "01")], 0, now + 10) is None
        window = merges.due - now - 10
        merges.decide([told(turn, "01")], 0, merges.due)
        now = now + 10 + window
    assert window == pytest.approx(1.0)
    assert USUAL * 10 < window < MOST * 10
    slow, now = MergeDecider(), 0.0
    for turn in range(12):  # all at once, so that the part of a round decides
        assert slow.decide([told(turn, "01")], 0, now + 100) is None
        window = slow.due - now - 100
        slow.decide([told(turn, "01")], 0, slow.due)
        now = now + 100 + window
    assert window == pytest.approx(USUAL * 100)


def test_one_that_caught_up_is_merged_and_makes_no_quorum() -> None:
    merges = MergeDecider()
    assert merges.decide([told(0, "0"), told(0, ready="12")], 0, 1.0) is None
    assert merges.due == float("inf")
    merges.decide([told(0, "0"), told(0, "1"), told(0, ready="2")], 0, 1.0)
    assert merges.decide([told(0, "0"), told(0, "1"), told(0, ready="2")], 0, 2.0)["islands"] == [0, 1, 2]  # type: ignore[index]


def test_after_a_loss_the_same_are_merged_if_they_are_there() -> None:
    merges = MergeDecider()
    merges.decide([told(0, "01")], 0, 1.0)
    assert merges.decide([told(0, "01")], 0, 2.0) is not None
    assert merges.decide([told(0, "01")], 1, 3.0) is None, "nobody is in that generation any more"
    again = merges.decide([told(0, "0", number=1), told(0, "12", number=1)], 1, 4.0)
    assert again is not None
    assert (again["islands"], again["number"]) == ([0, 1], 1)
    # One of them is lost: then whoever is there.
    assert merges.decide([told(0, "0", number=2)], 2, 5.0) is None
    assert merges.decide([told(0, "0", number=2), told(0, "2", number=2)], 2, 5.0) is None
    other = merges.decide([told(0, "0", number=2), told(0, "2", number=2)], 2, merges.due)
    assert other is not None
    assert other["islands"] == [0, 2]
    # As a coordinator that was started again finds it in the journal.
    assert MergeDecider(last=other).decide([told(0, "0", number=2), told(0, "2", number=2)], 2, 9.0) is None


def test_the_last_merge_waits_for_all_and_a_void_one_for_nobody() -> None:
    merges = MergeDecider()
    assert merges.decide([told(0, "0", quorum=3), told(0, "1", quorum=3)], 0, 1.0) is None
    assert merges.due == float("inf")
    void = merges.decide([told(0, "0", quorum=3), told(0, void=True)], 0, 1.0)
    assert void is not None
    assert (void["islands"], void["late"], void["void"]) == ([], [0, 1, 2], True)


def test_where_nobody_is_late_nothing_differs(tmp_path: Path) -> None:
    """Each of two teams has two islands, and three make a quorum: both are waited for."""
    found = []
    for plan in ("local=4 every=3", "local=4 every=3 quorum=3"):
        (folder := tmp_path / plan[-8:]).mkdir()
        trained(folder, 2, plan)
        found.append((folder / "weights.safetensors").read_bytes())
    assert [merge["islands"] for merge in journal(folder / "run", "merge")] == [[0, 1, 2, 3]] * 3
    assert found[0] == found[1]
    said = trained(tmp_path, 2, "local=4 every=3 quorum=3", ("--max-restarts", "0"))
    assert (tmp_path / "weights.safetensors").read_bytes() == found[0]
    assert journal(tmp_path / "run", "merge") == []
    assert "quorum=3 has no coordinator here, which decides who is late: merges wait for all islands\n" in said


def test_what_a_late_island_began_at_is_in_the_cost() -> None:
    facts = Facts([[3, 4]], [8])
    some, more = (
        cost(Plan.parse(text).validate(2), facts, 2) for text in ("local=4 every=3", "local=4 every=3 quorum=3")
    )
    assert more.parameters - some.parameters == 2 * 3 * 4 * 8


def test_who_is_late_and_lost_loses_what_it_had_begun(tmp_path: Path) -> None:
    """The worker of island 2 is killed in its second round, when that merge has been decided: so it is decided again.
    In its place comes another one.
    """
    said = trained(tmp_path, 3, "local=3 every=2 quorum=2", LATE="2:0:0:4", END="2:2:0", JOIN="4")
    assert (tmp_path / "killed").exists()
    decided = [(merge["step"], merge["number"], merge["islands"]) for merge in journal(tmp_path / "run", "merge")]
    assert decided[:3] == [(0, 0, [0, 1]), (2, 0, [0, 1]), (2, 1, [0, 1])]
    assert len(journal(tmp_path / "run", "generation")) == 2
    right(tmp_path, 3, 2, lost=True)
    assert (
        "what island 2 had made since it was late is lost, 4 rows of 1 step: it goes on from the merged weights" in said
    ), said


@pytest.mark.parametrize("plan", ["local=3 every=2", pytest.param("local=3 every=2 quorum=2", marks=pytest.mark.slow)])
def test_a_loss_that_is_not_finite_ends_all_with_one_error(plan: str, tmp_path: Path) -> None:
    """In the second round worker 1 cannot go on, while another one waits: all say what it was."""
    trained(tmp_path, 3, plan, code=1, BAD="1:2", LATE="2:1:2:4")
    logs = [(tmp_path / "run" / "logs" / f"worker-{worker}.log").read_text() for worker in range(3)]
    told = [re.findall(r"^paceline\.errors\.NonFiniteLossError: (.*)$", log, re.M) for log in logs]
    assert told[0] == told[1] == told[2]
    assert re.fullmatch(
        r"the loss of step 3 of island 1 is not finite \(worker 1: micro-batch 2 \(rows 28-29 of epoch 0\).*\): "
        r"the loss function makes the first nan; the round was not applied; look there for a logarithm or a division "
        r"at 0, and compute losses from logits, as cross_entropy does",
        told[0][0],
    ), told


@pytest.mark.slow
def test_one_that_was_to_be_merged_is_lost_before_that(tmp_path: Path) -> None:
    """Then it is decided anew: of the islands that were in the merge one has to be made again."""
    said = trained(tmp_path, 3, "local=3 every=2 quorum=2", LATE="2:0:0:4", AFTER="0:2")
    assert (tmp_path / "killed").exists()
    assert "worker 0 was killed by SIGKILL: 2 workers go on" in said
    decided = [(merge["step"], merge["number"]) for merge in journal(tmp_path / "run", "merge")]
    assert decided[:3] == [(0, 0), (2, 0), (2, 1)]
    right(tmp_path, 3, 2, lost=True)


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["local=3 every=3", "local=3 every=3 quorum=2"])
def test_an_iterable_is_read_again_by_who_makes_a_round_again(plan: str, tmp_path: Path) -> None:
    late = {"LATE": "2:0:0:3"} if "quorum" in plan else {}
    trained(tmp_path, 3, plan, ROWS="iter", END="1:3:1", **late)
    assert (tmp_path / "killed").exists()
    assert bool(journal(tmp_path / "run", "late")) == ("quorum" in plan)
    right(tmp_path, 3, 3, order=in_order, lost=True)


@pytest.mark.slow
@pytest.mark.parametrize("cut", ["", "shard=2 zero=1", "shard=2 zero=3", "tensor=2"])
def test_a_team_of_several_is_late_together(cut: str, tmp_path: Path) -> None:
    trained(tmp_path, 4, f"{cut} local=2 every=2 quorum=1", LATE="2:0:0:4")
    assert [merge["islands"] for merge in journal(tmp_path / "run", "merge")][:2] == [[0], [0]]
    right(tmp_path, 2, 2)


@pytest.mark.slow
def test_a_training_that_is_stopped_names_what_late_islands_had_begun(tmp_path: Path) -> None:
    said = trained(tmp_path, 3, "local=3 every=2 quorum=2", LATE="2:0:0:4", STOP="4")
    assert (
        "island 2 was late when training was stopped: the 8 rows of the 2 steps that it had begun are not trained on"
    ) in said
    assert "nothing was left to do" in trained(tmp_path, 1, "local=3 every=2 quorum=2")
    happened = dict(facts(Summary(tmp_path / "run"))["What happened"])
    assert happened["too late"] == "island 2 for 2 merges, 12 rows not trained on"


@pytest.mark.slow
def test_one_at_a_quarter_of_the_speed(tmp_path: Path) -> None:
    trained(tmp_path, 3, "local=3 every=2 quorum=2", SLEEP="1:300")
    assert journal(tmp_path / "run", "late")
    right(tmp_path, 3, 2)


def test_a_stop_drops_what_a_late_island_had_begun(tmp_path: Path) -> None:
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
    said = trained(tmp_path, 2, "local=3 every=2 quorum=2")
    assert (
        "island 2 was late when the checkpoint was taken: the 8 rows of the 2 steps that it had begun are not trained "
        "on, and it goes on from the merged weights"
    ) in said
    right(tmp_path, 3, 2, lost=True)


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
def test_between_two_hosts(
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
    right(tmp_path, 3, int(plan.split("every=")[1][0]), run="run-0", steps=40)


@pytest.mark.slow
@pytest.mark.parametrize("worker", range(3))
@pytest.mark.parametrize("moment", ["loading", "backward", "summed", "reduced", "applied"])
def test_whoever_is_lost_in_the_round_after(worker: int, moment: str, tmp_path: Path) -> None:
    fault = f"kill:{worker}@2.{moment}"
    trained(tmp_path, 3, "local=3 every=2 quorum=2", LATE="2:0:0:2", PACELINE_CHAOS=fault)
    assert [entry["fault"] for entry in read_log(tmp_path / "run")] == [fault]
    assert journal(tmp_path / "run", "late")
    right(tmp_path, 3, 2, lost=True)


@pytest.mark.slow
@pytest.mark.parametrize("merges", [1, 2])
def test_a_coordinator_that_is_started_again_keeps_to_what_was_decided(merges: int, tmp_path: Path) -> None:
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
    right(tmp_path, 3, 2)
