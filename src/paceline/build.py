"""Builds layout, replica and strategy from a plan; the only module that knows all strategies."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from paceline.base.mesh import AXES, Mesh
from paceline.comm.communicator import Group
from paceline.comm.compression import Codec
from paceline.compute.blocks import compiled, recompute, set_apart
from paceline.compute.tiled_logits import LogitsTiling
from paceline.local_sgd.round import LocalSgd, build_local_sgd, leave_islands
from paceline.parallel.data_parallel import share
from paceline.parallel.layout import Layout
from paceline.parallel.model_values import ModelValues
from paceline.parallel.parallel_job import ParallelJob
from paceline.parallel.zero1 import Zero1
from paceline.param_server.async_window import build_async_windows
from paceline.param_server.backup_steps import build_backup_windows
from paceline.param_server.client import AsyncReplica, SyncReplica
from paceline.param_server.server import ParameterServer
from paceline.param_server.server_step import build_server_steps
from paceline.plan import Plan
from paceline.session.run import Run
from paceline.train.data_parallel_step import data_parallel_step
from paceline.train.replica import Replica
from paceline.train.step_context import StepContext
from paceline.train.step_observers import register_observers
from paceline.train.strategy import LockstepStrategy, Strategy
from paceline.train.verified_step import build_steps, refuse_unverified

if TYPE_CHECKING:
    from paceline.parallel.pipeline.stage import Pipeline


def build_replica(
    plan: Plan,
    job: ParallelJob,
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
    pipeline, values = divide_model(plan, job, group, mesh, placements, blocks)
    if not job.trains:
        job.values = values
        return Replica(job, Layout(job), group, group.subgroup("data", "context", mesh=mesh), mesh)
    if values is not None:
        values.materialize(group, mesh, known)
    # Who makes a step together: all, or the team that an island is dealt to.
    team = group.team(plan.local, mesh) if plan.local else group
    outer = team.subgroup("data", "context", mesh=mesh)
    codec = Codec(plan.codec) if plan.codec else None
    if plan.server:
        if group.serves:
            return Replica(job, Layout(job), group, outer, mesh)
        return (AsyncReplica if plan.in_windows else SyncReplica)(job, group, mesh, plan.server, codec)
    if mesh.shard == 1:
        alone = group.size == 1 and not elastic and not plan.exact
        return Replica(job, Layout(job, None if alone else outer.allocate), group, outer, mesh, pipeline, codec, team)
    replica = group.subgroup("shard", mesh=mesh)
    if plan.zero == 1:
        return Replica(job, Zero1(job, replica), group, outer, mesh, pipeline, codec, team)
    from paceline.parallel.fsdp import FullyShard  # torch takes half a second to import what it needs

    filled = None if known else partial(share, group=group)
    layout = FullyShard(job, replica, plan.zero == 3, filled)
    return Replica(job, layout, group, outer, mesh, pipeline, codec, team)


def divide_model(
    plan: Plan,
    job: ParallelJob,
    group: Group,
    mesh: Mesh,
    placements: Mapping[str, str] | None,
    blocks: str | None,
) -> tuple[Pipeline | None, ModelValues | None]:
    """Divides a job's model along all axes but `shard`. Returns the pipeline if the model has stages, and the values of
    the parameters if these have none yet.
    """
    job.unit, job.each_shard, job.requested_split = mesh.unit, mesh.each_shard, (placements, blocks)
    job.shapes = {name: tuple(param.shape) for name, param in job.model.named_parameters(remove_duplicate=False)}
    job.units = group.subgroup("data", "shard", "expert", mesh=mesh)
    job.shard_index, job.replica = mesh.shard_index_of(group.rank), group.subgroup(*AXES[1:], mesh=mesh)
    if plan.together > 1:
        axes = ("shard", "expert") if plan.zero in (2, 3) else ("expert",)
        job.lockstep = group.subgroup(*axes, mesh=mesh)
    is_apart = mesh.pipeline * mesh.tensor * mesh.expert > 1 or (not job.trains and job.blueprint is not None)
    values = ModelValues(job) if is_apart else None
    if plan.precision == "fp8":  # with the parameters that `values` may have replaced
        from paceline.compute.float8_linear import use_float8

        job.decisions.append(use_float8(job.model, job.device))
    pipeline = None
    if mesh.pipeline > 1:
        from paceline.parallel.pipeline.partition import divide
        from paceline.parallel.pipeline.stage import Pipeline

        job.stages = divide(job.model, mesh.pipeline * (plan.virtual or 1), mesh.pipeline, blocks)
        line = group.subgroup("pipeline", mesh=mesh)
        pipeline = Pipeline(job, line, job.stages, plan.stage_order, mesh.context * mesh.tensor)
        job.decisions.append(pipeline.decision)
    experts, within_unit, tensor_cut = None, None, None
    if mesh.expert > 1:
        from paceline.parallel.expert_parallel import ExpertParallel

        tokens, holders = (group.subgroup("expert", *more, mesh=mesh, purpose="tokens") for more in ([], ["tensor"]))
        experts = ExpertParallel(job, tokens, holders, mesh.tensor)
        job.decisions.append(experts.decision)
    if mesh.tensor > 1:
        from paceline.parallel.tensor_parallel.layers import TensorCut

        tensor_cut = TensorCut(job, group.subgroup("tensor", mesh=mesh), placements)
        job.decisions.append(tensor_cut.decision)
        within_unit = tensor_cut.redistributor
    sequences = None
    if mesh.context > 1:
        from paceline.parallel.sequence_parallel import SequenceParallel

        sequences = SequenceParallel(job, group.subgroup("context", mesh=mesh), pipeline is not None)
        job.decisions.append(sequences.decision)
    if plan.tiles:
        job.decisions.append(LogitsTiling(job, plan.tiles, pipeline is not None).decision)
    if plan.exact:
        set_apart(job.model)
    by_block = plan.together > 1 or pipeline is not None
    if plan.compile and (sequences is not None or tensor_cut is not None):
        from paceline.parallel.tensor_parallel.compiled_units import compile_units

        is_static = plan.exact or plan.recompute is not None  # a recomputation must run the kernels of its forward
        job.decisions.append(compile_units(job.model, sequences, tensor_cut, by_block, is_static))
    if plan.recompute:
        job.decisions.append(recompute(job.model))
    if plan.compile and sequences is None and tensor_cut is None:
        job.decisions.append(compiled(job.model, by_block, plan.exact))
    if sequences is not None:
        sequences.narrow()
        # Those along the outer axis hold the same pieces.
        job.cuts = {name: replace(cut, pieces=cut.pieces * mesh.context) for name, cut in job.cuts.items()}
    if experts is not None:
        experts.cut(within_unit)
    if pipeline is not None:
        pipeline.drop_absent_parameters()
    if experts is not None:
        experts.divide(mesh.unit)
    return pipeline, values


def build_strategy(context: StepContext) -> Strategy:
    """What makes a trainer's turns: data-parallel steps, rounds of local SGD, or steps with parameter servers."""
    plan, serving = context.plan, context.run.serving
    register_observers(context)
    refuse_unverified(context)
    if serving is not None:
        serving.contexts.append(context)
        return LockstepStrategy(context, data_parallel_step)
    if plan.local:
        return build_local_sgd(context)
    if plan.server is None:
        return build_steps(context)
    if plan.backup:
        return build_backup_windows(context)
    return build_async_windows(context) if plan.in_windows else build_server_steps(context)


def load_strategy(strategy: Strategy, saved: dict[str, Any], newcomer: bool) -> None:
    """Gives a strategy the state that one of any plan has saved. Only a `newcomer` takes what islands kept."""
    strategy.load(saved, newcomer)
    islands = saved.get("islands") or {}
    if newcomer and "each" in islands and not isinstance(strategy, LocalSgd):
        leave_islands(strategy.context, islands)


def current_run() -> Run:
    """The run of this process."""
    return Run.current(ParameterServer)
