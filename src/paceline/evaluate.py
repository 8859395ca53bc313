"""Evaluation: every row once, sums added in grid order, the same on any number of workers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from paceline.data.loader import Feed, Place, Source
from paceline.errors import MetricError
from paceline.hints import Hinting
from paceline.pulse import PULSE
from paceline.step import Grid, stream_seed
from paceline.strategies.base import Job
from paceline.strategies.pieces import Piece, to_device
from paceline.strategies.streams import Streams
from paceline.team.team import Team

Metric = Callable[[Any, Any], Mapping[str, tuple[Any, Any]]]
_STREAM = 1 << 43  # the streams of evaluation, apart from those of training


def in_order(position: int, size: int, seed: int, epoch: int) -> int:
    return position


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Eval mode for the time, module by module as it was afterwards."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


def evaluate(
    team: Team, job: Job, model: nn.Module, source: Source, metric: Metric, micro: int, place: Place
) -> dict[str, float]:
    """Means by name over all rows of `source`, and the number of rows as ``n``; dealt as `place` says. Collective.

    Raises MetricError where metrics are not (sum, count) by name, or their names differ between rows or workers.
    """
    team.group.enter("evaluate()")
    # The training's loader options serve here too, but a dataset of another kind may not take them.
    source = replace(source, options=None) if source.rows is None else replace(source, order=in_order)
    grid = Grid(8 * micro * team.size, micro)
    span = (0, None if source.rows is None else grid.batches(source.rows), 1)
    feed = Feed(source, grid, span, lambda: place, team.world.tell)
    streams = Streams(job.device)
    rows, base, hinting = 0, 0, Hinting(metric, "metric")
    sums: dict[int, dict[str, tuple[float, float]]] = {}
    with torch.no_grad(), job.keeping(), _evaluating(model), streams.lent():
        for _, count, micro_batches in feed:
            for micro_batch in micro_batches:
                batch = to_device(micro_batch.batch, job.device)
                streams.seed(stream_seed(job.seed, _STREAM, base + micro_batch.index))
                with Piece([micro_batch], batch).noted, job.arithmetic():
                    output = job.forward(model, batch)
                    if micro_batch.blank:
                        continue
                    found = hinting(output, batch)
                sums[base + micro_batch.index] = _pairs(found)
                PULSE.beat()
            base += len(grid.cut(count))
            rows += count
    return {**_together(team, sums, base), "n": rows}


def _pairs(found: Any) -> dict[str, tuple[float, float]]:
    good = isinstance(found, Mapping) and all(
        isinstance(pair, (tuple, list)) and len(pair) == 2 for pair in found.values()
    )
    if not good:
        raise MetricError(f"the metric returned {found!r:.60}", "return {name: (sum, count)}")
    return {str(name): (float(total), float(count)) for name, (total, count) in found.items()}


def _together(team: Team, sums: dict[int, dict[str, tuple[float, float]]], micro_batches: int) -> dict[str, float]:
    """Every micro-batch's sums to every worker, then added in grid order: equal bits on any number of workers."""
    mine = sorted({tuple(sorted(found)) for found in sums.values()})
    all_names = [tuple(names) for worker in team.group.gather_json(mine) for names in worker]
    if len(set(all_names)) > 1:
        one, other = sorted(set(all_names))[:2]
        raise MetricError(
            f"the metric returned {list(one)} for some rows and {list(other)} for others",
            "return the same names everywhere, with count 0 where there is nothing to count",
        )
    names = all_names[0]
    table = torch.zeros(micro_batches, 2 * len(names), dtype=torch.float64)
    for index, found in sums.items():
        table[index] = torch.tensor([part for name in names for part in found[name]], dtype=torch.float64)
    total = torch.zeros(2 * len(names), dtype=torch.float64)
    for row in team.group.sum(table):
        total += row
    pairs = zip(total[0::2].tolist(), total[1::2].tolist(), strict=True)
    return {name: part / count if count else math.nan for name, (part, count) in zip(names, pairs, strict=True)}
