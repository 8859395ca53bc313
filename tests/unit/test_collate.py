"""A collate that drops or adds rows is told of once; batches whose first dimension is no row are not."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from alone import happened, trainer
from by_hand import in_order
from torch.utils.data import TensorDataset, default_collate

from paceline.compute.microbatches import MicroBatch
from paceline.data.collate_check import Collated

X = torch.randn(48, 10, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
BAD = TensorDataset(X, (torch.arange(48) % 4).where(torch.arange(48) != 13, -1))


def drop(some: list[Any]) -> Any:
    return default_collate([row for row in some if row[1] >= 0])


def repeat(some: list[Any], much: int) -> Any:
    return default_collate([row for row in some for _ in range(1 if row[1] >= 0 else much)])


def counted(output: torch.Tensor, batch: Any) -> tuple[torch.Tensor, int]:
    return F.cross_entropy(output, batch[1], reduction="sum"), len(output)


def mean(output: torch.Tensor, batch: Any) -> torch.Tensor:
    return F.cross_entropy(output, batch[1].clamp(min=0))


@pytest.mark.parametrize(
    ("collate", "name", "made"), [(drop, "drop", 3), (partial(repeat, much=2), "repeat", 5)], ids=["drops", "adds"]
)
def test_collate_that_drops_or_adds_rows_is_noted_once(collate, name, made, run):
    list(trainer(loss=mean, plan="micro=4").steps(BAD, epochs=2, collate=collate, order=in_order))
    line = {"drop": drop, "repeat": repeat}[name].__code__.co_firstlineno
    assert [note["text"] for note in happened(run, "note")] == [
        f"{name} (test_collate.py:{line}) made {made} rows of the 4 of micro-batch 3: rows 12, 13, 14, 15 of the "
        "dataset, but their mean is weighted with 4; return (sum, count) from the loss"
    ]


def test_collate_that_drops_rows_is_not_noted_if_the_loss_counts(run):
    list(trainer(loss=counted, plan="micro=4").steps(BAD, epochs=2, collate=drop, order=in_order))
    assert happened(run, "note") == []


def packed(length: int) -> Any:
    return torch.ones(length), torch.ones(length)


def graphs(nodes: int) -> Any:
    return torch.ones(nodes, 10), torch.ones(2, 3 * nodes), torch.ones(nodes)


def time_first(length: int) -> Any:
    return torch.ones(length, 4, 10), torch.ones(length, 4)


@pytest.mark.parametrize("made", [packed, graphs, time_first])
def test_batch_whose_first_dimension_is_not_rows_is_not_noted(made):
    """Now and then it is as long as if it did."""
    lengths = torch.randint(4, 7, (200,), generator=torch.Generator().manual_seed(1)).tolist()
    collated = Collated(lambda some: some, 4)
    found = [collated.look(MicroBatch(0, 4, made(length))).row_mismatch for length in [4, 9, *lengths]]
    assert set(found) == {""}


def test_shorter_last_micro_batch_is_not_noted():
    collated = Collated(lambda some: some, 4)
    found = [collated.look(MicroBatch(0, rows, packed(rows))).row_mismatch for rows in [4] * 8 + [2] + [4] * 8]
    assert set(found) == {""}
