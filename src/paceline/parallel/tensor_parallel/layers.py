"""Tensor-parallel layers: column, row and vocabulary splits.

A *column* cut divides what a layer gives (*gathered*: and puts it together again; ``column:3``: each third of it, as
query, key and value of one weight), a *row* cut what it takes, a *vocabulary* cut the entries of an embedding; *heads*
are those of an nn.MultiheadAttention. The user's modules stay as they are, but for smaller weights and a forward of
ours. Their code meets parts between a column and a row: `parts` carries it out. The rest is computed by all alike.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import nn

from paceline.base.sharding import ShardingSpec
from paceline.comm.communicator import Group
from paceline.comm.torch_private import pytree
from paceline.compute.batchnorm import without_a_trace
from paceline.compute.job import Judge
from paceline.compute.microbatches import refuse_other_input, tensors_of
from paceline.compute.rng import RngState
from paceline.compute.state_dict import refuse_state
from paceline.compute.verify import allowed, apart, farthest, gradients_of, outputs_apart, room
from paceline.errors import UsageError
from paceline.parallel.parallel_job import ParallelJob
from paceline.parallel.pipeline.stage_forward import one_call
from paceline.parallel.tensor_parallel.attention import attention
from paceline.parallel.tensor_parallel.op_rules import RULES
from paceline.parallel.tensor_parallel.placement import (
    COLUMN,
    GATHERED,
    HEADS,
    REPLICATED,
    ROW,
    VOCABULARY,
    Placement,
    fold_names,
    has_parameter,
    infer_placements,
    is_conv1d,
    is_linear,
)
from paceline.parallel.tensor_parallel.redistribute import Redistributor, ShardPlacement, summed
from paceline.parallel.tensor_parallel.script_view import call_by_pieces
from paceline.parallel.tensor_parallel.sharded_mode import (
    GatherMode,
    ShardedTensorMode,
    logical,
    mark,
    others_sleeping,
    part_of,
)

_ADVICE = 'say which layers: Trainer(..., tensor={"blocks.*.up": "column", "blocks.*.down": "row"})'
_FROM_USER = "tensor= says so"
PLACEMENTS = f"say one of {COLUMN}, {COLUMN}:N, {GATHERED}, {ROW}, {VOCABULARY}, {HEADS}, {REPLICATED}"
# What transformers calls them.
_TRANSFORMERS_STYLES = {
    "colwise": COLUMN,
    "colwise_gather_output": GATHERED,
    "colwise_rep": GATHERED,
    "rowwise": ROW,
    "embedding_rowwise": VOCABULARY,
    **dict.fromkeys(("replicate", "replicated_with_grad_allreduce", "sequence_parallel"), REPLICATED),
}
_SPLIT_AXIS = {COLUMN: "outputs", GATHERED: "outputs", ROW: "inputs", VOCABULARY: "entries", HEADS: "heads"}


@dataclass
class _Layer:
    """A cut one: its name, the module, and how; `part` is what its output is, or its input with a row cut."""

    name: str
    module: nn.Module
    placement: Placement
    shard: ShardPlacement | None = None


def _matching(pattern: str, names: Iterable[str], source: str) -> list[str]:
    """The names of modules that a pattern is of; UsageError if a table of the user's names none."""
    form = re.compile(re.escape(pattern).replace(r"\*", "[^.]+"))
    found = [name for name in names if form.fullmatch(name)]
    if not found and source == _FROM_USER:
        raise UsageError(f"tensor= names {pattern!r}, and the model has no such module", "write its path")
    return found


@dataclass
class _Frame:
    """A forward under way that is watched: whether something in it was not done as it stands."""

    name: str
    has_adapted_calls: bool = False


class TensorCut:
    """Cuts the layers of a job's model among the workers of a `unit`, as the `placements` of patterns of names say, or
    the model's own plan, or its structure.

    Raises UsageError where nothing can be cut, or a layer cannot be divided so often; and in the first forward where
    the cut model computes something else than the whole one.
    """

    def __init__(self, job: ParallelJob, unit: Group, placements: Mapping[str, str] | None) -> None:
        self.job, self.unit, self.moves = job, unit, Redistributor(unit)
        self._divided_params: dict[
            int, tuple[nn.Parameter, ShardingSpec]
        ] = {}  # what is here of a parameter, and how it is cut
        self._streams, self._name = RngState(job.device), type(job.model).__name__
        named = dict(job.model.named_modules())
        self.table, self._source = self._choose_layers(named, placements)
        self.layers = [_Layer(name, named[name], how) for name, how in self.table.items()]
        if not self.layers:
            looked = "its own plan (_tp_plan), and blocks in which one layer takes what others give"
            raise UsageError(f"nothing of {self._name} can be cut: looked for {looked}", _ADVICE)
        for layer in self.layers:
            self._cut(layer)
        self._full_bytes = sum(
            own.element_size() * math.prod(cut.shape) for own, cut in self._divided_params.values()
        )  # of the whole
        self._divided_params.clear()
        job.named = {name: param for name, param in job.model.named_parameters() if param.requires_grad}
        self._uncut = self._is_running = False  # with whole layers, a forward is going on
        self._frames: list[_Frame] = []
        self._sharded_mode, self._gather_mode = (
            ShardedTensorMode(self.moves, RULES, self._where, self._on_adapted),
            GatherMode(self.moves),
        )
        self._loss_mode = ShardedTensorMode(
            self.moves, RULES, lambda: "the loss"
        )  # follows weights where a loss uses them
        self._sharded_mode.model = self._gather_mode.model = self._loss_mode.model = job.model
        self._loss_mode.outranked_by = self._sharded_mode
        if job.over is None:
            job.loss = Judge(job.loss, self._in_loss)
        else:  # what then is the loss of a micro-batch is made of gradients of parts
            job.over = Judge(job.over, self._in_loss)
        # By mode, training and assembled: modules under which parts are followed.
        self._regions: dict[tuple[bool, bool], set[str]] = {}
        self._verified_modes, self._gathered_at = set[tuple[bool, bool, bool]](), set[str]()
        self._original_forward, self._is_own_call = job.forward, False
        job.forward = self._forward
        job.model.register_forward_pre_hook(self._called, with_kwargs=True)
        self._wrap_containers(named)
        job.redistributors.append(self.moves)

    def __deepcopy__(self, memo: Any) -> TensorCut:
        what = f"{self._name} is cut by tensor=, and a copy would be of this worker's parts"
        raise UsageError(what, "export() writes it whole; leave tensor= out to keep a copy, as an average is")

    @property
    def decision(self) -> tuple[str, str]:
        """For people: which layers are cut how, which of their kind are not, and whence that is known."""
        by_kind: dict[str, list[str]] = {}
        for form, how in fold_names(self.table).items():
            by_kind.setdefault(how, []).append(form)
        how = "; ".join(f"{kind} {', '.join(forms)}" for kind, forms in by_kind.items())
        cut = f"{len(self.layers)} layers are cut among {self.unit.size} workers: {how}"
        inside = {id(module) for layer in self.layers for module in layer.module.modules()}
        rest = {
            name: Placement(REPLICATED)
            for name, module in self.job.model.named_modules()
            if (is_linear(module) or type(module) in (nn.Embedding, nn.MultiheadAttention)) and id(module) not in inside
        }
        return cut + (f"; whole {', '.join(fold_names(rest))}" if rest else ""), self._source

    # -- which layers -------------------------------------------------------------------------------------------------

    def _choose_layers(
        self, named: Mapping[str, nn.Module], said: Mapping[str, str] | None
    ) -> tuple[dict[str, Placement], str]:
        """The layers and whence they are known."""
        source = _FROM_USER
        if said and all((how := Placement.parse(text)) and how.kind == REPLICATED for text in said.values()):
            # Nothing says what is cut: what would be without a table, but for these.
            left = {name for pattern in said for name in _matching(pattern, named, source)}
            found, source = self._choose_layers(named, None)
            return {name: how for name, how in found.items() if name not in left}, f"{source}, and tensor= leaves some"
        if said is None:
            said, source = self._transformers_plan(), "the model's own plan says so"
        if not said:
            return infer_placements(self.job.model, self.unit.size), "its blocks were run once to see"
        found = {}
        for pattern, text in said.items():
            how = Placement.parse(text)
            if how is None:
                raise UsageError(f"tensor= says {text!r} of {pattern!r}", PLACEMENTS)
            names = _matching(pattern, named, source)
            for name in names:
                found.pop(name, None)
                if how.kind != REPLICATED:
                    found[name] = how
        if source != _FROM_USER:  # entries that are scaled, say, and a head that is tied to them, stay whole
            kinds = [m for m in named.values() if isinstance(m, nn.Embedding) and type(m) is not nn.Embedding]
            other = {id(module.weight) for module in kinds}
            found = {name: how for name, how in found.items() if id(getattr(named[name], "weight", None)) not in other}
        return found, source

    def _transformers_plan(self) -> dict[str, str]:
        """The plan that a model of transformers brings, if it divides its heads."""
        found: Mapping[str, str] = getattr(self.job.model, "_tp_plan", None) or {}
        config, known = (
            getattr(self.job.model, "config", None),
            all(style in _TRANSFORMERS_STYLES for style in found.values()),
        )
        heads = [getattr(config, name, 0) or 0 for name in ("num_attention_heads", "num_key_value_heads")]
        if not known or any(number % self.unit.size for number in heads):
            return {}
        return {name: _TRANSFORMERS_STYLES[style] for name, style in found.items()}

    # -- cutting ------------------------------------------------------------------------------------------------------

    def _cut(self, layer: _Layer) -> None:
        module, kind = layer.module, layer.placement.kind
        fits = {VOCABULARY: type(module) is nn.Embedding, HEADS: type(module) is nn.MultiheadAttention}
        if (
            not fits.get(kind, type(module) is nn.Linear or is_conv1d(module))
            or getattr(module, "max_norm", None) is not None
        ):
            kinds = {VOCABULARY: "Embedding", HEADS: "MultiheadAttention"}
            what = f"{layer.name} is {type(module).__name__}, which has no {kind} cut"
            raise UsageError(what, self._leave(layer.name, f", or name a {kinds.get(kind, 'Linear')}"))
        if not has_parameter(module, "in_proj_weight" if kind == HEADS else "weight"):
            others = ", ".join(name for name, _ in module.named_parameters())
            what = (
                f"the weight of {layer.name} is computed from other parameters ({others}), which tensor= does not cut"
            )
            raise UsageError(what, self._leave(layer.name))
        if kind == HEADS:
            self._cut_heads(layer)
            return
        across = is_conv1d(module)
        dim = (1 if kind != ROW else 0) if across else (0 if kind != ROW else 1)
        weight: Any = module.weight
        part = self._part(layer, logical(weight)[dim])
        layer.shard = part
        self._divide(layer, module, "weight", dim, part)
        if getattr(module, "bias", None) is not None and kind != ROW:
            self._divide(layer, module, "bias", 0, part)
        run = {COLUMN: self._column, GATHERED: self._column, ROW: self._row, VOCABULARY: self._vocabulary}[kind]
        self._replace(module, partial(run, layer))

    def _cut_heads(self, layer: _Layer) -> None:
        module = cast(nn.MultiheadAttention, layer.module)
        if module.num_heads % self.unit.size or not module._qkv_same_embed_dim:
            what = f"tensor={self.unit.size} does not divide the {module.num_heads} heads of {layer.name}"
            raise UsageError(what, self._fits(layer, module.num_heads))
        width = module.embed_dim
        three, one = (ShardPlacement(0, (width,) * count, self.unit.size) for count in (3, 1))
        self._divide(layer, module, "in_proj_weight", 0, three)
        if module.in_proj_bias is not None:
            self._divide(layer, module, "in_proj_bias", 0, three)
        self._divide(layer, module.out_proj, "weight", 1, one, "out_proj.weight")
        self._replace(module, partial(self._heads, layer))

    def _replace(self, module: nn.Module, forward: Callable[..., Any]) -> None:
        call = partial(call_by_pieces, forward)
        vars(module)["forward"] = call if self.job.stages is None else one_call(module, call)
        module.register_forward_pre_hook(_nothing)  # or TransformerEncoderLayer takes the weights past a forward
        refuse_state(module, f"{self._name}, which is cut by tensor=")

    def _part(self, layer: _Layer, length: int) -> ShardPlacement:
        size, how = self.unit.size, layer.placement
        count = how.count or size
        sections = how.lengths(length)
        part = ShardPlacement(0, sections or (), count)
        if sections is None or size % count or not (part.is_even or how.kind in (VOCABULARY, GATHERED)):
            of = f"{length} {_SPLIT_AXIS[how.kind]}"
            if how.sections != (1,):
                of = f"{length} {_SPLIT_AXIS[how.kind]} in sections {how}"
            raise UsageError(f"tensor={size} does not divide the {of} of {layer.name}", self._fits(layer, length))
        return part

    def _fits(self, layer: _Layer, length: int) -> str:
        """What to say where a length is not divided: another number of parts, of which these workers can be made."""
        size = self.unit.size
        workers = size * (self.job.units.size if self.job.units else 1)
        fits = [n for n in range(2, size) if length % n == 0 and workers % n == 0]
        return f"say tensor={fits[-1]}" if fits else self._leave(layer.name)

    def _leave(self, name: str, more: str = "") -> str:
        """What to say so that a layer stays whole."""
        if self._source == _FROM_USER:
            return f'say "{REPLICATED}" of it in tensor={more}'
        return f'say Trainer(..., tensor={{"{name}": "{REPLICATED}"}}): all else is cut as before'

    def _divide(
        self, layer: _Layer, module: nn.Module, key: str, dim: int, part: ShardPlacement, path: str = ""
    ) -> None:
        """Leaves of a parameter the own piece, under all of its names in the model. It has no values yet."""
        whole, path = cast(nn.Parameter, getattr(module, key)), path or key
        if id(whole) in self._divided_params:  # tied to one that is cut already
            _, cut = self._divided_params[id(whole)]
            if cut != replace(part, dim=dim).cut(cut.shape, self.unit.size):
                what = f"{layer.name}.{path} is tied to a weight that is cut in another way"
                raise UsageError(what, self._leave(layer.name))
            return
        part = replace(part, dim=dim)
        cut = part.cut(tuple(whole.shape), self.unit.size)
        # The parameter stays the same object: whoever else holds it, as a list in a module or a closure, has the piece.
        whole.data = whole.detach()[(0,) * whole.dim()].expand(cut.at(self.unit.rank).shape)
        mark(whole, part)
        self._divided_params[id(whole)] = whole, cut
        # Of neighbours that have the same, each has a part of the gradient.
        if part.count < self.unit.size and whole.requires_grad:
            whole.register_hook(partial(self._among_holders, part))
        named = self.job.model.named_parameters(remove_duplicate=False)
        self.job.cuts |= {name: cut for name, param in named if param is whole}

    def _among_holders(self, part: ShardPlacement, gradient: torch.Tensor) -> torch.Tensor:
        """The sum over those that have the same piece."""
        everyone = gradient.new_zeros(part.count, *gradient.shape)
        everyone[self.moves.index(part)] = gradient
        return summed(everyone, self.unit)[self.moves.index(part)]

    # -- forwards of the layers ---------------------------------------------------------------------------------------

    def _column(self, layer: _Layer, x: torch.Tensor) -> torch.Tensor:
        module, part = cast(Any, layer.module), cast(ShardPlacement, layer.shard)
        if self._uncut:
            return cast(torch.Tensor, self._run_gathered(type(module).forward, module, x))
        with self._sharded_mode.sleeping():
            x = self.moves.share(self._sharded_mode.gather_full(x))
            if is_conv1d(module):
                made = torch.matmul(x, module.weight) + module.bias
            else:
                made = F.linear(x, module.weight, module.bias)
            made = mark(made, ShardPlacement(made.dim() - 1, part.sections, part.count))
            return self._sharded_mode.gather_full(made) if layer.placement.kind == GATHERED else made

    def _row(self, layer: _Layer, x: torch.Tensor) -> torch.Tensor:
        module, part = cast(Any, layer.module), cast(ShardPlacement, layer.shard)
        if self._uncut:
            return cast(torch.Tensor, self._run_gathered(type(module).forward, module, x))
        with self._sharded_mode.sleeping():
            x = self._row_input(x, part)
            found = torch.matmul(x, module.weight) if is_conv1d(module) else F.linear(x, module.weight)
            found = self.moves.sum(found)
            return found if module.bias is None else found + module.bias

    def _row_input(self, x: torch.Tensor, part: ShardPlacement) -> torch.Tensor:
        """The own piece of what a row layer takes. Where parts are not followed it comes as a piece, or as a whole."""
        has, wanted = part_of(x), ShardPlacement(x.dim() - 1, part.sections, part.count)
        if has == wanted or (has is None and x.shape[-1] == part.shard_length != part.length):
            return x
        return self.moves.take(self._sharded_mode.gather_full(x), wanted)

    def _vocabulary(self, layer: _Layer, ids: torch.Tensor) -> torch.Tensor:
        module, part = cast(nn.Embedding, layer.module), cast(ShardPlacement, layer.shard)
        if self._uncut:
            return cast(torch.Tensor, self._run_gathered(nn.Embedding.forward, module, ids))
        with self._sharded_mode.sleeping():
            (rows,) = part.rows(self.moves.index(part))
            here = ids - rows.start
            others = (here < 0) | (here >= len(rows))
            padding = None if module.padding_idx is None else module.padding_idx - rows.start
            padding = padding if padding is not None and 0 <= padding < len(rows) else None
            if len(rows):
                found = F.embedding(here.masked_fill(others, 0), module.weight, padding)
            else:  # there are fewer entries than it takes for all workers to have some
                found = module.weight.new_zeros(*ids.shape, module.embedding_dim) + module.weight.sum()
            return self.moves.sum(found.masked_fill(others.unsqueeze(-1), 0.0))

    def _heads(self, layer: _Layer, *given: Any, **named: Any) -> Any:
        module = cast(nn.MultiheadAttention, layer.module)
        if self._uncut:
            return self._run_gathered(nn.MultiheadAttention.forward, module, *given, **named)
        with self._sharded_mode.sleeping():
            return attention(module, self._sharded_mode, *given, **named)

    def _run_gathered(self, forward: Callable[..., Any], *given: Any, **named: Any) -> Any:
        """A forward on whole weights, also where a checkpoint computes it again in the backward."""
        with nullcontext() if self._gather_mode.on else self._gather_mode:
            return forward(*given, **named)

    # -- forwards of what holds them ----------------------------------------------------------------------------------

    def _wrap_containers(self, named: Mapping[str, nn.Module]) -> None:
        """The modules around cut layers let parts be followed inside of them where that is needed."""
        around = {""}
        for layer in self.layers:
            steps = layer.name.split(".")
            around |= {".".join(steps[:number]) for number in range(1, len(steps))}
        for name in around - {layer.name for layer in self.layers}:
            module = named[name]
            forward = partial(self._run_module if name else self._run_forward, name, module, module.forward)
            vars(module)["forward"] = partial(call_by_pieces, forward)

    def _where(self) -> str:
        return (self._frames[-1].name if self._frames else "") or self._name

    def _on_adapted(self, name: str, parts: Any, *_: Any) -> None:
        if self._frames:
            self._frames[-1].has_adapted_calls = True
        if parts:
            self._gathered_at.add(f"{self._where()} ({name.strip('_')})")

    def _run_module(self, name: str, module: nn.Module, forward: Callable[..., Any], *given: Any, **named: Any) -> Any:
        regions = self._regions.get((self.job.model.training, self.job.assembled))
        if self._uncut:
            return self._run_gathered(forward, *given, **named)
        if regions is None and self._is_running:
            return self._trace_region(name, forward, given, named)
        follows = (regions is None or name in regions) and not self._sharded_mode.on
        with self._sharded_mode if follows else nullcontext():
            return forward(*given, **named)

    def _trace_region(self, name: str, forward: Callable[..., Any], given: Any, named: Any) -> Any:
        """One in which parts are followed to see where it is needed: in the innermost module that begins and ends
        without any.
        """
        frame = _Frame(name)
        self._frames.append(frame)
        try:
            output = forward(*given, **named)
        finally:
            self._frames.pop()
        if frame.has_adapted_calls and any(map(part_of, tensors_of((given, named, output)))):
            self._frames[-1].has_adapted_calls = True
        elif frame.has_adapted_calls:
            self._seen.add(name)
        return output

    def _run_forward(self, name: str, model: nn.Module, forward: Callable[..., Any], *given: Any, **named: Any) -> Any:
        """A whole forward of the model. No part leaves it."""
        if self._uncut or self._is_running:
            return forward(*given, **named)
        with others_sleeping(model):
            return self._run_in_modes(model.training, partial(forward, *given, **named))

    def _run_in_modes(self, training: bool, call: Callable[[], Any]) -> Any:
        mode = training, self.job.assembled
        regions, self._is_running = self._regions.get(mode), True
        frame, self._seen = _Frame(""), set[str]()
        sent, self._frames = self.moves.sent, [frame]
        try:
            with self._sharded_mode if regions is None or "" in regions else nullcontext():
                output = call()
            if any(map(part_of, tensors_of(output))):
                frame.has_adapted_calls = True
                output = pytree.tree_map_only(torch.Tensor, self._sharded_mode.gather_full, output)
        finally:
            self._is_running, self._frames = False, []
            self.moves.rest()
        if regions is None and (torch.is_grad_enabled() or not training):
            self._regions[mode] = self._seen | ({""} if frame.has_adapted_calls else set())
            if training and not self.job.assembled:
                self.job.inside["tensor"] = self.moves.sent - sent
        return output

    # -- what a script may do with a cut model ------------------------------------------------------------------------

    def _forward(self, model: nn.Module, batch: Any) -> Any:
        before, self._is_own_call = self._is_own_call, True
        try:
            if model is not self.job.model:
                self._enter()
                return self._original_forward(model, batch)
            if (mode := (model.training, torch.is_grad_enabled(), self.job.assembled)) not in self._verified_modes:
                self._verify(model, batch)
                self._verified_modes.add(mode)
            self._enter()
            return self._run_in_modes(model.training, partial(self._original_forward, model, batch))
        finally:
            self._is_own_call = before

    @contextmanager
    def _in_loss(self) -> Iterator[None]:
        """All of a unit compute the loss alike. What it makes of weights is made of whole ones."""
        with self._loss_mode:
            yield
        self.moves.rest()

    def _enter(self) -> None:
        self.unit.enter("the layers cut by tensor=", check=False, kind="tensor")

    def _called(self, model: nn.Module, given: Any, named: Any) -> None:
        """By the script itself: all of the unit compute it together, each with the same input."""
        if self._is_own_call:
            return
        if self.job.passing:  # a survey of stages, which counts the calls of the user's code
            with torch._C.DisableTorchFunction():
                self._enter()
            return
        self.unit.enter(f"a call of {self._name}, whose layers are cut", kind="tensor")
        refuse_other_input(self.unit, (given, named), self._name, "tensor= cuts its layers")

    # -- the cut model beside the whole one ---------------------------------------------------------------------------

    def _verify(self, model: nn.Module, batch: Any) -> None:
        """The first forward of a mode, and its backward in training, beside that of the whole model."""
        self.unit.enter("the whole layers, to compare with", check=False, kind="comparison")
        backward = model.training and torch.is_grad_enabled() and self._fits_whole()
        whole, expected = self._computed(model, batch, True, backward)
        try:
            output, gradients = self._computed(model, batch, False, backward)
        except RuntimeError as error:
            if isinstance(error, torch.OutOfMemoryError):
                raise
            cure = (
                f'say "{REPLICATED}" in tensor= of the layers whose outputs a torch.autograd.Function takes, or that a '
            )
            cure += "function given to checkpoint() calls (plan recompute=blocks computes blocks again without one)"
            raise UsageError(f"{self._name} cannot be computed when it is cut by tensor= ({error})", cure) from error
        most, others = outputs_apart(output, whole)
        if others:
            where = self._first_apart(model, batch)
            what = f"{where} gives something else when {self._name} is cut by tensor="
            cure = f'say "{REPLICATED}" of its layers in tensor=, or "{COLUMN}:3" of a weight of three'
            raise UsageError(what, cure)
        name, distance = farthest(gradients, expected, whole)
        if name:
            what = f"the gradient of {name} is another when {self._name} is cut by tensor="
            raise UsageError(what, f'say "{REPLICATED}" of its layer in tensor=')
        if model.training and torch.is_grad_enabled():
            gradients_too = f"and gradients {distance:.1g} apart" if backward else "apart (a backward would not fit)"
            figures = f"outputs {most:.1g} {gradients_too}"
            what = f"one micro-batch was computed with whole layers, too: {figures}"
            if self._gathered_at:
                some = sorted(self._gathered_at)
                what += f"; parts are gathered in {', '.join(some[:3])}{', ...' if len(some) > 3 else ''}"
            self.job.news["tensor"] = what, ""

    def _fits_whole(self) -> bool:
        """Whether all whole weights and their gradients have room on each worker of the unit."""
        return all(self.unit.gather_json(2 * self._full_bytes <= room(self.job.device)))

    def _computed(
        self, model: nn.Module, batch: Any, uncut: bool, backward: bool
    ) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
        """Outputs, and the gradients of numbers made of them."""
        with self._without_a_trace(model, uncut), nullcontext() if backward else torch.no_grad():
            outputs = self._outputs(model, batch)
            if not backward:
                return outputs, {}
            return [x.detach() for x in outputs], gradients_of(outputs, self.job.named)

    def _outputs(self, model: nn.Module, batch: Any) -> list[torch.Tensor]:
        call = partial(self._original_forward, model, batch)
        if not self._uncut:
            return tensors_of(self._run_in_modes(model.training, call))
        with self._gather_mode:
            return tensors_of(call())

    def _first_apart(self, model: nn.Module, batch: Any) -> str:
        """The module that is the first to differ."""
        given: dict[str, list[torch.Tensor]] = {}
        names = {id(module): name for name, module in model.named_modules()}

        def keep(module: nn.Module, _: Any, output: Any) -> None:
            given.setdefault(names[id(module)], tensors_of(output))

        def compare(module: nn.Module, _: Any, output: Any) -> None:
            name, mine = names[id(module)], tensors_of(output)
            pairs = [(a, b) for a, b in zip(mine, given.get(name, ()), strict=False) if not part_of(a)]
            if any(apart(a, b) > allowed(b) for a, b in pairs):
                found.append(name)

        found: list[str] = []
        for uncut, hook in ((True, keep), (False, compare)):
            handles = [module.register_forward_hook(hook) for module in model.modules()]
            with self._without_a_trace(model, uncut), torch.no_grad():
                self._outputs(model, batch)
            for handle in handles:
                handle.remove()
        return (found or [""])[0] or "the model"

    @contextmanager
    def _without_a_trace(self, model: nn.Module, uncut: bool = True) -> Iterator[None]:
        """Forwards in here leave buffers and streams as they were. Where `uncut`, layers compute as if they were
        whole.
        """
        self._uncut = uncut
        try:
            with without_a_trace(model, self._streams):
                yield
        finally:
            self._uncut = False


def _nothing(module: nn.Module, given: Any) -> None:
    """A hook that does nothing."""
