"""`paceline runs` and `paceline compare`: lists and compares runs."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from paceline.base.console import in_one_line, markup
from paceline.base.journal import NAME, plain, replace_file
from paceline.base.text import duration, number, plural
from paceline.errors import PacelineError, UsageError
from paceline.observe.charts import overlay, stroke
from paceline.observe.page import HEAD, STYLE, curves_of, section
from paceline.observe.summary import Summary

LINES = 8  # steps at which runs are compared, at most
_NONE = "-"
_WIDE = 40  # characters of a value in a table

Rows = list[list[str]]


def runs(folders: Sequence[Path] = (), as_json: bool = False) -> str:
    """Lists the runs in these folders, or one level below them, oldest first, one per line.

    Returns a table, or with `as_json` a JSON list. Raises UsageError if the folders contain no run.
    """
    paths = [Path(path) for folder in folders or [Path("runs")] for path in _runs_in(Path(folder))]
    run_folders = {path.resolve(): path for path in paths}.values()  # each run once
    if not run_folders:
        where = ", ".join(map(str, folders)) or "runs/"
        raise UsageError(
            f"{in_one_line(where)} contains no run", "pass a folder that contains runs: paceline runs FOLDER"
        )
    entries = sorted(
        (_run_entry(folder) for folder in run_folders), key=lambda entry: (entry["began"] or 0.0, entry["run"])
    )
    if as_json:
        return json.dumps(plain(entries), indent=1)
    heads = ["run", "started", "plan", "workers", "steps", "loss", "metrics", "seconds", "ended"]
    return columns([heads, *([*_line(entry)] for entry in entries)])


def _runs_in(folder: Path) -> list[Path]:
    if (folder / NAME).exists():
        return [folder]
    return sorted(path.parent for path in folder.glob(f"*/{NAME}"))


def _run_entry(folder: Path) -> dict[str, Any]:
    """The table entry of a run; if its journal cannot be read, `ended` says why."""
    unknown: dict[str, Any] = dict.fromkeys(("began", "plan", "workers", "steps", "loss", "metrics", "seconds"))
    try:
        summary = Summary(folder)
    except PacelineError as error:  # for example, a later version wrote it
        return {"run": str(folder), **unknown, "ended": error.what}
    losses = list(summary.losses.values())
    began = summary.attempts[0][0] if summary.attempts else None
    facts: dict[str, Any] = {"plan": summary.start.get("plan"), "workers": summary.workers, "steps": summary.steps_done}
    facts |= {"loss": losses[0][1] if losses else None, "metrics": _last(summary), "seconds": summary.wall_seconds}
    return {"run": str(folder), "began": began, **facts, "ended": summary.ending}


def _last(summary: Summary) -> dict[str, float]:
    """The last evaluated and logged values, or else the metrics of the last step."""
    last_values = {name: curve[-1][1] for name, curve in summary.series.items()}
    records = next(iter(summary.steps.values()), [])
    return last_values or dict((records[-1].get("metrics") if records else None) or {})


def _line(entry: Mapping[str, Any]) -> list[str]:
    when = f"{datetime.fromtimestamp(entry['began']):%Y-%m-%d %H:%M}" if entry["began"] else _NONE
    loss = number(entry["loss"]) if entry["steps"] else _NONE
    metrics = ", ".join(f"{name} {number(value)}" for name, value in (entry["metrics"] or {}).items()) or _NONE
    counts = [str(entry[key]) if entry[key] is not None else _NONE for key in ("plan", "workers", "steps")]
    spent = _NONE if entry["seconds"] is None else f"{entry['seconds']:.1f}"
    return [entry["run"], when, *counts, loss, metrics, spent, entry["ended"]]


def compare(folders: Sequence[Path], html: Path | None = None) -> str:
    """Compares the settings, losses, metrics and speed of two or more runs, as tables.

    With `html`, also writes a page with their curves to that file. Raises UsageError for fewer than two runs.
    """
    summaries = [Summary(Path(folder)) for folder in folders]
    if len(summaries) < 2:
        raise UsageError("compare needs at least two run folders", "pass two or more: paceline compare runs/a runs/b")
    differences, steps, speeds = _made(summaries), _at_steps(summaries), _fast(summaries)
    if html is not None:
        replace_file(html, _page(summaries, {"Differences": differences, "Speed": speeds}))
    heads = ["", *(str(summary.folder) for summary in summaries)]
    parts = [columns([heads, *differences])] if differences else ["the settings of the runs do not differ"]
    return "\n\n".join([*parts, *(columns([heads, *rows]) for rows in (steps, speeds) if rows)])


def _made(summaries: Sequence[Summary]) -> Rows:
    """The facts that differ between runs, as rows; "-" stands for a fact that a run's journal does not have."""
    columns = [_facts(summary) for summary in summaries]
    names = dict.fromkeys(name for column in columns for name in column)
    rows = [[name, *(_short(column.get(name)) for column in columns)] for name in names]
    return [
        row for row, name in zip(rows, names, strict=True) if len({json.dumps(plain(c.get(name))) for c in columns}) > 1
    ]


def _facts(summary: Summary) -> dict[str, Any]:
    start, environment = summary.start, summary.environment
    facts: dict[str, Any] = {f"config {name}": value for name, value in summary.config.items()}
    facts |= {"plan": start.get("plan"), "workers": start.get("workers"), "hosts": start.get("hosts")}
    facts |= {f"grid of phase {e.get('trainer')}.{e.get('phase')}": e.get("text") for e in summary.grids}
    facts |= {
        "script": " ".join(summary.script_line),
        "SHA-256 of the script": str(start.get("script_sha256") or "")[:12],
    }
    facts |= {"commit": str(environment.get("commit") or "")[:12] or None, "changes": environment.get("diff")}
    facts |= {"seed": start.get("seed"), "device": start.get("device"), "threads": start.get("threads")}
    versions = {**(environment.get("packages") or {}), **(start.get("versions") or {})}
    return facts | {f"version of {name}": version for name, version in sorted(versions.items())}


def _at_steps(summaries: Sequence[Summary]) -> Rows:
    """Loss and metrics at a few common steps, spread over all of them up to the last."""
    rows: Rows = []
    for name, curves in _together(summaries).items():
        values = [dict(points) for points in curves]
        common = sorted({*values[0]}.intersection(*values[1:]))
        chosen = [common[index * (len(common) - 1) // (LINES - 1)] for index in range(LINES)] if common else []
        for step in dict.fromkeys(chosen):
            rows.append([f"{name} at step {step:.0f}", *(number(values_at[step]) for values_at in values)])
    return rows


def _together(summaries: Sequence[Summary]) -> dict[str, list[Any]]:
    """The curves over steps that all runs have, by name."""
    columns = [
        {n.strip(): p for n, p, counts in curves_of(summary) if counts == "step" and len(p) > 0}
        for summary in summaries
    ]
    return {name: [column[name] for column in columns] for name in columns[0] if all(name in c for c in columns)}


def _fast(summaries: Sequence[Summary]) -> Rows:
    texts: dict[str, Callable[[Summary], str]] = {
        "steps": lambda summary: f"{summary.steps_done:,}",
        "samples": lambda summary: f"{summary.samples:,}",
        "samples per second": lambda summary: (
            number(round(summary.samples_per_second, 1)) if summary.samples_per_second else _NONE
        ),
        "goodput": lambda summary: f"{summary.goodput:.0%}" if summary.goodput is not None else _NONE,
        "total time": lambda summary: duration(summary.wall_seconds),
        "ended": lambda summary: summary.ending,
    }
    return [[name, *(describe(summary) for summary in summaries)] for name, describe in texts.items()]


def _short(value: Any) -> str:
    text = _NONE if value is None else str(value)
    return text if len(text) <= _WIDE else f"{text[: _WIDE - 3]}..."


def columns(rows: Rows) -> str:
    """Formats rows as aligned columns, with control characters made visible."""
    clean = [[in_one_line(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*clean, strict=True)]
    lines = ("  ".join(f"{cell:{wide}}" for cell, wide in zip(row, widths, strict=True)) for row in clean)
    return "\n".join(line.rstrip() for line in lines)


def _page(summaries: Sequence[Summary], tables: Mapping[str, Rows]) -> str:
    """A page with the tables, and with the curves of all runs overlaid."""
    keys = "".join(
        f'<li><svg class="key" viewBox="0 0 10 10" aria-hidden="true"><line class="curve {stroke(run_index)}" x1="0" '
        f'x2="10" y1="5" y2="5"/></svg>{markup(str(summary.folder))}</li>'
        for run_index, summary in enumerate(summaries)
    )
    curves_by_name: dict[str, list[tuple[int, Any]]] = {}
    for run_index, summary in enumerate(summaries):
        for name, points, counts in curves_of(summary):
            if counts == "step" and len(points) > 1:
                curves_by_name.setdefault(name.strip(), []).append((run_index, points))
    charts = "".join(
        f"<figure><figcaption><b>{markup(name)}</b></figcaption>{overlay(name, curves)}</figure>"
        for name, curves in curves_by_name.items()
    )
    body = section("Curves", f'<ul class="legend">{keys}</ul><div class="many">{charts}</div>')
    heads = ["", *(str(summary.folder) for summary in summaries)]
    for title, rows in tables.items():
        lines = "".join(
            f"<tr>{''.join(f'<{tag}>{markup(cell)}</{tag}>' for cell in row)}</tr>"
            for tag, row in [("th", heads), *(("td", row) for row in rows)]
        )
        body += section(title, f"<table>{lines}</table>" if rows else "<p>none</p>")
    name = f"{plural(len(summaries), 'run')} side by side"
    head = f"{HEAD}<title>{name} - Paceline</title><style>{STYLE}</style></head>"
    return f"{head}<body><main><h1>{name}</h1>{body}</main></body></html>\n"
