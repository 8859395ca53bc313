"""Computes a loss over the global batch, with cached gradients of the outputs (GradCache).

A step has two runs. The first run, without gradients, computes the outputs of all micro-batches, which are gathered
over the units. Then the loss and its gradient with respect to the outputs are computed once. In the second run each
micro-batch is computed again, with the same random numbers, and its own loss is the product of its outputs with their
part of that gradient: by the chain rule, the sum of these losses has the gradient of the loss over the batch. The
loss's own parameters, such as a temperature, are added to the first micro-batch of the grid; the worker that computes
it reports loss, count and metrics.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from paceline.base.batching import stream_seed
from paceline.comm.communicator import Group
from paceline.comm.torch_private import pytree
from paceline.compute.forward_backward import Loss, Ready, Runner
from paceline.compute.grad_hooks import nodes_of
from paceline.compute.job import StepOptions, StepSums
from paceline.compute.microbatches import Chunk, MicroBatch, tensors_of
from paceline.compute.verify import is_reentrant
from paceline.errors import ChangingBufferError, LossError, UsageError, a

_SAME = {torch.float64: 1e-9, torch.float32: 1e-4}  # the relative difference that rounding may make in the second run
_COARSE = 2e-2  # in other precisions
_ROWS = 'with loss_over="batch", return tensors whose first dimension is the rows, in any nesting'
_UNUSED = "compute the loss from the forward's outputs, without detach(), item() or no_grad()"
_SEEDED = "draw only from torch's, Python's or numpy's global generators, and keep no state from one call to the next"


@dataclass(frozen=True)
class CachedGrads:
    """Gradients of the loss over the batch with respect to one micro-batch's outputs, for the second run.

    `grads` has one entry per output tensor (None: the loss does not use it), `before` the outputs of the first run.
    `loss_params` are the loss's own parameters with their gradients. `differences` collects whether each output of the
    second run differs from the first.
    """

    grads: Sequence[torch.Tensor | None]
    before: Sequence[torch.Tensor] = ()
    loss_params: Sequence[tuple[torch.Tensor, torch.Tensor]] = ()
    differences: list[torch.Tensor] | None = None


def cached_loss(output: Any, by: CachedGrads) -> tuple[torch.Tensor, float]:
    """A micro-batch's loss in the second run, as a sum and its count."""
    tensors = tensors_of(output)
    if by.differences is not None:
        with torch.no_grad():
            by.differences.extend(_differs(now, before) for now, before in zip(tensors, by.before, strict=True))
    pairs = [(x, grad) for x, grad in zip(tensors, by.grads, strict=True) if grad is not None]
    terms = [(x * grad).sum() for x, grad in (*pairs, *by.loss_params)]
    return sum(terms[1:], terms[0]), 1.0


def _differs(now: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
    """Returns whether two outputs differ by more than rounding. NaN never differs: the loss reports it."""
    most = _COARSE if torch.is_autocast_enabled(before.device.type) else _SAME.get(before.dtype, _COARSE)
    return (now.double() - before.double()).square().sum() > before.double().square().sum() * most**2


def gather_outputs(
    group: Group, outputs: Sequence[tuple[int, int, Any]], device: torch.device
) -> tuple[list[torch.Tensor], dict[int, slice]]:
    """Gathers the outputs of all workers' micro-batches in grid order. Part of the entered collective.

    `outputs` are this worker's: index of the micro-batch, its rows, its output. Returns a tensor of all rows for each
    tensor of an output, and the slice of each micro-batch by index. Raises UsageError for outputs that are not tensors
    of rows, or whose dtypes or shapes differ between micro-batches.
    """
    local_outputs = [_rows_of(output, rows) for _, rows, output in outputs]
    kinds = [[[str(x.dtype).removeprefix("torch."), list(x.shape[1:])] for x in tensors] for tensors in local_outputs]
    replies = group.gather_json([[[index, rows] for index, rows, _ in outputs], kinds])
    known = [(group.names[rank], kind) for rank, (_, kinds) in enumerate(replies) for kind in kinds]
    for worker, other in known:
        if other != known[0][1]:
            one, two = (f"{_describe_kinds(kind)} on worker {at}" for at, kind in (known[0], (worker, other)))
            what = f"the forward returns {one}, but {two}"
            raise UsageError(what, "return the same dtypes and shapes except for the number of rows")
    columns = []
    for number, (dtype, inner) in enumerate(known[0][1] if known else []):
        none = torch.empty((0, *inner), dtype=getattr(torch, dtype), device=device)
        rows_by_index: dict[int, torch.Tensor] = {}
        everyone = group.gather(torch.cat([none, *(tensors[number] for tensors in local_outputs)]).reshape(-1))
        for flat, (parts, _) in zip(everyone, replies, strict=True):
            rows = [rows for _, rows in parts]
            rows_by_index |= zip([n for n, _ in parts], flat.view(sum(rows), *inner).split(rows), strict=True)
        columns.append(torch.cat([rows_by_index[n] for n in sorted(rows_by_index)]))
    slices, end = {}, 0
    for index, rows in sorted((index, rows) for parts, _ in replies for index, rows in parts):
        slices[index], end = slice(end, end + rows), end + rows
    return columns, slices


def _rows_of(output: Any, rows: int) -> list[torch.Tensor]:
    """The tensors of a micro-batch's output."""
    for leaf in pytree.tree_leaves(output):
        if leaf is not None and not isinstance(leaf, torch.Tensor):
            raise UsageError(f"the forward returns {a(type(leaf).__name__)}", _ROWS)
        if leaf is not None and leaf.shape[:1] != (rows,):
            rows_text = f"{rows} row{'s' if rows != 1 else ''}"
            what = f"the forward returns a tensor of shape {tuple(leaf.shape)} for a micro-batch of {rows_text}"
            raise UsageError(what, f"{_ROWS}; let the loss read values for all rows (a temperature) from the model")
    return tensors_of(output)


def _describe_kinds(kinds: Sequence[Sequence[Any]]) -> str:
    shapes = ((dtype, "x".join(map(str, inner))) for dtype, inner in kinds)
    return ", ".join(f"rows of shape {shape} ({dtype})" if shape else f"rows of one {dtype}" for dtype, shape in shapes)


def filled(like: Any, columns: Sequence[torch.Tensor]) -> Any:
    """An output nested like that of one micro-batch, with the rows of all micro-batches."""
    rest = iter(columns)
    return pytree.tree_map_only(torch.Tensor, lambda _: next(rest), like)


class GradCache:
    """Executes the two runs of a step with a job's `runner`."""

    def __init__(self, runner: Runner) -> None:
        self.runner, self.job = runner, runner.job

    def run(self, micro_batches: Sequence[MicroBatch], options: StepOptions, ready: Ready) -> StepSums:
        """Runs a step as the runner's `run` does: leaves gradients, and returns the sums of the loss."""
        local_outputs, units = self.runner.outputs(micro_batches, options), self.job.units
        if options.fault_point is not None:
            options.fault_point("outputs")
        assert units is not None
        units.declare(f"the outputs of step {options.step + 1}", check=False, kind="outputs")
        share = [(one.index, one.rows, output) for one, output in local_outputs if not one.is_dummy]
        columns, slices = gather_outputs(units, share, self.job.device)
        units.declare(f"step {options.step + 1}", check=False, kind="gradients")
        if options.fault_point is not None:
            options.fault_point("gathered")
        # Cached gradients are scaled already, and the second run does not test whether micro-batches may be merged.
        second = replace(options, expected=1.0, merge=1, test_merging=False, check_loss=False)
        if not local_outputs:  # outputs are other units', or the last stage's
            return self.runner.run(micro_batches, second, ready)
        like = local_outputs[0][1]
        del local_outputs, share  # these rows are in the columns
        part, grads, loss_params = self._judged(columns, like, options)
        differences: list[torch.Tensor] = []

        def with_cached_grads(one: MicroBatch) -> MicroBatch:
            if one.is_dummy:
                return replace(
                    one, cached_grads=CachedGrads([None if grad is None else grad.new_zeros(()) for grad in grads])
                )
            at = slices[one.index]
            before = [column.detach()[at] for column in columns]
            row_grads = [None if grad is None else grad[at] for grad in grads]
            return replace(
                one, cached_grads=CachedGrads(row_grads, before, () if one.index else loss_params, differences)
            )

        sums = self.runner.run([*map(with_cached_grads, micro_batches)], second, ready)
        if differences and bool(torch.stack(differences).any()):
            what = f"the forward of step {options.step + 1} gives other results when run again with the same seeds"
            raise UsageError(what, _SEEDED)
        by_index = {one.index: one for one in micro_batches if not one.is_dummy}
        self._tell(sums, part, first=0 in by_index)
        sums.bad_samples = []
        if not math.isfinite(float(part.total)):
            bad = [one for n, one in by_index.items() if not all(bool(x[slices[n]].isfinite().all()) for x in columns)]
            blameless = 0 in by_index and all(bool(x.isfinite().all()) for x in columns)
            finite = ["all outputs of the forward are finite"] if blameless else []
            sums.bad_samples = [*Chunk(bad, None).sources, *finite]
        return sums

    def _judged(
        self, columns: Sequence[torch.Tensor], like: Any, options: StepOptions
    ) -> tuple[Loss, list[torch.Tensor | None], list[tuple[torch.Tensor, torch.Tensor]]]:
        """The loss over the batch, the gradient of each column, and the loss's own parameters with their gradients.

        Random draws in the loss are seeded, so all units compute the same.
        """
        job, rows = self.job, len(columns[0])
        assert job.over is not None
        leaves = [x.requires_grad_() for x in columns if x.is_floating_point()]
        self.runner.guard.streams.seed(stream_seed(job.seed, options.step, options.micro_batches))
        output = filled(like, columns)
        with job.autocast(), self.runner.user_code():
            result = job.over(output, None)
        moved = self.runner.guard.carried.moved(values=True) or self.runner.guard.detector.changed(values=False)
        if moved:
            what = f"the loss over the batch changes the {moved.removeprefix('the forward changes the ')}"
            raise ChangingBufferError(what, "change it in the training loop instead")
        part = Loss.of(result, Chunk([MicroBatch(0, rows, None, "the global batch")], None), True)
        if part.mean is None and not self.runner.counts.done:
            self.runner.counts.check(job.over, lambda: output, None, part.count, rows, self.runner.guard.models)
        if any(map(is_reentrant, nodes_of(part.total))):  # its gradients go to tensors that the graph does not show
            raise LossError(
                "the loss over the batch calls checkpoint(..., use_reentrant=True)", "pass use_reentrant=False"
            )
        loss_params = [x for x in _leaves(part.total) if not any(x is leaf for leaf in leaves)]
        gradients = iter(
            torch.autograd.grad(part.total.mul(1.0 / options.expected), [*leaves, *loss_params], allow_unused=True)
        )
        grads = [next(gradients) if x.requires_grad else None for x in columns]
        if all(grad is None for grad in grads):
            raise LossError("the loss does not depend on the forward's outputs", _UNUSED)
        return part.detached(), grads, list(zip(loss_params, gradients, strict=True))

    def _tell(self, sums: StepSums, part: Loss, first: bool) -> None:
        """Sets the loss in `sums` on the worker with the first micro-batch, and zeros on all others."""
        loss, count = float(part.total), float(part.count)
        self.runner.counts.refuse_values([count], [loss], ["the global batch"])
        metrics = {name: (float(total), float(number)) for name, (total, number) in part.metrics.items()}
        sums.loss, sums.count = (loss, count) if first else (0.0, 0.0)
        sums.metrics = metrics if first else dict.fromkeys(metrics, (0.0, 0.0))
        sums.parts = [(0, loss, count, metrics)] if first and self.job.exact else []


def _leaves(total: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yields the leaf tensors that a loss depends on."""
    return (node.variable for node in nodes_of(total) if hasattr(node, "variable"))
