"""What servers do where training is not in step: the first deals tickets, and all apply them in the order that it says.

A push counts once it is whole at every server: the others tell the first one what they have, which gives it the number
of an update and tells them. So each ticket is applied by all servers or by none, in one order, whoever is lost.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch.optim import Optimizer

from paceline.checkpoint.tree import pack
from paceline.comm.frames import Connection, Frame, Key, Kind
from paceline.holding import Client, Holding, Steps
from paceline.strategies.job import Options
from paceline.tickets import Push, Tickets


@dataclass
class Pushed:
    """What a worker has pushed of a `ticket`: gradients by number, what it `told` of them, and `records` of what its
    forwards leave in buffers.
    """

    ticket: int
    told: dict[str, Any]
    gradients: dict[int, torch.Tensor]
    records: torch.Tensor | None


@dataclass
class Window:
    """Of the dealing server: `log` has the window's updates in their order. `asking` wait for a ticket, by worker. Of
    each worker's last push it knows which servers `have` it. `dropped` pushes came from who was not heard any more.
    """

    tickets: Tickets
    log: list[dict[str, Any]] = field(default_factory=list)
    asking: dict[int, tuple[Connection, Key]] = field(default_factory=dict)
    have: dict[int, set[int]] = field(default_factory=dict)
    dealings: dict[int, int] = field(default_factory=dict)  # the last of each ticket
    dropped: int = 0
    stopped: int = -1  # where no other window is to begin
    broken: bool = False  # a worker has come to something that ends the run


class Dealing(Holding):
    """What this `server` has of the trainer of that number. `peers` are the other servers' connections to the
    first one, `first` is that, of the others. `reached` hears of moments.
    """

    def __init__(self, stepper: Steps, trainer: int, server: int, reached: Callable[[str], None]) -> None:
        super().__init__(stepper, server)
        self.trainer, self.server, self._reached = trainer, server, reached
        self.pushed: dict[int, Pushed] = {}  # by worker
        self.peers: dict[int, Connection] = {}
        self.first: Connection | None = None
        self._reading: list[tuple[Connection, Frame]] = []
        self._weights: tuple[int, dict[int, torch.Tensor]] = -1, {}  # as they are sent, after so many updates
        done = stepper.done
        self.window = Window(Tickets(stepper.plan.staleness or 0.0, done, done, done))

    def hear(self, link: Connection, client: Client, worker: int, frame: Frame) -> None:
        """Of a worker, or of another server, whose number is below zero: -2 is server 1."""
        if frame.kind == Kind.DEAL:
            self._ask(link, worker, frame)
        elif frame.kind == Kind.PUSHED:
            self._take(link, client, worker, frame)
        elif frame.kind == Kind.HAVE:
            self.peers[worker] = link
            ticket, dealing, of = frame.key
            if self._is_due(of, (ticket, dealing, 0)):  # else it comes again
                self._has(of, -1 - worker)
        elif frame.kind == Kind.APPLY:
            update, of, missed = frame.key
            if update == self.applied:
                self._apply(of, missed)
        elif frame.kind == Kind.BUFFERS:
            buffers = dict(self.replica.job.model.named_buffers())
            link.put(Kind.BUFFERS, frame.trainer, frame.key, content=[pack(buffers)])
        self._go_on()

    def read(self, link: Connection, frame: Frame) -> None:
        self._reading.append((link, frame))
        self._go_on()

    def lose(self, worker: int) -> None:
        """Its connection has gone: it is not heard any more."""
        self.window.asking.pop(worker, None)
        self.window.have.pop(worker, None)
        self.window.tickets.lose(worker)
        self._go_on()

    def _ask(self, link: Connection, worker: int, frame: Frame) -> None:
        window, said, start = self.window, json.loads(frame.text), frame.key[0]
        tickets = window.tickets
        if start == tickets.end and tickets.ended:
            if said["stop"]:
                window.stopped = start
            if start != window.stopped:
                tickets.turn(said["updates"])
                window.log.clear()
                window.dealings.clear()
                window.dropped = 0
        if worker not in tickets.clocks:
            tickets.join(worker)
        if said["stop"]:
            tickets.stop()
        if "cut" in said:
            tickets.cut(said["cut"])
        window.broken |= bool(said.get("broken"))
        window.asking[worker] = link, frame.key

    def _take(self, link: Connection, client: Client, worker: int, frame: Frame) -> None:
        """A push is whole here."""
        text, _, rest = bytes(frame.text).partition(b"\n")
        gradients = {number: client.buffers[frame.trainer, number] for number in self.numbers}
        records = torch.frombuffer(bytearray(rest), dtype=torch.float64) if rest else None
        if not self.server and not self._is_due(worker, frame.key):  # it may have come before
            self.window.dropped += 1
            return
        ticket, dealing, _ = frame.key
        self.pushed[worker] = Pushed(ticket, json.loads(text), gradients, records)
        if self.server:
            assert self.first is not None
            self.first.put(Kind.HAVE, frame.trainer, (ticket, dealing, worker))
        else:
            self._has(worker, 0)

    def _is_due(self, worker: int, key: Key) -> bool:
        """Whether a push is of a ticket as that was dealt last, and not lost since: `key` is (ticket, dealing, 0)."""
        ticket, dealing, _ = key
        window = self.window
        return window.tickets.open.get(ticket, (-1, 0))[0] == worker and window.dealings[ticket] == dealing

    def _has(self, worker: int, server: int) -> None:
        self.window.have.setdefault(worker, set()).add(server)

    def _go_on(self) -> None:
        """Whatever can go on now."""
        if not self.server:
            for worker in [worker for worker, have in self.window.have.items() if len(have) == self.servers]:
                del self.window.have[worker]
                self._settle(worker)
            self._deal()
        waiting, self._reading = self._reading, []
        for link, frame in waiting:
            if frame.key[0] > self.applied:
                self._reading.append((link, frame))
            else:
                weights, numbers = self._snapshot(), self.parts[frame.key[2]]
                link.put(Kind.READ, frame.trainer, frame.key, numbers, [weights[number] for number in numbers])

    def _settle(self, worker: int) -> None:
        """All servers have its push."""
        window, tickets, pushed = self.window, self.window.tickets, self.pushed[worker]
        missed = tickets.applied - tickets.open[pushed.ticket][1]
        found = tickets.push(worker, pushed.ticket)
        assert found is Push.APPLY, "a push that is not due any more is none that all have"
        window.log.append({"ticket": pushed.ticket, "worker": worker, "missed": missed, **pushed.told["log"]})
        for peer in self.peers.values():
            peer.put(Kind.APPLY, self.trainer, (self.applied, worker, missed))
        self._apply(worker, missed)

    def _apply(self, worker: int, missed: int) -> None:
        """The next update, with what a worker has pushed; it has missed so many others."""
        pushed = self.pushed.pop(worker)
        self._reached("reduced")
        for number in self.numbers:
            self.params[number].grad = pushed.gradients[number].view(self.params[number].shape)
        if pushed.records is not None and not self.server:
            carried, told = self.replica.runner.carried, pushed.told
            options = Options(self.applied, 1.0, told["micro_batches"], collect=True)
            carried.begin(options, pushed.records.device)
            carried.merge(pushed.records)
        with _damped(self.replica.job.optimizers, 1 + missed if self.stepper.plan.damping else 1):
            self.apply(self.applied, pushed.told)
        self._reached("applied")

    def _deal(self) -> None:
        window = self.window
        for worker, (link, key) in [*window.asking.items()]:
            if worker in window.have:  # not yet at all servers
                continue
            answer: dict[str, Any] = {}
            if window.tickets.ended or window.broken:
                answer = {"log": window.log, "dropped": window.dropped}
            else:
                before = len(window.tickets.open)
                if (ticket := window.tickets.deal(worker)) is not None:
                    again = len(window.tickets.open) == before  # it has it, and has not heard so, or forgotten
                    window.dealings[ticket] = dealing = window.dealings.get(ticket, 0) + (not again)
                    answer = {"ticket": ticket, "dealing": dealing, "update": self.applied}
            if answer:
                del window.asking[worker]
                link.put(Kind.DEAL, self.trainer, key, content=json.dumps(answer).encode())

    def _snapshot(self) -> dict[int, torch.Tensor]:
        """The weights, in memory that the next update does not touch."""
        if self._weights[0] != self.applied:
            self._weights = self.applied, {number: self.params[number].detach().clone() for number in self.numbers}
        return self._weights[1]


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
