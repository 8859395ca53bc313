"""Fine-tunes BERT to tell lines of code from lines of prose.

torchrun --nproc-per-node 2 with_hf_trainer.py
"""

import os

from datasets import load_dataset
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    Trainer,
    TrainingArguments,
)
from transformers.trainer_utils import get_last_checkpoint

tokenizer = AutoTokenizer.from_pretrained("bert")
data = load_dataset("lines")
data = data.map(lambda row: tokenizer(row["text"], truncation=True))


def accuracy(result):
    logits, labels = result
    return {"accuracy": (logits.argmax(1) == labels).mean()}


args = TrainingArguments(
    "runs/bert",
    learning_rate=5e-4,
    warmup_steps=20,
    per_device_train_batch_size=32,
    num_train_epochs=3,
    eval_strategy="epoch",
    save_strategy="epoch",
    logging_strategy="epoch",
    load_best_model_at_end=True,
    metric_for_best_model="accuracy",
    report_to="none",
)
trainer = Trainer(
    model=AutoModelForSequenceClassification.from_pretrained("bert"),
    args=args,
    train_dataset=data["train"],
    eval_dataset=data["test"],
    processing_class=tokenizer,
    compute_metrics=accuracy,
)
last = get_last_checkpoint("runs/bert") if os.path.isdir("runs/bert") else None
trainer.train(resume_from_checkpoint=last)
trainer.save_model("bert-tuned")
