"""Keeps copies of parameters in host memory for optimizers, so that their state is there, too (ZeRO-Offload)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch.nn import Parameter

from paceline.compute.state_dict import marked, marks_of


class CpuOffloadedParams:
    """Copies of `rows`, which are on a device, in the memory of its host. Optimizers hold the copies."""

    def __init__(self, rows: Sequence[Parameter]) -> None:
        self.rows = rows
        self.copies = [marked(_copy(row), marks_of(row)) for row in rows]

    @contextmanager
    def update(self) -> Iterator[None]:
        """Copies rows and gradients into the copies, lets optimizers update these in the context, and copies them back.

        The first copy is always needed: a script may have changed the rows (clipped weights) through `param.data`,
        which changes no version.
        """
        for row, copy in zip(self.rows, self.copies, strict=True):
            copy.detach().copy_(row.detach())
            copy.grad = None if row.grad is None else row.grad.to(copy.device)
        yield
        for row, copy in zip(self.rows, self.copies, strict=True):
            row.detach().copy_(copy.detach())
            copy.grad = None


def _copy(row: Parameter) -> torch.Tensor:
    return torch.empty(row.shape, dtype=row.dtype, pin_memory=row.is_cuda).copy_(row.detach())
