"""Finds which layers to split, by tracing each kind of block once.

Each block runs once on random numbers, in a process that has full weights, while `ShardedTensorMode` tracks which
tensors would be sharded. A layer with a full input is tried as a *column* split; a layer with a sharded input becomes a
*row* split. If a function would need the full output of a column layer, the search tries other sections (for fused
attention weights), then fewer shards (for key-value heads, of which there may be fewer than workers). If nothing helps,
the layer is not split.
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
from paceline.compute.expert_modules import is_experts
from paceline.compute.rng import RngState
from paceline.compute.state_dict import PROBE_ERRORS
from paceline.parallel.tensor_parallel.op_rules import OP_RULES
from paceline.parallel.tensor_parallel.redistribute import DryRunRedistributor, ShardPlacement
from paceline.parallel.tensor_parallel.sharded_mode import ShardedTensorMode, placement_of, set_placement, tensors_in

COLUMN, GATHERED, ROW, VOCABULARY, REPLICATED = "column", "gathered", "row", "vocabulary", "whole"
LOGITS = "logits"  # as a column, of a head: its outputs stay divided for the loss
HEADS = "heads"  # of nn.MultiheadAttention: its weights of three sections and its output layer
EXPERTS = "experts"  # of a module with the stacked weights of its experts: each worker has some of the experts
KINDS = (COLUMN, GATHERED, LOGITS, ROW, VOCABULARY, REPLICATED, HEADS, EXPERTS)
# Leading dimensions of the trial inputs: batch and sequence, rows only, none.
_LENGTHS = ((2, 3), (5,), ())
_TRIES = 64  # for one block
_ALL, _BUT_LAST = re.compile(r"(?<![^.])\d+(?![^.])"), re.compile(r"(?<![^.])\d+(?=\.(.*\.)?\d+(?![^.]))")
_FORM = re.compile(r"(?P<kind>[a-z]+)(:(?P<sections>[0-9]+(\+[0-9]+)*))?( of (?P<count>[0-9]+))?")


@dataclass(frozen=True)
class Placement:
    """Describes how one layer is split.

    `sections` is the number of equal sections or their lengths; `count` is the number of shards if there are fewer than
    workers. As text: ``column``, ``column:3``, ``column:64+16+16``, ``column of 2``.
    """

    kind: str
    sections: tuple[int, ...] = (1,)
    count: int | None = None

    @classmethod
    def parse(cls, text: str) -> Placement | None:
        """Reads a placement from its text; None if the text is not valid."""
        match = _FORM.fullmatch(text)
        if match is None or match["kind"] not in KINDS:
            return None
        lengths = tuple(map(int, (match["sections"] or "1").split("+")))
        if 0 in lengths or (match["kind"] not in (COLUMN, ROW) and (match["sections"] or match["count"])):
            return None
        return cls(match["kind"], lengths, int(match["count"]) if match["count"] else None)

    def __str__(self) -> str:
        sections = f":{'+'.join(map(str, self.sections))}" if self.sections != (1,) else ""
        return f"{self.kind}{sections}{f' of {self.count}' if self.count else ''}"

    def lengths(self, length: int) -> tuple[int, ...] | None:
        """Returns the section lengths of `length` rows or columns; None if the sections do not add up to it."""
        if len(self.sections) == 1:
            count = self.sections[0]
            return None if length % count else (length // count,) * count
        return self.sections if sum(self.sections) == length else None


def is_linear(module: nn.Module) -> bool:
    """Whether a module multiplies by one weight: nn.Linear, or transformers' Conv1D, whose weight is transposed."""
    return (type(module) is nn.Linear or is_conv1d(module)) and has_parameter(module)


def has_parameter(module: nn.Module, name: str = "weight") -> bool:
    """Whether a weight is a parameter of the module.

    Pruning and the older weight_norm compute it from other parameters before each forward.
    """
    return module._parameters.get(name) is not None


def is_conv1d(module: nn.Module) -> bool:
    """Whether a module is transformers' Conv1D: a linear layer whose weight is transposed."""
    return type(module).__name__ == "Conv1D" and hasattr(module, "nf") and getattr(module, "weight", None) is not None


def width_in(module: nn.Module) -> int:
    """Returns the number of input features of a linear layer."""
    weight: Any = module.weight
    return int(weight.shape[0 if is_conv1d(module) else 1])


class _Trace(ShardedTensorMode):
    """Traces one run of a block: which layers would be columns and rows, and which functions prevent a split."""

    def __init__(
        self, size: int, layers: Mapping[int, str], chosen: Mapping[str, tuple[tuple[int, ...], int]], unsplit: set[str]
    ) -> None:
        super().__init__(DryRunRedistributor(size), OP_RULES, lambda: "", self._record)
        self._layers, self._chosen, self._unsplit = layers, chosen, unsplit
        self.columns, self.rows = dict[str, ShardPlacement](), dict[str, ShardPlacement]()
        self.called, self.joined = set[str](), list[frozenset[str]]()
        self.wishes = dict[str, tuple[tuple[int, ...], int]]()

    def _layer(self, function: Any, args: Any, kwargs: Any) -> str | None:
        """Returns the name of the layer whose product this function computes, if it computes one."""
        if function.__name__ not in ("linear", "addmm"):
            return None
        return next((name for t in tensors_in((*args, *kwargs.values())) if (name := self._layers.get(id(t)))), None)

    def run_function(self, function: Any, args: Any, kwargs: Any) -> Any:
        """Records a row layer if the function is the product of a layer with a sharded input, then runs it."""
        layer = self._layer(function, args, kwargs)
        if layer is None:
            return super().run_function(function, args, kwargs)
        self.called.add(layer)
        operands = [(t, placement) for t in args if (placement := placement_of(t)) is not None]
        if operands:
            tensor, placement = operands[0]
            if placement.dim == tensor.dim() - 1 and placement.count == self.redistributor.size:
                self.rows[layer] = placement
        return super().run_function(function, args, kwargs)

    def run_unsharded(self, function: Any, args: Any, kwargs: Any) -> Any:
        """Runs a function on full tensors and marks the output of a candidate column layer as sharded."""
        output, layer = function(*args, **kwargs), self._layer(function, args, kwargs)
        if layer is not None and layer not in self._unsplit:
            sections, count = self._chosen.get(layer, ((output.shape[-1],), self.redistributor.size))
            placement = ShardPlacement(output.dim() - 1, sections, count, layers=frozenset([layer]))
            if placement.is_even:
                self.columns[layer] = placement
                set_placement(output, placement)
        return output

    def write_into_shard(self, function: Any, name: str, args: Any, kwargs: Any) -> Any:
        """Records that the function needs full tensors, which all tensors of a trial are."""
        _, kwargs = self.gather_arguments(name, args, kwargs)
        return set_placement(function(*args, **kwargs), None)

    def _record(
        self, name: str, placements: Sequence[ShardPlacement], section_ends: list[int] | None, count: int | None
    ) -> None:
        layers = frozenset[str]().union(*(placement.layers for placement in placements))
        if section_ends is not None and len(layers) == 1:
            section_starts = [0, *section_ends[:-1]]
            self.wishes[min(layers)] = (
                tuple(b - a for a, b in zip(section_starts, section_ends, strict=True)),
                count or self.redistributor.size,
            )
        else:
            self.joined += [layers] if layers else []


def infer_placements(model: nn.Module, size: int) -> dict[str, Placement]:
    """Returns the layers of a model that a unit of `size` workers can split, with their placements, by name."""
    placements: dict[str, Placement] = {}
    seen: set[str] = set()
    by_structure: dict[Any, Mapping[str, Placement]] = {}
    modules = dict(model.named_modules())
    for name, module in modules.items():
        linear_names = [f"{name}.{path}".strip(".") for path, one in module.named_modules() if is_linear(one)]
        if len(linear_names) < 2 or set(linear_names) <= seen:
            continue
        structure = type(module), tuple((path, tuple(param.shape)) for path, param in module.named_parameters())
        if structure not in by_structure:
            by_structure[structure] = _trace_block(module, size)
        for path, placement in by_structure[structure].items():
            full_name = f"{name}.{path}".strip(".")
            if full_name not in seen:
                seen.add(full_name)
                placements[full_name] = placement
    placements |= _place_like_siblings(modules, placements)
    for name, module in modules.items():
        if type(module) is nn.MultiheadAttention and _has_divisible_heads(module, size):
            placements[name] = Placement(HEADS)
        elif is_experts(module):
            placements[name] = Placement(EXPERTS)
    placements = {name: placement for name, placement in placements.items() if placement.kind != REPLICATED}
    placements |= _place_vocabulary(model, placements)
    return {name: placements[name] for name in modules if name in placements}


def _place_like_siblings(modules: Mapping[str, nn.Module], placements: Mapping[str, Placement]) -> dict[str, Placement]:
    """Places layers that no block called (such as experts that got no token) like their siblings, if those agree."""
    forms: dict[str, set[Placement]] = {}
    for name, placement in placements.items():
        forms.setdefault(_ALL.sub("*", name), set()).add(placement)
    missing = (name for name, module in modules.items() if is_linear(module) and name not in placements)
    candidates = ((name, forms.get(_ALL.sub("*", name), set())) for name in missing)
    return {name: next(iter(options)) for name, options in candidates if len(options) == 1}


def _has_divisible_heads(module: nn.MultiheadAttention, size: int) -> bool:
    """Whether the heads of an attention module can be divided among `size` workers."""
    is_plain = (
        has_parameter(module, "in_proj_weight")
        and module._qkv_same_embed_dim
        and module.bias_k is None
        and not module.add_zero_attn
    )
    return is_plain and module.num_heads % size == 0


def _trace_block(block: nn.Module, size: int) -> dict[str, Placement]:
    """Returns the placements of a block's layers by their paths in it, without those that the block does not call."""
    weights = {path: cast(torch.Tensor, one.weight) for path, one in block.named_modules() if is_linear(one)}
    layers = {id(weight): path for path, weight in weights.items()}
    for inputs in _trial_inputs(block):
        chosen: dict[str, tuple[tuple[int, ...], int]] = {}
        attempts: dict[str, list[Any]] = {}
        unsplit: set[str] = set()
        for _ in range(_TRIES):
            trace = _Trace(size, layers, chosen, unsplit)
            if not _try_run(block, trace, inputs):
                break
            wishes = {name: wish for name, wish in trace.wishes.items() if wish not in attempts.get(name, [])}
            for name, wish in wishes.items():
                attempts.setdefault(name, []).append(wish)
                chosen[name] = wish
            if wishes:
                continue
            sources = (*trace.joined, *(frozenset([name]) for name in trace.wishes))
            blocked = [names - unsplit for names in sources if names - unsplit]
            if not blocked:
                return _to_placements(trace, size)
            # Only the first group: later ones may be its consequence.
            smallest = min(weights[name].numel() for name in blocked[0])
            unsplit |= {name for name in blocked[0] if weights[name].numel() == smallest}
    return {}


def _to_placements(trace: _Trace, size: int) -> dict[str, Placement]:
    """Turns the columns and rows of a trace into placements."""
    placements = {name: Placement(REPLICATED) for name in trace.called}
    for shards, kind in ((trace.columns, COLUMN), (trace.rows, ROW)):
        for name, shard in shards.items():
            equal = len({*shard.sections}) == 1
            sections = (len(shard.sections),) if equal else shard.sections
            placements[name] = Placement(kind, sections, None if shard.count == size else shard.count)
    return placements


def _try_run(block: nn.Module, trace: _Trace, inputs: Sequence[torch.Tensor] | Mapping[str, torch.Tensor]) -> bool:
    """Runs a block under a trace; False if it does not accept these inputs.

    Outputs that would leave the block sharded count as gathered. The block's modes, hooks and buffers are restored.
    """
    rng = RngState(next(block.parameters()).device)
    modes = [(module, module.training) for module in block.modules()]
    hooks = [(module, module._forward_hooks) for module in block.modules() if module._forward_hooks]
    for module, _ in hooks:  # in training, hooks get gathered outputs while the block goes on with shards
        module._forward_hooks = OrderedDict()
    try:
        with without_a_trace(block, rng), torch.no_grad():
            rng.seed(0)  # the same on all workers
            block.eval()
            with trace:
                output = block(**inputs) if isinstance(inputs, Mapping) else block(*inputs)
        trace.joined += [part.layers for t in pytree.tree_leaves(output) if (part := placement_of(t)) is not None]
    except PROBE_ERRORS:  # the block does not accept such inputs
        return False
    finally:
        for module, training in modes:
            module.training = training
        for module, saved in hooks:
            module._forward_hooks = saved
    return True


def _trial_inputs(block: nn.Module) -> Iterator[list[torch.Tensor] | Mapping[str, torch.Tensor]]:
    """Yields trial inputs of a block: its own `dummy_inputs` (transformers), then random numbers for each required
    argument.
    """
    if isinstance(dummy_inputs := getattr(block, "dummy_inputs", None), Mapping):
        yield dummy_inputs
    first = next(module for module in block.modules() if is_linear(module))
    parameters = [*inspect.signature(block.forward).parameters.values()]
    required = [one for one in parameters if one.default is one.empty and one.kind is one.POSITIONAL_OR_KEYWORD]
    norm = next((module for module in block.modules() if isinstance(module, nn.LayerNorm)), None)
    widths = {width_in(first), *(norm.normalized_shape[-1:] if norm is not None else ())}
    weight: Any = first.weight
    for lengths in _LENGTHS:
        for width in widths:
            yield [weight.new_empty(*lengths, width).normal_() for _ in range(max(1, len(required)))]


def _place_vocabulary(model: nn.Module, placed: Mapping[str, Placement]) -> dict[str, Placement]:
    """Places the largest embedding with an output layer (one output per entry), that layer, and similar embeddings."""
    modules = dict(model.named_modules())
    embeddings = [
        (name, m) for name, m in modules.items() if type(m) is nn.Embedding and has_parameter(m) and not m.max_norm
    ]
    candidates = [
        (name, m) for name, m in modules.items() if type(m) is nn.Linear and has_parameter(m) and name not in placed
    ]
    for weight in sorted((m.weight for _, m in embeddings), key=lambda weight: -weight.numel()):
        tied_outputs = [name for name, m in candidates if m.weight is weight]
        outputs = tied_outputs or [name for name, m in candidates if m.weight.shape == weight.shape]
        inputs = [
            n for n, m in embeddings if m.weight is weight or (not tied_outputs and m.weight.shape == weight.shape)
        ]
        if outputs:
            return {**dict.fromkeys(inputs, Placement(VOCABULARY)), **dict.fromkeys(outputs, Placement(LOGITS))}
    return {}


def fold_names(table: Mapping[str, Placement]) -> dict[str, str]:
    """Merges names that differ only in a number, or in all numbers but the last, into one pattern with `*`."""
    forms: dict[str, set[str]] = {}
    for name, placement in table.items():
        forms.setdefault(_ALL.sub("*", name), set()).add(str(placement))
    folded = {}
    for name, placement in table.items():
        form = _ALL.sub("*", name)
        folded[form if len(forms[form]) == 1 else _BUT_LAST.sub("*", name)] = str(placement)
    return folded
