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

LAST = 1 << 40  # a life after all others


@dataclass
class ServerPlacement:
    """Places parameter servers on hosts, and chooses the host on which a worker is started again.

    Agents that are `gone` or `leaving` get no servers. A server that moves to another host ends on its old one.
    """

    slots: dict[int, WorkerSlot]
    gone: set[str]
    leaving: set[str]
    _left: dict[str, dict[int, Any]] = field(default_factory=dict)  # by agent

    @property
    def _hosts(self) -> list[str]:
        """The agents that have workers, in the order of their lowest worker."""
        away, slots = self.gone | self.leaving | {""}, sorted(self.slots.items())
        return [*dict.fromkeys(slot.agent for n, slot in slots if n < SERVERS and slot.agent not in away)]

    def place_servers(self, agent: str, reports: Mapping[int, WorkerReport], recovering: bool, least: int) -> bool:
        """Makes slots for the parameter servers that workers need; returns whether any is new.

        The servers go to the hosts in turn, once these have `least` workers. A server that the agent reports exists
        already, and stays with this agent.
        """
        slots, hosts = self.slots, self._hosts
        count = max(
            [0, *(report.servers for report in reports.values()), *(slot.report.servers for slot in slots.values())]
        )
        new = [number for number in range(SERVERS, SERVERS + count) if number not in slots]
        wait = recovering or sum(number < SERVERS for number in slots) < least
        for number in new:
            if number in reports:  # to a coordinator that was started again they may be new in a later life
                slots[number] = WorkerSlot(agent, reports[number].life, newcomer=True)
            elif hosts and not wait:
                host_index = (number - SERVERS) % len(hosts)
                # Not on the first host, which has a copy of the last server's state.
                last = SERVERS < number == SERVERS + count - 1 and len(hosts) > 2
                slots[number] = WorkerSlot(hosts[host_index or int(last)], newcomer=True)
        return any(number in slots for number in new)

    def pick_host(self, number: int) -> str:
        """The agent that starts a worker again. A server of a lost host goes to the host with the fewest servers that
        does not hold its copies.
        """
        slots, agent, hosts = self.slots, self.slots[number].agent, self._hosts
        if number < SERVERS or agent not in self.gone | self.leaving or not hosts:
            return agent
        at = {n: slot.agent for n, slot in slots.items() if n >= SERVERS and n != number}
        near = [at.get(SERVERS + (number - SERVERS + step) % (len(at) + 1)) for step in (1, -1)]
        return min(hosts, key=lambda host: (host in near, [*at.values()].count(host), hosts.index(host)))

    def restart(self, number: int, life: int, failures: int = 0, newcomer: bool = True) -> None:
        """Replaces a worker's slot by one with this life, on another host if its own is lost."""
        before, agent = self.slots[number], self.pick_host(number)
        if agent != before.agent:
            self._left.setdefault(before.agent, {})[number] = WorkerSlot(agent, before.life, True, out=True).wanted
        self.slots[number] = WorkerSlot(agent, life, newcomer, failures=failures)

    def vacate(self, number: int) -> None:
        """Takes a worker from its agent, which ends it if it still runs; another agent may get its number."""
        slot = self.slots[number]
        if slot.agent:
            self._left.setdefault(slot.agent, {})[number] = WorkerSlot(slot.agent, slot.life, True, out=True).wanted
        slot.agent = ""

    def release(self, agent: str, number: int) -> None:
        """Has an agent end a worker of which another agent has got the number, in whatever life it is."""
        self._left.setdefault(agent, {})[number] = WorkerSlot(agent, LAST, True, out=True).wanted

    def wanted(self, agent: str) -> dict[int, Any]:
        """The workers, by number, that an agent must run or end."""
        return self._left.get(agent, {}) | {n: slot.wanted for n, slot in self.slots.items() if slot.agent == agent}

    def can_go_back(self, first: Sequence[int]) -> bool:
        """Whether all workers can begin again like the `first` generation, whose workers all belong to one agent; the
        others join them.
        """
        agents = {self.slots[number].agent for number in first if number in self.slots}
        return len(agents) == 1 and not agents & (self.gone | self.leaving) and [*first] == [*range(len(first))]


def serving(slots: Mapping[int, WorkerSlot]) -> dict[int, At]:
    """The addresses of the parameter servers, by their numbers."""
    at = {n - SERVERS: slot.report.at for n, slot in sorted(slots.items()) if n >= SERVERS and slot.alive}
    return {number: where for number, where in at.items() if where is not None}


def held_elsewhere(slots: Mapping[int, WorkerSlot], lost: Collection[int]) -> str:
    """Says which servers have copies of the state of the lost servers; an empty text if any part has no copy."""
    count = max((slot.report.servers for slot in slots.values()), default=0)
    copies = max((slot.report.copies for slot in slots.values()), default=0)
    have = {n for n, slot in slots.items() if slot.alive and slot.report.holds and n not in lost}
    holders_by_part = [
        [SERVERS + n for n in holders(part, count, copies) if SERVERS + n in have] for part in range(count)
    ]
    known = {SERVERS + part for part in range(count)}  # a report may name a server that the plan does not have
    if not copies or not all(holders_by_part) or not {*lost} <= known:
        return ""
    those = {holders_by_part[number - SERVERS][0] for number in lost}
    what = "a copy of its state" if len(lost) == 1 else "copies of their states"
    return f"{ranks(those)} {'has' if len(those) == 1 else 'have'} {what}"


def all_lost(slots: Mapping[int, WorkerSlot], servers: Sequence[int], why: str) -> tuple[list[int], str]:
    """These parameter servers and others that ended too, not yet reported as lost; and how they ended, in words."""
    ends = {n for n, slot in slots.items() if n >= SERVERS and slot.report.status is not None and not slot.out}
    too = sorted(ends - {*servers})
    return [*servers, *too], ", ".join(
        [f"{ranks(servers)} {why}", *(f"{ranks([n])} {slots[n].report.loss}" for n in too)]
    )


def unheld(reports: Mapping[int, WorkerReport]) -> set[int]:
    """The parameter servers that have not received their state back, which others have."""
    servers = {number for number in reports if number >= SERVERS}
    have = {number for number in servers if reports[number].holds}
    return servers - have if have else set()
