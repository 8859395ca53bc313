"""One copy of the model on this worker: gradients, their reduction and global norm, update and state."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from paceline.base.batching import Agreed, exact_sum
from paceline.base.heartbeat import HEARTBEAT
from paceline.base.mesh import Mesh
from paceline.base.sharding import ShardedTensor, ShardingSpec, counting
from paceline.comm.bucket_reducer import BucketReducer, OnReduced, ReduceStep
from paceline.comm.communicator import Group
from paceline.comm.compression import Codec
from paceline.comm.error_feedback import ErrorFeedback
from paceline.comm.shared_memory import give_back
from paceline.comm.transport import release_memory
from paceline.comm.user_collectives import refusing
from paceline.compute.cached_loss import GradCache
from paceline.compute.forward_backward import Ready, Runner
from paceline.compute.grad_noise import squares
from paceline.compute.job import StepOptions, StepSums
from paceline.compute.microbatch_merging import USERS_OWN
from paceline.compute.microbatches import MicroBatch
from paceline.compute.optimizer_update import OptimizerUpdate
from paceline.compute.sparse_grads import add_up, rows_of
from paceline.compute.state_dict import held, load_model, model_state, with_masters
from paceline.parallel.layout import Layout
from paceline.parallel.parallel_job import ParallelJob
from paceline.parallel.pipeline.runner import PipelineRunner
from paceline.parallel.pipeline.stage import Pipeline
from paceline.train.layer_norms import Norms, gradient_norms


def mean_norm(squares: Sequence[float], agreed: Agreed, options: StepOptions) -> float:
    """Returns the norm of the mean gradient from the squares of its sums; 0 if no row counts: nothing is applied."""
    return math.sqrt(exact_sum(squares)) * options.expected / agreed.count if agreed.count > 0 else 0.0


class Replica:
    """This worker's copy or part of the model. A step calls `run`, `agree`, `norm`, `update` and `complete`, in this
    order; until `update` it can be undone by `abort`. `group` are all workers, and `team` those that make a step
    together. `outer` are the workers with the same shard, over which gradients are summed; between hosts the `codec`
    compresses them. `counted` has the blocks of each dense parameter that this worker counts in norms; None: all that
    it holds.
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
        layout.select_local_params()
        self.grad_sink = layout.make_grad_sink()
        self.grad_buffers = self.grad_sink.grad_buffers
        made = (job, self.grad_sink, layout.gathers)
        self.runner = Runner(*made) if pipeline is None else PipelineRunner(pipeline, *made)
        self.over = None if job.over is None else GradCache(self.runner)
        self.updater = OptimizerUpdate(job, self.grad_buffers)
        full_spec = partial(ShardingSpec.unsharded, shards=mesh.replica)
        cuts = {
            name: job.local_cuts.get(name) or full_spec(param.shape)
            for name, param in [*job.local_params.items()][: len(job.dense)]
        }
        self.counted = counting([*cuts.values()], job.shard_index)
        if self.grad_buffers.exact is not None:
            self.grad_buffers.exact.elements = [math.prod(cut.shape) for cut in cuts.values()]
        self.grad_norms: Norms | None = None  # of the last step, if its gradients are gone
        # Gradients of parameters that are not divided along `expert` are first summed along it.
        self._inner = [group.subgroup("expert", mesh=mesh)] if mesh.expert > 1 else []
        inner_steps = [ReduceStep("sum", among, of_shared=True) for among in self._inner]
        reducer = BucketReducer(self.team, [*layout.route, *inner_steps, ReduceStep("sum", outer)], codec)
        self.reducer = reducer if layout.allocate is not None else None  # else gradients stay in place: no buckets
        self.send_bucket: Ready = reducer.send
        self.codec, self.error_feedback = codec, ErrorFeedback(codec, group, outer, mesh, self.grad_buffers, cuts)

    def use_full_parameters(self, owned: Collection[str] | None) -> None:
        """Lets the optimizers hold full parameters, though this worker stores only shards of them: the `owned` ones on
        one worker each, or all of them on each worker.
        """
        assert self.job.replica is not None
        if owned is None:
            self.updater.use_full_parameters(self.job.replica)
        else:
            self.updater.assign_owners(owned, self.job.replica)

    def build(self, optimizers: list[Optimizer], schedulers: list[LRScheduler]) -> None:
        """Takes the optimizers and schedulers, made for the trainable parameters that this worker holds."""
        self.updater.build(optimizers, schedulers)
        if self.mesh.replica > 1:  # making the model part by part has freed much memory
            give_back()

    def rebind(self) -> None:
        """Takes memory for gradients from the present generation. Collective."""
        self.updater.has_gradients = False
        if self.layout.allocate is not None:
            self.grad_sink.rebind(self.layout.allocate)

    def release(self) -> None:
        """Frees the memory and the hooks of gradients after the last step."""
        release_memory(self.grad_sink.release())

    # -- a step -----------------------------------------------------------------------------------------------------

    def run(
        self, micro_batches: Sequence[MicroBatch], options: StepOptions, on_reduced: OnReduced | None = None
    ) -> StepSums:
        """Runs forward and backward over this worker's micro-batches and begins to reduce the gradients. `on_reduced`
        is called with each bucket that is reduced.
        """
        if self.codec is not None:
            self.codec.begin(options.transaction, options.expected)
        if self.reducer is not None:
            self.reducer.begin(f"step {options.step + 1}", on_reduced)
        sums = compute(self, micro_batches, options, self.send_bucket)
        if self.reducer is not None:
            self.reducer.hand_on()
        return sums

    def try_forward(self, micro_batch: MicroBatch, options: StepOptions) -> None:
        """Runs the forward of a micro-batch and undoes all its effects. Raises UsageError if it has a single row and
        BatchNorm needs more. Other errors are ignored, since they may occur only in this trial.
        """
        try:
            with self.layout.running(f"step {options.step + 1}"), suppress(*USERS_OWN):
                self.runner.outputs([micro_batch], options)
        finally:
            self.runner.restore(void=True)

    def agree(self, vector: torch.Tensor, sums: StepSums, options: StepOptions) -> torch.Tensor:
        """Sums the step's vector over all workers. Returns it when all gradients of the step are reduced."""
        small = vector if sums.records is None else torch.cat([vector.to(sums.records), sums.records])
        if self.team.size > 1 or self.reducer is not None:
            HEARTBEAT.wait(1)  # also where NCCL waits
            try:
                self._sum(small, options)
            finally:
                HEARTBEAT.wait(-1)
        elif options.fault_point is not None:
            options.fault_point("summed")
        if self.job.sparse:
            self._add_up_rows(options)
        if sums.records is not None:
            vector, sums.records = small[: len(vector)], small[len(vector) :]
        if (exact := self.grad_buffers.exact) is not None:
            sums.sums_overflowed = not exact.resolve(self.team.largest(exact.maxima))
        if self.error_feedback.pending_residual:
            self.error_feedback.add(options.expected)
        return vector

    def _sum(self, small: torch.Tensor, options: StepOptions) -> None:
        """Sums a small tensor over all workers, behind the gradients of the step."""
        work = self.team.start_sum(small) if self.reducer is None else self.reducer.start_last(small)
        if self.reducer is not None:
            self.reducer.finish()
        if options.fault_point is not None:
            options.fault_point("summed")
        self.team.finish(work)

    def _add_up_rows(self, options: StepOptions) -> None:
        """Sums sparse gradients over all workers. Collective."""
        for among in (*self._inner, self.outer):
            among.declare(f"rows of step {options.step + 1}", check=False, kind="rows")
            add_up(self.job.in_rows, among)

    def norm(self, agreed: Agreed, options: StepOptions) -> float:
        """Returns the norm of the mean gradient, the same on every worker; 0 if no row counts. Changes nothing.
        Collective.
        """
        squares = self.squares(options)
        replica = self.job.replica
        if replica is not None and replica.size > 1:
            replica.declare(f"the norm of step {options.step + 1}", check=False, kind="gradients")
            replica.sum(squares)
        return mean_norm(squares.tolist(), agreed, options)

    def squares(self, options: StepOptions) -> torch.Tensor:
        """Returns float64 numbers whose sum is the square of the norm of the gradients that this worker counts."""
        equal_on_all = self.counted is None and self.mesh.context == 1 and not self.error_feedback.pending_residual
        known = self.reducer.squares() if self.reducer is not None and equal_on_all and not self.job.exact else None
        if known is not None and math.isfinite(known):  # the squares of a float32 overflow before its norm
            total = torch.tensor([known], dtype=torch.float64)
        else:
            total = self.grad_buffers.squares(options.micro_batches, self.counted, changed=not equal_on_all)
        return torch.cat([total, total.new_tensor([squares(rows_of(self.job.in_rows))])]) if self.job.sparse else total

    def update(self, sums: StepSums, agreed: Agreed, options: StepOptions, norm: float) -> None:
        """Updates the weights. `norm` is that of the mean gradient, for clipping."""
        if not self.runner.guard.carried.is_empty:
            self.runner.guard.carried.merge(sums.records)
        counts, feedback, params = agreed.count > 0, self.error_feedback, self.grad_buffers.local_params
        if not counts and self.codec is not None:  # the sums are not used, so codecs keep their former residuals
            self.codec.feedback.void()
        if counts and agreed.unused and (feedback.pending_residual or feedback.differs):  # residuals may be gradients
            unused = [number for number in agreed.unused if (grad := params[number].grad) is None or not grad.any()]
            agreed = replace(agreed, unused=tuple(unused))
        self.updater.apply(agreed, options, norm)
        if counts:
            feedback.pending_residual = {}

    def complete(self) -> None:
        """Gathers the weights that other workers have updated, after an update and in a new generation. Collective."""
        self.grad_norms = gradient_norms(self) if self.layout.overwrites_gradients else None
        self.layout.complete()

    def abort(self, again: bool = False) -> None:
        """Undoes a step before its update. With `again` the same workers repeat it."""
        if self.reducer is not None:
            self.reducer.abandon()
        self.runner.restore(void=True)
        self.grad_sink.abandon(again)
        self.layout.rest()

    # -- state ------------------------------------------------------------------------------------------------------

    def memory(self) -> dict[str, int]:
        """Returns the largest number of bytes of parameters (and buffers), gradients and optimizer state in a step."""
        model = self.job.model
        tensors = [*model.parameters(), *model.buffers(), *self.updater.params, *self.job.masters.values()]
        weights = held(tensors) + self.layout.gathered()
        gradients = self.grad_sink.memory() + held(rows_of(self.job.in_rows))
        return {"parameters": weights, "gradients": gradients, "optimizer": self.updater.memory()}

    def state(self) -> dict[str, Any]:
        """Returns all state that the next step depends on, by logical names."""
        job = self.job
        feedback = self.error_feedback
        owed = {n: ShardedTensor(t, feedback.cuts[n], job.shard_index) for n, t in feedback.shared().items()}
        return {"model": model_state(job), **self.updater.state(), "owed": owed, "chosen": feedback.chosen}

    def load(self, state: Mapping[str, Any]) -> None:
        """Loads what `state` returned. Weights from elsewhere come without optimizers."""
        job = self.job
        model = state["model"] if job.masters else with_masters(job.model, job.named, state)
        load_model(job.model, model, job.cuts, job.shard_index)
        self.updater.load_masters({**state["model"], **(state.get("masters") or {})})
        if "optimizers" in state:  # else weights from elsewhere, to begin with
            self.updater.load(state)
            self.error_feedback.load(state.get("owed") or {})
            self.error_feedback.chosen = state.get("chosen") or {}


def compute(replica: Replica, micro_batches: Sequence[MicroBatch], options: StepOptions, ready: Ready) -> StepSums:
    """Runs forward and backward over micro-batches on this worker's part of the model. `ready` is called with each
    complete bucket, if there are buckets; nothing is sent to other replicas.
    """
    guard, job = replica.runner.guard, replica.job
    was_idle, is_undisturbed = guard.idle, False
    guard.outside = guard.streams.snapshot()
    try:
        with replica.layout.running(f"step {options.step + 1}"), refusing("the loss, the forward or a hook"):
            sums = (replica.over or replica.runner).run(micro_batches, options, ready)
        is_undisturbed = was_idle and guard.idle
    finally:
        if not is_undisturbed:
            guard.restore_streams()
    if job.sparse:
        first = len(job.dense)
        sums.unused |= {first + number for number, param in enumerate(job.in_rows) if param.grad is None}
    return sums
