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
from paceline.comm.message_reader import decode_message
from paceline.param_server.async_server import AsyncShard, PushedGradients, caller
from paceline.param_server.client import squares_of
from paceline.param_server.parameter_shard import Client
from paceline.param_server.protocol import Connection, Key, Kind, Message
from paceline.param_server.ssp_clock import BackupScheduler


class BackupWorkerShard(AsyncShard):
    """A parameter shard whose updates wait for all workers but the plan's `backup`.

    `_chosen` are the workers whose gradients make the update under way; `_squares` has the squares that servers have
    reported for it, by server and part. `_summed` is the update, and the workers, that the summed gradients are for.
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
        """Handles a message, among them those between servers about the sum of the chosen workers' gradients."""
        if frame.kind != Kind.SUM:
            return super().hear(link, client, worker, frame)
        if frame.key[0] == self.applied and self.leads:
            self._squares[-1 - worker] = decode_message(frame.text, "squares", caller(worker))
        elif frame.key[0] == self.applied:
            self._sum(decode_message(frame.text, "workers", caller(worker)))
            link.put(Kind.SUM, self.trainer, frame.key, content=json.dumps(self.squares).encode())
        return self._go_on()

    def use(self, servers: set[int]) -> None:
        """Takes over the set of servers that workers use; the workers of the update are chosen anew."""
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
        """Counts a share that all servers have."""
        shares, counts = self._shares, self.pushed[worker].report["count"] > 0
        nobody = {*shares.members} <= shares.idle | {worker}  # whose shares count: the last makes a step that rests
        shares.arrive(worker, counts or nobody)

    def _go_on(self) -> None:
        super()._go_on()
        if self.leads and self._decide():
            self._go_on()

    def _decide(self) -> bool:
        """Makes an update once enough shares have arrived, and returns whether it did."""
        shares, others = self._shares, self.used - {self.server}
        if not self._chosen and shares.chosen:
            self._chosen = shares.chosen
            self._sum(self._chosen)
            self._squares = {self.server: {str(part): squares for part, squares in self.squares.items()}}
            for server in others:
                text = json.dumps(self._chosen).encode()
                self.peers[server].put(Kind.SUM, self.trainer, (self.applied, 0, 0), content=text)
        if not self._chosen or not self.used <= self._squares.keys():
            return False
        squares = list[float]()
        for part in range(self.servers):
            first = next(one for one in holders(part, self.servers, int(self.copies)) if one in self.used)
            squares += squares_of(self._squares[first], part, f"server {first}")
        made, report = self._chosen, self._combine_reports(self._chosen)
        batches, members = deal(report["micro_batches"], [1.0] * len(shares.members)), shares.members
        late = [[worker, part.start, part.stop] for worker, part in zip(members, batches, strict=True)]
        late = [one for one in late if one[0] not in made and one[1] < one[2] and report["count"] > 0]
        norm = math.sqrt(exact_sum(squares)) * report["expected"] / report["count"] if report["count"] > 0 else 0.0
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
        """Applies an update: `made` has its workers, the norm, and who was late for it with which micro-batches."""
        workers, norm, late = made
        if window[0] != self.window.tickets.start:
            self.window.log.clear()
        report = self._combine_reports(workers) | {"norm": norm}
        self._shares.keep_up(window, workers)
        self.window.log.append(report["log"] | {"ticket": self.applied, "workers": workers, "norm": norm, "late": late})
        self._reached("reduced")
        if self._summed != (self.applied, workers):
            self._sum(workers)
        records = [pushed.records for pushed in self._of(workers) if pushed.records is not None]
        if records:
            self._merge(reduce(lambda one, other: one + other, records), report["micro_batches"])
        self.apply(self.applied, report)
        self._summed = None
        self._reached("applied")

    def _of(self, workers: list[int]) -> list[PushedGradients]:
        return [self._push_of(worker) for worker in workers]

    def _sum(self, workers: list[int]) -> None:
        """Sums the gradients of these workers, in the order of their shares."""
        clients = [
            Client({(self.trainer, n): grad for n, grad in one.gradients.items()}, rows={self.trainer: one.rows})
            for one in self._of(workers)
        ]
        first = clients[0].buffers
        clients[0].buffers = {key: grad.clone() for key, grad in first.items()}  # it may be summed with others again
        self._add(clients)
        self._summed = self.applied, workers

    def _combine_reports(self, workers: list[int]) -> dict[str, Any]:
        """Combines the reports of these workers' shares into the report of one global batch."""
        reports = [pushed.report for pushed in self._of(workers)]
        metrics: dict[str, tuple[float, float]] = {}
        for report in reports:
            add_metrics(metrics, report["log"]["metrics"])
        unused = sorted(set.intersection(*({*report["unused"]} for report in reports)))
        loss, count = (math.fsum(report[key] for report in reports) for key in ("loss", "count"))
        log = {"missed": 0, "loss": loss, "count": count, "unused": unused, "metrics": metrics}
        log |= {"rows": sum(report["log"]["rows"] for report in reports), "epoch": reports[0]["log"]["epoch"]}
        return {**reports[0], "loss": loss, "count": count, "unused": unused, "log": log}
