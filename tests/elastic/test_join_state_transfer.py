"""What goes ahead to a newcomer: the state and each step's sums, and what happens when either end goes."""

from __future__ import annotations

import os
import signal
import socket
import struct
import threading
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from agents import until
from hypothesis import given
from hypothesis import strategies as st

from paceline.base.batching import route_transfers
from paceline.base.handshake import NONCE, make_nonce, prove_caller
from paceline.checkpoint.tree import pack, unpack
from paceline.team import live_migration as migration
from paceline.team.live_migration import Migration, StateReceiver, digests


def key_of(salt: str) -> bytes:
    return salt.encode()


STATE = {"weights": torch.arange(10.0), "bias": torch.zeros(0), "steps": 3, "name": "ä"}


class Owner:
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.states: list[Any] = []
        self.heard: list[list[Any]] = []

    def load_base(self, tree: Any) -> None:
        self.states.append(tree)

    def apply_step(self, said: list[Any]) -> None:
        self.heard.append(said)


class Newcomer:
    """A Taker that follows in a thread."""

    def __init__(self) -> None:
        self.taker, self.owner = StateReceiver("127.0.0.1", key_of), Owner()
        self.admitted: int | None = None
        self.current = 0
        self.followed: bool | None = None
        self.thread = threading.Thread(target=self._follow, daemon=True)
        self.thread.start()

    def _follow(self) -> None:
        self.followed = self.taker.follow(self.owner, lambda: self.admitted, self._current)

    def _current(self) -> None:
        self.current += 1


def begun(first: Migration, newcomer: Newcomer, changing: int = 0) -> None:
    first.meet({6: newcomer.taker.at})
    first.begin_sending(lambda: STATE, lambda: changing)  # how long a step takes is not known yet
    assert not first.is_sending
    first.begin_sending(lambda: STATE, lambda: changing)
    assert first.is_sending


def test_join_receives_the_state_ahead_and_then_the_steps() -> None:
    first, newcomer = Migration(0, key_of), Newcomer()
    begun(first, newcomer)
    until(lambda: newcomer.current == 1)
    assert torch.equal(newcomer.owner.states[0]["weights"], STATE["weights"])
    sums = torch.ones(3)
    step = first.step(0, sends_all_sums=False)
    step.sum(0, sums)
    sums.zero_()  # the next step's memory is the same
    step.end([sums], {"count": 2.0}, 1.5, 2.0, None)
    first.enter([0, 6])
    newcomer.admitted = 0
    newcomer.thread.join(20)
    assert newcomer.followed
    assert torch.equal(newcomer.owner.heard[0][2], torch.ones(3))
    assert newcomer.owner.heard[1:] == [[0, {"count": 2.0}, 1.5, 2.0, None]]


def test_joining_worker_catches_up_while_training_goes_on() -> None:
    first, newcomer = Migration(0, key_of), Newcomer()
    begun(first, newcomer)

    def step() -> bool:
        first.step(0, sends_all_sums=False).sum(0, torch.ones(3))
        return newcomer.current == 1

    until(step, 20)
    first.enter([6])
    newcomer.thread.join(20)


def test_state_sender_without_the_secret_is_refused() -> None:
    first, newcomer = Migration(0, key_of), Newcomer()
    host, port, _ = newcomer.taker.at
    with socket.create_connection((host, port)) as stranger:
        nonce = stranger.recv(NONCE)
        stranger.sendall(prove_caller(b"another key", nonce, make_nonce(), struct.pack("<q", 0)))
        until(lambda: stranger.recv(1) == b"")
    begun(first, newcomer)
    until(lambda: newcomer.current == 1)
    assert len(newcomer.owner.states) == 1


def test_silent_connection_delays_no_join(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(migration, "MEET", 3600.0)
    first, newcomer = Migration(0, key_of), Newcomer()
    with ExitStack() as calls:
        for said in (b"", b"0" * 39, b"0" * 55):
            calls.enter_context(socket.create_connection(newcomer.taker.at[:2])).sendall(said)
        begun(first, newcomer)
        until(lambda: newcomer.current == 1, 20)
    first.enter([6])
    newcomer.thread.join(20)
    assert newcomer.followed


@pytest.mark.parametrize("length", [-1, 1 << 50])
def test_length_of_a_state_frame_is_limited(length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    raised: list[Any] = []
    monkeypatch.setattr(threading, "excepthook", raised.append)
    newcomer = Newcomer()
    host, port, salt = newcomer.taker.at
    with socket.create_connection((host, port)) as link:
        nonce = link.recv(NONCE)
        link.sendall(prove_caller(key_of(salt), nonce, make_nonce(), struct.pack("<q", 0)) + struct.pack("<q", length))
        newcomer.thread.join(20)
    assert (newcomer.followed, newcomer.current, raised) == (False, 1, [])


def test_slow_state_sender_gives_up_and_reports_its_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(migration, "SEEN", 0.0)
    monkeypatch.setattr(migration, "SLICE", 64)  # so the state of this test counts as a large one
    first, newcomer = Migration(0, key_of), Newcomer()
    begun(first, newcomer, changing=1 << 60)
    newcomer.thread.join(20)
    assert newcomer.followed is False
    assert newcomer.current == 1
    assert not first.is_sending
    assert first.senders[6].speed is not None


def test_small_state_is_sent_however_long_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(migration, "SEEN", 0.0)
    first, newcomer = Migration(0, key_of), Newcomer()
    begun(first, newcomer, changing=1 << 60)
    until(lambda: newcomer.current == 1)
    first.enter([6])
    newcomer.thread.join(20)
    assert newcomer.followed


def test_joining_worker_that_falls_too_far_behind_is_given_up() -> None:
    newcomer = Newcomer()
    newcomer.taker.at = (*newcomer.taker.at[:2], "another")  # nobody takes what is sent
    first = Migration(0, key_of)
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        first.meet({6: ("127.0.0.1", deaf.getsockname()[1], "secret")})
        for _ in range(2):
            first.begin_sending(lambda: torch.zeros(1 << 22), lambda: 0)
        for _ in range(4):
            first.step(0, sends_all_sums=False).sum(0, torch.zeros(1 << 22))
        assert not first.is_sending
    newcomer.admitted = 1
    newcomer.thread.join(20)


def test_another_worker_sends_the_state_after_a_loss() -> None:
    lost, first, newcomer = Migration(0, key_of), Migration(1, key_of), Newcomer()
    begun(lost, newcomer)
    until(lambda: newcomer.current == 1)  # its host is cut off: nothing closes the connection
    begun(first, newcomer)
    until(lambda: newcomer.current == 2)
    assert len(newcomer.owner.states) == 2
    first.enter([6])
    newcomer.thread.join(20)
    assert newcomer.followed


def test_joining_worker_waits_for_admission_after_its_sender_ends() -> None:
    first, newcomer = Migration(0, key_of), Newcomer()
    begun(first, newcomer)
    until(lambda: newcomer.current == 1)
    first.drop()
    newcomer.thread.join(20)
    assert newcomer.current == 2


def test_admission_ends_the_wait_of_a_joining_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    first, newcomer = Migration(0, key_of), Newcomer()
    begun(first, newcomer)
    until(lambda: newcomer.current == 1)
    newcomer.admitted = 3  # the first is lost, and its host silent
    newcomer.thread.join(20)
    assert not newcomer.thread.is_alive()
    monkeypatch.setattr(migration, "MEET", 0.3)
    nobody = Newcomer()
    nobody.thread.join(20)
    assert (nobody.followed, nobody.current) == (False, 1)


def test_end_of_the_sender_is_noticed_while_a_child_holds_the_connection() -> None:
    """As a loader's process has that was forked meanwhile: the newcomer waited for ever, and the team for it."""
    newcomer, first = Newcomer(), Migration(7, key_of)
    begun(first, newcomer)
    until(lambda: newcomer.current == 1)
    child = os.fork()
    if child == 0:
        signal.pause()
        os._exit(0)
    try:
        newcomer.admitted = 7
        first.enter([6])
        newcomer.thread.join(60)
        assert newcomer.followed
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_digests_name_the_tensors_that_differ() -> None:
    here = {"a": torch.ones(4), "b": torch.ones(2, 2), "c": torch.tensor([1.0, float("nan")])}
    there = {"a": torch.ones(4), "b": torch.ones(4), "c": torch.tensor([1.0, float("nan")]), "d": torch.ones(1)}
    assert list(digests(here, there)) == ["a", "b", "c"]
    alike = {name for name, found in digests(here, there).items() if digests(there, there)[name] == found}
    assert alike == {"a", "c"}
    assert digests({"a": torch.tensor([0.0])}, ["a"]) != digests({"a": torch.tensor([-0.0])}, ["a"])
    assert unpack(pack(STATE))["steps"] == 3


@given(st.lists(st.tuples(st.integers(0, 3), st.booleans(), st.booleans()), min_size=1, max_size=12))
def test_state_is_sent_to_each_host_once(workers: list[tuple[int, bool, bool]]) -> None:
    hosts = [host for host, _, _ in workers]
    prepared = [number for number, (_, _, has_most) in enumerate(workers) if has_most]
    holders = [number for number, (_, holds, _) in enumerate(workers) if holds] or [0]
    sources = {n: holders[0] for n in range(len(workers)) if n not in holders}
    have, crossed = set(holders), []
    for taker, source in route_transfers(sources, hosts, prepared).items():
        assert source in have
        have.add(taker)
        if hosts[source] != hosts[taker]:
            crossed.append(hosts[taker])
            near = [number for number in prepared if hosts[number] == hosts[taker]]
            assert taker in near or not near, "a worker that has most of it is the one that receives from another host"
    assert have == set(range(len(workers)))
    assert sorted(crossed) == sorted(set(hosts) - {hosts[holder] for holder in holders})
