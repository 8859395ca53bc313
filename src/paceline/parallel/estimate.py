"""For `paceline explain` with a script: measures a micro-batch, adds activations and stage times to plan_cost."""

from __future__ import annotations

import time
from dataclasses import asdict, replace
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from paceline.compute.blocks import blocks_of, summarize_blocks
from paceline.compute.forward_backward import Loss
from paceline.compute.microbatches import Chunk, MicroBatch
from paceline.compute.model_size import count_elements
from paceline.parallel.parallel_job import ParallelJob
from paceline.parallel.pipeline.partition import StagePartition, divide
from paceline.parallel.pipeline.schedule import kept, stages_of, table
from paceline.parallel.plan_cost import cost, facts_of
from paceline.parallel.tensor_parallel.sharded_mode import tensors_in
from paceline.plan import Plan


def describe_blocks(job: ParallelJob) -> list[str]:
    """Describes the blocks of each stage, or of the full model without stages."""
    stages = job.stages
    if stages is None:
        return [summarize_blocks(blocks_of(job.model))]
    return [stages.describe(stage) for stage in range(stages.count)]


def forecast(job: ParallelJob, micro_batch: MicroBatch, count: int, text: str, workers: int) -> dict[str, Any]:
    """Predicts the figures of a plan, given as `text`, from the first of `count` micro-batches of a global batch.

    Returns the `blocks` of each stage, its seconds of `forward` and `backward` and the bytes that it `passes` on, and
    the figures of each worker of a replica. Workers that compute a micro-batch together are assumed to have equal parts
    of its seconds and activations. The model may be sharded for that and cannot be used afterwards. Raises UsageError
    where the plan does not fit the model.
    """
    size = count_elements(job.model)
    plan = Plan.parse(text).validate(workers)
    mesh, stages = plan.mesh(workers), StagePartition(tuple(blocks_of(job.model)), (0,))
    if mesh.pipeline > 1:
        count_of = mesh.pipeline * (plan.virtual or 1)
        job.stages = stages = divide(job.model, count_of, mesh.pipeline, job.requested_split[1])
    blocks, homes = describe_blocks(job), stages.homes(job.model)
    homes_of = {name: {*homes[id(param)]} for name, param in job.named.items()}
    # The first trial is slow, and another one may be disturbed.
    chunk = Chunk([micro_batch], micro_batch.batch)
    trials = [measure_stages(job, chunk, stages) for _ in range(3)]
    by_stage = zip(*trials, strict=True)
    fastest = [{kind: min(trial[kind] for trial in of_stage) for kind in of_stage[0]} for of_stage in by_stage]
    experts = None
    if mesh.expert > 1:
        from paceline.parallel.expert_parallel import ExpertParallel

        group, holders = (SimpleNamespace(rank=0, size=size) for size in (mesh.expert, mesh.expert * mesh.tensor))
        experts = ExpertParallel(job, cast(Any, group), cast(Any, holders), mesh.tensor)
    if mesh.tensor > 1:
        from paceline.parallel.tensor_parallel.layers import TensorCut

        TensorCut(job, cast(Any, SimpleNamespace(rank=0, size=mesh.tensor)), job.requested_split[0])
    if experts is not None:
        experts.cut(None)
    forwards, inner, predicted = -(-count // mesh.units), mesh.context * mesh.tensor, []
    kind, virtual = plan.stage_order, plan.virtual or 1
    rows = table(kind, mesh.pipeline, virtual, forwards)
    for stage_rank in range(mesh.pipeline):
        local_stages = {*stages_of(kind, mesh.pipeline, virtual, stage_rank)}
        local_params = {name: param for name, param in job.named.items() if homes_of[name] & local_stages}
        figures = asdict(cost(plan, facts_of(replace(job, named=local_params)), workers, forwards))
        saved = sum(fastest[stage]["saved"] for stage in local_stages)
        seconds = sum(fastest[stage]["forward"] + fastest[stage]["backward"] for stage in local_stages)
        figures["activations"] = saved * kept(rows[stage_rank]) // (len(local_stages) * inner)
        figures["seconds"] = seconds * forwards / inner
        predicted.append(figures)
    by_worker = [predicted[mesh.coordinate(rank, "pipeline")] for rank in range(mesh.replica)]
    stage_figures = [{"blocks": names} | trial for names, trial in zip(blocks, fastest, strict=True)]
    setting = {"model": type(job.model).__name__, "micro": micro_batch.rows, "micro_batches": count}
    return {
        "plan": str(plan),
        "workers": workers,
        "size": size,
        **setting,
        "stages": stage_figures,
        "predicted": by_worker,
    }


def measure_stages(job: ParallelJob, chunk: Chunk, stages: StagePartition) -> list[dict[str, Any]]:
    """Measures each stage: seconds of one forward and backward, bytes `saved` for the latter, and bytes passed on.

    A stage's forward ends when the first block of the next stage is called; its backward when the gradient of its input
    is computed.
    """
    figures: list[dict[str, Any]] = [
        {"forward": 0.0, "backward": 0.0, "saved": 0, "passes": 0} for _ in range(stages.count)
    ]
    seen = {param.untyped_storage().data_ptr() for param in job.model.parameters()}
    current, since = 0, _time(job.device)

    def add_time(kind: str, next_stage: int) -> None:
        nonlocal current, since
        now = _time(job.device)
        figures[current][kind] += now - since
        current, since = next_stage, now

    def save(tensor: torch.Tensor) -> torch.Tensor:
        memory = tensor.untyped_storage()
        if memory.data_ptr() not in seen:
            seen.add(memory.data_ptr())
            figures[current]["saved"] += memory.nbytes()
        return tensor.detach()

    def enters(stage: int, module: nn.Module, given: Any, named: Any) -> None:
        inputs = [tensor for tensor in tensors_in([given, named]) if tensor.requires_grad]
        if stage > current:
            figures[current]["passes"] = sum(tensor.nbytes for tensor in inputs)
            add_time("forward", stage)
            for tensor in inputs[:1]:
                tensor.register_hook(lambda _: add_time("backward", stage - 1))
        for tensor in inputs:  # inputs count as saved even if the block recomputes its activations
            save(tensor)

    modules = dict(job.model.named_modules())
    hooks = [
        modules[name].register_forward_pre_hook(partial(enters, stages.stage_of_block(number)), with_kwargs=True)
        for number, name in enumerate(stages.blocks)
    ]
    with saved_tensors_hooks(save, lambda tensor: tensor):
        with job.autocast():
            result = job.loss(job.forward(job.model, chunk.batch), chunk.batch)
        loss = Loss.of(result, chunk, trainable=True).total
        add_time("forward", stages.count - 1)
        torch.autograd.grad(loss, [p for p in job.model.parameters() if p.requires_grad], allow_unused=True)
    add_time("backward", 0)
    for hook in hooks:
        hook.remove()
    return figures


def _time(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
