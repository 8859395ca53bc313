"""A team whose replicas are of several workers: whoever is lost, its replica goes and comes back as a whole, and the
training ends with the bytes of the undisturbed one.
"""

from __future__ import annotations

import re

import pytest
from launching import train_basics
from test_team import LONG, STEPS, Ended, fired, same, train, undisturbed  # noqa: F401 - a fixture

from paceline.team.chaos import read_log

MOMENTS = ("loading", "forward", "backward", "summed", "reduced", "applied", "saving", "writing")
QUICK = {("reduced", 0, 1), ("backward", 3, 3), ("applied", 1, 1)}


def plan(zero: int) -> str:
    return f"micro=2 exact shard=2 zero={zero}"


def lost(ended: Ended) -> list[tuple[object, object]]:
    return [(event["workers"], event.get("mates")) for event in ended.events("lost")]


def formed(ended: Ended) -> list[object]:
    return [event["workers"] for event in ended.events("formed")]


def cells():
    for zero in (1, 2, 3):
        for moment in MOMENTS:
            for worker in (0, 1, 3):
                slow = [] if (moment, worker, zero) in QUICK else [pytest.mark.slow]
                yield pytest.param(moment, worker, zero, marks=slow)


@pytest.mark.parametrize(("moment", "worker", "zero"), [*cells()])
def test_a_lost_worker_takes_its_replica_and_nothing_else(moment, worker, zero, undisturbed, tmp_path):  # noqa: F811
    at, ballast = (9 if moment in ("saving", "writing") else 11), (4 if moment == "writing" else 0)
    fault = f"kill:{worker}@{at}.{moment}"
    ended = train(tmp_path, 4, STEPS, fault, ballast=ballast, plan=plan(zero))
    assert fired(ended) == {fault}
    if ballast:
        assert sum(ended.samples) == sum(undisturbed["writing"].samples)
        assert ended.told == undisturbed["writing"].told
        assert ended.weights == undisturbed["writing"].weights
    else:
        same(ended, undisturbed[STEPS])
    mate = worker ^ 1
    assert lost(ended)[0] == ([worker], [mate])
    said = f"worker {worker} was killed by SIGKILL, and worker {mate} of the same replica starts anew: 2 workers go on"
    assert f"\n{said}\n" in ended.text


@pytest.mark.parametrize("zero", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_lost_between_the_sums_of_the_two_places(zero, undisturbed, tmp_path):  # noqa: F811
    """Worker 0 has the sums of its rows over all replicas; those of the other rows wait for worker 3."""
    faults = {"kill:0@11.summed", "slow:3@11.backward"}
    ended = train(tmp_path, 4, STEPS, ",".join(faults), plan=plan(zero))
    assert fired(ended) == faults
    at = {entry["fault"]: entry["at"] for entry in read_log(ended.folder)}
    assert 0 < at["kill:0@11.summed"] - at["slow:3@11.backward"] < 1, "the other sums were not waited for"
    same(ended, undisturbed[STEPS])


@pytest.mark.parametrize("zero", [1, pytest.param(2, marks=pytest.mark.slow), pytest.param(3, marks=pytest.mark.slow)])
def test_a_replica_that_holds_the_sums_rolls_forward(zero, undisturbed, tmp_path):  # noqa: F811
    """Workers 0 to 3 have updated, 4 and 5 hold the sums alone: 5 sleeps when worker 0 is lost."""
    faults = {"kill:0@12.applied", "slow:5@11.reduced"}
    ended = train(tmp_path, 6, STEPS, ",".join(faults), plan=plan(zero))
    assert fired(ended) == faults
    same(ended, undisturbed[STEPS])
    assert formed(ended)[0] == [2, 3, 4, 5]
    (event, *_) = ended.events("formed")
    assert event["step"] == 12, "the step was made again"


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["stop", "raise", "exit"])
@pytest.mark.parametrize("zero", [1, 3])
def test_other_losses(kind, zero, undisturbed, tmp_path):  # noqa: F811
    fault = f"{kind}:3@11.backward"
    ended = train(tmp_path, 4, STEPS, fault, plan=plan(zero))
    assert fired(ended) == {fault}
    same(ended, undisturbed[STEPS])
    assert lost(ended)[0] == ([3], [2])


@pytest.mark.slow
@pytest.mark.parametrize("zero", [1, 3])
def test_two_replicas_one_after_the_other(zero, undisturbed, tmp_path):  # noqa: F811
    """The second is lost in the generation that the first loss makes."""
    faults = {"kill:5@11.loading", "kill:0@11.forming"}
    ended = train(tmp_path, 6, STEPS, ",".join(faults), plan=plan(zero))
    assert fired(ended) == faults
    same(ended, undisturbed[STEPS])


@pytest.mark.parametrize("zero", [pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.slow), 3])
def test_a_replica_comes_back_and_takes_part(zero, undisturbed, tmp_path):  # noqa: F811
    ended = train(tmp_path, 4, LONG, "kill:0@5.forward", 'journal.jsonl "formed" 2', plan=plan(zero))
    same(ended, undisturbed[LONG])
    assert lost(ended) == [([0], [1])]
    assert formed(ended) == [[2, 3], [2, 3, 0, 1]]


@pytest.mark.slow
@pytest.mark.parametrize("zero", [1, 3])
@pytest.mark.parametrize("workers", [[0], [4], [5], [1, 4]])
def test_lost_while_a_state_is_handed_over(zero, workers, undisturbed, tmp_path):  # noqa: F811
    """From replica 0 to the one of workers 4 and 5."""
    faults = {f"kill:{worker}@{0 if worker > 3 else 6}.hand-over" for worker in workers}
    wait = f"chaos.jsonl fault {1 + len(faults)}"
    ended = train(tmp_path, 6, LONG, ",".join({"kill:5@5.forward"} | faults), wait, plan=plan(zero))
    assert fired(ended) == {"kill:5@5.forward"} | faults, "a fault did not fire"
    same(ended, undisturbed[LONG])


@pytest.mark.slow
def test_who_is_told_to_leave_takes_its_replica_along(undisturbed, tmp_path):  # noqa: F811
    ended = train(tmp_path, 4, LONG, "leave:1@5.forward", 'journal.jsonl "formed" 1', plan=plan(3))
    same(ended, undisturbed[LONG])
    assert ended.events("lost") == []
    assert formed(ended) == [[2, 3]]
    assert "\nworker 1 left, as it was told: 2 workers go on\n" in ended.text


def test_all_trainers_have_replicas_of_one_size(tmp_path):
    body = "make(plan='shard=2')\nmake(plan='shard=4')\n"
    done = train_basics(tmp_path, body, 4, code=2)
    assert (
        "PlanError: this trainer has shard=4 and those before it shard=2, and a worker that is lost takes a replica "
        "with it; say the same for all trainers, or add --max-restarts 0: a loss then ends the run"
    ) in re.sub(r"\s+", " ", done.stderr)
