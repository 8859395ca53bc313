"""Measures the model and the machines of a run: each block by the size of micro-batches, sums, products and copies.

All workers measure at once, since those of a host share its memory and caches: alone, each would be faster.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from paceline.base.environment import memory_free
from paceline.base.memory import machine_memory
from paceline.comm.communicator import Group, refusing_collectives
from paceline.compute.blocks import blocks_of
from paceline.compute.microbatches import Chunk, MicroBatch, join, tensors_of
from paceline.compute.state_dict import kept_for_each
from paceline.parallel.estimate import measure_stages
from paceline.parallel.parallel_job import ParallelJob
from paceline.parallel.pipeline.partition import StagePartition
from paceline.planner.descriptions import (
    BlockDescription,
    LinkDescription,
    MachineDescription,
    ModelDescription,
)
from paceline.session.validation import memory_now
from paceline.train.step import Step
from paceline.train.step_context import StepContext

REPEATS = 3  # of each measurement; the fastest counts, as others disturb
SIZES = 1 << 14, 1 << 22  # elements of the sums from which latency and bandwidth follow
WIDTH, COPIED = 1024, 1 << 24  # of the measured product, and elements of the measured copy
_HEADS = "num_attention_heads", "num_heads", "n_head", "nhead", "heads"
_KEY_VALUE_HEADS = "num_key_value_heads", "num_kv_heads", "n_kv_heads", "kv_heads"


def probe(context: StepContext, step: Step) -> tuple[ModelDescription, MachineDescription]:
    """Returns descriptions of the model and of the machines, measured with the rows of a step. Collective; each worker
    has the full model.
    """
    group = context.run.team.group
    group.declare("a probe of the machines", kind="figures")
    return _describe_model(context, step, group), _describe_machine(context.job.device, group)


def _describe_model(context: StepContext, step: Step, group: Group) -> ModelDescription:
    job, micro_batches = context.job, step.batch.share or step.batch.micro_batches
    names = tuple(blocks_of(job.model)) or ("",)
    stages = StagePartition(names, tuple(range(len(names))))
    most = min(group.gather_json(len(micro_batches))) if context.merging.may_merge else 1
    figures: dict[int, list[dict[str, Any]]] = {}
    with context.streams.preserved():
        for count in sorted({1 << power for power in range(most.bit_length())} | {max(1, most)}):
            chunk = _chunk(micro_batches[:count])
            figures[chunk.rows] = _measured(job, chunk, stages, group)
    homes = stages.homes(job.model)
    elements = [0] * len(names)
    for param in job.model.parameters():
        elements[homes[id(param)][0]] += param.numel()
    sample, heads = micro_batches[0], _attribute(job.model, _HEADS)
    flops = _forward_flops(context, sample) / max(1, sum(elements))
    blocks = []
    for number, name in enumerate(names):
        of_block = figures[sample.rows][number]
        seconds = {str(size): taken[number]["forward"] + taken[number]["backward"] for size, taken in figures.items()}
        passes = of_block["passes"] / sample.rows
        block = BlockDescription(
            name,
            elements[number],
            saved=of_block["saved"] / sample.rows,
            passes=passes,
            matmul=flops * elements[number],
            tensor_sums=2 if heads else 1,  # of attention and of the layers behind it
            exchanged=4 * passes if heads else 0.0,  # queries, keys, values and results
            seconds=seconds,
        )
        blocks.append(block)
    sizes = [param.element_size() for param in job.model.parameters()]
    return ModelDescription(
        type(job.model).__name__,
        tuple(blocks),
        step.batch.rows,
        tokens=_tokens(sample),
        heads=heads,
        key_value_heads=_attribute(job.model, _KEY_VALUE_HEADS),
        element_size=sum(sizes) / max(1, len(sizes)),
        state=kept_for_each(job.optimizers),
        merges=context.merging.may_merge,
    )


def _forward_flops(context: StepContext, sample: MicroBatch) -> float:
    """Returns the operations of a row's forward, a third of those of forward and backward; 0 if they are not known."""
    skeleton = context.job.skeleton
    if skeleton is None:
        return 0.0
    with context.streams.preserved(), refusing_collectives():
        return skeleton.count(context.job.script_forward, sample.batch, sample.rows).per_row / 3


def _chunk(micro_batches: list[MicroBatch]) -> Chunk:
    joined = join(micro_batches) if len(micro_batches) > 1 else None
    return joined or Chunk(micro_batches[:1], micro_batches[0].batch)


def _measured(job: ParallelJob, chunk: Chunk, stages: StagePartition, group: Group) -> list[dict[str, Any]]:
    """Returns the figures of each block for a chunk: the fastest of some forwards and backwards of all workers."""
    trials = []
    for _ in range(REPEATS):
        group.gather_json(0)  # all begin together
        trials.append(measure_stages(job, chunk, stages))
    by_block = zip(*trials, strict=True)
    return [{kind: min(trial[kind] for trial in of_block) for kind in of_block[0]} for of_block in by_block]


def _tokens(micro_batch: MicroBatch) -> int:
    """Returns the number of tokens of a row: the second dimension of the first tensor of token ids or of vectors."""
    for x in tensors_of(micro_batch.batch):
        if x.dim() == 2 + x.is_floating_point():
            return int(x.shape[1])
    return 1


def _attribute(model: nn.Module, names: tuple[str, ...]) -> int:
    """Returns the first of these attributes that a module or its configuration has as a number, or 0."""
    for module in model.modules():
        for holder in (getattr(module, "config", None), module):
            for name in names:
                if type(value := getattr(holder, name, None)) is int:
                    return value
    return 0


def _describe_machine(device: torch.device, group: Group) -> MachineDescription:
    matrix = torch.ones(WIDTH, WIDTH, dtype=torch.float32, device=device)
    long = torch.ones(COPIED, dtype=torch.float32, device=device)
    target = torch.empty_like(long)
    product = _fastest(lambda: torch.mm(matrix, matrix), device, group)
    copy = _fastest(lambda: target.copy_(long), device, group)
    links: tuple[LinkDescription, ...] = ()
    if group.size > 1:
        small, large = (_fastest(lambda size=size: group.sum(long[:size]), device, group) for size in SIZES)  # type: ignore[misc]
        hops = 2 * (group.size - 1)  # of a ring
        bandwidth = hops / group.size * 4 * (SIZES[1] - SIZES[0]) / max(large - small, 1e-9)
        links = (LinkDescription("between workers", 0, bandwidth, latency=small / hops),)
    peers = sum(host == group.hosts[group.rank] for host in group.hosts) if group.size > 1 else 1
    return MachineDescription(
        device.type if device.type != "cuda" else torch.cuda.get_device_name(device),
        {"fp32": 2 * WIDTH**3 / product},
        _room(device, peers),
        2 * long.nbytes / copy,
        links,
        exposed=1.0 if device.type == "cpu" else 0.2,  # on a CPU, sums take time from the cores that compute
        workers_per_host=peers,
        measured=True,
    )


def _room(device: torch.device, peers: int) -> float:
    """Returns the bytes that this process may take, if its host's `peers` workers share what is free."""
    if device.type == "cuda":
        return float(torch.cuda.mem_get_info(device)[1])
    return memory_now(device) + min(memory_free(), machine_memory()) / peers


def _fastest(call: Callable[[], Any], device: torch.device, group: Group) -> float:
    """Returns the seconds of a call on all workers at once: of the slowest worker, the fastest of some tries."""
    seconds = []
    for _ in range(1 + REPEATS):  # the first one is slow
        group.gather_json(0)
        _synchronize(device)
        started = time.perf_counter()
        call()
        _synchronize(device)
        seconds.append(max(group.gather_json(time.perf_counter() - started)))
    return float(max(min(seconds[1:]), 1e-9))


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
