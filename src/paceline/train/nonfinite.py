"""Finds the module, parameter or rows behind a loss or gradient that is not finite.

Nothing of that counts.
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
    "look there for a logarithm, a root or a division at 0 or an overflow; "
    "else lower the learning rate or set clip_norm="
)
_LOSS = "look there for a logarithm or a division at 0, and compute losses from logits, as cross_entropy does"
_ROWS = "mend these rows or leave them out"
_SPOILED = (
    "see what the script writes into weights; if an update did it, lower the learning rate or give the optimizer a "
    "larger eps=, and go on from a checkpoint before it"
)

RoundReport = tuple[str, str]  # what, and the cure


def _kind(values: Any, masks: bool = False) -> str:
    """``nan``, ``inf`` or ``-inf``, the worst in it, or an empty text. `masks` have -inf, and no gradient."""
    found = set[str]()
    for tensor in tensors_of(values):
        here = local(tensor)
        if not (here.is_floating_point() or here.is_complex()) or bool(here.isfinite().all()):
            continue
        kind = (
            "nan" if bool(here.isnan().any()) else "-inf" if not here.is_complex() and here.max() < math.inf else "inf"
        )
        if not (masks and kind == "-inf" and not tensor.requires_grad):
            found.add(kind)
    return max(found, default="")  # in this order


@dataclass
class _Call:
    """Of a module: what is not finite of what it was given, and which of autograd's nodes were made in it."""

    name: str
    given: str
    first: int
    last: int = -1


@dataclass
class _Seen:
    """A forward, module by module: `first` is what made the first output that is not finite."""

    model: nn.Module
    spoiled: Sequence[str]  # parameters that are not finite
    batch: Any
    first: RoundReport | None = None
    calls: list[_Call] = field(default_factory=list)
    _open: list[_Call] = field(default_factory=list)

    @contextmanager
    def watched(self) -> Iterator[None]:
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

    def _blame(self, within: str | None, kind: str) -> RoundReport:
        """The module whose own code made it; without one the user's forward, unless the rows had it."""
        own = f"{within}." if within else ""
        if bad := next((name for name in self.spoiled if within is not None and name.startswith(own)), None):
            return f"the parameter {bad!r} was not finite before it", _SPOILED
        if within is None and (there := _kind(self.batch, masks=True)):
            return f"there is {there} in these rows", _ROWS
        return f"{self.title(within)} makes the first {kind}", _ZEROS

    def judge(self, output: Any, loss: torch.Tensor | None) -> RoundReport | None:
        """After it: what made the `loss` what it is; None if that is a finite number, as is all before it."""
        if self.first is None and (kind := _kind(output)):
            self.first = self._blame(None, kind)
        if self.first is not None or not (kind := _kind(loss)):
            return self.first
        if self.spoiled:  # and it is the loss that uses it
            return self._blame("", kind)
        there = _kind(self.batch, masks=True)
        return (
            (f"there is {there} in these rows", _ROWS)
            if there
            else (f"the loss function makes the first {kind}", _LOSS)
        )

    def title(self, name: str | None) -> str:
        if name is None:
            return "the forward"
        kind = type(self.model.get_submodule(name)).__name__
        return f"{name!r} ({kind})" if name else f"the model ({kind})"

    def maker(self, node: Any, end: int) -> str:
        """In whose forward a node was made, the innermost; after the `end` in the loss."""
        number = node._sequence_nr()
        inside = [call for call in self.calls if call.first <= number < call.last]
        found = min(inside, key=lambda call: call.last - call.first, default=None)
        return "the loss function" if number >= end else self.title(None if found is None else found.name)


@dataclass(frozen=True)
class Refusal:
    """Of a step that cannot be applied: `which` it is, for people, and what was computed in it here."""

    replica: Replica
    group: Group
    which: str
    micro_batches: Sequence[MicroBatch]
    options: StepOptions
    sums: StepSums | None

    def of_loss(self) -> NonFiniteLossError:
        """Collective."""
        group, model = self.group, self.replica.job.model
        here = [name for name, param in model.named_parameters() if _kind(param)]
        said = group.gather_json([[] if self.sums is None else self.sums.bad, here])
        bad = [(rank, rows) for rank, (some, _) in enumerate(said) for rows in some]
        named = "; ".join(f"worker {group.names[rank]}: {rows}" for rank, rows in bad[:2])
        named += f" and {len(bad) - 2} more" if len(bad) > 2 else ""
        what, cure = "", _LOOK
        if bad and self._by_itself:
            spoiled = [name for name, _ in model.named_parameters() if any(name in some for _, some in said)]
            told = [one for one in group.gather_json(self._forward(*bad[0], spoiled)) if one]
            what, cure = told[0] if told else (what, cure)
        return self._error(f"the loss of {self.which} is not finite ({named})" + (what and f": {what}"), cure)

    def of_gradient(self, loss: float) -> NonFiniteLossError:
        """Collective."""
        job, names, where = self.replica.job, list(self.replica.job.named), self.replica.own.blame()
        what = f"the gradient of {self.which} is not finite{where}, though its loss is ({loss:.6g})"
        if self._by_itself:
            sums = enumerate(row.grad for row in self.replica.updater.rows)
            mine = next(([number, _kind(grad), ""] for number, grad in sums if _kind(grad)), None)
            if not self.replica.layout.gathers and job.over is None:
                mine = self._backward() or mine
            said = [one for one in self.group.gather_json(mine) if one]
            number, kind, more = min(said, key=lambda one: (one[0], not one[2]), default=(0, "", ""))
            what += f": that of {names[number]!r} is {kind}{more}" if said else ""
        return self._error(what, "look for a square root, a division or a logarithm at 0")

    def _error(self, what: str, cure: str) -> NonFiniteLossError:
        turn = "round" if " of island " in self.which else "step"
        return NonFiniteLossError(what, f"the {turn} was not applied; {cure}")

    @property
    def _by_itself(self) -> bool:
        """Whether a micro-batch is run without others, but for the weights that they have."""
        return self.replica.mesh.unit == 1

    def _forward(self, rank: int, rows: str, spoiled: list[str]) -> RoundReport | None:
        """What made the loss of this micro-batch of the worker of this rank, or of the others that it names."""
        replica, bad = self.replica, [] if self.sums is None else self.sums.bad
        mesh, here, gathers = replica.mesh, self.group.rank, replica.layout.gathers
        some = [one for one in self.micro_batches if not one.is_dummy]
        if gathers and mesh.replica_of(here) == mesh.replica_of(rank):  # all of it gather the weights, once
            some = [one for one in some if rows in Chunk([one], None).sources] if here == rank else []
            some = some or list(self.micro_batches)
            del some[1:]
        elif here != rank:
            return None
        found: RoundReport | None = None
        with self._quietly(), replica.layout.running(self.which), torch.set_grad_enabled(not gathers):
            for one in some:  # also those before it, which may have left something in buffers
                seen = _Seen(replica.job.model, spoiled, one.batch)
                told = seen.judge(*self._again(one, seen)[:2])
                if told is not None and Chunk([one], None).source in bad:
                    found = told
                    break
        return found if here == rank else None

    def _backward(self) -> list[Any] | None:
        """The first parameter whose gradient is not finite in a micro-batch of this worker's, of what kind that is, and
        where it comes from.
        """
        params = [(n, param) for n, param in enumerate(self.replica.job.named.values()) if param.requires_grad]
        with self._quietly():
            for one in (one for one in self.micro_batches if not one.is_dummy):
                seen, bad = _Seen(self.replica.job.model, (), None), list[Any]()
                _, loss, end = self._again(one, seen)
                assert loss is not None
                total = loss.mul(1.0 / self.options.expected)
                for node in nodes_of(total):
                    node.register_hook(partial(_looked, node, bad))
                grads = torch.autograd.grad(total, [param for _, param in params], allow_unused=True)
                pairs = zip(params, grads, strict=True)
                if (first := next(((n, _kind(g)) for (n, _), g in pairs if _kind(g)), None)) is not None:
                    more = f", in {Chunk([one], None).source} on worker {self.group.names[self.group.rank]}"
                    if bad:
                        more += f", where the backward of {seen.maker(bad[0], end)} makes it ({bad[0].name()})"
                    return [*first, more]
        return None

    def _again(self, one: MicroBatch, seen: _Seen) -> tuple[Any, torch.Tensor | None, int]:
        """Runs a micro-batch as the step did: its output, the sum of its losses (not where that is over the batch), and
        how many nodes there were between the two.
        """
        job, runner = self.replica.job, self.replica.runner
        if self.sums is not None and self.sums.records is not None:
            runner.carried.restore()
        runner.streams.seed(stream_seed(job.seed, self.options.step, one.index))
        with job.arithmetic():
            with seen.watched():
                output = job.forward(job.model, one.batch)
            end = autograd_nodes_made()
            if job.over is not None:
                return output, None, end
            return output, Loss.of(job.loss(output, one.batch), Chunk([one], one.batch), trainable=True).total, end

    @contextmanager
    def _quietly(self) -> Iterator[None]:
        """No trace is left; and where the user's code fails, nothing more is known."""
        runner = self.replica.runner
        runner.undo()
        try:
            with suppress(*USERS_OWN), runner.streams.lent():
                yield
        finally:
            runner.undo()


def _looked(node: Any, bad: list[Any], into: Any, out: Any) -> None:
    """In backward: the gradients that a node makes, and those that it was given."""
    if not bad and _kind(into) and not _kind(out):
        bad.append(node)
