"""Packs documents of unequal length into rows of equal length, so that few tokens are padding and none is cut off.

A document goes into the row with the least room that it fits into, the longest documents first (best-fit decreasing;
Ding et al., "Fewer Truncations Improve Language Modeling", 2024). Longer documents than a row are cut into pieces.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Mapping, Sequence
from operator import index
from typing import Any

import numpy as np
import torch

from paceline.data.order import sample_index
from paceline.data.tokens import IGNORED
from paceline.errors import DatasetError, UsageError


class PackedDocuments:
    """Rows of `length` tokens, each made of one or several documents: a dataset with random access.

    `documents` has a length, and each document is a sequence of token ids, or a mapping with ``input_ids`` and, if only
    some tokens count in the loss, ``labels``. Their `lengths` may be given; otherwise each document is read once.
    Documents without tokens are left out. The end of a row that no document fits into has the token `pad`.

    Each row is a dict of int64 tensors of shape (length,):

    - ``input_ids``.
    - ``position_ids``: they begin with 0 in each document, and in the padding. Models of transformers find the
      documents by them, if they get no attention mask and no cache; `document_mask` makes a mask of them.
    - ``labels``: the same tokens, not shifted, as models of transformers take them. It is -100 for the first token of
      each document and for padding. So no document's loss depends on another document.

    May be pickled and forked if `documents` may.

    Raises UsageError for arguments that cannot work, DatasetError for a document that has another form or length.
    """

    def __init__(self, documents: Any, length: int, lengths: Sequence[int] | None = None, pad: int = 0) -> None:
        self.documents, self.length, self.pad = documents, index(length), index(pad)
        if self.length < 2:
            raise UsageError(f"length={length} is too small", "use a length of at least 2")
        if lengths is None:
            lengths = [len(self._read(number)[0]) for number in range(len(documents))]
        elif len(lengths) != len(documents):
            what = f"{len(lengths)} lengths were given for {len(documents)} documents"
            raise UsageError(what, "give the length of each document, or leave lengths= out")
        self._lengths = np.asarray(lengths, dtype=np.int64)
        self._pieces, self._starts = _pack(self._lengths, self.length)
        if not len(self):
            raise DatasetError("no document has a token", "look at the documents: each is a sequence of token ids")

    def __len__(self) -> int:
        return len(self._starts) - 1

    def __getitem__(self, row: int) -> dict[str, torch.Tensor]:
        row = index(row)
        if not -len(self) <= row < len(self):
            raise IndexError(row)
        ids = torch.full((self.length,), self.pad, dtype=torch.int64)
        labels, positions = torch.full((self.length,), IGNORED, dtype=torch.int64), torch.zeros_like(ids)
        end = 0
        for number, start, stop in self.pieces(row):
            tokens, targets = self._read(number)
            if len(tokens) != self._lengths[number]:
                what = f"document {number} has {len(tokens)} tokens, and not {self._lengths[number]} as before"
                raise DatasetError(what, "give a dataset that does not change, and the right lengths=")
            begin, end = end, end + stop - start
            ids[begin:end], labels[begin:end] = tokens[start:stop], targets[start:stop]
            labels[begin] = IGNORED
            positions[begin:end] = torch.arange(stop - start, dtype=torch.int64)
        positions[end:] = torch.arange(self.length - end, dtype=torch.int64)
        return {"input_ids": ids, "labels": labels, "position_ids": positions}

    def _read(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the ids and the labels of a document."""
        document = self.documents[number]
        fields = document if isinstance(document, Mapping) else {"input_ids": document}
        try:
            ids = torch.as_tensor(fields["input_ids"], dtype=torch.int64)
            labels = torch.as_tensor(fields.get("labels", ids), dtype=torch.int64)
        except (KeyError, TypeError, ValueError, RuntimeError) as error:
            what = f"document {number} is not a sequence of token ids ({type(error).__name__}: {error})"
            raise DatasetError(what, "give sequences of ids, or mappings with input_ids and labels") from error
        if ids.dim() != 1 or labels.shape != ids.shape:
            what = f"document {number} has ids of shape {tuple(ids.shape)} and labels of shape {tuple(labels.shape)}"
            raise DatasetError(what, "give one id and one label for each token")
        return ids, labels

    def pieces(self, row: int) -> list[tuple[int, int, int]]:
        """Returns the documents of a row in their order: the number of each, and which of its tokens the row has."""
        row %= len(self)
        return [(int(a), int(b), int(c)) for a, b, c in self._pieces[self._starts[row] : self._starts[row + 1]]]

    def cost(self, row: int) -> int:
        """Returns how many pairs of tokens attention computes in a row: the sum of the squared lengths of documents."""
        return sum((stop - start) ** 2 for _, start, stop in self.pieces(row))

    def order(self, global_batch: int) -> BalancedOrder:
        """Returns a sample order for ``trainer.steps(order=...)`` that spreads attention evenly over the workers.

        It is the default order, in which the `global_batch` rows of a step change their places: both halves of them
        have about the same `cost`, and so have both halves of each half, and so on. The number of workers does not
        matter.
        """
        return BalancedOrder([self.cost(row) for row in range(len(self))], global_batch)


class BalancedOrder:
    """A sample order in which workers compute about as long for their shares of a global batch.

    To halve some rows, the costliest are dealt first, each to the half that has cost less so far for its size (Graham,
    "Bounds on Multiprocessing Timing Anomalies", 1969).
    """

    def __init__(self, costs: Sequence[int], global_batch: int) -> None:
        self._costs, self._batch = costs, index(global_batch)
        if self._batch < 1:
            raise UsageError(f"global_batch={global_batch} is too small", "give the global batch of the Trainer")
        self._known: tuple[tuple[int, int, int], list[int]] | None = None  # the last global batch

    def __call__(self, position: int, size: int, seed: int, epoch: int) -> int:
        """Returns the row at this position of an epoch."""
        first = position - position % self._batch
        key = first, seed, epoch
        if self._known is None or self._known[0] != key:
            positions = range(first, min(first + self._batch, size))
            rows = [sample_index(number, size, seed, epoch) for number in positions]
            self._known = key, self._arranged(sorted(rows, key=lambda row: (-self._costs[row], row)))
        return self._known[1][position - first]

    def _arranged(self, rows: list[int]) -> list[int]:
        """Returns rows, the costliest first, such that shares of them cost about the same."""
        if len(rows) < 2:
            return rows
        sizes = len(rows) // 2, len(rows) - len(rows) // 2
        halves: tuple[list[int], list[int]] = [], []
        sums = [0, 0]
        for row in rows:
            free = [n for n in (0, 1) if len(halves[n]) < sizes[n]]
            half = min(free, key=lambda n: sums[n] / sizes[n])
            halves[half].append(row)
            sums[half] += self._costs[row]
        return [*self._arranged(halves[0]), *self._arranged(halves[1])]


def document_mask(position_ids: torch.Tensor) -> torch.Tensor:
    """Returns the causal attention mask of packed documents: true where a token may see another one.

    `position_ids` (rows x tokens) begin with 0 in each document. The mask is boolean, rows x 1 x tokens x tokens, for
    ``scaled_dot_product_attention(..., attn_mask=mask)``.
    """
    documents = (position_ids == 0).cumsum(-1)
    same = documents.unsqueeze(-1) == documents.unsqueeze(-2)
    return same.tril().unsqueeze(1)


def _pack(lengths: Any, length: int) -> tuple[Any, Any]:
    """Returns the pieces of documents row by row (document, first token, end), and where each row's pieces begin."""
    pieces = [
        (number, start, min(start + length, size))
        for number, size in enumerate(lengths.tolist())
        for start in range(0, size, length)
    ]
    pieces.sort(key=lambda piece: (piece[1] - piece[2], piece[0], piece[1]))
    rows: list[list[tuple[int, int, int]]] = []
    with_room: dict[int, list[int]] = {}  # rows by their room
    rooms: list[int] = []  # the amounts of room that rows have, sorted
    for piece in pieces:
        size = piece[2] - piece[1]
        at = bisect_left(rooms, size)
        if at < len(rooms):
            room = rooms[at]
            row = with_room[room].pop()
            if not with_room[room]:
                del with_room[room], rooms[at]
        else:
            room, row = length, len(rows)
            rows.append([])
        rows[row].append(piece)
        if left := room - size:
            if left not in with_room:
                with_room[left] = []
                insort(rooms, left)
            with_room[left].append(row)
    starts = np.cumsum([0, *map(len, rows)], dtype=np.int64)
    flat = np.asarray([piece for row in rows for piece in row], dtype=np.int64).reshape(-1, 3)
    return flat, starts
