"""The table of a run's metrics, for TensorBoard, Prometheus, the dashboard and the docs.

Each metric is computed from a `Summary` of the journal up to a numbered event, so all readers that have read up to the
same event get the same values. Metrics of steps come from the newest record of steps; a logger gets those of every
record.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

from paceline.base.journal import Event
from paceline.observe.summary import Summary

MOST = 1000  # values of a label, at most
ModelValues = Mapping[str, float | None]  # {label: value}; the label is "" if there is none


@dataclass(frozen=True)
class Metric:
    """A metric of a run.

    `name` is Prometheus's name; `tag` is TensorBoard's, where {} stands for the `label` (empty: the metric is not for
    TensorBoard). Its values come from a summary (`of`) or from the newest record of steps (`record`). A `counter` only
    grows.
    """

    name: str
    unit: str
    meaning: str
    tag: str = ""
    label: str = ""
    counter: bool = False
    of: Callable[[Summary], ModelValues] | None = None
    record: Callable[[Event], ModelValues] | None = None

    def values(self, summary: Summary) -> Iterator[tuple[tuple[str, str], float]]:
        """Yields ((trainer, label), value); the trainer is "" unless there are several."""
        if self.of is not None:
            by_label = {("", label): value for label, value in self.of(summary).items()}
        else:
            newest = {trainer: records[-1] for trainer, records in summary.steps.items()}
            by_label = {
                (trainer, label): value
                for trainer, record in newest.items()
                for label, value in (self.record(record) if self.record else {}).items()
            }
        yield from ((key, math.nan if value is None else value) for key, value in islice(by_label.items(), MOST))


def _of(field: str) -> Callable[[Event], ModelValues]:
    return lambda record: {"": record.get(field)} if field in record else {}


def _known(field: str) -> Callable[[Event], ModelValues]:
    return lambda record: {"": record[field]} if record.get(field) is not None else {}


def _a_second(field: str) -> Callable[[Event], ModelValues]:
    return lambda r: {"": r[field] / r["seconds"]} if r.get(field) and r.get("seconds") else {}


def _a_step(record: Event) -> ModelValues:
    return {"": (record.get("seconds") or 0.0) / record["steps"]} if record.get("steps") else {}


def _parts(record: Event) -> ModelValues:
    steps = record.get("steps")
    return {part: seconds / steps for part, seconds in (record.get("time") or {}).items()} if steps else {}


def _memory(event: Event) -> ModelValues:
    return {part: float(event[part]) for part in ("parameters", "gradients", "optimizer", "process") if event.get(part)}


METRICS = (
    Metric("paceline_loss", "1", "mean loss of the latest step", tag="loss", record=_of("loss")),
    Metric("paceline_learning_rate", "1", "learning rate of the first parameter group", tag="lr", record=_of("lr")),
    Metric("paceline_gradient_norm", "1", "norm of the mean gradient", tag="grad_norm", record=_known("grad_norm")),
    Metric(
        *("paceline_step_metric", "1", "metrics that the loss returns, by name"),
        tag="{}",
        label="name",
        record=lambda record: record.get("metrics") or {},
    ),
    Metric(
        *("paceline_value", "1", "latest values of `evaluate()` and `trainer.log()`, by name"),
        tag="{}",
        label="name",
        of=lambda s: {name: curve[-1][1] for name, curve in s.series.items()},
    ),
    Metric(
        *("paceline_samples_per_second", "1/s", "rows trained on per second"),
        tag="throughput/samples_per_s",
        record=_a_second("samples"),
    ),
    Metric(
        *("paceline_tokens_per_second", "1/s", "tokens trained on per second, for a `Tokens` dataset"),
        tag="throughput/tokens_per_s",
        record=_a_second("tokens"),
    ),
    Metric(
        *("paceline_model_flops_per_second", "1/s", "floating-point operations of the model per second, all workers"),
        tag="throughput/flops_per_s",
        of=lambda s: {"": s.flops_per_second} if s.flops_per_second else {},
    ),
    Metric(
        *("paceline_device_utilisation", "1", "model operations as a fraction of the peak of all devices"),
        tag="throughput/mfu",
        of=lambda s: {"": s.utilisation} if s.utilisation is not None else {},
    ),
    Metric(
        *("paceline_gpu_busy", "1", "fraction of the last second during which the GPU of worker 0 computed"),
        tag="gpu/busy",
        record=_known("gpu"),
    ),
    Metric("paceline_step_seconds", "s", "seconds per step on worker 0", tag="time/step", record=_a_step),
    Metric(
        *(
            "paceline_step_part_seconds",
            "s",
            "seconds per step on worker 0, by part: data, compute, reduce, update, other",
        ),
        tag="time/{}",
        label="part",
        record=_parts,
    ),
    Metric(
        *("paceline_memory_bytes", "B", "peak memory of worker 0 by kind, at the end of a loop"),
        tag="memory/{}",
        label="kind",
        of=lambda s: _memory(s.memory[-1]) if s.memory else {},
    ),
    Metric("paceline_step", "1", "optimizer steps of the first trainer", of=lambda s: {"": s.steps_done}),
    Metric(
        *("paceline_steps_total", "1", "computed steps, including repeated ones"),
        counter=True,
        of=lambda s: {"": s.made["steps"]},
    ),
    Metric(
        *("paceline_samples_total", "1", "rows trained on, including those of repeated steps"),
        counter=True,
        of=lambda s: {"": s.made["samples"]},
    ),
    Metric(
        *("paceline_bytes_total", "B", "bytes that worker 0 passed to collectives"),
        counter=True,
        of=lambda s: {"": s.made["bytes"]},
    ),
    Metric(
        *("paceline_link_bytes_total", "B", "bytes sent from one host to another, by link (`a to b`)"),
        label="link",
        counter=True,
        of=lambda s: s.sent,
    ),
    Metric("paceline_workers", "1", "workers in the team", of=lambda s: {"": sum(s.up.values())}),
    Metric(
        *("paceline_spare_workers", "1", "workers that are ready to take the place of a lost one"),
        of=lambda s: {"": float(len(s.ready_spares))} if s.spares and s.outcome is None else {},
    ),
    Metric(
        *("paceline_worker_up", "1", "1 if the worker is in the team, else 0"),
        label="worker",
        of=lambda s: {worker: float(up) for worker, up in s.up.items()},
    ),
    Metric(
        *("paceline_worker_compute_seconds_total", "s", "seconds that a worker spent in forward and backward passes"),
        label="worker",
        counter=True,
        of=lambda s: s.made_by["computed"],
    ),
    Metric(
        *("paceline_worker_waited_for_seconds_total", "s", "seconds that the other workers waited for a worker"),
        label="worker",
        counter=True,
        of=lambda s: s.made_by["waited_for"],
    ),
    Metric(
        *("paceline_lost_workers_total", "1", "workers that were lost while the others continued"),
        counter=True,
        of=lambda s: {"": float(sum(len(event.get("workers") or []) for event in s.lost))},
    ),
    Metric("paceline_attempts_total", "1", "starts of the run", counter=True, of=lambda s: {"": len(s.attempts)}),
    Metric(
        *("paceline_goodput_ratio", "1", "fraction of the wall-clock time that advanced training"),
        of=lambda s: {"": s.goodput} if s.goodput is not None else {},
    ),
    Metric(
        *("paceline_account_seconds", "s", "wall-clock seconds by account, see goodput"),
        label="account",
        of=lambda s: s.account,
    ),
    Metric(
        *("paceline_checkpoint_step", "1", "step of the newest checkpoint"),
        of=lambda s: {"": s.checkpoints[-1].get("step")} if s.checkpoints else {},
    ),
    Metric("paceline_running", "1", "1 until the run has ended, then 0", of=lambda s: {"": float(s.outcome is None)}),
    Metric(
        *("paceline_failed", "1", "1 if the last attempt of the run failed, else 0"),
        of=lambda s: {"": float(s.outcome is not None and s.outcome["event"] == "failed")},
    ),
    Metric(
        "paceline_last_event_timestamp_seconds",
        "s",
        "Unix time of the newest event",
        of=lambda s: {"": s.last_event_at},
    ),
    Metric(
        *("paceline_journal_events_total", "1", "number of the newest journal event in these metrics"),
        counter=True,
        of=lambda s: {"": s.number},
    ),
)


RESERVED = {metric.tag for metric in METRICS}
_UNITS = {metric.tag: metric.unit for metric in METRICS if metric.tag}


def unit_of(tag: str) -> str:
    """The unit of a value by its tag: that of the table for Paceline's own, else 1."""
    return _UNITS.get(tag) or _UNITS.get(tag.partition("/")[0] + "/{}", "1")


def values_of(event: Event) -> dict[str, float | str]:
    """The values of an event for loggers, by TensorBoard's tag; a value that was not finite is NaN.

    Names that the user has given are kept, with the prefix own/ if Paceline has a tag of that name.
    """
    values: dict[str, Any] = {}
    user_values: Mapping[str, Any] = {}
    if event["event"] == "step":
        for metric in METRICS:
            if metric.record is not None and metric.tag != "{}":
                values |= {metric.tag.format(label): value for label, value in metric.record(event).items()}
        user_values = event.get("metrics") or {}
    elif event["event"] == "memory":
        values |= {f"memory/{kind}": value for kind, value in _memory(event).items()}
    elif event["event"] in ("evaluate", "log"):
        user_values = event.get("results") or event.get("values") or {}
    for name, value in user_values.items():
        if value is None or (isinstance(value, int | float | str) and not (name == "n" and "results" in event)):
            values[f"own/{name}" if name in RESERVED else name] = value
    return {tag: math.nan if value is None else value for tag, value in values.items()}


def flops_of(record: Event, per_row: float, peak: float) -> dict[str, float]:
    """What loggers get of a record of steps if the operations of the model `per_row` are known: operations per second
    and, if all devices have a known `peak` together, the fraction of it.
    """
    rate = per_row * (_a_second("samples")(record).get("") or 0.0)
    return {"throughput/flops_per_s": rate, **({"throughput/mfu": rate / peak} if peak else {})} if rate else {}


def table() -> str:
    """The table of metrics in docs/reference/journal.md, as Markdown."""
    rows = ["| Prometheus | TensorBoard | unit | meaning |", "| --- | --- | --- | --- |"]
    for metric in METRICS:
        labels = f"{{{metric.label}}}" if metric.label else ""
        tag = metric.tag.replace("{}", metric.label.upper() or "{}")
        shown = f"`{tag}`" if tag else ""
        rows.append(f"| `{metric.name}{labels}` | {shown} | {metric.unit} | {metric.meaning} |")
    return "\n".join(rows)
