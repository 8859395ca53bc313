"""Many agents that say what their workers do, and do at once what they are told, without a process for any of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from paceline.team.coordinator import Coordinator, WorkerReport
from paceline.team.membership import Membership

STORE = ("127.0.0.1", 1)


class Replay:
    """A run that begins with `each` workers on each of `hosts` hosts; `number` makes a worker's number of an int."""

    def __init__(self, hosts: int, each: int, number: Callable[[int], int] = int) -> None:
        self.now = 0.0
        self.hosts = [[number(host * each + local) for local in range(each)] for host in range(hosts)]
        self.said = [{worker: WorkerReport(store=STORE) for worker in numbers} for numbers in self.hosts]
        self.journal: list[str] = []
        everybody = tuple(worker for numbers in self.hosts for worker in numbers)
        self.coordinator = Coordinator(3, 1, lambda event, **_: self.journal.append(event), Membership(everybody))
        for host, numbers in enumerate(self.hosts):
            self.coordinator.join(f"agent {host}", "logs", STORE, numbers, len(numbers))

    def tell(self, host: int) -> None:
        """An agent's report."""
        self.coordinator.report(f"agent {host}", self.said[host], 1, self.now)

    def lost(self, host: int) -> None:
        """An agent is not heard any more."""
        self.coordinator.lost_agent(f"agent {host}", "it is silent")

    def ask(self, host: int) -> Any:
        """An agent's orders, of which each is told as soon as there is news."""
        return self.coordinator.orders(f"agent {host}")

    def everybody(self, **fields: Any) -> None:
        """All agents report that of all their living workers."""
        for host, workers in enumerate(self.said):
            for worker, said in workers.items():
                if said.status is None:
                    workers[worker] = replace(said, **fields)
            self.tell(host)

    def news(self) -> None:
        for host in range(len(self.hosts)):
            self.ask(host)

    # -- the acts of a run

    def begin(self) -> None:
        self.everybody(ready=True)
        assert self.coordinator.membership.begun

    def lose_worker(self) -> None:
        """The last worker of the first host is killed."""
        worker = self.hosts[0][-1]
        self.said[0][worker] = replace(self.said[0][worker], status=-9, why="was killed")
        self.tell(0)
        assert worker not in self.coordinator.membership.members

    def lose_host(self) -> None:
        """The last one."""
        self.lost(len(self.hosts) - 1)
        lost = self.hosts.pop()
        self.said.pop()
        assert not {*lost} & {*self.coordinator.membership.members}

    def enter(self) -> None:
        """All workers enter the generation that was announced."""
        number = self.coordinator.membership.number
        self.everybody(formed=number)
        assert self.coordinator.membership.entered == {*self.coordinator.membership.members}

    def come_back(self) -> None:
        """The worker that was killed has been started again, and is admitted."""
        worker = self.hosts[0][-1]
        life = self.coordinator.slots[worker].life
        self.said[0][worker] = WorkerReport(life, STORE, newcomer=True, waiting=True)
        self.tell(0)
        self.enter()
        assert worker in self.coordinator.membership.members

    def leave(self) -> None:
        """All workers are told to leave: the run stops."""
        self.everybody(leaves=True)
        self.coordinator.tick(self.now + 1.0)
        assert self.coordinator.stop

    def end(self) -> None:
        self.everybody(ended=True)
        self.everybody(status=0)
        assert self.coordinator.over
