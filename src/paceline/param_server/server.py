"""The parameter server process.

It holds whole models, of which a part is its own, in the same objects as a worker: so groups, schedules and clipping
are the user's. It comes to the team as a newcomer does, takes the state as it is then, and is never admitted.
"""

from __future__ import annotations

import json
import secrets
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, Never

import torch

from paceline.base.environment import SERVERS, World, way_to
from paceline.base.handshake import NewConnections
from paceline.checkpoint.tree import pack, unpack
from paceline.comm.compression import add_codes, pack_codes
from paceline.comm.message_reader import damaged, decode_message
from paceline.errors import PacelineError
from paceline.param_server.async_server import AsyncShard, caller
from paceline.param_server.backup_workers import BackupWorkerShard
from paceline.param_server.client import MEET, RANKED, At
from paceline.param_server.parameter_shard import Client, ParameterShard, Steps
from paceline.param_server.protocol import Connection, Kind, Message, exchange
from paceline.team.auth import handshake_key

GRACE = 0.5  # seconds in which a worker whose connection has gone may come again


class ParameterServer:
    """Serves the parameter shards of all trainers to workers and to other servers; `contexts` are its trainers'."""

    def __init__(self, world: World) -> None:
        assert world.store is not None
        self.world, self.number = world, world.rank - SERVERS
        self.contexts: list[Steps] = []
        self._parts: dict[int, ParameterShard] = {}
        self._listener = socket.create_server((world.store[0], 0), backlog=128)
        self._listener.setblocking(False)
        self._salt, self._state = secrets.token_hex(16), b""
        self._key = handshake_key(world.run_dir, self._salt)
        self._strangers = NewConnections[Connection]()
        self._waiting: dict[Connection, Client] = {}  # for those that have not shown yet who they are
        self._clients: list[tuple[Connection, Client]] = []
        self._away: dict[int, float] = {}  # workers whose connections have gone, since when
        self._first: Connection | None = None  # to the first server, from the others
        self._generation, self._used = -1, dict[int, At]()  # those that workers use, the lowest of which is the first
        self._met: At | None = None  # where the first is that is met
        self._at = world.store[0], self._listener.getsockname()[1], self._salt

    def take(self) -> Any:
        """What a server begins with, from the team's first worker, which waits for those that say where they are."""
        self.world.tell("serving", at=self._at)
        self._until(lambda: bool(self._state))
        self.world.tell("holds")
        return unpack(torch.frombuffer(bytearray(self._state), dtype=torch.uint8))

    def serve(self, reached: Callable[[str], None]) -> Never:
        """To the end of the run, with which the process ends. `reached` hears of moments."""
        self._reached = reached
        for number, stepper in enumerate(self.contexts):
            if stepper.plan.in_windows:
                kind = BackupWorkerShard if stepper.plan.backup else AsyncShard
                self._parts[number] = kind(stepper, number, self.number, reached, self._workers)
            elif stepper.plan.server:
                self._parts[number] = ParameterShard(stepper, number, self.number)
        self._until(lambda: False)
        raise AssertionError

    @property
    def _dealing(self) -> list[AsyncShard]:
        return [part for part in self._parts.values() if isinstance(part, AsyncShard)]

    def _workers(self) -> set[int]:
        """The numbers of the connected workers."""
        return {who for link, _ in self._clients if not link.broken and (who := _who(link)) >= 0}

    def _hear_used(self, frame: Message) -> None:
        """Takes over the servers that a worker uses; within a generation their set can only shrink."""
        generation = frame.key[0]
        addresses: dict[int, At] = {int(n): at for n, at in decode_message(frame.text, "servers", "a worker").items()}
        before = self._generation, [*self._used]
        if generation > self._generation:
            self._generation, self._used = generation, addresses
        elif generation == self._generation:
            self._used = {server: at for server, at in self._used.items() if server in addresses}
        if before != (self._generation, [*self._used]):
            self._meet_first()
            for part in self._dealing:
                part.use({*self._used})

    def _meet_first(self) -> None:
        """Servers that deal tell the first one what they have."""
        at = self._used[min(self._used)] if self._used and self._dealing else None
        if self._first is not None and at != self._met:  # it is not heard any more
            self._first.close()
            self._first = None
        if at is None or min(self._used) == self.number or (self._first is not None and not self._first.broken):
            return
        with suppress(OSError):  # it is not there yet, or gone
            key, called = handshake_key(self.world.run_dir, at[2]), socket.create_connection(way_to(*at[:2]), MEET)
            self._first, self._met = Connection(called, lambda frame: [], key, lambda _: f"{-1 - self.number}"), at
            for part in self._dealing:
                part.stand(self._first)

    def _tend(self) -> None:
        """Workers that have not come back in time are lost; who does not show in time that it is known is closed."""
        self._meet_first()
        for link in self._strangers.late(time.monotonic()):
            link.close()
        back = {_who(link) for link, _ in self._clients}
        for worker, since in [*self._away.items()]:
            if worker in back or time.monotonic() - since > GRACE:
                del self._away[worker]
                for part in self._dealing if worker not in back else ():
                    part.lose(worker)

    def _until(self, until: Callable[[], bool]) -> None:
        def handle_inboxes() -> bool:
            self._away |= {_who(link): time.monotonic() for link, _ in self._clients if link.broken}
            self._clients = [one for one in self._clients if not one[0].broken]
            while True:
                self._look_at_strangers()
                for link, client in [*self._clients]:
                    while link.inbox:
                        self._hear(link, client, link.inbox.popleft())
                while (first := self._first) is not None and first.inbox:
                    if (frame := first.inbox.popleft()).kind in (Kind.APPLY, Kind.SUM):
                        self._hear(first, Client(), frame)
                for link in links():
                    link.advance()
                if not any(link.inbox for link in links()):  # what has come meanwhile nobody would wait for
                    return until()

        def links() -> list[Connection]:
            known = [*self._waiting, *(link for link, _ in self._clients)]
            return known if self._first is None or self._first.broken else [*known, self._first]

        while not handle_inboxes():
            exchange(links, handle_inboxes, self._tend, self._listener)
            self._accept()

    def _accept(self) -> None:
        try:
            connection, address = self._listener.accept()
        except OSError:  # none, or it has gone again
            return
        client = Client()
        link = Connection(connection, partial(self._tensors_for, client), self._key)
        self._waiting[link] = client
        if (instead := self._strangers.come(link, address[0], time.monotonic())) is not None:
            instead.close()

    def _look_at_strangers(self) -> None:
        """Who has shown that it is known is a client, and who is closed is forgotten."""
        for link in [link for link in self._waiting if link.known or link.broken]:
            client = self._waiting.pop(link)
            self._strangers.go(link)
            if not link.broken:
                self._clients.append((link, client))

    def _tensors_for(self, client: Client, frame: Message) -> list[torch.Tensor] | None:
        """Returns the tensors that receive pushed gradients. Before it serves, the server accepts only the state."""
        if not self._parts:
            return [] if frame.kind == Kind.STATE else None
        if frame.kind != Kind.PUSH:
            return []
        part = self._parts[frame.trainer]
        if part.code is None:
            return self._buffers(client, frame)
        key = frame.trainer, frame.numbers
        if key not in client.codes:
            client.codes[key] = pack_codes(part.code, [part.params[number].detach() for number in frame.numbers])
        return [client.codes[key]]

    def _buffers(self, client: Client, frame: Message) -> list[torch.Tensor]:
        part, keys = self._parts[frame.trainer], [(frame.trainer, number) for number in frame.numbers]
        for key in keys:
            if key not in client.buffers:
                client.buffers[key] = part.room(key[1])
        return [client.buffers[key] for key in keys]

    def _hear(self, link: Connection, client: Client, frame: Message) -> None:
        if frame.kind == Kind.HELLO:
            link.borrow(_read_greeting(link)[1])
            link.put(Kind.WELCOME, content=f"{int(bool(self._state))} {link.memory if link.near else ''}".encode())
        elif frame.kind == Kind.STATE:
            if not self._state:
                self._state = bytes(frame.text)
                for other, _ in self._clients:
                    other.put(Kind.WELCOME, content=b"1")
        elif frame.kind == Kind.SQUARES:
            if len(frame.text) < RANKED.size:
                raise damaged("rank", caller(_who(link)), "it is cut short")
            client.asked[frame.trainer] = (frame.key, *RANKED.unpack_from(frame.text))
            self._look(link, frame)
        elif frame.kind == Kind.ROWS:
            client.rows[frame.trainer] = frame.text
        elif frame.kind == Kind.COMMIT:
            self._commit(frame)
        elif frame.kind == Kind.USED:
            self._hear_used(frame)
        elif frame.kind == Kind.KEPT:
            kept = self._parts[frame.trainer].kept(frame.key[2])
            link.put(Kind.KEPT, frame.trainer, frame.key, content=[pack(kept)])
        elif frame.kind == Kind.READ:
            self._parts[frame.trainer].read(link, frame)
        elif frame.kind == Kind.PUSH:
            code = self._parts[frame.trainer].code
            if frame.lent is not None:
                client.borrow(frame, code is not None)
            if code is not None:
                gradients = self._buffers(client, frame)
                torch._foreach_zero_(gradients)
                add_codes(code, client.codes[frame.trainer, frame.numbers], gradients)
        else:
            part = self._parts[frame.trainer]
            assert isinstance(part, AsyncShard)
            part.hear(link, client, _who(link), frame)

    def _look(self, link: Connection, frame: Message) -> None:
        """Whether all have pushed their contributions; what is known is told again to whoever asks again."""
        part, key = self._parts[frame.trainer], frame.key
        if part.applied > key[0] or part.ready == key:
            link.put(Kind.SQUARES, frame.trainer, key, content=json.dumps(part.squares).encode())
            return
        asking, size = dict[int, tuple[Connection, Client]](), 0  # by rank; who has come again counts once
        for other, client in self._clients:
            if frame.trainer in client.asked and client.asked[frame.trainer][0] == key:
                _, rank, size = client.asked[frame.trainer]
                asking[rank] = other, client
        if len(asking) < size:
            return
        exactly = decode_message(frame.text[RANKED.size :] or b"null", "largest gradients", "a worker")
        part.add(key, [asking[rank][1] for rank in range(size)], exactly)
        if gone := [one for _, one in asking.values() if not one.still(frame.trainer, key)]:
            part.ready = None  # nobody who counts waits for it
            for one in gone:
                del one.asked[frame.trainer]
            return
        self._reached("summed")
        for other, _ in asking.values():
            other.put(Kind.SQUARES, frame.trainer, key, content=json.dumps(part.squares).encode())

    def _commit(self, frame: Message) -> None:
        """Applies a step that all servers can apply, unless it has."""
        part, key = self._parts[frame.trainer], frame.key
        if part.applied == key[0] and part.ready == key:
            self._reached("reduced")
            part.apply(key[0], decode_message(frame.text, "step", "a worker"))
            self._reached("applied")
        elif part.applied <= key[0]:
            what = f"server {self.number} was told to apply step {key[0] + 1}, of which it has not all contributions"
            raise PacelineError(what, "report this with the run's journal")


def _read_greeting(link: Connection) -> tuple[int, str]:
    """The number of the peer, which is negative for a server, and the address of its shared memory."""
    number, _, memory = (link.greeting or b"-1").decode().partition(" ")
    return int(number), memory


def _who(link: Connection) -> int:
    return _read_greeting(link)[0]
