"""Days of training with failures: where the time of a team goes whose machines fail, are repaired and come back.

Only losses and returns are events. Steps, checkpoints and lost work between two events are arithmetic, so that a day of
100,000 workers costs milliseconds. Lifetimes are exponentially distributed and therefore have no memory: one clock for
all living workers, whose rate is drawn anew at each event, is exact. No torch.

The account has the words of a run's own account (`base/time_accounting.py`) and adds up to the wall clock.
"""

from __future__ import annotations

import math
import random
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import NamedTuple

from paceline.base.time_accounting import COSTS, USEFUL
from paceline.errors import UsageError

HOUR, DAY = 3600.0, 86400.0
REACTIONS = {
    "restart": "all restart from the last checkpoint",
    "leave-out": "the others continue until a spare or the repair completes the replica",
    "spare": "all wait until a spare has the state; without a spare as leave-out",
    "redo": "the others continue while the process starts again on its host",
}


@dataclass(frozen=True)
class Scenario:
    """A team of workers, how its machines fail, and how it reacts. Times are in seconds, but for those in hours.

    Worker w belongs to replica w // `replica` and to host w // `host`. A replica that lacks a worker does not compute,
    and the others do its part, so that a step takes longer. With fewer than `least` replicas the run is paused.

    `reaction` is one of `REACTIONS`: after `restart` the work since the last checkpoint is made again, after the others
    the step. In `redo` a lost worker's process starts again on its host, and what is lost with a host is replaced as in
    `leave-out`.
    """

    workers: int
    replica: int = 1  # workers that compute nothing if one of them is lost
    host: int = 1  # workers that are lost if their host fails
    reaction: str = "redo"
    step: float = 1.0  # seconds of a step with all workers
    waiting: float = 0.0  # part of that in which workers wait for the slowest
    every: float = math.inf  # seconds of training between two checkpoints
    save: float = 0.0  # for which a checkpoint stops training
    write: float = 0.0  # after which it can be used, written in the background
    worker_hours: float = 0.0  # mean time between failures of a worker; 0: it never fails
    host_hours: float = 0.0  # of a host
    detect: float = 0.0  # until the others know of a loss
    form: float = 0.0  # to form a team again
    hand_over: float = 0.0  # for which all stop when a worker joins, and forming comes on top
    transfer: float = 0.0  # until a new worker has the state; the others train meanwhile, or wait in `spare`
    restart: float = 0.0  # to start processes until they train
    start: float = 0.0  # before the first step, once
    repair_hours: float = 0.0
    spares: int = 0
    least: int = 1

    def __post_init__(self) -> None:
        """Raises UsageError for values that contradict each other."""
        if self.reaction not in REACTIONS:
            raise UsageError(f"unknown reaction {self.reaction!r}", f"use one of {', '.join(REACTIONS)}")
        if self.workers < 1 or self.workers % self.replica:
            what = f"{self.workers} workers cannot be divided into replicas of {self.replica}"
            raise UsageError(what, f"use a multiple of {self.replica} workers")
        if self.step <= 0 or self.every <= 0:
            raise UsageError("a step and the interval of checkpoints must take more than 0 seconds", "give longer ones")

    @property
    def replicas(self) -> int:
        """The number of replicas of the complete team."""
        return self.workers // self.replica

    @property
    def hosts(self) -> int:
        """The number of hosts of the complete team."""
        return -(-self.workers // self.host)

    @property
    def seconds_between_losses(self) -> float:
        """The mean time between two losses in the complete team; infinity without failures."""
        rate = _rate(self.workers, self.worker_hours) + _rate(self.hosts, self.host_hours)
        return 1 / rate if rate else math.inf


class GivenLoss(NamedTuple):
    """A loss that is given, not drawn: the steps that are done then, the worker, and the seconds until it is known
    (None: as in the scenario).
    """

    steps: float
    worker: int
    detect: float | None = None


class DaySpan(NamedTuple):
    """A part of a day: its account, begin and end, the speed of training, and how many of its seconds were `saving`."""

    account: str
    begin: float
    end: float
    speed: float = 0.0
    saving: float = 0.0


@dataclass(frozen=True)
class Day:
    """What became of `seconds` of a scenario: seconds by `account`, `work` in seconds of training with all workers."""

    seconds: float
    account: dict[str, float]
    work: float
    losses: int
    spans: Sequence[DaySpan] = field(default=(), repr=False)

    @property
    def goodput(self) -> float:
        """The part of the wall clock in which training advanced, as a run's own report has it."""
        return sum(self.account.get(name, 0.0) for name in USEFUL) / self.seconds if self.seconds else 1.0

    @property
    def progress(self) -> float:
        """The work that was done, as a part of that of a team that never fails, saves or waits."""
        return self.work / self.seconds if self.seconds else 1.0


def simulate(
    scenario: Scenario,
    seconds: float = DAY,
    seed: int = 0,
    losses: Sequence[GivenLoss] | None = None,
    steps: float = math.inf,
) -> Day:
    """Simulates a team for so many `seconds`, or until it has made so many `steps`.

    With `losses`, in order, exactly these workers are lost, each when it is there; otherwise losses are drawn at
    random. The same seed gives the same day.
    """
    chance = random.Random(seed)
    simulation = _Simulation(scenario, chance)
    due = deque(losses or ())
    while simulation.now < seconds:
        if losses is None:
            rate = simulation.team.rate()
            loss_at = simulation.now + chance.expovariate(rate) if rate else math.inf
        else:
            is_due = due and not simulation.team.lacks(due[0].worker)
            loss_at = simulation.when(due[0].steps) if is_due else math.inf
        until = min(seconds, simulation.when(steps))
        return_at = simulation.returns[0][0] if simulation.returns else math.inf
        simulation.spend(min(loss_at, return_at, until))
        if until <= min(loss_at, return_at):
            break
        if return_at <= loss_at:
            simulation.come_back()
        elif losses is None:
            simulation.lose(simulation.team.draw())
        else:
            loss = due.popleft()
            simulation.lose([loss.worker], loss.detect)
    return simulation.day()


def _rate(count: float, hours: float) -> float:
    """Failures a second of so many machines."""
    return count / (hours * HOUR) if hours else 0.0


class _Simulation:
    """The state of a simulation: the time, the team, its training, what it is stopped for, and what will return."""

    def __init__(self, scenario: Scenario, chance: random.Random) -> None:
        self.now, self.losses = 0.0, 0
        self.team = _Team(scenario, chance)
        self.returns: list[tuple[float, int, int]] = []  # time, worker that is replaced or -1, repaired machines
        self._scenario, self._training = scenario, _Training(scenario)
        self._until_joined = scenario.restart + scenario.transfer
        # Accounts and seconds, before training goes on.
        self._stop = deque([("starting", scenario.start)] if scenario.start else list[tuple[str, float]]())
        self._spares, self._unreplaced = scenario.spares, deque[int]()
        self._spans: list[DaySpan] = []

    @property
    def _speed(self) -> float:
        """The speed of training as a part of that of the complete team; 0 while the run is paused."""
        return self.team.complete / self._scenario.replicas if self.team.complete >= self._scenario.least else 0.0

    def when(self, steps: float) -> float:
        """The time at which so many steps are done if nothing is lost or comes back before."""
        if not self._speed or steps == math.inf:
            return math.inf
        stopped = sum(seconds for _, seconds in self._stop)
        return self.now + stopped + self._training.seconds_until(steps * self._scenario.step, self._speed)

    def spend(self, until: float) -> None:
        """Lets the time pass: first what the team is stopped for, then training."""
        while self._stop and self.now < until:
            account, seconds = self._stop.popleft()
            if self.now + seconds > until:
                self._stop.appendleft((account, self.now + seconds - until))
            self._stand(account, min(until, self.now + seconds))
        if self.now < until and self._speed:
            saving = self._training.train(until - self.now, self._speed)
            self._spans.append(DaySpan("steps", self.now, until, self._speed, saving))
            self.now = until
        elif self.now < until:
            self._stand("paused", until)

    def _stand(self, account: str, until: float) -> None:
        """Nothing is trained."""
        self._training.account[account] += until - self.now
        if until > self.now:
            self._spans.append(DaySpan(account, self.now, until))
        self.now = until

    def lose(self, workers: Sequence[int], detect: float | None = None) -> None:
        """Workers are lost: one, or those of a host. The loss is known after `detect` seconds, if that is not None."""
        scenario, self.losses = self._scenario, self.losses + 1
        speed, hits = self._speed, self.team.lose(workers)
        if scenario.reaction == "redo" and len(workers) == 1:
            heappush(self.returns, (self.now + self._until_joined, workers[0], 0))
            replaced = 0
        else:
            heappush(self.returns, (self.now + scenario.repair_hours * HOUR, -1, len(workers)))
            replaced = min(self._spares, len(workers))
            self._spares -= replaced
            self._unreplaced.extend(workers[replaced:])
        at_once = scenario.reaction in ("restart", "spare")
        for worker in workers[:replaced]:
            if at_once:
                self.team.fill(worker)
            else:
                heappush(self.returns, (self.now + self._until_joined, worker, 0))
        if hits:
            self._react(speed, scenario.detect if detect is None else detect, replaced > 0)

    def _react(self, speed: float, detect: float, has_spare: bool) -> None:
        """Stops the team, which trained with `speed`, because a complete replica lost a worker."""
        scenario = self._scenario
        if scenario.reaction == "restart":
            self._training.roll_back()
            self._stop = deque([("detection", detect), ("starting", scenario.restart)])
            return
        self._training.repeat_step(speed)
        self._stop = deque([("detection", detect), ("forming", scenario.form)])
        if scenario.reaction == "spare" and has_spare:
            self._stop.append(("hand-over", scenario.transfer + scenario.hand_over))

    def come_back(self) -> None:
        """Machines are repaired, or a worker is back."""
        _, worker, machines = heappop(self.returns)
        scenario, completes = self._scenario, False
        if worker >= 0:
            completes = self.team.fill(worker)
        for _ in range(machines):
            if not self._unreplaced:
                self._spares += 1
            elif scenario.reaction in ("restart", "spare"):
                completes |= self.team.fill(self._unreplaced.popleft())
            else:
                heappush(self.returns, (self.now + self._until_joined, self._unreplaced.popleft(), 0))
        if completes and not self._stop:
            if scenario.reaction == "restart":
                self._stop.append(("starting", scenario.restart))
            else:
                self._stop.extend([("forming", scenario.form), ("hand-over", scenario.hand_over)])

    def day(self) -> Day:
        """The result so far."""
        account = dict(self._training.account)
        account["waiting"] += self._scenario.waiting * account["steps"]
        account["steps"] -= self._scenario.waiting * account["steps"]
        shown = {name: seconds for name, seconds in account.items() if seconds}
        return Day(self.now, shown, self._training.work, self.losses, self._spans)


class _Team:
    """Which workers are lost, and how many replicas are complete."""

    def __init__(self, scenario: Scenario, chance: random.Random) -> None:
        self._scenario, self._chance = scenario, chance
        self._lost: set[int] = set()
        self._lost_of_replica, self._lost_of_host = Counter[int](), Counter[int]()
        self._dead_hosts = 0
        self.complete = scenario.replicas

    def lacks(self, worker: int) -> bool:
        """Whether this worker is lost and not replaced yet."""
        return worker in self._lost

    def rate(self) -> float:
        """Failures a second of the workers and hosts that live."""
        scenario = self._scenario
        workers = _rate(scenario.workers - len(self._lost), scenario.worker_hours)
        return workers + _rate(scenario.hosts - self._dead_hosts, scenario.host_hours)

    def draw(self) -> list[int]:
        """The living workers that the next failure takes: one of them, or those of one host."""
        scenario, chance = self._scenario, self._chance
        by_worker = _rate(scenario.workers - len(self._lost), scenario.worker_hours)
        if chance.random() * self.rate() < by_worker:
            while (worker := chance.randrange(scenario.workers)) in self._lost:
                pass
            return [worker]
        while self._lost_of_host[host := chance.randrange(scenario.hosts)] == len(self._of_host(host)):
            pass
        return [worker for worker in self._of_host(host) if worker not in self._lost]

    def lose(self, workers: Sequence[int]) -> bool:
        """Removes workers; returns whether one of them belonged to a complete replica."""
        before = self.complete
        for worker in workers:
            self._change(worker, 1)
        return self.complete < before

    def fill(self, worker: int) -> bool:
        """A worker takes a lost one's number; returns whether that completes a replica."""
        before = self.complete
        self._change(worker, -1)
        return self.complete > before

    def _of_host(self, host: int) -> range:
        return range(host * self._scenario.host, min((host + 1) * self._scenario.host, self._scenario.workers))

    def _change(self, worker: int, lost: int) -> None:
        replica, host = worker // self._scenario.replica, worker // self._scenario.host
        self.complete -= not self._lost_of_replica[replica]
        self._dead_hosts -= self._lost_of_host[host] == len(self._of_host(host))
        (self._lost.add if lost > 0 else self._lost.discard)(worker)
        self._lost_of_replica[replica] += lost
        self._lost_of_host[host] += lost
        self.complete += not self._lost_of_replica[replica]
        self._dead_hosts += self._lost_of_host[host] == len(self._of_host(host))


class _Training:
    """Steps and checkpoints between events, as arithmetic: training and saving alternate in a fixed cycle."""

    def __init__(self, scenario: Scenario) -> None:
        self.account = dict.fromkeys((*USEFUL, *COSTS), 0.0)
        self.work = 0.0  # seconds that the complete team would have needed
        self._every = max(scenario.every, scenario.write)  # a checkpoint waits until the one before it is written
        self._save, self._write, self._step_seconds = scenario.save, scenario.write, scenario.step
        self._position = 0.0  # in the cycle
        self._since = self._before = (0.0, 0.0)  # seconds and work since the last checkpoint; between it and the former
        self._step = 0.0  # work in the unfinished step

    def train(self, seconds: float, speed: float) -> float:
        """Trains, and saves when it is time; returns the seconds of saving."""
        every = self._every
        saves, rest = divmod(self._position + seconds, every + self._save)
        finished = saves * every if saves else 0.0  # in cycles that end
        trained = min(seconds, finished + min(rest, every) - min(self._position, every))  # but for rounding
        self.account["steps"] += trained
        self.account["saving"] += seconds - trained
        self.work += trained * speed
        if saves:
            missing = every - min(self._position, every)
            of_first = self._since[0] + missing, self._since[1] + missing * speed
            self._before = of_first if saves == 1 else (every, every * speed)
            self._since = min(rest, every), min(rest, every) * speed
        else:
            self._since = self._since[0] + trained, self._since[1] + trained * speed
        self._position = rest
        self._step = (self._step + trained * speed) % self._step_seconds
        return seconds - trained

    def seconds_until(self, work: float, speed: float) -> float:
        """The seconds of training and saving until so much work is done."""
        trained = min(self._position, self._every) + max(0.0, work - self.work) / speed
        saves = max(0, math.ceil(trained / self._every) - 1)
        return max(0.0, trained + saves * self._save - self._position)

    def roll_back(self) -> None:
        """Returns to the last checkpoint that is written."""
        unwritten = self._before if self._position < self._write else (0.0, 0.0)
        self._redo(self._since[0] + unwritten[0], self._since[1] + unwritten[1])
        self._position, self._since, self._before = 0.0, (0.0, 0.0), (0.0, 0.0)

    def repeat_step(self, speed: float) -> None:
        """Returns to the beginning of the step."""
        if speed:
            self._redo(self._step / speed, self._step)

    def _redo(self, seconds: float, work: float) -> None:
        seconds = min(seconds, self.account["steps"])
        self.account["steps"] -= seconds
        self.account["redone"] += seconds
        self.work, self._step = max(0.0, self.work - work), 0.0


def restart_progress(scenario: Scenario) -> float:
    """The expected progress of a team that restarts from its last checkpoint after each loss, in closed form.

    Losses may also happen while it saves or restarts, and no machine is missing after a restart. J. T. Daly, "A higher
    order estimate of the optimum checkpoint interval for restart dumps", Future Generation Computer Systems 22, 2006.
    """
    mean, stop = scenario.seconds_between_losses, scenario.detect + scenario.restart
    if mean == math.inf:
        return scenario.every / (scenario.every + scenario.save) if scenario.every < math.inf else 1.0
    if scenario.every == math.inf or (scenario.every + scenario.save + stop) / mean > 700:
        return 0.0
    return scenario.every / (mean * math.exp(stop / mean) * math.expm1((scenario.every + scenario.save) / mean))


def best_interval(scenario: Scenario) -> float:
    """The seconds of training between checkpoints for which `restart_progress` is highest, but at least one step.

    The perturbation solution of Daly (2006, equation 37), which extends J. W. Young, "A first order approximation to
    the optimum checkpoint interval", Communications of the ACM 17, 1974. Infinity without failures.
    """
    mean, save = scenario.seconds_between_losses, scenario.save
    if mean == math.inf:
        return math.inf
    if save >= 2 * mean:
        return max(scenario.step, mean)
    part = save / (2 * mean)
    return max(scenario.step, math.sqrt(2 * save * mean) * (1 + math.sqrt(part) / 3 + part / 9) - save)
