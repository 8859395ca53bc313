"""Losses of sequences, as users write them, each trained for two steps: `judging.py FILE NAME ...` writes what came of
each, its losses and a sum over the weights, or how it was refused.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset

import paceline
from paceline.errors import UsageError

WIDTH, LENGTH, CLASSES, HEADS = 8, 12, 5, 2
generator = torch.Generator().manual_seed(3)
inputs = torch.randn(12, LENGTH, WIDTH, generator=generator, dtype=torch.float64)
labels = torch.randint(0, CLASSES, (12, LENGTH), generator=generator)
labels[:, ::5] = -100
data = TensorDataset(inputs, labels)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out, self.up = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, length, width = x.shape
        q, k, v = self.qkv(x).view(rows, length, 3, HEADS, width // HEADS).permute(2, 0, 3, 1, 4)
        found = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(found.transpose(1, 2).reshape(rows, length, width)) + torch.tanh(self.up(x))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, CLASSES)
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Cubed(torch.autograd.Function):
    """A backward of its own, which sees the gradient of the whole."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return 3 * x**2 * grad / (1 + grad.norm())


class Turned(torch.autograd.Function):
    """Which moves along the sequence without torch's knowing."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x - x.mean(1, keepdim=True)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad - grad.mean(1, keepdim=True)


def usual(o: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(o.flatten(0, 1), y.flatten())


def clipped(o: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    o.register_hook(lambda grad: grad / (1e-3 + grad.norm()))
    return usual(o, y)


def weighted_hook(o: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    o.register_hook(lambda grad: grad * torch.linspace(0, 1, LENGTH, dtype=grad.dtype)[:, None])
    return usual(o, y)


def counted(o: torch.Tensor, y: torch.Tensor) -> Any:
    total = F.cross_entropy(o.flatten(0, 1), y.flatten(), reduction="sum")
    right = (o.argmax(-1) == y).sum()
    return total, int((y != -100).sum()), {"right": (right, (y != -100).sum())}


def chunked(o: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    parts = zip(o.chunk(3, 1), y.chunk(3, 1), strict=True)
    found = [
        checkpoint(
            lambda a, b: F.cross_entropy(a.flatten(0, 1), b.flatten(), reduction="sum"), *pair, use_reentrant=False
        )
        for pair in parts
    ]
    return sum(found[1:], found[0]) / (y != -100).sum()


def penalized(o: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    first = usual(o, y)
    (grad,) = torch.autograd.grad(first, o, create_graph=True)
    return first + grad.square().sum()


def of_weights(o: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    found = torch.autograd.grad(usual(o, y), [*trainer.model.head.parameters()], create_graph=True)
    return usual(o, y) + sum(g.square().sum() for g in found)


def in_place(o: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    o = o.clone()
    o[:, 0] = 0.0
    o[:, -1] *= 2.0
    return usual(o, y)


def dtw(o: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """A recursion along the sequence."""
    state = o.new_zeros(o.shape[0], CLASSES)
    for position in range(o.shape[1]):
        state = torch.tanh(state * 0.5 + o[:, position])
    return state.square().mean()


def scanned(o: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.vmap(lambda a: (a.cumsum(0) * a.flip(0)).mean())(o).mean()


def mapped(o: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    def one(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return -(a.log_softmax(-1) * F.one_hot(b.clamp(min=0), CLASSES)).sum(-1).mean()

    return torch.vmap(one)(o, y).mean()


def contrastive(o: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    z = F.normalize(o.mean(1), dim=-1)
    return F.cross_entropy(z @ z.T * 3, torch.arange(len(z)))


def ctc(o: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    lengths = torch.full((len(o),), LENGTH)
    return F.ctc_loss(o.log_softmax(-1).transpose(0, 1), y[:, 1:4].clamp(min=1), lengths, torch.full((len(o),), 3))


def kept(o: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    o.retain_grad()
    return usual(o, y)


def again(o: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """The model once more, on what it gave."""
    return usual(trainer.model(F.pad(o, (0, WIDTH - CLASSES))), y)


def of_first(o: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return o[:, 0].square().mean() + o[:, LENGTH // 2 :, 1].mean()


def sorted_(o: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return (o.sort(1).values * torch.arange(LENGTH)[:, None]).mean()


LOSSES: dict[str, Callable[[Any, Any], Any]] = {
    "usual": usual,
    "shifted": lambda o, y: F.cross_entropy(o[:, :-1].flatten(0, 1), y[:, 1:].flatten()),
    "counted": counted,
    "flip(0, 1)": lambda o, y: usual(o.flip(0, 1), y) + o.flip(1, 2)[:, 0].mean(),
    "flip(1)": lambda o, y: usual(o.flip(1), y),
    "flip((0, 1))": lambda o, y: usual(o.flip((0, 1)), y),
    "roll": lambda o, y: usual(o.roll(1, 1), y),
    "rot90": lambda o, y: (o.rot90(1, (1, 2)) * torch.arange(LENGTH)).mean(),
    "vmap": mapped,
    "vmap, scanned": scanned,
    "clipped by a hook": clipped,
    "weighted by a hook": weighted_hook,
    "own backward": lambda o, y: Cubed.apply(o).mean(),
    "own function": lambda o, y: usual(Turned.apply(o), y),
    "own, of a parameter": lambda o, y: (Cubed.apply(trainer.model.scale) * o).mean(),
    "checkpoint": lambda o, y: checkpoint(usual, o, y, use_reentrant=False),
    "checkpoint, reentrant": lambda o, y: checkpoint(usual, o, y, use_reentrant=True),
    "checkpoint, in chunks": chunked,
    "gradient penalty": penalized,
    "gradients of weights": of_weights,
    "temperature": lambda o, y: usual(o * trainer.model.scale, y),
    "weights only beside": lambda o, y: usual(o, y) + 1e-2 * sum(p.square().sum() for p in trainer.model.parameters()),
    "in place": in_place,
    "recursion": dtw,
    "contrastive": contrastive,
    "ctc": ctc,
    "retain_grad": kept,
    "the model again": again,
    "first token": of_first,
    "sort": sorted_,
    "focal": lambda o, y: ((1 - o.softmax(-1)) ** 2 * -o.log_softmax(-1)).mean(),
    "smoothed": lambda o, y: F.cross_entropy(o.transpose(1, 2), y, label_smoothing=0.1),
    "class weights": lambda o, y: F.cross_entropy(o.transpose(1, 2), y, torch.arange(1.0, 6).double()),
    "total variation": lambda o, y: (o[:, 1:] - o[:, :-1]).abs().mean(),
    "max": lambda o, y: o.max(1).values.mean() + o.amax((1, 2)).mean(),
    "logsumexp": lambda o, y: o.logsumexp(1).mean(),
    "std": lambda o, y: o.std(1).mean() + o.var() + o.norm(),
    "quantile": lambda o, y: o.quantile(0.3, 1).mean(),
    "masked": lambda o, y: o[y != -100].square().mean(),
    "gather": lambda o, y: -o.log_softmax(-1).gather(-1, y.clamp(min=0)[..., None]).mean(),
    "einsum": lambda o, y: torch.einsum("btc,bsc->bts", o, o).softmax(-1).diagonal(0, 1, 2).mean(),
    "fft": lambda o, y: torch.fft.rfft(o, dim=1).abs().mean(),
    "conv": lambda o, y: F.conv1d(o.transpose(1, 2), torch.ones(1, CLASSES, 3).double()).square().mean(),
    "unfold": lambda o, y: o.unfold(1, 4, 2).square().mean(),
    "cdist": lambda o, y: torch.cdist(o, o.flip(1)).mean(),
    "dropout": lambda o, y: usual(F.dropout(o, 0.3), y),
    "noise": lambda o, y: usual(o + torch.randn_like(o), y),
    "nothing of it": lambda o, y: o.detach().mean() + trainer.model.scale.square(),
}
FAST = ("vmap", "clipped by a hook", "own backward")


def main() -> None:
    global trainer
    file, *names = sys.argv[1:]
    found: dict[str, Any] = {}
    for name in names or LOSSES:
        trainer = paceline.Trainer(
            lambda: Net().double(),
            lambda output, batch, name=name: LOSSES[name](output, batch[1]),
            lambda params: torch.optim.AdamW(params, lr=0.01, eps=1e-3, weight_decay=0.1),
            global_batch=6,
        )
        try:
            losses = [report.loss for report in trainer.steps(data, count=2)]
        except UsageError as error:
            found[name] = f"{type(error).__name__}: {error}"
            continue
        weights = [
            float((p.detach() * (1 + torch.arange(p.numel()).view(p.shape))).sum()) for p in trainer.model.parameters()
        ]
        found[name] = [*losses, *weights]
    if paceline.join().rank == 0:
        Path(file).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
