"""Membership as a pure function of what happened: any order of losses, arrivals and leavings leaves one team."""

from __future__ import annotations

from hypothesis import strategies as st

from examples import examples
from paceline.team.membership import Announcement, Membership


def begun(workers: int) -> Membership:
    membership = Membership(tuple(range(workers)))
    for worker in range(workers):
        assert not membership.begun
        membership.ready(worker)
    assert membership.begun
    return membership


def enter(membership: Membership, announcement: Announcement) -> None:
    for worker in announcement.members:
        membership.formed(worker, announcement.number)


def test_lost_worker_leaves_the_roster_and_joins_again():
    membership = begun(3)
    announcement = membership.lose([0])
    assert announcement == Announcement(1, (1, 2), planned=False)
    membership.waits(0)
    assert membership.plan() is None, "the others have not entered yet"
    enter(membership, announcement)
    announcement = membership.plan()
    assert announcement == Announcement(2, (1, 2, 0), planned=True), "the newcomer is last: main does not change again"
    assert membership.plan() is None
    enter(membership, announcement)
    assert membership.plan() is None
    assert not membership.waiting


def test_kill_during_a_join_leaves_the_newcomer_out():
    membership = begun(3)
    membership.waits(3)
    assert membership.plan() == Announcement(1, (0, 1, 2, 3), planned=True)
    announcement = membership.lose([1])
    assert announcement == Announcement(2, (0, 2), planned=False)
    membership.formed(3, 1)  # it was quicker than the news, which it cannot be any more
    enter(membership, announcement)
    assert membership.plan() == Announcement(3, (0, 2, 3), planned=True)


def test_kill_of_a_leaving_worker_is_a_loss():
    membership = begun(3)
    membership.leaves(2)
    assert membership.plan() == Announcement(1, (0, 1), planned=True)
    assert membership.lose([2]) == Announcement(2, (0, 1), planned=False)


def test_roster_without_workers_ends():
    membership = begun(1)
    assert membership.lose([0]) is None


def test_finished_worker_is_no_loss():
    membership = begun(2)
    membership.end(0)
    assert membership.lose([0]) is None
    assert membership.lose([1]) is None


@examples(st.integers(2, 5), st.data(), fast=40)
def test_any_order_of_roster_events_leaves_one_team(workers, data):
    membership, number, new = begun(workers), 0, workers
    news: list[Announcement] = []
    for _ in range(data.draw(st.integers(1, 25))):
        event = data.draw(st.sampled_from(["lose", "wait", "leave", "enter", "plan"]))
        before = set(membership.established)
        worker = data.draw(st.sampled_from(sorted(before))) if before else None
        announcement = None
        if event == "lose" and worker is not None:
            announcement = membership.lose([worker])
            assert worker not in membership.established
        elif event == "wait":
            membership.waits(new)
            new += 1
        elif event == "leave" and worker is not None:
            membership.leaves(worker)
        elif event == "enter" and news:
            enter(membership, news[-1])
        else:
            announcement = membership.plan()
        if announcement is not None:
            assert announcement.number == number + 1, "numbers go up one by one"
            number = announcement.number
            assert len(set(announcement.members)) == len(announcement.members) > 0
            assert announcement.planned or set(announcement.members) <= before, "only who has the state goes on at once"
            assert set(announcement.members) & membership.established, "somebody has the state"
            news.append(announcement)
        assert not (set(membership.waiting) & membership.established)


def test_kill_of_a_worker_that_waits_to_join_disturbs_nobody():
    membership = begun(3)
    enter(membership, membership.lose([1]))
    assert membership.lose([1]) is None, "the newcomer has the number of the one that was lost"
    membership.waits(1)
    assert membership.lose([1]) is None
    assert membership.plan() is None
