"""Types of manifests and of safetensors indexes.

Imported with the first one that is read: it needs
msgspec. No torch.

Manifests of version 1 have no tree. Fields that are not named here are the user's, or of later versions, and pass.
"""

from __future__ import annotations

from typing import Annotated, Any, NotRequired, TypedDict

from msgspec import Meta

Size = Annotated[int, Meta(ge=0, le=2**53)]
Shape = Annotated[list[Size], Meta(max_length=100)]
Hash = Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]
Dtype = Annotated[str, Meta(pattern="^(BOOL|[UI](8|16|32|64)|F8_E4M3|F8_E5M2|F16|BF16|F32|F64|C64)\\Z")]
Finite = Annotated[float, Meta(ge=-1.7e308, le=1.7e308)]


class SavedFile(TypedDict):
    bytes: Size
    sha256: Hash


class SavedPart(TypedDict):
    file: str
    at: Shape
    shape: Shape


class SavedTensor(TypedDict):
    """In one file, or in parts."""

    dtype: Dtype
    shape: Shape
    file: NotRequired[str]
    parts: NotRequired[list[SavedPart]]


class SavedPhase(TypedDict):
    number: Size
    rows: Size | None
    epochs: Size | None
    total: Size | None
    done: Size
    complete: bool
    stopped: NotRequired[bool]
    first_epoch: Size
    begun: Size
    inside: NotRequired[dict[str, Any]]


class SavedGroup(TypedDict):
    params: list[str]


class SavedOptimizer(TypedDict):
    groups: list[SavedGroup]
    state: dict[str, Any]


class SavedTrainer(TypedDict):
    model: NotRequired[dict[str, Any]]
    optimizers: NotRequired[list[SavedOptimizer]]
    schedulers: NotRequired[list[dict[str, Any]]]
    steps: NotRequired[Size]
    grid: NotRequired[tuple[Annotated[int, Meta(ge=1, le=2**53)], Annotated[int, Meta(ge=1, le=2**53)]] | None]
    phases: NotRequired[list[SavedPhase]]
    stopped: NotRequired[bool]
    state: NotRequired[dict[str, Any]]
    closed: NotRequired[Size | None]
    best: NotRequired[tuple[str, str, Finite, Size] | None]
    own: NotRequired[dict[str, Any] | None]
    owed: NotRequired[dict[str, Any] | None]
    islands: NotRequired[dict[str, Any] | None]
    exact: NotRequired[dict[str, Any] | None]
    scaling: NotRequired[tuple[Annotated[float, Meta(gt=0, le=1e38)], Size] | None]


class SavedTree(TypedDict):
    trainers: list[SavedTrainer]
    results: NotRequired[list[Any]]


class SavedBest(TypedDict):
    trainer: Size
    name: str
    mode: str
    value: Finite


class SavedStreams(TypedDict):
    torch: Annotated[str, Meta(pattern="^[0-9a-f]*$")]
    random: tuple[int, list[int], float | None]
    numpy: NotRequired[list[Any]]
    cuda: NotRequired[Annotated[str, Meta(pattern="^[0-9a-f]*$")]]


class Manifest(TypedDict):
    format: Size
    step: Size
    files: dict[str, SavedFile]
    tensors: dict[str, SavedTensor]
    tree: NotRequired[Any]  # a SavedTree where a run wrote it
    written: NotRequired[str]
    plan: NotRequired[str]
    workers: NotRequired[Size]
    versions: NotRequired[dict[str, str] | None]
    best: NotRequired[list[SavedBest]]
    imported: NotRequired[str | None]
    script: NotRequired[str]
    script_name: NotRequired[str]
    streams: NotRequired[list[SavedStreams]]


class Index(TypedDict):
    weight_map: dict[str, Annotated[str, Meta(pattern="^[^/\\0]+\\.safetensors$")]]


class Mark(TypedDict):
    """What an export wrote into a folder."""

    files: list[str]
