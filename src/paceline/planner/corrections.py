"""Corrects predictions by trials of other plans, by what the plans have in common. No torch.

If a plan with ``tensor=2`` took 1.3 times as long as predicted, others that divide layers will take longer, too. The
logarithm of this factor is taken to be a sum over traits of the plan, which is found from all trials by Bayesian linear
regression (Bishop, Pattern Recognition and Machine Learning, 2006, section 3.3).
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from paceline.base.mesh import AXES
from paceline.plan import Plan

# The logarithms of factors are expected to have these standard deviations.
OF_TRAIT = 0.2  # what a trait adds
OF_TRIAL = 0.05  # what a trial is off by for other reasons
OF_OTHERS = 0.2  # the same of a trial of another model, or earlier

Traits = frozenset[str]


def traits_of(plan: Plan, workers: int) -> Traits:
    """Returns the ways in which a plan divides a model and its updates over so many workers. Rows are not among them:
    a plan that only divides these is the one with which predictions begin.
    """
    mesh = plan.mesh(workers)
    traits = {axis for axis in AXES if axis not in ("data", "shard") and getattr(mesh, axis) > 1}
    traits |= {f"zero={plan.zero or 3}"} if mesh.shard > 1 else set()
    return frozenset(traits | {name for name in ("server", "local") if getattr(plan, name)})


class Corrections:
    """Corrects plans by `trials` of others: for each its traits, and the factor by which it took longer than predicted.

    `error` is the standard deviation of a factor's logarithm that traits do not explain.
    """

    def __init__(self, trials: Iterable[tuple[Traits, float]], error: float = OF_TRIAL) -> None:
        known = [(traits, math.log(factor)) for traits, factor in trials if traits and factor > 0]
        names = sorted({name for traits, _ in known for name in traits})
        noise = (error / OF_TRAIT) ** 2
        rows = []  # of the equations of ridge regression, with their right sides
        for one in names:
            common = [float(sum(one in traits and other in traits for traits, _ in known)) for other in names]
            common[names.index(one)] += noise
            rows.append([*common, sum(log for traits, log in known if one in traits)])
        self._logs = dict(zip(names, _solution(rows), strict=True))

    def factor(self, traits: Traits) -> float:
        """Returns by how much a plan with these traits is expected to take longer than predicted."""
        return math.exp(sum(self._logs.get(name, 0.0) for name in traits))


def _solution(rows: list[list[float]]) -> list[float]:
    """Solves linear equations, each with its right side at the end. The matrix must be positive definite. By Gauss's
    elimination: there are few traits, and the processes that watch a run do not import numpy.
    """
    for at, row in enumerate(rows):
        for other in rows[at + 1 :]:
            times = other[at] / row[at]
            other[:] = [value - times * pivot for value, pivot in zip(other, row, strict=True)]
    solution = [0.0] * len(rows)
    for at in reversed(range(len(rows))):
        rest = sum(value * known for value, known in zip(rows[at][at + 1 : -1], solution[at + 1 :], strict=True))
        solution[at] = (rows[at][-1] - rest) / rows[at][at]
    return solution
