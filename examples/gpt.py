"""A byte-level GPT on the source of this very Python's standard library: real text, nothing downloaded, about a minute.

python examples/gpt.py                              # one worker
paceline run --workers 2 examples/gpt.py            # two, and the same training
"""

import math
import sysconfig
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Subset, TensorDataset

import paceline

LENGTH, WIDTH, LAYERS, STEPS = 128, 160, 3, 480


def source():
    """Windows of the standard library's bytes without its tests, and of every twentieth file's, held out."""
    lib = Path(sysconfig.get_paths()["stdlib"])
    files = [f for f in sorted(lib.rglob("*.py")) if "test" not in (p := str(f.relative_to(lib))) and "site-p" not in p]
    for part in ([f for i, f in enumerate(files) if i % 20], files[::20]):
        text = torch.frombuffer(bytearray(b"".join(f.read_bytes() for f in part)), dtype=torch.uint8)
        yield TensorDataset(text.unfold(0, LENGTH + 1, LENGTH))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.bytes = nn.ModuleList(nn.Embedding(256, WIDTH) for _ in range(4))  # of a byte and the three before it
        self.places = nn.Parameter(0.02 * torch.randn(LENGTH, WIDTH))
        block = nn.TransformerEncoderLayer(WIDTH, 5, 4 * WIDTH, 0.0, F.gelu, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(block, LAYERS, nn.LayerNorm(WIDTH), enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, 256)

    def forward(self, text):
        length = text.shape[1]
        hidden = sum(embed(F.pad(text, (lag, 0))[:, :length]) for lag, embed in enumerate(self.bytes))
        mask = nn.Transformer.generate_square_subsequent_mask(length, text.device)
        return self.head(self.blocks(hidden + self.places[:length], mask, is_causal=True))


def loss(output, batch):
    """The bits that the model needs for the bytes that follow, and their number."""
    after = batch[0][:, 1:].flatten().long()
    return F.cross_entropy(output.flatten(0, 1), after, reduction="sum") / math.log(2), len(after)


@torch.no_grad()
def go_on(text, length=400):
    written = torch.tensor([list(text.encode())], device=trainer.device)
    for _ in range(length):
        chances = F.softmax(trainer.model.eval()(written[:, -LENGTH:])[:, -1] / 0.7, dim=1)
        written = torch.cat([written, torch.multinomial(chances, 1)], dim=1)
    return bytes(written[0].tolist()).decode(errors="replace")


training, held_out = source()
some = Subset(held_out, range(0, len(held_out), len(held_out) // 128))
trainer = paceline.Trainer(
    model=GPT,
    loss=loss,
    optimizer=lambda params: torch.optim.AdamW(params, lr=4e-3, betas=(0.9, 0.98), weight_decay=0.05),
    global_batch=16,
    forward=lambda model, batch: model(batch[0][:, :-1].long()),
    schedule=lambda step: min((step + 1) / 40, 0.02 + 0.98 * math.cos(math.pi / 2 * min(step / STEPS, 1)) ** 2),
    clip_norm=1.0,
)
for report in trainer.steps(training, count=STEPS):
    if report.step % 120 == 0:
        trainer.evaluate(some, lambda output, batch: {"bits_per_byte": loss(output, batch)})

result = trainer.evaluate(some, lambda output, batch: {"bits_per_byte": loss(output, batch)})
trainer.export("gpt.safetensors")
trainer.log(sample=(sample := go_on("def main(")))
print(f"{result['bits_per_byte']:.2f} bits per byte on files that it has not seen; it writes:\n\n{sample}\n")
