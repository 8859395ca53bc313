"""Decides when checkpoints are made, who writes what, and when one counts.

All workers begin a checkpoint together, between two steps, and each writes its part while training goes on
(`checkpoint/writer.py`). Each step's vector says how many workers are still writing. When none is, they exchange the
digests of their files between two steps, and the first of the writers writes the manifest, without which there is no
checkpoint.
"""

from __future__ import annotations

import gc
import hashlib
import math
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from paceline.base.environment import parse_save_every
from paceline.base.heartbeat import HEARTBEAT
from paceline.base.sharding import ShardedTensor
from paceline.checkpoint.files import (
    Checkpoint,
    Files,
    TensorInfo,
    bytes_of,
    commit,
    ended_in,
    find_checkpoint,
    give_up,
    layout,
    new_attempt,
    tensor_infos,
    trainers_in,
    with_ended,
    write_error,
)
from paceline.checkpoint.host_memory import HostMemory
from paceline.checkpoint.storage import Folder, Storage
from paceline.checkpoint.tree import flatten_pieces, pack, unflatten, unpack
from paceline.checkpoint.writer import Background, WriterJob
from paceline.errors import CheckpointError, UsageError
from paceline.session.reporter import Reporter
from paceline.session.user_streams import user_streams
from paceline.team.team import Team

_OVERHEAD = 0.03  # of the time, at most, with `--save-every auto`
_SHORTEST, _LONGEST, _FIRST = 1.0, 1800.0, 60.0  # seconds between two of these, and to the first one
_BEFORE = 4 * 3600.0  # seconds after which a loss is expected before there was any
_LOOK = 0.01  # seconds between two looks at what is still being written
_SHARE = 1 << 20  # bytes that are worth another writer
_MOST = 32  # writers: more of them are more files, and fill no network or disk any better
_OPTIMIZERS = re.compile(r"trainers\.\d+\.(optimizers|masters)\.")


@contextmanager
def _no_collection() -> Iterator[None]:
    """Disables Python's garbage collector for a while. It scans all new objects again and again: with many small
    tensors that took a third of the time for which a checkpoint blocks training.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def limit_writers(writers: list[int], size: int) -> list[int]:
    """Returns the workers that write `size` bytes which all workers have: more for more bytes."""
    return writers[: min(_MOST, max(1, size // _SHARE))]


@dataclass(frozen=True)
class StateSnapshot:
    """What a checkpoint saves: the number of steps, the state tree (its tensors are not copies), the parameters in it,
    further fields of the manifest, and a part of the collective that compares all workers' states. `pool` collects
    state that differs between workers.
    """

    step: int
    tree: Callable[[], Any]
    params: Callable[[], Iterable[torch.Tensor]]
    about: Callable[[], dict[str, Any]]
    agree: Callable[[], None] = lambda: None
    pool: Callable[[], None] | None = None


@dataclass
class PendingCheckpoint:
    """What the first writer needs for the manifest, until all files are written."""

    step: int
    writers: list[int]
    plan: list[Files]
    shapes: dict[str, TensorInfo]
    manifest: dict[str, Any]
    began: float = field(default_factory=time.monotonic)
    blocked: float = 0.0


class CheckpointManager:
    """Takes the checkpoints of a run, on one worker.

    `begun` is the step of the checkpoint that was begun last, and `open` whether its end is not yet known to all
    workers: both are the same on all of them. `committed` is the step of the last checkpoint that this worker knows to
    be complete. `asked` requests one between the next two steps. `poll` has something to do if `collect_due` (all
    workers have written their files) or while `commit` writes the manifest. `news` are outcomes to `report`, on the
    worker that wrote a manifest: the fields of the journal's event, an error as (what, cure), or a line. An error that
    repeats for the same reason is reported once. Unless it `saves_by_itself`, only the script asks for checkpoints.

    With a `mirror` (steps, and a storage in the memory of the run's hosts), the state that the loss of one host would
    take, because no replica is without that host, is also kept there.
    """

    def __init__(
        self,
        team: Team,
        reporter: Reporter,
        storage: Storage | None,
        every: str,
        keep: int,
        mirror: tuple[int, HostMemory] | None = None,
    ) -> None:
        self.team, self._reporter, self.storage, self.keep = team, reporter, storage, keep
        self._mirror, self._mirrored = mirror, 0
        self._met_generation = -1  # the generation whose hosts know each other's memory
        self._known_alone: tuple[int, bool] = (-1, False)  # a generation, and whether `_is_alone` in it
        self._target = storage  # of the checkpoint that was begun last
        self.from_mirror = False
        self.begun, self.open, self.asked, self.saves_by_itself = 0, False, False, True
        self.committed: int | None = None
        self.news: list[dict[str, Any] | list[str] | str] = []
        self._reasons: dict[str, str] = {}  # by storage: why nothing can be written to it, as last reported
        self.losses = 0
        self._seconds, self._steps = parse_save_every(every)  # neither: the interval follows from their cost
        self._born = self._saved_at = time.monotonic()
        self._cost: float | None = None  # seconds of training that the last checkpoint took
        self._repeats = False  # the last checkpoint was lost with a worker, so the next one begins at once
        self.collect_due = False
        self._attempt, self._writer_index, self._table = "", -1, ""
        self._streams: list[Any] = []  # states of the script's generators, by rank; a single one if all are equal
        self._trouble: list[str] | None = None  # the error of the last checkpoint, as far as this worker knows
        self._writer_job: WriterJob | None = None
        self._pending: PendingCheckpoint | None = None
        self.commit: Background | None = None
        self._writers: tuple[int, list[int]] | None = None  # a generation, and its workers that see the storage

    # -- when -------------------------------------------------------------------------------------------------------

    def wants(self, step: int) -> int:
        """Returns the main worker's wish after `step`, which the step's vector tells all workers: a checkpoint (1), a
        copy in the mirror (2), or nothing (0).
        """
        if self._writer_job is not None or self.commit is not None:
            return 0
        # A spare that has read the last one again may have found it damaged.
        if self._repeats or self._due(step) or self.team.transactions.commands.damaged >= self.begun:
            return 1
        if self._mirror is None or not self._is_alone:
            return 0
        return 2 * (step - self._mirrored >= self._mirror[0])

    @property
    def _is_alone(self) -> bool:
        """Whether the loss of one host, or of one worker of a lone replica, would leave no replica."""
        group, number = self.team.group, self.team.transactions.number
        if self._known_alone[0] != number:
            hosts = group.hosts
            replicas = group.mesh.replicas or [range(group.size)]
            common = set.intersection(*({hosts[rank] for rank in replica} for replica in replicas))
            self._known_alone = number, bool(common) and (len(set(hosts)) > 1 or group.size <= group.mesh.replica)
        return self._known_alone[1]

    @property
    def copies_every(self) -> int:
        """The steps between two copies of the state in the memory of other hosts; 0 if there are none."""
        return self._mirror[0] if self._mirror is not None and self._mirror[1].partner and self._is_alone else 0

    def _meet_hosts(self) -> None:
        """Tells all workers where the memory of each host is served, once in each generation. Collective."""
        number = self.team.transactions.number
        if self._mirror is not None and self._met_generation != number:
            memory, self._met_generation = self._mirror[1], number
            served = self.team.group.gather_json(memory.at)
            memory.meet([None if at is None else (at[0], at[1], at[2]) for at in served])

    @property
    def memory(self) -> str:
        """Where copies in memory are, in words."""
        several = self._mirror is not None and self._mirror[1].partner is not None
        return f"the copies in {self._mirror[1]}" if several and self._mirror is not None else "its copy in memory"

    def _due(self, step: int) -> bool:
        if not self.saves_by_itself:
            return False
        if self._steps is not None:
            return step - self.begun >= self._steps
        return time.monotonic() - self._saved_at >= (self._interval() if self._seconds is None else self._seconds)

    def _interval(self) -> float:
        """Returns the seconds between checkpoints by Young, A first order approximation to the optimum checkpoint
        interval, CACM 1974, bounded by a share of the time.
        """
        if self._cost is None:
            return _FIRST
        between = (time.monotonic() - self._born + _BEFORE) / (self.losses + 1)
        return min(_LONGEST, max(_SHORTEST, self._cost / _OVERHEAD, math.sqrt(2 * self._cost * between)))

    def ask(self) -> None:
        """Requests a checkpoint at the next step. Raises UsageError without a run folder."""
        if self.storage is None and not self.team.world.serves:
            cure = "start the script with `paceline run --run-dir FOLDER train.py`, or set PACELINE_RUN_DIR"
            raise UsageError("save() has no run folder to write to", cure)
        self.asked = True

    @property
    def fields(self) -> dict[str, float]:
        """The entries of the step's vector: whether this worker is writing, or has written."""
        part = self._writer_job
        return {"writing": part is not None and not part.over, "written": part is not None and part.over}

    # -- one checkpoint, from its beginning to its end --------------------------------------------------------------

    def save(self, snapshot: Callable[[], StateSnapshot], step: int, wait: bool = False, must: bool = False) -> bool:
        """Begins a checkpoint after `step` unless there is one, which is written while training continues. Collective.

        With `wait` it returns when the checkpoint is written or has failed; with `must` a failure raises
        CheckpointError. Returns whether the checkpoint is known to exist.
        """
        asked = self.asked
        if self.open and (wait or asked):
            self.finish()
            self.report()
        if asked or step != (self.committed if wait else self.begun):
            self.begin(snapshot(), still=wait)
        trouble = self.finish() if wait and self.open else None
        if must and trouble is not None:
            raise CheckpointError(*trouble)
        self.report()
        return trouble is None and self.committed == step

    def begin(self, snapshot: StateSnapshot, still: bool = False, mirror: bool = False) -> None:
        """Begins a checkpoint, or with `mirror` a copy in memory. Errors go to the news. Collective."""
        self._target = self._mirror[1] if mirror and self._mirror is not None else self.storage
        # State that differs between workers is written by each of them. If some cannot write, it is pooled first.
        if snapshot.pool is not None and 0 < len(self.team.transactions.run(self._gather_writers)) < self.team.size:
            snapshot.pool()
        self.team.transactions.run(partial(self._prepare, snapshot), partial(self._start, snapshot, still), "saving")
        self.open = True
        if mirror:
            self._mirrored = snapshot.step
        else:
            self.asked = self._repeats = False
            self.begun, self._saved_at = snapshot.step, time.monotonic()

    def write_aside(self, snapshot: StateSnapshot, storage: Storage) -> list[str] | None:
        """Writes a snapshot to a `storage` that is not that of the checkpoints, and waits for its end. Returns the
        error, the same on all workers, or None. Collective.
        """
        if self.open:
            self.finish()
        self._target = storage
        self.team.transactions.run(partial(self._prepare, snapshot), partial(self._start, snapshot, True), "saving")
        self.open = True
        return self.finish()

    def _prepare(self, snapshot: StateSnapshot) -> Any:
        """Agrees on the writers and compares the workers' states, before any worker copies its state. Collective."""
        group = self.team.group
        group.declare("a checkpoint")
        self.team.transactions.reach("saving")
        snapshot.agree()
        if self._mirror is not None and self._target is self._mirror[1]:
            self._meet_hosts()
        writers, trouble = self._who_writes()
        self._gather_streams(writers)
        attempt = group.gather_json(new_attempt())[0]  # gathered last: then the streams have arrived everywhere
        return {"by": [attempt, writers], "trouble": trouble}

    def _gather_streams(self, writers: Sequence[int]) -> None:
        """Sends the users' random streams to the first writer if they differ: those of a thousand workers are 25 MB."""
        group, own_streams, members = self.team.group, user_streams(), self.team.transactions.members
        digest = hashlib.sha256(repr(own_streams).encode()).hexdigest()
        self._streams = [own_streams]
        if len({*group.gather_json(digest)}) == 1 or not writers:
            return
        writer = members.index(writers[0])
        if group.rank != writer:
            group.send_bytes(pack(own_streams), writer)
            self._streams = [own_streams] * group.size  # theirs take as many bytes
        else:
            others = {rank: unpack(group.receive_bytes(rank)) for rank in range(group.size) if rank != writer}
            self._streams = [others.get(rank, own_streams) for rank in range(group.size)]

    def _gather_writers(self) -> list[int]:
        """Returns the workers that can write a checkpoint. Collective."""
        self.team.group.declare("which workers can write a checkpoint")
        return self._who_writes()[0]

    def _who_writes(self) -> tuple[list[int], Any]:
        """Returns the workers that see the storage (those that see a file which the first worker puts there), and the
        error if that fails.
        """
        operations, group, storage = self.team.transactions, self.team.group, self._target
        if not isinstance(storage, Folder):
            return list(operations.members), None
        if self._writers is None or self._writers[0] != operations.number:
            probe, trouble = f".probe-{new_attempt()}", None
            if group.rank == 0:
                try:
                    storage.put("", probe, b"")
                except OSError as error:
                    failure = write_error(storage, self.begun, error)
                    trouble = [f"no checkpoint can be written to {storage}: {error.strerror}", failure.cure]
            probe, trouble = group.gather_json([probe, trouble])[0]
            sees = group.gather_json((storage.path / probe).exists())
            if group.rank == 0 and trouble is None:
                with suppress(OSError):  # an empty file may stay, if the storage has just failed
                    storage.remove("", [probe])
            if trouble is not None:
                return [], trouble
            able = [worker for worker, is_seen in zip(operations.members, sees, strict=True) if is_seen]
            self._writers = (operations.number, able)
        return self._writers[1], None

    @_no_collection()
    def _start(self, snapshot: StateSnapshot, still: bool, settled: Any) -> Any:
        """Starts this worker's writer, if it is one of those that are `settled`. With `still`, the state does not
        change before the checkpoint is written, so nothing is copied.
        """
        began = time.monotonic()
        self._writer_job = self._pending = self._trouble = None
        self._attempt, writers = settled["by"]
        me = self.team.transactions.worker
        if settled["trouble"] is not None:
            if self.team.rank == 0:
                self._note_outcome(None, settled["trouble"])
        elif me in writers and self._target is not None:
            tensors, skeleton = flatten_pieces(snapshot.tree(), "")
            params = {param.data_ptr() for param in snapshot.params()}
            cut = {name: held for name, held in tensors.items() if isinstance(held, ShardedTensor)}
            full_tensors = {name: tensor for name, tensor in tensors.items() if isinstance(tensor, torch.Tensor)}
            common = {n: t for n, t in full_tensors.items() if t.data_ptr() in params or _OPTIMIZERS.match(n)}
            main_only = {name: tensor for name, tensor in full_tensors.items() if name not in common}
            if not cut:
                writers = limit_writers(writers, sum(tensor.nbytes for tensor in common.values()))
            ranks = [self.team.transactions.members.index(writer) for writer in writers]
            try:
                plan = layout(main_only, common, cut, ranks, self._attempt)
            except CheckpointError as error:  # no writer has some rows
                if self.team.rank == 0:
                    self._note_outcome(None, [error.what, error.cure])
                return settled
            shapes = tensor_infos(tensors)
            table = [(name, *shapes[name]) for group in (common, cut) for name in group]
            self._table = hashlib.sha256(repr(table).encode()).hexdigest()
            manifest = {"tree": skeleton, **snapshot.about(), "streams": self._streams}
            if me in writers:
                self._writer_index = writers.index(me)
                files, reached = plan[self._writer_index], self.team.transactions.reach
                need = partial(bytes_of, snapshot.step, plan, shapes, manifest)
                self._writer_job = WriterJob(
                    self._target, snapshot.step, files, tensors, {*common, *cut}, still, reached, need
                )
            if me == writers[0]:
                self._pending = PendingCheckpoint(snapshot.step, writers, plan, shapes, manifest, began)
                self._pending.blocked = time.monotonic() - began
        return settled

    def copied(self) -> None:
        """Waits, before an update, until the state may change."""
        if self._writer_job is not None:
            with self.team.transactions.account.of("saving"):
                blocked = self._writer_job.copied()
            if self._pending is not None:
                self._pending.blocked += blocked

    def poll(self) -> None:
        """Between two steps: commits a checkpoint once all workers have written their files. Collective if there is
        one.
        """
        if self.collect_due:
            self.collect_due = False
            self.team.transactions.run(self._gather_ends, self._begin_commit, "saving")
        if self.commit is not None and self.commit.over:
            self._note_outcome(self.commit.result, self.commit.trouble)
            self.commit = None

    def _gather_ends(self) -> Any:
        """Gathers what each writer has written, once all have ended. Collective."""
        self.team.group.declare("the end of a checkpoint")
        return self._gather_reports()

    def _gather_reports(self) -> list[Any]:
        """Returns a row of each writer: its worker, attempt, index among the writers, tensors, files and error."""
        part, report = self._writer_job, None
        if part is not None:
            report = [self._attempt, self._writer_index, self._table, part.result, part.trouble]
        reports = self.team.group.gather_json(report)
        return [
            [worker, *parts] for worker, parts in zip(self.team.transactions.members, reports, strict=True) if parts
        ]

    def _begin_commit(self, reports: Any) -> Any:
        """Lets the first writer write the manifest in a thread, from what the writers have reported."""
        pending, work, part = self._pending, self._commit_function(reports), self._writer_job
        if part is not None and part.result and self.copies_every and self._target is not self.storage:
            counts = self.team.group.ledger.setdefault("copies", [0, 0, 0.0])
            counts[0] += 1
            counts[1] += sum(size for size, _ in part.result.values())
            counts[2] += part.seconds
        if work is not None:
            self.commit = Background(work, "paceline-commit")
        elif pending is None and self.team.rank == 0 and all(number != 0 for _, _, number, *_ in reports):
            self._repeats = True  # the first of the writers was lost, and with it the manifest
        self._writer_job = self._pending = None
        return reports

    def _commit_function(self, reports: Any) -> Callable[[], dict[str, Any]] | None:
        """Returns the function that commits the checkpoint, on the first writer; None elsewhere."""
        pending, part, storage = self._pending, self._writer_job, self._target
        if pending is None or part is None or storage is None:
            return None
        attempt_reports = [row for row in reports if row[1] == self._attempt]
        cost = part.seconds

        def work() -> dict[str, Any]:
            try:
                self._refuse_incomplete(pending, attempt_reports)
            except CheckpointError:
                give_up(storage, pending.step)
                raise
            digests = {file: (size, digest) for row in attempt_reports for file, (size, digest) in row[4].items()}
            mirrored = storage is not self.storage
            keep = 1 if mirrored else self.keep
            manifest = {**pending.manifest, "best": []} if mirrored else pending.manifest  # mirrors keep no best ones
            checkpoint = commit(storage, pending.step, pending.plan, digests, pending.shapes, manifest, keep)
            if mirrored:
                return {}
            took, size = time.monotonic() - pending.began, sum(size for size, _ in digests.values())
            path = str(checkpoint) if storage.shared else f"checkpoints/{checkpoint.folder}"
            outcome: dict[str, Any] = {"step": pending.step, "path": path}
            if manifest.get("best"):
                outcome["best"] = manifest["best"]
            return {**outcome, "seconds": pending.blocked, "took": took, "bytes": size, "cost": cost + pending.blocked}

        return work

    def _refuse_incomplete(self, pending: PendingCheckpoint, reports: list[Any]) -> None:
        """Raises CheckpointError if a writer has failed, was lost, or has other tensors than the first one."""
        for worker, _, _, table, result, trouble in reports:
            if trouble is not None:
                whose = f"worker {worker}: " if len(pending.writers) > 1 else ""
                raise CheckpointError(f"{whose}{trouble[0]}", trouble[1])
            if result is None or table != self._table:
                what = f"worker {worker} has different tensors than worker {pending.writers[0]}"
                raise CheckpointError(what, "make the same model and optimizers on every worker")
        if len(reports) < len(pending.writers):
            lost = sorted({*pending.writers} - {row[0] for row in reports})
            self._repeats = True
            what = (
                f"checkpoint of step {pending.step} was abandoned because worker {lost[0]} was lost while writing its"
                " part"
            )
            raise CheckpointError(what, "the next checkpoint begins at once")

    def _note_outcome(self, outcome: dict[str, Any] | None, trouble: list[str] | None) -> None:
        """Notes the end of a checkpoint for `report`: the fields of the journal's event, or the error."""
        if outcome:
            self._cost = outcome.pop("cost")
            self.committed = outcome["step"]
        self._trouble = trouble
        location = str(self._target)
        if trouble is None:
            if self._reasons.pop(location, None) is not None:
                self.news.append(f"checkpoints can be written to {location} again")
            if outcome:
                self.news.append(outcome)
            return
        reason = re.sub("[0-9]+", "", trouble[0])  # the same error at another step is no news
        if self._reasons.get(location) != reason:
            self.news.append(trouble)
        self._reasons[location] = reason

    def finish(self) -> list[str] | None:
        """Waits for the end of the last checkpoint that was begun. Returns its error or None; all workers then know the
        same. Collective.
        """
        trouble: list[str] | None = self.team.transactions.run(self._wait, self._end_wait, "saving")
        return trouble

    @HEARTBEAT.waiting()  # for a disk, or a store
    def _wait(self) -> Any:
        """Waits until this worker's part is written, and on the first writer also for the manifest. Collective."""
        group = self.team.group
        group.declare("the end of a checkpoint")
        while any(work is not None and not work.over for work in (self._writer_job, self.commit)):
            if self.team.transactions.interrupted:
                break  # the next collective says so
            time.sleep(_LOOK)
        work = self._commit_function(self._gather_reports())
        if work is not None:
            try:
                self._note_outcome(work(), None)
            except CheckpointError as error:
                self._note_outcome(None, [error.what, error.cure])
        elif self.commit is not None:
            self._note_outcome(self.commit.result, self.commit.trouble)
        self.commit = None
        return group.gather_json([self.committed, self._trouble])

    def _end_wait(self, reports: Any) -> Any:
        """Notes on all workers how the checkpoint has ended. Returns its error, or None."""
        self._writer_job = self._pending = None
        self.open = self.collect_due = False
        self.committed = max((step for step, _ in reports if step is not None), default=None)
        return next((trouble for _, trouble in reports if trouble is not None), None)

    def report(self) -> None:
        """Journals and prints the outcomes of checkpoints."""
        for outcome in self.news:
            if isinstance(outcome, dict):
                self._reporter.journal.write("checkpoint", **outcome)
                self.team.world.tell("saved", step=outcome["step"])
            elif isinstance(outcome, str):
                self._reporter.say(outcome)
            else:
                self._reporter.say(f"training continues without this checkpoint: {'; '.join(outcome)}")
        self.news.clear()

    # -- reading checkpoints ----------------------------------------------------------------------------------------

    def last_of(self, number: int, saved: dict[str, Any]) -> dict[str, Any]:
        """Returns the saved fields of an ended trainer with its last weights. Raises CheckpointError if this worker
        cannot read them.
        """
        if self.storage is None or saved.get("closed") is None or "model" in saved:
            return saved
        line: dict[str, Any] = {
            "step": saved["closed"],
            "tree": {"trainers": [{}] * number + [{"closed": saved["closed"]}]},
        }
        last = ended_in(line, self.storage, self._reporter.say)[number]
        return {**unflatten(trainers_in(last.manifest)[number], last.tensors(mapped=True)), **saved}

    @HEARTBEAT.waiting()
    def read_newest(self) -> tuple[int, Any] | None:
        """Returns step and tree of the newest valid checkpoint that this worker sees."""
        try:
            checkpoint = find_checkpoint(self.storage, self._reporter.say) if self.storage is not None else None
            if checkpoint is None or not trainers_in(checkpoint.manifest):
                return None
            return checkpoint.step, unflatten(checkpoint.manifest["tree"], checkpoint.tensors())
        except CheckpointError as error:
            self._reporter.say(str(error))
            return None

    @HEARTBEAT.waiting()
    def find(self) -> tuple[int, dict[str, Any], dict[str, torch.Tensor]] | None:
        """Returns step, manifest and tensors of the newest valid checkpoint, the same on every worker. A worker that
        cannot see it receives it from one that can. Collective.
        """
        storage, group, say = self.storage, self.team.group, self._reporter.say
        checkpoint: Checkpoint | None = None
        if storage is not None and (group.rank == 0 or not storage.shared):
            checkpoint = find_checkpoint(storage, say)
        group.declare("the start of the run")
        mirrored = self._find_mirrored()
        if mirrored is not None and (checkpoint is None or mirrored.step > checkpoint.step):
            checkpoint, self.from_mirror = mirrored, True
        reports = group.gather_json([checkpoint.step if checkpoint is not None else None, self.from_mirror])
        steps = [step for step, _ in reports]
        known = [step for step in steps if step is not None]
        if not known:
            return None
        step, source = max(known), steps.index(max(known))
        self.from_mirror = reports[source][1]
        blind = [rank for rank, other in enumerate(steps) if other != step]
        manifest: dict[str, Any] = {}
        tensors: dict[str, torch.Tensor] = {}
        if checkpoint is not None and checkpoint.step == step:
            ended = {} if storage is None else ended_in(checkpoint.manifest, storage, say)
            manifest = with_ended(checkpoint.manifest, ended)
            manifest = {name: value for name, value in manifest.items() if name not in ("files", "tensors")}
            for part in (checkpoint, *ended.values()):
                tensors |= part.tensors(mapped=not blind)  # a trainer copies the values that it takes
        if blind:
            if storage is not None and not storage.shared:
                names = ", ".join(str(rank) for rank in blind)
                what = f"worker{'s' if len(blind) > 1 else ''} {names} cannot read the checkpoint of step {step}"
                say(f"{what} in {storage} and receive{'' if len(blind) > 1 else 's'} it from worker {source}")
            packed = pack([manifest, tensors]) if group.rank == source else None
            sent = group.broadcast_bytes(packed, source)
            if group.rank in blind:
                manifest, tensors = unpack(sent)
        self.begun = step
        self._mirrored = step - (self._mirror[0] if self._mirror is not None else 0)  # due: a new host has no copy
        self.committed = None if self.from_mirror else step
        return step, manifest, tensors

    def _find_mirrored(self) -> Checkpoint | None:
        """The newest copy in the memory of the hosts, if none of its parts was lost. Collective."""
        if self._mirror is None:
            return None
        self._meet_hosts()
        try:
            return find_checkpoint(self._mirror[1], self._reporter.say)
        except CheckpointError as error:
            self._reporter.say(f"the copies in memory are not complete, and an earlier state is used: {error.what}")
            return None
