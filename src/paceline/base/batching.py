"""Cuts a global batch into micro-batches and shares, derives their seeds; the step vector and the transaction."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cached_property, lru_cache
from itertools import accumulate, pairwise
from typing import Any, Generic, TypeVar

from paceline.errors import UsageError

_T = TypeVar("_T")
_MASK = (1 << 64) - 1
PARTS = ("data", "compute", "reduce", "update", "other")  # where the time of a step goes
LISTED_WORKERS = 64  # the largest team whose workers' seconds are reported one by one
NOWHERE: Mapping[str, float] = {}


def stream_seed(seed: int, step: int, micro_batch: int) -> int:
    """The seed of the random numbers of one micro-batch, a 63-bit integer.

    It depends on nothing but the arguments: not on workers, machines or what was drawn before. Two rounds of the
    splitmix64 finaliser per argument (Steele, Lea and Flood, "Fast Splittable Pseudorandom Number Generators", OOPSLA
    2014).

    Args:
        seed: The seed of the training.
        step: The optimizer step, from 0.
        micro_batch: The number of the micro-batch in its global batch, from 0.
    """
    value = 0x9E3779B97F4A7C15
    for part in (seed, step, micro_batch):
        value = (value + (part & _MASK) + 0x9E3779B97F4A7C15) & _MASK
        for _ in range(2):
            value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
            value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
            value ^= value >> 31
    return value >> 1


@dataclass(frozen=True)
class Grid:
    """How a global batch is cut: `global_batch` rows in micro-batches of `micro` rows (the last may be shorter)."""

    global_batch: int
    micro: int

    @staticmethod
    def of(global_batch: int, micro: int | None) -> Grid:
        """The grid that the user's quantities define; `micro` is an eighth of the global batch unless said."""
        if global_batch < 1:
            raise UsageError(
                f"global_batch={global_batch} is too small", "use the number of rows of one optimizer step, at least 1"
            )
        if micro is not None and micro > global_batch:
            raise UsageError(
                f"micro={micro} is more than the global batch of {global_batch} rows",
                f"use micro={global_batch} or less",
            )
        return Grid(global_batch, micro or -(-global_batch // 8))

    @property
    def grain(self) -> int:
        """Rows in which micro-batches are divided among workers, where they may be: an eighth of one."""
        return -(-self.micro // 8)

    def against_single_rows(self, rows: int) -> str:
        """What to do where a micro-batch has a single row, in epochs of `rows` rows: the nearest `micro` that helps, or
        the nearest global batch; and to leave the row out, where it is an epoch's last.
        """
        size = self.global_batch
        micro = next((m for m in _around(self.micro, size) if not Grid(size, m).has_single_rows(rows)), None)
        other = f"the plan micro={micro}" if micro else "another global_batch="
        if micro is None:
            for number in _around(size, rows):
                grids = Grid(number, min(self.micro, number)), Grid.of(number, None)
                if not any(grid.has_single_rows(rows) for grid in grids):
                    other = f"global_batch={number}"
                    break
        cure = f"choose {other}, which avoids a micro-batch of a single row but changes the mathematics"
        if rows > 1 and not self.has_single_rows(rows - 1):
            cure += f", or train on the first {rows - 1} rows: torch.utils.data.Subset(dataset, range({rows - 1}))"
        return cure

    def has_single_rows(self, rows: int) -> bool:
        """Whether a micro-batch has a single row, in epochs of `rows` rows."""
        return any(self.ends_in_single_row(batch, rows) for batch in (0, self.batches(rows) - 1))

    def ends_in_single_row(self, batch: int, rows: int) -> bool:
        """Whether the last micro-batch of a global batch has a single row, in epochs of `rows` rows."""
        count = len(self.batch_rows(batch, rows))
        return count % self.micro == 1 or self.micro == 1

    def batches(self, rows: int) -> int:
        """Global batches of an epoch of `rows` rows; the last one may be smaller."""
        return -(-rows // self.global_batch)

    def batch_rows(self, batch: int, rows: int) -> range:
        """Positions of global batch number `batch` within an epoch of `rows` rows."""
        start = batch * self.global_batch
        return range(start, min(start + self.global_batch, rows))

    @lru_cache(maxsize=64)  # noqa: B019  grids are few and small
    def cut(self, rows: int) -> tuple[range, ...]:
        """Micro-batches of a global batch of `rows` rows, as ranges of rows within it."""
        return tuple(range(start, min(start + self.micro, rows)) for start in range(0, rows, self.micro))


def _around(number: int, most: int) -> Iterator[int]:
    """Numbers from 2 to `most`, the nearest first."""
    return (n for by in range(most) for n in dict.fromkeys((number + by, number - by)) if 1 < n <= most)


def deal(micro_batches: int, weights: Sequence[float]) -> list[range]:
    """Shares: contiguous runs of whole micro-batches in worker order, in proportion to `weights` (largest remainder).

    Every micro-batch is dealt exactly once; a share may be empty.
    """
    total = sum(weights)
    ideal = [micro_batches * weight / total for weight in weights]
    counts = [int(part) for part in ideal]
    by_remainder = sorted(range(len(weights)), key=lambda w: (counts[w] - ideal[w], w))
    for worker in by_remainder[: micro_batches - sum(counts)]:
        counts[worker] += 1
    return [range(end - count, end) for end, count in zip(accumulate(counts), counts, strict=True)]


def deal_rows(cuts: Sequence[range], weights: Sequence[float], grain: int | None) -> list[list[tuple[int, range]]]:
    """Assigns the micro-batches of a global batch to workers, in proportion to `weights`.

    Returns each worker's share as (micro-batch, its rows in the global batch). Without `grain` micro-batches are not
    divided; with it, workers may share one in parts of `grain` rows.
    """
    grains = [
        (number, range(start, min(start + (grain or len(cut)), cut.stop)))
        for number, cut in enumerate(cuts)
        for start in range(cut.start, cut.stop, grain or len(cut))
    ]
    shares: list[list[tuple[int, range]]] = []
    for share in deal(len(grains), weights):
        parts: list[tuple[int, range]] = []
        for number, rows in grains[share.start : share.stop]:
            if parts and parts[-1][0] == number:
                parts[-1] = number, range(parts[-1][1].start, rows.stop)
            else:
                parts.append((number, rows))
        shares.append(parts)
    return shares


@dataclass(frozen=True)
class Agreed:
    """What all workers know after a step's vector was summed: the same on each of them, bit for bit.

    `count` and `loss` are sums over the global batch; `tested` and `no_merge` are votes on merging micro-batches,
    `no_split` on dividing them; `failed` is the number of workers where dividing failed, `news` the number of those
    that have a message for the user; `stop`, `save` and `enter` (the planned generation) are requests; `writing` and
    `written` count the workers that are writing their part of a checkpoint, or have written it; `metrics` maps names to
    (sum, count); `seconds` are each worker's seconds of its last update, loading, forward and backward; `unused` are
    the numbers of the parameters that got no gradient on any worker; `tune` counts the workers that want codecs to be
    chosen again; `digests` are of each worker's weights before the step, in steps that compare them, and `look`
    requests this of the next step; `spent` is where the time of each worker went, by part: data and compute of this
    step, the rest of the one before. `sq_norm` sums the squared gradient norms of a sample of each worker's rows or
    tokens, `sq_norm_rows` the sizes of these samples, and `sq_norm_squares` the squares of the sizes. `streams` is the
    number of workers that read an iterable dataset, `read` and `read_squares` the sums of the numbers of rows that they
    read and of their squares.
    """

    count: float
    loss: float
    tested: int
    no_merge: int
    stop: int
    save: int
    enter: int
    writing: int
    written: int
    metrics: dict[str, tuple[float, float]]
    seconds: tuple[float, ...]
    unused: tuple[int, ...]
    no_split: int = 0
    failed: int = 0
    news: int = 0
    look: int = 0
    tune: int = 0
    digests: tuple[float, ...] = ()
    spent: tuple[tuple[float, ...], ...] = ()
    sq_norm: float = 0.0
    sq_norm_rows: float = 0.0
    sq_norm_squares: float = 0.0
    streams: int = 0
    read: int = 0
    read_squares: int = 0

    @property
    def lengths_differ(self) -> bool:
        """Whether workers have read different numbers of rows of an iterable dataset: then the variance is not zero."""
        return self.streams * self.read_squares != self.read**2


NOTHING = Agreed(0.0, 0.0, 0, 0, 0, 0, 0, 0, 0, {}, (), ())
Part = tuple[int, float, float, dict[str, tuple[float, float]]]  # a micro-batch's number, loss, count, metrics
_VOTES = ("tested", "no_merge", "no_split", "failed", "news")
_NUMBERS = ("count", "loss", "sq_norm", "sq_norm_rows", "sq_norm_squares")  # the rest are whole ones
_STREAMS = ("streams", "read", "read_squares")
_FIELDS = (*_NUMBERS, *_VOTES, "stop", "save", "enter", "writing", "written", "look", "tune", *_STREAMS)
_ZEROS: dict[str, Any] = dict.fromkeys(_FIELDS, 0) | dict.fromkeys(_NUMBERS, 0.0)


@dataclass(frozen=True)
class VectorLayout:
    """The layout of a step's vector of float64: fixed fields, two per metric, two per worker, one per parameter, and of
    each of few workers where its time went.
    """

    metrics: tuple[str, ...]
    workers: int
    params: int

    @cached_property
    def _lanes(self) -> int:
        return len(PARTS) * self.workers * (1 < self.workers <= LISTED_WORKERS)

    def pack(
        self,
        rank: int,
        seconds: float,
        metrics: dict[str, tuple[float, float]],
        unused: set[int],
        fields: dict[str, float],
        digest: float = 0.0,
        spent: Mapping[str, float] = NOWHERE,
    ) -> list[float]:
        """One worker's part. Fields that are not given are 0; a worker without rows has no metrics. `spent` are its
        seconds by part, as far as they are known by now.
        """
        vector = [float(fields.get(name, 0.0)) for name in _FIELDS]
        for name in self.metrics:
            vector.extend(metrics.get(name, (0.0, 0.0)))
        waits, digests = [0.0] * self.workers, [0.0] * self.workers
        waits[rank], digests[rank] = seconds, digest
        used = [1.0] * self.params
        for number in unused:
            used[number] = 0.0
        lanes = [0.0] * self._lanes
        if lanes:
            lanes[rank * len(PARTS) : (rank + 1) * len(PARTS)] = [spent.get(part, 0.0) for part in PARTS]
        return vector + waits + digests + used + lanes

    def unpack(self, vector: Sequence[float]) -> Agreed:
        """The sum of all workers' parts. Counts are exact: float64 holds integers up to 2**53."""
        ends = [len(_FIELDS), 2 * len(self.metrics), self.workers, self.workers, self.params, self._lanes]
        cuts = [sum(ends[:part]) for part in range(len(ends) + 1)]
        head, pairs, seconds, digests, used, lanes = (vector[a:b] for a, b in pairwise(cuts))
        values = [*head[: len(_NUMBERS)], *map(round, head[len(_NUMBERS) :])]
        fields: dict[str, Any] = dict(zip(_FIELDS, values, strict=True))
        return Agreed(
            **fields,
            metrics={name: (pairs[2 * i], pairs[2 * i + 1]) for i, name in enumerate(self.metrics)},
            seconds=tuple(seconds),
            unused=tuple(number for number, workers in enumerate(used) if workers == 0),
            digests=tuple(digests),
            spent=tuple(tuple(lanes[at : at + len(PARTS)]) for at in range(0, len(lanes), len(PARTS))),
        )

    def alone(
        self,
        seconds: float,
        metrics: dict[str, tuple[float, float]],
        unused: set[int],
        fields: dict[str, float],
        digest: float = 0.0,
    ) -> Agreed:
        """What `unpack` makes of the part of a worker that is alone."""
        integers = {name: round(value) for name, value in fields.items() if name not in _NUMBERS}
        return Agreed(
            **{**_ZEROS, **fields, **integers},
            metrics={name: metrics.get(name, (0.0, 0.0)) for name in self.metrics},
            seconds=(seconds,),
            unused=tuple(sorted(unused)),
            digests=(digest,),
        )

    def rows(self, parts: Sequence[Part], micro_batches: int) -> list[float]:
        """A row of loss, count and metrics per micro-batch of the global batch, zeros where another worker has it."""
        width = 2 + 2 * len(self.metrics)
        rows = [0.0] * (micro_batches * width)
        for number, loss, count, metrics in parts:
            pairs = [value for name in self.metrics for value in metrics.get(name, (0.0, 0.0))]
            rows[number * width : (number + 1) * width] = [loss, count, *pairs]
        return rows

    def exactly(self, agreed: Agreed, rows: Sequence[float]) -> Agreed:
        """Loss, count and metrics from the rows of all micro-batches: correctly rounded sums, whoever computed what."""
        width = 2 + 2 * len(self.metrics)
        loss, count, *pairs = (exact_sum(rows[column::width]) for column in range(width))
        metrics = {name: (pairs[2 * i], pairs[2 * i + 1]) for i, name in enumerate(self.metrics)}
        return replace(agreed, loss=loss, count=count, metrics=metrics)


def parted(workers: Sequence[int], values: Sequence[Any]) -> tuple[list[int], list[int]] | None:
    """The workers that have what most have, and the others, where `values` has everybody's; None: all have the same."""
    have: dict[Any, list[int]] = {}
    for worker in workers:
        have.setdefault(values[worker], []).append(worker)
    usual = max(have.values(), key=len, default=[])
    return (usual, [worker for worker in workers if worker not in usual]) if len(have) > 1 else None


def add_metrics(sums: dict[str, tuple[float, float]], more: Mapping[str, Any]) -> None:
    """Adds sums and counts by name, of numbers or tensors of one."""
    for name, (total, count) in more.items():
        before = sums.get(name, (0.0, 0.0))
        sums[name] = before[0] + float(total), before[1] + float(count)


def exact_sum(values: Sequence[float]) -> float:
    """The correctly rounded sum, in any order the same; NaN if a value is not finite."""
    return math.fsum(values) if all(map(math.isfinite, values)) else math.nan


class Moment(Enum):
    """Where a step's transaction stands."""

    EMPTY = "empty"
    IDLE = "idle"
    COMPUTING = "computing"
    PREPARED = "prepared"
    UPDATING = "updating"


@dataclass(frozen=True)
class Status:
    """What a worker holds when a generation forms: its state after `done` steps (None: it has none), the generation in
    which the last of them was `applied`, and the one whose members' `sums` of the next step it holds, if it does.
    """

    done: int | None
    applied: int = 0
    sums: int | None = None


@dataclass
class Transaction:
    """A step is applied whole or not at all: idle, computing, prepared, updating, idle.

    A worker is *prepared* when all its reductions have arrived; only then may weights change. Before that the step
    can be aborted, which leaves everything as it was at its start. `done` counts applied steps, `applied_in` is the
    generation of the last one and `generation` that of the present one. A worker without state is *empty*: a newcomer,
    or one that takes the state of another over.
    """

    done: int = 0
    moment: Moment = field(default=Moment.IDLE)
    generation: int = 0
    applied_in: int = 0

    def _move(self, before: Moment, after: Moment) -> None:
        if self.moment is not before:
            raise RuntimeError(f"step {self.done}: {after.value} cannot follow {self.moment.value}")
        self.moment = after

    def begin(self, generation: int = 0) -> int:
        """Starts the next step and returns its number, counted from 0."""
        self._move(Moment.IDLE, Moment.COMPUTING)
        self.generation = generation
        return self.done

    def prepared(self) -> None:
        """Marks the step as prepared: all its reductions have arrived."""
        self._move(Moment.COMPUTING, Moment.PREPARED)

    def updating(self) -> None:
        """Marks the beginning of the update: from now on the step cannot be aborted."""
        self._move(Moment.PREPARED, Moment.UPDATING)

    def applied(self) -> int:
        """Ends the step and returns the number of steps done."""
        self._move(Moment.UPDATING, Moment.IDLE)
        self.done += 1
        self.applied_in = self.generation
        return self.done

    def abort(self) -> None:
        """Voids a step that has not begun to change weights."""
        if self.moment is Moment.UPDATING:
            raise RuntimeError(f"step {self.done} has begun to change weights and cannot be aborted")
        if self.moment is not Moment.EMPTY:
            self.moment = Moment.IDLE

    def empty(self) -> None:
        """What this worker held is about to be overwritten."""
        self.abort()
        self.moment = Moment.EMPTY

    def taken(self, done: int, applied_in: int) -> None:
        """The state of another worker has arrived whole."""
        self._move(Moment.EMPTY, Moment.IDLE)
        self.done, self.applied_in = done, applied_in

    @property
    def status(self) -> Status:
        """What the others must know when a generation forms; an update that has begun is ended first."""
        if self.moment is Moment.UPDATING:
            raise RuntimeError(f"step {self.done} is being applied")
        if self.moment is Moment.EMPTY:
            return Status(None)
        return Status(self.done, self.applied_in, self.generation if self.moment is Moment.PREPARED else None)


@dataclass
class Versions(Generic[_T]):
    """State of one's own, which no other worker has: its `value`, and what is pending of the transaction under way.

    A transaction counts also where this worker takes its result over from another one, and of a redone one nothing
    does. So nobody tells of its end: the number of those done does.
    """

    value: _T
    _pending: tuple[int, _T] | None = None

    def at(self, done: int) -> _T:
        """The value after so many transactions. Of what was pending nothing is left."""
        if self._pending is not None and self._pending[0] < done:
            self.value = self._pending[1]
        self._pending = None
        return self.value

    def pend(self, done: int, value: _T) -> None:
        """What it becomes if the transaction after so many counts."""
        self._pending = done, value

    def void(self) -> None:
        """Drops what is pending: the transaction counts and leaves the value as it is."""
        self._pending = None


class StateLostError(Exception):
    """No replica with a complete state is left: the latest checkpoint must be loaded."""


@dataclass(frozen=True)
class Resolution:
    """How a generation begins: all workers continue after `step` steps.

    The workers in `forward`, as (replica, shard index), apply the sums that they hold. Each replica in `sources` takes
    over the state of the replica that `sources` names. All others keep their state, and void the step they had begun.
    """

    step: int
    forward: frozenset[tuple[int, int]]
    sources: dict[int, int]


def resolve(team: Sequence[Sequence[Status]]) -> Resolution:
    """Decides how a new generation begins, from the statuses of all its workers, by replica and shard index.

    This is a pure function, so that all workers decide the same without communication. Where one replica has applied a
    step, each that holds the same sums rolls forward. A replica counts as applied if all its workers have applied the
    step or can roll forward to it. The other replicas take the state over. Where no replica has applied the step, it is
    repeated. Raises StateLostError.
    """
    stands = [_stand(replica) for replica in team]
    complete = [stand for stand in stands if stand is not None]
    if not complete:
        raise StateLostError
    step, applied = max(complete)
    ahead = [number for number, stand in enumerate(stands) if stand == (step, applied)]
    forward: set[tuple[int, int]] = set()
    sources: dict[int, int] = {}
    for number, replica in enumerate(team):
        if all(_reaches(status, step, applied) for status in replica):
            forward |= {(number, shard_index) for shard_index, status in enumerate(replica) if status.done != step}
        else:
            sources[number] = ahead[len(sources) % len(ahead)]
    return Resolution(step, frozenset(forward), sources)


def route_transfers(sources: Mapping[int, int], hosts: Sequence[int], prepared: Collection[int] = ()) -> dict[int, int]:
    """Chooses from whom each worker receives the state, {receiver: sender}; transfers happen one after another.

    `hosts` has each worker's host. A worker receives from one of its own host, if a worker there has the state by then,
    so that the state crosses the network once per host. The `prepared` have most of it, and therefore receive first.
    """
    near: dict[int, list[int]] = {}
    for worker, host in enumerate(hosts):
        if worker not in sources:
            near.setdefault(host, []).append(worker)
    routes: dict[int, int] = {}
    for taker, source in sorted(sources.items(), key=lambda route: route[0] not in prepared):
        senders = near.setdefault(hosts[taker], [])
        routes[taker] = senders[len(routes) % len(senders)] if senders else source
        senders.append(taker)
    return routes


def _stand(replica: Sequence[Status]) -> tuple[int, int] | None:
    """The steps that a replica's workers have done or can roll forward to, and the generation of the last; None: its
    workers do not hold one state together.
    """
    if any(status.done is None for status in replica):
        return None
    step, applied = max((status.done or 0, status.applied) for status in replica)
    return (step, applied) if all(_reaches(status, step, applied) for status in replica) else None


def _reaches(status: Status, step: int, applied: int) -> bool:
    """Whether a worker has done `step` steps, or can by rolling forward from the sums of generation `applied`."""
    return status.done == step or (status.done == step - 1 and status.sums == applied)
