"""The models that benchmarks train, with their data: a GPT of 10 M parameters, a small ResNet, an MLP of 64 M."""

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
