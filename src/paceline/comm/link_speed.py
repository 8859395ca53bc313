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

SECONDS, LONG = 0.8, 0.2  # for all pairs; an exchange that takes LONG tells the rate
FIRST, MOST = 1 << 16, 1 << 22  # bytes of an exchange; the first one fills the routers' buffers
ROUNDS = 9  # at most; with more than ten hosts not all pairs meet
PIECES = 8  # of an exchange at most, of FIRST bytes or more
ENOUGH = 1 << 18  # bytes of a collective that tells the rate
HostPair = tuple[int, int]


class HostLink(NamedTuple):
    """A link between two hosts with these workers: bytes a second each way while both send, and seconds one way."""

    one: Sequence[int]
    other: Sequence[int]
    rate: float
    latency: float


class BandwidthEstimate:
    """The bandwidth that one worker's sums over leaders reach, which the slowest link limits."""

    def __init__(self) -> None:
        self.rate = 0.0  # bytes a second, over some steps; 0 until something is known
        self._best = 0.0

    def note(self, sent: float, seconds: float) -> None:
        """Records that sending these bytes took at most these seconds.

        It may have been less: the transfer is not watched all the time, and other workers may have been late.
        """
        if sent >= ENOUGH and seconds > 0:
            self._best = max(self._best, sent / seconds)

    def forget(self) -> None:
        """Starts again: from now on other data is sent."""
        self.rate = self._best = 0.0

    def step(self) -> None:
        """Updates the rate at the end of a step."""
        if self._best:
            self.rate += (self._best - self.rate) * (0.3 if self.rate else 1.0)
        self._best = 0.0


def between(links: Sequence[HostLink], hosts: Sequence[Sequence[int]]) -> dict[HostPair, HostLink]:
    """The links between the present `hosts`, by host numbers. Workers of a host may have changed since."""
    links_by_pair: dict[HostPair, HostLink] = {}
    host_of = {worker: number for number, host in enumerate(hosts) for worker in host}
    for link in links:
        ends = [next((host_of[worker] for worker in end if worker in host_of), None) for end in link[:2]]
        if None not in ends and ends[0] != ends[1]:
            low, high = sorted(number for number in ends if number is not None)
            links_by_pair[low, high] = HostLink(hosts[low], hosts[high], link[2], link[3])
    return links_by_pair


def rounds(hosts: int, known: Mapping[HostPair, HostLink]) -> list[list[HostPair]]:
    """Pairs up hosts in rounds, each host once at most in a round, until all pairs without a known link have met."""
    ring = list(range(hosts + hosts % 2))
    pairings = []
    for _ in range(min(ROUNDS, len(ring) - 1)):
        half = len(ring) // 2
        pairs = [(min(a, b), max(a, b)) for a, b in zip(ring[:half], reversed(ring[half:]), strict=True)]
        pairings.append([pair for pair in pairs if pair[1] < hosts and pair not in known])
        ring = [ring[0], ring[-1], *ring[1:-1]]
    return [pairs for pairs in pairings if pairs]


def measure(
    leaders: Gloo, pairings: Sequence[Sequence[HostPair]], results: dict[HostPair, tuple[float, float]]
) -> Steps:
    """Measures the rate and the latency of this host's pairs and writes them to `results`. Collective among leaders."""
    for pairs in pairings:
        own_pair = next((pair for pair in pairs if leaders.rank in pair), None)
        mate = None if own_pair is None else sum(own_pair) - leaders.rank
        latency, size, spent = math.inf, FIRST, 0.0
        for _ in range(4):  # the first one may wait for the other host
            latency = min(latency, (yield from _swap(leaders, mate, 1)))
        while True:
            seconds = yield from _swap(leaders, mate, size)
            if own_pair is not None:
                results[own_pair] = size / max(seconds - latency, 0.9 * seconds), latency
            longest = torch.tensor([seconds], dtype=torch.float64)
            yield from leaders.all_reduce(longest, dist.ReduceOp.MAX)
            spent += float(longest)
            if float(longest) > LONG or spent + 2 * float(longest) > SECONDS / len(pairings) or size == MOST:
                break
            size *= 2


def _swap(leaders: Gloo, mate: int | None, size: int) -> Any:
    """Sends bytes to another host while the same number comes from it; returns the seconds."""
    times = min(max(1, size // FIRST), PIECES)  # in pieces, as sums go
    sizes = [size // times if rank == mate else 0 for rank in range(leaders.size)]
    began = time.perf_counter()
    yield from leaders.exchange(torch.zeros(sum(sizes), dtype=torch.uint8), sizes, sizes, times)
    return time.perf_counter() - began


def combined(reports: Sequence[Sequence[Any]], hosts: Sequence[Sequence[int]]) -> dict[HostPair, HostLink]:
    """Merges the leaders' reports of (pair, rate, latency): each link has the slower of its two directions."""
    links_by_pair: dict[HostPair, HostLink] = {}
    for (low, high), rate, latency in (entry for report in reports for entry in report):
        previous = links_by_pair.get((low, high), HostLink((), (), math.inf, 0.0))
        links_by_pair[low, high] = HostLink(
            hosts[low], hosts[high], min(rate, previous.rate), max(latency, previous.latency)
        )
    return links_by_pair
