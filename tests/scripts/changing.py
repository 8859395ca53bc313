"""Models whose buffers change in a training forward, as people have them, and the loop that trains each. They know
nothing of workers, but for `declare`, which says how their buffers are merged. Usage: changing.py EPOCHS NAME...
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import paceline

GLOBAL_BATCH, MICRO = 24, 3
x = torch.randn(90, 10, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
data = TensorDataset(x, (x.sum(1) > 0).long())  # the last global batch of an epoch is smaller


class Spectral(nn.Module):
    """Both of torch's, one of them called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.utils.parametrizations.spectral_norm(nn.Linear(10, 12))
        self.twice = nn.utils.parametrizations.spectral_norm(nn.Linear(12, 12), n_power_iterations=2)
        self.last = nn.utils.spectral_norm(nn.Linear(12, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.twice(self.twice(self.first(x).tanh()).tanh()))


class Codebook(nn.Module):
    """Van den Oord et al., "Neural Discrete Representation Learning", NeurIPS 2017, appendix A.1."""

    def __init__(self, codes: int = 7, width: int = 4, decay: float = 0.9) -> None:
        super().__init__()
        self.decay = decay
        self.register_buffer("codes", torch.randn(codes, width))
        self.register_buffer("counts", torch.ones(codes))
        self.register_buffer("sums", self.codes.clone())

    def forward(self, z: torch.Tensor) -> torch.Tensor:
        chosen = F.one_hot(torch.cdist(z.detach(), self.codes).argmin(1), len(self.codes)).to(z)
        quantized = chosen @ self.codes
        if self.training:
            self.counts.data.mul_(self.decay).add_(chosen.sum(0), alpha=1 - self.decay)
            self.sums.data.mul_(self.decay).add_(chosen.t() @ z.detach(), alpha=1 - self.decay)
            self.codes = means(self)
        return z + (quantized - z).detach()


def means(book: Codebook, epsilon: float = 1e-5) -> torch.Tensor:
    total = book.counts.sum()
    counts = (book.counts + epsilon) / (total + len(book.counts) * epsilon) * total
    return book.sums / counts[:, None]


class Quantizing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.book, self.head = nn.Linear(10, 4), Codebook(), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.book(self.encoder(x)))


class Moco(nn.Module):
    """He et al., "Momentum Contrast for Unsupervised Visual Representation Learning", CVPR 2020, algorithm 1."""

    def __init__(self, entries: int = 28, width: int = 5) -> None:
        super().__init__()
        self.encoder_q, self.encoder_k = (nn.Linear(10, width) for _ in range(2))
        for q, k in zip(self.encoder_q.parameters(), self.encoder_k.parameters(), strict=True):
            k.data.copy_(q.data)
            k.requires_grad_(False)
        self.register_buffer("queue", F.normalize(torch.randn(width, entries), dim=0))
        self.register_buffer("pointer", torch.zeros(1, dtype=torch.long))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q = F.normalize(self.encoder_q(x), dim=1)
        with torch.no_grad():
            k = F.normalize(self.encoder_k(x + 0.1 * x.roll(1, 1)), dim=1)
        logits = torch.cat([(q * k).sum(1, keepdim=True), q @ self.queue.clone()], dim=1) / 0.2
        if self.training:
            first, size = int(self.pointer), self.queue.shape[1]
            self.queue[:, torch.arange(first, first + len(k)) % size] = k.t()
            self.pointer[0] = (first + len(k)) % size
        return logits


class Meters(nn.Module):
    """One buffer of each other rule, none of which says anything of the weights."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(10, 2)
        self.register_buffer("average", torch.ones(2))
        self.register_buffer("mean", torch.zeros(2))
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))
        self.register_buffer("row", torch.zeros(10))
        self.register_buffer("begun", torch.tensor([False]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output = self.layer(x)
        if self.training:
            self.average = 0.9 * self.average + 0.1 * output.detach().mean(0)
            self.mean = output.detach().square().mean(0)
            self.seen += len(x)
            self.row.data.copy_(x[-1])
            self.begun.fill_(True)
        return output


def declare(model: nn.Module) -> nn.Module:
    if isinstance(model, Quantizing):
        paceline.buffer(model.book, "counts", merge="sum", factor=model.book.decay)
        paceline.buffer(model.book, "sums", merge="sum", factor=model.book.decay)
        paceline.buffer(model.book, "codes", merge=means)
    if isinstance(model, Moco):
        paceline.buffer(model, "queue", merge="queue", pointer="pointer", dim=1)
    if isinstance(model, Meters):
        paceline.buffer(model, "average", merge="affine", factor=0.9)
        paceline.buffer(model, "mean", merge="mean")
        paceline.buffer(model, "seen", merge="sum", factor=1)
        paceline.buffer(model, "row", merge="last")
        paceline.buffer(model, "begun", merge="last")
    return model


def after(model: nn.Module) -> None:
    """What the body of the loop does: MoCo's key encoder follows the other one."""
    if isinstance(model, Moco):
        with torch.no_grad():
            for q, k in zip(model.encoder_q.parameters(), model.encoder_k.parameters(), strict=True):
                k.mul_(0.9).add_(q, alpha=0.1)


def loss(output: torch.Tensor, batch: Any) -> torch.Tensor:
    return F.cross_entropy(output, batch[1] if output.shape[1] == 2 else torch.zeros(len(output), dtype=torch.long))


def optimizer(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


MODELS: dict[str, Callable[[], nn.Module]] = {
    kind.__name__.lower(): (lambda kind=kind: kind().double()) for kind in (Spectral, Quantizing, Moco, Meters)
}

if __name__ == "__main__":
    for name in sys.argv[2:]:
        trainer = paceline.Trainer(lambda name=name: declare(MODELS[name]()), loss, optimizer, GLOBAL_BATCH)
        for _ in trainer.steps(data, epochs=int(sys.argv[1])):
            after(trainer.model)
        trainer.evaluate(data, lambda output, batch: {"n": (len(output), 1)})
        trainer.export(f"{name}.safetensors")
