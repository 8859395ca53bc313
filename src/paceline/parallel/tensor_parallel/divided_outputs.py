"""Computes the loss from outputs that stay divided among the workers, such as the logits of a large vocabulary.

In the first training step, the loss and its gradient are also computed from the full outputs. If they differ, or if the
loss fails with shards, the full outputs are gathered for the loss from then on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from paceline.comm.communicator import Group
from paceline.comm.torch_private import pytree
from paceline.compute.forward_backward import Loss
from paceline.compute.job import TrainingJob
from paceline.compute.microbatch_merging import USERS_OWN
from paceline.compute.microbatches import Chunk, MicroBatch, tensors_of
from paceline.compute.verify import allowed, farthest, loss_apart, room
from paceline.errors import PacelineError
from paceline.parallel.tensor_parallel.redistribute import Redistributor, ShardPlacement
from paceline.parallel.tensor_parallel.sharded_mode import ShardedTensorMode, marks_of, placement_of

_COPIES = 4  # of the full outputs, while both losses are compared


class DividedOutputs:
    """Gives a job's loss the divided outputs of its model.

    `stay` says whether outputs are left divided: not for a loss over the whole global batch, and not if the first loss
    differs.
    """

    def __init__(self, job: TrainingJob, unit: Group, moves: Redistributor, mode: ShardedTensorMode) -> None:
        self._job, self._unit, self._moves, self._mode = job, unit, moves, mode
        self.stay = job.over is None
        self._is_compared = self._is_counted = False
        self._gathered_functions = set[str]()
        self._plain_loss = job.loss
        self._gather_others, job.gather_output = job.gather_output, self.gather

    def gather(self, output: Any) -> Any:
        """Returns an output with full tensors, gathered from all workers."""
        return self._gather_others(self.full(output))

    def full(self, values: Any) -> Any:
        """Returns values with full tensors, gathered from the workers of the unit."""
        with self._mode.suspended():
            return pytree.tree_map_only(torch.Tensor, self._mode.gather_full, values)

    def loss(self, quietly: Callable[..., AbstractContextManager[None]], output: Any, batch: Any) -> Any:
        """Computes the loss of a micro-batch, from divided outputs where there are some; the result is full.

        `quietly(model, False)` returns a context that undoes the effects of a comparison.
        """
        if not any(map(placement_of, tensors_of(output))):
            return self._plain_loss(output, batch)
        if not self._is_compared and torch.is_grad_enabled() and self._job.trains:
            sent_before = self._moves.bytes_sent
            with quietly(self._job.model, False):
                self.stay, self._is_compared = self._agrees(output, batch), True
            self._moves.bytes_sent = sent_before  # what a comparison sends is no part of a step
        if not self.stay:
            output = self.full(output)
        self._gathered_functions.clear()
        sent_before = self._moves.bytes_sent
        result = self.full(self._plain_loss(output, batch))
        if not self._is_counted and torch.is_grad_enabled() and not self._job.assembled:
            self._is_counted = True
            self._job.inside["tensor"] = self._job.inside.get("tensor", 0) + self._moves.bytes_sent - sent_before
            self._report()
        return result

    def note(self, name: str, shards: Sequence[ShardPlacement], *_: Any) -> None:
        """Notes a function of the loss that gets gathered outputs."""
        self._gathered_functions |= {name.strip("_")} if shards else set()

    def _report(self) -> None:
        """Adds to the news of the job what the loss cannot compute from divided outputs."""
        functions = sorted(self._gathered_functions)
        if functions:
            what = f"outputs are gathered in the loss for {', '.join(functions[:3])}{', ...' if functions[3:] else ''}"
        elif not self.stay:
            what = "outputs are gathered for the loss, because it differs if they are divided"
        else:
            return
        before = self._job.news.get("tensor", ("", ""))[0]
        self._job.news["tensor"] = f"{before}; {what}" if before else f"tensor=: {what}", ""

    def _agrees(self, output: Any, batch: Any) -> bool:
        """Whether the loss and its gradient equal those computed from full outputs; also true if there is too little
        memory to compare them. Collective in the unit.
        """
        self._unit.declare("full outputs, for the comparison", check=False, kind="comparison")
        size = sum(x.nbytes for x in tensors_of(output)) * self._unit.size * self._unit.size
        if not all(self._unit.gather_json(_COPIES * size <= room(self._job.device))):
            return True
        error: Exception | None = None
        try:
            loss, gradients = self._differentiate(output, batch)
        except (*USERS_OWN, PacelineError) as problem:
            if isinstance(problem, torch.OutOfMemoryError):
                raise
            error = problem
        expected, full_gradients = self._differentiate(self.full(output), batch)
        agrees = error is None
        if error is None:
            local = {n: self._local(x, output, int(n)) for n, x in full_gradients.items()}
            rounding = max(map(allowed, [expected.total, *local.values()]))
            agrees = not loss_apart(loss, expected, rounding, 1.0)[0] and gradients.keys() == local.keys()
            agrees = agrees and not farthest(gradients, local, [*local.values()])[0]
        return all(self._unit.gather_json(agrees))

    def _local(self, gradient: torch.Tensor, output: Any, number: int) -> torch.Tensor:
        """Returns this worker's shard of the gradient of an output."""
        placement = placement_of(tensors_of(output)[number])
        return gradient if placement is None else self._moves.narrow(gradient, placement)

    def _differentiate(self, output: Any, batch: Any) -> tuple[Loss, dict[str, torch.Tensor]]:
        """Returns the loss, and its gradients by the number of the output."""
        leaves, spec = pytree.tree_flatten(output)
        copies = [_leaf(x) if isinstance(x, torch.Tensor) and x.is_floating_point() else x for x in leaves]
        output = pytree.tree_unflatten(copies, spec)
        result = self.full(self._plain_loss(output, batch))
        loss = Loss.of(result, Chunk([MicroBatch(0, 1, None)], None), trainable=False)
        inputs = {str(n): x for n, x in enumerate(tensors_of(output)) if x.requires_grad}
        if not loss.total.requires_grad:
            return loss, {}
        with torch._C.DisableTorchFunction():
            gradients = torch.autograd.grad(loss.total, [*inputs.values()], allow_unused=True)
        by_number = zip(inputs, gradients, strict=True)
        return loss.detached(), {n: grad for n, grad in by_number if grad is not None}


def _leaf(x: torch.Tensor) -> torch.Tensor:
    """Returns a copy of an output, sharded in the same ways, from which a gradient can be computed."""
    leaf = x.detach().requires_grad_()
    leaf.__dict__.update(marks_of(x))
    return leaf
