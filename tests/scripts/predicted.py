"""A script whose plans are predicted before they run: an MLP, a GPT, a Llama, or a model with experts."""

from __future__ import annotations

import sys

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import paceline

STEPS, ROWS = 3, 32


class Layer(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.before, self.between = heads, nn.LayerNorm(width), nn.LayerNorm(width)
        self.attend, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = self.attend(self.before(x)).chunk(3, dim=2)
        q, k, v = (part.unflatten(2, (self.heads, -1)).transpose(1, 2) for part in parts)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.project(attended.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.between(x))))


class GPT(nn.Module):
    def __init__(self, width: int = 64, layers: int = 4, words: int = 96, length: int = 32) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(words, width), nn.Embedding(length, width)
        self.layers = nn.ModuleList(Layer(width, 4) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, words, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids) + self.places.weight[: ids.shape[1]]
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def mlp() -> nn.Module:
    blocks = [nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64)) for _ in range(4)]
    return nn.Sequential(nn.Linear(10, 64), *blocks, nn.Linear(64, 4))


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "vocab_size": 96}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2))


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        from expert_models import Experts

        self.router, self.experts = nn.Linear(64, 8), Experts(8, 64, 96)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, index = self.router(x).softmax(-1).topk(2)
        return x + self.experts(x, index, weights)


def mixture() -> nn.Module:
    return nn.Sequential(nn.Linear(10, 64), Mixture(), Mixture(), nn.LayerNorm(64), nn.Linear(64, 4))


def next_word(output, batch):
    logits = getattr(output, "logits", output)
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), batch[0][:, 1:].flatten())


def train(kind: str, steps: int = STEPS) -> None:
    generator = torch.Generator().manual_seed(0)
    if kind in ("gpt", "llama"):
        data = TensorDataset(torch.randint(96, (2 * ROWS, 32), generator=generator, dtype=torch.int64))
    else:
        rows = torch.randn(2 * ROWS, 10, generator=generator, dtype=torch.float32)
        data = TensorDataset(rows, (rows.sum(1) > 0).long())
    trainer = paceline.Trainer(
        model={"mlp": mlp, "gpt": GPT, "llama": llama, "mixture": mixture}[kind],
        loss=next_word if kind in ("gpt", "llama") else lambda output, batch: F.cross_entropy(output, batch[1]),
        optimizer=lambda params: torch.optim.AdamW(params, lr=1e-3),
        forward=lambda model, batch: model(batch[0]),
        global_batch=ROWS,
    )
    for _ in trainer.steps(data, count=steps):
        pass


if __name__ == "__main__":
    train(sys.argv[1])
