"""The rows of a DataLoader: which dataset, how they are collated, and in which order."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler, SequentialSampler

from paceline.base.batching import stream_seed
from paceline.data.order import sample_index
from paceline.errors import UsageError, a

_OPTIONS = (
    "num_workers",
    "persistent_workers",
    "prefetch_factor",
    "multiprocessing_context",
    "worker_init_fn",
    "timeout",
)


def check_loader(loader: Any, whose: str) -> None:
    """Raises UsageError if something is not a DataLoader of rows."""
    if not isinstance(loader, DataLoader):
        what = f"{whose} is {a(type(loader).__name__)}"
        raise UsageError(what, "return one torch.utils.data.DataLoader: Paceline reads rows from its dataset")
    if loader.batch_size is None and loader.batch_sampler is None:
        what = f"{whose} is a DataLoader(batch_size=None), whose dataset has batches and not rows"
        raise UsageError(what, "give it a dataset of rows and a batch size")
    if isinstance(loader.sampler, torch.utils.data.DistributedSampler):
        raise UsageError(f"{whose} has a DistributedSampler", "use shuffle=True: Paceline distributes the rows")


class LoaderRows:
    """The rows of a training DataLoader in the order of its sampler.

    Attributes:
        dataset: The rows.
        collate: Makes a batch of rows.
        count: The rows of an epoch; None if the dataset has no length.
        options: Options of the loader that Paceline's loader gets.
    """

    def __init__(self, loader: Any, seed: int, batch: int) -> None:
        self._loader, self._seed = loader, seed
        self.dataset, self.collate = loader.dataset, loader.collate_fn
        values = {name: getattr(loader, name) for name in _OPTIONS}
        self.options = {name: value for name, value in values.items() if value}
        self._epoch, self._drawn = -1, list[int]()
        self.count: int | None = None
        if isinstance(self.dataset, IterableDataset):
            return
        self._kind = self._kind_of_order(loader)
        self._size = len(self.dataset)
        self.count = len(self._of(0)) if self._kind == "drawn" else self._size
        if loader.drop_last and self.count >= batch:
            self.count -= self.count % batch
        if self.count != self._size:
            self.dataset = EpochRows(self.dataset, self.count)

    @staticmethod
    def _kind_of_order(loader: Any) -> str:
        sampler, usual = loader.sampler, type(loader.batch_sampler) is torch.utils.data.BatchSampler
        if usual and type(sampler) is SequentialSampler:
            return "in order"
        if usual and type(sampler) is RandomSampler and not sampler.replacement:
            return "shuffled" if sampler.num_samples == len(loader.dataset) else "drawn"
        return "drawn"

    def _of(self, epoch: int) -> list[int]:
        """The indices that the sampler draws for an epoch: the same on all workers."""
        if epoch != self._epoch:
            for one in (self._loader.batch_sampler, self._loader.sampler):
                if hasattr(one, "set_epoch"):
                    one.set_epoch(epoch)
            number = stream_seed(self._seed, epoch, -1) & 0x7FFFFFFF
            generator = getattr(self._loader.sampler, "generator", None)
            if generator is not None:
                generator.manual_seed(number)
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(number)
                self._drawn = [int(index) for batch in self._loader.batch_sampler for index in batch]
            self._epoch = epoch
        return self._drawn

    def order(self, position: int, size: int, seed: int, epoch: int) -> int:
        """The index of the row at a position of an epoch."""
        if self._kind == "in order":
            return position
        return (
            sample_index(position, self._size, seed, epoch) if self._kind == "shuffled" else self._of(epoch)[position]
        )


class EpochRows(Dataset[Any]):
    """A dataset of which each epoch has fewer or more rows than it has, by their own numbers."""

    def __init__(self, dataset: Any, count: int) -> None:
        self._dataset, self._count = dataset, count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> Any:
        return self._dataset[index]


class Numbered(Dataset[Any]):
    """A dataset whose rows come with their numbers, of which only the first `count` are used."""

    def __init__(self, dataset: Any, collate: Any, count: int) -> None:
        self._dataset, self._collate, self._count = dataset, collate, count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> Any:
        return index, self._dataset[index]

    def collate(self, rows: list[Any]) -> Any:
        """The numbers of rows, and their batch."""
        return torch.tensor([number for number, _ in rows], dtype=torch.int64), self._collate([row for _, row in rows])


class NumberedStream(IterableDataset[Any]):
    """An iterable dataset whose rows come with their numbers."""

    def __init__(self, dataset: Any, collate: Any) -> None:
        self._dataset, self._collate = dataset, collate
        self.collate = Numbered(dataset, collate, 0).collate

    def __iter__(self) -> Iterator[Any]:
        yield from enumerate(self._dataset)


def numbered(loader: Any, limit: float | int | None, whose: str) -> Any:
    """The rows of an evaluation loader with their numbers; of the first batches, if there is a limit as in Lightning's
    `limit_val_batches`. None for no rows.
    """
    if isinstance(loader.dataset, IterableDataset):
        if limit is not None and limit != 1.0:
            what = f"limit_val_batches={limit} with an iterable dataset of {whose}"
            raise UsageError(what, "let the dataset end after fewer rows")
        return NumberedStream(loader.dataset, loader.collate_fn)
    if type(loader.sampler) is not SequentialSampler:
        raise UsageError(f"{whose} has a {type(loader.sampler).__name__}", "use shuffle=False: each row is used once")
    rows, each = len(loader.dataset), loader.batch_size or 1
    if isinstance(limit, float) and limit < 1.0:
        rows = min(rows, int(len(loader) * limit) * each)
    elif isinstance(limit, int) and not isinstance(limit, bool):
        rows = min(rows, limit * each)
    return Numbered(loader.dataset, loader.collate_fn, rows) if rows else None
