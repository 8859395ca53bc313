"""What a run notes in its steps waits until the outermost loop asks for its next step: Notices, ScriptPosition."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from paceline.base.batching import Agreed
from paceline.base.environment import World
from paceline.base.exit_codes import STOPPED
from paceline.session.notices import Notices
from paceline.session.script_position import ScriptPosition
from paceline.session.training_loop import LoopState

NOTHING = Agreed(0.0, 0.0, 0, 0, 0, 0, 0, 0, 0, {}, (), ())


class Lines(list[str]):
    """A reporter that keeps what is said."""

    say = list.append


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    numbers = signal.SIGUSR1, signal.SIGTERM, signal.SIGUSR2, signal.SIGINT
    before = [signal.getsignal(number) for number in numbers]
    yield
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)


def notices(lines: Any = None, elastic: bool = False, saves: bool = False, **world: Any) -> Notices:
    return Notices(World(**world), Lines() if lines is None else lines, elastic, saves)


def test_save_and_stop_requests_stay_until_they_are_taken() -> None:
    one = notices()
    for agreed in (replace(NOTHING, save=2), replace(NOTHING, enter=1), NOTHING):
        one.record_agreed(agreed)
    assert (one.save_due, one.stop_due, one.enter_due) == (2, False, True)
    one.record_agreed(replace(NOTHING, save=1, stop=3))
    assert (one.save_due, one.stop_due) == (1, True)


@pytest.mark.parametrize(
    ("number", "stops", "step", "reason"),
    [
        (None, False, 7, None),
        (None, False, 8, (0, "--steps 8")),
        (None, True, 3, (STOPPED, "asked to stop")),
        (signal.SIGTERM, True, 8, (STOPPED, "asked to stop")),
        (signal.SIGINT, True, 3, (130, "asked to stop")),
        (signal.SIGTERM, False, 3, None),  # until all workers know it
    ],
)
def test_reason_of_a_stop_is_kept(number: int | None, stops: bool, step: int, reason: Any) -> None:
    one = notices(max_steps=8)
    one.stop_signal, one.stop_due = number, stops
    assert one.reason_to_stop(step) == reason


@pytest.mark.parametrize("elastic", [False, True])
def test_signal_to_one_worker_stops_all_only_without_an_agent(elastic: bool) -> None:
    one = notices(elastic=elastic)
    signal.raise_signal(signal.SIGTERM)
    assert one.stop_signal == (None if elastic else signal.SIGTERM)
    signal.raise_signal(signal.SIGUSR2)
    assert one.stop_signal == signal.SIGUSR2


@pytest.mark.parametrize("saves", [False, True])
def test_first_ctrl_c_stops_after_the_step_and_the_second_at_once(saves: bool) -> None:
    one, before = notices(lines := Lines(), saves=saves), signal.getsignal(signal.SIGINT)
    with one.ctrl_c_stops(outermost=True):
        with one.ctrl_c_stops(outermost=False):
            signal.raise_signal(signal.SIGINT)
        assert one.stop_signal == signal.SIGINT
        assert lines == [f"stopping after this step{' and saving' * saves}; press Ctrl-C again to stop at once"]
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


def test_notebook_goes_on_after_a_stop() -> None:
    one = notices()
    one.stop_signal, one.stop_due = signal.SIGINT, True
    one.withdraw()
    assert one.reason_to_stop(3) is None
    assert one.stop_signal is None


def test_script_with_exit_code_zero_has_not_failed() -> None:
    one = notices()
    assert not one.left
    with pytest.raises(SystemExit) as ended:
        one.end_script()
    assert (ended.value.code, one.left) == (STOPPED, True)


def loop(number: int) -> LoopState:
    return LoopState(number, None, None, 4)


def test_enclosing_loop_is_the_first_of_zipped_loops() -> None:
    script, outer, first, second = ScriptPosition(), loop(0), loop(1), loop(2)
    assert script.enclosing_loop is None
    with script.inside(outer):
        assert script.enclosing_loop is outer
        first.outer = second.outer = outer
        with script.inside(first), script.inside(second):
            assert script.loops == [outer, first, second]
            assert script.enclosing_loop is first
    assert script.loops == []


def test_loop_left_by_break_is_complete_once_more_training_follows() -> None:
    script, left, ended = ScriptPosition(), loop(0), loop(1)

    def turns(phase: LoopState) -> Iterator[int]:
        with script.inside(phase):
            yield from range(2)

    for _ in (turn := turns(left)):
        break
    turn.close()
    for _ in turns(ended):
        pass
    assert not left.complete
    script.complete_left_loops()
    assert (left.complete, ended.complete, script.loops) == (True, False, [])


def test_single_steps_of_several_trainers_make_a_round() -> None:
    script, begins = ScriptPosition(), []
    for trainer in (0, 1, 0, 0, 1, 2, 2):
        begins.append(script.begins_round(trainer, loop=False))
        script.round.add(trainer)
    assert begins == [True, False, True, True, False, False, True]
    assert script.begins_round(0, loop=True)
    assert script.round == set()
