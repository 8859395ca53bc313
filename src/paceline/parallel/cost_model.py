"""Types of a plan's cost: bytes held and sent per worker.

Each algorithm says its own, in its own file; `build_replica.cost` asks those that a plan names.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from paceline.base.sharding import RowShards

CODED = {"bf16": 512, "fp16": 516, "int8": 260, "int4": 132}  # bytes of 256 elements with their scale


@dataclass(frozen=True)
class Facts:
    """What costs depend on: the `shapes` of the trainable parameters and the bytes `each` of their elements takes; the
    bytes of what else a model has `beside` them; which of them, by number, are gathered together, as `blocks` and the
    `rest`; the bytes of the optimizer's state for one of theirs; and those that this worker sends `inside` a unit in a
    micro-batch, by axis, which is known once one was seen, and where a step `ends`. Of `sparse` parameters, the last,
    gradients are rows, of which nobody knows how many before. Where a model is cut, the shapes
    are those of a worker's parts.
    """

    shapes: Sequence[Sequence[int]]
    each: Sequence[int]
    beside: int = 0
    blocks: Sequence[Sequence[int]] = ()
    rest: Sequence[int] = ()
    state: float = 2.0
    inside: Mapping[str, int] = field(default_factory=dict)
    ends: Mapping[str, int] = field(default_factory=dict)
    sparse: int = 0

    def bytes(self, places: int = 1, numbers: Sequence[int] | None = None) -> int:
        """Of these parameters, or all, on the place that has most of their rows."""
        some, at = range(len(self.shapes)) if numbers is None else numbers, RowShards(places)
        return sum(at.width(self.shapes[number]) * self.each[number] for number in some)


@dataclass(frozen=True)
class Isles:
    """Of `every` so many steps: the islands that are `mine`, and whether there are `copies` of others'; the `fragments`
    in which they are merged, 0 where they all are at once; the `code` of merges; whether these have `momentum`, and
    whether an island may be `late` for them.
    """

    every: int
    local_islands: int
    copies: bool
    fragments: int
    code: str | None
    momentum: bool
    late: bool

    def sent(self, rows: int, elements: int) -> int:
        """Bytes of merges in a step, of so many bytes of rows."""
        return (rows if self.code is None else elements * CODED[self.code] // 256) // self.every


@dataclass(frozen=True)
class Cost:
    """Bytes of a worker: held at most, by category; and sent in a step, by line of the ledger. And how many
    micro-batches are `in_flight` at most, once for each stage: what their activations take is not in it.
    """

    parameters: int
    gradients: int
    optimizer: int
    sent: dict[str, int] = field(default_factory=dict)
    in_flight: int = 1

    def in_islands(self, isles: Isles, here: int, rows: int) -> Cost:
        """Of a worker with islands, when a round is merged. Beside what is in use there are the round's start and what
        each island has come to, which are what of the model is `here`, and how far, of the `rows` that are its own, or
        what of them merges have made; what each optimizer keeps now and kept before, maybe with copies of another
        team's; and the outer optimizer's momentum. One that may be late also keeps the weights that it began at.
        """
        momentum, streams = rows * isles.momentum, isles.fragments > 0
        ends = isles.local_islands * (1 + isles.late) * here
        parameters = self.parameters + here + ends + rows + streams * (momentum + rows * (here > rows))
        kept = self.optimizer + rows * ((isles.fragments > 1) + bool(isles.code))
        optimizer = (4 if isles.copies else 2) * isles.local_islands * kept + momentum
        times = 1 + isles.local_islands * (isles.fragments + (isles.fragments > 1))
        more = {kind: times * rows // isles.every for kind in self.sent if kind == "weights"}
        return replace(
            self, parameters=parameters, optimizer=optimizer, sent={k: n + more.get(k, 0) for k, n in self.sent.items()}
        )

    @property
    def held(self) -> tuple[int, int, int]:
        return self.parameters, self.gradients, self.optimizer
