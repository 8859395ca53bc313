"""Splits layers for tensor parallelism: by column, row, vocabulary and heads.

A *column* split divides the outputs of a layer (``column:3``: each third of them, as in a fused weight for query, key
and value; *gathered*: and gathers them again; *logits*: and leaves them divided for the loss), a *row* split its
inputs, a *vocabulary* split the entries of an embedding, and *heads* the heads of an nn.MultiheadAttention. The user's
modules stay as they are, except for smaller weights and a replaced forward. Between a column and a row layer the user's
code runs on shards under `ShardedTensorMode`; everything else is computed identically by all workers of the unit.
"""

from __future__ import annotations

import math
import re
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.nn.functional as F
from torch import nn

from paceline.base.sharding import ShardingSpec
from paceline.comm.communicator import Group
from paceline.compute.batchnorm import without_a_trace
from paceline.compute.blocks import blocks_of
from paceline.compute.expert_modules import inputs_of, is_experts
from paceline.compute.job import Judge
from paceline.compute.microbatches import refuse_other_input, tensors_of
from paceline.compute.rng import RngState
from paceline.compute.verify import allowed, apart, farthest, gradients_of, outputs_apart, room
from paceline.errors import UsageError, a
from paceline.parallel.parallel_job import GRADIENT_HOOK, ParallelJob
from paceline.parallel.pipeline.stage_forward import placed, replace_forward
from paceline.parallel.tensor_parallel.attention import attention
from paceline.parallel.tensor_parallel.divided_outputs import DividedOutputs
from paceline.parallel.tensor_parallel.experts import run_experts
from paceline.parallel.tensor_parallel.op_rules import OP_RULES, SUM_RULES
from paceline.parallel.tensor_parallel.placement import (
    COLUMN,
    EXPERTS,
    GATHERED,
    HEADS,
    LOGITS,
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
from paceline.parallel.tensor_parallel.redistribute import Redistributor, ShardPlacement, saving_shards, summed
from paceline.parallel.tensor_parallel.script_view import call_without_script_view
from paceline.parallel.tensor_parallel.sharded_mode import (
    GatherMode,
    ShardedTensorMode,
    full_shape_of,
    placement_of,
    set_placement,
    shrink,
    suspend_other_modes,
)
from paceline.parallel.tensor_parallel.vocabulary_loss import VOCABULARY_RULES

if TYPE_CHECKING:
    from paceline.parallel.tensor_parallel.compiled_units import ShardedBackend

_ADVICE = 'name the layers: Trainer(..., tensor={"blocks.*.up": "column", "blocks.*.down": "row"})'
_FROM_USER = "tensor= names them"
LARGE = 8 << 20  # bytes of a layer's outputs from which on dividing the sequence is worth the time that it costs
PLACEMENTS = (
    f"use one of {COLUMN}, {COLUMN}:N, {GATHERED}, {LOGITS}, {ROW}, {VOCABULARY}, {HEADS}, {EXPERTS}, {REPLICATED}"
)
# The names that transformers uses in a model's _tp_plan.
_TRANSFORMERS_STYLES = {
    "colwise": COLUMN,
    "colwise_gather_output": LOGITS,
    "colwise_rep": LOGITS,
    "rowwise": ROW,
    "embedding_rowwise": VOCABULARY,
    **dict.fromkeys(("replicate", "replicated_with_grad_allreduce", "sequence_parallel"), REPLICATED),
}
_SPLIT_AXIS = {
    COLUMN: "outputs",
    GATHERED: "outputs",
    LOGITS: "outputs",
    ROW: "inputs",
    VOCABULARY: "entries",
    HEADS: "heads",
    EXPERTS: "experts",
}


@dataclass
class _Layer:
    """A split layer.

    `shard` describes this worker's shard of its weight: along the outputs, or along the inputs of a row layer. It is
    None for attention heads.
    """

    name: str
    module: nn.Module
    placement: Placement
    shard: ShardPlacement | None = None
    width: int = 0  # the last dimension of the full output
    kind: int = 0  # the number of the first layer that differs from this one at most in its weights


def _matching(pattern: str, names: Iterable[str], source: str) -> list[str]:
    """Returns the module names that a pattern matches.

    Raises UsageError if a pattern of the user's table matches none.
    """
    expression = re.compile(re.escape(pattern).replace(r"\*", "[^.]+"))
    matches = [name for name in names if expression.fullmatch(name)]
    if not matches and source == _FROM_USER:
        raise UsageError(f"the model has no module {pattern!r}, which tensor= names", "give the path of a module")
    return matches


def _with_adapters(table: Mapping[str, str], modules: Mapping[str, nn.Module]) -> dict[str, str]:
    """Returns the placements of a model whose layers peft has wrapped: of a layer's base, and of its LoRA matrices.

    LoRA adds B(A(x)) to a layer's output: outputs are split in B as in the base layer, inputs in A.
    """
    placements: dict[str, str] = {}
    for pattern, placement in table.items():
        for name in _matching(f"base_model.model.{pattern}", modules, ""):
            base = f"{name}.base_layer"
            placements[base if base in modules else name] = placement
            matrix = {COLUMN: "lora_B", GATHERED: "lora_B", LOGITS: "lora_B", ROW: "lora_A"}.get(placement)
            placements |= {part: placement for part in modules if part.startswith(f"{name}.{matrix}.")}
    return placements


@dataclass
class _Frame:
    """A running module forward that is traced.

    `has_adapted_calls`: whether a torch function in it needed `ShardedTensorMode` to get the right result on shards.
    """

    name: str
    has_adapted_calls: bool = False


class TensorCut:
    """Splits layers of a job's model among the workers of a `unit`.

    `placements` maps patterns of module names to placements. Without it, the model's own plan is used (`_tp_plan` of
    transformers), or else the structure of its blocks.

    Raises UsageError if nothing can be split or a layer cannot be divided by the number of workers; and, in the first
    forward, if the split model computes another result than the full one.
    """

    def __init__(self, job: ParallelJob, unit: Group, placements: Mapping[str, str] | None) -> None:
        self.job, self.unit, self.redistributor = job, unit, Redistributor(unit)
        # By the identity of a parameter, while layers are split. The parameter holds this worker's shard.
        self._divided_params: dict[int, tuple[nn.Parameter, ShardingSpec]] = {}
        self._rng, self._name = RngState(job.device), type(job.model).__name__
        modules = dict(job.model.named_modules())
        self.table, self._source = self._choose_layers(modules, placements)
        if job.divided:  # experts, which expert= divides
            self.table = {name: placement for name, placement in self.table.items() if placement.kind != EXPERTS}
        self.layers = [_Layer(name, modules[name], placement) for name, placement in self.table.items()]
        if not self.layers:
            looked = "it has no _tp_plan and no block where one layer takes the outputs of others"
            raise UsageError(f"{self._name} has no layers that tensor= can split: {looked}", _ADVICE)
        for layer in self.layers:
            self._cut(layer)
        # Bytes of the full weights of all split layers.
        self._full_bytes = sum(p.element_size() * math.prod(spec.shape) for p, spec in self._divided_params.values())
        self._divided_params.clear()
        job.named = {name: param for name, param in job.model.named_parameters() if param.requires_grad}
        self._is_gathered = False  # whether layers compute with gathered weights
        # Whether row layers leave their outputs divided along the sequence in training, and the most bytes of one.
        self._divides_sequences, self._largest_output = False, 0
        self._is_running = False  # whether a forward of the model is running
        self._compares_uncompiled = False  # whether a forward and backward without compiled code are compared now
        self._backend: ShardedBackend | None = None  # of compiled code
        self._frames: list[_Frame] = []
        rules = OP_RULES | SUM_RULES | VOCABULARY_RULES
        self._sharded_mode = ShardedTensorMode(self.redistributor, rules, self._where, self._on_adapted)
        self._gather_mode = GatherMode(self.redistributor)
        # Tracks split weights and outputs that a loss uses.
        self._loss_mode = ShardedTensorMode(self.redistributor, rules, lambda: "the loss")
        self._sharded_mode.model = self._gather_mode.model = self._loss_mode.model = job.model
        self._loss_mode.outranked_by = self._sharded_mode
        self._divided_outputs = DividedOutputs(job, unit, self.redistributor, self._loss_mode)
        self._loss_mode.on_adapted = self._divided_outputs.note
        self._logits_stay = any(layer.placement.kind == LOGITS for layer in self.layers)
        self._logits: list[weakref.ref[torch.Tensor]] = []  # the outputs of the last forward's heads
        if job.over is None:
            job.loss = Judge(job.loss, self._in_loss, partial(self._divided_outputs.loss, self._without_a_trace))
        else:  # then the loss of a micro-batch is computed from gradients, which can be sharded
            job.over = Judge(job.over, self._in_loss)
        # By (training, assembled): the names of the modules in which shards are tracked.
        self._regions: dict[tuple[bool, bool], set[str]] = {}
        self._verified_modes, self._gathered_at = set[tuple[bool, bool, bool]](), set[str]()
        self._original_forward, self._is_own_call = job.forward, False
        job.forward = self._forward
        job.model.register_forward_pre_hook(self._check_call, with_kwargs=True)
        self._wrap_containers(modules)
        job.redistributors.append(self.redistributor)

    def __deepcopy__(self, memo: Any) -> TensorCut:
        problem = f"{self._name} cannot be copied, because tensor= leaves each worker only shards of its layers"
        raise UsageError(problem, "write the full model with export(), or leave tensor= out to keep copies (averages)")

    @property
    def decision(self) -> tuple[str, str]:
        """Describes for people which layers are split how and which are not, and where that was decided."""
        by_kind: dict[str, list[str]] = {}
        for pattern, placement in fold_names(self.table).items():
            by_kind.setdefault(placement, []).append(pattern)
        kinds = "; ".join(f"{kind} {', '.join(patterns)}" for kind, patterns in by_kind.items())
        layers = "1 layer is" if len(self.layers) == 1 else f"{len(self.layers)} layers are"
        split = f"{layers} split over {self.unit.size} workers: {kinds}"
        inside = {id(module) for layer in self.layers for module in layer.module.modules()}
        not_split = {
            name: Placement(REPLICATED)
            for name, module in self.job.model.named_modules()
            if (is_linear(module) or type(module) in (nn.Embedding, nn.MultiheadAttention)) and id(module) not in inside
        }
        return split + (f"; not split: {', '.join(fold_names(not_split))}" if not_split else ""), self._source

    # -- which layers -------------------------------------------------------------------------------------------------

    def _choose_layers(
        self, modules: Mapping[str, nn.Module], table: Mapping[str, str] | None
    ) -> tuple[dict[str, Placement], str]:
        """Returns the layers to split with their placements, and a text that says where these come from."""
        source = _FROM_USER
        if table and all(
            (placement := Placement.parse(text)) and placement.kind == REPLICATED for text in table.values()
        ):
            # The table only excludes layers: split those that would be split without a table, except for these.
            unsplit = {name for pattern in table for name in _matching(pattern, modules, source)}
            placements, source = self._choose_layers(modules, None)
            return {
                name: placement for name, placement in placements.items() if name not in unsplit
            }, f"{source}, and tensor= excludes some layers"
        if table is None:
            table, source = self._transformers_plan(), "the model's own _tp_plan names them"
        if not table:
            return infer_placements(
                self.job.model, self.unit.size
            ), "a trial run of its blocks found that they can be split"
        placements = {}
        for pattern, text in table.items():
            placement = Placement.parse(text)
            if placement is None:
                raise UsageError(f"tensor= gives {pattern!r} the unknown placement {text!r}", PLACEMENTS)
            matches = _matching(pattern, modules, source)
            for name in matches:
                placements.pop(name, None)
                if placement.kind != REPLICATED:
                    placements[name] = placement
        if (
            source != _FROM_USER
        ):  # subclasses of nn.Embedding (which may scale entries), and heads tied to them, stay full
            embeddings = [m for m in modules.values() if isinstance(m, nn.Embedding) and type(m) is not nn.Embedding]
            special_weights = {id(module.weight) for module in embeddings}
            placements = {
                name: placement
                for name, placement in placements.items()
                if id(getattr(modules[name], "weight", None)) not in special_weights
            }
        return placements, source

    def _transformers_plan(self) -> dict[str, str]:
        """Returns the plan of a transformers model (`_tp_plan`), if the unit's size divides its heads; else nothing.

        A plan that only names embeddings and output layers counts as nothing.
        """
        model = self.job.model
        inner = getattr(model, "base_model", None) if hasattr(model, "peft_config") else None  # peft's wrapper
        base = getattr(inner, "model", None) if inner is not None else model
        plan: Mapping[str, str] = getattr(base, "_tp_plan", None) or {}
        config = getattr(base, "config", None)
        is_known = all(style in _TRANSFORMERS_STYLES for style in plan.values())
        heads = [getattr(config, name, 0) or 0 for name in ("num_attention_heads", "num_key_value_heads")]
        if not is_known or any(number % self.unit.size for number in heads):
            return {}
        table = {name: _TRANSFORMERS_STYLES[style] for name, style in plan.items()}
        if not {COLUMN, ROW} & {*table.values()}:
            return {}
        return table if inner is None else _with_adapters(table, dict(model.named_modules()))

    # -- cutting ------------------------------------------------------------------------------------------------------

    def _cut(self, layer: _Layer) -> None:
        """Splits the parameters of a layer and replaces its forward; UsageError if it has no such split."""
        module, kind = layer.module, layer.placement.kind
        has_type = {
            VOCABULARY: type(module) is nn.Embedding,
            HEADS: type(module) is nn.MultiheadAttention,
            EXPERTS: is_experts(module),
        }
        if (
            not has_type.get(kind, type(module) is nn.Linear or is_conv1d(module))
            or getattr(module, "max_norm", None) is not None
        ):
            kinds = {VOCABULARY: "Embedding", HEADS: "MultiheadAttention", EXPERTS: "module of experts"}
            wanted = kinds.get(kind, "Linear")
            problem = f"{layer.name} is {a(type(module).__name__)}, but the placement {kind} is for {a(wanted)}"
            raise UsageError(problem, self._advice_to_exclude(layer.name, f", or name {a(wanted)}"))
        if kind == EXPERTS:
            self._cut_experts(layer)
            return
        if not has_parameter(module, "in_proj_weight" if kind == HEADS else "weight"):
            others = ", ".join(name for name, _ in module.named_parameters())
            problem = (
                f"the weight of {layer.name} is computed from other parameters ({others}), so tensor= cannot split it"
            )
            raise UsageError(problem, self._advice_to_exclude(layer.name))
        if kind == HEADS:
            self._cut_heads(layer)
            return
        is_transposed = is_conv1d(module)
        dim = (1 if kind != ROW else 0) if is_transposed else (0 if kind != ROW else 1)
        weight: Any = module.weight
        shard = self._divided_length(layer, full_shape_of(weight)[dim])
        layer.shard, layer.width = shard, full_shape_of(weight)[0 if is_linear(module) else 1]
        self._divide(layer, module, "weight", dim, shard)
        if getattr(module, "bias", None) is not None and kind != ROW:
            self._divide(layer, module, "bias", 0, shard)
        self._replace(module, partial(self._run_layer, layer))

    def _cut_heads(self, layer: _Layer) -> None:
        module = cast(nn.MultiheadAttention, layer.module)
        if module.num_heads % self.unit.size or not module._qkv_same_embed_dim:
            problem = f"tensor={self.unit.size} does not divide the {module.num_heads} heads of {layer.name}"
            raise UsageError(problem, self._advice_to_divide(layer, module.num_heads))
        width = module.embed_dim
        qkv, output = (ShardPlacement(0, (width,) * count, self.unit.size) for count in (3, 1))
        self._divide(layer, module, "in_proj_weight", 0, qkv)
        if module.in_proj_bias is not None:
            self._divide(layer, module, "in_proj_bias", 0, qkv)
        self._divide(layer, module.out_proj, "weight", 1, output, "out_proj.weight")
        self._replace(module, partial(self._heads, layer))

    def _cut_experts(self, layer: _Layer) -> None:
        layer.shard = self._divided_length(layer, cast(int, layer.module.num_experts))
        for key, _ in [*layer.module.named_parameters(recurse=False)]:
            self._divide(layer, layer.module, key, 0, layer.shard)
        self._replace(layer.module, partial(self._experts, layer))

    def _replace(self, module: nn.Module, forward: Callable[..., Any]) -> None:
        replace_forward(module, forward, self.job.stages is not None, f"{self._name}, which tensor= splits")
        # Without a hook, nn.TransformerEncoderLayer passes the weights to a fused kernel and skips the forward.
        module.register_forward_pre_hook(_nothing)

    def _divided_length(self, layer: _Layer, length: int) -> ShardPlacement:
        """Returns how a length is divided, along dimension 0; UsageError if it is not divisible."""
        size, placement = self.unit.size, layer.placement
        count = placement.count or size
        sections = placement.lengths(length)
        shard = ShardPlacement(0, sections or (), count)
        if (
            sections is None
            or size % count
            or not (shard.is_even or placement.kind in (VOCABULARY, GATHERED, LOGITS, EXPERTS))
        ):
            split_lengths = f"{length} {_SPLIT_AXIS[placement.kind]}"
            if placement.sections != (1,):
                split_lengths = f"{length} {_SPLIT_AXIS[placement.kind]} (placement {placement})"
            raise UsageError(
                f"tensor={size} does not divide the {split_lengths} of {layer.name}",
                self._advice_to_divide(layer, length),
            )
        return shard

    def _advice_to_divide(self, layer: _Layer, length: int) -> str:
        """Returns the advice for an indivisible length: a smaller `tensor=` that divides it and the workers."""
        size = self.unit.size
        workers = size * (self.job.units.size if self.job.units else 1)
        fits = [n for n in range(2, size) if length % n == 0 and workers % n == 0]
        return f"use tensor={fits[-1]}" if fits else self._advice_to_exclude(layer.name)

    def _advice_to_exclude(self, name: str, more: str = "") -> str:
        """Returns the advice that tells how to leave a layer out of the split."""
        if self._source == _FROM_USER:
            return f'set it to "{REPLICATED}" in tensor={more}'
        return f'exclude it with Trainer(..., tensor={{"{name}": "{REPLICATED}"}}); other layers stay split'

    def _divide(
        self, layer: _Layer, module: nn.Module, key: str, dim: int, shard: ShardPlacement, path: str = ""
    ) -> None:
        """Shrinks a parameter to this worker's shard, under all of its names in the model. It has no values yet."""
        param, path = cast(nn.Parameter, getattr(module, key)), path or key
        if id(param) in self._divided_params:  # tied to one that is cut already
            _, spec = self._divided_params[id(param)]
            if spec != replace(shard, dim=dim).sharding_spec(spec.shape, self.unit.size):
                problem = f"{layer.name}.{path} is tied to a weight with another placement"
                raise UsageError(problem, self._advice_to_exclude(layer.name))
            return
        shard = replace(shard, dim=dim)
        spec = shard.sharding_spec(tuple(param.shape), self.unit.size)
        shrink(param, spec.at(self.unit.rank).shape, shard)
        self._divided_params[id(param)] = param, spec
        # Neighbours with the same shard each compute only a part of its gradient.
        if shard.count < self.unit.size and param.requires_grad:
            change = partial(self._sum_over_holders, shard)
            param.register_hook(change)
            vars(param)[GRADIENT_HOOK] = change
        parameters = self.job.model.named_parameters(remove_duplicate=False)
        self.job.cuts |= {name: spec for name, other in parameters if other is param}

    def _sum_over_holders(self, shard: ShardPlacement, gradient: torch.Tensor) -> torch.Tensor:
        """Sums a gradient over the workers that hold the same shard."""
        by_shard = gradient.new_zeros(shard.count, *gradient.shape)
        by_shard[self.redistributor.index(shard)] = gradient
        return summed(by_shard, self.unit)[self.redistributor.index(shard)]

    # -- forwards of the layers ---------------------------------------------------------------------------------------

    def _forward_of(self, layer: _Layer) -> Callable[[_Layer, torch.Tensor], torch.Tensor]:
        return {ROW: self._row, VOCABULARY: self._vocabulary}.get(layer.placement.kind, self._column)

    def _run_layer(self, layer: _Layer, x: torch.Tensor) -> torch.Tensor:
        if torch.compiler.is_dynamo_compiling():
            module = cast(Any, layer.module)
            return self._call_traced(x, module.weight, getattr(module, "bias", None), layer.kind, layer.width)
        output = self._forward_of(layer)(layer, x)
        # Uncompiled code between compiled graphs gets full tensors.
        is_between = self._backend is not None and self._backend.is_running and not self._sharded_mode.on
        return self._sharded_mode.gather_full(output) if is_between else output

    def _column(self, layer: _Layer, x: torch.Tensor) -> torch.Tensor:
        module, shard = cast(Any, layer.module), cast(ShardPlacement, layer.shard)
        if self._is_gathered:
            return cast(torch.Tensor, self._run_gathered(type(module).forward, module, x))
        with self._sharded_mode.suspended():
            full, saving = self._column_input(x)
            with saving:
                if is_conv1d(module):
                    output = torch.matmul(full, module.weight) + module.bias
                else:
                    output = F.linear(full, module.weight, module.bias)
            output = set_placement(output, ShardPlacement(output.dim() - 1, shard.sections, shard.count))
            if layer.placement.kind == GATHERED or (layer.placement.kind == LOGITS and not self._logits_stay):
                return self._sharded_mode.gather_full(output)
            if layer.placement.kind == LOGITS and self._is_running and torch.is_grad_enabled():
                self._logits.append(weakref.ref(output))
            return output

    def _row(self, layer: _Layer, x: torch.Tensor) -> torch.Tensor:
        module, shard = cast(Any, layer.module), cast(ShardPlacement, layer.shard)
        if self._is_gathered:
            return cast(torch.Tensor, self._run_gathered(type(module).forward, module, x))
        with self._sharded_mode.suspended():
            x = self._row_input(x, shard)
            output = torch.matmul(x, module.weight) if is_conv1d(module) else F.linear(x, module.weight)
            return self._summed(output, module.bias)

    def _column_input(self, x: torch.Tensor) -> tuple[torch.Tensor, AbstractContextManager[None]]:
        """Returns the full input of a column layer, whose gradient is summed over the workers, and a context for the
        use of the input, in which autograd saves no more of it than this worker's shard.
        """
        placement = placement_of(x)
        if placement is not None and placement.dim == 1 and placement.is_even and placement.count == self.unit.size:
            full = self.redistributor.gather_to_split(x, placement)
            return full, saving_shards(self.redistributor, full, x, placement)
        return self.redistributor.share(self._sharded_mode.gather_full(x)), nullcontext()

    def _summed(self, output: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Returns the sum of all workers' outputs of a layer (rows x tokens x width), plus a bias.

        With divided sequences (Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models",
        2022), each worker gets the sums of its own tokens.
        """
        training = self.job.model.training and torch.is_grad_enabled() and output.dim() == 3  # or computed again
        if training:
            self._largest_output = max(self._largest_output, output.nbytes)
        if not (training and self._divides_sequences) or output.shape[1] % self.unit.size:
            output = self.redistributor.sum(output)
            return output if bias is None else output + bias
        placement = ShardPlacement(1, (output.shape[1],), self.unit.size)
        output = self.redistributor.scatter_sum(output, placement)
        return set_placement(output if bias is None else output + self.redistributor.share(bias), placement)

    def _row_input(self, x: torch.Tensor, shard: ShardPlacement) -> torch.Tensor:
        """Returns this worker's shard of the input of a row layer.

        Outside of a traced region the input is an unmarked tensor: the shard itself, or the full input.
        """
        placement, wanted = placement_of(x), ShardPlacement(x.dim() - 1, shard.sections, shard.count)
        if placement == wanted or (placement is None and x.shape[-1] == shard.shard_length != shard.length):
            return x
        return self.redistributor.take(self._sharded_mode.gather_full(x), wanted)

    def _vocabulary(self, layer: _Layer, ids: torch.Tensor) -> torch.Tensor:
        module, shard = cast(nn.Embedding, layer.module), cast(ShardPlacement, layer.shard)
        if self._is_gathered:
            return cast(torch.Tensor, self._run_gathered(nn.Embedding.forward, module, ids))
        with self._sharded_mode.suspended():
            (rows,) = shard.rows(self.redistributor.index(shard))
            local_ids = ids - rows.start
            is_elsewhere = (local_ids < 0) | (local_ids >= len(rows))
            padding = None if module.padding_idx is None else module.padding_idx - rows.start
            padding = padding if padding is not None and 0 <= padding < len(rows) else None
            if len(rows):
                output = F.embedding(local_ids.masked_fill(is_elsewhere, 0), module.weight, padding)
            else:  # there are fewer entries than workers, and this worker has none
                output = module.weight.new_zeros(*ids.shape, module.embedding_dim) + module.weight.sum()
            return self._summed(output.masked_fill(is_elsewhere.unsqueeze(-1), 0.0))

    def _heads(self, layer: _Layer, /, *args: Any, **kwargs: Any) -> Any:
        module = cast(nn.MultiheadAttention, layer.module)
        if self._is_gathered:
            return self._run_gathered(nn.MultiheadAttention.forward, module, *args, **kwargs)
        with self._sharded_mode.suspended():
            return attention(module, self._sharded_mode, *args, **kwargs)

    def _experts(self, layer: _Layer, /, *args: Any, **kwargs: Any) -> torch.Tensor:
        module, shard = layer.module, cast(ShardPlacement, layer.shard)
        if self._is_gathered:
            return cast(torch.Tensor, self._run_gathered(type(module).forward, module, *args, **kwargs))
        tokens, indices, weights = inputs_of(module, args, kwargs)
        (held,) = shard.rows(self.redistributor.index(shard))
        with self._sharded_mode.suspended():
            tokens, indices, weights = map(self._sharded_mode.gather_full, (tokens, indices, weights))
            tokens, weights = self.redistributor.share(tokens), self.redistributor.share(weights)
            return self.redistributor.sum(run_experts(module, held, tokens, indices, weights))

    def _run_gathered(self, forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Runs a forward with gathered weights, also when activation checkpointing repeats it in the backward."""
        with nullcontext() if self._gather_mode.on else self._gather_mode:
            return forward(*args, **kwargs)

    # -- forwards of the modules around them --------------------------------------------------------------------------

    def _wrap_containers(self, modules: Mapping[str, nn.Module]) -> None:
        """Wraps the modules that contain split layers, so that shards are tracked inside of them where needed."""
        containers = {""}
        for layer in self.layers:
            steps = layer.name.split(".")
            containers |= {".".join(steps[:number]) for number in range(1, len(steps))}
        self._model_forward = modules[""].forward
        for name in containers - {layer.name for layer in self.layers}:
            self._wrap_container(name, modules[name], modules[name].forward)

    def _wrap_container(self, name: str, module: nn.Module, plain: Callable[..., Any]) -> None:
        forward = partial(self._run_module if name else self._run_forward, name, module, plain)
        vars(module)["forward"] = partial(call_without_script_view, forward)

    # -- compiled code ------------------------------------------------------------------------------------------------

    @property
    def mode(self) -> ShardedTensorMode:
        """The mode that runs the model on shards."""
        return self._sharded_mode

    @property
    def words(self) -> str:
        """The words of the plan that split the layers."""
        return f"tensor={self.unit.size}"

    def is_eager(self) -> bool:
        """Whether the model computes without compiled code: with gathered weights, in the comparison without it (with
        its backward, which may compute blocks again), and while modules are traced.
        """
        return (
            self._is_gathered
            or self._compares_uncompiled
            or (self.job.model.training, self.job.assembled) not in self._regions
        )

    def is_split(self, module: nn.Module) -> bool:
        """Whether a module is a split layer."""
        return any(layer.module is module for layer in self.layers)

    def prepare_compiled(self, backend: ShardedBackend) -> None:
        """Prepares the layers for compiled code, which calls them through a backend."""
        from paceline.parallel.tensor_parallel.compiled_units import call_split_layer

        self._backend, self._call_traced = backend, call_split_layer
        for layer in self.layers:
            if layer.placement.kind in (HEADS, EXPERTS):
                forward = torch.compiler.disable(layer.module.forward)
                vars(layer.module)["forward"] = forward
                continue
            traits = self._traits(layer)
            layer.kind = next(n for n, other in enumerate(self.layers) if self._traits(other) == traits)

    def _traits(self, layer: _Layer) -> Any:
        """Returns what distinguishes a layer from others, except for its weights."""
        module = cast(Any, layer.module)
        padding, bias = getattr(module, "padding_idx", None), getattr(module, "bias", None)
        return type(module), layer.placement, layer.shard, layer.width, padding, bias is None

    def replace_model_forward(self, replacement: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        """Replaces the forward of the model, inside of what tracks shards around it."""
        self._wrap_container("", self.job.model, replacement(self._model_forward))

    def run_traced(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, kind: int, width: int
    ) -> torch.Tensor:
        """Runs a layer of this kind with the weights of a graph that torch.compile traces."""
        layer = self.layers[kind]
        slots = [(layer.module, key, param) for key, param in (("weight", weight), ("bias", bias)) if param is not None]
        with placed(cast(Any, slots)):
            return self._forward_of(layer)(layer, x)

    def _where(self) -> str:
        """Returns the name of the module that runs, for messages."""
        return (self._frames[-1].name if self._frames else "") or self._name

    def _on_adapted(self, name: str, shards: Any, *_: Any) -> None:
        if self._frames:
            self._frames[-1].has_adapted_calls = True
        if shards:
            self._gathered_at.add(f"{self._where()} ({name.strip('_')})")

    def _run_module(
        self, name: str, module: nn.Module, forward: Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> Any:
        if torch.compiler.is_dynamo_compiling():
            return forward(*args, **kwargs)
        regions = self._regions.get((self.job.model.training, self.job.assembled))
        if self._is_gathered:
            return self._run_gathered(forward, *args, **kwargs)
        if regions is None and self._is_running:
            return self._trace_region(name, forward, args, kwargs)
        # Where a backward computes a block again, its input may be divided.
        is_region = regions is None or name in regions or any(map(placement_of, tensors_of((args, kwargs))))
        tracks_shards = is_region and not self._sharded_mode.on
        with self._sharded_mode if tracks_shards else nullcontext():
            return forward(*args, **kwargs)

    def _trace_region(self, name: str, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Runs a module's forward and records whether shards must be tracked in it.

        That is the innermost module whose inputs and outputs are all full, and that needs `ShardedTensorMode` inside.
        """
        frame = _Frame(name)
        self._frames.append(frame)
        try:
            output = forward(*args, **kwargs)
        finally:
            self._frames.pop()
        if frame.has_adapted_calls and any(map(placement_of, tensors_of((args, kwargs, output)))):
            self._frames[-1].has_adapted_calls = True
        elif frame.has_adapted_calls:
            self._traced_regions.add(name)
        return output

    def _run_forward(
        self, name: str, model: nn.Module, forward: Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> Any:
        """Runs a forward of the model that the script calls. All of its outputs are full tensors."""
        if torch.compiler.is_dynamo_compiling() or self._is_gathered or self._is_running:
            return forward(*args, **kwargs)
        with suspend_other_modes(model):
            return self._divided_outputs.full(self._run_in_modes(model.training, partial(forward, *args, **kwargs)))

    def _run_in_modes(self, training: bool, call: Callable[[], Any]) -> Any:
        """Runs a forward of the model. Outputs may be shards."""
        mode = training, self.job.assembled
        regions, self._is_running = self._regions.get(mode), True
        frame, self._traced_regions = _Frame(""), set[str]()
        sent_before, self._frames = self.redistributor.bytes_sent, [frame]
        try:
            with self._sharded_mode if regions is None or "" in regions else nullcontext():
                output = call()
            # Without the mode, the outputs of a head are marked as shards, and what is made of them is not.
            heads = [logits() for logits in self._logits]
            shards = (x for x in tensors_of(output) if placement_of(x))
            frame.has_adapted_calls |= any(all(x is not logits for logits in heads) for x in shards)
        finally:
            self._is_running, self._frames, self._logits = False, [], []
            self.redistributor.forget_shared()
        if regions is None and (torch.is_grad_enabled() or not training):
            self._regions[mode] = self._traced_regions | ({""} if frame.has_adapted_calls else set())
            if training and not self.job.assembled:
                self.job.inside["tensor"] = self.redistributor.bytes_sent - sent_before
        return output

    # -- what a script may do with a cut model ------------------------------------------------------------------------

    def _forward(self, model: nn.Module, batch: Any) -> Any:
        was_own_call, self._is_own_call = self._is_own_call, True
        try:
            if model is not self.job.model:
                self._declare()
                return self._original_forward(model, batch)
            if (mode := (model.training, torch.is_grad_enabled(), self.job.assembled)) not in self._verified_modes:
                sent_before = self.redistributor.bytes_sent
                self._verify(model, batch)
                self.redistributor.bytes_sent = sent_before  # what a comparison sends is no part of a step
                self._verified_modes.add(mode)
            self._declare()
            outputs = self._run_in_modes(model.training, partial(self._original_forward, model, batch))
            return outputs if self._divided_outputs.stay else self._divided_outputs.full(outputs)
        finally:
            self._is_own_call = was_own_call

    @contextmanager
    def _in_loss(self) -> Iterator[None]:
        """Computes the loss, identically on all workers of the unit. Weights that the loss uses are gathered."""
        with self._loss_mode:
            yield
        self.redistributor.forget_shared()

    def _declare(self) -> None:
        self.unit.declare("the layers split by tensor=", check=False, kind="tensor")

    def _check_call(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        """Checks a call of the model by the script: all workers of the unit must make it, with the same input."""
        if self._is_own_call:
            return
        if self.job.passing:  # a pipeline's trial run, which counts the torch functions of the user's code
            with torch._C.DisableTorchFunction():
                self._declare()
            return
        self.unit.declare(f"a call of {self._name}, whose layers tensor= splits", kind="tensor")
        refuse_other_input(self.unit, (args, kwargs), self._name, "tensor= splits its layers")

    # -- comparison with the full model -------------------------------------------------------------------------------

    def _verify(self, model: nn.Module, batch: Any) -> None:
        """Compares the first forward of a mode, and its backward in training, with that of the full model."""
        if not self.job.trains:
            self._outputs(model, batch)
            self._divides_sequences = self._may_divide_sequences()
            self._regions.pop((model.training, self.job.assembled), None)
            return
        self.unit.declare("the full layers, for the comparison", check=False, kind="comparison")
        backward = model.training and torch.is_grad_enabled() and self._has_room_for_full()
        expected = self._compute(model, batch, True, backward)
        error, farthest_output, distance = self._distances(model, batch, backward, expected)
        if self._logits_stay and any(self.unit.gather_json(error is not None)):
            self._logits_stay = False  # the model uses them in a way that shards cannot
            error, farthest_output, distance = self._distances(model, batch, backward, expected)
        if error is not None:
            raise error
        if self._backend is not None:
            error, *_ = self._distances(model, batch, backward, expected, is_compiled=True)
            if error is not None:
                raise error
        elif backward and not self._divides_sequences and self._may_divide_sequences():
            divided = self._compare_with_divided_sequences(model, batch, expected)
            farthest_output, distance = divided or (farthest_output, distance)
        if model.training and torch.is_grad_enabled():
            gradient_text = f" and {distance:.1g} of the gradients" if backward else " (no memory for a backward)"
            report = "tensor= was verified on one micro-batch against full layers: relative difference "
            report += f"{farthest_output:.1g} of the outputs{gradient_text}"
            if self._divides_sequences:
                report += "; activations between layers are divided along the sequence"
            if self._backend is not None:
                report += "; so was compiled code"
            if self._gathered_at:
                locations = sorted(self._gathered_at)
                report += f"; shards are gathered in {', '.join(locations[:3])}{', ...' if len(locations) > 3 else ''}"
            self.job.news["tensor"] = report, ""

    def _distances(
        self,
        model: nn.Module,
        batch: Any,
        backward: bool,
        expected: tuple[list[torch.Tensor], dict[str, torch.Tensor]],
        is_compiled: bool = False,
    ) -> tuple[UsageError | None, float, float]:
        """Computes a micro-batch with split layers. Returns an error about the first difference from the `expected`
        outputs and gradients, and the relative distances of both.
        """
        when = f"when {'compile compiles' if is_compiled else 'tensor= splits'} {self._name}"
        try:
            self._compares_uncompiled = not is_compiled
            output, gradients = self._compute(model, batch, False, backward)
        except torch.OutOfMemoryError:
            raise
        except UsageError as error:
            return error, 0.0, 0.0
        except RuntimeError as error:
            advice = (
                f'in tensor=, set to "{REPLICATED}" the layers that run inside checkpoint() (the plan word '
                "recompute=blocks recomputes blocks without checkpoint())"
            )
            what = "compile is used with tensor=" if is_compiled else "tensor= splits its layers"
            advice = "leave compile out" if is_compiled else advice
            failure = UsageError(f"{self._name} fails when {what} ({error})", advice)
            failure.__cause__ = error
            return failure, 0.0, 0.0
        finally:
            self._compares_uncompiled = False
        farthest_output, differs = outputs_apart(output, expected[0])
        if differs:
            modules = {**blocks_of(model), "": model} if is_compiled else dict(model.named_modules())
            problem = f"the output of {self._first_difference(model, batch, modules)} changes {when}"
            advice = f'in tensor=, set its layers to "{REPLICATED}", or to "{COLUMN}:3" if a weight fuses three'
            return UsageError(problem, "leave compile out" if is_compiled else advice), 0.0, 0.0
        name, distance = farthest(gradients, expected[1], expected[0])
        if name:
            advice = "leave compile out" if is_compiled else f'set its layer to "{REPLICATED}" in tensor='
            return UsageError(f"the gradient of {name} changes {when}", advice), 0.0, 0.0
        return None, farthest_output, distance

    def _may_divide_sequences(self) -> bool:
        """Whether activations are large enough to be divided, and are not divided or handed on in another way."""
        return self._largest_output >= LARGE and self.job.unit == self.unit.size

    def _compare_with_divided_sequences(
        self, model: nn.Module, batch: Any, expected: tuple[list[torch.Tensor], dict[str, torch.Tensor]]
    ) -> tuple[float, float] | None:
        """Divides the sequences between row and column layers, if outputs and gradients stay the same. Returns their
        distances then, else None.
        """
        mode = model.training, self.job.assembled
        regions, self._divides_sequences = self._regions.pop(mode, None), True
        error, *distances = self._distances(model, batch, True, expected)
        if not any(self.unit.gather_json(error is not None)):
            return distances[0], distances[1]
        self._divides_sequences = False
        self._regions.pop(mode, None)
        if regions is not None:
            self._regions[mode] = regions
        return None

    def _has_room_for_full(self) -> bool:
        """Whether the full weights and their gradients fit into the memory of each worker of the unit."""
        return all(self.unit.gather_json(2 * self._full_bytes <= room(self.job.device)))

    def _compute(
        self, model: nn.Module, batch: Any, uncut: bool, backward: bool
    ) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
        """Returns the outputs of the model and, with `backward`, the gradients of a scalar made of them."""
        with self._without_a_trace(model, uncut), nullcontext() if backward else torch.no_grad():
            outputs = self._outputs(model, batch)
            if not backward:
                return outputs, {}
            return [x.detach() for x in outputs], gradients_of(outputs, self.job.used_params)

    def _outputs(self, model: nn.Module, batch: Any) -> list[torch.Tensor]:
        call = partial(self._original_forward, model, batch)
        if not self._is_gathered:
            return tensors_of(self._divided_outputs.full(self._run_in_modes(model.training, call)))
        with self._gather_mode:
            return tensors_of(call())

    def _first_difference(self, model: nn.Module, batch: Any, modules: Mapping[str, nn.Module]) -> str:
        """Returns the name of the first of these modules whose output differs between the split and the full model."""
        expected: dict[str, list[torch.Tensor]] = {}
        names = {id(module): name for name, module in modules.items()}

        def keep(module: nn.Module, _: Any, output: Any) -> None:
            expected.setdefault(names[id(module)], tensors_of(output))

        def compare(module: nn.Module, _: Any, output: Any) -> None:
            name, outputs = names[id(module)], tensors_of(output)
            pairs = [(a, b) for a, b in zip(outputs, expected.get(name, ()), strict=False) if not placement_of(a)]
            if any(apart(a, b) > allowed(b) for a, b in pairs):
                different.append(name)

        different: list[str] = []
        for uncut, hook in ((True, keep), (False, compare)):
            handles = [module.register_forward_hook(hook) for module in modules.values()]
            with self._without_a_trace(model, uncut), torch.no_grad():
                self._outputs(model, batch)
            for handle in handles:
                handle.remove()
        return (different or [""])[0] or "the model"

    @contextmanager
    def _without_a_trace(self, model: nn.Module, uncut: bool = True) -> Iterator[None]:
        """Restores buffers and random states after the forwards in it. With `uncut`, layers use gathered weights."""
        self._is_gathered = uncut
        try:
            with without_a_trace(model, self._rng):
                yield
        finally:
            self._is_gathered = False


def _nothing(module: nn.Module, args: Any) -> None:
    """Does nothing (a forward hook)."""
