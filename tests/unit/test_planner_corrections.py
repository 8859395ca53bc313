"""Trials of plans correct the predictions of other plans, by what they have in common."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.plan import Plan
from paceline.planner.choose import Prospect, corrected_by_trials
from paceline.planner.corrections import OF_TRAIT, OF_TRIAL, Corrections, traits_of
from paceline.planner.descriptions import TrialResult

TRAITS = ("tensor", "pipeline", "zero=1", "zero=3")
SETS = st.frozensets(st.sampled_from(TRAITS))


@given(SETS, st.lists(st.tuples(SETS, st.floats(0.2, 5.0)), max_size=8))
def test_corrections_are_those_of_bayesian_linear_regression(
    traits: frozenset[str], trials: list[tuple[frozenset[str], float]]
) -> None:
    """In the other form: the posterior of a Gaussian process, whose covariance counts the common traits."""
    covariance = np.array([[OF_TRAIT**2 * len(one & other) for other, _ in trials] for one, _ in trials])
    logs = np.log([factor for _, factor in trials])
    weights = np.linalg.solve(covariance.reshape(2 * (len(trials),)) + OF_TRIAL**2 * np.eye(len(trials)), logs)
    expected = np.exp(sum(OF_TRAIT**2 * len(traits & one) * w for (one, _), w in zip(trials, weights, strict=True)))
    assert Corrections(trials).factor(traits) == pytest.approx(float(expected), rel=1e-9)


@pytest.mark.parametrize(
    ("text", "traits"),
    [
        ("data=4", set()),
        ("micro=2", set()),
        ("shard=4 zero=1", {"zero=1"}),
        ("shard=2 zero=3 tensor=2 recompute=blocks", {"zero=3", "tensor"}),
        ("pipeline=4 virtual=2", {"pipeline"}),
        ("server=1", {"server"}),
        ("local=4 every=8", {"local"}),
    ],
)
def test_traits_of_a_plan_are_how_it_divides_the_model(text: str, traits: set[str]) -> None:
    assert traits_of(Plan.parse(text).validate(4), 4) == traits


def prospect(text: str, seconds: float) -> Prospect:
    return Prospect(
        Plan.parse(text).validate(4), 4, seconds, seconds, {"computing": 0.5 * seconds, "sums": 0.5 * seconds}
    )


def test_a_trial_corrects_plans_that_have_something_in_common_with_it() -> None:
    found = {text: prospect(text, 1.0) for text in ("data=4", "tensor=4", "tensor=4 micro=2", "tensor=2", "pipeline=4")}
    found["one worker"] = replace(found["data=4"], workers=1)
    found["tensor=4"] = found["tensor=4"].with_trial(TrialResult("tensor=4", 4, seconds=(1.5, 1.5)), 1)
    once = corrected_by_trials(found, 4)
    for text in ("tensor=4 micro=2", "tensor=2"):
        assert 1.4 < once[text].seconds < 1.5
        assert sum(once[text].parts.values()) == pytest.approx(once[text].seconds)
    assert [once[text].seconds for text in ("data=4", "tensor=4", "pipeline=4", "one worker")] == [1.0] * 4
    assert corrected_by_trials(once, 4)["tensor=2"].seconds == pytest.approx(once["tensor=2"].seconds)
    # The trial of a plan that was corrected counts with what was predicted before all trials.
    once["tensor=2"] = once["tensor=2"].with_trial(TrialResult("tensor=2", 4, seconds=(1.5, 1.5)), 2)
    assert 1.45 < corrected_by_trials(once, 4)["tensor=4 micro=2"].seconds < 1.5
