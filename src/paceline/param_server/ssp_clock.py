"""Assigns global batches to workers with bounded staleness: stale-synchronous parallel (SSP) scheduling.

A *ticket* is one global batch, computed by one worker, whose push is one update. The scheduler assigns the tickets of a
*window*, which ends when each of them has been applied once, whichever workers are lost. A worker's clock *ticks* with
each of its tickets. A worker reads weights when it gets a ticket, and is then at most `bound` ticks ahead of the
slowest living worker (Ho et al., "More Effective Distributed ML via a Stale Synchronous Parallel Parameter Server",
NIPS 2013). No torch, no clock, no sockets.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from enum import Enum
from heapq import heappop, heappush


class Push(Enum):
    """What the scheduler decides about a push: apply it, it was applied before, or its worker has lost the ticket."""

    APPLY = "apply"
    AGAIN = "again"
    VOID = "void"


@dataclass
class SspScheduler:
    """Schedules the updates from `start` to `end`, which are the window.

    No ticket from `next` on has been assigned.
    """

    bound: float  # maybe infinite
    start: int = 0
    end: int = 0
    next: int = 0
    clocks: dict[int, int] = field(default_factory=dict)  # of the living workers
    # Tickets that are assigned and not applied: the worker, and the number of updates in the weights it reads.
    open: dict[int, tuple[int, int]] = field(default_factory=dict)
    back: list[int] = field(default_factory=list)  # a heap of tickets that lost workers had
    done: set[int] = field(default_factory=set)  # tickets of the window that are applied

    @property
    def applied(self) -> int:
        """The number of updates in all."""
        return self.start + len(self.done)

    @property
    def ended(self) -> bool:
        """Whether all tickets of the window are applied."""
        return self.applied == self.end

    def advance(self, updates: int) -> None:
        """Begins the next window, of this number of updates."""
        if not self.ended:
            raise RuntimeError(f"tickets of the previous window that are not applied: {self.end - self.applied}")
        self.start = self.next = self.end
        self.end += updates
        self.done.clear()

    def stop(self) -> None:
        """Ends the window with the tickets that have been assigned."""
        self.cut(self.next)

    def cut(self, end: int) -> None:
        """Ends the window before ticket `end`. No ticket from there on is applied yet."""
        self.end, self.next = min(self.end, end), min(self.next, end)
        self.open = {ticket: who for ticket, who in self.open.items() if ticket < end}
        self.back = [ticket for ticket in self.back if ticket < end]

    def join(self, worker: int) -> None:
        """Adds a worker, with the clock of the slowest one."""
        self.clocks.setdefault(worker, min(self.clocks.values(), default=0))

    def lose(self, worker: int) -> None:
        """Removes a worker: no worker waits for its clock any more, and its tickets are assigned again."""
        self.clocks.pop(worker, None)
        for ticket in [ticket for ticket, (who, _) in self.open.items() if who == worker]:
            del self.open[ticket]
            heappush(self.back, ticket)

    def may_read(self, worker: int) -> bool:
        """Whether a worker is not too far ahead of the slowest one."""
        return worker in self.clocks and self.clocks[worker] - min(self.clocks.values()) <= self.bound

    def follow(self, window: tuple[int, int], ticket: int, worker: int, clock: int) -> None:
        """Follows an update of the leading server: its window, and the worker's clock after the update."""
        if self.start != window[0]:
            self.done.clear()
        self.start, self.end = window
        self.done.add(ticket)
        self.clocks[worker] = clock

    def take_over(self, workers: Collection[int]) -> None:
        """Starts to assign tickets to these workers, after following another server: open ones are assigned again."""
        self.open.clear()
        self.next = max(self.done, default=self.start - 1) + 1
        self.back = sorted({*range(self.start, self.next)} - self.done)
        self.clocks = {worker: clock for worker, clock in self.clocks.items() if worker in workers}

    def awaits(self, worker: int, ticket: int) -> bool:
        """Whether a worker has this ticket, and its push is not applied yet."""
        return ticket in self.open and self.open[ticket][0] == worker

    def missed(self, ticket: int) -> int:
        """How many updates were applied since the worker of an open ticket read its weights."""
        return self.applied - self.open[ticket][1]

    def deal(self, worker: int, read: int | None = None) -> int | None:
        """Assigns the worker's next ticket, with which it reads the weights after `read` updates (default: all).

        A worker that has a ticket gets the same one again, as the reply may have been lost. Returns None if the worker
        has to wait or no ticket is left.
        """
        open_ticket = next((ticket for ticket, (who, _) in self.open.items() if who == worker), None)
        if open_ticket is not None or not self.may_read(worker) or not (self.back or self.next < self.end):
            return open_ticket
        if self.back:
            ticket = heappop(self.back)
        else:
            ticket, self.next = self.next, self.next + 1
        self.open[ticket] = worker, self.applied if read is None else read
        return ticket

    def push(self, worker: int, ticket: int) -> Push:
        """Decides about a worker's push, which has to be applied before anything else happens."""
        if ticket < self.start or ticket in self.done:
            return Push.AGAIN
        if not self.awaits(worker, ticket):
            return Push.VOID
        del self.open[ticket]
        self.done.add(ticket)
        self.clocks[worker] += 1
        return Push.APPLY
