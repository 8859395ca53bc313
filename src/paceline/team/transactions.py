"""Runs what the team does together, whole or not at all, through losses and joins.

An optimizer step is one, a checkpoint or an evaluation another. When a generation forms, its members tell each other
where they stand, and `step.resolve` says what each has to do: nothing, to end what it attempts with the sums that it
holds, to take the state of another over, or to attempt it again.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Generator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Never, Protocol

import torch

from paceline.base.batching import Moment, StateLostError, Status, Transaction, resolve, route_transfers
from paceline.base.console import say
from paceline.base.environment import World
from paceline.base.heartbeat import HEARTBEAT
from paceline.base.time_accounting import Account
from paceline.checkpoint.tree import flatten, pack, raw, unflatten, unpack
from paceline.comm.communicator import Group
from paceline.errors import PeerLostError, UsageError
from paceline.team.agent_commands import AgentCommands, Coming, Generation
from paceline.team.auth import handshake_key
from paceline.team.fault_injection import FaultInjector
from paceline.team.live_migration import Learner, Migration, StateReceiver, digests

LARGE = 1 << 16  # bytes of a tensor that is handed over by itself
PAUSE = 0.05  # seconds between two looks
REFUSED = 76  # exit code of a worker that the team has left behind: it may come back as new


class ReformedError(PeerLostError):
    """The team has a new generation; what was under way is void."""


class LeftError(Exception):
    """This worker has left the team, as it was told."""


# One attempt at something that all workers do together, written from top to bottom:
#
#     ...                     up to the last large collective; whoever is closed here brings back what was before
#     settled = yield settle  all has arrived here: `settle()` makes small plain values that all must have before
#                             anything changes, by collectives; what it returns anywhere is sent to all
#     ...                     changes the state of this worker, without collectives
#     yield result            it counts: a tree of plain values and tensors
#     ...                     what is left to do, by collectives; `StateOwner.complete` does it where they fail
Attempt = Generator[Any, Any, None]
Taken = Callable[[Any, Any], Any]


def settling(compute: Callable[[], Any], apply: Callable[[Any], Any] | None = None) -> Callable[[], Attempt]:
    """Attempts at what has no state of its own: `compute` uses collectives, and what it returns is all there is."""

    def attempt() -> Attempt:
        settled = yield compute
        yield settled if apply is None else apply(settled)

    return attempt


class StateOwner(Learner, Protocol):
    """Who has the state of the training."""

    @property
    def step(self) -> int:
        """Optimizer steps done."""

    def hand_over(self) -> Any:
        """All of it, as a tree of plain values and tensors."""

    def take_over(self, tree: Any, newcomer: bool) -> None:
        """What another worker handed over; one that is no newcomer has its own place in the script."""

    def complete(self) -> None:
        """What a step that counts may have left to do. All workers of a replica do it; collective among them."""

    def changing(self) -> int:
        """Bytes of the sums of a step."""

    def gives(self, worker: int, size: int, whole: int, seconds: float | None) -> None:
        """A worker is about to be given so many bytes of the whole state; how long that takes, where it is known."""

    def formed(self, generation: Generation, seconds: float) -> None:
        """A generation has formed, in so many seconds: memory and shares are to be dealt again. Collective."""


class Operations:
    """Does one thing after another in the present generation, and forms the next ones.

    `number` is that of the generation. A `waiting` worker is a newcomer: a world of one until it is admitted.
    """

    def __init__(self, world: World, group: Group) -> None:
        self.world, self.worker = world, world.rank
        self._group = group
        self.number = 0
        self.members: tuple[int, ...] = tuple(range(world.size))
        self.waiting = world.newcomer
        self.account = Account()
        self._detection = 0.0  # seconds for which the last loss was not known
        self.hold = False  # too few are here: no further step is to be made
        self.holder: StateOwner | None = None
        self.refusal: UsageError | None = None  # why this process does nothing with the team, if it does not
        self._tx = Transaction(moment=Moment.EMPTY if world.newcomer else Moment.IDLE)
        self._last: Any = None  # what was settled last, and the result
        self._told = False
        self._chaos = (
            FaultInjector(world.chaos, world.rank, Path(world.run_dir or ".")) if world.chaos.strip(", ") else None
        )
        self._entering = threading.Lock()
        self.migration = Migration(self.worker, self._key)
        self.ahead = True  # the sums of steps, which newcomers are sent, are known here
        self._followed = False  # much of the state came ahead
        self.orders = AgentCommands(world.orders_fd, self._heard, self._comes)

    def _key(self, salt: str) -> bytes:
        """What both ends of a connection have, over which the state goes."""
        return handshake_key(self.world.run_dir, salt)

    @property
    def elastic(self) -> bool:
        """Whether losses can be survived: there is an agent, and a state to hand over."""
        return self.world.orders_fd is not None and self.holder is not None

    @property
    def done(self) -> int:
        """Transactions that count so far: the same number on all members."""
        return self._tx.done

    @property
    def newcomers(self) -> bool:
        """Whether a generation waits for the end of a step."""
        return self.orders.newer(self.number)

    @property
    def interrupted(self) -> bool:
        """Whether a generation is to be entered at once: every collective fails until it is."""
        return self.orders.newer(self.number, at_once=True)

    @property
    def merge(self) -> list[int] | None:
        """The islands that are in the merge of the present turn, once that is decided; none where it is void."""
        told = self.orders.merge
        present = (told.get("turn"), told.get("number")) == (self.done, self.number)
        return list(told["islands"]) if present else None

    def await_merge(self, ends: Callable[[], bool]) -> None:
        """Waits until that is decided, or it `ends` otherwise. PeerLostError: another generation forms."""
        self.orders.hear(lambda: self.interrupted or self.merge is not None or ends())
        if self.interrupted:
            raise ReformedError("another generation forms", "wait")

    def reached(self, moment: str) -> None:
        """A moment at which a rehearsal may let something happen."""
        HEARTBEAT.beat()
        if self._chaos is not None and self.holder is not None:
            self._chaos.reached(moment, self.holder.step, len(self.members))

    def _heard(self, order: Generation) -> None:
        with self._entering:
            if order.number > self.number:  # else it is under way, or done
                self._group.interrupt(ReformedError(f"generation {order.number} forms", "wait"))

    def _comes(self, coming: Coming) -> None:
        if self._group.rank == 0 and not self.waiting:
            self.migration.meet(coming)

    def turn(self) -> None:
        """Between two steps: the state goes ahead to newcomers on other hosts; and where we are to wait, we do."""
        if self.orders.coming:
            self._comes(self.orders.coming)
        if self.holder is not None:
            self.migration.turn(self.holder.hand_over, self.holder.changing)
        if self.orders.wait_here:
            with self.account.of("paused"), HEARTBEAT.waiting():
                while self.orders.wait_here and not self.orders.newer(self.number):
                    time.sleep(PAUSE)

    # -- one thing ----------------------------------------------------------------------------------------------

    def run(self, make: Callable[[], Attempt], spends: str = "script", taken: Taken | None = None) -> Any:
        """Makes attempts at one thing, through as many generations as it takes; returns its result.

        Its time is on the account `spends`. Where this worker took another's state over with the result, `taken` gets
        what was settled and the result; without it, the former is applied here, too. UsageError: a newcomer has not
        been admitted yet.
        """
        if self.refusal is not None:
            raise self.refusal
        if not self._told and self.elastic:
            self._told = True
            self.hold |= self.world.hold
            self.world.tell("ready", replica=self._group.mesh.replica)
        if self.waiting:
            raise UsageError(
                f"worker {self.worker} has come back, and cannot take part in what the team did before it trained",
                "let the script's first collectives be those of its Trainer, whose results are kept for newcomers",
            )
        if self._tx.moment is not Moment.IDLE:  # called in the midst of another one, of which it is a part
            attempt = make()
            return attempt.send(next(attempt)())
        with self.account.of(spends):
            while True:
                began = time.perf_counter()
                self._tx.begin(self.number)
                attempt = make()
                try:
                    settle = next(attempt)
                    self._tx.prepared()
                    result = self._end(attempt, settle())
                    break
                except PeerLostError as error:
                    if not self.elastic:
                        raise
                    tried = time.perf_counter() - began
                    ended = self._form(error, attempt)
                    self._charge(tried, ended)
                    if ended:
                        return self._take_result(make, taken) if self._took else self._last[1]
                finally:
                    if self._tx.moment in (Moment.COMPUTING, Moment.PREPARED):
                        self._void(attempt)
            HEARTBEAT.beat()
            try:
                next(attempt, None)
            except PeerLostError as error:
                if not self.elastic:
                    raise
                self._form(error, None)
            return result

    def _take_result(self, make: Callable[[], Attempt], taken: Taken | None) -> Any:
        """This worker's own part was lost; what was done was not."""
        settled, result = self._last
        if taken is not None:
            return taken(settled, result)
        attempt = make()
        next(attempt)
        return attempt.send(settled)

    def _charge(self, tried: float, ended: bool) -> None:
        """An attempt of so many seconds that a loss has interrupted: for as long as it was not known, nobody worked."""
        unknown = min(tried, self._detection)
        self.account.move(unknown, "detection")
        if not ended:
            self.account.move(tried - unknown, "redone")

    def _end(self, attempt: Attempt, settled: Any) -> Any:
        self._tx.updating()
        self._last = [settled, attempt.send(settled)]
        self._tx.applied()
        return self._last[1]

    def _void(self, attempt: Attempt | None) -> None:
        self._tx.abort()
        if attempt is not None:
            attempt.close()

    # -- a new generation ---------------------------------------------------------------------------------------

    def enter_next(self) -> None:
        """Between two steps: enters the generation that was planned, or a later one."""
        self._form(None, None)

    def admit(self) -> None:
        """A newcomer's first need of the team: waits until it belongs to it, and has its state."""
        assert self.holder is not None
        assert self.world.store is not None
        if self._group.mesh.replica > 1 or not self.ahead:  # which rows it is to have is not known before
            self.world.tell("waiting", replica=self._group.mesh.replica)
        else:
            taker = StateReceiver(self.world.store[0], self._key)
            self.world.tell("waiting", at=taker.at)
            with HEARTBEAT.waiting():
                self._followed = taker.follow(self.holder, self._first, partial(self.world.tell, "current"))
        self._form(None, None)
        self.waiting = False

    def _first(self) -> int | None:
        """The first worker of the generation that this one is to enter, once there is one."""
        order = self.orders.newest
        return order.members[0] if order is not None and self.worker in order.members else None

    def _form(self, error: PeerLostError | None, attempt: Attempt | None) -> bool:
        """Enters the newest generation. Whether what was attempted has ended meanwhile."""
        with self.account.of("forming"):
            return self._enter(error, attempt)

    def _enter(self, error: PeerLostError | None, attempt: Attempt | None) -> bool:
        began = time.monotonic()
        self._took = False
        done = self._tx.done
        self._stood = done, None if attempt is None else self._tx.generation
        if attempt is not None and self._tx.moment is not Moment.PREPARED:
            self._void(attempt)
        while True:
            lost = error is not None and not self.waiting
            alone = partial(self.world.tell, "alone", number=self.number) if lost else None
            with self.account.of("paused" if self.hold else "forming"):
                order = self.orders.wait(self.number, lost, alone)
            slept = order.at_once > self.number
            with self._entering:
                self.number = order.number
            if self.worker not in order.members:
                self._refused(slept)
                continue
            self.migration.enter(order.members)
            try:
                self._group.form(order.world(self.world, self.worker), lambda: self.orders.newer(self.number, True))
                self._resolve(attempt if self._tx.done == done else None)
                self.members, self.hold, self._detection = order.members, order.hold, order.detection
                if self._chaos is not None:
                    self._chaos.formed()
                if self.holder is not None:
                    self.holder.formed(order, time.monotonic() - began)
                break
            except PeerLostError as again:
                error = again
        self.world.tell("formed", number=self.number, seconds=time.monotonic() - began)
        return attempt is not None and self._tx.done > done

    def _refused(self, slept: bool) -> None:
        """This worker is not of the new generation: it asked to leave, or was taken for dead. A newcomer waits on."""
        if not slept and not self.waiting:
            raise LeftError
        if not self.waiting:
            self._come_back_as_new("slept through a change of the team")

    def _is_left_behind(self, done: int, applied_in: int) -> bool:
        """Whether the team has done more than what this worker attempted, or did that without it."""
        before, generation = self._stood
        return done > before + 1 or (done > before and applied_in != generation)

    def _come_back_as_new(self, why: str) -> Never:
        """In its script this worker is not where the others are."""
        say(f"paceline: worker {self.worker} {why}, and ends")
        os._exit(REFUSED)

    def _resolve(self, attempt: Attempt | None) -> None:
        group, tx = self._group, self._tx
        group.enter(f"the beginning of generation {self.number}", kind="forming")
        self.reached("forming")
        status = tx.status
        said = group.gather_json([status.done, status.applied, status.sums])
        team = [[Status(*said[rank]) for rank in replica] for replica in group.mesh.replicas]
        try:
            found = resolve(team)
        except StateLostError:
            raise PeerLostError(
                "no worker is left that holds the state of the training", "run the same command again"
            ) from None
        replica, place = group.mesh.replica_of(group.rank), group.mesh.shard_index_of(group.rank)
        last: Any = None
        if found.forward or found.sources:
            first = next(rank for rank, row in enumerate(said) if row[0] == found.step)
            last = unpack(group.broadcast_bytes(pack(self._last) if group.rank == first else None, first))
        if (replica, place) in found.forward:
            assert attempt is not None
            self._end(attempt, last[0])
        elif attempt is not None:
            self._void(attempt)
        if self.holder is not None and replica not in found.sources:
            self.holder.complete()
        if found.sources:
            with self.account.of("hand-over"):
                self._hand_over(found.sources, last)

    def _hand_over(self, sources: Mapping[int, int], last: Any) -> None:
        """Between twins, from the replicas that have the state to those that are to take it over."""
        group, tx, holder = self._group, self._tx, self.holder
        assert holder is not None
        replica, twins = group.mesh.replica_of(group.rank), group.mesh.twins(group.rank)
        if replica in sources or replica in sources.values():
            self.reached("hand-over")
        tree: Any = None
        hosts = group.hosts
        for taker, source in route_transfers(sources, [hosts[twin] for twin in twins]).items():
            taker, source = twins[taker], twins[source]
            if group.rank == source:
                tree = tree or [tx.done, tx.applied_in, holder.hand_over()]
                self._give(tree, taker)
            elif group.rank == taker:
                newcomer = self.waiting
                tx.empty()
                self.migration.drop()
                tree = self._take(holder, source)
                done, applied_in, state = tree
                if not newcomer and self._is_left_behind(done, applied_in):
                    self._come_back_as_new("was left behind by the team")
                holder.take_over(state, newcomer)
                tx.taken(done, applied_in)
                self._last, self._took, self._followed = last, True, False

    def _give(self, tree: Any, taker: int) -> None:
        """What differs from what it has: small tensors together, each large one by itself, without a copy."""
        tensors, skeleton = flatten(tree, "")
        has = unpack(self._group.receive_bytes(taker))
        same = digests(tensors, has)
        changed = {name: t for name, t in tensors.items() if name not in same or same[name] != has[name]}
        large = {name: t for name, t in changed.items() if t.nbytes >= LARGE}
        shapes = {name: [t.dtype, list(t.shape)] for name, t in large.items()}
        number, giver = self._group.names[taker], self.migration.givers.get(self._group.names[taker])
        size, whole = (sum(tensor.nbytes for tensor in some.values()) for some in (changed, tensors))
        if self.holder is not None:
            self.holder.gives(number, size, whole, size / giver.speed if giver and giver.speed else None)
        self._group.send_bytes(pack([skeleton, {n: t for n, t in changed.items() if n not in large}, shapes]), taker)
        for tensor in large.values():
            self._group.send(raw(tensor), taker)

    def _take(self, holder: StateOwner, source: int) -> Any:
        tensors: dict[str, torch.Tensor] = flatten([0, 0, holder.hand_over()], "")[0] if self._followed else {}
        self._group.send_bytes(pack(digests(tensors, tensors)), source)
        skeleton, small, shapes = unpack(self._group.receive_bytes(source))
        for name, (dtype, shape) in shapes.items():
            tensors[name] = torch.empty(shape, dtype=dtype)
            self._group.receive(raw(tensors[name]), source)
        return unflatten(skeleton, {**tensors, **small})
