"""`paceline plan`: finds the fastest plan for a script on so many workers. It predicts all, and tries the best."""

from __future__ import annotations

import json
import math
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from paceline.base.console import command_line, in_one_line, say
from paceline.base.environment import gpus
from paceline.base.text import plural
from paceline.errors import LaunchError, PlanError, UsageError
from paceline.launch.check import rehearse
from paceline.launch.fork_server import WarmProcessHolder
from paceline.launch.options import LaunchOptions
from paceline.plan import Plan
from paceline.planner.candidates import (
    candidates,
    has_same_layout,
    layout_of,
    probed_words,
    spans_hosts,
    without_layout,
    words_of,
    words_over,
)
from paceline.planner.choose import Answer, Predictor, Prospect, corrected_by_trials, ranked
from paceline.planner.descriptions import (
    MachineDescription,
    ModelDescription,
    ProbeRequest,
    ProbeResult,
    TrialResult,
    as_json,
    converted,
)
from paceline.planner.history import History, Prediction, history_of
from paceline.planner.picture import save

ALLOWED = "lossy", "local", "precision"
MOST = 12  # further trials, if plans turn out to be refused
ALONE = "one worker"  # the name of the plan for one worker
SHOWN = 8  # plans in the table that were not tried
CAUTION = 0.85  # part of a worker's memory that the first trial may be predicted to take: nothing corrects that yet
KILLED = 137  # the exit code of a run whose worker was killed, as for want of memory
CLOSE = 1.25  # plans that take at most so many times as long as the fastest are tried a second time


@dataclass(frozen=True)
class Question:
    """What `paceline plan` is asked: how many plans to try, for how many measured steps, and what to choose from."""

    tries: int = 3  # plans to try
    steps: int = 20  # steps to measure in each trial
    memory: float | None = None  # bytes that a worker may take
    fixed_words: Plan = field(default_factory=Plan)  # words that stay as they are
    allowed: frozenset[str] = frozenset()  # changes of the result, see `candidates`
    seconds: float = 15.0  # of steps, after which a trial ends with fewer of them
    machines: str | None = None  # a description of other machines than these, see `MachineDescription.read`
    limit: float = math.inf  # seconds after which no further trial begins
    part: float = math.inf  # part of the run that further trials may take, if its number of steps is known
    most: float = math.inf  # steps after which the run ends in any case
    done: int = 0  # steps that it has made
    alone: bool = True  # whether one worker is tried, too
    hosts: tuple[int, ...] = ()  # the workers of each host, if there are several
    spans: bool = True  # whether replicas may span them
    rehearse: Callable[[Path, LaunchOptions, dict[str, Any]], tuple[int, Any]] = rehearse  # runs the script
    waited: Callable[[], float] = float  # returns the seconds for which trials have waited for other hosts


class Planning:
    """Answers one question. Its trials run in `folder`, one after another."""

    def __init__(self, options: LaunchOptions, question: Question, folder: Path) -> None:
        self._options, self._question, self._folder = options, question, folder
        self._runs, self._began, self._limit = 0, time.monotonic(), question.limit
        self._history: History | None = None

    def answer(self) -> Answer:
        """Probes the machines, predicts all plans and tries the best ones. LaunchError: the script does not train."""
        question, workers = self._question, self._options.workers
        elsewhere = None if question.machines is None else MachineDescription.read(question.machines)
        probed = self._probe((question.hosts or (workers,))[0] if elsewhere is None else 1)
        assert probed.model is not None
        assert probed.machine is not None
        model, machine, left, is_short = probed.model, probed.machine, math.inf, False
        if elsewhere is not None:
            model, machine = model.without_seconds(), elsewhere
        # What was measured here says nothing about other machines.
        self._history = None if elsewhere is not None else history_of(machine.name)
        predictor = Predictor(model, machine, probed, self._history, question.memory)
        script, base = Plan.parse(probed.script if self._options.plan is None else self._options.plan), None
        if elsewhere is None and (question.tries or question.hosts):
            base = self._first_trial(predictor, script, probed.refused)
        if base is not None:
            predictor = predictor.corrected(base)
            machine = predictor.machine
        plans, refused = self._candidates(predictor.model, script)
        refused |= {text: reason for text, (reason, _) in probed.refused.items()}
        prospects = {str(plan): predictor.predict(plan, workers) for plan in plans if str(plan) not in refused}
        alone = _valid(without_layout(script), 1)
        if workers > 1 and question.alone and not layout_of(question.fixed_words) and alone is not None:
            prospects[ALONE] = predictor.predict(alone, 1)
        if base is not None:
            if base.plan in prospects:
                prospects[base.plan] = prospects[base.plan].with_trial(base)
            left = self._left(base)
            self._limit = min(question.limit, self._passed + question.part * left)
            is_short = question.part * left < self._passed  # a further trial takes about as long as the first one
            if not is_short:
                self._try(prospects)
            self._drop_refused(prospects, refused)
            self._remember(prospects, base, model)
        ranking, error = ranked(prospects.values()), None if self._history is None else self._history.error()
        return Answer(predictor.model, machine, ranking, refused, self._passed, base, left if is_short else None, error)

    def _candidates(self, model: ModelDescription, script: Plan) -> tuple[list[Plan], dict[str, str]]:
        question = self._question
        choice = question.fixed_words, question.allowed, model.merges, self._within
        return candidates(self._options.workers, model, script, *choice)

    def _first_trial(self, predictor: Predictor, script: Plan, refused: Mapping[str, object]) -> TrialResult | None:
        """Tries a first plan, by which other predictions are corrected: the script's if it is predicted to fit, else
        the fastest one that is. Where workers run a model that is in pieces, micro-batches are not merged, so a plan
        without a layout comes first. None if no plan fits.
        """
        workers = self._options.workers
        simple, stated = _valid(without_layout(script), workers), _valid(script, workers)

        def in_order() -> Iterator[Prospect]:
            for plan in dict.fromkeys((simple, stated) if stated is None or stated.one_by_one else (stated,)):
                if plan is not None:
                    yield predictor.predict(plan, workers)
            plans, _ = self._candidates(predictor.model, script)  # only if none of the above can be tried
            yield from ranked(predictor.predict(plan, workers) for plan in plans if str(plan) not in refused)[:MOST]

        for one in in_order():
            if one.memory > CAUTION * one.room:
                continue
            text = self._options.plan if one.plan == stated else self._words(one)
            result = self._run(text, workers, first=True)
            if not result.refused:
                return result
        return None

    def _remember(self, prospects: Mapping[str, Prospect], base: TrialResult, model: ModelDescription) -> None:
        """Adds the predictions of the tried plans to the history, but for the plan from which they were made."""
        assert self._history is not None  # trials are of these machines
        for key, one in prospects.items():
            if one.trial is not None and key != base.plan and one.workers == base.workers:
                seconds = one.uncorrected, one.seconds, one.step_seconds
                about = model.name, model.parameters, time.time()
                peak, sent = max(one.trial.peaks, default=0), sum(one.trial.sent.values())
                self._history.add(Prediction(key, one.workers, *seconds, *about, one.memory, peak, sent=sent))

    def _left(self, base: TrialResult) -> float:
        """Returns the seconds that the run will take, if its steps are those of the script's first loop."""
        steps = min(base.total or math.inf, self._question.most) - self._question.done
        return max(0.0, steps) * base.step_seconds

    @property
    def _within(self) -> tuple[int, ...]:
        """The workers of each host, if no replica may span them."""
        return () if self._question.spans else self._question.hosts

    @property
    def _passed(self) -> float:
        return time.monotonic() - self._began - self._question.waited()

    def _probe(self, workers: int) -> ProbeResult:
        """Returns a probe by so many workers. LaunchError: the script does not reach its first step."""
        question = self._question
        say(f"measuring the model and the machines on {plural(workers, 'worker')} ...")
        asked = ProbeRequest(
            self._options.workers,
            (),
            str(question.fixed_words),
            tuple(sorted(question.allowed)),
            question.memory or 0.0,
            self._within,
        )
        return probe(self._folder / "probe", self._trial_options(self._options.plan, workers), asked, question.rehearse)

    def _try(self, prospects: dict[str, Prospect]) -> None:
        """Tries plans that fit: each time the one predicted to be fastest, as corrected by the trials before. Then
        tries those that are about as fast as the best of them once more.
        """
        for turn in range(1, self._question.tries + MOST + 1):
            done = sum(one.turn > 0 and one.fits and not one.is_refused for one in prospects.values())
            untried = [key for key, one in prospects.items() if one.fits and one.trial is None]
            ready = [key for key in untried if key == ALONE or done < self._question.tries]
            if not ready or self._passed > self._limit:
                break
            self._try_one(prospects, min(ready, key=lambda key: (key == ALONE, prospects[key].seconds)), turn)
            prospects |= corrected_by_trials(prospects, self._options.workers)
        tried = [key for key, one in prospects.items() if one.is_measured]
        least = min((prospects[key].step_seconds for key in tried), default=0.0)
        close = [key for key in tried if prospects[key].step_seconds <= CLOSE * least]
        for key in close if len(close) > 1 else ():
            if self._passed < self._limit:
                self._try_one(prospects, key)

    def _try_one(self, prospects: dict[str, Prospect], key: str, turn: int = 0) -> None:
        one = prospects[key]
        result = self._run(self._words(one), one.workers)
        alike = [key]
        if result.refused:  # as are plans that place the parts of the model in the same way
            alike = [other for other, two in prospects.items() if has_same_layout(one.plan, two.plan)]
        for other in alike:
            prospects[other] = prospects[other].with_trial(result, turn)

    def _words(self, one: Prospect) -> str:
        """Returns the words to give for a plan."""
        if not self._question.hosts or one.workers == 1:
            return words_of(one.plan)
        return words_over(one.plan, self._question.hosts)

    def _drop_refused(self, prospects: dict[str, Prospect], refused: dict[str, str]) -> None:
        for key, one in [*prospects.items()]:
            if one.trial is not None and one.trial.refused:
                refused[key] = one.trial.refused
                del prospects[key]

    def _trial_options(self, text: str | None, workers: int) -> LaunchOptions:
        given = self._options
        return LaunchOptions(
            given.script,
            given.arguments,
            workers,
            given.module,
            plan=text,
            shares=given.shares,
            cold_start=given.cold_start,
            warm_holder=given.warm_holder,
            environment=given.environment,
            config=given.config,
            # Parameter servers, and workers on other hosts, need a team that may change.
            max_restarts=int("server=" in (text or "") or bool(self._question.hosts)),
        )

    def _run(self, text: str | None, workers: int, first: bool = False) -> TrialResult:
        """Runs a trial of a plan, or of the script's plan. LaunchError: the script ends too early in the `first`
        one.
        """
        question, self._runs = self._question, self._runs + 1
        what = f"the plan {text!r}" if text else "the script's plan"
        say(f"{plural(question.steps, 'step')} with {what} on {plural(workers, 'worker')} ...")
        request = {"trial": [question.steps, question.seconds]}
        code, answer = question.rehearse(self._folder / str(self._runs), self._trial_options(text, workers), request)
        if answer and answer["refused"]:
            return TrialResult(text or "", workers, refused=answer["refused"])
        if code or not answer:
            why = f"exit code {code}" if code else "it ended before the last step of the trial"
            if first and code != KILLED:
                problem = f"{in_one_line(self._options.script)} could not be tried with {what}: {why}"
                raise LaunchError(problem, "see the output above, or use fewer --steps")
            return TrialResult(text or "", workers, refused=why)
        return converted(TrialResult, answer)


def probe(
    folder: Path,
    options: LaunchOptions,
    request: ProbeRequest,
    run: Callable[[Path, LaunchOptions, dict[str, Any]], tuple[int, Any]] = rehearse,
) -> ProbeResult:
    """Runs a script up to its first step and probes its model there; `run` starts it. LaunchError: it ends before."""
    if options.plan is not None:
        options = replace(options, plan=str(probed_words(Plan.parse(options.plan))) or f"data={options.workers}")
    code, answer = run(folder, options, {"probe": as_json(request)})
    if code or not answer:
        why = f"exit code {code}" if code else "it ended before its first step"
        raise LaunchError(f"{in_one_line(options.script)} did not reach its first step: {why}", "see the output above")
    return converted(ProbeResult, answer)


def plan(
    options: LaunchOptions,
    question: Question,
    form: str = "text",
    svg: Path | None = None,
    explained: str | None = None,
    launcher: Sequence[str] = (),
) -> str:
    """Answers the question: as a text, as "json", or as "describe", the descriptions that predictions are made from.

    Also draws the plans to the file `svg`, and explains the plan `explained`. `launcher` are the words that start a run
    on other hosts. Raises UsageError if the file cannot be written or the form has no explanations.
    """
    if explained is not None and form != "text":
        raise UsageError(f"--explain is text, and --{form} prints JSON", "leave one of them out; --json has all parts")
    if svg is not None and not os.access(svg.parent, os.W_OK):
        raise UsageError(f"--svg cannot be written to {in_one_line(svg.parent)}", "give a folder that can be written")
    with tempfile.TemporaryDirectory(prefix="paceline-plan-") as folder, WarmProcessHolder() as warm_holder:
        if explained is not None:
            Plan.parse(explained).validate(options.workers)
        answer = Planning(replace(options, warm_holder=warm_holder), question, Path(folder)).answer()
    if svg is not None:
        save(answer, svg)
    if form == "describe":
        return json.dumps({"model": as_json(answer.model), "machine": as_json(answer.machine)}, indent=2)
    if form == "json":
        return json.dumps(answer.as_data(), indent=2)
    more = "" if explained is None else f"\n\n{answer.explain(explained, options.workers)}"
    return f"{_command(options, answer, launcher, question.hosts)}\n\n{answer.text(SHOWN)}{more}"


def _command(options: LaunchOptions, answer: Answer, launcher: Sequence[str], hosts: Sequence[int]) -> str:
    """Returns the command that trains with the best plan."""
    best, program = answer.best, options.program
    if best is None:
        return _nothing(answer)
    alone = best.workers == 1 and options.workers > 1
    words = words_over(best.plan, hosts) if launcher and not alone else words_of(best.plan)
    start = ("run", "--workers", str(best.workers)) if alone or not launcher else launcher
    command = command_line(["paceline", *start, "--plan", words, *program])
    if alone:
        return f"{command}   # one worker is faster than {options.workers}"
    if spans_hosts(best.plan, hosts):
        return f"{command}   # give --checkpoints, too: a folder or URL that all hosts share"
    return command


def _nothing(answer: Answer) -> str:
    """Explains why no plan can be recommended."""
    if answer.prospects:
        return "no plan fits: use more workers, on other hosts, or a smaller model"
    return "no plan can be used for this model, for the reasons below: use other words or another number of workers"


def _valid(plan: Plan, workers: int) -> Plan | None:
    """Returns a plan for so many workers; None if it is for another number of them."""
    try:
        return plan.validate(workers)
    except PlanError:
        return None


def local_workers() -> int:
    """Returns how many workers this host has devices for: its GPUs, or its CPU cores."""
    return gpus() or len(os.sched_getaffinity(0))


def parse_allowed(text: str) -> frozenset[str]:
    """Converts ``lossy,local`` to names of changes. Raises UsageError for an unknown one."""
    names = frozenset(word for word in text.replace(",", " ").split())
    if unknown := names - {*ALLOWED}:
        raise UsageError(f"--allow does not know {min(unknown)!r}", f"use {', '.join(ALLOWED)}")
    return names
