"""Pretrains a small GPT on the source of Python's standard library.

paceline tokenize source/train --tokenizer llama/tokenizer.json --out tokens/train
paceline tokenize source/test --tokenizer llama/tokenizer.json --out tokens/test
paceline run --workers 2 --run-dir runs/gpt with_paceline.py
"""

import torch
from transformers import GPT2Config, GPT2LMHeadModel

import paceline

config = GPT2Config(vocab_size=2000, n_positions=65, n_embd=64, n_layer=2, n_head=4)
train = paceline.data.Tokens("tokens/train", 64)
test = paceline.data.Tokens("tokens/test", 64)
trainer = paceline.Trainer(
    model=lambda: GPT2LMHeadModel(config),
    forward=lambda model, rows: model(rows, labels=rows),
    loss=lambda output, rows: output.loss,
    optimizer=lambda params: torch.optim.AdamW(params, lr=3e-3, weight_decay=0.1),
    schedule=paceline.cosine(warmup=50),
    global_batch=32,
    clip_norm=1.0,
)
for report in trainer.steps(train, epochs=1):
    if report.every(100):
        result = trainer.evaluate(test)
        print(f"step {report.step}: {report.loss:.4f} {result['loss']:.4f}")
trainer.export("gpt.safetensors")
