"""Mutual authentication on sockets: two processes of a run prove to each other that they have its token.

Who listens sends a nonce. Who calls answers with a nonce of its own, what it says of itself, and an HMAC over all
three; who listens proves with another HMAC that it has the key, too. The key is made of the run's token and of a salt,
which who listens has told the others by way of the coordinator. So who overhears all of it, or is called by mistake,
has nothing to use: neither the key nor a proof that another connection would take.

What they say from then on carries seals (`MessageSeals`): nobody between them can change, repeat or leave out any of
it.
"""

from __future__ import annotations

import hmac
import secrets
import socket
from collections.abc import Iterator
from typing import Generic, TypeVar

NONCE, PROOF, SEAL = 16, 32, 16  # bytes
HELLO = 5.0  # seconds for one who has connected to show that it is known
STRANGERS, OF_ONE = 128, 32  # connections that have not, in all and from one address
Opened = TypeVar("Opened")


def make_key(token: bytes, salt: str) -> bytes:
    """What both ends have; `salt` is that of who listens."""
    return hmac.new(token, f"greeting {salt}".encode(), "sha256").digest()


def make_nonce() -> bytes:
    return secrets.token_bytes(NONCE)


def prove_caller(key: bytes, nonce: bytes, own: bytes, text: bytes) -> bytes:
    """What who calls sends: its `own` nonce, the proof for that of who listens, and what it says of itself."""
    return own + hmac.new(key, b"calls" + nonce + own + text, "sha256").digest() + text


def read_caller(key: bytes, nonce: bytes, said: bytes) -> tuple[bytes, bytes] | None:
    """The proof to answer with, and what a caller says of itself; None: it has not the key."""
    own, text = said[:NONCE], said[NONCE + PROOF :]
    if not hmac.compare_digest(said, prove_caller(key, nonce, own, text)):
        return None
    return prove_listener(key, nonce, own), text


def prove_listener(key: bytes, nonce: bytes, theirs: bytes) -> bytes:
    return hmac.new(key, b"listens" + nonce + theirs, "sha256").digest()


def is_proof(given: bytes | bytearray, expected: bytes) -> bool:
    return hmac.compare_digest(given, expected)


def introduce(link: socket.socket, key: bytes, nonce: bytes, text: bytes = b"") -> bool:
    """Says to who listens, whose `nonce` has come, the proof and a `text`, and waits. Whether it has the key, too."""
    own = make_nonce()
    link.sendall(prove_caller(key, nonce, own, text))
    return is_proof(link.recv(PROOF, socket.MSG_WAITALL), prove_listener(key, nonce, own))


class MessageSeals:
    """The seals of what one end of a connection says, one part after another: an HMAC, of which half is sent (RFC 2104,
    section 5), over the part and how many there were before it. The key is made for this connection and this end.
    """

    def __init__(self, key: bytes, nonce: bytes, theirs: bytes, calls: bool) -> None:
        """`nonce` is that of who listens, `theirs` that of who calls; `calls`: the end is who called."""
        own = hmac.digest(key, b"seals" + nonce + theirs + bytes([calls]), "sha256")
        self._begun, self._count = hmac.new(own, digestmod="sha256"), 0

    def next(self, part: bytes | bytearray | memoryview) -> bytes:
        self._count += 1
        seal = self._begun.copy()
        seal.update(self._count.to_bytes(8, "little"))
        seal.update(part)
        return seal.digest()[:SEAL]


class NewConnections(Generic[Opened]):
    """Connections that have not shown yet that they are known, the oldest first: each for a few seconds, and few in all
    and from one address. One too many takes the place of the oldest.
    """

    def __init__(self, of_one: int = OF_ONE, in_all: int = STRANGERS) -> None:
        self._of_one, self._in_all = of_one, in_all
        self._since: dict[Opened, tuple[float, str]] = {}

    def __iter__(self) -> Iterator[Opened]:
        return iter([*self._since])

    def come(self, one: Opened, address: str, now: float) -> Opened | None:
        """The one that is to be closed instead, if any."""
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
        """It is known now, or closed."""
        self._since.pop(one, None)

    def late(self, now: float) -> list[Opened]:
        """Those whose time is over."""
        return [one for one, (since, _) in self._since.items() if now - since > HELLO]
