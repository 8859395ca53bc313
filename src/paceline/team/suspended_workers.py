"""Handles workers that are suspended (SIGSTOP)."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping

from paceline.base.text import ranks
from paceline.team.worker_slots import WorkerReport, WorkerSlot

NAMED, OVER = 2.0, 5.0  # seconds that one is stopped before it is said, and before nobody waits any longer


class SuspendedWorkers:
    """Who is stopped, and since when. `due` is when to look at them again."""

    def __init__(self) -> None:
        self._since: dict[int, tuple[int, float]] = {}  # with the life in which it is
        self._named: set[int] = set()
        self.due = math.inf

    def hear(self, number: int, said: WorkerReport, now: float) -> bool:
        """What is said of a worker: whether it goes on, after it was said that it is stopped."""
        life, _ = self._since.get(number, (None, 0.0))
        if said.stopped and life == said.life:
            return False
        goes_on = number in self._named and life == said.life and said.status is None
        self._named.discard(number)
        self._since.pop(number, None)
        if said.stopped:
            self._since[number] = said.life, now - said.since
        return goes_on

    def stopped(self, seats: Mapping[int, WorkerSlot]) -> list[int]:
        """Those that still are."""
        there = {number: seats[number] for number in self._since if number in seats}
        self._since = {n: self._since[n] for n, seat in there.items() if seat.alive and seat.said.stopped}
        self._named &= self._since.keys()
        self.due = math.inf
        return [*self._since]

    def wait(self, stopped: Collection[int], now: float, begun: bool, then: str) -> tuple[str, bool]:
        """Nobody goes on without these: a line, if one is to be said now, and whether their time is over, at which
        something happens `then`; else they are waited for. `begun`: the first step is made.
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
            return f"{what}, and nobody else has the state of the training: waiting", False
        soon = "" if over else f", unless it goes on within {OVER - NAMED:.0f} s"
        return f"{what}: {then}{soon}", over


def all_ended(seats: Mapping[int, WorkerSlot]) -> bool:
    """Whether all whom the run depends on have, of which there is one at least."""
    counting = (seat.said.status for seat in seats.values() if not seat.newcomer and not seat.out)
    first = next(counting, None)  # a living one says no, without a look at all the others
    return first is not None and all(status is not None for status in counting)


def any_ended_well(seats: Mapping[int, WorkerSlot]) -> bool:
    return any(seat.said.status == 0 for seat in seats.values() if not seat.newcomer and not seat.out)
