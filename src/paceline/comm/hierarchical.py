"""Collectives across hosts: shared memory inside a host, gloo between one leader per host.

A host whose workers cannot share memory counts as many hosts of one worker: the same code, over the network alone.
"""

from __future__ import annotations

import ctypes
import functools
import json
import operator
import os
import socket
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from datetime import timedelta
from functools import partial
from ipaddress import ip_address
from itertools import chain
from threading import Lock
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from paceline.base.environment import address_towards, gloo_interface
from paceline.base.network_interfaces import interface_addresses
from paceline.comm import shm_collectives as collectives
from paceline.comm.c10d_arguments import Reduction
from paceline.comm.gloo_tunnel import with_ways
from paceline.comm.link_speed import BandwidthEstimate, HostPair, measure
from paceline.comm.message_reader import decode_message
from paceline.comm.peer_status import Ask, agree, asker, run_in_thread
from paceline.comm.progress_engine import Begun, Final, Steps, last, not_last
from paceline.comm.shared_memory import (
    Condition,
    MismatchError,
    Shared,
    SymmetricBuffer,
    host_key,
    map_together,
    raw_bytes,
)
from paceline.errors import PeerLostError, UsageError, first_line

FOREVER = timedelta(days=7)  # Paceline has its own deadlines: gloo's only has to be longer than any legitimate wait
MESH = 64  # up to this number of workers on several hosts, all connect with all from the start
CHUNK = 1 << 17  # least bytes of a piece that goes to another worker
IN_FLIGHT = 8  # pieces that are under way at a time
# Bytes up to which each leader sends its tensor to all: an all-reduce takes twice as many messages in a row.
FEW = 1 << 12
ROOM = 504  # bytes that may travel with a fingerprint, among up to MESH workers
AT_A_TIME = 0.01  # seconds that a piece may take
Start = Callable[..., dist.Work]  # starts a collective of some tensors


class LinkError(RuntimeError):
    """Raised when gloo has lost a peer."""


class Gloo:
    """A gloo group that is used without ever blocking in it.

    gloo's threads let go of a collective a moment after it is done. If theirs were the last references to its tensors,
    they would need the interpreter to release these: at a fork (a loader's child then hangs, with CPython 3.11) or at
    the interpreter's end (which aborts). So gloo gets aliases, which this class holds until nothing else does.
    """

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        size: int,
        devices: Sequence[Any],
        threads: int = IN_FLIGHT,
        room: int = ROOM,
    ) -> None:
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        # For connecting, to which all have come. gloo waits five times as long for a peer that does not connect.
        options._timeout = store.timeout / 5  # type: ignore[attr-defined]
        options._devices = list(devices)
        options._threads = threads  # each handles one collective: with two of them a link of 20 ms was two thirds full
        self._store = with_ways(store)
        self.group: Any = dist.ProcessGroupGloo(self._store, rank, size, options)
        self.group.set_timeout(FOREVER)
        self.rank, self.size = rank, size
        self.flow = BandwidthEstimate()
        self.chunk, self.room = CHUNK, room if size <= MESH else 0
        self._under, self._sent, self._since = 0, 0.0, 0.0  # collectives under way, bytes sent, start time
        self._abandoned = False
        self._aliases: deque[torch.Tensor] = deque()

    def pace(self, rate: float, latency: float) -> None:
        """Fits the size of pieces to links of `rate` bytes a second and `latency` seconds per message.

        On a fast link many small pieces cost more than they help, and on a long one they leave it empty. All workers
        call it with the same numbers.
        """
        self.chunk = max(CHUNK, int(rate * max(AT_A_TIME, 4 * latency / IN_FLIGHT)) // CHUNK * CHUNK)

    def run(self, start: Start, *tensors: torch.Tensor, sent: float = 0.0) -> Steps:
        """Starts a collective of these tensors, with `sent` bytes of this worker, and waits for it."""
        yield from self.stream(start, [tensors], sent)

    def stream(self, start: Start, pieces: Sequence[Sequence[torch.Tensor]], sent: float = 0.0) -> Steps:
        """Runs several collectives in order, some of them under way at a time; otherwise as `run`.

        Data that travels at once both ways over one connection leaves a third of a link of 100 Mbit/s empty.
        """
        under = deque[dist.Work]()
        self._begin()
        try:
            for piece in [*pieces, *[None] * IN_FLIGHT]:
                if under and (piece is None or len(under) == IN_FLIGHT):
                    until: Condition = under[0].is_completed
                    yield Begun(until) if piece is None else until
                    under.popleft().wait()
                if piece is not None:
                    aliases = [tensor.detach() for tensor in piece]
                    self._aliases += aliases
                    under.append(start(*aliases))
        except RuntimeError as error:
            raise LinkError(str(error)) from error
        finally:
            if under:
                self._abandon()
        self._end(sent)

    def _begin(self) -> None:
        self._release()
        if not self._under:
            self._sent, self._since = 0.0, time.perf_counter()
        self._under += 1

    def _end(self, sent: float = 0.0) -> None:
        self._release()
        self._under -= 1
        self._sent += sent
        if not self._under:
            self.flow.note(self._sent, time.perf_counter() - self._since)

    def in_turns(self, parts: Iterable[Steps]) -> Steps:
        """Runs several generators of collectives side by side: while some wait, others encode and decode.

        gloo needs the same order of collectives on all leaders. So which generator goes on next depends only on how
        often each has waited.
        """
        under = deque[tuple[Steps, Condition]]()
        self._begin()
        for part in chain(parts, [None]):
            if part is not None:
                _go_on(part, under)
            while len(under) >= IN_FLIGHT or (part is None and under):
                one, until = under.popleft()
                ends = part is None and all(isinstance(other, Final) for _, other in under)
                yield until if ends else partial(until)  # hides that it is a Final
                _go_on(one, under)
        self._end()

    def _release(self) -> None:
        """Releases the aliases that gloo has let go of."""
        while self._aliases and self._aliases[0]._use_count() == 1:  # type: ignore[attr-defined]
            self._aliases.popleft()

    def _abandon(self) -> None:
        """Keeps this group for ever: its threads may hang in an abandoned collective, and its destructor waits for
        them.
        """
        if not self._abandoned:
            self._abandoned = True
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self))

    def same(self, fp: int, flat: torch.Tensor | None = None) -> Any:
        """Raises MismatchError unless all workers have the same fingerprint.

        gloo ends the process if sizes differ, so this message has one size on all. Up to `room` bytes travel along:
        returns the `flat` of all workers, as rows.
        """
        row = torch.zeros(1 + self.room // 8, dtype=torch.int64)
        everyone, row[0] = torch.empty(self.size, len(row), dtype=torch.int64), fp
        data = row.new_empty(0) if flat is None else flat
        row[1:].view(torch.uint8)[: data.nbytes] = raw_bytes(data)
        yield from self.run(self.group._allgather_base, everyone.view(-1), row)
        if bool((everyone[:, 0] != fp).any()):
            raise MismatchError
        return everyone.view(torch.uint8)[:, 8 : 8 + data.nbytes].contiguous().view(data.dtype) if data.nbytes else None

    def gather_same(self, fp: int, flat: torch.Tensor, answer: Steps | None = None) -> Any:
        """Checks the fingerprint as `same` does, unless `answer` has done so, and gathers all workers' `flat` as rows.

        Small tensors travel in the same message.
        """
        if answer is None and 0 < flat.nbytes <= self.room:
            return (yield from self.same(fp, flat))
        yield from answer or self.same(fp)
        return (yield from self.all_gather(flat))

    def all_gather(self, flat: torch.Tensor, into: torch.Tensor | None = None) -> Any:
        """Gathers the flat tensor of all workers, of one length, as rows; in the memory of `into`, if it is given."""
        parts = raw_bytes(flat).split(self.chunk) if flat.nbytes else (raw_bytes(flat),)
        taken = _room(self.size, parts, into)
        pieces = [(t.view(-1), p) for t, p in zip(taken, parts, strict=True)]
        yield from self.stream(self.group._allgather_base, pieces, (self.size - 1) * flat.nbytes)
        # An empty tensor has strides that no view of another dtype takes.
        return _joined(taken, into).view(flat.dtype) if flat.nbytes else flat.new_empty(self.size, 0)

    def all_reduce(self, flat: torch.Tensor, op: Any = dist.ReduceOp.SUM) -> Steps:
        """Reduces `flat` in place on all workers."""
        options = c10d.AllreduceOptions()
        options.reduceOp = op
        sent = 2 * flat.nbytes * (self.size - 1) / self.size
        yield from self.run(lambda alias: self.group.allreduce([alias], options), flat, sent=sent)

    def broadcast(self, flat: torch.Tensor, root: int) -> Steps:
        """Overwrites `flat` on all workers with that of `root`."""
        options = c10d.BroadcastOptions()
        options.rootRank = root
        yield from self.run(lambda alias: self.group.broadcast([alias], options), raw_bytes(flat))

    def all_to_all(self, rows: torch.Tensor, into: torch.Tensor | None = None) -> Any:
        """Sends row i to worker i; returns a row of the same length from each worker, in the memory of `into`, if it is
        given.
        """
        parts = [part.contiguous() for part in raw_bytes(rows).view(self.size, -1).split(self.chunk, 1)]
        taken, options = _room(self.size, [part[0] for part in parts], into), c10d.AllToAllOptions()
        pieces = [(t.view(-1), p.view(-1)) for t, p in zip(taken, parts, strict=True)]
        yield from self.stream(lambda *pair: self.group.alltoall_base(*pair, [], [], options), pieces, rows[1:].nbytes)
        return _joined(taken, into).view(rows.dtype)

    def exchange(self, given: torch.Tensor, gives: Sequence[int], takes: Sequence[int], times: int = 1) -> Any:
        """Exchanges flat bytes: `gives[i]` of them go to worker i, and `takes[i]` come from it. Returns those that
        came.

        A measurement repeats it `times` times.
        """
        taken, options = torch.empty(sum(takes), dtype=torch.uint8), c10d.AllToAllOptions()
        start = partial(self.group.alltoall_base, output_split_sizes=[*takes], input_split_sizes=[*gives], opts=options)
        yield from self.stream(start, [(taken, given)] * times)
        return taken


def _go_on(part: Steps, under: deque[tuple[Steps, Condition]]) -> None:
    """Advances a generator to where it waits next, and queues it."""
    with suppress(StopIteration):
        under.append((part, next(part)))


def _from(first: Condition, rest: Steps) -> Steps:
    yield first
    yield from rest


def _room(size: int, parts: Sequence[torch.Tensor], into: torch.Tensor | None) -> list[torch.Tensor]:
    """Memory for what comes from `size` workers, of bytes like each of these parts of a row."""
    if into is not None and len(parts) == 1:
        return [raw_bytes(into).view(size, -1)]
    return [torch.empty(size, len(part), dtype=torch.uint8) for part in parts]


def _joined(parts: list[torch.Tensor], into: torch.Tensor | None) -> torch.Tensor:
    """The rows that came in parts."""
    if len(parts) == 1:
        return parts[0]
    return torch.cat(parts, 1, out=None if into is None else raw_bytes(into).view(len(parts[0]), -1))


class Leaders(Protocol):
    """The first workers of hosts, with the collectives of `Gloo` that codecs use."""

    rank: int
    size: int
    chunk: int

    def in_turns(self, parts: Iterable[Steps]) -> Steps:
        """Runs several generators of collectives side by side."""

    def all_gather(self, flat: torch.Tensor, into: torch.Tensor | None = None) -> Any:
        """Gathers the flat tensor of all workers, of one length, as rows; in the memory of `into`, if it is given."""

    def all_reduce(self, flat: torch.Tensor) -> Steps:
        """Sums `flat` in place on all workers."""

    def broadcast(self, flat: torch.Tensor, root: int) -> Steps:
        """Overwrites `flat` on all workers with that of `root`."""

    def all_to_all(self, rows: torch.Tensor, into: torch.Tensor | None = None) -> Any:
        """Sends row i to worker i; returns a row of the same length from each worker, in the memory of `into`, if it is
        given.
        """


Between = Callable[[Leaders, torch.Tensor], Steps]  # sums a tensor over the first workers of hosts, in place


class HierarchicalTransport:
    """The hosts of one group: which worker is where, what connects them, and the collectives over both levels.

    The workers of one host share memory (`shared`; None for a lone worker). Its first rank is the leader; `leaders`
    connects it with the other leaders if there are `several` hosts. Then `gloo` connects all workers, if these are few.
    If they are many, two workers connect when they send each other something, and all when they first exchange data
    with all.
    """

    def __init__(self, store: dist.Store, rank: int, size: int, address: str, given_up: Callable[[], bool]) -> None:
        self.rank, self.size = rank, size
        self._ask = asker(store, given_up, size)
        report = json.dumps([os.getpid(), f"{_cores():x}", address, host_key() if size > 1 else ""])
        agreed = agree(self._ask, store, "host", rank, range(size), report, _find_hosts)
        hosts, elsewhere = decode_message(agreed.encode(), "hosts", "the first worker")
        self.address = _seen_from_others(address, elsewhere)
        self.shared: Shared | None = None
        local_ranks = next((host for host in hosts if rank in host), None)
        if local_ranks is not None:
            host_reports = _read_host_reports(local_ranks, store.multi_get([f"host/{r}" for r in local_ranks]))
            pids, cores = zip(*((pid, int(cores, 16)) for pid, cores, *_ in host_reports), strict=True)
            size_here, otherwise = Shared.size(len(local_ranks)), "messages between them go over gloo"
            name, reserved = f"memory/{local_ranks[0]}", Shared.reserved(len(local_ranks))
            mapped = map_together(self._ask, store, name, local_ranks, rank, size_here, otherwise, reserved)
            if mapped is not None:
                all_cores = functools.reduce(operator.or_, cores)
                self.shared = Shared(*mapped, local_ranks, rank, pids, all_cores.bit_count())
        # Everybody learns whether it worked: all must see the same hosts.
        firsts = [host[0] for host in hosts]
        sharing = "1" if self.shared is not None else "0"
        if firsts and local_ranks != [*range(size)]:
            sharing = agree(self._ask, store, "shares", rank, firsts, sharing, "".join)
        joint = [host for host, shares in zip(hosts, sharing, strict=bool(hosts)) if shares == "1"]
        alone = {*range(size)}.difference(*joint)
        self.hosts = sorted(joint + [[r] for r in alone])
        self._locations = {
            r: (number, host_rank) for number, host in enumerate(self.hosts) for host_rank, r in enumerate(host)
        }
        self.host_index, _ = self._locations[rank]
        self.several = len(self.hosts) > 1
        self.gloo: Gloo | None = None
        self.leaders: Gloo | None = None
        self._ahead: Gloo | None = None
        self._mesh: Gloo | None = None
        self._store, self._arenas, self._devices = store, 0, list[Any]()
        self._pairs: dict[int, Future[Gloo]] = {}
        self._meet, self._moving = asker(store, given_up, size, for_ever=True), Lock()
        if self.several:
            self._connect(store)

    def _connect(self, store: dist.Store) -> None:
        """Connects with other hosts. Raises UsageError if an interface is missing, PeerLostError if a peer cannot be
        reached.
        """
        self._devices = _devices(self._ask, store, self.rank, self.size, self.address)
        try:
            if len(self.hosts) < self.size <= MESH:
                self.gloo = self._all()
            if self.is_leader:
                who = self.host_index, len(self.hosts), self._devices
                self.leaders = Gloo(dist.PrefixStore("leaders", store), *who)
                self._ahead = Gloo(dist.PrefixStore("ahead", store), *who, room=0)
            if len(self.hosts) == self.size:
                self.gloo = self.leaders
            self._mesh = self.gloo
        except RuntimeError as error:
            interfaces = ", ".join(name for _, name in socket.if_nameindex())
            over = f"the interface {gloo_interface()}" if gloo_interface() else f"the address {self.address or '?'}"
            raise PeerLostError(
                f"worker {self.rank} could not connect to workers of other hosts from {over} ({first_line(error)})",
                "let the hosts reach each other on all ports, and set GLOO_SOCKET_IFNAME on each host to the "
                f"interface that the others can reach; this host has {interfaces}",
            ) from error

    def _all(self) -> Gloo:
        return Gloo(dist.PrefixStore("all", self._store), self.rank, self.size, self._devices)

    def reach(self, rank: int) -> tuple[Any, int]:
        """Returns gloo's group of this worker and another one, and that worker's rank in it.

        Blocks until both have asked for it.
        """
        with self._moving:
            known = rank in self._pairs
            pair = self._pairs.setdefault(rank, Future())
        if not known:
            try:
                pair.set_result(self._pair(rank))
            except (RuntimeError, PeerLostError) as error:
                pair.set_exception(error)
        return pair.result().group, int(self.rank < rank)

    def _pair(self, rank: int) -> Gloo:
        name = f"pair/{min(self.rank, rank)}/{max(self.rank, rank)}"
        self._store.set(f"{name}/{self.rank}", "1")
        self._meet(f"{name}/{rank}")  # a thread that waits in gloo would keep this process from the store
        return Gloo(dist.PrefixStore(f"{name}/gloo", self._store), int(self.rank > rank), 2, self._devices, threads=1)

    @property
    def is_leader(self) -> bool:
        """Whether this worker is the leader of its host."""
        return bool(self.hosts[self.host_index][0] == self.rank)

    def locate(self, rank: int) -> tuple[int, int]:
        """The host of a rank, and its index among that host's workers."""
        return self._locations[rank]

    def arena(self, size: int) -> list[torch.Tensor] | None:
        """Fresh shared memory of `size` bytes for each worker of this host, as flat bytes in rank order; None if there
        is none.

        Collective among the workers of this host.
        """
        if self.shared is None:
            return None
        self._arenas += 1
        ranks, step = self.shared.ranks, -(-size // 4096) * 4096
        name, otherwise = f"arena/{ranks[0]}/{self._arenas}", "gradients are copied before they are summed"
        mapped = map_together(self._ask, self._store, name, ranks, self.rank, step * len(ranks), otherwise)
        if mapped is None:
            return None
        memory, file = mapped
        os.close(file)
        rows_of_workers = torch.frombuffer(memory, dtype=torch.uint8).view(len(ranks), step)
        return [row[:size] for row in rows_of_workers.unbind(0)]

    def prefetch_check(self, fp: int, size: int) -> Steps | None:
        """Starts to check now that the other leaders will come to a sum with this fingerprint, ahead of the sum itself.

        On a long link the answer takes as long as a bucket. Returns the steps that receive it. Returns None if there is
        nobody to ask, or if the sum is so small that it travels with the question. All workers ask for the same sums,
        in the order in which these are made.
        """
        if self._ahead is None or self.leaders is None or 0 < size <= self.leaders.room:
            return None
        answer = self._ahead.same(fp)
        return _from(next(answer), answer)

    # -- collectives --------------------------------------------------------------------------------------------

    def barrier(self, fp: int) -> Steps:
        """Waits until all workers have come to it."""
        if self.shared is not None:
            yield from collectives.barrier(self.shared, fp)
        if self.several:
            if self.leaders is not None:
                yield from self.leaders.same(fp)
            if self.shared is not None:
                yield from collectives.barrier(self.shared, fp)

    def all_reduce(
        self,
        flat: torch.Tensor,
        reduction: Reduction,
        fp: int,
        arena: SymmetricBuffer | None = None,
        between: Between | None = None,
        answer: Steps | None = None,
    ) -> Steps:
        """Reduces `flat` in place on all workers.

        `arena` has the tensors of this host's workers in shared memory, one of which is `flat`. `between` replaces the
        sum over leaders. `answer` is what `prefetch_check` returned.
        """
        shared, asked = self.shared, fp
        fp ^= arena is not None  # workers of a host act alike; another host may have no memory to share
        if not self.several and shared is not None:
            if arena is not None:
                yield from collectives.all_reduce_in_place(shared, arena, reduction.of, fp)
            else:
                yield from collectives.all_reduce(shared, flat, reduction.of, fp)
            return
        if shared is not None:
            if arena is not None:
                yield from collectives.all_reduce_in_place(shared, arena, reduction.of, fp, into=[0])
            else:
                yield from collectives.reduce(shared, flat, 0, reduction.of, fp)
        if self.leaders is not None:
            steps = self._among_leaders(flat, reduction, asked, between, answer)
            # Within a host a broadcast follows. All hosts act alike, or some would be ahead of others.
            yield from steps if len(self.hosts) == self.size else not_last(steps)
        if shared is not None:
            yield from collectives.broadcast(shared, flat, 0, fp)

    def _among_leaders(
        self, flat: torch.Tensor, reduction: Reduction, fp: int, between: Between | None, answer: Steps | None
    ) -> Steps:
        assert self.leaders is not None
        if between is None and (reduction.gloo is None or 0 < flat.nbytes <= FEW):
            rows = yield from self.leaders.gather_same(fp, flat, answer)
            flat.copy_(functools.reduce(reduction.of, rows.unbind(0)))
            return
        yield from answer or self.leaders.same(fp)
        if between is None:
            yield from last(self.leaders.all_reduce(flat, reduction.gloo))
        else:
            yield from between(self.leaders, flat)

    def broadcast(self, flat: torch.Tensor, root: int, fp: int) -> Steps:
        """Overwrites `flat` on all workers with that of `root`."""
        host, host_rank = self.locate(root)
        if self.shared is not None and host == self.host_index:
            yield from collectives.broadcast(self.shared, flat, host_rank, fp)
        if self.leaders is not None:
            if 0 < flat.nbytes <= self.leaders.room:
                flat.copy_((yield from self.leaders.same(fp, flat))[host])
            else:
                yield from self.leaders.same(fp)
                yield from self.leaders.broadcast(flat, host)
        if self.shared is not None and host != self.host_index:
            yield from collectives.broadcast(self.shared, flat, 0, fp)

    def all_gather(self, outs: Sequence[torch.Tensor], flat: torch.Tensor, fp: int) -> Steps:
        """Gathers the `flat` of all workers into `outs`, one tensor per rank; without `outs` this worker only gives."""
        if not self.several and self.shared is not None:
            yield from collectives.all_gather(self.shared, outs, flat, fp)
            return
        widest = max(map(len, self.hosts))
        block = torch.empty(widest, len(flat), dtype=flat.dtype)
        gathered = torch.empty(len(self.hosts), widest, len(flat), dtype=flat.dtype)
        if self.shared is not None:
            yield from collectives.all_gather(self.shared, block[: self.shared.count].unbind(0), flat, fp)
        else:
            block[0].copy_(flat)
        if not self.several:  # a lone worker
            gathered = block[None]
        elif self.leaders is not None:
            rows = yield from self.leaders.gather_same(fp, block.view(-1))
            gathered.copy_(rows.view_as(gathered))
        if self.shared is not None:
            yield from collectives.broadcast(self.shared, gathered.view(-1), 0, fp)
        for rank, out in enumerate(outs):
            host, host_rank = self.locate(rank)
            out.copy_(gathered[host, host_rank])

    def reduce_scatter(
        self,
        out: torch.Tensor,
        parts: Sequence[torch.Tensor],
        reduction: Reduction,
        fp: int,
        arena: SymmetricBuffer | None = None,
    ) -> Steps:
        """Reduces the `parts` of all workers; `out` receives this worker's part.

        `arena` has the tensors of this host's workers in shared memory, which contain `parts` and `out`.
        """
        if not self.several and self.shared is not None:
            if arena is not None:
                yield from collectives.reduce_scatter_in_place(self.shared, arena, reduction.of, fp ^ 1)
            else:
                yield from collectives.reduce_scatter(self.shared, out, parts, reduction.of, fp)
            return
        shared, joined = self.shared, torch.cat(list(parts))
        each, widest = len(out), max(map(len, self.hosts))
        if not self.several or not each or len(self.hosts) * widest >= 2 * self.size:  # one host has nearly all
            yield from self.all_reduce(joined, reduction, fp)
            out.copy_(joined[self.rank * each : (self.rank + 1) * each])
            return
        row = torch.empty(widest * each, dtype=out.dtype)  # a host's stretches, one after another
        if shared is not None:
            yield from collectives.reduce(shared, joined, 0, reduction.of, fp)
        if self.leaders is not None:
            yield from self.leaders.same(fp)
            rows = torch.zeros(len(self.hosts), widest, each, dtype=out.dtype)
            for rank, part in enumerate(joined.split(each)):
                rows[self.locate(rank)].copy_(part)
            taken = yield from self.leaders.all_to_all(rows.view(len(self.hosts), -1))
            row = functools.reduce(reduction.of, taken.unbind(0))
        if shared is not None:
            yield from collectives.broadcast(shared, row, 0, fp)
        out.copy_(row.view(widest, each)[self.locate(self.rank)[1]])

    def all_to_all(self, outs: Sequence[torch.Tensor], ins: Sequence[torch.Tensor], fp: int) -> Steps:
        """Exchanges flat bytes of any lengths. Between hosts every pair exchanges its own."""
        if not self.several:
            if self.shared is not None:
                yield from collectives.all_to_all(self.shared, outs, ins, fp)
            else:  # a lone worker
                collectives.check_lengths(collectives.lengths(outs, ins)[None])
                outs[0].copy_(ins[0])
            return
        if self._mesh is None:
            yield from self.barrier(fp)  # as in `_pair`
            self._mesh = yield from in_thread(self._all)
        net = self._mesh
        collectives.check_lengths((yield from net.gather_same(fp, collectives.lengths(outs, ins))))
        takes = [len(out) for out in outs]
        taken = yield from net.exchange(torch.cat(list(ins)), [len(part) for part in ins], takes)
        for out, part in zip(outs, taken.split(takes), strict=True):
            out.copy_(part)

    def measure(
        self, pairings: Sequence[Sequence[HostPair]], results: dict[HostPair, tuple[float, float]], fp: int
    ) -> Steps:
        """Measures links as `link_speed.measure` does; workers that lead no host take no part."""
        if self.leaders is not None:
            yield from self.leaders.same(fp)
            yield from measure(self.leaders, pairings, results)

    def close(self) -> None:
        """Releases the shared memory."""
        if self.shared is not None:
            self.shared.close()


def _cores() -> int:
    """The cores that this worker may use, as the bits of a number."""
    return sum(1 << core for core in os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1


def _find_hosts(answers: Sequence[str]) -> str:
    """The hosts that all workers' reports describe, as JSON.

    These are the ranks of each host that has several, and the first address that is not a loopback address.
    """
    reports = _read_host_reports(range(len(answers)), [one.encode() for one in answers])
    _, _, addresses, keys = zip(*reports, strict=True)
    hosts: dict[str, list[int]] = {}
    for rank, key in enumerate(keys):
        hosts.setdefault(key, []).append(rank)
    several = [host for key, host in hosts.items() if key and len(host) > 1]
    return json.dumps([several, next((a for a in addresses if a and not _is_loopback(a)), "")])


def _read_host_reports(ranks: Iterable[int], reports: Iterable[bytes]) -> list[tuple[int, str, str, str]]:
    """Decodes the workers' reports: pid, cores, address, and a key that workers share who can share memory."""
    return [decode_message(report, "host", f"worker {rank}") for rank, report in zip(ranks, reports, strict=True)]


def in_thread(call: Callable[[], Any]) -> Generator[Condition, None, Any]:
    """Runs a call that blocks in gloo in a thread, which may be left behind."""
    ended = run_in_thread(call)
    yield ended.done
    try:
        return ended.result()
    except RuntimeError as error:
        raise LinkError(str(error)) from error


def _devices(ask: Ask, store: dist.Store, rank: int, size: int, address: str) -> list[Any]:
    """Opens the network devices that gloo listens on.

    Everybody learns whether all could open theirs, or the rest would wait for ever.
    """
    gloo, devices, error = dist.ProcessGroupGloo, [], ""
    try:
        if names := gloo_interface():
            devices = [gloo.create_device(interface=name) for name in names.split(",")]
        else:
            devices = [gloo.create_device(hostname=address) if address else gloo.create_default_device()]
    except RuntimeError as reason:
        error = f"GLOO_SOCKET_IFNAME={gloo_interface()}" if gloo_interface() else first_line(reason)
        error += f"\n{', '.join(name for _, name in socket.if_nameindex())}"
    first_error = agree(ask, store, "device", rank, range(size), error, _first_error)
    if first_error:
        other, what, interfaces = first_error.split("\n")
        store.set(f"heard/{rank}", "1")
        if rank == 0:
            with suppress(PeerLostError):  # the store goes with it
                ask(*(f"heard/{reader}" for reader in range(size)))
        raise UsageError(
            f"worker {other} found no network interface to reach other hosts ({what})",
            f"set GLOO_SOCKET_IFNAME on its host to the interface that the others can reach; it has {interfaces}",
        )
    return devices


def _first_error(errors: Sequence[str]) -> str:
    return next((f"{rank}\n{error}" for rank, error in enumerate(errors) if error), "")


def _seen_from_others(address: str, elsewhere: str) -> str:
    """The address at which other hosts reach this one.

    A host's file often gives its own name a loopback address, which is useless to other hosts. Then the address on the
    way to a worker `elsewhere` is used.
    """
    return own_address(elsewhere, 1) if elsewhere and address and _is_loopback(address) else address


def _is_loopback(address: str) -> bool:
    try:
        return bool(ip_address(address.partition("%")[0]).is_loopback)
    except ValueError:  # it is no address: who connects to it says so
        return False


def own_address(host: str, port: int) -> str:
    """The address of this machine at which peers on the way to `host` can reach it. Empty if unknown."""
    with suppress(OSError):
        return address_towards(host, port, socket.AF_UNSPEC)
    return ""


def interface_of(address: str) -> str:
    """The name of the interface that has an IPv4 address. Empty if there is none."""
    return next((name for name, its_address in interface_addresses() if its_address == address), "")
