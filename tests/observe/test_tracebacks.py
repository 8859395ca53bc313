"""What is left of a log without the traceback at its end."""

from __future__ import annotations

import traceback

import pytest

from paceline.base.tracebacks import before_the_trace

SAID = ["loading", "", "step 1"]


def raised(text: str) -> list[str]:
    """What an interpreter prints of code that raises."""
    try:
        exec(text)
    except ValueError:
        return traceback.format_exc().splitlines()
    raise AssertionError


@pytest.mark.parametrize(
    "text",
    [
        "raise ValueError(3)",
        "try:\n    1 / 0\nexcept ZeroDivisionError as error:\n    raise ValueError(3) from error",
        "try:\n    int('a')\nexcept ValueError:\n    int('b')",
        "raise ValueError('Caught KeyError in process 0.\\nOriginal Traceback (most recent call last):')",
    ],
    ids=["one", "from", "during", "of a loader"],
)
def test_the_trace_at_the_end_is_cut_off(text: str) -> None:
    assert before_the_trace([*SAID, *raised(text)]) == ["loading", "step 1"]
    assert before_the_trace(raised(text)) == []


def test_without_a_trace_all_is_left() -> None:
    assert before_the_trace(SAID) == ["loading", "step 1"]


def test_a_trace_that_somebody_printed_before_stays() -> None:
    printed = raised("int('a')")
    assert before_the_trace([*printed, "goes on", *raised("int('b')")]) == [*printed, "goes on"]


def test_the_stack_of_a_crash_is_cut_off() -> None:
    stack = ["Fatal Python error: Segmentation fault", "", "Current thread 0x1 (most recent call first):"]
    assert before_the_trace([*SAID, *stack]) == ["loading", "step 1"]
