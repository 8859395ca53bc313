"""Tickets: every interleaving of small teams, larger ones at random, through losses, arrivals and lost words.

Whatever happens, each ticket is applied once, nobody reads too far ahead of the slowest, and somebody can go on.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import strategies as st

from examples import examples
from paceline.param_server.ssp_clock import Push, SspScheduler


class World:
    """Workers that take tickets and push them, over a line on which any word may be late, or said twice."""

    def __init__(self, workers: int, bound: float, window: int, updates: int, faults: int) -> None:
        self.tickets, self.window, self.updates, self.faults = SspScheduler(bound), window, updates, faults
        self.has: dict[int, int] = {}  # by worker: what it computes
        self.late: tuple[tuple[int, int], ...] = ()  # pushes that come again
        self.other = SspScheduler(bound)  # of a server that follows
        self.applied: Counter[int] = Counter()
        self.next = workers
        for worker in range(workers):
            self.tickets.join(worker)
        self.tickets.advance(min(window, updates))

    def twin(self) -> World:
        """Copying by hand takes a tenth of the time."""
        made = object.__new__(World)
        vars(made).update(vars(self))
        made.tickets, made.other = copied(self.tickets), copied(self.other)
        made.has, made.applied = self.has.copy(), self.applied.copy()
        return made

    @property
    def over(self) -> bool:
        return self.tickets.applied == self.updates

    def actions(self) -> Iterator[tuple[Any, ...]]:
        alive = sorted(self.tickets.clocks)
        for worker in alive:
            if worker in self.has:
                yield "push", worker
            elif self.tickets.may_read(worker) and len(self.tickets.open) < self.tickets.end - self.tickets.applied:
                yield "deal", worker  # whatever is neither done nor open is dealt
        if self.tickets.ended and not self.over:
            yield ("turn",)
        for number in range(len(self.late)):
            yield "again", number
        if self.faults:
            if len(alive) > 1:
                yield from (("lose", worker) for worker in alive)
            yield ("join",)
            yield from (("twice", worker) for worker in alive if worker in self.has)
            yield ("stop",)
            yield ("over",)

    def act(self, what: str, worker: int = -1) -> None:
        tickets = self.tickets
        if what in ("lose", "join", "twice", "stop", "over"):
            self.faults -= 1
        if what == "deal":
            ahead = tickets.clocks[worker] - min(tickets.clocks.values())
            ticket = tickets.deal(worker)
            assert ticket is not None
            assert ahead <= tickets.bound
            assert tickets.deal(worker) == ticket  # it asks again
            assert ticket not in self.has.values()
            self.has[worker] = ticket
        elif what == "push":
            self.push(worker, self.has.pop(worker))
        elif what == "twice":  # it comes at once, and again at some time
            ticket = self.has.pop(worker)
            self.push(worker, ticket)
            self.late += ((worker, ticket),)
        elif what == "again":
            late = self.late[worker]
            self.late = self.late[:worker] + self.late[worker + 1 :]
            assert tickets.push(*late) is not Push.APPLY
        elif what == "lose":
            tickets.lose(worker)
            if worker in self.has:  # what it sent may still come
                self.late += ((worker, self.has.pop(worker)),)
        elif what == "join":
            tickets.join(self.next)
            assert tickets.clocks[self.next] == min(tickets.clocks.values())
            self.next += 1
        elif what == "stop":
            tickets.stop()
            assert tickets.end == tickets.applied + len(tickets.open) + len(tickets.back)
        elif what == "over":
            self.take_over()
        else:
            tickets.advance(min(self.window, self.updates - tickets.applied))

    def take_over(self) -> None:
        """Who deals is lost, and another one does. What it had dealt has other numbers, and is not heard."""
        alive, before, self.tickets = self.tickets.clocks, self.tickets, self.other
        self.tickets.take_over(alive)
        if before.start > self.tickets.start:  # for workers the next window has begun
            self.tickets.cut(before.start)
            self.tickets.advance(min(self.window, self.updates - before.start))
        for worker in alive:
            if worker not in self.tickets.clocks:
                self.tickets.join(worker)
        self.late, self.has, self.other = (), {}, copied(self.tickets)

    def push(self, worker: int, ticket: int) -> None:
        assert self.tickets.push(worker, ticket) is Push.APPLY
        self.other.follow((self.tickets.start, self.tickets.end), ticket, worker, self.tickets.clocks[worker])
        self.applied[ticket] += 1
        assert self.applied[ticket] == 1

    def check(self) -> None:
        tickets = self.tickets
        assert len(tickets.open) == len(self.has)
        assert tickets.applied == self.applied.total()
        if self.over:
            assert self.applied == Counter(range(self.updates))
        else:  # somebody can go on, without any fault
            assert any(what in ("push", "deal", "turn") for what, *_ in self.actions())

    def frozen(self) -> tuple[Any, ...]:
        tickets, least = self.tickets, min(self.tickets.clocks.values(), default=0)
        clocks = tuple(sorted((worker, clock - least) for worker, clock in tickets.clocks.items()))
        has = tuple(sorted(self.has.items()))
        dealt = tickets.start, tickets.next, tickets.end, self.other.start, self.other.end, tuple(self.other.clocks)
        return clocks, has, tuple(sorted(tickets.done)), dealt, self.late, self.faults, self.next


def copied(tickets: SspScheduler) -> SspScheduler:
    made = object.__new__(type(tickets))
    vars(made).update({name: v.copy() if hasattr(v, "copy") else v for name, v in vars(tickets).items()})
    return made


def explored(first: World) -> Iterator[World]:
    """Every world that actions lead to, each once, as it is right."""
    seen, rest = {first.frozen()}, [first]
    while rest:
        world = rest.pop()
        world.check()
        yield world
        for action in world.actions():
            after = world.twin()
            after.act(*action)
            if (state := after.frozen()) not in seen:
                seen.add(state)
                rest.append(after)


@pytest.mark.parametrize(
    ("workers", "bound", "window", "updates", "faults"),
    [
        *((2, 0, 2, 3, 2), (2, 1, 2, 3, 2), (3, 0, 2, 4, 1), (2, math.inf, 2, 3, 2)),
        *(
            pytest.param(*numbers, marks=pytest.mark.slow)
            for numbers in ((2, 0, 2, 4, 2), (2, 1, 3, 4, 2), (2, 1, 3, 5, 2), (2, math.inf, 2, 4, 2), (3, 1, 4, 4, 2))
        ),
    ],
)
def test_async_tickets_through_every_interleaving_of_a_small_team(
    workers: int, bound: float, window: int, updates: int, faults: int
) -> None:
    worlds = [*explored(World(workers, bound, window, updates, faults))]
    assert any(world.over for world in worlds)
    assert len(worlds) > 100


class Careless(SspScheduler):
    """Hears those that are lost."""

    def lose(self, worker: int) -> None:
        self.clocks.pop(worker, None)


class Hasty(SspScheduler):
    """Lets everybody read."""

    def may_read(self, worker: int) -> bool:
        return worker in self.clocks


@pytest.mark.parametrize("wrong", [Careless, Hasty])
def test_async_ticket_model_finds_wrong_schedulers(wrong: type[SspScheduler]) -> None:
    first = World(2, 0, 3, 3, 1)
    first.tickets.__class__ = wrong
    with pytest.raises((AssertionError, KeyError)):
        for _ in explored(first):
            pass


@examples(
    st.integers(1, 6),
    st.sampled_from([0, 1, 4, math.inf]),
    st.integers(1, 20),
    st.integers(0, 8),
    st.lists(st.integers(0, 1 << 16), min_size=50, max_size=400),
    fast=25,
    slow=60,
)
def test_async_tickets_through_random_interleavings_of_larger_teams(
    workers: int, bound: float, window: int, faults: int, choices: list[int]
) -> None:
    world = World(workers, bound, window, 60, faults)
    for choice in choices:
        actions = [*world.actions()]
        if not actions:
            break
        world.act(*actions[choice % len(actions)])
        world.check()
    while not world.over:
        world.act(*next(action for action in world.actions() if action[0] in ("push", "deal", "turn")))
    world.check()


def test_lost_slowest_worker_releases_the_staleness_bound() -> None:
    tickets = SspScheduler(1, end=20)
    for worker in (0, 1):
        tickets.join(worker)
    assert tickets.deal(1) == 0  # and it is not heard of again
    for ticket in (1, 2):
        assert tickets.deal(0) == ticket
        assert tickets.push(0, ticket) is Push.APPLY
    assert tickets.deal(0) is None
    tickets.lose(1)
    assert tickets.deal(0) == 0  # what was its
    assert tickets.push(1, 0) is Push.VOID


def test_async_window_ends_where_rows_end() -> None:
    tickets = SspScheduler(math.inf, end=9)
    for worker in (0, 1, 2):
        tickets.join(worker)
    assert [tickets.deal(worker) for worker in (0, 1, 2)] == [0, 1, 2]
    tickets.cut(1)  # worker 1 has found no rows for its own
    assert [tickets.deal(worker) for worker in (0, 1, 2)] == [0, None, None]
    assert tickets.push(2, 2) is Push.VOID
    assert tickets.push(0, 0) is Push.APPLY
    assert tickets.ended


def test_missed_updates_of_a_ticket_are_counted() -> None:
    tickets = SspScheduler(math.inf, end=3)
    for worker in (0, 1):
        tickets.join(worker)
    slow, fast = tickets.deal(0), tickets.deal(1)
    assert (slow, fast) == (0, 1)
    assert tickets.missed(1) == 0
    assert tickets.push(1, 1) is Push.APPLY
    assert tickets.deal(1) == 2
    assert tickets.missed(2) == 0
    assert tickets.push(1, 2) is Push.APPLY
    assert tickets.missed(0) == 2
    assert tickets.push(0, 0) is Push.APPLY
    assert tickets.ended


def test_unfinished_async_window_cannot_advance() -> None:
    tickets = SspScheduler(0, end=2)
    with pytest.raises(RuntimeError, match="tickets of the previous window that are not applied: 2"):
        tickets.advance(2)
