"""`--max-time`: durations as people write them, and the end of a Slurm job."""

from __future__ import annotations

import time

import pytest

from paceline.errors import UsageError
from paceline.launch.options import LaunchOptions
from paceline.launch.time_limit import _stop, limit_of, parse_time


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
    assert limit_of(None) is None
    monkeypatch.setenv("SLURM_JOB_END_TIME", str(int(time.time()) + 1120))
    assert 990 <= limit_of(None) <= 1001
    assert limit_of("3h") == 10800


@pytest.mark.parametrize(("left", "limit"), [(601, 480), (300, 240), (120, 96), (30, 24)])
def test_a_short_slurm_job_trains_for_most_of_its_time(monkeypatch, left, limit):
    monkeypatch.setattr("paceline.launch.time_limit.time.time", lambda: 1_000_000.5)
    monkeypatch.setenv("SLURM_JOB_END_TIME", str(1_000_000 + left))
    assert limit - 1 <= limit_of(None) <= limit + 1
    monkeypatch.setenv("SLURM_JOB_END_TIME", "999999")
    assert limit_of(None) == 0.0


@pytest.mark.parametrize(
    ("max_time", "left", "line"),
    [
        ("3h", 500, "--max-time 3h is over: the run stops with a checkpoint"),
        (None, 120, "the Slurm job ends in 2 min: the run stops with a checkpoint"),
        (None, 20, "the Slurm job ends in 20.0 s: the run stops with a checkpoint"),
    ],
)
def test_the_line_names_the_limit(tmp_path, monkeypatch, capsys, max_time, left, line):
    monkeypatch.setattr("paceline.launch.time_limit.time.time", lambda: 1_000_000.125)
    monkeypatch.setenv("SLURM_JOB_END_TIME", str(1_000_000 + left))
    asked = []
    monkeypatch.setattr("paceline.launch.time_limit.stop", lambda *words, **_: asked.append(words))
    _stop(tmp_path, LaunchOptions("train.py", max_time=max_time))
    assert capsys.readouterr().err == f"{line}\n"
    assert asked == [(str(tmp_path), None)]
