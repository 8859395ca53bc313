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
DECLARED = [0]  # the number of calls of `buffer`; when it changes, models are searched again


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
    """Declares how the changes of a buffer in training forwards are merged, so that it is the same on all workers.

    `name` is a buffer of `module`. Every micro-batch starts from the buffer's value at the beginning of the step. When
    all are done, each worker merges their results by the rule `merge`:

    - ``"affine"``: a micro-batch turns r into `factor`·r + b; the micro-batches are applied one after another, in the
      order of the grid.
    - ``"sum"``: as if all micro-batches were one batch: `factor`·r + the sum of their b.
    - ``"mean"``: the mean of the micro-batches' results, weighted by their rows.
    - ``"last"``: the result of the last micro-batch.
    - ``"queue"``: a ring along dimension `dim`, to which each micro-batch adds at most one entry per row. `pointer`
      names a buffer of one integer, the position of the next entry. Entries are added in the order of the grid.
    - a function of the module: it returns the buffer's value after all other buffers are merged, for a buffer that is
      computed from others.

    Raises UsageError for wrong arguments. A step raises ChangingBufferError if a forward makes a change that the rule
    cannot merge.
    """
    if not isinstance(module, nn.Module):
        what = f"buffer() needs an nn.Module, got {a(type(module).__name__)}"
        raise UsageError(what, "pass the module that has the buffer")
    tensor, rules = _buffer_of(module, name), vars(module).setdefault(_KEY, {})
    which, summed = f"the buffer {name!r} of {type(module).__name__}", merge in ("affine", "sum")
    fractions = merge == "mean" or factor not in (None, 1)
    known, kind = ", ".join(map(repr, _RULES)), tensor.dtype
    to = None if pointer is None else _buffer_of(module, pointer)
    lost = merge == "queue" and (to is None or to.numel() != 1 or to.is_floating_point())
    lost = lost or rules.get(pointer or "", Rule("pointer")) != Rule("pointer")
    by_itself, unfit = isinstance(module, BatchNormBase), fractions and not kind.is_floating_point
    for wrong, what, cure in (
        (by_itself, f"{which} is merged automatically", "leave buffer() out"),
        (name in rules, f"{which} is declared twice", "declare it once"),
        (name in module._non_persistent_buffers_set, f"{which} is not in checkpoints", "leave persistent=False out"),
        (not callable(merge) and merge not in _RULES, f"merge={merge!r} is unknown", f"use {known}, or a function"),
        (summed and factor is None, f"merge={merge!r} needs factor=", "pass the decay of an average, or 1 for a sum"),
        (not summed and factor is not None, f"merge={merge!r} takes no factor=", "leave it out, or use merge='affine'"),
        (merge != "queue" and to is not None, f"merge={merge!r} takes no pointer=", "leave it out, or use 'queue'"),
        (lost, "merge='queue' needs pointer=", "name a buffer of one integer, the position of the next entry"),
        (unfit or kind.is_complex, f"{which} has dtype {kind}", f"merge={merge!r} needs floating-point numbers"),
    ):
        if wrong:
            raise UsageError(what, cure)
    rules[name] = Rule(merge, 1.0 if factor is None else float(factor), pointer or "", dim)
    if pointer is not None:
        rules[pointer] = Rule("pointer")
    DECLARED[0] += 1


def declared(model: nn.Module) -> Iterator[tuple[str, str]]:
    """Yields the names of a model's declared buffers, and the rules by which they are merged."""
    for path, module in model.named_modules():
        for name, rule in vars(module).get(_KEY, {}).items():
            merge = rule.merge if isinstance(rule.merge, str) else "a function"
            details = f"{merge}, factor={rule.factor:g}, pointer={rule.pointer!r}, dim={rule.dim}"
            yield f"{path}.{name}" if path else name, details


def _buffer_of(module: nn.Module, name: str) -> torch.Tensor:
    tensor = module._buffers.get(name)
    if tensor is None:
        others = f"its buffers are {', '.join(map(repr, module._buffers))}" if module._buffers else "it has no buffers"
        raise UsageError(f"{type(module).__name__} has no buffer {name!r}", f"register it first; {others}")
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

        Whether a loss runs another trainer's model is known only afterwards, in `moved`.
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
        """Restores the buffer's value at the start of the step."""
        put_back(self.tensor, self.start, self._version)
        self.module._buffers[self.name] = self.tensor
        self._version = self.tensor._version

    def now(self) -> torch.Tensor:
        """The buffer's current value. Raises ChangingBufferError if a forward changed its shape or removed it."""
        current, before = self.module._buffers[self.name], tuple(self.start.shape)
        if current is None or tuple(current.shape) != before:
            how = "the buffer is removed" if current is None else f"the shape {before} becomes {tuple(current.shape)}"
            what = f"{self.why}: {how}"
            cure = "keep its shape, and count in another buffer how many entries are used"
            if current is self.tensor:  # resized in place, as observers of quantisation do in their first forward
                cure = "run one forward in training mode before creating the Trainer, so that it has its final size"
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
        if total > 0:  # else no micro-batch has written to it
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
            rows_text = f"{chunk.rows} row{'s' if chunk.rows != 1 else ''}"
            what = f"{self.why} and moves its pointer by {moved} (of {self.size}) in a micro-batch of {rows_text}"
            raise ChangingBufferError(
                what, "add at most one entry per row, and move the pointer by the number of entries"
            )
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
    """Records the buffer changes of a step's forwards and merges them, with the same result on every worker.

    `models` are those whose buffers may change, the trained one first.
    """

    def __init__(self, models: Sequence[nn.Module], exact: bool) -> None:
        statistics, self._held, self._exact = BatchNormStats(models), list(held_in(models)), exact
        self._all: list[BatchNormStats | _DeclaredBuffer] = [*([statistics] if statistics.modules else []), *self._held]
        self.is_empty = not self._all  # no buffer to merge
        self._open = False  # whether a step has begun and is neither merged nor void

    def buffers(self) -> set[int]:
        """Identities of the buffers that this object restores and merges."""
        return {identity for one in self._all for identity in one.buffers()}

    def begin(self, options: StepOptions, device: torch.device) -> torch.Tensor | None:
        """Starts a step. Returns its records, zero until forwards write them, or None if nothing needs recording."""
        self._open, self._count = True, options.micro_batches
        if self._held:  # then every micro-batch starts from the step's initial values, on one worker as well
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
        """Why micro-batches must run one by one, as far as it is known before the forward; else an empty text."""
        return next(filter(None, (one.certain for one in self._all)), "")

    def moved(self, values: bool) -> str:
        """Why micro-batches must run one by one, from the changes of the last forward; else an empty text."""
        return next(filter(None, (one.moved(values) for one in self._all)), "")

    def restore(self, void: bool = False) -> None:
        """Restores the initial values of the step, for the next micro-batch or after a `void` step."""
        for one in self._all if self._open else ():
            one.restore()
        self._open = self._open and not void

    def record(self, records: torch.Tensor, chunk: Chunk) -> None:
        """Records the changes of a chunk. A chunk of several micro-batches has none, or it would not have been
        merged.
        """
        for one, part in self._cut(records):
            one.record(part, chunk, self._count)

    def begun(self) -> list[torch.Tensor]:
        """Returns copies of the initial values of the step."""
        return [one.start.clone() for one in self._all]

    def merge(self, records: torch.Tensor | None, bases: Sequence[torch.Tensor] | None = None) -> None:
        """Ends a step with the records of all micro-batches, which are the same on every worker.

        `bases` are the initial values from which the records were made, as `begun` returned them, if not the step's.
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
    """Yields all declared buffers, and those of spectral normalisation (Miyato et al., "Spectral Normalization for
    Generative Adversarial Networks", ICLR 2018): power iterations depend only on the weights, so all micro-batches of a
    step get the same result.
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
    """Raises ChangingBufferError if a forward changes a declared buffer although the model is in eval mode."""
    held = list(held_in([model]))
    yield
    for one in held:
        if why := one.moved():
            one.restore()
            raise ChangingBufferError(f"{why} in eval mode", "change it only if self.training is true")
