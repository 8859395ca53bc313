"""What a plan costs a worker, before anybody has tried it: bytes that it holds, and bytes that it sends. No torch.

Each algorithm says its own, in its own file; `nest.cost` asks those that a plan names.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from paceline.pieces import Shards


@dataclass(frozen=True)
class Facts:
    """What costs depend on: the `shapes` of the trainable parameters and the bytes `each` of their elements takes; the
    bytes of what else a model has `beside` them; which of them, by number, are gathered together, as `blocks` and the
    `rest`; the bytes of the optimizer's state for one of theirs; and those that this worker sends `inside` a unit in a
    micro-batch, by axis, which is known once one was seen, and where a step `ends`. Where a model is cut, the shapes
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

    def bytes(self, places: int = 1, numbers: Sequence[int] | None = None) -> int:
        """Of these parameters, or all, on the place that has most of their rows."""
        some, at = range(len(self.shapes)) if numbers is None else numbers, Shards(places)
        return sum(at.width(self.shapes[number]) * self.each[number] for number in some)


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

    def in_islands(self, mine: int, copies: bool, here: int, rows: int, every: int, late: bool) -> Cost:
        """Of a worker with so many islands, when a round is merged. Beside what is in use there are the round's start
        and what each island has come to, which are what of the model is `here`, and how far, of the `rows` that are its
        own; and what each optimizer keeps now and kept before, maybe with `copies` of another team's. One that may be
        `late` also keeps the weights that it began at.
        """
        parameters, optimizer = (
            self.parameters + (1 + mine + mine * late) * here + rows,
            (4 if copies else 2) * mine * self.optimizer,
        )
        sent = {kind: size + (rows // every if kind == "weights" else 0) for kind, size in self.sent.items()}
        return replace(self, parameters=parameters, optimizer=optimizer, sent=sent)

    @property
    def held(self) -> tuple[int, int, int]:
        return self.parameters, self.gradients, self.optimizer
