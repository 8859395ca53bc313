"""What a forward does besides returning its output: buffers it changes, statistics it collects."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from paceline.errors import UsageError


class BatchStatistics:
    """Running statistics of BatchNorm, collected per micro-batch and merged in grid order.

    A training forward of BatchNorm maps each running statistic r to a·r + b. Started from r = 0 and a batch counter
    of 0 it leaves just b, and the counter says how often it ran (which gives a). So each micro-batch's b and counter
    are recorded, exchanged, and applied in grid order: the same arithmetic as one worker's, whoever computed what.
    """

    def __init__(self, model: nn.Module) -> None:
        self._all = [module for module in model.modules() if isinstance(module, _BatchNorm)]
        if any(isinstance(module, nn.SyncBatchNorm) for module in self._all):
            raise UsageError(
                "the model has SyncBatchNorm, which normalises over whatever workers there are",
                "use BatchNorm: it normalises each micro-batch, the same on any number of workers",
            )
        self._active: list[Any] = []
        self._buffers: list[torch.Tensor] = []
        self._start: list[torch.Tensor] = []

    def buffers(self) -> set[int]:
        """Identities of the buffers that are looked after here."""
        return {
            id(buffer)
            for module in self._all
            for buffer in (module.running_mean, module.running_var, module.num_batches_tracked)
            if buffer is not None
        }

    def begin(self) -> int:
        """Starts a step; returns the length of a micro-batch's record (0: nothing to collect)."""
        self._active = [module for module in self._all if module.training and module.running_mean is not None]
        self._buffers = [b for m in self._active for b in (m.num_batches_tracked, m.running_mean, m.running_var)]
        self._start = [buffer.clone() for buffer in self._buffers]
        return sum(buffer.numel() for buffer in self._buffers)

    def reset(self) -> None:
        torch._foreach_zero_(self._buffers)

    def record(self) -> torch.Tensor:
        """What the forward since `reset` left, as one flat float64 tensor."""
        return torch.cat([buffer.reshape(-1) for buffer in self._buffers]).double()  # the counts are small

    def restore(self) -> None:
        """Brings back the state at `begin`: an aborted step leaves no trace."""
        for buffer, start in zip(self._buffers, self._start, strict=True):
            buffer.copy_(start)

    def merge(self, records: torch.Tensor) -> None:
        """Applies the records of all micro-batches, shape (micro-batches, record), in grid order."""
        offset = 0
        for number, module in enumerate(self._active):
            tracked, mean, var = self._start[3 * number : 3 * number + 3]
            size = mean.numel()
            part = records[:, offset : offset + 1 + 2 * size]
            calls = part[:, :1]
            before = tracked + calls.cumsum(0) - calls
            if module.momentum is None:  # a cumulative average over all batches
                keep, add = before / (before + calls).clamp(min=1), calls / (before + calls).clamp(min=1)
                keep = torch.where(before + calls == 0, 1.0, keep)
            else:
                keep, add = (1.0 - module.momentum) ** calls, torch.ones_like(calls)
            value = torch.cat([mean.reshape(-1), var.reshape(-1)]).double()
            for k, b, row in zip(keep, add, part[:, 1:], strict=True):
                value = value * k + row * b
            module.num_batches_tracked.copy_(tracked + calls.sum().long())
            module.running_mean.copy_(value[:size].view_as(mean))
            module.running_var.copy_(value[size:].view_as(var))
            offset += 1 + 2 * size


class BufferWatch:
    """Notices buffers that a forward changes or replaces, other than BatchNorm's, and parameters that it writes."""

    def __init__(self, model: nn.Module, except_: set[int]) -> None:
        self._owners = [
            (f"{prefix}.{name}" if prefix else name, module, name)
            for prefix, module in model.named_modules()
            for name, buffer in module._buffers.items()
            if buffer is not None and id(buffer) not in except_
        ]
        self._params = list(model.named_parameters())
        self._versions: list[int] = []
        self._marks: list[tuple[torch.Tensor | None, int]] = []
        self._values: list[torch.Tensor] = []

    def _now(self) -> Iterator[tuple[str, torch.Tensor | None]]:
        for name, module, key in self._owners:
            yield name, module._buffers[key]

    def mark(self) -> None:
        """Remembers the buffers as they are, and their values if anything changed since the last mark."""
        if len(self._marks) != len(self._owners) or self._changed_buffer(values=False) is not None:
            self._values = [torch.empty(0) if buffer is None else buffer.clone() for _, buffer in self._now()]
        self._marks = [(buffer, -1 if buffer is None else buffer._version) for _, buffer in self._now()]

        self._versions = [param._version for _, param in self._params]

    def changed(self, values: bool) -> str | None:
        """``buffer 'name'`` or ``parameter 'name'`` that changed since `mark`, or None; with `values` by comparing."""
        buffer = self._changed_buffer(values)
        if buffer is not None:
            return f"buffer {buffer!r}"
        written = (n for (n, param), mark in zip(self._params, self._versions, strict=True) if param._version != mark)
        name = next(written, None)
        return None if name is None else f"parameter {name!r}"

    def _changed_buffer(self, values: bool) -> str | None:
        for number, (name, buffer) in enumerate(self._now()):
            old, version = self._marks[number]
            if buffer is not old or (buffer is not None and buffer._version != version):
                return name
            if values and buffer is not None and not torch.equal(buffer, self._values[number]):
                return name
        return None

    def restore(self) -> None:
        """Brings back the buffers and values of the last `mark`, if there was one."""
        for (_, module, key), (old, _), value in zip(self._owners, self._marks, self._values, strict=False):
            if old is not None:
                old.copy_(value)
            module._buffers[key] = old
