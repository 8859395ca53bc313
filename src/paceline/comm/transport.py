"""Moves flat tensors among the workers of a group and turns failures into errors.

Paceline's own steps call it through group.py; torch's calls come through backend.py, which translates them. A
collective that a peer enters differently, or never because it died, ends with an error that says so; `interrupt` ends
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
from paceline.comm.c10d_arguments import Asked, Reduction
from paceline.comm.hierarchical import Between, HierarchicalTransport, LinkError, own_address
from paceline.comm.link_speed import Pair
from paceline.comm.nccl import Nccl
from paceline.comm.peer_status import PATIENCE, PeerStatus, asker, call_site, unless
from paceline.comm.point_to_point import Mailbox
from paceline.comm.progress_engine import ENGINE, Operation, Steps
from paceline.comm.shared_memory import MismatchError, SymmetricBuffer
from paceline.errors import PeerLostError

_DTYPES = {str(dtype): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}
_NUMBERS = {_DTYPES[name]: number for number, name in enumerate(sorted(_DTYPES))}
_channels: list[Transport] = []
_KEPT, _SMALL = 64, 64  # the last collectives to keep, of so many elements at most


class CallOptions(NamedTuple):
    """How a collective is begun and ended: what it does in the end, whether the caller goes on meanwhile, and what its
    future holds.
    """

    then: Callable[[], None] | None = None
    asynchronous: bool = True
    outcome: Any = ()


PLAIN = CallOptions()


class Transport:
    """Worker `rank` of `size`, connected through `hosts`, `mailbox` and, when those are stuck, `side`. Until all have
    come it can be `given_up`.

    `declared` is (name, call site, kind) of what the caller is doing, for errors and the ledger; with none, a
    collective speaks for itself. `ledger` has per kind of collective its number, bytes and seconds waited. `label` is
    what the group is called in the flight recorder.
    """

    def __init__(
        self, store: dist.Store, rank: int, size: int, timeout: timedelta, given_up: Callable[[], bool] = lambda: False
    ) -> None:
        self.rank, self.size = rank, size
        self.timeout = timeout.total_seconds()
        self.broken: Exception | None = None
        self.declared: tuple[str, str, str] | None = None
        self.ledger: dict[str, list[float]] = {}
        self.sequence, self.label = 0, "torch"
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

    # -- collectives: tensors are flat, contiguous and on the CPU; `what` is how they are told apart and named -----

    def barrier(self, manner: CallOptions = PLAIN) -> Operation:
        return self.start(Asked("barrier", torch.uint8), 0, 0, self.hosts.barrier, manner)

    def all_reduce(
        self,
        flat: torch.Tensor,
        reduction: Reduction,
        what: Asked | None = None,
        manner: CallOptions = PLAIN,
        root: int = -1,
        between: Between | None = None,
    ) -> Operation:
        """Reduces `flat` in place on all workers. `root`: who alone needs it, of all the same. `between` hosts: as
        `HierarchicalTransport.all_reduce`.
        """
        arena = self.in_arena(flat)
        detail = int(reduction.op) * (self.size + 1) + root + 1
        return self.start(
            what or Asked("all_reduce", flat.dtype),
            len(flat),
            detail,
            lambda fp: self.hosts.all_reduce(flat, reduction, fp, arena, between, self.hosts.ask(fp, flat.nbytes)),
            manner,
        )

    def reduce_scatter(
        self,
        out: torch.Tensor,
        parts: Sequence[torch.Tensor],
        reduction: Reduction,
        what: Asked | None = None,
        manner: CallOptions = PLAIN,
        whole: torch.Tensor | None = None,
    ) -> Operation:
        """`out` becomes the reduction of everybody's part for this worker; `parts` has one like it for each. `whole`:
        what they are stretches of, `out` the own one.
        """
        arena = None if whole is None else self.in_arena(whole)
        return self.start(
            what or Asked("reduce_scatter", out.dtype),
            len(out),
            int(reduction.op),
            lambda fp: self.hosts.reduce_scatter(out, parts, reduction, fp, arena),
            manner,
        )

    def broadcast(
        self, flat: torch.Tensor, root: int, what: Asked | None = None, manner: CallOptions = PLAIN
    ) -> Operation:
        """Overwrites `flat` on all workers with that of `root`."""
        what = what or Asked("broadcast", flat.dtype)
        return self.start(what, len(flat), root, lambda fp: self.hosts.broadcast(flat, root, fp), manner)

    def all_gather(
        self,
        outs: Sequence[torch.Tensor],
        flat: torch.Tensor,
        what: Asked | None = None,
        manner: CallOptions = PLAIN,
        root: int = -1,
    ) -> Operation:
        """`outs` has a tensor like `flat` for each worker, or none where only `root` takes."""
        what = what or Asked("all_gather", flat.dtype)
        return self.start(what, len(flat), root, lambda fp: self.hosts.all_gather(outs, flat, fp), manner)

    def all_to_all(
        self, outs: Sequence[torch.Tensor], ins: Sequence[torch.Tensor], manner: CallOptions = PLAIN
    ) -> Operation:
        """Flat bytes: each worker's part of `ins` for another one fills that one's part of `outs` from it."""
        size = sum(map(len, ins))
        what = Asked("all_to_all", torch.uint8)
        return self.start(what, size, 0, lambda fp: self.hosts.all_to_all(outs, ins, fp), manner)

    def measure(self, meetings: Sequence[Sequence[Pair]], found: dict[Pair, tuple[float, float]]) -> Operation:
        """Whole hosts meet in pairs: as `links.measure`."""
        return self.start(Asked("links", torch.uint8), 0, 0, lambda fp: self.hosts.measure(meetings, found, fp))

    def start(
        self, what: Asked, numel: int, detail: int, make: Callable[[int], Steps], manner: CallOptions = PLAIN
    ) -> Operation:
        """Begins a collective of `numel` elements; waits for its end unless it is asynchronous.

        `make` makes its steps from the fingerprint, which tells apart kind, size, dtype, `detail` (root, reduction)
        and what was declared.
        """
        self.sequence += 1
        kind, dtype = what.kind, what.dtype
        said, told = 0, zlib.crc32(kind.encode())
        if self.declared is not None:
            name, site, kind = self.declared
            said = zlib.crc32(name.encode())
        else:
            name, site = f"{kind} of {numel} {str(dtype).removeprefix('torch.')}", call_site()
        fp = hash((told, numel, _NUMBERS[dtype], detail, said)) & 0x3FFFFFFF
        steps = make(fp) if manner.then is None else _followed(make(fp), manner.then)
        operation = Operation(self, steps, kind, name, site, self.sequence)
        operation.outcome = manner.outcome
        if manner.asynchronous and numel <= _SMALL:
            self._kept.append(operation)
        self._begin(operation, (id(self), "collectives"), numel * dtype.itemsize, manner.asynchronous)
        return operation

    # -- messages: flat bytes ---------------------------------------------------------------------------------------

    def send(self, data: torch.Tensor, rank: int, tag: int = 0) -> Operation:
        steps = self.mailbox.send(data, rank, tag)
        operation = self._message(f"send to worker {rank}", ("send", rank), steps, len(data))
        if not operation.done:  # whoever sends computes then, and waits for nothing
            ENGINE.in_background()
        return operation

    def receive(
        self, data: torch.Tensor, rank: int | None, tag: int = 0, then: Callable[[], None] | None = None
    ) -> Operation:
        """From worker `rank`, or from any other; the operation's `source` is from whom."""
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

    def _message(self, name: str, queue: tuple[Any, ...], steps: Steps, size: int) -> Operation:
        """Begins a message that hands `size` bytes over. Those of one `queue` go in order."""
        site, kind = (call_site(), "message") if self.declared is None else self.declared[1:]
        operation = Operation(self, steps, kind, name, site, 0)
        self._begin(operation, (id(self), *queue), size, True)
        return operation

    def _begin(self, operation: Operation, queue: tuple[Any, ...], size: int, asynchronous: bool) -> None:
        entry = self.ledger.setdefault(operation.kind, [0, 0, 0.0])
        entry[0] += 1
        entry[1] += size
        operation.turn = FLIGHT_RECORDER.begin(self.label, operation.sequence, operation.name, operation.site, size)
        ENGINE.submit(queue, operation)
        if not asynchronous:
            operation.wait()
        elif not operation.done and self.declared is None:  # else somebody moves it on
            ENGINE.in_background()

    # -- what the engine asks -----------------------------------------------------------------------------------

    def look(self, operation: Operation, waited: float) -> None:
        """Looks for the reason of a wait. Raises it if there is one."""
        if self.broken is not None:
            raise self.broken
        shared = self.hosts.shared
        dead = shared.dead() if shared is not None else []
        if dead and not ENGINE.poke(operation):
            lost = self.side.names[dead[0]]
            if operation.sequence:
                self._stand_in(operation)
                self.side.look(waited, dead, wait=3 * PATIENCE)  # perhaps it said why
            raise PeerLostError(
                f"worker {self.side.name} waited in {operation.name} ({operation.site}) for worker {lost}, which died",
                f"see the log of worker {lost}",
            )
        if operation.sequence and waited > PATIENCE:
            self._stand_in(operation)
            self.side.look(waited, shared.missing() if shared is not None and len(self.hosts.hosts) == 1 else [])
        if waited > self.timeout:
            raise PeerLostError(
                f"worker {self.side.name} timed out after {waited:.0f} s in {operation.name} ({operation.site})",
                "see what the other workers do, or give a longer timeout to init_process_group",
            )

    def explain(self, operation: Operation, error: Exception) -> Exception:
        """The error that a user should see."""
        if not isinstance(error, (MismatchError, LinkError)):
            return error
        if not operation.sequence:
            return PeerLostError(
                f"worker {self.side.name} lost a peer in {operation.name} ({operation.site})", "see that worker's log"
            )
        self._stand_in(operation)
        found = self.side.reason(error, isinstance(error, MismatchError), lambda: self.broken is not None)
        return self.broken or found

    def account(self, operation: Operation, waited: float) -> None:
        """Takes note of seconds that this worker stood still for an operation."""
        self.ledger[operation.kind][2] += waited

    def _stand_in(self, operation: Operation) -> None:
        place = {"sequence": operation.sequence, "name": operation.name, "site": operation.site}
        self.side.here = {**self.side.here, **place}

    # -- memory for what is summed often ------------------------------------------------------------------------

    def allocate(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """A flat tensor of zeros: in shared memory, where sums need no copies, if there is any. Collective."""
        parts = unless(lambda: self.broken, lambda: self.hosts.arena(numel * dtype.itemsize))
        if parts is None:
            return torch.zeros(numel, dtype=dtype)
        assert self.hosts.shared is not None
        arena = SymmetricBuffer([part.view(dtype) for part in parts])
        mine = arena.parts[self.hosts.shared.me]
        self._arenas[mine.data_ptr()] = arena
        return mine

    def in_arena(self, flat: torch.Tensor) -> SymmetricBuffer | None:
        """The arena of `flat`, if it is a tensor that was allocated here."""
        arena = self._arenas.get(flat.data_ptr())
        same = arena is not None and len(arena.parts[0]) == len(flat) and arena.parts[0].dtype == flat.dtype
        return arena if same else None

    def release(self, flat: torch.Tensor) -> None:
        """The memory of `flat`, if it was allocated here, is not summed in place any more."""
        self._arenas.pop(flat.data_ptr(), None)

    # -- the end ------------------------------------------------------------------------------------------------

    def interrupt(self, error: Exception) -> None:
        """Ends every collective of this group, now and later, with `error`. From any thread."""
        self.broken = self.broken or error

    def abort(self) -> None:
        """Ends it for good, whatever is under way."""
        self.interrupt(PeerLostError("the group was aborted", "make a new one"))
        self.nccl.abort()
        self.close()

    def close(self) -> None:
        self.nccl.forget()
        if self in _channels:
            _channels.remove(self)
            ENGINE.forget(self, PeerLostError("the group was destroyed", "make a new one"))
            self.hosts.close()
            self._kept.clear()


def release_memory(flats: Iterable[torch.Tensor]) -> None:
    """Shared memory that was allocated for these tensors is given back when nobody has them any more."""
    for flat in flats:
        for channel in _channels:
            channel.release(flat)


def interrupt(error: Exception) -> None:
    """Ends every collective of every group of this process with `error`. From any thread."""
    for channel in list(_channels):
        channel.interrupt(error)


def _followed(steps: Steps, then: Callable[[], None]) -> Steps:
    yield from steps
    then()


def _own_address(store: dist.Store) -> str:
    """The address of the interface that routes to the peers, of which the store's host is one."""
    if gloo_interface():
        return ""
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    host, port = getattr(store, "host", ""), getattr(store, "port", 0)
    return own_address(host, port) if host else ""
