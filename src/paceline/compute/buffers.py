"""Merges buffers that change in a training forward by declared rules."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.utils.parametrizations import _SpectralNorm
from torch.nn.utils.spectral_norm import SpectralNorm

from paceline.comm.torch_private import BatchNormBase
from paceline.compute.batchnorm import OTHERS, BatchNormStats, put_back
from paceline.compute.microbatches import Chunk
from paceline.errors import ChangingBufferError, UsageError, a

if TYPE_CHECKING:
    from paceline.compute.job import StepOptions

Merge = str | Callable[[Any], torch.Tensor]
_RULES = ("affine", "sum", "mean", "last", "queue")
_KEY = "_paceline_buffers"  # of a module: its rules, by the buffer's name
DECLARED = [0]  # how often `buffer` was called: who looked before then looks again


@dataclass(frozen=True)
class Rule:
    """How one declared buffer is merged; the fields are the arguments of `buffer`."""

    merge: Merge
    factor: float = 1.0
    pointer: str = ""
    dim: int = 0


def buffer(
    module: nn.Module, name: str, merge: Merge, factor: float | None = None, pointer: str | None = None, dim: int = 0
) -> None:
    """Declares how the buffer `name` of `module`, which changes in a training forward, is made the same on all workers.

    Every micro-batch starts from what the buffer holds when the step begins. When all are done, each worker makes the
    same of their results, `merge` says what:

    - ``"affine"``: a micro-batch turns r into `factor`·r + b, and all are applied in turn, in the order of the grid.
    - ``"sum"``: as if all were one batch: `factor`·r + the sum of their b.
    - ``"mean"``: the mean of the micro-batches' results, weighted by their rows.
    - ``"last"``: the result of the last micro-batch.
    - ``"queue"``: a ring along dimension `dim`, to which each micro-batch adds at most as many entries as it has rows,
      from `pointer` on, a buffer of one integer that it moves by so many. All are added in the order of the grid.
    - a function of the module: what it returns, once all others are merged, for what follows from other buffers.

    Raises UsageError; a step raises ChangingBufferError where a forward does what the rule cannot merge.
    """
    if not isinstance(module, nn.Module):
        raise UsageError(f"buffer() was given {a(type(module).__name__)}", "give it the module that has the buffer")
    tensor, rules = _buffer_of(module, name), vars(module).setdefault(_KEY, {})
    which, summed = f"the buffer {name!r} of {type(module).__name__}", merge in ("affine", "sum")
    fractions = merge == "mean" or factor not in (None, 1)
    known, kind = ", ".join(map(repr, _RULES)), tensor.dtype
    to = None if pointer is None else _buffer_of(module, pointer)
    lost = merge == "queue" and (to is None or to.numel() != 1 or to.is_floating_point())
    lost = lost or rules.get(pointer or "", Rule("pointer")) != Rule("pointer")
    by_itself, unfit = isinstance(module, BatchNormBase), fractions and not kind.is_floating_point
    for wrong, what, cure in (
        (by_itself, f"{which} is merged without a word", "leave buffer() out"),
        (name in rules, f"{which} is declared twice", "declare it once"),
        (name in module._non_persistent_buffers_set, f"{which} is in no checkpoint", "leave persistent=False out"),
        (not callable(merge) and merge not in _RULES, f"merge={merge!r} is not known", f"say {known}, or a function"),
        (summed and factor is None, f"merge={merge!r} needs factor=", "say the decay of a moving average, 1 for a sum"),
        (not summed and factor is not None, f"merge={merge!r} takes no factor=", "leave it out, or say 'affine'"),
        (merge != "queue" and to is not None, f"merge={merge!r} takes no pointer=", "leave it out, or say 'queue'"),
        (lost, "merge='queue' needs pointer=", "name a buffer of one integer that says where the next entry goes"),
        (unfit or kind.is_complex, f"{which} holds {kind}", f"merge={merge!r} is for numbers of floating point"),
    ):
        if wrong:
            raise UsageError(what, cure)
    rules[name] = Rule(merge, 1.0 if factor is None else float(factor), pointer or "", dim)
    if pointer is not None:
        rules[pointer] = Rule("pointer")
    DECLARED[0] += 1


def declared(model: nn.Module) -> Iterator[tuple[str, str]]:
    """The names of a model's declared buffers, and the rules by which they are merged."""
    for path, module in model.named_modules():
        for name, rule in vars(module).get(_KEY, {}).items():
            merge = rule.merge if isinstance(rule.merge, str) else "a function"
            details = f"{merge}, factor={rule.factor:g}, pointer={rule.pointer!r}, dim={rule.dim}"
            yield f"{path}.{name}" if path else name, details


def _buffer_of(module: nn.Module, name: str) -> torch.Tensor:
    tensor = module._buffers.get(name)
    if tensor is None:
        others = ", ".join(map(repr, module._buffers)) or "none"
        raise UsageError(f"{type(module).__name__} has no buffer {name!r}", f"register it first; there is {others}")
    return tensor


class _DeclaredBuffer:
    """A declared buffer and its value at the start of the step.

    The merge adds up how far each micro-batch moves the buffer from a base value, with weights. A record has one column
    more than the buffer has elements: the sum of these weights. Queues are merged differently, see `_QueueBuffer`.
    """

    def __init__(self, label: str, module: nn.Module, name: str, rule: Rule, is_trained: bool) -> None:
        self.why = f"the forward changes the buffer {label}"
        self.module, self.name, self.rule, self.is_trained = module, name, rule, is_trained
        self.pointer: Any = None
        self.take()

    @property
    def certain(self) -> str:
        """Why micro-batches must run one by one, known before the forward: only for the trained model in training mode.

        Whether a loss runs another trainer's model shows only afterwards, in `moved`.
        """
        return self.why if self.is_trained and self.module.training else ""

    def buffers(self) -> set[int]:
        """The identity of the tensor, as a set."""
        return {id(self.tensor)}

    def take(self) -> None:
        """Remembers the buffer's value and version at the start of a step."""
        self.tensor = _buffer_of(self.module, self.name)
        self.start, self._version = self.tensor.clone(), self.tensor._version

    def shape(self, options: StepOptions, exact: bool) -> tuple[int, int]:
        """Shape of a step's records: a row for each micro-batch where the order of the merge matters, else one row.

        It matters for "affine", and with `exact` for every sum, whose rounding must not depend on the workers.
        """
        apart = self.rule.merge == "affine" or (exact and self.rule.merge != "last")
        rows = options.micro_batches if apart else 1
        return (rows if self.rule.merge in _RULES else 0), self.start.numel() + 1

    def restore(self) -> None:
        """Gives the buffer the value that it had at the start of the step."""
        put_back(self.tensor, self.start)
        self.module._buffers[self.name] = self.tensor
        self._version = self.tensor._version

    def now(self) -> torch.Tensor:
        """The buffer's current value. Raises ChangingBufferError if a forward changed its shape or removed it."""
        current, before = self.module._buffers[self.name], tuple(self.start.shape)
        if current is None or tuple(current.shape) != before:
            what = f"{self.why}, of shape {before}, into {None if current is None else tuple(current.shape)}"
            cure = "let it keep its shape, and count in another buffer how much of it is used"
            if current is self.tensor:  # resized in place, as observers of quantisation do in their first forward
                cure = "run one forward in training mode before the Trainer is made, so that it has its size then"
            raise ChangingBufferError(what, cure)
        return current.detach()

    def moved(self, values: bool = True) -> str:
        """Why micro-batches must run one by one, if a forward wrote to the buffer; else an empty text.

        `values` compares values, too: writes through `.data` do not change a tensor's version.
        """
        current = self.module._buffers[self.name]
        same = current is self.tensor and self.tensor._version == self._version
        return "" if same and not (values and not self.now().equal(self.start)) else self.why

    def _base(self, like: torch.Tensor, start: torch.Tensor | None = None) -> torch.Tensor:
        factor = self.rule.factor if self.rule.merge == "sum" else 1.0
        begun = self.start if start is None else start
        return begun.to(like).flatten() * factor if self.rule.merge != "last" else torch.zeros_like(like)

    def record(self, rows: torch.Tensor, chunk: Chunk, count: int) -> None:
        """Adds the chunk's change of the buffer to the step's records; `count` is the step's micro-batches."""
        first, last = chunk.micro_batches[0].index, chunk.micro_batches[-1].index
        weights = {"mean": chunk.rows, "last": count - 1 in (first, last)}
        if weight := float(weights.get(str(self.rule.merge), self.moved() != "")):
            row = rows[first if len(rows) > 1 else 0]
            row[:-1] += weight * (self.now().to(rows).flatten() - self._base(row[:-1]))
            row[-1] += weight

    def merge(self, rows: torch.Tensor, base: torch.Tensor | None = None) -> None:
        """Applies the records of all micro-batches to `start`; they may have started from another value, `base`."""
        changes, weights = rows[:, :-1], rows[:, -1:]
        if self.rule.merge == "affine":  # what a micro-batch adds goes through the later ones that write to it
            kept = torch.cat([self.rule.factor ** weights[1:], torch.ones_like(weights[:1])]).flip(0).cumprod(0).flip(0)
            changes = kept * changes
        total = weights.sum()
        if total > 0:  # or nobody has written to it
            change = changes.sum(0) / (total if self.rule.merge == "mean" else 1.0)
            made = self._base(change, base) + change
            if base is not None and self.rule.merge in ("sum", "affine"):
                share = self.rule.factor ** (1.0 if self.rule.merge == "sum" else total.item())
                made += share * (self.start - base).to(made).flatten()
            self.start.copy_(made.view_as(self.start))


class _QueueBuffer(_DeclaredBuffer):
    """A ring buffer to which each micro-batch appends entries; the records hold the entries themselves, one a row."""

    def shape(self, options: StepOptions, exact: bool) -> tuple[int, int]:
        self.first, self.size = int(self.pointer.start), self.start.shape[self.rule.dim]
        return options.rows, self.start.numel() // self.size + 1

    def _places(self, count: int) -> torch.Tensor:
        places = torch.arange(self.first, self.first + count, dtype=torch.int64, device=self.start.device)
        return places[-self.size :] % self.size

    def record(self, rows: torch.Tensor, chunk: Chunk, count: int) -> None:
        """Copies the entries that the chunk appended into the rows of its samples."""
        moved = (int(self.pointer.now()) - self.first) % self.size
        if moved > chunk.rows or (moved == 0 and not self.now().equal(self.start)):
            what = f"{self.why}, and moves its pointer by {moved} of {self.size} in a micro-batch of {chunk.rows} rows"
            raise ChangingBufferError(what, "let it add at most an entry for each row, and move the pointer by as many")
        entries = rows[chunk.micro_batches[0].start :][:moved]
        entries[:, :-1] += (
            self.now().movedim(self.rule.dim, 0)[self._places(moved)].to(rows).reshape(entries[:, :-1].shape)
        )
        entries[:, -1] += 1

    def merge(self, rows: torch.Tensor, base: torch.Tensor | None = None) -> None:
        entries, new = self.start.movedim(self.rule.dim, 0), rows[rows[:, -1] > 0, :-1]
        places = self._places(len(new))
        entries[places] = new[len(new) - len(places) :].to(entries).view(len(places), *entries.shape[1:])
        self.pointer.start.fill_((self.first + len(new)) % self.size)


class BufferMerger:
    """What the forwards of a step leave in buffers of `models`, the trained one first: recorded, exchanged, and merged
    the same on every worker.
    """

    def __init__(self, models: Sequence[nn.Module], exact: bool) -> None:
        statistics, self._held, self._exact = BatchNormStats(models), list(held_in(models)), exact
        self._all: list[BatchNormStats | _DeclaredBuffer] = [*([statistics] if statistics.modules else []), *self._held]
        self.is_empty = not self._all  # there is nothing to look after
        self._open = False  # a step has begun that is neither merged nor void

    def buffers(self) -> set[int]:
        """Identities of the buffers that are looked after here."""
        return {identity for one in self._all for identity in one.buffers()}

    def begin(self, options: StepOptions, device: torch.device) -> torch.Tensor | None:
        """Starts a step; its records, which are empty as yet, or None where there are none."""
        self._open, self._count = True, options.micro_batches
        if self._held:  # then every micro-batch starts from what the step began with, on one worker as well
            options = replace(options, record_buffers=True)
        for one in self._all:
            one.take()
        self._shapes = [one.shape(options, self._exact) for one in self._all]
        length = sum(map(math.prod, self._shapes))
        return torch.zeros(length, dtype=torch.float64, device=device) if length or self._held else None

    def _cut(self, records: torch.Tensor) -> Iterator[tuple[BatchNormStats | _DeclaredBuffer, torch.Tensor]]:
        parts = records.split([*map(math.prod, self._shapes)])
        triples = zip(self._all, parts, self._shapes, strict=True)
        return ((one, part.view(shape)) for one, part, shape in triples if part.numel())

    @property
    def certain(self) -> str:
        """Why the trained model's micro-batches must stay alone; of another's nobody knows before it ran."""
        return next(filter(None, (one.certain for one in self._all)), "")

    def moved(self, values: bool) -> str:
        """Why a micro-batch must stay alone whose forward it was, if it must."""
        return next(filter(None, (one.moved(values) for one in self._all)), "")

    def restore(self, void: bool = False) -> None:
        """Brings back what the step began with: for the next micro-batch, or because a `void` step leaves no trace."""
        for one in self._all if self._open else ():
            one.restore()
        self._open = self._open and not void

    def record(self, records: torch.Tensor, chunk: Chunk) -> None:
        """What a chunk has left; one of several micro-batches has moved nothing, or it would not have been merged."""
        for one, part in self._cut(records):
            one.record(part, chunk, self._count)

    def begun(self) -> list[torch.Tensor]:
        """Copies of what the step began with."""
        return [one.start.clone() for one in self._all]

    def merge(self, records: torch.Tensor | None, bases: Sequence[torch.Tensor] | None = None) -> None:
        """Ends a step with the records of all micro-batches, which are the same on every worker. These may tell of
        moves from other `bases`, which `begun` gave.
        """
        if self._open and records is not None:
            given = {} if bases is None else {id(one): base for one, base in zip(self._all, bases, strict=True)}
            for one, part in self._cut(records):
                one.merge(part, given.get(id(one)))
            self.restore()
            for held in self._held:
                if callable(held.rule.merge):
                    held.start.copy_(held.rule.merge(held.module).detach())
                    held.restore()
        self._open = False


def held_in(models: Sequence[nn.Module]) -> Iterator[_DeclaredBuffer]:
    """All that is declared, and what is known: power iterations (Miyato et al., "Spectral Normalization for Generative
    Adversarial Networks", ICLR 2018) depend on nothing but weights, so all micro-batches of a step come to the same.
    """
    seen: set[nn.Module] = set()
    for others, model in zip(["", *[OTHERS] * len(models)], models, strict=False):
        for prefix, module in model.named_modules(memo=seen):
            spectral = [h for h in module._forward_pre_hooks.values() if isinstance(h, SpectralNorm)]
            known = [f"{hook.name}{end}" for hook in spectral for end in ("_u", "_v")]
            known += ["_u", "_v"] if isinstance(module, _SpectralNorm) and "_u" in module._buffers else []
            by_name: dict[str, _DeclaredBuffer] = {}
            rules = dict.fromkeys(known, Rule("last")) | vars(module).get(_KEY, {})
            order = {name: position for position, name in enumerate(module._buffers)}
            # In the order in which buffers were registered, which is the same on all workers; functions last.
            for name, rule in sorted(rules.items(), key=lambda one: (callable(one[1].merge), order.get(one[0], -1))):
                label = repr(f"{prefix}.{name}" if prefix else name) + others
                kind = _QueueBuffer if rule.merge == "queue" else _DeclaredBuffer
                by_name[name] = kind(label, module, name, rule, is_trained=not others)
            for one in by_name.values():
                one.pointer = by_name.get(one.rule.pointer)
            yield from by_name.values()


@contextmanager
def unchanging(model: nn.Module) -> Iterator[None]:
    """Raises ChangingBufferError where a forward changes what is declared, though the model is in eval mode."""
    held = list(held_in([model]))
    yield
    for one in held:
        if why := one.moved():
            one.restore()
            raise ChangingBufferError(f"{why} in eval mode", "change it only where self.training is true")
