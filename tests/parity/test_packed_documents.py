"""Packed documents: each trains as if it were alone, and attention is spread evenly over workers."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from launching import SCRIPTS, TRANSFORMERS, paceline
from oracle import apart, built
from packed import BATCH, LENGTH, MODELS, RATE, STEPS, documents, forward, loss
from safetensors.torch import load_file
from token_folders import write_folder
from torch.nn.functional import scaled_dot_product_attention

from paceline.data import PackedDocuments, Tokens, document_ids, document_mask, document_offsets, pack
from paceline.errors import DatasetError, UsageError

PLANS = {"micro=1": 1, "context=2": 2, "context=3": 3, "tensor=2": 2, "pipeline=2": 2, "data=3": 3}
PLANS |= {"tensor=2 context=2": 4, "shard=2 zero=3": 2}


METHODS = ["best-fit", "first-fit", "concatenate"]


def one_by_one(name: str, method: str = "best-fit") -> tuple[dict[str, torch.Tensor], list[list[float]]]:
    """Trains with each document by itself, in plain PyTorch."""
    model, source = built(MODELS[name]), documents()
    rows = pack(source, LENGTH, method)
    order, optimizer = rows.order(BATCH), torch.optim.AdamW(model.parameters(), lr=RATE)
    figures = []
    for step in range(STEPS):
        total, count = torch.zeros((), dtype=torch.float64), 0
        for position in range(step * BATCH, (step + 1) * BATCH):
            epoch, within = divmod(position, len(rows))
            for number, start, stop in rows.pieces(order(within, len(rows), 0, epoch)):
                ids, labels = (source[number][key][None, start:stop] for key in ("input_ids", "labels"))
                batch = {"input_ids": ids, "labels": labels, "position_ids": torch.arange(stop - start)[None]}
                part, counted = loss(forward(model, batch), batch)
                total, count = total + part, count + counted
        optimizer.zero_grad()
        (total / count).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), torch.inf)
        figures.append([float(total.detach()) / count, float(norm)])
        optimizer.step()
    return dict(model.state_dict()), figures


@pytest.mark.parametrize("name", [pytest.param("llama", marks=pytest.mark.slow), "own"])
@pytest.mark.parametrize(
    "plan", [pytest.param(plan, marks=[] if plan == "context=3" else pytest.mark.slow) for plan in PLANS]
)
def test_packed_documents_train_as_one_by_one(plan: str, name: str, tmp_path: Path) -> None:
    """The workers of `data=3` have unequal shares of six micro-batches. Llama's norms are computed in float32."""
    bound = 1e-12 if name == "own" else 1e-6
    command = ("run", "--workers", str(PLANS[plan]), "--run-dir", "run", "--plan", plan)
    weighed = {"PACELINE_SHARES": "3,2,1"} if plan == "data=3" else {}
    env = weighed | (TRANSFORMERS if name == "llama" else {})
    done = paceline(*command, SCRIPTS / "packed.py", "out", name, METHODS[0], cwd=tmp_path, **env)
    weights, figures = one_by_one(name)
    assert apart(load_file(tmp_path / "out.safetensors"), weights) < bound
    for found, expected in zip(json.loads((tmp_path / "out.json").read_text()), figures, strict=True):
        assert found == pytest.approx(expected, rel=bound)
    assert not weighed or "3, 2, 1" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS[1:])
def test_rows_of_each_method_train_as_their_documents_one_by_one(method: str, tmp_path: Path) -> None:
    options = ("--workers", "3", "--run-dir", "run", "--plan", "data=3")
    paceline("run", *options, SCRIPTS / "packed.py", "out", "own", method, cwd=tmp_path)
    weights, figures = one_by_one("own", method)
    assert apart(load_file(tmp_path / "out.safetensors"), weights) < 1e-12
    for reported, expected in zip(json.loads((tmp_path / "out.json").read_text()), figures, strict=True):
        assert reported == pytest.approx(expected, rel=1e-12)


def test_no_document_has_a_gradient_by_another() -> None:
    rows = PackedDocuments([[1, 2, 3, 4], [5, 6, 7], [8, 9]], 10)
    (row,) = rows  # type: ignore[misc]
    model = built(MODELS["own"])
    seen: list[torch.Tensor] = []
    hook = model.words.register_forward_hook(  # type: ignore[operator, union-attr]
        lambda module, inputs, output: seen.append(output.requires_grad_()) or output
    )
    batch = {key: value[None] for key, value in row.items()}
    logits = forward(model, batch)
    hook.remove()
    ends = [0, 4, 7, 9, 10]
    for begin, end in pairwise(ends):
        gradient = torch.autograd.grad(logits[0, begin:end].square().sum(), seen[0], retain_graph=True)[0][0]
        assert not gradient[:begin].any()
        assert not gradient[end:].any()
        assert gradient[begin:end].any()


@given(
    lengths=st.lists(st.integers(0, 30), min_size=1, max_size=60).filter(any),
    length=st.integers(2, 12),
    method=st.sampled_from(METHODS),
)
def test_each_token_is_in_one_row_and_rows_are_as_full_as_documents_allow(
    lengths: list[int], length: int, method: str
) -> None:
    starts = [sum(lengths[:number]) for number in range(len(lengths))]
    texts = [list(range(start, start + size)) for start, size in zip(starts, lengths, strict=True)]
    rows = pack(texts, length, method, pad=-1)
    tokens: list[int] = []
    rooms = []
    for number in range(len(rows)):
        row, at = rows[number], 0
        for document, start, stop in rows.pieces(number):
            assert row["input_ids"][at : at + stop - start].tolist() == texts[document][start:stop]
            assert row["position_ids"][at : at + stop - start].tolist() == [*range(stop - start)]
            assert row["labels"][at : at + stop - start].tolist() == [-100, *texts[document][start + 1 : stop]]
            tokens += texts[document][start:stop]
            at += stop - start
        assert (row["input_ids"][at:] == -1).all()
        assert (row["labels"][at:] == -100).all()
        assert row["position_ids"][at:].tolist() == [*range(length - at)]
        rooms.append(length - at)
        assert rows.cost(number) == sum((stop - start) ** 2 for _, start, stop in rows.pieces(number))
    assert sorted(tokens) == [*range(sum(lengths))]
    filled = [length - room for room in rooms]
    if method == "concatenate":
        assert tokens == [*range(sum(lengths))]
        assert rooms[:-1] == [0] * (len(rows) - 1)
        return
    assert all(one + other > length for i, one in enumerate(filled) for other in filled[:i]), "two rows fit into one"
    pieces = sorted(piece for number in range(len(rows)) for piece in rows.pieces(number))
    assert pieces == [
        (number, start, min(start + length, size))
        for number, size in enumerate(lengths)
        for start in range(0, size, length)
    ]
    if method == "first-fit":
        by_hand: list[list[tuple[int, int, int]]] = []
        for piece in pieces:
            room = lambda row: length - sum(stop - start for _, start, stop in row)
            fitting = [row for row in by_hand if room(row) >= piece[2] - piece[1]]
            (fitting or [by_hand.append([]) or by_hand[-1]])[0].append(piece)  # type: ignore[func-returns-value]
        assert [rows.pieces(number) for number in range(len(rows))] == by_hand


def shares(costs: Sequence[int], workers: int) -> list[int]:
    return [sum(costs[len(costs) * n // workers : len(costs) * (n + 1) // workers]) for n in range(workers)]


def test_attention_is_spread_evenly_over_workers() -> None:
    """Of the documents of a text corpus, whose lengths differ by orders of magnitude."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randn(4000, generator=generator).mul(1.5).add(5).exp().clamp(1, 2048).int().tolist()
    rows = PackedDocuments([range(size) for size in lengths], 2048, lengths=lengths)
    padding = 1 - sum(lengths) / (len(rows) * 2048)
    assert padding < 0.01
    order = rows.order(32)
    for workers in (2, 3, 4, 8):
        worst = []
        for first in range(0, len(rows) - 31, 32):
            costs = [rows.cost(order(position, len(rows), 3, 0)) for position in range(first, first + 32)]
            slowest = max(shares(costs, workers)) / (sum(costs) / workers)
            worst.append(slowest)
        assert sum(worst) / len(worst) < 1.1
    every = [order(position, len(rows), 3, 0) for position in range(len(rows))]
    assert sorted(every) == [*range(len(rows))]


def test_mask_of_documents_is_causal_within_each() -> None:
    mask = document_mask(torch.tensor([[0, 1, 2, 0, 1, 0]]))
    assert mask.shape == (1, 1, 6, 6)
    groups = [0, 0, 0, 1, 1, 2]
    assert mask[0, 0].tolist() == [[groups[a] == groups[b] and b <= a for b in range(6)] for a in range(6)]


def test_boundaries_of_documents_in_flat_rows() -> None:
    positions = torch.tensor([[0, 1, 2, 0, 1, 0], [0, 0, 1, 2, 3, 4]])
    assert document_ids(positions).tolist() == [[0, 0, 0, 1, 1, 2], [0, 1, 1, 1, 1, 1]]
    offsets = document_offsets(positions)
    assert offsets.tolist() == [0, 3, 5, 6, 7, 12]
    assert offsets.dtype == torch.int32
    query, key, value = torch.randn(3, 2, 2, 6, 4, dtype=torch.float64)
    flat = (
        scaled_dot_product_attention(query, key, value, attn_mask=document_mask(positions))
        .transpose(1, 2)
        .flatten(0, 1)
    )
    for begin, end in pairwise(offsets.tolist()):
        part = [one.transpose(1, 2).flatten(0, 1)[begin:end].transpose(0, 1) for one in (query, key, value)]
        alone = scaled_dot_product_attention(*part, is_causal=True).transpose(0, 1)
        assert flat[begin:end].allclose(alone, rtol=1e-12)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:flex_attention called without")
def test_flex_attention_takes_the_numbers_of_documents() -> None:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    positions = torch.tensor([[0, 1, 2, 0, 1, 0], [0, 0, 1, 2, 3, 4]])
    ids = document_ids(positions)
    same_document = lambda batch, head, one, other: (ids[batch, one] == ids[batch, other]) & (one >= other)
    query, key, value = torch.randn(3, 2, 2, 6, 4, dtype=torch.float64)
    output = flex_attention(query, key, value, block_mask=create_block_mask(same_document, 2, None, 6, 6, device="cpu"))
    expected = scaled_dot_product_attention(query, key, value, attn_mask=document_mask(positions))
    assert output.allclose(expected, rtol=1e-12)


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (
            lambda: pack([[1]], 4, "worst-fit"),
            UsageError,
            "method='worst-fit' is not a way to pack documents; use best-fit, first-fit, concatenate",
        ),
        (lambda: PackedDocuments([[1]], 1), UsageError, "length=1 is too small; use a length of at least 2"),
        (
            lambda: PackedDocuments([[1]], 4, lengths=[1, 2]),
            UsageError,
            "2 lengths were given for 1 documents; give the length of each document, or leave lengths= out",
        ),
        (
            lambda: PackedDocuments([[]], 4),
            DatasetError,
            "no document has a token; look at the documents: each is a sequence of token ids",
        ),
        (
            lambda: PackedDocuments([[1], [[1, 2]]], 4),
            DatasetError,
            "document 1 has ids of shape (1, 2) and labels of shape (1, 2); give one id and one label for each token",
        ),
        (
            lambda: PackedDocuments([[1, 2]], 4, lengths=[3])[0],
            DatasetError,
            "document 0 has 2 tokens, and not 3 as before; give a dataset that does not change, and the right lengths=",
        ),
        (
            lambda: PackedDocuments([[1, 2]], 4).order(0),
            UsageError,
            "global_batch=0 is too small; give the global batch of the Trainer",
        ),
    ],
)
def test_what_cannot_be_packed_is_refused(make: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error) as raised:
        make()
    assert str(raised.value) == text


@given(st.lists(st.integers(0, 4), min_size=5, max_size=60), st.integers(2, 9))
def test_rows_of_a_token_folder_begin_positions_anew_after_each_end(tokens: list[int], length: int) -> None:
    """The end token is 0. In each row a document begins anew, as its tokens before the row are not seen."""
    if len(tokens) <= length:
        return
    with tempfile.TemporaryDirectory() as folder:
        write_folder(Path(folder) / "tokens", [np.asarray(tokens, dtype=np.uint16)], vocabulary=5)
        rows = Tokens(Path(folder) / "tokens", length, documents=True)
        plain = Tokens(Path(folder) / "tokens", length)
        assert len(rows) == len(plain)
        for number in range(len(rows)):
            row, ids = rows[number], tokens[number * length : (number + 1) * length]
            positions, position = [], 0
            for token in ids:
                positions.append(position)
                position = 0 if token == 0 else position + 1
            assert row["input_ids"].tolist() == ids == plain[number][:-1].tolist()
            assert row["position_ids"].tolist() == positions
            assert row["labels"].tolist() == [
                -100 if p == 0 else token for p, token in zip(positions, ids, strict=True)
            ]


def test_documents_need_an_end_token(tmp_path: Path) -> None:
    np.save(tmp_path / "tokens.npy", np.arange(20, dtype=np.uint16))
    with pytest.raises(UsageError) as raised:
        Tokens(tmp_path / "tokens.npy", 4, documents=True)
    what = f"{tmp_path / 'tokens.npy'} does not say which token ends a document, and documents=True was given"
    assert str(raised.value) == f"{what}; use a folder that `paceline tokenize` made, or leave documents= out"
