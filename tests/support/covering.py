"""Covering arrays: few combinations of several axes in which every value, or every pair of values, occurs."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any


def pairs_of(combination: Sequence[Any]) -> set[Any]:
    """The pairs of values, each with the number of its axis, that a combination has."""
    return {*itertools.combinations(enumerate(combination), 2)}


def values_of(combination: Sequence[Any]) -> set[Any]:
    """The values, each with the number of its axis, that a combination has."""
    return {*enumerate(combination)}


def pairwise(*axes: Sequence[Any], valid: Callable[..., bool] = lambda *values: True) -> list[tuple[Any, ...]]:
    """Combinations of one value per axis, such that every pair of values of two axes occurs in one of them.

    `valid` takes a value per axis and says whether that combination exists; a pair that no valid combination has is
    not covered.
    """
    return _covering(axes, pairs_of, valid)


def each_value(*axes: Sequence[Any], valid: Callable[..., bool] = lambda *values: True) -> list[tuple[Any, ...]]:
    """Combinations of one value per axis, such that every value occurs in one of them: for axes whose values do not
    depend on each other. `valid` as in `pairwise`.
    """
    return _covering(axes, values_of, valid)


def _covering(
    axes: Sequence[Sequence[Any]], parts_of: Callable[[Sequence[Any]], set[Any]], valid: Callable[..., bool]
) -> list[tuple[Any, ...]]:
    """Combinations that together have every part of a valid one.

    The greedy method of AETG (Cohen, Dalal, Fredman, Patton: "The AETG System: An Approach to Testing Based on
    Combinatorial Design", IEEE Transactions on Software Engineering 23(7), 1997), without its random candidates: the
    next combination is the first one of those with the most parts that are still to be covered. So the same axes always
    give the same combinations.
    """
    candidates = [(values, parts_of(values)) for values in itertools.product(*axes) if valid(*values)]
    missing = set().union(*(parts for _, parts in candidates))
    chosen = []
    while missing:
        values, parts = max(candidates, key=lambda candidate: len(candidate[1] & missing))
        chosen.append(values)
        missing -= parts
    return chosen
