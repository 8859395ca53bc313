"""What connects the workers of one group: its hosts, its messages, and the account of what each collective cost.

Torch reaches it through backend.py, Paceline's own steps through group.py. A collective that a peer enters
differently, or never because it died, ends with an error that says so; `interrupt` ends them all.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from paceline.comm.engine import ENGINE, Operation, Steps
from paceline.comm.hosts import Hosts, LinkError, address_towards
from paceline.comm.messages import Mailbox
from paceline.comm.shared import Arena, MismatchError
from paceline.comm.status import PATIENCE, Side, call_site, unless
from paceline.errors import PeerLostError
from paceline.world import gloo_interface

_DTYPES = {str(dtype): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}
_NUMBERS = {_DTYPES[name]: number for number, name in enumerate(sorted(_DTYPES))}
_channels: list[Channel] = []
_KEPT, _SMALL = 64, 64  # the last collectives to keep, of so many elements at most


class Channel:
    """Worker `rank` of `size`, connected through `hosts`, `mailbox` and, when those are stuck, `side`. Until all have
    come it can be `given_up`.

    `declared` is (name, call site, kind) of what the caller is doing, for errors and the ledger; with none, a
    collective speaks for itself. `ledger` has per kind of collective its number, bytes and seconds waited.
    """

    def __init__(
        self, store: dist.Store, rank: int, size: int, timeout: timedelta, given_up: Callable[[], bool] = lambda: False
    ) -> None:
        self.rank, self.size = rank, size
        self.timeout = timeout.total_seconds()
        self.broken: Exception | None = None
        self.declared: tuple[str, str, str] | None = None
        self.ledger: dict[str, list[float]] = {}
        self.sequence = 0
        self._arenas: dict[int, Arena] = {}
        # DDP's join hands a Work to compiled code and drops it: without its Python half it could not be waited for.
        self._kept: deque[Operation] = deque(maxlen=_KEPT)
        self.side = Side(store, rank, size)
        self.hosts = Hosts(store, rank, size, _own_address(store), lambda: self.broken is not None or given_up())
        self.mailbox = Mailbox(self.hosts)
        shared = self.hosts.shared
        self.crowded = shared is None or shared.crowded
        _channels.append(self)

    # -- starting -----------------------------------------------------------------------------------------------

    def start(
        self, kind: str, numel: int, dtype: torch.dtype, detail: int, make: Callable[[int], Steps], asynchronous: bool
    ) -> Operation:
        """Begins a collective of `numel` elements; waits for its end unless it is `asynchronous`.

        `make` makes its steps from the fingerprint, which tells apart kind, size, dtype, `detail` (root, reduction)
        and what was declared.
        """
        self.sequence += 1
        what = zlib.crc32(kind.encode())
        if self.declared is not None:
            name, site, kind = self.declared
            said = zlib.crc32(name.encode())
        else:
            name, site, said = f"{kind} of {numel} {str(dtype).removeprefix('torch.')}", call_site(), 0
        fp = hash((what, numel, _NUMBERS[dtype], detail, said)) & 0x3FFFFFFF
        operation = Operation(self, make(fp), kind, name, site, self.sequence)
        if asynchronous and numel <= _SMALL:
            self._kept.append(operation)
        self._begin(operation, (id(self), "collectives"), numel * dtype.itemsize, asynchronous)
        return operation

    def message(self, name: str, queue: tuple[Any, ...], steps: Steps, size: int) -> Operation:
        """Begins a message of `size` bytes. Those of one `queue` go in order."""
        operation = Operation(self, steps, "message", name, call_site(), 0)
        self._begin(operation, (id(self), *queue), size, True)
        return operation

    def _begin(self, operation: Operation, queue: tuple[Any, ...], size: int, asynchronous: bool) -> None:
        entry = self.ledger.setdefault(operation.kind, [0, 0, 0.0])
        entry[0] += 1
        entry[1] += size
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
        arena = Arena([part.view(dtype) for part in parts])
        mine = arena.parts[self.hosts.shared.me]
        self._arenas[mine.data_ptr()] = arena
        return mine

    def in_arena(self, flat: torch.Tensor) -> Arena | None:
        """The arena of `flat`, if it is a tensor that was allocated here."""
        arena = self._arenas.get(flat.data_ptr())
        same = arena is not None and len(arena.parts[0]) == len(flat) and arena.parts[0].dtype == flat.dtype
        return arena if same else None

    # -- the end ------------------------------------------------------------------------------------------------

    def interrupt(self, error: Exception) -> None:
        """Ends every collective of this group, now and later, with `error`. From any thread."""
        self.broken = self.broken or error

    def close(self) -> None:
        if self in _channels:
            _channels.remove(self)
            ENGINE.forget(self, PeerLostError("the group was destroyed", "make a new one"))
            self.hosts.close()
            self._kept.clear()


def interrupt(error: Exception) -> None:
    """Ends every collective of every group of this process with `error`. From any thread."""
    for channel in list(_channels):
        channel.interrupt(error)


def _own_address(store: dist.Store) -> str:
    """The address of the interface that routes to the peers, of which the store's host is one."""
    if gloo_interface():
        return ""
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    host, port = getattr(store, "host", ""), getattr(store, "port", 0)
    return address_towards(host, port) if host else ""
