"""Pipeline schedules: the order of forwards and backwards on each stage.

*gpipe* makes all forwards first (Huang et al., "GPipe", 2019); *1f1b* begins a backward as soon as it can, so that a
worker keeps no more micro-batches than there are stages after it (Narayanan et al., "PipeDream", 2019); with several
stages on each worker, *interleaved*, the wait at both ends is shorter (Narayanan et al., "Efficient Large-Scale
Language Model Training on GPU Clusters", 2021). No torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

FORWARD, BACKWARD = "F", "B"
KINDS = ("1f1b", "gpipe")


class Action(NamedTuple):
    """A forward or backward of one micro-batch through one stage."""

    kind: str
    stage: int
    micro_batch: int

    def needs(self, stages: int) -> list[Action]:
        """Returns the actions, of any worker, that must be done before this one."""
        kind, stage, number = self
        if kind == FORWARD:
            return [Action(FORWARD, stage - 1, number)] if stage else []
        after = [Action(BACKWARD, stage + 1, number)] if stage < stages - 1 else []
        return [Action(FORWARD, stage, number), *after]


@lru_cache(maxsize=64)
def table(kind: str, workers: int, virtual: int, micro_batches: int) -> tuple[tuple[Action, ...], ...]:
    """Returns the actions of each of `workers`, which have `virtual` stages each. Stage s is on worker s % workers."""
    return tuple(tuple(_row(kind, workers, virtual, micro_batches, worker)) for worker in range(workers))


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


@dataclass(frozen=True)
class Simulated:
    """The timing of a table: when each action begins and ends, by worker; when all end; and the largest number of
    micro-batches whose activations each worker keeps.
    """

    spans: Sequence[Mapping[Action, tuple[float, float]]]
    end: float
    kept: Sequence[int]

    @property
    def bubble(self) -> float:
        """The fraction of all workers' time in which they wait."""
        busy = sum(end - begin for row in self.spans for begin, end in row.values())
        return 1.0 - busy / (self.end * len(self.spans)) if self.end else 0.0


def simulate(rows: Sequence[Sequence[Action]], forward: Sequence[float], backward: Sequence[float]) -> Simulated:
    """Simulates a table. `forward` and `backward` are the seconds of each stage. Raises ValueError at a deadlock."""
    stages, positions = len(forward), [0] * len(rows)
    spans: list[dict[Action, tuple[float, float]]] = [{} for _ in rows]
    ends, free = dict[Action, float](), [0.0] * len(rows)
    progressed = True
    while progressed:
        progressed = False
        for worker, row in enumerate(rows):
            while positions[worker] < len(row) and all(a in ends for a in row[positions[worker]].needs(stages)):
                action = row[positions[worker]]
                begin = max([free[worker], *(ends[a] for a in action.needs(stages))])
                ends[action] = free[worker] = begin + (forward if action.kind == FORWARD else backward)[action.stage]
                spans[worker][action] = begin, ends[action]
                positions[worker], progressed = positions[worker] + 1, True
    pairs = enumerate(zip(rows, positions, strict=True))
    stuck = [(worker, row[position]) for worker, (row, position) in pairs if row[position:]]
    if stuck:
        waits = ", ".join(f"worker {worker} before {a.kind}{a.micro_batch} of stage {a.stage}" for worker, a in stuck)
        raise ValueError(f"all wait for each other: {waits}")
    return Simulated(spans, max([0.0, *ends.values()]), [kept(row) for row in rows])


def kept(row: Sequence[Action]) -> int:
    """Returns the largest number of forwards of a worker whose backwards are still to come."""
    open_ = most = 0
    for action in row:
        open_ += 1 if action.kind == FORWARD else -1
        most = max(most, open_)
    return most


def drawn(simulated: Simulated, width: int = 100) -> list[str]:
    """Draws a timeline, one line per worker: a forward is its micro-batch's number, a backward the same in brackets."""
    scale = width / simulated.end if simulated.end else 0.0
    lines = []
    for row in simulated.spans:
        line = [" "] * (width + 1)
        for action, (begin, end) in row.items():
            first, last = round(begin * scale), max(round(begin * scale) + 1, round(end * scale))
            text = str(action.micro_batch)
            body = text.center(last - first, "-") if action.kind == FORWARD else f"[{text.center(last - first - 2)}]"
            line[first:last] = body[: last - first].ljust(last - first)
        lines.append("".join(line).rstrip())
    return lines
