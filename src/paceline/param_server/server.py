"""The process of a parameter server: its connections to workers and to other servers, and a server for each trainer.

It runs the user's script up to the training loop, like a worker, and holds complete models, but updates only a part of
each. So parameter groups, schedules and clipping are the user's. It receives the training state from the first worker,
as a new worker does, but never becomes a member of the team.
"""

from __future__ import annotations

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
from paceline.checkpoint.tree import unpack
from paceline.comm.message_reader import decode_message
from paceline.param_server.async_server import AsyncServer
from paceline.param_server.backup_workers import BackupWorkerServer
from paceline.param_server.client import MEET, At
from paceline.param_server.parameter_shard import Client, ParameterShard, ServedTrainer
from paceline.param_server.protocol import Connection, Kind, Message, exchange
from paceline.param_server.sync_server import SyncServer
from paceline.team.auth import handshake_key

GRACE = 0.5  # seconds in which a worker whose connection is lost may connect again


class ParameterServer:
    """Serves the parameter shards of all trainers to workers; `contexts` are of its trainers."""

    def __init__(self, world: World) -> None:
        assert world.store is not None
        self.world, self.number = world, world.rank - SERVERS
        self.contexts: list[ServedTrainer] = []
        self._servers: dict[int, SyncServer | AsyncServer | BackupWorkerServer] = {}  # by trainer
        self._listener = socket.create_server((world.store[0], 0), backlog=128)
        self._listener.setblocking(False)
        self._salt, self._state = secrets.token_hex(16), b""
        self._key = handshake_key(world.run_dir, self._salt)
        self._strangers = NewConnections[Connection]()
        self._waiting: dict[Connection, Client] = {}  # connections that have not proven yet who they are
        self._clients: list[tuple[Connection, Client]] = []
        self._away: dict[int, float] = {}  # workers whose connections are lost, since when
        self._leader: Connection | None = None  # from another server to the leading one
        self._generation, self._used = -1, dict[int, At]()  # servers that workers use: the lowest one leads
        self._leader_at: At | None = None  # the address that `_leader` goes to
        self._at = world.store[0], self._listener.getsockname()[1], self._salt

    def take(self) -> Any:
        """Publishes this server's address, and returns the training state that the team's first worker sends."""
        self.world.tell("serving", at=self._at)
        self._until(lambda: bool(self._state))
        self.world.tell("holds")
        return unpack(torch.frombuffer(bytearray(self._state), dtype=torch.uint8))

    def serve(self, reached: Callable[[str], None]) -> Never:
        """Serves to the end of the run, when the process is ended. `reached` gets the names of fault points."""
        for number, context in enumerate(self.contexts):
            if not context.plan.server:
                continue
            shard = ParameterShard(context, number, self.number)
            if not context.plan.in_windows:
                self._servers[number] = SyncServer(shard, reached, lambda: self._clients)
            elif context.plan.backup:
                self._servers[number] = BackupWorkerServer(shard, reached, self._workers)
            else:
                self._servers[number] = AsyncServer(shard, reached, self._workers)
        self._until(lambda: False)
        raise AssertionError

    @property
    def _replicated(self) -> list[AsyncServer | BackupWorkerServer]:
        """The trainers' servers that follow a leading server."""
        return [server for server in self._servers.values() if not isinstance(server, SyncServer)]

    def _workers(self) -> set[int]:
        """The numbers of the connected workers."""
        return {who for link, _ in self._clients if not link.broken and (who := _peer_number(link)) >= 0}

    def _take_used(self, frame: Message) -> None:
        """Takes over the servers that a worker uses; within a generation their set can only shrink."""
        generation = frame.key[0]
        addresses: dict[int, At] = {int(n): at for n, at in decode_message(frame.text, "servers", "a worker").items()}
        before = self._generation, [*self._used]
        if generation > self._generation:
            self._generation, self._used = generation, addresses
        elif generation == self._generation:
            self._used = {server: at for server, at in self._used.items() if server in addresses}
        if before != (self._generation, [*self._used]):
            self._connect_leader()
            for server in self._replicated:
                server.use({*self._used})

    def _connect_leader(self) -> None:
        """Connects with the leading server, and reports to it what this server has."""
        at = self._used[min(self._used)] if self._used and self._replicated else None
        if self._leader is not None and at != self._leader_at:  # another one leads
            self._leader.close()
            self._leader = None
        if at is None or min(self._used) == self.number or (self._leader is not None and not self._leader.broken):
            return
        with suppress(OSError):  # it is not there yet, or gone
            key, called = handshake_key(self.world.run_dir, at[2]), socket.create_connection(way_to(*at[:2]), MEET)
            self._leader = Connection(called, lambda frame: [], key, lambda _: f"{-1 - self.number}")
            self._leader.greeting = f"{-1 - min(self._used)}".encode()  # who is called says nothing of itself
            self._leader_at = at
            for server in self._replicated:
                server.replication.report(self._leader)

    def _tend(self) -> None:
        """Drops workers that have not connected again in time, and connections that do not prove who they are."""
        self._connect_leader()
        for link in self._strangers.late(time.monotonic()):
            link.close()
        connected = {_peer_number(link) for link, _ in self._clients}
        for worker, since in [*self._away.items()]:
            if worker in connected or time.monotonic() - since > GRACE:
                del self._away[worker]
                for server in self._replicated if worker not in connected else ():
                    server.lose(worker)

    def _until(self, until: Callable[[], bool]) -> None:
        def handle_inboxes() -> bool:
            self._away |= {_peer_number(link): time.monotonic() for link, _ in self._clients if link.broken}
            self._clients = [one for one in self._clients if not one[0].broken]
            while True:
                self._admit_clients()
                for link, client in [*self._clients]:
                    while link.inbox:
                        self._handle(link, client, link.inbox.popleft())
                while (leader := self._leader) is not None and leader.inbox:
                    if (frame := leader.inbox.popleft()).kind in (Kind.APPLY, Kind.SUM):
                        self._handle(leader, Client(), frame)
                for link in links():
                    link.advance()
                if not any(link.inbox for link in links()):  # `exchange` waits for sockets only
                    return until()

        def links() -> list[Connection]:
            known = [*self._waiting, *(link for link, _ in self._clients)]
            return known if self._leader is None or self._leader.broken else [*known, self._leader]

        while not handle_inboxes():
            exchange(links, handle_inboxes, self._tend, self._listener)
            self._accept()

    def _accept(self) -> None:
        try:
            connection, address = self._listener.accept()
        except OSError:  # there is none, or it is gone again
            return
        client = Client()
        link = Connection(connection, partial(self._tensors_for, client), self._key)
        self._waiting[link] = client
        if (instead := self._strangers.come(link, address[0], time.monotonic())) is not None:
            instead.close()

    def _admit_clients(self) -> None:
        """Makes connections that have proven who they are clients, and forgets those that are closed."""
        for link in [link for link in self._waiting if link.known or link.broken]:
            client = self._waiting.pop(link)
            self._strangers.go(link)
            if not link.broken:
                self._clients.append((link, client))

    def _tensors_for(self, client: Client, frame: Message) -> list[torch.Tensor] | None:
        """Returns the tensors that receive pushed gradients. Before it serves, the server accepts only the state."""
        if not self._servers:
            return [] if frame.kind == Kind.STATE else None
        return client.allocate(self._servers[frame.trainer].shard, frame) if frame.kind == Kind.PUSH else []

    def _handle(self, link: Connection, client: Client, frame: Message) -> None:
        """Handles a message: those about connections and pushed gradients here, others by the trainer's server."""
        if frame.kind == Kind.HELLO:
            link.borrow(_read_greeting(link)[1])
            link.put(Kind.WELCOME, content=f"{int(bool(self._state))} {link.memory if link.near else ''}".encode())
        elif frame.kind == Kind.STATE:
            if not self._state:
                self._state = bytes(frame.text)
                for other, _ in self._clients:
                    other.put(Kind.WELCOME, content=b"1")
        elif frame.kind == Kind.USED:
            self._take_used(frame)
        elif frame.kind == Kind.PUSH:
            client.take(self._servers[frame.trainer].shard, frame)
        elif frame.kind == Kind.ROWS:
            client.rows[frame.trainer] = frame.text
        elif frame.kind == Kind.KEPT:
            self._servers[frame.trainer].shard.send_optimizer_state(link, frame)
        else:
            self._servers[frame.trainer].handle(link, client, _peer_number(link), frame)


def _read_greeting(link: Connection) -> tuple[int, str]:
    """Returns the number of the peer, which is negative for a server, and the address of its shared memory."""
    number, _, memory = link.greeting.decode().partition(" ")
    return int(number), memory


def _peer_number(link: Connection) -> int:
    return _read_greeting(link)[0]
