"""What other people's programs do with a backend, beyond plain tensors: each is a function that all workers call."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from paceline.errors import UnsupportedError


def me() -> int:
    return dist.get_rank()


def everybody() -> range:
    return range(dist.get_world_size())


def grid(rank: int, rows: int = 4, columns: int = 6) -> torch.Tensor:
    return torch.arange(rows * columns, dtype=torch.float64).view(rows, columns) + 100 * rank


def total(make: Callable[[int], torch.Tensor]) -> torch.Tensor:
    return torch.stack([make(rank) for rank in everybody()]).sum(0)


def same(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert found.shape == expected.shape, (found.shape, expected.shape)
    assert torch.equal(found, expected), (found, expected)


# -- tensors that are not laid out plainly ------------------------------------------------------------------------


def strided() -> None:
    """Every second column, and columns for rows; what lies between stays as it is."""
    size, last = len(everybody()), everybody()[-1]
    whole = grid(me())
    dist.all_reduce(whole[:, ::2])
    same(whole[:, ::2], total(grid)[:, ::2])
    same(whole[:, 1::2], grid(me())[:, 1::2])
    whole = grid(me())
    dist.broadcast(whole.t(), last)
    same(whole, grid(last))
    outs = [torch.zeros(6, 4, dtype=torch.float64).t() for _ in everybody()]
    dist.all_gather(outs, grid(me(), 6, 4).t()[:, :6])
    for rank, out in enumerate(outs):
        same(out, grid(rank, 6, 4).t())
    wide = torch.zeros(4 * size, 12, dtype=torch.float64)
    dist.all_gather_into_tensor(wide[:, ::2], grid(me()))
    same(wide[:, ::2], torch.cat([grid(rank) for rank in everybody()]))
    assert not wide[:, 1::2].any()
    wide = torch.zeros(2, 8, dtype=torch.float64)
    dist.reduce_scatter_tensor(wide[:, ::2], grid(me(), 4, 2 * size).t())
    same(wide[:, ::2], total(lambda rank: grid(rank, 4, 2 * size)).t()[2 * me() : 2 * me() + 2])
    wide = torch.zeros(size, 8, dtype=torch.float64)
    dist.all_to_all_single(wide[:, ::2], grid(me(), 4, size).t())
    same(wide[:, ::2], torch.stack([grid(rank, 4, size).t()[me()] for rank in everybody()]))
    outs = [torch.zeros(6, 4, dtype=torch.float64).t() for _ in everybody()] if me() == last else None
    dist.gather(grid(me()), outs, last)
    for rank, out in enumerate(outs or []):
        same(out, grid(rank))
    out = torch.zeros(6, 4, dtype=torch.float64).t()
    dist.scatter(out, [grid(rank, 6, 4).t() for rank in everybody()] if me() == 0 else None, 0)
    same(out, grid(me(), 6, 4).t())
    if me() == 0:
        dist.send(grid(0, 6, 4).t(), 1)
    if me() == 1:
        dist.recv(out, 0)
        same(out, grid(0, 6, 4).t())
    outs = [torch.zeros(3, 2) for _ in everybody()]
    dist.all_gather(outs, torch.tensor(float(me())).expand(3, 2))
    for rank, out in enumerate(outs):
        same(out, torch.full((3, 2), float(rank)))


def empty() -> None:
    none, size = torch.empty(0, 3), len(everybody())
    dist.all_reduce(none)
    dist.reduce(none, 0)
    dist.broadcast(none, 0)
    dist.all_gather([torch.empty(0, 3) for _ in everybody()], none)
    dist.all_gather_into_tensor(torch.empty(0, 3), none)
    dist.reduce_scatter(torch.empty(0, 3), [none] * size)
    dist.reduce_scatter_tensor(torch.empty(0, 3), none)
    dist.gather(none, [torch.empty(0, 3) for _ in everybody()] if me() == 0 else None, 0)
    dist.scatter(torch.empty(0, 3), [none] * size if me() == 0 else None, 0)
    dist.all_to_all([torch.empty(0, 3) for _ in everybody()], [none] * size)
    dist.all_to_all_single(torch.empty(0, 3), none)
    outs = [torch.empty(3 if rank == 0 else 0) for rank in everybody()]  # only the first has something
    dist.all_gather(outs, torch.arange(3.0) if me() == 0 else torch.empty(0))
    same(outs[0], torch.arange(3.0))
    out = torch.empty(size if me() == 0 else 0, 2)  # and here only the first gets something
    dist.all_to_all_single(
        out, torch.full((1, 2), float(me())), [1] * size if me() == 0 else [0] * size, [1] + [0] * (size - 1)
    )
    same(out[:, 0], torch.arange(float(size)) if me() == 0 else torch.empty(0))
    if me() == 0:
        dist.send(none, 1)
    if me() == 1:
        dist.recv(torch.empty(0, 3), 0)


def scalars() -> None:
    """Of no dimensions."""
    mine = torch.tensor(2.0 ** me())
    dist.all_reduce(mine)
    same(mine, torch.tensor(2.0 ** len(everybody()) - 1))
    mine = torch.tensor(me())
    dist.broadcast(mine, 1)
    same(mine, torch.tensor(1))
    outs = [torch.tensor(-1) for _ in everybody()]
    dist.all_gather(outs, torch.tensor(me()))
    same(torch.stack(outs), torch.arange(len(everybody())))
    out = torch.empty(len(everybody()), dtype=torch.int64)
    dist.all_gather_into_tensor(out, torch.tensor(me()))
    same(out, torch.arange(len(everybody())))
    own = torch.tensor(0)
    dist.reduce_scatter_tensor(own, out)
    same(own, torch.tensor(me() * len(everybody())))
    dist.scatter(own, list(out) if me() == 2 else None, 2)
    same(own, torch.tensor(me()))
    dist.all_to_all(outs, [torch.tensor(10 * me() + rank) for rank in everybody()])
    same(torch.stack(outs), 10 * torch.arange(len(everybody())) + me())


def in_place() -> None:
    """What a worker gives is a part of what it gets."""
    size = len(everybody())
    for rows in (2, 100_000):
        whole = torch.zeros(size, rows)
        whole[me()] = me()
        dist.all_gather_into_tensor(whole, whole[me()])
        same(whole, torch.arange(float(size))[:, None].expand(size, rows))
        dist.all_gather(list(whole), whole[me()])
        same(whole, torch.arange(float(size))[:, None].expand(size, rows))
        for place in (me(), 0):
            given = torch.arange(float(size))[:, None].expand(size, rows).clone()
            dist.reduce_scatter_tensor(given[place], given)
            same(given[place], torch.full((rows,), float(size * me())))
        given = torch.full((size, rows), float(me()))
        dist.all_to_all_single(given, given)
        same(given, torch.arange(float(size))[:, None].expand(size, rows))


def sparse() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.int16, torch.uint8):
        rows = [torch.tensor([[0, 0], [rank + 1, rank], [0, 5]]).to(dtype) for rank in everybody()]
        mine = rows[me()].to_sparse()
        dist.all_reduce(mine)
        same(mine.to_dense(), torch.stack(rows).sum(0, dtype=dtype))


def numbers_that_are_none() -> None:
    """Whoever brings it, in whatever order: the largest and the smallest are then none."""
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        for op in (dist.ReduceOp.MAX, dist.ReduceOp.MIN):
            mine = torch.full((len(everybody()) + 1,), float(me()), dtype=dtype)
            mine[me()] = torch.nan
            dist.all_reduce(mine, op)
            assert mine.isnan().tolist() == [True] * len(everybody()) + [False]


# -- autograd and inference ---------------------------------------------------------------------------------------


def leaves() -> None:
    mine = torch.full((2, 2), 1.0 + me(), requires_grad=True)
    dist.all_reduce(mine)
    same(mine.detach(), torch.full((2, 2), 6.0))
    dist.broadcast(mine, 0)
    assert mine.is_leaf


def inference() -> None:
    """What is begun in inference mode may end outside of it, in whatever thread."""
    size = len(everybody())
    with torch.inference_mode():
        mine = [torch.ones(300_000), torch.ones(4, 6).t(), torch.ones(3, dtype=torch.complex64)]
        outs = [torch.zeros(3) for _ in everybody()]
        works = [dist.all_reduce(tensor, async_op=True) for tensor in mine]
        works += [dist.all_gather(outs, torch.full((3,), float(me())), async_op=True)]
        if me() == 0:
            works += [dist.isend(mine[2], 1)]
        if me() == 1:
            works += [dist.irecv(outs[0], 2), dist.irecv(torch.zeros(3, dtype=torch.complex64), 0)]
        if me() == 2:
            works += [dist.isend(torch.full((3,), 7.0), 1)]
    for work in works:
        assert work is not None
        work.wait()
    for tensor in mine:
        same(tensor, torch.full_like(tensor, size))
    same(outs[2], torch.full((3,), 2.0))


# -- several at once ----------------------------------------------------------------------------------------------


def in_any_order() -> None:
    """All begin the same ones in the same order; each waits for them in an order of its own, or only asks."""
    size, chance = len(everybody()), random.Random(me())
    begun: list[tuple[Any, Callable[[], tuple[torch.Tensor, torch.Tensor]]]] = []
    for number, length in enumerate([3, 70_000, 1, 0, 300_000, 8] * 2):
        mine = torch.full((length,), float(me() + number))
        if number % 4 == 0:
            work = dist.all_reduce(mine, async_op=True)
            expected = torch.full((length,), float(sum(everybody()) + size * number))
            begun.append((work, lambda mine=mine, expected=expected: (mine, expected)))
        elif number % 4 == 1:
            outs = torch.empty(size, length)
            work = dist.all_gather_into_tensor(outs, mine, async_op=True)
            expected = (torch.arange(float(size)) + number)[:, None].expand(size, length)
            begun.append((work, lambda outs=outs, expected=expected: (outs, expected)))
        elif number % 4 == 2:
            root = number % size
            work = dist.broadcast(mine, root, async_op=True)
            expected = torch.full((length,), float(root + number))
            begun.append((work, lambda mine=mine, expected=expected: (mine, expected)))
        else:
            given = torch.arange(float(size))[:, None].expand(size, length).contiguous()
            work = dist.reduce_scatter_tensor(mine, given, async_op=True)
            expected = torch.full((length,), float(size * me()))
            begun.append((work, lambda mine=mine, expected=expected: (mine, expected)))
    chance.shuffle(begun)
    for number, (work, result) in enumerate(begun):
        if number % 2:
            while not work.is_completed():
                time.sleep(0.001)
        else:
            work.wait()
        same(*result())


def two_threads() -> None:
    """Each with a group of its own, which share workers, and each with refusals in between."""
    first, second = [dist.new_group(ranks) for ranks in ([0, 1], [1, 2])]
    failed: list[BaseException] = []

    def run(group: Any, ranks: list[int]) -> None:
        try:
            for turn in range(100):
                mine = torch.full((1 + 50 * turn,), float(me() + turn))
                dist.all_reduce(mine, group=group)
                same(mine, torch.full_like(mine, sum(ranks) + 2 * turn))
                outs = [torch.empty(turn) for _ in ranks]
                dist.all_gather(outs, torch.full((turn,), float(me())), group=group)
                same(torch.stack(outs), torch.tensor(ranks)[:, None].expand(2, turn).float())
                if turn % 10 == 0:
                    refused(lambda: dist.all_reduce(torch.ones(3, dtype=torch.int64), dist.ReduceOp.AVG, group=group))
        except BaseException as error:
            failed.append(error)
            raise

    threads = [
        threading.Thread(target=run, args=(group, ranks))
        for group, ranks in ((first, [0, 1]), (second, [1, 2]))
        if me() in ranks
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed, failed


def alone() -> None:
    """A group of one does all that others do, messages to itself among it."""
    for rank in everybody():
        group = dist.new_group([rank])
        if rank != me():
            continue
        for length in (5, 200_000):
            out, given = torch.zeros(length), torch.full((length,), 3.0)
            both = [dist.P2POp(dist.irecv, out, me(), group), dist.P2POp(dist.isend, given, me(), group)]
            for work in dist.batch_isend_irecv(both):
                work.wait()
            same(out, given)
        text = refused(lambda group=group: dist.all_to_all([torch.ones(2)], [torch.ones(1)], group=group))
        assert text.startswith("all_to_all of float32: worker 0 sends 1 element to worker 0, which expects 2; ")
        objects: list[Any] = [None]
        dist.all_gather_object(objects, {"rank": me()}, group=group)
        assert objects == [{"rank": me()}]
        dist.broadcast_object_list(objects, me(), group=group)
        dist.barrier(group=group)


# -- what is refused ----------------------------------------------------------------------------------------------


def refused(call: Callable[..., Any]) -> str:
    """What it says."""
    with pytest.raises(UnsupportedError) as error:
        call()
    return str(error.value)


def refusals() -> list[str]:
    """Each on every worker alike, and the group goes on."""
    size, ones, whole = len(everybody()), torch.ones(2), torch.ones(3, dtype=torch.int64)
    nobody = dist.group.WORLD
    assert nobody is not None
    mean = dist.ReduceOp.AVG

    def three(*lengths: int) -> list[torch.Tensor]:
        return [torch.ones(length) for length in lengths]

    def mixed() -> None:
        with dist._coalescing_manager():
            dist.all_reduce(ones)
            dist.all_reduce(torch.ones(2, dtype=torch.float64))

    def second() -> None:
        """The first could be done, and is not."""
        with dist._coalescing_manager():
            dist.reduce_scatter_tensor(ones, torch.ones(6))
            dist.reduce_scatter_tensor(torch.ones(2), torch.ones(7))

    calls: list[Callable[[], Any]] = [
        lambda: dist.all_reduce(whole, mean),
        lambda: dist.all_reduce(whole, mean, async_op=True),
        lambda: dist.all_gather(three(2, 2), ones),
        lambda: dist.all_gather(three(3, 3, 3), ones),
        lambda: dist.all_gather_into_tensor(torch.ones(5), ones),
        lambda: dist.all_gather_into_tensor(torch.ones(6, dtype=torch.float64), ones),
        lambda: dist.reduce_scatter(ones, three(2, 2)),
        lambda: dist.reduce_scatter(ones, three(4, 4, 4)),
        lambda: dist.reduce_scatter_tensor(ones, torch.ones(7)),
        lambda: dist.reduce_scatter_tensor(ones, torch.ones(6, dtype=torch.int32)),
        lambda: dist.all_to_all(three(1, 1), three(1, 1)),
        lambda: dist.all_to_all(three(2, 2, 2), three(1, 1, 1)),
        lambda: dist.all_to_all_single(torch.ones(4), torch.ones(4)),
        lambda: dist.all_to_all_single(torch.ones(4), torch.ones(4), [1, 2], [1, 1, 2]),
        lambda: dist.all_to_all_single(torch.tensor(1), torch.tensor(1)),
        lambda: dist.all_to_all(three(*[1 + (me() == 2 and rank == 0) for rank in everybody()]), three(1, 1, 1)),
        lambda: dist.scatter(ones, three(2, 1, 2) if me() == 0 else None, 0),
        lambda: dist.broadcast(torch.ones(1).expand(3), 0),
        lambda: dist.broadcast(torch.eye(2).to_sparse(), 0),
        lambda: dist.broadcast(torch.ones(2, device="meta"), 0),
        lambda: dist.broadcast(torch.ones(2, dtype=torch.complex64).conj().imag, 0),
        lambda: dist.all_reduce(torch.eye(2).to_sparse(), dist.ReduceOp.MAX),
        lambda: dist.all_reduce(torch.eye(2).to_sparse_csr()),
        mixed,
        second,
        lambda: dist.all_reduce_coalesced([]),
        lambda: nobody.allgather_coalesced([], []),
        lambda: nobody.all_gather_single_coalesced([torch.ones(6)], []),
        lambda: dist.isend(torch.eye(2).to_sparse(), (me() + 1) % size),
        lambda: dist.irecv(torch.ones(1).expand(3), (me() + 1) % size),
    ]
    found = []
    for call in calls:
        found.append(refused(call))
        mine = torch.tensor([1 << me()])
        dist.all_reduce(mine)
        same(mine, torch.tensor([(1 << size) - 1]))
    same(ones, torch.ones(2))
    return found


def lists_of_a_root() -> list[str]:
    """Only the root knows them: it alone refuses, and the others' calls are met by its next one."""
    calls: list[Callable[[], Any]] = [
        lambda: dist.gather(torch.ones(2), [torch.ones(2)] * 2, 0),
        lambda: dist.gather(torch.ones(2), [torch.ones(2), torch.ones(3), torch.ones(2)], 0),
        lambda: dist.scatter(torch.ones(2), [torch.ones(2)] * 4, 0),
    ]
    return [refused(call) for call in calls] if me() == 0 else []


def features() -> None:
    """Torch asks a group for its backend, and the backend for optional features, before it uses one."""
    group: Any = dist.group.WORLD
    backend = group._get_backend(torch.device("cpu"))
    assert backend is group
    for name in ("coalescing", "splitting", "shrinking", "reconfigure", "window", "abort_hooks", "completion_hooks"):
        assert getattr(backend, f"supports_{name}") is False
    assert not backend.supports_tensor_alloc(torch.device("cpu"))
    group.set_timeout(timedelta(seconds=50))
    assert group.channel.timeout == 50
    group.set_timeout(timedelta(seconds=60))


PROGRAMS: list[Callable[[], list[str] | None]] = [
    strided,
    empty,
    scalars,
    in_place,
    sparse,
    numbers_that_are_none,
    leaves,
    inference,
    in_any_order,
    two_threads,
    alone,
    refusals,
    lists_of_a_root,
    features,
]
