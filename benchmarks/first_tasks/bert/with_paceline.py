"""Fine-tunes BERT to tell lines of code from lines of prose.

paceline run --workers 2 --run-dir runs/bert with_paceline.py
"""

import torch
from datasets import load_dataset
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    DataCollatorWithPadding,
)

import paceline

tokenizer = AutoTokenizer.from_pretrained("bert")
collate = DataCollatorWithPadding(tokenizer)
data = load_dataset("lines")
data = data.map(lambda row: tokenizer(row["text"], truncation=True))
data = data.remove_columns("text")


def accuracy(output, batch):
    right = output.logits.argmax(1) == batch["labels"]
    return {"accuracy": (right.sum(), len(right))}


trainer = paceline.Trainer(
    model=lambda: AutoModelForSequenceClassification.from_pretrained("bert").train(),
    loss=lambda output, batch: output.loss,
    optimizer=lambda params: torch.optim.AdamW(params, lr=5e-4),
    schedule=paceline.linear(warmup=20),
    global_batch=32,
    clip_norm=1.0,
)
trainer.keep_best("accuracy")
for report in trainer.steps(data["train"], epochs=3, collate=collate):
    if report.epoch_end:
        result = trainer.evaluate(data["test"], accuracy, collate=collate)
        print(f"epoch {report.epoch}: {report.loss:.4f} {result['accuracy']:.4f}")
trainer.load_best()
trainer.export("bert.safetensors")
