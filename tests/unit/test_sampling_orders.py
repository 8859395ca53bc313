"""Orders by weight and by class: the frequencies that were asked for, as functions of the position alone."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.base.batching import Grid
from paceline.data.loader import Assignment, Feed, Source
from paceline.data.sampling import ClassBalancedOrder, WeightedOrder
from paceline.errors import UsageError


def drawn(order: Any, size: int, epochs: int, seed: int = 0) -> list[int]:
    return [order(position, size, seed, epoch) for epoch in range(epochs) for position in range(size)]


@pytest.mark.parametrize("seed", [0, 3])
def test_rows_are_drawn_in_proportion_to_weights(seed: int) -> None:
    """By a chi-square test of rows, and of pairs of neighbours, which are independent."""
    weights = [0.0, 1, 2, 3, 0, 4, 0]
    probabilities = np.asarray([weight / 10 for weight in weights if weight])
    rows = drawn(WeightedOrder(torch.tensor(weights)), 7, 3000, seed)
    counts, pairs = Counter(rows), Counter(zip(rows[::2], rows[1::2], strict=False))
    kinds = [1, 2, 3, 5]
    assert {*counts} == {*kinds}
    for found, expected in (
        (np.asarray([counts[row] for row in kinds]), probabilities),
        (np.asarray([pairs[a, b] for a in kinds for b in kinds]), np.outer(probabilities, probabilities).ravel()),
    ):
        free, expected = len(expected) - 1, expected * found.sum()
        chi = ((found - expected) ** 2 / expected).sum()
        # Wilson and Hilferty: its cube root is nearly normal. The inputs are fixed: no run of the test is by chance.
        surprise = ((chi / free) ** (1 / 3) - (1 - 2 / (9 * free))) / math.sqrt(2 / (9 * free))
        assert abs(surprise) < 4


@given(st.lists(st.one_of(st.just(0.0), st.floats(1e-30, 1e30)), min_size=1, max_size=30).filter(any), st.integers())
def test_a_row_of_weight_zero_is_never_drawn(weights: list[float], seed: int) -> None:
    assert all(weights[row] for row in drawn(WeightedOrder(weights), len(weights), 3, seed))


@given(st.lists(st.sampled_from("abcdefg"), min_size=1, max_size=60), st.integers(0, 9))
def test_each_class_is_as_frequent_as_any_other(labels: list[str], seed: int) -> None:
    """Each cycle has one row of each class, also across epochs; the rows of a class come equally often."""
    classes = sorted({*labels})
    rows = drawn(ClassBalancedOrder(labels), len(labels), 4, seed)
    for first in range(0, len(rows) - len(classes) + 1, len(classes)):
        assert sorted(labels[row] for row in rows[first : first + len(classes)]) == classes
    for name in classes:
        members = [row for row, label in enumerate(labels) if label == name]
        taken = [row for row in rows if labels[row] == name]
        for first in range(0, len(taken) - len(members) + 1, len(members)):
            assert sorted(taken[first : first + len(members)]) == members


def test_classes_and_rows_come_in_random_order() -> None:
    labels = torch.tensor([0, 1] * 20)
    order = ClassBalancedOrder(labels)
    rows = drawn(order, 40, 2)
    assert len({tuple(row % 2 for row in rows[first : first + 2]) for first in range(0, 80, 2)}) == 2
    assert rows[:40] != rows[40:]
    assert rows != drawn(order, 40, 2, seed=1)


def test_orders_never_change() -> None:
    """Were they to change, a resumed run would not continue."""
    assert drawn(WeightedOrder(range(10)), 10, 1, 5) == WEIGHTED
    assert drawn(ClassBalancedOrder("aabbbc"), 6, 2, 5) == BALANCED


WEIGHTED = [9, 7, 8, 8, 2, 7, 1, 9, 6, 8]
BALANCED = [3, 0, 5, 5, 4, 1, 0, 5, 2, 5, 3, 1]


@pytest.mark.parametrize("workers", [1, 2, 3, 5])
@pytest.mark.parametrize("order", [WeightedOrder(range(30)), ClassBalancedOrder([n % 7 % 3 for n in range(30)])])
def test_workers_share_the_rows_of_an_order_from_any_step(order: Any, workers: int) -> None:
    """The feeds of all workers, from the middle of the second epoch on, have the rows of the order."""
    source = Source.of(torch.arange(30), 4, None, order, {})
    assert source.snapshot().unseen == ""
    feeds = [Feed(source, Grid(12, 2), (4, 9, 1), lambda *_, **__: None) for _ in range(workers)]
    shares = [Assignment(rank, (1.0,) * workers) for rank in range(workers)]
    expected = [order(position, 30, 4, epoch) for epoch in range(3) for position in range(30)]
    for step in range(4, 9):
        batches = [feed.at(step, share)[2] for feed, share in zip(feeds, shares, strict=True)]
        epoch, batch = divmod(step, 3)
        first = 30 * epoch + 12 * batch
        rows = [row for share in batches for micro_batch in share for row in micro_batch.batch.tolist()]
        assert rows == expected[first : first + (6 if batch == 2 else 12)]


EACH = "; give one number for each row of the dataset"
REFUSED = [
    (lambda: WeightedOrder([[1.0]]), "weights= has the shape (1, 1)" + EACH),
    (lambda: WeightedOrder([1, -2]), "the weight of row 1 is -2.0; use finite numbers of at least 0"),
    (lambda: WeightedOrder([1, math.nan]), "the weight of row 1 is nan; use finite numbers of at least 0"),
    (
        lambda: WeightedOrder([0, 0]),
        "the weights sum to 0.0; give at least one row a positive weight, and none a huge one",
    ),
    (
        lambda: WeightedOrder(["a"]),
        "weights= is not a sequence of numbers (could not convert string to float: 'a')" + EACH,
    ),
    (
        lambda: WeightedOrder([1])(0, 2),
        "this order has 1 weights, but the dataset has 2 rows; give weights for all rows",
    ),
    (lambda: ClassBalancedOrder([]), "labels= is empty; give the class of each row"),
    (
        lambda: ClassBalancedOrder([[1]]),
        "labels= has values that are not hashable; give one number or text for each row",
    ),
    (
        lambda: ClassBalancedOrder("ab")(0, 3),
        "this order has 2 labels, but the dataset has 3 rows; give labels for all rows",
    ),
]


@pytest.mark.parametrize(("make", "text"), REFUSED)
def test_wrong_weights_and_labels_are_refused(make: Any, text: str) -> None:
    with pytest.raises(UsageError) as raised:
        make()
    assert str(raised.value) == text
