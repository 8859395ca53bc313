"""Contrastive learning on drawn data: two towers as CLIP has them, or two views through one network as SimCLR has. The
loss sees all 256 rows of a step, of which a worker computes 32 at a time.

paceline run --workers 2 examples/contrastive.py       # clip, or simclr if that is said
"""

import sys

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import paceline

BATCH, STEPS, WIDTH = 256, 30, 64


def drawn(rows, seed):
    """What a row is about, seen in two ways."""
    world, chance = torch.Generator().manual_seed(0), torch.Generator().manual_seed(seed)
    about = torch.randn(rows, 12, generator=chance)
    seen = [torch.tanh(about @ torch.randn(12, width, generator=world)) for width in (48, 40)]
    return TensorDataset(*(x + 0.3 * torch.randn(x.shape, generator=chance) for x in seen))


def tower(inputs):
    return nn.Sequential(nn.Linear(inputs, 4 * WIDTH), nn.GELU(), nn.Dropout(0.1), nn.Linear(4 * WIDTH, WIDTH))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.image, self.text = tower(48), tower(40) if kind == "clip" else None
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, image, text):
        if self.text is not None:
            return F.normalize(self.image(image)), F.normalize(self.text(text))
        views = [F.dropout(image + 0.2 * torch.randn_like(image), 0.2) for _ in range(2)]
        return tuple(F.normalize(self.image(view)) for view in views)


def clip(output, batch):
    """Radford et al., "Learning Transferable Visual Models From Natural Language Supervision", 2021."""
    image, text = output
    logits, own = trainer.model.scale.exp() * image @ text.t(), torch.arange(len(image), device=image.device)
    return (F.cross_entropy(logits, own) + F.cross_entropy(logits.t(), own)) / 2


def simclr(output, batch):
    """Chen et al., "A Simple Framework for Contrastive Learning of Visual Representations", 2020."""
    views = torch.cat(output)
    logits = trainer.model.scale.exp() * views @ views.t() - 1e4 * torch.eye(len(views), device=views.device)
    return F.cross_entropy(logits, torch.arange(len(views), device=views.device).roll(len(views) // 2))


def recall(output, batch):
    """For how many rows of a batch the nearest on the other side is its own."""
    one, other = output
    return {"recall": (((one @ other.t()).argmax(1) == torch.arange(len(one), device=one.device)).sum(), len(one))}


kind = sys.argv[1] if len(sys.argv) > 1 else "clip"
trainer = paceline.Trainer(
    model=Net,
    loss=clip if kind == "clip" else simclr,
    loss_over="batch",
    optimizer=lambda params: torch.optim.AdamW(params, lr=3e-3),
    forward=lambda model, batch: model(*batch),
    global_batch=BATCH,
)
for report in trainer.steps(drawn(8 * BATCH, seed=1), count=STEPS):
    if report.step % 10 == 0:
        trainer.log(loss=report.loss)
found = trainer.evaluate(drawn(BATCH, seed=2), recall)
print(f"{kind}: the nearest of {found['n']} is the right one for {found['recall']:.1%}")
trainer.export(f"{kind}.safetensors")
