"""Loads this worker's rows ahead of need: which rows of a global batch are its own, and the processes that load them.

The order is a function and the position a number, so a feed can start anywhere at once. Whatever a dataset or collate
draws at random comes from streams keyed by row and by micro-batch: the same rows look the same on any worker.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from array import array
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import groupby, islice
from multiprocessing import parent_process
from typing import Any

import torch
from torch.multiprocessing import active_children
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset, default_collate
from torch.utils.data._utils.collate import collate_tensor_fn, default_collate_fn_map

from paceline.base.batching import Grid, deal, deal_rows, stream_seed
from paceline.base.heartbeat import HEARTBEAT
from paceline.base.mesh import run_of
from paceline.compute.microbatches import MicroBatch, in_rows, rows_told
from paceline.compute.rng import RngState
from paceline.data.change_detection import Snapshot
from paceline.data.collate_check import Collated
from paceline.data.mixing import Mix
from paceline.data.order import sample_index
from paceline.data.packing import PackedDocuments
from paceline.data.row_groups import takes_tensors
from paceline.data.row_stream import NumberedRows, Position, RowStream
from paceline.data.sampler_order import DRAWN, Order, SamplerOrder, rows_of
from paceline.data.table_rows import TableRows
from paceline.data.tokens import Tokens
from paceline.errors import AddNote, DatasetError, UsageError, a

AHEAD = 4096  # rows whose indices are computed in one go
_ROWS, _COLLATE = 1 << 40, 1 << 41  # keep the loader's streams apart from the model's
_THREADED_LIBRARIES = ("lance",)  # libraries whose threads a forked process lacks, and may wait for without end
_FIXED = {
    "batch_size": "global_batch= of the Trainer",
    "shuffle": "order= of steps()",
    "sampler": "order= of steps()",
    "batch_sampler": "order= of steps()",
    "collate_fn": "collate= of steps()",
    "drop_last": "nothing: the last, smaller batch is used",
    "in_order": "nothing: micro-batches come in the order of the grid",
}


@dataclass
class Slot:
    """A micro-batch to load: its number in the grid, its epoch, its positions and its rows' indices in the dataset.

    `part` are the rows in it that this worker computes (None: all); with `apart` only those were loaded. A `dummy`
    micro-batch is run but does not count (see Assignment).
    """

    index: int
    epoch: int
    start: int
    stop: int
    rows: tuple[int, ...] = ()
    part: range | None = None
    dummy: bool = False
    apart: bool = False

    def __str__(self) -> str:
        rows = range(self.start, self.stop)
        if self.part is not None:
            rows = rows[self.part.start : self.part.stop]
        return f"micro-batch {self.index} (rows {rows.start}-{rows.stop - 1} of epoch {self.epoch})"


@dataclass(frozen=True)
class Source:
    """What to read and how: the dataset, its order, collate, loader options, and the seed of its streams."""

    dataset: Any
    rows: int | None
    seed: int
    collate: Callable[[list[Any]], Any] = default_collate
    order: Order = sample_index
    options: Mapping[str, Any] | None = None
    first_epoch: int = 0

    @property
    def tokens(self) -> int | None:
        """The tokens of a row, if the dataset is a `Tokens` or `PackedDocuments`, or a `Mix` of such of one length."""
        return _tokens_of(self.dataset)

    @staticmethod
    def of(
        dataset: Any,
        seed: int,
        collate: Callable[[list[Any]], Any] | None,
        order: Any,
        options: Mapping[str, Any],
    ) -> Source:
        """Checks a user's dataset and options; returns them as a source. Raises DatasetError and UsageError."""
        for name in options:
            if name in _FIXED:
                raise UsageError(f"Paceline sets the loader option {name!r} itself", f"use {_FIXED[name]}")
        arrays = isinstance(dataset, tuple) and all(hasattr(part, "shape") for part in dataset)
        if arrays or isinstance(dataset, type | str | bytes | Mapping):
            what = f"the class {dataset.__name__}" if isinstance(dataset, type) else a(type(dataset).__name__)
            cure = (
                "an instance of the class; one value of the dict, for example data['train']; for tensors"
                " TensorDataset(*tensors)"
            )
            raise DatasetError(f"{what} is not a dataset", f"pass {cure}")
        if isinstance(dataset, DataLoader):
            cure = "pass its dataset; steps() takes a DataLoader, too"
            raise DatasetError("a DataLoader is not a dataset: its items are batches, not rows", cure)
        iterable = isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__")
        if iterable and not hasattr(dataset, "__iter__"):
            cure = "give it __len__ and __getitem__, or __iter__"
            raise DatasetError(f"{a(type(dataset).__name__)} is not a dataset", cure)
        if iterable and order is not None:
            raise UsageError("an iterable dataset defines its own order", "remove order=")
        if not iterable and len(dataset) == 0:
            raise DatasetError("the dataset has no rows", "check how it was created")
        if order is not None and not callable(order):
            order = SamplerOrder(order)
        if isinstance(order, SamplerOrder) and order.largest >= len(dataset):
            what = f"the sampler of order= draws row {order.largest}, and the dataset has {len(dataset)} rows"
            raise UsageError(what, "make the sampler for this dataset")
        if order is None:
            order = dataset.order if isinstance(dataset, Mix) else sample_index
        rows = None if iterable else rows_of(order, dataset)
        return Source(dataset, rows, seed, collate or default_collate, order, options)

    def samples(self, indices: Sequence[int]) -> list[Any]:
        """Loads rows of the dataset, with one call if it has `__getitems__`."""
        many = getattr(self.dataset, "__getitems__", None)
        return list(many(list(indices))) if many else [self.dataset[index] for index in indices]

    def columns(self) -> Sequence[torch.Tensor]:
        """The tensors of a TensorDataset whose rows `default_collate` stacks; empty for any other dataset.

        Rows of these can be taken with one `index_select`, which draws no random numbers.
        """
        data = self.dataset
        usual = type(data) is TensorDataset and self.stacks
        return data.tensors if usual and all(map(_plain, data.tensors)) else ()

    @property
    def stacks(self) -> bool:
        """Whether collate is torch's, which stacks the tensors of rows, and the script has added no types to it."""
        functions, module = default_collate_fn_map.values(), collate_tensor_fn.__module__
        return self.collate is default_collate and {function.__module__ for function in functions} == {module}

    @property
    def has_table_rows(self) -> bool:
        """Whether rows are those of a table, which draw no random numbers."""
        return isinstance(self.dataset, TableRows) and self.dataset.is_unchanged

    @property
    def is_table(self) -> bool:
        """Whether the dataset makes batches by columns, which are those that collate would make of its rows."""
        return self.has_table_rows and self.stacks

    def snapshot(self) -> Snapshot:
        """A snapshot of all objects that rows depend on besides their number."""
        # A sampler changes by itself when it is drawn.
        order = {} if isinstance(self.order, DRAWN) or self.order is sample_index else {"order": self.order}
        return Snapshot(dataset=self.dataset, collate=self.collate, **order)

    def loaded(self, one: Any, tell: Callable[..., None]) -> Any:
        """Loads the item of `one`, a dataset of one item, in a loader process if the user's options ask for processes.

        `tell` gets the event that names the process.
        """
        options, more = self.options or {}, dict[str, Any]()
        if count := min(1, options.get("num_workers", 0)):
            more = {"worker_init_fn": _Start(options.get("worker_init_fn"))}
            more["multiprocessing_context"] = options.get("multiprocessing_context")
        loader = DataLoader(one, None, num_workers=count, collate_fn=_same, generator=torch.Generator(), **more)
        iterator = iter(loader)
        if count:
            tell("loaders", pids=[child.pid for child in active_children()])
        (item,) = iterator
        return item

    def filled(self, slots: Iterator[Slot]) -> Iterator[Slot]:
        """Yields the slots with their rows' dataset indices, which a vectorised order gives for many slots at once."""
        assert self.rows is not None
        at_once = takes_tensors(self.order)
        for epoch, run in groupby(slots, key=lambda slot: slot.epoch):
            # A script's order is called only when the rows are needed: it may depend on what the loop's body changes.
            while chunk := list(_about(run, AHEAD if at_once else 1)):
                positions = [position for slot in chunk for position in range(slot.start, slot.stop)]
                if at_once:
                    position_tensor = _tensor_of(positions)
                    dataset_indices = self.order(position_tensor, self.rows, self.seed, epoch).tolist()
                else:
                    dataset_indices = [int(self.order(position, self.rows, self.seed, epoch)) for position in positions]
                indices = iter(dataset_indices)
                for slot in chunk:
                    slot.rows = tuple(islice(indices, slot.stop - slot.start))
                    yield slot


def _tokens_of(dataset: Any) -> int | None:
    """The tokens of each row of a dataset, if they are known and equally many."""
    if isinstance(dataset, Mix):
        lengths = {_tokens_of(source) for source in dataset.sources.values()}
        return lengths.pop() if len(lengths) == 1 else None
    return dataset.length if isinstance(dataset, Tokens | PackedDocuments) else None


def _plain(tensor: Any) -> bool:
    """Whether `index_select` of rows gives the same strides as stacking them one by one."""
    usual = type(tensor) is torch.Tensor and tensor.device.type == "cpu" and tensor.layout is torch.strided
    usual = usual and not (tensor.is_nested or tensor.is_quantized or tensor.requires_grad) and tensor.numel() > 0
    return usual and tensor.stride() == torch.empty(tensor.shape, dtype=tensor.dtype, device="meta").stride()


def _tensor_of(numbers: Sequence[int]) -> torch.Tensor:
    return torch.frombuffer(array("q", numbers), dtype=torch.int64)  # in a quarter of torch.tensor's time


def _about(slots: Iterator[Slot], rows: int) -> Iterator[Slot]:
    """Takes slots until they hold at least `rows` rows."""
    while rows > 0 and (slot := next(slots, None)) is not None:
        rows -= slot.stop - slot.start
        yield slot


class _Rows(Dataset[tuple[Slot, Any]]):
    """A map dataset of micro-batches: item `slot` is that micro-batch, collated."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.streams = RngState(torch.device("cpu"))
        self.draws = False
        self.still: tuple[Any, ...] = ()  # the random state after seed(0)
        self._apart = False  # whether a part of a micro-batch can be loaded without the rest
        self._tensors: Any = None  # the dataset's tensors, when `_columns` was set
        self._columns: Sequence[torch.Tensor] = ()

    @property
    def quiet(self) -> bool:
        """Whether loading draws no random numbers: rows of tensors and tables, in an order of Paceline's."""
        return takes_tensors(self.source.order) and (self.source.is_table or bool(self._tensor_columns()))

    def _tensor_columns(self) -> Sequence[torch.Tensor]:
        """The tensors of a TensorDataset from which rows are taken with one call; else none."""
        if (tensors := getattr(self.source.dataset, "tensors", None)) is not self._tensors:
            self._tensors, self._columns = tensors, self.source.columns()
        return self._columns

    def at_once(self, indices: Sequence[int]) -> list[torch.Tensor] | None:
        """The collated rows of a TensorDataset; None if they have to be loaded one by one."""
        columns = self._tensor_columns()
        if not columns or min(indices) < 0 or max(indices) >= len(columns[0]):
            return None
        wanted = _tensor_of(indices)
        return [tensor.index_select(0, wanted) for tensor in columns]

    def __getitem__(self, slot: Slot) -> tuple[Slot, Any]:
        if (batch := self.at_once(slot.rows)) is not None:
            return slot, batch
        if self._apart and slot.part is not None and in_rows(batch := self._load(slot, slot.part), len(slot.part)):
            return replace(slot, apart=True), batch
        batch = self._load(slot, range(len(slot.rows)))
        if slot.part is not None:
            self._apart = self.source.stacks and in_rows(batch, len(slot.rows))
        return slot, batch

    def _load(self, slot: Slot, part: range) -> Any:
        """Loads and collates the rows `part` of a micro-batch."""
        source, indices = self.source, slot.rows[part.start : part.stop]
        if source.has_table_rows:
            if source.stacks:
                return source.dataset.batch(indices)
            samples = source.samples(indices)
        elif not self.draws:
            # As long as rows draw no random numbers, one seed for all is enough. If a row draws, they are loaded again.
            if self.still:
                self.streams.restore(self.still)  # which takes less time than to seed
            else:
                self.streams.seed(0)
                self.still = self.streams.snapshot()
            samples = source.samples(indices)
            self.draws = self.streams.has_changed(self.still)
        if self.draws:
            samples = []
            for position, index in zip(range(slot.start + part.start, slot.start + part.stop), indices, strict=True):
                self.streams.seed(stream_seed(source.seed, _ROWS + slot.epoch, position))
                samples.append(source.dataset[index])
        if source.collate is not default_collate:  # default_collate draws no random numbers
            self.streams.seed(stream_seed(source.seed, _COLLATE + slot.epoch, slot.start))
        return source.collate(samples)


class _Together(Dataset[list[tuple[Slot, Any]]]):
    """A dataset of one item: all micro-batches of a share, collated."""

    def __init__(self, source: Source, slots: Sequence[Slot]) -> None:
        self.rows, self.slots = _Rows(source), slots

    def __len__(self) -> int:
        return 1

    def __getitem__(self, number: int) -> list[tuple[Slot, Any]]:
        return [self.rows[slot] for slot in self.slots]


def _die_with_parent(_: int) -> None:
    """Makes a loader process end with its worker, whose sockets it would otherwise hold open."""
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None, use_errno=True).prctl(1, signal.SIGKILL)
        parent = parent_process()
        if parent is not None and os.getppid() != parent.pid:  # the parent had ended before prctl
            os._exit(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)


class _Start:
    """The worker_init_fn of loader processes: ties the process to its parent, then calls the user's function."""

    def __init__(self, then: Callable[[int], None] | None) -> None:
        self.then = then

    def __call__(self, worker: int) -> None:
        _die_with_parent(worker)
        if self.then is not None:
            self.then(worker)


@dataclass(frozen=True)
class Assignment:
    """How the micro-batches of a global batch are assigned to the units of the team, and which unit this worker has.

    `rank` is the number of its unit, `weights` are the shares of all units, and `generation` distinguishes one
    assignment from another. With `fine`, micro-batches are divided among units. If `together` consecutive units must
    run the same number of micro-batches, shorter shares are padded with dummy micro-batches. One worker of each unit
    `speaks` for it. With `scattered`, global batches come in no order. `islands` is (number of islands, those that this
    worker computes): the micro-batches are divided into one run for each island.
    """

    rank: int
    weights: tuple[float, ...]
    generation: int = 0
    fine: bool = False
    together: int = 1
    speaks: bool = True
    scattered: bool = False
    islands: tuple[int, tuple[int, ...]] = (1, (0,))


@lru_cache(maxsize=8)  # asked for twice a step, and almost always the same
def share_of(assignment: Assignment, grid: Grid, rows: int) -> tuple[tuple[int, range | None, bool], ...]:
    """The micro-batches of a global batch of `rows` rows that this worker computes, as (number, part, is a dummy).

    The part is the range of rows within the micro-batch, None for all.
    """
    cuts, (islands, local_islands) = grid.cut(rows), assignment.islands
    runs = deal(len(cuts), [1.0] * islands)
    return tuple(
        entry
        for island in local_islands
        for entry in _share(assignment, grid, cuts[: runs[island].stop], runs[island].start)
    )


def _share(
    assignment: Assignment, grid: Grid, cuts: Sequence[range], first: int
) -> Iterator[tuple[int, range | None, bool]]:
    """The worker's micro-batches of one island, whose run is the cuts from number `first` on."""
    shares = deal_rows(cuts[first:], assignment.weights, grid.grain if assignment.fine else None)
    share = [(first + number, rows) for number, rows in shares[assignment.rank]]
    peer_shares = [shares[rank] for rank in run_of(assignment.rank, assignment.together) if shares[rank]]
    dummy_index = (shares[assignment.rank] or peer_shares[0])[0][0] + first if peer_shares else 0
    yield from [(dummy_index, None, True)] * (max(map(len, peer_shares), default=0) - len(share))
    for number, rows in share:
        start = cuts[number].start
        yield number, None if rows == cuts[number] else range(rows.start - start, rows.stop - start), False


Batch = tuple[int, int, list[MicroBatch]]  # epoch, rows of the global batch, this worker's micro-batches


@dataclass(frozen=True)
class StreamRows:
    """Rows of a global batch of `count` rows of an iterable dataset, by their number in it."""

    epoch: int
    count: int
    rows: Mapping[int, Any]


class Feed:
    """Loads this worker's micro-batches, one global batch after another, from batch `start` of the phase on.

    `batches` is the number at which the feed ends (None: when the epochs of an iterable dataset end). An iterable
    dataset is read from the `position` on, or from its beginning.
    `tell` gets events that name the loader processes.
    While the user leaves `num_workers` open, loading moves to a process of its own, ahead of need, if it delays each
    step by more than `SLOW` seconds and a tenth of the step. A script that has imported lance decides that itself.

    The rows of a step are always loaded from the dataset as it is when the step begins. A loader process has the
    dataset as it was when the process was forked: if the script has changed it since (see Snapshot), the rows that were
    loaded ahead are dropped, and loading starts again. Paceline itself moves loading to a process only if it would
    notice every change, and moves it back after a change. Processes that the user asked for are forked again after a
    change; if changes may go unnoticed, also at each epoch, as torch's are, unless they are persistent. `news` holds
    decisions and their reasons.
    """

    SLOW = 0.005
    TRIES = 5
    RETURNS = 3  # moves undone by a change soon after: from then on rows are loaded in the step
    WORTH = 20  # steps that a move must last to count as useful

    def __init__(
        self,
        source: Source,
        grid: Grid,
        span: tuple[int, int | None, int],
        tell: Callable[..., None],
        watched: bool = False,
        position: Position | None = None,
    ) -> None:
        self.source, self.grid, self._tell = source, grid, tell
        self.start, self.batches, self.epochs = span
        self.news: dict[str, str] = {}
        self._taken_news = set[str]()  # the news that `take_news` has returned
        self.fine = False  # whether micro-batches of the last global batch were divided
        self.options = dict(source.options or {})
        self._open = "num_workers" not in self.options and source.rows is not None
        self._tries: list[float] = []
        self._loading = 0.0
        self._dealt: Assignment | None = None
        self._next = self.start
        self.collated = Collated(source.collate, grid.micro) if source.collate is not default_collate else None
        self._iterator: Any = None  # created when there is something to load
        self._rows: _Rows | None = None  # the rows, if they are loaded in this process
        self.watched = watched  # whether the script may change the dataset between two global batches
        self._length = len(source.dataset) if watched and source.rows is not None else None
        # The first global batch of the epoch after the one that was reached last.
        self._next_epoch = 0 if source.rows is None else self._end_of_epoch(self.start)
        self._asked = bool(self.options.get("num_workers"))  # whether the user asked for loader processes
        self._state: Snapshot | None = None  # of the objects that loader processes have a copy of
        self._forks_each_epoch = False
        self._until: int | None = None  # the step at which the loader processes end
        self._moved = self.start  # at which step loading moved to a process
        self._returns = 0
        self.position = position
        self.stream = self._make_stream(position) if source.rows is None else None
        self.rows: StreamRows | None = None  # those of an iterable dataset that another worker has read for this one
        # Whether another worker may read the rows, so that this one does not know where they end.
        self.shares_reader: Callable[[], bool] = _never

    @property
    def read(self) -> list[Any]:
        """All rows of the last global batch of an iterable dataset that this worker has read; else none."""
        return [] if self.stream is None else self.stream.rows

    def _compare_length(self, step: int) -> None:
        """Raises DatasetError if the dataset has another length when an epoch begins than when the feed was made."""
        self._next_epoch = self._end_of_epoch(step)
        epoch = self._next_epoch // self.grid.batches(self.source.rows or 0) - 1
        if self._length is not None and (now := len(self.source.dataset)) != self._length:
            raise DatasetError(
                f"the dataset has {now} rows at the start of epoch {self.source.first_epoch + epoch}, but had "
                f"{self._length} when the loop over steps() began",
                "write one loop over steps(dataset, epochs=1) per epoch, and change the length between the loops",
            )

    def grid_of(self, step: int) -> tuple[int, int, tuple[range, ...]]:
        """Epoch, first position and micro-batches (as position ranges) of a phase's global batch."""
        assert self.source.rows is not None
        epoch, batch = divmod(step, self.grid.batches(self.source.rows))
        rows = self.grid.batch_rows(batch, self.source.rows)
        return self.source.first_epoch + epoch, rows.start, self.grid.cut(len(rows))

    def later_single_row(self, step: int) -> str:
        """Describes the first later micro-batch that has a single row; empty if there is none.

        Only the first step of a loop, which must have none itself, gets an answer.
        """
        rows, grid = self.source.rows, self.grid
        if step != self.start or rows is None or self.batches is None or grid.ends_in_single_row(0, rows):
            return ""
        last = self._end_of_epoch(step) - 1  # all others are cut alike
        if not (step < last < self.batches and grid.ends_in_single_row(grid.batches(rows) - 1, rows)):
            return ""
        epoch, first, cuts = self.grid_of(last)
        return str(Slot(len(cuts) - 1, epoch, first + cuts[-1].start, first + cuts[-1].stop))

    def slots(self, start: int, assignment: Assignment) -> Iterator[Slot]:
        """Yields this worker's micro-batches from global batch `start` on; batches without any cost no time."""
        steps = self._with_share(start, assignment)
        if self._forks_each_epoch:
            steps = steps[: bisect_left(steps, self._end_of_epoch(start))]
        for step in steps:
            yield from self._slots_of(step, assignment)

    def _slots_of(self, step: int, assignment: Assignment) -> Iterator[Slot]:
        """Yields this worker's micro-batches of one global batch."""
        epoch, first, cuts = self.grid_of(step)
        for index, part, dummy in share_of(assignment, self.grid, sum(map(len, cuts))):
            yield Slot(index, epoch, first + cuts[index].start, first + cuts[index].stop, (), part, dummy)

    def _with_share(self, start: int, assignment: Assignment) -> range:
        """The global batches, from `start` on, in which this worker may have a share.

        All global batches of an epoch but the last are divided alike, so it is enough to look at two of them.
        """
        assert self.source.rows is not None
        assert self.batches is not None
        epoch = self.grid.batches(self.source.rows)
        sizes = (len(self.grid.batch_rows(batch, self.source.rows)) for batch in (0, epoch - 1))
        usual, last = (bool(share_of(assignment, self.grid, rows)) for rows in sizes)
        if usual:
            return range(start, self.batches)
        return range(start + (-1 - start) % epoch, self.batches if last else 0, epoch)

    def has(self, step: int) -> bool:
        """Whether there is a global batch of this number; closes the feed if there is none."""
        more = self.batches is None or step < self.batches
        if more and self.stream is not None:
            more = self.shares_reader() or self.stream.reach(step)
        elif more and step >= self._next_epoch:
            self._compare_length(step)
        if not more:
            self.close()
        return more

    def at(self, step: int, assignment: Assignment) -> Batch:
        """Loads this worker's share of a global batch under an assignment: the next one, or the last one again."""
        began = time.perf_counter()
        self.fine = assignment.fine
        if self.stream is not None:
            batch = self._stream_share(step, assignment)
        else:
            if (assignment, step) != (self._dealt, self._next) or (self._state is not None and self._is_stale(step)):
                self._dealt, self._iterator = assignment, None
            epoch, _, cuts = self.grid_of(step)
            count = sum(map(len, cuts))
            share = len(share_of(assignment, self.grid, count))
            if share and self._iterator is None:
                self._iterator = self._loader(step)
            quiet = self._rows is not None and self._rows.quiet
            with nullcontext() if quiet else RngState(torch.device("cpu")).preserved():
                taken = [self._taken(step, number) for number in range(share)]
            self._next = step + 1
            batch = epoch, count, taken
        self._loading = time.perf_counter() - began
        HEARTBEAT.loaded(self._loading)
        return batch

    def _taken(self, step: int, number: int) -> MicroBatch:
        """Loads the next micro-batch, which is the one with this number in the worker's share of a global batch."""
        with AddNote(partial(self._describe_rows, step, number)):
            slot, batch = next(self._iterator)
        HEARTBEAT.beat()
        return self._micro_batch(slot, batch)

    def _micro_batch(self, slot: Slot, batch: Any) -> MicroBatch:
        rows, start = slot.stop - slot.start, slot.start % self.grid.global_batch
        taken = MicroBatch(slot.index, rows, batch, slot, slot.part, slot.dummy, slot.rows, start)
        if slot.apart:
            taken.is_part()
        return taken if self.collated is None else self.collated.look(taken)

    def load_aside(self, step: int, assignment: Assignment) -> list[MicroBatch]:
        """Loads the share of a global batch under another assignment. What is loaded ahead stays as it is."""
        if self.stream is not None:
            return self._stream_share(step, assignment)[2]
        with RngState(torch.device("cpu")).preserved():
            slots = list(self.source.filled(self._slots_of(step, assignment)))
            items = self.source.loaded(_Together(self.source, slots), self._tell) if slots else []
        return [self._micro_batch(slot, batch) for slot, batch in items]

    def _describe_rows(self, step: int, number: int) -> str:
        """Describes the rows of a micro-batch that is being loaded, for errors."""
        assert self._dealt is not None
        (slot,) = self.source.filled(islice(self.slots(step, self._dealt), number, number + 1))
        return rows_told([slot.index], slot.rows)

    def all(self, assignment: Assignment) -> Iterator[Batch]:
        """Yields this worker's shares of all global batches under an assignment."""
        step = self.start
        try:
            while self.has(step):
                yield self.at(step, assignment)
                step += 1
        finally:
            self.close()

    def close(self) -> None:
        """Ends loading now. Garbage collection would do so later, perhaps in a process of a later loader."""
        self._iterator = self._dealt = None
        if self.stream is not None:
            self.stream.close()

    def _make_stream(self, position: Position | None) -> RowStream:
        """Returns what reads an iterable dataset, in a process of its own if the user's options ask for one."""
        options = dict(self.options)
        if options.get("num_workers", 0) > 1:
            what = f"an iterable dataset cannot be read by {options['num_workers']} loader processes"
            raise UsageError(what, "use num_workers=1, or a dataset with __len__ and __getitem__")
        options["worker_init_fn"] = _Start(options.get("worker_init_fn"))
        if not options.get("num_workers"):
            options.pop("worker_init_fn")
        options.setdefault("generator", torch.Generator())

        def begin(rows: NumberedRows) -> Iterator[Any]:
            if options.get("num_workers") and self.watched:
                self._state = self.source.snapshot()
            return self.begun(DataLoader(rows, batch_size=None, collate_fn=_same, **options))

        def is_outdated() -> bool:
            state = None if options.get("persistent_workers") else self._state
            return state is not None and bool(state.unseen or state.changed())

        epochs = range(self.source.first_epoch, self.source.first_epoch + self.epochs)
        return RowStream(self.source, epochs, self.grid.global_batch, begin, is_outdated, position)

    def _stream_share(self, step: int, assignment: Assignment) -> Batch:
        """Collates this worker's share of a global batch of an iterable dataset."""
        assert self.stream is not None
        if self.rows is None:
            self.stream.reach(step)
        if self._state is not None and (name := self._state.changed()):
            what = (
                "an iterable dataset read by a loader process was changed between steps; the change takes effect in"
                " the next epoch"
            )
            self.news.setdefault(what, f"{name} changed; without num_workers= each step sees changes")
        given = self.rows or StreamRows(self.stream.epoch, len(self.stream.rows), dict(enumerate(self.stream.rows)))
        cuts, streams, share = self.grid.cut(given.count), RngState(torch.device("cpu")), list[MicroBatch]()
        for index, part, dummy in share_of(assignment, self.grid, given.count):
            cut = cuts[index]
            with streams.preserved():
                position = step * self.grid.global_batch + cut.start
                streams.seed(stream_seed(self.source.seed, _COLLATE + given.epoch, position))
                batch = self.source.collate([given.rows[row] for row in cut])
            where = f"micro-batch {index} of epoch {given.epoch}"
            taken = MicroBatch(index, len(cut), batch, where, part, dummy, start=cut.start)
            share.append(taken if self.collated is None else self.collated.look(taken))
        return given.epoch, given.count, share

    def _loader(self, start: int) -> Iterator[Any]:
        assert self._dealt is not None
        options = {
            "num_workers": 0,
            **({} if self._dealt.scattered else self.options),
        }  # scattered batches come in no order, so none can be loaded ahead
        if options["num_workers"] and self.watched:
            self._state = self.source.snapshot()
            self._forks_each_epoch = bool(self._state.unseen) and not options.get("persistent_workers")
            self._until = self._end_of_epoch(start) if self._forks_each_epoch else None
            if self._until is not None:
                what = "loader processes are restarted at each epoch and then see what the script has changed"
                self.news.setdefault(what, f"{self._state.unseen} cannot be compared from step to step")
        slots, rows = self.source.filled(self.slots(start, self._dealt)), _Rows(self.source)
        if options == {"num_workers": 0}:  # a DataLoader would do the same, but costs more time than small rows
            self._rows = rows
            return map(rows.__getitem__, slots)
        self._rows = None
        if options["num_workers"]:
            options["worker_init_fn"] = _Start(options.get("worker_init_fn"))
            share = max(1, len(share_of(self._dealt, self.grid, self.grid.global_batch)))
            options.setdefault("prefetch_factor", max(2, -(-2 * share // options["num_workers"])))
            options.setdefault("pin_memory", torch.cuda.is_initialized())  # so that copies to the GPU are asynchronous
        # DataLoader draws a seed, which must not come from the user's generator.
        options.setdefault("generator", torch.Generator())
        return self.begun(DataLoader(rows, None, sampler=slots, collate_fn=_same, **options))

    def _end_of_epoch(self, step: int) -> int:
        """The first global batch of the epoch after that of `step`."""
        assert self.source.rows is not None
        epoch = self.grid.batches(self.source.rows)
        return (step // epoch + 1) * epoch

    def _is_stale(self, step: int) -> bool:
        """Whether loader processes may have an outdated copy of the dataset."""
        if self._state is None or self._iterator is None or not self.options.get("num_workers"):
            return False
        if self._until is not None and step >= self._until:
            return True
        name = self._state.changed()
        if not name:
            return False
        self._state = None
        if self._asked:
            self.news.setdefault(
                "loader processes are restarted when the script changes the dataset between steps", f"{name} changed"
            )
        else:
            del self.options["num_workers"]
            self._try_again(name, step)
        return True

    def begun(self, loader: DataLoader[Any]) -> Iterator[Any]:
        """Starts the loader, and tells the agent its processes, after which the agent tidies up if they are killed."""
        iterator = iter(loader)
        if loader.num_workers:
            self._tell("loaders", pids=[child.pid for child in active_children()])
        return iterator

    def measured(self, step: float) -> None:
        """Measures a step of so many seconds; moves loading to a process if it has delayed several steps."""
        if not self._open or (self._dealt is not None and self._dealt.scattered):
            return
        loading = self._loading
        self._tries.append(loading if loading > self.SLOW and loading > 0.1 * step else 0.0)
        count = len(self._tries)
        typical = sorted(self._tries[1:])[count // 2 - 1] if count > 1 else 0.0
        if count == self.TRIES - 1 and typical:
            self._state = (
                self.source.snapshot()
            )  # one step before the move, to see whether loading itself changes the dataset
        if count < self.TRIES:
            return
        state, self._state, self._open = self._state, None, False
        if not typical or state is None or not sys.platform.startswith("linux"):  # elsewhere processes are not forked
            return
        held = f"loading delayed each step by {1000 * typical:.0f} ms (loader={{'num_workers': N}} overrides)"
        if library := next((name for name in _THREADED_LIBRARIES if name in sys.modules), ""):
            what = f"rows are loaded within the step, because {library} cannot be used in a process that is forked"
            self.news[what] = held
        elif state.unseen:
            what = (
                "rows are loaded within the step, because a process that loads ahead could miss a change of the dataset"
            )
            self.news[what] = f"{state.unseen} cannot be compared; {held}"
        elif name := state.changed():
            self._try_again(name, self._next)
        else:
            self.options["num_workers"] = 1
            self._moved = self._next
            self._iterator = self._loader(self._next)
            self.news["rows are loaded ahead by a separate process"] = held

    def take_news(self) -> list[tuple[str, str]]:
        """Returns the decisions since the last call and their reasons, each decision once."""
        news = [(what, why) for what, why in self.news.items() if what not in self._taken_news]
        self._taken_news |= self.news.keys()
        self.news.clear()
        return news

    def _try_again(self, name: str, step: int) -> None:
        """Keeps loading in this process because the dataset changed; for good if that has happened several times."""
        self._returns = self._returns + 1 if step - self._moved < self.WORTH else 1
        self._tries, self._open = [], self._returns < self.RETURNS
        again = "for now" if self._open else "from now on"
        self.news[f"rows are loaded within the step {again}: the dataset changes between steps"] = f"{name} changed"


def _same(item: Any) -> Any:
    return item


def _never() -> bool:
    return False
