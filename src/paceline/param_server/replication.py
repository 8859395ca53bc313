"""Replication between a trainer's servers: takes pushes or drops late ones; all make the same updates in one order.

The lowest of the servers that workers use leads. A push counts once it is complete at every server: the others tell the
leading server what they have, which decides the next update and tells them. So an update is made by all servers or by
none. Where servers have copies of each other's parts, the leading server acknowledges a push once all have applied it.
If the leading server is lost the next one takes over. The others report their standing: which updates and pushes they
have. Servers that are behind follow the one that is furthest, and work that is not applied is assigned again.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection
from typing import Any

from paceline.base.text import plural
from paceline.comm.message_reader import damaged, decode_message
from paceline.param_server.parameter_shard import Client, ParameterShard
from paceline.param_server.protocol import Connection, Kind, Message
from paceline.param_server.window import Window

Follow = Callable[[tuple[int, int], list[Any]], None]


class Replication:
    """What one server knows of the other servers of a trainer: of the `shard`, and of the `window` that they share.

    `used` are the servers that workers use now. The leading server has `peers`, the connections to the others, and
    `applied_by`, the updates that each has applied; the others have `leader`, the connection to it. The message types
    of standings and updates are names in `paceline.comm.message_types`. `follow` makes an update that another server
    has made or decided: it gets the window (start, end) and the decision.
    """

    def __init__(
        self, shard: ParameterShard, window: Window, standing_type: str, update_type: str, follow: Follow
    ) -> None:
        self.shard, self.window, self._follow = shard, window, follow
        self.trainer, self.server = shard.trainer, shard.server
        self.has_copies = bool(shard.plan.copies)
        self.used: set[int] = set()
        self.leads = False
        self.leader: Connection | None = None
        self.peers: dict[int, Connection] = {}
        self.applied_by: dict[int, int] = {}
        self._types = standing_type, update_type
        self._standings: dict[int, dict[str, Any]] = {}  # reports that are not read yet, by server

    @property
    def others(self) -> set[int]:
        """The other servers that workers use."""
        return self.used - {self.server}

    @property
    def safe_updates(self) -> int:
        """The updates of this server that no loss can undo: all others have applied them, if there are copies."""
        others = self.others if self.has_copies else ()
        return min([self.shard.applied, *(self.applied_by.get(server, 0) for server in others)])

    def handle(self, link: Connection, client: Client, worker: int, frame: Message) -> None:
        """Handles a message of a worker, or of another server, whose number is negative: -2 is server 1."""
        server = -1 - worker
        if frame.kind == Kind.DEAL:
            self.window.requests.append((link, worker, frame))
        elif frame.kind == Kind.PUSHED:
            self._take_push(client, worker, frame)
        elif frame.kind == Kind.HAVE:
            self.window.add_holder(server, *frame.key)
        elif frame.kind == Kind.STAND:
            self._add_standing(server, link, frame)
        elif frame.kind == Kind.APPLIED:
            self.applied_by[server] = frame.key[0]
        elif frame.kind == Kind.APPLY and frame.key[0] == self.shard.applied:
            self._follow_leader(link, server, frame)

    def use(self, servers: set[int]) -> None:
        """Takes over the set of servers that workers use. It grows, or gets another lowest, only between windows."""
        self.used = servers
        for server in self.peers.keys() - servers:
            del self.peers[server]
        if min(servers) == self.server:
            self.leader = None
        if min(servers) != self.server or not servers <= {self.server, *self.peers}:
            self.leads = False
            self.window.stop_assigning()

    def _take_push(self, client: Client, worker: int, frame: Message) -> None:
        """Takes a push that has arrived completely, unless it does not count any more, and tells the leading server."""
        ticket, dealing, _ = frame.key
        if self.leads and not self.window.is_due(worker, ticket, dealing):
            self.window.dropped += 1  # it is repeated, late, or its ticket was assigned again
            return
        self.window.add_push(self.shard, client, worker, frame)
        if self.leads:
            self.window.add_holder(self.server, ticket, dealing, worker)
        elif self.leader is not None:  # else the next report says so
            self.leader.put(Kind.HAVE, self.trainer, (ticket, dealing, worker))

    # -- the leading server -----------------------------------------------------------------------------------------

    def _add_standing(self, server: int, link: Connection, frame: Message) -> None:
        """Stores a server's report, and its connection."""
        self._standings[server] = decode_message(frame.text, self._types[0], f"server {server}")
        self.peers[server] = link

    @property
    def has_reports(self) -> bool:
        """Whether this server starts to lead, or leads and has new reports: all others are connected."""
        others = self.others
        if self.server != min(self.used, default=-1) or (self.leads and self._standings.keys().isdisjoint(others)):
            return False
        return all(server in self.peers and not self.peers[server].broken for server in others)

    def read_reports(self, workers: Collection[int]) -> None:
        """Starts to lead, or goes on, once `has_reports`: makes the updates that others have reported and this server
        lacks, sends the others those that they lack, and assigns work to these workers.
        """
        self._catch_up()
        self._start_leading(workers)

    def _catch_up(self) -> None:
        """Makes the updates that other servers have reported and this one lacks, in their order."""
        standings = [self._standings[server] for server in self.others if server in self._standings]
        for one in sorted(standings, key=lambda one: -int(one["applied"])):
            ahead = max(0, one["applied"] - self.shard.applied)
            for decision in one["log"][len(one["log"]) - ahead :]:
                self._follow((one["window"][0], one["window"][1]), decision)

    def _start_leading(self, workers: Collection[int]) -> None:
        """Reads the reports: sends the servers the updates they lack, and counts the pushes they have.

        Starts to assign work to these workers, unless this server leads already.
        """
        window, start = self.window, self.window.scheduler.start
        standings = {server: one for server, one in self._standings.items() if server in self.used}
        self._standings.clear()
        for server, one in standings.items():
            self.applied_by[server] = one["applied"]
            if one["applied"] < start:
                why = f"it reports {plural(one['applied'], 'update')}, but the window began after {start}"
                raise damaged(self._types[0], f"server {server}", why)
            for number in range(one["applied"], self.shard.applied):
                self._send_update(server, number)
        if not self.leads:
            self.leads = True
            window.restart(workers)
        for server, one in standings.items():
            for worker, ticket, dealing in one["has"]:
                window.add_holder(server, ticket, dealing, worker)

    def send_last(self, number: int) -> None:
        """Tells all others to make the last update of the log, which has this number."""
        for server in self.others:
            self._send_update(server, number)

    def _send_update(self, server: int, number: int) -> None:
        scheduler, log = self.window.scheduler, self.window.log
        text = json.dumps([scheduler.start, scheduler.end, log[number - scheduler.start].decision])
        self.peers[server].put(Kind.APPLY, self.trainer, (number, 0, 0), content=text.encode())

    # -- the others -------------------------------------------------------------------------------------------------

    def report(self, leader: Connection) -> None:
        """Reports to the leading server which updates and pushes this server has."""
        self.leader, scheduler = leader, self.window.scheduler
        standing = {
            "applied": self.shard.applied,
            "window": [scheduler.start, scheduler.end],
            "log": [update.decision for update in self.window.log],
            "has": [[worker, pushed.ticket, pushed.dealing] for worker, pushed in self.window.pushed.items()],
        }
        leader.put(Kind.STAND, self.trainer, content=json.dumps(standing).encode())

    def _follow_leader(self, link: Connection, server: int, frame: Message) -> None:
        """Makes an update that the leading server decided, and tells it so if it waits for that."""
        start, end, decision = decode_message(frame.text, self._types[1], f"server {server}")
        self._follow((start, end), decision)
        if self.has_copies:
            link.put(Kind.APPLIED, self.trainer, (self.shard.applied, 0, 0))
