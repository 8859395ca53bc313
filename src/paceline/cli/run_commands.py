"""Commands for existing runs: stop, stacks, profile, logs, watch, doctor, trace, report and others."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

from paceline.observe.report import write_report


def late(module: str, name: str) -> Callable[..., Any]:
    """A function that is imported when it is called: most need what the other commands do not."""
    return lambda **options: getattr(import_module(f"paceline.{module}"), name)(**options)


def _metrics(what: str) -> str:
    from paceline.observe import alerts, metrics

    return {"table": metrics.table, "rules": alerts.rules, "dashboard": alerts.dashboard}[what]()


def _of_run(option: Callable[..., Any]) -> None:
    """Which run that goes on."""
    option("run", metavar="RUN|HOST:PORT", help="its folder, or where its coordinator listens")
    option("--token-file", metavar="FILE", help="its token, where its folder is not here")


def returning(add: Callable[..., Any]) -> None:
    """The commands for a run that others started."""
    option = add(
        "stop",
        late("launch.remote_commands", "stop"),
        "stop a run with a checkpoint, from anywhere",
        "examples:\n"
        "  paceline stop runs/a                                        the same command as before goes on with it\n"
        "  paceline stop 10.0.0.7:29400 --token-file token --no-wait",
        "Waits until the run has ended.",
    )
    _of_run(option)
    option("--no-wait", dest="wait", action="store_false", help="ask, and do not wait for its end")
    option = add(
        "stacks",
        late("launch.remote_commands", "stacks"),
        "say where each worker of a run stands, without disturbing it",
        "examples:\n  paceline stacks runs/a\n  paceline stacks 10.0.0.7:29400 --token-file token",
        "All stacks, and the last 1,000 collectives of each worker, are in the run's folder then, under stacks/.",
    )
    _of_run(option)
    option = add(
        "profile",
        late("launch.remote_commands", "profile"),
        "profile the next steps of a run with torch's profiler",
        "examples:\n  paceline profile runs/a\n  paceline profile runs/a --steps 2 --workers 0,3",
        "A file for each worker, in the run's folder under profiles/: open it at https://ui.perfetto.dev.",
    )
    _of_run(option)
    option("--steps", least=1, default=5, help="how many, from the next one on (default: 5)")
    option("--workers", metavar="A,B,..", help="of these alone (default: all)")
    option = add(
        "logs",
        late("launch.remote_commands", "logs"),
        "show what the workers of a run print",
        "examples:\n  paceline logs runs/a\n  paceline logs -f -n 20 runs/a",
        "Each line with the worker whose it is; those of other hosts where their folders are here.",
    )
    option("run", metavar="RUN", help="its folder")
    option("-f", "--follow", action="store_true", help="go on until the run has ended")
    option("-n", "--lines", least=0, metavar="N", help="of what is there only the last N lines of each (default: all)")


def showing(add: Callable[..., Any]) -> None:
    """The commands that read a run's journal."""
    option = add(
        "metrics",
        _metrics,
        "print what a run is measured by, and files for Prometheus and Grafana",
        "examples:\n"
        "  paceline metrics --rules > paceline-rules.yml           for rule_files of prometheus.yml\n"
        "  paceline metrics --dashboard > paceline-dashboard.json  to import into Grafana",
    )
    for what, does in {"rules": "alert rules", "dashboard": "a dashboard"}.items():
        option(f"--{what}", dest="what", action="store_const", const=what, default="table", help=f"print {does}")
    option = add(
        "watch",
        late("observe.watch", "watch"),
        "show a run in the terminal while it trains, or as it ended",
        "examples:\n  paceline watch\n  paceline watch runs/a\n  paceline watch 10.0.0.7:8765 --key-file reading_key",
        "Follows the journal in the run folder, or where the run's --page is; Ctrl-C ends the watching alone.",
    )
    where = "the run folder (default: the newest under runs/), or HOST:PORT of its live page"
    option("folder", type=Path, nargs="?", metavar="RUN", help=where)
    option("--key-file", type=Path, metavar="FILE", help="a copy of reading_key of that run's folder (default: asked)")
    option("--once", action="store_true", help="show it once, as it is now")
    option = add(
        "doctor",
        late("launch.engines.preflight_hosts", "doctor"),
        "say why a run is slow, or failed; or, without one, whether a run can begin here",
        "examples:\n"
        "  paceline doctor runs/a\n"
        "  paceline doctor                      this host: versions, memory, /dev/shm, address, who has started us\n"
        "  paceline doctor --hosts a,b,c        these, over ssh: also their clocks, and the links between them",
        "Of a run the first verdict with its figures, from its journal, and what a step would take if it were mended.",
    )
    option("folder", nargs="?", type=Path, metavar="RUN", help="the run folder (default: look before a run)")
    option("--hosts", metavar="A,B,..", help="look at these, over ssh, and at the links between them")
    option("--python", default="python3", metavar="PATH", help="their Python (default: python3)")
    option("--engine", metavar="OPTIONS", help="options for ssh, as --engine='-F config'")
    option("--here", dest="serves", action="store_true", help=argparse.SUPPRESS)
    option = add(
        "trace",
        late("observe.timeline", "trace"),
        "write a timeline of a run's workers, for Perfetto",
        "examples:\n  paceline trace runs/a\n  paceline trace runs/a --steps 100:120 -o trace.json",
        "Open it at https://ui.perfetto.dev. Made of the journal, and of what `paceline stacks` keeps.",
    )
    option("folder", type=Path, metavar="RUN", help="the run folder")
    option(
        "-o", "--out", type=Path, metavar="FILE", help="the file to write, gzipped if .gz (default RUN/trace.json.gz)"
    )
    option("--steps", metavar="A:B", help="those steps alone")
    option = add(
        "runs",
        late("observe.runs", "runs"),
        "list runs: plan, steps, loss, metrics, how each ended",
        "examples:\n  paceline runs\n  paceline runs /shared/runs runs/a --json",
        "A line each, the oldest first, of their journals alone.",
    )
    option("folders", type=Path, nargs="*", metavar="FOLDER", help="runs, or folders of runs (default: runs/)")
    option("--json", dest="as_json", action="store_true", help="print a JSON list")
    option = add(
        "compare",
        late("observe.runs", "compare"),
        "say what differs between runs, and what each came to",
        "examples:\n  paceline compare runs/a runs/b\n  paceline compare runs/* --html compared.html",
        "Configuration, plan, commit, script, packages and grid; loss and metrics at the same steps; speed.",
    )
    option("folders", type=Path, nargs="+", metavar="RUN", help="the run folders")
    option("--html", type=Path, metavar="FILE", help="write a page, too, that overlays their curves")
    does = "write RUN/report.html again and print its summary"
    option = add("report", write_report, does, "example:\n  paceline report runs/a")
    option("folder", type=Path, metavar="RUN", help="the run folder")
