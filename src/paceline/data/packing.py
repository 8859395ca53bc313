"""Packs documents of unequal length into rows of equal length, so that few tokens are padding.

Three methods assign documents to rows. Best fit: the longest documents first, each into the row with the least room
that it fits into (best-fit decreasing; Ding et al., "Fewer Truncations Improve Language Modeling", 2024). First fit:
in the order of the documents, each into the first row that has room (Johnson, "Near-optimal Bin Packing Algorithms",
1973). Both cut documents that are longer than a row into pieces. Concatenation: one document after another, cut at the
end of each row.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Mapping, Sequence
from operator import index
from typing import Any

import numpy as np
import torch

from paceline.data.order import sample_index
from paceline.data.tokens import IGNORED
from paceline.errors import DatasetError, UsageError


def pack(
    documents: Any, length: int, method: str = "best-fit", lengths: Sequence[int] | None = None, pad: int = 0
) -> PackedDocuments:
    """Packs documents into rows of `length` tokens; returns a dataset of these rows, a `PackedDocuments`.

    `documents` has a length, and each document is a sequence of token ids, or a mapping with ``input_ids`` and perhaps
    ``labels``. `method` is one of:

    - ``"best-fit"``: no document crosses the end of a row unless it is longer than a row, and hardly any token is
      padding. Rows have documents of any part of the dataset.
    - ``"first-fit"``: no document crosses the end of a row either, and documents stay near each other: each goes into
      the first row that has room, in their order. More tokens may be padding.
    - ``"concatenate"``: documents follow one another, and are cut where a row ends. Only the last row has padding. The
      rest of a document in the next row begins there anew: it does not see its beginning.

    `lengths` are those of the documents, if they are known; otherwise each document is read once. The end of a row that
    nothing fits into has the token `pad`.

    Raises UsageError for arguments that cannot work, DatasetError for a document that has another form or length.
    """
    return PackedDocuments(documents, length, lengths, pad, method)


class PackedDocuments:
    """Rows of `length` tokens, each made of one or several documents: a dataset with random access, made by `pack`.

    `documents` has a length, and each document is a sequence of token ids, or a mapping with ``input_ids`` and, if only
    some tokens count in the loss, ``labels``. Their `lengths` may be given; otherwise each document is read once.
    Documents without tokens are left out. The end of a row that no document fits into has the token `pad`. `method`:
    see `pack`.

    Each row is a dict of int64 tensors of shape (length,):

    - ``input_ids``.
    - ``position_ids``: they begin with 0 in each document, and in the padding. Models of transformers find the
      documents by them, if they get no attention mask and no cache; `document_mask` makes a mask of them.
    - ``labels``: the same tokens, not shifted, as models of transformers take them. It is -100 for the first token of
      each document and for padding. So no document's loss depends on another document.

    May be pickled and forked if `documents` may.

    Raises UsageError for arguments that cannot work, DatasetError for a document that has another form or length.
    """

    def __init__(
        self,
        documents: Any,
        length: int,
        lengths: Sequence[int] | None = None,
        pad: int = 0,
        method: str = "best-fit",
    ) -> None:
        self.documents, self.length, self.pad = documents, index(length), index(pad)
        if method not in _METHODS:
            raise UsageError(f"method={method!r} is not a way to pack documents", f"use {', '.join(_METHODS)}")
        if self.length < 2:
            raise UsageError(f"length={length} is too small", "use a length of at least 2")
        if lengths is None:
            lengths = [len(self._read(number)[0]) for number in range(len(documents))]
        elif len(lengths) != len(documents):
            what = f"{len(lengths)} lengths were given for {len(documents)} documents"
            raise UsageError(what, "give the length of each document, or leave lengths= out")
        self._lengths = np.asarray(lengths, dtype=np.int64)
        rows = _METHODS[method](self._lengths.tolist(), self.length)
        self._starts = np.cumsum([0, *map(len, rows)], dtype=np.int64)
        self._pieces = np.asarray([piece for row in rows for piece in row], dtype=np.int64).reshape(-1, 3)
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


def document_ids(position_ids: torch.Tensor) -> torch.Tensor:
    """Returns the number, from 0, of the document that each token of packed documents is in; each row counts anew.

    `position_ids` (rows x tokens) begin with 0 in each document; padding counts as a document. The result is int64,
    rows x tokens. A mask for ``flex_attention`` compares the numbers of two tokens.
    """
    return (position_ids == 0).cumsum(-1) - 1


def document_mask(position_ids: torch.Tensor) -> torch.Tensor:
    """Returns the causal attention mask of packed documents: true where a token may see another one.

    `position_ids` (rows x tokens) begin with 0 in each document. The mask is boolean, rows x 1 x tokens x tokens, for
    ``scaled_dot_product_attention(..., attn_mask=mask)``.
    """
    documents = document_ids(position_ids)
    same = documents.unsqueeze(-1) == documents.unsqueeze(-2)
    return same.tril().unsqueeze(1)


def document_offsets(position_ids: torch.Tensor) -> torch.Tensor:
    """Returns where documents begin in the tokens of all rows, one row after another, and last the number of tokens.

    `position_ids` (rows x tokens) begin with 0 in each document; padding counts as a document. The result is int32 with
    one dimension: the ``cu_seqlens`` of FlashAttention, and ``cu_seq_q`` and ``cu_seq_k`` of torch's ``varlen_attn``.
    """
    flat = position_ids.flatten()
    return torch.cat([(flat == 0).nonzero()[:, 0], flat.new_tensor([len(flat)])]).to(torch.int32)


_Pieces = list[tuple[int, int, int]]  # of a row: the document, and the first token and the end in it


def _cut(lengths: Sequence[int], length: int) -> _Pieces:
    """Returns the documents in their order, longer ones than a row in pieces."""
    return [
        (number, start, min(start + length, size))
        for number, size in enumerate(lengths)
        for start in range(0, size, length)
    ]


def _best_fit(lengths: Sequence[int], length: int) -> list[_Pieces]:
    pieces = sorted(_cut(lengths, length), key=lambda piece: (piece[1] - piece[2], piece[0], piece[1]))
    rows = list[_Pieces]()
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
    return rows


def _first_fit(lengths: Sequence[int], length: int) -> list[_Pieces]:
    """Searches in a binary tree, in which each node has the largest room of the rows below it."""
    pieces = _cut(lengths, length)
    leaves = 1 << max(len(pieces) - 1, 0).bit_length()
    rooms, rows = [length] * (2 * leaves), [_Pieces() for _ in pieces]  # the root is node 1, rows begin at `leaves`
    for piece in pieces:
        size, node = piece[2] - piece[1], 1
        while node < leaves:
            node = 2 * node if rooms[2 * node] >= size else 2 * node + 1
        rows[node - leaves].append(piece)
        rooms[node] -= size
        while node > 1:
            node //= 2
            rooms[node] = max(rooms[2 * node], rooms[2 * node + 1])
    return [row for row in rows if row]


def _concatenated(lengths: Sequence[int], length: int) -> list[_Pieces]:
    rows, room = list[_Pieces](), 0
    for number, size in enumerate(lengths):
        start = 0
        while start < size:
            if not room:
                rows.append([])
                room = length
            stop = min(start + room, size)
            rows[-1].append((number, start, stop))
            room, start = room - (stop - start), stop
    return rows


_METHODS: dict[str, Callable[[Sequence[int], int], list[_Pieces]]] = {
    "best-fit": _best_fit,
    "first-fit": _first_fit,
    "concatenate": _concatenated,
}
