"""Places parameter servers on hosts."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from paceline.base.environment import SERVERS
from paceline.base.mesh import holders
from paceline.base.text import ranks
from paceline.team.agent_commands import At
from paceline.team.worker_slots import WorkerReport, WorkerSlot


@dataclass
class ServerPlacement:
    """Who is started again, and on which host parameter servers are: the agents that are `gone` or `leaving` have none.
    Servers that are on other hosts now are to end where they were.
    """

    seats: dict[int, WorkerSlot]
    gone: set[str]
    leaving: set[str]
    _left: dict[str, dict[int, Any]] = field(default_factory=dict)  # by agent

    @property
    def _hosts(self) -> list[str]:
        """The agents that have workers, by the lowest."""
        away, seats = self.gone | self.leaving, sorted(self.seats.items())
        return [*dict.fromkeys(seat.agent for n, seat in seats if n < SERVERS and seat.agent not in away)]

    def place_servers(self, agent: str, told: Mapping[int, WorkerReport], recovering: bool, least: int) -> bool:
        """Seats for the parameter servers that workers want; whether any is new. They are spread over the hosts that
        there are, one after another, once these have so many workers; but those that an agent tells of are there.
        """
        seats, hosts = self.seats, self._hosts
        count = max([0, *(said.servers for said in told.values()), *(seat.said.servers for seat in seats.values())])
        new = [number for number in range(SERVERS, SERVERS + count) if number not in seats]
        wait = recovering or sum(number < SERVERS for number in seats) < least
        for number in new:
            if number in told:  # to a coordinator that was started again they may be new in a later life
                seats[number] = WorkerSlot(agent, told[number].life, newcomer=True)
            elif hosts and not wait:
                place = (number - SERVERS) % len(hosts)
                last = (
                    SERVERS < number == SERVERS + count - 1 and len(hosts) > 2
                )  # the first has a copy of what it keeps
                seats[number] = WorkerSlot(hosts[place or int(last)], newcomer=True)
        return any(number in seats for number in new)

    def _home(self, number: int) -> str:
        """The agent that is to start one again: for a server of a lost host another one, which has few servers, and not
        the copies.
        """
        seats, agent, hosts = self.seats, self.seats[number].agent, self._hosts
        if number < SERVERS or agent not in self.gone | self.leaving or not hosts:
            return agent
        at = {n: seat.agent for n, seat in seats.items() if n >= SERVERS and n != number}
        beside = [at.get(SERVERS + (number - SERVERS + step) % (len(at) + 1)) for step in (1, -1)]
        return min(hosts, key=lambda host: (host in beside, [*at.values()].count(host), hosts.index(host)))

    def again(self, number: int, life: int, failures: int = 0, newcomer: bool = True) -> None:
        before, agent = self.seats[number], self._home(number)
        if agent != before.agent:
            self._left.setdefault(before.agent, {})[number] = WorkerSlot(agent, before.life, True, out=True).wanted
        self.seats[number] = WorkerSlot(agent, life, newcomer, failures=failures)

    def wanted(self, agent: str) -> dict[int, Any]:
        """What an agent is to bring about."""
        return self._left.get(agent, {}) | {n: seat.wanted for n, seat in self.seats.items() if seat.agent == agent}

    def can_go_back(self, first: Sequence[int]) -> bool:
        """Whether all can begin anew, as the workers of the `first` generation did, who meet in one agent; the others
        join them.
        """
        agents = {self.seats[number].agent for number in first if number in self.seats}
        return len(agents) == 1 and not agents & (self.gone | self.leaving) and [*first] == [*range(len(first))]


def serving(seats: Mapping[int, WorkerSlot]) -> dict[int, At]:
    """Where the parameter servers are reached, by their numbers."""
    at = {n - SERVERS: seat.said.at for n, seat in sorted(seats.items()) if n >= SERVERS and seat.alive}
    return {number: where for number, where in at.items() if where is not None}


def held_elsewhere(seats: Mapping[int, WorkerSlot], lost: Collection[int]) -> str:
    """Who has what these parameter servers kept, in words; nothing where a part of any of them is nobody's."""
    count = max((seat.said.servers for seat in seats.values()), default=0)
    copies = max((seat.said.copies for seat in seats.values()), default=0)
    have = {n for n, seat in seats.items() if seat.alive and seat.said.holds and n not in lost}
    found = [[SERVERS + n for n in holders(part, count, copies) if SERVERS + n in have] for part in range(count)]
    if not copies or not all(found):
        return ""
    those = {found[number - SERVERS][0] for number in lost}
    what = "a copy of what it" if len(lost) == 1 else "copies of what they"
    return f"{ranks(those)} {'has' if len(those) == 1 else 'have'} {what} kept"


def all_lost(seats: Mapping[int, WorkerSlot], servers: Sequence[int], why: str) -> tuple[list[int], str]:
    """These parameter servers, and those that ended beside them, of which that was not said yet; how, in words."""
    ends = {n for n, seat in seats.items() if n >= SERVERS and seat.said.status is not None and not seat.out}
    too = sorted(ends - {*servers})
    return [*servers, *too], ", ".join(
        [f"{ranks(servers)} {why}", *(f"{ranks([n])} {seats[n].said.loss}" for n in too)]
    )


def unheld(said: Mapping[int, WorkerReport]) -> set[int]:
    """The parameter servers that have not got back what others have."""
    servers = {number for number in said if number >= SERVERS}
    have = {number for number in servers if said[number].holds}
    return servers - have if have else set()
