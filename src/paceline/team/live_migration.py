"""Sends the state to a newcomer ahead of its admission, while the team trains: only an optimization.

So only the differences have to be handed over when it is admitted, and no worker waits for a transfer. It is as in
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
from typing import Any

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
from paceline.team.state_owner import StateOwner

MEET, LOOK = 10.0, 0.1  # seconds to wait for a connection, and between two looks at the commands
_GIVER = struct.Struct("<q")  # a sender's introduction: its worker number
SLICE = 1 << 20
SEEN = 0.5  # seconds of sending after which the speed is known, if they have sent more than a slice
SPARE = 0.85  # part of the connection's speed that the sums of steps may take


def digests(tensors: Mapping[str, torch.Tensor], names: Iterable[str]) -> dict[str, str]:
    """Hashes (SHA-256) those of `tensors` that have one of the `names`."""
    common_names = [name for name in names if name in tensors]
    with ThreadPoolExecutor() as pool:
        return dict(zip(common_names, pool.map(lambda name: _digest(tensors[name]), common_names), strict=True))


def _digest(tensor: torch.Tensor) -> str:
    digest = hashlib.sha256(f"{tensor.dtype} {tuple(tensor.shape)}\n".encode())
    digest.update(_memory(raw(tensor)))
    return digest.hexdigest()


def _memory(flat: torch.Tensor) -> memoryview:
    array: Any = flat.numpy()
    return memoryview(array)


class StateSender:
    """Sends the state, and then steps, to one newcomer in a thread, once both have proved that they have the `key`.

    It copies everything that it gets. `speed`: bytes a second, once known.
    """

    def __init__(self, worker: int, at: At, key: Callable[[str], bytes]) -> None:
        self.at, self.begun, self.closed = at, False, False
        self.speed: float | None = None
        self._worker, self._key = worker, key
        self._state: tuple[dict[str, torch.Tensor], Any] | None = None  # what is still to be copied
        self._frames: deque[torch.Tensor] = deque()
        self._news = threading.Condition()
        self._behind, self._most = 0, 0  # bytes that wait to be sent, and how many may
        self._enough = 0.0  # bytes a second below which the newcomer never catches up
        self._ending = False
        self._sent, self._spent = 0, 0.0  # bytes, and seconds of sending
        threading.Thread(target=self._run, name="paceline-ahead", daemon=True).start()

    def begin(self, tree: Any, changing: float) -> None:
        """Begins to send the state, which changes by `changing` bytes a second, but not before `copied` returns."""
        tensors, skeleton = flatten(["state", tree], "")
        self._enough, self._most = changing / SPARE, 2 * sum(tensor.nbytes for tensor in tensors.values()) + SLICE
        with self._news:
            self._state, self.begun = (tensors, skeleton), True
            self._news.notify()

    def copied(self) -> None:
        """Waits until the thread has copied the state."""
        with self._news:
            while self._state is not None and not self.closed:
                self._news.wait(LOOK)

    def put(self, *message: Any) -> None:
        """Queues a message that follows the state; closes the sender if too many bytes wait."""
        if self.begun and not self._ending and not self.closed:
            self._put(pack(list(message)))

    def _put(self, frame: torch.Tensor) -> None:
        with self._news:
            self._behind += len(frame)
            self._frames.append(frame)
            self._news.notify()
        if self._behind > self._most:
            self.close()

    def end(self) -> None:
        """Sends what is queued, and nothing after it: the newcomer has joined the team."""
        self._ending = True

    def close(self) -> None:
        """Sends nothing any more."""
        self.closed = True
        self._frames.clear()
        self._state = None

    def _run(self) -> None:
        try:
            with suppress(OSError), socket.create_connection(way_to(*self.at[:2]), MEET) as link:
                self._send_frames(link)
                link.shutdown(socket.SHUT_WR)  # a loader that was forked meanwhile has it open, too
        finally:
            self.close()

    def _send_frames(self, link: socket.socket) -> None:
        if not self._greet(link):
            return
        link.settimeout(LOOK)
        current = False
        while not self.closed and (self._frames or not self._ending):
            frame = self._next()
            if frame is not None:
                self._send(link, frame)
            if self.begun and not current and self._behind == 0 and self._state is None:
                current = True  # everything so far has been sent
                self._send(link, pack(["current"]))

    def _greet(self, link: socket.socket) -> bool:
        """Introduces this end; returns whether the other one has the key."""
        nonce = link.recv(NONCE, socket.MSG_WAITALL)
        return introduce(link, self._key(self.at[2]), nonce, _GIVER.pack(self._worker))

    def _next(self) -> torch.Tensor | None:
        """The next frame to send; None if there is none soon."""
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
            if spent > SEEN and self._sent > SLICE:  # less says more of the processor than of the connection
                (queued,) = struct.unpack("i", fcntl.ioctl(link, termios.TIOCOUTQ, bytes(4)))
                self.speed = (self._sent - queued) / spent
                if self.speed < self._enough:
                    self.close()
        self._spent += time.monotonic() - began


class Migration:
    """Sends the state to newcomers, as the first worker of the team. `key` makes a connection's key from a salt."""

    def __init__(self, worker: int, key: Callable[[str], bytes]) -> None:
        self.worker, self._key = worker, key
        self.senders: dict[int, StateSender] = {}
        self._meeting = threading.Lock()
        self._turned: float | None = None

    def meet(self, coming: Mapping[int, At]) -> None:
        """Connects to newcomers that are not connected yet. From any thread."""
        with self._meeting:
            for number, at in coming.items():
                before = self.senders.get(number)
                if before is None or before.at != at:
                    self.senders[number] = StateSender(self.worker, at, self._key)
                    if before is not None:
                        before.close()

    def begin_sending(self, state: Callable[[], Any], changing: Callable[[], int]) -> None:
        """Between two steps: begins to send the state to newcomers without it. A step's sums: `changing()` bytes."""
        now, before = time.monotonic(), self._turned
        self._turned = now
        for sender in [*self.senders.values()]:
            if before is not None and not sender.begun and not sender.closed:
                sender.begin(state(), changing() / (now - before))

    @property
    def is_sending(self) -> bool:
        """Whether any newcomer receives steps; that begins between two of them."""
        return any(sender.begun and not sender.closed for sender in [*self.senders.values()])

    def copied(self) -> None:
        """Waits until the state may change."""
        for sender in [*self.senders.values()]:
            sender.copied()

    def step(self, trainer: int, sends_all_sums: bool) -> Migration.StateStream:
        """Sends newcomers a trainer's step that begins: its sums as they arrive, or, with `sends_all_sums`, only when
        the step ends, because they have their final values then.
        """
        return Migration.StateStream(self, trainer, not sends_all_sums)

    class StateStream:
        """Sends one step: sums by their number as they arrive, then the remaining sums, and how to apply them all."""

        def __init__(self, ahead: Migration, trainer: int, early: bool) -> None:
            self._ahead, self._trainer, self._early, self._gone = ahead, trainer, early, 0

        def sum(self, number: int, flat: torch.Tensor) -> None:
            """Sends a sum that has arrived, unless all are sent at the end."""
            if self._early:
                self._gone = number + 1
                self._put(number, flat)

        def end(self, sums: Sequence[torch.Tensor], *update: Any) -> None:
            """Sends the remaining sums and the `update` that applies them. The state must not change before."""
            for number, flat in enumerate(sums[self._gone :], start=self._gone):
                self._put(number, flat)
            self._put(*update)
            self._ahead.copied()

        def _put(self, *message: Any) -> None:
            for sender in [*self._ahead.senders.values()]:
                sender.put(self._trainer, *message)

    def enter(self, members: Iterable[int]) -> None:
        """Ends the sending to newcomers that are members now."""
        for number in members:
            if number in self.senders:
                self.senders[number].end()

    def drop(self) -> None:
        """Closes all senders: this worker's state is not the team's."""
        for sender in [*self.senders.values()]:
            sender.close()


class StateReceiver:
    """Receives the state at a newcomer. `at` is its address, with the salt of the `key` that a sender must have."""

    def __init__(self, host: str, key: Callable[[str], bytes]) -> None:
        self._listener = socket.create_server((host, 0))
        self._listener.setblocking(False)
        self._calls: dict[socket.socket, tuple[bytes, bytes]] = {}  # incomplete introductions: our nonce, bytes so far
        self._strangers = NewConnections[socket.socket]()
        self._link: socket.socket | None = None
        self._giver: int | None = None
        self.at: At = (host, self._listener.getsockname()[1], secrets.token_hex(16))
        self._key = key(self.at[2])

    def follow(self, owner: StateOwner, admitted: Callable[[], int | None], current: Callable[[], None]) -> bool:
        """Passes what arrives on to `owner` until the sender ends; returns whether there was a state.

        `admitted` returns the first worker of the generation that this worker enters next, once there is one.
        `current` is called when this worker has nothing more to wait for.
        """
        frames, prepared = SimpleQueue[torch.Tensor | None](), False
        threading.Thread(target=self._listen, args=(frames.put, admitted), name="paceline-ahead", daemon=True).start()
        while (frame := frames.get()) is not None:
            message = unpack(frame, copy=False)
            if message[0] == "state":
                owner.load_base(unpack(frame)[1])  # it keeps some of these
                prepared = True
            elif message[0] == "current":
                current()
            else:
                owner.apply_step(message)
        current()
        return prepared

    def _listen(self, deliver: Callable[[torch.Tensor | None], None], admitted: Callable[[], int | None]) -> None:
        """Receives frames in a thread, so that the connection does not stall while the owner applies them."""
        deadline = time.monotonic() + MEET

        def another() -> bool:
            """Whether the sender is lost: the first worker is another one, or a new sender has called."""
            return admitted() not in (None, self._giver) or self._greet(0.0)

        try:
            while admitted() in (None, self._giver):
                if not self._greet(LOOK) and self._link is not None and self._readable(self._link):
                    link, frame = self._link, self._frame(another)
                    if frame is not None:
                        deliver(frame)
                    elif self._link is link:
                        break
                if self._link is None and time.monotonic() > deadline:
                    break
        finally:
            deliver(None)
            for one in (self._listener, self._link, *self._calls):
                if one is not None:
                    one.close()

    @staticmethod
    def _readable(link: socket.socket) -> bool:
        return can_read(link, 0.0)

    def _greet(self, wait: float) -> bool:
        """Takes introductions for `wait` seconds at most; returns whether a sender with the key has called.

        The new sender replaces the previous one, and begins again. Callers without the key cause no delay.
        """
        ready, _ = wait_for([self._listener, *self._calls, *filter(None, [self._link])], (), wait)
        if self._listener in ready:
            with suppress(OSError):  # it has gone again
                self._accept()
        for call in {*self._calls} & {*ready}:
            nonce, greeting = self._calls[call]
            received = b""
            with suppress(OSError):
                received = call.recv(NONCE + PROOF + _GIVER.size - len(greeting), socket.MSG_DONTWAIT)
            greeting += received
            if received and len(greeting) < NONCE + PROOF + _GIVER.size:
                self._calls[call] = nonce, greeting
                continue
            caller = read_caller(self._key, nonce, greeting)
            self._forget(call, close=caller is None)
            if caller is not None:
                proof, text = caller
                (self._giver,) = _GIVER.unpack(text)
                if self._link is not None:
                    self._link.close()
                self._link = call
                with suppress(OSError):  # the next read notices it
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
        with suppress(OSError):  # the next read notices it
            call.send(nonce, socket.MSG_DONTWAIT)

    def _forget(self, call: socket.socket, close: bool = True) -> None:
        """Forgets a caller: its introduction is complete, or its connection is closed."""
        del self._calls[call]
        self._strangers.go(call)
        if close:
            call.close()

    def _frame(self, given_up: Callable[[], bool]) -> torch.Tensor | None:
        """The next frame, or None if there is none."""
        assert self._link is not None
        head = _exactly(self._link, 8, given_up)
        length = -1 if head is None else struct.unpack("<q", bytes(head.tolist()))[0]
        return _exactly(self._link, length, given_up) if 0 <= length <= machine_memory() else None


def _exactly(link: socket.socket, length: int, given_up: Callable[[], bool]) -> torch.Tensor | None:
    """Receives `length` bytes; None if they do not come."""
    data = torch.empty(length, dtype=torch.uint8)
    left = _memory(data)
    link.settimeout(LOOK)
    while left:
        try:
            received = link.recv_into(left)
        except TimeoutError:
            if not given_up():
                continue
            received = 0
        except OSError:
            received = 0
        if not received:
            return None
        left = left[received:]
    return data
