"""Who likes what: two towers, as recommenders have them, over tables of which a step touches few rows. With sparse=True
only these rows travel between workers; few people and things are in most of what is seen, as everywhere.

paceline run --workers 2 examples/recommend.py       # or "dense", to compare bytes and loss
paceline run --workers 2 --plan "server=2 staleness=4" examples/recommend.py        # nobody waits for a straggler
"""

import sys

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import paceline

USERS, ITEMS, TASTES, WIDTH, BATCH, STEPS = 50_000, 200_000, 20, 32, 512, 300
sparse = "dense" not in sys.argv[1:]


def seen(rows, seed):
    """Users, items, and whether they liked these: by the taste of the one and the kind of the other."""
    world, chance = torch.Generator().manual_seed(0), torch.Generator().manual_seed(seed)
    users, items = ((n ** torch.rand(rows, generator=chance)).long() for n in (USERS, ITEMS))  # skewed, as Zipf has it
    likes = torch.rand(TASTES, TASTES, generator=world).pow(2)[users * 7919 % TASTES, items * 104729 % TASTES]
    return TensorDataset(users, items, (torch.rand(rows, generator=chance) < likes).float())


def tower(count):
    return nn.Sequential(
        nn.Embedding(count, WIDTH, sparse=sparse), nn.Linear(WIDTH, 2 * WIDTH), nn.ReLU(), nn.Linear(2 * WIDTH, WIDTH)
    )


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.users, self.items, self.bias = tower(USERS), tower(ITEMS), nn.Parameter(torch.zeros(1))

    def forward(self, users, items):
        return (self.users(users) * self.items(items)).sum(1) / WIDTH**0.5 + self.bias


def optimizers(params):
    """Those of the tables step the rows that were touched alone."""
    tables = [param for name, param in params if name.endswith("0.weight")]
    rest = [(name, param) for name, param in params if not name.endswith("0.weight")]
    return [torch.optim.Adagrad(tables, lr=0.05), torch.optim.AdamW(rest, lr=3e-3)]


def right(output, batch):
    return {"right": (((output > 0) == (batch[2] > 0.5)).sum(), len(output))}


trainer = paceline.Trainer(
    model=Net,
    loss=lambda output, batch: F.binary_cross_entropy_with_logits(output, batch[2]),
    optimizer=optimizers,
    forward=lambda model, batch: model(batch[0], batch[1]),
    global_batch=BATCH,
)
for report in trainer.steps(seen(STEPS * BATCH, seed=1)):
    if report.step % 50 == 0:
        trainer.log(loss=report.loss)
found = trainer.evaluate(seen(20_000, seed=2), right)
print(f"right for {found['right']:.1%} of {found['n']} that were not seen")
trainer.export("recommend.safetensors")
