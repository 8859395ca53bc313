"""Predicts by formula what a plan makes a worker hold in memory and send, without activations."""

from __future__ import annotations

from dataclasses import replace

from paceline.base.sharding import RowShards
from paceline.compute.blocks import blocks_of, by_block
from paceline.compute.int8_states import state_per_byte
from paceline.compute.job import TrainingJob
from paceline.compute.state_dict import held
from paceline.parallel import data_parallel, zero1
from paceline.parallel.cost_model import Cost, Facts, IslandFacts
from paceline.parallel.pipeline.schedule import most_in_flight, table
from paceline.plan import CODED_BYTES, Plan


def cost(plan: Plan, facts: Facts, workers: int, forwards: int = 1, mirror: int = 0) -> Cost:
    """Returns the cost of a plan for each of `workers` workers, if each runs `forwards` forwards in a step, and its
    part of the state is copied into the memory of two hosts every `mirror` steps (0: never).

    The memory of activations, of exact sums and of their buffers is not included. The bytes sent along `pipeline`,
    `context` and `tensor` are those that a worker with these `facts` has sent in a measured micro-batch, times the
    forwards: the shapes of activations depend on the user's code, and no formula predicts them.
    """
    mesh = plan.mesh(workers)
    replicas, teams = mesh.data, min(plan.local or 1, mesh.data)
    mesh = replace(mesh, data=-(-replicas // teams))
    if mesh.shard == 1:
        estimate = data_parallel.cost(facts, mesh.data * mesh.context)
    else:
        replicas_of_shard, offload = mesh.data * mesh.context, plan.offload is not None
        estimate = zero1.cost(facts, plan.zero or 3, mesh.shard, replicas_of_shard, forwards, offload)
    if mesh.expert > 1:  # the gradients of all but experts are summed over the workers that exchange tokens, too
        shared = [number for number in range(len(facts.shapes) - facts.sparse) if number not in facts.divided]
        estimate.sent["gradients"] = estimate.sent.get("gradients", 0) + facts.bytes(mesh.shard, shared)
    if facts.owned:
        estimate = estimate.with_owners(facts, mesh.shard, mesh.replica // mesh.pipeline)
    for axis in facts.inside.keys() | facts.ends.keys():
        estimate.sent[axis] = forwards * facts.inside.get(axis, 0) + facts.ends.get(axis, 0)
    if plan.local:
        local_bytes = facts.bytes(mesh.shard)
        model_bytes = facts.other_bytes + (local_bytes if mesh.shard > 1 and plan.zero != 1 else facts.bytes())
        fragments = plan.fragments or int(plan.outer_codec is not None)
        momentum = not (plan.outer or "").startswith("sgd")
        has_copies, local_islands = 1 < replicas < 2 * teams, -(-plan.local // teams)
        if plan.zero == 1:  # each island runs its step by itself
            estimate = replace(estimate, sent={kind: local_islands * size for kind, size in estimate.sent.items()})
        every, codec, late = plan.every or 1, plan.outer_codec, bool(plan.quorum)
        islands = IslandFacts(every, local_islands, has_copies, fragments, codec, momentum, late)
        estimate = estimate.with_islands(islands, model_bytes, local_bytes)
        if replicas > 1:
            estimate.sent["merges"] = islands.sent(local_bytes, sum(map(RowShards(mesh.shard).width, facts.shapes)))
    if plan.server:
        sent_bytes, dense_shapes = estimate.gradients, facts.shapes[: len(facts.shapes) - facts.sparse]
        if plan.codec:
            sent_bytes = sum(map(RowShards(1).width, dense_shapes)) * CODED_BYTES[plan.codec] // 256
        estimate = replace(estimate, optimizer=0, sent={"servers": sent_bytes * (1 + (plan.copies or 0))})
    if mirror:
        local_bytes = facts.bytes(mesh.shard)
        state_bytes = local_bytes + facts.master_bytes(local_bytes) + facts.optimizer_bytes(local_bytes)
        part = (state_bytes // (mesh.context * mesh.data)) + facts.other_bytes // mesh.replica
        # This host's files and those of the host before it; the last copy stays until the next one is complete.
        estimate = replace(estimate, copies=4 * part, sent={**estimate.sent, "copies": part // mirror})
    rows = table(plan.stage_order, mesh.pipeline, plan.virtual or 1, forwards)
    return replace(estimate, in_flight=max(map(most_in_flight, rows)))


def share_of_sums(plan: Plan, job: TrainingJob, workers: int) -> float:
    """Returns the fraction of a worker's sent bytes, in a step of one forward, that replicas send to sum gradients."""
    facts = facts_of(job)
    return facts.bytes(plan.shard or 1) / sum(cost(plan, facts, workers).sent.values())


def facts_of(job: TrainingJob) -> Facts:
    """Returns the facts of a job's model, which must be ready to be trained."""
    *blocks, rest = by_block(job.named, list(blocks_of(job.model)))
    numbers = {name: number for number, name in enumerate(job.named)}
    frozen = [t for t in (*job.model.parameters(), *job.model.buffers()) if not t.requires_grad]
    return Facts(
        [tuple(param.shape) for param in job.named.values()],
        [param.element_size() for param in job.named.values()],
        held(frozen),
        [[numbers[name] for name in block] for block in blocks],
        [numbers[name] for name in rest],
        state_per_byte(job),
        inside=job.inside,
        ends=job.ends,
        sparse=job.sparse,
        owned={numbers[name]: cut.shape for name, cut in job.owned_cuts.items() if name in numbers},
        divided=job.divided_numbers,
        wider=2 if job.bf16_weights else 1,
        has_masters=job.keeps_masters,
    )
