"""Every collective and message of torch.distributed over the paceline backend, each against plain arithmetic.

Every worker knows what all bring, so it computes by itself, with torch alone, what must come out.
"""

from __future__ import annotations

import contextlib
import socket
import sys
from functools import lru_cache

import pytest
import torch
import torch.distributed as dist

from paceline.comm import hierarchical as hosts
from paceline.comm.autoload import register
from paceline.comm.c10d_backend import ProcessGroup
from paceline.errors import UnsupportedError

WHOLE = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.uint8, torch.int8]
WHOLE += [torch.int16]
MOVED = [*WHOLE, torch.bool, torch.complex64]
SIZES = [7, 300_001, 1, 1000, 1_100_000]  # within a block of staging memory, and beyond


@lru_cache(200)
def drawn(rank: int, number: int, salt: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * salt + 10 * number + rank)
    return torch.randint(1, 3, (number,), generator=generator, dtype=torch.uint8)


def brought(rank: int, number: int, dtype: torch.dtype, salt: int = 0) -> torch.Tensor:
    """Ones and twos: sums and products are exact in every dtype, in whatever order."""
    return drawn(rank, number, salt).to(dtype, copy=True)


def same(found: torch.Tensor, expected: torch.Tensor, *what: object) -> None:
    assert found.dtype == expected.dtype, (what, found.dtype)
    assert torch.equal(found, expected), (what, RANK, found, expected)


def all_of(number: int, dtype: torch.dtype, group: list[int], salt: int = 0) -> torch.Tensor:
    return torch.stack([brought(rank, number, dtype, salt) for rank in group])


def reductions(group: list[int], pg: dist.ProcessGroup | None, sizes: list[int] = SIZES) -> None:
    ops = {
        dist.ReduceOp.SUM: lambda rows: rows.sum(0, dtype=rows.dtype),
        dist.ReduceOp.PRODUCT: lambda rows: rows.prod(0, dtype=rows.dtype),
        dist.ReduceOp.MAX: lambda rows: rows.amax(0),
        dist.ReduceOp.MIN: lambda rows: rows.amin(0),
    }
    for dtype in WHOLE:
        for number in sizes if dtype == torch.float32 else [min(size, 40_001) for size in sizes[:2]]:
            for op, reduced in [*ops.items()][: 1 if number > 100_000 else None]:
                mine = brought(RANK, number, dtype)
                dist.all_reduce(mine, op, group=pg)
                same(mine, reduced(all_of(number, dtype, group)), "all_reduce", op)
    rows = all_of(1000, torch.float64, group)
    mine = rows[group.index(RANK)].clone()
    dist.all_reduce(mine, dist.ReduceOp.AVG, group=pg)
    same(mine, rows.sum(0) / len(group), "mean")
    rows = all_of(1000, torch.int32, group)
    mine = rows[group.index(RANK)].clone()
    dist.all_reduce(mine, dist.ReduceOp.BXOR, group=pg)
    folded = rows[0].clone()
    for row in rows[1:]:
        folded ^= row
    same(mine, folded, "xor")
    mine = torch.tensor([True, False, group[-1] == RANK])
    dist.all_reduce(mine, group=pg)
    same(mine.view(torch.uint8), torch.tensor([1, 0, 1], dtype=torch.uint8), "bool")
    for root in group:
        mine = brought(RANK, 300_001, torch.float32, salt=root)
        dist.reduce(mine, root, group=pg)
        expected = all_of(300_001, torch.float32, group, root).sum(0)
        same(mine, expected if root == RANK else brought(RANK, 300_001, torch.float32, root), "reduce")
    for number in (5, 200_000):
        parts = [brought(RANK, number, torch.float32, salt=to) for to in group]
        out = torch.empty(number)
        dist.reduce_scatter(out, parts, group=pg)
        same(out, all_of(number, torch.float32, group, RANK).sum(0), "reduce_scatter")
        out = torch.empty(number)
        dist.reduce_scatter_tensor(out, torch.cat(parts), group=pg)
        same(out, all_of(number, torch.float32, group, RANK).sum(0), "reduce_scatter_tensor")


def rounding() -> None:
    """Numbers whose sum depends on the order: right to rounding, and the same bits on every worker."""
    for number in (9, 500_000):
        rows = [torch.randn(number, generator=torch.Generator().manual_seed(rank), dtype=torch.float64) for rank in ALL]
        mine = rows[RANK].clone()
        dist.all_reduce(mine)
        expected = torch.stack(rows).sum(0)
        assert float((mine - expected).abs().max()) < 1e-14
        outs = [torch.empty_like(mine) for _ in ALL]
        dist.all_gather(outs, mine)
        for out in outs:
            same(out, mine, "the same bits")


def allocated() -> None:
    """Memory that the workers of a host share, of which another host may have none."""
    group = dist.group.WORLD
    assert isinstance(group, ProcessGroup)
    for number in (11, 400_000):
        mine = group.channel.allocate(number, torch.float32)
        for salt in range(3):
            mine.copy_(brought(RANK, number, torch.float32, salt))
            dist.all_reduce(mine)
            same(mine, all_of(number, torch.float32, ALL, salt).sum(0), "allocated")
            dist.barrier()  # others read in it until all are through


def moves(group: list[int], pg: dist.ProcessGroup | None) -> None:
    for dtype in MOVED:
        for number in (7, 300_001 if dtype == torch.float32 else 40_001) if pg is None else (7,):
            for root in group:
                mine = brought(RANK, number, dtype, salt=1)
                dist.broadcast(mine, root, group=pg)
                same(mine, brought(root, number, dtype, salt=1), "broadcast", root)
            expected = all_of(number, dtype, group)
            outs = [torch.empty(number, dtype=dtype) for _ in group]
            dist.all_gather(outs, brought(RANK, number, dtype), group=pg)
            same(torch.stack(outs), expected, "all_gather")
        whole = torch.empty(7 * len(group), dtype=dtype)
        dist.all_gather_into_tensor(whole, brought(RANK, 7, dtype), group=pg)
        same(whole.view(len(group), 7), all_of(7, dtype, group), "all_gather_into_tensor")
    for root in group:
        outs = [torch.empty(1000) for _ in group] if root == RANK else None
        dist.gather(brought(RANK, 1000, torch.float32), outs, root, group=pg)
        if outs is not None:
            same(torch.stack(outs), all_of(1000, torch.float32, group), "gather")
        parts = [brought(to, 1000, torch.float32, salt=root) for to in group] if root == RANK else None
        out = torch.empty(1000)
        dist.scatter(out, parts, root, group=pg)
        same(out, brought(RANK, 1000, torch.float32, salt=root), "scatter")
    wide = torch.zeros(6, 5)
    part = wide[:, 1:3]  # not contiguous
    part.copy_(brought(RANK, 12, torch.float32).view(6, 2))
    dist.all_reduce(part, group=pg)
    same(wide[:, 1:3].reshape(-1), all_of(12, torch.float32, group).sum(0), "a part of a tensor")
    assert float(wide[:, 0].abs().max()) == 0 == float(wide[:, 3:].abs().max())


def exchanges(group: list[int], pg: dist.ProcessGroup | None) -> None:
    for factor in (1, 60_000):
        # From i to j go (i + 2 j) mod 4 rows: lengths differ, some are none.
        def length(source: int, target: int, factor: int = factor) -> int:
            return (source + 2 * target) % 4 * factor

        def part(source: int, target: int) -> torch.Tensor:
            return brought(source, length(source, target), torch.float32, salt=target)

        outs = [torch.empty(length(source, RANK)) for source in group]
        dist.all_to_all(outs, [part(RANK, target) for target in group], group=pg)
        for source, out in zip(group, outs, strict=True):
            same(out, part(source, RANK), "all_to_all", source)
        splits = [length(RANK, target) for target in group]
        given = torch.cat([part(RANK, target) for target in group])
        out = torch.empty(sum(map(len, outs)))
        dist.all_to_all_single(out, given, list(map(len, outs)), splits, group=pg)
        same(out, torch.cat(outs), "all_to_all_single")
    given = torch.cat([brought(RANK, 3, torch.int64, salt=target) for target in group])
    out = torch.empty_like(given)
    dist.all_to_all_single(out, given, group=pg)
    same(out, torch.cat([brought(source, 3, torch.int64, salt=RANK) for source in group]), "equal parts")


def messages() -> None:
    for number in (1, 300_001):
        for source in ALL:  # every pair, one after the other, with tags that differ
            for target in ALL:
                if source == RANK != target:
                    dist.send(brought(source, number, torch.float32, salt=target), target, tag=source)
                elif target == RANK != source:
                    data = torch.empty(number)
                    assert dist.recv(data, source, tag=source) == source
                    same(data, brought(source, number, torch.float32, salt=target), "recv")
        after, before = (RANK + 1) % SIZE, (RANK - 1) % SIZE  # a ring, all at once
        data = torch.empty(number)
        ops = [
            dist.P2POp(dist.isend, brought(RANK, number, torch.float32), after),
            dist.P2POp(dist.irecv, data, before),
        ]
        for work in dist.batch_isend_irecv(ops):
            work.wait()
        same(data, brought(before, number, torch.float32), "ring")
    if hosts.MESH < SIZE:  # and who sends would wait for one that asks for it
        with pytest.raises(
            UnsupportedError, match=r"^receiving from any worker is not supported with more than 64 workers"
        ):
            dist.recv(torch.empty(5))
    elif RANK == 0:
        found = set()
        for _ in ALL[1:]:
            data = torch.empty(5, dtype=torch.int64)
            source = dist.recv(data)
            same(data, brought(source, 5, torch.int64), "recv from any")
            found.add(source)
        assert found == set(ALL[1:])
    else:
        dist.send(brought(RANK, 5, torch.int64), 0)
    dist.barrier()
    if RANK == SIZE - 1:
        for receiver in ALL[:-1]:
            dist.send(torch.ones(6), receiver)
            dist.send(torch.ones(4), receiver)
    else:
        with pytest.raises(RuntimeError, match=r"^a message has 24 bytes, but the receiver expects 16$"):
            dist.recv(torch.empty(4), SIZE - 1)
        data = torch.zeros(4)
        dist.recv(data, SIZE - 1)
        same(data, torch.ones(4), "the message after it")


def several_at_once() -> None:
    rows = [brought(RANK, number, torch.float32, salt=number) for number in (10, 400_000, 3, 90_000)]
    works = [dist.all_reduce(row, async_op=True) for row in rows]
    for row, work in reversed(list(zip(rows, works, strict=True))):
        work.wait()
        same(row, all_of(len(row), torch.float32, ALL, len(row)).sum(0), "async")


def subgroups() -> None:
    halves = [[rank for rank in ALL if rank % 2 == odd] for odd in (0, 1)]
    ends = [ALL[0], ALL[-1]]
    for ranks in [ALL[:2], ALL[-2:], ends, *halves]:
        pg = dist.new_group(ranks, backend="paceline")
        if RANK in ranks and len(ranks) > 1:
            reductions(ranks, pg, [9])
            moves(ranks, pg)
            exchanges(ranks, pg)
            dist.barrier(group=pg)


if __name__ == "__main__":
    with contextlib.suppress(socket.gaierror):
        sys.exit(f"this host's name has an address: {socket.gethostbyname(socket.gethostname())}")
    register()
    hosts.MESH = 0 if "many" in sys.argv else hosts.MESH
    dist.init_process_group("paceline")
    RANK, SIZE = dist.get_rank(), dist.get_world_size()
    ALL = list(range(SIZE))
    world = dist.group.WORLD
    assert isinstance(world, ProcessGroup)
    reductions(ALL, None)
    rounding()
    allocated()
    moves(ALL, None)
    exchanges(ALL, None)
    messages()
    several_at_once()
    subgroups()
    dist.barrier()
    print("hosts", world.channel.hosts.hosts)
    dist.destroy_process_group()
