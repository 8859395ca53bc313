"""One local-SGD round: the steps of all islands and their merge, as one transaction.

A turn of the user's loop is a round. What a lost team has done in it is done again by whoever gets its islands, from
the round's start; what others have done stays. A round that is asked to stop is broken off: nothing of it counts, and
the checkpoint is that of its start.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from paceline.base.batching import NOTHING, Agreed, Grid, add_metrics, deal
from paceline.base.heartbeat import HEARTBEAT
from paceline.base.mesh import Mesh
from paceline.data.loader import Assignment
from paceline.errors import NonFiniteLossError, UsageError
from paceline.local_sgd.diloco import DiLoCo
from paceline.local_sgd.island_checkpoint import IslandCheckpoint, describe_changed_islands, unstack_first
from paceline.local_sgd.island_migration import reassign_islands, share_micro_batches
from paceline.local_sgd.island_state import InnerOptimizerState, IslandProgress, Islands
from paceline.local_sgd.merging import OUTER
from paceline.local_sgd.quorum import MergeQuorum, island_batches, missed_rows, report_dropped_rows
from paceline.local_sgd.streaming_diloco import StreamingDiLoCo
from paceline.session.worker_batch import WorkerBatch
from paceline.team.transactions import ReformedError, TransactionBody
from paceline.train.step import StepAttempt, StepRunner


def build_local_sgd_runner(mesh: Mesh, about: dict[str, Any], grid: Grid | None) -> LocalSgdRunner:
    """Builds the runner of a trainer whose plan says `local`; `about` has the other arguments of a StepRunner.

    Raises UsageError if the loss needs the whole global batch, or an island would get no micro-batch.
    """
    run, job, replica, plan = (about[name] for name in ("run", "job", "replica", "plan"))
    count = plan.local
    batches = 0 if grid is None else len(grid.cut(grid.global_batch))
    wrong, cure = "", ""
    if job.over is not None:
        wrong, cure = 'loss_over="batch" needs the whole global batch at once', "leave one of the two out"
    elif grid is not None and batches < count:
        wrong = f"its global batch of {grid.global_batch} rows is {batches} micro-batches, and each island needs one"
        micro = max(1, grid.global_batch // count)
        cure = (
            f"say micro={micro}, which changes the mathematics"
            if grid.global_batch >= count
            else f"say local={batches}"
        )
    if wrong:
        raise UsageError(f"local={count}: {wrong}", cure)
    streams = plan.fragments or plan.outer_codec
    diloco = (StreamingDiLoCo if streams else DiLoCo)(replica, run.team.group, mesh, plan)
    parts = sorted({len(part) for part in deal(batches, [1.0] * count)}, reverse=True) if grid is not None else []
    each = " or ".join(map(str, parts))
    what = f"{count} islands, merged every {plan.every} steps by {plan.outer or OUTER}{diloco.description}"
    run.say(f"{what}, with {each} of the micro-batches of each global batch")
    why = "the plan says local=: the result is that of so many, whoever computes them"
    if plan.quorum:
        what += f"; a merge waits for {plan.quorum} of them and a grace window"
        why = "the plan says quorum=: the result also depends on who is late, of which the journal has all"
    run.decide(about["trainer"], what, why)
    quorum = MergeQuorum(run, about["trainer"], count, plan.quorum)
    return LocalSgdRunner(**about, grid=grid, every=plan.every, algorithm=diloco, quorum=quorum)


class BrokenOffError(Exception):
    """The round was broken off since a worker was asked to stop."""

    def __init__(self, agreed: Agreed) -> None:
        super().__init__("a round was broken off")
        self.agreed = agreed


@dataclass
class LocalSgdRunner(StepRunner):
    """Runs one trainer's local-SGD rounds of `every` steps."""

    lockstep = False

    every: int = 1
    algorithm: DiLoCo | StreamingDiLoCo | None = None
    quorum: MergeQuorum | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self._ahead = 0  # the number of the current step within the round
        self._sizes: list[int] = []  # rows of each global batch of the round
        self._late: dict[str, Any] = {}  # which islands were late in the round, and what they missed
        self._trouble: NonFiniteLossError | None = None  # raised by an island of this team
        self.get_assignment = self._batch_assignment
        self.island_checkpoint = IslandCheckpoint(self.islands, self.diloco.outer, self.trainer)
        self.run.error_feedback.append(self.island_checkpoint)
        self.islands.read_saved_island = self._read_saved_island

    @property
    def diloco(self) -> DiLoCo | StreamingDiLoCo:
        assert self.algorithm is not None
        return self.algorithm

    @property
    def islands(self) -> Islands:
        return self.diloco.islands

    @property
    def merging_by(self) -> MergeQuorum:
        assert self.quorum is not None
        return self.quorum

    @property
    def stops(self) -> bool:
        return self.merging_by.stops

    def _batch_assignment(self) -> Assignment:
        """Assigns the next global batch of the round to those islands of this worker's team that have not had it."""
        isles, team = self.islands, self.replica.team
        assignment = self.run.team.get_assignment(isles.mesh)
        units = isles.mesh.over(team.size)
        first = isles.mesh.unit_of(self.run.team.rank) - units.unit_of(team.rank)
        weights, due = assignment.weights[first : first + units.units], tuple(self._due())
        return replace(
            assignment,
            rank=units.unit_of(team.rank),
            weights=weights,
            together=self.plan.together,
            islands=(isles.count, due),
        )

    def _due(self) -> list[int]:
        return [
            i
            for i in self.islands.local_islands
            if i not in self.islands.progress or self.islands.progress[i].at <= self._ahead
        ]

    def rebind(self, name: str) -> None:
        """Prepares a new generation: assigns islands to its teams, and reports the work that was lost."""
        super().rebind(name)
        self.merging_by.journal_late()
        for message in reassign_islands(self.islands, restart=self.diloco.repeats_rounds):
            self.run.say(message)
            self.run.decide(self.trainer, *message.split(": ", 1))
        for island, rows in self.islands.lost_rows.items():
            self.run.journal.write("uncounted", trainer=self.trainer, step=self.done, island=island, rows=rows)

    def _read_saved_island(self, island: int) -> list[Any]:
        """Reads an island's state from the last checkpoint: [its step, the trainer's steps, the state], or []."""
        if (checkpoint := self.run.saving.look(self.run.say)) is None:
            return []
        saved = dict(enumerate(checkpoint[1]["trainers"])).get(self.trainer, {})
        kept = (saved.get("islands") or {}).get("each", {}).get(str(island))
        return [] if kept is None else [checkpoint[0], saved["steps"], unstack_first(kept)]

    def run_step(self, deal: Callable[..., Any], name: str) -> StepAttempt | None:
        """Runs a round. Returns None if it was broken off because all workers stop."""
        try:
            step = super().run_step(deal, name)
            self.merging_by.report_late(self.done, self._late)
            return step
        except BrokenOffError as end:
            self.run.agreed(end.agreed)
            return None

    def state(self, done: int | None) -> dict[str, Any]:
        """The trainer's state for a checkpoint, with the state of each island in place of the optimizers'."""
        state = super().state(done)
        common = {key: state[key] for key in ("model", "owed", "steps", "expected", "scaling")}
        return {**common, "islands": self.island_checkpoint.state(done)}

    def load(self, saved: dict[str, Any], newcomer: bool) -> None:
        """Loads a state, and says if it changes the mathematics, as another number of islands does."""
        self.replica.load(saved)
        self.done, self.expected = saved["steps"], saved["expected"]
        kept = saved.get("islands") or {}
        change = describe_changed_islands(kept, self.islands.count, self.diloco.streams)
        self.island_checkpoint.load(kept, self.done)
        if newcomer and "each" in kept:
            report_dropped_rows(self.run, self.trainer, kept.get("late") or {}, self.done, "the checkpoint was taken")
        if newcomer and "optimizers" in saved:
            change = f"training goes on in {self.islands.count} islands, each with what the optimizer keeps"
        if change:
            self.run.say(f"changed mathematics: {change}")

    def memory(self) -> dict[str, int]:
        """The bytes in use by kind, with the weights and optimizer states of islands."""
        sizes, (weights, kept) = super().memory(), self.diloco.peak_bytes
        return sizes | {"parameters": sizes["parameters"] + weights, "optimizer": max(sizes["optimizer"], kept)}

    def measured(self, reports: Sequence[list[dict[str, Any]]]) -> None:
        """Ends a loop: what late islands have begun is reported and dropped."""
        super().measured(reports)
        report_dropped_rows(self.run, self.trainer, self.islands.late, self.done, "training was stopped")
        self.islands.drop_late()

    def shares(self, batches: int, weights: Sequence[float]) -> list[int]:
        """The number of micro-batches of each unit, as islands are assigned at first; `weights` do not matter."""
        return share_micro_batches(self.islands, batches)

    def _attempt(self, step: StepAttempt, deal: Callable[..., Any], name: str) -> TransactionBody:
        diloco, isles = self.diloco, self.islands
        with ExitStack() as undo:
            began = time.perf_counter()
            undo.callback(self._again)
            self._open(step, name)
            diloco.begin_round()
            undo.callback(isles.leave)
            undo.callback(self.replica.abort)
            with self.streams.preserved():
                made = self._run(step, deal)
            isles.leave()
            computed = time.perf_counter()
            if made:
                self.merging_by.wait()
            merged, late = self._meet(step, name, computed - began, made)
            after = step.number + step.steps
            diloco.sum_outer_gradients(name, after, merged, late)
            for member in self.run.members:
                member.state.step_computed()
            step.spent["compute"] = computed - began - step.spent["data"]
            count = yield lambda: step.agreed.count
            undo.pop_all()
        reduced = time.perf_counter()
        self.run.saving.copied()
        diloco.outer_step(count, after)
        self.done, self.weights.refused = after, False
        ended = time.perf_counter()
        self.updated = ended - reduced
        step.spent |= {"reduce": reduced - computed, "update": self.updated}
        yield [dict(vars(step.agreed)), step.norm, step.lr, [step.batch.rows, step.batch.epoch], step.steps, self._late]
        self.transactions.fault_point("applied")
        self.replica.complete()
        step.spent["update"] += time.perf_counter() - ended

    def _taken(self, step: StepAttempt, _: Any, result: Any) -> None:
        super()._taken(step, _, result[:4])
        step.steps, self._late = result[4:]

    # -- what islands do by themselves ------------------------------------------------------------------------------

    def _run(self, step: StepAttempt, deal: Callable[..., Any]) -> bool:
        """Runs the round's steps of this team's islands, and returns whether all were made without a break-off."""
        step.batch, step.steps, step.spent = WorkerBatch([], 0, 0), 0, {"data": 0.0}
        isles, quorum, most, last = self.islands, self.merging_by, self.run.team.world.max_steps, False
        self._sizes, self._trouble, ready = [], None, list[int]()
        quorum.begin_round(len(isles.mesh.over(self.run.team.size).teams(isles.count)))
        for ahead in range(self.every):
            self._ahead = ahead
            due, began = self._due(), time.perf_counter()
            portion = deal(ahead)
            if portion is None:
                last = True
                break
            self._load(one := StepAttempt(self.done + ahead, 0.0), partial(same, portion))
            step.spent["data"] += time.perf_counter() - began
            step.batch = replace(portion, micro_batches=[])
            step.steps, last = step.steps + 1, portion.last
            self._sizes.append(portion.rows)
            for island in due:
                if self.transactions.interrupted:
                    raise ReformedError("another generation forms", "wait")
                before, ready = ready, [i for i in isles.local_islands if isles.progress[i].steps >= self.every]
                if isles.is_reporter and ready != before:
                    quorum.report(step.number, (), ready, last=False)
                try:
                    stops = self._step_of(island, replace(one, whose=f" of island {island}"))
                    if stops and (ahead + 1 < self.every or island != due[-1]):
                        self.diloco.after_last_inner_step(breaks_off=True)
                        return False
                except NonFiniteLossError as error:
                    self._trouble = error
                    quorum.report_void(step.number)
                    self.diloco.after_last_inner_step(breaks_off=True)
                    return False
            if self.diloco.after_inner_step(ahead + 1):
                return False
        if self.diloco.after_last_inner_step():
            return False
        if isles.is_reporter:
            quorum.report(
                step.number, isles.local_islands, (), last or (most is not None and self.run.step + step.steps >= most)
            )
        return True

    def _step_of(self, island: int, step: StepAttempt) -> bool:
        """Runs one step of an island on all replicas of its team, and returns whether one of their workers stops."""
        assert self.grid is not None
        batch, progress = step.batch, self.islands.enter(island)
        run, rows = island_batches(self.grid, batch.rows, island, self.islands.count)
        if not rows:
            self.islands.skip_step(island)
            return False
        step.batch = replace(batch, micro_batches=[m for m in batch.micro_batches if m.index in run], rows=rows)
        step.lr = float(self.job.optimizers[0].param_groups[0]["lr"])
        self.expected = progress.inner.expected
        step.options = self.options(step)
        began = time.perf_counter()
        self._compute(step, lambda: step.batch, f"step {step.number + 1} of island {island}", began)
        seconds = time.perf_counter() - began
        self._refuse(step)
        if step.agreed.count <= 0:
            self.replica.abort(again=True)
            self.islands.skip_step(island, rows)
            return step.agreed.stop > 0
        norm = self._norm(step)
        assert step.sums is not None
        self.run.saving.copied()
        progress.torn = True
        self.replica.update(step.sums, step.agreed, step.options, norm)
        self.replica.complete()
        progress.torn = False
        progress.inner.expected = step.agreed.count
        progress.add_step(step.agreed, norm, step.lr, rows)
        self._merge(step, step.sums, seconds)
        HEARTBEAT.beat()
        return step.agreed.stop > 0

    # -- what all agree on ------------------------------------------------------------------------------------------

    def _meet(self, step: StepAttempt, name: str, seconds: float, made: bool) -> tuple[list[int], dict[int, list[int]]]:
        """Exchanges the reports of all teams and workers at the end of the round, and checks that the round counts.

        Returns the islands to merge, and {island: [steps, rows]} of the late ones.
        """
        isles, group, run, decided = self.islands, self.run.team.group, self.run, self.merging_by.decided
        team_report = {
            "islands": [[i, *_describe_progress(isles.progress[i])] for i in isles.local_islands if i in isles.progress]
            if isles.is_reporter
            else [],
            "sizes": self._sizes,
            "epoch": step.batch.epoch,
            "merged": decided,
            "broken": decided is None and run.notice is not None and (not made or self.merging_by.waits),
        }
        reports = meet(self, step, name, team_report, seconds, self._trouble)
        if any(one["broken"] for one in reports):
            raise BrokenOffError(step.agreed)
        progress = {int(one[0]): one[1:] for report in reports for one in report["islands"]}
        merged = next((one["merged"] for one in reports if one["merged"] is not None), sorted(progress))
        late = {
            island: progress[island][1:3] for island in sorted({*progress}.difference(merged)) if progress[island][1]
        }
        self._count_rows(step, max(reports, key=lambda one: len(one["sizes"])), progress, merged)
        islands = [progress[island][3:] for island in merged]
        metrics: dict[str, tuple[float, float]] = {}
        unused: set[int] | None = None
        for _, _, island_metrics, left, *_ in islands:
            add_metrics(metrics, island_metrics)
            if left is not None:
                unused = {*left} if unused is None else unused & {*left}
        step.agreed = replace(
            step.agreed,
            loss=math.fsum(one[0] for one in islands),
            count=math.fsum(one[1] for one in islands),
            metrics=metrics,
            unused=tuple(sorted(unused or ())),
        )
        step.norm, step.lr = islands[0][4:]
        if step.digest is not None:
            self.weights.judge(group, step.agreed.digests, heal=False)
        self._refuse(step)
        return merged, late

    def _count_rows(
        self, step: StepAttempt, longest: dict[str, Any], progress: dict[int, list[Any]], merged: list[int]
    ) -> None:
        """Counts the rows of this merge, and the rows of the round that no island has taken. `longest` is the report of
        a team that has seen all batches of the round; `progress` has what each island did.
        """
        assert self.grid is not None
        sizes, count = longest["sizes"], self.islands.count
        at = {island: progress[island][0] if island in progress else 0 for island in range(count)}
        gone = {str(island): where for island, where in missed_rows(self.grid, sizes, step.number, at, count)}
        late = sorted({*at}.difference(merged))
        took = {str(island): taken for island, taken in at.items()} if late or gone else {}
        self._late = {"merged": merged, "late": late, "took": took, "missed": gone}
        step.steps = len(sizes)
        step.batch = replace(step.batch, rows=sum(progress[island][2] for island in merged), epoch=longest["epoch"])


def meet(
    stepper: StepRunner,
    step: StepAttempt,
    name: str,
    fields: dict[str, Any],
    seconds: float,
    trouble: NonFiniteLossError | None,
) -> list[dict[str, Any]]:
    """Exchanges all workers' reports at the end of a round or window, and sets `step.agreed` from them. Collective.

    `fields` are the caller's own part of this worker's report. Returns the reports by rank. If a worker has `trouble`,
    all workers raise it.
    """
    group, run = stepper.run.team.group, stepper.run
    wants = {
        "stop": run.notice is not None,
        "save": run.wants_save(step.steps),
        "enter": stepper.transactions.newcomers,
        "look": group.rank == 0 and group.size > 1 and stepper.weights.wish,
        **run.saving.fields,
    }
    state = {"trouble": trouble and [trouble.what, trouble.cure], "news": stepper.untold()}
    group.declare(name, check=False, kind="turns")
    reports = group.gather_json({**fields, **state, "wants": wants, "seconds": seconds, "digest": step.digest or 0.0})
    if troubles := [report["trouble"] for report in reports if report["trouble"]]:
        raise NonFiniteLossError(*troubles[0])
    for report in reports:
        step.news = {kind: (what, why) for kind, (what, why) in report["news"].items()} | step.news
    sums = {key: sum(report["wants"][key] for report in reports) for key in wants} | {
        "news": sum(bool(report["news"]) for report in reports)
    }
    seconds_of, digests = (tuple(report[key] for report in reports) for key in ("seconds", "digest"))
    step.agreed = replace(NOTHING, seconds=seconds_of, digests=digests, **sums)
    return reports


def same(portion: WorkerBatch) -> WorkerBatch:
    """Returns the batch, for callers that need a function which loads one."""
    return portion


def _describe_progress(one: IslandProgress) -> list[Any]:
    """The part of an island's progress that all teams need, as a JSON list."""
    unused = None if one.unused is None else sorted(one.unused)
    return [one.at, one.steps, one.rows, one.loss, one.count, one.metrics, unused, one.norm, one.lr]


def leave_islands(stepper: StepRunner, saved: Mapping[str, Any]) -> None:
    """Goes on without islands, from island 0's optimizer state in `saved`, the islands' state of a checkpoint."""
    inner = unstack_first(saved["each"]["0"])
    stepper.replica.updater.load(inner)
    stepper.expected = inner["expected"]
    state = InnerOptimizerState.from_tree(inner, stepper.done)
    state.advance_schedules(stepper.replica, stepper.done)  # the island may have been late
    stepper.run.say(
        "changed mathematics: training goes on without islands, with what the optimizer of island 0 keeps; "
        "that of the others and of the merges is dropped"
    )
    report_dropped_rows(stepper.run, stepper.trainer, saved.get("late") or {}, stepper.done, "the checkpoint was taken")
