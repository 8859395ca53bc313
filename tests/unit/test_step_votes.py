"""Votes on what workers computed: who checks whom, which value is right, and who deviates from it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from paceline.train.step_verifier import drawn
from paceline.train.votes import Vote, attempts_by_worker, deviating, majority, partners

VOTES = st.lists(st.builds(Vote, st.integers(0, 4), st.integers(0, 2), st.sampled_from("abc")), max_size=10)


def same(one: Vote, other: Vote) -> bool:
    return bool(one.value == other.value)


@given(VOTES)
def test_majority_is_the_value_of_most_workers_and_of_two_at_least(votes: list[Vote]) -> None:
    workers = {value: {vote.worker for vote in votes if vote.value == value} for value in "abc"}
    most = max(len(each) for each in workers.values())
    right = majority(votes, same)
    if most < 2 or sum(len(each) == most for each in workers.values()) > 1:
        assert right is None
    else:
        assert right is not None
        assert len(workers[right.value]) == most
        wrong = deviating(votes, right, same)
        assert wrong == [vote for vote in votes if vote.value != right.value]
        expected = {w: sorted({v.attempt for v in wrong if v.worker == w}) for w in {v.worker for v in wrong}}
        assert attempts_by_worker(wrong) == expected


def test_one_wrong_value_is_assigned_to_its_worker_by_the_next_attempt() -> None:
    """A fault that lasts is a fault of the worker in two attempts; two workers cannot tell whose fault it is."""
    once = [Vote(1, 0, "x"), Vote(2, 0, "a"), Vote(1, 1, "a"), Vote(0, 1, "a")]
    right = majority(once, same)
    assert right is not None
    assert deviating(once, right, same) == [Vote(1, 0, "x")]
    lasting = [Vote(1, 0, "x"), Vote(2, 0, "a"), Vote(1, 1, "x"), Vote(0, 1, "a")]
    right = majority(lasting, same)
    assert right is not None
    assert attempts_by_worker(deviating(lasting, right, same)) == {1: [0, 1]}
    assert majority([Vote(0, 0, "x"), Vote(1, 0, "a"), Vote(0, 1, "x"), Vote(1, 1, "a")], same) is None


@given(st.lists(st.sampled_from("abcde"), min_size=1, max_size=9), st.integers(0, 50))
def test_each_share_is_checked_once_and_by_units_of_its_kind(kinds: list[str], turn: int) -> None:
    partner = partners(kinds, turn)
    assert sorted(partner) == list(range(len(kinds)))
    for unit, other in enumerate(partner):
        if kinds.count(kinds[unit]) > 1:
            assert kinds[unit] == kinds[other]
            assert unit != other
        else:
            assert kinds.count(kinds[other]) == 1


@given(st.integers(2, 7))
def test_every_pair_of_equal_units_meets(count: int) -> None:
    pairs = {(unit, other) for turn in range(count - 1) for unit, other in enumerate(partners(["a"] * count, turn))}
    assert pairs == {(unit, other) for unit in range(count) for other in range(count) if unit != other}


@given(st.integers(0, 2**40), st.integers(1, 200), st.integers(0, 50))
def test_one_step_of_each_window_is_drawn(seed: int, every: int, window: int) -> None:
    steps = [done for done in range(window * every, (window + 1) * every) if drawn(seed, every, done)]
    assert len(steps) == 1
