"""``--plan auto``: chooses the plan of a run before its workers start, or takes the one that the run began with.

With workers on several hosts, each trial is a run that the other hosts join, and then they join the next one: their
agents stay, and so do the processes that have imported torch. The model is measured on the first host, the links
between hosts in the first trial. The run itself is the last one that they join.
"""

from __future__ import annotations

import math
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from paceline.base.console import in_one_line, say
from paceline.base.journal import read_journal
from paceline.base.text import duration, plural
from paceline.errors import LaunchError, PlanError
from paceline.launch.check import rehearse
from paceline.launch.coordinator_process import write_address
from paceline.launch.fork_server import WarmProcessHolder
from paceline.launch.local import PATIENCE, as_node, launch, making_folder, run_folder, size_over_hosts, with_size
from paceline.launch.options import ChosenPlan, LaunchOptions
from paceline.launch.outcome import newest_checkpoint
from paceline.launch.plan import Planning, Question
from paceline.launch.time_limit import parse_time
from paceline.plan import Plan
from paceline.planner.candidates import layout_of, words_of, words_over
from paceline.planner.choose import Answer, milliseconds
from paceline.planner.outlook import Outlook
from paceline.team.auth import make_token

LIMIT = 20.0  # seconds after which no further trial begins; one that has begun takes some seconds more
PART = 0.1  # of the run that these trials may take, too
STEPS, SECONDS = 10, 4.0  # to measure in each, at most
LONGEST = "10min"  # that a trial over several hosts may take, but for the first one, which waits for them
LOST = "a host was lost while plans were tried", "start the same commands again"


def launch_with_chosen_plan(options: LaunchOptions) -> int:
    """Runs the script under the plan that `auto` chooses. A host that joins a run takes the run's plan, and waits for
    it. Raises the errors of `with_chosen_plan` and `launch`.
    """
    if options.nodes is not None:
        options = as_node(options)
    if options.join is not None:
        return launch(replace(options, plan=None, patience=max(options.patience, PATIENCE)))
    with WarmProcessHolder() as warm:  # the run's workers are forked from the process from which those of trials were
        return launch(with_chosen_plan(replace(with_size(options), warm_holder=warm)))


def with_chosen_plan(options: LaunchOptions) -> LaunchOptions:
    """Returns the options with the chosen plan in place of `auto`; other words of the plan stay as they are. If there
    are more workers than those of this host (`options.size`), hosts that join have the others.

    A resumed run goes on with the plan that it began with, unless the number of workers changed. Raises LaunchError if
    the script does not train.
    """
    asked, workers = Plan.parse(options.plan or ""), options.size or options.workers
    if not asked.auto:
        return options
    fixed_words = replace(asked, auto=False)
    if workers == 1:
        return replace(options, plan=str(fixed_words) or None)
    trials = None
    if workers > options.workers:
        options = replace(options, run_dir=str(run_folder(options)))
        trials = _Trials(options)
    chosen = _earlier(options, workers)
    if chosen is None:
        chosen = _choose(options, fixed_words, workers, trials)
    say(f"auto: {chosen.what}: {chosen.why}")
    options = replace(options, plan=chosen.plan, chosen=chosen)
    if trials is None:
        return options
    plan = replace(Plan.parse(chosen.plan), data=None).validate(workers)
    words = words_over(plan, trials.hosts(workers))
    size = size_over_hosts(words, options.workers, workers)
    return replace(options, plan=words, size=size, epoch=trials.epoch, port=trials.port)


class _Trials:
    """Runs trials on this host and on those that join it; `options` are those of the run. `epoch` is that of the next
    coordinator, which listens at the same `port`, so that hosts join it again. The first one has `waited` so many
    seconds for them.
    """

    def __init__(self, options: LaunchOptions) -> None:
        self._options, self.epoch, self.port, self.waited = options, options.epoch, options.port, 0.0
        self._folder = Path(options.run_dir or "")
        with making_folder():
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._token = options.token or make_token(self._folder)

    def hosts(self, workers: int) -> tuple[int, ...]:
        """Returns how many of `workers` workers each host has. Where that is not known, each has as many as this
        host, until all are given out.
        """
        if sum(self._options.hosts) == workers:
            return self._options.hosts
        each = self._options.workers
        return tuple(min(each, workers - before) for before in range(0, workers, each))

    def run(self, folder: Path, options: LaunchOptions, request: dict[str, Any]) -> tuple[int, Any]:
        """Runs the script in a fresh folder, as `rehearse` does. All workers of a trial begin together: one that joined
        the others would hold their state twice for a moment.
        """
        given, workers = self._options, options.workers
        if workers <= given.workers:
            return rehearse(folder, options, request)
        is_first, began = self.epoch == given.epoch, time.time()
        if is_first:
            say(f"waiting for {plural(workers - given.workers, 'worker')} of other hosts ...")
        options = replace(options, workers=given.workers, size=workers, begin=workers, trial=tuple(request["trial"]))
        options = replace(options, listen=given.listen, port=self.port, epoch=self.epoch, token=self._token)
        options = replace(options, on_listening=self._listens, max_time=None if is_first else LONGEST)
        try:
            code, answer = rehearse(folder, options, request)
        except SystemExit:
            if is_first or time.time() - began < parse_time(LONGEST):  # the user has stopped it
                raise
            raise LaunchError(*LOST) from None
        if is_first:
            formed = [event["at"] for event in read_journal(folder / "run") if event["event"] in ("start", "formed")]
            self.waited = max(0.0, max(formed, default=began) - began)
        self.epoch += 1
        if answer and answer.get("workers", workers) != workers:
            raise LaunchError(*LOST)
        return code, answer

    def _listens(self, address: tuple[str, int]) -> None:
        host, self.port = address
        write_address(self._folder, host, self.port, self.epoch)
        if self._options.on_listening is not None:
            self._options.on_listening(address)


def _earlier(options: LaunchOptions, workers: int) -> ChosenPlan | None:
    """Returns the plan that was chosen when the run began, if it was for as many workers and the same words."""
    folder = Path(options.run_dir or "")
    if options.run_dir is None or not (folder / "journal.jsonl").exists():
        return None
    for event in reversed(read_journal(folder)):
        if event["event"] == "decision" and event.get("asked") == options.plan:
            if event.get("workers") != workers:
                return None
            what, outlook = f"the plan stays {event['plan']!r}", Outlook.read(folder)
            outlook = outlook if outlook is not None and outlook.plan == event["plan"] else None
            return ChosenPlan(event["plan"], options.plan or "", workers, what, "the run began with it", outlook)
    return None


def _choose(options: LaunchOptions, fixed_words: Plan, workers: int, trials: _Trials | None) -> ChosenPlan:
    """Tries plans for `workers` workers. A plan whose replicas span hosts is not chosen if their checkpoints would have
    no folder, unless the words say so.
    """
    spans = options.checkpoints is not None or bool(layout_of(fixed_words))
    with tempfile.TemporaryDirectory(prefix="paceline-auto-") as folder:
        done = newest_checkpoint(Path(options.run_dir)) if options.run_dir else None
        question = Question(
            steps=STEPS,
            fixed_words=fixed_words,
            seconds=SECONDS,
            limit=LIMIT,
            alone=False,
            part=PART,
            most=options.max_steps or math.inf,
            done=done or 0,
            spans=spans,
        )
        if trials is not None:
            hosts = trials.hosts(workers)
            question = replace(question, hosts=hosts, rehearse=trials.run, waited=lambda: trials.waited)
        given = replace(options, plan=str(fixed_words) or None, spares=0, workers=workers)
        answer = Planning(given, question, Path(folder)).answer()
    best = answer.best
    if best is None:
        program = in_one_line(options.script)
        if answer.prospects:
            what = f"no plan fits into the memory of {plural(workers, 'worker')} of {program}"
            raise PlanError(what, "use more workers, on other hosts")
        plan, reason = next(iter(answer.refused.items()))
        what = f"no plan can be used for {plural(workers, 'worker')} of {program} ({plan}: {in_one_line(reason)})"
        raise PlanError(what, "use other words, or another number of workers")
    words, outlook = words_of(best.plan), Outlook.of(answer, fixed_words, spans)
    return ChosenPlan(words, options.plan or "", workers, f"the plan is {words!r}", _reason(answer), outlook)


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
