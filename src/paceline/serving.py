"""A parameter server: it runs the user's script up to its first loop, which builds the optimizers, and then serves.

It holds whole models, of which a part is its own, in the same objects as a worker: so groups, schedules and clipping
are the user's. It comes to the team as a newcomer does, takes the state as it is then, and is never admitted.
"""

from __future__ import annotations

import json
import secrets
import socket
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Never, Protocol

import torch

from paceline.checkpoint.tree import pack, unpack
from paceline.comm.frames import Connection, Frame, Key, Kind, exchange
from paceline.errors import PacelineError
from paceline.plan import Plan
from paceline.step import NOTHING
from paceline.strategies.job import Options
from paceline.strategies.replica import Replica
from paceline.strategies.servers import RANKED, SQUARED, own_numbers, spread
from paceline.strategies.state import optimizer_state
from paceline.world import SERVERS, World


class Steps(Protocol):
    """What makes a trainer's steps, where servers do not."""

    replica: Replica
    plan: Plan
    done: int


@dataclass
class Client:
    """A worker: what it pushes lands in `buffers`, by trainer and parameter. It has `asked` for squares, by trainer:
    of which contribution, as which rank of how many.
    """

    buffers: dict[tuple[int, int], torch.Tensor] = field(default_factory=dict)
    asked: dict[int, tuple[Key, int, int]] = field(default_factory=dict)


class Holding:
    """What this server has of a trainer: the parameters of these numbers, after `applied` steps. `ready` is the
    contribution whose sums are their gradients, `squares` what it, or else the last step, told.
    """

    def __init__(self, stepper: Steps, servers: int, server: int) -> None:
        self.stepper, self.replica = stepper, stepper.replica
        replica = self.replica
        self.params = [*replica.job.named.values()]
        self.numbers = [*own_numbers(spread([param.nbytes for param in self.params], servers), server)]
        self.squares = 0.0
        self.ready: Key | None = None

    @property
    def applied(self) -> int:
        return self.stepper.done

    def add(self, key: Key, pushed: list[dict[int, torch.Tensor]]) -> None:
        """Sums what workers have pushed, in the order of their ranks."""
        first, *others = ([one[number] for number in self.numbers] for one in pushed)
        for more in others:
            torch._foreach_add_(first, more)
        for number, grad in zip(self.numbers, first, strict=True):
            self.params[number].grad = grad.view(self.params[number].shape)
        self.ready, self.squares = key, float(self.replica.home.squares(0).sum())

    def apply(self, step: int, told: dict[str, Any]) -> None:
        """The step, once."""
        agreed = replace(NOTHING, count=told["count"], loss=told["loss"], unused=tuple(told["unused"]))
        self.replica.updater.apply(agreed, Options(step, told["expected"], 0), told["norm"])
        self.stepper.done, self.ready = step + 1, None

    def kept(self) -> list[dict[str, Any]]:
        """Of each optimizer, by name."""
        updater = self.replica.updater
        return [optimizer_state(one, updater.names, {}, 0)["state"] for one in self.replica.job.optimizers]


class ParameterServer:
    """This process's end of all connections. `steppers` are those of its trainers."""

    def __init__(self, world: World) -> None:
        assert world.store is not None
        self.number = world.rank - SERVERS
        self.steppers: list[Steps] = []
        self._parts: dict[int, Holding] = {}
        self._listener = socket.create_server((world.store[0], 0), backlog=128)
        self._listener.setblocking(False)
        self._secret, self._state = secrets.token_hex(16), b""
        self._clients: list[tuple[Connection, Client]] = []
        world.tell("serving", at=[world.store[0], self._listener.getsockname()[1], self._secret])

    def take(self) -> Any:
        """What a server begins with, from the team's first worker."""
        self._until(lambda: bool(self._state))
        return unpack(torch.frombuffer(bytearray(self._state), dtype=torch.uint8))

    def serve(self, reached: Callable[[str], None]) -> Never:
        """To the end of the run, with which the process ends; `reached` hears of moments."""
        self._reached = reached
        for number, stepper in enumerate(self.steppers):
            if stepper.plan.server:
                self._parts[number] = Holding(stepper, stepper.plan.server, self.number)
        self._until(lambda: False)
        raise AssertionError

    def _until(self, until: Callable[[], bool]) -> None:
        def heard() -> bool:
            self._clients = [one for one in self._clients if not one[0].broken]
            for link, client in [*self._clients]:
                while link.inbox:
                    self._hear(link, client, link.inbox.popleft())
                link.advance()
            return until()

        while not heard():
            exchange(lambda: [link for link, _ in self._clients], heard, lambda: None, self._listener)
            self._accept()

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:  # none, or it has gone again
            return
        client = Client()
        self._clients.append((Connection(connection, partial(self._place, client), self._secret), client))

    def _place(self, client: Client, frame: Frame) -> list[torch.Tensor] | None:
        """Where pushed gradients land. Before this server serves it takes the state alone."""
        if not self._parts:
            return [] if frame.kind == Kind.STATE else None
        if frame.kind != Kind.PUSH:
            return []
        params = self._parts[frame.trainer].params
        return [self._buffer(client, frame.trainer, number, params[number]) for number in frame.numbers]

    @staticmethod
    def _buffer(client: Client, trainer: int, number: int, param: torch.Tensor) -> torch.Tensor:
        key = trainer, number
        if key not in client.buffers:
            client.buffers[key] = torch.empty(param.numel(), dtype=param.dtype)
        return client.buffers[key]

    def _hear(self, link: Connection, client: Client, frame: Frame) -> None:
        if frame.kind == Kind.HELLO:
            link.put(Kind.WELCOME, content=b"1" if self._state else b"0")
        elif frame.kind == Kind.STATE:
            if not self._state:
                self._state = bytes(frame.text)
                for other, _ in self._clients:
                    other.put(Kind.WELCOME, content=b"1")
        elif frame.kind == Kind.SQUARES:
            client.asked[frame.trainer] = (frame.key, *RANKED.unpack(frame.text))
            self._look(link, frame)
        elif frame.kind == Kind.COMMIT:
            self._commit(link, frame)
        elif frame.kind == Kind.KEPT:
            link.put(Kind.KEPT, frame.trainer, frame.key, content=[pack(self._parts[frame.trainer].kept())])

    def _look(self, link: Connection, frame: Frame) -> None:
        """Whether all have pushed their contributions; what is known is told again to whoever asks again."""
        part, key = self._parts[frame.trainer], frame.key
        told = SQUARED.pack(part.squares)
        if part.applied > key[0] or part.ready == key:
            link.put(Kind.SQUARES, frame.trainer, key, content=told)
            return
        asking, size = dict[int, tuple[Connection, Client]](), 0  # by rank; who has come again counts once
        for other, client in self._clients:
            if frame.trainer in client.asked and client.asked[frame.trainer][0] == key:
                _, rank, size = client.asked[frame.trainer]
                asking[rank] = other, client
        if len(asking) < size:
            return
        pushed = (asking[rank][1].buffers for rank in range(size))
        part.add(key, [{number: buffers[frame.trainer, number] for number in part.numbers} for buffers in pushed])
        self._reached("summed")
        for other, _ in asking.values():
            other.put(Kind.SQUARES, frame.trainer, key, content=SQUARED.pack(part.squares))

    def _commit(self, link: Connection, frame: Frame) -> None:
        """Applies a step that all servers can apply, unless it has, and tells what became of the weights."""
        part, key = self._parts[frame.trainer], frame.key
        if part.applied == key[0] and part.ready == key:
            self._reached("reduced")
            part.apply(key[0], json.loads(frame.text))
            self._reached("applied")
        elif part.applied <= key[0]:
            what = f"server {self.number} was told to apply step {key[0] + 1}, of which it has not all contributions"
            raise PacelineError(what, "report this with the run's journal")
        weights = [part.params[number].detach().contiguous() for number in part.numbers]
        link.put(Kind.WEIGHTS, frame.trainer, key, part.numbers, weights)
