"""Which rows a step sees: rare classes more often, or rows of similar length together. Both are an `order=`.

python examples/sampling.py                         # rare classes more often
python examples/sampling.py length                  # rows of similar length together
paceline run --workers 2 examples/sampling.py       # two workers see the same rows
"""

import functools
import sys

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset

import paceline

ROWS, BATCH, EPOCHS, WORDS = 6000, 60, 4, 50


class Sentences(Dataset):
    """Rows of 5 to 60 random words. One row in 20 has label 1: every seventh word of
    it is word 7."""

    def __init__(self, seed):
        draw = torch.Generator().manual_seed(seed)
        self.labels = (torch.rand(ROWS, generator=draw) < 0.05).long()
        self.lengths = torch.randint(5, 61, (ROWS,), generator=draw)
        self.words = torch.randint(1, WORDS, (ROWS, 60), generator=draw)
        often = torch.rand(ROWS, 60, generator=draw) < 0.15
        self.words[often & (self.labels == 1)[:, None]] = 7

    def __len__(self):
        return ROWS

    def __getitem__(self, row):
        return self.words[row, : self.lengths[row]], self.labels[row]


def pad(rows):
    """A micro-batch of sentences, padded with 0 to the longest of them."""
    words = nn.utils.rnn.pad_sequence([words for words, _ in rows], batch_first=True)
    return words, torch.stack([label for _, label in rows])


def balanced(labels):
    """An order in which both classes are equally frequent: rows are drawn with replacement, weighted by class."""
    weights = 1.0 / labels.bincount()[labels]

    @functools.lru_cache(maxsize=2)
    def drawn(size, seed, epoch):
        draw = torch.Generator().manual_seed(seed + epoch)  # the same on all workers, new in each epoch
        return torch.multinomial(weights, size, replacement=True, generator=draw)

    return lambda position, size, seed, epoch: int(drawn(size, seed, epoch)[position])


def bucketed(lengths, rows):
    """An order in which `rows` consecutive rows have similar lengths, so that little is padded."""
    by_length = lengths.argsort(stable=True)

    def order(position, size, seed, epoch):
        bucket, offset = divmod(position, rows)
        shuffled = paceline.sample_index(bucket, size // rows, seed, epoch) if bucket < size // rows else bucket
        return int(by_length[shuffled * rows + offset])

    return order


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.EmbeddingBag(WORDS, 16, padding_idx=0)
        self.head = nn.Linear(16, 2)

    def forward(self, words):
        return self.head(self.embed(words))


def rates(output, batch):
    """The rate of the rare class's rows that are found, and of the others that are not mistaken for it."""
    said, label = output.argmax(1), batch[1]
    return {name: ((said == label)[label == k].sum(), (label == k).sum()) for k, name in enumerate(("common", "rare"))}


training, held_out = Sentences(seed=1), Sentences(seed=2)
by_length = sys.argv[1:] == ["length"]
trainer = paceline.Trainer(
    model=Net,
    forward=lambda model, batch: model(batch[0]),
    loss=lambda output, batch: F.cross_entropy(output, batch[1]),
    optimizer=lambda params: torch.optim.AdamW(params, lr=2e-2),
    global_batch=BATCH,
)
order = bucketed(training.lengths, rows=BATCH) if by_length else balanced(training.labels)
for _ in trainer.steps(training, epochs=EPOCHS, collate=pad, order=order):
    pass
result = trainer.evaluate(held_out, rates, collate=pad)
print(f"found {result['rare']:.0%} of the rare rows, and {result['common']:.0%} of the common ones")
