"""Scenarios of days with failures: from descriptions, from the journal of a run, and with one thing changed."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from statistics import fmean, median
from typing import Any

from paceline.base.console import shown
from paceline.base.text import plural, total
from paceline.base.time_accounting import USEFUL
from paceline.errors import UsageError
from paceline.observe.summary import Summary
from paceline.observe.usual_step import UsualStep, usual_step
from paceline.plan import Plan
from paceline.planner.days import HOUR, GivenLoss, Scenario
from paceline.planner.descriptions import FailureDescription, MachineDescription, ModelDescription
from paceline.planner.step_time import step_time
from paceline.team.fault_injection import MOMENTS, parse_faults

# Words of a change and of a sweep that are fields of a scenario, and whether they are whole numbers.
FIELDS = {
    **dict.fromkeys(("every", "save", "write", "step", "detect", "form", "hand_over", "transfer", "restart"), False),
    **dict.fromkeys(("worker_hours", "host_hours", "repair_hours"), False),
    **dict.fromkeys(("spares", "least"), True),
}
WORDS = ("workers", "bandwidth", "link", "plan", *FIELDS)
LEAST_STEP = 1e-4  # seconds; no prediction is shorter
EVERY = 60.0  # seconds between checkpoints by default, as in `paceline run`
# Kinds of faults that lose a worker, and the seconds until its agent sees that.
LOSSES = {"kill": 0.0, "raise": 0.0, "exit": 0.0, "stop": 0.3}
_CHANGE = re.compile(r"([a-z_]+)=([+-]?)([0-9.]+)(x?)")


@dataclass(frozen=True)
class Situation:
    """A scenario, and what it was made of, so that one thing of it can be changed.

    `rows` and `tokens` are those of a step (0: unknown). A situation from a run has its usual `steps` and the `hosts`
    of its workers; one from descriptions has `machine`. Both may have a `model`, with which steps are predicted.
    """

    scenario: Scenario
    rows: float = 0.0
    tokens: float = 0.0
    plan: str = ""
    machine: MachineDescription | None = None
    model: ModelDescription | None = None
    trained_on: MachineDescription | None = None  # of a run
    steps: UsualStep | None = None
    parts: Mapping[str, float] = field(default_factory=dict)  # of a step's seconds, by name, if known
    hosts: Mapping[int, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def from_descriptions(
    machine: MachineDescription, model: ModelDescription | None, workers: int, plan: str, step: float | None
) -> Situation:
    """The situation of so many workers of these machines. Raises UsageError if they do not fit the plan."""
    failures, replica, notes = machine.failures, replica_of(plan, workers), list[str]()
    state = model.parameters * model.element_size * (1 + model.state) if model is not None else 0.0
    write = state / machine.checkpoint_bandwidth if machine.checkpoint_bandwidth else 0.0
    if not write:
        lacks = "the model is not known" if model is None else f"{machine.name} has no checkpoint_bandwidth"
        notes.append(f"checkpoints are written at once, because {lacks}")
    if not failures.worker_hours and not failures.host_hours:
        notes.append(f"nothing fails, because {machine.name} has neither worker_hours nor host_hours")
    if not machine.measured:
        notes.append(f"{machine.name} is a data sheet, not measured")
    link = machine.links[-1] if machine.links else None
    seconds, parts = step_seconds(machine, model, plan, workers, step)
    scenario = Scenario(
        workers,
        replica,
        machine.workers_per_host,
        step=seconds,
        every=EVERY,
        write=write,
        worker_hours=failures.worker_hours,
        host_hours=failures.host_hours,
        detect=failures.detect,
        form=failures.form,
        transfer=link.latency + state / replica / link.bandwidth if link is not None and link.bandwidth else 0.0,
        restart=failures.restart,
        repair_hours=failures.repair_hours,
        spares=failures.spares,
    )
    rows = float(model.global_batch) if model is not None else 0.0
    tokens = rows * model.tokens if model is not None and model.tokens > 1 else 0.0
    is_predicted = step is None
    return Situation(
        scenario, rows, tokens, plan, machine, model if is_predicted else None, parts=parts, notes=tuple(notes)
    )


def step_seconds(
    machine: MachineDescription, model: ModelDescription | None, plan: str, workers: int, given: float | None
) -> tuple[float, dict[str, float]]:
    """The seconds of a step, `given` or predicted, and their parts. Raises UsageError if they cannot be predicted."""
    if given is not None:
        return given, {}
    if model is None:
        what = f"the seconds of a step on {plural(workers, 'worker')} of {machine.name} are not known"
        cure = (
            "give --step-seconds, a description of the model (paceline plan SCRIPT --describe), or the folder of a run"
        )
        raise UsageError(what, cure)
    taken = step_time(Plan.parse(plan), model, machine, workers)
    return taken.total, taken.parts()


def from_run(
    summary: Summary,
    machine: MachineDescription | None = None,
    known: tuple[ModelDescription, MachineDescription] | None = None,
) -> Situation:
    """The situation of a run: its workers, steps, failures and checkpoints as its journal has them.

    Price and watts are those of `machine`, and if it describes failures also failures, repair, spares, and what a loss
    costs if the run has lost no worker. `known` are the run's model and the machines on which it trained, if they are
    described. Raises UsageError if the run has not made a step.
    """
    records = next(iter(summary.steps.values()), [])
    account, made = summary.account, total(records, "steps")
    if not made:
        raise UsageError("the run has not made a step yet", "wait for its first steps, or give a description")
    failures = machine.failures if machine is not None else FailureDescription()
    plan = str(summary.start.get("plan") or "")
    replica = Plan.parse(plan).mesh(1).replica
    members = summary.formed[-1].get("workers") if summary.formed else None
    current = list(members or range(summary.workers))
    current = current[: max(1, len(current) // replica) * replica]  # others wait until they make a replica
    trained = sum(account.get(name, 0.0) for name in (*USEFUL, "waiting")) or total(records, "seconds")
    lost = sum(len(event.get("workers") or []) for event in summary.lost)
    hours = len(current) * (sum(account.values()) or summary.wall_seconds) / HOUR
    changes, joins = len(summary.formed), _joins(summary)
    saves = summary.checkpoints
    saved = [float(event.get("at") or 0.0) for event in saves]
    gaps = [after - before for before, after in pairwise(saved) if after > before]
    scenario = Scenario(
        max(len(current), replica),
        replica,
        step=trained / made,
        waiting=account.get("waiting", 0.0) / trained if trained else 0.0,
        every=median(gaps) if gaps else EVERY,
        save=account.get("saving", 0.0) / len(saves) if saves else 0.0,
        write=max(0.0, fmean((e.get("took") or 0.0) - (e.get("seconds") or 0.0) for e in saves)) if saves else 0.0,
        worker_hours=hours / lost if lost else 0.0,
        detect=account.get("detection", 0.0) / lost if lost else failures.detect,
        form=account.get("forming", 0.0) / changes if changes else failures.form,
        hand_over=account.get("hand-over", 0.0) / joins if joins else 0.0,
        restart=_until_back(summary) or failures.restart,
        start=account.get("starting", 0.0) / max(1, len(summary.attempts)),
    )
    fails = machine is not None and failures != FailureDescription()
    notes = [] if lost or fails else ["the run has lost no worker: nothing fails"]
    if machine is not None and fails:
        scenario = replace(
            scenario,
            host=machine.workers_per_host,
            worker_hours=failures.worker_hours,
            host_hours=failures.host_hours,
            repair_hours=failures.repair_hours,
            spares=failures.spares,
        )
    return Situation(
        scenario,
        rows=summary.samples / made,
        tokens=total(records, "tokens") / made,
        plan=plan,
        machine=machine,
        model=None if known is None else known[0],
        trained_on=None if known is None else known[1],
        steps=usual_step(summary),
        parts=summary.time,
        hosts={worker: summary.host_of(worker) for worker in current},
        notes=tuple(notes),
    )


def _joins(summary: Summary) -> int:
    """How many teams formed with a worker that the team before did not have."""
    teams = [set(range(summary.workers)), *(set(event.get("workers") or []) for event in summary.formed)]
    return sum(bool(after - before) for before, after in pairwise(teams))


def _until_back(summary: Summary) -> float:
    """The mean seconds from the loss of a worker until a team with it forms; 0 if none came back."""
    formed = [(float(event.get("at") or 0.0), set(event.get("workers") or [])) for event in summary.formed]
    waits = []
    for event in summary.lost:
        lost_at = float(event.get("at") or 0.0)
        for worker in event.get("workers") or []:
            waits += [at - lost_at for at, team in formed if at > lost_at and worker in team][:1]
    return fmean(waits) if waits else 0.0


def replica_of(plan: str, workers: int) -> int:
    """The workers that together hold one copy of the training state under a plan. Raises PlanError if it does not fit
    the workers.
    """
    return Plan.parse(plan).validate(workers).mesh(workers).replica


def changed(situation: Situation, change: str) -> Situation:
    """The situation with one thing changed: ``workers=+2``, ``link=2x``, ``every=300``, ``plan=...``, ``host 3 gone``.

    Raises UsageError for anything else, and where the effect on a step is not known.
    """
    if gone := re.fullmatch("host (.+) gone", change):
        return _without_host(situation, gone[1])
    if change.startswith("plan="):
        return _with_plan(situation, change.removeprefix("plan="))
    parsed = _CHANGE.fullmatch(change)
    if not parsed or parsed[1] not in WORDS or (parsed[2] and parsed[4]):
        what = f"{shown(change)} is not a change"
        raise UsageError(what, f"write WORD=5, WORD=+2 or WORD=2x with one of {', '.join(WORDS)}, or 'host 3 gone'")
    word, sign, times = parsed[1], parsed[2], bool(parsed[4])
    try:
        amount = float(sign + parsed[3])
    except ValueError as error:
        raise UsageError(f"{parsed[3]} is not a number", "write it like 300 or 0.5") from error

    def of(old: float) -> float:
        return old * amount if times else old + amount if sign else amount

    if word == "workers":
        return with_workers(situation, round(of(situation.scenario.workers)))
    if word in ("link", "bandwidth"):
        if not times or not amount:
            raise UsageError(f"{word} is changed by a factor", f"write {word}=2x")
        return with_link(situation, amount)
    value = of(getattr(situation.scenario, word))
    if value < 0 or (FIELDS[word] and value != round(value)):
        raise UsageError(f"{word} cannot be {value:g}", "give a number from 0 on; of spares and least, a whole one")
    fields: dict[str, Any] = {word: int(value) if FIELDS[word] else value}
    return replace(situation, scenario=replace(situation.scenario, **fields))


def _with_plan(situation: Situation, plan: str) -> Situation:
    """The same model on the same machines under another plan; a run's steps take as many times longer or shorter as is
    predicted. Raises UsageError if its steps cannot be predicted.
    """
    scenario, machine, model = situation.scenario, situation.trained_on or situation.machine, situation.model
    replica = replica_of(plan, scenario.workers)
    if machine is None or model is None:
        what = f"the seconds of a step under the plan {shown(plan)} are not known"
        cure = f"describe the model (paceline plan SCRIPT --describe), or give --plan {shown(plan)} --step-seconds S"
        if situation.hosts:  # of a run
            cure = "describe model and machines (paceline plan SCRIPT --describe > FILE), and add --on FILE"
        raise UsageError(what, cure)
    step, parts = step_seconds(machine, model, plan, scenario.workers, None)
    if situation.trained_on is not None:
        predicted, _ = step_seconds(machine, model, situation.plan, scenario.workers, None)
        times = scenario.step / predicted
        step, parts = times * step, {name: times * seconds for name, seconds in parts.items()}
    scenario = replace(scenario, replica=replica, step=step)
    return replace(situation, plan=plan, parts=parts, steps=None, scenario=scenario)


def losses_of(faults: str) -> list[GivenLoss]:
    """The losses of a list of faults as `paceline chaos` takes it. Raises UsageError for kinds that lose no worker."""
    losses = []
    for fault in sorted(parse_faults(faults), key=lambda fault: fault.step):
        if fault.kind not in LOSSES:
            raise UsageError(f"{fault} cannot be simulated", f"use {', '.join(LOSSES)}")
        part = MOMENTS.index(fault.moment) / len(MOMENTS)
        losses.append(GivenLoss(fault.step + part, fault.worker, LOSSES[fault.kind]))
    return losses


def with_workers(situation: Situation, workers: int) -> Situation:
    """The same global batch on another number of workers.

    A run's own steps are replayed, and steps of a described model are predicted. Otherwise a step's seconds are divided
    evenly: what the workers send is not known.
    """
    scenario, replica = situation.scenario, situation.scenario.replica
    if workers < replica or workers % replica:
        what = f"{plural(workers, 'worker')} cannot be divided into replicas of {replica}"
        raise UsageError(what, f"use a multiple of {replica}")
    added, steps = workers - scenario.workers, situation.steps
    if steps is None and situation.machine is not None and situation.model is not None:
        step, _ = step_seconds(situation.machine, situation.model, situation.plan, workers, None)
    elif steps is None:
        step = scenario.step * scenario.workers / workers
    elif added >= 0:
        step = _replayed(situation, steps.with_more_workers(added))
    else:
        slowest = sorted(steps.pace, key=lambda worker: -steps.pace[worker])[:-added]
        step = _replayed(situation, steps.without(slowest))
    least = min(scenario.least, workers // replica)
    return replace(situation, scenario=replace(scenario, workers=workers, step=step, least=least))


def with_link(situation: Situation, times: float) -> Situation:
    """The links between hosts are so many times as fast."""
    scenario, step, machine = situation.scenario, situation.scenario.step, situation.machine
    if situation.steps is not None:
        step = _replayed(situation, situation.steps.with_link(times))
    elif machine is not None and situation.model is not None:
        machine = machine.with_links(times)
        step, _ = step_seconds(machine, situation.model, situation.plan, scenario.workers, None)
    return replace(
        situation,
        machine=machine,
        scenario=replace(scenario, step=step, hand_over=scenario.hand_over / times, transfer=scenario.transfer / times),
    )


def _without_host(situation: Situation, host: str) -> Situation:
    """The situation after a host is gone for good, given by its name or its number from 0 on."""
    scenario, names = situation.scenario, list(dict.fromkeys(situation.hosts.values()))
    if not names:
        return with_workers(situation, scenario.workers - scenario.host)
    name = names[int(host)] if host.isdecimal() and int(host) < len(names) and host not in names else host
    gone = [worker for worker, of in situation.hosts.items() if of == name]
    if not gone or len(gone) == scenario.workers:
        what = f"host {shown(host)} " + ("has all workers of the run" if gone else "is not one of the run")
        raise UsageError(what, f"name one of {', '.join(names)}" if len(names) > 1 else "the run has one host only")
    fewer = with_workers(replace(situation, steps=None), scenario.workers - len(gone))
    if situation.steps is None:
        return fewer
    step = _replayed(situation, situation.steps.without(gone))
    return replace(fewer, scenario=replace(fewer.scenario, step=step))


def _replayed(situation: Situation, predicted: float) -> float:
    """The seconds of a step if the usual one of the run took `predicted` seconds: what lies between steps stays."""
    usual = situation.steps.step_seconds if situation.steps is not None else predicted
    return max(LEAST_STEP, situation.scenario.step + predicted - usual)
