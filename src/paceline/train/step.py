"""One data-parallel optimizer step of the team."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any

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
from paceline.data.loader import Place
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
from paceline.team.transactions import Attempt
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
        """Whether a multiple of so many steps was reached since the last turn of the loop."""
        return self.step // steps > (self.step - self.turn) // steps


@dataclass
class StepAttempt:
    """A step under way, and once it is done what tells of it: `agreed`, `norm` (of the mean gradient), `lr` (the first
    group's learning rate in it), `whole` (the rows), `spent` (seconds by part) and `news` of all workers. Without
    `sums` another worker's state was taken over with it. `scale` is that of the loss.
    """

    number: int
    lr: float
    scale: float = 1.0
    generation: int = -1  # that it was computed in last
    digest: float | None = None  # of the weights before it, where they are compared
    ahead: Migration.Stream | None = None  # what newcomers hear of it
    whole: WorkerBatch = field(default_factory=partial(WorkerBatch, [], 0, 0))
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
    """Makes one trainer's steps. `done` counts them; `expected` is the last global count, which gradients are divided
    by before it is known; `waiting_since` is when the last step ended. `balance` says who computes how much; the memory
    for sums is of the generation `housed`. `weights` are compared with everybody's now and then.
    """

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
    housed: int | None = None
    updated: float = 0.0  # seconds of the last update
    news: dict[str, tuple[str, str]] = field(default_factory=dict)  # observed here, by kind: what, and why
    told: set[str] = field(default_factory=set)  # kinds that people have been told of
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
    place: Callable[[], Place] | None = None  # how its global batches are dealt, if otherwise than all others

    def __post_init__(self) -> None:
        self.operations = self.run.team.operations
        self.kinds = {name: (param.dtype, param.device) for name, param in self.job.named.items()}
        self.group = self.replica.team  # the workers who make a step together
        plan, unit = self.plan, self.replica.mesh.unit
        apart = self.run.team.world.shares is not None or plan.together > 1 or plan.local
        if self.grid is not None and not apart:
            never = self.run.reverse or plan.one_by_one
            self.balance = Balance(self.grid, self.operations.members, never, unit)
        self.scaling = LossScale() if plan.precision == "fp16" else None
        self.replica.own.trainer = self.trainer
        self.run.own.append(self.replica.own)

    def turn(self, deal: Callable[[], WorkerBatch], name: str) -> StepAttempt | None:
        """Makes the next turn of the user's loop, applied whole or not at all; None where all are to stop first. `deal`
        gives this worker's rows, in the present team.
        """
        if not torch.is_grad_enabled():
            what = "the loop over steps() runs under torch.no_grad() or inference_mode(), where nothing is trained"
            raise UsageError(what, "put these around the part of the body that is meant")
        if self.run.asked:
            self._load(step := StepAttempt(self.done, 0.0), deal)
            try:
                told = forecast(self.job, step.whole.share[0], step.whole.count, *self.run.asked)
            except UsageError as error:
                told = {"refused": [error.what, error.cure]}
            self.run.answer(told)
        self.run.traffic.turn(self.trainer)
        step = StepAttempt(self.done, float(self.job.optimizers[0].param_groups[0]["lr"]))
        with self.run.explains_memory(self.job.device):
            try:
                self.operations.run(partial(self._attempt, step, deal, name), "steps", partial(self._taken, step))
            except RuntimeError as error:
                refuse_other_kinds(self.kinds, dict(self.job.model.named_parameters()), error)
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

    def _attempt(self, step: StepAttempt, deal: Callable[[], WorkerBatch], name: str) -> Attempt:
        with ExitStack() as undo:
            began = time.perf_counter()
            undo.callback(self._again)
            self._open(step, name)
            self._load(step, deal)
            step.scale = 1.0 if self.scaling is None else self.scaling.scale
            step.options = self.options(step)
            step.spent = {"data": time.perf_counter() - began}
            undo.callback(self.replica.abort)
            with self.streams.lent():
                computed = self._compute(step, deal, name, began)
            self._end(step)
            norm = yield partial(self._norm, step)
            undo.pop_all()
        reduced = time.perf_counter()
        self._update(step, norm)
        ended = time.perf_counter()
        self.updated = ended - reduced
        step.spent |= {"reduce": reduced - computed, "update": self.updated}
        yield [dict(vars(step.agreed)), norm, step.lr, [step.whole.rows, step.whole.epoch]]
        self.operations.reached("applied")
        self.replica.complete()
        step.spent["update"] += time.perf_counter() - ended

    # -- up to what all agree on ------------------------------------------------------------------------------------

    def _open(self, step: StepAttempt, name: str) -> None:
        """In the present generation, with the weights as they are."""
        group, step.generation = self.run.team.group, self.operations.number
        if self.housed != step.generation:
            self.house(name)
        self.operations.reached("loading")
        for member in self.run.members:
            member.state.step_begins()
        looks, self.weights.refused = group.size > 1 and self.weights.looks(step.number), True
        step.digest = self.weights.told() if looks else None

    def options(self, step: StepAttempt) -> StepOptions:
        """How its micro-batches, which are there, may be computed."""
        merge = self.merging.size
        spread = looked_at(step.number, self.plan, self.replica.mesh.unit, self.group.size, self.job)
        return StepOptions(
            step=step.number,
            expected=(self.expected or float(step.whole.rows)) / step.scale,
            micro_batches=step.whole.count,
            rows=step.whole.rows,
            noise_sample=spread,
            merge=min(merge, -(-step.whole.count // 2)) if spread == "first" else merge,
            test=self.merging.undecided and not self.plan.one_by_one,
            collect=self.group.size > 1 or self.plan.exact,
            probe=self.plan.together == 1 and step.whole.count > 1 and self.replica.mesh.pipeline == 1,
            reverse=self.run.reverse,
            hooked="hooks" in self.told,
            cure=step.whole.cure,
            reached=self.operations.reached,
            turn=self.operations.done,
        )

    def _load(self, step: StepAttempt, deal: Callable[[], WorkerBatch]) -> None:
        """This worker's micro-batches, on its device."""
        with refusing("the dataset or collate"):
            step.whole, step.indivisible = deal(), False
        for micro_batch in step.whole.micro_batches:
            step.indivisible |= not micro_batch.take_part()
            micro_batch.batch = to_device(micro_batch.batch, self.job.device)

    def _compute(self, step: StepAttempt, deal: Callable[[], WorkerBatch], name: str, began: float) -> float:
        """Gradients, and what all agree on: again, as long as they agree to. When this worker's own part was there."""
        options, migration = step.options, self.operations.migration
        if step.whole.single and step.whole.micro_batches and self.replica.mesh.pipeline == 1:
            self._try_single_row(step)
        whole = bool(self.plan.exact or self.scaling or self.plan.local or self.job.sparse)
        self.group.enter(name, check=False, kind="gradients")
        while True:
            step.ahead = migration.step(self.trainer, whole) if migration.giving else None
            heard = None if step.ahead is None else step.ahead.sum
            # In the first step much is made that stays.
            counters = self._counters() if self.made == 1 and "keeps" not in self.told else None
            sums = step.sums = self.replica.run(step.whole.micro_batches, options, heard)
            if counters is not None and (names := counters.names()):
                self.news["counts"] = counted_told(names), ""
            step.spent["compute"] = (computed := time.perf_counter()) - began - step.spent.get("data", 0.0)
            agreed = step.agreed = self._agree(step, sums, self.updated + computed - began)
            alone = agreed.strict + agreed.whole > 0 or not math.isfinite(agreed.loss)
            divided = step.whole.fine and alone
            if not (sums.redo or divided or agreed.failed or self._overflows(step) or self._heals(step)):
                return computed
            self._again()
            self.replica.abort(again=True)
            if agreed.failed:  # names of metrics may not be known yet
                options.merge, self.layout = 1, None
            if divided and self.balance is not None:  # it draws, say, or fails: everybody takes whole ones
                self.balance.divide(tested=False, strict=True)
                self._load(step, deal)

    def _counters(self) -> Counters:
        """What the user's loss, forward and models keep besides parameters and buffers, as it is now."""
        loss, forward = (getattr(one, "call", one) for one in (self.job.over or self.job.loss, self.job.forward))
        return Counters(self.job.beside, loss=loss, forward=forward)

    def _try_single_row(self, step: StepAttempt) -> None:
        """Before the first step of a loop in which a micro-batch of a single row comes later: whether the model can
        normalise one, tried on a row that is here. Raises UsageError.
        """
        first = step.whole.micro_batches[0]
        if in_rows(first.batch, first.rows):
            row = MicroBatch(first.index, 1, cut(first.batch, range(1)), step.whole.single)
            self.replica.try_forward(row, step.options)

    def _overflows(self, step: StepAttempt) -> bool:
        """Whether the gradients are too large for the loss scale; then the step is computed again with half of it."""
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
        """Whether the weights that the gradients were made of had to be healed."""
        undo, told, step.digest = partial(self.replica.abort, again=True), step.digest, None
        return told is not None and self.weights.judge(self.group, step.agreed.digests, undo=undo)

    def _end(self, step: StepAttempt) -> None:
        """All is computed: what somebody has to tell, and what cannot be applied."""
        group = self.group
        if step.agreed.news:
            for told in group.gather_json(self.untold()):
                step.news = {**told, **step.news}
        if step.agreed.tune:
            self._choose(anew=True)
        if step.agreed.lengths_differ:
            refuse_lengths(self.replica.team, step.whole.read)
        self._refuse(step)
        for member in self.run.members:
            member.state.step_computed()

    def _norm(self, step: StepAttempt) -> float:
        """That of the mean gradient. When all know it, all sums have arrived everywhere."""
        self.operations.reached("reduced")
        norm = step.norm or self.replica.norm(step.agreed, step.options)
        if not math.isfinite(norm):
            raise self._refusal(step).of_gradient(step.agreed.loss / step.agreed.count)
        return norm

    def _again(self) -> None:
        for member in self.run.members:
            member.state.step_again()

    # -- what changes the state -------------------------------------------------------------------------------------

    def _update(self, step: StepAttempt, norm: float) -> None:
        sums, agreed = step.sums, step.agreed
        assert sums is not None
        step.norm = norm
        if step.ahead is not None:
            step.ahead.end(self.replica.home.sums, dict(vars(agreed)), norm, step.options.expected, sums.records)
        self.run.saving.copied()
        self.replica.update(sums, agreed, step.options, norm)
        self.done, self.weights.refused = step.number + 1, False
        self.expected = agreed.count or self.expected
        if self.scaling is not None and (why := self.scaling.took(step.scale)):
            self.run.decide(self.trainer, f"loss scale {self.scaling.scale:g} from step {self.done + 1}", why)

    def _taken(self, step: StepAttempt, _: Any, result: Any) -> None:
        """This worker's own part was lost; the step was not."""
        self.weights.refused = False
        agreed, step.norm, step.lr, (rows, epoch) = result
        step.agreed, step.whole = Agreed(**agreed), WorkerBatch([], 0, rows, epoch)
        step.sums, step.spent = None, {}

    def hear(self, said: list[Any]) -> None:
        """A part of a step that the team made before this newcomer was of it: one tensor of sums, or all the rest."""
        if self.housed != self.operations.number:
            self.house("a step of others")
        if len(said) == 2:
            place, flat = said
            self.replica.home.sums[place].copy_(flat)
            return
        agreed, norm, expected, records = said
        options = StepOptions(step=self.done, expected=expected, micro_batches=0)
        self.replica.follow(StepSums(records=records), Agreed(**agreed), options, norm)
        self.done += 1

    # -- state ------------------------------------------------------------------------------------------------------

    def state(self, done: int | None) -> dict[str, Any]:
        """What the rest depends on; for a checkpoint after so many transactions, or else what all have alike."""
        scaling = None if self.scaling is None else [self.scaling.scale, self.scaling.good]
        return {**self.replica.state(), "steps": self.done, "expected": self.expected, "scaling": scaling}

    def load(self, saved: dict[str, Any], newcomer: bool) -> None:
        """What `state` was, maybe under another plan. One that is no newcomer has its own part."""
        self.replica.load(saved)
        self.done, self.expected = saved["steps"], saved["expected"]
        if self.scaling is not None and saved.get("scaling"):
            self.scaling = LossScale(*saved["scaling"])

    def regrid(self, grid: Grid, before: int) -> None:
        """Global batches are cut as they were, whatever the script says, if they have as many rows as `before`."""
        self.grid, job, rule = grid, self.job, self.plan.lr_scaling
        if rule and grid.global_batch != before:
            self.run.say(follow_batch(rule, before, grid.global_batch, job.optimizers, job.schedulers))
        if self.balance is not None:
            self.balance.grid = grid

    # -- what a step teaches ----------------------------------------------------------------------------------------

    def _learn(self, step: StepAttempt) -> None:
        """Of merging, of who is how fast, and of what people are to know."""
        self.replica.own.step(sum(seconds for part, seconds in step.spent.items() if part not in ("data", "other")))
        if step.sums is not None:
            waited = step.sums.waited
            if self.made:
                self.busy, self.waited = self.busy + step.spent["compute"] - waited, self.waited + waited
            else:
                self.before = self._sent()
                self.peak = 0 if not self.run.several else peak_memory(self.job.device)
            self.made += 1
            if self.made == 3 and self.run.team.group.rank == 0:
                codecs = self.job.device.type == "cpu" and not self.plan.exact
                if told := self.replica.own.advice(self.busy / 2, codecs):
                    self._note(told)
            self.micro_batches = max(self.micro_batches, step.whole.count)
            if step.options.merge == self.merging.size:
                self._merge(step, step.sums, step.spent["compute"])
            for news in self.noise.learn(step.agreed, step.norm, step.whole.rows):
                self.run.journal.write("noise", trainer=self.trainer, step=self.done, **news)
        if step.news:
            self._tell(step.news)
        # Only in the generation that it was computed in: its members know the same, and those of the next one tell
        # each other.
        if self.balance is not None and step.generation == self.operations.number:
            self._weigh(self.balance, step)
        if step.agreed.count <= 0:
            self._tell_of_nothing(step)
        elif step.agreed.unused and "unused" not in self.told:
            self._name_unused(step.agreed.unused)

    def _merge(self, step: StepAttempt, sums: StepSums, seconds: float) -> None:
        """What forward and backward, which took so many seconds, tell of merging."""
        share = step.whole.share
        decision = self.merging.learn(sums, step.agreed, seconds / max(1, sum(m.rows for m in share)), len(share))
        if decision is not None:
            self.run.decide(self.trainer, *decision)

    def measure(self, besides: int) -> list[dict[str, Any]]:
        """What this worker was to hold and send in a step, and what it did. The process holds so much `besides`."""
        mesh, peak = self.plan.mesh(self.run.team.size), peak_memory(self.job.device)
        held = self.memory()
        # Of trainers in turn an earlier one may have been larger.
        whole = peak if peak > self.peak or not self.run.several else memory_now(self.job.device)
        held["process"] = max(whole - besides, sum(held.values()))
        self.run.journal.write("memory", trainer=self.trainer, **held)
        steps, sent = max(self.made - 1, 1), {k: n - self.before.get(k, 0) for k, n in self._sent().items()}
        did: dict[str, Any] = {"seconds": self.busy / steps, "waited": self.waited / steps}
        did["sent"] = {kind: round(count / steps) for kind, count in sent.items() if count}
        found = cost(self.plan, facts_of(self.job), mesh.size, -(-self.micro_batches // mesh.units))
        return [dataclasses.asdict(found), held | did]

    def measured(self, said: Sequence[list[dict[str, Any]]]) -> None:
        """For the report: what all workers have measured."""
        predicted, measured = zip(*said[: self.plan.mesh(len(said)).replica], strict=True)
        told = {"stages": [{"blocks": blocks} for blocks in describe_blocks(self.job)], "workers": len(said)}
        told |= {"micro_batches": self.micro_batches, "predicted": predicted, "measured": measured}
        self.run.journal.write("figures", trainer=self.trainer, plan=str(self.plan), **told)

    def memory(self) -> dict[str, int]:
        """The bytes that this worker holds at most, by category."""
        return self.replica.memory()

    def shares(self, batches: int, weights: Sequence[float]) -> list[int]:
        """How many of the micro-batches of a global batch each unit of these weights gets."""
        return [len(part) for part in deal(batches, weights)]

    def _sent(self) -> dict[str, float]:
        return self.run.traffic.of(self.trainer)

    def house(self, name: str) -> None:
        """Before a trainer's first step in a generation: memory comes from its group, the step's vector has as many
        workers as it, and all know the same of everybody's speed. Collective; and not earlier, since newcomers come to
        the places where a script makes its trainers at other times than the others.
        """
        operations, group = self.operations, self.run.team.group
        balance, own = self.balance, self.replica.own
        group.enter(name)
        self.replica.rehouse()
        shares, known = None if balance is None else balance.state(), own.known(operations.done)
        common = [group.links, own.chosen] if group.rank == 0 else []
        said = group.gather_json([shares, self.weights.kind, common, known])
        links, chosen = said[0][2]
        if new := group.measure(links):
            measured = {"pairs": group.links, "over": group.interface}
            self.run.journal.write("links", **measured)
            self.run.say(f"the link between hosts: {links_of(measured)}", once=True)
        if balance is not None and (change := balance.reform(operations.members, said[0][0])):  # of who is here longest
            self._dealt(balance, change)
        self.weights.kinds, self.weights.due = [kind for _, kind, *_ in said], True
        for text in own.formed([known for *_, known in said], resumed=operations.number == 0):
            self.run.say(text, once=True)
        if decided := own.told(partial(share_of_sums, self.plan, self.job, group.size)):
            self.run.decide(self.trainer, *decided)
            self.run.say(": ".join(decided), once=True)
        if own.go_on(chosen, new):
            self._choose(anew=False)
        self.layout, self.housed, self.updated = None, operations.number, 0.0

    def _choose(self, anew: bool) -> None:
        for what, why in self.replica.own.choose(anew):
            self.run.decide(self.trainer, what, why)
            self.run.say(what)

    def _weigh(self, balance: Balance, step: StepAttempt) -> None:
        """What a step tells of the workers' speeds."""
        balance.divide(tested=step.agreed.tested > 0, strict=step.agreed.strict + step.agreed.whole > 0)
        if step.whole.full and (change := balance.learn(step.agreed.seconds)):
            self._dealt(balance, change)
        for what, why in balance.news:
            self.run.decide(self.trainer, what, why)
        balance.news.clear()
        for what, why in balance.settled():
            self.run.say(f"{what}: {why}")

    def _dealt(self, balance: Balance, change: Change) -> None:
        about = {"trainer": self.trainer, "step": self.done, "workers": balance.workers}
        self.run.journal.write("shares", **about, **dataclasses.asdict(change))

    def _tell(self, news: dict[str, tuple[str, str]]) -> None:
        """What somebody has observed, once: a decision and its reason, or what people would not know otherwise."""
        if "keeps" in self.told | news.keys():  # then nobody knows whether it is a sum
            news.pop("mixes", None)
        for kind in sorted(news.keys() - self.told):
            self.told.add(kind)
            what, why = news[kind]
            if why:
                self.run.decide(self.trainer, what, why)
            else:
                self._note(what)

    def _note(self, text: str) -> None:
        self.run.journal.write("note", trainer=self.trainer, step=self.done, text=text)
        self.run.say(text, once=True)

    def untold(self) -> dict[str, tuple[str, str]]:
        return {kind: said for kind, said in self.news.items() if kind not in self.told}

    def _tell_of_nothing(self, step: StepAttempt) -> None:
        """A step in which nothing counts is named in the journal; on the console the first, tenth, hundredth, ..."""
        self.empty += 1
        steps = f"step {self.done}" if step.steps == 1 else f"steps {self.done - step.steps + 1}-{self.done}"
        text = f"the loss of {steps} counts 0 rows or tokens in the whole global batch: no weight was changed"
        if self.empty > 1:
            text += f", as {self.empty - 1} times before"
        self.run.journal.write("note", trainer=self.trainer, step=self.done, text=text)
        if str(self.empty).strip("0") == "1":
            self.run.say(text)

    def _name_unused(self, unused: tuple[int, ...]) -> None:
        """Names the parameters that got no gradient, once: of a mixture of experts they are others in each step. Those
        that the script has frozen since the Trainer was made are meant.
        """
        names = [
            name
            for number, (name, param) in enumerate(self.job.named.items())
            if number in {*unused} and param.requires_grad
        ]
        if not names:
            return
        self.told.add("unused")
        shown = ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")
        self.run.say(
            f"{len(names)} of {len(self.job.named)} parameters got no gradient in step {self.done} and were left as "
            f"they are: {shown}; that is right for experts that no row chose, while parameters that are never used are "
            "better frozen with requires_grad_(False) before the Trainer is made; this is said once",
            once=True,
        )

    # -- the vector ---------------------------------------------------------------------------------------------

    @property
    def stops(self) -> bool:
        """Whether this worker wishes that all make no further step."""
        return self.run.notice is not None

    def _agree(self, step: StepAttempt, sums: StepSums, seconds: float) -> Agreed:
        """Sums of all workers; on the first step they first agree on the names of the metrics."""
        group, run, whole = self.group, self.run, step.whole
        self.news |= sums.news | self.job.news
        speaks = self.replica.mesh.speaks(group.rank)
        tells = speaks and bool(whole.share) and not sums.failed
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
            "strict": sums.strict,
            "whole": sums.no_split or step.indivisible,
            "failed": sums.failed,
            "news": bool(self.untold()),
            "stop": self.stops,
            "save": run.wants_save(),
            "enter": self.operations.newcomers,
            "look": group.rank == 0 and group.size > 1 and self.weights.wish,
            "tune": self.replica.own.wishes,
            "spread": sums.sq_norms[0] * step.options.expected**2,
            "spread_count": sums.sq_norms[1],
            "spread_squares": sums.sq_norms[1] ** 2,
            "streams": whole.read > 0,
            "read": whole.read,
            "read_squares": whole.read**2,
            **run.saving.fields,
        }
        spent = self.spent | step.spent
        packed = layout.pack(group.rank, seconds, metrics, sums.unused, fields, step.digest or 0.0, spent)
        rows = layout.rows(sums.parts if speaks else [], whole.count) if self.plan.exact else []
        with HEARTBEAT.waiting():  # also where NCCL does
            summed = self.replica.agree(torch.tensor(packed + rows, dtype=torch.float64), sums, step.options)
        vector = summed.tolist()
        agreed = layout.unpack(vector[: len(packed)])
        return layout.exactly(agreed, vector[len(packed) :]) if rows else agreed

    def _first_layout(self, mine: list[str] | None) -> VectorLayout:
        """With the names of metrics that all have to tell who tell any."""
        names = self.group.gather_json(mine)
        known = [(rank, name) for rank, name in enumerate(names) if name is not None]
        for rank, other in known:
            if other != known[0][1]:
                raise MetricError(
                    f"the loss returned metrics {known[0][1]} on worker {known[0][0]} and {other} on worker {rank}",
                    "return the same names everywhere, with count 0 where there is nothing to count",
                )
        return VectorLayout(tuple(known[0][1]) if known else (), self.group.size, len(self.job.named))

    def _refuse(self, step: StepAttempt) -> None:
        """Refuses a step whose loss is not finite. A count of zero is a step that changes nothing: see Update.apply."""
        if not math.isfinite(step.agreed.loss):
            raise self._refusal(step).of_loss()

    def _refusal(self, step: StepAttempt) -> Refusal:
        computed = step.whole.micro_batches, step.options, step.sums
        return Refusal(self.replica, self.group, f"step {step.number + 1}{step.whose}", *computed)


def counted_told(names: Sequence[str]) -> str:
    """For people: what a loss or a forward changes by itself, each time it is called."""
    some = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
    change, what = ("changes", "it") if len(names) == 1 else ("change", "them")
    return (
        f"{some} {change} each time a micro-batch is computed, by the loss or the model: if the loss depends on "
        f"{what}, the result depends on the number of workers; then keep {what} in trainer.state and change {what} in "
        "the body of the loop"
    )


def refuse_other_kinds(
    kinds: Mapping[str, tuple[torch.dtype, torch.device]], named: Mapping[str, torch.Tensor], error: Exception
) -> None:
    """Raises UsageError where a step failed and a parameter has another dtype, or is elsewhere, than at first."""
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
