"""Copies of parameters in host memory that optimizers hold, so their state is there, too (ZeRO-Offload)."""

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
        """What optimizers do meanwhile to the copies, with the rows' gradients, is done to the rows. What somebody else
        has done to the rows before, as a script that clips weights, is done to the copies first: by `param.data` that
        leaves no trace in the row.
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
