"""The user's face: what is trained is said here, how is the plan's business."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from paceline.checkpoint.export import write_model
from paceline.data.loader import Feed, Source
from paceline.errors import MetricError, NonFiniteLossError, UsageError
from paceline.evaluate import evaluate
from paceline.given import (
    Schedule,
    checked,
    choose_plan,
    device_of,
    digest_of,
    fused,
    optimizers_of,
    refuse_twins,
    scheduler_of,
    settle_arithmetic,
)
from paceline.observe.ledger import Ledger
from paceline.phases import Phase, State, grid_text
from paceline.plan import Plan
from paceline.run import Run
from paceline.step import Agreed, Grid, Moment, Transaction, VectorLayout, deal, stream_seed
from paceline.strategies.base import Job, Orders, Sums, default_forward
from paceline.strategies.merging import Merging
from paceline.strategies.nest import nest
from paceline.strategies.pieces import MicroBatch, cut, rows_of, to_device
from paceline.strategies.streams import Streams


@dataclass(frozen=True)
class StepReport:
    """One optimizer step of the whole team: the same on every worker, but for `seconds`.

    `step` counts optimizer steps done, from 1. `loss` and `metrics` are means over the global batch of `samples` rows.
    `lr` is the first group's learning rate of this step, `grad_norm` the norm of the mean gradient before clipping.
    """

    step: int
    epoch: int
    loss: float
    metrics: dict[str, float]
    samples: int
    seconds: float
    lr: float
    grad_norm: float


@dataclass
class _Rows:
    """One worker's part of a global batch: its micro-batches, and the size of the whole."""

    micro_batches: list[MicroBatch]
    count: int
    rows: int
    epoch: int = 0
    seconds: float = 0.0
    cure: str = "bring one row more, or choose a micro= that leaves no single row"


class Trainer:
    """Trains one model: the same result on any number of workers.

    `model` is a module (worker 0's weights are everybody's) or a function that builds one, called under `seed`.
    `loss(output, batch)` returns a scalar (the mean over the rows it was given), ``(sum, count)`` or
    ``(sum, count, {name: (sum, count)})``. `optimizer(params)` receives the trainable named parameters and returns one
    optimizer or a list. `global_batch` is the rows of one optimizer step over all workers; only `step` can do without.
    `forward(model, batch)` is by default ``model(batch)`` for a tensor, ``model(batch[0])`` for a tuple or list,
    ``model(**batch)`` for a mapping. `schedule` is a factor as a function of the step (from 0) or a scheduler class of
    torch's, plain or as functools.partial. `clip_norm` bounds the norm of the mean gradient. `plan` says how the work
    is spread; ``--plan`` wins over it.

    Raises PlanError, UsageError, and WorkersDifferError; CheckpointError when a run cannot be resumed.
    """

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
    ) -> None:
        self._run = run = Run.current()
        self._group = run.team.group
        self._number = len(run.members)
        self._seed = seed
        self._device = device_of(run.team.world.local_rank)
        said, origin = choose_plan(run.team.world.plan, run.team.world.plan_origin, plan)
        self.plan = Plan.parse(said).validate(self._group.size)
        if self.plan.exact:
            settle_arithmetic(self._group, self._device)
        run.begin(str(self.plan), origin, seed, self._device)
        self._streams = Streams(self._device)
        self.model = self._build(model)
        named = {name: param for name, param in self.model.named_parameters() if param.requires_grad}
        if not named:
            raise UsageError("the model has no trainable parameters", "set requires_grad on those to be trained")
        precision = self.plan.precision
        form = forward or default_forward
        job = Job(self.model, form, loss, self._device, seed, clip_norm, precision, named=named, beside=run.models)
        job.exact = self.plan.exact
        self._job = job
        self._top = nest(self.plan, job, self._group)
        optimizers = optimizers_of(optimizer(list(named.items())))
        self._top.build(optimizers, [scheduler_of(schedule, opt) for opt in optimizers] if schedule else [])
        self._top.form()
        for name in fused(optimizers, self._device):
            run.decide(self._number, f"{name} runs fused", "fused= was left open, and torch has it for this device")
        self._transaction = Transaction()
        self._ledger = Ledger()
        self._layout: VectorLayout | None = None
        self._expected = 0.0
        self._merging = Merging(self._device, never=run.reverse or self.plan.exact)
        self._phases: list[Phase] = []
        self._stopped = False
        self._waiting_since = time.perf_counter()
        self._last: StepReport | None = None
        self._loader: dict[str, Any] = {}
        self._grid = Grid.of(global_batch, self.plan.micro) if global_batch is not None else None
        self.state = State()
        run.members.append(self)
        run.models.append(self.model)
        self._restore()

    def _build(self, model: nn.Module | Callable[[], nn.Module]) -> nn.Module:
        if not isinstance(model, nn.Module):
            with self._streams.lent():
                self._streams.seed(stream_seed(self._seed, 0, -1))
                model = model()
        return checked(model).to(self._device)

    # -- what the user reads ------------------------------------------------------------------------------------

    @property
    def steps_done(self) -> int:
        """Optimizer steps done in the whole training, resumed ones included."""
        return self._transaction.done

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
    ) -> Iterator[StepReport]:
        """Trains, one optimizer step per turn of the loop, and yields a StepReport after each.

        Give `epochs` (default 1) or `count`, the optimizer steps of the whole phase; a resumed run ends where the
        undisturbed one would. `collate` always sees the samples of one micro-batch. `order(position, size, seed,
        epoch)` is any pure function, by default `paceline.sample_index`. `loader` are options of torch's DataLoader.
        """
        if self._grid is None:
            raise UsageError("steps() needs the global batch", "give global_batch= to the Trainer")
        if epochs is not None and count is not None:
            raise UsageError("both epochs= and count= were given", "give one of them")
        self._loader = {"collate": collate, "options": dict(loader or {})}
        source = Source.of(dataset, self._seed, collate, order, loader or {})
        phase = self._enter_phase(source, 1 if epochs is None and count is None else epochs, count)
        return self._loop(phase, source, self._grid)

    def _enter_phase(self, source: Source, epochs: int | None, count: int | None) -> Phase:
        """The next phase, or the one that the checkpoint holds of this number. Prints its grid."""
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
            world = self._run.team.world
            weights = world.shares or (1.0,) * world.size
            share = deal(len(grid.cut(grid.global_batch)), weights)
            text = grid_text(grid, [len(part) for part in share], rows, total)
            self._run.show(
                "grid",
                trainer=self._number,
                phase=number,
                global_batch=grid.global_batch,
                micro=grid.micro,
                micro_batches=len(grid.cut(grid.global_batch)),
                rows=rows,
                epochs=epochs,
                steps=None if total is None else self.steps_done - phase.done + total,
                shares=[len(part) for part in share],
                text=text,
            )
        return phase

    def _loop(self, phase: Phase, source: Source, grid: Grid) -> Iterator[StepReport]:
        run = self._run
        run.calls.update(phase.inside)
        if phase.complete or self._stopped:
            return
        run.begin_training(self._number, loop=True)
        world = run.team.world
        source = phase.source(source)
        if source.rows is None and phase.done:
            run.say(
                f"reading past the first {phase.done} global batches: an iterable dataset has no middle to start in"
            )
        cure = grid.against_single_rows(phase.rows or grid.global_batch)
        span = (phase.done, phase.total, 1 << 62 if phase.epochs is None else phase.epochs)
        feed = Feed(source, grid, world.shares or (1.0,) * world.size, world.rank, span)
        batches = iter(feed)
        self._waiting_since = time.perf_counter()
        with run.loop(phase):
            while True:
                began = time.perf_counter()
                item = next(batches, None)
                if item is None:
                    break
                epoch, rows, micro_batches = item
                loading = time.perf_counter() - began
                count = len(grid.cut(rows))
                whole = _Rows(micro_batches, count, rows, epoch, loading, cure)
                report = self._transact(whole, f"step {self.steps_done + 1}")
                phase.done, phase.begun = phase.done + 1, epoch + 1 - phase.first_epoch
                feed.measured(loading, report.seconds)
                if feed.decided:
                    why, feed.decided = feed.decided, None
                    run.decide(self._number, "rows are loaded ahead of need by a process of their own", why)
                yield report
                if run.outermost(phase):
                    run.between()
                if self._stopped:
                    break
            outermost = run.outermost(phase)
        self.flush()
        phase.complete, phase.stopped = True, self._stopped
        if outermost and phase.done:
            run.save(must=True)

    def step(self, batch: Any) -> StepReport:
        """One optimizer step on the rows that this worker brings itself: the mean over all workers' rows.

        `batch` is any nesting of tensors whose first dimension is the row, or None for no rows. If a worker dies its
        own rows are lost, and named.
        """
        run = self._run
        run.begin_training(self._number, loop=False)
        first, run.stepping = not run.stepping, True
        rows = 0 if batch is None else rows_of(batch)
        grid = Grid(max(rows, 1), self._grid.micro if self._grid else (self.plan.micro or max(rows, 1)))
        cuts = grid.cut(rows)
        self._group.enter(f"step {self.steps_done + 1} by step()", kind="step()")
        number = self.steps_done + 1
        # Later ones by and by: rows may part from one another late, or meet. A single row may be the same by chance.
        looks = first or (rows > 1 and number & (number - 1) == 0)
        brought = self._group.gather_json([len(cuts), rows, digest_of(batch) if looks and rows else ""])
        refuse_twins([entry[2] for entry in brought], "their first step()" if first else f"step {number}")
        offset = sum(entry[0] for entry in brought[: self._group.rank])
        micro_batches = [
            MicroBatch(
                offset + i, len(part), cut(batch, part), f"rows {part.start}-{part.stop - 1} of this worker's batch"
            )
            for i, part in enumerate(cuts)
        ]
        whole = _Rows(micro_batches, sum(entry[0] for entry in brought), sum(entry[1] for entry in brought))
        if whole.rows == 0:
            raise UsageError("no worker brought a row to step()", "bring at least one row")
        if first:
            run.team.world.tell("phase")
        return self._transact(whole, f"the gradients of step {self.steps_done + 1}")

    def _transact(self, whole: _Rows, name: str) -> StepReport:
        """One step, applied whole or not at all."""
        began = time.perf_counter()
        for micro_batch in whole.micro_batches:
            micro_batch.batch = to_device(micro_batch.batch, self._device)
        run, number = self._run, self._transaction.begin()
        other = max(0.0, began - self._waiting_since - whole.seconds)
        applied = False
        try:
            with self._streams.lent():
                self._group.enter(name, check=False, kind="gradients")
                orders = self._orders(number, whole)
                sums, agreed, computed = self._compute(whole, orders, began)
                norm = self._refuse(sums, agreed, orders)
            self._transaction.prepared()
            reduced = time.perf_counter()
            lr = float(self._job.optimizers[0].param_groups[0]["lr"])
            self._transaction.updating()
            self._top.update(sums, agreed, orders, norm)
            step, applied = self._transaction.applied(), True
        finally:
            if not applied and self._transaction.moment is not Moment.UPDATING:
                self._top.abort()
                self._transaction.abort()
        self._expected = agreed.count
        per_row = (computed - began) / max(1, sum(m.rows for m in whole.micro_batches))
        decision = self._merging.learn(sums, agreed, per_row, len(whole.micro_batches))
        if decision:
            run.decide(self._number, *decision)
        run.agreed(save=agreed.save > 0, stop=agreed.stop > 0)
        self._name_unused(agreed.unused)
        ended = time.perf_counter()
        spent = {"data": whole.seconds, "compute": computed - began, "reduce": reduced - computed}
        spent |= {"update": ended - reduced, "other": other}
        self._waiting_since = ended
        metrics = {key: total / count if count else math.nan for key, (total, count) in agreed.metrics.items()}
        loss = agreed.loss / agreed.count
        report = StepReport(step, whole.epoch, loss, metrics, whole.rows, ended - began + whole.seconds, lr, norm)
        run.took_step, run.team.step = True, run.step
        self._record(report, spent, agreed)
        return report

    def _compute(self, whole: _Rows, orders: Orders, began: float) -> tuple[Sums, Agreed, float]:
        """The sums of the global batch; with the moment when this worker's own part was done."""
        while True:
            sums = self._top.gradients(whole.micro_batches, orders)
            computed = time.perf_counter()
            agreed = self._agree(sums, whole, computed - began + whole.seconds)
            if not sums.redo:
                return sums, agreed, computed
            self._top.abort()

    def _orders(self, number: int, whole: _Rows) -> Orders:
        return Orders(
            step=number,
            expected=self._expected or float(whole.rows),
            micro_batches=whole.count,
            merge=self._merging.size,
            test=self._merging.undecided and not self.plan.exact,
            collect=self._group.size > 1 or self.plan.exact,
            probe=self._run.probing,
            reverse=self._run.reverse,
            cure=whole.cure,
        )

    def _agree(self, sums: Sums, whole: _Rows, seconds: float) -> Agreed:
        """Sums of all workers; on the first step they first agree on the names of the metrics."""
        if self._layout is None:
            names = self._group.gather_json(sorted(sums.metrics) if whole.micro_batches else None)
            known = [(rank, name) for rank, name in enumerate(names) if name is not None]
            for rank, other in known:
                if other != known[0][1]:
                    raise MetricError(
                        f"the loss returned metrics {known[0][1]} on worker {known[0][0]} and {other} on worker {rank}",
                        "return the same names everywhere, with count 0 where there is nothing to count",
                    )
            self._layout = VectorLayout(tuple(known[0][1]), self._group.size, len(self._job.named))
        layout = self._layout
        if whole.micro_batches and tuple(sorted(sums.metrics)) != layout.metrics:
            raise MetricError(
                f"the loss returned metrics {sorted(sums.metrics)}, before that {list(layout.metrics)}",
                "return the same names every time, with count 0 where there is nothing to count",
            )
        fields = {
            "count": sums.count,
            "loss": sums.loss,
            "tested": sums.tested,
            "strict": sums.strict,
            "stop": self._run.notice is not None,
            "save": self._run.wants_save(),
        }
        packed = layout.pack(self._group.rank, seconds, sums.metrics, sums.unused, fields)
        rows = layout.rows(sums.parts, whole.count) if self.plan.exact else []
        vector = self._top.agree(torch.tensor(packed + rows, dtype=torch.float64), sums).tolist()
        agreed = layout.unpack(vector[: len(packed)])
        return layout.exactly(agreed, vector[len(packed) :]) if rows else agreed

    def _refuse(self, sums: Sums, agreed: Agreed, orders: Orders) -> float:
        """Refuses a step that cannot be applied: its loss or gradient is not finite, or there is nothing to take the
        mean over. Returns the norm of the mean gradient.
        """
        step = self._transaction.done + 1
        if not math.isfinite(agreed.loss):
            where = self._group.gather_json(sums.bad)
            named = "; ".join(f"worker {rank}: {', '.join(rows)}" for rank, rows in enumerate(where) if rows)
            raise NonFiniteLossError(
                f"the loss of step {step} is not finite ({named})",
                "the step was not applied; look at these rows, lower the learning rate or set clip_norm=",
            )
        if agreed.count <= 0:
            raise UsageError(
                f"the loss of step {step} counts {agreed.count:g} rows or tokens in the whole global batch",
                "return a positive count for at least one row of each global batch",
            )
        norm = self._top.norm(agreed, orders)
        if not math.isfinite(norm):
            raise NonFiniteLossError(
                f"the gradient of step {step} is not finite, though its loss is ({agreed.loss / agreed.count:.6g})",
                "the step was not applied; look for a square root, a division or a logarithm at 0",
            )
        return norm

    def _name_unused(self, unused: tuple[int, ...]) -> None:
        if unused:
            names = list(self._job.named)
            shown = ", ".join(names[number] for number in unused[:5]) + (", ..." if len(unused) > 5 else "")
            self._run.say(
                f"{len(unused)} of {len(names)} parameters got no gradient and were left as they are: {shown}; "
                "freeze them with requires_grad_(False) if that is meant",
                once=True,
            )

    def _record(self, report: StepReport, spent: dict[str, float], agreed: Agreed) -> None:
        self._ledger.add(report.samples, spent, agreed.seconds)
        self._last = report
        if self._ledger.due():
            self.flush()
        self._run.checking(self.model, self._merging.mixes)

    def flush(self) -> None:
        """A record of the steps since the last one, for the journal and the progress line."""
        report = self._last
        if self._run.main and self._ledger.steps and report is not None:
            figures = self._ledger.take(self._group.sent)
            own = {name: getattr(report, name) for name in ("step", "epoch", "loss", "metrics", "lr", "grad_norm")}
            self._run.show("step", trainer=self._number, **own, **figures)

    # -- beside training ----------------------------------------------------------------------------------------

    def evaluate(
        self,
        dataset: Any,
        metric: Callable[[Any, Any], Mapping[str, tuple[Any, Any]]],
        model: nn.Module | None = None,
        collate: Callable[[list[Any]], Any] | None = None,
    ) -> dict[str, float]:
        """Means of `metric(output, batch) -> {name: (sum, count)}` over all rows of a dataset, and their number ``n``.

        Exact: each row counts once, nothing is padded, and sums are added in grid order. Collective. `model` is by
        default the trained one; it is put in eval mode for the time.
        """
        micro = self._grid.micro if self._grid else (self.plan.micro or 32)
        options = self._loader.get("options", {})
        source = Source.of(dataset, self._seed, collate or self._loader.get("collate"), None, options)

        def compute() -> dict[str, float]:
            found = evaluate(self._run.team, self._job, model or self.model, source, metric, micro)
            self._run.journal.write("evaluate", trainer=self._number, step=self.steps_done, results=found)
            return found

        results: dict[str, float] = self._run.outside(compute)
        return dict(results)

    def log(self, **values: Any) -> None:
        """Keeps the user's own figures (or a text) in the run's journal, at the current step."""
        self._run.journal.write("log", trainer=self._number, step=self.steps_done, values=values)

    def save(self) -> None:
        """Asks for a checkpoint; taken when the loop asks for its next step, so that it holds what the body did.

        Collective: called by all workers or none. Raises UsageError without a run folder.
        """
        self._group.enter("save()")
        self._run.ask_save()
        if not self._run.loops:
            self._run.save(must=True)

    def export(self, path: str | Path) -> None:
        """Writes the weights as safetensors, under the model's own keys. Collective; the file is written once."""
        self._group.enter("export()")
        if self._run.main:
            write_model(self.model.state_dict(), Path(path))

    def stop(self) -> None:
        """Ends the training when the loop asks for its next step; the run then counts as finished. Collective."""
        self._group.enter("stop()")
        self._stopped = True

    # -- state --------------------------------------------------------------------------------------------------

    def snapshot(self) -> dict[str, Any]:
        """Everything that the rest of the training depends on, for a checkpoint."""
        return {
            "model": (strategy := self._top.state())["model"],
            "optimizers": strategy["optimizers"],
            "schedulers": strategy["schedulers"],
            "exact": strategy["exact"],
            "steps": self.steps_done,
            "expected": self._expected,
            "grid": [self._grid.global_batch, self._grid.micro] if self._grid else None,
            "phases": [phase.saved() for phase in self._phases],
            "stopped": self._stopped,
            "state": self.state.saved(),
        }

    def _restore(self) -> None:
        """Takes this trainer's part of the checkpoint that the run resumes from."""
        saved = self._run.tree.get("trainers", [])[self._number : self._number + 1]
        if not saved:
            return
        (mine,) = saved
        self._top.load(mine)
        self._transaction.done = mine["steps"]
        self._expected = mine["expected"]
        self._phases = [Phase(**phase) for phase in mine["phases"]]
        self._stopped = mine["stopped"]
        self.state.restore(mine["state"])
        if mine["grid"] and self._grid:
            self._grid = self._resumed_grid(Grid(*mine["grid"]), self._grid)

    def _resumed_grid(self, recorded: Grid, now: Grid) -> Grid:
        """The recorded grid wins, unless the script or the plan says another: then that, named as what it is."""
        said = Grid(
            now.global_batch,
            self.plan.micro or (recorded.micro if now.global_batch == recorded.global_batch else now.micro),
        )
        if said != recorded:
            self._run.say(
                f"changed mathematics: global batch {recorded.global_batch} in micro-batches of {recorded.micro} rows "
                f"until step {self.steps_done}, from here {said.global_batch} in micro-batches of {said.micro}"
            )
        return said
