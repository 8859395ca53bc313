"""A Llama of 97 M parameters in float64, which takes 3.1 GB with Adam, trained a little: `large.py [GROUP ...]`. Each
worker first enters the memory cgroup that has its number.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

if __name__ == "__main__" and sys.argv[1:]:
    Path(sys.argv[1 + int(os.environ["PACELINE_RANK"])], "cgroup.procs").write_text(str(os.getpid()))

import torch
import transformers
from torch.utils.data import TensorDataset

import paceline

rows = TensorDataset(torch.randint(0, 8000, (8, 8), generator=torch.Generator().manual_seed(1)))


def model() -> transformers.PreTrainedModel:
    sizes = {"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 12, "num_attention_heads": 12}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=8000, **sizes)).double()


def main() -> None:
    trainer = paceline.Trainer(
        model,
        loss=lambda logits, batch: torch.nn.functional.cross_entropy(
            logits[:, :-1].flatten(0, 1), batch[0][:, 1:].flatten()
        ),
        optimizer=lambda params: torch.optim.AdamW(params, lr=1e-3),
        forward=lambda model, batch: model(input_ids=batch[0]).logits,
        global_batch=8,
    )
    for report in trainer.steps(rows, count=3):
        if trainer.main:
            print(f"step {report.step}: loss {report.loss:.4f}", flush=True)
    trainer.predict(rows, path="logits.npy")
    trainer.export("model.safetensors")


if __name__ == "__main__":
    main()
