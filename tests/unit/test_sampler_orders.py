"""Samplers and DataLoaders of torch as sample orders: the same rows on all workers, and errors for others."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)
from torch.utils.data.distributed import DistributedSampler

import paceline
from paceline.base.batching import stream_seed
from paceline.data.order import in_order, sample_index
from paceline.data.sampler_order import SamplerOrder, parts_of
from paceline.errors import DatasetError, PacelineError, UsageError


class Drawn(Sampler[Any]):
    """Draws rows by a function of the epoch."""

    def __init__(self, draw: Any) -> None:
        self.draw, self.epoch = draw, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        return iter(self.draw(self.epoch))


def rows_of(order: Any, epoch: int, seed: int = 3) -> list[int]:
    return [order(position, len(order), seed, epoch) for position in range(len(order))]


SAMPLERS = {
    "weighted": lambda: WeightedRandomSampler([0.0, 1, 2, 3, 4], 12),
    "weighted with a generator": lambda: WeightedRandomSampler([0.0, 1, 2, 3, 4], 12, generator=torch.Generator()),
    "subset": lambda: SubsetRandomSampler([3, 1, 4]),
    "with replacement": lambda: RandomSampler(range(5), replacement=True, num_samples=9),  # type: ignore[arg-type]
    "batches": lambda: BatchSampler(RandomSampler(range(5)), 2, drop_last=True),  # type: ignore[arg-type]
    "of python": lambda: Drawn(lambda epoch: random.sample(range(5), 3)),
    "of numpy": lambda: Drawn(lambda epoch: np.random.permutation(5)[:4]),
    "by the epoch": lambda: Drawn(lambda epoch: [[epoch, 0], torch.tensor([4])]),
    "a list": lambda: [4, 2, 2],
}


@pytest.mark.parametrize("name", SAMPLERS)
def test_a_sampler_draws_the_same_on_each_worker_whatever_was_drawn_before(name: str) -> None:
    order, other = (SamplerOrder(SAMPLERS[name]()) for _ in range(2))
    first = [rows_of(order, epoch) for epoch in (0, 1, 2)]
    torch.rand(3), random.random(), np.random.rand()
    state = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()  # type: ignore[index]
    assert [rows_of(other, epoch) for epoch in (2, 1, 0)] == first[::-1]
    now = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()  # type: ignore[index]
    assert now[0].equal(state[0])
    assert now[1:] == state[1:]
    if name != "a list":
        assert any(rows_of(order, epoch) != first[0] for epoch in range(1, 9))
    if name == "weighted":
        torch.manual_seed(stream_seed(3, 1, -1) & 0x7FFFFFFF)
        assert first[1] == [*SAMPLERS[name]()]


def loader(**words: Any) -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.arange(10)), **{"batch_size": 4, **words})


def test_the_order_of_a_loader_is_that_of_its_sampler() -> None:
    assert (parts_of(loader(), 4).order, parts_of(loader(shuffle=True), 4).order) == (in_order, sample_index)
    weighted = WeightedRandomSampler([0.0, 1] * 5, 6)
    for words in ({"sampler": weighted}, {"batch_size": 1, "batch_sampler": BatchSampler(weighted, 4, False)}):
        parts = parts_of(loader(**words), 4)
        assert parts.count == 6
        assert all(row % 2 for row in rows_of(parts.order, 0))
    for words in ({}, {"shuffle": True}):
        parts = parts_of(loader(drop_last=True, **words), 4)
        assert parts.count == 8
        first, second = (rows_of(parts.order, epoch) for epoch in (0, 1))
        assert first == [*range(8)] if not words else len({*first}) == len({*second}) == 8
        assert not words or 8 in first + second or 9 in first + second
    parts = parts_of(loader(num_workers=2, collate_fn=list, timeout=9), 4)
    assert (parts.collate, parts.options) == (list, {"num_workers": 2, "timeout": 9})


def made() -> paceline.Trainer:
    return paceline.Trainer(
        lambda: torch.nn.Linear(1, 1).double(),
        loss=lambda output, batch: (output[:, 0] - batch[0]).square().sum(),
        forward=lambda model, batch: model(batch[0][:, None].double()),
        optimizer=lambda params: torch.optim.SGD(params, lr=0.001),
        global_batch=4,
    )


def train(dataset: Any, **words: Any) -> list[float]:
    return [report.loss for report in made().steps(dataset, epochs=2, **words)]


def test_training_by_a_loader_is_training_by_its_parts() -> None:
    data = TensorDataset(torch.arange(10))
    assert train(loader(shuffle=True)) == train(data)
    assert train(loader()) == train(data, order=lambda position, size, seed, epoch: position)
    processes = loader(sampler=SequentialSampler(data), num_workers=1)
    assert train(processes) == train(processes, loader={"num_workers": 0}) == train(loader())
    weights = WeightedRandomSampler([1.0] * 10, 7)
    losses = train(data, order=weights)
    assert len(losses) == 4  # of 7 rows in each of two epochs
    assert train(loader(sampler=weights)) == losses
    by_hand = SamplerOrder(weights)
    assert losses != train(data)
    longer = TensorDataset(torch.arange(10)[rows_of(by_hand, 0, 0) + rows_of(by_hand, 1, 0)])
    in_steps = lambda position, size, seed, epoch: position + (7 * epoch)
    assert losses == train(longer, order=_OfSeven(in_steps))


class _OfSeven(Sampler[int]):
    """The first seven rows of an epoch, as a sampler that repeats itself."""

    def __init__(self, order: Any) -> None:
        self.order, self.epoch = order, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return (self.order(position, 7, 0, self.epoch) for position in range(7))


def counting() -> Any:
    calls: list[int] = []
    return Drawn(lambda epoch: [calls.append(1) or len(calls)])  # type: ignore[func-returns-value]


CASES: list[tuple[Any, type[PacelineError], str]] = [
    (
        lambda: train([1, 2], order=counting()),
        UsageError,
        "the sampler Drawn draws other rows when epoch 0 is drawn again; let it draw from torch's, numpy's or Python's "
        "global generators or from its attribute `generator`, and count epochs by set_epoch()",
    ),
    (
        lambda: train(TensorDataset(torch.ones(2)), order=Drawn(lambda epoch: [0] * (1 + epoch))),
        DatasetError,
        "the sampler Drawn draws 2 rows for epoch 1, and 1 for epoch 0; let it draw equally many rows in each epoch",
    ),
    (lambda: SamplerOrder([]), DatasetError, "the sampler list draws no rows; check how it was created"),
    (
        lambda: SamplerOrder(["a"]),
        UsageError,
        "the sampler list draws 'a', which is not a row number; let it draw integers, or lists of integers",
    ),
    (
        lambda: train([1, 2], order=Drawn(lambda epoch: [0, 7])),
        UsageError,
        "the sampler of order= draws row 7, and the dataset has 2 rows; make the sampler for this dataset",
    ),
    (
        lambda: train([1, 2], order=DistributedSampler([1, 2], 2, 0)),  # type: ignore[arg-type]
        UsageError,
        "the sampler DistributedSampler draws other rows in each process; leave it out: Paceline distributes the rows",
    ),
    (
        lambda: train(loader(batch_size=2)),
        UsageError,
        "the DataLoader has batches of 2 rows, and the Trainer has global_batch=4; "
        "use the same number in both, or pass the dataset, with order= for its sampler",
    ),
    (
        lambda: train(loader(batch_size=None)),
        UsageError,
        "the DataLoader has batch_size=None, so its dataset has batches and not rows; give it a dataset of rows and a "
        "batch size",
    ),
    (
        lambda: made().evaluate(loader()),
        DatasetError,
        "a DataLoader is not a dataset: its items are batches, not rows; pass its dataset; steps() takes a DataLoader, "
        "too",
    ),
    (
        lambda: train([1, 2], order=3),
        UsageError,
        "order= needs a function of (position, size, seed, epoch) or a sampler of torch; got 3; write "
        "order=paceline.sample_index",
    ),
]


@pytest.mark.parametrize("number", range(len(CASES)))
def test_samplers_and_loaders_that_cannot_be_used_are_refused(number: int) -> None:
    call, error, text = CASES[number]
    with pytest.raises(error) as raised:
        call()
    assert str(raised.value) == text
