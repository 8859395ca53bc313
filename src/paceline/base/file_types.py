"""Types of the small JSON files in run folders and token folders.

Imported with the first one that is read: it
needs msgspec. No torch.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, NotRequired, TypedDict

from msgspec import Meta

Count = Annotated[int, Meta(ge=0, le=2**53)]
Positive = Annotated[int, Meta(ge=1, le=2**53)]


class Listening(TypedDict):
    """The content of coordinator.json: where the coordinator listens."""

    host: str
    port: Annotated[int, Meta(ge=1, le=65535)]
    epoch: NotRequired[Count]


class Targets(TypedDict):
    """An entry of metrics.json."""

    targets: list[str]


class FlightHead(TypedDict):
    """The first line of a worker's file of the flight recorder."""

    worker: Annotated[int, Meta(ge=0, le=2**40)]
    host: str
    at: NotRequired[Annotated[float, Meta(ge=0, le=1e11)]]


class FlightRecord(TypedDict):
    """A line of a worker's file of the flight recorder: one collective."""

    name: str
    group: str | None
    begun: NotRequired[Annotated[float, Meta(ge=0, le=1e11)]]
    ended: NotRequired[Annotated[float, Meta(ge=0, le=1e11)] | None]
    number: NotRequired[Count | None]


class Fired(TypedDict):
    """A line of the file of faults that have been injected."""

    at: Annotated[float, Meta(ge=0, le=1e11)]
    fault: str


class TokenShard(TypedDict):
    """A file of tokens, as tokens.json lists it."""

    file: Annotated[str, Meta(pattern=r"^[\w-][\w.-]*$")]
    tokens: Positive
    bytes: Positive
    sha256: str


class TokenIndex(TypedDict):
    """The content of tokens.json, the index of a folder of tokens."""

    format: int
    dtype: Literal["uint8", "uint16", "uint32", "int32", "int64"]
    vocabulary: Positive
    end: Any
    tokenizer: Any
    shards: Annotated[list[TokenShard], Meta(min_length=1)]


class UsedTokenizer(TypedDict):
    """The tokenizer that makes a folder of tokens: its name and the hash of its file."""

    name: str
    sha256: str


class MadeFrom(TypedDict):
    """What a folder of tokens is being made from."""

    options: dict[str, Any]
    tokenizer: UsedTokenizer
    inputs: dict[str, Any]


class NextInput(TypedDict):
    """Where the making of a folder of tokens continues: an input file, by number, and a position in it."""

    file: Count
    offset: Count
    skip: Count
    documents: Count


class TokenProgress(TypedDict):
    """How far the making of a folder of tokens has come: the next input, and the shards that are complete."""

    next: NextInput
    shards: list[TokenShard]
