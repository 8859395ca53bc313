"""Types of the messages between workers, parameter servers and hosts.

Imported with the first message that is read: it
needs msgspec. No torch.
"""

from __future__ import annotations

from typing import Annotated, Any, NotRequired, TypedDict

from msgspec import Meta

Count = Annotated[int, Meta(ge=0, le=2**53)]
Few = Annotated[int, Meta(ge=0, le=1 << 16)]
Some = Annotated[int, Meta(ge=1, le=1 << 16)]
Worker = Annotated[int, Meta(ge=0, le=10**12)]
Workers = Annotated[list[Worker], Meta(min_length=1, max_length=1 << 16)]
Size = Annotated[int, Meta(ge=0, le=2**48)]
Shape = Annotated[list[Size], Meta(max_length=64)]
AsyncShard = Annotated[int, Meta(ge=0, le=2**62)]
Number = Annotated[str, Meta(pattern="^[0-9]{1,12}\\Z")]  # of a server or a part, as a name
_DTYPES = (
    r"bool|bfloat16|complex(32|64|128)|u?int(8|16|32|64)|float(16|32|64|8_e[45]m[23](fn|fnuz)?|8_e8m0fnu|4_e2m1fn_x2)"
)
Dtype = Annotated[str, Meta(pattern=rf"^({_DTYPES})\Z")]
At = tuple[str, Annotated[int, Meta(ge=0, le=65535)], str]
Window = tuple[Count, Count]
Squares = dict[Number, list[float]]
Real = int | float


class ToldStep(TypedDict):
    """What servers are to apply."""

    count: Real
    loss: Real
    unused: list[Count]
    expected: Real
    norm: Real
    rates: NotRequired[list[list[float]] | None]


class Logged(TypedDict):
    """Of an update, for who was not there. Of a push it does not say yet whose it is."""

    count: Real
    loss: Real
    unused: list[Count]
    norm: NotRequired[Real]
    rows: Count
    epoch: Count
    metrics: dict[str, tuple[Real, Real]]


class ToldPush(ToldStep):
    micro_batches: Count
    log: Logged


class MadeUpdate(Logged):
    ticket: Count
    missed: Count
    worker: NotRequired[Worker]
    clock: NotRequired[Count]
    workers: NotRequired[Workers]
    late: NotRequired[list[tuple[Worker, Count, Count]]]


class Wish(TypedDict):
    """Of the next ticket."""

    stop: bool
    updates: Count
    cut: NotRequired[Count]
    broken: NotRequired[bool]


class DealtSomething(TypedDict):
    """A ticket, unless there is a log."""

    log: NotRequired[Any]


class DealtTicket(TypedDict):
    ticket: Count
    dealing: AsyncShard
    update: Count
    share: NotRequired[tuple[Few, Some]]


class EndedWindow(TypedDict):
    """The end of a window."""

    log: list[MadeUpdate]
    dropped: Count


class Whereabouts(TypedDict):
    sequence: Count
    name: str
    site: str
    state: str


OfOne = tuple[Worker, Count, Count]  # who has made an update: see Dealing._follow
OfSome = tuple[Workers, Real, list[tuple[Worker, Count, Count]]]  # and Backed._follow


def _standing(made: Any) -> Any:
    fields = {"applied": Count, "window": Window, "log": list.__class_getitem__(made)}
    return TypedDict("Standing", {**fields, "has": list[tuple[Worker, Count, AsyncShard]]})  # type: ignore[operator]


TOLD: dict[str, Any] = {
    "servers": dict[Number, At],
    "largest gradients": tuple[Some, list[float]] | None,
    "squares": Squares,
    "step": ToldStep,
    "updates": Annotated[int, Meta(ge=-1, le=2**53)],
    "wish": Wish,
    "dealing": DealtSomething,
    "ticket": DealtTicket,
    "window": EndedWindow,
    "push": ToldPush,
    "standing": _standing(OfOne),
    "standing by shares": _standing(OfSome),
    "update": tuple[Count, Count, OfOne],
    "update by shares": tuple[Count, Count, OfSome],
    "workers": Workers,
    "rows": list[tuple[Count, Size, Size]],
    "values": tuple[list[Any], list[tuple[Few, Any]], list[tuple[Dtype, Shape, bool]]],
    "tree": tuple[Any, dict[str, tuple[Dtype, Shape]]],
    "place": Whereabouts | None,
    "host": tuple[Count, Annotated[str, Meta(pattern="^[0-9a-f]{1,65536}\\Z")], str, str],
    "hosts": tuple[list[Annotated[list[Few], Meta(min_length=1)]], str],
    "part": Any,
}
