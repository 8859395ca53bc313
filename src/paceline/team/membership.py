"""Who is in the team, and which generation follows a loss, an arrival or a leave.

No torch, no clock, no sockets.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Announcement:
    """A new generation: its number and its members, oldest first.

    A `planned` generation, with newcomers, is entered at the end of a step that all agree on, another one at once.
    """

    number: int
    members: tuple[int, ...]
    planned: bool


@dataclass
class Membership:
    """Keeps track of what happens to workers, and decides which generation follows. Workers are identified by number.

    A member is *established* once it has the state of the training. Lost workers leave at once, with all members that
    are not established; newcomers wait until all members have entered the present generation.

    A replica consists of `replica_size` consecutive members, and joins and leaves as a unit: without one of them, the
    others, its *replica peers*, have only a part of a model.
    """

    members: tuple[int, ...]
    number: int = 0
    at_once: int = 0  # the number of the newest generation that was not planned
    established: set[int] = field(default_factory=set)
    entered: set[int] = field(default_factory=set)
    waiting: dict[int, None] = field(default_factory=dict)  # in the order in which they came
    leaving: set[int] = field(default_factory=set)
    before: tuple[int, ...] = ()  # the members of the last generation that all had entered
    replica_size: int = 1
    is_first_team: bool = False  # whether it is the first team, which starts with what a checkpoint holds
    renews: bool = False  # whether the same members are to form another generation between two steps
    replicas: dict[int, tuple[int, ...]] = field(default_factory=dict)  # by worker: the members of its replica

    def __post_init__(self) -> None:
        self.is_first_team |= self.number == 0
        self.set_replica_size(self.replica_size)

    def set_replica_size(self, size: int) -> None:
        """Sets the number of workers that hold a model together, which is known from their first reports."""
        self.replica_size = size
        self._group(self.before)
        self._group(self.members)

    def _group(self, team: tuple[int, ...]) -> None:
        for first in range(0, len(team), self.replica_size):
            replica = team[first : first + self.replica_size]
            self.replicas |= dict.fromkeys(replica, replica)

    @property
    def begun(self) -> bool:
        """Whether the whole first generation has reached its first step: before that, the team survives no loss."""
        return self.number > 0 or len(self.established) == len(self.members)

    @property
    def is_founding(self) -> bool:
        """Whether the members start together, and have not all reached their first step."""
        return self.is_first_team and not self.established.issuperset(self.members)

    def ready(self, worker: int) -> None:
        """Takes note that a worker of the first generation has reached its first transaction."""
        self.established.add(worker)
        self.entered.add(worker)

    def recall(self, first: set[int], formed: Mapping[int, int]) -> None:
        """Takes what workers report to a restarted coordinator: which of the `first` generation had reached their
        first transaction, and which generation each has `formed` last.
        """
        self.established = first | {worker for worker, number in formed.items() if number >= 0}
        self.entered = {worker for worker, number in formed.items() if number == self.number}
        self.entered |= first if self.is_first_team else set()

    def waits(self, worker: int) -> None:
        """Takes note that a newcomer waits to be admitted."""
        self.waiting[worker] = None

    def formed(self, worker: int, number: int) -> None:
        """Takes note that a worker has entered a generation, and has the state of the training."""
        if number == self.number:
            self.entered.add(worker)
            self.established.add(worker)
            self.waiting.pop(worker, None)

    def leaves(self, worker: int) -> None:
        """Takes note that a member was asked to leave."""
        if worker in self.established:
            self.leaving.add(worker)

    def replica_peers(self, workers: Collection[int]) -> list[int]:
        """The other workers of these workers' replicas."""
        others = {*self.members, *self.before}.difference(workers)
        replica_members = dict.fromkeys(mate for worker in workers for mate in self.replicas.get(worker, ()))
        return [mate for mate in replica_members if mate in others]

    @property
    def leaving_replicas(self) -> set[int]:
        """The members that were asked to leave, and their replica peers."""
        return {*self.leaving, *self.replica_peers(self.leaving)}

    def survivors(self, lost: Collection[int]) -> tuple[int, ...]:
        """The members that would remain without the lost ones."""
        everybody = dict.fromkeys((*self.members, *self.before))
        remaining = self.established.intersection(everybody).difference(lost)
        return tuple(worker for worker in everybody if remaining.issuperset(self.replicas[worker]))

    def lose(self, lost: Collection[int]) -> Announcement | None:
        """Removes lost workers and their replica peers; returns the next generation, if there is one."""
        concerns = not {*self.members, *self.before}.isdisjoint(lost)
        left = self.survivors(lost)
        gone = {*lost, *self.replica_peers(lost)}
        for worker in gone:
            self.replicas.pop(worker, None)
            self.waiting.pop(worker, None)
        for workers in (self.established, self.entered, self.leaving):
            workers -= gone
        self.members = tuple(worker for worker in self.members if worker not in gone)
        self.before = tuple(worker for worker in self.before if worker not in gone)  # their number may come back
        if not concerns:
            return None
        if not left:
            self.members = ()
            return None
        return self._announce(left, planned=False)

    def end(self, worker: int) -> None:
        """Removes a worker that has done its part to the end."""
        self.members = tuple(member for member in self.members if member != worker)
        self.before = tuple(member for member in self.before if member != worker)
        self.replicas.pop(worker, None)
        for workers in (self.established, self.entered, self.leaving):
            workers.discard(worker)

    def plan(self) -> Announcement | None:
        """Returns the generation that admits waiting newcomers and lets members leave, if it is time for one."""
        if not self.begun or len(self.entered) < len(self.members):  # asked after each report: most are of this kind
            return None
        members = set(self.members)
        new = [worker for worker in self.waiting if worker not in members]
        new = sorted(new[: len(new) - len(new) % self.replica_size]) if self.replica_size > 1 else new
        stay = [worker for worker in self.survivors(self.leaving) if worker in members]
        if not stay or self.entered != members or (not new and stay == [*self.members] and not self.renews):
            return None
        return self._announce((*stay, *new), planned=True)

    def renew(self) -> Announcement | None:
        """Returns a generation of the members that have the state, over fresh connections."""
        left = self.survivors(())
        return self._announce(left, planned=False) if left else None

    def _announce(self, members: tuple[int, ...], planned: bool) -> Announcement:
        self.number, self.renews, self.is_first_team = self.number + 1, False, False
        self.at_once = self.at_once if planned else self.number
        if self.entered == set(self.members):
            self.before = self.members
        self.members, self.entered = members, set()
        self._group(members)
        return Announcement(self.number, members, planned)
