"""Trains a model with all that depends on who computes what: dropout, BatchNorm, clipping, a schedule, an evaluation in
the body, the user's own state. Usage: survivor.py OUT STEPS [LOADERS]

With BALLAST there are that many megabytes of frozen parameters besides, so that so many workers write a checkpoint.
All is of DTYPE, if it is given. With WHOLE the same model has no blocks, with ATTENTION it has such that drop inside of
attention, with EXPERTS such that have experts. With OVER the loss, and the metric, are over the whole global batch.
With KINDS the workers are of two kinds: the first two compute with one thread, the others with two.
"""

import json
import os
import sys
import time

import expert_models
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import paceline

over = os.environ.get("OVER")
if "KINDS" in os.environ:
    torch.set_num_threads(1 + int(os.environ["PACELINE_RANK"]) // 2)
out, steps, loaders = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]) if len(sys.argv) > 3 else 0
torch.set_default_dtype(getattr(torch, os.environ.get("DTYPE", "float32")))
chance = torch.Generator().manual_seed(1)
rows = torch.randn(200, 8, generator=chance), torch.randint(0, 3, (200,), generator=chance)
data, held_out = TensorDataset(*rows), TensorDataset(rows[0][:40], rows[1][:40])


class Whole(nn.Module):
    """A sequence of which nobody sees that it is one."""

    def __init__(self, *layers):
        super().__init__()
        for number, layer in enumerate(layers):
            self.add_module(str(number), layer)

    def forward(self, x):
        for layer in self.children():
            x = layer(x)
        return x


class Asks(nn.Module):
    """Asks a mixture of experts, without an auxiliary loss."""

    def __init__(self, mixture):
        super().__init__()
        self.mixture, self.norm = mixture, nn.LayerNorm(8)

    def forward(self, x):
        return x + F.dropout(self.mixture(self.norm(x))[0], 0.2, self.training)


def model():
    if os.environ.get("ATTENTION"):
        # No bias, or the keys' would do nothing but what Adam makes of rounding.
        blocks = [nn.TransformerEncoderLayer(8, 2, 16, 0.2, batch_first=True, bias=False) for _ in range(2)]
        return nn.Sequential(nn.Linear(8, 32), nn.Unflatten(1, (4, 8)), *blocks, nn.Flatten(), nn.Linear(32, 3))
    if os.environ.get("EXPERTS"):
        blocks = [Asks(expert_models.Mixture(4, width=8)) for _ in range(2)]
        return nn.Sequential(nn.Linear(8, 32), nn.Unflatten(1, (4, 8)), *blocks, nn.Flatten(), nn.Linear(32, 3))
    # No bias before a BatchNorm: its gradient is zero in theory, rounding in practice, and Adam makes much of that.
    layers = nn.Linear(8, 32, bias=False), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 32), nn.ReLU()
    made = (Whole if os.environ.get("WHOLE") else nn.Sequential)(*layers, nn.Linear(32, 3))
    if ballast := int(os.environ.get("BALLAST", "0")):
        values = torch.arange(ballast << 18, dtype=torch.float32).view(-1, 1024)
        made.register_parameter("ballast", nn.Parameter(values, requires_grad=False))
    return made


def contrast(output, batch):
    """Rows of the same class are near each other, and those of another one are not."""
    logits = output @ output.t() + trainer.model[0].weight.mean()
    return F.cross_entropy(logits.fill_diagonal_(-1e4), logits.detach().argsort(1)[:, -2])


def spread(output, batch):
    return {"right": (output.std(0).sum() * len(output), len(output))}


def right(output, batch):
    return {"right": ((output.argmax(1) == batch[1]).sum(), len(batch[1]))}


def has_happened():
    """What long runs wait for: so many lines of RUN/FILE that hold a word."""
    file, word, count = os.environ["WAIT"].split()
    path = os.path.join(os.environ["PACELINE_RUN_DIR"], file)
    if not os.path.exists(path):
        return False
    with open(path) as lines:
        return sum(word in line for line in lines) >= int(count)


def pause(step):
    """It happens during the first steps, as a rule; the others wait longer, 50 seconds together."""
    until = time.monotonic() + (90 / steps if step > steps * 4 // 9 else 0.05)
    while not has_happened() and (left := until - time.monotonic()) > 0:
        time.sleep(min(left, 0.05))


trainer = paceline.Trainer(
    model,
    loss=contrast if over else lambda output, batch: F.cross_entropy(output, batch[1]),
    optimizer=lambda params: torch.optim.AdamW(params, lr=1e-2),
    schedule=lambda step: 1 / (1 + step / 50),
    global_batch=24,
    clip_norm=1.0,
    plan="micro=2 exact",
    loss_over=over,
)
trainer.state["seen"] = 0
losses = []
for report in trainer.steps(data, count=steps, loader={"num_workers": loaders}):
    if "WAIT" in os.environ:
        pause(report.step)
    trainer.state["seen"] += report.samples
    losses.append([report.step, report.loss])
    if report.step % 5 == 0:
        losses[-1].append(trainer.evaluate(held_out, spread if over else right)["right"])
    if report.step % 10 == 0:
        trainer.save()
trainer.export(f"{out}.safetensors")
if trainer.main:
    with open(f"{out}.json", "w") as file:
        json.dump({"seen": trainer.state["seen"], "losses": losses[-5:]}, file)
