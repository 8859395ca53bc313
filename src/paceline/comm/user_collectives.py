"""Refuses collectives that the script calls in its loss, forward or dataset."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NoReturn

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from paceline.errors import UsageError

_CALLS = (
    *("allreduce", "allreduce_coalesced", "reduce", "broadcast", "scatter", "gather", "barrier", "monitored_barrier"),
    *("allgather", "allgather_coalesced", "_allgather_base", "allgather_into_tensor_coalesced"),
    *("reduce_scatter", "_reduce_scatter_base", "reduce_scatter_tensor_coalesced", "alltoall", "alltoall_base"),
    *("all_gather_single", "all_gather_single_coalesced", "all_to_all_single", "gather_single", "gather_into_tensor"),
    *("reduce_scatter_single", "reduce_scatter_single_coalesced", "send", "recv", "recv_anysource"),
)
_CURE = (
    "return (sum, count) from the loss, and Paceline adds it over all workers; for a loss over all rows of the global "
    'batch, set loss_over="batch"; give the dataset all rows on every worker'
)


class _Refusing(dist.ProcessGroup):
    """Stands in for the script's group: it has the same rank and size, and refuses every collective."""

    def __init__(self, rank: int, size: int, where: str) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]
        self.where = where


def _refuse(call: str) -> Any:
    name = call.strip("_").removesuffix("_base")

    def refuse(self: _Refusing, *_: Any, **__: Any) -> NoReturn:
        raise UsageError(f"{self.where} calls {name}() of torch.distributed", _CURE)

    return refuse


for _call in _CALLS:
    setattr(_Refusing, _call, _refuse(_call))


def refusing(where: str) -> AbstractContextManager[None]:
    """A context that refuses collectives over torch's default group, if the script has made one, naming `where` they
    were called.
    """
    group: Any = dist.GroupMember.WORLD
    return nullcontext() if group is None else _standing_in(group, where)


@contextmanager
def _standing_in(group: Any, where: str) -> Iterator[None]:
    placeholder = _Refusing(group.rank(), group.size(), where)
    known = c10d._world.pg_map  # where torch looks up a group's backend, for its log
    dist.GroupMember.WORLD, known[placeholder] = placeholder, known[group]
    try:
        yield
    finally:
        dist.GroupMember.WORLD = group
        known.pop(placeholder, None)
