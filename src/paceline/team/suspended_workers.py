"""Tracks workers that are suspended (SIGSTOP), and how long the run waits for them."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping

from paceline.base.text import ranks
from paceline.team.worker_slots import WorkerReport, WorkerSlot

NO_STATE = "no other worker has the training state"  # in console lines about a run that waits
NAMED, OVER = 2.0, 5.0  # seconds of a stop after which the console names the worker, and after which no worker waits


class SuspendedWorkers:
    """The workers that are suspended, and since when. `due` is the time at which to look at them again."""

    def __init__(self) -> None:
        self._since: dict[int, tuple[int, float]] = {}  # with the life in which it is
        self._named: set[int] = set()
        self.due = math.inf

    def update(self, number: int, report: WorkerReport, now: float) -> bool:
        """Takes a worker's report; returns whether the worker goes on after the console named it as stopped."""
        life, _ = self._since.get(number, (None, 0.0))
        if report.stopped and life == report.life:
            return False
        goes_on = number in self._named and life == report.life and report.status is None
        self._named.discard(number)
        self._since.pop(number, None)
        if report.stopped:
            self._since[number] = report.life, now - report.since
        return goes_on

    def stopped(self, slots: Mapping[int, WorkerSlot]) -> list[int]:
        """The workers that are still suspended."""
        known = {number: slots[number] for number in self._since if number in slots}
        self._since = {n: self._since[n] for n, slot in known.items() if slot.alive and slot.report.stopped}
        self._named &= self._since.keys()
        self.due = math.inf
        return [*self._since]

    def wait(self, stopped: Collection[int], now: float, begun: bool, then: str) -> tuple[str, bool]:
        """Waits for suspended workers whose training state no other worker has.

        Returns a line for the console (or an empty text), and whether their time is over. `then` says what happens when
        it is over; an empty text means to wait for ever. `begun`: the first step is made.
        """
        if not stopped:
            return "", False
        first = min(self._since[number][1] for number in stopped)
        over = bool(then) and now >= first + OVER
        named = self._named.issuperset(stopped)
        if now < first + NAMED:
            self.due = first + NAMED
        elif then and not over:
            self.due = first + OVER
        if not over and (named or now < first + NAMED):
            return "", False
        self._named |= {*stopped}
        been = f"{'has' if len(stopped) == 1 else 'have'} been stopped (SIGSTOP) for {OVER if over else NAMED:.0f} s"
        what = f"{ranks(stopped)} {been}{'' if begun else ', before the first step'}"
        if not then:
            return f"{what}, and {NO_STATE}: waiting", False
        run_again = "it runs" if len(stopped) == 1 else "they run"
        soon = "" if over else f" unless {run_again} again within {OVER - NAMED:.0f} s"
        return f"{what}: {then}{soon}", over


def all_ended(slots: Mapping[int, WorkerSlot]) -> bool:
    """Whether all workers that the run depends on have ended; there must be at least one."""
    counting = (slot.report.status for slot in slots.values() if not slot.newcomer and not slot.out)
    first = next(counting, None)  # if this one is alive, there is no need to look at all the others
    return first is not None and all(status is not None for status in counting)


def any_ended_well(slots: Mapping[int, WorkerSlot]) -> bool:
    """Whether any worker that the run depends on has ended with exit code 0."""
    return any(slot.report.status == 0 for slot in slots.values() if not slot.newcomer and not slot.out)
