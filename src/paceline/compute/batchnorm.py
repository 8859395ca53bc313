"""BatchNorm statistics and the other buffer changes of a forward."""

from __future__ import annotations

from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from paceline.comm.torch_private import BatchNormBase
from paceline.compute.microbatches import Chunk
from paceline.compute.rng import RngState
from paceline.errors import UsageError

if TYPE_CHECKING:
    from paceline.compute.job import StepOptions

OTHERS = " of another trainer's model"
_BATCHNORM = "BatchNorm normalises each micro-batch"


def _modules(models: Sequence[nn.Module]) -> list[nn.Module]:
    """The modules of all models, each once."""
    return list({id(module): module for model in models for module in model.modules()}.values())


class BatchNormStats:
    """Running statistics of BatchNorm, collected per micro-batch and merged in grid order.

    `models` are those of all trainers of the script, the trained one first: a loss may run another one's. Every
    micro-batch starts from the step's statistics. The change that it makes is recorded and exchanged, so the arithmetic
    does not depend on which worker computes which micro-batch.
    """

    def __init__(self, models: Sequence[nn.Module]) -> None:
        self.modules = [m for m in _modules(models) if isinstance(m, BatchNormBase)]
        if any(isinstance(module, nn.SyncBatchNorm) for module in self.modules):
            raise UsageError(
                "the model has SyncBatchNorm, whose result depends on the number of workers",
                "use BatchNorm, which normalises each micro-batch and gives the same result on any number of workers",
            )
        self._trained_ids = {id(module) for module in models[0].modules()}
        self._active: list[Any] = []
        self._others: list[Any] = []
        self._buffers: list[torch.Tensor] = []
        # The values of the buffers when the step began, as one flat float64 tensor.
        self._start = torch.empty(0, dtype=torch.float64)
        self._begun: list[torch.Tensor] = []  # views of `_start`, one per buffer
        self._calls: list[int] = []  # versions of the batch counters in other trainers' models

    def buffers(self) -> set[int]:
        """Identities of the buffers that this object restores and merges."""
        return {
            id(buffer)
            for module in self.modules
            for buffer in (module.running_mean, module.running_var, module.num_batches_tracked)
            if buffer is not None
        }

    def take(self) -> None:
        """Starts a step: remembers the current statistics."""
        self._active = [module for module in self.modules if module.training and module.running_mean is not None]
        self._others = [module for module in self._active if id(module) not in self._trained_ids]
        buffers = [b for m in self._active for b in (m.num_batches_tracked, m.running_mean, m.running_var)]
        if [*map(id, buffers)] != [*map(id, self._buffers)]:  # cutting the views anew takes longer than all the rest
            self._buffers = buffers
            self._start = self._now() if buffers else torch.empty(0, dtype=torch.float32)
            parts = self._start.split([buffer.numel() for buffer in buffers])
            self._begun = [part.view(buffer.shape) for buffer, part in zip(buffers, parts, strict=True)]
        elif buffers:
            self._start.copy_(self._now())
        self._calls = self._counted()

    def shape(self, options: StepOptions, exact: bool) -> tuple[int, int]:
        """Returns the shape of a step's records: one row per micro-batch, or no rows if nothing is recorded."""
        return options.micro_batches if options.record_buffers else 0, self._start.numel()

    @property
    def certain(self) -> str:
        """Why micro-batches must run one by one, if the trained model has active BatchNorm; else an empty text.

        Whether a loss runs another trainer's model is known only afterwards, in `moved`.
        """
        return _BATCHNORM if len(self._active) > len(self._others) else ""

    def _counted(self) -> list[int]:
        return [module.num_batches_tracked._version for module in self._others]

    def moved(self, values: bool) -> str:
        """Why micro-batches must run one by one, if BatchNorm of another trainer's model ran in training mode."""
        return _BATCHNORM if self._counted() != self._calls else ""

    def restore(self) -> None:
        """Restores the state at `take`, for the next micro-batch or after a void step."""
        if self._buffers:
            torch._foreach_copy_(self._buffers, self._begun)  # a copy rounds to the buffer's own dtype
            self._calls = self._counted()

    def record(self, rows: torch.Tensor, chunk: Chunk, count: int) -> None:
        """Records how far the buffers have moved since `take`."""
        rows[chunk.micro_batches[0].index] = self._now() - self._start

    def _now(self) -> torch.Tensor:
        flat = torch.cat([buffer.reshape(-1) for buffer in self._buffers])  # the counts are small
        return flat.float() if flat.device.type == "mps" else flat.double()  # MPS has no float64

    @property
    def start(self) -> torch.Tensor:
        """The values of the buffers when the step began."""
        return self._start

    def merge(self, records: torch.Tensor, base: torch.Tensor | None = None) -> None:
        """Applies the records of all micro-batches, shape (micro-batches, record), in grid order. If the records
        were made from other values than the step's start, these are the `base`.

        A forward maps a statistic r to a·r + b. If micro-batch i by itself moves it by d_i, all in turn move it by the
        sum of d_i·(a_(i+1) a_(i+2) ...). In a cumulative average, the weight of a micro-batch falls with the number of
        batches before it.
        """
        sizes = torch.tensor([1 + 2 * module.running_mean.numel() for module in self._active], dtype=torch.int64)
        counters = (sizes.cumsum(0) - sizes).to(records.device)  # the columns of the batch counters
        calls = records[:, counters]
        momentum = torch.tensor([1.0 if m.momentum is None else m.momentum for m in self._active], dtype=torch.float64)
        keep, weight = (1.0 - momentum.to(records.device)) ** calls, torch.ones_like(calls)
        for column, module in enumerate(self._active):
            if module.momentum is None:  # a cumulative average over all batches
                before = (self._start if base is None else base)[counters[column]]
                after = (self._start[counters[column]] + calls[:, column].cumsum(0)).clamp(min=1)
                keep[:, column] = 1.0 - calls[:, column] / after
                weight[:, column] = (before + calls[:, column]) / after
        kept = torch.cat([keep[1:], torch.ones_like(keep[:1])]).flip(0).cumprod(0).flip(0)
        moved = ((kept * weight).repeat_interleave(sizes.to(records.device), dim=1) * records).sum(0)
        if base is not None:
            moved += (1.0 - keep.prod(0)).repeat_interleave(sizes.to(records.device)) * (base - self._start)
        moved[counters] = calls.sum(0)
        self._start.add_(moved)


class BufferChangeDetector:
    """Notices buffers that a forward changes or replaces, other than BatchNorm's, and parameters that it writes.

    `models` are those of all trainers of the script, the trained one first.
    """

    def __init__(self, models: Sequence[nn.Module], except_: set[int]) -> None:
        named = [(model, f"{{!r}}{OTHERS if number else ''}") for number, model in enumerate(models)]
        self._owners = [
            (form.format(f"{prefix}.{name}" if prefix else name), module, name)
            for model, form in named
            for prefix, module in model.named_modules()
            for name, buffer in module._buffers.items()
            if buffer is not None and id(buffer) not in except_
        ]
        self._params = [(form.format(name), param) for model, form in named for name, param in model.named_parameters()]
        self._versions: list[int] = []
        self._marks: list[tuple[torch.Tensor | None, int]] = []
        self._values: list[torch.Tensor] = []
        self._prints: list[torch.Tensor] = []  # of parameters, where they are compared by value too

    def mark(self, values: bool) -> None:
        """Remembers the buffers, and their values if anything changed since the last mark; with `values` also a sum and
        norm of each parameter, because `param.data.clamp_()` does not change a version.
        """
        self._prints = [sum_and_norm(param) for _, param in self._params] if values else []
        buffers = [module._buffers[key] for _, module, key in self._owners]
        if len(self._marks) != len(buffers) or (buffers and self._changed_buffer(values=False) is not None):
            nothing = torch.empty(0, dtype=torch.float32)
            self._values = [nothing if buffer is None else buffer.clone() for buffer in buffers]
        self._marks = [(buffer, -1 if buffer is None else buffer._version) for buffer in buffers]
        self._versions = [param._version for _, param in self._params]

    def changed(self, values: bool) -> str | None:
        """Returns ``buffer 'name'`` or ``parameter 'name'`` that changed since `mark`, or None. `values` compares
        values, too.
        """
        if self._owners and (buffer := self._changed_buffer(values)) is not None:
            return f"buffer {buffer}"
        written = (n for (n, param), mark in zip(self._params, self._versions, strict=True) if param._version != mark)
        name = next(written, None)
        if name is None and self._prints:
            pairs = zip(self._params, self._prints, strict=True)
            name = next(
                (n for (n, p), old in pairs if not torch.allclose(sum_and_norm(p), old, 0, 0, equal_nan=True)), None
            )
        return None if name is None else f"parameter {name}"

    def _changed_buffer(self, values: bool) -> str | None:
        for number, (name, module, key) in enumerate(self._owners):
            buffer, (old, version) = module._buffers[key], self._marks[number]
            if buffer is not old or (buffer is not None and buffer._version != version):
                return name
            if values and buffer is not None and not torch.equal(buffer, self._values[number]):
                return name
        return None

    def restore(self) -> None:
        """Restores the buffers and values of the last `mark`, if there was one."""
        for number, (old, version) in enumerate(self._marks):
            _, module, key = self._owners[number]
            if old is not None:
                put_back(old, self._values[number], version)
                self._marks[number] = (old, old._version)  # the restored value is no change
            module._buffers[key] = old


def put_back(buffer: torch.Tensor, value: torch.Tensor, version: int) -> None:
    """Gives a buffer the value that it had in a former version. If it still has it, backwards may need it unwritten."""
    if buffer.shape != value.shape:
        buffer.resize_(value.shape)  # observers of quantisation resize theirs in the first forward
    if buffer._version != version or not torch.equal(buffer, value):
        buffer.copy_(value)


@contextmanager
def without_a_trace(model: nn.Module, streams: RngState) -> Iterator[None]:
    """Restores a model after forwards inside the context: buffers, random streams and attributes of modules, including
    the contents of lists, dicts and sets, registered hooks, and the states of generators that modules keep.
    """
    kept = [(buffer, buffer.clone()) for buffer in model.buffers()]
    attributes = [(module, _attributes_of(module)) for module in model.modules()]
    seen = set[int]()
    contents = [(held, _content_of(held)) for _, values in attributes for held in _held_in(values.values(), seen)]
    # A forward may register hooks and remember in an attribute that it has: both go, or it would register them twice.
    contents += [
        (hooks, hooks.copy())
        for module in model.modules()
        for hooks in map(vars(module).get, _HOOKS)
        if hooks is not None
    ]
    try:
        with streams.preserved():
            yield
    finally:
        for held, content in contents:
            _fill(held, content)
        for module, values in attributes:
            for name in _attributes_of(module).keys() - values.keys():
                del vars(module)[name]
            vars(module).update(values)
        with torch.no_grad():
            for buffer, value in kept:
                put_back(buffer, value, buffer._version)


_TORCHS = frozenset(vars(nn.Module()))  # attributes that every module has
_HOOKS = sorted(name for name in _TORCHS if "hooks" in name and isinstance(vars(nn.Module())[name], dict))


def _attributes_of(module: nn.Module) -> dict[str, Any]:
    """Returns the attributes of a module that not every nn.Module has."""
    return {name: value for name, value in vars(module).items() if name not in _TORCHS}


def _held_in(values: Iterable[Any], seen: set[int]) -> Iterator[Any]:
    """Yields the mutable values among attributes, including nested ones, each once."""
    for value in values:
        if id(value) in seen:
            continue
        if type(value) in (list, dict, set, deque, defaultdict, OrderedDict):
            seen.add(id(value))
            yield value
            yield from _held_in(list(value.values() if isinstance(value, dict) else value), seen)
        elif isinstance(value, torch.Generator):
            yield value


def _content_of(held: Any) -> Any:
    return held.get_state() if isinstance(held, torch.Generator) else held.copy()


def _fill(held: Any, content: Any) -> None:
    if isinstance(held, torch.Generator):
        held.set_state(content)
    elif not _same_content(held, content):
        held.clear()
        (held.extend if isinstance(held, list | deque) else held.update)(content)


def _same_content(held: Any, content: Any) -> bool:
    pairs = (held.items(), content.items()) if isinstance(held, dict) else (held, content)
    return len(held) == len(content) and [*map(_known, pairs[0])] == [*map(_known, pairs[1])]


def _known(value: Any) -> Any:
    return tuple(map(id, value)) if isinstance(value, tuple) else id(value)


def sum_and_norm(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the sum and norm of a tensor, a cheap fingerprint that shows writes. Empty for sharded tensors and for
    dtypes other than floating point.
    """
    if not tensor.is_floating_point() or hasattr(tensor, "_local_tensor"):
        return torch.empty(0, dtype=torch.float32)
    flat, wide = tensor.detach(), torch.float32 if tensor.device.type == "mps" else torch.float64
    return torch.stack([flat.sum(dtype=wide), torch.linalg.vector_norm(flat, dtype=wide)])
