"""`paceline explain`: describes a plan before the workers exist."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path

from paceline.errors import UsageError
from paceline.launch.options import LaunchOptions
from paceline.launch.plan import probe
from paceline.observe.plan_explanation import PlanExplanation
from paceline.plan import Plan
from paceline.planner.descriptions import ProbeRequest
from paceline.planner.explanation import figures_of


def explain_plan(text: str, workers: int | None, options: LaunchOptions | None) -> PlanExplanation:
    """Explains a plan for `workers` workers (default: as few as the plan needs). With a script, one worker runs it up
    to its first step, and the explanation has figures. PlanError, UsageError: as in a run. LaunchError: the script ends
    before its first step.
    """
    plan = Plan.parse(text)
    workers = workers or plan.mesh(1).replica * (plan.data or 1)
    plan = plan.validate(workers)
    if options is None:
        return PlanExplanation(plan, workers, {})
    with tempfile.TemporaryDirectory(prefix="paceline-explain-") as folder:
        options = replace(options, plan=str(plan), max_restarts=0)
        request = ProbeRequest(workers, (str(plan),), measures_machine=False)
        probed = probe(Path(folder) / "one", options, request)
    if probed.refused:
        raise UsageError(*probed.refused[str(plan)])
    return PlanExplanation.of(figures_of(plan, workers, probed))
