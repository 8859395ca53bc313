"""Asynchronous and bounded-stale parameter server: each push is an update of its own.

The leading server assigns global batches to workers, which read weights that may miss some updates, and applies each
push once it is complete at every server, in the order in which that happens (Ho et al., "More Effective Distributed ML
via a Stale Synchronous Parallel Parameter Server", NIPS 2013). The other servers make the same updates in its order.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from torch.optim import Optimizer

from paceline.param_server.parameter_shard import Client, ParameterShard, WeightReads
from paceline.param_server.protocol import Connection, Kind, Message
from paceline.param_server.replication import Replication
from paceline.param_server.ssp_clock import Push, SspScheduler
from paceline.param_server.window import AppliedUpdate, Window


class AsyncServer:
    """Serves one trainer's shard. `reached` gets the names of fault points; `workers` returns the connected workers."""

    def __init__(
        self, shard: ParameterShard, reached: Callable[[str], None], workers: Callable[[], Collection[int]]
    ) -> None:
        self.shard, self._reached, self._workers = shard, reached, workers
        done = shard.applied
        self.scheduler = SspScheduler(shard.plan.staleness or 0.0, done, done, done)
        self.window = Window(shard.trainer, shard.server, self.scheduler)
        self.replication = Replication(shard, self.window, "standing", "update", self._follow)
        self.reads = WeightReads(shard)

    def handle(self, link: Connection, client: Client, worker: int, frame: Message) -> None:
        """Handles a message of a worker, or of another server, whose number is negative: -2 is server 1."""
        if frame.kind == Kind.READ:
            self.reads.waiting.append((link, frame))
        elif frame.kind == Kind.BUFFERS:
            self.shard.send_buffers(link, frame)
        else:
            self.replication.handle(link, client, worker, frame)
        self._advance()

    def use(self, servers: set[int]) -> None:
        """Takes over the set of servers that workers use."""
        self.replication.use(servers)
        self._advance()

    def lose(self, worker: int) -> None:
        """Forgets a worker whose connection is lost: its tickets are assigned again."""
        self.window.lose(worker)
        self._advance()

    def _advance(self) -> None:
        """Makes all progress that is possible now: takes over, applies pushes, assigns tickets, sends weights."""
        window, replication = self.window, self.replication
        if replication.has_reports:
            replication.read_reports(self._workers())
        if replication.leads:
            window.read_requests()
            for worker in window.take_complete_pushes(replication.used):
                self._lead_update(worker)
            self._assign_tickets()
        self.reads.answer()

    def _lead_update(self, worker: int) -> None:
        """Decides the next update, which is a worker's push that all servers have: tells them, and applies it."""
        scheduler, ticket = self.scheduler, self.window.pushed[worker].ticket
        missed = scheduler.missed(ticket)
        outcome = scheduler.push(worker, ticket)
        assert outcome is Push.APPLY, "only pushes that are due have holders"
        self._log_update(worker, missed)
        self.replication.send_last(self.shard.applied)
        self._apply(worker, missed)
        self.window.applied_at[worker] = self.shard.applied

    def _follow(self, bounds: tuple[int, int], decision: Sequence[int]) -> None:
        """Makes an update that the leading server decided: the push of a worker, which missed `missed` others."""
        worker, missed, clock = decision
        if bounds[0] != self.scheduler.start:
            self.window.log.clear()
        self.scheduler.follow(bounds, self.window.push_of(worker).ticket, worker, clock)
        self._log_update(worker, missed)
        self._apply(worker, missed)

    def _log_update(self, worker: int, missed: int) -> None:
        pushed, clock = self.window.pushed[worker], self.scheduler.clocks[worker]
        entry = {"ticket": pushed.ticket, "worker": worker, "missed": missed, "clock": clock}
        self.window.log.append(AppliedUpdate([worker, missed, clock], entry | pushed.report["log"]))

    def _apply(self, worker: int, missed: int) -> None:
        """Applies a worker's push, whose weights missed `missed` updates."""
        shard, pushed, start = self.shard, self.window.pushed.pop(worker), self.scheduler.start
        self._reached("reduced")
        shard.set_gradients(pushed.gradients, pushed.rows)
        shard.merge_buffers(pushed.records, pushed.report["micro_batches"], start)
        with _damped(shard.replica.job.optimizers, 1 + missed if shard.plan.damping else 1):
            shard.apply(pushed.report, oldest=start)
        self._reached("applied")

    def _assign_tickets(self) -> None:
        """Answers workers that ask for work: with a ticket, or with the log once the window is over."""
        window, scheduler, safe_updates = self.window, self.scheduler, self.replication.safe_updates
        for worker in window.ready_workers(safe_updates):
            if window.is_over(safe_updates):
                window.send_log(worker)
                continue
            open_tickets = len(scheduler.open)
            if scheduler.ended or (ticket := scheduler.deal(worker, safe_updates)) is None:
                continue
            is_new = len(scheduler.open) > open_tickets  # else the worker has not received the last answer
            dealing = window.number_dealing(ticket, is_new)
            window.answer(worker, {"ticket": ticket, "dealing": dealing, "update": safe_updates})


@contextmanager
def _damped(optimizers: Sequence[Optimizer], by: int) -> Iterator[None]:
    """Divides the learning rates (Zhang et al., "Staleness-Aware Async-SGD for Distributed Deep Learning", IJCAI 2016).

    Only the optimizers' own steps see the smaller rates: schedules go on from the rates as they are.
    """
    with ExitStack() as stack:
        for optimizer in optimizers if by > 1 else ():
            groups = optimizer.param_groups
            rates = [group["lr"] for group in groups]
            for register, scale in ((optimizer.register_step_pre_hook, by), (optimizer.register_step_post_hook, 1)):
                hook = register(partial(_set_rates, groups, [rate / scale for rate in rates]))
                stack.callback(hook.remove)
        yield


def _set_rates(groups: Sequence[dict[str, Any]], rates: Sequence[Any], *_: Any) -> None:
    for group, rate in zip(groups, rates, strict=True):
        group["lr"] = rate
