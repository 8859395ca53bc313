"""Schedules steps that do not wait for backup workers: the first pushes that arrive make a step.

Each global batch is cut into one *share* per worker, all of which compute it from the same weights. Of n workers whose
shares have rows that count, the first n - b to push make the update, where b is the number of backup workers (Chen et
al., "Revisiting Distributed Synchronous SGD", 2016). If more than b of them are lost, those that are left make it.
No torch, no clock, no sockets.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field


@dataclass
class BackupScheduler:
    """Schedules the steps from `start` to `end`, which are the window; `applied` counts the steps applied in all."""

    backup: int
    start: int = 0
    end: int = 0
    applied: int = 0
    workers: set[int] = field(default_factory=set)  # the living ones
    # Of the step under way:
    members: tuple[int, ...] = ()  # the workers that have a share, in the order of their shares; none before it begins
    arrived: list[int] = field(default_factory=list)  # those whose shares have arrived, in the order of arrival
    idle: set[int] = field(default_factory=set)  # those in whose shares nothing counts
    chosen: list[int] = field(default_factory=list)  # those whose shares make the update, once that is decided

    @property
    def ended(self) -> bool:
        """Whether all steps of the window are applied."""
        return self.applied == self.end

    def advance(self, updates: int) -> None:
        """Begins the next window, of this number of steps."""
        if not self.ended:
            raise RuntimeError(f"tickets of the previous window that are not applied: {self.end - self.applied}")
        self.start = self.end
        self.end += updates

    def stop(self) -> None:
        """Ends the window with the step under way."""
        self.cut(self.applied + bool(self.members))

    def cut(self, end: int) -> None:
        """Ends the window before step `end`. No step from there on is applied yet."""
        self.end = min(self.end, end)
        if self.ended:
            self._clear_step()

    def join(self, worker: int) -> None:
        """Adds a worker, which gets shares from the next step on."""
        self.workers.add(worker)

    def lose(self, worker: int) -> None:
        """Removes a worker: the step does not wait for its share."""
        self.workers.discard(worker)
        self._restart_if_deserted()

    def take_over(self, workers: Collection[int]) -> None:
        """Starts to assign shares to these workers, after following another server: the step begins again."""
        self._clear_step()
        self.workers = {*workers}

    def deal(self, worker: int) -> int | None:
        """Returns the step in which a worker has a share to compute, or None if it has to wait or no step is left."""
        if self.ended or worker in self.arrived or worker in self.idle or worker not in self.workers:
            return None
        if not self.members:
            self.members = tuple(sorted(self.workers))
        return self.applied if worker in self.members else None

    def awaits(self, worker: int, step: int) -> bool:
        """Whether a worker's share of this step may still be among those that make the update."""
        return step == self.applied and not self.chosen and worker in self.members and worker not in self.arrived

    def arrive(self, worker: int, counts: bool) -> None:
        """Adds a worker's share of the step. `counts` is False if nothing in it counts."""
        (self.arrived.append if counts else self.idle.add)(worker)
        self._restart_if_deserted()

    def choose(self) -> list[int]:
        """Chooses the workers whose shares make the update, once enough have arrived, and returns them or none.

        They are in the order of their shares, and stay the same until the update is made or the choice is dropped.
        """
        busy = [worker for worker in self.members if worker not in self.idle]
        available = [worker for worker in busy if worker in self.workers or worker in self.arrived]
        needed = max(1, min(len(busy) - self.backup, len(available)))
        if not self.chosen and len(self.arrived) >= needed:
            self.chosen = sorted(self.arrived[:needed])
        return self.chosen

    def follow(self, window: tuple[int, int]) -> None:
        """Follows an update of the leading server, which is the next of this window."""
        if self.start != window[0]:
            self.applied = window[0]
        self.start, self.end = window
        self.applied += 1
        self._clear_step()

    def _restart_if_deserted(self) -> None:
        """Begins the step again if no remaining worker has a share to compute."""
        if not self.arrived and self.workers.isdisjoint({*self.members} - self.idle):
            self._clear_step()

    def _clear_step(self) -> None:
        self.members, self.chosen = (), []
        self.arrived.clear()
        self.idle.clear()
