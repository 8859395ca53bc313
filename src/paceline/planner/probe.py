"""Measures the model and the machines of a run: each block by the size of micro-batches, sums, products and copies.

All workers measure at once, since those of a host share its memory and caches: alone, each would be faster. No worker
needs memory for the complete model.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import msgspec
import torch
from torch import nn

from paceline.comm.codec_tuning import ROUNDING, coding_seconds
from paceline.comm.communicator import Group, refusing_collectives
from paceline.compute.blocks import blocks_of
from paceline.compute.microbatches import Chunk, MicroBatch, join, name_of, tensors_of
from paceline.compute.model_flops import ModuleFlops
from paceline.compute.state_dict import PROBE_ERRORS, optimizer_like, optimizer_state_ratio
from paceline.parallel.pipeline.partition import StagePartition
from paceline.planner.block_probe import BlockFigures, BlockProbe, time_on
from paceline.planner.descriptions import BlockDescription, LinkDescription, MachineDescription, ModelDescription
from paceline.planner.division import Division
from paceline.session.process_memory import memory_now, room_of_worker
from paceline.train.step import Step
from paceline.train.step_context import StepContext

REPEATS = 3  # of each measurement; the fastest counts, as others disturb
PATIENCE = 8.0  # seconds after which no larger micro-batches are measured
SIZES = 1 << 14, 1 << 22  # elements of the sums from which latency and bandwidth follow
HOP = 4 * SIZES[0]  # bytes of a message between stages
WIDTH, ROWS = 1024, 256  # of the measured product; rows of the one that is measured between messages
CODED = 1 << 20  # elements that are encoded
MEETINGS, FEW_ROWS = 16, 32  # sums that are measured between products, and rows of these
COPIED = 1 << 20, 1 << 24  # elements of the measured copy, by the memory that is free
_HEADS = "num_attention_heads", "num_heads", "n_head", "nhead", "heads"
_KEY_VALUE_HEADS = "num_key_value_heads", "num_kv_heads", "n_kv_heads", "kv_heads"


class ModelProbe:
    """Measures the model with the rows of a step. Collective; each worker has the full model, maybe without values.

    `sample` is the micro-batch that is measured.
    """

    def __init__(self, context: StepContext, step: Step, group: Group) -> None:
        self._context, self._rows, job = context, step.batch.rows, context.job
        micro_batches = step.batch.share or step.batch.micro_batches
        self._names, self.sample = tuple(blocks_of(job.model, sharing=True)) or ("",), micro_batches[0]
        probe = BlockProbe(job, self._names)
        with context.streams.preserved():
            self._counted = probe.run(Chunk([self.sample], self.sample.batch), counts_bytes=True)
            self._seconds = _seconds(probe, micro_batches, group)
            self._update = _update_seconds(probe, context, group)

    def describe(self) -> ModelDescription:
        """Returns the description of the model."""
        job, rows, heads = self._context.job, self.sample.rows, _attribute(self._context.job.model, _HEADS)
        homes = StagePartition(self._names, tuple(range(len(self._names)))).homes(job.model)
        elements = [0] * len(self._names)
        for param in job.model.parameters():
            elements[homes[id(param)][0]] += param.numel()
        work, blocks = _work(self._context, self.sample, self._names, elements), []
        for number, (name, figures) in enumerate(zip(self._names, self._counted, strict=True)):
            passes = figures.passes / rows
            block = BlockDescription(
                name,
                elements[number],
                saved=figures.saved / rows,
                passes=passes,
                matmul=work[number].products / rows,
                attention=work[number].attention / rows,
                operations=work[number].calls,
                tensor_sums=2 if heads else 1,  # of attention and of the layers behind it
                exchanged=4 * passes if heads else 0.0,  # queries, keys, values and results
                expert_parameters=figures.expert_parameters,
                routed=figures.routed / rows,
                seconds={str(count): by_block[number] for count, by_block in self._seconds.items()},
            )
            blocks.append(block)
        sizes = [param.element_size() for param in job.model.parameters()]
        element_size, tokens = sum(sizes) / max(1, len(sizes)), _tokens(self.sample)
        return ModelDescription(
            type(job.model).__name__,
            tuple(blocks),
            self._rows,
            tokens=tokens,
            width=round(max(block.passes for block in blocks) / tokens / element_size),
            heads=heads,
            key_value_heads=_attribute(job.model, _KEY_VALUE_HEADS),
            element_size=element_size,
            state=optimizer_state_ratio(job.optimizers),
            update=self._update,
        )

    def with_divided(
        self, model: ModelDescription, division: Division, kinds: Sequence[tuple[int, int]], room: float, group: Group
    ) -> ModelDescription:
        """Returns the description of the model with the seconds of divided layers, for each pair of the workers that
        divide layers and those that divide sequences. A worker may take `room` bytes. Collective.
        """
        divided, device, began = dict[str, float](), self._context.job.device, time.perf_counter()
        even = sum(block.seconds.get(str(self.sample.rows), 0.0) for block in model.blocks)
        needed = 4 * model.parameters * model.element_size  # with gradients, twice
        for tensor, sequence in kinds:
            late = max(group.gather_json(time.perf_counter() - began)) > PATIENCE
            free = min(group.gather_json((room or room_of_worker(device, group.size)) - memory_now(device)))
            if late or not even or free < needed / tensor:
                continue
            with self._context.streams.preserved():
                taken = min(group.gather_json(division.seconds_of(tensor, sequence)))
            if taken:
                divided[f"{tensor} {sequence}"] = taken * tensor * sequence / even
        return msgspec.structs.replace(model, divided=divided)

    def division(self) -> Division:
        """Returns the model as plans divide it."""
        return Division(self._context.job, self.sample, self._rows, self._names, self._counted)


def _seconds(probe: BlockProbe, micro_batches: Sequence[MicroBatch], group: Group) -> dict[int, list[float]]:
    """Returns the seconds of each block, forward and backward, by the number of rows that are computed together."""
    most, began = min(group.gather_json(len(micro_batches))), time.perf_counter()
    seconds: dict[int, list[float]] = {}
    for count in sorted({1 << power for power in range(most.bit_length())} | {most}):
        chunk = _chunk(micro_batches[:count])
        if chunk.rows in seconds:  # rows that cannot be joined
            continue
        trials: list[list[BlockFigures]] = []
        while len(trials) < REPEATS and (not trials or max(group.gather_json(time.perf_counter() - began)) < PATIENCE):
            group.gather_json(0)  # all begin together
            trials.append(probe.run(chunk))
        by_block = zip(*trials, strict=True)
        seconds[chunk.rows] = [min(one.forward + one.backward for one in of_block) for of_block in by_block]
        if max(group.gather_json(time.perf_counter() - began)) > PATIENCE:
            break
    return seconds


def _update_seconds(probe: BlockProbe, context: StepContext, group: Group) -> float:
    """Returns the seconds in which the optimizer updates an element, from updates of parameters like those of a block;
    0 if it cannot be made for these. Collective.
    """
    job = context.job
    optimizer = max(job.optimizers, key=lambda one: sum(p.numel() for g in one.param_groups for p in g["params"]))
    params = [_like(param) for param in probe.largest_block() if param.requires_grad]
    for param in params:
        param.grad = torch.full_like(param, 1e-3)
    try:
        made = optimizer_like(optimizer, params)
        made.step()
    except PROBE_ERRORS:
        made = None
    if not params or not all(group.gather_json(made is not None)):
        return 0.0
    assert made is not None
    return _fastest(made.step, job.device, group) / sum(param.numel() for param in params)


def _like(param: nn.Parameter) -> nn.Parameter:
    """Returns a parameter of ones like this one, or like its first rows if it is large."""
    rows = max(1, COPIED[0] * param.shape[0] // param.numel()) if param.numel() > COPIED[0] else None
    shape = param.shape if rows is None else (min(rows, param.shape[0]), *param.shape[1:])
    return nn.Parameter(torch.ones(shape, dtype=param.dtype, device=param.device))


def _work(
    context: StepContext, sample: MicroBatch, names: Sequence[str], elements: Sequence[int]
) -> Sequence[ModuleFlops]:
    """Returns the operations of each block's forward, the last one with those of the code after it. Where they are not
    known by module, a third of those of forward and backward is divided by the elements of parameters.
    """
    skeleton = context.job.skeleton
    if skeleton is None:
        return [ModuleFlops()] * len(names)
    with context.streams.preserved(), refusing_collectives():
        flops = skeleton.count(context.job.script_forward, sample.batch, sample.rows)
    if not all(name in flops.modules for name in names):
        each = flops.per_row * sample.rows / 3 / max(1, sum(elements))
        return [ModuleFlops(each * size) for size in elements]
    others = [flops.modules[name] for name in names[:-1]]
    products, attention, calls = (total - sum(parts) for total, *parts in zip(flops.modules[""], *others, strict=True))
    return [*others, ModuleFlops(products, attention, int(calls))]


def _chunk(micro_batches: Sequence[MicroBatch]) -> Chunk:
    joined = join([*micro_batches]) if len(micro_batches) > 1 else None
    return joined or Chunk([micro_batches[0]], micro_batches[0].batch)


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


def describe_machine(device: torch.device, group: Group, memory: float) -> MachineDescription:
    """Measures the machine of a group, whose workers are on one host. A worker may take `memory` bytes; if that is 0,
    its part of what is free. Collective.
    """
    matrix = torch.ones(WIDTH, WIDTH, dtype=torch.float32, device=device)
    room = min(group.gather_json(room_of_worker(device, group.size)))
    free = max(0.0, (memory or room) - memory_now(device)) / 8  # which a tensor may take
    fitting = 1 << max(0, int(free / 4).bit_length() - 1)
    copied = min(group.gather_json(max(COPIED[0], min(COPIED[1], fitting))))
    long = torch.ones(copied, dtype=torch.float32, device=device)
    target = torch.empty_like(long)
    product = _fastest(lambda: torch.mm(matrix, matrix), device, group)
    copy = _fastest(lambda: target.copy_(long), device, group)
    links: tuple[LinkDescription, ...] = ()
    if group.size > 1:
        sizes = SIZES[0], min(SIZES[1], copied)
        small, large = (_fastest(lambda size=size: group.sum(long[:size]), device, group) for size in sizes)  # type: ignore[misc]
        hops = 2 * (group.size - 1)  # of a ring
        bandwidth = hops / group.size * 4 * (sizes[1] - sizes[0]) / max(large - small, 1e-9)
        latency = small / (2 * math.ceil(math.log2(group.size)))  # as `Links.sum` counts them
        receive = max(0.0, hop_seconds(device, group, range(group.size)) - latency)
        meet = max(0.0, _meeting(matrix, device, group) - small)
        links = (LinkDescription("between workers", 0, bandwidth, latency, receive=receive, meet=meet),)
    return MachineDescription(
        name_of(device),
        {"fp32": 2 * WIDTH**3 / product},
        room,
        2 * long.nbytes / copy,
        links,
        exposed=1.0 if device.type == "cpu" else 0.2,  # on a CPU, sums take time from the cores that compute
        copies=2.0,
        workers_per_host=group.size,
        coding=_coding(copied, group),
        is_cpu=device.type == "cpu",
        measured=True,
    )


def _coding(most: int, group: Group) -> dict[str, float]:
    """Returns the seconds per element in which the codecs that round encode and decode, measured with `most` elements
    at most. Collective.
    """
    seconds = dict[str, float]()
    for word in ROUNDING[1:]:  # the first one is "none"
        group.gather_json(0)  # all begin together
        seconds[word] = max(group.gather_json(coding_seconds(word, min(most, CODED))))
    return seconds


def hop_seconds(device: torch.device, group: Group, ranks: Sequence[int]) -> float:
    """Returns the seconds, besides those of computing, in which a message of HOP bytes goes from one of these ranks to
    the next, if each computes a product before it hands the message on, like the stages of a pipeline. Collective.
    """
    matrix = torch.ones(WIDTH, WIDTH, dtype=torch.float32, device=device)
    message, hops = torch.ones(SIZES[0], dtype=torch.float32, device=device), 2 * len(ranks)
    rows, seconds = matrix[:ROWS], list[float]()
    for _ in range(REPEATS):
        group.gather_json(0)
        began, computed, sent = time_on(device), 0.0, None
        for hop in range(hops):
            sender, receiver = ranks[hop % len(ranks)], ranks[(hop + 1) % len(ranks)]
            if group.rank == receiver:
                group.receive(message, sender)
            if group.rank == sender:
                since = time_on(device)
                torch.mm(rows, matrix)
                computed += time_on(device) - since
                sent = group.start_send(message, receiver)
        group.finish(sent)
        taken, products = zip(*group.gather_json([time_on(device) - began, computed]), strict=True)
        seconds.append((max(taken) - sum(products)) / hops)
    return max(0.0, min(seconds))


def _meeting(matrix: torch.Tensor, device: torch.device, group: Group) -> float:
    """Returns the seconds, besides those of computing, of a small sum between products with a `matrix`, like those
    inside of divided layers. It takes long if workers share cores. Collective.
    """
    message, rows = torch.ones(SIZES[0], dtype=torch.float32, device=device), matrix[:FEW_ROWS]

    def seconds(is_summed: bool) -> float:
        group.gather_json(0)
        began = time_on(device)
        for _ in range(MEETINGS):
            torch.mm(rows, matrix)
            if is_summed:
                group.sum(message)
        return float(max(group.gather_json(time_on(device) - began)))

    return median(seconds(True) - seconds(False) for _ in range(REPEATS)) / MEETINGS


def _fastest(call: Callable[[], Any], device: torch.device, group: Group) -> float:
    """Returns the seconds of a call on all workers at once: of the slowest worker, the fastest of some tries."""
    seconds = []
    for _ in range(1 + REPEATS):  # the first one is slow
        group.gather_json(0)
        started = time_on(device)
        call()
        seconds.append(max(group.gather_json(time_on(device) - started)))
    return float(max(min(seconds[1:]), 1e-9))
