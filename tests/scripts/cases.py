"""What the contract suite trains: each case is plain PyTorch that knows nothing of workers. All in float64."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset


@dataclass(frozen=True)
class Case:
    """A training by global quantities; `steps` counts optimizer steps. With `loss_over` the loss takes the model
    and the outputs of the whole global batch.
    """

    model: Callable[[], nn.Module]
    data: Callable[[], Any]
    loss: Callable[[Any, Any], Any]
    optimizer: Callable[[Any], Any]
    global_batch: int
    steps: int = 8  # of which the first epoch ends in each case
    clip_norm: float | None = None
    schedule: Callable[[int], float] | None = None
    micro: int | None = None
    forward: Callable[[nn.Module, Any], Any] = lambda model, batch: model(batch[0])
    loss_over: str | None = None


def blocks(usual: int) -> int:
    """The number of blocks of a model: `usual`, or the number in BLOCKS, by which fast tests make models smaller."""
    return int(os.environ.get("BLOCKS", usual))


def adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-2)


def slow_adamw(params: Any) -> torch.optim.Optimizer:
    """The gradient of attention's key bias is zero in theory and rounding in practice. Adam turns it into steps of
    about lr·1e-9, which differ from one CPU to the next and are all that ever differs here by more than 1e-15.
    """
    return torch.optim.AdamW(params, lr=1e-3)


def groups(params: Any) -> torch.optim.Optimizer:
    """No decay for vectors: parameter groups that a factory can express because it sees names."""
    decay = [(name, p) for name, p in params if p.dim() > 1]
    rest = [(name, p) for name, p in params if p.dim() <= 1]
    return torch.optim.AdamW([{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}], lr=5e-3)


def sgd(params: Any) -> torch.optim.Optimizer:
    """Without momentum, and unclipped: a factor at a gradient is seen in the weights."""
    return torch.optim.SGD(params, lr=0.3)


def two_optimizers(params: Any) -> list[torch.optim.Optimizer]:
    matrices = [(name, p) for name, p in params if p.dim() > 1]
    vectors = [(name, p) for name, p in params if p.dim() <= 1]
    return [torch.optim.SGD(matrices, lr=0.05, momentum=0.9), torch.optim.Adam(vectors, lr=1e-2)]


def rows(seed: int, count: int, *shape: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, *shape, generator=generator, dtype=torch.float64)
    y = (x.flatten(1)[:, :3].sum(1) > 0).long() + 2 * (x.flatten(1)[:, 3] > 0).long()
    return TensorDataset(x, y)


def tokens(seed: int, count: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, 17, (count, 12), generator=generator)
    lengths = torch.randint(2, 13, (count, 1), generator=generator)
    return TensorDataset(torch.where(torch.arange(12) < lengths, ids, 0))


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(10, 32), nn.Tanh(), nn.Linear(32, 4)).double()


class Cramped(nn.Module):
    """Has memory for `most` rows at a time, in its forward or in its backward; remembers how many it was given."""

    MOMENTS = ("forward", "backward")

    def __init__(self, moment: str | None, most: int = 8) -> None:
        super().__init__()
        self.net, self.moment, self.most = mlp(), moment, most
        self.sizes: list[int] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def full(_: Any = None) -> None:
            raise torch.OutOfMemoryError("out of memory")

        hidden = self.net[1](self.net[0](x))
        if torch.is_grad_enabled():
            self.sizes.append(len(x))
            if len(x) > self.most and self.moment == "forward":
                full()
            if len(x) > self.most and self.moment == "backward":  # when the last layer has its gradients already
                hidden.register_hook(full)
        return self.net[2](hidden)


def dropout_mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Dropout(0.3), nn.Linear(32, 4), nn.Dropout(0.1)).double()


def batchnorm_net() -> nn.Module:
    """No bias before a BatchNorm: its gradient is zero in theory, rounding in practice, noise under Adam."""
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 6, 3, bias=False),
        nn.BatchNorm2d(6, momentum=None), nn.ReLU(), nn.Flatten(), nn.Dropout(0.2), nn.Linear(96, 4),
    ).double()  # fmt: skip


def wide_mlp() -> nn.Module:
    """Where tensor= cuts the first two layers, the last one stays whole."""
    return nn.Sequential(nn.Linear(10, 24), nn.GELU(), nn.Linear(24, 16), nn.GELU(), nn.Linear(16, 4)).double()


def llama(keys: int, tied: bool) -> nn.Module:
    """With so many key-value heads beside four of queries. Its own norms compute in float32, whatever the dtype."""
    from transformers import LlamaConfig, LlamaForCausalLM  # which takes seconds

    config = LlamaConfig(
        vocab_size=20,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=keys,
        tie_word_embeddings=tied,
    )
    model = LlamaForCausalLM(config)
    norms = [name for name, _ in model.named_modules() if name.endswith("norm")]
    for name in norms:
        model.set_submodule(name, nn.RMSNorm(16, 1e-6))
    return model.double()


def logits(model: nn.Module, batch: Any) -> torch.Tensor:
    return model(input_ids=batch[0], use_cache=False).logits


class Partly(nn.Module):
    """Has frozen parameters, and one that no forward uses."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head, self.unused = nn.Linear(10, 16), nn.Linear(16, 4), nn.Linear(16, 4)
        self.first.bias.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.first(x)))


class Language(nn.Module):
    """A tiny language model with tied weights and padding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(17, 16)
        self.block = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True)
        self.out = nn.Linear(16, 17, bias=False)
        self.out.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        mask = torch.triu(torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool), 1)
        return self.out(self.block(self.embed(ids), src_mask=mask))


def cross_entropy(output: torch.Tensor, batch: Any) -> torch.Tensor:
    return F.cross_entropy(output, batch[1])


def next_token(output: torch.Tensor, batch: Any) -> tuple[Any, Any, dict[str, Any]]:
    """A sum over real tokens, with its count: rows weigh by their length."""
    (ids,) = batch
    target = ids[:, 1:]
    losses = F.cross_entropy(output[:, :-1].flatten(0, 1), target.flatten(), ignore_index=0, reduction="sum")
    count = (target != 0).sum()
    right = ((output[:, :-1].argmax(-1) == target) & (target != 0)).sum()
    return losses, count, {"accuracy": (right, count)}


def warm_up(step: int) -> float:
    return min(1.0, (step + 1) / 6)


CASES = {
    "mlp": Case(mlp, lambda: rows(1, 103, 10), cross_entropy, adamw, 24, clip_norm=0.5, schedule=warm_up),
    "dropout": Case(dropout_mlp, lambda: rows(2, 95, 10), cross_entropy, groups, 22, micro=3, clip_norm=1.0),
    "batchnorm": Case(batchnorm_net, lambda: rows(3, 61, 1, 8, 8), cross_entropy, adamw, 20, micro=4),
    "partly": Case(lambda: Partly().double(), lambda: rows(4, 70, 10), cross_entropy, two_optimizers, 16),
    "tokens": Case(
        lambda: Language().double(), lambda: tokens(5, 57), next_token, slow_adamw, 14, micro=2, clip_norm=0.7,
    ),
}  # fmt: skip

# With layers that tensor= cuts, by the structure or the model's own plan; the last batch of an epoch is a ragged one.
CUT = {
    "wide": Case(wide_mlp, lambda: rows(1, 103, 10), cross_entropy, groups, 24, 8, 0.05, warm_up, 3),
    "wide, unclipped": Case(wide_mlp, lambda: rows(1, 103, 10), cross_entropy, sgd, 24, 8, micro=3),
    "llama": Case(lambda: llama(2, False), lambda: tokens(5, 57), next_token, groups, 14, 8, 0.7, None, 2, logits),
    "llama, tied": Case(lambda: llama(4, True), lambda: tokens(6, 57), next_token, sgd, 14, 8, None, None, 2, logits),
}


def right(output: torch.Tensor, batch: Any) -> dict[str, tuple[Any, Any]]:
    """A metric for evaluation."""
    if output.dim() == 3:
        total, count, metrics = next_token(output, batch)
        return {"loss": (total, count), **metrics}
    return {
        "accuracy": ((output.argmax(-1) == batch[1]).sum(), len(output)),
        "loss": (F.cross_entropy(output, batch[1], reduction="sum"), len(output)),
    }
