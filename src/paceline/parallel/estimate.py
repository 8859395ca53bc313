"""Estimates memory, traffic and stage times of a plan on one worker."""

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
from paceline.parallel.parallel_job import ParallelJob
from paceline.parallel.pipeline.partition import StagePartition, divide
from paceline.parallel.pipeline.schedule import KINDS, kept, table
from paceline.parallel.plan_cost import cost, facts_of
from paceline.parallel.tensor_parallel.sharded_mode import tensors_in
from paceline.plan import Plan


def describe_blocks(job: ParallelJob) -> list[str]:
    """The blocks of each stage, or of a model that is whole."""
    stages = job.stages
    return (
        [summarize_blocks(blocks_of(job.model))]
        if stages is None
        else [stages.describe(n) for n in range(stages.count)]
    )


def forecast(job: ParallelJob, micro_batch: MicroBatch, count: int, text: str, workers: int) -> dict[str, Any]:
    """From the first of `count` micro-batches of a global batch, for a plan: the `blocks` of each stage, its seconds of
    `forward` and `backward`, the bytes that it `passes` on; and the figures of each worker of a replica. Where several
    compute a micro-batch together, each is said to have an equal part of its seconds and activations. The model may be
    cut for that, and is of no use afterwards. Raises UsageError where it cannot be cut so.
    """
    plan = Plan.parse(text).validate(workers)
    mesh, stages = plan.mesh(workers), StagePartition(tuple(blocks_of(job.model)), (0,))
    if mesh.pipeline > 1:
        count_of = mesh.pipeline * (plan.virtual or 1)
        job.stages = stages = divide(job.model, count_of, mesh.pipeline, job.requested_split[1])
    blocks, homes = describe_blocks(job), stages.homes(job.model)
    homes_of = {name: {*homes[id(param)]} for name, param in job.named.items()}
    runs = [_tried(job, micro_batch, stages) for _ in range(3)]  # the first one is slow, another one may be disturbed
    tried = [{kind: min(one[kind] for one in some) for kind in some[0]} for some in zip(*runs, strict=True)]
    if mesh.tensor > 1:
        from paceline.parallel.tensor_parallel.layers import TensorCut

        TensorCut(job, cast(Any, SimpleNamespace(rank=0, size=mesh.tensor)), job.requested_split[0])
    forwards, inner, predicted = -(-count // mesh.units), mesh.context * mesh.tensor, []
    rows = table(plan.schedule or KINDS[0], mesh.pipeline, plan.virtual or 1, forwards)
    for place in range(mesh.pipeline):
        own = {*range(place, stages.count, mesh.pipeline)}
        here = {name: param for name, param in job.named.items() if homes_of[name] & own}
        figures = asdict(cost(plan, facts_of(replace(job, named=here)), workers, forwards))
        figures["activations"] = sum(tried[stage]["saved"] for stage in own) * kept(rows[place]) // (len(own) * inner)
        figures["seconds"] = sum(tried[stage]["forward"] + tried[stage]["backward"] for stage in own) * forwards / inner
        predicted.append(figures)
    by_worker = [predicted[mesh.coordinate(rank, "pipeline")] for rank in range(mesh.replica)]
    named = [{"blocks": own} | one for own, one in zip(blocks, tried, strict=True)]
    about = {"model": type(job.model).__name__, "micro": micro_batch.rows, "micro_batches": count}
    return {"plan": str(plan), "workers": workers, **about, "stages": named, "predicted": by_worker}


def _tried(job: ParallelJob, micro_batch: MicroBatch, stages: StagePartition) -> list[dict[str, Any]]:
    """By stage, seconds of one forward and backward, bytes `saved` for the latter, and those passed on. A stage goes on
    until the first block of the next one is called; back, until the gradient of what went into it is there.
    """
    found: list[dict[str, Any]] = [
        {"forward": 0.0, "backward": 0.0, "saved": 0, "passes": 0} for _ in range(stages.count)
    ]
    seen = {param.untyped_storage().data_ptr() for param in job.model.parameters()}
    at, since = 0, _time(job.device)

    def book(kind: str, then: int) -> None:
        nonlocal at, since
        now = _time(job.device)
        found[at][kind] += now - since
        at, since = then, now

    def save(tensor: torch.Tensor) -> torch.Tensor:
        memory = tensor.untyped_storage()
        if memory.data_ptr() not in seen:
            seen.add(memory.data_ptr())
            found[at]["saved"] += memory.nbytes()
        return tensor.detach()

    def enters(stage: int, module: nn.Module, given: Any, named: Any) -> None:
        came = [tensor for tensor in tensors_in([given, named]) if tensor.requires_grad]
        if stage > at:
            found[at]["passes"] = sum(tensor.nbytes for tensor in came)
            book("forward", stage)
            for tensor in came[:1]:
                tensor.register_hook(lambda _: book("backward", stage - 1))
        for tensor in came:  # also where the block's own are made again
            save(tensor)

    modules, chunk = dict(job.model.named_modules()), Chunk([micro_batch], micro_batch.batch)
    hooks = [
        modules[name].register_forward_pre_hook(partial(enters, stages.stage_of_block(number)), with_kwargs=True)
        for number, name in enumerate(stages.blocks)
    ]
    with saved_tensors_hooks(save, lambda tensor: tensor):
        with job.arithmetic():
            result = job.loss(job.forward(job.model, chunk.batch), chunk.batch)
        loss = Loss.of(result, chunk, trainable=True).total
        book("forward", stages.count - 1)
        loss.backward()
    book("backward", 0)
    for hook in hooks:
        hook.remove()
    return found


def _time(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
