"""Fine-tunes a Llama with LoRA on questions and answers.

paceline run --workers 2 --run-dir runs/lora with_paceline.py
"""

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

import paceline

tokenizer = AutoTokenizer.from_pretrained("llama")
lora = LoraConfig(r=8, lora_alpha=16, target_modules="all-linear")


def documents(file):
    rows = paceline.data.JsonLines(file)
    texts = [row["question"] + row["answer"] + tokenizer.eos_token for row in rows]
    return paceline.data.PackedDocuments(tokenizer(texts)["input_ids"], 128)


def loss(output, batch):
    count = (batch["labels"][:, 1:] != -100).sum()
    return output.loss * count, count


trainer = paceline.Trainer(
    model=lambda: get_peft_model(AutoModelForCausalLM.from_pretrained("llama"), lora),
    forward=lambda model, batch: model(**batch, use_cache=False),
    loss=loss,
    optimizer=lambda params: torch.optim.AdamW(params, lr=1e-2),
    schedule=paceline.cosine(warmup=10),
    global_batch=16,
)
for report in trainer.steps(documents("questions/train.jsonl"), epochs=2):
    if report.epoch_end:
        result = trainer.evaluate(documents("questions/test.jsonl"))
        print(f"epoch {report.epoch}: {report.loss:.4f} {result['loss']:.4f}")
if trainer.main:
    trainer.model.save_pretrained("adapter")
