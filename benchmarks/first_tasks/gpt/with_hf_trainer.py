"""Pretrains a small GPT on the source of Python's standard library.

torchrun --nproc-per-node 2 with_hf_trainer.py
"""

import os

from datasets import load_dataset
from transformers import (
    AutoTokenizer,
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainingArguments,
)
from transformers.trainer_utils import get_last_checkpoint

tokenizer = AutoTokenizer.from_pretrained("llama")
config = GPT2Config(vocab_size=2000, n_positions=65, n_embd=64, n_layer=2, n_head=4)


def pack(rows):
    texts = [text + tokenizer.eos_token for text in rows["text"]]
    tokens = sum(tokenizer(texts)["input_ids"], [])
    blocks = [tokens[start : start + 65] for start in range(0, len(tokens) - 64, 64)]
    return {"input_ids": blocks, "labels": blocks}


data = load_dataset("source", sample_by="document")
data = data.map(pack, batched=True, remove_columns="text")
args = TrainingArguments(
    "runs/gpt",
    learning_rate=3e-3,
    weight_decay=0.1,
    lr_scheduler_type="cosine",
    warmup_steps=50,
    per_device_train_batch_size=32,
    num_train_epochs=1,
    eval_strategy="steps",
    eval_steps=100,
    save_steps=100,
    logging_steps=100,
    report_to="none",
)
trainer = Trainer(
    model=GPT2LMHeadModel(config),
    args=args,
    train_dataset=data["train"],
    eval_dataset=data["test"],
)
last = get_last_checkpoint("runs/gpt") if os.path.isdir("runs/gpt") else None
trainer.train(resume_from_checkpoint=last)
trainer.save_model("gpt")
