"""What servers and workers say to each other: frames over a real pair of sockets."""

from __future__ import annotations

import socket
from typing import Any

import pytest
import torch

from paceline.comm.frames import Connection, Frame, Kind


def linked(place: Any, secret: str) -> tuple[Connection, Connection]:
    ours, theirs = socket.socketpair()
    return Connection(ours, lambda frame: []), Connection(theirs, place, secret)


def moved(*links: Connection) -> None:
    for _ in range(200):
        for link in links:
            link.advance()


def test_frames_land_in_memory_that_is_there() -> None:
    landing = {0: torch.zeros(300_000, dtype=torch.float64), 1: torch.zeros(3), 2: torch.zeros(0)}
    sender, taker = linked(lambda frame: [landing[number] for number in frame.numbers], "secret")
    sent = {0: torch.randn(300_000, dtype=torch.float64), 1: torch.randn(3), 2: torch.zeros(0)}
    sender.put(Kind.HELLO, content=b"secret 7")
    sender.put(Kind.PUSH, 1, (5, 2, 1), (1, 2, 0), [sent[number] for number in (1, 2, 0)])
    sender.put(Kind.STATE, content=b"all of it")
    moved(sender, taker)
    hello, push, state = taker.inbox
    assert taker.greeting == b"7"
    assert hello.kind == Kind.HELLO
    assert push == Frame(Kind.PUSH, 1, (5, 2, 1), (1, 2, 0), bytearray())
    assert state.text == b"all of it"
    assert all(torch.equal(landing[number], sent[number]) for number in sent)


@pytest.mark.parametrize(
    "said",
    [
        lambda link: link.put(Kind.HELLO, content=b"another 7"),
        lambda link: link.put(Kind.STATE, content=b"secret 7"),
        lambda link: link.put(Kind.HELLO, content=bytes(1 << 20)),
        lambda link: link.put(Kind.PUSH, 0, (0, 0, 0), (0,), [torch.zeros(3)]),
    ],
)
def test_who_does_not_know_the_secret_is_not_heard(said: Any) -> None:
    def place(frame: Frame) -> list[torch.Tensor]:
        raise AssertionError(frame)

    sender, taker = linked(place, "secret")
    said(sender)
    moved(sender, taker)
    assert taker.broken
    assert not taker.inbox


def test_tensors_of_another_size_end_the_connection() -> None:
    sender, taker = linked(lambda frame: [torch.zeros(2)], "")
    sender.put(Kind.PUSH, 0, (0, 0, 0), (0,), [torch.zeros(3)])
    moved(sender, taker)
    assert taker.broken
    assert not taker.inbox


def test_what_has_to_wait_comes_later() -> None:
    ready: list[bool] = []
    sender, taker = linked(lambda frame: [] if ready else None, "")
    sender.put(Kind.STATE, content=b"x")
    moved(sender, taker)
    assert taker.paused
    assert not taker.inbox
    ready.append(True)
    moved(taker)
    assert [frame.text for frame in taker.inbox] == [b"x"]
