"""Send and receive between two workers.

Tags are matched as they come: a message that has not been requested yet is put aside.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from paceline.comm.hierarchical import FOREVER, MESH, HierarchicalTransport, in_thread
from paceline.comm.progress_engine import Steps
from paceline.comm.shared_memory import LANE, Condition, RingSlot
from paceline.errors import UnsupportedError


@dataclass
class _Wanted:
    """A message that a receiver waits for."""

    data: torch.Tensor
    source: int = -1
    done: bool = False
    error: str = ""

    def give(self, data: torch.Tensor) -> None:
        """Fills the receiver's tensor, or records that the message has another size."""
        if len(data) == len(self.data):
            self.data.copy_(data)
        else:
            self.error = _misfit(len(data), len(self.data))
        self.done = True


@dataclass
class _Inbox:
    """The messages from one worker: who waits for which tag, and what came before anybody asked for it."""

    lane: RingSlot
    source: int
    wanted: dict[int, deque[_Wanted]] = field(default_factory=dict)
    aside: dict[int, deque[torch.Tensor]] = field(default_factory=dict)
    taking: Iterator[Condition] | None = None
    until: Condition | None = None

    def pump(self) -> None:
        """Takes in the pieces that have come so far."""
        while self.taking is not None or self.lane.waiting() is not None:
            if self.taking is None:
                self.taking, self.until = self._receive_next(), None
            try:
                while self.until is None or self.until():
                    self.until = next(self.taking)
                return
            except StopIteration:
                self.taking = None

    def _receive_next(self) -> Iterator[Condition]:
        head = self.lane.waiting()
        assert head is not None
        size, tag = head
        wanted = self._next(tag)
        if wanted is not None and len(wanted.data) == size:
            yield from self.lane.take(wanted.data)
            wanted.done = True
            return
        data = torch.empty(size, dtype=torch.uint8)
        yield from self.lane.take(data)
        wanted = wanted or self._next(tag)  # one may have asked meanwhile
        if wanted is None:
            self.aside.setdefault(tag, deque()).append(data)
        else:
            wanted.give(data)

    def _next(self, tag: int) -> _Wanted | None:
        """The first receiver of this tag that no other inbox has served; it is claimed for this one."""
        queue = self.wanted.get(tag, deque())
        while queue:
            wanted = queue.popleft()
            if wanted.source < 0:
                wanted.source = self.source
                return wanted
        return None


class Mailbox:
    """The messages of one group."""

    def __init__(self, hosts: HierarchicalTransport) -> None:
        self._hosts = hosts
        loopback = RingSlot(
            [0] * 4, 0, list(torch.empty(2, LANE, dtype=torch.uint8)), bool
        )  # a batch may send to itself
        self._outboxes = {hosts.rank: loopback}
        self._inboxes = {hosts.rank: _Inbox(loopback, hosts.rank)}
        if not hosts.several and hosts.shared is not None:
            shared = hosts.shared
            others = [(host_rank, shared.ranks[host_rank]) for host_rank in shared.others]
            self._outboxes |= {rank: shared.lane(shared.me, host_rank) for host_rank, rank in others}
            self._inboxes |= {rank: _Inbox(shared.lane(host_rank, shared.me), rank) for host_rank, rank in others}

    def send(self, data: torch.Tensor, rank: int, tag: int) -> Steps:
        """Sends flat bytes to worker `rank`."""
        if self._hosts.several and rank != self._hosts.rank:
            net, peer = yield from self._reach(rank)
            # Gloo ends the receiver's process over another size.
            head = torch.tensor([len(data)], dtype=torch.int64).view(torch.uint8)
            for part in (head, data):
                yield from in_thread(lambda part=part: _wait(net.send([part], peer, tag)))  # type: ignore[misc]
            return
        for until in self._outboxes[rank].send(data, tag):
            yield lambda until=until: self._pumped() and until()  # type: ignore[misc]

    def _reach(self, rank: int) -> Generator[Condition, None, tuple[Any, int]]:
        """The connection with another worker, and that worker's rank in it."""
        if self._hosts.gloo is not None:
            return self._hosts.gloo.group, rank
        return (yield from in_thread(partial(self._hosts.reach, rank)))  # type: ignore[no-any-return]

    def _pumped(self) -> bool:
        """Takes in what comes from anybody: workers that all send first would wait for ever otherwise. Returns True."""
        for inbox in self._inboxes.values():
            inbox.pump()
        return True

    def receive(self, data: torch.Tensor, sources: list[int], tag: int) -> Generator[Condition, None, int]:
        """Fills `data` with the next message of this tag; returns the rank that it came from."""
        if self._hosts.several and sources != [self._hosts.rank]:
            if len(sources) > 1 and self._hosts.gloo is None:
                what = f"receiving from any worker is not supported with more than {MESH} workers on several hosts"
                raise UnsupportedError(what, "pass the rank of the sender (src=)")
            head = torch.empty(8, dtype=torch.uint8)
            net, peer = yield from self._reach(sources[0])
            start = partial(net.recv, [head], peer) if len(sources) == 1 else partial(net.recv_anysource, [head])
            work = yield from in_thread(lambda: _wait(start(tag)))
            if len(sources) > 1:
                peer = int(work._source_rank())
            source, size = sources[0] if len(sources) == 1 else peer, int(head.view(torch.int64))
            received = data if size == len(data) else torch.empty(size, dtype=torch.uint8)
            yield from in_thread(lambda: _wait(net.recv([received], peer, tag)))
            if received is not data:
                raise RuntimeError(_misfit(size, len(data)))
            return source
        wanted = _Wanted(data)
        for source in sources:
            if queue := self._inboxes[source].aside.get(tag):
                wanted.source = source
                wanted.give(queue.popleft())
                break
        else:
            for source in sources:
                self._inboxes[source].wanted.setdefault(tag, deque()).append(wanted)

        def served() -> bool:
            for source in sources:
                self._inboxes[source].pump()
            return wanted.done or (self._pumped() and wanted.done)

        yield served
        if wanted.error:
            raise RuntimeError(wanted.error)
        return wanted.source


def _misfit(came: int, asked: int) -> str:
    return f"a message has {came} bytes, but the receiver expects {asked}"


def _wait(work: Any) -> Any:
    """Waits for one of gloo's messages and returns it.

    gloo completes messages only for somebody who waits for them. Without FOREVER it would wait as long as connections
    may take. Starting one fails, too, once its peer is lost.
    """
    work.wait(FOREVER)
    return work
