"""Models for `shard=N zero=2|3` beside `tensor`, `pipeline` and `context`, with parts that are easily wrong."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from cases import Case, blocks, cross_entropy, next_token, rows, warm_up
from torch import nn
from torch.utils.data import TensorDataset

WIDTH, HEADS, WORDS, LENGTH, LAYERS = 16, 4, 23, 8, 4


class Block(nn.Module):
    """A transformer block with `keys` heads of keys and values."""

    def __init__(self, keys: int) -> None:
        super().__init__()
        self.before, self.then, self.keys = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH), keys
        self.query, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.key, self.value = (nn.Linear(WIDTH, keys * WIDTH // HEADS) for _ in range(2))
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed = self.before(x)
        layers = (self.query, self.key, self.value)
        q, k, v = (layer(normed).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for layer in layers)
        k, v = (part.repeat_interleave(HEADS // self.keys, dim=1) for part in (k, v))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + F.dropout(self.down(F.gelu(self.up(self.then(x)))), 0.1, self.training)


class Gpt(nn.Module):
    """A language model. `tied`: its head is the weight of its words. `early`: the norm after the blocks is registered
    before them, so that `pipeline=` keeps it on the first stage.
    """

    def __init__(self, tied: bool = False, early: bool = False, keys: int = HEADS) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Parameter(torch.randn(LENGTH, WIDTH))
        if early:
            self.norm = nn.LayerNorm(WIDTH)
        self.blocks = nn.ModuleList(Block(keys) for _ in range(blocks(LAYERS)))
        if not early:
            self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        if tied:
            self.head.weight = self.words.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.words(ids) + self.places[: ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits: torch.Tensor = self.head(self.norm(x))
        return logits


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.scale = nn.Linear(16, 24), nn.Linear(24, 16), nn.Parameter(torch.tensor(1.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.down(torch.tanh(self.up(x)))
        return x + made * self.scale


def residual_mlp() -> nn.Module:
    """No transformer; some parameters have no dimensions, and one is frozen."""
    model = nn.Sequential(nn.Linear(10, 16), *(Residual() for _ in range(4)), nn.Linear(16, 4))
    model[1].up.weight.requires_grad_(False)
    return model.double()


def adamw(params: Any) -> torch.optim.Optimizer:
    """The gradient of attention's key bias is zero in theory: with this epsilon its rounding errors stay small."""
    return torch.optim.AdamW(params, lr=1e-2, eps=1e-3)


def sgd(params: Any) -> torch.optim.Optimizer:
    """Without momentum: a factor at a gradient is seen in the weights."""
    return torch.optim.SGD(params, lr=0.1)


def words(count: int) -> TensorDataset:
    """Some are 0, which no loss counts."""
    return TensorDataset(torch.randint(0, WORDS, (count, LENGTH), generator=torch.Generator().manual_seed(8)))


def language_model(optimizer: Any = adamw, **options: Any) -> Case:
    """Trains 20 steps; every third batch is short, and has a micro-batch of a single row."""
    make = partial(Gpt, **options)
    return Case(lambda: make().double(), lambda: words(31), next_token, optimizer, 12, 20, 1.0, warm_up, 3)


MIXTURE_MODELS = {
    "gpt": language_model(),
    "tied gpt": language_model(tied=True),
    "early norm": language_model(sgd, early=True),
    "one key head": language_model(keys=1),
    "residual mlp": Case(residual_mlp, lambda: rows(7, 58, 10), cross_entropy, adamw, 20, 20, 1.0, warm_up, 3),
}
