"""Checks that all workers have the same dataset."""

from __future__ import annotations

import dataclasses
import hashlib
import io
import random
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import islice
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch.backends.cpu import get_cpu_capability

from paceline.base.batching import parted, stream_seed
from paceline.base.heartbeat import HEARTBEAT
from paceline.base.text import ranks
from paceline.comm.communicator import Group
from paceline.compute.rng import RngState
from paceline.data.loader import Feed, Slot, Source
from paceline.data.row_stream import EndOfEpoch, NumberedRows, Stream
from paceline.errors import DatasetError

SAMPLED = 4  # rows that are compared
_STDLIB = sys.stdlib_module_names  # objects of these may belong to other threads
_DEPTH, _MANY = 5, 64  # levels of nesting in a row or dataset, and items of a container, that are looked at
_STREAM = 1 << 44  # keeps these random streams apart from those of loading
# What loading a row may raise. It is ignored: training raises it again if it needs the row.
_LOADING_ERRORS = (
    RuntimeError,
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    AssertionError,
    ArithmeticError,
    OSError,
)
_SAME = "use the same data in the same order on all workers: sort file names, and seed random splits and generated data"
_WHOLE_STREAM = (
    "yield the same rows in the same order on every worker: Paceline distributes them, so an iterable dataset must "
    "not split itself by rank, RANK or WORLD_SIZE"
)
_DRAWN = (
    "rows of the iterable dataset differed when read twice, because of random numbers other than those of torch, "
    "random and numpy; they cannot be compared between workers"
)
_SEED_OWN = "seed these generators equally on every worker, or rows may be used twice"

_SAME_LATER = f"{_SAME}; keep what the loop changes in the dataset in trainer.state, which new workers receive"
_ORDER = "use the same seed= on all workers, and an order= that depends only on its arguments"


class Fingerprint:
    """Compares the dataset of a loop on all workers. In `lockstep` all workers begin an epoch in the same step."""

    def __init__(self, source: Source, tell: Callable[..., None], of: str = "", lockstep: bool = True) -> None:
        self._source, self._tell, self._of, self._lockstep = source, tell, of, lockstep
        self._local_sample: dict[str, Any] = {}
        self._generation: int | None = None  # the last generation whose members were compared
        self._epoch: int | None = None  # the last epoch of an iterable dataset whose first rows were compared

    def compare(self, group: Group, generation: int) -> str:
        """Compares lengths, order and a few rows, once per generation that workers have joined. Collective.

        Returns a text that names rows which cannot be compared, else an empty one. Raises DatasetError if the datasets
        differ; if some workers were compared in an earlier generation, only the new workers raise it.
        """
        if group.size == 1 or generation == self._generation or self._source.rows is None:
            return ""
        group.declare(f"the first rows of steps(){self._of}", kind="rows compared")
        known = self._generation is not None
        before = group.gather_json(known)
        if all(before):  # no worker has joined since they were compared
            self._generation = generation
            return ""
        self._local_sample = _sample(self._source, self._tell)  # again, because the script may have changed the dataset
        samples = group.gather_json(self._local_sample)
        try:
            return self._judge(group, samples, _SAME_LATER if any(before) else _SAME)
        except DatasetError:
            if not known:
                raise
            return ""
        finally:
            self._generation = generation

    def compare_stream(
        self, group: Group, generation: int, feed: Feed, step: int, epoch: int, given: list[list[str]] | None
    ) -> str:
        """Compares the first rows that an iterable dataset yields for the global batch of `step`. Collective.

        `given` are the digests of the rows of a worker that does not read them itself: those of its reader. When a loop
        begins, it reads the first rows itself, once, unless the dataset is a `Stream`. Compares once per generation,
        and in lockstep also when an epoch begins. Returns and raises as `compare`.
        """
        if self._source.rows is not None or group.size == 1:
            return ""
        if generation == self._generation and (epoch == self._epoch or not self._lockstep):
            return ""
        group.declare(f"the first rows of steps(){self._of}", kind="rows compared")
        known, self._generation, self._epoch = self._generation is not None, generation, epoch
        newcomers = group.gather_json(known)
        read_again = partial(_read_again, feed, step)
        if given is not None and step == 0 and not any(newcomers) and not isinstance(self._source.dataset, Stream):
            given, read_again = None, partial(_peek, feed)
        local_rows = given if given is not None else read_again() if feed.rows is not None else first_rows(feed)
        difference = _find_different_row(group, group.gather_json(local_rows))
        if difference is None:
            return ""
        if any(group.gather_json(given is None and local_rows != read_again())):
            return f"{_DRAWN}; {_SEED_OWN}"
        if known and not all(newcomers):
            return ""  # only the new workers differ, and they raise
        number, usual, deviating = difference
        what = f"workers disagree about the dataset: row {feed.grid.global_batch * step + number} that it yields"
        raise DatasetError(f"{what} differs between {deviating} and {usual}", _WHOLE_STREAM)

    def _judge(self, group: Group, samples: list[dict[str, Any]], cure: str) -> str:
        """Compares the `samples` of all workers; returns and raises as `compare`."""
        everyone, names, drawn = range(group.size), group.names, list[int]()
        same_lengths([sample["length"] for sample in samples], group, "the dataset")
        for number, position in enumerate(self._local_sample["at"]):
            rows = [sample["rows"][number] for sample in samples]
            if split := parted(everyone, rows):
                one, other = (f"row {rows[members[0]]} on worker {names[members[0]]}" for members in split)
                raise DatasetError(f"position {position} of an epoch is {one} and {other}", _ORDER)
        for number, row in sorted(enumerate(self._local_sample["rows"]), key=lambda pair: pair[1]):
            digests = [sample["digests"][number] for sample in samples]
            drawn += [row] if None in digests else []
            if None in digests or [] in digests:
                continue
            exact, floats = zip(*digests, strict=True)
            # Computed floats may differ between kinds of processors.
            alike = [
                [r for r in everyone if samples[r]["kind"] == kind]
                for kind in {sample["kind"]: 0 for sample in samples}
            ]
            if split := next(
                filter(None, (parted(everyone, exact), *(parted(members, floats) for members in alike))), None
            ):
                usual, deviating = (ranks(names[rank] for rank in members) for members in split)
                raise DatasetError(f"row {row} of the dataset differs between {deviating} and {usual}", cure)
        which = f"row{'s' if len(drawn) > 1 else ''} {', '.join(map(str, drawn))} of the dataset"
        what = "differed when loaded twice, because of random numbers other than those of torch, random and numpy"
        return f"{which} {what}; they cannot be compared between workers" if drawn else ""


def first_rows(feed: Feed) -> list[list[str]]:
    """The digests of the first rows of the last global batch of an iterable dataset."""
    return _digests_of(feed.read[:SAMPLED])


def _digests_of(rows: Sequence[Any]) -> list[list[str]]:
    digests = list[list[str]]()
    for row in rows:
        exact, floats = hashlib.sha256(), hashlib.sha256()
        _digest(row, exact, floats, _DEPTH)
        digests.append([exact.hexdigest()[:16], floats.hexdigest()[:16], get_cpu_capability()])
    return digests


def _read_again(feed: Feed, step: int) -> list[list[str]]:
    """The digests of the same rows, read in another pass over the dataset."""
    source = replace(feed.source, options=None)
    span = feed.start, feed.batches, feed.epochs
    again = Feed(source, feed.grid, span, lambda *_, **__: None, position=feed.position)
    with RngState(torch.device("cpu")).preserved():
        return first_rows(again) if again.has(step) else []


def _peek(feed: Feed) -> list[list[str]]:
    """The digests of the first rows of the dataset, of which no more are read."""
    source, count = feed.source, min(SAMPLED, feed.grid.global_batch)
    numbered = NumberedRows(source, range(source.first_epoch, source.first_epoch + 1), 1 << 62)
    with RngState(torch.device("cpu")).preserved():
        return _digests_of([row for _, row in islice(numbered, count) if not isinstance(row, EndOfEpoch)])


def _find_different_row(group: Group, samples: Sequence[Sequence[Sequence[str]]]) -> tuple[int, str, str] | None:
    """The first row that differs, the workers that agree and those that deviate; None if all rows are the same."""
    for number in range(max(map(len, samples), default=0)):
        rows = [tuple(sample[number]) if number < len(sample) else () for sample in samples]
        # Computed floats may differ between kinds of processors.
        kinds = {row[2] for row in rows if row}
        alike = [row if len(kinds) == 1 else row[:1] for row in rows]
        if split := parted(range(group.size), alike):
            usual, deviating = (ranks(group.names[rank] for rank in members) for members in split)
            return number, usual, deviating
    return None


def compare_read(group: Group, rows: int, feed: Feed, first: Sequence[Sequence[str]], what: str) -> None:
    """Raises DatasetError if workers have read different numbers of rows of an iterable dataset, or different
    `first_rows`. Part of the entered collective.
    """
    reports = group.gather_json([rows, first]) if group.size > 1 and feed.source.rows is None else []
    _refuse_lengths(group, f"{what}, which yields", [read for read, _ in reports])
    difference = _find_different_row(group, [rows for _, rows in reports])
    if difference is not None and not any(group.gather_json(first != _read_again(feed, 0))):
        raise DatasetError(
            f"workers disagree about {what}: row {difference[0]} differs on {difference[2]}", _WHOLE_STREAM
        )


def refuse_lengths(group: Group, read: int) -> None:
    """Raises DatasetError if workers have `read` different numbers of rows of an iterable dataset. Collective."""
    group.declare("the lengths of an iterable dataset", check=False, kind="rows compared")
    _refuse_lengths(group, "the dataset, which yields for this global batch", group.gather_json(read))


def _refuse_lengths(group: Group, what: str, lengths: Sequence[int]) -> None:
    if split := parted(range(len(lengths)), lengths):
        each = [f"{lengths[members[0]]} rows on {ranks(group.names[rank] for rank in members)}" for members in split]
        raise DatasetError(f"workers disagree about {what} {' and '.join(each)}", _WHOLE_STREAM)


def same_lengths(lengths: Sequence[int | None], group: Group, what: str) -> None:
    """Raises DatasetError if the dataset has different lengths on some workers."""
    if split := parted(range(group.size), lengths):
        each = [f"{lengths[members[0]]} rows on {ranks(group.names[rank] for rank in members)}" for members in split]
        cure = "pass the same complete dataset on all workers: Paceline distributes its rows"
        raise DatasetError(f"{what} has {' and '.join(each)}", cure)


def compare_rows(group: Group, source: Source, tell: Callable[..., None], what: str) -> None:
    """Raises DatasetError if the dataset has different lengths on some workers, or if one of a few rows differs.

    The rows are loaded only the first time that a dataset is compared. Part of the entered collective.
    """
    digests, rows = list[Any](), list[int]()
    if source.rows is not None and group.size > 1:
        rows = sorted({0, source.rows // 2, source.rows - 1})
        if _compared.get(id(source.dataset)) is not source.dataset:
            digests = source.loaded(_Twice(source, rows), tell)
    reports = group.gather_json([source.rows, get_cpu_capability(), digests])
    same_lengths([length for length, _, _ in reports], group, what)
    known = [rank for rank in range(group.size) if reports[rank][2]]
    for number, row in enumerate(rows):
        row_digests = [worker_digests[number] if worker_digests else None for _, _, worker_digests in reports]
        if not all(row_digests[rank] for rank in known):
            continue  # some worker drew it at random, or cannot load it
        # Computed floats may differ between kinds of processors.
        equal = len({reports[rank][1] for rank in known}) == 1
        if split := parted(
            known,
            [
                worker_digests and (tuple(worker_digests) if equal else worker_digests[0])
                for worker_digests in row_digests
            ],
        ):
            usual, deviating = (ranks(group.names[rank] for rank in members) for members in split)
            raise DatasetError(f"row {row} of {what} differs between {deviating} and {usual}", _SAME)
    if digests:
        with suppress(TypeError):  # a list, for example, has no weak references and is compared each time
            _compared[id(source.dataset)] = source.dataset


_compared = weakref.WeakValueDictionary[int, Any]()  # datasets of evaluate() and predict() that were compared


def _sample(source: Source, tell: Callable[..., None]) -> dict[str, Any]:
    """This worker's sample: positions spread over an epoch, the rows at these, and the digests of the rows."""
    assert source.rows is not None
    at = sorted({(source.rows - 1) * part // (SAMPLED - 1) for part in range(SAMPLED)})
    slots = [Slot(number, source.first_epoch, position, position + 1) for number, position in enumerate(at)]
    rows = [slot.rows[0] for slot in source.filled(iter(slots))]
    digests = source.loaded(_Twice(source, rows), tell)
    return {"length": source.rows, "at": at, "rows": rows, "digests": digests, "kind": get_cpu_capability()}


class _Twice:
    """A dataset of one item: the digests of some rows, each loaded twice; None for a row that differs between both."""

    def __init__(self, source: Source, rows: Sequence[int]) -> None:
        self.source, self.rows = source, rows

    def __len__(self) -> int:
        return 1

    def __getitem__(self, _: int) -> list[list[str] | None]:
        kept, digests = list(_kept(self.source.dataset, _DEPTH, {})), list[list[str]]()
        streams = RngState(torch.device("cpu"))
        with streams.preserved():
            try:
                for row in (*self.rows, *self.rows):
                    streams.seed(stream_seed(self.source.seed, _STREAM, row))
                    digests.append(_digests(self.source, row))
                    HEARTBEAT.beat()
            finally:
                for bring_back in kept:
                    bring_back()
        pairs = zip(digests[: len(self.rows)], digests[len(self.rows) :], strict=True)
        return [one if one == other else None for one, other in pairs]


def _digests(source: Source, row: int) -> list[str]:
    """The digests of a row without its floats, and of its floats; empty if the row cannot be loaded."""
    exact, floats = hashlib.sha256(), hashlib.sha256()
    try:
        _digest(source.samples([row])[0], exact, floats, _DEPTH)
    except _LOADING_ERRORS:
        return []
    return [exact.hexdigest()[:16], floats.hexdigest()[:16]]


def _digest(value: Any, exact: Any, floats: Any, depth: int) -> None:
    """Adds a value to the digests: tensors, arrays, numbers, texts and nestings of these; ignores all else."""
    if value is None or isinstance(value, bool | int | str | bytes):
        exact.update(f"{value!r};".encode("utf-8", "backslashreplace"))
    elif isinstance(value, float | complex):
        floats.update(f"{value!r};".encode())
    elif isinstance(value, torch.Tensor):
        exact.update(f"{value.dtype}{tuple(value.shape)};".encode())
        raw = value.detach().to_dense().resolve_conj().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        (floats if value.is_floating_point() or value.is_complex() else exact).update(raw)
    elif hasattr(value, "__array_interface__"):  # numpy's, and images
        array = sys.modules["numpy"].asarray(value)
        exact.update(f"{array.dtype}{array.shape};".encode())
        if not array.dtype.hasobject:
            (floats if array.dtype.kind in "fc" else exact).update(array.tobytes())
    elif depth and isinstance(value, Mapping):
        pairs = sorted(value.items(), key=lambda pair: repr(pair[0]))
        _digest([part for pair in pairs for part in pair], exact, floats, depth - 1)
    elif depth and isinstance(value, list | tuple):
        exact.update(f"{len(value)};".encode())
        for item in value:
            _digest(item, exact, floats, depth - 1)
    elif depth and dataclasses.is_dataclass(value):
        _digest(vars(value), exact, floats, depth)


def _kept(value: Any, depth: int, seen: dict[int, Any]) -> Iterator[Callable[[], Any]]:
    """Yields functions that undo what loading a row may change in a dataset: counts, caches, positions of open files,
    and random generators.
    """
    if not depth or id(value) in seen or isinstance(value, type | ModuleType | FunctionType | torch.Tensor):
        return
    seen[id(value)], kind = value, type(value)
    inner: list[Any] = []
    if kind is random.Random:
        yield partial(value.setstate, value.getstate())
    elif kind.__name__ in ("Generator", "RandomState") and hasattr(kind, "set_state"):  # torch's, numpy's
        yield partial(value.set_state, value.get_state())
    elif kind.__name__ == "Generator" and hasattr(kind, "bit_generator"):  # numpy's
        yield partial(setattr, value.bit_generator, "state", value.bit_generator.state)
    elif isinstance(value, io.IOBase):
        if not value.closed and value.seekable():
            yield partial(value.seek, value.tell())
    elif isinstance(value, tuple):
        inner = [*value]
    elif isinstance(value, list):
        yield partial(value.__setitem__, slice(None), inner := [*value])
    elif isinstance(value, dict) or (
        hasattr(value, "__dict__") and str(kind.__module__).partition(".")[0] not in _STDLIB
    ):
        now = value if isinstance(value, dict) else vars(value)
        before = {**now}
        yield partial(_put_back, now, before)
        inner = [*before.values()]
    for one in inner if len(inner) <= _MANY else ():
        yield from _kept(one, depth - 1, seen)


def _put_back(now: dict[Any, Any], before: dict[Any, Any]) -> None:
    for name in now.keys() - before.keys():
        del now[name]
    now.update(before)
