"""Collectives over shared memory within a host.

All are rounds of one exchange: everybody fills a staging block, arrives, waits for all, and reads the others' blocks.
Sums are taken in the order of the workers, so that all get the same bits. Tensors are flat and contiguous; `fp` is the
fingerprint of the collective, the same on all workers or MismatchError is raised.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch

from paceline.comm.progress_engine import Steps
from paceline.comm.shared_memory import BLOCK, Shared, SymmetricBuffer

Reduction = Callable[..., torch.Tensor]  # torch.add, torch.maximum, ...: two tensors and out=
CHUNK = 1 << 18  # bytes that stay in a core's cache from the sum to its copies
DIRECT = 1 << 16  # bytes up to which three workers and more each sum all by themselves


class UnevenError(ValueError):
    """In an all-to-all, worker `source` gives worker `target` so many bytes, which takes another number."""

    def __init__(self, source: int, target: int, given: int, taken: int) -> None:
        super().__init__(source, target, given, taken)
        self.source, self.target, self.given, self.taken = source, target, given, taken


def barrier(shared: Shared, fp: int) -> Steps:
    yield shared.arrive(fp)


def all_reduce(shared: Shared, flat: torch.Tensor, reduction: Reduction, fp: int) -> Steps:
    """Reduces `flat` in place on all workers."""
    if shared.count > 2 and flat.nbytes > DIRECT:
        yield from _reduce_and_gather(shared, flat, reduction, fp)
        return
    for piece, blocks in _rounds(shared, flat):
        blocks[shared.me].copy_(piece)
        yield shared.arrive(fp)
        if shared.count == 2:  # either way round it is the same sum
            reduction(piece, blocks[1 - shared.me], out=piece)
        else:
            _reduce_all(blocks, reduction, piece)


def _reduce_and_gather(shared: Shared, flat: torch.Tensor, reduction: Reduction, fp: int) -> Steps:
    """Each worker reduces its part of a block, and takes the others' parts from them."""
    me = shared.me
    for piece, blocks in _rounds(shared, flat):
        blocks[me].copy_(piece)
        yield shared.arrive(fp)
        cuts = _even(len(piece), shared.count)
        own = piece[cuts[me] : cuts[me + 1]]
        _reduce_all([block[cuts[me] : cuts[me + 1]] for block in blocks], reduction, own)
        blocks[me][cuts[me] : cuts[me + 1]].copy_(own)  # nobody else reads this part of this block before
        yield shared.arrive(fp)
        for place in shared.others:
            piece[cuts[place] : cuts[place + 1]].copy_(blocks[place][cuts[place] : cuts[place + 1]])


def all_reduce_in_place(
    shared: Shared, arena: SymmetricBuffer, reduction: Reduction, fp: int, into: Sequence[int] | None = None
) -> Steps:
    """Reduces everybody's tensors of an arena into all of them or the places `into`.

    Each worker reduces its stretch of all tensors and writes the result into all of them: each byte is read and
    written once, while it is in the cache.
    """
    yield shared.arrive(fp)
    parts, squares = arena.parts, 0.0
    measure = arena.measure and into is None and parts[0].dtype in (torch.float32, torch.float64)
    me, step = shared.me, max(1, CHUNK // parts[0].itemsize)
    targets = range(shared.count) if into is None else into
    cuts = _even(len(parts[0]), shared.count)
    scratch = None if shared.count == 2 else torch.empty(step, dtype=parts[0].dtype)
    for start in range(cuts[me], cuts[me + 1], step):
        pieces = [part[start : min(start + step, cuts[me + 1])] for part in parts]
        if scratch is None:
            first = pieces[targets[0]]
            reduction(pieces[0], pieces[1], out=first)
            rest = targets[1:]
        else:
            first, rest = scratch[: len(pieces[0])], targets
            _reduce_all(pieces, reduction, first)
        for place in rest:
            pieces[place].copy_(first)
        if measure:
            squares += float(torch.dot(first, first))
    arena.squares = squares if measure else None
    yield shared.arrive(fp)


def reduce(shared: Shared, flat: torch.Tensor, root: int, reduction: Reduction, fp: int) -> Steps:
    """Reduces into `flat` of the place `root`; the others' stay as they are."""
    for piece, blocks in _rounds(shared, flat):
        blocks[shared.me].copy_(piece)
        yield shared.arrive(fp)
        if shared.me == root:
            _reduce_all(blocks, reduction, piece)


def broadcast(shared: Shared, flat: torch.Tensor, root: int, fp: int) -> Steps:
    for piece, blocks in _rounds(shared, flat):
        if shared.me == root:
            blocks[root].copy_(piece)
        yield shared.arrive(fp)
        if shared.me != root:
            piece.copy_(blocks[root])


def all_gather(shared: Shared, outs: Sequence[torch.Tensor], flat: torch.Tensor, fp: int) -> Steps:
    """`outs` has a tensor like `flat` per place; with none, this worker only gives (as in a gather)."""
    start = 0
    for piece, blocks in _rounds(shared, flat):
        blocks[shared.me].copy_(piece)
        yield shared.arrive(fp)
        for place, out in enumerate(outs):
            out[start : start + len(piece)].copy_(blocks[place])
        start += len(piece)


def reduce_scatter(
    shared: Shared, out: torch.Tensor, parts: Sequence[torch.Tensor], reduction: Reduction, fp: int
) -> Steps:
    """`parts` has a tensor like `out` per place: each worker gets the reduction of everybody's part for it."""
    step = _aligned(BLOCK // shared.count)
    for start in _starts(out, step):
        length = min(step // out.itemsize, len(out) - start)
        rows = [_cut(block, shared.count, step, out.dtype) for block in shared.blocks()]
        for place in shared.others:
            rows[shared.me][place][:length].copy_(parts[place][start : start + length])
        mine = parts[shared.me][start : start + length]
        yield shared.arrive(fp)
        sources = [mine if place == shared.me else rows[place][shared.me][:length] for place in range(shared.count)]
        _reduce_all(sources, reduction, out[start : start + length])


def reduce_scatter_in_place(shared: Shared, arena: SymmetricBuffer, reduction: Reduction, fp: int) -> Steps:
    """Reduces everybody's tensors of an arena, each place its own stretch of them, in its own memory."""
    yield shared.arrive(fp)
    step = max(1, CHUNK // arena.parts[0].itemsize)
    rows = [part.view(shared.count, -1)[shared.me] for part in arena.parts]
    order = [shared.me, *shared.others] if shared.count == 2 else range(shared.count)
    scratch = torch.empty(step, dtype=rows[0].dtype)
    for start in range(0, len(rows[0]), step):
        pieces = [rows[place][start : start + step] for place in order]
        if shared.count == 2:  # either way round it is the same sum
            reduction(pieces[0], pieces[1], out=pieces[0])
        else:
            whole = scratch[: len(pieces[0])]
            _reduce_all(pieces, reduction, whole)
            pieces[shared.me].copy_(whole)
    yield shared.arrive(fp)


def all_to_all(shared: Shared, outs: Sequence[torch.Tensor], ins: Sequence[torch.Tensor], fp: int) -> Steps:
    """Each worker's `ins[place]` becomes that place's `outs[this place]`; lengths may differ, as flat bytes.

    A scatter is an all-to-all where only one has something to give.
    """
    me, step = shared.me, _aligned(BLOCK // shared.count)
    counts = [block[: 16 * shared.count].view(torch.int64) for block in shared.blocks()]
    counts[me].copy_(lengths(outs, ins))
    yield shared.arrive(fp)
    longest = meet(torch.stack(counts))
    outs[me].copy_(ins[me])
    for start in range(0, longest, step):
        rows = [_cut(block, shared.count, step, torch.uint8) for block in shared.blocks()]
        for place in shared.others:
            part = ins[place][start : start + step]
            rows[me][place][: len(part)].copy_(part)
        yield shared.arrive(fp)
        for place in shared.others:
            part = outs[place][start : start + step]
            part.copy_(rows[place][me][: len(part)])


def lengths(outs: Sequence[torch.Tensor], ins: Sequence[torch.Tensor]) -> torch.Tensor:
    """What a worker says before an all-to-all: what it gives to each, and then what it takes."""
    return torch.tensor([len(part) for part in (*ins, *outs)], dtype=torch.int64)


def meet(said: torch.Tensor) -> int:
    """The longest part of an all-to-all of which each worker said a row, all the same ones. Raises UnevenError on all
    of them if one takes another length than it is given.
    """
    given, taken = said.view(len(said), 2, len(said)).unbind(1)
    for source, target in (given != taken.t()).nonzero().tolist():
        raise UnevenError(source, target, int(given[source, target]), int(taken[target, source]))
    return int(given.max())


def _rounds(shared: Shared, flat: torch.Tensor) -> Iterator[tuple[torch.Tensor, list[torch.Tensor]]]:
    """Pieces of `flat` with the staging blocks for each, as tensors of its dtype and of the piece's length."""
    for start in _starts(flat, BLOCK):
        piece = flat[start : start + BLOCK // flat.itemsize]
        yield piece, [block[: piece.nbytes].view(flat.dtype) for block in shared.blocks()]


def _starts(flat: torch.Tensor, step: int) -> range:
    """Where the pieces begin; an empty tensor is one empty piece, so that workers still meet."""
    return range(0, max(len(flat), 1), step // flat.itemsize)


def _reduce_all(sources: Sequence[torch.Tensor], reduction: Reduction, out: torch.Tensor) -> None:
    """The reduction of all sources in their order; `out` may be the first of them and none of the others."""
    if len(sources) == 1:
        out.copy_(sources[0])
        return
    if any(out.data_ptr() == source.data_ptr() for source in sources[2:]):
        sources = [*sources[:2], *(source.clone() for source in sources[2:])]
    reduction(sources[0], sources[1], out=out)
    for source in sources[2:]:
        reduction(out, source, out=out)


def _even(length: int, count: int) -> list[int]:
    """Cuts of a length into `count` stretches, which begin at multiples of a cache line's elements."""
    step = -(-length // count)
    step = -(-step // 16) * 16
    return [min(place * step, length) for place in range(count + 1)]


def _aligned(step: int) -> int:
    return step // 64 * 64


def _cut(block: torch.Tensor, count: int, step: int, dtype: torch.dtype) -> list[torch.Tensor]:
    return [block[place * step : (place + 1) * step].view(dtype) for place in range(count)]
