"""Pipeline schedules: the order of forwards and backwards on each stage.

*gpipe* runs all forwards first (Huang et al., "GPipe", 2019); *1f1b* begins a backward as soon as it can, so that a
worker keeps activations of no more micro-batches than there are stages after it (Narayanan et al., "PipeDream", 2019);
with several stages on each worker, *interleaved*, the wait at both ends is shorter (Narayanan et al., "Efficient
Large-Scale Language Model Training on GPU Clusters", 2021). *zb* splits each backward: the stage before waits for the
gradients of the inputs alone, and a worker computes those of its weights when it would otherwise wait (Qi, Wan, Huang,
Lin, "Zero Bubble Pipeline Parallelism", 2023); *zbv* is *zb* with two stages on each worker, in the shape of a V: one
worker has the first and the last stage (Qi et al., "Pipeline Parallelism with Controllable Memory", 2024).
No torch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

# Of one micro-batch through one stage: its forward, and its backward, or the two parts of a split backward, for the
# gradients of the stage's inputs and of its weights.
FORWARD, BACKWARD, INPUTS, WEIGHTS = "F", "B", "I", "W"
KINDS = ("1f1b", "gpipe", "zb", "zbv")
SPLIT = ("zb", "zbv")  # kinds that split the backward
V_SHAPED = "zbv"


class Action(NamedTuple):
    """A forward, a backward or a part of one, of one micro-batch through one stage."""

    kind: str
    stage: int
    micro_batch: int

    def needs(self, stages: int) -> list[Action]:
        """Returns the actions, of any worker, that must be done before this one."""
        kind, stage, number = self
        if kind == FORWARD:
            return [Action(FORWARD, stage - 1, number)] if stage else []
        if kind == WEIGHTS:
            return [Action(INPUTS, stage, number)]
        after = [Action(kind, stage + 1, number)] if stage < stages - 1 else []
        return [Action(FORWARD, stage, number), *after]

    def sends(self, stages: int) -> Action | None:
        """Returns the action of another stage that needs this one's result, or None."""
        receiver = {FORWARD: self.stage + 1, WEIGHTS: -1}.get(self.kind, self.stage - 1)
        return self._replace(stage=receiver) if 0 <= receiver < stages else None


def worker_of(kind: str, workers: int, stage: int) -> int:
    """Returns the worker of a stage. Workers take stages in turn; in a V, from the last worker to the first one
    and back. The last worker has the last stage in any case, as the number of turns of a V is even.
    """
    turn, position = divmod(stage, workers)
    return workers - 1 - position if kind == V_SHAPED and turn % 2 == 0 else position


def stages_of(kind: str, workers: int, virtual: int, worker: int) -> list[int]:
    """Returns the stages of a worker, in ascending order."""
    return [stage for stage in range(workers * virtual) if worker_of(kind, workers, stage) == worker]


@lru_cache(maxsize=64)
def table(
    kind: str, workers: int, virtual: int, micro_batches: int, forward_only: bool = False
) -> tuple[tuple[Action, ...], ...]:
    """Returns the actions of each of `workers`, which have `virtual` stages each; see `worker_of`."""
    if forward_only:
        rows = table(kind, workers, virtual, micro_batches)
        return tuple(tuple(action for action in row if action.kind == FORWARD) for row in rows)
    if kind in SPLIT:
        return tuple(map(tuple, _SplitTable(kind, workers, virtual, micro_batches).rows))
    return tuple(tuple(_row(kind, workers, virtual, micro_batches, worker)) for worker in range(workers))


@lru_cache(maxsize=64)
def messages(
    kind: str, workers: int, virtual: int, micro_batches: int, worker: int, forward_only: bool = False
) -> tuple[tuple[Action, ...], ...]:
    """Returns the actions for which each of `workers` sends messages to this `worker`, in the order of sending."""
    expected = []
    for row in table(kind, workers, virtual, micro_batches, forward_only):
        following = (action.sends(workers * virtual) for action in row)
        expected.append(tuple(a for a in following if a and worker_of(kind, workers, a.stage) == worker))
    return tuple(expected)


def _row(kind: str, workers: int, virtual: int, micro_batches: int, worker: int) -> list[Action]:
    """Returns the actions of one worker: some forwards ahead, then one backward after each forward, then the rest.

    With several stages on a worker, a group of at least as many micro-batches as there are workers passes one stage,
    then the next one.
    """
    rounds = max(1, micro_batches // workers)
    ends = [-(-micro_batches * number // rounds) for number in range(rounds + 1)]
    groups = [range(first, end) for first, end in pairwise(ends)]
    stages = range(worker, workers * virtual, workers)
    forwards = [Action(FORWARD, stage, number) for group in groups for stage in stages for number in group]
    backwards = [Action(BACKWARD, stage, number) for group in groups for stage in reversed(stages) for number in group]
    ahead = workers - worker - 1 if virtual == 1 else 2 * (workers - worker - 1) + (virtual - 1) * len(groups[0])
    ahead = len(forwards) if kind == "gpipe" else min(ahead, len(forwards))
    pairs = zip(forwards[ahead:], backwards, strict=False)
    return [*forwards[:ahead], *(action for pair in pairs for action in pair), *backwards[len(forwards) - ahead :]]


class _SplitTable:
    """Makes the table of a schedule that splits backwards, as if all parts took equally long.

    A worker takes what can begin first; of several, gradients of inputs before forwards, as other stages wait for
    them, forwards before gradients of weights, and later stages before earlier ones. It begins no forward while it
    keeps activations of as many micro-batches as there are workers, as *1f1b* does on the first worker; a stage leaves
    room for those after it, or they would wait for ever.
    """

    def __init__(self, kind: str, workers: int, virtual: int, micro_batches: int) -> None:
        self._stages, self._micro_batches, self._virtual = workers * virtual, micro_batches, virtual
        self._limit = workers * virtual
        self._of = [stages_of(kind, workers, virtual, worker) for worker in range(workers)]
        self.rows: list[list[Action]] = [[] for _ in range(workers)]
        self._ends = dict[Action, int]()
        self._free, self._kept = [0] * workers, [0] * workers
        self._next = {FORWARD: [0] * self._stages, INPUTS: [0] * self._stages}
        self._weights = [deque[Action]() for _ in range(workers)]
        while len(self._ends) < 3 * self._stages * micro_batches:
            self._append_next_action()

    def _append_next_action(self) -> None:
        """Adds the action that can begin first."""
        best = min((*option, worker) for worker in range(len(self.rows)) for option in self._options(worker))
        begin, _, _, action, worker = best
        self.rows[worker].append(action)
        self._ends[action] = self._free[worker] = begin + 1
        if action.kind == WEIGHTS:
            self._weights[worker].popleft()
            self._kept[worker] -= 1
            return
        self._next[action.kind][action.stage] += 1
        if action.kind == FORWARD:
            self._kept[worker] += 1
        else:
            self._weights[worker].append(action._replace(kind=WEIGHTS))

    def _options(self, worker: int) -> Iterator[tuple[int, int, int, Action]]:
        """Yields what a worker could do next: when, how urgent it is, and the action."""
        for position, stage in enumerate(self._of[worker]):
            room = self._kept[worker] < self._limit - (self._virtual - 1 - position)
            for urgency, kind in enumerate((INPUTS, FORWARD)):
                number = self._next[kind][stage]
                action = Action(kind, stage, number)
                if number < self._micro_batches and (kind == INPUTS or room):
                    needed = action.needs(self._stages)
                    if all(one in self._ends for one in needed):
                        begin = max([self._free[worker], *(self._ends[one] for one in needed)])
                        yield begin, urgency, -stage, action
        if self._weights[worker]:
            yield self._free[worker], 2, 0, self._weights[worker][0]


@dataclass(frozen=True)
class Simulated:
    """The timing of a table: when each action begins and ends, by worker; when all end; and the largest number of
    micro-batches whose activations each worker keeps.
    """

    spans: Sequence[Mapping[Action, tuple[float, float]]]
    end: float
    in_flight: Sequence[int]

    @property
    def bubble(self) -> float:
        """The fraction of all workers' time in which they wait."""
        busy = sum(end - begin for row in self.spans for begin, end in row.values())
        return 1.0 - busy / (self.end * len(self.spans)) if self.end else 0.0


def simulate(
    rows: Sequence[Sequence[Action]],
    forward: Sequence[float],
    backward: Sequence[float],
    travels: Sequence[float] = (),
    receives: Sequence[float] = (),
) -> Simulated:
    """Simulates a table. `forward` and `backward` are the seconds of each stage; each part of a split backward takes
    half of the latter. Between each stage and the next one, a message travels for the seconds in `travels`, while
    workers compute, and its receiver is busy with it for those in `receives`; both are 0 by default. Raises ValueError
    at a deadlock.
    """
    half = [seconds / 2 for seconds in backward]
    takes = {FORWARD: forward, BACKWARD: backward, INPUTS: half, WEIGHTS: half}
    stages, positions = len(forward), [0] * len(rows)
    travels, receives = travels or [0.0] * stages, receives or [0.0] * stages

    spans: list[dict[Action, tuple[float, float]]] = [{} for _ in rows]
    ends, free = dict[Action, float](), [0.0] * len(rows)
    progressed = True
    while progressed:
        progressed = False
        for worker, row in enumerate(rows):
            while positions[worker] < len(row):
                action = row[positions[worker]]
                begin, stage, taken = free[worker], action.stage, takes[action.kind][action.stage]
                needed = action.needs(stages)
                if not all(before in ends for before in needed):
                    break
                for before in needed:
                    link, sent = min(before.stage, stage), before.stage != stage
                    begin = max(begin, ends[before] + (travels[link] if sent else 0.0))
                    taken += receives[link] if sent else 0.0
                ends[action] = free[worker] = begin + taken
                spans[worker][action] = begin, ends[action]
                positions[worker], progressed = positions[worker] + 1, True
    pairs = enumerate(zip(rows, positions, strict=True))
    stuck = [(worker, row[position]) for worker, (row, position) in pairs if row[position:]]
    if stuck:
        waits = ", ".join(
            f"worker {worker} waits before {a.kind}{a.micro_batch} of stage {a.stage}" for worker, a in stuck
        )
        raise ValueError(f"the schedule deadlocks: {waits}")
    return Simulated(spans, max([0.0, *ends.values()]), [most_in_flight(row) for row in rows])


def most_in_flight(row: Sequence[Action]) -> int:
    """Returns the largest number of forwards of a worker whose backwards are still to end."""
    open_ = most = 0
    for action in row:
        open_ += {FORWARD: 1, INPUTS: 0}.get(action.kind, -1)
        most = max(most, open_)
    return most


def drawn(simulated: Simulated, width: int = 100) -> list[str]:
    """Draws a timeline, one line per worker: a forward is its micro-batch's number, a backward the same in brackets.
    Of a split backward, the gradients of the weights are in parentheses.
    """
    scale = width / simulated.end if simulated.end else 0.0
    lines = []
    for row in simulated.spans:
        line = [" "] * (width + 1)
        for action, (begin, end) in row.items():
            first, last = round(begin * scale), max(round(begin * scale) + 1, round(end * scale))
            text = str(action.micro_batch)
            left, right = "()" if action.kind == WEIGHTS else "[]"
            inside = f"{left}{text.center(last - first - 2)}{right}"
            body = text.center(last - first, "-") if action.kind == FORWARD else inside
            line[first:last] = body[: last - first].ljust(last - first)
        lines.append("".join(line).rstrip())
    return lines
