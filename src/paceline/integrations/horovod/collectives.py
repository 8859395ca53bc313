"""Carries out agreed collectives on the tensors of one worker."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from paceline.comm.c10d_arguments import Op, reduction
from paceline.comm.host_staging import carrier
from paceline.comm.shared_memory import raw_bytes
from paceline.comm.transport import Transport
from paceline.integrations.horovod.adasum import adasum
from paceline.integrations.horovod.negotiation import AgreedCollective, Request

OPS: dict[str, Any] = {"Average": Op.SUM, "Sum": Op.SUM, "Min": Op.MIN, "Max": Op.MAX, "Product": Op.PRODUCT}
ADASUM = "Adasum"
_HALVES = (torch.float16, torch.bfloat16)


@dataclass
class Members:
    """The workers of a process set.

    `ranks` are their ranks in ascending order. `channel` connects them; it is None if this worker is alone in the set,
    or not a member.
    """

    ranks: tuple[int, ...]
    channel: Transport | None = None

    def declare(self, name: str, site: str, kind: str) -> None:
        """Declares the next collective, for errors and the flight recorder."""
        if self.channel is not None:
            self.channel.declared = (name, site, kind)


def dtype_of(name: str) -> torch.dtype:
    """The dtype of a request."""
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def scaled(tensor: torch.Tensor, factor: float, divisor: int = 1) -> torch.Tensor:
    """`tensor` times `factor`, divided by `divisor`, in its own dtype.

    Integers are computed in float64 and rounded towards zero, 16-bit numbers in float32.
    """
    if factor == 1.0 and divisor == 1:
        return tensor
    if not (tensor.is_floating_point() or tensor.is_complex()):
        if factor == 1.0:
            return torch.div(tensor, divisor, rounding_mode="trunc").to(tensor.dtype)
        return (tensor.double() * factor / divisor).to(tensor.dtype)
    if tensor.dtype in _HALVES:
        return (tensor.float() * factor / divisor).to(tensor.dtype)
    return tensor / divisor if factor == 1.0 else tensor * factor if divisor == 1 else tensor * factor / divisor


def allreduce(
    members: Members, request: Request, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]
) -> None:
    """Reduces `inputs`, of one dtype, over the members of a process set into `outputs`, in one collective."""
    alone = len(inputs) == 1 and outputs[0].is_contiguous()
    if alone:
        outputs[0].copy_(scaled(inputs[0], request.before))
        flat = outputs[0].view(-1)
    else:
        flat = torch.cat([scaled(one, request.before).reshape(-1) for one in inputs])
    if request.op == ADASUM:
        adasum(members.channel, flat, [one.numel() for one in inputs])
    elif members.channel is not None:
        carrier(members.channel, flat).all_reduce(flat, reduction(OPS[request.op], flat.dtype)).wait()
    divisor = len(members.ranks) if request.op == "Average" else 1
    if alone:
        if request.after != 1.0 or divisor != 1:
            flat.copy_(scaled(flat, request.after, divisor))
        return
    result = scaled(flat, request.after, divisor)
    for part, output in zip(result.split([one.numel() for one in outputs]), outputs, strict=True):
        output.copy_(part.view(output.shape))


def allgather(members: Members, agreed: AgreedCollective, index: int, tensor: torch.Tensor) -> torch.Tensor:
    """Concatenates the members' tensors number `index` of a request along the first dimension."""
    shapes = [agreed.requests[rank].tensors[index][1] for rank in members.ranks]
    sizes = [prod(shape) for shape in shapes]
    longest = max(sizes)
    shape = (sum(shape[0] if shape else 1 for shape in shapes), *shapes[0][1:])
    flat = tensor.detach().contiguous().view(-1)
    if members.channel is None or not longest:
        return flat.clone().view(shape) if longest else flat.new_empty(shape)
    if len(flat) < longest:
        flat = torch.cat([flat, flat.new_zeros(longest - len(flat))])
    everyone = flat.new_empty(len(sizes), longest)
    outs = [raw_bytes(row) for row in everyone.unbind(0)]
    carrier(members.channel, flat).all_gather(outs, raw_bytes(flat)).wait()
    if min(sizes) == longest:
        return everyone.view(shape)
    return torch.cat([row[:size] for row, size in zip(everyone.unbind(0), sizes, strict=True)]).view(shape)


def broadcast(members: Members, request: Request, tensor: torch.Tensor, output: torch.Tensor) -> None:
    """Writes the tensor of the request's root into `output` on all members."""
    if output.data_ptr() != tensor.data_ptr():
        output.copy_(tensor)
    dense = output.contiguous()
    if members.channel is not None and dense.numel():
        root = members.ranks.index(request.root)
        carrier(members.channel, dense).broadcast(raw_bytes(dense.view(-1)), root).wait()
    if dense.data_ptr() != output.data_ptr():
        output.copy_(dense)


def alltoall(
    members: Members, agreed: AgreedCollective, rank: int, tensor: torch.Tensor
) -> tuple[torch.Tensor, list[int]]:
    """Sends each member its rows of `tensor`. Returns the rows from all members, and how many each of them sent."""
    position = members.ranks.index(rank)
    sent = agreed.requests[rank].splits
    received = [agreed.requests[other].splits[position] for other in members.ranks]
    flat = tensor.detach().contiguous()
    output = flat.new_empty((sum(received), *flat.shape[1:]))
    if members.channel is None:
        return output.copy_(flat), received
    ins = [raw_bytes(part.reshape(-1)) for part in flat.split(list(sent))]
    outs = [raw_bytes(part.view(-1)) for part in output.split(received)]
    carrier(members.channel, flat).all_to_all(outs, ins).wait()
    return output, received


def rows_of(rows: int, members: int) -> list[int]:
    """How many of the rows of a reduced tensor each member gets: the first ones get the remainder."""
    base, more = divmod(rows, members)
    return [base + (number < more) for number in range(members)]


def reducescatter(members: Members, request: Request, rank: int, tensor: torch.Tensor) -> torch.Tensor:
    """Reduces `tensor` over the members; returns this member's rows of the result."""
    position, size = members.ranks.index(rank), len(members.ranks)
    rows = rows_of(len(tensor), size)
    parts = scaled(tensor.detach(), request.before).contiguous().split(rows)
    divisor = size if request.op == "Average" else 1
    if members.channel is None:
        return scaled(parts[0].clone(), request.after, divisor)
    width = prod(tensor.shape[1:])
    full = tensor.new_zeros(size, rows[0] * width)
    for row, part in zip(full, parts, strict=True):
        row[: part.numel()].copy_(part.reshape(-1))
    out = torch.empty_like(full[0])
    if len(out):
        by = carrier(members.channel, full)
        by.reduce_scatter(out, full.unbind(0), reduction(OPS[request.op], full.dtype), full=full.view(-1)).wait()
    own_rows = out[: rows[position] * width].view(rows[position], *tensor.shape[1:])
    return scaled(own_rows, request.after, divisor)
