"""Collectives on CUDA tensors over torch's NCCL groups."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from paceline.base.environment import offer_nccl_interface, tunnel
from paceline.comm.c10d_arguments import Reduction
from paceline.comm.hierarchical import FOREVER, interface_of
from paceline.comm.peer_status import Ask


class Nccl:
    """The collectives and messages of a channel for CUDA tensors in Paceline's own steps.

    Its group is made with the first of them, over the interface with this `address`.
    """

    def __init__(self, store: dist.Store, ask: Ask, rank: int, size: int, address: str) -> None:
        self._store, self._ask, self._rank, self._size, self._address = store, ask, rank, size, address
        self._made: Any = None
        self._shares: dict[int | None, bool] = {}

    def shares(self, device: torch.device, peer: int | None = None) -> bool:
        """Whether two of the workers, or this one and a `peer`, share a GPU, or reach each other only through a tunnel.

        NCCL serves in neither case. The first call is collective among these workers.
        """
        if tunnel() is not None:
            return True
        if peer not in self._shares:
            self._store.set(f"device/{self._rank}", str(torch.cuda.get_device_properties(device).uuid))
            ranks = range(self._size) if peer is None else {self._rank, peer}
            devices = self._ask(*(f"device/{rank}" for rank in ranks))
            self._shares[peer] = len({*devices}) < len(devices)
        return self._shares[peer]

    @property
    def made(self) -> bool:
        """Whether torch's group exists."""
        return self._made is not None

    @property
    def group(self) -> Any:
        """Torch's group, which the first use makes. That is collective."""
        if self._made is None:
            offer_nccl_interface(interface_of(self._address))
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = FOREVER
            self._made = dist.ProcessGroupNCCL(self._store, self._rank, self._size, options)
        return self._made

    def all_reduce(self, flat: torch.Tensor, reduction: Reduction) -> dist.Work:
        """Reduces `flat` in place on all workers."""
        options = c10d.AllreduceOptions()
        options.reduceOp = dist.ReduceOp(reduction.op)
        return self.group.allreduce([flat], options)  # type: ignore[no-any-return]

    def reduce_scatter(
        self, out: torch.Tensor, parts: Sequence[torch.Tensor], reduction: Reduction, *, full: torch.Tensor
    ) -> dist.Work:
        """Reduces the `parts` of all workers; `out` receives this worker's part. `full` contains the parts."""
        options = c10d.ReduceScatterOptions()
        options.reduceOp = dist.ReduceOp(reduction.op)
        return self.group._reduce_scatter_base(out, full, options)  # type: ignore[no-any-return]

    def broadcast(self, flat: torch.Tensor, root: int) -> dist.Work:
        """Overwrites `flat` on all workers with that of `root`."""
        options = c10d.BroadcastOptions()
        options.rootRank = root
        return self.group.broadcast([flat], options)  # type: ignore[no-any-return]

    def all_gather(self, outs: Sequence[torch.Tensor], flat: torch.Tensor) -> dist.Work:
        """Gathers the `flat` of all workers into `outs`."""
        return self.group.allgather([[*outs]], [flat])  # type: ignore[no-any-return]

    def all_to_all(self, outs: Sequence[torch.Tensor], ins: Sequence[torch.Tensor]) -> dist.Work:
        """Sends `ins[i]` to worker i, and fills `outs[i]` from it."""
        return self.group.alltoall([*outs], [*ins], c10d.AllToAllOptions())  # type: ignore[no-any-return]

    def send(self, flat: torch.Tensor, rank: int) -> dist.Work:
        """Sends `flat` to worker `rank`."""
        return self.group.send([flat], rank, 0)  # type: ignore[no-any-return]

    def receive(self, flat: torch.Tensor, rank: int) -> dist.Work:
        """Fills `flat` with what worker `rank` sends."""
        return self.group.recv([flat], rank, 0)  # type: ignore[no-any-return]

    def abort(self) -> None:
        """Ends everything that is under way on the group."""
        if self._made is not None:
            self._made.abort()

    def forget(self) -> None:
        """Drops the group."""
        self._made = None
