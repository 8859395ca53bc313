"""Divides sequences between layers, however small their outputs are: `divided_sequences.py losses WORDS FOLDER LOSS
...` trains with vocabulary.py, `... documents OUT MODEL` with packed.py, and `... memory` prints the memory of
activations when the loss is computed, in units of one layer's output.
"""

from __future__ import annotations

import sys
from typing import Any

import packed
import torch
import torch.nn.functional as F
import vocabulary
from logits_memory import Meter
from torch.utils.data import TensorDataset

import paceline
from paceline.parallel.tensor_parallel import layers

layers.LARGE = 0  # type: ignore[misc]
LENGTH, WIDTH, WORDS = 256, 128, 64


def measure() -> None:
    vocabulary.WIDTH = WIDTH
    found = []
    meter = Meter(LENGTH * WIDTH // 8)

    def loss(logits: torch.Tensor, batch: Any) -> torch.Tensor:
        found.append(sum(meter.sizes.values()) / (4 * LENGTH * WIDTH))
        return F.cross_entropy(logits.flatten(0, 1), batch[0].flatten())

    ids = torch.randint(0, WORDS, (8, LENGTH), generator=torch.Generator().manual_seed(1))
    trainer = paceline.Trainer(
        lambda: vocabulary.Model(WORDS).float(),
        loss=loss,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        global_batch=1,
    )
    steps = iter(trainer.steps(TensorDataset(ids), count=4))
    next(steps), next(steps)
    with meter:
        assert len([*steps]) == 2
    if trainer.main:
        print("activations", found[-1])


if __name__ == "__main__":
    kind = sys.argv.pop(1)
    {"losses": vocabulary.main, "documents": packed.main, "memory": measure}[kind]()
