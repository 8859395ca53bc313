"""Agrees on which named collectives are ready on all workers.

Workers may submit named tensors in different orders. In each cycle, all workers exchange what they have submitted
since the last one. Every worker keeps the same table of all submissions and draws the same conclusions from it, so no
coordinator is needed. The table contains no tensors and uses no transport.

The approach follows Sergeev and Del Balso, "Horovod: fast and easy distributed deep learning in TensorFlow" (2018).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, field
from itertools import pairwise
from typing import Any

ANONYMOUS = ".noname."  # names with this part are used once, so their requests are not kept
KEPT = 1024  # requests that are kept, so that a repeated submission is a number
GLOBAL = 0  # the process set of all workers
ADD, REMOVE, JOIN, BARRIER = "add_process_set", "remove_process_set", "join", "barrier"
ALLREDUCE, ALLGATHER, BROADCAST = "allreduce", "allgather", "broadcast"
ALLTOALL, REDUCESCATTER = "alltoall", "reducescatter"
FREE_ROWS = (ALLGATHER, ALLTOALL)  # kinds whose first dimension may differ between workers
Key = tuple[int, str]  # process set and name


@dataclass(frozen=True, slots=True)
class Request:
    """One worker's submission of a named collective.

    `tensors` has dtype and shape of each tensor of a group, which is carried out at once. `root` is the rank that
    broadcasts. `splits` are the rows that an all-to-all sends to each worker; for a request about a process set, its
    members. `before` and `after` are factors of a reduction.
    """

    process_set: int
    name: str
    kind: str
    tensors: tuple[tuple[str, tuple[int, ...]], ...] = ()
    op: str = ""
    root: int = -1
    splits: tuple[int, ...] = ()
    before: float = 1.0
    after: float = 1.0
    device: str = "cpu"

    @property
    def key(self) -> Key:
        """What identifies the collective among the workers."""
        return self.process_set, self.name

    @staticmethod
    def read(fields: Sequence[Any]) -> Request:
        """The request from its JSON form. ValueError: the JSON is no request."""
        try:
            process_set, name, kind, tensors, op, root, splits, before, after, device = fields
            shapes = tuple((str(dtype), tuple(map(int, shape))) for dtype, shape in tensors)
            numbers = tuple(map(int, splits))
        except TypeError as error:
            raise ValueError(f"not a request: {fields!r:.80}") from error
        return Request(
            int(process_set), name, kind, shapes, op, int(root), numbers, float(before), float(after), device
        )


@dataclass
class CycleMessage:
    """What one worker announces in a cycle: new requests, numbers of kept requests, and whether it shuts down."""

    requests: list[Request] = field(default_factory=list)
    kept: list[int] = field(default_factory=list)
    shuts_down: bool = False

    def encode(self) -> bytes:
        """The message as bytes; empty if there is nothing to announce."""
        if not (self.requests or self.kept or self.shuts_down):
            return b""
        return json.dumps(
            [[astuple(one) for one in self.requests], ranges(self.kept), self.shuts_down], separators=(",", ":")
        ).encode()

    @staticmethod
    def decode(data: bytes) -> CycleMessage:
        """The message from bytes. ValueError: the bytes are no message."""
        if not data:
            return CycleMessage()
        requests, stretches, shuts_down = json.loads(data)
        kept = [number for first, count in stretches for number in range(first, first + count)]
        return CycleMessage([Request.read(fields) for fields in requests], kept, bool(shuts_down))


def ranges(numbers: Iterable[int]) -> list[tuple[int, int]]:
    """Writes numbers as stretches (first, count)."""
    ordered = sorted(numbers)
    starts = [number for before, number in pairwise([-2, *ordered]) if number != before + 1]
    ends = [number for number, after in pairwise([*ordered, -2]) if after != number + 1]
    return [(first, last - first + 1) for first, last in zip(starts, ends, strict=True)]


@dataclass
class AgreedCollective:
    """A collective that all its workers carry out now, or that fails on all of them with `error` (what, cure).

    `requests` are those of the workers that submitted it, by rank; the others have joined and contribute zeros.
    """

    requests: dict[int, Request]
    error: tuple[str, str] | None = None
    last_joined: int = -1

    @property
    def request(self) -> Request:
        """The request of the lowest rank, which all have in common but for first dimensions and splits."""
        return self.requests[min(self.requests)]


class Negotiation:
    """The table of all submissions, which is the same on all workers after each cycle.

    `sets` has the members of each process set by id. `joined` are the ranks that called `join`, in that order.
    """

    def __init__(self, size: int, rank: int) -> None:
        self.rank = rank
        self.sets: dict[int, tuple[int, ...]] = {GLOBAL: tuple(range(size))}
        self.joined: list[int] = []
        self.has_shut_down = False
        self.shut_down_by: list[int] = []
        self._next_set = GLOBAL + 1
        self._table: dict[Key, dict[int, Request]] = {}
        self._kept: dict[int, dict[int, Request]] = {}  # by number: the requests of all ranks
        self._numbers: dict[Key, int] = {}
        self._next_number = 0

    # -- this worker's announcement ---------------------------------------------------------------------------------

    def compose(self, submitted: Iterable[Request], shuts_down: bool) -> CycleMessage:
        """The message that announces what this worker has submitted."""
        message = CycleMessage(shuts_down=shuts_down)
        for request in submitted:
            number = self._numbers.get(request.key, -1)
            if number >= 0 and self._kept[number].get(self.rank) == request:
                message.kept.append(number)
            else:
                message.requests.append(request)
        return message

    # -- one cycle --------------------------------------------------------------------------------------------------

    def advance(self, messages: Sequence[CycleMessage]) -> list[AgreedCollective]:
        """Takes the messages of all ranks. Returns what all workers carry out now, in the same order everywhere."""
        changed: dict[Key, None] = {}
        for rank, message in enumerate(messages):
            requests = [self._kept[number][rank] for number in message.kept]
            for request in [*requests, *message.requests]:
                self._table.setdefault(request.key, {})[rank] = request
                changed[request.key] = None
                if request.kind == JOIN and rank not in self.joined:
                    self.joined.append(rank)
                    changed |= dict.fromkeys(self._table)
            if message.shuts_down:
                self.has_shut_down = True
                self.shut_down_by.append(rank)
        agreed = [self._agree_on(key) for key in changed if self._is_ready(key)]
        for one in agreed:
            self._remember(one)
        return agreed

    def _is_ready(self, key: Key) -> bool:
        requests = self._table[key]
        members = self.sets.get(key[0])
        if members is None:
            return True  # the process set does not exist: an error for those that submitted
        if any(request.kind == JOIN for request in requests.values()):
            return len(requests) == len(members)
        excused = self.joined if key[0] == GLOBAL else ()
        return all(rank in requests or rank in excused for rank in members)

    def _agree_on(self, key: Key) -> AgreedCollective:
        requests = dict(sorted(self._table.pop(key).items()))
        agreed = AgreedCollective(requests)
        request = agreed.request
        members = self.sets.get(key[0], ())
        missing = [rank for rank in members if rank not in requests]
        if not members:
            agreed.error = f"{describe(request)}: process set {key[0]} does not exist", "add it on all workers first"
        else:
            agreed.error = find_difference(requests) or refuse_joined(request, missing)
        if agreed.error is None:
            self._change_sets(agreed)
        return agreed

    def _change_sets(self, agreed: AgreedCollective) -> None:
        request = agreed.request
        if request.kind == JOIN:
            agreed.last_joined, self.joined = self.joined[-1], []
        elif request.kind == ADD and request.splits in self.sets.values():
            agreed.error = (
                f"a process set of the ranks {list(request.splits)} exists already",
                "use the existing process set, or remove it first",
            )
        elif request.kind == ADD:
            agreed.last_joined = self._next_set
            self.sets[self._next_set] = request.splits
            self._next_set += 1
        elif request.kind == REMOVE:
            del self.sets[request.root]

    def _remember(self, agreed: AgreedCollective) -> None:
        """Keeps the requests, so that their repetition is announced by a number."""
        request = agreed.request
        if agreed.error is not None or ANONYMOUS in request.name or request.kind in (ADD, REMOVE, JOIN, BARRIER):
            return
        known = self._numbers.get(request.key)
        if known is not None:
            if set(self._kept[known]) <= set(agreed.requests):  # else some of them have joined
                self._kept[known] = agreed.requests
            return
        self._numbers[request.key] = self._next_number
        self._kept[self._next_number] = agreed.requests
        self._next_number += 1
        if len(self._kept) > KEPT:
            oldest = next(iter(self._kept))
            del self._numbers[next(iter(self._kept.pop(oldest).values())).key]

    # -- what is missing --------------------------------------------------------------------------------------------

    def incomplete(self) -> Mapping[Key, dict[int, Request]]:
        """The collectives that some workers have submitted and others have not."""
        return self._table

    def missing(self, key: Key) -> list[int]:
        """The ranks that have not submitted this collective."""
        excused = self.joined if key[0] == GLOBAL else ()
        return [rank for rank in self.sets.get(key[0], ()) if rank not in self._table[key] and rank not in excused]


def describe(request: Request) -> str:
    """The collective in words."""
    of = "" if request.process_set == GLOBAL else f" of process set {request.process_set}"
    return f"{request.kind} {request.name!r}{of}"


def find_difference(requests: Mapping[int, Request]) -> tuple[str, str] | None:
    """The first way in which the workers' requests do not fit together: what is wrong, and what to do."""
    (first_rank, first), *others = requests.items()
    for rank, request in others:
        for what, of_first, of_other in _compared(first, request):
            if of_first != of_other:
                return (
                    f"{describe(first)}: the workers disagree about the {what}: "
                    f"worker {first_rank} has {of_first}, worker {rank} has {of_other}",
                    f"submit this name with the same {what} on every worker",
                )
    return None


def _compared(first: Request, other: Request) -> list[tuple[str, Any, Any]]:
    """What has to be equal in two requests: its name, and both values."""
    rows = first.kind in FREE_ROWS

    def shapes(request: Request) -> list[str]:
        return ["x".join(map(str, ("any", *shape[1:]) if rows else shape)) or "scalar" for _, shape in request.tensors]

    def dimensions(request: Request) -> list[int]:
        return [len(shape) for _, shape in request.tensors]

    values: list[tuple[str, Any, Any]] = [
        ("kind of collective", first.kind, other.kind),
        ("number of tensors", len(first.tensors), len(other.tensors)),
        ("dtype", [dtype for dtype, _ in first.tensors], [dtype for dtype, _ in other.tensors]),
        ("number of dimensions", dimensions(first), dimensions(other)),
        ("shape", shapes(first), shapes(other)),
        ("reduction", first.op or "none", other.op or "none"),
        ("root rank", first.root, other.root),
        ("prescale_factor", first.before, other.before),
        ("postscale_factor", first.after, other.after),
        ("device", first.device, other.device),
    ]
    if first.kind in (ADD, REMOVE):
        values.append(("ranks of the process set", list(first.splits), list(other.splits)))
    return values


def refuse_joined(request: Request, joined: Sequence[int]) -> tuple[str, str] | None:
    """Why a collective cannot go on without the workers that have joined; None if it can."""
    if not joined or request.kind in (BARRIER, JOIN):
        return None
    if request.kind == ALLREDUCE and request.op in ("Sum", "Average"):
        return None
    of = f" with op {request.op}" if request.op else ""
    return (
        f"{describe(request)}{of} is not possible after worker {joined[0]} called hvd.join()",
        "after a join only allreduce with Sum or Average can go on: the joined workers contribute zeros",
    )
