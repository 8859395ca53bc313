"""Spare workers: they take the place of lost ones, at any moment, and the training is that of an undisturbed run."""

from __future__ import annotations

from pathlib import Path

import pytest
from fault_runs import LONG, Ended, Undisturbed, fired, same, train
from fault_runs import undisturbed as undisturbed

WAIT = "wait:0@3.loading"  # until the spares are ready
EXACT = "micro=2 exact"


def formed(ended: Ended) -> list[tuple[object, object]]:
    return [(event["workers"], event["step"]) for event in ended.events("formed")]


def kill(
    folder: Path, calm: Undisturbed, faults: str, spares: int, teams: int, plan: str = EXACT, workers: int = 3
) -> Ended:
    """Trains with kills and spares until the team has formed so often, and asserts the undisturbed bytes."""
    faults = f"{WAIT},{faults}"
    ended = train(folder, workers, LONG, faults, f'journal.jsonl "formed" {teams}', plan=plan, spares=spares)
    assert fired(ended) == {*faults.split(",")}, "a fault did not fire"
    same(ended, calm[LONG])
    return ended


def test_spare_takes_the_place_of_a_killed_worker(undisturbed, tmp_path):
    ended = kill(tmp_path, undisturbed, "kill:1@5.backward", 1, 2)
    assert formed(ended) == [([0, 2], 5), ([0, 2, 3], 5)], "the full team repeats the interrupted step"
    first, second, *_ = [(event["workers"], event["enter"]) for event in ended.events("spares")]
    assert (first, second) == (([3], []), ([], [3]))
    started = [event["worker"] for event in ended.events("worker") if event["what"] == "started"]
    assert sorted(started) == [0, 1, 1, 2, 3], "the lost worker is started again as the next spare"
    assert "\nworker 3 is ready as a spare: 3 workers, 1 spare\n" in ended.text
    assert "\nworker 1 was killed by SIGKILL: 2 workers go on\n" in ended.text
    assert "\nworker 3 has joined: 3 workers, " in ended.text


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["reduced", "applied", "saving"])
def test_two_kills_in_a_row_with_two_spares(moment, undisturbed, tmp_path):
    at = 9 if moment == "saving" else 6
    ended = kill(tmp_path, undisturbed, f"kill:1@5.backward,kill:0@{at}.{moment}", 2, 4)
    workers = [team for team, _ in formed(ended)]
    assert workers[:3] == [[0, 2], [0, 2, 3], [2, 3]]
    assert workers[3] == [2, 3, 4]


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["forming", "hand-over"])
def test_kill_of_a_spare_while_it_is_admitted(moment, undisturbed, tmp_path):
    """The other spare takes the place instead."""
    ended = kill(tmp_path, undisturbed, f"kill:1@5.backward,kill:3@0.{moment}", 2, 3)
    assert [0, 2, 4] in [team for team, _ in formed(ended)]


@pytest.mark.slow
def test_kill_outside_of_a_step_admits_the_spare_after_it(undisturbed, tmp_path):
    """Worker 0 is lost when it has updated: the others complete the step, and the spare enters at its end."""
    ended = kill(tmp_path, undisturbed, "kill:0@6.applied", 1, 2)
    assert formed(ended)[0][0] == [1, 2]
    assert formed(ended)[1][0] == [1, 2, 3]


@pytest.mark.slow
@pytest.mark.parametrize("zero", [1, 3])
def test_two_spares_take_the_place_of_a_replica(zero, undisturbed, tmp_path):
    plan = f"{EXACT} shard=2 zero={zero}"
    ended = kill(tmp_path, undisturbed, "kill:1@5.backward", 2, 2, plan=plan, workers=4)
    assert formed(ended) == [([2, 3], 5), ([2, 3, 4, 5], 5)]
