"""Types of the small JSON files in run folders and token folders.

Imported with the first one that is read: it
needs msgspec. No torch.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, NotRequired, TypedDict

from msgspec import Meta

Whole = Annotated[int, Meta(ge=0, le=2**53)]
Positive = Annotated[int, Meta(ge=1, le=2**53)]


class Listening(TypedDict):
    """coordinator.json"""

    host: str
    port: Annotated[int, Meta(ge=1, le=65535)]
    epoch: NotRequired[Whole]


class Targets(TypedDict):
    """An entry of metrics.json."""

    targets: list[str]


class FlightHead(TypedDict):
    """The first line of a worker's file of the flight recorder."""

    worker: Annotated[int, Meta(ge=0, le=2**40)]
    host: str
    at: NotRequired[Annotated[float, Meta(ge=0, le=1e11)]]


class FlightRecord(TypedDict):
    name: str
    group: str | None
    begun: NotRequired[Annotated[float, Meta(ge=0, le=1e11)]]
    ended: NotRequired[Annotated[float, Meta(ge=0, le=1e11)] | None]
    number: NotRequired[Whole | None]


class Fired(TypedDict):
    """A line of the faults that have struck."""

    at: Annotated[float, Meta(ge=0, le=1e11)]
    fault: str


class TokenShard(TypedDict):
    file: Annotated[str, Meta(pattern=r"^[\w-][\w.-]*$")]
    tokens: Positive
    bytes: Positive
    sha256: str


class TokenIndex(TypedDict):
    """tokens.json"""

    format: int
    dtype: Literal["uint8", "uint16", "uint32", "int32", "int64"]
    vocabulary: Positive
    end: Any
    tokenizer: Any
    shards: Annotated[list[TokenShard], Meta(min_length=1)]


class UsedTokenizer(TypedDict):
    name: str
    sha256: str


class MadeFrom(TypedDict):
    """What a folder of tokens is being made from."""

    options: dict[str, Any]
    tokenizer: UsedTokenizer
    inputs: dict[str, Any]


class NextPlace(TypedDict):
    file: Whole
    offset: Whole
    skip: Whole
    documents: Whole


class TokenProgress(TypedDict):
    next: NextPlace
    shards: list[TokenShard]
