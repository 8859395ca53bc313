"""Figures as they are written, and the arithmetic of the report's charts."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from paceline.base.text import clock, duration, number, shares_of, size_of
from paceline.observe.charts import MOST, label, smooth, thin, ticks


def test_figures() -> None:
    values = (2.31415, 5321.4, 1234567, 3, 0.0003, 0.0, None, math.nan, 1e20, 10**400)
    assert [number(value) for value in values] == [
        *("2.314", "5,321", "1,234,567", "3", "0.0003", "0", "not finite", "not finite", "1e+20"),
        "1.00e+400",
    ]
    assert [clock(seconds) for seconds in (0, 34.4, 725, 3723)] == ["0:00", "0:34", "12:05", "1:02:03"]
    assert [duration(seconds) for seconds in (0, 0.02, 34.21, 59.97, 725, 12000, 190000)] == [
        *("0.0 s", "20 ms", "34.2 s", "1 min", "12 min 5 s", "3 h 20 min", "2 d 4 h")
    ]
    assert [size_of(count) for count in (0, 812, 1234567, 999_900, 5e15)] == [
        "0 B",
        "812 B",
        "1.23 MB",
        "1 MB",
        "5 PB",
    ]
    assert shares_of({"other": 3.0, "a": 1.0, "b": 4.0, "c": 0.0}) == [
        ("b", 0.5),
        ("a", 0.125),
        ("other", 0.375),
    ]


FINITE = st.floats(-1e150, 1e150)


@given(FINITE, FINITE, st.booleans(), st.integers(4, 8))
@example(9.912312718743755e-265, 4.899463560224258e-267, True, 4)
@example(0.0, 5e-324, False, 4)  # a quarter of it is no number
def test_ticks_are_few_round_and_inside(one: float, other: float, whole: bool, count: int) -> None:
    low, high = min(one, other), max(one, other)
    places = ticks(low, high, count, whole)
    span = high - low
    slack = max(span * 1e-6, 1e-8 if whole else 0.0)  # whole numbers are that far apart that 0 may stand for 1e-260
    if len(places) == 1:
        assert low - slack <= places[0] <= high + slack
        assert span <= max(abs(low), abs(high)) * 1e-9 or (whole and span < 2) or not span / count
        return
    assert len(places) <= 2 * count + 1
    gaps = [after - before for before, after in pairwise(places)]
    assert gaps == pytest.approx([gaps[0]] * len(gaps), rel=1e-5)
    assert round(gaps[0] / 10 ** math.floor(math.log10(gaps[0] * 1.0001)), 4) in (1, 2, 5)
    assert low - slack <= places[0] < places[-1] <= high + slack
    assert not whole or gaps[0] > 0.999
    assert len({label(place, gaps[0]) for place in places}) == len(places) or max(map(abs, places)) >= 1e12


def test_tick_labels() -> None:
    assert [
        label(value, step)
        for value, step in ((0, 1), (0.5, 0.5), (12000, 2000), (1500, 500), (1.2e6, 2e5), (3e-6, 1e-6))
    ] == [*("0", "0.5", "12k", "1,500", "1.2M", "3e-06")]


@given(st.lists(st.tuples(st.floats(0, 1e6), st.floats(-1e6, 1e6)), min_size=1, max_size=600))
def test_thinning_keeps_the_extremes(points: list[tuple[float, float]]) -> None:
    kept = thin(points, 50)
    assert len(kept) <= max(50, 2)
    assert {min(y for _, y in points), max(y for _, y in points)} <= {y for _, y in kept}


@given(st.lists(st.tuples(st.floats(0, 1e6), st.floats(-1e6, 1e6)), min_size=1, max_size=600))
def test_a_smoothed_curve_has_as_many_points_as_a_chart_shows(points: list[tuple[float, float]]) -> None:
    smoothed = smooth(sorted(points))
    assert len(smoothed) == -(-len(points) // -(-len(points) // MOST))
    assert all(map(math.isfinite, (value for point in smoothed for value in point)))


@pytest.mark.parametrize("count", [20, 60, 239, 1000, 5000])
def test_a_smoothed_curve_does_not_collapse_onto_its_last_point(count: int) -> None:
    """A line stays as it is up to both ends, and a last point far from the others moves the end by half at most."""
    line = [(float(index), 3.0 - 2.0 * index) for index in range(count)]
    assert all(value == pytest.approx(3.0 - 2.0 * x) for x, value in smooth(line))
    noise = [(float(index), 1.0 if index % 2 else -1.0) for index in range(count)]
    ends = smooth(noise)
    assert max(abs(ends[0][1]), abs(ends[-1][1])) < 0.5
    assert max(abs(value) for _, value in ends[5:-5]) < 0.25
