"""One copy of the model on this worker: gradients, their reduction, update and state."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from paceline.base.batching import Agreed, exact_sum
from paceline.base.mesh import Mesh
from paceline.base.sharding import ShardedTensor, ShardingSpec, counting
from paceline.comm.bucket_reducer import BucketReducer, ReduceStep, StageInputs
from paceline.comm.communicator import Group
from paceline.comm.compression import Codec
from paceline.comm.error_feedback import ErrorFeedback
from paceline.comm.shared_memory import give_back
from paceline.comm.transport import release_memory
from paceline.comm.user_collectives import refusing
from paceline.compute.cached_loss import GradCache
from paceline.compute.forward_backward import Runner
from paceline.compute.grad_noise import squares
from paceline.compute.job import StepOptions, StepSums
from paceline.compute.microbatch_merging import USERS_OWN
from paceline.compute.microbatches import MicroBatch
from paceline.compute.optimizer_update import OptimizerUpdate
from paceline.compute.sparse_grads import add_up, rows_of
from paceline.compute.state_dict import held, load_model, model_state
from paceline.parallel.layout import Layout
from paceline.parallel.parallel_job import ParallelJob
from paceline.parallel.pipeline.runner import PipelineRunner
from paceline.parallel.pipeline.stage import Pipeline


def mean_norm(squares: Sequence[float], agreed: Agreed, options: StepOptions) -> float:
    """The norm of the mean gradient, of the squares of its sums; 0 where nothing counts, and so nothing is applied."""
    return math.sqrt(exact_sum(squares)) * options.expected / agreed.count if agreed.count > 0 else 0.0


class Replica:
    """A step is `run`, `agree`, `norm`, `update`, `complete`; until `update` it can be `abort`ed. `group` are all
    workers, of whom a `team` makes a step, if not all together; `outer` are those that hold equal parts, whose
    gradients are summed, between hosts with the `codec`.
    """

    def __init__(
        self,
        job: ParallelJob,
        layout: Layout,
        group: Group,
        outer: Group,
        mesh: Mesh,
        pipeline: Pipeline | None = None,
        codec: Codec | None = None,
        team: Group | None = None,
    ) -> None:
        self.mesh = mesh
        self.job, self.layout, self.team, self.outer = job, layout, team or group, outer
        layout.own()
        self.landing = layout.land()
        self.home = self.landing.home
        made = (job, self.landing, layout.gathers)
        self.runner = Runner(*made) if pipeline is None else PipelineRunner(pipeline, *made)
        self.over = None if job.over is None else GradCache(self.runner)
        self.updater = OptimizerUpdate(job, self.home)
        whole = partial(ShardingSpec.whole, places=mesh.replica)
        cuts = {
            name: job.own_cuts.get(name) or whole(param.shape) for name, param in [*job.own.items()][: len(job.dense)]
        }
        self._counted = counting([*cuts.values()], job.place)
        self.home.elements = [math.prod(cut.shape) for cut in cuts.values()]
        self.transit = BucketReducer(self.team, [*layout.route, ReduceStep("sum", outer)], codec)
        self.codec, self.own = codec, ErrorFeedback(codec, group, outer, mesh, self.home, cuts)

    def use_full_parameters(self) -> None:
        """The optimizers that will be built are to hold whole parameters, of which others have the rest."""
        assert self.job.replica is not None
        self.updater.use_full_parameters(self.job.replica)

    def build(self, optimizers: list[Optimizer], schedulers: list[LRScheduler]) -> None:
        """Takes the optimizers over, made for the trainable parameters of the model as it lives here."""
        self.updater.build(optimizers, schedulers)
        if self.mesh.replica > 1:  # the model was made part by part, and as much was freed
            give_back()

    def rehouse(self) -> None:
        """Takes fresh memory from the present generation. Collective."""
        if self.layout.allocate is not None:
            self.landing.rehouse(self.layout.allocate)

    def release(self) -> None:
        """Gives back the memory and the hooks of gradients: no further step comes."""
        release_memory(self.landing.release())

    # -- a step -----------------------------------------------------------------------------------------------------

    def run(
        self, micro_batches: Sequence[MicroBatch], options: StepOptions, heard: StageInputs | None = None
    ) -> StepSums:
        """Forward and backward over this worker's micro-batches, whose sums are on their way then. `heard` is told of
        each bucket that has arrived.
        """
        name, job = f"step {options.step + 1}", self.job
        if self.codec is not None:
            self.codec.begin(options.turn, options.expected)
        self.transit.begin(name, heard)
        with self.layout.running(name), refusing("the loss, the forward or a hook"):
            sums = (self.over or self.runner).run(micro_batches, options, self.transit.send)
        self.transit.hand_on()
        if job.sparse:
            first = len(job.dense)
            sums.unused |= {first + number for number, param in enumerate(job.in_rows) if param.grad is None}
        return sums

    def try_forward(self, micro_batch: MicroBatch, options: StepOptions) -> None:
        """Runs the forward of a micro-batch, of which no trace is left. Raises UsageError where it has a single row
        and BatchNorm needs more; what else fails may do so only here, and is passed over.
        """
        try:
            with self.layout.running(f"step {options.step + 1}"), suppress(*USERS_OWN):
                self.runner.outputs([micro_batch], options)
        finally:
            self.runner.restore(void=True)

    def agree(self, vector: torch.Tensor, sums: StepSums, options: StepOptions) -> torch.Tensor:
        """Sums the step's vector over all workers; returns when all sums of the step have arrived."""
        small = vector if sums.records is None else torch.cat([vector.to(sums.records), sums.records])
        work = self.team.start_sum(small)
        self.transit.finish()
        options.reached("summed")
        self.team.finish(work)
        if self.job.sparse:
            self.add_up_rows(options)
        if sums.records is not None:
            vector, sums.records = small[: len(vector)], small[len(vector) :]
        if sums.maxima is not None:
            sums.redo = not self.home.settle(self.team.largest(sums.maxima))
        self.own.add(options.expected)
        return vector

    def add_up_rows(self, options: StepOptions) -> None:
        """Makes gradients in rows the sums over all. Collective."""
        self.outer.enter(f"rows of step {options.step + 1}", check=False, kind="rows")
        add_up(self.job.in_rows, self.outer)

    def norm(self, agreed: Agreed, options: StepOptions) -> float:
        """Of the mean gradient, the same on every worker; 0 where nothing counts. Changes nothing. Collective."""
        squares = self.squares(options)
        replica = self.job.replica
        if replica is not None and replica.size > 1:
            replica.enter(f"the norm of step {options.step + 1}", check=False, kind="gradients")
            replica.sum(squares)
        return mean_norm(squares.tolist(), agreed, options)

    def squares(self, options: StepOptions) -> torch.Tensor:
        """Of the gradients that count here, in float64 numbers whose sum it is."""
        alike = self._counted is None and self.mesh.context == 1 and not self.own.owed  # on all who have summed
        known = self.transit.squares() if alike and not self.job.exact else None
        if known is not None and math.isfinite(known):  # the squares of a float32 overflow before its norm
            found = torch.tensor([known], dtype=torch.float64)
        else:
            found = self.home.squares(options.micro_batches, self._counted, changed=not alike)
        return torch.cat([found, found.new_tensor([squares(rows_of(self.job.in_rows))])]) if self.job.sparse else found

    def update(self, sums: StepSums, agreed: Agreed, options: StepOptions, norm: float) -> None:
        """Changes the weights; `norm` is that of the mean gradient, for clipping."""
        self.runner.carried.merge(sums.records)
        if agreed.count <= 0:  # what was sent is not used: codecs and `owed` keep what they have
            if self.codec is not None:
                self.codec.kept.void()
            self.updater.apply(agreed, options, norm)
            return
        if self.own.owed or self.own.differs:
            agreed = replace(agreed, unused=self.own.unused(agreed.unused))
        self.updater.apply(agreed, options, norm)
        self.own.owed = {}

    def complete(self) -> None:
        """After an update, and in a new generation: brings what of the weights others have updated. Collective."""
        self.layout.complete()

    def abort(self, again: bool = False) -> None:
        """Voids a step before its update: nothing of it may remain, unless the same workers begin it `again`."""
        self.transit.abandon()
        self.runner.restore(void=True)
        self.landing.abandon(again)
        self.layout.rest()

    # -- a step of others -------------------------------------------------------------------------------------------

    def follow(self, sums: StepSums, agreed: Agreed, options: StepOptions, norm: float) -> None:
        """Updates with what was written into `sums`."""
        self.home.adopt()
        self.update(sums, agreed, options, norm)

    # -- state ------------------------------------------------------------------------------------------------------

    def memory(self) -> dict[str, int]:
        """The bytes of parameters (and buffers), gradients and optimizer that this worker holds in a step, at most."""
        model = self.job.model
        weights = held([*model.parameters(), *model.buffers(), *self.updater.params]) + self.layout.gathered()
        gradients = self.landing.memory() + held(rows_of(self.job.in_rows))
        return {"parameters": weights, "gradients": gradients, "optimizer": self.updater.memory()}

    def state(self) -> dict[str, Any]:
        """Everything that the next step depends on, by logical names."""
        job = self.job
        owed = {
            name: ShardedTensor(tensor, self.own.cuts[name], job.place) for name, tensor in self.own.shared().items()
        }
        return {"model": model_state(job), **self.updater.state(), "owed": owed, "chosen": self.own.chosen}

    def load(self, state: Mapping[str, Any]) -> None:
        load_model(self.job.model, state["model"], self.job.cuts, self.job.place)
        if "optimizers" in state:  # else weights from elsewhere, to begin with
            self.updater.load(state)
            self.own.load(state.get("owed") or {})
            self.own.chosen = state.get("chosen") or {}
