"""From a plan to a replica: the only place that knows all layouts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

from paceline.base.mesh import AXES
from paceline.base.sharding import Shards
from paceline.comm.communicator import Group
from paceline.comm.compression import Codec
from paceline.compute.blocks import blocks_of, by_block, compiled, recompute, set_apart
from paceline.compute.job import Job
from paceline.compute.state_dict import held, kept_for_each
from paceline.parallel import data_parallel as data
from paceline.parallel import zero1 as shard
from paceline.parallel.cost_model import CODED, Cost, Facts, Isles
from paceline.parallel.data_parallel import share
from paceline.parallel.layout import Layout
from paceline.parallel.model_values import Values
from paceline.parallel.pipeline.schedule import KINDS, kept, table
from paceline.parallel.zero1 import Shard
from paceline.param_server.client import InStep, Ticketed
from paceline.plan import Plan
from paceline.train.replica import Replica


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
        found = data.cost(facts, mesh.data * mesh.context)
    else:
        found = shard.cost(
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
            found.sent["merges"] = isles.sent(own, sum(map(Shards(mesh.shard).width, facts.shapes)))
    if plan.server:
        size, dense = found.gradients, facts.shapes[: len(facts.shapes) - facts.sparse]
        if plan.codec:
            size = sum(map(Shards(1).width, dense)) * CODED[plan.codec] // 256
        found = replace(found, optimizer=0, sent={"servers": size * (1 + (plan.copies or 0))})
    rows = table(plan.schedule or KINDS[0], mesh.pipeline, plan.virtual or 1, forwards)
    return replace(found, in_flight=max(map(kept, rows)))


def share_of_sums(plan: Plan, job: Job, workers: int) -> float:
    """Of the bytes that a worker sends in a step of one forward, those of gradients that replicas sum."""
    facts = facts_of(job)
    return facts.bytes(plan.shard or 1) / sum(cost(plan, facts, workers).sent.values())


def facts_of(job: Job) -> Facts:
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


def nest(
    plan: Plan,
    job: Job,
    group: Group,
    elastic: bool,
    known: bool = False,
    placements: Mapping[str, str] | None = None,
    blocks: str | None = None,
) -> Replica:
    """A worker's part of the plan. An `elastic` team may be of one worker and grow; where the others do not make this
    trainer now, it is `known` to them. `placements` say which layers are cut, `blocks` which list is cut in stages.
    Collective if it is not known.
    """
    if not known and job.blueprint is None:
        share([*job.model.parameters(), *job.model.buffers()], group)
    mesh = plan.mesh(group.size)
    job.unit, job.said = mesh.unit, (placements, blocks)
    job.shapes = {name: tuple(param.shape) for name, param in job.model.named_parameters(remove_duplicate=False)}
    job.units = group.along("data", "shard", mesh=mesh)
    job.place, job.replica = mesh.place(group.rank), group.along(*AXES[1:], mesh=mesh)
    values = Values(job) if mesh.pipeline * mesh.tensor > 1 else None
    pipeline = None
    if mesh.pipeline > 1:
        from paceline.parallel.pipeline.partition import divide
        from paceline.parallel.pipeline.stage import Pipeline

        job.stages = divide(job.model, mesh.pipeline * (plan.virtual or 1), mesh.pipeline, blocks)
        line = group.along("pipeline", mesh=mesh)
        pipeline = Pipeline(job, line, job.stages, plan.schedule or KINDS[0], mesh.context * mesh.tensor)
        job.decisions.append(pipeline.told)
    if mesh.tensor > 1:
        from paceline.parallel.tensor_parallel.layers import TensorCut

        job.decisions.append(TensorCut(job, group.along("tensor", mesh=mesh), placements).told)
    sequences = None
    if mesh.context > 1:
        from paceline.parallel.sequence_parallel import Sequences

        sequences = Sequences(job, group.along("context", mesh=mesh), pipeline is not None)
        job.decisions.append(sequences.told)
    if plan.exact:
        set_apart(job.model)
    if plan.recompute:
        job.decisions.append(recompute(job.model))
    if plan.compile:
        job.decisions.append(compiled(job.model, plan.together > 1, plan.exact))
    if sequences is not None:
        sequences.narrow()
        # Those along the outer axis hold the same pieces.
        job.cuts = {name: replace(cut, pieces=cut.pieces * mesh.context) for name, cut in job.cuts.items()}
    if pipeline is not None:
        pipeline.leave()
    if values is not None:
        values.put(group, mesh, known)
    # Who makes a step together: all, or the team that an island is dealt to.
    team = group.team(plan.local, mesh) if plan.local else group
    outer = team.along("data", "context", mesh=mesh)
    codec = Codec(plan.codec) if plan.codec else None
    if plan.server:
        if group.serves:
            return Replica(job, Layout(job), group, outer, mesh)
        return (Ticketed if plan.in_windows else InStep)(job, group, mesh, plan.server, codec)
    if mesh.shard == 1:
        alone = group.size == 1 and not elastic and not plan.exact
        return Replica(job, Layout(job, None if alone else outer.allocate), group, outer, mesh, pipeline, codec, team)
    replica = group.along("shard", mesh=mesh)
    if plan.zero == 1:
        return Replica(job, Shard(job, replica), group, outer, mesh, pipeline, codec, team)
    from paceline.parallel.fsdp import FullyShard  # torch takes half a second to import what it needs

    filled = None if known else partial(share, group=group)
    return Replica(job, FullyShard(job, replica, plan.zero == 3, filled), group, outer, mesh, codec=codec, team=team)
