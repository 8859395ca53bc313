"""The window of updates that a server assigns work for: requests and pushes of workers, and the log of applied updates.

Workers meet at the end of a window, and get its log. Within it each worker asks the leading server for work, computes
it, pushes its gradients to all servers, and asks again.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from paceline.comm.message_reader import damaged, decode_message
from paceline.param_server.backup_scheduler import BackupScheduler
from paceline.param_server.parameter_shard import Client, ParameterShard
from paceline.param_server.protocol import Connection, Key, Kind, Message, peer_name
from paceline.param_server.ssp_clock import SspScheduler


@dataclass
class PushedGradients:
    """The gradients that a worker pushed for one `ticket`.

    `dealing` says which assignment of the ticket they answer. Dense `gradients` are by parameter number, gradients of
    tables are packed in `rows`. `report` has the count, the loss and the log entry; `records` has what the forwards
    leave in buffers, if the model has such buffers.
    """

    ticket: int
    dealing: int
    report: dict[str, Any]
    gradients: dict[int, torch.Tensor]
    records: torch.Tensor | None
    rows: bytearray


class AppliedUpdate(NamedTuple):
    """An update of the log: the `decision` that other servers need to make it too, and the `entry` for workers."""

    decision: list[Any]
    entry: dict[str, Any]


@dataclass
class Window:
    """The window of one trainer, on one server. Only the leading server, which assigns work, uses the last fields."""

    trainer: int
    server: int
    scheduler: SspScheduler | BackupScheduler
    pushed: dict[int, PushedGradients] = field(default_factory=dict)  # the last push, by worker
    log: list[AppliedUpdate] = field(default_factory=list)  # the window's updates in their order
    requests: list[tuple[Connection, int, Message]] = field(default_factory=list)  # not read yet, with their workers
    # By worker: the request that waits for an answer.
    waiting: dict[int, tuple[Connection, Key]] = field(default_factory=dict)
    # By worker: the servers that have its last push, until the push counts.
    holders: dict[int, set[int]] = field(default_factory=dict)
    # By worker: the number of updates once its last push was applied.
    applied_at: dict[int, int] = field(default_factory=dict)
    # By ticket: the number of its last assignment. Numbers of this server start after `first_dealing`.
    dealings: dict[int, int] = field(default_factory=dict)
    first_dealing: int = 0
    dropped: int = 0  # pushes that do not count: they are repeated, late, or their worker is lost
    stopped: int = -1  # the number of updates after which no window begins any more
    broken: bool = False  # a worker has met an error that ends the run

    # -- pushes -----------------------------------------------------------------------------------------------------

    def add_push(self, shard: ParameterShard, client: Client, worker: int, frame: Message) -> None:
        """Adds a push that has arrived completely."""
        text, _, rest = bytes(frame.text).partition(b"\n")
        records = torch.frombuffer(bytearray(rest), dtype=torch.float64) if rest else None
        rows = client.rows.get(frame.trainer, bytearray())
        report, (ticket, dealing, _) = decode_message(text, "push", peer_name(worker)), frame.key
        self.pushed[worker] = PushedGradients(ticket, dealing, report, client.gradients(shard), records, rows)

    def push_of(self, worker: int) -> PushedGradients:
        """Returns a worker's last push. Raises FormatError if there is none, although another server has applied it."""
        if worker not in self.pushed:
            raise damaged("update", "another server", f"worker {worker} has not pushed to server {self.server}")
        return self.pushed[worker]

    def is_due(self, worker: int, ticket: int, dealing: int) -> bool:
        """Whether a push answers the last assignment of its ticket, and still counts."""
        return self.scheduler.awaits(worker, ticket) and self.dealings.get(ticket) == dealing

    def add_holder(self, server: int, ticket: int, dealing: int, worker: int) -> None:
        """Notes that a server has a worker's push, if that counts; else the worker or the server repeats it."""
        if self.is_due(worker, ticket, dealing):
            self.holders.setdefault(worker, set()).add(server)

    def take_complete_pushes(self, servers: Collection[int]) -> list[int]:
        """Returns the workers whose pushes are at all servers now."""
        workers = [worker for worker, holders in self.holders.items() if holders.issuperset(servers)]
        for worker in workers:
            del self.holders[worker]
        return workers

    def lose(self, worker: int) -> None:
        """Forgets a worker whose connection is lost: its work is assigned again."""
        self.waiting.pop(worker, None)
        self.holders.pop(worker, None)
        self.scheduler.lose(worker)

    # -- assignments ------------------------------------------------------------------------------------------------

    def read_requests(self) -> None:
        """Reads the requests that have arrived. One after the end of the window begins the next window."""
        requests, self.requests = self.requests, []
        for link, worker, frame in requests:
            request, start = decode_message(frame.text, "wish", peer_name(worker)), frame.key[0]
            scheduler = self.scheduler
            if start > scheduler.start:
                scheduler.cut(start)  # workers ended the window here, under another leading server
            if start == scheduler.end and scheduler.ended:
                if request["stop"]:
                    self.stopped = start
                if start != self.stopped:
                    scheduler.advance(request["updates"])
                    self.log.clear()
                    self.dealings.clear()
                    self.applied_at.clear()
                    self.dropped = 0
            scheduler.join(worker)
            if request["stop"]:
                scheduler.stop()
            if "cut" in request:
                scheduler.cut(request["cut"])
            self.broken |= bool(request.get("broken"))
            self.waiting[worker] = link, frame.key

    def ready_workers(self, safe_updates: int) -> list[int]:
        """Returns the workers that can be answered: their last push is applied, and no server can lose it."""
        pending = {worker for worker, update in self.applied_at.items() if update > safe_updates} | self.holders.keys()
        return [worker for worker in self.waiting if worker not in pending]

    def number_dealing(self, ticket: int, is_new: bool) -> int:
        """Returns the number of a ticket's last assignment; a new one gets a number that no other server gives."""
        self.dealings[ticket] = self.dealings.get(ticket, self.first_dealing) + is_new
        return self.dealings[ticket]

    def is_over(self, safe_updates: int) -> bool:
        """Whether the window has ended, and no server can lose an update of it."""
        return self.broken or (self.scheduler.ended and safe_updates == self.scheduler.applied)

    def send_log(self, worker: int) -> None:
        """Answers a worker's request with the log of the window."""
        self.answer(worker, {"log": [update.entry for update in self.log], "dropped": self.dropped})

    def answer(self, worker: int, reply: dict[str, Any]) -> None:
        """Answers a worker's request."""
        link, key = self.waiting.pop(worker)
        link.put(Kind.DEAL, self.trainer, key, content=json.dumps(reply).encode())

    # -- another leading server -------------------------------------------------------------------------------------

    def stop_assigning(self) -> None:
        """Forgets requests and who has which push: this server does not lead any more."""
        self.waiting.clear()
        self.holders.clear()

    def restart(self, workers: Collection[int]) -> None:
        """Starts to assign work to these workers, after following another leading server."""
        self.first_dealing = secrets.randbits(60)
        self.scheduler.take_over(workers)
        self.dealings.clear()
        self.applied_at.clear()
        self.stopped, self.broken = -1, False
