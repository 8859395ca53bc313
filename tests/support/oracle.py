"""The oracle of the tests: the same trainings in one process, in plain PyTorch, one function or class for each kind of
turn, over the same few helpers: a grid of micro-batches, the gradient of a step, an update.
"""

from __future__ import annotations

import copy
import itertools
import random
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from cases import Case, right
from launching import paceline
from safetensors.torch import load_file
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils._pytree import tree_leaves
from torch.utils.data import default_collate

from paceline import sample_index, stream_seed
from paceline.base.batching import deal

Steps = list[list[Any]]  # optimizer steps of micro-batches
Weights = dict[str, torch.Tensor]
Outer = tuple[float, float, bool]  # rate, momentum and nesterov of the SGD that merges islands
DILOCO: Outer = (0.7, 0.9, True)
BLOCK = 256  # numbers that share a scale in codes


# -- helpers of all turns ---------------------------------------------------------------------------------------------


def seed_all(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)


def built(make: Callable[[], nn.Module], seed: int = 0) -> nn.Module:
    """A model as the Trainer builds one from a function."""
    seed_all(stream_seed(seed, 0, -1))
    return make()


def in_order(position: int, size: int, seed: int, epoch: int) -> int:
    return position


def grid(
    data: Any,
    global_batch: int,
    micro: int | None = None,
    epochs: int = 1,
    count: int | None = None,
    seed: int = 0,
    order: Callable[..., int] = sample_index,
    collate: Callable[[list[Any]], Any] = default_collate,
    first_epoch: int = 0,
) -> Steps:
    """A dataset cut in global batches and those in collated micro-batches, for `epochs` or `count` steps."""
    micro = micro or -(-global_batch // 8)
    steps: Steps = []
    for epoch in itertools.count(first_epoch):
        if count is None and epoch == first_epoch + epochs:
            return steps
        rows = [order(position, len(data), seed, epoch) for position in range(len(data))]
        for batch in _split(rows, global_batch):
            if len(steps) == count:
                return steps
            steps.append([collate([data[row] for row in part]) for part in _split(batch, micro)])
    raise AssertionError


def _split(rows: list[int], size: int) -> list[list[int]]:
    return [rows[start : start + size] for start in range(0, len(rows), size)]


def forward(model: nn.Module, batch: Any) -> Any:
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(batch[0] if isinstance(batch, tuple | list) else batch)


@dataclass
class Sums:
    """Of some micro-batches: the sum of losses, what they count, and the two sums of each metric."""

    loss: float = 0.0
    count: float = 0.0
    metrics: dict[str, tuple[float, float]] = field(default_factory=dict)

    def __add__(self, other: Sums) -> Sums:
        names = {**self.metrics, **other.metrics}
        pairs = {n: [one.metrics.get(n, (0.0, 0.0)) for one in (self, other)] for n in names}
        metrics = {n: (a[0] + b[0], a[1] + b[1]) for n, (a, b) in pairs.items()}
        return Sums(self.loss + other.loss, self.count + other.count, metrics)


def add_gradients(
    model: nn.Module,
    batch: Sequence[Any],
    loss: Callable[[Any, Any], Any],
    step: int,
    seed: int = 0,
    indices: Iterable[int] | None = None,
    forward: Callable[[nn.Module, Any], Any] = forward,
    scale: float = 1.0,
) -> Sums:
    """Adds gradients of a step's micro-batches, or those of these `indices`, each with random numbers of its own. A
    loss that is one number is the mean over rows.
    """
    sums = Sums()
    for index in range(len(batch)) if indices is None else indices:
        seed_all(stream_seed(seed, step, index))
        result = loss(forward(model, batch[index]), batch[index])
        rows = len(tree_leaves(batch[index])[0])
        part, count, *more = result if isinstance(result, tuple) else (result * rows, rows)
        (part * scale).backward()
        metrics = {name: (float(a), float(b)) for name, (a, b) in (more[0] if more else {}).items()}
        sums += Sums(part.item(), float(count), metrics)
    return sums


def divide_gradients(params: Iterable[nn.Parameter], count: float) -> list[nn.Parameter]:
    """Those that have gradients, which are divided once."""
    params = [param for param in params if param.grad is not None]
    for param in params:
        param.grad /= count
    return params


def clip_gradients(params: Iterable[nn.Parameter], most: float | None) -> float:
    """Their norm before that."""
    return float(nn.utils.clip_grad_norm_(params, torch.inf if most is None else most))


def apart(mine: Weights, theirs: Weights) -> float:
    """Norm of the difference over all tensors together, relative to the norm of theirs."""
    assert mine.keys() == theirs.keys()
    difference = sum(float((mine[n].double() - theirs[n].double()).square().sum()) for n in mine)
    return (difference / sum(float(theirs[n].double().square().sum()) for n in theirs)) ** 0.5


# -- data-parallel steps ----------------------------------------------------------------------------------------------


@dataclass
class Plain:
    """A data-parallel training: gradients of micro-batches add up and are divided once by the count. `norms` are of
    gradients before they are clipped; a `clip_norm` of infinity asks for them alone.
    """

    model: nn.Module
    loss: Callable[[Any, Any], Any]
    optimizers: list[torch.optim.Optimizer]
    forward: Callable[[nn.Module, Any], Any] = forward
    schedulers: list[Any] = field(default_factory=list)
    seed: int = 0
    clip_norm: float | None = None
    losses: list[float] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    sums: list[Sums] = field(default_factory=list)

    def step(self, micro_batches: Iterable[Any], indices: Iterable[int] | None = None) -> None:
        """A step of these micro-batches. Of backup workers: only those of these `indices` have come."""
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)
        batch = [*micro_batches]
        sums = add_gradients(self.model, batch, self.loss, len(self.losses), self.seed, indices, self.forward)
        params = {p: None for o in self.optimizers for g in o.param_groups for p in g["params"]}
        with_gradients = divide_gradients(params, sums.count)
        if self.clip_norm is not None:
            self.norms.append(clip_gradients(with_gradients, self.clip_norm))
        self.rates.append(float(self.optimizers[0].param_groups[0]["lr"]))
        self.losses.append(sums.loss / sums.count)
        self.sums.append(sums)
        for optimizer in self.optimizers:
            optimizer.step()
        for scheduler in self.schedulers:
            if not isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):  # the loop steps it
                scheduler.step()

    def train(self, steps: Steps) -> Plain:
        for micro_batches in steps:
            self.step(micro_batches)
        return self


@dataclass
class Result:
    weights: Weights
    figures: dict[str, list[Any]] = field(default_factory=dict)
    evaluation: dict[str, float] = field(default_factory=dict)


def train(case: Case, seed: int = 7) -> Result:
    """A case of the contract suite."""
    model, data = built(case.model, seed), case.data()
    optimizers = case.optimizer([(n, p) for n, p in model.named_parameters() if p.requires_grad])
    optimizers = optimizers if isinstance(optimizers, list) else [optimizers]
    schedules = [LambdaLR(one, case.schedule) for one in optimizers] if case.schedule else []
    micro = case.micro or -(-case.global_batch // 8)
    plain = Plain(model, case.loss, optimizers, case.forward, schedules, seed, case.clip_norm or torch.inf)
    steps = grid(data, case.global_batch, micro, count=case.steps, seed=seed)
    plain.train(steps)
    figures: dict[str, list[Any]] = {"loss": plain.losses, "norm": plain.norms}
    figures["samples"] = [sum(len(part[0]) for part in step) for step in steps]
    figures["metrics"] = [{name: a / b for name, (a, b) in sums.metrics.items()} for sums in plain.sums]
    return Result(dict(model.state_dict()), figures, _evaluate(case, model, data, micro))


def _evaluate(case: Case, model: nn.Module, data: Any, micro: int) -> dict[str, float]:
    model.eval()
    sums: dict[str, list[float]] = {}
    with torch.no_grad():
        for start in range(0, len(data), micro):
            batch = default_collate([data[i] for i in range(start, min(start + micro, len(data)))])
            for name, (a, b) in right(case.forward(model, batch), batch).items():
                pair = sums.setdefault(name, [0.0, 0.0])
                pair[0], pair[1] = pair[0] + float(a), pair[1] + float(b)
    return {name: a / b for name, (a, b) in sums.items()} | {"n": len(data)}


def as_one_worker(folder: Path) -> None:
    """What train.py of the folder exports to out.safetensors is what one worker gives, whom this starts."""
    found = load_file(folder / "out.safetensors")
    paceline("run", "--run-dir", "alone", "train.py", cwd=folder)
    assert apart(found, load_file(folder / "out.safetensors")) < 1e-12


# -- islands ----------------------------------------------------------------------------------------------------------


class Islands:
    """Copies of a model, each with an optimizer and a schedule of its own, and the optimizer that merges them.

    `case` has model, optimizer, schedule and clip_norm. Each step's micro-batches are divided among the islands.
    """

    def __init__(
        self, case: Any, loss: Callable[[Any, Any], Any], steps: Steps, count: int, outer: Outer = DILOCO, seed: int = 0
    ) -> None:
        torch.set_num_threads(1)
        rate, momentum, nesterov = outer
        self.case, self.loss, self.steps, self.count, self.seed = case, loss, steps, count, seed
        self.model = built(case.model, seed)
        self.merges = torch.optim.SGD(self.model.parameters(), lr=rate, momentum=momentum, nesterov=nesterov)
        self.copies = [copy.deepcopy(self.model) for _ in range(count)]
        self.optimizers = [case.optimizer(one.parameters()) for one in self.copies]
        self.schedules = [LambdaLR(one, case.schedule or (lambda step: 1.0)) for one in self.optimizers]

    def indices(self, number: int, island: int) -> range:
        """The micro-batches of a step that are an island's."""
        return deal(len(self.steps[number]), [1.0] * self.count)[island]

    def step(self, island: int, number: int) -> tuple[Sums, float | None]:
        """A step of one island; its sums, and the norm of its gradient, if it has any micro-batch."""
        one, norm = self.copies[island], None
        one.zero_grad()
        indices = self.indices(number, island)
        sums = add_gradients(one, self.steps[number], self.loss, number, self.seed, indices)
        if indices:
            norm = clip_gradients(divide_gradients(one.parameters(), sums.count), self.case.clip_norm)
            self.optimizers[island].step()
        return sums, norm

    def ends(self, name: str) -> list[torch.Tensor]:
        """A parameter of each island."""
        return [one.get_parameter(name).detach() for one in self.copies]

    def merge(self, changes: Mapping[str, torch.Tensor]) -> None:
        """An update of the outer optimizer by these changes (start - end) of parameters."""
        for name, change in changes.items():
            self.model.get_parameter(name).grad = change
        self.merges.step()
        self.merges.zero_grad()

    def merge_buffers(self, counts: Sequence[float]) -> None:
        for name, buffer in self.model.named_buffers():
            each = [one.get_buffer(name) for one in self.copies]
            if buffer.is_floating_point():
                buffer.copy_(sum(c / sum(counts) * one for c, one in zip(counts, each, strict=True)))
            else:
                buffer.copy_(torch.stack(each).max())
            for one in each:
                one.copy_(buffer)


def diloco(
    islands: Islands,
    every: int,
    fragments: Sequence[Collection[str]] = (),
    delay: int = 0,
    largest_code: int | None = None,
) -> tuple[Weights, list[dict[str, Any]]]:
    """Rounds of `every` steps: of local SGD and DiLoCo, where all parameters are one fragment that is merged at the end
    of a round, and of streaming DiLoCo, where the fragments (names of parameters) end one after another, and a merge
    begins `delay` steps before its end. Weights, and the figures of each round.
    """
    model, count, steps = islands.model, islands.count, islands.steps
    fragments = fragments or [[name for name, _ in model.named_parameters()]]
    assert sorted(itertools.chain.from_iterable(fragments)) == sorted(name for name, _ in model.named_parameters())
    since = [[0.0] * len(fragments) for _ in range(count)]  # counts, by island and fragment, since its last merge
    coders = [Coder(count, largest_code) if largest_code is not None else None for _ in fragments]
    ends, figures = [(f + 1) * every // len(fragments) for f in range(len(fragments))], []
    for first in range(0, len(steps), every):
        sums, counts, rate, norm = Sums(), [0.0] * count, 0.0, None
        in_flight: dict[int, Weights] = {}
        length, merged = min(every, len(steps) - first), 0
        for number in range(first, first + length):
            rate = islands.optimizers[0].param_groups[0]["lr"]
            for island in range(count):
                made, its_norm = islands.step(island, number)
                islands.schedules[island].step()
                sums, counts[island] = sums + made, counts[island] + made.count
                since[island] = [before + made.count for before in since[island]]
                norm = its_norm if island == 0 and its_norm is not None else norm
            at = number + 1 - first
            while merged < len(fragments) and (at == length or at >= ends[merged] - delay):
                if merged not in in_flight:
                    of_fragment = [one[merged] for one in since]
                    in_flight[merged] = _changes(islands, fragments[merged], of_fragment, coders[merged])
                if at < min(length, ends[merged]):
                    break
                islands.merge(in_flight[merged])
                for island in range(count):
                    since[island][merged] = 0.0
                    for name in fragments[merged]:
                        islands.copies[island].get_parameter(name).data.copy_(model.get_parameter(name).data)
                merged += 1
        islands.merge_buffers(counts)
        metrics = {name: a / b for name, (a, b) in sums.metrics.items()}
        figures.append(
            {"step": number + 1, "loss": sums.loss / sums.count, "turn": length, "lr": rate, "grad_norm": norm}
            | metrics
        )
    return model.state_dict(), figures


def _changes(islands: Islands, names: Collection[str], counts: Sequence[float], coder: Coder | None) -> Weights:
    """Of each parameter: its start less the mean of its ends, by what islands have counted."""
    starts = {name: islands.model.get_parameter(name).detach() for name in names}
    if coder is None:
        means = {n: sum(c / sum(counts) * e for c, e in zip(counts, islands.ends(n), strict=True)) for n in names}
        return {name: start - means[name] for name, start in starts.items()}
    rows = [
        torch.cat([((start - islands.ends(name)[island]) * c).view(-1) for name, start in starts.items()])
        for island, c in enumerate(counts)
    ]
    mean = torch.from_numpy(coder(torch.stack(rows).numpy()).astype(np.float64)) / sum(counts)
    pieces = mean.split([start.numel() for start in starts.values()])
    return {name: piece.view_as(start) for (name, start), piece in zip(starts.items(), pieces, strict=True)}


@dataclass
class Coder:
    """What codes of numbers up to `largest` omit, by numpy: of so many islands, and of their sums, of which each island
    has a range of whole blocks.
    """

    count: int
    largest: int
    omitted: Any = None

    def __call__(self, changes: Any) -> Any:
        self.omitted = changes * 0 if self.omitted is None else self.omitted
        before, length = changes + self.omitted, changes.shape[1]
        sums = self._rounded(before).astype(np.float64).sum(0)
        self.omitted = before - self._rounded(before)
        made = self._rounded(sums[None])[0]
        for island, share in enumerate(deal(-(-length // BLOCK), [1.0] * self.count)):
            part = slice(share.start * BLOCK, share.stop * BLOCK)
            self.omitted[island, part] += sums[part] - made[part]
        assert abs(made + self.omitted.sum(0) - before.sum(0)).max() < 1e-12, "what is not sent is kept"
        return made

    def _rounded(self, rows: Any) -> Any:
        blocks = np.pad(rows.astype(np.float32), ((0, 0), (0, -rows.shape[1] % BLOCK))).reshape(-1, BLOCK)
        scales = abs(blocks).max(1, keepdims=True) / np.float32(self.largest)
        codes = np.rint(blocks / np.where(scales == 0, np.float32(1), scales))
        return (codes * scales).reshape(len(rows), -1)[:, : rows.shape[1]]


class LateIslands(Islands):
    """DiLoCo whose merges are as a journal says: `late` has the event of a round by its last step, `uncounted` the rows
    of an island that were lost, by the step that the round after began at and the island.

    An island that is late keeps its weights and its optimizer to a later merge; what it changed since its last merge is
    counted then. `counted` and `missed` are rows that are in a merge, and in none; `rows_of` has those of a
    micro-batch, and `taken` those that islands trained on, by the step that a round begins at.
    """

    def train(
        self,
        every: int,
        late: Mapping[int, Any],
        uncounted: Mapping[tuple[int, int], int],
        rows_of: Callable[[Any], list[int]],
    ) -> Weights:
        self.counted = self.missed = 0
        self.taken: dict[int, set[int]] = {}
        kept = [copy.deepcopy(one.state_dict()) for one in self.optimizers]
        counts, rows, origins = [0.0] * self.count, [0] * self.count, [copy.deepcopy(self.model)] * self.count
        for first in range(0, len(self.steps), every):
            numbers = range(first, min(first + every, len(self.steps)))
            event = late.get(numbers.stop, {"merged": range(self.count), "took": {}})
            for island in range(self.count):
                if (lost := uncounted.get((first, island))) is not None:
                    assert lost == rows[island]
                    self.missed += lost
                    origins[island], counts[island], rows[island] = copy.deepcopy(self.model), 0.0, 0
                    self.copies[island].load_state_dict(self.model.state_dict())
                    self.optimizers[island].load_state_dict(copy.deepcopy(kept[island]))
                    self.optimizers[island].param_groups[0]["lr"] = self.schedules[island].get_last_lr()[0]
                for number in numbers:
                    some = [row for i in self.indices(number, island) for row in rows_of(self.steps[number][i])]
                    if number - first < event["took"].get(str(island), len(numbers)):
                        counts[island] += self.step(island, number)[0].count
                        rows[island] += len(some)
                        self.taken.setdefault(first, set()).update(some)
                    else:
                        self.missed += len(some)
                    self.schedules[island].step()
            merged = event["merged"]
            share = {island: counts[island] / sum(counts[i] for i in merged) for island in merged}
            self.merge(
                {
                    name: sum(
                        part * (origins[island].get_parameter(name) - self.copies[island].get_parameter(name)).detach()
                        for island, part in share.items()
                    )
                    for name, _ in self.model.named_parameters()
                }
            )
            for island in range(self.count):
                if island in merged or not counts[island]:
                    self.counted += rows[island]
                    origins[island] = copy.deepcopy(self.model)
                    self.copies[island].load_state_dict(self.model.state_dict())
                    counts[island], rows[island] = 0.0, 0
                    kept[island] = copy.deepcopy(self.optimizers[island].state_dict())
        return self.model.state_dict()


# -- parameter servers ------------------------------------------------------------------------------------------------


def serve_in_codes(
    plain: Plain,
    steps: Steps,
    workers: int,
    parts: Sequence[Sequence[int]],
    rounded: Callable[[Any], Any],
    back: bool,
) -> Weights:
    """Parameter servers with a codec: each worker pushes `rounded` sums of its micro-batches, of each server's
    parameters (`parts`, their numbers) together; and the change of these comes `back` rounded, too.
    """
    params, (optimizer,), expected = [*plain.model.parameters()], plain.optimizers, 0.0

    def coded(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        row = torch.cat([torch.empty(0), *(tensor.reshape(-1) for tensor in tensors)]).float()
        made = torch.from_numpy(rounded(row.numpy())).double().split([tensor.numel() for tensor in tensors])
        return [part.view(tensor.shape) for part, tensor in zip(made, tensors, strict=True)]

    for number, batch in enumerate(steps):
        count = float(sum(len(part[0]) for part in batch))
        expected = expected if back and expected else count
        sums = [torch.zeros_like(param) for param in params]
        for share in deal(len(batch), [1.0] * workers):
            optimizer.zero_grad()
            add_gradients(plain.model, batch, plain.loss, number, plain.seed, share, plain.forward, 1 / expected)
            for part in parts if share else ():
                backwards = part[::-1]  # as backward makes them
                for n, grad in zip(backwards, coded([params[n].grad for n in backwards]), strict=True):
                    sums[n] += grad
        if not back:  # one worker clips by what it has made, before it is coded
            norm = nn.utils.get_total_norm([param.grad for param in params])
        for param, total in zip(params, sums, strict=True):
            param.grad = total * expected / count
        norm = nn.utils.get_total_norm([param.grad for param in params]) if back else norm
        nn.utils.clip_grads_with_norm_(params, plain.clip_norm, norm)
        before = [param.detach().clone() for param in params]
        optimizer.step()
        for schedule in plain.schedulers:
            schedule.step()
        with torch.no_grad():
            for part in parts if back else ():
                for n, change in zip(part, coded([params[n] - before[n] for n in part]), strict=True):
                    params[n].copy_(before[n] + change)
        expected = count
    return plain.model.state_dict()


class DelayedMomentum:
    """The optimizer of an asynchronous window with `delayed=`: SGD with Nesterov's momentum and weight decay, whose
    momentum is refreshed by the mean gradient of each so many updates; in between each gradient makes its part.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, every: int) -> None:
        self.optimizer, self.every, self.made = optimizer, every, 0
        self.momentum, self.waiting = dict[Any, Any](), dict[Any, Any]()
        self.param_groups = optimizer.param_groups

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)

    @torch.no_grad()
    def step(self) -> None:
        (group,) = self.param_groups
        self.made += 1
        self.optimizer._opt_called = True  # type: ignore[attr-defined] # or the schedule warns
        for param in group["params"]:
            gradient = param.grad + group["weight_decay"] * param
            self.waiting[param] = self.waiting.get(param, 0.0) + gradient
            param -= group["lr"] * gradient / self.every
            if self.made % self.every == 0:
                mean = self.waiting.pop(param) / self.every
                self.momentum[param] = group["momentum"] * self.momentum.get(param, 0.0) + mean
                param -= group["lr"] * group["momentum"] * self.momentum[param]
