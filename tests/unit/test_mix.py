"""Mixed datasets: each source gives its share of the first n rows for every n, each row once before any comes again,
and the same rows come in the same order on any team.
"""

from __future__ import annotations

import json
import math
import pickle
from collections import Counter
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from launching import SCRIPTS, paceline
from mixed import BATCH, EPOCHS, WEIGHTS, sources

from examples import examples
from paceline.base.batching import stream_seed
from paceline.base.journal import read_journal
from paceline.data import Mix, PackedDocuments, mix
from paceline.data.loader import Source
from paceline.data.mixing import PERIOD
from paceline.data.order import sample_index
from paceline.errors import DatasetError, UsageError

SIZES = st.lists(st.integers(1, 40), min_size=1, max_size=7)


def numbered(sizes: list[int]) -> dict[str, range]:
    """Sources whose rows are all different numbers."""
    return {f"s{number}": range(1000 * number, 1000 * number + size) for number, size in enumerate(sizes)}


def taken(mix: Mix, rows: int, seed: int = 0) -> list[Any]:
    """The first rows of the sequence."""
    size = len(mix)
    return [mix[mix.order(number % size, size, seed, number // size)] for number in range(rows)]


def as_whole(weights: dict[str, Any]) -> dict[str, Fraction]:
    total = sum(map(Fraction, weights.values()))
    return {name: Fraction(weight) / total for name, weight in weights.items()}


@given(SIZES.flatmap(lambda sizes: st.tuples(st.just(sizes), *(st.integers(0, 60) for _ in sizes))))
@example(([1, 40, 3], 1000, 1, 1))
@example(([5, 5, 5, 5], 1, 1, 1, 1))
def test_each_source_gives_its_share_of_the_first_rows(case: tuple[Any, ...]) -> None:
    sizes, *numbers = case
    weights = dict(zip(numbered(sizes), numbers, strict=True))
    if not any(numbers):
        return
    mix, shares, given_by = Mix(numbered(sizes), weights, with_source=True), as_whole(weights), Counter[str]()
    names = [*weights]
    for rows, (_, source) in enumerate(taken(mix, 2 * sum(numbers) + 3), 1):
        given_by[names[source]] += 1
        for name, share in shares.items():
            assert math.floor(rows * share) <= given_by[name] <= math.ceil(rows * share), (rows, name)
        assert mix.counts(rows) == {name: given_by[name] for name in names}


@examples(st.lists(st.floats(1e-3, 1e3), min_size=2, max_size=6), st.integers(0, 10**9), fast=10)
def test_shares_of_any_weights_are_rounded_to_a_period(numbers: list[float], rows: int) -> None:
    weights = {f"s{number}": weight for number, weight in enumerate(numbers)}
    counts = Mix(dict.fromkeys(weights, range(3)), weights).counts(rows)
    assert sum(counts.values()) == rows
    for name, share in as_whole(weights).items():
        # The shares are rounded by half a part of the period (up to a part for the smallest), and scaled to sum to 1.
        assert abs(counts[name] - rows * share) <= 1 + rows * len(numbers) / PERIOD


def test_weights_that_are_fractions_are_exact() -> None:
    """They are not rounded, though floats cannot represent them. The smallest share is one row of a period."""
    third = Mix(numbered([4, 4]), {"s0": 1 / 3, "s1": 2 / 3})
    assert third.counts(3 * 10**12) == {"s0": 10**12, "s1": 2 * 10**12}
    tenths = Mix(numbered([4, 4, 4]), {"s0": 0.7, "s1": 0.2, "s2": 0.1})
    rare = Mix(numbered([4, 4]), {"s0": 10**9, "s1": 1})
    assert rare.counts(PERIOD + 1) == {"s0": PERIOD, "s1": 1}
    assert tenths.counts(10**13) == {"s0": 7 * 10**12, "s1": 2 * 10**12, "s2": 10**12}


@pytest.mark.parametrize("seed", [0, 5])
def test_source_begins_again_with_another_permutation_also_across_epochs(seed: int) -> None:
    mix = Mix(numbered([7, 7, 30]), {"s0": 5, "s1": 5, "s2": 1})
    rows = taken(mix, 5 * len(mix), seed)
    for number, (name, source) in enumerate(mix.sources.items()):
        given_rows = [row for row in rows if row in source]
        assert len(given_rows) == mix.counts(len(rows))[name]
        passes = [given_rows[first : first + len(source)] for first in range(0, len(given_rows), len(source))]
        for turn, one in enumerate(passes):
            numbers = [sample_index(at, len(source), stream_seed(seed, number, 0), turn) for at in range(len(one))]
            assert one == [source[at] for at in numbers]
            assert len({*one}) == len(one)
        assert len({tuple(one) for one in passes[:-1]}) == len(passes) - 1
    firsts = [[row % 1000 for row in rows if row in mix.sources[name]][:7] for name in ("s0", "s1")]
    assert firsts[0] != firsts[1], "sources of equal size are in the same order"


def test_weights_change_at_rows() -> None:
    mix = Mix(numbered([9, 9]), {0: {"s0": 1, "s1": 0}, 25: {"s0": 1, "s1": 3}, 61: {"s0": 0, "s1": 1}})
    rows = taken(mix, 90)
    from_first = [int(row in mix.sources["s0"]) for row in rows]
    assert all(from_first[:25])
    for end in range(25, 61):
        assert math.floor((end - 25) / 4) <= sum(from_first[25:end]) <= math.ceil((end - 25) / 4)
    assert not any(from_first[61:])
    assert [mix.counts(end)["s0"] for end in range(91)] == [sum(from_first[:end]) for end in range(91)]
    second = [row for row in rows if row in mix.sources["s1"]]
    for first in range(0, len(second) - 8, 9):
        assert sorted(second[first : first + 9]) == [*mix.sources["s1"]]


def test_order_of_a_mix_never_changes() -> None:
    """Were it to change, a resumed run would see rows twice and others never."""
    mix = Mix({"a": range(5), "b": range(3), "c": range(2)}, {"a": 5, "b": 3, "c": 1})
    order = [mix.order(position, 10, seed, epoch) for seed, epoch in ((0, 0), (7, 3)) for position in range(10)]
    assert order == ORDER


ORDER = [4, 6, 3, 2, 7, 0, 5, 1, 8, 3, 2, 7, 4, 6, 3, 8, 1, 7, 3, 4]


class Batched:
    """Counts the calls that read it."""

    def __init__(self) -> None:
        self.calls: list[list[int]] = []

    def __len__(self) -> int:
        return 10

    def __getitem__(self, row: int) -> int:
        raise AssertionError("rows are read together")

    def __getitems__(self, rows: list[int]) -> list[int]:
        self.calls.append(rows)
        return [100 + row for row in rows]


def test_mix_is_its_sources_one_after_another() -> None:
    batched = Batched()
    mix = Mix({"a": range(4), "b": batched}, {"a": 1, "b": 1}, with_source=True)
    assert len(mix) == 14
    assert mix.__getitems__([13, 0, 4, -1, 3]) == [(109, 1), (0, 0), (100, 1), (109, 1), (3, 0)]
    assert batched.calls == [[9, 0, 9]]
    assert mix.source_of(13) == ("b", 9)
    assert pickle.loads(pickle.dumps(Mix(numbered([3]), {"s0": 1})))[2] == 2
    with pytest.raises(IndexError, match="row 14 of 14"):
        mix[14]


def test_mix_in_a_mix_keeps_its_proportions() -> None:
    inner = Mix(numbered([8, 8]), {"s0": 3, "s1": 1})
    mix = Mix({"inner": inner, "other": range(5000, 5009)}, {"inner": 2, "other": 1})
    rows = [row for row in taken(mix, 300) if row < 5000]
    assert rows == [inner[inner.order(n % 16, 16, stream_seed(0, 0, 0), n // 16)] for n in range(200)]
    assert sum(row in inner.sources["s0"] for row in rows[:100]) == 75


def test_steps_take_the_order_of_a_mix_and_its_tokens() -> None:
    packed = [PackedDocuments([[1, 2, 3]], length) for length in (8, 8, 9)]
    mix = Mix({"a": packed[0], "b": packed[1]}, {"a": 1, "b": 1})
    source = Source.of(mix, 0, None, None, {})
    assert source.order == mix.order
    assert source.tokens == 8
    assert source.snapshot().unseen == ""
    assert Source.of(mix, 0, None, sample_index, {}).order is sample_index
    assert Source.of(Mix({"a": packed[0], "b": packed[2]}, {"a": 1, "b": 1}), 0, None, None, {}).tokens is None


MISSING = "the sources are 'a', 'b', and weights= has {}; give each source a weight; 0 leaves it out"
FORMS = "; pass {name: weight}, or {0: {name: weight}, row: {name: weight}, ...}"
REFUSED: list[tuple[Any, Any, type[Exception], str]] = [
    ({}, {}, UsageError, "a mix needs at least one source; pass {name: dataset}"),
    (
        {"a": iter([1])},
        {"a": 1},
        DatasetError,
        "the source 'a' is a list_iterator, which has no rows by number; pass a dataset with __len__ and __getitem__",
    ),
    ({"a": []}, {"a": 1}, DatasetError, "the source 'a' has no rows; leave it out, or check how it was created"),
    ({"a": [1], "b": [2]}, {"a": 1}, UsageError, MISSING.format("'a'")),
    ({"a": [1], "b": [2]}, {"a": 1, "b": 1, "c": 1}, UsageError, MISSING.format("'a', 'b', 'c'")),
    ({"a": [1], "b": [2]}, [1, 2], UsageError, MISSING.format("a list")),
    ({"a": [1]}, {"a": -1}, UsageError, "the weight of 'a' is -1; use a finite number of at least 0"),
    ({"a": [1]}, {"a": math.nan}, UsageError, "the weight of 'a' is nan; use a finite number of at least 0"),
    ({"a": [1]}, {"a": "1"}, UsageError, "the weight of 'a' is '1'; use a finite number of at least 0"),
    ({"a": [1]}, {"a": 0}, UsageError, "the weights of all sources are 0; give at least one source a positive weight"),
    ({"a": [1]}, {5: {"a": 1}}, UsageError, "weights= has no weights for row 0" + FORMS),
    ({"a": [1]}, {0: {"a": 1}, -5: {"a": 1}}, UsageError, "weights= has -5 as a row" + FORMS),
]


@pytest.mark.parametrize(("of", "weights", "error", "text"), REFUSED)
def test_what_cannot_be_mixed_is_refused(of: Any, weights: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error) as raised:
        Mix(of, weights)
    assert str(raised.value) == text


def test_order_of_a_mix_of_another_size_is_refused() -> None:
    with pytest.raises(UsageError) as raised:
        Mix(numbered([3]), {"s0": 1}).order(0, 5)
    cure = "pass the Mix itself to steps(), with the sources that it had when the run began"
    what = "the sources of the mix have 3 rows in all, but the dataset of this run has 5"
    assert str(raised.value) == f"{what}; {cure}"
    with pytest.raises(UsageError) as raised:
        Mix(numbered([3]), {"s0": 1}).counts(-1)
    assert str(raised.value) == "rows=-1 is negative; pass a number of rows, for example steps * global_batch"


def rows_by_hand() -> list[list[int]]:
    """The number of rows of each step, and the sums of their powers."""
    mix, steps = Mix(sources(), WEIGHTS), []
    for epoch in range(EPOCHS):
        for first in range(0, len(mix), BATCH):
            positions = range(first, min(first + BATCH, len(mix)))
            rows = [int(mix[mix.order(position, len(mix), 3, epoch)]) for position in positions]
            steps.append([len(rows), *(sum(row**power for row in rows) for power in (1, 2, 3))])
    return steps


@pytest.mark.slow
@pytest.mark.parametrize(("workers", "then"), [(2, 3), (1, 5), (3, 1), (5, 2)])
def test_mix_has_the_same_rows_through_a_kill_a_join_and_a_resume(workers: int, then: int, tmp_path: Path) -> None:
    """A worker is killed in the first epoch and joins again. The run stops in the middle of the second epoch, where the
    weights change, and continues with another number of workers, of which one is killed and joins again.
    """
    teams = 0
    for count, fault, steps in ((workers, "kill:0@2.forward", ("--steps", "7")), (then, "kill:0@9.forward", ())):
        options = ("--workers", str(count), "--run-dir", "run", *steps)
        teams += 2 * (count > 1)  # one without the killed worker, and one with it
        chaos = {"PACELINE_CHAOS": fault, "FORMED": str(teams)} if count > 1 else {}
        paceline("run", *options, SCRIPTS / "mixed.py", "out.json", cwd=tmp_path, **chaos)
    assert json.loads((tmp_path / "out.json").read_text()) == rows_by_hand()
    formed = [event["workers"] for event in read_journal(tmp_path / "run") if event["event"] == "formed"]
    assert sorted(map(len, formed)) == sorted(size for one in (workers, then) if one > 1 for size in (one - 1, one))


class Rows(list[int]):
    """A list that can be a key."""

    __hash__ = object.__hash__  # type: ignore[assignment]


def test_datasets_without_names_are_mixed_by_their_weights() -> None:
    """The function gives the same rows as the class with names."""
    first, second = Rows(range(10)), Rows(range(100, 130))
    mixed, named = mix({first: 1, second: 3}), Mix({"0": first, "1": second}, {"0": 1, "1": 3})
    rows = [mixed[mixed.order(position, len(mixed))] for position in range(40)]
    assert rows == [named[named.order(position, len(named))] for position in range(40)]
    assert sum(row < 100 for row in rows) == 10
