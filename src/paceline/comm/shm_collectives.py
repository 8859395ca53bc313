"""Collectives over shared memory within a host.

All are rounds of one exchange: each worker fills a staging block, arrives, waits for all, and reads the others' blocks.
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
DIRECT = 1 << 16  # bytes up to which each of three or more workers sums everything itself


class UnevenError(ValueError):
    """Raised in an all-to-all where worker `source` gives `target` another number of bytes than that one takes."""

    def __init__(self, source: int, target: int, given: int, taken: int) -> None:
        super().__init__(source, target, given, taken)
        self.source, self.target, self.given, self.taken = source, target, given, taken


def barrier(shared: Shared, fp: int) -> Steps:
    """Waits until all workers of the host have arrived."""
    yield shared.arrive(fp)


def all_reduce(shared: Shared, flat: torch.Tensor, reduction: Reduction, fp: int) -> Steps:
    """Reduces `flat` in place on all workers."""
    if shared.count > 2 and flat.nbytes > DIRECT:
        yield from _reduce_and_gather(shared, flat, reduction, fp)
        return
    for piece, blocks in _rounds(shared, flat):
        blocks[shared.me].copy_(piece)
        yield shared.arrive(fp)
        if shared.count == 2:  # the sum is the same in either order
            reduction(piece, blocks[1 - shared.me], out=piece)
        else:
            _reduce_all(blocks, reduction, piece)


def _reduce_and_gather(shared: Shared, flat: torch.Tensor, reduction: Reduction, fp: int) -> Steps:
    """Reduces this worker's part of each block, and takes the other parts from their workers."""
    me = shared.me
    for piece, blocks in _rounds(shared, flat):
        blocks[me].copy_(piece)
        yield shared.arrive(fp)
        cuts = _even(len(piece), shared.count)
        own_part = piece[cuts[me] : cuts[me + 1]]
        _reduce_all([block[cuts[me] : cuts[me + 1]] for block in blocks], reduction, own_part)
        blocks[me][cuts[me] : cuts[me + 1]].copy_(own_part)  # nobody else reads this part of this block before
        yield shared.arrive(fp)
        for peer in shared.others:
            piece[cuts[peer] : cuts[peer + 1]].copy_(blocks[peer][cuts[peer] : cuts[peer + 1]])


def all_reduce_in_place(
    shared: Shared, arena: SymmetricBuffer, reduction: Reduction, fp: int, into: Sequence[int] | None = None
) -> Steps:
    """Reduces the tensors of all workers of an arena into all of them, or into those of the workers `into`.

    Each worker reduces its part of all tensors and writes the result into all of them: each byte is read and written
    once, while it is in the cache.
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
        for target in rest:
            pieces[target].copy_(first)
        if measure:
            squares += float(torch.dot(first, first))
    arena.squares = squares if measure else None
    yield shared.arrive(fp)


def reduce(shared: Shared, flat: torch.Tensor, root: int, reduction: Reduction, fp: int) -> Steps:
    """Reduces into `flat` of the worker `root`; the others' stay as they are."""
    for piece, blocks in _rounds(shared, flat):
        blocks[shared.me].copy_(piece)
        yield shared.arrive(fp)
        if shared.me == root:
            _reduce_all(blocks, reduction, piece)


def broadcast(shared: Shared, flat: torch.Tensor, root: int, fp: int) -> Steps:
    """Overwrites `flat` on all workers with that of the worker `root`."""
    for piece, blocks in _rounds(shared, flat):
        if shared.me == root:
            blocks[root].copy_(piece)
        yield shared.arrive(fp)
        if shared.me != root:
            piece.copy_(blocks[root])


def all_gather(shared: Shared, outs: Sequence[torch.Tensor], flat: torch.Tensor, fp: int) -> Steps:
    """Gathers the `flat` of all workers into `outs`, one tensor per worker; without `outs` this worker only gives,
    as in a gather.
    """
    start = 0
    for piece, blocks in _rounds(shared, flat):
        blocks[shared.me].copy_(piece)
        yield shared.arrive(fp)
        for source, out in enumerate(outs):
            out[start : start + len(piece)].copy_(blocks[source])
        start += len(piece)


def reduce_scatter(
    shared: Shared, out: torch.Tensor, parts: Sequence[torch.Tensor], reduction: Reduction, fp: int
) -> Steps:
    """Reduces the `parts` of all workers, one tensor like `out` per worker; `out` receives this worker's part."""
    step = _aligned(BLOCK // shared.count)
    for start in _starts(out, step):
        length = min(step // out.itemsize, len(out) - start)
        rows = [_cut(block, shared.count, step, out.dtype) for block in shared.blocks()]
        for peer in shared.others:
            rows[shared.me][peer][:length].copy_(parts[peer][start : start + length])
        own_part = parts[shared.me][start : start + length]
        yield shared.arrive(fp)
        sources = [own_part if peer == shared.me else rows[peer][shared.me][:length] for peer in range(shared.count)]
        _reduce_all(sources, reduction, out[start : start + length])


def reduce_scatter_in_place(shared: Shared, arena: SymmetricBuffer, reduction: Reduction, fp: int) -> Steps:
    """Reduces the tensors of all workers of an arena; each worker gets its own part of them, in its own memory."""
    yield shared.arrive(fp)
    step = max(1, CHUNK // arena.parts[0].itemsize)
    rows = [part.view(shared.count, -1)[shared.me] for part in arena.parts]
    order = [shared.me, *shared.others] if shared.count == 2 else range(shared.count)
    scratch = torch.empty(step, dtype=rows[0].dtype)
    for start in range(0, len(rows[0]), step):
        pieces = [rows[peer][start : start + step] for peer in order]
        if shared.count == 2:  # the sum is the same in either order
            reduction(pieces[0], pieces[1], out=pieces[0])
        else:
            reduced = scratch[: len(pieces[0])]
            _reduce_all(pieces, reduction, reduced)
            pieces[shared.me].copy_(reduced)
    yield shared.arrive(fp)


def all_to_all(shared: Shared, outs: Sequence[torch.Tensor], ins: Sequence[torch.Tensor], fp: int) -> Steps:
    """Sends `ins[i]` to worker i, and fills `outs[i]` from it: flat bytes, whose lengths may differ.

    A scatter is an all-to-all where only one worker has something to give.
    """
    me, step = shared.me, _aligned(BLOCK // shared.count)
    counts = [block[: 16 * shared.count].view(torch.int64) for block in shared.blocks()]
    counts[me].copy_(lengths(outs, ins))
    yield shared.arrive(fp)
    longest = check_lengths(torch.stack(counts))
    outs[me].copy_(ins[me])
    for start in range(0, longest, step):
        rows = [_cut(block, shared.count, step, torch.uint8) for block in shared.blocks()]
        for peer in shared.others:
            part = ins[peer][start : start + step]
            rows[me][peer][: len(part)].copy_(part)
        yield shared.arrive(fp)
        for peer in shared.others:
            part = outs[peer][start : start + step]
            part.copy_(rows[peer][me][: len(part)])


def lengths(outs: Sequence[torch.Tensor], ins: Sequence[torch.Tensor]) -> torch.Tensor:
    """What a worker announces before an all-to-all: how much it gives to each, and then how much it takes from each."""
    return torch.tensor([len(part) for part in (*ins, *outs)], dtype=torch.int64)


def check_lengths(rows: torch.Tensor) -> int:
    """Returns the longest part of an all-to-all, from the rows of lengths that all workers announced.

    Raises UnevenError, on all workers, if one takes another length than it is given.
    """
    given, taken = rows.view(len(rows), 2, len(rows)).unbind(1)
    for source, target in (given != taken.t()).nonzero().tolist():
        raise UnevenError(source, target, int(given[source, target]), int(taken[target, source]))
    return int(given.max())


def _rounds(shared: Shared, flat: torch.Tensor) -> Iterator[tuple[torch.Tensor, list[torch.Tensor]]]:
    """Yields pieces of `flat` with the staging blocks for each, as tensors of its dtype and of the piece's length."""
    for start in _starts(flat, BLOCK):
        piece = flat[start : start + BLOCK // flat.itemsize]
        yield piece, [block[: piece.nbytes].view(flat.dtype) for block in shared.blocks()]


def _starts(flat: torch.Tensor, step: int) -> range:
    """Where the pieces begin; an empty tensor is one empty piece, so that workers still meet."""
    return range(0, max(len(flat), 1), step // flat.itemsize)


def _reduce_all(sources: Sequence[torch.Tensor], reduction: Reduction, out: torch.Tensor) -> None:
    """Reduces all sources in their order; `out` may be the first of them and none of the others."""
    if len(sources) == 1:
        out.copy_(sources[0])
        return
    if any(out.data_ptr() == source.data_ptr() for source in sources[2:]):
        sources = [*sources[:2], *(source.clone() for source in sources[2:])]
    reduction(sources[0], sources[1], out=out)
    for source in sources[2:]:
        reduction(out, source, out=out)


def _even(length: int, count: int) -> list[int]:
    """The ends of `count` parts of a length, which begin at multiples of a cache line's elements."""
    step = -(-length // count)
    step = -(-step // 16) * 16
    return [min(index * step, length) for index in range(count + 1)]


def _aligned(step: int) -> int:
    return step // 64 * 64


def _cut(block: torch.Tensor, count: int, step: int, dtype: torch.dtype) -> list[torch.Tensor]:
    return [block[index * step : (index + 1) * step].view(dtype) for index in range(count)]
