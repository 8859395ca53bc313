"""Backup workers: steps that do not wait for the last worker are made of what has come, and what has not is named."""

from __future__ import annotations

import copy
import json
import random
from collections import Counter
from pathlib import Path

import pytest
import torch
from launching import train_basics
from oracle import apart, grid
from safetensors.torch import load_file
from server_runs import (
    COUNTED_BATCH,
    COUNTED_ROWS,
    TOLERANCE,
    counted_weights,
    served_by_hand,
    stop_counted,
    train_counted,
    train_served,
    windows_of,
)
from torch.utils.data import TensorDataset

from paceline.observe.summary import Summary, facts
from paceline.param_server.backup_scheduler import BackupScheduler
from paceline.team.fault_injection import read_log

SLOW = {"SLOW": "1:4"}


def late_of(folder: Path) -> list[list[int]]:
    return [late for one in windows_of(folder) for late in one["late"]]


def check_what_came_counts(folder: Path, steps: int) -> list[list[int]]:
    """Each row of the micro-batches that the journal does not name as late, in a mean over these; who was late."""
    late, rows, mean, batches = late_of(folder), torch.zeros(COUNTED_ROWS, dtype=torch.float64), 0.0, 0
    missing = {(step, index) for step, _, first, end in late for index in range(first, end)}
    for number, batch in enumerate(
        grid(TensorDataset(torch.arange(COUNTED_ROWS)), COUNTED_BATCH, 2, count=steps, seed=0)
    ):
        came = [part[0] for index, part in enumerate(batch) if (number + 1, index) not in missing]
        for part in came:
            rows[part] -= COUNTED_BATCH / sum(map(len, came))
            mean += 0.1 * (float(part.double().mean()) - mean)
            batches += 1
    weights = counted_weights(folder)
    assert torch.allclose(weights["rows"], rows, rtol=1e-12, atol=0)
    assert torch.equal(weights["more"], torch.full([7], -steps * COUNTED_BATCH, dtype=torch.float64))
    assert weights["norm.num_batches_tracked"] == batches
    assert float(weights["norm.running_mean"]) == pytest.approx(mean, rel=1e-9)
    turns = json.loads((folder / "told.json").read_text())
    since = turns[0][0] - turns[0][1]  # the run that it went on from had made so many steps
    assert sum(samples for *_, samples in turns) == (steps - since) * COUNTED_BATCH - 2 * sum(
        n > since for n, _ in missing
    )
    return late


@pytest.mark.parametrize("table", [{"TABLE": "1"}, pytest.param({}, marks=pytest.mark.slow)])
def test_backup_workers_drop_the_rows_of_the_last_worker(tmp_path: Path, table: dict[str, str]) -> None:
    output = train_counted(tmp_path, 3, "server=2 backup=1 window=10", 20, micro=2, **SLOW, **table)
    late = check_what_came_counts(tmp_path, 20)
    assert [step for step, *_ in late] == [*range(1, 21)]
    assert Counter(worker for _, worker, *_ in late).most_common(1)[0][0] == 1
    for one in windows_of(tmp_path):
        assert sum(count for _, count in one["workers"]) == 2 * one["updates"]
    assert "each step drops the slowest worker, whose rows are not used; workers synchronize every 10 updates" in output
    text = dict(facts(Summary(tmp_path / "run"))["What happened"])["out of step"]
    assert text.startswith("late, so the rows were dropped: ")
    assert "worker 1 in " in text


def test_backup_workers_make_the_steps_of_one_process_with_what_came(tmp_path: Path) -> None:
    """AdamW with groups, schedule, clip and dropout; where a batch has fewer micro-batches than there are workers, who
    has none is not counted.
    """
    train_served(tmp_path, 3, "server=2 backup=1 window=1")
    late = frozenset((step, index) for step, _, first, end in late_of(tmp_path) for index in range(first, end))
    assert {1, 2, 3, 5, 6, 7} <= {step for step, _ in late}  # of the others one worker has nothing, and may be slow
    weights, figures = served_by_hand(late)
    assert apart(load_file(tmp_path / "out.safetensors"), weights) <= TOLERANCE
    for made, expected in zip(json.loads((tmp_path / "told.json").read_text())["figures"], figures, strict=True):
        assert made == pytest.approx(expected, rel=1e-9)


LOST = [
    ("server=2", {"KILL": "0:6"}),
    ("server=2", {"KILL": "1:6", **SLOW}),
    ("server=3", {"KILL": "0:9"}),
    ("server=2 copies=1", {"PACELINE_CHAOS": "kill:1000000@12.reduced"}),
    ("server=3 copies=1", {"PACELINE_CHAOS": "kill:1000001@12.applied"}),
    ("server=3 copies=1", {"PACELINE_CHAOS": "kill:1000000@12.applied", **SLOW}),
    ("server=2", {"CUT": "7"}),
    ("server=2 copies=1", {"PACELINE_CHAOS": "kill:1000000@12.applied", "TABLE": "1"}),
]


@pytest.mark.parametrize(
    ("plan", "env"),
    [pytest.param(*one, marks=[] if number == 0 else pytest.mark.slow) for number, one in enumerate(LOST)],
)
def test_kill_of_a_worker_or_server_makes_it_late(tmp_path: Path, plan: str, env: dict[str, str]) -> None:
    """A worker, also one that is slow; of a server others have a copy; a connection comes back."""
    train_counted(tmp_path, 3, f"{plan} backup=1 window=15", 30, micro=2, **env)
    check_what_came_counts(tmp_path, 30)
    assert ("KILL" in env) is (tmp_path / "killed").exists()
    assert ("CUT" in env) is (tmp_path / "cuts").exists()
    assert len(read_log(tmp_path / "run")) == ("PACELINE_CHAOS" in env)


@pytest.mark.slow
def test_stop_ends_the_window_and_resume_makes_the_rest(tmp_path: Path) -> None:
    stop_counted(tmp_path, "micro=2 server=2 backup=1", 60)
    train_counted(tmp_path, 2, "server=1 backup=1", 60, micro=2)
    check_what_came_counts(tmp_path, 60)
    assert 0 < windows_of(tmp_path)[0]["updates"] < 60


NOTHING = """
def some(output, batch):
    return output.square().sum(), (batch[1] > 2).sum()  # none
for _ in make(loss=some).steps(data, count=2): pass
"""


def test_step_in_which_nothing_counts_is_made_and_named(tmp_path: Path) -> None:
    done = train_basics(tmp_path, NOTHING, 2, "--plan", "server=1 backup=1")
    text = "the loss of steps 1-2 has a count of 0 over the whole global batch, so no weight was changed\n"
    assert (done.stdout + done.stderr).count(text) == 1


def test_as_many_backup_workers_as_workers_are_refused(tmp_path: Path) -> None:
    text = train_basics(tmp_path, "make()", 2, "--plan", "server=1 backup=2", code=2).stderr
    assert "backup=2 of 2 workers leaves no worker to make a step; use backup=1" in text


@pytest.mark.parametrize("first", range(0, 200, 50))
def test_backup_scheduler_ends_every_window_whoever_is_lost(first: int) -> None:
    """At random: some are lost, come again, or have nothing to do; another server, which followed, takes over."""
    for seed in range(first, first + 50):
        end_a_window(seed)


def end_a_window(seed: int) -> None:
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


def test_backup_scheduler_keeps_its_choice_until_the_step_is_made() -> None:
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
