"""Whether another plan would pay for a run that trains, from what is measured of it."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest

from paceline.plan import Plan
from paceline.planner.descriptions import (
    BlockDescription,
    LinkDescription,
    MachineDescription,
    ModelDescription,
)
from paceline.planner.history import History, Prediction
from paceline.planner.outlook import MOST, Now, Outlook
from paceline.planner.step_time import step_time

ROW = 1e-3  # seconds that a block takes for a row
BLOCKS = [BlockDescription(str(n), 10**4, saved=4e4, passes=4e3, seconds={"3": 3 * ROW}) for n in range(8)]
MODEL = ModelDescription("Net", tuple(BLOCKS), 24, merges=True)
LINK = LinkDescription("between workers", 0, 1e9)
MACHINE = MachineDescription("cpu", {"fp32": 1e11}, 1e9, 1e10, (LINK,), measured=True)
TRIED = "data=2", "pipeline=2", "shard=2 zero=1"


def seconds_of(words: str, workers: int = 2) -> float:
    return step_time(Plan.parse(words).validate(workers), MODEL, MACHINE, workers).total


def known(plan: str, workers: int = 2, **changes) -> Outlook:
    """An outlook of a run whose trials took exactly as long as predicted."""
    taken = seconds_of(plan, workers)
    ratios = {str(Plan.parse(words).validate(2)): 1.0 for words in TRIED}
    outlook = Outlook(plan, workers, taken, taken, "data=2", "", MODEL, MACHINE, 1.0, ratios, (taken,) * workers)
    return msgspec.structs.replace(outlook, **changes)


def now(plan: str, loads=(1.0, 1.0), slower: float = 1.0, **changes) -> Now:
    return replace(Now(slower * seconds_of(plan), len(loads), loads, 10_000, 5.0), **changes)


@pytest.fixture
def history(tmp_path):
    return History(tmp_path / "predictions.jsonl")


def test_a_plan_is_left_that_waits_for_a_slow_worker(history):
    change = known("pipeline=2").better(now("pipeline=2", (1.0, 4.0), 4.0), history)
    assert change is not None
    assert Plan.parse(change.plan).validate(2).mesh(2).pipeline == 1
    assert change.seconds == pytest.approx(seconds_of("data=2") * 2 / (1 + 1 / 4), rel=0.2)
    assert change.gain == pytest.approx((4 * seconds_of("pipeline=2") - change.seconds) * 10_000)


@pytest.mark.parametrize("plan", TRIED)
@pytest.mark.parametrize("load", [0.5, 1.0, 1.1, 3.0])
def test_no_plan_is_left_if_all_workers_become_slower_alike(plan, load, history):
    """Long rows, or another program on the machine: the fastest plan stays, and a slower one is as much slower."""
    fastest = known(plan, ratios={str(Plan.parse(plan).validate(2)): 1.0}, ratio=1.3)
    assert fastest.better(now(plan, (load, load), load), history) is None


def test_no_plan_is_left_for_a_run_that_is_about_to_end(history):
    slow = now("pipeline=2", (1.0, 4.0), 4.0)
    outlook, saved = known("pipeline=2"), outlook_gain(slow, history)
    assert outlook.better(replace(slow, rest=0), history) is None
    assert outlook.better(replace(slow, rest=int(2 * slow.cost / saved)), history) is None
    assert outlook.better(replace(slow, rest=int(2 * slow.cost / saved) + 1), history) is not None


def outlook_gain(slow: Now, history: History) -> float:
    """Returns the seconds that a step takes less after the change."""
    change = known("pipeline=2").better(slow, history)
    assert change is not None
    return change.gain / slow.rest


def test_a_plan_is_changed_a_few_times_at_most(history):
    slow = now("pipeline=2", (1.0, 4.0), 4.0)
    never = known("pipeline=2", ratios={})
    assert msgspec.structs.replace(never, changes=MOST - 1).better(slow, history) is not None
    assert msgspec.structs.replace(never, changes=MOST).better(slow, history) is None
    tried = known("pipeline=2", changes=MOST).better(slow, history)
    assert tried is not None
    assert tried.plan in ("data=2", "shard=2 zero=1")
    assert known("pipeline=2", changes=2 * MOST).better(slow, history) is None


def test_steps_that_are_much_slower_for_no_other_reason_speak_against_the_plan(history):
    """A trial was flattered, or its messages take longer now: other plans are as fast as they were."""
    fastest = known("pipeline=2", ratios={"data=1 pipeline=2": 1.0}, ratio=1.3)
    assert fastest.better(now("pipeline=2", slower=1.4), history) is None  # a machine that is disturbed
    change = fastest.better(now("pipeline=2", slower=2.0), history)
    assert change is not None
    assert 0.8 * 1.3 * seconds_of("data=2") < change.seconds <= 1.3 * seconds_of("data=2")


def test_a_change_that_did_not_bring_its_gain_is_not_repeated(history):
    """The run returns to the plan before it, and stays, since that is the fastest in truth."""
    outlook, plan = known("pipeline=2", ratios={}), "pipeline=2"
    visited = [plan]
    while (change := outlook.better(now(plan, slower=2.0 if plan == "pipeline=2" else 3.0), history)) is not None:
        outlook, plan = outlook.changed(change), change.plan
        visited.append(plan)
    assert len(visited) == 3
    assert visited[0] == visited[2] == "pipeline=2"


def test_a_plan_that_was_slow_in_an_earlier_run_is_not_expected_to_be_fast(history):
    slow = now("pipeline=2", (1.0, 4.0), 4.0)
    outlook = known("pipeline=2", ratios={})
    while (change := outlook.better(slow, history)) is not None:
        plan = str(Plan.parse(change.plan).validate(2))
        slower = 10 * change.seconds
        history.add(Prediction(plan, 2, change.seconds, slower, slower, "Net", MODEL.parameters))
    assert len({one.plan for one in history._entries}) == len(history._entries) > 1


def test_a_plan_that_does_not_fit_or_could_not_be_started_is_left_out(history):
    slow = now("pipeline=2", (1.0, 4.0), 4.0)
    outlook = known("pipeline=2", floor=9.499e8)
    assert known("pipeline=2").better(slow, history) is not None
    assert outlook.better(slow, history) is None
    outlook = known("pipeline=2")
    while (change := outlook.better(slow, history)) is not None:
        outlook = msgspec.structs.replace(outlook.without(change.plan, 2), changes=0)
        assert len(outlook.refused) < 20
    assert "data=2" in outlook.refused


def test_a_team_that_has_lost_workers_gets_a_plan_of_its_size(history):
    outlook = known("shard=4 zero=1", 4, ratios={"data=1 shard=4 zero=1": 1.0})
    left = Now(3 * seconds_of("data=2"), 2, (1.0, 1.0), 10_000, 5.0)
    with pytest.raises(Exception, match="shard=4"):
        outlook.better(left, history)
    change = known("data=4", 4, ratios={"data=4": 1.0}).better(left, history)
    assert change is not None
    assert change.workers == 2
    Plan.parse(change.plan).validate(2)
    change = known("data=4", 4, ratios={"data=4": 1.0}).better(replace(left, spare=1), history)
    assert change is not None
    assert change.workers == 3
    Plan.parse(change.plan).validate(3)


def test_workers_that_join_are_used_if_the_link_to_their_host_allows(history):
    both = now("pipeline=2", spare=1, hosts=(2, 1))
    change = known("pipeline=2").better(both, history)
    assert change is not None
    assert change.workers == 3
    assert Plan.parse(change.plan).validate(3).mesh(3).replica == 1
    assert known("pipeline=2").better(replace(both, link=(1e5, 1e-3)), history) is None


def test_a_replica_spans_hosts_only_if_they_share_the_checkpoints(history):
    both = now("pipeline=2", spare=1, hosts=(2, 1))
    within = known("pipeline=2")
    refused = tuple(map(str, within._plans(3, within.plan_for(2), both.hosts)))
    assert msgspec.structs.replace(within, refused=refused).better(both, history) is None
    change = msgspec.structs.replace(within, refused=refused, spans=True).better(both, history)
    assert change is not None
    assert Plan.parse(change.plan).validate(3).mesh(3).replica == 3


def test_an_outlook_is_read_as_it_was_written(tmp_path):
    outlook = known("pipeline=2")
    outlook.write(tmp_path)
    assert Outlook.read(tmp_path) == outlook
    (tmp_path / "outlook.json").write_text('{"plan": 3}')
    assert Outlook.read(tmp_path) is None
    assert Outlook.read(tmp_path / "absent") is None
