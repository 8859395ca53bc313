"""The user's face: what is trained is said here, how is the plan's business."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Never

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only

from paceline.arguments import (
    Fixed,
    FromScript,
    Schedule,
    built,
    choose_plan,
    device_of,
    fit,
    fitting,
    fused,
    groups_of_whole,
    left_out,
    optimizers_of,
    refuse_fused,
    refuse_other_groups,
    refuse_other_places,
    refuse_words,
    scheduler_of,
    settle_arithmetic,
    sharing,
    trainable,
    whole_number,
)
from paceline.best import Best
from paceline.checkpoint.adopt import adopted, refuse_another_model
from paceline.checkpoint.export import refuse_other_suffix, write_together
from paceline.data.fingerprint import Fingerprint
from paceline.data.loader import Feed, Place, Source
from paceline.errors import UsageError
from paceline.evaluate import Sweep, evaluate
from paceline.hints import Hinting
from paceline.loops import Phase, State, grid_told, idle_text, resumed_grid
from paceline.mesh import AXES, Mesh
from paceline.observe.ledger import Ledger
from paceline.plan import Plan
from paceline.portions import Portion, bring
from paceline.predict import predicted
from paceline.run import Run
from paceline.served import stepper_of
from paceline.step import Grid, stream_seed
from paceline.stepping import StepReport
from paceline.strategies.chunks import MicroBatch, rows_of
from paceline.strategies.job import Job, default_forward
from paceline.strategies.merging import Merging
from paceline.strategies.nest import cost, facts_of, nest
from paceline.strategies.state import copies_in_pieces, hidden_in, mixing, model_state, own_copies, refuse_mixing
from paceline.strategies.streams import Streams
from paceline.strategies.whole_batch import led
from paceline.team.operations import settling
from paceline.telling import Telling


class Trainer(Telling):
    """Trains one model: the same result on any number of workers.

    `model` is a module (worker 0's weights are everybody's) or a function that builds one, called under `seed`.
    `loss(output, batch)` returns a scalar (the mean over the rows it was given), ``(sum, count)`` or
    ``(sum, count, {name: (sum, count)})``. `optimizer(params)` receives the trainable named parameters and returns one
    optimizer or a list. `global_batch` is the rows of one optimizer step over all workers; only `step` can do without.
    `forward(model, batch)` is by default ``model(batch)`` for a tensor, ``model(batch[0])`` for a tuple or list,
    ``model(**batch)`` for a mapping. `schedule` is a factor as a function of the step (from 0) or a scheduler class of
    torch's, plain or as functools.partial. `clip_norm` bounds the norm of the mean gradient. `plan` says how the work
    is spread; ``--plan`` wins over it. `tensor` names the layers that are cut and how, `pipeline_blocks` the list of
    blocks that is cut in stages, where these should not be found. With ``loss_over="batch"`` the loss gets what
    `forward` returned for all rows of the global batch, wherever they were, and None as `batch`.

    Raises PlanError, UsageError, and WorkersDifferError; CheckpointError when a run cannot be resumed.
    """

    model = Fixed[nn.Module](
        "the optimizer has its parameters; make another Trainer, or trainer.model.load_state_dict(...)"
    )
    state = Fixed[State]("a checkpoint keeps what lies in it; write trainer.state.update(...)")

    def __init__(
        self,
        model: nn.Module | Callable[[], nn.Module],
        loss: Callable[[Any, Any], Any],
        optimizer: Callable[[list[tuple[str, nn.Parameter]]], Optimizer | Iterable[Optimizer]],
        global_batch: int | None = None,
        forward: Callable[[nn.Module, Any], Any] | None = None,
        schedule: Schedule | None = None,
        clip_norm: float | None = None,
        seed: int = 0,
        plan: str | None = None,
        tensor: Mapping[str, str] | None = None,
        pipeline_blocks: str | None = None,
        loss_over: str | None = None,
        **words: Never,
    ) -> None:
        plan = str(plan) if isinstance(plan, Plan) else plan
        fit(clip_norm=clip_norm, plan=plan, tensor=tensor, pipeline_blocks=pipeline_blocks, loss_over=loss_over)
        refuse_words("Trainer", words, Trainer, plan)
        global_batch, seed = whole_number("global_batch", global_batch), whole_number("seed", seed) or 0
        self._run = run = Run.current()
        run.weigh(model)
        self._group = run.team.group
        self._number = len(run.members)
        self._seed = seed
        self._device = device_of(run.team.world.local_rank)
        whole, self.plan, origin = choose_plan(run.team.world, plan)
        if self.plan.exact:
            settle_arithmetic(run.team.capabilities, self._device)
        mesh = self._mesh = self.plan.mesh(self._group.size)
        if run.team.operations.elastic and run.members:
            refuse_other_places(mesh.replica, self._group.mesh.replica)
        self._group.mesh = max(self._group.mesh, whole.mesh(self._group.size), key=lambda mesh: mesh.replica)
        run.begin(str(whole), origin, seed, self._device)
        if shared := sharing(run.team.world, self._device):
            run.say(shared, once=True)
        self._streams = Streams(self._device)
        self.model, told = built(model, self._device, self._streams, stream_seed(seed, 0, -1), self.plan.apart)
        form = Hinting(fitting("forward", forward or default_forward), "forward", default=forward is None)
        said_so = {"exact": self.plan.exact, "offload": self.plan.offload is not None}
        judge = Hinting(fitting("loss", loss), "loss")
        over = judge if loss_over else None
        kept = trainable(self.model, self.plan, whole_batch=over is not None)
        kept |= {"beside": run.models, "precision": self.plan.precision, "over": over, **said_so, **told}
        job = self._job = Job(self.model, form, led if loss_over else judge, self._device, seed, clip_norm, **kept)
        if mesh.replica > 1:  # a newcomer has no rows before it has a place
            self._group.along("shard", mesh=mesh).wanted |= self.plan.together > 1
            run.need_team()
        known = run.knows(self._number)
        with self._streams.lent():  # blocks may be run to see what can be cut
            self._replica = nest(
                self.plan, job, self._group, run.team.operations.elastic, known, tensor, pipeline_blocks
            )
        for what, why in job.decisions:
            run.decide(self._number, what, why)
            run.say(what)
        optimizers = self._optimizers(optimizer, mesh)
        self._said = FromScript.of(seed, optimizers, self.model)
        self._replica.build(optimizers, [scheduler_of(schedule, opt) for opt in optimizers] if schedule else [])
        for name in fused(optimizers, next(iter(job.own.values())).device, self.plan.exact, job.in_rows):
            run.decide(self._number, f"{name} runs fused", "fused= was left open, and torch has it for this device")
        merging = Merging(self._device, never=run.reverse or self.plan.one_by_one)
        run.agreement.weights.append(weights := self._weights(job, mesh))
        self._grid = Grid.of(global_batch, self.plan.micro) if global_batch is not None else None
        about: dict[str, Any] = {"run": run, "trainer": self._number, "job": job, "replica": self._replica}
        about |= {"plan": self.plan, "streams": self._streams, "merging": merging, "weights": weights}
        self._stepper = stepper_of(mesh, about, self._grid)
        self._ledger = Ledger()
        self._phases, self._untouched = list[Phase](), list[Phase]()  # the latter were made and not gone through
        self._stopped = self._looked = False  # the latter for what optimizers hide
        self._last: StepReport | None = None
        self._spare: MicroBatch | None = None  # of what this worker brought
        self._loader: dict[str, Any] = {}
        self.state, self.best = State(), Best()
        run.members.append(self)
        run.models.append(self.model)
        if run.tree:
            self.restore(newcomer=True)
        run.tell_needs()

    # -- what the user reads ------------------------------------------------------------------------------------

    @property
    def steps_done(self) -> int:
        """Optimizer steps done in the whole training, resumed ones included."""
        return self._stepper.done

    def _optimizers(self, make: Any, mesh: Mesh) -> list[Optimizer]:
        """What the user's function makes of what is here of the parameters. That it may be a part must not matter."""
        run, job = self._run, self._job
        with self._streams.lent():  # what the user's function draws is drawn once
            groups = groups_of_whole(make, job.own, job.own_cuts) if mesh.replica > 1 else {}
        optimizers = optimizers_of(make, list(job.own.items()))
        if forgotten := left_out(optimizers, list(job.own.items())):
            run.say(forgotten, once=True)
        if mesh.replica > 1:
            if mesh.replica > mesh.unit or job.offload:
                refuse_mixing(optimizers)
            elif kind := mixing(optimizers):
                self._replica.see_whole()
                with self._streams.lent():
                    optimizers = optimizers_of(make, list(job.own.items()))
                run.decide(self._number, f"{kind} has whole parameters on each worker", "it looks at them as a whole")
            refuse_other_groups(optimizers, groups, job.own, job.own_cuts)
        refuse_fused(optimizers, bool(self.plan.exact and self.plan.shard))
        return optimizers

    @property
    def main(self) -> bool:
        """True on one worker: for loggers of other makers only. Our own methods are called by all workers."""
        return self._run.main

    @property
    def device(self) -> torch.device:
        return self._device

    @property
    def complete(self) -> bool:
        """Whether every `steps()` of this trainer reached its end, or `stop()` was called."""
        return self._stopped or all(phase.complete or phase.done == phase.total for phase in self._phases)

    # -- training -----------------------------------------------------------------------------------------------

    def steps(
        self,
        dataset: Any,
        epochs: int | None = None,
        count: int | None = None,
        collate: Callable[[list[Any]], Any] | None = None,
        order: Callable[..., Any] | None = None,
        loader: Mapping[str, Any] | None = None,
        **words: Never,
    ) -> Iterator[StepReport]:
        """Trains, one optimizer step per turn of the loop, and yields a StepReport after each.

        Give `epochs` (default 1) or `count`, the optimizer steps of the whole phase; a resumed run ends where the
        undisturbed one would. `collate` always sees the samples of one micro-batch. `order(position, size, seed,
        epoch)` is any pure function, by default `paceline.sample_index`. `loader` are options of torch's DataLoader.
        """
        refuse_words("steps()", words, Trainer.steps)
        fit(collate=collate, order=order, loader=loader)
        if self._grid is None:
            raise UsageError("steps() needs the global batch", "give global_batch= to the Trainer")
        if epochs is not None and count is not None:
            raise UsageError("both epochs= and count= were given", "give one of them")
        count, epochs = whole_number("count", count), whole_number("epochs", epochs)
        self._loader = {"collate": collate, "options": dict(loader or {})}
        source = Source.of(dataset, self._seed, collate, order, loader or {})
        phase = self._enter_phase(source, 1 if epochs is None and count is None else epochs, count)
        self._untouched.append(phase)
        return self._loop(phase, source, self._grid)

    def _enter_phase(self, source: Source, epochs: int | None, count: int | None) -> Phase:
        """The next phase, or the one that the checkpoint holds of this number. Prints its grid."""
        self._run.need_team()
        grid = self._grid
        assert grid is not None
        number = self._run.calls[self._number]
        self._run.calls[self._number] += 1
        rows, total = source.rows, count
        if number < len(self._phases):
            rows = self._phases[number].same_rows(rows, self._run.say)
        if epochs is not None and rows is not None:
            total = epochs * grid.batches(rows)
        if number == len(self._phases):
            first = self._phases[-1].first_epoch + self._phases[-1].begun if self._phases else 0
            self._phases.append(Phase(number, rows, epochs, total, first_epoch=first))
        phase = self._phases[number]
        phase.enter(self._run.around, self._number)
        if phase.aim(epochs, total, last=number == len(self._phases) - 1):
            self._stopped = False
        if not phase.complete:
            place = self._place()
            dealt = self._stepper.shares(len(grid.cut(grid.global_batch)), place.weights)
            unit = self._mesh.unit
            told = grid_told(grid, dealt, rows, total, unit, self._number, self._run.models)
            told |= {"phase": number, "epochs": epochs, "done": [one.steps_done for one in self._run.members]}
            self._run.show("grid", **told, steps=None if total is None else self.steps_done - phase.done + total)
            idle = None if place.fine or self.plan.several else idle_text(grid, place.weights, unit)
            if idle is not None:
                self._run.decide(self._number, *idle)
                self._run.say(": ".join(idle), once=True)
        return phase

    def _loop(self, phase: Phase, source: Source, grid: Grid) -> Iterator[StepReport]:
        run = self._run
        self._untouched.remove(phase)
        run.calls.update(phase.inside)
        if phase.complete or self._stopped:
            return
        run.begin_training(self._number, loop=True)
        source = phase.source(source)
        if source.rows is None and phase.done:
            run.say(
                f"reading past the first {phase.done} global batches: an iterable dataset has no middle to start in"
            )
        cure = grid.against_single_rows(phase.rows or grid.global_batch)
        span = (phase.done, phase.total, 1 << 62 if phase.epochs is None else phase.epochs)
        feed = Feed(source, grid, span, self._stepper.place or self._place, run.team.world.tell)
        self._stepper.waiting_since, self._ledger.tokens = time.perf_counter(), source.tokens
        alike = Fingerprint(source, run.team.world.tell)
        with run.loop(phase):
            while feed.has(phase.done):
                report = self._advance(partial(self._deal, alike, feed, phase, cure), f"step {self.steps_done + 1}")
                if report is None:
                    run.between()
                    break
                phase.done, phase.begun = phase.done + report.turn, report.epoch + 1 - phase.first_epoch
                feed.measured(report.seconds)
                if feed.decided:
                    why, feed.decided = feed.decided, None
                    run.decide(self._number, "rows are loaded ahead of need by a process of their own", why)
                with run.noticing(self._job.changed_parts, self.steps_done):
                    yield report
                if run.outermost(phase):
                    run.between(ends=self._stopped or phase.done == phase.total)
                if self._stopped:
                    break
            outermost = run.outermost(phase)
        self.flush()
        phase.complete, phase.stopped = True, self._stopped
        if outermost and phase.done:
            for measure in run.measures:
                measure()
            run.save(wait=True, must=True)

    def step(self, batch: Any) -> StepReport:
        """One optimizer step on the rows that this worker brings itself: the mean over all workers' rows.

        `batch` is any nesting of tensors whose first dimension is the row, or None for no rows. If a worker dies its
        own rows are lost, and named.
        """
        run = self._run
        if word := self.plan.several:
            what = f"step() brings the rows of one step, and under {word} a turn of the loop has several"
            raise UsageError(what, f"use steps(), or leave {word} out")
        run.begin_training(self._number, loop=False)
        first, run.stepping = not run.stepping, True
        number = self.steps_done + 1
        # Later ones by and by: rows may part from one another late, or meet. A single row may be the same by chance.
        looks = first or (batch is not None and rows_of(batch) > 1 and number & (number - 1) == 0)
        if first:
            run.team.world.tell("phase")
        when = "their first step()" if first else f"step {number}"
        deal = partial(self._brought, batch, when if looks else "")
        report = self._advance(deal, f"the gradients of step {number}")
        assert report is not None
        return report

    def _brought(self, batch: Any, looks: str) -> Portion:
        """The rows that this worker brings, numbered among everybody's. Where it `looks`, none may come twice."""
        micro = self._grid.micro if self._grid else self.plan.micro
        step, together = self.steps_done + 1, self.plan.together
        self._group.enter(f"step {step} by step()", kind="step()")
        unit = self._group.along(*AXES[2:], mesh=self._mesh)
        whole = bring(self._group, unit, batch, micro, together, self._spare, looks)
        if together > 1 and whole.share:
            self._spare = whole.share[0]
        return whole

    def _deal(self, alike: Fingerprint, feed: Feed, phase: Phase, cure: str, ahead: int = 0) -> Portion | None:
        """This worker's part of the loop's next global batch, or of one further ahead, if there is one."""
        if ahead and not feed.has(phase.done + ahead):
            return None
        if told := alike.compare(self._group, self._run.team.operations.number):
            self._run.say(told, once=True)
        epoch, rows, micro_batches = feed.at(phase.done + ahead)
        full = rows == feed.grid.global_batch
        last = self.plan.quorum is not None and not feed.has(phase.done + ahead + 1)
        return Portion(micro_batches, len(feed.grid.cut(rows)), rows, epoch, cure, full, feed.fine, last)

    def _place(self) -> Place:
        """How the present team deals a global batch of this trainer's."""
        place, balance = self._run.team.place(self._mesh, self.plan.together), self._stepper.balance
        # Between the forming of a team and its first step nobody knows what the others know of the workers' speed.
        if balance is None or len(place.weights) == 1 or self._stepper.housed != place.generation:
            return place
        return replace(place, weights=balance.weights, fine=balance.fine)

    def _advance(self, deal: Callable[..., Any], name: str) -> StepReport | None:
        run = self._run
        if (one := self._stepper.turn(deal, name)) is None:
            return None
        agreed = one.agreed
        metrics = {key: total / count if count else math.nan for key, (total, count) in agreed.metrics.items()}
        loss, seconds = agreed.loss / agreed.count, sum(one.spent.values()) - one.spent["other"]
        ends = (loss, metrics, one.whole.rows, seconds, one.lr, one.norm, one.steps)
        report = StepReport(self.steps_done, one.whole.epoch, *ends)
        run.took_step, run.team.step, self._last = True, run.step, report
        workers = dict(zip(run.team.operations.members, agreed.seconds, strict=False))
        lanes = dict(zip(workers, agreed.spent, strict=False))
        self._ledger.add(report.step, report.samples, one.spent, workers, one.steps, lanes)
        if self._ledger.due():
            self.flush()
        run.checking(self._job, self._stepper.merging.mixes)
        return report

    def flush(self) -> None:
        """A record of the steps since the last one, for the journal and the progress line."""
        report, account = self._last, self._run.team.operations.account
        if not self._run.main:
            self._ledger.forget()
            account.take()
        elif self._ledger and report is not None:
            figures = self._ledger.take(self._group.sent)
            own = {name: getattr(report, name) for name in ("step", "epoch", "loss", "metrics", "lr", "grad_norm")}
            self._run.show("step", trainer=self._number, **own, **figures, account=account.take())
            if (each := self._ledger.each()) is not None:
                self._run.journal.write("each", trainer=self._number, step=report.step, **each)

    # -- beside training ----------------------------------------------------------------------------------------

    def evaluate(
        self,
        dataset: Any,
        metric: Any,
        model: nn.Module | None = None,
        collate: Callable[[list[Any]], Any] | None = None,
        **words: Never,
    ) -> dict[str, Any]:
        """Means of `metric(output, batch) -> {name: (sum, count)}` over all rows of a dataset, and their number ``n``.

        Exact: each row counts once, nothing is padded, and sums are added in grid order. Collective. `model` is by
        default the trained one; it is put in eval mode for the time. A metric gets what the loss gets: with
        ``loss_over="batch"`` the outputs of each global batch, and None.

        What is no sum (AUC, correlation, mAP) is an object with `update`, `compute` and `reset` whose states say how
        they merge, as torchmetrics' do; or a mapping of such objects by name; or a pair of either with a function of
        output and batch that returns the arguments of `update`. Results are then floats, or tensors. MetricError.
        """
        refuse_words("evaluate()", words, Trainer.evaluate)
        sweep = self._sweep(dataset, collate, model)

        def compute() -> dict[str, Any]:
            found = evaluate(sweep, metric)
            self.best.heard(found, "evaluate()", self._run.say)
            self._run.show("evaluate", trainer=self._number, step=self.steps_done, results=found)
            return found

        return dict(self._run.outside(settling(compute, self._offer), "evaluating"))

    def predict(
        self,
        dataset: Any,
        collate: Callable[[list[Any]], Any] | None = None,
        model: nn.Module | None = None,
        path: str | Path | None = None,
    ) -> Any:
        """What `forward` gives for each row of a dataset, once and in order, in eval mode. Collective.

        An iterator of (rows, output) by micro-batch, for ``for rows, output in trainer.predict(data):`` on all workers:
        on the main one `rows` is a range of row numbers and `output` the nested tensors of these rows, on the CPU; on
        the others it does its part and gives nothing. A worker that becomes the main one by a loss gets all rows.

        With `path` the outputs go to a file and the path is returned on all: ``.npy``, one array with rows first, or
        ``.safetensors``, tensors by their name in a mapping or `output`. Memory holds four micro-batches a worker.
        Raises UsageError for outputs that cannot be handed on, CheckpointError for those that cannot be written.
        """
        sweep = self._sweep(dataset, collate, model)
        if path is None:
            return predicted(self._run, sweep)
        list(predicted(self._run, sweep, Path(path)))  # which gives nothing
        return Path(path)

    def _sweep(self, dataset: Any, collate: Callable[[list[Any]], Any] | None, model: nn.Module | None) -> Sweep:
        fit(collate=collate)
        micro = self._grid.micro if self._grid else (self.plan.micro or 32)
        collate, options = collate or self._loader.get("collate"), self._loader.get("options", {})
        source = Source.of(dataset, self._seed, collate, None, options)
        place = lambda: replace(self._place(), fine=False)  # noqa: E731
        return Sweep(self._run.team, self._job, model or self.model, source, micro, place, self._grid)

    def keep_best(self, name: str, mode: str = "max") -> None:
        """Keeps the checkpoint of the weights whose `name` was best, in `evaluate` or `log`, beyond all others.

        It is taken when the loop asks for its next step, before which training waits until it is there. `mode` is
        ``max`` or ``min``; NaN is never best. ``paceline export RUN --best`` writes it. Called by all workers, before
        the loop. Raises UsageError.
        """
        self.best.follow(name, mode)
        if self._run.saving.storage is None:
            self._run.say(f"the best {name} is not kept: there is no run folder", once=True)

    def save(self) -> None:
        """Asks for a checkpoint; taken when the loop asks for its next step, so that it holds what the body did, and
        written while training goes on. Outside of loops it is taken at once; where no step() is used, it is there on
        return.

        Collective: called by all workers or none. Raises UsageError without a run folder.
        """
        run = self._run
        self._together("save()")
        run.ask_save()
        if not run.loops:
            run.save(wait=not run.stepping, must=not run.stepping)
            run.saving.copied()  # what the script changes next must not show

    def export(self, path: str | Path) -> None:
        """Writes the weights as safetensors, under the model's own keys. Collective; the file is written once."""
        self._run.need_team()
        if not self.steps_done and not self._run.imported and self._said.untrained(self.model):
            why = "nothing went through what steps() returned" if self._untouched else "no step was made here"
            what = f"these weights are not trained: {why}"
            self._run.say(f"{what}; write `for report in trainer.steps(...):`", once=True)
        refuse_other_suffix(Path(path))
        self._run.team.operations.run(settling(partial(self._write, Path(path))))

    def _write(self, path: Path) -> None:
        self._group.enter("export()")
        write_together(model_state(self._job), path, self._run.main, self._job.replica, self._group)

    def stop(self) -> None:
        """Ends the training when the loop asks for its next step; the run then counts as finished. Collective."""
        self._together("stop()")
        self._stopped = True

    def _together(self, name: str) -> None:
        """All workers come to this, or none."""
        self._run.need_team()
        self._run.team.operations.run(settling(partial(self._group.enter, name)))

    # -- state --------------------------------------------------------------------------------------------------

    def snapshot(self, done: int | None = None) -> dict[str, Any]:
        """What the rest of the training depends on; for a checkpoint, after `done` transactions, with its own state."""
        for optimizer in self._job.optimizers if not self._looked else ():
            if hidden := hidden_in(optimizer):
                self._run.say(f"{hidden}; keep them in self.state", once=True)
        self._looked = True
        return {
            **self._stepper.state(done),
            "own": {} if done is None else self._replica.own.state(done),
            "grid": [self._grid.global_batch, self._grid.micro] if self._grid else None,
            "phases": [phase.saved() for phase in self._phases],
            "stopped": self._stopped,
            "state": copies_in_pieces(self.state.saved(), self._job),
            "best": self.best.saved(),
            "said": self._said.saved(),
        }

    def follow(self) -> None:
        """This worker writes the journal from now on: it goes on after what is there."""
        self._ledger.go_on_after(self._run.journal.last_step(self._number))

    def prepare(self, saved: dict[str, Any]) -> None:
        """The state as it was some steps ago, which goes ahead to a newcomer."""
        self._replica.load(saved)
        self._stepper.done = saved["steps"]

    def needs(self) -> list[tuple[str, tuple[int, ...]]]:
        """What this trainer's plan makes a worker hold, by category, and then what others would."""
        facts, workers = facts_of(self._job), self._run.team.world.size
        plans = [self.plan, *self.plan.in_shards(workers)]
        return [(str(plan), cost(plan, facts, workers).held) for plan in plans]

    def complete_step(self) -> None:
        """What a step that counts has left to do."""
        self._replica.complete()

    def hear(self, said: list[Any]) -> None:
        """A part of a step after it."""
        self._stepper.hear(said)

    def restore(self, newcomer: bool) -> None:
        """Takes this trainer's part of the checkpoint that the run resumes from, or of what another worker handed over.
        One that is no newcomer is where it is in its script, with the user's values that belong there.
        """
        trainers = list(self._run.tree["trainers"])
        if self._number >= len(trainers):
            return
        # What is taken is copied, and not held any longer: it may be as large as all the rest. The tree itself may be
        # on its way to another worker.
        mine, trainers[self._number] = trainers[self._number], {}
        self._run.tree = {**self._run.tree, "trainers": trainers}
        if "steps" not in mine:  # weights from elsewhere, to begin with; or nothing for this trainer
            if "model" in mine:
                fits = adopted(self.model, mine["model"], self._number, self._run.imported, self._job.cuts)
                self._replica.load({"model": fits})
            return
        if newcomer and (step := self._run.resumed) is not None:
            checkpoint = f"checkpoint of step {step} in {self._run.folder or 'memory'}"
            refuse_another_model(self.model, mine["model"], self._number, checkpoint, self._job.cuts)
        self._stepper.load(mine, newcomer)
        if not newcomer:
            return
        self._replica.own.take(mine.get("own") or {})
        self._seed = self._job.seed = self._said.go_on(mine.get("said"), self._run.say)
        self._phases = [Phase(**phase) for phase in mine["phases"]]
        self._stopped = mine["stopped"]
        self.best.restore(mine.get("best"))
        kept = tree_map_only(torch.Tensor, torch.clone, mine["state"])
        self.state.restore(own_copies(kept, self._job))
        if mine["grid"] and self._grid:
            before, now, done = Grid(*mine["grid"]), self._grid, self.steps_done
            self._grid = resumed_grid(before, now, self.plan.micro, done, self._run.say)
            self._stepper.regrid(self._grid, before.global_batch)
