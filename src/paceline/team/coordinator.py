"""The coordinator: acts on agents' reports (failures, restarts, pauses) and announces generations.

No torch, no sockets; time is an argument.

Agents report the complete state of their workers at any time; the coordinator answers with the state that agents must
bring about. So a report may be lost, and a restarted coordinator gets all that it needs from the next reports.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from paceline.base.environment import SERVERS
from paceline.base.exit_codes import STOPPED
from paceline.base.mesh import pick_ranks
from paceline.base.text import plural, ranks
from paceline.team.agent_commands import At, Coming
from paceline.team.host_failures import WRONG_VALUES, Failure, HostFailures, blames_host, describe
from paceline.team.membership import Announcement, Membership
from paceline.team.merge_quorum import MergeDecider
from paceline.team.server_placement import ServerPlacement, all_lost, held_elsewhere, serving, unheld
from paceline.team.spare_workers import SpareWorkers
from paceline.team.suspended_workers import NO_STATE, OVER, SuspendedWorkers, all_ended, any_ended_well
from paceline.team.worker_slots import (
    UNKNOWN,
    WorkerReport,
    WorkerSlot,
    generation_of,
    go_on,
    left_of,
    pause_of,
    state_of,
)

BEAT = 0.25  # seconds between two reports of an agent
HELD = 20.0  # seconds for which an agent's request for orders is held open
ALIKE = 0.1  # seconds within which all workers report an exception that all of them raise
TOGETHER = 0.3  # seconds within which leave notices reach all workers if the whole run is to stop
ALONE = 3.0  # seconds for which a worker may miss others that are not known to be lost, before the team forms again
RETURN = 3.0  # seconds that agents have to come back to a coordinator that was started again
REFILL = 1.0  # seconds after which a lost worker is started again if a spare takes its place
LINES = 50  # console lines that are kept for agents that have not received them yet
AWAITED = 60.0  # seconds to wait for a silent agent if no other host has the state of its workers
LATER = 503  # HTTP status of the answer to an agent that has to ask again, see `Coordinator.defers`
EXPELLED = "HardwareError"  # the exception of a worker whose host computes wrong values: it is not started again


@dataclass
class Coordinator:
    """Decides from the agents' reports who is in the team, and when a new generation forms.

    `record` writes into the journal. `version` grows with every change that agents have to learn.
    """

    max_restarts: int
    min_workers: int
    record: Callable[..., None]
    membership: Membership
    epoch: int = 1
    version: int = 1
    slots: dict[int, WorkerSlot] = field(default_factory=dict)
    logs: dict[str, str] = field(default_factory=dict)  # by agent: where its workers' logs are
    standbys: dict[str, tuple[str, int]] = field(default_factory=dict)  # by agent
    moved: tuple[str, int] | None = None  # where a coordinator of a higher epoch is
    leaving: set[str] = field(default_factory=set)  # agents that end
    gone: set[str] = field(default_factory=set)  # agents that are not heard any more
    failing: dict[int, str] = field(default_factory=dict)  # workers whose failure ends the run, and how they failed
    stop: bool = False
    ended: bool = False
    lines: list[tuple[int, str, bool]] = field(default_factory=list)  # for the console: version, text, whether always
    announcement: Announcement | None = None  # the newest generation
    coming: Coming = field(default_factory=dict)  # newcomers to which the team sends the state
    step: int = 0  # of the training
    recovering: float = math.inf  # after a restart: until when agents have to come back
    lives: dict[int, int] = field(default_factory=dict)  # then: those that the workers of a first team are to have
    merges: MergeDecider = field(default_factory=MergeDecider)  # of islands
    hosts: HostFailures = field(default_factory=HostFailures)
    group_sizes: tuple[int, ...] = (1,)  # of the plan's mesh
    reserved: set[int] = field(default_factory=set)  # workers of the first host, until it has joined
    mirrors: bool = False  # whether hosts keep copies of each other's state in memory
    chooser: str = ""  # the agent that may change the plan
    changes: bool = False  # whether the run goes on under another plan after this attempt
    damaged: int = -1  # the step of the newest checkpoint that a spare has found damaged

    def __post_init__(self) -> None:
        # When to act on leave notices, on exceptions, and on workers that miss others.
        self._leave_due = self._judge_due = self._form_again_due = math.inf
        self._now = 0.0  # time of the last report or tick
        self._delayed_starts: dict[int, tuple[float, int]] = {}  # by worker: when it starts again, in which life
        self._suspended = SuspendedWorkers()
        self.first = self.membership.members  # the workers of the first generation
        self._new_exceptions: list[int] = []  # workers whose exceptions are not judged yet
        self._raised: set[Any] = set()  # exceptions, and lines at which a worker hung, that the team has survived
        self._causes: Counter[str] = Counter()  # how often each cause has led to a loss
        self._detection = 0.0  # seconds before the loss that led to this generation was known
        self._back_since: float | None = None  # when the loss happened after which all workers went back
        self._back_why = ""
        self._waits_since = math.inf  # after a restart: when the first agent was back, while others are needed
        self._has_named_missing = False  # whether the console has named their workers
        self._offered = 0  # the workers of a host that could take the place of others
        self._leaving_members: set[int] = set()  # workers that leave with the announced generation
        self._ready_spares: list[int] = []
        self._admits = False  # whether the announced generation is followed at once by one with newcomers
        self._restoring_servers: set[int] = set()  # parameter servers that will get their state back from others
        self._placement = ServerPlacement(self.slots, self.gone, self.leaving)
        self.spares = SpareWorkers(self.slots, len(self.first))
        self.awaited: dict[str, tuple[float, str]] = {}  # silent agents: until when they are waited for, and why

    # ---- agents

    def join(
        self, agent: str, logs: str, standby: tuple[str, int], numbers: Collection[int], count: int, spares: int = 0
    ) -> list[int]:
        """Registers an agent and returns the numbers of its workers, which it gives (`numbers`) or gets (`count`). So
        many of them are `spares`.

        An agent may join again. `standby` is the address of the coordinator that this agent runs or may run later.
        """
        self.logs[agent], self.standbys[agent] = logs, standby
        self.spares.bring(agent, count - spares, spares, self.gone | self.leaving)
        self.gone.discard(agent)
        self.reserved -= {*numbers}
        if not numbers and self.recovering == math.inf:
            self._end_waiting(count - spares)
        known = numbers or [number for number, slot in self.slots.items() if slot.agent == agent]
        members, servers = set(self.membership.members), {n for n in self.slots if n >= SERVERS}
        first = max({-1, *self.slots, *members, *self.reserved} - servers) + 1
        begins = self.recovering == math.inf and not (self.membership.begun or members.isdisjoint(known))
        vacant = (
            [] if known or self.recovering < math.inf else pick_ranks(self._vacant, count - spares, self.group_sizes)
        )
        for number in known or [*vacant, *range(first, first + count - len(vacant))]:
            slot = self.slots.setdefault(number, WorkerSlot(agent, newcomer=True))
            if number in vacant and slot.agent != agent:
                self._placement.vacate(number)
                if not self.membership.is_founding:  # its last process was lost, or has left
                    slot = self.slots[number] = WorkerSlot("", slot.life + 1, newcomer=True)
            if slot.agent not in (agent, ""):
                if self.recovering == math.inf:
                    self._placement.release(agent, number)
                continue
            self.version += slot.agent != agent or number in vacant
            slot.agent = agent
            slot.out |= bool(self.hosts.about(agent)["excluded"])
            if number in vacant:
                slot.life = max(slot.life, 0)
            if number in self.first and self.membership.is_founding:
                slot.newcomer = False
                slot.life = slot.life if self.recovering == math.inf else UNKNOWN
            elif known and not begins and slot.report == WorkerReport():
                slot.life = UNKNOWN
        return [number for number, slot in self.slots.items() if slot.agent == agent]

    @property
    def _vacant(self) -> list[int]:
        """The workers of the first team that a joining host gets: no host has them, or the host of a part of a replica
        is gone, and the team does not wait for it.
        """
        have = {number for number, slot in self.slots.items() if slot.agent and slot.agent not in self.gone}
        if not self.membership.is_founding:
            if self.membership.replica_size == 1:
                return []
            have |= {*self.membership.members}
        return [number for number in self.first if number not in have | self.reserved]

    def _store_of_first(self, agent: str) -> tuple[str, int] | None:
        """The address of the store at which the first team meets: without a port, a worker of this agent serves it;
        None while the team cannot start.
        """
        if not self.membership.is_founding:
            return "", 0
        if self._vacant or self.reserved or self.recovering < math.inf:
            return None
        first = self.slots[self.membership.members[0]]
        if first.agent == agent:
            return "", 0
        return first.report.store if first.alive and first.report.store[1] else None

    def report(self, agent: str, workers: Mapping[int, WorkerReport], step: int, now: float) -> None:
        """Takes the state of an agent's workers, and acts on what has changed since its last report."""
        self.step, self._now = max(self.step, step), now
        replica_size = max([1, *(report.replica for report in workers.values())])
        if replica_size > self.membership.replica_size:
            self.membership.set_replica_size(replica_size)
        self.gone.discard(agent)
        if agent in self.awaited:
            del self.awaited[agent]
            back = [number for number, slot in self.slots.items() if slot.agent == agent]
            servers = [number for number in back if number >= SERVERS]
            self._say(f"the host of {ranks(servers or back)} responds again")
        self.version += self._placement.place_servers(agent, workers, self.recovering < math.inf, self.min_workers)
        changed = []
        for number, report in workers.items():
            slot = self.slots.get(number)
            if slot is not None and not slot.agent and agent not in self.leaving and number in self._vacant:
                slot.agent = agent  # it is back before another host has come
                self.version += 1
            if slot is None or slot.agent != agent:
                continue
            if slot.life == UNKNOWN:
                slot.life = self.lives.get(number, report.life)
                if self.recovering == math.inf:  # it belonged to a team that is gone
                    self._restart(number)
                    continue
            if report.life == slot.life and report != slot.report:
                changed.append((number, slot, slot.report))
                slot.report = report
        if self.recovering < math.inf:
            for number, slot in self.slots.items():
                if slot.agent == agent and slot.life == UNKNOWN:  # its process was never started
                    slot.life = self.lives.get(number, 0)
            self._recover(now)
            return
        for number, slot, before in changed:
            self._advanced(number, slot, before, now)
        for number, slot, before in changed:
            self._ended(number, slot, before, now)
        if changed:
            self._check_suspended(now, [number for number, _, _ in changed])
            self._admit_newcomers()
            self._announce(self.membership.plan())
            self._decide_merge(now)
            if self.membership.leaving:  # now or before: the workers that were to stay may be gone
                self._leave_due = min(self._leave_due, now + (0.0 if self._all_leave else TOGETHER))
            self.version += self.over

    def recall_restart(self, restart: Mapping[str, Any], now: float, ago: float) -> None:
        """Takes over from the journal that, `ago` seconds ago, all workers were to start again as the first team."""
        self.membership = Membership(tuple(restart["workers"]), restart["number"], is_first_team=True)
        self.lives = {int(number): life for number, life in restart["lives"].items()}
        if restart.get("why"):
            self._back_since, self._back_why = now - ago, restart["why"]

    def defers(self, numbers: Collection[int], count: int) -> bool:
        """Whether a host that joins with `count` workers, and has no `numbers` for them yet, has to ask again: a
        restarted coordinator does not know yet which workers of the first team are on no host.
        """
        if (
            numbers
            or self.recovering == math.inf
            or not (self.membership.is_founding or self.membership.replica_size > 1)
        ):
            return False
        self._offered = max(self._offered, count)
        return True

    def recall_generation(self, number: int, members: Iterable[int]) -> None:
        """Takes over a generation that a returning agent knows, if it is newer than the journal's."""
        if self.recovering < math.inf and number > self.membership.number:
            before, size = self.membership.members, self.membership.replica_size
            self.membership = Membership(tuple(members), number, number, before=before, replica_size=size)

    def lost_agent(self, agent: str, why: str, seconds: float = 0.0, ended: bool = False) -> None:
        """Handles an agent that was silent for `seconds`, or has `ended`, with all its workers.

        If the run cannot continue without its workers, it waits for a silent agent: it may be suspended while its
        workers train.
        """
        self.awaited.pop(agent, None)
        self.gone.add(agent)
        self.version += 1
        gone = [number for number, slot in self.slots.items() if slot.agent == agent]
        if self.recovering < math.inf:  # as if its workers had not come back yet
            self.slots |= {number: WorkerSlot(agent, UNKNOWN, newcomer=True) for number in gone}
            return
        lost = [number for number in gone if self.slots[number].alive]
        members = [number for number in lost if not self.slots[number].newcomer]
        before, servers = self.membership, [number for number in lost if number >= SERVERS and not self.over]
        if members and not self._survivors(lost):
            self._lose_last_replica(agent, members, why, seconds, ended)
            return
        if servers and not ended and not held_elsewhere(self.slots, servers):
            self._await(agent, servers, why)
            return
        if servers:
            ends = not self.max_restarts or not before.begun
            (self._fail if ends else self._lose_servers)(
                servers, f"{'is' if len(servers) == 1 else 'are'} lost ({why})"
            )
        if servers and (self.failing or self.membership is not before):
            return
        gone, lost = ([number for number in numbers if number not in servers] for numbers in (gone, lost))
        if members and not self.max_restarts:
            self._fail(members)
        elif lost and not self.over:
            self._lose(lost, f"{'is' if len(lost) == 1 else 'are'} lost ({why})", detection=seconds)
            self._blame(agent, lost, why)
        for number in gone:
            if agent in self.leaving:
                del self.slots[number]
            else:
                self._restart(number)

    def _lose_last_replica(self, agent: str, lost: list[int], why: str, seconds: float, ended: bool) -> None:
        """Goes back to the newest copy of the state, if other hosts have parts of the replica. Without copies in memory
        that costs steps, and a silent agent may come back first. If no other host has a part, the run waits for it.
        """
        if not self._can_go_back:
            return
        if not (ended or self.mirrors or self.membership.is_founding):
            self._await(agent, lost, why)
            return
        self._causes["host"] += 1
        if self._causes["host"] > self.max_restarts:
            self._fail(lost, f"{'is' if len(lost) == 1 else 'are'} lost ({why})")
        else:
            self._go_back(lost, f"{'is' if len(lost) == 1 else 'are'} lost ({why})", seconds)
        self._blame(agent, lost, why)

    def _await(self, agent: str, lost: list[int], why: str) -> None:
        self.awaited[agent] = self._now + AWAITED, why
        what = "a copy of its state" if len(lost) == 1 else "copies of their states"
        been, others = f"{ranks(lost)} may be lost ({why})", "server" if lost[0] >= SERVERS else "worker"
        self._say(f"{been}, and no other {others} has {what}: the run waits for {AWAITED:.0f} s")

    def _end_waiting(self, count: int) -> None:
        """Takes silent hosts for lost that have the last replica, since a host has come that can replace their workers
        by its `count` workers.
        """
        for agent, (until, why) in [*self.awaited.items()]:
            members = [n for n in self.membership.members if n in self.slots and self.slots[n].agent == agent]
            if 0 < len(members) <= count and self._can_go_back and not self._survivors(members):
                self.lost_agent(agent, why, AWAITED - (until - self._now), ended=True)

    def bye(self, agent: str) -> None:
        """Handles an agent that ends because all its workers have ended."""
        self.leaving.add(agent)
        self.gone.add(agent)
        self.version += 1

    @property
    def undecided(self) -> bool:
        """Whether the coordinator has not decided yet about something that was reported, or is about to restart a
        worker. An agent that has no other worker must not end before that.
        """
        restarts = bool(self._delayed_starts) and not (self.failing or self.stop)
        return self.recovering < math.inf or bool(self._new_exceptions) or restarts

    # ---- time

    @property
    def due(self) -> float:
        """The time at which `tick` must be called next."""
        starts = (at for at, _ in self._delayed_starts.values())
        soon = (
            self._leave_due,
            self._judge_due,
            self._form_again_due,
            self._suspended.due,
            self.merges.due,
            self.recovering,
        )
        return min(*soon, *starts, *(until for until, _ in self.awaited.values()))

    def tick(self, now: float) -> None:
        """Acts on everything that is due at `now`."""
        self._now = now
        for number, (at, life) in [*self._delayed_starts.items()]:
            if now >= at:
                del self._delayed_starts[number]
                self._start(number, life)
        if self.recovering < math.inf:
            self._recover(now)
        for agent, (until, why) in [*self.awaited.items()]:
            if now >= until:
                self.lost_agent(agent, why, AWAITED, ended=True)
        if now >= self._suspended.due:
            self._check_suspended(now)
        if now >= self._judge_due:
            self._judge()
        if now >= self._leave_due:
            self._let_leave()
        if now >= self._form_again_due:
            self._form_again()
        if now >= self.merges.due:
            self._decide_merge(now)

    # ---- what agents are to know

    @property
    def over(self) -> bool:
        """Whether all workers that the run depends on have ended."""
        return self.ended or (self.recovering == math.inf and all_ended(self.slots))

    @property
    def finished(self) -> bool:
        """Whether the run is over because the training, or the script, has come to its end."""
        return self.over and any_ended_well(self.slots) and not self.failing and not self.ended

    def orders(self, agent: str) -> dict[str, Any]:
        """The state that an agent must bring about: the life of each worker, and whether it is in the team."""
        more = {"at_once": self.membership.at_once, "detection": self._detection, "hold": self._paused}
        more["admits"] = self._admits
        return {
            "epoch": self.epoch,
            "version": self.version,
            "generation": generation_of(self.announcement, self.slots, more),
            "workers": self._placement.wanted(agent),
            "store": self._store_of_first(agent),
            "failing": [[number, self.slots[number].agent, why] for number, why in self.failing.items()],
            "over": self.over,
            "finished": self.finished,
            "agents": len(self.standbys.keys() - self.gone),
            "standbys": list(self.standbys.values()),
            "moved": self.moved,
            "stop": self.stop,
            "coming": self.coming,
            "merge": self.merges.last,
            "servers": serving(self.slots),
            "lines": self.lines,
            "changes": self.changes,
            "damaged": self.damaged,
            **({"hosts": self._usable} if agent == self.chooser else {}),
            **self.hosts.about(agent),
        }

    def status(self) -> dict[str, Any]:
        """What /status shows of the run."""
        membership = self.membership
        more = {"min_workers": self.min_workers, "paused": self._paused, "stopping": self.stop}
        team = {
            "epoch": self.epoch,
            "generation": membership.number,
            "members": list(membership.members),
            "step": self.step,
        }
        team["spares"] = self._ready_spares
        workers = {number: state_of(number, slot, membership) for number, slot in sorted(self.slots.items())}
        return {**team, "workers": workers, **more}

    @property
    def _usable(self) -> list[tuple[str, int]]:
        """The number of workers on each host that train, or would under another plan: not those that stay spares."""
        away, counts = self.gone | self.leaving, Counter[str]()
        for number, slot in sorted(self.slots.items()):
            is_here = slot.alive and not slot.report.declined and slot.agent not in away
            if number < SERVERS and is_here and not self.spares.is_spare(number, self.membership):
                counts[self.hosts.agents.get(slot.agent, slot.agent)] += 1
        return [*counts.items()]

    def _too_few(self, members: Collection[int]) -> bool:
        """Whether a team of these members must wait for more workers."""
        return len(members) < self.min_workers and not self.stop

    @property
    def _paused(self) -> bool:
        return self._too_few((self.announcement or self.membership).members)

    def _say(self, text: str, always: bool = False) -> None:
        self.version += 1
        self.lines = [*self.lines[1 - LINES :], (self.version, text, always)]

    # ---- one worker's news

    def _advanced(self, number: int, slot: WorkerSlot, previous: WorkerReport, now: float) -> None:
        """Acts on how far a worker has come since its previous report."""
        report, membership = slot.report, self.membership
        if number >= SERVERS and report.at != previous.at:
            self.version += 1
            membership.renews |= number in self._restoring_servers
            self._restoring_servers.discard(number)
        self.version += membership.is_founding and report.store != previous.store
        if report.ready and not previous.ready and not slot.newcomer:
            membership.ready(number)
            if self._back_since is not None and not membership.is_founding:
                seconds, self._back_since = now - self._back_since, None
                what = f"{plural(len(membership.members), 'worker')} train again {seconds:.1f} s after the loss"
                self.record("recovered", workers=list(membership.members), seconds=seconds)
                self.record(
                    "decision", what=f"all workers went back to a copy of the state: {what}", why=self._back_why
                )
                self._say(what)
        if report.formed > previous.formed:
            new = number not in membership.established
            membership.formed(number, report.formed)
            if new and number in membership.established:
                slot.newcomer = False
                self._say(f"{ranks([number])} has joined: {self._team_size}")
        if report.leaves and not previous.leaves:
            membership.leaves(number)
        if report.stands and report.stands != previous.stands:
            self._say(report.stands)
        for _ in range(int(report.wrong) - int(previous.wrong)):
            self._blame(slot.agent, [number], f"{ranks([number])} {WRONG_VALUES}")
        if report.checked is not None and report.checked != previous.checked:
            self._note_checkpoint(number, *report.checked)
        if report.alone > previous.alone:
            self._form_again_due = min(self._form_again_due, now + ALONE)
        if report.ended and not previous.ended:
            membership.end(number)

    def _note_checkpoint(self, number: int, step: int, damage: str, seconds: float) -> None:
        """Notes that a spare has read a checkpoint again. If that is damaged, another one is written."""
        self.record("checked", step=step, worker=number, damage=damage, seconds=seconds)
        if damage and step > self.damaged:
            self.damaged = step
            what = f"{ranks([number])}, a spare, has read the checkpoint of step {step} again: it is damaged ({damage})"
            self._say(f"{what}; another one is written now", always=True)

    def _ended(self, number: int, slot: WorkerSlot, previous: WorkerReport, now: float) -> None:
        """Acts on how a worker ended, or that it is about to end."""
        report = slot.report
        if self.slots[number] is not slot:  # all workers have gone back to the last checkpoint
            return
        needed = not held_elsewhere(self.slots, [number]) if number >= SERVERS else not slot.newcomer
        if (
            report.declined
            and needed
            and (number >= SERVERS or self.membership.is_founding or not self.membership.begun)
        ):
            self._fail([number], "cannot be restarted")
        elif report.declined:
            slot.out = True
        elif report.failed is not None and previous.failed is None:
            if not slot.newcomer and not slot.out and self.membership.begun:
                self._new_exceptions.append(number)
                self._judge_due = min(self._judge_due, now + ALIKE)
            elif not self._go_on_without(number):
                self._fail([number])
        elif report.status is None or previous.status is not None or slot.out:
            return
        elif report.status == STOPPED and number in self._leaving_members:
            self._leaving_members.remove(number)
            slot.out = True
            was_asked_to_leave = number in self.membership.leaving
            self.membership.end(number)
            if was_asked_to_leave:
                self._say(f"{ranks([number])} left as requested: {go_on(self.membership.members)}")
            else:  # another worker of its replica was
                self._restart(number)
        elif report.status in (0, STOPPED) and (report.status or report.ended or not self.membership.begun):
            self.membership.end(number)  # else the worker vanished in the midst of training
        elif number not in self._new_exceptions and not self._go_on_without(number):
            self._fail([number])

    def _decide_merge(self, now: float) -> None:
        """Decides which islands are merged; the journal has the decision before any agent does."""
        reports = (slot.report.round for slot in self.slots.values() if slot.alive)
        if decision := self.merges.decide(reports, self.membership.at_once, now):
            self.record("merge", **decision)
            self.version += 1

    def _check_suspended(self, now: float, with_news: Iterable[int] = ()) -> None:
        """Treats suspended workers (SIGSTOP) as lost if the others can go on. Otherwise the run waits for them: not for
        long if the first step is not made yet or the run survives no loss. `with_news`: workers with a new report.
        """
        for number in (n for n in with_news if self._suspended.update(n, self.slots[n].report, now)):
            self._say(f"{ranks([number])} is running again")
        stopped, begun = self._suspended.stopped(self.slots), self.membership.begun
        if begun and not self.over and (servers := [number for number in stopped if number >= SERVERS]):
            self._lose_servers(servers, "was stopped")
            stopped = self._suspended.stopped(self.slots)
        if not stopped or self.over or self.failing:
            return
        if self.max_restarts and begun and self._survivors(stopped):
            how = "was stopped" if len(stopped) == 1 else "were stopped"
            self._lose(stopped, how, detection=max(self.slots[number].report.since for number in stopped))
            for number in stopped:
                self._restart(number)
            return
        often = self._causes["was stopped"] >= self.max_restarts
        then = "" if begun and self.max_restarts else "the run ends" if often else "all workers are restarted"
        stopped = [number for number in stopped if not self.slots[number].newcomer]
        text, over = self._suspended.wait(stopped, now, begun, then)
        if text:
            self._say(text)
        if over and often:
            self._fail(stopped, f"was stopped (SIGSTOP) for {OVER:.0f} s")
        elif over:
            self._causes["was stopped"] += 1
            self.record("lost", workers=stopped, why="was stopped before the first step", step=self.step)
            self._start_anew(self.membership.members)

    def _lose_servers(self, servers: list[int], why: str, restarts: bool = True) -> None:
        """Goes on without parameter servers if others have their state; otherwise all workers go back to the last
        checkpoint, or the run ends.
        """
        held = held_elsewhere(self.slots, servers)
        if not held:
            self._causes["servers"] += 1
            can = restarts and not self.stop and self._causes["servers"] <= self.max_restarts
            if not can or not self._placement.can_go_back(self.first):
                self._fail(servers, why)
                return
        then = (
            held + "; it is not restarted" * (not restarts)
            if held
            else "all workers and servers return to the last checkpoint"
        )
        lost, how = (servers, f"{ranks(servers)} {why}") if held else all_lost(self.slots, servers, why)
        self.record("lost", workers=lost, why=why, step=self.step)
        self._say(f"{how}: {then}{left_of(lost, self.slots, self.logs)}")
        for number in servers if held else ():
            self.slots[number].out = True
            if restarts and not self.stop:
                self._restoring_servers.add(number)
                self._restart(number)
        if not held:
            self.announcement, self._leaving_members, self._restoring_servers = None, set(), set()
            self._new_exceptions, self._judge_due = [], math.inf
            self._start_anew(self.first, [n for n, slot in self.slots.items() if n >= SERVERS or slot.alive])

    def _start_anew(self, members: tuple[int, ...], others: Iterable[int] = ()) -> None:
        """Starts `members` in new processes that form the first generation, and `others` as newcomers."""
        size = self.membership.replica_size
        self.membership = Membership(members, self.membership.number, replica_size=size, is_first_team=True)
        self._form_again_due = math.inf
        for number in {*members, *others} & self.slots.keys():
            life = self.slots[number].life
            self._placement.restart(number, life + (life != UNKNOWN), newcomer=number not in members)
        lives = {str(number): self.slots[number].life for number in members if number in self.slots}
        about = {"why": self._back_why} if self._back_since is not None else {}
        self.record("restarted", number=self.membership.number, workers=list(members), lives=lives, **about)
        self.version += 1

    @property
    def _can_go_back(self) -> bool:
        """Whether all workers may start again as the first team: it, or the last replica, is on several hosts."""
        agents = {self.slots[number].agent for number in self.membership.members if number in self.slots}
        parted = self.membership.is_founding or self.membership.replica_size > 1
        return parted and len(agents) > 1 and self.max_restarts > 0 and not (self.stop or self.failing or self.over)

    def _go_back(self, lost: list[int], why: str, detection: float = 0.0) -> None:
        """Starts the first team again, from the newest copy of the state: no replica is left. Where a host is gone, the
        team waits for another one.
        """
        left = left_of(lost, self.slots, self.logs)
        self.record("lost", workers=lost, why=why, step=self.step)
        self.announcement, self._leaving_members, self._restoring_servers, self.coming = None, set(), set(), {}
        self._new_exceptions, self._judge_due = [], math.inf
        self._back_since = self._now - detection if self._back_since is None else self._back_since
        self._back_why = f"{ranks(lost)} {why}, and no replica was left"
        self._start_anew(self.first, [number for number, slot in self.slots.items() if slot.alive])
        for number, slot in self.slots.items():
            if slot.agent in self.gone | self.leaving:
                self._placement.vacate(number)
        wait = f" once a host takes the place of {ranks(vacant)}" if (vacant := self._vacant) else ""
        copy = "copies in memory or the last checkpoint" if self.mirrors else "the last checkpoint"
        self._say(f"{ranks(lost)} {why}, and no replica is left: all workers go back to {copy}{wait}{left}")

    def _judge(self) -> None:
        """Goes on without the workers that raised an exception, unless all workers did."""
        raised, self._new_exceptions, self._judge_due = self._new_exceptions, [], math.inf
        everybody = not self.membership.survivors(raised)
        for number, slot in [(number, self.slots[number]) for number in raised]:
            if self.slots[number] is slot and (everybody or not self._go_on_without(number)):  # else all went back
                self._fail([number])

    def _fail(self, numbers: Iterable[int], why: str = "") -> None:
        """Ends the run because of these workers."""
        self.failing = {number: why or self.slots[number].report.loss for number in numbers} | self.failing
        self.version += 1

    # ---- who is of the team

    def _admit_newcomers(self) -> None:
        """Lets newcomers wait for the next generation. On a host where no worker has the state, the first newcomer
        receives it before.
        """
        membership = self.membership
        served = dict[str, tuple[int, At]]()  # by host: the newcomer that receives the state
        new = {n: slot for n, slot in self.slots.items() if slot.newcomer and slot.alive and slot.report.waiting}
        have = {self.slots[number].agent for number in membership.established if number in self.slots}
        have |= {slot.agent for slot in new.values() if slot.report.current or slot.report.at is None}
        for number in self.spares.order(new, membership, self._ready_spares):
            slot, at = new[number], new[number].report.at
            if number in membership.waiting:
                have.add(slot.agent)
                continue
            slot.spare = self._is_full(number)
            if not slot.spare and (slot.agent in have or self._paused):
                membership.waits(number)
            elif slot.spare and not self.spares.needs_copy(number, membership):
                continue
            elif at is not None and (slot.agent not in served or number in self.coming):
                served[slot.agent] = number, at
        coming = dict(served.values())
        self._note_spares()
        self.version += coming != self.coming
        self.coming = coming

    def _is_full(self, number: int) -> bool:
        """Whether a newcomer has to wait as a spare: the team is full, or is about to end."""
        ends = self.stop or any(slot.report.ended for slot in self.slots.values())
        return self.spares.full_size < math.inf and (ends or self.spares.is_full(number, self.membership))

    def _note_spares(self) -> None:
        """Journals which spares are ready if that has changed, and names new ones on the console."""
        if self.spares.full_size == math.inf:
            return
        before, ready = self._ready_spares, [n for n, slot in sorted(self.slots.items()) if slot.spare and slot.alive]
        if ready == before or not self.membership.begun:
            return
        self._ready_spares = ready
        self.record("spares", workers=ready, enter=[n for n in before if n in self.membership.waiting], step=self.step)
        if new := [number for number in ready if number not in before]:
            what = "is ready as a spare" if len(new) == 1 else "are ready as spares"
            self._say(f"{ranks(new)} {what}: {self._team_size}")

    @property
    def _team_size(self) -> str:
        """The number of workers, for the console; with that of spares where there may be any."""
        text = plural(len(self.membership.members), "worker")
        return text if self.spares.full_size == math.inf else f"{text}, {plural(len(self._ready_spares), 'spare')}"

    @property
    def _all_leave(self) -> bool:
        """Whether all members of the present generation are leaving."""
        return self.membership.leaving_replicas.issuperset(self.membership.members)

    def _let_leave(self) -> None:
        self._leave_due = math.inf
        if any(slot.report.ended for slot in self.slots.values()):
            return  # all of them are about to end
        if self._all_leave:
            self.stop_all()
        else:
            self._announce(self.membership.plan())

    def stop_all(self) -> None:
        """Makes the whole run save a checkpoint and stop."""
        if not self.stop:
            paused, self.stop = self._paused, True
            self.version += 1
            if paused:  # the run stops at the end of a step, which a paused team would never make
                self._announce(self.membership.renew())

    def _survivors(self, lost: Collection[int]) -> list[int]:
        dead = [number for number, slot in self.slots.items() if not slot.alive]
        return list(self.membership.survivors([*lost, *dead]))

    def _go_on_without(self, number: int) -> bool:
        """Goes on without a worker that failed; returns False if the others cannot."""
        slot = self.slots[number]
        if slot.out:
            return True
        is_spare = self.spares.is_spare(number, self.membership)
        if self.failing or not self.max_restarts or not (self.membership.begun or is_spare):
            return False
        report, why = slot.report, slot.report.loss
        failure = report.failed or report.hung
        known = bool(failure) and (report.final or failure in self._raised)
        if failure:
            self._raised.add(failure)
        left = self._survivors([number])
        self._causes[why] += 1
        is_expelled = report.failed is not None and report.failed[0] == EXPELLED
        restarts = not (known or is_expelled) and self._causes[why] <= self.max_restarts
        if number >= SERVERS:
            self._lose_servers([number], why, restarts)
            return True
        few = not left or (len(left) < self.min_workers and not restarts)
        goes_back = not (left or failure or slot.newcomer) and restarts and self._can_go_back
        if goes_back:
            self._go_back([number], why)
        elif not slot.newcomer and (known or few or (report.failed and not (restarts or is_expelled))):
            return False
        else:
            pause = pause_of(slot)
            soon = f"; it is restarted in {pause:.0f} s" if pause else ""
            self._lose([number], why, soon if restarts else "; it is not restarted")
        if blames_host(report):
            self._blame(slot.agent, [number], f"{ranks([number])} {why}")
        if restarts and not goes_back:
            self._restart(number)
        return True

    # ---- hosts that fail

    def refuses(self, agent: str, host: str, earlier: Iterable[Failure], numbers: Iterable[int] = ()) -> str:
        """Why an agent cannot join because of its host, which has failed too often; an empty text if it can. `earlier`:
        failures that the host remembers of other runs; `numbers`: its workers, if it has them already.
        """
        why = self.hosts.join(agent, host, earlier)
        if not why and self.hosts.is_due(host) and self.recovering == math.inf:
            self._exclude(host, numbers)
        return self.hosts.excluded.get(host, "")

    def _blame(self, agent: str, workers: list[int], why: str) -> None:
        """Counts a failure of an agent's host, and leaves the host out if that was one too many."""
        host = self.hosts.agents.get(agent, "")
        if not host:
            return
        at, text = self.hosts.add(agent, why)
        self.record("host", host=host, kind="failure", text=text, since=at, workers=workers, step=self.step)
        self.version += 1
        if self.hosts.is_due(host):
            self._exclude(host)

    def _exclude(self, host: str, joining: Iterable[int] = ()) -> None:
        """Leaves a host out of the run, unless the run needs its workers, some of which may be `joining`."""
        agents = self.hosts.agents_of(host)
        numbers = [number for number, slot in self.slots.items() if slot.agent in agents]
        alive = [number for number in numbers if self.slots[number].alive]
        text = describe(self.hosts.failures[host])
        left = self._left_without({*numbers, *joining})
        if len(left) < max(1, self.min_workers) or any(number >= SERVERS for number in alive):
            if host not in self.hosts.spared:
                self.hosts.spared.add(host)
                self._say(f"{host} has had {text}, and is not left out: the run needs its workers", always=True)
            return
        self.hosts.excluded[host] = text
        self.leaving |= agents  # so that its workers are not restarted
        self.spares.leave_out(agents)
        self.record("excluded", host=host, workers=numbers, text=text, step=self.step)
        self._say(f"{host} is left out of the run after {text}", always=True)
        if alive:
            how = "leaves with its host" if len(alive) == 1 else "leave with their host"
            self._lose(alive, how)
        self.version += 1

    def _left_without(self, numbers: Collection[int]) -> Collection[int]:
        """The members that could go on without these workers of a host. The first team can only begin with all of its
        workers: without some of them, or while hosts are missing for it, none could.
        """
        if not self.membership.is_founding:
            return self._survivors(numbers)
        members = self.membership.members
        return () if self._vacant or not {*members}.isdisjoint(numbers) else members

    def _restart(self, number: int) -> None:
        """Has the worker's agent start a new process, after a pause if the last one ended before it joined the team, or
        while spares enter, which would be slower beside a process that starts.
        """
        slot = self.slots[number]
        if pause := pause_of(slot) or REFILL * self._admits:
            self._delayed_starts[number] = (self._now + pause, slot.life + 1)
        else:
            self._start(number, slot.life + 1)

    def _start(self, number: int, life: int) -> None:
        slot = self.slots.get(number)
        stays = slot is not None and (number >= SERVERS or slot.agent not in self.leaving)
        if slot is not None and stays and slot.life < life and not slot.report.declined:
            joins = not (self.membership.is_founding and number in self.membership.members)
            failures = slot.failures + slot.failed_early if slot.newcomer else 0
            self._placement.restart(number, life, failures, newcomer=joins)
            self.version += 1

    def _lose(self, lost: list[int], why: str, then: str = "", detection: float = 0.0) -> None:
        new = all(self.slots[number].newcomer for number in lost)
        spare = [self.spares.is_spare(number, self.membership) for number in lost]
        peers = [peer for peer in self.membership.replica_peers(lost) if peer in self.slots]
        for number in (*lost, *peers):
            self.slots[number].out = True
        self._leaving_members -= {*lost, *peers}
        announcement = self.membership.lose(lost)
        causes = {number: report.cause for number in lost if (report := self.slots[number].report).cause}
        more = {"mates": peers} if peers else {}
        self.record("lost", workers=lost, why=why, step=self.step, **more, **({"causes": causes} if causes else {}))
        left = left_of(lost, self.slots, self.logs)
        if announcement is not None:
            are = "is" if len(peers) == 1 else "are"
            too = f", and {ranks(peers)} of the same replica {are} restarted" if peers else ""
            self._say(f"{ranks(lost)} {why}{too}: {self._describe_remaining(announcement.members)}{then}{left}")
        elif new:
            before = "before it had rejoined" if len(lost) == 1 else "before they had rejoined"
            if all(spare):
                before = "while it was a spare" if len(lost) == 1 else "while they were spares"
            self._say(f"{ranks(lost)} {why} {before}{then}{left}")
        self._admit_newcomers()
        self._announce(announcement, detection)
        for peer in peers:
            self._restart(peer)
        self.version += 1

    def _describe_remaining(self, members: Collection[int]) -> str:
        if self._too_few(members):
            return f"only {plural(len(members), 'worker')} left, training is paused until there are {self.min_workers}"
        return go_on(members)

    def _announce(self, announcement: Announcement | None, detection: float = 0.0) -> None:
        """Announces a generation; the journal has it before any agent does. `detection`: the seconds for which the loss
        that led to it was not known.
        """
        if announcement is None:
            return
        self._leaving_members = (self._leaving_members | self.membership.leaving_replicas) - set(announcement.members)
        about = {"planned": announcement.planned, "at_once": self.membership.at_once}
        self.record("generation", number=announcement.number, workers=list(announcement.members), **about)
        self.announcement, self._detection = announcement, detection
        ready = self.membership.waiting.keys() - {*announcement.members}
        self._admits = not announcement.planned and len(ready) >= self.membership.replica_size
        self.membership.renews |= self._admits  # also if these are lost until then: the members wait for it
        if not announcement.planned:  # a planned one comes after a step, which a worker that misses others never ends
            self._form_again_due = math.inf
        self.version += 1

    def _form_again(self) -> None:
        """Forms the same team once more, over fresh connections, if a worker misses others that are all alive."""
        self._form_again_due = math.inf
        alone = [n for n, slot in self.slots.items() if slot.report.alone >= max(slot.report.formed, 0) and slot.alive]
        what = "connections between workers were lost"
        self._causes[what] += bool(alone)
        if alone and (self._causes[what] > self.max_restarts or any(slot.report.ended for slot in self.slots.values())):
            self._fail(alone, "lost its connections to the other workers")
        elif alone:
            self._say(f"{what}: {go_on(self.membership.members)} over new connections")
            self._announce(self.membership.renew())

    # ---- after a coordinator was started again

    def _recover(self, now: float) -> None:
        """Rebuilds the team from the agents' reports, once the agents of all members are back or their time is over.

        A late agent is no failure of its workers: the time is not over before enough workers are back to go on.
        """
        membership = self.membership
        reports = {number: slot.report for number, slot in self.slots.items() if slot.report != WorkerReport()}
        first = {number for number, report in reports.items() if report.ready and not report.newcomer}
        membership.recall(first, {number: report.formed for number, report in reports.items()})
        missing = [n for n in membership.members if n not in self.slots or self.slots[n].life == UNKNOWN]
        ended = any(report.ended for report in reports.values())  # then all have come to the end
        if missing and not ended and not {*self._survivors(missing)} & {*membership.members}:
            if self._is_too_late(missing, now):
                self._start_without(missing)
                return
            self._wait_for(missing, now)
        if missing and now < self.recovering:
            return
        self.recovering, self.lives = math.inf, {}
        for number, report in sorted(reports.items()):
            self.slots[number].newcomer = report.newcomer and report.formed < 0
            if report.leaves:
                membership.leaves(number)
            if report.ended:
                membership.end(number)
        self._restoring_servers = unheld(reports)
        membership.renews = any(reports[number].at for number in self._restoring_servers)
        # The members may wait for newcomers, see `_announce`.
        membership.renews |= membership.number == membership.at_once > 0 and self.spares.full_size < math.inf
        membership.before = tuple(number for number in membership.before if number in membership.established)
        self._leaving_members = {*membership.before} & membership.leaving_replicas - {*membership.members}
        for number in sorted(membership.established - {*membership.members} - self._leaving_members):
            if self.slots[number].alive:  # the team went on without it
                membership.end(number)
                self._restart(number)
        for number in missing:
            if ended:
                membership.end(number)
            else:
                self.slots.setdefault(number, WorkerSlot(agent="", life=UNKNOWN)).report = WorkerReport(
                    why="did not report to the restarted coordinator"
                )
        if missing and not ended:
            self._lose(missing, "did not report to the restarted coordinator")
        for number in sorted(reports):
            slot = self.slots[number]
            self._ended(number, slot, WorkerReport(), now)
            if slot.report.alone >= 0:
                self._form_again_due = min(self._form_again_due, now + ALONE)
        self._check_suspended(now, reports)
        if membership.leaving:
            self._leave_due = now
        is_complete = membership.entered == set(membership.members)
        if self.announcement is None and membership.begun and not membership.is_founding and not is_complete:
            self._announce(membership.renew())  # the last one is in the journal, and did not reach all workers
        self._admit_newcomers()
        self._announce(membership.plan())
        self._decide_merge(now)
        self.version += 1

    def _wait_for(self, missing: list[int], now: float) -> None:
        """Waits longer for the `missing` workers, without whom those that have reported cannot go on."""
        if now - self._waits_since >= RETURN and not self._has_named_missing:
            self._has_named_missing = True
            have = "has" if len(missing) == 1 else "have"
            self._say(f"{ranks(missing)} {have} not reported to the restarted coordinator yet, and {NO_STATE}: waiting")
        if self.stop and self._has_named_missing and not self.ended:
            self.ended = True
            self._say(f"{NO_STATE}, so the run stops without a checkpoint")
        self.recovering = now + RETURN

    def _is_too_late(self, missing: list[int], now: float) -> bool:
        """Whether all workers start again as the first team, without waiting any longer for the hosts of the `missing`
        ones. That costs nothing before the first step, or with copies in memory; other teams wait as for silent hosts.
        """
        if all(slot.life == UNKNOWN for slot in self.slots.values()):
            return False
        self._waits_since = min(self._waits_since, now)
        begins = self._has_not_begun(missing)
        can = begins or (self.membership.replica_size > 1 and self.max_restarts > 0)
        soon = begins or self.mirrors or len(missing) <= self._offered
        return can and not self.stop and now - self._waits_since >= (RETURN if soon else AWAITED)

    def _has_not_begun(self, missing: Collection[int]) -> bool:
        """Whether a first team has certainly not made its first step: one of its workers that are back has not."""
        back = {*self.membership.members} - {*missing}
        return self.membership.is_first_team and not self.membership.established.issuperset(back)

    def _start_without(self, missing: list[int]) -> None:
        """Starts the first team again, once hosts have come for the `missing` workers: their own ones, or others."""
        begins = self._has_not_begun(missing)
        for number in missing:
            self.slots[number] = WorkerSlot("", self.lives.get(number, UNKNOWN))
        self.recovering, self.lives = math.inf, {}
        if not begins:
            self._go_back(missing, "did not report to the restarted coordinator")
            return
        self._start_anew(self.first, [number for number, slot in self.slots.items() if slot.alive])
        have, host = ("has", "its host") if len(missing) == 1 else ("have", "their hosts")
        self._say(
            f"{ranks(missing)} {have} not reported to the restarted coordinator: all workers start once {host} or "
            "others have joined"
        )
