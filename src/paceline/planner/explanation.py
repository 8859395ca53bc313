"""Predicts one plan for a script in the form in which a run journals its own figures."""

from __future__ import annotations

from itertools import accumulate, pairwise
from typing import Any

from paceline.parallel.pipeline.schedule import stages_of
from paceline.plan import Plan
from paceline.planner.compute_time import BACKWARDS, ComputeTime
from paceline.planner.descriptions import MachineDescription, ProbeResult
from paceline.planner.workload import Workload

NOWHERE = MachineDescription("the machine of the probe", {"fp32": 1.0}, 1.0, 1.0)  # blocks have measured seconds


def figures_of(plan: Plan, workers: int, probed: ProbeResult) -> dict[str, Any]:
    """Returns an event for `observe.plan_explanation`: the stages of a valid plan, and what each worker of a replica
    holds, sends and computes, from the result of a probe, `probed`.
    """
    model = probed.model
    assert model is not None
    workload = Workload(plan, model, workers)
    compute, mesh = ComputeTime(workload, NOWHERE), workload.mesh
    rows, stages = workload.micro, probed.stages[str(plan)]
    ends = [0, *accumulate(count for _, count in stages)]
    blocks = [tuple((block, 1) for block in model.blocks[start:end]) for start, end in pairwise(ends)]
    forwards = [compute.forward(of_stage, rows) for of_stage in blocks]
    by_stage = []
    for (names, _), of_stage, forward in zip(stages, blocks, forwards, strict=True):
        passes = round(of_stage[-1][0].passes * workload.activation_scale * rows / mesh.context) if of_stage else 0
        by_stage.append({"blocks": names, "forward": forward, "backward": BACKWARDS * forward, "passes": passes})
    predicted = []
    for position, held in enumerate(probed.plans[str(plan)]):
        local = stages_of(plan.stage_order, mesh.pipeline, workload.virtual, position)
        saved = sum(compute.saved(block, rows) for stage in local for block, _ in blocks[stage])
        predicted.append(
            {
                "parameters": held.parameters,
                "gradients": held.gradients,
                "optimizer": held.optimizer,
                "sent": held.sent,
                "activations": round(saved * held.in_flight / len(local)),
                "seconds": (1 + BACKWARDS) * sum(forwards[stage] for stage in local) * workload.forwards,
            }
        )
    by_worker = [predicted[mesh.coordinate(rank, "pipeline")] for rank in range(mesh.replica)]
    setting = {"model": model.name, "micro": rows, "micro_batches": -(-model.global_batch // rows)}
    setting |= {"plan": str(plan), "workers": workers, "size": probed.size}
    return {**setting, "stages": by_stage, "predicted": by_worker}
