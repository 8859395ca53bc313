"""Evaluation: every row once; adds metrics' sums and counts over workers; the same result on any number of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from paceline.base.batching import Grid, stream_seed
from paceline.base.heartbeat import HEARTBEAT
from paceline.comm.communicator import Group
from paceline.comm.user_collectives import refusing
from paceline.compute.buffers import unchanging
from paceline.compute.cached_loss import filled, gather_outputs
from paceline.compute.job import TrainingJob
from paceline.compute.loss_counts import is_pair
from paceline.compute.microbatches import Chunk, MicroBatch, to_device
from paceline.compute.rng import RngState
from paceline.data.fingerprint import compare_read, compare_rows, first_rows
from paceline.data.loader import Assignment, Feed, Source
from paceline.data.order import in_order
from paceline.errors import MetricError, UsageError, add_hint
from paceline.evaluate.metric_objects import MetricObjects
from paceline.parallel.tensor_parallel.script_view import metric_view
from paceline.session.error_hints import AnnotatedCallable
from paceline.team.team import Team

_STREAM = 1 << 43  # the streams of evaluation, apart from those of training


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Puts the model into eval mode in the context, and each module back into its former mode."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


@contextmanager
def _without_gradients() -> Iterator[None]:
    """Adds a hint to errors of code that needs gradients."""
    try:
        yield
    except RuntimeError as error:
        if "does not require grad" in str(error):
            add_hint(
                error,
                "evaluate() and predict() compute without gradients: put the code that needs gradients, including "
                "the forward, under `with torch.enable_grad():`",
            )
        raise


@dataclass(frozen=True)
class EvalPass:
    """One pass over all rows of a dataset, each once and in order, with a model in eval mode. `get_assignment` says how
    micro-batches of `micro` rows are assigned to workers. `grid` cuts global batches, for metrics over these.
    """

    team: Team
    job: TrainingJob
    model: nn.Module
    source: Source
    micro: int
    get_assignment: Callable[[], Assignment]
    grid: Grid | None = None
    of: str = ""  # which Trainer's, in the names of collectives

    def feed(self, micro_batches: int, full_batches: bool = False) -> Feed:
        """Returns this worker's part of the rows: so many micro-batches of all workers at a time, or with
        `full_batches` a global batch.
        """
        # The training's loader options serve here too, but a dataset of another kind may not take them.
        stream = self.source.rows is None
        source = replace(self.source, options=None) if stream else replace(self.source, order=in_order)
        grid = self.grid if full_batches and self.grid else Grid(micro_batches * self.micro, self.micro)
        span = (0, None if source.rows is None else grid.batches(source.rows), 1)
        return Feed(source, grid, span, self.team.world.tell)

    @contextmanager
    def resting(self) -> Iterator[None]:
        """Puts the model into eval mode without gradients in the context, and restores buffers and random streams."""
        model, streams = self.model, RngState(self.job.device)
        alone = refusing("the forward or a metric")
        with alone, torch.no_grad(), self.job.keeping(), _evaluating(model), unchanging(model), streams.preserved():
            yield

    def over(self, base: int, micro_batches: Sequence[MicroBatch], use: Callable[[int, int, Any, Any], None]) -> None:
        """Computes the outputs of micro-batches and calls `use` with number, rows, output and batch of each. Numbers
        start at `base`.
        """
        streams, speaks = RngState(self.job.device), self.get_assignment().speaks
        for micro_batch in micro_batches:
            number = base + micro_batch.index
            batch = to_device(micro_batch.batch, self.job.device)
            streams.seed(stream_seed(self.job.seed, _STREAM, number))
            with Chunk([micro_batch], batch).noted, self.job.autocast(), _without_gradients():
                output = self.job.gather_output(self.job.forward(self.model, batch))
                if speaks and not micro_batch.is_dummy:
                    with metric_view():
                        use(number, micro_batch.rows, output, batch)
            HEARTBEAT.beat()

    def at_once(self, number: int, base: int, micro_batches: Sequence[MicroBatch], use: Callable[..., None]) -> None:
        """Gathers the outputs of a global batch and calls `use` with its number, rows, outputs and no batch, on the
        worker with its first micro-batch.
        """
        outputs: list[tuple[int, int, Any]] = []
        self.over(base, micro_batches, lambda index, rows, output, _: outputs.append((index - base, rows, output)))
        units = self.job.units
        if units is not None and self.get_assignment().speaks:
            units.declare("the outputs of a global batch in evaluate()", check=False, kind="outputs")
            columns, _ = gather_outputs(units, outputs, self.job.device)
            if any(index == 0 for index, _, _ in outputs):
                with metric_view():
                    use(number, len(columns[0]), filled(outputs[0][2], columns), None)


def evaluate(sweep: EvalPass, metric: Any) -> dict[str, Any]:
    """What `metric` finds by name over all rows, and the number of rows as ``n``. Where the loss is over the whole
    global batch, it gets what that gets: the outputs of one global batch after another, and None. Collective.

    Raises MetricError where metrics are not (sum, count) by name, or their names differ between rows or workers; where
    objects do not say how their states merge, or what of output and batch they take. DatasetError where the dataset is
    longer on some workers, or has other rows.
    """
    group = sweep.team.group
    group.declare(f"evaluate(){sweep.of}", kind="evaluate()")
    compare_rows(group, sweep.source, sweep.team.world.tell, "the dataset of evaluate()")
    rows, base, first, over_batch = 0, 0, list[list[str]](), sweep.job.over is not None
    if over_batch and sweep.grid is None:
        what = 'with loss_over="batch" the metric needs complete global batches, but this Trainer has no global batch'
        raise UsageError(what, "pass global_batch= to the Trainer")
    made = metric if isinstance(metric, Means) else MetricObjects.of(metric, sweep.job.device)
    with made or Means(AnnotatedCallable(metric, "metric")) as metrics, sweep.resting():
        feed = sweep.feed(8 * group.size, over_batch)
        for number, (_, count, micro_batches) in enumerate(feed.all(sweep.get_assignment())):
            first = first or first_rows(feed)
            if over_batch:
                sweep.at_once(number, base, micro_batches, metrics.add)
            else:
                sweep.over(base, micro_batches, metrics.add)
            base += -(-count // sweep.micro)
            rows += count
        compare_read(group, rows, feed, first, "the dataset of evaluate()")
        return {**metrics.together(group, base), "n": rows}


class Means:
    """Collects a metric function's ``{name: (sum, count)}`` of each micro-batch."""

    def __init__(self, metric: AnnotatedCallable) -> None:
        self._metric = metric
        self._sums: dict[int, dict[str, tuple[float, float]]] = {}

    def __enter__(self) -> Means:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def add(self, number: int, rows: int, output: Any, batch: Any) -> None:
        """Computes the metric of one micro-batch. Raises MetricError if the result is not (sum, count) by name."""
        result = self._by_name(self._metric(output, batch), rows)
        if not isinstance(result, Mapping) or not all(map(is_pair, result.values())):
            what = f"the metric returned {' '.join(repr(result).split()):.60}"
            raise MetricError(what, "return {name: (sum, count)}")
        sums = {str(name): (float(total), float(count)) for name, (total, count) in result.items()}
        for name, (_, count) in sums.items():
            if not count >= 0.0:
                what = f"the metric returned {count:g} as the count of {name!r} for {rows} row{'s' if rows > 1 else ''}"
                raise MetricError(what, "return {name: (sum, count)}, where count is the number of summed rows")
        self._sums[number] = sums

    def _by_name(self, result: Any, rows: int) -> Any:
        return result

    def together(self, group: Group, micro_batches: int) -> dict[str, float]:
        """Returns the mean of each metric. All workers get all sums and add them in grid order: equal bits on any
        number of workers. Collective.
        """
        own_names = sorted({tuple(sorted(sums)) for sums in self._sums.values()})
        all_names = [tuple(names) for worker in group.gather_json(own_names) for names in worker]
        if len(set(all_names)) > 1:
            one, other = sorted(set(all_names))[:2]
            what = f"the metric returned {list(one)} for some rows, but {list(other)} for others"
            raise MetricError(what, "return the same names for all rows, with count 0 where there is nothing to count")
        names = all_names[0]
        table = torch.zeros(micro_batches, 2 * len(names), dtype=torch.float64)
        for index, sums in self._sums.items():
            table[index] = torch.tensor([part for name in names for part in sums[name]], dtype=torch.float64)
        total = torch.zeros(2 * len(names), dtype=torch.float64)
        for row in group.sum(table):
            total += row
        pairs = zip(total[0::2].tolist(), total[1::2].tolist(), strict=True)
        return {name: part / count if count else math.nan for name, (part, count) in zip(names, pairs, strict=True)}


class LossMean(Means):
    """Collects the sum and count of the training's loss, as ``loss``, and of the metrics that it returns."""

    def _by_name(self, result: Any, rows: int) -> Any:
        if not isinstance(result, tuple | list):
            return {"loss": (result * rows, rows)}
        total, count, *metrics = result
        return {"loss": (total, count), **(metrics[0] if metrics else {})}
