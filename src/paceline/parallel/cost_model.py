"""Types of a plan's cost: bytes held and sent per worker.

Each algorithm computes its cost in its own module; `plan_cost.cost` combines those that a plan names.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from paceline.base.sharding import RowShards
from paceline.compute.parameter_owners import choose_owners
from paceline.plan import CODED_BYTES


@dataclass(frozen=True)
class Facts:
    """The facts of a model that its cost depends on. In a sharded model, shapes are those of a worker's shards."""

    shapes: Sequence[Sequence[int]]  # of the trainable parameters
    element_sizes: Sequence[int]  # bytes of an element of each
    other_bytes: int = 0  # of buffers and frozen parameters
    # The parameters, by number, that are gathered together: those of each block, and the rest.
    blocks: Sequence[Sequence[int]] = ()
    rest: Sequence[int] = ()
    state: float = 2.0  # bytes of optimizer state for each byte that optimizers hold
    wider: int = 1  # bytes that optimizers hold for each byte of parameters: 2 where float32 updates bfloat16 weights
    has_masters: bool = False  # whether these are kept between updates, as master copies
    inside: Mapping[str, int] = field(default_factory=dict)  # bytes sent in a micro-batch by axis, once one was run
    ends: Mapping[str, int] = field(default_factory=dict)  # bytes sent at the end of a step, by axis
    sparse: int = 0  # how many of the last parameters have sparse gradients, whose number of rows is unknown
    # The full shapes, by number, of the parameters that one worker of a replica updates.
    owned: Mapping[int, Sequence[int]] = field(default_factory=dict)
    divided: Sequence[int] = ()  # the numbers of the parameters that hold experts, where expert= divides these

    def bytes(self, places: int = 1, numbers: Sequence[int] | None = None) -> int:
        """Returns the bytes of these parameters, or of all, on the worker with the most rows of `places` shards."""
        selected, shards = range(len(self.shapes)) if numbers is None else numbers, RowShards(places)
        return sum(shards.width(self.shapes[number]) * self.element_sizes[number] for number in selected)

    def optimizer_bytes(self, local_bytes: float) -> int:
        """Returns the bytes of optimizer state for so many bytes of parameters."""
        return int(self.state * self.wider * local_bytes)

    def master_bytes(self, local_bytes: int) -> int:
        """Returns the bytes of master copies of so many bytes of parameters."""
        return self.wider * local_bytes if self.has_masters else 0


@dataclass(frozen=True)
class IslandFacts:
    """The facts of local SGD that its cost depends on."""

    every: int  # steps between two merges
    local_islands: int  # islands of this worker's team
    has_copies: bool  # whether it keeps copies of another team's islands
    fragments: int  # in which islands are merged, 0 where all parameters are merged at once
    codec: str | None  # of merges
    momentum: bool  # whether the outer optimizer has momentum
    may_be_late: bool  # whether an island may miss a merge

    def sent(self, local_bytes: int, elements: int) -> int:
        """Returns the bytes that merges send per step, for a worker's rows of this many bytes and elements."""
        return (local_bytes if self.codec is None else elements * CODED_BYTES[self.codec] // 256) // self.every


@dataclass(frozen=True)
class Cost:
    """The cost of a plan for one worker, in bytes: held at most, by category, and sent in a step, by ledger line.

    Activations are not included; `copies` are the bytes in the memory of hosts for copies of the state; `in_flight` is
    the largest number of micro-batches, counted once for each stage, whose activations are kept.
    """

    parameters: int
    gradients: int
    optimizer: int
    sent: dict[str, int] = field(default_factory=dict)
    in_flight: int = 1
    copies: int = 0

    def with_islands(self, islands: IslandFacts, model_bytes: int, local_bytes: int) -> Cost:
        """Returns the cost for a worker with islands while a round is merged.

        `model_bytes` are the bytes of the model that the worker holds, `local_bytes` those of its rows of the
        parameters. In addition to the model in use, it keeps the round's start and each island's weights (both of
        `model_bytes`), and the islands' progress or the merged result (`local_bytes`); each island's current and
        previous optimizer state, possibly with copies of another team's islands; and the outer optimizer's momentum. An
        island that may be late also keeps the weights that it began with.
        """
        momentum, streams = local_bytes * islands.momentum, islands.fragments > 0
        ends = islands.local_islands * (1 + islands.may_be_late) * model_bytes
        fragment_bytes = streams * (momentum + local_bytes * (model_bytes > local_bytes))
        parameters = self.parameters + model_bytes + ends + local_bytes + fragment_bytes
        kept_bytes = self.optimizer + local_bytes * ((islands.fragments > 1) + bool(islands.codec))
        optimizer = (4 if islands.has_copies else 2) * islands.local_islands * kept_bytes + momentum
        times = 1 + islands.local_islands * (islands.fragments + (islands.fragments > 1))
        rewritten = {kind: times * local_bytes // islands.every for kind in self.sent if kind == "weights"}
        sent = {kind: size + rewritten.get(kind, 0) for kind, size in self.sent.items()}
        return replace(self, parameters=parameters, optimizer=optimizer, sent=sent)

    def with_owners(self, facts: Facts, places: int, workers: int) -> Cost:
        """Returns the cost if each of the `facts.owned` parameters has an owner among `workers`, which gets its values
        and gradients for the update; other workers have its rows in `places` shards.
        """
        by_name = choose_owners({str(number): shape for number, shape in facts.owned.items()}, workers)
        owners = {int(name): owner for name, owner in by_name.items()}
        rows = {number: facts.wider * facts.bytes(places, [number]) for number in facts.owned}
        held, returned = [0] * workers, [0] * workers
        for number, shape in facts.owned.items():
            owner, size = owners[number], facts.wider * math.prod(shape) * facts.element_sizes[number]
            held[owner] += size
            returned[owner] += size - rows[number]
        sent = max(
            returned[worker] + 2 * sum(size for number, size in rows.items() if owners[number] != worker)
            for worker in range(workers)
        )
        most_held = max(held)
        optimizer = self.optimizer + int(facts.state * (most_held - sum(rows.values())))
        weights = self.sent.get("weights", 0) + sent
        return replace(
            self, parameters=self.parameters + most_held, optimizer=optimizer, sent={**self.sent, "weights": weights}
        )

    @property
    def held(self) -> tuple[int, int, int]:
        """Bytes held of parameters, gradients and optimizer state."""
        return self.parameters, self.gradients, self.optimizer
