"""Collectives over shared memory, interleaved at will: they are generators, so one process can play all workers.

Hypothesis chooses who goes on next at every point where somebody waits; what comes out must not depend on it.
"""

from __future__ import annotations

import mmap
import os
import random
from collections.abc import Callable, Iterator, Sequence

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from paceline.comm import shared_memory as shared
from paceline.comm import shm_collectives as collectives
from paceline.comm.point_to_point import Mailbox
from paceline.comm.shared_memory import Condition, MismatchError, Shared, SymmetricBuffer

BLOCK, LANE = 1 << 12, 1 << 8  # small ones, so that a few thousand numbers need many rounds


@pytest.fixture(autouse=True, scope="module")
def _small_blocks() -> Iterator[None]:
    before = shared.BLOCK, shared.LANE, collectives.BLOCK, collectives.DIRECT, collectives.CHUNK
    shared.BLOCK, shared.LANE, collectives.BLOCK, collectives.DIRECT, collectives.CHUNK = BLOCK, LANE, BLOCK, 256, 512
    yield
    shared.BLOCK, shared.LANE, collectives.BLOCK, collectives.DIRECT, collectives.CHUNK = before


def team(count: int) -> list[Shared]:
    """The same memory, as each of `count` workers sees it."""
    file = os.memfd_create("team")
    os.truncate(file, Shared.size(count))
    memory = mmap.mmap(file, Shared.size(count))
    own = [file, *(os.dup(file) for _ in range(1, count))]
    return [Shared(memory, own[rank], range(count), rank, [os.getpid()] * count, count) for rank in range(count)]


def play(works: Sequence[Iterator[Condition]], choose: Callable[[int], int]) -> None:
    """Lets the workers go on in the order of `choose`, each as far as it can, until all are done."""
    waiting: dict[int, Condition | None] = dict.fromkeys(range(len(works)))
    idle = 0
    while waiting:
        rank = list(waiting)[choose(len(waiting))]
        until = waiting[rank]
        if until is not None and not until():
            idle += 1
            assert idle < 10_000, "nobody can go on"
            continue
        idle = 0
        try:
            waiting[rank] = next(works[rank])
        except StopIteration:
            del waiting[rank]


def numbers(rank: int, size: int, dtype: torch.dtype) -> torch.Tensor:
    found = torch.randn(size, generator=torch.Generator().manual_seed(rank), dtype=torch.float64) * 8
    return found.to(dtype)


def measured(arenas: Sequence[SymmetricBuffer], total: torch.Tensor) -> None:
    """What the workers summed the squares of makes the whole; integers have no norm."""
    if total.dtype.is_floating_point:
        assert sum(a.squares or 0.0 for a in arenas) == pytest.approx(float(total.double().square().sum()), rel=1e-5)
    else:
        assert [arena.squares for arena in arenas] == [None] * len(arenas)


def close(workers: Sequence[Shared]) -> None:
    for worker in workers:
        worker.close()


def test_a_lane_takes_memory_from_its_first_message_on() -> None:
    """Of 128 workers all lanes would take 4 GiB."""
    workers = team(4)

    def taken() -> int:
        return os.fstat(workers[0]._file).st_blocks * 512

    before = taken()
    workers[0].lane(0, 2)
    assert taken() == before
    play([workers[0].lane(0, 2).send(torch.ones(10, dtype=torch.uint8), 0)], lambda _: 0)
    assert before < taken() <= before + 2 * LANE + 2 * mmap.PAGESIZE
    close(workers)


counts, sizes = st.integers(2, 5), st.sampled_from([0, 1, 7, 500, 1025, 5000])
dtypes = st.sampled_from([torch.float32, torch.float64, torch.int32, torch.uint8])


@settings(max_examples=60, deadline=None)
@given(counts, st.lists(st.tuples(st.integers(0, 6), sizes, dtypes), min_size=1, max_size=4), st.integers(0, 2**32))
def test_any_sequence_of_collectives_in_any_interleaving(count, sequence, seed):
    """One after another without a pause between: a worker may be in the next while others still read its block."""
    workers = team(count)
    chance = random.Random(seed)
    checks: list[Callable[[], None]] = []
    steps: list[list[Iterator[Condition]]] = [[] for _ in workers]
    for fp, (kind, size, dtype) in enumerate(sequence):
        for rank, step in enumerate(one(kind, workers, size, dtype, fp, checks)):
            steps[rank].append(step)

    def all_of(parts: list[Iterator[Condition]]) -> Iterator[Condition]:
        for part in parts:
            yield from part

    play([all_of(parts) for parts in steps], chance.randrange)
    for check in checks:
        check()
    close(workers)


def one(
    kind: int, workers: list[Shared], size: int, dtype: torch.dtype, fp: int, checks: list[Callable[[], None]]
) -> list[Iterator[Condition]]:
    """Every worker's part of a collective of a kind; adds a check of what must come out."""
    count, ranks = len(workers), range(len(workers))
    mine = [numbers(rank, size, dtype) for rank in ranks]
    whole = torch.stack(mine)
    root = size % count

    def same(found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> Callable[[], None]:
        def check() -> None:
            for a, b in zip(found, expected, strict=True):
                assert torch.equal(a, b), (kind, size, dtype)

        return check

    total = whole[0].clone()
    for other in whole[1:]:
        total += other
    if kind == 0:
        checks.append(same(mine, [total] * count))
        return [collectives.all_reduce(w, mine[w.me], torch.add, fp) for w in workers]
    if kind == 1:
        arenas = [SymmetricBuffer(mine, measure=True) for _ in workers]
        checks.append(same(mine, [total] * count))
        checks.append(lambda: measured(arenas, total))
        return [
            collectives.all_reduce_in_place(w, arena, torch.add, fp) for w, arena in zip(workers, arenas, strict=True)
        ]
    if kind == 2:
        checks.append(same(mine, [whole[root].clone()] * count))
        return [collectives.broadcast(w, mine[w.me], root, fp) for w in workers]
    if kind == 3:
        outs = [torch.empty_like(whole) for _ in ranks]
        checks.append(same(outs, [whole] * count))
        return [collectives.all_gather(w, outs[w.me].unbind(0), mine[w.me], fp) for w in workers]
    if kind == 4:
        parts = [[numbers(10 * rank + other, size, dtype) for other in ranks] for rank in ranks]
        sums = []
        for rank in ranks:
            summed = parts[0][rank].clone()
            for other in ranks[1:]:
                summed += parts[other][rank]
            sums.append(summed)
        outs = [torch.empty(size, dtype=dtype) for _ in ranks]
        checks.append(same(outs, sums))
        return [collectives.reduce_scatter(w, outs[w.me], parts[w.me], torch.add, fp) for w in workers]
    if kind == 5:
        gives = [[numbers(10 * r + o, (size + 3 * r + o) % 3000, torch.uint8) for o in ranks] for r in ranks]
        takes = [[torch.empty(len(gives[o][r]), dtype=torch.uint8) for o in ranks] for r in ranks]
        for rank in ranks:
            checks.append(same(takes[rank], [gives[other][rank] for other in ranks]))
        return [collectives.all_to_all(w, takes[w.me], gives[w.me], fp) for w in workers]
    most = whole.amax(0)
    checks.append(same([mine[root]], [most]))
    return [collectives.reduce(w, mine[w.me], root, torch.maximum, fp) for w in workers]


@settings(max_examples=30, deadline=None)
@given(counts, st.integers(0, 4), st.integers(0, 2**32))
def test_whoever_is_in_another_collective_is_noticed_by_all(count, odd, seed):
    workers = team(count)
    chance = random.Random(seed)
    odd %= count
    works = [collectives.barrier(worker, 7 if worker.me == odd else 3) for worker in workers]
    conditions = [next(work) for work in works]
    for rank in sorted(range(count), key=lambda _: chance.random()):
        with pytest.raises(MismatchError):
            conditions[rank]()
    close(workers)


class OneHost:
    """What a mailbox needs of hosts."""

    gloo, several = None, False

    def __init__(self, worker: Shared) -> None:
        self.shared, self.rank = worker, worker.me


@settings(max_examples=60, deadline=None)
@given(
    st.integers(2, 4),
    st.lists(
        st.tuples(st.integers(0, 3), st.integers(1, 3), st.integers(0, 2), st.sampled_from([0, 1, 256, 257, 2000]))
    ),
    st.integers(0, 2**32),
)
@example(4, [(2, 2, 0, 0), (2, 2, 0, 0), (3, 3, 1, 2000), (2, 1, 0, 0), (3, 1, 1, 0)], 4_294_967_290)
def test_messages_arrive_once_by_tag_in_any_order_of_asking(count, sent, seed):
    """All send first, then receive, in an order of their own: nobody waits for ever, whatever the sizes."""
    workers = team(count)
    boxes = [Mailbox(OneHost(worker)) for worker in workers]  # type: ignore[arg-type]
    chance = random.Random(seed)
    plans: list[list[Iterator[Condition]]] = [[] for _ in workers]
    asked: list[list[tuple[int, int, torch.Tensor]]] = [[] for _ in workers]
    found: list[tuple[torch.Tensor, torch.Tensor]] = []
    for number, (source, step, tag, size) in enumerate(sent):
        source, target = source % count, (source + 1 + step % (count - 1)) % count
        message = numbers(number, size, torch.uint8)
        plans[source].append(boxes[source].send(message, target, tag))
        asked[target].append((source, tag, message))
    for target, messages in enumerate(asked):
        keys = sorted({(source, tag) for source, tag, _ in messages}, key=lambda _: chance.random())
        for key in keys:  # those of one sender and tag come in order
            for source, tag, message in messages:
                if (source, tag) == key:
                    room = torch.empty_like(message)
                    found.append((room, message))
                    plans[target].append(boxes[target].receive(room, [source], tag))

    def in_turn(parts: list[Iterator[Condition]]) -> Iterator[Condition]:
        for part in parts:
            yield from part

    play([in_turn(parts) for parts in plans], chance.randrange)
    for room, message in found:
        assert torch.equal(room, message)
    close(workers)
