"""Layers that are cut inside (Shoeybi et al., "Megatron-LM: Training Multi-Billion Parameter Language Models Using
Model Parallelism", 2019): a unit's workers hold parts of a layer and compute the same micro-batch together.

A *column* cut divides what a layer gives (*gathered*: and puts it together again; ``column:3``: each third of it, as
query, key and value of one weight), a *row* cut what it takes, a *vocabulary* cut the entries of an embedding. The
user's modules stay as they are, but for a smaller weight and a forward of ours. What is not cut, or said to be *whole*,
is computed by all alike.
"""

from __future__ import annotations

import re
import weakref
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call
from torch.overrides import TorchFunctionMode

from paceline.comm.group import Group
from paceline.errors import UsageError, add_hint
from paceline.pieces import Cut, assemble
from paceline.strategies.chunks import digest_of, tensors_of
from paceline.strategies.job import Job
from paceline.strategies.state import marks_of
from paceline.strategies.streams import Streams

COLUMN, GATHERED, ROW, VOCABULARY, WHOLE = "column", "gathered", "row", "vocabulary", "whole"
PLACEMENTS = f"say one of {COLUMN}, {COLUMN}:N, {GATHERED}, {ROW}, {VOCABULARY}, {WHOLE}"
# What transformers calls them. What is whole and meets a part has a gradient in parts, which is observed here.
_THEIRS = {
    "colwise": COLUMN,
    "colwise_gather_output": GATHERED,
    "colwise_rep": GATHERED,
    "rowwise": ROW,
    "embedding_rowwise": VOCABULARY,
    **dict.fromkeys(("replicate", "replicated_with_grad_allreduce", "sequence_parallel"), WHOLE),
}
_HEADS = {"num_attention_heads": "attention heads", "num_key_value_heads": "key-value heads"}
_OF = {COLUMN: "outputs", GATHERED: "outputs", ROW: "inputs", VOCABULARY: "entries"}
_SAY = 'say which layers: Trainer(..., tensor={"blocks.*.up": "column", "blocks.*.down": "row"})'
_SIZES = "write -1 for its size or the number of heads, as in view(*x.shape[:2], -1, head_size)"
_PART = "_paceline_part"
# By how much the output of the cut model may differ from that of the whole one, as a part of its norm: by rounding.
_ROUNDING = {torch.float64: 1e-9, torch.float32: 1e-3}
_BETWEEN = (nn.ReLU, nn.GELU, nn.SiLU, nn.Tanh, nn.Sigmoid, nn.ELU, nn.LeakyReLU, nn.Softplus, nn.Dropout, nn.Identity)


# Each one's backward is made of the others, so that a gradient may have a gradient.


class _Split(torch.autograd.Function):
    """What all have, each uses for its own part: the gradients of the parts are added up."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, unit: Group) -> torch.Tensor:
        ctx.unit = unit
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _applied(_Sum, grad, ctx.unit), None


class _Sum(torch.autograd.Function):
    """What each has a part of is added up: all have it, and all have its gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, unit: Group) -> torch.Tensor:
        ctx.unit = unit
        return _summed(x, unit)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _applied(_Split, grad, ctx.unit), None


class _Join(torch.autograd.Function):
    """Parts along the last dimension become whole everywhere; of its gradient, which all have, each takes its part."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, unit: Group) -> torch.Tensor:
        ctx.unit, ctx.width = unit, x.shape[-1]
        parts = unit.gather(x.reshape(-1).contiguous())
        return torch.cat([part.view(x.shape) for part in parts], dim=-1)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _applied(_Split, grad, ctx.unit).narrow(-1, ctx.unit.rank * ctx.width, ctx.width), None


def _summed(x: torch.Tensor, unit: Group) -> torch.Tensor:
    made = x.clone(memory_format=torch.contiguous_format)
    unit.sum(made.view(-1))
    return made


@dataclass
class _Layer:
    """A cut one: its name, the module, and how, in so many sections."""

    name: str
    module: nn.Module
    placement: str
    sections: int = 1


class TensorCut:
    """Cuts the layers of a job's model among the workers of a `unit`, as the `placements` of patterns of names say, or
    the model's own plan, or its structure.

    Raises UsageError where nothing can be cut, or a layer cannot be divided so often; and in the first forward where a
    part would draw by itself, or the model computes with parts what it does not compute with the whole.
    """

    def __init__(self, job: Job, unit: Group, placements: Mapping[str, str] | None) -> None:
        self.job, self.unit, self._said = job, unit, placements
        self._made: dict[int, tuple[nn.Parameter, Cut, nn.Parameter]] = {}  # of a whole one: its cut, the own part
        self._last: tuple[weakref.ref[torch.Tensor], torch.Tensor] | None = None  # split last, and what came of it
        self._streams, self._name = Streams(job.device), type(job.model).__name__
        self.layers = [*self._placed()]
        if not self.layers:
            looked = "its own plan (_tp_plan), and Linear, activation, Linear in a Sequential"
            raise UsageError(f"nothing of {self._name} can be cut: looked for {looked}", _SAY)
        for layer in self.layers:
            self._cut(layer)
        job.named = {name: param for name, param in job.model.named_parameters() if param.requires_grad}
        self._plain, self._watched = job.forward, set[bool]()  # in training and in eval mode: what was watched
        self.summing = set[int]()  # parameters that are whole, and whose gradients are in parts
        self._ours = self._uncut = False  # a forward of the job's, and one with whole layers, is going on
        job.forward = self._forward
        job.model.register_forward_pre_hook(self._called, with_kwargs=True)

    def __deepcopy__(self, memo: Any) -> TensorCut:
        what = f"{self._name} is cut by tensor=, and a copy would be of this worker's parts"
        raise UsageError(what, "export() writes it whole; leave tensor= out to keep a copy, as an average is")

    @property
    def told(self) -> tuple[str, str]:
        """For people: how many layers are cut how, and whence that is known."""
        counts = Counter(layer.placement for layer in self.layers)
        how = ", ".join(f"{count} {placement}" for placement, count in counts.items())
        return f"{len(self.layers)} layers are cut among {self.unit.size} workers ({how})", self._source

    # -- which layers ---------------------------------------------------------------------------------------------

    def _placed(self) -> Iterator[_Layer]:
        named = dict(self.job.model.named_modules())
        said, self._source = self._said, "tensor= says so"
        if said is None:
            said, self._source = self._theirs(), "the model's own plan says so"
        if not said:
            self._source = "they are Linear, activation, Linear in a Sequential"
            yield from self._derived(named)
            return
        for pattern, placement in said.items():
            kind, _, sections = placement.partition(":")
            if kind not in _FORWARDS.keys() | {WHOLE} or (sections and (kind != COLUMN or not sections.isdigit())):
                raise UsageError(f"tensor= says {placement!r} of {pattern!r}", PLACEMENTS)
            form = re.compile(re.escape(pattern).replace(r"\*", "[^.]+"))
            found = [name for name in named if form.fullmatch(name)]
            if not found and self._said is not None:
                raise UsageError(f"tensor= names {pattern!r}, and the model has no such module", "write its path")
            for name in found if kind != WHOLE else ():
                yield _Layer(name, named[name], kind, int(sections or 1))

    def _theirs(self) -> dict[str, str]:
        """The plan that a model of transformers brings."""
        found: Mapping[str, str] = getattr(self.job.model, "_tp_plan", None) or {}
        for pattern, style in found.items():
            if style not in _THEIRS:
                raise UsageError(f"the plan of {self._name} says {style!r} of {pattern}, which is not built yet", _SAY)
        count, config = self.unit.size, getattr(self.job.model, "config", None)
        for name, what in _HEADS.items() if found else ():
            heads = getattr(config, name, count)
            if heads % count:
                fits = [n for n in range(2, count) if heads % n == 0]
                cure = f"say tensor={fits[-1]}" if fits else "leave tensor= out"
                raise UsageError(f"tensor={count} does not divide the {heads} {what} of {self._name}", cure)
        return {name: _THEIRS[style] for name, style in found.items()}

    @staticmethod
    def _derived(named: Mapping[str, nn.Module]) -> Iterator[_Layer]:
        """In each Sequential two Linear layers, with nothing but activations between them."""
        for path, module in named.items():
            if not isinstance(module, nn.Sequential):
                continue
            before: _Layer | None = None
            for name, inner in module.named_children():
                label = f"{path}.{name}".lstrip(".")
                if type(inner) is nn.Linear and before is not None:
                    yield before
                    yield _Layer(label, inner, ROW)
                    before = None
                elif type(inner) is nn.Linear:
                    before = _Layer(label, inner, COLUMN)
                elif not isinstance(inner, _BETWEEN):
                    before = None

    # -- cutting ----------------------------------------------------------------------------------------------------

    def _cut(self, layer: _Layer) -> None:
        kind = nn.Embedding if layer.placement == VOCABULARY else nn.Linear
        if not isinstance(layer.module, kind) or getattr(layer.module, "max_norm", None) is not None:
            what = f"{layer.name} is {type(layer.module).__name__}, which has no {layer.placement} cut"
            raise UsageError(what, f"leave it out of tensor=, or name a {kind.__name__}")
        self._divide(layer, "weight", 1 if layer.placement == ROW else 0)
        if getattr(layer.module, "bias", None) is not None and layer.placement != ROW:
            self._divide(layer, "bias", 0)
        vars(layer.module)["forward"] = partial(self._run, layer.placement, layer.module)
        layer.module.register_forward_pre_hook(_nothing)  # or TransformerEncoderLayer takes the weights past a forward

    def _divide(self, layer: _Layer, key: str, dim: int) -> None:
        count, whole = self.unit.size, getattr(layer.module, key)
        length, rest = divmod(whole.shape[dim], layer.sections)
        if rest or length % count:
            of = f"{length} in each of the {layer.sections} sections of" if layer.sections > 1 else whole.shape[dim]
            what = f"tensor={count} does not divide the {of} {_OF[layer.placement]} of {layer.name}"
            fits = [n for n in range(2, count) if length % n == 0 and not rest]
            raise UsageError(what, f"say tensor={fits[-1]}" if fits else f'say "{WHOLE}" of it in tensor=')
        cut = Cut.split(tuple(whole.shape), dim, count, layer.sections)
        if id(whole) not in self._made:  # else it is tied to one that is cut already
            own = nn.Parameter(cut.pieces[self.unit.rank].of(whole.detach()).clone(), whole.requires_grad)
            vars(own).update(marks_of(whole))
            self._made[id(whole)] = whole, cut, own
        _, before, own = self._made[id(whole)]
        if before != cut:
            what = f"{layer.name}.{key} is tied to a weight that is cut in another way"
            raise UsageError(what, "leave it out of tensor=")
        setattr(layer.module, key, own)
        self.job.cuts[f"{layer.name}.{key}".lstrip(".")] = cut

    # -- forwards -----------------------------------------------------------------------------------------------------

    def _run(self, placement: str, module: nn.Module, x: torch.Tensor) -> torch.Tensor:
        if self._uncut:
            return self._run_whole(module, x)
        return cast(torch.Tensor, _FORWARDS[placement](self, module, x))

    def _column(self, module: nn.Linear, x: torch.Tensor) -> torch.Tensor:
        return F.linear(self._split(x), module.weight, module.bias)

    def _split(self, x: torch.Tensor) -> torch.Tensor:
        """Of several layers with one input, as query, key and value, the gradients are added up before they travel."""
        if not (x.requires_grad and torch.is_grad_enabled()):
            return x
        if self._last is None or self._last[0]() is not x:
            self._last = weakref.ref(x), _applied(_Split, x, self.unit)
        return self._last[1]

    def _gathered(self, module: nn.Linear, x: torch.Tensor) -> torch.Tensor:
        return _applied(_Join, self._column(module, x), self.unit)

    def _row(self, module: nn.Linear, x: torch.Tensor) -> torch.Tensor:
        found = _applied(_Sum, F.linear(x, module.weight), self.unit)
        return found if module.bias is None else found + module.bias

    def _vocabulary(self, module: nn.Embedding, ids: torch.Tensor) -> torch.Tensor:
        entries = len(module.weight)
        here = ids - self.unit.rank * entries
        others = (here < 0) | (here >= entries)
        padding = None if module.padding_idx is None else module.padding_idx - self.unit.rank * entries
        padding = padding if padding is not None and 0 <= padding < entries else None
        found = F.embedding(here.masked_fill(others, 0), module.weight, padding).masked_fill(others.unsqueeze(-1), 0.0)
        return _applied(_Sum, found, self.unit)

    def _run_whole(self, module: nn.Module, x: torch.Tensor) -> torch.Tensor:
        """As if it were not cut. Its weights are there for so long."""
        made = {}
        for key, part in module.named_parameters(recurse=False):
            cut = next((cut for _, cut, own in self._made.values() if own is part), None)
            if cut is not None:
                theirs = [piece.view(cut.at(n).shape) for n, piece in enumerate(self.unit.gather(part.reshape(-1)))]
                blocks = ((b.at, b.of(tensor)) for n, tensor in enumerate(theirs) for b in cut.at(n).blocks)
                made[key] = assemble(part.new_empty(cut.shape), blocks)
        ours = vars(module).pop("forward")
        try:
            return cast(torch.Tensor, functional_call(module, made, (x,)))
        finally:
            vars(module)["forward"] = ours

    # -- what a script may do with a cut model ------------------------------------------------------------------------

    def _forward(self, model: nn.Module, batch: Any) -> Any:
        self._enter()
        before, self._ours = self._ours, True
        try:
            if model is not self.job.model or model.training in self._watched:
                return self._plain(model, batch)
            output = self._first(model, batch)
            self._watched.add(model.training)
            return output
        finally:
            self._ours = before

    def _enter(self) -> None:
        self.unit.enter("the layers cut by tensor=", check=False, kind="tensor")

    def _called(self, model: nn.Module, given: Any, named: Any) -> None:
        """By the script itself: all of the unit compute it together, each with the same input."""
        if self._ours:
            return
        self.unit.enter(f"a call of {self._name}, whose layers are cut", kind="tensor")
        digests = self.unit.gather_json(digest_of((given, named)))
        other = next((rank for rank, digest in enumerate(digests) if digest != digests[0]), None)
        if other is not None:
            one, two = self.unit.names[0], self.unit.names[other]
            what = f"worker {two} calls {self._name} with another input than worker {one}, and tensor= cuts its layers"
            cure = "they compute it together: give all of them the same, as torch.cat(paceline.join().gather(x)) is"
            raise UsageError(what, cure)

    def _first(self, model: nn.Module, batch: Any) -> Any:
        """The first forward of a mode, watched, and compared with that of the whole model."""
        self.unit.enter("the whole layers, to compare with", check=False, kind="comparison")
        with self._without_a_trace(model):
            whole = self._plain(model, batch)
        self._enter()
        try:
            with _Parts(self, model):
                output = self._plain(model, batch)
        except (RuntimeError, ValueError, IndexError) as error:
            add_hint(error, f"tensor={self.unit.size} gives each worker a part of a layer's outputs: {_SIZES}")
            raise
        for mine, theirs in zip(tensors_of(output), tensors_of(whole), strict=True):
            if (apart := _apart(mine, theirs)) > _ROUNDING.get(theirs.dtype, 5e-2):
                where = self._first_apart(model, batch)
                what = f"{where} gives something else ({apart:.1e} apart) when {self._name} is cut by tensor="
                raise UsageError(what, f"{_SIZES}; a weight of several, as query, key and value, is {COLUMN}:3")
        return output

    def _first_apart(self, model: nn.Module, batch: Any) -> str:
        """The module that is the first to differ."""
        given: dict[str, list[torch.Tensor]] = {}
        names = {id(module): name for name, module in model.named_modules()}

        def keep(module: nn.Module, _: Any, output: Any) -> None:
            given.setdefault(names[id(module)], tensors_of(output))

        def compare(module: nn.Module, _: Any, output: Any) -> None:
            name, mine = names[id(module)], tensors_of(output)
            pairs = [(a, b) for a, b in zip(mine, given.get(name, ()), strict=False) if a.shape == b.shape]
            if any(_apart(a, b) > _ROUNDING.get(b.dtype, 5e-2) for a, b in pairs):
                found.append(name)

        found: list[str] = []
        for uncut, hook in ((True, keep), (False, compare)):
            handles = [module.register_forward_hook(hook) for module in model.modules()]
            with self._without_a_trace(model, uncut):
                self._plain(model, batch)
            for handle in handles:
                handle.remove()
        return (found or [""])[0] or "the model"

    @contextmanager
    def _without_a_trace(self, model: nn.Module, uncut: bool = True) -> Iterator[None]:
        """Forwards in here leave buffers and streams as they were. Where `uncut`, layers compute as if they were
        whole.
        """
        kept = [(buffer, buffer.clone()) for buffer in model.buffers()]
        self._uncut = uncut
        try:
            with self._streams.lent():
                yield
        finally:
            self._uncut = False
            for buffer, value in kept:
                if not torch.equal(buffer, value):  # BatchNorm's change without a new version
                    buffer.copy_(value)


class _Parts(TorchFunctionMode):
    """Follows parts of activations through a forward: nothing may draw random numbers for one, none may leave the
    model, and a parameter that is whole and meets one gets its gradient in parts, which are added up from then on.
    """

    def __init__(self, cut: TensorCut, model: nn.Module) -> None:
        super().__init__()
        self._cut, self._path = cut, [""]
        self._streams = Streams(cut.job.device)
        self._whole = {id(p): name for name, p in model.named_parameters() if name not in cut.job.cuts}
        self._met, self._apart = dict[int, torch.Tensor](), set[int]()  # whole ones that met parts, and those alone
        self._own = {id(layer.module): layer for layer in cut.layers}
        self._model, self._handles = model, list[Any]()
        self._ours = 0  # cut layers that are being run
        self._inside, self._before = 0, torch.empty(0)

    def __enter__(self) -> Any:
        for name, module in self._model.named_modules():
            self._handles.append(module.register_forward_pre_hook(partial(self._enters, name)))
            self._handles.append(module.register_forward_hook(self._leaves, always_call=True))
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *error: Any) -> None:
        for handle in self._handles:
            handle.remove()
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        if error[0] is not None:
            return
        if both := [self._whole[key] for key in self._met if key in self._apart]:
            what = f"{both[0]} is used with a part of a layer's outputs and besides, and its gradient is of both"
            raise UsageError(what, "use a parameter for each, or leave that layer out of tensor=")
        self._cut.job.inside = self._inside
        for key in self._met.keys() - self._cut.summing:  # each worker used it with another part
            self._met[key].register_hook(partial(_summed, unit=self._cut.unit))
            self._cut.summing.add(key)

    def _enters(self, name: str, module: nn.Module, given: Any) -> None:
        self._path.append(name)
        self._ours += id(module) in self._own

    def _leaves(self, module: nn.Module, given: Any, output: Any) -> None:
        self._path.pop()
        layer = self._own.get(id(module))
        if layer is not None:
            self._ours -= 1
            self._moves(layer, given[0], output)
            for leaf in tensors_of(output):
                leaf.__dict__[_PART] = layer.placement == COLUMN
        elif module is self._model and any(map(_is_part, tensors_of(output))):
            what = "a part of what the model gives leaves it, cut by tensor="
            raise UsageError(what, f'{_SAY}; "gathered" makes it whole')

    def _moves(self, layer: _Layer, given: torch.Tensor, output: torch.Tensor) -> None:
        """Adds what a layer sums or gathers in the forward and in the backward."""
        if layer.placement in (ROW, VOCABULARY):
            self._inside += output.nbytes
            return
        self._inside += output.nbytes // self._cut.unit.size if layer.placement == GATHERED else 0
        if given.requires_grad and given is not self._before:  # of layers with one input once
            self._inside, self._before = self._inside + given.nbytes, given

    def __torch_function__(self, function: Any, types: Any, given: Any = (), named: Any = None) -> Any:
        leaves = tensors_of((given, named))
        parts = not self._ours and any(map(_is_part, leaves))
        if not self._ours:
            whole = {id(leaf): leaf for leaf in leaves if id(leaf) in self._whole and leaf.requires_grad}
            self._met.update(whole if parts else {})
            self._apart.update(() if parts else whole)
        mark = self._streams.mark() if parts else ()
        output = function(*given, **(named or {}))
        if not parts:
            return output
        if self._streams.moved(mark):
            where = self._path[-1] or "the model"
            what = f"{where} draws random numbers ({function.__name__}) for a part of a layer, others on each worker"
            raise UsageError(what, "set its dropout to 0, or leave tensor= out")
        for leaf in tensors_of(output):
            leaf.__dict__[_PART] = True
        return output


def _nothing(module: nn.Module, given: Any) -> None:
    """A hook that does nothing."""


def _is_part(tensor: torch.Tensor) -> bool:
    return bool(tensor.__dict__.get(_PART))


def _apart(mine: torch.Tensor, theirs: torch.Tensor) -> float:
    """Norm of the difference as a part of that of `theirs`."""
    if mine.shape != theirs.shape or not theirs.is_floating_point():
        return float(not torch.equal(mine, theirs))
    with torch.no_grad():
        return float((mine.double() - theirs.double()).norm() / theirs.double().norm().clamp(min=1e-300))


def _applied(function: Any, x: torch.Tensor, unit: Group) -> torch.Tensor:
    return cast(torch.Tensor, function.apply(x, unit))


_FORWARDS: Mapping[str, Any] = {
    COLUMN: TensorCut._column,
    GATHERED: TensorCut._gathered,
    ROW: TensorCut._row,
    VOCABULARY: TensorCut._vocabulary,
}
