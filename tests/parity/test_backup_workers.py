"""Steps that do not wait for the last: what has come makes them, and what has not is named."""

from __future__ import annotations

import copy
import json
import random
from collections import Counter
from pathlib import Path

import pytest
import torch
from by_hand import grid
from launching import paceline, train_basics
from oracle import apart
from safetensors.torch import load_file
from test_async_windows import BATCH, ROWS, counted, stopped, weights_of, windows_of
from test_parameter_servers import TOLERANCE, by_hand, trained
from torch.utils.data import TensorDataset

from paceline.observe.summary import Summary, facts
from paceline.param_server.backup_scheduler import BackupScheduler
from paceline.team.fault_injection import read_log

SLOW = {"SLOW": "1:4"}


def late_of(folder: Path) -> list[list[int]]:
    return [late for one in windows_of(folder) for late in one["late"]]


def what_came_counts(folder: Path, steps: int) -> list[list[int]]:
    """Each row of the micro-batches that the journal does not name as late, in a mean over these; who was late."""
    late, rows, mean, batches = late_of(folder), torch.zeros(ROWS, dtype=torch.float64), 0.0, 0
    missing = {(step, index) for step, _, first, end in late for index in range(first, end)}
    for number, batch in enumerate(grid(TensorDataset(torch.arange(ROWS)), BATCH, 2, count=steps, seed=0)):
        came = [part[0] for index, part in enumerate(batch) if (number + 1, index) not in missing]
        for part in came:
            rows[part] -= BATCH / sum(map(len, came))
            mean += 0.1 * (float(part.double().mean()) - mean)
            batches += 1
    weights = weights_of(folder)
    assert torch.allclose(weights["rows"], rows, rtol=1e-12, atol=0)
    assert torch.equal(weights["more"], torch.full([7], -steps * BATCH, dtype=torch.float64))
    assert weights["norm.num_batches_tracked"] == batches
    assert float(weights["norm.running_mean"]) == pytest.approx(mean, rel=1e-9)
    turns = json.loads((folder / "told.json").read_text())
    since = turns[0][0] - turns[0][1]  # the run that it went on from had made so many steps
    assert sum(samples for *_, samples in turns) == (steps - since) * BATCH - 2 * sum(n > since for n, _ in missing)
    return late


@pytest.mark.parametrize("table", [{}, {"TABLE": "1"}])
def test_the_first_workers_make_each_step(tmp_path: Path, table: dict[str, str]) -> None:
    said = counted(tmp_path, 3, "server=2 backup=1 window=20", 40, micro=2, **SLOW, **table)
    late = what_came_counts(tmp_path, 40)
    assert [step for step, *_ in late] == [*range(1, 41)]
    assert Counter(worker for _, worker, *_ in late).most_common(1)[0][0] == 1
    for one in windows_of(tmp_path):
        assert sum(count for _, count in one["workers"]) == 2 * one["updates"]
    assert "steps wait for all workers but 1: rows of who is later are dropped, and all meet every 20 updates" in said
    told = dict(facts(Summary(tmp_path / "run"))["What happened"])["out of step"]
    assert told.startswith("late, and its rows dropped: ")
    assert "worker 1 in " in told


def test_steps_are_those_of_what_came(tmp_path: Path) -> None:
    """AdamW with groups, schedule, clip and dropout; where a batch has fewer micro-batches than there are workers, who
    has none is not counted.
    """
    trained(tmp_path, 3, "server=2 backup=1 window=1")
    late = frozenset((step, index) for step, _, first, end in late_of(tmp_path) for index in range(first, end))
    assert {1, 2, 3, 5, 6, 7} <= {step for step, _ in late}  # of the others one worker has nothing, and may be slow
    weights, figures = by_hand(late=late)
    assert apart(load_file(tmp_path / "out.safetensors"), weights) <= TOLERANCE
    for mine, theirs in zip(json.loads((tmp_path / "told.json").read_text())["figures"], figures, strict=True):
        assert mine == pytest.approx(theirs, rel=1e-9)


LOST = [
    ("server=2", {"KILL": "1:6", **SLOW}),
    ("server=2 copies=1", {"PACELINE_CHAOS": "kill:1000000@12.reduced"}),
    ("server=3", {"KILL": "0:9"}),
    ("server=3 copies=1", {"PACELINE_CHAOS": "kill:1000001@12.applied"}),
    ("server=3 copies=1", {"PACELINE_CHAOS": "kill:1000000@12.applied", **SLOW}),
    ("server=2", {"CUT": "7"}),
    ("server=2 copies=1", {"PACELINE_CHAOS": "kill:1000000@12.applied", "TABLE": "1"}),
]


@pytest.mark.parametrize(
    ("plan", "env"),
    [pytest.param(*one, marks=[] if number in (0, 2) else pytest.mark.slow) for number, one in enumerate(LOST)],
)
def test_who_is_lost_is_late(tmp_path: Path, plan: str, env: dict[str, str]) -> None:
    """A worker, also one that is slow; of a server others have a copy; a connection comes back."""
    counted(tmp_path, 3, f"{plan} backup=1 window=20", 40, micro=2, **env)
    what_came_counts(tmp_path, 40)
    assert ("KILL" in env) is (tmp_path / "killed").exists()
    assert ("CUT" in env) is (tmp_path / "cuts").exists()
    assert len(read_log(tmp_path / "run")) == ("PACELINE_CHAOS" in env)


@pytest.mark.slow
def test_a_stop_ends_the_window_and_the_rest_is_made_later(tmp_path: Path) -> None:
    stopped(tmp_path, "micro=2 server=2 backup=1", 60)
    counted(tmp_path, 2, "server=1 backup=1", 60, micro=2)
    what_came_counts(tmp_path, 60)
    assert 0 < windows_of(tmp_path)[0]["updates"] < 60


NOTHING = """
def some(output, batch):
    return output.square().sum(), (batch[1] > 2).sum()  # none
for _ in make(loss=some).steps(data, count=2): pass
"""


def test_a_step_in_which_nothing_counts_is_made_and_named(tmp_path: Path) -> None:
    said = train_basics(tmp_path, NOTHING, 2, "--plan", "server=1 backup=1")
    text = "the loss of steps 1-2 counts 0 rows or tokens in the whole global batch: no weight was changed\n"
    assert (said.stdout + said.stderr).count(text) == 1


def test_paceline_check_refuses_what_depends_on_who_is_late(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("")
    said = paceline("check", "--plan", "server=1 backup=1", "train.py", cwd=tmp_path, code=2).stderr
    told = "with backup=1 the result depends on who is how fast, and is not that of one worker"
    assert said == f"paceline: {told}; check the script without backup\n"


def test_somebody_must_be_left(tmp_path: Path) -> None:
    text = train_basics(tmp_path, "make()", 2, "--plan", "server=1 backup=2", code=2).stderr
    assert "backup=2 of 2 workers leaves nobody to make a step; say backup=1" in text


@pytest.mark.parametrize("seed", range(200))
def test_every_round_ends_whoever_is_lost(seed: int) -> None:
    """At random: some are lost, come again, or have nothing to do; another server, which followed, takes over."""
    chance = random.Random(seed)
    workers, backup, made = [*range(chance.randint(1, 5))], chance.randint(0, 2), 0
    shares, follower = BackupScheduler(backup), BackupScheduler(backup)
    for worker in workers:
        shares.join(worker)
    shares.advance(20)
    has: dict[int, int] = {}
    for _ in range(4000):
        if shares.ended:
            break
        if made and chance.random() < 0.02:
            follower.take_over(shares.workers)
            shares, follower, has = follower, copy.deepcopy(follower), {}
        worker = chance.choice(workers)
        if worker not in shares.workers:
            shares.join(worker)
        elif chance.random() < 0.1 and len(shares.workers) > 1:
            shares.lose(worker)
            has.pop(worker, None)
        elif worker in has:
            update, counts = has.pop(worker), chance.random() < 0.8 or worker == min(shares.members, default=-1)
            if shares.awaits(worker, update):
                shares.arrive(worker, counts)
        elif (update := shares.deal(worker)) is not None:
            assert update == shares.applied
            has[worker] = update
        if chosen := shares.choose():
            busy = [one for one in shares.members if one not in shares.idle]
            assert {*chosen} <= {*busy}
            assert max(1, len(busy) - backup) >= len(chosen) >= 1
            window = shares.start, shares.end
            shares.follow(window)
            follower.follow(window)
            made += 1
            assert shares.applied == follower.applied == made
            assert (follower.start, follower.end) == window
    assert shares.ended
    assert made == 20


def test_the_choice_of_workers_stays_until_the_step_is_made() -> None:
    shares = BackupScheduler(1, workers={0, 1, 2, 3})
    shares.advance(2)
    assert [shares.deal(worker) for worker in (0, 1, 2, 3)] == [0, 0, 0, 0]
    shares.arrive(1, True)
    shares.arrive(0, True)
    assert shares.choose() == []  # of four it takes three
    shares.lose(2)
    shares.lose(3)
    assert shares.choose() == [0, 1]
    shares.join(2)  # it is back, and late
    assert shares.choose() == [0, 1]
    assert not shares.awaits(2, 0)
    shares.follow((0, 2))
    assert (shares.applied, shares.choose(), shares.deal(2)) == (1, [], 1)
