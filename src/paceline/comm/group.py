"""The workers of a team and the collectives among them, as Paceline's own parts use them: named, one after another."""

from __future__ import annotations

import contextlib
import hashlib
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from paceline.comm.autoload import lend
from paceline.comm.backend import ProcessGroup
from paceline.comm.channel import Channel
from paceline.comm.engine import Operation
from paceline.comm.rendezvous import Rendezvous, never
from paceline.comm.shared import raw_bytes
from paceline.comm.side import call_site, unless
from paceline.errors import LaunchError, PeerLostError, UsageError
from paceline.pulse import PULSE
from paceline.world import World

# How long to wait is our own question: torch's deadline only has to be longer than any honest pause.
FOR_EVER = timedelta(days=7)
NAME = 80  # characters of a collective's name that are shown


class Group:
    """The collectives of a team of `size` workers. In a world of one every operation is the identity.

    `ledger` has per kind of collective: how many, bytes that this worker handed over (as payload), seconds it stood
    still. `names` are what the workers are called, by rank: their numbers in the run.
    """

    def __init__(self, world: World) -> None:
        self.rank, self.size = 0, 1
        self.names: Sequence[int] = (world.rank,)
        self.ledger: dict[str, list[float]] = {}
        self._declared = ("the start", "", "the start")
        self._rendezvous = Rendezvous()
        self._store: dist.Store | None = None
        self._group: Any = None
        self._parts: dict[str, Group] = {}  # of this generation
        self._replicas: dict[int, Group] = {}  # by their size
        self._lends = False
        self._lent: Any = None  # torch's default group
        if world.size > 1 and not world.newcomer:
            with PULSE.waiting():
                self._take(world, *self._connect(world, never))

    def _connect(self, world: World, given_up: Callable[[], bool]) -> tuple[dist.Store, ProcessGroup]:
        store = self._rendezvous.open(world, given_up)
        channel = Channel(store, world.rank, world.size, FOR_EVER, given_up)
        return store, ProcessGroup(store, world.rank, world.size, FOR_EVER, channel)

    def _take(self, world: World, store: dist.Store | None, group: ProcessGroup | None) -> None:
        self.rank, self.size, self._store, self._group = world.rank, world.size, store, group
        self.names = world.members or range(world.size)
        if group is not None:
            self.channel, self._side = group.channel, group.channel.side
            self._side.names = self.names
            self.channel.ledger = self.ledger

    def form(self, world: World, given_up: Callable[[], bool]) -> None:
        """Leaves the workers of before and connects with those of `world`. Collective among the latter.

        Raises PeerLostError if it is `given_up` before all have come; then this worker is alone until the next time.
        """
        self._abort()
        self._take(replace(world, rank=0, size=1, members=(world.members[world.rank],)), None, None)
        if world.size == 1:
            return
        why = PeerLostError("a generation was given up", "wait for the next")
        try:  # gloo, too, can be left behind
            with PULSE.waiting():  # not in the thread, which may be left behind
                made = unless(lambda: why if given_up() else None, lambda: self._connect(world, given_up))
            self._take(world, *made)
            for size in self._replicas:
                self.replica(size)
        except (RuntimeError, LaunchError) as error:  # the store went, with the first of them
            raise PeerLostError(f"the team could not meet ({error})", "see the other workers' logs") from error

    def _abort(self) -> None:
        for part in self._all_parts:
            part._abort()
            part._store = None
        self._parts.clear()
        for group in (self._group, self._lent):
            if group is not None:
                group.abort()

    @property
    def _all_parts(self) -> list[Group]:
        return [*self._parts.values(), *self._replicas.values()]

    def along(self, *axes: str) -> Group:
        """The group of the workers that differ from this one along these axes alone."""
        if axes == ("shard",):
            return self.replica(self.places)
        return self.across(self.places) if axes == ("data",) else self

    def across(self, places: int) -> Group:
        """The group of the workers that have the place of this one in their replicas. Collective at first; it ends with
        the generation.
        """
        if places == 1:
            return self
        name = f"across/{places}"
        if name not in self._parts:
            self._parts[name] = self._alone()
            self._meet(self._parts[name], name, [range(place, self.size, places) for place in range(places)])
        return self._parts[name]

    def replica(self, size: int, lend: bool = False) -> Group:
        """The group of the `size` workers, one after another, that hold a model together. Collective at first. In a new
        generation it is the same, over other connections; a newcomer has it from its admission on.

        With `lend` its workers also have a default group of torch.distributed, over which torch's own parts run.
        """
        made = self._replicas.setdefault(size, self._alone())
        made._lends |= lend
        if self.size > 1 and (made._store is None or (made._lends and made._lent is None)):
            self._meet(made, f"replica/{size}", [range(first, first + size) for first in range(0, self.size, size)])
        return made

    def _alone(self) -> Group:
        made = Group(World(rank=self.names[self.rank]))
        made.ledger = self.ledger
        return made

    def _meet(self, part: Group, name: str, parts: Sequence[Sequence[int]]) -> None:
        """Connects those of a part, the one of `parts` that has this worker's rank."""
        (ranks,) = [ranks for ranks in parts if self.rank in ranks]
        world = World(rank=ranks.index(self.rank), size=len(ranks), members=tuple(self.names[rank] for rank in ranks))
        if world.size == 1:
            part._take(world, None, None)
            return
        assert self._store is not None
        part._join(world, dist.PrefixStore(f"{name}/{ranks[0]}", self._store), self.channel)

    def _join(self, world: World, store: dist.Store, over: Channel) -> None:
        """Connects this part of a group, or connects it again; as long as the group's channel is whole."""

        def channel(store: dist.Store) -> Channel:
            make = partial(Channel, store, world.rank, world.size, FOR_EVER, lambda: over.broken is not None)
            with PULSE.waiting():
                return unless(lambda: over.broken, make)

        if self._group is not None and self._group.rank() != world.rank:  # a newcomer whose mates were lost
            if self._lent is not None:
                dist.destroy_process_group()
            self._group = self._lent = None
        if self._store is None:
            made = channel(store)
            if self._group is None:
                self._group = ProcessGroup(store, world.rank, world.size, FOR_EVER, made)
            else:
                self._group.meet(store, made)
            self._take(world, store, self._group)
        if self._lends:
            self._lend(dist.PrefixStore("torch", store), channel)
        if over.broken is not None:  # we were not there to hear that
            self.interrupt(over.broken)

    def _lend(self, store: dist.Store, connect: Callable[[dist.Store], Channel]) -> None:
        """Makes torch.distributed's default group of these workers, or connects it again. Raises UsageError where the
        script has made one.
        """
        if self._lent is None and dist.is_initialized():
            what = "the script has initialised torch.distributed, whose default group the plan needs"
            raise UsageError(what, "leave init_process_group out, or say zero=1")
        channel = connect(store)
        channel.side.names, channel.ledger = self.names, self.ledger
        if self._lent is not None:
            self._lent.meet(store, channel)
            return
        self._lent, hook = ProcessGroup(store, self.rank, self.size, FOR_EVER, channel), sys.excepthook
        lend(self._lent, store)
        sys.excepthook = hook  # torch's puts a rank before every line

    def interrupt(self, error: Exception) -> None:
        """Ends every collective with `error`, until the next team has formed. From any thread."""
        for group in (self._group, self._lent):
            if group is not None:
                group.channel.interrupt(error)
        for part in self._all_parts:
            part.interrupt(error)

    @property
    def places(self) -> int:
        """The workers of a replica."""
        return max(self._replicas, default=1)

    @property
    def hosts(self) -> list[int]:
        """The number of each worker's host."""
        return [self.channel.hosts.place(rank)[0] for rank in range(self.size)] if self.size > 1 else [0]

    @property
    def sent(self) -> int:
        """Bytes that this worker handed to collectives."""
        return int(sum(entry[1] for entry in self.ledger.values()))

    # -- entering -----------------------------------------------------------------------------------------------

    def enter(self, name: str, check: bool = True, kind: str | None = None) -> None:
        """Declares the next collective. With `check`, returns only when all workers declared the same one.

        `kind` is its line in the ledger. Raises CollectiveMismatchError on every worker, naming each call site, if
        they did not declare the same.
        """
        if self.size == 1:
            return
        if len(name) > NAME:  # told apart by all of it, shown by its beginning
            name = f"{name[: NAME - 13]}~{hashlib.sha256(name.encode()).hexdigest()[:12]}"
        self._declared = (name, call_site(), kind or name)
        if check:
            self._wait(self._group.barrier)

    @contextlib.contextmanager
    def lending(self, name: str, kind: str) -> Iterator[dist.ProcessGroup]:
        """Gives the group that is lent to torch, and declares what is done over it meanwhile."""
        channel = self._lent.channel
        channel.declared = (name, call_site(), kind)
        try:
            yield self._lent
        finally:
            channel.declared = None

    def _start(self, collective: Callable[..., dist.Work], *arguments: Any) -> dist.Work:
        """Starts a part of the entered collective."""
        self.channel.declared = self._declared
        try:
            return collective(*arguments)
        finally:
            self.channel.declared = None

    def _wait(self, collective: Callable[..., dist.Work], *arguments: Any) -> None:
        self._start(collective, *arguments).wait()

    # -- collectives --------------------------------------------------------------------------------------------

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """A flat tensor of zeros for sums: on CPU in memory that the workers of a host share. Collective."""
        if self.size > 1 and device.type == "cpu":
            try:
                with PULSE.waiting():
                    return self.channel.allocate(numel, dtype)
            except dist.DistError as error:  # the store went
                raise PeerLostError(f"a worker was lost while memory was shared ({error})", "see its log") from error
        return torch.zeros(numel, dtype=dtype, device=device)

    def start_sum(self, tensor: torch.Tensor) -> dist.Work | None:
        """Starts summing `tensor` in place over all workers; `finish` must follow. Part of the entered collective.

        It goes on whenever something else is started or waited for.
        """
        return self._start(self._group.allreduce, [tensor]) if self.size > 1 else None

    def start_scatter(self, flat: torch.Tensor) -> dist.Work | None:
        """Starts summing `flat`, which has a stretch for each worker, over all: each gets the sums of its own, in
        place, and the rest is void. `finish` must follow. Part of the entered collective.
        """
        if self.size == 1:
            return None
        own = flat.view(self.size, -1)[self.rank]
        return self._start(self._group.reduce_scatter_single, own, flat)

    def gather_stretches(self, flats: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
        """Of tensors that have a stretch for each worker, everybody's own ones: for each tensor a list by rank, to be
        read before the next one is asked for. Part of the entered collective.
        """
        arenas = [self.channel.in_arena(flat) if self.size > 1 else None for flat in flats]
        parts = [arena.parts for arena in arenas if arena is not None and len(arena.parts) == self.size]
        here = self.size > 1 and len(set(self.hosts)) == 1 and len(parts) == len(flats)
        if here:  # where they lie
            self._wait(self._group.barrier)
            self.ledger[self._declared[2]][1] += sum(flat.nbytes for flat in flats) // self.size
            for tensors in parts:
                yield [tensor.view(self.size, -1)[rank] for rank, tensor in enumerate(tensors)]
            self._wait(self._group.barrier)
        for flat in () if here else flats:
            if self.size > 1:
                self._wait(self._group.all_gather_single, flat, flat.view(self.size, -1)[self.rank])
            yield list(flat.view(self.size, -1))

    def finish(self, work: dist.Work | None) -> None:
        if work is not None:
            work.wait()

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sums `tensor` in place over all workers and returns it. Part of the entered collective."""
        self.finish(self.start_sum(tensor))
        return tensor

    def squares(self, tensors: Sequence[torch.Tensor]) -> float | None:
        """The sum of squares of tensors that were just summed in shared memory, without reading them again.

        None where they were summed in another way, and at the first time. Part of the entered collective.
        """
        if self.size == 1:
            return None
        arenas = [self.channel.in_arena(tensor) for tensor in tensors]
        found = [arena.squares for arena in arenas if arena is not None and arena.squares is not None]
        for arena in arenas:
            if arena is not None:
                arena.measure = True
        if not found or len(found) < len(tensors):
            return None
        return float(self.sum(torch.tensor([sum(found)], dtype=torch.float64)))

    def largest(self, tensor: torch.Tensor) -> torch.Tensor:
        """The largest of all workers' elements, in place. Part of the entered collective."""
        if self.size > 1:
            options = c10d.AllreduceOptions()
            options.reduceOp = dist.ReduceOp.MAX  # type: ignore[assignment]
            self._wait(self._group.allreduce, [tensor], options)
        return tensor

    def broadcast(self, tensor: torch.Tensor, source: int = 0) -> torch.Tensor:
        """Overwrites `tensor` on all workers with that of `source`. Part of the entered collective."""
        if self.size > 1:
            options = c10d.BroadcastOptions()
            options.rootRank = source
            self._wait(self._group.broadcast, [raw_bytes(tensor)], options)
        return tensor

    def broadcast_bytes(self, data: torch.Tensor | None, source: int) -> torch.Tensor:
        """The flat bytes of `source`, on all workers. Part of the entered collective."""
        length = torch.tensor([0 if data is None else len(data)])
        self.broadcast(length, source)
        if data is None:
            data = torch.empty(int(length), dtype=torch.uint8)
        return self.broadcast(data, source)

    def send_bytes(self, data: torch.Tensor, rank: int) -> None:
        """Flat bytes to one other worker, which calls `receive_bytes`."""
        for part in (torch.tensor([len(data)]), data):
            self.send(part, rank)

    def receive_bytes(self, rank: int) -> torch.Tensor:
        length = torch.zeros(1, dtype=torch.int64)
        self.receive(length, rank)
        data = torch.empty(int(length), dtype=torch.uint8)
        self.receive(data, rank)
        return data

    def send(self, flat: torch.Tensor, rank: int) -> None:
        """A flat tensor to one other worker, which calls `receive` with one of the same length and dtype."""
        self._group.send([flat], rank).wait()

    def receive(self, flat: torch.Tensor, rank: int) -> None:
        self._group.recv([flat], rank).wait()

    def gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Every worker's flat tensor of one dtype, lengths may differ. Part of the entered collective."""
        if self.size == 1:
            return [tensor]
        lengths = torch.zeros(self.size, dtype=torch.int64)
        lengths[self.rank] = tensor.numel()
        self.sum(lengths)
        longest = int(lengths.max())
        padded = torch.zeros(longest, dtype=tensor.dtype, device=tensor.device)
        padded[: tensor.numel()] = tensor
        everyone = torch.empty(self.size * longest, dtype=tensor.dtype, device=tensor.device)
        self._wait(self._group.all_gather_single, raw_bytes(everyone), raw_bytes(padded))
        rows = everyone.view(self.size, longest)
        return [row[: int(length)] for row, length in zip(rows, lengths, strict=True)]

    def gather_json(self, value: Any) -> list[Any]:
        """Every worker's JSON value. Part of the entered collective."""
        data = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        return [json.loads(bytes(row.tolist()).decode()) for row in self.gather(data)]

    def abandon(self, works: Sequence[dist.Work | None]) -> None:
        """Leaves unfinished collectives behind for good."""
        for work in works:
            if isinstance(work, Operation):
                work.fail(PeerLostError("the collective was given up", "see the error before"))

    # -- the side channel ---------------------------------------------------------------------------------------

    def flag(self, name: str) -> None:
        """Raises a flag that the others can see without a collective."""
        if self._store is not None:
            self._store.set(f"flag/{name}", "1")

    def wait_for_flag(self, name: str) -> None:
        """Waits for a flag as long as it takes: the launcher ends us if its owner dies."""
        with PULSE.waiting():
            while self._store is not None and not self._store.check([f"flag/{name}"]):
                time.sleep(0.05)

    # -- the end ------------------------------------------------------------------------------------------------

    def meet(self) -> None:
        """At the good end of the script: says so, and waits until all have come as far, so that none is left waiting.

        A worker that still waits for us in a collective sees that we ended, and fails with the reason; then we, too,
        raise PeerLostError.
        """
        if self._store is None:
            return
        self._side.say("ended", self._declared[:2])
        places: list[dict[str, Any] | None] = [None]
        try:
            self._side.publish()
            while not all(place is not None and place["state"] in ("ended", "met") for place in places):
                time.sleep(0.02)
                if self.channel.broken is not None:
                    raise self.channel.broken
                places = unless(lambda: self.channel.broken, self._side.others)
                for rank, place in enumerate(places):
                    if place is not None and place["state"] == "failed":
                        raise PeerLostError(
                            f"worker {self.names[self.rank]} had ended, but worker {self.names[rank]} failed",
                            f"see the log of worker {self.names[rank]}",
                        )
            self._side.say("met", self._declared[:2])  # what follows, such as a last checkpoint, all do together
            self._side.publish()
        except RuntimeError:  # the store went with the first worker
            raise PeerLostError(
                f"worker {self.rank} had ended, but worker 0 failed", "see the log of worker 0"
            ) from None

    def close(self, failed: bool) -> None:
        """Releases the group. In a good end the store, which lives in worker 0, goes last."""
        if self._store is None:
            return
        store, self._store = self._store, None
        with contextlib.suppress(RuntimeError):  # the store went with worker 0
            self._side.say("failed" if failed else "ended", self._declared[:2])
            self._side.publish()
            store.set(f"closed/{self.rank}", "1")
            others = [f"closed/{rank}" for rank in range(self.size)]
            with PULSE.waiting():
                while self.rank == 0 and not (failed or self.channel.broken or store.check(others)):
                    time.sleep(0.02)
        self._release(failed)

    def _release(self, failed: bool) -> None:
        for part in self._all_parts:
            part._store = None
            part._release(failed)
        self._parts.clear()
        self._replicas.clear()
        if not failed and self._lent is not None:
            dist.destroy_process_group()
            self._lent.shutdown()
        if not failed and self._group is not None:
            self._group.shutdown()
            self._group = None  # ends gloo's threads
