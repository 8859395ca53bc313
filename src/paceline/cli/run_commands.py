"""Commands for existing runs: stop, stacks, profile, logs, watch, doctor, trace, report and others."""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from paceline.base.console import shown
from paceline.errors import UsageError
from paceline.observe.report import write_report


def late(module: str, name: str) -> Callable[..., Any]:
    """A function that is imported when it is called: most need what the other commands do not."""
    return lambda **options: getattr(import_module(f"paceline.{module}"), name)(**options)


def _real(name: str, least: float, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not least <= value <= 1e12:
        raise UsageError(f"{name} {shown(text)} is not a number from {least:g} on", "write it like 2.5")
    return value


def _metrics(what: str) -> str:
    from paceline.observe import alerts, metrics

    return {"table": metrics.table, "rules": alerts.rules, "dashboard": alerts.dashboard}[what]()


def _of_run(option: Callable[..., Any]) -> None:
    """Which run that goes on."""
    option("run", metavar="RUN|HOST:PORT", help="folder of the run, or address of its coordinator")
    option("--token-file", metavar="FILE", help="copy of the run's token, if its folder is not on this host")


def returning(add: Callable[..., Any]) -> None:
    """The commands for a run that others started."""
    option = add(
        "stop",
        late("launch.remote_commands", "stop"),
        "stop a run with a checkpoint, from anywhere",
        "examples:\n"
        "  paceline stop runs/a                                        the command that started it resumes it\n"
        "  paceline stop 10.0.0.7:29400 --token-file token --no-wait",
        "Returns when the run has ended.",
    )
    _of_run(option)
    option("--no-wait", dest="wait", action="store_false", help="do not wait until the run has ended")
    option = add(
        "stacks",
        late("launch.remote_commands", "stacks"),
        "print where each worker of a run stands, without disturbing it",
        "examples:\n  paceline stacks runs/a\n  paceline stacks 10.0.0.7:29400 --token-file token",
        "Also writes all stacks, and the last 1,000 collectives of each worker, to RUN/stacks/.",
    )
    _of_run(option)
    option = add(
        "profile",
        late("launch.remote_commands", "profile"),
        "profile the next steps of a run with torch's profiler",
        "examples:\n  paceline profile runs/a\n  paceline profile runs/a --steps 2 --workers 0,3",
        "Writes one file per worker to RUN/profiles/; open it at https://ui.perfetto.dev.",
    )
    _of_run(option)
    option("--steps", least=1, default=5, help="number of steps, from the next one on (default: 5)")
    option("--workers", metavar="A,B,..", help="only these workers (default: all)")
    option = add(
        "logs",
        late("launch.remote_commands", "logs"),
        "show what the workers of a run print",
        "examples:\n  paceline logs runs/a\n  paceline logs -f -n 20 runs/a",
        "Each line begins with its worker. Workers of other hosts are included if this host sees their run folders.",
    )
    option("run", metavar="RUN", help="run folder")
    option("-f", "--follow", action="store_true", help="follow the output until the run has ended")
    option("-n", "--lines", least=0, metavar="N", help="start with the last N lines of each worker (default: all)")


def _simulate(what: str | None, machine: str | None, workers: int | None, **given: Any) -> str:
    from paceline.planner.simulate import command

    if what is None or Path(what).suffix != ".py":
        return command(what=what, machine=machine, workers=workers, **given)
    from paceline.launch.options import LaunchOptions
    from paceline.launch.plan import Question, local_workers, plan

    local = local_workers()
    with tempfile.TemporaryDirectory(prefix="paceline-simulate-") as folder:
        path = Path(folder) / "description.json"
        question, probing = Question(tries=0, machines=machine), min(workers or local, local)
        path.write_text(plan(LaunchOptions(what, workers=probing), question, "describe"))
        return command(what=str(path), machine=str(path), workers=workers, **given)


def _simulating(add: Callable[..., Any]) -> None:
    """Adds the command that simulates days with failures."""
    option = add(
        "simulate",
        _simulate,
        "simulate days on machines that fail: goodput, where the time goes, and what would change it",
        "examples:\n"
        "  paceline simulate --on cluster.json --workers 16384 --step-seconds 5.2\n"
        "  paceline simulate model.json --on cluster.json --workers 512 --plan tensor=8 --step-seconds 2.1\n"
        "  paceline simulate --on cluster.json --workers 512 --step-seconds 2.1 --sweep every=60..7200\n"
        "  paceline simulate train.py --on h100 --workers 64 --plan shard=8\n"
        "  paceline simulate runs/a --on cluster.json --days 7 --html days.html\n"
        "  paceline simulate runs/a --with workers=+2 --with link=2x --with 'host 1 gone' --with plan=zero=1",
        "Compares four ways of reacting to a loss. For a run, workers, steps, failures and checkpoints are those of its"
        " journal. A description of machines or of a model is a JSON file. A script runs up to its first step, to"
        " describe its model.",
    )
    option("what", nargs="?", metavar="RUN|MODEL.json|SCRIPT", help="run folder, description of a model, or script")
    option("--on", dest="machine", metavar="FILE|NAME", help="the machines; with a run: their failures only")
    option("--workers", least=1, metavar="N", help="number of workers (default: those of the run, or of one host)")
    option("--plan", allow_empty=True, metavar="TEXT", help="plan, for the size of a replica (default: one worker)")
    option("--step-seconds", type=partial(_real, "--step-seconds", 1e-6), metavar="S", help="seconds of a step")
    option(
        "--reaction",
        choices=["restart", "leave-out", "spare", "redo"],
        help="only this way of reacting to a loss (default: all; account and page are those of redo)",
    )
    option(
        "--save-every",
        metavar="60s|N|auto",
        help="interval of checkpoints: seconds, steps or the best (default 60s)",
    )
    option(
        "--save-seconds",
        type=partial(_real, "--save-seconds", 0.0),
        metavar="S",
        help="seconds that a checkpoint stops training (default: as measured, or 0)",
    )
    option("--days", type=partial(_real, "--days", 1e-3), default=1.0, metavar="D", help="days to simulate (default 1)")
    option("--steps", least=1, metavar="N", help="end after N steps, if these take less than --days")
    option("--faults", metavar="TEXT", help="exactly these failures, as for paceline chaos, instead of random ones")
    option("--seed", least=0, default=0, help="seed of the first simulation (default 0)")
    option("--seeds", least=1, default=20, metavar="K", help="number of simulations (default 20)")
    option(
        "--with",
        dest="changes",
        action="append",
        default=[],
        metavar="CHANGE",
        help="also simulate with one thing changed: workers=+2, link=2x, every=300, plan=TEXT or 'host 1 gone';"
        " repeatable. With --sweep, all of them are changed",
    )
    option("--sweep", metavar="WORD=A..B", help="table over every, spares, workers, worker_hours or bandwidth")
    option("--json", dest="as_json", action="store_true", help="print one JSON object, or a list with --sweep")
    option("--html", type=Path, metavar="FILE", help="also write a page with pictures")
    option("--trace", type=Path, metavar="FILE", help="also write the first simulation as a timeline for Perfetto")


def showing(add: Callable[..., Any]) -> None:
    """The commands that read a run's journal."""
    option = add(
        "metrics",
        _metrics,
        "list the metrics of a run, and print files for Prometheus and Grafana",
        "examples:\n"
        "  paceline metrics --rules > paceline-rules.yml           for rule_files of prometheus.yml\n"
        "  paceline metrics --dashboard > paceline-dashboard.json  to import into Grafana",
    )
    for what, does in {"rules": "alert rules", "dashboard": "a dashboard"}.items():
        option(f"--{what}", dest="what", action="store_const", const=what, default="table", help=f"print {does}")
    option = add(
        "watch",
        late("observe.watch", "watch"),
        "show a run in the terminal, during training or after its end",
        "examples:\n  paceline watch\n  paceline watch runs/a\n  paceline watch 10.0.0.7:8765 --key-file reading_key",
        "Reads the run folder, or the address given to --page. Ctrl-C stops watching; the run continues.",
    )
    where = "run folder (default: the newest under runs/), or HOST:PORT of its live page"
    option("folder", type=Path, nargs="?", metavar="RUN", help=where)
    option("--key-file", type=Path, metavar="FILE", help="copy of reading_key of the run folder (default: ask for it)")
    option("--once", action="store_true", help="show the present state once")
    option = add(
        "doctor",
        late("launch.engines.preflight_hosts", "doctor"),
        "explain why a run is slow or failed; without a run, check whether this host is ready",
        "examples:\n"
        "  paceline doctor runs/a\n"
        "  paceline doctor                      this host: versions, memory, /dev/shm, address, launcher\n"
        "  paceline doctor --hosts a,b,c        these hosts, over ssh, with their clocks and the links between them",
        "For a run, shows the most costly problem with measured figures, and predicts a step's time without it.",
    )
    option("folder", nargs="?", type=Path, metavar="RUN", help="run folder (default: check this host)")
    option("--hosts", metavar="A,B,..", help="check these hosts over ssh, and the links between them")
    option("--python", default=sys.executable, metavar="PATH", help="Python on the hosts (default: this one's path)")
    option("--engine", metavar="OPTIONS", help="options for ssh, like --engine='-F config'")
    option("--here", dest="serves", action="store_true", help=argparse.SUPPRESS)
    _simulating(add)
    option = add(
        "trace",
        late("observe.timeline", "trace"),
        "write a timeline of a run's workers, for Perfetto",
        "examples:\n  paceline trace runs/a\n  paceline trace runs/a --steps 100:120 -o trace.json",
        "Open it at https://ui.perfetto.dev. It shows the steps in the journal and the collectives in RUN/stacks/.",
    )
    option("folder", type=Path, metavar="RUN", help="run folder")
    option(
        "-o",
        "--out",
        type=Path,
        metavar="FILE",
        help="file to write, compressed if it ends in .gz (default RUN/trace.json.gz)",
    )
    option("--steps", metavar="A:B", help="only these steps (default: all)")
    option = add(
        "runs",
        late("observe.runs", "runs"),
        "list runs: plan, steps, loss, metrics, how each ended",
        "examples:\n  paceline runs\n  paceline runs /shared/runs runs/a --json",
        "Prints one line per run, the oldest first, and reads only the journals.",
    )
    option(
        "folders", type=Path, nargs="*", metavar="FOLDER", help="runs, or folders that contain runs (default: runs/)"
    )
    option("--json", dest="as_json", action="store_true", help="print a JSON list")
    option = add(
        "compare",
        late("observe.runs", "compare"),
        "compare the configuration and the results of runs",
        "examples:\n  paceline compare runs/a runs/b\n  paceline compare runs/* --html compared.html",
        "Compares plan, commit, script, packages and grid, loss and metrics at the same steps, and speed.",
    )
    option("folders", type=Path, nargs="+", metavar="RUN", help="run folders")
    option("--html", type=Path, metavar="FILE", help="also write a page that overlays their curves")
    does = "write RUN/report.html again and print its summary"
    option = add("report", write_report, does, "example:\n  paceline report runs/a")
    option("folder", type=Path, metavar="RUN", help="run folder")
