"""Frames over sockets between workers and parameter servers: a head, numbers of tensors, and then these or a text.

What arrives lands in memory that is there before; nothing is unpickled. Nobody blocks in a socket: `exchange` is the
one place that waits, and looks now and then whether to go on is of any use.
"""

from __future__ import annotations

import hmac
import select
import socket
import struct
from collections import deque
from collections.abc import Callable, Generator, Sequence
from enum import IntEnum
from typing import Any, NamedTuple

import torch

from paceline.comm.shared import raw_bytes
from paceline.pulse import PULSE

LOOK = 0.05  # seconds between two looks at whether to go on waiting
SOCKET = 4 << 20  # bytes that a socket takes, if the system lets it
GREETING = 256  # bytes of what one who is not known yet may say
_HEAD = struct.Struct("<BHIqqqQ")
Key = tuple[int, int, int]  # of a contribution: the step, the generation of the team, the attempt in it


class Kind(IntEnum):
    """What a frame is for."""

    HELLO, WELCOME, STATE, PUSH, SQUARES, COMMIT, READ, KEPT = range(8)
    DEAL, PUSHED, HAVE, APPLY, APPLIED, BUFFERS, USED, STAND = range(8, 16)  # where training is not in step
    ROWS = 16  # of gradients, or weights, of which only some travel
    SUM = 17  # of some workers' gradients, and its squares


class Frame(NamedTuple):
    """Its `kind`; the trainer and the contribution that it is of; which tensors it has; and else its text."""

    kind: int
    trainer: int
    key: Key
    numbers: tuple[int, ...]
    text: bytearray


# Where the tensors of a frame land, in their order; None: it has to wait.
Place = Callable[[Frame], "Sequence[torch.Tensor] | None"]


class Connection:
    """One connection. What has arrived whole is in `inbox`; it is `broken` once the other end is gone. One that has to
    `greet` says this first, or the link breaks.
    """

    def __init__(self, connection: socket.socket, place: Place, greet: str = "") -> None:
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            connection.setsockopt(socket.SOL_SOCKET, option, SOCKET)
        if connection.family != socket.AF_UNIX:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setblocking(False)
        self.socket, self.broken, self.paused = connection, False, False
        self.inbox: deque[Frame] = deque()
        self.greeting: Any = None  # what the other end said of itself
        self._place, self._secret = place, greet
        self._out: deque[memoryview] = deque()
        self._parts = self._read()
        self._view: memoryview | None = memoryview(b"")

    @property
    def sending(self) -> bool:
        return bool(self._out) and not self.broken

    def put(
        self,
        kind: int,
        trainer: int = 0,
        key: Key = (0, 0, 0),
        numbers: Sequence[int] = (),
        content: Sequence[torch.Tensor] | bytes = b"",
    ) -> None:
        """What is to be sent. Tensors, which are contiguous, must not change before they are gone."""
        views = [memoryview(content)] if isinstance(content, bytes) else [_memory(tensor) for tensor in content]
        head = _HEAD.pack(kind, trainer, len(numbers), *key, sum(map(len, views)))
        self._out.append(memoryview(head + struct.pack(f"<{len(numbers)}i", *numbers)))
        self._out.extend(view for view in views if len(view))

    def advance(self) -> None:
        """Sends and takes what it can without waiting."""
        try:
            while self._out:
                sent = self.socket.send(self._out[0])
                self._out[0] = self._out[0][sent:]
                if not len(self._out[0]):
                    self._out.popleft()
        except BlockingIOError:
            pass
        except OSError:
            self.close()
        try:
            while not self.broken and self._ready():
                assert self._view is not None
                got = self.socket.recv_into(self._view)
                self._view = self._view[got:]
                if not got:
                    self.close()
        except BlockingIOError:
            pass
        except OSError:
            self.close()

    def _ready(self) -> bool:
        """Whether there is room for what comes next."""
        while self._view is None or not len(self._view):
            self._view = next(self._parts)
            self.paused = self._view is None
            if self._view is None or self.broken:
                return False
        return True

    def _read(self) -> Generator[memoryview | None, None, None]:
        """The parts of one frame after another; None where it has to wait."""
        while True:
            head = bytearray(_HEAD.size)
            yield memoryview(head)
            kind, trainer, count, *key, size = _HEAD.unpack(head)
            if self._secret and (kind != Kind.HELLO or count or size > GREETING):
                self.close()
                yield None
            numbers = bytearray(4 * count)
            yield memoryview(numbers)
            frame = Frame(kind, trainer, tuple(key), struct.unpack(f"<{count}i", numbers), bytearray())
            while (tensors := self._place(frame) if self._knows else []) is None:
                yield None
            if count:
                views = [_memory(tensor) for tensor in tensors]
                if sum(map(len, views)) != size:
                    self.close()
                    yield None
                yield from views
            else:
                frame.text.extend(bytes(size))
                yield memoryview(frame.text)
            if self._secret:
                said, _, self.greeting = bytes(frame.text).partition(b" ")
                if not hmac.compare_digest(said, self._secret.encode()):
                    self.close()
                    yield None
                self._secret = ""
            self.inbox.append(frame)

    @property
    def _knows(self) -> bool:
        """Whether the other end has said what it had to say first."""
        return not self._secret

    def close(self) -> None:
        self.broken = True
        self._out.clear()
        self.socket.close()


def _memory(tensor: torch.Tensor) -> memoryview:
    array: Any = raw_bytes(tensor.detach().view(-1)).numpy()
    return memoryview(array)


def exchange(
    links: Callable[[], Sequence[Connection]],
    until: Callable[[], bool],
    look: Callable[[], None],
    listener: socket.socket | None = None,
) -> None:
    """Moves frames on until something is so; `look` raises where that will not come."""
    with PULSE.waiting():
        while not until():
            look()
            live = [link for link in links() if not link.broken]
            if listener is None and not live:
                select.select([], [], [], LOOK)
                continue
            asking = [*(link.socket for link in live if not link.paused), *filter(None, [listener])]
            ready, writable, _ = select.select(asking, [link.socket for link in live if link.sending], [], LOOK)
            for link in live:
                if link.socket in ready or link.socket in writable or link.paused:
                    link.advance()
            if listener in ready:
                return
