"""Trains a real model for a few steps and exports it. Usage: zoo.py llama|llama-tied|gpt2|vit|resnet"""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import paceline

KIND, WORDS, LENGTH = sys.argv[1], 97, 16
chance = torch.Generator().manual_seed(0)


class Block(nn.Module):
    """Of a residual network (He et al., "Deep Residual Learning for Image Recognition", CVPR 2016)."""

    def __init__(self, inside: int, outside: int) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(inside, outside, 3, padding=1), nn.Conv2d(outside, outside, 3, padding=1)
        self.norms = nn.ModuleList(nn.BatchNorm2d(outside) for _ in range(2))
        self.across = nn.Conv2d(inside, outside, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = self.norms[1](self.second(F.relu(self.norms[0](self.first(x)))))
        return F.relu(inner + self.across(x))


class ViT(nn.Module):
    """Dosovitskiy et al., "An Image is Worth 16x16 Words", ICLR 2021."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 32, 4, 4)
        self.token, self.places = nn.Parameter(torch.zeros(1, 1, 32)), nn.Parameter(0.02 * torch.randn(1, 5, 32))
        block = nn.TransformerEncoderLayer(32, 4, 64, 0.1, F.gelu, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(block, 3, nn.LayerNorm(32), enable_nested_tensor=False)
        self.head = nn.Linear(32, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        parts = self.patches(images).flatten(2).transpose(1, 2)
        tokens = torch.cat([self.token.expand(len(parts), -1, -1), parts], dim=1)
        return self.head(self.blocks(tokens + self.places)[:, 0])


def model() -> nn.Module:
    if KIND == "vit":
        return ViT()
    if KIND == "resnet":
        head = nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10)
        return nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), Block(16, 16), Block(16, 32), Block(32, 32), *head)
    import transformers

    if KIND == "gpt2":
        small = transformers.GPT2Config(vocab_size=WORDS, n_embd=32, n_layer=3, n_head=4, n_positions=LENGTH)
        return transformers.GPT2LMHeadModel(small)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4}
    config = transformers.LlamaConfig(
        vocab_size=WORDS, num_key_value_heads=2, tie_word_embeddings=KIND == "llama-tied", **sizes
    )
    return transformers.LlamaForCausalLM(config)


if KIND in ("vit", "resnet"):
    data = TensorDataset(torch.randn(96, 3, 8, 8, generator=chance), torch.randint(0, 10, (96,), generator=chance))
else:
    data = TensorDataset(torch.randint(0, WORDS, (96, LENGTH + 1), generator=chance))


def forward(made: nn.Module, batch: Any) -> torch.Tensor:
    return made(batch[0]) if len(batch) == 2 else made(input_ids=batch[0][:, :-1], use_cache=False).logits


def loss(output: torch.Tensor, batch: Any) -> torch.Tensor:
    if len(batch) == 2:
        return F.cross_entropy(output, batch[1])
    return F.cross_entropy(output.flatten(0, 1), batch[0][:, 1:].flatten())


optimizer = lambda params: torch.optim.AdamW(params, lr=1e-2)
trainer = paceline.Trainer(model, loss, optimizer, global_batch=24, forward=forward, clip_norm=1.0)
for _ in trainer.steps(data, count=6):
    pass
trainer.export("out.safetensors")
