"""Loads the rows of a step: from the dataset of a loop over steps(), or from what each worker passes to step()."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from paceline.checkpoint.tree import pack, unpack
from paceline.comm.communicator import Group
from paceline.comm.user_collectives import refusing
from paceline.compute.microbatches import MicroBatch
from paceline.data.fingerprint import Fingerprint
from paceline.data.host_reader import HostReader
from paceline.data.loader import Assignment, Feed
from paceline.session.training_loop import LoopState
from paceline.session.worker_batch import WorkerBatch, gather_batches
from paceline.team.team import Team


class LoopBatches:
    """The global batches of one loop over steps(), of which `feed` loads this worker's part.

    In a new generation, workers compare a few rows of their datasets. With `looks_ahead` a batch says whether it is the
    last one. `cure` says what helps against micro-batches of a single row. With `one_reader`, one worker of each host
    reads an iterable dataset.
    """

    title = "step {}"

    def __init__(
        self,
        feed: Feed,
        phase: LoopState,
        fingerprint: Fingerprint,
        team: Team,
        say: Callable[..., None],
        looks_ahead: bool,
        one_reader: bool = False,
        admits: bool = False,
    ) -> None:
        self.feed, self._phase, self._fingerprint = feed, phase, fingerprint
        self._reader = HostReader(feed) if one_reader and feed.stream is not None else None
        if self._reader is not None:
            feed.shares_reader = lambda: team.group.size > 1
        self._team, self._say, self._looks_ahead, self.admits = team, say, looks_ahead, admits
        self._cure = feed.grid.against_single_rows(phase.rows or feed.grid.global_batch)

    def load_other(self, assignment: Assignment, partners: Sequence[int]) -> list[MicroBatch]:
        """Loads another worker's micro-batches; see `Batches`."""
        with refusing("the dataset or collate"):
            return self.feed.load_aside(self._phase.done, assignment)

    def load(self, ahead: int, assignment: Assignment) -> WorkerBatch | None:
        """Loads this worker's part of a global batch; see `Batches`."""
        feed, step = self.feed, self._phase.done + ahead
        if ahead and not feed.has(step):
            return None
        group, generation = self._team.group, self._team.transactions.number
        with refusing("the dataset or collate"):
            if group.size > 1 and (warning := self._fingerprint.compare(group, generation)):
                self._say(warning, once=True)
            reader, given = self._reader, None
            if reader is not None:
                if not reader.read(group, generation, step, assignment):
                    return None
                given = None if reader.reads else reader.first
            epoch, rows, micro_batches = feed.at(step, assignment)
            if feed.source.rows is None and (
                warning := self._fingerprint.compare_stream(group, generation, feed, step, epoch, given)
            ):
                self._say(warning, once=True)
        return WorkerBatch(
            micro_batches,
            count=len(feed.grid.cut(rows)),
            rows=rows,
            epoch=epoch,
            cure=self._cure,
            full=rows == feed.grid.global_batch,
            fine=feed.fine,
            last=self._looks_ahead and not feed.has(step + 1),
            read=0 if feed.source.rows is not None else rows,
            single=feed.later_single_row(step) if step == feed.start else "",
        )

    @property
    def position(self) -> dict[str, Any] | None:
        """The place in an iterable dataset after the last global batch, for a checkpoint."""
        position = None if self._reader is None else self._reader.position
        return None if position is None else position.saved()


class BroughtBatch:
    """The rows that the workers bring to one call of step(), of which `batch` are this worker's.

    `micro` is the size of micro-batches. If `together` units of a replica must run equally many, a unit repeats its
    first one or the `spare` one, which it brought before. `looks` names the step if equal rows of two workers are to be
    refused.
    """

    title = "the gradients of step {}"
    admits = False

    def __init__(
        self,
        batch: Any,
        micro: int | None,
        group: Group,
        unit: Group,
        together: int,
        spare: MicroBatch | None,
        name: str,
        looks: str,
    ) -> None:
        self._batch, self._micro, self._group, self._unit = batch, micro, group, unit
        self._together, self._name, self._looks = together, name, looks
        self.spare = spare
        self._micro_batches: list[MicroBatch] = []

    def load(self, ahead: int, assignment: Assignment) -> WorkerBatch | None:
        """Numbers this worker's rows among those of all workers; see `Batches`. Collective."""
        self._group.declare(self._name, kind="step()")
        worker_batch = gather_batches(
            self._group, self._unit, self._batch, self._micro, self._together, self.spare, self._looks
        )
        if self._together > 1 and worker_batch.share:
            self.spare = worker_batch.share[0]
        self._micro_batches = worker_batch.micro_batches
        return worker_batch

    def load_other(self, assignment: Assignment, partners: Sequence[int]) -> list[MicroBatch]:
        """Receives the micro-batches of another worker, which only that one has; see `Batches`. Collective."""
        group = self._group
        group.declare(f"{self._name}, verified", check=False, kind="step()")
        fields = ("index", "rows", "start", "is_dummy", "batch")
        packed = pack([[getattr(one, name) for name in fields] for one in self._micro_batches])
        lengths = group.gather_json(len(packed))
        given = [packed if partner == group.rank else packed[:0] for partner in partners]
        taken = [packed.new_empty(lengths[rank] if rank == partners[group.rank] else 0) for rank in range(group.size)]
        group.exchange(given, taken)
        whose = f"worker {group.names[partners[group.rank]]}'s batch"
        given_fields = (dict(zip(fields, values, strict=True)) for values in unpack(taken[partners[group.rank]]))
        return [MicroBatch(**values, source=whose) for values in given_fields]
