"""Who is in the team: membership as the coordinator decides it. No torch, no clock, no sockets."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Announcement:
    """A new generation: its number and members, oldest first; the first is main. A `planned` one, with newcomers, is
    entered at the end of a step that all agree on, another one at once.
    """

    number: int
    members: tuple[int, ...]
    planned: bool


@dataclass
class Roster:
    """Told what happened to workers, says which generation follows. Workers are known by their numbers.

    A member is *established* once it has the state of the training. Whoever is lost leaves at once, with all that are
    not established; newcomers wait until all members have entered the present generation.
    """

    members: tuple[int, ...]
    number: int = 0
    established: set[int] = field(default_factory=set)
    entered: set[int] = field(default_factory=set)
    waiting: list[int] = field(default_factory=list)

    @property
    def begun(self) -> bool:
        """Whether all of the first generation have come to their first step: before that nobody can be spared."""
        return self.number > 0 or len(self.established) == len(self.members)

    def ready(self, worker: int) -> None:
        """A worker of the first generation has come to its first operation."""
        self.established.add(worker)
        self.entered.add(worker)

    def waits(self, worker: int) -> None:
        """A newcomer wants to be admitted."""
        self.waiting.append(worker)

    def formed(self, worker: int, number: int) -> None:
        """A worker has entered a generation, and has the state of the training."""
        if number == self.number:
            self.entered.add(worker)
            self.established.add(worker)
            if worker in self.waiting:
                self.waiting.remove(worker)

    def survivors(self, lost: Collection[int]) -> tuple[int, ...]:
        """The members that would remain."""
        return tuple(worker for worker in self.members if worker in self.established and worker not in lost)

    def lose(self, lost: Collection[int]) -> Announcement | None:
        """These are gone. The next generation, if one of them was a member and somebody is left."""
        concerns = any(worker in self.members for worker in lost)
        left = self.survivors(lost)
        self.waiting = [worker for worker in self.waiting if worker not in lost]
        self.established -= set(lost)
        if not concerns or not left:
            return None
        return self._announce(left, planned=False)

    def end(self, worker: int) -> None:
        """A worker has done its part to the end."""
        self.members = tuple(member for member in self.members if member != worker)
        self.established.discard(worker)
        self.entered.discard(worker)

    def plan(self) -> Announcement | None:
        """The generation that admits whoever waits, if it is time for one."""
        new = [worker for worker in self.waiting if worker not in self.members]
        if not new or not self.members or not self.begun or self.entered != set(self.members):
            return None
        return self._announce((*self.members, *new), planned=True)

    def _announce(self, members: tuple[int, ...], planned: bool) -> Announcement:
        self.number += 1
        self.members, self.entered = members, set()
        return Announcement(self.number, members, planned)
