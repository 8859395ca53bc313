"""Parameter servers, as a worker sees them: gradients go to processes that hold the optimizer, weights come back
(Li et al., "Scaling Distributed Machine Learning with the Parameter Server", OSDI 2014).

Whole parameters are spread over the servers. In a step each worker pushes the sums of its own micro-batches; a server
adds them up in the order of ranks and tells everybody their squares, of which the norm is made. That all servers have
told them is the vote: only then workers tell them to apply the step, which each does once, whoever asks.
"""

from __future__ import annotations

import json
import math
import socket
import struct
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch

from paceline.comm.buckets import Bucket, zeros
from paceline.comm.frames import Connection, Frame, Key, Kind, exchange
from paceline.comm.group import Group
from paceline.comm.transit import Heard, Transit
from paceline.errors import UsageError
from paceline.mesh import Mesh
from paceline.step import Agreed, exact_sum
from paceline.strategies.chunks import MicroBatch
from paceline.strategies.job import Job, Options, Sums
from paceline.strategies.layout import Layout
from paceline.strategies.replica import Replica
from paceline.world import World

At = tuple[str, int, str]  # host, port, and what is to be said there first
MEET = 10.0  # seconds for a connection to come
RANKED = struct.Struct("<ii")  # of who asks for squares: its rank, and how many workers push
SQUARED = struct.Struct("<d")


def spread(sizes: Sequence[int], servers: int) -> list[int]:
    """The server of each parameter of so many bytes: large ones first, each to who has least."""
    loads, owners = [0] * servers, [0] * len(sizes)
    for number in sorted(range(len(sizes)), key=lambda number: (-sizes[number], number)):
        owners[number] = min(range(servers), key=lambda server: (loads[server], server))
        loads[owners[number]] += sizes[number]
    return owners


class Servers:
    """A worker's connections to `count` servers. `find` tells where they are; `look` raises where it is of no use to
    wait for them; `state` gives what a server is to begin with, where this worker is the one to give it.
    """

    def __init__(
        self,
        count: int,
        worker: int,
        find: Callable[[], Mapping[int, At]],
        look: Callable[[], None],
        state: Callable[[], torch.Tensor | None],
    ) -> None:
        self.count, self.worker, self.find, self.look, self.state = count, worker, find, look, state
        self.links: dict[int, Connection] = {}
        self.met = False  # all have had the state of this run
        self.landings: dict[int, dict[int, torch.Tensor]] = {}  # by trainer and number: where weights arrive
        self._said: dict[int, bool] = {}  # whether it has the state
        self._given: set[int] = set()
        self._told: dict[tuple[int, int], list[tuple[Any, ...]]] = {}  # since a step began, by server and trainer
        self._replies: dict[tuple[int, int, int], Frame] = {}  # the last ones, by server, kind and trainer

    def meet(self, seconds: float) -> bool:
        """Connects with all of them, in so many seconds; whether they have the state of the training."""
        end = time.monotonic() + seconds
        self._wait(lambda: self._have or time.monotonic() > end)
        return self._have

    @property
    def _have(self) -> bool:
        return all(self._said.get(server) for server in range(self.count))

    def put(self, server: int, kind: int, trainer: int, key: Key, *content: Any) -> None:
        """Over a connection that is lost meanwhile it goes again over the next one: servers heed it once."""
        self._replies.pop((server, kind, trainer), None)
        self._told.setdefault((server, trainer), []).append((kind, trainer, key, *content))
        self.links[server].put(kind, trainer, key, *content)

    def begin(self, trainer: int) -> None:
        """A trainer begins a step: what it told of the one before is not told again."""
        for server in range(self.count):
            self._told.pop((server, trainer), None)

    def advance(self) -> None:
        """Sends what goes without waiting."""
        for link in self.links.values():
            if link.sending:
                link.advance()

    def answers(self, servers: Iterable[int], kind: int, trainer: int, key: Key) -> list[Frame]:
        """What all of them answer to what was asked of this step, once they have."""
        asked, replies = [(server, kind, trainer) for server in servers], self._replies
        self._wait(lambda: all(one in replies and replies[one].key == key for one in asked))
        return [replies[one] for one in asked]

    def _wait(self, until: Callable[[], bool]) -> None:
        def heard() -> bool:
            for server, link in self.links.items():
                while link.inbox:
                    self._hear(server, link.inbox.popleft())
            return until()

        exchange(lambda: [*self.links.values()], heard, self._tend)

    def _tend(self) -> None:
        self.look()
        found = self.find()
        for server in range(self.count):
            if server in found and (server not in self.links or self.links[server].broken):
                self._connect(server, found[server])
            if self._said.get(server) is False and server not in self._given and (state := self.state()) is not None:
                self._given.add(server)
                self.links[server].put(Kind.STATE, content=[state])

    def _connect(self, server: int, at: At) -> None:
        with suppress(OSError):  # it is gone again
            link = Connection(socket.create_connection(at[:2], MEET), self._place)
            link.put(Kind.HELLO, content=f"{at[2]} {self.worker}".encode())
            for (other, _), told in self._told.items():
                for frame in told if other == server else ():
                    link.put(*frame)
            self.links[server] = link
            self._said.pop(server, None)
            self._given.discard(server)

    def _place(self, frame: Frame) -> list[torch.Tensor]:
        landing = self.landings.get(frame.trainer, {})
        return [landing[number] for number in frame.numbers]

    def _hear(self, server: int, frame: Frame) -> None:
        if frame.kind == Kind.WELCOME:
            self._said[server] = frame.text == b"1"
        else:
            self._replies[server, frame.kind, frame.trainer] = frame


class Pushes(Transit):
    """Buckets leave for the servers of their parameters."""

    def __init__(self, replica: Served) -> None:
        super().__init__(replica.team, [])
        self._replica = replica

    def send(self, bucket: Bucket) -> None:
        replica, parts = self._replica, dict(bucket.split(bucket.mine.cpu()))
        for server in range(replica.servers.count):
            mine = [number for number in bucket.members if replica.owners[number] == server]
            if mine:
                replica.servers.put(server, Kind.PUSH, replica.number, replica.key, mine, [parts[n] for n in mine])
        replica.account(bucket.mine.nbytes)
        replica.servers.advance()

    def squares(self) -> float | None:
        return None


class Served(Replica):
    """A copy of a model whose optimizer is kept by `servers`, of the trainer with this `number`. What it contributes is
    known by its `key`.
    """

    servers: Servers
    number: int

    def __init__(self, job: Job, group: Group, mesh: Mesh, count: int, team: Group | None = None) -> None:
        outer = (team or group).along("data", "context", mesh=mesh)
        super().__init__(job, Layout(job, zeros), group, outer, mesh, team=team)
        self.owners = spread([param.nbytes for param in job.named.values()], count)
        self.transit = Pushes(self)
        self.key: Key = (0, 0, 0)

    def account(self, size: int) -> None:
        """So many bytes go to servers."""
        entry = self.team.ledger.setdefault("servers", [0, 0.0, 0.0])
        entry[0], entry[1] = entry[0] + 1, entry[1] + size

    def prepare(self) -> None:
        """In a new generation: there is room for what will come."""
        self.servers.landings[self.number] = {
            number: torch.empty(param.numel(), dtype=param.dtype, pin_memory=param.is_cuda)
            for number, param in enumerate(self.job.named.values())
        }

    def met(self, generation: int) -> None:
        """All servers have the state of the training: they alone keep the optimizers' from now on."""
        self.servers.met = True
        for optimizer in self.job.optimizers:
            optimizer.state.clear()

    @torch.no_grad()
    def take_weights(self) -> None:
        """As they have arrived."""
        landing = self.servers.landings[self.number]
        for number, param in enumerate(self.job.named.values()):
            param.copy_(landing[number].view(param.shape))

    def follow_schedule(self, agreed: Agreed) -> None:
        """After an update of the servers."""
        for optimizer in self.job.optimizers:
            optimizer._opt_called = True  # type: ignore[attr-defined]  # or torch warns: it steps elsewhere
        self.updater.follow_schedule(agreed)

    def kept(self) -> list[bytearray]:
        """What each server keeps of its parameters, packed."""
        asked = range(self.servers.count)
        for server in asked:
            self.servers.put(server, Kind.KEPT, self.number, self.key)
        return [frame.text for frame in self.servers.answers(asked, Kind.KEPT, self.number, self.key)]

    def load(self, state: Mapping[str, Any]) -> None:
        if state.get("owed"):
            what = "the checkpoint holds sums that a codec had not sent yet, and server= has no place for them"
            raise UsageError(what, "resume it once without codec= and server=, for a step")
        super().load(state)


class InStep(Served):
    """All workers push to the same step. A contribution is known by the step, the generation, and the attempt in it."""

    def __init__(self, job: Job, group: Group, mesh: Mesh, count: int) -> None:
        super().__init__(job, group, mesh, count)
        self._round = 0, 0  # the generation, and the attempt in it
        self._owed: tuple[Key, Agreed] | None = None  # of an update whose weights have not all come

    def met(self, generation: int) -> None:
        super().met(generation)
        self._round = generation, 0

    def run(self, micro_batches: Sequence[MicroBatch], options: Options, heard: Heard | None = None) -> Sums:
        self.key = (options.step, *self._round)
        self.servers.begin(self.number)
        return super().run(micro_batches, options)

    def norm(self, agreed: Agreed, options: Options) -> float:
        said, asked = RANKED.pack(self.team.rank, self.team.size), range(self.servers.count)
        for server in asked:
            self.servers.put(server, Kind.SQUARES, self.number, self.key, (), said)
        found = [
            SQUARED.unpack(frame.text)[0] for frame in self.servers.answers(asked, Kind.SQUARES, self.number, self.key)
        ]
        return math.sqrt(exact_sum(found)) * options.expected / agreed.count

    def update(self, sums: Sums, agreed: Agreed, options: Options, norm: float) -> None:
        self.runner.carried.merge(sums.records)
        told = {"count": agreed.count, "loss": agreed.loss, "unused": agreed.unused}
        text = json.dumps({**told, "expected": options.expected, "norm": norm}).encode()
        for server in range(self.servers.count):
            self.servers.put(server, Kind.COMMIT, self.number, self.key, (), text)
        self.servers.advance()
        self._owed = self.key, agreed

    def complete(self) -> None:
        """The weights that servers have made of the step."""
        if self._owed is None:
            return
        key, agreed = self._owed
        self.servers.answers(range(self.servers.count), Kind.WEIGHTS, self.number, key)
        self._owed = None
        self.take_weights()
        self.home.applied()
        self.follow_schedule(agreed)

    def abort(self, again: bool = False) -> None:
        super().abort(again)
        self._round = self._round[0], self._round[1] + again


class Ticketed(Served):
    """Training is not in step: this worker makes gradients of whole global batches by itself. A contribution is known
    by its ticket, and how often that was dealt.
    """

    def __init__(self, job: Job, group: Group, mesh: Mesh, count: int) -> None:
        alone = Group(World(rank=group.names[group.rank]))
        alone.ledger = group.ledger
        super().__init__(job, group, mesh, count, alone)
        self._asked = 0
        self._reading: Key = (0, 0, 0)

    def deal(self, start: int, said: Mapping[str, Any]) -> dict[str, Any]:
        """What the first server deals of the window from `start` on, or says at its end; once servers are done with
        what was pushed.
        """
        self._asked += 1
        key = start, self._asked, 0
        self.servers.put(0, Kind.DEAL, self.number, key, (), json.dumps(said).encode())
        (frame,) = self.servers.answers([0], Kind.DEAL, self.number, key)
        self.servers.begin(self.number)
        return json.loads(frame.text)  # type: ignore[no-any-return]

    def ask_weights(self, update: int) -> None:
        """Each server's, as they are after so many updates or more."""
        self._reading = update, self._asked, 0
        for server in range(self.servers.count):
            self.servers.put(server, Kind.READ, self.number, self._reading)
        self.servers.advance()

    def await_weights(self) -> None:
        """Those that were asked for have landed then."""
        self.servers.answers(range(self.servers.count), Kind.READ, self.number, self._reading)

    def push(self, sums: Sums, told: Mapping[str, Any]) -> None:
        """All of the ticket's gradients are on their way: tells of them."""
        records = b"" if sums.records is None else sums.records.cpu().numpy().tobytes()
        text = json.dumps(told).encode() + b"\n"
        for server in range(self.servers.count):
            self.servers.put(server, Kind.PUSHED, self.number, self.key, (), text + (b"" if server else records))
        self.servers.advance()

    def buffers(self) -> bytearray:
        """As the servers have them after the last update, packed."""
        key = 0, self._asked, 0
        self.servers.put(0, Kind.BUFFERS, self.number, key)
        return self.servers.answers([0], Kind.BUFFERS, self.number, key)[0].text


def own_numbers(owners: Sequence[int], server: int) -> Iterator[int]:
    """The parameters of one server."""
    return (number for number, owner in enumerate(owners) if owner == server)
