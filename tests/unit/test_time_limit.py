"""`--max-time`: durations as people write them, and the end of a Slurm job."""

from __future__ import annotations

import time

import pytest

from paceline.errors import UsageError
from paceline.launch.time_limit import limit_of, parse_time


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90s", 90), ("30m", 1800), ("30min", 1800), ("3h", 10800), ("1h30m", 5400), ("1.5 d", 129600)],
)
def test_durations(text, seconds):
    assert parse_time(text) == seconds


@pytest.mark.parametrize("text", ["", "90", "h", "3 hours", "1:30", "-3h", "0s", "3h!"])
def test_other_texts_are_refused(text):
    with pytest.raises(UsageError) as error:
        parse_time(text)
    assert str(error.value) == f"--max-time {text!r} is not a duration; use 90s, 30m, 3h, 1h30m or 2d"


def test_a_slurm_job_limits_the_run(monkeypatch):
    monkeypatch.delenv("SLURM_JOB_END_TIME", raising=False)
    assert limit_of(None) == (None, "")
    monkeypatch.setenv("SLURM_JOB_END_TIME", str(int(time.time()) + 1120))
    seconds, why = limit_of(None)
    assert 990 <= seconds <= 1001
    assert why == "the Slurm job ends in 2 min"
    assert limit_of("3h") == (10800, "--max-time 3h is over")
