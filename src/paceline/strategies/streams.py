"""Random streams: the generators that user code draws from, and how to lend them a seed and give them back."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


class Streams:
    """The global generators of torch (CPU and one device), `random`, and numpy where it is in use."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._generators = [torch.default_generator]
        if device.type == "cuda":
            torch.cuda.init()
            index = device.index if device.index is not None else torch.cuda.current_device()
            self._generators.append(torch.cuda.default_generators[index])
        elif device.type == "mps":
            self._generators.append(torch.mps._get_default_mps_generator())

    def __reduce__(self) -> tuple[Any, ...]:
        return Streams, (self._device,)  # a spawned loader process has global generators of its own

    def seed(self, seed: int) -> None:
        """Starts every generator afresh from `seed`."""
        for generator in self._generators:
            generator.manual_seed(seed)
        random.seed(seed)
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed(seed & 0xFFFFFFFF)

    def mark(self) -> tuple[Any, ...]:
        """The generators' state, to be compared by `moved` or brought back by `restore`."""
        marks: list[Any] = [generator.get_state() for generator in self._generators]
        marks.append(random.getstate())
        if "numpy" in sys.modules:
            marks.append(sys.modules["numpy"].random.get_state(legacy=True))
        return tuple(marks)

    def moved(self, mark: tuple[Any, ...]) -> bool:
        """Whether anything was drawn since `mark`, as far as can be told: numpy may have come in between."""
        now = self.mark()
        return len(now) != len(mark) or any(_differ(before, after) for before, after in zip(mark, now, strict=True))

    def restore(self, mark: tuple[Any, ...]) -> None:
        count = len(self._generators)
        for generator, state in zip(self._generators, mark, strict=False):
            generator.set_state(state)
        random.setstate(mark[count])
        if len(mark) > count + 1:
            sys.modules["numpy"].random.set_state(mark[count + 1])

    @contextmanager
    def lent(self) -> Iterator[None]:
        """What is drawn inside does not move the user's own streams outside."""
        mark = self.mark()
        try:
            yield
        finally:
            self.restore(mark)


def _differ(before: Any, after: Any) -> bool:
    if isinstance(before, torch.Tensor):
        return not torch.equal(before, after)
    if isinstance(before, tuple) and len(before) == 5:  # numpy: name, keys, position, has_gauss, cached
        return bool(before[2:] != after[2:] or (before[1] != after[1]).any())
    return bool(before != after)
