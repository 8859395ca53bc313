"""`context=` with more workers than heads: attention of some queries on each worker, as one process computes it."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import few_heads
import pytest
import torch
from agents import journal
from few_heads import BATCH, KINDS, RATE, STEPS, Model, rows
from launching import SCRIPTS, paceline
from oracle import Plain, apart, built, grid
from safetensors.torch import load_file

from paceline.parallel.token_attention import CausalChunks

PLANS = {
    "context=4 recompute=blocks": 4,
    "data=2 context=4": 8,
    "shard=2 zero=3 context=4": 8,
    "context=3": 3,
    "context=4 compile": 4,
    "tensor=2 context=2": 4,
    "pipeline=2 context=4": 8,
}


def expected(kind: str) -> dict[str, torch.Tensor]:
    model = built(partial(Model, kind))
    plain = Plain(
        model, few_heads.loss, [torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)], clip_norm=torch.inf
    )
    plain.train(grid(rows(kind), BATCH, count=STEPS))
    return dict(model.state_dict())


def check(folder: Path, workers: int, plan: str, *kinds: str) -> list[str]:
    """Trains and compares. Returns what is computed on full sequences, by kind."""
    options = ("--workers", str(workers), "--run-dir", folder / "run", "--plan", plan)
    paceline("run", *options, SCRIPTS / "few_heads.py", folder, *kinds, cwd=folder)
    for kind in kinds:
        assert apart(load_file(folder / f"{kind}.safetensors"), expected(kind)) < 1e-12, kind
    notes = [event["text"] for event in journal(folder / "run", "note")]
    texts = [text for text in notes if text.startswith("sequences are divided among")]
    return [text.partition("; ")[2].partition("verified on")[0].rstrip("; ") for text in texts]


def test_attention_with_more_workers_than_heads(tmp_path: Path) -> None:
    assert check(tmp_path, 4, "context=4", "grouped", "documents") == ["", ""]


@pytest.mark.slow
def test_every_kind_of_attention_with_more_workers_than_heads(tmp_path: Path) -> None:
    full = "each computes sequences of length 13 in full, which 4 does not divide"
    assert check(tmp_path, 4, "context=4", *KINDS) == [full if kind == "indivisible" else "" for kind in KINDS]


@pytest.mark.slow
@pytest.mark.parametrize("plan", PLANS)
def test_attention_with_more_workers_than_heads_under_mixtures(plan: str, tmp_path: Path) -> None:
    check(tmp_path, PLANS[plan], plan, "causal", "grouped", "everything", "documents")


@pytest.mark.slow
def test_bytes_of_attention_by_tokens_are_predicted(tmp_path: Path) -> None:
    """Causal attention also moves chunks of queries, results and their gradients: the workers 0 and 2 have one of their
    two chunks already, the others none.
    """
    sent: dict[str, list[list[int]]] = {}
    for kind in ("grouped", "everything"):
        options = ("--workers", "4", "--run-dir", kind, "--plan", "context=4")
        paceline("run", *options, SCRIPTS / "few_heads.py", tmp_path, kind, cwd=tmp_path)
        (figures,) = journal(tmp_path / kind, "figures")
        sent[kind] = [[one["sent"]["context"] for one in figures[side]] for side in ("measured", "predicted")]
    token = 2 * 2 * few_heads.HEADS * few_heads.HEAD * 8  # queries and results, there and back, in float64
    each = [BATCH * 2 * tokens * token for tokens in (3, 6, 3, 6)]  # of two blocks
    for causal, everything in zip(sent["grouped"], sent["everything"], strict=True):
        assert [a - b for a, b in zip(causal, everything, strict=True)] == each


@pytest.mark.parametrize(("length", "size"), [(64, 4), (96, 3), (4096, 8), (200, 5)])
def test_causal_work_is_balanced(length: int, size: int) -> None:
    chunks = CausalChunks(length, size)
    pairs = [sum(chunks.lengths[n] * chunks.ends[n] for n in chunks.computed_by(worker)) for worker in range(size)]
    assert max(pairs) <= 1.1 * sum(pairs) / size
    computed = sorted(chunk for worker in range(size) for chunk in chunks.computed_by(worker))
    assert computed == [*range(2 * size)]
    assert sum(chunks.lengths) == length
    assert sum(pairs) < 0.7 * length**2
