"""Parameter server with backup workers: sums the first pushes of a step, and makes the update of them.

The leading server chooses whose pushes make a step, among those that are complete at every server, and has all servers
sum these. It computes the norm of the gradient from the squares of all parts, and tells the servers to apply the step.
Another server that takes over chooses again, unless one has applied the step already. Which pushes are chosen:
`paceline.param_server.backup_scheduler`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Sequence
from functools import reduce
from typing import Any

from paceline.base.batching import add_metrics, deal, exact_sum
from paceline.base.mesh import holders
from paceline.comm.message_reader import decode_message
from paceline.param_server.backup_scheduler import BackupScheduler
from paceline.param_server.client import squares_of
from paceline.param_server.parameter_shard import Client, ParameterShard, WeightReads
from paceline.param_server.protocol import Connection, Kind, Message
from paceline.param_server.replication import Replication
from paceline.param_server.window import AppliedUpdate, Window


class BackupWorkerServer:
    """Serves one trainer's shard. `reached` gets the names of fault points; `workers` returns the connected workers.

    `squares` has the squares that servers have reported for the step under way, by server and part.
    """

    def __init__(
        self, shard: ParameterShard, reached: Callable[[str], None], workers: Callable[[], Collection[int]]
    ) -> None:
        self.shard, self._reached, self._workers = shard, reached, workers
        done = shard.applied
        self.scheduler = BackupScheduler(shard.plan.backup or 0, done, done, done)
        self.window = Window(shard.trainer, shard.server, self.scheduler)
        self.replication = Replication(shard, self.window, "standing by shares", "update by shares", self._follow)
        self.reads = WeightReads(shard)
        self.squares: dict[int, dict[str, list[float]]] = {}
        self._choice = 0  # the number of this server's last choice of a step's workers
        self._summed: tuple[int, list[int]] | None = None  # the step and the workers that the gradients are the sums of

    def handle(self, link: Connection, client: Client, worker: int, frame: Message) -> None:
        """Handles a message of a worker, or of another server, whose number is negative: -2 is server 1."""
        if frame.kind == Kind.READ:
            self.reads.waiting.append((link, frame))
        elif frame.kind == Kind.SUM and frame.key[0] == self.shard.applied:
            server = -1 - worker
            if not self.replication.leads:
                squares = self._sum(decode_message(frame.text, "workers", f"server {server}"))
                link.put(Kind.SUM, self.shard.trainer, frame.key, content=json.dumps(squares).encode())
            elif frame.key[1] == self._choice:  # else the sum of workers that were chosen before
                self.squares[server] = decode_message(frame.text, "squares", f"server {server}")
        elif frame.kind == Kind.BUFFERS:
            self.shard.send_buffers(link, frame)
        else:
            self.replication.handle(link, client, worker, frame)
        self._advance()

    def use(self, servers: set[int]) -> None:
        """Takes over the set of servers that workers use; the workers of the step under way are chosen again."""
        self.scheduler.chosen = []
        self.replication.use(servers)
        self._advance()

    def lose(self, worker: int) -> None:
        """Forgets a worker whose connection is lost: the step does not wait for it."""
        self.window.lose(worker)
        self._advance()

    def _advance(self) -> None:
        """Makes all progress that is possible now: takes over, assigns shares, sends weights, makes steps."""
        window, replication, scheduler = self.window, self.replication, self.scheduler
        if replication.has_reports:
            replication.read_reports(self._workers())
        if replication.leads:
            start = scheduler.start
            window.read_requests()
            for worker in self._workers() if scheduler.start != start else ():
                scheduler.join(worker)  # all workers have a share of a window's first step, in any order of requests
            for worker in window.take_complete_pushes(replication.used):
                counts = window.pushed[worker].report["count"] > 0
                # If nothing counts in any share, the last one makes a step that changes nothing.
                scheduler.arrive(worker, counts or {*scheduler.members} <= scheduler.idle | {worker})
            self._assign_shares()
        self.reads.answer()
        if replication.leads:
            self._sum_chosen()
            if scheduler.chosen and replication.used <= self.squares.keys():
                self._lead_step()
                self._advance()

    def _assign_shares(self) -> None:
        """Answers workers that ask for work: with a share of the step, or with the log once the window is over."""
        window, scheduler, safe_updates = self.window, self.scheduler, self.replication.safe_updates
        for worker in window.ready_workers(safe_updates):
            if window.is_over(safe_updates):
                window.send_log(worker)
                continue
            is_new = not scheduler.members
            if safe_updates < self.shard.applied or (step := scheduler.deal(worker)) is None:
                continue
            dealing = window.number_dealing(step, is_new)
            share = scheduler.members.index(worker), len(scheduler.members)
            window.answer(worker, {"ticket": step, "dealing": dealing, "update": step, "share": share})

    def _sum_chosen(self) -> None:
        """Sums the pushes that make the step, once enough have arrived, and has all servers do so."""
        if self.scheduler.chosen or not (chosen := self.scheduler.choose()):
            return
        self._choice += 1
        squares = self._sum(chosen)
        self.squares = {self.shard.server: {str(part): values for part, values in squares.items()}}
        for server in self.replication.others:
            key, text = (self.shard.applied, self._choice, 0), json.dumps(chosen).encode()
            self.replication.peers[server].put(Kind.SUM, self.shard.trainer, key, content=text)

    def _lead_step(self) -> None:
        """Decides the step once all servers have its sums: applies it, and informs the others."""
        plan, scheduler, window, replication = self.shard.plan, self.scheduler, self.window, self.replication
        squares = list[float]()
        for part in range(plan.server or 0):
            holder = next(n for n in holders(part, plan.server or 0, plan.copies or 0) if n in replication.used)
            squares += squares_of(self.squares[holder], part, f"server {holder}")
        chosen, members, report = scheduler.chosen, scheduler.members, self._combine_reports(scheduler.chosen)
        norm, late = 0.0, list[list[int]]()  # who is late, and the first and the end of its micro-batches
        if report["count"] > 0:
            norm = math.sqrt(exact_sum(squares)) * report["expected"] / report["count"]
            shares = zip(members, deal(report["micro_batches"], [1.0] * len(members)), strict=True)
            late = [[worker, part.start, part.stop] for worker, part in shares if worker not in chosen and len(part)]
        window.dropped += len(window.holders)  # pushes that not all servers have yet
        window.holders.clear()
        self._follow((scheduler.start, scheduler.end), [chosen, norm, late])
        replication.send_last(self.shard.applied - 1)
        for worker in chosen:
            window.applied_at[worker] = self.shard.applied

    def _follow(self, bounds: tuple[int, int], decision: Sequence[Any]) -> None:
        """Makes a step of the window with these `bounds`, as the leading server decided."""
        workers, norm, late = decision
        shard, window = self.shard, self.window
        if bounds[0] != self.scheduler.start:
            window.log.clear()
        report = self._combine_reports(workers) | {"norm": norm}
        self.scheduler.follow(bounds)
        entry = report["log"] | {"ticket": shard.applied, "workers": workers, "norm": norm, "late": late}
        window.log.append(AppliedUpdate([workers, norm, late], entry))
        self._reached("reduced")
        if self._summed != (shard.applied, workers):
            self._sum(workers)
        all_records = [window.push_of(worker).records for worker in workers]
        if records := [one for one in all_records if one is not None]:
            total = reduce(lambda one, other: one + other, records)
            shard.merge_buffers(total, report["micro_batches"], self.scheduler.start)
        shard.apply(report, oldest=self.scheduler.start)
        self._summed = None
        self._reached("applied")

    def _sum(self, workers: list[int]) -> dict[int, list[float]]:
        """Sums the gradients of these workers in the order of their shares, and returns the squares by part."""
        pushed = [self.window.push_of(worker) for worker in workers]
        # Not in place: other workers may be chosen instead, and the pushes are summed again.
        squares = self.shard.sum_gradients([one.gradients for one in pushed], [one.rows for one in pushed], False)
        self._summed = self.shard.applied, workers
        return squares

    def _combine_reports(self, workers: list[int]) -> dict[str, Any]:
        """Combines the reports of these workers' shares into the report of one global batch."""
        reports = [self.window.push_of(worker).report for worker in workers]
        metrics: dict[str, tuple[float, float]] = {}
        for report in reports:
            add_metrics(metrics, report["log"]["metrics"])
        unused = sorted(set.intersection(*({*report["unused"]} for report in reports)))
        loss, count = (math.fsum(report[key] for report in reports) for key in ("loss", "count"))
        log = {"missed": 0, "loss": loss, "count": count, "unused": unused, "metrics": metrics}
        log |= {"rows": sum(report["log"]["rows"] for report in reports), "epoch": reports[0]["log"]["epoch"]}
        return {**reports[0], "loss": loss, "count": count, "unused": unused, "log": log}
