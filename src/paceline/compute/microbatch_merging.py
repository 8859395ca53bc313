"""Tests on the first micro-batches whether micro-batches may be merged or split."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from paceline.comm.peer_status import raise_site
from paceline.compute.grad_hooks import Hooks
from paceline.compute.microbatches import Chunk, MicroBatch, join
from paceline.compute.rng import RngState

if TYPE_CHECKING:
    from paceline.compute.job import StepOptions, StepSums, TrainingJob

Computes = Callable[[Chunk], Any]  # the result has `total` and `count`
# Errors of a forward that does not accept another number of rows than a micro-batch has, or eval mode.
USERS_OWN = (RuntimeError, ValueError, TypeError, AttributeError, LookupError, ArithmeticError, AssertionError)
_ROUTED = "the model has experts, and a loss of their router is a mean over a micro-batch"
HOOKED = "a gradient hook must see the gradient of one micro-batch"
_SEES = "micro-batches are computed one by one, and the hook sees the gradient of the mean over a micro-batch"
_NOT_A_SUM = (
    "the loss is not a sum over rows ({}). It is the same on any number of workers, but differs from the loss that "
    'plain PyTorch computes over the full batch; return (sum, count), or pass loss_over="batch" to the Trainer for a '
    "loss over the full batch (a contrastive loss)"
)
_AGAIN = "if the failure was temporary, stop and resume the run to try again"
_MOVES = "the loss of one micro-batch changes when it is computed again"
_KEEPS = (
    f"{_MOVES} ({{}}, then {{}}): the loss or the model keeps state between calls{{}}, so the result depends on the "
    "number of workers; keep the state in a buffer declared with paceline.buffer, or in trainer.state and change it in "
    "the training loop, or train with one worker and micro= equal to global_batch="
)


class MergeProbe:
    """Tests how micro-batches may be computed.

    `hooks` are the user's gradient hooks. `done`: a micro-batch was computed and tested. `change`: a forward changed a
    buffer or parameter that is not merged.
    """

    def __init__(self, job: TrainingJob, streams: RngState, gathered: bool) -> None:
        self.job, self.streams = job, streams
        self.hooks = Hooks(job.named, job.precision == "fp16", gathered, bool(job.divided), job.in_shards)
        self.done = self.change = False
        # A test of losses does not show it: such a loss is a millionth of the sum.
        has_experts = any(type(getattr(module, "num_experts", None)) is int for module in job.model.modules())
        self._failed = _ROUTED if has_experts else ""

    def why(self, certain: str) -> str:
        """Returns why micro-batches must run one by one, as far as it is known before a step; else an empty text."""
        self.hooks.look()
        return certain or (HOOKED if self.hooks.where else self._failed)

    def forbid(self, why: str) -> None:
        """Forbids to merge micro-batches from now on."""
        self._failed = self._failed or why

    def give_up(self, chunk: Chunk, sums: StepSums, error: Exception) -> None:
        """Forbids all workers to merge, or to divide, micro-batches after such a chunk failed."""
        sums.failed = True
        if len(chunk.micro_batches) > 1:
            self._failed = sums.why = f"several micro-batches together failed {_describe_error(error)}"
            sums.no_merge = True
            _report_one_by_one(sums, "several micro-batches together", error)
        else:
            _not_divided(sums, f"a part of a micro-batch failed {_describe_error(error)}")
            what = "micro-batches are not divided among workers from now on: a part of a micro-batch failed"
            sums.news["apart"] = f"{what} {_describe_error(error)}; {_AGAIN}", ""

    def observe(
        self,
        loss: Computes,
        models: Sequence[nn.Module],
        micro_batches: Sequence[MicroBatch],
        sums: StepSums,
        options: StepOptions,
    ) -> None:
        """Tests after a step whether its micro-batches (without dummies) may be merged and divided."""
        first, self.done = not self.done, self.done or bool(micro_batches)
        if self.hooks.where:
            sums.news["hooks"] = f"{self.hooks.where}: {_SEES}", ""
        asked = (first and options.check_loss and not self.change) or (
            options.test_merging and not sums.no_merge and len(micro_batches) > 1
        )
        if not micro_batches or sums.failed or not asked:
            return
        # In eval mode, random draws and BatchNorm do not hide differences of the loss.
        training = [m for model in models for m in model.modules() if m.training] if sums.no_merge else []
        for module in training:
            module.training = False
        mark = self.streams.snapshot()
        try:
            with nullcontext() if self.hooks.where else torch.no_grad():  # hooks need gradients
                self._observe(loss, micro_batches[:2], sums, options.test_merging, first)
        finally:
            for module in training:
                module.training = True
        if self.streams.has_changed(mark):  # the loss draws random numbers, so it always differs
            sums.news.pop("mixes", None)

    def _observe(
        self, loss: Computes, micro_batches: Sequence[MicroBatch], sums: StepSums, test: bool, first: bool
    ) -> None:
        """Measures whether the loss of two merged micro-batches is the sum of their losses, and the loss of one the sum
        over its parts. If micro-batches cannot be merged, only the `first` call tests parts.
        """
        alone = [Chunk([micro_batch], micro_batch.batch) for micro_batch in micro_batches]
        together, single = join(micro_batches) if len(micro_batches) > 1 else None, None
        if together is not None:
            try:
                single = self._one(loss, alone[0], sums, first)
                if single is None:
                    return
                merged, *parts = (loss(chunk) for chunk in (together, *alone[1:]))
            except USERS_OWN as error:  # for example a fixed number of rows, or a forward that computes gradients
                if (
                    test and not sums.no_merge and "does not require grad" not in str(error)
                ):  # they are off in this test
                    _report_one_by_one(sums, "two micro-batches together", error)
                sums.why = sums.why or f"two micro-batches together failed {_describe_error(error)}"
                sums.no_merge = True
                return
            sums.tested = test and not sums.no_merge
            if differ := self._differ(merged, [single, *parts]):
                _mixes(sums, "two micro-batches together give {}, one by one they give {}".format(*differ))
                return
        try:
            halves = micro_batches[0].halves() if first or together is not None else []
            if not halves or (single := single or self._one(loss, alone[0], sums, first)) is None:
                return
            differ = self._differ(single, [loss(half) for half in halves])
        except USERS_OWN as error:
            if test:
                _not_divided(sums, f"a part of a micro-batch failed {_describe_error(error)}")
            return
        if differ and together is None:
            _mixes(sums, "a micro-batch gives {}, in two parts its rows give {}".format(*differ))
        elif differ and test:
            _not_divided(sums, "a micro-batch gives {}, in two parts its rows give {}".format(*differ))

    def _one(self, loss: Computes, chunk: Chunk, sums: StepSums, first: bool) -> Any | None:
        """Computes the loss of one micro-batch, the `first` time twice with the same draws; None if the two differ."""
        mark, buffers = self.streams.snapshot(), getattr(getattr(self.job.loss, "call", None), "named_buffers", tuple)
        before = {name: buffer.clone() for name, buffer in buffers()} if first else {}
        one = loss(chunk)
        if first:
            self.streams.restore(mark)
        if not first or (differ := self._differ(one, [loss(chunk)], rounding=0.01)) is None:
            return one
        moved = [repr(name) for name, now in buffers() if name in before and not torch.equal(before[name], now)]
        sums.why, sums.no_merge = sums.why or _MOVES, True
        sums.news["keeps"] = _KEEPS.format(*differ, f" (in its buffer {' and '.join(moved)})" if moved else ""), ""
        return None

    def _differ(self, merged: Any, parts: Sequence[Any], rounding: float = 1.0) -> tuple[str, str] | None:
        """Texts of the merged loss and the sum over its parts, if these or the counts differ; else None.

        The tolerance is what another order of summation may change, times `rounding`.
        """
        total, count = sum(float(part.total) for part in parts), sum(float(part.count) for part in parts)
        tolerance = 1e-9 if merged.total.dtype == torch.float64 else 1e-4
        tolerance = rounding * (2e-2 if self.job.precision is not None else tolerance)
        size = max(sum(abs(float(part.total)) for part in parts), 1e-30)
        counts_agree = abs(float(merged.count) - count) <= 1e-6 * abs(count)  # they may be sums of float32 weights
        if not abs(float(merged.total) - total) <= tolerance * size:
            return _distinct_digits(float(merged.total), total)
        return None if counts_agree else _distinct_digits(float(merged.count), count, "a count of ")


def _distinct_digits(one: float, other: float, what: str = "") -> tuple[str, str]:
    """Texts of two numbers with the fewest digits (6, 9 or 17) that show their difference."""
    pairs = [(f"{what}{one:.{digits}g}", f"{what}{other:.{digits}g}") for digits in (6, 9, 17)]
    return next((pair for pair in pairs if pair[0] != pair[1]), pairs[0])


def _describe_error(error: Exception) -> str:
    message = str(error).partition("\n")[0]
    return f"at {raise_site(error)} ({type(error).__name__}: {message:.80})"


def _report_one_by_one(sums: StepSums, what: str, error: Exception) -> None:
    sums.news["alone"] = (
        f"micro-batches are computed one by one from now on: {what} failed {_describe_error(error)}; {_AGAIN}",
        "",
    )


def _not_divided(sums: StepSums, why: str) -> None:
    sums.no_split, sums.news["whole"] = True, ("micro-batches are not divided among workers", why)


def _mixes(sums: StepSums, how: str) -> None:
    sums.why, sums.no_merge = sums.why or f"the loss is not a sum over rows: {how}", True
    sums.news["mixes"] = _NOT_A_SUM.format(how), ""
