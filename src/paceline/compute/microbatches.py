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
        """Leaves the rows of this worker's part; whether they can be told from the others."""
        if self.part is None:
            return True
        if not in_rows(self.batch, self.rows):
            self.part = None
            return False
        self.batch = cut(self.batch, self.part)
        self.is_part()
        return True

    def is_part(self) -> None:
        """The batch has no other rows than those of the part."""
        assert self.part is not None
        self.rows, self.numbers = len(self.part), self.numbers[self.part.start : self.part.stop]
        self.part, self.divided = None, True

    def halves(self) -> list[Chunk]:
        """The rows as two workers could share them, in as unequal parts as there may be; none if they cannot."""
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
        return sum(micro_batch.rows for micro_batch in self.micro_batches)

    @property
    def plain(self) -> bool:
        """One micro-batch and all of it."""
        return len(self.micro_batches) == 1 and not self.micro_batches[0].divided

    @property
    def sources(self) -> list[str]:
        return [str(m.source) or f"micro-batch {m.index}" for m in self.micro_batches]

    @property
    def source(self) -> str:
        return ", ".join(self.sources)

    def __str__(self) -> str:
        return self.source

    @property
    def noted(self) -> AddNote:
        """The context of the chunk's computation, which adds the dataset rows to an exception that is raised in it."""
        return AddNote(self._rows_or_source)

    def _rows_or_source(self) -> str:
        numbers = [number for micro_batch in self.micro_batches for number in micro_batch.numbers]
        return rows_told([micro_batch.index for micro_batch in self.micro_batches], numbers) or self.source


def rows_told(indices: Sequence[int], numbers: Sequence[int]) -> str:
    """The rows of micro-batches by their numbers in the dataset, the first of them where they are many."""
    shown = ", ".join(map(str, numbers[:_SHOWN])) + (f" and {len(numbers) - _SHOWN} more" if numbers[_SHOWN:] else "")
    which = f"micro-batch{'es' if len(indices) > 1 else ''} {', '.join(map(str, indices))}"
    return f"{which}: row{'s' if len(numbers) > 1 else ''} {shown} of the dataset" if numbers else ""


def tensors_of(batch: Any) -> list[torch.Tensor]:
    """All tensors in a nesting of containers, in the order of its leaves."""
    return [leaf for leaf in pytree.tree_leaves(batch) if isinstance(leaf, torch.Tensor)]


def in_rows(batch: Any, rows: int) -> bool:
    """Whether all of a batch are tensors of so many rows, of which a part can be taken."""
    leaves = pytree.tree_leaves(batch)
    return bool(leaves) and all(isinstance(leaf, torch.Tensor) and leaf.shape[:1] == (rows,) for leaf in leaves)


def digest_of(batch: Any) -> str:
    """SHA-256 of the bytes of all tensors in a nesting, as hex digits."""
    digest = hashlib.sha256()
    for tensor in tensors_of(batch):
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def refuse_other_input(group: Group, given: Any, model: str, why: str) -> None:
    """Refuses what workers of a group give a model that they compute together, where it is not the same. Part of the
    entered collective.
    """
    digests = group.gather_json(digest_of(given))
    other = next((rank for rank, digest in enumerate(digests) if digest != digests[0]), None)
    if other is not None:
        one, two = group.names[0], group.names[other]
        what = f"worker {two} calls {model} with another input than worker {one}, and {why}"
        cure = "they compute it together: give all of them the same, as torch.cat(paceline.join().gather(x)) is"
        raise UsageError(what, cure)


def rows_of(batch: Any) -> int:
    """Rows of a batch: the common first dimension of its tensors. Raises UsageError where there is none."""
    sizes = {tensor.shape[0] for tensor in tensors_of(batch) if tensor.dim()}
    if len(sizes) != 1:
        raise UsageError(
            f"the rows of the batch cannot be counted: first dimensions are {sorted(sizes) or 'missing'}",
            "bring tensors whose first dimension is the row, all of one length",
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
    """The batches' tensors by their place in the first batch, and its nesting; no tensors if they are not alike but for
    their rows, so that concatenation would not mean the same rows.
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
    """Of a list of tensors, the usual batch, pytree makes the same in ten times the time."""
    if type(batch) is list and all(type(leaf) is torch.Tensor for leaf in batch):
        return batch, len(batch)
    return pytree.tree_flatten(batch)


def join(micro_batches: Sequence[MicroBatch]) -> Chunk | None:
    """One chunk of several micro-batches, or None if their batches cannot be concatenated."""
    if len(micro_batches) == 1:
        return Chunk(list(micro_batches), micro_batches[0].batch)
    columns, spec = _columns(micro_batches)
    if not columns:
        return None
    together = [torch.cat(column) for column in columns]
    return Chunk(list(micro_batches), together if type(spec) is int else pytree.tree_unflatten(together, spec))


def merged(micro_batches: Sequence[MicroBatch], at_most: int) -> list[Chunk]:
    """Pieces of up to `at_most` micro-batches each; what cannot be concatenated stays alone."""
    if at_most > 1 and micro_batches:
        # Equal chunks rather than full ones and a rest: 5 in chunks of at most 4 are 3 and 2.
        at_most = math.ceil(len(micro_batches) / math.ceil(len(micro_batches) / at_most))
    chunks: list[Chunk] = []
    for start in range(0, len(micro_batches), at_most):
        group = micro_batches[start : start + at_most]
        chunk = join(group)
        chunks.extend([chunk] if chunk is not None else [Chunk([m], m.batch) for m in group])
    return chunks
