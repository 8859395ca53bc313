"""Covering arrays, from which tests take their combinations."""

from __future__ import annotations

import itertools

from covering import each_value, pairs_of, pairwise, values_of
from hypothesis import given
from hypothesis import strategies as st

axes = st.lists(st.integers(1, 5), min_size=2, max_size=4).map(lambda sizes: [range(size) for size in sizes])


@given(axes, st.data())
def test_every_value_or_pair_that_a_valid_combination_has_is_covered(axes: list[range], data: st.DataObject) -> None:
    every = [*itertools.product(*axes)]
    invalid = data.draw(st.sets(st.sampled_from(every)))
    for covering, parts_of in ((each_value, values_of), (pairwise, pairs_of)):
        chosen = covering(*axes, valid=lambda *values: values not in invalid)
        assert not invalid & {*chosen}
        wanted = [parts_of(values) for values in every if values not in invalid]
        assert set().union(*map(parts_of, chosen)) == set().union(*wanted)


def test_few_combinations_are_needed() -> None:
    """Of 125 no more than 25, the fewest possible, and some; for each value 5."""
    assert len(pairwise("abcde", "ABCDE", range(5))) <= 30
    assert each_value("abcde", "ABCDE", range(3)) == [(*"aA", 0), (*"bB", 1), (*"cC", 2), (*"dD", 0), (*"eE", 0)]
    assert pairwise("ab", "AB") == [("a", "A"), ("a", "B"), ("b", "A"), ("b", "B")]
