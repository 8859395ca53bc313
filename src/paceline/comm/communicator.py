"""The collectives of a group of workers, as the rest of the package uses them."""

from __future__ import annotations

import contextlib
import hashlib
import json
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import astuple, replace
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from paceline.base.environment import World, gloo_interface
from paceline.base.heartbeat import HEARTBEAT
from paceline.base.mesh import AXES, Mesh
from paceline.base.sharding import ShardedTensor, assemble
from paceline.comm import link_speed as links
from paceline.comm.autoload import exposed, lend, take_back
from paceline.comm.c10d_arguments import CollectiveRequest, Op, outside_inference, plain, reduction
from paceline.comm.c10d_backend import ProcessGroup
from paceline.comm.hierarchical import Between, HierarchicalTransport, interface_of
from paceline.comm.host_staging import Carrier, carrier
from paceline.comm.message_reader import decode_message
from paceline.comm.peer_status import MANY, call_site, unless
from paceline.comm.progress_engine import ENGINE, Operation, Steps
from paceline.comm.rendezvous import Rendezvous, never
from paceline.comm.shared_memory import raw_bytes
from paceline.comm.transport import Transport
from paceline.errors import LaunchError, PeerLostError, UsageError

# Paceline has its own deadlines: torch's only has to be longer than any legitimate wait.
FOR_EVER = timedelta(days=7)
# Of a group: the part along these axes, or the team of this size; and its purpose.
_PartKey = tuple[Mesh, "tuple[str, ...] | int", str]
NAME = 80  # characters of a collective's name that are shown


_refusing: list[bool] = []  # not empty in `refusing_collectives`


@contextlib.contextmanager
def refusing_collectives() -> Iterator[None]:
    """A context in which no other worker runs the user's code: collectives raise RuntimeError."""
    _refusing.append(True)
    try:
        yield
    finally:
        _refusing.pop()


class Group:
    """The collectives of a team of `size` workers. In a team of one every operation is the identity.

    `ledger` has, per kind of collective: how many there were, the bytes that this worker handed over (as payload), and
    the seconds it waited. `names` are the workers' numbers in the run, by rank. `mesh` says which worker is where: it
    is that of the trainer whose replicas are largest.
    """

    def __init__(self, world: World) -> None:
        self.rank, self.size = 0, 1
        self.names: Sequence[int] = (world.rank,)
        self.serves = world.serves  # a parameter server: it is alone, and no worker
        self.ledger: dict[str, list[float]] = {}
        self._declared = ("the start", "", "the start")
        self._rendezvous = Rendezvous()
        self._store: dist.Store | None = None
        self.channel: Any = None  # while there are others
        self._lent: Any = None  # torch's default group
        self._lends = False  # whether it is connected in this generation
        self.has_left_generation = False  # whether connections of an earlier generation may be unfinished
        self.is_eager = False  # a trainer needs it from the start of a generation on, when losing a worker is handled
        self.mesh = Mesh()
        self.links: list[links.HostLink] = []  # between hosts, as measured
        self._parts: dict[_PartKey, Group] = {}
        self._extra: list[Transport] = []  # the channels that `connect` made in this generation
        self._label = "team"
        # The group that this is a part of, and the part's prefix in its store.
        self._parent: tuple[Group, str] | None = None
        if world.size > 1 and not world.newcomer:
            with HEARTBEAT.waiting():
                self._join_world(world, *self._connect(world, never))

    def _connect(self, world: World, given_up: Callable[[], bool]) -> tuple[dist.Store, Transport]:
        store = self._rendezvous.open(world, given_up)
        return store, Transport(store, world.rank, world.size, FOR_EVER, given_up)

    def _join_world(self, world: World, store: dist.Store | None, channel: Transport | None) -> None:
        self.rank, self.size = world.rank, world.size
        self.names, self.mesh = world.members or range(world.size), self.mesh.over(world.size)
        self._lends = False
        self._use(store, channel)
        for key, part in self._parts.items():
            self._set_members(part, key)

    def _use(self, store: dist.Store | None, channel: Transport | None) -> None:
        self._store, self.channel = store, channel
        if channel is not None:
            self._side = channel.side
            self._side.names = self.names
            channel.ledger, channel.label = self.ledger, self._label

    def form(self, world: World, given_up: Callable[[], bool]) -> None:
        """Leaves the previous workers and connects with those of `world`. Collective among the latter.

        Raises PeerLostError if it is `given_up` before all have come; then this worker is alone until the next call.
        """
        self.has_left_generation |= self.channel is not None
        self._abort()
        self._join_world(replace(world, rank=0, size=1, members=(world.members[world.rank],)), None, None)
        if world.size == 1:
            return
        why = PeerLostError("the generation was abandoned", "wait for the next one")
        try:  # gloo, too, can be left behind
            with HEARTBEAT.waiting():  # not in the thread, which may be left behind
                made = unless(lambda: why if given_up() else None, lambda: self._connect(world, given_up))
            self._join_world(world, *made)
            for part in self._parts.values():
                if part.is_eager:
                    part.expose_to_torch()
        except (RuntimeError, LaunchError) as error:  # the store went, with the first of them
            raise PeerLostError(
                f"the workers could not connect to each other ({error})", "see the other workers' logs"
            ) from error

    def _abort(self) -> None:
        for part in self._parts.values():
            part._abort()
        for over in (self.channel, self._lent, *self._extra):
            if over is not None:
                over.abort()
        self._extra.clear()

    def subgroup(self, *axes: str, mesh: Mesh | None = None, purpose: str = "") -> Group:
        """The group of the workers that differ from this one along these axes of a mesh only; by default the present
        mesh.

        Along all axes it is this group itself. The object is the same in all generations. In each it connects at its
        first `declare`, `declared_torch_group` or `allocate`, which is collective among its workers: a newcomer was not
        present when the others made it. Groups with another `purpose` have connections of their own: their collectives
        need no common order.
        """
        mesh = replace(mesh or self.mesh, data=1)  # replicas come and go
        if not purpose and "data" in axes and all(axis in axes or getattr(mesh, axis) == 1 for axis in AXES):
            return self
        inner_axes = tuple(a for a in AXES if a in axes and (a == "data" or getattr(mesh, a) > 1))
        return self._part((mesh, inner_axes, purpose))

    def team(self, teams: int, mesh: Mesh) -> Group:
        """The group of this worker's team, where all replicas, in order, are divided as evenly as possible into
        `teams`.

        There are no more teams than replicas. The object is the same in all generations.
        """
        return self._part((replace(mesh, data=1), teams, ""))

    def _part(self, key: _PartKey) -> Group:
        if key not in self._parts:
            part = self._parts[key] = Group(World(rank=self.names[self.rank]))
            part.ledger = self.ledger
            self._set_members(part, key)
        return self._parts[key]

    def _set_members(self, part: Group, key: _PartKey) -> None:
        """Sets the members of a part for this generation. While this worker is alone, it is alone in the part, too."""
        mesh, which = key[0].over(self.size), key[1]
        if not mesh.data:
            ranks: Sequence[int] = (self.rank,)
        elif isinstance(which, int):
            ranks = next(team for team in mesh.teams(which) if self.rank in team)
        else:
            ranks = mesh.peers(self.rank, *which)
        axes = "+".join([str(which)] if isinstance(which, int) else which) + f" {key[2]}".rstrip()
        parent, prefix = self._parent or (self, "")
        part._parent = parent, f"{prefix}along/{'x'.join(map(str, astuple(mesh)))}/{axes}/{ranks[0]}/"
        members = tuple(self.names[rank] for rank in ranks)
        part._label = f"{axes or 'alone'} of {members[0]}"
        part._join_world(World(rank=ranks.index(self.rank), size=len(ranks), members=members), None, None)

    def _join(self) -> None:
        """Connects the workers of a part, unless they are connected in this generation."""
        if self._parent is None or self._store is not None:
            return
        parent, name = self._parent
        assert parent._store is not None
        store = dist.PrefixStore(name, parent._store)
        self._use(store, self._channel(store, parent.channel))
        if parent.channel.broken is not None:  # the part was not connected when the parent was interrupted
            self.interrupt(parent.channel.broken)

    def connect(self, label: str, ranks: Sequence[int]) -> Transport | None:
        """Connects a further channel among some workers, for a thread of its own; None if this worker is alone in it.

        Collective among `ranks`, which are in ascending order. The `label` is used once in a generation. The channel is
        interrupted together with this group, and ends with the generation.
        """
        if len(ranks) == 1:
            return None
        assert self._store is not None
        store = dist.PrefixStore(f"connect/{label}/", self._store)
        channel = self._channel(store, self.channel, ranks)
        channel.side.names = [self.names[rank] for rank in ranks]
        channel.ledger, channel.label = self.ledger, label
        self._extra.append(channel)
        if self.channel.broken is not None:
            channel.interrupt(self.channel.broken)
        return channel

    def disconnect(self, channel: Transport) -> None:
        """Closes a channel that `connect` made, once all of its workers have ended their last collective over it."""
        self._extra.remove(channel)
        channel.close()

    def _channel(self, store: dist.Store, over: Transport, ranks: Sequence[int] | None = None) -> Transport:
        """Connects the workers of a part, or these `ranks`, as long as the channel `over` all of them is intact."""
        rank, size = (self.rank, self.size) if ranks is None else (ranks.index(self.rank), len(ranks))
        make = partial(Transport, store, rank, size, FOR_EVER, lambda: over.broken is not None)
        try:
            with HEARTBEAT.waiting():
                return unless(lambda: over.broken, make)
        except RuntimeError as error:
            raise PeerLostError(
                f"the workers could not connect to each other ({error})", "see the other workers' logs"
            ) from error

    def expose_to_torch(self) -> None:
        """Makes a group of torch.distributed of a part's workers; torch uses it while it is `exposed`.

        In a new generation it stays the same group, over other connections. Raises UsageError if the script has made a
        default group. Collective.
        """
        if self.size == 1 or self._lends:
            return
        if self._lent is not None and self._lent.rank() != self.rank:  # a newcomer whose peers were lost
            take_back(self._lent)
            self._lent = None
        if self._lent is None and dist.is_initialized():
            what = "the script has initialised torch.distributed, but the plan needs its default process group"
            raise UsageError(what, "remove init_process_group(), or use zero=1")
        self._join()
        assert self._store is not None
        store = dist.PrefixStore("torch", self._store)
        channel = self._channel(store, (self._parent[0] if self._parent else self).channel)
        channel.side.names, channel.ledger = self.names, self.ledger
        if self._lent is not None:
            self._lent.meet(store, channel)
        else:
            self._lent, hook = ProcessGroup(store, self.rank, self.size, FOR_EVER, channel), sys.excepthook
            lend(self._lent, store)
            sys.excepthook = hook  # torch's puts a rank before every line
        channel.label = f"torch, {self._label}"
        self._lends = True
        if self.channel.broken is not None:  # the part was not connected when the parent was interrupted
            self.interrupt(self.channel.broken)

    def interrupt(self, error: Exception) -> None:
        """Ends every collective with `error`, until the next team has formed. From any thread."""
        for channel in (self.channel, self._lent and self._lent.channel, *self._extra):
            if channel is not None:
                channel.interrupt(error)
        for part in [*self._parts.values()]:
            part.interrupt(error)

    @property
    def hosts(self) -> list[int]:
        """The number of each worker's host."""
        return [self.channel.hosts.locate(rank)[0] for rank in range(self.size)] if self.size > 1 else [0]

    @property
    def leaders(self) -> list[int]:
        """The number in the run of each host's first worker."""
        return [self.names[first] for first, *_ in self.channel.hosts.hosts] if self.size > 1 else [*self.names]

    @property
    def is_host_leader(self) -> bool:
        """Whether this worker exchanges data with other hosts on behalf of its own host."""
        return len(self.leaders) > 1 and self.names[self.rank] in self.leaders

    def measure(self, known: Sequence[Sequence[Any]]) -> bool:
        """Sets `links` to those between the present hosts, from `known` or by measuring; returns whether any was
        measured.

        `known` is equal on all workers. Collective.
        """
        hosts = [[self.names[rank] for rank in host] for host in self.channel.hosts.hosts] if self.size > 1 else []
        links_by_pair = links.between([links.HostLink(*link) for link in known], hosts)
        pairings, results = (
            links.rounds(len(hosts), links_by_pair) if len(hosts) > 1 else [],
            dict[links.HostPair, Any](),
        )
        if pairings:
            self.declare("the links between hosts", check=False, kind="figures")
            with self._declaring():
                work = self.channel.measure(pairings, results)
            work.wait()
            reports = self.gather_json([[pair, *measured] for pair, measured in results.items()])
            links_by_pair |= links.combined(reports, hosts)
        self.links = [*links_by_pair.values()]
        return bool(pairings)

    @property
    def interface(self) -> str:
        """The network interface by which this worker reaches other hosts."""
        address = self.channel.hosts.address if self.channel is not None else ""
        name = gloo_interface() or interface_of(address)
        return f"{name} ({address})" if name and address else name or address

    def pace(self, rate: float, latency: float) -> None:
        """Tells the transport the bandwidth, in bytes a second, and the latency between hosts. All workers pass the
        same.
        """
        if self.channel is not None and self.channel.hosts.leaders is not None:
            self.channel.hosts.leaders.pace(rate, latency)

    @property
    def flow(self) -> links.BandwidthEstimate | None:
        """The bandwidth that this leader's sums have reached; None on other workers."""
        leaders = self.channel.hosts.leaders if self.channel is not None else None
        return None if leaders is None else leaders.flow

    @property
    def sent(self) -> int:
        """Bytes that this worker handed to collectives."""
        return int(sum(entry[1] for entry in self.ledger.values()))

    # -- entering -----------------------------------------------------------------------------------------------

    def declare(self, name: str, check: bool = True, kind: str | None = None) -> None:
        """Declares the next collective. With `check`, returns only when all workers declared the same one.

        `kind` is its line in the ledger. Raises CollectiveMismatchError on every worker, naming each call site, if
        they did not declare the same.
        """
        if self.size == 1:
            return
        if _refusing:
            raise RuntimeError(f"{name} needs all workers, but only this one runs the code now")
        self._join()
        if len(name) > NAME:  # the beginning and a hash of all of it
            name = f"{name[: NAME - 13]}~{hashlib.sha256(name.encode()).hexdigest()[:12]}"
        self._declared = (name, call_site(), kind or name)
        if check:
            self._barrier()

    def exposed(self) -> contextlib.AbstractContextManager[None]:
        """A context in which torch's default group is the one that this group lends to torch."""
        return exposed(self._lent) if self._lent is not None else contextlib.nullcontext()

    @contextlib.contextmanager
    def declared_torch_group(self, name: str, kind: str) -> Iterator[dist.ProcessGroup]:
        """Gives the group that is lent to torch, and declares what is done over it meanwhile."""
        self.expose_to_torch()
        channel = self._lent.channel
        channel.declared = (name, call_site(), kind)
        try:
            with self.exposed():
                yield self._lent
        finally:
            channel.declared = None

    @contextlib.contextmanager
    def _declaring(self) -> Iterator[None]:
        """A context in which parts of the entered collective start."""
        self.channel.declared = self._declared
        try:
            with outside_inference():
                yield
        finally:
            self.channel.declared = None

    @contextlib.contextmanager
    def _over(
        self, tensor: torch.Tensor, peer: int | None = None, coded: bool = False
    ) -> Iterator[tuple[Carrier, torch.Tensor]]:
        """A context for a collective on a tensor: gives what moves tensors of its device, and the same memory, flat.

        It serves all workers, or a `peer`, or sums in a codec's way (`coded`).
        """
        by = carrier(self.channel, tensor, peer, coded)
        with self._declaring():
            yield by, plain(tensor).view(-1)

    def _run_in_background(self, work: dist.Work) -> dist.Work:
        """Lets a collective go on while this worker computes, if there are several hosts."""
        if self.channel.hosts.several:
            ENGINE.in_background(hurried=False)
        return work

    def _barrier(self) -> None:
        with self._declaring():
            work = self.channel.barrier()
        work.wait()

    def _all_gather(self, everyone: torch.Tensor, flat: torch.Tensor) -> None:
        """Gathers the `flat` of all workers into a flat tensor with a stretch for each worker."""
        with self._over(flat) as (by, local):
            work = by.all_gather(raw_bytes(plain(everyone)).view(self.size, -1).unbind(0), raw_bytes(local))
        work.wait()

    # -- collectives --------------------------------------------------------------------------------------------

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """A flat tensor of zeros for sums: on CPU in memory that the workers of a host share. Collective."""
        if self.size > 1 and device.type == "cpu":
            self._join()
            try:
                with HEARTBEAT.waiting():
                    return self.channel.allocate(numel, dtype)  # type: ignore[no-any-return]
            except dist.DistError as error:  # the store went
                raise PeerLostError(
                    f"a worker was lost while shared memory was set up ({error})", "see the other workers' logs"
                ) from error
        return torch.zeros(numel, dtype=dtype, device=device)

    def start_sum(self, tensor: torch.Tensor, between: Between | None = None) -> dist.Work | None:
        """Starts summing `tensor` in place over all workers; `finish` must follow. Part of the entered collective.

        It proceeds whenever something else starts or waits; with several hosts all the time. `between` hosts another
        function may sum it, on the CPU.
        """
        if self.size == 1:
            return None
        how: dict[str, Any] = {} if between is None else {"between": between}
        with self._over(tensor, coded=between is not None) as (by, flat):
            work = by.all_reduce(flat, reduction(Op.SUM, tensor.dtype), **how)
        return self._run_in_background(work)

    def start_scatter(self, flat: torch.Tensor) -> dist.Work | None:
        """Starts summing `flat`, which has a stretch for each worker; each gets the sums of its own stretch, in place.

        The other stretches are undefined afterwards. `finish` must follow. Part of the entered collective.
        """
        if self.size == 1:
            return None
        with self._over(flat) as (by, full):
            parts = full.view(self.size, -1).unbind(0)
            work = by.reduce_scatter(parts[self.rank], parts, reduction(Op.SUM, flat.dtype), full=full)
        return self._run_in_background(work)

    def start_steps(self, size: int, make: Callable[[HierarchicalTransport | None, int], Steps]) -> dist.Work | None:
        """Starts a collective of several steps among hosts, which hands over `size` bytes of each worker.

        `finish` must follow. A worker that is alone runs the steps at once. Part of the entered collective.
        """
        if self.size == 1:
            deque(make(None, 0), maxlen=0)
            return None
        with self._declaring():
            channel: Transport = self.channel
            return channel.start(CollectiveRequest("steps", torch.uint8), size, 0, partial(make, channel.hosts))

    def gather_stretches(self, flats: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
        """Yields, for each tensor with a stretch per worker, a list of all workers' own stretches by rank.

        Each list has to be read before the next one is asked for. Part of the entered collective.
        """
        shared = self.in_shared_memory(flats)
        if shared is not None:  # reads the stretches where they lie
            self.meet_to_read(sum(flat.nbytes for flat in flats) // self.size)
            for tensors in shared:
                yield [tensor.view(self.size, -1)[rank] for rank, tensor in enumerate(tensors)]
            self._barrier()
        for flat in flats if shared is None else ():
            if self.size > 1:
                self._all_gather(flat, flat.view(self.size, -1)[self.rank])
            yield list(flat.view(self.size, -1))

    def in_shared_memory(self, flats: Sequence[torch.Tensor]) -> list[list[torch.Tensor]] | None:
        """Returns, for each tensor, those of all workers by rank if all of them are in memory that the workers share;
        the same on every worker. None otherwise.
        """
        arenas = [self.channel.in_arena(flat) if self.size > 1 else None for flat in flats]
        parts = [arena.parts for arena in arenas if arena is not None and len(arena.parts) == self.size]
        is_shared = self.size > 1 and len(set(self.hosts)) == 1 and len(parts) == len(flats)
        return parts if is_shared else None

    def meet_to_read(self, size: int) -> None:
        """Waits for all workers, before they read `size` bytes of each other's memory. Part of the entered
        collective.
        """
        self._barrier()
        self.ledger[self._declared[2]][1] += size

    def finish(self, work: dist.Work | None) -> None:
        """Waits for a collective that was started."""
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
        arenas = [arena for arena in map(self.channel.in_arena, tensors) if arena is not None]
        sums = [arena.squares for arena in arenas if arena.squares is not None]
        for arena in arenas:
            arena.measure = True
        if not sums or len(sums) < len(tensors):
            return None
        return float(self.sum(torch.tensor([sum(sums)], dtype=torch.float64)))

    def largest(self, tensor: torch.Tensor) -> torch.Tensor:
        """Writes the elementwise maximum over all workers into `tensor`. Part of the entered collective."""
        if self.size > 1:
            with self._over(tensor) as (by, flat):
                work = by.all_reduce(flat, reduction(Op.MAX, tensor.dtype))
            work.wait()
        return tensor

    def broadcast(self, tensor: torch.Tensor, source: int = 0) -> torch.Tensor:
        """Overwrites `tensor` on all workers with that of `source`. Part of the entered collective."""
        if self.size > 1:
            with self._over(tensor) as (by, flat):
                work = by.broadcast(raw_bytes(flat), source)
            work.wait()
        return tensor

    def broadcast_bytes(self, data: torch.Tensor | None, source: int) -> torch.Tensor:
        """Returns the flat bytes of `source` on all workers. Part of the entered collective."""
        length = torch.tensor([0 if data is None else len(data)], dtype=torch.int64)
        self.broadcast(length, source)
        if data is None:
            data = torch.empty(int(length), dtype=torch.uint8)
        return self.broadcast(data, source)

    def send_bytes(self, data: torch.Tensor, rank: int) -> None:
        """Sends flat bytes to one other worker, which calls `receive_bytes`."""
        for part in (torch.tensor([len(data)], dtype=torch.int64), data):
            self.send(part, rank)

    def receive_bytes(self, rank: int) -> torch.Tensor:
        """Receives the flat bytes that worker `rank` sends with `send_bytes`."""
        length = torch.zeros(1, dtype=torch.int64)
        self.receive(length, rank)
        data = torch.empty(int(length), dtype=torch.uint8)
        self.receive(data, rank)
        return data

    def send(self, flat: torch.Tensor, rank: int) -> None:
        """Sends a flat tensor to one other worker, which calls `receive` with one of the same length and dtype."""
        self.finish(self.start_send(flat, rank))

    def start_send(self, tensor: torch.Tensor, rank: int) -> dist.Work:
        """Starts sending a tensor; `finish` must follow. Part of what was entered."""
        with self._over(tensor, rank) as (by, flat):
            return by.send(raw_bytes(flat), rank)

    def receive(self, flat: torch.Tensor, rank: int) -> None:
        """Fills `flat` with what worker `rank` sends. Part of the entered collective."""
        with self._over(flat, rank) as (by, memory):
            work = by.receive(raw_bytes(memory), rank)
        work.wait()

    def start_receive(self, parts: Iterator[torch.Tensor], rank: int) -> dist.Work:
        """Starts filling the CPU tensors that `parts` yields, one after the other, with what worker `rank` sends;
        `finish` must follow. Part of what was entered.
        """
        with self._declaring():
            work = self.channel.receive_each((raw_bytes(plain(part).view(-1)) for part in parts), rank)
        return self._run_in_background(work)

    def exchange(self, given: Sequence[torch.Tensor], taken: Sequence[torch.Tensor]) -> None:
        """Sends `given[i]` to worker i, and fills `taken[i]` from it: flat tensors of any lengths. Part of the entered
        collective.
        """
        self.finish(self._exchange(given, taken))

    def start_exchange(self, given: Sequence[torch.Tensor], taken: Sequence[torch.Tensor]) -> dist.Work | None:
        """Starts what `exchange` does; `finish` must follow. Part of the entered collective."""
        work = self._exchange(given, taken)
        return work if work is None else self._run_in_background(work)

    def _exchange(self, given: Sequence[torch.Tensor], taken: Sequence[torch.Tensor]) -> dist.Work | None:
        taken[self.rank].copy_(given[self.rank])  # what a worker has for itself is not sent
        if self.size == 1:
            return None
        ins, outs = ([one[:0] if n == self.rank else one for n, one in enumerate(side)] for side in (given, taken))
        with self._over(given[0]) as (by, _):
            return by.all_to_all([raw_bytes(one) for one in outs], [raw_bytes(plain(one)) for one in ins])

    def gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Returns every worker's flat tensor of one dtype, whose lengths may differ. Part of the entered collective."""
        if self.size == 1:
            return [tensor]
        lengths = torch.zeros(self.size, dtype=torch.int64)
        lengths[self.rank] = tensor.numel()
        self.sum(lengths)
        longest = int(lengths.max())
        if not longest:
            return [tensor] * self.size
        padded = torch.zeros(longest, dtype=tensor.dtype, device=tensor.device)
        padded[: tensor.numel()] = tensor
        everyone = torch.empty(self.size * longest, dtype=tensor.dtype, device=tensor.device)
        self._all_gather(everyone, padded)
        rows = everyone.view(self.size, longest)
        return [row[: int(length)] for row, length in zip(rows, lengths, strict=True)]

    def gather_full(self, sharded: ShardedTensor) -> torch.Tensor:
        """The full tensor of a sharded one, from the workers that hold its shards. Part of the entered collective."""
        full = torch.empty(sharded.shape, dtype=sharded.tensor.dtype, device=sharded.tensor.device)
        everyone = self.gather(sharded.tensor.detach().reshape(-1))
        first = (next(iter(holders.items())) for holders in sharded.cut.blocks.values())
        return assemble(full, ((b.at, b.of(everyone[rank].view(sharded.cut.pieces[rank].shape))) for rank, b in first))

    def gather_json(self, value: Any) -> list[Any]:
        """Returns every worker's JSON value. Part of the entered collective."""
        data = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        rows = enumerate(self.gather(data))
        return [decode_message(bytes(row.tolist()), "part", f"worker {self.names[rank]}") for rank, row in rows]

    def abandon(self, works: Sequence[dist.Work | None]) -> None:
        """Abandons unfinished collectives for good."""
        for work in works:
            if isinstance(work, Operation):
                work.fail(PeerLostError("the collective was abandoned", "see the previous error"))

    # -- the side channel ---------------------------------------------------------------------------------------

    def flag(self, name: str) -> None:
        """Raises a flag that the others can see without a collective."""
        if self._store is not None:
            self._store.set(f"flag/{name}", "1")

    def wait_for_flag(self, name: str) -> None:
        """Waits for a flag for as long as it takes: the launcher ends this process if the flag's owner dies."""
        with HEARTBEAT.waiting():
            while self._store is not None and not self._store.check([f"flag/{name}"]):
                time.sleep(0.05)

    # -- the end ------------------------------------------------------------------------------------------------

    def meet(self) -> None:
        """Waits at the regular end of the script until all workers have ended, so that none is left waiting.

        A worker that still waits for this one in a collective sees that this one has ended, and fails with the reason;
        then this one raises PeerLostError, too.
        """
        if (store := self._store) is None:
            return
        self._side.set_state("ended", self._declared[:2])
        statuses: list[dict[str, Any] | None] = [None]
        # The first worker reads all statuses, and announces when all have ended. Many others look less often.
        pace, looks = max(1.0, self.size / MANY), 0
        try:
            self._side.publish()
            while not all(status is not None and status["state"] in ("ended", "met", "closed") for status in statuses):
                time.sleep(0.02 * pace)
                if self.channel.broken is not None:
                    raise self.channel.broken
                looks += 1
                if self.rank and looks % int(pace):
                    if unless(lambda: self.channel.broken, partial(store.check, ["met"])):
                        break
                    continue
                statuses = unless(lambda: self.channel.broken, self._side.others)
                for rank, status in enumerate(statuses):
                    if status is not None and status["state"] == "failed":
                        raise PeerLostError(
                            f"worker {self.names[self.rank]} had finished, but worker {self.names[rank]} failed",
                            f"see the log of worker {self.names[rank]}",
                        )
            if self.rank == 0:
                store.set("met", "1")
            self._side.set_state("met", self._declared[:2])  # what follows, such as a last checkpoint, all do together
            self._side.publish()
        except RuntimeError:  # the store went with the first worker
            raise PeerLostError(
                f"worker {self.rank} had finished, but worker 0 failed", "see the log of worker 0"
            ) from None

    def close(self, failed: bool) -> None:
        """Releases the group. After a regular end the store, which lives in worker 0, goes last."""
        if self._store is None:
            return
        store, self._store = self._store, None
        with contextlib.suppress(RuntimeError):  # the store went with worker 0
            self._side.set_state("failed" if failed else "closed", self._declared[:2])
            self._side.publish()
            store.set(f"closed/{self.rank}", "1")
            others = [f"closed/{rank}" for rank in range(self.size)]
            with HEARTBEAT.waiting():
                while self.rank == 0 and not (failed or self.channel.broken or store.check(others)):
                    time.sleep(0.02)
        self._release(failed)

    def _release(self, failed: bool) -> None:
        for part in self._parts.values():
            part._release(failed)
        self._parts.clear()
        for channel in self._extra if not failed else ():
            channel.close()
        self._extra.clear()
        if not failed and self._lent is not None:
            take_back(self._lent)
            self._lent.shutdown()
        if not failed and self.channel is not None:
            self.channel.close()
            self.channel = None  # ends gloo's threads
