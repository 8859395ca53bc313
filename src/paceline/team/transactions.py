"""Runs the team's transactions, each completely or not at all; hands the training state to newcomers.

An optimizer step, a checkpoint and an evaluation are transactions. When a generation forms, its members exchange their
progress, and `base.batching.resolve` decides what each member does: nothing, complete its attempt with the sums that it
has, take over the state of another member, or repeat the attempt.
"""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable, Collection, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal, Never

import torch

from paceline.base.batching import Moment, StateLostError, Status, Transaction, resolve, route_transfers
from paceline.base.console import say
from paceline.base.environment import World
from paceline.base.exit_codes import LEFT_BEHIND
from paceline.base.heartbeat import HEARTBEAT
from paceline.base.time_accounting import Account
from paceline.checkpoint.tree import flatten, pack, raw, unflatten, unpack
from paceline.comm.communicator import Group
from paceline.errors import PeerLostError, UsageError
from paceline.team.agent_commands import AgentCommands, Coming, Generation
from paceline.team.auth import handshake_key
from paceline.team.fault_injection import FaultInjector
from paceline.team.live_migration import Migration, StateReceiver, digests
from paceline.team.state_owner import StateOwner

LARGE = 1 << 16  # least bytes of a tensor that is handed over in its own message
PAUSE = 0.05  # seconds between two looks at the commands


class ReformedError(PeerLostError):
    """The team forms a new generation; the transaction under way is void."""


class LeftError(Exception):
    """This worker has left the team as it was asked to."""


class Attempt:
    """A transaction of all workers, attempted in one generation after another until it counts.

        for attempt in transactions.attempts():  # again after a lost peer
            with attempt:
                ...                              # up to the last large collective
                attempt.commit(settle, apply)
                ...                              # collectives that are left to do

    `commit` calls `settle`, which uses collectives to agree on small plain values that all workers need before anything
    changes, and then `apply` with these values, which changes the state of this worker without collectives and returns
    a tree of plain values and tensors. `undo` is called if an attempt ends before that. `result` is what `apply`
    returned. If this worker lost its part and took over another one's state, `taken` is (settled values, result). If a
    peer is lost after the commit, `StateOwner.complete` does what was left to do. `admits`: newcomers may enter before
    it is attempted again, because their scripts begin with it.
    """

    def __init__(
        self, transactions: Transactions, account: str, undo: Callable[[], None] | None, admits: bool = False
    ) -> None:
        self._transactions, self._account, self._undo, self.admits = transactions, account, undo, admits
        self._is_open = self._is_committed = self._ended = False
        self._began = 0.0
        self.apply: Callable[[Any], Any] | None = None
        self.result: Any = None
        self.taken: tuple[Any, Any] | None = None

    def __iter__(self) -> Attempt:
        return self

    def __next__(self) -> Attempt:
        if self._ended:
            raise StopIteration
        return self

    def __enter__(self) -> None:
        self._began = self._transactions.begin(self._account)
        self._is_open = True

    def commit(self, settle: Callable[[], Any] | None, apply: Callable[[Any], Any] | None = None) -> None:
        """Agrees on the last values and applies the transaction."""
        self.apply = apply
        self.result = self._transactions.commit(self, settle)
        self._is_committed = True

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: Any) -> bool:
        try:
            if error is None:
                self._ended = True
            elif isinstance(error, PeerLostError) and self._transactions.elastic:
                self._ended = self._transactions.recover(error, self, self._is_committed, self._began)
                return True
            return False
        finally:
            self._transactions.end(self)

    def finish(self, settled: Any) -> Any:
        """Applies the settled values: from here on the transaction cannot be undone."""
        self._is_open = False
        return settled if self.apply is None else self.apply(settled)

    def void(self) -> None:
        """Undoes what was attempted, unless that has been done or the transaction is being applied."""
        if self._is_open:
            self._is_open = False
            if self._undo is not None:
                self._undo()


class NestedAttempt(Attempt):
    """A transaction that is part of an outer transaction: it counts if the outer one counts."""

    def __enter__(self) -> None:
        pass

    def commit(self, settle: Callable[[], Any] | None, apply: Callable[[Any], Any] | None = None) -> None:
        """Agrees on the last values and applies them."""
        self.apply = apply
        self.result = self.finish(None if settle is None else settle())

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: Any) -> Literal[False]:
        self._ended = error is None
        return False


class Transactions:
    """Runs transactions in the present generation, and forms the next generations.

    `number` is the number of the generation. A `waiting` worker is a newcomer: a world of one until it is admitted.
    """

    def __init__(self, world: World, group: Group) -> None:
        self.world, self.worker = world, world.rank
        self._group = group
        self.number = 0
        self.members: tuple[int, ...] = tuple(range(world.size))
        self.waiting = world.newcomer
        self.account = Account()
        self._detection = 0.0  # seconds for which the last loss was not known
        self.hold = False  # there are too few workers to make another step
        self.state_owner: StateOwner | None = None
        self.refusal: UsageError | None = None  # why this process may not take part in the team
        self._tx = Transaction(moment=Moment.EMPTY if world.newcomer else Moment.IDLE)
        self._last: tuple[Any, Any] = None, None  # the last settled values, and the result
        self._took_over = False  # whether this worker took over another one's state since the last loss
        # When this worker began to enter a generation: its `done`, and the generation of its attempt, if it had one.
        self._stood_at: tuple[int, int | None] = 0, None
        self._is_announced = False  # whether the agent knows that this worker is ready
        faults = FaultInjector(world.chaos, world.rank, Path(world.run_dir or ".")) if world.chaos.strip(", ") else None
        self._faults = faults
        # Called at the moments of a step at which faults may be injected; None if there are none.
        self.fault_point: Callable[[str], None] | None = None if faults is None else self.reach
        self._entering = threading.Lock()
        self.migration = Migration(self.worker, self._key)
        self.ahead = True  # whether this worker has the sums of steps, which newcomers receive ahead
        self._followed = False  # whether much of the state came ahead
        self.commands = AgentCommands(world.commands_fd, self._on_urgent_generation, self._meet_newcomers)

    def _key(self, salt: str) -> bytes:
        """The key of a connection over which the state goes."""
        return handshake_key(self.world.run_dir, salt)

    @property
    def elastic(self) -> bool:
        """Whether the team can survive losses: there is an agent, and a state to hand over."""
        return self.world.commands_fd is not None and self.state_owner is not None

    @property
    def done(self) -> int:
        """The number of transactions that count so far, which is the same on all members."""
        return self._tx.done

    @property
    def newcomers(self) -> bool:
        """Whether a generation waits for the end of a step, such as one with newcomers."""
        return self.commands.has_newer(self.number)

    @property
    def interrupted(self) -> bool:
        """Whether this worker must enter a generation at once: every collective fails until it does."""
        return self.commands.has_newer(self.number, at_once=True)

    @property
    def merge(self) -> list[int] | None:
        """The islands in the merge of the present turn, once that is decided; an empty list if the merge is void."""
        decision = self.commands.merge
        present = (decision.get("turn"), decision.get("number")) == (self.done, self.number)
        return list(decision["islands"]) if present else None

    def await_merge(self, ends: Callable[[], bool]) -> None:
        """Waits until the merge is decided or `ends()` is true. PeerLostError: another generation forms."""
        self.commands.wait_until(lambda: self.interrupted or self.merge is not None or ends())
        if self.interrupted:
            raise ReformedError("another generation is forming", "wait")

    def inject_flips(self, flip: Callable[[str, random.Random, Callable[..., None]], None]) -> None:
        """Sets the function that flips bits on purpose, where faults are injected."""
        if self._faults is not None:
            self._faults.flip = flip

    def reach(self, moment: str) -> None:
        """Injects the fault that is due at a moment of a step, if there is one."""
        if self._faults is not None and self.state_owner is not None:
            self._faults.reached(moment, self.state_owner.step, len(self.members))

    def _on_urgent_generation(self, generation: Generation) -> None:
        with self._entering:
            if generation.number > self.number:  # else it is under way, or done
                self._group.interrupt(ReformedError(f"generation {generation.number} is forming", "wait"))

    def _meet_newcomers(self, coming: Coming) -> None:
        if self._group.rank == 0 and not self.waiting:
            self.migration.meet(coming)

    def between_steps(self) -> None:
        """Between two steps: sends the state ahead to newcomers on other hosts, and waits if the agent asks for it."""
        if self.commands.coming:
            self._meet_newcomers(self.commands.coming)
        if self.state_owner is not None:
            self.migration.begin_sending(self.state_owner.hand_over, self.state_owner.step_bytes)
        if self.commands.paused_by_agent:
            with self.account.of("paused"), HEARTBEAT.waiting():
                while self.commands.paused_by_agent and not self.commands.has_newer(self.number):
                    time.sleep(PAUSE)

    # -- one transaction ----------------------------------------------------------------------------------------

    def attempts(self, spends: str = "script", undo: Callable[[], None] | None = None, admits: bool = False) -> Attempt:
        """Begins a transaction whose time goes to the account `spends`, to be used as `Attempt` says. UsageError: a
        newcomer has not been admitted yet.
        """
        if self.refusal is not None:
            raise self.refusal
        if not self._is_announced and self.state_owner is not None:
            self._is_announced = True
            if self.elastic:
                self.hold |= self.world.hold
                self.world.tell("ready", replica=self._group.mesh.replica)
        if self.waiting:
            raise UsageError(
                f"worker {self.worker} has rejoined, and cannot join collectives that ran before training began",
                "make the Trainer's collectives the first ones in the script; their results are kept for new workers",
            )
        kind = Attempt if self._tx.moment is Moment.IDLE else NestedAttempt
        return kind(self, spends, undo, admits)

    def run(
        self,
        settle: Callable[[], Any],
        apply: Callable[[Any], Any] | None = None,
        spends: str = "script",
        take: Callable[[Any], Any] | None = None,
    ) -> Any:
        """Runs a transaction that computes nothing before it settles, and returns its result.

        If this worker took over another one's state together with the result, it applies the settled values, too; or it
        calls `take` with the result, if that is given.
        """
        for attempt in self.attempts(spends):
            with attempt:
                attempt.commit(settle, apply)
        if attempt.taken is None:
            return attempt.result
        settled, result = attempt.taken
        if take is not None:
            return take(result)
        return settled if apply is None else apply(settled)

    def begin(self, account: str) -> float:
        """Begins an attempt in the present generation. Returns the time."""
        self.account.begin(account)
        self._tx.begin(self.number)
        return time.perf_counter()

    def commit(self, attempt: Attempt, settle: Callable[[], Any] | None) -> Any:
        """Settles and applies an attempt whose large collectives are over. Returns its result."""
        self._tx.prepared()
        return self._finish(attempt, None if settle is None else settle())

    def _finish(self, attempt: Attempt, settled: Any) -> Any:
        self._tx.updating()
        self._last = settled, attempt.finish(settled)
        self._tx.applied()
        HEARTBEAT.beat()
        return self._last[1]

    def recover(self, error: PeerLostError, attempt: Attempt, is_committed: bool, began: float) -> bool:
        """Forms the next generation after a lost peer. Returns whether the transaction counts."""
        if is_committed:
            self._form(error, None)
            return True
        tried = time.perf_counter() - began
        ended = self._form(error, attempt)
        self._charge(tried, ended)
        if ended:
            attempt.result = self._last[1]
            attempt.taken = self._last if self._took_over else None
        return ended

    def end(self, attempt: Attempt) -> None:
        """Ends an attempt, and voids it if an error left it open."""
        if self._tx.moment is Moment.COMPUTING or self._tx.moment is Moment.PREPARED:
            self._void(attempt)
        self.account.end()

    def _charge(self, tried: float, ended: bool) -> None:
        """Accounts for an attempt of `tried` seconds that a loss interrupted: the team did no work while the loss was
        not known.
        """
        unknown = min(tried, self._detection)
        self.account.move(unknown, "detection")
        if not ended:
            self.account.move(tried - unknown, "redone")

    def _void(self, attempt: Attempt | None) -> None:
        self._tx.abort()
        if attempt is not None:
            attempt.void()

    # -- a new generation ---------------------------------------------------------------------------------------

    def enter_next(self) -> None:
        """Between two steps: enters the planned generation, or a later one."""
        self._form(None, None)

    def admit(self) -> None:
        """Waits until this newcomer belongs to the team and has its state."""
        assert self.state_owner is not None
        assert self.world.store is not None
        if self._group.mesh.replica > 1 or not self.ahead:  # its shard of the state is not known before
            self.world.tell("waiting", replica=self._group.mesh.replica)
        else:
            while True:  # once more in each generation that a spare does not belong to
                taker = StateReceiver(self.world.store[0], self._key)
                self.world.tell("waiting", at=taker.at)
                with HEARTBEAT.waiting():
                    self._followed |= taker.follow(self.state_owner, self._first, partial(self.world.tell, "current"))
                if self.worker in (generation := self.commands.wait(self.number)).members:
                    break
                self.number = generation.number
        self._form(None, None)
        self.waiting = False

    def form(self, lost: PeerLostError | None) -> None:
        """Takes part in generations without a state to hand over: the script's own loop hands its state over.

        The first call announces that the loop survives losses, and makes a newcomer wait until it is admitted. Each
        later call enters the next generation: after a `lost` peer, or a planned one.
        """
        if self.world.commands_fd is None:
            if lost is not None:
                raise lost
            return
        is_first, self._is_announced = not self._is_announced, True
        if is_first:
            self.hold |= self.world.hold
            self.world.tell("waiting" if self.waiting else "ready", replica=1)
        if not is_first or self.waiting:
            self._form(lost, None)
        self._tx = Transaction()
        self.waiting = False
        while self.hold:
            self._form(None, None)

    def _first(self) -> int | None:
        """The first worker of the generation that this worker enters next, once there is one."""
        generation = self.commands.newest
        return generation.members[0] if generation is not None and self.worker in generation.members else None

    def _form(self, error: PeerLostError | None, attempt: Attempt | None) -> bool:
        """Enters the newest generation; returns whether the attempt has been completed meanwhile."""
        with self.account.of("forming"):
            return self._enter(error, attempt)

    def _enter(self, error: PeerLostError | None, attempt: Attempt | None) -> bool:
        """As `_form`. Waits for a generation, connects its members, and brings them to the same transaction; again with
        the next generation whenever a peer is lost meanwhile, this worker is no member, or newcomers are to follow.
        """
        began = time.monotonic()
        self._took_over = False
        done = self._tx.done
        self._stood_at = done, None if attempt is None else self._tx.generation
        if attempt is not None and self._tx.moment is not Moment.PREPARED:
            self._void(attempt)
        while True:
            lost = error is not None and not self.waiting
            alone = partial(self.world.tell, "alone", number=self.number) if lost else None
            with self.account.of("paused" if self.hold else "forming"):
                generation = self.commands.wait(self.number, lost, alone)
            after_loss = generation.at_once > self.number  # else it leaves out only workers that asked for it
            with self._entering:
                self.number = generation.number
            if self.worker not in generation.members:
                self._on_left_out(after_loss)
                continue
            self.migration.enter(generation.members)
            repeats = False
            try:
                world = generation.world(self.world, self.worker)
                self._group.form(world, lambda: self.commands.has_newer(self.number, at_once=True))
                if self.state_owner is None:
                    self._group.declare(f"the beginning of generation {self.number}", kind="forming")
                else:
                    repeats = self._resolve(attempt if self._tx.done == done else None)
                self.members, self.hold, self._detection = generation.members, generation.hold, generation.detection
                if self._faults is not None:
                    self._faults.formed()
                if self.state_owner is not None:
                    self.state_owner.formed(generation, time.monotonic() - began)
            except PeerLostError as again:
                error = again
                continue
            self.world.tell("formed", number=self.number, seconds=time.monotonic() - began)
            if not (generation.admits and repeats):
                break
            error = None  # another generation follows at once, with newcomers; no peer is lost
        return attempt is not None and self._tx.done > done

    def _on_left_out(self, after_loss: bool) -> None:
        """Ends this worker, which the new generation leaves out: because it asked to leave or, `after_loss`, because
        it counts as lost. A newcomer waits on.
        """
        if not after_loss and not self.waiting:
            raise LeftError
        if not self.waiting:
            self._come_back_as_new("was suspended while the team changed")

    def _is_left_behind(self, done: int, applied_in: int) -> bool:
        """Whether the team has done more than what this worker attempted, or did that without it."""
        before, generation = self._stood_at
        return done > before + 1 or (done > before and applied_in != generation)

    def _come_back_as_new(self, why: str) -> Never:
        """Ends this worker, whose script is not at the same point as the others'."""
        say(f"paceline: worker {self.worker} {why}, and exits")
        os._exit(LEFT_BEHIND)

    def _resolve(self, attempt: Attempt | None) -> bool:
        """Brings all members to the same transaction. Returns whether all repeat it, and newcomers may enter before."""
        group, tx = self._group, self._tx
        group.declare(f"the beginning of generation {self.number}", kind="forming")
        HEARTBEAT.beat()
        self.reach("forming")
        status = tx.status
        admits = attempt is not None and attempt.admits
        statuses = group.gather_json([status.done, status.applied, status.sums, admits, self._followed])
        team = [[Status(*statuses[rank][:3]) for rank in replica] for replica in group.mesh.replicas]
        try:
            resolution = resolve(team)
        except StateLostError:
            raise PeerLostError("no remaining worker has the training state", "run the same command again") from None
        replica, shard_index = group.mesh.replica_of(group.rank), group.mesh.shard_index_of(group.rank)
        last: Any = None
        if resolution.forward or resolution.sources:
            first = next(rank for rank, row in enumerate(statuses) if row[0] == resolution.step)
            last = unpack(group.broadcast_bytes(pack(list(self._last)) if group.rank == first else None, first))
        if (replica, shard_index) in resolution.forward:
            assert attempt is not None
            self._finish(attempt, last[0])
        elif attempt is not None:
            self._void(attempt)
        if self.state_owner is not None and replica not in resolution.sources:
            self.state_owner.complete()
        if resolution.sources:
            with self.account.of("hand-over"):
                self._hand_over(resolution.sources, last, [rank for rank, row in enumerate(statuses) if row[4]])
        return not (resolution.forward or resolution.sources) and all(row[3] for row in statuses)

    def _hand_over(self, sources: Mapping[int, int], last: Any, followed: Collection[int]) -> None:
        """Hands the state over from replicas that have it to those that need it, between workers of the same shard.
        The ranks in `followed` have received much of it ahead.
        """
        group, tx, holder = self._group, self._tx, self.state_owner
        assert holder is not None
        replica, twins = group.mesh.replica_of(group.rank), group.mesh.twins(group.rank)
        HEARTBEAT.beat()
        if replica in sources or replica in sources.values():
            self.reach("hand-over")
        tree: Any = None
        hosts = group.hosts
        prepared = [index for index, twin in enumerate(twins) if twin in followed]
        for taker, source in route_transfers(sources, [hosts[twin] for twin in twins], prepared).items():
            taker, source = twins[taker], twins[source]
            if group.rank == source:
                tree = tree or [tx.done, tx.applied_in, holder.hand_over()]
                self._give(tree, taker)
            elif group.rank == taker:
                newcomer = self.waiting
                tx.empty()
                self.migration.drop()
                tree = self._receive_state(holder, source)
                done, applied_in, state = tree
                if not newcomer and self._is_left_behind(done, applied_in):
                    self._come_back_as_new("missed steps of the team")
                holder.take_over(state, newcomer)
                tx.taken(done, applied_in)
                self._last, self._took_over, self._followed = (last[0], last[1]), True, False

    def _give(self, tree: Any, taker: int) -> None:
        """Sends what the taker does not have: small tensors together, each large one by itself, without a copy."""
        tensors, skeleton = flatten(tree, "")
        has = unpack(self._group.receive_bytes(taker))
        same = digests(tensors, has)
        changed = {name: t for name, t in tensors.items() if name not in same or same[name] != has[name]}
        large = {name: t for name, t in changed.items() if t.nbytes >= LARGE}
        shapes = {name: [t.dtype, list(t.shape)] for name, t in large.items()}
        number, sender = self._group.names[taker], self.migration.senders.get(self._group.names[taker])
        size, full_size = (sum(tensor.nbytes for tensor in group.values()) for group in (changed, tensors))
        if self.state_owner is not None:
            self.state_owner.on_state_sent(
                number, size, full_size, size / sender.speed if sender and sender.speed else None
            )
        self._group.send_bytes(pack([skeleton, {n: t for n, t in changed.items() if n not in large}, shapes]), taker)
        for tensor in large.values():
            self._group.send(raw(tensor), taker)

    def _receive_state(self, holder: StateOwner, source: int) -> Any:
        tensors: dict[str, torch.Tensor] = flatten([0, 0, holder.hand_over()], "")[0] if self._followed else {}
        self._group.send_bytes(pack(digests(tensors, tensors)), source)
        skeleton, small, shapes = unpack(self._group.receive_bytes(source))
        for name, (dtype, shape) in shapes.items():
            tensors[name] = torch.empty(shape, dtype=dtype)
            self._group.receive(raw(tensors[name]), source)
        return unflatten(skeleton, {**tensors, **small})
