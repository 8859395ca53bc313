"""Finds the module, parameter or rows behind a loss or gradient that is not finite.

What it computes for that has no effect on the training.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from paceline.base.batching import stream_seed
from paceline.comm.communicator import Group
from paceline.comm.torch_private import autograd_nodes_made
from paceline.compute.forward_backward import Loss
from paceline.compute.grad_hooks import nodes_of
from paceline.compute.job import StepOptions, StepSums
from paceline.compute.microbatch_merging import USERS_OWN
from paceline.compute.microbatches import Chunk, MicroBatch, tensors_of
from paceline.compute.state_dict import local
from paceline.errors import NonFiniteLossError
from paceline.train.replica import Replica

_LOOK = "look at these rows, lower the learning rate or set clip_norm="
_ZEROS = (
    "check it for a logarithm, root or division at 0 and for overflows; "
    "otherwise lower the learning rate or set clip_norm="
)
_LOSS = "check it for a logarithm or division at 0, and compute losses from logits, as cross_entropy does"
_ROWS = "repair or remove these rows"
_SPOILED = (
    "check what the script writes into weights; if an update did it, lower the learning rate or use a larger eps= of "
    "the optimizer, and resume from an earlier checkpoint"
)

Diagnosis = tuple[str, str]  # what, and the cure


def _kind(values: Any, masks: bool = False) -> str:
    """Returns the worst kind of value that is not finite, ``nan``, ``inf`` or ``-inf``, or an empty text. With `masks`,
    -inf in tensors without gradient is allowed.
    """
    kinds = set[str]()
    for tensor in tensors_of(values):
        local_part = local(tensor)
        if not (local_part.is_floating_point() or local_part.is_complex()) or bool(local_part.isfinite().all()):
            continue
        if bool(local_part.isnan().any()):
            kind = "nan"
        else:
            kind = "-inf" if not local_part.is_complex() and local_part.max() < math.inf else "inf"
        if not (masks and kind == "-inf" and not tensor.requires_grad):
            kinds.add(kind)
    return max(kinds, default="")  # in alphabetical order, the worst comes last


@dataclass
class _Call:
    """One call of a module: the kind of non-finite value in its arguments, and the range of autograd nodes that it
    made.
    """

    name: str
    given: str
    first: int
    last: int = -1


@dataclass
class _ForwardTrace:
    """Observes a forward module by module. `first` is the cause of the first output that is not finite."""

    model: nn.Module
    bad_params: Sequence[str]  # parameters that are not finite
    batch: Any
    first: Diagnosis | None = None
    calls: list[_Call] = field(default_factory=list)
    _open: list[_Call] = field(default_factory=list)

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Observes the model's modules in the context."""
        with ExitStack() as hooks:
            for name, module in self.model.named_modules():
                hooks.callback(module.register_forward_pre_hook(partial(self._enters, name), with_kwargs=True).remove)
                hooks.callback(module.register_forward_hook(self._leaves).remove)
            yield

    def _enters(self, name: str, module: nn.Module, given: Any, named: Any) -> None:
        self._open.append(_Call(name, "" if self.first else _kind((given, named), masks=True), autograd_nodes_made()))

    def _leaves(self, module: nn.Module, given: Any, output: Any) -> None:
        self.calls.append(call := self._open.pop())
        call.last = autograd_nodes_made()
        if self.first is None and (kind := _kind(output)):
            outer = [*self._open, call]
            while outer and outer[-1].given:
                kind = outer.pop().given
            self.first = self._blame(outer[-1].name if outer else None, kind)

    def _blame(self, within: str | None, kind: str) -> Diagnosis:
        """Returns the cause: the module whose own code made the value; without a module the user's forward, or the rows
        themselves.
        """
        prefix = f"{within}." if within else ""
        if bad := next((name for name in self.bad_params if within is not None and name.startswith(prefix)), None):
            return f"the parameter {bad!r} was not finite before the step", _SPOILED
        if within is None and (input_kind := _kind(self.batch, masks=True)):
            return f"these rows contain {input_kind}", _ROWS
        return f"{self.title(within)} produces the first {kind}", _ZEROS

    def judge(self, output: Any, loss: torch.Tensor | None) -> Diagnosis | None:
        """Returns the cause of a loss that is not finite, after the forward; None if the loss and all before it are
        finite.
        """
        if self.first is None and (kind := _kind(output)):
            self.first = self._blame(None, kind)
        if self.first is not None or not (kind := _kind(loss)):
            return self.first
        if self.bad_params:  # and it is the loss that uses it
            return self._blame("", kind)
        input_kind = _kind(self.batch, masks=True)
        return (
            (f"these rows contain {input_kind}", _ROWS)
            if input_kind
            else (f"the loss function produces the first {kind}", _LOSS)
        )

    def title(self, name: str | None) -> str:
        """Returns how a module is named to the user."""
        if name is None:
            return "the forward"
        kind = type(self.model.get_submodule(name)).__name__
        return f"{name!r} ({kind})" if name else f"the model ({kind})"

    def maker(self, node: Any, end: int) -> str:
        """Returns the innermost module in whose forward a node was made; nodes after `end` belong to the loss."""
        number = node._sequence_nr()
        inside = [call for call in self.calls if call.first <= number < call.last]
        innermost = min(inside, key=lambda call: call.last - call.first, default=None)
        return "the loss function" if number >= end else self.title(None if innermost is None else innermost.name)


@dataclass(frozen=True)
class Refusal:
    """A step that cannot be applied: `which` names it to the user, the other fields are what this worker computed in
    it.
    """

    replica: Replica
    group: Group
    which: str
    micro_batches: Sequence[MicroBatch]
    options: StepOptions
    sums: StepSums | None

    def of_loss(self) -> NonFiniteLossError:
        """Returns the error of a loss that is not finite. Collective."""
        group, model = self.group, self.replica.job.model
        own_bad_params = [name for name, param in model.named_parameters() if _kind(param)]
        reports = group.gather_json([[] if self.sums is None else self.sums.bad_samples, own_bad_params])
        bad = [(rank, rows) for rank, (listed, _) in enumerate(reports) for rows in listed]
        named = "; ".join(f"worker {group.names[rank]}: {rows}" for rank, rows in bad[:2])
        named += f" and {len(bad) - 2} more" if len(bad) > 2 else ""
        what, cure = "", _LOOK
        if bad and self._runs_alone:
            bad_params = [name for name, _ in model.named_parameters() if any(name in listed for _, listed in reports)]
            causes = [one for one in group.gather_json(self._forward(*bad[0], bad_params)) if one]
            what, cure = causes[0] if causes else (what, cure)
        return self._error(f"the loss of {self.which} is not finite ({named})" + (what and f": {what}"), cure)

    def of_gradient(self, loss: float) -> NonFiniteLossError:
        """Returns the error of a gradient that is not finite though the loss is. Collective."""
        job, names, where = self.replica.job, list(self.replica.job.named), self.replica.error_feedback.blame()
        what = f"the gradient of {self.which} is not finite{where}, though its loss is ({loss:.6g})"
        if self._runs_alone:
            sums = enumerate(row.grad for row in self.replica.updater.rows)
            first_bad = next(([number, _kind(grad), ""] for number, grad in sums if _kind(grad)), None)
            if not self.replica.layout.gathers and job.over is None:
                first_bad = self._backward() or first_bad
            reports = [one for one in self.group.gather_json(first_bad) if one]
            number, kind, more = min(reports, key=lambda one: (one[0], not one[2]), default=(0, "", ""))
            what += f": that of {names[number]!r} is {kind}{more}" if reports else ""
        return self._error(what, "check for a square root, division or logarithm at 0")

    def _error(self, what: str, cure: str) -> NonFiniteLossError:
        turn = "round" if " of island " in self.which else "step"
        return NonFiniteLossError(what, f"the {turn} was not applied; {cure}")

    @property
    def _runs_alone(self) -> bool:
        """Whether one worker can run a micro-batch without others, except for weights that it gathers from them."""
        return self.replica.mesh.unit == 1 == self.replica.mesh.expert

    def _forward(self, rank: int, rows: str, bad_params: list[str]) -> Diagnosis | None:
        """Runs the forward again. Returns the cause of the bad loss in the rows that the worker of this rank names."""
        replica, bad = self.replica, [] if self.sums is None else self.sums.bad_samples
        mesh, own_rank, gathers = replica.mesh, self.group.rank, replica.layout.gathers
        candidates = [one for one in self.micro_batches if not one.is_dummy]
        if gathers and mesh.replica_of(own_rank) == mesh.replica_of(rank):  # all of it gather the weights, once
            candidates = [one for one in candidates if rows in Chunk([one], None).sources] if own_rank == rank else []
            candidates = candidates or list(self.micro_batches)
            del candidates[1:]
        elif own_rank != rank:
            return None
        cause: Diagnosis | None = None
        with self._without_effects(), replica.layout.running(self.which), torch.set_grad_enabled(not gathers):
            for one in candidates:  # also earlier ones, which may have changed buffers
                seen = _ForwardTrace(replica.job.model, bad_params, one.batch)
                verdict = seen.judge(*self._rerun(one, seen)[:2])
                if verdict is not None and Chunk([one], None).source in bad:
                    cause = verdict
                    break
        return cause if own_rank == rank else None

    def _backward(self) -> list[Any] | None:
        """Returns number, kind and origin of the first parameter whose gradient is not finite in one of this worker's
        micro-batches.
        """
        params = [(n, param) for n, param in enumerate(self.replica.job.named.values()) if param.requires_grad]
        with self._without_effects():
            for one in (one for one in self.micro_batches if not one.is_dummy):
                seen, bad = _ForwardTrace(self.replica.job.model, (), None), list[Any]()
                _, loss, end = self._rerun(one, seen)
                assert loss is not None
                total = loss.mul(1.0 / self.options.expected)
                for node in nodes_of(total):
                    node.register_hook(partial(_collect_maker, node, bad))
                grads = torch.autograd.grad(total, [param for _, param in params], allow_unused=True)
                pairs = zip(params, grads, strict=True)
                if (first := next(((n, _kind(g)) for (n, _), g in pairs if _kind(g)), None)) is not None:
                    more = f", in {Chunk([one], None).source} on worker {self.group.names[self.group.rank]}"
                    if bad:
                        more += f", produced in the backward of {seen.maker(bad[0], end)} ({bad[0].name()})"
                    return [*first, more]
        return None

    def _rerun(self, one: MicroBatch, seen: _ForwardTrace) -> tuple[Any, torch.Tensor | None, int]:
        """Runs a micro-batch as in the step. Returns its output, the sum of its losses (None for a loss over the whole
        batch), and the number of autograd nodes between the two.
        """
        job, runner = self.replica.job, self.replica.runner
        if self.sums is not None and self.sums.records is not None:
            runner.guard.carried.restore()
        runner.guard.streams.seed(stream_seed(job.seed, self.options.step, one.index))
        with job.autocast():
            with seen.watched():
                output = job.forward(job.model, one.batch)
            end = autograd_nodes_made()
            if job.over is not None:
                return output, None, end
            return output, Loss.of(job.loss(output, one.batch), Chunk([one], one.batch), trainable=True).total, end

    @contextmanager
    def _without_effects(self) -> Iterator[None]:
        """Undoes all effects of the context, and ignores errors of the user's code."""
        runner = self.replica.runner
        runner.guard.undo()
        try:
            with suppress(*USERS_OWN), runner.guard.streams.preserved():
                yield
        finally:
            runner.guard.undo()


def _collect_maker(node: Any, bad: list[Any], into: Any, out: Any) -> None:
    """A backward hook: notes the first node that makes a non-finite gradient of finite ones."""
    if not bad and _kind(into) and not _kind(out):
        bad.append(node)
