"""Seconds of messages over levels of links: latency, bandwidth, and who shares it (the alpha-beta model).

Sums and gathers go around a ring, which sends each byte at most twice and is bounded by its slowest edge (Patarasuk and
Yuan, "Bandwidth Optimal All-reduce Algorithms for Clusters of Workstations", 2009). Where a ring leaves a host, its
members in this host send over the host's cards together. No torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from paceline.planner.descriptions import LinkDescription


@dataclass(frozen=True)
class Peers:
    """Workers that communicate with one another: along each axis, how many, and the distance of their ranks."""

    axes: tuple[tuple[int, int], ...]

    @cached_property
    def count(self) -> int:
        """The number of these workers."""
        return math.prod(size for size, _ in self.axes)

    def within(self, workers: int) -> int:
        """Returns how many of them are among `workers` neighbouring ranks; 0 stands for all ranks."""
        if not workers:
            return self.count
        return math.prod(min(size, max(1, workers // distance)) for size, distance in self.axes)


class Links:
    """The links of a kind of machines, from the innermost level to the outermost one."""

    def __init__(self, levels: Sequence[LinkDescription]) -> None:
        self.levels = tuple(levels)

    def sum(self, size: float, peers: Peers) -> float:
        """Returns the seconds of an all-reduce of `size` bytes. Small ones go up and down a tree."""
        steps = sum(2 * math.ceil(math.log2(times)) * level.latency for level, times, _ in self._used(peers))
        return 2 * self._ring(size, peers) + steps + self._meeting(peers)

    def gather(self, size: float, peers: Peers) -> float:
        """Returns the seconds of an all-gather or a reduce-scatter, after or before which a worker has `size` bytes."""
        steps = sum((times - 1) * level.latency for level, times, _ in self._used(peers))
        return self._ring(size, peers) + steps + self._meeting(peers)

    def exchange(self, size: float, peers: Peers) -> float:
        """Returns the seconds of an all-to-all. Each worker has `size` bytes, an equal part for each of them."""
        seconds, within = 0.0, 1
        for level, times, sharing in self._used(peers):
            parts = within * (times - 1) / peers.count  # of the bytes go to workers that this level connects
            seconds += size * parts * sharing / level.bandwidth + (times - 1) * level.latency
            within *= times
        return seconds + self._meeting(peers)

    def hop(self, size: float, sender: int, receiver: int, senders: int) -> tuple[float, float]:
        """Returns the seconds in which a message travels between two ranks, if `senders` neighbours send one at the
        same time, and those in which its receiver is busy with it.
        """
        for level in self.levels:
            if not level.workers or sender // level.workers == receiver // level.workers:
                return size * min(level.shared_by, senders) / level.bandwidth, level.latency + level.receive
        return 0.0, 0.0

    def _meeting(self, peers: Peers) -> float:
        """Returns the seconds in which `peers` wait until all of them have computed."""
        return max((level.meet for level, _, _ in self._used(peers)), default=0.0)

    def _ring(self, size: float, peers: Peers) -> float:
        """Returns the seconds in which `size` bytes go once around a ring."""
        within, slowest = 1, math.inf
        for level, times, sharing in self._used(peers):
            slowest = min(slowest, level.bandwidth * within / sharing)
            within *= times
        return size * (peers.count - 1) / peers.count / slowest

    def _used(self, peers: Peers) -> Iterator[tuple[LinkDescription, int, int]]:
        """Yields each level that connects `peers`, how many parts it connects, and how many workers share it."""
        within = 1
        for level in self.levels:
            inside = peers.within(level.workers)
            if inside > within:
                yield level, -(-inside // within), max(1, level.shared_by)
                within = inside
