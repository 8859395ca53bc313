"""Models of many kinds from transformers, small, with the loss that they compute themselves, each trained a little:
`kinds.py NAME ...`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import TensorDataset

import paceline

WORDS, WIDTH, LAYERS, HEADS, LENGTH = 97, 32, 4, 4, 8
LIKE_BERT = {"vocab_size": WORDS, "hidden_size": WIDTH, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS}
LIKE_LLAMA = {**LIKE_BERT, "intermediate_size": 64, "max_position_embeddings": 32, "pad_token_id": 0}
FEW = {**LIKE_LLAMA, "num_key_value_heads": 2}
LIKE_GPT2 = {"vocab_size": WORDS, "n_embd": WIDTH, "n_layer": LAYERS, "n_head": HEADS, "n_positions": 32}
CAUSAL: dict[str, dict[str, Any]] = {
    "mixtral": {**FEW, "num_local_experts": 4},
    "gemma2": {**FEW, "head_dim": 8},
    "phi": FEW,
    "olmo2": FEW,
    "gpt_neox": LIKE_LLAMA,
    "gptj": {**LIKE_GPT2, "rotary_dim": 4},
    "falcon": {**LIKE_BERT, "alibi": False},
    "bloom": {"vocab_size": WORDS, "hidden_size": WIDTH, "n_layer": LAYERS, "n_head": HEADS},
    "mpt": {"vocab_size": WORDS, "d_model": WIDTH, "n_layers": LAYERS, "n_heads": HEADS, "max_seq_len": 32},
    "opt": {**LIKE_BERT, "ffn_dim": 64, "max_position_embeddings": 32, "word_embed_proj_dim": WIDTH, "pad_token_id": 1},
}
MASKED: dict[str, dict[str, Any]] = {
    "distilbert": {"vocab_size": WORDS, "dim": WIDTH, "n_layers": LAYERS, "n_heads": HEADS, "hidden_dim": 64},
    "deberta-v2": LIKE_LLAMA,
    "modernbert": LIKE_LLAMA,
}
KINDS = (*CAUSAL, *MASKED)


def made(name: str) -> torch.nn.Module:
    import transformers  # which takes seconds

    ends = {"bos_token_id": 1, "eos_token_id": 2}
    config = transformers.AutoConfig.for_model(name, **{**(CAUSAL | MASKED)[name], **ends})
    config._experts_implementation = "eager"  # what is grouped there takes no float64
    of = transformers.AutoModelForCausalLM if name in CAUSAL else transformers.AutoModelForMaskedLM
    return of.from_config(config).double()


def forward(model: torch.nn.Module, batch: Any) -> Any:
    return model(input_ids=batch[0], attention_mask=batch[1], labels=batch[0])


def main(names: list[str]) -> None:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, 96, (16, LENGTH), generator=generator)
    lengths = torch.randint(4, LENGTH + 1, (16, 1), generator=generator)
    data = TensorDataset(ids, (torch.arange(LENGTH)[None] < lengths).long())
    losses = {}
    for name in names:
        trainer = paceline.Trainer(
            lambda name=name: made(name),
            lambda output, batch: output.loss,
            lambda params: torch.optim.SGD(params, lr=0.05),
            global_batch=8,
            forward=forward,
        )
        losses[name] = [report.loss for report in trainer.steps(data, count=3)]
    Path(f"losses-{paceline.join().rank}.json").write_text(json.dumps(losses))


if __name__ == "__main__":
    main(sys.argv[1:])
