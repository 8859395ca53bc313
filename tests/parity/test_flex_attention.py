"""flex_attention with divided heads and sequences, beside dense attention in plain PyTorch in one process.

Torch refuses its backward on a CPU, where it has no kernel. The script here takes this check away: then torch computes
with its own unfused formula.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from agents import journal
from launching import train_basics
from oracle import apart, built, grid
from safetensors.torch import load_file

STEPS, BATCH, MICRO = 4, 24, 6
BODY = """
from torch.nn.attention import flex_attention as torchs
LENGTH, HEADS, WIDTH = 12, 4, 16
def slopes(head):
    return 0.1 * (head + 1)
def sees(documents, row, head, query, key):
    # Odd heads see the last three tokens alone.
    near = (head % 2 == 0) | (query - key < 3)
    return (documents[row, query] == documents[row, key]) & (query >= key) & near
class Block(nn.Module):
    def __init__(self, groups, learned):
        super().__init__()
        self.groups = groups
        self.query, self.key = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH * groups // HEADS)
        self.value, self.out = nn.Linear(WIDTH, WIDTH * groups // HEADS), nn.Linear(WIDTH, WIDTH)
        if learned:
            self.bias = nn.Parameter(torch.randn(HEADS))
    def forward(self, x, documents=None):
        if documents is None:
            documents = torch.zeros(x.shape[:2], dtype=torch.long)
        parts = self.query(x), self.key(x), self.value(x)
        query, key, value = (part.unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for part in parts)
        attended, weight = (self.dense if DENSE else self.flexible)(query, key, value, documents)
        attended = attended * torch.sigmoid(weight).unsqueeze(-1)
        return x + self.out(attended.transpose(1, 2).flatten(2))
    def flexible(self, query, key, value, documents):
        bias = getattr(self, "bias", None)
        def score(score, row, head, query, key):
            score = score + slopes(head) * (key - query)
            return score if bias is None else score * bias[head]
        mask = lambda row, head, query, key: sees(documents, row, head, query, key)
        rows, length = documents.shape
        block = torchs.create_block_mask(mask, rows, HEADS, length, length, "cpu", BLOCK_SIZE=4)
        aux = torchs.AuxRequest(lse=True)
        made, aux = flex(query, key, value, score, block, enable_gqa=self.groups < HEADS, return_aux=aux)
        return made, aux.lse
    def dense(self, query, key, value, documents):
        key, value = (x.repeat_interleave(HEADS // self.groups, 1) for x in (key, value))
        length = documents.shape[1]
        row, head, at, to = torch.meshgrid(*map(torch.arange, (len(documents), HEADS, length, length)), indexing="ij")
        scores = query @ key.mT / query.shape[-1] ** 0.5 + slopes(head) * (to - at)
        if hasattr(self, "bias"):
            scores = scores * self.bias[head]
        scores = scores.masked_fill(~sees(documents, row, head, at, to), -float("inf"))
        return scores.softmax(-1) @ value, scores.logsumexp(-1)
class Model(nn.Module):
    def __init__(self, groups, learned):
        super().__init__()
        self.first = nn.Linear(10, WIDTH * LENGTH)
        self.blocks = nn.ModuleList(Block(groups, learned) for _ in range(2))
        self.head = nn.Linear(WIDTH, 2)
    def forward(self, x):
        documents = (torch.arange(LENGTH) >= 5 + (x[:, :1] > 0) * 3).long()
        x = self.first(x).unflatten(-1, (LENGTH, WIDTH))
        for block in self.blocks:
            x = block(x, documents)
        return self.head(x).mean(1)
def optimizer(params):
    return torch.optim.AdamW(params, lr=0.01)
def summed(output, batch):
    return F.cross_entropy(output, batch[1], reduction="sum"), len(batch[1])
"""
TRAIN = """
import os
torchs._validate_device = lambda *tensors: None
flex = torch.compile(torchs.flex_attention, backend="eager") if os.environ.get("COMPILED") else torchs.flex_attention
DENSE, (groups, learned) = False, map(int, os.environ["MODEL"].split())
t = paceline.Trainer(lambda: Model(groups, learned).double(), summed, optimizer, global_batch=24)
for _ in t.steps(data, count=4): pass
t.export("out.safetensors")
"""
MADE: dict[str, Any] = {"DENSE": True}
exec("import torch, torch.nn.functional as F\nfrom torch import nn\n" + BODY, MADE)
HEADS, GROUPS, ONE, LEARNED = "4 0", "2 0", "1 0", "2 1"  # heads of keys and values, and whether scores are learned


def data() -> Any:
    x = torch.randn(96, 10, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return torch.utils.data.TensorDataset(x, (x.sum(1) > 0).long())


def by_hand(model: str) -> dict[str, torch.Tensor]:
    """Trains in one process with dense attention."""
    net = built(lambda: MADE["Model"](*map(int, model.split())).double())
    update = MADE["optimizer"](net.parameters())
    for (batch,) in grid(data(), BATCH, BATCH, count=STEPS):
        update.zero_grad()
        total, count = MADE["summed"](net(batch[0]), batch)
        (total / count).backward()
        update.step()
    return dict(net.state_dict())


def train(folder: Path, workers: int, words: str, model: str, code: int = 0, **env: str) -> str:
    options = ("--max-restarts", "0", "--plan", f"micro={MICRO} {words}")
    return train_basics(folder, BODY + TRAIN, workers, *options, code=code, MODEL=model, **env).stderr


CASES = [
    (1, "", LEARNED, ""),
    (2, "context=2", LEARNED, ""),
    (2, "context=2", HEADS, "1"),
    (2, "context=2", ONE, ""),
    (3, "context=3", GROUPS, ""),
    (4, "context=4", GROUPS, ""),
    (2, "tensor=2", GROUPS, ""),
    (2, "tensor=2", HEADS, "1"),
    (2, "tensor=2", ONE, ""),
    (4, "tensor=2 context=2", HEADS, ""),
    (4, "tensor=2 context=2", GROUPS, "1"),
    (2, "context=2 recompute=blocks", HEADS, ""),
    (4, "pipeline=2 context=2", HEADS, ""),
    (4, "shard=2 zero=3 tensor=2", HEADS, ""),
]


@pytest.mark.parametrize(
    ("workers", "words", "model", "compiled"),
    [(4, "tensor=2 context=2", GROUPS, ""), *(pytest.param(*case, marks=pytest.mark.slow) for case in CASES)],
)
def test_divided_heads_and_sequences_train_as_dense_attention(
    workers: int, words: str, model: str, compiled: str, tmp_path: Path
) -> None:
    train(tmp_path, workers, words, model, COMPILED=compiled)
    assert apart(load_file(tmp_path / "out.safetensors"), by_hand(model)) <= 1e-12
    notes = " ".join(str(event["text"]) for event in journal(tmp_path / "out", "note"))
    if words in ("context=2", "context=4", "tensor=2 context=2"):
        assert "; verified on one micro-batch against full sequences" in notes, "heads are not divided"
    if words == "context=3":
        assert "each computes flex_attention on the full sequence" in notes
