"""A small Llama of Hugging Face's transformers, on the bytes of this very Python's standard library. The model is made
from its configuration, and never whole on any worker if the plan divides it. Each of these gives the same training:

paceline run --workers 2 --run-dir runs/llama --plan "shard=2 recompute=blocks" examples/llama.py
paceline run --workers 4 --run-dir runs/llama --plan "pipeline=2 tensor=2" examples/llama.py
paceline run --workers 2 --run-dir runs/llama --plan "context=2" examples/llama.py

The same folder again resumes, under any of them. At the end:

paceline export runs/llama llama     # Hugging Face's folder; CONFIG.save_pretrained("llama") adds the configuration
"""

import math
import sysconfig
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.utils.data import Subset, TensorDataset
from transformers import LlamaConfig, LlamaForCausalLM

import paceline

LENGTH, STEPS = 96, 200
CONFIG = LlamaConfig(
    vocab_size=256,
    hidden_size=128,
    intermediate_size=352,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=LENGTH,
    use_cache=False,
    bos_token_id=None,  # bytes have none
    eos_token_id=None,
)


def source():
    """Windows of the modules' bytes, and of every twentieth module's, held out."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    for part in ([f for i, f in enumerate(files) if i % 20], files[::20]):
        text = torch.frombuffer(bytearray(b"".join(f.read_bytes() for f in part)), dtype=torch.uint8)
        yield TensorDataset(text.unfold(0, LENGTH + 1, LENGTH))


def loss(output, batch):
    """The bits that the model needs for the bytes that follow, and their number."""
    after = batch[0][:, 1:].flatten().long()
    return F.cross_entropy(output.flatten(0, 1), after, reduction="sum") / math.log(2), len(after)


training, held_out = source()
some = Subset(held_out, range(0, len(held_out), max(1, len(held_out) // 128)))
trainer = paceline.Trainer(
    model=lambda: LlamaForCausalLM(CONFIG),
    loss=loss,
    optimizer=lambda params: torch.optim.AdamW(params, lr=3e-3, betas=(0.9, 0.98), weight_decay=0.05),
    global_batch=16,
    forward=lambda model, batch: model(batch[0][:, :-1].long()).logits,
    schedule=lambda step: min((step + 1) / 30, 0.05 + 0.95 * math.cos(math.pi / 2 * min(step / STEPS, 1)) ** 2),
    clip_norm=1.0,
)
for report in trainer.steps(training, count=STEPS):
    if report.step % 60 == 0:
        trainer.evaluate(some, lambda output, batch: {"bits_per_byte": loss(output, batch)})

result = trainer.evaluate(some, lambda output, batch: {"bits_per_byte": loss(output, batch)})
print(f"{result['bits_per_byte']:.2f} bits per byte on modules that it has not seen")
