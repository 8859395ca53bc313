"""Mutual authentication on sockets: two processes of a run prove to each other that they have its token.

Who listens sends a nonce. Who calls answers with a nonce of its own, what it says of itself, and an HMAC over all
three; who listens proves with another HMAC that it has the key, too. The key is made of the run's token and of a salt,
which who listens has told the others by way of the coordinator. So who overhears all of it, or is called by mistake,
has nothing to use: neither the key nor a proof that another connection would take.

What they say from then on carries seals (`MessageSeals`): nobody between them can change, repeat or leave out any of
it.
"""

from __future__ import annotations

import errno
import hmac
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Generic, TypeVar

NONCE, PROOF, SEAL = 16, 32, 16  # bytes
HELLO = 5.0  # seconds for one who has connected to show that it is known
VANISHED, PROBE = 60, 10  # seconds without a sign of the other host after which a connection ends; between two probes
STRANGERS, OF_ONE = 128, 32  # connections that have not, in all and from one address
Opened = TypeVar("Opened")


def make_key(token: bytes, salt: str) -> bytes:
    """Returns the key that both ends of a connection share; `salt` is the listener's."""
    return hmac.new(token, f"greeting {salt}".encode(), "sha256").digest()


def make_nonce() -> bytes:
    """Returns a new random nonce."""
    return secrets.token_bytes(NONCE)


def prove_caller(key: bytes, nonce: bytes, caller_nonce: bytes, text: bytes) -> bytes:
    """Returns a caller's greeting: its own nonce, its proof for the listener's `nonce`, and its `text` about itself."""
    return caller_nonce + hmac.new(key, b"calls" + nonce + caller_nonce + text, "sha256").digest() + text


def read_caller(key: bytes, nonce: bytes, greeting: bytes) -> tuple[bytes, bytes] | None:
    """Returns (the proof to answer with, the caller's text about itself); None if the caller does not have the key."""
    caller_nonce, text = greeting[:NONCE], greeting[NONCE + PROOF :]
    if not hmac.compare_digest(greeting, prove_caller(key, nonce, caller_nonce, text)):
        return None
    return prove_listener(key, nonce, caller_nonce), text


def prove_listener(key: bytes, nonce: bytes, caller_nonce: bytes) -> bytes:
    """Returns the listener's proof that it has the key, too."""
    return hmac.new(key, b"listens" + nonce + caller_nonce, "sha256").digest()


def is_proof(given: bytes | bytearray, expected: bytes) -> bool:
    """Whether a proof is the expected one; the comparison takes the same time wherever they differ."""
    return hmac.compare_digest(given, expected)


def introduce(
    link: socket.socket, key: bytes, nonce: bytes, text: bytes = b"", caller_nonce: bytes | None = None
) -> bool:
    """Sends a caller's greeting to the listener whose `nonce` has arrived, and waits for the answer. `caller_nonce` is
    given by a caller that seals messages afterwards.

    Returns whether the listener has the key, too.
    """
    send_at_once(link)
    caller_nonce = caller_nonce or make_nonce()
    link.sendall(prove_caller(key, nonce, caller_nonce, text))
    return is_proof(link.recv(PROOF, socket.MSG_WAITALL), prove_listener(key, nonce, caller_nonce))


def receive_exactly(link: socket.socket, length: int) -> bytearray:
    """Receives so many bytes, also on a connection with a timeout. OSError: the connection is broken."""
    data = bytearray(length)
    view = memoryview(data)
    while view:
        if not (received := link.recv_into(view)):
            raise ConnectionResetError(errno.ECONNRESET, "the connection was closed")
        view = view[received:]
    return data


def greet(link: socket.socket, key: bytes) -> tuple[bytes, bytes] | None:
    """Waits for the greeting of a caller that uses `introduce`, and answers it.

    Returns the nonces of both ends, or None if the caller does not have the key. OSError: the connection is broken, or
    the caller took too long.
    """
    send_at_once(link)
    link.settimeout(HELLO)
    nonce = make_nonce()
    link.sendall(nonce)
    greeting = bytes(receive_exactly(link, NONCE + PROOF))
    caller = read_caller(key, nonce, greeting)
    if caller is None:
        return None
    link.sendall(caller[0])
    link.settimeout(None)
    return nonce, greeting[:NONCE]


def send_at_once(link: socket.socket) -> None:
    """Has the kernel send small parts of messages at once. Otherwise each waits until the other end has acknowledged
    the one before, which it delays by up to 40 ms.
    """
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def end_when_peer_vanishes(link: socket.socket) -> None:
    """Has the kernel end a TCP connection whose other host has vanished without closing it, also while one waits."""
    link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, PROBE)
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, PROBE)
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * VANISHED)  # also for data that is on its way


class MessageSeals:
    """Seals what one end of a connection sends, one part after another.

    A seal is an HMAC over the part and its number, truncated to half its length (RFC 2104, section 5). Each end of
    each connection has its own key.
    """

    def __init__(self, key: bytes, nonce: bytes, caller_nonce: bytes, calls: bool) -> None:
        """`nonce` is the listener's; `calls` says whether this end is the caller."""
        seal_key = hmac.digest(key, b"seals" + nonce + caller_nonce + bytes([calls]), "sha256")
        self._begun, self._count = hmac.new(seal_key, digestmod="sha256"), 0

    def next(self, part: bytes | bytearray | memoryview) -> bytes:
        """Returns the seal of the next part."""
        self._count += 1
        seal = self._begun.copy()
        seal.update(self._count.to_bytes(8, "little"))
        seal.update(part)
        return seal.digest()[:SEAL]


class NewConnections(Generic[Opened]):
    """Connections that have not proved yet that they have the key, the oldest first.

    Each may stay for a few seconds, and their number is limited, in all and from one address: one more replaces the
    oldest.
    """

    def __init__(self, of_one: int = OF_ONE, in_all: int = STRANGERS) -> None:
        self._of_one, self._in_all = of_one, in_all
        self._since: dict[Opened, tuple[float, str]] = {}

    def __iter__(self) -> Iterator[Opened]:
        return iter([*self._since])

    def come(self, one: Opened, address: str, now: float) -> Opened | None:
        """Adds a connection, and returns the one that must be closed instead, if any."""
        same = [other for other, (_, where) in self._since.items() if where == address]
        oldest = None
        if len(same) >= self._of_one:
            oldest = same[0]
        elif len(self._since) >= self._in_all:
            oldest = next(iter(self._since))
        if oldest is not None:
            del self._since[oldest]
        self._since[one] = now, address
        return oldest

    def go(self, one: Opened) -> None:
        """Forgets a connection that has proved itself, or is closed."""
        self._since.pop(one, None)

    def late(self, now: float) -> list[Opened]:
        """Returns the connections that took too long."""
        return [one for one, (since, _) in self._since.items() if now - since > HELLO]


def serve_callers(
    listener: socket.socket, key: Callable[[], bytes], serve: Callable[[socket.socket, bytes, bytes], None], name: str
) -> None:
    """Accepts connections in threads with this name, until the listener is shut down.

    Each caller that has the key is handed to `serve` with the nonces of `greet`; its connection is closed afterwards.
    """
    strangers, lock = NewConnections[socket.socket](), threading.Lock()

    def meet(link: socket.socket) -> None:
        with link, suppress(OSError):
            try:
                end_when_peer_vanishes(link)
                nonces = greet(link, key())
            finally:
                with lock:
                    strangers.go(link)
            if nonces is not None:
                serve(link, *nonces)

    def accept() -> None:
        with suppress(OSError):  # the listener was shut down
            while True:
                link, address = listener.accept()
                with lock:
                    oldest = strangers.come(link, address[0], time.monotonic())
                if oldest is not None:
                    with suppress(OSError):
                        oldest.shutdown(socket.SHUT_RDWR)  # its thread closes it
                threading.Thread(target=meet, args=(link,), name=name, daemon=True).start()

    threading.Thread(target=accept, name=name, daemon=True).start()
