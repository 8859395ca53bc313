"""Trains on packed documents of unequal length: `packed.py OUT own|llama [METHOD]`, with the plan of the command."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import paceline

WORDS, WIDTH, HEADS, LENGTH, BATCH, STEPS, RATE = 40, 24, 6, 24, 6, 4, 1e-2


def documents() -> list[dict[str, Any]]:
    """Some longer than a row; in every third only the second half counts in the loss."""
    generator = torch.Generator().manual_seed(5)
    made = []
    for number in range(60):
        size = int(torch.randint(2, 2 * LENGTH if number % 7 == 0 else LENGTH // 2, (), generator=generator))
        ids = torch.randint(0, WORDS, (size,), generator=generator)
        labels = ids.clone()
        if number % 3 == 0:
            labels[: size // 2] = -100
        made.append({"input_ids": ids, "labels": labels})
    return made


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        rows, tokens, _ = x.shape
        heads = self.qkv(self.first(x)).view(rows, tokens, 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(*heads.unbind(0), attn_mask=mask)
        x = x + self.out(seen.transpose(1, 2).reshape(rows, tokens, WIDTH))
        out: Tensor = x + self.down(F.gelu(self.up(self.second(x))))
        return out


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.positions = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks, self.head = nn.ModuleList(Block() for _ in range(2)), nn.Linear(WIDTH, WORDS)
        self.double()

    def forward(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        x, mask = self.words(input_ids) + self.positions(position_ids), paceline.data.document_mask(position_ids)
        for block in self.blocks:
            x = block(x, mask)
        logits: Tensor = self.head(x)
        return logits


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=WORDS,
        hidden_size=WIDTH,
        intermediate_size=2 * WIDTH,
        num_hidden_layers=2,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        use_cache=False,
    )
    model: nn.Module = LlamaForCausalLM(config).double()
    return model


MODELS = {"own": Model, "llama": llama}


def forward(model: nn.Module, batch: Any) -> Tensor:
    output = model(input_ids=batch["input_ids"], position_ids=batch["position_ids"])
    logits: Tensor = getattr(output, "logits", output)
    return logits


def loss(logits: Tensor, batch: Any) -> tuple[Tensor, int]:
    targets = batch["labels"][:, 1:]
    total = F.cross_entropy(logits[:, :-1].flatten(0, 1), targets.flatten(), reduction="sum")
    return total, int((targets != -100).sum())


def main() -> None:
    given, name, method = (*sys.argv[1:], "best-fit")[:3]
    out = Path(given)
    rows = paceline.data.pack(documents(), LENGTH, method)
    trainer = paceline.Trainer(
        MODELS[name],
        loss=loss,
        forward=forward,
        optimizer=lambda params: torch.optim.AdamW([param for _, param in params], lr=RATE),
        global_batch=BATCH,
    )
    reports = [*trainer.steps(rows, count=STEPS, order=rows.order(BATCH))]
    trainer.export(out.with_suffix(".safetensors"))
    if trainer.main:
        out.with_suffix(".json").write_text(json.dumps([[one.loss, one.grad_norm] for one in reports]))


if __name__ == "__main__":
    main()
