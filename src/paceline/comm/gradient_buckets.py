"""Packs gradients into flat buckets during backward, and hands each full bucket on to be reduced.

As in torch's DistributedDataParallel (Li et al., "PyTorch Distributed", VLDB 2020): buckets follow the reverse order of
the parameters, the first is small, a bucket is handed on when its last gradient is there, and always in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch.nn import Parameter

from paceline.base.sharding import ALONE, Block, RowShards
from paceline.comm.exact_sums import ExactSums
from paceline.comm.gradient_memory import Allocate, Wires, copy, counted_grads, lay_out, norms_of, write_plain, zeros
from paceline.errors import UsageError

FIRST_BYTES = 1 << 20
BYTES = 25 << 20


@dataclass
class Bucket:
    """A flat tensor with one shard per worker, and the numbers of the parameters whose gradients it holds.

    `local_shard` is this worker's shard of `flat`. In it the gradients with these `shapes` begin at `starts`. A
    `divided` bucket holds gradients of experts: each worker along the axis `expert` has different experts.
    """

    index: int
    flat: torch.Tensor
    members: list[int]
    local_shard: torch.Tensor
    shapes: list[torch.Size] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    missing: int = 0
    divided: bool = False

    def split(self, flat: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
        """Yields each parameter's number and its part of a tensor that is laid out like `local_shard`."""
        for number, shape, start in zip(self.members, self.shapes, self.starts, strict=True):
            yield number, flat[start : start + shape.numel()].view(shape)


def error_in_two_parts(param: torch.Tensor) -> UsageError:
    """The error for a gradient that grew after it had been sent."""
    return UsageError(
        f"the gradient of a parameter of shape {tuple(param.shape)} arrived in two parts, the second one after the "
        "first had been sent to the other workers",
        "use torch.utils.checkpoint with use_reentrant=False: reentrant segments cannot share parameters",
    )


class Buckets:
    """A gradient sink (gradient_sinks.py) and the memory of the sums: buckets over `params`, in which every gradient
    lands that backward makes between `begin` and `flush`.

    The gradients of this worker's rows become those of `local_params`, which are `params` by default.

    A bucket is laid out as [shard, level, elements of the shard's rows]: see `RowShards`. Levels exist for exact sums
    only: `exact` then rounds each gradient, and makes the gradients from the sums. Without `hooks` gradients come by
    `write` and `add` (fsdp_reduce_scatter.py). The parameters numbered `divided` have buckets of their own.
    """

    # Numbers of parameters that other workers of a unit hold as well. `among` sums their gradients; their buckets leave
    # last.
    late: frozenset[int] = frozenset()
    among: Callable[[int, Sequence[torch.Tensor]], None]

    def __init__(
        self,
        params: Sequence[Parameter],
        first_bytes: int = FIRST_BYTES,
        bytes_: int = BYTES,
        allocate: Allocate = zeros,
        shards: RowShards = ALONE,
        local_params: Sequence[Parameter] | None = None,
        exact: bool = False,
        hooks: bool = True,
        divided: Collection[int] = (),
    ) -> None:
        self.params = list(params)
        self.local_params = self.params if local_params is None else list(local_params)
        self.shards = shards
        self.exact = ExactSums([param.numel() for param in self.params]) if exact else None
        self.write = write_plain if self.exact is None else self.exact.write
        self.buckets: list[Bucket] = []
        self.sums: list[torch.Tensor] = []  # all gradients of this worker's rows, one tensor for each bucket
        nothing = torch.empty(0, dtype=torch.float32)
        self._views: list[torch.Tensor] = [nothing] * len(self.params)
        self._wires: list[Wires] = [[]] * len(self.params)
        self._home: list[Bucket] = [Bucket(-1, nothing, [], nothing)] * len(self.params)
        self.divided = frozenset(divided)
        self._groups = _group(self.params, self.divided, first_bytes, bytes_)
        self.rebind(allocate)
        # Autograd adds a gradient to the one before, so that it may make it directly in the bucket.
        self._in_place = shards.count == 1 and not exact
        self._ready: Callable[[Bucket], None] | None = None
        self._armed = False
        self._weight: float | None = None
        self._next = 0
        self._touched: set[int] = set()
        self._counted: set[int] = set()
        self._hooks = [
            param.register_post_accumulate_grad_hook(partial(self._write_gradient, number))
            for number, param in enumerate(self.params if hooks else ())
        ]

    # -- memory -----------------------------------------------------------------------------------------------------

    def rebind(self, allocate: Allocate) -> None:
        """Allocates fresh memory for all buckets with `allocate`. What they held is lost."""
        self._drop_memory()
        for members in self._groups:
            self._make(members, allocate)

    def _drop_memory(self) -> None:
        self.buckets.clear()
        self.sums.clear()
        if self.exact is not None:
            self.exact.memory.clear()

    def _make(self, members: list[int], allocate: Allocate) -> None:
        like, shards, exact = self.params[members[0]], self.shards, self.exact
        shapes = [self.params[number].shape for number in members]
        stretches, wires = lay_out(shapes, like, shards, allocate, exact is not None)
        local_levels = stretches[shards.me]
        bucket = Bucket(len(self.buckets), stretches.view(-1), members, local_levels.view(-1))
        bucket.divided = members[0] in self.divided
        grads = bucket.local_shard if exact is None else exact.allocate_grads(local_levels, like.dtype)
        start = 0
        for number, shape, wire in zip(members, shapes, wires, strict=True):
            local_shape = self.local_params[number].shape
            self._wires[number], self._home[number] = wire, bucket
            self._views[number] = grads[start : start + wire[shards.me][0].numel()].view(local_shape)
            bucket.shapes.append(local_shape)
            bucket.starts.append(start)
            start += shards.width(shape)
        self.buckets.append(bucket)
        self.sums.append(grads)

    def memory(self) -> int:
        """Bytes that buckets take, and with exact sums the gradients made from them."""
        tensors = [bucket.flat for bucket in self.buckets] + (self.sums if self.exact is not None else [])
        return sum(tensor.nbytes for tensor in tensors)

    def release(self) -> list[torch.Tensor]:
        """Gives up gradients and hooks: no further step comes. Returns the memory that was allocated for sums."""
        for hook in self._hooks:
            hook.remove()
        memory = [bucket.flat for bucket in self.buckets]
        self._drop_memory()
        self._views, self._wires, self._home = [], [], []
        for param in (*self.params, *self.local_params):
            param.grad = None
        return memory

    # -- a step -----------------------------------------------------------------------------------------------------

    def begin(self, ready: Callable[[Bucket], None], micro_batches: int = 1) -> None:
        """Starts a step of `micro_batches` micro-batches: `ready` will be called once with every bucket, in order."""
        self._ready, self._armed, self._weight, self._next = ready, False, None, 0
        self._touched.clear()
        self._counted.clear()
        for bucket in self.buckets:
            bucket.missing = len(bucket.members)
        if self.exact is not None:
            self.exact.begin(micro_batches)

    def begin_backward(self, last: bool, is_dummy: bool = False, weight: float | None = None) -> None:
        """Begins the next backward. With a `weight`, gradients are taken at its end, after the weight was applied."""
        self._armed, self._weight = last, weight

    def end_backward(self) -> None:
        """Ends the present backward."""
        weighed, self._weight = self._weight is not None, None
        for number, param in enumerate(self.params if weighed else ()):
            if param.grad is not None:
                self._write_gradient(number, param)

    def _write_gradient(self, number: int, param: torch.Tensor) -> None:
        """Takes a gradient that autograd has made: a hook of the parameter."""
        if self._ready is None or self._weight is not None:  # not in a step, or it is taken in `end_backward`
            return
        grad, first = param.grad, number not in self._touched
        assert grad is not None
        if not self._in_place:
            param.grad = None
            self.write(number, grad.detach(), self._wires[number], first)
        elif first:  # it is autograd's own tensor, which adds later ones into the view
            copy(self._views[number], grad)
            param.grad = self._views[number]
        self._touched.add(number)
        if not self._armed or number in self.late:
            return
        if number not in self._counted:
            self.complete(number)
        elif self._home[number].index < self._next:
            raise error_in_two_parts(param)

    def complete(self, number: int) -> None:
        """Takes note that no more gradients come for this parameter in the step, unless other workers hold it, too."""
        if number in self.late:
            return
        self._counted.add(number)
        bucket = self._home[number]
        bucket.missing -= 1
        if bucket.missing == 0:
            self._hand_on()

    def _hand_on(self) -> None:
        assert self._ready is not None
        while self._next < len(self.buckets) and self.buckets[self._next].missing == 0:
            self._next += 1
            self._ready(self.buckets[self._next - 1])

    def wires(self, bucket: Bucket) -> Iterator[tuple[int, list[torch.Tensor]]]:
        """Yields each parameter's number, and all of the bucket's memory that holds its gradient."""
        for number in bucket.members:
            yield number, [wire for levels in self._wires[number] for wire in levels]

    def add(self, number: int, levels: Sequence[torch.Tensor]) -> None:
        """Adds the sums of this worker's rows of a gradient that was reduced elsewhere."""
        for wire, more in zip(self._wires[number][self.shards.me], levels, strict=True):
            if number in self._touched:
                wire.add_(more)
            else:
                wire.copy_(more)
        self._touched.add(number)

    def flush(self) -> set[int]:
        """Hands on the remaining buckets, zeros where no gradient came; returns the numbers of those parameters."""
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
        """Ends a step whose backward failed, or which begins `again` on the same grids; nothing more is handed on."""
        self._ready = None
        if self.exact is not None and not again:
            self.exact.undo()

    # -- the sums ---------------------------------------------------------------------------------------------------

    @property
    def grad_buffers(self) -> Buckets:
        """The memory that holds the sums in the end: this one."""
        return self

    def assign_grads(self) -> None:
        """Makes what was written into the sums the gradients of this worker's parameters."""
        for param, view in zip(self.local_params, self._views, strict=True):
            param.grad = view

    def squares(
        self, micro_batches: int, counted: Sequence[Sequence[Block]] | None = None, changed: bool = False
    ) -> torch.Tensor:
        """The sum of the gradients' squares, as float64 numbers that add up to it.

        With `counted` only these blocks of each gradient are included.
        """
        if self.exact is not None:
            return self.exact.squares(self.local_params, micro_batches, counted)
        norms = norms_of(self.sums if counted is None else counted_grads(self.local_params, counted))
        return norms.cpu().double().square().sum(0, keepdim=True)


def _group(params: Sequence[Parameter], divided: Collection[int], first_bytes: int, bytes_: int) -> list[list[int]]:
    """The numbers of the parameters of each bucket: from the last one on, of one dtype and device each.

    The `divided` parameters do not change how the others are grouped, as they may have other sizes on other workers.
    """
    if divided:
        sides = [[number for number in range(len(params)) if (number in divided) == side] for side in (False, True)]
        groups = [group for numbers in sides for group in _grouped(params, numbers, first_bytes, bytes_)]
        return sorted(groups, reverse=True)
    return _grouped(params, range(len(params)), first_bytes, bytes_)


def _grouped(params: Sequence[Parameter], numbers: Sequence[int], first_bytes: int, bytes_: int) -> list[list[int]]:
    groups: list[list[int]] = []
    filled = 0
    for number in reversed(numbers):
        param = params[number]
        limit = first_bytes if len(groups) <= 1 else bytes_
        before = params[groups[-1][0]] if groups else None
        if before is None or (before.dtype, before.device) != (param.dtype, param.device) or filled >= limit:
            groups.append([])
            filled = 0
        groups[-1].append(number)
        filled += param.nbytes
    return groups
