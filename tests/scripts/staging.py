"""Models with blocks, none of which knows that it may be in stages, each trained a little: `staging.py NAME ...`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from cases import blocks
from cutting import HEADS, WIDTH, images, words
from torch import nn
from torch.utils.data import TensorDataset

import paceline

LAYERS, LENGTH = 4, 8
generator = torch.Generator().manual_seed(1)
ids = TensorDataset(torch.randint(0, 96, (16, LENGTH), generator=generator))
odd = TensorDataset(torch.randint(0, 96, (16, 17), generator=generator))
numbers = TensorDataset(torch.randn(16, LENGTH, WIDTH, generator=generator, dtype=torch.float64))
SIZES = {"hidden_size": WIDTH, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "intermediate_size": 64}
DROPPED = {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1}


class Block(nn.Module):
    """Attention with a bias of its own on the scores."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out, self.norm = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)
        self.bias = nn.Parameter(torch.zeros(HEADS, LENGTH, LENGTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, length, width = x.shape
        q, k, v = self.qkv(self.norm(x)).view(rows, length, 3, HEADS, width // HEADS).permute(2, 0, 3, 1, 4)
        bias, p = self.bias[:, :length, :length], 0.1 if self.training else 0.0
        found = F.scaled_dot_product_attention(q, k, v, attn_mask=bias, dropout_p=p)
        return x + self.out(found.transpose(1, 2).reshape(rows, length, width))


class Skips(nn.Module):
    """What the first block gives is wanted by the head, and the sum of all that blocks gave; words are drawn upon
    between blocks; the head is the words' weight, used by name.
    """

    def __init__(self) -> None:
        super().__init__()
        self.places = nn.Parameter(torch.zeros(LENGTH, WIDTH))
        self.words = nn.Embedding(97, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks(LAYERS)))
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = F.dropout(self.words(ids) + self.places, 0.1, self.training)
        every = []
        for block in self.blocks:
            x = block(x)
            if self.training:
                x = x + 0.01 * torch.randn_like(x)
            every.append(x)
            x = x.clone()
            x[:, 0] += 0.5 * every[0][:, 1]
        return (x + every[0] + torch.stack(every).sum(0)) * self.scale @ self.words.weight.t()


class Pair(nn.Module):
    """Tuples in, tuples out, a mask by keyword, what is None, and a weight that is turned by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.turned = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, state: tuple[Any, ...], *, mask: torch.Tensor, more: Any = None) -> tuple[Any, ...]:
        x, (count, seen) = state
        made = F.dropout(torch.tanh(self.up(x)), 0.1, self.training).masked_fill(mask.unsqueeze(-1), 0.0)
        return x + self.down(made) @ self.turned.weight.T, (count + 1, seen + made.detach().abs().sum(-1)), more


class Tuples(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.ModuleDict({f"number {n}": Pair() for n in range(blocks(LAYERS))})
        self.out = nn.Linear(WIDTH, 3)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        mask, early = x.sum(-1) > 3.0, x
        state: tuple[Any, ...] = (x, (torch.zeros((), dtype=torch.long), torch.zeros(x.shape[:2], dtype=x.dtype)))
        for pair in self.layer.values():
            x, seen, nothing = pair(state, mask=mask)
            assert nothing is None
            early = x if pair is self.layer["number 0"] else early
            state = (x, seen)
        return {"out": self.out(x) * seen[0], "seen": seen[1].unsqueeze(-1), "early": early}


def flat() -> nn.Module:
    """All tokens of a row go into one layer."""
    layers = [nn.TransformerEncoderLayer(WIDTH, HEADS, 64, 0.1, batch_first=True, bias=False) for _ in range(LAYERS)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(LENGTH * WIDTH, 3))


def stack() -> nn.Module:
    layers = [nn.TransformerEncoderLayer(WIDTH, HEADS, 64, 0.1, batch_first=True) for _ in range(LAYERS)]
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), *layers, nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3))


def gpt2() -> nn.Module:
    import transformers  # which takes seconds

    sizes = {"vocab_size": 97, "n_positions": 8, "n_embd": WIDTH, "n_layer": LAYERS, "n_head": HEADS}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes))


def llama(implementation: str = "sdpa", tied: bool = False) -> nn.Module:
    import transformers

    more = {"vocab_size": 97, "num_key_value_heads": 2, "attention_dropout": 0.1, "tie_word_embeddings": tied}
    config = transformers.LlamaConfig(**SIZES, **more)
    config._attn_implementation = implementation
    return transformers.LlamaForCausalLM(config)


def falcon() -> nn.Module:
    """Whose layers compute ``x @ weight.T``, and whose heads have one key and value."""
    import transformers

    return transformers.FalconForCausalLM(transformers.FalconConfig(vocab_size=97, **SIZES, alibi=False))


def bert() -> nn.Module:
    import transformers

    return transformers.BertForMaskedLM(transformers.BertConfig(vocab_size=97, **SIZES, **DROPPED))


def masked(model: nn.Module, batch: Any) -> torch.Tensor:
    (some,) = batch
    return model(input_ids=some, attention_mask=(some % 5 > 0).long()).logits


def vit() -> nn.Module:
    import transformers

    return transformers.ViTForImageClassification(
        transformers.ViTConfig(image_size=16, patch_size=4, **SIZES, **DROPPED)
    )


MODELS: dict[str, tuple[Callable[[], nn.Module], TensorDataset, Any]] = {
    "gpt2": (gpt2, ids, words),
    "llama": (llama, ids, masked),
    "llama, odd": (llama, odd, masked),
    "llama, tied, eager": (lambda: llama("eager", True), ids, words),
    "falcon": (falcon, ids, masked),
    "bert": (bert, ids, masked),
    "vit": (vit, images, lambda model, batch: model(pixel_values=batch[0]).logits),
    "skips": (Skips, ids, None),
    "tuples": (Tuples, numbers, None),
    "stack": (stack, numbers, None),
    "flat": (flat, numbers, None),
}


def loss(output: Any, batch: Any) -> torch.Tensor:
    some = output.values() if isinstance(output, dict) else [output]
    return sum(part.square().flatten(1).mean(1).mean() for part in some)


def main() -> None:
    for name in sys.argv[1:]:
        make, data, forward = MODELS[name]
        trainer = paceline.Trainer(
            lambda make=make: make().double(),
            loss,
            lambda params: torch.optim.AdamW(params, lr=0.01, eps=1e-3),
            forward=forward,
            global_batch=8,
            clip_norm=1.0,
            plan="micro=3",
        )
        for _ in trainer.steps(data, count=4):
            pass
        found = trainer.evaluate(data, lambda output, batch: {"loss": (loss(output, batch), 1)})
        if trainer.main:
            print(f"{name}: {found['loss']!r}", flush=True)
        trainer.export(f"{name}.safetensors")


if __name__ == "__main__":
    main()
