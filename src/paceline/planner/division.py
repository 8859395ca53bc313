"""Predicts what a plan makes workers hold and send: one worker divides the model as a run does, without memory."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, cast

import torch
from torch import nn

from paceline.base.batching import Grid
from paceline.base.mesh import Mesh
from paceline.build import divide_model
from paceline.comm.communicator import Group, refusing_collectives
from paceline.compute.blocks import blocks_of, summarize_blocks
from paceline.compute.microbatch_merging import USERS_OWN
from paceline.compute.microbatches import MicroBatch
from paceline.compute.model_flops import copied
from paceline.errors import UsageError
from paceline.parallel.cost_model import Facts
from paceline.parallel.parallel_job import ParallelJob
from paceline.parallel.pipeline.partition import StagePartition, divide
from paceline.parallel.pipeline.schedule import most_in_flight, stages_of, table, worker_of
from paceline.parallel.pipeline.stage import HEAD, shared_bytes
from paceline.parallel.plan_cost import cost, facts_of
from paceline.plan import Plan
from paceline.planner.block_probe import BlockFigures
from paceline.planner.descriptions import WorkerBytes
from paceline.planner.dry_run import CountingGroup, Messages, count_messages, time_forward_backward

_INSIDE = "tensor", "context", "recompute", "tiles", "precision"  # words on which messages inside blocks depend


@dataclass(frozen=True)
class _Share:
    """What a plan gives the unit that has most to do."""

    plan: Plan
    mesh: Mesh
    stages: StagePartition
    forwards: int  # micro-batches of a step
    rows: int  # of these

    @cached_property
    def kind(self) -> tuple[str, int, int]:
        """The schedule, the workers of a pipeline, and the stages of each."""
        return self.plan.stage_order, self.mesh.pipeline, self.plan.virtual or 1

    def stages_of(self, position: int) -> list[int]:
        """Returns the stages of the worker at this position of the pipeline."""
        return stages_of(*self.kind, position)

    def worker_of(self, stage: int) -> int:
        """Returns the position of the worker that has a stage."""
        return worker_of(*self.kind[:2], stage)

    def blocks_of(self, position: int) -> list[int]:
        """Returns the numbers of the blocks of the worker at this position."""
        return [number for stage in self.stages_of(position) for number in self.stages.blocks_of(stage)]


class Division:
    """Divides the model of a `job`, which is not trained, for global batches of `rows` rows.

    `figures` are those of the blocks with these `names` for a `micro_batch`.
    """

    def __init__(
        self,
        job: ParallelJob,
        micro_batch: MicroBatch,
        rows: int,
        names: Sequence[str],
        figures: Sequence[BlockFigures],
    ) -> None:
        self._job, self._micro_batch, self._rows = job, micro_batch, rows
        self._names, self._figures = [*names], [*figures]
        self._jobs: dict[tuple[int, int], ParallelJob] = {}
        self._facts: dict[tuple[Any, ...], Facts] = {}
        self._messages: dict[tuple[Any, ...], Messages] = {}

    def bytes_of(self, plan: Plan, workers: int) -> tuple[WorkerBytes, ...]:
        """Returns the bytes of a worker at each position of the pipeline, under a valid plan. Raises UsageError if the
        model cannot be divided so.
        """
        mesh = plan.mesh(workers)
        job = self._divided(mesh.tensor, mesh.expert)
        micro = Grid.of(self._rows, plan.micro).micro
        micro_batches = -(-self._rows // micro)
        forwards = -(-micro_batches // mesh.units)
        rows = self._rows if mesh.units == 1 else min(self._rows, forwards * micro)
        share = _Share(plan, mesh, self.stages(plan, mesh), forwards, rows)
        messages = self._messages_of(plan, mesh)
        schedule = table(*share.kind, forwards)
        result = []
        for position in range(mesh.pipeline):
            figures = cost(plan, self._facts_of(job, share, position), workers, forwards)
            sent = Counter(figures.sent)
            for number in share.blocks_of(position):
                sent.update(self._inside(share, number, messages))
            if mesh.pipeline > 1:
                sent.update(self._handed_on(share, position, messages))
                sent.update(self._of_shared(job, share, position, messages))
            sizes = figures.parameters, figures.gradients, figures.optimizer
            result.append(WorkerBytes(*sizes, {k: n for k, n in sent.items() if n}, most_in_flight(schedule[position])))
        return tuple(result)

    def stages(self, plan: Plan, mesh: Mesh) -> StagePartition:
        """Returns the stages of a plan. Raises UsageError if the model has too few blocks."""
        if mesh.pipeline == 1:
            return StagePartition(tuple(self._names), (0,))
        count = mesh.pipeline * (plan.virtual or 1)
        return divide(self._job.model, count, mesh.pipeline, self._job.requested_split[1])

    def stage_blocks(self, plan: Plan, workers: int) -> tuple[tuple[str, int], ...]:
        """Returns the names of the blocks of each stage, and how many they are."""
        mesh = plan.mesh(workers)
        if mesh.pipeline == 1:
            return ((summarize_blocks(blocks_of(self._job.model)), len(self._names)),)
        stages = self.stages(plan, mesh)
        return tuple((stages.describe(stage), len(stages.blocks_of(stage))) for stage in range(stages.count))

    def seconds_of(self, tensor: int, context: int) -> float:
        """Returns the seconds in which a worker computes a forward and backward of the micro-batch with layers and
        sequences that are divided so; 0 if that is refused or fails. Parameters get memory and values meanwhile.
        """
        kind = Plan(tensor=tensor, context=context)
        try:
            with refusing_collectives():
                job = self._without_values(kind, Counter(), _apart)
                for param in job.model.parameters():
                    param.data = torch.full(param.shape, 0.01, dtype=param.dtype, device=param.device)
                return time_forward_backward(job, self._micro_batch)
        except (UsageError, *USERS_OWN):
            return 0.0

    # -- what is held -----------------------------------------------------------------------------------------------

    def _divided(self, tensor: int, expert: int) -> ParallelJob:
        """Returns the job with parameters as a worker has them before they are sharded, without values."""
        if (tensor, expert) not in self._jobs:
            plan = Plan(tensor=tensor, expert=expert)
            self._jobs[tensor, expert] = self._without_values(plan, Counter(), _empty)
        return self._jobs[tensor, expert]

    def _without_values(
        self, plan: Plan, ledger: Counter[str], make: Callable[[torch.Tensor], torch.Tensor]
    ) -> ParallelJob:
        """Returns a copy of the job whose model is divided by a plan, for messages that a `ledger` counts. `make`
        copies the model's tensors.
        """
        job, mesh = self._job, plan.mesh(plan.mesh(1).replica)
        model = copied(job.model, make)
        named = {name: param for name, param in model.named_parameters() if name in job.named}
        loss = job.loss if job.over is None else lambda output, batch: job.over(output, None)  # type: ignore[misc]
        made = ParallelJob(
            model,
            job.script_forward,
            loss,
            job.device,
            job.seed,
            precision=plan.precision or job.precision,
            optimizer_states=job.optimizer_states,
            optimizers=job.optimizers,
            named=named,
            sparse=job.sparse,
            trains=False,
            requested_split=job.requested_split,
        )
        divide_model(plan, made, cast(Group, CountingGroup(mesh.replica, ledger)), mesh, *job.requested_split)
        return made

    def _facts_of(self, job: ParallelJob, share: _Share, position: int) -> Facts:
        """Returns the facts of the parameters that the worker at this position of the pipeline has."""
        mesh = share.mesh
        key = mesh.tensor, mesh.expert, share.stages.starts, share.kind, position
        if key not in self._facts:
            local, homes = {*share.stages_of(position)}, share.stages.homes(job.model)
            local_params = {name: p for name, p in job.model.named_parameters() if {*homes[id(p)]} & local}
            facts = facts_of(replace(job, named={name: p for name, p in job.named.items() if name in local_params}))
            frozen = sum(p.nbytes for p in local_params.values() if not p.requires_grad)
            buffers = sum(buffer.nbytes for buffer in job.model.buffers())
            self._facts[key] = replace(facts, other_bytes=frozen + buffers, inside={}, ends={})
        return self._facts[key]

    # -- what is sent -----------------------------------------------------------------------------------------------

    def _messages_of(self, plan: Plan, mesh: Mesh) -> Messages:
        """Returns what is sent inside blocks in a micro-batch; nothing, if that is not known."""
        key = tuple(getattr(plan, name) for name in _INSIDE)
        if mesh.tensor * mesh.context == 1:
            return Messages.of(len(self._names))
        if key not in self._messages:
            ledger: Counter[str] = Counter()
            words = dict(zip(_INSIDE, key, strict=True))
            with refusing_collectives():
                job = self._without_values(Plan(**words), ledger, _empty)
                try:
                    self._messages[key] = count_messages(job, self._micro_batch, self._names, ledger)
                except USERS_OWN:  # the script's code needs values
                    self._messages[key] = Messages.of(len(self._names))
        return self._messages[key]

    def _times(self, share: _Share, sent: Mapping[str, int]) -> Counter[str]:
        """Returns the bytes of a step from those of the measured micro-batch."""
        return Counter({kind: round(size * share.rows / self._micro_batch.rows) for kind, size in sent.items()})

    def _inside(self, share: _Share, number: int, messages: Messages) -> Counter[str]:
        """Returns the bytes that a worker sends inside a block in a step."""
        sent, mesh = messages.blocks[number].copy(), share.mesh
        if mesh.expert > 1:  # tokens are taken to go to all experts alike
            away = (mesh.expert - 1) / mesh.expert / mesh.tensor
            passes = 3 if share.plan.recompute else 2  # forwards and backwards
            sent["expert"] += round(passes * self._figures[number].routed * away)
        return self._times(share, sent)

    def _handed_on(self, share: _Share, position: int, messages: Messages) -> Counter[str]:
        """Returns the bytes that a worker sends in a step for values between stages. These are full tensors: shards
        are gathered before, and gradients of what was received are summed.
        """
        sent, last, context = Counter[str](), share.stages.count - 1, share.mesh.context
        for stage in share.stages_of(position):
            after, before = share.stages.blocks_of(stage)[-1], share.stages.blocks_of(stage)[0] - 1
            if stage < last:
                size = self._figures[after].passes
                if share.worker_of(stage + 1) != position:
                    sent["pipeline"] += size
                    sent["headers"] += self._header(after)
                sent["context"] += size // context if context > 1 else 0
                sent["tensor"] += messages.shards[after + 1]
            if stage:
                size = self._figures[before].passes
                sent["pipeline"] += size if share.worker_of(stage - 1) != position else 0
                sent["context"] += size if context > 1 else 0
                sent["tensor"] += messages.fulls[before + 1]
        headers = share.forwards * sent.pop("headers", 0)
        sent = self._times(share, sent)
        sent["pipeline"] += headers
        return sent

    def _of_shared(self, job: ParallelJob, share: _Share, position: int, messages: Messages) -> Counter[str]:
        """Returns the bytes that a worker sends in a step since other stages have the same parameters: gradients, and
        what the code before the first block sends on a later stage that has its parameters.
        """
        homes = share.stages.homes(job.model)
        held = {name: {*map(share.worker_of, homes[id(p)])} for name, p in job.named.items()}
        sent = Counter({"pipeline": sum(shared_bytes(job.named[name], held[name], position) for name in held)})
        first = share.worker_of(0)
        if position != first and any({first, position} <= held[name] for name in held if name in job.in_shards):
            sent.update(self._times(share, messages.before))
        return sent

    def _header(self, number: int) -> int:
        """Returns the bytes of the header of a message behind this block: the forms of the results so far."""
        forms = [[figures.form, []] for figures in self._figures[: number + 1]]
        return max(HEAD, 8 + len(json.dumps([forms, [], [["float32", [*forms[-1][:1]], True]]])))


def _empty(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a parameter without memory for its values; other tensors stay as they are."""
    if not isinstance(tensor, nn.Parameter):
        return tensor
    return nn.Parameter(tensor.detach()[(0,) * tensor.dim()].expand(tensor.shape), tensor.requires_grad)


def _apart(tensor: torch.Tensor) -> torch.Tensor:
    """Returns what `_empty` does for a parameter, and a copy of another tensor: a forward may change that."""
    return _empty(tensor) if isinstance(tensor, nn.Parameter) else tensor.detach().clone()
