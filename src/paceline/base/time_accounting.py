"""Assigns every second of a run to one account (steps, data, checkpoints, recovery, ...)."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from paceline.base.environment import began

# What brings the training forward, and what it costs to have it done by several, and safely.
USEFUL = ("steps", "evaluating", "script")
COSTS = ("starting", "waiting", "saving", "detection", "forming", "hand-over", "redone", "paused")


def process_began() -> float:
    """Returns when this process began, in Unix seconds: when its agent began to start it, or else when it started, to
    a hundredth of a second. If neither is known, returns the present time.
    """
    agent_start = began()
    if agent_start is not None:
        return agent_start
    try:
        ticks = float(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        up = float(Path("/proc/uptime").read_text().split()[0])
        return time.time() - (up - ticks / os.sysconf("SC_CLK_TCK"))
    except (OSError, ValueError, IndexError):
        return time.time()


class Account:
    """Seconds by account since the last `take`, first since the process began; they add up to the wall clock. For one
    thread.

    `starting` is before the first step, `script` whatever the user's own lines do after that, `steps` what became of
    them; `redone` are attempts that were void, `detection` the part of one in which a loss was not known yet.
    """

    def __init__(self) -> None:
        self._seconds = {"starting": max(0.0, time.time() - process_began())}
        self._stack = ["starting"]
        self._since = time.perf_counter()

    @contextmanager
    def of(self, account: str) -> Iterator[None]:
        """The time inside belongs to `account`, but for that of such blocks within."""
        self.begin(account)
        try:
            yield
        finally:
            self.end()

    def begin(self, account: str) -> None:
        """From now on the time belongs to `account`, until `end`."""
        self._book()
        if account == "steps":
            self._stack[0] = "script"
        self._stack.append(account)

    def end(self) -> None:
        """From now on the time belongs to the account before the last `begin`."""
        self._book()
        self._stack.pop()

    def move(self, seconds: float, account: str) -> None:
        """So many of the last seconds, on the account of now, belong to another one."""
        self._book()
        now = self._stack[-1]
        seconds = min(seconds, self._seconds.get(now, 0.0))
        self._seconds[now] = self._seconds.get(now, 0.0) - seconds
        self._seconds[account] = self._seconds.get(account, 0.0) + seconds

    def take(self) -> dict[str, float]:
        """The seconds since the last time."""
        self._book()
        taken, self._seconds = self._seconds, {}
        return {account: seconds for account, seconds in taken.items() if seconds}

    def _book(self) -> None:
        now = time.perf_counter()
        account = self._stack[-1]
        self._seconds[account] = self._seconds.get(account, 0.0) + now - self._since
        self._since = now
