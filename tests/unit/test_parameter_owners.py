"""Owners of parameters: each parameter has one, and all of them have about as much to compute."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from paceline.compute.parameter_owners import choose_owners, spec_of_owner

shapes = st.lists(st.integers(1, 64), min_size=1, max_size=3).map(tuple)


def work(shape: tuple[int, ...]) -> int:
    rest = math.prod(shape[1:])
    return shape[0] * rest * min(shape[0], rest) if len(shape) > 1 else shape[0]


@given(st.lists(shapes, min_size=1, max_size=30), st.integers(1, 8))
def test_owners_have_about_as_much_to_compute(all_shapes: list[tuple[int, ...]], workers: int) -> None:
    named = {str(number): shape for number, shape in enumerate(all_shapes)}
    owners = choose_owners(named, workers)
    assert owners.keys() == named.keys()
    assert owners == choose_owners(dict(reversed(named.items())), workers), "the order of names does not matter"
    load = [sum(work(named[name]) for name, owner in owners.items() if owner == one) for one in range(workers)]
    assert max(load) <= sum(load) / workers + max(map(work, all_shapes))


@given(shapes, st.integers(1, 6), st.data())
def test_one_worker_holds_an_owned_tensor(shape: tuple[int, ...], workers: int, data: st.DataObject) -> None:
    owner = data.draw(st.integers(0, workers - 1))
    spec = spec_of_owner(shape, owner, workers)
    assert [piece.shape for piece in spec.pieces] == [
        shape if worker == owner else (0, *shape[1:]) for worker in range(workers)
    ]
    assert [len(spec.counted(worker)) for worker in range(workers)] == [
        int(worker == owner) for worker in range(workers)
    ]
