"""Trains models whose attention has two heads, and fewer key-value heads: `few_heads.py FOLDER KIND ...`."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import paceline

WORDS, WIDTH, HEADS, HEAD, ROWS, BATCH, STEPS, RATE = 19, 8, 2, 4, 16, 4, 6, 0.1
KINDS = {  # the key-value heads, the length of a row, and what attention sees
    "causal": (2, 24, "causal"),
    "grouped": (1, 24, "causal"),
    "everything": (1, 24, "all"),
    "documents": (2, 24, "documents"),
    "odd": (2, 20, "causal"),  # five tokens on each of four workers
    "indivisible": (2, 13, "causal"),
}


class Block(nn.Module):
    def __init__(self, groups: int, sees: str) -> None:
        super().__init__()
        self.q, self.kv = nn.Linear(WIDTH, HEADS * HEAD), nn.Linear(WIDTH, 2 * groups * HEAD)
        self.out, self.norm = nn.Linear(HEADS * HEAD, WIDTH), nn.LayerNorm(WIDTH)
        self.groups, self.sees = groups, sees

    def forward(self, x: Tensor, documents: Tensor) -> Tensor:
        rows, tokens, _ = x.shape
        given = self.norm(x)
        query = self.q(given).view(rows, tokens, HEADS, HEAD).transpose(1, 2)
        key, value = self.kv(given).view(rows, tokens, 2, self.groups, HEAD).permute(2, 0, 3, 1, 4).unbind(0)
        mask = None
        if self.sees == "documents":
            same = documents[:, :, None] == documents[:, None]
            mask = (same & torch.ones(tokens, tokens, dtype=torch.bool).tril())[:, None]
        options = {"attn_mask": mask, "is_causal": self.sees == "causal", "enable_gqa": self.groups < HEADS}
        seen = F.scaled_dot_product_attention(query, key, value, **options)  # type: ignore[arg-type]
        out: Tensor = x + self.out(seen.transpose(1, 2).flatten(2))
        return out


class Model(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        groups, length, sees = KINDS[kind]
        self.words, self.positions = nn.Embedding(WORDS, WIDTH), nn.Embedding(length, WIDTH)
        self.blocks, self.head = nn.ModuleList(Block(groups, sees) for _ in range(2)), nn.Linear(WIDTH, WORDS)
        self.double()

    def forward(self, ids: Tensor) -> Tensor:
        x, documents = self.words(ids) + self.positions.weight, (ids == 0).cumsum(1)
        for block in self.blocks:
            x = block(x, documents)
        logits: Tensor = self.head(x)
        return logits


def rows(kind: str) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randint(0, WORDS, (ROWS, KINDS[kind][1]), generator=generator))


def loss(logits: Tensor, batch: Any) -> tuple[Tensor, int]:
    labels = batch[0][:, 1:]
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels.flatten(), reduction="sum"), labels.numel()


def main() -> None:
    for kind in sys.argv[2:]:
        trainer = paceline.Trainer(
            partial(Model, kind),
            loss=loss,
            optimizer=lambda params: torch.optim.SGD([param for _, param in params], lr=RATE, momentum=0.9),
            global_batch=BATCH,
        )
        assert len([*trainer.steps(rows(kind), count=STEPS)]) == STEPS
        trainer.export(Path(sys.argv[1]) / f"{kind}.safetensors")


if __name__ == "__main__":
    main()
