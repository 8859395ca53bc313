"""What a thousand workers may not each do for each of the others."""

from __future__ import annotations

import time
from collections import Counter
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from paceline.comm import status as sides
from paceline.comm.status import Side, asker
from paceline.errors import PeerLostError
from paceline.saving import some


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


def test_where_all_are_is_one_question() -> None:
    asked = Asked(dist.HashStore())
    team = [Side(asked, rank, 64) for rank in range(64)]  # type: ignore[arg-type]
    asked.requests.clear()
    assert team[3].others() == [None] * 64
    for one in team[:63]:
        one.publish()
    asked.requests.clear()
    for _ in range(10):
        assert [place is None for place in team[3].others()] == [False] * 63 + [True]
    assert asked.requests == {"multi_get": 10}


def test_what_all_say_is_one_answer() -> None:
    asked = Asked(dist.HashStore())
    for rank in range(64):
        asked.set(f"host/{rank}", str(rank))
    asked.requests.clear()
    assert asker(asked, lambda: False)(*(f"host/{rank}" for rank in range(64))) == [*map(str, range(64))]  # type: ignore[arg-type]
    assert asked.requests == {"check": 1, "multi_get": 1}


def test_who_is_missing_is_found_by_halves() -> None:
    asked = Asked(dist.HashStore())
    keys = [f"host/{rank}" for rank in range(64)]
    for key in keys[:-1]:
        asked.set(key, "")
    with pytest.raises(PeerLostError, match=r"^a worker did not come \(host/63\)"):
        asker(asked, lambda: True)(*keys)  # type: ignore[arg-type]
    assert asked.requests["check"] == 1 + 13


def test_who_has_no_place_yet_has_not_said_anything() -> None:
    asked = Asked(dist.HashStore())
    first, _ = Side(asked, 0, 3), Side(asked, 2, 3)  # type: ignore[arg-type]
    first.publish()
    assert first.others() == [first.here, None, None]


def test_who_waits_long_asks_ever_more_rarely(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a minute of looks, twenty a second."""
    clock = [100.0]
    monkeypatch.setattr(sides, "time", SimpleNamespace(monotonic=lambda: clock[0], sleep=time.sleep))
    monkeypatch.setattr(sides, "LATE", 1e9)
    asked = Asked(dist.HashStore())
    one, _ = Side(asked, 0, 2), Side(asked, 1, 2)  # type: ignore[arg-type]
    for look in range(20, 1200):
        clock[0] = 100.0 + look / 20
        one.look(look / 20, [])
        if one._survey is not None:
            one._survey.exception()  # waits until it is answered, which the next look hears
    assert 40 < asked.requests["multi_get"] < 70


@pytest.mark.parametrize(
    ("workers", "size", "expected"), [(5, 10, 1), (5, 3 << 20, 3), (9, 1 << 40, 9), (1000, 1 << 40, 32)]
)
def test_so_many_write_a_checkpoint(workers: int, size: int, expected: int) -> None:
    assert some([*range(workers)], size) == [*range(expected)]
