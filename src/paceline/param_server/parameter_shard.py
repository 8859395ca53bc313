"""The shard of a trainer's parameters that a parameter server holds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, Protocol

import torch

from paceline.base.batching import NOTHING
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


class Steps(Protocol):
    """What makes a trainer's steps, where servers do not."""

    replica: Replica
    plan: Plan
    done: int


@dataclass
class Client:
    """A worker: what it pushes lands in `buffers`, by trainer and parameter, or as `codes` of several first. It has
    `asked` for squares, by trainer: of which contribution, as which rank of how many. What it pushes of gradients in
    rows are texts in `rows`. What it lends is `lent`, by trainer and numbers: of which contribution, and the stamp.
    """

    buffers: dict[tuple[int, int], torch.Tensor] = field(default_factory=dict)
    codes: dict[tuple[int, tuple[int, ...]], torch.Tensor] = field(default_factory=dict)
    asked: dict[int, tuple[Key, int, int]] = field(default_factory=dict)
    rows: dict[int, bytearray] = field(default_factory=dict)
    lent: dict[tuple[int, tuple[int, ...]], tuple[Key, memoryview]] = field(default_factory=dict)

    def borrow(self, frame: Message, in_codes: bool) -> None:
        """Reads what the worker has pushed directly from the worker's shared memory."""
        assert frame.lent is not None
        about = frame.trainer, frame.numbers
        self.lent[about] = frame.key, frame.lent.stamp
        if in_codes:
            (self.codes[about],) = frame.lent.tensors
        else:
            pushed = zip(frame.numbers, frame.lent.tensors, strict=True)
            self.buffers |= {(frame.trainer, number): tensor for number, tensor in pushed}

    def still(self, trainer: int, key: Key) -> bool:
        """Whether the worker's shared memory still has this contribution: it goes on to the next if others are lost."""
        stamps = [stamp for (of, _), (lent, stamp) in self.lent.items() if of == trainer and lent == key]
        return all(tuple(stamp[:3]) == key for stamp in stamps)


class ParameterShard:
    """What this server has of a trainer: the parameters of these numbers, by part, after `applied` steps. `ready` is
    the contribution whose sums are their gradients, `squares` what it, or else the last step, told of each part.
    """

    def __init__(self, stepper: Steps, trainer: int, server: int) -> None:
        self.trainer = trainer
        self.stepper, self.replica, plan = stepper, stepper.replica, stepper.plan
        self.servers, copies = plan.server or 0, plan.copies or 0
        job = self.replica.job
        if plan.delayed:
            job.optimizers = [DelayedNesterov(optimizer, plan.delayed) for optimizer in job.optimizers]
        self.params = [*self.replica.job.named.values()]
        owners = assign_parameters([param.nbytes for param in self.params], self.servers)
        self.parts = {
            part: [number for number, owner in enumerate(owners) if owner == part]
            for part in parts_of(server, self.servers, copies)
        }
        first = len(self.replica.job.dense)
        self.dense, self.sparse = (
            {part: [n for n in numbers if (n >= first) is sparse] for part, numbers in self.parts.items()}
            for sparse in (False, True)
        )
        self.all_dense, in_rows = ([*chain(*by_part.values())] for by_part in (self.dense, self.sparse))
        self.code = coded_sum(plan.codec).code if plan.codec else None
        self.changes: dict[int, torch.Tensor] = {}  # codes of what the last step changed, by part
        self.touched = {n: TouchedRows(len(self.params[n]), stepper.done) for n in in_rows}
        self.squares = {part: [0.0] for part in self.parts}
        self._sums: dict[int, torch.Tensor] = {}
        first_to_last = [self.params[number] for number in self.all_dense]
        self.exact = Buckets(first_to_last, exact=True, hooks=False) if plan.exact else None
        self.ready: Key | None = None
        others = {self.params[number] for number in {*range(len(self.params))} - {*self.all_dense, *in_rows}}
        for optimizer in self.replica.job.optimizers:
            for param in others & optimizer.state.keys():  # what it was given at first
                del optimizer.state[param]

    @property
    def applied(self) -> int:
        return self.stepper.done

    def room(self, number: int) -> torch.Tensor:
        """Allocates the memory that a pushed gradient arrives in."""
        param = self.params[number]
        if self.exact is None:
            return torch.empty(param.numel(), dtype=param.dtype)
        return torch.empty(levels_of(param.dtype) * param.numel(), dtype=torch.float64)

    def add(self, key: Key, clients: Sequence[Client], exactly: tuple[int, list[float]] | None) -> None:
        """Sums what workers have pushed, in the order of their ranks; of so many micro-batches, on the grids of the
        largest gradients, where sums are exact.
        """
        self.ready = key
        if self.exact is not None and exactly is not None:
            self._add_exactly(self.exact, [one.buffers for one in clients], *exactly)
        else:
            self._add(clients)

    def _add(self, clients: Sequence[Client]) -> None:
        trainer = self.trainer
        norms = dict[int, list[torch.Tensor]]()
        for number in self.all_dense:
            pushed = [one.buffers[trainer, number] for one in clients]
            grad, norms[number] = self._total(number, pushed, bool(clients[0].lent))
            self.params[number].grad = grad.view(self.params[number].shape)
        self.add_rows(one.rows[trainer] for one in clients)
        for part, numbers in self.dense.items():
            part_norms = [norm for number in numbers for norm in norms[number]]
            total = float(torch.stack(part_norms).double().square().sum()) if part_norms else 0.0
            self.squares[part] = [total + squares(rows_of(self.params[number] for number in self.sparse[part]))]

    def add_rows(self, texts: Iterable[bytearray]) -> None:
        """The gradients of tables are what the rows of these workers add up to."""
        rows = [unpack(text, self.params, "a worker") for text in texts] if self.touched else []
        if any(one.keys() < self.touched.keys() for one in rows):
            raise damaged("rows", "a worker", "those of a table are missing")
        for number in self.touched:
            where, values = zip(*(one[number] for one in rows), strict=True)
            self.params[number].grad = combined(self.params[number], where, values)

    def _total(
        self, number: int, pushed: Sequence[torch.Tensor], lent: bool
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """The sum, in the first one's memory unless that is `lent`, and the norms of its stretches, which are read
        while they are in the cache.
        """
        first = pushed[0]
        if lent and number not in self._sums:
            self._sums[number] = torch.empty_like(first)
        total = self._sums[number] if lent else first
        norms = []
        for target, stretch, *more in zip(*(one.split(STRETCH) for one in (total, *pushed)), strict=True):
            if more:
                torch.add(stretch, more[0], out=target)
            elif lent:
                target.copy_(stretch)
            for further in more[1:]:
                target.add_(further)
            norms.append(torch.linalg.vector_norm(target))
        return total, norms

    def _add_exactly(
        self,
        buckets: Buckets,
        pushed: Sequence[Mapping[tuple[int, int], torch.Tensor]],
        micro_batches: int,
        largest: Sequence[float],
    ) -> None:
        assert buckets.exact is not None
        buckets.exact.largest = [largest[number] for number in self.all_dense]
        buckets.begin(lambda bucket: None, micro_batches)
        for one in pushed:
            for at, number in enumerate(self.all_dense):
                buckets.add(at, one[self.trainer, number].chunk(levels_of(self.params[number].dtype)))
        buckets.exact.make_grads()
        buckets.assign_grads()
        part_squares = (
            buckets.squares(micro_batches).view(-1, LEVELS).split([len(numbers) for numbers in self.dense.values()])
        )
        self.squares = {part: rows.flatten().tolist() for part, rows in zip(self.parts, part_squares, strict=True)}

    def apply(self, step: int, commit: dict[str, Any]) -> None:
        """Applies a step to the weights; `commit` has its count, loss, norm and maybe learning rates."""
        agreed = replace(NOTHING, count=commit["count"], loss=commit["loss"], unused=tuple(commit["unused"]))
        for optimizer, rates in zip(self.replica.job.optimizers, commit.get("rates") or (), strict=False):
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate
        before = {n: self.params[n].detach().clone() for n in self.all_dense} if self.in_codes else {}
        self.replica.updater.apply(agreed, StepOptions(step, commit["expected"], 0), commit["norm"])
        if self.in_codes:
            self._round(before)
        by_rows = [one for one in self.replica.job.optimizers if self.touched and steps_rows_alone(one)]
        held = {id(param) for one in by_rows for group in one.param_groups for param in group["params"]}
        for number, touched in self.touched.items():
            grad, rows = self.params[number].grad, None
            if id(self.params[number]) in held and (grad is None or grad.is_sparse):
                rows = torch.empty(0, dtype=torch.int64) if grad is None else grad._indices()[0]
            touched.note(step, rows, self.oldest)
        self.stepper.done, self.ready = step + 1, None

    @property
    def oldest(self) -> int:
        """How many updates the weights have that anyone goes on from."""
        return self.applied

    @property
    def in_codes(self) -> bool:
        """Whether weights are changed by what codes say of the change: in step all have the same before."""
        return self.code is not None and not self.stepper.plan.in_windows

    @torch.no_grad()
    def _round(self, before: dict[int, torch.Tensor]) -> None:
        """The change of the weights becomes what workers will decode of it, of each part together."""
        assert self.code is not None
        for part, numbers in self.dense.items():
            params, old = [self.params[number] for number in numbers], [before[number] for number in numbers]
            self.changes[part] = pack_codes(self.code, [new - was for new, was in zip(params, old, strict=True)])
            for param, was in zip(params, old, strict=True):
                param.copy_(was)
            add_codes(self.code, self.changes[part], params)

    def read(self, link: Connection, frame: Message) -> None:
        """The weights of a part are asked for."""
        part = frame.key[2]
        numbers = self.dense[part]
        weights = [self.params[number].detach().contiguous() for number in numbers]
        self.put_rows(link, frame)
        if self.in_codes:
            link.put(Kind.READ, frame.trainer, frame.key, content=self.changes[part].numpy().tobytes())
        else:
            link.put(Kind.READ, frame.trainer, frame.key, numbers, weights)

    def put_rows(self, link: Connection, frame: Message) -> None:
        """Of a part's tables what has changed since the update that is said."""
        if self.replica.job.sparse:
            since, numbers = decode_message(frame.text, "updates", "a worker"), self.sparse[frame.key[2]]
            text = pack_weights(
                {number: (self.params[number], self.touched[number].since(since)) for number in numbers}
            )
            link.put(Kind.ROWS, frame.trainer, frame.key, content=text)

    def kept(self, part: int) -> list[dict[str, Any]]:
        """The state of each optimizer: its groups, and what it keeps for the parameters of the part, by name."""
        names = self.replica.updater.names
        those = {names[id(self.params[number])] for number in self.parts[part]}
        states = [optimizer_state(one, names, {}, 0) for one in self.replica.job.optimizers]
        return [
            {**one, "state": {name: kept for name, kept in one["state"].items() if name in those}} for one in states
        ]
