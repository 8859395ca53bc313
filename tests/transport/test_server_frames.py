"""What servers and workers say to each other: frames over a real pair of sockets."""

from __future__ import annotations

import errno
import socket
import struct
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.base.handshake import make_nonce, prove_caller
from paceline.param_server.parameter_shard import Client
from paceline.param_server.protocol import Connection, Kind, Message


def linked(place: Any, greets: bool = True, key: bytes = b"a key") -> tuple[Connection, Connection]:
    """Two ends, of which one calls the other; both know each other if it `greets`."""
    ours, theirs = socket.socketpair()
    sender = Connection(ours, lambda frame: [], key, lambda link: f"7 {link.memory}")
    taker = Connection(theirs, place, b"a key")
    if greets:
        moved(sender, taker)
        assert taker.inbox.popleft().kind == Kind.HELLO
        assert (sender.known, taker.known, list(sender.inbox)) == (True, True, [])
    return sender, taker


def moved(*links: Connection) -> None:
    for _ in range(200):
        for link in links:
            link.advance()


def test_frames_land_in_memory_that_is_there() -> None:
    landing = {0: torch.zeros(300_000, dtype=torch.float64), 1: torch.zeros(3), 2: torch.zeros(0)}
    sender, taker = linked(lambda frame: [landing[number] for number in frame.numbers])
    sent = {0: torch.randn(300_000, dtype=torch.float64), 1: torch.randn(3), 2: torch.zeros(0)}
    sender.put(Kind.PUSH, 1, (5, 2, 1), (1, 2, 0), [sent[number] for number in (1, 2, 0)])
    sender.put(Kind.STATE, content=b"all of it")
    moved(sender, taker)
    push, state = taker.inbox
    assert taker.greeting.startswith(b"7 ")
    assert push == Message(Kind.PUSH, 1, (5, 2, 1), (1, 2, 0), bytearray())
    assert state.text == b"all of it"
    assert all(torch.equal(landing[number], sent[number]) for number in sent)


def near(place: Any) -> tuple[Connection, Connection]:
    sender, taker = linked(place)
    assert taker.borrow(taker.greeting.decode().partition(" ")[2])
    assert sender.borrow(taker.memory)
    return sender, taker


def test_tensors_are_lent_on_one_host() -> None:
    """They lie where they lay before, whatever else was sent; and may change at once, unlike those that travel."""
    like = {0: torch.zeros(3), 1: torch.zeros(40_000_000, dtype=torch.uint8), 2: torch.zeros(5, dtype=torch.float64)}
    sender, taker = near(lambda frame: [like[number] for number in frame.numbers])
    first, places = torch.rand(3), []
    for key, size in (((1, 2, 3), 1.0), ((1, 2, 4), 2.0)):
        sent = [first * size, torch.full([40_000_000], int(size), dtype=torch.uint8), torch.rand(5).double()]
        whole = [tensor.clone() for tensor in sent]
        sender.put(Kind.PUSH, 2, key, (0, 1, 2), sent)
        sender.put(Kind.PUSH, 2, key, (1,), sent[1:2])
        sent[1].zero_()
        moved(sender, taker)
        frame, other = taker.inbox
        assert frame.lent is not None
        assert other.lent is not None
        assert (*frame[:4],) == (Kind.PUSH, 2, key, (0, 1, 2))
        assert tuple(frame.lent.stamp[:3]) == key
        assert all(torch.equal(*pair) for pair in zip(frame.lent.tensors, whole, strict=True))
        assert torch.equal(other.lent.tensors[0], whole[1])
        places.append([tensor.data_ptr() for tensor in (*frame.lent.tensors, *other.lent.tensors)])
        taker.inbox.clear()
    assert places[0] == places[1]
    assert not any(tensor.any() for tensor in like.values())
    taker.put(Kind.READ, 2, (1, 2, 3), (5,), [torch.ones(3)])  # the other way round
    sender._find_tensors = lambda frame: [torch.empty(3)]
    moved(sender, taker)
    assert sender.inbox[0].lent is not None
    assert torch.equal(sender.inbox[0].lent.tensors[0], torch.ones(3))
    assert not list(Path("/dev/shm").glob("*paceline*"))


def test_tensors_travel_where_no_memory_can_be_lent(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "no space")

    monkeypatch.setattr("paceline.comm.shared_memory.os.posix_fallocate", refuse)
    landing = torch.zeros(9)
    sender, taker = near(lambda frame: [landing])
    sent = torch.rand(9)
    sender.put(Kind.PUSH, 0, (0, 0, 0), (0,), [sent])
    whole = sent.clone()
    sent.zero_()
    moved(sender, taker)
    assert taker.inbox[0].lent is None
    assert torch.equal(landing, whole)


@pytest.mark.parametrize("wrong", ["host", "inode", "process"])
def test_another_hosts_memory_is_not_borrowed(wrong: str) -> None:
    sender, taker = linked(lambda frame: [])
    host, process, number, inode = sender.memory.split()
    said = {"host": "another", "inode": str(int(inode) + 1), "process": "999999999"}[wrong]
    named = {"host": host, "process": process, "number": number, "inode": inode, wrong: said}
    assert not taker.borrow(" ".join(named.values()))
    assert not taker.near
    taker.put(Kind.READ, 0, (0, 0, 0), (0,), [torch.ones(3)])
    landing = torch.zeros(3)
    sender._find_tensors = lambda frame: [landing]
    moved(sender, taker)
    assert torch.equal(landing, torch.ones(3))


def test_what_is_lent_waits_until_it_is_heard_where() -> None:
    """Though both words come at once, as over a connection that replaces another."""
    sender, taker = linked(lambda frame: [torch.zeros(3)])
    assert sender.borrow(taker.memory)
    sender.put(Kind.WELCOME, content=sender.memory.encode())
    sender.put(Kind.READ, 0, (0, 0, 0), (0,), [torch.ones(3)])
    sender.advance()
    for _ in range(2):
        taker.advance()
        assert [frame.kind for frame in taker.inbox] == [Kind.WELCOME]
    assert taker.borrow(taker.inbox.popleft().text.decode())
    taker.advance()
    (frame,) = taker.inbox
    assert frame.lent is not None
    assert torch.equal(frame.lent.tensors[0], torch.ones(3))


def test_what_a_lender_goes_on_from_is_not_counted() -> None:
    sender, taker = near(lambda frame: [torch.zeros(3)])
    client = Client()
    for key in ((4, 1, 0), (4, 2, 0)):
        sender.put(Kind.PUSH, 1, key, (0,), [torch.ones(3)])
    moved(sender, taker)
    first, second = taker.inbox
    client.borrow(first, in_codes=False)
    assert not client.still_lends(1, (4, 1, 0))
    client.borrow(second, in_codes=False)
    assert client.still_lends(1, (4, 2, 0))
    assert torch.equal(client.buffers[1, 0], torch.ones(3))


def nobody(frame: Message) -> list[torch.Tensor]:
    raise AssertionError(frame)


def hello(said: bytes) -> bytes:
    return struct.pack("<BHIqqqQ", Kind.HELLO, 0, 0, 0, 0, 0, len(said)) + said


@pytest.mark.parametrize(
    "said",
    [
        lambda nonce: hello(prove_caller(b"another key", nonce, make_nonce(), b"7")),
        lambda nonce: hello(prove_caller(b"a key", make_nonce(), make_nonce(), b"7")),  # for another connection
        lambda nonce: hello(b""),
        lambda nonce: hello(bytes(1 << 20)),
        lambda nonce: struct.pack("<BHIqqqQ", Kind.STATE, 0, 0, 0, 0, 0, 5) + b"state",
        lambda nonce: struct.pack("<BHIqqqQ", Kind.PUSH, 0, 1, 0, 0, 0, 12) + bytes(16),
    ],
)
def test_who_does_not_have_the_key_is_not_heard(said: Any) -> None:
    """And nothing is made for it."""
    ours, theirs = socket.socketpair()
    taker = Connection(theirs, nobody, b"a key")
    moved(taker)
    nonce = ours.recv(1 << 16)[-16:]
    assert taker.memory == ""
    ours.setblocking(False)
    ours.send(said(nonce))
    moved(taker)
    assert taker.broken
    assert not taker.inbox
    assert taker.memory == ""


@pytest.mark.parametrize("answer", [bytes(32), b"", None])
def test_who_calls_says_nothing_to_one_without_the_key(answer: bytes | None) -> None:
    ours, theirs = socket.socketpair()
    sender = Connection(ours, nobody, b"a key", lambda link: "7")
    sender.put(Kind.STATE, content=b"all of it")
    theirs.sendall(hello(make_nonce()))
    moved(sender)
    theirs.setblocking(False)
    came = theirs.recv(1 << 16)
    assert b"all of it" not in came
    theirs.sendall(hello(came[-49:-1]) if answer is None else hello(answer))  # None: its own words
    moved(sender)
    assert sender.broken
    assert theirs.recv(1 << 16) == b""


class Between:
    """Somebody through whom two ends that know each other speak."""

    def __init__(self) -> None:
        (ours, self.near), (self.far, theirs) = socket.socketpair(), socket.socketpair()
        for one in (self.near, self.far):
            one.setblocking(False)
        self.landing = torch.zeros(4, dtype=torch.uint8)
        self.sender = Connection(ours, lambda frame: [], b"a key", lambda link: "7")
        self.taker = Connection(theirs, lambda frame: [self.landing] if frame.numbers else [], b"a key")
        for _ in range(9):
            moved(self.sender, self.taker)
            self.pass_on(self.far, self.near)
            self.pass_on(self.near, self.far)
        assert self.taker.inbox.popleft().kind == Kind.HELLO
        assert self.sender.known

    def pass_on(self, source: socket.socket, target: socket.socket, change: Any = bytes) -> None:
        with suppress(BlockingIOError):
            target.send(change(source.recv(1 << 16)))

    def say(self, change: Any) -> list[Message]:
        """What arrives of a text and a tensor."""
        self.sender.put(Kind.COMMIT, 1, (2, 3, 4), (), b"text")
        self.sender.put(Kind.PUSH, 1, (2, 3, 4), (9,), [torch.tensor([5, 6, 7, 8], dtype=torch.uint8)])
        self.sender.advance()
        self.pass_on(self.near, self.far, change)
        moved(self.taker)
        return [*self.taker.inbox]


def test_what_somebody_between_them_changes_repeats_or_leaves_out_is_not_heard() -> None:
    plain = Between()
    commit, push = plain.say(bytes)
    assert (commit.text, push.numbers, plain.landing.tolist()) == (b"text", (9,), [5, 6, 7, 8])
    head, seal = 39, 16
    first, second = head + seal + 4 + seal, head + 4 + seal
    for at in [*range(first), *range(first, first + second)]:  # any byte but those of the tensor
        between = Between()
        heard = between.say(lambda said, at=at: said[:at] + bytes([said[at] ^ 1]) + said[at + 1 :])
        assert len(heard) == (at >= first), at
        # Of more numbers than were said the seal is still to come.
        assert between.taker.broken or 3 <= at % first < 7, at
    for change in (
        lambda said: said[:first] + said,
        lambda said: said[first:],
        lambda said: said[first:] + said[:first],
    ):
        between = Between()
        assert len(between.say(change)) <= 1
        assert between.taker.broken


def test_what_was_said_on_one_connection_is_nothing_on_another() -> None:
    said: list[bytes] = []
    Between().say(lambda data: said.append(data) or data)
    other = Between()
    assert other.say(lambda data: said[0]) == []
    assert other.taker.broken


def test_tensors_of_another_size_end_the_connection() -> None:
    sender, taker = linked(lambda frame: [torch.zeros(2)])
    sender.put(Kind.PUSH, 0, (0, 0, 0), (0,), [torch.zeros(3)])
    moved(sender, taker)
    assert taker.broken
    assert not taker.inbox


def test_what_has_to_wait_comes_later() -> None:
    ready: list[bool] = []
    sender, taker = linked(lambda frame: [] if ready else None)
    sender.put(Kind.STATE, content=b"x")
    moved(sender, taker)
    assert taker.paused
    assert not taker.inbox
    ready.append(True)
    moved(taker)
    assert [frame.text for frame in taker.inbox] == [b"x"]
