"""Cuts batches into micro-batches, and joins micro-batches into chunks that are computed together."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from paceline.comm.torch_private import pytree
from paceline.errors import AddNote, UsageError

if TYPE_CHECKING:
    from paceline.comm.communicator import Group

_SHOWN = 12  # numbers of rows


@dataclass
class MicroBatch:
    """One micro-batch: its index in the grid, its number of rows, the collated batch, and the `source` of the rows.

    `numbers` are the rows' numbers in the dataset, `start` is the position of the first one in the global batch. If
    several workers share the micro-batch, `part` is this worker's range of rows until `take_part`, which sets
    `divided`. A dummy (`is_dummy`) only keeps workers of a replica in step and counts nothing. `row_mismatch` is a
    message if collate made other rows than it was given. With a loss over the global batch, `cached_grads` takes the
    place of the batch in the loss of the second run.
    """

    index: int
    rows: int
    batch: Any
    source: object = ""
    part: range | None = None
    is_dummy: bool = False
    numbers: tuple[int, ...] = ()
    start: int = 0
    divided: bool = False
    row_mismatch: str = ""
    cached_grads: Any = None

    def take_part(self) -> bool:
        """Reduces the batch to this worker's part of the rows; False if the batch cannot be divided by rows."""
        if self.part is None:
            return True
        if not in_rows(self.batch, self.rows):
            self.part = None
            return False
        self.batch = cut(self.batch, self.part)
        self.is_part()
        return True

    def is_part(self) -> None:
        """Marks the micro-batch as divided: its batch has only the rows of the part."""
        assert self.part is not None
        self.rows, self.numbers = len(self.part), self.numbers[self.part.start : self.part.stop]
        self.part, self.divided = None, True

    def halves(self) -> list[Chunk]:
        """Divides the rows into two parts, as unequal as workers may get them; empty if they cannot be divided."""
        grain = -(-self.rows // 8)
        parts = [replace(self, part=part) for part in (range(grain), range(grain, self.rows)) if part]
        return [Chunk([part], part.batch) for part in parts if len(parts) > 1 and part.take_part()]


@dataclass
class Chunk:
    """What one forward and backward computes: one micro-batch, or several merged."""

    micro_batches: list[MicroBatch]
    batch: Any

    @property
    def rows(self) -> int:
        """The number of rows."""
        return sum(micro_batch.rows for micro_batch in self.micro_batches)

    @property
    def plain(self) -> bool:
        """Whether this is one undivided micro-batch."""
        return len(self.micro_batches) == 1 and not self.micro_batches[0].divided

    @property
    def sources(self) -> list[str]:
        """For each micro-batch, what an error message calls it."""
        return [str(m.source) or f"micro-batch {m.index}" for m in self.micro_batches]

    @property
    def source(self) -> str:
        """What an error message calls all of it."""
        return ", ".join(self.sources)

    def __str__(self) -> str:
        return self.source

    @property
    def noted(self) -> AddNote:
        """Returns the context for computing the chunk, which adds the dataset rows to exceptions as a note."""
        return AddNote(self._rows_or_source)

    def _rows_or_source(self) -> str:
        numbers = [number for micro_batch in self.micro_batches for number in micro_batch.numbers]
        return rows_told([micro_batch.index for micro_batch in self.micro_batches], numbers) or self.source


def rows_told(indices: Sequence[int], numbers: Sequence[int]) -> str:
    """Describes the rows of micro-batches by their numbers in the dataset; of many only the first ones."""
    shown = ", ".join(map(str, numbers[:_SHOWN])) + (f" and {len(numbers) - _SHOWN} more" if numbers[_SHOWN:] else "")
    which = f"micro-batch{'es' if len(indices) > 1 else ''} {', '.join(map(str, indices))}"
    return f"{which}: row{'s' if len(numbers) > 1 else ''} {shown} of the dataset" if numbers else ""


def name_of(device: torch.device) -> str:
    """Returns the name of a GPU, or the type of another device."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def tensors_of(batch: Any) -> list[torch.Tensor]:
    """All tensors in a nesting of containers, in the order of its leaves."""
    return [leaf for leaf in pytree.tree_leaves(batch) if isinstance(leaf, torch.Tensor)]


def in_rows(batch: Any, rows: int) -> bool:
    """Whether all leaves of a batch are tensors of `rows` rows, so that it can be divided."""
    leaves = pytree.tree_leaves(batch)
    return bool(leaves) and all(isinstance(leaf, torch.Tensor) and leaf.shape[:1] == (rows,) for leaf in leaves)


def digest_of(batch: Any) -> str:
    """SHA-256 of the bytes of all tensors in a nesting, as hex digits."""
    digest = hashlib.sha256()
    for tensor in tensors_of(batch):
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def refuse_other_input(group: Group, given: Any, model: str, why: str) -> None:
    """Raises UsageError if the workers of a group call a model that they compute together with different inputs.

    `why` says which plan word makes them compute it together. Part of the entered collective.
    """
    digests = group.gather_json(digest_of(given))
    other = next((rank for rank, digest in enumerate(digests) if digest != digests[0]), None)
    if other is not None:
        one, two = group.names[0], group.names[other]
        what = f"workers {one} and {two} call {model} with different inputs, but {why}, so they compute it together"
        cure = "pass the same input on all of them, for example torch.cat(paceline.join().gather(x))"
        raise UsageError(what, cure)


def rows_of(batch: Any) -> int:
    """Returns the number of rows of a batch: the common first dimension of its tensors. Raises UsageError if there is
    no common one.
    """
    sizes = {tensor.shape[0] for tensor in tensors_of(batch) if tensor.dim()}
    if len(sizes) != 1:
        raise UsageError(
            f"the rows of the batch cannot be counted: the first dimensions of its tensors are {sorted(sizes)}"
            if sizes
            else "the rows of the batch cannot be counted: it has no tensor with dimensions",
            "provide tensors with the rows as first dimension, all with the same number of rows",
        )
    return sizes.pop()


def cut(batch: Any, rows: range) -> Any:
    """The given rows of a batch: every tensor is narrowed along its first dimension."""
    return pytree.tree_map(
        lambda leaf: leaf[rows.start : rows.stop] if isinstance(leaf, torch.Tensor) and leaf.dim() else leaf, batch
    )


def to_device(batch: Any, device: torch.device) -> Any:
    """The same nesting with all tensors on the device; the copy is asynchronous where memory is pinned."""
    if device.type == "cpu":
        return batch
    return pytree.tree_map(
        lambda leaf: leaf.to(device, non_blocking=True) if isinstance(leaf, torch.Tensor) else leaf, batch
    )


def _columns(micro_batches: Sequence[MicroBatch]) -> tuple[list[tuple[torch.Tensor, ...]], Any]:
    """Returns the batches' tensors by their position in the first batch, and its nesting. Returns no tensors if the
    batches differ in more than their rows, so that they cannot be concatenated.
    """
    flat = [_flattened(micro_batch.batch) for micro_batch in micro_batches]
    for (leaves, spec), micro_batch in zip(flat, micro_batches, strict=True):
        rows = all(isinstance(leaf, torch.Tensor) and leaf.shape[:1] == (micro_batch.rows,) for leaf in leaves)
        if not rows or spec != flat[0][1]:
            return [], spec
    columns = list(zip(*(leaves for leaves, _ in flat), strict=True))
    alike = all(len({(leaf.shape[1:], leaf.dtype) for leaf in column}) == 1 for column in columns)
    return columns if alike else [], flat[0][1]


def _flattened(batch: Any) -> tuple[list[Any], Any]:
    """Flattens a batch. For a list of tensors, the usual batch, pytree takes ten times as long."""
    if type(batch) is list and all(type(leaf) is torch.Tensor for leaf in batch):
        return batch, len(batch)
    return pytree.tree_flatten(batch)


def join(micro_batches: Sequence[MicroBatch]) -> Chunk | None:
    """Returns one chunk of several micro-batches, or None if their batches cannot be concatenated."""
    if len(micro_batches) == 1:
        return Chunk(list(micro_batches), micro_batches[0].batch)
    columns, spec = _columns(micro_batches)
    if not columns:
        return None
    together = [torch.cat(column) for column in columns]
    return Chunk(list(micro_batches), together if type(spec) is int else pytree.tree_unflatten(together, spec))


def merged(micro_batches: Sequence[MicroBatch], at_most: int) -> list[Chunk]:
    """Returns chunks of up to `at_most` micro-batches; those that cannot be concatenated get a chunk each."""
    if at_most > 1 and micro_batches:
        # Equal chunks rather than full ones and a rest: 5 in chunks of at most 4 are 3 and 2.
        at_most = math.ceil(len(micro_batches) / math.ceil(len(micro_batches) / at_most))
    chunks: list[Chunk] = []
    for start in range(0, len(micro_batches), at_most):
        group = micro_batches[start : start + at_most]
        chunk = join(group)
        chunks.extend([chunk] if chunk is not None else [Chunk([m], m.batch) for m in group])
    return chunks
