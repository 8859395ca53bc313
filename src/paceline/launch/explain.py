"""`paceline explain`: describes a plan before the workers exist."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path

from paceline.base.console import in_one_line
from paceline.errors import LaunchError, UsageError
from paceline.launch.check import rehearse
from paceline.launch.options import LaunchOptions
from paceline.observe.plan_explanation import PlanExplanation
from paceline.plan import Plan


def foretold(text: str, workers: int | None, options: LaunchOptions | None) -> PlanExplanation:
    """Explains a plan for `workers` workers (default: as few as the plan needs). With a script, one worker runs it up
    to its first step, and the explanation has figures. PlanError, UsageError: as in a run. LaunchError: the script ends
    before its first step.
    """
    plan = Plan.parse(text)
    workers = workers or plan.mesh(1).replica * (plan.data or 1)
    plan = plan.validate(workers)
    if options is None:
        return PlanExplanation(plan, workers, {})
    kept = ("micro", "precision", "optimizer_states", "recompute", "tiles")
    alone = Plan(**{name: getattr(plan, name) for name in kept})
    with tempfile.TemporaryDirectory(prefix="paceline-explain-") as folder:
        options = replace(options, plan=str(alone) or "data=1", max_restarts=0)
        code, answer = rehearse(Path(folder) / "one", options, {"explain": [str(plan), workers]})
    if code or not answer:
        why = f"exit code {code}" if code else "it ended before its first step"
        raise LaunchError(f"{in_one_line(options.script)} did not reach its first step: {why}", "see the output above")
    if "refused" in answer:
        raise UsageError(*answer["refused"])
    return PlanExplanation.of(answer)
