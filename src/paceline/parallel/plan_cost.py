"""Computes what a plan costs each worker in bytes held and sent."""

from __future__ import annotations

from dataclasses import replace

from paceline.base.sharding import RowShards
from paceline.compute.blocks import blocks_of, by_block
from paceline.compute.job import TrainingJob
from paceline.compute.state_dict import held, kept_for_each
from paceline.parallel import data_parallel, zero1
from paceline.parallel.cost_model import CODED, Cost, Facts, Isles
from paceline.parallel.pipeline.schedule import KINDS, kept, table
from paceline.plan import Plan


def cost(plan: Plan, facts: Facts, workers: int, forwards: int = 1) -> Cost:
    """What a plan costs each of so many workers, if they make so many forwards in a step. The memory of activations,
    of exact sums and of what they need is not in it.

    Along `pipeline`, `context` and `tensor` it is what a worker with these `facts` sends: what a micro-batch has sent,
    so many times. The shapes of activations are those of the user's code, and no formula knows them before.
    """
    mesh = plan.mesh(workers)
    replicas, teams = mesh.data, min(plan.local or 1, mesh.data)
    mesh = replace(mesh, data=-(-replicas // teams))
    if mesh.shard == 1:
        found = data_parallel.cost(facts, mesh.data * mesh.context)
    else:
        found = zero1.cost(
            facts, plan.zero or 3, mesh.shard, mesh.data * mesh.context, forwards, plan.offload is not None
        )
    for axis in facts.inside.keys() | facts.ends.keys():
        found.sent[axis] = forwards * facts.inside.get(axis, 0) + facts.ends.get(axis, 0)
    if plan.local:
        own = facts.bytes(mesh.shard)
        here = facts.beside + (own if mesh.shard > 1 and plan.zero != 1 else facts.bytes())
        fragments = plan.fragments or int(plan.outer_codec is not None)
        momentum = not (plan.outer or "").startswith("sgd")
        copies, mine = 1 < replicas < 2 * teams, -(-plan.local // teams)
        if plan.zero == 1:  # each island's step by itself
            found = replace(found, sent={kind: mine * size for kind, size in found.sent.items()})
        isles = Isles(plan.every or 1, mine, copies, fragments, plan.outer_codec, momentum, bool(plan.quorum))
        found = found.in_islands(isles, here, own)
        if replicas > 1:
            found.sent["merges"] = isles.sent(own, sum(map(RowShards(mesh.shard).width, facts.shapes)))
    if plan.server:
        size, dense = found.gradients, facts.shapes[: len(facts.shapes) - facts.sparse]
        if plan.codec:
            size = sum(map(RowShards(1).width, dense)) * CODED[plan.codec] // 256
        found = replace(found, optimizer=0, sent={"servers": size * (1 + (plan.copies or 0))})
    rows = table(plan.schedule or KINDS[0], mesh.pipeline, plan.virtual or 1, forwards)
    return replace(found, in_flight=max(map(kept, rows)))


def share_of_sums(plan: Plan, job: TrainingJob, workers: int) -> float:
    """Of the bytes that a worker sends in a step of one forward, those of gradients that replicas sum."""
    facts = facts_of(job)
    return facts.bytes(plan.shard or 1) / sum(cost(plan, facts, workers).sent.values())


def facts_of(job: TrainingJob) -> Facts:
    """Of a model that is ready to be trained."""
    *blocks, rest = by_block(job.named, list(blocks_of(job.model)))
    numbers = {name: number for number, name in enumerate(job.named)}
    others = [t for t in (*job.model.parameters(), *job.model.buffers()) if not t.requires_grad]
    return Facts(
        [tuple(param.shape) for param in job.named.values()],
        [param.element_size() for param in job.named.values()],
        held(others),
        [[numbers[name] for name in block] for block in blocks],
        [numbers[name] for name in rest],
        kept_for_each(job.optimizers),
        job.inside,
        job.ends,
        job.sparse,
    )
