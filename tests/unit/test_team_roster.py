"""Membership as a pure function of what happened: any order of losses, arrivals and leavings leaves one team."""

from __future__ import annotations

from hypothesis import strategies as st

from examples import examples
from paceline.team.membership import Announcement, Membership


def begun(workers: int) -> Membership:
    roster = Membership(tuple(range(workers)))
    for worker in range(workers):
        assert not roster.begun
        roster.ready(worker)
    assert roster.begun
    return roster


def enter(roster: Membership, order: Announcement) -> None:
    for worker in order.members:
        roster.formed(worker, order.number)


def test_lost_worker_leaves_the_roster_and_joins_again():
    roster = begun(3)
    order = roster.lose([0])
    assert order == Announcement(1, (1, 2), planned=False)
    roster.waits(0)
    assert roster.plan() is None, "the others have not entered yet"
    enter(roster, order)
    order = roster.plan()
    assert order == Announcement(2, (1, 2, 0), planned=True), "the newcomer is last: main does not change again"
    assert roster.plan() is None
    enter(roster, order)
    assert roster.plan() is None
    assert not roster.waiting


def test_kill_during_a_join_leaves_the_newcomer_out():
    roster = begun(3)
    roster.waits(3)
    assert roster.plan() == Announcement(1, (0, 1, 2, 3), planned=True)
    order = roster.lose([1])
    assert order == Announcement(2, (0, 2), planned=False)
    roster.formed(3, 1)  # it was quicker than the news, which it cannot be any more
    enter(roster, order)
    assert roster.plan() == Announcement(3, (0, 2, 3), planned=True)


def test_kill_of_a_leaving_worker_is_a_loss():
    roster = begun(3)
    roster.leaves(2)
    assert roster.plan() == Announcement(1, (0, 1), planned=True)
    assert roster.lose([2]) == Announcement(2, (0, 1), planned=False)


def test_roster_without_workers_ends():
    roster = begun(1)
    assert roster.lose([0]) is None


def test_finished_worker_is_no_loss():
    roster = begun(2)
    roster.end(0)
    assert roster.lose([0]) is None
    assert roster.lose([1]) is None


@examples(st.integers(2, 5), st.data(), fast=40)
def test_any_order_of_roster_events_leaves_one_team(workers, data):
    roster, number, new = begun(workers), 0, workers
    news: list[Announcement] = []
    for _ in range(data.draw(st.integers(1, 25))):
        event = data.draw(st.sampled_from(["lose", "wait", "leave", "enter", "plan"]))
        before = set(roster.established)
        worker = data.draw(st.sampled_from(sorted(before))) if before else None
        order = None
        if event == "lose" and worker is not None:
            order = roster.lose([worker])
            assert worker not in roster.established
        elif event == "wait":
            roster.waits(new)
            new += 1
        elif event == "leave" and worker is not None:
            roster.leaves(worker)
        elif event == "enter" and news:
            enter(roster, news[-1])
        else:
            order = roster.plan()
        if order is not None:
            assert order.number == number + 1, "numbers go up one by one"
            number = order.number
            assert len(set(order.members)) == len(order.members) > 0
            assert order.planned or set(order.members) <= before, "only who has the state goes on at once"
            assert set(order.members) & roster.established, "somebody has the state"
            news.append(order)
        assert not (set(roster.waiting) & roster.established)


def test_kill_of_a_worker_that_waits_to_join_disturbs_nobody():
    roster = begun(3)
    enter(roster, roster.lose([1]))
    assert roster.lose([1]) is None, "the newcomer has the number of the one that was lost"
    roster.waits(1)
    assert roster.lose([1]) is None
    assert roster.plan() is None
