"""Collectives with digests of all that travels, so that a bit that flips on the way is noticed, and its sender named.

A sender takes the digest of each tensor before it sends it, and a receiver that of what has arrived. `compare` then
sends the senders' digests to the receivers. Gradients are summed by sending each worker the slices that it adds up.
Codes of gradients carry their digests along, since what their receiver decodes goes on at once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from paceline.comm.communicator import Group
from paceline.comm.digests import checksum
from paceline.comm.hierarchical import Leaders
from paceline.comm.progress_engine import Steps
from paceline.comm.shared_memory import raw_bytes

# Kinds of faults: what has changed on its way to another worker (a worker's part of a sum, a sum, the code of a sum,
# rows of weights), an addition that gave two results, and sums that changed in memory.
CONTRIBUTION, SUM, CODE, WEIGHTS, ADDITION, MEMORY = "contribution", "sum", "code", "weights", "addition", "memory"
FIGURES = "the loss, a metric or a buffer"
ATTEMPTS = 3  # before the run ends because digests differ each time
_DIGEST = 8  # bytes


class TransferFault(NamedTuple):
    """A difference of digests. `kind` is what has changed, `worker` the number in the run of the worker that sent it or
    has it in memory, and `tensors` describes the tensors.
    """

    kind: str
    worker: int
    tensors: str


@dataclass
class Transfer:
    """Something that travels: the digests, by rank, of what this worker has `sent` to each worker and `received`."""

    kind: str
    tensors: str
    sent: list[int]
    received: list[int] = field(default_factory=list)


class TransferChecks:
    """The digests of all that this worker has sent and received since `begin`.

    `names` are those of the parameters. `faults` has the differences that this worker has seen, those of transfers
    after `compare`. Injected faults set `tamper`: it gets the kind and the tensors of each transfer, and what goes to
    one other worker once that is digested.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names
        self.tamper: Callable[[str, str, torch.Tensor], None] | None = None
        self.faults: list[TransferFault] = []
        self._transfers: dict[Group, list[Transfer]] = {}
        self._scattered: deque[tuple[Group, Transfer, Sequence[torch.Tensor], list[torch.Tensor]]] = deque()

    def begin(self) -> None:
        """Forgets all digests and faults."""
        self.faults = []
        self._transfers.clear()
        self._scattered.clear()

    def abandon(self) -> None:
        """Forgets the sums that are under way."""
        self._scattered.clear()

    def describe(self, members: Sequence[int]) -> str:
        """Describes the gradients of the parameters with these numbers, which begin with the last parameter."""
        first = self._names[members[-1]]
        return first if len(members) == 1 else f"{first} and the next {len(members) - 1} parameters"

    def note(self, kind: str, among: Group, rank: int, tensors: str) -> None:
        """Notes a fault of the worker with this rank."""
        self.faults.append(TransferFault(kind, among.names[rank], tensors))

    # -- transfers --------------------------------------------------------------------------------------------------

    def sends(
        self, among: Group, kind: str, tensors: str, parts: Sequence[torch.Tensor], sent: Sequence[int] | None = None
    ) -> Transfer:
        """Records what goes to each worker, whose digests may have been taken before as `sent`."""
        transfer = Transfer(kind, tensors, _digests(parts) if sent is None else [*sent])
        self._transfers.setdefault(among, []).append(transfer)
        others = [parts[(among.rank + step) % among.size] for step in range(1, among.size)]
        part = next((one for one in others if one.numel()), None)
        if self.tamper is not None and part is not None:
            self.tamper(kind, tensors, part)
        return transfer

    def receives(self, transfer: Transfer, parts: Iterable[torch.Tensor]) -> None:
        """Records what has come from each worker."""
        transfer.received = [checksum(part) for part in parts]

    def exchange(
        self, among: Group, transfer: Transfer, parts: Sequence[torch.Tensor], room: Sequence[torch.Tensor]
    ) -> None:
        """Sends each worker its part, and fills the tensors of `room`."""
        among.exchange(parts, room)
        self.receives(transfer, room)

    def add(self, among: Group, tensors: str, parts: Sequence[torch.Tensor]) -> tuple[torch.Tensor, int]:
        """Returns the sum of what was received, and its digest."""
        total = _add(parts)
        digest = checksum(total)
        if checksum(_add(parts)) != digest:
            self.note(ADDITION, among, among.rank, tensors)
        return total, digest

    def sum(
        self, among: Group, tensors: str, parts: Sequence[torch.Tensor], sent: Sequence[int]
    ) -> tuple[torch.Tensor, int]:
        """Returns the sum of the slices that all workers have for this one, and its digest."""
        taken = [torch.empty_like(parts[among.rank]) for _ in parts]
        self.exchange(among, self.sends(among, CONTRIBUTION, tensors, parts, sent), parts, taken)
        return self.add(among, tensors, taken)

    def gather(
        self, among: Group, kind: str, tensors: str, flat: torch.Tensor, digest: int, room: Sequence[torch.Tensor]
    ) -> list[int]:
        """Fills the tensors of `room` with the flat tensors of all workers. Returns their digests; `digest` is that of
        this worker's.
        """
        parts = [flat] * among.size
        transfer = self.sends(among, kind, tensors, parts, [digest] * among.size)
        self.exchange(among, transfer, parts, room)
        return transfer.received

    def start_scatter(self, among: Group, flat: torch.Tensor, members: Sequence[int]) -> dist.Work | None:
        """Starts summing the gradients of the parameters `members`, as `Group.start_scatter` does. `finish_scatter`
        must follow, in the same order.
        """
        parts = flat.view(among.size, -1).unbind(0)
        transfer = self.sends(among, CONTRIBUTION, self.describe(members), parts)
        taken = [torch.empty_like(part) for part in parts]
        self._scattered.append((among, transfer, parts, taken))
        return among.start_exchange(parts, taken)

    def finish_scatter(self) -> None:
        """Adds up what has arrived for the first sum that was started, in place."""
        among, transfer, parts, taken = self._scattered.popleft()
        self.receives(transfer, taken)
        total, _ = self.add(among, transfer.tensors, taken)
        parts[among.rank].copy_(total)

    # -- the comparison ---------------------------------------------------------------------------------------------

    def compare(self, groups: Iterable[Group]) -> None:
        """Compares the digests of what was received from the workers of these groups with those of its senders.
        Collective in each group.
        """
        for among in dict.fromkeys(group for group in groups if group.size > 1):
            # In the order of each kind: whether a gather or a sum starts first may differ from worker to worker.
            transfers = sorted(self._transfers.pop(among, []), key=lambda one: one.kind)
            sent = [[one.sent[rank] for one in transfers] for rank in range(among.size)]
            # A worker that has failed has fewer.
            for rank, row in enumerate(among.gather(torch.tensor(sent, dtype=torch.int64).view(-1))):
                digests = row.view(among.size, len(row) // among.size)[among.rank].tolist()
                for one, digest in zip(transfers, digests, strict=False):
                    if one.received and one.received[rank] != digest:
                        self.note(one.kind, among, rank, one.tensors)

    def agree(self, among: Group) -> bool:
        """Compares digests, and returns whether any worker of a group has seen new faults. Collective."""
        before = len(self.faults)
        self.compare([among])
        return any(among.gather_json(len(self.faults) > before))


class CheckedLeaders:
    """The collectives of leaders that codecs use, with digests: those of `leaders`, for a sum of `tensors` among
    workers of the group `among`. Faults are noted in `checks`.
    """

    def __init__(self, leaders: Leaders, checks: TransferChecks, among: Group, tensors: str) -> None:
        self._leaders, self._checks, self._among, self._tensors = leaders, checks, among, tensors
        self.rank, self.size, self.chunk = leaders.rank, leaders.size, leaders.chunk
        self._ranks = [among.names.index(name) for name in among.leaders]

    def in_turns(self, parts: Iterable[Steps]) -> Steps:
        """Runs several generators of collectives side by side, as the leaders do."""
        return self._leaders.in_turns(parts)

    def all_to_all(self, rows: torch.Tensor, into: torch.Tensor | None = None) -> Any:
        """Sends row i to worker i; returns a row of the same length from each worker, in the memory of `into`, if it is
        given.
        """
        signed = self._sign(raw_bytes(rows).view(self.size, rows.nbytes // self.size), to=(self.rank + 1) % self.size)
        taken = yield from self._leaders.all_to_all(signed)
        received = self._unsign(taken, rows.dtype)
        return received if into is None else into.copy_(received)

    def all_gather(self, flat: torch.Tensor, into: torch.Tensor | None = None) -> Any:
        """Gathers the flat tensor of all workers, of one length, as rows; in the memory of `into`, if it is given."""
        signed = self._sign(raw_bytes(flat)[None], to=0)
        taken = yield from self._leaders.all_gather(signed[0])
        received = self._unsign(taken, flat.dtype)
        return received if into is None else into.copy_(received)

    def broadcast(self, flat: torch.Tensor, root: int) -> Steps:
        """Overwrites `flat` on all workers with that of `root`."""
        rows = yield from self.all_gather(flat)
        flat.copy_(rows[root])

    def all_reduce(self, flat: torch.Tensor) -> Steps:
        """Sums `flat` in place over all workers."""
        width = -(-len(flat) // self.size)
        padded = flat.new_zeros(self.size * width)
        padded[: len(flat)] = flat
        rows = yield from self.all_to_all(padded.view(self.size, width))
        total, _ = self._checks.add(self._among, self._tensors, rows.unbind(0))
        sums = yield from self.all_gather(total)
        flat.copy_(sums.view(-1)[: len(flat)])

    def _sign(self, rows: torch.Tensor, to: int) -> torch.Tensor:
        """Appends to each row of bytes its digest. An injected fault may change the row `to` another worker."""
        digests = torch.tensor([[checksum(row)] for row in rows], dtype=torch.int64).view(torch.uint8)
        signed = torch.cat([rows, digests], 1)
        if self._checks.tamper is not None and rows.shape[1]:
            self._checks.tamper(CODE, self._tensors, signed[to, :-_DIGEST])
        return signed

    def _unsign(self, taken: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Compares the digests of rows of bytes; returns the rows without them."""
        rows, digests = taken[:, :-_DIGEST].contiguous(), taken[:, -_DIGEST:].contiguous().view(torch.int64)
        for leader, (row, digest) in enumerate(zip(rows, digests.view(-1).tolist(), strict=True)):
            if checksum(row) != digest:
                self._checks.note(CODE, self._among, self._ranks[leader], self._tensors)
        return rows.view(dtype) if rows.numel() else rows.new_empty(rows.shape[0], 0, dtype=dtype)


def _digests(parts: Sequence[torch.Tensor]) -> list[int]:
    """Returns the digest of each tensor. One that is in the list several times is read once."""
    known: dict[int, int] = {}
    return [known[id(part)] if id(part) in known else known.setdefault(id(part), checksum(part)) for part in parts]


def _add(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Adds tensors up in their order, as sums in shared memory do."""
    total = parts[0].clone() if len(parts) == 1 else torch.add(parts[0], parts[1])
    for part in parts[2:]:
        total.add_(part)
    return total
