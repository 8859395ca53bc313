"""Expert parallelism (expert=): each worker has some of the experts of every layer, and tokens go to their experts.

Workers divide the rows of a batch. In a layer of experts, each pair of a token and one of its experts is sent to the
worker that has the expert, which computes it with the module's own forward and sends the result back (an all-to-all, as
in Lepikhin et al., "GShard", 2021). The backward sends gradients the same way, so an expert's gradient already is the
sum over the micro-batches of all workers that exchange tokens. They run equally many forwards and backwards: a worker
without a micro-batch runs a dummy one, and its experts compute for the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from paceline.base.sharding import RowShards, ShardingSpec
from paceline.comm.communicator import Group
from paceline.compute.batchnorm import without_a_trace
from paceline.compute.expert_modules import inputs_of, is_experts
from paceline.compute.job import Judge
from paceline.compute.rng import RngState
from paceline.compute.verify import farthest, gradients_of, outputs_apart, room
from paceline.errors import UsageError
from paceline.parallel.parallel_job import ParallelJob
from paceline.parallel.pipeline.stage_forward import placed, replace_forward
from paceline.parallel.tensor_parallel.experts import compute_pairs, run_experts
from paceline.parallel.tensor_parallel.redistribute import Redistributor, ShardPlacement, applied
from paceline.parallel.tensor_parallel.sharded_mode import AS_IT_IS, MADE, placement_of, shrink, tensors_in


class _Send(torch.autograd.Function):
    """Sends `given[i]` rows to worker i and returns the `taken[i]` rows from each; the backward does the reverse."""

    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, exchange: ExpertParallel, name: str, given: list[int], taken: list[int]
    ) -> torch.Tensor:
        """Returns the rows that this worker gets."""
        ctx.exchange, ctx.layer, ctx.given, ctx.taken = exchange, name, given, taken
        return exchange.send(rows, name, given, taken)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None, None]:
        """Returns the gradients of the rows that this worker sent."""
        return applied(_Send, grad, ctx.exchange, ctx.layer, ctx.taken, ctx.given), None, None, None, None


class _UseOutside(TorchFunctionMode):
    """Raises UsageError if code outside of the layers of experts uses their weights.

    These have a placement among `holders`. Identities would not do: zero=2 and zero=3 replace these tensors by others.
    """

    def __init__(self, model: nn.Module, holders: Group) -> None:
        super().__init__()
        self._model, self._holders, self.is_off = model, holders, False  # it is off inside of these layers

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = function.__name__
        asks = name in AS_IT_IS or (name == "__get__" and function.__self__.__name__ not in MADE)
        for tensor in () if asks or self.is_off else tensors_in((*args, *kwargs.values())):
            if (placement := placement_of(tensor)) is not None and placement.group is self._holders:
                named = self._model.named_parameters()
                param_name = next((key for key, param in named if param is tensor), "a weight of experts")
                problem = f"the forward or loss uses {param_name} outside of its layer of experts, "
                problem += "but expert= leaves each worker only some of the experts"
                raise UsageError(problem, "for a penalty, use weight_decay= of the optimizer; or leave expert= out")
        return function(*args, **kwargs)


@dataclass
class _ExpertLayer:
    """A layer of `count` experts. This worker holds those in `held`; it has `sent` bytes in so many `calls`."""

    name: str
    module: nn.Module
    count: int
    held: range
    is_verified: bool = False
    sent: int = 0
    calls: int = 0


class ExpertParallel:
    """Divides the experts of each layer among the workers of a `group`, which has no other use.

    Where `tensor` workers compute each micro-batch together, the experts are divided among the `holders`, which are all
    workers along both axes. A tensor worker exchanges the tokens of its share of the experts with workers that have the
    same place along `tensor`.

    Construction has three steps: the constructor, before the layers around the experts are split; `cut`, before the
    model is divided into stages; and `divide`.

    Raises UsageError if the model has no layer of experts; and, in the first step, if a divided layer computes another
    result than the complete one.
    """

    def __init__(self, job: ParallelJob, group: Group, holders: Group, tensor: int = 1) -> None:
        self.job, self.group, self.holders, self._model = job, group, holders, type(job.model).__name__
        self.tensor = tensor
        self._within_unit: Redistributor | None = None  # what sums over the workers along `tensor`
        self._rng, self._distances, self._has_watched = RngState(job.device), (0.0, 0.0), False
        shards = RowShards(holders.size)
        self.layers = [
            _ExpertLayer(name, module, count := cast(int, module.num_experts), shards.rows(count, holders.rank))
            for name, module in job.model.named_modules()
            if is_experts(module)
        ]
        if not self.layers:
            what = f"{self._model} has no layer of experts that expert= can divide: no module has stacked weights of "
            what += "num_experts experts and a forward of tokens, indices and weights, as those of transformers have"
            raise UsageError(what, "leave expert= out")
        self._use_outside = _UseOutside(job.model, holders)
        ids = {id(param) for layer in self.layers for param in layer.module.parameters(recurse=False)}
        named = job.model.named_parameters(remove_duplicate=False)
        names = {name: param for name, param in named if id(param) in ids}
        job.divided = frozenset(names)
        job.cuts |= {name: ShardingSpec.unsharded(param.shape) for name, param in names.items()}
        if job.stages is None:  # else the comparison with the full model finds such uses
            self._plain_forward, job.forward = job.forward, self._forward
            job.loss = Judge(job.loss, self._watched)

    def cut(self, within_unit: Redistributor | None) -> None:
        """Shrinks the parameters of experts to those of this worker, and replaces the forwards of their layers.

        `within_unit` sums over the workers along `tensor`, if there are several.
        """
        job, holders, self._within_unit = self.job, self.holders, within_unit
        for layer in self.layers:
            placement = ShardPlacement(0, (layer.count,), holders.size, holders)
            for param in layer.module.parameters(recurse=False):
                if placement_of(param) is None:  # else it is tied to one of an earlier layer
                    shrink(param, (len(layer.held), *param.shape[1:]), placement)
            whose = f"{self._model}, whose experts expert= divides"
            replace_forward(layer.module, partial(self._run, layer), job.stages is not None, whose)
        if within_unit is None:
            job.redistributors.append(Redistributor(self.group))

    def __deepcopy__(self, memo: Any) -> ExpertParallel:
        problem = f"{self._model} cannot be copied, because expert= leaves each worker only some of the experts"
        raise UsageError(problem, "write the full model with export(), or leave expert= out to keep copies (averages)")

    @property
    def decision(self) -> tuple[str, str]:
        """What is done with the model, and why, for the explanation of the plan."""
        layers = "1 layer" if len(self.layers) == 1 else f"{len(self.layers)} layers"
        counts = " or ".join(str(count) for count in sorted({layer.count for layer in self.layers}))
        what = f"the {counts} experts of {layers} are divided among {self.holders.size} workers, which exchange tokens"
        return what, "expert= was given"

    def divide(self, unit: int) -> None:
        """Notes in `job.cuts`, which says what each worker of a `unit` holds, who has which experts."""
        count, cuts, shards = self.group.size, self.job.cuts, RowShards(self.holders.size)
        for name, spec in cuts.items():
            cuts[name] = spec = replace(spec, pieces=spec.pieces * (unit // len(spec.pieces)) * count)
            if name in self.job.divided:
                pieces = enumerate(spec.pieces)  # by worker: along the axes expert, pipeline, tensor
                owners = ((piece, rank // unit * self.tensor + rank % self.tensor) for rank, piece in pieces)
                cuts[name] = replace(
                    spec, pieces=tuple(piece.rows(shards.rows(piece.shape[0], owner)) for piece, owner in owners)
                )

    # -- forward ------------------------------------------------------------------------------------------------------

    @contextmanager
    def _watched(self) -> Iterator[None]:
        """Watches for uses of experts' weights outside of their layers, in the first forward and loss."""
        if self._has_watched or not torch.is_grad_enabled():
            yield
            return
        with self._use_outside:
            yield

    def _forward(self, model: nn.Module, batch: Any) -> Any:
        if model is not self.job.model or not model.training:
            return self._plain_forward(model, batch)
        self._has_watched = all(layer.is_verified for layer in self.layers)
        with self._watched():
            return self._plain_forward(model, batch)

    def _run(self, layer: _ExpertLayer, /, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Runs a layer of experts, with tokens of all workers."""
        if self._within_unit is None:
            return self._run_unseen(layer, inputs_of(layer.module, args, kwargs))
        full = tuple(
            x if (placement := placement_of(x)) is None else self._within_unit.join(x, placement)
            for x in inputs_of(layer.module, args, kwargs)
        )
        with torch._C.DisableTorchFunction():  # modes that follow shards
            return self._run_unseen(layer, full)

    def _run_unseen(self, layer: _ExpertLayer, inputs: tuple[torch.Tensor, ...]) -> torch.Tensor:
        module, was_off, self._use_outside.is_off = layer.module, self._use_outside.is_off, True
        try:
            if not layer.is_verified and module.training and torch.is_grad_enabled():
                self._verify(layer, *inputs)
                layer.is_verified = True
            return self._compute(layer, *inputs)
        finally:
            self._use_outside.is_off = was_off

    def _compute(self, layer: _ExpertLayer, *inputs: torch.Tensor) -> torch.Tensor:
        tokens, indices, weights = inputs
        module, experts, exchange = layer.module, range(layer.count), partial(self._exchange, layer)
        if self._within_unit is None:
            return run_experts(module, experts, tokens, indices, weights, exchange)
        tokens, weights = self._within_unit.share(tokens), self._within_unit.share(weights)
        part, each = self.holders.rank % self.tensor, self._each(layer.count)
        output = run_experts(
            module, experts, tokens, indices, weights, exchange, lambda chosen: chosen // each % self.tensor == part
        )
        return self._within_unit.sum(output)

    def _each(self, count: int) -> int:
        """Returns how many of `count` experts each worker has, except for the last ones, which may have fewer."""
        return max(1, -(-count // self.holders.size))

    def _exchange(
        self,
        layer: _ExpertLayer,
        module: nn.Module,
        count: int,
        tokens: torch.Tensor,
        experts: torch.Tensor,
        weights: torch.Tensor,
    ) -> torch.Tensor:
        """Computes pairs of tokens and experts on the workers that have the experts: see `compute_pairs`."""
        size = self.group.size
        owners = experts.view(-1) // self._each(count) // self.tensor
        order = owners.argsort(stable=True)
        to_each = owners.bincount(minlength=size)
        ones = [1] * size
        given, taken = to_each.tolist(), self.send(to_each, layer.name, ones, ones).tolist()
        local_experts = self.send(experts[order].int(), layer.name, given, taken).long() - layer.held.start
        sent_tokens, sent_weights = (
            applied(_Send, rows[order], self, layer.name, given, taken) for rows in (tokens, weights)
        )
        if torch.is_grad_enabled() and module.training:
            away = [sum(lengths) - lengths[self.group.rank] for lengths in (given, taken)]
            self._note_traffic(layer, away, tokens.element_size() * tokens.shape[1], weights.element_size())
        computed = compute_pairs(module, len(layer.held), sent_tokens, local_experts, sent_weights).to(tokens.dtype)
        returned = applied(_Send, computed, self, layer.name, taken, given)
        return returned[order.argsort()]

    def send(self, rows: torch.Tensor, name: str, given: list[int], taken: list[int]) -> torch.Tensor:
        """Sends `given[i]` rows to worker i and returns the `taken[i]` rows from each. Collective."""
        rows, group = rows.detach().contiguous(), self.group
        received = rows.new_empty(sum(taken), *rows.shape[1:])
        group.declare(f"the tokens of {name}", check=False, kind="expert")
        group.exchange([x.view(-1) for x in rows.split(given)], [x.view(-1) for x in received.split(taken)])
        return received

    def _note_traffic(self, layer: _ExpertLayer, away: Sequence[int], token: int, weight: int) -> None:
        """Records the bytes that this worker sends in the forward and backward of a micro-batch.

        `away` holds two counts of pairs of a token and an expert: how many this worker sends to other workers, and how
        many it receives. A token has `token` bytes, and so do the result and the gradients of both.
        """
        layer.calls += 1
        layer.sent += sum(away) * (2 * token + weight) + 4 * away[0] + 8 * (self.group.size - 1)
        self.job.inside["expert"] = sum(one.sent // max(1, one.calls) for one in self.layers)

    # -- comparison with complete layers ------------------------------------------------------------------------------

    def _verify(self, layer: _ExpertLayer, *inputs: torch.Tensor) -> None:
        """Compares the first forward and backward of a layer with those of all its experts on this worker.

        Raises UsageError on all workers of the group if they differ.
        """
        module, group = layer.module, self.group
        group.declare(f"all experts of {layer.name}, for the comparison", check=False, kind="comparison")
        local = dict(module.named_parameters(recurse=False))
        full_bytes = self.holders.size * sum(param.nbytes for param in local.values())
        if not all(group.gather_json(3 * full_bytes <= room(self.job.device))):
            self.job.news["expert"] = "expert= was not verified: the experts of a layer do not fit on one worker", ""
            return
        self.holders.declare(f"all experts of {layer.name}, for the comparison", check=False, kind="comparison")
        full = {key: torch.cat(self.holders.gather(param.detach().reshape(-1))) for key, param in local.items()}
        slots = [
            (module, key, nn.Parameter(flat.view(layer.count, *local[key].shape[1:]), local[key].requires_grad))
            for key, flat in full.items()
        ]
        keep = torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x)  # unseen by activation checkpointing
        with without_a_trace(module, self._rng), keep, torch.enable_grad():
            output, gradients = _run_and_differentiate(partial(self._compute, layer), inputs, local)
            with placed(slots):
                params = {key: param for _, key, param in slots}
                expected, full_gradients = _run_and_differentiate(partial(type(module).forward, module), inputs, params)
        group.declare(f"the gradients of {layer.name}, for the comparison", check=False, kind="comparison")
        for key in (key for key, param in local.items() if param.requires_grad):
            total = full_gradients[key] if key in full_gradients else torch.zeros_like(params[key])
            total = total.contiguous()
            group.sum(total.view(-1))
            full_gradients[key] = total[layer.held.start : layer.held.stop]
        farthest_output, differs = outputs_apart([output], [expected])
        name, distance = farthest(gradients, full_gradients, [expected])
        wrong = "output" if differs else name and f"gradient of {name}"
        wrongs = [text for text in group.gather_json(wrong) if text]
        if wrongs:
            problem = f"the {wrongs[0]} of {layer.name} changes when expert= divides its experts"
            raise UsageError(problem, "leave expert= out: its forward does more than add up the experts' outputs")
        self._distances = max(self._distances[0], farthest_output), max(self._distances[1], distance)
        report = "expert= was verified on one micro-batch against complete layers: relative difference "
        report += f"{self._distances[0]:.1g} of the outputs and {self._distances[1]:.1g} of the gradients"
        self.job.news["expert"] = report, ""


def _run_and_differentiate(
    forward: Callable[..., torch.Tensor], inputs: Sequence[torch.Tensor], params: Mapping[str, torch.Tensor]
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Returns the output of a layer of experts, and the gradients of its tokens, their weights and its parameters."""
    tokens, indices, weights = inputs
    tokens, weights = (one.detach().requires_grad_() for one in (tokens, weights))
    output = forward(tokens, indices, weights)
    return output.detach(), gradients_of([output], {"the tokens": tokens, "the weights": weights, **params})
