"""Pairwise covering arrays: few combinations of several axes in which every pair of values occurs."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

Pair = tuple[tuple[int, Any], tuple[int, Any]]


def pairs_of(combination: Sequence[Any]) -> set[Pair]:
    """The pairs of values, each with the number of its axis, that a combination has."""
    return {*itertools.combinations(enumerate(combination), 2)}


def pairwise(*axes: Sequence[Any], valid: Callable[..., bool] = lambda *values: True) -> list[tuple[Any, ...]]:
    """Combinations of one value per axis, such that every pair of values of two axes occurs in one of them.

    `valid` takes a value per axis and says whether that combination exists; a pair that no valid combination has is
    not covered. The greedy method of AETG (Cohen, Dalal, Fredman, Patton: "The AETG System: An Approach to Testing
    Based on Combinatorial Design", IEEE Transactions on Software Engineering 23(7), 1997), without its random
    candidates: the next combination is the first one of those with the most pairs that are still to be covered. So
    the same axes always give the same combinations.
    """
    candidates = [(values, pairs_of(values)) for values in itertools.product(*axes) if valid(*values)]
    missing = set().union(*(pairs for _, pairs in candidates))
    chosen = []
    while missing:
        values, pairs = max(candidates, key=lambda candidate: len(candidate[1] & missing))
        chosen.append(values)
        missing -= pairs
    return chosen
