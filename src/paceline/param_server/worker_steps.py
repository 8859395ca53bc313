"""Steps and asynchronous windows of workers that train with parameter servers."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from paceline.base.batching import NOTHING, add_metrics
from paceline.base.heartbeat import HEARTBEAT
from paceline.checkpoint.tree import pack, unpack
from paceline.compute.optimizers import DelayedNesterov
from paceline.data.loader import Assignment
from paceline.errors import NonFiniteLossError, UsageError
from paceline.local_sgd.round import BrokenOffError, meet, same
from paceline.param_server.client import AsyncReplica, ServerClient, ServerReplica
from paceline.session.worker_batch import WorkerBatch
from paceline.team.auth import handshake_key
from paceline.team.transactions import TransactionBody
from paceline.train.step import StepAttempt, StepRunner

LOOK = 0.3  # seconds between two looks at whether somebody was asked to stop
WINDOW = 256  # updates, unless the plan says another number


class SyncServerRunner(StepRunner):
    """Runs training steps whose optimizer updates run on parameter servers."""

    replica: ServerReplica

    def __post_init__(self) -> None:
        super().__post_init__()
        run, count, copies = self.run, self.plan.server or 0, self.plan.copies or 0
        if run.servers is None:
            operations = self.transactions
            operations.ahead = False
            find, key = (lambda: operations.orders.servers), partial(handshake_key, run.team.world.run_dir)
            run.servers = ServerClient(count, copies, operations.worker, find, key, self._look)
            run.team.world.tell("servers", count=count, copies=copies)
        elif run.servers.met or (run.servers.count, run.servers.copies) != (count, copies):
            what = "this Trainer is made after training began, and parameter servers run the script up to there alone"
            cure = "make all trainers before the first loop over steps(), or the first step()"
            if (run.servers.count, run.servers.copies) != (count, copies):
                others = [
                    f"server={n}{' copies=1' * more}"
                    for n, more in ((run.servers.count, run.servers.copies), (count, copies))
                ]
                what = f"one trainer has {others[0]} and another {others[1]}"
                cure = "say the same for both"
            raise UsageError(what, cure)
        self.replica.servers, self.replica.number = run.servers, self.trainer

    def _look(self) -> None:
        """Raises if the team is broken and another generation has to form first."""
        channel = self.run.team.group.channel
        if channel is not None and channel.broken is not None:
            raise channel.broken

    def _give(self, servers: ServerClient) -> None:
        """Sends the training state, with the optimizer state of the other servers, to servers that lack it."""
        if empty := servers.empty:
            state = pack(self.run.state.hand_over(self.transactions.done))
            for server in empty:
                servers.give(server, state)

    def rebind(self, name: str) -> None:
        """Prepares a new generation: waits until all servers have the training state."""
        super().rebind(name)
        self.replica.prepare()
        self._meet()
        self.replica.met(self.transactions.number)

    def _meet(self) -> None:
        """Waits until the servers have the state, without those that are lost and whose parts others hold. Ends the run
        if a worker is asked to stop before the first step.
        """
        run, group, servers = self.run, self.run.team.group, self.replica.servers
        everybody = range(servers.count)
        while True:
            servers.meet(LOOK, gives=group.rank == 0)
            if group.rank == 0:
                self._give(servers)
            ready, addresses = servers.ready_servers, servers.find()
            flags = [
                servers.met,
                run.notices.stop_signal is not None,
                *(n in ready for n in everybody),
                *(n in addresses for n in everybody),
            ]
            met, stops, *counts = group.sum(torch.tensor(flags, dtype=torch.int64)).tolist()
            used = {n for n in everybody if counts[n] == group.size}
            if all(n in used or (met and not counts[servers.count + n]) for n in everybody):
                servers.use(used, self.transactions.number)
                if servers.has_all_parts:
                    return
            if stops and not met:
                run.notices.end_script()

    def state(self, done: int | None) -> dict[str, Any]:
        """The trainer's state for a checkpoint, with the optimizer state from the servers."""
        state, servers = super().state(done), self.run.servers
        if done is None or servers is None or not servers.met:
            return state
        for text in self.replica.kept():
            parts = unpack(torch.frombuffer(text, dtype=torch.uint8))
            for optimizer, part in zip(state["optimizers"], parts, strict=True):
                # Optimizers also change numbers in their groups, as the step size that Prodigy estimates.
                optimizer |= {**part, "state": optimizer["state"] | part["state"]}
        return state


@dataclass
class AsyncWindowRunner(SyncServerRunner):
    """Runs windows of asynchronous updates; one turn of the user's loop is a window.

    Within a window each worker talks to the servers only, which assign global batches to it. At the end of the window
    all workers have the same weights.
    """

    lockstep = False

    replica: AsyncReplica

    def __post_init__(self) -> None:
        super().__post_init__()
        self.get_assignment = self._batch_assignment
        self._compared = -1  # the generation in which all know that they read the same rows
        self._trouble: NonFiniteLossError | None = None  # that a ticket here has come to
        self._log: list[dict[str, Any]] = []
        self._dropped = 0
        self._buffers: dict[str, torch.Tensor] = {}
        self._share = 0, 1  # of a global batch: which, and of how many
        plan = self.plan
        if plan.delayed:
            DelayedNesterov.refuse_others(self.job.optimizers, plan.delayed)
        bound = "as far ahead as they are" if plan.staleness == math.inf else f"at most {plan.staleness or 0:g} ahead"
        what = f"updates are not in step: workers read weights {bound}"
        if plan.backup:
            what = f"steps wait for all workers but {plan.backup}: rows of who is later are dropped"
        what += f", and {'all ' if plan.backup else ''}meet every {self.window} updates"
        self.run.reporter.say(what)
        word = plan.several.partition("=")[0]
        self.run.reporter.decide(self.trainer, what, f"the plan says {word}=: the result depends on who is how fast")

    @property
    def window(self) -> int:
        return self.plan.window or WINDOW

    def _batch_assignment(self) -> Assignment:
        """Assigns a whole global batch to this worker, or its share of one."""
        rank, count = self._share
        return replace(
            self.run.team.get_assignment(self.replica.mesh), rank=rank, weights=(1.0,) * count, scattered=True
        )

    def _look(self) -> None:
        """Does nothing: the loss of another worker is handled at the end of the window."""

    def shares(self, batches: int, weights: Sequence[float]) -> list[int]:
        """One share: a worker computes all micro-batches of a global batch."""
        return [batches]

    def run_step(self, deal: Callable[..., Any], name: str) -> StepAttempt | None:
        """Runs a window. Returns None if the window was empty because all workers stop."""
        try:
            return super().run_step(deal, name)
        except BrokenOffError as end:
            self.run.agreed(end.agreed)
            return None

    def _attempt(self, step: StepAttempt, deal: Callable[..., Any], name: str) -> TransactionBody:
        with ExitStack() as undo:
            began = time.perf_counter()
            undo.callback(self._again)
            self._open(step, name)
            self._share = 0, 1
            if self._compared != self.transactions.number:
                deal(0)
                self._compared = self.transactions.number
            undo.callback(self.replica.abort)
            alike = False
            while not alike:
                with self.streams.preserved():
                    self._make(step, deal)
                computed = time.perf_counter()
                alike = self._meet_others(step, name, computed - began)
            self._agree_on(step)
            for member in self.run.trainers.members:
                member.state.step_computed()
            step.spent["compute"] = computed - began - step.spent["data"]
            yield lambda: step.agreed.count
            undo.pop_all()
        reduced = time.perf_counter()
        self.run.checkpoints.copied()
        self._apply(step)
        ended = time.perf_counter()
        self.updated = ended - reduced
        step.spent |= {"reduce": reduced - computed, "update": self.updated}
        yield [dict(vars(step.agreed)), step.norm, step.lr, [step.batch.rows, step.batch.epoch], step.steps]
        self.transactions.fault_point("applied")

    def _taken(self, step: StepAttempt, _: Any, result: Any) -> None:
        super()._taken(step, _, result[:4])
        (step.steps,) = result[4:]

    # -- what a worker does by itself -------------------------------------------------------------------------------

    def _make(self, step: StepAttempt, deal: Callable[..., Any]) -> None:
        """Computes the tickets that the first server assigns, until the window ends."""
        step.spent, self._trouble, most = {"data": 0.0}, None, self.run.team.world.max_steps
        updates = self.window if most is None else max(1, min(self.window, most - self.run.trainers.step))
        wish, has_worked = dict[str, Any](), False
        self.replica.begin(self.done)
        while True:
            leaves = has_worked and self.transactions.newcomers and not self.transactions.interrupted
            wish |= {"updates": updates, "stop": self.stops or leaves}
            answer, wish = self.replica.deal(self.done, wish), {}
            if "log" in answer:
                self._log, self._dropped = answer["log"], answer["dropped"]
                break
            has_worked, began = True, time.perf_counter()
            self.replica.ask_weights(answer["update"])
            self._share = answer.get("share", (0, 1))
            portion = deal(answer["ticket"] - self.done)
            if portion is None:
                wish["cut"] = answer["ticket"]
                continue
            step.spent["data"] += time.perf_counter() - began
            self.replica.await_weights()
            try:
                self._ticket(answer, portion)
            except NonFiniteLossError as error:
                self._trouble, wish["broken"] = error, True
        step.steps = len(self._log)
        if self._trouble is None:
            self.replica.ask_weights(self.done + step.steps)
            self.replica.await_weights()
            self._buffers = unpack(torch.frombuffer(self.replica.buffers(), dtype=torch.uint8))

    def _ticket(self, assignment: dict[str, Any], portion: WorkerBatch) -> None:
        """Computes the gradients of one global batch, or of a share of it, and pushes them."""
        ticket, self.expected = assignment["ticket"], 0.0
        self._load(one := StepAttempt(ticket, 0.0), partial(same, portion))
        one.options = replace(self.options(one), record_buffers=True)
        self.replica.key = ticket, assignment["dealing"], 0
        began = time.perf_counter()
        self._compute(one, lambda: one.batch, f"ticket {ticket}", began)
        norm, agreed, sums, share = 0.0, one.agreed, one.sums, portion.share
        if agreed.count or not self.plan.backup or not math.isfinite(agreed.loss):
            self._refuse(one)
            norm = self._norm(one)
        assert sums is not None
        figures = {"count": agreed.count, "loss": agreed.loss, "unused": agreed.unused, "norm": norm}
        more = {"rows": sum(part.rows for part in share), "epoch": portion.epoch, "metrics": agreed.metrics}
        about = {"expected": one.options.expected, "micro_batches": portion.count, "log": figures | more}
        self.replica.push(sums, figures | about)
        if share:
            self._merge(one, sums, time.perf_counter() - began)
        self.replica.abort()
        HEARTBEAT.beat()

    # -- what all agree on ------------------------------------------------------------------------------------------

    def _meet_others(self, step: StepAttempt, name: str, seconds: float) -> bool:
        """Exchanges reports at the end of the window, and returns whether all workers made the same updates. They may
        not have if the first server was lost after it had told only some workers that the window is over.
        """
        reports = meet(self, step, name, {"made": len(self._log)}, seconds, self._trouble)
        return len({report["made"] for report in reports}) == 1

    def _agree_on(self, step: StepAttempt) -> None:
        """Sums the window's log, which all workers have from the first server. Raises BrokenOffError if it is empty."""
        if not self._log:
            raise BrokenOffError(step.agreed)
        metrics: dict[str, tuple[float, float]] = {}
        for one in self._log:
            add_metrics(metrics, one["metrics"])
        unused = set.intersection(*({*one["unused"]} for one in self._log))
        loss, count = (math.fsum(one[key] for one in self._log) for key in ("loss", "count"))
        step.agreed = replace(step.agreed, loss=loss, count=count, metrics=metrics, unused=tuple(sorted(unused)))
        last = max(self._log, key=lambda one: one["ticket"])
        step.batch = WorkerBatch([], 0, sum(one["rows"] for one in self._log), last["epoch"])
        step.norm = self._log[-1]["norm"]

    @torch.no_grad()
    def _apply(self, step: StepAttempt) -> None:
        """Takes over the window's buffers and moves the schedules on; worker 0 writes the journal."""
        buffers = dict(self.job.model.named_buffers())
        for name, value in self._buffers.items():
            buffers[name].copy_(value)
        for one in self._log:
            step.lr = float(self.job.optimizers[0].param_groups[0]["lr"])
            self.replica.follow_schedule(replace(NOTHING, loss=one["loss"], count=one["count"]))
        self.done, self.weights.refused = step.number + step.steps, False
        if self.run.team.group.rank == 0:
            by = Counter(worker for one in self._log for worker in one.get("workers") or [one["worker"]])
            missed = Counter(one["missed"] for one in self._log)
            fields = {"workers": sorted(by.items()), "missed": sorted(missed.items()), "dropped": self._dropped}
            if self.plan.backup:
                fields["late"] = [[one["ticket"] + 1, *late] for one in self._log for late in one["late"]]
            self.run.reporter.journal.write(
                "window", trainer=self.trainer, step=self.done, updates=step.steps, **fields
            )
