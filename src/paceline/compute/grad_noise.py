"""Estimates the gradient noise scale.

McCandlish et al., "An Empirical Model of Large-Batch Training", 2018, appendix A.1: gradients of fewer rows are longer
than that of all, by their noise. So it is told from sums that are made anyway: each worker's own, before they are added
up over all, or on one worker that of its first micro-batches, now and then. At a global batch of so many rows training
takes twice the steps that it takes with all rows there are, and twice the rows that it takes with few at a time.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from paceline.base.batching import Agreed
from paceline.compute.job import StepOptions, StepSums, TrainingJob
from paceline.plan import Plan

EVERY = 10  # steps: the noise is measured in the last of every ten
KEEP = 0.95  # of what was seen before, with each look
LEAST = 10  # looks before it is told
CHANGED = 1.2  # it is told again when it is another one by so much


def squares(gradients: Iterable[torch.Tensor]) -> float:
    """Sum of the squares of all elements of the gradients."""
    tensors = list(gradients)
    return float(torch.stack(torch._foreach_norm(tensors)).cpu().double().square().sum()) if tensors else 0.0


def looked_at(step: int, plan: Plan, unit: int, workers: int, job: TrainingJob) -> str:
    """The `noise_sample` of a step: empty in most steps, and where workers lack full gradients of their rows."""
    has_full_gradients = unit == plan.together == 1 and not (plan.exact or plan.local or job.over or job.sparse)
    return ("all" if workers > 1 else "first") if has_full_gradients and step % EVERY == EVERY - 1 else ""


def noise_fields(sums: StepSums, options: StepOptions) -> dict[str, float]:
    """Returns the fields of a step's vector with what this worker's sums tell of the noise."""
    squared_norm, rows = sums.sq_norms
    return {"sq_norm": squared_norm * options.expected**2, "sq_norm_rows": rows, "sq_norm_squares": rows**2}


@dataclass
class GradNoiseScale:
    """What steps tell of one trainer's gradients: `signal` and `noise` are the square of the true gradient's norm, and
    the trace of the covariance of one row's or token's, each a mean over `looks`, recent ones first.
    """

    signal: float = 0.0
    noise: float = 0.0
    looks: int = 0
    counts: float = 0.0  # what the losses count, rows or tokens,
    rows: float = 0.0  # in so many rows
    _reported: float = 0.0

    def learn(self, agreed: Agreed, norm: float, rows: int) -> Iterator[dict[str, Any]]:
        """Updates the estimate from a step whose mean gradient over `rows` rows has this `norm`.

        Yields the fields of a journal event if the scale changed by more than the factor CHANGED.
        """
        free = agreed.sq_norm_rows - agreed.sq_norm_squares / agreed.count if agreed.count > 0 else 0.0
        if free <= 1e-9 * agreed.count:  # nobody looked, or all rows were one worker's
            return
        noise = (agreed.sq_norm - agreed.sq_norm_squares * norm**2) / free
        self.looks += 1
        weight = max(1 - KEEP, 1 / self.looks)
        self.noise += (noise - self.noise) * weight
        self.signal += (norm**2 - noise / agreed.count - self.signal) * weight
        self.counts, self.rows = self.counts + agreed.count, self.rows + rows
        scale = self.scale
        if scale and not self._reported / CHANGED < scale < self._reported * CHANGED:
            self._reported = scale
            yield {"scale": scale if math.isfinite(scale) else None, "looks": self.looks}

    @property
    def scale(self) -> float:
        """In rows; 0 while it is not known. Where noise hides the gradient it is infinite."""
        if self.looks < LEAST or self.noise <= 0:
            return 0.0
        return self.noise / self.signal * self.rows / self.counts if self.signal > 0 else math.inf
