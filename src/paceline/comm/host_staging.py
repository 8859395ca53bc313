"""Moves CUDA tensors through host memory, for codecs and for workers that share a GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from paceline.comm.c10d_arguments import Reduction, outside_inference
from paceline.comm.hierarchical import Between
from paceline.comm.nccl import Nccl
from paceline.comm.transport import CallOptions, Transport


class HostStaging:
    """The collectives and messages of `Nccl`, made over a channel with copies in host memory, whose results are copied
    back.
    """

    def __init__(self, channel: Transport) -> None:
        self._channel = channel

    def all_reduce(self, flat: torch.Tensor, reduction: Reduction, between: Between | None = None) -> dist.Work:
        """Reduces `flat` in place on all workers."""
        host = _copy(flat)
        return self._channel.all_reduce(host, reduction, options=_back(flat, host), between=between)

    def reduce_scatter(
        self, out: torch.Tensor, parts: Sequence[torch.Tensor], reduction: Reduction, *, full: torch.Tensor
    ) -> dist.Work:
        """Reduces the `parts` of all workers; `out` receives this worker's part. `full` contains the parts."""
        hosts = _copy(full).view(len(parts), -1).unbind(0)
        host = _room(out)
        return self._channel.reduce_scatter(host, hosts, reduction, options=_back(out, host))

    def broadcast(self, flat: torch.Tensor, root: int) -> dist.Work:
        """Overwrites `flat` on all workers with that of `root`."""
        host = _copy(flat)
        return self._channel.broadcast(host, root, options=_back(flat, host))

    def all_gather(self, outs: Sequence[torch.Tensor], flat: torch.Tensor) -> dist.Work:
        """Gathers the `flat` of all workers into `outs`."""
        hosts = [_room(out) for out in outs]
        return self._channel.all_gather(hosts, _copy(flat), options=_all_back(outs, hosts))

    def all_to_all(self, outs: Sequence[torch.Tensor], ins: Sequence[torch.Tensor]) -> dist.Work:
        """Sends `ins[i]` to worker i, and fills `outs[i]` from it."""
        hosts = [_room(out) for out in outs]
        return self._channel.all_to_all(hosts, [_copy(one) for one in ins], _all_back(outs, hosts))

    def send(self, flat: torch.Tensor, rank: int) -> dist.Work:
        """Sends `flat` to worker `rank`."""
        return self._channel.send(_copy(flat), rank)

    def receive(self, flat: torch.Tensor, rank: int) -> dist.Work:
        """Fills `flat` with what worker `rank` sends."""
        host = _room(flat)
        return self._channel.receive(host, rank, then=_back(flat, host).then)


Carrier = Transport | Nccl | HostStaging


def carrier(channel: Transport, tensor: torch.Tensor, peer: int | None = None, coded: bool = False) -> Carrier:
    """What moves a tensor among all workers of a channel, to or from a `peer`, or sums it in a codec's way (`coded`).

    For the first CUDA tensor it is collective among these workers.
    """
    if not tensor.is_cuda:
        return channel
    return HostStaging(channel) if coded or channel.nccl.shares(tensor.device, peer) else channel.nccl


def carry(begin: Callable[..., Callable[[], dist.Work]], tensors: Sequence[Any]) -> dist.Work:
    """Makes one of torch's collectives with host copies of all tensors in its arguments; it is done on return."""
    pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
    with outside_inference():
        work: Any = begin(*_copied(tensors, pairs))()
    work.wait()
    for tensor, host in pairs:
        tensor.copy_(host)
    tensor_of_copy = {id(host): tensor for tensor, host in pairs}
    work.outcome = [tensor_of_copy.get(id(host), host) for host in work.outcome]
    return work  # type: ignore[no-any-return]


def _copied(tensors: Any, pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> Any:
    if isinstance(tensors, torch.Tensor):
        pairs.append((tensors, _copy(tensors)))
        return pairs[-1][1]
    return [_copied(one, pairs) for one in tensors] if isinstance(tensors, (list, tuple)) else tensors


def _room(like: torch.Tensor) -> torch.Tensor:
    """An empty tensor in host memory that a device can copy to and from by itself."""
    return torch.empty(like.shape, dtype=like.dtype, pin_memory=like.is_cuda)


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    return _room(tensor).copy_(tensor.detach())


def _back(tensor: torch.Tensor, host: torch.Tensor) -> CallOptions:
    return _all_back([tensor], [host])


def _all_back(tensors: Sequence[torch.Tensor], hosts: Sequence[torch.Tensor]) -> CallOptions:
    def then() -> None:
        for tensor, host in zip(tensors, hosts, strict=True):
            tensor.copy_(host)

    return CallOptions(then)
