"""Types of manifests and of safetensors indexes.

This module needs msgspec, so it is imported only when a file is read. No torch.

Manifests of version 1 have no tree. Fields that are not listed here are accepted: they belong to the user or to later
versions.
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
    """Size and SHA-256 of a file of a checkpoint."""

    bytes: Size
    sha256: Hash


class SavedPart(TypedDict):
    """A block of a tensor that lies in one file: the index at which it begins, and its shape."""

    file: str
    at: Shape
    shape: Shape


class SavedTensor(TypedDict):
    """Dtype and full shape of a tensor, and the file that holds it, or the parts that do."""

    dtype: Dtype
    shape: Shape
    file: NotRequired[str]
    parts: NotRequired[list[SavedPart]]


class SavedPhase(TypedDict):
    """The progress of one loop over `steps()`."""

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
    stream: NotRequired[dict[str, Any] | None]


class SavedGroup(TypedDict):
    """A parameter group of an optimizer: the names of its parameters; its options are extra fields."""

    params: list[str]


class SavedOptimizer(TypedDict):
    """Parameter groups and state of an optimizer."""

    groups: list[SavedGroup]
    state: dict[str, Any]


class ImportedOptimizer(TypedDict):
    """The state of an optimizer of another program.

    `params` are the parameters of each group: their names, or their numbers if the program did not save names. The keys
    of `state` are the same as text, and `options` are the groups' options.
    """

    params: list[list[str | Size]]
    state: dict[str, dict[str, Any]]
    options: list[dict[str, Any]]


class SavedTrainer(TypedDict):
    """The saved state of a trainer; `closed` is the step at which it ended."""

    model: NotRequired[dict[str, Any]]
    optimizers: NotRequired[list[SavedOptimizer]]
    imported_optimizers: NotRequired[list[ImportedOptimizer]]
    schedulers: NotRequired[list[dict[str, Any]]]
    steps: NotRequired[Size]
    grid: NotRequired[tuple[Annotated[int, Meta(ge=1, le=2**53)], Annotated[int, Meta(ge=1, le=2**53)]] | None]
    phases: NotRequired[list[SavedPhase]]
    stopped: NotRequired[bool]
    state: NotRequired[dict[str, Any]]
    closed: NotRequired[Size | None]
    best: NotRequired[tuple[str, str, Finite, Size] | None]
    next_best: NotRequired[list[tuple[Finite, Size]]]  # values and steps of the other best checkpoints that are kept
    early_stop: NotRequired[tuple[str, str, Finite | None, Size] | None]
    own: NotRequired[dict[str, Any] | None]
    owed: NotRequired[dict[str, Any] | None]
    islands: NotRequired[dict[str, Any] | None]
    exact: NotRequired[dict[str, Any] | None]
    scaling: NotRequired[tuple[Annotated[float, Meta(gt=0, le=1e38)], Size] | None]


class SavedTree(TypedDict):
    """The saved state of all trainers, in the order in which the script creates them."""

    trainers: list[SavedTrainer]
    results: NotRequired[list[Any]]


class SavedBest(TypedDict):
    """The value that made this checkpoint one of the best so far of a trainer; so many of these are kept."""

    trainer: Size
    name: str
    mode: str
    value: Finite
    kept: NotRequired[Size]


class SavedStreams(TypedDict):
    """The states of a worker's random number generators."""

    torch: Annotated[str, Meta(pattern="^[0-9a-f]*$")]
    random: tuple[int, list[int], float | None]
    numpy: NotRequired[list[Any]]
    cuda: NotRequired[Annotated[str, Meta(pattern="^[0-9a-f]*$")]]


class Manifest(TypedDict):
    """The manifest of a checkpoint."""

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
    """The index of a Hugging Face folder with several safetensors files: the file of each tensor."""

    weight_map: dict[str, Annotated[str, Meta(pattern="^[^/\\0]+\\.safetensors$")]]


class TorchIndex(TypedDict):
    """The index of a Hugging Face folder with several files of torch.save."""

    weight_map: dict[str, Annotated[str, Meta(pattern="^[^/\\0]+\\.bin$")]]


class Mark(TypedDict):
    """The names of the files that an export wrote into a folder."""

    files: list[str]
