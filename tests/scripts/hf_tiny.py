"""The smallest Llama that the scripts of `paceline.hf` train."""

from __future__ import annotations

from typing import Any

from transformers import LlamaConfig


def tiny_llama(vocabulary: int, **words: Any) -> LlamaConfig:
    """The configuration; `words` are further ones, or others."""
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    tokens = {"pad_token_id": 0, "bos_token_id": None, "eos_token_id": None}
    return LlamaConfig(vocab_size=vocabulary, use_cache=False, **{**sizes, **heads, **tokens, **words})
