"""Sequence parallelism (context=): sequences divided among workers, with Ulysses attention.

Each worker computes on a sequence shard: a contiguous range of the tokens. Attention needs the full sequence, so an
all-to-all turns sequence shards of all heads into full sequences of some heads, and back (Jacobs et al., "DeepSpeed
Ulysses: System Optimizations for Enabling Training of Extreme Long Sequence Transformer Models", 2023). If the workers
cannot divide the heads, they divide the queries (`token_attention.py`).

A `ShardedTensorMode` runs all other code: it narrows full tensors (positions, masks, labels) that are combined with a
sequence shard, and gathers the full sequence for functions that have no rule. The loss runs the same way: its sums over
rows and tokens are summed over the workers.

A weight that is used with a sequence shard gets a partial gradient. Where all workers compute the same value with a
weight, only the first worker keeps the gradient. The sum over the workers, in the gradient reduction, is the gradient.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import nn

from paceline.comm.communicator import Group
from paceline.comm.torch_private import pytree
from paceline.compute.batchnorm import without_a_trace
from paceline.compute.blocks import blocks_of
from paceline.compute.call_arguments import cross_entropy_arguments
from paceline.compute.forward_backward import Loss
from paceline.compute.job import TrainingJob
from paceline.compute.microbatch_merging import USERS_OWN
from paceline.compute.microbatches import Chunk, MicroBatch, tensors_of
from paceline.compute.rng import RngState
from paceline.compute.tiled_logits import loss_weights, without_values
from paceline.compute.verify import (
    allowed,
    differentiate,
    farthest,
    gradients_of,
    loss_apart,
    outputs_apart,
    room,
    weighing,
)
from paceline.errors import PacelineError, UsageError
from paceline.parallel.tensor_parallel.attention_functions import OF_SEQUENCES
from paceline.parallel.tensor_parallel.op_rules import OP_RULES, SUM_RULES, rule_of
from paceline.parallel.tensor_parallel.redistribute import Redistributor, ShardPlacement, applied
from paceline.parallel.tensor_parallel.sharded_mode import (
    MADE,
    STRETCH,
    UNKNOWN,
    Rule,
    ShardedTensorMode,
    Tensor,
    full_shape_of,
    is_in_place,
    placement_of,
    set_placement,
    tensors_in,
)
from paceline.parallel.token_attention import attend_by_tokens

_ORIGIN = "_paceline_origin"
_ATTENTION = "scaled_dot_product_attention"


class _Once(torch.autograd.Function):
    """Passes on a weight that all workers use identically. Only the first worker keeps its gradient."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, counts: bool) -> Tensor:
        """Returns a view of the weight; `counts` says whether this worker keeps the gradient."""
        ctx.counts = counts
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        """Returns the gradient on the first worker, zeros on the others."""
        return grad if ctx.counts else torch.zeros_like(grad), None


class _FromFirst(torch.autograd.Function):
    """Gathers the full outputs of a model whose sequences are sharded. All workers use the first worker's gradients."""

    @staticmethod
    def forward(
        ctx: Any, redistributor: Redistributor, parts: Sequence[ShardPlacement | None], *outputs: Tensor
    ) -> tuple[Tensor, ...]:
        """Returns each output in full; `parts` are the placements of the outputs, None for those that are full."""
        ctx.redistributor, ctx.parts = redistributor, parts
        ctx.like = [(full_shape_of(x), x.dtype, x.device) for x in outputs]
        ctx.set_materialize_grads(False)
        pairs = zip(outputs, parts, strict=True)
        return tuple(x.clone() if part is None else redistributor.gather_shards(x, part) for x, part in pairs)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        """Broadcasts the first worker's gradients and returns the local shard of each."""
        redistributor, input_grads = cast(Redistributor, ctx.redistributor), list[Tensor | None]()
        flags = torch.tensor([grad is not None for grad in grads], dtype=torch.uint8)
        has_grads = redistributor.unit.broadcast(flags).tolist()
        for has_grad, grad, part, (shape, dtype, device) in zip(has_grads, grads, ctx.parts, ctx.like, strict=True):
            if not has_grad:
                input_grads.append(None)
                continue
            if redistributor.unit.rank == 0 and grad is not None:
                full_grad = grad.contiguous()
            else:
                full_grad = torch.empty(shape, dtype=dtype, device=device)
            redistributor.unit.broadcast(full_grad)
            local_grad = full_grad if part is None else redistributor.narrow(full_grad, part)
            input_grads.append(local_grad if part is None or redistributor.is_first_holder(part) else local_grad * 0.0)
        return None, None, *input_grads


class _LossOfFirst(torch.autograd.Function):
    """Ties a loss that all workers compute from the same full outputs to these outputs.

    The first worker's loss counts in the backward. All workers run the backward of all outputs, used by the loss or
    not, because it is collective.
    """

    @staticmethod
    def forward(ctx: Any, total: Tensor, *outputs: Tensor) -> Tensor:
        """Returns a copy of the loss `total`."""
        ctx.count = len(outputs)
        return total.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Returns the gradient of the loss, and none of the outputs."""
        return grad, *[None] * ctx.count


_FROM_FIRST: Any = _FromFirst.apply
_LOSS_OF_FIRST: Any = _LossOfFirst.apply


class _ShardRedistributor(Redistributor):
    """Moves sequence shards. Partial gradients of weights are summed later, with all other gradients."""

    def share(self, tensor: Tensor) -> Tensor:
        """Returns a tensor that all workers have for use with shards; a weight's gradient is not summed here."""
        return tensor if isinstance(tensor, nn.Parameter) else super().share(tensor)


class _SequenceShardMode(ShardedTensorMode):
    """Runs a model and its loss on sequence shards."""

    def alike(self, function: Any, given: Any, named: Any) -> Any:
        """Runs a function whose tensors are full and the same on all workers."""
        origin = given[0].__dict__.get(_ORIGIN) if given and isinstance(given[0], Tensor) else None
        if origin is not None and is_in_place(function.__name__):
            made = function(*given, **named)
            x, view, *how = origin
            self._write_full(lambda full, value: view(full, *how[0], **how[1]).copy_(value), "copy", (x, given[0]), {})
            return made
        asks = function.__name__ == "__get__" and function.__self__.__name__ not in MADE
        if asks or not torch.is_grad_enabled():
            return function(*given, **named)
        given, named = self._with_weights_once(given, named)
        return function(*given, **named)

    def gather_arguments(self, name: str, args: Any, kwargs: Any) -> Any:
        """Returns the arguments of a function with full tensors, and with weights whose gradients count once."""
        return self._with_weights_once(*super().gather_arguments(name, args, kwargs))

    def _with_weights_once(self, given: Any, named: Any) -> Any:
        if not torch.is_grad_enabled():
            return given, named
        if any(isinstance(t, nn.Parameter) and t.requires_grad for t in tensors_in((*given, *named.values()))):
            return pytree.tree_map_only(nn.Parameter, self.once, (given, named))
        return given, named

    def _with_wholes(self, function: Any, name: str, given: Any, named: Any) -> Any:
        if is_in_place(name) and placement_of(given[0]):
            return self._write_full(function, name, given, named)
        made = super()._with_wholes(function, name, given, named)
        if isinstance(made, Tensor) and made._is_view() and placement_of(given[0]):
            made = made.clone()  # a write into this view is repeated on the tensor that it is a view of (`alike`)
            made.__dict__[_ORIGIN] = given[0], function, given[1:], named
        return made

    def _write_full(self, function: Any, name: str, given: Any, named: Any) -> Any:
        """Runs a write on the full tensor and copies the result into the local shard."""
        part = placement_of(given[0])
        assert part is not None
        self.note(name, [part])
        full = self.gather_full(given[0]).clone()
        others, options = pytree.tree_map_only(Tensor, self.gather_full, (given[1:], named))
        made = self.alike(function, (full, *others), options)
        given[0].copy_(self.redistributor.take(full, part))
        return made if made is None else given[0]

    def once(self, weight: nn.Parameter) -> Any:
        """Returns a weight whose gradient only the first worker keeps."""
        return applied(_Once, weight, self.redistributor.unit.rank == 0) if weight.requires_grad else weight


@dataclass
class _Result:
    """Outputs, loss and gradients of one micro-batch."""

    outputs: list[Tensor]
    loss: Loss | None
    gradients: dict[str, Tensor]


class SequenceParallel:
    """Shards the sequences that the blocks of a job's model take over the workers of a `unit`.

    A sequence whose length the number of workers does not divide is computed in full by all. Construction has two
    steps: the constructor, and `narrow`. Other features may wrap the blocks' forwards between them.
    """

    def __init__(self, job: TrainingJob, unit: Group, staged: bool) -> None:
        self.job, self.unit, self._model = job, unit, type(job.model).__name__
        self._comparison, self._has_compared, self._in_stages = "", False, staged
        self.words = f"context={unit.size}"
        self._is_compiled, self._is_comparing = False, False  # whether blocks are compiled; that is being verified
        self._uncompiled_traffic = 0  # bytes that an uncompiled micro-batch sends
        # Whether the loss gets full outputs; the comparison may decide.
        self._gathers_outputs = job.over is None and job.trains
        self._moves = _ShardRedistributor(unit)
        rules, name = OP_RULES | SUM_RULES | _RULES | OF_SEQUENCES, lambda: self._model
        self.mode = _SequenceShardMode(self._moves, rules, name, self._note_gathered, STRETCH)
        self._gathered_functions, self._indivisible = set[str](), set[int]()
        self._has_divided = False  # whether a block was given a sequence shard
        self._unfit_input = ""  # describes the last input of a block that cannot be sharded
        self._knows_traffic = False  # whether the bytes that a micro-batch sends are known
        blocks = blocks_of(job.model)
        if not blocks:
            what = f"{self._model} has no list of repeated blocks, whose input sequences context= could divide"
            raise UsageError(what, "leave context= out")
        self._blocks = list(blocks.values())
        for block in self._blocks:
            block.forward = partial(self._run_block, block.forward)
        self._plain_forward, job.forward = job.forward, self._forward
        self._plain_loss, job.loss = job.loss, self._loss
        self._gather_others, job.gather_output = job.gather_output, self._gather_output
        job.once, job.add_up = self.mode.once, self._add_up

    def __deepcopy__(self, memo: Any) -> SequenceParallel:
        return self  # a copy of the model, such as an average, is computed on full sequences

    @property
    def decision(self) -> tuple[str, str]:
        """What is done with the model, and why, for the explanation of the plan."""
        what = f"sequences are divided among {self.unit.size} workers, and each of them holds the full weights"
        return what, "context= was given"

    def is_eager(self) -> bool:
        """Whether the model computes without compiled code: in the comparison with full sequences."""
        return self._is_comparing

    def prepare_compiled(self) -> None:
        """Prepares for blocks whose forwards are compiled."""
        self._is_compiled = True

    def _note_gathered(self, name: str, parts: Any, *_: Any) -> None:
        if parts:
            self._gathered_functions.add(name.strip("_"))

    def _forward(self, model: nn.Module, batch: Any) -> Any:
        if model is not self.job.model:
            return self._plain_forward(model, batch)
        if not self._has_compared and model.training and torch.is_grad_enabled() and self.job.trains:
            # A model in pipeline stages can be compared only while it is assembled.
            self._has_compared = not self._in_stages or self.job.assembled
            if self._has_compared:
                self._compare(model, batch)
        self.unit.declare("the sequence shards", check=False, kind="context")
        self._sent = self._moves.bytes_sent
        with self.mode:
            output = self._plain_forward(model, batch)
        self._moves.forget_shared()
        if not self._has_divided and not self._indivisible:
            what = f"no block of {self._model} takes a sequence (rows, tokens, width) that context= can divide"
            size, units = self.unit.size, self.job.units.size if self.job.units else 1
            raise UsageError(what + self._unfit_input, f"use data={units * size} instead of context={size}")
        return output

    def _loss(self, output: Any, batch: Any) -> Any:
        loss = self._loss_of_full_outputs if self._gathers_outputs else self._loss_of_shards
        result = loss(output, batch)
        if not self._knows_traffic and torch.is_grad_enabled() and not self.job.assembled:
            traffic = self._uncompiled_traffic or self._moves.bytes_sent - self._sent
            self._knows_traffic, self.job.inside["context"] = True, traffic
            functions, gathered, indivisible = sorted(self._gathered_functions), "", ""
            if functions:
                more = ", ..." if len(functions) > 3 else ""
                gathered = f"; each computes {', '.join(functions[:3])}{more} on the full sequence"
            if self._indivisible:
                lengths = ", ".join(map(str, sorted(self._indivisible)[:3]))
                indivisible = (
                    f"; each computes sequences of length {lengths} in full, which {self.unit.size} does not divide"
                )
            if details := gathered + indivisible + self._comparison:
                self.job.news["context"] = f"sequences are divided among {self.unit.size} workers{details}", ""
        return result

    def _loss_of_shards(self, output: Any, batch: Any) -> Any:
        """Computes the loss from sharded outputs: its sums over tokens are summed over the workers."""
        with self.mode:
            result = self._plain_loss(output, batch)
        result = self._gather_full(result)
        self._moves.forget_shared()
        return result

    def _loss_of_full_outputs(self, output: Any, batch: Any) -> Any:
        """Computes the loss as plain code does, from gathered outputs. All workers compute the same loss."""
        self.unit.declare("full outputs for the loss", check=False, kind="context")
        with_grad = torch.is_grad_enabled()
        leaves, spec = pytree.tree_flatten(output)
        indices = [n for n, x in enumerate(leaves) if isinstance(x, Tensor) and x.requires_grad and with_grad]
        with self.mode.using_own_attribute():
            parts = [placement_of(leaves[n]) for n in indices]
            local_outputs = [leaves[n] for n in indices]
            full_outputs: tuple[Tensor, ...] = _FROM_FIRST(self._moves, parts, *local_outputs) if local_outputs else ()
            leaves = [self.mode.gather_full(x) if isinstance(x, Tensor) and not x.requires_grad else x for x in leaves]
        for n, x, full in zip(indices, local_outputs, full_outputs, strict=True):
            leaves[n] = full.view_as(full)  # hooks on it are not called where the first worker's gradient is used
            self._moves.bytes_sent += x.nbytes + full.nbytes
        result = self._plain_loss(pytree.tree_unflatten(leaves, spec), batch)
        if not full_outputs:
            return result
        total, *rest = result if isinstance(result, tuple) else (result,)
        if isinstance(total, Tensor):
            counted = total if self.unit.rank == 0 else total.detach()
            total = _LOSS_OF_FIRST(counted, *full_outputs)
        return (total, *rest) if isinstance(result, tuple) else total

    # -- comparison with full sequences -------------------------------------------------------------------------------

    def _compare(self, model: nn.Module, batch: Any) -> None:
        """Computes the first micro-batch with sharded and with full sequences and compares outputs, loss and gradients.

        Chooses the loss of sharded outputs if its results agree, else the loss of full outputs. Raises UsageError on
        all workers of the unit if neither agrees.
        """
        self.unit.declare("full sequences, for the comparison", check=False, kind="comparison")
        sizes, unit, when = list[int](), self.unit, f"when context= divides the sequences of {self._model}"
        shard_loss = self._loss_of_shards if self.job.over is None else None
        self._is_comparing, sent_before = True, self._moves.bytes_sent
        with weighing(model, sizes):
            sharded = self._try(model, batch, self.mode, shard_loss)
        self._uncompiled_traffic = self._moves.bytes_sent - sent_before if self._is_compiled else 0
        # Memory for full sequences, even if all workers of the unit are on this host.
        reference_fits = all(unit.gather_json(3 * unit.size**2 * sum(sizes) <= room(self.job.device)))
        if reference_fits:
            reference = self._compute(model, batch, nullcontext(), self._plain_loss if shard_loss else None)
        else:
            reference = self._compute(model, batch, self.mode, self._loss_of_full_outputs if shard_loss else None)
            self._add_up(reference.gradients, self.job.named)
        self._gathers_outputs, why = False, self._describe_difference(sharded, reference)
        retry = why and shard_loss
        if retry and not (isinstance(sharded, _Result) and outputs_apart(sharded.outputs, reference.outputs)[1]):
            # Hooks, autograd functions and recomputation in the backward use shards where no mode can see it.
            self._gathers_outputs, sharded = True, self._try(model, batch, self.mode, self._loss_of_full_outputs)
            why = self._describe_difference(sharded, reference)
        self._is_comparing = False
        if why:
            raise UsageError(f"{why} {when}", "leave context= out")
        if self._is_compiled:
            loss = shard_loss and (self._loss_of_full_outputs if self._gathers_outputs else shard_loss)
            why = self._describe_difference(self._try(model, batch, self.mode, loss), reference)
            if why:
                raise UsageError(f"{why} when compile compiles the blocks of {self._model}", "leave compile out")
        assert isinstance(sharded, _Result)
        if not reference_fits:
            self._comparison = "; not verified, because full sequences do not fit in memory"
        else:
            distances = self._describe_distances(sharded, reference)
            self._comparison = f"; verified on one micro-batch against full sequences: {distances}"
            self._comparison += "; so was compiled code" if self._is_compiled else ""
        if self._gathers_outputs:
            self._comparison = (
                f"; each computes the loss from full outputs, because it is not a sum over tokens{self._comparison}"
            )

    def _try(self, model: nn.Module, batch: Any, mode: Any, loss: Any) -> _Result | Exception:
        """Computes a micro-batch under a mode. Returns the result with summed gradients, or the user code's error."""
        try:
            result = self._compute(model, batch, mode, loss)
        except USERS_OWN as error:
            if isinstance(error, torch.OutOfMemoryError | PacelineError):
                raise
            self._moves.forget_shared()
            return error
        self._add_up(result.gradients, self.job.named)
        return result

    def _add_up(self, gradients: dict[str, Tensor], named: Mapping[str, nn.Parameter]) -> None:
        """Sums `gradients` over the workers in place. A worker may have none for a parameter. Collective."""
        self.unit.declare("the gradients of sequence shards, for the comparison", check=False, kind="comparison")
        has = [set(names) for names in self.unit.gather_json([*gradients])]
        for name, param in named.items():
            if any(name in names for names in has):
                grad = gradients.get(name)
                if grad is None:
                    grad = torch.zeros(param.shape, dtype=param.dtype, device=param.device)
                gradients[name] = self.unit.sum(grad.contiguous().clone())

    def _compute(self, model: nn.Module, batch: Any, mode: Any, loss_function: Any) -> _Result:
        """Computes outputs, loss and gradients under a mode. Without a loss function, the gradients are those of
        numbers derived from the outputs.
        """
        with without_a_trace(model, RngState(self.job.device)):
            with mode:
                output = self._plain_forward(model, batch)
            outputs = tensors_of(self._gather_output(without_values(output)))
            named = self.job.used_params
            if loss_function is None:
                return _Result([x.detach() for x in outputs], None, gradients_of(outputs, named))
            loss = Loss.of(loss_function(output, batch), Chunk([MicroBatch(0, 1, None)], None), trainable=False)
            params = {name: param for name, param in named.items() if param.requires_grad}
            loss_params = [*params.values()] if loss.total.requires_grad else []
            grads = differentiate([loss.total], loss_params) if loss_params else ()
            gradients = {name: grad for name, grad in zip(params, grads, strict=False) if grad is not None}
            return _Result([x.detach() for x in outputs], loss.detached(), gradients)

    def _describe_difference(self, sharded: _Result | Exception, reference: _Result) -> str:
        """Describes the first difference to the computation with full sequences, or returns an empty text.

        Collective: all workers return the same text.
        """
        if isinstance(sharded, Exception):
            return f"the loss fails ({type(sharded).__name__}: {sharded})"
        if outputs_apart(sharded.outputs, reference.outputs)[1]:
            why = "the outputs differ"
        elif (apart := self._loss_apart(sharded, reference))[0]:
            why = f"the loss of a micro-batch is {apart[0]} instead of {apart[1]}"
        elif unlike := next((n for n in self.job.named if (n in sharded.gradients) != (n in reference.gradients)), ""):
            why = f"{unlike} has {'a' if unlike in sharded.gradients else 'no'} gradient, unlike with full sequences,"
        else:
            name, _ = farthest(sharded.gradients, reference.gradients, reference.outputs)
            why = f"the gradient of {name} differs" if name else ""
        return next((text for text in self.unit.gather_json(why) if text), "")

    def _loss_apart(self, sharded: _Result, reference: _Result) -> tuple[str, str, float]:
        if sharded.loss is None or reference.loss is None:
            return "", "", 0.0
        rounding = max(map(allowed, [reference.loss.total, *reference.outputs]))
        return loss_apart(sharded.loss, reference.loss, rounding, 1.0)  # a loss may be near 0 as a sum of larger terms

    def _describe_distances(self, sharded: _Result, reference: _Result) -> str:
        most, _ = outputs_apart(sharded.outputs, reference.outputs)
        _, distance = farthest(sharded.gradients, reference.gradients, reference.outputs)
        return f"relative difference {most:.1g} of the outputs and {distance:.1g} of the gradients"

    def _gather_output(self, output: Any) -> Any:
        return self._gather_others(self._gather_full(output))

    def _gather_full(self, values: Any) -> Any:
        with self.mode.using_own_attribute():
            return pytree.tree_map_only(Tensor, self.mode.gather_full, values)

    def narrow(self) -> None:
        """Makes the blocks of the model take sequence shards."""
        for block in self._blocks:
            block.forward = partial(self._call_narrowed, block.forward)

    def _call_narrowed(self, forward: Any, *given: Any, **named: Any) -> Any:
        """Calls a block with the local shard of its first floating-point tensor (rows, tokens, width)."""
        if self.mode.on:
            with self.mode.using_own_attribute():
                given, named = self._narrow_inputs(given, named)
        return forward(*given, **named)

    def _narrow_inputs(self, given: Any, named: Any) -> Any:
        leaves, spec = pytree.tree_flatten((given, named))
        index = next(
            (n for n, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.is_floating_point()), None
        )
        if index is None or leaves[index].dim() != 3 or placement_of(leaves[index]):
            if index is not None and placement_of(leaves[index]):
                self._has_divided = True
            elif index is not None:
                self._unfit_input = f": one block takes a tensor of shape {tuple(leaves[index].shape)}"
            return given, named
        full = leaves[index]
        length = Tensor.size(full, 1)
        if length % self.unit.size:
            self._indivisible.add(length)
            return given, named
        self._has_divided, part = True, ShardPlacement(1, (length,), self.unit.size)
        leaves[index] = set_placement(self._moves.take(full, part), part)
        return pytree.tree_unflatten(leaves, spec)

    def _run_block(self, forward: Any, *given: Any, **named: Any) -> Any:
        if torch.compiler.is_dynamo_compiling() or self.mode.on:
            return forward(*given, **named)
        with self.mode.using_own_attribute():
            follows = any(map(placement_of, tensors_of((given, named))))  # a recomputation in the backward
        with self.mode if follows else nullcontext():
            return forward(*given, **named)


# ---- rules for functions of sequence shards, in addition to those for other shards

_RULES: dict[str, Rule] = {}


_rule = partial(rule_of, _RULES)


@_rule(_ATTENTION)
def _attend(on: ShardedTensorMode, function: Any, given: Any, named: Any) -> Any:
    """Computes attention on full sequences of some of the heads, exchanged for sequence shards of all heads; if the
    heads cannot be divided, on some of the queries and all keys.
    """
    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
    asked: dict[str, Any] = {**dict(zip(names, given, strict=False)), **named}
    query, size = asked["query"], on.redistributor.size
    part = placement_of(query)
    if part is None or part.dim != query.dim() - 2 or len(part.sections) > 1:
        return OP_RULES[_ATTENTION](on, function, given, named)
    if query.dim() < 3:
        return attend_by_tokens(on, function, asked)
    if Tensor.size(query, -3) % size:
        return attend_by_tokens(on, function, asked)
    for name in names[:3]:
        asked[name] = _by_heads(on, asked[name])
    if isinstance(asked.get("attn_mask"), Tensor):
        asked["attn_mask"] = on.gather_full(asked["attn_mask"])
    made = OP_RULES[_ATTENTION](on, function, (), asked)
    if made is UNKNOWN:
        wholes = pytree.tree_map_only(Tensor, on.gather_full, asked)
        return on.alike(function, (), wholes)
    heads, back = placement_of(made), ShardPlacement(made.dim() - 2, part.sections, size)
    return made if heads is None else set_placement(on.redistributor.exchange(made, heads, back), back)


def _by_heads(on: ShardedTensorMode, x: Tensor) -> Tensor:
    part, heads = placement_of(x), Tensor.size(x, -3)
    if part is None:
        return x
    if part.dim != x.dim() - 2 or len(part.sections) > 1 or heads % on.redistributor.size:
        return on.gather_full(x)
    by_heads = ShardPlacement(x.dim() - 3, (heads,), on.redistributor.size)
    return set_placement(on.redistributor.exchange(x, part, by_heads), by_heads)


@_rule("cross_entropy", "nll_loss")
def _cross_entropy(on: ShardedTensorMode, function: Any, given: Any, named: Any) -> Any:
    """Sums the cross entropy of sharded positions over the workers. The class dimension must be full."""
    arguments = cross_entropy_arguments(given, named)
    x, target, reduction = arguments["input"], arguments["target"], arguments["reduction"] or "mean"
    part, dim = placement_of(x), 1 if x.dim() > 1 else 0
    weight, old = arguments["weight"], arguments["size_average"] is not None or arguments["reduce"] is not None
    if part is None or part.dim == dim or old or target.is_floating_point():
        return UNKNOWN
    target_dim = part.dim - (part.dim > dim)
    if full_shape_of(target)[target_dim] != part.length:
        return UNKNOWN
    target_part = placement_of(target)
    if target_part is None:
        target = on.redistributor.narrow(target, ShardPlacement(target_dim, part.sections, part.count))
    elif (target_part.dim, target_part.sections, target_part.count) != (target_dim, part.sections, part.count):
        return UNKNOWN
    ignored = -100 if arguments["ignore_index"] is None else arguments["ignore_index"]
    smoothing = {} if arguments["label_smoothing"] is None else {"label_smoothing": arguments["label_smoothing"]}
    options = {"weight": weight, "ignore_index": ignored, **smoothing}
    if reduction == "none":
        made = function(x, target, reduction="none", **options)
        return set_placement(made, ShardPlacement(target_dim, part.sections, part.count))
    total = on.redistributor.sum(function(x, target, reduction="sum", **options))
    if reduction == "sum":
        return total
    return total / on.redistributor.sum(loss_weights(target, ignored, weight, total.dtype))


@_rule("tiled_linear")
def _tiled_linear(on: ShardedTensorMode, function: Any, given: Any, named: Any) -> Any:
    """Makes tiled logits (`compute/tiled_logits.py`) of a sequence shard."""
    hidden, weight, bias, tiles = given
    part = placement_of(hidden)
    if part is None or part.dim == hidden.dim() - 1:
        return UNKNOWN
    made = function(hidden, on.shared(weight), bias if bias is None else on.shared(bias), tiles)
    return set_placement(made, part)
