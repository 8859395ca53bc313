"""``--plan auto``: chooses the plan of a run before its workers start, or takes the one that the run began with."""

from __future__ import annotations

import math
import tempfile
from dataclasses import replace
from pathlib import Path

from paceline.base.console import in_one_line, say
from paceline.base.journal import read_journal
from paceline.base.text import duration, plural
from paceline.errors import PlanError
from paceline.launch.fork_server import Kept
from paceline.launch.local import launch
from paceline.launch.options import ChosenPlan, LaunchOptions
from paceline.launch.outcome import newest_checkpoint
from paceline.launch.plan import Planning, Question
from paceline.plan import Plan
from paceline.planner.candidates import words_of
from paceline.planner.choose import Answer, milliseconds
from paceline.planner.outlook import Outlook

LIMIT = 20.0  # seconds after which no further trial begins; one that has begun takes some seconds more
PART = 0.1  # of the run that these trials may take, too
STEPS, SECONDS = 5, 5.0  # to measure in each, at most


def launch_with_chosen_plan(options: LaunchOptions) -> int:
    """Runs the script under the plan that `auto` chooses. Raises the errors of `with_chosen_plan` and `launch`."""
    with Kept() as warm:  # the run's workers are forked from the process from which those of trials were
        return launch(with_chosen_plan(replace(options, kept=warm)))


def with_chosen_plan(options: LaunchOptions) -> LaunchOptions:
    """Returns the options with the chosen plan in place of `auto`; other words of the plan stay as they are.

    A resumed run goes on with the plan that it began with, unless the number of workers changed. Raises PlanError if
    the workers are on several hosts, and LaunchError if the script does not train.
    """
    asked = Plan.parse(options.plan or "")
    if not asked.auto:
        return options
    if options.join or options.nodes or options.begin > options.workers:
        what = "auto tries plans before the run starts, and cannot do so with workers on several hosts"
        raise PlanError(what, "run `paceline plan` on one host, and give the plan that it prints")
    kept = replace(asked, auto=False)
    if options.workers == 1:
        return replace(options, plan=str(kept) or None)
    chosen = _earlier(options) or _choose(options, kept)
    say(f"auto: {chosen.what}: {chosen.why}")
    return replace(options, plan=chosen.plan, chosen=chosen)


def _earlier(options: LaunchOptions) -> ChosenPlan | None:
    """Returns the plan that was chosen when the run began, if it was for as many workers and the same words."""
    folder = Path(options.run_dir or "")
    if options.run_dir is None or not (folder / "journal.jsonl").exists():
        return None
    for event in reversed(read_journal(folder)):
        if event["event"] == "decision" and event.get("asked") == options.plan:
            if event.get("workers") != options.workers:
                return None
            what, outlook = f"the plan stays {event['plan']!r}", Outlook.read(folder)
            outlook = outlook if outlook is not None and outlook.plan == event["plan"] else None
            return ChosenPlan(
                event["plan"], options.plan or "", options.workers, what, "the run began with it", outlook
            )
    return None


def _choose(options: LaunchOptions, kept: Plan) -> ChosenPlan:
    with tempfile.TemporaryDirectory(prefix="paceline-auto-") as folder:
        done = newest_checkpoint(Path(options.run_dir)) if options.run_dir else None
        question = Question(
            steps=STEPS,
            kept=kept,
            seconds=SECONDS,
            limit=LIMIT,
            alone=False,
            part=PART,
            most=options.max_steps or math.inf,
            done=done or 0,
        )
        answer = Planning(replace(options, plan=str(kept) or None, spares=0), question, Path(folder)).answer()
    best = answer.best
    if best is None:
        raise PlanError(
            f"no plan fits into the memory of {plural(options.workers, 'worker')} of {in_one_line(options.script)}",
            "use more workers, on other hosts",
        )
    words, outlook = words_of(best.plan), Outlook.of(answer, kept)
    return ChosenPlan(words, options.plan or "", options.workers, f"the plan is {words!r}", _reason(answer), outlook)


def _reason(answer: Answer) -> str:
    """Returns why the best plan was chosen: its seconds and those of the others that were tried."""
    best = answer.best
    assert best is not None
    how = "was measured" if best.trial is not None and not math.isinf(best.step_seconds) else "is predicted"
    step = f"a step of {milliseconds(best.step_seconds)} {how}"
    if answer.short is not None:
        return f"{step}; the run takes about {duration(answer.short)}, too short for trials of other plans to pay"
    tried = [one for one in answer.prospects if one.trial is not None and one is not best]
    others = ", ".join(f"{milliseconds(one.step_seconds)} with {words_of(one.plan)!r}" for one in tried)
    more = f"; others took {others}" if others else ""
    return f"{step}{more}; trials took {duration(answer.took)}"
