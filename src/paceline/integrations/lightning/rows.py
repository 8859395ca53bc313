"""The rows of a DataLoader: which loaders are refused, and rows with their numbers for evaluation."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, SequentialSampler

from paceline.errors import UsageError, a


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
