"""The Trainer that users train with: loops over steps, makes each step's report and its journal record."""

from __future__ import annotations

import sys
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Never

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import Sampler

from paceline.base.batching import Grid, stream_seed
from paceline.base.mesh import UNIT_AXES, Mesh
from paceline.build import build_replica, build_strategy, current_run, load_strategy
from paceline.checkpoint.export import refuse_other_suffix, write_together
from paceline.checkpoint.import_weights import adopted, refuse_another_model
from paceline.comm.peer_status import call_site
from paceline.comm.torch_private import pytree
from paceline.compute.cached_loss import cached_loss
from paceline.compute.imported_optimizers import adopted_optimizers, changed_options
from paceline.compute.int8_states import refuse_others
from paceline.compute.job import default_forward
from paceline.compute.lr_schedules import set_training_steps
from paceline.compute.merge_policy import MergePolicy
from paceline.compute.microbatches import MicroBatch, rows_of
from paceline.compute.model_size import count_elements
from paceline.compute.rng import RngState
from paceline.compute.state_dict import copies_in_pieces, frozen, hidden_in, model_state, own_copies
from paceline.compute.update_coupling import Scope
from paceline.data.fingerprint import Fingerprint
from paceline.data.loader import Feed, Source
from paceline.data.row_stream import Position
from paceline.data.sampler_order import take_apart
from paceline.errors import CheckpointError, UsageError
from paceline.evaluate.evaluate import EvalPass, LossMean, evaluate
from paceline.evaluate.predict import predicted
from paceline.observe.step_totals import StepTotals
from paceline.parallel.parallel_job import ParallelJob
from paceline.parallel.plan_cost import cost, facts_of
from paceline.parallel.tensor_parallel.redistribute import Redistributor
from paceline.parallel.tensor_parallel.script_view import (
    iterate_without_script_view,
    mark_copies,
    restore_copies,
    start_script_view,
    with_script_views,
    without_script_view,
)
from paceline.plan import Plan
from paceline.session.best_checkpoint import keep_best
from paceline.session.best_weights import load_best
from paceline.session.closed_trainers import EndedTrainer, refuse_calls, release
from paceline.session.error_hints import AnnotatedCallable
from paceline.session.gpu_usage import gpu_utilisation
from paceline.session.grid_text import describe_grid, idle_text, resumed_grid
from paceline.session.logging import TrainerLogging
from paceline.session.loop_batches import BroughtBatch, LoopBatches
from paceline.session.memory_snapshot import has_run_out
from paceline.session.optimizer_arguments import (
    coupling_of,
    enable_fused,
    left_out,
    names_to_own,
    optimizers_of,
    refuse_fused,
    refuse_other_groups,
    refuse_spread,
    schedulers_of,
)
from paceline.session.script_settings import ScriptSettings
from paceline.session.trainer_consistency import Description, compare, describe_model, describe_optimizers
from paceline.session.trainer_state import TrainerState
from paceline.session.training_loop import LoopState, SavedFields
from paceline.session.validation import (
    Schedule,
    SetOnce,
    build_model,
    check_callable,
    check_types,
    choose_plan,
    device_of,
    layers_at_rest,
    missing_method,
    refuse_other_places,
    refuse_words,
    settle_arithmetic,
    sharing,
    trainable,
    whole_number,
)
from paceline.train.layer_norms import LayerNorms, layer_norms
from paceline.train.step import StepReport
from paceline.train.step_context import Batches, StepContext, refuse_other_kinds

if TYPE_CHECKING:
    from paceline.planner.requests import RequestedAnswer

_END = "the end of the iterable dataset of steps()"
_FUSED = "fused= was not set, and torch supports it on this device"


class Trainer(TrainerLogging):
    """Trains one model, with the same result on any number of workers.

    Every worker makes the same Trainer; none of the arguments names a worker.

    Args:
        model: An `nn.Module` (all workers take worker 0's weights), or a function without arguments that builds one.
            Prefer the function: it is called under `seed`, and models that are too large for one worker can then be
            built in parts.
        loss: ``loss(output, batch)`` returns a scalar (the mean over the rows that it was given), ``(sum, count)``, or
            ``(sum, count, {name: (sum, count)})`` with metrics. Return the sum and the count where rows weigh
            differently, as in means over tokens.
        optimizer: ``optimizer(params)`` gets the trainable parameters as (name, parameter) pairs, and returns one
            optimizer or a list of them.
        global_batch: Rows of one optimizer step, over all workers. Only `step` works without it.
        forward: ``forward(model, batch)``; by default ``model(batch)`` for a tensor, ``model(batch[0])`` for a tuple or
            list, and ``model(**batch)`` for a mapping.
        schedule: The learning rate: a factor as a function of the step (from 0), as `paceline.cosine` makes it; one of
            torch's scheduler classes, plain or in `functools.partial`; a function of the optimizer that returns a
            scheduler; or `paceline.plateau(name)`.
        clip_norm: Upper bound of the norm of the mean gradient.
        seed: Seeds the weights, the order of the rows, and the random numbers of each micro-batch.
        plan: How the work is spread, for example ``"shard=2 zero=3 precision=bf16"``. ``paceline run --plan`` overrides
            it.
        tensor: The layers that ``tensor=`` cuts and how, by name, where Paceline does not find them by itself.
        pipeline_blocks: The name of the list of blocks that ``pipeline=`` cuts into stages, where it is not found.
        loss_over: With ``"batch"``, `loss` is called once per step with the outputs for all rows of the global batch
            (and None as the batch), as contrastive losses need.

    Raises:
        PlanError: The plan has an unknown word, or does not fit the model or the number of workers.
        UsageError: An argument is wrong; the message names it.
        WorkersDifferError: Workers make different models, optimizers or arguments.
        CheckpointError: The run cannot be resumed.

    Example:
        >>> trainer = paceline.Trainer(
        ...     model=lambda: nn.Linear(10, 2),
        ...     loss=lambda output, batch: nn.functional.cross_entropy(output, batch[1]),
        ...     optimizer=lambda params: torch.optim.AdamW(params, lr=1e-3),
        ...     global_batch=256,
        ... )
        >>> for report in trainer.steps(dataset, epochs=3):
        ...     print(report.step, report.loss)
    """

    model = SetOnce[nn.Module](
        "the optimizer refers to its parameters; create another Trainer, or use trainer.model.load_state_dict(...)"
    )
    save_frozen = True
    """Whether checkpoints hold parameters that are not trained, such as the base model of LoRA adapters. With False, a
    resumed run takes them from the model that the script makes. Set it on all workers, before the loop.
    """
    _line: dict[str, Any] | None = None  # of checkpoints about this trainer, if it had ended in them
    _closed = _stopped = _looked = False  # the last one for what optimizers hide
    _last: StepReport | None = None
    _spare: MicroBatch | None = None  # of what this worker brought to step()
    _stands_in = False  # for one that has ended, until all workers release it

    @without_script_view
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
        check_types(clip_norm=clip_norm, plan=plan, tensor=tensor, pipeline_blocks=pipeline_blocks, loss_over=loss_over)
        refuse_words("Trainer", words, Trainer, plan)
        global_batch, seed = whole_number("global_batch", global_batch), whole_number("seed", seed) or 0
        self._run = run = current_run()
        self._reporter = reporter = run.reporter
        release(run)
        run.memory.measure_baseline(model)
        self._group = run.team.group
        self._number, self._seed = len(run.trainers.classes), seed
        self._device = device_of(run.team.world.local_rank)
        self._streams = RngState(self._device)
        mesh = self._mesh = self._choose_plan(plan)
        seeded = self._streams, stream_seed(seed, 0, -1)
        self.model, model_fields = build_model(model, self._device, *seeded, self.plan, run.check.limit(self._device))
        form = AnnotatedCallable(check_callable("forward", forward or default_forward), "forward", forward is None)
        judge = self._loss = AnnotatedCallable(check_callable("loss", loss), "loss")
        over, objective = (judge, cached_loss) if loss_over else (None, judge)
        kept = trainable(self.model, self.plan, whole_batch=over is not None)
        size = count_elements(self.model)
        kept |= {word: getattr(self.plan, word) for word in ("precision", "optimizer_states", "exact")} | {"over": over}
        kept |= {"beside": run.trainers.models, "offload": self.plan.offload is not None, **model_fields}
        job = self._job = ParallelJob(self.model, form, objective, self._device, seed, clip_norm, **kept)
        if mesh.replica > 1:  # a newcomer has no rows before it has a place
            self._group.subgroup("shard", mesh=mesh).is_eager |= self.plan.together > 1
            run.need_team()
        known = run.state.knows(self._number)
        self.described: Description = {}
        arguments = {"global_batch": global_batch, "clip_norm": clip_norm, "seed": seed, "loss_over": loss_over}
        self._compare(describe_model(self.model, {**arguments, "plan": str(replace(self.plan, data=None))}), known)
        with self._streams.preserved(), run.check.refusals():  # blocks may be run to see what can be cut
            elastic = run.team.transactions.elastic
            self._replica = build_replica(self.plan, job, self._group, elastic, known, tensor, pipeline_blocks)
        reporter.tell_decisions(self._number, job.decisions)
        with run.check.refusals():
            optimizers = self._optimizers(optimizer, mesh)
        self._script_settings = ScriptSettings.of(seed, optimizers, self.model)
        self._compare(describe_optimizers(optimizers, self._script_settings.options, job.local_params), known)
        schedulers = schedulers_of(schedule, optimizers, self.plan)
        self._replica.build(optimizers, schedulers)
        device = next(iter(job.local_params.values())).device
        for name in enable_fused(optimizers, device, self.plan.exact, job.in_rows):
            reporter.decide(self._number, f"{name} runs fused", _FUSED)
        merging = MergePolicy(self._device, never=run.check.reverse or self.plan.one_by_one)
        run.trainers.agreement.comparisons.append(weights := self._make_comparison(job, mesh))
        self._grid = Grid.of(global_batch, self.plan.micro) if global_batch is not None else None
        self._context = StepContext(
            run, self._number, job, self._replica, self.plan, self._streams, merging, weights, self._grid
        )
        self._strategy = build_strategy(self._context)
        self._answer = self._requested_answer() if run.check.asks else None
        self._ledger, self._loader = StepTotals(), dict[str, Any]()
        self._phases, self.unused_loops = list[LoopState](), list[LoopState]()  # the latter were made and not run
        self._state = TrainerState(partial(restore_copies, job=job))
        self._follow_values(schedule, schedulers)
        run.trainers.enlist(self, self.model, self._state)
        if run.resume.tree:
            run.state.refuse_differences(run.resume.tree)
            self.restore(newcomer=True)
        run.memory.report(run.team.world, run.script)
        reporter.describe_model(
            self._number, {**size, "held": cost(self.plan, facts_of(job), run.team.world.size).held}
        )
        start_script_view(run.trainers.members)

    # -- its end ------------------------------------------------------------------------------------------------

    @without_script_view
    def close(self) -> None:
        """Ends this trainer and frees the memory of its model, optimizer and gradients.

        Checkpoints no longer hold its state; its last weights are kept once, beside them. A model that every worker
        holds completely stays usable if the script still refers to it. A second call does nothing.

        All workers must call it, and not in the body of the trainer's own loop unless `break` follows. While an
        exception is handled, workers do nothing together: the memory is then freed with the next Trainer or checkpoint.
        Parameter servers (``server=``) keep their part until the run ends.
        """
        if self._closed:
            return
        run = self._run
        together = sys.exc_info()[0] is None and not run.script.replays
        if together:
            self._together("close()")
            if self.best.due is not None:
                keep_best(run)
        self._stopped = True
        stays = {name: vars(self)[name] for name in ("_run", "_reporter", "_number", "plan")}
        self._end()
        vars(self).clear()
        vars(self).update(stays, _closed=True)
        if together:
            release(run)
        start_script_view(run.trainers.members)

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        if is_finalizing():  # modules are gone by now, and nobody needs the memory
            return
        if "best" in vars(self) and not self._stands_in:  # else it was closed, or not made
            self._end()

    @without_script_view
    def _end(self) -> None:
        """Moves all parts to an object of the run, which stands in for this trainer until all workers release it."""
        run, number = self._run, self._number
        if len(run.trainers.classes) <= number:
            return  # an error ended the constructor
        if self._line is not None:
            run.trainers.forget(number, EndedTrainer.of(self, self.snapshot(), self.callable_model))
            self.dismantle()
            return
        parts = object.__new__(type(self))
        vars(parts).update(vars(self), _stands_in=True)
        run.trainers.replace(number, parts)

    def _go_on_ended(self, saved: dict[str, Any]) -> None:
        """Loads a trainer that had ended before the checkpoint: it has its last weights, and trains no more."""
        self._replica.load({"model": saved["model"]})
        self._context.done, self._context.expected = saved["steps"], saved["expected"]
        self._line = {name: value for name, value in saved.items() if name not in ("model", "state")}
        self._run.trainers.forget(self._number)
        self._run.trainers.update_models()

    @property
    def parts(self) -> list[Redistributor | None]:
        """What divides the layers of each model, in the order of the models; for the script's view of the weights."""
        return self._job.redistributors if self._line is None else []

    @property
    def schedule_warning(self) -> str:
        """What to tell the user at the end if a plateau schedule never got a value; else empty."""
        return self.plateau.schedule_warning

    @property
    def callable_model(self) -> nn.Module | None:
        """The model, if the losses of other trainers may call it."""
        return self.model if self._line is None or self._line["viewed"] else None

    def _need_optimizer(self) -> None:
        if self._line is not None:
            what = f"trainer {self._number} was closed when the checkpoint was written, so its optimizer state is gone"
            raise UsageError(what, "start a new run in another --run-dir to train it further")

    def dismantle(self) -> list[Any]:
        """Frees the memory of a trainer that all workers have released. Returns weak references to the model and then
        the optimizers, which the script may still hold.
        """
        job, replica, mesh = self._job, self._replica, self._mesh
        weak: list[weakref.ref[Any]] = [weakref.ref(one) for one in (job.model, *job.optimizers)]
        replica.release()
        if mesh.unit > 1 or self.plan.together > 1:
            refuse_calls(job.model)
        parts = (
            self._strategy,
            self._context,
            replica.runner,
            replica.updater,
            replica.layout,
            replica.grad_sink,
            replica.grad_buffers,
        )
        for part in (*parts, replica.reducer, replica.error_feedback, replica, job):
            if part is not None:
                vars(part).clear()  # hooks on a model that the script holds may hold them
        vars(self).clear()
        return weak

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            if self._closed and not name.startswith("__"):
                raise self._is_closed()
            what = f"{type(self).__name__!r} object has no attribute {name!r}{missing_method(name)}"
            raise AttributeError(what, name=name, obj=self)

    def _is_closed(self) -> UsageError:
        what = f"trainer {self._number} is closed: its model, optimizer and gradients were released"
        return UsageError(what, "call trainer.close() after its last use, or create another Trainer")

    def _need_open(self) -> None:
        if self._closed:
            raise self._is_closed()

    # -- what the user reads ------------------------------------------------------------------------------------

    @property
    def steps_done(self) -> int:
        """Optimizer steps of the whole training, those before a resume included. A new worker joins the team first."""
        self._run.need_team()
        return self.done

    @property
    def state(self) -> TrainerState:
        """The script's own values, which checkpoints contain. A new worker joins the team first."""
        self._run.need_team()
        return self._state

    @state.setter
    def state(self, value: object) -> None:
        what = "trainer.state cannot be replaced: checkpoints hold this object; use trainer.state.update(...)"
        raise AttributeError(what)

    @property
    def done(self) -> int:
        """Optimizer steps, as far as this worker knows."""
        return self._run.trainers.members[self._number].done if self._closed else self._context.done

    @property
    def _of(self) -> str:
        """Names this trainer in collectives, if it is not the first: all workers must use the same one."""
        return f" of Trainer {self._number}" if self._number else ""

    def _choose_plan(self, script: str | None) -> Mesh:
        """Chooses the plan, which the `script` may give, and begins the run with it. Returns the plan's mesh."""
        run = self._run
        run_plan, self.plan, origin = self._plans(script)
        if self.plan.exact:
            settle_arithmetic(run.team.capabilities, self._device)
        mesh = self.plan.mesh(self._group.size)
        if run.team.transactions.elastic and run.trainers.members:
            refuse_other_places(mesh.replica, self._group.mesh.replica)
        self._group.mesh = max(self._group.mesh, run_plan.mesh(self._group.size), key=lambda mesh: mesh.replica)
        run.begin(str(run_plan), origin, self._seed, self._device)
        if shared := sharing(run.team.world, self._device):
            self._reporter.say(shared, once=True)
        return mesh

    def _plans(self, script: str | None) -> tuple[Plan, Plan, str]:
        """Returns the plan of the run, that of this trainer, and where it comes from."""
        world, asked = self._run.team.world, self._run.check
        if asked.probe is None:
            return choose_plan(world, script)
        from paceline.planner.candidates import probed_words

        asked.script_plan = world.plan or script or ""
        plan = probed_words(Plan.parse(asked.script_plan)).validate(world.size)
        return plan, plan, "a probe"

    def _requested_answer(self) -> RequestedAnswer:
        from paceline.planner.requests import RequestedAnswer  # not with every run

        return RequestedAnswer(self._context)

    def _compare(self, part: Description, known: bool) -> None:
        """Compares a part of this trainer's description between workers. If the trainer is `known` to the others, a
        newcomer compares it with theirs when it takes over their state. Collective if it is not known.
        """
        self.described = {**self.described, **part}
        if not known:
            compare(self._group, part, f"creating Trainer {self._number}")

    def _optimizers(self, make: Any, mesh: Mesh) -> list[Optimizer]:
        """Calls the user's function with the parameters that this worker holds. The result must not depend on whether
        these are shards.
        """
        job, plan = self._job, self.plan
        groups = dict[str, tuple[int, int]]()
        if job.local_cuts or plan.divides_servers:
            with self._streams.preserved():  # what the user's function draws is drawn once
                coupling, groups = coupling_of(make, job)
            refuse_spread(coupling, plan)
            if job.local_cuts and coupling.scope > Scope.ELEMENT:
                owned = names_to_own(make, job, coupling, groups, plan)
                self._replica.use_full_parameters(owned)
                what = f"{coupling.kind} updates full parameters, each on one worker, which keeps its state"
                if owned is None:
                    what = f"{coupling.kind} gets full parameters on each worker, and its state is not sharded"
                self._reporter.decide(self._number, what, f"it {coupling.why}")
                self._reporter.say(f"{what}: it {coupling.why}", once=True)
        optimizers = optimizers_of(make, list(job.local_params.items()))
        if forgotten := left_out(optimizers, list(job.local_params.items())):
            self._reporter.say(forgotten, once=True)
        refuse_other_groups(optimizers, groups, job.local_params, job.local_cuts)
        if plan.optimizer_states:
            refuse_others(optimizers)
        refuse_fused(optimizers, bool(plan.exact and plan.shard) and not job.whole_copies)
        return optimizers

    @property
    def main(self) -> bool:
        """True on one worker, for example to feed a logger.

        Methods of the Trainer itself must be called by all workers.
        """
        return self._reporter.main

    @property
    def device(self) -> torch.device:
        """The device on which this worker computes; samples of the dataset may be on any."""
        return self._device

    @property
    def run_dir(self) -> Path | None:
        """The run folder, which holds journal, report and checkpoints; None if the run has none."""
        return Path(self._run.folder.path) if self._run.folder.path else None

    @property
    def epoch(self) -> int:
        """The epoch of the last step, from 0."""
        last = self._phases[-1] if self._phases else None
        return 0 if last is None else last.first_epoch + max(0, last.begun - 1)

    @property
    def steps_per_epoch(self) -> int | None:
        """Optimizer steps of an epoch of the last `steps()`; None before it, or if the dataset has no length."""
        rows = self._phases[-1].rows if self._phases else None
        return None if rows is None or self._grid is None else self._grid.batches(rows)

    @property
    def complete(self) -> bool:
        """True once every loop over `steps()` has reached its end, or `stop()` was called."""
        return (
            self._closed or self._stopped or all(phase.complete or phase.done == phase.total for phase in self._phases)
        )

    # -- training -----------------------------------------------------------------------------------------------

    @without_script_view
    def steps(
        self,
        dataset: Any,
        epochs: int | None = None,
        count: int | None = None,
        collate: Callable[[list[Any]], Any] | None = None,
        order: Callable[..., Any] | Sampler[Any] | None = None,
        loader: Mapping[str, Any] | None = None,
        **words: Never,
    ) -> Iterator[StepReport]:
        """Trains: makes one optimizer step per turn of the loop, and yields a StepReport after each.

        A resumed run continues in the middle of the loop and ends where the undisturbed run would.

        Args:
            dataset: A dataset with a length (rows by index), an iterable one, or torch's DataLoader, whose dataset,
                sampler, collate function and number of processes are used; its batch size must be the global batch.
            epochs: How often to go through the dataset (default 1). A resumed run counts those that are done.
            count: Instead of `epochs`: the number of optimizer steps.
            collate: Makes a batch of the samples of one micro-batch; torch's `default_collate` if not given.
            order: ``order(position, size, seed, epoch)`` returns the index of the sample at a position: any pure
                function, by default `paceline.sample_index`, a random permutation of each epoch, or for a
                `paceline.data.Mix` the order of its weights. Or a sampler of torch, which is drawn once for each epoch.
            loader: Options of torch's DataLoader, for example ``{"num_workers": 4}``.

        Yields:
            A StepReport, the same on every worker but for `seconds`.

        Raises:
            UsageError: An argument is wrong, or workers have different datasets.
            NonFiniteLossError: The loss or the gradient is not finite; the step was not applied.
        """
        self._need_open()
        refuse_words("steps()", words, Trainer.steps)
        check_types(collate=collate, order=order, loader=loader)
        if self._grid is None:
            raise UsageError("steps() needs the global batch", "pass global_batch= to the Trainer")
        if epochs is not None and count is not None:
            raise UsageError("both epochs= and count= were given", "give one of them")
        count, epochs = whole_number("count", count), whole_number("epochs", epochs)
        batch = self._grid.global_batch
        dataset, collate, order, loader = take_apart(dataset, batch, collate, order, loader)
        self._loader = {"collate": collate, "options": dict(loader)}
        source = Source.of(dataset, self._seed, collate, order, loader)
        if source.rows is None and epochs:
            what = "report.epoch_end stays false, because an iterable dataset does not announce the end of an epoch"
            self._reporter.say(f"{what}; to evaluate after each epoch, use one loop with epochs=1 for each", once=True)
        phase = self._enter_phase(source, 1 if epochs is None and count is None else epochs, count)
        phase.site = call_site()
        self.unused_loops.append(phase)
        loop = self._loop(phase, source, self._grid)
        run = self._run
        return with_script_views(loop, lambda: run.trainers.members)

    def _enter_phase(self, source: Source, epochs: int | None, count: int | None) -> LoopState:
        """Returns the state of the next loop, from the checkpoint if that holds it. Prints its grid."""
        self._run.need_team()
        grid = self._grid
        assert grid is not None
        number = self._run.script.calls[self._number]
        self._run.script.calls[self._number] += 1
        rows, total = source.rows, count
        if number < len(self._phases):
            rows = self._phases[number].same_rows(rows, self._reporter.say)
        if epochs is not None and rows is not None:
            total = epochs * grid.batches(rows)
        if number == len(self._phases):
            first = self._phases[-1].first_epoch + self._phases[-1].begun if self._phases else 0
            self._phases.append(LoopState(number, rows, epochs, total, first_epoch=first))
        phase = self._phases[number]
        phase.enter(self._run.script.enclosing_loop, self._number)
        if phase.set_target(epochs, total, last=number == len(self._phases) - 1):
            self._stopped = False
        if not phase.complete:
            self._need_optimizer()
            set_training_steps(self._job.schedulers, total, len(self._phases))
            assignment = self._context.current_assignment()
            dealt = self._strategy.shares(len(grid.cut(grid.global_batch)), assignment.weights)
            unit = self._mesh.unit
            fields = describe_grid(grid, dealt, rows, total, unit, self._number, self._run.trainers.classes)
            fields |= {
                "phase": number,
                "epochs": epochs,
                "done": [member.done for member in self._run.trainers.members],
            }
            self._reporter.show("grid", **fields, steps=None if total is None else self.done - phase.done + total)
            idle = None if assignment.fine or not self._strategy.lockstep else idle_text(grid, assignment.weights, unit)
            if idle is not None:
                self._reporter.decide(self._number, *idle)
                self._reporter.say(": ".join(idle), once=True)
        return phase

    def _loop(self, phase: LoopState, source: Source, grid: Grid) -> Iterator[StepReport]:
        run = self._run
        self.unused_loops.remove(phase)
        run.script.calls.update(phase.inside)
        if phase.complete or self._stopped:
            run.say_finished()
            return
        run.begin_training(self._number, loop=True)
        source = phase.source(source)
        position = Position.of(phase.stream, phase.done)
        if source.rows is None and phase.done and position is None:
            self._reporter.say(
                f"skipping the first {phase.done} global batches: an iterable dataset must be read from its start"
            )
        span = (phase.done, phase.total, 1 << 62 if phase.epochs is None else phase.epochs)
        feed = Feed(source, grid, span, run.team.world.tell, watched=True, position=position)
        self._context.waiting_since, self._ledger.tokens = time.perf_counter(), source.tokens
        alike = Fingerprint(source, run.team.world.tell, self._of, lockstep=self._strategy.lockstep)
        each = 0 if source.rows is None else grid.batches(source.rows)  # steps of an epoch of this loop
        ahead, lockstep = self.plan.quorum is not None, self._strategy.lockstep
        one_reader = lockstep and not run.team.world.verify_steps  # which load the shares of other workers, too
        batches = LoopBatches(
            feed, phase, alike, run.team, self._reporter.say, ahead, one_reader, admits=not run.script.loops
        )
        with closing(feed), run.loop(phase):
            while feed.has(phase.done):
                report = self._advance(batches)
                if report is None:
                    if source.rows is None and lockstep:  # it may be longer on other hosts
                        self._together(_END)
                    else:
                        run.between_steps()
                    break
                phase.stream = batches.position
                phase.done, phase.begun = phase.done + report.turn, report.epoch + 1 - phase.first_epoch
                if each and phase.done // each > (phase.done - report.turn) // each:
                    report = replace(report, epoch_end=True)
                feed.measured(report.seconds)
                if feed.news:
                    self._tell_of_loading(feed)
                yield report
                if self._closed:
                    what = "trainer.close() was called inside this trainer's own training loop"
                    raise UsageError(
                        what, "leave the loop with `break` right after close(), or call close() after the loop"
                    )
                if run.script.loops[0] is phase:
                    run.between_steps(ends=self._stopped or phase.done == phase.total)
                if self._stopped:
                    break
            else:
                if source.rows is None and lockstep:
                    self._together(_END)
            outermost = run.script.loops[0] is phase
        if self._answer is not None:
            self._answer.after_loop()
        self.flush()
        phase.complete, phase.stopped = True, self._stopped
        if outermost and phase.done:
            run.trainers.measure()
            run.save(wait=True, must=True)

    def _tell_of_loading(self, feed: Feed) -> None:
        """Journals where rows are loaded, and tells the user what makes training slower than it could be."""
        for what, why in feed.take_news():
            self._reporter.decide(self._number, what, why)
            if what.startswith(("rows are loaded in the step:", "rows are loaded in the step from", "an iterable")):
                self._reporter.say(f"{what}; {why}", once=True)

    @without_script_view
    def step(self, batch: Any) -> StepReport:
        """Makes one optimizer step on rows that each worker brings itself.

        The loss is the mean over the rows of all workers. If a worker dies, its rows of that step are lost; a message
        names them.

        Args:
            batch: Any nesting of tensors whose first dimension is the row, or None if this worker brings no rows.

        Returns:
            A StepReport.

        Raises:
            UsageError: Workers bring the same rows, or the plan makes several steps per turn (``local=``,
                ``staleness=``).
        """
        self._need_open()
        self._need_optimizer()
        run = self._run
        if not self._strategy.lockstep:
            word = self.plan.several
            what = f"step() makes one optimizer step, but under {word} each turn of the loop makes several"
            raise UsageError(what, f"use steps(), or remove {word} from the plan")
        set_training_steps(self._job.schedulers, None, 0)
        run.begin_training(self._number, loop=False)
        first, run.script.uses_step = not run.script.uses_step, True
        number = self.done + 1
        # Later ones by and by: rows may part from one another late, or meet. A single row may be the same by chance.
        looks = first or (batch is not None and rows_of(batch) > 1 and number & (number - 1) == 0)
        if first:
            run.team.world.tell("phase")
        when = "their first step()" if first else f"step {number}"
        micro = self._grid.micro if self._grid else self.plan.micro
        unit = self._group.subgroup(*UNIT_AXES, mesh=self._mesh)
        name = f"step {number} by step(){self._of}"
        brought = BroughtBatch(
            batch, micro, self._group, unit, self.plan.together, self._spare, name, when if looks else ""
        )
        report = self._advance(brought)
        self._spare = brought.spare
        assert report is not None
        return report

    def _advance(self, batches: Batches) -> StepReport | None:
        run = self._run
        if self._answer is not None:
            self._answer.before_step(batches)
        try:
            step = self._strategy.advance(batches)
        except UsageError as error:
            run.check.refuse(error)
            raise
        except (RuntimeError, MemoryError) as error:
            if has_run_out(error):
                raise run.memory.explain(error, self._device, run.folder.path, run.team.rank) from error
            refuse_other_kinds(self._context.kinds, dict(self._job.model.named_parameters()), error)
            raise
        if step is None:
            return None
        report, agreed = step.report(), step.agreed
        if self._last is None and (resting := layers_at_rest(self.model)):
            self._reporter.say(resting, once=True)
        run.script.took_step, run.script.replays = True, False
        run.team.step, self._last = run.trainers.step, report
        workers = dict(zip(run.team.transactions.members, agreed.seconds, strict=False))
        lanes = dict(zip(workers, agreed.spent, strict=False))
        self._ledger.add(report.step, report.samples, step.spent, workers, step.steps, lanes)
        if self._ledger.due():
            self.flush()
        if self._answer is not None:
            self._answer.after_step(step)
        return report

    def flush(self) -> None:
        """Writes the steps since the last record to the journal and the progress line."""
        report, account = self._last, self._run.team.transactions.account
        if not self._reporter.main:
            self._ledger.forget()
            account.take()
        elif self._ledger and report is not None:
            figures = self._ledger.take(int(sum(self._reporter.traffic.of(self._number).values())))
            if (busy := gpu_utilisation(self._device)) is not None:
                figures["gpu"] = busy
            values = {name: getattr(report, name) for name in ("step", "epoch", "loss", "metrics", "lr", "grad_norm")}
            self._reporter.show("step", trainer=self._number, **values, **figures, account=account.take())
            if (each := self._ledger.each()) is not None:
                self._reporter.journal.write("each", trainer=self._number, step=report.step, **each)

    # -- beside training ----------------------------------------------------------------------------------------

    @without_script_view
    def evaluate(
        self,
        dataset: Any,
        metric: Any = None,
        model: nn.Module | None = None,
        collate: Callable[[list[Any]], Any] | None = None,
        **words: Never,
    ) -> dict[str, Any]:
        """Evaluates the loss or a metric over a dataset, each row exactly once, on all workers together.

        The model is in eval mode meanwhile. Nothing is padded, and sums are added in the order of the rows, so the
        result does not depend on the number of workers.

        Args:
            dataset: The rows.
            metric: By default the training's loss, as ``loss``, and the metrics that it returns.
                ``metric(output, batch)`` returns ``{name: (sum, count)}``, and the result is their quotient. For
                what is not a mean (AUC, correlation, mAP): an object with `update`, `compute` and `reset` whose states
                say how they merge, as those of torchmetrics; a mapping of such objects by name; or a pair of either and
                a function of output and batch that returns the arguments of `update`. With ``loss_over="batch"`` a
                metric gets the outputs of each global batch, and None.
            model: Another model to evaluate; by default the trained one.
            collate: As in `steps`.

        Returns:
            The values by name, with the number of rows as ``n``.

        Raises:
            MetricError: The metric returns something else, or other names for some rows.

        Example:
            >>> def accuracy(output, batch):
            ...     return {"accuracy": ((output.argmax(1) == batch[1]).sum(), len(output))}
            >>> trainer.evaluate(data, accuracy)
            {'accuracy': 0.985, 'n': 1000}
        """
        self._need_open()
        refuse_words("evaluate()", words, Trainer.evaluate)
        sweep = self._sweep(dataset, collate, model)

        def compute() -> dict[str, Any]:
            results = evaluate(sweep, LossMean(self._loss) if metric is None else metric)
            for one in self.followed:
                one.find_value(results, "evaluate()", self._reporter.say)
            self._reporter.show("evaluate", trainer=self._number, step=self.done, results=results)
            return results

        return self._report(compute, self._offer, "evaluating")

    @without_script_view
    def predict(
        self,
        dataset: Any,
        collate: Callable[[list[Any]], Any] | None = None,
        model: nn.Module | None = None,
        path: str | Path | None = None,
    ) -> Any:
        """Computes the output of `forward` for each row of a dataset, once and in order, in eval mode.

        All workers must call it.

        Args:
            dataset: The rows.
            collate: As in `steps`.
            model: Another model; by default the trained one.
            path: A file to write: ``.npy`` gets one array whose first dimension is the row, ``.safetensors`` the
                tensors by their names in the output, or as ``output``.

        Returns:
            Without `path`, an iterator of (rows, output) by micro-batch, over which all workers must loop. On the main
            worker `rows` is a range of row numbers and `output` the nested tensors of these rows, on the CPU; other
            workers compute their part and get nothing. With `path`, the path. Memory holds four micro-batches per
            worker.

        Raises:
            UsageError: The outputs are not tensors with a row for each row of the batch.
            CheckpointError: The file cannot be written.
        """
        self._need_open()
        sweep = self._sweep(dataset, collate, model)
        if path is None:
            return iterate_without_script_view(predicted(self._run, sweep))
        list(predicted(self._run, sweep, Path(path)))  # which gives nothing
        return Path(path)

    def _sweep(self, dataset: Any, collate: Callable[[list[Any]], Any] | None, model: nn.Module | None) -> EvalPass:
        check_types(collate=collate)
        micro = self._grid.micro if self._grid else (self.plan.micro or 32)
        collate, options = collate or self._loader.get("collate"), self._loader.get("options", {})
        source = Source.of(dataset, self._seed, collate, None, options)
        undivided = lambda: replace(self._context.current_assignment(), fine=False)  # noqa: E731
        return EvalPass(self._run.team, self._job, model or self.model, source, micro, undivided, self._grid, self._of)

    @without_script_view
    def save(self) -> None:
        """Asks for a checkpoint. All workers must call it.

        In a loop, the checkpoint is taken when the loop asks for its next step, so it contains what the body of the
        loop has changed, and is written while training goes on. Outside of loops it is taken at once, and complete on
        return unless the script uses `step`.

        Raises:
            UsageError: The run has no folder; start it with ``paceline run --run-dir FOLDER``.
        """
        self._need_open()
        self._run.need_team()
        self._run.results.call(self._save)

    def _save(self) -> None:
        run = self._run
        self._together("save()")
        run.checkpoints.ask()
        if not run.script.loops:
            run.save(wait=not run.script.uses_step, must=not run.script.uses_step)
            run.checkpoints.copied()  # what the script changes next must not show

    @without_script_view
    def export(self, path: str | Path) -> None:
        """Writes the weights as safetensors under the model's own names.

        All workers must call it; the file is written once.

        Args:
            path: The file, with the suffix ``.safetensors``.
        """
        self._need_open()
        self._run.need_team()
        if not self.done and not self._run.resume.imported and self._script_settings.is_untrained(self.model):
            why = "the loop that steps() returned was not run" if self.unused_loops else "this process made no step"
            what = f"these weights are not trained: {why}"
            self._reporter.say(f"{what}; write `for report in trainer.steps(...):`", once=True)
        refuse_other_suffix(Path(path))
        write = partial(self._write, Path(path))
        self._run.results.call(lambda: self._run.team.transactions.run(write))

    def _write(self, path: Path) -> None:
        self._group.declare(f"export(){self._of}", kind="export()")
        write_together(model_state(self._job), path, self._reporter.main, self._job.replica, self._group)

    @without_script_view
    def stop(self) -> None:
        """Ends the training when the loop asks for its next step; the run then counts as finished.

        All workers must call it.
        """
        self._need_open()
        self._run.need_team()
        self._run.results.call(partial(self._together, "stop()"))
        self._stopped = True

    @without_script_view
    def load_best(self) -> None:
        """Puts the weights of the best checkpoint that `keep_best` has kept into the model. All workers must call it.

        Raises:
            CheckpointError: There is none, or it cannot be read.
        """
        self._need_open()
        self._run.need_team()
        self._run.results.call(partial(load_best, self._run, self._job, self._number))

    @without_script_view
    def layer_norms(self) -> LayerNorms:
        """Computes the norm of each parameter and of its gradient, the same under any plan. All workers must call it.

        Call it in the body of the loop, for example every 100 steps: it reads all weights and gradients once.

        Returns:
            ``weights`` and ``gradients``, two dicts by the names of the model's trained parameters. Gradients are the
            mean gradients of the last step, before clipping: the square root of the sum of their squares is
            ``report.grad_norm``. Parameters without a gradient are left out of the second dict.

        Raises:
            UsageError: The plan has ``local=`` or ``server=``, under which workers have different gradients.

        Example:
            >>> for report in trainer.steps(data):
            ...     if report.every(100):
            ...         norms = trainer.layer_norms()
            ...         trainer.log(**{f"gradient/{name}": norm for name, norm in norms.gradients.items()})
        """
        self._need_open()
        if word := next((word for word in ("local", "server") if getattr(self.plan, word)), ""):
            what = f"layer_norms() cannot be used with {word}=, where workers have different gradients"
            raise UsageError(what, f"leave {word}= out of the plan")
        self._run.need_team()
        return LayerNorms(*self._run.results.run(partial(layer_norms, self._replica, self._group)))

    def _together(self, name: str) -> None:
        """Enters a collective that all workers call, or none."""
        self._run.need_team()
        self._run.team.transactions.run(partial(self._group.declare, name))

    # -- state --------------------------------------------------------------------------------------------------

    @without_script_view
    def snapshot(self, done: int | None = None) -> dict[str, Any]:
        """Returns the state that further training depends on. For a checkpoint `done` is the number of transactions,
        and this worker's own state is included.
        """
        if self._line is not None and self._line["closed"] is not None:
            return self._line
        for optimizer in self._job.optimizers if not self._looked else ():
            if hidden := hidden_in(optimizer):
                self._reporter.say(f"{hidden}; store them in self.state", once=True)
        self._looked = True
        kept, full_copies = copies_in_pieces(self._state.saved(), self._job)
        if self._line is not None:  # its weights could not be written
            more = {"whole": full_copies} if full_copies else {}
            return {**self._line, "model": model_state(self._job), "state": kept, **more}
        state = self._strategy.state(done)
        if done is not None and not self.save_frozen:
            state["model"] = {name: value for name, value in state["model"].items() if name not in frozen(self.model)}
        return {
            **state,
            "own": {} if done is None else self._replica.error_feedback.state(done),
            "grid": [self._grid.global_batch, self._grid.micro] if self._grid else None,
            "phases": [phase.saved() for phase in self._phases],
            "stopped": self._stopped,
            "state": kept,
            **({"whole": full_copies} if full_copies else {}),
            **self.best.saved(),
            "early_stop": self.stopping.saved(),
            "said": self._script_settings.saved(),
        }

    def continue_journal(self) -> None:
        """Continues the journal after its last step: this worker writes it from now on."""
        self._ledger.go_on_after(self._reporter.journal.last_step(self._number))

    def load_base(self, saved: dict[str, Any]) -> None:
        """Loads a state that is some steps old, ahead of the steps that follow it."""
        if "closed" not in saved:
            self._replica.load(saved)
            self._context.done = saved["steps"]

    def needs(self) -> list[tuple[str, tuple[int, ...]]]:
        """Returns each plan as text, and the bytes that a worker holds under it by category: this trainer's plan, and
        then alternatives with more shards.
        """
        facts, workers = facts_of(self._job), self._run.team.world.size
        plans = [self.plan, *self.plan.in_shards(workers)]
        return [(str(plan), cost(plan, facts, workers).held) for plan in plans]

    def complete_step(self) -> None:
        """Finishes a step after its update: gathers the weights that other workers have updated."""
        if self._line is None:
            self._replica.complete()

    @property
    def job(self) -> ParallelJob:
        """Returns what the trainer trains."""
        return self._job

    @property
    def held_bytes(self) -> int:
        """Returns the bytes that the trainer holds on this worker."""
        return sum(self._strategy.memory().values())

    def measure(self, besides: int) -> list[dict[str, Any]] | None:
        """Returns the predicted and the measured memory and traffic of a step; None before the first step. `besides`
        are the bytes of the process that belong to other trainers.
        """
        if not self.done or self._line is not None:
            return None
        return self._context.figures.measure(self._strategy.memory(), besides)

    def record_measurements(self, reports: list[Any]) -> None:
        """Journals the measurements of all workers for the report."""
        self._context.figures.write(reports)
        self._strategy.end_loop()

    def update_callable_models(self) -> None:
        """Updates the list of models that this trainer's loss may call."""
        self._replica.runner.guard.include_models()

    def mark_copies(self) -> None:
        """Marks the tensors in `trainer.state` that are copies of sharded weights, for the body of a loop."""
        if self.parts:
            mark_copies({key: value for key, (_, value) in self._state.saved().items()}, self._job)

    def apply_step(self, message: list[Any]) -> None:
        """Applies a part of a step that the team made before this newcomer joined."""
        self._context.apply_step(message)

    def restore(self, newcomer: bool) -> None:
        """Loads this trainer's part of the checkpoint, or of the state that another worker handed over. A worker that
        is no newcomer keeps its position in the script and its own values of `trainer.state`.
        """
        trainers = list(self._run.resume.tree["trainers"])
        if self._number >= len(trainers):
            return
        # What is taken is copied, and not held any longer: it may be as large as all the rest. The tree itself may be
        # on its way to another worker.
        saved, trainers[self._number] = SavedFields(trainers[self._number]), {}
        self._run.resume.tree = {**self._run.resume.tree, "trainers": trainers}
        if "steps" not in saved:  # weights from elsewhere, to begin with; or nothing for this trainer
            if "model" in saved:
                job, imported = self._job, self._run.resume.imported
                fits = adopted(self.model, saved["model"], self._number, imported, job.cuts, job.bf16_weights)
                state = {"model": fits}
                if kept := saved.get("imported_optimizers"):
                    state |= adopted_optimizers(job, self._replica.updater.names, kept, self._number, imported)
                    if changed := changed_options(job.optimizers, kept):
                        self._reporter.say(f"the optimizer's options are those of the script: {changed} in the import")
                self._replica.load(state)
            return
        missing = {"model", "phases", "stopped", "state"} - saved.keys()
        if missing and newcomer and "closed" not in saved:
            what = f"the checkpoint holds no {min(missing)} of trainer {self._number}, which has made steps"
            raise CheckpointError(what, "use another checkpoint, or start a new run in another --run-dir")
        checkpoint = f"checkpoint of step {self._run.resume.step} in {self._run.folder.path or 'memory'}"
        origin = f"the {checkpoint}" if self._run.resume.step is not None else "the state that other workers sent"
        with saved.naming(origin, self._number):
            left_out = frozen(self.model).keys() - saved["model"].keys()  # by save_frozen=False
            if newcomer and self._run.resume.step is not None:
                full = {name: value for name, value in model_state(self._job).items() if name in left_out}
                refuse_another_model(self.model, {**full, **saved["model"]}, self._number, checkpoint, self._job.cuts)
            if left_out:
                state = self.model.state_dict(keep_vars=True)
                saved["model"] = {**{name: state[name] for name in left_out}, **saved["model"]}
            if "closed" not in saved:
                load_strategy(self._strategy, saved, newcomer)
            elif newcomer:
                self._go_on_ended(saved)
            if not newcomer:
                return
            self._replica.error_feedback.take(saved.get("own") or {})
            self._seed = self._job.seed = self._script_settings.go_on(saved.get("said"), self._reporter.say)
            self._phases = [LoopState.of(phase) for phase in saved["phases"]]
            self._stopped = saved["stopped"]
            self.best.restore(saved.get("best"), saved.get("next_best") or [])
            self.stopping.restore(saved.get("early_stop"))
        kept = pytree.tree_map_only(torch.Tensor, torch.clone, saved["state"])
        self._state.restore(kept, own_copies(kept, self._job, saved.get("whole") or ()))
        self.mark_copies()
        if saved.get("grid") and self._grid:
            before, now, done = Grid(*saved["grid"]), self._grid, self.done
            self._grid = resumed_grid(before, now, self.plan.micro, done, self._reporter.say)
            self._context.regrid(self._grid, before.global_batch)
