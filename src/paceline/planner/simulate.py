"""`paceline simulate`: what becomes of days on many machines that fail, and what would change it."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean, quantiles
from typing import Any

from paceline.base.console import in_one_line, shown
from paceline.base.environment import parse_save_every
from paceline.base.journal import plain, replace_file
from paceline.base.schema import read_file
from paceline.base.text import duration, number, plural
from paceline.base.time_accounting import COSTS, USEFUL
from paceline.errors import PacelineError, UsageError
from paceline.observe.runs import columns
from paceline.observe.summary import Summary
from paceline.observe.team_table import a_step
from paceline.planner.days import DAY, REACTIONS, Day, best_interval, restart_progress, simulate
from paceline.planner.descriptions import MachineDescription, ModelDescription, described
from paceline.planner.outlook import Outlook
from paceline.planner.scenarios import FIELDS, Situation, changed, from_descriptions, from_run, losses_of

COUNTED = ("steps", "rows", "tokens", "kWh")  # of a day
POINTS = 7  # values of a sweep, at most
SWEPT = ("every", "spares", "workers", "worker_hours", "bandwidth")
HIGH_RATIO = 8  # of a sweep's ends, from which on its values are multiples of one another


@dataclass(frozen=True)
class SimulateOptions:
    """The options of `paceline simulate`."""

    what: str | None
    machine: str | None
    workers: int | None
    plan: str | None
    step_seconds: float | None
    reaction: str | None
    save_every: str | None
    save_seconds: float | None
    days: float
    steps: int | None
    faults: str | None
    seed: int
    seeds: int
    changes: Sequence[str]
    sweep: str | None
    as_json: bool
    html: Path | None
    trace: Path | None


@dataclass(frozen=True)
class Outcome:
    """The days of a situation, one for each seed, and their means and 5 to 95 % ranges."""

    situation: Situation
    days: Sequence[Day]

    @staticmethod
    def of(situation: Situation, options: SimulateOptions) -> Outcome:
        """Simulates a situation with each seed."""
        seconds = options.days * DAY
        steps = math.inf if options.steps is None else float(options.steps)
        losses = None if options.faults is None else losses_of(options.faults)
        if wrong := [loss.worker for loss in losses or () if loss.worker >= situation.scenario.workers]:
            what = f"--faults names worker {wrong[0]}, but the workers are 0 to {situation.scenario.workers - 1}"
            raise UsageError(what, "name one of them")
        seeds = range(options.seed, options.seed + (options.seeds if losses is None else 1))
        return Outcome(situation, [simulate(situation.scenario, seconds, seed, losses, steps) for seed in seeds])

    @property
    def goodput(self) -> float:
        """The mean part of the wall clock in which training advanced."""
        return fmean(day.goodput for day in self.days)

    @property
    def progress(self) -> float:
        """The mean work, as a part of that of a complete team that never fails or saves."""
        return fmean(day.progress for day in self.days)

    @property
    def span(self) -> tuple[float, float]:
        """The 5 and 95 % quantiles of progress over the seeds."""
        return _span([day.progress for day in self.days])

    @property
    def account(self) -> dict[str, float]:
        """The mean seconds of each account, in the order of a run's report."""
        means = {name: fmean(day.account.get(name, 0.0) for day in self.days) for name in (*USEFUL, *COSTS)}
        return {name: seconds for name, seconds in means.items() if seconds > 1e-9}

    def per_day(self) -> dict[str, float]:
        """What a day brings and takes: losses, steps, and where known rows, tokens, price and kWh."""
        situation, scenario = self.situation, self.situation.scenario
        steps = self.progress * DAY / scenario.step
        seconds = sum(day.seconds for day in self.days)
        values = {"losses": DAY * sum(day.losses for day in self.days) / seconds if seconds else 0.0, "steps": steps}
        values |= {"rows": steps * situation.rows, "tokens": steps * situation.tokens}
        machines, machine = scenario.workers + scenario.spares, situation.machine
        if machine is not None:
            values |= {"price": 24 * machines * machine.price, "kWh": 0.024 * machines * machine.watts}
        return {name: value for name, value in values.items() if value or name in ("losses", "steps")}


def _span(values: Sequence[float]) -> tuple[float, float]:
    """The 5 and 95 % quantiles."""
    cuts = quantiles(values, n=20, method="inclusive") if len(values) > 1 else values
    return cuts[0], cuts[-1]


def command(**given: Any) -> str:
    """Returns the text that `paceline simulate` prints, after writing the files that are asked for.

    Raises UsageError for options that do not fit each other.
    """
    from paceline.planner.simulation_page import page, trace  # not with every simulation

    options = SimulateOptions(**given)
    situation = _situation(options)
    if options.sweep is not None:
        for name, file in {"--html": options.html, "--trace": options.trace}.items():
            if file is not None:
                raise UsageError(f"{name} shows one situation, and --sweep simulates several", f"leave {name} out")
        for text in options.changes:
            situation = changed(situation, text)
        return _sweep(options, situation)
    reactions = [options.reaction] if options.reaction else [*REACTIONS]
    main = situation.scenario.reaction
    names = {name: _with(situation, reaction=name) for name in reactions}
    outcomes = {name: Outcome.of(each, options) for name, each in names.items()}
    for text in options.changes:
        outcomes[text] = Outcome.of(changed(situation, text), options)
    outcome = outcomes[main]
    if options.html is not None:
        replace_file(options.html, page(outcome, outcomes, options.seed))
    if options.trace is not None:
        trace(outcome.days[0], options.trace)
    if options.as_json:
        return json.dumps(plain({name: _entry(each) for name, each in outcomes.items()}), indent=1)
    return "\n\n".join([_head(outcome, options), _table(outcomes), _account(outcome), _facts(outcome)])


def _situation(options: SimulateOptions) -> Situation:
    """The situation that the options describe."""
    machine = MachineDescription.read(options.machine) if options.machine is not None else None
    path = Path(options.what) if options.what is not None else None
    if path is not None and path.suffix != ".json":
        if options.plan is not None or options.step_seconds is not None:
            refused = "--plan" if options.plan is not None else "--step-seconds"
            raise UsageError(f"{refused} is known from the run {in_one_line(path)}", f"leave {refused} out")
        situation = from_run(Summary(path), machine, _known(path, options.machine))
        if options.workers is not None:
            situation = changed(situation, f"workers={options.workers}")
    elif machine is None:
        raise UsageError("no machines are given", "use --on CLUSTER.json, or give the folder of a run")
    else:
        model = described(ModelDescription, read_file(path), str(path)) if path is not None else None
        if model is not None and not machine.measured:  # its seconds were measured elsewhere
            model = model.without_seconds()
        workers = options.workers or machine.workers_per_host
        situation = from_descriptions(machine, model, workers, options.plan or "", options.step_seconds)
    fields: dict[str, Any] = {"reaction": options.reaction} if options.reaction is not None else {}
    if options.save_seconds is not None:
        fields["save"] = options.save_seconds
    situation = _with(situation, **fields)
    if options.save_every is not None:
        seconds, steps = parse_save_every(options.save_every)
        scenario = situation.scenario
        every = seconds if seconds is not None else steps * scenario.step if steps else best_interval(scenario)
        situation = _with(situation, every=max(every, scenario.step))
        if options.save_every == "auto" and not scenario.save and not scenario.write:
            note = "checkpoints are taken to cost nothing, so one after each step is best: give --save-seconds"
            situation = replace(situation, notes=(*situation.notes, note))
    return situation


def _known(run: Path, machines: str | None) -> tuple[ModelDescription, MachineDescription] | None:
    """The model and the machines of a run: as `auto` has described them, or as in the file that describes both."""
    outlook = Outlook.read(run)
    if outlook is not None:
        return outlook.model, outlook.machine
    with suppress(OSError, PacelineError):
        data = read_file(Path(machines or ""))
        return described(ModelDescription, data, ""), described(MachineDescription, data, "")
    return None


def _with(situation: Situation, **fields: Any) -> Situation:
    return replace(situation, scenario=replace(situation.scenario, **fields))


def _head(outcome: Outcome, options: SimulateOptions) -> str:
    scenario = outcome.situation.scenario
    loss = scenario.seconds_between_losses
    often = f"a worker or host is lost every {duration(loss)}" if loss < math.inf else "nothing fails"
    size = plural(scenario.workers, "worker")
    replicas = f" in replicas of {scenario.replica}" if scenario.replica > 1 else ""
    spares = f" and {plural(scenario.spares, 'spare')}" if scenario.spares else ""
    interval = max(scenario.every, scenario.write)
    every = f"a checkpoint every {duration(interval)}" if interval < math.inf else "no checkpoints"
    span = (
        f"{options.days:g} day{'s' * (options.days != 1)}" if options.steps is None else plural(options.steps, "step")
    )
    over = f"{plural(len(outcome.days), 'simulation')} of {span}"
    return f"{size}{replicas}{spares}; a step in {a_step(scenario.step)}; {often}; {every}\n{over}"


def _table(outcomes: dict[str, Outcome]) -> str:
    """A row for each reaction and each change; the last column explains the reactions."""
    rows = [["after a loss", "goodput", "progress", "5 to 95 %", "step", ""]]
    for name, outcome in outcomes.items():
        low, high = outcome.span
        cells = [f"{outcome.goodput:.3f}", f"{outcome.progress:.3f}", f"{low:.3f} to {high:.3f}"]
        rows.append([name, *cells, a_step(outcome.situation.scenario.step), REACTIONS.get(name, "")])
    return columns(rows)


def _account(outcome: Outcome) -> str:
    account, total = outcome.account, sum(outcome.account.values())
    heads = [f"account of {outcome.situation.scenario.reaction}", "time", "part"]
    rows = [[name, duration(seconds), f"{seconds / total:.2%}"] for name, seconds in account.items()]
    return columns([heads, *rows])


def _facts(outcome: Outcome) -> str:
    """What a day brings and takes, the best interval of checkpoints, and the notes."""
    situation, per_day = outcome.situation, outcome.per_day()
    counted = [f"{number(round(per_day[name]))} {name}" for name in COUNTED if name in per_day]
    losses = f"{per_day['losses']:.1f} losses"
    price = [f"price {number(round(per_day['price']))}"] if "price" in per_day else []
    lines = [f"a day: {', '.join([losses, *counted, *price])}"]
    scenario = replace(situation.scenario, reaction="restart")
    best = best_interval(scenario)
    if scenario.save and best < math.inf:
        at_best = restart_progress(replace(scenario, every=best))
        lines.append(f"best interval of checkpoints to restart from: {duration(best)} (progress {at_best:.3f})")
    return "\n".join([*lines, *(f"note: {note}" for note in situation.notes)])


def _entry(outcome: Outcome) -> dict[str, Any]:
    """A situation and its result as JSON data."""
    result: dict[str, Any] = {"goodput": outcome.goodput, "goodput_5_95": _span([d.goodput for d in outcome.days])}
    result |= {"progress": outcome.progress, "progress_5_95": outcome.span}
    a_day = outcome.per_day()
    return {**result, "account": outcome.account, "per_day": a_day, "scenario": asdict(outcome.situation.scenario)}


def sweep_values(text: str, situation: Situation) -> tuple[str, list[float]]:
    """The word of a sweep ``WORD=A..B`` and its values. Raises UsageError if it is not one."""
    word, _, ends = text.partition("=")
    try:
        low, high = (float(end.removesuffix("s")) for end in ends.split(".."))
    except ValueError:
        low, high = 1.0, 0.0
    if word not in SWEPT or not 0 <= low < high < math.inf or (low == 0 and word != "spares"):
        cure = f"write WORD=A..B with A below B, and WORD one of {', '.join(SWEPT)}"
        raise UsageError(f"--sweep {shown(text)} is not a range", cure)
    apart = high / low >= HIGH_RATIO if low else False
    steps = [step / (POINTS - 1) for step in range(POINTS)]
    values = [low * (high / low) ** part if apart else low + (high - low) * part for part in steps]
    if word in ("spares", "workers"):
        unit = situation.scenario.replica if word == "workers" else 1
        values = [float(max(word == "workers", round(value / unit)) * unit) for value in values]
    elif apart:
        values = [low, *(float(f"{value:.2g}") for value in values[1:-1]), high]  # round ones
    return word, list(dict.fromkeys(values))


def _sweep(options: SimulateOptions, situation: Situation) -> str:
    """A table of progress by way of reacting for each value of a word, and of steps a day with the best one."""
    word, values = sweep_values(options.sweep or "", situation)
    reactions = [options.reaction] if options.reaction else [*REACTIONS]
    rows = [[word, *reactions, "closed form", "steps a day"]]
    results = []
    for value in values:
        factor = f"{word}={value:.12g}" + "x" * (word == "bandwidth")
        point = changed(situation, factor)
        outcomes = {name: Outcome.of(_with(point, reaction=name), options) for name in reactions}
        results.append({word: value, **{name: _entry(each) for name, each in outcomes.items()}})
        closed = restart_progress(point.scenario)
        best = max(each.per_day()["steps"] for each in outcomes.values())
        cells = [f"{each.progress:.3f}" for each in outcomes.values()]
        rows.append([number(int(value)) if FIELDS.get(word) else f"{value:,.6g}", *cells])
        rows[-1] += [f"{closed:.3f}", number(round(best))]
    return json.dumps(plain(results), indent=1) if options.as_json else columns(rows)
