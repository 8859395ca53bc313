"""Parameter servers by their messages, without processes: which pushes a sum takes, and when an update is final.

The servers are real. The shard only counts updates and notes what is summed, and connections note what is sent.
"""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from paceline.param_server.async_server import AsyncServer
from paceline.param_server.client import RANKED
from paceline.param_server.parameter_shard import Client, ParameterShard
from paceline.param_server.protocol import Connection, Key, Kind, Message
from paceline.param_server.sync_server import SyncServer

TRAINER = 0


class Link:
    """A connection that notes the messages which are put into it, as (kind, key, decoded content)."""

    broken = near = False

    def __init__(self) -> None:
        self.sent: list[tuple[int, Key, Any]] = []

    def put(self, kind: int, trainer: int, key: Key, content: bytes) -> None:
        self.sent.append((kind, key, json.loads(content)))

    def take(self) -> list[tuple[int, Key, Any]]:
        """The messages since the last call."""
        sent, self.sent = self.sent, []
        return sent


class Shard:
    """One parameter of one number. `summed` are the gradients of each sum, `updates` those that were applied."""

    trainer, server, exact, all_dense, parts = TRAINER, 0, None, (0,), {0: [0]}

    def __init__(self, copies: int | None = None) -> None:
        self.plan = SimpleNamespace(copies=copies, staleness=None, damping=False)
        self.replica = SimpleNamespace(job=SimpleNamespace(optimizers=[]))
        self.summed: list[list[float]] = []
        self.updates: list[float] = []

    @property
    def applied(self) -> int:
        return len(self.updates)

    def sum_gradients(self, pushed: Any, rows: Any, in_place: bool) -> dict[int, list[float]]:
        self.summed.append([float(one[0]) for one in pushed])
        return {0: [1.0]}

    def set_gradients(self, gradients: dict[int, torch.Tensor], rows: bytearray) -> None:
        self.gradient = float(gradients[0])

    def merge_buffers(self, *_: Any) -> None: ...

    def apply(self, commit: dict[str, Any], oldest: int) -> None:
        self.updates.append(self.gradient)


def message(kind: Kind, key: Key, text: Any = None, raw: bytes = b"") -> Message:
    return Message(kind, TRAINER, key, (), bytearray(raw if text is None else json.dumps(text).encode()))


def worker_with(gradient: float) -> tuple[Link, Client]:
    return Link(), Client(buffers={(TRAINER, 0): torch.tensor([gradient])})


@pytest.mark.parametrize("earlier", [(5, 1, 0), (5, 2, 0), (4, 2, 1)], ids=["generation", "attempt", "step"])
def test_sync_server_sums_pushes_of_one_step_generation_and_attempt(earlier: Key) -> None:
    """A push of an earlier generation is not summed with those of the generation in which the step is repeated."""
    shard, now = Shard(), (5, 2, 1)
    workers = [worker_with(gradient) for gradient in (1.0, 10.0, 100.0)]
    server = SyncServer(cast(ParameterShard, shard), lambda point: None, lambda: cast(Any, workers))

    def ask(worker: int, rank: int, key: Key) -> None:
        link, client = workers[worker]
        raw = RANKED.pack(rank, 2) + b"null"
        server.handle(cast(Connection, link), client, worker, message(Kind.SQUARES, key, raw=raw))

    ask(1, 1, earlier)  # its peer of that time never answers; another worker has its rank now
    ask(0, 0, now)
    assert shard.summed == []
    assert all(link.take() == [] for link, _ in workers)
    ask(2, 1, now)
    assert shard.summed == [[1.0, 100.0]]
    assert [[(kind, key) for kind, key, _ in link.take()] for link, _ in workers] == [
        [(Kind.SQUARES, now)],
        [],
        [(Kind.SQUARES, now)],
    ]


class Servers:
    """Server 0 of two, which leads, with worker 0. Server 1 is this test: `peer` has what server 0 sends it."""

    def __init__(self, copies: int | None) -> None:
        self.shard = Shard(copies)
        self.server = AsyncServer(cast(ParameterShard, self.shard), lambda point: None, lambda: {0})
        self.server.scheduler.bound = 8.0
        self.peer, (self.link, self.client) = Link(), worker_with(1.0)
        self.server.use({0, 1})
        self.from_peer(Kind.STAND, (0, 0, 0), {"applied": 0, "window": [0, 0], "log": [], "has": []})

    def from_peer(self, kind: Kind, key: Key, text: Any = None) -> None:
        self.server.handle(cast(Connection, self.peer), Client(), -2, message(kind, key, text))

    def ask(self) -> list[dict[str, Any]]:
        """Worker 0 asks for work; what it is answered so far."""
        self.from_worker(Kind.DEAL, (0, 0, 0), {"updates": 4, "stop": False})
        return self.answers()

    def answers(self) -> list[dict[str, Any]]:
        return [content for kind, _, content in self.link.take() if kind == Kind.DEAL]

    def push(self, work: dict[str, Any]) -> None:
        """Worker 0 pushes the gradients of its work, which arrive at both servers."""
        key = work["ticket"], work["dealing"], 0
        figures = {"count": 1.0, "loss": 0.5, "unused": [], "norm": 1.0}
        log = {**figures, "rows": 1, "epoch": 0, "metrics": {}}
        self.from_worker(Kind.PUSHED, key, {**figures, "expected": 1.0, "micro_batches": 1, "log": log})
        self.from_peer(Kind.HAVE, key)

    def from_worker(self, kind: Kind, key: Key, text: Any) -> None:
        self.server.handle(cast(Connection, self.link), self.client, 0, message(kind, key, text))


@pytest.mark.parametrize("copies", [None, 1])
def test_async_server_with_copies_gives_out_an_update_once_all_servers_have_applied_it(copies: int | None) -> None:
    """Without copies nothing can be saved of a lost server, and nobody waits for the others."""
    servers = Servers(copies)
    (first,) = servers.ask()
    assert first["update"] == 0
    servers.push(first)
    assert servers.shard.updates == [1.0]
    ((kind, key, (start, end, _)),) = servers.peer.take()
    assert (kind, key, start, end) == (Kind.APPLY, (0, 0, 0), 0, 4)
    answers = servers.ask()
    if copies:
        assert answers == []
        servers.from_peer(Kind.APPLIED, (1, 0, 0))
        answers = servers.answers()
    assert [answer["update"] for answer in answers] == [1]
