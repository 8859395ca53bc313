"""Messages and tensors between workers and parameter servers.

Head, numbers and text carry seals; tensors do not, which would make a step slower.

What arrives lands in memory that is there before; nothing is unpickled. On one host tensors do not travel: who sends
them lends them, in a slot of shared memory that the next ones of the same numbers will lie in. Nobody blocks in a
socket: `exchange` is the one place that waits, and looks now and then whether to go on is of any use.
"""

from __future__ import annotations

import hashlib
import socket
import struct
import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from contextlib import suppress
from enum import IntEnum
from functools import cache
from itertools import islice
from typing import Any, NamedTuple, Never

import torch

from paceline.base.handshake import (
    NONCE,
    SEAL,
    MessageSeals,
    is_proof,
    make_nonce,
    prove_caller,
    prove_listener,
    read_caller,
    send_at_once,
)
from paceline.base.heartbeat import HEARTBEAT
from paceline.base.polling import wait_for
from paceline.comm.shared_memory import (
    ExportedSegment,
    File,
    ImportedSegment,
    Where,
    host_key,
    laid_out,
    raw_bytes,
    room_of,
)

LOOK = 0.05  # seconds between two looks at whether to go on waiting
SOCKET = 4 << 20  # bytes that a socket takes, if the system lets it
AT_ONCE = 64  # parts of frames that go in one call
GREETING = 256  # bytes of what one who is not known yet may say
LENT = 1 << 15  # flag in a trainer's number: the message says where the tensors are in shared memory
_HEAD = struct.Struct("<BHIqqqQ")
_WHERE = struct.Struct("<4q")
Key = tuple[int, int, int]  # of a contribution: the step, the generation of the team, the attempt in it


class Kind(IntEnum):
    """What a frame is for."""

    HELLO, WELCOME, STATE, PUSH, SQUARES, COMMIT, READ, KEPT = range(8)
    DEAL, PUSHED, HAVE, APPLY, APPLIED, BUFFERS, USED, STAND = range(8, 16)  # where training is not in step
    ROWS = 16  # of gradients, or weights, of which only some travel
    SUM = 17  # of some workers' gradients, and its squares


class SharedTensor(NamedTuple):
    """Tensors of another process; the `stamp` of their slot is the contribution that they are of."""

    stamp: memoryview
    tensors: list[torch.Tensor]


class Message(NamedTuple):
    """Its `kind`; the trainer and the contribution that it is of; which tensors it has, and these if they were `lent`;
    and else its text.
    """

    kind: int
    trainer: int
    key: Key
    numbers: tuple[int, ...]
    text: bytearray
    lent: SharedTensor | None = None


class _Unsealed(NamedTuple):
    """What has to wait for its seal until the other end is known."""

    part: bytes | memoryview


# Returns the tensors that receive the content of a message, in their order; None: the message has to wait.
FindTensors = Callable[[Message], "Sequence[torch.Tensor] | None"]


class Connection:
    """One connection. Both ends have to prove to each other that they have the `key` before anything else goes
    over it (`paceline.base.handshake`): the one that was accepted waits for that, and the one that calls `says`
    something of itself. What has arrived whole is in `inbox`; it is `broken` once the other end is gone, and `known`
    once it has shown who it is. Where the other end is `near` tensors are lent to it.
    """

    def __init__(
        self,
        connection: socket.socket,
        find_tensors: FindTensors,
        key: bytes,
        says: Callable[[Connection], str] | None = None,
    ) -> None:
        if connection.family != socket.AF_UNIX:
            send_at_once(connection)
        connection.setblocking(False)
        self.socket, self.broken, self.paused = connection, False, False
        self.inbox: deque[Message] = deque()
        self.greeting: Any = None  # what the other end said of itself
        self.near, self.known = False, False
        self._lent: ExportedSegment | None = None  # made only after the other end has proved the key
        self._borrowed: ImportedSegment | None = None
        self._find_tensors, self._key, self._says = find_tensors, key, says
        self._out: deque[memoryview | _Unsealed] = deque()
        self._first: deque[memoryview] = deque()  # of the greeting, which goes before
        self._nonce = make_nonce()
        self._outgoing_seals: MessageSeals | None = None  # seals what this end sends
        self._incoming_seals: MessageSeals | None = None
        if says is None:
            self._first.append(_hello(self._nonce))
        self._parts = self._read()
        self._view: memoryview | None = memoryview(b"")

    @property
    def sending(self) -> bool:
        """Whether there is something to send, and a peer to send it to."""
        return bool(self._sendable) and not self.broken

    @property
    def _sendable(self) -> deque[Any]:
        return self._out if self.known and not self._first else self._first

    def put(
        self,
        kind: int,
        trainer: int = 0,
        key: Key = (0, 0, 0),
        numbers: Sequence[int] = (),
        content: Sequence[torch.Tensor] | bytes = b"",
    ) -> None:
        """What is to be sent. Tensors, which are contiguous, must not change before they are gone; near by they may.
        One without a number is alone and goes as a text.
        """
        if (
            self.near
            and not isinstance(content, bytes)
            and numbers
            and self._lend(kind, trainer, key, numbers, content)
        ):
            return
        if isinstance(content, bytes) or not numbers:
            text = content if isinstance(content, bytes) else _memory(content[0]) if content else b""
            self._say(_HEAD.pack(kind, trainer, 0, *key, len(text)))
            self._say(text)
            return
        views = [_memory(tensor) for tensor in content]
        views = [memoryview(bytes(view)) for view in views] if self.near else views
        head = _HEAD.pack(kind, trainer, len(numbers), *key, sum(map(len, views)))
        self._say(head + struct.pack(f"<{len(numbers)}i", *numbers))
        self._out.extend(view for view in views if len(view))

    def _say(self, part: bytes | memoryview) -> None:
        if self._outgoing_seals is None:
            self._out.append(_Unsealed(part))
        else:
            self._out.extend(memoryview(view) for view in (part, self._outgoing_seals.next(part)) if len(view))

    def _know(self, nonce: bytes, other_nonce: bytes) -> None:
        """Marks the other end as known: messages that wait to be sent get their seals."""
        calls = self._says is not None
        self._outgoing_seals, self._incoming_seals = (
            MessageSeals(self._key, nonce, other_nonce, one) for one in (calls, not calls)
        )
        waiting, self._out = self._out, deque()
        for part in waiting:
            self._say(part.part) if isinstance(part, _Unsealed) else self._out.append(part)
        self.known = True

    @property
    def memory(self) -> str:
        """The address of this end's shared memory, for the other end; empty if there is none."""
        return "" if self._lent is None else " ".join(map(str, [_memory_domain(), *self._lent.file]))

    def borrow(self, memory: str) -> bool:
        """Opens the other end's shared memory, whose address is `memory`, and returns whether that was possible."""
        host, *file = memory.split() or [""]
        if self._lent is not None and self._borrowed is None and host == _memory_domain():
            with suppress(OSError, ValueError, TypeError):  # it may not be looked into, or is no file's place
                self._borrowed = ImportedSegment(File(*map(int, file)))
        self.near = self._borrowed is not None
        return self.near

    def _lend(self, kind: int, trainer: int, key: Key, numbers: Sequence[int], content: Sequence[torch.Tensor]) -> bool:
        size = sum(map(room_of, content))
        assert self._lent is not None
        slot = self._lent.slot((kind, trainer, tuple(numbers)), size)
        if slot is None:
            return False
        for at, number in enumerate(key):
            slot.stamp[at] = number
        for target, tensor in zip(laid_out(slot, content), content, strict=True):
            target.copy_(tensor.detach().view(-1))
        head = _HEAD.pack(kind, trainer | LENT, len(numbers), *key, _WHERE.size)
        self._say(head + struct.pack(f"<{len(numbers)}i", *numbers))
        self._say(_WHERE.pack(*slot.where))
        return True

    def advance(self) -> None:
        """Sends and takes what it can without waiting."""
        try:
            while out := self._sendable:
                sent = self.socket.sendmsg(islice(out, AT_ONCE))
                while out and sent >= len(out[0]):
                    sent -= len(out.popleft())
                if sent:
                    out[0] = out[0][sent:]
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
        yield from self._greet()
        while True:
            head = bytearray(_HEAD.size)
            yield memoryview(head)
            kind, trainer, count, *key, size = _HEAD.unpack(head)
            numbers = bytearray(4 * count)
            yield memoryview(numbers)
            yield from self._check(head + numbers)
            named = struct.unpack(f"<{count}i", numbers)
            frame = Message(kind, trainer & ~LENT, tuple(key), named, bytearray())
            while (tensors := self._find_tensors(frame)) is None:
                yield None
            if trainer & LENT:
                where = bytearray(_WHERE.size)
                yield memoryview(where)
                yield from self._check(where)
                while self._borrowed is None and self.inbox:  # what has come before tells of the memory
                    yield None
                if (lent := self._find(where, tensors)) is None:
                    self.close()
                    yield None
                frame = frame._replace(lent=lent)
            elif count:
                views = [_memory(tensor) for tensor in tensors]
                if sum(map(len, views)) != size:
                    self.close()
                    yield None
                yield from views
            else:
                frame.text.extend(bytes(size))
                yield memoryview(frame.text)
                yield from self._check(frame.text)
            self.inbox.append(frame)

    def _check(self, part: bytearray) -> Generator[memoryview | None, None, None]:
        """Takes the seal of a part. A wrong one closes the connection: somebody has changed what is on it."""
        seal = bytearray(SEAL)
        yield memoryview(seal)
        assert self._incoming_seals is not None
        if not is_proof(seal, self._incoming_seals.next(part)):
            yield from self._give_up()

    def _greet(self) -> Generator[memoryview | None, None, None]:
        """The parts of what the other end shows of itself. An end that does not know it closes the connection."""
        hello = yield from self._read_hello()
        if self._says is None:
            proof, text = read_caller(self._key, self._nonce, hello) or (b"", b"")
            if not proof:
                yield from self._give_up()
            self._first.append(_hello(proof))
            self._make_room()
            self.greeting = text
            self._know(self._nonce, hello[:NONCE])
            self.inbox.append(Message(Kind.HELLO, 0, (0, 0, 0), (), bytearray()))
            return
        if len(hello) != NONCE:
            yield from self._give_up()
        self._make_room()
        self._first.append(_hello(prove_caller(self._key, hello, self._nonce, self._says(self).encode())))
        if not is_proof((yield from self._read_hello()), prove_listener(self._key, hello, self._nonce)):
            yield from self._give_up()
        self._know(hello, self._nonce)

    def _make_room(self) -> None:
        """What is made for one end that is known, or that we called."""
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            self.socket.setsockopt(socket.SOL_SOCKET, option, SOCKET)
        self._lent = _lent()

    def _read_hello(self) -> Generator[memoryview | None, None, bytes]:
        """The parts of a frame of a greeting, and what is in it."""
        head = bytearray(_HEAD.size)
        yield memoryview(head)
        kind, _, count, *_, size = _HEAD.unpack(head)
        if kind != Kind.HELLO or count or size > GREETING:
            yield from self._give_up()
        text = bytearray(size)
        yield memoryview(text)
        return bytes(text)

    def _give_up(self) -> Generator[None, None, Never]:
        self.close()
        while True:
            yield None

    def _find(self, where: bytearray, like: Sequence[torch.Tensor]) -> SharedTensor | None:
        """Tensors like these, where the other end says; None: it has not lent so much."""
        if self._borrowed is None:
            return None
        slot = self._borrowed.slot(Where(*_WHERE.unpack(where)))
        return SharedTensor(slot.stamp, laid_out(slot, like)) if sum(map(room_of, like)) <= len(slot.data) else None

    def close(self) -> None:
        """Closes the socket and releases the shared memory; messages that wait to be sent are dropped."""
        self.broken = True
        self._out.clear()
        self._first.clear()
        self.socket.close()
        for memory in (self._lent, self._borrowed):
            if memory is not None:
                memory.close()


def _hello(text: bytes) -> memoryview:
    return memoryview(_HEAD.pack(Kind.HELLO, 0, 0, 0, 0, 0, len(text)) + text)


def _memory(tensor: torch.Tensor) -> memoryview:
    array: Any = raw_bytes(tensor.detach().view(-1)).numpy()
    return memoryview(array)


@cache
def _memory_domain() -> str:
    """Identifies the processes that can share memory with this one; empty if none can."""
    return hashlib.sha256(host_key().encode()).hexdigest()[:16] if host_key() else ""


def _lent() -> ExportedSegment | None:
    try:
        return ExportedSegment() if _memory_domain() else None
    except OSError:  # no file can be had: all goes through the socket
        return None


def peer_name(number: int) -> str:
    """Names the other end of a connection in an error. A server's number is negative: -2 is server 1."""
    return f"worker {number}" if number >= 0 else f"server {-1 - number}"


def exchange(
    links: Callable[[], Sequence[Connection]],
    until: Callable[[], bool],
    look: Callable[[], None],
    listener: socket.socket | None = None,
) -> None:
    """Moves frames on until something is so; `look` raises where that will not come."""
    with HEARTBEAT.waiting():
        while not until():
            look()
            live = [link for link in links() if not link.broken]
            if listener is None and not live:
                time.sleep(LOOK)
                continue
            asking = [*(link.socket for link in live if not link.paused), *filter(None, [listener])]
            ready, writable = wait_for(asking, [link.socket for link in live if link.sending], LOOK)
            for link in live:
                if link.socket in ready or link.socket in writable or link.paused:
                    link.advance()
            if listener in ready:
                return
