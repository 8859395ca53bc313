"""A worker's part of a global batch, assigned to it or brought by it."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from paceline.base.batching import Grid
from paceline.base.mesh import run_of
from paceline.checkpoint.tree import pack, unpack
from paceline.comm.communicator import Group
from paceline.compute.microbatches import MicroBatch, cut, digest_of, rows_of
from paceline.errors import UsageError
from paceline.session.validation import refuse_twins


@dataclass
class WorkerBatch:
    """One worker's part of a global batch: its micro-batches, and the size of the global batch. `full`: the global
    batch has its usual size; `fine`: single micro-batches were divided among workers; `last`: the loop has no global
    batch after it. With the first batch of a loop, `single` names a later micro-batch that has a single row.
    """

    micro_batches: list[MicroBatch]
    count: int
    rows: int
    epoch: int = 0
    cure: str = (
        "add one row, or choose a micro= that avoids a micro-batch of a single row, which changes the mathematics"
    )
    full: bool = False
    fine: bool = False
    last: bool = False
    read: int = 0  # rows of the global batch that were read of an iterable dataset, which all workers read whole
    single: str = ""

    @property
    def share(self) -> list[MicroBatch]:
        """The micro-batches that count, without dummies."""
        return [micro_batch for micro_batch in self.micro_batches if not micro_batch.is_dummy]


def gather_batches(
    group: Group, unit: Group, batch: Any, micro: int | None, together: int, spare: MicroBatch | None, looks: str
) -> WorkerBatch:
    """Returns the rows that the workers of this `unit` bring to step(), numbered among those of all workers. It is part
    of a collective that all have entered. `looks` names the step if equal rows of two workers are to be refused. If a
    unit has fewer micro-batches than others of the `together` units of a replica, its first one or the `spare` one is
    repeated as a dummy.
    """

    def cuts(given: Any) -> tuple[range, ...]:
        rows = 0 if given is None else rows_of(given)
        return Grid(max(rows, 1), micro or max(rows, 1)).cut(rows)

    own_cuts, rank = cuts(batch), group.rank
    brought = group.gather_json(
        [len(own_cuts), sum(map(len, own_cuts)), digest_of(batch) if looks and own_cuts else ""]
    )
    refuse_twins([entry[2] for entry in brought], looks)
    mates = [batch]
    if unit.size > 1:
        unit.declare("the rows of a unit", check=False, kind="step()")
        mates = [unpack(source)[0] for source in unit.gather(pack([batch]))]
    micro_batches: list[MicroBatch] = []
    for mate, mate_batch in enumerate(mates, start=rank - unit.rank):
        offset, first = (sum(entry[column] for entry in brought[:mate]) for column in (0, 1))
        whose = "this worker's" if mate == rank else f"worker {group.names[mate]}'s"
        for number, part in enumerate(cuts(mate_batch), start=offset):
            source = f"rows {part.start}-{part.stop - 1} of {whose} batch"
            micro_batches.append(MicroBatch(number, len(part), cut(mate_batch, part), source, start=first + part.start))
    worker_batch = WorkerBatch(micro_batches, sum(entry[0] for entry in brought), sum(entry[1] for entry in brought))
    if worker_batch.rows == 0:
        raise UsageError("no worker passed a row to step()", "pass at least one row")
    spare = micro_batches[0] if micro_batches else spare
    counts = [sum(entry[0] for entry in brought[at : at + unit.size]) for at in range(0, len(brought), unit.size)]
    for _ in range(max(counts[peer] for peer in run_of(rank // unit.size, together)) - len(micro_batches)):
        if spare is None:
            what = f"worker {rank} has never passed a row to step(), but must run the layers whose parts others have"
            raise UsageError(what, "pass at least one row on every worker in its first step()")
        worker_batch.micro_batches.insert(0, dataclasses.replace(spare, is_dummy=True))
    return worker_batch
