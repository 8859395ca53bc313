"""Asynchronous parameter server: answers requests for work items, and applies pushes in one order.

A push counts once it is whole at every server: the others tell the first one what they have, which gives it the number
of an update and tells them. So each ticket is applied by all servers or by none, in one order, whoever is lost.

The first is the lowest of those that are used. All know the window as far as they have applied it. With copies the
first acknowledges a push once all have applied it; when it is lost the next one takes over: the others say where they
stand, who is behind follows who is furthest, and what was dealt and is not applied is dealt again.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch.optim import Optimizer

from paceline.checkpoint.tree import pack
from paceline.comm.message_reader import damaged, decode_message
from paceline.compute.job import StepOptions
from paceline.param_server.parameter_shard import Client, ParameterShard, Steps
from paceline.param_server.protocol import Connection, Key, Kind, Message
from paceline.param_server.ssp_clock import Push, SspScheduler


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


@dataclass
class Window:
    """The state of one asynchronous window.

    `log` has the window's updates in their order. Only the first server, which assigns tickets, uses the rest:
    `asking` has the requests that wait for a ticket, by worker; `have` has the servers that hold a worker's last push;
    `last` has the number of updates once that push was applied; `dropped` counts pushes that do not count, since they
    are repeated or their worker is lost.
    """

    tickets: SspScheduler
    log: list[dict[str, Any]] = field(default_factory=list)
    asking: dict[int, tuple[Connection, Key]] = field(default_factory=dict)
    have: dict[int, set[int]] = field(default_factory=dict)
    last: dict[int, int] = field(default_factory=dict)
    dealings: dict[int, int] = field(default_factory=dict)  # the last of each ticket
    dropped: int = 0
    stopped: int = -1  # where no other window is to begin
    broken: bool = False  # a worker has come to something that ends the run


class AsyncShard(ParameterShard):
    """A parameter shard that applies each push by itself, in an order that the first server decides.

    `used` are the servers that workers use now. On the first of them, `peers` has the connections to the others and
    `applied_by` the updates that each has applied; on the others, `first` is the connection to the first one. The
    callback `reached` is called with the name of each fault point; `workers` returns the connected workers.
    """

    TELLS = "standing", "update"  # what servers tell each other, in `paceline.comm.message_types`

    def __init__(
        self,
        stepper: Steps,
        trainer: int,
        server: int,
        reached: Callable[[str], None],
        workers: Callable[[], Collection[int]],
    ) -> None:
        super().__init__(stepper, trainer, server)
        self.server, self._reached, self._workers = server, reached, workers
        self.copies = bool(stepper.plan.copies)
        self.used: set[int] = set()
        self.leads = False  # it deals
        self.applied_by: dict[int, int] = {}
        self._stands: dict[int, dict[str, Any]] = {}
        self._early: list[tuple[Connection, int, Message]] = []  # what workers asked before it dealt
        self._base = 0  # of the numbers of dealings, which no other server has given
        self.pushed: dict[int, PushedGradients] = {}  # by worker
        self.peers: dict[int, Connection] = {}
        self.first: Connection | None = None
        self._reading: list[tuple[Connection, Message]] = []
        self._weights: tuple[int, dict[int, torch.Tensor]] = -1, {}  # as they are sent, after so many updates
        self._begun: tuple[int, list[torch.Tensor]] = -1, []  # buffers, as the window of this number began
        done = stepper.done
        self.window = Window(self._tickets(done))

    def _tickets(self, done: int) -> SspScheduler:
        return SspScheduler(self.stepper.plan.staleness or 0.0, done, done, done)

    def hear(self, link: Connection, client: Client, worker: int, frame: Message) -> None:
        """Handles a message of a worker, or of another server, whose number is negative: -2 is server 1."""
        if frame.kind == Kind.DEAL:
            if self.leads:
                self._ask(link, worker, frame)
            else:
                self._early.append((link, worker, frame))
        elif frame.kind == Kind.PUSHED:
            self._take(client, worker, frame)
        elif frame.kind == Kind.HAVE:
            ticket, dealing, of = frame.key
            if self._is_due(of, (ticket, dealing, 0)):  # else it comes again
                self._has(of, -1 - worker)
        elif frame.kind == Kind.STAND:
            self._stands[-1 - worker] = decode_message(frame.text, self.TELLS[0], caller(worker))
            self.peers[-1 - worker] = link
            self._start_leading()
        elif frame.kind == Kind.APPLIED:
            self.applied_by[-1 - worker] = frame.key[0]
        elif frame.kind == Kind.APPLY:
            if frame.key[0] == self.applied:
                start, end, made = decode_message(frame.text, self.TELLS[1], caller(worker))
                self._follow((start, end), *made)
                if self.copies:
                    link.put(Kind.APPLIED, self.trainer, (self.applied, 0, 0))
        elif frame.kind == Kind.BUFFERS:
            buffers = dict(self.replica.job.model.named_buffers())
            link.put(Kind.BUFFERS, frame.trainer, frame.key, content=[pack(buffers)])
        self._go_on()

    # -- who deals --------------------------------------------------------------------------------------------------

    def use(self, servers: set[int]) -> None:
        """Takes over the set of servers that workers use. It grows, or gets another first one, only between windows."""
        self.used = servers
        for server in self.peers.keys() - servers:
            del self.peers[server]
        if min(servers) == self.server:
            self.first = None
        if min(servers) != self.server or not servers <= {self.server, *self.peers}:
            self.leads = False
            self.window.asking.clear()
            self.window.have.clear()
        self._start_leading()
        self._go_on()

    def stand(self, first: Connection) -> None:
        """Tells the first server which updates and pushes this server has."""
        self.first, window = first, self.window
        log = [self._made_of(one) for one in window.log]
        has = [[worker, pushed.ticket, pushed.dealing] for worker, pushed in self.pushed.items()]
        standing = {
            "applied": self.applied,
            "window": [window.tickets.start, window.tickets.end],
            "log": log,
            "has": has,
        }
        first.put(Kind.STAND, self.trainer, content=json.dumps(standing).encode())

    def _start_leading(self) -> None:
        """Starts to assign tickets once all other servers have sent their standing, or one is back."""
        others = self.used - {self.server}
        ready = all(server in self.peers and not self.peers[server].broken for server in others)
        if self.server != min(self.used, default=-1) or not ready:
            return
        standings, window = {server: self._stands[server] for server in others if server in self._stands}, self.window
        for one in sorted(standings.values(), key=lambda one: -int(one["applied"])):
            for made in one["log"][len(one["log"]) - max(0, one["applied"] - self.applied) :]:
                self._follow(tuple(one["window"]), *made)
        for server, one in standings.items():
            self.applied_by[server] = one["applied"]
            if one["applied"] < (start := window.tickets.start):
                why = f"it has made {one['applied']} updates, and the window began after {start}"
                raise damaged(self.TELLS[0], f"server {server}", why)
            for number in range(one["applied"], self.applied):
                self._tell(self.peers[server], number, window.log[number - start])
        self._stands.clear()
        if not self.leads:
            self.leads, self._base = True, secrets.randbits(60)
            window.tickets.take_over(self._workers())
            window.dealings.clear()
            window.last.clear()
            window.stopped, window.broken = -1, False
        for server, one in standings.items():
            for worker, ticket, dealing in one["has"]:
                if self._is_due(worker, (ticket, dealing, 0)):
                    self._has(worker, server)
        early, self._early = self._early, []
        for link, worker, frame in early:
            self._ask(link, worker, frame)

    def _tell(self, peer: Connection, update: int, one: dict[str, Any]) -> None:
        """Tells a server to make this update."""
        text = json.dumps([self.window.tickets.start, self.window.tickets.end, self._made_of(one)])
        peer.put(Kind.APPLY, self.trainer, (update, 0, 0), content=text.encode())

    def _made_of(self, one: dict[str, Any]) -> list[Any]:
        """What others have to know of an update in the log, to make it: as `_follow` takes it."""
        return [one["worker"], one["missed"], one["clock"]]

    def _follow(self, window: tuple[int, int], worker: int, missed: int, clock: int) -> None:
        """An update that another server has made, or had made."""
        if window[0] != self.window.tickets.start:
            self.window.log.clear()
        self.window.tickets.follow(window, self._push_of(worker).ticket, worker, clock, missed)
        self._note(worker, missed)
        self._apply(worker, missed)

    def _push_of(self, worker: int) -> PushedGradients:
        """What it has pushed last. FormatError: nothing, and yet another server has an update of it."""
        if worker not in self.pushed:
            raise damaged("update", "another server", f"worker {worker} has pushed nothing to server {self.server}")
        return self.pushed[worker]

    def _note(self, worker: int, missed: int) -> None:
        pushed, clock = self.pushed[worker], self.window.tickets.clocks[worker]
        about = {"ticket": pushed.ticket, "worker": worker, "missed": missed, "clock": clock}
        self.window.log.append(about | pushed.report["log"])

    @property
    def oldest(self) -> int:
        """The number of updates at which the window began."""
        return self.window.tickets.start

    @property
    def _sure(self) -> int:
        """Updates that every server has made, of those that this one has."""
        others = self.used - {self.server} if self.copies else ()
        return min([self.applied, *(self.applied_by.get(server, 0) for server in others)])

    # -- a window ---------------------------------------------------------------------------------------------------

    def read(self, link: Connection, frame: Message) -> None:
        """Answers a request for weights once the updates that it asks for are applied."""
        self._reading.append((link, frame))
        self._go_on()

    def lose(self, worker: int) -> None:
        """Forgets a worker whose connection is lost: its tickets are assigned again."""
        self.window.asking.pop(worker, None)
        self.window.have.pop(worker, None)
        self.window.tickets.lose(worker)
        self._go_on()

    def _ask(self, link: Connection, worker: int, frame: Message) -> None:
        window, wish, start = self.window, decode_message(frame.text, "wish", caller(worker)), frame.key[0]
        tickets = window.tickets
        if start > tickets.start:
            tickets.cut(start)  # it was, if this one deals since then
        if start == tickets.end and tickets.ended:
            if wish["stop"]:
                window.stopped = start
            if start != window.stopped:
                tickets.advance(wish["updates"])
                window.log.clear()
                window.dealings.clear()
                window.last.clear()
                window.dropped = 0
        if worker not in tickets.clocks:
            tickets.join(worker)
        if wish["stop"]:
            tickets.stop()
        if "cut" in wish:
            tickets.cut(wish["cut"])
        window.broken |= bool(wish.get("broken"))
        window.asking[worker] = link, frame.key

    def _take(self, client: Client, worker: int, frame: Message) -> None:
        """Stores a push that has arrived completely, and reports it to the first server."""
        text, _, rest = bytes(frame.text).partition(b"\n")
        gradients = {number: client.buffers[frame.trainer, number] for number in self.all_dense}
        records = torch.frombuffer(bytearray(rest), dtype=torch.float64) if rest else None
        if self.leads and not self._is_due(worker, frame.key):  # it may have come before
            self.window.dropped += 1
            return
        ticket, dealing, _ = frame.key
        rows = client.rows.get(frame.trainer, bytearray())
        report = decode_message(text, "push", caller(worker))
        self.pushed[worker] = PushedGradients(ticket, dealing, report, gradients, records, rows)
        if self.leads:
            self._has(worker, self.server)
        elif self.first is not None:  # else it hears of it with all others
            self.first.put(Kind.HAVE, frame.trainer, (ticket, dealing, worker))

    def _is_due(self, worker: int, key: Key) -> bool:
        """Whether a push is of a ticket as that was dealt last, and not lost since: `key` is (ticket, dealing, 0)."""
        ticket, dealing, _ = key
        window = self.window
        return window.tickets.open.get(ticket, (-1, 0))[0] == worker and window.dealings[ticket] == dealing

    def _has(self, worker: int, server: int) -> None:
        self.window.have.setdefault(worker, set()).add(server)

    def _go_on(self) -> None:
        """Makes all progress that is possible now: applies pushes, assigns tickets, answers reads."""
        if self.leads:
            for worker in [worker for worker, have in self.window.have.items() if have >= self.used]:
                del self.window.have[worker]
                self._settle(worker)
            self._deal()
        waiting, self._reading = self._reading, []
        for link, frame in waiting:
            if frame.key[0] > self.applied:
                self._reading.append((link, frame))
            else:
                weights, numbers = self._snapshot(link.near), self.dense[frame.key[2]]
                self.put_rows(link, frame)
                link.put(Kind.READ, frame.trainer, frame.key, numbers, [weights[number] for number in numbers])

    def _settle(self, worker: int) -> None:
        """Applies a push that all servers have."""
        window, tickets, pushed = self.window, self.window.tickets, self.pushed[worker]
        missed = tickets.applied - tickets.open[pushed.ticket][1]
        outcome = tickets.push(worker, pushed.ticket)
        assert outcome is Push.APPLY, "a push that is not due any more is none that all have"
        self._note(worker, missed)
        for server in self.used - {self.server}:
            self._tell(self.peers[server], self.applied, window.log[-1])
        self._apply(worker, missed)
        window.last[worker] = self.applied

    def _apply(self, worker: int, missed: int) -> None:
        """The next update, with what a worker has pushed; it has missed so many others."""
        pushed = self.pushed.pop(worker)
        self._reached("reduced")
        for number, gradient in pushed.gradients.items():
            self.params[number].grad = gradient.view(self.params[number].shape)
        self.add_rows([pushed.rows])
        self._merge(pushed.records, pushed.report["micro_batches"])
        with _damped(self.replica.job.optimizers, 1 + missed if self.stepper.plan.damping else 1):
            self.apply(self.applied, pushed.report)
        self._reached("applied")

    def _deal(self) -> None:
        """Tickets to who may have one; the log at the end."""
        window, sure = self.window, self._sure
        for worker, (link, key) in [*window.asking.items()]:
            if worker in window.have or window.last.get(worker, 0) > sure:  # not yet at all servers
                continue
            answer: dict[str, Any] = {}
            if window.broken or (window.tickets.ended and sure == self.applied):
                answer = {"log": window.log, "dropped": window.dropped}
            elif not window.tickets.ended:
                answer = self._dealt_to(worker, sure)
            if answer:
                del window.asking[worker]
                link.put(Kind.DEAL, self.trainer, key, content=json.dumps(answer).encode())

    def _merge(self, records: torch.Tensor | None, micro_batches: int) -> None:
        """Of what forwards leave in buffers, in a global batch. Those of workers are as the window began."""
        if records is not None:
            carried, start = self.replica.runner.guard.carried, self.window.tickets.start
            carried.begin(StepOptions(self.applied, 1.0, micro_batches, record_buffers=True), records.device)
            if self._begun[0] != start:
                self._begun = start, carried.begun()
            carried.merge(records, self._begun[1])

    def _dealt_to(self, worker: int, sure: int) -> dict[str, Any]:
        """Its next ticket, for weights after so many updates; nothing while it has to wait."""
        window = self.window
        before = len(window.tickets.open)
        if (ticket := window.tickets.deal(worker, sure)) is None:
            return {}
        again = len(window.tickets.open) == before  # it has it, and has not heard so, or forgotten
        window.dealings[ticket] = dealing = window.dealings.get(ticket, self._base) + (not again)
        return {"ticket": ticket, "dealing": dealing, "update": sure}

    def _snapshot(self, lent: bool) -> dict[int, torch.Tensor]:
        """The weights, in memory that the next update does not touch; those that are `lent` are copied at once."""
        if lent:
            return {number: self.params[number].detach().contiguous() for number in self.all_dense}
        if self._weights[0] != self.applied:
            self._weights = self.applied, {number: self.params[number].detach().clone() for number in self.all_dense}
        return self._weights[1]


def caller(number: int) -> str:
    """Who has a connection, for people: servers are below zero."""
    return f"worker {number}" if number >= 0 else f"server {-1 - number}"


@contextmanager
def _damped(optimizers: Sequence[Optimizer], by: int) -> Iterator[None]:
    """Learning rates divided by so much (Zhang et al., "Staleness-Aware Async-SGD for Distributed Deep Learning", IJCAI
    2016), in the optimizers' own steps alone: schedules go on from the rates as they are.
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
