"""Runs a micro-batch through divided layers on one worker, with messages that are only counted.

On tensors without values, this shows the bytes that `tensor=` and `context=` send, before any worker sends them and
with the code that sends them. On values it shows the time of divided layers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from paceline.base.mesh import Mesh
from paceline.comm.user_collectives import refusing
from paceline.compute.microbatches import MicroBatch
from paceline.parallel.parallel_job import ParallelJob
from paceline.parallel.tensor_parallel.sharded_mode import placement_of, tensors_in
from paceline.planner.block_probe import time_on

TRIES = 2  # of a measured forward and backward


@dataclass
class Messages:
    """What the workers that share a micro-batch send in its forward and backward, in bytes by kind: in each block.

    `before` is the part that is sent before the first block. A block that gets a shard from the block before it would
    get the full tensor from another stage: `shards` and `fulls` are the bytes of these inputs.
    """

    blocks: list[Counter[str]]
    before: Counter[str]
    shards: list[int]
    fulls: list[int]

    @classmethod
    def of(cls, count: int) -> Messages:
        """Returns those of so many blocks that send nothing."""
        return cls([Counter() for _ in range(count)], Counter(), [0] * count, [0] * count)


class CountingGroup:
    """Stands in for a group of workers of which there is only the first one: it counts the bytes that this worker hands
    over, as a `Group` does, and the others are taken to have the same values.
    """

    def __init__(self, size: int, ledger: Counter[str]) -> None:
        self.rank, self.size, self.names, self.is_eager = 0, size, range(size), False
        self._ledger, self._kind = ledger, ""

    def _count(self, size: int) -> None:
        if self.size > 1:
            self._ledger[self._kind] += size

    def subgroup(self, *axes: str, mesh: Mesh, purpose: str = "") -> CountingGroup:
        """Returns a stand-in for the workers along these axes."""
        size = 1
        for axis in axes:
            size *= getattr(mesh, axis)
        return CountingGroup(size, self._ledger)

    def declare(self, name: str, check: bool = True, kind: str | None = None) -> None:
        """Notes the kind of the messages that follow."""
        self._kind = kind or name

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """Counts a sum."""
        self._count(tensor.nbytes)
        return tensor

    def start_scatter(self, flat: torch.Tensor) -> None:
        """Counts a reduce-scatter."""
        self._count(flat.nbytes // self.size)

    def finish(self, work: None) -> None:
        """Does nothing: nothing was started."""

    def broadcast(self, tensor: torch.Tensor, source: int = 0) -> torch.Tensor:
        """Counts a broadcast."""
        self._count(tensor.nbytes)
        return tensor

    def gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Counts a gather, with the message about its lengths."""
        self._count(tensor.nbytes + 8 * self.size)
        return [tensor] * self.size

    def gather_json(self, value: Any) -> list[Any]:
        """Returns this worker's value for each of them."""
        return [value] * self.size

    def exchange(self, given: Sequence[torch.Tensor], taken: Sequence[torch.Tensor]) -> None:
        """Counts an exchange, without what a worker has for itself."""
        self._count(sum(x.nbytes for n, x in enumerate(given) if n != self.rank))


class _Ones(TorchDispatchMode):
    """Answers what code asks about values as if all of them were one: conditions, such as those on a mask, are true."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.ops.aten._local_scalar_dense.default:
            return True if args[0].dtype == torch.bool else 1.0 if args[0].is_floating_point() else 1
        if function is torch.ops.aten.nonzero.default:
            return args[0].new_empty((args[0].numel(), args[0].dim()), dtype=torch.int64)
        return function(*args, **(kwargs or {}))


def count_messages(job: ParallelJob, micro_batch: MicroBatch, names: Sequence[str], ledger: Counter[str]) -> Messages:
    """Returns what a forward and backward of a divided job hands to messages in each of the blocks with these `names`;
    `ledger` is that of its groups. Code before the first block counts as a part of it, and so does what follows a block
    up to the next one. Raises an error of `USERS_OWN` if the script's code needs values.
    """
    counts = Messages.of(len(names))
    current, is_first = 0, True

    def move(number: int) -> None:
        nonlocal current
        counts.blocks[current].update(ledger)
        ledger.clear()
        current = number

    def enter(number: int, module: nn.Module, args: Any, kwargs: Any) -> None:
        nonlocal is_first
        if is_first:
            counts.before, is_first = Counter(ledger), False
        move(number)
        inputs = [x for x in tensors_in([args, kwargs]) if x.requires_grad]
        for x in inputs:
            if (placement := placement_of(x)) is not None:
                counts.shards[number] += x.nbytes
                counts.fulls[number] += x.nbytes * placement.length // placement.shard_length
        for x in inputs[:1]:
            x.register_hook(lambda _: move(max(0, number - 1)))

    fake, ones = cast(Any, FakeTensorMode), cast(Any, _Ones)
    modules, hooks = dict(job.model.named_modules()), list[Any]()
    try:
        with fake(allow_non_fake_inputs=True), ones(), refusing("a forward without values"):
            with torch.enable_grad(), job.autocast():
                job.forward(job.model, micro_batch.batch)  # the first one finds out where shards are
                ledger.clear()
                hooks += [
                    modules[name].register_forward_pre_hook(partial(enter, number), with_kwargs=True)
                    for number, name in enumerate(names)
                ]
                result = job.loss(job.forward(job.model, micro_batch.batch), micro_batch.batch)
            _differentiate(job, result)
            move(0)
    finally:
        for hook in hooks:
            hook.remove()
    return counts


def time_forward_backward(job: ParallelJob, micro_batch: MicroBatch) -> float:
    """Returns the seconds of a forward and backward of a divided job on values: the fastest of some tries."""
    seconds = list[float]()
    with refusing("a forward of the planner"), torch.enable_grad():
        for _ in range(1 + TRIES):  # the first one finds out where shards are
            began = time_on(job.device)
            with job.autocast():
                result = job.loss(job.forward(job.model, micro_batch.batch), micro_batch.batch)
            _differentiate(job, result)
            seconds.append(time_on(job.device) - began)
    return min(seconds[1:])


def _differentiate(job: ParallelJob, result: Any) -> None:
    """Runs the backward of what the loss has returned, and drops the gradients."""
    total = result[0] if isinstance(result, tuple) else result
    params = [param for param in job.model.parameters() if param.requires_grad]
    torch.autograd.grad(total, params, torch.ones_like(total), allow_unused=True)
