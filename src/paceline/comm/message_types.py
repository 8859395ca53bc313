"""Types of the messages between workers, parameter servers and hosts.

Imported with the first message that is read: it
needs msgspec. No torch.
"""

from __future__ import annotations

from typing import Annotated, Any, NotRequired, TypedDict

from msgspec import Meta

Count = Annotated[int, Meta(ge=0, le=2**53)]
SmallCount = Annotated[int, Meta(ge=0, le=1 << 16)]
SmallPositive = Annotated[int, Meta(ge=1, le=1 << 16)]
Worker = Annotated[int, Meta(ge=0, le=10**12)]
Workers = Annotated[list[Worker], Meta(min_length=1, max_length=1 << 16)]
Size = Annotated[int, Meta(ge=0, le=2**48)]
Shape = Annotated[list[Size], Meta(max_length=64)]
AssignmentId = Annotated[int, Meta(ge=0, le=2**62)]
Number = Annotated[str, Meta(pattern="^[0-9]{1,12}\\Z")]  # of a server or a part, as a name
_DTYPES = (
    r"bool|bfloat16|complex(32|64|128)|u?int(8|16|32|64)|float(16|32|64|8_e[45]m[23](fn|fnuz)?|8_e8m0fnu|4_e2m1fn_x2)"
)
Dtype = Annotated[str, Meta(pattern=rf"^({_DTYPES})\Z")]
At = tuple[str, Annotated[int, Meta(ge=0, le=65535)], str]
Window = tuple[Count, Count]
Squares = dict[Number, list[float]]
Real = int | float


class StepMessage(TypedDict):
    """The step that servers should apply."""

    count: Real
    loss: Real
    unused: list[Count]
    expected: Real
    norm: Real
    rates: NotRequired[list[list[float]] | None]


class LogEntry(TypedDict):
    """The log entry of an update, for workers that were not present. That of a push does not name its worker yet."""

    count: Real
    loss: Real
    unused: list[Count]
    norm: NotRequired[Real]
    rows: Count
    epoch: Count
    metrics: dict[str, tuple[Real, Real]]


class PushMessage(StepMessage):
    """A worker's gradients for one update."""

    micro_batches: Count
    log: LogEntry


class UpdateRecord(LogEntry):
    """An update that a server has applied."""

    ticket: Count
    missed: Count
    worker: NotRequired[Worker]
    clock: NotRequired[Count]
    workers: NotRequired[Workers]
    late: NotRequired[list[tuple[Worker, Count, Count]]]


class TicketRequest(TypedDict):
    """A worker's request for its next ticket."""

    stop: bool
    updates: Count
    cut: NotRequired[Count]
    broken: NotRequired[bool]


class AssignmentReply(TypedDict):
    """The reply to such a request: a ticket, or else the log of a window that has ended."""

    log: NotRequired[Any]


class TicketAssignment(TypedDict):
    """A ticket that is assigned to a worker."""

    ticket: Count
    dealing: AssignmentId
    update: Count
    share: NotRequired[tuple[SmallCount, SmallPositive]]


class WindowEnd(TypedDict):
    """The end of a window."""

    log: list[UpdateRecord]
    dropped: Count


class WorkerStatus(TypedDict):
    """The collective that a worker is in, and its state."""

    sequence: Count
    name: str
    site: str
    state: str


UpdateByOneWorker = tuple[Worker, Count, Count]  # of `AsyncServer`
UpdateByShares = tuple[Workers, Real, list[tuple[Worker, Count, Count]]]  # of `BackupWorkerServer`


def _standing(update_type: Any) -> Any:
    fields = {"applied": Count, "window": Window, "log": list.__class_getitem__(update_type)}
    return TypedDict("Standing", {**fields, "has": list[tuple[Worker, Count, AssignmentId]]})  # type: ignore[operator]


MESSAGE_TYPES: dict[str, Any] = {
    "servers": dict[Number, At],
    "largest gradients": tuple[SmallPositive, list[float]] | None,
    "squares": Squares,
    "step": StepMessage,
    "updates": Annotated[int, Meta(ge=-1, le=2**53)],
    "wish": TicketRequest,
    "dealing": AssignmentReply,
    "ticket": TicketAssignment,
    "window": WindowEnd,
    "push": PushMessage,
    "standing": _standing(UpdateByOneWorker),
    "standing by shares": _standing(UpdateByShares),
    "update": tuple[Count, Count, UpdateByOneWorker],
    "update by shares": tuple[Count, Count, UpdateByShares],
    "workers": Workers,
    "rows": list[tuple[Count, Size, Size]],
    "values": tuple[list[Any], list[tuple[SmallCount, Any]], list[tuple[Dtype, Shape, bool]]],
    "tree": tuple[Any, dict[str, tuple[Dtype, Shape]]],
    "place": WorkerStatus | None,
    "host": tuple[Count, Annotated[str, Meta(pattern="^[0-9a-f]{1,65536}\\Z")], str, str],
    "hosts": tuple[list[Annotated[list[SmallCount], Meta(min_length=1)]], str],
    "part": Any,
}
