"""Sample orders from samplers and DataLoaders of torch, which draw each epoch from its number and the seed alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from operator import index
from typing import Any

import numpy as np
import torch
from torch.utils.data import (
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)

from paceline.base.batching import stream_seed
from paceline.base.text import plural
from paceline.compute.rng import RngState
from paceline.data.order import in_order, sample_index
from paceline.errors import DatasetError, UsageError

Order = Callable[..., Any]
_OPTIONS = (
    "num_workers",
    "persistent_workers",
    "prefetch_factor",
    "multiprocessing_context",
    "worker_init_fn",
    "timeout",
)
_SEEDED = (
    "let it draw from torch's, numpy's or Python's global generators or from its attribute `generator`, "
    "and count epochs by set_epoch()"
)


class SamplerOrder:
    """A sample order that a sampler draws: one of torch's, or any iterable of row numbers or of batches of them.

    It is drawn once for each epoch, with the global generators and its own `generator` seeded by the seed and the
    epoch, so that all workers draw the same, and so does a resumed run. An epoch has as many rows as the sampler draws.

    Raises UsageError for a sampler that divides rows by rank, or that draws other rows when it is drawn again.
    """

    def __init__(self, sampler: Any) -> None:
        self._sampler, self._name = sampler, type(sampler).__name__
        for one in _chain(sampler):
            if isinstance(one, DistributedSampler):
                what = f"the sampler {type(one).__name__} draws other rows in each process"
                raise UsageError(what, "leave it out: Paceline distributes the rows")
        first = self._draw(0, 0)
        if not np.array_equal(first, self._draw(0, 0)):
            raise UsageError(f"the sampler {self._name} draws other rows when epoch 0 is drawn again", _SEEDED)
        self._epochs = {(0, 0): first}  # the rows of the last epochs, by seed and epoch
        self._size = len(first)
        if not self._size:
            raise DatasetError(f"the sampler {self._name} draws no rows", "check how it was created")
        self.largest = int(first.max())  # row in epoch 0

    def __len__(self) -> int:
        return self._size

    def __call__(self, position: int, size: int, seed: int = 0, epoch: int = 0) -> int:
        """Returns the row at this position of an epoch."""
        rows = self._epochs.get((seed, epoch))
        if rows is None:
            rows = self._draw(seed, epoch)
            if len(rows) != self._size:
                what = f"the sampler {self._name} draws {len(rows)} rows for epoch {epoch}"
                what += f", and {self._size} for epoch 0"
                raise DatasetError(what, "let it draw equally many rows in each epoch")
            self._epochs = {**dict([*self._epochs.items()][-1:]), (seed, epoch): rows}
        return int(rows[position])

    def _draw(self, seed: int, epoch: int) -> Any:
        """Draws the rows of an epoch."""
        number = stream_seed(seed, epoch, -1) & 0x7FFFFFFF
        streams = RngState(torch.device("cpu"))
        with streams.preserved():
            streams.seed(number)
            for one in _chain(self._sampler):
                if hasattr(one, "set_epoch"):
                    one.set_epoch(epoch)
                if isinstance(generator := getattr(one, "generator", None), torch.Generator):
                    generator.manual_seed(number)
            return np.fromiter(self._numbers(), np.int64)

    def _numbers(self) -> Iterator[int]:
        for drawn in self._sampler:
            try:
                numbers = [index(drawn)] if not isinstance(drawn, list | tuple) else map(index, drawn)
                yield from numbers
            except TypeError:
                what = f"the sampler {self._name} draws {drawn!r:.40}, which is not a row number"
                raise UsageError(what, "let it draw integers, or lists of integers") from None


def _chain(sampler: Any) -> Iterator[Any]:
    """Yields a sampler, and the samplers that it draws from."""
    while sampler is not None:
        yield sampler
        sampler = getattr(sampler, "sampler", None)


class FirstRows:
    """The sample order of the first `count` rows of each epoch of another order, whose epochs have `size` rows."""

    def __init__(self, order: Order, size: int, count: int) -> None:
        self._order, self._size, self._count = order, size, count

    def __len__(self) -> int:
        return self._count

    def __call__(self, position: int, size: int, seed: int = 0, epoch: int = 0) -> int:
        """Returns the row at this position of an epoch."""
        return int(self._order(position, self._size, seed, epoch))


DRAWN = SamplerOrder | FirstRows


@dataclass(frozen=True)
class LoaderParts:
    """What a DataLoader says about training: its dataset, how rows are collated, their order, and its other options.

    The order is None for an iterable dataset.
    """

    dataset: Any
    collate: Callable[[list[Any]], Any]
    order: Order | None
    options: dict[str, Any]

    @property
    def count(self) -> int | None:
        """The rows of an epoch; None for an iterable dataset."""
        return None if self.order is None else rows_of(self.order, self.dataset)


def parts_of(loader: DataLoader[Any], batch: int) -> LoaderParts:
    """Takes a DataLoader apart. With ``drop_last`` an epoch has a multiple of `batch` rows.

    Raises UsageError for a loader whose dataset has batches, or that divides rows by rank.
    """
    if loader.batch_size is None and loader.batch_sampler is None:
        what = "the DataLoader has batch_size=None, so its dataset has batches and not rows"
        raise UsageError(what, "give it a dataset of rows and a batch size")
    order = None if isinstance(loader.dataset, IterableDataset) else _order_of(loader)
    if order is not None and loader.drop_last:
        size = rows_of(order, loader.dataset)
        order = FirstRows(order, size, size - size % batch) if size >= batch and size % batch else order
    return LoaderParts(loader.dataset, loader.collate_fn, order, options_of(loader))


def options_of(loader: DataLoader[Any]) -> dict[str, Any]:
    """Returns the options of a DataLoader that concern its processes."""
    options = {name: value for name in _OPTIONS if (value := getattr(loader, name))}
    if options.get("prefetch_factor") == 2:  # torch's default, which counts batches and not micro-batches
        del options["prefetch_factor"]
    return options


def take_apart(
    dataset: Any,
    batch: int,
    collate: Callable[[list[Any]], Any] | None,
    order: Any,
    options: Mapping[str, Any] | None,
) -> tuple[Any, Callable[[list[Any]], Any] | None, Any, Mapping[str, Any]]:
    """Returns the arguments of steps() with a DataLoader replaced by its parts. Other arguments are preferred.

    Raises UsageError if the loader's batches are not the global `batch`, and as `parts_of`.
    """
    if not isinstance(dataset, DataLoader):
        return dataset, collate, order, options or {}
    if dataset.batch_size not in (None, batch):
        what = f"the DataLoader has batches of {plural(dataset.batch_size, 'row')}"
        what += f", and the Trainer has global_batch={batch}"
        raise UsageError(what, "use the same number in both, or pass the dataset, with order= for its sampler")
    parts = parts_of(dataset, batch)
    order = parts.order if order is None else order  # a sampler without rows counts as false
    return parts.dataset, collate or parts.collate, order, parts.options if options is None else options


def _order_of(loader: DataLoader[Any]) -> Order:
    sampler, is_usual = loader.sampler, loader.batch_size is not None  # None if it was given a batch sampler
    if is_usual and type(sampler) is SequentialSampler:
        return in_order
    is_shuffled = type(sampler) is RandomSampler and not sampler.replacement
    if is_usual and is_shuffled and sampler.num_samples == len(loader.dataset):  # type: ignore[arg-type, attr-defined]
        return sample_index
    return SamplerOrder(sampler if is_usual else loader.batch_sampler)


def rows_of(order: Order, dataset: Any) -> int:
    """Returns how many rows an epoch has: those of the dataset, unless the order has a length."""
    return len(order) if isinstance(order, DRAWN) else len(dataset)
