"""Assigns work items to workers: stale-synchronous (SSP) scheduling and the choice of backup workers.

A *ticket* is one global batch, computed by one worker, whose push is one update. Tickets of a *window* are dealt until
they are out; it ends when all are applied, each once, whoever is lost. A worker's clock *ticks* with each of its
tickets; it reads weights when it is dealt one, and then it is at most `bound` ticks ahead of the slowest that lives
(stale synchronous parallel: Ho et al., "More Effective Distributed ML via a Stale Synchronous Parallel Parameter
Server", NIPS 2013). No torch, no clock, no sockets.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from enum import Enum
from heapq import heappop, heappush


class Push(Enum):
    """What becomes of a push: it is to be applied, or was before, or comes from who is not heard any more."""

    APPLY = "apply"
    AGAIN = "again"
    VOID = "void"


@dataclass
class SspScheduler:
    """Of the updates from `start` to `end`: the window. `bound` may be infinite. `clocks` are of who lives, `open`
    the tickets that are dealt and not applied, with who has them and how many updates were `applied` when it read the
    weights; none from `next` on has been dealt, and those `back` have been lost. `missed` counts updates by how many
    others came between their reading and their being applied.
    """

    bound: float
    start: int = 0
    end: int = 0
    next: int = 0
    clocks: dict[int, int] = field(default_factory=dict)
    open: dict[int, tuple[int, int]] = field(default_factory=dict)
    back: list[int] = field(default_factory=list)  # a heap
    done: set[int] = field(default_factory=set)  # of the window
    missed: Counter[int] = field(default_factory=Counter)
    by: Counter[int] = field(default_factory=Counter)  # updates of each worker

    @property
    def applied(self) -> int:
        """Updates in all."""
        return self.start + len(self.done)

    @property
    def ended(self) -> bool:
        """Whether all tickets of the window are applied."""
        return self.applied == self.end

    def advance(self, updates: int) -> None:
        """The next window, of so many updates."""
        if not self.ended:
            raise RuntimeError(f"{self.end - self.applied} tickets of the window before are not applied")
        self.start = self.next = self.end
        self.end += updates
        self.done.clear()

    def stop(self) -> None:
        """No more are dealt than were: the window ends with them."""
        self.cut(self.next)

    def cut(self, end: int) -> None:
        """There is no ticket from `end` on, where as yet none is done."""
        self.end, self.next = min(self.end, end), min(self.next, end)
        self.open = {ticket: who for ticket, who in self.open.items() if ticket < end}
        self.back = [ticket for ticket in self.back if ticket < end]

    def join(self, worker: int) -> None:
        """One who comes starts at the slowest's clock."""
        self.clocks[worker] = min(self.clocks.values(), default=0)

    def lose(self, worker: int) -> None:
        """One who is lost leaves the clock at once, and its tickets are dealt again."""
        self.clocks.pop(worker, None)
        for ticket in [ticket for ticket, (who, _) in self.open.items() if who == worker]:
            del self.open[ticket]
            heappush(self.back, ticket)

    def may_read(self, worker: int) -> bool:
        """Whether it is not too far ahead of the slowest."""
        return worker in self.clocks and self.clocks[worker] - min(self.clocks.values()) <= self.bound

    def follow(self, window: tuple[int, int], ticket: int, worker: int, clock: int, missed: int) -> None:
        """Who deals had a result applied: of its window from start to end; and the worker's clock since then."""
        if self.start != window[0]:
            self.done.clear()
        self.start, self.end = window
        self.done.add(ticket)
        self.clocks[worker] = clock
        self.missed[missed] += 1
        self.by[worker] += 1

    def take_over(self, workers: Collection[int]) -> None:
        """Starts to assign tickets to these workers, after following another server: open ones are assigned again."""
        self.open.clear()
        self.next = max(self.done, default=self.start - 1) + 1
        self.back = sorted({*range(self.start, self.next)} - self.done)
        self.clocks = {worker: clock for worker, clock in self.clocks.items() if worker in workers}

    def deal(self, worker: int, read: int | None = None) -> int | None:
        """Assigns the worker's next ticket, with which it reads the weights after `read` updates (default: all).

        A worker that has a ticket gets the same one again: the reply may have been lost. None: the worker has to wait,
        or there is no ticket left.
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
        """A worker's result; to be applied before anything else happens."""
        if ticket < self.start or ticket in self.done:
            return Push.AGAIN
        who, read = self.open.get(ticket, (None, 0))
        if who != worker:
            return Push.VOID
        del self.open[ticket]
        self.missed[self.applied - read] += 1
        self.done.add(ticket)
        self.clocks[worker] += 1
        self.by[worker] += 1
        return Push.APPLY


@dataclass
class BackupScheduler(SspScheduler):
    """In step, with `backup` workers that are not waited for (Chen et al., "Revisiting Distributed Synchronous SGD",
    2016). A global batch is cut into a share for each of the `members` of its round, all who live when it begins; of
    those in which anything counts all but `backup` make the update, the first that `came`, or all who are not lost.
    """

    backup: int = 0
    members: tuple[int, ...] = ()
    came: list[int] = field(default_factory=list)
    idle: set[int] = field(default_factory=set)  # in whose shares nothing counts

    @property
    def chosen(self) -> list[int]:
        """The workers whose shares make this round's update, in the order of their shares; empty while it waits."""
        busy = [worker for worker in self.members if worker not in self.idle]
        available = [worker for worker in busy if worker in self.clocks or worker in self.came]
        need = max(1, min(len(busy) - self.backup, len(available)))
        return sorted(self.came[:need]) if len(self.came) >= need else []

    def deal(self, worker: int, read: int | None = None) -> int | None:
        """The round in which it has a share to compute; None: it has to wait, or there is none."""
        if self.ended or worker in self.came or worker in self.idle or worker not in self.clocks:
            return None
        if not self.members:
            self.members, self.next = tuple(sorted(self.clocks)), self.applied + 1
        return self.applied if worker in self.members else None

    def arrive(self, worker: int, counts: bool) -> None:
        """Its share of this round is there, in which something counts or nothing does."""
        (self.came.append if counts else self.idle.add)(worker)
        self._look()

    def _look(self) -> None:
        """Where nobody is left who has a share to compute, the round begins anew."""
        if not self.came and not any(one in self.clocks for one in {*self.members} - self.idle):
            self._close()

    def settle(self, workers: Iterable[int]) -> None:
        """These have made the update."""
        self.done.add(self.applied)
        self.missed[0] += 1
        for worker in workers:
            self.by[worker] += 1
        self._close()

    def _close(self) -> None:
        self.members, self.next = (), self.applied
        self.came.clear()
        self.idle.clear()

    def cut(self, end: int) -> None:
        super().cut(end)
        if self.ended:
            self._close()

    def lose(self, worker: int) -> None:
        super().lose(worker)
        self._look()

    def keep_up(self, window: tuple[int, int], workers: Iterable[int]) -> None:
        """Who deals had the next update made: of its window from start to end."""
        if self.start != window[0]:
            self.done.clear()
        self.start, self.end = window
        self.settle(workers)

    def take_over(self, workers: Collection[int]) -> None:
        """Starts to assign shares to these workers, after following another server: the round begins anew."""
        self._close()
        self.clocks = dict.fromkeys(workers, 0)
