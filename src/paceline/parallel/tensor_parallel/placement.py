"""Finds which layers to split, by tracing each kind of block once.

Each block is run once on random numbers, in a process that has all of it, while `parts` follows what would be parts. A
layer whose input is whole is tried as a *column* cut; one whose input is a part then is a *row* cut. Where a function
would need the whole of what a column gives, its sections are chosen anew (those of a fused attention weight), or fewer
pieces (key-value heads, of which there are fewer than workers), and if nothing helps, the layer stays whole.
"""

from __future__ import annotations

import inspect
import re
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn

from paceline.comm.torch_private import pytree
from paceline.compute.batchnorm import without_a_trace
from paceline.compute.rng import RngState
from paceline.compute.state_dict import PROBE_ERRORS
from paceline.parallel.tensor_parallel.op_rules import RULES
from paceline.parallel.tensor_parallel.redistribute import DryRunRedistributor, ShardPlacement
from paceline.parallel.tensor_parallel.sharded_mode import ShardedTensorMode, mark, part_of, tensors_in

COLUMN, GATHERED, ROW, VOCABULARY, WHOLE = "column", "gathered", "row", "vocabulary", "whole"
HEADS = "heads"  # of nn.MultiheadAttention: its weights of three sections and its output layer
_LENGTHS = ((2, 3), (5,), ())  # of what is tried before a block's last dimension: batch and sequence, rows, nothing
_TRIES = 64  # of one block
_ALL, _BUT_LAST = re.compile(r"(?<![^.])\d+(?![^.])"), re.compile(r"(?<![^.])\d+(?=\.(.*\.)?\d+(?![^.]))")
_FORM = re.compile(r"(?P<kind>[a-z]+)(:(?P<sections>[0-9]+(\+[0-9]+)*))?( of (?P<count>[0-9]+))?")


@dataclass(frozen=True)
class Placement:
    """How one layer is cut: the kind, so many equal sections or these, and how many pieces where there are fewer than
    workers. As text: ``column``, ``column:3``, ``column:64+16+16``, ``column of 2``.
    """

    kind: str
    sections: tuple[int, ...] = (1,)
    count: int | None = None

    @classmethod
    def parse(cls, text: str) -> Placement | None:
        found = _FORM.fullmatch(text)
        if found is None or found["kind"] not in (COLUMN, GATHERED, ROW, VOCABULARY, WHOLE, HEADS):
            return None
        lengths = tuple(map(int, (found["sections"] or "1").split("+")))
        if 0 in lengths or (found["kind"] not in (COLUMN, ROW) and (found["sections"] or found["count"])):
            return None
        return cls(found["kind"], lengths, int(found["count"]) if found["count"] else None)

    def __str__(self) -> str:
        sections = f":{'+'.join(map(str, self.sections))}" if self.sections != (1,) else ""
        return f"{self.kind}{sections}{f' of {self.count}' if self.count else ''}"

    def lengths(self, whole: int) -> tuple[int, ...] | None:
        """Of the sections of so many rows or columns; None: they do not add up."""
        if len(self.sections) == 1:
            count = self.sections[0]
            return None if whole % count else (whole // count,) * count
        return self.sections if sum(self.sections) == whole else None


def is_linear(module: nn.Module) -> bool:
    """Whether a module multiplies by one weight: torch's, or transformers' whose weight lies the other way."""
    return (type(module) is nn.Linear or is_conv1d(module)) and has_own(module)


def has_own(module: nn.Module, name: str = "weight") -> bool:
    """Whether a module's weight is a parameter, and not computed from others before each forward (pruning, the older
    weight_norm).
    """
    return module._parameters.get(name) is not None


def is_conv1d(module: nn.Module) -> bool:
    return type(module).__name__ == "Conv1D" and hasattr(module, "nf") and getattr(module, "weight", None) is not None


def width_in(module: nn.Module) -> int:
    """The length of what a linear layer takes."""
    weight: Any = module.weight
    return int(weight.shape[0 if is_conv1d(module) else 1])


class _Trace(ShardedTensorMode):
    """One run of a block: which layers would be columns and rows, and what is in the way."""

    def __init__(
        self, size: int, layers: Mapping[int, str], chosen: Mapping[str, tuple[tuple[int, ...], int]], whole: set[str]
    ) -> None:
        super().__init__(DryRunRedistributor(size), RULES, lambda: "", self._seen)
        self._layers, self._chosen, self._whole = layers, chosen, whole
        self.columns, self.rows = dict[str, ShardPlacement](), dict[str, ShardPlacement]()
        self.called, self.joined = set[str](), list[frozenset[str]]()
        self.wishes = dict[str, tuple[tuple[int, ...], int]]()

    def _layer(self, function: Any, given: Any, named: Any) -> str | None:
        """The layer that a function is, if it is the product of one."""
        if function.__name__ not in ("linear", "addmm"):
            return None
        return next((name for t in tensors_in((*given, *named.values())) if (name := self._layers.get(id(t)))), None)

    def follow(self, function: Any, given: Any, named: Any) -> Any:
        layer = self._layer(function, given, named)
        if layer is None:
            return super().follow(function, given, named)
        self.called.add(layer)
        parts = [(t, part) for t in given if (part := part_of(t)) is not None]
        if parts and parts[0][1].dim == parts[0][0].dim() - 1 and parts[0][1].count == self.moves.size:
            self.rows[layer] = parts[0][1]
        return super().follow(function, given, named)

    def otherwise(self, function: Any, given: Any, named: Any) -> Any:
        made, layer = function(*given, **named), self._layer(function, given, named)
        if layer is not None and layer not in self._whole:
            sections, count = self._chosen.get(layer, ((made.shape[-1],), self.moves.size))
            part = ShardPlacement(made.dim() - 1, sections, count, frozenset([layer]))
            if part.even:
                self.columns[layer] = part
                mark(made, part)
        return made

    def _seen(self, name: str, parts: Sequence[ShardPlacement], cuts: list[int] | None, count: int | None) -> None:
        of = frozenset[str]().union(*(part.of for part in parts))
        if cuts is not None and len(of) == 1:
            starts = [0, *cuts[:-1]]
            self.wishes[min(of)] = tuple(b - a for a, b in zip(starts, cuts, strict=True)), count or self.moves.size
        else:
            self.joined += [of] if of else []


def derive(model: nn.Module, size: int) -> dict[str, Placement]:
    """The layers of a model that a unit of so many workers can cut, by their names."""
    found: dict[str, Placement] = {}
    seen: set[str] = set()
    known: dict[Any, Mapping[str, Placement]] = {}
    named = dict(model.named_modules())
    for name, module in named.items():
        inner = [f"{name}.{path}".strip(".") for path, one in module.named_modules() if is_linear(one)]
        if len(inner) < 2 or set(inner) <= seen:
            continue
        likeness = type(module), tuple((path, tuple(param.shape)) for path, param in module.named_parameters())
        if likeness not in known:
            known[likeness] = _traced(module, size)
        for path, placement in known[likeness].items():
            full = f"{name}.{path}".strip(".")
            if full not in seen:
                seen.add(full)
                found[full] = placement
    found |= _of_siblings(named, found)
    for name, module in named.items():
        if type(module) is nn.MultiheadAttention and _divisible(module, size):
            found[name] = Placement(HEADS)
    found = {name: placement for name, placement in found.items() if placement.kind != WHOLE}
    found |= _vocabulary(model, found)
    return {name: found[name] for name in named if name in found}


def _of_siblings(named: Mapping[str, nn.Module], found: Mapping[str, Placement]) -> dict[str, Placement]:
    """The placements of layers that no block called, as experts that were not asked: those of their like, if they are
    one.
    """
    forms: dict[str, set[Placement]] = {}
    for name, how in found.items():
        forms.setdefault(_ALL.sub("*", name), set()).add(how)
    rest = (name for name, module in named.items() if is_linear(module) and name not in found)
    alike = ((name, forms.get(_ALL.sub("*", name), set())) for name in rest)
    return {name: next(iter(hows)) for name, hows in alike if len(hows) == 1}


def _divisible(module: nn.MultiheadAttention, size: int) -> bool:
    plain = (
        has_own(module, "in_proj_weight")
        and module._qkv_same_embed_dim
        and module.bias_k is None
        and not module.add_zero_attn
    )
    return plain and module.num_heads % size == 0


def _traced(block: nn.Module, size: int) -> dict[str, Placement]:
    """The placements of a block's layers by their paths in it; those that it does not call are not there."""
    weights = {path: cast(torch.Tensor, one.weight) for path, one in block.named_modules() if is_linear(one)}
    layers = {id(weight): path for path, weight in weights.items()}
    for given in _inputs(block):
        chosen: dict[str, tuple[tuple[int, ...], int]] = {}
        tried: dict[str, list[Any]] = {}
        whole: set[str] = set()
        for _ in range(_TRIES):
            trace = _Trace(size, layers, chosen, whole)
            if not _ran(block, trace, given):
                break
            wishes = {name: wish for name, wish in trace.wishes.items() if wish not in tried.get(name, [])}
            for name, wish in wishes.items():
                tried.setdefault(name, []).append(wish)
                chosen[name] = wish
            if wishes:
                continue
            lost = [of - whole for of in (*trace.joined, *(frozenset([name]) for name in trace.wishes)) if of - whole]
            if not lost:
                return _placements(trace, size)
            least = min(weights[name].numel() for name in lost[0])  # the first one: others may be what comes of it
            whole |= {name for name in lost[0] if weights[name].numel() == least}
    return {}


def _placements(trace: _Trace, size: int) -> dict[str, Placement]:
    found = {name: Placement(WHOLE) for name in trace.called}
    for rows, kind in ((trace.columns, COLUMN), (trace.rows, ROW)):
        for name, part in rows.items():
            equal = len({*part.sections}) == 1
            sections = (len(part.sections),) if equal else part.sections
            found[name] = Placement(kind, sections, None if part.count == size else part.count)
    return found


def _ran(block: nn.Module, trace: _Trace, given: Sequence[torch.Tensor] | Mapping[str, torch.Tensor]) -> bool:
    """Whether a block takes this; what would leave it as a part counts as gathered. Leaves no trace in it."""
    streams = RngState(next(block.parameters()).device)
    modes = [(module, module.training) for module in block.modules()]
    hooks = [(module, module._forward_hooks) for module in block.modules() if module._forward_hooks]
    for module, _ in hooks:  # they look at what a layer gives, and then get the whole; the blocks go on with parts
        module._forward_hooks = OrderedDict()
    try:
        with without_a_trace(block, streams), torch.no_grad():
            streams.seed(0)  # the same on all workers
            block.eval()
            with trace:
                made = block(**given) if isinstance(given, Mapping) else block(*given)
        trace.joined += [part.of for t in pytree.tree_leaves(made) if (part := part_of(t)) is not None]
    except PROBE_ERRORS:  # it did not expect such numbers
        return False
    finally:
        for module, training in modes:
            module.training = training
        for module, own in hooks:
            module._forward_hooks = own
    return True


def _inputs(block: nn.Module) -> Iterator[list[torch.Tensor] | Mapping[str, torch.Tensor]]:
    """What a block may take: what it says itself (a model of transformers), or random numbers for each argument that it
    must have.
    """
    if isinstance(theirs := getattr(block, "dummy_inputs", None), Mapping):
        yield theirs
    first = next(module for module in block.modules() if is_linear(module))
    named = [*inspect.signature(block.forward).parameters.values()]
    must = [one for one in named if one.default is one.empty and one.kind is one.POSITIONAL_OR_KEYWORD]
    norm = next((module for module in block.modules() if isinstance(module, nn.LayerNorm)), None)
    widths = {width_in(first), *(norm.normalized_shape[-1:] if norm is not None else ())}
    weight: Any = first.weight
    for lengths in _LENGTHS:
        for width in widths:
            yield [weight.new_empty(*lengths, width).normal_() for _ in range(max(1, len(must)))]


def _vocabulary(model: nn.Module, placed: Mapping[str, Placement]) -> dict[str, Placement]:
    """The largest embedding (and others like it), if the model has a layer that gives a number for each of its entries,
    and that layer.
    """
    named = dict(model.named_modules())
    entries = [(name, m) for name, m in named.items() if type(m) is nn.Embedding and has_own(m) and not m.max_norm]
    free = [(name, m) for name, m in named.items() if type(m) is nn.Linear and has_own(m) and name not in placed]
    for weight in sorted((m.weight for _, m in entries), key=lambda weight: -weight.numel()):
        tied = [name for name, m in free if m.weight is weight]
        outputs = tied or [name for name, m in free if m.weight.shape == weight.shape]
        inputs = [n for n, m in entries if m.weight is weight or (not tied and m.weight.shape == weight.shape)]
        if outputs:
            return {**dict.fromkeys(inputs, Placement(VOCABULARY)), **dict.fromkeys(outputs, Placement(GATHERED))}
    return {}


def folded(table: Mapping[str, Placement]) -> dict[str, str]:
    """The same with one line for all layers that differ in a number only, or in all numbers but the last."""
    forms: dict[str, set[str]] = {}
    for name, placement in table.items():
        forms.setdefault(_ALL.sub("*", name), set()).add(str(placement))
    found = {}
    for name, placement in table.items():
        form = _ALL.sub("*", name)
        found[form if len(forms[form]) == 1 else _BUT_LAST.sub("*", name)] = str(placement)
    return found
