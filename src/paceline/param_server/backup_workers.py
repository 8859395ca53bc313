"""Synchronous parameter server with backup workers: the slowest pushes are dropped.

The first server decides who makes an update, among those whose pushes are whole at every server, and has all servers
sum these; of the squares that they tell it makes the norm, and tells them to apply the update. A server that deals
instead of it decides anew, unless one has applied what was decided.
"""

from __future__ import annotations

import json
import math
from functools import reduce
from typing import Any

from paceline.base.batching import add_metrics, deal, exact_sum
from paceline.base.mesh import holders
from paceline.comm.message_reader import read_told
from paceline.param_server.async_server import AsyncShard, PushedGradients, caller
from paceline.param_server.client import squares_of
from paceline.param_server.parameter_shard import Client
from paceline.param_server.protocol import Connection, Key, Kind, Message
from paceline.param_server.ssp_clock import BackupScheduler


class BackupWorkerShard(AsyncShard):
    """What a server has of a trainer whose plan says `backup`. `_chosen` make the update that is being summed, whose
    `_squares` are known of these servers, by part; `_summed` tells of which update, and of whom, gradients are here.
    """

    TELLS = "standing by shares", "update by shares"

    def _tickets(self, done: int) -> BackupScheduler:
        self._chosen: list[int] = []
        self._squares: dict[int, dict[str, list[float]]] = {}
        self._summed: tuple[int, list[int]] | None = None
        return BackupScheduler(0.0, done, done, done, backup=self.stepper.plan.backup or 0)

    @property
    def _shares(self) -> BackupScheduler:
        assert isinstance(self.window.tickets, BackupScheduler)
        return self.window.tickets

    def hear(self, link: Connection, client: Client, worker: int, frame: Message) -> None:
        if frame.kind != Kind.SUM:
            return super().hear(link, client, worker, frame)
        if frame.key[0] == self.applied and self.leads:
            self._squares[-1 - worker] = read_told(frame.text, "squares", caller(worker))
        elif frame.key[0] == self.applied:
            self._sum(read_told(frame.text, "workers", caller(worker)))
            link.put(Kind.SUM, self.trainer, frame.key, content=json.dumps(self.squares).encode())
        return self._go_on()

    def use(self, servers: set[int]) -> None:
        self._chosen = []
        super().use(servers)

    def _ask(self, link: Connection, worker: int, frame: Message) -> None:
        start = self.window.tickets.start
        super()._ask(link, worker, frame)
        new = {*self._workers()} - self.window.tickets.clocks.keys() if self.window.tickets.start != start else set()
        for other in new:
            self.window.tickets.join(other)

    def _dealt_to(self, worker: int, sure: int) -> dict[str, Any]:
        shares, dealings = self._shares, self.window.dealings
        new = not shares.members
        if sure < self.applied or (update := shares.deal(worker)) is None:
            return {}
        dealings[update] = dealings.get(update, self._base) + new
        share = shares.members.index(worker), len(shares.members)
        return {"ticket": update, "dealing": dealings[update], "update": update, "share": share}

    def _is_due(self, worker: int, key: Key) -> bool:
        shares, (update, dealing, _) = self._shares, key
        now = update == shares.applied and self.window.dealings.get(update) == dealing and worker in shares.members
        return now and not self._chosen and worker not in shares.came

    def _settle(self, worker: int) -> None:
        """All servers have its share."""
        shares, counts = self._shares, self.pushed[worker].told["count"] > 0
        nobody = {*shares.members} <= shares.idle | {worker}  # whose shares count: the last makes a step that rests
        shares.arrive(worker, counts or nobody)

    def _go_on(self) -> None:
        super()._go_on()
        if self.leads and self._decide():
            self._go_on()

    def _decide(self) -> bool:
        """Whether an update was made, since enough have come."""
        shares, others = self._shares, self.used - {self.server}
        if not self._chosen and shares.chosen:
            self._chosen = shares.chosen
            self._sum(self._chosen)
            self._squares = {self.server: {str(part): found for part, found in self.squares.items()}}
            for server in others:
                text = json.dumps(self._chosen).encode()
                self.peers[server].put(Kind.SUM, self.trainer, (self.applied, 0, 0), content=text)
        if not self._chosen or not self.used <= self._squares.keys():
            return False
        found = list[float]()
        for part in range(self.servers):
            first = next(one for one in holders(part, self.servers, int(self.copies)) if one in self.used)
            found += squares_of(self._squares[first], part, f"server {first}")
        made, told = self._chosen, self._told(self._chosen)
        batches, members = deal(told["micro_batches"], [1.0] * len(shares.members)), shares.members
        late = [[worker, part.start, part.stop] for worker, part in zip(members, batches, strict=True)]
        late = [one for one in late if one[0] not in made and one[1] < one[2] and told["count"] > 0]
        norm = math.sqrt(exact_sum(found)) * told["expected"] / told["count"] if told["count"] > 0 else 0.0
        self.window.dropped += len(self.window.have)  # not all servers have these yet
        self.window.have.clear()
        window = shares.start, shares.end
        self._chosen = []
        self._follow(window, made, norm, late)
        for server in others:
            self._tell(self.peers[server], self.applied - 1, self.window.log[-1])
        for worker in made:
            self.window.last[worker] = self.applied
        return True

    def _made_of(self, one: dict[str, Any]) -> list[Any]:
        return [one["workers"], one["norm"], one["late"]]

    def _follow(self, window: tuple[int, int], *made: Any) -> None:
        """An update of these workers, of that norm; and who was late for it, with which micro-batches."""
        workers, norm, late = made
        if window[0] != self.window.tickets.start:
            self.window.log.clear()
        told = self._told(workers) | {"norm": norm}
        self._shares.keep_up(window, workers)
        self.window.log.append(told["log"] | {"ticket": self.applied, "workers": workers, "norm": norm, "late": late})
        self._reached("reduced")
        if self._summed != (self.applied, workers):
            self._sum(workers)
        records = [pushed.records for pushed in self._of(workers) if pushed.records is not None]
        if records:
            self._merge(reduce(lambda one, other: one + other, records), told["micro_batches"])
        self.apply(self.applied, told)
        self._summed = None
        self._reached("applied")

    def _of(self, workers: list[int]) -> list[PushedGradients]:
        return [self._push_of(worker) for worker in workers]

    def _sum(self, workers: list[int]) -> None:
        """The gradients are those of these, in the order of their shares."""
        clients = [
            Client({(self.trainer, n): grad for n, grad in one.gradients.items()}, rows={self.trainer: one.rows})
            for one in self._of(workers)
        ]
        first = clients[0].buffers
        clients[0].buffers = {key: grad.clone() for key, grad in first.items()}  # it may be summed with others again
        self._add(clients)
        self._summed = self.applied, workers

    def _told(self, workers: list[int]) -> dict[str, Any]:
        """What they have told of their shares, as of one."""
        all_ = [pushed.told for pushed in self._of(workers)]
        metrics: dict[str, tuple[float, float]] = {}
        for told in all_:
            add_metrics(metrics, told["log"]["metrics"])
        unused = sorted(set.intersection(*({*told["unused"]} for told in all_)))
        loss, count = (math.fsum(told[key] for told in all_) for key in ("loss", "count"))
        log = {"missed": 0, "loss": loss, "count": count, "unused": unused, "metrics": metrics}
        log |= {"rows": sum(told["log"]["rows"] for told in all_), "epoch": all_[0]["log"]["epoch"]}
        return {**all_[0], "loss": loss, "count": count, "unused": unused, "log": log}
