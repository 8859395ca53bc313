"""Fine-tunes a transformers model to tell Python code from English prose, line by line.

paceline run --workers 2 examples/finetune.py FOLDER    # a model folder, or a name on the Hugging Face hub
paceline run --workers 2 examples/finetune.py           # without one: a small new model, nothing downloaded

FOLDER is anything that AutoModelForSequenceClassification.from_pretrained() reads and whose tokens are bytes, for
example the export of examples/llama.py. With another model, use its tokenizer in `collate`.
"""

import ast
import sys
import sysconfig
from pathlib import Path

import torch
import torch.nn.functional as F
from transformers import AutoModelForSequenceClassification, LlamaConfig

import paceline

LENGTH, STEPS = 64, 150
SMALL = LlamaConfig(
    vocab_size=256,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    max_position_embeddings=LENGTH,
    bos_token_id=None,
    eos_token_id=None,
    pad_token_id=0,
    num_labels=2,
)


def lines():
    """(line, label) of the standard library's modules: 1 for lines of docstrings, 0 for lines of code."""
    for file in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[::3]:
        text = file.read_text()
        prose = set()
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Expr) and isinstance(getattr(node.value, "value", None), str):
                prose.update(range(node.lineno, node.end_lineno + 1))
        for number, line in enumerate(text.splitlines(), 1):
            if len(line.strip()) > 20 and not line.strip().startswith("#"):
                yield line.strip(), int(number in prose)


def collate(rows):
    """The bytes of each line, padded at the end with 0."""
    texts = [torch.tensor(list(line.encode()[:LENGTH])) for line, _ in rows]
    words = torch.nn.utils.rnn.pad_sequence(texts, batch_first=True)
    return {"input_ids": words, "attention_mask": (words > 0).long(), "labels": torch.tensor([k for _, k in rows])}


def model():
    if len(sys.argv) > 1:
        return AutoModelForSequenceClassification.from_pretrained(sys.argv[1], num_labels=2, pad_token_id=0).train()
    return AutoModelForSequenceClassification.from_config(SMALL)


def accuracy(logits, batch):
    return {"accuracy": ((logits.argmax(1) == batch["labels"]).sum(), len(logits))}


rows = list(lines())
held_out = rows[::20]
training = [row for number, row in enumerate(rows) if number % 20]
trainer = paceline.Trainer(
    model=model,
    forward=lambda model, batch: model(batch["input_ids"], attention_mask=batch["attention_mask"]).logits,
    loss=lambda logits, batch: F.cross_entropy(logits, batch["labels"]),
    optimizer=lambda params: torch.optim.AdamW(params, lr=1e-3),
    schedule=paceline.linear(STEPS, warmup=15),
    global_batch=32,
    clip_norm=1.0,
)
for report in trainer.steps(training, count=STEPS, collate=collate):
    if report.step % 50 == 0:
        print(f"step {report.step}: loss {report.loss:.3f}")

result = trainer.evaluate(held_out, accuracy, collate=collate)
print(f"{result['accuracy']:.1%} of {result['n']} held-out lines are recognised")
trainer.export("finetuned.safetensors")
