"""The planner's history: corrections by kind of plan, errors, and files that are damaged or cannot be written."""

from __future__ import annotations

import pytest

from paceline.plan import Plan
from paceline.planner.descriptions import BlockDescription, ModelDescription
from paceline.planner.history import History, Prediction

ZERO3, DATA = Plan.parse("shard=2 zero=3"), Plan.parse("data=2")
NET = ModelDescription("Net", (BlockDescription("", 8),), 24)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "cache" / "predictions.jsonl"


def test_plans_that_have_something_in_common_are_corrected_the_more_is_known_of_them(path):
    history = History(path)
    factors = []
    for workers in (2, 4, 6, 8):
        plan = ZERO3.validate(workers)
        history.add(Prediction(str(plan), workers, 1.0, 1.0, 2.0, "Other", 9))
        factors.append(history.correction(ZERO3.validate(2), NET, 2))
    assert 1.0 < factors[0] < factors[1] < factors[2] < factors[3] < 2.0
    assert factors[0] == pytest.approx(2.0**0.5), "one trial of another model says as much as no trial"
    assert history.correction(DATA, NET, 2) == 1.0
    assert History(path).correction(ZERO3, NET, 2) == factors[3]


def test_a_plan_of_the_same_model_is_corrected_by_its_own_measurements(path):
    history = History(path)
    plan = DATA.validate(2)
    for model, parameters, measured in (("Net", 8, 3.0), ("Net", 9, 7.0), ("Other", 8, 7.0)):
        history.add(Prediction(str(plan), 2, 2.0, 2.0, measured, model, parameters))
    assert history.correction(plan, NET, 2) == 1.5


def test_other_machines_and_other_software_have_histories_of_their_own(path):
    plan = str(DATA.validate(2))
    for machine, measured in (("Processor A, torch 2.13", 4.0), ("Processor A, torch 2.14", 6.0), ("", 9.0)):
        History(path, machine).add(Prediction(plan, 2, 2.0, 2.0, measured, "Net", 8))
    for machine, factor in (("Processor A, torch 2.13", 2.0), ("Processor A, torch 2.14", 3.0), ("", 4.5)):
        assert History(path, machine).correction(DATA.validate(2), NET, 2) == factor
    assert History(path, "Processor B, torch 2.13").error() is None


def test_the_error_is_that_of_the_corrected_predictions(path):
    history = History(path)
    assert history.error() is None
    for predicted in (1.1, 0.8, 1.0):
        history.add(Prediction("data=2", 2, 5.0, predicted, 1.0))
    assert history.error() == (3, pytest.approx(0.1))


def test_damaged_lines_are_left_out(path):
    history = History(path)
    history.add(Prediction("data=2", 2, 1.0, 1.0, 2.0))
    path.write_bytes(b'\xff{"plan": 3}\nnothing\n' + path.read_bytes() + b'{"plan": "da')
    assert History(path).error() == (1, pytest.approx(0.5))


def test_a_folder_that_cannot_be_written_loses_nothing_else(tmp_path):
    (tmp_path / "file").write_text("")
    history = History(tmp_path / "file" / "predictions.jsonl")
    history.add(Prediction("data=2", 2, 1.0, 1.0, 2.0))
    assert history.error() == (1, pytest.approx(0.5))
