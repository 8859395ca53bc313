"""Trains a model with a vocabulary of 131,072 words and prints the peak of the memory of tensors as large as a quarter
of a micro-batch's logits, as a multiple of the full logits: `logits_memory.py [gathered]`.
"""

from __future__ import annotations

import sys
import weakref
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import TensorDataset
from vocabulary import WIDTH, Model

import paceline

WORDS, LENGTH = 131_072, 48
GATHERED = {"blocks.*.up": "column", "blocks.*.down": "row", "words": "vocabulary", "head": "gathered"}


class Meter(TorchDispatchMode):
    """Adds up the memory of tensors of more than `least` numbers while they exist."""

    def __init__(self, least: int) -> None:
        super().__init__()
        self.least = least
        self.sizes: dict[int, int] = {}
        self.peak = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = function(*args, **(kwargs or {}))
        for x in output if isinstance(output, tuple | list) else [output]:
            # Weights and their gradients are smaller, and memory for many gradients has one dimension.
            if isinstance(x, torch.Tensor) and x.device.type == "cpu" and x.dim() > 1 and x.numel() > self.least:
                storage = x.untyped_storage()
                if storage.data_ptr() not in self.sizes:
                    self.sizes[storage.data_ptr()] = storage.nbytes()
                    weakref.finalize(storage, self.sizes.pop, storage.data_ptr())
                    self.peak = max(self.peak, sum(self.sizes.values()))
        return output


def main() -> None:
    ids = torch.randint(0, WORDS, (8, LENGTH), generator=torch.Generator().manual_seed(1))
    alone = paceline.join().size == 1
    trainer = paceline.Trainer(
        lambda: Model(WORDS).float(),
        loss=lambda logits, batch: F.cross_entropy(logits[:, :-1].flatten(0, 1), batch[0][:, 1:].flatten()),
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        global_batch=1,
        tensor=GATHERED if "gathered" in sys.argv and not alone else None,
    )
    steps = iter(trainer.steps(TensorDataset(ids), count=4))
    next(steps), next(steps)  # the first step compares with full layers
    with Meter(WIDTH * WORDS) as meter:
        assert len([*steps]) == 2
    if trainer.main:
        print("peak", meter.peak / (4 * LENGTH * WORDS))


if __name__ == "__main__":
    main()
