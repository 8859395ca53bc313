"""Watches the steps of a run whose plan `auto` has chosen, and proposes a plan that pays; see planner/outlook.py."""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from statistics import median_low as median
from typing import Any

from paceline.base.console import say
from paceline.base.environment import gpus
from paceline.base.exit_codes import INTERRUPTED, STOPPED
from paceline.base.heartbeat import BUSY, DONE, STEPS, USUAL
from paceline.base.journal import NAME, Journal, Reader
from paceline.base.text import duration, plural
from paceline.errors import PlanError
from paceline.launch.options import ChosenPlan, LaunchOptions
from paceline.launch.workers import Worker
from paceline.planner.candidates import words_over
from paceline.planner.choose import milliseconds
from paceline.planner.descriptions import ALIKE
from paceline.planner.history import history_of
from paceline.planner.outlook import MARGIN, Now, Outlook, PlanChange

LOOK = 0.5  # seconds between two looks
SECONDS = 4.0  # for which a team must have trained, and made `WARM` steps
WARM = 2 * STEPS
STAYED = 30.0  # the same of a team that has lost workers, which may come back
LATER = 2.0  # if no plan pays, the pause before the next comparison grows by this factor
RAREST = 600.0  # seconds of such a pause, at most
COPIED = 1e8  # bytes per second that are written to a checkpoint, and read from it
SLOW = 1.5  # times the usual load of a worker that is named
SIDES = "predicted", "measured"  # in the journal's figures
FIRST_STEPS = 10  # steps of the new plan that take twice as long


def next_options(options: LaunchOptions, code: int, change: PlanChange | None, trained: bool) -> LaunchOptions | None:
    """Returns the options with which a run goes on after an attempt that ended with this exit code: with another plan
    if its plan was to be changed; with the next best plan, or the one before, if no worker has `trained` under the new
    one. None: its plan is no reason to continue.
    """
    chosen = options.chosen
    if chosen is None or chosen.outlook is None:
        return None
    if change is not None:
        return _with_change(options, change)
    before, now = chosen.before, chosen.now
    if before is None or now is None or trained or code in (0, STOPPED, INTERRUPTED):
        return None
    assert before.chosen is not None
    assert before.chosen.outlook is not None
    outlook = before.chosen.outlook.without(chosen.plan, chosen.workers)
    following = replace(before, chosen=replace(before.chosen, outlook=outlook))
    what, why = f"the plan stays {before.plan!r}", f"the run did not start under {chosen.plan!r}"
    if (another := outlook.better(now, history_of(outlook.machine.name))) is not None:
        following = _with_change(following, another)
        what, reason = describe(outlook, another)
        why = f"{why}; {reason}"
    if not options.quiet:
        say(f"auto: {what}: {why}")
    assert following.chosen is not None
    return replace(following, chosen=replace(following.chosen, what=what, why=why))


def _with_change(options: LaunchOptions, change: PlanChange) -> LaunchOptions:
    chosen = options.chosen
    assert chosen is not None
    assert chosen.outlook is not None
    what, why = describe(chosen.outlook, change)
    outlook = chosen.outlook.changed(change)
    another = ChosenPlan(change.plan, chosen.asked, change.workers, what, why, outlook, options, change.now)
    workers = min(options.workers, change.now.started)
    plan = outlook.plan_for(change.workers)
    words = change.plan if workers == change.workers else words_over(plan, change.now.hosts)
    return replace(options, plan=words, workers=workers, chosen=another, begin=1)


def describe(outlook: Outlook, change: PlanChange) -> tuple[str, str]:
    """Returns what a change of the plan is, and why, for the console and the journal."""
    now = change.now
    taken, expected = milliseconds(now.seconds), milliseconds(change.seconds)
    why = f"a step takes {taken}, and {expected} are expected; the {now.rest:,} remaining steps take "
    why += f"{duration(change.gain)} less, and the change costs about {duration(now.cost)}"
    if change.workers < outlook.workers:
        why = f"{change.workers} of {plural(outlook.workers, 'worker')} can be used; {why}"
    elif change.workers > outlook.workers:
        why = f"{change.workers} instead of {plural(outlook.workers, 'worker')} can be used; {why}"
    elif now.loads and max(now.loads) > SLOW * median(now.loads):
        slowest = now.loads.index(max(now.loads))
        why = f"worker {slowest} takes {max(now.loads) / min(now.loads):.1f} times as long as the fastest; {why}"
    return f"the plan changes from {outlook.plan!r} to {change.plan!r}", why


class PlanWatch:
    """Watches one attempt of a run. It stops after `max_steps` steps, or at the monotonic time `deadline`.

    All numbers come from the pages that workers share with their agent, and from the journal, which has those of
    workers that have joined. Plans are compared in a thread of their own, as that may take seconds for many workers.
    """

    def __init__(
        self, outlook: Outlook, folder: Path, journal: Journal, max_steps: int | None, deadline: float
    ) -> None:
        self.outlook, self._journal = outlook, journal
        self._most, self._deadline = max_steps or math.inf, deadline
        path = folder / NAME
        self._reader = Reader(folder, path.stat().st_size if path.exists() else 0, damaged=False)
        self._history = history_of(outlook.machine.name)
        self._due = 0.0
        self._team: tuple[int, ...] = ()
        self._hosts: tuple[int, ...] = ()  # the workers on each host: of the team, and others that could be
        self._reported: dict[int, float] = {}  # busy seconds of workers that another command has started
        self._since, self._done_before = math.inf, 0.0  # when the team began, and the steps before
        self._began: float | None = None  # monotonic seconds at which the workers started
        self._started: float | None = None  # seconds until their first step
        self._events: dict[str, dict[str, Any]] = {}  # the newest of each kind
        self._several = False  # whether the script has several trainers
        # Seconds in which each worker would be busy with all rows, in the trial; or else in the first steps.
        unit = outlook.plan_for(outlook.workers).mesh(outlook.workers).unit
        self._unit, self._usual = unit, tuple(seconds * (outlook.workers // unit) for seconds in outlook.busy)
        self._next, self._pause = 0.0, SECONDS
        self._thread: threading.Thread | None = None
        self._better: PlanChange | None = None
        self.now: Now | None = None  # what was measured last
        self._has_reported = False

    def look(
        self, now: float, members: Sequence[int], workers: Mapping[int, Worker], hosts: Sequence[int] = ()
    ) -> PlanChange | None:
        """Returns a plan that pays, if there is one. `members` are the workers of the team, `workers` those that this
        agent has started; `hosts` says how many workers each host has that are in the team or could be.
        """
        if now < self._due:
            return None
        self._due = now + LOOK
        first = workers.get(members[0]) if members else None
        if first is None or self._deadline <= now:
            return None
        alive = len([worker for worker in workers.values() if worker.alive and not worker.serves])
        self._time_start(now, first)
        self._read()
        done, team = first.pulse[DONE], (tuple(members), tuple(hosts) or (alive,))
        if team != (self._team, self._hosts):
            self._team, self._hosts = team
            self._since, self._done_before, self._pause, self._reported = now, done, SECONDS, {}
        if done - self._done_before < WARM or now - self._since < SECONDS:
            return None
        self.now = self._measure(first, workers, alive, now)
        if self.now is not None and self.outlook.before and not self._has_reported:
            self._has_reported = True
            self._report_gain(self.now)
        if self._thread is not None:
            return self._result()
        is_smaller = len(members) < self.outlook.workers
        # Devices are numbered from 0, so fewer workers would also use the GPU of a worker that is lost.
        waits = is_smaller and (gpus() > 0 or now - self._since < STAYED)
        if self.now is None or now < self._next or waits or not self._drifts(self.now):
            return None
        self._next, self._pause = now + self._pause, min(LATER * self._pause, RAREST)
        self._thread = threading.Thread(target=self._compare, args=(self.now,), name="paceline-plans", daemon=True)
        self._thread.start()
        return None

    def texts(self, change: PlanChange) -> tuple[str, str]:
        """Returns what a change of the plan is, and why."""
        return describe(self.outlook, change)

    def remember(self) -> None:
        """Adds the prediction of the plan and its steps to the history, at the end of an attempt."""
        if self.now is None or len(self.now.loads) != self.outlook.workers:
            return
        self._read()
        figures, memory = (self._events.get(kind, {}) for kind in ("figures", "memory"))
        sent = [sum((each[0].get("sent") or {}).values()) for kind in SIDES if (each := figures.get(kind))]
        sent = sent if len(sent) == len(SIDES) else [0.0, 0.0]
        comparison = self.outlook.comparison(self.now, memory.get("process") or 0.0, sent)
        if comparison is not None:
            self._history.add(comparison)

    def _report_gain(self, now: Now) -> None:
        """Journals what a change of the plan has gained."""
        outlook = self.outlook
        what = f"a step takes {milliseconds(now.seconds)} under the plan {outlook.plan!r}"
        why = f"it took {milliseconds(outlook.before)} before the change; {milliseconds(outlook.seconds)} were expected"
        self._journal.write("decision", what=what, why=why)

    def _compare(self, now: Now) -> None:
        with suppress(PlanError):  # the plan of a team that has lost workers, for this moment
            self._better = self.outlook.better(now, self._history)

    def _result(self) -> PlanChange | None:
        thread, better = self._thread, self._better
        assert thread is not None
        if thread.is_alive():
            return None
        self._thread, self._better = None, None
        if better is None or self.now is None or better.workers != self.now.workers + self.now.spare:
            return None  # the team has changed meanwhile
        return better

    def _time_start(self, now: float, first: Worker) -> None:
        """Measures how long it takes from the start of processes to the first step."""
        if self._began is None:
            self._began = now
        if self._started is None and first.pulse[DONE]:
            self._started = now - self._began

    def _read(self) -> None:
        for _, event in self._reader.news():
            if event["event"] in ("grid", "step", "shares", "figures", "memory", "links"):
                self._several |= bool(event.get("trainer"))
                self._events[event["event"]] = event
            elif event["event"] == "loaded":
                self._reported |= {int(number): seconds for number, seconds in event.get("busy", {}).items()}

    def _measure(self, first: Worker, workers: Mapping[int, Worker], alive: int, now: float) -> Now | None:
        """Returns what is measured of the team, whose first member is `first`; None if too little is known. So many
        workers of this agent are `alive`.
        """
        grid, step = (self._events.get(kind, {}) for kind in ("grid", "step"))
        seconds, model = first.pulse[USUAL], self.outlook.model
        if self._several or not grid.get("steps") or not grid.get("rows") or not seconds:
            return None
        busy, every = self._busy(workers), self.outlook.workers
        if not busy:
            return None
        if len(self._usual) != every:  # the plan was not tried: loads are relative to its first steps
            if len(busy) != every:
                return None
            self._usual = tuple(busy)
        loads = self._loads(busy)
        rest = min(grid["steps"], self._most) - (step.get("step") or 0)
        rest = int(min(rest, (self._deadline - now) / seconds))
        tokens = (step.get("tokens") or 0) / (step.get("samples") or 1)
        longer = tokens / model.tokens if tokens and model.tokens > 1 else 1.0
        state = model.parameters * model.element_size * (1 + model.state)
        cost = (self._started or 0.0) + 2 * state / COPIED + FIRST_STEPS * seconds
        spare = max(0, sum(self._hosts) - len(loads))
        return Now(seconds, len(loads), loads, rest, cost, longer, spare, alive, self._hosts, self._link)

    @property
    def _loads_before(self) -> Sequence[float]:
        loads = self.outlook.loads
        return loads if len(loads) == self.outlook.workers else (1.0,) * self.outlook.workers

    @property
    def _link(self) -> tuple[float, float] | None:
        """The bytes a second, and the seconds one way, of the slowest link between hosts of the team, if measured."""
        pairs = self._events.get("links", {}).get("pairs") or []
        return (min(pair[2] for pair in pairs), max(pair[3] for pair in pairs)) if pairs else None

    def _busy(self, workers: Mapping[int, Worker]) -> list[float]:
        """Returns the seconds for which each worker of the team would be busy in a step with all rows; an empty list if
        that is not known of all of them.
        """
        team, shares, units = self._team, self._events.get("shares", {}), len(self._team) // self._unit
        known = self._reported | {number: worker.pulse[BUSY] for number, worker in workers.items()}
        if not known.keys() >= {*team}:
            return []
        parts = shares.get("parts") or []
        if shares.get("workers") != [*team] or len(parts) != units:
            parts = [1 / units] * units
        return [known[number] / (parts[rank // self._unit] or 1 / units) for rank, number in enumerate(team)]

    def _loads(self, busy: Sequence[float]) -> tuple[float, ...]:
        """Returns the load of each worker of the team. A worker that was not there in the trial is compared with those
        that compute the same part of the model.
        """
        normal = [max(usual / before, 1e-9) for usual, before in zip(self._usual, self._loads_before, strict=True)]
        alike = [median(normal[part :: self._unit]) for part in range(self._unit)]
        usual = [
            normal[number] if number < len(normal) else alike[rank % self._unit]
            for rank, number in enumerate(self._team)
        ]
        return tuple(seconds / each for seconds, each in zip(busy, usual, strict=True))

    def _drifts(self, now: Now) -> bool:
        """Whether steps, workers or their loads are other than expected, so that another plan may be better."""
        before = self._loads_before
        known = {number: load for number, load in zip(self._team, now.loads, strict=True) if number < len(before)}
        moved = any(abs(load / before[number] - 1) > ALIKE for number, load in known.items())
        others = now.workers + now.spare != self.outlook.workers
        return moved or others or now.seconds > (1 + MARGIN) * self.outlook.seconds
