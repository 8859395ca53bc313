"""Stops a run with a checkpoint before its time is over: `--max-time`, or the end of a Slurm job."""

from __future__ import annotations

import math
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from paceline.base.console import say
from paceline.base.environment import job_ends_at
from paceline.base.text import duration
from paceline.errors import PacelineError, UsageError
from paceline.launch.options import LaunchOptions
from paceline.launch.remote_commands import stop

RESERVE, SHARE = 120.0, 0.2  # seconds of a Slurm job for the last step and the checkpoint; of a short job this share
_UNITS = {"s": 1, "m": 60, "min": 60, "h": 3600, "d": 86400}


def parse_time(text: str) -> float:
    """Converts ``90s``, ``30m``, ``1h30m`` or ``2d`` to seconds. Raises UsageError."""
    parts = re.findall(r"([0-9]{1,9}(?:\.[0-9]+)?)(min|[smhd])", text.replace(" ", ""))
    seconds = sum(float(number) * _UNITS[unit] for number, unit in parts)
    if seconds <= 0 or "".join(number + unit for number, unit in parts) != text.replace(" ", ""):
        raise UsageError(f"--max-time {text!r} is not a duration", "use 90s, 30m, 3h, 1h30m or 2d")
    return seconds


@contextmanager
def limited(folder: Path, options: LaunchOptions) -> Iterator[None]:
    """Stops the run in `folder` at the deadline in its options."""
    if options.deadline == math.inf:
        yield
        return
    timer = threading.Timer(max(0.0, options.deadline - time.monotonic()), _stop, (folder, options))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def with_deadline(options: LaunchOptions) -> LaunchOptions:
    """Returns the options of a run that begins now, with the time at which it must stop: when `--max-time` is over, or
    `RESERVE` seconds before the end of its Slurm job (of less than ten minutes, a `SHARE` of them).

    A script of --raw, which saves its own state, is stopped by --max-time alone.
    """
    limit = limit_of(options.max_time)
    if limit is None or (options.raw and options.max_time is None):
        return options
    return replace(options, deadline=time.monotonic() + limit)


def limit_of(text: str | None) -> float | None:
    """Returns after how many seconds the run must stop; None if it has no limit."""
    if text is not None:
        return parse_time(text)
    if (ends := job_ends_at()) is None:
        return None
    left = max(0.0, ends - time.time())
    return left - min(RESERVE, SHARE * left)


def _stop(folder: Path, options: LaunchOptions) -> None:
    if not options.quiet:
        left = max(0, round((job_ends_at() or 0.0) - time.time()))
        ends = f"the Slurm job ends in {duration(left)}"
        why = ends if options.max_time is None else f"--max-time {options.max_time} is over"
        say(f"{why}: the run stops with a checkpoint")
    with suppress(PacelineError, OSError):  # it has just ended
        stop(str(folder), None, wait=False)
