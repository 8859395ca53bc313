"""Sends metrics and traces to an OpenTelemetry collector, over OTLP/HTTP."""

from __future__ import annotations

import logging
import re
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from paceline.observe.metrics import unit_of
from paceline.observe.trackers.tracker import FACTS, LoggedRun, Tracker, prefix_of, split_texts

_REFUSED = re.compile(r"[^\w.\-]", re.ASCII)  # characters that names of instruments may not have
_EVENTS = 1000  # events of a span
# Events of the journal that take time, with the field of their seconds. They become spans.
_SPANS = {"step": "seconds", "checkpoint": "took"}
_LEFT_OUT = {"start", "grid", "config", "environment", "log", "media", "memory", "figures", "worker", "account", "each"}


class OTLP(Tracker):
    """Sends each value as a gauge, and a trace of the run: a span for each attempt, with spans for records of steps and
    for checkpoints, and other events of the journal as its events.

    `target` is the base address of a collector, else the variables OTEL_EXPORTER_OTLP_* are used. What a collector does
    not take is sent again later. Spans and values have the times of the journal. All attempts are in one trace.
    """

    uploads = False
    _metric_exporter: Any = None

    def begin(self, run: LoggedRun) -> str | None:
        """Opens the connections. The identifier is that of the trace."""
        from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.util.instrumentation import InstrumentationScope

        if self._metric_exporter is None:
            # Its exporters would print each failure, which the feed does once.
            logging.getLogger("opentelemetry.exporter.otlp").addHandler(logging.NullHandler())
            base = self.target.rstrip("/") if self.target else None
            self._metric_exporter = OTLPMetricExporter(endpoint=base and f"{base}/v1/metrics")
            self._span_exporter = OTLPSpanExporter(endpoint=base and f"{base}/v1/traces")
            attributes = {"service.name": "paceline", "paceline.run": run.name, "paceline.script": run.script}
            self._resource, self._scope = Resource.create(attributes), InstrumentationScope("paceline")
            self._trace = run.id or secrets.token_hex(16)
            self._attempt, self._began, self._facts = self._span_context(), 0.0, dict[str, Any]()
            self._events: list[Any] = []
        self._points: dict[str, list[Any]] = {}
        self._spans: list[Any] = []
        return self._trace

    def config(self, values: Mapping[str, Any]) -> None:
        """Keeps the config for the attributes of the attempt's span."""
        self._facts |= {name if name.startswith(FACTS) else f"config.{name}": value for name, value in values.items()}

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        """Takes numbers as points of gauges, which `flush` sends; texts become events of the span."""
        from opentelemetry.sdk.metrics.export import NumberDataPoint

        numbers, texts = split_texts(values)
        for name, value in numbers.items():
            prefix = prefix_of(name)
            trainer = {"trainer": int(prefix[8:-1])} if prefix else {}
            point = NumberDataPoint(trainer, 0, _nanoseconds(self.at), value)
            self._points.setdefault(name.removeprefix(prefix), []).append(point)
        if texts:
            self._add_event("log", {**texts, "step": step})

    def media(self, step: int, name: str, event: Mapping[str, Any]) -> None:
        """Takes the path of a picture, or mean and deviation of a histogram."""
        if event["kind"] == "histogram":
            self.write(step, {f"{name}.mean": event["mean"], f"{name}.deviation": event["deviation"]})
        else:
            self._add_event("media", {name: event["file"], "step": step})

    def event(self, event: Mapping[str, Any]) -> None:
        """Makes a span or an event of a span from an event of the journal."""
        kind = event["event"]
        if kind == "start":
            self._end_attempt()
            self._attempt, self._began = self._span_context(), event.get("began") or event["at"]
        self._began = self._began or event["at"]  # another process has begun the attempt
        super().event(event)
        about = _attributes({key: value for key, value in event.items() if key not in ("at", "event")})
        if kind in _SPANS:
            seconds = event.get(_SPANS[kind]) or 0.0
            name = "steps" if kind == "step" else kind
            self._add_span(name, self._span_context(), event["at"] - seconds, event["at"], about)
        elif kind not in _LEFT_OUT:
            self._add_event(kind, about)

    def flush(self) -> None:
        """Sends metrics and spans. Raises ConnectionError."""
        from opentelemetry.sdk.metrics.export import MetricExportResult
        from opentelemetry.sdk.trace.export import SpanExportResult

        points, self._points = self._points, {}
        spans, self._spans = self._spans, []
        if points and self._metric_exporter.export(self._metrics(points)) is not MetricExportResult.SUCCESS:
            raise ConnectionError("the collector did not take metrics")
        if spans and self._span_exporter.export(spans) is not SpanExportResult.SUCCESS:
            raise ConnectionError("the collector did not take spans")

    def close(self) -> None:
        """Sends the attempt's span, and closes the connections."""
        self._end_attempt()
        self.flush()
        self._span_exporter.shutdown()
        self._metric_exporter.shutdown()
        self._metric_exporter = None

    def _metrics(self, points: Mapping[str, Sequence[Any]]) -> Any:
        from opentelemetry.sdk.metrics.export import Gauge, Metric, MetricsData, ResourceMetrics, ScopeMetrics

        metrics = [
            Metric(f"paceline.{_REFUSED.sub('_', name.replace('/', '.'))}", None, unit_of(name), Gauge(values))
            for name, values in points.items()
        ]
        return MetricsData([ResourceMetrics(self._resource, [ScopeMetrics(self._scope, metrics, "")], "")])

    def _end_attempt(self) -> None:
        from opentelemetry.trace import Status, StatusCode

        if not self._began:
            return
        status = Status(StatusCode.UNSET if self.has_succeeded else StatusCode.ERROR)
        self._add_span("attempt", self._attempt, self._began, self.at, self._facts, status=status, events=self._events)
        self._began, self._events, self._facts = 0.0, [], {}

    def _add_span(
        self, name: str, context: Any, begin: float, end: float, attributes: Mapping[str, Any], **more: Any
    ) -> None:
        from opentelemetry.sdk.trace import ReadableSpan

        parent = None if context is self._attempt else self._attempt
        about: dict[str, Any] = {"resource": self._resource, "instrumentation_scope": self._scope, **more}
        times = {"start_time": _nanoseconds(begin), "end_time": _nanoseconds(end)}
        self._spans.append(ReadableSpan(name, context, parent, attributes=dict(attributes), **times, **about))

    def _add_event(self, name: str, attributes: Mapping[str, Any]) -> None:
        from opentelemetry.sdk.trace import Event

        if len(self._events) < _EVENTS:
            self._events.append(Event(name, dict(attributes), _nanoseconds(self.at)))

    def _span_context(self) -> Any:
        from opentelemetry.trace import SpanContext, TraceFlags

        flags = TraceFlags(TraceFlags.SAMPLED)
        return SpanContext(int(self._trace, 16), int.from_bytes(secrets.token_bytes(8), "big"), False, flags)


def _nanoseconds(seconds: float) -> int:
    return int(seconds * 1e9)


def _attributes(fields: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Numbers and texts of an event, also those of its tables, as attributes."""
    attributes: dict[str, Any] = {}
    for name, value in fields.items():
        if isinstance(value, dict):
            attributes |= _attributes(value, f"{prefix}{name}.")
        elif isinstance(value, bool | int | float | str) or _are_numbers(value):
            attributes[prefix + name] = value
    return attributes


def _are_numbers(value: Any) -> bool:
    return isinstance(value, list) and {type(item) for item in value} == {int}
