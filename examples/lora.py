"""LoRA with peft: the base model stays frozen, small adapters are trained, and only they are saved.

paceline run --workers 2 examples/lora.py
"""

import math
import sysconfig
from pathlib import Path

import torch
import torch.nn.functional as F
from peft import LoraConfig, PeftModel, get_peft_model
from torch.utils.data import TensorDataset
from transformers import LlamaConfig, LlamaForCausalLM

import paceline

LENGTH, STEPS, ADAPTER = 64, 60, "adapter"
SMALL = LlamaConfig(
    vocab_size=256,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    max_position_embeddings=LENGTH,
    use_cache=False,
    bos_token_id=None,
    eos_token_id=None,
)


def base():
    """The frozen model. For a real one: AutoModelForCausalLM.from_pretrained("...")."""
    torch.manual_seed(0)
    return LlamaForCausalLM(SMALL)


def windows(files):
    text = torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8)
    return TensorDataset(text.unfold(0, LENGTH + 1, LENGTH))


def forward(model, batch):
    return model(batch[0][:, :-1].long()).logits


def loss(logits, batch):
    """Bits for the bytes that follow, and their number: the mean is over bytes."""
    following = batch[0][:, 1:].flatten().long()
    return F.cross_entropy(logits.flatten(0, 1), following, reduction="sum") / math.log(2), len(following)


def bits(logits, batch):
    return {"bits_per_byte": loss(logits, batch)}


files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
training, held_out = windows(files[1::4]), windows(files[:4])
config = LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj", "v_proj", "up_proj", "down_proj"])
trainer = paceline.Trainer(
    model=lambda: get_peft_model(base(), config),  # peft freezes the base: its parameters get no gradient
    forward=forward,
    loss=loss,
    optimizer=lambda params: torch.optim.AdamW(params, lr=1e-2),
    global_batch=16,
)
before = trainer.evaluate(held_out, bits)["bits_per_byte"]
for _ in trainer.steps(training, count=STEPS):
    pass
after = trainer.evaluate(held_out, bits)["bits_per_byte"]
print(f"{before:.3f} bits per byte before, {after:.3f} after")

if trainer.main:  # one worker writes
    trainer.model.save_pretrained(ADAPTER)  # adapter_config.json and adapter_model.safetensors: no base weights
    loaded = PeftModel.from_pretrained(base(), ADAPTER).eval()
    with torch.no_grad():
        total, count = loss(forward(loaded, held_out[:]), held_out[:])
    print(f"{total / count:.3f} with the adapter loaded from {ADAPTER}/")
