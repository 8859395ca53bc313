"""The moments of a step, and `Single`: plain training, to which every other strategy passes the rest.

A strategy overrides only the moments it changes. `Single` is the innermost one and the whole of a world of one.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from paceline.comm.buckets import Allocate, Bucket, Buckets
from paceline.comm.exact import ExactBuckets
from paceline.comm.staging import Staging
from paceline.errors import ChangingBufferError, LossError, UsageError, a
from paceline.pieces import ALONE, Cut, Shards, counting
from paceline.step import Agreed, Part, exact_sum, stream_seed
from paceline.strategies.buffers import DECLARED, Carried
from paceline.strategies.chunks import Chunk, MicroBatch, merged
from paceline.strategies.hooks import weighed
from paceline.strategies.observing import HOOKED, USERS_OWN, Observer
from paceline.strategies.offload import Hosted
from paceline.strategies.state import held, in_pieces, load_model, load_optimizer, optimizer_state, own_of, same_number
from paceline.strategies.streams import Streams
from paceline.strategies.watch import OTHERS, BufferWatch

if TYPE_CHECKING:
    from paceline.comm.group import Group
    from paceline.strategies.blueprint import Blueprint

Ready = Callable[[Bucket], None]
LOSS_FORMS = "return a scalar (the mean over the rows it was given), (sum, count) or (sum, count, {name: (sum, count)})"


def default_forward(model: nn.Module, batch: Any) -> Any:
    """``model(batch)`` for a tensor, ``model(batch[0])`` for a tuple or list, ``model(**batch)`` for a mapping."""
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(batch[0] if isinstance(batch, (tuple, list)) else batch)


@dataclass
class Job:
    """What is trained, in the user's own objects, and where: the model is already on `device`.

    `named` are its trainable parameters, `own` what the optimizers hold of them here: the same, or some of their rows;
    with `offload` copies of these in the memory of the host. Of which tensors of the model, and of what the optimizers
    hold, a worker has but a piece, `cuts` and `own_cuts` tell by name: that at its `place` in its `replica`.
    """

    model: nn.Module
    forward: Callable[[nn.Module, Any], Any]
    loss: Callable[[Any, Any], Any]
    device: torch.device
    seed: int
    clip_norm: float | None = None
    precision: str | None = None
    exact: bool = False
    offload: bool = False
    optimizers: list[Optimizer] = field(default_factory=list)
    schedulers: list[LRScheduler] = field(default_factory=list)
    named: dict[str, nn.Parameter] = field(default_factory=dict)
    own: dict[str, nn.Parameter] = field(default_factory=dict)
    cuts: dict[str, Cut] = field(default_factory=dict)
    own_cuts: dict[str, Cut] = field(default_factory=dict)
    place: int = 0
    replica: Group | None = None
    beside: Sequence[nn.Module] = ()  # the models of all trainers of the script, more as they are made
    blueprint: Blueprint | None = None  # of a model whose large tensors have no memory yet
    # Where weights do not change meanwhile: what is gathered may be kept until the end.
    keeping: Callable[[], AbstractContextManager[None]] = nullcontext
    decisions: list[tuple[str, str]] = field(default_factory=list)  # made by strategies: what, why

    def arithmetic(self) -> AbstractContextManager[Any]:
        """The context of forward and loss: autocast where the plan says `precision`."""
        if self.precision is None:
            return nullcontext()
        return torch.autocast(self.device.type, {"bf16": torch.bfloat16, "fp16": torch.float16}[self.precision])


@dataclass
class Orders:
    """What a step is told: its number, the count its gradients are scaled by, its size, and how it may be executed.

    `merge` is how many micro-batches a chunk may hold, `test` asks for an observation of whether they may be merged
    at all, `probe` to look once at the loss also where they may not, `collect` for BatchNorm's statistics per
    micro-batch, `reverse` for the opposite order of summation. `hooked`: somebody has gradient hooks. `cure` helps
    against micro-batches of a single row. `reached` is told of moments in it, `summed`, if it is there, of each tensor
    of sums as soon as it is whole.
    """

    step: int
    expected: float
    micro_batches: int
    rows: int = 0
    merge: int = 1
    test: bool = False
    probe: bool = False
    collect: bool = False
    reverse: bool = False
    hooked: bool = False
    cure: str = ""
    reached: Callable[[str], None] = lambda moment: None
    summed: Callable[[torch.Tensor], None] | None = None


@dataclass
class Sums:
    """What one worker's share of a step adds up to. Gradients stay where the strategy keeps them, as sums/expected.

    `strict`: micro-batches must stay alone, and `why`; `whole`: they must not be divided among workers; `failed`: a
    chunk that was merged or divided did, and the step is to be redone without. `news` is what people are to be told,
    by kind: what, and why if it is a decision.

    `records` are of what forwards leave in buffers, zero where another worker computed it; `cramped` says that the
    memory was too small for merged chunks. With `exact`, `parts` has (number, loss, count, metrics) of each
    micro-batch, `maxima` the largest gradient of each parameter, and `redo` says that the sums do not hold it.
    """

    loss: float = 0.0
    count: float = 0.0
    metrics: dict[str, tuple[float, float]] = field(default_factory=dict)
    unused: set[int] = field(default_factory=set)
    tested: bool = False
    strict: bool = False
    why: str = ""
    whole: bool = False
    failed: bool = False
    news: dict[str, tuple[str, str]] = field(default_factory=dict)
    records: torch.Tensor | None = None
    cramped: bool = False
    parts: list[Part] = field(default_factory=list)
    maxima: torch.Tensor | None = None
    redo: bool = False
    bad: list[str] = field(default_factory=list)


class Strategy:
    """One layer of the plan. Every moment passes to the layer below unless it is overridden."""

    inner: Strategy

    def build(self, optimizers: list[Optimizer], schedulers: list[LRScheduler]) -> None:
        """Takes the optimizers over, made for the trainable parameters of the model as it lives here."""
        self.inner.build(optimizers, schedulers)

    def gradients(self, micro_batches: Sequence[MicroBatch], orders: Orders, ready: Ready | None = None) -> Sums:
        """Forward and backward over this worker's micro-batches, leaving sums; calls `ready` with complete buckets."""
        return self.inner.gradients(micro_batches, orders, ready)

    def reduce(self, bucket: Bucket) -> None:
        """Makes a bucket agree along this layer's axis; returns at once, `agree` waits for it."""
        self.inner.reduce(bucket)

    def agree(self, vector: torch.Tensor, sums: Sums) -> torch.Tensor:
        """Sums the step's vector along the axis, and returns when all reductions of the step have arrived."""
        return self.inner.agree(vector, sums)

    def squares(self, orders: Orders, known: float | None = None) -> torch.Tensor:
        """The squares of all gradients added up, in float64 numbers whose sum it is, the same on every worker; `known`
        if a layer above has learned those of this worker by the way. Changes nothing.
        """
        return self.inner.squares(orders, known)

    def update(self, sums: Sums, agreed: Agreed, orders: Orders, norm: float) -> None:
        """Changes the weights; `norm` is that of the mean gradient, for clipping."""
        self.inner.update(sums, agreed, orders, norm)

    def gather_weights(self) -> None:
        """After an update, and in a new generation: brings what of the weights others have updated. Collective."""
        self.inner.gather_weights()

    def sums(self) -> list[torch.Tensor]:
        """The gradients of the step under way, in as few tensors as there are."""
        return self.inner.sums()

    def follow(self, sums: Sums, agreed: Agreed, orders: Orders, norm: float) -> None:
        """A step of others: updates with what was written into `sums()`."""
        self.inner.follow(sums, agreed, orders, norm)

    def abort(self, again: bool = False) -> None:
        """Voids a step before its update: nothing of it may remain, unless the same workers begin it `again`."""
        self.inner.abort(again)

    def rehouse(self) -> None:
        """Takes fresh memory from the present generation. Collective."""
        self.inner.rehouse()

    def memory(self) -> dict[str, int]:
        """The bytes of parameters (and buffers), gradients and optimizer that this worker holds in a step, at most."""
        return self.inner.memory()

    def state(self) -> dict[str, Any]:
        """Everything that the next step depends on, by logical names."""
        return self.inner.state()

    def load(self, state: Mapping[str, Any]) -> None:
        self.inner.load(state)


class Single(Strategy):
    """Plain training on one device. With `allocate`, gradients land in buckets for the layer above, which are of such
    memory once they are housed; where they are `staged`, by way of what that makes for the buckets of the own rows.
    """

    def __init__(
        self,
        job: Job,
        allocate: Allocate | None = None,
        shards: Shards = ALONE,
        staged: Callable[[Buckets], Staging] | None = None,
    ) -> None:
        self.job = job
        self.params = list(job.named.values())
        if not job.own:
            job.own, job.own_cuts = own_of(job.named, job.cuts, shards)
        self.rows = list(job.own.values())
        self.hosted = Hosted(self.rows) if job.offload else None
        if self.hosted is not None:
            job.own = dict(zip(job.own, self.hosted.copies, strict=True))
        self.own = list(job.own.values())
        self.frozen = {name: param for name, param in job.model.named_parameters() if not param.requires_grad}
        self.names = {id(param): name for name, param in [*self.frozen.items(), *job.own.items()]}
        self.streams = Streams(job.device)
        self.observer = Observer(job, self.streams, gathered=staged is not None)
        self._look_around()
        kind = ExactBuckets if job.exact else Buckets
        self._allocate = allocate
        self.buckets: Buckets | None = None
        self.landing: Buckets | Staging | None = None  # takes gradients as autograd makes them
        if staged is not None:
            self.buckets = kind(self.rows, hooks=False)
            self.landing = staged(self.buckets)
        elif allocate is not None:
            self.landing = self.buckets = kind(self.params, shards=shards, own=self.rows)
        cuts = [job.own_cuts.get(name) or Cut.whole(param.shape) for name, param in job.own.items()]
        self.counted = counting(cuts, job.place)
        if self.buckets is not None:
            self.buckets.elements = [math.prod(cut.shape) for cut in cuts]

    def _look_around(self) -> None:
        """Takes the other trainers' models into view, as many as there are by now: a loss may run one of them."""
        self.seen = len(self.job.beside), *DECLARED
        self.models = [self.job.model, *(model for model in self.job.beside if model is not self.job.model)]
        self.carried = Carried(self.models, self.job.exact)
        self.watch = BufferWatch(self.models, self.carried.buffers())
        self.observer.hooks.beside(self.models)

    def build(self, optimizers: list[Optimizer], schedulers: list[LRScheduler]) -> None:
        held = [param for optimizer in optimizers for group in optimizer.param_groups for param in group["params"]]
        if foreign := sum(id(param) not in self.names for param in held):
            raise UsageError(
                f"{foreign} of the optimizer's {len(held)} tensors are not parameters of the model",
                "make it from the params it is given, and a loss with parameters a part of the model",
            )
        self.job.optimizers, self.job.schedulers = optimizers, schedulers

    def reduce(self, bucket: Bucket) -> None:
        pass

    def agree(self, vector: torch.Tensor, sums: Sums) -> torch.Tensor:
        if self.buckets is not None and sums.maxima is not None:
            sums.redo = not self.buckets.settle(sums.maxima)
        return vector

    def abort(self, again: bool = False) -> None:
        self.carried.restore(void=True)
        self.watch.restore()
        if self.landing is not None:
            self.landing.abandon(again)

    def rehouse(self) -> None:
        if self.buckets is not None and self._allocate is not None:
            self.buckets.rehouse(self._allocate)

    # -- forward and backward -----------------------------------------------------------------------------------

    def gradients(self, micro_batches: Sequence[MicroBatch], orders: Orders, ready: Ready | None = None) -> Sums:
        sent = self._sent = list[Bucket]()

        def send(bucket: Bucket) -> None:
            sent.append(bucket)
            if len(sent) == 1:
                orders.reached("backward")
            (ready or self.reduce)(bucket)

        try:
            return self._in_chunks(micro_batches, orders, send)
        except torch.OutOfMemoryError:
            if orders.merge == 1 or sent:  # what was sent cannot be taken back
                raise
        self.abort(again=True)  # a backward may have added a part of its gradients: all begins anew, one by one
        sums = self._in_chunks(micro_batches, replace(orders, merge=1), send)
        sums.cramped = True
        return sums

    def _in_chunks(self, micro_batches: Sequence[MicroBatch], orders: Orders, ready: Ready) -> Sums:
        if self.seen != (len(self.job.beside), *DECLARED):
            self._look_around()
        sums = Sums(records=self.carried.begin(orders, self.job.device))
        self.watch.mark()  # what follows may fail, and is undone to here
        for param in self.params:
            param.grad = None
        for name, param in self.frozen.items():
            if param.requires_grad:
                raise UsageError(
                    f"{name} was frozen when the Trainer was made and is to be trained now",
                    "make the Trainer while it is trainable, then freeze it until its time comes",
                )
        if self.landing is not None:
            self.landing.begin(ready, orders.micro_batches)
        order = [m for m in micro_batches if not m.blank]
        sums.why = self.observer.why(self.carried.certain)
        sums.strict = bool(sums.why and order)
        order = order[::-1] if orders.reverse else order
        blanks = [Chunk([m], m.batch) for m in micro_batches if m.blank]
        queue = deque([*blanks, *merged(order, 1 if sums.strict else orders.merge)])
        parts: list[_Part] = []
        while queue and not sums.failed:
            chunk = queue.popleft()
            if chunk.micro_batches[0].blank:
                self._run_blank(chunk, orders, last=not queue)
                continue
            if not parts:
                orders.reached("forward")
            part = self._run(chunk, sums, orders, last=not queue)
            if part is not None:
                parts.append(part)
            elif not sums.failed:  # it is merged and may not be: its micro-batches one by one
                queue.extendleft(Chunk([m], m.batch) for m in reversed(chunk.micro_batches))
        self.observer.observe(lambda chunk: self._loss(chunk).detached(), self.models, order, sums, orders)
        self._add_up(parts, sums)
        if self.landing is not None and self.buckets is not None:
            sums.unused = self.landing.flush()
            sums.maxima = self.buckets.maxima
        else:
            sums.unused = {number for number, param in enumerate(self.params) if param.grad is None}
        return sums

    def _run(self, chunk: Chunk, sums: Sums, orders: Orders, last: bool) -> _Part | None:
        """Forward and backward of one chunk, the `last` of the step or not; None if it may not be computed so."""
        if sums.strict and len(chunk.micro_batches) > 1:
            return None
        try:
            with chunk.noted, nullcontext() if self.observer.done else self.observer.hooks.watched():
                part = self._forward(chunk, sums, orders)
            if part is None:
                return None
            mark = self.streams.mark() if orders.test and not sums.strict else ()
            with chunk.noted:
                self._backward(part, orders, last)
        except (*USERS_OWN, LossError) as error:
            if chunk.plain or self._sent or isinstance(error, torch.OutOfMemoryError):
                raise
            self.observer.give_up(chunk, sums, error)
            return None
        if mark and self.streams.moved(mark):
            sums.strict, sums.why = True, "the backward draws random numbers"
        if sums.records is not None:  # not before: a checkpointed BatchNorm runs again in backward
            self.carried.record(sums.records, chunk)
        odd = [m.odd for m in chunk.micro_batches if m.odd]
        if odd and part.mean is not None:
            sums.news["rows"] = odd[0], ""
        return part.detached()

    def _backward(self, part: _Part, orders: Orders, last: bool, blank: bool = False) -> None:
        """Where there are hooks, of the mean, and what they have seen is weighed."""
        hooked = orders.hooked or self.observer.hooks.where
        weight = float(part.count) / orders.expected if hooked else None
        if self.landing is not None:
            self.landing.open(last, blank, weight)
        if weight is None:
            part.total.mul(1.0 / orders.expected).backward()
        else:
            mean = part.total / (part.count or 1) if part.mean is None else part.mean
            with weighed(self.params, weight):
                mean.backward()
        if self.landing is not None:
            self.landing.close()

    def _run_blank(self, chunk: Chunk, orders: Orders, last: bool) -> None:
        """One of the forwards and backwards that the other workers of a replica make more than this one: nothing of it
        counts.
        """
        assert self.landing is not None
        self.streams.seed(stream_seed(self.job.seed, orders.step, chunk.micro_batches[0].index))
        self._backward(self._loss(chunk), orders, last, blank=True)
        self.watch.restore()
        self.carried.restore()

    def _forward(self, chunk: Chunk, sums: Sums, orders: Orders) -> _Part | None:
        """Forward and loss of one chunk, under the stream of its first micro-batch."""
        self.streams.seed(stream_seed(self.job.seed, orders.step, chunk.micro_batches[0].index))
        looks = not sums.strict
        if sums.records is not None:
            self.carried.restore()
        mark = self.streams.mark() if looks else ()
        try:
            part = self._loss(chunk)
        except ValueError as error:
            if chunk.rows > 1 or "more than 1 value per channel" not in str(error):
                raise
            raise UsageError(f"BatchNorm cannot normalise {chunk.source}, a single row", orders.cure) from None
        drew = looks and self.streams.moved(mark)
        moved = self.carried.moved(values=orders.test) if looks else ""
        # Values are compared while the model is being observed, versions ever after.
        changed = self.watch.changed(values=orders.test)
        if changed is not None and orders.collect:
            self.watch.restore()
            raise ChangingBufferError(
                f"the forward changes the {changed}, which would come out differently on each worker",
                "change it in the body of the loop, or train with one worker"
                if changed.startswith("parameter")
                else "say how it is merged with paceline.buffer, put that model in eval mode for the call, or train "
                "with one worker"
                if changed.endswith(OTHERS)
                else "say how it is merged with paceline.buffer, or train with one worker",
            )
        self.observer.change |= changed is not None
        hooked = bool(self.observer.hooks.where) and not sums.strict  # it has just been found
        if drew or moved or hooked or changed is not None:
            sums.strict = True
            sums.why = moved or (HOOKED if hooked else f"the forward changes the {changed}")
            sums.why = "the forward draws random numbers" if drew else sums.why
            if len(chunk.micro_batches) > 1:
                self.watch.restore()
                self.carried.restore()
                return None
        return part

    def _loss(self, chunk: Chunk) -> _Part:
        job = self.job
        with job.arithmetic():
            output = job.forward(job.model, chunk.batch)
            result = job.loss(output, chunk.batch)
        return _Part.of(result, chunk, any(param.requires_grad for param in self.params))

    def _add_up(self, parts: Sequence[_Part], sums: Sums) -> None:
        if not parts:
            return
        losses = torch.stack([part.total for part in parts]).cpu().double().tolist()
        counts = [float(part.count) for part in parts]
        sums.loss, sums.count = exact_sum(losses), math.fsum(counts)
        bad = (part for part, loss in zip(parts, losses, strict=True) if not math.isfinite(loss))
        sums.bad = [source for part in bad for source in part.sources]
        for part in parts:
            for name, (total, count) in part.metrics.items():
                before = sums.metrics.get(name, (0.0, 0.0))
                sums.metrics[name] = (before[0] + float(total), before[1] + float(count))
        if self.job.exact:
            for part, loss, count in zip(parts, losses, counts, strict=True):
                metrics = {name: (float(pair[0]), float(pair[1])) for name, pair in part.metrics.items()}
                sums.parts.append((part.index, loss, count, metrics))

    # -- update -------------------------------------------------------------------------------------------------

    def sums(self) -> list[torch.Tensor]:
        if self.buckets is not None:
            return self.buckets.sums
        return [param.grad for param in self.params if param.grad is not None]

    def squares(self, orders: Orders, known: float | None = None) -> torch.Tensor:
        if isinstance(self.buckets, ExactBuckets):
            return self.buckets.squares(orders.micro_batches, self.counted)
        grads = self.sums()
        if self.counted is not None:
            some = zip(self.rows, self.counted, strict=True)
            grads = [block.of(p.grad) for p, blocks in some if p.grad is not None for block in blocks]
        elif known is not None and math.isfinite(known):  # the squares of a float32 overflow before its norm
            return torch.tensor([known], dtype=torch.float64)
        norms = torch._foreach_norm(grads) if grads else [torch.zeros(())]
        return torch.stack(norms).cpu().double().square().sum(0, keepdim=True)

    def update(self, sums: Sums, agreed: Agreed, orders: Orders, norm: float) -> None:
        self.carried.merge(sums.records)
        # The one division: gradients are sums/expected, and expected is right whenever the count did not change.
        factor = orders.expected / agreed.count
        if self.job.clip_norm is not None:
            factor *= min(1.0, self.job.clip_norm / (norm + 1e-6))
        grads = self.sums()
        if factor != 1.0 and grads:
            torch._foreach_mul_(grads, factor)
        for number in agreed.unused:
            self.rows[number].grad = None
        with self.hosted.update() if self.hosted is not None else nullcontext():
            for optimizer in self.job.optimizers:
                optimizer.step()
        if self.buckets is not None:
            self.buckets.applied()
        for scheduler in self.job.schedulers:
            if isinstance(scheduler, ReduceLROnPlateau):
                scheduler.step(agreed.loss / agreed.count)
            else:
                scheduler.step()

    def follow(self, sums: Sums, agreed: Agreed, orders: Orders, norm: float) -> None:
        if self.buckets is not None:
            self.buckets.adopt()
        self.update(sums, agreed, orders, norm)

    def gather_weights(self) -> None:
        pass

    # -- state --------------------------------------------------------------------------------------------------

    def memory(self) -> dict[str, int]:
        kept = [tensor for one in self.job.optimizers for state in one.state.values() for tensor in state.values()]
        grads = held(self.sums()) if self.landing is None else self.landing.memory()
        weights = [*self.job.model.parameters(), *self.job.model.buffers(), *self.own]
        return {"parameters": held(weights), "gradients": grads, "optimizer": held(kept)}

    def state(self) -> dict[str, Any]:
        largest = self.buckets.largest if self.buckets is not None else []
        return {
            "model": in_pieces(self.job.model.state_dict(keep_vars=True), self.job.cuts, self.job.place),
            "optimizers": [
                optimizer_state(one, self.names, self.job.own_cuts, self.job.place) for one in self.job.optimizers
            ],
            "schedulers": [scheduler.state_dict() for scheduler in self.job.schedulers],
            "exact": dict(zip(self.job.named, largest, strict=False)),
        }

    def load(self, state: Mapping[str, Any]) -> None:
        load_model(self.job.model, state["model"], self.job.cuts, self.job.place)
        if "optimizers" not in state:  # weights from elsewhere, to begin with
            return
        same_number("optimizers", len(state["optimizers"]), len(self.job.optimizers))
        same_number("schedulers", len(state["schedulers"]), len(self.job.schedulers))
        for optimizer, saved in zip(self.job.optimizers, state["optimizers"], strict=True):
            load_optimizer(optimizer, saved, self.names, self.job.own_cuts, self.job.place)
        for scheduler, saved in zip(self.job.schedulers, state["schedulers"], strict=True):
            scheduler.load_state_dict(dict(saved))
        if self.job.exact and self.buckets is not None:
            largest = state.get("exact") or {}
            self.buckets.largest = [largest.get(name, 0.0) for name in self.job.named]


@dataclass
class _Part:
    """The loss of one chunk: its sum (a tensor), its count, its metrics."""

    total: torch.Tensor
    count: Any
    metrics: Mapping[str, tuple[Any, Any]]
    sources: list[str]
    index: int
    mean: torch.Tensor | None = None  # if that is what the loss returned

    @staticmethod
    def of(result: Any, chunk: Chunk, trainable: bool) -> _Part:
        metrics: Mapping[str, tuple[Any, Any]] = {}
        mean = result if isinstance(result, torch.Tensor) else None
        if isinstance(result, torch.Tensor):
            total, count = result * chunk.rows if result.numel() == 1 else result, chunk.rows
        elif isinstance(result, tuple) and len(result) in (2, 3) and isinstance(result[0], torch.Tensor):
            total, count = result[0], result[1]
            metrics = result[2] if len(result) == 3 else {}
        else:
            what = f"a tuple of {len(result)}" if isinstance(result, tuple) else a(type(result).__name__)
            raise LossError(f"the loss returned {what}", LOSS_FORMS)
        if total.numel() != 1:
            raise LossError(f"the loss returned a tensor of shape {tuple(total.shape)}", LOSS_FORMS)
        if trainable and torch.is_grad_enabled() and not total.requires_grad:
            raise LossError(
                "the loss does not depend on any trainable parameter",
                "compute it from the model's output, without detach(), item() or no_grad()",
            )
        if not isinstance(metrics, Mapping) or any(not _is_pair(pair) for pair in metrics.values()):
            raise LossError(f"the loss returned metrics {metrics!r:.80}", LOSS_FORMS)
        return _Part(total.reshape(()), count, metrics, chunk.sources, chunk.micro_batches[0].index, mean)

    def detached(self) -> _Part:
        metrics = {name: (_bare(total), _bare(count)) for name, (total, count) in self.metrics.items()}
        return _Part(self.total.detach(), _bare(self.count), metrics, self.sources, self.index)


def _bare(value: Any) -> Any:
    return value.detach() if isinstance(value, torch.Tensor) else value


def _is_pair(value: Any) -> bool:
    return isinstance(value, (tuple, list)) and len(value) == 2
