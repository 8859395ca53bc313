"""Estimates the gradient noise scale.

McCandlish et al., "An Empirical Model of Large-Batch Training", 2018, appendix A.1: the gradient of few rows has a
larger norm than that of all rows, because of its noise. The estimate uses gradients that are computed anyway: each
worker's sum before the reduction or, on one worker, that of the first micro-batches. At a global batch of as many rows
as the noise scale, training takes twice the minimal number of steps and twice the minimal number of rows.
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
KEEP = 0.95  # the weight of earlier measurements at each new one
LEAST = 10  # measurements before the scale is reported
CHANGED = 1.2  # the scale is reported again when it has changed by this factor


def squares(gradients: Iterable[torch.Tensor]) -> float:
    """Sum of the squares of all elements of the gradients."""
    tensors = list(gradients)
    return float(torch.stack(torch._foreach_norm(tensors)).cpu().double().square().sum()) if tensors else 0.0


def looked_at(step: int, plan: Plan, unit: int, workers: int, job: TrainingJob) -> str:
    """The `noise_sample` of a step: empty in most steps, and where workers lack full gradients of their rows."""
    has_full_gradients = unit == plan.together == 1 and not (plan.exact or plan.local or job.over or job.sparse)
    return ("all" if workers > 1 else "first") if has_full_gradients and step % EVERY == EVERY - 1 else ""


def noise_fields(sums: StepSums, options: StepOptions) -> dict[str, float]:
    """Returns the fields of a step's vector with which the noise is estimated, from this worker's sums."""
    squared_norm, rows = sums.sq_norms
    return {"sq_norm": squared_norm * options.expected**2, "sq_norm_rows": rows, "sq_norm_squares": rows**2}


@dataclass
class GradNoiseScale:
    """Estimates the noise scale of one trainer's gradients.

    `signal` is the squared norm of the true gradient, `noise` the trace of the covariance of the gradient of one row or
    token. Both are means over `looks` measurements, weighted towards recent ones.
    """

    signal: float = 0.0
    noise: float = 0.0
    looks: int = 0
    counts: float = 0.0  # the sum of the losses' counts (rows or tokens)
    rows: float = 0.0  # the rows that they count
    _reported: float = 0.0

    def learn(self, agreed: Agreed, norm: float, rows: int) -> Iterator[dict[str, Any]]:
        """Updates the estimate from a step whose mean gradient over `rows` rows has this `norm`.

        Yields the fields of a journal event if the scale changed by more than the factor CHANGED.
        """
        free = agreed.sq_norm_rows - agreed.sq_norm_squares / agreed.count if agreed.count > 0 else 0.0
        if free <= 1e-9 * agreed.count:  # no worker measured, or one worker had all rows
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
        """The noise scale in rows; 0 while it is unknown, infinite if noise hides the gradient."""
        if self.looks < LEAST or self.noise <= 0:
            return 0.0
        return self.noise / self.signal * self.rows / self.counts if self.signal > 0 else math.inf
