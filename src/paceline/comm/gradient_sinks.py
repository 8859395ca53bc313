"""Defines gradient sinks, which take the gradients of a step, and the simplest one: gradients stay where they are.

The others are `Buckets` (gradient_buckets.py) and `FsdpReduceScatter` (fsdp_reduce_scatter.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch.nn import Parameter

from paceline.base.sharding import Block
from paceline.comm.exact_sums import ExactSums
from paceline.comm.gradient_buckets import Bucket
from paceline.comm.gradient_memory import Allocate, counted_grads, norms_of


class GradBuffers(Protocol):
    """Holds the sums of a step's gradients, which are the gradients of this worker's parameters."""

    @property
    def local_params(self) -> list[Parameter]:
        """The parameters, or this worker's rows of them."""

    @property
    def buckets(self) -> list[Bucket]:
        """The buckets whose memory it is; none if gradients stay in place."""

    @property
    def sums(self) -> list[torch.Tensor]:
        """All gradients of this worker's rows, in as few tensors as possible."""

    @property
    def exact(self) -> ExactSums | None:
        """The grids of exact sums. They make the gradients after the sums have arrived."""

    def assign_grads(self) -> None:
        """Makes what was written into the sums the gradients of this worker's parameters."""

    def squares(
        self, micro_batches: int, counted: Sequence[Sequence[Block]] | None = None, changed: bool = False
    ) -> torch.Tensor:
        """The sum of the gradients' squares, as float64 numbers that add up to it.

        With `counted` only these blocks of each gradient are included. `changed` says that something other than
        backward has changed gradients.
        """


class GradSink(Protocol):
    """Takes a step's gradients as autograd makes them, one backward after another, and passes them on to be summed.

    A call that is None has nothing to do.
    """

    @property
    def grad_buffers(self) -> GradBuffers:
        """What holds the sums in the end."""

    @property
    def begin(self) -> Callable[[Callable[[Bucket], None], int], None] | None:
        """Starts a step of some micro-batches: the callable is called once with every bucket, in order."""

    @property
    def begin_backward(self) -> Callable[[bool, bool, float | None], None] | None:
        """Begins the next backward: whether it is the `last` one of the step, which completes parameters, and whether
        it `is_dummy`, whose gradients do not count. With a `weight`, gradients are taken after it was applied.
        """

    @property
    def end_backward(self) -> Callable[[], None] | None:
        """Ends the present backward."""

    def flush(self) -> set[int]:
        """Hands on the remaining buckets, zeros where no gradient came; returns the numbers of those parameters."""

    def abandon(self, again: bool = False) -> None:
        """Ends a step whose backward failed, or which begins `again`; nothing more is handed on."""

    def rebind(self, allocate: Allocate) -> None:
        """Allocates fresh memory for gradients with `allocate`. What was there is lost."""

    def memory(self) -> int:
        """Bytes that gradients take."""

    def release(self) -> list[torch.Tensor]:
        """Gives up gradients and hooks: no further step comes. Returns the memory that was allocated for sums."""


class GradsInPlace:
    """The sink of a worker that shares parameters with no other one: gradients stay where autograd puts them."""

    begin = begin_backward = end_backward = exact = None

    def __init__(self, params: Sequence[Parameter]) -> None:
        self.local_params = list(params)
        self.buckets: list[Bucket] = []
        self._is_cuda = any(param.is_cuda for param in self.local_params)
        self._norms: torch.Tensor | None = None

    @property
    def grad_buffers(self) -> GradsInPlace:
        """What holds the sums: the parameters themselves."""
        return self

    @property
    def sums(self) -> list[torch.Tensor]:
        """The gradients that exist."""
        return [param.grad for param in self.local_params if param.grad is not None]

    def flush(self) -> set[int]:
        """Returns the numbers of the parameters without a gradient.

        A GPU starts computing the norms: else it would have nothing to do while the losses are waited for.
        """
        self._norms = norms_of(self.sums) if self._is_cuda else None
        return {number for number, param in enumerate(self.local_params) if param.grad is None}

    def squares(
        self, micro_batches: int, counted: Sequence[Sequence[Block]] | None = None, changed: bool = False
    ) -> torch.Tensor:
        """The sum of the gradients' squares, or of the `counted` blocks of each, as a float64 tensor of one element."""
        norms = self._norms if counted is None and not changed else None
        if norms is None:
            norms = norms_of(self.sums if counted is None else counted_grads(self.local_params, counted))
        return norms.cpu().double().square().sum(0, keepdim=True)

    def assign_grads(self) -> None:
        """Does nothing: the sums are the parameters' gradients."""

    def abandon(self, again: bool = False) -> None:
        """Does nothing: the next step begins with gradients of None."""

    def rebind(self, allocate: Allocate) -> None:
        """Does nothing: autograd allocates the memory."""

    def memory(self) -> int:
        """Bytes that gradients take."""
        return sum(grad.nbytes for grad in self.sums)

    def release(self) -> list[torch.Tensor]:
        """Gives up gradients; no memory was allocated for sums."""
        for param in self.local_params:
            param.grad = None
        return []
