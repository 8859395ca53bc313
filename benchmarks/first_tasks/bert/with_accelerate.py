"""Fine-tunes BERT to tell lines of code from lines of prose.

accelerate launch --num_processes 2 with_accelerate.py
"""

import os

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, set_seed
from datasets import load_dataset
from torch.utils.data import DataLoader
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    DataCollatorWithPadding,
    get_linear_schedule_with_warmup,
)

set_seed(0)
loading = DataLoaderConfiguration(split_batches=True)
accelerator = Accelerator(dataloader_config=loading)
tokenizer = AutoTokenizer.from_pretrained("bert")
collate = DataCollatorWithPadding(tokenizer)
with accelerator.main_process_first():
    data = load_dataset("lines")
    data = data.map(lambda row: tokenizer(row["text"], truncation=True))
    data = data.remove_columns("text")
train_loader = DataLoader(data["train"], 32, shuffle=True, collate_fn=collate)
test_loader = DataLoader(data["test"], 32, collate_fn=collate)

model = AutoModelForSequenceClassification.from_pretrained("bert")
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4)
steps = 3 * len(train_loader)
scheduler = get_linear_schedule_with_warmup(optimizer, 20, steps)
model, optimizer, scheduler, train_loader, test_loader = accelerator.prepare(
    model, optimizer, scheduler, train_loader, test_loader
)

first, best = 0, 0.0
if os.path.isdir("runs/bert"):
    first = 1 + max(int(name) for name in os.listdir("runs/bert"))
    accelerator.load_state(f"runs/bert/{first - 1}")
for epoch in range(first, 3):
    model.train()
    for batch in train_loader:
        loss = model(**batch).loss
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    model.eval()
    right = 0
    for batch in test_loader:
        with torch.no_grad():
            guess = model(**batch).logits.argmax(1)
        guess, label = accelerator.gather_for_metrics((guess, batch["labels"]))
        right += (guess == label).sum().item()
    accuracy = right / len(data["test"])
    accelerator.print(f"epoch {epoch}: {loss.item():.4f} {accuracy:.4f}")
    accelerator.save_state(f"runs/bert/{epoch}")
    if accuracy > best:
        best = accuracy
        accelerator.save_model(model, "bert-tuned")
accelerator.end_training()
