"""Transformers of many kinds, none of which knows that it may be cut, each trained a little: `cutting.py NAME ...`."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import paceline

WIDTH, HEADS = 32, 4
generator = torch.Generator().manual_seed(1)
ids = TensorDataset(torch.randint(0, 96, (16, 6), generator=generator))
numbers = TensorDataset(torch.randn(16, 6, WIDTH, generator=generator, dtype=torch.float64))
images = TensorDataset(torch.randn(16, 3, 16, 16, generator=generator, dtype=torch.float64))


class Fused(nn.Module):
    """Query, key and value of one weight, split by the width; probabilities and output are dropped."""

    def __init__(self, heads: int = HEADS) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.drop, self.heads = nn.Dropout(0.1), heads
        self.register_buffer("mask", torch.tril(torch.ones(6, 6, dtype=torch.bool)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, length, width = x.size()
        q, k, v = self.qkv(x).split(WIDTH, dim=2)
        q, k, v = (t.view(rows, length, self.heads, width // self.heads).transpose(1, 2) for t in (q, k, v))
        scores = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        scores = scores.masked_fill(~self.mask[:length, :length], float("-inf"))
        found = self.drop(F.softmax(scores, dim=-1)) @ v
        return self.drop(self.out(found.transpose(1, 2).contiguous().view(rows, length, width)))


class Einsum(nn.Module):
    """One weight, reshaped at once; products by einsum; noise of its own on the probabilities."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH)
        self.bias = nn.Parameter(torch.zeros(HEADS, 1, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, length, width = x.shape
        q, k, v = self.qkv(x).reshape(rows, length, 3, HEADS, width // HEADS).permute(2, 0, 3, 1, 4)
        scores = torch.einsum("bhid,bhjd->bhij", q, k) / math.sqrt(width // HEADS) + self.bias * torch.arange(length)
        if self.training:
            scores = scores + 0.1 * torch.randn_like(scores)
        found = torch.einsum("bhij,bhjd->bhid", scores.softmax(-1), v)
        return self.out(found.transpose(1, 2).reshape(rows, length, width))


class Interleaved(nn.Module):
    """Query, key and value of each head next to each other; heads in the first dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, length, _ = x.shape
        q, k, v = self.qkv(x).view(rows, length, HEADS, -1).chunk(3, dim=-1)
        q, k, v = (t.transpose(1, 2).reshape(rows * HEADS, length, -1) for t in (q, k, v))
        found = torch.bmm(torch.bmm(q, k.mT).div(math.sqrt(q.size(-1))).softmax(-1), v)
        return self.out(found.view(rows, HEADS, length, -1).transpose(1, 2).flatten(2))


class Few(nn.Module):
    """Fewer heads of keys and values, in one weight of unequal sections, or in weights of their own."""

    def __init__(self, few: int, fused: bool, norm: bool = False) -> None:
        super().__init__()
        self.few, self.size = few, WIDTH // HEADS
        widths = [HEADS * self.size, few * self.size, few * self.size]
        self.into = nn.ModuleList([nn.Linear(WIDTH, sum(widths))] if fused else [nn.Linear(WIDTH, w) for w in widths])
        self.out, self.widths = nn.Linear(WIDTH, WIDTH), widths
        self.norm = nn.LayerNorm(self.size) if norm else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = self.into[0](x).split(self.widths, dim=-1) if len(self.into) == 1 else [layer(x) for layer in self.into]
        q, k, v = (part.unflatten(-1, (-1, self.size)).transpose(1, 2) for part in parts)
        q, k = self.norm(q), self.norm(k).repeat_interleave(HEADS // self.few, dim=1)
        v = v[:, :, None].expand(-1, -1, HEADS // self.few, -1, -1).reshape(q.shape)
        found = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=0.1 if self.training else 0.0)
        return self.out(found.transpose(1, 2).flatten(2))


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.up(x).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up)


class Experts(nn.Module):
    """Each row goes to one of four; some may get none."""

    def __init__(self) -> None:
        super().__init__()
        self.choice = nn.Linear(WIDTH, 4)
        self.experts = nn.ModuleList(
            nn.ModuleDict({"up": nn.Linear(WIDTH, WIDTH), "down": nn.Linear(WIDTH, WIDTH)}) for _ in range(4)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, chosen = self.choice(x).softmax(-1).max(-1)
        made = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows = chosen == number
            if rows.any():
                made[rows] = expert["down"](F.relu(expert["up"](x[rows]))) * weights[rows].unsqueeze(-1)
        return made


class Block(nn.Module):
    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        self.attention, self.before, self.then = attention, nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.gated = Gated()
        self.plain = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH), nn.Dropout(0.1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.before(x))
        return x + self.gated(self.then(x)) + self.plain(self.then(x))


class Own(nn.Module):
    """Words in, words out by the same weight; nothing of `attentions` has to fit."""

    def __init__(self, *attentions: nn.Module) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(97, WIDTH), nn.Embedding(6, WIDTH)
        self.blocks = nn.ModuleList(Block(attention) for attention in attentions)
        self.head = nn.Linear(WIDTH, 97, bias=False)
        self.head.weight = self.words.weight

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.words(words) + self.places(torch.arange(words.size(1)))
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Halves(nn.Module):
    """Attention of three heads, which two workers cannot divide, and a recurrent layer; only its MLP can be cut."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.recurrent = nn.MultiheadAttention(WIDTH, 1, 0.1, batch_first=True), nn.GRU(WIDTH, WIDTH)
        self.plain = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(x, x, x, need_weights=False)[0]
        return self.recurrent(x)[0] + self.plain(x)


class Both(nn.Module):
    """torch's own encoder and decoder, with masks of both kinds, and the weights of an attention."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Transformer(WIDTH, HEADS, 1, 1, 2 * WIDTH, batch_first=True)
        self.last = nn.MultiheadAttention(WIDTH, HEADS, 0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(6, dtype=x.dtype)
        padding = torch.arange(6).expand(len(x), 6) >= 5
        x = self.inner(x, x.flip(1), tgt_mask=mask, src_key_padding_mask=padding).transpose(0, 1)
        found, seen = self.last(x, x, x)
        return found.transpose(0, 1) + seen.mean(-1, keepdim=True)


def gpt2() -> nn.Module:
    import transformers  # which takes seconds

    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=97, n_positions=8, n_embd=WIDTH, n_layer=2, n_head=HEADS, use_cache=False)
    )


def bert() -> nn.Module:
    import transformers  # which takes seconds

    sizes = {"hidden_size": WIDTH, "num_hidden_layers": 1, "num_attention_heads": HEADS, "intermediate_size": 64}
    return transformers.BertForMaskedLM(transformers.BertConfig(vocab_size=97, **sizes))


def vit() -> nn.Module:
    import transformers  # which takes seconds

    sizes = {"hidden_size": WIDTH, "num_hidden_layers": 1, "num_attention_heads": HEADS, "intermediate_size": 64}
    dropped = {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1}
    return transformers.ViTForImageClassification(
        transformers.ViTConfig(image_size=16, patch_size=4, **sizes, **dropped)
    )


def t5() -> nn.Module:
    import transformers  # which takes seconds

    sizes = {"d_model": WIDTH, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": HEADS}
    return transformers.T5ForConditionalGeneration(transformers.T5Config(vocab_size=97, **sizes))


def llama(implementation: str = "sdpa", few: int = 2) -> nn.Module:
    import transformers  # which takes seconds

    sizes = {"hidden_size": WIDTH, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": HEADS}
    config = transformers.LlamaConfig(vocab_size=97, num_key_value_heads=few, attention_dropout=0.1, **sizes)
    config._attn_implementation = implementation
    return transformers.LlamaForCausalLM(config)


def words(model: nn.Module, batch: Any) -> torch.Tensor:
    return model(input_ids=batch[0]).logits


MODELS: dict[str, tuple[Callable[[], nn.Module], TensorDataset, Any]] = {
    "gpt2": (gpt2, ids, words),
    "bert": (bert, ids, words),
    "llama": (llama, ids, words),
    "llama, eager": (lambda: llama("eager"), ids, words),
    "vit": (vit, images, lambda model, batch: model(pixel_values=batch[0]).logits),
    "t5": (t5, ids, lambda model, batch: model(input_ids=batch[0], decoder_input_ids=batch[0].flip(1)).logits),
    "fused": (lambda: Own(Fused(), Fused()), ids, None),
    "einsum": (lambda: Own(Einsum()), ids, None),
    "interleaved": (lambda: Own(Interleaved()), ids, None),
    "few": (lambda: Own(Few(2, True), Few(2, False, True)), ids, None),
    "one": (lambda: Own(Few(1, True), Few(1, False)), ids, None),
    "experts": (lambda: Own(Experts(), Experts()), ids, None),
    "halves": (Halves, numbers, None),
    "both": (Both, numbers, None),
}


def main() -> None:
    for name in sys.argv[1:]:
        make, data, forward = MODELS[name]
        trainer = paceline.Trainer(
            lambda make=make: make().double(),
            lambda output, batch: output.square().flatten(1).mean(1).mean(),
            lambda params: torch.optim.AdamW(params, lr=0.01, eps=1e-3),
            forward=forward,
            global_batch=8,
            plan="micro=4",
        )
        for _ in trainer.steps(data, count=4):
            pass
        trainer.export(f"{name}.safetensors")


if __name__ == "__main__":
    main()
