"""Decides when checkpoints are made, who writes what, and when one counts.

All begin one together, between two steps; each writes its part meanwhile training goes on (`checkpoint/writer.py`).
Each step's vector says how many are still writing. When nobody is, they tell each other of their files between two
steps, and the first of the writers writes the manifest, without which there is no checkpoint.
"""

from __future__ import annotations

import gc
import hashlib
import json
import math
import random
import re
import sys
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
from paceline.checkpoint.tree import flatten_pieces, pack, reading, unflatten, unpack
from paceline.checkpoint.writer import Background, WriterJob
from paceline.errors import CheckpointError, UsageError
from paceline.session.reporter import Reporter
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

    `begun` is the step of the last one that was begun, and `open` whether its end is not yet known to all workers: both
    are the same everywhere. `committed` is the last one that this worker knows to be complete. `asked` requests one
    between the next two steps. `collect_due` says that all workers have written their files, and `commit` writes the
    manifest meanwhile: `poll` then has something to do. `news` are outcomes to `report`, on the worker that wrote a
    manifest: the fields of the journal's event, an error as (what, cure), or a line. An error that repeats for the same
    reason is reported once.

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
        self._met = -1  # the generation whose hosts know each other's memory
        self._known_alone: tuple[int, bool] = (-1, False)  # a generation, and whether `_is_alone` in it
        self._into = storage  # where the last one that was begun goes
        self.from_mirror = False
        self.begun, self.open, self.asked = 0, False, False
        self.committed: int | None = None
        self.news: list[dict[str, Any] | list[str] | str] = []
        self._reasons: dict[str, str] = {}  # by place: why nothing can be written there, as it was told
        self.losses = 0
        self._seconds, self._steps = parse_save_every(every)  # neither: by what they cost
        self._born = self._saved_at = time.monotonic()
        self._cost: float | None = None  # seconds of the last one that training did not get
        self._again = False  # the last one was lost with a worker
        self.collect_due = False
        self._attempt, self._number, self._table = "", -1, ""
        self._streams: list[Any] = []  # the users' own, by rank; one where all have the same
        self._outcome: list[str] | None = None  # what went wrong with the last one, as far as this worker knows
        self._part: WriterJob | None = None
        self._draft: PendingCheckpoint | None = None
        self.commit: Background | None = None
        self._writers: tuple[int, list[int]] | None = None  # the generation, and who of it can write

    # -- when -------------------------------------------------------------------------------------------------------

    def wants(self, step: int) -> int:
        """Returns the main worker's wish after `step`, which the step's vector tells all workers: a checkpoint (1), a
        copy in the mirror (2), or nothing (0).
        """
        if self._part is not None or self.commit is not None:
            return 0
        if self._again or self._due(step):
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
        if self._mirror is not None and self._met != number:
            memory, self._met = self._mirror[1], number
            served = self.team.group.gather_json(memory.at)
            memory.meet([None if at is None else (at[0], at[1], at[2]) for at in served])

    @property
    def memory(self) -> str:
        """Where copies in memory are, in words."""
        several = self._mirror is not None and self._mirror[1].partner is not None
        return f"the copies in {self._mirror[1]}" if several and self._mirror is not None else "its copy in memory"

    def _due(self, step: int) -> bool:
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
        part = self._part
        return {"writing": part is not None and not part.over, "written": part is not None and part.over}

    # -- the way of one ---------------------------------------------------------------------------------------------

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

    def begin(self, subject: StateSnapshot, still: bool = False, mirror: bool = False) -> None:
        """Begins a checkpoint, or with `mirror` a copy in memory. Errors go to the news. Collective."""
        self._into = self._mirror[1] if mirror and self._mirror is not None else self.storage
        # Whoever has state of its own writes it; if not all can, there must be none.
        if subject.pool is not None and 0 < len(self.team.transactions.run(self._writing)) < self.team.size:
            subject.pool()
        self.team.transactions.run(partial(self._prepare, subject), partial(self._start, subject, still), "saving")
        self.open = True
        if mirror:
            self._mirrored = subject.step
        else:
            self.asked = self._again = False
            self.begun, self._saved_at = subject.step, time.monotonic()

    def put_aside(self, subject: StateSnapshot, storage: Storage) -> list[str] | None:
        """Writes a subject to a `storage` of its own, beside the checkpoints, and waits for it. Returns the error, the
        same on all workers, or None. Collective.
        """
        if self.open:
            self.finish()
        self._into = storage
        self.team.transactions.run(partial(self._prepare, subject), partial(self._start, subject, True), "saving")
        self.open = True
        return self.finish()

    def _prepare(self, subject: StateSnapshot) -> Any:
        group = self.team.group
        group.declare("a checkpoint")
        self.team.transactions.reach("saving")
        subject.agree()
        if self._mirror is not None and self._into is self._mirror[1]:
            self._meet_hosts()
        writers, trouble = self._who_writes()
        self._gather_streams(writers)
        attempt = group.gather_json(new_attempt())[0]  # whoever has it knows that the streams have arrived
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

    def _writing(self) -> list[int]:
        self.team.group.declare("which workers can write a checkpoint")
        return self._who_writes()[0]

    def _who_writes(self) -> tuple[list[int], Any]:
        """Returns the workers that see the storage (those that see a file which the first worker puts there), and the
        error if that fails.
        """
        operations, group, storage = self.team.transactions, self.team.group, self._into
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
                with suppress(OSError):  # an empty file, in a place that has stopped to take any
                    storage.remove("", [probe])
            if trouble is not None:
                return [], trouble
            able = [worker for worker, is_seen in zip(operations.members, sees, strict=True) if is_seen]
            self._writers = (operations.number, able)
        return self._writers[1], None

    @_no_collection()
    def _start(self, subject: StateSnapshot, still: bool, settled: Any) -> Any:
        began = time.monotonic()
        self._part = self._draft = self._outcome = None
        self._attempt, writers = settled["by"]
        me = self.team.transactions.worker
        if settled["trouble"] is not None:
            if self.team.rank == 0:
                self._done(None, settled["trouble"])
        elif me in writers and self._into is not None:
            tensors, skeleton = flatten_pieces(subject.tree(), "")
            params = {param.data_ptr() for param in subject.params()}
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
                    self._done(None, [error.what, error.cure])
                return settled
            shapes = tensor_infos(tensors)
            table = [(name, *shapes[name]) for group in (common, cut) for name in group]
            self._table = hashlib.sha256(repr(table).encode()).hexdigest()
            manifest = {"tree": skeleton, **subject.about(), "streams": self._streams}
            if me in writers:
                self._number = writers.index(me)
                files, reached = plan[self._number], self.team.transactions.reach
                need = partial(bytes_of, subject.step, plan, shapes, manifest)
                self._part = WriterJob(self._into, subject.step, files, tensors, {*common, *cut}, still, reached, need)
            if me == writers[0]:
                self._draft = PendingCheckpoint(subject.step, writers, plan, shapes, manifest, began)
                self._draft.blocked = time.monotonic() - began
        return settled

    def copied(self) -> None:
        """Waits, before an update, until the state may change."""
        if self._part is not None:
            with self.team.transactions.account.of("saving"):
                blocked = self._part.copied()
            if self._draft is not None:
                self._draft.blocked += blocked

    def poll(self) -> None:
        """Between two steps: commits a checkpoint once all workers have written their files. Collective if there is
        one.
        """
        if self.collect_due:
            self.collect_due = False
            self.team.transactions.run(self._tell, self._end, "saving")
        if self.commit is not None and self.commit.over:
            self._done(self.commit.result, self.commit.trouble)
            self.commit = None

    def _tell(self) -> Any:
        self.team.group.declare("the end of a checkpoint")
        return self._gather()

    def _gather(self) -> list[Any]:
        part, report = self._part, None
        if part is not None:
            report = [self._attempt, self._number, self._table, part.result, part.trouble]
        reports = self.team.group.gather_json(report)
        return [
            [worker, *parts] for worker, parts in zip(self.team.transactions.members, reports, strict=True) if parts
        ]

    def _end(self, reports: Any) -> Any:
        draft, work, part = self._draft, self._work(reports), self._part
        if part is not None and part.result and self.copies_every and self._into is not self.storage:
            counts = self.team.group.ledger.setdefault("copies", [0, 0, 0.0])
            counts[0] += 1
            counts[1] += sum(size for size, _ in part.result.values())
            counts[2] += part.seconds
        if work is not None:
            self.commit = Background(work, "paceline-commit")
        elif draft is None and self.team.rank == 0 and all(number != 0 for _, _, number, *_ in reports):
            self._again = True  # the first of the writers was lost, and with it the manifest
        self._part = self._draft = None
        return reports

    def _work(self, reports: Any) -> Callable[[], dict[str, Any]] | None:
        """Returns the function that commits the checkpoint, on the first writer; None elsewhere."""
        draft, part, storage = self._draft, self._part, self._into
        if draft is None or part is None or storage is None:
            return None
        attempt_reports = [row for row in reports if row[1] == self._attempt]
        cost = part.seconds

        def work() -> dict[str, Any]:
            try:
                self._refuse(draft, attempt_reports)
            except CheckpointError:
                give_up(storage, draft.step)
                raise
            digests = {file: (size, digest) for row in attempt_reports for file, (size, digest) in row[4].items()}
            mirrored = storage is not self.storage
            keep = 1 if mirrored else self.keep
            manifest = draft.manifest if not mirrored else {**draft.manifest, "best": []}  # a copy is none to be kept
            checkpoint = commit(storage, draft.step, draft.plan, digests, draft.shapes, manifest, keep)
            if mirrored:
                return {}
            took, size = time.monotonic() - draft.began, sum(size for size, _ in digests.values())
            path = str(checkpoint) if storage.shared else f"checkpoints/{checkpoint.folder}"
            outcome: dict[str, Any] = {"step": draft.step, "path": path}
            if manifest.get("best"):
                outcome["best"] = manifest["best"]
            return {**outcome, "seconds": draft.blocked, "took": took, "bytes": size, "cost": cost + draft.blocked}

        return work

    def _refuse(self, draft: PendingCheckpoint, reports: list[Any]) -> None:
        for worker, _, _, table, result, trouble in reports:
            if trouble is not None:
                whose = f"worker {worker}: " if len(draft.writers) > 1 else ""
                raise CheckpointError(f"{whose}{trouble[0]}", trouble[1])
            if result is None or table != self._table:
                what = f"worker {worker} has different tensors than worker {draft.writers[0]}"
                raise CheckpointError(what, "make the same model and optimizers on every worker")
        if len(reports) < len(draft.writers):
            lost = sorted({*draft.writers} - {row[0] for row in reports})
            self._again = True
            what = (
                f"checkpoint of step {draft.step} was abandoned because worker {lost[0]} was lost while writing its"
                " part"
            )
            raise CheckpointError(what, "the next checkpoint begins at once")

    def _done(self, outcome: dict[str, Any] | None, trouble: list[str] | None) -> None:
        if outcome:
            self._cost = outcome.pop("cost")
            self.committed = outcome["step"]
        self._outcome = trouble
        location = str(self._into)
        if trouble is None:
            if self._reasons.pop(location, None) is not None:
                self.news.append(f"checkpoints can be written to {location} again")
            if outcome:
                self.news.append(outcome)
            return
        reason = re.sub("[0-9]+", "", trouble[0])  # which step's it was makes no other one
        if self._reasons.get(location) != reason:
            self.news.append(trouble)
        self._reasons[location] = reason

    def finish(self) -> list[str] | None:
        """Waits for the end of the last checkpoint that was begun. Returns its error or None; all workers then know the
        same. Collective.
        """
        trouble: list[str] | None = self.team.transactions.run(self._wait, self._close, "saving")
        return trouble

    @HEARTBEAT.waiting()  # for a disk, or a store
    def _wait(self) -> Any:
        group = self.team.group
        group.declare("the end of a checkpoint")
        while any(work is not None and not work.over for work in (self._part, self.commit)):
            if self.team.transactions.interrupted:
                break  # the next collective says so
            time.sleep(_LOOK)
        work = self._work(self._gather())
        if work is not None:
            try:
                self._done(work(), None)
            except CheckpointError as error:
                self._done(None, [error.what, error.cure])
        elif self.commit is not None:
            self._done(self.commit.result, self.commit.trouble)
        self.commit = None
        return group.gather_json([self.committed, self._outcome])

    def _close(self, reports: Any) -> Any:
        self._part = self._draft = None
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

    # -- a run that goes on -----------------------------------------------------------------------------------------

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
    def look(self) -> tuple[int, Any] | None:
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
                tensors |= part.tensors(mapped=not blind)  # whoever takes a value copies it
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
        self._mirrored = step - (self._mirror[0] if self._mirror is not None else 0)  # a host that has come has no copy
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


# -- the user's own random streams -----------------------------------------------------------------------------------


def user_streams() -> dict[str, Any]:
    """Returns the state of the random generators that belong to the script."""
    streams: dict[str, Any] = {
        "torch": bytes(torch.get_rng_state().tolist()).hex(),
        "random": json.loads(json.dumps(random.getstate())),
    }
    if "numpy" in sys.modules:
        name, keys, *rest = sys.modules["numpy"].random.get_state(legacy=True)
        streams["numpy"] = [name, keys.tolist(), *rest]
    if torch.cuda.is_available():
        streams["cuda"] = bytes(torch.cuda.get_rng_state().tolist()).hex()
    return streams


def load_user_streams(saved: dict[str, Any]) -> None:
    """Restores what `user_streams` returned."""
    with reading():
        torch.set_rng_state(torch.frombuffer(bytearray.fromhex(saved["torch"]), dtype=torch.uint8))
        if "cuda" in saved and torch.cuda.is_available():
            torch.cuda.set_rng_state(torch.frombuffer(bytearray.fromhex(saved["cuda"]), dtype=torch.uint8))
        form, keys, gauss = saved["random"]
        random.setstate((form, tuple(keys), gauss))
        if "numpy" in saved and "numpy" in sys.modules:
            sys.modules["numpy"].random.set_state(tuple(saved["numpy"]))
