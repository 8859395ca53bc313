"""A small Mixtral in float32, whose experts multiply grouped matrices: `grouped_experts.py OUT`."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

import paceline

WORDS, LENGTH, BATCH, MICRO, STEPS, RATE = 97, 12, 12, 4, 20, 1e-3


def model() -> nn.Module:
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        vocab_size=WORDS,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        num_local_experts=8,
        num_experts_per_tok=2,
        output_router_logits=True,
        use_cache=False,
        experts_implementation="grouped_mm",
    )
    made: nn.Module = MixtralForCausalLM(config)
    assert made.config._experts_implementation == "grouped_mm"  # type: ignore[union-attr]
    return made


def data() -> TensorDataset:
    return TensorDataset(torch.randint(0, WORDS, (48, LENGTH), generator=torch.Generator().manual_seed(0)))


def forward(model: nn.Module, batch: Any) -> Any:
    return model(input_ids=batch[0], labels=batch[0]).loss


def loss(output: Any, batch: Any) -> Any:
    return output


if __name__ == "__main__":
    trainer = paceline.Trainer(
        model,
        loss=loss,
        forward=forward,
        optimizer=lambda params: torch.optim.AdamW([param for _, param in params], lr=RATE),
        global_batch=BATCH,
    )
    for _ in trainer.steps(data(), count=STEPS):
        pass
    trainer.export(sys.argv[1])
