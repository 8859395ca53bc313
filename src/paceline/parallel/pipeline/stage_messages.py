"""Messages between the stages of a pipeline: values on the way forward, their gradients on the way back.

A message is several tensors for one `Action` of the receiving stage. Between two workers messages arrive in the order
of sending, which need not be the order in which the schedule takes them: one that arrives early is put aside. A stage
that hands on to a stage of the same worker leaves the message there.

Over a slow link a message is awaited while this worker still computes: gloo sends nothing before the receiver has asked
for it, and its request would wait behind a message that leaves at the same time.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from paceline.comm.communicator import Group
from paceline.parallel.pipeline.schedule import Action, worker_of

MOST = 64  # messages in flight before a sender waits
# Reads a message: yields an empty tensor for each part in turn, which is filled meanwhile, and returns the content.
Read = Generator[torch.Tensor, None, Any]


@dataclass
class _Message:
    """A message that is being read. `work` is its transfer, if it comes while this worker computes."""

    read: Read
    work: dist.Work | None = None
    content: Any = None

    def parts(self) -> Iterator[torch.Tensor]:
        """Yields a tensor for each part, to be filled before the next one; then `content` is known."""
        self.content = yield from self.read


class StageMessages:
    """Sends and receives the messages of one worker's stages.

    `read` reads the message for an action; it returns None if that cannot be read yet. With `ahead`, the next message
    from another host is awaited while this worker computes.
    """

    def __init__(self, line: Group, kind: str, read: Callable[[Action], Read | None], ahead: bool) -> None:
        self._line, self._kind, self._read, self._ahead = line, kind, read, ahead
        self._sent: list[Any] = []
        self._arrived: dict[Action, Any] = {}  # what was read early
        self._expected: dict[int, deque[Action]] = {}  # by sender, in the order of sending
        self._awaited: dict[int, _Message] = {}  # by sender: its next message
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
            message = self._message(action)
            for part, tensor in zip(message.parts(), tensors, strict=True):
                part.data = tensor.clone()
            self._arrived[action] = message.content
            return
        for sender in self._expected:
            self._await_next(sender)
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
        with self._waiting():
            self._line.receive(tensor, worker)
        return tensor

    def receive(self, action: Action, sender: int) -> Any:
        """Returns what was read of the message for an action, which stage `sender` sends."""
        worker = self.worker(sender)
        expected = self._expected.get(worker)
        while action not in self._arrived and expected and expected[0] != action:
            early = expected[0]
            self._arrived[early] = self._receive_next(worker, early)
        if action in self._arrived:
            return self._arrived.pop(action)
        return self._receive_next(worker, action)

    def _receive_next(self, worker: int, action: Action) -> Any:
        """Returns what was read of the next message from a worker, which is for this action."""
        if expected := self._expected.get(worker):
            expected.popleft()
        message = self._awaited.pop(worker, None)
        if message is not None:
            with self._waiting():
                self._line.finish(message.work)
        else:
            message = self._message(action)
            for part in message.parts():
                self.fetch_from(worker, part)
        self._await_next(worker)
        return message.content

    def _message(self, action: Action) -> _Message:
        read = self._read(action)
        assert read is not None
        return _Message(read)

    def _await_next(self, worker: int) -> None:
        """Begins to await the next message from a worker, if it is known which one that is and how to read it."""
        expected = self._expected.get(worker)
        if not (self._ahead and expected) or worker in self._awaited or len(set(self._line.hosts)) == 1:
            return
        if (read := self._read(expected[0])) is not None:
            message = self._awaited[worker] = _Message(read)
            message.work = self._line.start_receive(message.parts(), worker)

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        """Counts the seconds of a block in `waited`."""
        began = time.perf_counter()
        yield
        self.waited += time.perf_counter() - began

    def finish(self) -> None:
        """Waits until the other stages have received all messages of this worker."""
        with self._waiting():
            for work in self._sent:
                self._line.finish(work)
        self._sent.clear()

    def abandon(self) -> None:
        """Forgets all messages in flight."""
        self._sent.clear()
        self._arrived.clear()
        self._line.abandon([message.work for message in self._awaited.values()])
        self._awaited.clear()
        self._expected = {}
