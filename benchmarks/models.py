"""The models that benchmarks train, with their data: a GPT of 10 M parameters, a small ResNet, an MLP of 64 M. And a
GPT-2 for gpu.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset


@dataclass(frozen=True)
class Job:
    model: Callable[[], nn.Module]
    data: Callable[[int], TensorDataset]
    loss: Callable[[Any, Any], torch.Tensor]
    global_batch: int
    micro: int | None  # set where the mathematics needs it (BatchNorm): then DDP gets the same micro-batches
    steps: int  # timed steps per round


class GPT(nn.Module):
    def __init__(self, width: int = 384, layers: int = 6, heads: int = 6, length: int = 128, vocabulary: int = 256):
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        block = nn.TransformerEncoderLayer(width, heads, 4 * width, 0.0, F.gelu, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(block, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, vocabulary)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(length), persistent=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.tokens(ids) + self.places.weight[: ids.shape[1]]
        return self.head(self.blocks(hidden, mask=self.mask, is_causal=True))


class Block(nn.Module):
    """A layer of GPT-2."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attend, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = self.attend(self.before(x)).chunk(3, dim=2)
        q, k, v = (part.unflatten(2, (self.heads, -1)).transpose(1, 2) for part in parts)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.project(attended.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.between(x)), approximate="tanh"))


class GPT2(nn.Module):
    """Radford et al., "Language Models are Unsupervised Multitask Learners", 2019: its head is tied to the tokens."""

    def __init__(
        self, width: int = 768, layers: int = 12, heads: int = 12, length: int = 1024, vocabulary: int = 50257
    ):
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList([Block(width, heads) for _ in range(layers)])
        self.last = nn.LayerNorm(width)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids) + self.places.weight[: ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        return F.linear(self.last(x), self.tokens.weight)


class Residual(nn.Module):
    def __init__(self, inside: int, outside: int, stride: int):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(inside, outside, 3, stride, 1, bias=False), nn.BatchNorm2d(outside), nn.ReLU(),
            nn.Conv2d(outside, outside, 3, 1, 1, bias=False), nn.BatchNorm2d(outside),
        )  # fmt: skip
        self.skip = nn.Conv2d(inside, outside, 1, stride) if stride > 1 else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(self.body(x) + self.skip(x))


def resnet() -> nn.Module:
    stem = [nn.Conv2d(3, 32, 3, 1, 1, bias=False), nn.BatchNorm2d(32), nn.ReLU()]
    blocks = [Residual(32, 32, 1), Residual(32, 64, 2), Residual(64, 128, 2)]
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 10))


def mlp() -> nn.Module:
    return nn.Sequential(*[part for _ in range(4) for part in (nn.Linear(4000, 4000), nn.ReLU())], nn.Linear(4000, 10))


def _tokens(rows: int) -> TensorDataset:
    ids = torch.randint(0, 256, (rows, 129), generator=torch.Generator().manual_seed(0))
    return TensorDataset(ids[:, :-1].contiguous(), ids[:, 1:].contiguous())


def _images(rows: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    return TensorDataset(torch.randn(rows, 3, 32, 32, generator=generator), torch.arange(rows) % 10)


def _vectors(rows: int) -> TensorDataset:
    return TensorDataset(torch.randn(rows, 4000, generator=torch.Generator().manual_seed(0)), torch.arange(rows) % 10)


JOBS = {
    "gpt 10M": Job(GPT, _tokens, lambda o, b: F.cross_entropy(o.flatten(0, 1), b[1].flatten()), 8, None, 3),
    "resnet": Job(resnet, _images, lambda o, b: F.cross_entropy(o, b[1]), 64, 8, 3),
    "mlp 64M": Job(mlp, _vectors, lambda o, b: F.cross_entropy(o, b[1]), 64, None, 3),
}
