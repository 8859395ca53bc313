"""Pairwise covering arrays, of which the fast tests draw their cells."""

from __future__ import annotations

import itertools

from covering import pairs_of, pairwise
from hypothesis import given
from hypothesis import strategies as st

axes = st.lists(st.integers(1, 5), min_size=2, max_size=4).map(lambda sizes: [range(size) for size in sizes])


@given(axes, st.data())
def test_pairwise_covers_every_pair_that_a_valid_combination_has(axes: list[range], data: st.DataObject) -> None:
    every = [*itertools.product(*axes)]
    invalid = data.draw(st.sets(st.sampled_from(every)))
    chosen = pairwise(*axes, valid=lambda *values: values not in invalid)
    assert not invalid & {*chosen}
    wanted = [pairs_of(values) for values in every if values not in invalid]
    assert set().union(*map(pairs_of, chosen)) == set().union(*wanted)


def test_pairwise_needs_few_combinations() -> None:
    """Of 125 no more than 25, the fewest possible, and some."""
    assert len(pairwise("abcde", "ABCDE", range(5))) <= 30
    assert pairwise("ab", "AB") == [("a", "A"), ("a", "B"), ("b", "A"), ("b", "B")]
