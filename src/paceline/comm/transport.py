"""Moves flat tensors among the workers of a group; notices dead peers while it waits, and says what is wrong.

Paceline's own steps call it through communicator.py; torch's calls come through c10d_backend.py, which translates them.
A collective that a peer enters differently, or never because it died, ends with an error that says so; `interrupt` ends
them all.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from paceline.base.environment import gloo_interface
from paceline.base.flight_recorder import FLIGHT_RECORDER
from paceline.comm.c10d_arguments import CollectiveRequest, Reduction
from paceline.comm.hierarchical import Between, HierarchicalTransport, LinkError, own_address
from paceline.comm.link_speed import HostPair
from paceline.comm.nccl import Nccl
from paceline.comm.peer_status import PATIENCE, PeerStatus, asker, call_site, unless
from paceline.comm.point_to_point import Mailbox
from paceline.comm.progress_engine import ENGINE, Operation, Steps
from paceline.comm.shared_memory import MismatchError, SymmetricBuffer
from paceline.errors import PeerLostError

_DTYPES = {str(dtype): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}
_NUMBERS = {_DTYPES[name]: number for number, name in enumerate(sorted(_DTYPES))}
_channels: list[Transport] = []
_delays: list[Callable[[str], bool]] = []
_KEPT, _SMALL = 64, 64  # how many of the last collectives to keep alive, and elements of each at most


class CallOptions(NamedTuple):
    """How a collective starts and ends: what it calls at its end, whether the caller goes on meanwhile, and its
    future's value.
    """

    then: Callable[[], None] | None = None
    asynchronous: bool = True
    outcome: Any = ()


PLAIN = CallOptions()


class Transport:
    """Connects worker `rank` of `size` with its peers, through `hosts`, `mailbox` and, when those are stuck, `side`.

    Until all have come it can be `given_up`. `declared` is (name, call site, kind) of what the caller is doing, for
    errors and the ledger; without it a collective describes itself. `ledger` has, per kind of collective, its number,
    bytes and seconds waited. `label` is the group's name in the flight recorder, which `records` its collectives.
    """

    def __init__(
        self, store: dist.Store, rank: int, size: int, timeout: timedelta, given_up: Callable[[], bool] = lambda: False
    ) -> None:
        self.rank, self.size = rank, size
        self.timeout = timeout.total_seconds()
        self.broken: Exception | None = None
        self.declared: tuple[str, str, str] | None = None
        self.ledger: dict[str, list[float]] = {}
        self.sequence, self.label, self.records = 0, "torch", True
        self._arenas: dict[int, SymmetricBuffer] = {}
        # DDP's join hands a Work to compiled code and drops it: without its Python half it could not be waited for.
        self._kept: deque[Operation] = deque(maxlen=_KEPT)
        self.side = PeerStatus(store, rank, size)

        def lost() -> bool:
            return self.broken is not None or given_up()

        self.hosts = HierarchicalTransport(store, rank, size, _own_address(store), lost)
        self.mailbox = Mailbox(self.hosts)
        named = dist.PrefixStore("nccl", store)
        self.nccl = Nccl(named, asker(named, lost, size), rank, size, self.hosts.address)
        shared = self.hosts.shared
        self.crowded = shared is None or shared.crowded
        _channels.append(self)

    # -- collectives: tensors are flat, contiguous and on the CPU; `request` tells them apart, and names them -------

    def barrier(self, options: CallOptions = PLAIN) -> Operation:
        """Waits until all workers have come to it."""
        return self.start(CollectiveRequest("barrier", torch.uint8), 0, 0, self.hosts.barrier, options)

    def all_reduce(
        self,
        flat: torch.Tensor,
        reduction: Reduction,
        request: CollectiveRequest | None = None,
        options: CallOptions = PLAIN,
        root: int = -1,
        between: Between | None = None,
    ) -> Operation:
        """Reduces `flat` in place on all workers.

        If only worker `root` needs the result, all pass the same `root`. `between` hosts: as in
        `HierarchicalTransport.all_reduce`.
        """
        arena = self.in_arena(flat)
        detail = int(reduction.op) * (self.size + 1) + root + 1
        return self.start(
            request or CollectiveRequest("all_reduce", flat.dtype),
            len(flat),
            detail,
            lambda fp: self.hosts.all_reduce(
                flat, reduction, fp, arena, between, self.hosts.prefetch_check(fp, flat.nbytes)
            ),
            options,
        )

    def reduce_scatter(
        self,
        out: torch.Tensor,
        parts: Sequence[torch.Tensor],
        reduction: Reduction,
        request: CollectiveRequest | None = None,
        options: CallOptions = PLAIN,
        full: torch.Tensor | None = None,
    ) -> Operation:
        """Reduces the `parts` of all workers, one tensor like `out` per worker; `out` receives this worker's part.

        `full` is the tensor that the parts are stretches of, if `out` is one of them.
        """
        arena = None if full is None else self.in_arena(full)
        return self.start(
            request or CollectiveRequest("reduce_scatter", out.dtype),
            len(out),
            int(reduction.op),
            lambda fp: self.hosts.reduce_scatter(out, parts, reduction, fp, arena),
            options,
        )

    def broadcast(
        self, flat: torch.Tensor, root: int, request: CollectiveRequest | None = None, options: CallOptions = PLAIN
    ) -> Operation:
        """Overwrites `flat` on all workers with that of `root`."""
        request = request or CollectiveRequest("broadcast", flat.dtype)
        return self.start(request, len(flat), root, lambda fp: self.hosts.broadcast(flat, root, fp), options)

    def all_gather(
        self,
        outs: Sequence[torch.Tensor],
        flat: torch.Tensor,
        request: CollectiveRequest | None = None,
        options: CallOptions = PLAIN,
        root: int = -1,
    ) -> Operation:
        """Gathers the `flat` of all workers into `outs`, which is empty on workers that only give to `root`."""
        request = request or CollectiveRequest("all_gather", flat.dtype)
        return self.start(request, len(flat), root, lambda fp: self.hosts.all_gather(outs, flat, fp), options)

    def all_to_all(
        self, outs: Sequence[torch.Tensor], ins: Sequence[torch.Tensor], options: CallOptions = PLAIN
    ) -> Operation:
        """Sends the flat bytes `ins[i]` to worker i, and fills `outs[i]` from it. Amounts may differ."""
        request = CollectiveRequest("all_to_all", torch.uint8)
        operation = self.start(request, 0, 0, lambda fp: self.hosts.all_to_all(outs, ins, fp), options)
        self.ledger[operation.kind][1] += sum(map(len, ins))
        return operation

    def measure(
        self, pairings: Sequence[Sequence[HostPair]], results: dict[HostPair, tuple[float, float]]
    ) -> Operation:
        """Measures the links between pairs of hosts, as `link_speed.measure` does."""
        return self.start(
            CollectiveRequest("links", torch.uint8), 0, 0, lambda fp: self.hosts.measure(pairings, results, fp)
        )

    def start(
        self,
        request: CollectiveRequest,
        numel: int,
        detail: int,
        make: Callable[[int], Steps],
        options: CallOptions = PLAIN,
    ) -> Operation:
        """Starts a collective of `numel` elements; waits for its end unless it is asynchronous.

        `make` makes its steps from the fingerprint. This tells apart kind, size, dtype, `detail` (root, reduction) and
        the declared name.
        """
        self.sequence += 1
        kind, dtype = request.kind, request.dtype
        name_hash, kind_hash = 0, zlib.crc32(kind.encode())
        if self.declared is not None:
            name, site, kind = self.declared
            name_hash = zlib.crc32(name.encode())
        else:
            name, site = f"{kind} of {numel} {str(dtype).removeprefix('torch.')}", call_site()
        fp = hash((kind_hash, numel, _NUMBERS[dtype], detail, name_hash)) & 0x3FFFFFFF
        steps = make(fp) if options.then is None else _followed(make(fp), options.then)
        operation = Operation(self, steps, kind, name, site, self.sequence)
        operation.outcome = options.outcome
        if options.asynchronous and numel <= _SMALL:
            self._kept.append(operation)
        self._begin(operation, (id(self), "collectives"), numel * dtype.itemsize, options.asynchronous)
        return operation

    # -- messages: flat bytes ---------------------------------------------------------------------------------------

    def send(self, data: torch.Tensor, rank: int, tag: int = 0) -> Operation:
        """Sends flat bytes to worker `rank`."""
        steps = self.mailbox.send(data, rank, tag)
        operation = self._message(f"send to worker {rank}", ("send", rank), steps, len(data))
        if not operation.done:  # a sender goes on computing, and waits for nothing
            ENGINE.in_background()
        return operation

    def receive(
        self, data: torch.Tensor, rank: int | None, tag: int = 0, then: Callable[[], None] | None = None
    ) -> Operation:
        """Fills `data` from worker `rank`, or from any other; the operation's `source` is the sender's rank."""
        others = [other for other in range(self.size) if other != self.rank] if rank is None else [rank]
        name, queue = ("recv from any worker", -1) if rank is None else (f"recv from worker {rank}", rank)
        source: list[int] = []

        def steps() -> Steps:
            source.append((yield from self.mailbox.receive(data, others, tag)))
            if then is not None:
                then()

        operation = self._message(name, ("recv", queue, tag), steps(), 0)
        operation.source = source
        return operation

    def receive_each(self, parts: Iterable[torch.Tensor], rank: int) -> Operation:
        """Fills the flat bytes that `parts` yields, one after the other, from worker `rank`."""

        def steps() -> Steps:
            for data in parts:
                yield from self.mailbox.receive(data, [rank], 0)

        operation = self._message(f"recv from worker {rank}", ("recv", rank, 0), steps(), 0)
        operation.hurries = False
        return operation

    def _message(self, name: str, queue: tuple[Any, ...], steps: Steps, size: int) -> Operation:
        """Starts a message that hands over `size` bytes. Messages of one `queue` go in order."""
        site, kind = (call_site(), "message") if self.declared is None else self.declared[1:]
        operation = Operation(self, steps, kind, name, site, 0)
        self._begin(operation, (id(self), *queue), size, True)
        return operation

    def _begin(self, operation: Operation, queue: tuple[Any, ...], size: int, asynchronous: bool) -> None:
        for delay in [*_delays]:
            if not delay(operation.name):
                _delays.remove(delay)
        entry = self.ledger.setdefault(operation.kind, [0, 0, 0.0])
        entry[0] += 1
        entry[1] += size
        if self.records:
            operation.turn = FLIGHT_RECORDER.begin(self.label, operation.sequence, operation.name, operation.site, size)
        ENGINE.enqueue(queue, operation)
        if not asynchronous:
            operation.wait()
        elif not operation.done and self.declared is None:  # else its caller moves it on
            ENGINE.in_background()

    # -- what the engine asks -----------------------------------------------------------------------------------

    def check_stall(self, operation: Operation, waited: float) -> None:
        """Looks for the reason of a wait. Raises it if there is one."""
        if self.broken is not None:
            raise self.broken
        shared = self.hosts.shared
        dead = shared.dead() if shared is not None else []
        if dead and not ENGINE.progress(operation):
            lost = self.side.names[dead[0]]
            if operation.sequence:
                self._update_status(operation)
                self.side.look(waited, dead, wait=3 * PATIENCE)  # it may have published the reason
            raise PeerLostError(
                f"worker {self.side.name} waited in {operation.name} ({operation.site}) for worker {lost}, which died",
                f"see the log of worker {lost}",
            )
        if operation.sequence and waited > PATIENCE:
            self._update_status(operation)
            self.side.look(waited, shared.missing() if shared is not None and len(self.hosts.hosts) == 1 else [])
        if waited > self.timeout:
            raise PeerLostError(
                f"worker {self.side.name} timed out after {waited:.0f} s in {operation.name} ({operation.site})",
                "run `paceline stacks` to see the other workers, or pass a longer timeout to init_process_group()",
            )

    def translate_error(self, operation: Operation, error: Exception) -> Exception:
        """The error that a user should see."""
        if not isinstance(error, (MismatchError, LinkError)):
            return error
        if not operation.sequence:
            return PeerLostError(
                f"worker {self.side.name} lost a peer in {operation.name} ({operation.site})",
                "see the log of the lost worker",
            )
        self._update_status(operation)
        reason = self.side.reason(error, isinstance(error, MismatchError), lambda: self.broken is not None)
        return self.broken or reason

    def add_waited(self, operation: Operation, waited: float) -> None:
        """Takes note of seconds that this worker waited for an operation."""
        self.ledger[operation.kind][2] += waited

    def _update_status(self, operation: Operation) -> None:
        status = {"sequence": operation.sequence, "name": operation.name, "site": operation.site}
        self.side.local_status = {**self.side.local_status, **status}

    # -- memory for what is summed often ------------------------------------------------------------------------

    def allocate(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """A flat tensor of zeros: if possible in shared memory, where sums need no copies. Collective."""
        parts = unless(lambda: self.broken, lambda: self.hosts.arena(numel * dtype.itemsize))
        if parts is None:
            return torch.zeros(numel, dtype=dtype)
        assert self.hosts.shared is not None
        arena = SymmetricBuffer([part.view(dtype) for part in parts])
        own_part = arena.parts[self.hosts.shared.me]
        self._arenas[own_part.data_ptr()] = arena
        return own_part

    def in_arena(self, flat: torch.Tensor) -> SymmetricBuffer | None:
        """The shared buffer of `flat`, if `allocate` made it."""
        arena = self._arenas.get(flat.data_ptr())
        same = arena is not None and len(arena.parts[0]) == len(flat) and arena.parts[0].dtype == flat.dtype
        return arena if same else None

    def release(self, flat: torch.Tensor) -> None:
        """Forgets the shared buffer of `flat`, if it has one: it is not summed in place any more."""
        self._arenas.pop(flat.data_ptr(), None)

    # -- the end ------------------------------------------------------------------------------------------------

    def interrupt(self, error: Exception) -> None:
        """Ends every collective of this group, now and later, with `error`. From any thread."""
        self.broken = self.broken or error

    def abort(self) -> None:
        """Ends the group for good, and all of its collectives."""
        self.interrupt(PeerLostError("the process group was aborted", "create a new one"))
        self.nccl.abort()
        self.close()

    def close(self) -> None:
        """Closes the group's connections."""
        self.nccl.forget()
        if self in _channels:
            _channels.remove(self)
            ENGINE.forget(self, PeerLostError("the process group was destroyed", "create a new one"))
            self.hosts.close()
            self._kept.clear()


def release_memory(flats: Iterable[torch.Tensor]) -> None:
    """Returns the shared memory of these tensors once nobody holds them any more."""
    for flat in flats:
        for channel in _channels:
            channel.release(flat)


def delay_operations(delay: Callable[[str], bool]) -> None:
    """Calls `delay` with the name of each operation before it begins, until it returns False. It is for faults that are
    injected on purpose.
    """
    _delays.append(delay)


def interrupt(error: Exception) -> None:
    """Ends every collective of every group of this process with `error`. From any thread."""
    for channel in list(_channels):
        channel.interrupt(error)


def _followed(steps: Steps, then: Callable[[], None]) -> Steps:
    yield from steps
    then()


def _own_address(store: dist.Store) -> str:
    """The address of the interface that routes to the peers, one of which is the store's host."""
    if gloo_interface():
        return ""
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    host, port = getattr(store, "host", ""), getattr(store, "port", 0)
    return own_address(host, port) if host else ""
