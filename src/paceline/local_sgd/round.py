"""One local-SGD round: the steps of all islands and their merge, as one transaction.

A turn of the user's loop is a round. If a worker group is lost, the group that takes over its islands repeats the round
for them; the other islands keep their work. A round that is asked to stop is abandoned: nothing of it counts, and the
checkpoint has the state at its start.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from paceline.base.batching import add_metrics, deal
from paceline.base.heartbeat import HEARTBEAT
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
from paceline.team.transactions import ReformedError
from paceline.train.step import Step
from paceline.train.step_context import Batches, StepContext
from paceline.train.step_observers import learn_merging
from paceline.train.step_verbs import (
    account_update,
    attempts,
    begin_step,
    complete,
    forward_backward,
    grad_norm,
    load_batch,
    must_repeat,
    open_attempt,
    publish,
    reduce,
    refuse_nonfinite,
    take_over,
)
from paceline.train.turn_reports import BrokenOffError, exchange_reports


def build_local_sgd(context: StepContext) -> LocalSgd:
    """Builds the strategy of a trainer whose plan has `local`.

    Raises UsageError if the loss needs the whole global batch, or an island would get no micro-batch.
    """
    run, job, replica, plan, grid = context.run, context.job, context.replica, context.plan, context.grid
    count = plan.local or 1
    batches = 0 if grid is None else len(grid.cut(grid.global_batch))
    wrong, cure = "", ""
    if job.over is not None:
        wrong, cure = 'loss_over="batch" needs the full global batch at once', 'remove local= or loss_over="batch"'
    elif grid is not None and batches < count:
        wrong = f"each island needs a micro-batch, and the global batch of {grid.global_batch} rows has {batches}"
        micro = max(1, grid.global_batch // count)
        cure = (
            f"set micro={micro}, which changes the mathematics"
            if grid.global_batch >= count
            else f"set local={batches}"
        )
    if wrong:
        raise UsageError(f"local={count}: {wrong}", cure)
    streams = plan.fragments or plan.outer_codec
    diloco = (StreamingDiLoCo if streams else DiLoCo)(replica, run.team.group, replica.mesh, plan)
    parts = sorted({len(part) for part in deal(batches, [1.0] * count)}, reverse=True) if grid is not None else []
    each = " or ".join(map(str, parts))
    what = f"{count} islands, merged every {plan.every} steps by {plan.outer or OUTER}{diloco.description}"
    run.reporter.say(f"{what}; micro-batches of each island in a global batch: {each}")
    why = "the plan has local=: the result depends on the number of islands, not on the number of workers"
    if plan.quorum:
        what += f"; a merge waits for {plan.quorum} of the islands, and then for a grace window"
        why = "the plan has quorum=: the result also depends on which islands are late; the journal records them"
    run.reporter.decide(context.trainer, what, why)
    return LocalSgd(context, diloco, MergeQuorum(run, context.trainer, count, plan.quorum))


def local_sgd_round(strategy: LocalSgd, batches: Batches) -> Step:
    """Makes one round of local SGD: the steps of all islands, each by itself, and the merge of their weights.

    Returns it as one Step that counts the steps of an island. Raises BrokenOffError if all workers stop instead.
    """
    context, diloco, islands, quorum = strategy.context, strategy.diloco, strategy.islands, strategy.quorum
    step = begin_step(context, batches.title.format(context.done + 1))
    for attempt in attempts(context, islands.leave):  # again after a lost peer
        with attempt:
            open_attempt(context, step)
            diloco.begin_round()
            with context.streams.preserved():
                made = strategy.make_steps(step, batches)
            islands.leave()
            step.computed = time.perf_counter()
            if made:
                quorum.wait()
            merged, late = strategy.exchange(step, made)  # what all teams and workers have made
            diloco.sum_outer_gradients(step.name, step.done, merged, late)
            context.note_computed_state()
            step.spent["compute"] = step.computed - step.began - step.spent["data"]
            attempt.commit(lambda: step.agreed.count, partial(strategy.apply, step))
            complete(context, step)
    if attempt.taken is not None:
        *result, step.steps, strategy.late = attempt.taken[1]
        take_over(context, step, *result)
    publish(context, step)
    quorum.report_late(context.done, strategy.late)
    return step


def island_step(strategy: LocalSgd, island: int, step: Step) -> bool:
    """Makes one step of an island on all replicas of its team, and returns whether one of their workers stops.

    `step` has the rows that the team's islands have in the global batch.
    """
    context, islands = strategy.context, strategy.islands
    assert context.grid is not None
    batch, progress = step.batch, islands.enter(island)
    run, rows = island_batches(context.grid, batch.rows, island, islands.count)
    if not rows:
        islands.skip_step(island)
        return False
    step.batch = replace(batch, micro_batches=[m for m in batch.micro_batches if m.index in run], rows=rows)
    step.lr = float(context.job.optimizers[0].param_groups[0]["lr"])
    context.expected = progress.inner.expected
    step.options, step.began = context.options(step), time.perf_counter()
    while True:
        forward_backward(context, step)
        reduce(context, step)
        if not must_repeat(context, step):
            break
    seconds = time.perf_counter() - step.began
    refuse_nonfinite(context, step)
    if step.agreed.count <= 0:
        context.replica.abort(again=True)
        islands.skip_step(island, rows)
        return step.agreed.stop > 0
    norm = grad_norm(context, step)
    assert step.sums is not None
    context.run.checkpoints.copied()
    progress.torn = True
    context.replica.update(step.sums, step.agreed, step.options, norm)
    context.replica.complete()
    progress.torn = False
    progress.inner.expected = step.agreed.count
    progress.add_step(step.agreed, norm, step.lr, rows)
    learn_merging(context, step, step.sums, seconds)
    HEARTBEAT.beat()
    return step.agreed.stop > 0


class LocalSgd:
    """Trains in rounds of local SGD; see train/strategy.py."""

    lockstep = False

    def __init__(self, context: StepContext, diloco: DiLoCo | StreamingDiLoCo, quorum: MergeQuorum) -> None:
        self.context, self.diloco, self.quorum = context, diloco, quorum
        self.islands: Islands = diloco.islands
        self.late: dict[str, Any] = {}  # which islands were late in the round, and what they missed
        self._ahead = 0  # the number of the current step within the round
        self._sizes: list[int] = []  # rows of each global batch of the round
        self._trouble: NonFiniteLossError | None = None  # raised by an island of this team
        self._checkpoint = IslandCheckpoint(self.islands, diloco.outer, context.trainer)
        context.run.trainers.error_feedback.append(self._checkpoint)
        self.islands.read_saved_island = self._read_saved_island
        context.on_new_generation = self._rebind
        context.stops = lambda: quorum.stops

    def advance(self, batches: Batches) -> Step | None:
        """Makes a round. Returns None if it was broken off because all workers stop."""
        try:
            return local_sgd_round(self, batches)
        except BrokenOffError as end:
            self.context.run.record_agreed(end.agreed)
            return None

    def assignment(self) -> Assignment:
        """Assigns the next global batch of the round to those islands of this worker's team that have not had it."""
        isles, team, rank = self.islands, self.context.replica.team, self.context.run.team.rank
        assignment = self.context.run.team.get_assignment(isles.mesh)
        units = isles.mesh.over(team.size)
        first = isles.mesh.unit_of(rank) - units.unit_of(team.rank)
        return replace(
            assignment,
            rank=units.unit_of(team.rank),
            weights=assignment.weights[first : first + units.units],
            together=self.context.plan.together,
            islands=(isles.count, tuple(self._due())),
        )

    def _due(self) -> list[int]:
        islands = self.islands
        return [i for i in islands.local_islands if i not in islands.progress or islands.progress[i].at <= self._ahead]

    def _rebind(self) -> None:
        """In a new generation: assigns islands to its teams, and reports the work that was lost."""
        run, trainer = self.context.run, self.context.trainer
        self.quorum.journal_late()
        for message in reassign_islands(self.islands, restart=self.diloco.repeats_rounds):
            run.reporter.say(message)
            run.reporter.decide(trainer, *message.split(": ", 1))
        for island, rows in self.islands.lost_rows.items():
            run.reporter.journal.write("uncounted", trainer=trainer, step=self.context.done, island=island, rows=rows)

    def _read_saved_island(self, island: int) -> list[Any]:
        """Reads an island's state from the last checkpoint: [its step, the trainer's steps, the state], or []."""
        run = self.context.run
        if (checkpoint := run.checkpoints.read_newest()) is None:
            return []
        saved = dict(enumerate(checkpoint[1]["trainers"])).get(self.context.trainer, {})
        kept = (saved.get("islands") or {}).get("each", {}).get(str(island))
        return [] if kept is None else [checkpoint[0], saved["steps"], unstack_first(kept)]

    def state(self, done: int | None) -> dict[str, Any]:
        """The trainer's state for a checkpoint, with the state of each island in place of the optimizers'."""
        state = self.context.state()
        common = {key: state[key] for key in ("model", "owed", "steps", "expected", "scaling")}
        return {**common, "islands": self._checkpoint.state(done)}

    def load(self, saved: dict[str, Any], newcomer: bool) -> None:
        """Loads a state, and reports a change of the mathematics, such as a different number of islands."""
        context, run = self.context, self.context.run
        context.replica.load(saved)
        context.done, context.expected = saved["steps"], saved["expected"]
        kept = saved.get("islands") or {}
        change = describe_changed_islands(kept, self.islands.count, self.diloco.streams)
        self._checkpoint.load(kept, context.done)
        if newcomer and "each" in kept:
            report_dropped_rows(run, context.trainer, kept.get("late") or {}, context.done, "the checkpoint was taken")
        if newcomer and "optimizers" in saved:
            change = f"training continues in {self.islands.count} islands, each with a copy of the optimizer state"
        if change:
            run.reporter.say(f"changed mathematics: {change}")

    def memory(self) -> dict[str, int]:
        """The bytes in use by kind, with the weights and optimizer states of islands."""
        sizes, (weights, kept) = self.context.replica.memory(), self.diloco.peak_bytes
        return sizes | {"parameters": sizes["parameters"] + weights, "optimizer": max(sizes["optimizer"], kept)}

    def end_loop(self) -> None:
        """Reports and drops what late islands have begun."""
        context = self.context
        report_dropped_rows(context.run, context.trainer, self.islands.late, context.done, "training was stopped")
        self.islands.drop_late()

    def shares(self, batches: int, weights: Sequence[float]) -> list[int]:
        """The number of micro-batches of each unit, as islands are assigned at first; `weights` do not matter."""
        return share_micro_batches(self.islands, batches)

    # -- what islands do by themselves --------------------------------------------------------------------------

    def make_steps(self, step: Step, batches: Batches) -> bool:
        """Makes the round's steps of this team's islands, and returns whether all were made without a break-off."""
        context, isles, quorum = self.context, self.islands, self.quorum
        step.batch, step.steps, step.spent = WorkerBatch([], 0, 0), 0, {"data": 0.0}
        most, last, every = context.run.team.world.max_steps, False, context.plan.every or 1
        self._sizes, self._trouble, ready = [], None, list[int]()
        quorum.begin_round(len(isles.mesh.over(context.run.team.size).teams(isles.count)))
        for ahead in range(every):
            self._ahead = ahead
            due, began = self._due(), time.perf_counter()
            portion = batches.load(ahead, self.assignment())
            if portion is None:
                last = True
                break
            load_batch(context, one := Step(context.done + ahead, 0.0), portion)
            step.spent["data"] += time.perf_counter() - began
            step.batch = replace(portion, micro_batches=portion.share[:1])  # one, to count operations by its shapes
            step.steps, last = step.steps + 1, portion.last
            self._sizes.append(portion.rows)
            for island in due:
                if context.transactions.interrupted:
                    raise ReformedError("another generation is forming", "wait")
                before, ready = ready, [i for i in isles.local_islands if isles.progress[i].steps >= every]
                if isles.is_reporter and ready != before:
                    quorum.report(step.number, (), ready, last=False)
                try:
                    of_island = f" of island {island}"
                    name = f"step {one.number + 1}{of_island}"
                    stops = island_step(self, island, replace(one, name=name, of_island=of_island))
                    if stops and (ahead + 1 < every or island != due[-1]):
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
            ends = last or (most is not None and context.run.trainers.step + step.steps >= most)
            quorum.report(step.number, isles.local_islands, (), ends)
        return True

    # -- what all agree on --------------------------------------------------------------------------------------

    def exchange(self, step: Step, made: bool) -> tuple[list[int], dict[int, list[int]]]:
        """Exchanges the reports of all teams and workers at the end of the round, and checks that the round counts.

        Returns the islands to merge, and {island: [steps, rows]} of the late ones.
        """
        context, isles, decided = self.context, self.islands, self.quorum.decided
        team_report = {
            "islands": [[i, *_describe_progress(isles.progress[i])] for i in isles.local_islands if i in isles.progress]
            if isles.is_reporter
            else [],
            "sizes": self._sizes,
            "epoch": step.batch.epoch,
            "merged": decided,
            "broken": decided is None
            and context.run.notices.stop_signal is not None
            and (not made or self.quorum.waits),
        }
        reports = exchange_reports(context, step, team_report, step.computed - step.began, self._trouble)
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
            context.weights.judge(context.run.team.group, step.agreed.digests, heal=False)
        refuse_nonfinite(context, step)
        return merged, late

    def _count_rows(
        self, step: Step, longest: dict[str, Any], progress: dict[int, list[Any]], merged: list[int]
    ) -> None:
        """Counts the rows of this merge, and the rows of the round that no island has taken. `longest` is the report of
        a team that has seen all batches of the round; `progress` has what each island did.
        """
        grid, sizes, count = self.context.grid, longest["sizes"], self.islands.count
        assert grid is not None
        at = {island: progress[island][0] if island in progress else 0 for island in range(count)}
        gone = {str(island): where for island, where in missed_rows(grid, sizes, step.number, at, count)}
        late = sorted({*at}.difference(merged))
        took = {str(island): taken for island, taken in at.items()} if late or gone else {}
        self.late = {"merged": merged, "late": late, "took": took, "missed": gone}
        step.steps = len(sizes)
        step.batch = replace(step.batch, rows=sum(progress[island][2] for island in merged), epoch=longest["epoch"])

    def apply(self, step: Step, count: float) -> list[Any]:
        """Makes the merged weights those of all islands. Returns what a worker needs that takes the round over."""
        context, began = self.context, time.perf_counter()
        context.run.checkpoints.copied()
        self.diloco.outer_step(count, step.done)
        context.done, context.weights.refused = step.done, False
        account_update(context, step, began)
        sizes = [step.batch.rows, step.batch.epoch]
        return [dict(vars(step.agreed)), step.norm, step.lr, sizes, step.steps, self.late]


def _describe_progress(one: IslandProgress) -> list[Any]:
    """The part of an island's progress that all teams need, as a JSON list."""
    unused = None if one.unused is None else sorted(one.unused)
    return [one.at, one.steps, one.rows, one.loss, one.count, one.metrics, unused, one.norm, one.lr]


def leave_islands(context: StepContext, saved: Mapping[str, Any]) -> None:
    """Continues without islands, from island 0's optimizer state in `saved`, the islands' state of a checkpoint."""
    inner = unstack_first(saved["each"]["0"])
    context.replica.updater.load(inner)
    context.expected = inner["expected"]
    state = InnerOptimizerState.from_tree(inner, context.done)
    state.advance_schedules(context.replica, context.done)  # the island may have been late
    context.reporter.say(
        "changed mathematics: training continues without islands, with the optimizer state of island 0; "
        "the states of the other islands and of the outer optimizer are dropped"
    )
    report_dropped_rows(context.run, context.trainer, saved.get("late") or {}, context.done, "the checkpoint was taken")
