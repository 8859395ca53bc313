"""Small models of transformers with experts, in float64, trained with their auxiliary loss if they have one:
`experts.py NAME OUT [plain]`, with plain PyTorch if that is said. What the models compute in float32 whatever their
dtype is, such as norms, is in float64, too: else two sums of different order may be rounded to different numbers.

Where routers have biases, these keep all tokens away from the last two of the eight experts.
"""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch.utils.data import TensorDataset

import paceline

WORDS, LENGTH, ROWS = 97, 12, 48
BATCH, MICRO, STEPS = 12, 4, 6
COMMON = {
    "vocab_size": WORDS,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
SOME = {"num_experts_per_tok": 2, "output_router_logits": True}
MODELS: dict[str, dict[str, Any]] = {
    "mixtral": {**SOME, "num_local_experts": 8},
    "qwen3_moe": {**SOME, "num_experts": 8, "head_dim": 8},
    "gpt_oss": {**SOME, "num_local_experts": 8, "head_dim": 8, "layer_types": ["full_attention"] * 2},
    "deepseek_v3": {
        "num_experts_per_tok": 2,
        "n_routed_experts": 8,
        "n_group": 2,
        "topk_group": 1,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 8,
    },
}


class InFloat64:
    """The module torch, with another float32."""

    float32 = float = torch.float64

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def made(name: str) -> torch.nn.Module:
    import transformers  # which takes seconds

    modeling: Any = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
    modeling.torch = InFloat64()
    torch.Tensor.float = torch.Tensor.double  # type: ignore[method-assign]
    config = transformers.AutoConfig.for_model(name, **{**COMMON, **MODELS[name]})
    config._experts_implementation = "eager"  # what is grouped takes no float64
    model = transformers.AutoModelForCausalLM.from_config(config).double()
    chance = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for path, param in model.named_parameters():
            if "norm" not in path:
                param.copy_(torch.randn(param.shape, generator=chance, dtype=torch.float64) * 0.2)
        for path, tensor in (*model.named_parameters(), *model.named_buffers()):
            if path.endswith(("router.bias", "e_score_correction_bias")):
                tensor[-2:] = -100.0
    return model


def forward(model: torch.nn.Module, batch: Any) -> Any:
    return model(input_ids=batch[0], use_cache=False)


def rows() -> TensorDataset:
    return TensorDataset(torch.randint(3, WORDS, (ROWS, LENGTH), generator=torch.Generator().manual_seed(1)))


def loss(output: Any, batch: Any) -> torch.Tensor:
    """Of the next word, in float64, which the models' own loss would turn to float32; and the auxiliary one."""
    next_word = F.cross_entropy(output.logits[:, :-1].flatten(0, 1), batch[0][:, 1:].flatten())
    auxiliary = getattr(output, "aux_loss", None)
    return next_word if auxiliary is None else next_word + 0.1 * auxiliary


def optimizer(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=3e-3)


def plain(name: str, out: str) -> None:
    sys.path.append(str(Path(__file__).parents[1] / "support"))
    from oracle import Plain, grid

    torch.set_num_threads(1)
    model = made(name)
    oracle = Plain(model, loss, [optimizer(model.parameters())], forward, [], 0, 1.0)
    oracle.train(grid(rows(), BATCH, MICRO, count=STEPS, seed=0))
    save_file(dict(model.state_dict()), f"{out}.safetensors")
    Path(f"{out}.json").write_text(json.dumps([*zip(oracle.losses, oracle.norms, strict=True)]))


def main(name: str, out: str) -> None:
    trainer = paceline.Trainer(
        lambda: made(name), loss, optimizer, global_batch=BATCH, forward=forward, clip_norm=1.0, seed=0
    )
    figures = [[report.loss, report.grad_norm] for report in trainer.steps(rows(), count=STEPS)]
    trainer.export(f"{out}.safetensors")
    if trainer.main:
        Path(f"{out}.json").write_text(json.dumps(figures))


if __name__ == "__main__":
    (plain if "plain" in sys.argv else main)(*sys.argv[1:3])
