"""Every collective of torch.distributed x every dtype of torch x every reduction, over `paceline` and over gloo.

Usage: backend_contract.py FOLDER GROUP..., where a group is its ranks, such as 0,2. With 0,2:gloo what is done is also
asked of gloo, with 0,2:all everything is; with 0,2:brief one dtype stands for all of its kind. Without a launcher's
variables these are three workers, forked from this process.

Each computes by itself, with plain Python, what must come out, and writes what came out to FOLDER/RANK.json:
{"table": {group: {collective: {reduction: {dtype: [ours, gloo's]}}}}, "programs": {name: what it returned}}. An outcome
is empty where all is right, else what was raised, or that it is wrong; null if it was not asked for.
"""

from __future__ import annotations

import ctypes
import functools
import json
import math
import operator
import os
import signal
import sys
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from backend_programs import PROGRAMS

import paceline.comm.c10d_backend  # noqa: F401 (once, for all workers)
from paceline.comm.autoload import register
from paceline.errors import PacelineError

Tensors = list[torch.Tensor]
Op = dist.ReduceOp.RedOpType
SIZE = 3
SHAPE = (2, 3)
WRONG = "wrong"
PR_SET_PDEATHSIG = 1
DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}
WHOLE = [torch.uint8, torch.int8, torch.uint16, torch.int16, torch.uint32, torch.int32, torch.uint64, torch.int64]
REAL = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
BRIEF = [
    "bool",
    "uint8",
    "int16",
    "uint32",
    "int64",
    "bfloat16",
    "float64",
    "complex64",
    "float8_e5m2",
    "uint4",
    "qint8",
]
QUANTISED = [torch.qint8, torch.quint8, torch.qint32, torch.quint4x2, torch.quint2x4]
OPS: dict[str, Any] = {**Op.__members__, "PREMUL_SUM": dist._make_nccl_premul_sum(2.0)}
STEPS: dict[str, Callable[[Any, Any], Any]] = {
    "SUM": operator.add,
    "AVG": operator.add,
    "PRODUCT": operator.mul,
    "MIN": min,
    "MAX": max,
    "BAND": operator.and_,
    "BOR": operator.or_,
    "BXOR": operator.xor,
}


@functools.cache
def drawn(rank: int, dtype: torch.dtype, salt: int, shape: tuple[int, ...]) -> torch.Tensor:
    draw = torch.Generator().manual_seed(100 * salt + rank)
    if dtype.is_complex:
        return complex_of(torch.randint(-3, 4, (*shape, 2), generator=draw).to(dtype.to_real()), dtype)
    if dtype in REAL:
        return torch.randint(-3, 4, shape, generator=draw).to(dtype)
    if dtype == torch.bool:
        return torch.randint(0, 2, shape, generator=draw).to(dtype)
    return torch.randint(0, 256, (math.prod(shape) * dtype.itemsize,), dtype=torch.uint8, generator=draw).view(dtype)


def complex_of(pairs: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Complex numbers from pairs of real ones: torch.view_as_complex makes no bcomplex32."""
    return pairs.view(dtype).squeeze(-1)


def brought(rank: int, dtype: torch.dtype, salt: int = 0, shape: Sequence[int] = SHAPE) -> torch.Tensor:
    """What a worker brings: any bits, and floating point numbers such as add up and multiply exactly."""
    if dtype in QUANTISED:
        return torch._empty_affine_quantized(shape, scale=0.5, zero_point=3, dtype=dtype)
    made = torch.empty(shape, dtype=dtype)
    raw(made).copy_(raw(drawn(rank, dtype, salt, tuple(shape))))
    return made


def raw(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def room(like: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(like)


def combined(name: str, rows: Tensors) -> torch.Tensor:
    """Their reduction, one element after another."""
    first = rows[0]
    if first.dtype.is_complex:
        return complex_of(combined(name, [torch.view_as_real(row) for row in rows]), first.dtype)
    columns = zip(*(row.reshape(-1).tolist() for row in rows), strict=True)
    found = [functools.reduce(STEPS[name], column) for column in columns]
    if first.dtype == torch.bool:
        found = [bool(number) for number in found]
    elif first.dtype in WHOLE:  # of two's complement
        width, signed = 8 * first.itemsize, first.dtype.is_signed
        found = [number % 2**width for number in found]
        found = [number - 2**width if signed and number >= 2 ** (width - 1) else number for number in found]
    made = torch.tensor(found, dtype=first.dtype).view(first.shape)
    return made / len(rows) if name == "AVG" else made


@dataclass
class Group:
    """Some workers of all, `me` among them, connected over one backend."""

    ranks: list[int]
    pg: Any
    me: int

    def rows(self, dtype: torch.dtype, salt: int = 0, shape: Sequence[int] = SHAPE) -> Tensors:
        """What all of them bring."""
        return [brought(rank, dtype, salt, shape) for rank in self.ranks]

    def mine(self, dtype: torch.dtype, salt: int = 0, shape: Sequence[int] = SHAPE) -> torch.Tensor:
        return brought(self.me, dtype, salt, shape)


# -- reductions: what comes out, and what must --------------------------------------------------------------------


def all_reduce(group: Group, dtype: torch.dtype, op: str) -> Tensors:
    mine = group.mine(dtype)
    dist.all_reduce(mine, OPS[op], group=group.pg)
    return [mine]


def all_reduce_coalesced(group: Group, dtype: torch.dtype, op: str) -> Tensors:
    mine = [group.mine(dtype), group.mine(dtype, 1, (5,))]
    dist.all_reduce_coalesced(mine, OPS[op], group=group.pg)
    return mine


def reduce(group: Group, dtype: torch.dtype, op: str) -> Tensors:
    found = []
    for root in group.ranks:
        mine = group.mine(dtype, root)
        dist.reduce(mine, root, OPS[op], group=group.pg)
        found += [mine] if root == group.me else []
    return found


def reduce_scatter(group: Group, dtype: torch.dtype, op: str) -> Tensors:
    mine = [group.mine(dtype, rank) for rank in group.ranks]
    out = room(mine[0])
    dist.reduce_scatter(out, mine, OPS[op], group=group.pg)
    return [out]


def reduce_scatter_unequal(group: Group, dtype: torch.dtype, op: str) -> Tensors:
    mine = [group.mine(dtype, rank, (rank, 3)) for rank in group.ranks]
    out = room(mine[group.ranks.index(group.me)])
    dist.reduce_scatter(out, mine, OPS[op], group=group.pg)
    return [out]


def reduce_scatter_tensor(group: Group, dtype: torch.dtype, op: str) -> Tensors:
    whole = group.mine(dtype, 1, (2 * len(group.ranks), 3))
    out = room(whole[:2])
    dist.reduce_scatter_tensor(out, whole, OPS[op], group=group.pg)
    return [out]


def reduce_scatter_tensor_coalesced(group: Group, dtype: torch.dtype, op: str) -> Tensors:
    wholes = [group.mine(dtype, salt, (2 * len(group.ranks), 3)) for salt in (1, 2)]
    outs = [room(whole[:2]) for whole in wholes]
    with dist._coalescing_manager(group.pg):
        for out, whole in zip(outs, wholes, strict=True):
            dist.reduce_scatter_tensor(out, whole, OPS[op], group=group.pg)
    return outs


def of_stretches(group: Group, dtype: torch.dtype, op: str, salt: int) -> torch.Tensor:
    place = 2 * group.ranks.index(group.me)
    return combined(op, [row[place : place + 2] for row in group.rows(dtype, salt, (2 * len(group.ranks), 3))])


REDUCTIONS: dict[Callable[[Group, torch.dtype, str], Tensors], Callable[[Group, torch.dtype, str], Tensors]] = {
    all_reduce: lambda group, dtype, op: [combined(op, group.rows(dtype))],
    all_reduce_coalesced: lambda group, dtype, op: [
        combined(op, group.rows(dtype)),
        combined(op, group.rows(dtype, 1, (5,))),
    ],
    reduce: lambda group, dtype, op: [combined(op, group.rows(dtype, group.me))],
    reduce_scatter: lambda group, dtype, op: [combined(op, group.rows(dtype, group.me))],
    reduce_scatter_unequal: lambda group, dtype, op: [combined(op, group.rows(dtype, group.me, (group.me, 3)))],
    reduce_scatter_tensor: lambda group, dtype, op: [of_stretches(group, dtype, op, 1)],
    reduce_scatter_tensor_coalesced: lambda group, dtype, op: [of_stretches(group, dtype, op, salt) for salt in (1, 2)],
}


# -- what only moves ----------------------------------------------------------------------------------------------


def broadcast(group: Group, dtype: torch.dtype) -> Tensors:
    found = [group.mine(dtype, root) for root in group.ranks]
    for root, mine in zip(group.ranks, found, strict=True):
        dist.broadcast(mine, root, group=group.pg)
    return found


def all_gather(group: Group, dtype: torch.dtype) -> Tensors:
    mine = group.mine(dtype)
    outs = [room(mine) for _ in group.ranks]
    dist.all_gather(outs, mine, group=group.pg)
    return outs


def all_gather_unequal(group: Group, dtype: torch.dtype) -> Tensors:
    outs = [room(brought(0, dtype, 0, (rank, 3))) for rank in group.ranks]
    dist.all_gather(outs, group.mine(dtype, 0, (group.me, 3)), group=group.pg)
    return outs


def all_gather_into_tensor(group: Group, dtype: torch.dtype) -> Tensors:
    out = room(brought(0, dtype, 0, (len(group.ranks), *SHAPE)))
    dist.all_gather_into_tensor(out, group.mine(dtype), group=group.pg)
    return list(out)


def all_gather_into_tensor_coalesced(group: Group, dtype: torch.dtype) -> Tensors:
    outs = [room(brought(0, dtype, 0, (len(group.ranks), *SHAPE))) for _ in range(2)]
    with dist._coalescing_manager(group.pg):
        for salt, out in enumerate(outs):
            dist.all_gather_into_tensor(out, group.mine(dtype, salt), group=group.pg)
    return [row for out in outs for row in out]


def all_gather_coalesced(group: Group, dtype: torch.dtype) -> Tensors:
    mine = [group.mine(dtype), group.mine(dtype, 1)]
    outs = [[room(part) for part in mine] for _ in group.ranks]
    dist.all_gather_coalesced(outs, mine, group=group.pg)
    return [out[number] for number in range(2) for out in outs]


def gather(group: Group, dtype: torch.dtype) -> Tensors:
    found: Tensors = []
    for root in group.ranks:
        mine = group.mine(dtype, root)
        outs = [room(mine) for _ in group.ranks] if root == group.me else None
        dist.gather(mine, outs, root, group=group.pg)
        found += outs or []
    return found


def gather_single(group: Group, dtype: torch.dtype) -> Tensors:
    found: Tensors = []
    for root in group.ranks:
        mine = group.mine(dtype, root)
        out = room(brought(0, dtype, 0, (len(group.ranks), *SHAPE))) if root == group.me else None
        dist.gather_single(mine, out, root, group=group.pg)
        found += [] if out is None else list(out)
    return found


def scatter(group: Group, dtype: torch.dtype) -> Tensors:
    found = []
    for root in group.ranks:
        given = group.rows(dtype, root) if root == group.me else None
        found.append(room(group.mine(dtype)))
        dist.scatter(found[-1], given, root, group=group.pg)
    return found


def rows_between(source: int, target: int) -> int:
    return (source + 2 * target) % 4  # lengths differ, some are none


def part(source: int, target: int, dtype: torch.dtype) -> torch.Tensor:
    return brought(source, dtype, target, (rows_between(source, target), 3))


def all_to_all(group: Group, dtype: torch.dtype) -> Tensors:
    outs = [room(part(source, group.me, dtype)) for source in group.ranks]
    dist.all_to_all(outs, [part(group.me, target, dtype) for target in group.ranks], group=group.pg)
    return outs


def all_to_all_single(group: Group, dtype: torch.dtype) -> Tensors:
    taken = [rows_between(source, group.me) for source in group.ranks]
    given = [rows_between(group.me, target) for target in group.ranks]
    whole = group.mine(dtype, 7, (sum(given), 3))
    out = room(brought(0, dtype, 0, (sum(taken), 3)))
    dist.all_to_all_single(out, whole, taken, given, group=group.pg)
    return list(out.split(taken))


def from_wholes(group: Group, dtype: torch.dtype) -> Tensors:
    found = []
    for source in group.ranks:
        given = [rows_between(source, target) for target in group.ranks]
        whole = brought(source, dtype, 7, (sum(given), 3))
        found.append(whole.split(given)[group.ranks.index(group.me)])
    return found


def send_and_recv(group: Group, dtype: torch.dtype) -> Tensors:
    """Around in a ring; the group of one sends to itself."""
    mine, place, size = group.mine(dtype), group.ranks.index(group.me), len(group.ranks)
    after, before = group.ranks[(place + 1) % size], group.ranks[(place - 1) % size]
    out = room(mine)
    both = [dist.P2POp(dist.isend, mine, after, group.pg), dist.P2POp(dist.irecv, out, before, group.pg)]
    for work in dist.batch_isend_irecv(both):
        work.wait()
    return [out]


MOVES: dict[Callable[[Group, torch.dtype], Tensors], Callable[[Group, torch.dtype], Tensors]] = {
    broadcast: lambda group, dtype: [brought(root, dtype, root) for root in group.ranks],
    all_gather: lambda group, dtype: group.rows(dtype),
    all_gather_unequal: lambda group, dtype: [brought(rank, dtype, 0, (rank, 3)) for rank in group.ranks],
    all_gather_into_tensor: lambda group, dtype: group.rows(dtype),
    all_gather_into_tensor_coalesced: lambda group, dtype: group.rows(dtype) + group.rows(dtype, 1),
    all_gather_coalesced: lambda group, dtype: group.rows(dtype) + group.rows(dtype, 1),
    gather: lambda group, dtype: group.rows(dtype, group.me),
    scatter: lambda group, dtype: [group.mine(dtype, root) for root in group.ranks],
    all_to_all: lambda group, dtype: [part(source, group.me, dtype) for source in group.ranks],
    all_to_all_single: from_wholes,
    send_and_recv: lambda group, dtype: [brought(group.ranks[group.ranks.index(group.me) - 1], dtype)],
}
if hasattr(dist, "gather_single"):  # since torch 2.15
    MOVES[gather_single] = lambda group, dtype: group.rows(dtype, group.me)


# -- both backends beside each other ------------------------------------------------------------------------------


def outcome(run: Callable[[], Tensors], must: Callable[[], Tensors]) -> str:
    try:
        found = run()
    except (RuntimeError, ValueError, TypeError, PacelineError) as error:
        return str(error).partition("\n")[0]
    same = all(
        a.dtype == b.dtype and a.shape == b.shape and torch.equal(raw(a), raw(b))
        for a, b in zip(found, must(), strict=True)
    )
    return "" if same else WRONG


def table(ours: Group, gloo: Group | None, everything: bool, dtypes: Iterable[str]) -> dict[str, Any]:
    """Of each collective, reduction and dtype what it comes to in two groups of the same workers."""

    def both(run: Callable[..., Tensors], must: Callable[..., Tensors], *what: Any) -> list[str | None]:
        mine = outcome(partial(run, ours, *what), partial(must, ours, *what))
        if gloo is not None and (everything or mine in ("", WRONG)):  # on all workers alike
            return [mine, outcome(partial(run, gloo, *what), partial(must, gloo, *what))]
        return [mine, None]

    found: dict[str, Any] = {}
    for run, must in REDUCTIONS.items():
        found[run.__name__] = {op: {name: both(run, must, DTYPES[name], op) for name in dtypes} for op in OPS}
    for move, moved in MOVES.items():
        found[move.__name__] = {"": {name: both(move, moved, DTYPES[name]) for name in dtypes}}
    return found


def main() -> None:
    folder, *groups = sys.argv[1:]
    if "RANK" not in os.environ:
        fork(SIZE)
    rank = int(os.environ["RANK"])
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # of names that torch calls old, and of dtypes that it has little for
    register()
    here = {"store": dist.FileStore(f"{folder}/store", SIZE), "rank": rank, "world_size": SIZE}
    patience = timedelta(seconds=60)
    dist.init_process_group("paceline", timeout=patience, **({} if "MASTER_ADDR" in os.environ else here))
    found: dict[str, Any] = {"table": {}, "programs": {}}
    for text in groups:
        name, _, mode = text.partition(":")
        ranks = [int(word) for word in name.split(",")]
        ours = Group(ranks, dist.new_group(ranks, patience), rank)
        beside = mode in ("gloo", "all")
        gloo = Group(ranks, dist.new_group(ranks, patience, "gloo"), rank) if beside else None
        if rank in ranks:
            found["table"][name] = table(ours, gloo, mode == "all", BRIEF if mode == "brief" else DTYPES)
    for program in PROGRAMS:
        found["programs"][program.__name__] = program() or []
    Path(folder, f"{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def fork(workers: int) -> None:
    """So many processes like this one; returns in each, and ends this one with the first code that is not 0."""
    children = {}
    for rank in range(workers):
        if not (pid := os.fork()):
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            os.environ.update(RANK=str(rank), WORLD_SIZE=str(workers))
            return
        children[pid] = rank
    worst = 0
    while children:
        pid, status = os.wait()
        del children[pid]
        worst = worst or os.waitstatus_to_exitcode(status)
        for other in children if worst else ():
            os.kill(other, signal.SIGKILL)
    sys.exit(worst != 0)


if __name__ == "__main__":
    main()
