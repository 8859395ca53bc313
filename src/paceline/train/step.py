"""One data-parallel optimizer step of the team: gradients, sums of losses and counts over workers, update."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar

import torch

from paceline.base.batching import NOTHING, Agreed, Grid, VectorLayout, deal
from paceline.base.heartbeat import HEARTBEAT
from paceline.base.text import links_of
from paceline.comm.user_collectives import refusing
from paceline.compute.grad_noise import GradNoiseScale, looked_at
from paceline.compute.job import StepOptions, StepSums
from paceline.compute.loss_scale import LossScale
from paceline.compute.lr_schedules import follow_batch
from paceline.compute.merge_policy import MergePolicy
from paceline.compute.microbatches import MicroBatch, cut, in_rows, to_device
from paceline.compute.rng import RngState
from paceline.data.balance import Balance, Change
from paceline.data.change_detection import Counters
from paceline.data.fingerprint import refuse_lengths
from paceline.data.loader import Assignment
from paceline.errors import MetricError, UsageError
from paceline.parallel.estimate import describe_blocks, forecast
from paceline.parallel.parallel_job import ParallelJob
from paceline.parallel.plan_cost import cost, facts_of, share_of_sums
from paceline.plan import Plan
from paceline.session.consistency import Weights
from paceline.session.run import Run
from paceline.session.validation import memory_now, peak_memory
from paceline.session.worker_batch import WorkerBatch
from paceline.team.live_migration import Migration
from paceline.team.transactions import TransactionBody
from paceline.train.nonfinite import Refusal
from paceline.train.replica import Replica


@dataclass(frozen=True)
class StepReport:
    """One optimizer step of the whole team: the same on every worker, but for `seconds`.

    `step` counts optimizer steps done, from 1. `loss` and `metrics` are means over the global batch of `samples` rows;
    NaN where nothing counts, as in a step without any label, which changes no weight.
    `lr` is the first group's learning rate of this step, `grad_norm` the norm of the mean gradient before clipping.
    With `local=` a turn of the loop is a round of `turn` steps: `loss` and `metrics` are its means, `samples` its rows,
    and the rest is that of its last step, `lr` and `grad_norm` of island 0.
    """

    step: int
    epoch: int
    loss: float
    metrics: dict[str, float]
    samples: int
    seconds: float
    lr: float
    grad_norm: float
    turn: int = 1

    def every(self, steps: int) -> bool:
        """Returns whether a multiple of `steps` was reached since the last turn of the loop."""
        return self.step // steps > (self.step - self.turn) // steps


@dataclass
class StepAttempt:
    """A step that is being computed, and its result: `agreed`, `norm` (of the mean gradient), `lr` (the first group's
    learning rate in it), `batch` (the rows), `spent` (seconds by part) and the `news` of all workers. `sums` is None if
    the state of another worker was taken over with the step. `scale` is that of the loss.
    """

    number: int
    lr: float
    scale: float = 1.0
    generation: int = -1  # that it was computed in last
    digest: float | None = None  # of the weights before it, where they are compared
    ahead: Migration.Stream | None = None  # what newcomers hear of it
    batch: WorkerBatch = field(default_factory=partial(WorkerBatch, [], 0, 0))
    indivisible: bool = False  # a micro-batch whose rows cannot be told apart was to be divided
    options: StepOptions = field(default_factory=partial(StepOptions, 0, 1.0, 0))
    steps: int = 1  # in a turn
    whose: str = ""  # of an island, which has a step of its own
    sums: StepSums | None = None
    agreed: Agreed = NOTHING
    norm: float = 0.0
    news: dict[str, tuple[str, str]] = field(default_factory=dict)
    spent: dict[str, float] = field(default_factory=dict)


@dataclass
class StepRunner:
    """Computes the steps of one trainer. `done` counts them. `expected` is the count of the last global batch, which
    divides gradients before the present count is known. `waiting_since` is the time at which the last step ended.
    `balance` divides the work among workers. `bound_generation` is the generation that gave the memory of gradient
    sums. `weights` compares the weights with those of other workers. In `lockstep`, all workers make the same step in a
    turn of the user's loop, and their shares of it may be balanced.
    """

    lockstep: ClassVar[bool] = True

    run: Run
    trainer: int
    job: ParallelJob
    replica: Replica
    plan: Plan
    streams: RngState
    merging: MergePolicy
    weights: Weights
    grid: Grid | None = None
    balance: Balance | None = None
    scaling: LossScale | None = None
    done: int = 0
    expected: float = 0.0
    spent: dict[str, float] = field(default_factory=dict)  # by the last step
    layout: VectorLayout | None = None
    bound_generation: int | None = None
    updated: float = 0.0  # seconds of the last update
    news: dict[str, tuple[str, str]] = field(default_factory=dict)  # observed here, by kind: what, and why
    announced: set[str] = field(default_factory=set)  # kinds that people have been told of
    made: int = 0  # steps here; the first one, in which much is looked at, is left out of the following
    busy: float = 0.0  # seconds of forward and backward, and those in them that others were waited for
    waited: float = 0.0
    before: dict[str, float] = field(default_factory=dict)  # bytes sent, by kind
    micro_batches: int = 0  # of a global batch, the largest so far
    empty: int = 0  # turns here in which nothing counted
    noise: GradNoiseScale = field(default_factory=GradNoiseScale)
    waiting_since: float = field(default_factory=time.perf_counter)
    peak: int = 0  # bytes that the process had at most before its first step
    kinds: dict[str, tuple[torch.dtype, torch.device]] = field(default_factory=dict)  # of parameters, at the beginning
    get_assignment: Callable[[], Assignment] | None = (
        None  # how its global batches are dealt, if otherwise than all others
    )

    def __post_init__(self) -> None:
        self.transactions = self.run.team.transactions
        self.kinds = {name: (param.dtype, param.device) for name, param in self.job.named.items()}
        self.group = self.replica.team  # the workers who make a step together
        plan, unit = self.plan, self.replica.mesh.unit
        balanced = self.lockstep and self.run.team.world.shares is None and plan.together == 1
        if self.grid is not None and balanced:
            never = self.run.check.reverse or plan.one_by_one
            self.balance = Balance(self.grid, self.transactions.members, never, unit)
        self.scaling = LossScale() if plan.precision == "fp16" else None
        self.replica.error_feedback.trainer = self.trainer
        self.run.trainers.error_feedback.append(self.replica.error_feedback)

    def run_step(self, deal: Callable[[], WorkerBatch], name: str) -> StepAttempt | None:
        """Computes the next turn of the user's loop, which is applied completely or not at all. Returns None if all
        workers stop before it. `deal` returns this worker's rows in the present team.
        """
        if not torch.is_grad_enabled():
            what = "the loop over steps() runs under torch.no_grad() or inference_mode(), where nothing is trained"
            raise UsageError(what, "put these around the part of the body that is meant")
        if self.run.check.explain:
            self._load(step := StepAttempt(self.done, 0.0), deal)
            try:
                prediction = forecast(self.job, step.batch.share[0], step.batch.count, *self.run.check.explain)
            except UsageError as error:
                prediction = {"refused": [error.what, error.cure]}
            self.run.check.answer(prediction)
        self.run.reporter.traffic.turn(self.trainer)
        step = StepAttempt(self.done, float(self.job.optimizers[0].param_groups[0]["lr"]))
        try:
            self.transactions.run(partial(self._attempt, step, deal, name), "steps", partial(self._taken, step))
        except RuntimeError as error:
            refuse_other_kinds(self.kinds, dict(self.job.model.named_parameters()), error)
            if isinstance(error, torch.OutOfMemoryError):
                raise self.run.memory.explain(error, self.job.device) from error
            raise
        # The seconds since the last step's end that are none of the other parts.
        step.spent["other"] = max(0.0, time.perf_counter() - self.waiting_since - sum(step.spent.values()))
        self.spent = step.spent
        self._learn(step)
        self.run.agreed(step.agreed)
        self.weights.done, self.weights.due = self.done, step.agreed.look > 0
        self.waiting_since = time.perf_counter()
        HEARTBEAT.step()
        return step

    def _attempt(self, step: StepAttempt, deal: Callable[[], WorkerBatch], name: str) -> TransactionBody:
        """One attempt at a step in the present generation, as `Transactions.run` makes it."""
        with ExitStack() as undo:
            began = time.perf_counter()
            undo.callback(self._again)
            self._open(step, name)
            self._load(step, deal)
            step.scale = 1.0 if self.scaling is None else self.scaling.scale
            step.options = self.options(step)
            step.spent = {"data": time.perf_counter() - began}
            undo.callback(self.replica.abort)
            with self.streams.preserved():
                computed = self._compute(step, deal, name, began)
            self._end(step)
            norm = yield partial(self._norm, step)
            undo.pop_all()
        reduced = time.perf_counter()
        self._update(step, norm)
        ended = time.perf_counter()
        self.updated = ended - reduced
        step.spent |= {"reduce": reduced - computed, "update": self.updated}
        yield [dict(vars(step.agreed)), norm, step.lr, [step.batch.rows, step.batch.epoch]]
        self.transactions.fault_point("applied")
        self.replica.complete()
        step.spent["update"] += time.perf_counter() - ended

    # -- up to what all agree on ------------------------------------------------------------------------------------

    def _open(self, step: StepAttempt, name: str) -> None:
        """Begins an attempt: takes memory in a new generation, and a digest of the weights where they are compared."""
        group, step.generation = self.run.team.group, self.transactions.number
        if self.bound_generation != step.generation:
            self.rebind(name)
        self.transactions.fault_point("loading")
        for member in self.run.trainers.members:
            member.state.step_begins()
        looks, self.weights.refused = group.size > 1 and self.weights.looks(step.number), True
        step.digest = self.weights.digest_state() if looks else None

    def options(self, step: StepAttempt) -> StepOptions:
        """Returns the options with which the loaded micro-batches of a step are computed."""
        merge = self.merging.size
        noise_source = looked_at(step.number, self.plan, self.replica.mesh.unit, self.group.size, self.job)
        return StepOptions(
            step=step.number,
            expected=(self.expected or float(step.batch.rows)) / step.scale,
            micro_batches=step.batch.count,
            rows=step.batch.rows,
            noise_sample=noise_source,
            merge=min(merge, -(-step.batch.count // 2)) if noise_source == "first" else merge,
            test_merging=self.merging.undecided and not self.plan.one_by_one,
            record_buffers=self.group.size > 1 or self.plan.exact,
            check_loss=self.plan.together == 1 and step.batch.count > 1 and self.replica.mesh.pipeline == 1,
            reverse=self.run.check.reverse,
            hooked="hooks" in self.announced,
            advice=step.batch.cure,
            fault_point=self.transactions.fault_point,
            transaction=self.transactions.done,
        )

    def _load(self, step: StepAttempt, deal: Callable[[], WorkerBatch]) -> None:
        """Loads this worker's micro-batches onto its device."""
        with refusing("the dataset or collate"):
            step.batch, step.indivisible = deal(), False
        for micro_batch in step.batch.micro_batches:
            step.indivisible |= not micro_batch.take_part()
            micro_batch.batch = to_device(micro_batch.batch, self.job.device)

    def _compute(self, step: StepAttempt, deal: Callable[[], WorkerBatch], name: str, began: float) -> float:
        """Computes gradients and agrees on the step's sums, again if the workers agree to repeat it. Returns the time
        at which this worker's own gradients were complete.
        """
        options, migration = step.options, self.transactions.migration
        if step.batch.single and step.batch.micro_batches and self.replica.mesh.pipeline == 1:
            self._try_single_row(step)
        sends_all_sums = bool(self.plan.exact or self.scaling or self.plan.local or self.job.sparse)
        self.group.declare(name, check=False, kind="gradients")
        while True:
            step.ahead = migration.step(self.trainer, sends_all_sums) if migration.is_sending else None
            on_reduced = None if step.ahead is None else step.ahead.sum
            # In the first step much is made that stays.
            counters = self._counters() if self.made == 1 and "keeps" not in self.announced else None
            sums = step.sums = self.replica.run(step.batch.micro_batches, options, on_reduced)
            if counters is not None and (names := counters.names()):
                self.news["counts"] = describe_changing_counters(names), ""
            step.spent["compute"] = (computed := time.perf_counter()) - began - step.spent.get("data", 0.0)
            agreed = step.agreed = self._agree(step, sums, self.updated + computed - began)
            alone = agreed.no_merge + agreed.no_split > 0 or not math.isfinite(agreed.loss)
            divided = step.batch.fine and alone
            if not (sums.sums_overflowed or divided or agreed.failed or self._overflows(step) or self._heals(step)):
                return computed
            self._again()
            self.replica.abort(again=True)
            if agreed.failed:  # names of metrics may not be known yet
                options.merge, self.layout = 1, None
            if divided and self.balance is not None:  # it draws, say, or fails: everybody takes whole ones
                self.balance.divide(tested=False, strict=True)
                self._load(step, deal)

    def _counters(self) -> Counters:
        """Returns the present state of the user's loss, forward and models besides parameters and buffers."""
        loss, forward = (getattr(one, "call", one) for one in (self.job.over or self.job.loss, self.job.forward))
        return Counters(self.job.beside, loss=loss, forward=forward)

    def _try_single_row(self, step: StepAttempt) -> None:
        """Before the first step of a loop with a later micro-batch of a single row: tries whether the model can
        normalise one row. Raises UsageError if not.
        """
        first = step.batch.micro_batches[0]
        if in_rows(first.batch, first.rows):
            row = MicroBatch(first.index, 1, cut(first.batch, range(1)), step.batch.single)
            self.replica.try_forward(row, step.options)

    def _overflows(self, step: StepAttempt) -> bool:
        """Returns whether gradients overflow at the present loss scale. The step is then computed again with half of
        it.
        """
        step.norm = 0.0
        if self.scaling is None or not math.isfinite(step.agreed.loss) or step.agreed.count <= 0:
            return False
        step.norm = self.replica.norm(step.agreed, step.options)
        if math.isfinite(step.norm) or step.scale <= 1:
            return False
        step.scale /= 2
        step.options.expected *= 2
        return True

    def _heals(self, step: StepAttempt) -> bool:
        """Compares the weights that the step began with. Returns whether some were healed, so that the step is
        repeated.
        """
        undo, own_digest, step.digest = partial(self.replica.abort, again=True), step.digest, None
        return own_digest is not None and self.weights.judge(self.group, step.agreed.digests, undo=undo)

    def _end(self, step: StepAttempt) -> None:
        """Ends the computation of a step: collects the news of workers, and refuses a step that cannot be applied."""
        group = self.group
        if step.agreed.news:
            for worker_news in group.gather_json(self.untold()):
                step.news = {**worker_news, **step.news}
        if step.agreed.tune:
            self._choose(anew=True)
        if step.agreed.lengths_differ:
            refuse_lengths(self.replica.team, step.batch.read)
        self._refuse(step)
        for member in self.run.trainers.members:
            member.state.step_computed()

    def _norm(self, step: StepAttempt) -> float:
        """Returns the norm of the mean gradient. Once all workers know it, all sums have arrived everywhere."""
        self.transactions.fault_point("reduced")
        norm = step.norm or self.replica.norm(step.agreed, step.options)
        if not math.isfinite(norm):
            raise self._refusal(step).of_gradient(step.agreed.loss / step.agreed.count)
        return norm

    def _again(self) -> None:
        for member in self.run.trainers.members:
            member.state.step_again()

    # -- what changes the state -------------------------------------------------------------------------------------

    def _update(self, step: StepAttempt, norm: float) -> None:
        sums, agreed = step.sums, step.agreed
        assert sums is not None
        step.norm = norm
        if step.ahead is not None:
            step.ahead.end(
                self.replica.grad_buffers.sums, dict(vars(agreed)), norm, step.options.expected, sums.records
            )
        self.run.checkpoints.copied()
        self.replica.update(sums, agreed, step.options, norm)
        self.done, self.weights.refused = step.number + 1, False
        self.expected = agreed.count or self.expected
        if self.scaling is not None and (why := self.scaling.took(step.scale)):
            self.run.reporter.decide(self.trainer, f"loss scale {self.scaling.scale:g} from step {self.done + 1}", why)

    def _taken(self, step: StepAttempt, _: Any, result: Any) -> None:
        """Completes a step that counts although this worker lost its own part: it took over another worker's state."""
        self.weights.refused = False
        agreed, step.norm, step.lr, (rows, epoch) = result
        step.agreed, step.batch = Agreed(**agreed), WorkerBatch([], 0, rows, epoch)
        step.sums, step.spent = None, {}

    def apply_step(self, message: list[Any]) -> None:
        """Applies a part of a step that the team made before this newcomer joined: one bucket of sums, or the step's
        agreed values.
        """
        if self.bound_generation != self.transactions.number:
            self.rebind("a step of others")
        if len(message) == 2:
            index, bucket_sum = message
            self.replica.grad_buffers.sums[index].copy_(bucket_sum)
            return
        agreed, norm, expected, records = message
        options = StepOptions(step=self.done, expected=expected, micro_batches=0)
        self.replica.apply_step(StepSums(records=records), Agreed(**agreed), options, norm)
        self.done += 1

    # -- state ------------------------------------------------------------------------------------------------------

    def state(self, done: int | None) -> dict[str, Any]:
        """Returns what further steps depend on; for a checkpoint `done` is the number of transactions, None for what is
        equal on all workers.
        """
        scaling = None if self.scaling is None else [self.scaling.scale, self.scaling.good]
        return {**self.replica.state(), "steps": self.done, "expected": self.expected, "scaling": scaling}

    def load(self, saved: dict[str, Any], newcomer: bool) -> None:
        """Loads what `state` returned, possibly under another plan. A worker that is no newcomer keeps its own part."""
        self.replica.load(saved)
        self.done, self.expected = saved["steps"], saved["expected"]
        if self.scaling is not None and saved.get("scaling"):
            self.scaling = LossScale(*saved["scaling"])

    def regrid(self, grid: Grid, before: int) -> None:
        """Sets the grid of global batches. `before` is the former global batch: if its size changed, the learning rate
        follows by the plan's rule.
        """
        self.grid, job, rule = grid, self.job, self.plan.lr_scaling
        if rule and grid.global_batch != before:
            self.run.reporter.say(follow_batch(rule, before, grid.global_batch, job.optimizers, job.schedulers))
        if self.balance is not None:
            self.balance.grid = grid

    # -- what a step teaches ----------------------------------------------------------------------------------------

    def _learn(self, step: StepAttempt) -> None:
        """Updates the merging of micro-batches, the balance of workers and the notes to the user after a step."""
        self.replica.error_feedback.step(
            sum(seconds for part, seconds in step.spent.items() if part not in ("data", "other"))
        )
        if step.sums is not None:
            waited = step.sums.waited
            if self.made:
                self.busy, self.waited = self.busy + step.spent["compute"] - waited, self.waited + waited
            else:
                self.before = self._sent()
                self.peak = 0 if len(self.run.trainers.members) == 1 else peak_memory(self.job.device)
            self.made += 1
            if self.made == 3 and self.run.team.group.rank == 0:
                codecs = self.job.device.type == "cpu" and not self.plan.exact
                if suggestion := self.replica.error_feedback.advice(self.busy / 2, codecs):
                    self._note(suggestion)
            self.micro_batches = max(self.micro_batches, step.batch.count)
            if step.options.merge == self.merging.size:
                self._merge(step, step.sums, step.spent["compute"])
            for news in self.noise.learn(step.agreed, step.norm, step.batch.rows):
                self.run.reporter.journal.write("noise", trainer=self.trainer, step=self.done, **news)
        if step.news:
            self._tell(step.news)
        # Only in the generation that it was computed in: its members know the same, and those of the next one tell
        # each other.
        if self.balance is not None and step.generation == self.transactions.number:
            self._weigh(self.balance, step)
        if step.agreed.count <= 0:
            self._tell_of_nothing(step)
        elif step.agreed.unused and "unused" not in self.announced:
            self._name_unused(step.agreed.unused)

    def _merge(self, step: StepAttempt, sums: StepSums, seconds: float) -> None:
        """Updates the merging of micro-batches from the `seconds` of forward and backward."""
        share = step.batch.share
        decision = self.merging.learn(sums, step.agreed, seconds / max(1, sum(m.rows for m in share)), len(share))
        if decision is not None:
            self.run.reporter.decide(self.trainer, *decision)

    def measure(self, besides: int) -> list[dict[str, Any]]:
        """Returns the predicted and the measured memory and traffic of a step on this worker. `besides` are the bytes
        of the process that belong to others.
        """
        mesh, peak = self.plan.mesh(self.run.team.size), peak_memory(self.job.device)
        held = self.memory()
        # Of trainers in turn an earlier one may have been larger.
        process_bytes = peak if peak > self.peak or len(self.run.trainers.members) == 1 else memory_now(self.job.device)
        held["process"] = max(process_bytes - besides, sum(held.values()))
        self.run.reporter.journal.write("memory", trainer=self.trainer, **held)
        steps, sent = max(self.made - 1, 1), {k: n - self.before.get(k, 0) for k, n in self._sent().items()}
        observed: dict[str, Any] = {"seconds": self.busy / steps, "waited": self.waited / steps}
        observed["sent"] = {kind: round(count / steps) for kind, count in sent.items() if count}
        prediction = cost(self.plan, facts_of(self.job), mesh.size, -(-self.micro_batches // mesh.units))
        return [dataclasses.asdict(prediction), held | observed]

    def measured(self, reports: Sequence[list[dict[str, Any]]]) -> None:
        """Journals the measurements of all workers for the report."""
        predicted, measured = zip(*reports[: self.plan.mesh(len(reports)).replica], strict=True)
        details = {"stages": [{"blocks": blocks} for blocks in describe_blocks(self.job)], "workers": len(reports)}
        details |= {"micro_batches": self.micro_batches, "predicted": predicted, "measured": measured}
        self.run.reporter.journal.write("figures", trainer=self.trainer, plan=str(self.plan), **details)

    def memory(self) -> dict[str, int]:
        """Returns the largest number of bytes that this worker holds, by category."""
        return self.replica.memory()

    def shares(self, batches: int, weights: Sequence[float]) -> list[int]:
        """Returns how many micro-batches of a global batch each unit gets, by the units' weights."""
        return [len(part) for part in deal(batches, weights)]

    def _sent(self) -> dict[str, float]:
        return self.run.reporter.traffic.of(self.trainer)

    def rebind(self, name: str) -> None:
        """Prepares for the first step of a generation: takes memory from its group, and shares what each worker knows
        of speeds and links. Collective. It does not happen earlier, since newcomers reach the places where a script
        makes its trainers at other times than the other workers.
        """
        operations, group = self.transactions, self.run.team.group
        balance, feedback = self.balance, self.replica.error_feedback
        group.declare(name)
        self.replica.rebind()
        shares, known = None if balance is None else balance.state(), feedback.known(operations.done)
        common = [group.links, feedback.chosen] if group.rank == 0 else []
        reports = group.gather_json([shares, self.weights.kind, common, known])
        links, chosen = reports[0][2]
        if new := group.measure(links):
            measured = {"pairs": group.links, "over": group.interface}
            self.run.reporter.journal.write("links", **measured)
            self.run.reporter.say(f"the link between hosts: {links_of(measured)}", once=True)
        # The first worker is the one that has been in the team for the longest time.
        if balance is not None and (change := balance.reform(operations.members, reports[0][0])):
            self._dealt(balance, change)
        self.weights.kinds, self.weights.due = [kind for _, kind, *_ in reports], True
        for text in feedback.formed([known for *_, known in reports], resumed=operations.number == 0):
            self.run.reporter.say(text, once=True)
        if decided := feedback.describe(partial(share_of_sums, self.plan, self.job, group.size)):
            self.run.reporter.decide(self.trainer, *decided)
            self.run.reporter.say(": ".join(decided), once=True)
        if feedback.go_on(chosen, new):
            self._choose(anew=False)
        self.layout, self.bound_generation, self.updated = None, operations.number, 0.0

    def _choose(self, anew: bool) -> None:
        for what, why in self.replica.error_feedback.choose(anew):
            self.run.reporter.decide(self.trainer, what, why)
            self.run.reporter.say(what)

    def _weigh(self, balance: Balance, step: StepAttempt) -> None:
        """Updates the balance from the workers' seconds in a step."""
        balance.divide(tested=step.agreed.tested > 0, strict=step.agreed.no_merge + step.agreed.no_split > 0)
        if step.batch.full and (change := balance.learn(step.agreed.seconds)):
            self._dealt(balance, change)
        for what, why in balance.news:
            self.run.reporter.decide(self.trainer, what, why)
        balance.news.clear()
        for what, why in balance.settled():
            self.run.reporter.say(f"{what}: {why}")

    def _dealt(self, balance: Balance, change: Change) -> None:
        about = {"trainer": self.trainer, "step": self.done, "workers": balance.workers}
        self.run.reporter.journal.write("shares", **about, **dataclasses.asdict(change))

    def _tell(self, news: dict[str, tuple[str, str]]) -> None:
        """Announces news of the workers, each kind once: as a decision with its reason, or as a note to the user."""
        if "keeps" in self.announced | news.keys():  # then nobody knows whether it is a sum
            news.pop("mixes", None)
        for kind in sorted(news.keys() - self.announced):
            self.announced.add(kind)
            what, why = news[kind]
            if why:
                self.run.reporter.decide(self.trainer, what, why)
            else:
                self._note(what)

    def _note(self, text: str) -> None:
        self.run.reporter.journal.write("note", trainer=self.trainer, step=self.done, text=text)
        self.run.reporter.say(text, once=True)

    def untold(self) -> dict[str, tuple[str, str]]:
        """Returns this worker's news of kinds that were not announced yet."""
        return {kind: entry for kind, entry in self.news.items() if kind not in self.announced}

    def _tell_of_nothing(self, step: StepAttempt) -> None:
        """Notes a step in which no row counts; on the console only the first, tenth, hundredth, ... one."""
        self.empty += 1
        steps = f"step {self.done}" if step.steps == 1 else f"steps {self.done - step.steps + 1}-{self.done}"
        text = f"the loss of {steps} counts 0 rows or tokens in the whole global batch: no weight was changed"
        if self.empty > 1:
            text += f", as {self.empty - 1} times before"
        self.run.reporter.journal.write("note", trainer=self.trainer, step=self.done, text=text)
        if str(self.empty).strip("0") == "1":
            self.run.reporter.say(text)

    def _name_unused(self, unused: tuple[int, ...]) -> None:
        """Names the parameters that got no gradient, once: with a mixture of experts they differ from step to step.
        Parameters that the script froze after the Trainer was made are left out.
        """
        names = [
            name
            for number, (name, param) in enumerate(self.job.named.items())
            if number in {*unused} and param.requires_grad
        ]
        if not names:
            return
        self.announced.add("unused")
        shown = ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")
        self.run.reporter.say(
            f"{len(names)} of {len(self.job.named)} parameters got no gradient in step {self.done} and were left as "
            f"they are: {shown}; that is right for experts that no row chose, while parameters that are never used are "
            "better frozen with requires_grad_(False) before the Trainer is made; this is said once",
            once=True,
        )

    # -- the vector ---------------------------------------------------------------------------------------------

    @property
    def stops(self) -> bool:
        """Whether this worker wants the team to stop after this step."""
        return self.run.notices.stop_signal is not None

    def _agree(self, step: StepAttempt, sums: StepSums, seconds: float) -> Agreed:
        """Sums the step's vector over all workers. In the first step they agree on the names of the metrics before."""
        group, run, batch = self.group, self.run, step.batch
        self.news |= sums.news | self.job.news
        speaks = self.replica.mesh.speaks(group.rank)
        tells = speaks and bool(batch.share) and not sums.failed
        if self.layout is None:
            self.layout = self._first_layout(sorted(sums.metrics) if tells else None)
        layout = self.layout
        if tells and tuple(sorted(sums.metrics)) != layout.metrics:
            what = f"the loss returned metrics {sorted(sums.metrics)}, before that {list(layout.metrics)}"
            raise MetricError(what, "return the same names every time, with count 0 where there is nothing to count")
        metrics = sums.metrics if speaks else {}
        if sums.records is not None and not speaks:
            sums.records.zero_()
        fields = {
            "count": sums.count if speaks else 0.0,
            "loss": sums.loss if speaks else 0.0,
            "tested": sums.tested,
            "no_merge": sums.no_merge,
            "no_split": sums.no_split or step.indivisible,
            "failed": sums.failed,
            "news": bool(self.untold()),
            "stop": self.stops,
            "save": run.wants_save(),
            "enter": self.transactions.newcomers,
            "look": group.rank == 0 and group.size > 1 and self.weights.wish,
            "tune": self.replica.error_feedback.wishes,
            "sq_norm": sums.sq_norms[0] * step.options.expected**2,
            "sq_norm_rows": sums.sq_norms[1],
            "sq_norm_squares": sums.sq_norms[1] ** 2,
            "streams": batch.read > 0,
            "read": batch.read,
            "read_squares": batch.read**2,
            **run.checkpoints.fields,
        }
        spent = self.spent | step.spent
        packed = layout.pack(group.rank, seconds, metrics, sums.unused, fields, step.digest or 0.0, spent)
        rows = layout.rows(sums.parts if speaks else [], batch.count) if self.plan.exact else []
        with HEARTBEAT.waiting():  # also where NCCL does
            summed = self.replica.agree(torch.tensor(packed + rows, dtype=torch.float64), sums, step.options)
        vector = summed.tolist()
        agreed = layout.unpack(vector[: len(packed)])
        return layout.exactly(agreed, vector[len(packed) :]) if rows else agreed

    def _first_layout(self, metric_names: list[str] | None) -> VectorLayout:
        """Returns the layout of the step's vector. All workers that report metrics must report the same names."""
        all_names = self.group.gather_json(metric_names)
        known = [(rank, name) for rank, name in enumerate(all_names) if name is not None]
        for rank, other in known:
            if other != known[0][1]:
                raise MetricError(
                    f"the loss returned metrics {known[0][1]} on worker {known[0][0]} and {other} on worker {rank}",
                    "return the same names everywhere, with count 0 where there is nothing to count",
                )
        return VectorLayout(tuple(known[0][1]) if known else (), self.group.size, len(self.job.named))

    def _refuse(self, step: StepAttempt) -> None:
        """Raises NonFiniteLossError if the loss is not finite. A count of zero is valid: the step changes nothing."""
        if not math.isfinite(step.agreed.loss):
            raise self._refusal(step).of_loss()

    def _refusal(self, step: StepAttempt) -> Refusal:
        computed = step.batch.micro_batches, step.options, step.sums
        return Refusal(self.replica, self.group, f"step {step.number + 1}{step.whose}", *computed)


def describe_changing_counters(names: Sequence[str]) -> str:
    """Returns a note to the user about values that a loss or a forward changes each time it is called."""
    shown = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
    change, what = ("changes", "it") if len(names) == 1 else ("change", "them")
    return (
        f"{shown} {change} each time a micro-batch is computed, by the loss or the model: if the loss depends on "
        f"{what}, the result depends on the number of workers; then keep {what} in trainer.state and change {what} in "
        "the body of the loop"
    )


def refuse_other_kinds(
    kinds: Mapping[str, tuple[torch.dtype, torch.device]], named: Mapping[str, torch.Tensor], error: Exception
) -> None:
    """Raises UsageError if a step failed and a parameter has another dtype or device than at first."""
    for name, param in named.items():
        dtype, device = kinds.get(name, (param.dtype, param.device))
        if (param.dtype, param.device) != (dtype, device):
            before, now = (
                (str(dtype).removeprefix("torch."), str(param.dtype).removeprefix("torch."))
                if param.dtype != dtype
                else (device, param.device)
            )
            raise UsageError(
                f"the script has converted the model after the Trainer was made: {name} was {before} and is {now}",
                "convert the model before the Trainer is made, or a copy.deepcopy of it in the loop; for arithmetic in "
                "bfloat16 say precision=bf16 in the plan",
            ) from error
