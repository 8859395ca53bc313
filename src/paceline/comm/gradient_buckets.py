"""Packs gradients into flat buckets during backward, and hands each full bucket on to be reduced.

As in torch's DistributedDataParallel (Li et al., "PyTorch Distributed", VLDB 2020): buckets follow the reverse order of
the parameters, the first is small, a bucket is handed on when its last gradient is there, and always in the same order.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate

import torch
from torch.nn import Parameter

from paceline.base.sharding import ALONE, Block, RowShards
from paceline.errors import UsageError

FIRST_BYTES = 1 << 20
BYTES = 25 << 20
LARGE = 1 << 22  # bytes above which a gradient is no longer in a core's cache

Allocate = Callable[[int, torch.dtype, torch.device], torch.Tensor]
Wires = list[list[torch.Tensor]]  # the bucket memory of a gradient, by shard and level


def zeros(numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Allocates a flat tensor of zeros in this process's own memory."""
    return torch.zeros(numel, dtype=dtype, device=device)


def levels_of(dtype: torch.dtype) -> int:
    """How many numbers carry one element of a gradient of this dtype in exact sums."""
    return 2 if dtype == torch.float64 else 1


def _copy(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copies `source` to `target`; large CPU tensors with memmove, which writes past the cache: torch's copy first
    reads what it overwrites.
    """
    alike = target.dtype == source.dtype and source.is_contiguous() and target.is_contiguous()
    if alike and target.nbytes >= LARGE and target.device.type == "cpu" == source.device.type:
        ctypes.memmove(target.data_ptr(), source.data_ptr(), target.nbytes)
    else:
        target.copy_(source)


@dataclass
class Bucket:
    """A flat tensor with one shard per worker, and the numbers of the parameters whose gradients it holds.

    `local_shard` is this worker's shard of `flat`. In it the gradients with these `shapes` begin at `starts`.
    """

    index: int
    flat: torch.Tensor
    members: list[int]
    local_shard: torch.Tensor
    shapes: list[torch.Size] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    missing: int = 0

    def split(self, flat: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
        """Yields each parameter's number and its part of a tensor that is laid out like `local_shard`."""
        for number, shape, start in zip(self.members, self.shapes, self.starts, strict=True):
            yield number, flat[start : start + shape.numel()].view(shape)


class GradSink:
    """Receives a step's gradients as autograd makes them, one backward after another, and passes them on to be summed.

    This base class is for a worker that shares parameters with no other one: gradients stay where autograd puts them.
    """

    maxima: torch.Tensor | None = None  # for exact sums: the largest gradient of each parameter
    # Numbers of parameters that other workers of a unit hold as well. `among` sums their gradients; their buckets leave
    # last.
    late: frozenset[int] = frozenset()
    among: Callable[[int, Sequence[torch.Tensor]], None]

    def __init__(self, params: Sequence[Parameter]) -> None:
        self.params = self.local_params = list(params)
        self.buckets: list[Bucket] = []
        self.largest: list[float] = []
        self._norms: torch.Tensor | None = None
        self.elements = [param.numel() for param in self.params]  # of full parameters, if `params` are shards

    @property
    def grad_buffers(self) -> GradSink:
        """The sink that holds the gradients of this worker's parameters in the end."""
        return self

    @property
    def sums(self) -> list[torch.Tensor]:
        """All gradients of this worker's rows, in as few tensors as possible."""
        return [param.grad for param in self.params if param.grad is not None]

    def memory(self) -> int:
        """Bytes that gradients take."""
        return sum(grad.nbytes for grad in self.sums)

    def rebind(self, allocate: Allocate) -> None:
        """Allocates fresh memory for all buckets with `allocate`. What they held is lost."""

    def release(self) -> list[torch.Tensor]:
        """Gives up gradients and hooks: no further step comes. Returns the memory that was allocated for sums."""
        for param in {*self.params, *self.local_params}:
            param.grad = None
        return []

    def begin(self, ready: Callable[[Bucket], None], micro_batches: int = 1) -> None:
        """Starts a step of so many micro-batches in all: `ready` will be called once with every bucket, in order."""

    def begin_backward(self, last: bool, is_dummy: bool = False, weight: float | None = None) -> None:
        """Begins the next backward.

        The `last` backward of a step completes parameters, so that their buckets may leave. Gradients of a dummy
        backward do not count. With a `weight` gradients land at its end, after they have been multiplied by it.
        """

    def end_backward(self) -> None:
        """Ends the present backward."""

    def flush(self) -> set[int]:
        """Hands on the remaining buckets, zeros where no gradient came; returns the numbers of those parameters."""
        return {number for number, param in enumerate(self.params) if param.grad is None}

    def resolve_exact(self, maxima: torch.Tensor) -> bool:
        """Finishes exact sums after all have arrived; False means that the step has to be redone."""
        return True

    def prefetch_norms(self) -> None:
        """Starts computing the gradients' norms when no other worker has to add to them.

        A GPU begins with them before anybody waits for the losses, and would have nothing to do until it is asked for
        these.
        """
        sums = [] if self.grad_buffers.buckets else self.sums
        self._norms = _norms(sums) if sums and sums[0].is_cuda else None

    def squares(
        self, micro_batches: int, counted: Sequence[Sequence[Block]] | None = None, changed: bool = False
    ) -> torch.Tensor:
        """The sum of the gradients' squares, as float64 numbers that add up to it.

        With `counted` only these blocks of each gradient are included. `changed` says that something other than
        backward has changed gradients.
        """
        norms = self._norms if counted is None and not changed else None
        if norms is None:
            gradients = self.sums
            if counted is not None:
                grads_and_blocks = (
                    (param.grad, blocks) for param, blocks in zip(self.local_params, counted, strict=True)
                )
                gradients = [
                    block.of(grad) for grad, blocks in grads_and_blocks if grad is not None for block in blocks
                ]
            norms = _norms(gradients)
        return norms.cpu().double().square().sum(0, keepdim=True)

    def assign_grads(self) -> None:
        """Makes what was written into the sums the gradients of this worker's parameters."""

    def abandon(self, again: bool = False) -> None:
        """Ends a step whose backward failed, or which begins `again`; nothing more is handed on."""

    def applied(self) -> None:
        """Takes note that the optimizer has used the step's sums."""


def _norms(gradients: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack(torch._foreach_norm(gradients)) if gradients else torch.zeros(1, dtype=torch.float64)


def error_in_two_parts(param: torch.Tensor) -> UsageError:
    """The error for a gradient that grew after it had been sent."""
    return UsageError(
        f"the gradient of a parameter of shape {tuple(param.shape)} came in two parts, the second after the first was "
        "sent to the other workers",
        "checkpoint with use_reentrant=False: the other kind cannot share parameters between segments",
    )


def split_by_shard(grad: torch.Tensor, wires: Wires) -> Sequence[torch.Tensor]:
    """The elements of a gradient that belong to each shard."""
    parts: Sequence[torch.Tensor] = grad.reshape(-1).split([levels[0].numel() for levels in wires])
    return parts


class Buckets(GradSink):
    """Buckets over `params`, in which every gradient lands that backward makes between `begin` and `flush`.

    The gradients of this worker's rows become those of `local_params`, which are `params` by default.

    A bucket is laid out as [shard, level, elements of the shard's rows]: see `RowShards`. Levels, of the dtype `_wire`,
    exist for exact sums only, as do `maxima` and `largest` (exact_sums.py). Without `hooks` gradients come by `add`
    (fsdp_reduce_scatter.py).
    """

    _wire: torch.dtype | None = None

    def __init__(
        self,
        params: Sequence[Parameter],
        first_bytes: int = FIRST_BYTES,
        bytes_: int = BYTES,
        allocate: Allocate = zeros,
        shards: RowShards = ALONE,
        local_params: Sequence[Parameter] | None = None,
        hooks: bool = True,
    ) -> None:
        super().__init__(params)
        self.local_params = self.params if local_params is None else list(local_params)
        self.shards = shards
        nothing = torch.empty(0, dtype=torch.float32)
        self._views: list[torch.Tensor] = [nothing] * len(self.params)
        self._wires: list[Wires] = [[]] * len(self.params)
        self._home: list[Bucket] = [Bucket(-1, nothing, [], nothing)] * len(self.params)
        self._groups = self._group(first_bytes, bytes_)
        self.rebind(allocate)
        self._ready: Callable[[Bucket], None] | None = None
        self._armed = False
        self._weight: float | None = None
        self._next = 0
        self._touched: set[int] = set()
        self._counted: set[int] = set()
        self._hooks = [
            param.register_post_accumulate_grad_hook(partial(self._take, number))
            for number, param in enumerate(self.params if hooks else ())
        ]

    def release(self) -> list[torch.Tensor]:
        for hook in self._hooks:
            hook.remove()
        memory = [bucket.flat for bucket in self.buckets]
        self.buckets.clear()
        self._views, self._wires, self._home = [], [], []
        return super().release() + memory

    def rebind(self, allocate: Allocate) -> None:
        self._allocate = allocate
        self.buckets.clear()
        for members in self._groups:
            self._make(members)

    def _group(self, first_bytes: int, bytes_: int) -> list[list[int]]:
        groups: list[list[int]] = []
        filled = 0
        for number in reversed(range(len(self.params))):
            param = self.params[number]
            limit = first_bytes if len(groups) <= 1 else bytes_
            other = groups and (
                self.params[groups[-1][0]].dtype != param.dtype or self.params[groups[-1][0]].device != param.device
            )
            if not groups or other or filled >= limit:
                groups.append([])
                filled = 0
            groups[-1].append(number)
            filled += param.nbytes
        return groups

    def _make(self, members: list[int]) -> None:
        dtype, device = self.params[members[0]].dtype, self.params[members[0]].device
        shapes = [self.params[number].shape for number in members]
        shards = self.shards
        stretches, wires = self.lay_out(shapes, shards, self._allocate, dtype, device)
        flat, me = stretches.view(-1), shards.me
        bucket = Bucket(len(self.buckets), flat, members, stretches[me].view(-1))
        local_grads, start = self._local_grads(stretches[me], dtype), 0
        for number, shape, wire in zip(members, shapes, wires, strict=True):
            self._wires[number] = wire
            self._views[number] = local_grads[start : start + wire[me][0].numel()].view(self.local_params[number].shape)
            self._home[number] = bucket
            bucket.shapes.append(self.local_params[number].shape)
            bucket.starts.append(start)
            start += shards.width(shape)
        self.buckets.append(bucket)

    def lay_out(
        self,
        shapes: Sequence[torch.Size],
        shards: RowShards,
        allocate: Allocate,
        dtype: torch.dtype,
        device: torch.device,
    ) -> tuple[torch.Tensor, list[Wires]]:
        """Allocates memory for gradients of these shapes as [shard, level, elements]; returns it and each gradient's
        wires.
        """
        levels = 1 if self._wire is None else levels_of(dtype)
        ends = list(accumulate((shards.width(shape) for shape in shapes), initial=0))
        length = shards.aligned(ends[-1])
        flat = allocate(shards.count * levels * length, self._wire or dtype, device)
        stretches = flat.view(shards.count, levels, length)
        wires = [
            [
                [level[start : start + shards.size(shape, shard_index)] for level in stretch]
                for shard_index, stretch in enumerate(stretches)
            ]
            for shape, start in zip(shapes, ends, strict=False)
        ]
        return stretches, wires

    def _local_grads(self, stretch: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Memory for the summed gradients of this worker's rows."""
        return stretch[0]

    def _take(self, number: int, param: torch.Tensor) -> None:
        """Takes a gradient that autograd has made: a hook of the parameter."""
        if (
            self._ready is None or self._weight is not None
        ):  # not in a step, or it lands in `end_backward`, with its weight
            return
        self._land(number, param, first=number not in self._touched)
        self._touched.add(number)
        if number in self.late:
            return
        if self._armed and number not in self._counted:
            self.complete(number)
        elif self._armed and self._home[number].index < self._next:
            raise error_in_two_parts(param)

    def complete(self, number: int) -> None:
        """Takes note that no more gradients come for this parameter in the step."""
        self._counted.add(number)
        bucket = self._home[number]
        bucket.missing -= 1
        if bucket.missing == 0:
            self._hand_on()

    def _land(self, number: int, param: torch.Tensor, first: bool) -> None:
        """Moves a gradient into its bucket.

        The first one of a step is autograd's own tensor; autograd adds later ones into the view, if the parameter has
        one.
        """
        assert param.grad is not None
        if self.shards.count == 1 and self._wire is None:
            if first:
                _copy(self._views[number], param.grad)
                param.grad = self._views[number]
            return
        grad, param.grad = param.grad.detach(), None
        self.put(number, grad, self._wires[number], first)

    def put(self, number: int, grad: torch.Tensor, wires: Wires, first: bool) -> None:
        """Writes a gradient into its wires, by shard and level, or adds it to what they hold."""
        for (wire,), part in zip(wires, split_by_shard(grad, wires), strict=True):
            if first:
                _copy(wire, part)
            else:
                wire.add_(part)

    def add(self, number: int, levels: Sequence[torch.Tensor]) -> None:
        """Adds the sums of this worker's rows of a gradient that was reduced elsewhere."""
        for wire, more in zip(self._wires[number][self.shards.me], levels, strict=True):
            if number in self._touched:
                wire.add_(more)
            else:
                wire.copy_(more)
        self._touched.add(number)

    @property
    def sums(self) -> list[torch.Tensor]:
        return [bucket.local_shard for bucket in self.buckets]

    def memory(self) -> int:
        return sum(bucket.flat.nbytes for bucket in self.buckets)

    def pack_params(self, bucket: Bucket) -> None:
        """Writes this worker's rows of the parameters over their gradients, which have been used."""
        for number in bucket.members:
            _copy(self._wires[number][self.shards.me][0], self.local_params[number].detach().reshape(-1))

    def unpack_params(self, bucket: Bucket, stretches: Sequence[torch.Tensor]) -> None:
        """Reads the other workers' rows into the parameters, from the shard that each has offered."""
        start = 0
        for number in bucket.members:
            full = self.params[number].detach()
            for shard_index in range(self.shards.count):
                if shard_index != self.shards.me:
                    target = self.shards.of(full, shard_index)
                    _copy(target, stretches[shard_index][start : start + target.numel()].view(target.shape))
            start += self.shards.width(full.shape)

    def assign_grads(self) -> None:
        for param, view in zip(self.local_params, self._views, strict=True):
            param.grad = view

    def _hand_on(self) -> None:
        assert self._ready is not None
        while self._next < len(self.buckets) and self.buckets[self._next].missing == 0:
            self._next += 1
            self._ready(self.buckets[self._next - 1])

    def begin(self, ready: Callable[[Bucket], None], micro_batches: int = 1) -> None:
        self._ready, self._armed, self._weight, self._next = ready, False, None, 0
        self._touched.clear()
        self._counted.clear()
        for bucket in self.buckets:
            bucket.missing = len(bucket.members)

    def begin_backward(self, last: bool, is_dummy: bool = False, weight: float | None = None) -> None:
        self._armed, self._weight = last, weight

    def end_backward(self) -> None:
        weighed, self._weight = self._weight is not None, None
        for number, param in enumerate(self.params if weighed else ()):
            if param.grad is not None:
                self._take(number, param)

    def flush(self) -> set[int]:
        unused = set(range(len(self.params))) - self._touched
        for number in unused:
            for wire in (wire for levels in self._wires[number] for wire in levels):
                wire.zero_()
        for number in sorted(self.late):
            self.among(number, [wire for levels in self._wires[number] for wire in levels])
        self.assign_grads()
        for bucket in self.buckets:
            bucket.missing = 0
        self._hand_on()
        self._ready = None
        return unused

    def abandon(self, again: bool = False) -> None:
        self._ready = None
