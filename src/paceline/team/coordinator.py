"""The coordinator's decisions: membership, failures, generations.

No torch, no sockets; time is an argument.

Agents report the state of their workers, whole and as often as they like; the coordinator answers with the state that
it wants. So a report may be lost, and a coordinator that is started again learns all it must know from the next ones.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from paceline.base.environment import SERVERS
from paceline.base.text import plural, ranks
from paceline.team.agent_commands import Coming
from paceline.team.membership import Announcement, Membership
from paceline.team.merge_quorum import MergeDecider
from paceline.team.server_placement import ServerPlacement, all_lost, held_elsewhere, serving, unheld
from paceline.team.suspended_workers import OVER, SuspendedWorkers, all_ended, any_ended_well
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
HELD = 20.0  # seconds that its request for orders is held open
ALIKE = 0.1  # seconds within which an exception of all workers comes from all
TOGETHER = 0.3  # seconds within which notices to all workers arrive, where the whole run is meant
ALONE = 3.0  # seconds a worker may miss others that nobody knows to be lost, before the team forms anew
RETURN = 3.0  # seconds that agents have to come back to a coordinator that was started again
LINES = 50  # lines for the console that are kept for agents that did not hear them yet
AWAITED = 60.0  # seconds that a silent agent is waited for, where nobody else has what its parameter servers keep
STOPPED = 75  # EX_TEMPFAIL: exit code of who left, or stopped politely; the same command goes on


@dataclass
class Coordinator:
    """`record` writes into the journal. `version` grows with everything that agents are to know."""

    max_restarts: int
    min_workers: int
    record: Callable[..., None]
    roster: Membership
    epoch: int = 1
    version: int = 1
    seats: dict[int, WorkerSlot] = field(default_factory=dict)
    logs: dict[str, str] = field(default_factory=dict)  # by agent: where its workers' logs are
    standbys: dict[str, tuple[str, int]] = field(default_factory=dict)  # by agent
    moved: tuple[str, int] | None = None  # where a coordinator of a higher epoch is
    leaving: set[str] = field(default_factory=set)  # agents that end
    gone: set[str] = field(default_factory=set)  # agents that are not heard any more
    failing: dict[int, str] = field(default_factory=dict)  # workers whose failure ends the run, and how they failed
    stop: bool = False
    ended: bool = False
    lines: list[tuple[int, str, bool]] = field(default_factory=list)
    order: Announcement | None = None
    coming: Coming = field(default_factory=dict)  # newcomers that are sent the state
    step: int = 0  # of the training
    recovering: float = math.inf  # after a restart: until when agents have to come back
    merges: MergeDecider = field(default_factory=MergeDecider)  # of islands

    def __post_init__(self) -> None:
        self._asked = self._judged = self._again = math.inf  # when to act on notices, on exceptions, on who is alone
        self._now = 0.0  # when we were last told something
        self._starts: dict[int, tuple[float, int]] = {}  # who is started again later: when, and in which life
        self._stops, self.first = (
            SuspendedWorkers(),
            self.roster.members,
        )  # the latter: the workers of the first generation
        self._raised_now: list[int] = []
        self._raised: set[Any] = set()  # the exceptions, and lines that a worker hung at, that were survived
        self._causes: Counter[str] = Counter()
        self._detection = self._late = 0.0  # of the loss before this generation; when it is said who is waited for
        self._left: set[int] = set()  # workers that are to leave with the generation that was announced
        self._away: set[int] = set()  # parameter servers that are to get the state back from others
        self._lives = ServerPlacement(self.seats, self.gone, self.leaving)
        self.awaited: dict[str, tuple[float, str]] = {}  # silent agents: until when they are waited for, and why

    # ---- agents

    def join(self, agent: str, logs: str, standby: tuple[str, int], numbers: Collection[int], count: int) -> list[int]:
        """An agent comes, with workers that have their numbers or to be given some; also one that comes again.

        `standby` is where a coordinator can be reached that it keeps, or may keep one day.
        """
        self.logs[agent], self.standbys[agent] = logs, standby
        self.gone.discard(agent)
        known = numbers or [number for number, seat in self.seats.items() if seat.agent == agent]
        members, servers = set(self.roster.members), {n for n in self.seats if n >= SERVERS}
        first = max({-1, *self.seats, *members} - servers) + 1
        for number in known or range(first, first + count):
            seat = self.seats.setdefault(number, WorkerSlot(agent, newcomer=True))
            if seat.agent not in (agent, ""):
                continue
            seat.agent = agent
            if number in members and not self.roster.begun:
                seat.newcomer = False
                seat.life = seat.life if self.recovering == math.inf else UNKNOWN
            elif known and seat.said == WorkerReport():
                seat.life = UNKNOWN
        return [number for number, seat in self.seats.items() if seat.agent == agent]

    def report(self, agent: str, workers: Mapping[int, WorkerReport], step: int, now: float) -> None:
        """The state of an agent's workers."""
        self.step, self._now = max(self.step, step), now
        places = max([1, *(said.replica for said in workers.values())])
        if places > self.roster.places:
            self.roster.in_replicas(places)
        self.gone.discard(agent)
        if agent in self.awaited:
            del self.awaited[agent]
            servers = [number for number, seat in self.seats.items() if number >= SERVERS and seat.agent == agent]
            self._say(f"the host of {ranks(servers)} answers again")
        self.version += self._lives.place_servers(agent, workers, self.recovering < math.inf, self.min_workers)
        changed = []
        for number, said in workers.items():
            seat = self.seats.get(number)
            if seat is None or seat.agent != agent:
                continue
            if seat.life == UNKNOWN:
                seat.life = said.life
                if self.recovering == math.inf:  # it was of a team that is gone
                    self._restart(number)
                    continue
            if said.life == seat.life and said != seat.said:
                changed.append((number, seat, seat.said))
                seat.said = said
        if self.recovering < math.inf:
            self._recover(now)
            return
        for number, seat, before in changed:
            self._advanced(number, seat, before, now)
        for number, seat, before in changed:
            self._ended(number, seat, before, now)
        if changed:
            self._look_at_stops(now, [number for number, _, _ in changed])
            self._let_in()
            self._announce(self.roster.plan())
            self._look_at_rounds(now)
            if self.roster.leaving:  # now or before: who was to stay may be gone
                self._asked = min(self._asked, now + (0.0 if self._all_go else TOGETHER))
            self.version += self.over

    def heard_of(self, number: int, members: Iterable[int]) -> None:
        """An agent comes back, and knows of this generation."""
        if self.recovering < math.inf and number > self.roster.number:
            before, places = self.roster.members, self.roster.places
            self.roster = Membership(tuple(members), number, number, before=before, places=places)

    def lost_agent(self, agent: str, why: str, seconds: float = 0.0, ended: bool = False) -> None:
        """An agent is silent for so many seconds, or has `ended`, with all its workers.

        A silent one is waited for where nobody could go on without these: it may only be stopped, while they train.
        """
        self.awaited.pop(agent, None)
        self.gone.add(agent)
        self.version += 1
        gone = [number for number, seat in self.seats.items() if seat.agent == agent]
        if self.recovering < math.inf:  # they are as if they had not come back yet
            self.seats |= {number: WorkerSlot(agent, UNKNOWN, newcomer=True) for number in gone}
            return
        lost = [number for number in gone if self.seats[number].alive]
        members = [number for number in lost if not self.seats[number].newcomer]
        before, servers = self.roster, [number for number in lost if number >= SERVERS and not self.over]
        if members and not self._survivors(lost):
            return  # nobody else could go on: it may come back
        if servers and not ended and not held_elsewhere(self.seats, servers):
            self._await(agent, servers, why)
            return
        if servers:
            ends = not self.max_restarts or not before.begun
            (self._fail if ends else self._without)(servers, f"{'is' if len(servers) == 1 else 'are'} lost ({why})")
        if servers and (self.failing or self.roster is not before):
            return
        gone, lost = ([number for number in some if number not in servers] for some in (gone, lost))
        if members and not self.max_restarts:
            self._fail(members)
        elif lost and not self.over:
            self._lose(lost, f"{'is' if len(lost) == 1 else 'are'} lost ({why})", detection=seconds)
        for number in gone:
            if agent in self.leaving:
                del self.seats[number]
            else:
                self._restart(number)

    def _await(self, agent: str, servers: list[int], why: str) -> None:
        self.awaited[agent] = self._now + AWAITED, why
        what = f"what {'it keeps' if len(servers) == 1 else 'they keep'}"
        been = f"{ranks(servers)} may be lost ({why})"
        self._say(f"{been}, and nobody else has {what}: the run waits for {AWAITED:.0f} s")

    def bye(self, agent: str) -> None:
        """An agent ends, all its workers have ended."""
        self.leaving.add(agent)
        self.gone.add(agent)
        self.version += 1

    @property
    def undecided(self) -> bool:
        """Whether something that was reported is still to be judged."""
        return self.recovering < math.inf or bool(self._raised_now)

    # ---- time

    @property
    def due(self) -> float:
        """When `tick` is to be called next."""
        starts = (at for at, _ in self._starts.values())
        soon = (self._asked, self._judged, self._again, self._stops.due, self.merges.due, self.recovering)
        return min(*soon, *starts, *(until for until, _ in self.awaited.values()))

    def tick(self, now: float) -> None:
        """What was put off, if it is time."""
        self._now = now
        for number, (at, life) in [*self._starts.items()]:
            if now >= at:
                del self._starts[number]
                self._start(number, life)
        if self.recovering < math.inf:
            self._recover(now)
        for agent, (until, why) in [*self.awaited.items()]:
            if now >= until:
                self.lost_agent(agent, why, AWAITED, ended=True)
        if now >= self._stops.due:
            self._look_at_stops(now)
        if now >= self._judged:
            self._judge()
        if now >= self._asked:
            self._let_go()
        if now >= self._again:
            self._form_again()
        if now >= self.merges.due:
            self._look_at_rounds(now)

    # ---- what agents are to know

    @property
    def over(self) -> bool:
        """Whether all whom the run depends on have ended."""
        return self.ended or all_ended(self.seats)

    @property
    def finished(self) -> bool:
        """Whether it is over because the training, or the script, has come to its end."""
        return self.over and any_ended_well(self.seats) and not self.failing and not self.ended

    def orders(self, agent: str) -> dict[str, Any]:
        """The state that an agent is to bring about: of each worker which life, and whether it is of the team."""
        more = {"at_once": self.roster.at_once, "detection": self._detection, "hold": self._paused}
        return {
            "epoch": self.epoch,
            "version": self.version,
            "generation": generation_of(self.order, self.seats, more),
            "workers": self._lives.wanted(agent),
            "failing": [[number, self.seats[number].agent, why] for number, why in self.failing.items()],
            "over": self.over,
            "finished": self.finished,
            "agents": len(self.standbys.keys() - self.gone),
            "standbys": list(self.standbys.values()),
            "moved": self.moved,
            "stop": self.stop,
            "coming": self.coming,
            "merge": self.merges.last,
            "servers": serving(self.seats),
            "lines": self.lines,
        }

    def status(self) -> dict[str, Any]:
        """What anybody may know."""
        roster = self.roster
        more = {"min_workers": self.min_workers, "paused": self._paused, "stopping": self.stop}
        told = {"epoch": self.epoch, "generation": roster.number, "members": list(roster.members), "step": self.step}
        workers = {number: state_of(number, seat, roster) for number, seat in sorted(self.seats.items())}
        return {**told, "workers": workers, **more}

    def _too_few(self, members: Collection[int]) -> bool:
        """Whether a team of these waits for others."""
        return len(members) < self.min_workers and not self.stop

    @property
    def _paused(self) -> bool:
        return self._too_few((self.order or self.roster).members)

    def _say(self, text: str, always: bool = False) -> None:
        self.version += 1
        self.lines = [*self.lines[1 - LINES :], (self.version, text, always)]

    # ---- one worker's news

    def _advanced(self, number: int, seat: WorkerSlot, before: WorkerReport, now: float) -> None:
        """How far it has come."""
        said, roster = seat.said, self.roster
        if number >= SERVERS and said.at != before.at:
            self.version += 1
            roster.renews |= number in self._away
            self._away.discard(number)
        if said.ready and not before.ready and not seat.newcomer:
            roster.ready(number)
        if said.formed > before.formed:
            new = number not in roster.established
            roster.formed(number, said.formed)
            if new and number in roster.established:
                seat.newcomer = False
                self._say(f"{ranks([number])} has joined: {plural(len(roster.members), 'worker')}")
        if said.leaves and not before.leaves:
            roster.leaves(number)
        if said.stands and said.stands != before.stands:
            self._say(said.stands)
        if said.alone > before.alone:
            self._again = min(self._again, now + ALONE)
        if said.ended and not before.ended:
            roster.end(number)

    def _ended(self, number: int, seat: WorkerSlot, before: WorkerReport, now: float) -> None:
        """How it ended, or that it is about to."""
        said = seat.said
        if self.seats[number] is not seat:  # all have gone back
            return
        needed = not held_elsewhere(self.seats, [number]) if number >= SERVERS else not seat.newcomer
        if said.declined and needed and (number >= SERVERS or not self.roster.begun):
            self._fail([number], "cannot be started anew")
        elif said.declined:
            seat.out = True
        elif said.failed is not None and before.failed is None:
            if not seat.newcomer and not seat.out and self.roster.begun:
                self._raised_now.append(number)
                self._judged = min(self._judged, now + ALIKE)
            elif not self._spared(number):
                self._fail([number])
        elif said.status is None or before.status is not None or seat.out:
            return
        elif said.status == STOPPED and number in self._left:
            self._left.remove(number)
            seat.out = True
            told = number in self.roster.leaving
            self.roster.end(number)
            if told:
                self._say(f"{ranks([number])} left, as it was told: {go_on(self.roster.members)}")
            else:  # its mate was
                self._restart(number)
        elif said.status in (0, STOPPED) and (said.status or said.ended or not self.roster.begun):
            self.roster.end(number)  # else it vanished in the midst of training
        elif number not in self._raised_now and not self._spared(number):
            self._fail([number])

    def _look_at_rounds(self, now: float) -> None:
        """Who is in a merge is in the journal before anybody hears of it."""
        told = (seat.said.round for seat in self.seats.values() if seat.alive)
        if decided := self.merges.look(told, self.roster.at_once, now):
            self.record("merge", **decided)
            self.version += 1

    def _look_at_stops(self, now: float, told: Iterable[int] = ()) -> None:
        """Whoever is stopped is lost where others can go on. Else whoever stopped it may let it go on: not for long, if
        the first step is not made or no loss is survived. Of those in `told` there is news.
        """
        for number in (n for n in told if self._stops.hear(n, self.seats[n].said, now)):
            self._say(f"{ranks([number])} goes on")
        stopped, begun = self._stops.stopped(self.seats), self.roster.begun
        if begun and not self.over and (servers := [number for number in stopped if number >= SERVERS]):
            self._without(servers, "was stopped")
            stopped = self._stops.stopped(self.seats)
        if not stopped or self.over or self.failing:
            return
        if self.max_restarts and begun and self._survivors(stopped):
            how = "was stopped" if len(stopped) == 1 else "were stopped"
            self._lose(stopped, how, detection=max(self.seats[number].said.since for number in stopped))
            for number in stopped:
                self._restart(number)
            return
        often = self._causes["was stopped"] >= self.max_restarts
        then = "" if begun and self.max_restarts else "the run ends" if often else "all workers start anew"
        stopped = [number for number in stopped if not self.seats[number].newcomer]
        text, over = self._stops.wait(stopped, now, begun, then)
        if text:
            self._say(text)
        if over and often:
            self._fail(stopped, f"was stopped (SIGSTOP) for {OVER:.0f} s")
        elif over:
            self._causes["was stopped"] += 1
            self.record("lost", workers=stopped, why="was stopped before the first step", step=self.step)
            self._start_anew(self.roster.members)

    def _without(self, servers: list[int], why: str, restarts: bool = True) -> None:
        """Others have what these kept; or all begin anew at the last checkpoint, or the run ends."""
        held = held_elsewhere(self.seats, servers)
        if not held:
            self._causes["servers"] += 1
            can = restarts and not self.stop and self._causes["servers"] <= self.max_restarts
            if not can or not self._lives.can_go_back(self.first):
                self._fail(servers, why)
                return
        then = held + "; it is not started again" * (not restarts) if held else "all go back to the last checkpoint"
        lost, how = (servers, f"{ranks(servers)} {why}") if held else all_lost(self.seats, servers, why)
        self.record("lost", workers=lost, why=why, step=self.step)
        self._say(f"{how}: {then}{left_of(lost, self.seats, self.logs)}")
        for number in servers if held else ():
            self.seats[number].out = True
            if restarts and not self.stop:
                self._away.add(number)
                self._restart(number)
        if not held:
            self.order, self._left, self._raised_now, self._judged, self._away = None, set(), [], math.inf, set()
            self._start_anew(self.first, [n for n, seat in self.seats.items() if n >= SERVERS or seat.alive])

    def _start_anew(self, members: tuple[int, ...], others: Iterable[int] = ()) -> None:
        """The workers of the first generation in processes that meet each other, and these others as newcomers."""
        self.roster, self._again = Membership(members, self.roster.number, places=self.roster.places), math.inf
        for number in {*members, *others}:
            self._lives.again(number, self.seats[number].life + 1, newcomer=number not in members)
        self.version += 1

    def _judge(self) -> None:
        """Goes on without whoever raised an exception, unless all the others did as well."""
        raised, self._raised_now, self._judged = self._raised_now, [], math.inf
        everybody = not self.roster.survivors(raised)
        for number, seat in [(number, self.seats[number]) for number in raised]:
            if self.seats[number] is seat and (everybody or not self._spared(number)):  # else all have gone back
                self._fail([number])

    def _fail(self, numbers: Iterable[int], why: str = "") -> None:
        """These end the run."""
        self.failing = {number: why or self.seats[number].said.loss for number in numbers} | self.failing
        self.version += 1

    # ---- who is of the team

    def _let_in(self) -> None:
        """Newcomers wait for the next generation; of a host where nobody has the state, the first takes it before."""
        roster, coming, served = self.roster, Coming(), set[str]()
        new = {n: seat for n, seat in self.seats.items() if seat.newcomer and seat.alive and seat.said.waiting}
        have = {self.seats[number].agent for number in roster.established if number in self.seats}
        have |= {seat.agent for seat in new.values() if seat.said.current or seat.said.at is None}
        for number, seat in sorted(new.items()):
            if number in roster.waiting:
                have.add(seat.agent)
            elif seat.agent in have or self._paused:
                roster.waits(number)
            elif seat.said.at is not None and seat.agent not in served:
                coming[number] = seat.said.at
                served.add(seat.agent)
        self.version += coming != self.coming
        self.coming = coming

    @property
    def _all_go(self) -> bool:
        """Whether nobody would stay, of those that are of the team once its present generation is entered."""
        return self.roster.going.issuperset(self.roster.members)

    def _let_go(self) -> None:
        self._asked = math.inf
        if any(seat.said.ended for seat in self.seats.values()):
            return  # all of them are about to
        if self._all_go:
            self.stop_all()
        else:
            self._announce(self.roster.plan())

    def stop_all(self) -> None:
        """The whole run is to stop, and save."""
        if not self.stop:
            paused, self.stop = self._paused, True
            self.version += 1
            if paused:  # the step at whose end it stops is still to be made
                self._announce(self.roster.renew())

    def _survivors(self, lost: Collection[int]) -> list[int]:
        dead = [number for number, seat in self.seats.items() if not seat.alive]
        return list(self.roster.survivors([*lost, *dead]))

    def _spared(self, number: int) -> bool:
        """Whether the others can go on without a worker that failed; then they do."""
        seat = self.seats[number]
        if seat.out:
            return True
        if self.failing or not self.max_restarts or not self.roster.begun:
            return False
        said, why = seat.said, seat.said.loss
        what = said.failed or said.hung
        known = bool(what) and (said.final or what in self._raised)
        if what:
            self._raised.add(what)
        left = self._survivors([number])
        self._causes[why] += 1
        restarts = not known and self._causes[why] <= self.max_restarts
        if number >= SERVERS:
            self._without([number], why, restarts)
            return True
        few = not left or (len(left) < self.min_workers and not restarts)
        if not seat.newcomer and (known or few or (said.failed and not restarts)):
            return False
        pause = pause_of(seat)
        soon = f"; it is started again in {pause:.0f} s" if pause else ""
        self._lose([number], why, soon if restarts else "; it is not started again")
        if restarts:
            self._restart(number)
        return True

    def _restart(self, number: int) -> None:
        """Its agent starts another process in its place, after a pause where the one before never came to the team."""
        seat = self.seats[number]
        if pause := pause_of(seat):
            self._starts[number] = (self._now + pause, seat.life + 1)
        else:
            self._start(number, seat.life + 1)

    def _start(self, number: int, life: int) -> None:
        seat = self.seats.get(number)
        stays = seat is not None and (number >= SERVERS or seat.agent not in self.leaving)
        if seat is not None and stays and seat.life < life and not seat.said.declined:
            self._lives.again(number, life, seat.failures + seat.failed_early if seat.newcomer else 0)
            self.version += 1

    def _lose(self, lost: list[int], why: str, then: str = "", detection: float = 0.0) -> None:
        new = all(self.seats[number].newcomer for number in lost)
        mates = [mate for mate in self.roster.mates(lost) if mate in self.seats]
        for number in (*lost, *mates):
            self.seats[number].out = True
        self._left -= {*lost, *mates}
        order = self.roster.lose(lost)
        causes = {number: said.cause for number in lost if (said := self.seats[number].said).cause}
        more = {"mates": mates} if mates else {}
        self.record("lost", workers=lost, why=why, step=self.step, **more, **({"causes": causes} if causes else {}))
        left = left_of(lost, self.seats, self.logs)
        if order is not None:
            start = "starts" if len(mates) == 1 else "start"
            too = f", and {ranks(mates)} of the same replica {start} anew" if mates else ""
            self._say(f"{ranks(lost)} {why}{too}: {self._how_on(order.members)}{then}{left}")
        elif new:
            before = "before it was back" if len(lost) == 1 else "before they were back"
            self._say(f"{ranks(lost)} {why} {before}{then}{left}")
        self._announce(order, detection)
        for mate in mates:
            self._restart(mate)
        self._let_in()
        self.version += 1

    def _how_on(self, members: Collection[int]) -> str:
        if self._too_few(members):
            return f"{plural(len(members), 'worker')} left, paused until there are {self.min_workers}"
        return go_on(members)

    def _announce(self, order: Announcement | None, detection: float = 0.0) -> None:
        """A generation: it is in the journal before anybody hears of it. The loss it follows was not known so long."""
        if order is None:
            return
        self._left = (self._left | self.roster.going) - set(order.members)
        about = {"planned": order.planned, "at_once": self.roster.at_once}
        self.record("generation", number=order.number, workers=list(order.members), **about)
        self.order, self._detection = order, detection
        if not order.planned:  # one that is comes after a step, which who misses others does not end
            self._again = math.inf
        self.version += 1

    def _form_again(self) -> None:
        """Somebody misses others that all live: the same team forms once more, over fresh connections."""
        self._again = math.inf
        alone = [n for n, seat in self.seats.items() if seat.said.alone >= max(seat.said.formed, 0) and seat.alive]
        what = "connections were lost"
        self._causes[what] += bool(alone)
        if alone and (self._causes[what] > self.max_restarts or any(seat.said.ended for seat in self.seats.values())):
            self._fail(alone, "lost its connections to the others")
        elif alone:
            self._say(f"{what}: {go_on(self.roster.members)} over new ones")
            self._announce(self.roster.renew())

    # ---- after a coordinator was started again

    def _recover(self, now: float) -> None:
        """Once all members' agents are back, or their time is over: who is there, from what they said.

        That an agent is late is no failure of its workers: its time is not over before some are back who can go on.
        """
        roster = self.roster
        here = {number: seat.said for number, seat in self.seats.items() if seat.said != WorkerReport()}
        first = {number for number, said in here.items() if said.ready and not said.newcomer}
        roster.known(first, {number: said.formed for number, said in here.items()})
        missing = [number for number in roster.members if number not in here]
        ended = any(said.ended for said in here.values())  # then all have come to the end
        if missing and not ended and not {*self._survivors(missing)} & {*roster.members}:
            self._wait_for(missing, here, now)
        if missing and now < self.recovering:
            return
        self.recovering = math.inf
        for number, said in sorted(here.items()):
            self.seats[number].newcomer = said.newcomer and said.formed < 0
            if said.leaves:
                roster.leaves(number)
            if said.ended:
                roster.end(number)
        self._away = unheld(here)
        roster.renews = any(here[number].at for number in self._away)
        roster.before = tuple(number for number in roster.before if number in roster.established)
        self._left = {*roster.before} & roster.going - {*roster.members}
        for number in sorted(roster.established - {*roster.members} - self._left):
            if self.seats[number].alive:  # the team went on without it
                roster.end(number)
                self._restart(number)
        for number in missing:
            if ended:
                roster.end(number)
            else:
                self.seats.setdefault(number, WorkerSlot(agent="", life=UNKNOWN)).said = WorkerReport(
                    why="did not come back"
                )
        if missing and not ended:
            self._lose(missing, "did not come back")
        for number in sorted(here):
            seat = self.seats[number]
            self._ended(number, seat, WorkerReport(), now)
            if seat.said.alone >= 0:
                self._again = min(self._again, now + ALONE)
        self._look_at_stops(now, here)
        if roster.leaving:
            self._asked = now
        if self.order is None and roster.begun and roster.entered != set(roster.members):
            self._announce(roster.renew())  # the last one was journaled, and did not come to everybody
        self._let_in()
        self._announce(roster.plan())
        self._look_at_rounds(now)
        self.version += 1

    def _wait_for(self, missing: list[int], here: Collection[int], now: float) -> None:
        """Nobody who is here could go on without these, whose agents may come back."""
        self._late = self._late or now + RETURN
        if here and now >= self._late:
            self._late = math.inf
            self._say(f"{ranks(missing)} did not come back yet, and nobody else has the state of the training: waiting")
        self.recovering = now + RETURN
