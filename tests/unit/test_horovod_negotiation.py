"""The table by which workers agree on named collectives, without processes: all replicas draw the same conclusions."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest

from paceline.integrations.horovod.negotiation import (
    ADD,
    ALLGATHER,
    ALLREDUCE,
    BARRIER,
    BROADCAST,
    GLOBAL,
    JOIN,
    KEPT,
    REMOVE,
    AgreedCollective,
    CycleMessage,
    Negotiation,
    Request,
    ranges,
)
from paceline.integrations.horovod.runtime import fused


def request(name: str, kind: str = ALLREDUCE, **more: object) -> Request:
    tensors = (("float32", (4, 2)),) if kind not in (JOIN, BARRIER, ADD, REMOVE) else ()
    return replace(Request(GLOBAL, name, kind, tensors, op="Sum" if kind == ALLREDUCE else ""), **more)  # type: ignore[arg-type]


def cycle(
    replicas: Sequence[Negotiation], submitted: Sequence[Sequence[Request]], stops: Sequence[int] = ()
) -> list[AgreedCollective]:
    """One cycle on all replicas, through bytes; they must agree on the same."""
    data = [
        replica.compose(requests, rank in stops).encode()
        for rank, (replica, requests) in enumerate(zip(replicas, submitted, strict=True))
    ]
    results = [replica.advance([CycleMessage.decode(one) for one in data]) for replica in replicas]
    assert all(result == results[0] for result in results)
    return results[0]


def replicas(size: int) -> list[Negotiation]:
    return [Negotiation(size, rank) for rank in range(size)]


@pytest.mark.parametrize("seed", range(20))
def test_any_order_of_submission_ends_in_one_order_for_all(seed: int) -> None:
    draw, size = random.Random(seed), 3
    team, done = replicas(size), list[str]()
    for _ in range(3):  # the second and third time as numbers
        left = [draw.sample([request(f"t{number}") for number in range(30)], 30) for _ in range(size)]
        while any(left):
            counts = [draw.randrange(8) for _ in range(size)]
            now = [row[:count] for row, count in zip(left, counts, strict=True)]
            left = [row[count:] for row, count in zip(left, counts, strict=True)]
            done += [one.request.name for one in cycle(team, now) if one.error is None]
        assert not team[0].incomplete()
    assert sorted(done) == sorted(f"t{number}" for number in range(30) for _ in range(3))


def test_repeated_names_take_few_bytes() -> None:
    team, names = replicas(2), [request(f"a layer with a long name {number}") for number in range(200)]
    first = len(team[0].compose(names, False).encode())
    cycle(team, [names, names])
    again = team[0].compose(names, False)
    assert not again.requests
    assert len(again.encode()) < 30 < first
    changed = replace(names[3], tensors=(("float32", (5,)),))
    assert team[0].compose([changed], False).requests == [changed]


def test_the_table_forgets_old_names() -> None:
    team = replicas(2)
    for number in range(KEPT + 5):
        cycle(team, [[request(str(number))]] * 2)
    assert team[0].compose([request("0")], False).requests
    assert not team[0].compose([request("9")], False).requests


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("kind", BROADCAST, "kind of collective: worker 0 has allreduce, worker 2 has broadcast"),
        ("tensors", (("float32", (4, 3)),), "shape: worker 0 has ['4x2'], worker 2 has ['4x3']"),
        ("tensors", (("float32", (8,)),), "number of dimensions"),
        ("tensors", (("int32", (4, 2)),), "dtype: worker 0 has ['float32'], worker 2 has ['int32']"),
        ("tensors", (("float32", (4, 2)),) * 2, "number of tensors: worker 0 has 1, worker 2 has 2"),
        ("op", "Max", "reduction: worker 0 has Sum, worker 2 has Max"),
        ("before", 2.0, "prescale_factor"),
        ("after", 2.0, "postscale_factor"),
        ("device", "cuda", "device"),
    ],
)
def test_disagreement_names_what_and_who(field: str, value: object, words: str) -> None:
    team, right = replicas(3), request("x")
    (agreed,) = cycle(team, [[right], [right], [replace(right, **{field: value})]])  # type: ignore[arg-type]
    assert agreed.error is not None
    assert words in agreed.error[0]
    (agreed,) = cycle(team, [[right]] * 3)  # the next one is right
    assert agreed.error is None


def test_first_dimensions_of_a_gather_may_differ() -> None:
    one = request("x", ALLGATHER)
    (agreed,) = cycle(replicas(2), [[one], [replace(one, tensors=(("float32", (7, 2)),))]])
    assert agreed.error is None
    assert agreed.requests[1].tensors[0][1] == (7, 2)


def test_joined_workers_are_excused_from_sums_only() -> None:
    team, join = replicas(3), request(JOIN, JOIN)
    assert cycle(team, [[join], [request("s")], []]) == []
    agreed = cycle(team, [[], [request("m", op="Max"), request("g", ALLGATHER)], [request("s")]])
    assert [one.request.name for one in agreed] == ["s"]
    assert agreed[0].error is None
    assert set(agreed[0].requests) == {1, 2}
    agreed = cycle(team, [[], [], [request("m", op="Max"), request("g", ALLGATHER)]])
    assert all(one.error is not None and "after worker 0 called hvd.join()" in one.error[0] for one in agreed)
    assert cycle(team, [[], [], [join]]) == []
    (agreed_join,) = cycle(team, [[], [join], []])
    assert agreed_join.last_joined == 1
    assert not team[0].joined


def test_process_sets_are_added_once_and_removed() -> None:
    team, add = replicas(3), request("add.0", ADD, splits=(0, 2))
    (agreed,) = cycle(team, [[add]] * 3)
    assert agreed.last_joined == 1
    assert team[1].sets[1] == (0, 2)
    (twice,) = cycle(team, [[replace(add, name="add.1")]] * 3)
    assert twice.error is not None
    assert "exists already" in twice.error[0]
    in_set = replace(request("x"), process_set=1)
    (agreed,) = cycle(team, [[in_set], [], [in_set]])  # worker 1 is not asked
    assert agreed.error is None
    cycle(team, [[request("remove", REMOVE, root=1)]] * 3)
    (gone,) = cycle(team, [[in_set], [], []])
    assert gone.error is not None
    assert "process set 1 does not exist" in gone.error[0]


def test_missing_workers_and_shutdown_are_known() -> None:
    team = replicas(3)
    cycle(team, [[request("x")], [], [request("x")]])
    assert team[0].missing((GLOBAL, "x")) == [1]
    cycle(team, [[], [], []], stops=[1])
    assert team[0].has_shut_down
    assert team[0].shut_down_by == [1]


def test_sums_of_one_kind_are_fused_up_to_the_threshold() -> None:
    def agreed(name: str, **more: object) -> AgreedCollective:
        return AgreedCollective({0: request(name, **more)})

    several = [
        agreed("a"),
        agreed("m", op="Max"),
        agreed("b"),
        agreed("g", kind=ALLGATHER, op=""),
        agreed("c"),
        agreed("d"),
    ]
    batches = [[one.request.name for one in batch] for batch in fused(several, 3 * 32)]
    assert batches == [["a", "b", "c"], ["m"], ["g"], ["d"]]


def test_ranges() -> None:
    assert ranges([]) == []
    assert ranges([5, 3, 4, 9]) == [(3, 3), (9, 1)]
