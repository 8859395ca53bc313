"""Pretrains a small GPT on the source of Python's standard library.

accelerate launch --num_processes 2 with_accelerate.py
"""

import os

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, set_seed
from datasets import load_dataset
from torch.utils.data import DataLoader
from transformers import (
    AutoTokenizer,
    GPT2Config,
    GPT2LMHeadModel,
    default_data_collator,
    get_cosine_schedule_with_warmup,
)

set_seed(0)
loading = DataLoaderConfiguration(split_batches=True)
accelerator = Accelerator(dataloader_config=loading)
tokenizer = AutoTokenizer.from_pretrained("llama")
config = GPT2Config(vocab_size=2000, n_positions=65, n_embd=64, n_layer=2, n_head=4)


def pack(rows):
    texts = [text + tokenizer.eos_token for text in rows["text"]]
    tokens = sum(tokenizer(texts)["input_ids"], [])
    blocks = [tokens[start : start + 65] for start in range(0, len(tokens) - 64, 64)]
    return {"input_ids": blocks, "labels": blocks}


with accelerator.main_process_first():
    data = load_dataset("source", sample_by="document")
    data = data.map(pack, batched=True, remove_columns="text")
collate = default_data_collator
train_loader = DataLoader(data["train"], 32, shuffle=True, collate_fn=collate)
test_loader = DataLoader(data["test"], 32, collate_fn=collate)

model = GPT2LMHeadModel(config)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.1)
scheduler = get_cosine_schedule_with_warmup(optimizer, 50, len(train_loader))
model, optimizer, scheduler, train_loader, test_loader = accelerator.prepare(
    model, optimizer, scheduler, train_loader, test_loader
)

done = 0
if os.path.isdir("runs/gpt"):
    done = max(int(name) for name in os.listdir("runs/gpt"))
    accelerator.load_state(f"runs/gpt/{done}")
for batch in accelerator.skip_first_batches(train_loader, done):
    model.train()
    loss = model(**batch).loss
    accelerator.backward(loss)
    accelerator.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()
    done += 1
    if done % 100 == 0:
        model.eval()
        losses = []
        for rows in test_loader:
            with torch.no_grad():
                each = model(**rows).loss.repeat(len(rows["input_ids"]))
            losses.append(accelerator.gather_for_metrics(each))
        held_out = torch.cat(losses).mean()
        accelerator.print(f"step {done}: {loss.item():.4f} {held_out:.4f}")
        accelerator.save_state(f"runs/gpt/{done}")
accelerator.save_model(model, "gpt")
accelerator.end_training()
