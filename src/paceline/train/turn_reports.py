"""The reports that workers exchange at the end of a turn of several steps that each has made by itself."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from paceline.base.batching import NOTHING, Agreed
from paceline.errors import NonFiniteLossError
from paceline.train.step import Step
from paceline.train.step_context import StepContext


class BrokenOffError(Exception):
    """The turn was broken off because a worker was asked to stop; it does not count. `agreed`: what all know."""

    def __init__(self, agreed: Agreed) -> None:
        super().__init__("the step was interrupted")
        self.agreed = agreed


def exchange_reports(
    context: StepContext, step: Step, fields: dict[str, Any], seconds: float, trouble: NonFiniteLossError | None
) -> list[dict[str, Any]]:
    """Exchanges all workers' reports at the end of a turn, and sets `step.agreed` from them. Collective.

    `fields` are the caller's own part of this worker's report. Returns the reports by rank. If a worker has `trouble`,
    all workers raise it.
    """
    group, run = context.run.team.group, context.run
    wants = {
        "stop": run.notices.stop_signal is not None,
        "save": run.wants_save(step.steps),
        "enter": context.transactions.newcomers,
        "look": group.rank == 0 and group.size > 1 and context.weights.has_time,
        **run.checkpoints.fields,
    }
    state = {"trouble": trouble and [trouble.what, trouble.cure], "news": context.notes.untold()}
    group.declare(step.name, check=False, kind="turns")
    reports = group.gather_json({**fields, **state, "wants": wants, "seconds": seconds, "digest": step.digest or 0.0})
    if troubles := [report["trouble"] for report in reports if report["trouble"]]:
        raise NonFiniteLossError(*troubles[0])
    for report in reports:
        step.news = {kind: (what, why) for kind, (what, why) in report["news"].items()} | step.news
    sums = {key: sum(report["wants"][key] for report in reports) for key in wants} | {
        "news": sum(bool(report["news"]) for report in reports)
    }
    seconds_of, digests = (tuple(report[key] for report in reports) for key in ("seconds", "digest"))
    step.agreed = replace(NOTHING, seconds=seconds_of, digests=digests, **sums)
    return reports
