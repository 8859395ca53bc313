"""Messages between the stages of a pipeline: values on the way forward, their gradients on the way back.

A message is several tensors for one `Action` of the receiving stage. Between two workers messages arrive in the order
of sending, which need not be the order in which the schedule takes them: one that arrives early is put aside. A stage
that hands on to a stage of the same worker leaves the message there.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch

from paceline.comm.communicator import Group
from paceline.parallel.pipeline.schedule import Action, worker_of

MOST = 64  # messages in flight before a sender waits
_Read = TypeVar("_Read")
# Fills a tensor with the next part of a message, and returns it.
Fetch = Callable[[torch.Tensor], torch.Tensor]


class StageMessages:
    """Sends and receives the messages of one worker's stages. `read_early` reads a message that is not wanted yet."""

    def __init__(self, line: Group, kind: str, read_early: Callable[[Action, Fetch], Any]) -> None:
        self._line, self._kind, self._read_early = line, kind, read_early
        self._sent: list[Any] = []
        self._arrived: dict[Action, Iterator[torch.Tensor]] = {}
        self._expected: dict[int, deque[Action]] = {}  # by sender, in the order of sending
        self.waited = 0.0  # seconds spent waiting for other stages
        self.sent = 0  # bytes

    def worker(self, stage: int) -> int:
        """Returns the worker of the line that has a stage."""
        return worker_of(self._kind, self._line.size, stage)

    def expect(self, expected: Sequence[Sequence[Action]]) -> None:
        """Begins a schedule, in which each worker sends messages for its actions in `expected`, in this order."""
        self._expected = dict(enumerate(map(deque, expected)))

    def send(self, action: Action, tensors: Sequence[torch.Tensor]) -> None:
        """Sends the message for an action of another stage."""
        worker = self.worker(action.stage)
        if worker == self._line.rank:
            self._arrived[action] = iter([tensor.clone() for tensor in tensors])
        else:
            self.send_to(worker, tensors)

    def send_to(self, worker: int, tensors: Sequence[torch.Tensor]) -> None:
        """Sends tensors to a worker, which calls `fetch_from`."""
        self._sent = [work for work in self._sent if work is not None and not work.is_completed()]
        while len(self._sent) > MOST:
            self._line.finish(self._sent.pop(0))
        self.sent += sum(tensor.nbytes for tensor in tensors)
        self._sent += [self._line.start_send(tensor.contiguous(), worker) for tensor in tensors]

    def fetch_from(self, worker: int, tensor: torch.Tensor) -> torch.Tensor:
        """Fills a tensor with what a worker has sent."""
        began = time.perf_counter()
        self._line.receive(tensor, worker)
        self.waited += time.perf_counter() - began
        return tensor

    def receive(self, action: Action, sender: int, read: Callable[[Fetch], _Read]) -> _Read:
        """Returns what `read` makes of the message for an action, which stage `sender` sends."""
        worker = self.worker(sender)
        expected = self._expected.get(worker)
        while action not in self._arrived and expected and expected[0] != action:
            self._put_aside(expected.popleft(), worker)
        arrived = self._arrived.pop(action, None)
        if arrived is not None:
            return read(lambda _: next(arrived))
        if expected:
            expected.popleft()
        return read(lambda tensor: self.fetch_from(worker, tensor))

    def _put_aside(self, action: Action, worker: int) -> None:
        parts = list[torch.Tensor]()

        def fetch(tensor: torch.Tensor) -> torch.Tensor:
            parts.append(self.fetch_from(worker, tensor))
            return parts[-1]

        self._read_early(action, fetch)
        self._arrived[action] = iter(parts)

    def finish(self) -> None:
        """Waits until the other stages have received all messages of this worker."""
        began = time.perf_counter()
        for work in self._sent:
            self._line.finish(work)
        self._sent.clear()
        self.waited += time.perf_counter() - began

    def abandon(self) -> None:
        """Forgets all messages in flight."""
        self._sent.clear()
        self._arrived.clear()
        self._expected = {}
