"""The step as arithmetic and as a state machine: grid, shares, streams, agreed vector, transaction. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import pairwise

from paceline.errors import UsageError

_MASK = (1 << 64) - 1


def stream_seed(seed: int, step: int, micro_batch: int) -> int:
    """The seed of the random stream of one micro-batch, a 63-bit integer; `step` and `micro_batch` count from 0.

    Two rounds of the splitmix64 finaliser per argument (Steele, Lea & Flood, "Fast Splittable Pseudorandom Number
    Generators", OOPSLA 2014). It depends on nothing else: not on workers, machines or what was drawn before.
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
                f"global_batch={global_batch} has no rows", "give the rows of one optimizer step, 1 or more"
            )
        if micro is not None and micro > global_batch:
            raise UsageError(
                f"micro={micro} is more than the global batch of {global_batch} rows",
                f"give micro={global_batch} or less",
            )
        return Grid(global_batch, micro or -(-global_batch // 8))

    def batches(self, rows: int) -> int:
        """Global batches of an epoch of `rows` rows; the last one may be smaller."""
        return -(-rows // self.global_batch)

    def batch_rows(self, batch: int, rows: int) -> range:
        """Positions of global batch number `batch` within an epoch of `rows` rows."""
        start = batch * self.global_batch
        return range(start, min(start + self.global_batch, rows))

    def cut(self, rows: int) -> list[range]:
        """Micro-batches of a global batch of `rows` rows, as ranges of rows within it."""
        return [range(start, min(start + self.micro, rows)) for start in range(0, rows, self.micro)]


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
    starts = [sum(counts[:worker]) for worker in range(len(weights))]
    return [range(start, start + count) for start, count in zip(starts, counts, strict=True)]


@dataclass(frozen=True)
class Agreed:
    """What all workers know after a step's small vector was summed: the same on each of them, bit for bit.

    `count` and `loss` are sums over the global batch; `tested` and `strict` are votes on merging micro-batches;
    `stop` and `save` are wishes; `metrics` maps names to (sum, count); `seconds` are each worker's seconds of loading,
    forward and backward; `unused` are the numbers of the parameters that got no gradient on any worker.
    """

    count: float
    loss: float
    tested: int
    strict: int
    stop: int
    save: int
    metrics: dict[str, tuple[float, float]]
    seconds: tuple[float, ...]
    unused: tuple[int, ...]


_FIELDS = ("count", "loss", "tested", "strict", "stop", "save")


@dataclass(frozen=True)
class VectorLayout:
    """The layout of a step's vector of float64: fixed fields, two per metric, one per worker, one per parameter."""

    metrics: tuple[str, ...]
    workers: int
    params: int

    def pack(
        self,
        rank: int,
        seconds: float,
        metrics: dict[str, tuple[float, float]],
        unused: set[int],
        fields: dict[str, float],
    ) -> list[float]:
        """One worker's part. Fields that are not given are 0; a worker without rows has no metrics."""
        vector = [float(fields.get(name, 0.0)) for name in _FIELDS]
        for name in self.metrics:
            vector.extend(metrics.get(name, (0.0, 0.0)))
        waits = [0.0] * self.workers
        waits[rank] = seconds
        used = [1.0] * self.params
        for number in unused:
            used[number] = 0.0
        return vector + waits + used

    def unpack(self, vector: Sequence[float]) -> Agreed:
        """The sum of all workers' parts. Counts are exact: float64 holds integers up to 2**53."""
        ends = [len(_FIELDS), 2 * len(self.metrics), self.workers, self.params]
        cuts = [sum(ends[:part]) for part in range(len(ends) + 1)]
        head, pairs, seconds, used = (vector[a:b] for a, b in pairwise(cuts))
        count, loss, tested, strict, stop, save = head
        return Agreed(
            count=count,
            loss=loss,
            tested=round(tested),
            strict=round(strict),
            stop=round(stop),
            save=round(save),
            metrics={name: (pairs[2 * i], pairs[2 * i + 1]) for i, name in enumerate(self.metrics)},
            seconds=tuple(seconds),
            unused=tuple(number for number, workers in enumerate(used) if workers == 0),
        )


class Moment(Enum):
    """Where a step's transaction stands."""

    IDLE = "idle"
    COMPUTING = "computing"
    PREPARED = "prepared"
    UPDATING = "updating"


@dataclass
class Transaction:
    """A step is applied whole or not at all: idle, computing, prepared, updating, idle.

    A worker is *prepared* when all its reductions have arrived; only then may weights change. Before that the step
    can be aborted, which leaves everything as it was at its start. `done` counts applied steps.
    """

    done: int = 0
    moment: Moment = field(default=Moment.IDLE)

    def _move(self, before: Moment, after: Moment) -> None:
        if self.moment is not before:
            raise RuntimeError(f"step {self.done}: {after.value} cannot follow {self.moment.value}")
        self.moment = after

    def begin(self) -> int:
        """Starts the next step and returns its number, counted from 0."""
        self._move(Moment.IDLE, Moment.COMPUTING)
        return self.done

    def prepared(self) -> None:
        self._move(Moment.COMPUTING, Moment.PREPARED)

    def updating(self) -> None:
        self._move(Moment.PREPARED, Moment.UPDATING)

    def applied(self) -> int:
        """Ends the step and returns the number of steps done."""
        self._move(Moment.UPDATING, Moment.IDLE)
        self.done += 1
        return self.done

    def abort(self) -> None:
        """Voids a step that has not begun to change weights."""
        if self.moment is Moment.UPDATING:
            raise RuntimeError(f"step {self.done} has begun to change weights and cannot be aborted")
        self.moment = Moment.IDLE
