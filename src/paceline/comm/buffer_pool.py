"""Memory that is used again, for data that is encoded, sent and received in every step."""

from __future__ import annotations

from math import prod

import torch


class BufferPool:
    """Keeps byte tensors for reuse.

    The C library cannot be left to do so: glibc before 2.38 does not reuse a freed block for an aligned one of the same
    size, as tensors are, and a heap that frees and allocates megabytes in each step grows for hundreds of steps.
    """

    def __init__(self) -> None:
        self._free: list[torch.Tensor] = []

    def take(self, *shape: int) -> torch.Tensor:
        """Bytes of this shape with any values."""
        size = prod(shape)
        self._free.sort(key=len)
        fitting = next((number for number, kept in enumerate(self._free) if len(kept) >= size), None)
        if fitting is not None:
            return self._free.pop(fitting)[:size].view(shape)
        del self._free[-1:]  # so that there are never more than were in use at a time
        return torch.empty(size, dtype=torch.uint8).view(shape)

    def give(self, *buffers: torch.Tensor) -> None:
        """Takes back buffers that nobody reads or writes any more. Others are freed when they are forgotten."""
        self._free += [buffer if buffer._base is None else buffer._base for buffer in buffers]
