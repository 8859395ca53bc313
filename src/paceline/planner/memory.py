"""Predicts the memory of a worker from a plan and the description of a model, in bytes by category. No torch.

What the process itself takes (the interpreter, torch, its buffers) is not included.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from paceline.base.mesh import AXES
from paceline.parallel.pipeline.schedule import most_in_flight, table
from paceline.plan import CODED_BYTES, Plan
from paceline.planner.compute_time import ComputeTime
from paceline.planner.descriptions import BlockDescription, MachineDescription, ModelDescription, WorkerBytes
from paceline.planner.workload import Stage, Workload

INT8_SAVES = 2 * (3 - 4 / 256)  # bytes for each element, where optimizer_states=int8 keeps Adam's states in 8 bits
CODES = 4.0  # times its gradients' codes that a worker takes to round them: codes of its own and of others, and copies
UNSENT = 6.0  # times its gradients that a worker takes for a codec that leaves most out: residuals, and copies
MOST = 4  # rounds of micro-batches after which a pipeline, other than gpipe, keeps no more of them


@dataclass(frozen=True)
class WorkerMemory:
    """The bytes that a worker holds at most, by category."""

    parameters: float
    gradients: float
    optimizer: float
    activations: float  # in flight
    backward: float  # gradients of activations, while the block with most of them is computed backward

    @property
    def total(self) -> float:
        """All of them."""
        return self.parameters + self.gradients + self.optimizer + self.activations + self.backward


def worker_memory(
    plan: Plan,
    model: ModelDescription,
    machine: MachineDescription,
    workers: int,
    axes: Sequence[str] = AXES,
    held: Sequence[WorkerBytes] = (),
    together: int = 0,
) -> WorkerMemory:
    """Returns the memory of the worker that needs most. `held` are the bytes of parameters, gradients and optimizer
    state at each position of the pipeline, where they are known better than from the description of the model, and
    `together` the rows that are computed together at most, if they are known. Raises PlanError if the plan does not fit
    the workers.
    """
    workload = Workload(plan.validate(workers), model, workers, axes)
    by_worker = [_of_worker(workload, machine, worker, together) for worker in range(workload.mesh.pipeline)]
    for worker, known in enumerate(held):
        kinds = {kind: float(getattr(known, kind)) for kind in ("parameters", "gradients", "optimizer")}
        by_worker[worker] = replace(by_worker[worker], **kinds)
    return max(by_worker, key=lambda memory: memory.total)


def checkpoint_copy(plan: Plan, model: ModelDescription, machine: MachineDescription, workers: int) -> float:
    """Returns the bytes of a worker's copy of its part of a checkpoint, which is written while training goes on. On a
    GPU the copy is in the memory of the host: 0.

    The workers of one host write the checkpoint, or all workers if replicas span hosts.
    """
    if not machine.is_cpu:
        return 0.0
    spans = plan.mesh(workers).replica > machine.workers_per_host
    writers = workers if spans else min(workers, machine.workers_per_host)
    return model.parameters * (model.element_size + _state(plan, model)) / writers


def coding_memory(plan: Plan, model: ModelDescription, gradients: float) -> float:
    """Returns the bytes that a worker takes to sum these bytes of gradients with the plan's codec between hosts."""
    if not plan.codec:
        return 0.0
    coded = CODED_BYTES.get(plan.codec)  # of 256 elements
    return UNSENT * gradients if coded is None else CODES * gradients / model.element_size * coded / 256


def _state(plan: Plan, model: ModelDescription) -> float:
    """Returns the bytes of optimizer state for each element."""
    return model.element_size * model.state - (INT8_SAVES if plan.optimizer_states else 0.0)


def _of_worker(workload: Workload, machine: MachineDescription, worker: int, together: int) -> WorkerMemory:
    """Returns the memory of the worker at this position of the pipeline, from the description of the model."""
    plan, model, blocks = workload.plan, workload.model, workload.blocks_of(worker)
    elements, shards = workload.parameters(blocks), workload.mesh.shard if plan.zero else 1
    largest = max((workload.parameters_of(block) for block, _ in blocks), default=0.0)
    sharded, gathered, staged = elements, 0.0, 0.0
    if plan.zero in (2, 3):  # zero 3 gathers one block at a time; gradients are scattered block by block
        sharded, gathered, staged = elements / shards, elements if plan.zero == 2 else largest, largest
    parameters = (sharded + gathered) * model.element_size
    gradients = (sharded + staged) * workload.gradient_size
    optimizer = 0.0 if plan.server else elements / shards * _state(plan, model)
    if plan.local:  # the round's start, the weights of the island, and their merge; states before and after; momentum
        momentum = 0.0 if (plan.outer or "").startswith("sgd") else sharded * model.element_size
        parameters += 3 * sharded * model.element_size
        optimizer = 2 * optimizer + momentum
    compute = ComputeTime(workload, machine)
    rows = together or compute.most_together()
    backward = max((compute.saved(block, rows) for block, _ in blocks), default=0.0)
    activations = _in_flight(workload, worker) * _kept(workload, compute, blocks, rows)
    # Of recomputed blocks, one at a time has all of its activations.
    activations += backward if plan.recompute else 0.0
    return WorkerMemory(parameters, gradients, optimizer, activations, backward)


def _in_flight(workload: Workload, worker: int) -> float:
    """Returns how many micro-batches have activations on a worker at most, as a mean over its stages."""
    size = workload.mesh.pipeline
    if size == 1:
        return 1.0
    rows = table(workload.plan.stage_order, size, workload.virtual, min(workload.forwards, MOST * size))
    in_flight = most_in_flight(rows[worker]) / workload.virtual
    return max(in_flight, workload.forwards) if workload.plan.stage_order == "gpipe" else in_flight


def _kept(workload: Workload, compute: ComputeTime, blocks: Stage, rows: int) -> float:
    """Returns the bytes of activations that a micro-batch of `rows` rows keeps from its forward until its backward."""
    if not workload.plan.recompute:
        return sum(count * compute.saved(block, rows) for block, count in blocks)
    return sum(count * _input(workload, block, rows) for block, count in blocks)


def _input(workload: Workload, block: BlockDescription, rows: float) -> float:
    """Returns the bytes of a block's input, which recomputation keeps."""
    divided = workload.mesh.context * (workload.mesh.tensor if workload.model.sequence_parallel else 1)
    return block.passes * workload.activation_scale * rows / divided
