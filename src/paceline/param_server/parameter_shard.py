"""The shard of a trainer's parameters that a parameter server holds, and the gradients that a worker pushes to it.

What all kinds of servers do with parameters: they allocate memory for gradients, sum them, apply an update, and send
weights, buffers and optimizer state.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, Protocol

import torch

from paceline.base.batching import NOTHING
from paceline.checkpoint.tree import pack
from paceline.comm.compression import add_codes, coded_sum, pack_codes
from paceline.comm.exact_sums import LEVELS
from paceline.comm.gradient_buckets import Buckets
from paceline.comm.gradient_memory import levels_of
from paceline.comm.message_reader import damaged, decode_message
from paceline.compute.grad_noise import squares
from paceline.compute.job import StepOptions
from paceline.compute.optimizers import DelayedNesterov
from paceline.compute.sparse_grads import TouchedRows, combined, pack_weights, rows_of, steps_rows_alone, unpack
from paceline.compute.state_dict import optimizer_state
from paceline.param_server.client import assign_parameters, parts_of
from paceline.param_server.protocol import Connection, Key, Kind, Message
from paceline.plan import Plan
from paceline.train.replica import Replica

STRETCH = 1 << 16  # elements that are summed at once


class ServedTrainer(Protocol):
    """What makes a trainer's steps, where servers do not."""

    replica: Replica
    plan: Plan
    done: int


class ParameterShard:
    """The parameters that this server holds of a trainer, by part: its own part, and those it has copies of.

    `dense` and `sparse` are the numbers of each part's dense parameters and tables, `all_dense` those of all parts.
    `code` decodes pushes, if the plan has a codec; `exact` sums exactly, if the plan says so. `touched` knows for each
    table which rows changed after which update.
    """

    def __init__(self, context: ServedTrainer, trainer: int, server: int) -> None:
        self.trainer, self.server = trainer, server
        self.context, self.replica, self.plan = context, context.replica, context.plan
        plan, job = context.plan, context.replica.job
        server_count, copies = plan.server or 0, plan.copies or 0
        if plan.delayed:
            job.optimizers = [DelayedNesterov(optimizer, plan.delayed) for optimizer in job.optimizers]
        self.params = [*job.named.values()]
        owners = assign_parameters([param.nbytes for param in self.params], server_count)
        self.parts = {
            part: [number for number, owner in enumerate(owners) if owner == part]
            for part in parts_of(server, server_count, copies)
        }
        first_table = len(job.dense)
        self.dense, self.sparse = (
            {part: [n for n in numbers if (n >= first_table) is sparse] for part, numbers in self.parts.items()}
            for sparse in (False, True)
        )
        self.all_dense, in_rows = ([*chain(*by_part.values())] for by_part in (self.dense, self.sparse))
        self.code = coded_sum(plan.codec).code if plan.codec else None
        self.touched = {n: TouchedRows(len(self.params[n]), context.done) for n in in_rows}
        dense = [self.params[number] for number in self.all_dense]
        self.exact = Buckets(dense, exact=True, hooks=False) if plan.exact else None
        self._sums: dict[int, torch.Tensor] = {}  # memory for sums that must not replace what was pushed
        self._window_buffers: tuple[int, list[torch.Tensor]] = -1, []  # as the window of this number began
        others = {self.params[number] for number in {*range(len(self.params))} - {*self.all_dense, *in_rows}}
        for optimizer in job.optimizers:
            for param in others & optimizer.state.keys():  # state that came with the training state
                del optimizer.state[param]

    @property
    def applied(self) -> int:
        """The number of updates in the weights."""
        return self.context.done

    # -- sums -------------------------------------------------------------------------------------------------------

    def allocate(self, number: int) -> torch.Tensor:
        """Allocates the memory that a pushed gradient arrives in."""
        param = self.params[number]
        if self.exact is None:
            return torch.empty(param.numel(), dtype=param.dtype)
        return torch.empty(levels_of(param.dtype) * param.numel(), dtype=torch.float64)

    def set_gradients(self, gradients: Mapping[int, torch.Tensor], rows: bytearray) -> None:
        """Takes what one worker pushed as the gradients of the next update."""
        for number, gradient in gradients.items():
            self.params[number].grad = gradient.view(self.params[number].shape)
        self._sum_rows([rows])

    def sum_gradients(
        self, pushed: Sequence[Mapping[int, torch.Tensor]], rows: Sequence[bytearray], in_place: bool
    ) -> dict[int, list[float]]:
        """Sums what workers pushed, in this order, and returns the squares of the sums by part.

        With `in_place` sums replace what the first worker pushed.
        """
        norms = dict[int, list[torch.Tensor]]()
        for number in self.all_dense:
            grad, norms[number] = self._sum(number, [one[number] for one in pushed], in_place)
            self.params[number].grad = grad.view(self.params[number].shape)
        self._sum_rows(rows)
        by_part = {}
        for part, numbers in self.dense.items():
            part_norms = [norm for number in numbers for norm in norms[number]]
            total = float(torch.stack(part_norms).double().square().sum()) if part_norms else 0.0
            by_part[part] = [total + squares(rows_of(self.params[number] for number in self.sparse[part]))]
        return by_part

    def _sum(
        self, number: int, pushed: Sequence[torch.Tensor], in_place: bool
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Returns a parameter's sum, and the norms of its stretches, which are computed while they are in the cache."""
        first = pushed[0]
        if not in_place and number not in self._sums:
            self._sums[number] = torch.empty_like(first)
        total = first if in_place else self._sums[number]
        norms = []
        for target, stretch, *more in zip(*(one.split(STRETCH) for one in (total, *pushed)), strict=True):
            if more:
                torch.add(stretch, more[0], out=target)
            elif not in_place:
                target.copy_(stretch)
            for further in more[1:]:
                target.add_(further)
            norms.append(torch.linalg.vector_norm(target))
        return total, norms

    def _sum_rows(self, packed: Sequence[bytearray]) -> None:
        """Makes the gradients of tables from the rows that workers pushed."""
        rows = [unpack(text, self.params, "a worker") for text in packed] if self.touched else []
        if any(one.keys() < self.touched.keys() for one in rows):
            raise damaged("rows", "a worker", "the rows of a table are missing")
        for number in self.touched:
            indices, values = zip(*(one[number] for one in rows), strict=True)
            self.params[number].grad = combined(self.params[number], indices, values)

    def sum_exactly(
        self, pushed: Sequence[Mapping[int, torch.Tensor]], micro_batches: int, largest: Sequence[float]
    ) -> dict[int, list[float]]:
        """Sums what workers pushed exactly, and returns the squares of the sums by part.

        The grids of the sums follow from the number of micro-batches and the `largest` gradient of each parameter.
        """
        buckets = self.exact
        assert buckets is not None
        assert buckets.exact is not None
        buckets.exact.largest = [largest[number] for number in self.all_dense]
        buckets.begin(lambda bucket: None, micro_batches)
        for one in pushed:
            for index, number in enumerate(self.all_dense):
                buckets.add(index, one[number].chunk(levels_of(self.params[number].dtype)))
        buckets.exact.make_grads()
        buckets.assign_grads()
        counts = [len(numbers) for numbers in self.dense.values()]
        part_squares = buckets.squares(micro_batches).view(-1, LEVELS).split(counts)
        return {part: rows.flatten().tolist() for part, rows in zip(self.parts, part_squares, strict=True)}

    # -- updates ----------------------------------------------------------------------------------------------------

    def apply(self, commit: dict[str, Any], oldest: int) -> None:
        """Updates the weights; `commit` has the step's count, loss, norm and maybe learning rates.

        `oldest` is the number of updates in the oldest weights that a worker may still have.
        """
        agreed = replace(NOTHING, count=commit["count"], loss=commit["loss"], unused=tuple(commit["unused"]))
        optimizers, step = self.replica.job.optimizers, self.applied
        for optimizer, rates in zip(optimizers, commit.get("rates") or (), strict=False):
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate
        self.replica.updater.apply(agreed, StepOptions(step, commit["expected"], 0), commit["norm"])
        by_rows = [one for one in optimizers if self.touched and steps_rows_alone(one)]
        stepped = {id(param) for one in by_rows for group in one.param_groups for param in group["params"]}
        for number, touched in self.touched.items():
            grad, rows = self.params[number].grad, None
            if id(self.params[number]) in stepped and (grad is None or grad.is_sparse):
                rows = torch.empty(0, dtype=torch.int64) if grad is None else grad._indices()[0]
            touched.note(step, rows, oldest)
        self.context.done = step + 1

    def merge_buffers(self, records: torch.Tensor | None, micro_batches: int, window_start: int) -> None:
        """Merges into the buffers what a global batch's forwards recorded of them, if the model has such buffers.

        Those of the workers are as they were when the window began.
        """
        if records is not None:
            carried = self.replica.runner.guard.carried
            carried.begin(StepOptions(self.applied, 1.0, micro_batches, record_buffers=True), records.device)
            if self._window_buffers[0] != window_start:
                self._window_buffers = window_start, carried.begun()
            carried.merge(records, self._window_buffers[1])

    # -- replies ----------------------------------------------------------------------------------------------------

    def send_weights(self, link: Connection, frame: Message, weights: Mapping[int, torch.Tensor]) -> None:
        """Sends the part of the `weights` that a worker asked for."""
        self.send_rows(link, frame)
        numbers = self.dense[frame.key[2]]
        link.put(Kind.READ, frame.trainer, frame.key, numbers, [weights[number] for number in numbers])

    def send_rows(self, link: Connection, frame: Message) -> None:
        """Sends the rows of a part's tables that changed since the update that the worker names."""
        if self.replica.job.sparse:
            since, numbers = decode_message(frame.text, "updates", "a worker"), self.sparse[frame.key[2]]
            rows = {number: (self.params[number], self.touched[number].since(since)) for number in numbers}
            link.put(Kind.ROWS, frame.trainer, frame.key, content=pack_weights(rows))

    def send_buffers(self, link: Connection, frame: Message) -> None:
        """Sends the model's buffers."""
        buffers = dict(self.replica.job.model.named_buffers())
        link.put(Kind.BUFFERS, frame.trainer, frame.key, content=[pack(buffers)])

    def send_optimizer_state(self, link: Connection, frame: Message) -> None:
        """Sends the state of each optimizer: its groups, and what it keeps for a part's parameters, by name."""
        names = self.replica.updater.names
        in_part = {names[id(self.params[number])] for number in self.parts[frame.key[2]]}
        states = [optimizer_state(one, names, {}, 0) for one in self.replica.job.optimizers]
        content = [
            {**one, "state": {name: kept for name, kept in one["state"].items() if name in in_part}} for one in states
        ]
        link.put(Kind.KEPT, frame.trainer, frame.key, content=[pack(content)])


class WeightReads:
    """Requests for weights that wait until the updates they ask for are applied."""

    def __init__(self, shard: ParameterShard) -> None:
        self._shard = shard
        self.waiting: list[tuple[Connection, Message]] = []
        self._snapshot: tuple[int, dict[int, torch.Tensor]] = -1, {}  # the number of updates, and the weights then

    def answer(self) -> None:
        """Sends the weights that can be sent now."""
        waiting, self.waiting = self.waiting, []
        for link, frame in waiting:
            if frame.key[0] > self._shard.applied:
                self.waiting.append((link, frame))
            else:
                self._shard.send_weights(link, frame, self._weights(link.near))

    def _weights(self, near: bool) -> dict[int, torch.Tensor]:
        """Returns weights that the next update does not change. A connection that is `near` copies them at once."""
        shard = self._shard
        if near:
            return {number: shard.params[number].detach().contiguous() for number in shard.all_dense}
        if self._snapshot[0] != shard.applied:
            self._snapshot = shard.applied, {n: shard.params[n].detach().clone() for n in shard.all_dense}
        return self._snapshot[1]


@dataclass
class Client:
    """What one worker pushed over its connection, by trainer."""

    # Dense gradients, by trainer and parameter.
    buffers: dict[tuple[int, int], torch.Tensor] = field(default_factory=dict)
    # With a codec: what arrived, by trainer and parameters, before it is decoded into `buffers`.
    codes: dict[tuple[int, tuple[int, ...]], torch.Tensor] = field(default_factory=dict)
    # Packed gradients of tables.
    rows: dict[int, bytearray] = field(default_factory=dict)
    # The contribution whose squares the worker asks for, its rank, and how many workers push.
    asked: dict[int, tuple[Key, int, int]] = field(default_factory=dict)
    # Of gradients that stay in the worker's shared memory: their contribution, and the stamp next to them.
    lent: dict[tuple[int, tuple[int, ...]], tuple[Key, memoryview]] = field(default_factory=dict)

    def allocate(self, shard: ParameterShard, frame: Message) -> list[torch.Tensor]:
        """Returns the memory that receives a message with gradients."""
        if shard.code is None:
            return self._buffers_of(shard, frame)
        key = frame.trainer, frame.numbers
        if key not in self.codes:
            self.codes[key] = pack_codes(shard.code, [shard.params[number].detach() for number in frame.numbers])
        return [self.codes[key]]

    def take(self, shard: ParameterShard, frame: Message) -> None:
        """Takes gradients that have arrived: from the worker's shared memory if they are there, decoded if coded."""
        if frame.lent is not None:
            self.borrow(frame, shard.code is not None)
        if shard.code is not None:
            gradients = self._buffers_of(shard, frame)
            torch._foreach_zero_(gradients)
            add_codes(shard.code, self.codes[frame.trainer, frame.numbers], gradients)

    def _buffers_of(self, shard: ParameterShard, frame: Message) -> list[torch.Tensor]:
        keys = [(frame.trainer, number) for number in frame.numbers]
        for key in keys:
            if key not in self.buffers:
                self.buffers[key] = shard.allocate(key[1])
        return [self.buffers[key] for key in keys]

    def borrow(self, frame: Message, in_codes: bool) -> None:
        """Reads what the worker pushed directly from the worker's shared memory."""
        assert frame.lent is not None
        about = frame.trainer, frame.numbers
        self.lent[about] = frame.key, frame.lent.stamp
        if in_codes:
            (self.codes[about],) = frame.lent.tensors
        else:
            pushed = zip(frame.numbers, frame.lent.tensors, strict=True)
            self.buffers |= {(frame.trainer, number): tensor for number, tensor in pushed}

    def gradients(self, shard: ParameterShard) -> dict[int, torch.Tensor]:
        """Returns the dense gradients of all parameters of a shard."""
        return {number: self.buffers[shard.trainer, number] for number in shard.all_dense}

    def still_lends(self, trainer: int, key: Key) -> bool:
        """Whether the worker's shared memory still has a contribution: the worker goes on if other workers are lost."""
        stamps = [stamp for (of, _), (lent, stamp) in self.lent.items() if of == trainer and lent == key]
        return all(tuple(stamp[:3]) == key for stamp in stamps)
