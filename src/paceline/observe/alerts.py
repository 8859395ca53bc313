"""Generates Prometheus alert rules and a Grafana dashboard."""

from __future__ import annotations

import json
from typing import Any

from paceline.observe.metrics import METRICS, Metric

# Name, expression, how long it must hold, meaning.
ALERTS = (
    ("PacelineFailed", "paceline_failed == 1", "0s", "the run failed: see its report"),
    (
        "PacelineStandsStill",
        "paceline_running == 1 and time() - paceline_last_event_timestamp_seconds > 300",
        "1m",
        "nothing has happened for five minutes: see its console, and the stacks in its folder",
    ),
    ("PacelineLossNotFinite", "paceline_loss != paceline_loss", "0s", "the loss is NaN or infinite"),
    ("PacelineWorkerLost", "increase(paceline_lost_workers_total[10m]) > 0", "0s", "a worker was lost, others go on"),
    (
        "PacelineSlow",
        "paceline_samples_per_second < 0.5 * max_over_time(paceline_samples_per_second[1h]) and paceline_running == 1",
        "5m",
        "less than half of the rows a second of the best of the last hour",
    ),
    (
        "PacelineGoodputLow",
        "paceline_goodput_ratio < 0.8 and paceline_running == 1",
        "30m",
        "see paceline_account_seconds",
    ),
)
UNITS = {"s": "s", "B": "bytes", "1/s": "short", "1": "short"}
WIDE, HIGH = 8, 7  # width and height of a panel, in Grafana's grid of 24 columns


def rules() -> str:
    """The text of a file of Prometheus alert rules."""
    lines = ["# Made by `paceline metrics --rules`.", "groups:", "- name: paceline", "  rules:"]
    for name, expression, lasts, means in ALERTS:
        lines += [
            f"  - alert: {name}",
            f"    expr: {json.dumps(expression)}",
            f"    for: {lasts}",
            f"    annotations: {{summary: {json.dumps('{{ $labels.run }}: ' + means)}}}",
        ]
    return "\n".join(lines)


def query(metric: Metric) -> str:
    """The PromQL query of a panel: the metric's value, or a counter's growth per second."""
    chosen = f'{metric.name}{{run=~"$run"}}'
    return f"rate({chosen}[1m])" if metric.counter else chosen


def dashboard() -> str:
    """The JSON of a Grafana dashboard with a panel for each metric."""
    source = {"type": "prometheus", "uid": "${source}"}
    panels: list[dict[str, Any]] = []
    for panel_index, metric in enumerate(METRICS):
        unit = "Bps" if metric.counter and metric.unit == "B" else "short" if metric.counter else UNITS[metric.unit]
        row, column = divmod(panel_index, 24 // WIDE)
        panels.append(
            {
                "id": panel_index + 1,
                "type": "timeseries",
                "title": metric.name.removeprefix("paceline_").replace("_", " "),
                "description": metric.meaning,
                "datasource": source,
                "gridPos": {"x": WIDE * column, "y": HIGH * row, "w": WIDE, "h": HIGH},
                "fieldConfig": {"defaults": {"unit": unit}, "overrides": []},
                "targets": [
                    {
                        "refId": "A",
                        "datasource": source,
                        "expr": query(metric),
                        "legendFormat": " ".join(
                            f"{{{{{label}}}}}" for label in ("run", "trainer", metric.label) if label
                        ),
                    }
                ],
            }
        )
    chosen = {"name": "run", "type": "query", "datasource": source, "query": "label_values(paceline_step, run)"}
    variables = [
        {"name": "source", "type": "datasource", "query": "prometheus"},
        {**chosen, "includeAll": True, "multi": True, "refresh": 2},
    ]
    return json.dumps(
        {
            "title": "Paceline",
            "uid": "paceline",
            "schemaVersion": 39,
            "refresh": "5s",
            "time": {"from": "now-1h", "to": "now"},
            "templating": {"list": variables},
            "panels": panels,
        },
        indent=1,
    )
