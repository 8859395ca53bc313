"""The common parts of windows of asynchronous updates and of steps with backup workers: tickets, report, end.

In a window each worker communicates only with the parameter servers. The servers assign global batches, or shares of
them, to workers as tickets. At the end of the window all workers have the same weights.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch

from paceline.base.batching import NOTHING, Agreed, add_metrics
from paceline.base.heartbeat import HEARTBEAT
from paceline.checkpoint.tree import unpack
from paceline.compute.job import StepOptions
from paceline.compute.optimizers import DelayedNesterov
from paceline.data.loader import Assignment
from paceline.errors import NonFiniteLossError
from paceline.param_server.client import AsyncReplica
from paceline.param_server.server_team import ServerTeam, add_server_state
from paceline.session.worker_batch import WorkerBatch
from paceline.train.step import Step
from paceline.train.step_context import Batches, StepContext
from paceline.train.step_observers import learn_merging
from paceline.train.step_verbs import (
    account_update,
    forward_backward,
    grad_norm,
    load_batch,
    must_repeat,
    reduce,
    refuse_nonfinite,
)
from paceline.train.turn_reports import BrokenOffError, exchange_reports

WINDOW = 256  # updates, unless the plan says another number


@dataclass
class WorkerWindow:
    """A window of at most `updates` updates, as this worker goes through it.

    `log` has the updates that the servers made, `dropped` counts the pushes that they left out, `buffers` are those of
    the model at the end. `trouble` is what a ticket here has come to, `wish` what the next question tells the servers,
    and `data` are the seconds in which rows were loaded.
    """

    updates: int
    wish: dict[str, Any] = field(default_factory=dict)
    has_worked: bool = False
    trouble: NonFiniteLossError | None = None
    log: list[dict[str, Any]] = field(default_factory=list)
    dropped: int = 0
    buffers: dict[str, torch.Tensor] = field(default_factory=dict)
    data: float = 0.0


def async_replica(context: StepContext) -> AsyncReplica:
    """Returns the replica of a trainer that talks to servers by itself."""
    return cast(AsyncReplica, context.replica)


def announce_window(context: StepContext, what: str) -> None:
    """Tells the user what a plan with windows changes, and refuses optimizers that cannot follow it."""
    plan = context.plan
    if plan.delayed:
        DelayedNesterov.refuse_others(context.job.optimizers, plan.delayed)
    context.reporter.say(what)
    word = plan.several.partition("=")[0]
    why = f"the plan has {word}=: the result depends on the speed of each worker"
    context.reporter.decide(context.trainer, what, why)


def begin_window(context: StepContext) -> WorkerWindow:
    """Begins a window, in which all workers have the same weights."""
    async_replica(context).begin(context.done)
    size, most = context.plan.window or WINDOW, context.run.team.world.max_steps
    return WorkerWindow(size if most is None else max(1, min(size, most - context.run.trainers.step)))


def next_ticket(context: StepContext, window: WorkerWindow) -> dict[str, Any] | None:
    """Asks the servers for the next ticket, and for the weights that it is to be computed with. Returns None at the end
    of the window, whose log this worker then has.
    """
    replica, transactions = async_replica(context), context.transactions
    leaves = window.has_worked and transactions.newcomers and not transactions.interrupted
    window.wish |= {"updates": window.updates, "stop": context.run.notices.stop_signal is not None or leaves}
    answer, window.wish = replica.deal(context.done, window.wish), {}
    if "log" in answer:
        window.log, window.dropped = answer["log"], answer["dropped"]
        return None
    window.has_worked = True
    replica.ask_weights(answer["update"])
    return answer


def load_ticket(
    context: StepContext, window: WorkerWindow, ticket: dict[str, Any], batches: Batches, assignment: Assignment
) -> WorkerBatch | None:
    """Loads the rows of a ticket's global batch that the assignment gives this worker. Returns None if the loop has no
    such batch, and reports this to the servers.
    """
    began = time.perf_counter()
    batch = batches.load(ticket["ticket"] - context.done, assignment)
    if batch is None:
        window.wish["cut"] = ticket["ticket"]
        return None
    window.data += time.perf_counter() - began
    return batch


def whole_batch(context: StepContext, share: tuple[int, int] = (0, 1)) -> Assignment:
    """Returns the assignment of a whole global batch to this worker, or of the share (which, of how many) of one."""
    rank, count = share
    assignment = context.run.team.get_assignment(context.replica.mesh)
    return replace(assignment, rank=rank, weights=(1.0,) * count, scattered=True)


def compute_ticket(context: StepContext, window: WorkerWindow, ticket: dict[str, Any], batch: WorkerBatch) -> None:
    """Computes the gradients of the ticket's rows, which go to the servers bucket by bucket, and pushes a report of
    them. A loss that is not finite ends the window.
    """
    replica, share = async_replica(context), batch.share
    replica.await_weights()
    context.expected = 0.0
    load_batch(context, step := Step(ticket["ticket"], 0.0, f"ticket {ticket['ticket']}"), batch)
    step.options = replace(step.options, record_buffers=True)
    replica.key = ticket["ticket"], ticket["dealing"], 0
    step.began = time.perf_counter()
    try:
        while True:
            sums = forward_backward(context, step)
            agreed = reduce(context, step)
            if not must_repeat(context, step):
                break
        norm = 0.0
        if agreed.count or not context.plan.backup or not math.isfinite(agreed.loss):
            refuse_nonfinite(context, step)
            norm = grad_norm(context, step)
    except NonFiniteLossError as error:
        window.trouble, window.wish["broken"] = error, True
        return
    replica.push(sums, ticket_report(agreed, norm, step.options, batch))
    if share:
        learn_merging(context, step, sums, time.perf_counter() - step.began)
    context.replica.abort()
    HEARTBEAT.beat()


def ticket_report(agreed: Agreed, norm: float, options: StepOptions, batch: WorkerBatch) -> dict[str, Any]:
    """Returns what servers need from a ticket in addition to its gradients, with its entry in the window's log."""
    figures = {"count": agreed.count, "loss": agreed.loss, "unused": agreed.unused, "norm": norm}
    more = {"rows": sum(part.rows for part in batch.share), "epoch": batch.epoch, "metrics": agreed.metrics}
    return {**figures, "expected": options.expected, "micro_batches": batch.count, "log": figures | more}


def end_window(context: StepContext, step: Step, window: WorkerWindow) -> None:
    """Reads the weights and the buffers after the last update of the window."""
    step.steps, step.spent = len(window.log), {"data": window.data}
    if window.trouble is None:
        replica = async_replica(context)
        replica.ask_weights(context.done + len(window.log))
        replica.await_weights()
        window.buffers = unpack(torch.frombuffer(replica.buffers(), dtype=torch.uint8))
    step.computed = time.perf_counter()


def exchange_window(context: StepContext, step: Step, window: WorkerWindow) -> bool:
    """Exchanges reports at the end of the window, and returns whether all workers made the same updates. They may not
    have if the first server was lost after it had informed only some workers that the window is over.
    """
    made = {"made": len(window.log)}
    reports = exchange_reports(context, step, made, step.computed - step.began, window.trouble)
    return len({report["made"] for report in reports}) == 1


def sum_log(step: Step, log: list[dict[str, Any]]) -> None:
    """Sums the window's log, which all workers have from the first server. Raises BrokenOffError if it is empty."""
    if not log:
        raise BrokenOffError(step.agreed)
    metrics: dict[str, tuple[float, float]] = {}
    for one in log:
        add_metrics(metrics, one["metrics"])
    unused = set.intersection(*({*one["unused"]} for one in log))
    loss, count = (math.fsum(one[key] for one in log) for key in ("loss", "count"))
    step.agreed = replace(step.agreed, loss=loss, count=count, metrics=metrics, unused=tuple(sorted(unused)))
    last = max(log, key=lambda one: one["ticket"])
    step.batch = WorkerBatch([], 0, sum(one["rows"] for one in log), last["epoch"])
    step.norm = log[-1]["norm"]


@torch.no_grad()
def apply_window(context: StepContext, step: Step, window: WorkerWindow, _: Any) -> list[Any]:
    """Takes over the window's buffers and moves the schedules on; worker 0 writes the journal. Returns what a worker
    needs that takes the window over.
    """
    began = time.perf_counter()
    context.run.checkpoints.copied()
    buffers = dict(context.job.model.named_buffers())
    for name, value in window.buffers.items():
        buffers[name].copy_(value)
    for one in window.log:
        step.lr = float(context.job.optimizers[0].param_groups[0]["lr"])
        async_replica(context).follow_schedule(replace(NOTHING, loss=one["loss"], count=one["count"]))
    context.done, context.weights.refused = step.done, False
    if context.run.team.group.rank == 0:
        by = Counter(worker for one in window.log for worker in one.get("workers") or [one["worker"]])
        missed = Counter(one["missed"] for one in window.log)
        fields = {"workers": sorted(by.items()), "missed": sorted(missed.items()), "dropped": window.dropped}
        if context.plan.backup:
            fields["late"] = [[one["ticket"] + 1, *late] for one in window.log for late in one["late"]]
        context.reporter.journal.write(
            "window", trainer=context.trainer, step=context.done, updates=step.steps, **fields
        )
    account_update(context, step, began)
    return [dict(vars(step.agreed)), step.norm, step.lr, [step.batch.rows, step.batch.epoch], step.steps]


class WindowStrategy:
    """Trains in windows of one kind; see train/strategy.py. `window` makes one, and `what` says what it changes."""

    lockstep = False

    def __init__(self, context: StepContext, window: Callable[[WindowStrategy, Batches], Step], what: str) -> None:
        self.context, self._window, self.servers = context, window, ServerTeam(context, watch_team=False)
        self._compared = -1  # the generation in which all know that they read the same rows
        announce_window(context, what)

    def compare_datasets(self, batches: Batches) -> None:
        """In a new generation: loads a batch, by which workers compare their datasets. Collective."""
        if self._compared != self.context.transactions.number:
            batches.load(0, whole_batch(self.context))
            self._compared = self.context.transactions.number

    def advance(self, batches: Batches) -> Step | None:
        """Makes a window. Returns None if it was empty because all workers stop."""
        try:
            return self._window(self, batches)
        except BrokenOffError as end:
            self.context.run.record_agreed(end.agreed)
            return None

    def assignment(self) -> Assignment:
        """Returns the assignment of a whole global batch to this worker."""
        return whole_batch(self.context)

    def shares(self, batches: int, weights: Sequence[float]) -> list[int]:
        """Returns one share: a worker computes all micro-batches of a global batch."""
        return [batches]

    def memory(self) -> dict[str, int]:
        """Returns the largest number of bytes that this worker holds, by category."""
        return self.context.replica.memory()

    def state(self, done: int | None) -> dict[str, Any]:
        """Returns what further windows depend on, for a checkpoint with the optimizer state of the servers."""
        return add_server_state(self.context, done)

    def load(self, saved: dict[str, Any], newcomer: bool) -> None:
        """Loads what `state` returned, possibly under another plan."""
        self.context.load_state(saved)

    def end_loop(self) -> None:
        """Does nothing: nothing is under way between two windows."""
