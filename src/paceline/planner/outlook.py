"""Decides, while a run trains, whether it would end earlier under another plan. No torch.

`auto` chooses a plan from trials of a few seconds, and a run may last for days, in which a worker becomes slow or is
lost, others join, or rows become longer. The flow:

1. What was known when the plan was chosen is an `Outlook`, which the run folder keeps: descriptions of the model and of
   the machines, and the *ratio* of measured to predicted seconds for each plan that was tried or used.
2. The agent measures a step, and how long each worker is busy in it, from numbers that workers share with it anyway
   (`launch/plan_watch.py`). Nothing is probed while the run trains.
3. How long a worker is busy, relative to the trial, is its *load*: it tells how much longer computing takes on all of
   them (longer rows, another program) or on single ones. `Outlook.better` predicts all plans under these loads. Plans
   whose shares follow the speed of workers lose less by a slow worker than those that wait for it. A prediction times
   the ratio of its plan gives the seconds of a step. If loads do not explain those of the present plan, a disturbed
   machine may, and other plans are expected to be as much slower; unless steps take much longer, or the plan was never
   tried: then it has another ratio.
4. If a plan gains more over the remaining steps than the change costs, with a margin for its error, the agent stops the
   run at the end of a step, with a checkpoint, and starts the workers again under that plan, from the process that has
   imported torch already. Agents of workers that have joined do so, too: they join the run again.
5. The steps of the new plan are measured in the same way, and added to the history of predictions. If the change did
   not bring its gain, the ratio of the new plan says so, in this run and in later ones.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from paceline.base.journal import replace_file
from paceline.base.schema import read_file
from paceline.plan import Plan
from paceline.planner.candidates import candidates, words_of
from paceline.planner.choose import MARGIN as FREE
from paceline.planner.choose import Answer
from paceline.planner.descriptions import (
    ALIKE,
    BETWEEN,
    VERSION,
    Amount,
    Count,
    Description,
    MachineDescription,
    ModelDescription,
    relative_loads,
)
from paceline.planner.history import History, Prediction
from paceline.planner.memory import checkpoint_copy, worker_memory
from paceline.planner.step_time import step_time

NAME = "outlook.json"  # in the run folder
MOST = 3  # changes of a run's plan to one that was never tried, and as many others
MARGIN = 0.1  # part of a step that a plan must save which was tried or used before
UNTRIED = 0.2  # the same of other plans, at least
UNMEASURED = 1.2e8, 2e-4  # bytes a second, and seconds one way, of a link between hosts that nothing has used: Ethernet
DOUBT = 1.5  # times as long as expected that steps take if that may have reasons which all plans share


@dataclass(frozen=True)
class Now:
    """What is measured of a run that trains, and what a change of its plan would cost."""

    seconds: float  # of a step
    workers: int  # of the team
    loads: tuple[float, ...]  # seconds of each worker for the same rows, relative to the trial; empty: not known
    rest: int  # steps that are left
    cost: float  # seconds of a change
    longer: float = 1.0  # tokens of a row, relative to the trial
    spare: int = 0  # workers that are ready, and that the team cannot use under its plan
    started: int = 0  # workers that the run's first command has started
    hosts: tuple[int, ...] = ()  # the workers on each host, with those that the team cannot use
    link: tuple[float, float] | None = None  # bytes a second, and seconds one way, of the slowest between hosts


@dataclass(frozen=True)
class PlanChange:
    """A change of the plan that pays."""

    plan: str  # words
    seconds: float  # of a step, as expected
    gain: float  # seconds that the remaining steps take less, without the cost
    ratio: float  # of these seconds to predicted ones
    workers: int
    now: Now


class Outlook(Description, frozen=True):
    """What is known of the plans for a run whose plan `auto` has chosen."""

    plan: str  # the run's
    workers: Count
    predicted: Amount  # seconds of a step under it
    seconds: Amount  # the same as measured in its trial, or else as predicted
    script: str  # the plan from whose words all plans are made
    fixed_words: str  # words that stay as they are
    model: ModelDescription
    machine: MachineDescription
    ratio: Amount = 1.0  # of measured to predicted seconds, of plans that are not in `ratios`
    ratios: dict[str, Amount] = msgspec.field(default_factory=dict)
    busy: tuple[Amount, ...] = ()  # seconds of a step in which each worker did not wait for others, in its trial
    loads: tuple[Amount, ...] = ()  # of the workers at that time, or when the run's plan was changed; empty: all 1
    before: Amount = 0.0  # seconds of a step under the plan before the last change
    memory: Amount = 0.0  # bytes of a worker's process, as predicted
    floor: Amount = 0.0  # bytes of a worker's process besides what is predicted
    refused: tuple[str, ...] = ()  # plans that this model cannot use
    spans: bool = False  # whether replicas may span hosts, which share the folder of checkpoints
    changes: Count = 0  # of the run's plan
    error: Amount = 0.0  # the largest relative error of what was expected of these
    version: Count = VERSION  # of the format

    @staticmethod
    def read(folder: Path) -> Outlook | None:
        """Reads the outlook of a run; None if its folder has none that can be read."""
        try:
            outlook: Outlook = msgspec.json.decode(read_file(folder / NAME), type=Outlook)
        except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
            return None
        return outlook if outlook.version == VERSION else None

    def write(self, folder: Path) -> None:
        """Writes it into the run folder."""
        replace_file(folder / NAME, msgspec.json.encode(self))

    def better(self, now: Now, history: History) -> PlanChange | None:
        """Returns the plan that gains most over the remaining steps, if its gain is worth the change."""
        present = self.plan_for(now.workers)
        if now.rest <= 0 or self.changes >= 2 * MOST:
            return None
        best: PlanChange | None = None
        forecast, untried = self._forecast(now), self._margin(now, history)
        unexplained = now.seconds / forecast.seconds(present) / self.ratios.get(str(present), self.ratio)
        shared = unexplained if unexplained < DOUBT and not self.changes else 1.0
        workers = now.workers + now.spare
        others, room = self._forecast(now, workers), self.machine.memory * (1 - FREE)
        for plan in self._plans(workers, present, now.hosts):
            ratio, least = self.ratios.get(str(plan)), MARGIN
            if ratio is None:
                if untried >= 1:
                    continue
                ratio, least = self.ratio * history.correction(plan, self.model, workers), untried
            seconds = shared * ratio * others.seconds(plan)
            gain = (now.seconds - seconds) * now.rest
            pays = seconds <= (1 - least) * now.seconds and gain > 2 * now.cost
            if pays and (best is None or seconds < best.seconds) and self._memory(plan, others) <= room:
                best = PlanChange(words_of(plan), seconds, gain, ratio, workers, now)
        return best

    def _margin(self, now: Now, history: History) -> float:
        """Returns the part of a step that a plan must save which was never tried: twice the error of predictions, as
        far as it is known. After some changes, only plans remain whose seconds were measured.
        """
        if self.changes >= MOST:
            return 1.0
        error = history.error()
        return max(UNTRIED, 2 * self.measured(now).error, 2 * error[1] if error else 0.0)

    def measured(self, now: Now) -> Outlook:
        """Returns the outlook with the ratio of the present plan, as far as loads do not explain its seconds."""
        present = self.plan_for(now.workers)
        ratio = now.seconds / self._forecast(now).seconds(present)
        error = abs(ratio / self.ratios.get(str(present), ratio) - 1) if self.changes else 0.0
        return msgspec.structs.replace(self, ratios={**self.ratios, str(present): ratio}, error=max(self.error, error))

    def changed(self, change: PlanChange) -> Outlook:
        """Returns the outlook of the run under another plan."""
        measured = self.measured(change.now)
        plan = _resolved(change.plan, change.workers)
        return msgspec.structs.replace(
            measured,
            ratios={**measured.ratios, str(plan): change.ratio},
            plan=change.plan,
            workers=change.workers,
            predicted=change.seconds,
            seconds=change.seconds,
            busy=(),
            loads=change.now.loads,
            before=change.now.seconds,
            memory=self._memory(plan, self._forecast(change.now, change.workers)),
            changes=self.changes + 1,
        )

    def without(self, words: str, workers: int) -> Outlook:
        """Returns the outlook without a plan that could not be started."""
        plan = str(_resolved(words, workers))
        return msgspec.structs.replace(self, refused=(*self.refused, plan), changes=self.changes + 1)

    def comparison(self, now: Now, peak: float, sent: Sequence[float]) -> Prediction | None:
        """Returns the predictions of the present plan beside what was measured, for the history: its steps, the `peak`
        of worker 0's process, and the bytes that it `sent` in a step (predicted, measured). None for the script's plan,
        by whose trial predictions are corrected.
        """
        present = self.plan_for(now.workers)
        if str(present) == self.script and not self.changes:
            return None
        uncorrected = self._forecast(now).seconds(present) * self.ratio
        about = self.model.name, self.model.parameters, time.time()
        seconds = uncorrected, self.predicted, now.seconds
        sends, did_send = sent
        return Prediction(str(present), now.workers, *seconds, *about, self.memory, peak, sends, did_send)

    @staticmethod
    def of(answer: Answer, fixed_words: Plan, spans: bool = False) -> Outlook | None:
        """Returns the outlook of a run that begins with the best plan of an answer; None if no plan was tried. Replicas
        may span hosts if `spans` is set.
        """
        best, base, model, machine = answer.best, answer.base, answer.model, answer.machine
        assert best is not None
        if base is None:
            return None
        tried = [(one.plan, one.workers, one.step_seconds) for one in answer.prospects if one.trial is not None]
        ratios = {str(plan): taken / step_time(plan, model, machine, n).total for plan, n, taken in tried}
        script = Plan.parse(base.plan).validate(base.workers)
        held = worker_memory(script, model, machine, base.workers, together=base.together).total
        return Outlook(
            words_of(best.plan),
            best.workers,
            best.seconds,
            best.step_seconds,
            base.plan,
            str(fixed_words),
            model,
            machine,
            base.step_seconds / step_time(script, model, machine, base.workers).total,
            ratios,
            best.trial.busy if best.trial is not None else (),
            floor=max(0.0, max(base.peaks) - held),
            memory=best.predicted_need,
            refused=tuple(answer.refused),
            spans=spans,
        )

    def plan_for(self, workers: int) -> Plan:
        """Returns the run's plan for so many workers. Raises PlanError if it is none for them."""
        return _resolved(self.plan, workers)

    def _plans(self, workers: int, present: Plan, hosts: Sequence[int] = ()) -> list[Plan]:
        """Returns the other plans that leave the arithmetic and the size of micro-batches alone."""
        script = replace(Plan.parse(self.script), micro=present.micro)
        fixed_words = Plan.parse(self.fixed_words)
        within = () if self.spans else hosts
        plans, _ = candidates(workers, self.model, script, fixed_words, frozenset(), free_micro=False, hosts=within)
        return [plan for plan in plans if plan != present and str(plan) not in self.refused]

    def _forecast(self, now: Now, workers: int = 0) -> _Forecast:
        """Returns the forecast for the team, or for so many `workers`, of which some are in no team yet."""
        loads = now.loads or (max(1.0, now.seconds / self.seconds),) * now.workers  # nothing tells a slow worker
        common = min(loads)
        loads += (common,) * (workers - now.workers)
        slow = relative_loads(loads)
        if abs(common - 1) < ALIKE:
            common = 1.0
        machine, knows_link = self.machine, any(link.name == BETWEEN for link in self.machine.links)
        if len(now.hosts) > 1 and (now.link or not knows_link):
            machine = machine.between_hosts(*(now.link or UNMEASURED))
        return _Forecast(self.model.with_load(common, now.longer), machine, slow)

    def _memory(self, plan: Plan, forecast: _Forecast) -> float:
        """Returns the bytes of a worker's process under a plan."""
        about = plan, forecast.model, self.machine, len(forecast.slow)
        return self.floor + worker_memory(*about).total + checkpoint_copy(*about)

    @property
    def predictions(self) -> dict[str, float]:
        """What was predicted and tried of the run's plan: seconds of a step, and bytes."""
        tried = {"tried": self.seconds} if self.seconds != self.predicted else {}
        return {"predicted": self.predicted, "memory": self.memory, **tried}


@dataclass(frozen=True)
class _Forecast:
    """Predicts steps of a model on workers of which each takes `slow` times as long to compute as the fastest one."""

    model: ModelDescription
    machine: MachineDescription
    slow: Sequence[float]

    def seconds(self, plan: Plan) -> float:
        """Returns the seconds of a step."""
        return step_time(plan, self.model, self.machine, len(self.slow), slow=self.slow).total


def _resolved(words: str, workers: int) -> Plan:
    """Returns the plan of these words for so many workers. Raises PlanError if it is none for them."""
    return replace(Plan.parse(words), data=None).validate(workers)
