"""What the steps of one trainer share under every plan: the parts that compute them, and state that outlives a step."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import torch

from paceline.base.batching import Agreed, Grid, VectorLayout
from paceline.base.text import links_of
from paceline.compute.grad_noise import EVERY, GradNoiseScale, looked_at
from paceline.compute.job import StepOptions, StepSums
from paceline.compute.loss_scale import LossScale
from paceline.compute.lr_schedules import follow_batch
from paceline.compute.merge_policy import MergePolicy
from paceline.compute.microbatches import MicroBatch
from paceline.compute.rng import RngState
from paceline.data.balance import Balance
from paceline.data.loader import Assignment
from paceline.errors import UsageError
from paceline.parallel.parallel_job import ParallelJob
from paceline.parallel.plan_cost import share_of_sums
from paceline.plan import Plan
from paceline.session.consistency import WeightsComparison
from paceline.session.run import Run
from paceline.session.worker_batch import WorkerBatch
from paceline.train.bit_flips import BitFlips
from paceline.train.replica import Replica
from paceline.train.step import Step
from paceline.train.step_figures import StepFigures
from paceline.train.step_notes import StepNotes
from paceline.train.worker_shares import WorkerShares


class Batches(Protocol):
    """Where the rows of a step come from. `title` names the collectives of a step; ``{}`` in it is the step's number.

    `admits` says whether newcomers may enter the team before a failed attempt at the step is repeated: only in the
    outermost loop, because the script of a newcomer begins with such a step.
    """

    title: str

    @property
    def admits(self) -> bool: ...

    def load(self, ahead: int, assignment: Assignment) -> WorkerBatch | None:
        """Returns this worker's part of the next global batch, or of the one that is `ahead` of it by so many; None if
        there is none. Collective in a new generation.
        """

    def load_other(self, assignment: Assignment, partners: Sequence[int]) -> list[MicroBatch]:
        """Returns the micro-batches of another worker in the next global batch: by rank, `partners` has the worker
        whose micro-batches each worker gets, and the `assignment` is that worker's. Collective.
        """


class StepContext:
    """The parts of one trainer's steps, and the state that goes from one step to the next.

    `done` counts steps. `expected` is the count of the last global batch, by which gradients are divided before the
    present count is known. `group` are the workers who make a step together. `shares` says which micro-batches are this
    worker's, `weights` compares the weights with those of other workers, `scaling` is the loss scale of fp16.
    `contributions` return fields of the step's vector, and `observers` get each step when it has been applied.
    """

    def __init__(
        self,
        run: Run,
        trainer: int,
        job: ParallelJob,
        replica: Replica,
        plan: Plan,
        streams: RngState,
        merging: MergePolicy,
        weights: WeightsComparison,
        grid: Grid | None,
    ) -> None:
        self.reporter = run.reporter
        self.run, self.trainer, self.job, self.replica, self.plan = run, trainer, job, replica, plan
        self.streams, self.merging, self.weights, self.grid = streams, merging, weights, grid
        self.transactions, self.group = run.team.transactions, replica.team
        mesh, balance = replica.mesh, None
        lockstep = not (plan.local or plan.in_windows)
        if grid is not None and lockstep and run.team.world.shares is None and plan.together == 1:
            balance = Balance(grid, self.transactions.members, run.check.reverse or plan.one_by_one, mesh.unit)
        self.shares = WorkerShares(run, trainer, mesh, plan.together, balance)
        self.scaling = LossScale() if plan.precision == "fp16" else None
        self.done, self.expected = 0, 0.0
        self.notes = StepNotes(run, trainer, job)
        self.figures = StepFigures(run, trainer, job, plan)
        self.noise = GradNoiseScale()
        self.bound_generation: int | None = None  # whose group has allocated the memory of gradient sums
        # Returns whether this worker asks the team to stop; None: it does if it got a signal.
        self.stops: Callable[[], bool] | None = None
        self.on_new_generation: Callable[[], None] | None = None  # called after `rebind`, for plans that need more
        self.waiting_since = time.perf_counter()  # when the last step ended
        self.layout: VectorLayout | None = None
        self.update_seconds = 0.0  # seconds of the last update
        self.last_spent: dict[str, float] = {}  # seconds of the last step, by part
        self.kinds = {name: (param.dtype, param.device) for name, param in job.named.items()}  # when it was made
        replica.error_feedback.trainer = trainer
        run.trainers.error_feedback.append(replica.error_feedback)
        if self.transactions.fault_point is not None and not trainer:
            self.transactions.inject_flips(BitFlips(replica).arm)
        # Both are filled by train/step_observers.py.
        self.contributions: list[Callable[[], Mapping[str, float]]] = []
        self.observers: list[Callable[[Step], None]] = []

    def options(self, step: Step) -> StepOptions:
        """Returns the options with which the loaded micro-batches of a step are computed."""
        merge, count = self.merging.size, step.batch.count
        noise_source = ""
        if step.number % EVERY == EVERY - 1:
            noise_source = looked_at(step.number, self.plan, self.replica.mesh.unit, self.group.size, self.job)
        return StepOptions(
            step=step.number,
            expected=(self.expected or float(step.batch.rows)) / step.scale,
            micro_batches=count,
            rows=step.batch.rows,
            noise_sample=noise_source,
            merge=min(merge, -(-count // 2)) if noise_source == "first" else merge,
            test_merging=self.merging.undecided and not self.plan.one_by_one,
            record_buffers=self.group.size > 1 or self.plan.exact,
            check_loss=self.plan.together == 1 and count > 1 and self.replica.mesh.pipeline == 1,
            reverse=self.run.check.reverse,
            hooked="hooks" in self.notes.announced,
            advice=step.batch.cure,
            fault_point=self.transactions.fault_point,
            transaction=0 if self.replica.codec is None else self.transactions.done,
        )

    def note_computed_state(self) -> None:
        """Notes which values of `trainer.state` the loss, the forward or the dataset has changed in a step."""
        for state in self.run.trainers.states:
            if state:
                state.note_changes()

    def restore_state(self) -> None:
        """Restores the values of `trainer.state` that code of a step changes, before the step is computed again."""
        for state in self.run.trainers.states:
            if state:
                state.undo_step()

    # -- a new generation ---------------------------------------------------------------------------------------

    def rebind(self, name: str) -> None:
        """Prepares for the first step of a generation: takes memory from its group, and exchanges what workers know of
        speeds and links. Collective. This waits for the first step, because newcomers make their trainers at other
        times than the other workers, but all make the first step of a generation together.
        """
        operations, group = self.transactions, self.run.team.group
        balance, feedback = self.shares.balance, self.replica.error_feedback
        group.declare(name)
        self.replica.rebind()
        speeds, known = None if balance is None else balance.state(), feedback.known(operations.done)
        common = [group.links, feedback.chosen] if group.rank == 0 else []
        reports = group.gather_json([speeds, self.weights.kind, common, known])
        links, chosen = reports[0][2]
        if new := group.measure(links):
            measured = {"pairs": group.links, "over": group.interface}
            self.run.reporter.journal.write("links", **measured)
            self.run.reporter.say(f"the link between hosts: {links_of(measured)}", once=True)
        # The first worker is the one that has been in the team for the longest time.
        self.shares.reform(operations.members, reports[0][0], self.done)
        self.weights.kinds, self.weights.due = [kind for _, kind, *_ in reports], True
        for text in feedback.formed([known for *_, known in reports], resumed=operations.number == 0):
            self.run.reporter.say(text, once=True)
        if decided := feedback.describe(partial(share_of_sums, self.plan, self.job, group.size)):
            self.run.reporter.decide(self.trainer, *decided)
            self.run.reporter.say(": ".join(decided), once=True)
        if feedback.go_on(chosen, new):
            self.choose_codecs(anew=False)
        self.layout, self.bound_generation, self.update_seconds = None, operations.number, 0.0
        if self.on_new_generation is not None:
            self.on_new_generation()

    def choose_codecs(self, anew: bool) -> None:
        """Chooses the codec of each bucket; `anew` measures them again. Collective."""
        for what, why in self.replica.error_feedback.choose(anew):
            self.run.reporter.decide(self.trainer, what, why)
            self.run.reporter.say(what)

    def current_assignment(self) -> Assignment:
        """Returns the assignment in the present team. Before its first step, the workers' speeds have not been
        exchanged yet, and shares are equal.
        """
        return self.shares.assignment if self.bound_generation == self.transactions.number else self.shares.equal()

    def apply_step(self, message: list[Any]) -> None:
        """Applies a part of a step that the team made before this newcomer joined: one bucket of sums, or the step's
        agreed values.
        """
        if self.bound_generation != self.transactions.number:
            self.rebind("a step before this worker joined")
        if len(message) == 2:
            index, bucket_sum = message
            self.replica.grad_buffers.sums[index].copy_(bucket_sum)
            return
        agreed, norm, expected, records = message
        options = StepOptions(step=self.done, expected=expected, micro_batches=0)
        self.replica.grad_buffers.assign_grads()
        self.replica.update(StepSums(records=records), Agreed(**agreed), options, norm)
        self.done += 1

    # -- state --------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Returns what further steps depend on, for a checkpoint or another worker."""
        scaling = None if self.scaling is None else [self.scaling.scale, self.scaling.good]
        return {**self.replica.state(), "steps": self.done, "expected": self.expected, "scaling": scaling}

    def load_state(self, saved: Mapping[str, Any]) -> None:
        """Loads what `state` returned, possibly under another plan."""
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
        self.shares.set_grid(grid)


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
                f"the script converted the model after creating the Trainer: {name} was {before} and is {now}",
                "convert the model before creating the Trainer, or a copy.deepcopy of it in the loop; for bfloat16 "
                "arithmetic use precision=bf16 in the plan",
            ) from error
