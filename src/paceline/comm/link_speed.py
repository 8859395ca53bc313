"""Measures and tracks the bandwidth between hosts."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from paceline.comm.hierarchical import Gloo
    from paceline.comm.progress_engine import Steps

SECONDS, LONG = 0.8, 0.2  # for all pairs, and of an exchange from which a rate can be told
FIRST, MOST = 1 << 16, 1 << 22  # bytes of an exchange; the first one fills what a router would let pass at once
ROUNDS = 9  # in which each host meets another one; of more than ten not all pairs do
PIECES = 8  # of an exchange at most, of FIRST bytes or more
ENOUGH = 1 << 18  # bytes of a collective that tells the rate
Pair = tuple[int, int]


class HostLink(NamedTuple):
    """Between two hosts with these workers: bytes a second each way while both send, and seconds one way."""

    one: Sequence[int]
    other: Sequence[int]
    rate: float
    latency: float


class BandwidthEstimate:
    """What one worker's sums over leaders tell of the links that they need, in the slowest of which all wait."""

    def __init__(self) -> None:
        self.rate = 0.0  # bytes a second, over some steps; 0 until something is known
        self._best = 0.0

    def note(self, sent: float, seconds: float) -> None:
        """So many bytes took so long, or less: nobody looks all the time, and others may have come late."""
        if sent >= ENOUGH and seconds > 0:
            self._best = max(self._best, sent / seconds)

    def forget(self) -> None:
        """What is sent from now on is something else."""
        self.rate = self._best = 0.0

    def step(self) -> None:
        """A step has ended."""
        if self._best:
            self.rate += (self._best - self.rate) * (0.3 if self.rate else 1.0)
        self._best = 0.0


def between(links: Sequence[HostLink], hosts: Sequence[Sequence[int]]) -> dict[Pair, HostLink]:
    """Those between hosts that are there, by their numbers. Some of the workers may have gone, and others have come."""
    found: dict[Pair, HostLink] = {}
    of = {worker: number for number, host in enumerate(hosts) for worker in host}
    for link in links:
        ends = [next((of[worker] for worker in end if worker in of), None) for end in link[:2]]
        if None not in ends and ends[0] != ends[1]:
            low, high = sorted(number for number in ends if number is not None)
            found[low, high] = HostLink(hosts[low], hosts[high], link[2], link[3])
    return found


def rounds(hosts: int, known: Mapping[Pair, HostLink]) -> list[list[Pair]]:
    """Who meets whom: each host one other at most in a round, until all have met that do not know each other."""
    ring = list(range(hosts + hosts % 2))
    found = []
    for _ in range(min(ROUNDS, len(ring) - 1)):
        half = len(ring) // 2
        pairs = [(min(a, b), max(a, b)) for a, b in zip(ring[:half], reversed(ring[half:]), strict=True)]
        found.append([pair for pair in pairs if pair[1] < hosts and pair not in known])
        ring = [ring[0], ring[-1], *ring[1:-1]]
    return [pairs for pairs in found if pairs]


def measure(leaders: Gloo, meetings: Sequence[Sequence[Pair]], found: dict[Pair, tuple[float, float]]) -> Steps:
    """The rate and the latency of this host's own pairs, seen from here. Collective among leaders."""
    for pairs in meetings:
        mine = next((pair for pair in pairs if leaders.rank in pair), None)
        mate = None if mine is None else sum(mine) - leaders.rank
        latency, size, spent = math.inf, FIRST, 0.0
        for _ in range(4):  # the first one may wait for the other host
            latency = min(latency, (yield from _swap(leaders, mate, 1)))
        while True:
            seconds = yield from _swap(leaders, mate, size)
            if mine is not None:
                found[mine] = size / max(seconds - latency, 0.9 * seconds), latency
            longest = torch.tensor([seconds], dtype=torch.float64)
            yield from leaders.all_reduce(longest, dist.ReduceOp.MAX)
            spent += float(longest)
            if float(longest) > LONG or spent + 2 * float(longest) > SECONDS / len(meetings) or size == MOST:
                break
            size *= 2


def _swap(leaders: Gloo, mate: int | None, size: int) -> Any:
    """So many bytes to another host while as many come from it. The seconds."""
    times = min(max(1, size // FIRST), PIECES)  # in pieces, as sums go
    sizes = [size // times if rank == mate else 0 for rank in range(leaders.size)]
    began = time.perf_counter()
    yield from leaders.exchange(torch.zeros(sum(sizes), dtype=torch.uint8), sizes, sizes, times)
    return time.perf_counter() - began


def combined(said: Sequence[Sequence[Any]], hosts: Sequence[Sequence[int]]) -> dict[Pair, HostLink]:
    """What leaders have measured, as (pair, rate, latency): of both directions the slower."""
    found: dict[Pair, HostLink] = {}
    for (low, high), rate, latency in (one for some in said for one in some):
        was = found.get((low, high), HostLink((), (), math.inf, 0.0))
        found[low, high] = HostLink(hosts[low], hosts[high], min(rate, was.rate), max(latency, was.latency))
    return found
