"""Sends the state to a newcomer while the team trains.

So only what differs then is left to be handed over when it is admitted, and nobody waits for a transfer. It is as in
the live migration of virtual machines (Clark et al., NSDI 2005), but that a step's sums are a third of what it changes.
Nothing relies on it: what did not come, or came out differently, is found by its digest and handed over then.
"""

from __future__ import annotations

import hashlib
import secrets
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from queue import SimpleQueue
from typing import Any, Protocol

import torch

from paceline.base.environment import way_to
from paceline.base.handshake import (
    NONCE,
    PROOF,
    NewConnections,
    introduce,
    make_nonce,
    read_caller,
)
from paceline.base.memory import machine_memory
from paceline.base.polling import can_read, wait_for
from paceline.checkpoint.tree import flatten, pack, packed, raw, unpack
from paceline.team.agent_commands import At

MEET, LOOK = 10.0, 0.1  # seconds for a connection to come, between two looks at the orders
_GIVER = struct.Struct("<q")  # what one who sends says of itself: which worker it is
SLICE = 1 << 20
SEEN = 0.5  # seconds of sending after which it is known how fast that is
SPARE = 0.85  # part of the connection's speed that a step's sums may take


def digests(tensors: Mapping[str, torch.Tensor], names: Iterable[str]) -> dict[str, str]:
    """SHA-256 of those of `tensors` that have one of the `names`."""
    found = [name for name in names if name in tensors]
    with ThreadPoolExecutor() as pool:
        return dict(zip(found, pool.map(lambda name: _digest(tensors[name]), found), strict=True))


def _digest(tensor: torch.Tensor) -> str:
    found = hashlib.sha256(f"{tensor.dtype} {tuple(tensor.shape)}\n".encode())
    found.update(_memory(raw(tensor)))
    return found.hexdigest()


def _memory(flat: torch.Tensor) -> memoryview:
    array: Any = flat.numpy()
    return memoryview(array)


class StateSender:
    """What one newcomer is sent, by a thread, once both have shown that they have the `key`; what is given to it is
    copied. `speed`: bytes a second, once known.
    """

    def __init__(self, worker: int, at: At, key: Callable[[str], bytes]) -> None:
        self.at, self.begun, self.closed = at, False, False
        self.speed: float | None = None
        self._worker, self._key = worker, key
        self._state: tuple[dict[str, torch.Tensor], Any] | None = None  # which is still to be copied
        self._frames: deque[torch.Tensor] = deque()
        self._news = threading.Condition()
        self._behind, self._most = 0, 0  # bytes that wait, and that may
        self._enough = 0.0  # bytes a second, or it never catches up
        self._ending = False
        self._sent, self._spent = 0, 0.0  # bytes, and seconds of sending
        threading.Thread(target=self._run, name="paceline-ahead", daemon=True).start()

    def begin(self, tree: Any, changing: float) -> None:
        """The state, of which so many bytes a second change. It must not, until it is `copied`."""
        tensors, skeleton = flatten(["state", tree], "")
        self._enough, self._most = changing / SPARE, 2 * sum(tensor.nbytes for tensor in tensors.values()) + SLICE
        with self._news:
            self._state, self.begun = (tensors, skeleton), True
            self._news.notify()

    def copied(self) -> None:
        """Waits until the state has been copied, which takes no time but that of another core."""
        with self._news:
            while self._state is not None and not self.closed:
                self._news.wait(LOOK)

    def put(self, *said: Any) -> None:
        if self.begun and not self._ending and not self.closed:
            self._put(pack(list(said)))

    def _put(self, frame: torch.Tensor) -> None:
        with self._news:
            self._behind += len(frame)
            self._frames.append(frame)
            self._news.notify()
        if self._behind > self._most:
            self.close()

    def end(self) -> None:
        """Nothing follows: the newcomer is of the team."""
        self._ending = True

    def close(self) -> None:
        self.closed = True
        self._frames.clear()
        self._state = None

    def _run(self) -> None:
        try:
            with suppress(OSError), socket.create_connection(way_to(*self.at[:2]), MEET) as link:
                self._give(link)
                link.shutdown(socket.SHUT_WR)  # a loader that was forked meanwhile has it open, too
        finally:
            self.close()

    def _give(self, link: socket.socket) -> None:
        if not self._greet(link):
            return
        link.settimeout(LOOK)
        current = False
        while not self.closed and (self._frames or not self._ending):
            frame = self._next()
            if frame is not None:
                self._send(link, frame)
            if self.begun and not current and self._behind == 0 and self._state is None:
                current = True  # all that there is has gone
                self._send(link, pack(["current"]))

    def _greet(self, link: socket.socket) -> bool:
        """Whether both ends know each other."""
        nonce = link.recv(NONCE, socket.MSG_WAITALL)
        return introduce(link, self._key(self.at[2]), nonce, _GIVER.pack(self._worker))

    def _next(self) -> torch.Tensor | None:
        """What is to be sent next, if there is anything soon."""
        with self._news:
            if self._state is None and not self._frames:
                self._news.wait(LOOK)
            state = self._state
            if state is None:
                frame = self._frames.popleft() if self._frames else None
                self._behind -= 0 if frame is None else len(frame)
                return frame
        frame = packed(*state)
        with self._news:
            self._state = None
            self._news.notify()
        return frame

    def _send(self, link: socket.socket, frame: torch.Tensor) -> None:
        import fcntl  # not on every system on which a world of one trains
        import termios

        left, began = [memoryview(struct.pack("<q", len(frame))), _memory(frame)], time.monotonic()
        while left and not self.closed:
            with suppress(TimeoutError):
                sent = link.send(left[0][:SLICE])
                self._sent, left[0] = self._sent + sent, left[0][sent:]
            if not len(left[0]):
                del left[0]
            spent = self._spent + time.monotonic() - began
            if spent > SEEN:
                (queued,) = struct.unpack("i", fcntl.ioctl(link, termios.TIOCOUTQ, bytes(4)))
                self.speed = (self._sent - queued) / spent
                if self.speed < self._enough:
                    self.close()
        self._spent += time.monotonic() - began


class Migration:
    """The newcomers that this worker sends to, as the first of the team. `key` is what both ends have, by a salt."""

    def __init__(self, worker: int, key: Callable[[str], bytes]) -> None:
        self.worker, self._key = worker, key
        self.givers: dict[int, StateSender] = {}
        self._meeting = threading.Lock()
        self._turned: float | None = None

    def meet(self, coming: Mapping[int, At]) -> None:
        """Connects with those that are new. From any thread."""
        with self._meeting:
            for number, at in coming.items():
                before = self.givers.get(number)
                if before is None or before.at != at:
                    self.givers[number] = StateSender(self.worker, at, self._key)
                    if before is not None:
                        before.close()

    def turn(self, state: Callable[[], Any], changing: Callable[[], int]) -> None:
        """Between two steps, each of which has sums of `changing()` bytes: sends the state to who has none yet."""
        now, before = time.monotonic(), self._turned
        self._turned = now
        for giver in [*self.givers.values()]:
            if before is not None and not giver.begun and not giver.closed:
                giver.begin(state(), changing() / (now - before))

    @property
    def giving(self) -> bool:
        """Whether anybody hears of steps; that begins between two of them."""
        return any(giver.begun and not giver.closed for giver in [*self.givers.values()])

    def copied(self) -> None:
        """Waits until the state may change."""
        for giver in [*self.givers.values()]:
            giver.copied()

    def step(self, trainer: int, whole: bool) -> Migration.Stream:
        """What they hear of a trainer's step that begins; sums have their last form when it ends, if it is `whole`."""
        return Migration.Stream(self, trainer, not whole)

    class Stream:
        """Sums by their number, as they arrive; then what of them has not gone yet, and what it takes to apply them."""

        def __init__(self, ahead: Migration, trainer: int, early: bool) -> None:
            self._ahead, self._trainer, self._early, self._gone = ahead, trainer, early, 0

        def sum(self, number: int, flat: torch.Tensor) -> None:
            if self._early:
                self._gone = number + 1
                self._put(number, flat)

        def end(self, sums: Sequence[torch.Tensor], *said: Any) -> None:
            """Nothing of the state changes before this returns."""
            for number, flat in enumerate(sums[self._gone :], start=self._gone):
                self._put(number, flat)
            self._put(*said)
            self._ahead.copied()

        def _put(self, *said: Any) -> None:
            for giver in [*self._ahead.givers.values()]:
                giver.put(self._trainer, *said)

    def enter(self, members: Iterable[int]) -> None:
        """These are of the team now."""
        for number in members:
            if number in self.givers:
                self.givers[number].end()

    def drop(self) -> None:
        """What this worker had, and sent, is not the team's state."""
        for giver in [*self.givers.values()]:
            giver.close()


class Learner(Protocol):
    """Who takes what comes ahead."""

    def prepare(self, tree: Any) -> None:
        """The state as it was, a tree as it is handed over."""

    def hear(self, said: list[Any]) -> None:
        """A part of a step that the others made after it."""


class StateReceiver:
    """The newcomer's end. `at` is where it listens, and the salt of the `key` that who calls has to have."""

    def __init__(self, host: str, key: Callable[[str], bytes]) -> None:
        self._listener = socket.create_server((host, 0))
        self._listener.setblocking(False)
        self._calls: dict[socket.socket, tuple[bytes, bytes]] = {}  # who has not said all yet: our nonce, and what
        self._strangers = NewConnections[socket.socket]()
        self._link: socket.socket | None = None
        self._giver: int | None = None
        self.at: At = (host, self._listener.getsockname()[1], secrets.token_hex(16))
        self._key = key(self.at[2])

    def follow(self, learner: Learner, admitted: Callable[[], int | None], current: Callable[[], None]) -> bool:
        """Takes what comes, until the one who sends ends it; whether there was a state.

        `admitted` is the first worker of the generation that this one is to enter, once there is one. `current` is
        called when it is of no use to wait for more.
        """
        heard, prepared = SimpleQueue[torch.Tensor | None](), False
        threading.Thread(target=self._listen, args=(heard.put, admitted), name="paceline-ahead", daemon=True).start()
        while (frame := heard.get()) is not None:
            said = unpack(frame, copy=False)
            if said[0] == "state":
                learner.prepare(unpack(frame)[1])  # it keeps some of these
                prepared = True
            elif said[0] == "current":
                current()
            else:
                learner.hear(said)
        current()
        return prepared

    def _listen(self, heard: Callable[[torch.Tensor | None], None], admitted: Callable[[], int | None]) -> None:
        """Takes what comes also while what came before is applied, or the connection would stand still meanwhile."""
        deadline = time.monotonic() + MEET

        def another() -> bool:
            """Whether what is under way comes to nothing: the one who sends is lost."""
            return admitted() not in (None, self._giver) or self._greet(0.0)

        try:
            while admitted() in (None, self._giver):
                if not self._greet(LOOK) and self._link is not None and self._readable(self._link):
                    link, frame = self._link, self._frame(another)
                    if frame is not None:
                        heard(frame)
                    elif self._link is link:
                        break
                if self._link is None and time.monotonic() > deadline:
                    break
        finally:
            heard(None)
            for one in (self._listener, self._link, *self._calls):
                if one is not None:
                    one.close()

    @staticmethod
    def _readable(link: socket.socket) -> bool:
        return can_read(link, 0.0)

    def _greet(self, wait: float) -> bool:
        """Whether one who has the key calls: he takes the place of who was there before, and begins anew. Looks
        for so many seconds at most. Others, who say nothing or the wrong thing, keep nobody waiting.
        """
        ready, _ = wait_for([self._listener, *self._calls, *filter(None, [self._link])], (), wait)
        if self._listener in ready:
            with suppress(OSError):  # it has gone again
                self._accept()
        for call in {*self._calls} & {*ready}:
            nonce, said = self._calls[call]
            got = b""
            with suppress(OSError):
                got = call.recv(NONCE + PROOF + _GIVER.size - len(said), socket.MSG_DONTWAIT)
            said += got
            if got and len(said) < NONCE + PROOF + _GIVER.size:
                self._calls[call] = nonce, said
                continue
            known = read_caller(self._key, nonce, said)
            self._forget(call, close=known is None)
            if known is not None:
                proof, text = known
                (self._giver,) = _GIVER.unpack(text)
                if self._link is not None:
                    self._link.close()
                self._link = call
                with suppress(OSError):  # which the next look at it tells
                    call.sendall(proof)
                return True
        for call in self._strangers.late(time.monotonic()):
            self._forget(call)
        return False

    def _accept(self) -> None:
        call, address = self._listener.accept()
        nonce = make_nonce()
        self._calls[call] = nonce, b""
        if (instead := self._strangers.come(call, address[0], time.monotonic())) is not None:
            self._forget(instead)
        with suppress(OSError):  # which its next word, or its end, tells
            call.send(nonce, socket.MSG_DONTWAIT)

    def _forget(self, call: socket.socket, close: bool = True) -> None:
        """It does not call any more: it is known, or it is closed."""
        del self._calls[call]
        self._strangers.go(call)
        if close:
            call.close()

    def _frame(self, given_up: Callable[[], bool]) -> torch.Tensor | None:
        """The next frame; None: no more comes."""
        assert self._link is not None
        head = _exactly(self._link, 8, given_up)
        length = -1 if head is None else struct.unpack("<q", bytes(head.tolist()))[0]
        return _exactly(self._link, length, given_up) if 0 <= length <= machine_memory() else None


def _exactly(link: socket.socket, length: int, given_up: Callable[[], bool]) -> torch.Tensor | None:
    """So many bytes; None: they do not come."""
    data = torch.empty(length, dtype=torch.uint8)
    left = _memory(data)
    link.settimeout(LOOK)
    while left:
        try:
            got = link.recv_into(left)
        except TimeoutError:
            if not given_up():
                continue
            got = 0
        except OSError:
            got = 0
        if not got:
            return None
        left = left[got:]
    return data
