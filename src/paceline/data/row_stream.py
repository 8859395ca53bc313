"""Reads iterable datasets: their rows in order, by global batches, from any position that their state allows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.utils.data import IterableDataset

from paceline.base.batching import stream_seed
from paceline.base.heartbeat import HEARTBEAT
from paceline.checkpoint.tree import flatten
from paceline.compute.rng import RngState
from paceline.errors import DatasetError, UsageError, a

if TYPE_CHECKING:
    from paceline.data.loader import Source

EPOCHS = 1 << 42  # keeps the streams of iterable datasets apart from the model's and the loader's


class Stream(IterableDataset[Any]):
    """The rows of an iterable that only one worker of each host reads; the worker sends the others their rows.

    `source` is an iterable that begins anew at each ``iter()``, or a function without arguments that returns one: then
    the other workers do not even open it. Rows consist of tensors, arrays, images of pillow without a palette
    (``image.convert("RGB")`` removes it), numbers, text, bytes, and dicts, lists and tuples of these. With
    ``state_dict()`` and ``load_state_dict()``, as Hugging Face's streaming datasets have them, a resumed run continues
    without reading the rows before; ``set_epoch(epoch)`` is called before each epoch.

    An iterable dataset can be passed to ``steps()`` as it is. Then each worker reads its first four rows, to compare
    them with those of the others, and rows of any type are allowed, which each worker reads itself.

    Example:
        >>> rows = paceline.data.Stream(lambda: load_dataset("allenai/c4", "en", split="train", streaming=True))
        >>> for report in trainer.steps(rows, count=10_000, collate=collate):
        ...     pass
    """

    def __init__(self, source: Iterable[Any] | Callable[[], Iterable[Any]]) -> None:
        is_function = isinstance(source, type) or (callable(source) and not hasattr(source, "__iter__"))
        self._source, self._opened = source, None if is_function else source
        if not is_function and not hasattr(source, "__iter__"):
            what = f"Stream needs an iterable or a function that returns one, got {a(type(source).__name__)}"
            raise UsageError(what, "pass an object with __iter__")

    def __getattr__(self, name: str) -> Any:
        if name not in ("state_dict", "load_state_dict", "set_epoch"):
            raise AttributeError(name)
        return getattr(self.opened, name)

    @property
    def opened(self) -> Any:
        """The iterable, which is made when it is first needed."""
        if self._opened is None:
            self._opened = self._source()  # type: ignore[operator]
        return self._opened

    def __iter__(self) -> Iterator[Any]:
        return iter(self.opened)


class Position(NamedTuple):
    """A place between two global batches: `step` of them were read; of the `epoch`, so many `rows`.

    `state` is what the dataset's ``load_state_dict()`` needs to continue after these rows; None if it has none.
    """

    step: int
    epoch: int
    rows: int
    state: Any = None

    @classmethod
    def of(cls, saved: Mapping[str, Any] | None, step: int) -> Position | None:
        """Reads what `saved` returned; None unless a dataset can continue there, at a step that is not after `step`."""
        if saved is None or saved["state"] is None or saved["step"] > step:
            return None
        return cls(*(saved[name] for name in cls._fields))

    def saved(self) -> dict[str, Any]:
        """Returns the fields for a checkpoint."""
        return self._asdict()


class EndOfEpoch:
    """Marks the end of an epoch of an iterable dataset, so that no reader has to begin the next epoch to notice it."""


class NumberedRows(IterableDataset[Any]):
    """Yields (epoch, row) of an iterable dataset, whose random draws come from a stream of the epoch.

    After each `batch` rows of an epoch it yields (epoch, Position). Its state is None if the dataset has none, if it
    does not continue exactly, or if rows have drawn random numbers from the global generators. With `start` it begins
    there.
    """

    def __init__(self, source: Source, epochs: range, batch: int, start: Position | None = None) -> None:
        self.source, self.epochs, self._batch, self._start = source, epochs, batch, start

    def __iter__(self) -> Iterator[tuple[int, Any]]:
        streams, dataset = RngState(torch.device("cpu")), self.source.dataset
        for epoch in self.epochs:
            if hasattr(dataset, "set_epoch"):
                dataset.set_epoch(epoch)
            outside = streams.snapshot()
            streams.seed(stream_seed(self.source.seed, EPOCHS, epoch))
            seeded, count = streams.snapshot(), 0
            resumes = self._start is not None and epoch == self._start.epoch
            if self._start is not None and resumes:
                dataset.load_state_dict(self._start.state)
                count = self._start.rows
            samples, empty, draws = iter(dataset), not count, False
            while True:
                try:
                    sample = next(samples)
                except StopIteration:
                    break
                finally:
                    draws = draws or streams.has_changed(seeded)
                    inside = streams.snapshot()
                    streams.restore(outside)
                if resumes:
                    resumes = _forget_state(dataset)
                empty, count = False, count + 1
                yield epoch, sample
                if count % self._batch == 0:
                    exact = not draws and continues_exactly(dataset)
                    yield epoch, Position(0, epoch, count, _storable(dataset.state_dict()) if exact else None)
                outside = streams.snapshot()
                streams.restore(inside)
            if empty:
                cure = "pass an iterable that restarts at each iter()"
                raise DatasetError(f"the dataset yielded no rows in epoch {epoch}", cure)
            yield epoch, EndOfEpoch()


def continues_exactly(dataset: Any) -> bool:
    """Whether an iterable dataset has a state from which it continues with the next row.

    Hugging Face's documentation names two exceptions: the state of a shuffle buffer leaves out the rows in the buffer,
    and batched functions of tables may lose a batch.
    """
    opened = _opened(dataset)
    if not (hasattr(opened, "state_dict") and hasattr(opened, "load_state_dict")):
        return False
    waiting = [getattr(opened, "_ex_iterable", None)]
    while waiting:
        one = waiting.pop()
        is_table = getattr(one, "batched", False) and getattr(one, "formatting", None) is not None
        if type(one).__name__ == "BufferShuffledExamplesIterable" or is_table:
            return False
        waiting += [part for part in (getattr(one, "ex_iterable", None), *getattr(one, "ex_iterables", ())) if part]
    return True


def _opened(dataset: Any) -> Any:
    return dataset.opened if isinstance(dataset, Stream) else dataset


def _forget_state(dataset: Any) -> bool:
    """Makes the next iteration of a Hugging Face dataset begin anew; it would use the loaded state again."""
    opened = _opened(dataset)
    if type(opened).__module__.startswith("datasets."):
        opened.load_state_dict(None)
    return False


def _storable(state: Any) -> Any:
    """Returns a state if a checkpoint can hold it, else None."""
    try:
        flatten(state, "")
    except UsageError:
        return None
    return state


class RowStream:
    """The rows of an iterable dataset by global batches of `batch` rows; an epoch's last one may be smaller.

    ``begin(rows)`` returns an iterator of NumberedRows, in this process or another one. The rows of a global batch are
    read when the batch is needed, not before. `is_outdated`: whether the iterator may have an outdated dataset; then it
    is begun anew at the next epoch. It starts at `start`, or at the beginning.
    """

    def __init__(
        self,
        source: Source,
        epochs: range,
        batch: int,
        begin: Callable[[NumberedRows], Iterator[Any]],
        is_outdated: Callable[[], bool],
        start: Position | None,
    ) -> None:
        self._source, self._epochs, self._batch = source, epochs, batch
        self._begin_reading, self._is_outdated, self._start = begin, is_outdated, start
        self._samples: Iterator[Any] | None = None
        self._ended: int | None = None  # the epoch that has just ended, until the next row is read
        self._restart()
        self.rows, self.epoch = list[Any](), 0

    @property
    def step(self) -> int:
        """The number of the global batch that was read last; one less than the first one if there is none."""
        return self._step

    def start_at(self, position: Position) -> None:
        """Continues at a position whose state is known, from the next read on."""
        self._start = position
        self._restart()

    def _restart(self) -> None:
        self._samples, self._ended = None, None
        self._step = -1 if self._start is None else self._start.step - 1
        self.position = self._start or Position(0, self._epochs.start, 0)

    def close(self) -> None:
        """Ends reading."""
        self._samples = iter(())

    def _begin(self) -> Iterator[Any]:
        first = self._epochs.start if self._start is None else self._start.epoch
        epochs = range(first, self._epochs.stop)
        return self._begin_reading(NumberedRows(self._source, epochs, self._batch, self._start))

    def reach(self, step: int) -> bool:
        """Reads up to a global batch, from the start again if it has passed; returns whether the batch exists."""
        if step < self._step:
            self._restart()
        if self._samples is None:
            self._samples = self._begin()
        while self._step < step:
            rows, position = list[Any](), None
            self._begin_epoch()
            while position is None and (item := next(self._samples, None)) is not None:
                epoch, sample = item
                if isinstance(sample, Position):
                    position = sample
                elif not isinstance(sample, EndOfEpoch):
                    rows.append(sample)
                    self.epoch = epoch
                else:
                    self._ended = epoch
                    if rows:
                        break
                    self._begin_epoch()
            if not rows:
                return False
            self.rows, self._step = rows, self._step + 1
            position = position or Position(0, self.epoch, 0)
            self.position = position._replace(step=self._step + 1)
            HEARTBEAT.beat()
        return True

    def _begin_epoch(self) -> None:
        """At the end of an epoch, begins anew if the iterator may have an outdated dataset."""
        if self._ended is None or self._ended + 1 not in self._epochs:
            return
        ended, self._ended = self._ended, None
        if self._is_outdated():
            epochs = range(ended + 1, self._epochs.stop)
            self._samples = self._begin_reading(NumberedRows(self._source, epochs, self._batch))
