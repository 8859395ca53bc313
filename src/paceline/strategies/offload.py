"""Rows of parameters that wait, with the optimizer's state, in the memory of the host (Ren et al., "ZeRO-Offload:
Democratizing Billion-Scale Model Training", USENIX ATC 2021): gradients come there, and updated rows go back.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch.nn import Parameter


class Hosted:
    """Copies of `rows`, which are on a device, in the memory of its host. Optimizers hold the copies."""

    def __init__(self, rows: Sequence[Parameter]) -> None:
        self.rows = rows
        self.copies = [Parameter(_copy(row)) for row in rows]
        self._seen = [-1] * len(rows)

    @contextmanager
    def update(self) -> Iterator[None]:
        """What optimizers do meanwhile to the copies, with the rows' gradients, is done to the rows. What somebody else
        has done to the rows since the last time, as a script that clips weights, is done to the copies before.
        """
        for place, (row, copy) in enumerate(zip(self.rows, self.copies, strict=True)):
            if row._version != self._seen[place]:
                copy.detach().copy_(row.detach())
            copy.grad = None if row.grad is None else row.grad.to(copy.device)
        yield
        for place, (row, copy) in enumerate(zip(self.rows, self.copies, strict=True)):
            row.detach().copy_(copy.detach())
            copy.grad = None
            self._seen[place] = row._version


def _copy(row: Parameter) -> torch.Tensor:
    return torch.empty(row.shape, dtype=row.dtype, pin_memory=row.is_cuda).copy_(row.detach())
