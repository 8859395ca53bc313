"""Decides which newcomers join the team, and which wait as spares until the team has lost a worker.

A spare is a newcomer that has done everything but enter the team: its process has built the model and waits.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from paceline.base.environment import SERVERS
from paceline.errors import PlanError
from paceline.plan import Plan
from paceline.team.membership import Membership
from paceline.team.worker_slots import WorkerSlot


def refuse_spares(plan: Plan, workers: int, spares: int) -> None:
    """PlanError: under this plan over `workers` workers, `spares` spare workers could never replace a lost one."""
    mesh = plan.mesh(workers)
    size = mesh.replica
    what = f"--spares {spares}: "
    if mesh.data == 1:
        holders = "the only worker has" if workers == 1 else f"all {workers} workers together have"
        what += f"{holders} the only copy of the state, and no spare can continue if it is lost"
        cure = "use at least two replicas" if size > 1 else "use at least two workers"
        raise PlanError(what, f"{cure}, or --mirror, which restarts the run from a copy in memory")
    if spares % size:
        what += f"a replica of the plan {plan} has {size} workers, which join and leave together"
        raise PlanError(what, f"use --spares {size * -(-spares // size)}")


@dataclass
class SpareWorkers:
    """Counts the workers that the team has and may have.

    A run begins with `size` workers. `brought` has, by agent, how many workers the agent has brought to the team, and
    how many spares. `unreplaced` is the number of workers of hosts that are left out, as long as no other host has
    brought as many.
    """

    slots: Mapping[int, WorkerSlot]
    size: int = 1
    brought: dict[str, tuple[int, int]] = field(default_factory=dict)
    unreplaced: int = 0

    def bring(self, agent: str, workers: int, spares: int, away: Collection[str]) -> None:
        """Takes note of an agent that joins. It replaces earlier ones of its host that are `away`, or else those that
        were left out.
        """
        host = agent.partition(" ")[0]
        before = [one for one in self.brought if one == agent or (one in away and one.partition(" ")[0] == host)]
        for other in before:
            del self.brought[other]
        self.brought[agent] = workers, spares
        if not before:
            self.unreplaced = max(0, self.unreplaced - workers)

    def leave_out(self, agents: Iterable[str]) -> None:
        """Takes note that the host of these agents is left out: spares and further hosts replace its workers."""
        self.unreplaced += sum(self.brought.pop(agent, (0, 0))[0] for agent in agents)

    @property
    def full_size(self) -> float:
        """The number of workers of the full team; without spares there is no limit. Those of lost hosts count."""
        if not any(spares for _, spares in self.brought.values()):
            return math.inf
        return max(self.size, self.unreplaced + sum(workers for workers, _ in self.brought.values()))

    def is_full(self, number: int, membership: Membership) -> bool:
        """Whether the team, with those who are about to enter it or to leave it, has no room for a newcomer. Workers of
        hosts without spares that start for the first time come before spares of other hosts.
        """
        taken = ({*membership.members} - membership.leaving_replicas) | {*membership.waiting}
        if self.slots[number].agent not in self._without_spares:
            taken |= {n for n, slot in self.slots.items() if self._starts(slot) and n < SERVERS}
        return len(taken) >= self.full_size

    @property
    def _without_spares(self) -> set[str]:
        return {agent for agent, (_, spares) in self.brought.items() if not spares}

    def _starts(self, slot: WorkerSlot) -> bool:
        return slot.newcomer and slot.alive and slot.life == 0 and slot.agent in self._without_spares

    def is_spare(self, number: int, membership: Membership) -> bool:
        """Whether a worker is no member, and would have to wait as a spare if it were ready now."""
        slot = self.slots[number]
        comes = slot.newcomer and number not in membership.waiting and number not in membership.members
        return (
            comes
            and number < SERVERS
            and (self.brought.get(slot.agent, (1, 0))[0] == 0 or self.is_full(number, membership))
        )

    def order(self, newcomers: Iterable[int], membership: Membership, ready: Collection[int]) -> list[int]:
        """Sorts newcomers: those on hosts that have lost workers come first, since hosts are to be used evenly, and of
        these the spares that were `ready` before.
        """
        if self.full_size == math.inf:
            return sorted(newcomers)
        counts = Counter(self.slots[member].agent for member in membership.members if member in self.slots)
        first, last = list[int](), list[int]()
        for number in sorted(newcomers, key=lambda n: (n not in membership.waiting, n not in ready, n)):
            agent = self.slots[number].agent
            (first if counts[agent] < self.brought.get(agent, (0, 0))[0] else last).append(number)
            counts[agent] += number not in membership.members
        return first + last

    def needs_copy(self, number: int, membership: Membership) -> bool:
        """Whether a spare receives the state beforehand: there are several hosts, and at most one worker of its own
        host has the state. Where two have it, the spare can copy it from one of them if the other one is lost.
        """
        slots, agent = self.slots, self.slots[number].agent
        hosts = [slots[member].agent for member in membership.established if member in slots]
        return hosts.count(agent) <= 1 and bool({*hosts} - {agent})
