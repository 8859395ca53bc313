"""What a thousand workers may not each do for each of the others."""

from __future__ import annotations

import threading
import time
from collections import Counter, defaultdict
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from paceline.base.environment import World
from paceline.comm import hierarchical as comm
from paceline.comm import peer_status as sides
from paceline.comm import shared_memory as shared
from paceline.comm.peer_status import PeerStatus, asker
from paceline.comm.rendezvous import _wait_for_all
from paceline.errors import PeerLostError
from paceline.session.checkpoint_manager import limit_writers


class Asked:
    """A store that counts what it is asked."""

    def __init__(self, store: dist.Store) -> None:
        self._store, self.requests = store, Counter[str]()
        self.timeout = timedelta(seconds=60)

    def __getattr__(self, name: str) -> Any:
        def ask(*arguments: Any) -> Any:
            self.requests[name] += 1
            return getattr(self._store, name)(*arguments)

        return ask


def test_addresses_of_all_workers_are_one_question() -> None:
    asked = Asked(dist.HashStore())
    team = [PeerStatus(asked, rank, 64) for rank in range(64)]  # type: ignore[arg-type]
    asked.requests.clear()
    assert team[3].others() == [None] * 64
    for one in team[:63]:
        one.publish()
    asked.requests.clear()
    for _ in range(10):
        assert [place is None for place in team[3].others()] == [False] * 63 + [True]
    assert asked.requests == {"multi_get": 10}


def test_reports_of_all_workers_are_one_answer() -> None:
    asked = Asked(dist.HashStore())
    for rank in range(64):
        asked.set(f"host/{rank}", str(rank))
    asked.requests.clear()
    assert asker(asked, lambda: False)(*(f"host/{rank}" for rank in range(64))) == [*map(str, range(64))]  # type: ignore[arg-type]
    assert asked.requests == {"check": 1, "multi_get": 1}


def test_missing_worker_is_found_by_bisection() -> None:
    asked = Asked(dist.HashStore())
    keys = [f"host/{rank}" for rank in range(64)]
    for key in keys[:-1]:
        asked.set(key, "")
    with pytest.raises(PeerLostError, match=r"^a worker did not join \(host/63\)"):
        asker(asked, lambda: True)(*keys)  # type: ignore[arg-type]
    assert asked.requests["check"] == 1 + 13


def test_worker_without_a_place_has_not_reported() -> None:
    asked = Asked(dist.HashStore())
    first, _ = PeerStatus(asked, 0, 3), PeerStatus(asked, 2, 3)  # type: ignore[arg-type]
    first.publish()
    assert first.others() == [first.local_status, None, None]


def test_long_wait_polls_less_and_less(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a minute of looks, twenty a second."""
    clock = [100.0]
    monkeypatch.setattr(sides, "time", SimpleNamespace(monotonic=lambda: clock[0], sleep=time.sleep))
    monkeypatch.setattr(sides, "LATE", 1e9)
    asked = Asked(dist.HashStore())
    one, _ = PeerStatus(asked, 0, 2), PeerStatus(asked, 1, 2)  # type: ignore[arg-type]
    for look in range(20, 1200):
        clock[0] = 100.0 + look / 20
        one.look(look / 20, [])
        if one._survey is not None:
            one._survey.exception()  # waits until it is answered, which the next look hears
    assert 40 < asked.requests["multi_get"] < 70


class Shared(dist.Store):
    """The store of a team that counts what is asked: who asks for what nobody has set yet waits, and does not ask
    again. Requests and keys by kind, and bytes that were answered.
    """

    def __init__(self, store: dist.Store) -> None:
        super().__init__()
        self._store, self._set, self._lock = store, defaultdict[str, threading.Event](threading.Event), threading.Lock()
        self.requests, self.keys, self.bytes = Counter[str](), Counter[str](), 0

    def _count(self, kind: str, keys: int, size: int = 0) -> None:
        with self._lock:
            self.requests[kind] += 1
            self.keys[kind] += keys
            self.bytes += size

    def set(self, key: str, value: str) -> None:
        self._count("set", 1)
        self._store.set(key, value)
        with self._lock:
            there = self._set[key]
        there.set()

    def compare_set(self, key: str, expected: str, value: str) -> bytes:
        self.set(key, value)
        return value.encode()

    def check(self, keys: list[str]) -> bool:
        self._count("check", len(keys))
        for key in keys:
            with self._lock:
                there = self._set[key]
            assert there.wait(60)
        return bool(self._store.check(keys))

    def multi_get(self, keys: list[str]) -> list[bytes]:
        found = self._store.multi_get(keys)
        self._count("multi_get", len(keys), sum(map(len, found)))
        return list(found)


@pytest.mark.parametrize(("hosts", "each"), [(8, 4), pytest.param(125, 8, marks=pytest.mark.slow)])
def test_questions_of_a_generation_grow_with_its_workers(
    hosts: int, each: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its workers are threads on hosts that are names: they meet, share real memory and tell gloo whom to connect."""
    size, groups, lock = hosts * each, list[tuple[int, int]](), threading.Lock()
    place, devices = threading.local(), {"create_device": dict, "create_default_device": dict}

    def connect(_: dist.Store, rank: int, size: int, *__: Any, **___: Any) -> None:
        with lock:
            groups.append((rank, size))

    monkeypatch.setattr(comm, "host_key", lambda: f"host {place.rank // each}")
    monkeypatch.setattr(comm, "Gloo", connect)
    monkeypatch.setattr(comm, "MESH", 0)
    monkeypatch.setattr(shared, "BLOCK", 4096)
    monkeypatch.setattr(comm, "dist", SimpleNamespace(**{**vars(dist), "ProcessGroupGloo": SimpleNamespace(**devices)}))
    server = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    asked, made = Shared(server), list[comm.HierarchicalTransport]()

    def work(rank: int) -> None:
        place.rank = rank
        _wait_for_all(asked, World(rank=rank, size=size), lambda: False)
        PeerStatus(asked, rank, size)
        made.append(comm.HierarchicalTransport(asked, rank, size, "", lambda: False))

    workers = [threading.Thread(target=work, args=(rank,)) for rank in range(size)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert len(made) == size
    assert [[*host] for host in made[0].hosts] == [[*range(at, at + each)] for at in range(0, size, each)]
    for one in made:
        one.close()
    # The leaders, twice: sums, and what goes ahead of them.
    assert Counter(groups) == {(rank, hosts): 2 for rank in range(hosts)}
    assert asked.requests == {"set": 5 * size + 3 * hosts + 4, "check": 6 * size, "multi_get": 6 * size}
    # Three times somebody asks all workers, once a leader all of its host, once one all leaders; and each its own host.
    once = 3 * (2 * size - 1) + size + (hosts * each + size - hosts) + (hosts + size - 1)
    assert asked.keys["check"] == once
    assert asked.keys["multi_get"] == once - (2 * size - 1) + size * each
    assert asked.bytes < size * (8 * size + 128 * each + 2 * hosts)  # each hears who is on which host


@pytest.mark.parametrize(
    ("workers", "size", "expected"), [(5, 10, 1), (5, 3 << 20, 3), (9, 1 << 40, 9), (1000, 1 << 40, 32)]
)
def test_number_of_checkpoint_writers(workers: int, size: int, expected: int) -> None:
    assert limit_writers([*range(workers)], size) == [*range(expected)]
