"""A resumed script gets the results of its collectives outside of loops again, one after another."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from paceline.session.recorded_results import RecordedResults
from paceline.session.script_position import ScriptPosition
from paceline.session.training_loop import LoopState


class Computes:
    """Transactions that return the number of their calls."""

    calls = 0

    def run(self, *_: Any) -> int:
        self.calls += 1
        return self.calls


@pytest.fixture
def script() -> ScriptPosition:
    return ScriptPosition()


@pytest.fixture
def team() -> Any:
    return Computes()


@pytest.fixture
def results(script: ScriptPosition, team: Any) -> RecordedResults:
    return RecordedResults(team, script)


def nothing() -> Any:
    raise AssertionError


def test_new_run_computes_and_records_results(results: RecordedResults) -> None:
    assert [results.run(nothing), results.run(nothing)] == results.values == [1, 2]
    assert not results.has_next


def test_resumed_script_gets_recorded_results(results: RecordedResults, script: ScriptPosition, team: Any) -> None:
    kept = torch.ones(2)
    results.restore({"results": [5, {"accuracy": kept}]})
    kept.zero_()  # the checkpoint's memory is not held
    script.replays = True
    assert results.run(nothing) == 5
    assert results.has_next
    assert results.run(nothing)["accuracy"].tolist() == [1.0, 1.0]
    assert (results.run(nothing), team.calls, results.take()) == (1, 1, [])
    assert len(results.values) == 2, "the end of the script of a finished run is not recorded"


def test_resumed_script_adds_results_after_the_first_step(results: RecordedResults, script: ScriptPosition) -> None:
    results.restore({"results": [5, 6]})
    script.replays = False  # as the first step does
    assert results.run(nothing) == 1
    assert results.values == [5, 6, 1]


@pytest.mark.parametrize("replays", [False, True])
@pytest.mark.parametrize("where", ["in a loop", "beside step()"])
def test_results_in_the_body_of_a_loop_are_not_recorded(
    replays: bool, where: str, results: RecordedResults, script: ScriptPosition
) -> None:
    results.restore({"results": [5]})
    script.replays, script.uses_step = replays, where == "beside step()"
    if where == "in a loop":
        script.loops.append(LoopState(0, None, None, 4))
    assert results.run(nothing) == 1
    assert results.values == [5]


def test_resume_without_a_checkpoint_has_no_results(results: RecordedResults) -> None:
    results.restore({})
    assert results.values == []
